"""README's kernel table from results/gemm_bench.jsonl: `python results/gemm_table.py`."""

import json
from pathlib import Path

records = [json.loads(line) for line in (Path(__file__).parent / "gemm_bench.jsonl").read_text().splitlines()]
latest = {(r["shape"], r["M"]): r for r in records}            # an appended run replaces the one before
shapes = list(dict.fromkeys(shape for shape, _ in latest))
rows = sorted({M for _, M in latest})
print("| NVFP4 over bf16 | N × K |" + "".join(f" M={M} |" for M in rows))
print("|---|---|" + "---|" * len(rows))
for shape in shapes:
    cells = [latest.get((shape, M)) for M in rows]
    first = next(r for r in cells if r)
    ratios = "".join(f" {r['speedup']:.2f} |" if r else " |" for r in cells)
    print(f"| {shape} | {first['N']} × {first['K']} |{ratios}")
last = records[-1]
where = f"{last['gpu']}, torch {last['torch']}, triton {last['triton']}, commit {last['commit']}"
print(f"\n{where}; time of cuBLAS bf16 over\n"
      "ours in the same run, without LoRA, median of CUDA-graph replays over weights that do not fit into\n"
      "L2, each kernel checked against float64 first; by `python bench.py gemm --out FILE.jsonl`, log in\n"
      "`results/gemm_bench.jsonl`.")
