"""experiments/: runs, what a log says, the statistics, the recipes."""

import itertools
import json
import math
import random
import subprocess

import pytest
import torch
from command import ROOT
from test_train import actor, rollout

import nvfp4
import train
from experiments import gsm8k, gsm8k_plan, gsm8k_tables
from experiments.gsm8k_plan import FOUR, LARGE, LOGS, ONE, TWO, Job, Log, read
from experiments.paired import Difference, compare, holm, verdict
from tools import calibrate
from tools import run as run_file
from tools.flags import FIELDS, parse, spelled

# of a start record, for the line below the tables
CONDITIONS = dict(gpu="a GPU", torch="1", triton="1", commit="abc", at_once=1, time="today")


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

    def start(job, name, **more):
        gsm8k.make(job, tmp_path / name, flags | more, problems=4)
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
@pytest.mark.parametrize("arm, seed", [("7", 2), ("18", 12)])
def test_a_stopped_run_goes_on_and_its_log_equals_that_of_a_run_without_a_stop(
    make, monkeypatch, arm, seed
):
    """Arm 7 is sampled at its temperatures, 18 under noise and trained four times on each rollout.
    Both are tested. They stop in the third step."""
    job = Job("main", arm, 1e-3, seed)
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
    assert len(whole.step) == 4 and whole.tests.keys() == {*job.experiment.tests}
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


@pytest.mark.parametrize("arm", ["22", "16", "7", "12"])
def test_each_sampler_of_a_run_keeps_keys_and_values_as_its_flags_say(make, monkeypatch, arm):
    """Those of training and of the test. Arm 12 takes a flag that none of its runs had."""
    used = []

    def noted(real):
        def generate(sampler, *arguments, **more):
            used.append(sampler.kv)
            return real(sampler, *arguments, **more)

        return generate

    if arm == "12":
        make(Job("main", "11", 1e-3, 7), "logs")
    monkeypatch.setattr(gsm8k.Sampler, "generate", noted(gsm8k.Sampler.generate))
    asked = "int8" if arm in ("22", "12") else "bf16"
    make(Job("main", arm, 1e-3, 7), "logs", **({"kv": asked} if arm == "12" else {}))
    assert len(used) > 4 and set(used) == {asked}


def test_the_search_finds_the_temperature_of_an_entropy(tiny_chat):
    sampler = gsm8k.FollowingSampler(actor(tiny_chat), "bf16", {})
    done = rollout(sampler.model, sigma=0)
    for temperature in (0.8, 1.3):
        _, entropy = done.scored_by(sampler.model, temperature)
        found = sampler.search(done, entropy.sum() / done.lengths.sum())
        assert found == pytest.approx(temperature, abs=sampler.WIDTH)


def test_a_calibrated_arm_trains_on_the_folder_that_its_refusal_tells_how_to_make(make, tmp_path):
    """And an arm of the figure's is evaluated on held-out problems while it trains."""
    job = Job("main", "17", 1e-3, 12)
    with pytest.raises(ValueError, match="-gptq is missing") as refused:
        make(job, "refused")
    _, command = str(refused.value).split("python -m tools.calibrate ")
    calibrate.main(command.split())
    log = make(job, "logs", eval_every=2)
    start, *others = log.starts
    assert log.ended and not others and start["model"].endswith("-gptq")
    assert log.eval.keys() == {0, 2, 4} and log.step.keys() == {0, 1, 2, 3}


def test_the_56_runs_of_experiment_4_are_planned_by_whole_seeds_and_parse(tmp_path, monkeypatch):
    """The command line of each has train.py's flags, and makes the same config."""
    for name in ("0.5b", "1.5b"):
        (tmp_path / f"runs/qwen2.5-coder-{name}-instruct-q4_k_m-gptq").mkdir(parents=True)
    monkeypatch.setattr(gsm8k, "ROOT", tmp_path)
    jobs = [job for job in gsm8k_plan.plan(LOGS) if job.experiment in (FOUR, LARGE)]
    sets = (
        (FOUR.seeds[:5], FOUR.arms),
        (TWO.seeds, ["15", "17", "18", "19"]),
        ((2, 3, 4), LARGE.arms),
    )
    names = [f"main-{arm}-{seed}" for seeds, arms in sets for seed in seeds for arm in arms]
    assert [job.name for job in jobs] == names and len(names) == 56
    configs = {}
    for job in jobs:
        config = configs[job.name] = gsm8k.configured(job, {})
        words = []
        for name, field in FIELDS.items():
            value = getattr(config, name)
            if field.type is bool:
                words.append(spelled(name if value else f"no_{name}"))
            elif value is not None:
                words += [spelled(name), str(value)]
        assert parse(words) == config
    lr = {name: config.lr for name, config in configs.items()}
    assert {lr[name] for name in names} == {1e-4, 5e-5}
    assert {name.split("-")[1] for name in names if lr[name] == 5e-5} == {"15", "20"}
    noisy, quiet = (vars(configs[f"main-{arm}-12"]) for arm in ("18", "19"))
    differ = {name for name in noisy if noisy[name] != quiet[name]}
    assert differ == {"aqn", "sigma_end"} and not quiet["aqn"]


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


@pytest.mark.parametrize("name, rows", [("rate", 11), ("groups", 5)])
def test_a_table_that_was_read_from_old_logs_stands_in_the_log(name, rows, capsys):
    gsm8k_tables.main(name)
    said = capsys.readouterr().out.strip()
    assert said.count("\n| ") == rows and said in (ROOT / "results/LOG.md").read_text()


def test_a_group_whose_first_half_is_equal_may_still_have_signal():
    """Of 8 answers, 4 right: 2 of the 70 halves are equal, and the whole group never is."""
    log = Log([dict(kind="test", name="pass", samples=8, right=[4])])
    assert gsm8k_tables.group_shares(log) == pytest.approx((1, 1 / 70, 2 / 70))


def test_growth_is_the_last_ten_steps_less_the_first_five():
    """Of rewards 0, 1, …, 19, logged in another order."""
    log = Log([dict(kind="step", step=step, reward=step) for step in reversed(range(20))])
    assert log.measure("reward") == 14.5 and log.measure("growth") == 12.5


@pytest.mark.parametrize("experiment", [ONE, TWO])
def test_a_figure_is_drawn_from_the_committed_logs(experiment, tmp_path):
    gsm8k_tables.plot(gsm8k_tables.LOGS, experiment, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 20_000


GROWTH = {"14": 0.2, "15": 0.15, "16": 0.15, "17": 0.2, "18": 0.2, "19": 0.2}
GREEDY = {"14": 0.4, "15": 0.35, "16": 0.32, "17": 0.37, "18": 0.33, "19": 0.36}


def invent(folder, growth):
    """Write the logs of experiment 4, and of its twins in experiment 2, as if it had been made."""
    folder.mkdir()
    same = dict.fromkeys(("sampler_entropy", "kl_noise", "entropy"), 0.1)
    for arm, seed in itertools.product(FOUR.arms, FOUR.seeds):
        draw = random.Random(f"{arm} {seed}")
        job = gsm8k_plan.main_job(arm, seed)
        up = growth[arm] + draw.gauss(0, 0.004)
        right = round(1000 * (GREEDY[arm] + draw.gauss(0, 0.004)))
        records = [dict(kind="start", **job._asdict(), step=0, steps=20) | CONDITIONS]
        for step in range(20):
            records.append(dict(kind="step", step=step, reward=0.1 + up * (step > 9), **same))
        if seed in gsm8k_plan.NEW_SEEDS:
            records += [dict(kind="eval", step=step, eval_greedy=0.3) for step in (0, 20)]
        record = dict(kind="test", name="greedy", samples=1)
        records += [record | dict(right="1" * right + "0" * (1000 - right)), dict(kind="end")]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{job.name}.jsonl").write_text(text)


@pytest.mark.parametrize(
    "growth_of_17, verdicts",
    [
        (0.2, ["holds", "holds", "holds", "does not"]),
        (0.25, ["holds", "does not", "holds", "does not"]),
        (0.15, ["does not", "holds", "holds", "does not"]),
    ],
)
def test_the_verdicts_of_experiment_4(tmp_path, growth_of_17, verdicts):
    """On invented logs. Ten pairs, in which arms 1 and 2 of experiment 2 are 14 and 16."""
    logs = tmp_path / "logs"
    invent(logs, GROWTH | {"17": growth_of_17})
    claims = gsm8k_tables.claims_of(logs, FOUR, FOUR.seeds)
    assert [verdict for *_, verdict in claims] == verdicts
    assert [len(a) for _, a, *_ in claims] == [10] * 4
    said = gsm8k_tables.table(logs)
    assert ("hold: the growth is the rate's" in said) == (verdicts[:2] == ["holds", "holds"])


def test_a_pair_of_experiment_4_counts_if_both_its_runs_have_ended(tmp_path):
    logs = tmp_path / "logs"
    invent(logs, GROWTH)
    for name in ("main-19-5", "main-2-6"):
        path = logs / f"{name}.jsonl"
        path.write_text(path.read_text().replace('{"kind": "end"}', ""))
    claims = gsm8k_tables.claims_of(logs, FOUR, FOUR.seeds)
    assert [len(a) for _, a, *_ in claims] == [10, 10, 9, 9]
    gsm8k_tables.main("plot", logs)
    assert (tmp_path / FOUR.figure).stat().st_size > 20_000


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


@pytest.mark.parametrize(
    "difference, expected",
    [
        (Difference(0.01, 0.005, 0.001), "holds"),  # above, but by less than .02
        (Difference(0.03, 0.005, 0.001), "does not"),
        (Difference(0.01, 0.03, 0.4), "cannot tell"),
        (Difference(-0.05, math.nan, math.nan), "cannot tell"),
    ],
)
def test_that_an_arm_is_not_above_another_takes_an_interval_that_ends_below_the_margin(
    difference, expected
):
    (claim,) = (claim for claim in FOUR.claims if not claim.above)
    assert gsm8k_plan.judged(claim, difference) == expected


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
