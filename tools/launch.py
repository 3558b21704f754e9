"""From a command line to a running train(): load what the flags name, join the ranks, report
errors.

Exit codes: 0 done, 1 a traceback, 2 other errors, 3 --preflight finds training pointless, 128 + n
signal n. Needs: torch; tools/weights.py, model.py, tools/run.py, tasks.py, lora.py; tools/flags.py.
"""

import os
import signal
import sys
import time

import torch.distributed as dist

# before a group exists: its default arguments would keep that group alive
import torch.distributed.nn

import lora
from model import load
from tasks import TASKS, own, tested
from tools import weights
from tools.flags import parse
from tools.run import Run


def main(train, preflight):
    """Parse the command line, call train or preflight, exit. An unforeseen error keeps its
    traceback.
    """
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have Unicode
    try:
        sys.exit(start(parse(sys.argv[1:]), train, preflight))
    except KeyboardInterrupt:  # Ctrl-C, or nobody reads our output any more
        sys.exit(130)
    except torch.OutOfMemoryError:
        print(
            "train.py: out of memory: lower --micro-tokens, take --gradient-checkpointing",
            file=sys.stderr,
        )
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
    sys.exit(2)


def start(config, train, preflight):
    """Load what the flags name, then train or preflight → the exit code. SystemExit: a stopped
    run.
    """
    device = join_ranks(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    trains, given = bool(config.steps or config.preflight), (config.data, config.operands)
    task = (
        tested(config.task, config.test, *given * trains, trains=trains)
        if config.test
        else own(config.task)
        if config.task.endswith(".py")
        else TASKS[config.task](*given)
    )
    began, source = time.perf_counter(), weights.open(config.model)
    tokenizer, stop_ids = source.tokenizer(), source.stop_ids()
    longest = sorted(task.held_out + task.train * trains, key=lambda p: len(str(task.prompt(p))))[
        -99:
    ]
    encoded(config, source.config, task, tokenizer, longest)  # now, not when training draws them
    task = task._replace(held_out=task.held_out[: config.eval_problems])
    run = Run(config, quiet=rank_and_count()[0] > 0)
    model = load(source, config.quant, config.rank, config.alpha, device, config.seed)
    model.gradient_checkpointing = config.gradient_checkpointing
    if config.adapter and not run.saved():
        lora.load_adapter(model, config.adapter)
    plain = "" if tokenizer.chat_template else ", without a chat template: prompts are plain text"
    run.say(
        f"{config.model}: {config.quant} on {model.device}, "
        f"loaded in {time.perf_counter() - began:.0f} s{plain}\n{config.task}: "
        f"{len(task.train)} problems to train on, {len(task.held_out)} held out; "
        f"{config.prompts} prompts × {config.group_size} answers a step"
    )
    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda n, _: sys.exit(128 + n))
    code = (preflight if config.preflight else train)(config, model, task, tokenizer, stop_ids, run)
    if dist.is_initialized():
        dist.destroy_process_group()  # not after a failure: it would wait for ranks that are gone
    return code


def encoded(config, of_model, task, tokenizer, problems):
    """Problems → token ids of their prompts. ValueError quotes a prompt that the model cannot
    take.
    """
    prompts, room = [], of_model.max_position_embeddings - config.max_new_tokens
    for text in map(task.prompt, problems):
        prompts.append(prompt := weights.encode(tokenizer, text))
        if not 0 < len(prompt) <= room:
            raise ValueError(
                f"the prompt {str(text)[:60]!r} has {len(prompt)} tokens: --max-new-tokens "
                f"{config.max_new_tokens} leaves 1 to {room}; mend the data, or lower that flag"
            )
        if max(prompt) >= of_model.vocab_size:
            raise ValueError(
                f"the tokenizer makes token {max(prompt)} of the prompt {str(text)[:60]!r}, and "
                f"the model ends at {of_model.vocab_size}: take the model's own tokenizer"
            )
    return prompts


def join_ranks(device):
    """→ this process's device. Under torchrun, join the process group and take the GPU of the local
    rank.
    """
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            # Triton launches there
            torch.cuda.set_device(device := f"cuda:{os.environ['LOCAL_RANK']}")
    return device


def rank_and_count():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_sum(tensor):
    """Sum a tensor over ranks, in place, and return it; a single process returns it as it is."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor
