"""The four figures of docs/evening.md and docs/exercises.md, drawn from the code that they explain.

python -m docs.figures [FOLDER]         default: docs/figures

Needs: torch, matplotlib; grpo.py, nvfp4.py, rollout.py.
"""

import sys
from collections import deque
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # files only: no window
import matplotlib.pyplot as plt
import torch

import grpo
import nvfp4
from rollout import Limits, Scheduler, Sequence

FOLDER = Path(__file__).parent / "figures"
BLUE, RED, GRAY = "#2a6fbb", "#c8442c", "#777777"


def e2m1():
    """The positive E2M1 numbers, and what each number between them is rounded to."""
    figure, axes = plt.subplots(figsize=(8, 1.9))
    x = torch.linspace(0, 6.5, 400)
    kept = nvfp4._nearest_e2m1(x.clone())
    axes.scatter(x, torch.full_like(x, 0.35), c=kept, cmap="tab20", s=6, marker="s")
    for code, value in enumerate(nvfp4.E2M1):
        axes.plot([value, value], [0, 0.25], color=BLUE)
        axes.text(value, -0.1, f"{value:g}", ha="center", va="top")
        axes.text(
            value, -0.55, f"{code:03b}", ha="center", va="top", color=GRAY, family="monospace"
        )
    axes.text(6.6, 0.35, "rounds to the mark\nof its color", va="center", color=GRAY)
    axes.text(6.6, -0.1, "value", va="top")
    axes.text(6.6, -0.55, "code: two exponent bits, one mantissa bit", va="top", color=GRAY)
    axes.set(xlim=(-0.2, 10), ylim=(-1, 0.8), title="E2M1, the positive half")
    axes.axis("off")
    return figure


def loop():
    """One step of train.py as four boxes around the weights."""
    figure, axes = plt.subplots(figsize=(9, 3))
    boxes = {
        "prompts": (0, 1, "P prompts"),
        "answers": (2.6, 1, "G answers\nrollout.py"),
        "rewards": (5.2, 1, "rewards\ntasks.py"),
        "advantages": (7.8, 1, "advantages\ngrpo.py"),
        "weights": (4.5, 3, "one copy of the weights: NVFP4 base + LoRA + norms"),
        "loss": (10.4, 1, "loss\ngrpo.py"),
    }
    style = dict(boxstyle="round,pad=0.4", facecolor="white", edgecolor=BLUE)
    for x, y, text in boxes.values():
        axes.text(x, y, text, ha="center", va="center", bbox=style)
    arrow = dict(arrowstyle="->", color=GRAY)
    chain = "prompts", "answers", "rewards", "advantages", "loss"
    for left, right in zip(chain, chain[1:], strict=False):
        x, y, _ = boxes[left]
        axes.annotate("", (boxes[right][0] - 1.1, y), (x + 1.1, y), arrowprops=arrow)
    axes.annotate("", (2.6, 1.5), (3.4, 2.7), arrowprops=arrow)
    axes.text(2.6, 2.1, "with noise\nN(0, σ²)", ha="right", va="center", color=RED)
    axes.annotate("", (6.6, 2.7), (10, 1.5), arrowprops=arrow)
    axes.text(
        8.9, 2.2, "AdamW step on LoRA,\nnorms clean: train.py", ha="left", va="center", color=GRAY
    )
    axes.set(xlim=(-1, 11.5), ylim=(0.4, 3.5))
    axes.axis("off")
    return figure


def clip():
    """DAPO's objective of one token over its ratio ρ, for a good and for a bad answer."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    ratio = torch.linspace(0.5, 1.6, 400)
    low, high = grpo.LOSSES["dapo"].low, grpo.LOSSES["dapo"].high
    titles = {1.0: "a good answer, A = 1", -1.0: "a bad answer, A = −1"}
    for axes, A in zip(panels, titles, strict=True):
        shape = torch.ones_like(ratio)[:, None]  # 400 answers of one token
        log_ratio = ratio.log()[:, None]
        given = A * shape[:, 0], shape, shape[:, 0], (1 - low, 1 + high)
        loss, stopped = grpo.dapo(log_ratio, log_ratio, *given)
        stopped = stopped[:, 0]
        axes.plot(ratio[~stopped], -loss[~stopped], color=BLUE, label="has a gradient")
        axes.plot(ratio[stopped], -loss[stopped], color=RED, label="clipped: no gradient")
        axes.axvline(1, color=GRAY, linewidth=0.5)
        axes.set(xlabel="ρ = π_now / π_old", ylabel="objective", title=titles[A])
        axes.legend(frameon=False)
    return figure


def pages():
    """The block tables of a group of three rows, as the scheduler makes them."""
    size, prompt = 128, 300
    rows = deque(Sequence(row, 0, prompt, prompt - 1, prompt + 199) for row in range(3))
    stats = {"preempted": 0}
    limits = Limits(slots=3, pages=9, length=prompt + 200, prefill=prompt)
    scheduler = Scheduler(rows, size, limits, stats)
    scheduler.admit()
    figure, axes = plt.subplots(figsize=(8, 2.6))
    shared = {page for s in scheduler.running for page in s.pages[: s.shared]}
    for y, sequence in enumerate(reversed(scheduler.running)):
        axes.text(-20, y + 0.35, f"row {sequence.row}", ha="right", va="center")
        for i, page in enumerate(sequence.pages):
            face = "#cfe2f5" if page in shared else "#f7d6cf"
            box = plt.Rectangle((i * size, y), size - 4, 0.7, facecolor=face, edgecolor=GRAY)
            axes.add_patch(box)
            axes.text(i * size + size / 2, y + 0.35, f"page {page}", ha="center", va="center")
    axes.axvline(prompt, color=GRAY, linestyle="--")
    axes.text(prompt + 4, 3.0, f"the prompt's {prompt} tokens end here", color=GRAY)
    first, *copies = (sequence.pages[-1] for sequence in scheduler.running)
    note = f"blue: full pages, shared\nred: one page per row;\n{copies} begin as copies of {first}"
    axes.text(3 * size + 20, 1, note, va="center")
    axes.set(xlim=(-80, 4.9 * size), ylim=(-0.2, 3.3))
    axes.axis("off")
    return figure


FIGURES = e2m1, loop, clip, pages


def main(folder=FOLDER):
    Path(folder).mkdir(parents=True, exist_ok=True)
    for draw in FIGURES:
        figure = draw()
        figure.savefig(Path(folder) / f"{draw.__name__}.png", dpi=90, bbox_inches="tight")
        plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
