"""y = x @ W.T and its gradient for a weight W that stays in NVFP4: 4.5 bits in memory, bf16 in use.

    W[n, k] = E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale[n]

With few rows in x, a linear layer takes as long as the GPU takes to load its weights: .5625 bytes a
weight here, 2 in bf16. So this layer can be at most 3.56 times as fast as a layer in bf16. To
approach this bound, the kernel must decode a weight in few instructions. docs/kernel.md follows one
word through these steps, with its bits.

1. From a code to a bf16. A code is s ee m with exponent bias 1. Copy s to bit 15 and eem to bits
8..6 of a bf16, all other bits 0: this bf16 is the code's value · 2^-126, exactly, for all 16 codes.
½ becomes a subnormal number, so the next instruction, the bf16 multiplication by the block scale,
must not flush subnormals to zero. PTX has no flushing form of it. Tensor cores then see no
subnormal; they would if block scales were multiplied later, so do not move that multiplication.

2. The word. An int32 holds 8 codes, four for each half word. Code 0 lies in the bits that section 1
names. A rotation of the word to the right by 3 moves code 1 to these bits, and a rotation by 6
moves code 2. The rotations carry s1 and s2 across from the other half word. Code 3, marked ', fills
the bits left over. The kernel multiplies code 3 by 2^12 + 2^7 + 2^2. This product adds three
shifted copies of code 3, which never overlap:

    bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
           s0  e2  e2  m2  e1  e1  m1  e0  e0  m0  s2  m'  s'  s1  e'  e'

Eight integer instructions decode a word. W is stored in tiles of 64 rows × 128 columns, in four
sub-tiles of 32. Code i of a half word belongs to sub-tile i: word j of a row holds columns 2j (in
its low half word) and 2j + 1 (high) of each, the pairs that a tensor core's registers hold.

3. The block scale, (1 + m/8) · 2^e in e4m3, is stored as the byte (e + 9) << 3 | m, ue5m3: five
exponent bits make its subnormals normal. In bits 11..4 of a bf16, ORed with 0x7000, it is scale
· 2^106, so a decoded weight is value · scale · 2^-20, exactly. The epilogue multiplies the fp32
sums by 2^20 · global_scale.

4. The main kernel computes y.T = W @ x.T, because weights always fill the 16 rows of a tensor
core's tile. If W has too few tiles for the GPU, several CTAs share one, and each sums a range of k
(split-K) into memory, then adds 1 to the tile's counter. The last one adds the sums in the order of
k, so that timing does not change the result. Each weight has its own counters, so use a weight on
one stream at a time.

5. LoRA: a small kernel, "shrink", computes xa = scale · x @ A.T, and the main kernel's epilogue
adds xa @ B.T to the fp32 sums. With PDL (programmatic dependent launch, from Hopper on) the GPU
starts a kernel while its predecessor runs, and gdc_wait waits for the predecessor's end. The shrink
kernel calls gdc_wait before its first load. The main kernel calls gdc_wait before it loads xa, or,
without LoRA, before its first load. A kernel that reads y must call gdc_wait too, if it is launched
with PDL.

6. What computes y, for M rows of x. Backward is dx = dy @ W + scale · (dy @ B) @ A:

                     packed weight                             Dense weight (not quantized)
    GPU, M ≤ 256     shrink kernel, main kernel                shrink kernel, cuBLAS
    GPU, M > 256     _dequantize_kernel to bf16, cuBLAS        cuBLAS
    GPU, backward    _dequantize_kernel to bf16, cuBLAS        cuBLAS
    CPU              torch, with an fp32 copy of W             torch

On a CPU, pack makes the fp32 copy of W without any of the bit tricks. On a GPU, the shrink and the
main kernel sum in fp32, and compute_output=False takes neither. Else the number of rows, the layer
and the GPU alone decide which kernels and tiles compute y, so equal inputs give equal bits.
With another number of rows a kernel may sum k in another order. Left out: 4-bit activations
(Hopper's tensor cores have no FP4), experts. Needs: torch; on a GPU triton ≥ 3.6.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    # True if Triton runs the kernels on a CPU in fp32, for the tests (TRITON_INTERPRET=1)
    INTERPRETED = constexpr(triton.knobs.runtime.interpret)
except ImportError:  # a CPU needs no Triton: these two only let Python define the kernels below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


BLOCK = 16  # weights that share a block scale
ROWS, COLS = 64, 128  # weights of a stored tile: 4 KB of words, 512 B of scales, each contiguous
# The most rows of x that the main kernel takes. It decodes W again for each tile of x, so with more
# rows it is faster to decode W once, for cuBLAS.
FUSED_MAX = 256
# largest rank: with more, a tile of lora_B and one of xa exceed a GPU's shared memory
MAX_RANK = 256
# The shrink kernel's counters, at the start of a weight's counters: one for each tile of 16 rows of
# x and 32 of A, so enough for FUSED_MAX rows and R = 4096. The main kernel uses the counters behind
# them, because with PDL both kernels run at the same time.
SHRINK_COUNTERS = 2048
# CODE_BITS[i] is where bits 0 to 3 (m, e, e, s) of code i in the low half word lie in the word: the
# picture of section 2. For a code in the high half word add 16, modulo 32.
CODE_BITS = ((6, 7, 8, 15), (9, 10, 11, 18), (12, 13, 14, 21), (4, 0, 1, 3))
# The lowest bit of the block scales of sub-tiles 0 to 3 in a word of scales. One mask extracts the
# scales of sub-tiles 0 and 1, at bits 4 and 20; after a rotation by 8 it extracts those of 2 and 3.
SCALE_BITS = (4, 20, 12, 28)
# The bits above a block scale's byte in a bf16, in both half words. The kernels take this constant
# as an argument, because ptxas fuses the OR of a register with the AND before that OR into one
# instruction (LOP3).
SCALE_EXPONENT = 0x70007000
# ue5m3 of a block scale of 0, which has no exponent of its own. No other scale has this code: it is
# 480, and e4m3 ends at 448. Its value does not matter, because pack sets the block's codes to 0.
ZERO_SCALE = 143
# The bits of an fp32, >> 20, are (e + 127) << 3 | m. Subtract this offset to get ue5m3.
UE5M3_OFFSET = (127 - 9) << 3
# TMA loads tiles of this many rows of x or more. It computes addresses in hardware; pointers to so
# many rows would fill the registers.
TMA_ROWS = constexpr(64)


# --- the two kinds of weights


class PackedNVFP4(NamedTuple):
    """A weight (N, K) in the kernels' layout: parts (N_i, K), as of q, k and v, joined along N.

    words and scales cover whole tiles. Along N and K, codes of 0 pad words; ZERO_SCALE pads scales.
    """

    words: torch.Tensor  # (N/64, K/128, 64, 16) int32, 8 codes each
    scales: torch.Tensor  # (N/64, K/128, 64, 2) int32, 4 block scales each
    global_scales: torch.Tensor  # (N,) fp32: the parts of a foreign checkpoint may differ in theirs
    shape: tuple  # (N, K)
    counters: torch.Tensor  # int32, 0 between launches: CTAs done per tile, see section 4
    # None on a GPU. On a CPU:
    dense: torch.Tensor  # (N, K) fp32: what a CPU multiplies by
    parts: tuple  # what was packed, for who writes the weight to a file


class Dense:
    """A weight (N, K) that is not quantized, for the same `linear`: the bf16 base to compare with.

    weight: (N, K). weight_and_B: [weight, B] (N, K + R), so that one GEMM multiplies it by
    [x, xa]; without an adapter it is the weight itself. counters: int32, of the shrink kernel.
    """

    def __init__(self, W):
        self.weight = self.weight_and_B = W
        self.shape = tuple(W.shape)
        self.counters = W.new_zeros(SHRINK_COUNTERS, dtype=torch.int32)

    def adapt(self, B, splits):
        """Copy an adapter's B (N, R / S) beside the weight: call this after each change of B.

        The first call allocates `weight_and_B`. Later calls write in place, because captured CUDA
        graphs read the same addresses. splits: the rows of B of each of the S parts.
        """
        K, B = self.shape[1], _block_diagonal(B, splits).to(self.weight)
        if self.weight_and_B is self.weight:
            self.weight_and_B = torch.cat([self.weight, B], 1)
            self.weight = self.weight_and_B[:, :K]  # a view: W is stored once
        self.weight_and_B[:, K:] = B


# --- packing: in torch, once for each weight


def pack(*qs):
    """Join NVFP4 weights along N and place their bits as the kernels read them → PackedNVFP4.

    qs: tuples (packed (N_i, K/2) uint8, block_scale (N_i, K/16) float8_e4m3fn, global_scale ()
    fp32), such as nvfp4.quantize returns. A byte of packed holds two codes, that of the even k in
    its low half.

    ValueError: K is no multiple of 16, or dtypes, shapes or devices do not fit together.
    AssertionError: a block scale is negative or NaN.
    """
    nibbles, block_scales, global_scales = zip(*qs, strict=True)
    sizes = tuple(map(len, nibbles))
    N, K = sum(sizes), 2 * nibbles[0].shape[1]
    device = nibbles[0].device
    for q in qs:
        _check_part(*q, K, device)
    pad_n, pad_k = -N % ROWS, -K % COLS
    nibbles = F.pad(torch.cat(nibbles), (0, pad_k // 2, 0, pad_n))
    scales = torch.cat([s.view(torch.uint8) for s in block_scales])
    scales = F.pad(scales, (0, pad_k // BLOCK, 0, pad_n))
    assert (scales <= 0x7E).all(), "a block scale is negative or NaN"
    # Pack some rows at a time: the temporaries take several bytes a code, which are gigabytes for a
    # layer of a 72B model.
    pieces = map(_pack_rows, nibbles.split(64 * ROWS), scales.split(64 * ROWS))
    words, scales = map(torch.cat, zip(*pieces, strict=True))
    rows = torch.cat([g.float().expand(n) for g, n in zip(global_scales, sizes, strict=True)])
    # The main kernel's tiles: for each 64 rows of W at most 32, of 8 rows of x (FUSED_MAX = 256).
    counters = words.new_zeros(SHRINK_COUNTERS + 32 * len(words))
    dense = parts = None
    if device.type == "cpu":
        dense = torch.cat([_decode_on_cpu(*q) for q in qs])
        parts = qs
    return PackedNVFP4(words, scales, rows, (N, K), counters, dense, parts)


def _check_part(nibbles, block_scale, global_scale, K, device):
    """ValueError: the tensors of one part do not fit to each other, to K or to the device."""
    N = len(nibbles)
    found = (
        nibbles.dtype,
        block_scale.dtype,
        {nibbles.device, block_scale.device, global_scale.device},
        (*nibbles.shape, *block_scale.shape),
        K % BLOCK,
    )
    if found != (torch.uint8, torch.float8_e4m3fn, {device}, (N, K // 2, N, K // BLOCK), 0):
        raise ValueError(
            f"codes and scales {found} do not make (N, {K}) on {device}, K a multiple of 16"
        )


def _decode_on_cpu(nibbles, block_scale, global_scale):
    """The format's definition: a part as pack takes it → W (N, K) fp32."""
    e2m1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1)  # (N, K)
    values = torch.cat([e2m1, -e2m1])[codes.int()]
    return values * block_scale.float().repeat_interleave(BLOCK, 1) * global_scale


def _pack_rows(nibbles, block_scale):
    """(64 n, 64 k) and (64 n, 8 k) uint8 → words (n, k, 64, 16) and scales (n, k, 64, 2) int32."""
    scale = block_scale.view(torch.float8_e4m3fn).float()
    # ue5m3 has no 0, so set the codes of a block whose scale is 0 to 0
    nibbles = nibbles.int() * (scale > 0).repeat_interleave(BLOCK // 2, 1)
    return _pack_codes(nibbles), _pack_scales(scale)


def _pack_codes(nibbles):
    """(64 n, 64 k) int32, two codes each → (n, k, 64, 16) int32: the picture of section 2."""
    words = 0
    for byte, positions in zip(_to_tiles(nibbles, 4, 16).unbind(3), CODE_BITS, strict=True):
        # (n, k, 64, 16): the codes of columns 2j and 2j + 1, one in each half word
        pair = byte & 15 | byte >> 4 << 16
        for bit, position in enumerate(positions):
            words = words | _rotate(pair >> bit & 0x00010001, position)
    return words


def _pack_scales(scale):
    """(64 n, 8 k) fp32 with values of e4m3 → (n, k, 64, 2) int32.

    Word b of a row holds the ue5m3 of block b of each of the four sub-tiles.
    """
    ue5m3 = (scale.view(torch.int32) >> 20) - UE5M3_OFFSET
    ue5m3 = torch.where(scale > 0, ue5m3, ZERO_SCALE)
    words = 0
    for byte, low_bit in zip(_to_tiles(ue5m3, 4, 2).unbind(3), SCALE_BITS, strict=True):
        words = words | _rotate(byte, low_bit)
    return words


def _to_tiles(matrix, *sub_tiles):
    """(64 n, columns) → (n, k, 64, *sub_tiles). sub_tiles: the shape of a tile's row, (4, …)."""
    return matrix.view(len(matrix) // ROWS, ROWS, -1, *sub_tiles).transpose(1, 2)


def _rotate(word, left):
    """Rotate an int32 to the left by 0 to 31. torch's >> repeats the sign bit: mask its copies."""
    return word << left | word >> 32 - left & (1 << left) - 1


# --- the layer and its gradient


def linear(x, weight, bias=None, lora=None, compute_output=True):
    """x (..., K) → y (..., N) = x @ W.T + bias + scale · (x @ A.T) @ B.T, in the dtype of x.

    x, bias (N,), A and B are bf16 on a GPU and fp32 on a CPU. weight: a PackedNVFP4 or a Dense. The
    weight receives no gradient.

    lora: None, or any object with these fields, such as lora.Adapter:
        A (R, K), B (N, R / S)    the adapter, rounded to the dtype of x. S: the number of parts of
                                  a fused projection, such as q, k and v, or 1.
        splits                    a tuple of S integers, N in all: the columns of y of each part.
                                  Part s uses rows s · R / S to (s + 1) · R / S − 1 of A.
        scale                     a float
        lora_A, lora_B            the fp32 parameters of which A and B are rounded copies. They get
                                  the gradients of A and B. If both are None, A and B get them.
    For a Dense weight, call its `adapt` with B first.

    compute_output=False: the caller promises that nothing reads y. With LoRA, x @ W.T is then left
    out of y, because gradient checkpointing repeats a forward only for the tensors that backward
    needs.

    Gradients have the dtype of x. autograd converts those of lora_A and lora_B to fp32.

    AssertionError: x, bias, A or B has a wrong shape, dtype or device; bias, A or B is not
    contiguous; on a GPU, the rank R / S exceeds MAX_RANK; a Dense has no copy of B yet.
    """
    N, K = weight.shape
    assert x.shape[-1] == K and (bias is None or bias.shape == (N,)), (
        f"x has K={x.shape[-1]}, bias {bias if bias is None else bias.shape}; the weight is {N, K}"
    )
    rows = x.reshape(-1, K).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()  # TMA needs addresses that are multiples of 16 bytes
    _check_arguments(rows, weight, bias, lora)
    lora_A = lora_B = None
    if lora is not None:
        lora_A, lora_B = lora.lora_A, lora.lora_B
        if lora_A is None:
            lora_A, lora_B = lora.A, lora.B
    y = _Linear.apply(rows, bias, lora_A, lora_B, weight, lora, compute_output)
    return y.view(*x.shape[:-1], N)


def _check_arguments(rows, weight, bias, lora):
    """AssertionError, as `linear` says. rows: x (M, K)."""
    tensors = [rows] if bias is None else [rows, bias]
    if lora is not None:
        tensors += [lora.A, lora.B]
    found = {(t.dtype, t.device, t.is_contiguous()) for t in tensors}
    right = torch.bfloat16 if rows.is_cuda else torch.float32, weight.counters.device, True
    assert found == {right}, (
        f"x, bias, A, B are {found}, not all {right}: dtype, device, contiguous"
    )
    if lora is not None:
        N, K = weight.shape
        (R, K_of_A), (N_of_B, rank) = lora.A.shape, lora.B.shape
        splits = lora.splits
        assert rank <= MAX_RANK or not rows.is_cuda, f"rank {rank} exceeds {MAX_RANK}"
        assert (R, K_of_A, N_of_B, sum(splits)) == (len(splits) * rank, K, N, N), (
            f"A {R, K_of_A}, B {N_of_B, rank}, splits {splits} do not fit {N, K}"
        )
        if isinstance(weight, Dense):
            assert weight.weight_and_B.shape[1] == K + R, "this Dense has no B: call its adapt"


class _Linear(torch.autograd.Function):
    """linear's autograd function for x (M, K). With LoRA, forward saves x, xa, A and B for
    backward; without, none of them. Backward decodes W again.

    lora_A and lora_B are arguments only to receive gradients: autograd returns gradients to the
    arguments of forward. Both directions multiply by the rounded lora.A and lora.B, and backward
    returns their gradients as those of lora_A and lora_B, as if rounding had the derivative 1.
    """

    @staticmethod
    def forward(ctx, x, bias, lora_A, lora_B, weight, lora, compute_output):
        y, xa = _forward(x, weight, bias, lora, compute_output)
        ctx.weight = weight
        if lora is not None:
            ctx.splits, ctx.scale = lora.splits, lora.scale
            ctx.save_for_backward(x, xa, lora.A, lora.B)
        return y

    @staticmethod
    def backward(ctx, dy):
        needs_x, needs_bias, *needs_lora = ctx.needs_input_grad  # False for what is no tensor
        dy = dy.contiguous()
        dx = dbias = dA = dB = None
        saved = ctx.saved_tensors
        if saved:
            x, xa, A, B = saved
            # (M, R): the gradient of x @ A.T
            dxa = _scaled_product(dy, _block_diagonal(B, ctx.splits), ctx.scale)
            if any(needs_lora):
                dA = dxa.T @ x
                dB = _gradient_of_B(dy, xa, ctx.splits)
            dx = dxa @ A
        if needs_x:
            W = dequantize(ctx.weight, dy.dtype)
            dx = dy @ W if dx is None else dx.addmm_(dy, W)
        if needs_bias:
            dbias = dy.sum(0)
        return dx, dbias, dA, dB, None, None, None


def _forward(x, weight, bias, lora, compute_output):
    """x (M, K) → y (M, N), and xa = scale · x @ A.T (M, R), None without LoRA: section 6."""
    if x.is_cuda and compute_output and len(x) <= FUSED_MAX:
        return _forward_few_rows(x, weight, bias, lora)
    xa = None
    if lora is not None:
        xa = _scaled_product(x, lora.A.T, lora.scale)
        packed_on_cpu = not x.is_cuda and isinstance(weight, PackedNVFP4)
        if packed_on_cpu or not compute_output:
            y = F.linear(xa, _block_diagonal(lora.B, lora.splits), bias)
            if compute_output:
                # Two products, because W's fp32 copy has no B beside it. In fp32 the additional
                # rounding does not matter.
                y.addmm_(x, dequantize(weight, x.dtype).T)
            return y, xa
    return _forward_gemm(x, xa, weight, bias, lora), xa


def _forward_few_rows(x, weight, bias, lora):
    """As _forward, on a GPU for at most FUSED_MAX rows. With LoRA the shrink kernel computes xa.
    Then the main kernel computes y, or cuBLAS if the weight is Dense.
    """
    gpu = torch.cuda.get_device_properties(x.device)
    dense = isinstance(weight, Dense)
    # Do not start the shrink kernel early (PDL) for a Dense if x has more than 16 rows. A shrink
    # kernel that starts early occupies SMs while it waits, and with so many rows cuBLAS needs all
    # SMs for the previous layer, if that layer is a Dense too.
    pdl = gpu.major >= 9 and (len(x) <= 16 or not dense)
    xa = shrink_sums = None
    if lora is not None:
        # shrink_sums must live until the main kernel's sums are allocated. Otherwise the allocator
        # may give both the same memory, while both kernels run.
        xa, shrink_sums = _launch_shrink(x, weight, lora, pdl)
    if dense:
        return _forward_gemm(x, xa, weight, bias, lora), xa
    plan = _plan(len(x), *weight.shape, gpu)
    return _launch_linear(x, weight, bias, lora, xa, plan, pdl=pdl), xa


def _forward_gemm(x, xa, weight, bias, lora):
    """→ y (M, N) by one GEMM, from x (M, K) and xa (M, R), which is None without LoRA. dequantize
    decodes a packed W first.

    With LoRA the GEMM is [x, xa] @ [W, B].T, so that y is rounded once, as in the main kernel. Two
    GEMMs would round x @ W.T to bf16 first, by more than what an adapter adds early in training.
    """
    if lora is None:
        return F.linear(x, dequantize(weight, x.dtype), bias)
    if isinstance(weight, Dense):
        weight_and_B = weight.weight_and_B
    else:
        N, K = weight.shape
        weight_and_B = x.new_empty(N, K + len(lora.A))
        dequantize(weight, out=weight_and_B[:, :K])
        weight_and_B[:, K:] = _block_diagonal(lora.B, lora.splits)
    return F.linear(torch.cat([x, xa], 1), weight_and_B, bias)


def _scaled_product(x, matrix, scale):
    """→ scale · x @ matrix, rounded once: the GEMM multiplies its fp32 sums by scale."""
    out = x.new_empty(len(x), matrix.shape[1])
    return out.addmm_(x, matrix, beta=0, alpha=scale)


def _gradient_of_B(dy, xa, splits):
    """→ (N, R / S). dy.T @ xa (N, R) is the gradient of _block_diagonal(B). Keep only its diagonal
    blocks, because B does not contain the others, which are constant zeros.
    """
    parts = enumerate((dy.T @ xa).split(splits))
    return torch.cat([rows.chunk(len(splits), 1)[part] for part, rows in parts])


def _block_diagonal(B, splits):
    """B (N, R / S) → (N, R): each part has columns of its own; the rest is 0."""
    return B if len(splits) == 1 else torch.block_diag(*B.split(splits))


def dequantize(weight, dtype=torch.bfloat16, out=None):
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
        # pointers
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


# --- planning the launches of the main kernel


class Launch(NamedTuple):
    """One launch of the main kernel: the shape of its tiles and which of them it computes."""

    first_tile: int  # the tile of W to begin with, in tiles of tile_n rows
    tiles: int  # tiles of W to compute
    tile_m: int  # rows of x in a tile
    tile_n: int  # rows of W in a tile: 64, or 128 for two warpgroups
    split_k: int  # CTAs that share a tile, each with a range of k
    stages: int  # steps of 128 columns in shared memory: one in use, the others loading


# tile_m → CTAs of the main kernel that fit on an SM. Their registers leave room for the shrink
# kernel's CTAs, which run beside them. (The tests compile each kernel and compare its registers.)
CTAS_PER_SM = {8: 3, 16: 4, 32: 3, 64: 3, 128: 2}


def _plan(M, N, K, gpu):
    """→ [Launch], which together compute every tile of y. gpu: torch's device properties.

    A plan sets the speed and the order of sums, and no plan gives a wrong result. A constant that
    has no reason beside it, or is called fitted, was chosen by the measured times of the layers of
    Qwen2.5 and SmolLM2 on an H100 and an H200.
    """
    launches = _plan_large_tiles(M, N, K, gpu)
    if launches:
        return launches
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
    # the split. So double the rows while there are more tiles than SMs, and count a tile once for
    # every 1792 columns (14 steps), because it can be split. Begin with 16 rows, or with 32 from
    # twice that length (3584) on. Both lengths are fitted.
    tile_m = min(max_tile_m, 16 if K < 3584 else 32)
    while tile_m < max_tile_m and tiles_n * max(1, K // 1792) * triton.cdiv(M, tile_m) > sms:
        tile_m *= 2
    # Split k as far as all CTAs still run at the same time, if there are eight steps or more. Each
    # CTA gets two steps or more. At most 14 CTAs share a tile, because the last one adds the sums
    # of all. Eight, two and 14 are fitted.
    split_k = 1
    if K >= 8 * COLS:
        room = CTAS_PER_SM[tile_m] * sms // (tiles_n * triton.cdiv(M, tile_m))
        split_k = max(1, min(room, 14, K // (2 * COLS)))
    return [Launch(0, tiles_n, tile_m, ROWS, split_k, 3 if tile_m >= 64 else 4)]


def _plan_large_tiles(M, N, K, gpu):
    """→ [Launch] with tiles of 128 rows of W and 256 of x, or [] if smaller tiles are faster.

    A large tile occupies an SM alone and loads x half as often. It needs
    wgmma, an N that is a multiple of 128, and 192 rows of x, which fill three quarters of it.
    """
    sms = gpu.multi_processor_count
    if gpu.major != 9 or M < 192 or N % 128:
        return []
    # A wave is one tile on each SM. Full waves run without split-K. Split-K spreads the rest of the
    # tiles over more SMs, in at most four ranges of k. A range has 1024 columns or more (4096 if
    # there is no full wave), because shorter ranges cost more time than they save.
    tiles = N // 128
    in_full_waves = tiles // sms * sms
    rest = tiles - in_full_waves
    split_k = max(1, min(4, sms // max(1, rest), K // (1024 if in_full_waves else 4096)))
    waves = in_full_waves / sms + (1 / split_k if rest else 0)
    # The alternative is tiles of 64 rows of W and 128 of x, two at a time on an SM: half as many
    # weights and half as many rows of x each. If a wave of them takes a time of 1, then a wave of
    # large tiles, with twice the products, takes 1.8 (measured).
    small_waves = triton.cdiv(2 * tiles * triton.cdiv(M, 128), 2 * sms)
    if 1.8 * waves > small_waves:
        return []
    launches = (
        Launch(0, in_full_waves, 256, 128, 1, 3),
        Launch(in_full_waves, rest, 256, 128, split_k, 3),
    )
    return [launch for launch in launches if launch.tiles]


# --- launching


def _launch_shrink(x, weight, lora, pdl):
    """Launch the shrink kernel → xa = scale · x @ A.T (M, R), and the memory of its partial sums.

    The next kernel may run beside this one: keep the sums until its memory is allocated.
    """
    M, K = x.shape
    R = len(lora.A)
    tile_m, tile_r = 8 if M <= 8 else 16, 32
    # Split k as in _plan, here to at most 28 CTAs (fitted): partial sums of such a small tile, 32 ×
    # 8 or 16, are added fast. If 28 suffice, a CTA sums at most 512 columns for a packed weight,
    # because the main kernel runs at the same time and hides the shrink kernel. A Dense's GEMM
    # waits for xa, so there a CTA sums at most 256 columns, which take less time.
    split_k = 1
    if K >= 8 * COLS:
        split_k = min(28, triton.cdiv(K, 256 if isinstance(weight, Dense) else 512))
    grid = triton.cdiv(M, tile_m), triton.cdiv(R, tile_r), split_k
    xa = x.new_empty(M, R)
    sums = _partial_sums(x, grid, tile_m * tile_r)
    _shrink_kernel[grid](
        # pointers
        x,
        lora.A,
        xa,
        sums,
        weight.counters,
        # sizes
        M,
        R,
        K,
        lora.scale,
        # meta
        TILE_M=tile_m,
        TILE_R=tile_r,
        SPLIT_K=split_k,
        PDL=pdl,
        launch_pdl=pdl,
        num_stages=5,  # steps of 64 columns in shared memory: one in use, four loading
        num_warps=2,  # 16 rows of A each, the least that a tensor core multiplies
    )
    return xa, sums


def _launch_linear(x, weight, bias, lora, xa, plan, pdl):
    """Launch the main kernel as planned → y (M, N). lora and xa (M, R): None without LoRA."""
    M, (N, K) = len(x), weight.shape
    lora_B, rank, splits = None, 0, ()
    if lora is not None:
        lora_B, rank, splits = lora.B, lora.B.shape[1], lora.splits
    y = x.new_empty(M, N)
    for first_tile, tiles, tile_m, tile_n, split_k, stages in plan:
        grid = triton.cdiv(M, tile_m), tiles, split_k
        # One launch of a plan at most is split, so that launches share neither sums nor counters.
        sums = _partial_sums(x, grid, tile_m * tile_n)
        x_arg = x
        if tile_m >= TMA_ROWS:
            x_arg = TensorDescriptor.from_tensor(x, [tile_m, 64])
        _linear_kernel[grid](
            # pointers
            x_arg,
            weight.words,
            weight.scales,
            weight.global_scales,
            bias,
            xa,
            lora_B,
            y,
            sums,
            weight.counters,
            # sizes
            M,
            N,
            K,
            weight.words.shape[1],
            first_tile,
            SCALE_EXPONENT,
            # meta
            TILE_M=tile_m,
            TILE_N=tile_n,
            SPLIT_K=split_k,
            RANK=rank,
            SPLITS=splits,
            PDL=pdl,
            launch_pdl=pdl,
            num_stages=stages,
            num_warps=tile_n // 16,  # one warpgroup for 64 rows of W
        )
    return y


def _partial_sums(x, grid, tile_size):
    """→ fp32 memory for the partial sums of the CTAs of a grid; empty if no tile is split."""
    *_, split_k = grid
    return x.new_empty(*grid, tile_size if split_k > 1 else 0, dtype=torch.float32)


# --- the kernels. Triton lets a kernel read only those globals that are constexpr.

FIRST_COUNTER = constexpr(SHRINK_COUNTERS)  # of the main kernel
STORED_ROWS = constexpr(64)  # rows of a stored tile
STEP = constexpr(128)  # columns of a stored tile, and of W in one iteration of the main loop
ROW_WORDS = constexpr(16)  # int32 words of a row of a stored tile
ROW_SCALES = constexpr(2)  # int32 words of block scales of this row
TILE_WORDS = constexpr(1024)  # 64 · 16
TILE_SCALES = constexpr(128)  # 64 · 2
CODE_MASK = constexpr(0x81C081C0)  # where section 1 wants the bits of a code, in both half words
RESCALE = constexpr(2.0**20)  # a decoded weight lacks this factor, and global_scale: section 3


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


@jit
def _decode(words, scales, scale_exponent, HALF: constexpr):
    """Half the columns of N stored rows → (N, 64) bf16, value · block_scale · 2^-20: section 2, 3.

    words (N, 16) and scales (N, 2): int32. HALF: 0 for sub-tiles 0 and 1, 1 for sub-tiles 2 and 3;
    they are called a and b here.
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
    scale_a, scale_b = _bf16_pair((s & 0x0FF00FF0) | scale_exponent.to(tl.uint32))
    # (N, 16 words, 2 halves) → (N, 2 blocks, 16 columns). This product reads subnormals: section 1.
    a = tl.join(*_bf16_pair(pair_a)).reshape(N, 2, 16) * scale_a[:, :, None]
    b = tl.join(*_bf16_pair(pair_b)).reshape(N, 2, 16) * scale_b[:, :, None]
    # a, then b. Like all joins and reshapes here this renames registers and moves nothing.
    return tl.join(a, b).reshape(N, 32, 2).permute(0, 2, 1).reshape(N, 64)


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
    acc = tl.dot(w, tl.trans(x_tile), acc, input_precision="ieee")
    if WAIT and not INTERPRETED:
        # wgmma is asynchronous. Triton lets the next decode overwrite registers that a wgmma in
        # flight still reads, which makes sums wrong. An empty instruction that uses acc makes
        # Triton wait for the wgmma.
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


# do_not_specialize: else Triton compiles this kernel anew in the middle of a run, when M or
# first_tile is 1, or a multiple of 16, for the first time.
@jit(do_not_specialize=["M", "first_tile"])
def _linear_kernel(
    # pointers
    x,
    words,
    scales,
    global_scales,
    bias,
    xa,
    lora_B,
    y,
    partial_sums,
    counters,
    # sizes
    M,
    N,
    K,
    tiles_k,
    first_tile,
    scale_exponent,
    # meta
    TILE_M: constexpr,
    TILE_N: constexpr,
    SPLIT_K: constexpr,
    RANK: constexpr,
    SPLITS: constexpr,
    PDL: constexpr,
):
    """Compute a tile (TILE_N, TILE_M) of y.T = W @ x.T + bias + LoRA's part: sections 4 and 5.

    Grid: (tiles of x, tiles of W, SPLIT_K). x (M, K): a TMA descriptor if TILE_M is at least 64,
    else a pointer. words, scales, global_scales: as in PackedNVFP4; tiles_k: stored tiles along K.
    bias (N,): may be None. xa (M, S · RANK), lora_B (N, RANK): None without LoRA, where RANK is 0.
    SPLITS: the columns of y of each of the S parts.
    """
    # which tile: its first row of x and row of W, and this CTA's steps of 128 columns
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1) + first_tile
    begin, end = _split_range(tiles_k, SPLIT_K)
    first_m = pid_m * TILE_M
    row = tl.arange(0, TILE_N)
    if TILE_M >= TMA_ROWS:
        # TMA fills rows past the end of x with zeros, but slowly. So shift a last tile back that
        # would pass the end: it computes rows of the tile before once more, with the same result.
        first_m = tl.maximum(tl.minimum(first_m, M - TILE_M), 0)
    offs_m = first_m + tl.arange(0, TILE_M)
    offs_n = pid_n * TILE_N + row
    in_m = (offs_m < M)[None, :]
    in_n = offs_n < N

    # its words and scales. A tile of 128 rows is two stored tiles, one below the other: rows from
    # 64 on are in the stored tile that follows tiles_k tiles later.
    first_stored = pid_n * (TILE_N // STORED_ROWS) * tiles_k + begin
    words += first_stored * TILE_WORDS
    scales += first_stored * TILE_SCALES
    if PDL:
        if RANK == 0:
            gdc_wait()  # for the kernel that writes x; with LoRA, shrink has waited for it
        gdc_launch_dependents()  # the next kernel may start; its own gdc_wait waits for this one
    stored_row = row + row // STORED_ROWS * (tiles_k - 1) * STORED_ROWS
    w_ptr = _pointers(words, stored_row, ROW_WORDS)
    s_ptr = _pointers(scales, stored_row, ROW_SCALES)
    acc = tl.zeros((TILE_N, TILE_M), tl.float32)

    # Load the epilogue's operands except xa before the loop, because they arrive while it runs.
    scale = tl.load(global_scales + offs_n, mask=in_n, other=0.0)[:, None] * RESCALE
    add = 0.0 if bias is None else tl.load(bias + offs_n, in_n, 0.0).to(tl.float32)[:, None]
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
            # registers (a test looks).
            acc = _multiply(acc, _decode(w, s, scale_exponent, 1), x_second, WAIT=TILE_N == 64)

    # the epilogue, which one CTA of a tile runs
    acc, is_last = _sum_splits(acc, partial_sums, counters + FIRST_COUNTER, SPLIT_K)
    if is_last:
        acc = acc * scale + add
        if RANK > 0:
            if PDL:
                gdc_wait()  # for the shrink kernel, which writes xa
            first_n = 0
            for part in tl.static_range(len(SPLITS)):
                last_n = first_n + SPLITS[part]
                # Skip a part that has no rows in this tile. Few tiles have rows of two parts.
                if (first_n < (pid_n + 1) * TILE_N) & (last_n > pid_n * TILE_N):
                    xa_t = tl.load(
                        xa + offs_m[None, :] * (len(SPLITS) * RANK) + part * RANK + r[:, None],
                        mask=in_m & in_r[:, None],
                        other=0.0,
                    )
                    in_part = ((offs_n >= first_n) & (offs_n < last_n))[:, None]
                    acc = tl.dot(tl.where(in_part, B, 0.0), xa_t, acc, input_precision="ieee")
                first_n = last_n
        y_ptr = y + offs_m[None, :] * N + offs_n[:, None]
        tl.store(y_ptr, acc.to(y.dtype.element_ty), mask=in_m & in_n[:, None])


@jit
def _split_range(steps, SPLIT_K: constexpr):
    """→ (begin, end): this CTA's share of the steps along k."""
    pid_k = tl.program_id(2)
    return pid_k * steps // SPLIT_K, (pid_k + 1) * steps // SPLIT_K


@jit
def _pointers(matrix, row, WIDTH: constexpr):
    """→ pointers (len(row), WIDTH) to whole rows of a matrix with WIDTH columns."""
    return matrix + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@jit
def _sum_splits(acc, partial_sums, counters, SPLIT_K: constexpr):
    """Add up the sums acc (R, C) of the CTAs that share a tile: section 4.

    → (the sum, True) in the CTA that counts last, (acc, False) in the others. partial_sums: (tiles,
    SPLIT_K, R, C) fp32. counters: (tiles,) int32, 0 before and after a launch.
    """
    if SPLIT_K == 1:
        return acc, True
    R: constexpr = acc.shape[0]
    C: constexpr = acc.shape[1]
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    pid_k = tl.program_id(2)
    offs = tile * SPLIT_K * R * C + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(partial_sums + pid_k * R * C + offs, acc)
    # All warps must have stored before the CTA counts. acq_rel: the CTA that counts last sees the
    # stores of those that counted before.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        tl.store(counters + tile, 0)
        acc = tl.zeros_like(acc)
        # Load from L2 (.cg), because L1 may hold lines of an earlier launch. In a tile of at most
        # 4096 sums a thread loads up to 32 a turn, too few to hide their latency: unroll the loop,
        # so that loads of several CTAs' sums overlap. Larger tiles have enough loads in each turn.
        unroll: constexpr = SPLIT_K if R * C <= 4096 else 1
        for i in tl.range(SPLIT_K, loop_unroll_factor=unroll, num_stages=1):
            acc += tl.load(partial_sums + i * R * C + offs, cache_modifier=".cg")
    return acc, is_last


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
    """Compute a tile (TILE_R, TILE_M) of xa.T = scale · lora_A @ x.T: xa (M, R), lora_A (R, K).

    Grid: (tiles of x, tiles of lora_A, SPLIT_K). A step has 64 columns. partial_sums and counters:
    as in the main kernel, but other memory, because the two run at the same time.
    """
    offs_m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    offs_r = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    offs_k = tl.arange(0, 64)
    begin, end = _split_range(tl.cdiv(K, 64), SPLIT_K)
    if PDL:
        gdc_wait()  # for the kernel that writes x
        gdc_launch_dependents()  # the main kernel may start: x is complete
    a_ptr = lora_A + offs_r[:, None] * K + offs_k[None, :]
    x_ptr = x + offs_m[None, :] * K + offs_k[:, None]
    acc = tl.zeros((TILE_R, TILE_M), tl.float32)
    in_r = (offs_r < R)[:, None]
    in_m = (offs_m < M)[None, :]
    for step in range(begin, end):
        in_k = offs_k < K - step * 64
        a = tl.load(a_ptr + step * 64, mask=in_r & in_k[None, :], other=0.0)
        xt = tl.load(x_ptr + step * 64, mask=in_m & in_k[:, None], other=0.0)
        acc = tl.dot(a, xt, acc, input_precision="ieee")
    acc, is_last = _sum_splits(acc, partial_sums, counters, SPLIT_K)
    if is_last:
        tl.store(
            xa + offs_m[None, :] * R + offs_r[:, None],
            (acc * scale).to(xa.dtype.element_ty),
            mask=in_m & in_r,
        )


@jit
def _dequantize_kernel(
    # pointers
    words,
    scales,
    global_scales,
    out,
    # sizes
    N,
    K,
    out_stride,
    tiles_k,
    scale_exponent,
):
    """Decode a stored tile (64, 128) to its place in out (N, K), of any dtype.

    Grid: (stored tiles,). out_stride: from one row of out to the next, in elements.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, STORED_ROWS)
    w = tl.load(_pointers(words + tile * TILE_WORDS, row, ROW_WORDS))
    s = tl.load(_pointers(scales + tile * TILE_SCALES, row, ROW_SCALES))
    offs_n = (tile // tiles_k * STORED_ROWS + row)[:, None]
    in_n = offs_n < N
    scale = tl.load(global_scales + offs_n, mask=in_n, other=0.0) * RESCALE
    for half in tl.static_range(2):
        offs_k = tile % tiles_k * STEP + half * (STEP // 2) + tl.arange(0, STEP // 2)[None, :]
        out_tile = _decode(w, s, scale_exponent, half).to(tl.float32) * scale
        in_tile = in_n & (offs_k < K)
        out_ptr = out + offs_n * out_stride + offs_k
        tl.store(out_ptr, out_tile.to(out.dtype.element_ty), mask=in_tile)


if __name__ == "__main__":
    q = (
        torch.randint(256, (64, 64)).byte(),
        torch.rand(64, 8).to(torch.float8_e4m3fn),
        torch.tensor(0.125),
    )
    packed = pack(q)
    print(f"8 codes in a word: {packed.words[0, 0, 0, 0].item() & 0xFFFFFFFF:032b}")
    print(f"weights: {dequantize(packed)[0, :8].tolist()}")
    print(f"{(packed.words.nbytes + packed.scales.nbytes) / 2**13} bytes a weight")
