"""What a decoder block computes between its matrix products, attention apart: a function each.

    x, y → add_norm → [q k v] → attention → [o] → add_norm → [gate up] → swiglu → [down] → y

Brackets are matrix products of fp4_gemm.py, with LoRA. add_norm adds the output y of the branch
before to the residual stream x and normalises the sum.

Plain torch lines define each result. On a GPU a Triton kernel computes the same. add_norm and
swiglu have gradients, also by kernels; embeddings are frozen. rms_norm is torch's.

A decode step launches a few hundred kernels of a few microseconds each, so the gaps between kernels
cost time. PDL (programmatic dependent launch) closes the gaps: a kernel starts before its
predecessor has ended, waits for it before it reads, and then allows its successor to start.

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


def launch_options(x):
    """→ a kernel's launch options: PDL on Hopper and newer GPUs, no PDL in Triton's interpreter."""
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"PDL": pdl, "launch_pdl": pdl}


@jit
def wait_for_predecessor(PDL: constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def embed(ids, table):
    """Rows ids (…) int64 of table (V, D) → (…, D) f32. For ids on a GPU the table may be pinned
    host memory: the kernel reads the rows over the bus.
    """
    if not ids.is_cuda:
        return table[ids].float()
    out = torch.empty(*ids.shape, table.shape[1], device=ids.device)
    _embed_kernel[_rows(out)](ids.contiguous(), table, out, **_row(out))
    return out


@jit
def _embed_kernel(ids, table, out, D: constexpr, TILE: constexpr, PDL: constexpr):
    wait_for_predecessor(PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    x = tl.load(table + tl.load(ids + row) * D + cols, mask=cols < D, other=0.0)
    tl.store(out + row * D + cols, x.to(tl.float32), mask=cols < D)


def rms_norm(x, weight, eps, dtype=None):
    """x (…, D) / rms(x) · weight (D,) f32, computed in fp32 → (…, D) in `dtype`, by default x's."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(
        dtype or x.dtype
    )


def add_norm(x, y, weight, eps, dtype):
    """Residual stream x (…, D) f32, a branch's y (…, D) of `dtype` or None → (x + y, its norm in
    dtype).
    """
    if x.is_cuda:
        return AddNorm.apply(x, y, weight, eps, dtype)
    x = x if y is None else x + y
    return x, rms_norm(x, weight, eps, dtype)


class AddNorm(torch.autograd.Function):
    """add_norm by kernels. Backward, with s = x + y, r = 1 / rms(s) and g = d_norm · weight:
    dx = dy = d_sum + r g − s r³ mean(s g)."""

    @staticmethod
    def forward(ctx, x, y, weight, eps, dtype):
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        total = x if y is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        _add_norm_kernel[_rows(x)](x, y, weight, total, out, eps, **_row(x))
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx, d_total, d_out):
        total, weight = ctx.saved_tensors
        d_total, d_out = d_total.contiguous(), d_out.contiguous()
        dx = torch.empty_like(total)
        dy = torch.empty_like(d_out) if ctx.needs_input_grad[1] else None
        _add_norm_backward_kernel[_rows(total)](
            total, weight, d_total, d_out, dx, dy, ctx.eps, **_row(total)
        )
        return dx, dy, None, None, None


def _rows(x):
    """→ a grid of one CTA per row, on the first axis because the other two end at 65 535."""
    return (x.numel() // x.shape[-1],)


def _row(x):
    """→ launch options for a CTA that holds a whole row."""
    D = x.shape[-1]
    return {
        "D": D,
        "TILE": triton.next_power_of_2(D),
        "num_warps": 8 if D > 1024 else 2,
        **launch_options(x),
    }


@jit
def _add_norm_kernel(x, y, weight, total, out, eps, D: constexpr, TILE: constexpr, PDL: constexpr):
    cols = tl.arange(0, TILE)
    w = tl.load(
        weight + cols, mask=cols < D, other=0.0
    )  # load early: no kernel of a step writes it
    wait_for_predecessor(PDL)
    at = tl.program_id(0).to(tl.int64) * D + cols
    wide = tl.load(x + at, mask=cols < D, other=0.0)
    if y is not None:
        wide += tl.load(y + at, mask=cols < D, other=0.0).to(tl.float32)
        tl.store(total + at, wide, mask=cols < D)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / D + eps) * w
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=cols < D)


@jit
def _add_norm_backward_kernel(
    total, weight, d_total, d_out, dx, dy, eps, D: constexpr, TILE: constexpr, PDL: constexpr
):
    cols = tl.arange(0, TILE)
    w = tl.load(weight + cols, mask=cols < D, other=0.0)
    wait_for_predecessor(PDL)
    at = tl.program_id(0).to(tl.int64) * D + cols
    s = tl.load(total + at, mask=cols < D, other=0.0)
    g = tl.load(d_out + at, mask=cols < D, other=0.0).to(tl.float32) * w
    r = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    d = (
        r * g
        - s * (r * r * r * tl.sum(s * g, 0) / D)
        + tl.load(d_total + at, mask=cols < D, other=0.0)
    )
    tl.store(dx + at, d, mask=cols < D)
    if dy is not None:
        tl.store(dy + at, d.to(dy.dtype.element_ty), mask=cols < D)


def swiglu(gate_up):
    """gate_up (…, 2F), gate in the first half → silu(gate) · up (…, F)."""
    if gate_up.is_cuda:
        return SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class SwiGLU(torch.autograd.Function):
    """Backward: d_up = d · silu(gate), d_gate = d · up · σ(gate) (1 + gate (1 − σ(gate)))."""

    @staticmethod
    def forward(ctx, gate_up):
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _swiglu(gate_up, out, None)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx, d):
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty_like(gate_up)
        _swiglu(gate_up, d_gate_up, d.contiguous())
        return d_gate_up


def _swiglu(gate_up, out, d_out):
    (rows,) = _rows(gate_up)
    F_ = gate_up.shape[-1] // 2
    tile = 512 if rows <= 16 else 1024  # cut few rows finer, to give every SM work
    _swiglu_kernel[rows, triton.cdiv(F_, tile)](
        gate_up, out, d_out, F_, TILE=tile, num_warps=tile // 256, **launch_options(gate_up)
    )


@jit
def _swiglu_kernel(gate_up, out, d_out, F_, TILE: constexpr, PDL: constexpr):
    """d_out None: out = silu(gate) · up. Else backward: out = the gradient of gate_up."""
    wait_for_predecessor(PDL)
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * 2 * F_ + cols, mask=cols < F_, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F_ + F_ + cols, mask=cols < F_, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = (gate * sigmoid).to(out.dtype.element_ty).to(tl.float32)  # round where torch rounds
    if d_out is None:
        tl.store(out + row * F_ + cols, (silu * up).to(out.dtype.element_ty), mask=cols < F_)
    else:
        d = tl.load(d_out + row * F_ + cols, mask=cols < F_, other=0.0).to(tl.float32)
        d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(out + row * 2 * F_ + cols, d_gate.to(out.dtype.element_ty), mask=cols < F_)
        tl.store(
            out + row * 2 * F_ + F_ + cols, (d * silu).to(out.dtype.element_ty), mask=cols < F_
        )
