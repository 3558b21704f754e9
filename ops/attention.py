"""Rotary positions and attention: causal over whole prompts, and one token against a KV cache.

Plain torch lines define each result. On a GPU Triton kernels compute the same, but causal attention
is torch's. rope has a gradient, also by its kernel.

PDL (programmatic dependent launch): a kernel starts before its predecessor has ended, loads what no
recent kernel writes (cached_attention: positions, slots, cos, sin, older keys and values), waits
for its predecessor, and then allows its successor to start.

cached_attention splits a row's cached positions into pieces of 256 (split-KV). A CTA (program, in
Triton's words) computes one piece of one row for one key head and all query heads that share it.
The CTA that finishes last adds up the pieces in their order, so that a result does not depend on
timing. The kernel reads each row's length from GPU memory: a graph serves every length up to its
pieces. It computes scores.T = K @ q.T: a tensor core's tile has 16 rows or more, which keys fill,
and only 8 columns for the few queries. A piece's size is fixed, so only the number of rows, which
chooses the tile, can change a row's bits. Rows of one group read whole tiles of their common prompt
from the slot of the group's first row, so L2 serves all of them.

Needs: torch; on a GPU also triton.
"""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # a CPU machine may lack Triton: its kernels are then never launched
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

SPLIT = 256  # cached positions of one piece: what one CTA of the attention reads
# cuDNN plans its attention anew for each shape, which takes longer than an update's attention: use
# PyTorch's
torch.backends.cuda.enable_cudnn_sdp(False)


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


def rope(x, cos, sin):
    """Rotary position embedding: rotate the pair (i, i + Dh/2) of each head by its position's i-th
    angle. x (…, H, Dh), on a GPU (B, T, H, Dh); cos and sin of the angles (…, Dh/2) f32 → x's shape
    and dtype.
    """
    if x.is_cuda:
        return Rope.apply(x, cos, sin)
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Rope(torch.autograd.Function):
    """rope by kernels. Backward rotates the gradient by the opposite angles."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rope(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, d):
        return _rope(d, *ctx.saved_tensors, -1.0), None, None


def _rope(x, cos, sin, sign):
    B, T, H, Dh = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rope_kernel[T, B](
        x,
        *x.stride()[:3],
        cos,
        sin,
        sign,
        out,
        H,
        DH=Dh,
        ROWS=triton.next_power_of_2(H),
        HALF=triton.next_power_of_2(Dh // 2),
        **launch_options(x),
        num_warps=8,
    )
    return out


@jit(do_not_specialize=["sign"])
def _rope_kernel(
    x,
    of_row,
    of_token,
    of_head,
    cos,
    sin,
    sign,
    out,
    H,
    DH: constexpr,
    ROWS: constexpr,
    HALF: constexpr,
    PDL: constexpr,
):
    """Grid (T, B): a CTA rotates all heads of one token."""
    wait_for_predecessor(PDL)
    t, b = tl.program_id(0), tl.program_id(1)
    token = b.to(tl.int64) * tl.num_programs(0) + t
    h, d = tl.arange(0, ROWS)[:, None], tl.arange(0, HALF)[None, :]
    c = tl.load(cos + token * (DH // 2) + d, mask=d < DH // 2, other=0.0)
    s = tl.load(sin + token * (DH // 2) + d, mask=d < DH // 2, other=0.0) * sign
    x += b.to(tl.int64) * of_row + t.to(tl.int64) * of_token
    mask = (h < H) & (d < DH // 2)
    p = tl.load(x + h * of_head + d, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(x + h * of_head + d + DH // 2, mask=mask, other=0.0).to(tl.float32)
    out += token * H * DH + h * DH + d
    tl.store(out, (p * c - q * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + DH // 2, (q * c + p * s).to(out.dtype.element_ty), mask=mask)


def causal_attention(q, k, v):
    """A position attends to itself and earlier ones. q (B, T, H, Dh), k, v (B, T, Hkv, Dh) → (B, T,
    H·Dh). Rows are padded on the right, so the causal mask also hides the padding from every real
    token.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, Dh)
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2)


def _rms_norm(x, weight, eps):
    """x (…, D) / rms(x) · weight (D,) f32, computed in fp32 → (…, D) in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return normed.to(x.dtype)


def cached_attention(qkv, head_norms, cos, sin, cache, layer, positions):
    """Attention of a decode step, for one new token per row: normalise and rotate its q and k,
    write k and v to the cache, attend to positions 0 … positions[b] → (B, H·Dh).

    qkv (B, (H + 2·Hkv)·Dh): the projection's output. head_norms: (q's weight, k's weight, eps) or
    None. cos, sin (B, Dh/2) f32. positions (B,) int64: −1 marks a finished row, whose result is
    undefined and whose keys and values are not written. cache: a model.KVCache. Row b is cached in
    slot cache.slots[b]; its first cache.shared[b] positions are the same in slot cache.leaders[b],
    where a GPU reads whole tiles of them. On a GPU older keys and values are loaded before the PDL
    wait: do not write them in the kernel before.
    """
    if qkv.is_cuda:
        return _cached_attention(qkv, head_norms, cos, sin, cache, layer, positions)
    # (slots, Hkv, length, Dh)
    k_cache, v_cache, slots = cache.k[layer], cache.v[layer], cache.slots
    Hkv, _, Dh = k_cache.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, Dh)).tensor_split((-2 * Hkv, -Hkv), 1)  # (B, heads, Dh)
    if head_norms:
        q_weight, k_weight, eps = head_norms
        q = _rms_norm(q, q_weight, eps)
        k = _rms_norm(k, k_weight, eps)
    q = rope(q, cos, sin)
    k = rope(k, cos, sin)
    going = (positions >= 0).nonzero()[:, 0]
    k_cache[slots[going], :, positions[going]] = k[going]
    v_cache[slots[going], :, positions[going]] = v[going]
    longest = int(positions.max()) + 1
    live = torch.arange(longest, device=q.device) <= positions[:, None]  # (B, longest)
    # query heads that share a key head become queries of one head, so that keys and values are read
    # once
    out = F.scaled_dot_product_attention(
        q.unflatten(1, (Hkv, -1)),
        k_cache[slots, :, :longest],
        v_cache[slots, :, :longest],
        attn_mask=live[:, None, None],
    )
    return out.flatten(1)


def _cached_attention(qkv, head_norms, cos, sin, cache, layer, positions):
    """Launch the kernel. cache.pieces: the pieces of the longest row, or more. cache.counters (≥
    B·Hkv,) int32: how many pieces of a row and key head are done; 0 before and after a call.
    """
    k_cache, v_cache, pieces = cache.k[layer], cache.v[layer], cache.pieces
    B, width = qkv.shape
    _, Hkv, length, Dh = k_cache.shape
    H = width // Dh - 2 * Hkv
    q_weight, k_weight, eps = head_norms or (None, None, 0.0)
    out = qkv.new_empty(B, H * Dh)
    sums = qkv.new_empty(B, Hkv, pieces, H // Hkv, Dh, dtype=torch.float32)  # each piece's Σ p·v
    # its largest score, Σ p
    maxima = qkv.new_empty(B, Hkv, pieces, 2, H // Hkv, dtype=torch.float32)
    assert cache.counters.numel() >= B * Hkv and pieces * SPLIT < length + SPLIT
    # few rows: large tiles, so that a CTA loads its piece at once; many: small ones, so that CTAs
    # share an SM
    few = 4 * B * Hkv <= 132  # at 4 pieces a row, no more CTAs than an H100 has SMs
    if qkv.is_cuda:
        few &= (
            torch.cuda.get_device_properties(qkv.device).shared_memory_per_block_optin > 200 * 2**10
        )
    half = max(16, triton.next_power_of_2(Dh) // 2)
    scale = Dh**-0.5 * 1.4426950408889634  # times log2(e), because the kernel uses exp2
    _attention_kernel[Hkv, pieces, B](
        qkv,
        q_weight,
        k_weight,
        eps,
        cos,
        sin,
        k_cache,
        v_cache,
        cache.slots,
        cache.leaders,
        cache.shared,
        positions,
        out,
        sums,
        maxima,
        cache.counters,
        length,
        scale,
        H,
        DH=Dh,
        REP=H // Hkv,
        SPLIT=SPLIT,
        TILE=min((8192 if few else 2048) // half, SPLIT),
        ROWS=max(8, triton.next_power_of_2(H // Hkv)),
        HALF=half,
        **launch_options(qkv),
        num_warps=4 if few else 2,
        num_stages=3,
    )
    return out


@jit
def _rotated(x, at, mask, weight, d, in_d, cos, sin, eps, DH: constexpr):
    """→ both halves (ROWS, HALF) of some heads, normalised and rotated, rounded where torch
    rounds.
    """
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at + DH // 2, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        rstd = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DH + eps)[:, None]
        a = a * rstd * tl.load(weight + d, mask=in_d, other=0.0)[None, :]
        b = b * rstd * tl.load(weight + DH // 2 + d, mask=in_d, other=0.0)[None, :]
        a, b = a.to(x.dtype.element_ty).to(tl.float32), b.to(x.dtype.element_ty).to(tl.float32)
    return (a * cos - b * sin).to(x.dtype.element_ty), (b * cos + a * sin).to(x.dtype.element_ty)


@jit(do_not_specialize=["length"])
def _attention_kernel(
    qkv,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    leaders,
    shared,
    positions,
    out,
    sums,
    maxima,
    counters,
    length,
    scale,
    H,
    DH: constexpr,
    REP: constexpr,
    SPLIT: constexpr,
    TILE: constexpr,
    ROWS: constexpr,
    HALF: constexpr,
    PDL: constexpr,
):
    """Grid (Hkv, pieces, B): one piece of one row, for a key head and the REP query heads that
    share it.
    """
    h, piece, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Before the wait, load only what was written before this layer's norm ran (older keys and
    # values, but not qkv), because the kernels between, norm and qkv, have themselves waited for
    # all that
    position = tl.load(positions + b).to(tl.int32)
    Hkv, last, begin = tl.num_programs(0), position // SPLIT, piece * SPLIT
    head, d, dim = tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    in_d, in_q = d < DH // 2, (head < REP)[:, None] & (d < DH // 2)[None, :]
    c = tl.load(cos + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    s = tl.load(sin + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    slot, in_both = tl.load(slots + b), tl.load(shared + b).to(tl.int32)
    at = (slot * Hkv + h) * length * DH  # offset of this head's first key
    to_leader = (tl.load(leaders + b) - slot) * Hkv * length * DH  # from there to the leader's copy
    k_cache += at
    v_cache += at
    if begin > position:
        if piece == 0:  # a finished row waits too: else this kernel could end before
            wait_for_predecessor(PDL)  # its predecessor, and the next kernel would read too early
        return
    qkv += b.to(tl.int64) * (H + 2 * Hkv) * DH
    q1, q2 = (
        tl.zeros((HALF, ROWS), qkv.dtype.element_ty),
        tl.zeros((HALF, ROWS), qkv.dtype.element_ty),
    )
    m, total = tl.full((ROWS,), -1e30, tl.float32), tl.zeros((TILE, ROWS), tl.float32)
    acc = tl.zeros((2 * HALF, ROWS), tl.float32)
    # online softmax: m is the running maximum of the scores, total the sum of 2^(score − m), acc
    # that of 2^(score − m) · v; when m grows to `new`, total and acc shrink by 2^(m − new)
    for start in range(begin, tl.maximum(begin + 1, tl.minimum(begin + SPLIT, position)), TILE):
        t = tl.arange(0, TILE)
        live = (start + t < position)[:, None]
        there = tl.where(start + TILE <= in_both, to_leader, 0) + start * DH
        k_ptr = k_cache + there + t[:, None] * DH + d[None, :]
        k1 = tl.load(k_ptr, mask=live & in_d[None, :], other=0.0)  # (TILE, HALF)
        k2 = tl.load(k_ptr + DH // 2, mask=live & in_d[None, :], other=0.0)
        v = tl.load(
            v_cache + there + t[None, :] * DH + dim[:, None],
            other=0.0,
            mask=(start + t < position)[None, :] & (dim < DH)[:, None],
        )  # (2·HALF, TILE)
        if start == begin:  # only now wait: the loads above overlap with the qkv kernel
            if PDL:  # the wait returns 0; adding it keeps loads of qkv below
                qkv += tl.multiple_of(
                    tl.inline_asm_elementwise(
                        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
                        "=r",
                        [],
                        tl.int32,
                        is_pure=False,
                        pack=1,
                    ),
                    16,
                )
            q_at = (h * REP + head)[:, None] * DH + d[None, :]
            q1_rows, q2_rows = _rotated(qkv, q_at, in_q, q_weight, d, in_d, c, s, eps, DH)
            q1, q2 = tl.trans(q1_rows), tl.trans(q2_rows)
            if piece == last:  # use the new token's k, v directly, and cache them
                new_at = (H + h) * DH + d[None, :]
                new1, new2 = _rotated(qkv, new_at, in_d[None, :], k_weight, d, in_d, c, s, eps, DH)
                new_v = tl.load(qkv + (H + Hkv + h) * DH + dim, mask=dim < DH, other=0.0)
                tl.store(k_cache + position * DH + d[None, :], new1, mask=in_d[None, :])
                tl.store(k_cache + position * DH + DH // 2 + d[None, :], new2, mask=in_d[None, :])
                tl.store(v_cache + position * DH + dim, new_v, mask=dim < DH)
                m = (
                    tl.sum(
                        q1_rows.to(tl.float32) * new1.to(tl.float32)
                        + q2_rows.to(tl.float32) * new2.to(tl.float32),
                        1,
                    )
                    * scale
                )
                total += (tl.arange(0, TILE) == 0)[:, None].to(tl.float32)
                acc += new_v.to(tl.float32)[:, None]
        scores = tl.dot(k2, q2, tl.dot(k1, q1, input_precision="ieee"), input_precision="ieee")
        scores = tl.where(live, scores * scale, float("-inf"))  # (TILE, ROWS)
        new = tl.maximum(m, tl.max(scores, 0))
        p, shrink = tl.exp2(scores - new[None, :]), tl.exp2(m - new)
        total = total * shrink[None, :] + p
        acc = tl.dot(v, p.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
        m = new
    total = tl.sum(total, 0)
    in_out = (head < REP)[None, :] & (dim < DH)[:, None]
    done = last == 0
    if last > 0:  # several pieces: store this one; the CTA that is last merges all
        tile = b * Hkv + h
        at = (tile * tl.num_programs(1)).to(tl.int64) * REP
        acc_ptr = sums + at * DH + head[None, :] * DH + dim[:, None]
        max_ptr = maxima + at * 2 + head
        tl.store(acc_ptr + piece * REP * DH, acc, mask=in_out)
        tl.store(max_ptr + piece * 2 * REP, m, mask=head < REP)
        tl.store(max_ptr + piece * 2 * REP + REP, total, mask=head < REP)
        tl.debug_barrier()  # all warps of this CTA have stored their piece
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == last
        if done:
            tl.store(counters + tile, 0)
            m, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((2 * HALF, ROWS), tl.float32)
            for first in range(0, last + 1, 4):  # unrolled: four pieces' loads in flight
                for j in tl.static_range(4):  # .cg skips L1, which may hold stale lines
                    i = first + j
                    here = head < tl.where(i <= last, REP, 0)
                    m_i = tl.load(max_ptr + 2 * i * REP, here, -1e30, cache_modifier=".cg")
                    total_i = tl.load(max_ptr + 2 * i * REP + REP, here, 1.0, cache_modifier=".cg")
                    acc_i = tl.load(
                        acc_ptr + i * REP * DH, in_out & here[None, :], 0.0, cache_modifier=".cg"
                    )
                    new = tl.maximum(m, m_i)
                    shrink, grow = tl.exp2(m - new), tl.exp2(m_i - new)
                    total = total * shrink + total_i * grow
                    acc = acc * shrink[None, :] + acc_i * grow[None, :]
                    m = new
    if done:
        out_ptr = out + (b * H + h * REP + head)[None, :] * DH + dim[:, None]
        tl.store(out_ptr, (acc / total[None, :]).to(out.dtype.element_ty), mask=in_out)


if __name__ == "__main__":
    angles = torch.tensor([[0.0], [torch.pi / 2], [torch.pi]])  # of positions 0, 1, 2, with Dh = 2
    heads = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    turned = rope(heads, angles.cos(), angles.sin())
    print("one head at three positions", turned[:, 0].round(decimals=3).tolist())
    q = torch.zeros(1, 3, 1, 2)  # equal scores for all keys
    v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1).expand(1, 3, 1, 2)
    print("equal scores give the mean of the values 1, 3, 8 so far:")
    print(causal_attention(q, q, v)[0, :, 0].tolist())
