# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""Gumbel-max sampling: a draw from softmax(logits / T), by one argmax.

    token = argmax(logits / T + noise)        noise = −ln(−ln(uniform)), one for each possible token

The uniform numbers are counter-based. Philox-4x32-10 (Salmon et al., SC 2011; Triton's tl.philox)
is a function without any state, from a counter and a key to four random 32-bit words:

    counter   (token id // 4, index, sequence, step)    key   seed    word   token id % 4

    step      of training, the same for all answers of a rollout; −1 in an evaluation
    sequence  the number of the answer in its step, unique over all prompts, batches and ranks
    index     of the new token in its answer, from 0

A uniform number has 23 bits, so the noise is at most 16.64. Rare tokens are drawn too rarely: one
of probability 3e-8 about half as often as it should, and one below 1e-9 never. More bits would
change the noise of every token.

The counter and the key alone fix a token's noise. So the noise depends neither on the other rows
of the batch nor on the order in which answers end. The sampler may move an answer to another slot,
or preempt it and resume it later: the answer's next tokens get the same noise.

`sample` draws tokens, and `append` writes them to the answers. On a CPU plain torch lines compute
each result, and they are its definition. On a GPU, if gradients are disabled, both launch Triton
kernels with the same result, but for the rounding of logarithms. The kernels use PDL (programmatic
dependent launch, from Hopper on): the GPU starts a kernel while its predecessor still runs, and the
kernel waits for its predecessor before it reads.

Left out: top-k, penalties, speculative sampling. Needs: torch; on a GPU also triton.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # macOS has no Triton: these two only let Python define the kernels below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


VOCAB_TILE = 2048  # logits that one CTA (program, in Triton's words) of _tile_kernel reads
# The largest nucleus in tokens, ties aside. nucleus() calls topk(), which is faster for 4096 logits
# than sort() for the whole vocabulary.
NUCLEUS = 4096


def uses_kernels(x: Tensor) -> bool:
    """Launch Triton kernels for x? Only if x is on a GPU and gradients are disabled,
    because these kernels have no backward. In all other cases the caller runs plain torch code,
    which autograd can differentiate and which runs on every device.
    """
    return x.is_cuda and not torch.is_grad_enabled()


def launch_options(x: Tensor) -> dict[str, bool]:
    """→ a kernel's launch options: PDL on Hopper and newer GPUs, no PDL in Triton's interpreter.

    PDL tells the kernel to wait for its predecessor, launch_pdl tells CUDA to start it early.
    """
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"PDL": pdl, "launch_pdl": pdl}


@jit
def wait_for_predecessor(PDL: constexpr):
    """Wait until the previous kernel has ended and its writes are visible. Then allow the GPU to
    start the next kernel, which waits for this one in the same way.

    Call this before the first load of what a running kernel may still write, and before the first
    store: the predecessor may still read the memory that the store overwrites.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def sample(
    logits: Tensor, temperature: float, seed: int, step: int, sequence: Tensor, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / temperature) → token (B,) int64, its log-probability (B,) f32.

    logits (B, V) f32. temperature ≥ 0: 0 takes the largest logit, with its log-probability at
    temperature 1. seed, step, and sequence, index (B,) int64 of each row: as explained at the
    top of this file. A row of NaN gets an arbitrary token of the vocabulary.
    """
    if uses_kernels(logits):
        return _sample(logits, temperature, seed, step, sequence, index)
    scaled = logits / (temperature or 1.0)
    noisy = scaled
    if temperature > 0:
        noisy = scaled + noise(logits.shape[1], seed, step, sequence, index)
    token = noisy.argmax(-1)
    return token, scaled.gather(1, token[:, None])[:, 0] - scaled.logsumexp(-1)


def nucleus(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Top-p (Holtzman et al. 2020): logits (B, V) f32 → the same with −inf outside the nucleus.

    The nucleus is the fewest most probable tokens whose probabilities sum to top_p or more, with
    0 < top_p <= 1: at most NUCLEUS tokens, and all that tie with the last of them. Temperature 0
    counts as 1. A row of NaN stays NaN.
    """
    scaled = logits / (temperature or 1.0)
    ordered = scaled.topk(min(NUCLEUS, logits.shape[1])).values  # (B, NUCLEUS), largest first
    p = (ordered - scaled.logsumexp(-1, keepdim=True)).exp()
    before = p.cumsum(-1) - p  # sum over the more probable tokens
    least = ordered.masked_fill(before >= top_p, float("inf")).amin(-1, keepdim=True)  # (B, 1)
    # Compare with a threshold, do not scatter: a deterministic scatter cannot be captured into a
    # CUDA graph.
    return logits.masked_fill(scaled < least, float("-inf"))


def _sample(logits, temperature, seed, step, sequence, index):
    """sample by two kernels. _tile_kernel reduces each tile of 2,048 logits to five numbers,
    _merge_kernel merges the tiles of a row. Two, because with few rows one CTA a row would leave
    most SMs idle.
    """
    B, V = logits.shape
    logits = logits.contiguous()
    tiles = triton.cdiv(V, VOCAB_TILE)
    # Scratch memory between the kernels: five numbers of each tile, where z = logits / temperature.
    # A tile's winner is its token with the largest z + noise. One of the winners becomes the row's
    # token.
    #     max_z, sum_exp         max z and Σ exp(z − max z); those of all tiles give ln Σ exp z
    #     win_id, win_noisy      the winner's id and its z + noise
    #     win_z                  its z: minus ln Σ exp z it is the log-probability
    max_z, sum_exp, win_noisy, win_z = logits.new_empty(4, B, tiles, dtype=torch.float32)
    win_id = sequence.new_empty(B, tiles)  # int64
    token = torch.empty_like(sequence)
    logprob = logits.new_empty(B)
    _tile_kernel[tiles, B](
        # pointers and scalars: what is drawn
        logits,
        temperature or 1.0,
        seed,
        step,
        sequence,
        index,
        # pointers: scratch
        max_z,
        sum_exp,
        win_id,
        win_noisy,
        win_z,
        # sizes
        V,
        # meta
        GREEDY=temperature == 0,
        TILE=VOCAB_TILE,
        **launch_options(logits),
    )
    _merge_kernel[B,](
        max_z,
        sum_exp,
        win_id,
        win_noisy,
        win_z,
        token,
        logprob,
        tiles,
        TILES=triton.next_power_of_2(tiles),
        num_warps=1,
        **launch_options(logits),
    )
    return token, logprob


@jit(do_not_specialize=["seed", "step"])
def _tile_kernel(
    # pointers and scalars: what is drawn
    logits,
    temperature,
    seed,
    step,
    sequence,
    index,
    # pointers: scratch
    max_z,
    sum_exp,
    win_id,
    win_noisy,
    win_z,
    # sizes
    V,
    # meta
    GREEDY: constexpr,
    TILE: constexpr,
    PDL: constexpr,
):
    """Grid (tiles, B): a CTA draws among TILE tokens of one row. seed and step are not specialized,
    because Triton would compile another kernel when one of them is 1 or a multiple of 16.
    """
    tile = tl.program_id(0)
    b = tl.program_id(1)
    wait_for_predecessor(PDL)  # lm_head's product or nucleus writes logits
    block = tile * (TILE // 4) + tl.arange(0, TILE // 4)  # (TILE/4,): four tokens share a counter
    ids = tile * TILE + tl.arange(0, TILE)  # (TILE,): token ids
    # Ids past V get −inf: they never win and add exp(−inf) = 0.
    z = tl.load(logits + b.to(tl.int64) * V + ids, mask=ids < V, other=float("-inf")) / temperature
    noisy = z
    if not GREEDY:
        zero = block * 0  # tl.philox takes tensors of one shape
        w0, w1, w2, w3 = tl.philox(
            seed,
            block,
            zero + tl.load(index + b).to(tl.int32),
            zero + tl.load(sequence + b).to(tl.int32),
            zero + step.to(tl.int32),
        )
        # join pairs its arguments along a new last dimension. So this is (TILE/4, 2, 2), of each
        # block [[w0, w1], [w2, w3]], and then w0 w1 w2 w3 of each block, (TILE,).
        bits = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(TILE)
        bits = bits.to(tl.uint32, bitcast=True) >> 9
        uniform = (bits.to(tl.float32) + 0.5) * 2.0**-23  # as in noise()
        noisy = z - tl.log(-tl.log(uniform))
    # A finished row may be NaN. Its argmax may then lie past V: the minimum keeps it below V.
    win = tile * TILE + tl.minimum(tl.argmax(noisy, 0), V - 1 - tile * TILE)
    largest = tl.max(z, 0)
    at = b * tl.num_programs(0) + tile
    tl.store(max_z + at, largest)
    # -1e30: a tile whose logits are all −inf must add exp(−inf) = 0, but −inf − −inf is NaN.
    tl.store(sum_exp + at, tl.sum(tl.exp(z - tl.maximum(largest, -1e30)), 0))
    tl.store(win_id + at, win)
    tl.store(win_noisy + at, tl.max(noisy, 0))
    tl.store(win_z + at, tl.sum(tl.where(ids == win, z, 0.0), 0))


@jit
def _merge_kernel(
    max_z,
    sum_exp,
    win_id,
    win_noisy,
    win_z,
    token,
    logprob,
    tiles,
    TILES: constexpr,
    PDL: constexpr,
):
    """Grid (B,): a CTA merges a row's tiles. The token is the winner of the tile with the largest
    noisy z; its log-probability is its z minus ln Σ exp z over the row.

    TILES: `tiles` rounded up to a power of two. Lanes past `tiles` load what never wins and adds 0.
    """
    wait_for_predecessor(PDL)  # _tile_kernel writes the scratch memory
    b = tl.program_id(0)
    i = tl.arange(0, TILES)
    at = b * tiles + i
    in_row = i < tiles
    tops = tl.load(max_z + at, mask=in_row, other=float("-inf"))  # (TILES,), as are the others
    sums = tl.load(sum_exp + at, mask=in_row, other=0.0)
    noisy = tl.load(win_noisy + at, mask=in_row, other=float("-inf"))
    z = tl.load(win_z + at, mask=in_row, other=0.0)
    best = tl.minimum(tl.argmax(noisy, 0), tiles - 1)  # NaN, as above
    largest = tl.max(tops, 0)
    log_sum = largest + tl.log(tl.sum(sums * tl.exp(tops - largest), 0))
    tl.store(logprob + b, tl.sum(tl.where(i == best, z, 0.0), 0) - log_sum)
    tl.store(token + b, tl.load(win_id + b * tiles + best))


# --- write a drawn token to its answer


def append(token: Tensor, logprob: Tensor, slots, stops: Tensor, max_new_tokens: int, rollout):
    """Write each row's new token to its answer; end the row at a stop token or at max_new_tokens.

    token (n,) int64, logprob (n,) f32: from sample, for n slots. stops (m,) int64. Changed in
    place: rollout (a rollout.Rollout), and of slots (n of rollout.Slots) last_token, which takes
    the token, and position, which grows by 1, or becomes −1 when its row ends. A row at −1 is
    skipped.
    """
    if uses_kernels(logprob):
        _append_kernel[len(token),](
            # what was drawn, for which rows
            token,
            logprob,
            slots.rollout_row,
            slots.position,
            # when an answer ends
            stops,
            len(stops),
            max_new_tokens,
            # receives the token, which the model reads next
            slots.last_token,
            # the Rollout
            rollout.tokens,
            rollout.logprobs,
            rollout.lengths,
            rollout.finished,
            rollout.tokens.shape[1],
            **launch_options(token),
            num_warps=1,
        )
        return
    live = slots.position >= 0
    token, row, position = token[live], slots.rollout_row[live], slots.position[live] + 1
    rollout.tokens[row, position] = token
    rollout.logprobs[row, position] = logprob[live]
    rollout.lengths[row] += 1
    rollout.finished[row] = torch.isin(token, stops)
    ended = rollout.finished[row] | (rollout.lengths[row] >= max_new_tokens)
    slots.position[live] = torch.where(ended, -1, position)
    slots.last_token[live] = token


@jit(do_not_specialize=["limit", "width"])
def _append_kernel(
    token,
    logprob,
    rows,
    positions,
    stops,
    n_stops,
    limit,
    last,
    tokens,
    logprobs,
    lengths,
    finished,
    width,
    PDL: constexpr,
):
    """Grid (n,): a CTA appends the token of one slot, as the torch lines of append do."""
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    at = tl.load(positions + b) + 1
    if at > 0:
        row, new = tl.load(rows + b), tl.load(token + b)
        length = tl.load(lengths + row) + 1
        stop = 0
        for i in range(n_stops):
            stop |= (tl.load(stops + i) == new).to(tl.int32)
        tl.store(tokens + row * width + at, new)
        tl.store(logprobs + row * width + at, tl.load(logprob + b))
        tl.store(lengths + row, length)
        tl.store(finished + row, stop != 0)
        tl.store(positions + b, tl.where((stop != 0) | (length >= limit), -1, at))
        tl.store(last + b, new)


# --- the noise, in plain torch


def noise(V: int, seed: int, step: int, sequence: Tensor, index: Tensor) -> Tensor:
    """→ (B, V) f32 standard Gumbel noise, −ln(−ln(uniform)), for sequence and index (B,) int64.

    Token 4i + j of the vocabulary gets word j of counter (i, index, sequence, step), under the
    key seed.
    """
    block = torch.arange((V + 3) // 4, device=sequence.device)[None]  # (1, V/4)
    words = philox(seed, block, index[:, None], sequence[:, None], step & 0xFFFFFFFF)
    bits = torch.stack(words, -1).flatten(1)[:, :V]  # (B, V) 32-bit words
    # 23 bits + ½ are exact in fp32. 24 bits could round to uniform = 1, whose noise is infinite:
    # such a token would win whatever its logit.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor | int) -> tuple[Tensor, ...]:
    """Philox-4x32-10: a counter of four 32-bit words (int64 tensors or ints) → four random 32-bit
    words, int64 tensors of one shape. seed: 64 bits, the key.

    Each of ten rounds multiplies two words by constants to 64 bits. The product's low half becomes
    a new word, its high half is mixed by XOR with another word and with the key.
    """
    low = 0xFFFFFFFF
    key0 = seed & low
    key1 = (seed >> 32) & low
    for _ in range(10):
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        # int64 overflow may make a >> 32 negative; `& low` keeps the 32 bits that are right
        c0 = ((b >> 32) & low) ^ c1 ^ key0
        c1 = b & low
        c2 = ((a >> 32) & low) ^ c3 ^ key1
        c3 = a & low
        key0 = (key0 + 0x9E3779B9) & low
        key1 = (key1 + 0xBB67AE85) & low
    return torch.broadcast_tensors(c0, c1, c2, c3)


if __name__ == "__main__":
    number = torch.arange(100_000)  # of an answer: a draw for the first token of each
    logits = torch.tensor([2.0, 1.0, 0.0, -2.0])
    token, _ = sample(logits.expand(100_000, 4), 0.7, 5, 0, number, number * 0)
    print("softmax at temperature 0.7   ", (logits / 0.7).softmax(0))
    print("shares of 100 000 draws      ", token.bincount() / 100_000)
    alone, _ = sample(logits[None], 0.7, 5, 0, number[11:12], number[:1])
    print("drawn for sequence 11, and for it alone", token[11], alone)
