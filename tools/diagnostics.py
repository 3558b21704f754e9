"""Is training worth its time? The sampler against the trainer, and a step without an update.

Needs: torch; rollout.py; tools/{budget,ranks,report,run}.py.
"""

import dataclasses

import torch

from rollout import PREFILL_TOKENS, micro_batches
from tools.budget import size_of_update
from tools.ranks import all_sum, rank_and_count, sum_over_ranks
from tools.report import PREFLIGHT_PROMPTS, preflight_report
from tools.run import peak_memory_gb


def means_of(sums):
    """Sums of backward → measurements: means over the answer tokens that ran, None without any."""
    means = dict.fromkeys(("entropy", "kl_noise", "clip_fraction", "kl_reference"))
    if sums["tokens"]:
        means = {name: sums[name] / sums["tokens"] for name in means}
    # run_tokens counts a prompt for each of its answers, flat_tokens once: what was computed
    return means | dict(
        grad_norm=None, rows=int(sums["rows"]), flat_tokens=int(sums["flat_tokens"])
    )


@torch.no_grad()
def mismatch(config, model, rollout):
    """→ mean of exp|ln π_trainer − ln π_sampler| over answer tokens: 1 if the two agree.

    Both use the same weights and the same noise, so they differ in the order of sums in their
    kernels. On a GPU they also differ if a packed weight's global scale is no power of two: a pass
    over more than 256 tokens (training, prefill) rounds the decoded weight to bf16, and a decode
    step does not. Call this inside the noise that the rollout was sampled under. It reads at most
    127 of the rollout's answers, evenly spread. All tokens of all ranks weigh the same.
    """
    every = max(1, len(rollout.tokens) // 64)
    rows = torch.arange(0, len(rollout.tokens), every)
    factors = []
    groups = rollout.groups(rows)
    size = size_of_update(config, model, groups)  # a forward pass takes less
    for micro in micro_batches(groups, min(size.micro_tokens, PREFILL_TOKENS)):
        part = rollout.rows(micro.rows)
        logprobs, _ = part.scored_by(model, config.temperature)
        factors.append((logprobs - part.logprobs)[part.answer_mask()].abs().exp())
    factors = torch.cat(factors)
    sums = sum_over_ranks(dict(factors=factors.double().sum(), tokens=len(factors)))
    return sums["factors"] / sums["tokens"]


def preflight(config, model, environment, sampler, run, trial):
    """Try a step of 32 prompts, report on it → the exit code: 3 if training would be pointless.

    trial: train.trial, a step without its update.
    """
    _, ranks = rank_and_count()
    prompts = (PREFLIGHT_PROMPTS + ranks - 1) // ranks * ranks  # a multiple of the ranks
    probe = dataclasses.replace(config, prompts=prompts, resample=0)
    batch, backward_s = trial(probe, model, environment, sampler)
    stats = batch.stats
    stats["mismatch"] = mismatch(probe, model, batch.rollout)

    share = config.prompts / probe.prompts
    stats["update_s"] = backward_s * share * config.updates_per_step
    # Leave out capture_s: Triton compiles a decode step's kernels in it, and CUDA captures graphs.
    # On a GPU, fewer prompts than 32 take about the same time. Not left out: compiling the kernels
    # that the prefill launches first.
    sampling_s = stats["rollout_s"] - sampler.stats["capture_s"]
    stats["rollout_s"] = sampling_s * (share if model.device.type == "cpu" else max(1, share))

    answers = probe.prompts * config.group_size
    stats["solved"] = all_sum((batch.rewards > 0).sum()).item() / answers
    stats["memory_gb"] = peak_memory_gb()
    report, exit_code = preflight_report(stats, config)
    run.say(report)
    return exit_code
