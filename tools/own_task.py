"""--task FILE.py: a task in a Python file of the user's own.

    def problems():               a list of dicts
    def reward(problem, text):    from -1e6 to 1e6, for an answer that the model ended; with a third
                                  parameter, finished, for all answers
    def prompt(problem):          the user's message, or a chat: a list of {"role", "content"};
                                  without prompt(), problem["prompt"] is one

text keeps special tokens. The file may import from its own folder. Every error in it becomes one
sentence with the file, the line and the reason. Needs: tasks.py.
"""

import inspect
import os
import runpy
import sys
import traceback

from tasks import split_problems

SIGNALS = 129, 143  # exit codes that launch.py's handlers of SIGHUP and SIGTERM raise


def load_task_file(path, held_out=32):
    """→ the Task of a Python file. ValueError: file, line and reason."""
    file = TaskFile(path)
    problems = file.call("problems", lambda: list(file.module["problems"]()))
    return split_problems(problems, held_out, file.path, None, file.reward, file.prompt)


class TaskFile:
    """The functions of a task's file, with their arguments and results checked."""

    def __init__(self, path):
        self.path = os.path.abspath(path)
        self.folder = os.path.dirname(self.path)
        sys.path.insert(1, self.folder)  # behind ours; reward() may import, too
        self.module = self.call("import", lambda: runpy.run_path(self.path))
        missing = {"problems", "reward"} - self.module.keys()
        if missing:
            raise ValueError(
                f"{self.path} defines no {max(missing)}(), and a task needs problems() and reward()"
            )
        signature = self.call("reward", inspect.signature, self.module["reward"])
        self.judges_all = takes_finished(signature)

    def prompt(self, problem):
        """→ the user's message or a chat."""
        function = self.module.get("prompt", lambda problem: problem.get("prompt"))
        value = self.call("prompt", function, problem)
        chat = value if isinstance(value, list) else [{"role": "user", "content": value}]
        for message in chat or [None]:
            if not is_message(message):
                raise ValueError(
                    f"{self.path}: the prompt of {problem!r:.99} is {value!r:.999}, no text and no "
                    "list of {'role', 'content'}: define prompt(problem), or give problems a "
                    "'prompt'"
                )
        return value

    def reward(self, problem, text, finished):
        """→ the reward, a float; 0 for a cut-off answer that the file does not want to judge."""
        if not (finished or self.judges_all):
            return 0.0
        given = (problem, text, finished) if self.judges_all else (problem, text)
        value = self.call("reward", lambda *given: float(self.module["reward"](*given)), *given)
        if not abs(value) <= 1e6:  # also if it is NaN
            raise ValueError(
                f"{self.path}: {value} is not between -1e6 and 1e6, the reward of {text!r:.999}"
            )
        return value

    def call(self, name, function, *given):
        """→ function(*given). ValueError: any error inside it, with the last line of the user's
        files on the way there.
        """
        try:
            return function(*given)
        except (Exception, SystemExit) as error:
            if getattr(error, "code", None) in SIGNALS:
                raise
            place = self.path
            for frame in traceback.extract_tb(error.__traceback__):
                theirs = os.path.dirname(frame.filename) == self.folder
                if theirs and frame.filename != __file__:
                    place = f"{frame.filename}, line {frame.lineno}"
            what = " ".join(f"{type(error).__name__}: {error} in {name}{given!r:.2000}".split())
            raise ValueError(f"{place}: {what}") from error


def is_message(message):
    """Is it a chat's message, a dict with texts as role and content?"""
    if not isinstance(message, dict):
        return False
    return all(isinstance(message.get(key), str) for key in ("role", "content"))


def takes_finished(signature):
    """Has the reward a third parameter for `finished`? One of another name with a default is none,
    nor is one that a positional argument cannot reach.
    """
    parameters = 0
    for parameter in signature.parameters.values():
        reachable = parameter.kind <= inspect.Parameter.VAR_POSITIONAL
        needed = parameter.default is parameter.empty or parameter.name == "finished"
        parameters += reachable and needed
    return parameters > 2
