"""Tables of the two READMEs, made from the logs alone: python results/tables.py NAME

    results, hardware               README.md: what was measured, and which model needs which card
    gemm, rollout, step, recipes    results/README.md: every measurement of speed and memory
    turns                           results/README.md: the speed of two commits in turns
    peers                           results/README.md: vLLM on the same card
    qwen                            results/README.md: what a user waits for, and TRL beside us
"""

import argparse
import json
import math
import re
import statistics
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import memory  # noqa: E402
import runs  # noqa: E402

LOGS = Path(__file__).parent
ANSWERS, PROMPT, MEAN = 128, 150, 500           # of a step in `hardware`; tokens of a prompt and of an answer

NAMES = {"135m": "SmolLM2-135M", "nvfp4": "NVFP4", "bf16": "bf16",
         "hf": "Hugging Face generate, bf16, no LoRA", "hf-lora": "Hugging Face generate, bf16, LoRA",
         "hf-nf4": "transformers + bitsandbytes NF4 + PEFT *"}


def read(name, path=None):
    return [json.loads(line) for line in Path(path or LOGS / f"{name}_bench.jsonl").read_text().splitlines()]


def head(*columns):
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")


def model(shape):
    return NAMES.get(shape) or f"Qwen2.5-{shape.upper()}"


def note(records, text):
    """The conditions of the records that a table shows: each machine with the commits that ran on it."""
    places = {}
    for r in records:
        place = f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}"
        places.setdefault(place, {})[r["commit"]] = True
    found = [f"{place}, commit {' and '.join(commits)}" for place, commits in places.items()]
    say("; ".join([*found, text]))


def card(r):
    """"NVIDIA H100 80GB HBM3, 580.159.04" → "H100"."""
    return r["gpu"].split()[1].strip(",")


def say(text):
    print("\n" + textwrap.fill(text, 110))


def gemm():
    latest = {(r["shape"], r["M"]): r for r in read("gemm")}        # an appended run replaces the one before
    rows = sorted({M for _, M in latest})
    head("NVFP4 over bf16", "N × K", *(f"M={M}" for M in rows))
    for shape in dict.fromkeys(shape for shape, _ in latest):
        cells = [latest.get((shape, M)) for M in rows]
        first = next(r for r in cells if r)
        ratios = "".join(f" {r['speedup']:.2f} |" if r else " |" for r in cells)
        print(f"| {shape} | {first['N']} × {first['K']} |{ratios}")
    note(latest.values(), "time of cuBLAS bf16 over ours in the same run, without LoRA, median of CUDA-graph "
         "replays over weights that do not fit into L2, each kernel checked against float64 first; by "
         "`python results/bench.py gemm --out FILE.jsonl`, log in `results/gemm_bench.jsonl`.")


def rollouts():
    """→ the last records of decode steps, (kind, shape, weights, rows) → record, and of whole rollouts. kind:
    0 rows in groups of one prompt, 1 each with a prompt of its own, 2 Hugging Face."""
    latest, whole = {}, {}
    for r in read("rollout"):
        key, samples = (r["shape"], r["weights"], r["batch"]), r.get("samples", 1)
        if r.get("whole"):
            whole[key] = r
        elif r["weights"].startswith("hf"):
            latest[(2, *key)] = r
        elif samples == 1:      # so were all until 9c33be7: rows of one prompt each read a copy of their own
            latest[(1, *key)] = r
        elif samples == min(16, r["batch"]):
            latest[(0, *key)] = r
    return latest, whole


def rollout():
    latest, whole = rollouts()
    batches = sorted({batch for *_, batch in latest})
    head("tokens/s (share of the bound)", *(f"B={b}" for b in batches))
    for kind, shape, weights in sorted(dict.fromkeys(key[:3] for key in latest), key=lambda key: key[0]):
        row = [latest.get((kind, shape, weights, b)) for b in batches]
        cells = "".join(f" {r['tok_s']:,.0f} ({r['of_bound']:.2f}) |" if r else " |" for r in row)
        what = {0: "", 1: ", nothing in common", 2: f", {card(next(filter(None, row)))}"}[kind]
        print(f"| {model(shape)}, {NAMES[weights]}{what} |{cells}")
        plain = [latest.get((kind, shape, "bf16", b)) for b in batches]
        if weights == "nvfp4" and any(plain):
            ratios = "".join(f" ×{r['tok_s'] / p['tok_s']:.2f} |" if r and p else " |"
                             for r, p in zip(row, plain, strict=True))
            print(f"| … over our own bf16 |{ratios}")
    for (shape, weights, batch), r in whole.items():
        shares = [f", {r['tok_s'] / steady['tok_s']:.2f} of the steady rate of {batch} rows {what}"
                  for kind, what in ((1, "with nothing in common"), (0, "in groups"))
                  if (steady := latest.get((kind, shape, weights, batch)))]
        say(f"A whole rollout of {model(shape)} in {NAMES[weights]}, 32 prompts × 16 samples in {batch} "
            f"slots, mean length {r['mean_length']:.0f}, longest {r['longest']}, prefill, refill and tail "
            f"included: {r['tok_s']:,.0f} tokens/s (commit {r['commit']}){''.join(shares)}.")
    note([*latest.values(), *whole.values()], "random weights of each shape, LoRA of rank 32, temperature 1, "
         "mean context 1000, without prefill and capture. By `python results/bench.py rollout --model-shape "
         "SHAPE`, log in `results/rollout_bench.jsonl`.")


def steps():
    """→ (shape, prompts, samples, new, micro-tokens, weights, cap, ranks) → the last session's records."""
    groups = {}
    for r in read("step"):
        key = (r["shape"], r["prompts"], r["samples"], r["new"], r["micro_tokens"], r["weights"],
               r.get("cap_gb"), r.get("ranks", 1), r["commit"])
        if r.get("step", 1):                                            # the first one compiles
            groups.setdefault(key, []).append(r)
    return {key[:-1]: found for key, found in groups.items()}


def step():
    latest = steps()
    head("model", "prompts × answers × tokens", "micro-tokens", "weights", "rollout s", "tokens/s",
         "update s", "tokens/s", "peak GB", "planned")
    for (shape, prompts, samples, new, micro, weights, cap, ranks), found in latest.items():
        middle = {k: statistics.median(r[k] for r in found)
                  for k in ("rollout_s", "rollout_tok_s", "update_s", "update_tok_s", "peak_gb")}
        only = found[0].get("update_only")
        sampled = "– | –" if only else f"{middle['rollout_s']:.1f} | {middle['rollout_tok_s']:,.0f}"
        planned = f"{found[-1]['planned_gb']:.1f}" if "planned_gb" in found[-1] else ""
        where = f", capped at {cap:g} GB" if cap else f", {ranks} GPUs" if ranks > 1 else ""
        where += f", rank {found[0]['rank']}" if found[0].get("rank", 32) != 32 else ""
        print(f"| {model(shape)}{where} | {ranks * prompts} × {samples} × {new} | {micro} | {NAMES[weights]} "
              f"| {sampled} | {middle['update_s']:.2f} | {middle['update_tok_s']:,.0f} "
              f"| {middle['peak_gb']:.1f} | {planned} |")
    note((r for found in latest.values() for r in found), "random weights of each shape, prompts of 128 "
         "tokens, LoRA of rank 32 or as said, gradient checkpointing; the median of the steps after the "
         "first, which compiles. * its sampling is extrapolated from 32 steps in the middle of the answers. "
         "By `python results/bench.py step` and `python results/qlora_step.py`, log in "
         "`results/step_bench.jsonl`.")


def recipes():
    records = {r["recipe"]: r for r in read("recipes") if r["kind"] == "step" and r["step"]}
    head("recipe", "answers a step", "mean length", "rollout s", "update s", "peak GB", "planned")
    for name, r in records.items():
        print(f"| `{name}` | {r['flags']['prompts']} × {r['flags']['group_size']} | {r['length']:.0f} |",
              *(f"{r[key]:.1f} |" for key in ("rollout_s", "update_s", "memory_gb", "planned_gb")))
    note(records.values(), "the second of two steps of at most 256 new tokens, on random weights. By `python "
         "results/recipes.py try NAME --data train.jsonl --out FILE.jsonl`, log in "
         "`results/recipes_bench.jsonl`.")


def turns():
    records = read("turns", LOGS / "turns.jsonl")
    head("work", "rows", "commits", "before, ms", "after, ms", "speed kept")
    for old, new in zip(records[::2], records[1::2], strict=True):
        entry(f"{'an update' if old['work'] == 'update' else 'a decode step'} of {model(old['shape'])}, "
              f"{NAMES[old['weights']]}", f"{old['batch']}", f"{old['tree']}, {new['tree']}",
              f"{old['ms']:.3f}", f"{new['ms']:.3f}", f"{1 + new['faster']:.3f}")
    rounds = sorted({r["rounds"] for r in records})
    note(records[1::2], f"both commits in turns in one process, median of {rounds[0]} or {rounds[-1]} turns. "
         "By `python results/turns.py`, log in `results/turns.jsonl`.")


def peer_rows(path=None):
    """→ the records of results/peers.py; (run and card, part) → {rows or "whole": [tokens a second, …]}."""
    records, rows = read("peers", path), {}
    for r in records:
        row = rows.setdefault(((r["run"], r["card"]), r["part"]), {})
        if "tok_s" in r:
            row.setdefault(r["batch"], []).append(r["tok_s"])
    return records, rows


def over_vllm(rows, weights):
    """→ {rows or "whole": tokens a second of ours over those of vLLM's best mode in the same run}. Of several
    runs the lowest: each may have other modes of vLLM, and a card compares only with itself."""
    ratios = {}
    for run in dict.fromkeys(run for run, part in rows if part == f"ours/{weights}"):
        theirs = [row for (where, part), row in rows.items()
                  if where == run and part.startswith(f"vllm/{weights}")]
        for batch, rates in rows[run, f"ours/{weights}"].items():
            if best := [row[batch][0] for row in theirs if batch in row]:
                ratios.setdefault(batch, []).append(statistics.mean(rates) / max(best))
    return {batch: min(found) for batch, found in ratios.items()}


def peers(path=None):
    records, rows = peer_rows(path)
    batches = sorted({batch for row in rows.values() for batch in row}, key=lambda b: (b == "whole", b))
    cards = list(dict.fromkeys(run for run, _ in rows))
    words = {"vllm": "vLLM", "none": "CUDA graphs alone", "default": "torch.compile",
             "1": "one process", "2": "two processes", **NAMES}
    failed = {(r["run"], r["card"], r["part"]): r["failed"] for r in records if "failed" in r}
    head("tokens/s", *("whole rollout" if batch == "whole" else f"B={batch}" for batch in batches))
    for (run, part), row in rows.items():
        name = ", ".join(words.get(word, word) for word in part.split("/"))
        empty = "failed" if (*run, part) in failed else ""
        entry(name + (f", card {1 + cards.index(run)}" if cards[1:] else ""),
              *(" and ".join(f"{rate:,.0f}" for rate in row.get(batch, ())) or empty for batch in batches))
    for weights in "nvfp4", "bf16":
        if over := over_vllm(rows, weights):
            entry(f"**ours over vLLM's best, {NAMES[weights]}**",
                  *(f"**×{over[batch]:.2f}**" if batch in over else "" for batch in batches))
    for (_, _, part), why in failed.items():
        say(f"Failed: {part}: {why}.")
    engines = {f"vLLM {r['vllm']}, {r['kernel']}, {r['attention']}": True for r in records if r.get("kernel")}
    whole = {f"mean length {r['mean_length']:.0f}, longest {r['longest']}": True for r in records
             if r.get("batch") == "whole" and r["part"].startswith("ours")}
    shape = model(records[0]["shape"])
    note(records, f"{' and '.join(engines) or 'no NVFP4 in vLLM'}; random weights of {shape}, LoRA of rank "
         "32, temperature 1, log-prob of each token. Ours before and after vLLM. B rows: 16 share a prompt "
         "of 936 tokens, 128 tokens timed. Whole rollout: 32 prompts × 16 samples in 256 slots, prefill "
         f"included ({' and '.join(whole)}). By `python results/peers.py --out FILE.jsonl --vllm "
         "ENV/bin/python`, log in `results/peers_bench.jsonl`.")


def qwen():
    info, tests = [], []
    head("32 × 8 answers", "loading, s", "mean length", "sampling, s", "update, s", "both, s",
         "update, tokens/s: median, slowest after three steps", "peak GB")
    for place, older in ((LOGS / "qwen", False), (LOGS / "qwen" / "before", True)):
        info += read("qwen", place / "conditions.json")
        for path in sorted(place.glob("*.jsonl")):
            records = read("qwen", path)
            if path.stem == "trl":
                name = f"Coder-1.5B, bf16, TRL {records[0]['trl']} with vLLM {records[0]['vllm']}"
                step_row(name, "", records, records[-1]["peak_gb"])
                continue
            size, what = path.stem.split("-")
            load_s = re.search(r"loaded in (\d+) ?s", path.with_suffix(".txt").read_text())[1]
            name = f"Coder-{size.upper()}, {NAMES.get(what, 'NVFP4')}"
            name += f", commit {info[-1]['commit']}" if older else ""
            if what == "test":
                tests.append((name, load_s, f"{records[0]['rollout_s']:.1f}",
                              f"{records[0]['eval_greedy']:.3f}"))
            else:
                steps = [r for r in records if r["kind"] == "step"]
                step_row(name, load_s, steps, steps[-1]["memory_gb"])
    print()
    head("1,319 test problems, greedy and sampled once", "loading, s", "evaluation, s", "accuracy, greedy")
    for cells in tests:
        entry(*cells)
    note(info, "the median of all steps, GSM8K, answers of at most 400 tokens. By `bash results/qwen.sh "
         "MODELS DATA OUT` and `python results/trl_step.py`, logs in `results/qwen/`.")


def step_row(name, load_s, steps, peak_gb):
    """Print a run's row. peak_gb: since the run's start."""
    rates = [r["update_tok_s"] for r in steps if "update_tok_s" in r]               # TRL does not tell
    steps = [r | {"both_s": r["rollout_s"] + r["update_s"]} for r in steps]
    length, *seconds = (statistics.median(r[key] for r in steps)
                        for key in ("length", "rollout_s", "update_s", "both_s"))
    entry(name, load_s, f"{length:.0f}", *(f"{s:.1f}" for s in seconds),
          f"{statistics.median(rates):,.0f}, {min(rates[3:]):,.0f}" if rates else "", f"{peak_gb:.1f}")


def entry(*cells):
    print("| " + " | ".join(cells) + " |")


def each(template, *lists):
    """The template filled once for each entry of the lists."""
    return ", ".join(template.format(*values) for values in zip(*lists, strict=True))


def learned(folder):
    """A run's folder of logs → accuracy before and after, seconds, peak GB."""
    records = list(runs.read(folder).values())
    greedy = [r["eval_greedy"] for r in records if r["kind"] == "eval"]
    seconds = json.loads((folder / "conditions.json").read_text())["seconds"]
    return greedy[0], greedy[-1], seconds, max(r["memory_gb"] for r in records if r["kind"] == "step")


def results():
    import gsm8k  # here: no other table needs it, and it takes seconds
    from gsm8k_tables import arm_row, pairs_of
    head("what", "result", "time", "peak GB")
    arm = gsm8k.LOGS, gsm8k.ONE, "nvfp4", gsm8k.whole_seeds(gsm8k.LOGS, gsm8k.ONE)
    (base, *_), logs = zip(*pairs_of(*arm), strict=True)
    row = arm_row(*arm)
    after, minutes = [log.measure("greedy") for log in logs], max(log.seconds for log in logs) / 60
    entry(f"**learns** GSM8K: Qwen2.5-Coder-1.5B (Q4_K_M GGUF), {card(logs[0].starts[-1])}, 100 steps of "
          f"32 × 8 answers, {len(logs)} seeds",
          f"test accuracy, greedy {base.measure('greedy'):.2f} → {each('{:.2f}', after)}",
          f"{minutes:.0f} minutes at most, {row['runs on its card']} runs sharing the card", row["peak GB"])
    before, after, seconds, peaks = zip(*map(learned, sorted((LOGS / "quickstart").iterdir())), strict=True)
    entry(f"**learns** the times table: SmolLM2-135M, 2 CPU cores, {len(after)} seeds",
          f"held-out accuracy {before[0]:.2f} → {each('{:.2f}', after)}",
          f"{max(seconds) / 60:.1f} minutes at most", f"{max(peaks):.1f}")
    latest, whole = rollouts()
    ours, plain = ([latest[0, "7b", weights, B] for B in (8, 64, 256)] for weights in ("nvfp4", "bf16"))
    rates = [r["tok_s"] for r in ours]
    ratios = [r["tok_s"] / p["tok_s"] for r, p in zip(ours, plain, strict=True)]
    rows = each("{}", [r["batch"] for r in ours])
    entry(f"decodes, Qwen2.5-7B + LoRA, {card(ours[0])}, {rows} answers at once",
          f"{each('{:,.0f}', rates)} tokens/s ({each('×{:.2f}', ratios)} over our own bf16)",
          f"{each('{:.1f}', [r['ms_step'] for r in ours])} ms a step",
          each("{:.1f}", [r["peak_gb"] for r in ours]))
    r = whole["7b", "nvfp4", 256]
    entry(f"a whole rollout of the 7B, {card(r)}: 32 × 16 answers, {r['mean_length']:.0f} tokens on average",
          f"{r['tok_s']:,.0f} tokens/s", f"{r['seconds']:.0f} s", f"{r['peak_gb']:.1f}")
    if (LOGS / "peers_bench.jsonl").exists():
        records, rates = peer_rows()
        four, plain = (each("×{:.2f} ({})", over.values(), over)
                       for over in (over_vllm(rates, "nvfp4"), over_vllm(rates, "bf16")))
        entry(f"decodes beside vLLM {next(r['vllm'] for r in records if 'vllm' in r)}: "
              f"{model(records[0]['shape'])} + LoRA, {card(records[0])} (answers at once)",
              f"ours over vLLM, tokens/s: NVFP4 {four}; bf16 {plain}", "", "")
    for (shape, prompts, samples, new, _, weights, cap, ranks), found in steps().items():
        if weights == "nvfp4" and ranks == 1 and not cap and prompts * samples * new > 32_000:
            sampling, update, peak = (statistics.median(r[k] for r in found)
                                      for k in ("rollout_s", "update_s", "peak_gb"))
            answers = f"{prompts} × {samples} answers of {new} tokens"
            entry(f"a step of the {shape.upper()}, {card(found[0])}: {answers}",
                  "",
                  f"sampling {sampling:.0f} s, update {update:.0f} s", f"{peak:.1f}")


def hardware():
    head("Qwen2.5", "weights, GB", "on 24 GB", "on 80 GB", "measured: memory capped at, a step, its peak",
         "seconds a step")
    rates = {r["recipe"].split("-")[0]: r for r in read("recipes") if r["kind"] == "step"}
    rates |= {shape: found[-1] for (shape, *_), found in steps().items() if shape == "72b"}
    capped = {}
    for (shape, prompts, samples, new, _, _, cap, _), found in steps().items():
        if cap and cap < capped.get(shape, (math.inf,))[0]:
            seconds, peak = (statistics.median(r[key] for r in found) for key in ("step_s", "peak_gb"))
            capped[shape] = cap, (f"**{cap:g} GB**, {card(found[0])}: {prompts} × {samples} answers of {new} "
                                  f"tokens, {seconds:.0f} s, {peak:.1f} GB")
    for shape in ("1.5b", "3b", "7b", "14b", "32b", "72b"):
        c, r = memory.config(shape), rates.get(shape)
        seconds = r and ANSWERS * (MEAN / r["rollout_tok_s"] + (PROMPT + MEAN) / r["update_tok_s"])
        entry(shape.upper(), f"{memory.plan(c).weights / 1e9:.1f}", *(fitting(c, gb) for gb in (24, 80)),
              capped.get(shape, ("", ""))[1], f"{seconds:.0f}" if r else "not timed")


def fitting(c, gb):
    """What `memory.py --rank 16` says of a model and a card."""
    _, _, slots, _, longest, *_ = memory.row(c, "nvfp4", 16, 256, 1024, gb)
    return f"{slots} × {longest - 256:,}" if slots else "–"


if __name__ == "__main__":
    tables = {"results": results, "hardware": hardware, "gemm": gemm, "rollout": rollout, "step": step,
              "recipes": recipes, "turns": turns, "peers": peers, "qwen": qwen}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=tables)
    tables[parser.parse_args().table]()
