"""A run's log read back: python -m tools.report.

python -m pytest tests/test_report.py
"""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from command import ROOT

from tools import report
from tools.run import append


def report_command(monkeypatch, capsys, *argv):
    """python -m tools.report ARGV → what it prints."""
    monkeypatch.setattr(sys, "argv", ["tools/report.py", *map(str, argv)])
    runpy.run_path(str(ROOT / "tools/report.py"), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        '{"model": null, "task": null, "steps": null}',
        '{"updates_per_rollout": null}',
        '{"updates_per_rollout": "two"}',
        '[["model", null]]',
        "[]",
        "null",
        "{",
        pytest.param("[" * 99_999, id="deep"),
    ],
)
def test_a_list_shows_a_dash_for_what_a_config_does_not_tell(tmp_path, text):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text(text)
    assert report.summary(tmp_path)[1:] == ("–", "–", "0/–", "–", "–", "–", "0.0")


ODD = [None, "1", [], {}, True, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("command", ["list", "show", "plot"])
@pytest.mark.parametrize("key", ["eval_greedy", "rollout_s", "update_s", "reward", "advantage"])
def test_an_odd_record_takes_no_other_runs_from_the_list(
    whole, tmp_path, monkeypatch, capsys, command, key
):
    """A value of another type, or none."""
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    kinds = dict(kind="step", segment=0), dict(kind="eval", segment=0), dict(which="best")
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(f"run/{name}", "a") as log:
            for number, value in enumerate([*ODD, "absent"]):
                for kind in kinds:
                    record = kind | dict(step=50 + number)
                    record |= {} if value == "absent" else {key: value}
                    print(json.dumps(record), json.dumps([record]), file=log, sep="\n")
    flags = ["list", "."] if command == "list" else [command, "run"]
    assert "run" in report_command(monkeypatch, capsys, *flags) or command == "show"


def test_a_list_has_a_line_for_each_run(tmp_path, monkeypatch, capsys):
    """The last record of a replayed step counts."""
    config = dict(task="/home/mine.py", model="/home/qwen", steps=16, updates_per_rollout=2)
    scores = {0: 0.1, 8: 0.5, 16: 0.25}
    log = [dict(kind="eval", step=n, eval_greedy=x, rollout_s=10) for n, x in scores.items()]
    log += [dict(kind="step", step=n, rollout_s=500, update_s=100) for n in (0, 2, 4, 6, 6)]
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for record in log:
        append(folder / "metrics.jsonl", record | dict(segment=0))
    monkeypatch.chdir(tmp_path)
    _, row = report_command(monkeypatch, capsys, "list").splitlines()
    assert row.split() == "runs/mine mine qwen 8/16 0.10 0.50 0.25 40.5".split()


@pytest.mark.parametrize(
    "argv, drawn",
    [
        ("show run", []),
        ("plot run", ["run/curves.png"]),
        ("plot run run", ["curves.png"]),
    ],
)
def test_report_shows_and_plots(whole, tmp_path, monkeypatch, capsys, argv, drawn):
    """plot writes into the only run's folder, or for several into the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "run", ignore=shutil.ignore_patterns("*.png"))
    said = report_command(monkeypatch, capsys, *argv.split())
    assert (" best " in said) == (not drawn)
    assert list(tmp_path.rglob("curves.png")) == [tmp_path / name for name in drawn]
    for name in drawn:
        assert Path(name).read_bytes().startswith(b"\x89PNG\r\n")


def test_the_title_of_the_noise_says_which_the_runs_have(whole, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **more: drawn.append(figure.axes))
    folders = []
    for name, changes in dict(a={}, b={"sigma_schedule": "adaptive"}, c={"aqn": False}).items():
        folders.append(shutil.copytree(whole, tmp_path / name))
        config = json.loads((whole / "config.json").read_text()) | changes
        (folders[-1] / "config.json").write_text(json.dumps(config))
        report.plot(folders[-1:])
    report.plot(folders)
    titles = [right.get_title() for _, _, right in drawn]
    assert titles[:3] == ["Noise: exponential", "Noise: adaptive", "Noise: –"]
    assert sorted(re.findall(r"\w+", titles[3])) == ["Noise", "adaptive", "exponential"]


def test_show_tells_what_was_wrong_before_and_right_after(tmp_path):
    """From the first evaluation to the last. The last record of a problem in a step counts, and
    what was written by hand does not. An evaluation alone shows what is wrong.
    """
    rewards = {"0": "0000", "1": "0001", "2": "0011", "3": "0101", "4": "1110", "5": "1111"}
    log = []
    for prompt, line in rewards.items():
        for step, reward in enumerate(map(int, line)):
            for value in (1 - reward, reward):  # a step that is replayed
                log.append(dict(prompt=prompt, step=step, reward=value, text=line, ended=True))
    append(tmp_path / "eval.jsonl", *log, [], {"step": 9}, log[0] | {"step": "x"})
    rose, fell, wrong = re.findall(r"^\w.*: (\d) of 6", report.show([tmp_path]), re.M)
    assert (rose, fell, wrong) == ("3", "1", "1")
    examples = re.findall(r"^    '(\d)'$", report.show([tmp_path]), re.M)
    assert examples == ["1", "2", "3", "4", "0"]
    (tmp_path / "eval.jsonl").unlink()
    append(tmp_path / "eval.jsonl", *(r for r in log if r["step"] == 0))
    said = report.show([tmp_path])
    assert re.findall(r": (\d) of 6", said) == ["4"] and said.count("after    0 steps") == 3


@pytest.mark.parametrize(
    "case",
    [
        "show | usage",
        "list /nowhere | no run in /nowhere: ",
        "plot /nowhere | nowhere holds no metrics.jsonl",
        "show /nowhere | nowhere holds no samples.jsonl",
    ],
)
def test_what_report_cannot_do_is_said_and_is_exit_code_1(monkeypatch, capsys, case):
    argv, words = case.split(" | ")
    with pytest.raises(SystemExit, match=words):  # of a sentence: exit code 1
        report_command(monkeypatch, capsys, *argv.split())


def test_the_last_record_of_a_step_holds_and_they_come_in_order(tmp_path):
    """An evaluation precedes the step of its number. Lines cut off or made by hand are left out."""
    log = [
        json.dumps(dict(kind=kind, step=int(step), segment=int(segment)))
        for kind, step, segment in map(
            str.split, "step 0 0, step 1 0, eval 2 0, step 2 0, step 1 1, eval 2 1".split(", ")
        )
    ]
    log += [
        '{"kind": "step", "step": "x", "segment": 0}',
        '{"kind": [], "step": 1, "segment": 0}',
        '{"kind": "step", "step": 1, "segment": null}',
        "5",
        "[" * 99_999,
        '{"kind": "st',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(log))
    records = report.read(tmp_path).values()
    found = [f"{r['kind']} {r['step']} {r['segment']}" for r in records]
    assert found == ["step 0 0", "step 1 1", "eval 2 1", "step 2 0"]
