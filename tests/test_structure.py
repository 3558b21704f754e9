"""What may import what, and how long each file may be. python -m pytest tests/test_structure.py -q"""
import ast
import graphlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "nvfp4": set(), "fp4_gemm": set(), "lora": set(), "aqn": set(), "grpo": set(), "gumbel": set(),
    "tasks": set(), "ops": set(), "logprobs": set(),
    "checkpoint": {"nvfp4", "lora"},
    "model": {"nvfp4", "fp4_gemm", "lora", "ops", "logprobs", "checkpoint"},
    "rollout": {"model", "gumbel", "ops"},
    "export": {"model", "checkpoint", "lora", "fp4_gemm", "nvfp4"},
    "memory": {"checkpoint", "fp4_gemm", "logprobs", "model", "rollout"},
    "runs": {"lora"},
    "launch": {"checkpoint", "model", "runs", "tasks", "aqn", "grpo", "lora"},
    "train": {"aqn", "grpo", "lora", "model", "rollout", "runs", "launch"}}
LINES = dict(nvfp4=150, fp4_gemm=500, lora=195, aqn=110, gumbel=200, rollout=315, grpo=145, train=300,
             launch=170, model=345, ops=430, logprobs=101, tasks=420, checkpoint=290, export=180, runs=430,
             memory=190)
HASH = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")


def imported(code):
    """Names of the modules that `code` imports anywhere, functions and import_module("name") included."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__", "run_module"):
                names.add(node.args[0].value)
    return {name.partition(".")[0] for name in names}


def forbidden(folder):
    """{"a imports b"} for each import between our files that ALLOWED does not list."""
    ours = {path.stem for path in (*ROOT.glob("*.py"), *ROOT.glob("results/*.py"))} | ALLOWED.keys()
    found = {name: imported((folder / f"{name}.py").read_text()) & ours for name in ALLOWED}
    return {f"{name} imports {other}" for name in found for other in found[name] - ALLOWED[name]}


def test_imports_point_one_way():
    """Inside functions too. The table itself has no circle, so what keeps to the table has none."""
    graphlib.TopologicalSorter(ALLOWED).prepare()                        # raises CycleError
    assert forbidden(ROOT) == set()


@pytest.mark.parametrize("module, planted, found", [
    ("checkpoint", "import model", "model"), ("lora", "from train import Config", "train"),
    ("ops", "import torch, gumbel as g", "gumbel"), ("launch", "importlib.import_module('train')", "train"),
    ("nvfp4", "__import__('fp4_gemm')", "fp4_gemm"), ("model", "from bench import clock", "bench")])
def test_a_circle_inside_a_function_is_found(tmp_path, module, planted, found):
    """However the import is written."""
    for name in ALLOWED:
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    with open(tmp_path / f"{module}.py", "a") as file:
        file.write(f"\n\nclass Planted:\n    def method(self):\n        if self:\n            {planted}\n")
    assert forbidden(tmp_path) == {f"{module} imports {found}"}


def test_every_module_has_its_place():
    """In both tables. A clone may hold a file of its user beside ours, as README's mine.py."""
    git = ["git", "ls-files", "*.py"] if shutil.which("git") else ["true"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    listed = listed or [path.name for path in ROOT.glob("*.py")]      # no git, or another user's clone
    assert {name.removesuffix(".py") for name in listed if "/" not in name} == ALLOWED.keys() == LINES.keys()


def length(file):
    return len((ROOT / file).read_text().splitlines())


@pytest.mark.parametrize("name", LINES)
def test_a_module_keeps_its_length(name):
    assert length(f"{name}.py") <= LINES[name]


def test_the_modules_together_are_read_in_an_evening():
    assert sum(length(f"{name}.py") for name in LINES) <= 4300


def test_the_readme_takes_three_screens_and_tells_no_history():
    """A commit hash may be in a table's line of conditions, right above or below the table."""
    text = (ROOT / "README.md").read_text()
    words = len(text.split())
    assert length("README.md") <= 180 and words <= 2200
    assert history(text) == []


def history(text):
    """Paragraphs with a commit hash, but for conditions, which name torch, right above or below a table."""
    blocks = re.findall(r"(?:^\|.*\n?)+|(?:^[^|\n].*\n?)+", text, re.M)           # of table rows, or of prose
    table = [False, *(block.startswith("|") for block in blocks), False]
    return [block.strip() for i, block in enumerate(blocks)
            if HASH.search(block) and not (", torch " in block and any(table[i:i + 3]))]


def test_a_commit_hash_in_prose_is_found():
    """Numbers and words are no hashes, and a table's line of conditions may have one."""
    table, conditions = "| a |\n|---|\n| 1 |\n", "NVIDIA H200, torch 2.11, commit 99fe009"
    assert not history(f"As said.\n\n{conditions}\n\n{table}{conditions}\n\nEnd 1234567 acceded, 10000000.\n")
    assert history(f"Clusters came with 6d8492d.\n\nA text.\n\n{table}") == ["Clusters came with 6d8492d."]
    assert len(history(f"{table}\nA text.\n\nFaster since afe9e10.\n\n" + "a1" * 20)) == 2
