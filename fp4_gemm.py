"""y = x @ W.T and dx = dy @ W for a weight kept in NVFP4: read as 4.5 bits, multiplied as bf16.

    W[n, k] = E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale[n]

With few rows in x (a decode step) a linear layer takes as long as its weight takes to arrive: 0.5625 byte a
weight instead of bf16's 2. So 3.56 times the speed is the bound, on an H200 (4.3 TB/s, 790 TFLOP/s) up to 50
rows or so. While a weight arrives, an H200 can issue 4 instructions for it; this kernel spends 2.1 to 3.4.

A word holds 8 codes, placed so that few operations turn them into bf16. A bf16 is s eeeeeeee mmmmmmm; a code
is s ee m with bias 1, and ee = 0 means 0 or ½. With s in bit 15 and eem in bits 8..6 the bf16 is worth
v · 2^-126 exactly, the subnormal ½ included: the right bits, read with bias 127. Each half of a word holds
four codes: one in that place, two that come there when the word is rotated right by 3 or 6, and a fourth
(marked ') in the bits that are left. A rotation carries bits around, so s1 and s2 stand in the other half:

    bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0    of sub-tile 0, 1, 2 or 3'
           s0  e2  e2  m2  e1  e1  m1  e0  e0  m0  s2  m'  s'  s1  e'  e'

A tile of 128 columns is four sub-tiles of 32. Half h (0 low, 1 high) of word j holds element 2j + h of each.
Eight integer operations make four pairs of bf16, each a pair of neighbours in k, as a tensor core's register
wants it (>> is a rotation here, one operation; the product adds three copies whose bits never meet):

    t0 = w & 81C081C0    t1 = w >> 3 & 81C081C0    t2 = w >> 6 & 81C081C0                     1 + 2 + 2
    t3 = (w & 001B001B) · (2^12 + 2^7 + 2^2) & 81C081C0      s' of the first, e' and m' of the next   3

A block scale, (1 + m/8) · 2^e in e4m3, becomes the byte (e + 9) << 3 | m: five exponent bits, so that e4m3's
subnormals are normal. With the bits 7000 above it, it is a bf16 worth s · 2^106, and t · s = v · s · 2^-20 is
normal and exact: of bf16's 8 significant bits it has 2 + 4. 2^20 · global_scale waits for the fp32 epilogue.

The kernel computes y.T = W @ x.T: a tensor core's wide side must be the weights when M is small. Several CTAs
share a row of tiles (split-K); each leaves fp32 sums, and the last to arrive adds them in a fixed order.
Small weights have little to read, and a trip to memory and back takes as long: on Hopper the CTAs that share
a row may be a cluster, where each writes sums into another's shared memory and adds up some of the rows; sums
of many rows of x each leaves in its own, for others to read. With up to 8 rows in x a large W comes from
memory straight into the registers that feed a tensor core: no warp waits for another. With many rows x is
what costs, as every tile of 64 rows of W reads all of it again: on Hopper TMA brings it from 32 rows on (no
address in a register), from 64 on a tile is decoded and multiplied in two halves, from 192 on tiles of 128
rows of W and 256 of x have an SM each, where there are enough. LoRA's kernel for x @ A.T is small; the large
one, which multiplies by B in the end, runs beside it.
For still more rows, and in backward, the weight is decoded to bf16 for the moment of one cuBLAS call. A
weight that is not quantised (Dense) has the same `linear`: LoRA's small kernel, and cuBLAS for
[x, x @ A.T] @ [W, B].T.

Left out: 4-bit activations (Hopper's tensor cores have no FP4), experts.
Needs: torch; on a GPU also triton 3.6 or newer.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.compiler import make_backend
    from triton.language import constexpr
    from triton.tools.tensor_descriptor import TensorDescriptor
    # up to Triton 3.7 what _few_rows loads stays in registers: 2.1 instructions a weight; later 3.4
    INTO_REGISTERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
except ImportError:      # the CPU path needs no triton
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

BLOCK = 16               # weights that share a scale
ROWS, COLS = 64, 128     # weights of a tile: 4 KB of words and 512 B of scales, each in one piece
EXPONENT = 0x70007000    # an argument, no constant: ptxas merges AND and OR if one mask is in a register


# --- the packed format

@dataclass(eq=False)
class PackedNVFP4:
    """Weights (N_i, K) joined along N, in the kernels' words; N and K are padded to whole tiles of zeros."""
    words: torch.Tensor            # (N/64, K/128, 64, 16) int32, 8 codes each
    scales: torch.Tensor           # (N/64, K/128, 64, 2) int32, 4 block scales each
    global_scales: torch.Tensor    # (N,) f32: parts, and the shards of foreign checkpoints, may differ
    sizes: tuple                   # N_i
    shape: tuple                   # (N, K)
    counters: torch.Tensor         # int32, CTAs that have arrived at a tile of y; for one stream at a time
    _dense: torch.Tensor = None    # the CPU's fp32 copy, made at the first use


class Dense:
    """A weight W (N, K) that is not quantised; wide (N, K + R) is [W, B] once there is an adapter, with the
    parts of B in columns of their own. counters: those of LoRA's kernel, for one stream at a time."""

    def __init__(self, W):
        self.weight = self.wide = W
        self.shape, self.counters = tuple(W.shape), torch.zeros(2048, dtype=torch.int32, device=W.device)

    def adapt(self, B, splits):
        """B (N, R / S) has changed: rewrite it where it stands, so that captured graphs see it."""
        K, B = self.shape[1], _diagonal(B, splits).to(self.weight)
        if self.wide is self.weight:
            self.wide = torch.cat([self.weight, B], 1)
            self.weight = self.wide[:, :K]
        assert self.wide.shape[1] == K + B.shape[1], f"B, {tuple(B.shape)}, does not fit {self.wide.shape}"
        self.wide[:, K:] = B


def pack(*qs):
    """Tuples (packed (N_i, K/2) u8, block_scale (N_i, K/16) e4m3, global_scale f32 ()) → one PackedNVFP4."""
    codes, block_scales, global_scales = zip(*qs, strict=True)
    K, device, sizes = 2 * codes[0].shape[1], codes[0].device, tuple(map(len, codes))
    if K % BLOCK:
        raise ValueError(f"K={K} must be a multiple of {BLOCK}, the weights that share a scale")
    for c, s, g in qs:
        found = c.dtype, s.dtype, {c.device, s.device, g.device}, (*c.shape, *s.shape)
        if found != (torch.uint8, torch.float8_e4m3fn, {device}, (len(c), K // 2, len(c), K // BLOCK)):
            raise ValueError(f"codes and scales {found} do not make (N, {K}) on {device}")
    pad_k, pad_n = -K % COLS, -sum(sizes) % ROWS
    byte = F.pad(torch.cat(codes), (0, pad_k // 2, 0, pad_n))                                 # (N, K/2)
    scale = torch.cat([s.view(torch.uint8) for s in block_scales])                            # (N, K/16)
    scale = F.pad(scale, (0, pad_k // BLOCK, 0, pad_n))
    assert not (scale > 0x7E).any(), "a block scale is negative or NaN"
    # some rows at a time: on the way a code takes 20 bytes, for a layer of a 72B 10 GB
    pieces = zip(byte.split(64 * ROWS), scale.split(64 * ROWS), strict=True)
    words, scales = zip(*[_words(b.int(), s.int()) for b, s in pieces], strict=True)
    words, scales = torch.cat(words), torch.cat(scales)
    rows = torch.cat([g.reshape(1).float().expand(n_i) for g, n_i in zip(global_scales, sizes, strict=True)])
    counters = torch.zeros(2048 + 64 * len(words), dtype=torch.int32, device=device)
    return PackedNVFP4(words, scales, rows, sizes, (sum(sizes), K), counters)


def _words(byte, scale):
    """Whole tiles, as (64 n, K/2) two codes a byte and (64 n, K/16) e4m3 bytes, int32 → words, scales."""
    n, k = byte.shape[0] // ROWS, scale.shape[1] * BLOCK // COLS
    code = torch.stack((byte & 15, byte >> 4), -1).view(*scale.shape, BLOCK)
    code = code * (scale > 0)[..., None]             # no stored scale means 0: a zero block has zero codes
    a, b, c, d = code.view(n, ROWS, k, 4, 16, 2).transpose(1, 2).unbind(3)                 # (n, k, 64, 16, 2)
    fields = *((f & 8) << 12 | (f & 7) << 6 for f in (a, b, c)), d & 8 | d >> 1 & 3 | (d & 1) << 4
    a, b, c, d = (half[..., 0] | half[..., 1] << 16 for half in fields)                       # (n, k, 64, 16)
    s = _to_ue5m3(scale).view(n, ROWS, k, 4, 2).transpose(1, 2)                             # (n, k, 64, 4, 2)
    # sub-tiles in the order 0 2 1 3: two scales are in place in the two half words, two after one rotation
    s = s[..., 0, :] | s[..., 2, :] << 8 | s[..., 1, :] << 16 | s[..., 3, :] << 24
    return a | _rotate(b, 3) | _rotate(c, 6) | d, _rotate(s, 4)


def _rotate(word, left):
    """An int32, whose >> repeats the sign, to the left."""
    return word << left | word >> 32 - left & (1 << left) - 1


def _to_ue5m3(byte):
    """e4m3 → (e + 9) << 3 | m. A normal number has e + 7 already; 0 becomes 143, which no other does."""
    table = torch.tensor([143, 0, 8, 12, 16, 18, 20, 22], dtype=torch.int32, device=byte.device)
    return torch.where(byte < 8, table[byte.clamp(max=7)], byte + 16)


def unpack(packed):
    """The tuples that went into pack, bit for bit; only blocks of scale 0 come back with codes 0."""
    (N, K), (n, k), w = packed.shape, packed.words.shape[:2], packed.words
    a, b, c, d = (torch.stack((t, t >> 16), -1) for t in (w, _rotate(w, 29), _rotate(w, 26), w))
    fields = *(t >> 12 & 8 | t >> 6 & 7 for t in (a, b, c)), d & 8 | d << 1 & 6 | d >> 4 & 1
    code = torch.stack(fields, 3).transpose(1, 2).reshape(n * ROWS, k * COLS)[:N, :K]
    byte = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
    ue5m3 = torch.stack([_rotate(packed.scales, left) for left in (28, 12, 20, 4)], 3) & 255  # (…, 64, 4, 2)
    ue5m3 = ue5m3.transpose(1, 2).reshape(n * ROWS, k * COLS // BLOCK)[:N, :K // BLOCK].contiguous()
    table = _to_ue5m3(torch.arange(1, 127, device=w.device))     # it grows, and 0's 143 comes behind
    scale = ((torch.searchsorted(table, ue5m3) + 1) % 127).to(torch.uint8).view(torch.float8_e4m3fn)
    parts = zip(*(t.split(packed.sizes) for t in (byte, scale, packed.global_scales)), strict=True)
    return [(b, s, g[0].clone()) for b, s, g in parts]


# --- what callers use

def linear(x, packed, bias=None, lora=None, learn=None, needed=True, deterministic=False):
    """x (..., K) → x @ W.T + bias + scale · (x @ A.T) @ B.T, (..., N); all bf16 on a GPU, fp32 on a CPU.

    packed: a PackedNVFP4 or a Dense. lora = (A (R, K), B (N, R / S), splits, scale): part s of S, the next
    splits[s] columns of y, meets only its own R / S columns of x @ A.T; a Dense wants its `adapt` called with
    this B. learn = (lora_A, lora_B): what learns, if A and B are but rounded from it. Gradients flow to x,
    bias and these, never to W. needed=False: backward will be called and y read by nobody, so the large
    product may be left out. deterministic, of a packed weight on a GPU: the same K split for every M and no
    cuBLAS, so that a row does not depend on its batch.
    """
    N, K = packed.shape
    A, B, splits, scale = lora or (None, None, (), 1.)
    is_dense = isinstance(packed, Dense)
    words, given = packed.wide if is_dense else packed.words, [t for t in (x, bias, A, B) if t is not None]
    dtype, devices = torch.bfloat16 if x.is_cuda else torch.float32, {t.device for t in (*given, words)}
    assert x.shape[-1] == K, f"x has K={x.shape[-1]}, the weight K={K}"
    assert len(devices) == 1, f"x, weight, bias and lora are on {sorted(map(str, devices))}"
    assert {t.dtype for t in given} == {dtype}, f"{[t.dtype for t in given]} on {x.device.type}: only {dtype}"
    assert bias is None or bias.shape == (N,) and bias.is_contiguous(), \
        f"bias is {tuple(bias.shape)}, stride {bias.stride()}; expected ({N},), contiguous"
    if lora:
        shapes = (*A.shape, *B.shape)
        assert shapes == (len(splits) * B.shape[1], K, N, B.shape[1]) and sum(splits) == N, \
            f"A {shapes[:2]}, B {shapes[2:]} and splits {splits} do not fit a weight {packed.shape}"
        assert not is_dense or words.shape[1] == K + len(A), "this Dense has no B beside it: call its adapt"
        assert A.is_contiguous() and B.is_contiguous(), "A and B must be contiguous: call .contiguous()"
    rows = x.reshape(-1, K).contiguous()
    if rows.data_ptr() % 16:                    # a view from the middle of a tensor: TMA wants whole 16 bytes
        rows = rows.clone()
    if deterministic and len(rows) > 64 * 16:   # a launch has counters for 64 tiles, of at least 16 rows
        parts = [linear(part, packed, bias, lora, learn, needed, True) for part in rows.split(64 * 16)]
        return torch.cat(parts).view(*x.shape[:-1], N)
    tile = None                                 # cuBLAS
    if x.is_cuda and needed and not is_dense:
        tile = _tile(len(rows), N, K, *_gpu(x), deterministic, B.shape[1] if lora else 0)
    elif x.is_cuda and needed and lora and len(rows) <= FUSED_MAX:
        tile = ()                               # cuBLAS behind LoRA's kernel
    y = _Linear.apply(rows, packed, bias, A, B, tuple(splits), scale, tile, needed, *(learn or (A, B)))
    return y.view(*x.shape[:-1], N)


def dequantize(packed, dtype=torch.bfloat16, out=None):
    """(N, K) weights; exact in bf16 if global_scale is a power of two, else rounded once. They are written
    into out where given, in its dtype: some columns of a wider matrix, row by row."""
    (N, K), (n, k), dtype = packed.shape, packed.words.shape[:2], dtype if out is None else out.dtype
    if packed.words.is_cuda:
        out = torch.empty(N, K, dtype=dtype, device=packed.words.device) if out is None else out
        _dequantize_kernel[n * k,](packed.words, packed.scales, packed.global_scales, out, N, K,
                                   out.stride(0), k, EXPONENT, False)
        return out
    e2m1, rows = torch.tensor([0., .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6]), []
    for byte, scale, global_scale in unpack(packed):
        code = torch.stack((byte & 15, byte >> 4), -1).view(*scale.shape, BLOCK)
        rows.append((e2m1[code.int()] * scale.float()[..., None] * global_scale).flatten(1).to(dtype))
    return torch.cat(rows, out=out)


class _Linear(torch.autograd.Function):
    """Backward finds x, xa = scale · x @ A.T and the packed bytes, on a GPU no 16-bit copy of them."""

    @staticmethod
    def forward(ctx, x, packed, bias, A, B, splits, scale, tile, needed, lora_A, lora_B):
        if tile is not None:
            y, xa = _fused(x, packed, bias, A, B, splits, scale, tile)
        elif A is None:
            y, xa = F.linear(x, _weight(packed, x.dtype), bias), None
        else:
            xa = x.new_empty(len(x), len(A)).addmm_(x, A.T, beta=0, alpha=scale)
            if needed and (x.is_cuda or isinstance(packed, Dense)):
                y = F.linear(torch.cat([x, xa], 1), _beside(packed, B, splits), bias)
            else:
                y = F.linear(xa, _diagonal(B, splits), bias)
                if needed:
                    y.addmm_(x, _weight(packed, x.dtype).T)
        ctx.packed, ctx.splits, ctx.scale = packed, splits, scale
        ctx.save_for_backward(None if A is None else x, xa, A, B)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x, xa, A, B), dy, dx, dA, dB = ctx.saved_tensors, dy.contiguous(), None, None, None
        if A is not None:
            dxa = torch.empty_like(xa).addmm_(dy, _diagonal(B, ctx.splits), beta=0, alpha=ctx.scale)
            dx = dxa @ A
            if any(ctx.needs_input_grad[-2:]):
                dA, dB = dxa.T @ x, dy.T @ xa                      # of dB only the blocks: the rest stays 0
                r = len(A) // len(ctx.splits)
                dB = torch.cat([b[:, i * r:(i + 1) * r] for i, b in enumerate(dB.split(ctx.splits))])
        if ctx.needs_input_grad[0]:
            W = _weight(ctx.packed, dy.dtype)
            dx = dy @ W if A is None else dx.addmm_(dy, W)
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, *[None] * 6, dA, dB


def _diagonal(B, splits):
    """(N, R / S) → (N, R): the rows of each part in columns of their own."""
    return B if len(splits) == 1 else torch.block_diag(*B.split(splits))


def _beside(packed, B, splits):
    """[W, B] (N, K + R). Its product with [x, xa] is rounded once, like the sampler's sum. An H200's cuBLAS
    rounds x @ W.T before it adds to it, and what a young adapter adds is less than the last bit of that."""
    if isinstance(packed, Dense):
        return packed.wide
    (N, K), R = packed.shape, B.shape[1] * len(splits)
    wide = B.new_empty(N, K + R)
    dequantize(packed, out=wide[:, :K])
    wide[:, K:] = _diagonal(B, splits)
    return wide


def _weight(packed, dtype):
    """(N, K). On a GPU it lives for one product, and the allocator hands the next layer the same memory."""
    if isinstance(packed, Dense):
        return packed.weight
    if packed._dense is None and not packed.words.is_cuda:
        packed._dense = dequantize(packed, dtype)
    return dequantize(packed, dtype) if packed._dense is None else packed._dense


# --- launching; TILES, SPLIT_K and the rules of _tile come from results/gemm_tune.py on an H200

FUSED_MAX = 256   # rows of x: up to them W is never decoded first, and a Dense's LoRA has a kernel of its own
# TILE_M: CTAs on an SM, without and with LoRA (room is left, where the next kernel's wait), and stages
TILES = {8: (3, 3, 4), 16: (5, 4, 4), 32: (4, 3, 4), 64: (3, 3, 3), 128: (2, 2, 3), 256: (1, 1, 3)}
# (N, K): rows of x, up to a power of two: splits without and with LoRA, where _tile's rule is not the best
SPLIT_K = {(37888, 3584): {16: (2, 1), 64: (1, 1)}, (4608, 3584): {32: (7, 4)},
           (5120, 27648): {8: (6, 8), 16: (8, 8), 32: (6, 6)}, (5120, 13824): {8: (6, 8)},
           (27648, 5120): {16: (3, 3)}, (5120, 5120): {32: (6, 4)},
           (2048, 11008): {16: (8, 8)}, (896, 4864): {64: (4, 4)}, (1152, 896): {8: (2, 2)},
           (896, 896): {8: (2, 2)}, (576, 1536): {8: (4, 4), 64: (2, 2), 128: (4, 4), 256: (3, 1)}}


def _gpu(x):
    """→ SMs, major compute capability; an H200's SMs and 0 where Triton's interpreter runs."""
    gpu = torch.cuda.get_device_properties(x.device) if x.is_cuda else None
    return (gpu.multi_processor_count, gpu.major) if gpu else (132, 0)


def _large_tile(M, N, K, sms, rank):
    """→ what _tile returns, with TILE_M = 256, and how many waves of smaller tiles its time is. A large tile
    has 128 rows of W, two warpgroups and an SM. x is read and a weight decoded half as often; but they are
    few, and SMs may be without work in their last wave."""
    tiles_n, tiles_m, whole = triton.cdiv(N, 2 * ROWS), triton.cdiv(M, 256), 0
    if rank > 64 or triton.cdiv(N, ROWS) % 2:
        return None, float("inf")
    tiles, rest = tiles_n * tiles_m, tiles_n % sms
    if tiles_m == 1 and tiles_n > sms and 0 < rest <= sms // 2:
        split, whole = min(4, sms // rest), tiles_n - rest
        waves = whole / sms + 1 / split
    else:      # sums of so many rows and columns want a long K
        most = max(1, min(4, K // 4096)) if tiles < sms else 1
        waves, split = min((triton.cdiv(tiles * split, sms) / split, split) for split in range(1, most + 1))
    return (256, split, TILES[256][2], whole, 2 * ROWS, split in (2, 4) and not whole), 1.8 * waves


def _tile(M, N, K, sms, generation, deterministic=False, rank=0):
    """→ TILE_M, SPLIT_K, stages (1: DIRECT), rows of tiles that are not split after all (`whole`, the first),
    TILE_N, CLUSTER; None where decoding before is faster. Without wgmma tiles of 64 columns decode twice."""
    rows, tiles_n = triton.next_power_of_2(M), triton.cdiv(N, ROWS)
    fused = M <= FUSED_MAX * (2 if rank and generation == 9 else 1)      # LoRA's path around cuBLAS is longer
    if generation == 9 and not deterministic and 192 <= M <= 1024 and K >= 3584:
        # what is fastest on an H200, in waves of tiles (64, 128), two an SM: of 0.85 µs for 128 columns of W
        tiles = tiles_n * triton.cdiv(M, 128)
        pieces = max(1, 2 * sms // tiles)
        waves = triton.cdiv(tiles * pieces, 2 * sms) / pieces
        large, waves_of_large = _large_tile(M, N, K, sms, rank)
        before = 1.6e-7 * N * (600 + 2.6 * M) * (1.1 if rank else 1) + 600 / K
        fused = fused or min(waves, waves_of_large) <= before
        if fused and waves_of_large <= waves:
            return large
    if not (fused or deterministic):
        return None
    if M <= 8 and not deterministic and K >= 3584 and tiles_n >= 3 * sms and INTO_REGISTERS:
        split = max(1, 7 * sms // tiles_n)                                 # there is room for 7 CTAs an SM
        # with LoRA an SM divides its memory twice a layer: in a step it pays only where that room is taken
        if not rank or split * tiles_n >= 6 * sms:
            return 8, split, 1, 0, ROWS, False
    widest = 32 if generation not in (9, 10) else 64 if 128 < M <= 192 else 128      # three of 64, not two
    most = max(16 if deterministic else 8, min(rows, widest))
    # a small weight is decoded once for every few rows, so that all SMs have work; a long row rather split
    tile_m = min(16 if K < 3584 else 32, most)
    while tile_m < most and tiles_n * max(1, K // 1792) * triton.cdiv(M, tile_m) > sms:
        tile_m *= 2
    m = 16 if deterministic else max(8, rows)
    columns = 1 if deterministic else triton.cdiv(M, tile_m)
    tiles, clusters = tiles_n * columns, ()
    ctas, stages, split, whole = TILES[min(m, tile_m)], TILES[tile_m][2], 1, 0
    if tile_m == 64 and tiles <= sms and K < 64 * COLS and not deterministic:
        ctas, stages = (2, 2), 4      # few and short rows: in fewer pieces, with more of each under way
    if generation == 9 and not deterministic:      # how many CTAs may be one
        clusters = {64: (4,), 128: (2, 3, 4)}.get(tile_m, (2, 4, 8) if K < 64 * COLS else ())
    if m in SPLIT_K.get((N, K), {}):
        split = SPLIT_K[N, K][m][rank > 0]
    elif 8 in clusters and tiles <= sms:     # their sums are cheap; for long rows up to 2.5 CTAs an SM
        room = min(sms * min(2.5, max(1, K / (48 * max(16, tile_m)))) // tiles, triton.cdiv(K, COLS))
        while split < 8 and 2 * split <= room:
            split *= 2
    elif K >= 8 * COLS:      # a sum through memory is not worth it where a row has less than eight steps
        split, rest = ctas[rank > 0] * sms // tiles, tiles % sms
        last_wave = 0 < rest <= sms * 2 // 3 and columns <= (1 if rank else 2)
        if last_wave and tiles > sms and m > 16 and K >= 3584:
            # all SMs have had as many tiles, and one wave more has so few that all can share them
            split, whole = 2 + columns, (tiles - rest) // columns
        split = max(1, min(split, 4 if 3 in clusters else 14, K // (2 * COLS)))
    # they run at once: large ones two an SM, where not every cluster finds its SMs side by side
    room = sms * (3 if tile_m <= 32 else 2 if split == 2 else 1.7)
    cluster = split in clusters and not whole and tiles * split <= room
    # few CTAs with long loops have more of each under way, and so have those beside which LoRA's do not run
    few = cluster and tile_m <= 16 and K >= 16 * COLS * split
    stages = 6 if few else 5 if tile_m == 8 and not rank and 28 <= K // COLS < 64 else stages
    return tile_m, split, stages, whole, ROWS, cluster


def _shrink_tile(M, K, plain, direct=False):
    """→ TILE_M, SPLIT_K, stages, warps of LoRA's kernel. A short row has five steps under way, and no sum.
    A packed weight comes while this kernel runs; a Dense's cuBLAS call waits for it, so it is cut finer. In
    front of a direct one, which wants L1, it has little shared memory (8 rows, two warps: 32B 7 % slower)."""
    if K < 8 * COLS:
        return 16, 1, 6, 4
    split = min(28, triton.cdiv(K, 256 if plain else 512))
    if direct:
        return 16, split, 2, 4
    tile_m = 8 if M <= 8 else 16 if plain or M <= 16 else 32
    return tile_m, split, 3, 4 if tile_m == 32 else 2


def _fused(x, packed, bias, lora_A, lora_B, splits, scale, tile):
    """One launch, two with LoRA (a Dense: and cuBLAS). tile: as of _tile; a Dense needs none.
    → y (M, N), and xa = scale · x @ lora_A.T or None."""
    (M, K), N, plain = x.shape, packed.shape[0], isinstance(packed, Dense)
    sms, generation = _gpu(x)
    # PDL, programmatic dependent launch: a kernel starts beside the one before it, and waits inside. What
    # waits takes room that cuBLAS wants (M=256, K=18944: 99 µs instead of 72): for a Dense only with few rows
    pdl = generation >= 9 and (M <= 16 or not plain)
    flags = {"PDL": pdl, "launch_pdl": pdl, "EVEN_K": K % COLS == 0, "F32": x.dtype == torch.float32}
    xa, rank = None, 0
    if lora_A is not None:
        R, rank = lora_A.shape[0], lora_A.shape[0] // len(splits)
        xa_m, xa_split, stages, warps = _shrink_tile(M, K, plain, not plain and tile[2] == 1)
        grid = (triton.cdiv(M, xa_m), triton.cdiv(R, 32), xa_split)
        assert xa_split == 1 or grid[0] * grid[1] <= 2048, f"{M} rows, lora_A of {R}: too many for a launch"
        # it lives on beside the sums below: the two kernels overlap, and what is free the allocator hands on
        xa_sums = x.new_empty(*grid, xa_m * 32 * (xa_split > 1), dtype=torch.float32)
        both = x.new_empty(M, K + R) if plain else None
        xa = both[:, K:] if plain else x.new_empty(M, R)
        _shrink_kernel[grid](x, lora_A, xa, both, xa_sums, packed.counters, M, R, K, xa.stride(0), scale,
                             TILE_M=xa_m, SPLIT_K=xa_split, **flags, num_stages=stages, num_warps=warps)
        if plain:
            return F.linear(both, packed.wide, bias), xa
    tile_m, split, stages, whole, tile_n, cluster = tile
    tiles_n, tiles_k = len(packed.words) * ROWS // tile_n, packed.words.shape[1]
    y = x.new_empty(M, N)
    rows_of_tiles = (whole + (tiles_n - whole) * split, 1) if whole else (tiles_n, 1 if cluster else split)
    grid = triton.cdiv(M, tile_m), *rows_of_tiles
    assert grid[0] <= 64 and (split > 1 or not whole) and split <= tiles_k, f"x {M, K}, tile {tile}"
    assert len(packed.words) * ROWS == tiles_n * tile_n, f"{N} rows of W are not in tiles of {tile_n}"
    parts = 0 if split == 1 or cluster else (tiles_n - whole) * split * grid[0]
    sums = x.new_empty(parts, tile_m * tile_n, dtype=torch.float32)
    # TMA writes zeros for rows that x has not at 16 bytes a cycle: if they are more than a few, pointers win
    missing = -M % tile_m if tile_m == 32 or M < tile_m < 256 else 0
    tma = tile_m >= 32 and generation in (0, 9, 10) and 8 * missing <= tile_m
    box = [tile_m, COLS // 2 if tile_m >= 64 else COLS]                               # as PARTS in the kernel
    near = tile_m == 8 and generation != 10 and tiles_n <= 2 * sms     # else row by row: 3B gate_up lost 11 %
    args = (TensorDescriptor(x, [M, K], [K, 1], box) if tma else x, packed.words, packed.scales,
            packed.global_scales, bias, xa, lora_B, y, sums, packed.counters, M, N, K, tiles_k, EXPONENT)
    flags |= {"TILE_M": tile_m, "TILE_N": tile_n, "SPLIT_K": split, "WHOLE": whole, "RANK": rank,
              "SPLITS": splits, "TMA": tma, "NEAR": near, "DIRECT": stages == 1, "CLUSTER": cluster,
              "num_warps": tile_n // 16, "num_stages": stages}
    if cluster:
        inbox = 4 * tile_n * tile_m + 16 if tile_m <= 32 else 0
        _make_clusters(_linear_kernel.warmup(*args, grid=grid, **flags), split, inbox)
    _linear_kernel[grid](*args, **flags)
    return y, xa


def _make_clusters(compiled, ctas, inbox):
    """Launches of a compiled kernel are of clusters of CTAs, neighbours in x, each with `inbox` bytes more of
    shared memory. Triton's own num_ctas would also cut every tensor into as many pieces."""
    meta = compiled.metadata
    if meta.num_ctas == 1:             # it was not yet launched: then Triton reads what it may still be told
        compiled.metadata = meta._replace(num_ctas=ctas, shared=triton.cdiv(meta.shared, 16) * 16 + inbox)
        compiled.packed_metadata = make_backend(meta.target).pack_metadata(compiled.metadata)


# --- the kernels (F32: the same bits in fp32, for Triton's interpreter, which has neither bf16 nor PTX)

@jit
def _prefetch(line):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1];", "=r,l", [line], tl.int32, is_pure=False, pack=1)


@jit
def _halves(t, F32: constexpr):
    """A uint32 that holds two bf16 → (low, high)."""
    if F32:
        return (t << 16).to(tl.float32, bitcast=True), (t & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:       # no instruction comes of it, while shifts and casts would cost one and a half a weight
        return tl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [t], is_pure=True, pack=1,
                                         dtype=(tl.bfloat16, tl.bfloat16))


@jit
def _decode(words, scales, exponent, F32: constexpr, PART: constexpr = 0, PARTS: constexpr = 1):
    """words (N, 16), scales (N, 2) → (N, 128) weights · 2^-20, without global_scale. Of two PARTS one is the
    64 columns of sub-tiles 0 and 1, the other those of 2 and 3."""
    N: constexpr = words.shape[0]
    w, s = words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)
    if PART == 0:
        f0, f1 = _halves((s & 0x0FF00FF0) | exponent.to(tl.uint32), F32)
        w0 = tl.join(*_halves(w & 0x81C081C0, F32)).reshape(N, 2, 16) * f0[:, :, None]
        w1 = tl.join(*_halves((w >> 3 | w << 29) & 0x81C081C0, F32)).reshape(N, 2, 16) * f1[:, :, None]
    if PART == PARTS - 1:
        f2, f3 = _halves(((s >> 8 | s << 24) & 0x0FF00FF0) | exponent.to(tl.uint32), F32)
        t3 = (w & 0x001B001B) * 4228 & 0x81C081C0                                # 2^12 + 2^7 + 2^2
        w2 = tl.join(*_halves((w >> 6 | w << 26) & 0x81C081C0, F32)).reshape(N, 2, 16) * f2[:, :, None]
        w3 = tl.join(*_halves(t3, F32)).reshape(N, 2, 16) * f3[:, :, None]
    if PARTS == 1:
        tile = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(N, 32, 4)
    elif PART == 0:
        tile = tl.join(w0, w1).reshape(N, 32, 2)
    else:
        tile = tl.join(w2, w3).reshape(N, 32, 2)
    return tile.permute(0, 2, 1).reshape(N, 128 // PARTS)            # registers get new names, nothing moves


@jit
def _multiply(acc, w, x_tile, WAIT: constexpr):
    if len(x_tile.shape) == 4:                    # of _step_of_x: two bf16 in an int32
        x_tile = tl.join(*_halves(x_tile.to(tl.uint32, bitcast=True), False)).reshape(4, 8, 32)
    if len(x_tile.shape) == 3:                    # see offs_k: bits 1, 2, 3, 4 of k go to 4, 1, 2, 3
        N: constexpr = w.shape[0]
        w = w.reshape(N, 4, 4, 2, 2, 2).permute(0, 1, 4, 2, 3, 5).reshape(N, 128)
        x_tile = x_tile.reshape(4, 8, 4, 2, 2, 2).permute(1, 0, 4, 2, 3, 5).reshape(8, 128)
    acc = tl.dot(w, tl.trans(x_tile), acc, input_precision="ieee")
    if WAIT:
        # An empty instruction that uses acc makes Triton wait for these wgmmas. It would leave them in flight
        # while more decoding overwrites registers they read: wrong sums, on an H200.
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@jit
def _scale_and_bias(global_scales, bias, offs_n, N):
    """Of the rows offs_n of W, (TILE_N, 1) each: y = sum · scale + bias."""
    scale = tl.load(global_scales + offs_n, mask=offs_n < N, other=0.)[:, None] * 1048576.            # 2^20
    if bias is None:
        return scale, tl.zeros_like(scale)
    else:
        return scale, tl.load(bias + offs_n, mask=offs_n < N, other=0.).to(tl.float32)[:, None]


@jit
def _rows_of_b(lora_B, offs_n, in_n, r, RANK: constexpr):
    return tl.load(lora_B + offs_n[:, None] * RANK + r[None, :], in_n[:, None] & (r < RANK)[None, :], 0.)


@jit
def _load16(at, HINT: constexpr, F32: constexpr):
    """16 bytes at each pointer, four int32 → (…, 4). tl.load would take shared memory on the way to a tensor
    core, and a barrier for it; these come into the registers that want them."""
    if F32:
        a, b, c, d = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise("ld.global" + HINT + ".v4.b32 {$0, $1, $2, $3}, [$4];",
                                               "=r,=r,=r,=r,l", [at], is_pure=False, pack=1,
                                               dtype=(tl.int32, tl.int32, tl.int32, tl.int32))
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(*at.shape, 4)


@jit
def _step_of_w(words, scales, k, F32: constexpr):
    """Pointers (64, 4) to 16 bytes, (64, 2) to 4 → words (64, 16), scales (64, 2), fetched by lines of L2."""
    w, scales = _load16(words + k * 1024, ".L1::no_allocate.L2::128B", F32), scales + k * 128
    if F32:
        s = tl.load(scales)
    else:
        s = tl.inline_asm_elementwise("ld.global.L1::no_allocate.L2::128B.b32 $0, [$1];", "=r,l", [scales],
                                      tl.int32, is_pure=False, pack=1)
    return w.reshape(64, 16), s


@jit
def _step_of_x(x, k, K, EVEN_K: constexpr, F32: constexpr):
    """Pointers (1, 8, 1) to rows → 128 columns (4, 8, 32), or if bf16 (4, 8, 4, 4) pairs."""
    col = k * 128 + tl.arange(0, 4)[:, None, None] * 32 + tl.arange(0, 4)[None, None, :] * 8
    if not EVEN_K:
        col = tl.minimum(col, K - 8)                           # W's columns from K on are zeros
    if F32:
        return tl.load((x + col)[:, :, :, None] + tl.arange(0, 8)).reshape(4, 8, 32)
    else:
        return _load16((x + col).to(tl.pointer_type(tl.int32)), "", F32)


@jit
def _few_rows(x, words, scales, exponent, K, steps, PDL: constexpr, EVEN_K: constexpr, F32: constexpr):
    """The main loop if DIRECT, up to 8 rows of x → (64, 8). W is on its way for two steps, x for one: through
    L1, which the CTAs of an SM share and a launch empties. PDL: the kernel before this one makes x."""
    row = tl.arange(0, 64)[:, None]
    words += row * 16 + tl.arange(0, 4)[None, :] * 4
    scales += row * 2 + tl.arange(0, 2)[None, :]
    w0, s0 = _step_of_w(words, scales, 0, F32)
    w1, s1 = _step_of_w(words, scales, tl.minimum(1, steps - 1), F32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc, x0 = tl.zeros((64, 8), tl.float32), _step_of_x(x, 0, K, EVEN_K, F32)
    for k in range(0, steps, 2):
        x1 = _step_of_x(x, tl.minimum(k + 1, steps - 1), K, EVEN_K, F32)
        acc = _multiply(acc, _decode(w0, s0, exponent, F32), x0, not F32)
        x0 = _step_of_x(x, tl.minimum(k + 2, steps - 1), K, EVEN_K, F32)
        w0, s0 = _step_of_w(words, scales, tl.minimum(k + 2, steps - 1), F32)
        both = _multiply(acc, _decode(w1, s1, exponent, F32), x1, not F32)
        acc = tl.where(k + 1 < steps, both, acc)
        w1, s1 = _step_of_w(words, scales, tl.minimum(k + 3, steps - 1), F32)
    return acc


@jit(do_not_specialize=["M"])
def _linear_kernel(x, words, scales, global_scales, bias, xa, lora_B, y, sums, counters, M, N, K, tiles_k,
                   exponent, TILE_M: constexpr, TILE_N: constexpr, SPLIT_K: constexpr, WHOLE: constexpr,
                   RANK: constexpr, SPLITS: constexpr, TMA: constexpr, NEAR: constexpr, DIRECT: constexpr,
                   CLUSTER: constexpr, PDL: constexpr, EVEN_K: constexpr, F32: constexpr):
    """y[m, n] = Σ_k x[m, k] W[n, k], as a tile (TILE_N, TILE_M) of y.T. Grid (M tiles, N tiles, SPLIT_K), or
    (M tiles, WHOLE + the rest of the N tiles · SPLIT_K, 1), or if CLUSTER (M tiles · SPLIT_K, N tiles, 1).
    TMA: x is a tensor descriptor, no pointer."""
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if CLUSTER:
        pid_m, pid_k = pid_m // SPLIT_K, pid_m % SPLIT_K
        inbox = _inbox(TILE_N * TILE_M * 4) if TILE_M <= 32 else None
    shared = SPLIT_K > 1
    if WHOLE > 0:
        shared = pid_n >= WHOLE
        if shared:
            pid_n, pid_k = WHOLE + (pid_n - WHOLE) // SPLIT_K, (pid_n - WHOLE) % SPLIT_K
    first, last = pid_k * tiles_k // SPLIT_K, (pid_k + 1) * tiles_k // SPLIT_K
    if WHOLE > 0:
        last = tl.where(shared, last, tiles_k)
    OUT_N: constexpr = triton.next_power_of_2(triton.cdiv(TILE_N, SPLIT_K)) if CLUSTER else TILE_N
    first_n = pid_n * TILE_N + (pid_k * OUT_N if CLUSTER else 0)        # of the rows of y.T that a CTA writes
    first_m = pid_m * TILE_M
    if TMA and TILE_M > 32:                   # the last tile ends where x does, and some rows come twice
        first_m = tl.maximum(tl.minimum(first_m, M - TILE_M), 0)
    offs_n, offs_m = first_n + tl.arange(0, OUT_N), first_m + tl.arange(0, TILE_M)
    row = tl.arange(0, TILE_N)
    start = pid_n * (TILE_N // 64) * tiles_k + first
    words += start * 1024
    # scales and B are as far away as W: into registers at once (no kernel of a step writes B), where they are
    # few; or scales to L2, where no splits are summed
    in_n, r = offs_n < N, tl.arange(0, 16 if RANK <= 16 else triton.next_power_of_2(RANK))
    if CLUSTER and SPLIT_K == 3:                                     # then two of the three CTAs write
        in_n &= offs_n < (pid_n + 1) * TILE_N
    NOW: constexpr = (CLUSTER or RANK == 0) and TILE_M <= 16 and not DIRECT
    if NOW:
        scale, add = _scale_and_bias(global_scales, bias, offs_n, N)
        if RANK > 0 and RANK <= 64:
            B = _rows_of_b(lora_B, offs_n, in_n, r, RANK)
    elif PDL and SPLIT_K == 1:
        _prefetch(global_scales + tl.minimum(first_n + tl.arange(0, TILE_N // 32) * 32, N - 1))
    if DIRECT:
        x_ptr = x + tl.minimum(offs_m, M - 1)[None, :, None] * K + first * 128
        acc = _few_rows(x_ptr, words, scales + start * 128, exponent, K - first * 128, last - first,
                        PDL and RANK == 0, EVEN_K, F32)
        if PDL:       # not before: CTAs of the next kernel would take places of these, on some SMs more
            tl.extra.cuda.gdc_launch_dependents()
    else:
        if PDL:
            if RANK == 0:  # the kernel before makes x. With LoRA it is the one for xa, which waited for x
                # weights never change: their first 8 KB may come to L2 in the meantime
                _prefetch(words + tl.minimum(tl.arange(0, 64), (last - first) * 32 - 1) * 32)    # 128 B each
                tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        stored = (row + row // 64 * (tiles_k - 1) * 64)[:, None]   # rows from 64 on: in the next row of tiles
        w_ptr = words + stored * 16 + tl.arange(0, 16)[None, :]
        s_ptr = scales + start * 128 + stored * 2 + tl.arange(0, 2)[None, :]
        PARTS: constexpr = 2 if TILE_M >= 64 else 1            # half of a tile takes half of the registers
        WAIT: constexpr = not F32
        rows, offs_k = offs_m[:, None], tl.arange(0, 128)[None, :]
        if NEAR:
            # mma.sync has x in registers, in any order of k that the weights have too: a thread's 8 columns
            # of a sub-tile are neighbours, x and words come 16 bytes at a time, the scales are one block's
            rows, offs_k = offs_m[None, :, None], tl.arange(0, 4)[:, None, None] * 32 + tl.arange(0, 32)
        elif PARTS == 2:
            offs_k = tl.arange(0, 64)[None, :]
        if not TMA:
            x_ptr = x + rows * K + first * 128 + offs_k
        acc = tl.zeros((TILE_N, TILE_M), tl.float32)
        # could the loop be empty, acc could be those zeros behind it: ptxas would serialise all wgmmas for it
        tl.assume(last - first > 0)
        for k in range(last - first):
            w, s = tl.load(w_ptr + k * 1024), tl.load(s_ptr + k * 128)
            if TMA:                                            # (TILE_M, 128 / PARTS), zeros beyond x's ends
                x_tile = x.load([first_m, (first + k) * 128])
                if PARTS == 2:                                 # at once, so that one barrier waits for both
                    x_tile2 = x.load([first_m, (first + k) * 128 + 64])
            else:
                in_k = offs_k < (128 if EVEN_K else K - (first + k) * 128)       # no mask is left if EVEN_K
                x_tile = tl.load(x_ptr + k * 128, mask=(rows < M) & in_k, other=0.)
                if PARTS == 2:
                    in_k = offs_k < (64 if EVEN_K else K - (first + k) * 128 - 64)
                    x_tile2 = tl.load(x_ptr + k * 128 + 64, mask=(rows < M) & in_k, other=0.)
            acc = _multiply(acc, _decode(w, s, exponent, F32, 0, PARTS), x_tile, WAIT)
            if PARTS == 2:
                # two warpgroups leave these products in flight while the next step's first half is decoded,
                # into other registers; its product waits for both
                acc = _multiply(acc, _decode(w, s, exponent, F32, 1, PARTS), x_tile2, WAIT and TILE_N == 64)
    if RANK > 0 and RANK <= 64 and not NOW:    # it comes while the splits are summed
        B = _rows_of_b(lora_B, offs_n, in_n, r, RANK)
    EARLY: constexpr = TILE_M < 64 or TILE_M == 128                   # scales, too; in other tiles no gain
    if EARLY and not NOW:
        scale, add = _scale_and_bias(global_scales, bias, offs_n, N)
    done = not shared
    if CLUSTER:
        if TILE_M <= 32:
            acc, done = _exchange(acc, inbox, pid_k, SPLIT_K), True
        else:
            acc, done = _gather(acc, first_n - pid_n * TILE_N, OUT_N, SPLIT_K), True
    elif shared:
        tile = (pid_n - WHOLE) * tl.num_programs(0) + pid_m
        acc, done = _sum_splits(acc, sums, counters + 2048, tile, pid_k, TILE_N, TILE_M, SPLIT_K)
    if done:
        in_m = (offs_m < M)[None, :]
        if not EARLY:
            scale, add = _scale_and_bias(global_scales, bias, offs_n, N)
        acc = acc * scale + add
        if RANK > 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            begin = 0
            for part in tl.static_range(len(SPLITS)):
                end = begin + SPLITS[part]
                if (begin < first_n + OUT_N) & (end > first_n):                         # most lie in one part
                    xa_t = tl.load(xa + offs_m[None, :] * (len(SPLITS) * RANK) + part * RANK + r[:, None],
                                   mask=in_m & (r < RANK)[:, None], other=0.)
                    mine = ((offs_n >= begin) & (offs_n < end))[:, None]
                    if RANK <= 64:
                        own_B = tl.where(mine, B, 0.)
                    else:  # kept so long it would cost an SM a CTA
                        own_B = tl.load(lora_B + offs_n[:, None] * RANK + r[None, :],
                                        mine & (r < RANK)[None, :], 0.)
                    acc = tl.dot(own_B, xa_t, acc, input_precision="ieee")
                begin = end
        y_ptr = y + offs_m[None, :] * N + offs_n[:, None]
        tl.store(y_ptr, acc.to(y.dtype.element_ty), mask=in_m & in_n[:, None])
        if CLUSTER and TILE_M > 32:        # what others read is there until they have
            tl.inline_asm_elementwise("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;",
                                      "=r", [], tl.int32, is_pure=False, pack=1)


@jit
def _sum_splits(acc, sums, counters, tile, part, R: constexpr, C: constexpr, SPLIT_K: constexpr):
    """→ (sum over the SPLIT_K CTAs of a tile, whether this CTA came last and so has it)."""
    if SPLIT_K == 1:
        return acc, True
    offs = tile * SPLIT_K * R * C + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(sums + part * R * C + offs, acc)
    tl.debug_barrier()                                 # every warp has stored before this CTA arrives
    done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if done:
        tl.store(counters + tile, 0)
        acc = tl.zeros((R, C), tl.float32)
        # .cg: L1 may hold an older launch's lines. A small tile has all its loads in flight at once
        for i in tl.range(SPLIT_K, loop_unroll_factor=SPLIT_K if R * C <= 4096 else 1, num_stages=1):
            acc += tl.load(sums + i * R * C + offs, cache_modifier=".cg")
    return acc, done


@jit
def _end_of_shared_memory(SIZE: constexpr):   # a multiple of 16: the mask tells ptxas, which then loads pairs
    return tl.inline_asm_elementwise(
        "{.reg .b32 n; mov.b32 n, %dynamic_smem_size; mov.b32 $0, global_smem; add.u32 $0, $0, n; "
        "sub.u32 $0, $0, $1; and.b32 $0, $0, -16;}", "=r,r", [SIZE], tl.int32, is_pure=True, pack=1)


@jit
def _inbox(SIZE: constexpr):
    """At the start of a CTA of a cluster: → the address of SIZE bytes at the end of its shared memory, before
    a barrier that opens when others have filled them. They may once all CTAs have come here."""
    inbox = _end_of_shared_memory(SIZE + 16)
    tl.inline_asm_elementwise(
        "{.reg .pred first; .reg .b32 t; mov.b32 t, %tid.x; setp.eq.u32 first, t, 0; "
        "@first mbarrier.init.shared.b64 [$1], 1; @first fence.mbarrier_init.release.cluster; "
        "@first mbarrier.arrive.expect_tx.shared.b64 _, [$1], $2; barrier.cluster.arrive.relaxed.aligned;}",
        "=r,r,r", [inbox + SIZE, SIZE], tl.int32, is_pure=False, pack=1)
    return inbox


@jit
def _exchange(acc, inbox, part, SPLIT_K: constexpr):
    """acc (R, C) of each CTA of a cluster → (R / SPLIT_K, C), the sum's rows from part · R / SPLIT_K on: each
    writes what it has of the others' rows into their shared memory, and they add it in a fixed order."""
    R: constexpr = acc.shape[0]
    C: constexpr = acc.shape[1]
    OUT: constexpr = R // SPLIT_K
    row, col = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    tl.inline_asm_elementwise("barrier.cluster.wait.aligned;", "=r", [], tl.int32, is_pure=False, pack=1)
    there = tl.inline_asm_elementwise("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [inbox, row // OUT],
                                      tl.int32, is_pure=True, pack=1)
    at = there + ((part * OUT + row % OUT) * C + col) * 4
    # by pairs, neighbours in a row: so a tensor core leaves them in a thread's registers
    tl.inline_asm_elementwise(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$2], {$4, $5}, [$6];",
        "=r,=r,r,r,f,f,r,r", [at, acc, there + R * C * 4], tl.int32, is_pure=False, pack=2)
    tl.inline_asm_elementwise(
        "{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [$1], 0; @!p bra again;}", "=r,r",
        [inbox + R * C * 4], tl.int32, is_pure=False, pack=1)
    at, acc = inbox + (tl.arange(0, OUT)[:, None] * C + col) * 4, tl.zeros((OUT, C), tl.float32)
    for i in tl.static_range(SPLIT_K):
        acc += tl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [at + i * (OUT * C * 4)],
                                         tl.float32, is_pure=False, pack=1)
    return acc


@jit
def _gather(acc, first, OUT: constexpr, SPLIT_K: constexpr):
    """acc (R, C) of each CTA of a cluster → (OUT, C), the sum's rows from first on. Each leaves acc at
    the end of its shared memory, where tiles were, and reads from all what it sums. There acc stays until the
    kernel ends: what Triton needs behind the loop it takes from the start of shared memory."""
    R: constexpr = acc.shape[0]
    C: constexpr = acc.shape[1]
    row, col = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    here = _end_of_shared_memory(R * (C + 8) * 4)
    tl.debug_barrier()                        # no warp reads tiles any more
    # eight floats between rows: four rows and four pairs, of half a warp, are in 32 banks
    tl.inline_asm_elementwise("st.shared.v2.f32 [$2], {$4, $5};", "=r,=r,r,r,f,f",
                              [here + (row * (C + 8) + col) * 4, acc], tl.int32, is_pure=False, pack=2)
    tl.inline_asm_elementwise("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "=r", [],
                              tl.int32, is_pure=False, pack=1)
    row, col = tl.minimum(first + tl.arange(0, OUT), R - 1)[:, None], tl.arange(0, C // 4)[None, :] * 4
    a, b, c, d = 0., 0., 0., 0.
    for i in tl.static_range(SPLIT_K):
        at = tl.inline_asm_elementwise("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r",
                                       [here + (row * (C + 8) + col) * 4, i], tl.int32, is_pure=True, pack=1)
        e, f, g, h = tl.inline_asm_elementwise(
            "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [at], is_pure=False, pack=1,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32))
        a, b, c, d = a + e, b + f, c + g, d + h
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(OUT, C)


@jit(do_not_specialize=["M"])
def _shrink_kernel(x, lora_A, xa, both, sums, counters, M, R, K, stride, scale, TILE_M: constexpr,
                   SPLIT_K: constexpr, PDL: constexpr, EVEN_K: constexpr, F32: constexpr):
    """xa (M, R) = scale · x @ lora_A.T, transposed and split like the GEMM. Grid (M tiles, R/32, SPLIT_K).
    stride: from one row of xa to the next, and of `both`, into which x is copied where it is not None."""
    offs_m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    offs_r, offs_k, steps = tl.program_id(1) * 32 + tl.arange(0, 32), tl.arange(0, 128), tl.cdiv(K, 128)
    first, last = tl.program_id(2) * steps // SPLIT_K, (tl.program_id(2) + 1) * steps // SPLIT_K
    if PDL:                # of A the first two steps come to L2 while the kernel before still makes x
        line = tl.minimum(first * 128 + tl.arange(0, 4) * 64, K - 1)[None, :]                # 128 B each
        _prefetch(lora_A + tl.minimum(offs_r, R - 1)[:, None] * K + line)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    a_ptr = lora_A + offs_r[:, None] * K + offs_k[None, :]
    x_ptr = x + offs_m[None, :] * K + offs_k[:, None]
    acc = tl.zeros((32, TILE_M), tl.float32)
    for i in range(first, last):
        in_k = offs_k < (128 if EVEN_K else K - i * 128)
        a = tl.load(a_ptr + i * 128, mask=(offs_r < R)[:, None] & in_k[None, :], other=0.)
        xt = tl.load(x_ptr + i * 128, mask=(offs_m < M)[None, :] & in_k[:, None], other=0.)
        if both is not None:
            if tl.program_id(1) == 0:
                tl.store(both + offs_m[None, :] * stride + offs_k[:, None] + i * 128, xt,
                         mask=(offs_m < M)[None, :] & in_k[:, None])
        acc = tl.dot(a, xt, acc, input_precision="ieee")
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    acc, done = _sum_splits(acc, sums, counters, tile, tl.program_id(2), 32, TILE_M, SPLIT_K)
    if done:
        tl.store(xa + offs_m[None, :] * stride + offs_r[:, None], (acc * scale).to(xa.dtype.element_ty),
                 mask=(offs_m < M)[None, :] & (offs_r < R)[:, None])


@jit
def _dequantize_kernel(words, scales, global_scales, out, N, K, stride, tiles_k, exponent, F32: constexpr):
    """One tile, (64, 128), a CTA. stride: from one row of out to the next."""
    tile = tl.program_id(0).to(tl.int64)
    row, col = tl.arange(0, 64), tl.arange(0, 128)
    w = tl.load(words + tile * 1024 + row[:, None] * 16 + tl.arange(0, 16)[None, :])
    s = tl.load(scales + tile * 128 + row[:, None] * 2 + tl.arange(0, 2)[None, :])
    offs_n, offs_k = tile // tiles_k * 64 + row, tile % tiles_k * 128 + col
    scale = tl.load(global_scales + offs_n, mask=offs_n < N, other=0.) * 1048576.            # 2^20
    out_tile = _decode(w, s, exponent, F32).to(tl.float32) * scale[:, None]
    tl.store(out + offs_n[:, None] * stride + offs_k[None, :], out_tile.to(out.dtype.element_ty),
             mask=(offs_n < N)[:, None] & (offs_k < K)[None, :])


if __name__ == "__main__":
    q = torch.randint(256, (256, 256)).byte(), torch.rand(256, 32).to(torch.float8_e4m3fn), torch.tensor(.125)
    word = (packed := pack(q)).words[0, 0, 0, 0]
    pairs = [(_rotate(word, left) & 0x81C081C0 - 2**32).view(1).view(torch.bfloat16) for left in (0, 29, 26)]
    print(f"8 codes: {word.item() & 0xFFFFFFFF:032b}; rotated right by 0, 3, 6, masked, as bf16 · 2^126:",
          *[p.mul(2.**126).tolist() for p in pairs], sep="\n")
    y, ref = linear(x := torch.randn(4, 512), packed), x.double() @ dequantize(packed, torch.float64).T
    size, error = (packed.words.nbytes + packed.scales.nbytes) / 2**17, (y - ref).norm() / ref.norm()
    print(size, f"bytes a weight; relative error {error:.0e}")
