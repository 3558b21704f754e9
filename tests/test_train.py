"""python -m pytest tests/test_train.py"""

import inspect
import itertools
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from command import forks, lines, main
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aqn
import grpo
import lora
import model as decoder
import train
from rollout import Rollout, Sampler, SamplingParams
from tasks import Task
from tools import diagnostics, ranks, weights
from tools.environment import Answer, load_environment, load_task
from tools.flags import FIELDS, Config
from tools.memory import prompt_groups

G = 4
STOPS = [2, 5, 9, 13]
# rewards of four groups: the second one teaches nothing, nor does the third answer of the last one
ANSWERS = [Answer("", "", float(reward), {}) for reward in "3111222210100323"]
ALL = torch.arange(16)
# each correction, each loss with a KL
CASES = [("dapo", correction, 0) for correction in ("bypass", "none", "tis")]
CASES += [(loss, "tis", 0.1) for loss in grpo.LOSSES]


def config(**flags):
    return Config(
        **dict(prompts=4, group_size=G, max_new_tokens=8, temperature=0.7, max_grad_norm=1e9)
        | flags
    )


def actor(folder):
    """An fp32 model whose adapter is not 0."""
    model = decoder.load(weights.open(str(folder)), "bf16", rank=4, alpha=8)
    for p in model.parameters():
        p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(p.numel()))
    lora.refresh(model)
    return model


def trainer(folder, **flags):
    return train.Trainer(config(**flags), actor(folder))


def rollout(model, sigma):
    """16 answers of unequal lengths to 4 prompts. Under noise the ratios differ from 1."""
    prompts = [[1, *range(7, last)] for last in (9, 12, 8, 10)]
    params = SamplingParams(8, STOPS, temperature=0.7, seed=3)
    with aqn.noisy_norms(model, sigma, seed=0, step=1):
        return Sampler(model).generate(prompts, G, params, step=1)


@pytest.fixture(scope="module")
def noisy(tiny_chat):
    return rollout(actor(tiny_chat), sigma=0.5)


@pytest.fixture
def watch(monkeypatch):
    """watch(owner, name, note) keeps note(**arguments) of each call of owner.name → list, filled by
    calls.
    """

    def start(owner, name, note):
        real, seen = getattr(owner, name), []
        signature = inspect.signature(real)

        def spy(*args, **more):
            given = signature.bind(*args, **more)
            seen.append(note(**given.arguments))
            return real(*args, **more)

        monkeypatch.setattr(owner, name, spy)
        return seen

    return start


def add_up(monkeypatch, module):
    """From now on each call of module.sum_over_ranks is another rank's. It returns the sums of all
    calls so far.
    """
    total = Counter()

    def sum_over_ranks(metrics):
        total.update({name: float(value) for name, value in metrics.items()})
        return dict(total)

    monkeypatch.setattr(module, "sum_over_ranks", sum_over_ranks)


# --- the update


def gradient(model):
    return parameters_to_vector(p.grad for p in model.parameters())


def updated(learner, experience, update=train.Trainer.update):
    """→ the measurements, and the gradient of each update. Each moves the weights by the same noise
    always, and in the end they are restored.
    """
    model, gradients = learner.model, []
    parameters, random = list(model.parameters()), torch.Generator().manual_seed(0)
    before = parameters_to_vector(parameters).detach()

    def step():
        gradients.append(gradient(model))
        noise = 0.03 * torch.randn(before.shape, generator=random)
        vector_to_parameters(parameters_to_vector(parameters) + noise, parameters)
        model.zero_grad()

    learner.optimizer = SimpleNamespace(step=step, zero_grad=model.zero_grad, param_groups=[{}])
    stats = update(learner, experience, lr=0)
    vector_to_parameters(before, parameters)
    lora.refresh(model)
    return stats, gradients


def by_definition(learner, experience, lr):
    """Trainer.update with all rows that run in one call of the loss → the measurements."""
    model, flags = learner.model, learner.config
    lengths = experience.rollout.lengths
    normalizer = grpo.normalizer(flags.loss, lengths, flags.max_new_tokens)
    runs = (experience.advantages != 0) | (flags.beta > 0)
    sampled, advantages, _ = experience.rows(ALL[: len(runs)][runs])
    mask = sampled.answer_mask()

    def scored():
        return sampled.scored_by(model, flags.temperature)

    with torch.no_grad():
        first, entropy = scored()
        with lora.disabled(model):
            reference, _ = scored()
    old = sampled.logprobs if flags.correction == "bypass" else first
    weights = grpo.importance_weights(old, sampled.logprobs) if flags.correction == "tis" else None
    for _ in range(flags.updates_per_step):
        loss, clipped = grpo.policy_loss(
            scored()[0],
            old,
            advantages,
            mask,
            normalizer,
            loss_type=flags.loss,
            weights=weights,
            clip_low=flags.clip_low,
            clip_high=flags.clip_high,
            ref_logprobs=reference,
            beta=flags.beta,
        )
        loss.backward()
        norm = gradient(model).norm()
        learner.optimizer.step()
        lora.refresh(model)
    found = dict(
        rows=runs.sum(),
        tokens=(sampled.prompt_lengths + sampled.lengths).sum() * flags.updates_per_step,
        entropy=entropy[mask].mean(),
        kl_reference=(first - reference)[mask].mean() * (flags.beta > 0),
        kl_noise=grpo.kl_k3((first - sampled.logprobs)[mask]).mean(),
        clip_fraction=clipped / mask.sum(),
        grad_norm=norm,
    )
    return {name: value.item() for name, value in found.items()}


def assert_same(got, want):
    """Two fp32 sums of ~100 terms in another order differ by about √100 · 6e-8: 1e-5 of the
    largest.
    """
    assert want.abs().max() > 1e-4 and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("loss, correction, beta", CASES)
def test_updates_follow_their_definition_for_any_cut_and_order(
    tiny_chat, noisy, loss, correction, beta
):
    """Rows in any order, in small micro-batches, which cut groups, and large ones, recomputed or
    not, give one gradient.

    "old" is the recorded policy (bypass), or the trainer's before the first update. The weights of
    tis are min(old / recorded, 2). --overlong mask gives the gradient of the finished answers
    alone.
    """
    flags = dict(updates_per_step=3, clip_low=0.05, clip_high=0.1)
    learner = trainer(tiny_chat, loss=loss, correction=correction, beta=beta, **flags)
    experience = learner.experience(noisy, ANSWERS)
    ended, order = ALL[noisy.finished], torch.randperm(16)
    for overlong, counted, micro_tokens, recomputed, rows in (
        ("none", ALL, 14, 0, ALL),
        ("none", ALL, 60, 2, order),
        ("mask", ended, 10**6, 0, order),
    ):
        learner.config.overlong = overlong
        learner.budget.micro_tokens, learner.budget.recomputed = micro_tokens, recomputed
        measured, want = updated(learner, experience.rows(counted), by_definition)
        stats, got = updated(learner, experience.rows(rows))
        stats["tokens"] = stats["update_tok_s"] * stats["update_s"]
        assert {name: stats[name] for name in measured} == pytest.approx(
            measured, rel=1e-4, abs=1e-6
        )
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("micro_tokens, cut", [(10**6, False), (14, True)])
def test_flat_tokens_are_what_the_model_computes(tiny_chat, noisy, watch, micro_tokens, cut):
    """Of the rows that have an advantage: a prompt once for its rows in a micro-batch, and no last
    token of an answer. Small micro-batches cut groups, whose prompts are then computed again.
    """
    learner = trainer(tiny_chat, micro_tokens=micro_tokens)
    experience = learner.experience(noisy, ANSWERS).rows(torch.randperm(16))
    read = watch(decoder.Decoder, "forward", lambda ids, **_: len(ids))
    stats = learner.update(experience, lr=0)
    assert stats["flat_tokens"] == sum(read) and max(read) <= micro_tokens
    live = ALL[experience.advantages != 0]
    once = sum(group.tokens for group in prompt_groups(experience.rollout, live))
    assert (stats["flat_tokens"] > once) == cut


def ranks_updates(rank, folder, shared):
    """Updates of rank 0, which has rows 0-7, then 0-11, of rank 1, or (−1) of all rows alone."""
    if rank >= 0:
        torch.distributed.init_process_group("gloo", f"file://{shared}", rank=rank, world_size=2)
    learner, found = trainer(folder, correction="tis", micro_tokens=60), []
    experience = learner.experience(rollout(learner.model, sigma=0.5), ANSWERS)
    # in the second cut, rank 1 has no row to run
    for (last, live), loss in itertools.product(((8, 16), (12, 12)), grpo.LOSSES):
        learner.config.loss = loss
        batch = experience._replace(advantages=experience.advantages * (ALL < live))
        mine = (ALL[:last], ALL[last:], ALL)[rank]
        stats, (only,) = updated(learner, batch.rows(mine))
        names = "rows", "entropy", "kl_noise", "clip_fraction", "grad_norm"
        found.append((only.tolist(), [stats[name] for name in names]))
    return found


def test_two_ranks_get_the_gradient_of_one_process(tiny_chat, tmp_path):
    """Over gloo, for every loss, also when the second rank has no row to run and adds zeros."""
    with forks().Pool(2) as pool:
        ranks = [(rank, tiny_chat, tmp_path / "meet") for rank in range(2)]
        one, other = pool.starmap(ranks_updates, ranks, chunksize=1)
    assert one == other
    alone = ranks_updates(-1, tiny_chat, None)
    for (got, stats), (want, measured) in zip(one, alone, strict=True):
        assert stats == pytest.approx(measured, rel=1e-5)
        assert_same(torch.tensor(got), torch.tensor(want))


def test_the_reference_is_computed_before_the_graph_takes_memory(tiny_chat, noisy, watch):
    learner = trainer(tiny_chat, beta=0.1, micro_tokens=10**6)
    graphs = watch(Rollout, "scored_by", lambda **_: torch.is_grad_enabled())
    learner.backward(learner.experience(noisy, ANSWERS))
    assert graphs == [False, True]


def test_the_first_steps_from_the_base(tiny_chat):
    """Before the first step the policy is the base; then every lora_B moves.

    A clean sampler and the trainer agree but for rounding, k3(1e-5) = 5e-11, at a temperature of
    .7.
    """
    model = decoder.load(weights.open(str(tiny_chat)), "bf16", rank=4, alpha=8)
    learner = train.Trainer(config(beta=0.1, correction="bypass"), model)
    experience = learner.experience(rollout(model, sigma=0), ANSWERS)
    first, second = (learner.update(experience, lr=0.02) for _ in range(2))
    assert first["clip_fraction"] == 0 <= first["kl_noise"] < 1e-9
    # [x, xa] @ [W, 0].T and x @ W.T may differ in the order of their fp32 sums
    assert abs(first["kl_reference"]) < 1e-5 < abs(second["kl_reference"])
    for p in model.parameters():
        assert (p != 0).any()


def test_adamw_gets_the_clipped_gradient_and_without_one_nothing_moves(tiny_chat, noisy):
    """One update: the moments are (1 − .9) g and (1 − .99) g² = m², |g| = --max-grad-norm. A weight
    loses lr · --weight-decay of itself, and lr by the sign of g.

    Then AdamW has momentum. Without any advantage, or any trained answer, the adapter keeps its
    bytes.
    """
    learner = trainer(tiny_chat, max_grad_norm=0.5, weight_decay=0.5, overlong="mask")
    parameters = list(learner.model.parameters())
    before = parameters_to_vector(parameters).detach()
    experience = learner.experience(noisy, ANSWERS)
    assert learner.update(experience, lr=0.1)["grad_norm"] > 0.6
    m, v = (
        parameters_to_vector(learner.optimizer.state[p][name] for p in parameters)
        for name in ("exp_avg", "exp_avg_sq")
    )
    assert m.norm() == pytest.approx(0.05, rel=1e-4)
    # each side is a few products in fp32, 6e-8 each; a moment of less than 1e-6, squared, counts as
    # 0
    torch.testing.assert_close(v, m * m, atol=1e-12, rtol=1e-5)
    after = parameters_to_vector(parameters)
    want = 0.95 * before - m / (10 * m.abs() + 1e-8)
    torch.testing.assert_close(after, want, atol=1e-6, rtol=1e-5)
    cut = noisy._replace(finished=noisy.lengths < 0)
    for change in dict(advantages=torch.zeros(16)), dict(rollout=cut):
        stats = learner.update(experience._replace(**change), lr=0.1)
        assert torch.equal(after, parameters_to_vector(parameters))
        assert stats["rows"] == 0 and stats["grad_norm"] is None and stats["entropy"] is None


def test_an_answer_is_compared_with_its_group(tiny_chat, noisy):
    """As in TRL, a cut answer counts in the mean and std of its group, although --overlong mask
    does not train on it. In float32 these rewards would be equal.
    """
    rewards = 0.1 + 1e-9 * torch.rand(16, dtype=torch.float64)
    answers = [Answer("", "", reward, {}) for reward in rewards.tolist()]
    for loss, advantage, scale in (
        ("dapo", "group", "group"),
        ("dr_grpo", "group", "none"),
        ("dapo", "rloo", "none"),
        ("dapo", "none", "none"),
    ):
        learner = trainer(tiny_chat, loss=loss, overlong="mask", advantage=advantage)
        found = learner.experience(noisy, answers).advantages
        want = grpo.advantages(rewards.view(-1, G), scale, advantage)
        assert torch.equal(found, want.flatten())


# --- the mismatch


def test_every_token_weighs_the_same_in_the_mismatch_of_several_ranks(
    tiny_chat, noisy, monkeypatch
):
    """A factor below 1 counts as its inverse. Of 256 answers every fourth is read."""
    learner, mask = trainer(tiny_chat), noisy.answer_mask()
    logprobs, _ = noisy.scored_by(learner.model, 0.7)
    factors = (logprobs - noisy.logprobs).abs().exp()
    want = factors[::4][mask[::4]].mean().item()

    def mismatch(rollout):
        return diagnostics.sampler_gap(learner, rollout)

    assert mismatch(Rollout.join([noisy] * 16)) == pytest.approx(want)
    add_up(monkeypatch, diagnostics)
    for rows in ALL.split(5):  # each of another rank
        found = mismatch(noisy.rows(rows))
    assert found == pytest.approx(factors[mask].mean().item())


# --- collecting answers


def task_of(reward, held_out=()):
    problems = [{"i": i} for i in range(40)]
    return Task(problems, held_out, lambda problem: f"{problem['i']}*", reward)


def collected(folder, rewards, **flags):
    """train.collect on problems 0-39 with rewards(problem, number in the group) → Batch, the
    problem and the reward of each row.
    """
    flags, judged = config(**flags), []

    def reward(problem, text, finished):
        judged.append((problem["i"], text, finished))
        return rewards(problem["i"], (len(judged) - 1) % G)

    asking = load_environment(flags, task_of(reward), weights.open(str(folder)))
    asking = asking._replace(params=asking.params._replace(stop_ids=STOPS))
    batch = train.collect(flags, asking, Sampler(actor(folder)), step=0, drawn=0)
    sampled, decode = batch.rollout, asking.tokenizer.decode
    asked = [int(answer.prompt[:-1]) for answer in batch.answers]
    for row, i in enumerate(asked):
        prompt = sampled.tokens[row, : sampled.prompt_lengths[row]]
        text = decode(sampled.answers()[row])
        assert decode(prompt) == f"<s>{i}*=" and text == batch.answers[row].text
        assert (i, text, sampled.finished[row]) in judged
    return batch, asked, [answer.reward for answer in batch.answers]


def test_a_reward_belongs_to_the_prompt_and_the_sample_that_earned_it(tiny_chat):
    """A reward that echoes its problem's number and the sample's. Texts keep special tokens."""
    batch, asked, rewards = collected(tiny_chat, lambda i, g: i + g / 8)
    stats, sampled = batch.stats, batch.rollout
    assert asked[::G] == train.draw_problems(range(40), 0, 0, 4)
    assert rewards == [i + b % G / 8 for b, i in enumerate(asked)]
    assert stats["reward"] == pytest.approx(sum(rewards) / 16) and stats["signal"] == 1
    assert stats["length"] == sampled.lengths.double().mean()
    assert stats["finished"] == sampled.finished.double().mean() < 1
    assert any("<unk>" in answer.text for answer in batch.answers)


@pytest.mark.parametrize("every, resample, attempts", [(3, 1, 2), (3, 9, 4), (1, 9, 1), (41, 3, 4)])
def test_resampling_replaces_groups_without_signal(tiny_chat, every, resample, attempts):
    """One problem of `every` has unequal rewards. Others are drawn until 4 have, or no draw is
    left. The next step's begin where the last draw ended.
    """

    def has_signal(i):
        return i % every == 0 < i

    batch, asked, rewards = collected(
        tiny_chat, lambda i, g: float(has_signal(i) and g == 1), resample=resample
    )
    drawn = train.draw_problems(range(40), 0, 0, 4 * attempts)
    live = list(filter(has_signal, drawn))[:4]
    assert asked[::G][: len(live)] == live and len({*asked} & {*drawn}) == 4
    assert rewards == [float(b < G * len(live) and b % G == 1) for b in range(16)]
    stats = batch.stats
    assert stats["signal"] == len(live) / 4 and stats["resampled"] == 4 * (attempts - 1)
    more = stats["rollout_tok_s"] * stats["rollout_s"] - batch.rollout.lengths.sum().item()
    assert more > 1 if attempts > 1 else abs(more) < 1e-6
    assert batch.drawn == 4 * attempts


@pytest.mark.parametrize("limit, soft_tokens", [(12, 3), (3, 1)])
def test_a_long_answer_pays_the_overlong_penalty(tiny_chat, limit, soft_tokens):
    """The last quarter of the tokens costs up to 1. Rewards are float64 that differ by 1e-9 at
    least.
    """
    (_, _, plain), (batch, _, paid) = (
        collected(tiny_chat, lambda i, g: i + g / 8, max_new_tokens=limit, overlong=overlong)
        for overlong in ("none", "penalty")
    )
    due = grpo.overlong_penalty(batch.rollout.lengths, limit, soft_tokens).tolist()
    assert paid == [round(r + d, 9) for r, d in zip(plain, due, strict=True)]
    assert len(set(due)) > min(soft_tokens, 2)


@pytest.mark.parametrize("overlong, resampled", [("none", 0), ("mask", 4), ("penalty", 0)])
def test_answers_that_are_all_masked_are_no_signal(tiny_chat, monkeypatch, overlong, resampled):
    """Although a reward that judges cut answers tells them apart."""
    monkeypatch.setattr(sys.modules[__name__], "STOPS", [])
    flags = dict(overlong=overlong, resample=1)
    batch, *_ = collected(tiny_chat, lambda i, g: float(g), **flags)
    assert not batch.rollout.finished.any()
    assert (batch.stats["signal"], batch.stats["resampled"]) == (resampled == 0, resampled)


def test_a_length_penalty_makes_no_signal_of_wrong_answers(tiny_chat):
    """DAPO resamples a prompt whose answers are all wrong. Their rewards differ by the penalty."""
    batch, _, rewards = collected(tiny_chat, lambda i, g: 0.0, overlong="penalty", resample=2)
    assert len(set(rewards)) > 1
    assert batch.stats["signal"] == 0 and batch.stats["resampled"] == 8 and batch.drawn == 12


def test_ranks_take_turns_in_the_data_and_skip_nothing(tiny_chat, monkeypatch, watch):
    """The second of two ranks draws three times, and the first one only for the first and the last
    of them: each time, they take the next problems, two for each rank that draws. Each draw of each
    rank has numbers, so random bits, of its own.
    """
    wanted = iter([[2, 2], [0, 2], [2, 2], [2, 0]])
    monkeypatch.setattr(
        ranks, "gather", lambda value: next(wanted) if isinstance(value, int) else [value]
    )
    monkeypatch.setattr(ranks, "rank_and_count", lambda: (1, 2))
    monkeypatch.setattr(train, "rank_and_count", lambda: (1, 2))
    draws = watch(train, "draw_problems", lambda start, count, **_: (start, count))
    numbers = watch(Sampler, "generate", lambda first_sequence, **_: first_sequence)
    # its third draw brings the second group with unequal rewards
    groups = itertools.count()
    batch, *_ = collected(tiny_chat, lambda i, g: float(g == 1 and next(groups) >= 4), resample=3)
    assert draws == [(2, 2), (4, 2), (8, 2)] and batch.drawn == 12
    assert numbers == [2 * G, 6 * G, 10 * G]


def test_draws_follow_the_seed_and_each_epoch_covers_every_problem():
    """Each epoch has another order, and each draw goes on where another has ended."""
    line = train.draw_problems(range(20), 0, 0, 320)
    epochs = {tuple(line[i : i + 20]) for i in range(0, 320, 20)}
    assert len(epochs) == 16 and all(sorted(epoch) == [*range(20)] for epoch in epochs)
    assert train.draw_problems(range(20), 0, 30, 13) == line[30:43]
    assert train.draw_problems(range(20), 1, 0, 8) != line[:8]


# --- evaluation


def test_evaluate_counts_strict_loose_and_sampled(tiny_chat, monkeypatch):
    """Of 41 problems 10 are right, 20 if an answer need not end, and 30 at a temperature.

    Every evaluation draws the same bits, and step -1 is none of training's. Two ranks answer 20 and
    21, as one process would number their sequences, and measure all. Under noise there is none.
    """
    calls, told = [], []

    def generate(problems, samples, params, step, first_sequence, progress):
        calls.append((len(problems), samples, *params[2:], step, first_sequence))
        return [30 if params.temperature else 10] * samples  # stands for a Rollout

    def judge(problems, solved):
        return [Answer("", "text", i < n, {}) for i in problems for n in solved]

    flags = config(eval_samples=3, eval_top_p=0.5)
    params = SamplingParams(8, STOPS, temperature=0.7, seed=7)
    task = Task([], range(41), None, lambda i, text, finished: finished and text and i < 20)
    asking = SimpleNamespace(task=task, params=params, encode_prompts=list, judge=judge)
    sampler = SimpleNamespace(model=actor(tiny_chat), generate=generate)
    add_up(monkeypatch, train)
    for rank in range(2):
        monkeypatch.setattr(train, "rank_and_count", lambda rank=rank: (rank, 2))
        run = SimpleNamespace(say=print, answered=lambda found: told.append(len(found)))
        got = train.evaluate(flags, asking, sampler, run)
    shares = [got[name] * 41 for name in ("eval_greedy", "eval_greedy_loose", "eval_sampled")]
    assert shares == pytest.approx([10, 20, 30]) and got["problems"] == 41
    assert told == [20, 21]  # greedy answers
    # prompts, samples of each, temperature, top-p, seed, step, first sequence
    assert calls == [
        (20, 1, 0.0, 1.0, 7, -1, 0),
        (20, 3, 0.7, 0.5, 7, -1, 0),
        (21, 1, 0.0, 1.0, 7, -1, 20),
        (21, 3, 0.7, 0.5, 7, -1, 60),
    ]
    with aqn.noisy_norms(sampler.model, 0.1, 0, 1), pytest.raises(AssertionError, match="noise"):
        train.evaluate(flags, asking, sampler, None)


# --- whole runs


def test_a_run_evaluates_on_all_of_test_and_trains_on_the_rest_of_data(tmp_path):
    for name, numbers in dict(test=range(37), data=range(30, 50)).items():
        rows = [f'{{"question": "Is it {n}?", "answer": "#### {n}"}}\n' for n in numbers]
        (tmp_path / name).write_text("".join(rows))
    task = load_task(config(task="gsm8k", data=f"{tmp_path}/data", test=f"{tmp_path}/test"))
    assert (len(task.train), len(task.held_out)) == (13, 37)


def test_noise_is_on_while_sampling_and_off_in_update_and_evaluation_and_the_toy_is_learnt(
    tiny_chat, tmp_path, monkeypatch, watch
):
    """15 steps of "begin with one of the digits 0-4": the share rises from under .4 to over .8. The
    mismatch of every tenth step is measured under the noise that sampled.
    """
    toy = task_of(lambda problem, text, finished: float(text[:1] in set("01234")), [{"i": 40}])
    monkeypatch.setattr(train, "load_task", lambda config: toy)
    noises = watch(aqn, "noisy_norms", lambda model, sigma, seed, step: (sigma, seed, step))
    sampled = watch(
        Sampler,
        "generate",
        lambda self, step, params, **_: (step, aqn.is_noisy(self.model), *params[2:]),
    )
    updates = watch(train.Trainer, "update", lambda self, lr, **_: (aqn.is_noisy(self.model), lr))
    main(
        *f"--model {tiny_chat} --steps 15 --prompts 8 --max-new-tokens 4 --rank 4 --lr 4e-3 "
        "--temperature .7 --seed 7 --sigma-start .05 --sigma-end .03 --sigma-stages 5 "
        f"--sigma-schedule linear --eval-every 5 --device cpu --out {tmp_path}".split()
    )
    sigmas = [aqn.sigma(step, 15, 0.05, 0.03, 5, "linear") for step in range(15)]
    assert noises == [(sigma, 7, step) for step, sigma in enumerate(sigmas)]
    training = [call for call in sampled if call[0] >= 0]  # the step of evaluations is −1
    assert training == [(step, sigma > 0, 0.7, 1.0, 7) for step, sigma in enumerate(sigmas)]
    assert updates == [(False, pytest.approx(4e-3 * (1 - step / 15))) for step in range(15)]
    records = lines(tmp_path)
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 5, 10, 15]
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["sigma"] for r in steps] == pytest.approx(sigmas, rel=1e-5)
    measured = {r["step"]: r["mismatch"] for r in steps if r["mismatch"] is not None}
    assert measured == pytest.approx({0: 1, 10: 1}, abs=1e-4)
    rewards = [r["reward"] for r in steps]
    assert rewards[0] + rewards[1] < 0.8 and min(rewards[-3:]) > 0.8


def adaptive(folder, out, reward, *flags):
    """Train on a task with adaptive noise from .5 on → the records of the steps."""
    path = out / "mine.py"
    path.write_text(
        "problems = lambda: [{'prompt': f'What is {n} * 7?'} for n in range(40)]\n"
        f"reward = lambda problem, text: {reward}\n"
    )
    given = "--sigma-schedule adaptive --prompts 4 --group-size 4 --max-new-tokens 8 --device cpu "
    given += "--quant bf16 --rank 4 --eval-problems 0"
    run = *given.split(), "--model", folder, "--task", path, "--out", out / "run"
    assert main(*run, *flags) == 0
    return lines(out / "run")


@pytest.mark.parametrize("start, target, grows", [(0.5, 1e-4, False), (1e-3, 0.1, True)])
def test_adaptive_noise_moves_without_any_signal(tiny_chat, tmp_path, start, target, grows):
    """Which too much noise may cause, so that it would stay for ever."""
    flags = "--steps", 4, "--sigma-start", start, "--sigma-target", target
    records = adaptive(tiny_chat, tmp_path, 0, *flags)
    assert all(record["signal"] == 0 and record["rows"] == 0 for record in records)
    assert [(record["kl_noise"] < target) for record in records] == [grows] * 4
    factor = aqn.FACTOR if grows else 1 / aqn.FACTOR
    want = [start * factor**n for n in range(4)]
    assert [record["sigma"] for record in records] == pytest.approx(want, rel=1e-4)


@pytest.mark.slow
def test_a_run_whose_noise_drowned_every_signal_learns_again(tmp_path):
    """The default model from σ = .5, at which it writes no digit that is paid."""
    reward = "float(text.lstrip()[:1].isdigit())"
    flags = "--steps", 45, "--sigma-start", 0.5, "--sigma-target", 0.02, "--lr", 1e-3
    records = adaptive("smollm2", tmp_path, reward, *flags)
    first, last = records[:10], records[-10:]
    assert sum(r["signal"] for r in first) < 2 < sum(r["signal"] for r in last)
    assert sum(r["reward"] for r in last) > 10 * sum(r["reward"] for r in first)


# --- the learning rate


@pytest.mark.parametrize("steps, warmup", [(20, 8), (100, 99), (7, 0)])
@pytest.mark.parametrize("name", FIELDS["schedule"].metadata["choices"])
def test_the_rate_is_that_of_transformers_without_its_first_step(name, steps, warmup):
    """Which has a rate of 0 and is lost."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    theirs = name.replace("constant", "constant_with_warmup")
    theirs = transformers.get_scheduler(theirs, optimizer, warmup + 1, steps + 1)
    for step in range(steps):
        optimizer.step()
        theirs.step()
        rate = train.learning_rate(step, steps, 3.0, warmup, name)
        assert rate == pytest.approx(theirs.get_last_lr()[0]) and rate > 0
    with pytest.raises(KeyError, match="quadratic"):
        train.learning_rate(warmup, 5, 3.0, warmup, "quadratic")
