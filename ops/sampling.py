"""Gumbel-max sampling: argmax(logits / T − log(−log(uniform))) is an exact draw from softmax(logits
/ T).

The uniform numbers are counter-based: Philox-4x32-10 (Salmon et al., SC 2011; Triton's tl.philox)
maps a counter (vocabulary id // 4, position, sequence number, step) and a key, the seed, to random
bits, without any state. So a draw depends neither on the other rows of its batch nor on the order
in which sequences finish.

Plain torch lines define what each function returns. On a GPU, outside autograd, `sample` launches
Triton kernels with the same result. Their launch is a PDL (programmatic dependent launch): a kernel
may start while its predecessor still runs, and waits for it before reading.

Needs: torch; on a GPU also triton.
"""

import torch

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # a CPU machine may lack Triton: its kernels are then never launched
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

VOCAB_TILE = 2048  # logits that one CTA of the sampler reads
NUCLEUS = 4096  # most tokens of a nucleus: topk finds so many sooner than sort() orders all


def uses_kernels(x):
    """Kernels are for tensors on a GPU; they have no gradient."""
    return x.is_cuda and not torch.is_grad_enabled()


def launch_options(x):
    """→ a kernel's launch options: PDL on Hopper and newer GPUs, no PDL in Triton's interpreter."""
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"PDL": pdl, "launch_pdl": pdl}


@jit
def wait_for_predecessor(PDL: constexpr):
    """Wait until the kernel before has ended and its results are visible, then let the next kernel
    start early in the same way. A kernel calls this before it reads what another one wrote.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def sample(logits, temperature, seed, step, sequence, position):
    """Draw from softmax(logits / temperature) → token (B,) int64, its log-probability (B,) f32.

    logits (B, V) f32. Temperature 0 takes the largest logit, with its log-probability at
    temperature 1. The random bits depend on these alone: seed and step, ints; sequence (B,) int64,
    the global number of each row's answer; position (B,) int64, the new token's index in it.
    """
    if uses_kernels(logits):
        return _sample(logits, temperature, seed, step, sequence, position)
    scaled = logits / (temperature or 1.0)
    noisy = scaled
    if temperature > 0:
        noisy = scaled + noise(logits.shape[1], seed, step, sequence, position)
    token = noisy.argmax(-1)
    return token, scaled.gather(1, token[:, None])[:, 0] - scaled.logsumexp(-1)


def nucleus(logits, temperature, top_p):
    """Logits (B, V) f32 → the same with −inf outside the nucleus: the fewest most probable tokens
    whose probabilities sum to top_p or more, 0 < top_p <= 1 (Holtzman et al. 2020), at most NUCLEUS
    of them, and all that tie with the last of these. Temperature 0 counts as 1. A row of NaN stays
    NaN.
    """
    scaled = logits / (temperature or 1.0)
    ordered = scaled.topk(min(NUCLEUS, logits.shape[1])).values
    p = (ordered - scaled.logsumexp(-1, keepdim=True)).exp()
    before = p.cumsum(-1) - p  # sum over the more probable tokens
    least = ordered.masked_fill(before >= top_p, float("inf")).amin(-1, keepdim=True)  # (B, 1)
    # Compare with a threshold, do not scatter: a deterministic scatter cannot be captured into a
    # CUDA graph.
    return logits.masked_fill(scaled < least, float("-inf"))


def _sample(logits, temperature, seed, step, sequence, position):
    """sample by two kernels: one finds four numbers and the winner of each tile of 2,048 logits,
    the other merges a row's tiles.
    """
    B, V = logits.shape
    logits = logits.contiguous()
    tiles = triton.cdiv(V, VOCAB_TILE)
    # With z = logits / temperature, of each tile: max z; Σ exp(z − max z); the largest noisy z; the
    # z of the token that has it. A row's four lines of `tiles` numbers lie one behind the other.
    found = logits.new_empty(B, 4, tiles, dtype=torch.float32)
    winner = sequence.new_empty(B, tiles)  # that token's id
    token = torch.empty_like(sequence)
    logprob = logits.new_empty(B)
    _tile_kernel[tiles, B](
        logits,
        temperature or 1.0,
        seed,
        step,
        sequence,
        position,
        found,
        winner,
        V,
        GREEDY=temperature == 0,
        TILE=VOCAB_TILE,
        **launch_options(logits),
    )
    _merge_kernel[B,](
        found,
        winner,
        token,
        logprob,
        tiles,
        TILES=triton.next_power_of_2(tiles),
        **launch_options(logits),
        num_warps=1,
    )
    return token, logprob


@jit(do_not_specialize=["seed", "step"])
def _tile_kernel(
    # what is drawn
    logits,
    temperature,
    seed,
    step,
    sequence,
    position,
    # what a tile gives
    found,
    winner,
    # size, meta
    V,
    GREEDY: constexpr,
    TILE: constexpr,
    PDL: constexpr,
):
    """Grid: (tiles, rows)."""
    tile = tl.program_id(0)
    b = tl.program_id(1)
    wait_for_predecessor(PDL)
    block = tile * (TILE // 4) + tl.arange(0, TILE // 4)
    ids = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits + b.to(tl.int64) * V + ids, mask=ids < V, other=float("-inf")) / temperature
    noisy = z
    if not GREEDY:
        zero = block * 0  # tl.philox takes tensors of one shape
        w0, w1, w2, w3 = tl.philox(
            seed,
            block,
            zero + tl.load(position + b).to(tl.int32),
            zero + tl.load(sequence + b).to(tl.int32),
            zero + step.to(tl.int32),
        )
        bits = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(TILE)  # w0 w1 w2 w3 of each block
        bits = bits.to(tl.uint32, bitcast=True) >> 9
        uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23, as in noise()
        noisy = z - tl.log(-tl.log(uniform))
    # The argmax of NaN (a finished row) may lie outside the tile: the minimum keeps it inside V.
    best = tl.minimum(tl.argmax(noisy, 0), V - 1 - tile * TILE)
    top = tl.max(z, 0)
    tiles = tl.num_programs(0)
    found += b * 4 * tiles + tile
    tl.store(found, top)
    # -1e30: a tile whose logits are all −inf must add exp(−inf) = 0, but −inf − −inf is NaN.
    tl.store(found + tiles, tl.sum(tl.exp(z - tl.maximum(top, -1e30)), 0))
    tl.store(found + 2 * tiles, tl.max(noisy, 0))
    tl.store(found + 3 * tiles, tl.sum(tl.where(ids == tile * TILE + best, z, 0.0), 0))
    tl.store(winner + b * tiles + tile, tile * TILE + best)


@jit
def _merge_kernel(found, winner, token, logprob, tiles, TILES: constexpr, PDL: constexpr):
    """Grid: (rows,). The token is the winner of the tile with the largest noisy z; its
    log-probability is its z minus ln Σ exp z over the row.
    """
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, TILES)
    found += b * 4 * tiles + i
    top = tl.load(found, mask=i < tiles, other=float("-inf"))
    total = tl.load(found + tiles, mask=i < tiles, other=0.0)
    noisy = tl.load(found + 2 * tiles, mask=i < tiles, other=float("-inf"))
    best = tl.minimum(tl.argmax(noisy, 0), tiles - 1)
    largest = tl.max(top, 0)
    log_sum = largest + tl.log(tl.sum(total * tl.exp(top - largest), 0))
    z = tl.load(found + 3 * tiles, mask=i < tiles, other=0.0)
    tl.store(logprob + b, tl.sum(tl.where(i == best, z, 0.0), 0) - log_sum)
    tl.store(token + b, tl.load(winner + b * tiles + best))


def noise(V, seed, step, sequence, position):
    """→ (B, V) f32 standard Gumbel noise, −ln(−ln(uniform)), for sequence and position (B,) int64.

    Philox gives four random words for a counter: token 4i + j of the vocabulary gets word j of
    counter (i, position, sequence, step), under the key seed.
    """
    block = torch.arange((V + 3) // 4, device=sequence.device)[None]  # (1, V/4)
    words = philox(seed, block, position[:, None], sequence[:, None], step & 0xFFFFFFFF)
    bits = torch.stack(words, -1).flatten(1)[:, :V]  # (B, V) 32-bit words
    # 23 bits + ½ are exact in fp32; 24 could round to uniform = 1, whose noise is infinite and
    # always wins
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def philox(seed, c0, c1, c2, c3):
    """Philox-4x32-10: a counter of four 32-bit words (int64 tensors or ints) → four random 32-bit
    words.
    """
    low = 0xFFFFFFFF
    key0, key1 = seed & low, (seed >> 32) & low
    for _ in range(10):
        # int64 overflow may make a >> 32 negative; `& low` keeps the 32 bits that are right
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((b >> 32) & low) ^ c1 ^ key0,
            b & low,
            ((a >> 32) & low) ^ c3 ^ key1,
            a & low,
        )
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return torch.broadcast_tensors(c0, c1, c2, c3)


if __name__ == "__main__":
    number, logits = torch.arange(100_000), torch.tensor([[2.0, 1.0, 0.0, -2.0]])
    token, logprob = sample(logits.expand(100_000, 4), 0.7, 5, 0, number, number * 0)
    alone = torch.cat([sample(logits, 0.7, 5, 0, n[None], n[None] * 0)[0] for n in number[:12]])
    print("softmax at temperature 0.7   ", *[f"{p:.4f}" for p in (logits[0] / 0.7).softmax(0)])
    print(
        "shares of 100 000 draws      ",
        *[f"{n / 100_000:.4f}" for n in token.bincount(minlength=4)],
    )
    print("drawn for sequences 0 … 11   ", *token[:12].tolist())
    print("each drawn without the others", *alone.tolist())
    print("exp(log-probability), 5 … 8  ", *[f"{p:.4f}" for p in logprob[5:9].exp()])
