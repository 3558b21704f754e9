"""What the two experiments, ablation.py and gsm8k.py, share: bases, worker processes, statistics, figures.

Tests: at one seed two arms share prompts, their order, random bits and the start of the adapter, so they are
compared seed by seed: a paired t test on the differences (Welch's test would need independent arms).
p values are Holm-adjusted within each group of claims, intervals are not. From the 95 % interval of the mean
difference A − B and MARGIN, .02 (two points of accuracy, .02 nats), the verdict on "A is above B" is

    holds         p < .05 and A above B
    does not      the interval ends below MARGIN: any gain is too small to matter
    cannot tell   else, and always with fewer than 3 pairs

and on "A is not below B": holds if the interval begins above −MARGIN, does not if it ends below it.
Needs: numpy, torch; checkpoint.py, nvfp4.py.
"""

import collections
import functools
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before torch: a run beside eleven others has one core
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import checkpoint  # noqa: E402

MARGIN, LEVEL = 0.02, 0.05

# --- bases
# bitsandbytes' NF4: quantiles of the normal distribution, and 0, scaled to ±1 (create_normal_map)
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)


def nf4(w):
    """(N, K) rounded to NF4 and back: blocks of 64 in memory order share their largest magnitude, an fp32."""
    blocks = w.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4, device=w.device)
    code = torch.bucketize(blocks / absmax.clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2)
    return (levels[code] * absmax).view(w.shape)


class Rounded(checkpoint.Source):
    """A checkpoint whose projections are rounded to a format and dequantised, on `device`. It keeps what it
    has read in `kept`, a dict that several of them may share: reading a GGUF takes longer than rounding."""

    def __init__(self, source, rounding=None, device="cpu", kept=None):
        self.source, self.rounding, self.device = source, rounding, device
        self.kept = {} if kept is None else kept

    def __getattr__(self, name):
        return getattr(self.source, name)

    def tensor(self, name, shape):
        if name not in self.kept:
            self.kept[name] = self.source.tensor(name, shape)
        w = self.kept[name]
        return self.rounding(w.to(self.device)) if self.rounding and name.endswith("_proj.weight") else w


@functools.cache
def opened(name):
    """→ source, tokenizer, stop ids; cached per process, because opening takes longer than loading."""
    source = checkpoint.open(name)
    return source, source.tokenizer(), source.stop_ids()


# --- worker processes
def worker(connection, make, gpu, share, threads):
    """Make each job that the connection sends; answer (what to print, ""), or (None, error) and exit. SIGTERM
    becomes SystemExit, on which a run with a folder saves itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)                        # Ctrl-C is the parent's
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(threads)
    if share:
        torch.cuda.set_device(gpu)
        torch.cuda.set_per_process_memory_fraction(share)
    for job in iter(connection.recv, None):
        try:
            connection.send((make(job), ""))
        except Exception as error:          # a new process takes over: a CUDA error breaks this one
            traceback.print_exc()
            connection.send((None, f"{type(error).__name__}: {error}"))
            return
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def share_of(workers, device=""):
    """→ the share of a GPU's memory for each of its workers, 0 on a CPU. A tenth is left to CUDA contexts."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return 0.9 / math.ceil(workers / gpus) if gpus else 0.0


def work(todo, make, fits, workers, minutes, device="", failed=None, died=lambda job: None):
    """Make jobs in worker processes, spread over the GPUs → failed, {job: error}, filled on the way.

    todo(): all jobs left, the first one first; one that holds a None cannot start yet. make(job), in a worker
    → what to print. fits(job, seconds): would it end in so many? A job still running after `minutes` gets
    SIGTERM. A job that fails is tried once more; ten failures end it all. died(job): its process died, so
    that make could not log why.
    """
    began, context = time.time(), multiprocessing.get_context("spawn")
    failed = {} if failed is None else failed
    crew, busy, tries = [], {}, collections.Counter()       # (process, connection, GPU), its job
    gpus = range(max(1, torch.cuda.device_count()))
    share, end = share_of(workers, device), began + 60 * minutes
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    print(f"{len(todo())} runs to make, {workers} at a time", flush=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))        # then `finally` ends the workers
    try:
        while True:
            ready = [job for job in todo() if None not in job and job not in failed
                     and job not in busy.values() and fits(job, end - time.time())]
            while ready and len(busy) < workers and time.time() < end and tries.total() < 10:
                idle = next((one for one in crew if one not in busy), None)
                if idle is None:
                    ours, theirs = context.Pipe()
                    gpu = min(gpus, key=[gpu for *_, gpu in crew].count)
                    process = context.Process(target=worker, daemon=True,
                                              args=(theirs, make, gpu, share, threads))
                    process.start()
                    theirs.close()                          # if the worker dies, recv must fail
                    crew.append(idle := (process, ours, gpu))
                busy[idle] = ready.pop(0)
                idle[1].send(busy[idle])
            answered = wait([c for _, c, _ in busy], max(0, end - time.time())) if busy else ()
            if not answered:
                break
            for one in [one for one in busy if one[1] in answered]:
                job = busy.pop(one)
                try:
                    said, error = one[1].recv()
                except (EOFError, ConnectionError):
                    said, error = None, "its process died"
                    died(job)
                if error:
                    tries[job], said = tries[job] + 1, f"FAILED: {error}"
                    failed |= {job: error} if tries[job] > 1 else {}
                    crew.remove(one)
                print(f"{time.time() - began:5.0f} s | {' '.join(map(str, job)):34} | {said} | "
                      f"{len(todo())} left", flush=True)
    finally:
        for process, *_ in crew:
            process.terminate()
        for process, *_ in crew:
            process.join(30)                                # it saves its run first
            process.kill()
            process.join()
        signal.signal(signal.SIGTERM, before)
    waiting = [job for job in todo() if job not in failed]
    late = any(None not in job and not fits(job, end - time.time()) for job in waiting)
    print(f"{len(waiting)} runs left, {len(busy)} of them stopped on the way, {len(failed)} failed; "
          f"{time.time() - began:.0f} s{'; no other would end in time' * late}", flush=True)
    return failed


# --- statistics
def tail(t, df):
    """P(|T| > t) of Student's t: with T = √df·tan θ its density is cosᵈᶠ⁻¹θ, up to a factor."""
    def area(start):
        theta = np.linspace(start, math.pi / 2, 20001)
        return np.trapezoid(np.cos(theta) ** (df - 1), theta)
    return float(area(math.atan(abs(t) / math.sqrt(df))) / area(0.0))


def quantile(df, level=LEVEL):
    """t with P(|T| > t) = level, by halving."""
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > level else (low, middle)
    return low


def paired(a, b):
    """→ (mean difference, half of its 95 % interval, p); with fewer than 3 pairs the last two are NaN."""
    d = np.asarray(a, float) - np.asarray(b, float)
    if len(d) < 3:
        return d.mean() if len(d) else math.nan, math.nan, math.nan
    error = d.std(ddof=1) / math.sqrt(len(d))
    if error == 0:
        return d.mean(), 0.0, float(d.mean() == 0)
    return d.mean(), quantile(len(d) - 1) * error, tail(d.mean() / error, len(d) - 1)


def holm(ps):
    """Holm's p: in ascending order, each p times the number still left, never decreasing; NaN is left out."""
    adjusted, most = list(ps), 0.0
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    for place, i in enumerate(order):
        adjusted[i] = most = max(most, min(1.0, ps[i] * (len(order) - place)))
    return adjusted


def verdict(kind, mean, half, p):
    if math.isnan(half):
        return "cannot tell"
    if kind == "above":
        holds, fails = p < LEVEL and mean > 0, mean + half < MARGIN
    else:
        holds, fails = mean - half > -MARGIN, mean + half < -MARGIN
    return "holds" if holds else "does not" if fails else "cannot tell"


def spread(values):
    """(mean, sd); NaN where there are too few."""
    return (np.mean(values) if len(values) else math.nan,
            np.std(values, ddof=1) if len(values) > 1 else math.nan)


def text(mean_sd):
    return "±".join("–" if math.isnan(v) else f"{v:.3f}" for v in mean_sd)


def tested(mean, half, p):
    """The difference with its interval, and p, as two cells of a table."""
    return f"{mean:+.3f} ± {half:.3f} | {'<.001' if p < 0.001 else f'{p:.3f}'}".replace("nan", "–")


# --- figures
def smooth(values, width=5):
    """Mean of the neighbours, fewer of them at the ends."""
    half, values = width // 2, np.array(values, float)
    return np.array([np.nanmean(values[max(0, i - half):i + half + 1]) for i in range(len(values))])


def save(figure, path, said=None):
    """Leave date and version out, so that the same log gives the same bytes. said: the picture's Description,
    which a test can read."""
    figure.savefig(path, dpi=110, metadata={"Software": None, "Description": said})
