# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""y = x @ W.T for a weight W that a GPU keeps in NVFP4: 4.5 bits in memory, bf16 in the product.

    W[n, k] = E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale

With few rows in x, a linear layer takes as long as the GPU takes to load its weights: .5625 bytes a
weight here, 2 in bf16. So this layer can be at most 3.56 times as fast as a layer in bf16.

This file has three parts. The first is the whole idea in one plain kernel: load codes, decode them,
multiply. The second, which a first reading may skip, is the same product in kernels that come close
to that bound, explained as eight changes to the plain one. The last is what other files call.
docs/kernel.md walks through the first two.

    y = plain_product(x, *q)          q: what nvfp4.quantize returns
    W = pack(q)                       the same weights, as the fast kernels read them
    y = linear(x, W, bias)            a frozen layer, differentiable in x
    y, xa = product(x, W, …)          without autograd; adds the low-rank term of a LoRA
    dx = input_gradient(dy, W)        dy @ W

Left out: 4-bit activations (Hopper's tensor cores have no FP4), experts. Needs: torch; on a GPU
triton ≥ 3.6.
"""

import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton's import: it interprets kernels on the CPU

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    # True if Triton runs the kernels on a CPU in fp32 (TRITON_INTERPRET=1): in tests, in the demo
    INTERPRETED = constexpr(triton.knobs.runtime.interpret)
except ImportError:
    # requirements.txt installs Triton on Linux. macOS has none: nothing launches kernels there, and
    # these two only let Python define the kernels.
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # the number of each code from 0 to 7
E2M1 += [-number for number in E2M1]  # bit 3 is the sign
BLOCK = 16  # weights that share a block scale


# ==================================================================================================
# Plain: load codes, decode them, multiply
# ==================================================================================================


@jit
def plain_kernel(
    x,  # (M, K), bf16 or fp32
    codes,  # (N, K/16) int64: a block of 16 codes, code k in bits 4k to 4k + 3
    scales,  # (N, K/16) uint8: the bits of the block's scale, an e4m3
    global_scale,  # () fp32
    e2m1,  # (16,): the table E2M1, in the dtype of x
    y,  # (M, N), in the dtype of x
    M,
    N,
    blocks,  # K/16
    TILE: constexpr,
):
    """Compute a tile (TILE, TILE) of y = x @ W.T. Grid: (tiles along M, tiles along N)."""
    # The tile's rows m of x and n of W. Indices past the end wrap around to the first rows: the
    # tile computes and stores these once more, with the same result, and needs no mask.
    i = tl.arange(0, TILE)
    m = (tl.program_id(0) * TILE + i[:, None]) % M  # (TILE, 1)
    n = (tl.program_id(1) * TILE + i[None, :]) % N  # (1, TILE)
    k = tl.arange(0, 16)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for block in range(blocks):
        x_tile = tl.load(x + (m * blocks + block) * 16 + k[None, :])  # (TILE, 16)
        at = n * blocks + block  # (1, TILE): where the block of each row of W lies
        code = (tl.load(codes + at) >> (4 * k[:, None])) & 15  # (16, TILE)
        # An e4m3 has an exponent bias of 7, an fp16 of 15, and 7 more bits of mantissa:
        #     e4m3             0 e e e e m m m
        #     the same << 7    0 0 e e e e m m m 0 0 0 0 0 0 0    as an fp16: the scale / 2^8
        bits = tl.load(scales + at).to(tl.int16) << 7
        scale = bits.to(tl.float16, bitcast=True) * 256.0
        # A number of the table has two significant bits, a scale has four: w is exact in the dtype
        # of x, be it bf16.
        w = tl.load(e2m1 + code) * scale
        sums += tl.dot(x_tile, w.to(x_tile.dtype))
    tl.store(y + m * N + n, sums * tl.load(global_scale))


def plain_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
) -> torch.Tensor:
    """x (M, K), bf16 or fp32, and an NVFP4Tensor's fields → y (M, N) = x @ W.T, in the dtype of x.

    packed (N, K/2) uint8, low half = even k; block_scale (N, K/16) float8_e4m3fn; global_scale ()
    fp32. On a CPU this needs Triton's interpreter (TRITON_INTERPRET=1).
    """
    M = len(x)
    N, blocks = block_scale.shape
    y = x.new_empty(M, N)
    grid = triton.cdiv(M, 64), triton.cdiv(N, 64)
    plain_kernel[grid](
        x,
        packed.view(torch.int64),  # eight bytes, two codes each: the 16 codes of a block
        block_scale.view(torch.uint8),  # Triton for an A100 has no e4m3
        global_scale,
        x.new_tensor(E2M1),
        y,
        M,
        N,
        blocks,
        64,  # TILE
    )
    return y


# ==================================================================================================
# Fast: the same product with eight changes
#
#     1  codes         a word of 8 codes decodes in 8 integer instructions, without a table
#     2  scales        a block scale lies in memory as it will lie in a bf16
#     3  tiles         the words of a tile are contiguous
#     4  many rows     decode W once, to bf16, and let cuBLAS multiply
#     5  split-K       CTAs share a tile if there are fewer tiles than the GPU runs at once
#     6  LoRA          the low-rank term is added before y is rounded; PDL hides its first product
#     7  few rows      the main kernel: W is the left factor; steps of 128 columns; TMA
#     8  the plan      the shape of the tiles follows from the shape of the product
#
# Changes 1 to 3 are how the weight lies in memory. Change 4 decodes all of it. With at most 256
# rows of x, the main kernel of change 7 multiplies by it as it lies, beside a small kernel for
# LoRA.
# ==================================================================================================


# --- change 1: codes
#
# A code is s ee m with exponent bias 1. Copy s to bit 15 and ee m to bits 8 to 6 of a bf16, with
# zeros elsewhere: this bf16 is the code's value · 2^-126, exactly, for all 16 codes. Code 0 10 1,
# for example, is 3, and the bf16 0x0140 is 1.5 · 2^-125. So one AND decodes a code whose bits lie
# there already.
#
# A word (an int32) consists of two such halves, which are decoded at once. It holds 8 codes of a
# row of W. The row is taken 128 columns at a time, as four sub-tiles of 32 columns, and word j of
# its 16 words holds columns 2j and 2j + 1 of each sub-tile:
#
#     half              code 0         code 1              code 2              code 3
#     low (bits 0-15)   column 2j      column 32 + 2j      column 64 + 2j      column 96 + 2j
#     high              column 2j + 1  column 32 + 2j + 1  column 64 + 2j + 1  column 96 + 2j + 1
#
# The bits of the low half, where s0 e0 e0 m0 are code 0's (the high half has the same picture):
#
#     bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
#            s0  e2  e2  m2  e1  e1  m1  e0  e0  m0  s2  m3  s3  s1  e3  e3
#
# s1 and s2 are the signs of the other half's codes 1 and 2. Code 0 is in place. A rotation of the
# whole word to the right by 3 moves both codes 1 into place, and their signs across from one half
# to the other; a rotation by 6 does this for both codes 2. Code 3 fills the bits left over. One
# multiplication, by 2^12 + 2^7 + 2^2, adds three shifted copies of it, which never overlap: they
# bring its sign, exponent and mantissa into place.

CODE_MASK = constexpr(0x81C081C0)  # the places of s, ee and m, in both halves of a word
# CODE_BITS[i]: the bits of the word that hold bits 0 to 3 (m, e, e, s) of the low half's code i.
# For the high half's add 16, modulo 32.
CODE_BITS = ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3))


def _pack_codes(packed):
    """Two codes in each int32 → words of eight codes.

    packed: (64 · tiles_n, 64 · tiles_k). words: (tiles_n, tiles_k, 64, 16), as change 3 says.
    """
    words = 0
    for byte, positions in zip(_to_tiles(packed, 4, 16).unbind(3), CODE_BITS, strict=True):
        for bit in range(8):  # of the even column's code, then of the odd column's
            position = (positions[bit % 4] + bit // 4 * 16) % 32
            words = words | (byte >> bit & 1) << position
    return words


@jit
def _rotate_right(word, BITS: constexpr):
    return word >> BITS | word << 32 - BITS


@jit
def _bf16_pair(word):
    """uint32 that hold two bf16 each → (the low ones, the high ones)."""
    if INTERPRETED:
        # The interpreter cannot compute in bf16. An fp32 whose upper half is the bf16 has the same
        # value, also if it is subnormal.
        low = (word << 16).to(tl.float32, bitcast=True)
        return low, (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:  # no instruction at all, while shifts and casts would cost one and a half for a weight
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [word],
            is_pure=True,
            pack=1,
            dtype=(tl.bfloat16, tl.bfloat16),
        )


# --- change 2: scales
#
# A block scale is stored as ue5m3, here with a bias of 9 (elsewhere 15): (1 + m/8) · 2^e becomes
# the byte (e + 9) << 3 | m. Its five exponent bits make e4m3's subnormal numbers normal. Put the
# byte into bits 11 to 4 of a bf16, and 111 into the bits above it: that bf16 is scale · 2^106.
# Multiply a decoded code by it to get value · scale · 2^-20, exactly. The kernels multiply their
# sums by 2^20 · global_scale.

# The bits of an fp32, >> 20, are (e + 127) << 3 | m. Subtract this offset to get ue5m3.
UE5M3_OFFSET = (127 - 9) << 3
# The lowest bit of the block scales of sub-tiles 0 to 3 in a word of scales. One mask extracts the
# scales of sub-tiles 0 and 1, at bits 4 and 20; after a rotation by 8 it extracts those of 2 and 3.
SCALE_BITS = (4, 20, 12, 28)
# The bits above a scale's byte in a bf16, in both halves. The kernels take this constant as an
# argument, not as a literal, because ptxas fuses an AND with the OR of a register into one
# instruction (LOP3).
SCALE_EXPONENT = 0x70007000
RESCALE = constexpr(2.0**20)  # a decoded weight · RESCALE · global_scale is the weight


def _pack_scales(scale):
    """Block scales, fp32 with values of e4m3 → words of four ue5m3.

    scale: (64 · tiles_n, 8 · tiles_k). words: (tiles_n, tiles_k, 64, 2). Word b of a row holds the
    scales of block b of each of the four sub-tiles: a sub-tile's 32 columns are two blocks.
    """
    # ue5m3 has no 0. There _pack_rows sets the codes to 0, so that the scale does not matter.
    ue5m3 = ((scale.view(torch.int32) >> 20) - UE5M3_OFFSET).clamp(min=0)
    words = 0
    for byte, low_bit in zip(_to_tiles(ue5m3, 4, 2).unbind(3), SCALE_BITS, strict=True):
        words = words | byte << low_bit | byte >> 32 - low_bit  # a rotation
    return words


@jit
def _decode(words, scales, scale_exponent, HALF: constexpr):
    """Two of the four sub-tiles of N stored rows → (N, 64) bf16, value · block_scale · 2^-20.

    words (N, 16) and scales (N, 2): int32. HALF: 0 for sub-tiles 0 and 1, 1 for sub-tiles 2 and 3;
    the two are called a and b here.
    """
    N: constexpr = words.shape[0]
    w = words.to(tl.uint32, bitcast=True)
    s = scales.to(tl.uint32, bitcast=True)
    if HALF == 0:
        pair_a = w & CODE_MASK
        pair_b = _rotate_right(w, 3) & CODE_MASK
    else:
        pair_a = _rotate_right(w, 6) & CODE_MASK
        pair_b = (w & 0x001B001B) * 4228 & CODE_MASK  # 4228 = 2^12 + 2^7 + 2^2
        s = _rotate_right(s, 8)
    # (N, 2) each, for the two blocks of a sub-tile
    scale_a, scale_b = _bf16_pair((s & 0x0FF00FF0) | scale_exponent)
    # ½ is a subnormal number here: 2^-127. The next two products must not flush it to zero, and PTX
    # has no flushing form of a bf16 multiplication. Tensor cores then see no subnormal. They would
    # if the scales were multiplied later, so do not move these products.
    # (N, 16 words, 2 halves) → (N, 2 blocks, 16 columns)
    a = tl.join(*_bf16_pair(pair_a)).reshape(N, 2, 16) * scale_a[:, :, None]
    b = tl.join(*_bf16_pair(pair_b)).reshape(N, 2, 16) * scale_b[:, :, None]
    # a, then b. Like all joins and reshapes here this renames registers and moves nothing.
    return tl.join(a, b).reshape(N, 32, 2).permute(0, 2, 1).reshape(N, 64)


# --- change 3: tiles
#
# A CTA loads W by tiles. A stored tile has 64 rows of 128 columns: 64 × 16 words of codes (4 KB)
# and 64 × 2 words of scales (512 B), each contiguous in memory.

ROWS, COLS = 64, 128  # weights of a stored tile
# the same for the kernels: Triton lets them read only those globals that are constexpr
STORED_ROWS = constexpr(ROWS)
STEP = constexpr(COLS)  # the columns of an iteration of the main loop
ROW_WORDS = constexpr(16)  # int32 words of a row of a stored tile
ROW_SCALES = constexpr(2)  # int32 words of block scales of this row
TILE_WORDS = constexpr(64 * 16)
TILE_SCALES = constexpr(64 * 2)


class PackedNVFP4(NamedTuple):
    """A weight (N, K) as the fast kernels read it: parts (N_i, K), as of q, k, v, joined along N.

    words and scales cover whole tiles. Zeros pad them along N and K.
    """

    words: torch.Tensor  # (N/64, K/128, 64, 16) int32, 8 codes each
    scales: torch.Tensor  # (N/64, K/128, 64, 2) int32, 4 block scales each
    global_scales: torch.Tensor  # (N,) fp32: the parts of a foreign checkpoint may differ in theirs
    shape: tuple  # (N, K)
    counters: torch.Tensor  # int32, 0 between launches: change 5 counts CTAs per tile of y
    shrink_counters: torch.Tensor  # the same for tiles of xa, change 6
    dense: torch.Tensor | None  # (N, K) fp32: a CPU multiplies by this; None on a GPU


def pack(*qs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> PackedNVFP4:
    """Join NVFP4 weights along N and place their bits as the fast kernels read them.

    qs: tuples (packed (N_i, K/2) uint8, block_scale (N_i, K/16) float8_e4m3fn, global_scale ()
    fp32), such as nvfp4.quantize returns. A byte of packed holds two codes, that of the even k in
    its low half.

    ValueError: K is no multiple of 16, or dtypes, shapes or devices do not fit together.
    AssertionError: a block scale is negative or NaN.
    """
    for q in qs:
        _check_part(*q, like=qs[0][0])
    packed = torch.cat([codes for codes, _, _ in qs])
    scales = torch.cat([scale.view(torch.uint8) for _, scale, _ in qs])
    global_scales = torch.cat([scale.float().expand(len(codes)) for codes, _, scale in qs])
    N, K = len(packed), 2 * packed.shape[1]
    pad_n, pad_k = -N % ROWS, -K % COLS
    packed = F.pad(packed, (0, pad_k // 2, 0, pad_n))
    scales = F.pad(scales, (0, pad_k // BLOCK, 0, pad_n))
    assert (scales <= 0x7E).all(), "a block scale is negative or NaN"
    # Pack some rows at a time: the temporaries take several bytes a code, which are gigabytes for a
    # layer of a 72B model.
    pieces = map(_pack_rows, packed.split(64 * ROWS), scales.split(64 * ROWS))
    words, scales = map(torch.cat, zip(*pieces, strict=True))
    # A counter for each tile of y. For each 64 rows of W these are at most 16: 256 rows of x in
    # tiles of 16 (change 8 takes tiles of 8 only for up to 8 rows).
    counters = words.new_zeros(16 * len(words))
    shrink_counters = words.new_zeros(SHRINK_COUNTERS)
    dense = None
    if packed.device.type == "cpu":
        dense = torch.cat([_decode_on_cpu(*q) for q in qs])
    return PackedNVFP4(words, scales, global_scales, (N, K), counters, shrink_counters, dense)


def _check_part(packed, block_scale, global_scale, like):
    """ValueError, as `pack` says. like: codes of the first part, whose K and device all have."""
    N = len(packed)
    _, half_K = like.shape
    devices = {packed.device, block_scale.device, global_scale.device}
    found = packed.dtype, packed.shape, block_scale.dtype, block_scale.shape, devices
    right = (
        torch.uint8,
        (N, half_K),
        torch.float8_e4m3fn,
        (N, half_K // (BLOCK // 2)),
        {like.device},
    )
    if found != right or half_K % (BLOCK // 2):
        raise ValueError(f"codes, scales and devices {found} are not {right}, K a multiple of 16")


def _decode_on_cpu(packed, block_scale, global_scale):
    """The format's definition: a part as pack takes it → W (N, K) fp32."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)  # (N, K)
    values = torch.tensor(E2M1)[codes.int()]
    return values * block_scale.float().repeat_interleave(BLOCK, 1) * global_scale


def _pack_rows(packed, scales):
    """Codes and e4m3 scales, uint8 → words and scales of PackedNVFP4."""
    codes = packed.int() * (scales > 0).repeat_interleave(BLOCK // 2, 1)
    return _pack_codes(codes), _pack_scales(scales.view(torch.float8_e4m3fn).float())


def _to_tiles(matrix, *sub_tiles):
    """(64 · tiles_n, columns) → (tiles_n, tiles_k, 64, *sub_tiles).

    sub_tiles: the shape of a tile's row, (4 sub-tiles, entries of each).
    """
    return matrix.view(len(matrix) // ROWS, ROWS, -1, *sub_tiles).transpose(1, 2)


@jit
def _pointers(matrix, row, WIDTH: constexpr):
    """→ pointers (len(row), WIDTH) to whole rows of a matrix with WIDTH columns."""
    return matrix + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


# --- change 4: many rows
#
# Each tile of y decodes its rows of W. With many rows of x it is faster to decode all of W once, to
# bf16, and to let cuBLAS multiply. So does backward, dx = dy @ W: for it only the packed bytes
# are kept, never a bf16 weight. A weight that is not quantized enters here.


class Dense:
    """A weight (N, K) in 16 bits (on a CPU in fp32), for the same functions: the bf16 base to
    compare with, and what a 4-bit checkpoint leaves in 16 bits.

    weight: (N, K). weight_and_B: [weight, B] (N, K + S·r), so that one GEMM multiplies it by
    [x, xa]; without an adapter it is the weight itself. shrink_counters: as PackedNVFP4's.
    """

    def __init__(self, W: torch.Tensor):
        self.weight = self.weight_and_B = W
        self.shape = tuple(W.shape)
        self.shrink_counters = W.new_zeros(SHRINK_COUNTERS, dtype=torch.int32)

    def store_B(self, B: torch.Tensor, splits: tuple[int, ...]):
        """Copy an adapter's B (N, r) beside the weight: call this after each change of B.

        The first call allocates `weight_and_B`, later calls write into it. splits: how many rows of
        B each of the S parts has.
        """
        B = _block_diagonal(B, splits)
        _, K = self.shape
        if self.weight_and_B is self.weight:
            self.weight_and_B = torch.cat([self.weight, B], 1)
            self.weight = self.weight_and_B[:, :K]  # a view: W is stored once
        self.weight_and_B[:, K:] = B


def dequantize(
    weight: PackedNVFP4 | Dense,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A PackedNVFP4 → W (N, K) in dtype. A Dense → its W (N, K), in the dtype that it has.

    out: on a GPU, the (N, K) tensor that the kernel writes a packed weight to, in the dtype of out.
    Its row stride may exceed K, its column stride is 1. A Dense and a CPU ignore out.

    bf16 holds E2M1[code] · block_scale exactly. So the conversion to bf16 rounds W only if
    global_scale is no power of two.
    """
    if isinstance(weight, Dense):
        return weight.weight
    if weight.dense is not None:
        return weight.dense.to(dtype)
    N, K = weight.shape
    tiles_n, tiles_k, *_ = weight.words.shape
    if out is None:
        out = weight.words.new_empty(N, K, dtype=dtype)
    _dequantize_kernel[(tiles_n * tiles_k,)](
        # the weight
        weight.words,
        weight.scales,
        weight.global_scales,
        out,
        # sizes
        N,
        K,
        out.stride(0),
        tiles_k,
        SCALE_EXPONENT,
    )
    return out


@jit
def _dequantize_kernel(
    words,
    scales,
    global_scales,
    out,
    # sizes
    N,
    K,
    out_stride,  # from one row of out to the next, in elements
    tiles_k,  # stored tiles along K
    scale_exponent,
):
    """Decode a stored tile (64, 128) to its place in out (N, K), of any dtype. Grid: (tiles,)."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, STORED_ROWS)
    w = tl.load(_pointers(words + tile * TILE_WORDS, row, ROW_WORDS))
    s = tl.load(_pointers(scales + tile * TILE_SCALES, row, ROW_SCALES))
    offs_n = (tile // tiles_k * STORED_ROWS + row)[:, None]
    in_n = offs_n < N
    scale = tl.load(global_scales + offs_n, in_n, 0.0) * RESCALE
    for half in tl.static_range(2):
        offs_k = tile % tiles_k * STEP + half * (STEP // 2) + tl.arange(0, STEP // 2)[None, :]
        out_tile = _decode(w, s, scale_exponent, half) * scale
        in_tile = in_n & (offs_k < K)
        out_ptr = out + offs_n * out_stride + offs_k
        tl.store(out_ptr, out_tile, in_tile)


# --- change 5: split-K
#
# A product with few tiles leaves most SMs idle. Then SPLIT_K CTAs share a tile: each sums over its
# own range of k and stores the sums in memory, then adds 1 to the tile's counter. The CTA that
# counts last adds up the stored sums in the order of k, so that timing does not change the result.
# Each weight has its own counters, so use a weight on one stream at a time.


@jit
def _k_range(steps, SPLIT_K: constexpr):
    """→ (begin, end): this CTA's share of the steps along k."""
    pid_k = tl.program_id(2)
    return pid_k * steps // SPLIT_K, (pid_k + 1) * steps // SPLIT_K


@jit
def _add_partial_sums(acc, partial_sums, counters, SPLIT_K: constexpr):
    """Add up the sums acc (HEIGHT, WIDTH) of the CTAs that share a tile.

    → (the sum, True) in the CTA that counts last, (acc, False) in the others. partial_sums: (tiles,
    SPLIT_K, HEIGHT, WIDTH) fp32. counters: (tiles,) int32, 0 before and after a launch.
    """
    if SPLIT_K == 1:
        return acc, True
    HEIGHT: constexpr = acc.shape[0]
    WIDTH: constexpr = acc.shape[1]
    SIZE: constexpr = HEIGHT * WIDTH
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    pid_k = tl.program_id(2)
    in_tile = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    offs = tile * SPLIT_K * SIZE + in_tile
    tl.store(partial_sums + pid_k * SIZE + offs, acc)
    # All warps must have stored before the CTA counts. acq_rel: the CTA that counts last sees the
    # stores of those that counted before.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.store(counters + tile, 0)
        acc = tl.zeros_like(acc)
        # Load from L2 (.cg), because L1 may hold lines of an earlier launch. A thread loads at most
        # 32 sums of a small tile per iteration, too few to hide their latency. So unroll the loop:
        # the loads of several CTAs' sums then overlap. A large tile has enough loads without that.
        unroll: constexpr = SPLIT_K if SIZE <= 4096 else 1
        for i in tl.range(SPLIT_K, loop_unroll_factor=unroll, num_stages=1):
            acc += tl.load(partial_sums + i * SIZE + offs, cache_modifier=".cg")
    return acc, is_last


def _partial_sums(x, grid, tile_size):
    """→ fp32 memory for the partial sums of the CTAs of a grid; empty if no tile is split."""
    *_, split_k = grid
    return x.new_empty(*grid, tile_size if split_k > 1 else 0, dtype=torch.float32)


# --- change 6: LoRA
#
# LoRA adds xa @ B.T to y, with xa = scale · x @ A.T. A kernel of its own, "shrink", computes xa. It
# is an ordinary product with split-K, on A in bf16. It computes xa.T = A @ x.T for a reason that
# change 7 gives. The main kernel (change 7) adds xa @ B.T to its fp32 sums before it rounds them to
# bf16. If x @ W.T were rounded first, the error would exceed what a young adapter adds.
#
# The two kernels overlap. Their means is PDL (programmatic dependent launch, from Hopper on): the
# GPU starts a kernel as soon as all CTAs of its predecessor have called gdc_launch_dependents, or
# have ended. gdc_wait waits until the predecessor has ended:
#
#     previous kernel   ── writes x ──┤
#     shrink               started … gdc_wait, then xa = scale · x @ A.T ──┤
#     main                              started … loop over W and x … gdc_wait, then + xa @ B.T ──┤
#
# So the main kernel's loop runs beside the shrink kernel. It may read x without a wait of its own,
# because shrink lets it start only after x is complete. It may also store partial sums, if nothing
# runs between the two kernels that still writes this memory. Without LoRA it waits before it reads
# x. A kernel that reads y must call gdc_wait too, if it is launched with PDL.
#
# A rank may be at most 256: with more, a tile of lora_B and one of xa exceed a GPU's shared memory,
# and Triton refuses to launch the main kernel.

# The shrink kernel's counters of a weight: enough for S·r = 4096 and 256 rows of x, in tiles of 32
# rows of A and 16 of x. The main kernel has others, because both kernels run at the same time.
SHRINK_COUNTERS = 2048
SPLIT_FROM = 8 * COLS  # a K with fewer columns is not split, here and in change 7 (fitted)
# At most so many CTAs share a tile. The main kernel allows fewer, because its sums are larger
# (fitted).
MAX_SHRINK_SPLIT_K = 28


@jit(do_not_specialize=["M"])
def _shrink_kernel(
    # pointers
    x,
    lora_A,
    xa,
    partial_sums,
    counters,
    # sizes
    M,
    R,
    K,
    scale,
    # meta
    TILE_M: constexpr,
    TILE_R: constexpr,
    SPLIT_K: constexpr,
    PDL: constexpr,
):
    """Compute a tile (TILE_R, TILE_M) of xa.T = scale · lora_A @ x.T.

    xa (M, R), lora_A (R, K), with R = S·r. Grid: (tiles of x, tiles of lora_A, SPLIT_K). A step has
    64 columns.
    """
    offs_m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[None, :]
    offs_r = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)[:, None]
    offs_k = tl.arange(0, 64)
    begin, end = _k_range(tl.cdiv(K, 64), SPLIT_K)
    if PDL:
        gdc_wait()  # for the kernel that writes x
        gdc_launch_dependents()  # the main kernel may start: x is complete
    a_ptr = lora_A + offs_r * K + offs_k[None, :]
    x_ptr = x + offs_m * K + offs_k[:, None]
    acc = tl.zeros((TILE_R, TILE_M), tl.float32)
    in_r = offs_r < R
    in_m = offs_m < M
    for step in range(begin, end):
        in_k = offs_k < K - step * 64
        a = tl.load(a_ptr + step * 64, mask=in_r & in_k[None, :], other=0.0)
        xt = tl.load(x_ptr + step * 64, mask=in_m & in_k[:, None], other=0.0)
        acc = tl.dot(a, xt, acc)
    acc, is_last = _add_partial_sums(acc, partial_sums, counters, SPLIT_K)
    if is_last:
        tl.store(xa + offs_m * R + offs_r, acc * scale, mask=in_m & in_r)


def _launch_shrink(x, weight, low_rank, gpu):
    """Launch the shrink kernel → xa = scale · x @ A.T (M, S·r)."""
    M, K = x.shape
    R = len(low_rank.A)
    dense = isinstance(weight, Dense)
    tile_m, tile_r = 8 if M <= 8 else 16, 32
    # If MAX_SHRINK_SPLIT_K CTAs suffice, each sums at most 512 columns for a packed weight, because
    # the main kernel runs at the same time and hides the shrink kernel. A Dense's GEMM waits for
    # xa, so there a CTA sums at most 256 columns, which take less time.
    split_k = 1
    if K >= SPLIT_FROM:
        split_k = min(MAX_SHRINK_SPLIT_K, triton.cdiv(K, 256 if dense else 512))
    grid = triton.cdiv(M, tile_m), triton.cdiv(R, tile_r), split_k
    # Do not start the shrink kernel early for a Dense if x has more than 16 rows. A shrink kernel
    # that starts early occupies SMs while it waits, and with so many rows cuBLAS needs all SMs for
    # the previous layer, if that layer is a Dense too.
    pdl = gpu.major >= 9 and (M <= 16 or not dense)
    xa = x.new_empty(M, R)
    sums = _partial_sums(x, grid, tile_m * tile_r)
    _shrink_kernel[grid](
        # pointers
        x,
        low_rank.A,
        xa,
        sums,
        weight.shrink_counters,
        # sizes
        M,
        R,
        K,
        low_rank.scale,
        # choices
        TILE_M=tile_m,
        TILE_R=tile_r,
        SPLIT_K=split_k,
        PDL=pdl,
        launch_pdl=pdl,
        num_stages=5,  # steps of 64 columns in shared memory: one in use, four loading
        num_warps=2,  # 16 rows of A each, the least that a tensor core multiplies
    )
    return xa


# --- change 7: few rows
#
# The main kernel puts changes 1 to 3, 5 and 6 together. It computes y.T = W @ x.T, because a tensor
# core multiplies at least 16 rows of its left factor by 8 columns of its right one: weights always
# fill the 16, and few rows of x waste little of the 8. A step of its loop takes the 128 columns of
# a stored tile: load words, scales and x, decode, multiply. After the loop, its epilogue sums over
# the CTAs that share the tile, multiplies by the global scale, adds the bias and LoRA's term, and
# stores.

# The most rows of x that the main kernel takes. It decodes W again for each tile of x, so with more
# rows change 4 is faster.
FUSED_MAX = 256
# TMA loads tiles of this many rows of x or more. It computes addresses in hardware; pointers to so
# many rows would fill the registers.
TMA_ROWS = constexpr(64)


@jit
def _load_x(x, first_m, first_k, M, K, TILE_M: constexpr):
    """→ the tile of x from row first_m and column first_k on; zeros past the ends of x.

    Its shape is (TILE_M, 64), or (8, 128) for tiles of 8 rows.
    """
    if TILE_M >= TMA_ROWS:
        return x.load([first_m, first_k])
    else:
        m = first_m + tl.arange(0, TILE_M)[:, None]
        k = tl.arange(0, STEP if TILE_M == 8 else STEP // 2)[None, :]
        return tl.load(x + m * K + first_k + k, mask=(m < M) & (k < K - first_k), other=0.0)


@jit
def _multiply(acc, w, x_tile, WAIT: constexpr = True):
    """→ acc (TILE_N, TILE_M) fp32 + w (TILE_N, k) @ x_tile (TILE_M, k).T."""
    acc = tl.dot(w, tl.trans(x_tile), acc)
    if WAIT and not INTERPRETED:
        # wgmma is asynchronous. Triton lets the next decode overwrite registers that a wgmma in
        # flight still reads, which makes sums wrong. An empty instruction that uses acc makes
        # Triton wait for the wgmma.
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@jit
def _add_low_rank(acc, B, xa, offs_m, M, tile_n, RANK: constexpr, PART_WIDTHS: constexpr):
    """→ acc (TILE_N, TILE_M) + B @ xa.T, where each part of W uses its own columns of xa.

    B (TILE_N, RANK padded): the tile's rows of lora_B. xa (M, S·RANK): a pointer. tile_n: the
    tile's first row of W.
    """
    TILE_N: constexpr = B.shape[0]
    S: constexpr = len(PART_WIDTHS)
    offs_n = tile_n + tl.arange(0, TILE_N)
    r = tl.arange(0, B.shape[1])[:, None]
    m = offs_m[None, :]
    begin = 0
    for part in tl.static_range(S):
        end = begin + PART_WIDTHS[part]  # the part's rows of W
        # Skip a part that has no rows in this tile. Few tiles have rows of two parts.
        if (begin < tile_n + TILE_N) & (end > tile_n):
            in_xa = (m < M) & (r < RANK)
            xa_t = tl.load(xa + m * (S * RANK) + part * RANK + r, in_xa, 0.0)
            in_part = ((offs_n >= begin) & (offs_n < end))[:, None]
            acc = tl.dot(tl.where(in_part, B, 0.0), xa_t, acc)
        begin = end
    return acc


# do_not_specialize: else Triton compiles this kernel anew in the middle of a run, when M or
# first_tile is 1, or a multiple of 16, for the first time.
@jit(do_not_specialize=["M", "first_tile"])
def _linear_kernel(
    x,  # (M, K): a TMA descriptor if TILE_M is at least TMA_ROWS, else a pointer
    # the weight: fields of PackedNVFP4, and what is added to the product
    words,
    scales,
    global_scales,
    bias,  # (N,), or None
    # LoRA (change 6): None without it
    xa,  # (M, S·RANK)
    lora_B,  # (N, RANK)
    # the result
    y,  # (M, N)
    # split-K (change 5)
    partial_sums,
    counters,
    # sizes
    M,
    N,
    K,
    tiles_k,  # stored tiles along K
    first_tile,  # of W: the grid's second index counts from it
    scale_exponent,  # SCALE_EXPONENT
    # choices of the plan (change 8): Triton compiles a kernel for each
    TILE_M: constexpr,
    TILE_N: constexpr,
    SPLIT_K: constexpr,
    # the kind of adapter: its rank, 0 without LoRA, and the number of columns of y of each part
    RANK: constexpr,
    PART_WIDTHS: constexpr,
    PDL: constexpr,
):
    """Compute a tile (TILE_N, TILE_M) of y.T = W @ x.T + bias + LoRA's term.

    Grid: (tiles of x, tiles of W, SPLIT_K).
    """
    # which tile: its first row of x and row of W, and this CTA's steps of 128 columns
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1) + first_tile
    begin, end = _k_range(tiles_k, SPLIT_K)
    first_m = pid_m * TILE_M
    row = tl.arange(0, TILE_N)
    if TILE_M >= TMA_ROWS:
        # TMA fills rows past the end of x with zeros, but slowly. So shift a last tile back that
        # would pass the end, unless x is shorter than a tile: it computes rows of the tile before
        # once more, with the same result.
        first_m = tl.maximum(tl.minimum(first_m, M - TILE_M), 0)
    offs_m = first_m + tl.arange(0, TILE_M)
    offs_n = pid_n * TILE_N + row
    in_m = (offs_m < M)[None, :]
    in_n = offs_n < N

    # its words and scales
    first_stored = pid_n * (TILE_N // STORED_ROWS) * tiles_k + begin
    words += first_stored * TILE_WORDS
    scales += first_stored * TILE_SCALES
    if PDL:
        if RANK == 0:
            gdc_wait()  # for the kernel that writes x: see the time line of change 6
        gdc_launch_dependents()  # the next kernel may start; its own gdc_wait waits for this one
    # A tile of 128 rows is two stored tiles, one below the other: rows from 64 on are in the stored
    # tile that follows tiles_k tiles later.
    stored_row = row + row // STORED_ROWS * (tiles_k - 1) * STORED_ROWS
    w_ptr = _pointers(words, stored_row, ROW_WORDS)
    s_ptr = _pointers(scales, stored_row, ROW_SCALES)
    acc = tl.zeros((TILE_N, TILE_M), tl.float32)

    # Load the epilogue's operands except xa before the loop, because they arrive while it runs.
    scale = tl.load(global_scales + offs_n, in_n, 0.0)[:, None] * RESCALE
    add = 0.0 if bias is None else tl.load(bias + offs_n, in_n, 0.0)[:, None]
    if RANK > 0:
        r = tl.arange(0, max(16, triton.next_power_of_2(RANK)))  # tl.dot sums 16 products or more
        in_r = r < RANK
        B_mask = in_n[:, None] & in_r[None, :]
        B = tl.load(lora_B + offs_n[:, None] * RANK + r[None, :], B_mask, 0.0)

    # Promise at least one step. If the loop could leave acc at zero, ptxas would serialize all
    # wgmmas.
    tl.assume(end - begin > 0)
    for step in range(end - begin):
        w = tl.load(w_ptr + step * TILE_WORDS)
        s = tl.load(s_ptr + step * TILE_SCALES)
        first_k = (begin + step) * STEP
        if TILE_M == 8:
            x_tile = _load_x(x, first_m, first_k, M, K, TILE_M)
            halves = tl.join(_decode(w, s, scale_exponent, 0), _decode(w, s, scale_exponent, 1))
            w_tile = halves.permute(0, 2, 1).reshape(TILE_N, STEP)
            acc = _multiply(acc, w_tile, x_tile)
        else:  # decode half a step at a time: that takes half the registers
            x_first = _load_x(x, first_m, first_k, M, K, TILE_M)
            x_second = _load_x(x, first_m, first_k + STEP // 2, M, K, TILE_M)
            acc = _multiply(acc, _decode(w, s, scale_exponent, 0), x_first)
            # With two warpgroups this wgmma may stay in flight: the next decode writes other
            # registers (a test checks that).
            acc = _multiply(acc, _decode(w, s, scale_exponent, 1), x_second, WAIT=TILE_N == 64)

    # The epilogue. One CTA of a tile runs it.
    acc, is_last = _add_partial_sums(acc, partial_sums, counters, SPLIT_K)
    if is_last:
        acc = acc * scale + add
        if RANK > 0:
            if PDL:
                gdc_wait()  # for the shrink kernel, which writes xa
            acc = _add_low_rank(acc, B, xa, offs_m, M, pid_n * TILE_N, RANK, PART_WIDTHS)
        y_ptr = y + offs_m[None, :] * N + offs_n[:, None]
        tl.store(y_ptr, acc, mask=in_m & in_n[:, None])


# --- change 8: the plan
#
# A plan changes only speed and, by the order of sums, rounding, if it leaves no range of k empty,
# splits one launch at most and takes tiles of 8 rows only for up to 8 rows. A constant that has no
# reason beside it, or is called fitted, was chosen by the measured times of the layers of Qwen2.5
# and SmolLM2 on an H100 and an H200. Some plans for an H100, which has 132 SMs:
#
#     layer            (N, K)          rows of x    tiles: rows of x × rows of W    split_k    CTAs
#     7B gate, up      37888, 3584         8                8 × 64                     1       592
#     7B o              3584, 3584         8                8 × 64                     7       392
#     7B o              3584, 3584       256              128 × 64                     2       224
#     1.5B o            1536, 1536        64               16 × 64                     5       480
#     7B gate, up      37888, 3584       256              256 × 128, two launches:
#                                                           two full waves             1       264
#                                                           the rest                   3        96

# tile_m → CTAs of the main kernel that fit on an SM. Their registers leave room for the shrink
# kernel's CTAs, which run beside them. (The tests compile each kernel and compare its registers.)
CTAS_PER_SM = {8: 3, 16: 4, 32: 3, 64: 3, 128: 2}
MIN_RANGE = 2 * COLS  # a CTA that shares a tile has at least so many columns (fitted)
MAX_SPLIT_K = 14  # at most so many CTAs share a tile: the last one adds the sums of all (fitted)
LONG_K = 14 * COLS  # K // LONG_K estimates split_k, which is chosen after the tile (fitted)
LARGE_M, LARGE_N = 256, 128  # a large tile: rows of x, rows of W
LARGE_TIME = 1.8  # a wave of large tiles takes 1.8 times as long as one of half the work (measured)


class Launch(NamedTuple):
    """One launch of the main kernel: the shape of its tiles and which of them it computes."""

    first_tile: int  # the tile of W to begin with, in tiles of tile_n rows
    tiles: int  # tiles of W to compute
    tile_m: int  # rows of x in a tile
    tile_n: int  # rows of W in a tile: 64, or 128 for two warpgroups
    split_k: int  # CTAs that share a tile, each with a range of k
    stages: int  # steps of 128 columns in shared memory: one in use, the others loading


def _plan(M, N, K, gpu):
    """→ [Launch], which together compute every tile of y. gpu: torch's device properties."""
    return _large_tiles(M, N, K, gpu) or [_small_tiles(M, N, K, gpu)]


def _small_tiles(M, N, K, gpu):
    """→ Launch with tiles of 64 rows of W and at most 128 of x."""
    sms = gpu.multi_processor_count
    tiles_n = triton.cdiv(N, ROWS)
    # A tile with all rows of x decodes each weight once. But a tile here has at most 128 rows, or
    # 32 on GPUs without wgmma (9.x) or tcgen05 (10.x): there several warps multiply a larger tile,
    # and each of them decodes the same weights. A tile of 64 or 128 rows is never taller than x,
    # because TMA is slow to fill missing rows with zeros.
    max_tile_m = max(8, min(32, triton.next_power_of_2(M)))
    if gpu.major in (9, 10) and M >= 64:
        max_tile_m = 64 if M < 128 else 128
    # A small W has too few tiles for all SMs. There are two remedies: tiles with fewer rows of x,
    # though each of them decodes the same weights again, or a split of k, below. A long k favors
    # the split. So double the rows while there is work for all SMs, where a tile counts K // LONG_K
    # times because it can be split. Begin with 16 rows (8 for up to 8 rows of x), or with 32 if K
    # is long (fitted).
    tile_m = min(max_tile_m, 16 if K < 2 * LONG_K else 32)
    while tile_m < max_tile_m and tiles_n * max(1, K // LONG_K) * triton.cdiv(M, tile_m) > sms:
        tile_m *= 2
    # Split k as far as all CTAs still run at the same time.
    split_k = 1
    if K >= SPLIT_FROM:
        room = CTAS_PER_SM[tile_m] * sms // (tiles_n * triton.cdiv(M, tile_m))
        split_k = max(1, min(room, MAX_SPLIT_K, K // MIN_RANGE))
    return Launch(0, tiles_n, tile_m, ROWS, split_k, 3 if tile_m >= 64 else 4)


def _large_tiles(M, N, K, gpu):
    """→ [Launch] with tiles of 128 rows of W and 256 of x, or [] if smaller tiles are faster.

    A large tile occupies an SM alone and loads x half as often. It needs wgmma, an N that is a
    multiple of 128, and rows of x that fill three quarters of it.
    """
    sms = gpu.multi_processor_count
    if gpu.major != 9 or M < LARGE_M * 3 // 4 or N % LARGE_N:
        return []
    # A wave is one tile on each SM. Full waves run without split-K. Split-K spreads the rest of the
    # tiles over more SMs, in at most four ranges of k. A range has 1024 columns or more (4096 if
    # there is no full wave), because shorter ranges cost more time than they save.
    tiles = N // LARGE_N
    full_waves, rest = divmod(tiles, sms)
    split_k = max(1, min(4, sms // max(1, rest), K // (1024 if full_waves else 4096)))
    waves = full_waves + (1 / split_k if rest else 0)
    # The alternative is tiles of 64 rows of W and 128 of x. They are twice as many along N, and run
    # two at a time on an SM. Each has a quarter of the products, so a wave has half of them.
    small_waves = triton.cdiv(tiles * triton.cdiv(M, 128), sms)
    if LARGE_TIME * waves > small_waves:
        return []
    launches = (
        Launch(0, tiles - rest, LARGE_M, LARGE_N, 1, 3),
        Launch(tiles - rest, rest, LARGE_M, LARGE_N, split_k, 3),
    )
    return [launch for launch in launches if launch.tiles]


def _launch_linear(x, weight, bias, low_rank, gpu):
    """Launch the shrink kernel if there is LoRA, then the main kernel as planned → y (M, N), and xa
    (M, S·r), or None without LoRA.
    """
    M, (N, K) = len(x), weight.shape
    plan = _plan(M, N, K, gpu)
    grids = [(triton.cdiv(M, launch.tile_m), launch.tiles, launch.split_k) for launch in plan]
    # Allocate before the shrink kernel starts: PyTorch fills new memory by a kernel when it is told
    # to be deterministic, and a fill that ends late would overwrite partial sums (change 6).
    y = x.new_empty(M, N)
    sums = [
        _partial_sums(x, grid, launch.tile_m * launch.tile_n)
        for grid, launch in zip(grids, plan, strict=True)
    ]
    xa, lora_B, rank, splits = None, None, 0, ()
    if low_rank is not None:
        xa = _launch_shrink(x, weight, low_rank, gpu)
        lora_B, rank, splits = low_rank.B, low_rank.B.shape[1], low_rank.splits
    for grid, partial_sums, launch in zip(grids, sums, plan, strict=True):
        first_tile, _, tile_m, tile_n, split_k, stages = launch
        x_arg = x
        if tile_m >= TMA_ROWS:
            x_arg = TensorDescriptor.from_tensor(x, [tile_m, 64])
        _linear_kernel[grid](
            x_arg,
            # the weight, and what is added to the product
            weight.words,
            weight.scales,
            weight.global_scales,
            bias,
            # LoRA
            xa,
            lora_B,
            # the result
            y,
            # split-K: at most one launch of a plan has partial sums, so launches may share counters
            partial_sums,
            weight.counters,
            # sizes
            M,
            N,
            K,
            weight.words.shape[1],
            first_tile,
            SCALE_EXPONENT,
            # choices of the plan
            TILE_M=tile_m,
            TILE_N=tile_n,
            SPLIT_K=split_k,
            RANK=rank,
            PART_WIDTHS=splits,
            PDL=gpu.major >= 9,
            launch_pdl=gpu.major >= 9,
            num_stages=stages,
            num_warps=tile_n // 16,  # one warpgroup for 64 rows of W
        )
    return y, xa


# ==================================================================================================
# What other files call
#
#     y, for M rows        packed weight                             Dense weight (not quantized)
#     GPU, M ≤ 256         (shrink kernel,) main kernel              (shrink kernel,) cuBLAS
#     GPU, M > 256         _dequantize_kernel to bf16, cuBLAS        cuBLAS
#     GPU, dx              _dequantize_kernel to bf16, cuBLAS        cuBLAS
#     CPU                  torch, with an fp32 copy of W             torch
#
# The number of rows, the layer and the GPU alone decide which kernels and tiles compute y (but for
# compute_output=False), so equal inputs give equal bits. With another number of rows a kernel may
# sum k in another order.
# ==================================================================================================


def linear(
    x: torch.Tensor, weight: PackedNVFP4 | Dense, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (…, K) → y (…, N) = x @ W.T + bias, in the dtype of x.

    Only x receives a gradient, dy @ W: weight and bias are frozen. Nothing is saved for backward,
    which decodes W again. AssertionError: as product.
    """
    N, _ = weight.shape
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _Linear.apply(rows, weight, bias).view(*x.shape[:-1], N)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.weight = weight
        y, _ = product(x, weight, bias)
        return y

    @staticmethod
    def backward(ctx, dy):
        return input_gradient(dy.contiguous(), ctx.weight), None, None


def product(
    x: torch.Tensor,
    weight: PackedNVFP4 | Dense,
    bias: torch.Tensor | None = None,
    low_rank=None,
    compute_output: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (M, K) → y (M, N) = x @ W.T + bias + xa @ B.T, and xa (M, S·r) = scale · x @ A.T.

    Without autograd. y and xa have the dtype of x. x, bias (N,), A and B are contiguous, bf16 on a
    GPU and fp32 on a CPU. Without low_rank, xa is None and y lacks its term.

    low_rank: an object with these fields, such as lora.LowRank:
        A (S·r, K), B (N, r)    r: the rank. S: the number of parts of a fused projection, such as
                                q, k and v, or 1. For a Dense weight call store_B with B first.
        splits                  S integers, N in all: how many columns of y each part has. Part s
                                uses rows s·r to (s + 1)·r − 1 of A.
        scale                   a float

    compute_output=False: the caller promises that nothing reads y. With low_rank, y is then left
    uninitialized: gradient checkpointing repeats a forward only for the tensors that backward
    needs.

    AssertionError: x, bias, A or B has a wrong shape, dtype or device or is not contiguous; the
    splits do not add up to N.
    """
    _check_arguments(x, weight, bias, low_rank)
    if x.data_ptr() % 16:
        x = x.clone()  # TMA needs addresses that are multiples of 16 bytes
    few_rows = x.is_cuda and compute_output and len(x) <= FUSED_MAX
    gpu = torch.cuda.get_device_properties(x.device) if few_rows else None
    dense = isinstance(weight, Dense)
    if few_rows and not dense:
        return _launch_linear(x, weight, bias, low_rank, gpu)
    if low_rank is None:
        return F.linear(x, dequantize(weight, x.dtype), bias), None
    if few_rows:
        xa = _launch_shrink(x, weight, low_rank, gpu)
    else:
        # The GEMM multiplies its fp32 sums by scale, so that xa is rounded once.
        xa = x.new_empty(len(x), len(low_rank.A))
        xa.addmm_(x, low_rank.A.T, beta=0, alpha=low_rank.scale)
    if not compute_output:
        return x.new_empty(len(x), weight.shape[0]), xa
    if x.is_cuda or dense:
        # one GEMM, [x, xa] @ [W, B].T, so that y is rounded once
        weight_and_B = _weight_and_B(weight, low_rank)
        return F.linear(torch.cat([x, xa], 1), weight_and_B, bias), xa
    # A CPU's copy of W has no B beside it. In fp32 the additional rounding does not matter.
    y = F.linear(xa, _block_diagonal(low_rank.B, low_rank.splits), bias)
    return y.addmm_(x, dequantize(weight, x.dtype).T), xa


def input_gradient(
    dy: torch.Tensor, weight: PackedNVFP4 | Dense, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """dy (M, N) → dy @ W (M, K). add_to (M, K): the product is added to it, in place."""
    W = dequantize(weight, dy.dtype)
    if add_to is None:
        return dy @ W
    return add_to.addmm_(dy, W)


def _check_arguments(x, weight, bias, low_rank):
    """AssertionError, as `product` says."""
    N, K = weight.shape
    shapes = [(x, (len(x), K)), (bias, (N,))]
    if low_rank is not None:
        N_of_B, rank = low_rank.B.shape
        assert sum(low_rank.splits) == N_of_B, f"splits {low_rank.splits} are not {N_of_B} rows"
        shapes += [(low_rank.A, (len(low_rank.splits) * rank, K)), (low_rank.B, (N, rank))]
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    for tensor, shape in shapes:
        if tensor is not None:
            found = tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous()
            right = shape, dtype, weight.shrink_counters.device, True
            assert found == right, f"{found} should be {right}: shape, dtype, device, contiguous"


def _weight_and_B(weight, low_rank):
    """→ [W, B] (N, K + S·r), with B block-diagonal, in bf16 on a GPU."""
    if isinstance(weight, Dense):
        return weight.weight_and_B
    N, K = weight.shape
    R, _ = low_rank.A.shape
    out = low_rank.B.new_empty(N, K + R)
    dequantize(weight, out=out[:, :K])
    out[:, K:] = _block_diagonal(low_rank.B, low_rank.splits)
    return out


def _block_diagonal(B, splits):
    """B (N, r) → (N, S·r): each part has columns of its own; the rest is 0."""
    return B if len(splits) == 1 else torch.block_diag(*B.split(splits))


if __name__ == "__main__":
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    codes, scales = torch.randint(256, (64, 64)).byte(), torch.rand(64, 8)
    q = codes, scales.to(torch.float8_e4m3fn), torch.tensor(0.125)
    x = torch.randn(5, 128)
    packed = pack(q)
    exact = x.double() @ dequantize(packed, torch.float64).T
    error = (plain_product(x, *q) - exact).norm() / exact.norm()
    print(f"plain kernel: relative error {error:.0e}")
    word = packed.words.flatten()[0].item() & 0xFFFFFFFF
    print(f"fast kernels: the first word of 8 codes is {word:032b}")
    bits = 8 * (packed.words.nbytes + packed.scales.nbytes) / (64 * 128)
    print(f"              {bits} bits a weight")
