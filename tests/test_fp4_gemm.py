"""The 4-bit linear layer against float64: packing, forward, gradients, plans, and the Triton
kernels.
"""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import build, cuobjdump, each_generation

import fp4_gemm
import nvfp4
from fp4_gemm import Launch
from lora import Adapter


def random_weight(N, K, global_scale, largest=126):
    """Random codes, and scales from the e4m3 numbers 0 to `largest` (a bit pattern), subnormals
    included.
    """
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8)
    scale = torch.randint(largest + 1, (N, K // 16), dtype=torch.uint8)
    return codes, scale.view(torch.float8_e4m3fn), torch.tensor(global_scale)


def exact(q):
    """The format's definition, in float64: of a product of a code and a scale float32 holds every
    bit.
    """
    codes, block_scale, global_scale = q
    return nvfp4.dequantize((codes, block_scale, 1.0), torch.float64) * global_scale.double()


def reference(x, W, bias, lora_A, lora_B, splits):
    x, W, bias, lora_A, lora_B = (t.double() for t in (x, W, bias, lora_A, lora_B))
    parts = zip((x @ lora_A.T).split(lora_B.shape[1], 1), lora_B.split(splits), strict=True)
    return x @ W.T + bias + 0.5 * torch.cat([xa @ B.T for xa, B in parts], 1)


def dense(W, lora_B, splits):
    """W as an unquantised Dense weight, with the same adapter."""
    plain = fp4_gemm.Dense(W.to(lora_B.dtype))
    plain.adapt(lora_B.detach(), splits)
    return plain


def rel_err(y, ref):
    return ((y.double() - ref).norm() / ref.norm()).item()


def adapted_layer(M, sizes, K, rank, dtype=torch.float32):
    """x, the packed weight, its float64 value, bias and adapter. Global scales differ between
    parts.
    """
    qs = [random_weight(n, K, 0.001 * (i + 1), largest=72) for i, n in enumerate(sizes)]
    shapes = (M, K), (sum(sizes),), (rank * len(sizes), K), (sum(sizes), rank)
    x, bias, lora_A, lora_B = (torch.randn(s, dtype=dtype).requires_grad_() for s in shapes)
    return x, fp4_gemm.pack(*qs), torch.cat([exact(q) for q in qs]), bias, lora_A, lora_B


def check_forward_and_backward(x, weight, W, bias, A, B, splits, tolerance, learn=True):
    """Against float64. learn: A and B are parameters of which the layer multiplies copies, or they
    are what it multiplies. Backward needs x, x @ A.T, A and B: nothing as large as the weight is
    saved for it.
    """
    saved = []

    def save(t):
        saved.append(t.shape)
        return t

    lora = Adapter(A, B, splits, 0.5)
    if learn:
        lora = Adapter(A.detach(), B.detach(), splits, 0.5, A, B)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        y = fp4_gemm.linear(x, weight, bias, lora)
    assert set(saved) == {x.shape, (len(x), len(A)), A.shape, B.shape}
    inputs = x, bias, A, B
    wide = [t.detach().double().requires_grad_() for t in inputs]
    ref = reference(wide[0], W, *wide[1:], splits)
    dy = torch.randn_like(y)
    found = y.detach(), *torch.autograd.grad(y, inputs, dy)
    right = ref.detach(), *torch.autograd.grad(ref, wide, dy.double())
    errors = [rel_err(ours, theirs) for ours, theirs in zip(found, right, strict=True)]
    assert max(errors) < tolerance, errors


def all_codes_and_scales():
    """Row c: 8 blocks that hold all 16 codes; 127 rows, one for each scale."""
    packed = torch.arange(0x10, 0x100, 0x22).to(torch.uint8).repeat(127, 8)  # 0x10, 0x32, …, 0xFE
    scale = torch.arange(127, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e4m3fn)
    return packed, scale, torch.tensor(2.0**-3)


@pytest.mark.parametrize("M, sizes, K", [(13, (70, 33, 5), 208), (1, (64,), 128)])
def test_linear_on_the_cpu(M, sizes, K):
    """fp32 sums of K < 300 terms: their rounding, about sqrt(K) · 2^-24, stays below 2^-18."""
    x, packed, W, bias, lora_A, lora_B = adapted_layer(M, sizes, K, rank=3)
    plain = dense(W, 0 * lora_B, sizes)
    captured = plain.weight_and_B  # by a CUDA graph, say
    plain.adapt(lora_B.detach(), sizes)
    assert plain.weight_and_B is captured and torch.equal(plain.weight, W.float())
    for weight, learn in ((packed, True), (packed, False), (plain, True)):
        check_forward_and_backward(x, weight, W, bias, lora_A, lora_B, sizes, 2**-18, learn)


def test_mistakes_are_named():
    codes, scale, g = q = random_weight(8, 32, 1.0)
    negative = torch.full((8, 2), -1.0).to(torch.float8_e4m3fn)
    for qs, words in (
        ([(codes[:, :12], scale[:, :1], g)], "K a multiple of 16"),
        ([q, random_weight(8, 48, 1.0)], r"do not make \(N, 32\)"),
        ([(codes, negative, g)], "negative or NaN"),
    ):
        with pytest.raises((ValueError, AssertionError), match=words):
            fp4_gemm.pack(*qs)
    packed, x, A, B = fp4_gemm.pack(q), torch.randn(2, 32), torch.randn(4, 32), torch.randn(8, 2)
    turned, bias = A.T.contiguous().T, torch.randn(7)
    for arguments, words in (
        ((x[:, :16], packed), "K=16"),
        ((x.double(), packed), "float64"),
        ((x, packed, bias), r"bias torch.Size\(\[7\]\)"),
        ((x, packed, None, Adapter(turned, B, (4, 4), 1.0)), "not all .*contiguous"),
        ((x, packed, None, Adapter(A, B, (4, 3), 1.0)), "splits"),
        ((x, fp4_gemm.Dense(A), None, Adapter(A[:2], B[:4], (4,), 1.0)), "call its adapt"),
    ):
        with pytest.raises(AssertionError, match=words):
            fp4_gemm.linear(*arguments)


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
            assert m < max(9, 2 * M) and -(-M // m) <= 32
            assert m < 64 or m <= M or m == 256  # TMA would fill in zeros
        assert at == -(-N // 64) * 64


def test_a_plan_fills_132_sms():
    """gate_up of a 7B: two full waves of 132 large tiles, then 32 tiles with K split over three
    CTAs.
    """
    plan = fp4_gemm._plan(256, 37888, 3584, gpu(9))
    assert plan == [(0, 264, 256, 128, 1, 3), (264, 32, 256, 128, 3, 3)]
    assert len(fp4_gemm._plan(256, 37888, 3584, gpu(8))) == 1, "no wgmma, no large tiles"
    for M, K, m, split in ((1, 3584, 8, 5), (64, 3584, 64, 5), (128, 27648, 128, 3)):
        (launch,) = fp4_gemm._plan(M, 4608, K, gpu(9))
        assert (launch.tile_m, launch.split_k) == (m, split)


# --- the Triton kernels without a GPU


def interpreted():
    q = all_codes_and_scales()
    p, out = fp4_gemm.pack(q), torch.full((127, 133), float("nan"))
    fp4_gemm._dequantize_kernel[2,](*p[:3], out, *p.shape, 133, 1, fp4_gemm.SCALE_EXPONENT)
    assert torch.equal(out[:, :128].double(), exact(q)) and out[:, 128:].isnan().all()
    # in most, the last tile of x, of W, of k and of the adapter is not full
    for M, sizes, K, rank, m, split in (
        (1, (70, 33, 5), 1040, 5, 8, 2),
        (33, (130,), 272, 3, 32, 2),
        (67, (60, 70), 272, 35, 64, 3),
        (260, (70, 180), 400, 5, 256, 3),
    ):
        x, packed, W, bias, A, B = (
            t.detach() if torch.is_tensor(t) else t for t in adapted_layer(M, sizes, K, rank)
        )
        n = 128 if m == 256 else 64
        plan = [Launch(0, 1, m, n, 1, 3), Launch(1, (sum(sizes) - 1) // n, m, n, split, 3)]
        right = reference(x, W, bias, A, B, sizes)
        adapter, plain = Adapter(A, B, sizes, 0.5), dense(W, B, sizes)
        xa, _ = fp4_gemm._launch_shrink(x, packed, adapter, False)
        y = fp4_gemm._launch_linear(x, packed, bias, adapter, xa, plan, False)
        base = fp4_gemm._launch_linear(x, packed, None, None, None, plan, False)
        plain_xa, _ = fp4_gemm._launch_shrink(x, plain, adapter, False)
        same = fp4_gemm._forward_gemm(x, plain_xa, plain, bias, adapter)
        assert (
            max(
                rel_err(y, right),
                rel_err(xa, 0.5 * x.double() @ A.double().T),
                rel_err(same, right),
                rel_err(base, x.double() @ W.T),
            )
            < 2**-18
        )
        assert not packed.counters.any() and not plain.counters.any(), (
            "the last arriver resets its counter"
        )


def test_kernels_in_the_interpreter(interpret):
    """Bit-exact decode; results to fp32's rounding; counters reset."""
    interpret(interpreted)


def compile_linear(cc, M, rank, names_of):
    """Compile what serves M rows, with the registers that let as many CTAs as planned share an
    SM.
    """
    _, _, m, n, _, stages = fp4_gemm._plan(M, 37888, 3584, gpu(cc // 10))[-1]
    if m < min(M, 128):  # without wgmma no tile has more than 32 rows
        return
    constants = dict(TILE_M=m, TILE_N=n, RANK=rank, PDL=cc >= 90, bias=None)
    if rank:
        constants |= dict(SPLITS=(3584, 512, 512), SPLIT_K=5)
    else:
        constants |= dict(SPLITS=(), SPLIT_K=1, xa=None, lora_B=None)
    if m >= 64:
        names_of = names_of | {f"tensordesc<bf16[{m},64]>": "x"}
    most, stack = 255, 0
    if rank < 128:  # a CTA has 2 n threads; registers are allocated by eights
        most = min(255, 65536 // (2 * n) // fp4_gemm.CTAS_PER_SM.get(m, 1) // 8 * 8)
    if rank and m == 256:
        # A large tile uses all 255 registers and spills, outside the loop, what its epilogue needs:
        # 16 bf16 of B a thread, 32 bytes; 4 scales, 16; at most 6 addresses, 48.
        stack = 96
    elif (cc, m, rank) == (100, 64, 0):
        stack = 24  # Triton 3.9 keeps three addresses in memory; this kernel never ran there
    elif (cc, m, rank) == (100, 8, 32):
        stack = 8  # one register, stored before the main loop and loaded after it; never ran there
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
        "*i32": "words scales counters",
        "*fp32": "global_scales partial_sums",
        "fp32": "scale",
        "*bf16": "x xa lora_A lora_B y out",
    }
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
    x, packed, W, *others = adapted_layer(M, sizes, K, 32, torch.bfloat16)
    check_forward_and_backward(x, packed, W, *others, sizes, 2**-8)
    W = W.bfloat16().double()
    check_forward_and_backward(x, dense(W, others[-1], sizes), W, *others, sizes, 2**-8)


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
    sizes = (576, 192, 192)
    x, packed, W, bias, A, B = adapted_layer(M, sizes, 576, 32, torch.bfloat16)

    def result(B):
        weight = dense(W, B, sizes) if plain else packed
        return fp4_gemm.linear(x, weight, bias, Adapter(A, B, sizes, 0.5)).detach().double()

    base, adapted = result(0 * B), result(B)
    # an ulp is 2^-8 to 2^-7 of y
    small = B * (2**-11 * base.norm() / (adapted - base).norm()).item()
    delta = reference(x, 0 * W, 0 * bias, A, small, sizes)
    assert abs(((result(small) - base) * delta).sum() / delta.square().sum() - 1) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 16, 32, 64, 128, 256])
@torch.no_grad()
def test_a_thousand_launches_give_the_same_bits(on_gpu, M):
    """Eagerly and in a CUDA graph: a race between the splits of K, or with the shrink kernel,
    changes bits. Two inputs alternate at one address: data that the previous launch left, in L1
    too, would show as well.
    """
    for (sizes, K), plain in itertools.product(SIZES[:3], (False, True)):
        x, packed, W, bias, *learn = adapted_layer(M, sizes, K, 32, torch.bfloat16)
        weight, xs = dense(W, learn[1], sizes) if plain else packed, (x, torch.randn_like(x))
        options = weight, bias, Adapter(*learn, sizes, 0.5)
        right = torch.stack([fp4_gemm.linear(x, *options) for x in 5 * xs])
        graph, there = torch.cuda.CUDAGraph(), torch.empty_like(x)
        with torch.cuda.graph(graph):
            ys = [fp4_gemm.linear(there.copy_(x), *options) for x in 5 * xs]
        for _ in range(100):
            for y in ys:
                y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(torch.stack(ys), right)
        assert not weight.counters.any()


@pytest.mark.gpu
def test_rows_from_the_middle_of_a_tensor(on_gpu):
    """x begins two bytes past a multiple of 16: neither TMA nor a vector load may start there."""
    q = random_weight(128, 256, 0.001)
    x = torch.randn(64 * 256 + 1, dtype=torch.bfloat16)[1:].view(64, 256)
    y = fp4_gemm.linear(x, fp4_gemm.pack(q))
    assert x.data_ptr() % 16 and rel_err(y, x.double() @ exact(q).T) < 2**-8


@pytest.mark.gpu
def test_gpu_decodes_every_code_with_every_scale_exactly(on_gpu):
    """Also in a part of wider rows; what is beside it keeps its zeros."""
    q = all_codes_and_scales()
    packed, wide = fp4_gemm.pack(q), torch.zeros(127, 136, dtype=torch.bfloat16)
    fp4_gemm.dequantize(packed, out=wide[:, :128])
    assert torch.equal(wide[:, :128].double(), exact(q)) and not wide[:, 128:].any()
