"""python -m pytest tests/test_qwen.py -q    what a user waits for; python3 has a stand-in"""
import json
import os
import subprocess

from command import ROOT

FAKE = '''#!/bin/bash
[ "$1" = -c ] && { echo '{"commit": "c"}'; exit; }
while [ $# -gt 0 ]; do
  case $1 in --out) out=$2;; --model) model=$2;; --steps) steps=$2;; esac
  shift
done
[ "$steps" = 8 ] && { echo "train.py: out of memory" >&2; exit 2; }
mkdir -p "$out" && echo "{\\"steps\\": $steps}" > "$out/metrics.jsonl"
echo "$model: loaded in 7 s; $out/curves.png"
'''


def run(folder, *names):
    (folder / "python3").write_text(FAKE)
    (folder / "python3").chmod(0o755)
    script, out = ROOT / "results/qwen.sh", folder / "out"
    return subprocess.run(["bash", script, folder / "models", folder, out, *names],
                          env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}, cwd=folder,
                          capture_output=True, text=True)


def test_each_run_leaves_its_metrics_and_what_it_printed_without_paths_of_the_machine(tmp_path):
    done = run(tmp_path, "0.5b-test", "1.5b-nvfp4")
    assert done.returncode == 0 and done.stdout.split() == ["0.5b-test", "1.5b-nvfp4"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "0.5b-test.jsonl", "0.5b-test.txt", "1.5b-nvfp4.jsonl", "1.5b-nvfp4.txt", "conditions.json"]
    assert json.loads((tmp_path / "out/1.5b-nvfp4.jsonl").read_text()) == {"steps": 20}
    assert json.loads((tmp_path / "out/conditions.json").read_text()) == {"commit": "c"}
    assert (tmp_path / "out/0.5b-test.txt").read_text() == (
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf: loaded in 7 s; 0.5b-test/curves.png\n")


def test_a_run_that_fails_ends_the_script_and_its_error_is_kept(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and done.stdout.split()[-1] == "1.5b-bf16"
    assert (tmp_path / "out/1.5b-bf16.txt").read_text() == "train.py: out of memory\n"
