"""Advantages and losses against numbers worked out by hand and the papers' formulas."""

import math

import pytest
import torch
from torch.nn.functional import pad

import grpo
from rollout import Rollout

LOSSES = ["dapo", "grpo", "dr_grpo", "gspo", "cispo"]
LENGTHS = torch.tensor([4, 1, 6, 0, 3, 6])  # one answer is masked out
MAX = 6


def batch(spread=0.5):
    """→ ([new, old, ref, weights], advantages, mask): off-policy, float64, NaN outside the mask."""
    mask = torch.arange(MAX) < LENGTHS[:, None]
    new, old, ref = (torch.randn(6, MAX, dtype=torch.float64) * spread - 2 for _ in range(3))
    weights = torch.rand(6, MAX, dtype=torch.float64) * 2
    poisoned = [torch.where(mask, t, math.nan) for t in (new, old, ref, weights)]
    poisoned[0].requires_grad_()
    return poisoned, torch.randn(6, dtype=torch.float64), mask


def gradient(logprobs, old, adv, mask, normalizer, kind, **options):
    loss, _ = grpo.policy_loss(logprobs, old, adv, mask, normalizer, kind, **options)
    return torch.autograd.grad(loss, logprobs)[0]


def papers_loss(kind, new, old, ref, weights, adv, low, high, cispo_max, beta):
    """The papers' objectives, row by row and token by token, negated, divided by each paper's own
    divisor.
    """
    total, tokens, rows = 0, int(LENGTHS.sum()), int((LENGTHS > 0).sum())
    divisor = {"dapo": tokens, "cispo": tokens, "grpo": rows, "gspo": rows, "dr_grpo": rows * MAX}[
        kind
    ]
    for i, n in enumerate(LENGTHS.tolist()):
        objective, per_row = 0, 1 / n if kind in ("grpo", "gspo") and n else 1
        if kind == "gspo" and n:  # one ratio per answer, times its mean weight
            s = torch.exp(sum(new[i, t] - old[i, t] for t in range(n)) / n)
            objective += weights[i, :n].sum() * torch.min(
                s * adv[i], s.clamp(1 - low, 1 + high) * adv[i]
            )
        for t in range(n):
            ratio = torch.exp(new[i, t] - old[i, t])
            if kind == "cispo":
                objective += (
                    weights[i, t] * ratio.detach().clamp(max=cispo_max) * adv[i] * new[i, t]
                )
            elif kind != "gspo":
                clipped = ratio.clamp(1 - low, 1 + high)
                objective += weights[i, t] * torch.min(ratio * adv[i], clipped * adv[i])
            objective -= beta * (torch.exp(ref[i, t] - new[i, t]) - (ref[i, t] - new[i, t]) - 1)
        total -= objective * per_row
    return total / divisor


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_each_loss_equals_its_papers_formula_however_the_batch_is_cut(kind, beta, monkeypatch):
    """Value and gradient, off-policy, with weights and KL, agree to 1e-12; NaN in padding is
    ignored.

    One batch, or micro-batches of 1 or 2 rows in any order, with more padding. The row of length 0,
    a masked answer, counts neither above nor below.
    """
    monkeypatch.setattr(grpo, "CISPO_MAX", 1.5)
    (new, old, ref, weights), adv, mask = batch()
    n = grpo.normalizer(kind, LENGTHS, MAX)
    want = papers_loss(kind, new, old, ref, weights, adv, 0.1, 0.3, 1.5, beta)
    expected = torch.autograd.grad(want, new)[0].nan_to_num()
    for rows, size, width in (
        (torch.arange(6), 6, 0),
        (torch.arange(6), 2, 3),
        (torch.randperm(6), 1, 5),
    ):
        value, new.grad = 0, None
        for part in rows.split(size):
            a, b, c, w = (
                pad(t[part], (0, width), value=math.nan) for t in (new, old, ref, weights)
            )
            loss, _ = grpo.policy_loss(
                a,
                b,
                adv[part],
                pad(mask[part], (0, width)),
                n,
                kind,
                w,
                clip_low=0.1,
                clip_high=0.3,
                ref_logprobs=c,
                beta=beta,
            )
            loss.backward()
            value += loss.detach()
        assert (value - want).abs() < 1e-12 and (new.grad - expected).abs().max() < 1e-12
        assert (new.grad[mask] != 0).any() and (new.grad[~mask] == 0).all()
    assert grpo.normalizer(kind, LENGTHS[LENGTHS == 0], MAX) == 0


def test_advantages_worked_out_by_hand():
    """(1, 0, 0, 0) has mean ¼ and unbiased std ½. Rewards .1 and .1001 get different advantages."""
    rewards = torch.tensor([[1.0, 0, 0, 0], [3, 1, 1, 3]])
    a, b = 0.75 / 0.5001, 1 / (math.sqrt(4 / 3) + 1e-4)
    want = torch.tensor([[a, -a / 3, -a / 3, -a / 3], [b, -b, -b, b]])
    assert (grpo.advantages(rewards) - want).abs().max() < 1e-6  # fp32 rounds by 1.2e-7 near 1.5
    assert grpo.advantages(rewards, scale="none").tolist() == [
        [0.75, -0.25, -0.25, -0.25],
        [1, -1, -1, 1],
    ]
    # the std of (.1, .1001) is 7.07e-5: ± 5e-5 / 1.707e-4; fp32 rounds the rewards by 4e-5 of that
    near = grpo.advantages(torch.tensor([[0.1, 0.1001]]))[0]
    assert near.tolist() == pytest.approx([-0.2929, 0.2929], rel=1e-3)


def test_a_group_of_equal_rewards_gets_exact_zeros():
    """Even for .1, which floating-point means do not reproduce, and if groups differ from each
    other.
    """
    for dtype in (torch.float32, torch.float64):
        for G in (2, 3, 7):
            rewards = torch.tensor([[0.0], [1.0], [0.1], [1e4], [-2.3]], dtype=dtype).expand(5, G)
            assert (grpo.advantages(rewards) == 0).all()


def test_a_group_is_normalised_by_itself_and_rows_keep_their_order():
    """A shift of one prompt's rewards changes nothing; flattened, row p·G + g is sample g of prompt
    p.
    """
    rewards = torch.randn(3, 4, dtype=torch.float64)
    a = grpo.advantages(rewards)
    assert (grpo.advantages(rewards + torch.tensor([[0.0], [5.0], [-9.0]])) - a).abs().max() < 1e-6
    for p in range(3):
        assert torch.equal(a.flatten()[4 * p : 4 * p + 4], grpo.advantages(rewards[p : p + 1])[0])
        assert torch.equal(a[p].argsort(), rewards[p].argsort()) and a[p].sum().abs() < 1e-6


@pytest.mark.parametrize(
    "rewards, scale, words",
    [
        ([[1.0], [0.0]], "group", "group of 1"),
        ([[1.0, math.nan]], "group", "1 rewards are NaN"),
        ([[1.0, math.inf]], "none", "1 rewards"),
        ([[1.0, 0.0]], "batch", "'batch'"),
    ],
)
def test_what_advantages_refuses_it_names(rewards, scale, words):
    with pytest.raises(ValueError, match=words):
        grpo.advantages(torch.tensor(rewards), scale)


def test_on_policy_gradients_are_reinforce():
    """At ρ = 1 a token's gradient is −A / Σ lengths (dapo, cispo), −A / (|o| · rows) (grpo, gspo)
    or
    −A / (rows · max length) (dr_grpo). With equal lengths all agree; centred advantages make the
    loss 0.
    """
    (new, *_), adv, mask = batch()
    row_mean = LENGTHS.clamp(min=1)[:, None] * 5
    for kind, divisor in dict(
        dapo=20, cispo=20, dr_grpo=5 * MAX, grpo=row_mean, gspo=row_mean
    ).items():
        grad = gradient(new, new.detach(), adv, mask, grpo.normalizer(kind, LENGTHS, MAX), kind)
        assert (grad - -adv[:, None] * mask / divisor).abs().max() < 1e-15
    full = torch.ones(6, MAX, dtype=torch.bool)
    same = torch.full((6,), MAX)
    logprobs = torch.randn(6, MAX, dtype=torch.float64, requires_grad=True)
    centred = adv - adv.mean()
    for kind in LOSSES:
        n = grpo.normalizer(kind, same, MAX)
        grad = gradient(logprobs, logprobs, centred, full, n, kind)
        assert (grad + centred[:, None] / 36).abs().max() < 1e-15
        if kind != "cispo":  # its value is Σ A ln π
            assert grpo.policy_loss(logprobs, logprobs, centred, full, n, kind)[0].abs() < 1e-15


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_the_clip_stops_the_gradient_on_the_gaining_side_only(kind):
    """Clipped: a good answer that is likelier already, a bad one that is rarer. 1.25 is within .28
    only.
    """
    mask = torch.ones(1, 3, dtype=torch.bool)
    for sign, ratio, stopped in (
        (1, 1.29, True),
        (1, 0.5, False),
        (1, 1.25, kind != "dapo"),
        (-1, 0.79, True),
        (-1, 0.81, kind == "gspo"),
        (-1, 1.35, False),
    ):
        new = torch.full((1, 3), math.log(ratio), dtype=torch.float64, requires_grad=True)
        adv = torch.tensor([float(sign)])
        loss, clipped = grpo.policy_loss(new, torch.zeros(1, 3), adv, mask, 3, kind)
        (grad,) = torch.autograd.grad(loss, new)
        assert clipped == 3 * stopped
        assert (grad == 0).all() if stopped else (grad * sign < 0).all()


def test_gspos_bounds_are_tiny_and_cispo_never_loses_a_token():
    """gspo clips at 1 + 4e-4 and 1 − 3e-4. cispo bounds a token's weight at 5 but keeps its
    gradient.
    """
    ones, adv = torch.ones(1, 2).bool(), torch.tensor([1.0])
    for log_ratio, sign, stopped in (
        (3.8e-4, 1, 0),
        (4.2e-4, 1, 2),
        (-2.8e-4, -1, 0),
        (-3.2e-4, -1, 2),
    ):
        new = torch.full((1, 2), log_ratio, dtype=torch.float64)
        assert grpo.policy_loss(new, torch.zeros(1, 2), sign * adv, ones, 1, "gspo")[1] == stopped
    new = torch.tensor([[2.0, 0.5]], requires_grad=True)
    loss, clipped = grpo.policy_loss(new, torch.zeros(1, 2), adv, ones, 1, "cispo")
    assert clipped == 1  # e² = 7.4 > 5 > e^.5
    assert torch.autograd.grad(loss, new)[0][0].tolist() == pytest.approx(
        [-5, -math.exp(0.5)], rel=1e-6
    )


def test_importance_weights_are_capped_and_carry_no_gradient():
    """Ratios ½, 1, 1.9, 5 → ½, 1, 1.9, 2. No gradient flows through the weights of a loss."""
    old = torch.tensor([0.5, 1, 1.9, 5], dtype=torch.float64).log().requires_grad_()
    weights = grpo.importance_weights(old, torch.zeros(4))
    assert (
        weights.tolist() == pytest.approx([0.5, 1, 1.9, 2], rel=1e-12) and not weights.requires_grad
    )
    new = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    live = torch.rand(1, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 4).bool()
    loss, _ = grpo.policy_loss(new, new.detach(), torch.ones(1), mask, 4, weights=2 * live)
    grad, reached = torch.autograd.grad(loss, (new, live), allow_unused=True)
    assert reached is None and torch.equal(grad, -2 * live.detach() / 4)


def test_k3_is_an_unbiased_kl_that_is_never_negative():
    """Σ p · k3(ln ref/p) = Σ p ln p/ref for random distributions over 7 tokens; 0 where both
    agree.
    """
    p, ref = torch.randn(2, 7, dtype=torch.float64).softmax(-1)
    assert ((p * grpo.kl_k3((ref / p).log())).sum() - (p * (p / ref).log()).sum()).abs() < 1e-15
    q = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert grpo.kl_k3(torch.zeros(1)) == 0
    assert (grpo.kl_k3(q) >= 0).all() and grpo.kl_k3(q)[[0, -1]].min() > 1


def test_the_soft_overlong_penalty_of_dapo():
    """DAPO, eq. 13 with L_max = 20, L_cache = 4: 0 up to 16 tokens, then (16 − n)/4, −1 from 20
    on.
    """
    lengths = torch.tensor([0, 15, 16, 17, 18, 19, 20, 25])
    got = grpo.overlong_penalty(lengths, max_new_tokens=20, cache=4)
    assert got.tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_the_end_token_is_trained():
    """Its id, 2, is also the padding's. Three tokens and the end token have 4 tokens in the
    mask.
    """
    tokens = torch.tensor([[5, 2, 6, 7, 8, 9, 2, 2, 2], [5, 2, 6, 10, 2, 2, 2, 2, 2]])
    lengths, prompts = torch.tensor([4, 2]), torch.tensor([3, 3])
    mask = Rollout(tokens, None, lengths, None, prompts).answer_mask()
    assert mask.nonzero().tolist() == [[0, 3], [0, 4], [0, 5], [0, 6], [1, 3], [1, 4]]
