# SPDX-License-Identifier: Apache-2.0 (QeRL from scratch)
"""GRPO and its relatives: from the rewards of a group of answers to a loss.

    A    = (r − mean of its group) / (std of its group + 1e-4)  advantage: one number per answer;
                                                                dr_grpo does not divide; rloo
                                                                and none: see advantages()
    ρ_t  = π_θ(token t) / π_old(token t)                        ratio: the policy's move since "old"

    dapo     −Σ_i Σ_t min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) / Σ lengths     DAPO 2503.14476, eq. 8
    grpo     −Σ_i 1/|o_i| Σ_t min(ρA, clip(ρ, …)A)         / answers       GRPO 2402.03300, eq. 3
    dr_grpo  −Σ_i Σ_t min(ρA, clip(ρ, …)A)       / (answers · max length)  Dr. GRPO 2503.20783, §3.2
    gspo     −Σ_i min(s_i A, clip(s_i, …)A)                / answers       GSPO 2507.18071, eq. 5
             s_i = exp(mean_t ln ρ_t)
    cispo    −Σ_i Σ_t stopgrad(min(ρ, ρ_max)) A ln π_θ     / Σ lengths     CISPO 2506.13585, eq. 4

Σ_i sums over answers, Σ_t over the tokens of an answer, |o_i| is its length. A loss here is the sum
over its answers divided by `normalizer`, one number for the whole optimizer batch, over all
micro-batches and ranks. So the gradient does not depend on how the batch is cut.

"old" is the policy before the first update on these answers. By default train.py makes no second
update. In the first one the policy has not moved: every ρ is 1, no clip acts, and the gradient is
that of REINFORCE, A ∇ ln π. If the advantages sum to 0, the grpo or gspo loss is then about 0, but
its gradient is not. The clip acts from the second update on. With --correction bypass, train.py
takes the sampler's log-probabilities for "old", so that the clip can act in the first update, too.

Tensors are (B, T): B answers (the batch or a part of it) by T tokens. Build the mask from lengths,
never from token ids: padding may have the end token's id. The sampled end token is an action too
and is not masked.

To add a loss, write its function, add its entry to LOSSES, and its name to the choices in
tools/flags.py.

Left out: value networks, entropy bonuses, whole-batch reward scaling.
Needs: torch.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# ρ_max, the largest weight of a token in cispo: ε_max of ScaleRL (arXiv 2510.13786), which TRL
# recommends too. The CISPO paper gives no number.
CISPO_MAX = 5.0


# What is subtracted from the rewards (P, G). "group": the mean of the group. "rloo", leave one out:
# the mean of the others, which does not depend on the sample itself, so that the gradient has no
# bias (Kool et al. 2019; RLOO, arXiv 2402.14740). "none": REINFORCE (Williams 1992).
BASELINES = {
    "group": lambda rewards: rewards.mean(1, keepdim=True),
    "rloo": lambda rewards: (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1),
    "none": torch.zeros_like,
}


def advantages(rewards: Tensor, scale: str = "group", baseline: str = "group") -> Tensor:
    """Rewards (P, G) of any dtype → advantages (P, G) f32: how much better than its group a sample
    is. A group whose rewards are all equal gets exact zeros, unless the baseline is "none".

    scale: "group" divides by the group's unbiased std + 1e-4 (GRPO, DAPO), "none" does not (Dr.
    GRPO). Other baselines than "group" are never divided. baseline: a key of BASELINES, else
    KeyError.

    ValueError: fewer than two samples in a group, unknown scale, a reward that is NaN or infinite,
    a baseline of another shape than (P, 1) or (P, G).
    """
    P, G = rewards.shape
    if G < 2:
        raise ValueError(f"a group of {G} has no mean to compare with: take 2 samples or more")
    if scale not in ("group", "none"):
        raise ValueError(f"scale={scale!r} must be 'group' or 'none'")
    if not rewards.isfinite().all():
        raise ValueError(
            f"{int((~rewards.isfinite()).sum())} rewards are NaN or infinite: "
            "see the task's reward()"
        )
    rewards = rewards.double()  # float32 would round the mean of close rewards
    subtracted = BASELINES[baseline](rewards)
    if subtracted.shape not in ((P, 1), (P, G)):
        raise ValueError(
            f"the baseline {baseline!r} must have the shape {(P, 1)} or {(P, G)}, "
            f"not {tuple(subtracted.shape)}"
        )
    centered = rewards - subtracted
    if baseline == "none":
        return centered.float()
    if scale == "group" and baseline == "group":
        centered = centered / (rewards.std(1, keepdim=True) + 1e-4)
    # Equal rewards must give exact zeros: the trainer skips answers whose advantage is 0. The mean
    # is rounded, so 0.1 minus the mean of 0.1, 0.1 and 0.1 is tiny but not 0.
    constant = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return centered.masked_fill(constant, 0).float()


def overlong_penalty(lengths: Tensor, max_new_tokens: int, soft_tokens: int) -> Tensor:
    """DAPO's soft overlong punishment (eq. 13): lengths (B,) → (B,) f64, to add to rewards.

    0 for an answer that leaves soft_tokens (DAPO's L_cache) or more of its max_new_tokens tokens
    unused, falling linearly to −1 for one that uses them all.
    """
    return ((max_new_tokens - soft_tokens - lengths.double()) / soft_tokens).clamp(-1, 0)


# --- the losses

# Each loss is a complete function: read one and skip the others. All of them take
#     log_ratio (B, T)         ln ρ_t, 0 where masked
#     logprobs (B, T)          ln π_θ, 0 where masked
#     advantages (B,)          A
#     weights (B, T)           w_t, a factor of each token, 0 where masked
#     lengths (B,) int64       |o_i|, the trained tokens of each answer, but at least 1
#     bounds                   1 − ε_low and 1 + ε_high
# and return each answer's loss, (B,) f32, before the division by normalizer; and a bool, (B, T) or
# (B, 1): which tokens, or which answers, the clip keeps from moving (with cispo: bounds).
# policy_loss refuses other shapes, because a sum would broadcast them.


def dapo(log_ratio, logprobs, advantages, weights, lengths, bounds):
    """DAPO, eq. 8: PPO's clipped objective, summed over an answer's tokens. Dr. GRPO's has the same
    form, with another normalizer and ε_high; its advantages are not divided by the std.

        −Σ_t w_t · min(ρ_t A, clip(ρ_t, 1 − ε_low, 1 + ε_high) A)

    Where the clipped product is the smaller one, the objective no longer depends on ρ, so its
    gradient is 0: a token of a good answer that is likelier already, or one of a bad answer that is
    rarer already, moves no further.
    """
    A = advantages[:, None]
    ratio = log_ratio.exp()
    unclipped = ratio * A
    clipped = ratio.clamp(*bounds) * A
    objective = weights * torch.min(unclipped, clipped)
    return -objective.sum(1), clipped < unclipped


def grpo(log_ratio, logprobs, advantages, weights, lengths, bounds):
    """GRPO, eq. 3: PPO's clipped objective, averaged over an answer's tokens.

    −1/|o| Σ_t w_t · min(ρ_t A, clip(ρ_t, 1 − ε_low, 1 + ε_high) A)
    """
    A = advantages[:, None]
    ratio = log_ratio.exp()
    unclipped = ratio * A
    clipped = ratio.clamp(*bounds) * A
    objective = weights * torch.min(unclipped, clipped)
    return -objective.sum(1) / lengths, clipped < unclipped


def gspo(log_ratio, logprobs, advantages, weights, lengths, bounds):
    """GSPO, eq. 5: clips whole answers, by the geometric mean s of an answer's ratios.

    −mean_t w_t · min(s A, clip(s, 1 − ε_low, 1 + ε_high) A),    s = exp(mean_t ln ρ_t)
    """
    s = (log_ratio.sum(1) / lengths).exp()  # (B,)
    unclipped = s * advantages
    clipped = s.clamp(*bounds) * advantages
    mean_weight = weights.sum(1) / lengths
    objective = mean_weight * torch.min(unclipped, clipped)
    return -objective, (clipped < unclipped)[:, None]


def cispo(log_ratio, logprobs, advantages, weights, lengths, bounds):
    """CISPO, eq. 4: REINFORCE, each token weighted by its ratio. The bound on that weight keeps the
    token's gradient, which a clipped objective loses. It has no ε, so it ignores `bounds`.

        −Σ_t w_t · stopgrad(min(ρ_t, ρ_max)) · A · ln π_θ
    """
    ratio = log_ratio.detach().exp()
    objective = weights * ratio.clamp(max=CISPO_MAX) * advantages[:, None] * logprobs
    return -objective.sum(1), ratio > CISPO_MAX


class Loss(NamedTuple):
    """A loss and its defaults."""

    function: Callable
    low: float  # ε_low
    high: float  # ε_high: DAPO's clip-higher, PPO's 0.2, GSPO §5.1
    # What the normalizer counts. "max_tokens" counts each answer as if it had all max_new_tokens.
    # With "answers" the function itself averages over an answer's tokens, and so does its KL.
    counts: str


LOSSES = {
    "dapo": Loss(dapo, 0.2, 0.28, "tokens"),
    "grpo": Loss(grpo, 0.2, 0.2, "answers"),
    "dr_grpo": Loss(dapo, 0.2, 0.2, "max_tokens"),
    "gspo": Loss(gspo, 3e-4, 4e-4, "answers"),
    "cispo": Loss(cispo, 0.0, 0.0, "tokens"),  # has no ε
}


def normalizer(loss_type: str, lengths: Tensor, max_new_tokens: int) -> Tensor:
    """→ () int64, policy_loss's divisor, the denominator that ends each formula at the top of this
    file.

    lengths (B,) int64: trained tokens of each answer of the whole optimizer batch, before it is cut
    into micro-batches. An answer with none (truncated, and masked for that) is not counted. With
    several ranks, sum the result over the ranks.
    """
    counts = LOSSES[loss_type].counts
    if counts == "tokens":
        return lengths.sum()
    answers = (lengths > 0).sum()
    if counts == "max_tokens":
        return answers * max_new_tokens
    return answers


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    normalizer: Tensor | float,
    loss_type: str = "dapo",
    weights: Tensor | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of some answers of an optimizer batch → (loss () f32, clipped () int64).

    loss: the sum over these answers / normalizer, so losses of micro-batches add up to the batch's.
    clipped: how many trained tokens the clip keeps from moving (cispo: whose weight it bounds).

    logprobs (B, T) f32: ln π_θ of each token, of the policy that learns. Only they get a gradient.
    old_logprobs (B, T) f32: ln π_old.
    advantages (B,) f32: of each answer.
    mask (B, T) bool: the answer tokens that are trained; values elsewhere, even NaN, have no
        influence. Leave out answers that are not trained at all, as the normalizer does.
    normalizer: what normalizer() returns, or a number.
    loss_type: a key of LOSSES, else KeyError.
    weights (B, T) f32: from importance_weights, or None for 1; gspo takes their mean over an
        answer.
    clip_low, clip_high: ε_low and ε_high, or None for the loss's own.
    ref_logprobs (B, T) f32: ln π_ref, read if beta is not 0.
    beta: the KL penalty's coefficient: beta times the sum (grpo, gspo: the mean) of an answer's
        kl_k3 is added to its loss, before the division by normalizer.

    ValueError: the function of loss_type returns other shapes than it should.
    """
    kind = LOSSES[loss_type]
    low = kind.low if clip_low is None else clip_low
    high = kind.high if clip_high is None else clip_high
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)
    weights = mask.float() if weights is None else torch.where(mask, weights.detach(), 0)
    lengths = mask.sum(1).clamp(min=1)  # 1 for an answer without trained tokens, whose sums are 0
    losses, stopped = kind.function(
        log_ratio,
        torch.where(mask, logprobs, 0),
        advantages,
        weights,
        lengths,
        (1 - low, 1 + high),
    )
    if losses.shape != advantages.shape or stopped.shape[1:] not in (mask.shape[1:], (1,)):
        raise ValueError(
            f"{kind.function.__name__}() must return losses (B,) and a mask (B, T) or (B, 1), with "
            f"(B, T) = {tuple(mask.shape)}, not {tuple(losses.shape)} and {tuple(stopped.shape)}"
        )
    if beta:
        kl = kl_k3(torch.where(mask, ref_logprobs.detach() - logprobs, 0)).sum(1)  # (B,)
        if kind.counts == "answers":
            kl = kl / lengths
        losses = losses + beta * kl
    return losses.sum() / normalizer, (stopped & (weights > 0)).sum()


# --- what a sampler that differs, and a reference policy, add


def importance_weights(old_logprobs: Tensor, sampled_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance sampling (Yao et al. 2025): → min(π_old / π_sampler, cap) (B, T) f32.

    old_logprobs, sampled_logprobs (B, T) f32. The weights correct for a sampler whose probabilities
    differ from the trainer's. They carry no gradient.
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap).detach()


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(π‖π_ref) for tokens drawn from π: → q − 1 − ln q ≥ 0, with
    q = exp(log_ratio) = π_ref / π. Its mean under π is the KL.
    """
    return log_ratio.expm1() - log_ratio  # expm1 keeps the digits that q − 1 loses near q = 1


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])
    print("rewards of two prompts, four samples each, and what each sample is worth:")
    print(rewards, advantages(rewards), sep="\n")
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    print("on-policy: the gradient of one answer of two tokens, of at most three, A = 1")
    for kind in LOSSES:
        divisor = normalizer(kind, mask.sum(1), max_new_tokens=3)
        loss, _ = policy_loss(logprobs, logprobs, torch.ones(1), mask, divisor, kind)
        print(f"   {kind:8}", *torch.autograd.grad(loss, logprobs))
