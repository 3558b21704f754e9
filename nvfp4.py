"""NVFP4: a 4-bit number per weight, times a scale per 16 weights, times one scale for the tensor.

    w[n, k]  ≈  E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale

    row n:   | k = 0 … 15    | k = 16 … 31   | …     code, 4 bit:  s e e m → ±{0 ½ 1 1½ 2 3 4 6}
             | block_scale 0 | block_scale 1 | …     e4m3, 8 bit: 2⁻⁹ … 448;  global_scale: one fp32
    packed[n, j] = code[n, 2j+1] << 4 | code[n, 2j]               → 4 + 8/16 = 4.5 bit per weight

This is the format of QeRL (arXiv 2510.11696, §3.3, eq. 6), of compressed-tensors and of ModelOpt.
The quantiser chooses each block's scale by one of two methods, then rounds each weight to the
nearest code:

    "rtn"    round to nearest, as in the paper: the block's largest magnitude (amax) is stored as 6,
             because the scale is amax / 6, rounded to e4m3.
    "sweep"  the default: try ten neighbouring e4m3 scales, amax / 6 among them, and keep the one
             with the least squared error. E2M1 has nothing between 4 and 6, so a block often loses
             less when its largest weight is stored as 4 or 3, or is clipped. Sweep costs time only
             while quantising.

global_scale is the tensor's amax / (6 · 448), so that no block scale exceeds 448, rounded up to a
power of two: multiplying by a power of two never rounds. E2M1 × E4M3 has at most 6 significant
bits, so bf16 holds every dequantised weight exactly, and a kernel may apply the scales in any
order.

Use: q = quantize(w); dequantize(q) is then close to w, a (N, K) matrix with K a multiple of 16.
Left out: quantised activations, stochastic rounding, calibration data (AWQ, GPTQ).
Needs: torch.
"""

import math
from typing import NamedTuple

import torch

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of code & 7; bit 3 is the sign
FP4_MAX, FP8_MAX = 6.0, 448.0
SWEEP = range(-2, 8)  # offsets in e4m3 codes from amax / 6; wider gains nothing
CHUNK = 1 << 18  # weights a pass on a CPU (they fit its cache); GPU: × 64


class NVFP4Tensor(NamedTuple):
    """A quantised matrix (N, K)."""

    packed: torch.Tensor  # (N, K/2) uint8, low nibble = even k
    block_scale: torch.Tensor  # (N, K/16) float8_e4m3fn, never negative
    global_scale: torch.Tensor  # () float32; multiply by it (compressed-tensors stores its inverse)


@torch.no_grad()
def quantize(w, method="sweep", global_scale=None):
    """Quantise w (N, K), of any floating-point dtype → NVFP4Tensor on the same device.

    method: "sweep" or "rtn". global_scale: use this number, not the tensor's own. vLLM and
    TensorRT-LLM require one scale for all parts of a fused GEMM: pass `shared_global_scale(q, k,
    v)` to all three calls. ValueError: w is not a matrix, K is not a multiple of 16, a weight is
    NaN or infinite, unknown method.
    """
    if method not in ("sweep", "rtn"):
        raise ValueError(f"method={method!r} must be 'sweep' or 'rtn'")
    if w.dim() != 2 or w.shape[1] % BLOCK:
        raise ValueError(
            f"weight of shape {tuple(w.shape)} must be a matrix (N, K) with K a multiple of {BLOCK}"
        )
    own_scale = shared_global_scale(w)  # refuses NaN and infinity
    global_scale = own_scale if global_scale is None else global_scale
    N, K = w.shape
    packed = torch.empty(N, K // 2, dtype=torch.uint8, device=w.device)
    block_scale = torch.empty(N, K // BLOCK, dtype=torch.float8_e4m3fn, device=w.device)
    rows = max(1, (1 if w.device.type == "cpu" else 64) * CHUNK // K)
    for n in range(0, N, rows):
        blocks = w[n : n + rows].float().view(-1, K // BLOCK, BLOCK) / global_scale  # (n, K/16, 16)
        magnitude = blocks.abs()
        scale = _choose_scale(magnitude, SWEEP if method == "sweep" else (0,))  # (n, K/16)
        block_scale[n : n + rows] = scale
        # Divide by the scale as rounded to e4m3, because dequantize() multiplies by that one.
        rounded = _nearest_e2m1(magnitude / _divisor(scale.float())[..., None])
        # The index in E2M1. From 0 to 2 a code is half a unit, so the index is 2v; from 2 to 4 a
        # unit, v + 2; from 4 on two units, v/2 + 4. The least of the three is the right one: 1½
        # gives min(3, 3½, 4¾) = 3, 3 gives min(6, 5, 5½) = 5, 6 gives min(12, 8, 7) = 7.
        code = torch.minimum(2 * rounded, rounded + 2).minimum(rounded / 2 + 4).to(torch.uint8)
        sign = (blocks < 0).to(torch.uint8) << 3
        code = (code | sign).view(-1, K)
        packed[n : n + rows] = code[:, 0::2] | code[:, 1::2] << 4
    return NVFP4Tensor(packed, block_scale, torch.tensor(float(global_scale), device=w.device))


def shared_global_scale(*weights):
    """→ float: the smallest power of two with which no block scale of these tensors exceeds e4m3's
    448.

    ValueError: a weight is NaN or infinite.
    """
    # torch's max keeps a NaN, so the check below sees it
    amax = torch.stack([w.detach().abs().max() for w in weights]).max().item()
    if not math.isfinite(amax):
        bad = sum(int((~w.isfinite()).sum()) for w in weights)
        raise ValueError(
            f"{bad} weights are NaN or infinite: the checkpoint is damaged, it cannot be quantised"
        )
    if amax == 0:
        return 1.0
    # Stay at or above 2⁻¹²⁶, the smallest normal fp32: dividing by a subnormal scale loses bits.
    exponent = math.ceil(math.log2(amax / (FP4_MAX * FP8_MAX)))
    return 2.0 ** max(-126, exponent)


def _choose_scale(magnitude, offsets):
    """(n, K/16, 16) |weights| / global_scale → (n, K/16) e4m3, the best of the codes near amax /
    6.
    """
    nearest = (magnitude.amax(-1) / FP4_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    base = nearest.view(torch.uint8).int()  # positive e4m3 numbers sort as their bytes, 0 … 126
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
    """A scale of 0 becomes inf: every weight of that block, divided by inf, gets the code 0."""
    return scale.masked_fill(scale == 0, math.inf)


def _nearest_e2m1(x):
    """x ≥ 0 → the nearest of 0 ½ 1 1½ 2 3 4 6. A tie takes the even code, as torch.round rounds
    it.
    """
    # Keep the exponent's bits of the fp32 alone: 2^⌊log2 x⌋.
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(1, 4).mul_(0.5)  # ½ below 2, 1 below 4, 2 from 4 on
    return x.div(step).round_().mul_(step).clamp_(max=FP4_MAX)


def dequantize(q, dtype=torch.bfloat16):
    """NVFP4Tensor → (N, K). Exact in bf16 and fp32 if global_scale is a power of two, as quantize's
    is.
    """
    packed, block_scale, global_scale = q
    N, K = packed.shape[0], 2 * packed.shape[1]
    signed = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=packed.device)
    code = torch.stack((packed & 15, packed >> 4), -1)  # (N, K/2, 2)
    value = signed[code.view(N, K // BLOCK, BLOCK).int()]  # (N, K/16, 16)
    scale = block_scale.float() * global_scale  # (N, K/16)
    return (value * scale[..., None]).view(N, K).to(dtype)


if __name__ == "__main__":
    torch.manual_seed(0)
    print("one block of 16, then what NVFP4 keeps of it")
    w = torch.randn(1, BLOCK)
    q = quantize(w)
    print(" ".join(f"{v:6.2f}" for v in w[0]))
    print(
        " ".join(f"{v:6.2f}" for v in dequantize(q, torch.float32)[0]),
        f"  block_scale {q.block_scale.item():g}, global_scale 2^{math.log2(q.global_scale):.0f}",
    )
    print(f"\n{'relative squared error':24}{'rtn':>8}{'sweep':>8}")
    for name, w in {
        "Gauss": torch.randn(512, 1024),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((512, 1024)),
        "uniform": torch.rand(512, 1024) - 0.5,
    }.items():
        errors = [
            (dequantize(quantize(w, m), torch.float32) - w).square().sum() / w.square().sum()
            for m in ("rtn", "sweep")
        ]
        print(f"{name:24}" + "".join(f"{100 * e:7.3f}%" for e in errors))
