"""The 4-bit product against float64: packing, products, plans, Triton kernels."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import build, cuobjdump, each_generation
from torch.utils._python_dispatch import TorchDispatchMode

import fp4_gemm
import nvfp4
from fp4_gemm import Launch
from lora import LowRank


def all_codes_and_scales():
    """Row c: all bytes, with scale c."""
    codes = torch.arange(256).to(torch.uint8).repeat(127, 1)
    scales = torch.arange(127).to(torch.uint8)[:, None].repeat(1, 32)
    return nvfp4.NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.tensor(0.5))


def exact(q):
    """The format's definition, in float64: of a product of a code and a scale float32 holds every
    bit.
    """
    return nvfp4.dequantize(q._replace(global_scale=1.0), torch.float64) * q.global_scale.double()


def case(M, sizes, K, rank, dtype=torch.float32):
    """x, the packed weight, its float64 value, bias and adapter. Each part has another global
    scale, no power of two.
    """
    qs = [nvfp4.quantize(torch.randn(n, K), "rtn", 0.01 / (i + 1)) for i, n in enumerate(sizes)]
    shapes = (M, K), (sum(sizes),), (rank * len(sizes), K), (sum(sizes), rank)
    x, bias, A, B = (torch.randn(shape, dtype=dtype) for shape in shapes)
    W = torch.cat([exact(q) for q in qs])
    return x, fp4_gemm.pack(*qs), W, bias, LowRank(A, B, sizes, 0.5)


def dense(W, low_rank):
    """W as an unquantised Dense weight, with the same adapter."""
    plain = fp4_gemm.Dense(W.to(low_rank.B.dtype))
    plain.store_B(low_rank.B, low_rank.splits)
    return plain


def reference(x, W, bias, low_rank):
    """→ y without the low-rank term, its term and xa, in float64."""
    A, B, splits, scale = low_rank
    xa = scale * x.double() @ A.double().T
    term = xa @ torch.block_diag(*B.double().split(splits)).T
    return x.double() @ W.T + bias.double(), term, xa


def largest_error(*pairs):
    return max(((y.double() - right).norm() / right.norm()).item() for y, right in pairs)


def check(x, weight, W, bias, low_rank, tolerance):
    """All that other files call, against float64."""
    base, term, right_xa = reference(x, W, bias, low_rank)
    y, xa = fp4_gemm.product(x, weight, bias, low_rank)
    _, same_xa = fp4_gemm.product(x, weight, bias, low_rank, False)
    dy, add_to = torch.randn_like(y), torch.randn_like(x)
    dx = dy.double() @ W
    leaf = x[None].requires_grad_()
    plain = fp4_gemm.linear(leaf, weight, bias)
    plain.backward(dy[None])
    error = largest_error(
        (y, base + term),
        (xa, right_xa),
        (same_xa, right_xa),
        (plain[0], base),
        (leaf.grad[0], dx),
        (fp4_gemm.input_gradient(dy, weight, add_to.clone()), dx + add_to),
    )
    assert error < tolerance


@pytest.mark.parametrize("M, sizes, K", [(13, (70, 33, 5), 208), (1, (64,), 128)])
def test_products_on_the_cpu(M, sizes, K):
    """fp32 sums of K < 300 terms: their rounding, about sqrt(K) · 2^-24, stays below 2^-18."""
    x, packed, W, bias, low_rank = case(M, sizes, K, rank=3)
    plain = dense(W, low_rank._replace(B=0 * low_rank.B))
    captured = plain.weight_and_B  # by a CUDA graph, say
    plain.store_B(low_rank.B, sizes)
    assert plain.weight_and_B is captured and torch.equal(plain.weight, W.float())
    for weight in (packed, plain):
        check(x, weight, W, bias, low_rank, 2**-18)


def test_wrong_tensors_are_refused():
    """Of another dtype or shape, or not contiguous. pack also refuses a negative scale."""
    q = nvfp4.quantize(torch.randn(8, 32))
    codes, scales = q.packed, q.block_scale
    for wrong in (
        q._replace(packed=codes.char()),
        q._replace(packed=codes[:, 4:]),
        q._replace(packed=codes[:, 4:], block_scale=scales[:, 1:]),  # K = 24
        q._replace(block_scale=scales.float()),
        q._replace(global_scale=q.global_scale.to("meta")),
        q._replace(block_scale=(-scales.float()).to(scales.dtype)),
    ):
        with pytest.raises((ValueError, AssertionError)):
            fp4_gemm.pack(wrong)

    def product(x, bias, A, B, splits=(4, 4)):
        return fp4_gemm.product(x, fp4_gemm.pack(q), bias, LowRank(A, B, splits, 1.0))

    right = [torch.randn(shape) for shape in ((2, 32), (8,), (4, 32), (8, 2))]
    product(*right)
    with pytest.raises(AssertionError):
        product(*right, (4, 3))
    for i, t in enumerate(right):
        for wrong in (t.double(), t[..., 1:].clone(), torch.stack((t, t), -1)[..., 0]):
            with pytest.raises(AssertionError):
                product(*right[:i], wrong, *right[i + 1 :])


def gpu(major, sms=132):
    return SimpleNamespace(major=major, multi_processor_count=sms)


@pytest.mark.parametrize("N, K", [(37888, 3584), (5120, 27648), (576, 576), (77, 208)])
def test_a_plan_covers_every_tile_once(N, K):
    """On every GPU: no split of K is empty, and no tile leaves half of its rows unused."""
    rows = 1, 8, 9, 63, 64, 127, 128, 129, 191, 192, 256
    for M, generation, sms in itertools.product(rows, (8, 9, 10), (78, 114, 132, 188)):
        at = 0
        for first, tiles, m, n, split_k, _ in fp4_gemm._plan(M, N, K, gpu(generation, sms)):
            assert first * n == at and tiles > 0
            at += tiles * n
            assert 1 <= split_k <= max(1, K // 256)
            assert m < max(9, 2 * M) and -(-M // m) <= 16  # so many counters are there
            assert m < 64 or m <= M or m == 256  # TMA would fill in zeros
        assert at == -(-N // 64) * 64


def test_a_plan_fills_132_sms():
    """gate_up of a 7B: two full waves of large tiles, then a rest with K split over three CTAs."""
    plan = fp4_gemm._plan(256, 37888, 3584, gpu(9))
    assert plan == [(0, 264, 256, 128, 1, 3), (264, 32, 256, 128, 3, 3)]
    assert fp4_gemm._plan(64, 4608, 3584, gpu(9)) == [(0, 72, 64, 64, 5, 3)]
    assert fp4_gemm._plan(256, 37888, 3584, gpu(8)) == [(0, 592, 32, 64, 1, 4)]


# --- the Triton kernels without a GPU


def check_decoding(dtype=torch.float32):
    """Bit-exact, also in a part of wider rows. What is beside it keeps its zeros."""
    q = all_codes_and_scales()
    packed, wide = fp4_gemm.pack(q), torch.zeros(127, 520, dtype=dtype)
    fp4_gemm.dequantize(packed._replace(dense=None), out=wide[:, :512])
    plain = fp4_gemm.plain_product(torch.eye(512, dtype=dtype), *q)
    for W in (wide[:, :512], plain.T):
        assert torch.equal(W.double(), exact(q))
    assert not wide[:, 512:].any()


def interpreted():
    check_decoding()
    # in most, the last tile of x, of W, of k and of the adapter is not full
    for M, sizes, K, rank, m, split in (
        (1, (70, 33, 5), 1040, 5, 8, 2),
        (33, (130,), 272, 3, 32, 2),
        (67, (60, 70), 272, 35, 64, 3),
        (260, (70, 180), 400, 5, 256, 3),
    ):
        x, packed, W, bias, low_rank = case(M, sizes, K, rank)
        n = 128 if m == 256 else 64
        plan = [Launch(0, 1, m, n, 1, 3), Launch(1, (sum(sizes) - 1) // n, m, n, split, 3)]
        fp4_gemm._plan = lambda *_, plan=plan: plan  # in a process of its own
        base, term, right_xa = reference(x, W, bias, low_rank)
        q = nvfp4.quantize(torch.randn(sizes[0], K), "rtn", 0.01)
        y, xa = fp4_gemm._launch_linear(x, packed, bias, low_rank, gpu(8))
        without_lora, none = fp4_gemm._launch_linear(x, packed, None, None, gpu(8))
        assert none is None
        error = largest_error(
            (y, base + term),
            (xa, right_xa),
            (fp4_gemm._launch_shrink(x, dense(W, low_rank), low_rank, gpu(8)), right_xa),
            (without_lora, base - bias),
            (fp4_gemm.plain_product(x, *q), x.double() @ exact(q).T),
        )
        assert error < 2**-18 and not packed.counters.any(), "the last CTA resets its counter"


def test_kernels_in_the_interpreter(interpret):
    """Bit-exact decode; results to fp32's rounding; counters reset."""
    interpret(interpreted)


def test_nothing_runs_between_the_shrink_kernel_and_the_main_kernel(monkeypatch):
    """The main kernel stores partial sums before it waits. PyTorch's fill of new memory, which
    deterministic algorithms bring, overwrote some of them when it ran between the two.
    """
    ran = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ran.append(str(op))
            return op(*args, **kwargs or {})

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *_, **__: ran.append(self.name)

    for name in ("_shrink_kernel", "_linear_kernel"):
        monkeypatch.setattr(fp4_gemm, name, Kernel(name))
    plan = [Launch(0, 1, 16, 64, 1, 3), Launch(1, 1, 16, 64, 2, 3)]
    monkeypatch.setattr(fp4_gemm, "_plan", lambda *_: plan)
    x, packed, _, bias, low_rank = case(33, (130,), 272, 3)
    with Recorded():
        fp4_gemm._launch_linear(x, packed, bias, low_rank, gpu(9))
    assert ran[ran.index("_shrink_kernel") :] == ["_shrink_kernel"] + 2 * ["_linear_kernel"]


# (capability, rows of x in a tile, rank) → bytes that the main kernel spills, outside its loop.
# A large tile uses all 255 registers, and spills what its epilogue needs: 16 bf16 of B a thread, 32
# bytes; 4 scales, 16; at most 6 addresses, 48. The kernels of 100 never ran there: Triton 3.9 keeps
# three addresses in memory, or one register.
SPILLS = {(90, 256, 32): 96, (100, 64, 0): 24, (100, 8, 32): 8}


def compile_linear(cc, M, rank, names_of):
    """Compile what serves M rows, with the registers that let as many CTAs as planned share an
    SM.
    """
    _, _, m, n, _, stages = fp4_gemm._plan(M, 37888, 3584, gpu(cc // 10))[-1]
    if m < min(M, 128):  # without wgmma no tile has more than 32 rows
        return
    constants = dict(TILE_M=m, TILE_N=n, RANK=rank, PDL=cc >= 90, bias=None)
    if rank:
        constants |= dict(PART_WIDTHS=(3584, 512, 512), SPLIT_K=5)
    else:
        constants |= dict(PART_WIDTHS=(), SPLIT_K=1, xa=None, lora_B=None)
    if m >= 64:
        names_of = names_of | {f"tensordesc<bf16[{m},64]>": "x"}
    most = 255
    if rank < 128:  # a CTA has 2 n threads; registers are allocated by eights
        most = min(255, 65536 // (2 * n) // fp4_gemm.CTAS_PER_SM.get(m, 1) // 8 * 8)
    stack = SPILLS.get((cc, m, rank), 0)
    _, cubin = build(
        fp4_gemm._linear_kernel, cc, constants, names_of, "NKR", n // 16, stages, most, stack
    )
    if cc == 90 and rank == 32:
        loop = main_loop(cuobjdump("-sass", cubin))
        per_weight = len(loop) / 64  # 2 n threads decode 128 n weights in an iteration
        assert 2 < per_weight < 4, f"M={M}: {per_weight:.2f} instructions a weight in the main loop"
        if m >= 16:
            check_registers_of_wgmma(loop, turn=128 // n)


def main_loop(sass):
    """The main loop's instructions: of the ranges from a backward branch's target to the branch,
    the shortest with all 8 products. (A warp that waited at a barrier jumps back over a longer
    range.)
    """
    code = [
        (int(at, 16), text.strip())
        for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", sass)
    ]
    loops = []
    for end, branch in code:
        if target := re.search(r"BRA.* 0x([0-9a-f]+)", branch):
            loop = [text for at, text in code if int(target[1], 16) <= at <= end]
            if sum("MMA" in text for text in loop) >= 8:
                loops.append(loop)
    return min(loops, key=len)


def check_registers_of_wgmma(loop, turn):
    """No instruction overwrites a register that a wgmma in flight reads, and the wgmmas share waits
    instead of each having its own. turn: waits in one iteration of the loop.
    """
    in_flight, seen, waits = set(), 0, 0
    for text in 2 * loop:  # twice: an iteration's last wait may be in the next one
        result = re.match(r"(?:@!?U?P\d+ +)?(\S+) R(\d+),", text)
        if wgmma := re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", text):
            in_flight |= {int(wgmma[1]) + i for i in range(4)}
            seen += 1
        elif text.endswith("gsb0, 0x0"):
            in_flight, waits = set(), waits + 1
        elif result and result[1] != "LDGSTS":
            width = 4 if re.search("64|128|WIDE|M88", result[1]) else 1  # or 2, but not more
            written = {int(result[2]) + i for i in range(width)}
            assert not written & in_flight, (
                f"'{text}' overwrites a register that a wgmma in flight reads"
            )
    assert (seen, waits) == (16, 2 * turn)


@each_generation
def test_kernels_compile(cc, everything):
    """No spills, shared memory within limits, on sm_90 under 4 instructions a weight: an H200's
    budget.
    """
    names_of = {
        "*i32": "words counters",
        "*fp32": "global_scales global_scale partial_sums",
        "fp32": "scale",
        "*bf16": "x xa lora_A lora_B y out e2m1",
        "*i64": "codes",
    }
    build(fp4_gemm.plain_kernel, cc, dict(TILE=64), names_of | {"*u8": "scales"}, "")
    names_of["*i32"] += " scales"
    jobs = [(1, 32), (16, 32), (64, 0), (256, 32)]
    if everything:
        jobs = [*itertools.product((1, 16, 32, 64, 128, 256), (0, 32)), (64, 128)]
    for M, rank in jobs:
        compile_linear(cc, M, rank, names_of)
    for m, split in ((8, 1), (16, 28)):
        constants = dict(TILE_M=m, TILE_R=32, SPLIT_K=split, PDL=cc >= 90)
        build(fp4_gemm._shrink_kernel, cc, constants, names_of, "NKR", 2, 5)
    build(fp4_gemm._dequantize_kernel, cc, {}, names_of, "NKR")


# --- on a GPU


@pytest.fixture
def on_gpu():
    """What the test makes is on the GPU."""
    with torch.device("cuda"):
        yield


SIZES = [
    ((3584, 512, 512), 3584),
    ((18944, 18944), 3584),
    ((3584,), 18944),
    ((77, 5), 208),
    ((1536, 1536), 576),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, K", SIZES)
@pytest.mark.parametrize("M", [1, 16, 17, 33, 64, 100, 129, 256, 300])
def test_gpu_forward_and_backward(on_gpu, M, sizes, K):
    """A bf16 rounding is an error of 1.7e-3; the worst path has three (weight, product, sum):
    2.9e-3.
    """
    x, packed, W, bias, low_rank = case(M, sizes, K, 32, torch.bfloat16)
    check(x, packed, W, bias, low_rank, 2**-8)
    # x begins two bytes past a multiple of 16: neither TMA nor a vector load may start there
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(M, K)
    assert shifted.data_ptr() % 16
    check(shifted, packed, W, bias, low_rank, 2**-8)
    W = W.bfloat16().double()
    check(x, dense(W, low_rank), W, bias, low_rank, 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("M", [64, 256, 2048])
def test_gpu_an_adapter_below_the_last_bit_is_not_lost(on_gpu, M, plain):
    """δ, what the adapter adds, is an eighth of y's last bit. If the kernel rounds y once, <y(B) −
    y(0), δ> / <δ, δ> is 1 on average, here ± .013 (M = 64: 0.4 ulp / 0.125 ulp / √61440). If it
    also rounds x @ W.T before it adds δ, as cuBLAS does on an H200 at β = 1, the ratio is .39 (both
    simulated on a CPU). The sampler's kernels run at M = 64 and 256, the trainer's product at
    larger M.
    """
    x, packed, W, bias, low_rank = case(M, (576, 192, 192), 576, 32, torch.bfloat16)
    base, term, _ = reference(x, W, bias, low_rank)
    ys = []
    # an ulp is 2^-8 to 2^-7 of y
    for factor in (0, (2**-11 * base.norm() / term.norm()).item()):
        scaled = low_rank._replace(B=low_rank.B * factor)
        weight = dense(W, scaled) if plain else packed
        ys.append(fp4_gemm.product(x, weight, bias, scaled)[0].double())
    _, delta, _ = reference(x, W, bias, scaled)
    y_0, y = ys
    assert abs(((y - y_0) * delta).sum() / delta.square().sum() - 1) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 32, 64, 128, 256])
def test_a_thousand_launches_give_the_same_bits(on_gpu, M):
    """Eagerly and in a CUDA graph: a race between the splits of K, or with the shrink kernel,
    changes bits. Two inputs alternate at one address: data that the previous launch left, in L1
    too, would show as well.
    """
    for (sizes, K), plain in itertools.product(SIZES[:3], (False, True)):
        x, packed, W, bias, low_rank = case(M, sizes, K, 32, torch.bfloat16)
        weight, xs = dense(W, low_rank) if plain else packed, (x, torch.randn_like(x))
        right = [fp4_gemm.product(x, weight, bias, low_rank)[0] for x in 5 * xs]
        graph, there = torch.cuda.CUDAGraph(), torch.empty_like(x)
        with torch.cuda.graph(graph):
            ys = [fp4_gemm.product(there.copy_(x), weight, bias, low_rank)[0] for x in 5 * xs]
        for _ in range(100):
            for y in ys:
                y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(torch.stack(ys), torch.stack(right))
        assert not packed.counters.any(), "the last CTA resets its counter"


@pytest.mark.gpu
def test_gpu_decodes_every_code_with_every_scale_exactly(on_gpu):
    check_decoding(torch.bfloat16)
