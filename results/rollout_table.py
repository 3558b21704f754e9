"""README's sampler tables from results/rollout_bench.jsonl: `python results/rollout_table.py`."""

import json
from pathlib import Path

log = Path(__file__).parent / "rollout_bench.jsonl"
records = [json.loads(line) for line in log.read_text().splitlines()]
# an appended run replaces the one before
latest = {(r["shape"], r["weights"], r["batch"], r.get("whole", False)): r for r in records}
batches = sorted({batch for _, _, batch, whole in latest if not whole})
print("| tokens/s (share of the bound) |" + "".join(f" B={b} |" for b in batches))
print("|---|" + "---|" * len(batches))
names = {"135m": "SmolLM2-135M", "nvfp4": "NVFP4", "bf16": "bf16",
         "hf": "Hugging Face generate, bf16, no LoRA"}
for shape, weights in dict.fromkeys((s, w) for s, w, _, whole in latest if not whole):
    row = [latest.get((shape, weights, b, False)) for b in batches]
    cells = "".join(f" {r['tok_s']:,.0f} ({r['of_bound']:.2f}) |" if r else " |" for r in row)
    print(f"| {names.get(shape) or f'Qwen2.5-{shape.upper()}'}, {names[weights]} |{cells}")
    plain = [latest.get((shape, "bf16", b, False)) for b in batches]
    if weights == "nvfp4" and any(plain):
        ratios = "".join(f" ×{r['tok_s'] / p['tok_s']:.2f} |" if r and p else " |"
                         for r, p in zip(row, plain, strict=True))
        print(f"| … over our own bf16 |{ratios}")
last = records[-1]
for (shape, weights, batch, whole), r in latest.items():
    if whole:
        steady = latest[shape, weights, batch, False]["tok_s"]
        print(f"\nA whole rollout of {shape.upper()} in {names[weights]}, 32 prompts × 16 samples in {batch} "
              f"slots, mean length {r['mean_length']:.0f},\nlongest {r['longest']}, prefill, refill and tail "
              f"included: {r['tok_s']:,.0f} tokens/s, {r['tok_s'] / steady:.2f} of the steady rate.")
where = f"{last['gpu']}, torch {last['torch']}, triton {last['triton']}, commit {last['commit']}"
print(f"\n{where}; random\nweights of each shape, LoRA of rank 32, temperature 1, mean context 1000, without "
      "prefill and capture"
      + ("; one early\nmeasurement of 31 steps with torch's profiler on, before the kernel's last changes"
         if last.get("profiler") else "")
      + ".\nBy `python bench.py rollout --model-shape SHAPE`, log in `results/rollout_bench.jsonl`.")
