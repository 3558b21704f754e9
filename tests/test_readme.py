"""README stays true: its file map, the direction of imports, what "copyable alone" means, its glossary."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAP = re.findall(r"^\| `(\w+)\.py` \| (\d+) \|(.*)\|$", README, re.M)       # (name, most lines, what it is)
COPYABLE = [name for name, _, text in MAP if "Copyable alone" in text]
# what may import what, at module level (DESIGN.md): a name may import those in its list
IMPORTS = {"checkpoint": {"nvfp4", "fp4_gemm", "lora"},
           "model": {"nvfp4", "fp4_gemm", "lora", "decode", "checkpoint"},
           "rollout": {"model", "decode", "gumbel"}, "runs": {"lora"}}


def test_the_file_map_names_every_module():
    """Nothing at top level is unnamed, nothing named is missing. In a clone a file of one's own, as README's
    mine.py, may lie beside them."""
    git = ["git", "ls-files", "*.py"] if shutil.which("git") else ["true"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    listed = listed or [p.name for p in ROOT.glob("*.py")]                      # no clone, or another user's
    assert sorted(f"{name}.py" for name, *_ in MAP) == sorted(name for name in listed if "/" not in name)


@pytest.mark.parametrize("name, lines", [entry[:2] for entry in MAP])
def test_a_module_keeps_its_length_and_the_direction_of_imports(name, lines):
    """A file stops where the map says; what it imports of ours at module level is what the design allows."""
    source = (ROOT / f"{name}.py").read_text()
    assert source.count("\n") <= int(lines)
    ours = {entry[0] for entry in MAP}
    imported = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    allowed = ours if name in ("train", "bench", "memory") else IMPORTS.get(name, set())
    assert imported & ours <= allowed


def test_the_modules_together_stay_within_the_budget():
    """The whole of it is to be read."""
    assert sum((ROOT / f"{name}.py").read_text().count("\n") for name, *_ in MAP) <= 5119


@pytest.mark.parametrize("name", COPYABLE)
def test_a_copyable_file_imports_and_runs_its_demo_alone(name, tmp_path):
    """From an empty folder that holds only that file, without this repository on the path."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    done = subprocess.run([sys.executable, "-I", f"{name}.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3, "a demo prints something that teaches"


def test_seven_files_are_copyable():
    """The parametrised test above finds nothing to check if the map's wording changes: that must fail."""
    assert COPYABLE == ["nvfp4", "fp4_gemm", "lora", "aqn", "gumbel", "grpo", "tasks"]


def test_the_glossary_explains_every_key_of_the_committed_logs():
    """Each key in results/quickstart's records stands in the glossary, and each glossary key is written."""
    rows = re.findall(r"^\| (`.*?) \|", README.split("## Metrics")[1], re.M)
    glossary = set(re.findall(r"`(\w+)`", "".join(rows)))
    logs = sorted((ROOT / "results" / "quickstart").glob("*/metrics.jsonl"))
    assert len(logs) == 3
    written = {key for log in logs for text in log.read_text().splitlines() for key in json.loads(text)}
    assert written - {"kind"} == glossary


def test_the_quickstart_table_is_what_its_script_makes_of_the_logs():
    """No number in README without its log."""
    table = subprocess.run([sys.executable, "results/quickstart.py", "table"], cwd=ROOT,
                           capture_output=True, text=True, check=True).stdout.strip()
    assert table.count("\n") >= 4 and table in README


@pytest.mark.parametrize("name, rows", [("gemm", 20), ("rollout", 7), ("step", 13), ("recipes", 6)])
def test_the_tables_of_speed_are_what_their_script_makes_of_the_logs(name, rows):
    """And so are their conditions."""
    table = subprocess.run([sys.executable, "results/tables.py", name], cwd=ROOT, capture_output=True,
                           text=True, check=True).stdout
    assert table.count("\n|") >= rows and table in README


def test_the_figures_of_the_run_on_a_gpu_are_those_of_its_log():
    """Reward and accuracy of results/addition."""
    log = [json.loads(line) for line in (ROOT / "results/addition/metrics.jsonl").read_text().splitlines()]
    late = [r["reward"] for r in log if r["kind"] == "step" and 100 <= r["step"] < 150]
    assert len(late) == 50 and f"mean reward {sum(late) / 50:.2f}".replace("0.", ".") in README
    first, *_, last = (r["eval_greedy"] for r in log if r["kind"] == "eval")
    assert f"held-out greedy {first:.2f} → {last:.2f}" in README


def test_ci_runs_the_test_command_of_the_readme(tmp_path):
    """.ci/run picks it from README, runs it in an environment of its own and exits with its code."""
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
