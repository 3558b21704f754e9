"""python -m pytest tests/test_runs.py"""
import dataclasses
import errno
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import FLAGS, ROOT, TIMINGS, Command, lines, main, outcome
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_tasks import OWN

import launch
import lora
import model as decoder
import runs
import train

GOOD = dict(signal=.5, finished=.9, reward=.4, mismatch=1.01)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(whole, start, tmp_path):
    """Compares adapter bytes and metrics. The run has unequal rewards, noise, gradients and all its files."""
    assert start() == 0 and outcome(tmp_path / "run") == outcome(whole)
    records = runs.read(whole)
    assert list(records) == [("eval", 0), *(("step", s) for s in range(3)), ("eval", 3),
                             *(("step", s) for s in range(3, 6)), ("eval", 6)]
    steps = [r for r in records.values() if r["kind"] == "step"]
    assert sum(r["grad_norm"] is not None for r in steps) >= 4 and sum(r["sigma"] > 0 for r in steps) == 4
    assert [r["mismatch"] is not None for r in steps] == [True] + [False] * 5        # every ten
    assert len({r["lr"] for r in steps}) == 6
    assert sorted(p.name for p in whole.iterdir()) == [
        "adapter", "adapter-best", "checkpoint.previous.safetensors", "checkpoint.safetensors", "config.json",
        "curves.png", "metrics.jsonl", "samples.jsonl"]
    assert start("--out", tmp_path / "other", "--seed", 1) == 0
    assert outcome(tmp_path / "other")[0] != outcome(whole)[0]


@pytest.mark.parametrize("number, where, code, done", [
    (signal.SIGINT, "collect", 130, 3), (signal.SIGTERM, "collect", 143, 3),
    (signal.SIGINT, "update", 130, 4), (signal.SIGTERM, "update", 143, 4),
    (signal.SIGHUP, "collect", 129, 3), (signal.SIGHUP, "update", 129, 4),
    (signal.SIGINT, "evaluate", 130, 3)])
def test_a_stopped_run_saves_its_last_whole_step_and_resumes_to_the_same_end(
        whole, start, tmp_path, monkeypatch, capsys, number, where, code, done):
    """A signal in the fourth step: the step is dropped while it samples, and finished in its update.

    Then half a record is appended, as by a power cut: it is passed over, and the next one has its own line.
    """
    real, count = getattr(train, where), []

    def interrupted(*args):
        count.append(1)
        if len(count) == (2 if where == "evaluate" else 4):
            os.kill(os.getpid(), number)
        return real(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train, where, interrupted)
        assert start() == code
    folder = tmp_path / "run"
    said = f"stopped after {done} steps; go on with: python train.py --resume {folder}\n"
    assert said in capsys.readouterr().err
    assert sum(r["kind"] == "step" for r in lines(folder)) == done
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind": "step", "step": 5, "rew')
    assert sum(kind == "step" for kind, _ in runs.read(folder)) == done
    assert main("--resume", folder) == 0 and outcome(folder) == outcome(whole)
    after = (folder / "metrics.jsonl").read_bytes().split(b'"step": 5, "rew\n')[1]
    assert all(json.loads(text)["segment"] == 1 for text in after.splitlines())
    assert len(after.splitlines()) == 6 - done + 1 + (done == 3)      # steps, evaluation at 6, and at 3


def test_under_nohup_a_closed_terminal_stops_nothing(whole, start, tmp_path, monkeypatch):
    """A signal that is ignored when the run starts stays ignored, also during an update."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name, real in (("collect", train.collect), ("update", train.update)):
        def hung_up(*args, real=real):
            os.kill(os.getpid(), signal.SIGHUP)
            return real(*args)
        monkeypatch.setattr(train, name, hung_up)
    assert start() == 0 and outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.parametrize("where, done", [("collect", 3), ("update", 3)])
def test_a_run_that_a_library_ends_is_saved(whole, start, tmp_path, monkeypatch, where, done):
    """PyTorch raises RuntimeError when another rank ends or the CPU's memory is full."""
    real, count = getattr(train, where), []

    def broken(*args):
        count.append(1)
        if len(count) == 4:
            raise RuntimeError("connection closed by peer")
        return real(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train, where, broken)
        with pytest.raises(RuntimeError, match="closed by peer"):
            start("--save-every", 100)
    assert sum(r["kind"] == "step" for r in lines(tmp_path / "run")) == done
    assert main("--resume", tmp_path / "run", "--save-every", 2) == 0
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.parametrize("eval_every", [1, 100])
def test_a_run_whose_output_nobody_reads_any_more_is_saved(tiny_chat, tmp_path, eval_every):
    """`python train.py … | tee log`: Ctrl-C ends tee, too, so the next line cannot be printed, be it of a
    sample, an evaluation or a step. Resumed, the run ends like one without an accident."""
    folder, pipe = tmp_path / "run", tmp_path / "pipe"
    flags = [*FLAGS, "--model", tiny_chat, "--save-every", 100, "--eval-every", eval_every]
    os.mkfifo(pipe)
    run = Command(tmp_path, *flags, "--out", folder, out=pipe)
    with open(pipe) as reader:
        assert any("step    1 " in line for line in reader), run.said
    assert run.code == 130 and "Traceback" not in run.said
    done = re.search(rf"stopped after ([0-9]) steps \(Broken pipe\); go on .* --resume {folder}\n", run.said)
    assert done and 2 <= int(done[1]) < 6 and (folder / "checkpoint.safetensors").is_file()
    assert main("--resume", folder) == 0 == main(*flags, "--out", tmp_path / "whole")
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_a_second_interrupt_does_not_cost_what_the_first_one_saves(whole, start, tmp_path, monkeypatch):
    """Ctrl-C in the fourth step, and again while the checkpoint is written."""
    collect, digest, count = train.collect, runs._digest, []

    def interrupted(*args):
        count.append(1)
        if len(count) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return collect(*args)

    def again(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return digest(*args)
    with monkeypatch.context() as patch:
        patch.setattr(train, "collect", interrupted)
        patch.setattr(runs, "_digest", again)
        assert start("--save-every", 100) == 130
    folder = tmp_path / "run"
    assert (folder / "checkpoint.safetensors").is_file()
    assert main("--resume", folder, "--save-every", 2) == 0 and outcome(folder) == outcome(whole)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_run_whose_output_cannot_be_written_is_saved(whole, tiny_chat, tmp_path, number):
    """The terminal was closed, or the disk behind `> log` is full, while the run's own folder is writable."""
    code = (f"class Full:\n    fileno, flush = sys.stdout.fileno, lambda self: None\n"
            f"    reconfigure = lambda self, **_: None\n    def write(self, text):\n"
            f"        if 'step    2 ' in text:\n            raise OSError({number}, os.strerror({number}))\n"
            f"sys.stdout = Full()")
    folder = tmp_path / "run"
    run = Command(tmp_path, *FLAGS, "--model", tiny_chat, "--out", folder, "--save-every", 100, code=code)
    assert run.code == 130 and "Traceback" not in run.said
    assert f"stopped after 3 steps ({os.strerror(number)}); go on with: python train.py --res" in run.said
    assert main("--resume", folder, "--save-every", 2) == 0 and outcome(folder) == outcome(whole)


@pytest.mark.parametrize("crash", range(1, 15))
def test_a_crash_between_any_two_files_loses_nothing(whole, start, tmp_path, monkeypatch, crash):
    """The run dies at its n-th rename: of config.json, of three files in the first save, of two that keep the
    best adapter, of four in each later save, which keeps the previous checkpoint. Resumed, it ends like one
    without an accident; steps that were replayed are in the log twice, and the last record counts."""
    real, count = os.replace, []

    def dies(source, target):
        count.append(target)
        if len(count) == crash:
            raise RuntimeError("power cut")
        real(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(RuntimeError, match="power cut"):
            start()
    folder = tmp_path / "run"
    if crash == 1:
        assert start() == 0                          # no record yet: the name is free
    else:
        assert main("--resume", folder) == 0
        records = lines(folder)
        assert {r["segment"] for r in records} == {0, 1} and runs.read(folder)["eval", 6]["segment"] == 1
    assert outcome(folder) == outcome(whole)


def test_a_write_that_fails_midway_leaves_the_old_file(tiny_chat, tmp_path, monkeypatch):
    """The disk is full after half of the .tmp file: the file itself keeps its old bytes."""
    model = decoder.load(str(tiny_chat), "nvfp4", 4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    run = runs.Run(train.Config(out=str(tmp_path / "run")))
    run.save(model, optimizer)

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left on device")
    for p in model.parameters():
        p.data += 1
    for module, name in ((runs, "checkpoint.safetensors"), (lora, "adapter/adapter_model.safetensors")):
        before = (run.folder / name).read_bytes()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(module, "save_file", full)
            run.save(model, optimizer)
        assert (run.folder / f"{name}.tmp").read_bytes() == b"half a file"
        assert (run.folder / name).read_bytes() == before
        assert all(load_file(p) for p in run.folder.rglob("*.safetensors"))
    assert run.load(model, optimizer) == 0 and model.layers[0].mlp.down_proj.lora_B.abs().max() == 0


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of a finished run's folder, for damaging it; its checkpoints are of steps 6 and 4."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how < 1:
        path.write_bytes(data[:int(how * len(data))])                 # cut off
        return
    data[int(how) // 8 % len(data)] ^= 1 << int(how) % 8              # a bit the other way round
    path.write_bytes(data)


@pytest.mark.parametrize("how", [0, .001, .5, .999, 3, 100, 800, 10**6 + 1])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_that_is_said(whole, copy, capfd, how):
    """The run continues from step 4 to the same end; its next save keeps the good checkpoint."""
    damage(copy / "checkpoint.safetensors", how)
    before = (copy / "checkpoint.previous.safetensors").read_bytes()
    assert main("--resume", copy) == 0 and outcome(copy) == outcome(whole)
    warning, = (text for text in capfd.readouterr().err.splitlines() if "damaged" in text)
    assert "checkpoint.safetensors is damaged (" in warning and "going back to the one before it" in warning
    assert runs._read(copy / "checkpoint.safetensors")[1] == 6
    assert (copy / "checkpoint.previous.safetensors").read_bytes() == before
    assert sum(r["segment"] == 1 and r["kind"] == "step" for r in lines(copy)) == 2


def test_any_bit_that_turns_is_noticed(whole, tmp_path):
    """Flips 300 single bits, half of them in the file's length and header, and cuts the file at 50 places."""
    path, rng, good = tmp_path / "checkpoint", random.Random(0), whole / "checkpoint.safetensors"
    size = good.stat().st_size
    assert runs._read(good)[1] == 6
    bits = (*range(8, 1200, 8), *(rng.randrange(1, 8 * size) for _ in range(150)))
    for how in (*bits, *(i / 50 for i in range(50))):
        shutil.copy(good, path)
        damage(path, how)
        with pytest.raises((SafetensorError, LookupError, TypeError, ValueError)):
            runs._read(path)


def test_a_run_without_a_whole_checkpoint_is_not_begun_from_nothing(copy):
    """Both checkpoints damaged: a sentence names the adapter. The last one missing: the previous is read."""
    (copy / "checkpoint.safetensors").unlink()
    assert main("--resume", copy) == 0 and runs._read(copy / "checkpoint.safetensors")[1] == 6
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        damage(copy / name, .5)
    with pytest.raises(ValueError, match="every checkpoint in .*run is damaged: .*--adapter .*run/adapter"):
        main("--resume", copy)


@pytest.mark.parametrize("room", [20_000, 100])
def test_a_full_disk_is_one_sentence_and_keeps_the_checkpoint(whole, start, tmp_path, monkeypatch, room):
    """The kernel limits the size of files: the adapter does not fit, or only a part of a log's line fits, and
    closing must not write it again. Resumed without the limit, the run ends like one without an accident."""
    folder, real, count = tmp_path / "run", train.collect, []

    def stopped(*args):
        count.append(1)
        return real(*args) if len(count) < 4 else sys.exit(143)
    with monkeypatch.context() as patch:
        patch.setattr(train, "collect", stopped)
        assert start() == 143
    before = (folder / "checkpoint.safetensors").read_bytes()
    limit = room + (folder / "metrics.jsonl").stat().st_size
    ended = Command(tmp_path, "--resume", folder, code="import resource; resource.setrlimit("
                    f"resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    assert ended.code == 2 and ended.said.count("\n") == 1, ended.said
    assert re.fullmatch(r"train.py: .*/run: .*File too large.*; the last checkpoint holds: go on with: "
                        r"python train.py --resume .*run\n", ended.said)
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    assert main("--resume", folder) == 0 and outcome(folder) == outcome(whole)


def test_a_full_disk_at_ctrl_c_is_one_sentence_too(start, whole, tmp_path, monkeypatch):
    """safetensors has an error of its own. The step after the last save is made again by the resume."""
    def stopped(*_):
        monkeypatch.setattr(runs, "save_file", full)
        raise KeyboardInterrupt

    def full(*_, **__):
        raise SafetensorError("No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *args, real=train.evaluate: real(*args) if not any(
            (tmp_path / "run").glob("*.safetensors")) else stopped())
        with pytest.raises(OSError, match="run: No space left on device; the last checkpoint holds: go on"):
            start()
    monkeypatch.undo()
    assert main("--resume", tmp_path / "run") == 0 and outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "config.json",
                                  "adapter-best/adapter_config.json"])
def test_any_file_that_cannot_be_written_is_named(start, tmp_path, monkeypatch, name):
    """A folder of the file's name prevents writing; root could write to a file of any mode."""
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(OSError, match=rf"^.*Is a directory: .*run/{name}'") as error:
        start()
    said = str(error.value)
    assert ("the last checkpoint holds" in said) == ("best" in name) and "\n" not in said


@pytest.mark.parametrize("error", [OSError("disk full"), ImportError("no matplotlib"), RuntimeError("font")])
def test_drawing_never_fails_a_finished_run(start, whole, tmp_path, monkeypatch, capsys, error):
    """One line of warning with the command that draws; the last line does not name a picture."""
    def fails(_):
        raise error
    monkeypatch.setattr(runs, "plot", fails)
    assert start() == 0 and outcome(tmp_path / "run") == outcome(whole)
    said, folder = capsys.readouterr(), tmp_path / "run"
    assert said.err == f"warning: no curves, for {error!r}; try runs.py plot {folder}\n"
    assert said.out.splitlines()[-1].startswith(f"done: {folder}, adapter in {folder}/adapter, the best (")


def test_a_record_that_fits_in_part_is_passed_over_and_the_next_has_its_own_line(
        start, whole, tmp_path, monkeypatch):
    """The disk is full in the middle of a record; resumed, the run ends like one without an accident."""
    real = runs.append

    def full(path, record):
        if record["step"] == 2:
            with open(path, "ab") as file:
                file.write(b'{"kind": "step", "step": 2, "rew')
            raise OSError(28, "No space left on device")
        real(path, record)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "append", full)
        with pytest.raises(OSError, match="run: .*No space left on device; the last checkpoint"):
            start()
    assert main("--resume", tmp_path / "run") == 0 and outcome(tmp_path / "run") == outcome(whole)


def poison(monkeypatch, steps, what="gradient"):
    """Make one number of the gradient NaN, or the loss infinite, in these of the steps with a gradient."""
    real, count = train.backward, []

    def backward(config, model, *rest, **more):
        stats = real(config, model, *rest, **more)
        count.extend([1] * bool(stats["rows"]))
        if stats["rows"] and len(count) in steps:
            if what == "loss":
                return stats | {"loss": float("inf")}
            next(model.parameters()).grad[0, 0] = float("nan")
        return stats
    monkeypatch.setattr(train, "backward", backward)


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(start, tmp_path, monkeypatch, capsys, what):
    """The first gradient is NaN: it reaches neither adapter nor AdamW, and later steps learn."""
    poison(monkeypatch, {1}, what)
    assert start("--save-every", 1) == 0
    steps = [r for (kind, _), r in runs.read(tmp_path / "run").items() if kind == "step"]
    skipped = [r["step"] for r in steps if r.get("skipped")]
    assert len(skipped) == 1 and (steps[skipped[0]]["grad_norm"] is None) == (what == "gradient")
    said = capsys.readouterr()
    assert said.out.count("| skipped") == 1 and said.err.count("the step was skipped") == 1
    tensors, _ = runs._read(tmp_path / "run/checkpoint.safetensors")
    assert all(t.isfinite().all() for t in tensors.values())
    learnt = sum(r["grad_norm"] is not None and not r.get("skipped") for r in steps)
    assert {int(t) for name, t in tensors.items() if name.endswith("/step")} == {learnt} and learnt > 2


def test_five_skipped_steps_in_a_row_stop_the_run(start, tmp_path, monkeypatch):
    """Four in a row do not. The saved adapter is the one from before the skipped steps."""
    folder = tmp_path / "run"
    more = ("--steps", 12, "--seed", 1)
    with monkeypatch.context() as patch:
        poison(patch, {2, 3, 4, 5, 7, 8, 9})
        assert start(*more, "--out", tmp_path / "four") == 0
    poison(monkeypatch, range(3, 99))
    with pytest.raises(ValueError, match="five steps in a row were skipped: try a lower --lr$"):
        start(*more)
    records = [r for r in lines(folder) if r["kind"] == "step"]
    assert [bool(r.get("skipped")) for r in records[-6:]] == [False] + [True] * 5
    tensors, done = runs._read(folder / "checkpoint.safetensors")
    assert done == len(records) and all(t.isfinite().all() for t in tensors.values())


@pytest.mark.parametrize("where, done", [("backward", 3), ("collect", 3), ("step", 2)])
def test_out_of_memory_saves_the_last_whole_step_and_says_how_to_go_on(
        whole, start, tmp_path, monkeypatch, capsys, where, done):
    """In the fourth step; or within the optimizer's step, which must not be saved, so that a resume begins at
    step 2. Resumed, all end like a run without an accident."""
    real, count = getattr(train, where, torch.optim.AdamW.step), []

    def short(*args, **kwargs):
        count.append(1)
        if len(count) < (3 if where == "step" else 4):
            return real(*args, **kwargs)
        if where == "step":
            args[0].param_groups[0]["params"][0].data += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with monkeypatch.context() as patch:
        patch.setattr(*((torch.optim.AdamW, "step") if where == "step" else (train, where)), short)
        with pytest.raises(torch.OutOfMemoryError):             # launch.main names the flags
            start()
    folder = tmp_path / "run"
    said = f"stopped after 3 steps; go on with: python train.py --resume {folder}\n"
    assert capsys.readouterr().err.endswith(said)
    assert runs._read(folder / "checkpoint.safetensors")[1] == done
    assert main("--resume", folder) == 0 and outcome(folder) == outcome(whole)


def test_a_failing_reward_costs_no_finished_step(start, whole, tmp_path, monkeypatch):
    """A ValueError in the fourth step: three steps are saved. Ctrl-C in the first evaluation: nothing is."""
    real, count = train.collect, []

    def fails(*args):
        count.append(1)
        if len(count) == 4:
            raise ValueError("reward() failed")
        return real(*args)
    monkeypatch.setattr(train, "collect", fails)
    with pytest.raises(ValueError, match="reward"):
        start()
    assert runs._read(tmp_path / "run/checkpoint.safetensors")[1] == 3
    assert main("--resume", tmp_path / "run") == 0 and outcome(tmp_path / "run") == outcome(whole)
    monkeypatch.setattr(train, "evaluate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert start("--out", tmp_path / "other", "--seed", 1) == 130
    assert not (tmp_path / "other/adapter").exists()


def test_evaluating_does_not_speak_of_an_adapter_that_it_did_not_write(start, capsys):
    assert start("--steps", 0) == 0
    done, = (text for text in capsys.readouterr().out.splitlines() if text.startswith("done: "))
    assert done.endswith("curves.png")


def test_a_task_of_ones_own_trains_from_an_empty_folder(tiny_chat, tmp_path, monkeypatch):
    """README's ten lines make two steps with a gradient, in a folder named after the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    flags = "--task mine.py --steps 2 --prompts 8 --group-size 8 --max-new-tokens 6 --rank 4 --device cpu"
    assert main(*flags.split(), "--model", tiny_chat) == 0
    folder, = (tmp_path / "runs").glob("mine-*")
    steps = [r for (kind, _), r in runs.read(folder).items() if kind == "step"]
    assert len(steps) == 2 and all(r["grad_norm"] > 0 and 0 < r["reward"] < 1 for r in steps)
    assert (folder / "adapter/adapter_model.safetensors").exists()


def test_preflight_changes_nothing_and_says_whether_training_would_work(
        whole, tiny_chat, tmp_path, monkeypatch, capsys):
    """Rewards for short answers: exit code 0. Times tables, which a random model cannot do: 3, and advice.
    No folder is made, and one that holds a run stays as it is. A rollout that serves two steps counts half
    for each."""
    flags = (*FLAGS, "--model", tiny_chat, "--out", tmp_path / "run", "--preflight")
    assert main(*flags) == 0
    said = capsys.readouterr().out
    assert "32 prompts × 4 answers" in said and said.endswith("ready to train\n") and "folder" not in said
    for word in ("solve rate", "finished", "no signal", "mismatch     1.0000", "memory", "a step"):
        assert word in said
    assert main(*flags, "--overlong", "none") == 3
    said = capsys.readouterr().out
    assert "change: 32 prompts without one group of unequal rewards" in said and "pointless" in said
    assert not (tmp_path / "run").exists()
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        loaded = []
        patch.setattr(lora, "load_adapter", lambda _, folder: loaded.append(folder))
        assert main(*flags, "--out", whole, "--adapter", whole / "adapter-best") == 0
        assert loaded == [str(whole / "adapter-best")]
    assert before == {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    taken, judge = [], runs.Run.preflight
    monkeypatch.setattr(runs.Run, "preflight", lambda self, r: taken.append(r["rollout_s"]) or judge(self, r))
    monkeypatch.setattr(train.time, "perf_counter", itertools.count().__next__)
    assert [main(*flags, "--updates-per-rollout", n) for n in (1, 2)] == [0, 0]
    assert taken[0] > 0 and taken[1] == taken[0] / 2


@pytest.mark.parametrize("change, code, words", [
    ({}, 0, "ready"), (dict(signal=0), 3, "unequal rewards"), (dict(finished=0), 0, "no answer ended"),
    (dict(mismatch=1.1), 0, "disagree"), (dict(mismatch=1.6), 3, "disagree"),
    (dict(mismatch=float("nan")), 3, "nan"),
    (dict(signal=.2), 0, "no signal     80.0%   groups of equal rewards; --resample"),
    (dict(finished=.4), 0, "finished      40.0%   answers that ended; --max-new-tokens"),
    (dict(signal=0, reward=1.0), 3, "harder")])
def test_preflight_judges_as_the_training_does(tmp_path, capsys, change, code, words):
    record = GOOD | dict(solved=.4, length=9., memory_gb=1., rollout_s=6., update_s=4.)
    run = runs.Run(train.Config(out=str(tmp_path / "x"), steps=30, preflight=True))
    assert run.preflight(record | change) == code and not run.folder.exists()
    said = capsys.readouterr().out
    assert words in said and "10.0   seconds, 4.0 of them the update; 30 steps 5 minutes" in said
    good = not change or change in (dict(signal=.2), dict(finished=.4))
    assert ("change: " in said) == (not good)
    masked = runs.Run(train.Config(out=str(tmp_path / "y"), overlong="mask"))
    assert masked.preflight(record | change) == max(code, 3 * (change.get("finished") == 0))


def test_a_stop_while_the_checkpoint_is_read_does_not_overwrite_it(whole, start, tmp_path, monkeypatch):
    """Ctrl-C in the middle of load(): a half-loaded model must not be saved."""
    assert start() == 0
    path = tmp_path / "run/checkpoint.safetensors"
    before = path.read_bytes()

    def stopped(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(runs, "safe_open", stopped)
        assert main("--resume", tmp_path / "run") == 130
    assert path.read_bytes() == before


def test_kills_at_random_moments_change_nothing(whole, tiny_chat, tmp_path):
    """SIGKILL a real process three times, at random moments, then let it run to the end."""
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    rng, folder = random.Random(seed), tmp_path / "run"
    metrics, flags = folder / "metrics.jsonl", [*FLAGS, "--model", tiny_chat, "--out", folder]
    for _ in range(3):
        # in bytes, of which a step's record has about 450
        goal = rng.randrange(100, 1200) + (metrics.stat().st_size if metrics.exists() else 0)
        run = Command(tmp_path, *flags)
        while run.process.is_alive() and not (metrics.exists() and metrics.stat().st_size >= goal):
            time.sleep(.001)
        time.sleep(rng.uniform(0, .05))                               # about a step
        run.process.kill()
        assert run.code in (0, -signal.SIGKILL), run.said
        flags = ["--resume", folder]
    assert main(*flags) == 0 and outcome(folder) == outcome(whole)
    assert max(r["segment"] for r in runs.read(folder).values()) == 3


def test_a_folder_holds_one_run_and_one_writer(whole, start, tmp_path, capsys):
    """A second run in that folder is refused, and so is a second process; neither writes a byte."""
    before = (whole / "metrics.jsonl").read_bytes(), (whole / "config.json").read_bytes()
    again = train.Config(out=str(whole))
    with pytest.raises(ValueError, match="whole holds a run already: go on with --resume, or take another"):
        runs.Run(again)
    shutil.copytree(whole, tmp_path / "whole")
    (tmp_path / "whole/metrics.jsonl").unlink()           # a checkpoint is a run, too
    with pytest.raises(ValueError, match="holds a run already"):
        runs.Run(dataclasses.replace(again, out=str(tmp_path / "whole")))
    config = dataclasses.replace(again, resume=str(whole), rank=4)
    first = runs.Run(config)
    with pytest.raises(ValueError, match="another process is writing to .*whole"):
        runs.Run(config)
    del first
    (whole / "config.json").write_bytes(before[1])
    assert (whole / "metrics.jsonl").read_bytes() == before[0]


@pytest.mark.parametrize("flags, words", [
    (("--rank", "8"), "^--rank 8 beside .* has its own .4.; leave"),
    (("--steps", "4"), "^--steps 4: .*/run has made 6 steps; take at least as many, or evaluate with --st"),
    (("--operands", "x"), "^--operands x beside .* has its own"),
    (("--steps", "12", "--updates-per-rollout", "4"), "^--updates-per-rollout 4 beside .* has its own .1.;"),
    (("--model", "/nonexistent"), "^--model /nonexistent beside .* has its own")])
def test_a_resume_that_is_refused_spoils_nothing(whole, start, tmp_path, monkeypatch, flags, words):
    """Before the model loads. A wrong flag beside --resume gets one sentence; without that flag the run still
    continues."""
    assert start() == 0
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
        patch.setattr(launch, "load", None)
        main("--resume", tmp_path / "run", *flags)
    assert main("--resume", tmp_path / "run") == 0 and outcome(tmp_path / "run") == outcome(whole)


def test_a_checkpoint_of_another_rank_is_refused(whole, copy):
    """A config.json that was changed by hand. copy_ alone would spread a rank of 1 over all ranks."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | dict(rank=8)))
    with pytest.raises(ValueError, match="of .*: another --model or --rank?"):
        main("--resume", copy)


def test_a_resume_tells_where_its_schedules_go_on(copy, capsys):
    """Six steps of nine planned now."""
    assert main("--resume", copy, "--steps", 9) == 0
    assert "resumed at 67% of the schedules of lr and σ\n" in capsys.readouterr().out
    assert runs._read(copy / "checkpoint.safetensors")[1] == 9


def test_a_start_that_failed_leaves_its_name_free(whole, start, tmp_path):
    """After a mistyped --model, the same folder may be given again."""
    with pytest.raises(ValueError, match="nonexistent"):
        start("--model", "/nonexistent")
    assert start() == 0 and outcome(tmp_path / "run") == outcome(whole)


def test_an_adapter_is_evaluated_and_trained_on_from_also_after_a_crash(whole, start, tmp_path, monkeypatch):
    """--steps 0 --adapter repeats the evaluation of the run that made the adapter. A run from an adapter that
    dies before its first checkpoint resumes from that adapter."""
    assert start("--steps", 0, "--adapter", whole / "adapter", "--out", tmp_path / "eval") == 0
    keys = [k for k in runs.read(whole)["eval", 6] if k not in (*TIMINGS, "step")]
    (got,), last = runs.read(tmp_path / "eval").values(), runs.read(whole)["eval", 6]
    assert [got[k] for k in keys] == [last[k] for k in keys] and not (tmp_path / "eval/adapter").exists()
    more = ("--adapter", whole / "adapter", "--steps", 2)
    assert start(*more, "--out", tmp_path / "straight") == 0

    def crash(*_):
        raise RuntimeError("power cut")
    with monkeypatch.context() as patch:
        patch.setattr(train, "update", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            start(*more)
    assert main("--resume", tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "straight")
    assert outcome(tmp_path / "run")[1][1]["kl_noise"] is not None


@pytest.mark.parametrize("name, change, others", [
    ("flat", dict(signal=0), dict(signal=.125)), ("unfinished", dict(finished=0), dict(finished=.01)),
    ("mismatch", dict(mismatch=1.06), dict(mismatch=1.04))])
def test_a_diagnosis_needs_five_steps_or_a_mismatch_and_comes_once(
        name, change, others, tmp_path, monkeypatch, capsys):
    bad, near = GOOD | change, GOOD | others
    enough = 1 if name == "mismatch" else 5
    assert [n for n, _ in runs.diagnose([GOOD] * 5 + [bad] * enough)] == [name]
    for quiet in ([GOOD] + [bad] * (enough - 1), [bad] * 4 + [near], [near] * 9,
                  [GOOD | dict(mismatch=None)] * 9):
        assert list(runs.diagnose(quiet)) == []
    run = runs.Run(train.Config(out=str(tmp_path / "x")))
    monkeypatch.setattr(run, "log", lambda *_: None)
    for step in range(8):
        run.made(step, dict(bad), None)
    error = capsys.readouterr().err
    assert error.count("warning: ") == 1 and error.count("\n") == 1


def test_samples_hold_the_best_and_the_worst_answer(whole, tmp_path, capsys):
    """Two records of each step after an evaluation; show prints them and leaves out a half-written line."""
    samples = [json.loads(text) for text in (whole / "samples.jsonl").read_text().splitlines()]
    assert [(s["step"], s["which"]) for s in samples] == [
        (step, which) for step in (0, 3) for which in ("worst", "best")]
    run = runs.Run(train.Config(out=str(tmp_path)))
    texts = [(f"p{b}", f"a{b}\u2028b\x85") for b in range(4)]         # two line ends of Unicode's
    run.sample(7, texts, [.5, 1.0, -2.0, 0.0], [.1, .9, -1.5, -.2])
    with open(run.folder / "samples.jsonl", "ab") as file:
        file.write('{"step": 8, "which": "worst", "answer": "é'.encode()[:-1])
    run.sample(8, [("p", "a"), ("q", "b")], [1.0, 0.0], [1.0, -1.0])
    capsys.readouterr()
    print(runs.show([run.folder]))
    assert capsys.readouterr().out.splitlines() == [
        "step    7 worst | reward -2.00 | advantage -1.50 | 'p2' → 'a2\\u2028b\\x85'",
        "step    7 best  | reward +1.00 | advantage +0.90 | 'p1' → 'a1\\u2028b\\x85'",
        "step    8 worst | reward +0.00 | advantage -1.00 | 'q' → 'b'",
        "step    8 best  | reward +1.00 | advantage +1.00 | 'p' → 'a'"]


def test_the_last_record_of_a_step_holds_and_they_come_in_order(tmp_path):
    """An evaluation comes before the step of its number. Lines cut off or written by hand are left out."""
    whole_lines = [json.dumps(dict(kind=kind, step=step, segment=segment)) for kind, step, segment in (
        ("step", 0, 0), ("step", 1, 0), ("eval", 2, 0), ("step", 2, 0), ("step", 1, 1), ("eval", 2, 1))]
    by_hand = ['{"note": "lr was wrong here"}', "5", "[" * 99_999,
               *(f'{{"kind": {kind}, "step": {step}, "segment": 0}}'
                 for kind, step in (('"step"', '"x"'), ("[]", 1), ('"step"', "null"))),
               '{"kind": "step", "step": 1, "segment": "x"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"ki', *whole_lines, *by_hand, '{"kind": "st']))
    assert [(*key, r["segment"]) for key, r in runs.read(tmp_path).items()] == \
        [("step", 0, 0), ("step", 1, 1), ("eval", 2, 1), ("step", 2, 0)]
    with pytest.raises(ValueError, match="holds no metrics.jsonl"):
        runs.read(tmp_path / "nowhere")


def test_the_best_adapter_is_kept_over_a_resume_and_the_first_of_equals(tmp_path, monkeypatch):
    """Before a step there is no adapter of the run's. An evaluation is saved before its record, so that a
    crash in between costs nothing. A rank that writes nothing keeps none."""
    saved, config = [], train.Config(out=str(tmp_path / "run"))

    def save(model, folder, base):
        saved.append(len(lines(tmp_path / "run")))
        Path(folder).mkdir(exist_ok=True)
        (folder / "adapter_config.json").touch()
    monkeypatch.setattr(lora, "save_adapter", save)

    def evaluated(config, *scores, quiet=False):
        """The evaluations (step, accuracy) of a run → how many records precede each save, the best score."""
        saved.clear()
        run = runs.Run(config, quiet)
        run.model = None
        for step, score in scores:
            run.log("eval", step, dict(eval_greedy=score, eval_greedy_loose=1., eval_sampled=0., rollout_s=1))
        return list(saved), run.best
    assert evaluated(config, (0, .9), (4, .3), (8, .5), (12, .5), (20, .4)) == ([1, 2], .5)
    resumed = dataclasses.replace(config, resume=config.out, out="")
    assert evaluated(resumed) == ([], .5)
    assert evaluated(resumed, (8, .5), (12, .4), (24, .6), (28, .6)) == ([7], .6)
    evaluated(resumed, (24, .5), (28, .5))          # a GPU's replay is not bit for bit the same
    assert evaluated(resumed) == ([], .6)
    other = dataclasses.replace(config, out=str(tmp_path / "other"))
    assert evaluated(other, (4, -.5), quiet=True) == ([], -math.inf)
    assert evaluated(other, (4, -.5))[1] == -.5 and len(saved) == 1


def test_the_end_of_a_run_names_the_best_adapter_which_has_its_accuracy(start, tmp_path, capsys, monkeypatch):
    """A run whose last evaluation is made the worst: the last adapter is another one than the best."""
    folder, evaluate, made = tmp_path / "run", train.evaluate, itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *a: (r := evaluate(*a)) | dict(
            eval_greedy=r["eval_greedy"] - 9 * (next(made) == 3)))
        assert start("--lr", ".05", "--overlong", "none", "--task", task(tmp_path)) == 0
    done = capsys.readouterr().out.splitlines()[-1]
    first = runs.read(folder)["eval", 3]
    adapter, _, best = outcome(folder)
    assert adapter != best
    assert done == (f"done: {folder}/curves.png, adapter in {folder}/adapter, the best "
                    f"({first['eval_greedy']:.2f}) in {folder}/adapter-best")
    assert start("--steps", 0, "--adapter", folder / "adapter-best", "--out", tmp_path / "again", "--task",
                 task(tmp_path)) == 0
    (again,) = runs.read(tmp_path / "again").values()
    assert {k: first[k] for k in first if k not in (*TIMINGS, "step")} == {
        k: again[k] for k in again if k not in (*TIMINGS, "step")}


def task(folder):
    """→ the path of a task whose reward is any number: the more digits, the worse."""
    (folder / "digits.py").write_text(
        "problems = lambda: [{'prompt': f'{n} + {m}'} for n in range(10) for m in range(10)]\n"
        "reward = lambda problem, text, finished: -sum(c.isdigit() for c in text) - (not finished) / 7\n")
    return folder / "digits.py"


def test_a_reward_that_is_no_accuracy_is_called_mean_reward(start, tmp_path, capsys):
    """In the evaluation's line; a built-in task keeps its words. The picture's words fit both."""
    for more, words, other in (((), "right and ended", "mean reward"),
                               (("--task", task(tmp_path)), "mean reward", "right and ended")):
        assert start(*more, "--steps", 2, "--out", tmp_path / words) == 0
        evaluated = [text for text in capsys.readouterr().out.splitlines() if text.startswith("eval after")]
        assert len(evaluated) == 2 and all(f" {words}, " in t and other not in t for t in evaluated)
    assert runs.line(runs.read(tmp_path / "mean reward")["eval", 2], own=True) == evaluated[1]


def test_a_step_says_how_long_the_run_will_take(start, capsys, monkeypatch, tmp_path):
    """As long as the steps since the start or the resume took; a resume does not count those before it."""
    assert start() == 0
    said = capsys.readouterr().out.splitlines()
    ends = [re.search(r" GB( \| skipped)? \| \d+\.\d min, \d+\.\d min left$", text) for text in said]
    assert [bool(end) for end in ends] == [text.startswith("step ") for text in said]
    assert sum(map(bool, ends)) == 6 and said[-4].endswith(", 0.0 min left")
    monkeypatch.setattr(runs.time, "perf_counter", lambda: 1200.0)
    run = runs.Run(train.Config(steps=20, updates_per_rollout=2), quiet=True)
    run.quiet, run.segment, run.folder, run.first, run.began, run.done = False, 0, tmp_path, 4, 0, 8
    run.log("step", 6, json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1]))
    assert capsys.readouterr().out.endswith(" | 20.0 min, 60.0 min left\n")             # 4 steps took 20


def test_a_list_has_a_line_for_each_run(tmp_path, monkeypatch, capsys):
    """Also for one that has just begun, and for one without a config that can be read."""
    monkeypatch.chdir(tmp_path)
    evals = [dict(kind="eval", step=s, segment=0, eval_greedy=x, rollout_s=10) for s, x in (
        (0, .1), (8, .5), (16, .25))]
    steps = [dict(kind="step", step=s, segment=0, rollout_s=500, update_s=100) for s in range(0, 8, 2)]
    for name, flags, records in (
            ("a", json.dumps(dict(task="/home/mine.py", model="/home/qwen", steps=16, updates_per_rollout=2)),
             evals + steps + steps[-1:]),
            ("b", json.dumps(vars(train.Config())), []), ("c/d", "{", steps[:1])):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text(flags)
        log = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(log)
    assert listed(monkeypatch, capsys) == [
        "run task model steps first best last minutes".split(),
        "runs/a mine qwen 8/16 0.10 0.50 0.25 40.5".split(),
        "runs/b multiplication smollm2 0/16 – – – 0.0".split(), "runs/c/d – – 1/– – – – 10.0".split()]
    assert listed(monkeypatch, capsys, "runs/a")[1][0] == "runs/a"
    assert len(listed(monkeypatch, capsys, "runs/c")) == 2
    with pytest.raises(SystemExit, match="no run in runs/a/x: name the folder that holds your runs"):
        listed(monkeypatch, capsys, "runs/a/x")


def listed(monkeypatch, capsys, *folders):
    """python runs.py list FOLDERS → the words of its lines."""
    monkeypatch.setattr(sys, "argv", ["runs.py", "list", *folders])
    runpy.run_path(str(ROOT / "runs.py"), run_name="__main__")
    return [text.split() for text in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("command", ["show", "plot"])
def test_folders_without_a_run_are_passed_over_with_a_note(whole, tmp_path, monkeypatch, capsys, command):
    """As in `plot runs/*`. The only run's picture is in its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["runs.py", command, "empty", str(whole), "nowhere"])
    runpy.run_path(str(ROOT / "runs.py"), run_name="__main__")
    said = capsys.readouterr()
    assert sorted(said.err.splitlines()) == ["note: empty holds no run", "note: nowhere holds no run"]
    assert (" best " if command == "show" else f"{whole}/curves.png\n") in said.out


@pytest.mark.parametrize("argv, code, words", [
    (["show", "{run}"], None, "worst"), (["plot", "{run}"], None, "curves.png"),
    (["plot", "{run}", "{run}"], None, "curves.png"), (["show"], 1, "usage"), ([], 1, "usage"),
    (["plot", "/nowhere", "/elsewhere"], 1, "nowhere holds no metrics.jsonl"), (["draw"], 1, "usage"),
    (["plot", "/nowhere"], 1, "holds no metrics.jsonl"), (["show", "/nowhere"], 1, "holds no samples.jsonl")])
def test_runs_py_shows_and_plots(whole, tmp_path, monkeypatch, capsys, argv, code, words):
    """plot writes into the only run's folder, or for several into the current one; errors exit with 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["runs.py", *(a.format(run=whole) for a in argv)])
    (whole / "curves.png").unlink(missing_ok=True)
    if code:
        with pytest.raises(SystemExit, match=words):                  # sys.exit(sentence) is exit code 1
            runpy.run_path(str(ROOT / "runs.py"), run_name="__main__")
        return
    runpy.run_path(str(ROOT / "runs.py"), run_name="__main__")
    assert words in capsys.readouterr().out
    if argv[0] == "plot":
        png = (whole if len(argv) == 2 else tmp_path) / "curves.png"
        assert png.read_bytes().startswith(b"\x89PNG\r\n") and png.stat().st_size > 10_000
    else:
        assert not (whole / "curves.png").exists()


def test_a_reward_beyond_0_and_1_is_in_the_picture(tmp_path, monkeypatch):
    """With --overlong penalty a reward may be -1, and a user's task may give any number."""
    from matplotlib.figure import Figure
    limits, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: limits.append(
        self.axes[0].get_ylim()) or save(self, *args, **more))
    for rewards in ((), (.2, .9), (-1, .5, 2.5)):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(dict(
            kind="step", step=i, segment=0, reward=r, entropy=1, kl_noise=0, sigma=0)) + "\n"
            for i, r in enumerate(rewards)))
        runs.plot([tmp_path], tmp_path / "curves.png")
    assert limits == [(-.03, 1.03), (-.03, 1.03), (-1, 2.5)]


def test_peak_memory_is_in_units_of_1e9_bytes(monkeypatch):
    """Linux reports a process's memory in KiB."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(runs.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=10**6))
    assert runs.peak_memory_gb() == 1.024


def test_signals_wait_until_the_block_is_left():
    """All three signals wait, and afterwards the handlers are the ones from before."""
    seen = []
    ends = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    for number in ends:
        signal.signal(number, lambda n, _: seen.append(n))
    with runs.Run(train.Config(), quiet=True).undivided():
        for number in ends:
            os.kill(os.getpid(), number)
        time.sleep(.01)
        assert seen == []
    assert sorted(seen) == sorted(ends)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(.01)
    assert len(seen) == 4
