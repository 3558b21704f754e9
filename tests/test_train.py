"""python -m pytest tests/test_train.py"""
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from command import forks, main

import aqn
import checkpoint
import grpo
import launch
import lora
import model as decoder
import runs
import train
from rollout import Rollout, Sampler
from tasks import Task

G = 4
CASES = [(loss, correction) for loss in grpo.CLIP for correction in ("bypass", "none", "tis")
         if (loss, correction) != ("gspo", "bypass")]
ADVANTAGES = torch.tensor([1.5, -.5, -.5, -.5] + [0.0] * 4 + [.9, -.9, .9, -.9] + [-1.5, .5, 0, 1])


def config(**flags):
    return train.Config(**(dict(prompts=4, group_size=G, max_new_tokens=8, temperature=.7, rank=4, alpha=8)
                           | flags))


def actor(folder):
    """An fp32 model whose adapter is not 0."""
    model = decoder.load(str(folder), "bf16", rank=4, alpha=8)
    for p in model.parameters():
        p.data.normal_(0, .1, generator=torch.Generator().manual_seed(p.numel()))
    lora.refresh(model)
    return model


def rollout(model, sigma=.2, step=1, stop_ids=(2, 5, 9, 13)):
    """16 answers of unequal lengths to 4 prompts of unequal lengths; noise makes the ratio differ from 1."""
    with aqn.noisy_norms(model, sigma, 0, step):
        prompts = [[1, 7, 8], [1, 3, 4, 5, 6, 17], [1, 20], [1, 9, 9, 9]]
        return Sampler(model).generate(prompts, G, 8, .7, list(stop_ids), seed=3, step=step)


def gradient(model, flags, sampled, adv, old, first=True):
    stats = train.backward(flags, model, sampled, adv, old.clone(), first)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), stats


def all_at_once(model, flags, sampled, adv, old, first):
    """The same gradient from all rows in a single call of the loss: none skipped, no micro-batches."""
    where = (sampled.tokens, sampled.prompt_lengths, sampled.lengths, flags.temperature)
    new, reference = model.logprobs(*where)[0], None
    before = new.detach() if first and flags.correction != "bypass" else old
    weights = (before - sampled.logprobs).exp().clamp(max=2) if flags.correction == "tis" else None
    if flags.beta:
        with lora.disabled(model), torch.no_grad():
            reference = model.logprobs(*where)[0]
    rows, tokens = len(adv), int(sampled.lengths.sum())
    normalizer = dict(dapo=tokens, cispo=tokens, grpo=rows, gspo=rows, dr_grpo=rows * 8)[flags.loss]
    loss, _ = grpo.policy_loss(new, before, adv, decoder.answer_mask(*where[:3]), normalizer, flags.loss,
                               weights, ref_logprobs=reference, beta=flags.beta)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def assert_same(got, want):
    """Two fp32 sums of ~100 terms in another order differ by about √100 · 6e-8: 1e-5 of the largest."""
    assert want.abs().max() > 1e-4 and (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("loss, correction", CASES)
@pytest.mark.parametrize("beta", [0.0, .1])
def test_the_gradient_does_not_depend_on_cut_or_order_or_skipped_rows(tiny_chat, loss, correction, beta):
    """Micro-batches of one row, of some (recomputed), of all rows, shuffled: always the same gradient."""
    model, order = actor(tiny_chat), torch.randperm(16)
    sampled = rollout(model)
    assert 1 < len(sampled.lengths.unique()) and 0 < sampled.finished.sum() < 16
    moved = sampled.logprobs + .3 * torch.randn(sampled.logprobs.shape)
    for first, old in ((True, sampled.logprobs), (False, moved)):
        flags = config(loss=loss, correction=correction, beta=beta)
        want = all_at_once(model, flags, sampled, ADVANTAGES, old, first)
        for micro in (1, 40, 10**6):
            flags.micro_tokens, model.gradient_checkpointing = micro, micro == 40
            assert_same(gradient(model, flags, sampled, ADVANTAGES, old, first)[0], want)
            shuffled = (sampled.rows(order), ADVANTAGES[order], old[order], first)
            assert_same(gradient(model, flags, *shuffled)[0], want)


def ranks_gradients(rank, folder, shared):
    """The gradients of one of two ranks. Rank 0 has rows 0-7, then all rows with an advantage."""
    if rank is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{shared}/meet", rank=rank, world_size=2)
    model = actor(folder)
    sampled, grads = rollout(model), []
    for last in (8, 12):                              # with 12, rank 1 has no row to run: its adv are 0
        adv = ADVANTAGES * (torch.arange(16) < last + 4 * (last == 8))
        mine = {None: torch.arange(16), 0: torch.arange(last), 1: torch.arange(last, 16)}[rank]
        for loss, correction in CASES:
            flags = config(loss=loss, correction=correction, micro_tokens=40)
            grad, stats = gradient(model, flags, sampled.rows(mine), adv[mine], sampled.logprobs[mine])
            grads.append(torch.cat((grad, torch.tensor([stats[k] for k in ("rows", "entropy", "kl_noise")]))))
    if rank is None:
        return grads
    torch.save(grads, f"{shared}/{rank}")
    dist.destroy_process_group()


def test_two_ranks_get_the_gradient_of_one_process(tiny_chat, tmp_path):
    """Over gloo, for every loss, also when the second rank has no row to run and adds zeros."""
    torch.multiprocessing.start_processes(ranks_gradients, (str(tiny_chat), str(tmp_path)), nprocs=2,
                                          start_method=forks().get_start_method())
    alone = ranks_gradients(None, str(tiny_chat), "")
    first, second = (torch.load(tmp_path / rank) for rank in "01")
    assert len(alone) == 2 * len(CASES)
    for one, a, b in zip(alone, first, second, strict=True):
        assert torch.equal(a, b)
        assert_same(a[:-3], one[:-3])
        assert a[-3:].tolist() == pytest.approx(one[-3:].tolist(), rel=1e-5)


def test_only_rows_with_an_advantage_run_and_they_are_the_sampled_tokens(tiny_chat, monkeypatch):
    """Only rows with an advantage run, with beta all rows; their tokens are the sampled ones."""
    model, seen = actor(tiny_chat), []
    sampled, logprobs = rollout(model), model.logprobs

    def ids(tokens, prompts, lengths):
        return [tuple(row[:n]) for row, n in zip(tokens.tolist(), (prompts + lengths).tolist(), strict=True)]
    monkeypatch.setattr(model, "logprobs", lambda *where: seen.extend(ids(*where[:3])) or logprobs(*where))
    rows = ids(sampled.tokens, sampled.prompt_lengths, sampled.lengths)
    stats = gradient(model, config(), sampled, ADVANTAGES, sampled.logprobs)[1]
    assert Counter(seen) == Counter(r for r, a in zip(rows, ADVANTAGES.tolist(), strict=True) if a)
    assert stats["rows"] == 11 and stats["seen"] == sum(map(len, seen))
    seen.clear()
    assert gradient(model, config(beta=.1), sampled, ADVANTAGES, sampled.logprobs)[1]["rows"] == 16
    assert Counter(seen) == Counter(rows + rows)                      # policy and reference


@pytest.mark.parametrize("loss, correction", CASES)
def test_a_masked_truncated_answer_is_in_neither_numerator_nor_denominator(tiny_chat, loss, correction):
    """--overlong mask: the gradient is that of the finished answers alone."""
    model = actor(tiny_chat)
    sampled = rollout(model)
    ended = sampled.finished.nonzero()[:, 0]
    flags = config(loss=loss, correction=correction, overlong="mask")
    got, stats = gradient(model, flags, sampled, ADVANTAGES, sampled.logprobs)
    flags.overlong = "none"
    alone = sampled.rows(ended)
    assert_same(got, gradient(model, flags, alone, ADVANTAGES[ended], alone.logprobs)[0])
    assert stats["rows"] == (ADVANTAGES[ended] != 0).sum() < (ADVANTAGES != 0).sum()


@pytest.mark.parametrize("loss", grpo.CLIP)
def test_without_any_advantage_or_any_trained_answer_nothing_moves(tiny_chat, loss):
    """No step and no NaN: the adapter keeps its bytes although AdamW has momentum from an earlier step."""
    model = actor(tiny_chat)
    sampled = rollout(model)
    flags = config(loss=loss, correction="none", overlong="mask", updates_per_rollout=2, steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=.1)
    assert train.update(flags, model, optimizer, sampled, ADVANTAGES)["grad_norm"] > 0
    before = [p.detach().clone() for p in model.parameters()]
    cut = sampled._replace(finished=torch.zeros(16, dtype=torch.bool))
    for batch, adv in ((sampled, torch.zeros(16)), (cut, ADVANTAGES)):
        stats = train.update(flags, model, optimizer, batch, adv)
        assert all(map(torch.equal, before, model.parameters()))
        assert stats["rows"] == 0 and stats["grad_norm"] is None and stats["entropy"] is None


def test_the_first_step_reads_a_loss_of_zero_and_moves_every_lora_b(tiny_chat, monkeypatch):
    """On-policy, Σ A of a group is 0 and so is grpo's loss (16 fp32 terms of order 1: 1e-6); the step is not.

    And the sampler follows: its log-probabilities are then the trainer's (1e-4, issue 2), not the base's.
    """
    model, losses, loss_of = decoder.load(str(tiny_chat), "bf16", rank=4, alpha=8), [], grpo.policy_loss
    sampled = rollout(model, sigma=0)

    def spy(*args, **more):
        losses.append(loss_of(*args, **more))
        return losses[-1]
    monkeypatch.setattr(grpo, "policy_loss", spy)
    adv = grpo.advantages(torch.rand(4, G), "none").flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=.02)
    flags = config(loss="grpo", correction="none", micro_tokens=10**6)
    stats = train.update(flags, model, optimizer, sampled, adv)
    assert abs(losses[0][0].item()) < 1e-6 and stats["grad_norm"] > 1e-3 and stats["clip_fraction"] == 0
    assert all((p != 0).any() for name, p in model.named_parameters() if name.endswith("lora_B"))
    again = rollout(model, sigma=0)
    where = (again.tokens, again.prompt_lengths, again.lengths, .7)
    with torch.no_grad():
        now = model.logprobs(*where)[0]
        with lora.disabled(model):
            base = model.logprobs(*where)[0]
    assert (now - again.logprobs).abs().max() < 1e-4 < .01 < (base - again.logprobs).abs().max()


def test_the_ratio_carries_the_noise_with_bypass_and_nothing_without(tiny_chat):
    """Clean sampler: kl_noise is 0 but for rounding, k3(1e-5) = 5e-11; noisy: it is not, and the clip works.

    With another temperature in the trainer than in the sampler the first would fail. By hand it is the mean
    of r − 1 − ln r, r = trainer / sampler, over the tokens of rows with an advantage.
    """
    model = actor(tiny_chat)
    for sigma, correction in itertools.product((0, .3), ("bypass", "none")):
        sampled = rollout(model, sigma)
        stats = gradient(model, config(correction=correction), sampled, ADVANTAGES, sampled.logprobs)[1]
        assert stats["kl_noise"] > 1e-2 if sigma else 0 <= stats["kl_noise"] < 1e-9
        where = sampled.tokens, sampled.prompt_lengths, sampled.lengths
        mask = decoder.answer_mask(*where) & (ADVANTAGES != 0)[:, None]
        log_r = (model.logprobs(*where, .7)[0] - sampled.logprobs)[mask].detach()
        assert stats["kl_noise"] == pytest.approx((log_r.expm1() - log_r).mean().item(), rel=1e-3, abs=1e-9)
        assert (stats["clip_fraction"] > 0) == (sigma > 0 and correction == "bypass")


@pytest.mark.parametrize("correction", ["bypass", "none", "tis"])
def test_what_old_is_over_four_updates(tiny_chat, monkeypatch, correction):
    """bypass: the recorded ones; none, tis: the trainer's before the first update, ratio exactly 1 there; tis
    weights min(exp(old − recorded), 2). The policy then moves away from old. Measured is the first update; of
    the last the clips, which the first cannot have."""
    model, calls, loss_of, measured, backward = actor(tiny_chat), [], grpo.policy_loss, [], train.backward
    sampled = rollout(model, sigma=.5)

    def spy(logprobs, old, adv, mask, normalizer, loss, weights, *rest, **more):
        calls.append((logprobs.detach(), old.clone(), weights, mask))
        return loss_of(logprobs, old, adv, mask, normalizer, loss, weights, *rest, **more)
    monkeypatch.setattr(grpo, "policy_loss", spy)
    flags = config(correction=correction, updates_per_rollout=4, steps=4, micro_tokens=10**6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    monkeypatch.setattr(train, "backward",
                        lambda *a, **more: measured.append(backward(*a, **more)) or dict(measured[-1]))
    stats = train.update(flags, model, optimizer, sampled, ADVANTAGES)
    assert stats["kl_noise"] == measured[0]["kl_noise"] != measured[3]["kl_noise"]
    assert stats["clip_fraction"] == measured[3]["clip_fraction"] != measured[0]["clip_fraction"]
    recorded = sampled.logprobs[sampled.micro_batches(ADVANTAGES.nonzero()[:, 0], 10**6)[0]]
    first, mask = calls[0][0], calls[0][3]
    recorded = recorded[:, :mask.shape[1]]
    assert len(calls) == 4 and (first - recorded)[mask].abs().max() > .1
    for _, old, weights, _ in calls:
        assert torch.equal(old[mask], (recorded if correction == "bypass" else first)[mask])
        if correction == "tis":
            want = (first - recorded).exp().clamp(max=2)[mask]
            assert torch.equal(weights[mask], want) and want.max() == 2 and want.min() < 1
        else:
            assert weights is None
    assert (calls[3][0] - first)[mask].abs().max() > .01


def test_kl_to_the_base_is_zero_before_the_first_step_and_its_reference_never_moves(tiny_chat):
    """The reference is the model without adapter: with lora_B = 0 the policy itself, later the same bits. The
    KL by hand: the mean of ln(policy / reference) over the policy's own tokens."""
    model = decoder.load(str(tiny_chat), "bf16", rank=4, alpha=8)
    sampled, flags = rollout(model, 0), config(beta=.1)
    where, bases = (sampled.tokens, sampled.prompt_lengths, sampled.lengths, .7), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=.02)
    mask = decoder.answer_mask(*where[:3])
    for _ in range(2):
        with torch.no_grad():
            now = model.logprobs(*where)[0]
        stats = train.update(flags, model, optimizer, sampled, ADVANTAGES)
        with lora.disabled(model), torch.no_grad():
            bases.append((stats["kl_reference"], model.logprobs(*where)[0]))
        by_hand = (now - bases[-1][1])[mask].mean().item()
        assert stats["kl_reference"] == pytest.approx(by_hand, rel=1e-3, abs=1e-5)
    # [x, xa] @ [W, 0].T and x @ W.T may differ in the order of their fp32 sums
    assert abs(bases[0][0]) < 1e-5 < abs(bases[1][0]) and torch.equal(bases[0][1], bases[1][1])


class Script:
    """A sampler whose answers are given by a function (prompt, temperature) → text, finished."""

    def __init__(self, model, tokenizer, answers):
        self.model, self.tokenizer, self.answers, self.calls = model, tokenizer, answers, []

    def generate(self, prompts, group_size, max_new, temperature, stop_ids, seed, step, first=0, progress="",
                 top_p=1.0):
        self.calls.append((prompts, group_size, temperature, seed, step, first))
        rows = []
        for prompt, (text, finished) in ((p, self.answers(self.tokenizer.decode(p), temperature))
                                         for p in prompts for _ in range(group_size)):
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [2] * finished
            numbers = (torch.tensor([n]) for n in (len(ids), finished, len(prompt)))
            rows.append(Rollout(torch.tensor([prompt + ids]), torch.zeros(1, len(prompt + ids)), *numbers))
        return Rollout.join(rows)


def world(folder):
    source = checkpoint.open(str(folder))
    return actor(folder), source.tokenizer(), source.stop_ids()


def test_evaluate_counts_strict_loose_and_sampled(tiny_chat):
    """40 problems: greedy 10 right and ended, 10 right and cut off, 20 wrong and ended; sampled right only
    with their special token."""
    def answers(prompt, temperature):
        i = int(prompt.rstrip("=").split(">")[1])
        return ("<s>?", True) if temperature else (f"{'a' if i < 20 else 'i'} {i}", i % 2 == 0 or i >= 20)
    model, tokenizer, stop_ids = world(tiny_chat)
    judged = []

    def reward(problem, text, finished):
        judged.append(text)
        return float(finished and text in (f"a {problem['i']}", "<s>?"))
    task = Task([], [{"i": i} for i in range(40)], lambda p: str(p["i"]), reward)
    sampler, flags = Script(model, tokenizer, answers), config(eval_samples=3, seed=7)
    twice = [train.evaluate(flags, sampler, task, tokenizer, stop_ids) for _ in range(2)]
    for got in twice:
        shares = [got[k] for k in ("eval_greedy", "eval_greedy_loose", "eval_sampled")]
        assert shares == pytest.approx([.25, .5, 1], abs=1e-6) and got["problems"] == 40     # thirds in fp32
    assert sum("?" in text for text in judged) == 2 * 40 * 3          # a sampled answer is judged once
    half = len(sampler.calls) // 2
    assert sampler.calls[:half] == sampler.calls[half:]               # the same bits at every evaluation
    assert {(seed, step) for *_, seed, step, _ in sampler.calls} == {(7, -1)}      # and none of training's
    assert half == 2                                                  # one call for all problems
    drawn = [range(call[5], call[5] + len(call[0]) * call[1]) for call in sampler.calls[:half] if call[2]]
    assert sorted(i for r in drawn for i in r) == list(range(120))    # no number, so no bits, twice


def test_evaluation_is_repeatable_and_refuses_noise(tiny_chat):
    model, tokenizer, stop_ids = world(tiny_chat)
    task = Task([], [{"i": i} for i in range(20)], lambda p: str(p["i"]), lambda p, text, end: len(text) % 2)
    flags = config(temperature=1.0)
    one, two = (train.evaluate(flags, Sampler(model), task, tokenizer, stop_ids) for _ in range(2))
    assert one | {"rollout_s": 0} == two | {"rollout_s": 0} and 0 < one["eval_sampled"] < 1
    with aqn.noisy_norms(model, .1, 0, 1), pytest.raises(AssertionError, match="noise"):
        train.evaluate(flags, Sampler(model), task, tokenizer, stop_ids)


def test_only_the_sampled_answers_of_an_evaluation_are_cut(tiny_chat, tmp_path, monkeypatch):
    """A step with resampling and mismatch between two evaluations: training never passes top_p."""
    generate, calls = Sampler.generate, []

    def spy(self, prompts, group_size, new, temperature, stop_ids, seed, step, *rest, **more):
        calls.append((step, temperature, more.get("top_p")))
        return generate(self, prompts, group_size, new, temperature, stop_ids, seed, step, *rest, **more)
    monkeypatch.setattr(Sampler, "generate", spy)
    main(*f"--model {tiny_chat} --task addition --steps 1 --prompts 2 --max-new-tokens 4 --rank 4 "
         f"--resample 1 --device cpu --temperature .7 --eval-top-p .5 --out {tmp_path}".split())
    assert set(calls) == {(0, .7, None), (-1, 0.0, 1.0), (-1, .7, .5)}
    assert Counter(step for step, *_ in calls) == {0: 2, -1: 4}       # greedy and sampled, before and after


def test_the_whole_test_file_is_evaluated_on(tiny_chat, tmp_path, capsys):
    """--steps 0 reads only --test. Training takes the problems of --data that are not in --test."""
    def file(name, numbers):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f'{{"question": "Is it {n}?", "answer": "#### {n}"}}\n' for n in numbers))
        return path
    flags = (f"--model {tiny_chat} --task gsm8k --test {file('test', range(37))} --prompts 2 --rank 4 "
             f"--max-new-tokens 2 --device cpu --out").split()
    main(*flags, tmp_path / "alone", "--steps", 0)
    assert "gsm8k: 0 problems to train on, 37 held out; 2 prompts" in capsys.readouterr().out
    main(*flags, tmp_path / "both", "--steps", 1, "--data", file("data", range(30, 50)))
    assert "gsm8k: 13 problems to train on, 37 held out; 2 prompts" in capsys.readouterr().out
    for name, evaluations in (("alone", 1), ("both", 2)):
        records = runs.read(tmp_path / name).values()
        assert [r["problems"] for r in records if r["kind"] == "eval"] == [37] * evaluations


@pytest.mark.parametrize("updates, resample", [(1, 0), (4, 0), (2, 2)])
def test_batch_is_a_function_of_seed_and_step_and_each_epoch_covers_every_problem(updates, resample):
    """20 problems, 8 per rollout: five rollouts are two epochs of different orders."""
    problems = list(range(20))
    flags = config(prompts=8, updates_per_rollout=updates, steps=40, resample=resample)
    where = [(step, attempt) for step in range(0, 40, updates) for attempt in range(1 + resample)]
    chosen = {at: train.batch(problems, flags, *at) for at in reversed(where)}
    line = [i for at in where for i in chosen[at]]
    epochs = [line[i:i + 20] for i in range(0, len(line) - 19, 20)]
    assert all(sorted(e) == problems for e in epochs) and len(set(map(tuple, epochs))) == len(epochs) >= 2
    assert all(train.batch(problems, flags, *at) == chosen[at] for at in where)
    flags.seed = 1
    assert train.batch(problems, flags, 0) != chosen[0, 0]


def collected(folder, rewards, **flags):
    """collect() on problems 0-39 with reward(problem, how many answers of this problem came before)."""
    model, tokenizer, stop_ids = world(folder)
    count = Counter()

    def reward(problem, text, finished):
        count[problem["i"]] += 1
        return rewards(problem["i"], count[problem["i"]] - 1)
    task = Task([{"i": i} for i in range(40)], [], lambda p: f"{p['i']}*", reward)
    sampled, got, texts, stats = train.collect(config(**flags), Sampler(model), task, tokenizer, stop_ids, 0)
    asked = [int(tokenizer.decode(row[1:n - 2]))                      # of "<s>12*=…", n = 5
             for row, n in zip(sampled.tokens.tolist(), sampled.prompt_lengths.tolist(), strict=True)]
    assert [f"{i}*" for i in asked] == [prompt for prompt, _ in texts]
    assert [tokenizer.decode(a) for a in sampled.answers()] == [a for _, a in texts]
    return asked, got.tolist(), stats, task


def test_a_reward_belongs_to_the_prompt_and_the_sample_that_earned_it(tiny_chat):
    """A reward that echoes its problem's number and the sample's: tokens, texts and rewards say the same."""
    asked, rewards, stats, task = collected(tiny_chat, lambda i, g: i + g / 8)
    drawn = [problem["i"] for problem in train.batch(task.train, config(), 0)]
    assert asked == [i for i in drawn for _ in range(G)] and len(set(drawn)) == 4
    assert rewards == [i + g / 8 for i in drawn for g in range(G)]
    assert stats["reward"] == pytest.approx(sum(rewards) / 16) and stats["signal"] == 1
    assert stats["mismatch"] == pytest.approx(1, abs=1e-4) and stats["resampled"] == 0


@pytest.mark.parametrize("resample", [0, 1, 9])
def test_resampling_replaces_groups_without_signal_and_counts_them(tiny_chat, monkeypatch, resample):
    """One problem in three tells its answers apart: others are drawn until 4 do, or no draw is left, with
    other random bits."""
    generate, numbers, tokens = Sampler.generate, [], []

    def spy(self, prompts, *rest, **more):
        numbers.extend(range(rest[-1], rest[-1] + len(prompts) * G))
        tokens.append(int((sampled := generate(self, prompts, *rest, **more)).lengths.sum()))
        return sampled

    monkeypatch.setattr(Sampler, "generate", spy)
    reward = lambda i, g: float(i % 3 == 0 and g == 1)                # noqa: E731
    asked, rewards, stats, task = collected(tiny_chat, reward, resample=resample)
    flags, live, used = config(resample=resample), [], 0
    for attempt in range(1 + resample):
        live += [p["i"] for p in train.batch(task.train, flags, 0, attempt) if p["i"] % 3 == 0]
        used = attempt
        if len(live) >= 4:
            break
    live = live[:4]
    assert asked[::G][:len(live)] == live and all(i % 3 for i in asked[::G][len(live):])
    assert rewards == [float(i % 3 == 0 and b % G == 1) for b, i in enumerate(asked)]
    assert stats["signal"] == len(live) / 4 and stats["resampled"] == 4 * used
    assert numbers == [*range(4 * G * (used + 1))]
    assert stats["rollout_tok_s"] * stats["rollout_s"] == pytest.approx(sum(tokens))
    assert {0: len(live) < 4, 9: len(live) == 4 and used > 1}.get(resample, True)


@pytest.mark.parametrize("limit, cache", [(8, 2), (3, 1)])
def test_a_long_answer_pays_the_overlong_penalty(tiny_chat, monkeypatch, limit, cache):
    """The penalty is added to the reward, in the last quarter of the tokens before the limit."""
    generate, lengths = Sampler.generate, torch.arange(16) % limit + 1
    monkeypatch.setattr(Sampler, "generate", lambda *a, **b: generate(*a, **b)._replace(lengths=lengths))
    plain, paid = (collected(tiny_chat, lambda i, g: i + g / 8, **flags)[1]
                   for flags in ({}, dict(overlong="penalty", max_new_tokens=limit)))
    want = grpo.overlong_penalty(lengths, limit, cache).tolist()
    assert paid == [round(r + w, 9) for r, w in zip(plain, want, strict=True)]
    assert [w < 0 for w in want[:limit]] == [n > limit - cache for n in range(1, limit + 1)]
    assert min(want) == -1
    # rewards of .6 and .4 less these are equal, 0: in fp32 they would be 6e-9 and 2e-8 off, a signal
    paid = grpo.overlong_penalty(torch.tensor([13, 14]), 16, 5).tolist()
    assert {round(r + q, 9) for r, q in zip((.4, .6), paid, strict=True)} == {0}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_problems_and_numbers(tiny_chat, monkeypatch, rank):
    """In each attempt, each of two ranks gets half of the problems, and numbers that no other answer has."""
    generate, seen = Sampler.generate, []

    def spy(self, prompts, *rest, **more):
        seen.append((len(prompts), rest[-1]))
        return generate(self, prompts, *rest, **more)
    monkeypatch.setattr(Sampler, "generate", spy)
    monkeypatch.setattr(train, "rank_and_count", lambda: (rank, 2))
    asked, *_, task = collected(tiny_chat, lambda i, g: 0., resample=1)
    assert seen == [(2, (2 * attempt + rank) * 2 * G) for attempt in range(2)]
    mine = train.batch(task.train, config(resample=1), 0)[2 * rank:2 * rank + 2]
    assert asked == [problem["i"] for problem in mine for _ in range(G)]


def test_rewards_that_differ_by_a_rounding_are_equal(tiny_chat):
    asked, rewards, stats, _ = collected(tiny_chat, lambda i, g: .3 if g else .1 + .2)
    assert set(rewards) == {.3} and stats["signal"] == 0


def test_mismatch_is_the_factor_by_which_they_differ(tiny_chat):
    """Log-probabilities recorded half a nat too high, or too low, give a factor of e^½."""
    class High(Sampler):
        def generate(self, *given, **more):
            r = super().generate(*given, **more)
            return r._replace(logprobs=r.logprobs + .5 * (r.logprobs != 0))
    model, tokenizer, stop_ids = world(tiny_chat)
    task = Task([{"i": i} for i in range(40)], [], lambda p: f"{p['i']}*", lambda *_: 0.)
    stats = train.collect(config(), High(model), task, tokenizer, stop_ids, 0)[3]
    assert stats["mismatch"] == pytest.approx(math.exp(.5), rel=1e-4)


def test_adamw_gets_the_clipped_gradient_and_its_flags(tiny_chat):
    """One update: the moments are (1 − .9) g and (1 − .99) g² = m², |g| = --max-grad-norm; a weight loses
    lr · --weight-decay of itself, and lr by the sign of g."""
    model, flags = actor(tiny_chat), config(max_grad_norm=.5, weight_decay=.5, lr=.1)
    before, optimizer = [p.detach().clone() for p in model.parameters()], train.adamw(flags, model)
    assert train.update(flags, model, optimizer, rollout(model), ADVANTAGES)["grad_norm"] > .6
    m, v = ([optimizer.state[p][k] for p in model.parameters()] for k in ("exp_avg", "exp_avg_sq"))
    assert torch.cat([x.flatten() for x in m]).norm() == pytest.approx(.05, rel=1e-4)
    # each side is a few products in fp32, 6e-8 each; a moment of less than 1e-6, squared, counts as 0
    for p, old, a, b in zip(model.parameters(), before, m, v, strict=True):
        torch.testing.assert_close(b, a * a, atol=1e-12, rtol=1e-5)
        torch.testing.assert_close(p.data, .95 * old - a / (10 * a.abs() + 1e-8), atol=1e-6, rtol=1e-5)


def test_flags_reach_what_they_name(tiny_chat, tmp_path, monkeypatch):
    """A run passes its flags to the schedule of σ, the advantages, the loss and the model."""
    seen = {}

    def spy(of, name):
        real = getattr(of, name)
        monkeypatch.setattr(of, name,
                            lambda *a, **more: seen.setdefault(name, (a, more)) and real(*a, **more))
    for of, name in ((aqn, "sigma"), (grpo, "advantages"), (grpo, "policy_loss"), (train, "backward")):
        spy(of, name)
    both = (f"--model {tiny_chat} --task addition --steps 1 --prompts 2 --max-new-tokens 4 --device cpu "
            f"--rank 4 --beta .1 --sigma-stages 5 --sigma-schedule linear --gradient-checkpointing "
            f"--out {tmp_path}/")
    main(*(both + "a --loss dr_grpo").split())
    assert seen["advantages"][0][1] == "none" and seen["policy_loss"][0][5:] == ("dr_grpo", None, None, None)
    assert seen["sigma"][0][4:] == (5, "linear") and seen["backward"][0][1].gradient_checkpointing
    assert seen["policy_loss"][1]["beta"] == .1
    seen.clear()
    main(*(both + "b --clip-low .1 --clip-high .3").split())
    assert seen["advantages"][0][1] == "group" and seen["policy_loss"][0][5:] == ("dapo", None, .1, .3)


def test_the_learning_rate_by_hand():
    """Linear and cosine fall to half in the middle; two steps of warm-up give 1/3, 2/3, 1."""
    flags = dict(steps=8, lr=3.0)
    for schedule, want in dict(linear=[3, 2.25, 1.5], constant=[3, 3, 3], cosine=[3, 2.56066, 1.5]).items():
        assert [train.learning_rate(config(schedule=schedule, **flags), s) for s in (0, 2, 4)] == \
            pytest.approx(want, abs=1e-5)
    warm = config(schedule="constant", warmup=2, **flags)
    assert [train.learning_rate(warm, s) for s in range(4)] == pytest.approx([1, 2, 3, 3])


def test_what_is_due_every_so_many_steps_is_due_once_for_each_multiple_that_rollouts_of_four_pass():
    """One step per rollout: at the multiples. Four: at the first rollout at or after each multiple."""
    for every in (1, 2, 3, 5, 7):
        assert [s for s in range(24) if train.due(config(), every, s)] == list(range(0, 24, every))
        four = config(updates_per_rollout=4, steps=24)
        assert [s for s in range(0, 24, 4) if train.due(four, every, s)] == sorted(
            {-(-multiple // 4) * 4 for multiple in range(0, 21, every)})


def test_noise_is_on_while_sampling_and_off_in_update_and_evaluation_and_the_toy_is_learnt(
        tiny_chat, tmp_path, monkeypatch):
    """15 steps of "begin with one of the digits 0-4": the share rises from under .4 to over .8."""
    toy = Task([{"i": i} for i in range(30)], [{"i": i} for i in range(30, 40)], lambda p: f"{p['i']} * 7",
               lambda p, text, finished: float(text[:1] in set("01234")))
    monkeypatch.setitem(launch.TASKS, "toy", lambda data, operands: toy)
    noisy, seen = [], []

    def spy(name):
        real = getattr(train, name)
        monkeypatch.setattr(train, name, lambda flags, first, *rest: noisy.append(
            (name, aqn.is_noisy(getattr(first, "model", first)))) or real(flags, first, *rest))
    for name in ("collect", "update", "evaluate"):
        spy(name)
    batch = train.batch
    monkeypatch.setattr(train, "batch", lambda *args: seen.append(batch(*args)) or seen[-1])
    main(*f"--model {tiny_chat} --task toy --steps 15 --prompts 8 --max-new-tokens 4 --rank 4 --lr 4e-3 "
         f"--device cpu --sigma-start .05 --eval-every 5 --out {tmp_path}/toy".split())
    records = runs.read(tmp_path / "toy")
    steps = [r for (kind, _), r in records.items() if kind == "step"]
    rewards, sigmas = [r["reward"] for r in steps], [r["sigma"] for r in steps]
    assert [step for kind, step in records if kind == "eval"] == [0, 5, 10, 15]
    assert Counter(noisy) == {("collect", False): 2, ("collect", True): 13, ("update", False): 15,
                              ("evaluate", False): 4}                # 15 steps in 10 stages: two in the first
    assert sigmas == pytest.approx([aqn.sigma(s, 15, .05, 1e-4) for s in range(15)], rel=1e-5)
    assert not {p["i"] for problems in seen for p in problems} & {p["i"] for p in toy.held_out}
    assert sum(rewards[:2]) / 2 < .4 and sum(rewards[-3:]) / 3 > .8
    assert records["eval", 0]["eval_sampled"] < .6 < .8 <= records["eval", 15]["eval_sampled"]
    assert all(r["rows"] == round(r["signal"] * 64) for r in steps)   # rows trained + rows skipped = P · G
