"""What a step measured, over all ranks: means over its answers and over their tokens, the sampler
against the trainer, and the report of a preflight.

docs/metrics.md explains each name, which is a key of metrics.jsonl.

Needs: torch; rollout.py; tools/{environment,flags,memory,ranks,report,run}.py.
"""

from collections import Counter
from collections.abc import Callable

import torch

from rollout import Rollout
from tools.environment import Answer
from tools.flags import Config, say
from tools.memory import prompt_groups
from tools.ranks import gather, rank_and_count, sum_over_ranks, union_over_ranks
from tools.report import diagnose
from tools.run import peak_memory_gb

PREFLIGHT_PROMPTS = 32
PREFLIGHT_TOKENS = 2**14  # of all answers at most, on a CPU: two minutes of SmolLM2 on two cores
UNSOLVED = (  # what to change if so few answers earn anything
    "nearly no reward is above 0: take a larger --model or an easier --task (smollm2 only checks "
    "your file), or mend a reward that never pays"
)


def rollout_stats(rollout: Rollout, answers: list[Answer], counts: dict, seconds: float) -> dict:
    """→ measurements of the answers that a step trains on, by name.

    rollout, answers: of this rank, a row each. counts: of this rank, {"useful": rows in groups
    with signal, "resampled": groups that were drawn beyond the first P, "sampled_tokens": of
    these groups' answers too}. seconds: until this rank had sampled and judged all of them.
    """
    _, ranks = rank_and_count()
    parts = Counter()
    for answer in answers:
        parts.update(answer.parts)  # adds what has the same name
    names = union_over_ranks(parts)  # a rank without ended answers may have none
    rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
    all_seconds = gather(seconds)
    sums = sum_over_ranks(
        dict(
            answers=len(answers),
            reward=rewards.sum(),
            finished=rollout.finished.sum(),
            tokens=rollout.lengths.sum(),
            **counts,
            **{name: parts[name] for name in names},
        )
    )
    count = sums["answers"]
    stats = dict(
        reward=sums["reward"] / count,
        signal=sums["useful"] / count,
        finished=sums["finished"] / count,
        length=sums["tokens"] / count,
        resampled=int(sums["resampled"]),
        mismatch=None,
        rollout_s=max(all_seconds),
        rollout_tok_s=sums["sampled_tokens"] / max(all_seconds),
    )
    stats |= {name: sums[name] / count for name in names}
    if ranks > 1:
        stats["rollout_idle"] = 1 - sum(all_seconds) / ranks / max(all_seconds)
    return stats


def means_of(sums: dict) -> dict:
    """Sums of Trainer.backward → measurements: means over the answer tokens that ran, None without
    any.
    """
    means = dict.fromkeys(("entropy", "kl_noise", "clip_fraction", "kl_reference"))
    if sums["tokens"]:
        means = {name: sums[name] / sums["tokens"] for name in means}
    # run_tokens counts a prompt for each of its answers, flat_tokens once: what was computed
    return means | dict(
        grad_norm=None, rows=int(sums["rows"]), flat_tokens=int(sums["flat_tokens"])
    )


def factor(drift: torch.Tensor) -> torch.Tensor:
    """Differences of ln π → the factors between the probabilities, each at least 1."""
    return drift.abs().exp()


@torch.no_grad()
def sampler_gap(
    trainer, rollout: Rollout, measure: Callable[[torch.Tensor], torch.Tensor] = factor
) -> float:
    """→ mean of measure(ln π_trainer − ln π_sampler) over answer tokens.

    Inside the noise that the rollout was sampled under, both use the same weights and the same
    noise, so they differ in the order of sums in their kernels, and the mean factor is about 1. On
    a GPU they also differ if a packed weight's global scale is no power of two: a pass over more
    than 256 tokens (training, prefill) rounds the decoded weight to bf16, and a decode step does
    not. Outside the noise, it moves the two apart, and grpo.kl_k3 tells by how many nats a token.

    trainer: a train.Trainer, with its model and temperature. This reads at most 127 of the
    rollout's answers, evenly spread. All tokens of all ranks weigh the same.
    """
    every = max(1, len(rollout.tokens) // 64)
    rows = torch.arange(0, len(rollout.tokens), every)
    groups = prompt_groups(rollout, rows)
    for attempt in trainer.budget.attempts(groups):  # a forward pass takes less than an update
        with attempt as batches:
            measured = []
            for micro in batches:
                some = rollout.rows(micro.rows)
                logprobs, _ = some.scored_by(trainer.model, trainer.config.temperature)
                measured.append(measure((logprobs - some.logprobs)[some.answer_mask()]))
    measured = torch.cat(measured)
    sums = sum_over_ranks(dict(measured=measured.double().sum(), tokens=len(measured)))
    return sums["measured"] / sums["tokens"]


def preflight_prompts(config: Config, on_cpu: bool) -> int:
    """→ how many prompts a preflight samples, a multiple of the ranks. A GPU answers 32 in about
    the time of fewer. A CPU does not, so there are fewer, and a line says so.
    """
    _, ranks = rank_and_count()
    prompts = PREFLIGHT_PROMPTS
    if on_cpu:
        affordable = PREFLIGHT_TOKENS // (config.group_size * config.max_new_tokens)
        prompts = min(prompts, config.prompts, affordable)
    prompts = max(1, prompts // ranks) * ranks
    if on_cpu:
        say(
            f"prompts: {prompts} with {config.group_size} answers of at most "
            f"{config.max_new_tokens} tokens; two cores sample 100 tokens of smollm2 a second. "
            f"A GPU samples {PREFLIGHT_PROMPTS} prompts, so the shares are rough"
        )
    return prompts


def preflight_report(
    stats: dict, answers: list[Answer], backward_s: float, config: Config
) -> tuple[str, int]:
    """Judge a trial step, which updates nothing.

    stats, answers: of the trial; answers of this rank. backward_s: seconds of one backward. → the
    report, text of several lines; and train.py's exit code: 3 if training would be pointless, else
    0.
    """
    sums = sum_over_ranks(
        dict(answers=len(answers), solved=sum(answer.reward > 0 for answer in answers))
    )
    solved = sums["solved"] / sums["answers"]
    stats = stats | dict(memory_gb=peak_memory_gb())
    pointless = stats["signal"] == 0 or not stats["mismatch"] <= 1.5  # or it is NaN
    share = config.prompts * config.group_size / sums["answers"]  # of a step in the trial
    update_s = backward_s * share * config.updates_per_step
    # on a GPU fewer prompts than these take about the same time
    rollout_s = stats["rollout_s"] * (max(1, share) if torch.cuda.is_initialized() else share)
    seconds = rollout_s + update_s
    minutes = seconds * config.steps / 60
    prompts = f"prompts: {sums['answers'] / config.group_size:.0f}"
    updating = f"{update_s:.1f} of them the update" if stats["signal"] else "with no update in it"
    best = max(answers, key=lambda answer: answer.reward)
    lines = [
        f"{prompts}, with {config.group_size} answers each; nothing is updated",
        f"solve rate  {solved:7.1%}   answers with a reward above 0",
        f"finished    {stats['finished']:7.1%}   "
        "answers that ended; --max-new-tokens cut the others",
        f"no signal   {1 - stats['signal']:7.1%}   "
        "groups of equal rewards, or all masked; --resample replaces them",
        f"mismatch    {stats['mismatch']:7.4f}   sampler against trainer; 1 is perfect",
        f"memory      {stats['memory_gb']:7.1f}   GB at most",
        f"the best    {best.reward:+7.2f}   {str(best.prompt)[:80]!r} → {best.text[:200]!r}",
        f"a step      {seconds:7.1f}   seconds, {updating}; {config.steps} steps {minutes:.0f} "
        "minutes, evaluation aside",
    ]
    changes = dict(diagnose([stats], 1, prompts, groups=0.2, answers=0.5))
    if solved < 0.02:
        changes.pop("flat", None)  # this is why the groups are equal
        changes = {"unsolved": UNSOLVED} | changes
    lines += [f"change: {advice}" for advice in changes.values()]
    verdict = "ready to train"
    if pointless:
        verdict = "training would be pointless: first change the above"
    elif changes:
        verdict = "training can work, but first change the above"
    return "\n    ".join([*lines, verdict]), 3 if pointless else 0
