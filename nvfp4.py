# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""NVFP4: a 4-bit number per weight, times a scale per 16 weights, times one scale for the tensor.

    w[n, k]  ≈  E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale

    row n:   | k = 0 … 15    | k = 16 … 31   | …     code, 4 bit:  s e e m → ±{0 ½ 1 1½ 2 3 4 6}
             | block_scale 0 | block_scale 1 | …     e4m3, 8 bit: 0, 2⁻⁹ … 448; global_scale: fp32
    packed[n, j] = code[n, 2j+1] << 4 | code[n, 2j]               → 4 + 8/16 = 4.5 bit per weight

Codes 0 to 7 are the eight magnitudes in ascending order, and bit 3 is the sign. A byte holds the
codes of two neighbors in k, the even k in the low nibble. Example: a block with block_scale 1.5 and
global_scale 1 stores the weight -4.4 as follows. -4.4 / 1.5 = -2.93; the nearest magnitude is 3,
which is code 5; with the sign it is code 13; decoded it is -3 · 1.5 = -4.5.

This is the format of QeRL (arXiv 2510.11696, §3.3, eq. 6), of compressed-tensors and of ModelOpt.
The quantizer chooses each block's scale, then rounds each weight to the nearest code. There are
three methods:

    "rtn"    round to nearest, as in QeRL: the scale is amax / 6, rounded to e4m3, with amax
             the block's largest magnitude. So with a scale of 2⁻⁶ or more, amax is stored as 6.
    "sweep"  the default: try ten neighboring e4m3 scales, amax / 6 among them, and keep the one
             with the least squared error. E2M1 has nothing between 4 and 6, so a block often loses
             less when its largest weight is stored as 4 or 3, or is clipped. Sweep costs time only
             while quantizing: the format and the speed of the kernels are the same.
    "gptq"   also needs inputs of the layer (calibration), and lets later weights correct the errors
             of earlier ones (arXiv 2210.17323). Its scales are sweep's, of the corrected weights.

Sweep minimizes the error of the weights. GPTQ minimizes what the error does to the layer's output.
X (K, tokens) holds inputs of the layer. A row of weights w becomes q, and the squared error of its
output is

    ‖(w − q) X‖² = (w − q) H (w − q)ᵀ        with the Hessian H = X Xᵀ, (K, K)

Inputs are correlated. Where input 7 is nearly twice input 3, an error of +2 in weight 3 is nearly
undone by -1 in weight 7. So GPTQ rounds one column after the other, and moves the columns that are
not rounded yet to where the output's error is least. With H⁻¹ = UᵀU and U upper triangular, this
least-squares solution is (eq. 2 of GPTQ, in the form of its §3.3)

    w[j] −= (w[k] − q[k]) · U[k, j] / U[k, k]        for each j > k, once column k is rounded

A block's scale is chosen just before its first column is rounded: its 16 weights are then corrected
for all columns before them. With H = I nothing is corrected, and GPTQ is sweep.

global_scale is the tensor's amax / (6 · 448), rounded up to a power of two. So no block scale
exceeds 448, the largest e4m3 number, and a multiplication by global_scale never rounds. E2M1 × E4M3
has at most 2 + 4 = 6 significant bits and bf16 has 8, so bf16 holds every dequantized weight
exactly, and a kernel may apply the scales in any order.

Use: q = quantize(w); dequantize(q) is then close to w, a (N, K) matrix with K a multiple of 16.
Left out: quantized activations, stochastic rounding, AWQ, GPTQ's reordering of columns.
Needs: torch.
"""

import math
from functools import partial
from typing import NamedTuple

import torch

BLOCK = 16  # neighbors in k that share a block scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of code & 7; bit 3 is the sign
FP4_MAX = 6.0  # the largest E2M1 number
FP8_MAX = 448.0  # the largest e4m3 number
# The scales that a method tries, as offsets in e4m3 codes from amax / 6. +8 codes would double the
# scale, and gain nothing: no magnitude would exceed 3, and half the scale stores the same values.
OFFSETS = {"rtn": range(1), "sweep": range(-2, 8), "gptq": range(-2, 8)}
CHUNK = 1 << 18  # numbers that rtn and sweep work on at once on a CPU: its cache holds them
GROUP = 128  # columns that GPTQ rounds before it corrects all later columns at once


class NVFP4Tensor(NamedTuple):
    """A quantized matrix (N, K)."""

    packed: torch.Tensor  # (N, K/2) uint8, low nibble = even k
    block_scale: torch.Tensor  # (N, K/16) float8_e4m3fn, never negative
    global_scale: torch.Tensor  # () f32; multiply by it (compressed-tensors stores its inverse)


@torch.no_grad()
def quantize(
    w: torch.Tensor,
    method: str = "sweep",
    global_scale: float | torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
    damping: float = 0.01,
) -> NVFP4Tensor:
    """Quantize w (N, K), of any floating-point dtype, on its device.

    method: "sweep", "rtn" or "gptq". global_scale: a number to use in place of the tensor's own.
    vLLM and TensorRT-LLM require one global scale for all parts of a fused matrix product (q, k, v
    or gate, up): pass shared_global_scale(q, k, v) to all three calls.

    For gptq alone: hessian (K, K), the sum of x xᵀ over inputs x of the layer, times any factor.
    Blocks whose inputs are all always 0 are rounded as by sweep. damping: the share of the
    Hessian's mean diagonal that is added to its diagonal (GPTQ's percdamp: 0.01); up to a hundred
    times as much where the sum is not positive definite, as sums of few or of huge inputs may be.

    ValueError: w is not a matrix, K is not a multiple of 16, a weight is NaN or infinite, unknown
    method, hessian is missing, misshapen or not positive definite with this damping.
    """
    if method not in OFFSETS:
        raise ValueError(f"method={method!r} must be one of {', '.join(OFFSETS)}")
    if w.dim() != 2 or w.shape[1] % BLOCK:
        raise ValueError(f"a weight {tuple(w.shape)} must be (N, K) with K a multiple of {BLOCK}")
    own_scale = shared_global_scale(w)  # refuses NaN and infinity
    global_scale = own_scale if global_scale is None else global_scale
    N, K = w.shape
    if method == "gptq":
        factor = _correction_factors(hessian, K, damping)
        rows = N  # a column is one step, whose fixed cost does not grow with its rows
    else:
        # some rows at a time: the fp32 copies below would fill the memory for a whole matrix
        numbers_at_once = CHUNK if w.device.type == "cpu" else 64 * CHUNK
        rows = max(1, numbers_at_once // (K * len(OFFSETS[method])))
    packed, block_scale = [], []
    for part in w.split(rows):
        scaled = part.float() / global_scale  # (n, K)
        if method == "gptq":
            scaled, scale = _correct(scaled, factor)
        else:
            scale = _choose_scale(scaled, OFFSETS[method])
        packed.append(_pack(scaled, scale))
        block_scale.append(scale)
    return NVFP4Tensor(
        torch.cat(packed),
        torch.cat(block_scale),
        torch.tensor(float(global_scale), device=w.device),
    )


def shared_global_scale(*weights: torch.Tensor) -> float:
    """→ the smallest power of two that is at least amax / (6 · 448) and at least 2⁻¹²⁶.

    amax: the largest magnitude in all of weights. With this scale no block scale exceeds 448.
    weights: of any shape and floating-point dtype. If all are 0, the result is 1.0.
    ValueError: a weight is NaN or infinite.
    """
    # torch's max returns NaN if there is one, so the check below sees it.
    amax = torch.stack([w.detach().abs().max() for w in weights]).max().item()
    if not math.isfinite(amax):
        bad = sum(int((~w.isfinite()).sum()) for w in weights)
        raise ValueError(f"{bad} weights are NaN or infinite: the checkpoint is damaged")
    if amax == 0:
        return 1.0
    # Stay at or above 2⁻¹²⁶, the smallest normal fp32: dividing by a subnormal scale loses bits.
    exponent = math.ceil(math.log2(amax / (FP4_MAX * FP8_MAX)))
    return 2.0 ** max(-126, exponent)


def _choose_scale(scaled, offsets):
    """scaled (n, K) f32, weights / global_scale → (n, K/16) e4m3, each block's scale.

    For each block, try the scale amax / 6, rounded to e4m3 and then moved by each of `offsets` e4m3
    codes. Take the scale with the least squared error, and on a tie the one tried first. offsets
    range(1) is the method "rtn".
    """
    blocks = scaled.view(len(scaled), -1, 1, BLOCK)
    nearest = (blocks.abs().amax(-1) / FP4_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    # Positive e4m3 numbers sort as their bytes, so byte + 1 is the next larger scale. Byte 126 is
    # 448, and 127 would be NaN.
    moves = torch.arange(offsets.start, offsets.stop, device=scaled.device)
    codes = (nearest.view(torch.uint8) + moves).clamp(0, 126).to(torch.uint8)  # (n, K/16, offsets)
    scale = codes.view(torch.float8_e4m3fn).float()[..., None]
    rounded = _nearest_e2m1(blocks / _divisor(scale))  # (n, K/16, offsets, 16)
    error = rounded.mul_(scale).sub_(blocks).square_().sum(-1)
    best = error.argmin(-1, keepdim=True)
    return codes.gather(-1, best)[..., 0].view(torch.float8_e4m3fn)


def _pack(scaled, block_scale):
    """scaled (n, K) f32, weights / global_scale, and their scales (n, K/16) → bytes (n, K/2)."""
    # Divide by the scale as rounded to e4m3, because dequantize() multiplies by that one.
    divisor = _divisor(block_scale.float()).repeat_interleave(BLOCK, 1)
    rounded = _nearest_e2m1(scaled / divisor).abs()
    # the index of each magnitude in E2M1
    code = torch.bucketize(rounded, rounded.new_tensor(E2M1), out_int32=True).to(torch.uint8)
    code |= (scaled < 0).to(torch.uint8) << 3
    return code[:, 0::2] | code[:, 1::2] << 4


def _divisor(scale):
    """scale (…) f32 → the same with inf for 0. The scale of a block of tiny weights rounds to 0.
    Divided by 0 these weights would be inf or NaN. Divided by inf they are 0 and get the code of a
    zero: 0, or 8 if the weight is negative.
    """
    return scale.masked_fill(scale == 0, math.inf)


def _nearest_e2m1(x):
    """x (…) f32 → the nearest of 0 ±½ ±1 ±1½ ±2 ±3 ±4 ±6. A tie takes the even code, because
    torch.round rounds halves to even.

    Divide by the distance of the two magnitudes around x, round to an integer, multiply again.
    """
    # With its sign and mantissa bits set to 0, an fp32 x becomes 2^⌊log2 |x|⌋.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(1, 4).mul_(0.5)  # ½ for |x| below 2, 1 below 4, 2 from 4 on
    return x.div(step).round_().mul_(step).clamp_(-FP4_MAX, FP4_MAX)


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """→ (N, K) in dtype: value · block_scale · global_scale.

    Exact in bf16 and fp32 if global_scale is a power of two, as quantize's own is.
    """
    packed, block_scale, global_scale = q
    N, K = packed.shape[0], 2 * packed.shape[1]
    signed = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1)  # (N, K/2, 2): even k, odd k
    value = signed[code.view(N, K // BLOCK, BLOCK).int()]  # (N, K/16, 16)
    scale = block_scale.float() * global_scale  # (N, K/16)
    return (value * scale[..., None]).view(N, K).to(dtype)


# --- GPTQ


def _correction_factors(hessian, K, damping):
    """hessian (K, K) → factor (K, K) f32, upper triangular: factor[k, j] = U[k, j] / U[k, k] is how
    much of the error of column k is taken off column j.

    A direction that no input has would leave H without an inverse. Damping gives it a small weight.
    """
    if hessian is None or hessian.shape != (K, K):
        raise ValueError(f"method='gptq' needs hessian=H of the layer's inputs, ({K}, {K})")
    # GPTQ inverts H, and then takes the Cholesky factor of the inverse. One Cholesky does, if
    # it begins at the last column: H = R Rᵀ with R upper triangular, so U = R⁻¹. In fp64, because
    # some tokens have inputs thousands of times as large as all others.
    flipped = hessian.double().flip(0, 1)
    least = damping * flipped.diagonal().mean()
    for times in (1, 9, 90):  # the damping, then ten and a hundred times as much
        flipped.diagonal().add_(times * least)
        lower, failed = torch.linalg.cholesky_ex(flipped)
        if not failed:
            break
    if failed or not lower.isfinite().all():
        raise ValueError(
            f"with damping={100 * damping:g} the Hessian is not positive definite, or it has NaN: "
            "check the inputs that it sums, or raise damping"
        )
    identity = torch.eye(K, dtype=lower.dtype, device=lower.device)
    U = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    return (U / U.diagonal()[:, None]).float()


def _correct(scaled, factor):
    """scaled (N, K) f32, weights / global_scale → the same, each weight as it is corrected when
    GPTQ rounds it; and the scales of its blocks, (N, K/16) e4m3.

    GPTQ rounds a group of GROUP columns at a time. In a group each column's error corrects the
    following ones at once. One matrix product then corrects all columns after the group (GPTQ's
    lazy batch updates). The last group may be smaller: then stale values after it are rounded, too,
    and not used.
    """
    N, K = scaled.shape
    columns = scaled.T.contiguous()  # (K, N): a row of it is a column of the weights
    # memory of _round_group, always the same: a CUDA graph replays on fixed addresses
    group, errors = columns.new_zeros(2, GROUP, N)
    factors = factor.new_zeros(GROUP, GROUP)
    scales = torch.empty(N, GROUP // BLOCK, dtype=torch.float8_e4m3fn, device=scaled.device)
    round_group = partial(_round_group, group, factors, errors, scales)
    block_scale = []
    for start in range(0, K, GROUP):
        these, rest = slice(start, start + GROUP), slice(start + GROUP, K)
        count = len(columns[these])
        group[:count] = columns[these]
        factors[:count, :count] = factor[these, these]
        round_group()
        if start == 0 and scaled.is_cuda:
            round_group = _as_graph(round_group)
        columns[these] = group[:count]
        block_scale.append(scales[:, : count // BLOCK].clone())
        columns[rest].addmm_(factor[these, rest].T, errors[:count], alpha=-1)
    return columns.T.contiguous(), torch.cat(block_scale, 1)


def _round_group(group, factors, errors, scales):
    """For GROUP columns of the weights, one after the other and for all rows at once: find what
    rounding does to a column, and correct the group's later columns. _pack rounds them later.

    group (GROUP, N): a row of it is a column of the weights; it is corrected in place. factors
    (GROUP, GROUP): its part of factor. Written: errors (GROUP, N), of each column; scales
    (N, GROUP/16).
    """
    for k, column in enumerate(group):
        if k % BLOCK == 0:
            block = group[k : k + BLOCK].T.contiguous()  # (N, 16)
            scales[:, k // BLOCK] = _choose_scale(block, OFFSETS["gptq"])[:, 0]
            scale = scales[:, k // BLOCK].float()
            divisor = _divisor(scale)
        errors[k] = column - _nearest_e2m1(column / divisor) * scale
        group[k + 1 :].addr_(factors[k, k + 1 :], errors[k], alpha=-1)


def _as_graph(function):
    """→ a function that repeats on a GPU what `function` does there. Python launches a thousand
    small kernels for GROUP columns; replaying a CUDA graph of them takes a fifth of the time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


if __name__ == "__main__":
    torch.manual_seed(0)
    w = torch.randn(512, 1024)
    block = quantize(w[:1, :BLOCK])
    print("one block of 16, then what NVFP4 keeps of it", w[0, :BLOCK], dequantize(block), sep="\n")
    X = torch.randn(1024, 128) @ torch.randn(128, 4096) + torch.randn(1024, 4096)  # correlated
    print("relative error of the weights, and of the output")
    for method in ("rtn", "sweep", "gptq"):
        q = quantize(w, method, hessian=X @ X.T)
        error = dequantize(q, torch.float32) - w
        of_output = (error @ X).norm() / (w @ X).norm()
        print(f"{method:5} {error.norm() / w.norm():8.2%} {of_output:8.2%}")
