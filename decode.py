"""The operations of a decoder block that are not matrix products, one function each.

Every function is the plain torch line of its operation: the meaning, on any device and in any dtype, with
autograd. model.py and rollout.py call them by these names and by nothing else, so that a fused kernel can
take the place of one without a second forward anywhere.

    x  (B, T, D)   rms_norm → q, k, v → rope → KV cache → attention → + x → rms_norm → swiglu → + x

Random numbers are Philox-4x32-10 (Salmon et al., SC 2011), as in tl.randint4x: a function of a counter and a
key with no state. The counter is (vocabulary id / 4, position, sequence number, step), the key is the seed.
So a sample depends neither on its neighbours in the batch nor on the order in which sequences finish.

Needs: torch.
"""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps, dtype=None):
    """x / rms(x) · weight over the last axis, in fp32; the result in `dtype`, else x's. weight (D,) f32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(dtype or x.dtype)


def rope(x, cos, sin):
    """Rotate the pairs (i, i + Dh/2) of each head by the angles of its position. x (B, T, H, Dh), cos and sin
    (B, T, Dh) f32."""
    a, b = x.float().chunk(2, -1)
    rotated = torch.cat((-b, a), -1)
    return (x.float() * cos[:, :, None] + rotated * sin[:, :, None]).to(x.dtype)


def swiglu(gate_up):
    """(…, 2F), gate first → silu(gate) · up (…, F)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def causal_attention(q, k, v):
    """A position attends to itself and those before it. q (B, T, H, Dh), k, v (B, T, Hkv, Dh) → (B, T, H·Dh).

    Rows are padded on the right, where causality alone keeps the padding out.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))                                    # (B, heads, T, Dh)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


def cached_attention(q, k, v, positions):
    """Attend to cached positions 0 … positions[b, t]. q (B, T, H, Dh), k, v (B, S, Hkv, Dh) → (B, T, H·Dh).

    The heads that share a key head go along the query axis, so that keys and values are read once.
    """
    B, T, H, Dh = q.shape
    Hkv = k.shape[2]
    q = q.view(B, T, Hkv, H // Hkv, Dh).permute(0, 2, 3, 1, 4).reshape(B, Hkv, -1, Dh)  # (B, Hkv, rep·T, Dh)
    live = torch.arange(k.shape[1], device=q.device) <= positions[:, :, None]           # (B, T, S)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2),
                                         attn_mask=live.repeat(1, H // Hkv, 1)[:, None])
    return out.view(B, Hkv, H // Hkv, T, Dh).permute(0, 3, 1, 2, 4).reshape(B, T, -1)


def sample(logits, temperature, seed, step, sequence, position):
    """Draw from softmax(logits / temperature): → token (B,) int64, its log-probability (B,) f32.

    argmax(logits / T + Gumbel noise) is an exact draw (Gumbel-max), with no cumulative sum and no sort.
    Temperature 0 takes the largest logit; the log-probability then is that of temperature 1.
    logits (B, V) f32; seed, step, position: ints; sequence (B,) int64: the global number of each sequence.
    """
    scaled = logits / temperature if temperature > 0 else logits
    noisy = scaled + gumbel(logits.shape[1], seed, step, sequence, position) if temperature > 0 else scaled
    token = noisy.argmax(-1)
    return token, scaled.gather(1, token[:, None])[:, 0] - scaled.logsumexp(-1)


def gumbel(V, seed, step, sequence, position):
    """(B, V) f32 standard Gumbel noise, B = len(sequence)."""
    block = torch.arange((V + 3) // 4, device=sequence.device)[None]                     # (1, V/4)
    where, when = (torch.tensor(n & 0xFFFFFFFF, device=block.device) for n in (position, step))
    words = philox(seed, block, where, sequence[:, None], when)
    bits = torch.stack(words, -1).flatten(1)[:, :V]                                      # (B, V) 32-bit words
    # 23 bits and the half fit fp32. With 24 the largest would round to 1, and its noise, infinite, would win
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def philox(seed, c0, c1, c2, c3, rounds=10):
    """Philox-4x32: int64 tensors that broadcast, each holding one 32-bit word of the counter → four words."""
    low = 0xFFFFFFFF
    key0, key1 = seed & low, (seed >> 32) & low
    for _ in range(rounds):
        # int64 wraps, so that the product's upper word may come out negative: the mask repairs it
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ key0, b & low, ((a >> 32) & low) ^ c3 ^ key1, a & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return torch.broadcast_tensors(c0, c1, c2, c3)
