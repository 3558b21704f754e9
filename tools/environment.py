"""The task as the policy meets it: problems become prompts of token ids, answers become rewards.

    environment = load_environment(config, task, source)
    prompts = environment.encode_prompts(problems)
    answers = environment.judge(problems, rollout)        one Answer for each row of the Rollout

All prompts that a run may draw are encoded at the start, so that an error in the data does not wait
until a step draws the problem.

Needs: jinja2, transformers; rollout.py, tasks.py;
tools/{adapter,flags,math_task,own_task,records,weights}.py.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable
from functools import partial
from numbers import Number
from typing import NamedTuple

import jinja2
from jinja2.meta import find_undeclared_variables

from rollout import Rollout, SamplingParams
from tasks import TASKS, Task, with_test_set
from tools import math_task, weights
from tools.adapter import other_base
from tools.flags import Config, say
from tools.own_task import load_task_file
from tools.records import question_and_answer, refuse_other_formats

GIVEN = {"messages", "add_generation_prompt"}  # what weights.encode passes to a chat template


class Answer(NamedTuple):
    """The answer in one row of a Rollout, and its verdict."""

    prompt: str | list  # the user's message, or a chat
    text: str  # with special tokens, but without the end token
    reward: float
    parts: dict[str, float]  # of a user's own reward that names its parts; else empty
    ended: bool = True  # by the model, not by --max-new-tokens


class Environment(NamedTuple):
    """What a policy is asked, how it samples its answers, and who judges them."""

    task: Task
    tokenizer: object  # transformers' PreTrainedTokenizer
    params: SamplingParams  # of training: its max_new_tokens is room that a prompt must leave
    model_config: object  # transformers' PretrainedConfig
    template: dict = {}  # arguments for the chat template
    longest_prompt: int = 0  # tokens; 0: nothing is trained

    def summary(self) -> str:
        """→ how many problems there are, in words."""
        return f"{len(self.task.train)} problems to train on, {len(self.task.held_out)} held out"

    def encode_prompts(self, problems: list[dict]) -> list[list[int]]:
        """→ the token ids of each problem's prompt. ValueError quotes a prompt that the model
        cannot take.
        """
        max_new_tokens = self.params.max_new_tokens
        room = self.model_config.max_position_embeddings - max_new_tokens
        vocab_size = self.model_config.vocab_size
        prompts = []
        for text in map(self.task.prompt, problems):
            prompt = weights.encode(self.tokenizer, text, self.template)
            if not 0 < len(prompt) <= room:
                raise ValueError(
                    f"the prompt {str(text)[:60]!r} has {len(prompt)} tokens: --max-new-tokens "
                    f"{max_new_tokens} leaves 1 to {room} of the context of "
                    f"{self.tokenizer.name_or_path}; mend the data, lower "
                    "that flag, or drop long prompts with --max-prompt-tokens"
                )
            if max(prompt) >= vocab_size:
                raise ValueError(
                    f"the tokenizer makes token {max(prompt)} of the prompt {str(text)[:60]!r}, "
                    f"and the model ends at {vocab_size}: take the model's own tokenizer"
                )
            prompts.append(prompt)
        return prompts

    def judge(self, problems: list[dict], rollout: Rollout) -> list[Answer]:
        """→ an Answer for each row of a Rollout that has equally many adjacent rows for each
        problem.
        """
        samples = len(rollout.lengths) // len(problems)
        prompts = [self.task.prompt(problem) for problem in problems]
        finished = rollout.finished.tolist()
        answers = []
        for row, ids in enumerate(rollout.answers()):
            number = row // samples  # of the problem
            text = self.tokenizer.decode(ids)
            reward = self.task.reward(problems[number], text, finished[row])
            parts = getattr(reward, "parts", {})  # tools/own_task.py's rewards have it
            # 0.1 + 0.2 ≠ 0.3 would give a tiny advantage, and Adam rescales a tiny gradient to a
            # full step.
            reward = round(reward, 9)
            answers.append(Answer(prompts[number], text, reward, parts, finished[row]))
        return answers


def notes(source: weights.Source, name: str, quant: str, adapter: str) -> list[str]:
    """→ lines about a model that may surprise the user. name: of the model, as the user gave it.
    adapter: the folder of the adapter that was loaded, or "".
    """
    found = []
    if source.inexact and quant != "bf16":
        found.append(
            f"note: {name} has global scales that are no powers of two. On a GPU "
            "the trainer rounds its weights to bf16 and the sampler does not, so that "
            "mismatch is about 1.01; --quant bf16 rounds them for both"
        )
    base = other_base(adapter, name) if adapter else ""
    if base:
        found.append(f"note: {adapter} was trained on {base}, not on {name}")
    return found


def load_task(config: Config) -> Task:
    """→ the Task that the flags name."""
    trains = bool(config.steps or config.preflight)
    if config.own_task:
        return load_task_file(config.task)
    for path in (config.data, config.test):
        refuse_other_formats(path)
    make: Callable = math_task.math if config.task == "math" else TASKS[config.task]
    if config.task == "gsm8k":
        make = partial(make, columns=question_and_answer)
    if config.test:
        given = (config.data, config.operands) if trains else ()
        return with_test_set(make, config.test, *given, trains=trains)
    return make(config.data, config.operands)


def load_environment(config: Config, task: Task, source: weights.Source) -> Environment:
    """→ the Environment of a Task and a checkpoint.

    ValueError: a prompt that the model cannot take; none within --max-prompt-tokens;
    --template-kwargs is no JSON object, or has a name that the chat template does not read.
    """
    tokenizer = source.tokenizer()
    params = SamplingParams(
        max_new_tokens=config.max_new_tokens,
        stop_ids=source.stop_ids(),
        temperature=config.temperature,
        seed=config.seed,
    )
    template = template_arguments(config.template_kwargs, tokenizer)
    environment = Environment(task, tokenizer, params, source.config, template)
    if config.max_prompt_tokens:
        environment = drop_long_prompts(config.max_prompt_tokens, environment)
    task = environment.task
    environment.encode_prompts(task.held_out)
    if config.steps or config.preflight:
        prompts = environment.encode_prompts(task.train)
        environment = environment._replace(longest_prompt=max(map(len, prompts), default=0))
    task = task._replace(held_out=task.held_out[: config.eval_problems])
    return environment._replace(task=task)


def template_arguments(text: str, tokenizer) -> dict:
    """→ the object of --template-kwargs, {name: value}. ValueError: it is none, or has a name that
    the chat template does not read.
    """
    what = "is no JSON object of arguments for this model's chat template"
    with weights.readable(f"--template-kwargs {text}", what):
        given = {**json.loads(text or "{}")}  # TypeError: no object
        if given:
            template = tokenizer.get_chat_template()
            # transformers' own tags mark what an assistant wrote
            plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
            parse = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse
            reads = find_undeclared_variables(parse(plain)) - GIVEN
            if given.keys() - reads:
                raise ValueError(f"it reads {sorted(reads)}")
    return given


def drop_long_prompts(most: int, environment: Environment) -> Environment:
    """→ the Environment without problems whose prompts have more than `most` tokens. ValueError:
    none is left to train on, or to evaluate on.
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


def draw_problems(problems: list[dict], seed: int, start: int, count: int) -> list[dict]:
    """→ `count` problems from number `start` on of a list without end: all problems, shuffled, once
    for each epoch.
    """
    drawn, epoch = [], None
    for index in range(start, start + count):
        if index // len(problems) != epoch:
            epoch = index // len(problems)
            shuffled = random.Random(f"{seed} {epoch}").sample(problems, len(problems))
        drawn.append(shuffled[index % len(problems)])
    return drawn


def hash_of(task: Task) -> str:
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
