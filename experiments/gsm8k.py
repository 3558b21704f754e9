"""GSM8K on Qwen2.5-Coder-Instruct: does it learn the paper's benchmark, and does noise explore?

The rules, fixed before the first run, are gsm8k_plan.py; gsm8k_tables.py makes tables and figures.

    python -m experiments.gsm8k list              the runs that the log lacks and that can start
    python -m experiments.gsm8k run main-5-2      arm 5, seed 2, again, into runs/gsm8k-again
    python -m experiments.gsm8k append            logs of ended runs go to their experiments' files
    python -m experiments.gsm8k list --logs LOGS |  # three runs at once, at most 24 minutes each
        xargs -n 1 -P 3 --process-slot-var SLOT timeout 24m \\
        python -m experiments.gsm8k run --logs LOGS --out LOGS --share 0.3

Flags of train.py may follow `run`, for instance --model FILE, --data and --test for files; for a
trial --problems 8 --steps 2 --prompts 4. With several GPUs, the slot that xargs gives picks one.

A run that is stopped (Ctrl-C, or SIGTERM as by timeout) saves itself in runs/, and the next call on
the same machine continues it, if its log, NAME.jsonl in the folder of --out, has all its steps. On
another machine it begins again: only the logs, 4 to 94 KB a run, go from machine to machine.

Needs: train.py and what it needs; bench/common.py.
"""

import argparse
import dataclasses
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: a run beside eleven others has one core
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

import nvfp4  # noqa: E402
import train  # noqa: E402
from bench.common import conditions  # noqa: E402
from experiments import gsm8k_plan as rules  # noqa: E402
from model import load  # noqa: E402
from rollout import Rollout, Sampler, SamplingParams  # noqa: E402
from tasks import TASKS  # noqa: E402
from tools import report, weights  # noqa: E402
from tools.environment import Environment  # noqa: E402
from tools.flags import Config, check, parse  # noqa: E402
from tools.run import Run, append, rounded  # noqa: E402

ROOT = Path(__file__).parent.parent
HUB = "Qwen/Qwen2.5-Coder-{}-Instruct-GGUF/qwen2.5-coder-{}-instruct-q4_k_m.gguf"
TEST_SLOTS = 512  # answers sampled at a time in a test, which has thousands: long waves

# --- bases
# bitsandbytes' NF4: quantiles of the normal distribution, and 0, scaled to ±1 (create_normal_map)
# fmt: off
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
       -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
       0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
       0.7229568362236023, 1.0)
# fmt: on


def nf4(w):
    """(N, K) rounded to NF4 and back: blocks of 64 in memory order share their largest magnitude,
    an fp32."""
    blocks = w.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(NF4, device=w.device)
    code = torch.bucketize(blocks / absmax.clamp(min=1e-30), (levels[1:] + levels[:-1]) / 2)
    return (levels[code] * absmax).view(w.shape)


def gaussian(seed):
    """→ a rounding: w plus a Gaussian error with the norm of w's rounding to NVFP4 by rtn."""
    generator = torch.Generator().manual_seed(10**6 + seed)  # other bits than the adapter's

    def add_error(w):
        w = w.float()
        error = nvfp4.dequantize(nvfp4.quantize(w, "rtn"), torch.float32) - w
        noise = torch.randn(w.shape, generator=generator).to(w.device)
        return w + noise * (error.norm() / noise.norm())

    return add_error


# --quant; seed → how the projections are rounded before that
BASES = {
    "bf16": ("bf16", None),
    "rtn": ("rtn", None),
    "sweep": ("nvfp4", None),
    "gptq": ("nvfp4", None),  # of a folder that is in NVFP4 already: see calibrated()
    "nf4": ("bf16", lambda seed: nf4),
    "gauss": ("bf16", gaussian),
}


class Rounded(weights.Source):
    """A checkpoint whose projections pass through `rounding`."""

    def __init__(self, source, rounding):
        self.source, self.rounding = source, rounding

    def __getattr__(self, name):
        return getattr(self.source, name)

    def tensor(self, name, shape, *device):
        w = self.source.tensor(name, shape, *device)
        return self.rounding(w) if name.endswith("_proj.weight") else w


# --- sampling
class TrainingSampler(Sampler):
    """Keeps the last rollout of training. Its temperature is multiplied by that of the step's stage
    (arm 7). An evaluation, step −1, is as ever.
    """

    def __init__(self, model, kv, temperatures, steps):
        super().__init__(model, kv=kv)
        self.temperatures, self.steps = temperatures, steps

    def generate(
        self, prompts: list, group_size: int, params: SamplingParams, step: int, *numbers
    ) -> Rollout:
        if step < 0:
            return super().generate(prompts, group_size, params, step, *numbers)
        factor = self.temperatures[step * len(self.temperatures) // self.steps]
        params = params._replace(temperature=factor * params.temperature)
        self.rollout = super().generate(prompts, group_size, params, step, *numbers)
        return self.rollout


class FollowingSampler(Sampler):
    """Samples at a temperature that gives it the entropy of another run's sampler (arm 12).

    After a rollout, before the update, it searches the temperature at which the policy has, on the
    answers just drawn, the entropy that the other run's sampler had in this step. The next step
    goes a part of the way there. All of the way is too far: a higher temperature also draws other
    beginnings, on which the entropy is higher at any temperature, and the search does not see that.
    The first step of a process draws its answers a second time, at the temperature that the first
    ones gave.
    """

    ROWS = 32  # answers on which a search computes entropies
    LOWEST, HIGHEST, WIDTH = 0.7, 1.6, 2e-3  # of temperatures: where to search, how finely
    PART = 0.25  # of the way; when it was 1, entropy moved 1.65 times as far as searched

    def __init__(self, model, kv, entropies):
        """entropies: {step: nats a token} of the other run."""
        super().__init__(model, kv=kv)
        self.entropies, self.next_temperature = entropies, None

    def generate(
        self, prompts: list, group_size: int, params: SamplingParams, step: int, *numbers
    ) -> Rollout:
        if step < 0:
            return super().generate(prompts, group_size, params, step, *numbers)
        if self.next_temperature is None:
            first = super().generate(prompts, group_size, params, step, *numbers)
            self.next_temperature = self.follow(first, params.temperature, self.entropies[step])
        self.temperature = self.next_temperature
        params = params._replace(temperature=self.temperature)
        self.rollout = super().generate(prompts, group_size, params, step, *numbers)
        self.next_temperature = self.follow(self.rollout, self.temperature, self.entropies[step])
        return self.rollout

    def follow(self, rollout, temperature, entropy):
        """→ the temperature to sample with next, after a Rollout at `temperature`."""
        return temperature + self.PART * (self.search(rollout, entropy) - temperature)

    @torch.no_grad()
    def search(self, rollout, entropy):
        """→ the temperature at which the policy's mean entropy on the tokens of a Rollout is
        `entropy`, by bisection."""
        rows = len(rollout.lengths)
        part = rollout.rows(range(0, rows, max(1, rows // self.ROWS)))
        low, high = self.LOWEST, self.HIGHEST
        while high - low > self.WIDTH:
            middle = (low + high) / 2
            _, found = part.scored_by(self.model, middle)
            if found.sum() < entropy * part.lengths.sum():
                low = middle
            else:
                high = middle
        return (low + high) / 2


# --- one run
class Logged(Run):
    """A run whose records go into the experiment's log. Its folder holds checkpoints and
    samples."""

    def __init__(self, config, write, start, logged, sampler):
        """write(record) appends to the log; start: its record of this start; logged: the steps it
        has; sampler: keeps the last rollout.
        """
        self.write, self.start, self.logged, self.sampler = write, start, logged, sampler
        super().__init__(config)

    def load(self):
        super().load()
        first = self.state.step
        if first > self.logged:
            raise ValueError(
                f"{self.folder} continues at step {first}, but its log ends at step {self.logged}: "
                "bring the newest log back, or delete that folder"
            )
        self.write(self.start | dict(step=first))

    def finish_step(self, step: int, stats: dict) -> None:
        """Five skipped steps in a row do not stop the run: they are a result. mismatch compares
        equal temperatures, which the arms AT_A_TEMPERATURE do not have."""
        if self.start["arm"] in rules.AT_A_TEMPERATURE:
            stats["mismatch"] = None
        if self.start["arm"] == "12":
            stats["temperature"] = self.sampler.temperature
        sampled = self.sampler.rollout
        stats["sampler_entropy"] = -(sampled.logprobs.sum() / sampled.lengths.sum()).item()
        try:
            super().finish_step(step, stats)
        except ValueError as skipped:
            self.say(skipped)

    def log(self, kind, step, record):
        record = dict(kind=kind, step=step) | record
        self.say(report.line(record))
        short = {k: rounded(v, 4) for k, v in record.items()}
        self.write({k: v for k, v in short.items() if v is not None})

    def finish(self):
        pass


def calibrated(config):
    """→ the folder that tools/calibrate.py made of a config's model, on this machine.

    ValueError: it is missing. The sentence has the command that makes it.
    """
    folder = ROOT / "runs" / f"{Path(config.model).name.removesuffix('.gguf')}-gptq"
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is missing: make it by python -m tools.calibrate {config.model} {folder} "
            f"--task gsm8k --data {config.data} --max-new-tokens {config.max_new_tokens}"
        )
    return folder


def configured(job, flags):
    """→ the checked Config of a job. flags: the command line's, which win. Their --model is the
    one that a base is made from."""
    size = job.experiment.size
    own = dict(
        model=HUB.format(size.upper(), size),
        quant=BASES[job.base][0],
        lr=job.lr or 1.0,  # a base is not trained
        seed=job.seed,
    )
    if job.phase == "rate":
        own |= dict(steps=rules.RATE_STEPS, eval_every=rules.RATE_STEPS)
    config = Config(**rules.COMMON | own | job.flags | flags)
    if job.base == "gptq":
        config.model = str(calibrated(config))
    return check(config)


def folder_of(out, job):
    """Where a run keeps its checkpoints, on this machine."""
    return ROOT / "runs" / out.name / job.name


def make(job, out, flags, problems=None, at_once=1):
    """Make a job, or what is left of it, and log it in out/NAME.jsonl.

    problems: at most so many in each test. at_once: how many runs share the GPU, for the log.
    """
    write = partial(append, out / f"{job.name}.jsonl")
    out.mkdir(parents=True, exist_ok=True)
    try:
        _make(job, out, flags, problems, at_once, write)
        write(dict(kind="end"))
    except Exception as error:
        write(dict(kind="failed", **job._asdict(), error=f"{type(error).__name__}: {error}"))
        raise
    shutil.rmtree(folder_of(out, job), ignore_errors=True)


def _make(job, out, flags, problems, at_once, write):
    began = time.perf_counter()
    config = configured(job, flags)
    folder = folder_of(out, job)
    config.out = str(folder)
    config.resume = config.out if any(folder.glob("checkpoint*.safetensors")) else ""
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = weights.open(config.model)
    params = SamplingParams(
        max_new_tokens=config.max_new_tokens,
        stop_ids=source.stop_ids(),
        temperature=config.temperature,
        seed=config.seed,
    )
    environment = Environment(None, source.tokenizer(), params, source.config)
    quant, rounding = BASES[job.base]
    if rounding:
        source = Rounded(source, rounding(job.seed))
    model = load(source, quant, config.rank, config.alpha, device, job.seed)
    task = TASKS["gsm8k"](config.data)
    unseen = job.phase == "main" and config.eval_every >= config.steps
    task = task._replace(held_out=[] if unseen else task.held_out[:problems])
    environment = environment._replace(task=task)
    start = start_record(job, config, at_once, time.perf_counter() - began)
    if job.phase == "base":
        write(start)
    else:
        sampler = sampler_of(job, model, config, out)
        run = Logged(config, write, start, len(rules.read(out, job).step), sampler)
        train.train(config, environment, sampler, train.Trainer(config, model), run)
    sampler = Sampler(model, slots=TEST_SLOTS, kv=config.kv)
    for name in () if job.phase == "rate" else job.experiment.tests:
        if name not in rules.read(out, job).tests:
            write(test(name, config, sampler, environment, problems))


def sampler_of(job, model, config, out):
    """→ the Sampler that a job trains with. out: where arm 12 looks for the log of arm 11 first."""
    if job.arm == "12":
        name = f"main-11-{job.seed}"
        noisy = rules.read(out, name).step or rules.read(rules.LOGS, name).step
        entropies = {step: r["sampler_entropy"] for step, r in noisy.items()}
        return FollowingSampler(model, config.kv, entropies)
    temperatures = [1.0]
    if job.arm == "7":
        temperatures = [temperature for *_, temperature, _ in rules.temperatures()]
    return TrainingSampler(model, config.kv, temperatures, config.steps)


def start_record(job, config, at_once, load_s):
    unlogged = "model", "data", "test", "out", "resume", "device", "lr", "seed", "steps"
    flags = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in unlogged and value != field.default:
            flags[field.name] = value
    return dict(
        kind="start",
        **job._asdict(),
        step=0,
        steps=0 if job.phase == "base" else config.steps,
        time=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        **conditions(),
        at_once=at_once,
        load_s=round(load_s, 1),
        model=Path(config.model).name,
        flags=flags,
    )


def test(name, config, sampler, environment, problems):
    """→ the record of a test: to each problem, the number of right answers."""
    began, how = time.perf_counter(), rules.TESTS[name]
    task = TASKS["gsm8k"](config.test, held_out=how.problems)
    asked = (task.held_out if how.problems else task.train)[:problems]  # held_out: always the same
    environment = environment._replace(task=task)
    prompts = environment.encode_prompts(asked)
    params = environment.params._replace(temperature=how.temperature, top_p=how.top_p)
    rollout = sampler.generate(prompts, how.samples, params, -1, progress="eval")
    right = [0] * len(asked)
    for row, answer in enumerate(environment.judge(asked, rollout)):
        right[row // how.samples] += int(answer.reward)
    return dict(
        kind="test",
        name=name,
        right="".join(map(str, right)) if how.samples < 10 else right,
        samples=how.samples,
        seconds=round(time.perf_counter() - began, 1),
    )


# --- commands
def said(log):
    found = {name: f"{log.measure(name):.3f}" for name in log.tests if name != "pass"}
    return f"{found or [r['eval_greedy'] for r in log.eval.values()]}, {log.seconds:.0f} s"


def show_list(logs):
    """Print the names of the runs that can start, and to stderr how many are made."""
    jobs = rules.plan(logs)
    left = [job for job in jobs if not rules.read(logs, job).ended]
    for job in left:
        if job.lr is not None:
            print(job.name)
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs are made", file=sys.stderr)


def run(name, logs, out, flags, problems, at_once):
    """Make the run in out/NAME.jsonl, and compare it with its log."""
    job = next((job for job in rules.plan(logs) if job.name == name), None)
    if job is None or job.lr is None:
        raise ValueError(
            f"{name}: no such run can start; `python -m experiments.gsm8k list` names those"
        )
    log = rules.read(logs, job)
    if log.ended and out != logs:  # the one setting that depends on the card and on who shares it
        logged = log.starts[-1]["flags"].get("micro_tokens", 1024)  # the default then
        flags = {"micro_tokens": logged} | flags
    configured(job, flags)  # a refusal here leaves no record in the log
    make(job, out, flags, problems, at_once)
    print(name, said(rules.read(out, job)))
    if log.ended and out != logs:
        print("its log", said(log), "on", log.starts[-1]["gpu"])


def main(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    for command in (one, commands.add_parser("list"), commands.add_parser("append")):
        command.add_argument("--logs", type=Path, default=rules.LOGS)
    one.add_argument(
        "name", help="as in the log: main-ARM-SEED, base-SIZE-BASE-SEED, rate-ARM-RATE-SEED"
    )
    one.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gsm8k-again", help="folder of the new log"
    )
    one.add_argument("--problems", type=int, help="at most so many in each test, for a trial")
    one.add_argument("--share", type=float, default=1.0, help="of the GPU's memory")
    a, more = parser.parse_known_args(arguments)
    if a.command == "list":
        show_list(a.logs)
        return
    if a.command == "append":
        print(*rules.append(a.logs))
        return
    named = {word.partition("=")[0].replace("--no-", "--") for word in more}
    parsed = vars(parse(more))
    flags = {k: v for k, v in parsed.items() if f"--{k.replace('_', '-')}" in named}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # on SystemExit a run saves itself
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("SLOT", 0)) % torch.cuda.device_count())
        torch.cuda.set_per_process_memory_fraction(a.share)
    run(a.name, a.logs.resolve(), a.out.resolve(), flags, a.problems, round(1 / a.share))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:  # train() has saved the run and said so
        sys.exit(130)
    except (ValueError, OSError) as problem:
        sys.exit(f"gsm8k.py: {problem}")
