"""python -m pytest tests/test_decode.py -q"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import decode
from rollout import Rollout

ROOT = Path(__file__).resolve().parent.parent


def words(*values):
    return [torch.tensor(v) for v in values]


@pytest.mark.parametrize("counter, key, expected", [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_philox_gives_its_authors_vectors(counter, key, expected):
    """The known answers of Random123's kat_vectors, philox4x32 with 10 rounds."""
    result = decode.philox(key[0] | key[1] << 32, *words(*counter))
    assert tuple(int(w) for w in result) == expected


@triton.jit
def philox_kernel(out, seed, counter):
    i = tl.arange(0, 16)
    other = i * 0 + tl.load(counter), i * 0 + tl.load(counter + 1), i * 0 + tl.load(counter + 2)
    c0, c1, c2, c3 = tl.philox(seed, i, other[0], other[1], other[2])
    tl.store(out + i, c0)
    tl.store(out + 16 + i, c1)
    tl.store(out + 32 + i, c2)
    tl.store(out + 48 + i, c3)


def philox_interpreted():
    for seed, counter in [(0, (0, 0, 0)), (7, (1, 2, 3)), (0x299F31D0A4093822, (0x85A308D3, 0xFFFFFFFF, 9))]:
        out = torch.zeros(4, 16, dtype=torch.int64)
        philox_kernel[(1,)](out, seed, torch.tensor(counter).to(torch.uint32))
        ours = decode.philox(seed, torch.arange(16), *words(*counter))
        assert torch.equal(torch.stack(ours), out & 0xFFFFFFFF), (seed, counter)


def test_philox_equals_tritons():
    """A kernel that calls tl.philox draws the same bits."""
    run_alone("philox_interpreted", interpret=True)


@pytest.mark.parametrize("axis", ["sequence", "position", "step", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature, axis):
    """Chi-square over 7 tokens, rare ones included (no top-k, no top-p), along each axis of the counter."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, -3.0, 1.5, -2.0]])
    n = 100_000 if axis == "sequence" else 3_000
    if axis == "sequence":
        tokens, logprobs = decode.sample(logits.expand(n, 7), temperature, 5, 1, torch.arange(n),
                                         torch.full((n,), 2))
    else:
        where = dict(seed=5, step=1, position=torch.tensor([2]), sequence=torch.tensor([9]))
        counts = [torch.tensor([i]) if axis == "position" else i for i in range(n)]
        draws = [decode.sample(logits, temperature, **(where | {axis: i})) for i in counts]
        tokens, logprobs = (torch.cat(x) for x in zip(*draws, strict=True))
    log_p = (logits[0].double() / temperature).log_softmax(0)
    expected = n * log_p.exp()
    chi2 = ((torch.bincount(tokens, minlength=7) - expected) ** 2 / expected).sum()
    # 6 degrees of freedom: P(chi2 > 40) = e⁻²⁰ (1 + 20 + 200) = 5e-7
    assert chi2 < 40
    assert (logprobs - log_p[tokens]).abs().max() < 1e-6          # |logits / T| < 4: a few roundings of 2⁻²³


def test_no_random_word_decides_alone(monkeypatch):
    """The noise is finite for every word: infinite noise would draw a token whatever its logit."""
    for word in (0, 1, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFE00, 0xFFFFFF00, 0xFFFFFFFF):
        monkeypatch.setattr(decode, "philox", lambda *_, word=word: (torch.full((1, 2), word),) * 4)
        assert decode.gumbel(7, 0, 0, *torch.zeros(2, 1).long()).isfinite().all(), hex(word)


def test_a_draw_is_its_own():
    """It depends on no other row, nor on the vocabulary's size; each part of counter and key changes it."""
    sequence, position = torch.tensor([3, 1 << 20, 0, 77]), torch.tensor([8, 0, 8, 5])
    noise = decode.gumbel(11, 1 << 40, 6, sequence, position)
    for b in range(4):
        alone = decode.gumbel(11, 1 << 40, 6, sequence[b:b + 1], position[b:b + 1])
        assert torch.equal(alone[0], noise[b])
    assert torch.equal(decode.gumbel(9, 1 << 40, 6, sequence, position), noise[:, :9])
    others = [decode.gumbel(11, *what) for what in (
        (1 << 41, 6, sequence, position), (1 << 40, 7, sequence, position),
        (1 << 40, 6, sequence + 1, position), (1 << 40, 6, sequence, position + 1))]
    assert len({x.item() for x in torch.cat([noise, *others]).flatten()}) == 5 * 4 * 11


def test_temperature_0_takes_the_largest_logit():
    """And records its log-probability at temperature 1."""
    logits = torch.randn(5, 97) * 4
    token, logprob = decode.sample(logits, 0.0, 0, 0, torch.arange(5), torch.arange(5))
    assert torch.equal(token, logits.argmax(1))
    torch.testing.assert_close(logprob, logits.log_softmax(1).amax(1), atol=1e-6, rtol=0)


def test_norm_rope_and_swiglu_equal_their_references():
    """transformers' RMSNorm and rotation, and the formula of SwiGLU, on odd sizes."""
    x, norm = torch.randn(3, 5, 37), LlamaRMSNorm(37, 1e-3)
    norm.weight.data.normal_()
    torch.testing.assert_close(decode.rms_norm(x, norm.weight, 1e-3), norm(x), atol=2e-6, rtol=0)
    low = decode.rms_norm(x.bfloat16(), norm.weight, 1e-3)       # one rounding at the end, none on the way
    assert torch.equal(low, decode.rms_norm(x.bfloat16().float(), norm.weight, 1e-3).bfloat16())
    q, angle = torch.randn(3, 5, 7, 6), torch.randn(3, 5, 3)
    twice = angle.repeat(1, 1, 2)
    theirs, _ = apply_rotary_pos_emb(q, q, twice.cos(), twice.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(decode.rope(q, angle.cos(), angle.sin()), theirs, atol=1e-6, rtol=0)
    gate, up = torch.randn(2, 3, 11).unbind()
    ours = decode.swiglu(torch.cat([gate, up], -1))
    torch.testing.assert_close(ours, gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)


def attention_by_hand(q, k, v):
    """One query (H, Dh) over keys and values (n, Hkv, Dh), head by head in float64 → (H·Dh,)."""
    H, Dh = q.shape
    heads = []
    for h in range(H):
        keys, values = (x[:, h // (H // k.shape[1])].double() for x in (k, v))
        heads.append((keys @ q[h].double() / Dh ** 0.5).softmax(0) @ values)
    return torch.cat(heads)


@pytest.mark.parametrize("H, Hkv", [(6, 6), (6, 2), (5, 1)])
def test_causal_attention_equals_its_definition(H, Hkv):
    """With shared key heads."""
    q, k, v = torch.randn(3, 9, H, 7), torch.randn(3, 9, Hkv, 7), torch.randn(3, 9, Hkv, 7)
    full = decode.causal_attention(q, k, v)
    for b in range(3):
        for t in range(9):                              # fp32 sums of 9 products of size 3: 1e-6
            by_hand = attention_by_hand(q[b, t], k[b, :t + 1], v[b, :t + 1])
            assert (full[b, t] - by_hand).abs().max() < 2e-6


def decode_step(H, Hkv, Dh, positions, length, head_norms, device="cpu", dtype=torch.float32):
    """The arguments of cached_attention: rows in slots of another order, two slots of nobody."""
    B = len(positions)
    positions = torch.tensor(positions, device=device)
    slots = torch.randperm(B + 2).to(device)[:B]
    k, v = torch.randn(2, 2, B + 2, Hkv, length, Dh).to(device, dtype)
    cache = SimpleNamespace(k=k, v=v, slots=slots, pieces=-(-length // decode.SPLIT),
                            counters=torch.zeros((B + 2) * Hkv, dtype=torch.int32, device=device))
    angle = positions[:, None] * torch.rand(Dh // 2, device=device)
    norms = (*(torch.rand(2, Dh, device=device) + 0.5), 1e-5) if head_norms else None
    qkv = torch.randn(B, (H + 2 * Hkv) * Dh).to(device, dtype)
    return qkv, norms, angle.cos(), angle.sin(), cache, 1, positions


@pytest.mark.parametrize("H, Hkv, head_norms", [(6, 6, False), (6, 2, True), (5, 1, False)])
def test_a_decode_step_equals_its_definition(H, Hkv, head_norms):
    """q and k normed and rotated, k and v at their position of their slot, attention over 0 … position; of a
    row that is over, and of other slots, nothing is written."""
    positions = [0, 12, -1, 7]
    qkv, norms, cos, sin, cache, layer, at = decode_step(H, Hkv, 8, positions, 13, head_norms)
    expected_k, expected_v = before = cache.k.clone(), cache.v.clone()
    out = decode.cached_attention(qkv, norms, cos, sin, cache, layer, at)
    for b in (0, 1, 3):
        q, k, v = qkv[b].view(-1, 8).split((H, Hkv, Hkv))
        if norms:
            q, k = decode.rms_norm(q, norms[0], 1e-5), decode.rms_norm(k, norms[1], 1e-5)
        q, k = decode.rope(q, cos[b], sin[b]), decode.rope(k, cos[b], sin[b])
        slot, n = cache.slots[b], positions[b] + 1
        expected_k[1, slot, :, n - 1], expected_v[1, slot, :, n - 1] = k, v
        by_hand = attention_by_hand(q, *(x[1, slot, :, :n].transpose(0, 1) for x in before))
        assert (out[b] - by_hand).abs().max() < 2e-6
    torch.testing.assert_close(cache.k, expected_k, atol=1e-6, rtol=0)
    assert torch.equal(cache.v, expected_v)


def test_append_ends_rows_at_stops_and_at_the_limit():
    """By hand: a stop token, a row that was over before, one below the limit, one that reaches it."""
    check_append(decode.append, "cpu")


def check_append(append, device):
    fields = torch.zeros(6, 20).long(), torch.zeros(6, 20), torch.tensor([0, 3, 3, 4, 0, 2]), \
        torch.zeros(6).bool(), torch.ones(6).long()
    rollout = Rollout(*(field.to(device) for field in fields))
    token, rows = torch.tensor([77, 9, 8, 7], device=device), torch.tensor([5, 0, 2, 3], device=device)
    positions, last = torch.tensor([4, -1, 7, 8], device=device), torch.full((4,), 50, device=device)
    logprob = torch.tensor([-1.0, -2, -3, -4], device=device)
    with torch.no_grad():
        append(token, logprob, rows, positions, torch.tensor([2, 77], device=device), 5, last, rollout)
    assert positions.tolist() == [-1, -1, 8, -1] and last.tolist() == [77, 50, 8, 7]
    assert rollout.lengths.tolist() == [0, 3, 4, 5, 0, 3]
    assert rollout.finished.tolist() == [False] * 5 + [True]
    for field, values in ((rollout.tokens, [8, 7, 77]), (rollout.logprobs, [-3, -4, -1])):
        assert field.nonzero().tolist() == [[2, 8], [3, 9], [5, 5]] and field[field != 0].tolist() == values


# --- the Triton kernels without a GPU: interpreted in one process, compiled in another; one cannot do both

def run_alone(function, interpret):
    env = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    code = f"import test_decode as t; t.{function}(); print('done')"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stderr[-3000:]


EDGES = [0, 1, 63, 64, 254, 255, 256, 511, 512, 599, -1]         # lengths 1, 255, 256, 257, the most, none


def same(ours, plain, atol):
    torch.testing.assert_close(ours, plain, atol=atol, rtol=0)


def interpreted():
    """Each kernel against its plain lines, in fp32, on sizes that are no multiple of anything."""
    torch.manual_seed(0)
    for D in (64, 97, 576):
        x, y, w = torch.randn(5, D), torch.randn(5, D), torch.randn(D)
        for branch in (y, None):                                       # sums of 576: a few roundings of 2⁻²³
            for a, b in zip(decode._add_norm(x, branch, w, 1e-5, torch.float32),
                            decode.add_norm(x, branch, w, 1e-5, torch.float32), strict=True):
                same(a, b, 4e-6)
    gate_up = torch.randn(3, 2 * 1501)
    same(decode._swiglu(gate_up), decode.swiglu(gate_up), 4e-6)
    for H, Hkv, Dh, head_norms, positions in ((4, 2, 16, False, EDGES), (7, 1, 64, True, [5, 300, -1, 599]),
                                              (9, 3, 40, True, [5, 300, 256])):
        qkv, norms, cos, sin, cache, _, at = decode_step(H, Hkv, Dh, positions, 600, head_norms)
        k, v, live = cache.k[1].clone(), cache.v[1].clone(), at >= 0
        plain = decode.cached_attention(qkv, norms, cos, sin, cache, 1, at)
        ours = decode._cached_attention(qkv, norms, cos, sin, k, v, cache.slots, at, cache.pieces,
                                        cache.counters)
        same(ours[live], plain[live], 4e-6)
        same(k, cache.k[1], 4e-6)
        same(v, cache.v[1], 0)
        assert not cache.counters.any()
    logits, sequence, position = torch.randn(4, 9001) * 3, torch.arange(4) + 9, torch.tensor([3, 0, 7, 2**20])
    for temperature in (0.7, 1.0, 0.0):
        for seed, step in ((0, 0), (2**40 + 7, -1), (1, 1)):
            ours = decode._sample(logits, temperature, seed, step, sequence, position)
            plain = decode.sample(logits, temperature, seed, step, sequence, position)
            assert torch.equal(ours[0], plain[0])
            same(ours[1], plain[1], 1e-5)                              # sums of 9001 exponentials
    decode._fused = lambda x: True
    check_append(decode.append, "cpu")


def test_kernels_in_the_interpreter():
    run_alone("interpreted", interpret=True)


def compiled():
    """Registers without spills and shared memory within each generation's limit, for the widest heads."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    names_of = {"*bf16": "qkv k_cache v_cache gate_up y out", "*i32": "counters", "*i1": "finished",
                "*i64": "slots positions sequence position winner token rows stops last tokens lengths",
                "*fp32": "sums maxima cos sin x weight q_weight k_weight total logits found logprob logprobs",
                "fp32": "eps scale temperature"}
    types = {name: kind for kind, names in names_of.items() for name in names.split()}
    wide, narrow = ([dict(SPLIT=decode.SPLIT, TILE=64, ROWS=16) | more for more in (
        dict(DH=128, REP=7, HALF=64), dict(DH=64, REP=3, HALF=32, q_weight=None, k_weight=None))])
    # kernel, constants, warps, most registers (65536 / 32 / warps / programs on an SM), stages
    jobs = [(decode._attention_kernel, wide, 4, 128, 2), (decode._attention_kernel, narrow, 4, 128, 2),
            (decode._add_norm_kernel, dict(TILE=8192), 8, 128, 1),
            (decode._swiglu_kernel, dict(TILE=1024), 4, 64, 1),
            (decode._tile_kernel, dict(GREEDY=False, TILE=decode.VOCAB_TILE), 4, 128, 1),
            (decode._merge_kernel, dict(TILES=64), 1, 64, 1), (decode._append_kernel, {}, 1, 64, 1)]
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for generation, shared in ((80, 166912), (90, 232448), (100, 232448), (120, 101376)):
        for kernel, constants, warps, registers, stages in jobs:
            constants = constants | dict(PDL=generation >= 90)
            signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
            aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names)
                       if signature[n][0] == "*" or n in ("D", "F_", "V")}
            options = dict(num_warps=warps, num_stages=stages)
            if generation >= 90:
                options["launch_pdl"] = True
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
            made = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
            assert made.metadata.shared <= shared, (generation, kernel, made.metadata.shared)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
                cubin.write(made.asm["cubin"])
                cubin.flush()
                usage = subprocess.run([cuobjdump, "-res-usage", cubin.name], capture_output=True, text=True)
            used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
            fits = used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= registers
            assert fits, (generation, kernel, used)
            waits = made.asm["ptx"].count("griddepcontrol.wait")
            assert waits == (generation >= 90), f"{kernel}: one that does not wait lets the next overtake"


def test_kernels_compile_for_four_generations():
    run_alone("compiled", interpret=False)


# --- on a GPU

@pytest.mark.gpu
@pytest.mark.parametrize("H, Hkv, Dh, head_norms", [(28, 4, 128, False), (9, 3, 64, False),
                                                    (16, 8, 128, True), (5, 1, 80, True)])
def test_gpu_attention(H, Hkv, Dh, head_norms):
    """bf16 against the plain lines in fp32 of the same numbers, and the same bits 50 times."""
    positions = EDGES * 6
    arguments = decode_step(H, Hkv, Dh, positions, 600, head_norms, "cuda", torch.bfloat16)
    qkv, norms, cos, sin, cache, layer, at = arguments
    wide = SimpleNamespace(k=cache.k.float().cpu(), v=cache.v.float().cpu(), slots=cache.slots.cpu())
    plain = decode.cached_attention(qkv.float().cpu(), norms and (norms[0].cpu(), norms[1].cpu(), norms[2]),
                                    cos.cpu(), sin.cpu(), wide, layer, at.cpu())
    with torch.no_grad():
        ours = [decode.cached_attention(*arguments) for _ in range(50)]
    live = at >= 0
    assert all(torch.equal(o[live], ours[0][live]) for o in ours) and not cache.counters.any()
    # q, k (twice where they are normed), p and the result are rounded to bf16, each by up to 2⁻⁹ of itself
    for got, expected in ((ours[0][live], plain[live.cpu()]), (cache.k, wide.k), (cache.v, wide.v)):
        error = (got.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2**-7


@pytest.mark.gpu
def test_gpu_norm_swiglu_and_samples():
    """Against the plain lines on the same GPU; the sampler also against a CPU, bit for bit in its tokens."""
    x, y, w = torch.randn(3, 37, 3584, device="cuda")
    y, w = y.bfloat16(), w[0].contiguous()
    plain = decode.add_norm(x.requires_grad_(), y, w, 1e-5, torch.bfloat16)
    with torch.no_grad():
        total, normed = decode.add_norm(x, y, w, 1e-5, torch.bfloat16)
        assert torch.equal(total, plain[0]) and (normed != plain[1]).float().mean() < 1e-3
        gate_up = torch.randn(37, 2 * 18944, device="cuda").bfloat16()
        gate, up = gate_up.chunk(2, -1)
        assert (decode.swiglu(gate_up) != torch.nn.functional.silu(gate) * up).float().mean() < 1e-3
        logits, number = torch.randn(64, 152064, device="cuda") * 3, torch.arange(64, device="cuda")
        token, logprob = decode.sample(logits, 0.8, 5, 3, number, number * 7)
    on_cpu = decode.sample(logits.cpu(), 0.8, 5, 3, number.cpu(), number.cpu() * 7)
    assert torch.equal(token.cpu(), on_cpu[0])
    torch.testing.assert_close(logprob.cpu(), on_cpu[1], atol=1e-4, rtol=0)
    check_append(decode.append, "cuda")


@pytest.mark.gpu
def test_gpu_a_million_tokens_follow_the_softmax():
    """Chi-square over a vocabulary of 1000, whose rarest tokens are expected 5 times or more."""
    logits = (torch.randn(1000, device="cuda") * 1.5).clamp(-4, 4)
    counts = torch.zeros(1000, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for step in range(20):
            number = torch.arange(50_000, device="cuda")
            rows = logits.expand(50_000, -1).contiguous()
            token, _ = decode.sample(rows, 1.0, 5, step, number, number % 300)
            counts += torch.bincount(token, minlength=1000)
    expected = counts.sum() * logits.double().softmax(0)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # 999 degrees of freedom: mean 999, standard deviation √1998 = 44.7; five of them
    assert counts.sum() == 1_000_000 and expected.min() > 5 and chi2 < 999 + 5 * 44.7
