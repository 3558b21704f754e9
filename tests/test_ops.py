"""A block's operations against transformers and a plain attention; kernels against plain torch."""
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import build, compile_with_a_wait, on_all_cores, run_alone

import ops


def test_norm_rope_and_swiglu_equal_their_references():
    """transformers' RMSNorm and rotation, and the formula of SwiGLU, on odd sizes."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
    x, norm = torch.randn(3, 5, 37), LlamaRMSNorm(37, 1e-3)
    norm.weight.data.normal_()
    torch.testing.assert_close(ops.rms_norm(x, norm.weight, 1e-3), norm(x), atol=2e-6, rtol=0)
    low = ops.rms_norm(x.bfloat16(), norm.weight, 1e-3)       # bf16 is rounded once, at the end
    assert torch.equal(low, ops.rms_norm(x.bfloat16().float(), norm.weight, 1e-3).bfloat16())
    q, angle = torch.randn(3, 5, 7, 6), torch.randn(3, 5, 3)
    twice = angle.repeat(1, 1, 2)
    theirs, _ = apply_rotary_pos_emb(q, q, twice.cos(), twice.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(ops.rope(q, angle.cos(), angle.sin()), theirs, atol=1e-6, rtol=0)
    gate, up = torch.randn(2, 3, 11).unbind()
    ours = ops.swiglu(torch.cat([gate, up], -1))
    torch.testing.assert_close(ours, gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)


def attention_by_hand(q, k, v):
    """One query (H, Dh), keys and values (n, Hkv, Dh) → (H·Dh,) f64, attention head by head."""
    H, Dh = q.shape
    heads = []
    for h in range(H):
        keys, values = (x[:, h // (H // k.shape[1])].double() for x in (k, v))
        heads.append((keys @ q[h].double() / Dh ** 0.5).softmax(0) @ values)
    return torch.cat(heads)


@pytest.mark.parametrize("H, Hkv", [(6, 6), (6, 2), (5, 1)])
def test_causal_attention_equals_its_definition(H, Hkv):
    """Also where query heads share a key head."""
    q, k, v = torch.randn(3, 9, H, 7), torch.randn(3, 9, Hkv, 7), torch.randn(3, 9, Hkv, 7)
    full = ops.causal_attention(q, k, v)
    for b in range(3):
        for t in range(9):                              # fp32 sums of 9 products of about 3
            by_hand = attention_by_hand(q[b, t], k[b, :t + 1], v[b, :t + 1])
            assert (full[b, t] - by_hand).abs().max() < 2e-6


def decode_step(H, Hkv, Dh, positions, length, head_norms, device="cpu", dtype=torch.float32):
    """→ random arguments of cached_attention. Slots are shuffled, two belong to no row. Rows 2i and 2i + 1
    share a prompt: the positions that both have passed are equal, and row 2i is the leader."""
    B = len(positions)
    positions = torch.tensor(positions, device=device)
    slots = torch.randperm(B + 2).to(device)[:B]
    k, v = torch.randn(2, 2, B + 2, Hkv, length, Dh).to(device, dtype)
    shared, leaders = torch.zeros_like(slots), slots.clone()
    for b in range(1, B, 2):
        n = max(0, int(positions[b - 1:b + 1].min()))
        leaders[b], shared[b] = slots[b - 1], n
        for x in (k, v):
            x[:, slots[b], :, :n] = x[:, slots[b - 1], :, :n]
    cache = SimpleNamespace(k=k, v=v, slots=slots, shared=shared, leaders=leaders,
                            pieces=-(-length // ops.SPLIT),
                            counters=torch.zeros((B + 2) * Hkv, dtype=torch.int32, device=device))
    angle = positions[:, None] * torch.rand(Dh // 2, device=device)
    norms = (*(torch.rand(2, Dh, device=device) + 0.5), 1e-5) if head_norms else None
    qkv = torch.randn(B, (H + 2 * Hkv) * Dh).to(device, dtype)
    return qkv, norms, angle.cos(), angle.sin(), cache, 1, positions


def spoil(cache):
    """Overwrite the copies of shared positions that fill a tile of any size: only a leader's may be read."""
    for slot, leader, n in zip(cache.slots, cache.leaders, cache.shared // 256 * 256, strict=True):
        if slot != leader:
            cache.k[:, slot, :, :n] = cache.v[:, slot, :, :n] = 100.


@pytest.mark.parametrize("H, Hkv, head_norms", [(6, 6, False), (6, 2, True), (5, 1, False)])
def test_a_decode_step_equals_its_definition(H, Hkv, head_norms):
    """q and k are normalised and rotated, k and v are written at the row's position in its slot,
    attention reads 0 … position. Nothing is written for a finished row or in other slots."""
    positions = [0, 12, -1, 7]
    qkv, norms, cos, sin, cache, layer, at = decode_step(H, Hkv, 8, positions, 13, head_norms)
    expected_k, expected_v = before = cache.k.clone(), cache.v.clone()
    out = ops.cached_attention(qkv, norms, cos, sin, cache, layer, at)
    for b in (0, 1, 3):
        q, k, v = qkv[b].view(-1, 8).split((H, Hkv, Hkv))
        if norms:
            q, k = ops.rms_norm(q, norms[0], 1e-5), ops.rms_norm(k, norms[1], 1e-5)
        q, k = ops.rope(q, cos[b], sin[b]), ops.rope(k, cos[b], sin[b])
        slot, n = cache.slots[b], positions[b] + 1
        expected_k[1, slot, :, n - 1], expected_v[1, slot, :, n - 1] = k, v
        by_hand = attention_by_hand(q, *(x[1, slot, :, :n].transpose(0, 1) for x in before))
        assert (out[b] - by_hand).abs().max() < 2e-6
    torch.testing.assert_close(cache.k, expected_k, atol=1e-6, rtol=0)
    assert torch.equal(cache.v, expected_v)


# --- Triton kernels without a GPU: one process interprets them, another compiles them

# positions at the edges of tiles and pieces, the last one, and −1: a finished row
EDGES = [0, 1, 127, 128, 254, 255, 256, 511, 512, 599, -1]


def same(ours, plain, atol):
    torch.testing.assert_close(ours, plain, atol=atol, rtol=0)


def alike(ours, plain, inputs, atol, used=(0,)):
    """Results and gradients of the kernels equal those of autograd through the plain torch lines, for
    contiguous inputs and gradients, and for ones whose last two dimensions are transposed in memory."""
    for turned in (False, True):
        found = []
        for function in (ours, plain):
            leaves = [t if t is None else (t.mT.clone(memory_format=torch.contiguous_format).mT if turned
                                           else t.clone()).detach().requires_grad_() for t in inputs]
            out = function(*leaves)
            out = [out] if torch.is_tensor(out) else [out[i] for i in used]
            weights = [torch.arange(o.numel(), device=o.device).view(o.shape).mul(.37).cos() for o in out]
            total = sum((o.mT * w.mT.contiguous() if turned else o * w).sum()
                        for o, w in zip(out, weights, strict=True))
            found.append([*out, *torch.autograd.grad(total, [t for t in leaves if t is not None])])
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype
            same(a, b, atol)


def interpreted():
    """Each kernel against its plain torch lines, in fp32, on sizes that no tile divides."""
    torch.manual_seed(0)
    spoiled = 0
    for D in (64, 97, 576):
        x, y, w = torch.randn(5, D), torch.randn(5, D), torch.randn(D)
        for inputs in ([x, y], [x, None]):                             # sums of 576: a few fp32 roundings
            for used in ((0, 1), (1,), (0,)):                          # nothing may use one of the results
                alike(lambda *i, w=w: ops.AddNorm.apply(*i, w, 1e-5, torch.float32),
                      lambda *i, w=w: ops.add_norm(*i, w, 1e-5, torch.float32), inputs, 4e-6, used)
        table, ids, out = x, torch.tensor([[4, 0, 2], [1, 4, 3]]), torch.empty(2, 3, D)
        ops._embed_kernel[6,](ids, table, out, **ops._row(out))
        same(out, ops.embed(ids, table), 0)
    for rows in (3, 17):
        alike(ops.SwiGLU.apply, ops.swiglu, [torch.randn(rows, 2 * 1501)], 4e-6)
    for H, Dh in ((4, 16), (7, 40)):
        part = torch.randn(2, 5, H + 3, Dh)[:, :, 1:H + 1]             # a strided part, like q in qkv
        angle = torch.rand(2, 5, Dh // 2) * 7
        alike(lambda x, at=angle: ops.Rope.apply(x, at.cos(), at.sin()),
              lambda x, at=angle: ops.rope(x, at.cos(), at.sin()), [part], 4e-6)
    for H, Hkv, Dh, head_norms, positions in ((8, 4, 16, False, EDGES), (7, 1, 64, True, [5, 300, -1, 599]),
                                              (9, 3, 40, True, [5, 300, 256]),
                                              (2, 1, 128, False, [1023, 1024, 1300])):      # 6 pieces
        length = max(positions) + 1
        qkv, norms, cos, sin, cache, _, at = decode_step(H, Hkv, Dh, positions, length, head_norms)
        twin, live = SimpleNamespace(**vars(cache) | dict(k=cache.k.clone(), v=cache.v.clone())), at >= 0
        plain = ops.cached_attention(qkv, norms, cos, sin, cache, 1, at)
        spoil(twin)
        ours = ops._cached_attention(qkv, norms, cos, sin, twin, 1, at)
        spoiled += (twin.k == 100).sum()
        spoil(cache)
        same(ours[live], plain[live], 4e-6)
        same(twin.k, cache.k, 4e-6)
        same(twin.v, cache.v, 0)
        assert not cache.counters.any()
    assert spoiled > 0
    qkv, norms, cos, sin, cache, _, at = decode_step(4, 2, 16, [5, 300, 599], 600, False)
    cos.fill_(1), sin.fill_(0)
    qkv[:, :64] -= 12                                                 # all scores near −16 · 12² / 4
    qkv[:, 64:96] += 12
    cache.k += 12
    twin = SimpleNamespace(**vars(cache) | dict(k=cache.k.clone(), v=cache.v.clone()))
    plain = ops.cached_attention(qkv, norms, cos, sin, cache, 1, at)
    same(ops._cached_attention(qkv, norms, cos, sin, twin, 1, at), plain, 1e-3)    # fp32 rounds scores of 600


def test_kernels_in_the_interpreter():
    run_alone(interpreted, interpret=True)


def compiled_for(cc):
    """Compile for the widest heads; the attention's PTX loads keys and values before its PDL wait."""
    names_of = {"*bf16": "qkv k_cache v_cache gate_up y out d_out dy table", "*i32": "counters",
                "*i64": "slots leaders shared positions ids", "fp32": "eps scale sign",
                "*fp32": "sums maxima cos sin x weight q_weight k_weight total d_total dx"}
    wide, narrow = ([dict(SPLIT=ops.SPLIT, ROWS=8, PDL=cc >= 90) | more for more in (
        dict(DH=128, REP=7, HALF=64), dict(DH=64, REP=3, HALF=32, q_weight=None, k_weight=None))])
    six = 65536 // 64 // 6 // 8 * 8                       # registers a thread, for six CTAs on an SM
    for few in (False, True) if cc in (90, 100) else (False,):
        for shape in (wide, narrow):
            tile = dict(TILE=(8192 if few else 2048) // shape["HALF"])
            ptx, _ = build(ops._attention_kernel, cc, shape | tile, names_of, (), 4 if few else 2,
                           registers=six if shape is narrow and not few else 255)
            waits = [m.start() for m in re.finditer("griddepcontrol.wait", ptx)]
            assert len(waits) == (2 if cc >= 90 else 0), "one that does not wait lets the next overtake"
            assert not waits or ptx.count("cp.async.cg", *waits) >= (64 if few else 32)     # two tiles' loads
    compile_with_a_wait(
        cc, [(ops._embed_kernel, dict(D=8192, TILE=8192), 8, 128, 1),
             (ops._add_norm_kernel, dict(D=8192, TILE=8192), 8, 128, 1),
             (ops._add_norm_backward_kernel, dict(D=8192, TILE=8192), 8, 255, 1),
             (ops._swiglu_kernel, dict(TILE=1024, d_out=None), 4, 64, 1),
             (ops._swiglu_kernel, dict(TILE=512, d_out=None), 2, 64, 1),
             (ops._swiglu_kernel, dict(TILE=1024), 4, 64, 1),
             (ops._rope_kernel, dict(DH=128, ROWS=128, HALF=64), 8, 128, 1)],
        names_of, ("F_",))


def compiled():
    on_all_cores(compiled_for)


def test_kernels_compile_for_four_generations():
    run_alone(compiled, interpret=False)


# --- on a GPU

@pytest.mark.gpu
@pytest.mark.parametrize("H, Hkv, Dh, head_norms", [(28, 4, 128, False), (9, 3, 64, False),
                                                    (16, 8, 128, True), (5, 1, 80, True)])
@pytest.mark.parametrize("positions", [EDGES * 6 + [1023, 1024, 1300, 2450], [1300, 2450, 0, -1]])
def test_gpu_attention(H, Hkv, Dh, head_norms, positions):
    """bf16 against the plain torch lines in fp32; 50 calls give the same bits; many rows, and few."""
    arguments = decode_step(H, Hkv, Dh, positions, 2451, head_norms, "cuda", torch.bfloat16)
    qkv, norms, cos, sin, cache, layer, at = arguments
    wide = SimpleNamespace(k=cache.k.float().cpu(), v=cache.v.float().cpu(), slots=cache.slots.cpu(),
                           leaders=cache.leaders.cpu(), shared=cache.shared.cpu())
    plain = ops.cached_attention(qkv.float().cpu(), norms and (norms[0].cpu(), norms[1].cpu(), norms[2]),
                                    cos.cpu(), sin.cpu(), wide, layer, at.cpu())
    spoil(cache)
    spoil(wide)
    assert (cache.k == 100).any()
    with torch.no_grad():
        ours = [ops.cached_attention(*arguments) for _ in range(50)]
    live = at >= 0
    assert all(torch.equal(o[live], ours[0][live]) for o in ours) and not cache.counters.any()
    # the kernel rounds q, k (twice if normalised), p and the result to bf16, by up to 2⁻⁹ of the value each
    for got, expected in ((ours[0][live], plain[live.cpu()]), (cache.k, wide.k), (cache.v, wide.v)):
        error = (got.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2**-7


@pytest.mark.gpu
def test_gpu_an_update_may_have_more_rows_than_a_grid_is_high():
    """70 000 tokens work, although only the first axis of a CUDA grid may exceed 65 535."""
    x, y = torch.randn(2, 70_000, 32, device="cuda")
    assert ops.swiglu(x.bfloat16())[-1].abs().sum() > 0
    assert ops.add_norm(x, y, torch.ones(32, device="cuda"), 1e-5, torch.bfloat16)[1][-1].abs().sum() > 0
    angle = torch.zeros(1, 70_000, 8, device="cuda")
    assert torch.equal(ops.rope(x.view(1, -1, 2, 16), angle.cos(), angle.sin()), x.view(1, -1, 2, 16))


@pytest.mark.gpu
def test_gpu_reads_embeddings_in_pinned_host_memory():
    """The same bits as from a table on the GPU, also when a CUDA graph is replayed with other ids."""
    table, ids = torch.randn(999, 896).bfloat16().pin_memory(), torch.randint(999, (3, 70), device="cuda")
    ops.embed(ids, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.embed(ids, table)
    for _ in range(2):
        ids.random_(999)
        graph.replay()
        assert torch.equal(out.cpu(), table[ids.cpu()].float())


@pytest.mark.gpu
def test_gpu_norm_swiglu_and_rope():
    """bf16 forward and backward against the plain torch lines in fp32 of the same numbers on a CPU."""
    x, y, w = torch.randn(3, 37, 3584)
    gate_up, part = torch.randn(37, 2 * 18944), torch.randn(2, 9, 36, 128)[:, :, :28]
    cos, sin = torch.rand(2, 2, 9, 64)
    jobs = [(lambda x, y, w: ops.add_norm(x, y, w, 1e-5, y.dtype), [x, y], [w[0]]),
            (lambda x, w: ops.add_norm(x, None, w, 1e-5, torch.bfloat16 if x.is_cuda else x.dtype)[1], [x],
             [w[0]]), (ops.rope, [part.bfloat16()], [cos, sin]),
            *((ops.swiglu, [rows.bfloat16()], []) for rows in (gate_up, gate_up[:9]))]
    jobs[0][1][1] = y.bfloat16()
    for function, learn, others in jobs:
        found = []
        for device, dtype in (("cuda", None), ("cpu", torch.float32)):
            leaves = [t.to(device, dtype).detach().requires_grad_() for t in learn]
            out = function(*leaves, *(t.to(device) for t in others))
            out = [out] if torch.is_tensor(out) else list(out)
            weights = [torch.arange(o.numel(), device=device).view(o.shape).mul(.37).cos() for o in out]
            total = sum((o.float() * v).sum() for o, v in zip(out, weights, strict=True))
            found.append(out + list(torch.autograd.grad(total, leaves)))
        for ours, plain in zip(*found, strict=True):      # a few bf16 roundings of 2⁻⁹ each
            assert (ours.float().cpu() - plain).norm() / plain.norm() < 2**-7
