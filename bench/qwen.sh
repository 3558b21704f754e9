#!/usr/bin/env bash
# What a user waits for on one GPU with real checkpoints: loading, an evaluation, whole steps on GSM8K.
#   bash bench/qwen.sh MODELS DATA OUT [NAME…]
# MODELS holds the two .gguf files, DATA train.jsonl and test.jsonl. OUT/NAME.jsonl is the metrics.jsonl of
# a run, OUT/NAME.txt what it printed. With NAMEs only these runs are made.
# `python -m bench.tables qwen` makes its tables of results/qwen/.
set -euo pipefail
models=$(realpath "$1") data=$(realpath "$2") out=$(realpath -m "$3")
shift 3
names=$*
cd "$(dirname "$0")/.."
mkdir -p "$out"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -c 'import json; from bench import common; print(json.dumps(common.conditions()))' > "$out/conditions.json"
go() {      # NAME SIZE flags…
  local name=$1 size=$2
  shift 2
  [[ -z $names || " $names " == *" $name "* ]] || return 0
  echo "$name"
  python3 train.py --model "$models/qwen2.5-coder-$size-instruct-q4_k_m.gguf" --task gsm8k --data "$data/train.jsonl" \
    --max-new-tokens 400 --out "$folder/$name" "$@" 2>&1 | sed "s|$models/||g; s|$folder/||g" > "$out/$name.txt"
  cp "$folder/$name/metrics.jsonl" "$out/$name.jsonl"
}
steps="--prompts 32 --eval-every 100"
go 0.5b-nvfp4 0.5b $steps --steps 20 --lr 1e-4 --micro-tokens 32768
go 0.5b-test 0.5b --steps 0 --test "$data/test.jsonl"
go 1.5b-nvfp4 1.5b $steps --steps 20 --lr 5e-5 --micro-tokens 16384
go 1.5b-test 1.5b --steps 0 --test "$data/test.jsonl"
go 1.5b-bf16 1.5b $steps --steps 8 --lr 5e-5 --micro-tokens 16384 --quant bf16 --no-aqn
