"""python -m pytest tests/test_gsm8k.py"""
import contextlib
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import launch
import lora
import memory
import model as decoder
import nvfp4
import runs
import train
from tasks import Task

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "results"))
import experiment  # noqa: E402
import gsm8k  # noqa: E402
import gsm8k_tables  # noqa: E402
from experiment import LEVEL, MARGIN, Rounded, opened  # noqa: E402
from gsm8k import ARMS, ONE, TWO, Job  # noqa: E402

README, LOGBOOK = ((ROOT / path).read_text() for path in ("README.md", "results/README.md"))
SECTION = LOGBOOK.split("## GSM8K on Qwen2.5-Coder: ")[1].split("\n## ")[0]


# --- the rules
def test_the_rules_in_the_log_book_are_those_of_the_code():
    """Tables as `rules` prints them; the numbers of the prose; the verdicts' words."""
    assert gsm8k_tables.rules() in SECTION
    text = " ".join(SECTION.split())
    common, sampled = gsm8k.COMMON, gsm8k.TESTS
    for fact in (f"{common['steps']} steps of {common['prompts']} prompts × {common['group_size']} answers "
                 f"of at most {common['max_new_tokens']} tokens", f"{gsm8k.RATE_STEPS} steps, seeds 0 and 1",
                 f"smallest effect worth having is {MARGIN}".replace("0.", "."), "fewer than 3 whole seeds",
                 "Holm-adjusted over the four claims", f"p is below {LEVEL}".replace("0.", "."),
                 f"{sampled['pass'][1]} samples at temperature 1 of {sampled['pass'][0]} problems"):
        assert fact in text, fact
    assert gsm8k.RATE_SEEDS == (0, 1) and not {0, 1} & {*ONE.seeds, *TWO.seeds}
    assert [*TWO.arms] == [*"123456789"] and (len(ONE.arms), len(ONE.seeds), len(TWO.seeds)) == (3, 3, 5)


def test_each_arm_differs_from_its_pair_in_what_it_names():
    """Flags of the issue's table; 2, 6 and 7 differ in noise and correction alone."""
    configs = {arm: gsm8k.configured(Job("main", arm, 1e-4, 2), dict(model="m")) for arm in ARMS}

    def differ(a, b):
        return {k for k in vars(configs[a]) if getattr(configs[a], k) != getattr(configs[b], k)}
    assert differ("2", "5") == {"aqn", "sigma_end"} and configs["5"].sigma_end == 5e-4
    assert differ("6", "7") == {"aqn", "sigma_start", "sigma_end"} and configs["6"].correction == "tis"
    assert configs["6"].sigma_start / configs["5"].sigma_start == pytest.approx(10)
    assert configs["6"].sigma_end / configs["5"].sigma_end == pytest.approx(10)
    assert differ("6", "8") == differ("1", "2") == {"quant"} and differ("1", "9") == differ("1", "4") == set()
    assert {TWO.arms[arm][0] for arm in "2567"} == {"rtn"}
    assert differ("nvfp4", "bf16") == {"quant", "aqn"} and differ("bf16", "nf4") == set()
    default = train.Config()
    assert all(getattr(configs["nvfp4"], k) == getattr(default, k) for k in (
        "quant", "aqn", "sigma_start", "sigma_end", "sigma_stages", "correction", "loss", "rank"))


def test_runs_that_share_a_card_take_smaller_micro_batches(monkeypatch):
    """Of an 80 GB card: what memory.py plans for the update fits into a run's share. A flag wins."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=85e9))
    monkeypatch.setattr(gsm8k, "opened", lambda name: [SimpleNamespace(config=memory.config(
        re.search("[01].5b", name)[0]))])
    for arm, ours in ARMS.items():
        taken = []
        for share in (.9, .45, .3, .225):
            config = gsm8k.configured(Job("main", arm, 1e-4, 2), {}, share)
            taken.append(config.micro_tokens)
            assert memory.plan_of(config, memory.config(ours.size), 256, 600).peak < share * 85e9
        assert sorted(set(taken)) == taken[::-1] and taken[0] >= 24576 and taken[-1] >= 4096
        assert gsm8k.configured(Job("main", arm, 1e-4, 2), dict(micro_tokens=512), .9).micro_tokens == 512


def test_a_cut_leaves_fewer_seeds_and_never_fewer_arms(tmp_path):
    """Rates first. The next seed's runs follow after all arms of the one before."""
    jobs = gsm8k.plan(tmp_path)
    assert [job.phase for job in jobs[:24]] == ["rate"] * 24 and len({job.name for job in jobs}) == len(jobs)
    main = [job for job in jobs if job.phase == "main"]
    assert [job.arm for job in main] == [*ONE.arms] * 3 + [*TWO.arms] * 5
    assert [job.seed for job in main] == [s for s in ONE.seeds for _ in range(3)] + [
        s for s in TWO.seeds for _ in range(9)]
    bases = [job.name for job in jobs if job.phase == "base"]
    assert len(bases) == 3 + 4 + 5 and sum("gauss" in name for name in bases) == 5
    assert {job.lr for job in main} == {None}                                # no rate is chosen yet
    ours = [job for job in jobs if job.parts()[0] is TWO]
    phases = [job.phase for job in ours[12:]]               # arm 7's temperatures; bases are for short gaps
    assert phases == ["base"] + ["main"] * 45 + ["base"] * 8 and ours[12].arm == "0.5b-rtn"
    assert sum(gsm8k.expected(job, tmp_path) for job in ours) < 21_000       # the estimate


# --- bases
def test_the_gaussian_error_is_frozen_and_has_the_norm_of_rtns_in_each_tensor(tiny_chat):
    """Another draw for another seed; nothing but projections changes; a second load gives the same."""
    kept, loaded = {}, {}
    for name, rounding in (("plain", None), ("one", gsm8k.gaussian(2)), ("again", gsm8k.gaussian(2)),
                           ("other", gsm8k.gaussian(3))):
        loaded[name] = decoder.load(Rounded(opened(str(tiny_chat))[0], rounding, "cpu", kept), "bf16")
    weights = [[m.base.W.weight for m in lora.lora_layers(model).values()] for model in loaded.values()]
    for plain, one, again, other in zip(*weights, strict=True):
        assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, plain)
    source, add = opened(str(tiny_chat))[0], gsm8k.gaussian(2)
    for name in sorted(source.names):
        if name.endswith("_proj.weight"):
            w = kept[name].float()
            norm = (nvfp4.dequantize(nvfp4.quantize(w, "rtn"), torch.float32) - w).norm()
            assert (add(w) - w).norm() == pytest.approx(norm.item(), rel=1e-4) and norm > 0
    adapter = torch.randn(w.shape, generator=torch.Generator().manual_seed(2))     # as load() begins to draw
    noise = gsm8k.gaussian(2)(w) - w
    assert abs(torch.corrcoef(torch.stack([adapter.flatten(), noise.flatten()]))[0, 1]) < 0.1
    rest = [{k: v for k, v in loaded[name].state_dict().items()} for name in ("plain", "one")]
    assert rest[0] and all(torch.equal(v, rest[1][k]) for k, v in rest[0].items())


# --- arm 7
def test_the_temperature_acts_on_training_answers_alone_stage_by_stage(tiny_chat):
    _, tokenizer, stop_ids = opened(str(tiny_chat))
    model = decoder.load(str(tiny_chat), "bf16")
    plain, hot = gsm8k.Sampler(model), gsm8k.Tempered(model, [1.0, 3.0], 4)
    args = [[3, 4, 5]] * 8, 4, 8, 1.0, set(), 0
    for step, same in ((0, True), (1, True), (2, False), (3, False), (-1, True)):
        a, b = (s.generate(*args, step).logprobs for s in (plain, hot))
        assert torch.equal(a, b) == same
    entropy = [-s.generate(*args, 2).logprobs.sum().item() for s in (plain, hot)]
    assert entropy[1] > entropy[0] * 1.05


def test_equal_temperatures_have_the_entropy_of_the_noise(tiny_chat):
    """Of every stage, on the prompts that chose them; no noise, temperature 1."""
    model = decoder.load(str(tiny_chat), "rtn")
    config = gsm8k.configured(Job("base", "0.5b-rtn", 0.0, 2), dict(model=str(tiny_chat), max_new_tokens=8))
    prompts = [[3 + i % 9, 4, 5 + i % 7] for i in range(40)]
    stages = gsm8k.equal_temperatures(config, model, prompts, set())
    assert len(stages) == 10 and stages[0][0] == 0 and stages[0][2] == 1 and stages[0][1] == stages[0][3]
    assert [round(sigma, 4) for sigma, *_ in (stages[1], stages[9])] == [0.1, 0.005]
    for _, nats, degrees, reached in stages:
        found = [gsm8k.Sampler(model).generate(prompts[draw::2], 2, 8, degrees, set(), 0, draw)
                 for draw in (0, 1)]
        got = -sum(r.logprobs.sum() for r in found) / sum(r.lengths.sum() for r in found)
        assert got.item() == pytest.approx(nats, abs=0.02) and got.item() == pytest.approx(reached, abs=1e-3)


def test_an_entropy_out_of_reach_is_an_error(tiny_chat, monkeypatch):
    model = decoder.load(str(tiny_chat), "rtn")
    config = gsm8k.configured(Job("base", "0.5b-rtn", 0.0, 2), dict(model=str(tiny_chat), max_new_tokens=8))
    monkeypatch.setattr(gsm8k.aqn, "noisy_norms", lambda model, sigma, *rest: contextlib.nullcontext(
        model.lm_head.data.mul_(0.0 if sigma else 1.0)))     # all tokens are equally probable
    with pytest.raises(ValueError, match="^no temperature of 0.5 to 2.0 has the entropy 3.4.* of σ 0.1$"):
        gsm8k.equal_temperatures(config, model, [[3, 4, 5]] * 8, set())


# --- runs
@pytest.fixture
def toy(tiny_chat, monkeypatch, tmp_path):
    """A task that a random model sometimes solves → (make(job, …), the prompts that were asked, the logs)."""
    asked = []

    def task(data, operands=None, held_out=256):
        problems = [{"i": i} for i in range(24)]
        return Task(problems[min(held_out, 6):], problems[:min(held_out, 6)],
                    lambda p: asked.append(p["i"]) or f"{p['i']} + 7", lambda p, text, finished: float(
                        text[:1] in set("01234")))
    monkeypatch.setitem(gsm8k.TASKS, "gsm8k", task)
    monkeypatch.setattr(gsm8k, "ROOT", tmp_path)
    flags = dict(model=str(tiny_chat), steps=4, prompts=4, group_size=4, max_new_tokens=4, rank=4, alpha=4,
                 save_every=2, device="cpu", eval_every=4)

    def make(*job, **more):
        return gsm8k.make(job, tmp_path / "logs", tmp_path / "logs", flags | more)
    return make, asked, tmp_path / "logs"


def test_every_arm_runs_and_logs_what_tables_and_figures_need(toy):
    """One seed: same prompts in all arms. Then the tables and both figures, drawn from that log."""
    make, asked, logs = toy
    with pytest.raises(ValueError, match="arm 7 needs temperatures"):
        make("main", "7", 1e-3, 2)
    prompts = {}
    for job in gsm8k.plan(logs):
        if job.phase == "base" or job.phase == "main" and job.seed == 2:
            asked.clear()
            make(job.phase, job.arm, 1e-3 if job.phase == "main" else 0.0, job.seed)
            prompts[job.phase, job.arm] = list(asked)
    assert len({str(v) for (_, arm), v in prompts.items() if arm in TWO.arms}) == 1
    for arm, ours in ARMS.items():
        log = gsm8k.read(logs, f"main-{arm}-2")
        assert [*log.step] == [0, 1, 2, 3] and log.ended and [*log.tests] == [*ours.tests]
        assert bool(log.failed) == (arm == "7") and len(log.starts) == 1
        assert len(log.tests["greedy"]["right"]) == 24 and 0 < log.measure("paper") < 1
        sigma = [r["sigma"] for r in log.step.values()]
        assert (sigma[3] > 0) == (arm in ("nvfp4", "5", "6", "8")) and sigma[0] == 0
        start = log.starts[0]
        assert start["time"].endswith("UTC") and {"gpu", "torch", "triton", "commit"} <= {*start}
        assert not any(str(value).startswith("/") for value in start.values())
    assert ["mismatch" in gsm8k.read(logs, f"main-{arm}-2").step[0] for arm in "67"] == [True, False]
    drift = [gsm8k.read(logs, f"main-{arm}-2").mean("sampler_entropy", range(5, 10)) for arm in "267"]
    assert drift[1] != drift[0] != drift[2]
    assert gsm8k.whole_seeds(logs, ONE) == gsm8k.whole_seeds(logs, TWO) == [2]
    shown = gsm8k_tables.table(logs)
    assert all(row[0] in shown for row in gsm8k.CLAIMS) and shown.count("cannot tell") == 4
    assert "nan" not in shown
    assert "Coder" in shown and "dequantised from a Q4_K_M GGUF" in shown
    for ours in (ONE, TWO):
        gsm8k_tables.plot(logs, ours, logs / f"{ours.size}.png")
        first = (logs / f"{ours.size}.png").read_bytes()
        gsm8k_tables.plot(logs, ours, logs / f"{ours.size}.png")
        assert (logs / f"{ours.size}.png").read_bytes() == first
    assert (logs / "main-6-2.jsonl").stat().st_size < 4000
    assert not [*(logs.parent / "runs").rglob("checkpoint*")]


@pytest.mark.parametrize("stopped_at", [3, 4, "test"])
def test_a_stopped_run_goes_on_and_its_log_equals_that_of_a_run_without_a_stop(toy, monkeypatch, stopped_at):
    """Stopped in a step: it repeats none before its last checkpoint. In a test: only the tests that lack."""
    make, _, logs = toy
    make("main", "5", 1e-3, 2)
    whole = gsm8k.read(logs, "main-5-2")
    (logs / "main-5-2.jsonl").unlink()
    seen, made, test = [], gsm8k.Logged.made, gsm8k.test

    def stop(run, step, *rest):
        made(run, step, *rest)
        if step + 1 == stopped_at:
            raise SystemExit(143)                                   # as SIGTERM in a worker

    def stop_test(name, *rest):
        if name == "pass":
            raise SystemExit(143)
        return test(name, *rest)
    with monkeypatch.context() as m, pytest.raises(SystemExit):
        m.setattr(*((gsm8k.Logged, "made", stop) if stopped_at != "test" else (gsm8k, "test", stop_test)))
        make("main", "5", 1e-3, 2)
    assert not gsm8k.read(logs, "main-5-2").ended
    path = logs / "main-5-2.jsonl"
    path.rename(logs / "elsewhere")
    with pytest.raises(ValueError, match="its log ends at step 0: bring the newest log back"):
        make("main", "5", 1e-3, 2)
    (logs / "elsewhere").replace(path)
    monkeypatch.setattr(gsm8k, "test", lambda name, *rest: seen.append(name) or test(name, *rest))
    make("main", "5", 1e-3, 2)
    log = gsm8k.read(logs, "main-5-2")
    assert log.ended and len(log.starts) == 2 and log.starts[1]["step"] == {3: 3, 4: 4, "test": 4}[stopped_at]
    assert seen == (["greedy", "pass", "paper"] if stopped_at != "test" else ["pass", "paper"])

    def results(log):
        return ([{k: v for k, v in r.items() if k not in ("rollout_s", "update_s", "memory_gb")}
                 for r in log.step.values()], [r["right"] for r in log.tests.values()])
    assert results(log) == results(whole)


def test_sigterm_lets_a_worker_save_the_steps_it_has_made(tmp_path, tiny_chat, monkeypatch):
    """`all` pauses its workers so. The problems are real ones, short enough for a tiny model."""
    data = tmp_path / "data.jsonl"
    problems = [dict(question=f"{i}+7?", answer=f"#### {i + 7}") for i in range(40)]
    data.write_text("\n".join(map(json.dumps, problems)))
    flags = dict(model=str(tiny_chat), data=str(data), test=str(data), steps=3000, prompts=2, group_size=2,
                 max_new_tokens=2, rank=4, alpha=4, save_every=3000, device="cpu", eval_every=3000)
    job, out = Job("main", "2", 1e-3, 2), tmp_path / f"pytest-{os.getpid()}"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=experiment.worker, args=(
        theirs, partial(gsm8k.make, logs=out, out=out, flags=flags), 0, 0.0, 1))
    process.start()
    ours.send(job)
    while len(gsm8k.read(out, job).step) < 5 and process.is_alive():
        time.sleep(0.05)
    process.terminate()
    process.join()
    made = len(gsm8k.read(out, job).step)
    folder = gsm8k.folder(out, job)
    try:
        assert process.exitcode == 143 and 5 <= made < 3000
        assert runs._read(folder / "checkpoint.safetensors")[1] == made
        assert not gsm8k.read(out, job).failed
        whole = gsm8k.expected(Job("main", "3", 1e-3, 2), out)
        assert gsm8k.expected(job, out) == pytest.approx(whole - gsm8k.SECONDS["0.5b"][1] * made, abs=1e-6)
    finally:
        shutil.rmtree(folder.parent)


def test_a_run_that_begins_again_replaces_its_records_and_a_failure_stays_in_the_log(tmp_path):
    path = tmp_path / "main-1-2.jsonl"
    for record in (dict(kind="start", step=0, steps=4, load_s=1), *(
            dict(kind="step", step=s, reward=0, rollout_s=1, update_s=1) for s in range(4)),
            dict(kind="test", name="greedy", right="11", samples=1, seconds=1),
            dict(kind="end"), dict(kind="failed", error="RuntimeError: lost"),
            dict(kind="start", step=2, steps=4, load_s=1), dict(kind="step", step=2, reward=1, rollout_s=1,
                                                                update_s=1)):
        runs.append(path, record)
    with open(path, "a") as file:
        file.write('{"kind": "st')                                   # a crash
    log = gsm8k.read(tmp_path, "main-1-2")
    assert [(s, r["reward"]) for s, r in log.step.items()] == [(0, 0), (1, 0), (2, 1)]
    assert log.tests == {} and len(log.failed) == 1 and not log.ended and log.seconds == 8


def test_a_number_that_is_not_finite_is_left_out_of_the_log(toy, monkeypatch):
    """So that no mean meets it: a step that is skipped is a result."""
    make, _, logs = toy
    made = gsm8k.Logged.made
    monkeypatch.setattr(gsm8k.Logged, "made", lambda run, step, stats, sampled: made(
        run, step, stats | dict(entropy=math.nan if step == 1 else 0.5), sampled))
    make("main", "1", 1e-3, 2)
    log = gsm8k.read(logs, "main-1-2")
    assert "entropy" not in log.step[1] and len(log.step) == 4 and log.mean("entropy") == 0.5


# --- statistics
def write(logs, job, greedy=0.5, few=32, steps=10):
    """The log of a finished job whose tests come out as told, over 1,000 and 200 problems."""
    right = "".join("1" if i < round(1000 * greedy) else "0" for i in range(1000))
    passes = [few if i % 2 else 0 for i in range(200)]
    for record in (dict(kind="start", **job._asdict(), step=0, steps=steps, load_s=10, gpu="NVIDIA H100, 1",
                        torch="2", triton="3", commit="abc", at_once=1, time="2026-11-26 00:00:00 UTC"),
                   *(dict(kind="step", step=s, reward=greedy, entropy=0.2, sampler_entropy=0.3, kl_noise=1e-4,
                          rollout_s=1, update_s=1, memory_gb=9, sigma=0) for s in range(steps)),
                   dict(kind="eval", step=steps, eval_greedy=greedy, rollout_s=1),
                   *(dict(kind="test", name=name, right=r, samples=n, seconds=1) for name, r, n in (
                       ("greedy", right, 1), ("paper", right.replace("1", "8"), 8), ("pass", passes, 64))),
                   dict(kind="temperatures", stages=[[0.0, 0.3, 1.0, 0.3]] * 10), dict(kind="end")):
        runs.append(logs / f"{job.name}.jsonl", record)


def rated(logs):
    """Write the rate runs: the middle rate is best."""
    for ours in (ONE, TWO):
        for job in gsm8k.rate_jobs(ours):
            write(logs, job, 0.5 + 0.1 * (job.lr == ours.rates[1]))


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    """Against all draws of k of n answers."""
    rights = [0, 1, 3, 6]
    log = gsm8k.Log([], {}, {}, {"pass": dict(samples=6, right=rights)}, [], {})
    for k in (1, 2, 4):
        want = [np.mean([any(i < c for i in draw) for draw in combinations(range(6), k)]) for c in rights]
        assert log.measure(f"pass@{k}") == pytest.approx(np.mean(want))
    assert gsm8k.TESTS["pass"][1] >= 2 * 32


def test_the_rate_is_chosen_when_all_its_runs_have_ended_and_arm_7_waits_for_its_temperatures(tmp_path):
    rated(tmp_path)
    assert gsm8k.chosen(tmp_path, ONE)[1] == 5e-5 and gsm8k.chosen(tmp_path, TWO)[1] == 1e-4
    waiting = {job.arm for job in gsm8k.left(tmp_path) if job.lr is None}
    assert waiting == {"7"}
    write(tmp_path, Job("base", "0.5b-rtn", 0.0, 2))
    assert not [job for job in gsm8k.left(tmp_path) if job.lr is None]
    (tmp_path / f"{gsm8k.rate_jobs(TWO)[-1].name}.jsonl").unlink()
    assert gsm8k.chosen(tmp_path, TWO)[1] is None
    short, long = (gsm8k.expected(Job(phase, "1", 1e-4, 2), tmp_path) for phase in ("rate", "main"))
    assert short == pytest.approx(1.1 * (10 + 20 + 3 + 1) + 15)             # by the logs, alone on the card
    load_s, step_s, tests_s = gsm8k.SECONDS["0.5b"]
    assert long == load_s + 100 * step_s + tests_s                          # an estimate
    two, three = (gsm8k.expected(Job("rate", "1", 1e-4, 2), tmp_path, at_once) for at_once in (2, 3))
    assert two == pytest.approx(1.2 * short) and three == pytest.approx(1.8 * short)


def test_known_effects_get_their_verdicts_and_fewer_than_three_whole_seeds_cannot_tell(tmp_path):
    rated(tmp_path)
    for job in gsm8k.plan(tmp_path):
        if job.phase == "base":
            write(tmp_path, job, 0.3, few=1)
    rng, level = np.random.default_rng(0), {"2": .4, "5": .4, "1": .47, "9": .35}
    for seed in TWO.seeds:
        if seed == 5:
            three = {row[0]: says for row, *_, says in gsm8k_tables.claims(tmp_path)}
        for arm in TWO.arms:
            if (arm, seed) != ("4", 6):                                       # seed 6 lacks one arm
                write(tmp_path, Job("main", arm, 1e-4, seed), level.get(arm, .4) + rng.normal(0, .003),
                      few={"6": 9 + seed % 3, "7": 2}.get(arm, 4))
    assert gsm8k.whole_seeds(tmp_path, TWO) == [2, 3, 4, 5]
    found = {row[0]: (len(a), says) for row, a, *_, says in gsm8k_tables.claims(tmp_path)}
    assert found == {"NVFP4 ends above bf16": (4, "does not"), "AQN lifts NVFP4": (4, "does not"),
                     "noise explores more than temperature": (4, "holds"),
                     "NVFP4's error is better than a Gaussian one": (4, "holds")}
    assert set(three) == set(found)
    for arm in TWO.arms:
        for seed in (4, 5):
            (tmp_path / f"main-{arm}-{seed}.jsonl").unlink()
    assert {says for *_, says in gsm8k_tables.claims(tmp_path)} == {"cannot tell"}
    row = gsm8k_tables.arm_row(tmp_path, TWO, "6", [2, 3])
    assert row["solved after, of those never solved in 64 before"] == "0.0 of 100"
    assert math.isnan(gsm8k.Log([dict(steps=10)], {}, {}, {}, [], {}).mean("reward"))


def test_all_makes_what_fits_into_the_time_and_says_what_is_left(toy, tiny_chat, capfd):
    """No run starts that would end after --minutes; a run that ended is not made again."""
    _, _, logs = toy
    logs.mkdir()
    rated(logs)
    before = {path.name: path.read_bytes() for path in logs.iterdir()}
    flags = ["--logs", str(logs), "--model", str(tiny_chat), "--device", "cpu"]
    assert gsm8k.main(["all", *flags, "--minutes", "0.3"]) == 0              # all wait for 150 s and more
    assert {path.name: path.read_bytes() for path in logs.iterdir()} == before
    said = capfd.readouterr().out
    assert "66 runs to make" in said and "66 runs left, 0 of them stopped on the way, 0 failed" in said
    assert "no other would end in time" in said
    gsm8k.main(["list", "--logs", str(logs)])
    assert "experiment 2, main:  0 of 45 made" in capfd.readouterr().out


def test_all_lets_its_workers_read_the_folder_of_models_and_tries_a_failed_run_once_more(tmp_path, capfd):
    """A new process imports the module anew. Each failure is in the log of its run."""
    logs = tmp_path / "logs"
    args = ["--logs", str(logs), "--models", str(tmp_path / "none"), "--device", "cpu", "--experiment", "1"]
    jobs = gsm8k.rate_jobs(ONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gsm8k.MODELS, "1.5b", "")                             # restored afterwards
        patch.setattr(gsm8k, "left", lambda *_: jobs[:1])
        assert gsm8k.main(["all", *args, "--minutes", "30"]) == 1
    failed = gsm8k.read(logs, jobs[0]).failed
    assert len(failed) == 2 and all(str(tmp_path / "none") in r["error"] for r in failed)
    assert capfd.readouterr().out.count("FAILED") == 2


def test_a_worker_that_takes_over_runs_on_the_gpu_of_the_one_that_died(monkeypatch):
    """Else two would share a card and the other card would idle."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    died, jobs = [], [("slow", 0), ("dies", 1), ("last", 2)]
    made = multiprocessing.get_context("spawn").Manager().dict()

    def todo():
        return [job for job in jobs if job not in made and not (job[0] == "last" and len(died) < 2)]
    failed = experiment.work(todo, partial(where, made), lambda *_: True, 2, 1.0, "cpu", died=died.append)
    assert failed == {jobs[1]: "its process died"} and died == [jobs[1]] * 2
    assert (made[jobs[0]], made[jobs[2]]) == (0, 1)


def where(made, job):
    """Which GPU does the worker have that makes the job?"""
    caller = sys._getframe(1).f_locals
    if job[0] == "dies":
        os._exit(1)
    if job[0] == "slow":
        while ("last", 2) not in made:
            time.sleep(0.05)
    made[job] = caller["gpu"]


def test_the_committed_logs_hold_runs_of_the_plan_alone():
    """And what they say was measured after the rules were committed is in their start records."""
    for path in (ROOT / "results" / "gsm8k").glob("*.jsonl"):
        names = {job.name for job in gsm8k.plan(path.parent)}
        assert path.stem in names and all(json.loads(line) for line in path.read_text().splitlines())


def test_run_repeats_a_run_with_the_settings_of_its_log(monkeypatch, capsys):
    """The micro-batches too, whatever card it runs on; a flag of the command line wins."""
    given = []
    monkeypatch.setattr(gsm8k, "make", lambda *args, **named: given.append(args) or "made")
    for flags in ((), ("--micro-tokens", "2048")):
        assert gsm8k.main(["run", "5", "2", *flags]) == 0
    (job, logs, out, flags, _), (*_, ours, _) = given
    assert job == Job("main", "5", 1e-4, 2) and logs == gsm8k.LOGS != out
    assert flags == {"micro_tokens": 12288} and ours == {"micro_tokens": 2048}
    assert "log   {'greedy': '0.322'" in capsys.readouterr().out


def test_both_readmes_show_the_committed_logs():
    """The tables as `table` prints them; README's first claim; its command is that of the default arm."""
    assert gsm8k_tables.table(gsm8k.LOGS) in LOGBOOK
    before, after = zip(*gsm8k_tables.pairs_of(gsm8k.LOGS, ONE, "nvfp4", ONE.seeds), strict=True)
    before, after = (np.mean([log.measure("greedy") for log in logs]) for logs in (before, after))
    assert f"test accuracy {before:.2f} → {after:.2f}" in README and after - before >= 0.08
    assert f"arm `nvfp4` gains {after - before:.3f}".replace("0.", ".") in LOGBOOK
    said = " ".join(README.split("**Does the noise help?**")[1].split("\n## ")[0].split())
    for (claim, *_), _, _, mean, half, _, verdict in gsm8k_tables.claims(gsm8k.LOGS):
        found = f"({mean:+.3f} ± {half:.3f}".replace("0.", ".").replace("-", "−")
        sentence, = (text for text in said.split(". ") if found in text)
        assert verdict in sentence, claim
    command = re.search(r"    python train.py (--model Qwen/.*?)\n    python", README, re.S)[1]
    shown = launch.parse(train.Config, command.replace("\\\n", "").split())
    logged = gsm8k.configured(Job("main", "nvfp4", gsm8k.chosen(gsm8k.LOGS, ONE)[1], shown.seed), {})
    assert {key for key, value in vars(shown).items() if value != vars(logged)[key]} <= {"save_every"}


def test_plot_waits_for_three_whole_seeds(tmp_path):
    """Else the command leaves a figure that the next test refuses."""
    shutil.copytree(gsm8k.LOGS, tmp_path / "logs")
    (tmp_path / "logs" / "main-nf4-4.jsonl").rename(tmp_path / "away")
    gsm8k_tables.main("plot", tmp_path / "logs")
    assert not (tmp_path / "gsm8k-1.5b.png").exists()
    (tmp_path / "away").rename(tmp_path / "logs" / "main-nf4-4.jsonl")
    gsm8k_tables.main("plot", tmp_path / "logs")
    assert (tmp_path / "gsm8k-1.5b.png").exists()


@pytest.mark.parametrize("ours", (ONE, TWO), ids=lambda ours: ours.size)
def test_a_figure_is_drawn_once_there_are_three_seeds_and_shows_the_committed_logs(ours, tmp_path):
    figure, again = gsm8k.LOGS.parent / f"gsm8k-{ours.size}.png", tmp_path / "again.png"
    gsm8k_tables.plot(gsm8k.LOGS, ours, again)
    assert figure.exists() == (len(gsm8k.whole_seeds(gsm8k.LOGS, ours)) >= 3)
    numbers = Image.open(again).text["Description"]
    assert numbers.count("→") == 2 * len(ours.arms)
    assert not figure.exists() or Image.open(figure).text["Description"] == numbers
