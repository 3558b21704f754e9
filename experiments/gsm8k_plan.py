"""The rules of the five experiments on GSM8K, each fixed before its first run, and their logs.

results/LOG.md says them in words ("GSM8K: the rules"). gsm8k.py makes the runs that plan() lists,
and gsm8k_tables.py reads their logs. results/gsm8k/ has a file for each experiment, 2.jsonl for the
second, and a run that is being made has a file of its own, NAME.jsonl. One record a line:

    start    the job, conditions and flags. The records up to the next start are this job's; they
             replace what it had logged from this step on
    step     reward, entropy, … ; sampler_entropy: mean −ln p of the tokens as they were drawn;
             temperature: of the sampler, where it is searched (arm 12)
    eval     only where a learning rate is chosen: train.py's, on 256 held-out training problems
    test     of each test problem, how many answers were right: "0110…", or [3, 64, …] of many
    temperatures, failed, end

Needs: numpy; tools/report.py.
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.paired import LEVEL, MARGIN, verdict
from tools import report

LOGS = Path(__file__).parent.parent / "results" / "gsm8k"


class Arm(NamedTuple):
    base: str  # how the base is rounded: a key of gsm8k.BASES
    flags: dict  # of train.py, beside COMMON
    what: str  # in the tables
    part: float = 1.0  # its learning rate, in parts of the experiment's
    twin: str = ""  # of experiment 2: at that experiment's seeds this arm's runs are the twin's


class Claim(NamedTuple):
    text: str
    measure: str  # a key of MEASURES
    a: str  # the claim says that this arm ends above …
    b: str  # … that one
    above: bool = True  # False: that it does not


class Experiment(NamedTuple):
    name: str  # of its file of logs, too
    size: str  # of the model
    seeds: tuple  # those reported
    rates: tuple  # learning rates to choose from; none: that of experiment 1 or 2, by the model
    choosers: tuple  # the arms of bf16 and NVFP4; if there are rates, these arms choose one
    tests: tuple  # keys of TESTS
    figure: str  # its file in results/
    shown: tuple  # keys of MEASURES that the figure shows
    arms: dict  # name → Arm
    claims: tuple = ()  # Claims; their p are Holm-adjusted together
    compared: tuple = ()  # pairs of arms whose differences are shown, without a claim
    tests_bases: bool = True  # whether each base is tested before training


AT_A_TEMPERATURE = "7", "12"  # the arms that sample at another temperature than 1
COMMON = dict(
    task="gsm8k",
    data="openai/gsm8k/main",
    test="openai/gsm8k/main:test",
    prompts=32,
    group_size=8,
    max_new_tokens=400,
    steps=100,
    eval_every=100,
    save_every=25,
    micro_tokens=4096,
    aqn=False,
)
PAPER = dict(aqn=True, sigma_start=1e-2, sigma_end=5e-4)
STRONG = dict(aqn=True, sigma_start=1e-1, sigma_end=5e-3, correction="tis")
TIS = dict(correction="tis")
ADAPTIVE = TIS | dict(aqn=True, sigma_schedule="adaptive", sigma_start=5e-2, sigma_target=0.02)
RATE_SEEDS, RATE_STEPS = (0, 1), 50

ONE = Experiment(
    name="1",
    size="1.5b",
    seeds=(2, 3, 4),
    rates=(2.5e-5, 5e-5, 1e-4),
    choosers=("bf16", "nvfp4"),
    tests=("greedy", "paper"),
    figure="gsm8k-1.5b.png",
    shown=("greedy", "paper"),
    arms={
        "nvfp4": Arm(
            "sweep", dict(aqn=True), "NVFP4 (sweep) with AQN as train.py's defaults have it"
        ),
        "bf16": Arm("bf16", {}, "bf16"),
        "nf4": Arm("nf4", {}, "NF4 rounded into bf16: QLoRA's accuracy, not its seconds or GB"),
    },
)
TWO = Experiment(
    name="2",
    size="0.5b",
    seeds=(2, 3, 4, 5, 6),
    rates=(5e-5, 1e-4, 2e-4),
    choosers=("1", "2"),
    tests=("greedy", "pass", "paper"),
    figure="gsm8k-0.5b.png",
    shown=("greedy", "pass@32"),
    arms={
        "1": Arm("bf16", {}, "bf16"),
        "2": Arm("rtn", {}, "NVFP4 (rtn), not calibrated"),
        "3": Arm("sweep", {}, "NVFP4 (sweep), the default"),
        "4": Arm("nf4", {}, "NF4, QLoRA's base"),
        "5": Arm("rtn", PAPER, "rtn, AQN at the paper's σ"),
        "6": Arm("rtn", STRONG, "rtn, AQN at ten times that σ, tis"),
        "7": Arm("rtn", dict(correction="tis"), "rtn, a temperature of equal entropy, tis"),
        "8": Arm("bf16", STRONG, "bf16, AQN at ten times the paper's σ, tis"),
        "9": Arm("gauss", {}, "bf16 + a frozen Gaussian error of rtn's size"),
    },
    claims=(
        Claim("NVFP4 ends above bf16", "greedy", "2", "1"),
        Claim("AQN lifts NVFP4", "greedy", "5", "2"),
        Claim("noise explores more than temperature", "pass@32", "6", "7"),
        Claim("NVFP4's error is better than a Gaussian one", "greedy", "2", "9"),
    ),
)
THREE = Experiment(
    name="3",
    size="0.5b",
    seeds=(7, 8, 9, 10, 11),
    rates=(),
    choosers=("13", "10"),
    tests=("greedy", "wide"),
    figure="gsm8k-0.5b-adaptive.png",
    shown=("wide@1", "wide@256"),
    arms={
        "10": Arm("rtn", TIS, "NVFP4 (rtn), tis"),
        "11": Arm("rtn", ADAPTIVE, "rtn, adaptive noise, tis"),
        "12": Arm("rtn", TIS, "rtn, the temperature at which its sampler has 11's entropy, tis"),
        "13": Arm("bf16", TIS, "bf16, tis"),
    },
    claims=(
        Claim("adaptive noise finds more than none", "wide@256", "11", "10"),
        Claim("adaptive noise finds more than temperature", "wide@256", "11", "12"),
    ),
)
# the paper's loop: four updates on each rollout, whose ratio is to the policy that sampled
LOOP = dict(updates_per_step=4, correction="bypass")
CURVE = dict(eval_every=20)  # 256 held-out problems, for the figure
NEW_SEEDS = (12, 13, 14, 15, 16)
FOUR = Experiment(
    name="4",
    size="0.5b",
    seeds=(*NEW_SEEDS, *TWO.seeds),
    rates=(),
    choosers=("15", "17"),
    tests=("greedy",),
    figure="gsm8k-0.5b-rate.png",
    shown=(),
    arms={
        "14": Arm("bf16", CURVE, "bf16 at x", twin="1"),
        "15": Arm("bf16", CURVE, "bf16 at x/2", part=0.5),
        "16": Arm("rtn", CURVE, "NVFP4 (rtn) at x", twin="2"),
        "17": Arm("gptq", CURVE, "NVFP4 (gptq) at x"),
        "18": Arm("rtn", LOOP | PAPER, "rtn at x, AQN at the paper's σ, 4 updates, bypass"),
        "19": Arm("rtn", LOOP, "rtn at x, 4 updates, bypass"),
    },
    claims=(
        Claim("calibrated 4 bits at twice the rate grow more than bf16", "growth", "17", "15"),
        Claim("at one rate they do not", "growth", "17", "14", above=False),
        Claim("calibration lifts NVFP4", "greedy", "17", "16"),
        Claim("AQN lifts NVFP4 in the paper's loop", "greedy", "18", "19"),
    ),
    compared=(
        ("17", "15"),
        ("17", "14"),
        ("17", "16"),
        ("18", "19"),
        ("16", "15"),
        ("16", "14"),
    ),
    tests_bases=False,
)
# of experiments whose rate is another's, which test what they trained and draw nothing
ONE_TEST = dict(rates=(), tests=("greedy",), figure="", shown=(), tests_bases=False)
LARGE = Experiment(
    name="4-1.5b",
    size="1.5b",
    seeds=ONE.seeds,
    choosers=("20", "21"),
    arms={
        "20": Arm("bf16", {}, "bf16 at x/2", part=0.5),
        "21": Arm("gptq", {}, "NVFP4 (gptq) at x"),
    },
    compared=(("21", "20"), ("21", "bf16"), ("21", "nvfp4")),
    **ONE_TEST,
)
FIVE = Experiment(
    name="5",
    size="0.5b",
    seeds=NEW_SEEDS,
    choosers=("16", "22"),
    arms={"22": Arm("rtn", CURVE | dict(kv="int8"), "NVFP4 (rtn) at x, int8 pages")},
    compared=(("22", "16"),),
    **ONE_TEST,
)
EXPERIMENTS = (ONE, TWO, THREE, FOUR, LARGE, FIVE)
ARMS = {arm: experiment for experiment in EXPERIMENTS for arm in experiment.arms}


class Test(NamedTuple):
    problems: int  # of the test file; 0: all
    samples: int  # answers to each
    temperature: float
    top_p: float


TESTS = {
    "greedy": Test(0, 1, 0.0, 1.0),
    "pass": Test(200, 64, 1.0, 1.0),
    "paper": Test(0, 8, 0.6, 0.95),
    "wide": Test(100, 512, 1.0, 1.0),
}
FIRST, LAST = 5, 10  # steps whose rewards are compared to tell how far a run has come
MEASURES = {
    "reward": f"training reward, mean of the last {LAST} steps",
    "growth": f"that less the mean of the first {FIRST} steps",
    "entropy": "entropy of the next-token distribution, mean over the steps, noise off",
    "held-out": "accuracy on 256 held-out training problems, greedy, at the end",
    "greedy": "test accuracy, greedy",
    "paper": "test accuracy, mean of 8 (T 0.6, top-p .95)",
    "pass@1": "pass@1 (64 samples, T 1, 200 test problems)",
    "pass@32": "pass@32 (64 samples, T 1, 200 test problems)",
    "wide@1": "pass@1 (512 samples, T 1, 100 test problems)",
    "wide@256": "pass@256 (512 samples, T 1, 100 test problems)",
}


def test_of(measure):
    """→ the key of TESTS that a key of MEASURES is computed from."""
    test, at, _ = measure.partition("@")
    return test if at else measure


class Job(NamedTuple):
    phase: str  # rate, base (tests before training), main
    arm: str  # of a base: SIZE-BASE
    lr: float  # None: the job cannot start yet
    seed: int

    @property
    def name(self):
        rate = f"-{self.lr:g}" if self.phase == "rate" else ""
        return f"{self.phase}-{self.arm}{rate}-{self.seed}"

    @property
    def experiment(self):
        if self.arm in ARMS:
            return ARMS[self.arm]
        size, _ = self.arm.split("-")
        return next(e for e in EXPERIMENTS if e.size == size and self.seed in e.seeds)

    @property
    def base(self):
        return ARMS[self.arm].arms[self.arm].base if self.arm in ARMS else self.arm.split("-")[1]

    @property
    def flags(self):
        return ARMS[self.arm].arms[self.arm].flags if self.arm in ARMS else {}


# --- the logs
class Log:
    """What a log says. A later start replaces the records from its step on."""

    def __init__(self, records):
        self.starts, self.failed = [], []
        self.step, self.eval = {}, {}  # step → record
        self.tests, self.other = {}, {}  # name → record; kind → record: temperatures, end
        for r in records:
            if r["kind"] == "start":
                self._start(r)
            elif r["kind"] == "failed":
                self.failed.append(r)
            elif r["kind"] == "test":
                self.tests[r["name"]] = r
            elif r["kind"] == "step":
                self.step[r["step"]] = r
            elif r["kind"] == "eval":
                self.eval[r["step"]] = r
            else:
                self.other[r["kind"]] = r

    def _start(self, r):
        self.starts.append(r)
        self.step = {step: old for step, old in self.step.items() if step < r["step"]}
        self.eval = {step: old for step, old in self.eval.items() if step < r["step"]}
        if r["step"] < r["steps"]:
            self.tests, self.other = {}, {}

    @property
    def ended(self):
        return "end" in self.other

    @property
    def seconds(self):
        made = [
            *self.step.values(),
            *self.eval.values(),
            *self.tests.values(),
            *self.other.values(),
        ]
        keys = ("rollout_s", "update_s", "seconds", "load_s")
        return sum(r.get(key, 0) for r in [*made, *self.starts] for key in keys)

    def measure(self, name):
        """A key of MEASURES. pass@k: 1 − C(n − c, k)/C(n, k) of n samples, c right (Chen et al.
        2021)."""
        rewards = [r["reward"] for _, r in sorted(self.step.items())]
        if name == "reward":
            return np.mean(rewards[-LAST:])
        if name == "growth":
            return np.mean(rewards[-LAST:]) - np.mean(rewards[:FIRST])
        if name == "entropy":
            return self.mean("entropy")
        if name == "held-out":
            return self.eval[max(self.eval)]["eval_greedy"]
        record = self.tests[test_of(name)]
        n, k = record["samples"], int(name.partition("@")[2] or 1)
        return np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in record["right"]])

    def mean(self, key, stages=range(10)):
        """The mean of a step's number, over some tenths of the steps."""
        steps = self.starts[-1]["steps"]
        values = [r[key] for s, r in self.step.items() if key in r and s * 10 // steps in stages]
        return np.mean(values or math.nan)


def read(folder, job):
    """→ the Log of a Job, or of a job's name; an empty one if there is none."""
    # sorted: the file of an experiment, whose name is a digit, before those of single runs
    logs = logs_of(sorted(Path(folder).glob("*.jsonl")))
    return logs.get(getattr(job, "name", job)) or Log([])


def logs_of(files):
    """→ {name of a job: Log} of some files."""
    return _parsed(tuple((path, path.stat().st_size) for path in files))


@functools.lru_cache(maxsize=4)
def _parsed(sized):
    records = {}
    for path, _ in sized:
        name = path.stem  # of the job, until a record names it
        for record in report.jsonl(path):
            if "phase" in record:
                name = Job(*(record[field] for field in Job._fields)).name
            records.setdefault(name, []).append(record)
    return {name: Log(of_job) for name, of_job in records.items()}


def append(logs):
    """Move the runs of a folder that have ended from their own files into those of their
    experiments, in the plan's order → their names. ValueError: a run is in both."""
    moved = []
    for job in plan(logs):
        own, whole = logs / f"{job.name}.jsonl", logs / f"{job.experiment.name}.jsonl"
        if not (own.is_file() and read(logs, job).ended):
            continue
        if whole.is_file() and job.name in logs_of([whole]):
            raise ValueError(f"{whole} has {job.name} already: delete {own}, or the run there")
        with open(whole, "ab") as file:
            file.write(own.read_bytes())
        own.unlink()
        moved.append(job.name)
    return moved


def temperatures():
    """→ [σ, entropy, temperature, entropy] of each stage, for arm 7: searched once, before the
    first run, by the code of commit f76e9f8 (results/gsm8k.py, equal_temperatures)."""
    return read(LOGS, f"base-0.5b-rtn-{TWO.seeds[0]}").other["temperatures"]["stages"]


# --- the plan
def rate_jobs(experiment):
    found = []
    for seed in RATE_SEEDS:
        for lr in experiment.rates:
            found += [Job("rate", arm, lr, seed) for arm in experiment.choosers]
    return found


def chosen(logs, experiment):
    """→ {rate: held-out accuracies of its runs}, and the rate with the best mean, the lower of
    equal ones; None until every run has ended."""
    if not experiment.rates:
        return chosen(logs, ONE if experiment.size == ONE.size else TWO)
    found = {lr: [] for lr in experiment.rates}
    jobs = rate_jobs(experiment)
    for job in jobs:
        log = read(logs, job)
        if log.ended:
            found[job.lr].append(log.eval[max(log.eval)]["eval_greedy"])
    if sum(map(len, found.values())) < len(jobs):
        return found, None
    return found, max(experiment.rates, key=lambda lr: (round(sum(found[lr]), 6), -lr))


def main_job(arm, seed, lr=None):
    """→ the Job that trains an arm. lr: of its experiment."""
    made = ARMS[arm].arms[arm]
    if made.twin and seed in TWO.seeds:
        arm = made.twin
    return Job("main", arm, lr and lr * made.part, seed)


def jobs_of_seed(logs, experiment, seed):
    """→ the Jobs of a seed: all arms, and the bases that they start from."""
    lr = chosen(logs, experiment)[1]
    waits_for = {"7": f"base-0.5b-rtn-{TWO.seeds[0]}", "12": f"main-11-{seed}"}
    jobs = []
    for arm in experiment.arms:
        ready = arm not in waits_for or read(logs, waits_for[arm]).ended
        jobs.append(main_job(arm, seed, lr if ready else None))
    if not experiment.tests_bases:
        return jobs
    for base in dict.fromkeys(arm.base for arm in experiment.arms.values()):
        # but for gauss, which draws another error for each seed, a base is the same for all seeds
        at = seed if base == "gauss" else experiment.seeds[0]
        jobs.append(Job("base", f"{experiment.size}-{base}", 0.0, at))
    return jobs


def plan(logs):
    """Every Job in order: the rates, whole seeds of all arms, the tests before training."""
    rates, main, bases = [], [], []
    for experiment in EXPERIMENTS:
        rates += rate_jobs(experiment)
        for seed in experiment.seeds:
            for job in jobs_of_seed(logs, experiment, seed):
                (main if job.phase == "main" else bases).append(job)
    return list(dict.fromkeys([*rates, *main, *bases]))


def judged(claim, difference):
    """→ holds, does not or cannot tell. difference: paired.py's, with its p Holm-adjusted.

    That an arm does not end above another holds if the 95 % interval ends below MARGIN.
    """
    if claim.above:
        return verdict(difference)
    if difference.mean + difference.half < MARGIN:
        return "holds"
    return "does not" if difference.p < LEVEL and difference.mean > 0 else "cannot tell"


def whole_pairs(logs, a, b, seeds):
    """→ the Logs of two arms: a pair for each seed with which both have ended."""
    pairs = [[read(logs, main_job(arm, seed)) for arm in (a, b)] for seed in seeds]
    return [(one, other) for one, other in pairs if one.ended and other.ended]


def whole_seeds(logs, experiment):
    """→ the seeds with which every arm and its base have ended: only these are compared."""
    found = []
    for seed in experiment.seeds:
        if all(read(logs, job).ended for job in jobs_of_seed(logs, experiment, seed)):
            found.append(seed)
    return found
