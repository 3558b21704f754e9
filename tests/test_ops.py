"""A block's operations against transformers and a plain attention; kernels against plain torch."""

from types import SimpleNamespace

import pytest
import torch
from conftest import build, compile_with_a_wait, each_generation

from ops import attention, elementwise


def same(ours, plain, atol):
    torch.testing.assert_close(ours, plain, atol=atol, rtol=0)


def test_norm_rope_and_swiglu_equal_their_references():
    """transformers' RMSNorm and rotation, and the formula of SwiGLU, on odd sizes."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    x, norm = torch.randn(3, 5, 37).bfloat16(), LlamaRMSNorm(37, 1e-3)
    weight = norm.weight.data.normal_()
    ours = elementwise.rms_norm(x.float(), weight, 1e-3)
    same(ours, norm(x.float()), 2e-6)
    same(
        elementwise.rms_norm(x, weight, 1e-3), ours.bfloat16(), 0
    )  # bf16 is rounded once, at the end
    q, angle = torch.randn(3, 5, 7, 6), torch.randn(3, 5, 3)
    twice = angle.repeat(1, 1, 2)
    theirs, _ = apply_rotary_pos_emb(q, q, twice.cos(), twice.sin(), unsqueeze_dim=2)
    same(attention.rope(q, angle.cos(), angle.sin()), theirs, 1e-6)
    gate, up = torch.randn(2, 11)
    same(elementwise.swiglu(torch.cat([gate, up])), gate * gate.sigmoid() * up, 1e-6)


def attention_by_hand(q, k, v):
    """One query (H, Dh), keys and values (n, Hkv, Dh) → (H·Dh,) f64, with a key head for each query
    head.
    """
    H, Dh = q.shape
    k, v = (x.double().repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    weights = (torch.einsum("hd,nhd->hn", q.double(), k) / Dh**0.5).softmax(1)
    return torch.einsum("hn,nhd->hd", weights, v).flatten()


@pytest.mark.parametrize("H, Hkv", [(6, 6), (6, 2)])
def test_causal_attention_equals_its_definition(H, Hkv):
    """Also where query heads share a key head."""
    q, k, v = torch.randn(2, 9, H + 2 * Hkv, 7).split((H, Hkv, Hkv), 2)
    full = attention.causal_attention(q, k, v)
    for t in range(9):  # fp32 sums of 9 products of about 3
        by_hand = attention_by_hand(q[1, t], k[1, : t + 1], v[1, : t + 1])
        same(full[1, t].double(), by_hand, 2e-6)


def decode_step(H, Hkv, Dh, positions, length, head_norms, dtype=torch.float32):
    """→ random arguments of cached_attention. Slots are shuffled, two belong to no row. Rows 2i and
    2i + 1 share a prompt: the positions that both have passed are equal, and row 2i is the
    leader.
    """
    B = len(positions)
    positions = torch.tensor(positions)
    slots = torch.randperm(B + 2)[:B]
    k, v = kv = torch.randn(2, 2, B + 2, Hkv, length, Dh, dtype=dtype)
    shared, leaders = torch.zeros_like(slots), slots.clone()
    for b in range(1, B, 2):
        n = max(0, int(positions[b - 1 : b + 1].min()))
        leaders[b], shared[b] = slots[b - 1], n
        kv[:, :, slots[b], :, :n] = kv[:, :, slots[b - 1], :, :n]
    cache = SimpleNamespace(
        k=k,
        v=v,
        slots=slots,
        shared=shared,
        leaders=leaders,
        pieces=-(-length // attention.SPLIT),
        counters=torch.zeros((B + 2) * Hkv, dtype=torch.int32),
    )
    angle = positions[:, None] * torch.rand(Dh // 2)
    norms = (*(torch.rand(2, Dh) + 0.5), 1e-5) if head_norms else None
    qkv = torch.randn(B, (H + 2 * Hkv) * Dh, dtype=dtype)
    return qkv, norms, angle.cos(), angle.sin(), cache, 1, positions


def spoil(cache):
    """Overwrite the copies of shared positions that fill a tile of any size: only a leader's may be
    read.
    """
    for b in range(1, len(cache.slots), 2):
        n = cache.shared[b] // 256 * 256
        cache.k[:, cache.slots[b], :, :n] = cache.v[:, cache.slots[b], :, :n] = 100.0


@pytest.mark.parametrize("H, Hkv, head_norms", [(6, 6, False), (6, 2, True), (5, 1, False)])
def test_a_decode_step_equals_its_definition(H, Hkv, head_norms):
    """q and k are normalised and rotated, k and v are written at the row's position in its slot,
    attention reads 0 … position. Nothing is written for a finished row or in other slots."""
    arguments = decode_step(H, Hkv, 8, [0, 12, -1, 7], 13, head_norms)
    qkv, norms, cos, sin, cache, _, positions = arguments
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    out = attention.cached_attention(*arguments)
    q, k, v = qkv.view(4, -1, 8).split((H, Hkv, Hkv), 1)
    if norms:
        q, k = elementwise.rms_norm(q, norms[0], 1e-5), elementwise.rms_norm(k, norms[1], 1e-5)
    q, k = attention.rope(q, cos, sin), attention.rope(k, cos, sin)
    for b in (0, 1, 3):
        read = cache.slots[b], slice(None), slice(positions[b] + 1)
        keys, values = expected_k[1][read], expected_v[1][read]
        keys[:, -1], values[:, -1] = k[b], v[b]
        by_hand = attention_by_hand(q[b], keys.transpose(0, 1), values.transpose(0, 1))
        same(out[b].double(), by_hand, 2e-6)
    same(cache.k, expected_k, 1e-6)
    same(cache.v, expected_v, 0)


# --- Triton kernels without a GPU

# positions at the edges of tiles and pieces, the last one, and −1: a finished row
EDGES = [0, 127, 128, 255, 256, 511, 512, 599, -1]


def learning(D, F, H, Dh):
    """→ (kernels, plain lines, inputs with a gradient, others without) of each function that
    learns.
    """
    x, y, w = torch.randn(5, D), torch.randn(5, D), torch.randn(D)
    part = torch.randn(2, 3, H + 3, Dh)[:, :, 1 : H + 1]  # strided, like q in qkv
    angle = torch.rand(2, 3, Dh // 2) * 7
    yield elementwise.AddNorm.apply, elementwise.add_norm, [x, y], [w, 1e-5, torch.float32]
    yield elementwise.AddNorm.apply, elementwise.add_norm, [x, None], [w, 1e-5, torch.float32]
    yield attention.Rope.apply, attention.rope, [part], [angle.cos(), angle.sin()]
    for rows in (3, 17):
        yield elementwise.SwiGLU.apply, elementwise.swiglu, [torch.randn(rows, 2 * F)], []


def with_gradients(function, inputs, others, turned=False):
    """→ results, and the gradients of their sum in which each element has its own weight.
    turned: inputs and gradients have their last two dimensions transposed in memory."""

    def placed(t):
        return t.mT.contiguous().mT if turned else t

    inputs = [t if t is None else placed(t).detach().requires_grad_() for t in inputs]
    out = function(*inputs, *others)
    out = [out] if torch.is_tensor(out) else out
    total = 0
    for o in out:
        weight = torch.arange(o.numel()).view(o.shape).mul(0.37).cos()
        total += (o * placed(weight)).sum()
    return [*out, *torch.autograd.grad(total, [t for t in inputs if t is not None])]


def on_cpu(value):
    """A copy whose tensors are on a CPU, fractions in fp32."""
    if isinstance(value, (list, tuple)):
        return [on_cpu(part) for part in value]
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: on_cpu(part) for name, part in vars(value).items()})
    if not torch.is_tensor(value):
        return value
    return value.clone().cpu().float() if value.is_floating_point() else value.cpu()


def attention_and_cache(kernel, arguments):
    """→ (ours, expected) of live rows' results, keys and values. The kernel may not read a row's
    own copies of shared positions.
    """
    *_, cache, _, positions = arguments
    right = on_cpu(arguments)
    plain, expected = attention.cached_attention(*right), right[4]
    spoil(cache)
    spoil(expected)
    ours, live = kernel(*arguments), positions >= 0
    assert not cache.counters.any()
    return (ours[live], plain[live.cpu()]), (cache.k, expected.k), (cache.v, expected.v)


def interpreted():
    """Each kernel against its plain torch lines, in fp32, on sizes that a tile does and does not
    divide.
    """
    for D, F, H, Dh in ((64, 512, 4, 16), (97, 1030, 7, 40)):
        for kernels, plain, *inputs in learning(D, F, H, Dh):
            for turned in (False, True):
                found = [with_gradients(f, *inputs, turned) for f in (kernels, plain)]
                same(*found, 4e-6)  # sums of up to 97 terms: a few fp32 roundings
        table, ids, out = (
            torch.randn(5, D),
            torch.tensor([[4, 0, 2], [1, 4, 3]]),
            torch.empty(2, 3, D),
        )
        elementwise._embed_kernel[6,](ids, table, out, **elementwise.whole_row_options(out))
        same(out, elementwise.embed(ids, table), 0)
    for H, Hkv, Dh, head_norms, positions in (
        (8, 4, 16, False, EDGES),
        (14, 2, 40, True, [5, 300, -1, 599]),
        (2, 1, 128, False, [1023, 1024, 1300]),  # 6 pieces
        (4, 2, 16, False, [5, 300, 599]),
    ):
        arguments = decode_step(H, Hkv, Dh, positions, max(positions) + 1, head_norms)
        qkv, _, cos, sin, cache, *_ = arguments
        tolerance = 4e-6
        if H == 4:  # all scores near −16 · 12² / 4: fp32 rounds scores of 600
            cos.fill_(1)
            sin.zero_()
            qkv[:, :64] -= 12
            qkv[:, 64:96] += 12
            cache.k += 12
            tolerance = 1e-3
        results, keys, values = attention_and_cache(attention._cached_attention, arguments)
        same(*results, tolerance)
        same(*keys, 4e-6)
        same(*values, 0)
        assert positions is not EDGES or (cache.k == 100).any()


def test_kernels_in_the_interpreter(interpret):
    interpret(interpreted)


@each_generation
def test_kernels_compile(cc, everything):
    """Compile for the widest heads. On each path the attention's PTX waits for its predecessor
    (PDL).
    """
    names_of = {
        "*bf16": "qkv k_cache v_cache gate_up y out d_out dy table",
        "*i32": "counters",
        "*i64": "slots leaders shared positions ids",
        "fp32": "eps scale sign",
        "*fp32": "sums maxima cos sin x weight q_weight k_weight total d_total dx",
    }
    wide = dict(DH=128, REP=7, HALF=64)
    narrow = dict(DH=64, REP=3, HALF=32, q_weight=None, k_weight=None)
    # few rows: four warps and large tiles, where shared memory has room for them
    jobs = [(narrow, 64, 2), (wide, 128, 4), (narrow, 256, 4), (wide, 32, 2)]
    for shape, tile, warps in jobs if everything else jobs[:2]:
        if warps == 2 or cc in (90, 100):
            constants = shape | dict(SPLIT=attention.SPLIT, ROWS=8, PDL=cc >= 90, TILE=tile)
            ptx, _ = build(
                attention._attention_kernel,
                cc,
                constants,
                names_of,
                (),
                warps,
                registers=168 if tile == 64 else 255,
            )  # 168: six CTAs on an SM
            waits = ptx.count("griddepcontrol.wait")
            assert waits == 2 * (cc >= 90), "one that does not wait lets the next overtake"
    row = dict(D=8192, TILE=8192)
    jobs = [
        (elementwise._embed_kernel, row, 8, 128),
        (elementwise._add_norm_kernel, row, 8, 128),
        (elementwise._add_norm_backward_kernel, row, 8, 255),
        (elementwise._swiglu_kernel, dict(TILE=1024, d_out=None), 4, 64),
        (elementwise._swiglu_kernel, dict(TILE=512, d_out=None), 2, 64),
        (elementwise._swiglu_kernel, dict(TILE=1024), 4, 64),
        (attention._rope_kernel, dict(DH=128, ROWS=128, HALF=64), 8, 128),
    ]
    compile_with_a_wait(cc, jobs, names_of, ("F",))


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, Hkv, Dh, head_norms",
    [(28, 4, 128, False), (9, 3, 64, False), (16, 8, 128, True), (5, 1, 80, True)],
)
@pytest.mark.parametrize("positions", [EDGES * 6 + [1023, 1024, 1300, 2450], [1300, 2450, 0, -1]])
def test_gpu_attention(H, Hkv, Dh, head_norms, positions):
    """bf16 against the plain torch lines in fp32; 50 calls give the same bits; many rows, and
    few.
    """
    with torch.device("cuda"):
        arguments = decode_step(H, Hkv, Dh, positions, 2451, head_norms, torch.bfloat16)

    @torch.no_grad()
    def kernel(*arguments):
        ours = torch.stack([attention.cached_attention(*arguments) for _ in range(50)])
        live = ours[:, arguments[-1] >= 0]
        assert (live == live[0]).all()
        return ours[0]

    # the kernel rounds q, k (twice if normalised), p and the result to bf16, by up to 2⁻⁹ of the
    # value each
    for got, expected in attention_and_cache(kernel, arguments):
        error = (got.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2**-7
    assert (arguments[4].k == 100).any()


@pytest.mark.gpu
def test_gpu_an_update_may_have_more_rows_than_a_grid_is_high():
    """70 000 tokens work, although only the first axis of a CUDA grid may exceed 65 535."""
    x, weight = torch.randn(70_000, 32, device="cuda"), torch.ones(32, device="cuda")
    angle = torch.zeros(1, 70_000, 8, device="cuda")
    heads = x.view(1, -1, 2, 16)
    same(attention.rope(heads, angle.cos(), angle.sin()), heads, 0)
    for out in (elementwise.swiglu(x), elementwise.add_norm(x, x, weight, 1e-5, x.dtype)[1]):
        assert out[-1].abs().sum() > 0


@pytest.mark.gpu
def test_gpu_reads_embeddings_in_pinned_host_memory():
    """The same bits as from a table on the GPU, also when a CUDA graph is replayed with other
    ids.
    """
    table, ids = (
        torch.randn(999, 896).bfloat16().pin_memory(),
        torch.randint(999, (3, 70), device="cuda"),
    )
    elementwise.embed(ids, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = elementwise.embed(ids, table)
    for _ in range(2):
        ids.random_(999)
        graph.replay()
        assert torch.equal(out.cpu(), table[ids.cpu()].float())


@pytest.mark.gpu
def test_gpu_norm_swiglu_and_rope():
    """bf16 forward and backward against the plain torch lines in fp32 of the same numbers on a
    CPU.
    """
    x, y, w = torch.randn(3, 37, 3584)
    gate_up, part = torch.randn(37, 2 * 18944), torch.randn(2, 9, 36, 128)[:, :, :28]
    cos, sin = torch.rand(2, 2, 9, 64)

    def add_norm(x, y, w):
        return elementwise.add_norm(x, y, w, 1e-5, torch.bfloat16 if x.is_cuda else torch.float32)

    for function, learn, others in (
        (add_norm, [x, y.bfloat16()], [w[0]]),
        (lambda x, w: add_norm(x, None, w)[1], [x], [w[0]]),
        (attention.rope, [part.bfloat16()], [cos, sin]),
        (elementwise.swiglu, [gate_up.bfloat16()], []),
        (elementwise.swiglu, [gate_up[:9].bfloat16()], []),
    ):
        found = []
        for device, dtype in (("cuda", None), ("cpu", torch.float32)):
            leaves = [t.to(device, dtype).detach().requires_grad_() for t in learn]
            out = function(*leaves, *(t.to(device) for t in others))
            out = [out] if torch.is_tensor(out) else list(out)
            weights = [
                torch.arange(o.numel(), device=device).view(o.shape).mul(0.37).cos() for o in out
            ]
            total = sum((o.float() * v).sum() for o, v in zip(out, weights, strict=True))
            found.append(out + list(torch.autograd.grad(total, leaves)))
        for ours, plain in zip(*found, strict=True):  # a few bf16 roundings of 2⁻⁹ each
            assert (ours.float().cpu() - plain).norm() / plain.norm() < 2**-7
