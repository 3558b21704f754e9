"""NVFP4: a weight is one of 15 numbers, times a scale per 16 weights, times a scale per tensor.

    w[n, k]  ≈  E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale

    row n:   | k = 0 … 15    | k = 16 … 31   | …     code, 4 bit:  s e e m → ±{0 ½ 1 1½ 2 3 4 6}
             | block_scale 0 | block_scale 1 | …     e4m3, 8 bit: 2⁻⁹ … 448;  global_scale: one fp32
    packed[n, j] = code[n, 2j+1] << 4 | code[n, 2j]               → 4 + 8/16 = 4.5 bit per weight

The format is the one of the paper (QeRL, arXiv 2510.11696, §3.3, eq. 6) and of compressed-tensors and
ModelOpt. Quantising is a choice of block scales; given the scale, each weight goes to its nearest code, ties
to the even code. Two ways to choose are here:

    "rtn"    amax / 6 rounded to e4m3: the block's largest weight lands next to the code 6 (the paper's way).
    "sweep"  tries the e4m3 numbers from two below that one to seven above it and keeps the one with the least
             squared error. Codes near 6 are sparse, so it often pays to move the largest weight to 4 or 3,
             or to clip it; −27 % squared error on Gaussian weights, free at run time (default).

global_scale is amax / (6·448), at which the largest block scale would be e4m3's maximum, rounded up to a
power of two: multiplying by it never rounds, and E2M1 × E4M3 has at most 6 significant bits, so every
dequantised weight is exact in bf16. A kernel may then apply the scales anywhere and use these very weights.

Left out: quantised activations, stochastic rounding, calibration data (AWQ, GPTQ).
Needs: torch.
"""

import math
from typing import NamedTuple

import torch

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)    # magnitude of code & 7; bit 3 is the sign
FP4_MAX, FP8_MAX = 6.0, 448.0
SWEEP = range(-2, 8)                               # e4m3 codes around amax/6; a full sweep finds no better
CHUNK = 1 << 18                                    # weights at a time: they and their copies stay in cache


class NVFP4Tensor(NamedTuple):
    packed: torch.Tensor        # (N, K/2) uint8, low nibble = even k
    block_scale: torch.Tensor   # (N, K/16) float8_e4m3fn, never negative
    global_scale: torch.Tensor  # () float32; multiply by it (compressed-tensors stores its inverse)


@torch.no_grad()
def quantize(w, method="sweep", global_scale=None):
    """(N, K) floating point → NVFP4Tensor on the same device.

    method: "sweep" or "rtn". global_scale: a number to use instead of this tensor's own, for weights that a
    fused GEMM reads together: pass `shared_global_scale(q, k, v)` to each of the three.
    ValueError: w is not a matrix, K is not a multiple of 16, a weight is NaN or infinite, unknown method.
    """
    if method not in ("sweep", "rtn"):
        raise ValueError(f"method={method!r} must be 'sweep' or 'rtn'")
    if w.dim() != 2 or w.shape[1] % BLOCK:
        raise ValueError(f"weight of shape {tuple(w.shape)} must be a matrix (N, K) "
                         f"with K a multiple of {BLOCK}")
    own_scale = shared_global_scale(w)                  # also refuses NaN
    global_scale = own_scale if global_scale is None else global_scale
    N, K = w.shape
    packed = torch.empty(N, K // 2, dtype=torch.uint8, device=w.device)
    block_scale = torch.empty(N, K // BLOCK, dtype=torch.float8_e4m3fn, device=w.device)
    at_once = CHUNK if w.device.type == "cpu" else 64 * CHUNK
    rows = max(1, at_once // K)
    grid = torch.tensor(E2M1, device=w.device)
    for n in range(0, N, rows):
        blocks = w[n:n + rows].float().view(-1, K // BLOCK, BLOCK) / global_scale        # (n, K/16, 16)
        magnitude = blocks.abs()
        scale = _choose_scale(magnitude, SWEEP if method == "sweep" else (0,))           # (n, K/16)
        block_scale[n:n + rows] = scale
        # divide by the rounded scale, the one dequantize() multiplies by
        rounded = _nearest_e2m1(magnitude / _divisor(scale.float())[..., None])
        code = torch.bucketize(rounded.contiguous(), grid).to(torch.uint8)               # exact: on the grid
        sign = (blocks < 0).to(torch.uint8) << 3
        code = (code | sign).view(-1, K)
        packed[n:n + rows] = code[:, 0::2] | code[:, 1::2] << 4
    return NVFP4Tensor(packed, block_scale, torch.tensor(float(global_scale), device=w.device))


def shared_global_scale(*weights):
    """The power of two that lets every block scale of all these weights fit into e4m3. A Python float.

    ValueError: a weight is NaN or infinite (the largest magnitude, which is read anyway, shows it).
    """
    amax = torch.stack([w.detach().abs().max() for w in weights]).max().item()    # unlike Python's, keeps NaN
    if not math.isfinite(amax):
        bad = sum(int((~w.isfinite()).sum()) for w in weights)
        raise ValueError(f"{bad} weights are NaN or infinite: the checkpoint is damaged, "
                         "it cannot be quantised")
    if amax == 0:
        return 1.0
    # 2⁻¹²⁶ is the smallest normal fp32: below it dividing by the scale would lose bits
    exponent = math.ceil(math.log2(amax / (FP4_MAX * FP8_MAX)))
    return 2.0 ** max(-126, exponent)


def _choose_scale(magnitude, offsets):
    """(n, K/16, 16) |weights| / global_scale → (n, K/16) e4m3, the best of the codes near amax / 6."""
    nearest = (magnitude.amax(-1) / FP4_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    base = nearest.view(torch.uint8).int()              # e4m3 bytes 0 … 126 are in the order of their values
    best = base
    least = torch.full_like(magnitude[..., 0], math.inf)
    for offset in offsets:
        code = (base + offset).clamp(0, 126)
        scale = code.to(torch.uint8).view(torch.float8_e4m3fn).float()[..., None]
        rounded = _nearest_e2m1(magnitude / _divisor(scale))
        error = rounded.mul_(scale).sub_(magnitude).square_().sum(-1)
        better = error < least
        best = torch.where(better, code, best)
        least = torch.where(better, error, least)
    return best.to(torch.uint8).view(torch.float8_e4m3fn)


def _divisor(scale):
    """A zero scale belongs to a block that rounds to zero: any weight / inf is the code 0."""
    return scale.masked_fill(scale == 0, math.inf)


def _nearest_e2m1(x):
    """x ≥ 0 → the nearest of 0 ½ 1 1½ 2 3 4 6; torch.round goes to even, and so do the codes' ties."""
    step = torch.where(x < 2, 0.5, torch.where(x < 4, 1.0, 2.0))
    return x.div(step).round_().mul_(step).clamp_(max=FP4_MAX)


def dequantize(q, dtype=torch.bfloat16):
    """NVFP4Tensor → (N, K). Exact in bf16, and so in fp32, whenever global_scale is a power of two."""
    packed, block_scale, global_scale = q
    N, K = packed.shape[0], 2 * packed.shape[1]
    signed = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1)                                   # (N, K/2, 2)
    value = signed[code.view(N, K // BLOCK, BLOCK).int()]                                # (N, K/16, 16)
    scale = block_scale.float() * global_scale                                           # (N, K/16)
    return (value * scale[..., None]).view(N, K).to(dtype)


if __name__ == "__main__":
    torch.manual_seed(0)
    print("one block of 16, then what NVFP4 keeps of it")
    w = torch.randn(1, BLOCK)
    q = quantize(w)
    print(" ".join(f"{v:6.2f}" for v in w[0]))
    print(" ".join(f"{v:6.2f}" for v in dequantize(q, torch.float32)[0]),
          f"  block_scale {q.block_scale.item():g}, global_scale 2^{math.log2(q.global_scale):.0f}")
    print(f"\n{'relative squared error':24}{'rtn':>8}{'sweep':>8}")
    for name, w in {"Gauss": torch.randn(512, 1024),
                    "Laplace": torch.distributions.Laplace(0., 1.).sample((512, 1024)),
                    "uniform": torch.rand(512, 1024) - 0.5}.items():
        errors = [(dequantize(quantize(w, m), torch.float32) - w).square().sum() / w.square().sum()
                  for m in ("rtn", "sweep")]
        print(f"{name:24}" + "".join(f"{100 * e:7.3f}%" for e in errors))
