"""What the method stands on: flags, files, runs, memory. Its reader need not open these."""

import sys


def _report(kind, error, trace):
    """sys.excepthook, which is quiet about Ctrl-C: it may come while torch is imported."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report
