"""--task FILE.py: a task in a Python file of the user's own.

    problems()                      → a list of dicts
    reward(problem, text)           → a number from -1e6 to 1e6. It judges an answer that the model
                                    ended; one cut off at --max-new-tokens gets 0
    reward(problem, text, finished) judges both kinds of answers
    prompt(problem)                 → the user's message, or a chat: a list of {"role", "content"}.
                                    Without it, problem["prompt"] must be that

The text of an answer includes special tokens, except the end token. The file may import from its
own folder. Every error in it becomes one sentence with the file, the line and the reason.

Needs: tasks.py.
"""

import inspect
import os
import runpy
import sys
import traceback
from functools import partial

import tasks

SIGNALS = 129, 143  # exit codes that launch.py's handlers of SIGHUP and SIGTERM raise


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
    signature = _call(path, "reward", inspect.signature, module["reward"])
    reward = partial(_reward, path, module["reward"], _takes_finished(signature))
    prompt = partial(_prompt, path, module.get("prompt", lambda problem: problem.get("prompt")))
    problems = _call(path, "problems", lambda: list(module["problems"]()))
    return tasks.hold_out(tasks.Task(problems, [], prompt, reward), held_out, path)


def _takes_finished(signature):
    """→ whether a reward has a third parameter, which takes `finished`. A parameter of another name
    with a default is none, nor is one that a positional argument cannot reach.
    """
    wanted = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind <= inspect.Parameter.VAR_POSITIONAL
        and (parameter.default is parameter.empty or parameter.name == "finished")
    ]
    return len(wanted) > 2


def _reward(path, function, judges_all, problem, text, finished):
    """→ the reward of an answer, a float. An answer that the model did not end has 0, unless the
    user's function judges_all.
    """
    if not (finished or judges_all):
        return 0.0
    given = (problem, text, finished) if judges_all else (problem, text)
    value = _call(path, "reward", lambda *given: float(function(*given)), *given)
    if not abs(value) <= 1e6:  # also if it is NaN
        raise ValueError(
            f"{path}: {value} is not between -1e6 and 1e6, the reward of {text!r:.999}"
        )
    return value


def _prompt(path, function, problem):
    """→ the user's message, a text, or a chat, a list of messages."""
    value = _call(path, "prompt", function, problem)
    chat = value if isinstance(value, list) else [{"role": "user", "content": value}]
    if not chat or not all(map(_is_message, chat)):
        raise ValueError(
            f"{path}: the prompt of {problem!r:.99} is {value!r:.999}, no text and no list "
            "of {'role', 'content'}: define prompt(problem), or give problems a 'prompt'"
        )
    return value


def _is_message(message):
    """→ whether it is one message of a chat: a dict whose role and content are text."""
    if not isinstance(message, dict):
        return False
    return type(message.get("role")) is type(message.get("content")) is str


def _call(path, name, function, *given):
    """→ function(*given), a function of the user's file.

    ValueError: any error in it, with the last line of the user's own folder that it passed. A
    signal is no error of the function in which it arrives, and passes.
    """
    try:
        return function(*given)
    except (Exception, SystemExit) as error:
        if getattr(error, "code", None) in SIGNALS:
            raise
        place = path
        for frame in traceback.extract_tb(error.__traceback__):
            beside = os.path.dirname(frame.filename) == os.path.dirname(path)
            # The file may lie beside one of ours, whose lines would tell the user nothing.
            if beside and frame.filename not in (__file__, tasks.__file__):
                place = f"{frame.filename}, line {frame.lineno}"
        what = " ".join(f"{type(error).__name__}: {error} in {name}{given!r:.2000}".split())
        raise ValueError(f"{place}: {what}") from error
