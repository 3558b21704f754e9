"""Quick start, three times: `python results/quickstart.py run` makes the logs that `table` and `plot` read.

Each run is the first command of README.md with another seed, alone on the machine. The logs hold everything
that the table and the picture show.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
LOGS = ROOT / "results" / "quickstart"
SEEDS = (0, 1, 2)


def run(*seeds):
    """Train each seed, or those named, with the default flags; keep config and metrics."""
    for seed in map(int, seeds or SEEDS):
        began = time.perf_counter()
        made = subprocess.run([sys.executable, "train.py", "--seed", str(seed),
                               "--out", f"runs/quickstart/seed{seed}"], cwd=ROOT)
        seconds = round(time.perf_counter() - began)
        if made.returncode:
            sys.exit(made.returncode)                                       # train.py printed why
        (LOGS / f"seed{seed}").mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "metrics.jsonl"):
            shutil.copy(ROOT / "runs" / "quickstart" / f"seed{seed}" / file, LOGS / f"seed{seed}" / file)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                                capture_output=True, text=True)
        import torch
        conditions = dict(seconds=seconds, cores=os.cpu_count(), torch=torch.__version__,
                          commit=commit.stdout.strip())
        (LOGS / f"seed{seed}" / "conditions.json").write_text(json.dumps(conditions) + "\n")


def table():
    """Print the table of results/README.md."""
    import runs
    print("| seed | right and ended: before → after | right, ended or not: before → after "
          "| minutes, all included | peak GB |")
    print("|---|---|---|---|---|")
    for seed in SEEDS:
        records = list(runs.read(LOGS / f"seed{seed}").values())
        evals = [r for r in records if r["kind"] == "eval"]
        seconds = json.loads((LOGS / f"seed{seed}" / "conditions.json").read_text())["seconds"]
        print(f"| {seed} | {evals[0]['eval_greedy']:.2f} → {evals[-1]['eval_greedy']:.2f} "
              f"| {evals[0]['eval_greedy_loose']:.2f} → {evals[-1]['eval_greedy_loose']:.2f} "
              f"| {seconds / 60:.1f} | {max(r['memory_gb'] for r in records if r['kind'] == 'step'):.1f} |")
    conditions = json.loads((LOGS / f"seed{SEEDS[0]}" / "conditions.json").read_text())
    print(f"\n{evals[0]['problems']} held-out problems, {conditions['cores']} CPU cores, "
          f"torch {conditions['torch']}, commit {conditions['commit']}; "
          "made by `python results/quickstart.py run`, logs in `results/quickstart/`.")


def plot():
    """Draw README.md's picture."""
    import runs
    runs.plot([LOGS / f"seed{seed}" for seed in SEEDS], ROOT / "results" / "curves.png")


if __name__ == "__main__":
    {"run": run, "table": table, "plot": plot}[sys.argv[1]](*sys.argv[2:])
