"""python -m pytest tests/test_decode.py -q"""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import decode

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


def interpreted():
    for seed, counter in [(0, (0, 0, 0)), (7, (1, 2, 3)), (0x299F31D0A4093822, (0x85A308D3, 0xFFFFFFFF, 9))]:
        out = torch.zeros(4, 16, dtype=torch.int64)
        philox_kernel[(1,)](out, seed, torch.tensor(counter).to(torch.uint32))
        ours = decode.philox(seed, torch.arange(16), *words(*counter))
        assert torch.equal(torch.stack(ours), out & 0xFFFFFFFF), (seed, counter)


def test_philox_equals_tritons():
    """A kernel that calls tl.philox draws the same bits; Triton's interpreter needs a process of its own."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    code = "import test_decode as t; t.interpreted(); print('done')"
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stderr[-3000:]


@pytest.mark.parametrize("axis", ["sequence", "position", "step", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature, axis):
    """Chi-square over 7 tokens, rare ones included (no top-k, no top-p), along each axis of the counter."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, -3.0, 1.5, -2.0]])
    n = 100_000 if axis == "sequence" else 3_000
    if axis == "sequence":
        tokens, logprobs = decode.sample(logits.expand(n, 7), temperature, 5, 1, torch.arange(n), 2)
    else:
        where = dict(seed=5, step=1, position=2, sequence=torch.tensor([9]))
        draws = [decode.sample(logits, temperature, **(where | {axis: i})) for i in range(n)]
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
        assert decode.gumbel(7, 0, 0, torch.tensor([0]), 0).isfinite().all(), hex(word)


def test_a_draw_is_its_own():
    """It depends on no other row, nor on the vocabulary's size; each part of counter and key changes it."""
    sequence = torch.tensor([3, 1 << 20, 0, 77])
    noise = decode.gumbel(11, 1 << 40, 6, sequence, 8)
    for b in range(4):
        assert torch.equal(decode.gumbel(11, 1 << 40, 6, sequence[b:b + 1], 8)[0], noise[b])
    assert torch.equal(decode.gumbel(9, 1 << 40, 6, sequence, 8), noise[:, :9])
    others = [decode.gumbel(11, *w) for w in ((1 << 41, 6, sequence, 8), (1 << 40, 7, sequence, 8),
                                              (1 << 40, 6, sequence + 1, 8), (1 << 40, 6, sequence, 9))]
    assert len({x.item() for x in torch.cat([noise, *others]).flatten()}) == 5 * 4 * 11


def test_temperature_0_takes_the_largest_logit():
    """And records its log-probability at temperature 1."""
    logits = torch.randn(5, 97) * 4
    token, logprob = decode.sample(logits, 0.0, 0, 0, torch.arange(5), 0)
    assert torch.equal(token, logits.argmax(1))
    torch.testing.assert_close(logprob, logits.log_softmax(1).amax(1), atol=1e-6, rtol=0)


def test_norm_rope_and_swiglu_equal_their_references():
    """transformers' RMSNorm and rotation, and the formula of SwiGLU, on odd sizes."""
    x, norm = torch.randn(3, 5, 37), LlamaRMSNorm(37, 1e-3)
    norm.weight.data.normal_()
    torch.testing.assert_close(decode.rms_norm(x, norm.weight, 1e-3), norm(x), atol=2e-6, rtol=0)
    low = decode.rms_norm(x.bfloat16(), norm.weight, 1e-3)       # one rounding at the end, none on the way
    assert torch.equal(low, decode.rms_norm(x.bfloat16().float(), norm.weight, 1e-3).bfloat16())
    q, angle = torch.randn(3, 5, 7, 6), torch.randn(3, 5, 3).repeat(1, 1, 2)
    theirs, _ = apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim=2)
    torch.testing.assert_close(decode.rope(q, angle.cos(), angle.sin()), theirs, atol=1e-6, rtol=0)
    gate, up = torch.randn(2, 3, 11).unbind()
    ours = decode.swiglu(torch.cat([gate, up], -1))
    torch.testing.assert_close(ours, gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)


@pytest.mark.parametrize("H, Hkv", [(6, 6), (6, 2), (5, 1)])
def test_attention_equals_its_definition(H, Hkv):
    """Both forms, query by query in float64, with shared key heads; the cached one from any position."""
    B, T, S, Dh = 3, 9, 13, 7
    q, k, v = torch.randn(B, T, H, Dh), torch.randn(B, S, Hkv, Dh), torch.randn(B, S, Hkv, Dh)
    start = torch.tensor([0, 4, 2])
    positions = start[:, None] + torch.arange(T)

    def by_hand(b, t, last):
        heads = []
        for h in range(H):
            keys, values = (x[b, :last + 1, h // (H // Hkv)].double() for x in (k, v))
            heads.append((keys @ q[b, t, h].double() / Dh ** 0.5).softmax(0) @ values)
        return torch.cat(heads)

    # fp32 sums of 13 products of size 3: 1e-6
    full = decode.causal_attention(q, k[:, :T], v[:, :T])
    cached = decode.cached_attention(q, k, v, positions)
    for b in range(B):
        for t in range(T):
            assert (full[b, t] - by_hand(b, t, t)).abs().max() < 2e-6
            assert (cached[b, t] - by_hand(b, t, start[b] + t)).abs().max() < 2e-6
    for t in range(T):                                                     # row by row, as decoding calls it
        one = decode.cached_attention(q[:, t:t + 1], k, v, torch.full((B, 1), t))
        torch.testing.assert_close(one[:, 0], full[:, t], atol=2e-6, rtol=0)
