"""experiments/: runs, what a log says, the statistics, the recipes."""

import itertools
import math
import subprocess

import pytest
import torch
from command import ROOT
from test_train import actor, rollout

import nvfp4
import train
from experiments import gsm8k, gsm8k_plan, gsm8k_tables
from experiments.gsm8k_plan import ONE, TWO, Job, Log, read
from experiments.paired import Difference, compare, holm, verdict
from tools import run as run_file
from tools.flags import parse


@pytest.fixture
def make(tiny_chat, tmp_path, monkeypatch):
    """make(job, name) makes a short run of a job → its log, in the folder of that name."""
    problems = tmp_path / "problems.jsonl"
    lines = (f'{{"question": "What is {n}?", "answer": "#### {n}"}}\n' for n in range(12))
    problems.write_text("".join(lines))
    monkeypatch.setattr(gsm8k, "ROOT", tmp_path)
    flags = dict(
        model=str(tiny_chat),
        data=str(problems),
        test=str(problems),
        device="cpu",
        steps=4,
        prompts=2,
        group_size=2,
        max_new_tokens=4,
        rank=4,
        save_every=2,
    )

    def start(job, name):
        gsm8k.make(job, tmp_path / name, flags, problems=4)
        return read(tmp_path / name, job)

    return start


# --- bases
def test_nf4_rounds_to_the_nearest_of_its_sixteen_levels_block_by_block():
    blocks = torch.randn(8, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(gsm8k.NF4) * largest  # (8, 16)
    nearest = (blocks[..., None] - levels[:, None]).abs().argmin(-1)
    assert torch.allclose(gsm8k.nf4(blocks.view(4, 128)).view(8, 64), levels.gather(1, nearest))


def test_the_gaussian_error_has_the_norm_of_rtns_and_is_a_function_of_the_seed():
    w = torch.randn(32, 64)
    error = nvfp4.dequantize(nvfp4.quantize(w, "rtn"), torch.float32) - w
    one, again, other = (gsm8k.gaussian(seed)(w) for seed in (2, 2, 3))
    assert (one - w).norm() == pytest.approx(error.norm().item(), rel=1e-4)
    assert torch.equal(one, again) and not torch.equal(one, other)


# --- runs
def test_a_stopped_run_goes_on_and_its_log_equals_that_of_a_run_without_a_stop(make, monkeypatch):
    """Arm 7, which is sampled at its temperatures and tested, stops in the third step."""
    job = Job("main", "7", 1e-3, 2)
    update = train.Trainer.update
    steps = itertools.count(1)
    whole = make(job, "whole")

    def stopped(*arguments):
        if next(steps) == 3:
            raise KeyboardInterrupt
        return update(*arguments)

    monkeypatch.setattr(train.Trainer, "update", stopped)
    with pytest.raises(KeyboardInterrupt):
        make(job, "stopped")
    again = make(job, "stopped")
    assert whole.ended and again.ended and [start["step"] for start in again.starts] == [0, 2]
    assert len(whole.step) == 4 and whole.tests.keys() == {*TWO.tests}
    one, other = (
        [
            [(r["length"], r["sampler_entropy"]) for r in log.step.values()],
            [r["right"] for r in log.tests.values()],
        ]
        for log in (whole, again)
    )
    assert one == other


def test_arm_12_samples_with_the_entropy_of_arm_11s_sampler(make):
    """Both arms of a seed, one after the other."""
    noisy, following = (make(Job("main", arm, 1e-3, 7), "logs") for arm in ("11", "12"))
    first, *others = (record["sigma"] for record in noisy.step.values())
    assert first == 0.05 and first not in others[:1]
    search = gsm8k.FollowingSampler
    assert all(search.LOWEST < r["temperature"] < search.HIGHEST for r in following.step.values())
    assert following.ended


def test_the_search_finds_the_temperature_of_an_entropy(tiny_chat):
    sampler = gsm8k.FollowingSampler(actor(tiny_chat), {})
    done = rollout(sampler.model, sigma=0)
    for temperature in (0.8, 1.3):
        _, entropy = done.scored_by(sampler.model, temperature)
        found = sampler.search(done, entropy.sum() / done.lengths.sum())
        assert found == pytest.approx(temperature, abs=sampler.WIDTH)


# --- the logs
def kept(log):
    return log.starts, log.step, log.tests, log.failed, log.ended


def test_an_experiments_file_holds_each_log_as_the_runs_own_files_did(make, tmp_path, monkeypatch):
    """Of three runs, the first fails and is made again, and the last has not ended."""
    logs = tmp_path / "logs"
    jobs = twice, once, stopped = [
        Job("main", arm, 1e-3, seed) for arm, seed in (("1", 2), ("2", 2), ("1", 3))
    ]
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(gsm8k, "load", None)
        make(twice, "logs")
    for job in (once, twice):
        make(job, "logs")
    run_file.append(
        logs / f"{stopped.name}.jsonl", dict(kind="start", **stopped._asdict(), steps=1, step=0)
    )
    before = [kept(read(logs, job)) for job in jobs]
    assert gsm8k_plan.append(logs) == [twice.name, once.name]
    assert {path.name for path in logs.iterdir()} == {"2.jsonl", f"{stopped.name}.jsonl"}
    assert [kept(read(logs, job)) for job in jobs] == before
    assert len(read(logs, twice).failed) == 1 and read(logs, once).step.keys() == {0, 1, 2, 3}
    make(once, "logs")
    with pytest.raises(ValueError, match=rf"2.jsonl has {once.name} already"):
        gsm8k_plan.append(logs)


def test_a_newly_solved_problem_is_one_that_no_sample_solved_before():
    before, after = (
        Log([dict(kind="test", name="wide", samples=512, right=right)])
        for right in ([0, 0, 1, 7], [0, 3, 0, 9])
    )
    assert gsm8k_tables.newly_solved(before, after) == 1


def test_pass_at_k_is_the_share_of_draws_of_k_samples_with_a_right_one():
    """Draws of three of five samples, of which 0, 1, 3, 5 are right: 0, 6, 10, 10 of 10."""
    log = Log([dict(kind="test", name="pass", samples=5, right=[0, 1, 3, 5])])
    assert log.measure("pass@1") == pytest.approx(0.45)
    assert log.measure("pass@3") == pytest.approx(0.65)


def test_the_rates_table_stands_in_the_log(capsys):
    gsm8k_tables.main("rate")
    said = capsys.readouterr().out.strip()
    assert said.count("\n| ") == 11 and said in (ROOT / "results/LOG.md").read_text()


def test_growth_is_the_last_ten_steps_less_the_first_five():
    """Of rewards 0, 1, …, 19, logged in another order."""
    log = Log([dict(kind="step", step=step, reward=step) for step in reversed(range(20))])
    assert log.measure("reward") == 14.5 and log.measure("growth") == 12.5


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
    assert compare([1, 1, 1], [0, 0, 0]) == (1.0, 0.0, 0.0)
    assert compare([1, 1, 1], [1, 1, 1]).p == 1.0
    assert math.isnan(compare([1, 2], [0, 0]).half)


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
def test_a_recipe_is_two_commands_with_the_papers_batch_and_evaluation(name):
    """A stand-in for python prints what it was called with."""
    command = 'python() { echo "$*"; }; export -f python; bash experiments/recipes.sh $0 --seed 7'
    printed = subprocess.check_output(["bash", "-c", command, name], cwd=ROOT, text=True)
    trained, evaluated = (parse(line.split()[1:]) for line in printed.splitlines())
    assert trained.prompts * trained.group_size == 128 and trained.warmup * 10 == trained.steps
    assert trained.seed == 7 and evaluated.adapter == f"{trained.out}/adapter"
    assert evaluated.steps == 0 and evaluated.test and evaluated.max_new_tokens == 4096
    assert (evaluated.temperature, evaluated.eval_top_p) == (0.6, 0.95)
    for flag in "model", "quant", "rank", "alpha":
        assert getattr(evaluated, flag) == getattr(trained, flag)


def test_an_unknown_recipe_is_refused_by_name():
    done = subprocess.run(
        ["bash", ROOT / "experiments/recipes.sh", "1b"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "1b" in done.stderr
