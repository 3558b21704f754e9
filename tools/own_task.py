"""--task FILE.py: a task in a Python file of the user's own.

    problems()                      → a list of dicts, or what yields them
    reward(problem, text)           → a number from -1e6 to 1e6, or a dict of named parts, numbers:
                                    their sum trains, and the log has the mean of each. It judges an
                                    answer that the model ended; one that was cut off gets 0
    reward(problem, text, finished) judges both kinds of answers
    prompt(problem)                 → the user's message, or a chat: a list of {"role", "content"}.
                                    Without it, problem["prompt"] must be that

Arguments are passed by these names, in any order, and those that a function does not name are left
out: reward(text) is a reward, too. **kwargs gets problem and text. Any other parameter needs a
default. The text of an answer includes special tokens, except the end token. The file may import
from its own folder, but no file that is called as one of ours: `import model` gets our model.py.
Every error in it becomes one sentence with the file, the reason and, if the error passed through
the user's code, the line. If a call takes over 20 s, its traceback is printed to stderr, and the
call goes on.

Left out: async functions. Needs: tasks.py; tools/ends.py.
"""

import faulthandler
import inspect
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path

import tasks
from tools import ends

SIGNALS = 129, 143  # exit codes of ends.end_by for SIGHUP and SIGTERM
SLOW = 20  # seconds after which the traceback of a call that has not returned is printed


class Reward(float):
    """A reward, and what it is the sum of. parts: {"reward/NAME": float}, empty for one number."""


def load_task_file(path: str, held_out: int = 32) -> tasks.Task:
    """→ the Task of a Python file, of which held_out problems, at most a quarter, are held out.

    ValueError: file, reason and, if the error passed through the user's code, the line. The rewards
    and prompts of the Task raise such errors, too.
    """
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path}: there is no such file; name one with problems() and reward()")
    # Behind our own folder, so that no file of the user hides one of our modules. The folder stays
    # on the path, because reward() may import from it much later.
    sys.path.insert(1, os.path.dirname(path))
    module = _call(path, "import", _run, file=path)
    missing = {"problems", "reward"} - module.keys()
    if missing:
        raise ValueError(
            f"{path} defines no {max(missing)}(), and a task needs problems() and reward()"
        )
    reward = _reward(path, module["reward"])
    prompt = _prompt(path, module.get("prompt", lambda problem: problem.get("prompt")))
    problems = _call(path, "problems", lambda: list(module["problems"]()))
    for problem in problems:
        if not isinstance(problem, dict):
            raise ValueError(
                f"{path}: problems() gives {' '.join(repr(problem).split()):.60}, no dict: it must "
                "return a list of dicts, as frame.to_dict('records') of pandas is"
            )
    return tasks.hold_out(tasks.Task(problems, [], prompt, reward), held_out, path)


def _run(file: str) -> dict:
    """Run a Python file → what it defines.

    pickle, and so a process pool in reward(), finds its functions by the name of their module. That
    is mine for mine.py, which any process can import, or mine_ if another module is called mine.
    """
    name = Path(file).stem.replace(".", "_")
    while name in sys.modules:
        name += "_"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = file
    exec(compile(Path(file).read_bytes(), file, "exec"), vars(module))
    return vars(module)


def _takes(path: str, name: str, function: Callable, *names: str) -> list[str]:
    """→ those of the names that a user's function takes as arguments. ValueError: it takes none, or
    needs others.
    """
    try:
        signature = inspect.signature(function)
        takes = [known for known in names if known in signature.parameters]
        if inspect.getfullargspec(inspect.unwrap(function)).varkw:  # **kwargs
            takes += names[:2]
        signature.bind(**dict.fromkeys(takes))
        if not takes or inspect.iscoroutinefunction(function):
            raise TypeError("it takes none, or is async")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: {name}() gets its arguments by name ({', '.join(names)}), but {error}: "
            "rename it or give it a default, and use def"
        ) from None
    return takes


def _reward(path: str, function: Callable) -> Callable[[dict, str, bool], float]:
    """→ the reward of a Task: a function of problem, text and finished that returns a Reward, or 0
    for an answer that is not judged.
    """
    takes = _takes(path, "reward", function, "problem", "text", "finished")
    named = set()  # sets of part names that reward() returned so far: total() refuses a second one

    def total(**given):
        value = function(**given)
        parts = value if isinstance(value, dict) else {}
        for part in parts.values() or [value]:
            if isinstance(part, (str, bytes)):
                raise TypeError(f"{part!r} is text, no number")
        reward = Reward(sum(map(float, parts.values())) if parts else value)
        if not abs(reward) <= 1e6:  # also if it is NaN
            raise ValueError(f"{value} is not between -1e6 and 1e6")
        named.add(tuple(sorted(parts)))
        if len(named) > 1:
            raise ValueError(f"not all rewards have the same parts: {named}")
        reward.parts = {f"reward/{name}": float(part) for name, part in parts.items()}
        return reward

    def reward(problem, text, finished):
        given = dict(problem=problem, text=text, finished=finished)
        if finished or "finished" in takes:
            return _call(path, "reward", total, **{name: given[name] for name in takes})
        return 0.0

    return reward


def _prompt(path: str, function: Callable) -> Callable[[dict], str | list]:
    """→ the prompt of a Task: a function of a problem that returns text or a chat."""
    _takes(path, "prompt", function, "problem")

    def prompt(problem):
        value, text = checked(problem)
        if checked(problem)[1] != text:
            raise ValueError(
                f"{path}: prompt() returns two different prompts for {problem!r:.99}: draw what is "
                "random in problems()"
            )
        return value

    def checked(problem):
        """→ the prompt, and as JSON, which the log will hold."""
        value = _call(path, "prompt", function, problem=problem)
        chat = value if isinstance(value, list) else [{"role": "user", "content": value}]
        try:
            texts = [message["role"] + message["content"] for message in chat]
            # UTF-8, and so a tokenizer, takes no half of an emoji
            "".join(texts).encode()[0]
            return value, json.dumps(value, allow_nan=False)
        except Exception:
            raise ValueError(
                f"{path}: the prompt of {problem!r:.99} is {value!r:.999}, no text in UTF-8 and no "
                "list of {'role', 'content'}: define prompt(problem), or give problems a 'prompt'"
            ) from None

    return prompt


def _call(path: str, name: str, function: Callable, **given: object) -> object:
    """→ function(**given), a function of the user's file.

    ValueError: any error in it, with the last line of the user's own folder that it passed. A
    signal is no error of the function in which it arrives, and passes.
    """
    values = tuple(given.values())
    # From C, so that a regular expression that keeps Python's lock is named, too. To descriptor 2,
    # because sys.stderr may have none.
    faulthandler.dump_traceback_later(SLOW, file=2)
    modes = _torch_modes()
    arrived = len(ends.ARRIVED)
    try:
        return function(**given)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) in SIGNALS:
            raise
        place = path
        for frame in traceback.extract_tb(error.__traceback__):
            if os.path.dirname(frame.filename) == os.path.dirname(path):
                place = f"{frame.filename}, line {frame.lineno}"
        what = " ".join(f"{type(error).__name__}: {error} in {name}{values!r:.2000}".split())
        raise ValueError(f"{place}: {what}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        for restore, mode in modes:
            restore(mode)
        if len(ends.ARRIVED) > arrived:  # whatever the function has made of the signal
            ends.end_by(ends.ARRIVED.pop())


def _torch_modes() -> list[tuple]:
    """→ what restores two modes of torch, if it was imported: whether it keeps gradients, and its
    default dtype. A reward that asks a model may change them for all of the program.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
    ]
