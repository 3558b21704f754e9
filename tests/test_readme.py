"""Both READMEs stay true: files, commands, printed lines, tables. Copyable files run alone, ruff is clean."""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import main
from test_structure import LINES

import export
import launch
import runs
import tasks
import train

ROOT = Path(__file__).parent.parent
README, LOGBOOK = ((ROOT / path).read_text() for path in ("README.md", "results/README.md"))
MAP = re.findall(r"^\| `(\w+)\.py` \| (\d+) \|(.*)\|$", README, re.M)       # (name, most lines, what it is)
GONE_OR_BENCH = {"--rows", "--whole", "--samples-every"}      # alone in spans: bench.py's, and one now gone
COPYABLE = [name for name, _, text in MAP if "*Alone*" in text]


def test_the_file_map_names_every_module_and_its_length():
    """test_structure.py compares LINES with the files that are there."""
    assert [name for name, *_ in MAP] == list(dict.fromkeys(name for name, *_ in MAP)), "named twice"
    assert {name: int(lines) for name, lines, _ in MAP} == LINES


@pytest.mark.parametrize("name", COPYABLE)
def test_a_copyable_file_imports_and_runs_its_demo_alone(name, tmp_path):
    """From an empty folder that holds only that file, without this repository on the path."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    done = subprocess.run([sys.executable, "-I", f"{name}.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3, "a demo prints something that teaches"


def test_eight_files_are_copyable():
    """The parametrised test above finds nothing to check if the map's wording changes: that must fail."""
    assert COPYABLE == ["nvfp4", "fp4_gemm", "lora", "aqn", "gumbel", "logprobs", "grpo", "tasks"]


@pytest.mark.parametrize("text", [README, LOGBOOK], ids=["README.md", "results/README.md"])
def test_every_command_names_a_script_that_exists_and_flags_that_it_has(text):
    """Commands are indented lines and spans of code. A flag alone in a span is train.py's."""
    fields = {f"--{field.name.replace('_', '-')}": field.type for field in dataclasses.fields(train.Config)}
    known = {*fields, "--help"} | {f"--no-{flag[2:]}" for flag, kind in fields.items() if kind is bool}
    text, scripts = re.sub("```.*?```", "", text, flags=re.S), 0
    for span in re.findall(r"^    (.+)$", text, re.M) + re.findall("`([^`]+)`", text):
        command = " ".join(span.split("#")[0].split())                  # without its comment, on one line
        script = re.search(r"(?:python|torchrun .*) ([\w/]+\.py)(.*)", command)
        if script and script[1] != "train.py":
            source = (ROOT / script[1]).read_text()
            known_here = {flag for flag in re.findall(r'"(--[a-z-]+)"', source)}
        elif script or command.startswith("--"):
            known_here = known
        else:
            continue
        scripts += bool(script)
        flags = re.findall(r"(?<!\S)--[a-z-]+", script[2] if script else command)
        assert {*flags} - known_here <= GONE_OR_BENCH, command
    assert scripts > 8


@pytest.mark.parametrize("path, text", [("README.md", README), ("results/README.md", LOGBOOK)])
def test_links_and_pictures_lead_to_files_and_headings(path, text):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, heading = target.partition("#")
        where = (ROOT / path).parent / file if file else ROOT / path
        assert where.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", where.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, target


def test_the_lines_of_the_terminal_are_those_of_the_committed_run():
    """Seed 0 of results/quickstart, as train.py prints a record."""
    printed = {runs.line(record) for record in runs.read(ROOT / "results/quickstart/seed0").values()}
    shown = re.findall(r"^    ((?:step|eval after) +\d.*)$", README, re.M)
    assert len(shown) >= 3 and set(shown) <= printed


def test_the_glossary_explains_every_key_of_the_committed_logs():
    """Each key in results/quickstart's records is in the glossary, and each key there is written."""
    rows = re.findall(r"^\| (`.*?) \|", LOGBOOK.split("## Metrics\n")[1], re.M)
    glossary = set(re.findall(r"`(\w+)`", "".join(rows)))
    logs = sorted((ROOT / "results" / "quickstart").glob("*/metrics.jsonl"))
    assert len(logs) == 3
    written = {key for log in logs for text in log.read_text().splitlines() for key in json.loads(text)}
    assert written - {"kind"} == glossary


def test_the_quickstart_table_is_what_its_script_makes_of_the_logs():
    """No number without its log."""
    table = subprocess.run([sys.executable, "results/quickstart.py", "table"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.strip()
    assert table.count("\n") >= 4 and table in LOGBOOK


@pytest.mark.parametrize("name, rows, text", [
    ("results", 6, README), ("hardware", 6, README), ("gemm", 20, LOGBOOK), ("rollout", 7, LOGBOOK),
    ("step", 16, LOGBOOK), ("recipes", 6, LOGBOOK), ("turns", 10, LOGBOOK), ("peers", 9, LOGBOOK),
    ("qwen", 8, LOGBOOK)])
def test_the_tables_are_what_their_script_makes_of_the_logs(name, rows, text):
    """And so are their conditions."""
    table = subprocess.run([sys.executable, "results/tables.py", name], cwd=ROOT, capture_output=True,
                           text=True, check=True).stdout
    assert table.count("\n|") >= rows and table in text


def test_the_figures_of_the_run_on_a_gpu_are_those_of_its_log():
    """Seconds, reward and accuracy of results/addition."""
    seconds = json.loads((ROOT / "results/addition/conditions.json").read_text())["seconds"]
    assert f"took {seconds} s" in LOGBOOK
    log = [json.loads(line) for line in (ROOT / "results/addition/metrics.jsonl").read_text().splitlines()]
    late = [r["reward"] for r in log if r["kind"] == "step" and 100 <= r["step"] < 150]
    assert len(late) == 50 and f"mean reward {sum(late) / 50:.2f}".replace("0.", ".") in LOGBOOK
    first, *_, last = (r["eval_greedy"] for r in log if r["kind"] == "eval")
    assert f"held-out greedy {first:.2f} → {last:.2f}" in LOGBOOK


def test_the_command_for_a_gpu_machine_leaves_out_torch_alone():
    """As pasted: what grep hands to pip is requirements.txt without its pin of torch."""
    command, = re.findall(r"^    (grep .*?) \| pip install -r /dev/stdin &&", README, re.M)
    kept = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    every = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in every if line not in kept.splitlines()] == ["torch==2.13.0"]


def test_the_lines_for_peft_transformers_and_pandas_run_as_printed(tiny_chat, tmp_path, monkeypatch, capsys):
    """After README's exports of a run of a tiny model whose weights are exact in NVFP4, so that PEFT's base
    is what was trained on. The merged checkpoint has PEFT's logits, up to the rounding of weights to bf16: an
    error of 2⁻⁸ in each of 10 matrices. Without the adapter they are further away."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    (tmp_path / "mine.py").write_text("problems = lambda: [{'prompt': f'{n} + 1'} for n in range(40)]\n"
                                      "reward = lambda problem, text, finished: -len(text) / 9")
    export.export(tiny_chat, "base", "bf16", quant="nvfp4")
    flags = "--steps 4 --rank 4 --lr .05 --prompts 4 --group-size 4 --max-new-tokens 6 --device cpu"
    assert main("--model", "base", "--task", "mine.py", "--out", "runs/NAME", *flags.split()) == 0
    exports = re.findall(r"^    python (export\.py .*?) *#", README, re.M)
    assert [words.split()[2] for words in exports] == ["DST", "DST4"]
    for words in exports:
        monkeypatch.setattr(sys, "argv", words.split())
        runpy.run_path(str(ROOT / "export.py"), run_name="__main__")
    assert (tmp_path / "DST4/adapter/adapter_config.json").is_file()         # what vLLM's line serves
    names, code = {}, re.findall("```python\n(.*?)```", README, re.S)[1]
    capsys.readouterr()
    exec(code, names)
    assert capsys.readouterr().out.strip() and (tmp_path / "reward.png").stat().st_size > 5000
    log, ids = runs.read("runs/NAME"), torch.arange(3, 23)[None]
    rewards = [r["reward"] for r in log.values() if r["kind"] == "step"]
    assert list(names["log"].reward.dropna()) == pytest.approx(rewards)      # pandas rounds the last digit
    merged, adapted = names["merged"].model.float(), names["adapted"].float()
    with torch.no_grad():
        want = merged(ids).logits
        error = (adapted(ids).logits - want).norm()
        with adapted.disable_adapter():
            assert (adapted(ids).logits - want).norm() > 5 * error and error < 10 * 2**-8 * want.norm()


def test_the_line_of_ones_own_word_problems_is_one_that_gsm8k_reads(tmp_path, monkeypatch):
    """And so does the command beside it."""
    line, = re.findall(r'^    (\{"question".*)$', README, re.M)
    command, = re.findall(r"`python train.py (--task gsm8k --data mine.jsonl)`", README)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("".join(line.replace("Ann", name) + "\n" for name in "ABCDEFGH"))
    config = launch.parse(train.Config, command.split())
    task = tasks.TASKS[config.task](config.data)
    assert len(task.train) == 6 and len(task.held_out) == 2
    assert [task.reward(task.train[0], text, True) for text in ("#### 5", "#### 6")] == [1, 0]


def test_ci_runs_the_test_command_of_the_readme(tmp_path):
    """.ci/run picks it from README.md, runs it in an environment of its own and exits with its code."""
    commands = [line.strip() for line in README.splitlines() if line.startswith("    pip install")]
    assert len(commands) == 2
    assert commands[0].endswith("&& python train.py") and commands[1].endswith("&& python -m pytest")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    probe = "echo in $VIRTUAL_ENV && python -c 'exit(7)' -m pytest"
    (tmp_path / "README.md").write_text(README.replace(commands[1], probe))
    done = subprocess.run([tmp_path / ".ci/run"], cwd="/", capture_output=True, text=True)
    said = done.stdout.splitlines()
    assert done.returncode == 7 and said[0].endswith(f" {probe}") and said[1].startswith("in /"), done
    assert said[1] != f"in {sys.prefix}" and not Path(said[1][3:]).exists()


def test_the_style_check_is_clean():
    """ruff with pyproject.toml's settings: what the house style says of width, imports and names."""
    done = subprocess.run([sys.executable, "-m", "ruff", "check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
