"""GRPO and its relatives: from the rewards of a group of answers to a loss.

    A    = (r − mean of its group) / (std of its group + 1e-4)  advantage: one number per answer
    ρ_t  = π_θ(token t) / π_old(token t)                        ratio: the policy's move since "old"

    dapo     −Σ_i Σ_t min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) / Σ lengths      DAPO 2503.14476, eq. 8
    grpo     −Σ_i 1/|o_i| Σ_t min(ρA, clip(ρ, …)A)         / rows           GRPO 2402.03300, eq. 3
    dr_grpo  −Σ_i Σ_t min(ρA, clip(ρ, …)A)          / (rows · max length)  Dr. GRPO 2503.20783, §3.2
    gspo     −Σ_i min(s_i A, clip(s_i, …)A)                / rows           GSPO 2507.18071, eq. 5
             s_i = exp(mean_t ln ρ_t)
    cispo    −Σ_i Σ_t stopgrad(min(ρ, ρ_max)) A ln π_θ     / Σ lengths      CISPO 2506.13585, eq. 4

A loss is a sum over its rows divided by `normalizer`, one number for the whole optimizer batch,
over all micro-batches and ranks. So the gradient does not depend on how the batch is cut. While the
policy has not moved, every ρ is 1: the value of a centred grpo or gspo loss is then about 0, but
its gradient is not.

Tensors are (B, T) with B = P·G: sample g of prompt p is row p·G + g. Build the mask from lengths,
never from token ids: padding may have the end token's id. The sampled end token is an action too
and is not masked.

Left out: value networks, entropy bonuses, whole-batch reward scaling.
Needs: torch.
"""

import torch

# (ε_low, ε_high) by default: DAPO's clip-higher, PPO's 0.2, GSPO §5.1; cispo has no ε
CLIP = {
    "dapo": (0.2, 0.28),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 0.0),
}
CISPO_MAX = 5.0  # ρ_max, the largest weight of a token in cispo


def advantages(rewards, scale="group"):
    """Rewards (P, G) → advantages (P, G) f32. A group whose rewards are all equal gets exact zeros.

    scale: "group" divides by the group's unbiased std + 1e-4 (GRPO, DAPO), "none" does not (Dr.
    GRPO). ValueError: fewer than two samples in a group, unknown scale, a reward that is NaN or
    infinite.
    """
    P, G = rewards.shape
    if G < 2:
        raise ValueError(
            f"a group of {G} has no mean to compare with: take at least 2 samples per prompt"
        )
    if scale not in ("group", "none"):
        raise ValueError(f"scale={scale!r} must be 'group' or 'none'")
    if not rewards.isfinite().all():
        raise ValueError(
            f"{int((~rewards.isfinite()).sum())} rewards are NaN or infinite: "
            "see the task's reward()"
        )
    rewards = rewards.double()  # float32 would round the mean of close rewards
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (rewards.std(1, keepdim=True) + 1e-4)
    # Set equal rewards to exact zeros: 0.1 minus a rounded mean would be tiny, and AdamW would
    # rescale a tiny gradient to a full step.
    constant = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return centred.masked_fill(constant, 0).float()


def overlong_penalty(lengths, max_new_tokens, cache):
    """DAPO's soft overlong punishment (eq. 13): lengths (B,) → (B,) f64 to add to rewards, 0 for an
    answer that leaves `cache` of max_new_tokens unused, falling linearly to −1 for one that uses
    them all.
    """
    return ((max_new_tokens - cache - lengths.double()) / cache).clamp(-1, 0)


def normalizer(loss_type, lengths, max_new_tokens):
    """→ scalar, policy_loss's divisor for a whole optimizer batch: sum it over ranks. lengths (B,):
    trained tokens of each row; a row with none (a truncated answer that is masked out) is not
    counted.
    """
    rows = (lengths > 0).sum()
    if loss_type in ("dapo", "cispo"):
        return lengths.sum()
    return rows * max_new_tokens if loss_type == "dr_grpo" else rows


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    normalizer,
    loss_type="dapo",
    weights=None,
    clip_low=None,
    clip_high=None,
    ref_logprobs=None,
    beta=0.0,
):
    """→ (loss, clipped), two scalars: this micro-batch's share of the loss, the number of clipped
    tokens.

    logprobs, old_logprobs (B, T) f32: of the policy now and of the "old" one. advantages: (B,) f32.
    mask: (B, T) bool, the answer tokens that are trained. normalizer: see there. weights: (B, T)
    f32, of truncated importance sampling, None for 1; gspo averages them over an answer. clip_low,
    clip_high: ε_low, ε_high; None: CLIP's. beta: coefficient of the KL (k3) to ref_logprobs (B, T).

    Gradients flow through logprobs alone. Values outside the mask, even NaN, have no influence.
    """
    low, high = CLIP[loss_type]
    if clip_low is not None:
        low = clip_low
    if clip_high is not None:
        high = clip_high
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)  # (B, T)
    weights = mask.float() if weights is None else torch.where(mask, weights.detach(), 0)  # (B, T)
    adv = advantages[:, None]  # (B, 1)
    lengths = mask.sum(1).clamp(min=1)  # (B,)
    if loss_type == "gspo":
        rows, clipped = gspo(log_ratio, advantages, weights, lengths, low, high)
    elif loss_type == "cispo":
        rows, clipped = cispo(log_ratio, adv, torch.where(mask, logprobs, 0), weights)
    else:  # dapo, grpo, dr_grpo
        rows, clipped = clipped_surrogate(log_ratio, adv, weights, low, high)
        if loss_type == "grpo":
            rows = rows / lengths
    if beta:
        kl = kl_k3(torch.where(mask, ref_logprobs.detach() - logprobs, 0)).sum(1)  # (B,)
        if loss_type in ("grpo", "gspo"):  # a mean over the answer's tokens
            kl = kl / lengths
        rows = rows + beta * kl
    return rows.sum() / normalizer, clipped


def clipped_surrogate(log_ratio, adv, weights, low, high):
    """→ −Σ_t w · min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) (B,), PPO's surrogate; number of clipped
    tokens ().
    """
    ratio = log_ratio.exp()
    clip = ratio.clamp(1 - low, 1 + high)
    objective = weights * torch.min(ratio * adv, clip * adv)  # (B, T)
    clipped = (clip * adv < ratio * adv) & (weights > 0)  # (B, T)
    return -objective.sum(1), clipped.sum()


def gspo(log_ratio, adv, weights, lengths, low, high):
    """→ −mean(w) · min(sA, clip(s, …)A) (B,), s: geometric mean of ratios; number of clipped tokens
    ().
    """
    ratio = (log_ratio.sum(1) / lengths).exp()  # (B,)
    clip = ratio.clamp(1 - low, 1 + high)
    objective = weights.sum(1) / lengths * torch.min(ratio * adv, clip * adv)  # (B,)
    clipped = (clip * adv < ratio * adv) * (weights > 0).sum(1)  # (B,) tokens
    return -objective, clipped.sum()


def cispo(log_ratio, adv, logprobs, weights):
    """→ −Σ_t w · stopgrad(min(ρ, ρ_max)) A ln π (B,): bounded weights; number of tokens at the
    bound ().
    """
    ratio = log_ratio.detach().exp()
    objective = weights * ratio.clamp(max=CISPO_MAX) * adv * logprobs  # (B, T)
    clipped = (ratio > CISPO_MAX) & (weights > 0)  # (B, T)
    return -objective.sum(1), clipped.sum()


def importance_weights(old_logprobs, sampled_logprobs, cap=2.0):
    """→ min(π_old / π_sampler, cap) (B, T), no gradient: truncated importance sampling (Yao et al.
    2025).
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap).detach()


def kl_k3(log_ratio):
    """→ q − 1 − ln q with q = exp(log_ratio) = π_ref/π: ≥ 0, with mean KL(π‖π_ref) under π
    (Schulman's k3).
    """
    return log_ratio.expm1() - log_ratio  # expm1 keeps the digits that q − 1 loses near q = 1


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    print("rewards of three prompts, four samples each, and what each sample is worth:")
    for r, a in zip(rewards.tolist(), advantages(rewards).tolist(), strict=True):
        print("  ", r, " → ", [round(v, 2) for v in a])
    adv = advantages(rewards).flatten()
    logprobs = torch.full((12, 3), -1.0, requires_grad=True)
    lengths = torch.arange(12) % 3 + 1
    mask = torch.arange(3) < lengths[:, None]
    print("on-policy: the loss, and the gradient of the first answer, one token and two of padding")
    for kind in CLIP:
        loss, _ = policy_loss(logprobs, logprobs, adv, mask, normalizer(kind, lengths, 3), kind)
        (grad,) = torch.autograd.grad(loss, logprobs)
        print(f"   {kind:8} {loss:+.4f}", [round(v, 4) for v in grad[0].tolist()])
