"""experiments/: a run of each kind, what its log says, the statistics, the recipes."""

import json
import math
import os
import subprocess
from itertools import combinations

import numpy as np
import pytest
import torch
from command import ROOT, TIMINGS
from test_train import actor

import nvfp4
import train
from experiments import gsm8k, gsm8k_tables
from experiments.gsm8k_plan import ONE, THREE, TWO, Job, Log, jobs_of_seed, read
from experiments.paired import Difference, compare, holm, verdict
from rollout import Sampler
from tools.flags import parse

SHORT = dict(steps=4, prompts=2, group_size=2, max_new_tokens=4, rank=4, alpha=4, save_every=2)


@pytest.fixture(scope="session")
def problems(tmp_path_factory):
    """A file of word problems in the characters of the tiny chat's tokenizer."""
    path = tmp_path_factory.mktemp("gsm8k") / "problems.jsonl"
    lines = [
        json.dumps({"question": f"What is {n}?", "answer": f"{n}\n#### {n}"}) for n in range(12)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def flags(tiny_chat, problems):
    return SHORT | dict(model=str(tiny_chat), data=str(problems), test=str(problems), device="cpu")


# --- bases
def test_nf4_rounds_to_the_nearest_of_its_sixteen_levels_block_by_block():
    w = torch.randn(4, 128)
    levels = torch.tensor(gsm8k.NF4)
    blocks = w.view(-1, 64)
    scaled = blocks / blocks.abs().amax(1, keepdim=True)
    nearest = levels[(scaled[..., None] - levels).abs().argmin(-1)] * blocks.abs().amax(
        1, keepdim=True
    )
    assert torch.allclose(gsm8k.nf4(w), nearest.view(4, 128))


def test_the_gaussian_error_has_the_norm_of_rtns_and_is_a_function_of_the_seed():
    w = torch.randn(32, 64)
    error = nvfp4.dequantize(nvfp4.quantize(w, "rtn"), torch.float32) - w
    one, again, other = (gsm8k.gaussian(seed)(w) for seed in (2, 2, 3))
    assert (one - w).norm() == pytest.approx(error.norm().item(), rel=1e-4)
    assert torch.equal(one, again) and not torch.equal(one, other)


# --- runs
@pytest.mark.parametrize("job", [Job("main", "7", 1e-3, 2), Job("rate", "nvfp4", 1e-3, 0)])
def test_a_stopped_run_goes_on_and_its_log_equals_that_of_a_run_without_a_stop(
    job, flags, tmp_path, monkeypatch
):
    """Arm 7 is sampled at its temperatures and tested; a rate is evaluated. Both stop in the third
    step.
    """
    monkeypatch.setattr(gsm8k, "ROOT", tmp_path)
    monkeypatch.setattr(gsm8k.rules, "RATE_STEPS", 4)
    gsm8k.make(job, tmp_path / "whole", flags, problems=4)
    update = train.update
    steps = []

    def stopped(*arguments):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return update(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "update", stopped)
        gsm8k.make(job, tmp_path / "stopped", flags, problems=4)
    assert not read(tmp_path / "stopped", job).ended
    gsm8k.make(job, tmp_path / "stopped", flags, problems=4)
    whole, stopped = read(tmp_path / "whole", job), read(tmp_path / "stopped", job)
    assert whole.ended and stopped.ended and [start["step"] for start in stopped.starts] == [0, 2]
    timed = (*TIMINGS, "seconds")
    for a, b in (
        (whole.step, stopped.step),
        (whole.eval, stopped.eval),
        (whole.tests, stopped.tests),
    ):
        assert a.keys() == b.keys()
        for key in a:
            assert {k: v for k, v in a[key].items() if k not in timed} == {
                k: v for k, v in b[key].items() if k not in timed
            }
    assert set(whole.tests) == (set() if job.phase == "rate" else {"greedy", "pass", "paper"})
    assert len(whole.step) == 4 and all("sampler_entropy" in r for r in whole.step.values())
    assert len(whole.eval) == 2 * (job.phase == "rate")
    assert not (tmp_path / "runs" / "whole" / job.name).exists(), (
        "an ended run leaves no checkpoint"
    )


def test_arm_12_samples_with_the_entropy_of_arm_11s_sampler(flags, tmp_path, monkeypatch):
    """Both arms of a seed, one after the other; the second starts only when the first has ended."""
    monkeypatch.setattr(gsm8k, "ROOT", tmp_path)
    noisy, follower = Job("main", "11", 1e-3, 7), Job("main", "12", 1e-3, 7)
    waiting = {job.arm: job.lr for job in jobs_of_seed(gsm8k_tables.LOGS, THREE, 7)}
    assert waiting["12"] is None or read(gsm8k_tables.LOGS, "main-11-7").ended
    for job in (noisy, follower):
        gsm8k.make(job, tmp_path / "logs", flags, problems=2)
    steps, following = read(tmp_path / "logs", noisy).step, read(tmp_path / "logs", follower).step
    assert all(r["sigma"] == 0.05 for r in steps.values())  # no reward, so no kl_noise to follow
    low, high = gsm8k.FollowingSampler.LOWEST, gsm8k.FollowingSampler.HIGHEST
    assert all(low < r["temperature"] < high for r in following.values())
    assert set(read(tmp_path / "logs", follower).tests) == {"greedy", "wide"}


def test_the_search_finds_the_temperature_of_an_entropy(tiny_chat):
    sampler = gsm8k.FollowingSampler(actor(tiny_chat), {})
    how = dict(max_new_tokens=16, stop_ids=[], seed=0, first_sequence=0)
    done = Sampler.generate(sampler, [[5, 6, 7]], 32, temperature=1.0, step=0, **how)
    for temperature in (0.8, 1.3):
        _, entropy = done.scored_by(sampler.model, temperature)
        found = sampler.search(done, (entropy.sum() / done.lengths.sum()).item())
        assert found == pytest.approx(temperature, abs=sampler.WIDTH)


def test_the_followed_temperature_settles_where_entropy_moves_thrice_as_far_as_searched(
    monkeypatch,
):
    """Nats a token: .4 at temperature 1, and 3 more for each 1 of temperature; the search, on
    answers that stay as they are, finds 1 more.
    """
    entropies = dict.fromkeys(range(20), 0.43)
    sampler = gsm8k.FollowingSampler.__new__(gsm8k.FollowingSampler)
    sampler.entropies, sampler.next_temperature = entropies, None

    def generate(self, prompts, *, temperature, **_):
        return temperature  # stands for the rollout

    monkeypatch.setattr(Sampler, "generate", generate)

    def search(rollout, entropy):
        return rollout + entropy - (0.4 + 3 * (rollout - 1))

    monkeypatch.setattr(sampler, "search", search)
    for step in entropies:
        sampler.generate([[5]], 8, temperature=1.0, step=step)
    assert sampler.temperature == pytest.approx(1.01, abs=1e-6)


# --- the logs
def test_a_newly_solved_problem_is_one_that_no_sample_solved_before():
    before, after = (
        Log([dict(kind="test", name="wide", samples=512, right=right)])
        for right in ([0, 0, 1, 7], [0, 3, 0, 9])
    )
    assert gsm8k_tables.newly_solved(before, after) == 1


def test_pass_at_k_is_the_share_of_draws_of_k_samples_with_a_right_one():
    log = Log([dict(kind="test", name="pass", samples=5, right=[0, 1, 3, 5])])
    for k in (1, 3):
        shares = []
        for right in (0, 1, 3, 5):
            draws = list(combinations([True] * right + [False] * (5 - right), k))
            shares.append(sum(map(any, draws)) / len(draws))
        assert log.measure(f"pass@{k}") == pytest.approx(np.mean(shares))


@pytest.mark.parametrize("experiment", [ONE, TWO])
def test_a_figure_is_drawn_from_the_committed_logs(experiment, tmp_path):
    gsm8k_tables.plot(gsm8k_tables.LOGS, experiment, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_each_experiment_has_a_figure_of_its_own():
    figures = [experiment.figure for experiment in (ONE, TWO, THREE)]
    assert len(set(figures)) == 3


# --- statistics
def test_the_paired_test_gives_textbook_numbers():
    """Differences 1, 2, 3, 4: mean 2.5, standard error .6455, t 3.873 with 3 degrees of freedom."""
    found = compare([2, 4, 6, 8], [1, 2, 3, 4])
    assert found.mean == 2.5 and found.p == pytest.approx(0.0305, abs=1e-4)
    assert found.half == pytest.approx(3.18245 * 0.645497, rel=1e-5)
    assert (
        compare([1, 1, 1], [0, 0, 0]) == (1.0, 0.0, 0.0) and compare([1, 1, 1], [1, 1, 1]).p == 1.0
    )
    assert math.isnan(compare([1, 2], [0, 0]).half) and compare([1, 2], [0, 0]).mean == 1.5


def test_holm_and_the_verdicts():
    assert holm([0.01, 0.04, math.nan, 0.03]) == pytest.approx(
        [0.03, 0.06, math.nan, 0.06], nan_ok=True
    )
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    for difference, expected in (
        (Difference(0.05, 0.01, 0.01), "holds"),
        (Difference(-0.05, 0.01, 0.01), "does not"),
        (Difference(0.01, 0.005, 0.2), "does not"),
        (Difference(0.01, 0.03, 0.2), "cannot tell"),
        (Difference(0.05, math.nan, math.nan), "cannot tell"),
    ):
        assert verdict(difference) == expected


# --- the paper's runs
@pytest.mark.parametrize("name", ["7b-gsm8k", "32b-bigmath"])
def test_a_recipe_is_two_commands_with_the_papers_batch_and_evaluation(name, tmp_path):
    """A stand-in for python writes down what it was called with."""
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$*" >> "$COMMANDS"\n')
    (tmp_path / "python").chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "COMMANDS": str(tmp_path / "commands"),
    }
    subprocess.run(
        ["bash", ROOT / "experiments/recipes.sh", name, "--seed", "7"], env=env, check=True
    )
    lines = (tmp_path / "commands").read_text().splitlines()
    assert len(lines) == 2 and all(line.startswith("train.py ") for line in lines)
    trained, evaluated = (parse(line.split()[1:]) for line in lines)
    assert trained.prompts * trained.group_size == 128 and trained.warmup * 10 == trained.steps
    assert trained.seed == 7 and trained.model == evaluated.model
    assert evaluated.steps == 0 and evaluated.adapter == f"{trained.out}/adapter" and evaluated.test
    assert (evaluated.temperature, evaluated.eval_top_p, evaluated.max_new_tokens) == (
        0.6,
        0.95,
        4096,
    )
    assert (evaluated.quant, evaluated.rank, evaluated.alpha) == (
        trained.quant,
        trained.rank,
        trained.alpha,
    )


def test_an_unknown_recipe_is_refused_by_name():
    done = subprocess.run(
        ["bash", ROOT / "experiments/recipes.sh", "1b"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "1b" in done.stderr
