"""A run's folder: its files, and what keeps an accident from losing a finished step.

    config.json             the flags
    metrics.jsonl           one record per step and per evaluation, appended; keys: results/LOG.md
    samples.jsonl           the worst and the best answer of a step after each evaluation, appended
    checkpoint.safetensors  adapter and optimizer after a step, with a checksum; replaced atomically
    checkpoint.previous.…   the checkpoint before it, read when the last one is damaged
    adapter/                the same adapter in PEFT's files
    adapter-best/           the trained adapter with the highest eval_greedy; the first of equals
    curves.png              drawn from metrics.jsonl

A resumed run replays the steps after its last checkpoint and appends their records again; readers
take the last record of a step. The batch, the noise and every sampled token are functions of (seed,
step), so on a CPU a resumed run ends with the same bytes as a run without a stop.
Needs: torch, safetensors; lora.py, tools/report.py.
"""

import fcntl
import hashlib
import json
import math
import os
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
from tools.report import diagnose, line, logged, plot

PROBE = 32  # prompts that a preflight samples


class Run:
    """One segment of a run: from its start or a resume to its end or an accident.

    done: steps that the model has made. whole: False from the first change of the parameters in a
    step until that step is counted; such a model is never saved. damaged: the newest checkpoint
    cannot be read, so the next save must not keep it as the previous one. best: the highest
    eval_greedy so far.
    """

    def __init__(self, config, quiet=False):
        """quiet: do not print or write. ValueError: the folder is taken, or its run has made over
        --steps.
        """
        named = f"runs/{Path(config.task).stem}-{time.strftime('%m%d-%H%M%S')}"
        self.folder = Path(config.resume or config.out or named)
        self.go_on = f"go on with: python train.py --resume {self.folder}"
        self.config, self.quiet = config, quiet
        self.history, self.warned = [], set()  # records of this segment's steps, names of warnings
        self.done, self.best = 0, -math.inf
        self.whole, self.damaged = True, False
        if quiet or config.preflight:
            return
        self._lock_folder()
        self._read_log()
        self.say(f"run folder: {self.folder}")

    def _lock_folder(self):
        """Make the folder, and lock its log against another process until this one ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "metrics.jsonl", "ab")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel unlocks when we die
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {self.folder}: take another --out"
            ) from None
        if not self.config.resume and (self.lock.tell() or self.saved()):
            raise ValueError(
                f"{self.folder} holds a run already: go on with --resume, or take another --out"
            )

    def _read_log(self):
        """Number this segment, find the best evaluation so far, refuse too few --steps."""
        records = logged(self.folder)  # also those of replayed steps
        self.segment = 1 + max((r["segment"] for r in records), default=-1)
        for record in records:
            if record["step"] and record.get("eval_greedy") is not None:
                self.best = max(self.best, record["eval_greedy"])
        made = len({r["step"] for r in records if r["kind"] == "step"})
        if self.config.steps < made:
            raise ValueError(
                f"--steps {self.config.steps}: {self.folder} has made {made} steps; take at least "
                f"as many, or evaluate with --steps 0 --adapter {self.folder}"
            )

    @contextmanager
    def guarded(self, model, optimizer):
        """Context manager around the training loop; yields the first step. A loop that is stopped
        or fails saves its last finished step, unless it failed to write a file, and says how to go
        on.
        """
        self.model = model
        self.first = self.load(model, optimizer)  # outside the try: never save half a model
        self.began = time.perf_counter()
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "whole", False))
        try:
            try:
                yield self.first
            except (KeyboardInterrupt, SystemExit, ValueError, RuntimeError) as stop:
                if self.done > self.first:
                    # a second Ctrl-C waits until the save is complete, and is then dropped
                    with suppress(KeyboardInterrupt, SystemExit), self.signals_deferred():
                        self.save(model, optimizer)
                why = stop.args[0] if isinstance(stop, KeyboardInterrupt) and stop.args else ""
                self.say(f"\nstopped after {self.done} steps{why}; {self.go_on}", sys.stderr)
                raise
        # a full disk, for example: do not save, because the log may lack the last step
        except (OSError, SafetensorError) as error:
            holds = f"; the last checkpoint holds: {self.go_on}" if self.saved() else ""
            raise OSError(f"{self.folder}: {error}{holds}") from error
        self.finish()

    @contextmanager
    def signals_deferred(self):
        """Encloses an update, its log and its save. A signal in between takes effect at the end, so
        that no part is left out.
        """
        pending = []
        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handlers[number] = signal.signal(number, lambda number, _: pending.append(number))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for number in pending:
            signal.raise_signal(number)

    def made(self, step, stats):
        """Count and log a finished step, and print warnings. ValueError: five steps in a row were
        skipped.
        """
        stats["memory_gb"] = peak_memory_gb()
        self.history.append(stats)
        self.done = step + 1
        self.whole = True
        self.log("step", step, stats)
        for name, advice in diagnose(self.history):
            if name not in self.warned:
                self.warned.add(name)
                self.say(f"warning: {advice}", sys.stderr)
        if sum("skipped" in r for r in self.history[-5:]) == 5:
            raise ValueError("five steps in a row were skipped: try a lower --lr")

    def log(self, kind, step, record):
        """Append a record, print it, and keep the adapter that an evaluation found best. kind:
        "step" or "eval"; step: optimizer steps made before it.
        """
        record = {"kind": kind, "step": step, **{k: rounded(v) for k, v in record.items()}}
        if not self.quiet:
            if kind == "eval" and step and record["eval_greedy"] > self.best:
                self.best = record["eval_greedy"]  # adapter first: a resume reads best from the log
                lora.save_adapter(self.model, self.folder / "adapter-best", self.config.model)
            append(self.folder / "metrics.jsonl", record | {"segment": self.segment})
        text = line(record, own_task=self.config.task.endswith(".py"))
        if kind == "step":
            minutes = (time.perf_counter() - self.began) / 60  # since the start or the resume
            left = minutes * (self.config.steps - self.done) / (self.done - self.first)
            text += f" | {minutes:.1f} min, {left:.1f} min left"
        self.say(text)

    def sample(self, step, texts, rewards, advantages):
        """Keep and print the worst and the best answer of a step. texts: (prompt, answer) of each
        row.
        """
        if self.quiet:
            return
        order = sorted(range(len(rewards)), key=rewards.__getitem__)
        for which, row in (("worst", order[0]), ("best", order[-1])):
            prompt, answer = texts[row]
            record = dict(step=step, which=which, prompt=prompt, answer=answer)
            record |= dict(reward=rewards[row], advantage=advantages[row], segment=self.segment)
            append(self.folder / "samples.jsonl", record)
            self.say(f"    {which:5} {rewards[row]:+.2f}  {prompt!r} → {answer!r}")

    def save(self, model, optimizer):
        """Write adapter and optimizer after `done` steps, each file atomically. In the middle of an
        optimizer step nothing is written, because the last checkpoint is still good.
        """
        if self.quiet or not self.whole:
            return
        tensors = dict(model.named_parameters())
        for name, p in model.named_parameters():
            tensors |= {f"{name}/{k}": v for k, v in optimizer.state.get(p, {}).items()}
        tensors = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}
        metadata = {"step": str(self.done), "sha256": _digest(tensors, self.done)}
        # the checkpoint last: after a crash in between, a resume replays the steps and saves both
        # again
        lora.save_adapter(model, self.folder / "adapter", self.config.model)
        _replace(
            self.folder / "checkpoint.safetensors",
            lambda p: save_file(tensors, p, metadata=metadata),
            keep=not self.damaged,
        )
        self.damaged = False

    def load(self, model, optimizer):
        """→ the step to continue with, 0 without a checkpoint. Skips a damaged checkpoint, with a
        warning. ValueError: a checkpoint of another model; all are damaged.
        """
        for path in self.saved():
            try:
                tensors, self.done = _read(path)
            except (SafetensorError, LookupError, TypeError, ValueError) as error:
                self.damaged = True
                self.say(
                    f"warning: {path} is damaged ({error}): going back to the one before it",
                    sys.stderr,
                )
                continue
            restore(path, tensors, model, optimizer)
            self.say(f"resumed at {self.done / self.config.steps:.0%} of the schedules of lr and σ")
            break
        else:
            if self.damaged:
                raise ValueError(
                    f"every checkpoint in {self.folder} is damaged: begin another run with "
                    f"--adapter {self.folder}/adapter, or delete them to begin this one again"
                )
        if not self.quiet:  # only now: a refused resume must not change the flags
            flags = vars(self.config) | {"resume": "", "out": str(self.folder)}
            text = json.dumps(flags, indent=2) + "\n"
            _replace(self.folder / "config.json", lambda path: path.write_text(text))
        return self.done

    def saved(self):
        """Paths of the existing checkpoints, the last one first. A preflight has none, wherever it
        looks.
        """
        paths = (self.folder / f"checkpoint{kind}.safetensors" for kind in ("", ".previous"))
        return [path for path in paths if path.exists() and not self.config.preflight]

    def say(self, text, file=None):
        """Print. If that fails, stop the run as Ctrl-C does: the reader of a pipe ended (Ctrl-C
        also ends `| tee`), the terminal was closed, or the disk behind `> log` is full.
        """
        try:
            if not self.quiet:
                print(text, file=file, flush=True)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
            raise KeyboardInterrupt(f" ({error.strerror})") from error

    def preflight(self, r):
        """Report on the record of a step without update → exit code; 3: training would be
        pointless.
        """
        untrained = r["signal"] == 0 or self.config.overlong == "mask" and r["finished"] == 0
        pointless = untrained or not r["mismatch"] <= 1.5
        seconds = r["rollout_s"] + r["update_s"]
        minutes = seconds * self.config.steps / 60
        lines = [
            f"{PROBE} prompts × {self.config.group_size} answers, nothing is updated:",
            f"solve rate  {r['solved']:7.1%}   answers with a reward above 0",
            f"finished    {r['finished']:7.1%}   "
            "answers that ended; --max-new-tokens cut the others",
            f"no signal   {1 - r['signal']:7.1%}   "
            "groups of equal rewards; --resample replaces them",
            f"mismatch    {r['mismatch']:7.4f}   sampler against trainer; 1 is perfect",
            f"memory      {r['memory_gb']:7.1f}   GB at most",
            f"a step      {seconds:7.1f}   seconds, {r['update_s']:.1f} of them the update; "
            f"{self.config.steps} steps {minutes:.0f} minutes, evaluation aside",
            *(f"change: {text}" for _, text in diagnose([r], 1, f"{PROBE} prompts")),
            "training would be pointless" if pointless else "ready to train",
        ]
        self.say("\n    ".join(lines))
        return 3 if pointless else 0

    def finish(self):
        """Draw the curves and print where the results are. A drawing that fails costs only the
        drawing.
        """
        results = f"done: {self.folder}"
        try:
            results += "" if self.quiet else f"/{plot([self.folder]).name}"
        except Exception as error:
            self.say(
                f"warning: no curves, for {error!r}; try python -m tools.report plot {self.folder}",
                sys.stderr,
            )
        if (self.folder / "adapter").exists():
            results += f", adapter in {self.folder}/adapter"
        if (self.folder / "adapter-best").exists():
            results += f", the best ({self.best:.2f}) in {self.folder}/adapter-best"
        self.say(results)


def restore(path, tensors, model, optimizer):
    """Copy the tensors of the checkpoint at path into the model and the optimizer's state.
    ValueError: they belong to another model.
    """
    for name, p in model.named_parameters():
        if name not in tensors or tensors[name].shape != p.shape:
            raise ValueError(
                f"{path} has no {name} of {tuple(p.shape)}: another --model or --rank?"
            )
        p.data.copy_(tensors[name])
        if f"{name}/step" in tensors:
            optimizer.state[p] = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                optimizer.state[p][key] = tensors[f"{name}/{key}"].to(p.device)
    lora.refresh(model)


def peak_memory_gb():
    """Peak memory since the start, in 1e9 bytes: of the GPU if this process uses one, else of the
    process.
    """
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB


def append(path, record):
    """Append a record as a line, and wait until it is on the disk."""
    text = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()
    # unbuffered: closing must not write again what failed
    with open(path, "ab+", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            # a crash may have cut its last line
            text = text if file.read(1) == b"\n" else b"\n" + text
        while text:  # a nearly full disk writes a part, then raises
            text = text[file.write(text) :]
        os.fsync(file.fileno())


def _replace(path, write, keep=False):
    """write(temporary path), then rename it: `path` is always a whole file. keep: the old as
    .previous.
    """
    temporary = path.with_suffix(path.suffix + ".tmp")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    if keep and path.exists():
        os.replace(path, path.with_suffix(f".previous{path.suffix}"))
    os.replace(temporary, path)


def _read(path):
    """→ tensors, step of a checkpoint. A file that has changed since it was written raises."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    if metadata["sha256"] != _digest(tensors, metadata["step"]):
        raise ValueError("its checksum is another")
    return tensors, int(metadata["step"])


def _digest(tensors, step):
    """SHA-256 of a checkpoint's step and its tensors' names, types, shapes and bytes."""
    sha = hashlib.sha256(str(step).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def rounded(x, digits=6):
    """Round a float to so many significant digits; NaN and infinity, which JSON cannot hold, become
    None.
    """
    if not isinstance(x, float):
        return x
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None
