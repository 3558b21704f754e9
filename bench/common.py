"""What the measurements share: flags, the log, the clock, random models.

Needs: torch; tools/weights.py, lora.py, model.py, tools/memory.py; nvidia-smi where there is a GPU.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import lora
from model import load
from tools import memory, weights

try:
    from triton import __version__ as TRITON
except ImportError:
    TRITON = "none"

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BYTES_PER_S, FLOP_PER_S = 4.3e12, 790e12  # measured on an H200: the rates of every bound
QUANT = ["nvfp4", "bf16"]
RANK = 32  # of the LoRA, where no flag says otherwise


# --- flags and the log
def flags(doc, **defaults):
    """An ArgumentParser with --out and, for each name_of_flag=default, a flag of its type."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=kind)
    parser.add_argument("--out", help="append each measurement to this file, as a line of JSON")
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        choices = memory.MODELS if name == "model_shape" else None
        kind = str if isinstance(default, str) else at_least(min(1, default), type(default))
        if name == "memory_gb":
            kind = gigabytes
        help = f"default {default}"
        parser.add_argument(flag, type=kind, choices=choices, default=default, help=help)
    return parser


def at_least(low, kind=int):
    """→ the type of a flag whose values are numbers from `low` on."""

    def number(text):
        value = kind(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} must be {low} or more")
        return value

    number.__name__ = kind.__name__  # what argparse calls it if the text is no number
    return number


def gigabytes(text):
    """→ the value of --memory-gb, which needs a GPU."""
    gb = at_least(0, float)(text)
    if gb and DEVICE == "cpu":
        raise argparse.ArgumentTypeError(f"{text} caps a GPU's memory, and here is no GPU")
    return gb


class Records:
    """The measurements. append() prints one and writes it to the log before the next one starts."""

    def __init__(self, path, info):
        """info: what each line of the log holds besides the measurement. path: None for no log."""
        self.info = info
        try:
            self.file = open(path, "a", buffering=1) if path else None
        except OSError as error:
            sys.exit(f"--out {path} cannot be written: {error.strerror}")

    def append(self, record):
        for key, value in record.items():
            print(key, f"{value:.5g}" if isinstance(value, float) else value, end="  ")
        print(flush=True)
        if self.file:
            self.file.write(json.dumps(self.info | record) + "\n")


def conditions():
    """The GPU and its driver, versions and the commit, without which a number means nothing."""
    gpu = "cpu"
    if DEVICE != "cpu":
        gpu = printed("nvidia-smi --id=0 --query-gpu=name,driver_version --format=csv,noheader")
    # on a machine without the repository, the variable COMMIT names the commit that runs
    commit = os.environ.get("COMMIT") or printed("git describe --always --dirty")
    return {"gpu": gpu, "torch": torch.__version__, "triton": TRITON, "commit": commit or "none"}


def printed(command):
    """What a command prints; nothing where it is not installed."""
    folder = Path(__file__).parent
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=folder)
    return done.stdout.strip()


# --- the clock
def clock():
    """Seconds, once the GPU has done what it was asked for."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def forget_peak():
    """Let tools.run.peak_memory_gb() begin anew, where that is possible."""
    if DEVICE != "cpu":
        torch.cuda.reset_peak_memory_stats()


def graph_times(kinds):
    """kinds: name → list of calls. → name → seconds of one call, the median of 25 replays.

    A CUDA graph makes the calls of a kind in a row, repeated if they are under 16. The graphs of
    all kinds take turns, because a GPU at its power limit slows down within a second.
    """
    graphs, times = {}, {}
    for name, calls in kinds.items():
        calls = calls * math.ceil(16 / len(calls))  # so that the start of the graph weighs little
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graphs[name] = graph, len(calls)
        times[name] = []
    for _ in range(28):
        for name, (graph, count) in graphs.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1e-3 * start.elapsed_time(end) / count)
    return {name: statistics.median(seconds[3:]) for name, seconds in times.items()}


# --- random models: the speed does not depend on the values
class RandomWeights(weights.Source):
    """A checkpoint of a shape, each tensor made where and when it is read."""

    unread = set()

    def __init__(self, shape):
        self.config = memory.config(shape)

    def tensor(self, name, shape, device=DEVICE):
        if "norm" in name:
            return torch.ones(shape, device=device)
        weight = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)  # fast on a GPU
        return weight.mul_(0.5 * shape[-1] ** -0.5).to(device)


def random_model(shape, quant, rank=RANK):
    """Random weights and an adapter that is not zero. NVFP4 by rtn, which loads fastest."""
    decoder = load(RandomWeights(shape), "rtn" if quant == "nvfp4" else quant, rank, 32, DEVICE)
    for layer in lora.lora_layers(decoder).values():
        torch.nn.init.normal_(layer.lora_B, std=0.01)
    lora.refresh(decoder)
    return decoder


def random_prompts(model, count, length):
    return torch.randint(model.config.vocab_size, (count, length)).tolist()
