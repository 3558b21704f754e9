"""bench/: each script measures a tiny shape on a CPU, and its table is made of its records."""

import importlib
import re
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import fp4_gemm
import lora
import nvfp4
from bench import common, gemm, loading, rollout, step, tables, turns, vllm
from tools import memory, ranks, report

STEP = "--prompts 2 --samples 3 --prompt-length 5 --new 7 "


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch, tmp_path):
    """There is a shape "tiny", and tables reads logs in tmp_path."""
    monkeypatch.setitem(memory.MODELS, "tiny", (64, 2, 4, 2, 96, 97, False))
    monkeypatch.setattr(tables, "LOGS", tmp_path)
    monkeypatch.setattr(common, "DEVICE", "cpu")


def measured(script, path, flags):
    """Run a script on the tiny shape → its records."""
    script.main([*flags.split(), "--model-shape", "tiny", "--out", str(path)])
    return list(report.jsonl(path))


def test_rollout_times_decode_steps(tmp_path, capsys):
    """A batch of 1 has no prompt in common, one of 4 has one."""
    log = tmp_path / "rollout_bench.jsonl"
    found = measured(rollout, log, "--batch 1 4 --context 20 --new 6")
    for r in found:
        assert r["tok_s"] * r["ms_step"] == pytest.approx(1e3 * r["batch"])
        assert r["samples"] == r["slots"] == r["batch"]
    tables.rollout()
    alone, four, _, _ = ("{tok_s:,.0f} ({of_bound:.2f})".format(**r) for r in found)
    told = capsys.readouterr().out
    assert f"| Qwen2.5-TINY, NVFP4 |  | {four} |\n| … over our own bf16 |  | ×" in told
    assert f"| Qwen2.5-TINY, NVFP4, nothing in common | {alone} |  |\n" in told


def test_a_whole_rollout_is_timed_with_fewer_slots_than_rows(tmp_path):
    sizes = "--prompts 2 --samples 3 --mean 6 --limit 12"
    log = tmp_path / "rollout_bench.jsonl"
    (r,) = measured(rollout, log, f"--whole --batch 2 --quant bf16 --kv int8 {sizes}")
    assert r["tok_s"] * r["seconds"] == pytest.approx(6 * r["mean_length"])
    assert r["longest"] <= 12
    assert tables.rollouts() == ({}, {})  # which are of the usual sizes


@pytest.mark.parametrize(
    "wrong, named",
    [
        ("--whole --prompts 0", "--prompts: 0"),
        ("--whole --mean -3", "--mean: -3"),
        ("--whole --limit x", "--limit: .*x"),
        ("--whole --mean 9 --limit 8", "--mean 9 is above --limit 8"),
        ("--memory-gb 5", "--memory-gb: 5"),
        ("--mean 5", "--mean 5 has no use without --whole"),
        ("--whole --new 5", "--new 5 has no use with --whole"),
        ("--whole --prompt-length 99999", "102047 tokens exceed .* 32768: lower --prompt"),
        ("--whole --limit 32700", "33040 tokens exceed .* 32768: lower --prompt"),
        ("--context 32768", "32832 tokens exceed .* 32768: lower --context"),
        ("--context 5 --new 11", "--context 5 must exceed half of --new 11"),
    ],
)
def test_sizes_that_cannot_be_are_refused(wrong, named, tmp_path, capsys):
    with pytest.raises(SystemExit):
        measured(rollout, tmp_path / "log", wrong)
    assert re.search(named, capsys.readouterr().err.splitlines()[-1])


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(SystemExit, match="^--out .*/nowhere/log cannot be written: No such file"):
        measured(rollout, tmp_path / "nowhere/log", "")


def test_the_bound_is_the_notes_table():
    """Ideal tokens/s at context 1024 on an H200: rows of rollout-engine 1.3, to two digits."""
    for shape, batch, rate in ("7b", 8, 6400), ("7b", 64, 28700), ("32b", 8, 1600):
        bound = rollout.bound(memory.config(shape), "nvfp4", batch, 1024)
        assert bound == pytest.approx(rate, rel=0.03)


def test_step_counts_the_tokens_of_all_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ranks, "rank_and_count", lambda: (0, 2))
    found = measured(step, tmp_path / "step_bench.jsonl", STEP)
    for r in found:
        assert r["rollout_s"] * r["rollout_tok_s"] == pytest.approx(2 * 42)
        assert r["update_s"] * r["update_tok_s"] == pytest.approx(2 * 72)
    tables.step()
    row = "| Qwen2.5-TINY, 2 GPUs | 4 × 3 × 7 | 1024 (chosen) | 0 | NVFP4 | {rollout_s:.1f} |"
    assert row.format(**found[1]) in capsys.readouterr().out


def test_step_counts_the_tokens_of_answers_that_end_by_chance(tmp_path):
    for r in measured(step, tmp_path / "log", f"{STEP} --mean 3 --quant bf16"):
        assert r["rollout_s"] * r["rollout_tok_s"] == pytest.approx(6 * r["mean_length"])
        assert r["update_s"] * r["update_tok_s"] == pytest.approx(6 * (r["mean_length"] + 5))
        assert r["mean_length"] < r["longest"] <= 7


def test_gemm_writes_what_its_table_reads(tmp_path, capsys, monkeypatch):
    """On a CPU with seconds that are made up; the check is the real one."""
    monkeypatch.setattr(common, "DEVICE", "cuda")
    monkeypatch.setattr(common, "graph_times", lambda calls: dict(bf16=3e-5, ours=1e-5, lora=2e-5))
    monkeypatch.setattr(gemm, "random_matrix", torch.randn)
    monkeypatch.setattr(gemm, "TIMED", {"tiny": (1, 8)})
    monkeypatch.setattr(gemm, "L2_BYTES", 0)
    gemm.main(["--out", f"{tmp_path}/gemm_bench.jsonl"])
    tables.gemm()
    assert "\n| TINY gate_up | 192 × 64 | 3.00 | 3.00 |" in capsys.readouterr().out


def test_wrong_results_are_not_timed():
    q = nvfp4.quantize(torch.randn(32, 64))
    exact = nvfp4.dequantize(q, torch.float64)
    packed = fp4_gemm.pack(q)
    for wrong, scale in (1.01, 1.0), (1.0, 1.01):
        adapter = lora.LowRank(torch.randn(16, 64), torch.randn(32, 16), (32,), scale)
        with pytest.raises(SystemExit, match="it, .* wrong by .*not timed"):
            gemm.check("it", torch.randn(8, 64), packed, wrong * exact, adapter)


@pytest.mark.parametrize("script, flags, why", [
    (gemm, "", "needs a GPU"),
    (step, "--mean 8 --new 8", "--mean 8"),
    (loading, "", "--model"),
    (turns, "--trees nowhere", "--trees nowhere"),
    (vllm, "--mean 9 --limit 8", "--mean 9 is above --limit 8"),
    (vllm, "--vllm false", "--vllm false")])  # fmt: skip
def test_wrong_flags_are_named_before_anything_is_measured(capsys, script, flags, why):
    with pytest.raises(SystemExit) as stop:
        script.main(flags.split())
    assert stop.value.code == 2 and why in capsys.readouterr().err


def test_turns_tells_the_slower_of_two_checkouts(tmp_path):
    """Each imports its own modules: here one line, and a clock."""
    loaded = dict(sys.modules)
    for name, seconds in ("old", 1), ("new", 10):
        (tmp_path / name / "bench").mkdir(parents=True)
        for module, text in {
            "rollout": "",
            "speed": f"turn = dict(decode_s={seconds}, steps=2)",
            "bench/rollout": "from speed import turn\ndecoding = lambda *_: lambda: turn",
            "bench/common": "random_model = lambda *_: None",
            "bench/step": "",
        }.items():
            (tmp_path / name / f"{module}.py").write_text(text)
    flags = f"--batch 4 8 --rounds 3 --trees {tmp_path}/old {tmp_path}/new"
    first, second, *_ = found = measured(turns, tmp_path / "turns.jsonl", flags)
    sys.modules.update(loaded)
    assert [(r["tree"], r["batch"]) for r in found[1:3]] == [("new", 4), ("old", 8)]
    assert (first["faster"], second["faster"]) == pytest.approx((0, -0.9))


def test_turns_times_an_update():
    tree = SimpleNamespace(common=common, step=step, model=common.random_model("tiny", "nvfp4"))
    update = turns.update_turn(tree, SimpleNamespace(new=6, quant="nvfp4"), batch=4)
    assert update() > 0 and tree.model.recomputed_layers == 2


@pytest.mark.parametrize("quant, phase", [("bf16", "join"), ("nvfp4", "quantise")])
def test_loading_shares_out_the_seconds(tmp_path, tiny_chat, monkeypatch, quant, phase):
    """Of a folder that it writes. Its phases are all of model.load, and the weights have a sum."""
    for functions in loading.PHASES.values():
        for owner, name in functions:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    place = ["--write", f"{tmp_path}/m", "--tokenizer", str(tiny_chat), "--model-shape", "tiny"]
    loading.main(place)
    twice = ["--model", f"{tmp_path}/m", "--quant", quant, quant, "--out", f"{tmp_path}/log"]
    loading.main(twice)
    first, second = report.jsonl(tmp_path / "log")
    within = set(loading.PHASES) | {"rest"}
    parts = [seconds for name, seconds in first.items() if name in within]
    assert sum(parts) == pytest.approx(first["load_s"]) and min(parts) >= 0 < first[phase]
    assert first["sum"] == second["sum"] != 0


def test_a_step_of_unsloth_has_our_rates(monkeypatch):
    """Of 6 answers of 7 tokens to prompts of 5, with stand-ins for what needs a GPU."""
    for name in ("unsloth", "trl", "datasets"):
        monkeypatch.setitem(sys.modules, name, Mock())
    log, trainer = [], Mock(_generate=lambda: time.sleep(0.01))
    meter = importlib.import_module("bench.unsloth").Meter(log, Mock(prompt_length=5))
    meter.watch(trainer)
    meter.on_step_begin(*[None] * 3)
    trainer._generate()
    assert len(meter.reward([""] * 6, [[8] * 7] * 6)) == 6
    meter.on_step_end(None, Mock(global_step=1), None)
    (r,) = log
    assert r["rollout_s"] * r["rollout_tok_s"] == pytest.approx(42)
    assert r["update_s"] * r["update_tok_s"] == pytest.approx(72)
    assert r["rollout_s"] + r["update_s"] == pytest.approx(r["step_s"])


# --- vLLM, in children


@pytest.mark.parametrize("python, timeout, why", [
    ("bash -c 'sleep 60'", 0.2, "still running after 0.2 s"),
    ("bash -c 'echo ValueError: no; echo at exit; exit 3'", 60, "exit code 3: ValueError: no"),
    (shlex.quote(sys.executable), 60, "exit code 1: KeyError: 'no shape'")])  # fmt: skip
def test_why_a_part_failed(tmp_path, python, timeout, why):
    """What earlier parts printed does not count. The last is a real child."""
    with open(tmp_path / "out.log", "ab") as log:
        log.write(b"OldError: long gone\n")
        info = dict(shape="no shape", memory_gb=0)
        job = dict(part="ours/bf16", folder=".", info=info, out=f"{tmp_path}/out", skip=log.tell())
        log.flush()
        assert vllm.run(python, job, log, timeout) == why


def test_nothing_that_a_part_started_outlives_us(tmp_path):
    """vLLM's second process holds the card's memory: it ends with a SIGTERM to us."""
    command = "bash -c 'sleep 60 & echo $!; sleep 1; kill $PPID; wait'"
    with open(tmp_path / "out.log", "ab") as log, pytest.raises(SystemExit):
        vllm.run(command, {"out": f"{tmp_path}/out", "skip": 0}, log, 60)
    pid = (tmp_path / "out.log").read_text().strip()
    wait = f"while [[ $(ps -o stat= -p {pid}) = [^Z]* ]]; do sleep 0.1; done"
    subprocess.run(["bash", "-c", wait], timeout=30)


def test_the_table_compares_a_card_with_itself_and_takes_vllms_best():
    """Ours is the mean of before and after; of two cards the less favourable ratio counts."""
    rates = {(1, "ours/bf16"): {8: [300, 200]}, (2, "ours/bf16"): {8: [999]}}
    for card, mode, rate in (1, "bf16/none/1", 125), (1, "bf16/none/2", 9), (2, "bf16/none/1", 1):
        rates[card, f"vllm/{mode}"] = {8: [rate]}
    assert tables.over_vllm(rates, "bf16") == {8: 2}
