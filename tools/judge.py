r"""The judge of --task math: math-verify's verdict on two formulas, from a child process.

    equal(r"\frac{1}{2}", "0.5")    → True

    equal ── a line of JSON: [number, gold, answer] ──► the child forks; the fork compares them
          ◄── a line: number, and the fork's exit status, 0 if equal ──

math-verify compares with sympy, which may compute for hours, and no Python code can interrupt one
long multiplication. So the kernel does: it ends a fork that takes over 1 s of processor time, and
gives it no more than 4 GB of memory. An answer that needs more counts as wrong. Only the child
imports math-verify and sympy, once: a fork inherits them.

A verdict must never answer another question. So a child has one question at a time, threads that
judge at once have a child each, and a child whose question was interrupted is killed.

Needs: math-verify, and a system with fork.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache

CPU_SECONDS = 1  # for one comparison
MEMORY = 4 << 30  # bytes of address space for one comparison
# What every child must know before it judges: a math-verify without its parser of LaTeX, say, would
# score each answer 0. These formulas also make sympy load its parts, so that no fork has to.
KNOWN = {
    (r"\frac{1}{2}", "0.5"): True,
    (r"x = \sqrt{12}\text{ m}", r"2\sqrt{3}"): True,
    ("(1, 3]", r"(50\%, 3]"): False,
}

_idle = []  # children that have no question
os.register_at_fork(after_in_child=_idle.clear)  # a user's fork must not share its parent's
_numbers = itertools.count()


@lru_cache(4096)  # the answers of a group often agree
def equal(gold: str, answer: str) -> bool:
    """→ whether math-verify finds two texts in LaTeX equal and close() confirms it. False if
    the comparison fails or takes more than CPU_SECONDS or MEMORY. Threads may call it.

    ValueError: math-verify does not run, or does not know what is KNOWN.
    """
    for _ in range(2):  # a child that has died, as when memory runs out, is replaced once
        with suppress(ConnectionError):
            child = _child()
            verdict = _ask(child, gold, answer)
            _idle.append(child)
            return verdict
    raise ValueError(
        "task math needs math-verify, which does not run, or takes 1/2 for no 0.5: "
        "pip install math-verify, or allow it more memory (ulimit -v)"
    )


def _child() -> subprocess.Popen:
    """→ this file as a child process without a question. In a session of its own, Ctrl-C does not
    reach it. ConnectionError: it has died, or does not know what is KNOWN.
    """
    with suppress(IndexError):
        return _idle.pop()
    child = subprocess.Popen(
        [sys.executable, __file__],
        start_new_session=True,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    for formulas, verdict in KNOWN.items():
        if _ask(child, *formulas) != verdict:
            raise ConnectionError
    return child


def _ask(child: subprocess.Popen, gold: str, answer: str) -> bool:
    """→ a child's verdict. Whatever leaves this function in between, such as a time limit of the
    caller's own, kills the child. ConnectionError: it has died, or answers another question.
    """
    number = str(next(_numbers))
    try:
        print(json.dumps([number, gold, answer]), file=child.stdin, flush=True)
        echo, _, status = child.stdout.readline().partition(" ")
        if echo != number:
            raise ConnectionError
    except BaseException:
        child.kill()
        raise
    return int(status) == 0


def close(one: object, other: object) -> bool:
    """→ whether two values of sympy, which math-verify finds equal, are also close as numbers.

    math-verify rounds numbers to 6 digits after the point, and so takes 1e-9 for 2e-9. Sets,
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

    for formulas in KNOWN:
        compare(*formulas)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = min(MEMORY, hard % 2**64)  # no limit is −1
    for line in sys.stdin:
        number, *formulas = json.loads(line)
        fork = os.fork()
        if fork == 0:
            with suppress(ValueError):  # macOS refuses any limit of address space
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            # The timer sends SIGPROF. Nothing handles it, so that the kernel ends the fork.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os._exit(not compare(*formulas))
        _, status = os.waitpid(fork, 0)
        print(number, status, flush=True)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules must not hide a library's
    serve()
