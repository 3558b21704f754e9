"""Tables and figures of the experiments on GSM8K, from results/gsm8k/*.jsonl alone.

    python -m experiments.gsm8k_tables table    the experiments, of the whole seeds
    python -m experiments.gsm8k_tables rate     4 bits against bf16 in the runs that chose a rate
    python -m experiments.gsm8k_tables groups   what sampling half of a group first would save
    python -m experiments.gsm8k_tables plot     each experiment's figure, in results/

A second argument names another folder of logs. The tests and the verdicts are in paired.py. Needs:
numpy, matplotlib, scipy; tools/report.py.
"""

import math
import statistics
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.gsm8k_plan import (
    ARMS,
    AT_A_TEMPERATURE,
    COMMON,
    EXPERIMENTS,
    FOUR,
    LOGS,
    MEASURES,
    NEW_SEEDS,
    ONE,
    RATE_SEEDS,
    RATE_STEPS,
    THREE,
    TWO,
    Job,
    chosen,
    judged,
    logs_of,
    main_job,
    read,
    temperatures,
    test_of,
    whole_pairs,
    whole_seeds,
)
from experiments.paired import compare, holm, mean_and_sd

BASE = "Qwen2.5-Coder-{}-Instruct, dequantised from a Q4_K_M GGUF (its bf16 has that rounding too)"


# --- tables
def markdown(head, lines):
    text = [
        "| " + " | ".join(map(str, line)) + " |\n" for line in (head, ["---"] * len(head), *lines)
    ]
    return "".join(text)


def dashed(text):
    return text.replace("nan", "–")


def numbers_of(pairs, measure):
    """→ of each Log of a pair, its number; a list for the first ones and one for the second."""
    return [[pair[i].measure(measure) for pair in pairs] for i in (0, 1)]


def claims_of(logs, experiment, seeds):
    """→ of each claim: itself, the numbers of A and B, their Difference with Holm's p, the
    verdict."""
    found = []
    for claim in experiment.claims:
        a, b = numbers_of(whole_pairs(logs, claim.a, claim.b, seeds), claim.measure)
        found.append((claim, a, b, compare(a, b)))
    adjusted = holm([difference.p for *_, difference in found])
    judgements = []
    for (claim, a, b, difference), p in zip(found, adjusted, strict=True):
        difference = difference._replace(p=p)
        judgements.append((claim, a, b, difference, judged(claim, difference)))
    return judgements


def interval(difference):
    return dashed(f"{difference.mean:+.3f} ± {difference.half:.3f}")


def claims_table(logs, experiment, seeds):
    """Each claim with its test over seeds, its Holm-adjusted p and its verdict. Experiment 4's
    conclusion from two of them follows when each claim has three pairs.
    """
    lines = []
    claims = claims_of(logs, experiment, seeds)
    for claim, a, b, difference, said in claims:
        lines.append(
            (
                claim.text,
                claim.measure,
                f"{claim.a} {mean_and_sd(a)}",
                f"{claim.b} {mean_and_sd(b)}",
                len(a),
                interval(difference),
                dashed("<.001" if difference.p < 0.001 else f"{difference.p:.3f}"),
                said,
            )
        )
    text = markdown(("claim", "measure", "A", "B", "n", "A − B, 95 %", "p", "verdict"), lines)
    unfinished = any(len(a) < 3 for _, a, *_ in claims)
    if experiment is not FOUR or unfinished:
        return text
    *_, verdicts = zip(*claims, strict=True)
    if verdicts[:2] == ("holds", "holds"):
        return f"{text}\nThe first two claims hold: the growth is the rate's.\n"
    return (
        f"{text}\nThe first two claims do not both hold: the growth is not put down to the rate.\n"
    )


def comparisons_table(logs, experiment, seeds):
    """The pairs of arms that an experiment compares without a claim, over some seeds."""
    names = ("reward", "growth", "greedy", "entropy")
    lines = []
    for arms in experiment.compared:
        pairs = whole_pairs(logs, *arms, seeds)
        a, b = (f"{arm}: {ARMS[arm].arms[arm].what}" for arm in arms)
        cells = [interval(compare(*numbers_of(pairs, name))) for name in names]
        lines.append((a, b, len(pairs), *cells))
    head = ("A", "B", "n", *(f"{name}: A − B, 95 %" for name in names))
    return markdown(head, lines)


def mean_of_tenth(logs, arm, key, seeds, tenth):
    """A step's number in one tenth of the steps of an arm's runs, which is a stage of σ."""
    made = [read(logs, f"main-{arm}-{seed}") for seed in seeds]
    return mean_and_sd([log.mean(key, [tenth]) for log in made])


def stages_table(logs, seeds):
    """Arm 7's temperatures, and the entropy of three samplers in training, stage by stage."""
    lines = []
    for stage, before in enumerate(temperatures()):
        entropy = [mean_of_tenth(logs, arm, "sampler_entropy", seeds, stage) for arm in "672"]
        lines.append((stage, *before, *entropy))
    head = (
        "stage",
        "σ of 6",
        "its entropy before training",
        "temperature of 7",
        "its entropy before training",
        "entropy of 6's sampler in training",
        "of 7's",
        "of 2's",
    )
    return markdown(head, lines)


def tenths_table(logs, seeds):
    """Adaptive noise in each tenth of a run, and how well arm 12's temperature copies its
    entropy."""
    columns = (
        ("11", "sigma"),
        ("11", "kl_noise"),
        ("11", "sampler_entropy"),
        ("12", "sampler_entropy"),
        ("12", "temperature"),
        ("10", "sampler_entropy"),
    )
    lines = []
    for tenth in range(10):
        row = [mean_of_tenth(logs, arm, key, seeds, tenth) for arm, key in columns]
        lines.append((tenth, *row))
    head = (
        "tenth of the steps",
        "σ of 11",
        "its kl_noise",
        "entropy of its sampler",
        "of 12's",
        "temperature of 12",
        "entropy of 10's sampler",
    )
    return markdown(head, lines)


def newly_solved(before, after):
    """→ problems that no sample of the wide test solved before training, and some after it."""
    pairs = zip(before.tests["wide"]["right"], after.tests["wide"]["right"], strict=True)
    return sum(old == 0 < new for old, new in pairs)


def pairs_of(logs, experiment, arm, seeds):
    """→ for each seed, the Logs before training and after it."""
    base, pairs = experiment.arms[arm].base, []
    for seed in seeds:
        at = seed if base == "gauss" else experiment.seeds[0]
        before = read(logs, f"base-{experiment.size}-{base}-{at}")
        pairs.append((before, read(logs, main_job(arm, seed))))
    return pairs


def arm_row(logs, experiment, arm, seeds):
    """{column: cell} of an arm, means over seeds."""
    pairs = pairs_of(logs, experiment, arm, seeds)
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    row = {"arm": f"{arm}: {experiment.arms[arm].what}"}
    for measure, name in MEASURES.items():
        if test_of(measure) not in experiment.tests:
            continue
        row[name] = mean_and_sd([log.measure(measure) for log in after])
        if experiment.tests_bases:
            old = np.mean([log.measure(measure) for log in before])
            row[name] = f"{old:.3f} → {row[name]}"
        if measure in experiment.shown:
            others = whole_pairs(logs, arm, experiment.choosers[0], seeds)
            row[f"{measure} − bf16's, 95 %"] = interval(compare(*numbers_of(others, measure)))
    if not experiment.tests_bases:
        row["seeds"] = len(after)
        for measure in ("reward", "growth"):
            row[MEASURES[measure]] = mean_and_sd([log.measure(measure) for log in after])
    for key, name in (
        ("reward", "reward"),
        ("entropy", "entropy"),
        ("sampler_entropy", "sampler's entropy"),
    ):
        row[name] = mean_and_sd([log.mean(key) for log in after])
    row["sampler's entropy, step 0"] = mean_and_sd(
        [log.step[0]["sampler_entropy"] for log in after]
    )
    row["kl_noise"] = dashed(f"{np.mean([log.mean('kl_noise') for log in after]):.1e}")
    if experiment is ONE:
        row |= costs(after)
    if experiment is THREE:
        row["of 100 problems, solved by none of 512 samples before and some after"] = mean_and_sd(
            [newly_solved(*pair) for pair in pairs]
        )
    row["failed or cut off"] = sum(max(len(log.failed), len(log.starts) - 1) for log in after)
    return row


def costs(logs):
    """{column: cell}: seconds and memory of runs, of those that had their card alone if there are
    any."""
    alone = [log for log in logs if log.starts[-1]["at_once"] == 1] or logs
    steps = [r for log in alone for r in log.step.values()]
    sampling, update = (statistics.median(r[k] for r in steps) for k in ("rollout_s", "update_s"))
    return {
        "runs on its card": " or ".join(sorted({str(log.starts[-1]["at_once"]) for log in alone})),
        "a step: sampling, update": f"{sampling:.1f} s, {update:.1f} s",
        "minutes with tests": f"{np.mean([log.seconds for log in alone]) / 60:.1f}",
        "peak GB": f"{max(r['memory_gb'] for r in steps):.1f}",
    }


def tables_of_pairs(logs, experiment):
    """→ the tables of experiment 4, whose claims are about whole pairs, not whole seeds."""
    found = []
    if experiment.claims:
        found.append(claims_table(logs, experiment, experiment.seeds))
    found.append(comparisons_table(logs, experiment, experiment.seeds))
    if experiment is FOUR:
        seeds = ", ".join(map(str, NEW_SEEDS))
        found.append(f"Seeds {seeds} alone:\n")
        found.append(comparisons_table(logs, experiment, NEW_SEEDS))
    rows = []
    for arm in experiment.arms:
        made = [s for s in experiment.seeds if read(logs, main_job(arm, s)).ended]
        rows.append(arm_row(logs, experiment, arm, made))
    found.append(markdown(rows[0], [row.values() for row in rows]))
    return found


def table(logs):
    """Markdown of the experiments, of the seeds with which all arms have ended."""
    found = []
    for experiment in EXPERIMENTS:
        (rates, lr), seeds = chosen(logs, experiment), whole_seeds(logs, experiment)
        if not (experiment.rates or seeds):
            continue
        tried = ", ".join(f"{rate:g}: {mean_and_sd(v)}, n={len(v)}" for rate, v in rates.items())
        found.append(
            f"Experiment {experiment.name}: {BASE.format(experiment.size.upper())}. Seeds "
            f"{', '.join(map(str, seeds))}. Learning rate {lr}; held-out accuracy: {tried}.\n"
        )
        if not seeds:
            continue
        if not experiment.tests_bases:
            found += tables_of_pairs(logs, experiment)
            continue
        if experiment.claims:
            found.append(claims_table(logs, experiment, seeds))
        if experiment is TWO:
            found.append(stages_table(logs, seeds))
        if experiment is THREE:
            found.append(tenths_table(logs, seeds))
        cells = [arm_row(logs, experiment, arm, seeds) for arm in experiment.arms]
        found.append(markdown(cells[0], [row.values() for row in cells]))
    return "\n".join([*found, conditions(logs)])


def rate_differences(logs, experiment, rate, half):
    """→ {measure: of each seed, 4 bits at `rate` less bf16 at that rate, or at half of it}, of the
    runs that chose the rate."""
    bf16, four_bits = experiment.choosers
    other = rate / 2 if half else rate
    found = {measure: [] for measure in ("reward", "growth", "held-out")}
    for seed in RATE_SEEDS:
        ours = read(logs, Job("rate", four_bits, rate, seed))
        theirs = read(logs, Job("rate", bf16, other, seed))
        for measure, differences in found.items():
            differences.append(ours.measure(measure) - theirs.measure(measure))
    return found


def rate_table(logs):
    """4 bits less bf16 at one rate, then at twice bf16's, which is the paper's comparison."""
    lines, counts = [], []
    for half in (False, True):
        found = []
        for experiment in (ONE, TWO):
            for rate in experiment.rates[half:]:
                differences = rate_differences(logs, experiment, rate, half)
                other = f"{rate / 2:g}" if half else "the same"
                cells = [
                    f"{np.mean(d):+.3f} ({', '.join(f'{x:+.3f}' for x in d)})"
                    for d in differences.values()
                ]
                lines.append((experiment.size.upper(), f"{rate:g}", other, *cells))
                found.append(differences)
        below = [d < 0 for cell in found for d in cell["reward"]]
        grows = [d > 0 for cell in found for d in cell["growth"]]
        counts.append(
            f"the reward of 4 bits ends below bf16's in {sum(below)} of {len(below)} pairs of "
            f"runs and grows more in {sum(grows)}"
        )
    seeds = ", ".join(map(str, RATE_SEEDS))
    head = ("model", "rate of 4 bits", "of bf16", *(f"{m} ({seeds})" for m in differences))
    same, twice = counts
    return (
        f"{markdown(head, lines)}\nAt one rate {same}. At twice bf16's rate {twice}. "
        f"{RATE_STEPS} steps; seeds {seeds}."
    )


def conditions(logs):
    starts = []
    for _, log in sorted(logs_of(logs.glob("*.jsonl")).items()):
        starts += log.starts
    places = dict.fromkeys(f"{r['gpu']}, torch {r['torch']}, triton {r['triton']}" for r in starts)
    commits, at_once = (sorted({str(r[k]) for r in starts}) for k in ("commit", "at_once"))
    when = sorted(r["time"] for r in starts) or ["–"]
    return (
        f"{'; '.join(places)}, commit {' and '.join(commits)}; "
        f"{' or '.join(at_once)} runs on a card at once; {when[0]} to {when[-1]}; "
        "logs in `results/gsm8k/`."
    )


# --- figures
def smooth(values, width=9):
    """Mean of the neighbours, fewer of them at the ends."""
    half = width // 2
    return [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw_curve(axis, logs, **style):
    """The training reward against the step: mean, least and most over seeds."""
    rewards = [smooth([r["reward"] for r in log.step.values()]) for log in logs]
    axis.plot(np.mean(rewards, 0), **style)
    low, high = np.min(rewards, 0), np.max(rewards, 0)
    axis.fill_between(range(len(low)), low, high, color=style["color"], alpha=0.15, linewidth=0)


def draw_test(axis, y, pairs, measure, color):
    """A test before training (hollow) and after it (filled, with its standard deviation; dots:
    seeds)."""
    old = np.mean([log.measure(measure) for log, _ in pairs])
    new = [log.measure(measure) for _, log in pairs]
    mean = np.mean(new)
    axis.annotate("", (mean, y), (old, y), arrowprops=dict(arrowstyle="->", color="0.6"))
    axis.plot(old, y, "o", color=color, markerfacecolor="white")
    axis.plot(new, [y - 0.25] * len(new), ".", color="0.6", markersize=5)
    axis.errorbar(mean, y, xerr=np.std(new, ddof=1), fmt="o", color=color, capsize=4)
    axis.annotate(f"{mean:.3f}", (mean, y + 0.2), fontsize=8, ha="center")
    return mean


def color_of(experiment, arm):
    """Red for an arm that samples under noise, blue for one at a temperature, else black."""
    if "aqn" in experiment.arms[arm].flags:
        return "C3"
    return "C0" if arm in AT_A_TEMPERATURE else "0.15"


def plot(logs, experiment, path):
    """Training reward against the step (experiment 1), and two tests before and after training."""
    seeds = whole_seeds(logs, experiment)
    bases = [arm.base for arm in experiment.arms.values()]
    arms = sorted(experiment.arms, key=lambda arm: bases.index(experiment.arms[arm].base))
    figure = Figure(figsize=(12, 3 + 0.25 * len(arms)), layout="constrained")
    *curve, left, right = figure.subplots(1, 3 if experiment is ONE else 2)
    tests = dict(zip((left, right), experiment.shown, strict=True))
    for i, arm in enumerate(arms):
        pairs = pairs_of(logs, experiment, arm, seeds)
        color = f"C{i}" if curve else color_of(experiment, arm)
        for axis in curve:
            draw_curve(
                axis,
                [log for _, log in pairs],
                color=color,
                linestyle=("-", "--", ":")[i],
                label=arm,
            )
        for axis, measure in tests.items():
            mean = draw_test(axis, -i, pairs, measure, color)
            if arm in experiment.choosers and not curve:  # what the others are compared with
                axis.axvline(mean, color="0.6", linestyle="--", linewidth=1)
    labels = [arm if curve else f"{arm}: {experiment.arms[arm].what}" for arm in arms]
    for axis, measure in tests.items():
        axis.set_yticks([-i for i in range(len(arms))], labels)
        axis.set(xlabel=MEASURES[measure], ylim=(0.5 - len(arms), 0.6))
        axis.margins(x=0.1)  # room for the numbers
        axis.grid(alpha=0.3, axis="x")
        axis.tick_params(labelleft=axis is left)
        axis.ticklabel_format(axis="x", useOffset=False)
    for axis in curve:
        axis.set(xlabel="optimizer step", ylabel="training reward, share of answers")
        axis.legend(fontsize=8)
    more = (
        "; curves: mean, least, most, moving mean of 9 steps."
        if curve
        else ". Red: sampled under noise; blue: at a temperature.\nDashed: where bf16 and rtn end "
        "without noise. rtn: round to nearest; tis: truncated importance sampling."
    )
    figure.suptitle(
        f"GSM8K. {BASE.format(experiment.size.upper())}.\nHollow: before training; filled: after "
        f"{COMMON['steps']} steps, mean ± standard deviation of {len(seeds)} seeds (dots){more}",
        fontsize=9,
    )
    # without date and version, the same log gives the same bytes
    figure.savefig(path, dpi=110, metadata={"Software": None})


# --- groups without signal
GROUP = COMMON["group_size"]


def equal_chance(right, samples, k):
    """→ how likely k answers, drawn from `samples` of which `right` are right, are all right or
    all wrong."""
    return (math.comb(right, k) + math.comb(samples - right, k)) / math.comb(samples, k)


def group_shares(log):
    """→ of a run's test of pass@k, means over its problems: groups with signal; answers that are
    not sampled if a group ends after an equal half; groups with signal that are lost by that."""
    test = log.tests["pass"]
    whole, half = (
        np.mean([equal_chance(right, test["samples"], k) for right in test["right"]])
        for k in (GROUP, GROUP // 2)
    )
    return 1 - whole, half / 2, (half - whole) / (1 - whole)


def groups_table(logs):
    """What a group of equal rewards costs, and what ending it after its first half would save."""
    lines = []
    for arm in TWO.choosers:
        base = TWO.arms[arm].base
        before = read(logs, Job("base", f"{TWO.size}-{base}", None, TWO.seeds[0]))
        after = [read(logs, main_job(arm, seed)) for seed in TWO.seeds]
        for when, found in (("before training", [before]), ("after 100 steps", after)):
            shares = np.mean([group_shares(log) for log in found], axis=0)
            lines.append((base, when, *(f"{share:.3f}" for share in shares)))
    shares = "groups of 8 with signal", "answers not sampled", "signal lost by that"
    return markdown(("base of the 0.5B", "when", *shares), lines)


TABLES = {"table": table, "rate": rate_table, "groups": groups_table}


def curves(logs, arm):
    """→ {step: values over seeds}, of the reward (a moving mean) and of the held-out accuracy of an
    arm of experiment 4."""
    rewards, accuracies = {}, {}
    for seed in FOUR.seeds:
        log = read(logs, main_job(arm, seed))
        if not log.ended:
            continue
        steps = sorted(log.step)
        for step, reward in zip(steps, smooth([log.step[s]["reward"] for s in steps]), strict=True):
            rewards.setdefault(step, []).append(reward)
        for step, record in sorted(log.eval.items()):
            accuracies.setdefault(step, []).append(record["eval_greedy"])
    return rewards, accuracies


def plot_rate(logs, experiment, path):
    """The reward and the held-out accuracy of arms 14 to 17 over the steps, with intervals."""
    rate = chosen(logs, experiment)[1]
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    for color, arm in enumerate(("14", "15", "16", "17")):
        for axis, curve in zip(axes, curves(logs, arm), strict=True):
            found = [compare(values, [0] * len(values)) for values in curve.values()]
            mean, half = (np.array([d[i] for d in found]) for i in (0, 1))
            seeds = max(map(len, curve.values()))
            label = f"{arm}: {experiment.arms[arm].what} ({seeds} seeds)"
            axis.plot(list(curve), mean, color=f"C{color}", label=label)
            axis.fill_between(
                list(curve), mean - half, mean + half, color=f"C{color}", alpha=0.15, linewidth=0
            )
    for axis, name in zip(axes, ("training reward", "256 held-out problems, greedy"), strict=True):
        axis.set(xlabel="step", ylabel=name)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(
        f"GSM8K. {BASE.format(experiment.size.upper())}.\nMean and its 95 % interval over seeds; "
        f"the reward is a moving mean of 9 steps. x: a learning rate of {rate}.",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(command, logs=LOGS):
    logs = Path(logs)
    if command in TABLES:
        print(TABLES[command](logs))
        return
    for experiment in EXPERIMENTS:
        if experiment.figure and len(whole_seeds(logs, experiment)) >= 3:
            draw = plot_rate if experiment is FOUR else plot
            draw(logs, experiment, logs.parent / experiment.figure)


if __name__ == "__main__":
    if not {*sys.argv[1:2]} & {*TABLES, "plot"}:
        sys.exit(f"usage: python -m experiments.gsm8k_tables {'|'.join(TABLES)}|plot [LOGS]")
    main(*sys.argv[1:3])
