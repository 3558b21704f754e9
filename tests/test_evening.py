"""docs/evening.md and docs/kernel.md: each command prints what the page says.

python -m pytest tests/test_evening.py -m "slow or not slow"
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT
from test_structure import tracked

from docs import figures, notebook

PAGE = (ROOT / "docs/evening.md").read_text()
COMMAND = r"```bash\n(.*?)```\n```text\n(.*?)```"
STATIONS = re.findall(rf"^## (\d)\. .*?{COMMAND}", PAGE, re.M | re.S)
KERNEL = re.findall(COMMAND, (ROOT / "docs/kernel.md").read_text(), re.S)
QUICK = ("1", "2", "4")
TRAINED = ("5", "8")
NUMBER = r"\d+\.\d+(?:e[+-]?\d+)?"  # whole numbers must be equal


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the files in git's index, as they are now, in a repository of its own. A clone may
    hold files of its user, such as a virtual environment.
    """
    folder = tmp_path_factory.mktemp("evening")
    for name in tracked():
        if not name.startswith("results/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "copy"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_the_page_has_eight_stations_each_with_a_question():
    assert [number for number, *_ in STATIONS] == list("12345678")
    assert len(KERNEL) == 4
    assert PAGE.count("**Question.**") == PAGE.count("**Look at**") == PAGE.count("<details>") == 8


def test_the_notebook_is_the_page():
    """Made again by python -m docs.notebook."""
    assert notebook.NOTEBOOK.read_text() == notebook.notebook(PAGE)
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    commands = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"][1:]
    assert [c.removeprefix("%%bash\n") for c in commands] == [c.strip() for _, c, _ in STATIONS]


def test_the_script_draws_each_figure_that_a_page_shows(tmp_path):
    figures.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == set(re.findall(r"figures/(\w+\.png)", PAGE))


@pytest.mark.parametrize(
    "number, command, printed",
    [
        pytest.param(*station, marks=() if station[0] in QUICK else pytest.mark.slow, id=station[0])
        for station in STATIONS
    ]
    + [pytest.param("kernel", *pair, id=f"kernel-{i}") for i, pair in enumerate(KERNEL)],
)
def test_a_command_prints_what_the_page_says(clone, number, command, printed):
    """Line by line, "…" stands for more. Numbers to 5 %, because other CPUs add in another order;
    where a policy was trained to 30 %, because it may then draw another token and go its own way.
    """
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=clone,
        env={"PATH": path, "PYTHONPATH": str(clone), "HOME": str(clone)},
        capture_output=True,
        text=True,
    )
    lines = iter(done.stdout.splitlines())
    for wanted in printed.splitlines():
        if wanted == "…":
            continue
        pattern = ""
        for piece in re.split(f"({NUMBER}|…)", wanted):
            if piece == "…":
                pattern += ".*?"
            elif re.fullmatch(NUMBER, piece):
                pattern += f"({NUMBER})"
            else:
                pattern += re.escape(piece)
        found = next((m for m in (re.search(pattern, line) for line in lines) if m), None)
        assert found, (wanted, done.stdout, done.stderr[-2000:])
        for got, want in zip(found.groups(), re.findall(NUMBER, wanted), strict=True):
            within = 0.3 if number in TRAINED else 0.05
            assert float(got) == pytest.approx(float(want), rel=within, abs=0.006), wanted
