"""Which of several checkouts is faster: python -m bench.turns --trees DIR DIR … --out FILE.jsonl

Each DIR is a checkout (`git worktree add DIR REVISION`). One without bench/ is measured by ours.
Each builds a model of its own, from the same random weights. The checkouts take turns at the same
work in this one process, in an order that each round shuffles: in a fixed order the first is about
1 % slower, and a GPU drifts by more than that in a minute.

The work is a decode step of --batch answers, or with --update one update of 4 answers of --new
tokens. The first round compiles and does not count. `faster` is the median over the rounds of the
first DIR's time over this one's, less 1. Give one checkout twice to see how much of it is noise.

Needs: common.py, rollout.py, step.py.
"""

import importlib
import random
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

from bench import common


def main(arguments=None):
    parser = common.flags(__doc__, model_shape="7b", context=1000, new=64, rounds=20)
    parser.add_argument("--trees", nargs="+", metavar="DIR", required=True)
    parser.add_argument("--quant", choices=common.QUANT, default="nvfp4")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--update", action="store_true", help="time an update instead of decoding")
    args = parser.parse_args(arguments)
    for tree in args.trees:
        if not Path(tree, "rollout.py").is_file():
            parser.error(f"--trees {tree}: has no rollout.py; give the folder of a checkout")
    records = common.Records(args.out, common.conditions())
    trees = [load(folder, args) for folder in args.trees]
    for batch in [4] if args.update else args.batch:
        prepare = update_turn if args.update else decode_turn
        turns = [prepare(tree, args, batch) for tree in trees]
        compare(args, batch, turns, records)


def load(folder, args):
    """→ modules of a checkout and its model. Those of the last one are forgotten first."""
    theirs = {"bench", *(path.stem for path in Path(folder).iterdir())}
    for name in list(sys.modules):
        if name.partition(".")[0] in theirs:
            del sys.modules[name]
    sys.path.insert(0, str(Path(folder).resolve()))
    names = ("common", "rollout", "step")
    tree = SimpleNamespace(**{name: importlib.import_module(f"bench.{name}") for name in names})
    sys.path.pop(0)
    torch.manual_seed(0)
    tree.model = tree.common.random_model(args.model_shape, args.quant)
    return tree


def decode_turn(tree, args, batch):
    """→ a function that decodes once and returns ms a step."""
    torch.manual_seed(0)
    turn = tree.rollout.decoding(tree.model, batch, 16, args.context, args.new)

    def ms():
        stats = turn()
        return 1e3 * stats["decode_s"] / stats["steps"]

    return ms


def update_turn(tree, args, batch):
    """→ a function that updates once, with gradient checkpointing, and returns its ms."""
    work = tree.step.parse(f"--prompts 1 --samples {batch} --new {args.new}".split())
    work.micro_tokens, work.recompute = 2560, True  # the same for all checkouts
    torch.manual_seed(0)
    _, update = tree.step.updater(work, args.quant, tree.model)
    prompts = tree.common.random_prompts(tree.model, work.prompts, work.prompt_length)
    sampler = tree.step.Sampler(tree.model)
    sampled = tree.step.sample(sampler, prompts, batch, work.new)
    return lambda: 1e3 * update(sampled)


def compare(args, batch, turns, records):
    """Let them take turns and append a record for each checkout."""
    times = [[] for _ in turns]  # ms, of each round
    for _ in range(1 + args.rounds):
        for i in random.sample(range(len(turns)), len(turns)):
            times[i].append(turns[i]())
    times = [ms[1:] for ms in times]
    for folder, ms in zip(args.trees, times, strict=True):
        ratios = [first / this for first, this in zip(times[0], ms, strict=True)]
        records.append(
            {
                "tree": Path(folder).resolve().name,
                "shape": args.model_shape,
                "weights": args.quant,
                "batch": batch,
                "work": "update" if args.update else "step",
                "rounds": args.rounds,
                "ms": median(ms),
                "faster": median(ratios) - 1,
            }
        )


if __name__ == "__main__":
    main()
