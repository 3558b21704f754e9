"""python -m pytest tests/test_train.py"""

import inspect
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from command import forks, main
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aqn
import grpo
import lora
import model as decoder
import train
from rollout import PromptRows, Rollout, Sampler
from tasks import Task
from tools import diagnostics, launch, report, weights
from tools.diagnostics import mismatch
from tools.flags import Config
from tools.launch import Environment
from tools.optimizer import adamw, learning_rate

G = 4
STOPS = [2, 5, 9, 13]
ADVANTAGES = torch.tensor(
    [1.5, -0.5, -0.5, -0.5] + [0.0] * 4 + [0.9, -0.9, 0.9, -0.9] + [-1.5, 0.5, 0, 1]
)
ALL = torch.arange(16)
# each correction, each loss with a KL
CASES = [("dapo", "bypass", 0), ("dapo", "none", 0), ("dapo", "tis", 0)]
CASES += [(loss, "tis", 0.1) for loss in grpo.CLIP]


def config(**flags):
    common = dict(prompts=4, group_size=G, max_new_tokens=8, temperature=0.7, max_grad_norm=1e9)
    return Config(**common | flags)


def actor(folder):
    """An fp32 model whose adapter is not 0."""
    model = decoder.load(str(folder), "bf16", rank=4, alpha=8)
    for p in model.parameters():
        p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(p.numel()))
    lora.refresh(model)
    return model


def rollout(model, sigma):
    """16 answers of unequal lengths to 4 prompts. Under noise the ratios differ from 1."""
    prompts = [[1, 7, 8], [1, 3, 4, 5, 6, 17], [1, 20], [1, 9, 9, 9]]
    with aqn.noisy_norms(model, sigma, seed=0, step=1):
        return Sampler(model).generate(prompts, G, 8, 0.7, STOPS, seed=3, step=1)


@pytest.fixture(scope="module")
def noisy(tiny_chat):
    return rollout(actor(tiny_chat), sigma=0.5)


def watch(monkeypatch, owner, name, note=dict):
    """Keep note(arguments by name, and "return") of each call of owner.name. → list, filled by
    calls.
    """
    real, seen = getattr(owner, name), []
    signature = inspect.signature(real)

    def spy(*args, **more):
        given = signature.bind(*args, **more)
        given.apply_defaults()
        result = real(*args, **more)
        seen.append(note(given.arguments | {"return": result}))
        return result

    monkeypatch.setattr(owner, name, spy)
    return seen


# --- the update


class Walk:
    """Stands for an optimizer: keeps each gradient, and moves the weights by the same noise
    always.
    """

    def __init__(self, model):
        self.weights, self.gradients = list(model.parameters()), []
        self.random = torch.Generator().manual_seed(0)

    def step(self):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.weights]))
        for p in self.weights:
            p.data += 0.03 * torch.randn(p.shape, generator=self.random)
            p.grad = None

    def zero_grad(self):
        pass


def updated(model, flags, sampled, adv, update=train.update):
    """→ the measurements, and the gradient of each update. The weights are restored."""
    weights, walk = parameters_to_vector(model.parameters()).detach(), Walk(model)
    stats = update(flags, model, walk, sampled, adv)
    vector_to_parameters(weights, model.parameters())
    lora.refresh(model)
    return stats, walk.gradients


def by_definition(flags, model, optimizer, sampled, adv):
    """train.update with all rows in one call of the loss, none skipped → the measurements."""
    where = sampled.tokens, sampled.prompt_lengths, sampled.lengths, flags.temperature
    mask, rows = sampled.answer_mask(), len(adv)
    ran = (adv != 0) | (flags.beta > 0)
    measured = mask & ran[:, None]
    per_row = dict(grpo=rows, gspo=rows, dr_grpo=rows * flags.max_new_tokens)
    normalizer = per_row.get(flags.loss, mask.sum())
    with lora.disabled(model), torch.no_grad():
        reference = model.logprobs(*where)[0]
    for number in range(flags.updates_per_step):
        new, entropy = model.logprobs(*where)
        if number == 0:
            old = sampled.logprobs if flags.correction == "bypass" else new.detach()
            drift = (new.detach() - sampled.logprobs)[measured]
            kl = (new - reference)[measured].mean() * (flags.beta > 0)
            found = dict(
                rows=ran.sum(),
                entropy=entropy[measured].mean(),
                kl_reference=kl,
                kl_noise=(drift.exp() - 1 - drift).mean(),
            )
        weights = (old - sampled.logprobs).exp().clamp(max=2) if flags.correction == "tis" else None
        given = normalizer, flags.loss, weights
        more = dict(ref_logprobs=reference, beta=flags.beta)
        grpo.policy_loss(new, old, adv, mask, *given, **more)[0].backward()
        _, clipped = grpo.policy_loss(new, old, adv, measured, *given, **more)
        optimizer.step()
        lora.refresh(model)
    found |= dict(
        clip_fraction=clipped / measured.sum(),
        grad_norm=optimizer.gradients[-1].norm(),
        tokens=(where[1] + where[2])[ran].sum() * flags.updates_per_step,
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
    model, ended, order = actor(tiny_chat), noisy.finished.nonzero()[:, 0], torch.randperm(16)
    flags = config(
        loss=loss, correction=correction, beta=beta, updates_per_step=3 if loss == "dapo" else 2
    )
    for overlong, counted, cuts in (
        ("none", ALL, ((14, ALL), (60, order))),
        ("mask", ended, ((10**6, order),)),
    ):
        alone = noisy.rows(counted), ADVANTAGES[counted]
        measured, want = updated(model, flags, *alone, by_definition)
        flags.overlong = overlong
        for flags.micro_tokens, rows in cuts:
            flags.gradient_checkpointing = flags.micro_tokens == 60
            stats, got = updated(model, flags, noisy.rows(rows), ADVANTAGES[rows])
            stats["tokens"] = stats["update_tok_s"] * stats["update_s"]
            assert {name: stats[name] for name in measured} == pytest.approx(
                measured, rel=1e-4, abs=1e-6
            )
            for one, other in zip(got, want, strict=True):
                assert_same(one, other)


@pytest.mark.parametrize("micro_tokens, cut", [(10**6, False), (14, True)])
def test_flat_tokens_are_what_the_model_computes(tiny_chat, noisy, monkeypatch, micro_tokens, cut):
    """Of the rows that have an advantage: a prompt once for its rows in a micro-batch, and no last
    token of an answer. Small micro-batches cut groups, whose prompts are then computed again.
    """
    model, order = actor(tiny_chat), torch.randperm(16)
    sampled, adv = noisy.rows(order), ADVANTAGES[order]
    read = watch(monkeypatch, decoder.Decoder, "forward", lambda given: len(given["ids"]))
    flags = config(micro_tokens=micro_tokens)
    stats = train.update(flags, model, adamw(flags, model), sampled, adv)
    assert stats["flat_tokens"] == sum(read) and max(read) <= micro_tokens
    once = sum(group.tokens for group in sampled.groups((adv != 0).nonzero()[:, 0]))
    assert (stats["flat_tokens"] > once) == cut


def ranks_updates(rank, folder, shared):
    """Updates of one of two ranks, or (None) of all rows. Rank 0 has rows 0-7, then 0-11."""
    if rank is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{shared}/meet", rank=rank, world_size=2)
    model, found = actor(folder), []
    sampled = rollout(model, sigma=0.5)
    for last, loss in itertools.product((8, 12), grpo.CLIP):
        # with 12, rank 1 has no row to run
        adv = ADVANTAGES if last == 8 else ADVANTAGES * (ALL < last)
        mine = {None: ALL, 0: ALL[:last], 1: ALL[last:]}[rank]
        flags = config(loss=loss, correction="tis", micro_tokens=60)
        stats, gradients = updated(model, flags, sampled.rows(mine), adv[mine])
        found.append(
            (
                gradients[0],
                [
                    stats[name]
                    for name in ("rows", "entropy", "kl_noise", "clip_fraction", "grad_norm")
                ],
            )
        )
    if rank is None:
        return found
    torch.save(found, f"{shared}/{rank}")
    dist.destroy_process_group()


def test_two_ranks_get_the_gradient_of_one_process(tiny_chat, tmp_path):
    """Over gloo, for every loss, also when the second rank has no row to run and adds zeros."""
    torch.multiprocessing.start_processes(
        ranks_updates,
        (str(tiny_chat), str(tmp_path)),
        nprocs=2,
        start_method=forks().get_start_method(),
    )
    alone = ranks_updates(None, str(tiny_chat), "")
    ranks = (torch.load(tmp_path / rank) for rank in "01")
    for (want, measured), (a, stats_a), (b, stats_b) in zip(alone, *ranks, strict=True):
        assert torch.equal(a, b) and stats_a == stats_b == pytest.approx(measured, rel=1e-5)
        assert_same(a, want)


def test_without_any_advantage_or_any_trained_answer_nothing_moves(tiny_chat, noisy):
    """The adapter keeps its bytes although AdamW has momentum from an earlier step. No NaN."""
    model = actor(tiny_chat)
    flags = config(overlong="mask", updates_per_step=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert train.update(flags, model, optimizer, noisy, ADVANTAGES)["grad_norm"] > 0
    before = parameters_to_vector(model.parameters())
    cut = noisy._replace(finished=torch.zeros(16, dtype=torch.bool))
    for batch, adv in ((noisy, torch.zeros(16)), (cut, ADVANTAGES)):
        stats = train.update(flags, model, optimizer, batch, adv)
        assert torch.equal(before, parameters_to_vector(model.parameters()))
        assert stats["rows"] == 0 and stats["grad_norm"] is None and stats["entropy"] is None


def test_the_first_steps_from_the_base(tiny_chat):
    """Before the first step the policy is the base; then every lora_B moves.

    A clean sampler and the trainer agree but for rounding, k3(1e-5) = 5e-11, at a temperature of
    .7.
    """
    model = decoder.load(str(tiny_chat), "bf16", rank=4, alpha=8)
    sampled, flags = rollout(model, sigma=0), config(beta=0.1, correction="bypass")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    first, second = (train.update(flags, model, optimizer, sampled, ADVANTAGES) for _ in range(2))
    assert first["clip_fraction"] == 0 <= first["kl_noise"] < 1e-9
    # [x, xa] @ [W, 0].T and x @ W.T may differ in the order of their fp32 sums
    assert abs(first["kl_reference"]) < 1e-5 < abs(second["kl_reference"])
    for p in model.parameters():
        assert (p != 0).any()


def test_adamw_gets_the_clipped_gradient_and_its_flags(tiny_chat, noisy):
    """One update: the moments are (1 − .9) g and (1 − .99) g² = m², |g| = --max-grad-norm.

    A weight loses lr · --weight-decay of itself, and lr by the sign of g.
    """
    model, flags = actor(tiny_chat), config(max_grad_norm=0.5, weight_decay=0.5, lr=0.1)
    before = parameters_to_vector(model.parameters()).detach()
    optimizer = adamw(flags, model)
    assert train.update(flags, model, optimizer, noisy, ADVANTAGES)["grad_norm"] > 0.6
    m, v = (
        torch.cat([optimizer.state[p][name].flatten() for p in model.parameters()])
        for name in ("exp_avg", "exp_avg_sq")
    )
    assert m.norm() == pytest.approx(0.05, rel=1e-4)
    # each side is a few products in fp32, 6e-8 each; a moment of less than 1e-6, squared, counts as
    # 0
    torch.testing.assert_close(v, m * m, atol=1e-12, rtol=1e-5)
    after = parameters_to_vector(model.parameters()).detach()
    want = 0.95 * before - m / (10 * m.abs() + 1e-8)
    torch.testing.assert_close(after, want, atol=1e-6, rtol=1e-5)


# --- collecting answers


def world(folder):
    source = weights.open(str(folder))
    return actor(folder), source.tokenizer()


def collected(folder, rewards, sampler=Sampler, **flags):
    """train.collect on problems 0-39 with rewards(problem, number in the group)."""
    model, tokenizer = world(folder)
    judged = itertools.count()
    task = Task(
        [{"i": i} for i in range(40)],
        [],
        lambda problem: f"{problem['i']}*",
        lambda problem, text, end: rewards(problem["i"], next(judged) % G),
    )
    flags = config(**flags)
    environment = Environment(task, tokenizer, STOPS, model.config, flags.max_new_tokens)
    batch = train.collect(flags, sampler(model), environment, 0)
    sampled = batch.rollout
    answers = map(tokenizer.decode, sampled.answers())
    for row, n, text, (prompt, answer) in zip(
        sampled.tokens, sampled.prompt_lengths, answers, batch.texts, strict=True
    ):
        assert tokenizer.decode(row[:n]) == f"<s>{prompt}=" and text == answer
    asked = [int(prompt[:-1]) for prompt, _ in batch.texts]
    batch.stats["mismatch"] = mismatch(flags, model, batch.rollout)
    batch.stats["drawn"] = batch.drawn
    return asked, batch.rewards.tolist(), batch.stats, sampled


def drawn(attempt=0, **flags):
    """→ the numbers of the problems of collected()."""
    flags = config(**flags)
    return train.batch_of(range(40), flags, attempt * flags.prompts, flags.prompts)


def test_a_reward_belongs_to_the_prompt_and_the_sample_that_earned_it(tiny_chat):
    """A reward that echoes its problem's number and the sample's. Log-probabilities that are
    recorded half a nat too high give a "mismatch" of e^½, not of e^-½.
    """

    class High(Sampler):
        def generate(self, *given, **more):
            r = super().generate(*given, **more)
            return r._replace(logprobs=r.logprobs + 0.5 * (r.logprobs != 0))

    asked, rewards, stats, sampled = collected(tiny_chat, lambda i, g: i + g / 8, High)
    assert asked[::G] == drawn()
    assert rewards == [i + b % G / 8 for b, i in enumerate(asked)]
    assert stats["reward"] == pytest.approx(sum(rewards) / 16) and stats["signal"] == 1
    assert stats["mismatch"] == pytest.approx(math.exp(0.5), rel=1e-4) and stats["resampled"] == 0
    assert stats["length"] == sampled.lengths.double().mean()


def test_every_token_weighs_the_same_in_the_mismatch_of_several_ranks(monkeypatch):
    """Tokens at 1, 1 and 1.3 on one rank and 12 at 1.5 on the other give their mean. A factor below
    1 counts as its inverse.
    """

    def rollout(*factors):
        count = len(factors)
        logprobs = torch.full((1, count), -1.0)
        part = SimpleNamespace(
            logprobs=logprobs,
            answer_mask=lambda: logprobs < 0,
            scored_by=lambda model, temperature: (logprobs + torch.tensor([factors]).log(), None),
        )
        return SimpleNamespace(
            tokens=logprobs,
            groups=lambda rows: [PromptRows(0, {0: count})],
            rows=lambda rows: part,
        )

    ranks = []

    def sum_over_ranks(metrics):
        ranks.append({name: float(value) for name, value in metrics.items()})
        return {name: sum(rank[name] for rank in ranks) for name in metrics}

    monkeypatch.setattr(diagnostics, "sum_over_ranks", sum_over_ranks)
    size = SimpleNamespace(micro_tokens=99)
    monkeypatch.setattr(diagnostics, "size_of_update", lambda *_: size)
    assert mismatch(config(), None, rollout(1.0, 1.0, 1 / 1.3)) == pytest.approx(1.1)
    assert mismatch(config(), None, rollout(*[1.5] * 12)) == pytest.approx(21.3 / 15)


def test_the_mismatch_reads_answers_that_are_evenly_spread(monkeypatch):
    """Of 256 answers every fourth: at most 127."""
    logprobs, asked = torch.full((256, 1), -1.0), []
    part = SimpleNamespace(
        logprobs=logprobs, answer_mask=lambda: logprobs < 0, scored_by=lambda *_: (logprobs, None)
    )

    def groups(rows):
        asked.extend(rows.tolist())
        return [PromptRows(0, {0: 1})]

    sampled = SimpleNamespace(tokens=logprobs, rows=lambda rows: part, groups=groups)
    size = SimpleNamespace(micro_tokens=99)
    monkeypatch.setattr(diagnostics, "size_of_update", lambda *_: size)
    assert mismatch(config(), None, sampled) == 1
    assert asked == [*range(0, 256, 4)]


def test_the_mismatch_is_measured_under_the_noise_that_sampled(tiny_chat, tmp_path):
    """In step 10, the first after step 0 that measures it, σ is not 0."""
    flags = (
        f"--model {tiny_chat} --steps 11 --prompts 4 --group-size 4 --max-new-tokens 8 --rank 4 "
        "--device cpu --eval-problems 0 --sigma-start 0.3 --sigma-end 0.2"
    )
    main(*flags.split(), "--out", tmp_path / "run")
    made = [r for r in report.read(tmp_path / "run").values() if r["kind"] == "step"]
    assert made[10]["sigma"] == pytest.approx(0.2)
    assert [made[0]["mismatch"], made[10]["mismatch"]] == pytest.approx([1, 1], abs=1e-4)


def test_a_masked_answer_counts_in_the_mean_of_its_group(tiny_chat, tmp_path, monkeypatch):
    """As in TRL: a cut answer is not trained on, and its reward is in its group's mean and std."""
    toy = Task(
        [{"i": i} for i in range(40)],
        [],
        lambda problem: f"{problem['i']} * 7",
        lambda problem, text, finished: float(text[:1] in set("01234")),
    )
    monkeypatch.setitem(launch.TASKS, "toy", lambda data, operands: toy)
    batches = watch(monkeypatch, train, "collect", lambda given: given["return"])
    found = watch(monkeypatch, train, "update", lambda given: given["advantages"])
    flags = (
        f"--model {tiny_chat} --task toy --steps 2 --max-new-tokens 4 --overlong mask "
        "--device cpu --group-size 4 --prompts 4 --rank 4"
    )
    main(*flags.split(), "--out", tmp_path / "run")
    for batch, got in zip(batches, found, strict=True):
        R = batch.rewards.view(-1, 4)
        expected = (R - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True) + 1e-4)
        assert (expected.flatten() - got).abs().max() < 1e-6  # fp32
        assert (got[~batch.rollout.finished] != 0).any()
    # of two answers that are right and two that were cut, the right ones learn
    flags = config(overlong="mask", group_size=4)
    right, *_, cut = train.advantages_of(flags, torch.tensor([1.0, 1, 0, 0])).tolist()
    assert right == -cut == pytest.approx(0.866, abs=1e-3)


@pytest.mark.parametrize("resample, attempts", [(0, 1), (1, 2), (9, 4)])
def test_resampling_replaces_groups_without_signal(tiny_chat, monkeypatch, resample, attempts):
    """One problem in three has unequal rewards. Others are drawn until 4 have, or no draw is
    left.
    """
    calls = watch(monkeypatch, Sampler, "generate")
    asked, rewards, stats, sampled = collected(
        tiny_chat, lambda i, g: float(i % 3 == 0 and g == 1), resample=resample
    )
    live = []
    for attempt in range(attempts):
        live += [i for i in drawn(attempt, resample=resample) if i % 3 == 0]
    live = live[:4]
    assert asked[::G][: len(live)] == live and all(i % 3 for i in asked[::G][len(live) :])
    assert rewards == [float(i % 3 == 0 and b % G == 1) for b, i in enumerate(asked)]
    assert stats["signal"] == len(live) / 4 and stats["resampled"] == 4 * (attempts - 1)
    # each draw has numbers, so random bits, of its own
    first = [call["first_sequence"] for call in calls]
    assert first == [4 * G * attempt for attempt in range(attempts)]
    tokens = sum(int(call["return"].lengths.sum()) for call in calls)
    assert stats["rollout_tok_s"] * stats["rollout_s"] == pytest.approx(tokens)


@pytest.mark.parametrize("limit, cache", [(12, 3), (3, 1)])
def test_a_long_answer_pays_the_overlong_penalty(tiny_chat, limit, cache):
    """The last quarter of the tokens costs up to 1. Rewards are float64 that differ by 1e-9 at
    least.
    """
    plain, paid = (
        collected(tiny_chat, lambda i, g: i + g / 8, max_new_tokens=limit, overlong=overlong)
        for overlong in ("none", "penalty")
    )
    lengths = paid[-1].lengths.tolist()
    due = [min(1, max(0, n - limit + cache) / cache) for n in lengths]
    assert paid[1] == [round(r - d, 9) for r, d in zip(plain[1], due, strict=True)]
    assert len(set(due)) > min(cache, 2)


def test_a_rank_has_its_own_problems_and_numbers(tiny_chat, monkeypatch):
    """In each attempt, the second of two ranks has half of the problems, and numbers of its own."""
    calls = watch(monkeypatch, Sampler, "generate")
    monkeypatch.setattr(train, "rank_and_count", lambda: (1, 2))
    monkeypatch.setattr(train, "gather", lambda number: [number, number])
    asked, *_ = collected(tiny_chat, lambda i, g: 0.0, resample=1)
    assert [(len(call["prompts"]), call["first_sequence"]) for call in calls] == [
        (2, 2 * G),
        (2, 6 * G),
    ]
    assert asked[::G] == drawn(resample=1)[2:]


def test_ranks_take_turns_in_the_data_and_skip_nothing(tiny_chat, monkeypatch):
    """The second of two ranks draws three times, and the first one only for the first and the last
    of them: each time, they take the next problems, two for each rank that draws."""
    drawing = iter([[1, 1], [0, 1], [1, 1], [1, 0]])
    monkeypatch.setattr(train, "rank_and_count", lambda: (1, 2))
    monkeypatch.setattr(train, "gather", lambda n: next(drawing) if type(n) is bool else [n, n])
    calls = watch(monkeypatch, train, "batch_of", lambda given: (given["start"], given["count"]))
    # its third draw brings the second group with unequal rewards
    groups = itertools.count()
    flat = lambda i, g: float(g == 1 and next(groups) >= 4)  # noqa: E731
    *_, stats, _ = collected(tiny_chat, flat, resample=3)
    assert calls == [(2, 2), (4, 2), (8, 2)] and stats["drawn"] == 12


def test_batches_follow_the_seed_and_each_epoch_covers_every_problem():
    """20 problems, 8 per rollout: five rollouts are two epochs of different orders. Batches of
    another size go on where the others have ended.
    """
    flags, line = config(prompts=8), []
    for start in range(0, 320, 8):
        line += train.batch_of(range(20), flags, start, 8)
    epochs = [tuple(line[i : i + 20]) for i in range(0, len(line) - 19, 20)]
    assert all(sorted(epoch) == [*range(20)] for epoch in epochs)
    assert len(set(epochs)) == len(epochs) >= 2
    assert train.batch_of(range(20), flags, 30, 3) == line[30:33]
    flags.seed = 1
    assert train.batch_of(range(20), flags, 0, 8) != line[:8]


@pytest.mark.parametrize("solved, attempts", [(1, 1), (3, 4), (41, 4)])
def test_the_next_batch_begins_where_the_last_attempt_ended(tiny_chat, solved, attempts):
    """One problem of `solved` has unequal rewards. Nothing is skipped if nothing was replaced."""
    rewards = lambda i, g: float(i % solved == solved - 1 and g == 1)  # noqa: E731
    *_, stats, _ = collected(tiny_chat, rewards, resample=3)
    assert stats["drawn"] == 4 * attempts and stats["resampled"] == 4 * (attempts - 1)


# --- evaluation


class Script:
    """A sampler whose answers are given: (prompt, temperature) → text, finished."""

    def __init__(self, model, tokenizer, answer):
        self.model, self.tokenizer, self.answer = model, tokenizer, answer

    def generate(
        self,
        prompts,
        group_size,
        max_new_tokens,
        temperature,
        stop_ids,
        seed,
        step,
        first_sequence,
        **more,
    ):
        rows = []
        for prompt in prompts:
            text, finished = self.answer(self.tokenizer.decode(prompt), temperature)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [2] * finished
            tokens = torch.tensor([prompt + ids])
            rows += [
                Rollout(
                    tokens=tokens,
                    logprobs=torch.zeros(tokens.shape),
                    lengths=torch.tensor([len(ids)]),
                    finished=torch.tensor([finished]),
                    prompt_lengths=torch.tensor([len(prompt)]),
                )
            ] * group_size
        return Rollout.join(rows)


def test_evaluate_counts_strict_loose_and_sampled(tiny_chat, monkeypatch):
    """40 problems. Greedy: 10 right and ended, 10 right and cut off, 20 wrong and ended.

    Sampled: 30 are right, with their special token. Every evaluation draws the same bits, and step
    -1 is none of training's. Under noise there is none.
    """

    def answer(prompt, temperature):
        i = int(prompt[3:-1])  # "<s>12="
        if temperature:
            return f"<s>{i if i < 30 else 0}", True
        return f"{'a' if i < 20 else 'i'} {i}", i % 2 == 0 or i >= 20

    def reward(problem, text, finished):
        return float(finished and text in (f"a {problem['i']}", f"<s>{problem['i']}"))

    task = Task([], [{"i": i} for i in range(40)], lambda p: str(p["i"]), reward)
    model, tokenizer = world(tiny_chat)
    calls = watch(monkeypatch, Script, "generate")
    sampler, flags = Script(model, tokenizer, answer), config(eval_samples=3, seed=7)
    environment = Environment(task, tokenizer, STOPS, model.config, flags.max_new_tokens)
    got = train.evaluate(flags, sampler, environment)
    shares = [got[name] for name in ("eval_greedy", "eval_greedy_loose", "eval_sampled")]
    assert shares == pytest.approx([0.25, 0.5, 0.75])
    drawn = [
        [call[name] for name in ("group_size", "temperature", "seed", "step", "first_sequence")]
        for call in calls
    ]
    assert drawn == [[1, 0.0, 7, -1, 0], [3, 0.7, 7, -1, 0]]
    with aqn.noisy_norms(model, 0.1, 0, 1), pytest.raises(AssertionError, match="noise"):
        train.evaluate(flags, sampler, environment)


# --- whole runs


def test_flags_reach_what_they_name(tiny_chat, tmp_path, monkeypatch):
    """A run passes its flags to the schedule of σ, advantages, loss, model and sampler.

    It evaluates on all of --test; only the sampled answers of an evaluation are cut by
    --eval-top-p. --steps 0 reads only --test. Training takes the problems of --data that are not in
    --test.
    """
    for name, numbers in dict(test=range(37), data=range(30, 50)).items():
        lines = [f'{{"question": "Is it {n}?", "answer": "#### {n}"}}\n' for n in numbers]
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(lines))

    def seen(owner, name, *arguments):
        return watch(monkeypatch, owner, name, lambda given: tuple(given[key] for key in arguments))

    sigmas = seen(aqn, "sigma", "start", "end", "stages", "schedule")
    scales = seen(grpo, "advantages", "scale")
    losses = seen(grpo, "policy_loss", "loss_type", "clip_low", "clip_high", "beta")
    samples = seen(Sampler, "generate", "step", "temperature", "top_p")
    models = seen(train, "update", "model")
    problems = seen(train, "batch_of", "problems")
    flags = (
        f"--model {tiny_chat} --task gsm8k --test {tmp_path}/test.jsonl --prompts 2 --rank 4 "
        f"--max-new-tokens 2 --temperature .7 --eval-top-p .5 --device cpu"
    ).split()
    main(*flags, "--out", tmp_path / "alone", "--steps", 0)
    assert not problems
    main(
        *flags,
        "--out",
        tmp_path / "both",
        "--steps",
        1,
        "--data",
        tmp_path / "data.jsonl",
        *"--loss dr_grpo --clip-low .1 --clip-high .3 --beta .1 --sigma-start .5 --sigma-end .25 "
        "--sigma-stages 5 --sigma-schedule linear --gradient-checkpointing --resample 1".split(),
    )
    assert {len(given) for (given,) in problems} == {13}
    assert scales == [("none",)] and set(losses) == {("dr_grpo", 0.1, 0.3, 0.1)}
    assert sigmas == [(0.5, 0.25, 5, "linear")]
    assert [model.recomputed_layers for (model,) in models] == [2]
    # three evaluations, a step and its resampling
    assert Counter(samples) == {(-1, 0.0, 1.0): 3, (-1, 0.7, 0.5): 3, (0, 0.7, 1.0): 2}
    for name, evaluations in (("alone", 1), ("both", 2)):
        records = report.read(tmp_path / name).values()
        assert [r["problems"] for r in records if r["kind"] == "eval"] == [37] * evaluations


def test_noise_is_on_while_sampling_and_off_in_update_and_evaluation_and_the_toy_is_learnt(
    tiny_chat, tmp_path, monkeypatch
):
    """15 steps of "begin with one of the digits 0-4": the share rises from under .4 to over .8."""
    problems = [{"i": i} for i in range(40)]
    toy = Task(
        problems[:30],
        problems[30:],
        lambda p: f"{p['i']} * 7",
        lambda p, text, finished: float(text[:1] in set("01234")),
    )
    monkeypatch.setitem(launch.TASKS, "toy", lambda data, operands: toy)
    sampled = watch(
        monkeypatch,
        Sampler,
        "generate",
        lambda given: (given["step"], aqn.is_noisy(given["self"].model)),
    )
    scales = watch(monkeypatch, grpo, "advantages", lambda given: given["scale"])
    updates = watch(
        monkeypatch,
        train,
        "update",
        lambda given: (aqn.is_noisy(given["model"]), given["optimizer"].param_groups[0]["lr"]),
    )
    main(
        *f"--model {tiny_chat} --task toy --steps 15 --prompts 8 --max-new-tokens 4 --rank 4 "
        f"--lr 4e-3 --device cpu --sigma-start .05 --eval-every 5 --out {tmp_path}/toy".split()
    )
    records = report.read(tmp_path / "toy")
    steps = [r for (kind, _), r in records.items() if kind == "step"]
    assert [step for kind, step in records if kind == "eval"] == [0, 5, 10, 15]
    # 15 steps in 10 stages: the first stage, of two steps, has no noise; evaluations are step −1
    assert Counter(sampled) == {(-1, False): 8} | {(step, step > 1): 1 for step in range(15)}
    assert [r["sigma"] for r in steps] == pytest.approx(
        [aqn.sigma(step, 15, 0.05, 1e-4) for step in range(15)], rel=1e-5
    )
    noises, rates = zip(*updates, strict=True)
    assert not any(noises) and set(scales) == {"group"}
    assert rates == pytest.approx([4e-3 * (1 - step / 15) for step in range(15)])
    rewards = [r["reward"] for r in steps]
    assert rewards[0] + rewards[1] < 0.8 and min(rewards[-3:]) > 0.8


def test_the_learning_rate_by_hand():
    """Linear and cosine fall to half in the middle; two steps of warm-up give 1/3, 2/3, 1."""
    flags = dict(steps=8, lr=3.0)
    for schedule, want in dict(linear=[3, 2.25, 1.5], cosine=[3, 2.56066, 1.5]).items():
        given = config(schedule=schedule, **flags)
        rates = [learning_rate(given, step) for step in (0, 2, 4)]
        assert rates == pytest.approx(want, abs=1e-5)
    warm = config(schedule="constant", warmup=2, **flags)
    assert [learning_rate(warm, step) for step in range(4)] == pytest.approx([1, 2, 3, 3])


@pytest.mark.parametrize("steps, warmup", [(20, 8), (16, 1), (100, 99), (7, 0)])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_rate_reaches_its_maximum_and_then_falls_as_in_transformers(name, steps, warmup):
    """transformers' first step has a rate of 0. Ours has none that is lost."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = transformers.get_scheduler(name, optimizer, warmup, steps)
    given = config(schedule=name, steps=steps, warmup=warmup, lr=1.0)
    rates = [learning_rate(given, step) for step in range(steps)]
    assert max(rates) == rates[warmup] == 1 and min(rates) > 0
    for step, rate in enumerate(rates):
        if step >= warmup:
            assert rate == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_ranks_share_an_evaluation(tiny_chat, monkeypatch):
    """Of 5 problems, 4 of them solved, two ranks answer 2 and 3, as one process would number their
    sequences. The measurements are of all.
    """
    model, tokenizer = world(tiny_chat)
    task = Task(
        [],
        [{"i": i} for i in range(5)],
        lambda problem: str(problem["i"]),
        lambda problem, text, finished: float(text == "1"),
    )
    flags = config(eval_samples=3)
    environment = Environment(task, tokenizer, STOPS, model.config, flags.max_new_tokens)
    sampler = Script(model, tokenizer, lambda prompt, _: (str(int(int(prompt[3:-1]) < 4)), True))
    calls, shares, found = watch(monkeypatch, Script, "generate"), [], []

    def sum_over_ranks(metrics):
        shares.append(dict(metrics))
        return {name: sum(share[name] for share in shares) for name in metrics}

    monkeypatch.setattr(train, "sum_over_ranks", sum_over_ranks)
    for rank in range(2):
        monkeypatch.setattr(train, "rank_and_count", lambda rank=rank: (rank, 2))
        got = train.evaluate(flags, sampler, environment)
        found.append((got["eval_greedy"], got["eval_greedy_loose"], got["eval_sampled"]))
    assert found == [(0.4, 0.4, 0.4), (0.8, 0.8, 0.8)]
    asked = [(len(call["prompts"]), call["first_sequence"]) for call in calls]
    assert asked == [(2, 0), (2, 0), (3, 2), (3, 6)]
