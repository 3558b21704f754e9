"""Tables and figures of gsm8k.py, from results/gsm8k/*.jsonl alone.

    python results/gsm8k_tables.py rules       what of the rules in results/README.md is code
    python results/gsm8k_tables.py table       both experiments, of the seeds with which all arms have ended
    python results/gsm8k_tables.py plot        results/gsm8k-1.5b.png, gsm8k-0.5b.png, from 3 whole seeds on

A second argument names another folder of logs. The tests and the verdicts are in experiment.py.
Needs: numpy, matplotlib; experiment.py, gsm8k.py.
"""
import statistics
import sys
from pathlib import Path

import experiment
import gsm8k
import numpy as np
from experiment import holm, paired, smooth, spread, tested, text, verdict
from gsm8k import CLAIMS, EXPERIMENTS, MEASURES, ONE, TWO, chosen, read, temperatures, whole_seeds
from matplotlib.figure import Figure

BASE = "Qwen2.5-Coder-{}-Instruct, dequantised from a Q4_K_M GGUF (its bf16 has that rounding too)"


# --- tables
def rows(head, *lines):
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in (head, ["---"] * len(head), *lines))


def rules():
    """What of the rules in results/README.md is code."""
    how = [(number, ours.size.upper(), ", ".join(ours.arms), ", ".join(map(str, ours.seeds)),
            ", ".join(f"{lr:g}" for lr in ours.rates), " and ".join(ours.choosers),
            "; ".join(MEASURES.get(name, MEASURES["pass@32"]) for name in ours.tests))
           for number, ours in enumerate(EXPERIMENTS, 1)]
    return "\n".join((
        rows(("experiment", "model", "arms", "seeds", "learning rates", "chosen by arms", "tests"), *how),
        rows(("arm", "base and noise"), *((arm, ours.arms[arm][2]) for arm, ours in gsm8k.ARMS.items())),
        rows(("claim", "difference", "measure"),
             *((claim, f"{a} − {b}", MEASURES[measure]) for claim, measure, a, b in CLAIMS))))


def claims(logs):
    """→ for each claim: (row of CLAIMS, values of A, of B, difference, half interval, Holm's p, verdict)."""
    pairs = [[[read(logs, f"main-{arm}-{seed}").measure(row[1]) for seed in whole_seeds(logs, TWO)]
              for arm in row[2:]] for row in CLAIMS]
    tests = [paired(*pair) for pair in pairs]
    return [(row, *pair, mean, half, p, verdict("above", mean, half, p)) for row, pair, (mean, half, _), p in
            zip(CLAIMS, pairs, tests, holm([p for *_, p in tests]), strict=True)]


def pairs_of(logs, ours, arm, seeds):
    """→ for each seed, the Logs before training and after it."""
    base = ours.arms[arm][0]
    return [(read(logs, f"base-{ours.size}-{base}-{seed if base == 'gauss' else ours.seeds[0]}"),
             read(logs, f"main-{arm}-{seed}")) for seed in seeds]


def arm_row(logs, ours, arm, seeds):
    """{column: cell} of an arm, means over seeds."""
    both = pairs_of(logs, ours, arm, seeds)
    after, row = [log for _, log in both], {"arm": f"{arm}: {ours.arms[arm][2]}"}
    for measure in [m for m in MEASURES if ("pass" if "@" in m else m) in ours.tests]:
        old, new = ([log.measure(measure) for log in logs] for logs in zip(*both, strict=True))
        row[MEASURES[measure]] = f"{np.mean(old):.3f} → {text(spread(new))}"
        if measure in ours.shown:
            mean, half, _ = paired(new, [read(logs, f"main-{ours.choosers[0]}-{seed}").measure(measure)
                                         for seed in seeds])
            row[f"{measure} − bf16's, 95 %"] = f"{mean:+.3f} ± {half:.3f}".replace("nan", "–")
    if "pass" in ours.tests:
        rights = [[log.tests["pass"]["right"] for log in pair] for pair in both]
        solved = [sum(b > 0 for a, b in zip(*pair, strict=True) if a == 0) for pair in rights]
        row["solved after, of those never solved in 64 before"] = (
            f"{np.mean(solved):.1f} of {np.mean([old.count(0) for old, _ in rights]):.0f}")
    for key, name in (("reward", "reward"), ("entropy", "entropy"), ("sampler_entropy", "sampler's entropy")):
        row[name] = text(spread([log.mean(key) for log in after]))
    row["sampler's entropy, step 0"] = text(spread([log.step[0]["sampler_entropy"] for log in after]))
    row["kl_noise"] = f"{np.mean([log.mean('kl_noise') for log in after]):.1e}".replace("nan", "–")
    if ours is ONE:
        alone = [log for log in after if log.starts[-1]["at_once"] == 1] or after      # not sharing its card
        steps = [r for log in alone for r in log.step.values()]
        sampling, update = (statistics.median(r[k] for r in steps) for k in ("rollout_s", "update_s"))
        row |= {"runs on its card": " or ".join(sorted({str(log.starts[-1]["at_once"]) for log in alone})),
                "a step: sampling, update": f"{sampling:.1f} s, {update:.1f} s",
                "minutes with tests": f"{np.mean([log.seconds for log in alone]) / 60:.1f}",
                "peak GB": f"{max(r['memory_gb'] for r in steps):.1f}"}
    return row | {"failed or cut off": sum(max(len(log.failed), len(log.starts) - 1) for log in after)}


def repeats(logs, seeds):
    """The seeds of arm 5 beside the repeats that `gsm8k.py run 5 2` made; those are in the folder again."""
    made = {f"seed {seed}": read(logs, f"main-5-{seed}") for seed in seeds}
    for path in sorted((logs / "again").glob("main-5-2-*.jsonl")):
        made[f"seed 2, repeat {path.stem[-1]}"] = read(path.parent, path.stem)
    lines = []
    for name, log in made.items():
        reward = " ".join(f"{log.mean('reward', [stage]):.3f}" for stage in range(10))
        lines.append((name, reward, f"{log.mean('entropy', [9]):.3f}", f"{log.measure('greedy'):.3f}"))
    head = "arm 5", "reward, means of ten steps", "entropy, the last ten", "test accuracy, greedy"
    return rows(head, *lines).replace("nan", "–")


def table(logs):
    """Markdown of both experiments, of the seeds with which all arms have ended."""
    found, starts = [], [r for path in sorted(logs.glob("*.jsonl")) for r in read(logs, path.stem).starts]
    for number, ours in enumerate(EXPERIMENTS, 1):
        (rates, lr), seeds = chosen(logs, ours), whole_seeds(logs, ours)
        tried = ", ".join(f"{rate:g}: {text(spread(v))}, n={len(v)}" for rate, v in rates.items())
        found.append(f"Experiment {number}: {BASE.format(ours.size.upper())}. Seeds "
                     f"{', '.join(map(str, seeds))}. Learning rate {lr}; held-out accuracy: {tried}.\n")
        if seeds and ours is TWO:
            found.append(rows(("claim", "measure", "A", "B", "n", "A − B, 95 %", "p", "verdict"), *(
                (claim, measure, f"{a} {text(spread(x))}", f"{b} {text(spread(y))}", len(x),
                 tested(mean, half, p), says)
                for (claim, measure, a, b), x, y, mean, half, p, says in claims(logs))))
            drift = [[spread([read(logs, f"main-{arm}-{seed}").mean("sampler_entropy", [stage])
                              for seed in seeds]) for arm in "672"] for stage in range(10)]
            found.append(rows(
                ("stage", "σ of 6", "its entropy before training", "temperature of 7", "its entropy before "
                 "training", "entropy of 6's sampler in training", "of 7's", "of 2's"),
                *((stage, *where, *map(text, drift[stage]))
                  for stage, where in enumerate(temperatures(logs)))))
        cells = [arm_row(logs, ours, arm, seeds) for arm in ours.arms if seeds]
        found += [rows(cells[0], *(row.values() for row in cells))] if cells else []
    found += [repeats(logs, seeds)] if seeds else []
    places = dict.fromkeys(f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}" for r in starts)
    commits, at_once = (sorted({str(r[k]) for r in starts}) for k in ("commit", "at_once"))
    when = sorted(r["time"] for r in starts) or ["–"]
    return "\n".join([*found, f"{'; '.join(places)}, commit {' and '.join(commits)}; {' or '.join(at_once)} "
                      f"runs on a card at once; {when[0]} to {when[-1]}; logs in `results/gsm8k/`."])


# --- figures
def plot(logs, ours, path):
    """Training reward against the step (experiment 1), and two tests before and after training. The picture's
    Description holds its numbers."""
    seeds, shown, bases = whole_seeds(logs, ours), [], [base for base, *_ in ours.arms.values()]
    arms = sorted(ours.arms, key=lambda arm: bases.index(ours.arms[arm][0]))    # by base
    figure = Figure(figsize=(12, 3 + 0.25 * len(arms)), layout="constrained")
    *curve, left, right = figure.subplots(1, 3 if ours is ONE else 2)
    for i, arm in enumerate(arms):
        both, (base, own, _) = pairs_of(logs, ours, arm, seeds), ours.arms[arm]
        color = f"C{i}" if curve else "C3" if "aqn" in own else "C0" if own else "0.15"
        for axis in curve:
            rewards = [smooth([r["reward"] for r in log.step.values()], 9) for _, log in both]
            axis.plot(np.mean(rewards, 0), color=color, linestyle=("-", "--", ":")[i], label=arm)
            axis.fill_between(range(len(rewards[0])), np.min(rewards, 0), np.max(rewards, 0), color=color,
                              alpha=0.15, linewidth=0)
        for axis, measure in zip((left, right), ours.shown, strict=True):
            old, new = ([log.measure(measure) for log in logs] for logs in zip(*both, strict=True))
            mean, sd = spread(new)
            shown.append(f"{arm} {measure} {np.mean(old):.4f} → {' '.join(f'{v:.4f}' for v in new)}")
            axis.annotate("", (mean, -i), (np.mean(old), -i), arrowprops=dict(arrowstyle="->", color="0.6"))
            axis.plot(np.mean(old), -i, "o", color=color, markerfacecolor="white")
            axis.plot(new, [-i - 0.25] * len(new), ".", color="0.6", markersize=5)
            axis.errorbar(mean, -i, xerr=np.nan_to_num(sd), fmt="o", color=color, capsize=4)
            axis.annotate(f"{mean:.3f}", (mean, 0.2 - i), fontsize=8, ha="center")
            if bases.count(base) > 1 and not own:                   # what the arms below are compared with
                axis.axvline(mean, color="0.6", linestyle="--", linewidth=1)
    for axis, measure in zip((left, right), ours.shown, strict=True):
        axis.set_yticks([-i for i in range(len(arms))],
                        [arm if curve else f"{arm}: {ours.arms[arm][2]}" for arm in arms])
        axis.set(xlabel=MEASURES[measure], ylim=(0.5 - len(arms), 0.6))
        axis.margins(x=0.1)                                     # room for the numbers
        axis.grid(alpha=0.3, axis="x")
        axis.tick_params(labelleft=axis is left)
        axis.ticklabel_format(axis="x", useOffset=False)
    for axis in curve:
        axis.set(xlabel="optimizer step", ylabel="training reward, share of answers")
        axis.legend(fontsize=8)
    figure.suptitle(f"GSM8K. {BASE.format(ours.size.upper())}.\nHollow: before training; filled: after "
                    f"{gsm8k.COMMON['steps']} steps, mean ± standard deviation of {len(seeds)} seeds (dots)"
                    + ("; curves: mean, least, most, moving mean of 9 steps." if curve else
                       ". Red: sampled under noise; blue: at a temperature.\n"
                       "Dashed: where bf16 and rtn end without noise. rtn: round to nearest; tis: truncated "
                       "importance sampling."), fontsize=9)
    experiment.save(figure, path, "\n".join(shown))


def main(command, logs=gsm8k.LOGS):
    logs = Path(logs)
    if command != "plot":
        print(rules() if command == "rules" else table(logs))
    for ours in EXPERIMENTS if command == "plot" else ():
        if len(whole_seeds(logs, ours)) >= 3:
            plot(logs, ours, logs.parent / f"gsm8k-{ours.size}.png")


if __name__ == "__main__":
    if sys.argv[1:2] not in (["rules"], ["table"], ["plot"]):
        sys.exit("usage: python results/gsm8k_tables.py rules|table|plot [LOGS]")
    main(*sys.argv[1:3])
