"""What the method stands on: flags, files, runs, memory. Its reader need not open these."""

import sys

before = sys.excepthook


def quiet_about_ctrl_c(kind, error, trace):
    """Python's report of an error that ends a program: Ctrl-C may come while torch is imported."""
    if not issubclass(kind, KeyboardInterrupt):
        before(kind, error, trace)


sys.excepthook = quiet_about_ctrl_c
