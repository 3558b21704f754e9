"""docs/exercises.md: a function that is emptied turns its named test red, and the real one green.

python -m pytest tests/test_exercises.py -m "slow or not slow"
"""

import ast
import os
import re
import shlex
import shutil
import sys
import tempfile

import pytest
from command import ROOT, forks
from test_structure import tracked

PAGE = (ROOT / "docs/exercises.md").read_text()
# each exercise: its function (module.name or module.Class.name), and what its command gives pytest
EXERCISES = [
    (name, shlex.split(command))
    for name, command in re.findall(
        r"^Empty `([\w.]+)`.*?```bash\npython -m pytest (.*?)\n```", PAGE, re.M | re.S
    )
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of git's files, in which a test may break the code."""
    folder = tmp_path_factory.mktemp("exercises")
    for name in tracked("*.py", "pyproject.toml", "README.md", "docs", "tests"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def emptied(code, names):
    """→ the code in which the function of these names, a class before its method, has lost its
    body, but for its docstring."""
    node = ast.parse(code)
    for name in names:
        node = next(n for n in node.body if getattr(n, "name", None) == name)
    first = node.body[1 if ast.get_docstring(node) else 0]
    lines = code.splitlines(keepends=True)
    body = " " * first.col_offset + "raise NotImplementedError\n"
    return "".join([*lines[: first.lineno - 1], body, *lines[node.end_lineno :]])


def run_pytest(folder, arguments, log):
    """In a process that was forked with torch imported: pytest, with the modules of a folder."""
    sys.stdout = sys.stderr = open(log, "w")
    sys.path = [str(folder), *(path for path in sys.path if not path.startswith(str(ROOT)))]
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{ROOT}{os.sep}"):
            del sys.modules[name]
    os.chdir(folder)
    sys.dont_write_bytecode = True  # two versions of a file may have the same second and size
    code = pytest.main(["-q", "-x", *arguments])
    sys.stdout.flush()
    os._exit(code)


def outcome(folder, arguments):
    """→ pytest's exit code, and what it printed."""
    with tempfile.NamedTemporaryFile("r") as log:
        process = forks().Process(target=run_pytest, args=(folder, arguments, log.name))
        process.start()
        process.join(120)
        return process.exitcode, log.read()


def test_the_page_has_eight_exercises_and_names_each_in_its_table():
    assert len(EXERCISES) == 8 == PAGE.count("<details>")
    files = re.findall(r"^\| \d .*?`(\w+)\.py`", PAGE, re.M)
    assert files == [name.partition(".")[0] for name, _ in EXERCISES]


@pytest.mark.slow
def test_the_real_functions_pass_their_tests(clone):
    for _, arguments in EXERCISES:
        code, said = outcome(clone, arguments)
        assert code == 0, said  # it is 5 if no test has such a name


@pytest.mark.parametrize(
    "name, arguments",
    [
        pytest.param(*exercise, id=exercise[0], marks=() if number == 0 else pytest.mark.slow)
        for number, exercise in enumerate(EXERCISES)
    ],
)
def test_an_emptied_function_turns_its_test_red(clone, name, arguments):
    module, *names = name.split(".")
    path = clone / f"{module}.py"
    code = path.read_text()
    path.write_text(emptied(code, names))
    try:
        code_of_pytest, said = outcome(clone, arguments)
    finally:
        path.write_text(code)
    assert code_of_pytest == 1 and "NotImplementedError" in said, said
