"""Does quantisation noise help? The runs behind "What we found" in README.md here, and what runs them.

    phase     arms × learning rates × seeds
    entropy   5 formats, before training: 256 prompts × 4 answers                                          5
    grid      11 × 3 × 2   seeds 0, 1: the rate with the best final accuracy, arm by arm                  66
    main      11 × 1 × 5   seeds 2 … 6, which did not choose the rate: these are reported                 55
    extras    noise schedules 3 × 2, sigma ranges 2 × 2, LoRA ranks 3 × 1, losses 2 × 3, all beside main's
              sweep+aqn (exponential, 1e-2 to 1e-4, rank 32, dapo), which is not run again                19
    more      correction none only, planned: seeds 7 … 12 of bf16, rtn, sweep, with noise and without       36
    follow-up correction bypass only: a ratio of 1 on two more bases, six more seeds of sweep, noise or not:
              questions that main's results raised, so decided after they were seen                       22

All phases run with one --correction, the policy in the ratio's denominator: "none", the trainer's own, as in
the release; "bypass", the sampler's, as in the paper. An arm named after a correction uses that one.

An arm is a base {bf16, rtn, sweep, nf4, full} and flags of train.py. rtn and sweep are NVFP4; nf4 and mxfp4
are rounded and dequantised as the checkpoint loads, equal to what QLoRA computes; full trains all
projections, without LoRA, at rates ten times lower than LoRA's, by the usual rule. At one seed all arms
see the same prompts in the same order, random bits and noise, and all LoRA arms of a rank start alike.

Sums of 0-99, 100 steps of 16 prompts × 16 answers. Every 10 steps 64 held-out problems, greedy and 4 samples
each; after the last step 256 problems: a standard error of at most .063 and .032, on the same problems in
every run, so that it mostly cancels between arms. One line a run in results/ablation/CORRECTION/runs.jsonl.

    python results/ablation.py run sweep+aqn 2                  one run again, on a CPU or a GPU
    python results/ablation.py all --workers 12 --minutes 25    run what the log lacks, in that order
    python results/ablation.py list                             what is left

Needs: train.py and what it needs; experiment.py.
"""

import argparse
import fcntl
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import experiment  # first: it names the folder of the modules below
import torch
import torch.nn.functional as F
from experiment import ROOT, Rounded, nf4, opened

import checkpoint
import launch
import lora
import nvfp4
import runs
import train
from model import load
from rollout import Sampler
from tasks import TASKS

COMMON = dict(task="addition", operands="0-99", prompts=16, group_size=16, max_new_tokens=16, steps=100,
              eval_every=10, eval_samples=4, micro_tokens=8192)
CURVE, FINAL = 64, 256                              # held-out problems during a run and after it

# --- the runs
ARMS = {f"{base}{'+aqn' * aqn}": dict(base=base, aqn=aqn)
        for base in ("bf16", "rtn", "sweep", "nf4") for aqn in (False, True)}
PAIRS, CORRECTIONS = tuple(ARMS), ("none", "bypass", "tis")
MORE = tuple(arm for arm in PAIRS if "nf4" not in arm)                     # bf16 and NVFP4, noise or not
ARMS |= {f"sweep+aqn+{c}": dict(base="sweep", aqn=True, correction=c) for c in CORRECTIONS}
ARMS["full"] = dict(base="full", aqn=False)
VARIANTS = {  # name: flags beside those of sweep+aqn, seeds
    **{name: (dict(sigma_schedule=name), (2, 3)) for name in ("linear", "cosine", "logarithmic")},
    # σ ranges of the paper's Table 4 and of its §4.1; main uses that of its scripts, 1e-2 to 1e-4
    "sigma-table4": (dict(sigma_end=5e-4), (2, 3)),
    "sigma-text": (dict(sigma_start=5e-2, sigma_end=5e-4), (2, 3)),
    **{f"rank{r}": (dict(rank=r, alpha=r), (2,)) for r in (16, 64, 128)},
    "grpo": (dict(loss="grpo"), (2, 3, 4)),
    "dr_grpo": (dict(loss="dr_grpo"), (2, 3, 4))}
ARMS |= {name: ARMS["sweep+aqn"] | flags for name, (flags, _) in VARIANTS.items()}
RATES, FULL_RATES = (5e-4, 2.5e-4, 1e-3), (5e-5, 2.5e-5, 1e-4)         # the middle first
GRID_SEEDS, MAIN_SEEDS, MORE_SEEDS = (0, 1), (2, 3, 4, 5, 6), (7, 8, 9, 10, 11, 12)
# arm: (the arm whose learning rate it uses, its seeds)
FOLLOW_UP = {"sweep": ("sweep", MORE_SEEDS), "sweep+aqn+none": ("sweep+aqn+none", MORE_SEEDS),
             "rtn+aqn+none": ("rtn", (2, 3, 4, 5, 6)), "bf16+aqn+none": ("bf16", (2, 3, 4, 5, 6))}
ARMS |= {f"{base}+aqn+none": dict(base=base, aqn=True, correction="none") for base in ("rtn", "bf16")}
FORMATS = ("bf16", "rtn", "sweep", "nf4", "mxfp4")
PHASES = ("entropy", "grid", "main", "extras", "more", "follow-up", "smoke")


def rates(arm):
    return FULL_RATES if arm == "full" else RATES


def main_arms(correction):
    return *PAIRS, *(f"sweep+aqn+{c}" for c in CORRECTIONS if c != correction), "full"


def plan(records, given_up=(), correction="none"):
    """Every run as (phase, arm, learning rate, seed), the most valuable first. The rate is None until the
    grid has chosen it; given_up: failed grid jobs, for which the choice does not wait."""
    arms = main_arms(correction)
    best = {arm: best_rate(records, arm, given_up) for arm in arms}
    return ([("entropy", name, 0.0, 0) for name in FORMATS]
            + [("grid", arm, rates(arm)[i], seed) for seed in GRID_SEEDS for i in range(3) for arm in arms]
            + [("main", arm, best[arm], seed) for seed in MAIN_SEEDS for arm in arms]
            + [("extras", arm, best["sweep+aqn"], seed) for arm, (_, seeds) in VARIANTS.items()
               for seed in seeds]
            + [("more", arm, best[arm], seed) for seed in MORE_SEEDS for arm in MORE
               if correction == "none"]
            + [("follow-up", arm, best[twin], seed) for arm, (twin, seeds) in FOLLOW_UP.items()
               for seed in seeds if correction == "bypass"]
            + [("smoke", arm, rates(arm)[0], 0) for arm in arms])       # only when asked for: it is no result


def best_rate(records, arm, given_up=()):
    """The rate whose grid runs ended with the best mean sampled accuracy; None before all of them ended."""
    found = {key(r): r["final"]["sampled"] for r in records if r["phase"] == "grid" and r["arm"] == arm}
    jobs = [("grid", arm, rate, seed) for rate in rates(arm) for seed in GRID_SEEDS]
    if not found or any(job not in found and job not in given_up for job in jobs):
        return None
    return max(rates(arm), key=lambda rate: statistics.mean(
        [found[job] for job in jobs if job in found and job[2] == rate] or [-1]))


def key(record):
    return record["phase"], record["arm"], record["lr"], record["seed"]


def read(folder):
    """The records of FOLDER/runs.jsonl; a line that a crash cut off is passed over."""
    path = Path(folder) / "runs.jsonl"
    return list(runs.jsonl(path)) if path.is_file() else []


def append(folder, record):
    """Append one line under a lock, because other workers write too; the line is on the disk on return."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder) / "runs.jsonl", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        runs.append(Path(folder) / "runs.jsonl", record)


# --- bases
def mxfp4(w):
    """(N, K) rounded to MXFP4 and back: E2M1, and for 32 neighbours along K a power of two (OCP MX §6.3)."""
    blocks = w.float().reshape(len(w), -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(amax)[1] - 1 - 2                             # ⌊log2 amax⌋ less that of E2M1's 6
    scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-126, 127))
    return (nvfp4._nearest_e2m1(blocks.abs() / scale) * blocks.sign() * scale).view(w.shape)


BASES = {"bf16": ("bf16", None), "full": ("bf16", None), "rtn": ("rtn", None), "sweep": ("nvfp4", None),
         "nf4": ("bf16", nf4), "mxfp4": ("bf16", mxfp4)}


class Whole(lora.LoRALinear):
    """Full fine-tuning in a LoRA layer's place: the fp32 weight learns; the sampler reads base, its copy."""

    def __init__(self, layer):
        torch.nn.Module.__init__(self)
        self.base = layer.base
        self.weight = torch.nn.Parameter(layer.base.W.weight.to(torch.float32, copy=True))

    def refresh(self):
        with torch.no_grad():
            self.base.W.weight.copy_(self.weight)

    def forward(self, x, needed=True):
        if torch.is_grad_enabled():
            return F.linear(x, self.weight.to(x.dtype), self.base.bias)
        return self.base(x)


def build(base, config, device):
    quant, rounding = BASES[base]
    source = opened(config.model)[0]
    model = load(Rounded(source, rounding) if rounding else source, quant, config.rank, config.alpha, device,
                 config.seed)
    if base == "full":
        for name, layer in lora.lora_layers(model).items():
            model.set_submodule(name, Whole(layer))
    return model


# --- one run
class Record(runs.Run):
    """A run without a folder: its metrics stay in memory, and nothing is saved."""

    def __init__(self, config, loud):
        super().__init__(config, quiet=True)
        self.loud, self.records = loud, {"step": [], "eval": []}

    def log(self, kind, step, record):
        self.records[kind].append(record | dict(step=step))
        if self.loud:
            print(runs.line(record | dict(kind=kind, step=step)), flush=True)

    def load(self, model, optimizer):
        return 0

    def made(self, step, stats, sampled):
        """Skipped steps do not stop the run: they are a result. "surprise", the mean −ln π of all sampled
        tokens, is the entropy of the sampling policy, noise included; "entropy" is that of the policy
        without noise, on the answers that were trained on."""
        nats = sampled.logprobs.sum() / sampled.lengths.sum()
        self.log("step", step, stats | dict(surprise=-nats.item()))
        self.done, self.whole = step + self.config.updates_per_rollout, True


def measure(job, loud=False, device="", problems=(CURVE, FINAL), correction="none", **changes):
    """The record of a job (phase, arm, rate, seed). changes: flags of train.py, for a shorter run."""
    phase, arm, rate, seed = job
    began, device = time.perf_counter(), device or ("cuda" if torch.cuda.is_available() else "cpu")
    arm_flags = ARMS[arm] if phase != "entropy" else dict(base=arm)
    flags = COMMON | dict(correction=correction) | arm_flags | changes
    base = flags.pop("base")
    config = launch.check(train.Config(**flags | dict(lr=rate or 1.0, seed=seed)))
    _, tokenizer, stop_ids = opened(config.model)
    task = TASKS[config.task](None, config.operands, problems[1])
    curve = task._replace(held_out=task.held_out[:problems[0]])
    model = build(base, config, device)
    record = dict(phase=phase, arm=arm, lr=rate, seed=seed, steps=config.steps)
    if phase == "entropy":
        record |= dict(steps=0, entropy=entropy(config, model, task, tokenizer, stop_ids))
    else:
        run = Record(config, loud)
        train.train(config, model, curve, tokenizer, stop_ids, run)
        # four digits: a reward is a multiple of 1/256
        record |= {k: [runs.rounded(r[k], 4) for r in run.records["step"]] for k in (
            "reward", "surprise", "entropy", "kl_noise", "sigma", "length", "finished", "signal")}
        record["eval"] = {k: [runs.rounded(r[name], 4) for r in run.records["eval"]] for k, name in (
            ("step", "step"), ("greedy", "eval_greedy"), ("sampled", "eval_sampled"))}
        last = train.evaluate(config, Sampler(model), task, tokenizer, stop_ids)
        record["final"] = {k: runs.rounded(last[f"eval_{k}"], 4)
                           for k in ("greedy", "greedy_loose", "sampled")}
        record["skipped"] = sum(r.get("skipped", 0) for r in run.records["step"])
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return record | dict(seconds=round(time.perf_counter() - began, 1), device=name, torch=torch.__version__)


@torch.no_grad()
def entropy(config, model, task, tokenizer, stop_ids):
    """Nats a token of the policy on answers of its own, the mean of each held-out prompt."""
    prompts = [checkpoint.encode(tokenizer, task.prompt(problem)) for problem in task.held_out]
    sampled = Sampler(model).generate(prompts, config.eval_samples, config.max_new_tokens, config.temperature,
                                      stop_ids, config.seed, -1)
    total = torch.zeros(len(sampled.tokens))
    for rows in sampled.micro_batches(torch.arange(len(total)), config.micro_tokens):
        part = sampled.rows(rows)
        _, nats = model.logprobs(part.tokens, part.prompt_lengths, part.lengths, config.temperature)
        total[rows] = nats.sum(1).cpu()
    total, tokens = (t.view(len(prompts), -1).sum(1) for t in (total, sampled.lengths.cpu()))
    return [runs.rounded(v, 4) for v in (total / tokens).tolist()]


# --- many runs
def logged(job, folder, **options):
    """Make a job and append its record → what to print."""
    record = measure(job, **options)
    append(folder, record)
    return f"final {record['final']['sampled']:.3f}" if "final" in record else "entropy"


def run_all(folder, phases=PHASES[:-1], arms=(), workers=12, minutes=25.0, **options):
    """Run the planned jobs that the folder lacks, on every GPU → the failed jobs. A job starts only if it
    would end in time, judged by the slowest run so far; a job that is stopped leaves no line."""
    failed, steps = {}, options.get("steps", COMMON["steps"])

    def made():
        return [r for r in read(folder) if r["steps"] in (0, steps)]

    def todo():
        records = made()
        done = {key(r) for r in records}
        return [job for job in plan(records, failed, options.get("correction", "none")) if job[0] in phases
                and (not arms or job[1] in arms) and job not in done]

    def fits(job, seconds):
        return max((r["seconds"] for r in made()), default=0.0) < seconds

    return experiment.work(todo, partial(logged, folder=folder, **options), fits, workers, minutes,
                           options.get("device", ""), failed)


def main(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    one, many, left = (commands.add_parser(name) for name in ("run", "all", "list"))
    one.add_argument("arm", choices=ARMS)
    one.add_argument("seed", type=int)
    one.add_argument("--lr", type=float, help="default: the grid's choice; before the grid, its middle")
    many.add_argument("--phase", nargs="+", choices=PHASES, default=PHASES[:-1])
    many.add_argument("--arms", nargs="+", choices=sorted({*ARMS, *FORMATS}), default=())
    many.add_argument("--workers", type=int, default=12)
    many.add_argument("--minutes", type=float, default=25.0)
    for command in (one, many, left):
        command.add_argument("--correction", choices=("none", "bypass"), default="none")
        command.add_argument("--out", help="default: results/ablation/CORRECTION")
    for command in (one, many):
        command.add_argument("--steps", type=int, default=COMMON["steps"])
        command.add_argument("--device", default="")
        command.add_argument("--model", default="smollm2")
    a = parser.parse_args(arguments)
    folder = a.out or ROOT / "results" / "ablation" / a.correction
    records = read(folder)
    if a.command == "all":
        return bool(run_all(folder, a.phase, a.arms, a.workers, a.minutes, steps=a.steps, device=a.device,
                            model=a.model, correction=a.correction))
    if a.command == "list":
        made = Counter(r["phase"] for r in records)
        for phase, count in Counter(job[0] for job in plan(records, (), a.correction)).items():
            print(f"{phase:9} {made[phase]:3} of {count:3}")
        for arm in main_arms(a.correction):
            print(f"{arm:16} learning rate {best_rate(records, arm)}")
        return 0
    grid_arm = "sweep+aqn" if a.arm in VARIANTS else FOLLOW_UP.get(a.arm, (a.arm,))[0]
    rate = a.lr or best_rate(records, grid_arm) or rates(grid_arm)[0]
    print(f"{a.arm}, seed {a.seed}, learning rate {rate}, {a.steps} steps", flush=True)
    record = measure(("main", a.arm, rate, a.seed), loud=True, device=a.device, steps=a.steps, model=a.model,
                     correction=a.correction)
    print(f"final  {record['final']}")
    for r in records:
        if (r["arm"], r["lr"], r["seed"], r["steps"]) == (a.arm, rate, a.seed, a.steps):
            print(f"logged {r['final']} on {r['device']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
