"""Which of several checkouts decodes faster: python results/turns.py OUT.jsonl DIR DIR … --batch 8,64

Each DIR is a checkout (`git worktree add DIR REVISION`) with a model of its own, of the same random weights.
All sample answers to the same prompts, one after the other in this one process, in an order that each round
shuffles: in a fixed order the first is about 1 % slower, and a GPU drifts by more within a minute. The first
round compiles and does not count. `faster` is the median over the rounds of the first DIR's time over this
one's, less 1; a checkout given twice shows how much of it is noise.

In turns.jsonl old and again are f1cb07e, new is 6f1d0c3, noline that without the line of 0.5B in SPLIT_K;
clusters is the first kernel with them by _tile's rule alone, and with other splits of the products it names,
where (none) means through memory; edges is the commit after bed3598; the others have the name of theirs.
"""
import argparse
import importlib
import math
import random
import sys
from pathlib import Path
from statistics import median

import torch


def load(tree):
    """bench.py of this checkout, at its top or in results/, with the other modules of this checkout."""
    folders = [str(Path(tree)), str(Path(tree) / "results")]
    ours = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
    if "bench" not in ours:
        sys.exit(f"{tree} has no bench.py: give the folder of a checkout")
    for name in ours:                                   # those of the last checkout
        sys.modules.pop(name, None)
    before, sys.path[:] = sys.path[:], [*folders, *sys.path]
    bench = importlib.import_module("bench")
    sys.path[:] = before
    return bench


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("trees", nargs="+", metavar="DIR")
    parser.add_argument("--model-shape", default="7b")
    parser.add_argument("--quant", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--batch", default="8,64", help="sequences at once, separated by commas")
    parser.add_argument("--samples", type=int, default=16, help="sequences of one prompt, at most")
    parser.add_argument("--context", type=int, default=1000, help="mean length while it is timed")
    parser.add_argument("--new", type=int, default=64, help="tokens that are timed in a turn")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    benches = [load(tree) for tree in args.trees]
    if args.model_shape not in benches[0].memory.MODELS:
        sys.exit(f"--model-shape {args.model_shape}: not one of {', '.join(benches[0].memory.MODELS)}")
    log, samplers = benches[0].Records(args.out, {}), []
    for bench in benches:
        torch.manual_seed(0)
        samplers.append(bench.Sampler(bench.random_model(args.model_shape, args.quant)))
    for batch in benches[0].numbers(args.batch):
        group = math.gcd(batch, args.samples)
        prompts = torch.randint(samplers[0].model.config.vocab_size,
                                (batch // group, args.context - args.new // 2)).tolist()
        times = [[] for _ in samplers]                                            # ms a step, of each round
        for _ in range(1 + args.rounds):
            for i in random.sample(range(len(samplers)), len(samplers)):
                samplers[i].generate(prompts, group, args.new, 1.0, [], 0, 0)
                times[i].append(1e3 * samplers[i].stats["decode_s"] / samplers[i].stats["steps"])
        for tree, bench, mine in zip(args.trees, benches, times, strict=True):
            faster = median(a / b for a, b in zip(times[0][1:], mine[1:], strict=True)) - 1
            r = {"tree": Path(tree).name, "shape": args.model_shape, "weights": args.quant, "batch": batch,
                 "samples": group, "context": args.context, "ms_step": median(mine[1:]), "faster": faster}
            log.append(bench.conditions() | r)
            print("{tree} {shape} {weights} B={batch}: {ms_step:.4f} ms a step, {faster:+.2%}".format(**r))


if __name__ == "__main__":
    main()
