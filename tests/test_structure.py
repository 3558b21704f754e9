"""What may import what, and that the code is clean. python -m pytest tests/test_structure.py"""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "nvfp4": set(),
    "fp4_gemm": set(),
    "lora": set(),
    "aqn": set(),
    "grpo": set(),
    "tasks": set(),
    "ops.elementwise": set(),
    "ops.attention": set(),
    "ops.sampling": set(),
    "ops.logprobs": set(),
    "tools.weights": {"nvfp4", "lora"},
    "model": {
        "nvfp4",
        "fp4_gemm",
        "lora",
        "ops.elementwise",
        "ops.attention",
        "ops.logprobs",
        "tools.weights",
    },
    "rollout": {"model", "ops.attention", "ops.sampling"},
    "tools.export": {"model", "tools.weights", "lora", "fp4_gemm", "nvfp4"},
    "tools.memory": {"tools.weights", "fp4_gemm", "ops.logprobs", "model", "rollout"},
    "tools.report": set(),
    "tools.run": {"lora", "tools.report"},
    "tools.flags": {"aqn", "grpo", "model", "tasks"},
    "tools.ranks": set(),
    "tools.optimizer": set(),
    "tools.diagnostics": {"tools.ranks", "tools.run"},
    "tools.launch": {
        "lora",
        "model",
        "rollout",
        "tasks",
        "tools.diagnostics",
        "tools.flags",
        "tools.ranks",
        "tools.run",
        "tools.weights",
    },
    "train": {
        "aqn",
        "grpo",
        "lora",
        "rollout",
        "tools.diagnostics",
        "tools.launch",
        "tools.optimizer",
        "tools.ranks",
    },
}
PACKAGES = {"ops", "tools"}
BEHIND = {"bench", "experiments", "tests"}  # no module of the product may import from these


def imported(code):
    """Names of the modules that `code` imports anywhere, functions and import_module("name")
    included.
    """
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.module in PACKAGES:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                names.add(node.module or "")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__", "run_module"):
                names.add(node.args[0].value)
    return {
        name if name.startswith(("ops.", "tools.")) else name.partition(".")[0] for name in names
    }


def forbidden(folder):
    """{"a imports b"} for each import between our modules that ALLOWED does not list."""
    found = set()
    for name, allowed in ALLOWED.items():
        ours = imported((folder / f"{name.replace('.', '/')}.py").read_text()) & (
            ALLOWED.keys() | BEHIND
        )
        found |= {f"{name} imports {other}" for other in ours - allowed}
    return found


def test_imports_point_one_way():
    """Inside functions too. The table itself has no circle, so what keeps to the table has none."""
    graphlib.TopologicalSorter(ALLOWED).prepare()  # raises CycleError
    assert forbidden(ROOT) == set()


def test_every_module_has_its_place():
    """Only git's files count: a clone may hold a file of its user beside ours, as README's
    mine.py.
    """
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    names = {name.removesuffix(".py").replace("/", ".") for name in listed.split()}
    names = {
        name
        for name in names
        if name.partition(".")[0] not in BEHIND and not name.endswith("__init__")
    }
    assert names in (ALLOWED.keys(), set())  # nothing: no git, or another user's clone


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_is_clean(command):
    """With pyproject.toml's settings."""
    ruff = [sys.executable, "-m", "ruff", *command]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
