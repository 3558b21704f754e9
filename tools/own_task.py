"""--task FILE.py: a task in a Python file of the user's own.

    problems()                      → a list of dicts
    reward(problem, text)           → a number from -1e6 to 1e6, or a dict of such numbers by name:
                                    their sum trains, and the log has the mean of each. It judges an
                                    answer that the model ended; one that was cut off gets 0
    reward(problem, text, finished) judges both kinds of answers
    prompt(problem)                 → the user's message, or a chat: a list of {"role", "content"}.
                                    Without it, problem["prompt"] must be that

Arguments are passed by their names, in any order, and those that a function does not name are left
out: reward(text) is a reward, too. Any other parameter needs a default. The text of an answer
includes special tokens, except the end token. The file may import from its own folder. Every error
in it becomes one sentence with the file, the line and the reason. A function that takes over 20 s
is named.

Needs: tasks.py.
"""

import inspect
import os
import runpy
import sys
import threading
import traceback
from functools import partial

import tasks

SIGNALS = 129, 143  # exit codes that launch.py's handlers of SIGHUP and SIGTERM raise
SLOW = 20  # seconds after which a call is named that has not returned


def load_task_file(path, held_out=32):
    """→ the Task of a Python file, of which held_out problems, at most a quarter, are held out.

    ValueError: file, line and reason. The rewards and prompts of the Task raise such errors, too.
    """
    path = os.path.abspath(path)
    # Behind our own folder, so that no file of the user hides one of our modules. The folder stays
    # on the path, because reward() may import from it much later.
    sys.path.insert(1, os.path.dirname(path))
    module = _call(path, "import", lambda: runpy.run_path(path))
    missing = {"problems", "reward"} - module.keys()
    if missing:
        raise ValueError(
            f"{path} defines no {max(missing)}(), and a task needs problems() and reward()"
        )
    takes = _parameters(path, "reward", module["reward"], ("problem", "text", "finished"))
    reward = partial(_reward, path, module["reward"], takes)
    prompt = module.get("prompt", lambda problem: problem.get("prompt"))
    _parameters(path, "prompt", prompt, ("problem",))
    prompt = partial(_prompt, path, prompt)
    problems = _call(path, "problems", lambda: list(module["problems"]()))
    for problem in problems:
        if not isinstance(problem, dict):
            raise ValueError(
                f"{path}: problems() gives {problem!r:.60}, no dict: it must return a list of "
                "dicts, which is frame.to_dict('records') for a table of pandas"
            )
    return tasks.hold_out(tasks.Task(problems, [], prompt, reward), held_out, path)


def _parameters(path, name, function, known):
    """→ those of the known names that are parameters of a user's function.

    ValueError: another parameter has no default, or a known one cannot be passed by name.
    """
    parameters = _call(path, name, inspect.signature, function).parameters.values()
    for parameter in parameters:
        by_position = parameter.name not in known or parameter.kind == parameter.POSITIONAL_ONLY
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if by_position and not variadic and parameter.default is parameter.empty:
            raise ValueError(
                f"{path}: {name}() has the parameter {parameter.name!r}, "
                f"and gets {', '.join(known)} by name: rename it, or give it a default"
            )
    return [parameter.name for parameter in parameters if parameter.name in known]


def _reward(path, function, takes, problem, text, finished):
    """→ the reward of an answer, a float, or the user's dict of named parts. takes: names of its
    arguments. An answer that the model did not end has 0, unless `finished` is one of them.
    """
    if not (finished or "finished" in takes):
        return 0.0
    given = dict(problem=problem, text=text, finished=finished)
    value = _call(path, "reward", function, **{name: given[name] for name in takes})
    parts = value.values() if isinstance(value, dict) else [value]
    total = _call(path, "reward", lambda text: sum(map(float, parts)), text)
    if not abs(total) <= 1e6:  # also if it is NaN
        raise ValueError(
            f"{path}: {value} is not between -1e6 and 1e6, the reward of {text!r:.999}"
        )
    return value if isinstance(value, dict) else total


def _prompt(path, function, problem):
    """→ the user's message, a text, or a chat, a list of messages."""
    value = _call(path, "prompt", function, problem=problem)
    chat = value if isinstance(value, list) else [{"role": "user", "content": value}]
    if not chat or not all(map(_is_message, chat)):
        raise ValueError(
            f"{path}: the prompt of {problem!r:.99} is {value!r:.999}, no text and no list "
            "of {'role', 'content'}: define prompt(problem), or give problems a 'prompt'"
        )
    for message in chat:  # raises on half an emoji, which no tokenizer takes
        _call(path, "prompt", str.encode, message["content"])
    return value


def _is_message(message):
    """→ whether it is one message of a chat: a dict whose role and content are text."""
    if not isinstance(message, dict):
        return False
    return type(message.get("role")) is type(message.get("content")) is str


def _call(path, name, function, *given, **named):
    """→ function(*given, **named), a function of the user's file.

    ValueError: any error in it, with the last line of the user's own folder that it passed. A
    signal is no error of the function in which it arrives, and passes.
    """
    given_to = f"{name}{given or tuple(named.values())!r:.2000}"
    slow = f"{path}: after {SLOW} s, this still runs: {given_to}"
    watch = threading.Timer(SLOW, print, [slow], dict(file=sys.stderr, flush=True))
    watch.start()
    try:
        return function(*given, **named)
    except (Exception, SystemExit) as error:
        if getattr(error, "code", None) in SIGNALS:
            raise
        place = path
        for frame in traceback.extract_tb(error.__traceback__):
            beside = os.path.dirname(frame.filename) == os.path.dirname(path)
            # The file may lie beside one of ours, whose lines would tell the user nothing.
            if beside and frame.filename not in (__file__, tasks.__file__):
                place = f"{frame.filename}, line {frame.lineno}"
        what = " ".join(f"{type(error).__name__}: {error} in {given_to}".split())
        raise ValueError(f"{place}: {what}") from error
    finally:
        watch.cancel()
