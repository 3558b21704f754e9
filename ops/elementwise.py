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
    """Wait until the kernel before has ended and its results are visible, then let the next kernel
    start early in the same way. A kernel calls this before it reads what another one wrote.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def one_cta_per_row(x):
    """→ a grid. The rows are on the first axis, because the other two end at 65,535."""
    return (x.numel() // x.shape[-1],)


def whole_row_options(x):
    """→ launch options of a kernel in which a CTA holds a whole row of x (…, D)."""
    D = x.shape[-1]
    return {
        "D": D,
        "TILE": triton.next_power_of_2(D),
        "num_warps": 8 if D > 1024 else 2,
        **launch_options(x),
    }


# --- embeddings


def embed(ids, table):
    """Rows ids (…) int64 of table (V, D) → (…, D) f32. For ids on a GPU the table may be pinned
    host memory: the kernel reads the rows over the bus.
    """
    if not ids.is_cuda:
        return table[ids].float()
    out = torch.empty(*ids.shape, table.shape[1], device=ids.device)
    _embed_kernel[one_cta_per_row(out)](ids.contiguous(), table, out, **whole_row_options(out))
    return out


@jit
def _embed_kernel(ids, table, out, D: constexpr, TILE: constexpr, PDL: constexpr):
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    x = tl.load(table + tl.load(ids + row) * D + cols, mask=cols < D, other=0.0)
    tl.store(out + row * D + cols, x.to(tl.float32), mask=cols < D)


# --- the residual stream and its norm


def rms_norm(x, weight, eps, dtype=None):
    """x (…, D) / rms(x) · weight (D,) f32, computed in fp32 → (…, D) in `dtype`, by default x's."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    return normed.to(dtype or x.dtype)


def add_norm(x, y, weight, eps, dtype):
    """x (…, D) f32, the residual stream; y (…, D) in `dtype`, a branch's output, or None; weight
    (D,) f32 → (x + y in fp32, the RMS norm of x + y in dtype).
    """
    if x.is_cuda:
        return AddNorm.apply(x, y, weight, eps, dtype)
    x = x if y is None else x + y
    return x, rms_norm(x, weight, eps, dtype)


class AddNorm(torch.autograd.Function):
    """add_norm by kernels. With s = x + y, r = 1 / rms(s) and g = d_norm · weight, backward is
    dx = dy = d_s + r g − s r³ mean(s g). dx is fp32, dy has y's dtype; weight gets no gradient.
    """

    @staticmethod
    def forward(ctx, x, y, weight, eps, dtype):
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        total = x if y is None else torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        _add_norm_kernel[one_cta_per_row(x)](x, y, weight, total, out, eps, **whole_row_options(x))
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx, d_total, d_out):
        total, weight = ctx.saved_tensors
        d_total, d_out = d_total.contiguous(), d_out.contiguous()
        dx = torch.empty_like(total)
        dy = torch.empty_like(d_out) if ctx.needs_input_grad[1] else None
        _add_norm_backward_kernel[one_cta_per_row(total)](
            total, weight, d_total, d_out, dx, dy, ctx.eps, **whole_row_options(total)
        )
        return dx, dy, None, None, None


@jit
def _add_norm_kernel(x, y, weight, total, out, eps, D: constexpr, TILE: constexpr, PDL: constexpr):
    """total = x + y, unless y is None; out = the norm of total. Columns past D load 0."""
    cols = tl.arange(0, TILE)
    # Load the weight before the wait: no kernel of a step writes it.
    w = tl.load(weight + cols, mask=cols < D, other=0.0)
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
    """The formula of AddNorm; dy may be None."""
    cols = tl.arange(0, TILE)
    w = tl.load(weight + cols, mask=cols < D, other=0.0)
    wait_for_predecessor(PDL)
    at = tl.program_id(0).to(tl.int64) * D + cols
    s = tl.load(total + at, mask=cols < D, other=0.0)
    g = tl.load(d_out + at, mask=cols < D, other=0.0).to(tl.float32) * w
    r = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    through_norm = r * g - s * (r * r * r * tl.sum(s * g, 0) / D)
    d = through_norm + tl.load(d_total + at, mask=cols < D, other=0.0)
    tl.store(dx + at, d, mask=cols < D)
    if dy is not None:
        tl.store(dy + at, d.to(dy.dtype.element_ty), mask=cols < D)


# --- the MLP's activation


def swiglu(gate_up):
    """gate_up (…, 2F), gate in the first half → silu(gate) · up (…, F), in gate_up's dtype."""
    if gate_up.is_cuda:
        return SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class SwiGLU(torch.autograd.Function):
    """swiglu by a kernel. Backward: d_up = d · silu(gate),
    d_gate = d · up · σ(gate) (1 + gate (1 − σ(gate))).
    """

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
    (rows,) = one_cta_per_row(gate_up)
    F_ = gate_up.shape[-1] // 2
    tile = 512 if rows <= 16 else 1024  # cut few rows finer, to give every SM work
    _swiglu_kernel[rows, triton.cdiv(F_, tile)](
        gate_up, out, d_out, F_, TILE=tile, num_warps=tile // 256, **launch_options(gate_up)
    )


@jit
def _swiglu_kernel(gate_up, out, d_out, F_, TILE: constexpr, PDL: constexpr):
    """d_out None: out (…, F) = silu(gate) · up. Else backward: out (…, 2F) = the gradient of
    gate_up. silu(gate) is rounded to out's dtype, where torch rounds it.
    """
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * 2 * F_ + cols, mask=cols < F_, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F_ + F_ + cols, mask=cols < F_, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = (gate * sigmoid).to(out.dtype.element_ty).to(tl.float32)
    if d_out is None:
        tl.store(out + row * F_ + cols, (silu * up).to(out.dtype.element_ty), mask=cols < F_)
    else:
        d = tl.load(d_out + row * F_ + cols, mask=cols < F_, other=0.0).to(tl.float32)
        d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(out + row * 2 * F_ + cols, d_gate.to(out.dtype.element_ty), mask=cols < F_)
        d_up = (d * silu).to(out.dtype.element_ty)
        tl.store(out + row * 2 * F_ + F_ + cols, d_up, mask=cols < F_)


if __name__ == "__main__":
    x, y, weight = torch.tensor([[3.0, 1.0]]), torch.tensor([[0.0, 3.0]]), torch.ones(2)
    total, normed = add_norm(x, y, weight, 1e-6, torch.float32)
    print("x + y             ", total.tolist())
    print("its norm          ", normed.tolist(), "of mean square", normed.square().mean().item())
    print("swiglu([-9, 9, 5, 5])", swiglu(torch.tensor([-9.0, 9.0, 5.0, 5.0])).tolist())
