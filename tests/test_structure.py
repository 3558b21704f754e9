"""What keeps the code readable: format, size, imports. python -m pytest tests/test_structure.py"""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVIDENCE = (
    "bench",
    "docs",
    "experiments",
    "tests",
)  # no module of the product may import from these
ALONE = {"nvfp4", "fp4_gemm", "lora", "aqn", "grpo", "tasks"}  # and every file of ops/
LINES = 60  # of a function that is no Triton kernel


def tracked(*patterns):
    """→ names of the files that git knows. A clone may hold others of its user, such as mine.py,
    and no test reads these. Empty: no git here, or another user's clone.
    """
    git = ["git", "ls-files", *patterns]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    return [
        name for name in listed if (ROOT / name).is_file()
    ]  # it may be deleted, not yet so in git


def product():
    """→ {module: path} of the files at the root, in ops/ and in tools/."""
    listed = tracked("*.py")
    if not listed:
        pytest.skip("no git here, or another user's clone")
    paths = {name.removesuffix(".py").replace("/", "."): ROOT / name for name in listed}
    return {name: path for name, path in paths.items() if not name.startswith(EVIDENCE)}


def imported(code):
    """Names of the modules that `code` imports anywhere, functions and import_module("name")
    included.
    """
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__", "run_module"):
                names.add(node.args[0].value)
    return names


def test_imports_point_one_way():
    """Inside functions too. A file that stands alone imports none of ours. Of the files at the root
    only train.py, which puts the parts together, imports tools/.
    """
    modules = product()
    graph = {}
    for name, path in modules.items():
        names = imported(path.read_text())
        assert not [other for other in names if other.partition(".")[0] in EVIDENCE], name
        graph[name] = names & modules.keys()
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    for name, others in graph.items():
        if name in ALONE or name.startswith("ops."):
            assert not others, name
        if "." not in name and name != "train":
            assert not [other for other in others if other.startswith("tools")], name


def test_no_private_name_of_a_library_is_imported():
    """Any release may change it."""
    for path in product().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                assert not [n for n in names if n.startswith("_")], f"{path.name}: {node.module}"


def test_functions_are_short():
    """But for Triton's kernels."""
    for path in product().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = {ast.unparse(d).partition("(")[0] for d in node.decorator_list}
                if "jit" not in decorators:
                    assert node.end_lineno - node.lineno < LINES, f"{path.name}: {node.name}"


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff_is_clean(command):
    """With pyproject.toml's settings, which bound a function's complexity. Only git's files."""
    files = tracked("*.py")
    if not files:
        pytest.skip("no git here, or another user's clone")
    ruff = [sys.executable, "-m", "ruff", *command, *files]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_file_map_names_every_file_of_the_method_once():
    """README's table, in the order in which they are read, marks those that stand alone. An
    installation has them too.
    """
    rows = re.findall(r"^\| `(\w+)\.py` \|(.*)\|$", (ROOT / "README.md").read_text(), re.M)
    names = [name for name, _ in rows]
    assert sorted(names) == sorted(name for name in product() if "." not in name)
    assert {name for name, text in rows if "*Alone" in text} == ALONE
    (listed,) = re.findall(r"^py-modules = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert ast.literal_eval(listed) == names


def test_the_version_is_one():
    pages = {"pyproject.toml": 'version = "(.*)"', "CITATION.cff": "version: (.*)"}
    pages |= {"CHANGELOG.md": "## (.*)"}
    found = [re.search(f"^{p}", (ROOT / n).read_text(), re.M)[1] for n, p in pages.items()]
    assert len(set(found)) == 1, found
