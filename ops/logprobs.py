# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""Log-probabilities of given tokens and their gradient, without a (tokens, vocabulary) tensor: what
others call fused linear cross-entropy.

    logits  = hidden @ W.T                     W: lm_head (V, D); Qwen2.5 has 152,000 logits a token
    z       = logits / temperature
    logprob = z[target] − ln Σ exp z           entropy = ln Σ exp z − Σ softmax(z) · z

Logits exist for a chunk of tokens at a time. Autograd would keep all of them for backward, and
computing them again in backward would cost a second product with W. So forward computes the
gradient too, while it has the logits:

    d_logits[t]  = d logprob[t] / d logits[t]  = (onehot(target[t]) − softmax(z[t])) / temperature
    d_hidden[t]  = d logprob[t] / d hidden[t]  = d_logits[t] @ W                  (D,), kept
    d loss / d hidden[t]  = d loss / d logprob[t] · d_hidden[t]                   backward

That works because a token's log-probability depends on its own hidden state alone. The gradient of
the loss reaches that hidden state through one number, d loss / d logprob[t]. Backward multiplies
d_hidden[t] by this number, the only factor that forward does not know. W is frozen, so no other
gradient needs the logits. d_hidden has only D numbers a token, while the logits have V.

On a GPU one kernel reads a chunk's logits and writes logprob, entropy and d_logits. It reads the
logits a second time for d_logits, and only if a gradient is needed. Matrix products compute the
logits and d_hidden. On a CPU plain torch code computes the same results, and defines what the
kernel must compute.

Left out: gradients of W and of the entropy. Needs: torch; on a GPU also triton.
"""

import torch
from torch import Tensor

try:
    import triton.language as tl
    from triton import jit
    from triton.language import constexpr
except ImportError:  # macOS has no Triton: these two only let Python define the kernel below
    constexpr = int

    def jit(kernel=None, **options):
        return kernel or jit


LOGITS_AT_ONCE = 1 << 26  # logits in a chunk: 268 MB of fp32; in bf16 d_logits is half as large


def logits(hidden: Tensor, W: Tensor) -> Tensor:
    """hidden (n, D), W (V, D) → (n, V) f32: the one way from hidden states to logits, in sampler
    and trainer. A GPU multiplies bf16 and returns the fp32 sums, because bf16's 8 significant bits
    are too few for log-probabilities.
    """
    if hidden.is_cuda:
        return torch.mm(hidden, W.T, out_dtype=torch.float32)
    return hidden @ W.T


class TokenLogprobs(torch.autograd.Function):
    """The log-probability of each target, (n,) f32, and the entropy of its distribution in nats,
    (n,) f32, from hidden (n, D), targets (n,) int64, W (V, D) and temperature, a float > 0.

    hidden and W have one dtype: bf16 on a GPU, fp32 on a CPU. Only the log-probability has a
    gradient, and only for hidden. forward computes that gradient: the top of this file says why.
    """

    @staticmethod
    def forward(ctx, hidden, targets, W, temperature):
        logprob = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(logprob)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # (n, D)
        size = max(1, LOGITS_AT_ONCE // len(W))  # tokens of a chunk
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            chunk = logits(hidden[rows], W)
            d_logits = None if d_hidden is None else torch.empty_like(chunk, dtype=hidden.dtype)
            write_logprobs(
                chunk, targets[rows], temperature, logprob[rows], entropy[rows], d_logits
            )
            if d_hidden is not None:
                torch.mm(d_logits, W, out=d_hidden[rows])
            # Free both before the next chunk's are allocated, or two chunks would exist at once.
            chunk = d_logits = None
        ctx.save_for_backward(d_hidden)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, d_logprob, _):
        (d_hidden,) = ctx.saved_tensors
        # d_logprob is fp32, so the product is too; round it once.
        return (d_hidden * d_logprob[:, None]).to(d_hidden.dtype), None, None, None


def write_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    logprob: Tensor,
    entropy: Tensor,
    d_logits: Tensor | None,
) -> None:
    """Write a chunk's logprob and entropy (n,) f32, and d_logits (n, V), in its dtype.

    logits (n, V) f32: a CPU overwrites them. targets (n,) int64. d_logits None: no gradient is
    needed.
    """
    if logits.is_cuda:
        n, V = logits.shape
        _logprobs_kernel[n,](
            logits,
            targets,
            1 / temperature,
            logprob,
            entropy,
            d_logits,
            V,
            TILE=4096,
            num_warps=8,
        )
        return
    # In place, and log_p is freed before d_logits is written: at most three (n, V) matrices live.
    log_p = logits.div_(temperature).log_softmax(-1)
    logprob.copy_(log_p.gather(1, targets[:, None])[:, 0])
    p = log_p.exp()
    entropy.copy_(-log_p.mul_(p).sum(-1))
    log_p = None
    if d_logits is not None:
        onehot_minus_p = p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(p[:, :1]))
        torch.div(onehot_minus_p, temperature, out=d_logits)


# do_not_specialize_on_alignment: Triton compiles a kernel anew for addresses that 16 does not
# divide. In every chunk but the first, these three pointers may be unaligned.
@jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["targets", "logprob", "entropy"])
def _logprobs_kernel(logits, targets, scale, logprob, entropy, d_logits, V, TILE: constexpr):
    """Grid (n,): a CTA reads one token's logits twice, in tiles of TILE: for their sums, then for
    d_logits. scale: 1 / temperature. d_logits None: no second pass.

    No PDL: the matrix products around this kernel take far longer than a launch.
    """
    row = tl.program_id(0).to(tl.int64)  # int64, so that row · V never overflows
    cols = tl.arange(0, TILE)
    logits += row * V
    target = tl.load(targets + row)
    # Online softmax: when top grows, total and dot shrink by the same factor.
    top = -1e30  # the largest z so far; finite, because −inf − −inf would be NaN
    total = 0.0  # Σ exp(z − top)
    dot = 0.0  # Σ exp(z − top) · z
    for start in range(0, V, TILE):
        # Columns past V load −inf, whose exp is 0.
        x = tl.load(logits + start + cols, mask=start + cols < V, other=float("-inf"))  # (TILE,)
        z = x * scale
        new = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - new)
        p = tl.exp(z - new)
        total = total * shrink + tl.sum(p, 0)
        # Columns past V have p = 0 and z = −inf, whose product would be NaN.
        dot = dot * shrink + tl.sum(tl.where(p > 0, p * z, 0.0), 0)
        top = new
    log_sum = top + tl.log(total)  # ln Σ exp z
    tl.store(logprob + row, tl.load(logits + target) * scale - log_sum)
    tl.store(entropy + row, log_sum - dot / total)
    if d_logits is not None:
        for start in range(0, V, TILE):
            z = tl.load(logits + start + cols, mask=start + cols < V, other=0.0) * scale
            onehot = tl.where(start + cols == target, 1.0, 0.0)
            d = (onehot - tl.exp(z - log_sum)) * scale
            place = d_logits + row * V + start + cols
            tl.store(place, d, mask=start + cols < V)


if __name__ == "__main__":
    hidden = torch.randn(3, 4, requires_grad=True)
    W = torch.randn(50, 4)
    targets = torch.tensor([1, 2, 3])
    logprob, _ = TokenLogprobs.apply(hidden, targets, W, 1.0)
    whole = (hidden @ W.T).log_softmax(-1)[range(3), targets]
    print("ours", logprob, "from all logits", whole, sep="\n")
    print("gradients differ by", *torch.autograd.grad(logprob.sum() - whole.sum(), hidden))
