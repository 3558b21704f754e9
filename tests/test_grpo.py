"""Advantages and losses against numbers worked out by hand and the papers' formulas."""

import math

import pytest
import torch
from torch.nn.functional import pad

import grpo
from rollout import Rollout

LENGTHS = torch.tensor([4, 1, 6, 0, 3, 6])  # of 6 answers, one of which is masked out
MAX = 6
MASK = torch.arange(MAX) < LENGTHS[:, None]


def random_tokens(scale=0.5):
    """→ (6, MAX) f64 with a gradient, NaN outside the mask."""
    values = torch.randn(6, MAX, dtype=torch.float64) * scale - 2
    return torch.where(MASK, values, math.nan).requires_grad_()


def papers_loss(kind, new, old, weights, ref, adv, beta, lengths=LENGTHS, longest=MAX):
    """The papers' objectives, negated, answer by answer without masks, divided by each paper's own
    divisor. ε is .1 and .3, ρ_max 1.5. lengths: of the answers; longest: what they may have.
    """
    total = 0
    for i, n in enumerate(lengths):
        log_p, log_ratio = new[i, :n], (new - old)[i, :n]
        if kind == "gspo":  # one ratio for all tokens of an answer
            log_ratio = log_ratio.mean()
        ratio, log_q = log_ratio.exp(), ref[i, :n] - log_p
        objective = torch.min(ratio * adv[i], ratio.clamp(0.9, 1.3) * adv[i])
        if kind == "cispo":
            objective = ratio.detach().clamp(max=1.5) * adv[i] * log_p
        tokens = weights[i, :n] * objective - beta * (log_q.exp() - log_q - 1)
        total -= tokens.sum() / (n.clamp(min=1) if kind in ("grpo", "gspo") else 1)
    tokens, answers = lengths.sum(), (lengths > 0).sum()
    divisors = {"dapo": tokens, "cispo": tokens, "grpo": answers, "gspo": answers}
    divisors["dr_grpo"] = answers * longest
    assert kind in divisors, f"{kind}: write its paper's formula here"
    return total / divisors[kind]


def test_a_loss_without_a_formula_here_gets_none():
    given = [random_tokens() for _ in range(4)]
    with pytest.raises(AssertionError, match="sapo: write its paper's formula here"):
        papers_loss("sapo", *given, torch.zeros(6), 0.0)


@pytest.mark.parametrize("kind", grpo.LOSSES)
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_each_loss_equals_its_papers_formula_however_the_batch_is_cut(kind, beta, monkeypatch):
    """Value and gradient, off-policy, with weights and KL, whose inputs get no gradient; NaN in
    padding is ignored.

    One batch, or micro-batches of 1 or 2 rows in any order, with more padding. The row of length 0,
    a masked answer, counts neither above nor below.
    """
    monkeypatch.setattr(grpo, "CISPO_MAX", 1.5)
    given = random_tokens(), random_tokens(), -random_tokens(0.1), random_tokens()
    adv = torch.randn(6, dtype=torch.float64)
    want = papers_loss(kind, *given, adv, beta)
    (expected,) = torch.autograd.grad(want, given[0])
    n = grpo.normalizer(kind, LENGTHS, MAX)
    for rows, size, width in (
        (torch.arange(6), 6, 0),
        (torch.arange(6), 2, 3),
        (torch.randperm(6), 1, 5),
    ):
        value, leaves = 0, [t.detach().requires_grad_() for t in given]
        for part in rows.split(size):
            new, old, weights, ref = (pad(t[part], (0, width), value=math.nan) for t in leaves)
            mask = pad(MASK[part], (0, width))
            options = dict(clip_low=0.1, clip_high=0.3, ref_logprobs=ref, beta=beta)
            loss, _ = grpo.policy_loss(new, old, adv[part], mask, n, kind, weights, **options)
            loss.backward()
            value += loss.detach()
        found, *others = (t.grad for t in leaves)
        assert (value - want).abs() < 1e-12 and others == [None] * 3
        assert (found - expected.nan_to_num()).abs().max() < 1e-12
        assert (found[MASK] != 0).any() and (found[~MASK] == 0).all()
    assert grpo.normalizer(kind, LENGTHS[LENGTHS == 0], MAX) == 0


@pytest.mark.parametrize("kind", grpo.LOSSES)
def test_on_policy_gradients_are_reinforce(kind):
    """At ρ = 1 a token's gradient is −A / the normalizer, of a loss that counts answers also / |o|.
    So a good answer's tokens become likelier, whatever the loss.
    """
    new, adv = random_tokens(), torch.randn(6, dtype=torch.float64)
    *_, counted = grpo.LOSSES[kind]
    n = {"tokens": 20, "answers": 5, "max_tokens": 5 * MAX}[counted]
    per_answer = LENGTHS.clamp(min=1)[:, None] if counted == "answers" else 1
    loss, clipped = grpo.policy_loss(new, new, adv, MASK, n, kind)
    (grad,) = torch.autograd.grad(loss, new)
    assert (grad + adv[:, None] * MASK / n / per_answer).abs().max() < 1e-15 and clipped == 0
    assert grpo.normalizer(kind, LENGTHS, MAX) == n


# ε_low and ε_high by the papers; a loss without them has another bound, and a test of its own
EPSILONS = {"dapo": (0.2, 0.28), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


@pytest.mark.parametrize("kind", sorted(grpo.LOSSES.keys() - {"cispo"}))
def test_the_clip_stops_the_gradient_on_the_gaining_side_only(kind):
    """Clipped: a good answer that is likelier already, a bad one that is rarer. The third token is
    padding.
    """
    mask = torch.tensor([[True, True, False]])
    low, high = EPSILONS[kind]
    for sign, epsilon in ((1, high), (-1, low)):
        for gain, stopped in ((0.99 * epsilon, 0), (1.01 * epsilon, 2), (-0.5, 0)):
            new = torch.full((1, 3), 1 + sign * gain, dtype=torch.float64).log().requires_grad_()
            adv = torch.tensor([float(sign)])
            loss, clipped = grpo.policy_loss(new, torch.zeros(1, 3), adv, mask, 2, kind)
            (grad,) = torch.autograd.grad(loss, new)
            assert clipped == stopped
            assert (grad == 0).all() if stopped else (grad[mask] * sign < 0).all()


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_the_clip_stops_single_tokens(kind):
    """Of each answer one, and not the same one: that whose ratio has moved the way A asks for."""
    new = torch.tensor([[1.5, 1.0, 0.5], [1.5, 1.0, 0.5]]).log().requires_grad_()
    given = torch.zeros(2, 3), torch.tensor([1.0, -1.0]), torch.ones(2, 3).bool(), 1
    loss, clipped = grpo.policy_loss(new, *given, kind)
    (grad,) = torch.autograd.grad(loss, new)
    assert (grad == 0).nonzero().tolist() == [[0, 0], [1, 2]] and clipped == 2


def test_cispo_bounds_a_weight_and_never_loses_a_token():
    """A token's weight is at most 5: e² = 7.4 > 5 > e^.5. It keeps its gradient."""
    new = torch.tensor([[2.0, 0.5]], requires_grad=True)
    given = torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2).bool(), 1
    loss, clipped = grpo.policy_loss(new, *given, "cispo")
    (grad,) = torch.autograd.grad(loss, new)
    assert clipped == 1 and grad[0].tolist() == pytest.approx([-5, -math.exp(0.5)], rel=1e-6)


def test_importance_weights_are_capped_and_carry_no_gradient():
    """Ratios ½, 1, 1.9, 5 → ½, 1, 1.9, 2."""
    old = torch.tensor([0.5, 1, 1.9, 5], dtype=torch.float64).log().requires_grad_()
    weights = grpo.importance_weights(old, torch.zeros(4))
    assert weights.tolist() == pytest.approx([0.5, 1, 1.9, 2], rel=1e-12)
    assert not weights.requires_grad


def test_k3_is_an_unbiased_kl_that_is_never_negative():
    """Σ p · k3(ln ref/p) = Σ p ln p/ref for random distributions over 7 tokens; 0 where both
    agree.
    """
    p, ref = torch.randn(2, 7, dtype=torch.float64).softmax(-1)
    assert ((p * grpo.kl_k3((ref / p).log())).sum() - (p * (p / ref).log()).sum()).abs() < 1e-15
    k3 = grpo.kl_k3(torch.tensor([0.0, -5, -0.1, 0.1, 5]))
    assert k3[0] == 0 and (k3[1:] > 0.004).all()
    tiny = torch.tensor([1e-4, -3e-5])  # in fp32 exp(x) - 1 - x is wrong in its first digit
    assert torch.allclose(grpo.kl_k3(tiny), tiny.square() / 2, rtol=0.01)


def test_advantages_worked_out_by_hand():
    """(1, 0, 0, 0) has mean ¼ and unbiased std ½. Rewards .1 and .1001 get different advantages."""
    rewards = torch.tensor([[1.0, 0, 0, 0], [3, 1, 1, 3]])
    a, b = 0.75 / 0.5001, 1 / (math.sqrt(4 / 3) + 1e-4)
    want = torch.tensor([[a, -a / 3, -a / 3, -a / 3], [b, -b, -b, b]])
    assert (grpo.advantages(rewards) - want).abs().max() < 1e-6  # fp32 rounds by 1.2e-7 near 1.5
    centred = [[0.75, -0.25, -0.25, -0.25], [1, -1, -1, 1]]
    assert grpo.advantages(rewards, scale="none").tolist() == centred
    # the std of (.1, .1001) is 7.07e-5: ± 5e-5 / 1.707e-4; fp32 rounds the rewards by 4e-5 of that
    near = grpo.advantages(torch.tensor([[0.1, 0.1001]]))[0]
    assert near.tolist() == pytest.approx([-0.2929, 0.2929], rel=1e-3)
    # however near, rewards that differ get advantages that differ; float32 would make both 1
    nearer = grpo.advantages(torch.tensor([[1, 1 + 1e-9]], dtype=torch.float64))
    assert nearer[0, 0] < 0 < nearer[0, 1] and nearer.dtype == torch.float32


def test_a_group_of_equal_rewards_gets_exact_zeros():
    """Even for .1, which floating-point means do not reproduce, and if groups differ from each
    other. Divided or not.
    """
    for dtype in (torch.float32, torch.float64, torch.int64):
        for G in (2, 3, 7):
            rewards = torch.tensor([[0.0], [1.0], [0.1], [1e4], [-2.3]], dtype=dtype).expand(5, G)
            for scale in ("group", "none"):
                assert (grpo.advantages(rewards, scale) == 0).all()


@pytest.mark.parametrize(
    "rewards, scale, words",
    [
        ([[1.0], [0.0]], "group", "group of 1"),
        ([[1.0, math.nan]], "group", "1 rewards"),
        ([[1.0, math.inf]], "none", "1 rewards"),
        ([[1.0, 0.0]], "batch", "'batch'"),
    ],
)
def test_what_advantages_refuses_it_names(rewards, scale, words):
    with pytest.raises(ValueError, match=words):
        grpo.advantages(torch.tensor(rewards), scale)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    """RLOO, sample by sample, and REINFORCE, which subtracts nothing."""
    rewards = torch.tensor([[1, 0, 0, 1.0], [0.1, 0.1, 0.1, 0.1], [-2, 0.5, 3, 0]]).double()
    want = [[float(r - (row.sum() - r) / (len(row) - 1)) for r in row] for row in rewards]
    found = grpo.advantages(rewards, "none", "rloo")
    assert (found - torch.tensor(want)).abs().max() < 1e-6 and (found[1] == 0).all()
    assert torch.equal(grpo.advantages(rewards, "none", "none"), rewards.float())
    with pytest.raises(KeyError, match="unheard-of"):
        grpo.advantages(rewards, "none", "unheard-of")


@pytest.mark.parametrize("baseline", grpo.BASELINES)
def test_advantages_of_any_baseline_rise_with_the_reward(baseline):
    """Within a group, whatever the scale."""
    for scale in ("group", "none"):
        for rewards in torch.randn(20, 1, 6):
            found = grpo.advantages(rewards, scale, baseline)[0]
            assert (found[rewards[0].argsort()].diff() > 0).all()


WRONG_SHAPES = [
    lambda losses, stopped: (losses[:, None].expand(MASK.shape), stopped),  # not summed
    lambda losses, stopped: (losses.mean(), stopped),
    lambda losses, stopped: (losses, stopped[:, 0]),  # T = B here, so that it would broadcast
]


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
def test_a_loss_of_a_wrong_shape_is_refused(wrong, monkeypatch):
    def own(*arguments):
        return wrong(*grpo.dapo(*arguments))

    monkeypatch.setitem(grpo.LOSSES, "dapo", grpo.LOSSES["dapo"]._replace(function=own))
    with pytest.raises(ValueError, match=r"own\(\) must return losses .*\(6, 6\)"):
        grpo.policy_loss(random_tokens(), random_tokens(), torch.ones(6), MASK, 1.0)


def test_a_baseline_of_a_wrong_shape_is_refused(monkeypatch):
    """Without keepdim it would broadcast across prompts, if there are as many as answers to one."""
    monkeypatch.setitem(grpo.BASELINES, "group", lambda rewards: rewards.median(1).values)
    with pytest.raises(ValueError, match=r"'group' must have the shape \(4, 1\) or \(4, 4\)"):
        grpo.advantages(torch.rand(4, 4))


def test_the_soft_overlong_penalty_of_dapo():
    """DAPO, eq. 13 with L_max = 20, L_cache = 4: 0 up to 16 tokens, then (16 − n)/4, −1 from 20
    on.
    """
    got = grpo.overlong_penalty(torch.tensor([0, 16, 17, 19, 20, 25]), 20, soft_tokens=4)
    assert got.tolist() == [0, 0, -0.25, -0.75, -1, -1]


def test_the_end_token_is_trained():
    """Its id, 2, is also the padding's. Three tokens and the end token have 4 tokens in the
    mask.
    """
    tokens = torch.tensor([[5, 2, 6, 7, 8, 9, 2, 2, 2], [5, 2, 6, 10, 2, 2, 2, 2, 2]])
    lengths, prompts = torch.tensor([4, 2]), torch.tensor([3, 3])
    mask = Rollout(tokens, None, lengths, None, prompts).answer_mask()
    assert mask.nonzero().tolist() == [[0, 3], [0, 4], [0, 5], [0, 6], [1, 3], [1, 4]]
