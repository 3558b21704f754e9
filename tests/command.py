"""How the tests run train.py: in this process, or in a child that is forked from a warm server."""

import gc
import json
import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

import train
from tools import report
from tools.flags import parse

ROOT = Path(train.__file__).parent
# keys in which the record of a replayed step may differ
TIMINGS = ("rollout_s", "update_s", "rollout_tok_s", "update_tok_s", "memory_gb", "segment")
# six short steps with three checkpoints; short answers earn more, so rewards differ within a group
FLAGS = (
    "--quant nvfp4 --steps 6 --prompts 4 --group-size 4 --max-new-tokens 8 --rank 4 --lr 5e-3 "
    "--overlong penalty --eval-every 3 --save-every 2 --sigma-stages 3 --device cpu"
).split()


# --- train.py in a new process, forked from a server that has imported torch and our modules
def child(code, arguments, said, out, env):
    """Run the code, then train.py as a command, with stdout and stderr written to these files."""
    for number, path in ((1, out), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)
    os.environ.update(env)
    sys.argv = ["train.py", *arguments]
    sys.orig_argv = ["python", *sys.argv]
    exec(code)
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def forks():
    """A multiprocessing context whose new processes have torch and our modules imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")
        multiprocessing.set_forkserver_preload(["train", "command", "test_train"])
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


class Command:
    """Starts code, then python train.py FLAGS…; `code` and `said` wait for its exit code and
    stderr.
    """

    def __init__(self, folder, *flags, code="", out=os.devnull, env=()):
        self.file = Path(folder) / f"stderr-{time.time_ns()}"
        arguments = code, list(map(str, flags)), str(self.file), str(out), dict(env)
        self.process = forks().Process(target=child, args=arguments)
        self.process.start()

    @property
    def code(self):
        self.process.join(120)
        return self.process.exitcode

    @property
    def said(self):
        return self.code is not None and self.file.read_text()


def main(*flags):
    """python train.py in this process → the exit code. Collects garbage, which releases the run's
    lock.
    """
    try:
        return train.main(parse(list(map(str, flags))))
    except SystemExit as stop:
        return stop.code
    except KeyboardInterrupt:
        return 130
    finally:
        gc.collect()


def outcome(folder):
    """What an accident must not change: both adapters' bytes, and the records except their
    timings.
    """
    adapter, best = (
        (folder / f"{name}/adapter_model.safetensors").read_bytes()
        for name in ("adapter", "adapter-best")
    )
    records = report.read(folder).values()
    return adapter, [{k: v for k, v in r.items() if k not in TIMINGS} for r in records], best


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_bytes().splitlines()]
