"""python -m pytest tests/test_bench.py -q"""
import argparse
import json
import shutil
import subprocess
from pathlib import Path

import bench
import pytest
import torch
from command import ROOT, Command
from test_launch import ranks

import lora
import memory
import rollout


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setitem(memory.MODELS, "tiny", (64, 2, 4, 2, 96, 97, False))


def records(tmp_path, capsys, *arguments):
    """Run bench.py; its last line is one JSON value, its log has one record a row."""
    log = tmp_path / "log.jsonl"
    bench.main([*arguments, "--model-shape", "tiny", "--out", str(log)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(r["torch"] == last["torch"] and r["commit"] == last["commit"] for r in found)
    return found, last


def test_rollout_times_every_kind_and_batch(tiny_shape, tmp_path, capsys, monkeypatch):
    """All four kinds. With memory for two sequences, a batch of three takes two waves. Hugging Face's time is
    a difference of two measurements, so a clock that counts calls of lm_head replaces the real one."""
    monkeypatch.setattr(rollout.Sampler, "_room", lambda *args: 2)
    build, calls = bench.hf_model, []
    monkeypatch.setattr(bench, "clock", lambda: len(calls) / 8)

    def counted(*args):
        model = build(*args)
        model.lm_head.register_forward_hook(lambda *_: calls.append(1))
        return model
    monkeypatch.setattr(bench, "hf_model", counted)
    found, last = records(tmp_path, capsys, "rollout", "--quant", "nvfp4,bf16,hf,hf-lora", "--batch", "1,3",
                          "--context", "20", "--new", "6")
    asked = [(q, b) for q in ("nvfp4", "bf16", "hf", "hf-lora") for b in (1, 3)]
    assert [(r["weights"], r["batch"]) for r in found] == asked
    for r in found:
        waves = 2 if r["batch"] == 3 and r["weights"] in ("nvfp4", "bf16") else 1
        assert r["tok_s"] * r["ms_step"] / 1e3 == pytest.approx(r["batch"] / waves)
        assert r["slots"] == min(r["batch"], 3 if waves == 1 else 2) and r["of_bound"] > 0
        assert last["tok_s"][f"tiny {r['weights']} B={r['batch']}"] == round(r["tok_s"])
        assert r["weights"][:2] != "hf" or r["ms_step"] == 125


@pytest.mark.parametrize("samples, groups", [(1, 4), (2, 2), (16, 1)])
def test_so_many_rows_have_a_prompt_in_common(tiny_shape, tmp_path, capsys, monkeypatch, samples, groups):
    """Ours and Hugging Face's alike: of other prompts L2 has nothing."""
    seen, asked = [], ["rollout", "--batch", "4", "--context", "20", "--new", "6", "--samples", str(samples)]
    monkeypatch.setattr(bench, "random_model", lambda *args: None)
    for name in ("our_decode", "hf_decode"):
        monkeypatch.setattr(bench, name, lambda model, *found: seen.append(found) or (24, 1., 6, 4))
    found, _ = records(tmp_path, capsys, *asked, "--quant", "nvfp4,hf")
    assert [r["samples"] for r in found] == [min(samples, 4)] * 2
    for prompts, group, new in seen:
        assert (len(prompts), group, new) == (groups, 4 // groups, 6) and {len(p) for p in prompts} == {17}
        assert len(set(map(tuple, prompts))) == groups


@pytest.mark.parametrize("samples, batch, bad", [("0", "8", 8), ("3", "1,8", 8), ("16", "8,0", 0)])
def test_a_batch_of_broken_groups_is_refused(samples, batch, bad):
    with pytest.raises(SystemExit, match=f"^--batch {bad} must be a multiple of --samples {samples}, or"):
        bench.main(["rollout", "--batch", batch, "--samples", samples])


def test_a_context_without_room_for_a_prompt_is_refused():
    with pytest.raises(SystemExit, match="^--context 4 must be more than half of --new 8"):
        bench.main(["rollout", "--context", "4", "--new", "8"])


def test_a_record_is_in_the_log_when_the_next_one_fails(tiny_shape, tmp_path, capsys, monkeypatch):
    """And a log that cannot be written is told before anything is measured."""
    decode, log = bench.our_decode, tmp_path / "log.jsonl"
    monkeypatch.setattr(bench, "our_decode", lambda model, prompts, group, new: (
        decode(model, prompts, group, new) if group < 3 else 1 / 0))
    command = "rollout --model-shape tiny --quant bf16 --context 20 --new 6 --batch 1,2,3 --out".split()
    with pytest.raises(ZeroDivisionError):
        bench.main([*command, str(log)])
    assert [json.loads(line)["batch"] for line in log.read_text().splitlines()] == [1, 2]
    monkeypatch.setattr(bench, "random_model", None)
    with pytest.raises(SystemExit, match="--out .*nowhere/log: No such file"):
        bench.main([*command, str(tmp_path / "nowhere" / "log")])


def test_the_commit_is_that_of_the_file_and_needs_no_git(tmp_path, monkeypatch):
    """Wherever it is called from; COMMIT tells it on a machine without the repository."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.delenv("COMMIT", raising=False)
    ours = bench.conditions()["commit"]
    git = subprocess.run(["git", "-C", Path(bench.__file__).parent, "describe", "--always", "--dirty"],
                         capture_output=True, text=True)
    assert ours == git.stdout.strip() or ours == "none" and git.returncode
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    assert bench.conditions()["commit"] == ours
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setenv("PATH", "")
    assert bench.conditions()["commit"] == "abc"
    monkeypatch.delenv("COMMIT")
    assert bench.conditions()["commit"] == "none"


def test_hugging_faces_model_has_an_adapter_at_each_projection_if_asked(tiny_shape):
    c = memory.config("tiny")
    for adapted, count in ((False, 0), (True, 7 * c.num_hidden_layers)):
        found = [m for m in bench.hf_model(c, adapted).modules() if isinstance(m, lora.LoRALinear)]
        assert len(found) == count and all(p.dtype == torch.bfloat16 for m in found for p in m.parameters())


def test_whole_rollouts_have_the_lengths_they_should(tiny_shape, tmp_path, capsys, monkeypatch):
    """Mean and longest as drawn; refill happens, since there are fewer slots than rows."""
    whole = bench.whole_rollout
    small = dict(prompts=8, samples=16, mean=12, limit=40)
    monkeypatch.setattr(bench, "whole_rollout", lambda m, slots: whole(m, slots, **small))
    [r], _ = records(tmp_path, capsys, "rollout", "--quant", "bf16", "--batch", "20", "--whole")
    # 128 geometric lengths, standard deviation 12 / √128: within four of it; 97 tokens make the stops coarse
    assert abs(r["mean_length"] - 12) < 4.5 + 1 and r["longest"] == 40 and r["slots"] == 20


def test_step_times_rollout_and_update(tiny_shape, tmp_path, capsys):
    """Two steps of each kind of weights, whole and update alone."""
    found, _ = records(tmp_path, capsys, "step", "--prompts", "2", "--samples", "3", "--prompt-length", "5",
                       "--new", "7", "--steps", "2")
    assert [(r["weights"], r["step"]) for r in found] == [(q, n) for q in ("nvfp4", "bf16") for n in (0, 1)]
    for r in found:
        assert r["rollout_s"] * r["rollout_tok_s"] == pytest.approx(42) and r["slots"] == 6
        assert r["update_s"] * r["update_tok_s"] == pytest.approx(72) and r["peak_gb"] > 0 < r["planned_gb"]
    [only], _ = records(tmp_path / "..", capsys, "step", "--update-only", "--quant", "bf16", "--prompts", "1",
                        "--samples", "4", "--prompt-length", "5", "--new", "7", "--steps", "1")
    assert only["update_only"] and only["slots"] == 0


def test_step_on_two_ranks_counts_the_tokens_of_both(tmp_path):
    """One log, by the first of them."""
    code = ("import bench, memory\nmemory.MODELS['tiny'] = (64, 2, 4, 2, 96, 97, False)\n"
            "sys.exit(bench.main(sys.argv[1:]) and 0)")
    flags = ("step --model-shape tiny --quant nvfp4 --prompts 2 --samples 3 --prompt-length 5 --new 7 "
             "--out").split()
    both = [Command(tmp_path, *flags, tmp_path / "log", code=code, env=env) for env in ranks()]
    assert [one.code for one in both] == [0, 0], both[0].said
    found = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(r["step"], r["ranks"]) for r in found] == [(0, 2), (1, 2)]
    for r in found:
        assert r["rollout_s"] * r["rollout_tok_s"] == pytest.approx(2 * 42)


def test_the_bound_is_the_notes_table():
    """Ideal tokens a second at context 1024 on an H200: rows of rollout-engine 1.3, to their two digits."""
    for shape, rates in (("7b", {8: 6400, 32: 20200, 64: 28700}), ("32b", {8: 1600, 64: 6700})):
        for batch, rate in rates.items():
            bound = bench.rollout_bound(memory.config(shape), "nvfp4", batch, 1024)
            assert bound == pytest.approx(rate, rel=0.03)


def test_a_cap_of_memory_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    with pytest.raises(SystemExit, match="--memory-gb 5 caps a GPU's allocator"):
        bench.main(["step", "--memory-gb", "5"])


def test_gemm_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench.main(["gemm"])


@pytest.mark.parametrize("shapes, rows", [("7B gateup", []), ("7B o,7B gateup", []), ("7B o", [3])])
def test_a_product_that_is_not_in_the_table_is_named(shapes, rows):
    with pytest.raises(SystemExit, match=f"--shapes '{shapes}'.*not in the table of 7B gate_up, "):
        bench.gemm(argparse.Namespace(shapes=shapes, rows=rows, check=True), [])


@pytest.mark.parametrize("command, asked, known", [("step", "hf", "bf16, nvfp4"),
                                                   ("rollout", "nvfp4,rtn", "bf16, hf, hf-lora, nvfp4"),
                                                   ("rollout --whole", "hf", "bf16, nvfp4")])
def test_weights_that_cannot_be_timed_are_named(command, asked, known):
    with pytest.raises(SystemExit, match=f"^--quant {asked}: of {known}, separated by commas"):
        bench.main([*command.split(), "--quant", asked])


def test_a_batch_that_is_no_number_is_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(["rollout", "--batch", "8,many"])
    assert "argument --batch: invalid numbers value: '8,many'" in capsys.readouterr().err


def test_turns_tells_the_slower_of_two_checkouts(tmp_path):
    """results/turns.py runs each checkout's own files; bench.py lies beside the modules or in results/. Both
    checkouts get a clock that counts its readings, the second one in steps of ten seconds."""
    for name, step in (("old", 1), ("new", 10)):
        results = tmp_path / name / ("results" if name == "new" else "")
        results.mkdir(parents=True)
        for path in ROOT.glob("*.py"):
            shutil.copy(path, tmp_path / name)
        shutil.copy(bench.__file__, results)
        with open(tmp_path / name / "memory.py", "a") as file:
            file.write("MODELS['tiny'] = (64, 2, 4, 2, 96, 97, False)\n")
        with open(tmp_path / name / "rollout.py", "a") as file:
            file.write(f"import itertools, types\n"
                       f"time = types.SimpleNamespace(perf_counter=itertools.count(0, {step}).__next__)\n")
    code = (f"import os\nos.chdir({str(tmp_path)!r})\nsys.path.insert(0, '{ROOT}/results')\n"
            f"runpy.run_path('{ROOT}/results/turns.py', run_name='__main__')\nsys.exit()")
    small = "--model-shape tiny --batch 1,4 --context 12 --new 4 --rounds 3".split()
    done = Command(tmp_path, "log.jsonl", "old", "new", *small, code=code)
    assert done.code == 0, done.said
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(r["tree"], r["batch"]) for r in found] == [("old", 1), ("new", 1), ("old", 4), ("new", 4)]
    for old, new in (found[:2], found[2:]):
        assert old["faster"] == 0 and new["faster"] == pytest.approx(-.9)
        assert new["ms"] == pytest.approx(10 * old["ms"])
    done = Command(tmp_path, "log.jsonl", "nowhere", code=code)
    assert done.code == 1 and done.said == "nowhere has no bench.py: give the folder of a checkout\n"
