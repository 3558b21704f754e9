"""Ask a model what it has learned: its answer without the adapter, then with it.

    python -m tools.chat RUN "What is 7 * 8?" [flags]
    python -m tools.chat RUN [flags]                    answers the lines of stdin, until Ctrl-D

RUN is a run's folder or that of an adapter, such as runs/NAME/adapter-best. Model, quantisation and
longest answer are those of the run, unless one of these flags of train.py says otherwise: --model,
--quant, --rank, --alpha, --kv, --device, --max-new-tokens, --template-kwargs. A note follows an
answer that --max-new-tokens cut. Answers are greedy. Each question is a chat of its own: it gets
the model's chat template, but nothing of the task, and the model does not see the questions before
it.

Needs: torch; lora.py, model.py, rollout.py, tasks.py;
tools/{adapter,ends,environment,flags,weights}.py.
"""

import sys
from contextlib import nullcontext
from itertools import pairwise, takewhile
from operator import itemgetter
from pathlib import Path

import torch

import lora
from model import load
from rollout import Rollout, Sampler
from tasks import Task
from tools import weights
from tools.adapter import check_adapter, load_adapter
from tools.ends import one_sentence
from tools.environment import Environment, load_environment
from tools.flags import parse

# flags of train.py that change what is answered, or where
TAKES = "--model --quant --rank --alpha --kv --device --max-new-tokens --template-kwargs".split()


def ask(question: str, environment: Environment, sampler: Sampler) -> None:
    """Print the greedy answers of the base and of the base with its adapter, on a terminal as they
    grow. ValueError: the question is empty, no UTF-8, or too long for the model.
    """
    try:
        question.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{question!a:.99} is not valid UTF-8: set your terminal to UTF-8, or convert the file"
        ) from None
    prompts = environment.encode_prompts([{"prompt": question}])
    params = environment.params._replace(temperature=0.0)
    written = 0  # characters

    def write(rollout: Rollout) -> None:
        nonlocal written
        (ids,) = rollout.answers()
        text = environment.tokenizer.decode(ids).rstrip("\ufffd")  # half a character
        print(text[written:], end="", flush=True)
        written = len(text)

    sampler.watch = write if sys.stdout.isatty() else None
    for name, adapted in (("base", lora.disabled(sampler.model)), ("adapter", nullcontext())):
        print(f"{name:>8}: ", end="", flush=True)
        written = 0
        with adapted:
            rollout = sampler.generate(prompts, 1, params, -1)
        write(rollout)
        limit = f" (cut after {params.max_new_tokens} tokens: raise --max-new-tokens)"
        print("" if rollout.finished.all() else limit)


def main(arguments: list[str]) -> None:
    """python -m tools.chat with these arguments. ValueError: a sentence for the user."""
    if {"--help", "-h"} & set(arguments):
        return print(__doc__)
    words = list(takewhile(lambda word: not word.startswith("--"), arguments))
    if not words:
        raise ValueError('usage: python -m tools.chat RUN ["question"] [flags]')
    run, *questions = words
    if not Path(run).is_dir():
        raise ValueError(f"{run} is no folder: give that of a run, or of its adapter")
    given = arguments[len(words) :]
    for flag in (word.split("=")[0] for word in given if word.startswith("--")):
        if flag not in TAKES:
            raise ValueError(f"{flag} has no use here: the flags are {', '.join(TAKES)}")
    for before, word in pairwise(given):
        if not before.startswith("--") and not word.startswith("--"):
            raise ValueError(f"{word!r} stands behind flags: put questions right behind {run}")
    # Another task than the run's, so that a file of the user's own is not started.
    flags = ["--adapter", run, "--task", "addition", "--steps", "0"]
    config = parse(flags + given)
    check_adapter(config.adapter, config.rank, config.alpha)
    print(f"loading {config.model}", file=sys.stderr)
    source = weights.open(config.model)
    environment = load_environment(config, Task([], [], itemgetter("prompt"), None), source)
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load(source, config.quant, config.rank, config.alpha, device)
    load_adapter(model, config.adapter)
    sampler = Sampler(model, kv=config.kv)
    for question in questions or filter(str.strip, sys.stdin):
        ask(question.strip(), environment, sampler)


if __name__ == "__main__":
    with one_sentence("chat.py"):
        main(sys.argv[1:])
