"""QeRL: reinforcement learning of a quantised language model (arXiv 2510.11696).

    python train.py --help

    for each step:
        σ        ← aqn.sigma(step)                              noise falls as training goes on
        answers  ← sample G for each of P prompts, with N(0, σ²) added to the RMSNorm weights
        rewards  ← task.reward(answer)                          verifiable: right or wrong
        A        ← (reward − mean of its group) / std           grpo.advantages
        LoRA     ← AdamW step on policy_loss(…, A)              the NVFP4 base never changes

Needs: aqn.py, grpo.py, lora.py, model.py, rollout.py; tools/launch.py to start,
tools/run.py to log, save and resume.
"""

import dataclasses
import math
import random
import time

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aqn
import grpo
import lora
from model import answer_mask
from rollout import Rollout, Sampler
from tools import launch
from tools.launch import all_sum, rank_and_count
from tools.run import PROBE, peak_memory_gb


def train(config, model, task, tokenizer, stop_ids, run):
    """The algorithm. Every random choice is a function of (seed, step): a resume repeats it."""
    sampler, optimizer = Sampler(model), adamw(config, model)
    # loads a checkpoint; saves one if the loop is stopped
    with run.guarded(model, optimizer) as first:
        for step in range(first, config.steps, config.updates_per_rollout):
            evaluated = due(config, config.eval_every, step)
            if evaluated and task.held_out:
                run.log("eval", step, evaluate(config, sampler, task, tokenizer, stop_ids, run.say))

            sigma = (
                aqn.sigma(
                    step,
                    config.steps,
                    config.sigma_start,
                    config.sigma_end,
                    config.sigma_stages,
                    config.sigma_schedule,
                )
                if config.aqn
                else 0.0
            )
            with aqn.noisy_norms(model, sigma, config.seed, step):
                sampled, rewards, texts, stats = collect(
                    config, sampler, task, tokenizer, stop_ids, step
                )
            advantages = advantages_of(config, rewards)  # (B,)
            lr = optimizer.param_groups[0]["lr"] = learning_rate(config, step)

            with run.undivided():  # a signal waits until the step is made, logged and saved
                stats |= update(config, model, optimizer, sampled, advantages.to(model.device))
                run.made(step, stats | dict(sigma=sigma, lr=lr), sampled)
                if evaluated:
                    run.sample(step, texts, rewards.tolist(), advantages.tolist())
                if due(config, config.save_every, run.done) or run.done >= config.steps:
                    run.save(model, optimizer)
        if task.held_out:
            run.log(
                "eval", config.steps, evaluate(config, sampler, task, tokenizer, stop_ids, run.say)
            )


def collect(config, sampler, task, tokenizer, stop_ids, step):
    """Sample this rank's answers and reward them → Rollout (B rows), rewards (B,) f64, B (prompt,
    answer) pairs, measurements over all ranks. --resample replaces groups of equal rewards (DAPO
    §3.2).
    """
    rank, ranks = rank_and_count()
    G, P, began = config.group_size, config.prompts // ranks, time.perf_counter()
    drawn = []
    for attempt in range(1 + config.resample):
        problems = batch(task.train, config, step, attempt)[rank * P : (rank + 1) * P]
        prompts = launch.encoded(config, sampler.model.config, task, tokenizer, problems)
        first = (attempt * ranks + rank) * P * G  # number of the first answer here
        sampled = sampler.generate(
            prompts,
            G,
            config.max_new_tokens,
            config.temperature,
            stop_ids,
            config.seed,
            step,
            first,
            progress=f"step {step}",
        )
        answers = list(map(tokenizer.decode, sampled.answers()))
        for p, problem in enumerate(problems):
            rows = range(p * G, (p + 1) * G)
            rewards = [task.reward(problem, answers[b], bool(sampled.finished[b])) for b in rows]
            if config.overlong == "penalty":
                # the last tokens, in which it falls to −1
                cache = max(1, config.max_new_tokens // 4)
                penalty = grpo.overlong_penalty(
                    sampled.lengths[rows], config.max_new_tokens, cache
                ).tolist()
                rewards = [r + q for r, q in zip(rewards, penalty, strict=True)]
            # 0.1 + 0.2 ≠ 0.3 would give a tiny advantage, and Adam rescales a tiny gradient to a
            # full step
            rewards = [round(r, 9) for r in rewards]
            drawn.append(
                (
                    len(set(rewards)) > 1,
                    sampled.rows(rows),
                    rewards,
                    [(task.prompt(problem), answers[b]) for b in rows],
                )
            )
        # a stable sort: unequal rewards first
        kept = sorted(drawn, key=lambda group: not group[0])[:P]
        if all(signal for signal, *_ in kept):
            break
    signal, rollouts, rewards, texts = zip(*kept, strict=True)
    sampled, rewards = Rollout.join(rollouts), torch.tensor(rewards, dtype=torch.float64).flatten()
    seconds = [0.0] * ranks
    seconds[rank] = time.perf_counter() - began
    mismatch = None
    if due(config, 10, step):  # every ten steps: it costs a few forwards
        mismatch = measure_mismatch(
            config, sampler.model, Rollout.join([part for _, part, *_ in drawn[:P]])
        )
    count, reward, finished, tokens, groups, extra, through, *seconds = all_sum(
        torch.tensor(
            [
                P * G,
                rewards.sum(),
                sampled.finished.sum(),
                sampled.lengths.sum(),
                sum(signal),
                len(drawn) - P,
                sum(part.lengths.sum() for _, part, *_ in drawn),
                *seconds,
            ],
            dtype=torch.float64,
        )
    ).tolist()
    stats = dict(
        reward=reward / count,
        signal=groups * G / count,
        finished=finished / count,
        length=tokens / count,
        resampled=int(extra),
        mismatch=mismatch,
        rollout_s=max(seconds),
        rollout_tok_s=through / max(seconds),
    )
    if ranks > 1:
        stats["rollout_idle"] = 1 - sum(seconds) / ranks / max(seconds)
    return sampled, rewards, [pair for group in texts for pair in group], stats


def update(config, model, optimizer, sampled, advantages):
    """Steps on one batch → measurements: clip_fraction, grad_norm of the last step, the rest of the
    first.
    """
    began, old, seen, stats = time.perf_counter(), sampled.logprobs.clone(), 0, {}
    for number in range(config.updates_per_rollout):
        now = backward(config, model, sampled, advantages, old, first=number == 0)
        seen, loss = seen + now.pop("seen"), now.pop("loss")
        stats = (stats or now) | dict(clip_fraction=now["clip_fraction"])
        if now["rows"] == 0:
            break  # no gradient: only AdamW's momentum would act
        stats["grad_norm"] = torch.nn.utils.clip_grad_norm_(
            model.parameters(), config.max_grad_norm
        ).item()
        if not math.isfinite(stats["grad_norm"] + loss):
            stats["skipped"] = 1  # the sum over ranks is not finite, so all ranks skip
            break
        optimizer.step()
        lora.refresh(model)
    optimizer.zero_grad()
    seconds = time.perf_counter() - began
    return stats | dict(update_s=seconds, update_tok_s=seen / seconds)


def backward(config, model, sampled, advantages, old, first=True):
    """Write the gradient of the whole batch's loss, summed over ranks, into the parameters →
    measurements. old (B, T): log-probabilities, the ratio's denominator; the first call fills in
    the trainer's own ones unless correction is bypass. Rows of advantage 0 add 0: they are counted,
    but run only with beta > 0.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a rank without rows adds zeros
    # (B,)
    trained = sampled.lengths * sampled.finished if config.overlong == "mask" else sampled.lengths
    normalizer = all_sum(
        grpo.normalizer(config.loss, trained, config.max_new_tokens).double()
    ).item()
    rows = torch.nonzero((trained > 0) & ((advantages != 0) | (config.beta > 0)))[:, 0]
    total = torch.zeros(7, dtype=torch.float64, device=model.device)
    for micro in sampled.micro_batches(rows, config.micro_tokens):
        part = sampled.rows(micro)
        where = part.tokens, part.prompt_lengths, part.lengths
        mask = answer_mask(*where)
        logprobs, entropy = model.logprobs(*where, config.temperature)
        before = (
            logprobs.detach()
            if first and config.correction != "bypass"
            else old[micro, : mask.shape[1]]
        )
        old[micro, : mask.shape[1]] = before
        weights = (
            grpo.importance_weights(before, part.logprobs) if config.correction == "tis" else None
        )
        reference = logprobs.detach()  # without beta the KL is 0
        if config.beta:
            with lora.disabled(model), torch.no_grad():
                reference, _ = model.logprobs(*where, config.temperature)
        loss, clipped = grpo.policy_loss(
            logprobs,
            before,
            advantages[micro],
            mask,
            normalizer,
            config.loss,
            weights,
            config.clip_low,
            config.clip_high,
            ref_logprobs=reference,
            beta=config.beta,
        )
        loss.backward()
        with torch.no_grad():
            drift = (logprobs - part.logprobs)[mask]  # ln(clean trainer / noisy sampler)
            kl = (logprobs - reference).sum()  # k1; outside of answers both are 0
            total += torch.stack(
                [
                    mask.sum(),
                    entropy.sum(),
                    grpo.kl_k3(drift).sum(),
                    clipped,
                    kl,
                    (part.prompt_lengths + part.lengths).sum(),
                    loss,
                ]
            )
    if rank_and_count()[1] > 1:
        grads = [p.grad for p in model.parameters()]
        vector_to_parameters(all_sum(parameters_to_vector(grads)), grads)  # one all-reduce
    tokens, entropy, kl_noise, clipped, kl, seen, loss = all_sum(total).tolist()
    sums = dict(entropy=entropy, kl_noise=kl_noise, clip_fraction=clipped, kl_reference=kl)
    return {k: x / tokens if tokens else None for k, x in sums.items()} | dict(
        grad_norm=None, rows=int(all_sum(torch.tensor(len(rows)))), seen=seen, loss=loss
    )


def evaluate(config, sampler, task, tokenizer, stop_ids, say=print):
    """Answer the held-out problems without noise. Greedy: right and ended (strict), right if judged
    as ended (loose). Sampled: the mean reward, which is pass@1 at this temperature and top-p.
    """
    assert not aqn.is_noisy(sampler.model), "evaluation under noise measures another policy"
    say(
        f"evaluating {len(task.held_out)} problems: greedy, "
        f"and {config.eval_samples} sampled of each"
    )
    (rank, ranks), count, began = rank_and_count(), len(task.held_out), time.perf_counter()
    right, start, G = (
        torch.zeros(3, dtype=torch.float64),
        count * rank // ranks,
        config.eval_samples,
    )
    problems = task.held_out[start : count * (rank + 1) // ranks]
    if problems:
        _, texts, rewards = answer(
            config,
            sampler,
            task,
            tokenizer,
            stop_ids,
            problems,
            samples=1,
            temperature=0.0,
            top_p=1.0,
            first=start,
        )
        for problem, text, reward in zip(problems, texts, rewards, strict=True):
            right += torch.tensor([reward, task.reward(problem, text, True), 0])
        _, _, rewards = answer(
            config,
            sampler,
            task,
            tokenizer,
            stop_ids,
            problems,
            samples=G,
            temperature=config.temperature,
            top_p=config.eval_top_p,
            first=start * G,
        )
        for reward in rewards:
            right[2] += reward / G
    strict, loose, drawn = all_sum(right).tolist()
    return dict(
        eval_greedy=strict / count,
        eval_greedy_loose=loose / count,
        eval_sampled=drawn / count,
        problems=count,
        rollout_s=time.perf_counter() - began,
    )


def answer(
    config, sampler, task, tokenizer, stop_ids, problems, *, samples, temperature, top_p, first=0
):
    """Sample answers to problems outside of training → Rollout, texts, rewards, `samples` rows a
    problem. first: number of the first answer among those of all ranks.
    """
    prompts = launch.encoded(config, sampler.model.config, task, tokenizer, problems)
    # step −1: each evaluation draws the same random bits, which training never draws
    sampled = sampler.generate(
        prompts,
        samples,
        config.max_new_tokens,
        temperature,
        stop_ids,
        config.seed,
        -1,
        first,
        progress="eval",
        top_p=top_p,
    )
    texts = [tokenizer.decode(ids) for ids in sampled.answers()]
    rewards = [
        task.reward(problems[b // samples], text, bool(sampled.finished[b]))
        for b, text in enumerate(texts)
    ]
    return sampled, texts, rewards


@torch.no_grad()
def measure_mismatch(config, model, sampled):
    """Mean exp|ln π_trainer − ln π_sampler|, equal weights and noise, over at most 127 of the
    answers.
    """
    ratios, every = [], max(1, len(sampled.tokens) // 64)
    for micro in sampled.micro_batches(
        torch.arange(0, len(sampled.tokens), every), config.micro_tokens
    ):
        part = sampled.rows(micro)
        where = part.tokens, part.prompt_lengths, part.lengths
        logprobs, _ = model.logprobs(*where, config.temperature)
        ratios.append((logprobs - part.logprobs)[answer_mask(*where)].abs().exp())
    return all_sum(torch.cat(ratios).mean()).item() / rank_and_count()[1]


def preflight(config, model, task, tokenizer, stop_ids, run):
    """Run a step of 32 prompts without its update → the exit code: 3 if training would be
    pointless.
    """
    ranks, sampler = rank_and_count()[1], Sampler(model)
    probe = dataclasses.replace(config, prompts=-(-PROBE // ranks) * ranks, resample=0)
    sampled, rewards, _, stats = collect(probe, sampler, task, tokenizer, stop_ids, 0)
    advantages = advantages_of(config, rewards)
    began, share = time.perf_counter(), config.prompts / probe.prompts
    backward(probe, model, sampled, advantages.to(model.device), sampled.logprobs.clone())
    stats["update_s"] = (time.perf_counter() - began) * share
    # without compiling and capturing; on a GPU, fewer prompts than 32 take about the same time
    sampling = (stats["rollout_s"] - sampler.stats["capture_s"]) / config.updates_per_rollout
    stats["rollout_s"] = sampling * (share if model.device.type == "cpu" else max(1, share))
    solved = all_sum((rewards > 0).sum()).item() / (probe.prompts * config.group_size)
    return run.preflight(stats | dict(solved=solved, memory_gb=peak_memory_gb()))


def advantages_of(config, rewards):
    """(B,) rewards → (B,) advantages within each prompt's group. Dr. GRPO does not divide by the
    std.
    """
    scale = "none" if config.loss == "dr_grpo" else "group"
    return grpo.advantages(rewards.view(-1, config.group_size), scale).flatten()


def batch(problems, config, step, attempt=0):
    """The P problems of (step, attempt): read on through all problems, shuffled anew each time
    round.
    """
    start = (step // config.updates_per_rollout * (1 + config.resample) + attempt) * config.prompts
    wanted, n = range(start, start + config.prompts), len(problems)
    shuffled = {
        epoch: random.Random(f"{config.seed} {epoch}").sample(problems, n)
        for epoch in range(wanted[0] // n, wanted[-1] // n + 1)
    }
    return [shuffled[i // n][i % n] for i in wanted]


def learning_rate(config, step):
    u, warm = step / config.steps, min(1.0, (step + 1) / (config.warmup + 1))
    return (
        config.lr
        * warm
        * {"constant": 1.0, "linear": 1 - u, "cosine": (1 + math.cos(math.pi * u)) / 2}[
            config.schedule
        ]
    )


def adamw(config, model):
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(0.9, 0.99),
        weight_decay=config.weight_decay,
        fused=model.device.type == "cuda",
    )


def due(config, every, step):
    """Is a multiple of `every` among the updates_per_rollout steps that end with `step`?"""
    return step // every != (step - config.updates_per_rollout) // every


if __name__ == "__main__":
    launch.main(train, preflight)
