"""Name a call that does not return: the child process of tools/own_task.py.

    python watch.py SECONDS    reads a line when a call begins, and an empty line when it ends

A line that no other follows within so many seconds is printed to stderr. The parent could not do
that itself: a thread of its own waits while C code, such as that of a regular expression, keeps
Python's lock, which may take hours.

Needs: a system with signals.
"""

import signal
import sys
from contextlib import suppress


def main(seconds):
    def name(*_):
        with suppress(OSError):  # nobody reads stderr any more
            print(line, end="", file=sys.stderr)

    signal.signal(signal.SIGALRM, name)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds if line.strip() else 0)


if __name__ == "__main__":
    main(float(sys.argv[1]))
