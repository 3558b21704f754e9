"""AQN, adaptive quantisation noise: explore by shaking RMSNorm weights, less and less as training goes on.

    y = RMSNorm(x) · (w + z) @ W.T  =  RMSNorm(x) · w @ (W · diag(1 + z/w)).T         z ~ N(0, σ(stage)²)

QeRL (arXiv 2510.11696, §3.3, App. G): noise on the norm in front of a projection is noise on the columns of
that projection, without touching one packed weight. Each block has two such norms, the input norm (q, k, v)
and the post-attention norm (gate, up); the final norm stays clean. σ falls in stages:

    stage   0            1 … stages−1, u = (stage − 1)/(stages − 2) from 0 to 1
    σ       0            exponential  start · (end/start)^u                       (eq. 8, but down to its end)
            (the         linear       start + (end − start) · u
            quantiser's  cosine       end + (start − end) · (1 + cos πu) / 2      our reading of the paper's
            own noise)   logarithmic  start + (end − start) · ln(1 + (e−1)u)      curves; it gives no formula

Unlike the released code, which looks for modules by a class that its sampler does not use and so, as read,
adds no noise: we match by name, and zero matches is an error. The noise starts from the clean fp32 weights
each time (bf16 would swallow σ < 4e-3 on a weight of 1), a draw is a function of (seed, step, layer) and so
the same on every rank and in every replay, and it leaves the weights bit for bit as they were.

Left out: relative noise w · (1 + z); trained norms.
Needs: torch.
"""

import math
from contextlib import contextmanager

import torch

NORMS = ("input_layernorm", "post_attention_layernorm")
SCHEDULES = {
    "exponential": lambda start, end, u: start * (end / start) ** u,
    "linear": lambda start, end, u: start + (end - start) * u,
    "cosine": lambda start, end, u: end + (start - end) * (1 + math.cos(math.pi * u)) / 2,
    "logarithmic": lambda start, end, u: start + (end - start) * math.log(1 + (math.e - 1) * u),
}


def sigma(step, total_steps, start=1e-2, end=1e-4, stages=10, schedule="exponential"):
    """The noise's standard deviation at an optimizer step (counted from 0); the first stage is free of noise.

    ValueError: an unknown schedule, fewer than 3 stages, a sigma that is not positive, a step out of range.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if stages < 3 or start <= 0 or end <= 0:
        raise ValueError("AQN needs stages ≥ 3 and positive sigmas, "
                         f"got stages={stages}, start={start}, end={end}")
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step} is not one of the {total_steps} steps, counted from 0")
    stage = step * stages // total_steps
    return 0.0 if stage == 0 else SCHEDULES[schedule](start, end, (stage - 1) / (stages - 2))


def norms(model):
    """The RMSNorms that take noise, in the model's order: those named input_ or post_attention_layernorm."""
    found = [m for name, m in model.named_modules() if name.rpartition(".")[2] in NORMS]
    if not found:
        raise ValueError(f"no module of this model is called {' or '.join(NORMS)}: noise would do nothing")
    return found


def is_noisy(model):
    """True inside noisy_norms, where nothing may be evaluated or saved as the policy."""
    return any(hasattr(m, "clean_weight") for m in norms(model))


@contextmanager
def noisy_norms(model, sigma, seed, step):
    """Inside the block each of these norms' weight is w + N(0, σ²), in place; on exit w again, bit for bit.

    sigma 0 leaves the model alone. Yields the number of norms that were changed.
    """
    changed = norms(model) if sigma > 0 else []
    if is_noisy(model):
        raise RuntimeError("the norms are noisy already: "
                           "noise is drawn from clean weights, never added to noise")
    try:
        for layer, norm in enumerate(changed):
            norm.clean_weight = norm.weight.detach().clone()
            # one generator per norm: a draw depends on no other layer. The key wraps as a counter's would.
            key = (seed * 1_000_003 + step) * 1_000_003 + layer
            generator = torch.Generator().manual_seed(key % 2**63)
            noise = torch.randn(norm.weight.shape, generator=generator)
            norm.weight.data.copy_(norm.clean_weight.float() + sigma * noise.to(norm.weight.device))
        yield len(changed)
    finally:
        for norm in changed:
            if hasattr(norm, "clean_weight"):
                norm.weight.data.copy_(norm.clean_weight)
                del norm.clean_weight


if __name__ == "__main__":
    print("σ in each tenth of the run\n" + " " * 12 + "".join(f"{stage:9d}" for stage in range(10)))
    for name in SCHEDULES:
        print(f"{name:12}" + "".join(f"{sigma(stage, 10, schedule=name):9.1e}" for stage in range(10)))

    block = torch.nn.Module()
    block.input_layernorm = torch.nn.RMSNorm(8)
    print("\nweight     ", block.input_layernorm.weight.tolist())
    with noisy_norms(block, sigma(1, 10), seed=0, step=1):
        print("with noise ", [round(v, 3) for v in block.input_layernorm.weight.tolist()])
    print("afterwards ", block.input_layernorm.weight.tolist())
