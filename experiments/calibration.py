"""GPTQ's calibration: which texts, how many, how much damping, and which inputs of a layer?

    python -m experiments.calibration table --model M --data train.jsonl --test test.jsonl --out LOG
    python -m experiments.calibration time --model M --data train.jsonl
    python -m experiments.calibration random --shape 7b

table   measures each cell below that LOG, a JSONL file, lacks; then prints all of LOG as a table.
        The measure is KL(16 bits ‖ 4 bits) in nats a token, and how often both have the same most
        likely token, on answers to --held-out problems of --test. The model in 16 bits sampled
        these answers; no calibration reads them. --cells NAME … measures only these.
time    runs the command, python -m tools.calibrate, in a process of its own: seconds from its start
        to its end, and peak memory. Flags for it may follow.
random  the same without the files, on random weights of a shape: it samples answers of 256 tokens
        to 128 prompts of 150, and quantises. Reading the weights is not included.

Needs: what tools/calibrate.py needs; bench/common.py.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import nvfp4
from bench import common
from model import Block, load
from ops.attention import Packed
from rollout import Sampler, SamplingParams
from tools import calibrate, memory, weights
from tools.environment import draw_problems, load_environment, load_task
from tools.flags import Config
from tools.run import append, peak_memory_gb, rounded


@dataclasses.dataclass
class Cell:
    """One row of the table. answers, texts, damping and inputs are of gptq alone."""

    method: str = "gptq"
    answers: str = "own"  # sampled by the model in the sweep's 4 bits; or gold, the data's
    texts: int = 128
    damping: float = 0.01
    inputs: str = "4 bits"  # of a layer, from the layers before it; or 16 bits


CELLS = {
    "rtn": Cell("rtn"),
    "sweep": Cell("sweep"),
    "own-32": Cell(texts=32),
    "own-128": Cell(),
    "own-512": Cell(texts=512),
    "gold-32": Cell(answers="gold", texts=32),
    "gold-128": Cell(answers="gold"),
    "gold-512": Cell(answers="gold", texts=512),
    "damping-.005": Cell(damping=0.005),
    "damping-.02": Cell(damping=0.02),
    "damping-.05": Cell(damping=0.05),
    "inputs-16": Cell(inputs="16 bits"),
    # the same for few texts: what a CPU can measure
    "damping-.005-32": Cell(texts=32, damping=0.005),
    "damping-.05-32": Cell(texts=32, damping=0.05),
    "inputs-16-32": Cell(texts=32, inputs="16 bits"),
}


class Unquantised(Block):
    """A layer that, once quantised, returns what it returned before: for the cells inputs-16."""

    first = None

    def forward(self, *inputs):
        self.first = self.first or super().forward(*inputs)
        return self.first


class Calibrated(weights.Source):
    """A checkpoint with the projections that calibrate.quantise made of it."""

    packed = True

    def __init__(self, source, tensors):
        self.source, self.tensors = source, tensors

    def __getattr__(self, name):
        return getattr(self.source, name)

    def tensor(self, name, shape, device="cpu"):
        if f"{name}_packed" not in self.tensors:
            return self.source.tensor(name, shape, device)
        ends = ("packed", "scale", "global_scale")
        codes, scale, divisor = (self.tensors[f"{name}_{end}"].to(device) for end in ends)
        return nvfp4.NVFP4Tensor(codes, scale, 1 / divisor.view(()))


# --- texts: a prompt and an answer, token ids each


def own_answers(source, environment, problems, quant):
    """→ (prompt, answer) of each problem, sampled by the model."""
    prompts = environment.encode_prompts(problems)
    decoder = load(source, quant, device=common.DEVICE)
    rollout = Sampler(decoder).generate(prompts, 1, environment.params, 0, progress="answers")
    return list(zip(prompts, rollout.answers(), strict=True))


def gold_answers(environment, problems):
    """→ (prompt, answer) of each problem, with the answer of the data."""
    prompts = environment.encode_prompts(problems)
    encode = environment.tokenizer
    answers = [encode(p["answer"], add_special_tokens=False)["input_ids"] for p in problems]
    return list(zip(prompts, answers, strict=True))


# --- the measure


@torch.no_grad()
def states(decoder, texts):
    """→ the hidden states (a, D) that predict the tokens of each answer, on the CPU."""
    found = []
    for prompt, answer in texts:
        ids = torch.tensor(prompt + answer, device=decoder.device)
        attend = Packed([(len(ids), [])], decoder.device)
        hidden = decoder(ids, attend.positions, attend)
        found.append(hidden[len(prompt) - 1 : -1].cpu())
    return found


@torch.no_grad()
def distance(decoder, texts, reference):
    """→ KL(16 bits ‖ decoder) in nats a token, and the share of tokens for which the most likely
    one is the same. reference: the states of the model in 16 bits, whose lm_head is the decoder's.
    """
    kl = same = tokens = 0
    for theirs, ours in zip(reference, states(decoder, texts), strict=True):
        p, q = (
            decoder.logits(hidden.to(decoder.device)).log_softmax(-1) for hidden in (theirs, ours)
        )
        kl += (p.exp() * (p - q)).sum().item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        tokens += len(p)
    return kl / tokens, same / tokens


# --- the modes


def measure(args):
    """Measure each cell that the log lacks."""
    wanted = [name for name in args.cells or CELLS if name not in logged(args.out)]
    if not wanted:
        return
    config = Config(
        model=args.model,
        task="gsm8k",
        data=args.data,
        test=args.test,
        max_new_tokens=args.max_new_tokens,
        eval_problems=args.held_out,
    )
    source = weights.open(args.model)
    environment = load_environment(config, load_task(config), source)
    held_out = own_answers(source, environment, environment.task.held_out, "bf16")
    reference = states(load(source, "bf16", device=common.DEVICE), held_out)
    most = max(CELLS[name].texts for name in wanted)
    problems = draw_problems(environment.task.train, 0, 0, most)
    texts = {"gold": gold_answers(environment, problems)}
    if any(CELLS[n].method == "gptq" and CELLS[n].answers == "own" for n in wanted):
        texts["own"] = own_answers(source, environment, problems, "nvfp4")
    for name in wanted:
        record = measured(CELLS[name], source, texts, held_out, reference)
        record = dict(cell=name, model=Path(args.model).stem, held_out=args.held_out) | record
        append(Path(args.out), {k: rounded(v) for k, v in record.items()} | common.conditions())
        print(record, flush=True)


def measured(cell, source, texts, held_out, reference):
    """→ {name: number} of a cell. seconds, memory_gb: of quantising."""
    common.forget_peak()
    if cell.method != "gptq":
        quant = {"sweep": "nvfp4", "rtn": "rtn"}[cell.method]
        began = common.clock()
        decoder = load(source, quant, device=common.DEVICE)
        costs = dict(seconds=common.clock() - began, memory_gb=peak_memory_gb())
    else:
        some = [prompt + answer for prompt, answer in texts[cell.answers][: cell.texts]]
        decoder = load(source, device=common.DEVICE)
        began = common.clock()
        calibrate.Block = Block if cell.inputs == "4 bits" else Unquantised
        tensors = calibrate.quantise(decoder, source, some, cell.damping)
        costs = dict(seconds=common.clock() - began, memory_gb=peak_memory_gb())
        costs["tokens"] = sum(map(len, some))
        del decoder
        decoder = load(Calibrated(source, tensors), device=common.DEVICE)
    kl, same = distance(decoder, held_out, reference)
    return dict(kl=kl, same=same) | costs


def logged(path):
    """→ {cell: record} of a log; of two records of a cell, the later one."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return {record["cell"]: record for record in map(json.loads, lines)}


def table(path):
    """→ a log as a table in Markdown."""
    rows = ["| method | answers | texts | tokens | damping | inputs | KL | same token | seconds |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    records = logged(path)
    for name, cell in CELLS.items():
        if name in records:
            r = records[name]
            about = (
                [cell.answers, cell.texts, r["tokens"], cell.damping, cell.inputs]
                if cell.method == "gptq"
                else [""] * 5
            )
            columns = [cell.method, *about, f"{r['kl']:.4f}", f"{r['same']:.3f}", r["seconds"]]
            rows.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(rows)


def time_command(args, more):
    """Run python -m tools.calibrate, print what it takes."""
    command = "import sys; from tools import calibrate, run; calibrate.main(sys.argv[1:]);"
    command += "print(run.peak_memory_gb())"
    flags = ["--task", "gsm8k", "--data", args.data, "--max-new-tokens", str(args.max_new_tokens)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", command, args.model, f"{folder}/new", *flags, *more],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        seconds = time.perf_counter() - began
    *_, peak = done.stdout.split()
    record = dict(model=Path(args.model).stem, seconds=seconds, memory_gb=float(peak))
    print(json.dumps({k: rounded(v) for k, v in record.items()} | common.conditions()))


def time_random(args):
    """Sample and quantise random weights, print what it takes."""
    began = common.clock()
    decoder = common.random_model(args.shape, "nvfp4")
    loaded = common.clock()
    prompts = common.random_prompts(decoder, args.texts, 150)
    params = SamplingParams(max_new_tokens=256, stop_ids=[])
    rollout = Sampler(decoder).generate(prompts, 1, params, 0, progress="answers")
    sampled = common.clock()
    source = common.RandomWeights(args.shape)
    source.names = []
    calibrate.quantise(decoder, source, rollout.tokens.tolist())
    record = dict(
        shape=args.shape,
        tokens=rollout.tokens.numel(),
        load_s=loaded - began,
        sample_s=sampled - loaded,
        quantise_s=common.clock() - sampled,
        memory_gb=peak_memory_gb(),
    )
    print(json.dumps({k: rounded(v) for k, v in record.items()} | common.conditions()))


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("table", "time", "random"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", help="train.jsonl of GSM8K")
    parser.add_argument("--test", help="test.jsonl of GSM8K")
    parser.add_argument("--out", default="calibration.jsonl")
    parser.add_argument("--cells", nargs="+", choices=CELLS)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=400)
    parser.add_argument("--shape", choices=memory.MODELS, default="7b")
    parser.add_argument("--texts", type=int, default=128, help="of random")
    args, more = parser.parse_known_args(arguments)
    if args.mode == "time":
        time_command(args, more)
    elif args.mode == "random":
        time_random(args)
    else:
        measure(args)
        print(table(args.out))


if __name__ == "__main__":
    main(sys.argv[1:])
