r"""The judge of --task math: math-verify's verdict on two formulas, from a child process.

    equal(r"\frac{1}{2}", "0.5")    → True

    equal ── a line of JSON: [gold, answer] ──────────► the child forks; the fork compares them
          ◄── a line: the fork's exit status, 0 if equal ──

math-verify compares with sympy, which may compute for hours, and no Python code can interrupt one
long multiplication. So the kernel does: it ends a fork that takes over 1 s of processor time, and
gives it no more than 4 GB of memory. An answer that needs more counts as wrong. Only the child
imports math-verify and sympy, once: a fork inherits them.

Needs: math-verify, and a system with fork.
"""

import json
import os
import signal
import subprocess
import sys
from functools import cache, lru_cache

CPU_SECONDS = 1  # for one comparison
MEMORY = 4 << 30  # bytes of address space for one comparison
# formulas that make sympy load its parts, so that no fork has to
WARM_UP = r"\sqrt{3} - x^2", r"(\frac12, 3]", r"\{1, 2\}", r"x = 5\text{ m}", r"50\%", "1,000"


@lru_cache(4096)  # the answers of a group often agree
def equal(gold: str, answer: str) -> bool:
    """→ whether math-verify finds two texts in LaTeX equal and close() confirms it. False if
    the comparison fails or takes more than CPU_SECONDS or MEMORY. ValueError: math-verify does not
    run.
    """
    try:
        child = _child()
        print(json.dumps([gold, answer]), file=child.stdin, flush=True)
        return int(child.stdout.readline()) == 0
    except (BrokenPipeError, ValueError):  # the child is dead: it reads nothing, or wrote ""
        _child.cache_clear()  # the next call starts another
        raise ValueError(
            "task math needs math-verify, which does not run: pip install math-verify"
        ) from None


@cache
def _child() -> subprocess.Popen:
    """→ this file as a child process. In a session of its own, Ctrl-C does not reach it."""
    return subprocess.Popen(
        [sys.executable, __file__],
        start_new_session=True,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def close(one: object, other: object) -> bool:
    """→ whether two values of sympy, which math-verify finds equal, are also close as numbers.

    math-verify rounds numbers to 6 digits behind the point, and so takes 1e-9 for 2e-9. Sets,
    tuples and equations are close if their parts are; of what is no number, math-verify decides.
    """
    if getattr(one, "is_number", False) and getattr(other, "is_number", False):
        size = abs(other).doit().evalf()
        return size > 1e-2 or abs(one - other).doit().evalf() <= 1e-3 * size
    parts, others = getattr(one, "args", ()), getattr(other, "args", ())
    return len(parts) != len(others) or all(map(close, parts, others))


def serve() -> None:
    """Run as the child: answer each line of the input, until the parent closes it."""
    import resource

    from math_verify import parse, verify

    def compare(gold, answer):
        # None turns off math-verify's own timeouts: Python runs their signal handler only after a
        # long multiplication has returned.
        parsed = [parse(f"\\boxed{{{latex}}}", parsing_timeout=None) for latex in (gold, answer)]
        return verify(*parsed, timeout_seconds=None) and all(map(close, *parsed))

    for latex in WARM_UP:
        compare(latex, "(x + 1)(x - 1)")
    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            # The timer sends SIGPROF. Nothing handles it, so that the kernel ends the fork.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os._exit(not compare(*json.loads(line)))
        _, status = os.waitpid(fork, 0)
        print(status, flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules must not hide a library's
    serve()
