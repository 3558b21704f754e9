"""The paper's runs as commands of train.py, and what tries them where there is no checkpoint.

    python results/recipes.py list                           commands to copy, the memory and time they need
    python results/recipes.py try 7b-gsm8k --data train.jsonl --out FILE.jsonl

The flags are those of Table 4 of QeRL (arXiv 2510.11696), and of its released scripts where that is silent.
We differ in AdamW's 32 bits (theirs: 8), frozen norms, and the prompts and rewards of tasks.py.

Evaluation, the second command, is the paper's: --steps 0 trains nothing, --test takes all problems of a test
set, and eval_sampled is the mean over 8 answers to each (the paper: several), right and ended, at temperature
0.6 and top-p 0.95. The math runs are tested on MATH-500; the paper also took AIME 24 and 25 and AMC 23.

`try` is train.train itself on real problems of GSM8K, which the math task reads too, and on random weights of
the recipe's shape, made on the device layer by layer. Memory and seconds are real, the rest is STAND-INS:

    tokenizer   SmolLM2's: its 49152 ids are ids of Qwen's vocabulary too, the others decode to nothing
    ends        every --new'th id ends an answer; random weights draw one once in --new tokens, so five
                answers of eight end; the others are cut off and, as the recipe says, not trained on
    rewards     an answer that ended gets 0 or 1 by a hash of its text: random text is always wrong, and
                equal rewards update nothing. The task still judges, so that its time counts
    evaluation  of 4 held-out problems, and once more at the end, 8 answers each at temperature 0.6,
                top-p 0.95

Needs: train.py and what it needs; bench.py, memory.py.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

import checkpoint  # noqa: E402
import memory  # noqa: E402
import runs  # noqa: E402
import train  # noqa: E402
from model import load  # noqa: E402
from rollout import SLOTS, Sampler  # noqa: E402
from tasks import TASKS  # noqa: E402

PAPER = dict(
    quant="rtn", rank=32, alpha=32,                     # paper: AWQ; scripts: rtn, rank 16, alpha 16
    correction="none",                                  # compared with the trainer's own policy: a ratio of 1
    # clipping: no effect at a ratio of 1. Scripts with grpo: both 0.2, and a KL of weight 0.04; paper: no KL
    clip_low=0.2, clip_high=0.28, overlong="mask", temperature=1.0,
    # one update a rollout, as by default: Table 4 says 4 on GSM8K, its authors 1 (in their issue 12)
    lr=1e-5, schedule="cosine", weight_decay=0.1, max_grad_norm=0.2,        # all but lr: the scripts'
    sigma_start=1e-2, sigma_end=5e-4, sigma_stages=10,  # scripts: to 1e-4; §4.1: from 5e-2
    gradient_checkpointing=True, eval_every=50, save_every=50)
# Table 4's batch of 128 is read as answers, as TRL counts: with 128 prompts a step, 600 steps are ten epochs.
# Scripts: groups and batches of 2 (32B: 8), answers of 2048 and 4096 tokens; the warm-up of a tenth is theirs
GSM8K = PAPER | dict(
    task="gsm8k", data="openai/gsm8k/main", loss="grpo", prompts=16, group_size=8, max_new_tokens=4096,
    steps=600, warmup=60, micro_tokens=8192)
# The paper does not say how long it trained, but evaluates after 500 to 1000 steps. The scripts' data has
# BigMath's levels 3 to 5, for the 32B 4 and 5. micro_tokens: the longest row
BIGMATH = PAPER | dict(
    task="math", data="open-r1/Big-Math-RL-Verified-Processed/level_3_4_5", loss="dapo", prompts=8,
    group_size=16, max_new_tokens=8192, steps=1000, warmup=100, micro_tokens=9216)
RECIPES = {name: dict(out=f"runs/{name}", model=f"Qwen/Qwen2.5-{name.split('-')[0].upper()}-Instruct") | flags
           for name, flags in (("3b-gsm8k", GSM8K), ("7b-gsm8k", GSM8K), ("7b-bigmath", BIGMATH),
                               ("14b-bigmath", BIGMATH), ("32b-bigmath", BIGMATH))}
RECIPES["32b-bigmath"]["data"] = "open-r1/Big-Math-RL-Verified-Processed/level_4_5"
SAMPLED = dict(eval_samples=8, temperature=0.6, eval_top_p=0.95)
EVALUATION = SAMPLED | dict(steps=0, max_new_tokens=4096)
PROMPT, MEAN = 150, 500             # assumed tokens of a prompt and an answer, for a step's expected time
# task: (its test set, the tokens of a prompt at which the scripts truncate it; we do not)
TESTS = {"gsm8k": ("openai/gsm8k/main:test", 256), "math": ("HuggingFaceH4/MATH-500:test", 1024)}


def evaluation(name):
    """The flags that evaluate what a recipe has trained."""
    same = {k: RECIPES[name][k] for k in ("model", "quant", "rank", "alpha", "task")}
    return same | EVALUATION | dict(test=TESTS[same["task"]][0], adapter=f"runs/{name}/adapter")


def command(flags):
    """train.Config's fields → the line for a shell."""
    return "python train.py" + "".join(f" --{key.replace('_', '-')}" + f" {value}" * (value is not True)
                                       for key, value in flags.items())


def show(name, card_gb=80):                             # the paper's H100
    config, c = train.Config(**RECIPES[name]), memory.config(name.split("-")[0])
    answers, length = config.prompts * config.group_size, TESTS[config.task][1] + config.max_new_tokens
    slots = max(n for n in range(1, answers + 1)
                if memory.plan_of(config, c, n, length).peak <= (card_gb - 1) * 1e9)
    p, rates = memory.plan_of(config, c, slots, length), measured(name)
    step_s = answers * (MEAN / rates["rollout_tok_s"] + (PROMPT + MEAN) / rates["update_tok_s"])
    print(f"{name}\n    {command(RECIPES[name])}\n    {command(evaluation(name))}\n"
          f"    planned on {card_gb} GB: weights {p.weights / 1e9:.1f} GB, peak {p.peak / 1e9:.1f} GB with "
          f"{slots} of {answers} answers of {length} tokens at once, with checkpointing the update of "
          f"{config.micro_tokens} micro-tokens takes {p.update / 1e9:.1f} GB when these are gone\n"
          f"    expected: {step_s:.0f} s a step if answers have {MEAN} tokens in the mean, {config.steps} "
          f"steps in {step_s * config.steps / 3600:.1f} hours, at the rates of `try` on an "
          f"{rates['gpu'].split(',')[0]}")


def measured(name):
    """The last step that `try` logged of a recipe."""
    return [r for r in tables.read("recipes") if r["recipe"] == name and r["kind"] == "step"][-1]


def attempt(name, data, steps, new, **changes):
    """Train → a record of each step, and one of an evaluation. changes: flags, None for the recipe's."""
    began, info = time.perf_counter(), bench.conditions()
    flags = RECIPES[name] | dict(steps=steps, max_new_tokens=new, data=data)
    flags |= {k: v for k, v in changes.items() if v}
    with tempfile.TemporaryDirectory() as folder:
        config, source = train.Config(**flags | dict(out=folder)), bench.RandomWeights(name.split("-")[0])
        task, tokenizer = TASKS[config.task](data), checkpoint.open("smollm2").tokenizer()
        stop_ids = list(range(0, source.config.vocab_size, new))

        def reward(problem, text, finished):
            task.reward(problem, text, finished)
            return float(finished and zlib.crc32(text.encode()) & 1)

        tried = task._replace(held_out=task.held_out[:4], reward=reward)
        torch.manual_seed(0)
        model = load(source, config.quant, config.rank, config.alpha, bench.DEVICE, config.seed)
        model.gradient_checkpointing = config.gradient_checkpointing
        run, load_s = runs.Run(config), time.perf_counter() - began
        train.train(config, model, tried, tokenizer, stop_ids, run)
        records = [r for r in runs.read(run.folder).values() if r["kind"] == "step"]
    config = dataclasses.replace(config, **SAMPLED)
    evaluated = train.evaluate(config, Sampler(model), tried, tokenizer, stop_ids)
    records.append(dict(kind="eval", step=steps) | evaluated)
    longest = max(len(checkpoint.encode(tokenizer, task.prompt(problem)))
                  for step in range(steps) for problem in train.batch(task.train, config, step))
    slots = min(SLOTS, config.prompts * config.group_size)
    planned = memory.plan_of(config, model.config, slots, longest + new).peak / 1e9
    info |= dict(recipe=name, weights="random", rewards="stand-in: a hash of the answer", flags=flags,
                 longest_prompt=longest, load_s=load_s, planned_gb=planned)
    return [info | record for record in records]


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="every recipe's commands, memory and time")
    tried = verbs.add_parser("try", help="a few steps on random weights")
    tried.add_argument("name", choices=RECIPES)
    tried.add_argument("--data", required=True, help="GSM8K's problems, a JSONL file")
    for flag, default in (("--steps", 2), ("--new", 256), ("--prompts", None), ("--group-size", None)):
        tried.add_argument(flag, type=int, default=default, help=f"default: {default or 'as in the recipe'}")
    tried.add_argument("--out", help="append the records to this file")
    args = vars(parser.parse_args(arguments))
    if args.pop("verb") == "list":
        return [show(name) for name in RECIPES]
    log = bench.Records(args.pop("out"), {})
    for record in attempt(**args):
        print(json.dumps(record))
        log.append(record)


if __name__ == "__main__":
    main(sys.argv[1:])
