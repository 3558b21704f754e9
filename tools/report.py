"""A run's log read back: lines of text, warnings, curves, samples, a table of runs.

    python -m tools.report list [FOLDER]    a line for each run
    python -m tools.report show RUN…        the best and the worst samples
    python -m tools.report plot RUN…        curves.png

Readers take the last record of a step, because a resumed run appends the records of the steps that
it repeats. Needs: matplotlib to plot.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

# what an evaluation's two greedy numbers are: of our tasks, of a user's own with any rewards
LABELS = "right and ended", "right, ended or not"
OWN_LABELS = "mean reward", "mean reward, ended or not"
LINES = dict(
    eval="eval after {step:4d} steps | greedy {eval_greedy:.2f} {0}, {eval_greedy_loose:.2f} {1} | "
    "sampled {eval_sampled:.2f} | {rollout_s:.1f}s",
    step="step {step:4d} | reward {reward:.2f} | signal {signal:.0%} | finished {finished:.0%} | "
    "len {length:.1f} | entropy {entropy:.2f} | mismatch {mismatch:.4f} | "
    "kl_noise {kl_noise:.1e} | "
    "clip {clip_fraction:.1%} | grad {grad_norm:.2f} | lr {lr:.1e} | σ {sigma:.1e} | "
    "gen {rollout_s:.1f}s {rollout_tok_s:.0f} tok/s | "
    "train {update_s:.1f}s {update_tok_s:.0f} tok/s | "
    "{memory_gb:.1f} GB",
)


def diagnose(records, needed=5, seen="five steps"):
    """Records of steps, the oldest first → (name, sentence) of each problem in the last `needed` of
    them.
    """
    last, recent = records[-1], records[-needed:]
    if len(recent) == needed and all(r["signal"] == 0 for r in recent):
        yield (
            "flat",
            (
                f"{seen} without one group of unequal rewards: nothing can be learnt. Try a harder "
                "or easier task (--operands 2-5), a larger --group-size or --max-new-tokens."
            ),
        )
    if len(recent) == needed and all(r["finished"] == 0 for r in recent):
        yield (
            "unfinished",
            (
                f"{seen} in which no answer ended: raise --max-new-tokens, or check that the "
                "model's chat template and end token are the ones it was trained with."
            ),
        )
    if "skipped" in last:
        yield (
            "skipped",
            "loss or gradient was NaN or infinite, and the step was skipped: try a lower --lr.",
        )
    if not (last["mismatch"] or 1) <= 1.05:  # also if it is NaN
        yield (
            "mismatch",
            (
                f"sampler and trainer disagree by a factor of {last['mismatch']:.3f} on a token's "
                "probability: the ratios are wrong. Report it, also with --quant bf16."
            ),
        )


def logged(folder):
    """All records of a run in the order of writing, without lines cut off or written by hand."""
    keys = "kind", "step", "segment"
    found = []
    for record in jsonl(Path(folder) / "metrics.jsonl"):
        if type(record) is dict and [type(record.get(key)) for key in keys] == [str, int, int]:
            found.append(record)
    return found


def read(folder):
    """(kind, step) → its last record, in the order of steps."""
    last = {(r["kind"], r["step"]): r for r in logged(folder)}
    return dict(sorted(last.items(), key=lambda item: (item[0][1], item[0][0])))


def line(record, own_task=False):
    """A record as one line of text. –: not measured in this step. own_task: of a user's file, whose
    rewards may be any numbers.
    """
    text = LINES[record["kind"]]
    if "skipped" in record:
        text += " | skipped"
    values = {name: float("nan") if x is None else x for name, x in record.items()}
    text = text.format(*(OWN_LABELS if own_task else LABELS), **values)
    return text.replace("nan%", "–").replace("nan", "–")


def plot(folders, path=None):
    """Draw accuracy, entropy and noise, a colour for each run, a line style for each quantity →
    path, by default curves.png in the run's folder or, for several runs, in the current folder.
    """
    from matplotlib.figure import Figure

    path = path or Path("." if folders[1:] else folders[0], "curves.png")
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    curves = (  # axis, key of a record, label, style
        (left, "reward", "training reward", "-"),
        (left, "eval_greedy", "held out: of ended answers", "o-"),
        (left, "eval_greedy_loose", "held out: ended or not", "s--"),
        (middle, "entropy", "entropy", "-"),
        (right, "kl_noise", "KL(noisy ‖ clean), nats a token", ".-"),
        (right, "sigma", "σ of the noise", ":"),
    )
    for i, folder in enumerate(folders):
        records = read(folder).values()
        for axis, key, label, style in curves:
            found = [r for r in records if r.get(key) is not None]
            label = Path(folder).name if axis is middle else label if i == 0 else None
            axis.plot(
                [r["step"] for r in found],
                [r[key] for r in found],
                style,
                color=f"C{i}",
                label=label,
                markerfacecolor="none",
                alpha=0.4 if key == "reward" else 1,
            )
    # a reward may be any number
    left.set_ylim(min(-0.03, left.dataLim.y0), max(1.03, left.dataLim.y1))
    right.set_yscale("symlog", linthresh=1e-4)
    titles = "Mean reward", "Entropy of the policy, nats a token", "Adaptive noise"
    for axis, title in zip((left, middle, right), titles, strict=True):
        axis.set(title=title, xlabel="optimizer steps")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path


def show(folders):
    """→ the best and worst samples of each run as text, the last record of each."""
    last = {}
    for folder in folders:
        for sample in jsonl(Path(folder) / "samples.jsonl"):
            last[folder, sample["step"], sample["which"]] = sample
    return "\n".join(
        "step {step:4d} {which:5} | reward {reward:+.2f} | advantage {advantage:+.2f} | "
        "{prompt!r} → {answer!r}".format(**s)
        for s in last.values()
    )


def table(folders):
    """→ a line of text for each run in the folders. minutes: of its steps and evaluations."""
    rows = [("run", "task", "model", "steps", "first", "best", "last", "minutes")]
    for log in sorted(path for folder in folders for path in Path(folder).rglob("metrics.jsonl")):
        flags = dict(task="–", model="–", steps="–")
        records = read(log.parent).values()
        with suppress(OSError, TypeError, ValueError):  # without a config, or a damaged one
            flags |= json.loads((log.parent / "config.json").read_text())
        # until November 2026 each update of a rollout was a step, and config.json had their number
        made = sum(r["kind"] == "step" for r in records) * flags.get("updates_per_rollout", 1)
        greedy = [r["eval_greedy"] for r in records if r.get("eval_greedy") is not None]
        scores = ["–"] * 3  # first, best and last
        if greedy:
            scores = [f"{x:.2f}" for x in (greedy[0], max(greedy), greedy[-1])]
        seconds = sum(r["rollout_s"] + r.get("update_s", 0) for r in records)
        rows.append(
            (
                str(log.parent),
                Path(flags["task"]).stem,
                Path(flags["model"]).name,
                f"{made}/{flags['steps']}",
                *scores,
                f"{seconds / 60:.1f}",
            )
        )
    if not rows[1:]:
        raise ValueError(f"no run in {', '.join(folders)}: name the folder that holds your runs")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)) for row in rows)


def jsonl(path):
    """The records of a JSONL file, without a line that a crash cut off, even within a character."""
    if not path.is_file():
        raise ValueError(
            f"{path.parent} holds no {path.name}: name the folder of a run that has made a step"
        )
    for text in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            yield json.loads(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have Unicode
    command, *folders = sys.argv[1:] or [""]
    try:
        if command == "list":
            print(table(folders or ["runs"]))
        elif command in ("show", "plot") and folders:
            runs = [
                folder for folder in folders if (Path(folder) / "metrics.jsonl").is_file()
            ] or folders
            for folder in set(folders).difference(runs):
                print(f"note: {folder} holds no run", file=sys.stderr)
            print(show(runs) if command == "show" else plot(runs))
        else:
            raise ValueError("usage: python -m tools.report show RUN…, plot RUN… or list [FOLDER]")
    except (ValueError, OSError) as error:
        sys.exit(f"{error}")
