"""Figures and tables of the ablation, from results/ablation/*/runs.jsonl alone, which ablation.py wrote.

    python results/plot.py      reward.png, entropy.png, final.png, sigma.png and table.md beside each log

The tests and what a verdict means are in experiment.py.
Needs: numpy, matplotlib; experiment.py, runs.py.
"""

import sys
from pathlib import Path

import numpy as np
from experiment import holm, paired, save, smooth, spread, tested, text, verdict
from matplotlib.figure import Figure

import runs

LOGS = Path(__file__).parent / "ablation"
BASE = "Base: SmolLM2-135M-Instruct, dequantised from Q4_1"
RATIOS = {"bypass": "ratio to the policy that sampled", "none": "ratio of 1", "tis": "ratio of 1, weighted"}
PLANNED = ("main", "extras", "more")
ALL = (*PLANNED, "follow-up")
ARMS = ("bf16", "bf16+aqn", "bf16+aqn+none", "rtn", "rtn+aqn", "rtn+aqn+none", "sweep", "sweep+aqn",
        "sweep+aqn+tis", "sweep+aqn+none", "sweep+aqn+bypass", "nf4", "nf4+aqn", "full")
DEFAULT = "sweep+aqn"                   # what the variants vary
VARIANTS = {"noise schedule (default exponential)": ("linear", "cosine", "logarithmic"),
            "sigma range (default 1e-2 to 1e-4)": ("sigma-table4", "sigma-text"),
            "LoRA rank (default 32)": ("rank16", "rank64", "rank128"),
            "loss (default DAPO)": ("grpo", "dr_grpo")}
# what a run is measured by, and what is compared: (claim, the paper's evidence, measure, A, B, "above" or
# "not below"). The paper's NVFP4 is rtn
MEASURES = {"final": ("accuracy after training", lambda r: r["final"]["sampled"]),
            "start": ("mean reward of the first tenth, before any noise",
                      lambda r: np.mean(r["reward"][:len(r["reward"]) // 10])),
            "speed": ("mean accuracy during training", lambda r: np.mean(r["eval"]["sampled"][1:])),
            "entropy": ("mean entropy of the sampler, nats",
                        lambda r: np.nanmean(np.array(r["surprise"], float)))}
ENTROPY = "entropy before training"
PAPER = (
    ("NVFP4 raises the policy's entropy", "Fig. 5", ENTROPY, "rtn", "bf16", "above"),
    ("so does MXFP4", "Fig. 5", ENTROPY, "mxfp4", "bf16", "above"),
    ("so does NF4", "Fig. 5", ENTROPY, "nf4", "bf16", "above"),
    ("NVFP4 LoRA samples with more entropy while it learns", "Fig. 5", "entropy", "rtn", "bf16", "above"),
    ("NVFP4 LoRA learns faster than bf16 LoRA", "Fig. 7", "speed", "rtn", "bf16", "above"),
    ("NVFP4 LoRA ends above bf16 LoRA", "83.3 / 76.1", "final", "rtn", "bf16", "above"),
    ("NVFP4 LoRA ends above NF4 LoRA", "83.3 / 76.1", "final", "rtn", "nf4", "above"),
    ("AQN lifts NVFP4 LoRA", "83.7 / 83.3", "final", "rtn+aqn", "rtn", "above"),
    ("AQN speeds NVFP4 LoRA up", "Fig. 8", "speed", "rtn+aqn", "rtn", "above"),
    ("NVFP4 + AQN ends above bf16 LoRA", "83.7 / 76.1", "final", "rtn+aqn", "bf16", "above"),
    ("NVFP4 + AQN is not below full fine-tuning", "83.7 / 84.4", "final", "rtn+aqn", "full", "not below"))
OWN = (
    ("AQN lifts bf16 LoRA too", "not tried", "final", "bf16+aqn", "bf16", "above"),
    ("AQN lifts NF4 LoRA too", "not tried", "final", "nf4+aqn", "nf4", "above"),
    ("AQN lifts NVFP4 (sweep) LoRA", "not tried", "final", "sweep+aqn", "sweep", "above"),
    ("AQN speeds NVFP4 (sweep) up", "not tried", "speed", "sweep+aqn", "sweep", "above"),
    ("the sweep's smaller error ends above rtn", "not tried", "final", "sweep", "rtn", "above"),
    ("the same with AQN", "not tried", "final", "sweep+aqn", "rtn+aqn", "above"),
    ("bypass ends above no correction", "no correction", "final", "sweep+aqn", "sweep+aqn+none", "above"),
    ("a ratio of 1 ends above bypass", "not tried", "final", "sweep+aqn", "sweep+aqn+bypass", "above"),
    ("the ratio is not below tis", "not tried", "final", "sweep+aqn", "sweep+aqn+tis", "not below"))
# added for correction none after the results of the claims above were known
LATER = (
    ("rtn with AQN is ahead before any noise: its rate is higher", "not tried", "start", "rtn+aqn", "rtn",
     "above"),
    ("the sweep learns faster than rtn, both at one rate", "not tried", "speed", "sweep", "rtn", "above"))
# The claims above compare each arm at its own best rate, so two arms may also differ in the rate. EQUAL asks
# again in the grid, which runs every arm at the same rates, but on two seeds only
PAIRS = {arm for arm in ARMS if "+aqn+" not in arm and arm != "full"}
EQUAL = tuple(row for row in (*PAPER, *OWN, *LATER[1:]) if row[2] != ENTROPY and {*row[3:5]} <= PAIRS)
# added for correction bypass after those results: "+none" has a ratio of 1, as the release, its twin without
# noise has not, so these rows measure noise and ratio together; "start", before any noise, the ratio alone
SWEEP = (
    ("a ratio of 1 learns faster before any noise", "not tried", "start", "sweep+aqn+none", "sweep", "above"),
    ("AQN, ratio 1, speeds NVFP4 (sweep) up", "not tried", "speed", "sweep+aqn+none", "sweep", "above"),
    ("AQN, ratio 1, lifts NVFP4 (sweep) LoRA", "not tried", "final", "sweep+aqn+none", "sweep", "above"))
AFTER = (
    *SWEEP, ("tis learns faster too", "not tried", "start", "sweep+aqn+tis", "sweep+aqn", "above"),
    ("AQN, ratio 1, lifts NVFP4 LoRA", "83.7 / 83.3", "final", "rtn+aqn+none", "rtn", "above"),
    ("AQN, ratio 1, speeds NVFP4 LoRA up", "Fig. 8", "speed", "rtn+aqn+none", "rtn", "above"),
    ("AQN, ratio 1, ends above bf16 LoRA", "83.7 / 76.1", "final", "rtn+aqn+none", "bf16", "above"),
    ("… is not below full fine-tuning", "83.7 / 84.4", "final", "rtn+aqn+none", "full", "not below"),
    ("AQN, ratio 1, lifts bf16 LoRA", "not tried", "final", "bf16+aqn+none", "bf16", "above"))


def names(correction):
    """What the arms' names mean, in a log of this correction."""
    others = "; ".join(f"{c}: {ratio}" for c, ratio in RATIOS.items() if c != correction)
    return f"aqn: noise, {RATIOS[correction]}; {others}"


def read(folder):
    """The records of a log, the last of each run; ValueError: there is none, or of unlike lengths."""
    path = Path(folder) / "runs.jsonl"
    found = runs.jsonl(path) if path.is_file() else ()
    records = {(r["phase"], r["arm"], r["lr"], r["seed"]): r for r in found if r["phase"] != "smoke"}.values()
    if len({r["steps"] for r in records} - {0}) > 1 or not records:
        raise ValueError(f"{path} holds no run, or runs of different --steps, which do not compare")
    return list(records)


def of(records, arm, phases=ALL):
    """seed → record of an arm."""
    return {r["seed"]: r for r in sorted(records, key=lambda r: r["seed"])
            if r["arm"] == arm and r["phase"] in phases}


# --- statistics
def compare(records, measure, a, b, phases=PLANNED):
    """The paired values of arms A and B. A pair is a seed, averaged over its runs if it ran at several rates;
    for the entropy before training, a pair is a prompt."""
    if measure == ENTROPY:
        one, other = (of(records, arm, ("entropy",)).get(0, {}).get("entropy", []) for arm in (a, b))
        return (one, other) if len(one) == len(other) else ([], [])
    one, other = {}, {}
    for arm, found in ((a, one), (b, other)):
        for r in records:
            if r["arm"] == arm and r["phase"] in phases:
                found.setdefault(r["seed"], []).append(MEASURES[measure][1](r))
    seeds = sorted(one.keys() & other.keys())
    return [np.mean(one[s]) for s in seeds], [np.mean(other[s]) for s in seeds]


def claims(records, rows, phases=PLANNED):
    """→ for each row: (row, n, (mean, sd) of A, of B, difference, half interval, adjusted p, verdict)."""
    pairs = [compare(records, *row[2:5], phases) for row in rows]
    tests = [paired(*pair) for pair in pairs]
    adjusted = holm([p for *_, p in tests])
    return [(row, len(pair[0]), *map(spread, pair), mean, half, p, verdict(row[5], mean, half, p))
            for row, pair, (mean, half, _), p in zip(rows, pairs, tests, adjusted, strict=True)]


# --- tables
def table(records, correction):
    """Markdown: claims with verdicts, the entropy before training, arms, variants, the grid."""
    chosen = sum(r["phase"] == "grid" for r in records)
    lines = [f"{BASE}. Mean ± standard deviation over seeds (n), or over prompts for the {ENTROPY}; "
             f"learning rates chosen from {chosen} other runs. Paired t test, Holm-adjusted within a table. "
             f"{names(correction)}."]
    own = [row for row in OWN if of(records, row[3]) and of(records, row[4])]
    groups = [("claim of the paper", PAPER, PLANNED), ("our question", own, PLANNED),
              ("at equal rates: the grid's two seeds, means over its three rates", EQUAL, ("grid",))]
    if any(r["phase"] == "more" for r in records):
        groups += [("asked after these", LATER, PLANNED)]
    if any(r["phase"] == "follow-up" for r in records):
        groups += [("asked after these", AFTER, ALL),
                   ("the same, of the six seeds alone that ran after it was asked", SWEEP, ("follow-up",))]
    for title, rows, phases in groups:
        lines += ["", f"| {title} | paper | measure | A | B | n | A − B, 95 % | p | verdict |",
                  "|---|---|---|---|---|---|---|---|---|"]
        for row, n, a, b, mean, half, p, says in claims(records, rows, phases):
            what = MEASURES.get(row[2], (row[2],))[0]
            lines.append(f"| {row[0]} | {row[1]} | {what} | {row[3]} {text(a)} | {row[4]} {text(b)} | {n} | "
                         f"{tested(mean, half, p)} | {says} |")
    lines += ["", f"| format | {ENTROPY}, nats a token | n |", "|---|---|---|"]
    lines += [f"| {r['arm']} | {text(spread(r['entropy']))} | {len(r['entropy'])} |"
              for r in records if r["phase"] == "entropy"]
    head = ["| arm | learning rate | n | accuracy: sampled | greedy | during training | entropy |",
            "|---|---|---|---|---|---|---|"]
    lines += ["", *head, *(arm_row(arm, of(records, arm)) for arm in ARMS if of(records, arm))]
    for title, variants in VARIANTS.items():
        runs = {name: of(records, name) for name in variants}
        seeds = {s for found in runs.values() for s in found}
        default = {s: r for s, r in of(records, DEFAULT).items() if s in seeds}
        lines += ["", f"{title}, the same seeds in each row:", "", *head,
                  *(arm_row(name, found) for name, found in {DEFAULT: default, **runs}.items())]
    lines += ["", "The grid: learning rate: accuracy after training, mean of n runs. (The paper's App. I: at",
              "a high rate bf16 LoRA fails and QeRL does not. Two seeds are no test of it.)", "",
              "| arm | low | middle | high |", "|---|---|---|---|",
              *(grid_row(records, arm, [arm]) for arm in ARMS if of(records, arm, ("grid",))),
              grid_row(records, "all with LoRA", [arm for arm in ARMS if arm != "full"])]
    return "\n".join(lines)


def grid_row(records, name, arms):
    found = {}
    for r in records:
        if r["phase"] == "grid" and r["arm"] in arms:
            found.setdefault(r["lr"], []).append(r["final"]["sampled"])
    return f"| {name} | " + " | ".join(f"{lr:g}: {np.mean(v):.3f} (n={len(v)})"
                                       for lr, v in sorted(found.items())) + " |"


def rates(runs):
    """The learning rates of these runs: one, unless a follow-up used another."""
    return ", ".join(f"{v:g}" for v in sorted({r["lr"] for r in runs}))


def arm_row(arm, found):
    runs = list(found.values())
    values = [[r["final"]["sampled"] for r in runs], [r["final"]["greedy"] for r in runs],
              *([MEASURES[m][1](r) for r in runs] for m in ("speed", "entropy"))]
    return f"| {arm} | {rates(runs)} | {len(runs)} | " + " | ".join(text(spread(v)) for v in values) + " |"


# --- figures
PANELS = (("bf16", "bf16+aqn", "bf16+aqn+none"), ("rtn", "rtn+aqn", "rtn+aqn+none"),
          ("sweep", "sweep+aqn", "sweep+aqn+none"), ("nf4", "nf4+aqn"),
          ("sweep+aqn", "sweep+aqn+tis", "sweep+aqn+none", "sweep+aqn+bypass"), ("bf16", "full"))
STYLES = (dict(color="0.45", linestyle="-", marker="o"), dict(color="black", linestyle="--", marker="s"),
          dict(color="0.2", linestyle=":", marker="^"))


def curves(records, key, label, scale, title, path):
    """Six panels of a quantity against the step: mean, minimum and maximum over seeds; bf16 to compare."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for axis, arms in zip(panels, PANELS, strict=True):
        reference = of(records, "bf16")
        if reference and arms[0] != "bf16":
            axis.plot(np.mean([smooth(r[key]) for r in reference.values()], 0), color="0.7", linewidth=0.8,
                      label="bf16, no AQN")
        for i, arm in enumerate(arm for arm in arms if of(records, arm)):
            runs = of(records, arm).values()
            found, steps = [smooth(r[key]) for r in runs], range(len(next(iter(runs))[key]))
            axis.fill_between(steps, np.min(found, 0), np.max(found, 0), color=STYLES[i]["color"], alpha=0.13,
                              linewidth=0)
            axis.plot(steps, np.mean(found, 0), **STYLES[i], markevery=(6 * i, 20), markersize=4,
                      markerfacecolor="white", label=f"{arm}, {rates(runs)} (n={len(runs)})")
        axis.set(yscale=scale)
        axis.legend(fontsize=7, loc="best")
        axis.grid(alpha=0.3)
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel(label, fontsize=9)
    figure.suptitle(f"{title}\n{BASE}. Lines: mean over seeds, bands: least to most, moving mean of 5 "
                    f"steps.\nArm, learning rate (seeds). {names(path.parent.name)}", fontsize=9)
    save(figure, path)


def finals(records, path):
    """Accuracy after training: each seed, mean and ± 1 sd, arm by arm."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axis = figure.subplots()
    arms = [arm for arm in reversed(ARMS) if of(records, arm)]
    for y, arm in enumerate(arms):
        values = [r["final"]["sampled"] for r in of(records, arm).values()]
        mean, sd = spread(values)
        axis.plot(values, [y] * len(values), "|", color="0.5", markersize=9)
        axis.errorbar(mean, y, xerr=np.nan_to_num(sd), color="black", capsize=4, marker="o",
                      markerfacecolor="black" if "aqn" in arm else "white")
        axis.annotate(f"{mean:.3f} ± {sd:.3f}, n={len(values)}", (1.01, y), va="center", fontsize=8,
                      xycoords=("axes fraction", "data"))
    axis.set_yticks(range(len(arms)), arms)
    axis.set_xlabel("held-out accuracy after training, 4 samples of each of 256 problems (filled: with AQN)")
    axis.set_title(f"Accuracy after training\n{BASE}. Bars: ± 1 standard deviation over seeds.\n"
                   f"{names(path.parent.name)}", fontsize=9)
    axis.grid(alpha=0.3, axis="x")
    save(figure, path)


def sigmas(records, path):
    """The noise schedules and ranges, as they were logged."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes, default = figure.subplots(1, 2, sharex=True), "exponential, 1e-2 to 1e-4"
    lines = (({DEFAULT: default, "linear": "linear", "cosine": "cosine", "logarithmic": "logarithmic"},
              "linear"),
             ({DEFAULT: default, "sigma-table4": "exponential, 1e-2 to 5e-4 (paper's Table 4)",
               "sigma-text": "exponential, 5e-2 to 5e-4 (paper's §4.1)"}, "log"))
    for axis, (names, scale) in zip(axes, lines, strict=True):
        for i, (arm, name) in enumerate(names.items()):
            found = list(of(records, arm).values())
            if found:
                sigma = np.array(found[0]["sigma"])
                axis.plot(np.where(sigma > 0, sigma, np.nan), color="black", drawstyle="steps-post",
                          linestyle=("-", "--", "-.", ":")[i], marker="os^d"[i], markerfacecolor="white",
                          markersize=4, markevery=(len(sigma) // 10 + 2, len(sigma) // 5), label=name)
        axis.set(yscale=scale, xlabel="optimizer step", ylabel="σ of the noise on the norm weights")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.suptitle(f"AQN's noise: ten stages, the first without\n{BASE}.", fontsize=9)
    save(figure, path)


def plot(folder):
    records = read(folder)
    curves(records, "reward", "training reward, share of answers (noise on)", "linear", "Reward",
           folder / "reward.png")
    curves(records, "surprise", "entropy of the policy that samples, nats a token (noise on)", "log",
           "Entropy", folder / "entropy.png")
    finals(records, folder / "final.png")
    sigmas(records, folder / "sigma.png")
    (folder / "table.md").write_text(table(records, folder.name) + "\n")


if __name__ == "__main__":
    try:
        for log in sorted(LOGS.glob("*/runs.jsonl")) or [LOGS / "none" / "runs.jsonl"]:
            plot(log.parent)
    except ValueError as problem:
        sys.exit(str(problem))
