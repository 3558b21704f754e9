# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""LoRA: the weight matrix W stays frozen, and two thin matrices A and B beside it learn.

    xa  = scale · x @ A.T              x (M, K), A (r, K), xa (M, r); scale = alpha / r
    y   = x @ W.T + xa @ B.T           W (N, K), B (N, r), y (M, N)

Backward gets dy, the gradient of the loss with respect to y, and computes

    du  = scale · dy @ B               (M, r): the gradient with respect to u = x @ A.T
    dA  = du.T @ x                     (r, K)
    dB  = dy.T @ xa                    (N, r)
    dx  = dy @ W + du @ A              (M, K): for the layer before this one

LoRA (arXiv 2106.09685, §4.1) as in QeRL (arXiv 2510.11696, §2): on all seven projections of a
block. B starts at 0: the first policy is the base's. Training never merges B·A into W, because
rounding the sum to 4 bits would lose B·A. Only tools/export.py merges, into bf16 weights.

S projections with the same input run as one matrix: q, k and v (S = 3), gate and up (2). A
projection that runs alone has S = 1 and the shapes above. The adapters of S projections run as one
too. The formulas stay, with S·r in the place of r, if A is stacked and B is block-diagonal:

    W   [ q ]        A   [ A_q ]          B   [ B_q  0    0   ]       lora_B  [ B_q ]
        [ k ]            [ A_k ]              [ 0    B_k  0   ]               [ B_k ]
        [ v ] (N, K)     [ A_v ] (S·r, K)     [ 0    0    B_v ] (N, S·r)      [ B_v ] (N, r)

The zeros are no parameters: lora_B holds only the diagonal blocks, and dB keeps only those of
dy.T @ xa.

The parameters lora_A and lora_B are fp32, because a step of the optimizer is often smaller than a
bf16's last bit. refresh() rounds them into the copies that forward and backward use: bf16 on a
GPU, fp32 on a CPU. Backward ignores this rounding (a straight-through estimator).

A layer's base holds W. It computes y and xa, and dy @ W; this file computes the rest of backward.
FrozenMatrix is the simplest base: it defines what a base does. Training uses model.py's
FrozenLinear, whose W has 4 bits (or 16: --quant bf16, and what a checkpoint leaves so). On a GPU
fp4_gemm.py adds the low-rank term inside the product with W, so that y is rounded once.
Left out: dropout, bias, DoRA, rsLoRA, several adapters at once. Adapter files: tools/adapter.py.
Needs: torch.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn


class LowRank(NamedTuple):
    """What a base needs to add an adapter's term to its output: A, B and scale of the formulas."""

    A: torch.Tensor  # (S·r, K), lora_A rounded to the compute dtype
    B: torch.Tensor  # (N, r), lora_B rounded to the compute dtype
    splits: tuple[int, ...]  # S integers, N in all: the rows of W and B of each projection
    scale: float  # alpha / r


def block_diagonal(B: torch.Tensor, splits: tuple[int, ...]) -> torch.Tensor:
    """(N, r) → (N, S·r): the block of each projection moves to columns of its own."""
    if len(splits) == 1:
        return B
    return torch.block_diag(*B.split(splits))


def diagonal_blocks(matrix: torch.Tensor, splits: tuple[int, ...]) -> torch.Tensor:
    """(N, S·r) → (N, r): of the rows of each projection, its own columns. Undoes block_diagonal."""
    rows = matrix.split(splits)
    return torch.cat([block.chunk(len(rows), 1)[s] for s, block in enumerate(rows)])


class FrozenMatrix(nn.Module):
    """The simplest base: a matrix W (N, K). It defines what LoRALinear asks of every base."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.register_buffer("weight", weight)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer without its adapter, x (…, K) → y (…, N), differentiable in x."""
        return x @ self.weight.T

    def product(
        self, x: torch.Tensor, low_rank: LowRank, compute_output: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (M, K) → y (M, N) with the low-rank term, and xa (M, S·r). Called without autograd.

        compute_output=False: nothing reads the values of y, so a base may skip x @ W.T.
        """
        xa = low_rank.scale * (x @ low_rank.A.T)
        B = block_diagonal(low_rank.B, low_rank.splits)
        return x @ self.weight.T + xa @ B.T, xa

    def input_gradient(self, dy: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """dy (M, N) → dy @ W + add_to (M, K). A base may write this sum into add_to."""
        return dy @ self.weight + add_to

    def store_B(self, B: torch.Tensor, splits: tuple[int, ...]):
        """refresh() calls this when it has rewritten B (N, r): a base that keeps its own copy of B
        replaces it here.
        """


class _LowRankProduct(torch.autograd.Function):
    """The formulas above. lora_A and lora_B are arguments only to receive the gradients of A and B,
    because autograd returns gradients to forward's arguments. It converts them to fp32.
    """

    @staticmethod
    def forward(ctx, x, lora_A, lora_B, base, low_rank, compute_output):
        y, xa = base.product(x, low_rank, compute_output)
        ctx.save_for_backward(x, xa, low_rank.A, low_rank.B)  # but never a weight
        ctx.base, ctx.splits, ctx.scale = base, low_rank.splits, low_rank.scale
        return y

    @staticmethod
    def backward(ctx, dy):
        x, xa, A, B = ctx.saved_tensors
        dy = dy.contiguous()
        # The GEMM multiplies its fp32 sums by scale, so that du is rounded once.
        du = x.new_empty(xa.shape)
        du.addmm_(dy, block_diagonal(B, ctx.splits), beta=0, alpha=ctx.scale)
        dA = du.T @ x
        dB = diagonal_blocks(dy.T @ xa, ctx.splits)
        dx = None
        needs_x, *_ = ctx.needs_input_grad
        if needs_x:
            dx = ctx.base.input_gradient(dy, add_to=du @ A)
        return dx, dA, dB, None, None, None


class LoRALinear(nn.Module):
    """A frozen base and its adapter: x (…, K) → y (…, N) in the dtype of x.

    base: a FrozenMatrix, or a module with the same methods.
    rank, alpha: r, and the numerator of scale = alpha / r.
    splits: the rows of W of each of the S projections, N in all. None: one projection.
    dtype: of the copies, and of x. device: of the parameters and the copies.
    generator: draws the random lora_A, on the CPU.

    While `enabled` is False, the layer is base(x).
    ValueError: rank < 1. AssertionError: the splits do not add up to N.
    """

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        splits: tuple[int, ...] | list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if rank < 1:
            raise ValueError(f"LoRA rank {rank} must be at least 1")
        N, K = base.out_features, base.in_features
        self.base = base
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.splits = tuple(splits or (N,))
        assert sum(self.splits) == N, (
            f"splits {self.splits} do not add up to the {N} rows of the base"
        )
        # U(−1/√K, 1/√K), as in torch's Linear and in PEFT. Draw on the CPU, because then the same
        # seed gives the same lora_A on every device.
        bound = K**-0.5
        lora_A = torch.empty(len(self.splits) * rank, K)
        lora_A.uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(lora_A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(N, rank, device=device))
        # Buffers, so that .to(device) moves them. Not persistent, because refresh() computes their
        # values from the parameters.
        for name, parameter in (("copy_A", self.lora_A), ("copy_B", self.lora_B)):
            self.register_buffer(name, torch.empty_like(parameter, dtype=dtype), persistent=False)
        self.enabled = True
        self.refresh()

    @torch.no_grad()
    def refresh(self):
        """Round the parameters into the copies, in place: CUDA graphs read the new values."""
        self.copy_A.copy_(self.lora_A)
        self.copy_B.copy_(self.lora_B)
        self.base.store_B(self.copy_B, self.splits)

    def forward(self, x: torch.Tensor, compute_output: bool = True) -> torch.Tensor:
        """x (…, K) → y (…, N).

        compute_output=False: nothing reads y, only its gradient is needed. model.py's Block.summed
        repeats a forward in this way, for gradient checkpointing.
        """
        if not self.enabled:
            return self.base(x)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        low_rank = LowRank(self.copy_A, self.copy_B, self.splits, self.scale)
        y = _LowRankProduct.apply(
            rows, self.lora_A, self.lora_B, self.base, low_rank, compute_output
        )
        return y.view(*x.shape[:-1], self.base.out_features)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """→ {name: layer}, in the model's order.

    ValueError: there is none, so nothing would learn.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    if not layers:
        raise ValueError("this model has no LoRALinear: nothing would learn")
    return layers


def refresh(model: nn.Module):
    """Round every layer's parameters into its copies: call it after an optimizer step or a load."""
    for layer in lora_layers(model).values():
        layer.refresh()


@contextmanager
def disabled(model: nn.Module):
    """In this context the model is its frozen base alone: the reference policy of a KL term."""
    layers = lora_layers(model).values()
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


if __name__ == "__main__":
    base = FrozenMatrix(torch.randn(96, 64))
    layer = LoRALinear(base, rank=4, alpha=4)
    x = torch.randn(5, 64)
    print(f"lora_B = 0: differs from the base by {(layer(x) - base(x)).abs().max():.1e}")
    layer.lora_B.data.normal_()
    layer.refresh()
    merged = base.weight + layer.scale * layer.lora_B @ layer.lora_A
    print(f"lora_B ≠ 0: differs from the base by {(layer(x) - base(x)).abs().max():.2f},")
    print(f"            from x @ (W + scale·B·A).T by {(layer(x) - x @ merged.T).abs().max():.1e}")
