"""Measure: python results/bench.py gemm|rollout|step [--out FILE.jsonl]; the last line is one JSON value.

gemm: y = x @ W.T of fp4_gemm.py against bf16 (cuBLAS), and its distance from the bound
    max(0.5625 · N · K bytes / 4.3 TB/s, 2 · M · N · K / 790 TFLOP/s)        (both rates measured on an H200)
A time is the median of 25 replays of a CUDA graph that walks over enough copies of the weight to spill L2;
the graphs that are compared take turns.

rollout: steady decoding of a model of random weights, whose values do not matter to the speed, with LoRA of
rank 32 at temperature 1: tokens a second, and their share of the bound
    B / (max(bytes of the weights / 4.3 TB/s, 2 · B · weights / 790 TFLOP/s) + the same of lm_head
         + (bytes of adapters + B · context · bytes of a token's keys and values + 8 · B · V) / 4.3 TB/s)
    (8: logits in fp32, written and read; a GPU with other rates: other constants)
--samples rows share a prompt, most of the context: L2 serves the prompt to all rows but the first, while the
bound counts it for each. --samples 1: nothing in common, as when answers are much longer than their prompts.
hf is transformers' generate in bf16 on the same GPU, hf-lora has lora.py's plain lines at its projections.

step: whole GRPO steps of train.py on random weights: --prompts × --samples answers of --new tokens each, then
the update with random advantages and gradient checkpointing. --update-only makes answers up.
torchrun --nproc-per-node N results/bench.py step … gives each rank that many; the rates are those of all.
"""
import argparse
import copy
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))
import checkpoint
import fp4_gemm
import launch
import lora
import memory
import runs
import train
from model import load
from rollout import Rollout, Sampler, cached_bytes

L2_BYTES, BYTES_PER_S, FLOP_PER_S = 60e6, 4.3e12, 790e12
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"        # rollout and step run on both

# the products of each model that are timed, and with how many rows M of x
DECODE, FEW = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192), (1, 8, 16)
BETWEEN = 48, 96, 192                  # rows that do not fill a tile, whose sizes are powers of two
TIMED = {"7b": ("gate_up down qkv o", sorted(DECODE + BETWEEN)), "32b": ("gate_up down o", DECODE),
         "135m": ("qkv o gate_up down", DECODE[:8]), "0.5b": ("gate_up down", DECODE[:8]),
         "1.5b": ("gate_up", FEW), "3b": ("gate_up down", FEW), "14b": ("gate_up down", FEW),
         "72b": ("gate_up down", FEW)}
SHAPES = {f"{model.upper()} {name}": (*memory.linears(memory.config(model))[name], rows)  # N of parts, K, M
          for model, (names, rows) in TIMED.items() for name in names.split()}


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gemm_args = commands.add_parser("gemm", help="the NVFP4 matrix product against bf16")
    gemm_args.add_argument("--shapes", help="only these, separated by commas", default="")
    gemm_args.add_argument("--rows", type=numbers, help="only these numbers of rows of x", default=())
    gemm_args.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    rollout_args = commands.add_parser("rollout", help="the sampler, and Hugging Face generate beside it")
    rollout_args.add_argument("--batch", type=numbers, default="8,32,64,128,256",
                              help="sequences at once, separated by commas")
    rollout_args.add_argument("--context", type=int, default=1000, help="mean length while it is timed")
    rollout_args.add_argument("--new", type=int, default=128, help="tokens that are timed")
    rollout_args.add_argument("--samples", type=int, default=16, help="sequences of one prompt (all of a "
                              "smaller batch; with --whole always 16)")
    rollout_args.add_argument("--whole", action="store_true", help="32 prompts × 16 samples, mean length "
                              "600, longest 2048, in --batch slots, prefill and refill included")
    step_args = commands.add_parser("step", help="rollout and update of one training step")
    step_args.add_argument("--prompts", type=int, default=8)
    step_args.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    step_args.add_argument("--prompt-length", type=int, default=128)
    step_args.add_argument("--new", type=int, default=1024, help="tokens of each answer")
    step_args.add_argument("--micro-tokens", type=int, default=2560)
    step_args.add_argument("--rank", type=int, default=32, help="of the LoRA")
    step_args.add_argument("--steps", type=int, default=2)
    step_args.add_argument("--memory-gb", type=float, default=0, help="cap of the allocator, in 1e9 bytes")
    step_args.add_argument("--update-only", action="store_true")
    for command, run in ((gemm_args, gemm), (rollout_args, rollout), (step_args, step)):
        command.add_argument("--out", help="append one JSON record per row to this file")
        command.set_defaults(run=run)
        if run is not gemm:
            command.add_argument("--model-shape", choices=memory.MODELS, default="7b")
            command.add_argument("--quant", default="nvfp4,bf16", help="of nvfp4, bf16; rollout: hf, hf-lora")
    args = parser.parse_args(arguments)
    if args.run is gemm and not torch.cuda.is_available():
        sys.exit("bench.py gemm needs a GPU")
    if args.run is step and args.memory_gb and DEVICE == "cpu":
        sys.exit(f"--memory-gb {args.memory_gb:g} caps a GPU's allocator, and there is no GPU")
    kinds = {"nvfp4", "bf16"} | ({"hf", "hf-lora"} if args.run is rollout and not args.whole else set())
    if args.run is not gemm and not set(args.quant.split(",")) <= kinds:
        sys.exit(f"--quant {args.quant}: of {', '.join(sorted(kinds))}, separated by commas")
    info, first = conditions(), os.environ.get("RANK", "0") == "0"
    print(info)
    summary = args.run(args, Records(args.out if first else None, info))
    if first:
        print(json.dumps(info | summary))


class Records(list):
    """The measurements. Each is written to the file, with its conditions, before the next one starts."""

    def __init__(self, path, info):
        super().__init__()
        try:
            self.info, self.file = info, open(path, "a", buffering=1) if path else None
        except OSError as error:
            sys.exit(f"--out {path}: {error.strerror}")

    def append(self, record):
        super().append(record)
        if self.file:
            self.file.write(json.dumps(self.info | record) + "\n")


def numbers(text):
    return [int(n) for n in text.split(",")]


def conditions():
    query = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = "cpu" if DEVICE == "cpu" else subprocess.run(query, capture_output=True, text=True).stdout.strip()
    # on a machine without the repository, the variable COMMIT names the commit that runs
    commit = os.environ.get("COMMIT")
    if not commit and shutil.which("git"):
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                                cwd=Path(__file__).resolve().parent).stdout.strip()
    triton = getattr(getattr(fp4_gemm, "triton", None), "__version__", "none")
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton, "commit": commit or "none"}


def graph_times(kinds, replays=25, at_least=16):
    """kinds: name → calls. → name → seconds of one call. A CUDA graph replays each kind's calls several times
    in a row. The graphs alternate, because a GPU at its power limit slows down within a second."""
    graphs, times = {}, {name: [] for name in kinds}
    for name, calls in kinds.items():
        calls = calls * math.ceil(at_least / len(calls))      # so that the start of the graph weighs little
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graphs[name] = graph, len(calls)
    for _ in range(replays + 3):
        for name, (graph, count) in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3 / count)
    return {name: statistics.median(t[3:]) for name, t in times.items()}


def copies(weight, nbytes):
    """The weight and copies of it for a graph to walk over: at least 4, and twice the L2 cache."""
    return [weight] + [copy.deepcopy(weight) for _ in range(max(4, math.ceil(2 * L2_BYTES / nbytes)) - 1)]


def rel_err(y, ref):
    return ((y.double() - ref).norm() / ref.norm()).item()


# --- gemm

def random_packed(sizes, K):
    """A weight of random codes and of scales around 1; the global scale is a power of two, as ours are."""
    qs = [(torch.randint(0, 256, (n, K // 2), dtype=torch.uint8, device="cuda"),
           torch.randint(48, 64, (n, K // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
           torch.tensor(2.**-6, device="cuda")) for n in sizes]
    return fp4_gemm.pack(*qs)


def random_adapter(sizes, K, rank=32):
    """A, B and splits, as fp4_gemm.linear takes them."""
    A, B = (torch.randn(s, device="cuda", dtype=torch.bfloat16) * s[1]**-.5
            for s in ((len(sizes) * rank, K), (sum(sizes), rank)))
    return A, B, sizes


def gemm(args, records):
    names = args.shapes.split(",") if args.shapes else SHAPES
    asked = {name: (sizes, K, [M for M in rows if M in args.rows or not args.rows])
             for name, (sizes, K, rows) in SHAPES.items() if name in names}
    if not (set(names) <= set(SHAPES) and any(rows for *_, rows in asked.values())):
        sys.exit(f"--shapes '{args.shapes}' --rows {args.rows}: not in the table of {', '.join(SHAPES)}")
    print(f"{'shape':>14} {'M':>5} {'bf16 µs':>9} {'ours µs':>9} {'LoRA µs':>9} {'bound µs':>9} "
          f"{'speed-up':>8} {'of bound':>8} {'LoRA/ours':>9}")
    for name, (sizes, K, rows) in asked.items():
        N, packed = sum(sizes), random_packed(sizes, K)
        W = fp4_gemm.dequantize(packed)
        lora = (*random_adapter(sizes, K), 1.)
        fours = copies(packed, packed.words.nbytes)
        dense = copies(W, W.nbytes)
        exact = W.double()
        for M in rows:
            x, dy = (torch.randn(M, n, device="cuda", dtype=torch.bfloat16) for n in (K, N))
            check_row(f"{name}, M={M}", x, dy, packed, exact, lora)
            if args.check:
                continue
            with torch.no_grad():
                calls = {"bf16": [partial(torch.nn.functional.linear, x, w) for w in dense],
                         "ours": [partial(fp4_gemm.linear, x, p) for p in fours],
                         "lora": [partial(fp4_gemm.linear, x, p, lora=lora) for p in fours]}
                if M >= 2048:
                    calls |= {"dx_bf16": [partial(torch.matmul, dy, w) for w in dense],
                              "dx": [partial(dx, dy, p) for p in fours]}
                seconds = graph_times(calls, at_least=16 if M < 2048 else 4)
                us = {kind: 1e6 * s for kind, s in seconds.items()}
            us["bound"] = 1e6 * max(.5625 * N * K / BYTES_PER_S, 2 * M * N * K / FLOP_PER_S)
            speedup, of_bound = us["bf16"] / us["ours"], us["bound"] / us["ours"]
            records.append({"shape": name, "N": N, "K": K, "M": M, "speedup": speedup}
                           | {f"{kind}_us": t for kind, t in us.items()})
            print(f"{name:>14} {M:>5}", *(f"{us[kind]:9.1f}" for kind in ("bf16", "ours", "lora", "bound")),
                  f"{speedup:8.2f} {of_bound:8.2f} {us['lora'] / us['ours']:9.2f}",
                  f"  dx {us['dx']:.1f} µs, {us['dx_bf16'] / us['dx']:.2f}" if "dx" in us else "", flush=True)
        del fours, dense, exact, W
    return {"speedup": {f"{r['shape']} M={r['M']}": round(r["speedup"], 2) for r in records}}


def check_row(what, x, dy, packed, exact, lora):
    """Stop unless forward, forward with LoRA and dx agree with float64 to 2^-8, twice bf16's rounding."""
    ref, (A, B, sizes, _) = x.double() @ exact.T, lora
    adapted = ref + x.double() @ A.double().T @ torch.block_diag(*B.double().split(sizes)).T
    errors = {"forward": rel_err(fp4_gemm.linear(x, packed), ref),
              "lora": rel_err(fp4_gemm.linear(x, packed, lora=lora), adapted),
              "dx": rel_err(dx(dy, packed), dy.double() @ exact)}
    if not max(errors.values()) < 2**-8:
        sys.exit(f"{what}: wrong results are not timed: {errors}")


def dx(dy, packed):
    """The gradient of x as fp4_gemm's backward makes it."""
    return dy @ fp4_gemm.dequantize(packed)


# --- rollout

class RandomWeights(checkpoint.Source):
    """A checkpoint of a shape, each tensor made where and when it is read."""

    unread = set()

    def __init__(self, shape):
        self.config = memory.config(shape)

    def tensor(self, name, shape):
        if "norm" in name:
            return torch.ones(shape, device=DEVICE)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).mul_(0.5 * shape[-1]**-.5)


def random_model(shape, quant, rank=32):
    """Random weights and an adapter that is not zero. NVFP4 by round-to-nearest, the fastest to load."""
    decoder = load(RandomWeights(shape), "rtn" if quant == "nvfp4" else quant, rank, 32, DEVICE)
    for layer in lora.lora_layers(decoder).values():
        torch.nn.init.normal_(layer.lora_B, std=0.01)
    lora.refresh(decoder)
    return decoder


def clock():
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def forget_peak():
    if DEVICE != "cpu":
        torch.cuda.reset_peak_memory_stats()


def rollout_bound(c, quant, batch, context):
    """Tokens a second that bytes and FLOPs allow, with nothing lost between kernels."""
    D, L, V = c.hidden_size, c.num_hidden_layers, c.vocab_size
    weights = L * sum(sum(parts) * K for parts, K in memory.linears(c).values())
    adapters = L * sum(2 * 32 * (len(parts) * K + sum(parts)) for parts, K in memory.linears(c).values())
    read = weights * (0.5625 if quant == "nvfp4" else 2) / BYTES_PER_S
    linear = max(read, 2 * batch * weights / FLOP_PER_S)
    head = max(2 * V * D / BYTES_PER_S, 2 * batch * V * D / FLOP_PER_S)
    cached = batch * context * cached_bytes(c)
    return batch / (linear + head + (adapters + cached + 8 * batch * V) / BYTES_PER_S)


def rollout(args, records):
    odd = [b for b in args.batch if not args.whole and (min(args.samples, b) < 1 or b % min(args.samples, b))]
    if odd:
        sys.exit(f"--batch {odd[0]} must be a multiple of --samples {args.samples}, or less; both at least 1")
    if not args.whole and args.context <= args.new // 2:
        sys.exit(f"--context {args.context} must be more than half of --new {args.new}")
    print(f"{'model':>6} {'weights':>8} {'B':>4} {'tok/s':>8} {'ms/step':>8} {'of bound':>8} {'peak GB':>8} "
          f"{'slots':>5}")
    shape, c = args.model_shape, memory.config(args.model_shape)
    for quant in args.quant.split(","):
        model = None                                       # free the previous model first
        model, decode = ((hf_model(c, quant == "hf-lora"), hf_decode) if quant in ("hf", "hf-lora")
                         else (random_model(shape, quant), our_decode))
        for batch in args.batch:
            forget_peak()
            if args.whole:
                tokens, seconds, steps, more = whole_rollout(model, batch)
            else:
                group, length = min(args.samples, batch), args.context - args.new // 2
                prompts = torch.randint(c.vocab_size, (batch // group, length)).tolist()
                tokens, seconds, steps, slots = decode(model, prompts, group, args.new)
                bound = rollout_bound(c, quant, batch, args.context)
                more = {"context": args.context, "samples": group, "slots": slots,
                        "of_bound": tokens / seconds / bound}
            r = {"shape": shape, "weights": quant, "batch": batch, "tok_s": tokens / seconds,
                 "ms_step": 1e3 * seconds / steps, "peak_gb": runs.peak_memory_gb(), **more}
            print(f"{shape:>6} {quant:>8} {batch:4} {r['tok_s']:8.0f} {r['ms_step']:8.2f} "
                  f"{r.get('of_bound', math.nan):8.2f} {r['peak_gb']:8.1f} {r['slots']:5}", flush=True)
            records.append(r)
    return {"tok_s": {f"{shape} {r['weights']} B={r['batch']}": round(r["tok_s"]) for r in records}}


def our_decode(model, prompts, group, new):
    """Tokens, seconds and steps of decoding, without prefill, capture and compilation, and the slots that fit
    in memory: with fewer slots than rows, the sampler decodes the rows in waves."""
    sampler = Sampler(model, slots=len(prompts) * group)
    for _ in range(2):                                     # the first call compiles the kernels
        tokens = sampler.generate(prompts, group, new, 1.0, [], 0, 0).lengths.sum().item()
    return tokens, *(sampler.stats[name] for name in ("decode_s", "steps", "slots"))


def whole_work(V, prompts=32, samples=16, mean=600, limit=2048):
    """The arguments of Sampler.generate for a whole rollout: prompts of 50 to 340 of V tokens. Random weights
    draw nearly uniformly: with V / μ stop tokens, lengths are geometric, cut off at the limit, with mean
    μ (1 − exp(−limit / μ))."""
    mu = mean
    for _ in range(50):
        mu = mean / (1 - math.exp(-limit / mu))
    stops = torch.randperm(V)[:round(V / mu)].tolist()
    asked = [torch.randint(V, (50 + 300 * i // prompts,)).tolist() for i in range(prompts)]
    return asked, samples, limit, 1.0, stops, 0, 1


def second_of_two(sampler, work):
    """Sample twice, as the first call compiles the kernels → the second Rollout, and its seconds."""
    for _ in range(2):
        began = clock()
        done = sampler.generate(*work)
        seconds = clock() - began
    return done, seconds


def whole_rollout(model, slots, **work):
    sampler = Sampler(model, slots=slots)
    done, seconds = second_of_two(sampler, whole_work(model.config.vocab_size, **work))
    lengths = done.lengths.double()
    return lengths.sum().item(), seconds, sampler.stats["steps"], {
        "whole": True, "seconds": seconds, "mean_length": lengths.mean().item(),
        "longest": int(lengths.max()), "finished": done.finished.double().mean().item(), **sampler.stats}


def hf_model(c, adapted=False):
    with torch.device(DEVICE):
        # unlike from_pretrained, from_config leaves the model in training mode
        model = transformers.AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16).eval()
    for name, linear in list(model.named_modules()) if adapted else ():
        if name.endswith("_proj"):
            model.set_submodule(name, lora.LoRALinear(linear, 32, 32, device=DEVICE).to(torch.bfloat16))
    return model


def hf_decode(model, prompts, group, new, most=32):
    """As our_decode, for model.generate: the time of 2 + n tokens (n ≤ `most`) less that of 2, once warm."""
    ids = torch.tensor(prompts, device=DEVICE).repeat_interleave(group, 0)
    seconds, tokens = [], min(most, new)
    for count in (2, 2, 2 + tokens):                       # the warm-up decodes too, to load its kernels
        began = clock()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=True, pad_token_id=0)
        seconds.append(clock() - began)
    return len(ids) * tokens, seconds[2] - seconds[1], tokens, len(ids)


# --- step

def step(args, records):
    global DEVICE
    DEVICE = launch.join_ranks(DEVICE)
    rank, ranks = launch.rank_and_count()
    if args.memory_gb:
        torch.cuda.set_per_process_memory_fraction(args.memory_gb * 1e9 / torch.cuda.mem_get_info()[1])
    print(f"{'model':>6} {'weights':>8} {'step':>4} {'rollout s':>9} {'tok/s':>8} {'update s':>9} "
          f"{'tok/s':>8} {'peak GB':>8} {'planned':>8}")
    shape, c = args.model_shape, memory.config(args.model_shape)
    B, length = args.prompts * args.samples, args.prompt_length + args.new
    prompts = torch.randint(c.vocab_size, (args.prompts, args.prompt_length)).tolist()
    for quant in args.quant.split(","):
        model = sampler = optimizer = None                 # free the previous model first
        forget_peak()
        model = random_model(shape, quant, args.rank)
        model.gradient_checkpointing = True
        config = train.Config(quant=quant, rank=args.rank, prompts=args.prompts, group_size=args.samples,
                              lr=1e-6, max_new_tokens=args.new, micro_tokens=max(args.micro_tokens, length),
                              gradient_checkpointing=True)
        sampler, optimizer = Sampler(model), train.adamw(config, model)
        for number in range(args.steps):
            launch.all_sum(torch.zeros(1))                  # a barrier: all ranks start together
            began = clock()
            if args.update_only:
                sampled = made_up(prompts, args.samples, args.new, c.vocab_size)
            else:
                sampled = sampler.generate(prompts, args.samples, args.new, 1.0, [], 0, number, rank * B)
            middle = clock()
            train.update(config, model, optimizer, sampled, torch.randn(B, device=DEVICE))
            rollout_s, update_s = middle - began, clock() - middle
            slots = sampler.stats["slots"]
            planned = memory.plan_of(config, c, slots, length, sampler.stats["prefill"]).peak / 1e9
            records.append({
                "shape": shape, "weights": quant, "ranks": ranks, "prompts": args.prompts,
                "samples": args.samples, "prompt_length": args.prompt_length, "new": args.new,
                "micro_tokens": config.micro_tokens, "rank": args.rank, "cap_gb": args.memory_gb,
                "update_only": args.update_only, "step": number, "slots": slots, "rollout_s": rollout_s,
                "rollout_tok_s": ranks * B * args.new / rollout_s, "update_s": update_s,
                "update_tok_s": ranks * B * length / update_s, "step_s": rollout_s + update_s,
                "peak_gb": runs.peak_memory_gb(), "planned_gb": planned})
            print(f"{shape:>6} {quant:>8} {number:>4} {rollout_s:9.2f} {records[-1]['rollout_tok_s']:8.0f} "
                  f"{update_s:9.2f} {records[-1]['update_tok_s']:8.0f} {records[-1]['peak_gb']:8.1f} "
                  f"{planned:8.1f}", flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()
    return {"seconds": {f"{shape} {r['weights']} step {r['step']}":
                        [round(r[k], 2) for k in ("rollout_s", "update_s")] for r in records}}


def made_up(prompts, samples, new, V):
    """A rollout of random tokens."""
    tokens = torch.tensor(prompts, device=DEVICE).repeat_interleave(samples, 0)
    B, P = tokens.shape
    tokens = torch.cat([tokens, torch.randint(V, (B, new), device=DEVICE)], 1)
    lengths = torch.full((B,), new, device=DEVICE)
    return Rollout(tokens, torch.full(tokens.shape, -math.log(V), device=DEVICE), lengths, lengths > 0,
                   torch.full((B,), P, device=DEVICE))


if __name__ == "__main__":
    main(sys.argv[1:])
