# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""What a decoder computes around its matrix products, attention apart: a function each.

    add_norm(x, y)     s = x + y,  then  s / √(mean(s²) + eps) · weight    RMSNorm, arXiv 1910.07467
    swiglu(gate_up)    silu(gate) · up,  where  silu(z) = z · σ(z)         SwiGLU, arXiv 2002.05202
    embed(ids, table)  table[ids]

    x, y → add_norm → [q k v] → attention → [o] → add_norm → [gate up] → swiglu → [down] → y

Brackets are matrix products, with LoRA: fp4_gemm.py computes them. x is the residual stream, in
fp32. y is the output of the branch before (attention or MLP), which is not added yet: add_norm adds
y to x and normalizes the sum in one pass over memory.

On a CPU plain torch lines compute each result, and they are its definition. On a GPU a Triton
kernel computes the same. add_norm and swiglu have gradients, also by kernels. Embeddings and norm
weights are frozen, so they get no gradient.

A decode step launches a few hundred kernels of a few microseconds each, so the gaps between kernels
cost time. PDL (programmatic dependent launch, from Hopper on) closes the gaps: the GPU starts a
kernel's CTAs (programs, in Triton's words) while the kernel's predecessor still runs.

    kernel 1    ── works ──┤
    kernel 2       starts, waits for 1's end ── works ──┤
    kernel 3                     starts, waits for 2's end ── works ──┤

A kernel must wait before it reads what its predecessor writes. One that is launched with PDL must
wait even if it needs no such data: if 2 did not wait, it could end before 1, and 3, which waits for
2 only, would read too early what 1 writes. Kernels without PDL, such as PyTorch's, start when their
predecessor has ended.

Left out: LayerNorm, other activations, gradients of weights.
Needs: torch; on a GPU also triton.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # macOS has no Triton: these two only let Python define the kernels below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


def launch_options(x: Tensor) -> dict[str, bool]:
    """→ a kernel's launch options: PDL on Hopper and newer GPUs, no PDL in Triton's interpreter.

    PDL tells the kernel to wait for its predecessor, launch_pdl tells CUDA to start it early.
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


def one_cta_per_row(x: Tensor) -> tuple[int]:
    """→ the grid for x (…, D): a CTA for each row, on the grid's first axis, because CUDA limits
    the other two to 65,535.
    """
    return (x.numel() // x.shape[-1],)


def whole_row_options(x: Tensor) -> dict[str, int | bool]:
    """→ launch options of a kernel in which a CTA holds a whole row of x (…, D) in registers.

    TILE: a Triton tile's size is a power of two, so a tile has TILE ≥ D columns, and the kernel
    masks those past D. Eight warps for a wide row, so that a thread's part fits its registers; two
    for a narrow one, so that every thread has a part.
    """
    D = x.shape[-1]
    return {
        "D": D,
        "TILE": triton.next_power_of_2(D),
        "num_warps": 8 if D > 1024 else 2,
        **launch_options(x),
    }


# --- embeddings


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows ids (…) int64 of table (V, D), of any floating-point dtype → (…, D) f32.

    For ids on a GPU the table may be in pinned host memory: the kernel loads the rows over the bus,
    so that a large table takes no GPU memory.
    """
    if not ids.is_cuda:
        return table[ids].float()
    out = torch.empty(*ids.shape, table.shape[1], device=ids.device)
    _embed_kernel[one_cta_per_row(out)](ids.contiguous(), table, out, **whole_row_options(out))
    return out


@jit
def _embed_kernel(ids, table, out, D: constexpr, TILE: constexpr, PDL: constexpr):
    """A CTA copies one row (D,) of the table. ids (rows,), out (rows, D) f32: a store casts."""
    wait_for_predecessor(PDL)  # in a decode step, sampling.py's _append_kernel writes ids
    row = tl.program_id(0).to(tl.int64)  # int64: row · D may exceed 2³¹
    cols = tl.arange(0, TILE)
    x = tl.load(table + tl.load(ids + row) * D + cols, mask=cols < D, other=0.0)  # (TILE,)
    tl.store(out + row * D + cols, x, mask=cols < D)


# --- the residual stream and its norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x (…, D) / rms(x) · weight (D,) f32, computed in fp32 → (…, D) in `dtype`."""
    return torch.rms_norm(x.float(), x.shape[-1:], weight, eps).to(dtype)


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add a branch's output to the residual stream and normalize → (x + y, RMS norm of x + y).

    x (…, D) f32: the residual stream. y (…, D) in `dtype`: a branch's output, or None if x already
    holds the whole sum. weight (D,) f32. The sum is fp32, the norm is rounded to dtype once.
    """
    if x.is_cuda:
        return AddNorm.apply(x, y, weight, eps, dtype)
    if y is not None:
        x = x + y
    return x, rms_norm(x, weight, eps, dtype)


class AddNorm(torch.autograd.Function):
    """add_norm by kernels. With s = x + y and r = 1 / rms(s), forward returns s and s r weight.

    Backward, with d_total and d_out the gradients of the two results and g = d_out · weight:
    dx = dy = d_total + r g − s r³ mean(s g), means over the D columns. dx is fp32, dy has y's
    dtype, weight gets no gradient.
    """

    @staticmethod
    def forward(ctx, x, y, weight, eps, dtype):
        x = x.contiguous()
        total = x
        if y is not None:
            y = y.contiguous()
            total = torch.empty_like(x)
        out = torch.empty_like(x, dtype=dtype)
        _add_norm_kernel[one_cta_per_row(x)](x, y, weight, total, out, eps, **whole_row_options(x))
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx, d_total, d_out):
        total, weight = ctx.saved_tensors
        d_total = d_total.contiguous()
        d_out = d_out.contiguous()
        dx = torch.empty_like(total)
        dy = torch.empty_like(d_out) if ctx.needs_input_grad[1] else None
        _add_norm_backward_kernel[one_cta_per_row(total)](
            total, weight, d_total, d_out, dx, dy, ctx.eps, **whole_row_options(total)
        )
        return dx, dy, None, None, None


@jit
def _add_norm_kernel(x, y, weight, total, out, eps, D: constexpr, TILE: constexpr, PDL: constexpr):
    """A CTA adds and normalizes one row (D,). All tensors but weight (D,) are (rows, D).

    y None: the sum is x, and total is not written. Columns past D load 0, which adds nothing to the
    sum of squares. A store rounds the fp32 numbers to the tensor's dtype, here and below.
    """
    cols = tl.arange(0, TILE)
    in_row = cols < D
    # Load the weight before the wait, so that the load overlaps with the predecessor. No kernel of
    # a forward or backward pass writes weights: aqn.py changes them between passes.
    w = tl.load(weight + cols, mask=in_row, other=0.0)  # (TILE,) f32
    wait_for_predecessor(PDL)  # the kernels before write x and y
    at = tl.program_id(0).to(tl.int64) * D + cols
    s = tl.load(x + at, mask=in_row, other=0.0)  # (TILE,) f32
    if y is not None:
        s += tl.load(y + at, mask=in_row, other=0.0).to(tl.float32)
        tl.store(total + at, s, mask=in_row)
    normed = s * (tl.rsqrt(tl.sum(s * s, 0) / D + eps) * w)
    tl.store(out + at, normed, mask=in_row)


@jit
def _add_norm_backward_kernel(
    total, weight, d_total, d_out, dx, dy, eps, D: constexpr, TILE: constexpr, PDL: constexpr
):
    """AddNorm's formula, a CTA for each row (D,). dy None: y was None or needs no gradient."""
    cols = tl.arange(0, TILE)
    in_row = cols < D
    w = tl.load(weight + cols, mask=in_row, other=0.0)  # before the wait, as in forward
    wait_for_predecessor(PDL)  # the kernels before write d_total and d_out
    at = tl.program_id(0).to(tl.int64) * D + cols
    # Masked columns load 0 and add nothing to the two sums.
    s = tl.load(total + at, mask=in_row, other=0.0)  # (TILE,) f32
    g = tl.load(d_out + at, mask=in_row, other=0.0).to(tl.float32) * w
    r = tl.rsqrt(tl.sum(s * s, 0) / D + eps)
    through_norm = r * g - s * (r * r * r * tl.sum(s * g, 0) / D)
    d = through_norm + tl.load(d_total + at, mask=in_row, other=0.0)
    tl.store(dx + at, d, mask=in_row)
    if dy is not None:
        tl.store(dy + at, d, mask=in_row)


# --- the MLP's activation


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up (…, 2F), gate in the first half → silu(gate) · up (…, F), in gate_up's dtype."""
    if gate_up.is_cuda:
        return SwiGLU.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class SwiGLU(torch.autograd.Function):
    """swiglu by a kernel. With s = σ(gate) and d the gradient of the result, backward is
    d_up = d · gate · s and d_gate = d · up · s (1 + gate (1 − s)), both from one kernel.
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
    """Launch the kernel: forward if d_out is None, with out (…, F); else backward: out (…, 2F)."""
    (rows,) = one_cta_per_row(gate_up)
    F = gate_up.shape[-1] // 2
    tile = 512 if rows <= 16 else 1024  # cut few rows finer, because every SM needs a tile
    _swiglu_kernel[rows, triton.cdiv(F, tile)](
        gate_up, out, d_out, F, TILE=tile, num_warps=tile // 256, **launch_options(gate_up)
    )


@jit
def _swiglu_kernel(gate_up, out, d_out, F, TILE: constexpr, PDL: constexpr):
    """Grid (rows, tiles of F): a CTA loads TILE columns of gate and the same columns of up, in one
    row.

    d_out None: out (rows, F) = silu(gate) · up. Else backward: out (rows, 2F) = the gradient of
    gate_up, from d_out (rows, F). The last tile masks its columns past F. The arithmetic is fp32,
    but silu(gate) is rounded to out's dtype, because torch rounds there.
    """
    wait_for_predecessor(PDL)  # the kernels before write gate_up and, in backward, d_out
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = cols < F
    gate = tl.load(gate_up + row * 2 * F + cols, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + cols, mask=in_row, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = (gate * sigmoid).to(out.dtype.element_ty).to(tl.float32)
    if d_out is None:
        tl.store(out + row * F + cols, silu * up, mask=in_row)
    else:
        d = tl.load(d_out + row * F + cols, mask=in_row, other=0.0).to(tl.float32)
        d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(out + row * 2 * F + cols, d_gate, mask=in_row)
        tl.store(out + row * 2 * F + F + cols, d * silu, mask=in_row)


if __name__ == "__main__":
    x = torch.tensor([[3.0, 1.0]])
    y = torch.tensor([[0.0, 3.0]])
    total, normed = add_norm(x, y, torch.ones(2), 1e-6, torch.float32)
    print("residual stream x + y ", total.tolist())
    print("its norm, mean square 1", normed.tolist())
    print("up = 5 behind gates of -9, 0, 9", swiglu(torch.tensor([-9.0, 0, 9, 5, 5, 5])).tolist())
