"""The sampler on random weights: python -m bench.rollout --model-shape SHAPE --out FILE.jsonl

Decode steps alone (default), with LoRA of rank 32 at temperature 1: tokens a second, and their
share of the bound
    B / (max(bytes of the weights / 4.3 TB/s, 2 · B · weights / 790 TFLOP/s)
         + the same of lm_head
         + (bytes of adapters + B · context · bytes of a token's keys and values
            + 8 · B · V) / 4.3 TB/s)
(8: logits in fp32, written and read; a GPU with other rates: other constants). --new tokens of
--batch answers are timed at a mean --context, without prefill. Up to --samples answers share a
prompt, most of the context: L2 serves the prompt to all rows but the first, while the bound counts
it for each. --samples 1: nothing in common, as when answers are much longer than their prompts.

--whole: a whole rollout of 32 prompts × 16 samples by continuous batching, --batch answers at a
time, mean length 600, longest 2048; prefill included. --prompts, --prompt-length (0: 50 to 340
tokens), --mean and --limit change it, and --memory-gb caps PyTorch's memory, in 1e9 bytes.

Needs: common.py; rollout.py, tools/{budget,memory,run}.py.
"""

import math

import torch

from bench import common
from rollout import KV, Rollout, Sampler, SamplingParams, cached_bytes
from tools import budget, memory
from tools.run import peak_memory_gb


def main(arguments=None):
    steady_sizes = dict(context=1000, new=128)
    whole_sizes = dict(prompts=32, prompt_length=0, mean=600, limit=2048)
    sizes = dict(samples=16, **steady_sizes, **whole_sizes)
    parser = common.flags(__doc__, model_shape="7b", **sizes, memory_gb=0.0)
    parser.add_argument(
        "--batch", type=common.at_least(1), nargs="+", default=[8, 32, 64, 128, 256]
    )
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--quant", nargs="+", choices=common.QUANT, default=common.QUANT)
    parser.add_argument("--kv", choices=KV, default="bf16")
    args = parser.parse_args(arguments)
    for name, default in (steady_sizes if args.whole else whole_sizes).items():
        if getattr(args, name) != default:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            parser.error(f"{flag} has no use {'with' if args.whole else 'without'} --whole")
    if args.whole:
        check_whole(parser, args)
    elif args.context <= args.new // 2:
        parser.error(f"--context {args.context} must exceed half of --new {args.new}")
    else:
        longest = args.context - args.new // 2 + args.new
        check_context(parser, args, longest, "--context or --new")
    if args.memory_gb:
        budget.limit_memory(args.memory_gb)
    records = common.Records(args.out, common.conditions())
    for quant in args.quant:
        model = None  # free the previous model first
        model = common.random_model(args.model_shape, quant)
        for batch in args.batch:
            common.forget_peak()
            record = {"shape": args.model_shape, "weights": quant, "batch": batch, "kv": args.kv}
            if args.whole:
                sizes = {name: getattr(args, name) for name in ("samples", *whole_sizes)}
                record |= sizes | {"cap_gb": args.memory_gb}
                record |= whole(Sampler(model, batch, kv=args.kv), **sizes)
            else:
                record |= steady(model, quant, batch, args)
            records.append(record | {"peak_gb": peak_memory_gb()})


def check_whole(parser, args):
    """Refuse sizes of a whole rollout that cannot be."""
    if args.mean > args.limit:
        parser.error(f"--mean {args.mean} is above --limit {args.limit}")
    longest = max(prompt_lengths(args.prompts, args.prompt_length)) + args.limit
    check_context(parser, args, longest, "--prompt-length or --limit")


def check_context(parser, args, longest, flags):
    """Refuse rows of `longest` tokens, which come from these flags, if the model takes fewer."""
    most = memory.config(args.model_shape).max_position_embeddings
    if longest > most:
        parser.error(f"answers of {longest} tokens exceed the context of {most}: lower {flags}")


def steady(model, quant, batch, args):
    """Decode steps alone. With memory for fewer rows, the sampler decodes them in waves."""
    turn = decoding(model, batch, args.samples, args.context, args.new, args.kv)
    turn()  # compiles the kernels
    stats = turn()
    rate = batch * args.new / stats["decode_s"]
    return {
        "context": args.context,
        "samples": math.gcd(batch, args.samples),
        "slots": stats["slots"],
        "tok_s": rate,
        "ms_step": 1e3 * stats["decode_s"] / stats["steps"],
        "of_bound": rate / bound(model.config, quant, batch, args.context, args.kv),
    }


def decoding(model, batch, samples=16, context=1000, new=128, kv="bf16"):
    """→ a function that samples `new` tokens for each row and returns the sampler's statistics."""
    sampler = Sampler(model, slots=batch, kv=kv)
    group = math.gcd(batch, samples)
    prompts = common.random_prompts(model, batch // group, context - new // 2)

    def turn():
        sample(sampler, prompts, group, new)
        return sampler.stats

    return turn


def sample(
    sampler: Sampler,
    prompts: list[list[int]],
    samples: int,
    new: int,
    stops: list[int] = (),
    step: int = 0,
    first_sequence: int = 0,
) -> Rollout:
    """Sample answers at temperature 1, with `samples` of at most `new` tokens to each prompt. It is
    the only call of generate in bench/, so that turns.py can compare checkouts whose generate takes
    other arguments.
    """
    params = SamplingParams(max_new_tokens=new, stop_ids=list(stops))
    return sampler.generate(prompts, samples, params, step, first_sequence)


def bound(c, quant, batch, context, kv="bf16"):
    """Tokens a second that bytes and FLOPs allow, with nothing lost between kernels."""
    weights, adapters = 0, 0
    for parts, K in memory.linears(c).values():
        weights += c.num_hidden_layers * sum(parts) * K
        adapters += c.num_hidden_layers * common.RANK * (len(parts) * K + sum(parts))
    head = c.vocab_size * c.hidden_size

    def seconds(count, bytes_each):
        load = count * bytes_each / common.BYTES_PER_S
        return max(load, 2 * batch * count / common.FLOP_PER_S)

    linear = seconds(weights, 0.5625 if quant == "nvfp4" else 2) + seconds(head, 2)
    moved = 2 * adapters + batch * context * cached_bytes(c, kv) + 8 * batch * c.vocab_size
    return batch / (linear + moved / common.BYTES_PER_S)


def whole(sampler, **sizes):
    """A whole rollout: an answer that ends makes room for the next. sizes: as for sample_whole."""
    _, done, seconds = sample_whole(sampler, **sizes)
    lengths = done.lengths.tolist()
    return {
        "whole": True,
        "seconds": seconds,
        "tok_s": sum(lengths) / seconds,
        "mean_length": sum(lengths) / len(lengths),
        "longest": max(lengths),
    }


def stop_tokens(V, mean, limit):
    """→ tokens that end an answer of random weights after `mean` tokens on average, or at `limit`.

    Such weights draw nearly uniformly from a vocabulary of V tokens: with V / μ stop tokens,
    lengths are geometric, cut off at the limit, with mean μ (1 − exp(−limit/μ)).
    """
    mu = mean
    for _ in range(50):
        mu = mean / (1 - math.exp(-limit / mu))
    return torch.randperm(V)[: round(V / mu)].tolist()


def prompt_lengths(prompts, prompt_length):
    """→ tokens of each prompt: prompt_length, or 50 to 350 if that is 0 or None."""
    return [prompt_length or 50 + 300 * i // prompts for i in range(prompts)]


def sample_whole(sampler, prompts=32, samples=16, mean=600, limit=2048, prompt_length=None):
    """Sample a whole rollout → prompts, Rollout, seconds. One of short answers compiles before it.

    Prompts are as prompt_lengths says. mean, limit: as for stop_tokens.
    """
    V = sampler.model.config.vocab_size
    stops = stop_tokens(V, mean, limit)
    asked = []
    for length in prompt_lengths(prompts, prompt_length):
        asked += common.random_prompts(sampler.model, 1, length)
    # one token of 40 ends an answer, so slowly that kernels for all numbers of rows are loaded
    sample(sampler, asked, samples, min(limit, 512), range(0, V, 40))
    began = common.clock()
    done = sample(sampler, asked, samples, limit, stops, step=1)
    seconds = common.clock() - began
    return asked, done, seconds


if __name__ == "__main__":
    main()
