"""Whole GRPO steps of train.py on random weights: python -m bench.step --out FILE.jsonl

--prompts × --samples answers of --new tokens, then the update with random advantages. With --mean,
which is below --new, answers end by chance, after so many tokens on average and at most --new. The
update's micro-batches and its number of recomputed layers are chosen as in a run; --micro-tokens
fixes the first, --recompute or --no-recompute the second. The first of --steps compiles.
--memory-gb caps the allocator, in 1e9 bytes.
torchrun --nproc-per-node N -m bench.step … gives each rank --prompts × --samples answers; the rates
are those of all ranks, which with --mean count as having drawn as many tokens as the first.

Needs: common.py, bench/rollout.py; rollout.py, train.py; tools/{budget,flags,memory,ranks,run}.py.
"""

import argparse
from types import SimpleNamespace

import torch

from bench import common
from bench.rollout import sample, stop_tokens
from rollout import Sampler
from tools import budget, memory, ranks
from tools.flags import Config
from tools.memory import PromptRows, micro_batches, prompt_groups
from tools.run import peak_memory_gb
from train import Experience, Trainer


def parse(arguments=None):
    sizes = dict(prompts=8, samples=8, prompt_length=128, new=1024, mean=0, micro_tokens=0, rank=32)
    parser = common.flags(__doc__, model_shape="7b", **sizes, steps=2, memory_gb=0.0)
    parser.add_argument("--quant", nargs="+", choices=common.QUANT, default=common.QUANT)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction)
    args = parser.parse_args(arguments)
    if args.mean >= args.new:
        parser.error(f"--mean {args.mean}: give less than --new {args.new}")
    return args


def main(arguments=None):
    args = parse(arguments)
    budget.grow_segments()
    common.DEVICE = ranks.join_ranks(common.DEVICE)
    rank, _ = ranks.rank_and_count()
    if args.memory_gb:
        budget.limit_memory(args.memory_gb)
    records = common.Records(None if rank else args.out, common.conditions())
    for quant in args.quant:
        measure(args, quant, records)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measure(args, quant, records):
    """Time --steps steps with one kind of weights, which are freed when this returns."""
    rank, count = ranks.rank_and_count()
    common.forget_peak()
    model = common.random_model(args.model_shape, quant, args.rank)
    trainer, update = updater(args, quant, model)
    sampler = Sampler(model)
    prompts = common.random_prompts(model, args.prompts, args.prompt_length)
    rows = args.prompts * args.samples
    stops = stop_tokens(model.config.vocab_size, args.mean, args.new) if args.mean else []
    for number in range(args.steps):
        ranks.all_sum(torch.zeros(1))  # a barrier: all ranks start together
        common.forget_peak()
        began = common.clock()
        sampled = sample(sampler, prompts, args.samples, args.new, stops, number, rank * rows)
        rollout_s = common.clock() - began
        rollout_peak_gb = peak_memory_gb()
        common.forget_peak()
        size = trainer.budget.size(prompt_groups(sampled, torch.arange(rows)))
        share = trainer.budget.share
        update_s = update(sampled)
        stats = sampler.stats
        answer_tokens = int(sampled.lengths.sum())  # of this rank; a prompt has --prompt-length
        asked = ("prompts", "samples", "prompt_length", "new", "mean", "rank")
        record = {name: getattr(args, name) for name in asked} | {
            "shape": args.model_shape,
            "weights": quant,
            "ranks": count,
            "micro_tokens": size.micro_tokens,
            "cap_gb": args.memory_gb,
            "automatic": not args.micro_tokens and args.recompute is None,
            "step": number,
            "mean_length": answer_tokens / rows,
            "longest": int(sampled.lengths.max()),
            "slots": stats["slots"],
            "pages": stats["pages"],
            "prefill": stats["prefill"],
            "recompute": size.recomputed,
            # the update ran out of memory, and began again
            "restarted": trainer.budget.share < share,
            "rollout_s": rollout_s,
            "rollout_tok_s": count * answer_tokens / rollout_s,
            "update_s": update_s,
            "update_tok_s": count * (answer_tokens + rows * args.prompt_length) / update_s,
            "step_s": rollout_s + update_s,
            "rollout_peak_gb": rollout_peak_gb,
            "update_peak_gb": peak_memory_gb(),
            "peak_gb": max(rollout_peak_gb, peak_memory_gb()),
        }
        # a plan is for answers of equal lengths
        records.append(record if args.mean else record | planned(record))


def planned(record):
    """→ what tools.memory plans for a record's step, in GB: {name: number}."""
    r = SimpleNamespace(**record)
    recomputed = None if r.recompute is True else int(r.recompute)  # True in logs of before
    group = PromptRows(r.prompt_length, dict.fromkeys(range(r.samples), r.new - 1))
    batches = micro_batches([group] * r.prompts, r.micro_tokens)
    plan = memory.plan(
        memory.config(r.shape),
        r.weights,
        r.rank,
        r.slots,
        r.prompt_length + r.new,
        max(batch.tokens for batch in batches),
        recomputed,
        r.prefill,
        r.pages,
        max(batch.shared_keys for batch in batches),
    )
    return dict(
        rollout_planned_gb=plan._replace(update=0).peak / 1e9,
        update_planned_gb=plan._replace(rollout=0).peak / 1e9,
        planned_gb=plan.peak / 1e9,
    )


def updater(args, quant, model):
    """→ a Trainer of the model, and a function that updates the model on a rollout → seconds."""
    config = Config(
        quant=quant,
        rank=args.rank,
        prompts=args.prompts,
        group_size=args.samples,
        lr=1e-6,
        max_new_tokens=args.new,
        micro_tokens=args.micro_tokens or None,
    )
    trainer = Trainer(config, model)
    if args.recompute is not None:
        trainer.budget.recomputed = len(model.layers) if args.recompute else 0
    advantages = torch.randn(args.prompts * args.samples, device=common.DEVICE)

    def update(sampled):
        began = common.clock()
        trainer.update(Experience(sampled, advantages, old=None), config.lr)
        return common.clock() - began

    return trainer, update


if __name__ == "__main__":
    main()
