"""README.md and results/LOG.md stay true: their files, commands, printed lines and examples."""

import dataclasses
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import main

import tasks
from tools import export, report
from tools.flags import Config, parse, spelled

ROOT = Path(__file__).parent.parent
README, LOG = ((ROOT / path).read_text() for path in ("README.md", "results/LOG.md"))
COPYABLE = ["nvfp4", "fp4_gemm", "lora", "aqn", "grpo", "tasks"]
COPYABLE += [f"ops/{name}" for name in ("elementwise", "attention", "sampling", "logprobs")]


@pytest.mark.slow
@pytest.mark.parametrize("name", COPYABLE)
def test_a_copyable_file_imports_and_runs_its_demo_alone(name, tmp_path):
    """From an empty folder that holds only that file, without this repository on the path."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", Path(f"{name}.py").name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3, "a demo prints something that teaches"


def flags_of(script):
    """The flags that a script of ours has. train.py's are the fields of its Config; those of
    bench/ are keywords of common.flags."""
    if script != "train.py":
        source = (ROOT / script).read_text()
        found = set(re.findall(r'"(--[a-z0-9-]+)"', source))
        if script.startswith("bench/"):
            found |= {"--out", *map(spelled, re.findall(r"\b(\w+)=", source))}
        return found
    found = {"--help"}
    for field in dataclasses.fields(Config):
        found.add(spelled(field.name))
        if field.type is bool:
            found.add(spelled(f"no_{field.name}"))
    return found


@pytest.mark.parametrize("text", [README, LOG], ids=["README.md", "LOG.md"])
def test_every_command_names_a_script_that_exists_and_flags_that_it_has(text):
    """Commands are indented lines and spans of code. History names commits, not commands."""
    text = re.sub("```.*?```", "", text.partition("\n## History")[0], flags=re.S)
    found = 0
    for span in re.findall(r"^    (.+)$", text, re.M) + re.findall("`([^`]+)`", text):
        command = span.split("#")[0].split()  # without its comment
        if "pytest" in command or not set(command[:1]) & {"python", "bash", "torchrun"}:
            continue
        if "-m" in command:
            name = command[command.index("-m") + 1]
            script = name.replace(".", "/") + ".py"
        else:
            name = script = next(word for word in command if word.endswith((".py", ".sh")))
        assert (ROOT / script).is_file(), span
        if script.endswith(".py"):
            flags = {word for word in command[command.index(name) :] if word.startswith("--")}
            assert flags <= flags_of(script), span
        found += 1
    assert found >= 8


@pytest.mark.parametrize("path", ["README.md", "results/LOG.md"])
def test_links_and_pictures_lead_to_files_and_headings(path):
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / path).read_text())
    assert targets
    for target in targets:
        file, _, heading = target.partition("#")
        where = (ROOT / path).parent / file if file else ROOT / path
        assert where.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", where.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, target


def test_the_lines_of_the_terminal_are_those_of_the_committed_run():
    """Seed 0 of results/quickstart, as train.py prints a record."""
    printed = {
        report.line(record) for record in report.read(ROOT / "results/quickstart/seed0").values()
    }
    shown = re.findall(r"^    ((?:step|eval after) +\d.*)$", README, re.M)
    assert len(shown) >= 3 and set(shown) <= printed


def test_the_glossary_explains_the_keys_of_the_committed_logs_and_no_others():
    rows = re.findall(r"^\| (`.*?) \|", LOG.split("## Metrics\n")[1], re.M)
    glossary = set(re.findall(r"`(\w+)`", "".join(rows)))
    written = set()
    for seed in range(3):
        for record in report.read(ROOT / f"results/quickstart/seed{seed}").values():
            written |= record.keys()
    assert written - {"kind"} == glossary


def test_the_command_for_a_gpu_machine_leaves_out_torch_alone():
    """As pasted: what grep hands to pip is requirements.txt without its pin of torch."""
    (command,) = re.findall(r"^    (grep .*?) \| pip install -r /dev/stdin &&", README, re.M)
    kept = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    every = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in every if line not in kept.splitlines()] == ["torch==2.13.0"]


def test_the_lines_for_peft_transformers_and_pandas_run_as_printed(
    tiny_chat, tmp_path, monkeypatch, capsys
):
    """After README's exports of a run of a tiny model whose weights are exact in NVFP4, so that
    PEFT's base is what was trained on. The merged checkpoint has PEFT's logits, up to the rounding
    of weights to bf16: an error of 2⁻⁸ in each of 10 matrices. Without the adapter they are further
    away.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    (tmp_path / "mine.py").write_text(
        "problems = lambda: [{'prompt': f'{n} + 1'} for n in range(40)]\n"
        "reward = lambda problem, text, finished: -len(text) / 9"
    )
    export.export(tiny_chat, "base", "bf16", quant="nvfp4")
    flags = "--steps 4 --rank 4 --lr .05 --prompts 4 --group-size 4 --max-new-tokens 6 --device cpu"
    assert main("--model", "base", "--task", "mine.py", "--out", "runs/NAME", *flags.split()) == 0
    exports = re.findall(r"^    python -m (tools\.export .*?) *#", README, re.M)
    assert [words.split()[2] for words in exports] == ["DST", "DST4"]
    for words in exports:
        monkeypatch.setattr(sys, "argv", words.split())
        runpy.run_module("tools.export", run_name="__main__")
    assert (tmp_path / "DST4/adapter/adapter_config.json").is_file()  # what vLLM's line serves
    names, code = {}, re.findall("```python\n(.*?)```", README, re.S)[1]
    capsys.readouterr()
    exec(code, names)
    assert capsys.readouterr().out.strip() and (tmp_path / "reward.png").stat().st_size > 5000
    log, ids = report.read("runs/NAME"), torch.arange(3, 23)[None]
    rewards = [r["reward"] for r in log.values() if r["kind"] == "step"]
    # pandas rounds the last digit
    assert list(names["log"].reward.dropna()) == pytest.approx(rewards)
    merged, adapted = names["merged"].model.float(), names["adapted"].float()
    with torch.no_grad():
        want = merged(ids).logits
        error = (adapted(ids).logits - want).norm()
        with adapted.disable_adapter():
            without = (adapted(ids).logits - want).norm()
    assert without > 5 * error and error < 10 * 2**-8 * want.norm()


def test_the_line_of_ones_own_word_problems_is_one_that_gsm8k_reads(tmp_path, monkeypatch):
    """And so does the command beside it."""
    (line,) = re.findall(r'^    (\{"question".*)$', README, re.M)
    (command,) = re.findall(r"`python train.py (--task gsm8k --data mine.jsonl)`", README)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text(
        "".join(line.replace("Ann", name) + "\n" for name in "ABCDEFGH")
    )
    config = parse(command.split())
    task = tasks.TASKS[config.task](config.data)
    assert len(task.train) == 6 and len(task.held_out) == 2
    assert [task.reward(task.train[0], text, True) for text in ("#### 5", "#### 6")] == [1, 0]


@pytest.mark.slow
def test_the_commands_for_a_cpu_run_as_printed(tmp_path):
    """On a run of one small step, in an empty folder."""
    begin = "python train.py --steps 1 --prompts 2 --group-size 2 --eval-problems 2 --out runs/NAME"
    printed = re.findall(r"^    (python (?:train\.py|-m tools).*?) +#", README, re.M)
    kinds = "--resume", "--adapter runs/NAME", "tools.report list", "tools.memory"
    commands = [next(command for command in printed if kind in command) for kind in kinds]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    for command in [begin, *commands]:
        words = [str(ROOT / "train.py") if w == "train.py" else w for w in command.split()[1:]]
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0 and done.stdout.strip(), (command, done.stderr)


@pytest.mark.slow
def test_ci_runs_the_test_command_of_the_readme(tmp_path):
    """.ci/run picks it from README.md, runs it in an environment of its own and exits with its
    code.
    """
    commands = [line.strip() for line in README.splitlines() if line.startswith("    pip install")]
    assert [command.rpartition("&& ")[2] for command in commands] == [
        "python train.py",
        "python -m pytest",
    ]
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    probe = "echo in $VIRTUAL_ENV && python -c 'exit(7)' -m pytest"
    (tmp_path / "README.md").write_text(README.replace(commands[1], probe))
    done = subprocess.run([tmp_path / ".ci/run"], cwd="/", capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert done.returncode == 7 and said[0].endswith(f" {probe}") and said[1].startswith("in /"), (
        done
    )
    assert said[1] != f"in {sys.prefix}" and not Path(said[1][3:]).exists()
