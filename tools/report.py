"""A run's log read back: lines of text, warnings, curves, samples, a table of runs.

    python -m tools.report list [FOLDER]    a line for each run
    python -m tools.report show RUN…        samples, and what training changed
    python -m tools.report plot RUN…        curves.png

RUN is the folder of a run of train.py. Four of its files are read here:

    metrics.jsonl   {"kind": "step", "step": 3, "segment": 0, "reward": 0.42, …}       after a step
                    {"kind": "eval", "step": 4, "segment": 0, "eval_greedy": 0.7, …}   an evaluation
    samples.jsonl   {"step": 4, "which": "best", "prompt": …, "answer": …, "reward": 1.0, …}
    eval.jsonl      {"step": 4, "prompt": …, "text": …, "reward": 1.0, "ended": true, …}
    config.json     the flags: {"model": …, "task": …, "steps": 16, …}

"step" is the number of steps that precede the record's own: step 3 is the fourth, and "eval" of
step 4 follows it. "segment" numbers, from 0, the starts of the run that logged a record. null means
not measured, or not finite, because JSON has no NaN. docs/metrics.md explains the other keys of
metrics.jsonl.

A resumed run repeats the steps after its last checkpoint and appends their records again, so the
last record of a step is the valid one.

Needs: matplotlib to plot.
"""

import json
import operator
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

# What an evaluation's two greedy numbers are called. strict: an answer that did not end counts as
# wrong. loose: it is judged as if it had ended.
LABELS = dict(strict="right and ended", loose="right, ended or not")
ANY_REWARD_LABELS = dict(strict="mean reward", loose="mean reward, ended or not")
LINES = dict(
    eval=(
        "eval after {step:4d} steps"
        " | greedy {eval_greedy:.2f} {strict}, {eval_greedy_loose:.2f} {loose}"
        " | sampled {eval_sampled:.2f} | {rollout_s:.1f}s"
    ),
    step=(
        "step {step:4d} | reward {reward:.2f} | signal {signal:.0%}"
        " | finished {finished:.0%} | len {length:.1f} | entropy {entropy:.2f}"
        " | mismatch {mismatch:.4f} | kl_noise {kl_noise:.1e}"
        " | clip {clip_fraction:.1%} | grad {grad_norm:.2f}"
        " | lr {lr:.1e} | σ {sigma:.1e}"
        " | gen {rollout_s:.1f}s {rollout_tok_s:.0f} tok/s"
        " | train {update_s:.1f}s {update_tok_s:.0f} tok/s"
        " | {memory_gb:.1f} GB"
    ),
)
SAMPLE = (
    "step {step:4d} {which:5} | reward {reward:+.2f} | advantage {advantage:+.2f}"
    " | {prompt!r} → {answer!r}"
)
EVALUATED = "        after {step:4d} steps {reward:+.2f}, ended: {ended} | {text!r}"
# What a problem's rewards in the first and in the last evaluation tell. Of a user's own task, right
# is a higher reward.
CHANGES = {
    "wrong before, right after": operator.lt,
    "right before, wrong after": operator.gt,
    "wrong before and after": lambda before, after: before == after <= 0,
}
EXAMPLES = 3  # problems shown of each

# --- problems of a run, and what to do about each

ADVICE = dict(
    flat=(
        "{signal:.0%} of the groups have unequal rewards ({seen}), and without one a step makes no "
        "update: take harder problems if most answers are right, easier ones "
        "if few are (--operands 2-5 for sums), less noise if σ is not 0 (--sigma-start), "
        "or raise --group-size or --temperature."
    ),
    unfinished=(
        "{finished:.0%} of the answers ended ({seen}), and those cut off earn "
        "little or nothing: raise --max-new-tokens, or check that the "
        "model's chat template and end token are the ones it was trained with, "
        "and that σ is not so large that noise is all it says (--sigma-start)."
    ),
    skipped=(
        "a NaN or infinite loss or gradient: the step was skipped. Try a lower --lr; before the "
        "first update look at the loss instead, if it is your own."
    ),
    mismatch=(
        "sampler and trainer disagree by a factor of {mismatch:.3f} on a token's "
        "probability: the ratios are wrong. Report it, also with --quant bf16."
    ),
)


def diagnose(records, needed=5, seen="", groups=1e-9, answers=1e-9):
    """Records of steps, the oldest first → pairs (name, sentence of advice), one for each problem.

    needed: "flat" and "unfinished" are problems only if each of the last `needed` steps has them,
    because one such step is common. seen: what was seen, if not steps. groups, answers: which
    share of them is enough; left out: any. "skipped" and "mismatch" are problems of the last step
    alone.
    """
    last = records[-1]

    def lasting(key, enough):
        return [record[key] < enough for record in records[-needed:]] == [True] * needed

    problems = dict(
        flat=lasting("signal", groups),
        unfinished=lasting("finished", answers),
        skipped="skipped" in last,
        # Most steps do not measure the mismatch: it is None. NaN is a problem; comparisons with
        # NaN are false, hence the second `not`.
        mismatch=last["mismatch"] is not None and not last["mismatch"] <= 1.05,
    )
    facts = last | {"seen": seen or f"steps in a row: {needed}"}
    return [(name, ADVICE[name].format(**facts)) for name, found in problems.items() if found]


# --- read the files of a run


def jsonl(path):
    """Yield the records of a JSONL file, but no line that a crash cut off.

    The file is split as bytes, because a crash may cut within a character, and because
    str.splitlines also splits at line ends that only Unicode knows. ValueError: there is no file.
    """
    if not path.is_file():
        raise ValueError(
            f"{path.parent} holds no {path.name}: name the folder of a run with a step"
        )
    for text in path.read_bytes().split(b"\n"):
        with suppress(
            ValueError, RecursionError
        ):  # the line was cut off, or its brackets nest too deep
            yield json.loads(text)


def logged(folder):
    """Yield all records of a run's metrics.jsonl, in the order of writing.

    Lines that someone wrote by hand are left out: a record is a dict with a kind, a step and a
    segment of the right types.
    """
    keys = "kind", "step", "segment"
    for record in jsonl(Path(folder) / "metrics.jsonl"):
        if type(record) is dict and [type(record.get(key)) for key in keys] == [str, int, int]:
            if measured(record, "step"):
                yield record


def measured(record, key):
    """Whether a record has a finite number under a key: it may be absent, null, or anything in
    JSON, such as a number of 400 digits, which no float holds.
    """
    value = record.get(key)
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def read(folder):
    """→ {(kind, step): the last such record of a run}, in the order of steps.

    An evaluation precedes the step of its number, as in the run.
    """
    # sorted() keeps the order of equals, so the last record that was written replaces the others
    records = sorted(logged(folder), key=operator.itemgetter("step", "kind"))
    return {(record["kind"], record["step"]): record for record in records}


# --- show them


def line(record, any_reward=False):
    """→ a record as one line of text, with – for what was not measured.

    any_reward: the task is a file of the user's, whose rewards may be any numbers. Then an
    evaluation's numbers are called mean rewards, not shares of right answers.
    """
    text = LINES[record["kind"]]
    if "skipped" in record:
        text += " | skipped"
    labels = ANY_REWARD_LABELS if any_reward else LABELS
    # None has no format .2f, but NaN has: it becomes "nan", or "nan%"
    values = {name: float("nan") if value is None else value for name, value in record.items()}
    return text.format(**labels, **values).replace("nan%", "–").replace("nan", "–")


def plot(folders):
    """Draw rewards, entropy and noise of some runs → the path of the picture.

    The picture is curves.png in the run's folder or, for several runs, in the current folder. A
    color is a run, a line style is a quantity.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for number, folder in enumerate(folders):
        curves = [  # axis, key of a record, label, style
            (left, "reward", "training reward", "-"),
            (left, "eval_greedy", "held out: of ended answers", "o-"),
            (left, "eval_greedy_loose", "held out: ended or not", "s--"),
            (middle, "entropy", Path(folder).name, "-"),
            (right, "kl_noise", "KL(noisy ‖ clean), nats a token", ".-"),
            (right, "sigma", "σ of the noise", ":"),
        ]
        records = read(folder).values()
        named = sorted({key for record in records for key in record if key.startswith("reward/")})
        for n, key in enumerate(named):
            label = key.replace("$", r"\$")  # $ begins a formula
            curves.append((left, key, label, f"{'^v<>dpx'[n % 7]}--"))
        for axis, key, label, style in curves:
            found = [record for record in records if measured(record, key)]
            axis.plot(
                [record["step"] for record in found],
                [record[key] for record in found],
                style,
                color=f"C{number}",
                # The middle axis has one quantity, so its legend names the runs. The other legends
                # name the quantities, once: by the curves of the first run.
                label=None if number and axis is not middle else label,
                markerfacecolor="none",
                alpha=0.4 if key == "reward" else 1,  # pale, because it jumps from step to step
            )
    # Accuracies fill the range 0 to 1. The rewards of a user's task may need a larger one.
    left.update_datalim([(0, 0), (0, 1)])
    left.autoscale_view()
    right.set_yscale("symlog", linthresh=1e-4)  # logarithmic, but with a place for 0
    flags = [flags_in(folder) for folder in folders]
    noise = {str(run.get("sigma_schedule")) for run in flags if run.get("aqn")} or "–"
    titles = "Mean reward", "Entropy of the policy, nats a token", f"Noise: {', '.join(noise)}"
    for axis, title in zip(figure.axes, titles, strict=True):
        axis.set(title=title, xlabel="steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path = Path("." if len(folders) > 1 else folders[0], "curves.png")
    figure.savefig(path, dpi=120)
    return path


def show(folders):
    """→ the worst and the best sample of each step in each run's samples.jsonl, and what training
    changed, as text.

    Of several records of one such sample the last counts, because a resumed run repeats steps and
    appends their samples again.
    """
    last = {}
    for folder in folders:
        evaluated = (Path(folder) / "eval.jsonl").is_file()
        if not evaluated or (Path(folder) / "samples.jsonl").is_file():
            for sample in jsonl(Path(folder) / "samples.jsonl"):
                # a sample made by hand
                with suppress(ArithmeticError, LookupError, TypeError, ValueError):
                    last[folder, sample["step"], sample["which"]] = SAMPLE.format(**sample)
        if evaluated:
            last[folder] = changes(folder)
    return "\n".join(last.values())


def changes(folder):
    """→ how a run's answers to the held-out problems changed from its first evaluation to its last,
    as text: counts, and a few problems with both answers.
    """
    evaluations = defaultdict(dict)  # step → {prompt: the last record of it}
    for record in jsonl(Path(folder) / "eval.jsonl"):
        with suppress(ArithmeticError, LookupError, TypeError, ValueError):  # made by hand
            shown = EVALUATED.format(**record)
            evaluations[record["step"]][str(record["prompt"])] = record | {"shown": shown}
    if not evaluations:
        return ""
    before = evaluations[min(evaluations)]
    after = evaluations[max(evaluations)]
    said = []
    kinds = CHANGES
    if len(evaluations) == 1:
        kinds = {"wrong, in the only evaluation": CHANGES["wrong before and after"]}
    for title, is_so in kinds.items():
        found = [
            prompt
            for prompt in before.keys() & after.keys()
            if is_so(before[prompt]["reward"], after[prompt]["reward"])
        ]
        count = f"{title}: {len(found)} of {len(after)} held-out problems"
        more = f"; {EXAMPLES} of them, all are in eval.jsonl:" if len(found) > EXAMPLES else ""
        said.append(count + more)
        for prompt in sorted(found)[:EXAMPLES]:
            shown = before[prompt]["shown"], after[prompt]["shown"]
            said += [f"    {prompt!r}", *dict.fromkeys(shown)]
    return "\n".join(said)


def table(folders):
    """→ text: a head, and a line for each run in the folders or in folders inside them.

    ValueError: there is no run.
    """
    found = (log for folder in folders for log in Path(folder).rglob("metrics.jsonl"))
    logs = sorted(filter(Path.is_file, found))
    if not logs:
        raise ValueError(f"no run in {', '.join(folders)}: name the folder that holds your runs")
    rows = ["run task model steps first best last minutes".split()]
    rows += [summary(log.parent) for log in logs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)) for row in rows)


def flags_in(folder):
    """→ {name: value} of a run's flags; empty if config.json is missing or damaged."""
    with suppress(OSError, RecursionError, TypeError, ValueError):
        return {**json.loads(Path(folder, "config.json").read_text())}
    return {}


def summary(folder):
    """→ the texts of a run's line in the table.

    first, best, last: greedy accuracy in evaluations. minutes: of its steps and evaluations.
    """
    known = {"task": "–", "model": "–", "steps": "–"}
    known |= {name: value for name, value in flags_in(folder).items() if value is not None}
    records = read(folder).values()
    made = sum(r["kind"] == "step" for r in records)
    # In an old run each update of a rollout counted as a step, although its log has one record a
    # rollout. The config.json of such a run holds the number of updates.
    with suppress(ArithmeticError, TypeError, ValueError):
        made *= int(known.get("updates_per_rollout", 1))
    greedy = [r["eval_greedy"] for r in records if measured(r, "eval_greedy")]
    scores = ["–"] * 3
    if greedy:
        scores = [f"{score:.2f}" for score in (greedy[0], max(greedy), greedy[-1])]
    times = "rollout_s", "update_s"
    seconds = sum(r[key] for r in records for key in times if measured(r, key))
    return (
        str(folder),
        Path(str(known["task"])).stem,
        Path(str(known["model"])).name,
        f"{made}/{known['steps']}",
        *scores,  # first, best, last
        f"{seconds / 60:.1f}",
    )


def main(arguments):
    """Run a command. arguments: its words. ValueError, OSError: a sentence for the user."""
    if {"--help", "-h"} & set(arguments):
        return print(__doc__)
    command, *folders = arguments or [""]
    if command == "list":
        print(table(folders or ["runs"]))
    elif command in ("show", "plot") and folders:
        print(show(folders) if command == "show" else plot(folders))
    else:
        raise ValueError("usage: python -m tools.report show RUN…, plot RUN… or list [FOLDER]")


if __name__ == "__main__":
    if sys.stdout:  # closed by who started the program: None
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have Unicode
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"{error}")
