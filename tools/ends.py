"""How a command ends: by a signal, by one sentence, or by the traceback of an unforeseen error.

Exit codes of train.py: 0 done, 1 a traceback, 2 another error, in one sentence, 3 --preflight finds
training pointless (under torchrun 0), 128 + n signal n.

Needs: nothing, so that a wrong flag is refused before torch is imported.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from difflib import get_close_matches
from typing import NoReturn

ARRIVED = []  # the signals that end_by has raised as errors


def exit_on_signals() -> None:
    """Make SIGTERM, SIGHUP (the terminal was closed) and Ctrl-C call end_by, so that a run saves
    itself first. An ignored signal stays ignored, as nohup wants for SIGHUP.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end_by)


def end_by(number: int, frame: object = None) -> NoReturn:
    """Raise a signal as the error that ends the program: KeyboardInterrupt, or SystemExit."""
    ARRIVED.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def nearest(word: str, known: Iterable[str]) -> str:
    """→ for a sentence that refuses a word: " (did you mean …?)" with that of the known ones, in
    lower case, which is most like it; "" if none is.
    """
    near = get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {near.pop()}?)" if near else ""


@contextmanager
def one_sentence(command: str):
    """Context manager around a command: an error that the user can mend becomes one sentence on
    stderr and exit code 2, Ctrl-C exit code 130. An unforeseen error keeps its traceback.
    """
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:  # closed by who started the program, as cron may
            setattr(sys, name, open(os.devnull, mode))
    sys.stdout.reconfigure(errors="replace")  # a terminal may not have Unicode
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C, or nobody reads our output any more
        sys.exit(130)
    except Exception as error:
        said = error
        # torch's OutOfMemoryError by its name, because torch may not be imported yet
        if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
            said = (
                "out of memory: lower --max-new-tokens or --rank, or take a smaller model; "
                "python -m tools.memory says what fits"
            )
        elif not isinstance(error, (ValueError, OSError)):
            raise
        print(f"{command}: {said}", file=sys.stderr)
        sys.exit(2)
