"""A run's folder: its files, and what keeps an accident from losing a finished step.

    config.json             the flags
    metrics.jsonl           one record per step and per evaluation, appended; keys: docs/metrics.md
    samples.jsonl           the worst and the best answer of each --eval-every-th step, appended
    eval.jsonl              the greedy answers of each evaluation, appended
    checkpoint.safetensors  adapter and optimizer after a step, with a checksum; never half written
    checkpoint.previous.…   the checkpoint before it, read when the last one is damaged or missing
    adapter/                the same adapter in PEFT's files, with a model card
    adapter-best/           the trained adapter with the highest eval_greedy; the first of equals
    curves.png              drawn from metrics.jsonl

A step samples a rollout, updates the model on it, then is counted, logged and, when it is due,
saved. What an accident costs depends on the moment:

    moment                          accident             what is lost
    sampling, evaluating            signal, any error    the step that samples
    updating, before AdamW's step   any error            the step that updates
    updating, after AdamW's step    any error            the steps since the last checkpoint: the
                                                         model is between two steps
    updating, logging, saving       signal               nothing: it waits until all three are done
    logging                         any error            nothing: the save writes the record, too
    saving                          any error            nothing if a second try succeeds, else (a
                                                         full disk) the steps since the last
                                                         checkpoint
    drawing the curves, at the end  any error            the drawing
    any                             SIGKILL, power cut   the steps since the last checkpoint, even
                                                         in the midst of a save

A signal is Ctrl-C, SIGTERM or SIGHUP. An error is whatever Python can raise: a bug, a child process
that was killed, no memory, no file descriptor. After it the last finished step is saved. What is
lost is computed again: a resumed run loads the newest checkpoint, replays the steps after it and
appends their records again; tools/report.py takes the last record of a step. Without a checkpoint
it begins at step 0. Every random draw is a function of the seed and of counters, such
as the step. The checkpoint stores what else the next step depends on: the parameters, AdamW's
state, and train.State: the steps done, the problems drawn so far (for --resample) and σ (for
adaptive noise). So on a CPU a resumed run ends with the same bytes as a run without a stop.

Needs: torch, safetensors, tqdm; lora.py, tools/{adapter,environment,flags,ranks,report}.py.
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
from shlex import quote, split

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

import lora
from tools.adapter import TENSORS, save_adapter, save_file
from tools.environment import Answer
from tools.flags import MOVABLE, Config, command_of, flags_of_run, program
from tools.ranks import alike, gather, rank_and_count
from tools.report import diagnose, line, logged, measured, plot

LONG_ROLLOUT = 10  # seconds; the line of a step tells of a shorter one soon enough
CARD = (  # of an adapter, for the hub
    "---\nlibrary_name: peft\n---\n# A LoRA adapter\n\n"
    "- base: {model}, under its own licence\n"
    "- task: {task}, {step} of {steps} steps\n"
    "- accuracy of greedy answers, or their mean reward: {scores}\n"
    "- command: `{command}`\n"
)


class ProgressBar(tqdm):
    """The sampler's bar. Without a terminal, a long rollout prints a line each tenth instead."""

    def __init__(self, **options):
        super().__init__(**options)
        self.label = options["desc"]
        self.began = time.perf_counter()

    def update(self, n: int = 1) -> None:
        """Count n more answers that have ended."""
        super().update(n)
        rank, _ = rank_and_count()
        if not self.disable or not self.label or rank > 0:
            return
        before = 10 * self.n // self.total
        self.n += n  # a disabled bar does not count
        seconds = time.perf_counter() - self.began
        if 10 * self.n // self.total > before and seconds > LONG_ROLLOUT:
            with suppress(OSError):  # nobody reads it any more
                print(f"{self.label}: {self.n} of {self.total} answers", file=sys.stderr)


class Run:
    """One segment of a run: from its start or a resume to its end or an accident.

    state: train.State: state.step counts the steps that are done, in all segments.
    consistent: False from the first change of a parameter in a step until the step is counted. In
    between the model is of no step, so it is never saved.
    newest_damaged: checkpoint.safetensors cannot be read. The next save overwrites it, and leaves
    checkpoint.previous as it is: renaming the damaged file would destroy the only good one.
    best: the highest eval_greedy of the trained model so far, in all segments. first: that of the
    model before its first step.
    hashes: {"problems": tools.environment.hash_of(task), "model": source.fingerprint.hex()} and, if
    the run began from an adapter that is still there, tools.adapter.fingerprint(it), which
    train.py sets. A checkpoint stores them, so that each may lie elsewhere when the run goes on.
    print_error: why say() could not print, which stops the run.
    """

    is_new = False
    best = first = -math.inf
    consistent = True
    newest_damaged = False
    print_error = ""

    def __init__(self, config: Config, quiet: bool = False, started_in: str = ""):
        """Lock the folder of --resume or --out, or a new one. guarded() loads the checkpoint later.
        With --preflight, lock nothing.

        quiet: do not print, write or lock; of several ranks all but the first are quiet.
        started_in: the folder that a relative path is from; "": the current one. A task of the
        user's own may have changed that.

        ValueError: another process has locked the folder; the folder holds a run and --resume is
        not given; the run to resume has lost its metrics.jsonl or its checkpoint; the run has made
        more steps than --steps. OSError: the folder or its log cannot be written.
        """
        named = f"runs/{Path(config.task).stem}-{time.strftime('%m%d-%H%M%S')}"
        self.name = str(Path(config.resume or config.out or named))
        self.folder = Path(started_in, self.name).absolute()
        self.how_to_resume = f"go on with: {program()} --resume {quote(self.name)}"
        # A task of the user's own is a program. A resume does not start it because a file says so.
        if config.own_task:
            self.how_to_resume += f" --task {quote(config.task)}"
        self.flags = vars(config) | {"resume": "", "out": self.name}
        self.model_name = config.model
        self.steps = config.steps
        self.any_reward = config.own_task
        self.is_preflight = config.preflight
        self.is_resumed = bool(config.resume)
        self.quiet = quiet
        self.history = []  # measurements of this segment's steps
        self.unlogged = []  # records that could not be appended to the log yet
        self.warned = set()  # names of problems: each is told once
        self.hashes = {}
        self.scores = {}  # step → the score of its evaluation, in words
        if quiet or config.preflight:
            return
        self._lock_folder()
        self._read_log()
        self.say(f"run folder: {self.name}")

    def _lock_folder(self):
        """Make the folder, and lock its log against other processes. The kernel unlocks it when
        this process ends, however it ends.
        """
        log = self.folder / "metrics.jsonl"
        self.is_new = not self.folder.exists()
        if self.is_resumed and not log.exists():
            raise ValueError(f"{log} is gone: bring it back, or {self.another_run()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(log, "ab")
        except OSError as error:
            remedy = "mend this, then resume" if self.is_resumed else "take another --out"
            raise OSError(f"{error}: {remedy}") from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {self.folder}: wait until it ends, or begin "
                "another run with another --out"
            ) from None
        # tell() is the log's size, because append mode opens a file at its end
        begun = self.lock.tell() or (self.folder / "config.json").is_file()
        if not self.is_resumed and (begun or self._weights()):
            raise ValueError(
                f"{self.folder} holds a run already: go on with --resume, or take another --out"
            )

    @contextmanager
    def removed_on_error(self):
        """Context manager around what precedes the first step: an error in it removes the folder
        that this run has made, of which nothing is worth keeping.
        """
        try:
            yield
        except BaseException:
            if self.is_new:
                (self.folder / "metrics.jsonl").unlink()
                with suppress(OSError):  # somebody has put a file there
                    self.folder.rmdir()
            raise

    def _read_log(self):
        """Number this segment, find the best evaluation so far, refuse too few --steps, and a run
        that had a checkpoint and has none now.
        """
        records = list(logged(self.folder))  # those of replayed steps occur more than once
        self.segment = max((record["segment"] + 1 for record in records), default=0)
        for record in records:
            if measured(record, "eval_greedy"):
                self._rank(record["step"], record["eval_greedy"])
        steps = {
            record["step"]: record["segment"] for record in records if record["kind"] == "step"
        }
        made = len(steps)
        if self.is_resumed and not self.checkpoints():
            # A run makes no step more than --save-every without a checkpoint, and without one each
            # segment begins at step 0. An adapter alone proves nothing: it is written before the
            # checkpoint, and that of the best evaluation at any time. A log without steps is none.
            if made:
                limit = flags_of_run(self.folder)["save_every"]
                lost = made > limit or steps.get(0, -1) < max(steps.values())
            else:
                lost = self._weights()
            if lost:
                raise ValueError(
                    f"{self.folder} has made {made} steps and lost its checkpoint: "
                    f"{self.another_run()}"
                )
            self.say("no step of this run was saved before it ended: it begins again at step 0")
        if self.steps < made:
            raise ValueError(
                f"--steps {self.steps}: {self.folder} has made {made} steps; "
                f"take at least as many, or evaluate with --steps 0 --adapter {self.folder}/adapter"
            )

    def another_run(self):
        """→ the way on from a folder that cannot be resumed: with an adapter, if it has one."""
        for name in ("adapter", "adapter-best"):
            if (self.folder / name / TENSORS).exists():
                return f"begin another run with --adapter {self.folder / name}"
        return "begin another run"

    def _weights(self):
        """→ the paths of all weights that a run has saved here, half a file included."""
        inside = self.folder.glob("adapter*/*.safetensors*")
        return [*self.folder.glob("*.safetensors*"), *inside]

    def _rank(self, step, score):
        """Note the score of an evaluation → whether it is the best of the trained model so far."""
        self.scores[step] = f"{score:.2f} after {step} steps"
        if step == 0:  # before its first step a run has no adapter of its own to keep
            self.first = score
            return False
        better = score > self.best
        self.best = max(self.best, score)
        return better

    # --- stop at any moment

    @contextmanager
    def guarded(self, model, optimizer, state):
        """Context manager around the training loop.

        model, optimizer, state (a train.State): what checkpoints store. guarded() first loads the
        newest whole checkpoint into them. Whatever ends the loop, it saves the last finished step,
        unless the model is between two steps. Then it prints how to resume and raises the error
        again. An OSError or a SafetensorError, of the loop or of this save, becomes an OSError that
        names the folder.
        """
        self.model = model
        self.optimizer = optimizer
        self.state = state
        # outside the try: an interrupt while loading must not save a half-loaded model
        self.load()
        self.first_step = state.step
        self.began = time.perf_counter()

        def begin_change(*_):
            self.consistent = False

        hook = optimizer.register_step_pre_hook(begin_change)  # called before AdamW's step
        try:
            # the inner try saves, and the outer one also handles what fails in that save
            try:
                yield
            except BaseException:
                if state.step > self.first_step:
                    # A second Ctrl-C waits until the save is complete. It is suppressed then,
                    # because the first one is about to end the run.
                    with suppress(KeyboardInterrupt, SystemExit), self.signals_deferred():
                        self.save()
                self.say(
                    f"\nstopped after {state.step} step{'s' * (state.step != 1)}"
                    f"{self.print_error}; {self.how_to_resume}",
                    sys.stderr,
                )
                raise
        except (OSError, SafetensorError) as error:  # safetensors has its own class for a full disk
            holds = (
                f"; the last checkpoint holds: {self.how_to_resume}" if self.checkpoints() else ""
            )
            raise OSError(f"{self.folder}: {error}{holds}") from error
        finally:
            hook.remove()  # or run and optimizer would hold each other, and the folder's lock
        self.finish()

    @contextmanager
    def signals_deferred(self):
        """Context manager around an update, its log and its save: no signal can separate them.

        Inside, the handler only notes a signal. At the end the former handlers are restored, and
        the noted signals raised again. The former handler stops the run or, under nohup, ignores
        SIGHUP. If the code inside raises an error, that error stops the run anyway, and the noted
        signals are dropped.
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

    # --- save and load

    def save(self):
        """Write the adapter and what the next step depends on, each file atomically.

        A model that is not consistent is not written: the checkpoint of an earlier step is better.
        OSError, SafetensorError: a file cannot be written; the checkpoint is still the one before.
        """
        if self.quiet or not self.consistent:
            return
        with suppress(OSError):  # a checkpoint is worth more than a line of the log
            self._write_log()
        tensors = checkpoint_tensors(self.model, self.optimizer)
        metadata = {name: str(value) for name, value in vars(self.state).items()}
        metadata |= self.hashes | {"program": program()}
        metadata["sha256"] = checksum(tensors, metadata)
        # The checkpoint last: after a crash between the two, a resumed run replays the steps and
        # writes both again. With the checkpoint first, it would have no step to replay after the
        # last save of a run, and adapter/ would stay old.
        self.save_adapter("adapter", self.state.step)
        write_atomically(
            self.folder / "checkpoint.safetensors",
            lambda path: save_file(tensors, path, metadata),
            keep_previous=not self.newest_damaged,
        )
        self.newest_damaged = False

    def save_adapter(self, name, step):
        """Write the adapter, which has learned for so many steps, and a model card into a folder of
        this name."""
        save_adapter(self.model, self.folder / name, self.model_name, self.card(step))

    def card(self, step):
        """→ the text of the card of an adapter that has learned for so many steps: the scores are
        the first and the last so far.
        """
        first, *later = [self.scores[n] for n in sorted(self.scores)] or ["unknown"]
        command = command_of(self.flags)
        scores = ", ".join([first, *later[-1:]])
        return CARD.format(**self.flags, step=step, scores=scores, command=command)

    def load(self):
        """Restore the newest checkpoint that is whole into model, optimizer and state. Without a
        checkpoint they stay as they are.

        config.json is written only after that, because a resume that is refused must not change the
        flags. ValueError: all checkpoints are damaged; the newest whole one is of another model or
        of other problems; config.json holds no flags of this version; the ranks found different
        checkpoints, or one rank failed. OSError: config.json cannot be written.
        """
        with alike() as facts:  # an error, if the ranks found different checkpoints
            for path in self.checkpoints():
                try:
                    tensors, metadata = read_checkpoint(path)
                except (SafetensorError, LookupError, TypeError, ValueError):
                    self.newest_damaged = True
                    self.say(
                        f"warning: {path} is damaged or incomplete: going back to the one before",
                        sys.stderr,
                    )
                    continue
                flags = flags_of_run(self.folder)
                self._compare_hashes(path, metadata, flags)
                self._compare_programs(metadata.get("program", program()))
                restore(path, tensors, self.model, self.optimizer)
                # until November 2026 each step drew the same number of problems
                each = flags["prompts"] * (1 + flags["resample"])
                stored = {"drawn": int(metadata["step"]) * each} | metadata
                for name, value in vars(self.state).items():
                    setattr(self.state, name, type(value)(stored.get(name, value)))
                if self.flags["sigma_start"] != flags["sigma_start"]:
                    self.state.sigma = 0.0  # adaptive noise begins there
                self.say(
                    f"resumed at {self.state.step / self.steps:.0%} of the schedules of lr and σ"
                )
                break
            else:  # no checkpoint was restored
                if self.newest_damaged:
                    raise ValueError(
                        f"every checkpoint in {self.folder} is damaged: {self.another_run()}"
                    )
            facts.append(self.state)
        if not self.quiet:
            text = json.dumps(self.flags, indent=2) + "\n"
            write_atomically(self.folder / "config.json", lambda path: path.write_text(text))

    def _compare_hashes(self, path, metadata, flags):
        """ValueError: the checkpoint in `path` is of another model, adapter or other problems; or
        it has no hash, as until November 2026, and the flags now name another path than they did.
        """
        moved = {kind for name, kind in MOVABLE.items() if flags[name] != self.flags[name]}
        for name, value in self.hashes.items():
            if metadata.get(name, "" if name in moved else value) != value:
                raise ValueError(
                    f"{path} is of another model or of other problems: {name} has changed since; "
                    f"bring it back, name it by its path, or {self.another_run()}"
                )

    def _compare_programs(self, before):
        """Warn if another file than now began the run, such as an idea.py that replaced the loss.
        before: program() of the checkpoint.
        """
        now = program()
        if Path(split(before)[-1]).name != Path(split(now)[-1]).name:
            self.say(
                f"warning: {before} began this run; what it changes is not in {now}", sys.stderr
            )

    def checkpoints(self):
        """→ the paths of the existing checkpoints, the newest first.

        There is only the previous one after a crash between the two renames of write_atomically. A
        preflight never resumes: also with --out of a run it has none here, so that
        train.py loads the adapter of --adapter.
        """
        if self.is_preflight:
            return []
        names = "checkpoint.safetensors", "checkpoint.previous.safetensors"
        return [self.folder / name for name in names if (self.folder / name).exists()]

    # --- log and print

    def finish_step(self, step: int, stats: dict) -> None:
        """Count a finished step in state.step, log it, and print warnings.

        stats: its measurements, by the keys of metrics.jsonl. ValueError: five steps in a row were
        skipped.
        """
        self.state.step = step + 1
        self.consistent = True  # before anything that can fail
        stats["memory_gb"] = peak_memory_gb()
        self.history.append(stats)
        self.log("step", step, stats)
        for name, advice in diagnose(self.history, min(5, self.steps)):
            if name not in self.warned:
                self.warned.add(name)
                self.say(f"warning: {advice}", sys.stderr)
        if sum("skipped" in recent for recent in self.history[-5:]) == 5:
            raise ValueError(
                "five steps in a row were skipped: if the loss is not your own, try a lower --lr"
            )

    def log(self, kind, step, record):
        """Append a record to the log and print it; keep the adapter of the best evaluation.

        kind: "step" or "eval". step: the number of steps made before it. record: measurements.
        """
        values = {name: rounded(value) for name, value in record.items()}
        record = {"kind": kind, "step": step, **values}
        if not self.quiet:
            if kind == "eval":
                # The adapter before the record: a resumed run reads `best` from the log, so the log
                # must not hold a score whose adapter a crash has lost.
                if self._rank(step, record["eval_greedy"]):
                    self.save_adapter("adapter-best", step)
            self.unlogged.append(record | {"segment": self.segment})
            self._write_log()
        text = line(record, any_reward=self.any_reward)
        if not self.steps:  # the adapter that is evaluated may have been trained for many
            text = f"eval |{text.partition('|')[2]}"
        if kind == "step":
            minutes = (time.perf_counter() - self.began) / 60  # of this segment
            left = minutes * (self.steps - step - 1) / (step + 1 - self.first_step)
            text += f" | {minutes:.1f} min, {left:.1f} min left"
        self.say(text)

    def _write_log(self):
        """Append the records that are not in the log yet."""
        while self.unlogged:
            append(self.folder / "metrics.jsonl", self.unlogged[0])
            del self.unlogged[0]

    def sample(self, step: int, answers: list[Answer], advantages: list[float]) -> None:
        """Keep and print the worst and the best answer of a step."""
        if self.quiet:
            return
        order = sorted(range(len(answers)), key=lambda row: answers[row].reward)
        for which, row in (("worst", order[0]), ("best", order[-1])):
            answer = answers[row]
            append(
                self.folder / "samples.jsonl",
                dict(
                    step=step,
                    which=which,
                    prompt=answer.prompt,
                    answer=answer.text,
                    reward=answer.reward,
                    advantage=advantages[row],
                    segment=self.segment,
                ),
            )
            quoted = f"{shortened(answer.prompt)} → {shortened(answer.text)}"
            self.say(f"    {which:5} {answer.reward:+.2f}  {quoted}")

    def answered(self, answers: list[Answer]) -> None:
        """Keep the greedy answers of an evaluation, one to each held-out problem."""
        if not self.quiet:
            where = dict(step=self.state.step, segment=self.segment)
            records = [where | answer._asdict() for answer in answers]
            append(self.folder / "eval.jsonl", *records)

    def finish(self):
        """Draw the curves and print where the results are. A drawing that fails costs only the
        drawing.
        """
        if self.quiet:
            return
        results = f"done: {self.name}"
        try:
            results += f"/{plot([self.folder]).name}"
        except Exception as error:
            command = f"python -m tools.report plot {self.name}"
            self.say(f"warning: no curves, for {error!r}; try {command}", sys.stderr)
        card = self.folder / "adapter" / "README.md"
        if card.exists():
            results += f", adapter in {self.name}/adapter"
            # the last evaluation followed the last save
            write_atomically(card, lambda path: path.write_text(self.card(self.steps)))
        if (self.folder / "adapter-best").exists():
            results += f", the best ({self.best:.2f}) in {self.name}/adapter-best"
            if self.best <= self.first:
                results += f"; before training it was {self.first:.2f}"
        self.say(results)

    def say(self, text, file=None):
        """Print. If that fails, stop the run as Ctrl-C does.

        It fails when the reader of a pipe has ended (Ctrl-C also ends `| tee`), when the terminal
        was closed, and when the disk behind `> log` is full.
        """
        if self.quiet:
            return
        try:
            print(text, file=file, flush=True)
        except OSError as error:
            # Python flushes stdout at exit, and would fail again: let it flush into nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.print_error = f" ({error.strerror})"
            raise KeyboardInterrupt from error


# --- a checkpoint: tensors, and as metadata the step and a checksum


def checkpoint_tensors(model, optimizer):
    """→ {name: tensor on the CPU} of the parameters and of AdamW's state.

    A parameter named P is stored under the key P. From AdamW's first step on, its state is stored
    under P/step (a scalar), P/exp_avg and P/exp_avg_sq (both of P's shape).
    """
    tensors = {}
    for name, p in model.named_parameters():
        tensors[name] = p
        for key, value in optimizer.state[p].items():
            tensors[f"{name}/{key}"] = value
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def restore(path, tensors, model, optimizer):
    """The inverse of checkpoint_tensors: copy the tensors into the model and the optimizer.

    path: of their checkpoint, for the message. ValueError: they belong to another model.
    """
    for name, p in model.named_parameters():
        # compare shapes, because copy_ would broadcast a lora_A of rank 1 to any rank
        if name not in tensors or tensors[name].shape != p.shape:
            raise ValueError(
                f"{path} has no {name} of {tuple(p.shape)}: another --model or --rank?"
            )
        p.data.copy_(tensors[name])
        if f"{name}/step" in tensors:
            optimizer.state[p] = {
                key: tensors[f"{name}/{key}"].to(p.device)
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
    lora.refresh(model)  # the copies that the base multiplies by: bf16 on a GPU, fp32 on a CPU


def read_checkpoint(path):
    """→ the tensors {name: tensor} and the metadata of a checkpoint.

    SafetensorError, LookupError, TypeError, ValueError: the file is not as it was written.
    """
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata() or {}
    if metadata.pop("sha256") != checksum(tensors, metadata):
        raise ValueError("its checksum is another")
    return tensors, metadata


def checksum(tensors, metadata):
    """→ SHA-256, in hex, of a checkpoint's metadata {name: text} and of its tensors' names, types,
    shapes and bytes. Until November 2026 the metadata had the step alone.
    """
    names = "step", "drawn", "problems", "sigma", "model", "adapter", "program"
    known = [metadata[name] for name in names if name in metadata]
    sha = hashlib.sha256(" ".join(known).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


# --- files


def write_atomically(path, write, keep_previous=False):
    """Replace a file so that `path` is at any moment the whole old file, the whole new one, or,
    with keep_previous, missing.

    write: a function that writes the new file to the path it is given. keep_previous: rename the
    old file from NAME.EXT to NAME.previous.EXT first.
    """
    temporary = path.with_suffix(path.suffix + ".tmp")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())  # else a power cut after the rename may leave an empty file
    if keep_previous and path.exists():
        os.replace(path, path.with_suffix(f".previous{path.suffix}"))
    os.replace(temporary, path)


def append(path, *records):
    """Append records to a JSONL file as lines, and wait until they are on the disk."""
    text = "".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in records)
    text = text.encode()
    # unbuffered: after an error, closing the file must not write again what failed
    with open(path, "ab+", buffering=0) as file:
        if file.tell():  # append mode opens a file at its end: not 0 if it has lines
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash has cut the last line: end it
                text = b"\n" + text
        while text:  # on a nearly full disk write() writes a part, and the next write() raises
            text = text[file.write(text) :]
        os.fsync(file.fileno())


# --- measurements


def shortened(value):
    """→ repr of a prompt or an answer, without the middle of a long one: the two samples of a step
    fill a screen of 24 lines of 80 characters at most.
    """
    text = repr(value)
    return text if len(text) <= 450 else f"{text[:220]} […] {text[-220:]}"


def peak_memory_gb():
    """Peak memory since the start, in 1e9 bytes: of the GPU if this process uses one, else of the
    process. Of several ranks, the largest.
    """
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated()
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return max(gather(peak)) / 1e9


def rounded(x, digits=6):
    """Round a float to so many significant digits; NaN and infinity, which JSON cannot hold, become
    None. Other values stay.
    """
    if not isinstance(x, float):
        return x
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None
