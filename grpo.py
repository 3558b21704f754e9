"""GRPO and its relatives: from rewards to a loss.

    A    = (r − mean of its group) / (std of its group + 1e-4)     one number per sampled answer
    ρ_t  = π_θ(token t) / π_old(token t)                           how far the policy has moved since sampling

    dapo      −Σ_i Σ_t min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A)   / Σ lengths           DAPO 2503.14476, eq. 8
    grpo      −Σ_i 1/|o_i| Σ_t min(ρA, clip(ρ, …)A)           / rows                GRPO 2402.03300, eq. 3
    dr_grpo   −Σ_i Σ_t min(ρA, clip(ρ, …)A)                   / (rows · max length) Dr. GRPO 2503.20783, §3.2
    gspo      −Σ_i min(s_i A, clip(s_i, …)A), s_i = exp(mean_t ln ρ_t)  / rows      GSPO 2507.18071, eq. 5
    cispo     −Σ_i Σ_t stopgrad(min(ρ, ρ_max)) A ln π_θ       / Σ lengths           CISPO 2506.13585, eq. 4

Each loss below returns a sum for each row; policy_loss adds the rows and divides by `normalizer`, one number
for the whole optimizer batch over all micro-batches and ranks. So the gradient does not depend on how the
batch is cut. Before the policy moves every ρ is 1: the loss of grpo and gspo is about 0, its gradient is not.

Rows are (B, T) with B = P·G, the row of prompt p and sample g is p·G + g. The mask comes from lengths, never
from token ids, and holds the sampled end token: it is an action like any other.

Left out: value networks, entropy bonuses, whole-batch reward scaling.
Needs: torch.
"""

import torch

# ε_low, ε_high of each clipped loss: DAPO's clip-higher, PPO's 0.2, GSPO §5.1; cispo has its own bound
CLIP = {"dapo": (0.2, 0.28), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2),
        "gspo": (3e-4, 4e-4), "cispo": (0.0, 0.0)}


def advantages(rewards, scale="group"):
    """(P, G) rewards → (P, G) advantages. A group whose rewards are equal gets exact zeros.

    scale: "group" divides by the group's unbiased std + 1e-4 (GRPO, DAPO), "none" does not (Dr. GRPO).
    ValueError: fewer than two samples in a group, unknown scale, a reward that is not finite.
    """
    P, G = rewards.shape
    if G < 2:
        raise ValueError(f"a group of {G} has no mean to compare with: take at least 2 samples per prompt")
    if scale not in ("group", "none"):
        raise ValueError(f"scale={scale!r} must be 'group' or 'none'")
    if not rewards.isfinite().all():
        raise ValueError(f"{int((~rewards.isfinite()).sum())} rewards are NaN or infinite: "
                         "see the task's reward()")
    rewards = rewards.double()                          # .1 and .1001 stay apart, a constant's std is tiny
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
    constant = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return centred.masked_fill(constant, 0).float()


def overlong_penalty(lengths, max_new_tokens, cache):
    """(B,) lengths → (B,) f64 ≤ 0, added to rewards: DAPO's soft punishment (eq. 13), −1 at full length."""
    return ((max_new_tokens - cache - lengths.double()) / cache).clamp(-1, 0)


def normalizer(loss_type, lengths, max_new_tokens):
    """What policy_loss divides by, for the whole optimizer batch. lengths (B,): trained tokens of each row;
    a row with none (a masked, truncated answer) counts nowhere. Sum it over ranks before use."""
    rows = (lengths > 0).sum()
    return {"dapo": lengths.sum(), "cispo": lengths.sum(), "grpo": rows, "gspo": rows,
            "dr_grpo": rows * max_new_tokens}[loss_type]


def policy_loss(logprobs, old_logprobs, advantages, mask, normalizer, loss_type="dapo", weights=None,
                clip_low=None, clip_high=None, cispo_max=5.0, ref_logprobs=None, beta=0.0):
    """→ (loss, clipped): this micro-batch's share of the loss (), and how many tokens the clip cut off ().

    logprobs, old_logprobs, ref_logprobs, weights (B, T) f32, advantages (B,), mask (B, T) bool. Only logprobs
    carries a gradient. weights: of truncated importance sampling; gspo takes the mean of an answer's. beta ·
    k3 is added against ref_logprobs. What stands outside the mask, NaN included, has no influence.
    """
    low = CLIP[loss_type][0] if clip_low is None else clip_low
    high = CLIP[loss_type][1] if clip_high is None else clip_high
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)                    # (B, T)
    weights = mask.float() if weights is None else torch.where(mask, weights.detach(), 0)  # (B, T)
    adv = advantages[:, None]                                                             # (B, 1)
    lengths = mask.sum(1).clamp(min=1)                                                    # (B,)
    if loss_type == "gspo":
        rows, clipped = gspo(log_ratio, advantages, weights, lengths, low, high)
    elif loss_type == "cispo":
        rows, clipped = cispo(log_ratio, adv, torch.where(mask, logprobs, 0), weights, cispo_max)
    else:  # dapo, grpo, dr_grpo
        rows, clipped = clipped_surrogate(log_ratio, adv, weights, low, high)
        rows = rows / lengths if loss_type == "grpo" else rows
    if beta:
        kl = kl_k3(torch.where(mask, ref_logprobs.detach() - logprobs, 0)).sum(1)         # (B,)
        rows = rows + beta * (kl / lengths if loss_type in ("grpo", "gspo") else kl)
    return rows.sum() / normalizer, clipped


def clipped_surrogate(log_ratio, adv, weights, low, high):
    """−Σ_t w · min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A): PPO's surrogate, the pessimistic one of two (B,)."""
    ratio = log_ratio.exp()
    clip = ratio.clamp(1 - low, 1 + high)
    objective = weights * torch.min(ratio * adv, clip * adv)                              # (B, T)
    clipped = (clip * adv < ratio * adv) & (weights > 0)                                  # (B, T)
    return -objective.sum(1), clipped.sum()


def gspo(log_ratio, adv, weights, lengths, low, high):
    """−min(sA, clip(s, …)A) with one ratio per answer, the geometric mean of its tokens' (B,)."""
    ratio = (log_ratio.sum(1) / lengths).exp()                                            # (B,)
    clip = ratio.clamp(1 - low, 1 + high)
    objective = weights.sum(1) / lengths * torch.min(ratio * adv, clip * adv)             # (B,)
    clipped = (clip * adv < ratio * adv) * (weights > 0).sum(1)                           # (B,) tokens
    return -objective, clipped.sum()


def cispo(log_ratio, adv, logprobs, weights, cispo_max):
    """−Σ_t w · stopgrad(min(ρ, ρ_max)) A ln π: every token keeps its gradient, with a bounded weight (B,)."""
    ratio = log_ratio.detach().exp()
    objective = weights * ratio.clamp(max=cispo_max) * adv * logprobs                     # (B, T)
    clipped = (ratio > cispo_max) & (weights > 0)                                         # (B, T)
    return -objective.sum(1), clipped.sum()


def importance_weights(old_logprobs, sampled_logprobs, cap=2.0):
    """min(π_old / π_sampler, cap) (B, T), no gradient: truncated importance sampling (Yao et al. 2025)."""
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap).detach()


def kl_k3(log_ratio):
    """q − 1 − ln q, q = exp(log_ratio) = π_ref/π: unbiased for KL(π‖π_ref) under π and ≥ 0 (Schulman)."""
    return log_ratio.expm1() - log_ratio                # expm1: where q is near 1, q − 1 would cancel


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    print("rewards of three prompts, four samples each, and what each sample is worth:")
    for r, a in zip(rewards.tolist(), advantages(rewards).tolist(), strict=True):
        print("  ", r, " → ", [round(v, 2) for v in a])
    adv = advantages(rewards).flatten()
    logprobs = torch.full((12, 3), -1.0, requires_grad=True)
    lengths = torch.arange(12) % 3 + 1
    mask = torch.arange(3) < lengths[:, None]
    print("on-policy: the loss, and the gradient of the first answer's three tokens (one is not padding)")
    for kind in CLIP:
        loss, _ = policy_loss(logprobs, logprobs, adv, mask, normalizer(kind, lengths, 3), kind)
        grad, = torch.autograd.grad(loss, logprobs)
        print(f"   {kind:8} {loss:+.4f}", [round(v, 4) for v in grad[0].tolist()])
