"""A run's folder: what a run writes, what an accident leaves of it, and what is read from it.

python -m pytest tests/test_run.py
"""

import errno
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import FLAGS, Command, lines, main, outcome
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

import aqn
import train
from tasks import Task
from tools import report
from tools import run as run_file
from tools.diagnostics import preflight_prompts, preflight_report
from tools.environment import Answer, hash_of
from tools.flags import Config, parse
from tools.run import Run
from train import State, Trainer

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


def strike_once(errors):
    """Raise the first of an iterator's errors; when none is left, do nothing."""
    for error in errors:
        raise error


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


def resumed(folder, *flags):
    """→ the run in a folder, about to load its checkpoint into a new model, optimizer and state."""
    parts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", lambda *given: parts.extend(given))
        assert main("--resume", folder, *flags) == 0
    *_, trainer, run = parts
    run.model, run.optimizer, run.state = trainer.model, trainer.optimizer, State()
    return run


def guarded(run):
    return run.guarded(run.model, run.optimizer, run.state)


def step_of_load(run):
    """→ the step of the checkpoint that the run loads."""
    run.load()
    return run.state.step


# --- what a run writes


def test_a_run_rounds_the_samplers_keys_and_values_if_asked(start, tmp_path, whole):
    """By how much is measured, as any difference between sampler and trainer is."""
    assert start("--kv", "int8", "--steps", 1) == 0
    exact, rounded = (report.read(run)["step", 0]["mismatch"] for run in (whole, tmp_path / "run"))
    assert exact < 1.0001 < 1.001 < rounded < 1.1


def test_a_run_leaves_its_files(whole):
    """The run of the tests has gradients, evaluations and all the files."""
    records = report.read(whole)
    assert [step for kind, step in records if kind == "eval"] == [0, 3, 6]
    steps = [r for r in records.values() if r["kind"] == "step"]
    assert sum(r["grad_norm"] is not None for r in steps) >= 4
    assert [r["mismatch"] is not None for r in steps] == [True] + [False] * 5  # every ten
    samples = [(s["step"], s["which"]) for s in report.jsonl(whole / "samples.jsonl")]
    assert samples == list(itertools.product((0, 3), ("worst", "best")))
    files = "adapter adapter-best checkpoint.previous.safetensors checkpoint.safetensors"
    files += " config.json curves.png eval.jsonl metrics.jsonl samples.jsonl"
    assert sorted(path.name for path in whole.iterdir()) == files.split()


def test_each_evaluation_keeps_its_answers(whole):
    """All held-out problems of the three evaluations, with the rewards that metrics.jsonl means."""
    records = list(report.jsonl(whole / "eval.jsonl"))
    means = {
        step: r["eval_greedy"] for (kind, step), r in report.read(whole).items() if kind == "eval"
    }
    for step, mean in means.items():
        found = [r for r in records if r["step"] == step]
        assert len({r["prompt"] for r in found}) == len(found) == 32
        assert sum(r["reward"] for r in found) / 32 == pytest.approx(mean)
    assert {r["ended"] for r in records} == {True, False}


def test_each_adapter_has_a_card_of_its_own_step(whole, tmp_path):
    """The last evaluation follows the last save. The command makes the run once more."""
    scores = {
        step: r["eval_greedy"] for (kind, step), r in report.read(whole).items() if kind == "eval"
    }
    best = next(step for step in (3, 6) if scores[step] == max(scores[3], scores[6]))
    for name, step in (("adapter", 6), ("adapter-best", best)):
        card = (whole / name / "README.md").read_text()
        assert f"{step} of 6 steps" in card and "multiplication" in card
        assert f"{scores[0]:.2f} after 0 steps, {scores[step]:.2f} after {step} steps" in card
        (command,) = re.findall("`python train.py (.*)`", card)
        flags = json.loads((whole / "config.json").read_text()) | {"out": ""}
        assert vars(parse(shlex.split(command))) == flags


def test_no_adapter_is_written_twice(start, monkeypatch):
    written, real = [], Run.save_adapter

    def save_adapter(run, *name_and_step):
        written.append(name_and_step)
        real(run, *name_and_step)

    monkeypatch.setattr(Run, "save_adapter", save_adapter)
    start(*BARE)
    assert ("adapter", 6) in written and len(set(written)) == len(written)


@pytest.mark.parametrize("accident", [None, KeyboardInterrupt])
def test_a_run_that_cannot_load_leaves_no_folder(
    begun, start, tiny_chat, tmp_path, monkeypatch, accident
):
    """Its adapter is not there, or Ctrl-C while it loads. A run that is resumed stays."""
    if accident:
        monkeypatch.setattr(train, "load_adapter", lambda *_: strike(accident))
    before = contents(begun)
    flags = *FLAGS, "--model", tiny_chat, "--adapter", tmp_path / "nowhere"
    try:
        assert main(*flags, "--out", tmp_path / "new") == 130
    except ValueError as error:
        assert "nowhere holds no" in str(error)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(train, "load", lambda *_: strike(ValueError))
    with pytest.raises(ValueError, match="an accident"):
        main("--resume", begun)
    assert contents(begun) == before


def test_samples_are_stored_whole_and_fill_at_most_a_screen(tmp_path, capsys):
    """The worst and the best answer; two fill 24 lines of 80 characters. show() leaves out a line
    that a crash cut off within a character, and the next record has a line of its own.
    """
    run = Run(Config(out=str(tmp_path)))
    (tmp_path / "samples.jsonl").write_bytes('{"step": 6, "answer": "é'.encode()[:-1])
    capsys.readouterr()
    chat = [{"role": "user", "content": "x" * 600}]
    text = "\u2028\x85" * 300 + "e"  # two line ends of Unicode's
    answers = [
        Answer("short", "text", 1.0, {}),
        Answer(chat, text, -2.0, {}),
        Answer("", "", 0.0, {}),
    ]
    run.sample(7, answers, [0.9, -1.5, -0.2])
    long, short = capsys.readouterr().out.splitlines()
    assert len(long) <= 24 * 80 / 2 and short == "    best  +1.00  'short' → 'text'"
    assert long.startswith(f"    worst -2.00  {repr(chat)[:99]}")
    assert long.endswith(repr(text)[-99:])
    worst, best = report.show([tmp_path]).split("\n")
    assert worst.endswith(f" -2.00 | advantage -1.50 | {chat!r} → {text!r}") and " worst " in worst
    assert re.fullmatch(r".* 7 best .* \+1.00 .* \+0.90 .*'short' → 'text'", best)


def test_a_run_of_ones_own_task_is_named_after_it(whole, tmp_path, monkeypatch, capsys):
    """Its rewards need not be accuracies."""
    monkeypatch.chdir(tmp_path)
    Run(Config(task="my.py")).log("eval", 0, report.read(whole)["eval", 0])
    assert " mean reward, " in capsys.readouterr().out
    assert [*(tmp_path / "runs").glob("my-*")]


def test_a_step_tells_how_long_the_rest_will_take(ended, whole, monkeypatch, capsys):
    """A run is resumed at the sixth of nine steps. The seventh takes 20 minutes, so two more 40.
    The drawing fails, which costs a line of warning and the name of the picture. The end names the
    accuracy before training, if none is better.
    """
    clock = [1000.0]
    monkeypatch.setattr(run_file.time, "perf_counter", lambda: clock[0])
    from_call(monkeypatch, 1, run_file, "plot", strike, ImportError)
    run = resumed(ended, "--steps", 9)
    with guarded(run):
        clock[0] += 1200
        run.finish_step(6, report.read(whole)["step", 5] | dict(step=6))
    said = capsys.readouterr()
    done = f"done: {ended}, adapter in {ended}/adapter, .* in {ended}/adapter-best"
    assert " 67% " in said.out and " GB | 20.0 min, 40.0 min left\n" in said.out
    assert re.search(rf"{done}; .* 0.00\n$", said.out)
    assert re.fullmatch(f"warning: .*ImportError.* plot {ended}\n", said.err)
    run.first = -1  # before training
    run.finish()
    assert re.fullmatch(f"{done}\n", capsys.readouterr().out)


def test_the_best_adapter_is_kept_over_a_resume_and_the_first_of_equals(tmp_path, monkeypatch):
    """Before a step there is no adapter of the run's. The adapter is saved before the record of
    its evaluation, so that a crash in between costs nothing. A quiet rank keeps none. Numbers are
    logged in six digits, and JSON has no NaN.
    """
    kept, out = [], str(tmp_path)
    monkeypatch.setattr(run_file, "save_adapter", lambda *_: kept.append(len(lines(tmp_path))))

    def best_of(*scores, quiet=False, resume=out):
        """Log the evaluations (step, accuracy) of a run → the best accuracy."""
        run = Run(Config(out=out, resume=resume), quiet)
        run.model = None
        for step, score in scores:
            more = dict(eval_greedy_loose=1.0, eval_sampled=math.nan, rollout_s=200 / 3)
            run.log("eval", step, more | dict(eval_greedy=score))
        return run.best

    assert best_of((0, 0.9), (4, -0.5), (8, 0.5), (12, 0.5), (20, 0.4), resume="") == 0.5
    assert best_of((8, 0.5), (12, 0.4), (24, 0.6), (28, 0.6)) == 0.6
    best_of((24, 0.5), (28, 0.5))  # a GPU's replay is not bit for bit the same
    assert best_of() == 0.6
    assert best_of((4, -0.5), quiet=True) == -math.inf
    assert kept == [1, 2, 7]  # records that precede each
    record, *_ = lines(tmp_path)
    assert (record["rollout_s"], record["eval_sampled"]) == (66.6667, None)


def test_the_best_adapter_has_its_accuracy(start, tmp_path, monkeypatch, capsys):
    """The run is stopped before the last evaluation, so that the last adapter is not the best."""
    task, folder, again = (tmp_path / name for name in ("digits.py", "run", "again"))
    task.write_text(
        "problems = lambda: [{'prompt': f'{n} + {m}'} for n in range(10) for m in range(10)]\n"
        "reward = lambda text, finished: -sum(map(str.isdigit, text)) - (not finished) / 7\n"
    )
    flags = "--lr .05 --steps 2 --eval-every 1 --eval-problems 8 --eval-samples 2"
    with monkeypatch.context() as patch:
        from_call(patch, 3, train, "evaluate", sys.exit, 143)
        assert start("--task", task, *flags.split()) == 143
    adapter, _, best = outcome(folder)
    assert adapter != best
    score = "--steps", 0, "--adapter", folder / "adapter-best", "--device", "cpu", "--out", again
    capsys.readouterr()
    assert main(*score, "--task", task) == 0
    assert "\neval | greedy" in capsys.readouterr().out, "not after 0 steps"
    scores = itemgetter("eval_greedy", "eval_greedy_loose", "eval_sampled", "problems")
    assert scores(report.read(again)["eval", 0]) == scores(report.read(folder)["eval", 1])


def test_peak_memory_is_in_units_of_1e9_bytes_and_that_of_the_rank_that_needs_most(monkeypatch):
    """Linux reports a process's memory in KiB, macOS in bytes."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    usage = SimpleNamespace(ru_maxrss=10**6)
    monkeypatch.setattr(run_file.resource, "getrusage", lambda _: usage)
    assert run_file.peak_memory_gb() == 1.024
    monkeypatch.setattr(run_file, "gather", lambda number: [number, 2 * number])
    assert run_file.peak_memory_gb() == 2.048
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run_file.peak_memory_gb() == 0.002


# --- a run that is stopped


@pytest.mark.parametrize(
    "what, of, where, call",
    [
        (signal.SIGINT, train, "collect", 3),
        (signal.SIGINT, Trainer, "update", 2),
        (signal.SIGTERM, Trainer, "update", 2),
        (signal.SIGHUP, Trainer, "update", 2),
        (RuntimeError, train, "collect", 3),
        (ValueError, train, "collect", 3),
        (torch.OutOfMemoryError, Trainer, "backward", 3),
    ],
)
def test_a_stopped_run_saves_its_last_whole_step(
    two, start, tmp_path, monkeypatch, capsys, what, of, where, call
):
    """A signal drops the step that samples, and waits for the end of the step that updates. An
    error drops the step: RuntimeError is PyTorch's when another rank ends, ValueError a reward's.
    The checkpoint is the one of a run that saved after two steps.
    """
    from_call(monkeypatch, call, of, where, strike, what)
    if isinstance(what, type):
        with pytest.raises(what, match="an accident"):
            start(*BARE)
    else:
        assert start(*BARE) == 128 + what
    folder = tmp_path / "run"
    said = capsys.readouterr().err
    assert said.endswith(f"stopped after 2 steps; go on with: python train.py --resume {folder}\n")
    assert saved(folder) == saved(two)
    assert [r["step"] for r in lines(folder) if r["kind"] == "step"] == [0, 1]


OUT_OF_FILES = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
ERRORS = [
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),  # a fork without memory
    OUT_OF_FILES,
    BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)),  # a child process that was killed
    SafetensorError("an accident"),
    MemoryError(),
    KeyError("an accident"),
    AssertionError("an accident"),
]
PLACES = [
    (Trainer, "backward", 3, OUT_OF_FILES),
    (run_file, "peak_memory_gb", 2, OUT_OF_FILES),
    (run_file, "append", 6, OUT_OF_FILES),  # the record of the second step
    (run_file, "diagnose", 2, KeyError("an accident")),
]


@pytest.mark.parametrize(
    "of, name, call, error", [(train, "collect", 3, error) for error in ERRORS] + PLACES
)
def test_whatever_ends_a_run_its_last_whole_step_is_saved(
    two, start, tmp_path, monkeypatch, capsys, of, name, call, error
):
    """run.py's table of accidents, row by row. One record was not appended to the log in time; it
    is there all the same, unless its measurements had failed.
    """
    from_call(monkeypatch, call, of, name, strike_once, iter([error]))
    with pytest.raises((OSError, type(error))):
        start(*BARE)
    assert "stopped after 2 steps; go on with: " in capsys.readouterr().err
    assert saved(tmp_path / "run") == saved(two)
    logged = [r["step"] for r in lines(tmp_path / "run") if r["kind"] == "step"]
    assert logged == [0, 1][: 2 - (name == "peak_memory_gb")]


@pytest.mark.parametrize("name", ["save_adapter", "save_file", "write_atomically"])
def test_a_save_that_fails_is_tried_again(two, start, tmp_path, monkeypatch, name):
    """The first save of the run, after two steps, or one of the best adapter's before."""
    from_call(monkeypatch, 2, run_file, name, strike_once, iter([OUT_OF_FILES]))
    with pytest.raises(OSError, match="run: .*Too many open files.*--resume"):
        start("--eval-every", 1)
    step = saved(tmp_path / "run")["step"]
    made = [r["step"] for r in lines(tmp_path / "run") if r["kind"] == "step"]
    assert int(step) == len(made) > 0


def test_the_same_seed_gives_the_same_run_and_nohup_protects_it(
    whole, start, tmp_path, monkeypatch
):
    """A signal that is ignored when the run starts stays ignored, also during an update."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for of, name in ((train, "collect"), (Trainer, "update")):
        from_call(monkeypatch, 1, of, name, strike, signal.SIGHUP)
    assert start() == 0
    assert outcome(tmp_path / "run") == outcome(whole)


@pytest.mark.parametrize(
    "name, then, ends, words, step",
    [
        ("checksum", signal.SIGINT, KeyboardInterrupt, "^$", "3"),
        ("save_file", SafetensorError, OSError, "run: an accident; .* --resume", "2"),
    ],
)
def test_what_happens_while_ctrl_c_saves(begun, monkeypatch, name, then, ends, words, step):
    """A second Ctrl-C costs nothing. A full disk, for which safetensors has an error of its own,
    costs the step since the last checkpoint.
    """
    run = resumed(begun)
    with pytest.raises(ends, match=words), guarded(run):
        run.state.step = 3
        from_call(monkeypatch, 1, run_file, name, strike, then)
        strike(signal.SIGINT)
    assert saved(begun)["step"] == step


def test_half_an_optimizer_step_is_not_saved(two, begun):
    """The third step is made. The fourth ends after it has changed the model."""
    run = resumed(begun)
    with pytest.raises(torch.OutOfMemoryError), guarded(run):
        run.state.step = 3
        run.optimizer.step()
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
    Resumed, the run ends like one without an accident.
    """
    folder, pipe = tmp_path / "run", tmp_path / "pipe"
    os.mkfifo(pipe)
    flags = (*FLAGS, "--model", tiny_chat, "--out", folder, "--save-every", 100)
    run = Command(tmp_path, *flags, out=pipe)
    with open(pipe) as reader:
        assert any("step    1 " in line for line in reader), run.said
    assert run.code == 130 and "Traceback" not in run.said
    done = re.search(r"stopped after ([2-5]) steps \(Broken pipe\); ", run.said)
    assert done and saved(folder)["step"] == done[1]
    assert main("--resume", folder) == 0
    assert outcome(folder) == outcome(whole)


# --- a file that is not written, or not wholly


def test_a_file_is_on_the_disk_before_it_has_its_name(begun, monkeypatch):
    """Of a save: three of the adapter, the checkpoint, of which the one before is kept. A line of a
    log is on the disk before the next thing happens.
    """
    run, calls = resumed(begun), []
    for name in ("fsync", "replace"):
        from_call(monkeypatch, 1, os, name, calls.append, name)
    run.save()
    run_file.append(begun / "metrics.jsonl", {})
    assert " ".join(calls) == "fsync replace " * 3 + "fsync replace replace fsync"


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_permissions_that_the_umask_leaves(start, tmp_path, mask):
    """Those of safetensors too: another user's server may read the adapter."""
    before = os.umask(mask)
    try:
        assert start("--steps", 2, "--eval-every", 1) == 0
    finally:
        os.umask(before)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


# renames of a run that is resumed after two steps: config.json (1), the best adapter (2 to 4), two
# saves of five files each (5 to 9, 10 to 14); the ninth is that of the checkpoint itself
@pytest.mark.parametrize(
    "crash", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 15) if n != 9)]
)
def test_a_crash_between_any_two_files_loses_nothing(whole, begun, monkeypatch, crash):
    """Resumed, the run ends like one without an accident. The steps after the last checkpoint are
    in the log twice, and their last record counts.
    """
    with monkeypatch.context() as patch:
        from_call(patch, crash, os, "replace", strike, RuntimeError)
        with pytest.raises(RuntimeError, match="an accident"):
            main("--resume", begun)
    assert main("--resume", begun) == 0
    assert outcome(begun) == outcome(whole)
    assert report.read(begun)["eval", 6]["segment"] == 2 - (crash == 1)  # it had logged nothing


def kill_at(number, name):
    """SIGKILL this process in the place of a call of os.replace or os.fsync."""
    from_call(pytest.MonkeyPatch(), number, os, name, strike, signal.SIGKILL)


# Of a run that saves after two steps: config.json (1), adapter/ (2 to 4), the checkpoint (5); the
# best adapter (6 to 8), adapter/ (9 to 11), the checkpoint before (12) and the new one (13). The
# eighth fsync is that of adapter/: the log has two steps, and nothing is saved.
KILLS = [("replace", n) for n in range(2, 15)] + [("fsync", 8)]
EVERY_DAY = ("replace", 2), ("replace", 5), ("replace", 13), ("fsync", 8)


@pytest.mark.parametrize(
    "name, number",
    [kill if kill in EVERY_DAY else pytest.param(*kill, marks=pytest.mark.slow) for kill in KILLS],
)
def test_sigkill_at_any_boundary_of_a_save_loses_nothing(whole, tiny_chat, tmp_path, name, number):
    """Resumed, the run ends like one without an accident, also if no checkpoint was whole yet."""
    folder = tmp_path / "run"
    code = f"import test_run; test_run.kill_at({number}, {name!r})"
    flags = *FLAGS, "--model", tiny_chat, "--out", folder
    assert Command(tmp_path, *flags, code=code).code == -signal.SIGKILL
    assert main("--resume", folder) == 0
    assert outcome(folder) == outcome(whole)


def test_a_run_that_was_killed_before_its_first_save_is_replayed(
    whole, tiny_chat, tmp_path, capsys
):
    """It has kept its best adapter already. Killed again in its second segment, it is still no run
    that has lost its checkpoint.
    """
    folder = tmp_path / "run"
    for flags in ((*FLAGS, "--model", tiny_chat, "--out", folder), ("--resume", folder)):
        code = "import test_run; test_run.kill_at(10, 'fsync')"
        more = "--save-every", 5, "--eval-every", 1
        assert Command(tmp_path, *flags, *more, code=code).code == -signal.SIGKILL
        assert list(folder.glob("adapter-best/*.safetensors")) and not saved_any(folder)
    assert main("--resume", folder, "--eval-every", 3, "--save-every", 2) == 0
    assert "it begins again at step 0" in capsys.readouterr().out
    assert saved(folder) == saved(whole)


def saved_any(folder):
    return [*folder.glob("checkpoint*"), *folder.glob("adapter/*")]


def test_a_full_disk_is_one_sentence_and_keeps_the_checkpoint(whole, two, begun, tmp_path):
    """The kernel limits the size of files: only a part of a log's line fits, and closing must not
    write it again. Resumed without the limit, the run ends like one without an accident: the record
    after half a line has a line of its own.
    """
    limit = 300 + (begun / "metrics.jsonl").stat().st_size
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    out = tmp_path / "out"
    run = Command(tmp_path, "--resume", begun, code=code, out=out)
    assert run.code == 2 and "step    2" not in out.read_text(), run.said
    *_, said = run.said.splitlines()
    assert re.fullmatch(f"train.py: {begun}: .*File too large.* --resume {begun}", said)
    assert saved(begun) == saved(two)
    assert (begun / "metrics.jsonl").stat().st_size == limit
    assert main("--resume", begun) == 0
    assert outcome(begun) == outcome(whole)


@pytest.mark.parametrize("program, told", [(["a/idea.py"], 1), (["-u", "b/train.py"], 0)])
def test_a_resume_by_another_program_is_told(begun, tmp_path, program, told):
    """A loss that idea.py replaced is not in train.py. A path or a flag of Python is no other."""
    run = Command(tmp_path, "--resume", begun, code=f"sys.orig_argv = ['python', *{program}]")
    assert run.code == 0 and run.said.count("python train.py began this run") == told, run.said


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "config.json", "adapter-best/adapter_config.json"]
)
def test_any_file_that_cannot_be_written_is_named(start, tmp_path, name):
    """A folder of the file's name prevents writing; root could write to a file of any mode."""
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(OSError, match=rf"^.*Is a directory: .*run/{name}'") as error:
        start("--save-every", 1, "--eval-every", 1, "--eval-problems", 4)
    said = str(error.value)
    made_a_step = name == "samples.jsonl" or "best" in name  # so there is a checkpoint
    assert (" --resume " in said) == made_a_step and "\n" not in said


def test_a_checkpoint_is_read_whole_or_not_at_all(ended, capfd):
    """A bit that turns in the file's length, header or tensors, a cut, and a file of another
    tool, without metadata, lead to the checkpoint before, which the next save keeps; so does a
    missing file. Nothing begins anew while damaged ones lie there.
    """
    run = resumed(ended)
    path, previous = ended / "checkpoint.safetensors", ended / "checkpoint.previous.safetensors"
    before, good = previous.read_bytes(), path.read_bytes()
    assert step_of_load(run) == 6
    damaged = [good[: int(share * len(good))] for share in (0, 0.001, 0.3, 0.999)]
    for bit in (*range(8, 1200, 8), *range(1200, 8 * len(good), len(good) // 8)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        damaged.append(data)
    tensors, _ = run_file.read_checkpoint(path)
    for data in (*damaged, save(tensors)):
        path.write_bytes(data)
        assert step_of_load(run) == 4
        (warning,) = capfd.readouterr().err.splitlines()
        assert f"{path} is damaged" in warning
    run.save()
    assert saved(ended)["step"] == "4" and previous.read_bytes() == before
    path.unlink()
    assert step_of_load(run) == 4
    previous.write_bytes(before[:-1])
    with pytest.raises(ValueError, match="every .*run is damaged: .*--adapter .*run/adapter"):
        run.load()


# --- which folder a run may use


def test_a_folder_holds_one_run_and_one_writer(ended):
    """A second run in that folder is refused, and so is a second process; neither writes a byte."""
    before, again = contents(ended), Config(out=str(ended))
    with pytest.raises(ValueError, match="run holds a run already: .* --out"):
        Run(again)
    config = Config(resume=str(ended))
    first = Run(config)
    with pytest.raises(ValueError, match="another process is writing to .*run: .*--out"):
        Run(config)
    del first
    assert contents(ended) == before
    (ended / "metrics.jsonl").unlink()  # a checkpoint is a run, too
    with pytest.raises(ValueError, match="holds a run already"):
        Run(again)


@pytest.mark.parametrize("where", ["import", "problems", "prompt", "reward"])
def test_a_run_stays_in_its_folder_if_its_task_changes_the_directory(
    tiny_chat, tmp_path, monkeypatch, capsys, where
):
    """--out may be relative, and what is printed is as it was given."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").write_text(f"""
import os
def leave(name):
    if name == {where!r} and os.path.isdir("elsewhere"):
        os.chdir("elsewhere")
leave("import")
def problems():
    leave("problems")
    return [dict(prompt=f"What is {{n}} - 1?") for n in range(20)]
def prompt(problem):
    leave("prompt")
    return problem["prompt"]
def reward(text):
    leave("reward")
    return 0.5
""")
    monkeypatch.chdir(tmp_path)
    flags = "--task", "mine.py", "--model", tiny_chat, "--eval-problems", 2, "--out", "run/"
    assert main(*FLAGS, *flags, "--steps", 2, "--save-every", 1) == 0
    assert Path.cwd() == tmp_path / "elsewhere" and not os.listdir()
    assert {"metrics.jsonl", "checkpoint.safetensors", "curves.png"} < set(os.listdir("../run"))
    said = capsys.readouterr().out
    assert "run folder: run\n" in said and "done: run/curves.png, adapter in run/adapter" in said


@pytest.mark.parametrize("score", ["0.5", True, None, [1], math.nan, 10**400])
def test_an_odd_record_of_an_evaluation_stops_no_resume(ended, score):
    where = json.dumps(dict(kind="eval", step=3, segment=0, eval_greedy=score))
    with open(ended / "metrics.jsonl", "a") as log:
        log.write(where + "\n")
    run = resumed(ended)
    assert run.best < 1.01 and run.segment == 1


def test_a_resume_to_fewer_steps_than_were_made_is_refused_and_spoils_nothing(ended, monkeypatch):
    """Before the model loads."""
    monkeypatch.setattr(train, "load", None)
    before = contents(ended)
    with pytest.raises(ValueError, match="^--steps 5: .*run has made 6 .* --steps 0 --adapter"):
        main("--resume", ended, "--steps", 5)
    assert Run(Config(resume=str(ended), steps=6)).segment == 1
    assert contents(ended) == before


@pytest.mark.parametrize(
    "left",
    [
        "config.json metrics.jsonl adapter adapter-best",
        "config.json metrics.jsonl adapter-best",
        "config.json metrics.jsonl --save-every 6",
        "config.json metrics.jsonl checkpoint.safetensors.tmp",
        "config.json metrics.jsonl adapter --save-every 99",
        "config.json",
        "config.json adapter",
        "config.json checkpoint.safetensors adapter-best",
        "config.json checkpoint.safetensors --steps 2",
    ],
)
def test_a_run_that_has_lost_its_checkpoint_or_its_log_never_begins_anew(ended, left):
    """It would overwrite an adapter or, without the scores of the log, a better one. An adapter
    that is left is the way on. A refusal writes nothing, so that the next try is refused, too.
    """
    names, option, value = left.partition(" --")
    shutil.copy(ended / "checkpoint.safetensors", ended / "checkpoint.safetensors.tmp")
    for path in list(ended.iterdir()):
        if path.name not in names.split():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(ended)
    way_on = re.findall(r"adapter\S*", names)[:1]  # no adapter is named that is not there
    remedy = "".join(f" with --adapter {ended}/{name}" for name in way_on)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"begin another run{remedy}$"):
            main("--resume", ended, *(option + value).split())
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
def test_a_new_run_takes_no_folder_whose_files_it_would_overwrite(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} holds a run already: .* --out"):
        Run(Config(out=str(tmp_path)))
    assert path.read_text() == "{}"


def test_a_run_without_a_saved_step_begins_again(two, tmp_path):
    """SIGKILL before the first save leaves a log and no adapter."""
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(two / name, tmp_path)
    assert step_of_load(resumed(tmp_path, "--save-every", 5)) == 0


def test_a_checkpoint_goes_on_with_its_own_problems_only(start, tmp_path):
    """Problems that are drawn anew by each import are other problems."""
    task, folder = tmp_path / "mine.py", tmp_path / "run"
    task.write_text(
        "import random\n"
        "problems = lambda: [{'prompt': str(random.random())} for _ in range(40)]\n"
        "reward = lambda problem, text: 0\n"
    )
    assert start("--task", task, "--steps", 1, "--eval-problems", 0) == 0
    with pytest.raises(ValueError, match=f"other problems.*--adapter {folder}/adapter"):
        main("--resume", folder, "--steps", 2, "--task", task)


MOVED = ["--model --data --test", "--model --task"]


@pytest.fixture(params=MOVED)
def moved(request, tiny_chat, start, tmp_path):
    """→ a run's folder and its flags with the new paths of its model, data, test set or own task,
    which were moved after a step.
    """
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(tiny_chat, old / "model")
    for name, numbers in (("data", range(9)), ("test", range(20, 24))):
        rows = [json.dumps({"question": f"{n}+1?", "answer": f"#### {n + 1}"}) for n in numbers]
        (old / name).write_text("\n".join(rows))
    (old / "task.py").write_text(
        "problems = lambda: [{'prompt': f'{n}*'} for n in range(10)]\nreward = lambda text: 0\n"
    )
    own = "--task" in request.param
    name = {"--model": "model", "--data": "data", "--test": "test", "--task": "task.py"}
    flags = request.param.split()
    given = [word for flag in flags for word in (flag, old / name[flag])]
    assert start(*given, *([] if own else ["--task", "gsm8k"]), "--steps", 1) == 0
    old.rename(new)
    return tmp_path / "run", [word for flag in flags for word in (flag, new / name[flag])]


def test_a_run_goes_on_with_what_was_moved(moved):
    """By the new paths beside --resume, because a checkpoint knows the hashes."""
    folder, flags = moved
    assert main("--resume", folder, "--steps", 2, *flags) == 0
    assert saved(folder)["step"] == "2"
    assert main("--resume", folder, "--steps", 3, *flags[-2:] * flags.count("--task")) == 0


@pytest.mark.parametrize("change", ["model", "problems", "no hash"])
def test_a_path_with_another_content_is_refused_and_spoils_nothing(moved, change):
    """Another model of the same shape, other problems, or a checkpoint from before the hashes,
    which cannot tell.
    """
    folder, flags = moved
    file = flags[1] / "model.safetensors"
    if change == "model":
        save_file({k: t * (1 + 2**-7) for k, t in load_file(file).items()}, file)
    elif change == "problems":
        flags[3].write_text(flags[3].read_text().replace("1", "2", 1))
    else:
        path = folder / "checkpoint.safetensors"
        tensors, _ = run_file.read_checkpoint(path)
        old = {"step": "1"}
        save_file(tensors, path, metadata=old | {"sha256": run_file.checksum(tensors, old)})
    before = contents(folder)
    with pytest.raises(ValueError, match="of another model or of other problems"):
        main("--resume", folder, "--steps", 2, *flags)
    assert contents(folder) == before


@pytest.mark.parametrize("kept", [True, False])
def test_the_adapter_that_a_run_began_from_may_move_but_not_change(whole, start, tmp_path, kept):
    """Without a checkpoint the run begins again, from the adapter where it lies now. With one it
    needs no adapter, and refuses another.
    """
    old, new, folder = (tmp_path / name for name in ("old", "new", "run"))
    shutil.copytree(whole / "adapter", old)
    assert start("--adapter", old, "--steps", 1) == 0
    old.rename(new)
    if not kept:
        for file in [*folder.glob("checkpoint*"), *folder.glob("adapter/*")]:
            file.unlink()
    resume = "--resume", folder, "--steps", 2
    assert main(*resume, "--adapter", new) == 0
    if kept:
        shutil.rmtree(new)
        assert main(*resume) == 0
        shutil.copytree(whole / "adapter-best", new)
        with pytest.raises(ValueError, match="adapter has changed"):
            main(*resume, "--adapter", new)


@pytest.mark.parametrize("where", ["train", "held_out"])
@pytest.mark.parametrize(
    "then, now, same",
    [
        (1, 2, False),
        (Fraction(1, 3), Fraction(1, 7), False),
        ([1, [1]], [1, [0]], False),
        (len, str, True),
        ({"a", "b"}, {"b", "c"}, True),
        ({(1, 2): 3}, {(1, 2): 4}, True),
    ],
)
def test_problems_are_the_same_if_their_golds_are(where, then, now, same):
    """What differs from process to process, such as the address of a function or the order of a
    set, does not count.
    """
    task = Task([], [], itemgetter("prompt"), None)
    tasks = (task._replace(**{where: [{"prompt": "", "gold": gold}]}) for gold in (then, now))
    assert len(set(map(hash_of, tasks))) == 2 - same


def test_a_checkpoint_from_before_the_hash_resumes_where_it_would_have(ended):
    """Its metadata has the step and a checksum alone; each step drew (1 + resample) batches."""
    run, path = resumed(ended), ended / "checkpoint.safetensors"
    tensors, _ = run_file.read_checkpoint(path)
    old = {"step": "6"}
    save_file(tensors, path, metadata=old | {"sha256": run_file.checksum(tensors, old)})
    (ended / "config.json").write_text(json.dumps(run.flags | dict(resample=2, prompts=8)))
    run.hashes = dict(problems="others", model="another")
    run.load()
    assert run.state == State(step=6, drawn=6 * 3 * 8, sigma=0.0)


def sometimes(folder):
    """→ the flags of a task whose rewards differ in some groups of random answers."""
    path = folder / "sometimes.py"
    path.write_text(
        "problems = lambda: [{'prompt': f'{n}*{n}='} for n in range(40)]\n"
        "reward = lambda problem, text, finished: float(text[:1] in set('012345678'))\n"
    )
    return "--task", path


def test_a_resumed_run_ends_like_an_unbroken_one(tiny_chat, tmp_path, monkeypatch):
    """Where it stands in the data depends on how many groups were replaced, and its noise on the
    noise before: σ grows while it moves the policy by less than the target. One of two runs is
    stopped while it samples for the fourth step.
    """
    straight, run = tmp_path / "straight", tmp_path / "run"
    task = sometimes(tmp_path)
    flags = "--resample 2 --eval-problems 0 --sigma-schedule adaptive --sigma-start .3"
    flags = *FLAGS, *flags.split(), "--sigma-target", 1e-3, "--model", tiny_chat, *task, "--out"
    assert main(*flags, straight) == 0
    with monkeypatch.context() as patch:
        from_call(patch, 4, train, "collect", sys.exit, 143)
        assert main(*flags, run) == 143
    assert main("--resume", run, *task) == 0
    assert saved(run) == saved(straight)
    assert 6 * 4 < int(saved(run)["drawn"]) < 6 * 3 * 4
    made = report.read(run).values()
    assert len({record["sigma"] for record in made}) > 2
    sigma = 0.3
    for record in made:
        assert record["sigma"] == pytest.approx(sigma, rel=1e-4)
        sigma = aqn.next_sigma(sigma, record["kl_noise"], 1e-3)


@pytest.mark.parametrize(
    "of, where, call, kept", [(train, "collect", 4, 3), (Trainer, "backward", 11, 2)]
)
def test_a_resume_of_four_updates_under_noise_ends_with_the_same_bytes(
    start, tmp_path, monkeypatch, of, where, call, kept
):
    """The ratio is to the noisy policy, and the clip acts. One of two runs stops in its fourth
    step: while it samples, or after one of four updates. The first step has no gradient, and so one
    update; what half a step has changed is not saved.
    """
    flags = "--updates-per-step 4 --correction bypass --sigma-start .3 --sigma-end .1".split()
    assert start(*flags, "--out", tmp_path / "straight") == 0
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="an accident"):
        from_call(patch, call, of, where, strike, RuntimeError)
        start(*flags)
    assert int(saved(tmp_path / "run")["step"]) == kept
    assert main("--resume", tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "straight")
    assert saved(tmp_path / "run") == saved(tmp_path / "straight")
    made = [r for r in report.read(tmp_path / "run").values() if r["kind"] == "step"]
    assert any(r["clip_fraction"] for r in made if r["sigma"])


@pytest.mark.parametrize(
    "first, then, begins",
    [
        ("--sigma-schedule adaptive", "", False),
        ("--sigma-schedule adaptive", "--sigma-start .2", True),
        ("--sigma-schedule adaptive", "--sigma-start .3", False),  # the run's own
        ("--sigma-schedule linear", "--sigma-schedule adaptive", True),
        ("--sigma-schedule adaptive --sigma-start .2", "--sigma-start .3", True),
    ],
)
def test_a_resume_begins_at_a_new_start_of_adaptive_noise(start, tmp_path, first, then, begins):
    """Neither where a falling schedule was, nor where noise of another start was."""
    flags = "--eval-problems", 0, "--steps", 2, "--sigma-start", 0.3, "--sigma-target", 1e-9
    assert start(*flags, *first.split()) == 0
    assert main("--resume", tmp_path / "run", "--steps", 3, *then.split()) == 0
    *_, before, after = report.read(tmp_path / "run").values()
    fell = before["sigma"] / aqn.FACTOR
    want = float(then.split()[-1]) if "start" in then else 0.3
    assert after["sigma"] == pytest.approx(want if begins else fell, rel=1e-4)


def test_a_checkpoint_of_another_rank_is_refused(ended):
    """A config.json that was changed by hand. copy_ would spread a rank of 1 over all ranks."""
    config = ended / "config.json"
    config.write_text(config.read_text().replace('"rank": 4', '"rank": 8'))
    with pytest.raises(ValueError, match="of .*: another --model or --rank?"):
        main("--resume", ended)


def test_a_run_from_an_adapter_that_dies_at_once_resumes_from_it(
    whole, start, tmp_path, monkeypatch
):
    """It has no checkpoint yet. The last step is saved, although it is not due."""
    more = "--adapter", whole / "adapter", "--steps", 2, *BARE
    assert start(*more, "--out", tmp_path / "straight") == 0
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="an accident"):
        from_call(patch, 1, Trainer, "update", strike, RuntimeError)
        start(*more)
    assert main("--resume", tmp_path / "run") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "straight")


# --- steps that go wrong, and the advice


@pytest.mark.parametrize("loss, gradient", [(math.inf, 0), (0, math.nan)])
def test_a_step_without_a_finite_gradient_is_skipped_and_counted(
    start, tmp_path, monkeypatch, capsys, loss, gradient
):
    """The first loss is infinite, or the first gradient is NaN: it reaches neither the adapter nor
    AdamW, and later steps learn.
    """
    real, trained = Trainer.backward, itertools.count(1)

    def backward(trainer, experience):
        sums, logprobs = real(trainer, experience)
        if sums["rows"] and next(trained) == 1:
            sums["loss"] += loss
            next(trainer.model.parameters()).grad[0, 0] += gradient
        return sums, logprobs

    monkeypatch.setattr(Trainer, "backward", backward)
    assert start("--steps", 4, "--save-every", 1, "--eval-problems", 0) == 0
    steps = lines(tmp_path / "run")
    assert sum("skipped" in r for r in steps) == 1
    assert capsys.readouterr().err.count("the step was skipped") == 1
    tensors, _ = run_file.read_checkpoint(tmp_path / "run/checkpoint.safetensors")
    learnt = sum(r["rows"] > 0 for r in steps) - 1
    assert {int(t) for name, t in tensors.items() if name.endswith("/step")} == {learnt}
    assert learnt > 1


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A run whose records are judged and not logged."""
    run = Run(Config(out=str(tmp_path / "x")))
    run.state = State()
    monkeypatch.setattr(run, "log", lambda *_: None)
    return run


def test_five_skipped_steps_in_a_row_stop_the_run(judged):
    """Four in a row do not."""
    skipped = GOOD | dict(skipped=1)
    for stats in [skipped] * 4 + [GOOD] + [skipped] * 4:
        judged.finish_step(0, dict(stats))
    with pytest.raises(ValueError, match=" --lr$"):
        judged.finish_step(18, dict(skipped))
    assert judged.state.step == 19


@pytest.mark.parametrize(
    "name, bad, near, enough",
    [
        ("signal", 0, 0.125, 5),
        ("finished", 0, 0.01, 5),
        ("mismatch", 1.06, 1.04, 1),
    ],
)
def test_a_diagnosis_needs_five_steps_or_a_mismatch_and_comes_once(
    judged, capsys, name, bad, near, enough
):
    bad, near = GOOD | {name: bad}, GOOD | {name: near}
    assert len(report.diagnose([GOOD] * 5 + [bad] * enough)) == 1
    unknown = [GOOD | dict(mismatch=None)]
    for quiet in ([GOOD] + [bad] * (enough - 1), [bad] * 4 + [near], unknown):
        assert not report.diagnose(quiet)
    for _ in range(8):
        judged.finish_step(0, dict(bad))
    assert capsys.readouterr().err.count("warning: ") == 1


def test_preflight_changes_nothing_and_says_whether_training_would_work(
    whole, tiny_chat, tmp_path, monkeypatch, capsys
):
    """Rewards for some answers: exit code 0. Times tables, which a random model cannot do: 3, also
    if short answers earn more. No folder is made, and one that holds a run stays as it is.
    """
    before, done = contents(whole), []
    monkeypatch.setattr(train, "load_adapter", lambda _, folder: done.append(folder))
    from_call(monkeypatch, 1, Trainer, "backward", done.append, "backward")
    flags = *FLAGS, "--model", tiny_chat, "--out", tmp_path / "run", "--preflight"
    more = "--out", whole, "--adapter", whole / "adapter-best"
    task = sometimes(tmp_path)
    assert [main(*flags, *task), main(*flags, *more, *task), main(*flags)] == [0, 0, 3]
    assert main(*flags, "--overlong", "none") == 3
    assert done == ["backward", str(whole / "adapter-best"), *["backward"] * 3]
    said = capsys.readouterr().out
    assert said.count("mismatch     1.0000") == 4
    assert not (tmp_path / "run").exists() and contents(whole) == before


@pytest.mark.parametrize(
    "flags, prompts",
    [
        (dict(max_new_tokens=16), 8),  # --prompts
        (dict(max_new_tokens=16, prompts=64), 32),
        (dict(max_new_tokens=16, prompts=2), 2),
        (dict(max_new_tokens=512), 4),
        (dict(max_new_tokens=512, group_size=2), 8),
        (dict(max_new_tokens=512, prompts=3, group_size=2), 3),
        (dict(max_new_tokens=32_000), 1),
    ],
)
def test_on_a_cpu_a_preflight_samples_no_more_than_it_can(flags, prompts):
    """At most --prompts, and 2¹⁴ tokens. A GPU samples 32 prompts, whatever the flags."""
    assert preflight_prompts(Config(**flags), on_cpu=True) == prompts
    assert preflight_prompts(Config(**flags), on_cpu=False) == 32


@pytest.mark.parametrize(
    "change, code, advice",
    [
        ({}, 0, 0),
        (dict(signal=0), 3, 1),
        (dict(finished=0), 0, 1),
        (dict(mismatch=1.1), 0, 1),
        (dict(mismatch=1.6), 3, 1),
        (dict(mismatch=math.nan), 3, 1),
        (dict(finished=0.49, signal=0.19), 0, 2),
        (dict(finished=0.5, signal=0.2), 0, 0),
        (dict(signal=0.19, finished=0), 0, 2),
    ],
)
def test_preflight_judges_as_the_training_does(change, code, advice):
    """Of 10 answers 4 have a reward above 0. A step of the run has a half of the trial's answers,
    so it samples in half the time, and each of its two updates takes half the time.
    """
    stats = GOOD | dict(rollout_s=12.0) | change
    answers = [Answer("", "", reward, {}) for reward in [1.0] * 4 + [0.0, -1.0] * 3]
    config = Config(steps=30, prompts=1, group_size=5, updates_per_step=2)
    said, exit_code = preflight_report(stats, answers, 4.0, config)
    assert exit_code == code and said.count("change: ") == advice
    assert said.endswith("ready to train") == (code == advice == 0)
    unpaid = [answer._replace(reward=-1.0) for answer in answers]
    more, exit_code = preflight_report(stats, unpaid, 4.0, config)
    # what is too hard has equal rewards, and this is said once
    already = said.count("unequal rewards")
    assert exit_code == code and more.count("change: ") == advice + 1 - already
    assert "never pays" in more and "unequal rewards" not in more
    for words in ("40.0%", f"{stats['finished']:.1%}", f"{1 - stats['signal']:.1%}"):
        assert f" {words}   " in said
    update = "4.0 .*" if stats["signal"] else "no update .*"
    assert re.search(f"10.0 .* {update} 30 steps 5 minutes", said)


def test_without_a_terminal_each_tenth_of_a_long_rollout_is_a_line(monkeypatch, capsys):
    """Never two for one tenth, and none without a label."""

    def lines_of(label):
        with run_file.ProgressBar(total=32, desc=label, disable=True) as bar:
            for ended in (3, 1, 0, 2, 10, 16):
                bar.update(ended)
        return capsys.readouterr().err

    assert not lines_of("step 7")
    monkeypatch.setattr(run_file, "LONG_ROLLOUT", -1)
    counts = [int(line.split()[2]) for line in lines_of("step 7:").splitlines()]
    assert counts == [4, 16, 32]
    assert not lines_of("")


def test_a_run_without_any_signal_says_so_once(tiny_chat, tmp_path, capsys):
    """Also one of fewer than five steps: a random model solves no product. With rewards that differ
    nothing is said.
    """
    flags = *FLAGS, "--model", tiny_chat, "--steps", "2", "--overlong", "none"
    for name, task, said in (("a", (), 1), ("b", sometimes(tmp_path), 0)):
        assert main(*flags, *task, "--out", tmp_path / name) == 0
        assert capsys.readouterr().err.count("unequal rewards") == said
