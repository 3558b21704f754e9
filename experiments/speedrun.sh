#!/usr/bin/env bash
# The three runs of SPEEDRUN.md, one after the other:
#   bash experiments/speedrun.sh OUT [flags of train.py …]
# OUT/0, OUT/1 and OUT/2 are the folders of the runs. OUT/times.jsonl gets a line for each: the seconds that train.py took,
# the accuracy of its last evaluation, the GPU, versions and the commit.
set -euo pipefail
[ $# -ge 1 ] || { sed -n 2,5p "$0"; exit 2; }
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
for seed in 0 1 2; do
    began=$(date +%s.%N)
    python train.py "$@" --seed $seed --out "$out/$seed"
    ended=$(date +%s.%N)
    python - "$out/$seed" "$began" "$ended" >> "$out/times.jsonl" <<'END'
import json
import sys

from bench import common
from tools import report

folder, began, ended = sys.argv[1:]
last = [record for record in report.read(folder).values() if record["kind"] == "eval"][-1]
measured = dict(seed=folder[-1], seconds=float(ended) - float(began), accuracy=last["eval_greedy"])
print(json.dumps(measured | dict(steps=last["step"], problems=last["problems"]) | common.conditions()))
END
    tail -n 1 "$out/times.jsonl"
done
