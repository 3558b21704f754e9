"""GRPO and its relatives: from the rewards of a group of answers to a loss.

    A    = (r − mean of its group) / (std of its group + 1e-4)  advantage: one number per answer;
                                                                dr_grpo does not divide
    ρ_t  = π_θ(token t) / π_old(token t)                        ratio: the policy's move since "old"

    dapo     −Σ_i Σ_t min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) / Σ lengths      DAPO 2503.14476, eq. 8
    grpo     −Σ_i 1/|o_i| Σ_t min(ρA, clip(ρ, …)A)         / rows           GRPO 2402.03300, eq. 3
    dr_grpo  −Σ_i Σ_t min(ρA, clip(ρ, …)A)          / (rows · max length)  Dr. GRPO 2503.20783, §3.2
    gspo     −Σ_i min(s_i A, clip(s_i, …)A)                / rows           GSPO 2507.18071, eq. 5
             s_i = exp(mean_t ln ρ_t)
    cispo    −Σ_i Σ_t stopgrad(min(ρ, ρ_max)) A ln π_θ     / Σ lengths      CISPO 2506.13585, eq. 4

Σ_i sums over answers, Σ_t over the tokens of an answer, |o_i| is its length. A loss here is the sum
over its rows divided by `normalizer`, one number for the whole optimizer batch, over all
micro-batches and ranks. So the gradient does not depend on how the batch is cut.

"old" is the policy before the first update on these answers. By default train.py makes no second
update. In the first one the policy has not moved: every ρ is 1, no clip acts, and the gradient is
that of REINFORCE, A ∇ ln π. The value of a centered grpo or gspo loss is then about 0, but its
gradient is not. The clip acts from the second update on. With --correction bypass, train.py takes
the sampler's log-probabilities for "old", so that the clip can act in the first update, too.

Tensors are (B, T): B answers, any part of the batch, by T tokens. Build the mask from lengths,
never from token ids: padding may have the end token's id. The sampled end token is an action too
and is not masked.

Left out: value networks, entropy bonuses, whole-batch reward scaling.
Needs: torch.
"""

import torch

# loss type → (ε_low, ε_high) by default: DAPO's clip-higher, PPO's 0.2, GSPO §5.1. cispo has no ε.
CLIP = {
    "dapo": (0.2, 0.28),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (0.0, 0.0),
}
# ρ_max, the largest weight of a token in cispo: ε_max of ScaleRL (arXiv 2510.13786), which TRL
# recommends too. The CISPO paper gives no number.
CISPO_MAX = 5.0


def advantages(rewards, scale="group"):
    """Rewards (P, G) of any dtype → advantages (P, G) f32: how much better than its group a sample
    is. A group whose rewards are all equal gets exact zeros.

    scale: "group" divides by the group's unbiased std + 1e-4 (GRPO, DAPO), "none" does not (Dr.
    GRPO).

    ValueError: fewer than two samples in a group, unknown scale, a reward that is NaN or infinite.
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
    centered = rewards - rewards.mean(1, keepdim=True)
    if scale == "group":
        centered = centered / (rewards.std(1, keepdim=True) + 1e-4)
    # Equal rewards must give exact zeros. 0.1 minus a rounded mean is tiny but not 0, and AdamW
    # would rescale the tiny gradient to a full step.
    constant = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)
    return centered.masked_fill(constant, 0).float()


def overlong_penalty(lengths, max_new_tokens, cache):
    """DAPO's soft overlong punishment (eq. 13): lengths (B,) → (B,) f64, to add to rewards.

    0 for an answer that leaves `cache` or more of its max_new_tokens tokens unused, falling
    linearly to −1 for one that uses them all.
    """
    return ((max_new_tokens - cache - lengths.double()) / cache).clamp(-1, 0)


def normalizer(loss_type, lengths, max_new_tokens):
    """→ () int64, policy_loss's divisor, the denominator that ends each formula at the top of this
    file.

    lengths (B,) int64: trained tokens of each row of the whole optimizer batch, before it is cut
    into micro-batches. A row with none (a truncated answer that is masked out) is not counted. With
    several ranks, sum the result over the ranks.
    """
    if loss_type in ("dapo", "cispo"):
        return lengths.sum()
    rows = (lengths > 0).sum()
    if loss_type == "dr_grpo":
        return rows * max_new_tokens
    return rows


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
    """The loss of some rows of an optimizer batch → (loss () f32, clipped () int64).

    loss: the sum over these rows / normalizer, so losses of micro-batches add up to the batch's.
    clipped: how many trained tokens the clip keeps from moving (cispo: whose weight it bounds).

    logprobs (B, T) f32: ln π_θ of each token, of the policy that learns. Only they get a gradient.
    old_logprobs (B, T) f32: ln π_old. advantages (B,) f32: of each row. mask (B, T) bool: the
    answer tokens that are trained; values elsewhere, even NaN, have no influence. normalizer: what
    normalizer() returns, or a number. loss_type: a key of CLIP, else KeyError. weights (B, T) f32:
    from importance_weights, or None for 1; gspo takes their mean over an answer. clip_low,
    clip_high: ε_low and ε_high, or None for CLIP's. ref_logprobs (B, T) f32: ln π_ref, read if beta
    is not 0. beta: the KL penalty's coefficient: beta times the sum (grpo, gspo: the mean) of a
    row's kl_k3 is added to the row's loss, before the division by normalizer.
    """
    low, high = CLIP[loss_type]
    if clip_low is not None:
        low = clip_low
    if clip_high is not None:
        high = clip_high
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)  # (B, T)
    weights = mask.float() if weights is None else torch.where(mask, weights.detach(), 0)  # (B, T)
    lengths = mask.sum(1).clamp(min=1)  # (B,); 1 for a row without trained tokens, whose sums are 0
    # rows (B,): each row's loss, before the division by normalizer
    if loss_type == "gspo":
        rows, clipped = gspo(log_ratio, advantages, weights, lengths, low, high)
    elif loss_type == "cispo":
        rows, clipped = cispo(log_ratio, advantages, weights, torch.where(mask, logprobs, 0))
    else:
        rows, clipped = clipped_surrogate(log_ratio, advantages, weights, low, high)
        if loss_type == "grpo":
            rows = rows / lengths
    if beta:
        kl = kl_k3(torch.where(mask, ref_logprobs.detach() - logprobs, 0)).sum(1)  # (B,)
        if loss_type in ("grpo", "gspo"):  # a mean over the answer's tokens
            kl = kl / lengths
        rows = rows + beta * kl
    return rows.sum() / normalizer, clipped


# The losses return rows, (B,) f32, a loss for each row, and the number of clipped tokens, () int64.
# log_ratio (B, T) is ln ρ, advantages are (B,), weights w are (B, T). In masked places ln ρ and w
# are 0.


def clipped_surrogate(log_ratio, advantages, weights, low, high):
    """PPO's surrogate, of dapo, grpo and dr_grpo: rows are −Σ_t w · min(ρA, clip(ρ, …)A)."""
    objective, stopped = clip_objective(log_ratio.exp(), advantages[:, None], low, high)  # (B, T)
    return -(weights * objective).sum(1), (stopped & (weights > 0)).sum()


def gspo(log_ratio, advantages, weights, lengths, low, high):
    """GSPO clips whole answers: rows are −mean(w) · min(sA, clip(s, …)A), where s is the geometric
    mean of an answer's ratios. lengths (B,): trained tokens of each row, all clipped together.
    """
    s = (log_ratio.sum(1) / lengths).exp()  # (B,)
    objective, stopped = clip_objective(s, advantages, low, high)  # (B,)
    mean_weight = weights.sum(1) / lengths
    return -(mean_weight * objective), (stopped * (weights > 0).sum(1)).sum()


def clip_objective(ratio, advantages, low, high):
    """→ min(ρA, clip(ρ, 1 − low, 1 + high) A); bool: where the second is the smaller one.

    There the objective no longer depends on ρ, so its gradient is 0: a good answer that is likelier
    already, or a bad one that is rarer, moves no further.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return torch.min(unclipped, clipped), clipped < unclipped


def cispo(log_ratio, advantages, weights, logprobs):
    """CISPO bounds a token's weight and keeps its gradient: rows are
    −Σ_t w · stopgrad(min(ρ, ρ_max)) A ln π. logprobs (B, T): ln π, 0 where masked.
    """
    ratio = log_ratio.detach().exp()
    objective = weights * ratio.clamp(max=CISPO_MAX) * advantages[:, None] * logprobs  # (B, T)
    return -objective.sum(1), ((ratio > CISPO_MAX) & (weights > 0)).sum()


def importance_weights(old_logprobs, sampled_logprobs, cap=2.0):
    """Truncated importance sampling (Yao et al. 2025): → min(π_old / π_sampler, cap) (B, T) f32.

    old_logprobs, sampled_logprobs (B, T) f32. The weights correct for a sampler whose probabilities
    differ from the trainer's. They carry no gradient.
    """
    return (old_logprobs - sampled_logprobs).exp().clamp(max=cap).detach()


def kl_k3(log_ratio):
    """Schulman's k3 estimate of KL(π‖π_ref) for tokens drawn from π: → q − 1 − ln q ≥ 0, with
    q = exp(log_ratio) = π_ref / π. Its mean under π is the KL.
    """
    return log_ratio.expm1() - log_ratio  # expm1 keeps the digits that q − 1 loses near q = 1


if __name__ == "__main__":
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    print("rewards of three prompts, four samples each, and what each sample is worth:")
    print(rewards, advantages(rewards), sep="\n")
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    print("on-policy: the gradient of an answer of two tokens and padding, A = 1")
    for kind in CLIP:
        loss, _ = policy_loss(logprobs, logprobs, torch.ones(1), mask, 2, kind)
        print(f"   {kind:8}", *torch.autograd.grad(loss, logprobs))
