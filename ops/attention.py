# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""Rotary positions and attention: among packed tokens, and of one new token with its row's pages.

    RoPE       rotate the pair (i, i + Dh/2) of each head by the angle position · θ_i
    attention  softmax(q @ k.T / √Dh) @ v, where a token sees itself and tokens before it
    GQA        the H query heads share Hkv key heads: query head h reads key head h // (H / Hkv)

RoPE (rotary position embedding) is arXiv 2104.09864, GQA (grouped-query attention) 2305.13245. On a
CPU plain torch lines compute each result, and they are its definition.

A forward pass takes its tokens packed, one after the other without padding. Two objects say which
tokens a token sees; a layer calls them with its qkv:

    Packed     training and prefill. A prompt is there once for answers that follow it:
                   | prompt 0 | answer | answer | prompt 1 | answer | …
               An answer sees its prompt and itself. Prompts and other answers are independent.
    Paged      a decode step: one new token for each running row. It sees the row's earlier tokens,
               whose keys and values lie in pages of the KV cache. A block table lists a row's pages
               (vLLM's PagedAttention, arXiv 2309.06180), so rows may share the pages of a prompt.

On a GPU, PyTorch's varlen_attn computes Packed, and a Triton kernel computes Paged. This file has
that kernel twice. plain_attention is its standard form; tests/test_ops.py runs it on a CPU, in
Triton's interpreter. You may stop reading there. _attention_kernel, which runs in a decode step, is
the fast form: a comment lists each change to the plain one and the reason for it.

Left out: sliding windows, attention biases. Needs: torch; on a GPU also triton.
"""

import inspect
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # macOS has no Triton: these two only let Python define the kernels below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


PAGE = 128  # positions of one page of the KV cache on a GPU
SPLIT = 2 * PAGE  # positions of one split: what a CTA (program, in Triton's words) reads
# varlen_attn's options for causal attention. It aligns queries and keys at the end: the n queries
# of a text are the last n of its keys.
CAUSAL = {"window_size": (-1, 0)}
if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 needs no flag
    CAUSAL["enable_gqa"] = True


# --- launching kernels early


def launch_options(x: Tensor) -> dict[str, bool]:
    """→ a kernel's launch options: PDL on Hopper and newer GPUs, no PDL in Triton's interpreter.

    PDL (programmatic dependent launch): the GPU starts a kernel while its predecessor still runs,
    so that the gap between the two costs no time. The option PDL tells the kernel to wait for its
    predecessor, launch_pdl tells CUDA to start the kernel early.
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


# --- rotary positions


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
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
def _rotated(x, at, mask, weight, d, cos, sin, eps, DH: constexpr):
    """→ the first and the second halves of some heads, (heads, HALF) each, rotated in fp32. If
    weight is not None, the heads are normalized first, also in fp32.

    Results are rounded to x's dtype where torch rounds: after the norm and after the rotation.
    at, mask: offsets of the first halves in x, and which to load. d: columns of a half, (HALF,) or
    (1, HALF). cos, sin: (1, HALF).
    """
    dtype = x.dtype.element_ty
    x1 = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + DH // 2, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        in_d = d < DH // 2
        rstd = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / DH + eps)[:, None]
        x1 = x1 * rstd * tl.load(weight + d, mask=in_d, other=0.0)
        x2 = x2 * rstd * tl.load(weight + DH // 2 + d, mask=in_d, other=0.0)
        x1 = x1.to(dtype).to(tl.float32)
        x2 = x2.to(dtype).to(tl.float32)
    first = (x1 * cos - x2 * sin).to(dtype)
    second = (x2 * cos + x1 * sin).to(dtype)
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
    # The kernels before write x: the qkv product or, with Qwen3's norms, torch.cat. In backward, x
    # is the gradient of rope's result.
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + token * (DH // 2) + d, mask=d < DH // 2, other=0.0)  # (1, HALF)
    s = tl.load(sin + token * (DH // 2) + d, mask=d < DH // 2, other=0.0) * sign
    x += token * token_stride
    mask = (h < H) & (d < DH // 2)
    first, second = _rotated(x, h * head_stride + d, mask, None, d, c, s, 0.0, DH)
    out += token * H * DH + h * DH + d
    tl.store(out, first, mask=mask)
    tl.store(out + DH // 2, second, mask=mask)


# --- attention of packed tokens


class Heads(NamedTuple):
    """What a layer's attention must know of its heads."""

    query: int  # H
    key: int  # Hkv
    norms: tuple | None  # Qwen3: (q's weight (Dh,) f32, k's, eps), shared by the heads


class KVCache(NamedTuple):
    """Keys and values of the running rows, in pages of PAGE positions each: in qkv's dtype, or as
    8-bit integers. A CPU takes pages of any size: there, PAGE in the shapes of this file means
    k[0].shape[2].
    """

    k: Tensor | list  # (layers, pages, Hkv, PAGE, Dh), or each layer's int8.Pages
    v: Tensor | list
    counters: Tensor  # (≥ B·Hkv,) int32, zeros: the fast kernel counts a row's finished splits


class SlotMapping(NamedTuple):
    """Where a prefill stores keys and values: those of packed token token[i] go to offset[i] of
    page page[i]. All are (m,) int64.
    """

    token: Tensor
    page: Tensor
    offset: Tensor


class Gather(torch.autograd.Function):
    """x (n, …), index (m,) int64 → x[index] (m, …), in x's dtype. The gradient of x is summed in
    fp32 and then rounded once, to the dtype of the result's gradient. index gets none.

    A prompt's keys, values and last state are read by each of its answers. In GRPO the advantages
    of one prompt's answers sum to about 0, so their gradients cancel: a sum in bf16 would be mostly
    rounding.
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
    """Attention among packed tokens: prompts, each followed by its answers. A call returns the
    attention of one layer.

    A *text* is a prompt or an answer. Its queries are its own tokens. Its keys are, for a prompt,
    the same tokens; for an answer, the tokens of its prompt, then its own.

    positions (n,) int64: of each token, from 0 at the start of its prompt.
    """

    def __init__(
        self,
        groups: list[tuple[int, list[int]]],
        device: torch.device,
        cache: KVCache | None = None,
        slots: SlotMapping | None = None,
    ):
        """groups: a pair for each prompt, (its length ≥ 1, the lengths of its answers), in the
        order of the packed tokens. cache, slots: where a prefill stores its keys and values.
        """
        self.cache, self.slots = cache, slots
        # For a CPU, which computes a group at a time: its first token, last + 1, and its mask.
        self.spans = []
        # For a GPU, which computes all texts at once: the tokens that each text's queries see.
        keys = []
        positions = []  # of each text's tokens
        end = 0  # tokens in the texts so far
        for prompt_length, answer_lengths in groups:
            start = end
            prompt = torch.arange(start, start + prompt_length)
            lengths = [prompt_length, *answer_lengths]
            for i, length in enumerate(lengths):  # text 0 is the prompt
                before = prompt[:0] if i == 0 else prompt  # what the text sees before itself
                positions.append(torch.arange(len(before), len(before) + length))
                keys.append(torch.cat([before, torch.arange(end, end + length)]))
                end += length
            visible = None
            if answer_lengths and device.type == "cpu":
                text_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
                visible = ((text_of[:, None] == text_of) | (text_of == 0)).tril()
            self.spans.append((start, end, visible))
        self.positions = torch.cat(positions).to(device)
        self.keys = None  # (m,) int64: each text's key tokens; None: the keys are the tokens
        if any(answer_lengths for _, answer_lengths in groups):
            self.keys = torch.cat(keys).to(device)
        # What varlen_attn takes, for queries and for keys: where each text begins, (texts + 1,)
        # int32, and the length of the longest text.
        query_lengths = [len(text) for text in positions]
        key_lengths = [len(text) for text in keys]
        self.cu_seqlens = [
            F.pad(torch.tensor(lengths), (1, 0)).cumsum(0).int().to(device)
            for lengths in (query_lengths, key_lengths)
        ]
        self.max_seqlens = [max(query_lengths), max(key_lengths)]

    def __call__(self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, layer: int) -> Tensor:
        """qkv (n, (H + 2·Hkv)·Dh): all heads of q, then of k, then of v. cos, sin (n, Dh/2) f32: of
        the tokens' angles. layer: for the cache → (n, H·Dh) in qkv's dtype.
        """
        q, k, v = rotated_heads(qkv, heads, cos, sin)
        if self.cache is not None:
            token, page, offset = self.slots
            self.cache.k[layer][page, :, offset] = k[token]
            self.cache.v[layer][page, :, offset] = v[token]
        if not qkv.is_cuda:
            return torch.cat([self.attend_to_group(q, k, v, *span) for span in self.spans])
        if self.keys is not None:
            k = Gather.apply(k, self.keys)
            v = Gather.apply(v, self.keys)
        return varlen_attn(q, k, v, *self.cu_seqlens, *self.max_seqlens, **CAUSAL).flatten(1)

    def attend_to_group(self, q, k, v, start, end, visible):
        """Attention within one group, for a CPU → (end − start, H·Dh). visible: (end − start, end −
        start) bool; None: a prompt alone, which is causal.
        """
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, tokens, Dh)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def rotated_heads(
    qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """→ q (n, H, Dh), k, v (n, Hkv, Dh) of the projection's output, ready for attention: q and k
    normalized if the model does so, and rotated.
    """
    H, Hkv, norms = heads
    qk, v = qkv.unflatten(-1, (H + 2 * Hkv, -1)).split((H + Hkv, Hkv), 1)
    if norms:
        *weights, eps = norms
        parts = zip(qk.split((H, Hkv), 1), weights, strict=True)  # q and k, each with its weight
        qk = torch.cat(
            [torch.rms_norm(x.float(), x.shape[-1:], w, eps).to(x.dtype) for x, w in parts], 1
        )
    q, k = rope(qk, cos, sin).split((H, Hkv), 1)
    return q, k, v


# --- attention of a decode step


class Paged(NamedTuple):
    """Attention of a decode step: one new token for each of B rows. A call writes a layer's new
    keys and values into the cache and returns that layer's attention to positions 0 … positions[b].
    """

    cache: KVCache
    # (B, blocks) int64: the page of a row's positions 0 … PAGE − 1, then of the next PAGE, …
    block_table: Tensor
    # (B,) int64: of the new tokens; −1: the row has ended, its result is undefined, and nothing is
    # written for it
    positions: Tensor
    splits: int  # for the kernel: how many splits of SPLIT positions the longest row has, or more

    def __call__(self, qkv: Tensor, heads: Heads, cos: Tensor, sin: Tensor, layer: int) -> Tensor:
        """qkv (B, (H + 2·Hkv)·Dh), heads, cos, sin (B, Dh/2), layer: as for Packed → (B, H·Dh).

        AssertionError, on a GPU: the block table has fewer than 2 · splits columns, or the cache
        has fewer than B·Hkv counters.
        """
        if qkv.is_cuda:
            return _paged_attention(qkv, heads, cos, sin, layer, self)
        q, k, v = rotated_heads(qkv, heads, cos, sin)
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        page_size = k_cache.shape[2]
        running = (self.positions >= 0).nonzero()[:, 0]  # the rows that have not ended
        position = self.positions[running]
        page = self.block_table[running, position // page_size]
        offset = position % page_size
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


# --- the kernel of a decode step, plain


def plain_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, positions: Tensor
) -> Tensor:
    """A decode step's attention as FlashDecoding computes it, over PagedAttention's pages.

    q (B, H, Dh): rotated; Dh is a power of two. k_cache, v_cache (pages, Hkv, PAGE, Dh): of one
    layer; they hold the new tokens' keys and values already. block_table, positions: as in Paged →
    (B, H, Dh) f32.

    A decode step has one query per row and head, so it takes as long as the cached keys and values
    take to load. A few rows with long caches must still occupy all SMs. So a row's cached positions
    are split: a CTA computes the attention of one query head to one split, as if there were no
    other. It returns the largest score m_i, the sum l_i of exp(score − m_i), and acc, the sum of
    exp(score − m_i) · v. The last two lines merge the splits of each head.
    """
    B, H, Dh = q.shape
    splits = block_table.shape[1] * PAGE // SPLIT
    acc = torch.empty(B, H, splits, Dh, device=q.device)
    m_i, l_i = acc.new_empty(2, B, H, splits, 1)
    _plain_kernel[H, splits, B](
        q.float() * Dh**-0.5,
        k_cache,
        v_cache,
        block_table,
        block_table.shape[1],
        positions + 1,
        m_i,
        l_i,
        acc,
        H=H,
        REP=H // k_cache.shape[1],
        DH=Dh,
        PAGE=PAGE,
        SPLIT=SPLIT,
    )
    alpha = (m_i - m_i.amax(2, keepdim=True)).exp()  # 0 for an empty split of a running row
    return (alpha * acc).sum(2) / (alpha * l_i).sum(2)


@jit
def _plain_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    blocks,
    lengths,
    m_out,
    l_out,
    acc_out,
    H: constexpr,
    REP: constexpr,
    DH: constexpr,
    PAGE: constexpr,
    SPLIT: constexpr,
):
    """Grid (H, splits, B): a CTA computes one split of one row, for one query head. Query head h
    reads key head h // REP.

    The loop is an online softmax: m_i, l_i and acc are those of the positions read so far. When a
    page has a score above m_i, alpha rescales both sums to the new maximum.
    """
    h = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    head = b * H + h  # of q and of the results
    d = tl.arange(0, DH)
    t = tl.arange(0, PAGE)[:, None]
    q = tl.load(q + head * DH + d)  # (DH,)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, tl.load(lengths + b))
    m_i = -1e30
    l_i = 0.0
    acc = tl.zeros((DH,), tl.float32)
    for start in range(begin, end, PAGE):
        page = tl.load(block_table + b * blocks + start // PAGE)
        key_head = page * (H // REP) + h // REP  # counted over all pages
        at = (key_head * PAGE + t) * DH + d  # (PAGE, DH)
        k = tl.load(k_cache + at)
        v = tl.load(v_cache + at)
        qk = tl.sum(q * k, 1, keep_dims=True)  # (PAGE, 1)
        qk = tl.where(start + t < end, qk, -1e30)  # the last page has positions past the row's end
        m_new = tl.maximum(m_i, tl.max(qk))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new)
        l_i = l_i * alpha + tl.sum(p)
        acc = acc * alpha + tl.sum(p * v, 0)
        m_i = m_new
    out = head * tl.num_programs(1) + split
    tl.store(m_out + out, m_i)
    tl.store(l_out + out, l_i)
    tl.store(acc_out + out * DH + d, acc)


# --- the kernel of a decode step, fast

# It computes what rotated_heads and plain_attention compute, and stores the new tokens' keys and
# values. These are the changes to _plain_kernel, and why. The kernel's comments refer to the
# numbers.
#
# One launch, because a decode step launches hundreds of kernels that take a few microseconds each:
#  1 It rotates. It takes qkv as the projection returns it, normalizes and rotates q and k, and
#    stores the new token's k and v in the cache. The new token's score starts the online softmax,
#    so the loop reads only older positions, which are in the cache already.
#  2 The last CTA merges. Each CTA of a row and key head stores its split and increments a counter.
#    The CTA that finishes last merges the splits in their order, so that the result does not depend
#    on timing. A row of one split needs no merge and no scratch memory.
#
# Less work:
#  3 A CTA computes all query heads that share a key head, so that it loads keys and values once for
#    all of them. Their scores are a matrix product, for tensor cores.
#  4 That product is transposed, qk.T = K @ q.T, and so is acc. A tensor core's tile has at least 16
#    rows, which keys fill, but only 8 columns, which suit few query heads.
#  5 q and k are loaded as two halves, because RoPE pairs the halves. qk is the sum of the halves'
#    products.
#  6 exp2 replaces exp, which a GPU computes by exp2. The factor log2(e) is part of `scale`.
#  7 l_i holds a sum for each position of a tile, over the tiles, and these are added up after the
#    loop. So the loop's sums of p add no numbers across threads.
#
# Earlier loads:
#  8 A split is two pages, and both are looked up before the loop.
#  9 A tile may be smaller than a page. Few rows: large tiles, so that a CTA loads its split in few
#    steps. Many rows: small tiles and few warps, so that several CTAs share an SM.
# 10 PDL: the CTA starts while the qkv product still runs. It loads what no recent kernel writes
#    (position, pages, cos, sin, the first tile of older keys and values) and only then waits for
#    qkv. So the wait is in the loop's first iteration, between a tile's loads and their product.
#    Neither this layer's norm nor a kernel between it and this one may write what is loaded early.
#
# Only for pages of 8-bit integers, whose tiles int8.py loads and stores. With bf16 pages none of
# this is compiled:
# 11 The scale of a key multiplies its score, that of a value its p: one number for each position
#    instead of Dh. The stretch of a pair goes into the cos and sin that rotate it. q and p, with
#    these factors, are rounded to fp16, so |q| · stretch must stay below 65,504. Tiles always have
#    64 positions, the fastest of those tried.
#
# The loop of a row's last split starts from the new token, that of another split from nothing:
#
#     split           older positions    before the loop's first product
#     not the last    all of its 256     m_i = −1e30, l_i = 0, acc = 0
#     the last        some               m_i = the new token's score, l_i = 1, acc = its v
#     the last        none               the same; the only tile is masked, so the result is this v
#
# A row's length is data in both kernels, so one CUDA graph serves all lengths up to the splits that
# it was captured for. A split's size is fixed. So on one GPU only the number of rows, which chooses
# tile and warps, can change a row's bits. Pages that several rows share are mostly loaded from
# memory once, because L2 serves the other rows.


def _paged_attention(qkv, heads, cos, sin, layer, paged):
    """Launch the kernel. Arguments, result and errors: as Paged's call."""
    cache, splits = paged.cache, paged.splits
    H, Hkv, norms = heads
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    k, v, of_int8 = cache.k[layer], cache.v[layer], {}
    if not torch.is_tensor(k):
        k, v, of_int8 = k.for_kernel(v)
    Dh = k.shape[-1]
    B = len(qkv)
    out = qkv.new_empty(B, H * Dh)
    # Scratch memory for rows of several splits (2): each split's acc; its m_i and its l_i.
    acc_splits = qkv.new_empty(B, Hkv, splits, H // Hkv, Dh, dtype=torch.float32)
    ml_splits = qkv.new_empty(B, Hkv, splits, 2, H // Hkv, dtype=torch.float32)
    assert cache.counters.numel() >= B * Hkv and 2 * splits <= paged.block_table.shape[1]
    # (9) Few rows: at 4 splits a row, no more CTAs than an H100 has SMs. The kernel then holds
    # three tiles in shared memory: for Dh = 128 in bf16 192 KiB of keys and values.
    few_rows = 4 * B * Hkv <= 132
    if qkv.is_cuda:  # Triton's interpreter has no such limit
        properties = torch.cuda.get_device_properties(qkv.device)
        few_rows &= properties.shared_memory_per_block_optin > 200 * 2**10
    half = max(16, triton.next_power_of_2(Dh) // 2)
    _attention_kernel[Hkv, splits, B](
        # the new tokens
        qkv,
        q_weight,
        k_weight,
        eps,
        cos,
        sin,
        # the cache
        k,
        v,
        paged.block_table,
        paged.block_table.stride(0),
        paged.positions,
        # results and scratch
        out,
        acc_splits,
        ml_splits,
        cache.counters,
        # sizes
        Dh**-0.5 * 1.4426950408889634,  # (6) log2(e)
        H,
        # meta
        DH=Dh,
        REP=H // Hkv,
        PAGE=PAGE,
        SPLIT=SPLIT,
        TILE=64 if of_int8 else min((8192 if few_rows else 2048) // half, PAGE),
        ROWS=max(8, triton.next_power_of_2(H // Hkv)),
        HALF=half,
        num_warps=4 if few_rows else 2,
        num_stages=3,
        **of_int8,
        **launch_options(qkv),
    )
    return out


@jit
def _after_wait(pointer, PDL: constexpr):
    """Wait as wait_for_predecessor does → the same pointer, for loads of what the predecessor
    writes (10).

    The compiler may hoist loads above a wait that they do not depend on. So the wait returns a 0,
    which is added to the pointer: a fake dependency. Triton's own wait returns nothing, hence the
    inline PTX. multiple_of tells the compiler that the pointer is as aligned as before.
    """
    if PDL:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r",
            [],
            tl.int32,
            is_pure=False,
            pack=1,
        )
        pointer += tl.multiple_of(zero, 16)
    return pointer


@jit
def _merge_splits(ml_ptr, acc_ptr, last_split, head, in_out, REP: constexpr, DH: constexpr):
    """→ l_i (ROWS,) and acc (2·HALF, ROWS) of splits 0 … last_split, for one row and key head (2).

    ml_ptr (ROWS,), acc_ptr (2·HALF, ROWS): pointers to m_i and acc of split 0. An online softmax,
    as in the loop over tiles: alpha rescales the splits so far, beta the next one. ".cg" skips L1,
    which may hold stale lines of the scratch memory.

    Splits past the last one have m_j = −1e30, so beta = 0 and they add nothing. Columns past REP
    load acc_j = 0 and l_j = 1 from every split, so that acc / l_i is 0 there, not NaN.
    """
    m_i = tl.full(head.shape, float("-inf"), tl.float32)
    l_i = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros(in_out.shape, tl.float32)
    # Unrolled, so that the loads of four splits are in flight.
    for first in range(0, last_split + 1, 4):
        for j in tl.static_range(4):
            split = first + j
            here = head < tl.where(split <= last_split, REP, 0)
            m_j = tl.load(ml_ptr + 2 * split * REP, here, -1e30, cache_modifier=".cg")
            l_j = tl.load(ml_ptr + 2 * split * REP + REP, here, 1.0, cache_modifier=".cg")
            acc_j = tl.load(acc_ptr + split * REP * DH, in_out & here, 0.0, cache_modifier=".cg")
            m_new = tl.maximum(m_i, m_j)
            alpha = tl.exp2(m_i - m_new)
            beta = tl.exp2(m_j - m_new)
            l_i = l_i * alpha + l_j * beta
            acc = acc * alpha + acc_j * beta
            m_i = m_new
    return l_i, acc


# do_not_specialize: else Triton compiles this kernel anew when blocks is first a multiple of 16.
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
    acc_splits,
    ml_splits,
    counters,
    # sizes
    scale,
    H,
    # meta
    DH: constexpr,
    REP: constexpr,
    PAGE: constexpr,
    SPLIT: constexpr,
    TILE: constexpr,
    ROWS: constexpr,
    HALF: constexpr,
    PDL: constexpr,
    # pages of integers; functions, so that this file does not need int8.py
    k_scale=None,
    v_scale=None,
    center=None,
    stretch=None,
    LOAD: constexpr = None,
    STORE: constexpr = None,
):
    """Grid (Hkv, splits, B): a CTA computes one split of one row, for a key head and the REP query
    heads that share this key head (3).

    ROWS: REP rounded up to a power of two, at least 8, the columns of a tensor core's tile. HALF:
    Dh/2 rounded up to a power of two, at least 16. The masks exclude what lies past REP, past Dh
    and past the row's position. v is loaded whole, (2·HALF, TILE). k_scale to STORE: what
    int8.Pages.for_kernel returns; None: bf16 pages.
    """
    h = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    # (10) Before the wait, load only what was written before this layer's norm ran (older keys and
    # values, but not qkv). The kernels in between, norm and qkv, have waited for all of that.
    position = tl.load(positions + b).to(tl.int32)
    Hkv = tl.num_programs(0)
    last_split = position // SPLIT  # that of the new token
    begin = split * SPLIT
    head = tl.arange(0, ROWS)
    d = tl.arange(0, HALF)
    dim = tl.arange(0, 2 * HALF)
    in_d = d < DH // 2
    in_q = (head < REP)[:, None] & in_d
    c = tl.load(cos + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    s = tl.load(sin + b * (DH // 2) + d, mask=in_d, other=0.0)[None, :]
    # (8) The split's position i is at page1_at + i · DH in the cache if it is in the first page,
    # and at page2_at + i · DH if it is in the second, whose first position is i = PAGE.
    page1 = tl.load(block_table + b * blocks + split * 2)
    page2 = tl.load(block_table + b * blocks + split * 2 + 1)
    page1_at = (page1 * Hkv + h) * PAGE * DH
    page2_at = (page2 * Hkv + h) * PAGE * DH - PAGE * DH
    if begin > position:
        # This split is empty. Split 0 of a finished row waits all the same (10): if no CTA waited,
        # this kernel could end before its predecessor, and the next one would read too early.
        if split == 0:
            wait_for_predecessor(PDL)
        return
    qkv += b.to(tl.int64) * (H + 2 * Hkv) * DH
    if LOAD is None:
        dtype: constexpr = qkv.dtype.element_ty
        factor = 1.0
    else:
        dtype: constexpr = tl.float16
        both = tl.join(d, d + DH // 2)  # (HALF, 2)
        factor = tl.load(stretch + h * DH + d, mask=in_d, other=1.0)
        new_center = tl.load(center + h * DH + both, mask=in_d[:, None], other=0.0)
    # The first iteration sets q1 and q2; Triton must know their types before the loop.
    q1 = tl.zeros((HALF, ROWS), dtype)
    q2 = tl.zeros((HALF, ROWS), dtype)
    m_i = tl.full((ROWS,), -1e30, tl.float32)
    l_i = tl.zeros((TILE, ROWS), tl.float32)
    acc = tl.zeros((2 * HALF, ROWS), tl.float32)
    # Older positions (1). At least one tile, masked if need be, because the first iteration also
    # handles the new token.
    for start in range(begin, tl.maximum(begin + 1, tl.minimum(begin + SPLIT, position)), TILE):
        t = tl.arange(0, TILE)
        seen = (start + t < position)[:, None]
        kv_at = tl.where(start - begin < PAGE, page1_at, page2_at) + (start - begin) * DH
        if LOAD is None:
            k_ptr = k_cache + kv_at + t[:, None] * DH + d
            k1 = tl.load(k_ptr, mask=seen & in_d, other=0.0)  # (TILE, HALF)
            k2 = tl.load(k_ptr + DH // 2, mask=seen & in_d, other=0.0)
            v = tl.load(
                v_cache + kv_at + t * DH + dim[:, None],
                other=0.0,
                mask=(start + t < position) & (dim < DH)[:, None],
            )  # (2·HALF, TILE)
            k_factor = 1.0
            v_factor = 1.0
        else:  # (11)
            in_page = (start - begin) % PAGE
            k1, k2, v, k_factor, v_factor = LOAD(
                k_cache, v_cache, k_scale, v_scale, kv_at, in_page, t, d, seen, DH, PAGE
            )
        if start == begin:  # only in the first iteration: rotate q, and the new token's k
            qkv = _after_wait(qkv, PDL)  # (10)
            q_at = (h * REP + head)[:, None] * DH + d
            q1_rows, q2_rows = _rotated(
                qkv, q_at, in_q, q_weight, d, c * factor, s * factor, eps, DH
            )
            q1 = tl.trans(q1_rows).to(k1.dtype)  # (HALF, ROWS)
            q2 = tl.trans(q2_rows).to(k2.dtype)
            if split == last_split:  # (1) store the new token's k and v, and start from its score
                new_at = (H + h) * DH + d[None, :]
                new1, new2 = _rotated(
                    qkv, new_at, in_d[None, :], k_weight, d, c / factor, s / factor, eps, DH
                )
                new_v = tl.load(qkv + (H + Hkv + h) * DH + dim, mask=dim < DH, other=0.0)
                slot = tl.where(position - begin < PAGE, page1_at, page2_at)
                slot += (position - begin) * DH
                if LOAD is None:
                    tl.store(k_cache + slot + d[None, :], new1, mask=in_d[None, :])
                    tl.store(k_cache + slot + DH // 2 + d[None, :], new2, mask=in_d[None, :])
                    tl.store(v_cache + slot + dim, new_v, mask=dim < DH)
                else:
                    new1, new2, new_v = STORE(
                        k_cache, v_cache, k_scale, v_scale, slot, position, d, new1, new2, new_v,
                        new_center, DH, PAGE,
                    )  # fmt: skip
                products = q1_rows.to(tl.float32) * new1 + q2_rows.to(tl.float32) * new2
                m_i = tl.sum(products, 1) * scale
                l_i += (t == 0)[:, None]  # exp2(score − m_i) = 1, on one line of the tile (7)
                acc += new_v.to(tl.float32)[:, None]
        # (4, 5)
        qk = tl.dot(k2, q2, tl.dot(k1, q1, input_precision="ieee"), input_precision="ieee")
        qk = tl.where(seen, qk * (scale * k_factor), float("-inf"))  # (TILE, ROWS)
        m_new = tl.maximum(m_i, tl.max(qk, 0))
        p = tl.exp2(qk - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + p
        acc = tl.dot(v, (p * v_factor).to(v.dtype), acc * alpha, input_precision="ieee")
        m_i = m_new
    l_i = tl.sum(l_i, 0)  # (7)
    in_out = (head < REP) & (dim < DH)[:, None]
    done = last_split == 0
    if last_split > 0:  # (2) store this split, and merge all if it is the last to finish
        pair = b * Hkv + h
        at = (pair * tl.num_programs(1)).to(tl.int64) * REP
        acc_ptr = acc_splits + at * DH + head * DH + dim[:, None]
        ml_ptr = ml_splits + at * 2 + head
        tl.store(acc_ptr + split * REP * DH, acc, mask=in_out)
        tl.store(ml_ptr + split * 2 * REP, m_i, mask=head < REP)
        tl.store(ml_ptr + split * 2 * REP + REP, l_i, mask=head < REP)
        tl.debug_barrier()  # all warps of this CTA have stored their split
        done = tl.atomic_add(counters + pair, 1, sem="acq_rel") == last_split
        if done:
            tl.store(counters + pair, 0)
            l_i, acc = _merge_splits(ml_ptr, acc_ptr, last_split, head, in_out, REP, DH)
    if done:
        out_ptr = out + (b * H + h * REP + head) * DH + dim[:, None]
        tl.store(out_ptr, acc / l_i, mask=in_out)


if __name__ == "__main__":
    v = torch.tensor([1.0, 3.0, 8.0, 20.0])  # of a prompt of two tokens and two answers of one
    qkv = F.pad(v[:, None].expand(4, 2), (4, 0))  # one head, Dh = 2; q and k are 0
    zero = torch.zeros(4, 1)
    packed = Packed([(2, [1, 1])], qkv.device)
    print("each token's mean of the values it sees:", packed(qkv, Heads(1, 1, None), zero, zero, 0))
