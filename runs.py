"""A run's folder: everything that a run leaves behind, written so that nothing written is ever lost.

    runs/NAME/config.json             the flags, resolved
              metrics.jsonl           one record a step and one an evaluation, appended; see README's glossary
              samples.jsonl           best and worst answers every few steps, appended
              checkpoint.safetensors  adapter and optimizer after a step; replaced whole or not at all
              checkpoint.previous.…   the one before, for when the last is damaged, which its checksum tells
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
import hashlib
import inspect
import json
import math
import os
import re
import resource
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import lora

PROBE = 32                          # prompts of a preflight


class Unwritten(OSError):
    """A file of the run's folder, which a full disk or a permission kept from being written."""


class Run:
    """One segment of a run: from the start, or from a resume, to the end or an accident.

    done: optimizer steps that the model has behind it; whole: it is not in the middle of another.
    quiet: a rank that neither prints nor writes.
    """

    def __init__(self, config, quiet=False):
        """ValueError: the folder holds a run already, without --resume, or another process writes to it."""
        self.folder = Path(config.resume or Path(config.out) / (
            config.name or f"{Path(config.task).stem}-{time.strftime('%m%d-%H%M%S')}"))
        self.config, self.quiet, self.done, self.warned = config, quiet, 0, set()
        self.checkpoint, self.previous = (
            self.folder / f"checkpoint{kind}.safetensors" for kind in ("", ".previous"))
        self.whole, self.damaged = True, False
        if quiet:
            return
        with self.writing("metrics.jsonl"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.metrics = open(self.folder / "metrics.jsonl", "ab+", buffering=0)
        try:
            fcntl.flock(self.metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)       # the kernel drops it when we die
        except BlockingIOError:
            raise ValueError(f"another process is writing to {self.folder}: "
                             "two runs cannot share a folder") from None
        if not config.resume and (self.metrics.seek(0, os.SEEK_END) or self.saved()):
            raise ValueError(f"{self.folder} holds a run already: go on with --resume {self.folder}, "
                             "or take another --name")
        self.segment = 1 + max((r["segment"] for r in read(self.folder).values()), default=-1)

    def banner(self, model, task, seconds):
        """What is about to run, in three lines."""
        if self.quiet:
            return
        config, learned = self.config, sum(p.numel() for p in model.parameters())
        print(f"{config.model}: {config.quant}, loaded in {seconds:.0f}s on {model.device}, "
              f"{learned / 1e6:.1f} M adapter weights learn\n"
              f"{config.task}: {len(task.train)} problems to train on, {len(task.held_out)} held out; "
              f"{config.prompts} prompts × {config.group_size} answers a step\n"
              f"run folder: {self.folder}", flush=True)

    def log(self, kind, step, record):
        """Append a record and print its line. kind: "step" or "eval"; step: optimizer steps before it."""
        if self.quiet:
            return
        record = {"kind": kind, "step": step, **{k: rounded(v) for k, v in record.items()},
                  "segment": self.segment}
        with self.writing("metrics.jsonl"):
            append(self.metrics, record)
        print(line(record), flush=True)

    def sample(self, step, texts, rewards, advantages):
        """Keep the worst and the best answer of a step. texts: (prompt, answer) of each row."""
        if self.quiet:
            return
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        kept = [dict(step=step, which=which, prompt=texts[b][0], answer=texts[b][1], reward=rewards[b],
                     advantage=advantages[b], segment=self.segment)
                for which, b in (("worst", order[0]), ("best", order[-1]))]
        with self.writing("samples.jsonl"), open(self.folder / "samples.jsonl", "ab+", buffering=0) as file:
            for s in kept:
                append(file, s)
        for s in kept:                  # not inside writing(): a reader that is gone is not the file's fault
            print(f"    {s['which']:5} {s['reward']:+.2f}  {s['prompt']!r} → {s['answer']!r}", flush=True)

    def save(self, model, optimizer):
        """Write adapter and optimizer as they are after `done` steps, each file whole or not at all.

        A model that is not whole is not saved: the checkpoint before it holds.
        """
        if self.quiet or not self.whole:
            return
        tensors = {}
        for name, p in model.named_parameters():
            tensors[name] = p.detach()
            tensors |= {f"{name}/{k}": v for k, v in optimizer.state.get(p, {}).items()}
        tensors = {k: v.contiguous().cpu() for k, v in tensors.items()}
        metadata = {"step": str(self.done), "sha256": _digest(tensors, self.done)}
        # the checkpoint last: dying in between, the steps since the one before are replayed and saved again
        with self.writing("checkpoint"):
            lora.save_adapter(model, self.folder / "adapter", self.config.model)
            _replace(self.checkpoint, lambda p: save_file(tensors, p, metadata=metadata),
                     keep=None if self.damaged else self.previous)
        self.damaged = False

    def load(self, model, optimizer):
        """→ the step to go on with, 0 if nothing was saved. A damaged checkpoint is passed over, aloud.

        ValueError: a checkpoint of another model; all are damaged; --steps it cannot end at. Only then
        config.json is written: flags that were refused do not stay behind.
        """
        for path in self.saved():
            try:
                tensors, self.done = _read(path)
            except (SafetensorError, LookupError, TypeError, ValueError) as error:
                self.damaged = True
                self.say(f"{path} is damaged ({_reason(error)}): going back to the one before it")
                continue
            for name, p in model.named_parameters():
                if name not in tensors or tensors[name].shape != p.shape:
                    raise ValueError(f"{path} has no {name} of shape {tuple(p.shape)}: "
                                     "was it another --model or --rank?")
                p.data.copy_(tensors[name])
                if f"{name}/step" in tensors:
                    optimizer.state[p] = {k: tensors[f"{name}/{k}"].to(p.device)
                                          for k in ("step", "exp_avg", "exp_avg_sq")}
            lora.refresh(model)
            break
        else:
            if self.damaged:
                raise ValueError(f"every checkpoint in {self.folder} is damaged: begin another run with "
                                 f"--adapter {self.folder}/adapter, or delete them to begin this one again")
        steps, each = self.config.steps, self.config.updates_per_rollout
        if self.done > steps or self.done % each:
            raise ValueError(f"--steps {steps} --updates-per-rollout {each}: {self.folder} has made "
                             f"{self.done} steps; take at least as many, and updates that divide them")
        if not self.quiet:
            flags = vars(self.config) | {"resume": "", "name": self.folder.name}
            text = json.dumps(flags, indent=2) + "\n"
            with self.writing("config.json"):
                _replace(self.folder / "config.json", lambda p: p.write_text(text))
        return self.done

    def saved(self):
        """The checkpoints that are there, the last one first."""
        return [path for path in (self.checkpoint, self.previous) if path.exists()]

    @contextmanager
    def writing(self, what):
        """What cannot be written inside (full disk, read-only folder) is an Unwritten of one sentence."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            kept = (f"; the last checkpoint holds: go on with python train.py --resume {self.folder}"
                    if self.saved() else "")
            raise Unwritten(f"{self.folder / what} cannot be written ({_reason(error)}){kept}") from error

    def say(self, warning):
        if not self.quiet:
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    def warn(self, history):
        """Say once what looks wrong in the last steps, and what to try."""
        for name, advice in diagnose(history):
            if name not in self.warned:
                self.warned.add(name)
                self.say(advice)

    def stop_if_diverged(self, history, sampled, advantages):
        """ValueError after five skipped steps in a row; the answers of the last are kept, to look at."""
        if sum("skipped" in r for r in history[-5:]) < 5:
            return
        path = self.folder / f"rollout-{self.done}.safetensors"
        tensors = {k: v.contiguous().cpu() for k, v in sampled._asdict().items()} | {"advantages": advantages}
        if not self.quiet:
            with self.writing(path.name):
                _replace(path, lambda p: save_file(tensors, p))
        raise ValueError("five steps in a row were skipped, as the loss or gradient was NaN or infinite; the "
                         f"last answers are in {path}; try a lower --lr")

    def out_of_memory(self, phase):
        """What to change, in one sentence."""
        flags = (f"--micro-tokens {self.config.micro_tokens // 2 or 1} --gradient-checkpointing"
                 if phase == "update" else f"--max-new-tokens {self.config.max_new_tokens // 2 or 1}")
        again = f"go on with: python train.py --resume {self.folder}" if self.saved() else "begin again with"
        return f"out of memory in the {phase} after {self.done} steps; {again} {flags}"

    def preflight(self, r):
        """Print what the record of a step without update says → exit code, 3: training would be pointless."""
        found = [*diagnose([r], 1, f"{PROBE} prompts")]
        untrained = r["signal"] == 0 or self.config.overlong == "mask" and r["finished"] == 0
        pointless = untrained or not r["mismatch"] <= 1.5
        if 0 < r["signal"] < .25:
            found.append(("", "most groups have equal rewards: take an easier or a harder task, a larger "
                          "--group-size, or --resample 2."))
        if 0 < r["finished"] < .5:
            found.append(("", "most answers are cut off: raise --max-new-tokens."))
        seconds = r["rollout_s"] + r["update_s"]
        text = "\n    ".join((
            f"{PROBE} prompts × {self.config.group_size} answers, nothing is updated:",
            f"solve rate  {r['solved']:7.1%}   answers with a reward above 0",
            f"finished    {r['finished']:7.1%}   answers that ended, of {r['length']:.0f} tokens on average",
            f"no signal   {1 - r['signal']:7.1%}   groups of equal rewards, which teach nothing",
            f"mismatch    {r['mismatch']:7.4f}   sampler against trainer; 1 is perfect",
            f"memory      {r['memory_gb']:7.1f}   GB at most",
            f"a step      {seconds:7.1f}   seconds, {r['update_s']:.1f} of them the update; "
            f"{self.config.steps} steps {seconds * self.config.steps / 60:.0f} minutes, evaluation aside",
            *(f"change: {advice}" for _, advice in found),
            "training would be pointless" if pointless else "ready to train"))
        if not self.quiet:
            print(text, flush=True)
            (self.folder / "metrics.jsonl").unlink()                 # empty: the folder goes as it came
            with suppress(OSError):
                self.folder.rmdir()
        return 3 if pointless else 0

    def finish(self):
        """Draw the curves and say where everything is."""
        if not self.quiet:
            with self.writing("curves.png"):
                plot([self.folder], self.folder / "curves.png")
            adapter = f", adapter in {self.folder}/adapter" if (self.folder / "adapter").exists() else ""
            print(f"done: {self.folder}/curves.png{adapter}")


def diagnose(records, needed=5, seen="five steps"):
    """The last steps' records, oldest first → what is wrong, as (name, what it is and what to try)."""
    recent = records[-needed:]
    if len(recent) == needed and all(r["signal"] == 0 for r in recent):
        always = recent[-1]["reward"] > 0.5
        yield "flat", f"{seen} without one group of unequal rewards: nothing can be learnt. " + (
            "The task is solved; take a harder one." if always else
            "Try easier problems (in arithmetic --operands 2-5), a larger --group-size or --max-new-tokens.")
    if len(recent) == needed and all(r["finished"] == 0 for r in recent):
        yield "unfinished", (f"{seen} in which no answer ended: raise --max-new-tokens, or check that the "
                             "model's chat template and end token are the ones it was trained with.")
    if recent and "skipped" in recent[-1]:
        yield "skipped", ("the loss or gradient was NaN or infinite, and the step was skipped: "
                          "if that comes again, try a lower --lr.")
    if recent and not (recent[-1].get("mismatch") or 1) <= 1.05:                # NaN is not either
        yield "mismatch", (f"sampler and trainer disagree by a factor of {recent[-1]['mismatch']:.3f} "
                           "a token on the same weights: the ratios are not to be trusted. "
                           "Try --quant bf16 to find the side that is wrong, and report it.")


def parse_cli(cls, arguments):
    """One --flag per field of the dataclass, its comment as the help → an instance.

    --resume takes the run's own config, and flags given beside it win. An unknown flag, a wrong type or one
    that the run could not heed stops.
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
        try:
            stored = json.loads(path.read_text())
            fits = {f.name: (f.type, int if f.type is float else f.type, type(f.default))
                    for f in dataclasses.fields(cls)}
            wrong = [f"{k}={v!r}" for k, v in stored.items() if type(v) not in fits.get(k, ())]
        except (AttributeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({_reason(error)}): mend it, or begin another run with "
                             f"--adapter {folder}/adapter") from error
        if wrong:
            raise ValueError(f"{path} has {', '.join(wrong)}: no flag of this version, or not of its type")
        parser.set_defaults(**stored)
    flags = vars(parser.parse_args(arguments))
    begun = folder and any(Path(folder).glob("checkpoint*.safetensors"))
    for name in ["name", "out"] * bool(folder) + ["adapter"] * bool(begun):
        if os.path.abspath(flags[name]) != os.path.abspath(parser.get_default(name)):
            raise ValueError(f"--{name} {flags[name]} beside --resume {folder}: that run has its own; "
                             "leave it out, or begin another run")
    for name in ("model", "data", "test", "adapter", *["task"] * flags["task"].endswith(".py")):
        if os.path.exists(flags[name]) and flags[name] != "smollm2":    # where it is resumed, too
            flags[name] = os.path.abspath(flags[name])
    return cls(**flags)


def peak_memory_gb():
    """Of the GPU if this process has used one, else of the process, since the start."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9           # Linux counts in KiB


@contextmanager
def deferred_signals():
    """Signals that end a run wait until the block is left: what is inside happens whole or not at all."""
    pending, ends = [], (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {s: signal.signal(s, lambda n, _: pending.append(n)) for s in ends}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for number in pending:
        signal.raise_signal(number)


def read(folder):
    """(kind, step) → its last record, in the order of steps. A line that is none, cut off by a crash or
    written by hand, is passed over."""
    records = {(r["kind"], r["step"]): r for r in jsonl(Path(folder) / "metrics.jsonl")
               if isinstance(r, dict)
               and [type(r.get(key)) for key in ("kind", "step", "segment")] == [str, int, int]}
    return dict(sorted(records.items(), key=lambda item: (item[0][1], item[0][0])))


def line(record):
    """One record as one line for people: what is None was not measured in this step."""
    r = {k: float("nan") if v is None else v for k, v in record.items()}
    if r["kind"] == "eval":
        return (f"eval after {r['step']:4d} steps | greedy {r['eval_greedy']:.2f} right and ended, "
                f"{r['eval_greedy_loose']:.2f} right, ended or not | sampled {r['eval_sampled']:.2f} | "
                f"{r['rollout_s']:.1f}s")
    text = (f"step {r['step']:4d} | reward {r['reward']:.2f} | signal {r['signal']:.0%} | "
            f"finished {r['finished']:.0%} | len {r['length']:.1f} | entropy {r['entropy']:.2f} | "
            f"mismatch {r['mismatch']:.4f} | kl_noise {r['kl_noise']:.1e} | clip {r['clip_fraction']:.1%} | "
            f"grad {r['grad_norm']:.2f} | lr {r['lr']:.1e} | σ {r['sigma']:.1e} | "
            f"gen {r['rollout_s']:.1f}s {r['rollout_tok_s']:.0f} tok/s | "
            f"train {r['update_s']:.1f}s {r['update_tok_s']:.0f} tok/s | {r['memory_gb']:.1f} GB"
            + (f" of {r['planned_gb']:.1f} planned" if "planned_gb" in r else "")
            + " | skipped" * ("skipped" in r))
    return text.replace("nan%", "–").replace("nan", "–")


def plot(folders, path):
    """Draw accuracy, entropy, noise into one PNG: a colour for each run, a line style for each quantity."""
    from matplotlib.figure import Figure
    curves = (  # axis, kind of record, key, label, style
        (0, "step", "reward", "training reward", dict(alpha=0.4)),
        (0, "eval", "eval_greedy", "held out: right and ended", dict(marker="o")),
        (0, "eval", "eval_greedy_loose", "held out: right, ended or not",
         dict(marker="s", linestyle="--", mfc="none")),
        (1, "step", "entropy", "entropy", dict()),
        (2, "step", "kl_noise", "KL(noisy ‖ clean), nats a token", dict(marker=".")),
        (2, "step", "sigma", "σ of the noise", dict(linestyle=":")))
    figure = Figure(figsize=(13, 3.8))
    axes = figure.subplots(1, 3, gridspec_kw=dict(left=.05, right=.99, bottom=.13, top=.92, wspace=.22))
    for i, folder in enumerate(folders):
        records = read(folder).values()
        for axis, kind, key, label, style in curves:
            points = [(r["step"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]
            label = Path(folder).name if axis == 1 else label if i == 0 else None
            axes[axis].plot(*zip(*points, strict=True) if points else ([], []),
                            color=f"C{i}", label=label, **style)
    drawn = axes[0].dataLim                                # rewards of one's own may lie outside of 0 to 1
    axes[0].set(title="Accuracy", ylabel="share of answers", ylim=(min(-.03, drawn.y0), max(1.03, drawn.y1)))
    axes[1].set(title="Entropy of the policy", ylabel="nats a token", ylim=(0, None))
    axes[2].set_yscale("symlog", linthresh=1e-4)
    axes[2].set(title="Adaptive noise", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("optimizer steps")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="best")
    _replace(Path(path), lambda p: figure.savefig(p, format="png", dpi=120))


def show(folder):
    """Print the run's best and worst samples, the last record of each."""
    for s in {(s["step"], s["which"]): s for s in jsonl(Path(folder) / "samples.jsonl")}.values():
        print(f"step {s['step']:4d} {s['which']:5} | reward {s['reward']:+.2f} | "
              f"advantage {s['advantage']:+.2f} | {s['prompt']!r} → {s['answer']!r}")


def jsonl(path):
    """A JSONL file's records, without a line that a crash cut off, be it in the middle of a character."""
    if not path.is_file():
        raise ValueError(f"{path.parent} holds no {path.name}: name the folder of a run that has made a step")
    for text in path.read_bytes().split(b"\n"):
        with suppress(ValueError, RecursionError):
            yield json.loads(text)


def append(file, record):
    """A line of its own, on the disk before we go on. file: "ab+", unbuffered, or closing would write again
    what failed."""
    text = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        text = text if file.read(1) == b"\n" else b"\n" + text        # a crash may have cut the last line off
    while text:                                     # a nearly full disk takes a part, then says so
        text = text[file.write(text):]
    os.fsync(file.fileno())


def _replace(path, write, keep=None):
    """write(temporary path), then rename: at any moment `path` is the old file or the new one, whole.
    keep: the old one's new name; for a moment only this one is there."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    if keep and path.exists():
        os.replace(path, keep)
    os.replace(temporary, path)


def _read(path):
    """→ tensors, step of a checkpoint. What is not as it was written raises something."""
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    if metadata["sha256"] != _digest(tensors, metadata["step"]):
        raise ValueError("its checksum is another")
    return tensors, int(metadata["step"])


def _digest(tensors, step):
    """SHA-256 of all that a checkpoint says."""
    sha = hashlib.sha256(str(step).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def _reason(error):
    return getattr(error, "strerror", None) or (str(error) or type(error).__name__).splitlines()[0]


def rounded(x, digits=6):
    """Six digits are enough; NaN and infinity, which JSON does not have, are None."""
    return x if not isinstance(x, float) else float(f"{x:.{digits}g}") if math.isfinite(x) else None


if __name__ == "__main__":
    command, *folders = sys.argv[1:] or [""]
    sys.stdout.reconfigure(errors="replace")                # a terminal without Unicode
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
