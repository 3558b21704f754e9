"""Which of several checkouts is faster: python results/turns.py OUT.jsonl DIR DIR … [--batch 8,64] [--update]

Each DIR is a checkout (`git worktree add DIR REVISION`) that builds a model of its own, from the same random
weights. The checkouts take turns at the same work in this one process, in an order that each round shuffles:
in a fixed order the first is about 1 % slower, and a GPU drifts by more than that in a minute. The work is a
decode step of --batch sequences, or with --update one update of 4 sequences of 640 tokens. The first round
compiles and does not count. `faster` is the median over the rounds of the first DIR's time over this one's,
less 1. Give one checkout twice to see how much of it is noise.
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
    """The bench module of a checkout. It imports its own modules: forget those of the last checkout."""
    folders = [str(Path(tree)), str(Path(tree) / "results")]
    names = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
    if "bench" not in names:
        sys.exit(f"{tree} has no bench.py: give the folder of a checkout")
    for name in names:
        sys.modules.pop(name, None)
    path = sys.path[:]
    sys.path[:0] = folders
    bench = importlib.import_module("bench")
    sys.path[:] = path
    return bench


def decode_turn(bench, model, batch, args):
    """→ a function that decodes once and returns ms a step."""
    sampler, group = bench.Sampler(model), math.gcd(batch, args.samples)
    torch.manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (batch // group, args.context - args.new // 2)).tolist()

    def turn():
        sampler.generate(prompts, group, args.new, 1.0, [], 0, 0)
        return 1e3 * sampler.stats["decode_s"] / sampler.stats["steps"]
    return turn


def update_turn(bench, model, quant, sequences=4, prompt=128, new=512):
    """→ a function that updates once, with gradient checkpointing, and returns its ms."""
    model.gradient_checkpointing = True
    config = bench.train.Config(quant=quant, prompts=1, group_size=sequences, lr=1e-6, max_new_tokens=new,
                                micro_tokens=sequences * (prompt + new), gradient_checkpointing=True)
    optimizer, vocabulary = bench.train.adamw(config, model), model.config.vocab_size
    torch.manual_seed(0)
    sampled = bench.made_up(torch.randint(vocabulary, (1, prompt)).tolist(), sequences, new, vocabulary)
    advantages = torch.randn(sequences, device=model.device)

    def turn():
        began = bench.clock()
        bench.train.update(config, model, optimizer, sampled, advantages)
        return 1e3 * (bench.clock() - began)
    return turn


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("trees", nargs="+", metavar="DIR")
    parser.add_argument("--model-shape", default="7b")
    parser.add_argument("--quant", default="nvfp4", choices=("nvfp4", "bf16"))
    parser.add_argument("--batch", default="8,64", help="sequences at once, separated by commas")
    parser.add_argument("--update", action="store_true", help="time an update instead of decoding")
    parser.add_argument("--samples", type=int, default=16, help="sequences of one prompt, at most")
    parser.add_argument("--context", type=int, default=1000, help="mean length while it is timed")
    parser.add_argument("--new", type=int, default=64, help="tokens that are timed in a turn")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    benches = [load(tree) for tree in args.trees]
    if args.model_shape not in benches[0].memory.MODELS:
        sys.exit(f"--model-shape {args.model_shape}: not one of {', '.join(benches[0].memory.MODELS)}")
    log, models = benches[0].Records(args.out, {}), []
    for bench in benches:
        torch.manual_seed(0)
        models.append(bench.random_model(args.model_shape, args.quant))
    for batch in [4] if args.update else benches[0].numbers(args.batch):
        pairs = zip(benches, models, strict=True)
        turns = [update_turn(*pair, args.quant) if args.update else decode_turn(*pair, batch, args)
                 for pair in pairs]
        times = [[] for _ in turns]                                               # ms, of each round
        for _ in range(1 + args.rounds):
            for i in random.sample(range(len(turns)), len(turns)):
                times[i].append(turns[i]())
        for tree, bench, mine in zip(args.trees, benches, times, strict=True):
            faster = median(a / b for a, b in zip(times[0][1:], mine[1:], strict=True)) - 1
            r = {"tree": Path(tree).name, "shape": args.model_shape, "weights": args.quant, "batch": batch,
                 "work": "update" if args.update else "step", "rounds": args.rounds, "ms": median(mine[1:]),
                 "faster": faster}
            log.append(bench.conditions() | r)
            print("{tree:>6} {shape} {weights} {work} B={batch}: {ms:.4f} ms, {faster:+.2%}".format(**r),
                  flush=True)


if __name__ == "__main__":
    main()
