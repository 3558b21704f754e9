"""From a command line to a running train(): load what the flags name, join the ranks, report
errors.

Exit codes: 0 done, 1 a traceback, 2 other errors, 3 --preflight finds training pointless (under
torchrun 0), 128 + n signal n. Needs: torch; model.py, rollout.py, tasks.py and files of tools/.
"""

import hashlib
import json
import os
import signal
import sys
import time
from numbers import Number
from typing import NamedTuple

import torch
from jinja2.meta import find_undeclared_variables
from transformers.utils.chat_template_utils import _compile_jinja_template

from model import load
from rollout import Sampler
from tasks import TASKS, Task, with_test_set
from tools import weights
from tools.adapter import load_adapter, other_base
from tools.budget import announcement, grow_segments, limit_memory
from tools.diagnostics import preflight
from tools.flags import parse, say
from tools.own_task import load_task_file
from tools.ranks import alike, join_ranks, leave_ranks, rank_and_count
from tools.run import Run

GIVEN = {"messages", "add_generation_prompt"}  # what weights.encode passes to a chat template


class Environment(NamedTuple):
    """What a policy answers and who judges the answers."""

    task: Task
    tokenizer: object  # transformers' PreTrainedTokenizer
    stop_ids: list[int]  # ids of tokens that end an answer
    model_config: object  # transformers' PretrainedConfig
    max_new_tokens: int  # room that a prompt must leave in the model's context
    template: dict = {}  # arguments for the chat template
    longest_prompt: int = 0  # tokens; 0: nothing is trained

    def encode_prompts(self, problems):
        """→ the token ids of each problem's prompt, a list of lists. ValueError quotes a prompt
        that the model cannot take.
        """
        room = self.model_config.max_position_embeddings - self.max_new_tokens
        vocab_size = self.model_config.vocab_size
        prompts = []
        for text in map(self.task.prompt, problems):
            prompt = weights.encode(self.tokenizer, text, self.template)
            if not 0 < len(prompt) <= room:
                raise ValueError(
                    f"the prompt {str(text)[:60]!r} has {len(prompt)} tokens: --max-new-tokens "
                    f"{self.max_new_tokens} leaves 1 to {room}; mend the data, lower "
                    "that flag, or drop long prompts with --max-prompt-tokens"
                )
            if max(prompt) >= vocab_size:
                raise ValueError(
                    f"the tokenizer makes token {max(prompt)} of the prompt {str(text)[:60]!r}, "
                    f"and the model ends at {vocab_size}: take the model's own tokenizer"
                )
            prompts.append(prompt)
        return prompts

    def judge(self, problems, rollout):
        """→ the text and the reward of each answer in a Rollout that has equally many adjacent rows
        for each problem. Texts include special tokens, except the end token.
        """
        samples = len(rollout.lengths) // len(problems)
        texts = [self.tokenizer.decode(ids) for ids in rollout.answers()]
        rewards = []
        for row, finished in enumerate(rollout.finished.tolist()):
            rewards.append(self.task.reward(problems[row // samples], texts[row], finished))
        return texts, rewards


def main(train, trial):
    """Parse the command line, call train, or preflight with trial, and exit. An unforeseen error
    keeps its traceback.
    """
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have Unicode
    try:
        sys.exit(start(parse(sys.argv[1:]), train, trial))
    except KeyboardInterrupt:  # Ctrl-C, or nobody reads our output any more
        sys.exit(130)
    except torch.OutOfMemoryError:
        print(
            "train.py: out of memory: lower --max-new-tokens or --rank, or take a smaller model; "
            "python -m tools.memory says what fits",
            file=sys.stderr,
        )
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
    sys.exit(2)


def start(config, train, trial):
    """Load what the flags name, then train or preflight → the exit code. SystemExit: a stopped
    run.
    """
    grow_segments()
    device = join_ranks(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = torch.device(device).type == "cuda"
    if config.memory_gb and on_gpu:
        limit_memory(config.memory_gb)
    with alike() as facts:
        task = load_task(config)
        began = time.perf_counter()
        source = weights.open(config.model)
        environment = load_environment(config, task, source)
        problems = hash_of(task)
        facts.append(problems)
        held_out = environment.task.held_out[: config.eval_problems]
        environment = environment._replace(task=environment.task._replace(held_out=held_out))
        rank, ranks = rank_and_count()
        run = Run(config, rank > 0, problems)
        model = load_model(config, source, device, run)
    announce(config, environment, model, run, time.perf_counter() - began)
    sampler = Sampler(model)
    if on_gpu and environment.longest_prompt:
        run.say(announcement(config, model, sampler, environment.longest_prompt, ranks))
    exit_on_signals()
    if config.preflight:
        code = preflight(config, model, environment, sampler, run, trial)
    else:
        code = train(config, model, environment, sampler, run)
    leave_ranks()
    # torchrun would report another code than 0 as a crash, with a traceback
    return 0 if "RANK" in os.environ else code


def load_task(config):
    """→ the Task that the flags name."""
    trains = bool(config.steps or config.preflight)
    if config.test:
        given = (config.data, config.operands) if trains else ()
        return with_test_set(config.task, config.test, *given, trains=trains)
    if config.own_task:
        return load_task_file(config.task)
    return TASKS[config.task](config.data, config.operands)


def load_environment(config, task, source):
    """→ the Environment of a Task and a weights.Source. All prompts that the run may draw are
    encoded now, so that an error does not wait until it draws them.

    ValueError: a prompt that the model cannot take; none within --max-prompt-tokens; --stop is no
    token; --template-kwargs is no JSON object, or has a name that the chat template does not read.
    """
    tokenizer, stop_ids = source.tokenizer(), source.stop_ids()
    if config.stop:
        ids = tokenizer.encode(config.stop, add_special_tokens=False)
        if [tokenizer.decode(token) for token in ids] != [config.stop]:
            raise ValueError(f"--stop {config.stop!r} is {len(ids)} tokens of this model, not one")
        stop_ids = stop_ids + ids
    environment = Environment(
        task,
        tokenizer,
        stop_ids,
        source.config,
        config.max_new_tokens,
        template_arguments(config, tokenizer),
    )
    if config.max_prompt_tokens:
        environment = drop_long_prompts(config.max_prompt_tokens, environment)
    environment.encode_prompts(environment.task.held_out)
    if config.steps or config.preflight:
        prompts = environment.encode_prompts(environment.task.train)
        environment = environment._replace(longest_prompt=max(map(len, prompts), default=0))
    return environment


def template_arguments(config, tokenizer):
    """→ the object of --template-kwargs, {name: value}. ValueError: it is none, or has a name that
    the chat template does not read.
    """
    what = "is no JSON object of arguments for this model's chat template"
    with weights.readable(f"--template-kwargs {config.template_kwargs}", what):
        given = {**json.loads(config.template_kwargs or "{}")}  # TypeError: no object
        if given:
            template = tokenizer.get_chat_template()
            parse = _compile_jinja_template(template).environment.parse
            reads = find_undeclared_variables(parse(template)) - GIVEN
            if given.keys() - reads:
                raise ValueError(f"it reads {sorted(reads)}")
    return given


def drop_long_prompts(most, environment):
    """→ the Environment without problems whose prompts have more tokens. ValueError: none is left
    to train on, or to evaluate on.
    """
    task = environment.task

    def fits(problem):
        prompt = task.prompt(problem)
        return len(weights.encode(environment.tokenizer, prompt, environment.template)) <= most

    for name in ("train", "held_out"):
        problems = getattr(task, name)
        kept = list(filter(fits, problems))
        say(f"--max-prompt-tokens {most} keeps {len(kept)} of {len(problems)} ({name})")
        if problems and not kept:
            raise ValueError(f"--max-prompt-tokens {most}: every prompt is longer")
        task = task._replace(**{name: kept})
    return environment._replace(task=task)


def load_model(config, source, device, run):
    """→ the Decoder, with the adapter that --adapter names unless the run has saved its own."""
    model = load(source, config.quant, config.rank, config.alpha, device, config.seed)
    if source.inexact and config.quant != "bf16":
        run.say(
            f"note: {config.model} has global scales that are no powers of two. On a GPU "
            "the trainer rounds its weights to bf16 and the sampler does not, so that "
            "mismatch is about 1.01; --quant bf16 rounds them for both"
        )
    if config.adapter and not run.checkpoints():
        load_adapter(model, config.adapter)
        base = other_base(config.adapter, config.model)
        if base:
            run.say(f"note: {config.adapter} was trained on {base}, not on {config.model}")
    return model


def hash_of(task):
    """→ SHA-256, in hex, of a Task's prompts and problems: a resume compares it with the one in the
    checkpoint. A number that JSON does not know, such as a Fraction, counts as text. Any other
    value that JSON cannot hold, such as a function, does not count, because it may be another
    object in each process.
    """
    sha = hashlib.sha256()
    for problem in task.train + task.held_out:
        facts = [task.prompt(problem), problem]
        sha.update(json.dumps(facts, skipkeys=True, default=_number).encode())
    return sha.hexdigest()


def _number(value):
    """→ a number that JSON does not know, such as a Fraction, as text; "" for anything else."""
    return str(value) if isinstance(value, Number) else ""


def announce(config, environment, model, run, seconds):
    """Print what was loaded."""
    task = environment.task
    plain = ""
    if not environment.tokenizer.chat_template:
        plain = ", without a chat template: prompts are plain text"
    run.say(
        f"{config.model}: {config.quant} on {model.device}, "
        f"loaded in {seconds:.0f} s{plain}\n{config.task}: "
        f"{len(task.train)} problems to train on, {len(task.held_out)} held out; "
        f"{config.prompts} prompts × {config.group_size} answers a step"
    )


def exit_on_signals():
    """Turn SIGTERM and SIGHUP (the terminal was closed) into SystemExit, on which a run saves
    itself. nohup ignores SIGHUP, and so do we then.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
