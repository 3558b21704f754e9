"""A run's folder: what a run writes, what an accident leaves of it, and what is read from it.

python -m pytest tests/test_run.py
"""

import dataclasses
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
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import FLAGS, ROOT, Command, lines, main, outcome
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import lora
import model as decoder
import train
from tasks import Task
from tools import launch, report
from tools import run as run_file
from tools.flags import Config, flags_of_run
from tools.optimizer import adamw

GOOD = dict(signal=0.5, finished=0.9, mismatch=1.01)
# for runs of which only the last checkpoint matters: nothing is saved on the way, little evaluated
BARE = ("--save-every", 100, "--eval-every", 2, "--eval-problems", 4)


def from_call(monkeypatch, number, of, name, do, *arguments):
    """Let do(arguments) come first in the number-th call of a function, and in every later one."""
    real, count = getattr(of, name), itertools.count(1)

    def call(*args, **more):
        if next(count) >= number:
            do(*arguments)
        return real(*args, **more)

    monkeypatch.setattr(of, name, call)


def strike(what):
    """Raise an error of a class, or send this process a signal."""
    if isinstance(what, type):
        raise what("an accident")
    os.kill(os.getpid(), what)


def saved(folder):
    """→ the step of a run's last checkpoint, and its checksum, which covers every tensor."""
    with safe_open(folder / "checkpoint.safetensors", "pt") as file:
        return file.metadata()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def two(tiny_chat, tmp_path_factory):
    """The folder of the run that `whole` is, stopped after two steps. Tests read or copy it."""
    folder = tmp_path_factory.mktemp("runs") / "two"
    with pytest.MonkeyPatch.context() as patch:
        from_call(patch, 3, train, "collect", sys.exit, 143)
        assert main(*FLAGS, "--model", tiny_chat, "--out", folder) == 143
    return folder


@pytest.fixture
def begun(two, tmp_path):
    """A copy of the run that was stopped after two steps."""
    return Path(shutil.copytree(two, tmp_path / "run"))


@pytest.fixture
def ended(whole, tmp_path):
    """A copy of a finished run, for damaging it; its checkpoints are of steps 6 and 4."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def resumed(folder, **flags):
    """→ the run in a folder before it loads its checkpoint, a new model, its optimizer."""
    flags = flags_of_run(folder) | dict(resume=str(folder)) | flags
    config = Config(**flags)
    model = decoder.load(config.model, config.quant, config.rank, config.alpha)
    return run_file.Run(config), model, adamw(config, model)


# --- what a run writes


def test_a_run_leaves_its_files_and_another_seed_is_another_run(whole, start, tmp_path):
    """The run of the tests has gradients, evaluations and all the files."""
    records = report.read(whole)
    steps = [r for r in records.values() if r["kind"] == "step"]
    assert [step for kind, step in records if kind == "eval"] == [0, 3, 6]
    assert sum(r["grad_norm"] is not None for r in steps) >= 4
    assert [r["mismatch"] is not None for r in steps] == [True] + [False] * 5  # every ten
    assert {p.name for p in whole.iterdir()} == {
        "adapter",
        "adapter-best",
        "checkpoint.previous.safetensors",
        "checkpoint.safetensors",
        "config.json",
        "curves.png",
        "metrics.jsonl",
        "samples.jsonl",
    }
    assert start("--seed", 1, "--steps", 1, "--eval-problems", 0) == 0
    assert report.show([tmp_path / "run"]) not in report.show([whole])


def test_samples_hold_the_best_and_the_worst_answer(whole, tmp_path):
    """Two records of each step after an evaluation. show() leaves out a line that a crash cut off
    within a character, and the next record has a line of its own."""
    assert [(s["step"], s["which"]) for s in report.jsonl(whole / "samples.jsonl")] == [
        (0, "worst"),
        (0, "best"),
        (3, "worst"),
        (3, "best"),
    ]
    run = run_file.Run(Config(out=str(tmp_path)))
    (tmp_path / "samples.jsonl").write_bytes('{"step": 6, "answer": "é'.encode()[:-1])
    texts = [(f"p{b}", f"a{b}\u2028b\x85") for b in range(4)]  # two line ends of Unicode's
    run.sample(7, texts, [0.5, 1.0, -2.0, 0.0], [0.1, 0.9, -1.5, -0.2])
    assert report.show([tmp_path]).split("\n") == [
        "step    7 worst | reward -2.00 | advantage -1.50 | 'p2' → 'a2\\u2028b\\x85'",
        "step    7 best  | reward +1.00 | advantage +0.90 | 'p1' → 'a1\\u2028b\\x85'",
    ]


@pytest.mark.parametrize(
    "prompt, answer",
    [
        ("b" + "x" * 6000 + "e", "2"),
        ("b", "x" * 6000 + "e"),
        ("b" + "\n" * 300, "\u2028" * 300 + "e"),
        ([{"role": "user", "content": f"b{'x' * 999}"}] * 9, "x" * 999 + "e"),
    ],
)
def test_the_printed_samples_fill_at_most_a_screen(prompt, answer, tmp_path, capsys):
    """Of 24 lines of 80 characters. The file has the whole text."""
    run = run_file.Run(Config(out=str(tmp_path)))
    capsys.readouterr()
    run.sample(7, [(prompt, answer), ("b", "e")], [0.5, 0.5], [0.1, 0.1])
    run.sample(7, [("short", "text"), ("b", "e")], [0.5, 0.9], [0.1, 0.1])
    long, _, short, _ = capsys.readouterr().out.splitlines()
    assert len(long) <= 24 * 80 / 2 and short == "    worst +0.50  'short' → 'text'"
    beginning, end = repr(prompt)[:99], repr(answer)[-99:]
    assert long.startswith(f"    worst +0.50  {beginning}") and long.endswith(end)
    kept, *_ = report.jsonl(tmp_path / "samples.jsonl")
    assert (kept["prompt"], kept["answer"]) == (prompt, answer)


def test_an_evaluation_is_named_by_its_task_and_logged_in_six_digits(
    whole, tmp_path, monkeypatch, capsys
):
    """The reward of one's own task need not be an accuracy. JSON has no NaN. A folder that is not
    given is named after the task."""
    monkeypatch.chdir(tmp_path)
    run = run_file.Run(Config(task="my.py"))
    changes = dict(rollout_s=200 / 3, eval_sampled=math.nan)
    run.log("eval", 0, report.read(whole)["eval", 0] | changes)
    assert " mean reward, " in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").glob("my-*")
    (record,) = lines(folder)
    assert (record["rollout_s"], record["eval_sampled"]) == (66.6667, None)


def test_a_step_tells_how_long_the_rest_will_take(ended, whole, monkeypatch, capsys):
    """A run is resumed at the sixth of nine steps. The seventh takes 20 minutes, so two more 40.
    The drawing fails, which costs a line of warning and the name of the picture."""
    clock = [1000.0]
    monkeypatch.setattr(run_file.time, "perf_counter", lambda: clock[0])
    from_call(monkeypatch, 1, run_file, "plot", strike, ImportError)
    run, model, optimizer = resumed(ended, steps=9)
    with run.guarded(model, optimizer) as first:
        clock[0] += 1200
        run.made(first, dict(report.read(whole)["step", 5], step=6))
    said = capsys.readouterr()
    assert first == 6 and "resumed at 67% of the schedules of lr and σ\n" in said.out
    assert " GB | 20.0 min, 40.0 min left\n" in said.out
    assert f"done: {ended}, adapter in {ended}/adapter, the best (" in said.out
    assert re.fullmatch(
        f"warning: .*ImportError.*; try python -m tools.report plot {ended}\n", said.err
    )


def test_the_last_record_of_a_step_holds_and_they_come_in_order(tmp_path):
    """An evaluation precedes the step of its number. Lines cut off or made by hand are left out."""
    keys = [
        ("step", 0, 0),
        ("step", 1, 0),
        ("eval", 2, 0),
        ("step", 2, 0),
        ("step", 1, 1),
        ("eval", 2, 1),
        ("step", "x", 0),
        ([], 1, 0),
        ("step", 1, None),
    ]
    log = [json.dumps(dict(kind=kind, step=step, segment=n)) for kind, step, n in keys]
    by_hand = ["5", "[" * 99_999]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*log, *by_hand, '{"kind": "st']))
    assert [(*key, r["segment"]) for key, r in report.read(tmp_path).items()] == [
        ("step", 0, 0),
        ("step", 1, 1),
        ("eval", 2, 1),
        ("step", 2, 0),
    ]


def test_the_best_adapter_is_kept_over_a_resume_and_the_first_of_equals(tmp_path, monkeypatch):
    """Before a step there is no adapter of the run's. The adapter is saved before the record of
    its evaluation, so that a crash in between costs nothing. A quiet rank keeps none."""
    kept, config = [], Config(out=str(tmp_path / "run"))
    monkeypatch.setattr(
        lora, "save_adapter", lambda model, folder, base: kept.append(len(lines(folder.parent)))
    )

    def evaluated(config, *scores, quiet=False):
        """Log the evaluations (step, accuracy) of a run → how many records precede each kept
        adapter, and the best accuracy."""
        kept.clear()
        run = run_file.Run(config, quiet)
        run.model = None
        for step, score in scores:
            run.log(
                "eval",
                step,
                dict(eval_greedy=score, eval_greedy_loose=1.0, eval_sampled=0.0, rollout_s=1),
            )
        return list(kept), run.best

    assert evaluated(config, (0, 0.9), (4, -0.5), (8, 0.5), (12, 0.5), (20, 0.4)) == ([1, 2], 0.5)
    again = dataclasses.replace(config, resume=config.out)
    assert evaluated(again, (8, 0.5), (12, 0.4), (24, 0.6), (28, 0.6)) == ([7], 0.6)
    evaluated(again, (24, 0.5), (28, 0.5))  # a GPU's replay is not bit for bit the same
    assert evaluated(again) == ([], 0.6)
    assert evaluated(config, (4, -0.5), quiet=True) == ([], -math.inf)


def test_the_end_names_the_best_adapter_which_has_its_accuracy(
    start, tmp_path, monkeypatch, capsys
):
    """The last evaluation is made the worst, so that the last adapter is not the best. The last
    one is saved though it is not due."""
    (tmp_path / "digits.py").write_text(
        "problems = lambda: [{'prompt': f'{n} + {m}'} for n in range(10) for m in range(10)]\n"
        "reward = lambda text, finished: -sum(map(str.isdigit, text)) - (not finished) / 7\n"
    )
    folder, evaluate, made = tmp_path / "run", train.evaluate, itertools.count(1)

    def worse(*args):
        result = evaluate(*args)
        result["eval_greedy"] -= 9 * (next(made) == 3)
        return result

    monkeypatch.setattr(train, "evaluate", worse)
    assert (
        start(
            "--lr",
            0.05,
            "--task",
            tmp_path / "digits.py",
            "--steps",
            2,
            "--save-every",
            100,
            "--eval-every",
            1,
            "--eval-problems",
            8,
        )
        == 0
    )
    first = report.read(folder)["eval", 1]
    before = report.read(folder)["eval", 0]["eval_greedy"]
    better = "" if first["eval_greedy"] > before else f"; before training it was {before:.2f}"
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"done: {folder}/curves.png, adapter in {folder}/adapter, the best "
        f"({first['eval_greedy']:.2f}) in {folder}/adapter-best{better}"
    )
    adapter, _, best = outcome(folder)
    assert adapter != best
    again = tmp_path / "again"
    score = "--steps", 0, "--adapter", folder / "adapter-best", "--out", again
    assert start(*score, "--task", tmp_path / "digits.py") == 0
    (got,) = report.read(again).values()
    keys = "eval_greedy", "eval_greedy_loose", "eval_sampled", "problems"
    assert [got[key] for key in keys] == [first[key] for key in keys]


def test_peak_memory_is_in_units_of_1e9_bytes(monkeypatch):
    """Linux reports a process's memory in KiB."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    usage = SimpleNamespace(ru_maxrss=10**6)
    monkeypatch.setattr(run_file.resource, "getrusage", lambda _: usage)
    assert run_file.peak_memory_gb() == 1.024


# --- a run that is stopped


@pytest.mark.parametrize(
    "what, where, call",
    [
        (signal.SIGINT, "collect", 3),
        (signal.SIGINT, "update", 2),
        (signal.SIGINT, "evaluate", 2),
        (signal.SIGTERM, "update", 2),
        (signal.SIGHUP, "update", 2),
        (RuntimeError, "collect", 3),
        (ValueError, "collect", 3),
        (torch.OutOfMemoryError, "backward", 3),
    ],
)
def test_a_stopped_run_saves_its_last_whole_step(
    two, start, tmp_path, monkeypatch, capsys, what, where, call
):
    """A signal drops the step that samples, and waits for the end of the step that updates. An
    error drops the step: RuntimeError is PyTorch's when another rank ends, ValueError a reward's.
    The checkpoint is the one of a run that saved after two steps."""
    from_call(monkeypatch, call, train, where, strike, what)
    if isinstance(what, type):
        with pytest.raises(what, match="an accident"):
            start(*BARE)
    else:
        assert start(*BARE) == 128 + what
    folder = tmp_path / "run"
    said = f"stopped after 2 steps; go on with: python train.py --resume {folder}\n"
    assert capsys.readouterr().err.endswith(said)
    assert saved(folder) == saved(two)
    assert [r["step"] for r in lines(folder) if r["kind"] == "step"] == [0, 1]


def test_the_same_seed_gives_the_same_run_and_nohup_protects_it(
    whole, start, tmp_path, monkeypatch
):
    """A signal that is ignored when the run starts stays ignored, also during an update."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in ("collect", "update"):
        from_call(monkeypatch, 1, train, name, strike, signal.SIGHUP)
    assert start() == 0
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.parametrize(
    "name, then, ends, words, step",
    [
        ("checksum", signal.SIGINT, KeyboardInterrupt, "^$", "3"),
        ("save_file", SafetensorError, OSError, "run: an accident; the last checkpoint holds", "2"),
    ],
)
def test_what_happens_while_ctrl_c_saves(begun, monkeypatch, name, then, ends, words, step):
    """A second Ctrl-C costs nothing. A full disk, for which safetensors has an error of its own,
    costs the step since the last checkpoint."""
    run, model, optimizer = resumed(begun)
    with pytest.raises(ends, match=words), run.guarded(model, optimizer):
        run.done = 3
        from_call(monkeypatch, 1, run_file, name, strike, then)
        strike(signal.SIGINT)
    assert saved(begun)["step"] == step


def test_half_an_optimizer_step_is_not_saved(two, begun):
    """The third step is made. The fourth ends after it has changed the model."""
    run, model, optimizer = resumed(begun)
    with pytest.raises(torch.OutOfMemoryError), run.guarded(model, optimizer):
        run.done = 3
        optimizer.step()
        strike(torch.OutOfMemoryError)
    assert saved(begun) == saved(two)


def test_a_stop_before_there_is_anything_to_save_writes_nothing(
    ended, start, tmp_path, monkeypatch
):
    """Ctrl-C while a model is half loaded from a checkpoint, or in the first evaluation."""
    before = contents(ended)
    with monkeypatch.context() as patch:
        from_call(patch, 1, run_file, "safe_open", strike, signal.SIGINT)
        assert main("--resume", ended) == 130
    assert contents(ended) == before
    from_call(monkeypatch, 1, train, "evaluate", strike, signal.SIGINT)
    assert start("--out", tmp_path / "new") == 130
    assert not list((tmp_path / "new").rglob("*.safetensors"))


def test_a_run_whose_output_nobody_reads_any_more_is_saved(whole, tiny_chat, tmp_path):
    """`python train.py … | tee log`: Ctrl-C ends tee, too, so the next line cannot be printed.
    Resumed, the run ends like one without an accident."""
    folder, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    flags = (*FLAGS, "--model", tiny_chat, "--out", folder, "--save-every", 100)
    run = Command(tmp_path, *flags, out=pipe)
    with open(pipe) as reader:
        assert any("step    1 " in line for line in reader), run.said
    assert run.code == 130 and "Traceback" not in run.said
    done = re.search(r"stopped after ([2-5]) steps \(Broken pipe\); go on with: ", run.said)
    assert done and saved(folder)["step"] == done[1]
    assert main("--resume", folder) == 0
    assert outcome(folder) == outcome(whole)


# --- a file that is not written, or not wholly


def test_a_save_that_is_cut_off_leaves_the_checkpoint_before_it(begun, monkeypatch):
    """The disk is full after half of a file; or the run dies before any of its renames, of two
    files of the adapter and two checkpoints. What is read afterwards is whole."""
    run, model, optimizer = resumed(begun)
    for p in model.parameters():
        p.data += 1

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left on device")

    for of, name in ((run_file, "checkpoint"), (lora, "adapter/adapter_model")):
        before = (begun / f"{name}.safetensors").read_bytes()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
            patch.setattr(of, "save_file", full)
            run.save(model, optimizer)
        assert (begun / f"{name}.safetensors").read_bytes() == before
    for crash in range(1, 5):
        run.done = 3
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="an accident"):
            from_call(patch, crash, os, "replace", strike, RuntimeError)
            run.save(model, optimizer)
        assert run.load(model, optimizer) == 2


# renames of a run that is resumed after two steps: config.json (1), the best adapter (2, 3), two
# saves of four files each (4 to 7, 8 to 11); the seventh is that of the checkpoint itself
@pytest.mark.parametrize(
    "crash", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12) if n != 7)]
)
def test_a_crash_between_any_two_files_loses_nothing(whole, begun, monkeypatch, crash):
    """Resumed, the run ends like one without an accident. The steps after the last checkpoint are
    in the log twice, and their last record counts."""
    with monkeypatch.context() as patch:
        from_call(patch, crash, os, "replace", strike, RuntimeError)
        with pytest.raises(RuntimeError, match="an accident"):
            main("--resume", begun)
    assert main("--resume", begun) == 0
    assert outcome(begun) == outcome(whole)
    assert report.read(begun)["eval", 6]["segment"] == 2 - (crash == 1)  # it had logged nothing


def test_a_full_disk_is_one_sentence_and_keeps_the_checkpoint(whole, two, begun, tmp_path):
    """The kernel limits the size of files: only a part of a log's line fits, and closing must not
    write it again. Resumed without the limit, the run ends like one without an accident: the record
    after half a line has a line of its own."""
    limit = 300 + (begun / "metrics.jsonl").stat().st_size
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    run = Command(tmp_path, "--resume", begun, code=code)
    assert run.code == 2, run.said
    assert re.fullmatch(
        "train.py: .*/run: .*File too large.*; the last checkpoint holds: go on "
        "with: python train.py --resume .*run\n",
        run.said,
    )
    assert saved(begun) == saved(two)
    assert (begun / "metrics.jsonl").stat().st_size == limit
    assert main("--resume", begun) == 0
    assert outcome(begun) == outcome(whole)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "config.json", "adapter-best/adapter_config.json"]
)
def test_any_file_that_cannot_be_written_is_named(start, tmp_path, name):
    """A folder of the file's name prevents writing; root could write to a file of any mode."""
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(OSError, match=rf"^.*Is a directory: .*run/{name}'") as error:
        start("--save-every", 1, "--eval-every", 1, "--eval-problems", 4)
    said = str(error.value)
    assert ("the last checkpoint holds" in said) == ("best" in name) and "\n" not in said


def test_a_checkpoint_is_read_whole_or_not_at_all(ended, capfd):
    """A bit that turns in the file's length, header or any tensor, and a cut, lead to the
    checkpoint before, which the next save keeps; so does a missing file. Nothing begins anew while
    damaged ones lie there."""
    run, model, optimizer = resumed(ended)
    path, previous = ended / "checkpoint.safetensors", ended / "checkpoint.previous.safetensors"
    before, good = previous.read_bytes(), path.read_bytes()
    assert run.load(model, optimizer) == 6
    damaged = [good[: int(share * len(good))] for share in (0, 0.001, 0.3, 0.999)]
    for bit in (*range(8, 1200, 8), *range(1200, 8 * len(good), len(good) // 4)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        damaged.append(data)
    end = 8 + int.from_bytes(good[:8], "little")
    tensors = json.loads(good[8:end])
    tensors.pop("__metadata__")
    for entry in tensors.values():
        data = bytearray(good)
        data[end + entry["data_offsets"][0]] ^= 1
        damaged.append(data)
    for data in damaged:
        path.write_bytes(data)
        assert run.load(model, optimizer) == 4
        (warning,) = capfd.readouterr().err.splitlines()
        assert f"{path} is damaged (" in warning
    run.save(model, optimizer)
    assert saved(ended)["step"] == "4" and previous.read_bytes() == before
    path.unlink()
    assert run.load(model, optimizer) == 4
    previous.write_bytes(before[:-1])
    with pytest.raises(ValueError, match="every .*run is damaged: .*--adapter .*run/adapter"):
        run.load(model, optimizer)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(whole, tiny_chat, tmp_path):
    """SIGKILL a real process three times, at random moments, then let it run to the end."""
    folder = tmp_path / "run"
    flags = (*FLAGS, "--model", tiny_chat, "--out", folder)
    for _ in range(3):
        run = Command(tmp_path, *flags)
        run.process.join(random.SystemRandom().uniform(0.2, 1.5))  # a whole run takes about 1.5
        run.process.kill()
        assert run.code in (0, -signal.SIGKILL), run.said
        if (folder / "config.json").exists():
            flags = ("--resume", folder)
    assert main(*flags) == 0
    assert outcome(folder) == outcome(whole)


# --- which folder a run may use


def test_a_folder_holds_one_run_and_one_writer(ended):
    """A second run in that folder is refused, and so is a second process; neither writes a byte."""
    before, again = contents(ended), Config(out=str(ended))
    with pytest.raises(ValueError, match="run holds a run already: go on with --resume, or take"):
        run_file.Run(again)
    config = dataclasses.replace(again, resume=str(ended))
    first = run_file.Run(config)
    with pytest.raises(ValueError, match="another process is writing to .*run: .*--out"):
        run_file.Run(config)
    del first
    assert contents(ended) == before
    (ended / "metrics.jsonl").unlink()  # a checkpoint is a run, too
    with pytest.raises(ValueError, match="holds a run already"):
        run_file.Run(again)


def test_a_resume_to_fewer_steps_than_were_made_is_refused_and_spoils_nothing(ended, monkeypatch):
    """Before the model loads."""
    monkeypatch.setattr(launch, "load", None)
    before = contents(ended)
    with pytest.raises(ValueError, match="^--steps 5: .*run has made 6 .* --steps 0 --adapter"):
        main("--resume", ended, "--steps", 5)
    assert run_file.Run(Config(resume=str(ended), steps=6)).segment == 1
    assert contents(ended) == before


@pytest.mark.parametrize(
    "left",
    [
        "config.json metrics.jsonl adapter adapter-best",
        "config.json metrics.jsonl adapter-best",
        "config.json metrics.jsonl",
        "config.json metrics.jsonl checkpoint.safetensors.tmp",
        "config.json metrics.jsonl adapter --save-every 99",
        "config.json",
        "config.json adapter",
        "config.json checkpoint.safetensors adapter-best",
        "config.json checkpoint.safetensors --steps 2",
    ],
)
def test_a_run_that_has_lost_its_checkpoint_or_its_log_never_begins_anew(ended, left):
    """It would overwrite an adapter or, without the scores of the log, a better one. The adapter
    is the way on. A refusal writes nothing, so that the next try is refused, too."""
    left, *more = left.split(" --")
    names = left.split()
    shutil.copy(ended / "checkpoint.safetensors", ended / "checkpoint.safetensors.tmp")
    for path in list(ended.iterdir()):
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(ended)
    flags = [word for words in more for word in f"--{words}".split()]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"--adapter {ended}/adapter"):
            main("--resume", ended, *flags)
    assert contents(ended) == before


@pytest.mark.parametrize(
    "name",
    [
        "adapter/adapter_model.safetensors",
        "adapter-best/adapter_model.safetensors",
        "checkpoint.safetensors.tmp",
        "config.json",  # that of a model, for instance
        "model.safetensors",
    ],
)
def test_a_new_run_takes_no_folder_whose_files_it_would_overwrite(start, tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match="run holds a run already: .* another --out"):
        start("--steps", 1)
    assert path.read_text() == "{}"


def test_a_checkpoint_of_another_tool_is_a_damaged_one(ended, capsys):
    """It has the tensors, but no metadata. The checkpoint before it is read."""
    run, model, optimizer = resumed(ended)
    path = ended / "checkpoint.safetensors"
    save_file(run_file.read_checkpoint(path)[0], path)
    assert run.load(model, optimizer) == 4
    assert f"{path} is damaged" in capsys.readouterr().err


def test_a_run_without_a_saved_step_begins_again(begun):
    """SIGKILL before the first save leaves a log and no adapter."""
    for name in ("adapter", "adapter-best", "checkpoint.safetensors"):
        path = begun / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert run_file.Run(Config(resume=str(begun), steps=6, save_every=5)).done == 0


def test_a_checkpoint_goes_on_with_its_own_problems_only(tmp_path, tiny_chat):
    """An edited file, and problems that are drawn anew by each import, are other problems. So is
    another gold."""
    data, run = tmp_path / "data.jsonl", tmp_path / "run"
    records = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(40)]
    data.write_text("\n".join(map(json.dumps, records)))
    flags = *FLAGS, "--model", tiny_chat, "--out", run, "--task", "gsm8k", "--data", data
    assert main(*flags, "--steps", 1, "--operands", "") == 0
    for edited in (records[:-1], [*records[:-1], records[-1] | {"answer": "#### 9"}]):
        data.write_text("\n".join(map(json.dumps, edited)))
        with pytest.raises(ValueError, match=f"other problems.*--adapter {run}/adapter"):
            main("--resume", run, "--steps", 2)
    data.write_text("\n".join(map(json.dumps, records)))
    assert main("--resume", run, "--steps", 2) == 0
    task, mine = tmp_path / "mine.py", tmp_path / "mine"
    task.write_text(
        "import random\nrandom.seed(None)\n"
        "problems = lambda: [{'prompt': str(random.random())} for _ in range(40)]\n"
        "reward = lambda problem, text: 0\n"
    )
    flags = *FLAGS, "--model", tiny_chat, "--out", mine, "--task", task, "--operands", ""
    assert main(*flags, "--steps", 1) == 0
    with pytest.raises(ValueError, match="other problems"):
        main("--resume", mine, "--steps", 2, "--task", task)


@pytest.mark.parametrize(
    "then, now, same",
    [
        (lambda n: {"target": n}, lambda n: {"target": n + 1}, False),
        (lambda n: {"answer": Fraction(n, 3)}, lambda n: {"answer": Fraction(n, 7)}, False),
        (lambda n: {"answer": [n, [n]]}, lambda n: {"answer": [n, [0]]}, False),
        (lambda n: {"check": lambda text: text}, lambda n: {"check": lambda text: text}, True),
        (
            lambda n: {"answer": {str(n), "a", "b"}, (1, 2): 3},
            lambda n: {"answer": {str(n), "b", "a"}, (1, 2): 3},
            True,
        ),
    ],
)
def test_problems_are_the_same_if_their_prompts_and_golds_are(then, now, same):
    """Whatever the gold is called. What differs from process to process, such as the address of a
    function or the order of a set, does not count."""

    def hashed(gold):
        problems = [{"prompt": str(n)} | gold(n) for n in range(40)]
        return launch.hash_of(Task(problems[:30], problems[30:], itemgetter("prompt"), None))

    assert (hashed(then) == hashed(now)) == same


def test_a_checkpoint_from_before_the_hash_resumes_where_it_would_have(ended):
    """Its metadata has the step and a checksum alone; each step drew (1 + resample) batches."""
    run, model, optimizer = resumed(ended)
    path = ended / "checkpoint.safetensors"
    tensors, metadata = run_file.read_checkpoint(path)
    assert metadata["drawn"] == str(6 * run.config.prompts) and len(metadata["problems"]) == 64
    old = {"step": "6"}
    save_file(tensors, path, metadata=old | {"sha256": run_file.checksum(tensors, old)})
    flags = json.loads((ended / "config.json").read_text()) | {"resample": 2, "prompts": 8}
    (ended / "config.json").write_text(json.dumps(flags))
    run.problems = "0" * 64
    assert run.load(model, optimizer) == 6 and run.drawn == 6 * 3 * 8


def ends_like_an_unbroken_run(folder, monkeypatch, flags, stopped_in):
    """Make a run twice, once stopped while it samples for a step and resumed. → folders of both."""
    whole, run = folder / "whole", folder / "run"
    assert main(*flags, "--out", whole) == 0
    with monkeypatch.context() as patch:
        from_call(patch, stopped_in, train, "collect", sys.exit, 143)
        assert main(*flags, "--out", run) == 143
    assert main("--resume", run) == 0
    assert saved(run) == saved(whole)
    return whole, run


def test_a_resumed_run_that_resamples_ends_like_an_unbroken_one(tiny_chat, tmp_path, monkeypatch):
    """Where it stands in the data depends on how many groups were replaced."""
    flags = *FLAGS, "--model", tiny_chat, "--resample", 2, "--steps", 4, "--eval-problems", 0
    _, run = ends_like_an_unbroken_run(tmp_path, monkeypatch, flags, 3)
    assert int(saved(run)["drawn"]) < 4 * 3 * 4


def test_a_resumed_run_with_adaptive_noise_ends_like_an_unbroken_one(
    tiny_chat, tmp_path, monkeypatch
):
    """σ grows while the noise moves the policy by less than the target, and the checkpoint holds
    it: in the run that is stopped after three steps, every σ is the unbroken run's.
    """
    flags = *FLAGS, "--model", tiny_chat, "--steps", 6, "--eval-problems", 0, "--sigma-start", 0.3
    flags += "--sigma-schedule", "adaptive", "--sigma-target", 1e-3
    made, again = (
        [r for r in report.read(folder).values() if r["kind"] == "step"]
        for folder in ends_like_an_unbroken_run(tmp_path, monkeypatch, flags, 4)
    )
    sigmas = [r["sigma"] for r in made]
    assert sigmas == [r["sigma"] for r in again] and sigmas[0] == 0.3
    for before, after in itertools.pairwise(made):
        change = 1.0  # nothing was trained on
        if before["kl_noise"] is not None:
            change = 1.1 if before["kl_noise"] < 1e-3 else 1 / 1.1
        assert after["sigma"] == pytest.approx(before["sigma"] * change, rel=1e-4)
    assert len(set(sigmas)) > 2


def test_the_memory_of_a_step_is_that_of_the_rank_that_needs_most(tmp_path, monkeypatch):
    monkeypatch.setattr(run_file, "gather", lambda number: [number, 1e15])
    run = run_file.Run(Config(out=str(tmp_path / "run")))
    run.began, run.first_step, run.model = 0, 0, None
    whole = dict.fromkeys(report.LINES["step"].replace("{", " ").replace(":", " ").split(), 0)
    run.made(0, whole | dict(signal=1, finished=1, mismatch=None))
    assert report.read(tmp_path / "run")["step", 0]["memory_gb"] == 1e6


def test_a_checkpoint_of_another_rank_is_refused(ended):
    """A config.json that was changed by hand. copy_ would spread a rank of 1 over all ranks."""
    run, *parts = resumed(ended, rank=8)
    with pytest.raises(ValueError, match="of .*: another --model or --rank?"):
        run.load(*parts)


def test_a_run_from_an_adapter_that_dies_at_once_resumes_from_it(
    whole, start, tmp_path, monkeypatch
):
    """It has no checkpoint yet."""
    more = ("--adapter", whole / "adapter", "--steps", 2, "--eval-problems", 4)
    assert start(*more, "--out", tmp_path / "straight") == 0
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="an accident"):
        from_call(patch, 1, train, "update", strike, RuntimeError)
        start(*more)
    assert main("--resume", tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "straight")


# --- steps that go wrong, and the advice


@pytest.mark.parametrize("loss, gradient", [(math.inf, 0), (0, math.nan)])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(
    start, tmp_path, monkeypatch, capsys, loss, gradient
):
    """The first loss is infinite, or the first gradient is NaN: it reaches neither the adapter nor
    AdamW, and later steps learn."""
    real, trained = train.backward, itertools.count(1)

    def backward(config, model, *rest, **more):
        sums, logprobs = real(config, model, *rest, **more)
        if sums["rows"] and next(trained) == 1:
            sums["loss"] += loss
            next(model.parameters()).grad[0, 0] += gradient
        return sums, logprobs

    monkeypatch.setattr(train, "backward", backward)
    assert start("--steps", 4, "--save-every", 1, "--eval-problems", 0) == 0
    steps = lines(tmp_path / "run")
    (skipped,) = (r for r in steps if "skipped" in r)
    assert (skipped["grad_norm"] is None) == math.isnan(gradient)
    assert capsys.readouterr().err.count("the step was skipped") == 1
    tensors, _ = run_file.read_checkpoint(tmp_path / "run/checkpoint.safetensors")
    learnt = sum(r["rows"] > 0 for r in steps) - 1
    assert {int(t) for name, t in tensors.items() if name.endswith("/step")} == {learnt}
    assert learnt > 1


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A run whose records are judged and not logged."""
    run = run_file.Run(Config(out=str(tmp_path / "x")))
    monkeypatch.setattr(run, "log", lambda *_: None)
    return run


def test_five_skipped_steps_in_a_row_stop_the_run(judged):
    """Four in a row do not."""
    skipped = GOOD | dict(skipped=1)
    for stats in [skipped] * 4 + [GOOD] + [skipped] * 4:
        judged.made(0, dict(stats))
    with pytest.raises(ValueError, match="five steps in a row were skipped: .* --lr$"):
        judged.made(18, dict(skipped))
    assert judged.done == 19


@pytest.mark.parametrize(
    "name, change, near",
    [
        ("flat", dict(signal=0), dict(signal=0.125)),
        ("unfinished", dict(finished=0), dict(finished=0.01)),
        ("mismatch", dict(mismatch=1.06), dict(mismatch=1.04)),
    ],
)
def test_a_diagnosis_needs_five_steps_or_a_mismatch_and_comes_once(
    judged, capsys, name, change, near
):
    bad, near = GOOD | change, GOOD | near
    enough = 1 if name == "mismatch" else 5
    assert [n for n, _ in report.diagnose([GOOD] * 5 + [bad] * enough)] == [name]
    for quiet in ([GOOD] + [bad] * (enough - 1), [bad] * 4 + [near], [GOOD | dict(mismatch=None)]):
        assert not list(report.diagnose(quiet))
    for _ in range(8):
        judged.made(0, dict(bad))
    assert capsys.readouterr().err.count("warning: ") == 1


def test_preflight_changes_nothing_and_says_whether_training_would_work(
    whole, tiny_chat, tmp_path, monkeypatch, capsys
):
    """Rewards for short answers: exit code 0. Times tables, which a random model cannot do: 3.
    No folder is made, and one that holds a run stays as it is. A step has 4 of the 32
    prompts, so its seconds are an eighth: 10 of the rollout, and 1 of each of its updates, on a
    clock that each look at it advances by 8."""
    before, collect, loaded = contents(whole), train.collect, []

    def in_80_seconds(*args):
        batch = collect(*args)
        batch.stats["rollout_s"] = 80.0
        return batch

    monkeypatch.setattr(train, "collect", in_80_seconds)
    monkeypatch.setattr(train.time, "perf_counter", itertools.count(0, 8).__next__)
    monkeypatch.setattr(launch, "load_adapter", lambda _, folder: loaded.append(folder))
    backward, rows = train.backward, []

    def counted(*args):
        result = backward(*args)
        rows.append(result[0]["rows"])
        return result

    monkeypatch.setattr(train, "backward", counted)
    flags = (*FLAGS, "--model", tiny_chat, "--out", tmp_path / "run", "--preflight")
    more = ("--updates-per-step", 2, "--out", whole, "--adapter", whole / "adapter-best")
    assert main(*flags) == 0
    assert main(*flags, *more) == 0
    assert main(*flags, "--overlong", "none") == 3
    assert [n > 0 for n in rows] == [True, True, False]  # equal rewards leave nothing to compute
    said = capsys.readouterr().out
    assert said.count("mismatch     1.0000") == 3
    assert re.findall(r"([\d.]+) +seconds, ([\d.]+) of them the update", said) == [
        ("11.0", "1.0"),
        ("12.0", "2.0"),
        ("11.0", "1.0"),
    ]
    assert loaded == [str(whole / "adapter-best")]
    assert not (tmp_path / "run").exists() and contents(whole) == before


@pytest.mark.parametrize(
    "change, code, advice, words",
    [
        ({}, 0, 0, "solve rate    40.0%"),
        (dict(signal=0), 3, 1, "unequal rewards"),
        (dict(finished=0), 0, 1, "no answer ended"),
        (dict(mismatch=1.1), 0, 1, "disagree"),
        (dict(mismatch=1.6), 3, 1, "disagree"),
        (dict(mismatch=math.nan), 3, 1, "nan"),
        (dict(signal=0.2), 0, 0, "no signal     80.0%   groups of equal rewards; --resample"),
    ],
)
def test_preflight_judges_as_the_training_does(change, code, advice, words):
    record = GOOD | dict(solved=0.4, memory_gb=1.0, rollout_s=6.0, update_s=4.0) | change
    config = Config(steps=30)
    said, exit_code = report.preflight_report(record, config)
    assert exit_code == code
    assert words in said and said.count("change: ") == advice
    assert "10.0   seconds, 4.0 of them the update; 30 steps 5 minutes" in said
    _, exit_code = report.preflight_report(record, dataclasses.replace(config, overlong="mask"))
    assert exit_code == (3 if record["finished"] == 0 else code)


# --- python -m tools.report


def report_command(monkeypatch, capsys, *argv):
    """python -m tools.report ARGV → what it prints."""
    monkeypatch.setattr(sys, "argv", ["tools/report.py", *map(str, argv)])
    runpy.run_path(str(ROOT / "tools/report.py"), run_name="__main__")
    return capsys.readouterr()


@pytest.mark.parametrize(
    "text",
    [
        '{"model": null, "task": null, "steps": null}',
        '{"updates_per_rollout": null}',
        '{"updates_per_rollout": "two"}',
        '[["model", null]]',
        "[]",
        "null",
        pytest.param("[" * 99_999, id="deep"),
    ],
)
def test_a_list_shows_a_dash_for_what_a_config_does_not_tell(tmp_path, text):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text(text)
    assert report.summary(tmp_path)[1:4] == ("–", "–", "0/–")


def test_a_list_has_a_line_for_each_run(tmp_path, monkeypatch, capsys):
    """The last record of a replayed step counts. The other run has just begun, and its config
    cannot be read."""
    monkeypatch.chdir(tmp_path)
    mine = dict(task="/home/mine.py", model="/home/qwen", steps=16, updates_per_rollout=2)
    odd = '{"task": null, "model": null, "steps": [1]}'
    for name, config in (("mine", json.dumps(mine)), ("new/one", "{"), ("odd", odd)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
        (folder / "metrics.jsonl").touch()
    log = Path("runs/mine/metrics.jsonl")
    for step, score in ((0, 0.1), (8, 0.5), (16, 0.25)):
        run_file.append(
            log, dict(kind="eval", step=step, segment=0, eval_greedy=score, rollout_s=10)
        )
    for step in (0, 2, 4, 6, 6):
        run_file.append(log, dict(kind="step", step=step, segment=0, rollout_s=500, update_s=100))
    _, *rows = report_command(monkeypatch, capsys, "list").out.splitlines()
    assert [row.split() for row in rows] == [
        "runs/mine mine qwen 8/16 0.10 0.50 0.25 40.5".split(),
        "runs/new/one – – 0/– – – – 0.0".split(),
        "runs/odd – – 0/[1] – – – 0.0".split(),
    ]


@pytest.mark.parametrize(
    "argv, drawn",
    [
        ("show {run}", []),
        ("plot {run}", ["run/curves.png"]),
        ("plot {run} {run}", ["curves.png"]),
    ],
)
def test_report_shows_and_plots(ended, tmp_path, monkeypatch, capsys, argv, drawn):
    """plot writes into the only run's folder, or for several into the current one. A folder without
    a run is refused."""
    monkeypatch.chdir(tmp_path)
    (ended / "curves.png").unlink()
    with pytest.raises(SystemExit, match="nowhere holds no (metrics|samples).jsonl"):
        report_command(monkeypatch, capsys, *argv.format(run=ended).split(), "nowhere")
    said = report_command(monkeypatch, capsys, *argv.format(run=ended).split())
    assert not said.err
    assert (" best " in said.out) == (not drawn)
    assert list(tmp_path.rglob("curves.png")) == [tmp_path / name for name in drawn]
    for name in drawn:
        assert Path(name).read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    "argv, words",
    [
        ("show", "usage"),
        ("list /nowhere", "no run in /nowhere: name"),
        ("plot /nowhere", "nowhere holds no metrics.jsonl"),
    ],
)
def test_what_report_cannot_do_is_said_and_is_exit_code_1(monkeypatch, capsys, argv, words):
    with pytest.raises(SystemExit, match=words):  # of a sentence: exit code 1
        report_command(monkeypatch, capsys, *argv.split())
