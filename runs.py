"""A run's folder: everything that a run leaves behind, written so that nothing written is ever lost.

    runs/NAME/config.json             the flags, resolved
              metrics.jsonl           one record a step and one an evaluation, appended; see README's glossary
              samples.jsonl           best and worst answers every few steps, appended
              checkpoint.safetensors  adapter and optimizer after a step; replaced whole or not at all
              adapter/                the same adapter in PEFT's files
              curves.png              drawn from metrics.jsonl

A run that is resumed replays the steps after its last checkpoint and appends their records again, with the
number of its segment; readers take the last record of a step. The batch, the noise and every sampled token
are functions of (seed, step), so on a CPU a resumed run ends with the bytes of one that was never stopped.

`python runs.py plot RUN…` draws, `python runs.py show RUN` prints samples.
Needs: torch, safetensors, matplotlib; lora.py.
"""

import argparse
import dataclasses
import fcntl
import inspect
import json
import os
import re
import resource
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import lora

# what a replayed step may write differently
TIMINGS = ("rollout_s", "update_s", "rollout_tok_s", "update_tok_s", "memory_gb", "segment")


class Run:
    """One segment of a run: from the start, or from a resume, to the end or an accident.

    done: optimizer steps that the model has behind it. quiet: a rank that neither prints nor writes.
    """

    def __init__(self, config, resume=False, quiet=False):
        """ValueError: the folder holds a run already and resume is off, or another process writes to it."""
        self.folder = Path(config.resume or Path(config.out) / (
            config.name or f"{config.task}-{time.strftime('%m%d-%H%M%S')}"))
        self.config, self.quiet, self.done, self.warned = config, quiet, 0, set()
        if quiet:
            return
        metrics = self.folder / "metrics.jsonl"
        if not resume and metrics.exists() and metrics.stat().st_size:
            raise ValueError(f"{self.folder} holds a run already: go on with --resume {self.folder}, "
                             "or take another --name")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.metrics = open(metrics, "ab+")
        try:
            fcntl.flock(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)       # the kernel drops it when we die
        except BlockingIOError:
            raise ValueError(f"another process is writing to {self.folder}: "
                             "two runs cannot share a folder") from None
        _end_line(self.metrics)
        self.segment = 1 + max((r["segment"] for r in read(self.folder).values()), default=-1)

    def banner(self, config, model, task, seconds):
        """What is about to run, in three lines."""
        if self.quiet:
            return
        learned = sum(p.numel() for p in model.parameters())
        print(f"{config.model}: {config.quant}, loaded in {seconds:.0f}s on {model.device}, "
              f"{learned / 1e6:.1f} M adapter weights learn\n"
              f"{config.task}: {len(task.train)} problems to train on, {len(task.held_out)} held out; "
              f"{config.prompts} prompts × {config.group_size} answers a step\n"
              f"run folder: {self.folder}", flush=True)

    def log(self, kind, step, record):
        """Append a record and print its line. kind: "step" or "eval"; step: optimizer steps before it."""
        if self.quiet:
            return
        record = {"kind": kind, "step": step, **{k: _rounded(v) for k, v in record.items()},
                  "segment": self.segment}
        _append(self.metrics, record)
        print(line(record), flush=True)

    def sample(self, step, texts, rewards, advantages):
        """Keep the worst and the best answer of a step. texts: (prompt, answer) of each row."""
        if self.quiet:
            return
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        with open(self.folder / "samples.jsonl", "ab+") as file:
            _end_line(file)
            for which, b in (("worst", order[0]), ("best", order[-1])):
                prompt, answer = texts[b]
                _append(file, dict(step=step, which=which, prompt=prompt, answer=answer, reward=rewards[b],
                                   advantage=advantages[b], segment=self.segment))
                print(f"    {which:5} {rewards[b]:+.2f}  {prompt!r} → {answer!r}", flush=True)

    def save(self, model, optimizer, base_name):
        """Write adapter and optimizer as they are after `done` steps, each file whole or not at all."""
        if self.quiet:
            return
        tensors = {}
        for name, p in model.named_parameters():
            tensors[name] = p.detach()
            tensors |= {f"{name}/{k}": v for k, v in optimizer.state.get(p, {}).items()}
        tensors = {k: v.contiguous().cpu() for k, v in tensors.items()}
        # the checkpoint last: dying in between, the steps since the one before are replayed and saved again
        lora.save_adapter(model, self.folder / "adapter", base_name)
        _replace(self.folder / "checkpoint.safetensors",
                 lambda p: save_file(tensors, p, metadata={"step": str(self.done)}))

    def load(self, model, optimizer):
        """→ the step to go on with, 0 if nothing was saved. ValueError: a checkpoint of another model.

        Then config.json is written: flags that were refused before do not stay behind.
        """
        path = self.folder / "checkpoint.safetensors"
        if path.exists():
            self._read(path, model, optimizer)
            lora.refresh(model)
        saved = dataclasses.asdict(self.config) | {"resume": "", "name": self.folder.name}
        if not self.quiet:
            _replace(self.folder / "config.json", lambda p: p.write_text(json.dumps(saved, indent=2) + "\n"))
        return self.done

    def _read(self, path, model, optimizer):
        with safe_open(path, "pt") as file:
            stored = set(file.keys())
            for name, p in model.named_parameters():
                if name not in stored or file.get_slice(name).get_shape() != list(p.shape):
                    raise ValueError(f"{path} has no {name} of shape {tuple(p.shape)}: "
                                     "was it another --model or --rank?")
                p.data.copy_(file.get_tensor(name))
                state = {k: file.get_tensor(f"{name}/{k}") for k in ("step", "exp_avg", "exp_avg_sq")
                         if f"{name}/{k}" in stored}
                if state:
                    optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in state.items()}
            self.done = int(file.metadata()["step"])

    def warn(self, history):
        """Say once what looks wrong in the last steps, and what to try."""
        for name, advice in diagnose(history):
            if name not in self.warned and not self.quiet:
                self.warned.add(name)
                print(f"warning: {advice}", file=sys.stderr, flush=True)

    def finish(self):
        """Draw the curves and say where everything is."""
        if not self.quiet:
            plot([self.folder], self.folder / "curves.png")
            print(f"done: {self.folder}/curves.png, adapter in {self.folder}/adapter")


def diagnose(records):
    """The last steps' records, oldest first → [(name, what is wrong and what to try)]."""
    found = []
    recent = records[-5:]
    if len(recent) == 5 and all(r["signal"] == 0 for r in recent):
        always = recent[-1]["reward"] > 0.5
        found.append(("flat", "five steps without one group of unequal rewards: nothing can be learnt. " + (
            "The task is solved; take a harder one." if always else
            "Try an easier task (--operands 2-5), a larger --group-size or --max-new-tokens.")))
    if len(recent) == 5 and all(r["finished"] == 0 for r in recent):
        found.append(("unfinished", "five steps in which no answer ended: raise --max-new-tokens, or check "
                      "that the model's chat template and end token are the ones it was trained with."))
    if recent and (recent[-1].get("mismatch") or 1) > 1.05:
        found.append(("mismatch", f"sampler and trainer disagree by a factor of {recent[-1]['mismatch']:.3f} "
                      "a token on the same weights: the ratios are not to be trusted. "
                      "Try --quant bf16 to find the side that is wrong, and report it."))
    return found


def parse_cli(cls, arguments):
    """One --flag per field of the dataclass, its comment as the help → an instance.

    --resume takes the run's own config, and flags given beside it win. An unknown flag or a wrong type stops.
    """
    comments = dict(re.findall(r"^    (\w+):.*?#\s*(.*)$", inspect.getsource(cls), re.M))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for f in dataclasses.fields(cls):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        text = f"{comments[f.name]} (default: {'none' if f.default in ('', None) else f.default})"
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=f.default,
                            help=text.replace("%", "%%"), **kind)
    folder = parser.parse_args(arguments).resume
    if folder:
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"--resume {folder}: there is no {path}; name the folder of a run")
        parser.set_defaults(**json.loads(path.read_text()))
    return cls(**vars(parser.parse_args(arguments)))


def peak_memory_gb():
    """Of the GPU where there is one, else of this process, since the start."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6         # Linux counts in KiB


@contextmanager
def deferred_signals():
    """SIGINT and SIGTERM wait until the block is left: what is inside happens whole or not at all."""
    pending = []
    old = {s: signal.signal(s, lambda n, _: pending.append(n)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for number in pending:
        signal.raise_signal(number)


def read(folder):
    """(kind, step) → its last record, in the order of steps. A line that a crash cut off is passed over."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl: name the folder of a run")
    records = {(record["kind"], record["step"]): record for record in _records(path)}
    return dict(sorted(records.items(), key=lambda item: (item[0][1], item[0][0])))


def line(record):
    """One record as one line for people: what is None was not measured in this step."""
    r = {k: float("nan") if v is None else v for k, v in record.items()}
    if r["kind"] == "eval":
        return (f"eval after {r['step']:4d} steps | greedy {r['eval_greedy']:.2f} right and ended, "
                f"{r['eval_greedy_loose']:.2f} last number right | sampled {r['eval_sampled']:.2f} | "
                f"{r['rollout_s']:.1f}s")
    text = (f"step {r['step']:4d} | reward {r['reward']:.2f} | signal {r['signal']:.0%} | "
            f"finished {r['finished']:.0%} | len {r['length']:.1f} | entropy {r['entropy']:.2f} | "
            f"mismatch {r['mismatch']:.4f} | kl_noise {r['kl_noise']:.1e} | clip {r['clip_fraction']:.1%} | "
            f"grad {r['grad_norm']:.2f} | lr {r['lr']:.1e} | σ {r['sigma']:.1e} | "
            f"gen {r['rollout_s']:.1f}s {r['rollout_tok_s']:.0f} tok/s | "
            f"train {r['update_s']:.1f}s {r['update_tok_s']:.0f} tok/s | {r['memory_gb']:.1f} GB")
    return text.replace("nan%", "–").replace("nan", "–")


def plot(folders, path):
    """Draw accuracy, entropy, noise into one PNG: a colour for each run, a line style for each quantity."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    curves = (  # axis, kind of record, key, label, style
        (0, "step", "reward", "training reward", dict(alpha=0.4)),
        (0, "eval", "eval_greedy", "held out: right and ended", dict(marker="o")),
        (0, "eval", "eval_greedy_loose", "held out: last number right",
         dict(marker="s", linestyle="--", mfc="none")),
        (1, "step", "entropy", "entropy", dict()),
        (2, "step", "kl_noise", "KL(noisy ‖ clean), nats a token", dict(marker=".")),
        (2, "step", "sigma", "σ of the noise", dict(linestyle=":")))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for i, folder in enumerate(folders):
        records = read(folder).values()
        for axis, kind, key, label, style in curves:
            points = [(r["step"], r[key]) for r in records if r["kind"] == kind and r[key] is not None]
            label = Path(folder).name if axis == 1 else label if i == 0 else None
            axes[axis].plot(*zip(*points, strict=True) if points else ([], []),
                            color=f"C{i}", label=label, **style)
    titles = (("Accuracy", "share of answers"), ("Entropy of the policy", "nats a token"),
              ("Adaptive noise", ""))
    for axis, (title, unit) in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="optimizer steps", ylabel=unit)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="best")
    axes[0].set_ylim(-0.03, 1.03)
    axes[1].set_ylim(bottom=0)
    axes[2].set_yscale("symlog", linthresh=1e-4)
    axes[2].set_ylim(bottom=0)
    _replace(Path(path), lambda p: figure.savefig(p, format="png", dpi=120))
    plt.close(figure)


def show(folder):
    """Print the run's best and worst samples, the last record of each."""
    path = Path(folder) / "samples.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} holds no samples.jsonl: name the folder of a run that has made a step")
    for s in {(s["step"], s["which"]): s for s in _records(path)}.values():
        print(f"step {s['step']:4d} {s['which']:5} | reward {s['reward']:+.2f} | "
              f"advantage {s['advantage']:+.2f} | {s['prompt']!r} → {s['answer']!r}")


def _records(path):
    """A JSONL file's records, without a line that a crash cut off, be it in the middle of a character."""
    for text in path.read_bytes().split(b"\n"):
        with suppress(json.JSONDecodeError, UnicodeDecodeError):
            yield json.loads(text)


def _append(file, record):
    """One write, one line, on the disk before we go on."""
    file.write((json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())
    file.flush()
    os.fsync(file.fileno())


def _end_line(file):
    """A crash may have cut the last line off: end it, so that the next record starts on its own."""
    file.seek(0, os.SEEK_END)
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _replace(path, write):
    """write(temporary path), then rename: at any moment `path` is the old file or the new one, whole."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _rounded(value):
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    command, *folders = sys.argv[1:] or [""]
    try:
        if command == "show" and len(folders) == 1:
            show(folders[0])
        elif command == "plot" and folders:
            target = Path(folders[0]) / "curves.png" if len(folders) == 1 else Path("curves.png")
            plot(folders, target)
            print(target)
        else:
            raise ValueError("usage: python runs.py plot RUN… | python runs.py show RUN")
    except (ValueError, OSError) as error:
        sys.exit(f"{error}")
