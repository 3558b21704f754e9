"""QeRL: reinforcement learning of a quantised language model (arXiv 2510.11696).

    python train.py --help

    for each step:
        σ        ← how much noise this step samples with        aqn.sigma: by default it falls
        answers  ← sample G for each of P prompts, with N(0, σ²) added to two norms of each block
        rewards  ← task.reward(answer)                          a program judges: 1 is right
        A        ← (reward − mean of its group) / std           grpo.advantages
        LoRA     ← AdamW step on policy_loss(…, A)              the base, in NVFP4, never changes

Two engines work on one model. The Sampler (rollout.py) makes a Rollout of answers. Once these are
judged, they are an Experience, from which the Trainer, below, learns. Both read the same tensors,
so no weights travel between them. main(), at the end of this file, puts the parts together.

At the defaults a step makes one update, so π_now is still π_old: the ratio ρ = π_now / π_old is 1,
and the clip does nothing. The clip acts from the
second update of a step on (--updates-per-step), and with --correction bypass.

Needs: aqn.py, grpo.py, lora.py, model.py, rollout.py. From tools/: environment.py
(prompts and judging), run.py (log, save, resume), and the others that are imported below.
"""

import dataclasses
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

from tools.ends import exit_on_signals, one_sentence
from tools.flags import Config, parse

if __name__ == "__main__":
    with one_sentence("train.py"):  # a wrong flag ends here, before the seconds that torch takes
        FLAGS = parse(sys.argv[1:])

import torch

import aqn
import grpo
import lora
from model import load
from rollout import Rollout, Sampler
from tools import weights
from tools.adapter import check_adapter, fingerprint, load_adapter
from tools.budget import Budget, grow_segments, limit_memory, return_freed_memory
from tools.diagnostics import (
    means_of,
    preflight_prompts,
    preflight_report,
    rollout_stats,
    sampler_gap,
)
from tools.environment import (
    Answer,
    Environment,
    draw_problems,
    hash_of,
    load_environment,
    load_task,
    notes,
)
from tools.memory import MicroBatch, plan, prompt_groups
from tools.ranks import (
    alike,
    all_sum,
    gather,
    join_ranks,
    leave_ranks,
    rank_and_count,
    share_out,
    sum_gradients,
    sum_over_ranks,
)
from tools.run import ProgressBar, Run


@dataclass
class State:
    """What a step hands on to the next one, beside the adapter and AdamW's moments. A checkpoint
    stores all of it, so that a resumed run repeats every random choice.
    """

    step: int = 0  # how many steps are done
    drawn: int = 0  # how many problems all ranks have drawn: the next ones follow in the data
    sigma: float = 0.0  # adaptive noise: the next step's σ; 0 before the first step


class Group(NamedTuple):
    """G answers to one prompt, which are compared with each other."""

    rollout: Rollout  # G rows
    answers: list[Answer]  # one a row

    def has_signal(self, overlong: str) -> bool:
        """Whether the rewards differ, and not all answers are masked. Compared with their group,
        equal rewards teach nothing. Rewards of the task: a penalty of --overlong is not in them.
        """
        trains = overlong != "mask" or bool(self.rollout.finished.any())
        return trains and len({answer.reward for answer in self.answers}) > 1


class Batch(NamedTuple):
    """What this rank trains on in a step: G answers to each of its P prompts, which are --prompts
    over the number of ranks. B = P·G rows; row p·G + g is sample g of prompt p.
    """

    rollout: Rollout  # B rows
    answers: list[Answer]  # one a row
    stats: dict  # measurements over all ranks
    drawn: int  # how many problems the run has drawn, this step's included


class Experience(NamedTuple):
    """What the trainer learns from: answers, and how good each of them is."""

    rollout: Rollout  # B rows
    advantages: torch.Tensor  # (B,) f32
    # (B, T) f32: log-probabilities of the policy that the ratio ρ divides by. None: of the model
    # itself, as it is before the first update
    old: torch.Tensor | None

    def rows(self, index: torch.Tensor) -> "Experience":
        """→ the Experience of the rows in index, (n,) int64, cut to the longest of them."""
        rollout = self.rollout.rows(index)
        old = self.old
        if old is not None:
            old = old[index, : rollout.tokens.shape[1]]
        return Experience(rollout, self.advantages[index], old)


# --- the algorithm


def train(
    config: Config, environment: Environment, sampler: Sampler, trainer: "Trainer", run: Run
) -> None:
    """The loop at the top of this file, from the run's checkpoint or from step 0 on."""
    state = State()
    # guarded() loads a checkpoint, and saves one if the loop is stopped
    with run.guarded(trainer.model, trainer.optimizer, state):
        for step in range(state.step, config.steps):
            evaluating = step % config.eval_every == 0
            if evaluating and environment.task.held_out:
                run.log("eval", step, evaluate(config, environment, sampler, run))

            sigma = 0.0
            if config.aqn:
                sigma = aqn.sigma(
                    step,
                    config.steps,
                    config.sigma_start,
                    config.sigma_end,
                    config.sigma_stages,
                    config.sigma_schedule,
                    current=state.sigma,
                )
            with aqn.noisy_norms(trainer.model, sigma, config.seed, step):
                batch = collect(config, environment, sampler, step, state.drawn)
                if step % 10 == 0:  # rarely: measuring the mismatch costs a few forward passes
                    batch.stats["mismatch"] = sampler_gap(trainer, batch.rollout)
            experience = trainer.experience(batch.rollout, batch.answers)
            lr = learning_rate(step, config.steps, config.lr, config.warmup, config.schedule)

            with run.signals_deferred():  # until the step is made, logged and saved
                stats = trainer.update(experience, lr)
                if config.sigma_schedule == "adaptive":
                    # kl_noise is None if no answer was trained on. Too much noise may be the reason
                    # why there is no signal, so measure it on the sampled answers instead.
                    if stats["kl_noise"] is None:
                        stats["kl_noise"] = sampler_gap(trainer, batch.rollout, grpo.kl_k3)
                    state.sigma = aqn.next_sigma(sigma, stats["kl_noise"], config.sigma_target)
                state.drawn = batch.drawn
                # log it, and count it in state.step
                run.finish_step(step, batch.stats | stats | dict(sigma=sigma, lr=lr))
                if evaluating:
                    run.sample(step, batch.answers, experience.advantages.tolist())
                if state.step % config.save_every == 0 or state.step == config.steps:
                    run.save()
        if environment.task.held_out:
            run.log("eval", config.steps, evaluate(config, environment, sampler, run))


# --- answers and their rewards


def collect(
    config: Config, environment: Environment, sampler: Sampler, step: int, drawn: int
) -> Batch:
    """Sample and judge this rank's answers to P of the next problems.

    --resample is DAPO's dynamic sampling (arXiv 2503.14476, §3.2): groups without signal are
    replaced by groups of further problems, P in each round, as long as there are such groups and
    rounds are left; those beyond P are dropped. A rank that has P groups with signal draws no more,
    and the loop ends when no rank draws. Without --resample there is one round.

    Signal is judged by the task's rewards, before the length penalty is added: a group of wrong
    answers has none, whatever their lengths.

    drawn: how many problems all ranks have drawn before.
    """
    began = time.perf_counter()
    rank, ranks = rank_and_count()
    P, G = config.prompts // ranks, config.group_size
    useful, useless = [], []  # groups with signal, and those without
    for attempt in range(1 + config.resample):
        wanted = P if len(useful) < P else 0
        before, total = share_out(wanted)  # problems of lower ranks; of all ranks
        if total == 0:
            break
        if wanted:
            problems = draw_problems(environment.task.train, config.seed, drawn + before, P)
            first_sequence = (attempt * ranks + rank) * P * G  # unlike those of other ranks, rounds
            groups = sample_groups(environment, sampler, problems, G, step, first_sequence)
            for group in groups:
                kind = useful if group.has_signal(config.overlong) else useless
                kind.append(group)
        drawn += total

    groups = useful + useless
    rollout = Rollout.join([group.rollout for group in groups[:P]])
    answers = [answer for group in groups[:P] for answer in group.answers]
    if config.overlong == "penalty":
        soft_tokens = max(1, config.max_new_tokens // 4)
        due = grpo.overlong_penalty(rollout.lengths.cpu(), config.max_new_tokens, soft_tokens)
        answers = [
            answer._replace(reward=round(answer.reward + penalty, 9))
            for answer, penalty in zip(answers, due.tolist(), strict=True)
        ]
    counts = dict(
        useful=min(len(useful), P) * G,
        resampled=len(groups) - P,
        sampled_tokens=sum(group.rollout.lengths.sum() for group in groups),
    )
    stats = rollout_stats(rollout, answers, counts, time.perf_counter() - began)
    return Batch(rollout, answers, stats, drawn)


def sample_groups(
    environment: Environment,
    sampler: Sampler,
    problems: list[dict],
    group_size: int,
    step: int,
    first_sequence: int,
) -> list[Group]:
    """→ a Group for each problem.

    first_sequence: the first answer's number in this step, unique over all ranks and rounds. With
    seed and step it fixes the random bits of every sampled token.
    """
    prompts = environment.encode_prompts(problems)
    rollout = sampler.generate(
        prompts, group_size, environment.params, step, first_sequence, f"step {step}"
    )
    answers = environment.judge(problems, rollout)
    return [
        Group(rollout.rows(range(row, row + group_size)), answers[row : row + group_size])
        for row in range(0, len(answers), group_size)
    ]


def evaluate(config: Config, environment: Environment, sampler: Sampler, run: Run) -> dict:
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
    run.say(f"evaluating {count} problems: greedy, and {samples} sampled of each")
    began = time.perf_counter()
    rank, ranks = rank_and_count()
    start = count * rank // ranks
    problems = held_out[start : count * (rank + 1) // ranks]  # this rank's share
    prompts = environment.encode_prompts(problems)
    step = -1  # of the random bits: each evaluation draws the same, and training draws others
    totals = dict(greedy=0.0, loose=0.0, sampled=0.0)
    answers = []
    if problems:
        params = environment.params._replace(temperature=0.0)
        greedy = sampler.generate(prompts, 1, params, step, start, "greedy")
        answers = environment.judge(problems, greedy)
        for problem, answer in zip(problems, answers, strict=True):
            totals["greedy"] += answer.reward
            totals["loose"] += environment.task.reward(problem, answer.text, True)
        params = environment.params._replace(top_p=config.eval_top_p)
        sampled = sampler.generate(prompts, samples, params, step, start * samples, "sampled")
        judged = environment.judge(problems, sampled)
        totals["sampled"] = sum(answer.reward for answer in judged) / samples
    run.answered(sum(gather(answers), []))  # the greedy ones of all ranks
    totals = sum_over_ranks(totals)
    return dict(
        eval_greedy=totals["greedy"] / count,
        eval_greedy_loose=totals["loose"] / count,
        eval_sampled=totals["sampled"] / count,
        problems=count,
        rollout_s=time.perf_counter() - began,
    )


# --- the update


class Trainer:
    """Learns from experience: forward and backward in micro-batches, then AdamW on the adapter."""

    def __init__(self, config: Config, model):
        """model: a model.Decoder, whose parameters are LoRA's, in fp32."""
        self.config = config
        self.model = model
        self.budget = Budget(model, config.quant, config.rank, config.micro_tokens)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),  # update() sets their learning rate
            betas=(0.9, 0.99),
            weight_decay=config.weight_decay,
            fused=model.device.type == "cuda",  # one kernel for all parameters
        )

    def experience(self, rollout: Rollout, answers: list[Answer]) -> Experience:
        """Compare each answer with its group → Experience. Dr. GRPO does not divide by the standard
        deviation.
        """
        rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
        scale = "none" if self.config.loss == "dr_grpo" else "group"
        groups = rewards.view(-1, self.config.group_size)
        advantages = grpo.advantages(groups, scale, self.config.advantage).flatten()
        old = rollout.logprobs if self.config.correction == "bypass" else None
        return Experience(rollout, advantages.to(self.model.device), old)

    def update(self, experience: Experience, lr: float) -> dict:
        """Make --updates-per-step optimizer steps on one experience (TRL's num_iterations).

        → measurements. grad_norm and clip_fraction are the last step's, update_s and update_tok_s
        cover all steps, the others are the first step's. skipped is set only if the last step's
        loss or gradient is not finite.
        """
        began = time.perf_counter()
        self.optimizer.param_groups[0]["lr"] = lr
        stats, tokens = None, 0
        for _ in range(self.config.updates_per_step):
            sums, logprobs = self.backward(experience)
            if experience.old is None:
                experience = experience._replace(old=logprobs)
            means = means_of(sums)
            if stats is None:
                stats = means
            stats["clip_fraction"] = means["clip_fraction"]
            tokens += sums["run_tokens"]
            if sums["rows"] == 0:
                break  # no gradient: AdamW would apply only its momentum and weight decay
            parameters = self.model.parameters()
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm).item()
            stats["grad_norm"] = norm
            if not math.isfinite(norm + sums["loss"]):
                stats["skipped"] = 1  # the sums over ranks are not finite, so all ranks skip
                break
            self.optimizer.step()
            lora.refresh(self.model)
        self.optimizer.zero_grad()  # free the gradients: the sampler needs the memory
        seconds = time.perf_counter() - began
        return stats | dict(update_s=seconds, update_tok_s=tokens / seconds)

    def backward(self, experience: Experience) -> tuple[dict, torch.Tensor]:
        """Write the gradient of the whole batch's loss, summed over ranks, into the parameters.

        → sums over ranks, {name: float}, and the model's log-probabilities (B, T) f32.

        A row of advantage 0 adds nothing to the policy gradient. So backward counts the row in the
        normalizer, but runs it only for a KL term (beta > 0). The log-probabilities of a row that
        does not run stay 0.
        """
        rollout, config = experience.rollout, self.config
        trained = rollout.lengths  # (B,)
        if config.overlong == "mask":
            trained = trained * rollout.finished
        normalizer = grpo.normalizer(config.loss, trained, config.max_new_tokens)  # of this rank
        normalizer = all_sum(normalizer.double()).item()
        runs = (trained > 0) & ((experience.advantages != 0) | (config.beta > 0))
        rows = torch.nonzero(runs)[:, 0]
        groups = prompt_groups(rollout, rows)
        # The loop ends after the first attempt that succeeds. If memory runs out, the attempt
        # catches the error, and the next one has smaller micro-batches or recomputes more layers.
        for attempt in self.budget.attempts(groups):
            with attempt as micro_batches:
                sums, logprobs = self.run_micro_batches(experience, micro_batches, normalizer)
        sum_gradients(self.model.parameters())
        return sum_over_ranks(sums | dict(rows=len(rows))), logprobs

    def run_micro_batches(
        self, experience: Experience, micro_batches: list[MicroBatch], normalizer: float
    ) -> tuple[dict, torch.Tensor]:
        """Write this rank's gradient into the parameters → sums, {name: number or tensor ()}, and
        the model's log-probabilities (B, T).
        """
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)  # a rank without rows adds zeros
        logprobs = torch.zeros_like(experience.rollout.logprobs)
        names = "tokens entropy kl_noise clip_fraction kl_reference run_tokens loss".split()
        sums = dict.fromkeys(names, 0.0)
        sums["flat_tokens"] = sum(micro.tokens for micro in micro_batches)
        for micro in micro_batches:
            rows = torch.tensor(micro.rows, device=logprobs.device)
            loss, new, measured = self.loss(experience.rows(rows), normalizer)
            loss.backward()
            logprobs[rows, : new.shape[1]] = new.detach()
            for name in names:
                sums[name] += measured[name].double()
        return sums, logprobs

    def loss(
        self, experience: Experience, normalizer: float
    ) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """→ the loss of some rows, a scalar; their log-probabilities (b, T) with a graph; and sums
        over the rows, {name: tensor ()}.
        """
        rollout, config = experience.rollout, self.config
        mask = rollout.answer_mask()  # (b, T)
        reference = None
        if config.beta:  # before the graph below takes memory
            with lora.disabled(self.model), torch.no_grad():
                reference, _ = rollout.scored_by(self.model, config.temperature)
        # (b, T) each, 0 outside answers
        logprobs, entropy = rollout.scored_by(self.model, config.temperature)
        old = experience.old
        if old is None:
            old = logprobs.detach()
        token_weights = None
        if config.correction == "tis":
            token_weights = grpo.importance_weights(old, rollout.logprobs)
        if reference is None:  # only for the metric kl_reference, which is then 0
            reference = logprobs.detach()
        loss, clipped = grpo.policy_loss(
            logprobs,
            old,
            experience.advantages,
            mask,
            normalizer,
            loss_type=config.loss,
            weights=token_weights,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            ref_logprobs=reference,
            beta=config.beta,
        )
        with torch.no_grad():
            # ln(π of the trainer, without noise / π of the sampler, with noise)
            drift = (logprobs - rollout.logprobs)[mask]
            measured = dict(  # sums over the rows; clip_fraction is a count of tokens here
                tokens=mask.sum(),
                entropy=entropy.sum(),
                kl_noise=grpo.kl_k3(drift).sum(),
                clip_fraction=clipped,
                kl_reference=(logprobs - reference).sum(),  # k1; outside of answers both are 0
                run_tokens=(rollout.prompt_lengths + rollout.lengths).sum(),
                loss=loss.detach(),
            )
        return loss, logprobs, measured


def learning_rate(step: int, steps: int, peak: float, warmup: int, schedule: str) -> float:
    """→ the learning rate of a step, counted from 0: peak · a share.

    Each of the first `warmup` steps has the share (step + 1) / (warmup + 1), which stays below 1.
    Then the schedule begins, with u = (step − warmup) / (steps − warmup), which is 0 in the first
    of these steps and stays below 1: constant 1; linear 1 − u; cosine (1 + cos πu) / 2. KeyError:
    another schedule.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    u = (step - warmup) / (steps - warmup)
    shares = {"constant": 1.0, "linear": 1 - u, "cosine": (1 + math.cos(math.pi * u)) / 2}
    return peak * shares[schedule]


# --- from a command line to a run


def preflight(
    config: Config, environment: Environment, sampler: Sampler, trainer: Trainer, run: Run
) -> int:
    """--preflight: a step without noise and without its update, and a report on it → the exit code,
    3 if training would be pointless.
    """
    return_freed_memory()  # the prompts of a preflight may be several steps of training
    prompts = preflight_prompts(config, on_cpu=trainer.model.device.type == "cpu")
    probe = dataclasses.replace(config, prompts=prompts, resample=0)
    batch = collect(probe, environment, sampler, step=0, drawn=0)
    began = time.perf_counter()
    run.say("the answers are there; now their gradient")
    trainer.backward(trainer.experience(batch.rollout, batch.answers))
    backward_s = time.perf_counter() - began
    batch.stats["mismatch"] = sampler_gap(trainer, batch.rollout)
    # In capture_s Triton compiles a decode step's kernels, and CUDA captures graphs. Compiling the
    # kernels that the prefill launches first is not subtracted.
    batch.stats["rollout_s"] -= sampler.stats["capture_s"]
    report, exit_code = preflight_report(batch.stats, batch.answers, backward_s, config)
    run.say(report)
    return exit_code


def main(config: Config) -> int:
    """Put together what the flags name, then train → the exit code."""
    grow_segments()
    device = join_ranks(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    exit_on_signals()  # not before: a rank that waits for others would not heed a signal
    rank, ranks = rank_and_count()
    on_gpu = device != "cpu"
    if config.memory_gb and on_gpu:
        limit_memory(config.memory_gb)
    started_in = os.getcwd()
    with alike() as facts:  # all ranks must load the same, or all of them end
        task = load_task(config)
        if config.adapter and not config.resume:
            check_adapter(config.adapter, config.rank, config.alpha)
        began = time.perf_counter()
        source = weights.open(config.model)
        environment = load_environment(config, task, source)
        config.follow_model(plan(source.config, "bf16").weights / 2)  # two bytes a weight
        run = Run(config, rank > 0, started_in)
        run.say(f"loading {config.model}")
        with run.removed_on_error():
            model = load(source, config.quant, config.rank, config.alpha, device, config.seed)
            run.hashes = dict(problems=hash_of(task), model=source.fingerprint.hex())
            run.hashes |= fingerprint(config.adapter)  # what the run began from
            facts.append(run.hashes)
            adapter = "" if run.checkpoints() else config.adapter  # a resumed run has its own
            if adapter:
                load_adapter(model, adapter)
    for note in notes(source, config.model, config.quant, adapter):
        run.say(note)
    seconds = time.perf_counter() - began
    style = ""
    if not environment.tokenizer.chat_template:
        style = ", without a chat template: prompts are plain text"
    run.say(
        f"{config.model}: {config.quant} on {model.device}, loaded in {seconds:.0f} s{style}\n"
        f"{config.task}: {environment.summary()}; "
        f"{config.prompts} prompts × {config.group_size} answers a step"
    )
    sampler = Sampler(model, bar=ProgressBar, kv=config.kv)
    trainer = Trainer(config, model)
    if on_gpu and environment.longest_prompt:
        prompts = [environment.longest_prompt] * (config.prompts // ranks)
        run.say(
            trainer.budget.announcement(sampler, prompts, config.group_size, config.max_new_tokens)
        )
    code = 0
    if config.preflight:
        code = preflight(config, environment, sampler, trainer, run)
    else:
        train(config, environment, sampler, trainer, run)
    leave_ranks()
    # torchrun would report another code than 0 as a crash, with a traceback
    return 0 if "RANK" in os.environ else code


if __name__ == "__main__":
    with one_sentence("train.py"):
        sys.exit(main(FLAGS))
