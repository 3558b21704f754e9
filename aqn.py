# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""AQN, adaptive quantization noise: noise on RMSNorm weights makes the sampler explore.

    y = RMSNorm(x) · (w + z) @ W.T  =  RMSNorm(x) · w @ (W · diag(1 + z/w)).T    z ~ N(0, σ(stage)²)

QeRL (arXiv 2510.11696, §3.3, App. G): noise z on the weight w of a norm equals relative noise z/w
on the columns of the projection W behind it, so the packed 4-bit weights stay untouched. Each block
of the decoder has two such norms: the input norm (before q, k, v) and the post-attention norm
(before gate, up). All other norms stay clean. σ falls in stages of equal length, to within a step.
Stage 0 adds no noise: the paper assumes that the quantizer's own error explores enough at first.

    stage   0      1 … stages−1, u = (stage − 1)/(stages − 2) from 0 to 1
    σ       0      exponential  start · (end/start)^u                    eq. 8, ending at `end`
                   linear       start + (end − start) · u
                   cosine       end + (start − end) · (1 + cos πu) / 2   our reading of the paper's
                   logarithmic  start + (end − start) · ln(1 + (e−1)u)   curves; it gives no formula

The paper's noise is adaptive in that it falls. Others let σ follow what the noise does (Plappert et
al., arXiv 1706.01905, §3; by another measure PSN-RLVR, arXiv 2602.02555). With train.py's
--sigma-schedule adaptive there are no stages: after a step whose noisy policy was nearer to the
clean one than a target, σ grows by a factor, else it falls by it (next_sigma).

The noise is added to the clean fp32 weights: bf16 rounds away noise below 1.9e-3 on a weight of 1.
A draw depends on (seed, step, norm) alone, so that every rank and every resumed run gets the same
one. On exit the weights are restored bit for bit. Norms are found by name, and finding none is an
error: the released code looks for a class that its sampler does not use and then, as we read it,
adds no noise at all.

Use: with noisy_norms(model, sigma(step, total_steps), seed, step): sample answers.
Left out: relative noise w · (1 + z); trained norms.
Needs: torch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NORMS = ("input_layernorm", "post_attention_layernorm")  # names of modules, as in transformers
FACTOR = 1.1  # by which next_sigma() changes σ
# name → σ(start, end, u), with u from 0 in stage 1 to 1 in the last stage
SCHEDULES = {
    "exponential": lambda start, end, u: start * (end / start) ** u,
    "linear": lambda start, end, u: start + (end - start) * u,
    "cosine": lambda start, end, u: end + (start - end) * (1 + math.cos(math.pi * u)) / 2,
    "logarithmic": lambda start, end, u: start + (end - start) * math.log(1 + (math.e - 1) * u),
}


def sigma(
    step: int,
    total_steps: int,
    start: float = 1e-2,
    end: float = 1e-4,
    stages: int = 10,
    schedule: str = "exponential",
    current: float = 0.0,
) -> float:
    """→ the standard deviation σ of the noise at a step, counted from 0.

    schedule: a key of SCHEDULES. start, end: σ in stage 1 and in the last stage, which is stage
    stages − 1. Stage 0 has σ = 0. Or "adaptive": σ is `current`, what next_sigma() returned after
    the step before, or `start` if that is 0.

    ValueError, unless the schedule is adaptive: it is unknown, fewer than 3 stages, start or end
    not positive, a step that is negative or not below total_steps.
    """
    if schedule == "adaptive":
        return current or start
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}")
    if stages < 3 or start <= 0 or end <= 0:
        raise ValueError(
            "AQN needs stages ≥ 3 and positive sigmas, "
            f"got stages={stages}, start={start}, end={end}"
        )
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step} is not one of the {total_steps} steps, counted from 0")
    stage = step * stages // total_steps
    if stage == 0:
        return 0.0
    return SCHEDULES[schedule](start, end, (stage - 1) / (stages - 2))


def next_sigma(sigma: float, kl: float, target: float) -> float:
    """→ σ of the next step: FACTOR times larger if the policy with noise of this sigma was
    less than `target` nats a token away from the clean one, else FACTOR times smaller. kl: that
    distance as measured, in nats a token; NaN makes σ smaller, too. It never settles: near the
    target σ goes up and down by FACTOR. A σ of 0 stays 0.
    """
    return sigma * FACTOR if kl < target else sigma / FACTOR


def norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """→ the modules that take noise, in the model's order: those with a name of NORMS.

    ValueError: the model has none.
    """
    found = [m for name, m in model.named_modules() if name.rpartition(".")[2] in NORMS]
    if not found:
        raise ValueError(f"no module is called {' or '.join(NORMS)}: noise would do nothing")
    return found


def is_noisy(model: torch.nn.Module) -> bool:
    """Do the norms carry noise now? Then the model is not the policy that learns, so do not
    evaluate or save it. ValueError: the model has no such norms.
    """
    return any(hasattr(m, "clean_weight") for m in norms(model))


@contextmanager
def noisy_norms(model: torch.nn.Module, sigma: float, seed: int, step: int) -> Iterator[int]:
    """In this context the weight of each norm is w + N(0, sigma²); on exit it is w, bit for bit.

    The weights change in place: sampler and trainer read the same tensors. Yields the number of
    norms that were changed; sigma 0 changes none.

    RuntimeError: the norms are noisy already. ValueError: the model has no such norms.
    """
    changed = norms(model) if sigma > 0 else []
    if is_noisy(model):
        raise RuntimeError("the norms are noisy already: noise is added to clean weights alone")
    try:
        for index, norm in enumerate(changed):
            norm.clean_weight = norm.weight.detach().clone()
            # Seed a CPU generator for each norm, so that a draw depends neither on the sizes of
            # the norms before nor on the device. PyTorch takes the key modulo 2³²; in a run of up
            # to three million steps no two draws share it.
            key = (seed * 1_000_003 + step) * 1_000_003 + index
            generator = torch.Generator().manual_seed(key % 2**63)
            noise = torch.randn(norm.weight.shape, generator=generator)
            norm.weight.data.copy_(norm.clean_weight.float() + sigma * noise.to(norm.weight.device))
        yield len(changed)
    finally:
        for norm in changed:
            # An interrupt in the loop above leaves the later norms without a clean_weight.
            if hasattr(norm, "clean_weight"):
                norm.weight.data.copy_(norm.clean_weight)
                del norm.clean_weight


if __name__ == "__main__":
    print("σ in each tenth of the run")
    for name in SCHEDULES:
        print(f"{name:12}", *(f"{sigma(stage, 10, schedule=name):8.1e}" for stage in range(10)))
    block = torch.nn.Module()
    block.input_layernorm = torch.nn.RMSNorm(4)
    print("weight     ", block.input_layernorm.weight.tolist())
    with noisy_norms(block, sigma(1, 10), seed=0, step=1):
        print("with noise ", block.input_layernorm.weight.tolist())
    print("afterwards ", block.input_layernorm.weight.tolist())
