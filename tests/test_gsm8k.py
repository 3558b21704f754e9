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

import nvfp4
import train
from experiments import gsm8k, gsm8k_tables
from experiments.gsm8k_plan import ONE, TWO, Job, Log, read
from experiments.paired import Difference, compare, holm, verdict
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


# --- the logs
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
