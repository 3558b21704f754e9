"""QeRL: reinforcement learning of a quantised language model (arXiv 2510.11696).

    python train.py --help

    for each step:
        σ        ← noise_level(step)                            aqn.sigma: it falls in stages
        answers  ← sample G for each of P prompts, with N(0, σ²) added to the RMSNorm weights
        rewards  ← task.reward(answer)                          verifiable: right or wrong
        A        ← (reward − mean of its group) / std           grpo.advantages
        LoRA     ← AdamW step on policy_loss(…, A)              the NVFP4 base never changes

At the defaults a step makes one update, so the policy that is trained is still the one that the
ratio ρ = π_now / π_old starts from: ρ is 1, and the clip does nothing. It acts from the second
update of a step on (--updates-per-step), and with --correction bypass.

Needs: aqn.py, grpo.py, lora.py, model.py, rollout.py; tools/launch.py to start the run and
tools/run.py to log, save and resume it; tools/{budget,diagnostics,optimizer,ranks}.py.
"""

import math
import random
import time
from collections import Counter
from typing import NamedTuple

import torch

import aqn
import grpo
import lora
from rollout import Rollout
from tools import launch
from tools.budget import within_memory
from tools.diagnostics import means_of, mismatch
from tools.optimizer import adamw, learning_rate, noise_level
from tools.ranks import (
    all_sum,
    gather,
    rank_and_count,
    sum_gradients,
    sum_over_ranks,
    union_over_ranks,
)


class Group(NamedTuple):
    """The answers to one prompt, which are compared with each other."""

    rollout: Rollout  # G rows
    rewards: list  # of G floats
    texts: list  # of G pairs (prompt, answer)
    parts: list  # of G dicts, the named parts of each reward

    @property
    def has_signal(self):
        """Equal rewards give advantages of 0, which teach nothing."""
        return len(set(self.rewards)) > 1


class Batch(NamedTuple):
    """What a step trains on: B = P·G rows of this rank, row p·G + g for sample g of prompt p."""

    rollout: Rollout  # B rows
    rewards: torch.Tensor  # (B,) f64
    texts: list  # of B pairs (prompt, answer)
    stats: dict  # measurements over all ranks
    drawn: int  # problems that the run has drawn, over all ranks, this step's included


def train(config, model, environment, sampler, run):
    """The algorithm at the top of this file, from the run's checkpoint or from step 0 on.

    The seed and the step fix the random bits of the noise and of every sampled token. The seed and
    run.drawn fix the problems, and run.sigma scales adaptive noise. A checkpoint stores run.drawn
    and run.sigma, so a resume repeats every random choice.

    config: tools.flags.Config. model: model.Decoder. environment: tools.launch.Environment.
    sampler: rollout.Sampler. run: tools.run.Run.
    """
    optimizer = adamw(config, model)
    held_out = environment.task.held_out
    # guarded() loads a checkpoint, and saves one if the loop is stopped
    with run.guarded(model, optimizer) as first_step:
        for step in range(first_step, config.steps):
            evaluating = step % config.eval_every == 0
            if evaluating and held_out:
                run.log("eval", step, evaluate(config, sampler, environment, run.say))

            sigma = noise_level(config, step, run.sigma)
            with aqn.noisy_norms(model, sigma, config.seed, step):
                batch = collect(config, sampler, environment, step, run.drawn)
                if step % 10 == 0:  # rarely: measuring the mismatch costs a few forward passes
                    batch.stats["mismatch"] = mismatch(config, model, batch.rollout)
            advantages = advantages_of(config, batch.rewards)  # (B,)
            lr = learning_rate(config, step)
            optimizer.param_groups[0]["lr"] = lr

            with run.signals_deferred():  # until the step is made, logged and saved
                stats = update(config, model, optimizer, batch.rollout, advantages.to(model.device))
                run.drawn = batch.drawn
                # Adaptive noise reads run.sigma in the next step; other schedules ignore it.
                if stats["kl_noise"] is not None:  # else nothing was trained on
                    run.sigma = aqn.adapted(sigma, stats["kl_noise"], config.sigma_target)
                run.made(step, batch.stats | stats | dict(sigma=sigma, lr=lr))
                if evaluating:
                    run.sample(step, batch.texts, batch.rewards.tolist(), advantages.tolist())
                if run.done % config.save_every == 0 or run.done == config.steps:
                    run.save(model, optimizer)
        if held_out:
            run.log("eval", config.steps, evaluate(config, sampler, environment, run.say))


# --- answers and their rewards


def collect(config, sampler, environment, step, drawn=0):
    """Sample this rank's answers and reward them → Batch.

    drawn: problems that the run has drawn before, over all ranks: the next ones follow in the data.
    """
    began = time.perf_counter()
    _, ranks = rank_and_count()
    P = config.prompts // ranks
    useful, flat, drawn = draw_groups(config, sampler, environment, step, drawn)
    groups = useful + flat
    rollout = Rollout.join([group.rollout for group in groups[:P]])
    rewards, texts, parts = [], [], Counter()
    for group in groups[:P]:
        rewards += group.rewards
        texts += group.texts
        for part in group.parts:
            parts.update(part)  # adds what has the same name
    names = union_over_ranks(parts)  # a rank without ended answers may have none
    rewards = torch.tensor(rewards, dtype=torch.float64)
    seconds = gather(time.perf_counter() - began)

    sums = sum_over_ranks(
        dict(
            answers=len(rewards),
            reward=rewards.sum(),
            finished=rollout.finished.sum(),
            tokens=rollout.lengths.sum(),
            useful=min(len(useful), P),
            resampled=len(groups) - P,
            sampled_tokens=sum(group.rollout.lengths.sum() for group in groups),
            **{name: parts[name] for name in names},
        )
    )
    answers = sums["answers"]
    stats = dict(
        reward=sums["reward"] / answers,
        signal=sums["useful"] * config.group_size / answers,
        finished=sums["finished"] / answers,
        length=sums["tokens"] / answers,
        resampled=int(sums["resampled"]),
        mismatch=None,
        rollout_s=max(seconds),
        rollout_tok_s=sums["sampled_tokens"] / max(seconds),
    )
    stats |= {name: sums[name] / answers for name in names}
    if ranks > 1:
        stats["rollout_idle"] = 1 - sum(seconds) / ranks / max(seconds)
    return Batch(rollout, rewards, texts, stats, drawn)


def draw_groups(config, sampler, environment, step, drawn):
    """→ this rank's Groups with unequal rewards, those with equal ones, and the number of problems
    that the run has drawn now.

    --resample is DAPO's dynamic sampling (arXiv 2503.14476, §3.2): groups of equal rewards are
    replaced by groups of further problems, as long as there are such groups and draws are left.
    """
    rank, ranks = rank_and_count()
    P = config.prompts // ranks
    useful, flat = [], []
    for attempt in range(1 + config.resample):
        drawing = gather(len(useful) < P)  # of each rank: whether it draws P more problems
        if not any(drawing):
            break
        if len(useful) < P:
            start = drawn + P * int(sum(drawing[:rank]))
            problems = batch_of(environment.task.train, config, start, P)
            groups = sample_groups(config, sampler, environment, problems, step, attempt)
            useful += [group for group in groups if group.has_signal]
            flat += [group for group in groups if not group.has_signal]
        drawn += P * int(sum(drawing))
    return useful, flat, drawn


def sample_groups(config, sampler, environment, problems, step, attempt):
    """→ a Group for each of these problems, of which every rank that draws has equally many."""
    rank, ranks = rank_and_count()
    P, G = len(problems), config.group_size
    how = dict(temperature=config.temperature, step=step, progress=f"step {step}")
    how["first_sequence"] = (attempt * ranks + rank) * P * G
    rollout, answers, rewards = answer(config, sampler, environment, problems, G, **how)
    parts = [getattr(reward, "parts", {}) for reward in rewards]  # only of a user's own reward
    if config.overlong == "penalty":
        last = max(1, config.max_new_tokens // 4)  # tokens over which the penalty falls to −1
        penalties = grpo.overlong_penalty(rollout.lengths, config.max_new_tokens, last).tolist()
        rewards = [reward + penalty for reward, penalty in zip(rewards, penalties, strict=True)]
    # Round: 0.1 + 0.2 ≠ 0.3 gives a tiny advantage, and Adam rescales a tiny gradient to a full
    # step.
    rewards = [round(reward, 9) for reward in rewards]
    groups = []
    for p, problem in enumerate(problems):
        rows = slice(p * G, (p + 1) * G)
        prompt = environment.task.prompt(problem)
        texts = [(prompt, text) for text in answers[rows]]
        of_group = rollout.rows(range(p * G, (p + 1) * G))
        groups.append(Group(of_group, rewards[rows], texts, parts[rows]))
    return groups


def answer(config, sampler, environment, problems, samples, **how):
    """Sample answers, `samples` rows a problem, and judge them → Rollout, texts, rewards.

    how: temperature, top_p, first_sequence, step and progress, as Sampler.generate takes them. Step
    −1, the default, is evaluation's: each evaluation draws the same random bits, and training draws
    others.
    """
    rollout = sampler.generate(
        environment.encode_prompts(problems),
        samples,
        max_new_tokens=config.max_new_tokens,
        stop_ids=environment.stop_ids,
        seed=config.seed,
        **dict(step=-1, progress="eval") | how,
    )
    return rollout, *environment.judge(problems, rollout)


def advantages_of(config, rewards):
    """Rewards (B,) → advantages (B,) within each prompt's group. Dr. GRPO does not divide by the
    standard deviation.
    """
    scale = "none" if config.loss == "dr_grpo" else "group"
    return grpo.advantages(rewards.view(-1, config.group_size), scale).flatten()


def batch_of(problems, config, start, count):
    """→ `count` problems from number `start` on of a list without end: all problems, shuffled, once
    for each epoch.
    """
    picked, epoch = [], None
    for index in range(start, start + count):
        if index // len(problems) != epoch:
            epoch = index // len(problems)
            shuffled = random.Random(f"{config.seed} {epoch}").sample(problems, len(problems))
        picked.append(shuffled[index % len(problems)])
    return picked


# --- the update


def update(config, model, optimizer, rollout, advantages):
    """Make --updates-per-step optimizer steps on one rollout (TRL's num_iterations).

    → measurements. grad_norm and clip_fraction are the last step's, update_s and update_tok_s cover
    all steps, the others are the first step's. skipped is set only if the last step's loss or
    gradient is not finite. advantages: (B,).
    """
    began = time.perf_counter()
    # None: the trainer's own log-probabilities before the first update
    old = rollout.logprobs if config.correction == "bypass" else None
    stats, tokens = None, 0
    for _ in range(config.updates_per_step):
        sums, logprobs = backward(config, model, rollout, advantages, old)
        if old is None:
            old = logprobs
        means = means_of(sums)
        if stats is None:
            stats = means
        stats["clip_fraction"] = means["clip_fraction"]
        tokens += sums["run_tokens"]
        if sums["rows"] == 0:
            break  # no gradient: AdamW would apply only its momentum and weight decay
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
        stats["grad_norm"] = norm
        if not math.isfinite(norm + sums["loss"]):
            stats["skipped"] = 1  # the sums over ranks are not finite, so all ranks skip
            break
        optimizer.step()
        lora.refresh(model)
    optimizer.zero_grad()
    seconds = time.perf_counter() - began
    return stats | dict(update_s=seconds, update_tok_s=tokens / seconds)


def backward(config, model, rollout, advantages, old=None):
    """Write the gradient of the whole batch's loss, summed over ranks, into the parameters.

    advantages: (B,). old: (B, T) f32, log-probabilities of the ratio's denominator; None: the
    model's own, of this pass. → sums over ranks, {name: float}, and the model's log-probabilities
    (B, T) f32 of this pass.

    A row of advantage 0 adds nothing to the policy gradient. So backward counts the row in the
    normalizer, but runs it only for a KL term (beta > 0). The log-probabilities of a row that does
    not run stay 0.
    """
    trained = rollout.lengths  # (B,)
    if config.overlong == "mask":
        trained = trained * rollout.finished
    normalizer = grpo.normalizer(config.loss, trained, config.max_new_tokens)  # of this rank
    normalizer = all_sum(normalizer.double()).item()
    runs = (trained > 0) & ((advantages != 0) | (config.beta > 0))
    rows = torch.nonzero(runs)[:, 0]

    def compute(micro_batches):
        return gradient(config, model, rollout, micro_batches, advantages, old, normalizer)

    sums, logprobs = within_memory(config, model, rollout, rows, compute)
    sum_gradients(model.parameters())
    return sum_over_ranks(sums | dict(rows=len(rows))), logprobs


def gradient(config, model, rollout, micro_batches, advantages, old, normalizer):
    """Write this rank's gradient into the parameters → sums, {name: number or tensor ()}, and
    the model's log-probabilities (B, T). micro_batches: a list of MicroBatch; else as in backward.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a rank without rows adds zeros
    logprobs = torch.zeros_like(rollout.logprobs)
    names = "tokens entropy kl_noise clip_fraction kl_reference run_tokens loss".split()
    sums = dict.fromkeys(names, 0.0)
    sums["flat_tokens"] = sum(micro.tokens for micro in micro_batches)
    for micro in micro_batches:
        rows = torch.tensor(micro.rows, device=advantages.device)
        part = rollout.rows(rows)
        columns = slice(part.tokens.shape[1])
        part_old = None if old is None else old[rows, columns]
        loss, new, measured = loss_of(config, model, part, advantages[rows], part_old, normalizer)
        loss.backward()
        logprobs[rows, columns] = new.detach()
        for name in names:
            sums[name] += measured[name].double()
    return sums, logprobs


def loss_of(config, model, part, advantages, old, normalizer):
    """→ the loss of some rows, a scalar; their log-probabilities (b, T) with a graph; and sums over
    the rows, {name: tensor ()}. part: a Rollout of b rows; advantages: (b,); old: as in backward.
    """
    mask = part.answer_mask()  # (b, T)
    logprobs, entropy = part.scored_by(model, config.temperature)  # (b, T) each, 0 outside answers
    if old is None:
        old = logprobs.detach()
    weights = None
    if config.correction == "tis":
        weights = grpo.importance_weights(old, part.logprobs)
    reference = logprobs.detach()  # without beta the KL is 0
    if config.beta:
        with lora.disabled(model), torch.no_grad():
            reference, _ = part.scored_by(model, config.temperature)
    loss, clipped = grpo.policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        normalizer,
        config.loss,
        weights=weights,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        ref_logprobs=reference,
        beta=config.beta,
    )
    with torch.no_grad():
        drift = (logprobs - part.logprobs)[mask]  # ln(clean trainer / noisy sampler)
        measured = dict(
            tokens=mask.sum(),
            entropy=entropy.sum(),
            kl_noise=grpo.kl_k3(drift).sum(),
            clip_fraction=clipped,
            kl_reference=(logprobs - reference).sum(),  # k1; outside of answers both are 0
            run_tokens=(part.prompt_lengths + part.lengths).sum(),
            loss=loss.detach(),
        )
    return loss, logprobs, measured


# --- evaluation


def evaluate(config, sampler, environment, say=print):
    """Answer the held-out problems without noise → measurements.

    eval_greedy: the mean reward of one greedy answer to each problem; the tasks of tasks.py give 1
    only to an answer that is right and ended. eval_greedy_loose: of the same answers, each judged
    as if it had ended. eval_sampled: the mean reward of --eval-samples answers to each problem, at
    --temperature and --eval-top-p: pass@1, if rewards are 0 or 1. problems: how many are evaluated.
    rollout_s: seconds until every rank has sampled and judged its share.

    AssertionError: the norms are noisy.
    """
    assert not aqn.is_noisy(sampler.model), "evaluation under noise measures another policy"
    held_out, samples = environment.task.held_out, config.eval_samples
    count = len(held_out)
    say(f"evaluating {count} problems: greedy, and {samples} sampled of each")
    began = time.perf_counter()
    rank, ranks = rank_and_count()
    start = count * rank // ranks
    problems = held_out[start : count * (rank + 1) // ranks]
    right = dict(greedy=0.0, loose=0.0, sampled=0.0)
    if problems:
        _, texts, rewards = answer(
            config, sampler, environment, problems, 1, temperature=0.0, first_sequence=start
        )
        right["greedy"] = sum(rewards)
        for problem, text in zip(problems, texts, strict=True):
            right["loose"] += environment.task.reward(problem, text, True)
        how = dict(temperature=config.temperature, top_p=config.eval_top_p)
        how["first_sequence"] = start * samples
        _, _, rewards = answer(config, sampler, environment, problems, samples, **how)
        right["sampled"] = sum(rewards) / samples
    right = sum_over_ranks(right)
    return dict(
        eval_greedy=right["greedy"] / count,
        eval_greedy_loose=right["loose"] / count,
        eval_sampled=right["sampled"] / count,
        problems=count,
        rollout_s=time.perf_counter() - began,
    )


def trial(config, model, environment, sampler):
    """A step without noise and without its update, for --preflight → Batch, seconds of backward."""
    batch = collect(config, sampler, environment, 0)
    advantages = advantages_of(config, batch.rewards).to(model.device)
    began = time.perf_counter()
    backward(config, model, batch.rollout, advantages)
    return batch, time.perf_counter() - began


if __name__ == "__main__":
    launch.main(train, trial)
