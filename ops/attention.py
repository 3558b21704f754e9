"""Rotary positions and attention: among the tokens of a flat row, and of one token with its pages.

    RoPE       rotate the pair (i, i + Dh/2) of each head by the angle position · θ_i
    attention  softmax(q @ k.T / √Dh) @ v, where a token sees itself and earlier tokens of its text
    GQA        the H query heads share Hkv key heads: query head h reads key head h // (H / Hkv)

RoPE (rotary position embedding) is arXiv 2104.09864, GQA (grouped-query attention) 2305.13245. On a
CPU plain torch lines compute each result, and they are its definition.

A forward pass has its tokens in one flat row, without padding. Two objects say which tokens a token
sees; a layer calls them with its qkv:

    Packed     training and prefill. A prompt stands once, its answers follow it:
                   | prompt 0 | answer | answer | prompt 1 | answer | …
               An answer sees its prompt and itself. Prompts and other answers are independent.
    Paged      a decode step: one new token for each running row. It sees the row's earlier tokens,
               whose keys and values lie in pages of the KV cache. A block table lists a row's pages
               (vLLM's PagedAttention, arXiv 2309.06180), so rows may share the pages of a prompt.

How a GPU computes Paged. A decode step has one query per row, so it takes as long as the cached
keys and values take to load. A few rows with long caches must still occupy all SMs. So a row's
cached positions are split into pieces of 256 (split-KV, "flash decoding"), which are two pages:

    a CTA (program, in Triton's words) computes one piece of one row, for one key head and all
    query heads that share this key head, so that the CTA loads keys and values once for all;
    of the CTAs of one row and one key head, the last to finish merges the pieces in their order,
    so that a result does not depend on timing.

The kernel reads each row's length from GPU memory, so one CUDA graph serves all lengths up to the
pieces that it was captured for. A piece's size is fixed, so only the number of rows, which chooses
the tile, can change a row's bits. The kernel computes scores.T = K @ q.T: a tensor core's tile has
at least 16 rows, which keys fill, but only 8 columns, which suit few queries. Pages that several
rows share are loaded from memory once, because L2 serves the other rows.

PDL (programmatic dependent launch, from Hopper on): the GPU starts a kernel while its predecessor
still runs. The kernel of Paged loads what no recent kernel writes (positions, block table, cos,
sin, older keys and values), waits for its predecessor, and then allows its successor to start.

Left out: sliding windows, attention biases. Needs: torch; on a GPU also triton.
"""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # a CPU needs no Triton: these two only let Python define the kernels below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


PAGE = 128  # positions of one page of the KV cache on a GPU
SPLIT = 2 * PAGE  # cached positions of one piece: what one CTA of the attention reads
CAUSAL = {"window_size": (-1, 0)}  # of varlen_attn, aligned at the end: queries are the last keys
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 needs no flag
    CAUSAL["enable_gqa"] = True


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

    Call this before the first load of what a running kernel may still write, and before the first
    store: the predecessor may still read the memory that the store overwrites.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


# --- rotary positions


def rope(x, cos, sin):
    """Rotary position embedding: rotate the pair (i, i + Dh/2) of each head by its position's i-th
    angle, in fp32 → x's shape and dtype.

    x (n, H, Dh), which may be a strided part of qkv. cos, sin (n, Dh/2) f32: of the angles, the
    same for all heads of a token; contiguous on a GPU.
    """
    if x.is_cuda:
        return Rope.apply(x, cos, sin)
    x1, x2 = x.float().chunk(2, -1)
    cos = cos[:, None]  # (n, 1, Dh/2)
    sin = sin[:, None]
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
    n, H, Dh = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rope_kernel[n,](
        x,
        *x.stride()[:2],
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


@jit
def _rotated(x, at, mask, weight, d, in_d, cos, sin, eps, DH: constexpr):
    """→ the first and the second halves of some heads, (heads, HALF) each, rotated in fp32. If
    weight is not None, the heads are normalized first, also in fp32.

    Results are rounded to x's dtype where torch rounds: after the norm and after the rotation.
    at, mask: offsets of the first halves in x, and which to load. d, in_d: columns of a half, and
    which lie within Dh/2. cos, sin: (1, HALF).
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


@jit
def _rope_kernel(
    # x and its strides
    x,
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
    """Grid (n,): a CTA rotates all heads of one token, as two tiles (ROWS, HALF) of the first and
    the second half of each head. ROWS and HALF are H and Dh/2 rounded up to a power of two; the
    masks exclude what lies past H and Dh/2.
    """
    # The kernels before write x: the qkv product or, with Qwen3's norms, torch.cat. In backward x
    # is the gradient of rope's result.
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + token * (DH // 2) + d, mask=d < DH // 2, other=0.0)  # (1, HALF)
    s = tl.load(sin + token * (DH // 2) + d, mask=d < DH // 2, other=0.0) * sign
    x += token * token_stride
    mask = (h < H) & (d < DH // 2)
    first, second = _rotated(x, h * head_stride + d, mask, None, d, None, c, s, 0.0, DH)
    out += token * H * DH + h * DH + d
    tl.store(out, first, mask=mask)
    tl.store(out + DH // 2, second, mask=mask)


# --- attention of a flat row


class Heads(NamedTuple):
    """What a layer's attention must know of its heads."""

    query: int  # H
    key: int  # Hkv
    norms: tuple  # Qwen3: (q's weight (Dh,) f32, k's, eps), shared by the heads; else None


class KVCache(NamedTuple):
    """Keys and values of the running rows, in qkv's dtype, in pages of PAGE positions each. A CPU
    takes pages of any size: there, PAGE in the shapes of this file means k.shape[3].
    """

    k: torch.Tensor  # (layers, pages, Hkv, PAGE, Dh)
    v: torch.Tensor
    counters: torch.Tensor  # (≥ B·Hkv,) int32, zeros: the kernel counts a row's finished pieces


class Places(NamedTuple):
    """Where a prefill stores keys and values: those of flat token token[i] go to offset[i] of page
    page[i]. All are (m,) int64.
    """

    token: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor


class Gather(torch.autograd.Function):
    """x (n, …), index (m,) int64 → x[index] (m, …), in x's dtype. The gradient of x is summed in
    fp32 and then rounded once, to the dtype of the result's gradient. index gets none.

    A prompt's keys, values and last state are read by each of its G answers. Their advantages sum
    to about 0, so their gradients cancel: a sum in bf16 would be mostly rounding.
    """

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x[index]

    @staticmethod
    def backward(ctx, d):
        (index,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, device=d.device)
        return total.index_add_(0, index, d.float()).to(d.dtype), None


class Packed:
    """Attention among the tokens of a flat row: prompts, each followed by its answers.

    positions (n,) int64: of each token, from 0 at the start of its prompt. A call returns the
    attention of one layer.
    """

    def __init__(self, groups, device, cache=None, places=None):
        """groups: a pair for each prompt, (its length ≥ 1, the lengths of its answers), in the
        order of the flat row. cache, places: a KVCache, and the Places where a prefill stores its
        keys and values there.
        """
        self.cache, self.places = cache, places
        self.spans = []  # (first token, last + 1, which token sees which) of each group, for a CPU
        positions, keys, query_lengths, key_lengths = [], [], [], []
        end = 0  # of the flat row so far
        for prompt_length, answer_lengths in groups:
            start = end
            prompt = torch.arange(start, start + prompt_length)
            lengths = [prompt_length, *answer_lengths]
            for length in lengths:
                seen = 0 if end == start else prompt_length  # tokens of the prompt before this text
                positions.append(torch.arange(seen, seen + length))
                keys += [prompt[:seen], torch.arange(end, end + length)]
                query_lengths.append(length)
                key_lengths.append(seen + length)
                end += length
            visible = None
            if answer_lengths and device.type == "cpu":
                text = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
                visible = ((text[:, None] == text) | (text == 0)).tril()  # 0: the prompt
            self.spans.append((start, end, visible))
        self.positions = torch.cat(positions).to(device)
        self.keys = None  # (m,) int64: the tokens that each text sees, one text after the other
        if any(answer_lengths for _, answer_lengths in groups):
            self.keys = torch.cat(keys).to(device)
        self.longest = max(query_lengths), max(key_lengths)
        # where each text begins among the queries, and among the keys, (texts + 1,) int32 each
        self.begins = [
            F.pad(torch.tensor(lengths), (1, 0)).cumsum(0).int().to(device)
            for lengths in (query_lengths, key_lengths)
        ]

    def __call__(self, qkv, heads, cos, sin, layer):
        """qkv (n, (H + 2·Hkv)·Dh): all heads of q, then of k, then of v. heads: Heads. cos, sin (n,
        Dh/2) f32: of the tokens' angles. layer: int, for the cache → (n, H·Dh) in qkv's dtype.
        """
        q, k, v = rotated_heads(qkv, heads, cos, sin)
        if self.cache is not None:
            token, page, offset = self.places
            self.cache.k[layer][page, :, offset] = k[token]
            self.cache.v[layer][page, :, offset] = v[token]
        if not qkv.is_cuda:
            return torch.cat([self.attend_to_group(q, k, v, *span) for span in self.spans])
        if self.keys is not None:
            k = Gather.apply(k, self.keys)
            v = Gather.apply(v, self.keys)
        return varlen_attn(q, k, v, *self.begins, *self.longest, **CAUSAL).flatten(1)

    def attend_to_group(self, q, k, v, start, end, visible):
        """Attention within one group, for a CPU → (end − start, H·Dh). visible: (end − start, end −
        start) bool; None: a prompt alone, which is causal.
        """
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, tokens, Dh)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def rotated_heads(qkv, heads, cos, sin):
    """→ q (n, H, Dh), k, v (n, Hkv, Dh) of the projection's output, ready for attention: q and k
    normalized if the model does so, and rotated.
    """
    H, Hkv, norms = heads
    qk, v = qkv.unflatten(-1, (H + 2 * Hkv, -1)).split((H + Hkv, Hkv), 1)
    if norms:
        q_weight, k_weight, eps = norms
        q, k = qk.split((H, Hkv), 1)
        qk = torch.cat([_rms_norm(q, q_weight, eps), _rms_norm(k, k_weight, eps)], 1)
    q, k = rope(qk, cos, sin).split((H, Hkv), 1)
    return q, k, v


def _rms_norm(x, weight, eps):
    """x (…, D) / rms(x) · weight (D,) f32, computed in fp32 → (…, D) in x's dtype.

    A copy of elementwise.rms_norm, because this file stands alone.
    """
    return torch.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


# --- attention of a decode step


class Paged(NamedTuple):
    """Attention of a decode step: one new token for each of B rows. A call writes a layer's new
    keys and values into the cache and returns that layer's attention to positions 0 … positions[b].
    """

    cache: KVCache
    # (B, blocks) int64: the page of a row's positions 0 … PAGE − 1, then of the next PAGE, …
    block_table: torch.Tensor
    # (B,) int64: of the new tokens; −1: the row has ended, its result is undefined, and nothing is
    # written for it
    positions: torch.Tensor
    pieces: int  # of SPLIT positions, at least as many as the longest row has: for the kernel

    def __call__(self, qkv, heads, cos, sin, layer):
        """qkv (B, (H + 2·Hkv)·Dh), heads, cos, sin (B, Dh/2), layer: as for Packed → (B, H·Dh).

        The kernel loads positions, block table, cos, sin and older keys and values before its PDL
        wait. So neither this layer's norm nor a kernel between the norm and this one may write
        them. AssertionError, on a GPU: the block table has fewer than 2 · pieces columns, or the
        cache has fewer than B·Hkv counters.
        """
        if qkv.is_cuda:
            return _paged_attention(qkv, heads, cos, sin, layer, self)
        q, k, v = rotated_heads(qkv, heads, cos, sin)
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        page_size = k_cache.shape[2]
        running = (self.positions >= 0).nonzero()[:, 0]  # numbers of the rows that have not ended
        block = self.positions[running] // page_size
        page, offset = self.block_table[running, block], self.positions[running] % page_size
        k_cache[page, :, offset] = k[running]
        v_cache[page, :, offset] = v[running]
        longest = int(self.positions.max()) + 1
        pages = self.block_table[:, : (longest - 1) // page_size + 1]
        # (B, blocks, Hkv, PAGE, Dh) → (B, Hkv, longest, Dh)
        k, v = (x[pages].transpose(1, 2).flatten(2, 3)[:, :, :longest] for x in (k_cache, v_cache))
        visible = torch.arange(longest, device=q.device) <= self.positions[:, None]  # (B, longest)
        # Query heads that share a key head become queries of that head, (B, Hkv, H/Hkv, Dh), so
        # that keys and values are read once.
        q = q.unflatten(1, (heads.key, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])
        return out.flatten(1)


def _paged_attention(qkv, heads, cos, sin, layer, paged):
    """Launch the kernel."""
    cache, pieces = paged.cache, paged.pieces
    B, _ = qkv.shape
    _, Hkv, _, Dh = cache.k[layer].shape
    H = heads.query
    q_weight, k_weight, eps = heads.norms or (None, None, 0.0)
    out = qkv.new_empty(B, H * Dh)
    # Scratch memory for rows of several pieces. With p = 2^(score − the piece's largest score):
    # each piece's Σ p·v; its largest score in line 0 and Σ p in line 1.
    sums = qkv.new_empty(B, Hkv, pieces, H // Hkv, Dh, dtype=torch.float32)
    maxima = qkv.new_empty(B, Hkv, pieces, 2, H // Hkv, dtype=torch.float32)
    assert cache.counters.numel() >= B * Hkv and 2 * pieces <= paged.block_table.shape[1]
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
        paged.block_table,
        paged.block_table.stride(0),
        paged.positions,
        # results and scratch
        out,
        sums,
        maxima,
        cache.counters,
        # sizes
        scale,
        H,
        # meta
        DH=Dh,
        REP=H // Hkv,
        PAGE=PAGE,
        TILE=min((8192 if few else 2048) // half, PAGE),
        ROWS=max(8, triton.next_power_of_2(H // Hkv)),
        HALF=half,
        num_warps=4 if few else 2,
        num_stages=3,
        **launch_options(qkv),
    )
    return out


@jit(do_not_specialize=["blocks"])
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
    block_table,
    blocks,
    positions,
    # results and scratch
    out,
    sums,
    maxima,
    counters,
    # sizes
    scale,
    H,
    # meta
    DH: constexpr,
    REP: constexpr,
    PAGE: constexpr,
    TILE: constexpr,
    ROWS: constexpr,
    HALF: constexpr,
    PDL: constexpr,
):
    """Grid (Hkv, pieces, B): a CTA computes one piece of one row, for a key head and the REP query
    heads that share this key head.

    ROWS: REP rounded up to a power of two, at least 8, the columns of a tensor core's tile. HALF:
    Dh/2 rounded up to a power of two, at least 16. The masks exclude what lies past REP, past Dh
    and past the row's position. The kernel loads q and k as two halves (…, HALF), because RoPE
    pairs the halves, but v whole.
    """
    h = tl.program_id(0)
    piece = tl.program_id(1)
    b = tl.program_id(2)
    # Before the wait, load only what was written before this layer's norm ran (older keys and
    # values, but not qkv). The kernels in between, norm and qkv, have waited for all of that.
    position = tl.load(positions + b).to(tl.int32)
    Hkv = tl.num_programs(0)
    last = position // (2 * PAGE)  # the piece of the new token
    begin = piece * 2 * PAGE
    head = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    dim = tl.arange(0, 2 * HALF)
    in_d = d < DH // 2
    in_q = (head < REP)[:, None] & (d < DH // 2)[None, :]
    c = tl.load(cos + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    s = tl.load(sin + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    # A piece lies in two pages. Offsets of this head's keys in both, from the piece's first key on.
    page1 = tl.load(block_table + b * blocks + piece * 2)
    page2 = tl.load(block_table + b * blocks + piece * 2 + 1)
    in_page1 = (page1 * Hkv + h) * PAGE * DH
    in_page2 = (page2 * Hkv + h) * PAGE * DH - PAGE * DH
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
    for start in range(begin, tl.maximum(begin + 1, tl.minimum(begin + 2 * PAGE, position)), TILE):
        t = tl.arange(0, TILE)
        live = (start + t < position)[:, None]
        there = tl.where(start - begin < PAGE, in_page1, in_page2) + (start - begin) * DH
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
                place = tl.where(position - begin < PAGE, in_page1, in_page2)
                place += (position - begin) * DH
                tl.store(k_cache + place + d[None, :], new1, mask=in_d[None, :])
                tl.store(k_cache + place + DH // 2 + d[None, :], new2, mask=in_d[None, :])
                tl.store(v_cache + place + dim, new_v, mask=dim < DH)
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
    v = torch.tensor([1.0, 3.0, 8.0, 20.0])  # of a prompt of two tokens and two answers of one
    qkv = torch.stack([v * 0, v * 0, v * 0, v * 0, v, v], 1)  # one head of q, k and v, Dh = 2
    packed = Packed([(2, [1, 1])], qkv.device)
    zero = torch.zeros(4, 1)
    print("each token's mean of the values it sees:", packed(qkv, Heads(1, 1, None), zero, zero, 0))
