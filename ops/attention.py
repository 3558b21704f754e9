"""Rotary positions and attention: causal over whole prompts, and one token against a KV cache.

    RoPE       rotate the pair (i, i + Dh/2) of each head by the angle position · θ_i
    attention  softmax(q @ k.T / √Dh) @ v, where a token sees itself and earlier tokens of its row
    GQA        the H query heads share Hkv key heads: query head h reads key head h // (H / Hkv)

RoPE (rotary position embedding) is arXiv 2104.09864, GQA (grouped-query attention) 2305.13245. On a
CPU plain torch lines compute each result, and they are its definition. On a GPU Triton kernels
compute the same, but causal attention is torch's on both. rope has a gradient, also by its kernel;
cached_attention has none, because only the sampler calls it.

How a GPU computes cached_attention. A decode step has one query per row, so it takes as long as the
cached keys and values take to load. A few rows with long caches must still occupy all SMs. So a
row's cached positions are split into pieces of 256 (split-KV, "flash decoding"):

    a CTA (program, in Triton's words) computes one piece of one row, for one key head and all
    query heads that share it, so that it loads keys and values once for all of them;
    the CTA of a row that finishes last merges the row's pieces in their order, so that a result
    does not depend on timing.

The kernel reads each row's length from GPU memory, so one CUDA graph serves all lengths up to the
pieces that it was captured for. A piece's size is fixed, so only the number of rows, which chooses
the tile, can change a row's bits. The kernel computes scores.T = K @ q.T: a tensor core's tile has
at least 16 rows, which keys fill, but only 8 columns, which suit few queries. Rows of one group
have the same prompt. They load whole tiles of it from the slot of the group's first row, so L2
serves all of them.

PDL (programmatic dependent launch, from Hopper on): the GPU starts a kernel while its predecessor
still runs. The kernel loads what no recent kernel writes (in cached_attention: positions, slots,
cos, sin, older keys and values), waits for its predecessor, and then allows its successor to start.

Left out: sliding windows, attention biases. Needs: torch; on a GPU also triton.
"""

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # a CPU needs no Triton: these two only let Python define the kernels below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


SPLIT = 256  # cached positions of one piece: what one CTA of the attention reads
# Use PyTorch's own attention kernels: cuDNN plans its attention anew for each shape, which takes
# longer than the attention of an update.
torch.backends.cuda.enable_cudnn_sdp(False)


def launch_options(x):
    """→ a kernel's launch options: PDL on Hopper and newer GPUs, no PDL in Triton's interpreter.

    PDL tells the kernel to wait, launch_pdl tells CUDA to start the kernel early.
    """
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"PDL": pdl, "launch_pdl": pdl}


@jit
def wait_for_predecessor(PDL: constexpr):
    """Wait until the kernel before has ended and its writes are visible. Then allow the GPU to
    start the next kernel, which waits for this one in the same way.

    Call this before the first load of what another kernel wrote, and before the first store: the
    predecessor may still read the memory that the store overwrites.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# --- rotary positions


def rope(x, cos, sin):
    """Rotary position embedding: rotate the pair (i, i + Dh/2) of each head by its position's i-th
    angle, in fp32 → x's shape and dtype.

    x (…, H, Dh), on a GPU (B, T, H, Dh), which may be a strided part of qkv. cos, sin (…, Dh/2)
    f32: of the angles, the same for all heads of a token; contiguous on a GPU.
    """
    if x.is_cuda:
        return Rope.apply(x, cos, sin)
    x1, x2 = x.float().chunk(2, -1)
    cos = cos[..., None, :]  # (…, 1, Dh/2)
    sin = sin[..., None, :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


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
    """Launch the kernel. sign: 1.0 rotates by the angles, −1.0 by the opposite ones."""
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
        num_warps=8,
        **launch_options(x),
    )
    return out


@jit(do_not_specialize=["sign"])
def _rope_kernel(
    # x and its strides
    x,
    row_stride,
    token_stride,
    head_stride,
    # the rotation
    cos,
    sin,
    sign,
    # the result, contiguous
    out,
    # sizes
    H,
    # meta
    DH: constexpr,
    ROWS: constexpr,
    HALF: constexpr,
    PDL: constexpr,
):
    """Grid (T, B): a CTA rotates all heads of one token, as two tiles (ROWS, HALF) of the first and
    the second half of each head. ROWS and HALF are H and Dh/2 rounded up to a power of two; the
    masks exclude what lies past H and Dh/2.
    """
    wait_for_predecessor(PDL)  # the qkv product before writes x
    t = tl.program_id(0)
    b = tl.program_id(1)
    token = b.to(tl.int64) * tl.num_programs(0) + t
    h = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + token * (DH // 2) + d, mask=d < DH // 2, other=0.0)  # (1, HALF)
    s = tl.load(sin + token * (DH // 2) + d, mask=d < DH // 2, other=0.0) * sign
    x += b.to(tl.int64) * row_stride + t.to(tl.int64) * token_stride
    mask = (h < H) & (d < DH // 2)
    x1 = tl.load(x + h * head_stride + d, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + h * head_stride + d + DH // 2, mask=mask, other=0.0).to(tl.float32)
    out += token * H * DH + h * DH + d
    tl.store(out, (x1 * c - x2 * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + DH // 2, (x2 * c + x1 * s).to(out.dtype.element_ty), mask=mask)


# --- attention over whole prompts


def causal_attention(q, k, v):
    """Each token attends to itself and to earlier tokens of its row.

    q (B, T, H, Dh), k, v (B, T, Hkv, Dh) → (B, T, H·Dh) in q's dtype. Rows are padded on the right,
    so the causal mask also hides the padding from every real token; results in the padding are
    meaningless.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, Dh)
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2)


# --- attention of a decode step


def _rms_norm(x, weight, eps):
    """x (…, D) / rms(x) · weight (D,) f32, computed in fp32 → (…, D) in x's dtype.

    A copy of elementwise.rms_norm, because this file stands alone.
    """
    return torch.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def cached_attention(qkv, head_norms, cos, sin, cache, layer, positions):
    """Attention of a decode step, for one new token per row: normalize and rotate its q and k,
    write k and v to the cache, attend to positions 0 … positions[b] → (B, H·Dh) in qkv's dtype.

    qkv (B, (H + 2·Hkv)·Dh): the projection's output, all heads of q, then of k, then of v.
    head_norms: (q's weight (Dh,) f32, k's weight, eps) for Qwen3, which normalizes each head of q
    and k, or None. cos, sin (B, Dh/2) f32. layer: int. positions (B,) int64: of the new tokens; −1
    marks a finished row, whose result is undefined and whose keys and values are not written.

    cache: a model.KVCache; k[layer] and v[layer] are (slots, Hkv, length, Dh). Row b is cached in
    slot cache.slots[b]. Its first cache.shared[b] positions hold the same in slot cache.leaders[b],
    where a GPU reads whole tiles of them. A GPU loads older keys and values before the PDL wait, so
    the kernel before this one must not write them.
    """
    if qkv.is_cuda:
        return _cached_attention(qkv, head_norms, cos, sin, cache, layer, positions)
    k_cache = cache.k[layer]
    v_cache = cache.v[layer]
    slots = cache.slots
    Hkv, _, Dh = k_cache.shape[1:]
    q, k, v = qkv.unflatten(-1, (-1, Dh)).tensor_split((-2 * Hkv, -Hkv), 1)  # (B, heads, Dh)
    if head_norms:
        q_weight, k_weight, eps = head_norms
        q = _rms_norm(q, q_weight, eps)
        k = _rms_norm(k, k_weight, eps)
    q = rope(q, cos, sin)
    k = rope(k, cos, sin)
    running = (positions >= 0).nonzero()[:, 0]  # numbers of the rows that have not finished
    k_cache[slots[running], :, positions[running]] = k[running]
    v_cache[slots[running], :, positions[running]] = v[running]
    longest = int(positions.max()) + 1
    visible = torch.arange(longest, device=q.device) <= positions[:, None]  # (B, longest)
    # Query heads that share a key head become queries of that head, (B, Hkv, H/Hkv, Dh), so that
    # keys and values are read once.
    out = F.scaled_dot_product_attention(
        q.unflatten(1, (Hkv, -1)),
        k_cache[slots, :, :longest],
        v_cache[slots, :, :longest],
        attn_mask=visible[:, None, None],
    )
    return out.flatten(1)


def _cached_attention(qkv, head_norms, cos, sin, cache, layer, positions):
    """Launch the kernel. cache.pieces: the pieces of the longest row, or more. cache.counters (≥
    B·Hkv,) int32: how many pieces of a row and key head are done; 0 before and after a call.
    """
    pieces = cache.pieces
    B, width = qkv.shape
    _, Hkv, length, Dh = cache.k[layer].shape
    H = width // Dh - 2 * Hkv
    q_weight, k_weight, eps = head_norms or (None, None, 0.0)
    out = qkv.new_empty(B, H * Dh)
    # Scratch memory for rows of several pieces. With p = 2^(score − the piece's largest score):
    # each piece's Σ p·v; its largest score in line 0 and Σ p in line 1.
    sums = qkv.new_empty(B, Hkv, pieces, H // Hkv, Dh, dtype=torch.float32)
    maxima = qkv.new_empty(B, Hkv, pieces, 2, H // Hkv, dtype=torch.float32)
    assert cache.counters.numel() >= B * Hkv and pieces * SPLIT < length + SPLIT
    # Few rows: large tiles, so that a CTA loads its piece at once. Many rows: small tiles, so that
    # several CTAs share an SM.
    few = 4 * B * Hkv <= 132  # at 4 pieces a row, no more CTAs than an H100 has SMs
    if qkv.is_cuda:
        few &= (
            torch.cuda.get_device_properties(qkv.device).shared_memory_per_block_optin > 200 * 2**10
        )
    half = max(16, triton.next_power_of_2(Dh) // 2)
    scale = Dh**-0.5 * 1.4426950408889634  # times log2(e), because the kernel uses exp2
    _attention_kernel[Hkv, pieces, B](
        # the new tokens
        qkv,
        q_weight,
        k_weight,
        eps,
        cos,
        sin,
        # the cache
        cache.k[layer],
        cache.v[layer],
        cache.slots,
        cache.leaders,
        cache.shared,
        positions,
        # results and scratch
        out,
        sums,
        maxima,
        cache.counters,
        # sizes
        length,
        scale,
        H,
        # meta
        DH=Dh,
        REP=H // Hkv,
        SPLIT=SPLIT,
        TILE=min((8192 if few else 2048) // half, SPLIT),
        ROWS=max(8, triton.next_power_of_2(H // Hkv)),
        HALF=half,
        num_warps=4 if few else 2,
        num_stages=3,
        **launch_options(qkv),
    )
    return out


@jit
def _rotated(x, at, mask, weight, d, in_d, cos, sin, eps, DH: constexpr):
    """→ both halves (ROWS, HALF) of some heads, normalized and rotated in fp32, rounded to x's
    dtype where torch rounds: after the norm and after the rotation.
    """
    x1 = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + DH // 2, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DH + eps)[:, None]
        x1 = x1 * rstd * tl.load(weight + d, mask=in_d, other=0.0)[None, :]
        x2 = x2 * rstd * tl.load(weight + DH // 2 + d, mask=in_d, other=0.0)[None, :]
        x1 = x1.to(x.dtype.element_ty).to(tl.float32)
        x2 = x2.to(x.dtype.element_ty).to(tl.float32)
    first = (x1 * cos - x2 * sin).to(x.dtype.element_ty)
    second = (x2 * cos + x1 * sin).to(x.dtype.element_ty)
    return first, second


@jit(do_not_specialize=["length"])
def _attention_kernel(
    # the new tokens
    qkv,
    q_weight,
    k_weight,
    eps,
    cos,
    sin,
    # the cache
    k_cache,
    v_cache,
    slots,
    leaders,
    shared,
    positions,
    # results and scratch
    out,
    sums,
    maxima,
    counters,
    # sizes
    length,
    scale,
    H,
    # meta
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

    ROWS: REP rounded up to a power of two, at least 8, the columns of a tensor core's tile. HALF:
    Dh/2 rounded up. The masks exclude what lies past REP, past Dh and past the row's position. q
    and k are loaded as two halves (…, HALF), because RoPE pairs the halves; v is not.
    """
    h = tl.program_id(0)
    piece = tl.program_id(1)
    b = tl.program_id(2)
    # Before the wait, load only what was written before this layer's norm ran (older keys and
    # values, but not qkv). The kernels in between, norm and qkv, have waited for all of that.
    position = tl.load(positions + b).to(tl.int32)
    Hkv = tl.num_programs(0)
    last = position // SPLIT  # the piece of the new token
    begin = piece * SPLIT
    head = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    dim = tl.arange(0, 2 * HALF)
    in_d = d < DH // 2
    in_q = (head < REP)[:, None] & (d < DH // 2)[None, :]
    c = tl.load(cos + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    s = tl.load(sin + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    slot = tl.load(slots + b)
    in_both = tl.load(shared + b).to(tl.int32)  # positions that the leader's slot holds too
    at = (slot * Hkv + h) * length * DH  # offset of this head's first key
    to_leader = (tl.load(leaders + b) - slot) * Hkv * length * DH  # from there to the leader's copy
    k_cache += at
    v_cache += at
    if begin > position:
        # This piece is empty. Piece 0 of a finished row waits all the same: if no CTA waited, this
        # kernel could end before its predecessor, and the next kernel would read too early.
        if piece == 0:
            wait_for_predecessor(PDL)
        return
    qkv += b.to(tl.int64) * (H + 2 * Hkv) * DH
    q1 = tl.zeros((HALF, ROWS), qkv.dtype.element_ty)
    q2 = tl.zeros((HALF, ROWS), qkv.dtype.element_ty)
    # Online softmax: m is the running maximum of the scores, total the sum of 2^(score − m), acc
    # that of 2^(score − m) · v. When m grows to `new`, total and acc shrink by 2^(m − new). total
    # keeps a sum for each line of the tile, which are added up after the loop.
    m = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((TILE, ROWS), tl.float32)
    acc = tl.zeros((2 * HALF, ROWS), tl.float32)
    # At least one tile, masked if need be, because the loop also handles the new token.
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
            # The wait returns 0, which is added to the pointer: a fake dependency, which stops the
            # compiler from hoisting loads of qkv above the wait.
            if PDL:
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
            q1 = tl.trans(q1_rows)  # (HALF, ROWS)
            q2 = tl.trans(q2_rows)
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
        p = tl.exp2(scores - new[None, :])
        shrink = tl.exp2(m - new)
        total = total * shrink[None, :] + p
        acc = tl.dot(v, p.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
        m = new
    total = tl.sum(total, 0)
    in_out = (head < REP)[None, :] & (dim < DH)[:, None]
    done = last == 0
    if last > 0:  # several pieces: store this one; the CTA that finishes last merges all
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
            m = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((2 * HALF, ROWS), tl.float32)
            # Unrolled, so that the loads of four pieces are in flight. ".cg" skips L1, which may
            # hold stale lines of the scratch memory.
            for first in range(0, last + 1, 4):
                for j in tl.static_range(4):
                    i = first + j
                    here = head < tl.where(i <= last, REP, 0)
                    m_i = tl.load(max_ptr + 2 * i * REP, here, -1e30, cache_modifier=".cg")
                    total_i = tl.load(max_ptr + 2 * i * REP + REP, here, 1.0, cache_modifier=".cg")
                    acc_i = tl.load(
                        acc_ptr + i * REP * DH, in_out & here[None, :], 0.0, cache_modifier=".cg"
                    )
                    new = tl.maximum(m, m_i)
                    shrink = tl.exp2(m - new)
                    grow = tl.exp2(m_i - new)
                    total = total * shrink + total_i * grow
                    acc = acc * shrink[None, :] + acc_i * grow[None, :]
                    m = new
    if done:
        out_ptr = out + (b * H + h * REP + head)[None, :] * DH + dim[:, None]
        tl.store(out_ptr, (acc / total[None, :]).to(out.dtype.element_ty), mask=in_out)


if __name__ == "__main__":
    angles = torch.arange(3)[:, None] * torch.pi / 2  # of positions 0, 1, 2; Dh = 2 has one angle
    heads = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    print("the head [1, 0] at positions 0, 1, 2:", rope(heads, angles.cos(), angles.sin()))
    v = torch.tensor([1.0, 3.0, 8.0]).view(1, 3, 1, 1)  # (B, T, H, Dh)
    print("means of the values 1, 3, 8 so far:", causal_attention(v * 0, v * 0, v))
