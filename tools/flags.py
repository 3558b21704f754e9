"""Every flag of train.py once: its default, help, choices and range; a command line → a checked
Config.

Most mistakes on a command line are found here, so this file does not import torch, which takes
seconds. Only what depends on the GPU or on an adapter's files imports it, in its function.

Needs: tasks.py, for its names; tools/{adapter,ends,metadata}.py.
"""

import dataclasses
import math
import os
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from shlex import quote

from tasks import TASKS
from tools.ends import nearest
from tools.metadata import read_object

# weights.QUANT, rollout.KV, grpo.LOSSES and aqn.SCHEDULES, whose files import torch.
QUANT = "nvfp4", "rtn", "bf16"
KV = "bf16", "int8"
LOSSES = "dapo", "grpo", "dr_grpo", "gspo", "cispo"
SCHEDULES = "exponential", "linear", "cosine", "logarithmic"
# Flags of earlier versions, and their defaults: a run whose config.json has another value of one
# cannot be resumed.
GONE = {"stop": "", "gradient_checkpointing": None}
# paths that a resume may give anew → which hash of a checkpoint is of their content
MOVABLE = dict(model="model", adapter="adapter", data="problems", test="problems", task="problems")
LITTLE = 1e-9  # above 0
# --lr of models with fewer weights than this
RATES = (3e8, 5e-4), (3e9, 1e-4), (math.inf, 2e-5)
# what flag() takes besides the default and the help; no number sensibly exceeds this high
ABOUT = dict(group="", choices=(), low=0, high=10**9, fixed=False, scored=False)


def flag(default, help, **about):
    """A field of Config.

    group: begins a group of --help. choices: the values it may take. low, high: the range of a
    number. fixed: a resumed run keeps its own value. scored: `--adapter RUN` takes RUN's value, as
    it does of all that is fixed, so that the adapter is evaluated as it was trained.
    """
    return dataclasses.field(default=default, metadata=ABOUT | about | dict(help=help))


@dataclasses.dataclass
class Config:
    model: str = flag(
        "smollm2",
        '"smollm2" (from its wheel), a folder, a .gguf file or a hub id',
        group="model",
        fixed=True,
    )
    quant: str = flag(
        "nvfp4",
        "nvfp4 (scale sweep), rtn (the paper's rounding); bf16: where it fits",
        choices=QUANT,
        fixed=True,
    )
    # 256: fp4_gemm's kernel keeps a tile of lora_B and of x @ lora_A.T in shared memory
    rank: int = flag(32, "LoRA r", low=1, high=256, fixed=True)
    alpha: float = flag(32, "LoRA α; the adapter is scaled by α/r", low=LITTLE, fixed=True)
    adapter: str = flag("", "a PEFT adapter to start from, or a run with its model, task, …")

    task: str = flag(
        "multiplication",
        "addition, gsm8k, math, or the PATH.py of your own",
        group="task",
        choices=(*TASKS, "math"),
        fixed=True,
    )
    data: str = flag(
        "", "problems: FILE.jsonl, or owner/name[/config][:split] on the hub", fixed=True
    )
    test: str = flag(
        "", "as --data: evaluate on all of these problems, train on none of them", fixed=True
    )
    operands: str = flag(
        "", "LOW-HIGH, ends included, of arithmetic tasks; empty: the task's own", fixed=True
    )
    max_prompt_tokens: int = flag(
        None, "drop problems with longer prompts, and say how many", low=1, fixed=True
    )
    template_kwargs: str = flag(
        "", """for the chat template, as JSON: '{"enable_thinking": false}'""", fixed=True
    )

    prompts: int = flag(8, "P, prompts a step over all ranks", group="sampling", low=1)
    group_size: int = flag(
        8, "G, answers to each prompt (paper: 8 for GSM8K, 16 for BigMath)", low=2
    )
    max_new_tokens: int = flag(
        None,
        "longest answer; left out: 16 for arithmetic tasks, 512 for all others",
        low=1,
        scored=True,
    )
    kv: str = flag(
        "bf16",
        "the sampler's keys and values: bf16, or int8 in half of the memory",
        choices=KV,
        scored=True,
    )
    temperature: float = flag(
        1.0, "divides the logits, in the sampler and in the trainer", low=LITTLE, scored=True
    )
    overlong: str = flag(
        "none",
        "truncated answers: none, mask (QeRL, as TRL: "
        "not trained, but in their group's mean), penalty (DAPO)",
        choices=("none", "mask", "penalty"),
    )
    resample: int = flag(0, "dynamic sampling: most extra rollouts to replace equal rewards")

    loss: str = flag(
        "dapo",
        "dapo, grpo, dr_grpo, gspo, cispo: see grpo.py",
        group="objective",
        choices=LOSSES,
    )
    advantage: str = flag(
        "group",
        "group: (reward − mean) / std of its group; rloo: reward − mean of the others; "
        "none: the reward",
        choices=("group", "rloo", "none"),
    )
    correction: str = flag(
        "none",
        "\"old\" is the trainer's (none; tis: weighted) or sampler's (bypass)",
        choices=("none", "bypass", "tis"),
    )
    updates_per_step: int = flag(1, "optimizer steps on the answers of one rollout", low=1)
    clip_low: float = flag(None, "ε_low; left out: the loss's own (0.2; gspo 3e-4)")
    clip_high: float = flag(
        None, "ε_high; left out: the loss's own (dapo 0.28, grpo 0.2, gspo 4e-4)"
    )
    beta: float = flag(0.0, "weight of the KL to the model without its adapter (paper: no KL)")

    aqn: bool = flag(True, "add noise to the RMSNorm weights while sampling", group="noise")
    sigma_start: float = flag(
        1e-2, "σ of the second stage; the first stage has no noise", low=LITTLE
    )
    sigma_end: float = flag(
        1e-4, "σ of the last stage (paper: 5e-4 in Table 4, 1e-4 in its scripts)", low=LITTLE
    )
    sigma_stages: int = flag(10, "number of stages of σ (the paper's K)", low=3)
    sigma_schedule: str = flag(
        "exponential",
        "exponential, linear, cosine, logarithmic; or adaptive, without stages: from "
        "--sigma-start 1.1-fold up or down after each step, to meet --sigma-target",
        choices=(*SCHEDULES, "adaptive"),
    )
    sigma_target: float = flag(
        0.02,
        "kl_noise that adaptive noise aims at: nats a token from the clean policy, "
        "over the answers that are trained, or if none is, over some",
        low=LITTLE,
    )

    steps: int = flag(16, "rollouts, each with its updates; 0 evaluates only", group="schedule")
    lr: float = flag(
        None,
        "AdamW; left out, it follows the model: 5e-4 below 0.3 billion parameters (SmolLM2), "
        "1e-4 below 3 billion, 2e-5 from there on (paper: 1e-5)",
    )
    schedule: str = flag(
        "linear",
        "learning rate: linear (to 0), constant, cosine (released scripts)",
        choices=("constant", "linear", "cosine"),
    )
    warmup: int = flag(
        0, "steps in which the learning rate rises from 0; --schedule begins after them"
    )
    weight_decay: float = flag(0.0, "AdamW's (released scripts: 0.1)")
    max_grad_norm: float = flag(
        1.0, "longer gradients are scaled down to it (released scripts: 0.2)", low=LITTLE
    )

    eval_every: int = flag(
        4,
        "steps between evaluations (also after the last), and printed samples",
        group="run",
        low=1,
    )
    eval_problems: int = flag(
        None,
        "most held-out problems to evaluate on; 0: none; left out: all",
        scored=True,
    )
    eval_samples: int = flag(1, "sampled answers to each held-out problem", low=1, scored=True)
    eval_top_p: float = flag(
        1.0,
        "nucleus of evaluation's sampled answers (paper: 0.95)",
        low=LITTLE,
        high=1,
        scored=True,
    )
    save_every: int = flag(5, "steps between checkpoints; also at the end and on Ctrl-C", low=1)
    micro_tokens: int = flag(
        None,
        "tokens of a micro-batch in the trainer, each prompt once; left out: as memory allows "
        "(a CPU: 1024)",
        low=1,
    )
    memory_gb: float = flag(
        None,
        "most GPU memory for PyTorch, in 1e9 bytes; CUDA takes about half a GB more; left out: "
        "all that is free",
        low=LITTLE,
    )
    seed: int = flag(0, "of all random draws but the held-out ones", high=2**32 - 1, scored=True)
    device: str = flag("", "cuda or cpu; empty: cuda where there is one")
    out: str = flag("", "this run's folder; empty: runs/TASK-MMDD-HHMMSS")
    resume: str = flag("", "folder of a run to continue with its flags; some may be given anew")
    preflight: bool = flag(
        False,
        "sample 32 prompts, whatever --prompts (a CPU: fewer), give advice, update "
        "nothing; exit 3 (torchrun: 0): pointless",
    )

    def __post_init__(self):
        if self.max_new_tokens is None:
            self.max_new_tokens = 16 if self.task in ("multiplication", "addition") else 512

    def follow_model(self, weights):
        """Set lr, if it was left out, by the number of the model's weights, and say so."""
        if self.lr is None:
            self.lr = next(rate for below, rate in RATES if weights < below)
            say(f"--lr {self.lr:g} follows the model's size")

    @property
    def own_task(self):
        """Whether the task is a Python file of the user's own."""
        return self.task.endswith(".py")


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
FIXED = {name for name, field in FIELDS.items() if field.metadata["fixed"]}
SCORED = FIXED | {name for name, field in FIELDS.items() if field.metadata["scored"]}


def spelled(name):
    """group_size → --group-size."""
    return f"--{name.replace('_', '-')}"


def program():
    """→ how this process was started, without flags: "python train.py", or a reader's "python
    idea.py". sys.argv would name train.py also if idea.py runs it by runpy. A process that was
    started from code, as by multiprocessing, has no command of its own.
    """
    if "-c" in sys.orig_argv:
        return "python train.py"
    words = ["python"]
    for word in sys.orig_argv[1:]:
        words.append(quote(word))
        if not word.startswith("-"):
            break
    return " ".join(words)


def command_of(flags):
    """→ the command line of a run with these flags, {name: value}, without its folder."""
    words = [program()]
    for name, value in flags.items():
        if value != FIELDS[name].default and name not in ("out", "resume"):
            given = f"{spelled(name)} {quote(str(value))}"
            words.append(f"--no-{name}" if value is False else given)
    return " ".join(words)


def is_path(value):
    """Whether a flag's value is a file or a folder, and no name that the flag knows."""
    return os.path.exists(value) and value not in ("smollm2", "math", *TASKS)


def parse(arguments):
    """→ a checked Config. Flags not given are those of the run in --resume, and the scored ones
    those of --adapter's run. SystemExit, ValueError: a wrong flag."""
    given = _given(arguments)
    if os.path.isdir(f"{given.get('adapter')}/adapter"):  # a run's folder: the adapter in it
        given["adapter"] += "/adapter"
    stored = {}
    if given.get("resume"):
        stored = _of_resumed_run(given)
    elif given.get("adapter"):
        stored = _of_adapters_run(given)
    config = Config(**stored | given)
    if config.own_task and "task" not in given:
        raise ValueError(
            f"the run's task is {config.task}, a program that would be started: "
            f"if you trust it, add --task {config.task}"
        )
    for name in MOVABLE:
        value = getattr(config, name)
        if is_path(value):
            setattr(config, name, os.path.abspath(value))  # a resume may start elsewhere
    warn_of_idle_flags(check(config), given)
    if config.model != "smollm2" and "steps" not in stored | given:
        say(
            f"note: {config.steps} steps, the default, suit SmolLM2's times table; "
            "GSM8K took 100 steps of 256 answers: give --steps"
        )
    if config.resume:
        file = Path(config.resume, "config.json")
        absent = FIELDS.keys() - read_object(file) - given.keys()
        if absent:  # the run is of a version without them, or somebody cut the file
            names = ", ".join(map(spelled, sorted(absent)))
            say(f"note: {file} lacks {names}: their defaults hold", file=sys.stderr)
    if config.adapter and config.beta:
        say(f"note: --beta pulls to {config.model} alone, not to {config.adapter}")
    return config


def _given(arguments):
    """→ {name: value} of the flags on the command line."""
    parser = ArgumentParser(
        usage="train.py [--flag value]", allow_abbrev=False, argument_default=SUPPRESS
    )
    group = parser
    for name, field in FIELDS.items():
        if field.metadata["group"]:
            group = parser.add_argument_group(field.metadata["group"])
        kind = {"action": BooleanOptionalAction} if field.type is bool else {"type": field.type}
        text = f"{field.metadata['help']} (default: {field.default})"
        group.add_argument(spelled(name), help=text, **kind)
    given, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        near = map(spelled, get_close_matches(word.replace("-", "_"), FIELDS, cutoff=0))
        raise ValueError(f"there is no {word}; the nearest are {', '.join(near)}; --help lists all")
    return vars(given)


def _of_resumed_run(given):
    """→ the flags of the run in --resume. ValueError: a flag that it cannot change."""
    folder = given["resume"]
    stored = flags_of_run(folder) | {"out": folder}
    # What the checkpoint is of, where it lies, what the run began from, how many updates its steps
    # made, and how many problems its evaluations had. Another seed would shuffle the problems of
    # the present epoch anew.
    kept = FIXED | {"out", "adapter", "updates_per_step", "eval_problems", "seed"}
    for name in given.keys() & kept:
        if name in MOVABLE and stored[name] and is_path(given[name]):
            continue  # it may have moved: tools/run.py compares hashes with the checkpoint's
        now, then = given[name], stored[name]
        if now != then and os.path.abspath(str(now)) != os.path.abspath(str(then)):
            raise ValueError(
                f"{spelled(name)} {now} beside --resume {folder}: that run has its own "
                f"({then!r}); leave it out, or begin another run"
            )
    return stored


def _of_adapters_run(given):
    """→ the scored flags of the run that --adapter names, without those that are given, empty or 0,
    and under another --task without data, test and operands. Of an adapter from elsewhere its rank
    and alpha."""
    run = os.path.dirname(os.path.realpath(given["adapter"]))
    if not os.path.isfile(f"{run}/metrics.jsonl"):
        from tools.adapter import read_settings

        settings = {}
        with suppress(ValueError):  # load_adapter will refuse it, by a sentence
            settings = read_settings(given["adapter"])
        found = {"rank": settings.get("r"), "alpha": settings.get("lora_alpha")}
        return {name: x for name, x in found.items() if type(x) in (int, float)}
    flags = flags_of_run(run)
    taken = SCORED - given.keys()
    if given.get("task", flags["task"]) != flags["task"]:
        taken -= {"data", "test", "operands"}
    stored = {name: value for name, value in flags.items() if value and name in taken}
    say(f"from {run}/config.json:", *(f"{spelled(name)} {stored[name]}" for name in stored))
    return stored


def say(*words, file=None):
    """Print, but of several ranks only on the first."""
    if os.environ.get("RANK", "0") == "0":
        print(*words, file=file)


def flags_of_run(folder):
    """→ the flags of a run. ValueError: its config.json is missing, damaged, or of another
    version."""
    path = Path(folder) / "config.json"
    try:
        given = read_object(path)
        # An old config.json may have this key: its run counted each update of a rollout as a step.
        updates = given.pop("updates_per_rollout", 1)
        if updates != 1:
            raise ValueError(
                f"it counts {updates} updates of a rollout as {updates} steps; now a step is a "
                "rollout with all its updates"
            )
        for name, default in GONE.items():
            value = given.pop(name, default)
            if value != default:
                raise ValueError(f"{spelled(name)} {value}, a flag that is gone")
        flags = vars(Config(**given))  # TypeError: an unknown flag
        for name, value in flags.items():
            kind = FIELDS[name].type
            # an int is a float, too; but True is no number, and 2.0 counts no prompts
            fits = type(value) in (kind, int if kind is float else kind)
            if value is not FIELDS[name].default and (kind(value) != value or not fits):
                raise ValueError({name: value})
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): name the folder of a run"
        ) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} has no flags of this version ({error}): name the folder of a run, "
            "or copy its adapter elsewhere and begin another run with --adapter COPY"
        ) from error
    return flags


def check(config):
    """→ config. ValueError: the first flag that cannot work, with its value and what it must be."""

    def refuse(name, why):
        raise ValueError(f"{spelled(name)} {getattr(config, name)} {why}")

    for name, field in FIELDS.items():
        value, about = getattr(config, name), field.metadata
        choices, low, high = about["choices"], about["low"], about["high"]
        own = name == "task" and config.own_task
        if choices and value not in choices and not own:
            also = ""
            if name == "task":
                also = ", or your own PATH.py; a file of problems is for --data, with --task gsm8k"
            refuse(name, f"must be one of {', '.join(choices)}{nearest(value, choices)}{also}")
        # `not` refuses NaN, too
        if field.type in (int, float) and value is not None and not low <= value <= high:
            refuse(name, f"must be {low} to {high}")
    if config.device not in ("", "cpu", "cuda") or (config.device == "cuda" and not _has_gpu()):
        refuse("device", "must be cpu, or cuda where torch finds a GPU")
    if config.own_task and (config.data or config.test or config.operands):
        refuse("task", "takes no --data, --test, --operands")
    if config.prompts % rank_count():
        refuse("prompts", "must be a multiple of the ranks")
    if config.steps and config.warmup >= config.steps:
        refuse("warmup", f"must be under --steps {config.steps}, or --lr is never reached")
    if config.preflight and config.resume:
        refuse("preflight", f"takes no --resume, but --adapter {config.resume}/adapter")
    if (config.loss, config.correction) == ("gspo", "bypass"):
        refuse(
            "loss",
            "needs --correction none or tis: the noise in an answer's ratio "
            "is far beyond gspo's clip of 3e-4 and would silence nearly all answers",
        )
    return config


def rank_count():
    """→ how many processes torchrun started; 1 without it. ValueError: its variable says no such
    number.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"WORLD_SIZE={count} is no number of ranks: unset it, or use torchrun")
    return int(count)


def _has_gpu():
    import torch

    return torch.cuda.is_available()


def warn_of_idle_flags(config, given):
    """Print a line for each of the rules below by which a given flag does nothing.

    given: {name: value} of the flags on the command line.
    """
    adaptive = config.sigma_schedule == "adaptive"
    one_policy = config.updates_per_step == 1 and config.correction != "bypass"
    evaluating = SCORED | {"steps", "adapter", "resume", "preflight", "device", "out", "memory_gb"}
    on_cpu = "memory_gb" in given and (config.device == "cpu" or not _has_gpu())
    training = config.steps or config.preflight
    rules = (  # beginnings of names, when they do nothing, why
        (FIELDS.keys() - evaluating, not training, "--steps 0 trains nothing"),
        (["sigma"], not config.aqn, "without --aqn there is no noise"),
        (["sigma_target"], not adaptive, "only --sigma-schedule adaptive has a target"),
        (["sigma_end", "sigma_stages"], adaptive, "adaptive noise has neither stages nor an end"),
        (["clip"], config.loss == "cispo", "cispo bounds each weight by 5, and clips nothing"),
        (["clip"], one_policy, "one update a step leaves every ratio 1; see --updates-per-step"),
        (["memory_gb"], on_cpu, "the run is on a CPU"),
        (["eval_samples", "eval_top_p"], config.eval_problems == 0, "nothing is evaluated"),
    )
    for beginnings, idle, why in rules:
        for name in given:
            if idle and name.startswith(tuple(beginnings)):
                say(f"warning: {spelled(name)} does nothing: {why}")
