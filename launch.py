"""From a command line to a running train(): parse and check the flags, join the ranks, report errors.

Exit codes: 0 done, 1 a traceback, 2 other errors, 3 --preflight finds training pointless, 128 + n signal n.
Needs: torch; checkpoint.py, model.py, runs.py, tasks.py, aqn.py, grpo.py, lora.py.
"""
import inspect
import os
import re
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from difflib import get_close_matches

import torch.distributed as dist
import torch.distributed.nn  # before a group exists: its default arguments would keep that group alive

import aqn
import checkpoint
import grpo
import lora
import runs
from model import QUANT, load
from tasks import TASKS, own, tested

CHOICES = {"quant": QUANT, "task": TASKS, "loss": grpo.CLIP, "correction": ("none", "bypass", "tis"),
           "overlong": ("none", "mask", "penalty"), "schedule": ("constant", "linear", "cosine"),
           "sigma_schedule": aqn.SCHEDULES}
RANGES = {(0, 10**9): "steps warmup resample eval_problems beta clip_low clip_high lr weight_decay",
          (1, 10**9): "prompts max_new_tokens updates_per_rollout eval_every eval_samples save_every alpha "
                      "micro_tokens", (2, 10**9): "group_size", (3, 10**9): "sigma_stages",
          (1e-9, 10**9): "temperature max_grad_norm sigma_start sigma_end", (1e-9, 1): "eval_top_p",
          (0, 2**32 - 1): "seed", (1, 512): "rank"}         # 512: the kernel keeps lora_B in shared memory
TRAINED = "model quant rank alpha task data test operands".split()      # a resume cannot change these
SCORED = TRAINED + "max_new_tokens temperature eval_problems eval_samples eval_top_p seed".split()


def main(Config, train, preflight):
    """Parse the command line, call train or preflight, exit. An unforeseen error keeps its traceback."""
    sys.stdout.reconfigure(errors="replace")                # a terminal may not have Unicode
    try:
        sys.exit(start(parse(Config, sys.argv[1:]), train, preflight))
    except KeyboardInterrupt:                               # Ctrl-C, or nobody reads our output any more
        sys.exit(130)
    except torch.OutOfMemoryError:
        print("train.py: out of memory: lower --micro-tokens, take --gradient-checkpointing", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
    sys.exit(2)


def start(config, train, preflight):
    """Load what the flags name, then train or preflight → the exit code. SystemExit: a stopped run."""
    device = join_ranks(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    trains, given = bool(config.steps or config.preflight), (config.data, config.operands)
    task = (tested(config.task, config.test, *given * trains, trains=trains) if config.test else
            own(config.task) if config.task.endswith(".py") else TASKS[config.task](*given))
    began, source = time.perf_counter(), checkpoint.open(config.model)
    tokenizer, stop_ids = source.tokenizer(), source.stop_ids()
    longest = sorted(task.held_out + task.train * trains, key=lambda p: len(str(task.prompt(p))))[-99:]
    encoded(config, source.config, task, tokenizer, longest)        # now, not when training draws them
    task = task._replace(held_out=task.held_out[:config.eval_problems])
    run = runs.Run(config, quiet=rank_and_count()[0] > 0)
    model = load(source, config.quant, config.rank, config.alpha, device, config.seed)
    model.gradient_checkpointing = config.gradient_checkpointing
    if config.adapter and not run.saved():
        lora.load_adapter(model, config.adapter)
    plain = "" if tokenizer.chat_template else ", without a chat template: prompts are plain text"
    run.say(f"{config.model}: {config.quant} on {model.device}, loaded in {time.perf_counter() - began:.0f} s"
            f"{plain}\n{config.task}: {len(task.train)} problems to train on, {len(task.held_out)} held out; "
            f"{config.prompts} prompts × {config.group_size} answers a step")
    for number in (signal.SIGTERM, signal.SIGHUP):              # SIGHUP: the terminal was closed
        if signal.getsignal(number) != signal.SIG_IGN:          # nohup ignores SIGHUP
            signal.signal(number, lambda n, _: sys.exit(128 + n))
    code = (preflight if config.preflight else train)(config, model, task, tokenizer, stop_ids, run)
    if dist.is_initialized():
        dist.destroy_process_group()        # not after a failure: it would wait for ranks that are gone
    return code


def parse(Config, arguments):
    """→ a checked Config. Each field is a --flag, its comment the help. Flags not given are those of the run
    in --resume, and the SCORED ones those of --adapter's run. SystemExit, ValueError: a wrong flag."""
    parser = ArgumentParser(usage="train.py [--flag value]", allow_abbrev=False, argument_default=SUPPRESS)
    field, group = r"(?:# --- (.+)\n)?^    (\w+):.*?#\s*(.*)", parser     # perhaps a title; name, comment
    for title, name, comment in re.findall(field, inspect.getsource(Config), re.M):
        group = parser.add_argument_group(title) if title else group
        kind, default = Config.__annotations__[name], getattr(Config, name)
        group.add_argument(f"--{name.replace('_', '-')}", help=f"{comment} (default: {default})",
                           **{"action": BooleanOptionalAction} if kind is bool else {"type": kind})
    given, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        near = ", --".join(get_close_matches(word.replace("-", "_"), Config.__annotations__, cutoff=0))
        raise ValueError(f"there is no {word}; the nearest are --{near.replace('_', '-')}; --help lists all")
    given, stored = vars(given), {}
    if folder := given.get("resume"):
        stored = runs.stored(Config, folder) | {"out": folder}
        for name in given.keys() & {"out", "adapter", "updates_per_rollout", "eval_problems", *TRAINED}:
            if os.path.abspath(str(given[name])) != os.path.abspath(str(stored[name])):
                raise ValueError(f"--{name.replace('_', '-')} {given[name]} beside --resume {folder}: that "
                                 f"run has its own ({stored[name]!r}); leave it out, or begin another run")
    elif given.get("adapter"):
        inside = os.path.join(given["adapter"], "adapter")
        given["adapter"] = inside if os.path.isdir(inside) else given["adapter"]        # --adapter RUN
        run = os.path.dirname(os.path.abspath(given["adapter"]))
        if os.path.isfile(f"{run}/metrics.jsonl"):                      # else the adapter is from elsewhere
            flags = runs.stored(Config, run)
            stored = {name: flags[name] for name in SCORED if name not in given and flags[name]}
            print(f"from {run}/config.json:", *(f"--{k.replace('_', '-')} {v}" for k, v in stored.items()))
    flags = vars(Config()) | stored | given
    for name in ("model", "data", "test", "adapter", *["task"] * flags["task"].endswith(".py")):
        if os.path.exists(flags[name]) and flags[name] != "smollm2":    # a resume may start elsewhere
            flags[name] = os.path.abspath(flags[name])
    return check(Config(**flags))


def check(config):
    """→ config. ValueError: the first flag that cannot work, with its value and what it must be."""
    c, own_task = config, config.task.endswith(".py")
    rules = [  # flag, whether it holds, what it must be
        *((name, getattr(c, name) in known or own_task and name == "task",
           f"must be one of {', '.join(known)}") for name, known in CHOICES.items()),
        *((name, getattr(c, name) is None or low <= getattr(c, name) <= high, f"must be {low} to {high}")
          for (low, high), names in RANGES.items() for name in names.split()),
        ("device", c.device in ("", "cpu") or c.device == "cuda" and torch.cuda.is_available(),
         "must be cpu, or cuda where torch finds a GPU"),
        ("task", not own_task or not (c.data or c.test or c.operands), "takes no --data, --test, --operands"),
        ("updates_per_rollout", c.steps % (c.updates_per_rollout or 1) == 0, f"must divide {c.steps} steps"),
        ("prompts", c.prompts % int(os.environ.get("WORLD_SIZE", 1)) == 0, "must be a multiple of the ranks"),
        ("preflight", not (c.preflight and c.resume), f"takes no --resume, but --adapter {c.resume}/adapter"),
        ("loss", (c.loss, c.correction) != ("gspo", "bypass"), "needs --correction none or tis: the noise in "
         "an answer's ratio is far beyond gspo's clip of 3e-4 and would silence nearly all answers")]
    for name, holds, words in rules:
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(c, name)} {words}")
    return config


def encoded(config, of_model, task, tokenizer, problems):
    """Problems → token ids of their prompts. ValueError quotes a prompt that the model cannot take."""
    prompts, room = [], of_model.max_position_embeddings - config.max_new_tokens
    for text in map(task.prompt, problems):
        prompts.append(prompt := checkpoint.encode(tokenizer, text))
        if not 0 < len(prompt) <= room:
            raise ValueError(f"the prompt {str(text)[:60]!r} has {len(prompt)} tokens: --max-new-tokens "
                             f"{config.max_new_tokens} leaves 1 to {room}; mend the data, or lower that flag")
        if max(prompt) >= of_model.vocab_size:
            raise ValueError(f"the tokenizer makes token {max(prompt)} of the prompt {str(text)[:60]!r}, and "
                             f"the model ends at {of_model.vocab_size}: take the model's own tokenizer")
    return prompts


def join_ranks(device):
    """→ this process's device. Under torchrun, join the process group and take the GPU of the local rank."""
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(device := f"cuda:{os.environ['LOCAL_RANK']}")     # Triton launches there
    return device


def rank_and_count():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_sum(tensor):
    """Sum a tensor over ranks, in place, and return it; a single process returns it as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor
