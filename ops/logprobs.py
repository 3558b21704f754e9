"""Log-probabilities of given tokens and their gradient, without a (tokens, vocabulary) tensor in
memory.

    z       = hidden @ W.T / temperature       W: lm_head (V, D); Qwen2.5 has 152,000 logits a token
    logprob = z[target] − ln Σ exp z           entropy = ln Σ exp z − Σ softmax(z) · z
    d logprob / d hidden = (onehot(target) − softmax(z)) @ W / temperature

Logits exist for a chunk of tokens at a time, and backward would have to compute them again. W is
frozen, so forward computes the third line while it has the logits: a vector of D numbers for each
token, its log-probability's derivative in hidden. Backward multiplies that vector by the one number
that arrives for the token. On a GPU one kernel reads a chunk's logits twice and writes all results;
the plain torch lines define them.

Left out: gradients of W and of the entropy. Needs: torch; on a GPU also triton.
"""

import torch

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # the CPU path needs no triton
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

LOGITS_AT_ONCE = 1 << 26  # of a chunk: 268 MB of fp32 for any vocabulary


def logits(hidden, W):
    """(n, D), (V, D) → (n, V) f32: the one way from hidden states to logits, in sampler and
    trainer.
    """
    return torch.mm(hidden, W.T, out_dtype=torch.float32) if hidden.is_cuda else hidden @ W.T


class TokenLogprobs(torch.autograd.Function):
    """hidden (n, D), targets (n,) int64, W (V, D), temperature → the log-probability of each target
    and the entropy of its distribution in nats, (n,) f32. Only the first has a gradient, and only
    for hidden. hidden and W have one dtype: bf16 on a GPU, fp32 on a CPU.
    """

    @staticmethod
    def forward(ctx, hidden, targets, W, temperature):
        logprob, entropy = hidden.new_empty(2, len(hidden), dtype=torch.float32)
        derivative = None  # (n, D) d logprob / d hidden, in hidden's dtype
        if ctx.needs_input_grad[0]:
            derivative = torch.empty_like(hidden)
        size = max(1, LOGITS_AT_ONCE // len(W))
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            z = logits(hidden[rows], W)
            dz = None if derivative is None else torch.empty_like(z, dtype=hidden.dtype)
            softmax(z, targets[rows], temperature, logprob[rows], entropy[rows], dz)
            if derivative is not None:
                torch.mm(dz, W, out=derivative[rows])
            z = dz = None  # free these before the next chunk's are allocated
        ctx.save_for_backward(derivative)
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx, grad, _):
        (derivative,) = ctx.saved_tensors
        return (derivative * grad[:, None]).to(derivative.dtype), None, None, None


def softmax(z, targets, temperature, logprob, entropy, dz):
    """z (n, V) f32, before the temperature; a CPU overwrites it. Writes logprob, entropy (n,) f32
    and, unless it is None, dz (n, V), the derivative of logprob.
    """
    if z.is_cuda:
        _softmax_kernel[len(z),](
            z, targets, 1 / temperature, logprob, entropy, dz, z.shape[1], TILE=4096, num_warps=8
        )
        return
    log_p = z.div_(temperature).log_softmax(-1)
    p = log_p.exp()
    logprob.copy_(log_p.gather(1, targets[:, None])[:, 0])
    entropy.copy_(-(p * log_p).sum(-1))
    if dz is not None:
        onehot_minus_p = p.neg_().scatter_add_(1, targets[:, None], torch.ones_like(p[:, :1]))
        dz.copy_(onehot_minus_p / temperature)


@jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["targets", "logprob", "entropy"])
def _softmax_kernel(z, targets, scale, logprob, entropy, dz, V, TILE: constexpr):
    """A CTA reads one token's logits twice: for their sum, and for dz. scale: 1 / temperature."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    z += row * V
    target = tl.load(targets + row)
    # Online softmax: when top grows, total and dot shrink by the same factor.
    top = -1e30  # the largest logit so far
    total = 0.0  # Σ exp(logit − top)
    dot = 0.0  # Σ exp(logit − top) · logit
    for start in range(0, V, TILE):
        x = tl.load(z + start + cols, mask=start + cols < V, other=float("-inf")) * scale
        new = tl.maximum(top, tl.max(x, 0))
        shrink = tl.exp(top - new)
        p = tl.exp(x - new)
        total = total * shrink + tl.sum(p, 0)
        # Columns past V have p = 0 and x = −inf, whose product would be NaN.
        dot = dot * shrink + tl.sum(tl.where(p > 0, p * x, 0.0), 0)
        top = new
    log_sum = top + tl.log(total)
    tl.store(logprob + row, tl.load(z + target) * scale - log_sum)
    tl.store(entropy + row, log_sum - dot / total)
    if dz is not None:
        for start in range(0, V, TILE):
            x = tl.load(z + start + cols, mask=start + cols < V, other=0.0) * scale
            onehot = tl.where(start + cols == target, 1.0, 0.0)
            slope = (onehot - tl.exp(x - log_sum)) * scale
            place = dz + row * V + start + cols
            tl.store(place, slope.to(dz.dtype.element_ty), mask=start + cols < V)


if __name__ == "__main__":
    hidden, W, targets = torch.randn(3, 8), torch.randn(50, 8), torch.tensor([1, 2, 3])
    logprob, entropy = TokenLogprobs.apply(hidden, targets, W, 1.0)
    whole = (hidden @ W.T).log_softmax(-1)[range(3), targets]
    print(
        "ours", logprob.tolist(), "\nfrom all logits", whole.tolist(), "\nentropy", entropy.tolist()
    )
