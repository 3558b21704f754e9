r"""The judge of --task math: math-verify's verdict on two formulas, from a child process.

    equal(r"\frac{1}{2}", "0.5")    → True

    equal ── a line of JSON: [gold, answer] ──► the child forks; the fork compares them, and its
          ◄── a line: True or False ──────────  exit code is the verdict

math-verify compares with sympy, which may compute for hours. So the child imports both once, and
the kernel ends a fork that takes over 1 s of processor time or 4 GB: such an answer counts as
wrong.

Needs: math-verify, and a system with fork.
"""

import json
import os
import signal
import subprocess
import sys
from functools import cache, lru_cache

CPU_SECONDS = 1
MEMORY = 4 << 30  # bytes
# formulas that make sympy load its parts, so that no fork has to
WARM_UP = r"\sqrt{3} - x^2", r"(\frac12, 3]", r"\{1, 2\}", r"x = 5\text{ m}", r"50\%", "1,000"


@lru_cache(4096)  # the answers of a group often agree
def equal(gold, answer):
    """→ whether math-verify finds two texts in LaTeX equal; False if that takes too much time or
    memory. ValueError: math-verify does not run.
    """
    try:
        child = _child()
        print(json.dumps([gold, answer]), file=child.stdin, flush=True)
        return {"True\n": True, "False\n": False}[child.stdout.readline()]
    except (BrokenPipeError, KeyError):  # the child is dead; the next call starts another
        _child.cache_clear()
        raise ValueError(
            "task math needs math-verify, which does not run: pip install math-verify"
        ) from None


@cache
def _child():
    """→ this file as a child process. In a session of its own, Ctrl-C does not reach it."""
    return subprocess.Popen(
        [sys.executable, __file__],
        start_new_session=True,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def serve():
    """The child: answer each line of the input, until it ends."""
    import resource

    from math_verify import parse, verify

    def compare(*formulas):
        gold, answer = (parse(f"\\boxed{{{latex}}}", parsing_timeout=None) for latex in formulas)
        return verify(gold, answer, timeout_seconds=None)

    for latex in WARM_UP:
        compare(latex, "(x + 1)(x - 1)")
    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            # SIGPROF ends the fork even inside one long multiplication, where Python checks nothing
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os._exit(not compare(*json.loads(line)))
        _, status = os.waitpid(fork, 0)
        print(status == 0, flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules must not hide a library's
    serve()
