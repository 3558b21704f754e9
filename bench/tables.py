"""Tables of README.md, docs/ and results/LOG.md, from the logs in results/ and plans of
tools/memory.py.

python -m bench.tables NAME
    results, largest, longest   README.md: what was measured, and what fits on a card
    hardware                docs/planner.md: which model needs which card
    quickstart, alone       results/LOG.md: the default run, and GSM8K with README's command
    gemm, rollout, step, whole, peaks, recipes, vllm, long, qwen   results/LOG.md: speed and memory
"""

import argparse
import functools
import json
import re
import statistics
import textwrap
from pathlib import Path

from bench.step import planned
from tools import memory, report

LOGS = Path(__file__).parent.parent / "results"
ANSWERS = 128  # of a step in `hardware`
PROMPT, MEAN = 150, 500  # tokens of a prompt and of an answer there
SHAPES = "1.5b", "3b", "7b", "14b", "32b", "72b"  # of the tables of what fits
PLANNED_PROMPT = 256  # tokens of a prompt in these
CARDS = 12, 16, 24, 40, 48, 80  # GB as cards are sold
NAMES = {
    "135m": "SmolLM2-135M",
    "nvfp4": "NVFP4",
    "bf16": "bf16",
    "hf-nf4": "transformers + bitsandbytes NF4 + PEFT *",
    "vllm": "vLLM",
    "none": "CUDA graphs alone",
    "default": "torch.compile",
    "1": "one process",
    "2": "two processes",
    "unsloth-nf4": "Unsloth, NF4, vLLM in its process",
}


# --- reading and printing
def read(name):
    return [json.loads(line) for line in (LOGS / name).read_text().splitlines()]


def typical(records):
    """The last of several records, with the median of each float."""
    middle = dict(records[-1])
    for key, value in middle.items():
        if isinstance(value, float):
            middle[key] = statistics.median(r[key] for r in records)
    return middle


def head(*columns):
    """Columns may hold several names, with " | " between them."""
    entry(*columns)
    print("|---" * len(" | ".join(columns).split(" | ")) + "|")


def entry(*cells):
    print("| " + " | ".join(cells) + " |")


def filled(template, records):
    """The template with each record's values; "" where there is no record."""
    return [template.format(**r) if r else "" for r in records]


def each(template, records):
    return ", ".join(filled(template, records))


def say(text):
    print("\n" + textwrap.fill(text, 110))


def note(records, text):
    """The conditions of a table's records: each machine with the commits that ran on it."""
    places = {}
    for r in records:
        place = "{gpu}, torch {torch}, triton {triton}, commit ".format(**r)
        places.setdefault(place, {})[r["commit"]] = True
    say("; ".join([*(place + " and ".join(commits) for place, commits in places.items()), text]))


def model(shape):
    return NAMES.get(shape) or f"Qwen2.5-{shape.upper()}"


def card(r):
    """ "NVIDIA H100 80GB HBM3, 580.159.04" → "H100"."""
    return r["gpu"].split()[1].strip(",")


# --- speed
def gemm():
    latest = {(r["shape"], r["M"]): r for r in read("gemm_bench.jsonl")}
    rows = 1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192  # the log has some between
    head("NVFP4 over bf16", "N × K", *(f"M={M}" for M in rows))
    for shape in dict.fromkeys(shape for shape, _ in latest):
        found = [latest.get((shape, M)) for M in rows]
        size, *_ = filled("{N} × {K}", filter(None, found))
        entry(shape, size, *filled("{speedup:.2f}", found))
    note(
        latest.values(),
        "time of cuBLAS bf16 over ours in the same run, without LoRA, median of "
        "CUDA-graph replays over weights that do not fit into L2, each kernel checked "
        "against float64 first; by `python -m bench.gemm --out FILE.jsonl`, "
        "log in `results/gemm_bench.jsonl`.",
    )


def rollouts():
    """→ the last record of each decode step and of each whole rollout, of bf16 pages, and of the
    sizes that are named in the table.

    The keys are (whether each row has a prompt of its own, shape, weights, rows) and (shape,
    weights, rows). `over` in a record of NVFP4 is its speed over bf16's.
    """
    latest, whole = {}, {}
    usual = dict(kv="bf16", prompts=32, prompt_length=0, mean=600, limit=2048, cap_gb=0)
    for r in read("rollout_bench.jsonl"):
        if any(r.get(name, value) != value for name, value in usual.items()):
            continue
        key = r["shape"], r["weights"], r["batch"]
        samples = r.get("samples", 1)
        if r.get("whole"):
            if r.get("samples", 16) == 16:
                whole[key] = r
        elif r["weights"] in ("nvfp4", "bf16") and samples in (1, min(16, r["batch"])):
            latest[(samples == 1, *key)] = r
    for (alone, shape, weights, batch), r in latest.items():
        plain = latest.get((alone, shape, "bf16", batch))
        if weights == "nvfp4" and plain:
            r["over"] = r["tok_s"] / plain["tok_s"]
    return latest, whole


def rollout():
    latest, whole = rollouts()
    batches = sorted({batch for *_, batch in latest})
    head("tokens/s (share of the bound)", *(f"B={b}" for b in batches))
    kinds = dict.fromkeys((alone, shape, weights) for alone, shape, weights, _ in latest)
    for alone, shape, weights in sorted(kinds, key=lambda kind: kind[0]):
        row = [latest.get((alone, shape, weights, batch)) for batch in batches]
        what = ", nothing in common" if alone else ""
        rates = filled("{tok_s:,.0f} ({of_bound:.2f})", row)
        entry(f"{model(shape)}, {NAMES[weights]}{what}", *rates)
        compared = [r and "over" in r and r for r in row]
        if any(compared):
            entry("… over our own bf16", *filled("×{over:.2f}", compared))
    for (shape, weights, _), r in whole.items():
        text = (
            f"A whole rollout of {model(shape)} in {NAMES[weights]}, 32 prompts × "
            "16 samples in {batch} slots, mean length {mean_length:.0f}, longest "
            "{longest}, prefill, refill and tail included: {tok_s:,.0f} tokens/s "
            "(commit {commit})."
        )
        say(text.format(**r))
    note(
        [*latest.values(), *whole.values()],
        "random weights of each shape, LoRA of rank 32, temperature 1, mean context "
        "1000, without prefill and capture. By `python -m bench.rollout --model-shape "
        "SHAPE`, log in `results/rollout_bench.jsonl`.",
    )


def steps():
    """→ of each setting the medians of the last session, without the first step, which compiles,
    updates alone, and steps whose update began again. most_gb: the largest peak, with all of these.
    """
    setting = "shape prompts samples prompt_length new mean weights cap_gb ranks rank processes"
    sessions, peaks = {}, {}
    for r in read("step_bench.jsonl"):
        r["rank"] = r.get("rank", 32)
        if r.get("recompute", True) is True:
            r["recompute"] = memory.config(r["shape"]).num_hidden_layers
        chosen = r.get("automatic") or (r["micro_tokens"], r["recompute"])
        key = (*(r.get(name) or 0 for name in setting.split()), chosen, r["gpu"], r["commit"])
        peaks[key] = max(r["peak_gb"], peaks.get(key, 0))
        if r.get("step", 1) and not r.get("update_only") and not r.get("restarted"):
            sessions.setdefault(key, []).append(r)
    latest = {}
    for key, records in sessions.items():
        latest[key[:-2]] = typical(records) | {"most_gb": peaks[key]}
    return list(latest.values())


def long_steps():
    """→ {(shape, cap in GB or 0): the single step on an H100 with the longest answers, of 16,000
    tokens or more}.
    """
    longest = {}
    for r in sorted(read("step_bench.jsonl"), key=lambda r: r["new"]):
        if r["new"] >= 16_000 and not r["mean"] and "H100" in r["gpu"]:
            longest[r["shape"], r["cap_gb"]] = r
    return longest


def step():
    head(
        "model | prompts × answers × tokens | most micro-tokens | recomputed | weights",
        "rollout s | tokens/s | update s | tokens/s | peak GB | planned",
    )
    latest = [*steps(), *long_steps().values()]
    for r in latest:
        what = model(r["shape"])
        ranks = r.get("ranks", 1)
        if r.get("cap_gb"):
            what += ", capped at {cap_gb:g} GB"
        elif ranks > 1:
            what += ", {ranks} GPUs"
        if r.get("rank", 32) != 32:
            what += ", rank {rank}"
        if r.get("processes"):
            what += ", {processes} such processes on the card"
        cells = (
            what,
            f"{ranks * r['prompts']} × {{samples}} × {{new}}"
            + (", {mean_length:.0f} on average" if r.get("mean") else ""),
            "{micro_tokens}" + (" (chosen)" if r.get("automatic") else ""),
            "{recompute}",
            NAMES[r["weights"]],
            "{rollout_s:.1f} | {rollout_tok_s:,.0f}",
            "{update_s:.2f} | {update_tok_s:,.0f} | {peak_gb:.1f}",
            "{planned_gb:.1f}" if "planned_gb" in r else "",
        )
        entry(*(cell.format(**r) for cell in cells))
    note(
        latest,
        "random weights of each shape, prompts of 128 tokens, LoRA of rank 32 or as "
        "said; the median of the steps after the first, which compiles; answers of 16,000 "
        "tokens and more: one step, compilation included. * its sampling is extrapolated "
        "from 32 or 48 steps in the middle of the answers. By `python -m bench.step` and "
        "`python -m bench.qlora`, log in `results/step_bench.jsonl`.",
    )


def recipes():
    log = read("recipes_bench.jsonl")
    latest = {r["recipe"]: r["flags"] | r for r in log if r["kind"] == "step" and r["step"]}
    head("recipe | answers a step | mean length | rollout s | update s", "peak GB | planned")
    for r in latest.values():
        template = (
            "`{recipe}` | {prompts} × {group_size} | {length:.0f} | {rollout_s:.1f} | "
            "{update_s:.1f} | {memory_gb:.1f} | {planned_gb:.1f}"
        )
        entry(template.format(**r))
    note(
        latest.values(),
        "the second of two steps of at most 256 new tokens, on random weights. By "
        "`results/recipes.py try` of commit f76e9f8, log in "
        "`results/recipes_bench.jsonl`.",
    )


# --- peers
def peers(path="peers_bench.jsonl"):
    """→ records of bench/vllm.py; (run and card, part) → {rows or "whole": [tokens/s, …]}."""
    records, rates = read(path), {}
    for r in records:
        row = rates.setdefault(((r["run"], r["card"]), r["part"]), {})
        if "tok_s" in r:
            row.setdefault(r["batch"], []).append(r["tok_s"])
    return records, rates


def beside_vllm(rates, weights):
    """→ {rows or "whole": tokens a second of ours, and of vLLM's best mode in the same run}.

    Of several runs the one in which we are least ahead: each may have other modes of vLLM, and a
    card compares only with itself.
    """
    pairs = {}
    for run in dict.fromkeys(run for run, part in rates if part == f"ours/{weights}"):
        theirs = [
            row
            for (where, part), row in rates.items()
            if where == run and part.startswith(f"vllm/{weights}")
        ]
        for batch, ours in rates[run, f"ours/{weights}"].items():
            best = max((row[batch][0] for row in theirs if batch in row), default=None)
            if best:
                pairs.setdefault(batch, []).append((statistics.mean(ours), best))
    return {batch: min(found, key=lambda pair: pair[0] / pair[1]) for batch, found in pairs.items()}


def over_vllm(rates, weights):
    """→ {rows or "whole": tokens a second of ours over vLLM's}, of beside_vllm."""
    return {batch: ours / best for batch, (ours, best) in beside_vllm(rates, weights).items()}


def vllm(path="peers_bench.jsonl"):
    records, rates = peers(path)
    batches = {batch: True for row in rates.values() for batch in row}
    cards = list(dict.fromkeys(run for run, _ in rates))
    head("tokens/s", *("whole rollout" if batch == "whole" else f"B={batch}" for batch in batches))
    for (run, part), row in rates.items():
        words = [NAMES.get(word, word) for word in part.split("/")]
        cells = [[f"{rate:,.0f}" for rate in row.get(batch, ())] for batch in batches]
        entry(", ".join([*words, f"card {1 + cards.index(run)}"]), *map(" and ".join, cells))
    for weights in "nvfp4", "bf16":
        over = over_vllm(rates, weights)
        if over:
            cells = (f"**×{over[batch]:.2f}**" if batch in over else "" for batch in batches)
            entry(f"**ours over vLLM's best, {NAMES[weights]}**", *cells)
    fours = [r for r in records if r.get("kernel")]
    engines = filled("vLLM {vllm}, {kernel}, {attention}", fours)
    drawn = (r for r in records if r.get("batch") == "whole")
    whole = filled("mean length {mean_length:.0f}, longest {longest}", drawn)
    note(
        records,
        f"{' and '.join(dict.fromkeys(engines))}; random weights of "
        f"{model(records[0]['shape'])}, LoRA of rank 32, temperature 1, log-prob of "
        "each token. Ours before and after vLLM. B rows: 16 share a prompt of 936 "
        "tokens, 128 tokens timed. Whole rollout: 32 prompts × 16 samples in 256 "
        f"slots, prefill included ({' and '.join(dict.fromkeys(whole))}). By `python "
        "-m bench.vllm --out FILE.jsonl --vllm ENV/bin/python`, log in "
        "`results/peers_bench.jsonl`.",
    )


def beside_unsloth():
    """→ {(weights, cap in GB, 0: none): a record of the medians of all steps but the first, which
    compiles}."""
    steps = {}
    for r in read("unsloth_bench.jsonl"):
        if r["step"]:
            steps.setdefault((r["weights"], r.get("cap_gb", 0)), []).append(r)
    return {key: typical(records) for key, records in steps.items()}


def unsloth():
    found = beside_unsloth()
    head("weights", "held to, GB", "sampling, s", "update, s", "step, s", "peak, GB")
    for (weights, cap), r in found.items():
        row = "{rollout_s:.2f} | {update_s:.2f} | {step_s:.2f} | {peak_gb:.1f}"
        held = f"{cap:g}" if cap else "what was free"
        entry(
            NAMES[weights], "30 % for vLLM" if weights == "unsloth-nf4" else held, row.format(**r)
        )
    theirs = found["unsloth-nf4", 0]
    note(
        found.values(),
        "medians of steps 1 to 3: 32 prompts of 128 tokens × 8 answers of exactly 256, random "
        "weights of Qwen2.5-1.5B, LoRA of rank 32. "
        + "unsloth {unsloth}, trl {trl}, transformers {transformers}, vllm {vllm}; its "
        "micro-batches are of {micro_batch} answers. By `python -m bench.unsloth` and `python -m "
        "bench.step`, log in `results/unsloth_bench.jsonl`.".format(**theirs),
    )


def longs():
    """→ of each whole rollout of long answers beside vLLM: a record of its run, our tokens/s, those
    of vLLM, and ours over vLLM's.
    """
    records, rates = peers("long_bench.jsonl")
    found = []
    for run in dict.fromkeys(run for run, _ in rates):
        here = [r for r in records if (r["run"], r["card"]) == run]
        alone = {key: row for key, row in rates.items() if key[0] == run}
        ours, theirs = (alone[run, part]["whole"] for part in ("ours/nvfp4", "vllm/nvfp4/none/1"))
        ratio = over_vllm(alone, "nvfp4")["whole"]
        made = dict(name=model(here[0]["shape"]), ours=ours, theirs=theirs, over=ratio)
        found.append(here[-1] | made)
    return found


def long():
    head("long answers | memory, GB | mean length | longest", "ours, tokens/s", "vLLM", "ours over")
    for r in longs():
        entry(
            "{name}, {prompts} × 16 | {memory_gb:g} | {mean_length:.0f} | {longest:,}".format(**r),
            " and ".join(f"{rate:,.0f}" for rate in r["ours"]),
            "{theirs[0]:,.0f} | **×{over:.2f}**".format(**r),
        )
    records, _ = peers("long_bench.jsonl")
    engine = next("vLLM {vllm}, {kernel}, {attention}".format(**r) for r in records if "vllm" in r)
    note(
        records,
        f"{engine}, CUDA graphs alone, one process; whole rollouts on random weights, prompts of "
        "128 tokens, LoRA of rank 32, temperature 1, log-prob of each token. By `python -m "
        "bench.vllm --once --batches --prompts N --prompt-length 128 --mean 1800 --limit 8192 "
        "--memory-gb GB`, log in `results/long_bench.jsonl`.",
    )


def peaks():
    head(
        "model | answers × new tokens, after a prompt of | weights | recomputed",
        "rollout, GB | planned | update, GB | planned",
    )
    records = [r for r in read("memory_bench.jsonl") if r["step"]]
    for r in records:
        r |= planned(r)  # by today's formula
        layers = "all layers" if r["recompute"] is True else f"{r['recompute'] or 'none'}"
        entry(
            model(r["shape"]),
            "{prompts} × {samples} × {new}, {prompt_length}".format(**r),
            NAMES[r["weights"]],
            layers,
            "{rollout_peak_gb:.1f} | {rollout_planned_gb:.1f}".format(**r),
            "{update_peak_gb:.1f} | {update_planned_gb:.1f}".format(**r),
        )
    note(
        records,
        "random weights, LoRA of rank 32; PyTorch's peaks in the second step, beside what "
        "tools/memory.py plans. By `python -m bench.step`, log in "
        "`results/memory_bench.jsonl`.",
    )


def qwen():
    tests = []
    head(
        "32 × 8 answers | loading, s | mean length | sampling, s | update, s | both, s",
        "update, tokens/s: median, slowest after three steps | peak GB",
    )
    for path in sorted((LOGS / "qwen").glob("*.jsonl")):
        records, load_s, rates = read(path), "", ""
        if path.stem == "trl":
            name = "Coder-1.5B, bf16, TRL {trl} with vLLM {vllm}".format(**records[0])
        else:
            size, what = path.stem.split("-")
            name = f"Coder-{size.upper()}, {NAMES.get(what, 'NVFP4')}"
            load_s = re.search(r"loaded in (\d+) ?s", path.with_suffix(".txt").read_text())[1]
            if what == "test":
                accuracy = "{rollout_s:.1f} | {eval_greedy:.3f}".format(**records[0])
                tests.append((name, load_s, accuracy))
                continue
            records = [r | {"peak_gb": r["memory_gb"]} for r in records if r["kind"] == "step"]
            speeds = [r["update_tok_s"] for r in records]
            rates = f"{statistics.median(speeds):,.0f}, {min(speeds[3:]):,.0f}"
        middle = typical([r | {"both_s": r["rollout_s"] + r["update_s"]} for r in records])
        seconds = "{length:.0f} | {rollout_s:.1f} | {update_s:.1f} | {both_s:.1f}"
        entry(name, load_s, seconds.format(**middle), rates, f"{records[-1]['peak_gb']:.1f}")
    print()
    head(
        "1,319 test problems, greedy and sampled once",
        "loading, s | evaluation, s | accuracy, greedy",
    )
    for cells in tests:
        entry(*cells)
    note(
        read("qwen/conditions.json"),
        "the median of all steps, GSM8K, answers of at most 400 tokens. By `bash "
        "bench/qwen.sh MODELS DATA OUT` and `python -m bench.trl`, logs in "
        "`results/qwen/`.",
    )


# --- what was learned
def quickstarts():
    """→ of each seed's default run its first and last evaluation, minutes, peak and conditions."""
    found = []
    for folder in sorted((LOGS / "quickstart").iterdir()):
        evals, made = evaluations_and_steps(folder)
        peak = max(r["memory_gb"] for r in made)
        info = json.loads((folder / "conditions.json").read_text())
        minutes = info["seconds"] / 60
        run = {"seed": folder.name[4:], "before": evals[0], "after": evals[-1]}
        found.append(info | run | {"minutes": minutes, "peak": peak})
    return found


def whole_steps():
    """→ {prompts: {weights: record}} of the 7B's steps whose answers end by chance, and of QLoRA's
    step with as many answers of their planned mean length.
    """
    found = {}
    for r in steps():
        if r["shape"] == "7b" and (r.get("mean") or (r["weights"], r["prompts"]) == ("hf-nf4", 16)):
            r["mean_length"] = r.get("mean_length", r["new"])
            found.setdefault(r["prompts"], {})[r["weights"]] = r
    return dict(sorted(found.items(), reverse=True))


def whole():
    head(
        "answers of a step | weights | mean length, longest",
        "sampling, s | update, s | whole step, s | peak GB",
        "as long as in NVFP4: sampling | whole step",
    )
    groups = whole_steps()
    for group in groups.values():
        ours = group["nvfp4"]
        for weights, r in group.items():
            cells = (
                "{prompts} × {samples}",
                NAMES[weights],
                "{mean_length:,.0f}, " + ("{longest:,}" if "longest" in r else "{new}"),
                "{rollout_s:.1f} | {update_s:.1f} | {step_s:.1f} | {peak_gb:.1f}",
                f"×{r['rollout_s'] / ours['rollout_s']:.2f}",
                f"×{r['step_s'] / ours['step_s']:.2f}",
            )
            entry(*(cell.format(**r) for cell in cells))
    note(
        [r for group in groups.values() for r in group.values()],
        "random weights, prompts of 128 tokens, LoRA of rank 32, one after the other on one card; "
        "the median of the steps after the first. * its sampling is extrapolated from 48 steps in "
        "the middle of the answers. By `python -m bench.step --prompts 16 --new 512 --mean 160`, "
        "`--prompts 8 --samples 16 --new 8192 --mean 2000` and `python -m bench.qlora --prompts "
        "16 --new 160 --micro-tokens 4608`, log in `results/step_bench.jsonl`.",
    )


def evaluations_and_steps(folder):
    """→ the records of a run's evaluations, and those of its steps."""
    records = report.read(folder).values()
    return [[r for r in records if r["kind"] == kind] for kind in ("eval", "step")]


def runs_alone():
    """→ the lines of results/speedrun/readme/times.jsonl, each with its run's evaluations before
    and after, records of its steps, and minutes.
    """
    found = []
    for run in read("speedrun/readme/times.jsonl"):
        evals, made = evaluations_and_steps(LOGS / "speedrun/readme" / run["seed"])
        run |= {"before": evals[0], "after": evals[-1], "made": made}
        found.append(run | {"minutes": run["seconds"] / 60})
    return found


def alone():
    head(
        "seed | right and ended, greedy: before → after | sampled",
        "seconds, all included | of them 100 rollouts | 100 updates | two tests | peak GB",
    )
    runs = runs_alone()
    for run in runs:
        tests = run["before"]["rollout_s"], run["after"]["rollout_s"]
        made = run["made"]
        entry(
            "{seed} | {before[eval_greedy]:.3f} → {after[eval_greedy]:.3f}".format(**run),
            "{before[eval_sampled]:.3f} → {after[eval_sampled]:.3f}".format(**run),
            f"{run['seconds']:.0f} | {sum(r['rollout_s'] for r in made):.0f}",
            f"{sum(r['update_s'] for r in made):.0f}",
            "{:.0f}, {:.0f}".format(*tests),
            f"{max(r['memory_gb'] for r in made):.1f}",
        )
    note(
        runs,
        "Qwen2.5-Coder-1.5B-Instruct, dequantised from a Q4_K_M GGUF, then rounded to NVFP4; all "
        "1,319 test problems. By `bash experiments/speedrun.sh OUT` with the flags of README's "
        "command, logs in `results/speedrun/readme/`.",
    )


def quickstart():
    head(
        "seed | right and ended: before → after | right, ended or not: before → after",
        "minutes, all included | peak GB",
    )
    made = quickstarts()
    row = (
        "{seed} | {before[eval_greedy]:.2f} → {after[eval_greedy]:.2f} | "
        "{before[eval_greedy_loose]:.2f} → {after[eval_greedy_loose]:.2f} | "
        "{minutes:.1f} | {peak:.1f}"
    )
    for cells in filled(row, made):
        entry(cells)
    conditions = (
        "{after[problems]} held-out problems, {cores} CPU cores, torch {torch}, "
        "commit {commit}; by `python train.py --seed SEED`, logs in "
        "`results/quickstart/`."
    )
    say(conditions.format(**made[0]))


def results():
    """README's numbers for a reader who decides."""
    head("on one H100, or as named", "this project", "compared with | log")
    runs = runs_alone()
    before, after = (
        statistics.mean(run[when]["eval_greedy"] for run in runs) for when in ("before", "after")
    )
    minutes = statistics.median(run["minutes"] for run in runs)
    entry(
        "test accuracy on GSM8K, Qwen2.5-Coder-1.5B in NVFP4 after "
        f"{minutes:.0f} minutes on one card, mean of 3 seeds",
        f"**{after:.2f}**",
        f"{before:.2f} before training | [runs](results/LOG.md#gsm8k-alone-on-one-card)",
    )
    found = beside_unsloth()
    theirs = found["unsloth-nf4", 0]
    ours, bf16 = (r for (_, cap), r in found.items() if cap)  # held to less than Unsloth took
    entry(
        f"seconds for a training step of a 1.5B *, {ours['prompts'] * ours['samples']} answers of "
        f"{ours['new']} tokens, on an {card(ours)}",
        f"NVFP4 **{ours['step_s']:.1f}**, bf16 {bf16['step_s']:.1f}, "
        f"both held to {ours['cap_gb']:g} GB",
        f"{theirs['step_s']:.1f}, Unsloth with vLLM in NF4, {theirs['peak_gb']:.0f} GB "
        "| [table](results/LOG.md#beside-unsloth)",
    )
    records, rates = peers()
    (version,) = {r["vllm"] for r in records if "vllm" in r}
    ours, theirs = beside_vllm(rates, "nvfp4")[64]
    entry(
        "tokens per second while decoding, 7B *, 64 answers at a context of 1,000",
        f"**{ours:,.0f}**",
        f"{theirs:,.0f}, vLLM {version}, NVFP4 | [table](results/LOG.md#vllm-on-the-same-card)",
    )
    r, *_ = longs()
    entry(
        "tokens per second for answers of {mean_length:,.0f} tokens on average, 7B *, both in "
        "{memory_gb:g} GB of memory".format(**r),
        f"**{statistics.mean(r['ours']):,.0f}**",
        f"{r['theirs'][0]:,.0f}, vLLM {version}, NVFP4 | [table](results/LOG.md#long-answers)",
    )


def largest():
    """README's first table of what fits: of each card the largest model with room for answers of
    1,024 tokens, and the peak of the last step of it that ran under a cap of that size.
    """
    head(
        "card, GB",
        "largest Qwen2.5 for 1,024-token answers",
        "such answers at once",
        "memory taken",
    )
    capped = {(r["shape"], card_of(r)): r for r in steps() if r.get("cap_gb")}
    for gb in CARDS:
        shape = [s for s in SHAPES if planned_line(s, gb).answers][-1]
        step = "**{most_gb:.1f} GB**, {prompts} × {samples} answers of {new:,} tokens"
        measured = each(step, [capped.get((shape, gb))])
        entry(f"{gb}", shape.upper(), f"{planned_line(shape, gb).answers}", measured)


def longest():
    """README's second table of what fits: tokens of the longest answers, 8 at a time. In brackets:
    of the longest answers that a step had, on the card or under a cap of its size, and how many
    these were if fewer than 8.
    """
    head("card, GB", *(shape.upper() for shape in SHAPES))
    made = {}  # (shape, card) → tokens of the longest answer that a step had, and its answers
    for r in [*steps(), *long_steps().values()]:
        key = r["shape"], card_of(r)
        made[key] = max((r["new"], r["prompts"] * r["samples"]), made.get(key, (0, 0)))
    for gb in CARDS:
        cells = []
        for shape in SHAPES:
            answer = planned_line(shape, gb).longest - PLANNED_PROMPT
            cell = f"{answer:,}" if answer > 0 else "–"
            if (shape, gb) in made:
                tokens, answers = made[shape, gb]
                times = f" at {answers}" if answers < 8 else ""
                cell += f" (**{tokens:,}**{times})"
            cells.append(cell)
        entry(f"{gb}", *cells)


def card_of(r):
    """→ GB of the smallest card on which a record's step fits: of its cap, or of its own GPU."""
    own = 80 if "H100" in r["gpu"] else 141
    return min(gb for gb in memory.CARDS if gb * 2**30 >= (r.get("cap_gb") or own) * 1e9)


def hardware():
    head(
        "Qwen2.5 | weights, GB | planned for 24 GB: answers at once; longest | with `--kv int8`",
        "for 80 GB",
        "measured under a cap: a step, its peak | measured on 80 GB: the longest answers",
        "planned seconds",
    )
    log = read("recipes_bench.jsonl")
    rates = {r["recipe"].split("-")[0]: r for r in log if r["kind"] == "step"}
    capped = {}  # the lowest cap of each shape comes last
    for r in sorted(steps(), key=lambda r: -(r.get("cap_gb") or 0)):
        if r.get("cap_gb"):
            capped[r["shape"]] = r | {"card": card(r)}
    rates["72b"] = capped["72b"]
    longest = long_steps()
    for shape in SHAPES:
        c = memory.config(shape)
        seconds = ""
        if shape in rates:
            sampling = MEAN / rates[shape]["rollout_tok_s"]
            update = (PROMPT + MEAN) / rates[shape]["update_tok_s"]
            seconds = f"{ANSWERS * (sampling + update):.0f}"
        measured = each(
            "**{cap_gb:g} GB**, {card}: {prompts} × {samples} answers of {new} tokens, "
            "{step_s:.0f} s, {most_gb:.1f} GB",
            [capped.get(shape)],
        )
        long = each(
            "{samples} × {new:,} tokens, {step_s:.0f} s, {peak_gb:.1f} GB",
            [longest.get((shape, 0))],
        )
        weights = f"{memory.plan(c).weights / 1e9:.1f}"
        planned = fitting(shape, 24), fitting(shape, 24, "int8"), fitting(shape, 80)
        entry(shape.upper(), weights, *planned, measured, long, seconds)


def fitting(shape, gb, kv="bf16"):
    """What `tools.memory --rank 16` says of a model and a card, `longest` without the prompt."""
    row = planned_line(shape, gb, kv)
    return f"{row.answers}; {row.longest - PLANNED_PROMPT:,}" if row.answers else "–"


@functools.cache
def planned_line(shape, gb, kv="bf16"):
    return memory.line_of(memory.config(shape), "nvfp4", 16, PLANNED_PROMPT, 1024, gb, kv)


TABLES = {
    "results": results,
    "largest": largest,
    "longest": longest,
    "hardware": hardware,
    "quickstart": quickstart,
    "alone": alone,
    "gemm": gemm,
    "rollout": rollout,
    "step": step,
    "whole": whole,
    "peaks": peaks,
    "recipes": recipes,
    "vllm": vllm,
    "long": long,
    "qwen": qwen,
    "unsloth": unsloth,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    TABLES[parser.parse_args().table]()
