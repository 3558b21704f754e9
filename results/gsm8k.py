"""GSM8K on Qwen2.5-Coder-Instruct: does it learn the paper's benchmark, and does noise explore?

The rules, fixed before the first run, are in results/README.md; gsm8k_tables.py makes tables and figures.

    python results/gsm8k.py list                      what is made, what is left, and how long that takes
    python results/gsm8k.py run 5 2                   arm 5 with seed 2 again, compared with its log
    python results/gsm8k.py all --workers 3 --minutes 24       make what the log lacks
    python results/gsm8k.py table | plot

run and all also take --models FOLDER, which holds both GGUF files, and the flags of train.py: --data and
--test for files; for a trial --logs FOLDER --model smollm2 --steps 2 --prompts 4 and so on.

`all` first makes the runs that choose the learning rates, then whole seeds of all arms, last the tests before
training. No run starts that would end after --minutes. Then `all` pauses: each run saves itself in runs/, and
the next `all` on the same machine continues it. On another machine a run without its folder begins again.
Only the logs travel, results/gsm8k/NAME.jsonl, 30 KB a run; they must go along before the next `all`, because
a run continues only beside a log of all its steps:

    start    conditions and flags; it replaces what was logged from its step on
    step     reward, entropy, … ; sampler_entropy: mean −ln p of the tokens as they were drawn
    eval     only where a learning rate is chosen: train.py's, on 256 problems held out of the training file
    test     of each problem of the test file, how many answers were right: "0110…", or [3, 64, …] of 64
    temperatures, failed, end

Needs: train.py and what it needs; experiment.py, bench.py.
"""
import argparse
import dataclasses
import functools
import math
import shutil
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import experiment  # first: it names the folder of the modules below, and the threads that torch starts

# isort: split
import bench
import numpy as np
import torch
from experiment import ROOT, Rounded, nf4, opened

import aqn
import checkpoint
import launch
import memory
import nvfp4
import runs
import train
from model import load
from rollout import Sampler
from tasks import TASKS


class Experiment(NamedTuple):
    size: str               # of the model
    seeds: tuple            # those reported
    rates: tuple            # learning rates to choose from
    choosers: tuple         # the arms that choose: bf16 and NVFP4
    tests: tuple            # keys of TESTS
    shown: tuple            # keys of MEASURES that the figure shows
    arms: dict              # name → base, flags of train.py beside COMMON, what it is


COMMON = dict(task="gsm8k", data="openai/gsm8k/main", test="openai/gsm8k/main:test", prompts=32, group_size=8,
              max_new_tokens=400, steps=100, eval_every=100, save_every=25, micro_tokens=4096, aqn=False)
PAPER = dict(aqn=True, sigma_start=1e-2, sigma_end=5e-4)
STRONG = dict(aqn=True, sigma_start=1e-1, sigma_end=5e-3, correction="tis")
RATE_SEEDS, RATE_STEPS = (0, 1), 50
ONE = Experiment("1.5b", (2, 3, 4), (2.5e-5, 5e-5, 1e-4), ("bf16", "nvfp4"), ("greedy", "paper"),
                 ("greedy", "paper"), {
    "nvfp4": ("sweep", dict(aqn=True), "NVFP4 (sweep) with AQN as train.py's defaults have it"),
    "bf16": ("bf16", {}, "bf16"),
    "nf4": ("nf4", {}, "NF4 rounded into bf16: QLoRA's accuracy, not its seconds or GB")})
TWO = Experiment("0.5b", (2, 3, 4, 5, 6), (5e-5, 1e-4, 2e-4), ("1", "2"), ("greedy", "pass", "paper"),
                 ("greedy", "pass@32"), {
    "1": ("bf16", {}, "bf16"),
    "2": ("rtn", {}, "NVFP4 (rtn), the paper's base"),
    "3": ("sweep", {}, "NVFP4 (sweep), ours"),
    "4": ("nf4", {}, "NF4, QLoRA's base"),
    "5": ("rtn", PAPER, "rtn, AQN at the paper's σ"),
    "6": ("rtn", STRONG, "rtn, AQN at ten times that σ, tis"),
    "7": ("rtn", dict(correction="tis"), "rtn, a temperature of equal entropy, tis"),
    "8": ("bf16", STRONG, "bf16, AQN at ten times the paper's σ, tis"),
    "9": ("gauss", {}, "bf16 + a frozen Gaussian error of rtn's norm")})
LOGS = ROOT / "results" / "gsm8k"
EXPERIMENTS, ARMS = (ONE, TWO), {arm: ours for ours in (ONE, TWO) for arm in ours.arms}
# problems of the test file (0: all), answers to each, temperature, top-p
TESTS = {"greedy": (0, 1, 0.0, 1.0), "pass": (200, 64, 1.0, 1.0), "paper": (0, 8, 0.6, 0.95)}
MEASURES = {"greedy": "test accuracy, greedy", "paper": "test accuracy, mean of 8 (T 0.6, top-p .95)",
            "pass@1": "pass@1 (64 samples, T 1, 200 test problems)",
            "pass@32": "pass@32 (64 samples, T 1, 200 test problems)"}
CLAIMS = (("NVFP4 ends above bf16", "greedy", "2", "1"),
          ("AQN lifts NVFP4", "greedy", "5", "2"),
          ("noise explores more than temperature", "pass@32", "6", "7"),
          ("NVFP4's error is better than a Gaussian one", "greedy", "2", "9"))
MODELS = {size: f"Qwen/Qwen2.5-Coder-{size.upper()}-Instruct-GGUF/qwen2.5-coder-{size}-instruct-q4_k_m.gguf"
          for size in ("1.5b", "0.5b")}
# of a run alone on an H100, until the log has some: seconds to load, of a step, of all tests
SECONDS = {"1.5b": (20, 3.4, 130), "0.5b": (13, 1.7, 130)}


class Job(NamedTuple):
    phase: str              # rate, base (tests before training), main
    arm: str                # of a base: SIZE-BASE
    lr: float               # None: it cannot start yet
    seed: int

    @property
    def name(self):
        return f"{self.phase}-{self.arm}{f'-{self.lr:g}' if self.phase == 'rate' else ''}-{self.seed}"

    def parts(self):
        """→ its Experiment, its base, its flags."""
        if self.arm in ARMS:
            return ARMS[self.arm], *ARMS[self.arm].arms[self.arm][:2]
        size, base = self.arm.split("-")
        return ONE if size == ONE.size else TWO, base, {}


# --- bases
def gaussian(seed):
    """→ a rounding for Rounded: w plus a Gaussian error with the norm of its rounding to NVFP4 by rtn."""
    generator = torch.Generator().manual_seed(10**6 + seed)     # other bits than the adapter's

    def add(w):
        w = w.float()
        error = nvfp4.dequantize(nvfp4.quantize(w, "rtn"), torch.float32) - w
        noise = torch.randn(w.shape, generator=generator).to(w.device)
        return w + noise * (error.norm() / noise.norm())
    return add


BASES = {"bf16": ("bf16", None), "rtn": ("rtn", None), "sweep": ("nvfp4", None),
         "nf4": ("bf16", lambda seed: nf4), "gauss": ("bf16", gaussian)}        # --quant; seed → its rounding


@functools.cache
def kept(name):
    """The tensors of a checkpoint that this process has read: the next run need not read the GGUF."""
    return {}


# --- arm 7
class Tempered(Sampler):
    """Training answers are drawn at the temperature of their stage; an evaluation, step −1, is as ever."""

    def __init__(self, model, temperatures, steps):
        super().__init__(model)
        self.temperatures, self.steps = temperatures, steps

    def generate(self, prompts, group_size, limit, temperature, stop_ids, seed, step, *more, **named):
        if step >= 0:
            temperature *= self.temperatures[step * len(self.temperatures) // self.steps]
        return super().generate(prompts, group_size, limit, temperature, stop_ids, seed, step, *more, **named)


def equal_temperatures(config, model, prompts, stop_ids):
    """→ for each stage: arm 6's σ, the untrained sampler's entropy under it; the temperature that has the
    same entropy without noise, and what it has. Two draws of noise, each for half of the prompts; two answers
    to each. ValueError: no temperature has that entropy."""
    sampler = Sampler(model)

    @functools.cache
    def entropy(temperature, sigma):
        nats = tokens = 0
        for draw in (0, 1):
            with aqn.noisy_norms(model, sigma, 0, draw):
                r = sampler.generate(prompts[draw::2], 2, config.max_new_tokens, temperature, stop_ids, 0,
                                     draw)
            nats, tokens = nats - r.logprobs.sum().item(), tokens + r.lengths.sum().item()
        return nats / tokens

    found = []
    for stage in range(config.sigma_stages):
        sigma = aqn.sigma(stage, config.sigma_stages, STRONG["sigma_start"], STRONG["sigma_end"])
        wanted, low, high, middle = entropy(1.0, sigma), 0.5, 2.0, 1.0
        if not entropy(low, 0.0) < wanted < entropy(high, 0.0):
            raise ValueError(f"no temperature of {low} to {high} has the entropy {wanted:.3f} of σ {sigma}")
        for _ in range(8 if sigma else 0):                      # to .006; stages share what they measure
            middle = (low + high) / 2
            low, high = (middle, high) if entropy(middle, 0.0) < wanted else (low, middle)
        found.append([round(v, 4) for v in (sigma, wanted, middle, entropy(middle, 0.0))])
    return found


# --- one run
class Logged(runs.Run):
    """A run whose records go into the experiment's log. Its folder holds checkpoints and samples."""

    def __init__(self, config, log, start, loud, logged):
        self.write, self.start, self.loud, self.logged = log, start, loud, logged
        super().__init__(config)

    def load(self, model, optimizer):
        first = super().load(model, optimizer)
        if first > self.logged:
            raise ValueError(f"{self.folder} continues at step {first}, but its log ends at step "
                             f"{self.logged}: bring the newest log back, or delete that folder")
        self.write(self.start | dict(step=first))
        return first

    def made(self, step, stats, sampled):
        """Five skipped steps in a row do not stop the run: they are a result. mismatch compares equal
        temperatures, which arm 7 does not have."""
        stats |= dict(mismatch=None) if self.start["arm"] == "7" else {}
        stats["sampler_entropy"] = -(sampled.logprobs.sum() / sampled.lengths.sum()).item()
        try:
            super().made(step, stats, sampled)
        except ValueError as skipped:
            self.say(skipped)

    def log(self, kind, step, record):
        unused = "rollout_tok_s", "update_tok_s", "resampled", "rows", "clip_fraction"
        record = dict(kind=kind, step=step) | record
        short = {k: runs.rounded(v, 4) for k, v in record.items() if k not in unused}       # NaN: None
        self.write({k: v for k, v in short.items() if v is not None})
        self.say(runs.line(record))

    def say(self, text, file=None):
        if self.loud:
            super().say(text, file)

    def finish(self):
        pass


def configured(job, flags, share=0.0):
    """→ the checked train.Config of a job. flags: the command line's, which win. share: of a GPU's memory."""
    ours, base, own = job.parts()
    steps = {"steps": RATE_STEPS, "eval_every": RATE_STEPS} if job.phase == "rate" else {}
    config = train.Config(**COMMON | dict(model=MODELS[ours.size], quant=BASES[base][0], lr=job.lr or 1.0,
                                          seed=job.seed) | own | steps | flags)
    if share and "micro_tokens" not in flags:
        c, room = opened(config.model)[0].config, share * torch.cuda.get_device_properties(0).total_memory
        fitting = [n for n in range(2048, 32769, 2048) if memory.plan_of(
            dataclasses.replace(config, micro_tokens=n), c, 1, 1, 1).peak < 0.85 * room - 1e9]
        config.micro_tokens = max(fitting, default=2048)
    return launch.check(config)


def folder(logs, job):
    """Where a run keeps its checkpoints, on this machine."""
    return ROOT / "runs" / logs.name / job.name


def use(folder):
    """Take the GGUF files in a folder, not the hub's. A worker process must call this too."""
    MODELS.update({size: str(Path(folder, Path(name).name).resolve()) for size, name in MODELS.items()})


def make(job, logs, out, flags, models=None, problems=None, workers=1, loud=False):
    """Make a job, or what is left of it, and log it in out → what to print. logs: the folder with arm 7's
    temperatures. models: see use(). problems: at most so many in each test."""
    if models:
        use(models)
    began, job = time.perf_counter(), Job(*job)
    (ours, base, _), training = job.parts(), job.phase != "base"
    share = experiment.share_of(workers, flags.get("device", ""))
    log = partial(runs.append, out / f"{job.name}.jsonl")
    out.mkdir(parents=True, exist_ok=True)
    try:
        config = configured(job, flags, share)
        config.out = str(folder(out, job))
        config.resume = config.out if any(folder(out, job).glob("checkpoint*.safetensors")) else ""
        device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        (source, tokenizer, stop_ids), (quant, rounding) = opened(config.model), BASES[base]
        source = Rounded(source, rounding and rounding(job.seed), device, kept(config.model))
        model = load(source, quant, config.rank, config.alpha, device, job.seed)
        task = TASKS["gsm8k"](config.data)
        task = task._replace(held_out=[] if job.phase == "main" else task.held_out[:problems])
        unlogged = "model", "data", "test", "out", "resume", "device", "lr", "seed", "steps"
        start = dict(kind="start", **job._asdict(), step=0, steps=config.steps * training,
                     time=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), **bench.conditions(),
                     at_once=round(0.9 / share) if share else workers,
                     load_s=round(time.perf_counter() - began, 1), model=Path(config.model).name,
                     flags={f.name: getattr(config, f.name) for f in dataclasses.fields(config)
                            if f.name not in unlogged and getattr(config, f.name) != f.default})
        if training:
            sampler = Sampler if job.arm != "7" else partial(
                Tempered, temperatures=[t for *_, t, _ in temperatures(logs)], steps=config.steps)
            with patch.object(train, "Sampler", sampler):
                train.train(config, model, task, tokenizer, stop_ids,
                            Logged(config, log, start, loud, len(read(out, job).step)))
        else:
            log(start)
        sampler = Sampler(model, slots=512)             # thousands of answers: long waves
        for name in () if job.phase == "rate" else ours.tests:
            if name not in read(out, job).tests:
                log(test(name, config, sampler, tokenizer, stop_ids, problems))
        if job.arm == "0.5b-rtn":
            began = time.perf_counter()
            prompts = [checkpoint.encode(tokenizer, task.prompt(p)) for p in task.held_out]
            log(dict(kind="temperatures", stages=equal_temperatures(config, model, prompts, stop_ids),
                     seconds=round(time.perf_counter() - began, 1)))
        log(dict(kind="end"))
    except Exception as error:
        log(dict(kind="failed", error=f"{type(error).__name__}: {error}"))
        raise
    shutil.rmtree(folder(out, job), ignore_errors=True)
    return said(read(out, job))


def test(name, config, sampler, tokenizer, stop_ids, problems):
    """→ the record of a test: to each problem, the number of right answers."""
    few, samples, temperature, top_p = TESTS[name]
    task, began = TASKS["gsm8k"](config.test, held_out=few), time.perf_counter()
    asked = (task.held_out if few else task.train)[:problems]       # few: always the same
    prompts = [checkpoint.encode(tokenizer, task.prompt(p)) for p in asked]
    r = sampler.generate(prompts, samples, config.max_new_tokens, temperature, stop_ids, config.seed, -1,
                         top_p=top_p)
    right = [0] * len(asked)
    for b, ids in enumerate(r.answers()):
        problem, text = asked[b // samples], tokenizer.decode(ids)
        right[b // samples] += int(task.reward(problem, text, bool(r.finished[b])))
    return dict(kind="test", name=name, right="".join(map(str, right)) if samples < 10 else right,
                samples=samples, finished=runs.rounded(r.finished.float().mean().item(), 4),
                length=runs.rounded(r.lengths.float().mean().item(), 4),
                seconds=round(time.perf_counter() - began, 1))


# --- the logs
class Log(NamedTuple):
    starts: list
    step: dict              # step → record
    eval: dict              # the same
    tests: dict             # name → record
    failed: list
    other: dict             # kind → record: temperatures, end

    @property
    def ended(self):
        return "end" in self.other

    @property
    def seconds(self):
        made = [*self.step.values(), *self.eval.values(), *self.tests.values(), *self.other.values(),
                *self.starts]
        return sum(r.get(k, 0) for r in made for k in ("rollout_s", "update_s", "seconds", "load_s"))

    def measure(self, name):
        """A key of MEASURES. pass@k: 1 − C(n − c, k)/C(n, k) of n samples, c right (Chen et al. 2021)."""
        record = self.tests["pass" if "@" in name else name]
        n, k = record["samples"], int(name.partition("@")[2] or 1)
        return np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in map(int, record["right"])])

    def mean(self, key, stages=range(10)):
        """The mean of a step's number, over some of the ten stages of σ."""
        return np.mean([r[key] for s, r in self.step.items()
                        if key in r and s * 10 // self.starts[-1]["steps"] in stages] or math.nan)


def read(folder, job):
    """→ the Log of a Job, or of a log's name; an empty one if there is none."""
    path = Path(folder) / f"{getattr(job, 'name', job)}.jsonl"
    return parsed(path, path.stat().st_size if path.is_file() else 0)


@functools.cache
def parsed(path, size):
    log = Log([], {}, {}, {}, [], {})
    for r in runs.jsonl(path) if size else ():
        kind = r["kind"]
        if kind == "start":
            log.starts.append(r)
            for found in (log.step, log.eval):
                for step in [step for step in found if step >= r["step"]]:
                    del found[step]
            if r["step"] < r["steps"]:
                log.tests.clear()
                log.other.clear()
        elif kind == "failed":
            log.failed.append(r)
        elif kind == "test":
            log.tests[r["name"]] = r
        else:
            getattr(log, kind, log.other)[r.get("step", kind)] = r
    return log


def said(log):
    found = {name: f"{log.measure(name):.3f}" for name in log.tests if name != "pass"}
    return f"{found or [r['eval_greedy'] for r in log.eval.values()]}, {log.seconds:.0f} s"


def temperatures(logs):
    """→ what equal_temperatures found. ValueError: not measured yet."""
    log = read(logs, f"base-0.5b-rtn-{TWO.seeds[0]}")
    if not log.ended:
        raise ValueError(f"arm 7 needs temperatures, which {logs}/base-0.5b-rtn-{TWO.seeds[0]}.jsonl lacks: "
                         "python results/gsm8k.py all --experiment 2")
    return log.other["temperatures"]["stages"]


# --- the plan
def rate_jobs(ours):
    return [Job("rate", arm, lr, seed) for seed in RATE_SEEDS for lr in ours.rates for arm in ours.choosers]


def chosen(logs, ours):
    """→ {rate: held-out accuracies of its runs}, and the rate with the best mean, the lower of equal ones;
    None until every run has ended."""
    found = {lr: [log.eval[max(log.eval)]["eval_greedy"] for job in rate_jobs(ours)
                  if job.lr == lr and (log := read(logs, job)).ended] for lr in ours.rates}
    whole = sum(map(len, found.values())) == len(rate_jobs(ours))
    return found, max(ours.rates, key=lambda lr: (round(sum(found[lr]), 6), -lr)) if whole else None


def whole(logs, ours, seed):
    """→ the Jobs of a seed: all arms, and the bases that they start from."""
    lr, bases = chosen(logs, ours)[1], dict.fromkeys(base for base, *_ in ours.arms.values())
    tempered = read(logs, f"base-0.5b-rtn-{TWO.seeds[0]}").ended
    return ([Job("main", arm, lr if arm != "7" or tempered else None, seed) for arm in ours.arms]
            + [Job("base", f"{ours.size}-{base}", 0.0, seed if base == "gauss" else ours.seeds[0])
               for base in bases])             # a base but gauss is alike for all seeds


def plan(logs, numbers=(1, 2)):
    """Every Job in order: the rates of the experiments, what arm 7 needs, whole seeds, bases: short ones
    that fit where no other does."""
    some = [EXPERIMENTS[number - 1] for number in numbers]
    jobs = [job for ours in some for job in rate_jobs(ours)]
    for ours in some:
        these = dict.fromkeys(job for seed in ours.seeds for job in whole(logs, ours, seed))
        jobs += sorted(these, key=lambda job: job.phase == "base" and 1 - 2 * (job.arm == "0.5b-rtn"))
    return jobs


def left(logs, numbers=(1, 2)):
    return [job for job in plan(logs, numbers) if not read(logs, job).ended]


def expected(job, logs, at_once=1):
    """→ seconds: by the jobs like it that have ended, or an estimate if there is none; less what its
    checkpoint on this machine has made. at_once: runs on a card."""
    def longer(at_once):
        return max(1, 0.6 * at_once)            # a guess: two take 1.2 times as long as one

    ours, _, _ = job.parts()
    like = [log.seconds / longer(log.starts[-1]["at_once"]) for other in plan(logs)
            if other.phase == job.phase and other.parts()[0] is ours and (log := read(logs, other)).ended]
    load_s, step_s, tests_s = SECONDS[ours.size]
    steps = {"rate": RATE_STEPS, "base": 0, "main": COMMON["steps"]}[job.phase]
    alone = load_s + tests_s * (job.phase != "rate") + step_s * steps
    made = len(read(logs, job).step) if folder(logs, job).is_dir() else 0
    took = 1.1 * statistics.median(like) + 15 if like else alone        # 15: imports, a cold cache of kernels
    return took * longer(at_once) * (1 - step_s * made / alone)


def whole_seeds(logs, ours):
    """→ the seeds with which every arm and its base have ended: only these are compared."""
    return [seed for seed in ours.seeds if all(read(logs, job).ended for job in whole(logs, ours, seed))]


# --- commands
def listed(logs):
    """Lines: what is made, what is left, and how long that takes one run after another."""
    for number, ours in enumerate(EXPERIMENTS, 1):
        for phase in ("rate", "base", "main"):
            jobs = [job for job in plan(logs, [number]) if job.phase == phase]
            waiting = [job for job in jobs if not read(logs, job).ended]
            seconds = sum(expected(job, logs) for job in waiting)
            yield (f"experiment {number}, {phase:4}: {len(jobs) - len(waiting):2} of {len(jobs):2} made; "
                   f"left about {seconds:5.0f} s, one after another")
        yield f"experiment {number}, rate {chosen(logs, ours)[1]}, whole seeds {whole_seeds(logs, ours)}"


def main(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("list", "run", "all", "table", "plot"))
    if arguments[:1] == ["run"]:
        parser.add_argument("arm", choices=ARMS)
        parser.add_argument("seed", type=int)
    parser.add_argument("--models", help="folder of the two GGUF files; default: the hub")
    parser.add_argument("--logs", type=Path, default=LOGS)
    parser.add_argument("--problems", type=int, help="at most so many in each test, for a trial")
    parser.add_argument("--experiment", type=int, nargs="+", choices=(1, 2), default=(1, 2))
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, on all GPUs together")
    parser.add_argument("--minutes", type=float, default=24.0, help="pause after so many")
    a, more = parser.parse_known_args(arguments)
    named = {word.partition("=")[0].replace("--no-", "--") for word in more}
    flags = {k: v for k, v in vars(launch.parse(train.Config, more)).items()
             if f"--{k.replace('_', '-')}" in named}
    if a.models:
        use(a.models)
    if a.command == "run":
        lr = flags.pop("lr", None) or chosen(a.logs, ARMS[a.arm])[1] or sorted(ARMS[a.arm].rates)[1]
        job = Job("main", a.arm, lr, a.seed)
        log = read(a.logs, job)
        if log.ended:               # the one setting that depends on the card and on who shares it
            logged = log.starts[-1]["flags"].get("micro_tokens", train.Config.micro_tokens)
            flags = {"micro_tokens": logged} | flags
        print("again", make(job, a.logs, ROOT / "runs" / "gsm8k-again", flags, a.problems, loud=True))
        if log.ended:
            print("log  ", said(log), "on", log.starts[-1]["gpu"])
    elif a.command == "all":
        at_once = math.ceil(a.workers / max(1, torch.cuda.device_count()))
        return bool(experiment.work(
            lambda: left(a.logs, a.experiment),
            partial(make, logs=a.logs, out=a.logs, flags=flags, models=a.models, problems=a.problems,
                    workers=a.workers),
            lambda job, seconds: expected(job, a.logs, at_once) < seconds,
            a.workers, a.minutes, flags.get("device", ""),
            died=lambda job: runs.append(a.logs / f"{job.name}.jsonl",
                                         dict(kind="failed", error="its process died"))))
    elif a.command == "list":
        print(*listed(a.logs), sep="\n")
    else:
        import gsm8k_tables
        gsm8k_tables.main(a.command, a.logs)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:                                   # train() has saved the run and said so
        sys.exit(130)
    except (ValueError, OSError) as problem:
        sys.exit(f"gsm8k.py: {problem}")
