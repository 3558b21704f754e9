"""Measure: python bench.py gemm|rollout [--out FILE.jsonl]. The last line of stdout is one JSON value.

gemm: y = x @ W.T of fp4_gemm.py against bf16 (cuBLAS), and its distance from the bound
    max(0.5625 · N · K bytes / 4.3 TB/s, 2 · M · N · K / 790 TFLOP/s)        (both rates measured on an H200)
A time is the median of 25 replays of a CUDA graph that walks over enough copies of the weight to spill L2.

rollout: steady decoding of a model of random weights, whose values do not matter to the speed, with LoRA of
rank 32 at temperature 1: tokens a second, and their share of the bound
    B / (bytes of weights, adapters and lm_head + B · context · bytes of a token's keys and values) · 4.3 TB/s
    or, where that is less, what 790 TFLOP/s allow the weights (a GPU with other rates: other constants)
hf is transformers' generate in bf16 without an adapter, on the same GPU.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from functools import partial

import torch

L2_BYTES, BYTES_PER_S, FLOP_PER_S = 60e6, 4.3e12, 790e12

# name: N of each part, K, rows M
DECODE = (1, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
SHAPES = {
    "7B gate_up": ((18944, 18944), 3584, DECODE),
    "32B gate_up": ((27648, 27648), 5120, DECODE),
    "7B down": ((3584,), 18944, DECODE),
    "32B down": ((5120,), 27648, DECODE),
    "7B qkv": ((3584, 512, 512), 3584, DECODE),
    "7B o": ((3584,), 3584, DECODE),
    "32B o": ((5120,), 5120, DECODE),
    "135M qkv": ((576, 192, 192), 576, (1, 8, 16)),
    "135M gate_up": ((1536, 1536), 576, (1, 8, 16)),
    "135M down": ((576,), 1536, (1, 8, 16)),
    "0.5B gate_up": ((4864, 4864), 896, (1, 8, 16)),
    "0.5B down": ((896,), 4864, (1, 8, 16)),
    "1.5B gate_up": ((8960, 8960), 1536, (1, 8, 16)),
    "3B gate_up": ((11008, 11008), 2048, (1, 8, 16)),
    "3B down": ((2048,), 11008, (1, 8, 16)),
    "14B gate_up": ((13824, 13824), 5120, (1, 8, 16)),
    "14B down": ((5120,), 13824, (1, 8, 16)),
    "72B gate_up": ((29568, 29568), 8192, (1, 8, 16)),
    "72B down": ((8192,), 29568, (1, 8, 16)),
}

# hidden, layers, query heads, key heads, width of the MLP, vocabulary, lm_head tied to the embeddings
MODELS = {
    "135m": (576, 30, 9, 3, 1536, 49152, True),            # SmolLM2; the others are Qwen2.5
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "3b": (2048, 36, 16, 2, 11008, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
    "14b": (5120, 48, 40, 8, 13824, 152064, False),
    "32b": (5120, 64, 40, 8, 27648, 152064, False),
    "72b": (8192, 80, 64, 8, 29568, 152064, False),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gemm_args = commands.add_parser("gemm", help="the NVFP4 matrix product against bf16")
    gemm_args.add_argument("--out", help="append one JSON record per row to this file")
    gemm_args.add_argument("--shapes", help="only these, separated by commas", default="")
    gemm_args.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    gemm_args.set_defaults(run=gemm)
    rollout_args = commands.add_parser("rollout", help="the sampler, and Hugging Face generate beside it")
    rollout_args.add_argument("--model-shape", choices=MODELS, default="7b")
    rollout_args.add_argument("--quant", default="nvfp4,bf16", help="of nvfp4, bf16, hf; separated by commas")
    rollout_args.add_argument("--batch", default="8,32,64,128,256", help="sequences at once, likewise")
    rollout_args.add_argument("--context", type=int, default=1000, help="mean length while it is timed")
    rollout_args.add_argument("--new", type=int, default=128, help="tokens that are timed")
    rollout_args.add_argument("--whole", action="store_true", help="32 prompts × 16 samples, mean length "
                              "600, longest 2048, in --batch slots, prefill and refill included")
    rollout_args.add_argument("--out", help="append one JSON record per row to this file")
    rollout_args.set_defaults(run=rollout)
    args = parser.parse_args()
    print(json.dumps(args.run(args)))


def conditions():
    import triton
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    # a machine without the repository is told by COMMIT which state it runs
    commit = os.environ.get("COMMIT") or git.stdout.strip() or "none"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "commit": commit}


def graph_time(calls, replays=25, at_least=16):
    """Seconds of one call, where `calls` are run one after the other, several rounds, in a CUDA graph."""
    calls = calls * math.ceil(at_least / len(calls))          # so that the start of the graph weighs little
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(times[3:])


def copies(nbytes):
    """How many weights of nbytes a graph walks over: at least 4, and twice the L2 cache."""
    return max(4, math.ceil(2 * L2_BYTES / nbytes))


def rel_err(y, ref):
    return ((y.double() - ref).norm() / ref.norm()).item()


# --- gemm

def random_packed(sizes, K):
    """A weight of random codes and of scales around 1; the global scale is a power of two, as ours are."""
    import fp4_gemm
    qs = [(torch.randint(0, 256, (n, K // 2), dtype=torch.uint8, device="cuda"),
           torch.randint(48, 64, (n, K // 16), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
           torch.tensor(2.**-6, device="cuda")) for n in sizes]
    return fp4_gemm.pack(*qs)


def clone(packed):
    import dataclasses
    return dataclasses.replace(packed, words=packed.words.clone(), scales=packed.scales.clone(),
                               counters=packed.counters.clone())


def gemm(args):
    import fp4_gemm
    if not torch.cuda.is_available():
        sys.exit("bench.py gemm needs a GPU")
    info = conditions()
    print(info)
    print(f"{'shape':>14} {'M':>5} {'bf16 µs':>9} {'ours µs':>9} {'LoRA µs':>9} {'bound µs':>9} "
          f"{'speed-up':>8} {'of bound':>8} {'LoRA/ours':>9}")
    records = []
    for name, (sizes, K, rows) in SHAPES.items():
        if args.shapes and name not in args.shapes.split(","):
            continue
        N, rank = sum(sizes), 32
        packed = random_packed(sizes, K)
        W = fp4_gemm.dequantize(packed)
        lora_A, lora_B = (torch.randn(s, device="cuda", dtype=torch.bfloat16) * s[1]**-.5
                          for s in ((len(sizes) * rank, K), (N, rank)))
        lora = (lora_A, lora_B, sizes, 1.)
        fours = [packed] + [clone(packed) for _ in range(copies(packed.words.nbytes) - 1)]
        dense = [W] + [W.clone() for _ in range(copies(W.nbytes) - 1)]
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
                us = {k: 1e6 * graph_time(c, at_least=16 if M < 2048 else 4) for k, c in calls.items()}
            us["bound"] = 1e6 * max(.5625 * N * K / BYTES_PER_S, 2 * M * N * K / FLOP_PER_S)
            speedup, of_bound = us["bf16"] / us["ours"], us["bound"] / us["ours"]
            records.append({"shape": name, "N": N, "K": K, "M": M, "speedup": speedup}
                           | {f"{kind}_us": t for kind, t in us.items()})
            print(f"{name:>14} {M:>5}", *(f"{us[kind]:9.1f}" for kind in ("bf16", "ours", "lora", "bound")),
                  f"{speedup:8.2f} {of_bound:8.2f} {us['lora'] / us['ours']:9.2f}",
                  f"  dx {us['dx']:.1f} µs, {us['dx_bf16'] / us['dx']:.2f}" if "dx" in us else "", flush=True)
        del fours, dense, exact, W
    if args.out:
        with open(args.out, "a") as f:
            f.writelines(json.dumps(info | r) + "\n" for r in records)
    return info | {"speedup": {f"{r['shape']} M={r['M']}": round(r["speedup"], 2) for r in records}}


def check_row(what, x, dy, packed, exact, lora):
    """Stop unless forward, forward with LoRA and dx agree with float64 to 2^-8; bf16 rounds to half."""
    import fp4_gemm
    lora_A, lora_B, sizes, _ = lora
    ref = x.double() @ exact.T
    xa = (x.double() @ lora_A.double().T).split(lora_B.shape[1], 1)
    parts = zip(xa, lora_B.double().split(sizes), strict=True)
    delta = torch.cat([a @ B.T for a, B in parts], 1)
    errors = {"forward": rel_err(fp4_gemm.linear(x, packed), ref),
              "lora": rel_err(fp4_gemm.linear(x, packed, lora=lora), ref + delta),
              "dx": rel_err(dx(dy, packed), dy.double() @ exact)}
    if not max(errors.values()) < 2**-8:
        sys.exit(f"{what}: wrong results are not timed: {errors}")


def dx(dy, packed):
    """The gradient of x as fp4_gemm's backward makes it."""
    import fp4_gemm
    return dy @ fp4_gemm.dequantize(packed)


# --- rollout

class RandomWeights:
    """A checkpoint.Source of any shape, made as it is read, on the GPU."""

    names = ()

    def __init__(self, shape):
        import transformers
        D, layers, H, Hkv, F_, V, tied = MODELS[shape]
        family = "Llama" if shape == "135m" else "Qwen2"
        self.config = getattr(transformers, f"{family}Config")(
            hidden_size=D, num_hidden_layers=layers, num_attention_heads=H, num_key_value_heads=Hkv,
            intermediate_size=F_, vocab_size=V, tie_word_embeddings=tied, max_position_embeddings=32768,
            architectures=[f"{family}ForCausalLM"])

    def tensor(self, name, shape):
        if "norm" in name:
            return torch.ones(shape, device="cuda")
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.5 * shape[-1]**-.5

    def finish(self):
        pass


def random_model(shape, quant):
    """Random weights and an adapter that is not zero. NVFP4 by round-to-nearest, the sooner to be there."""
    import lora
    import model
    decoder = model.Decoder(RandomWeights(shape), {"nvfp4": "rtn", "bf16": None}[quant], 32, 32,
                            torch.device("cuda"), torch.Generator().manual_seed(0))
    for layer in lora.lora_layers(decoder).values():
        torch.nn.init.normal_(layer.lora_B, std=0.01)
    lora.refresh(decoder)
    return decoder


def rollout_bound(shape, quant, batch, context):
    """Tokens a second that bytes and FLOPs allow, with nothing lost between kernels."""
    D, layers, H, Hkv, F_, V, _ = MODELS[shape]
    Dh = D // H
    parts = [(D, (H + 2 * Hkv) * Dh, 3), (H * Dh, D, 1), (D, 2 * F_, 2), (F_, D, 1)]          # K, N, LoRA's A
    weights = layers * sum(K * N for K, N, _ in parts)
    adapters = layers * sum(2 * 32 * (S * K + N) for K, N, S in parts)
    read = weights * (0.5625 if quant == "nvfp4" else 2) / BYTES_PER_S
    linear = max(read, 2 * batch * weights / FLOP_PER_S)
    head = max(2 * V * D / BYTES_PER_S, 2 * batch * V * D / FLOP_PER_S)
    cached = batch * context * 4 * layers * Hkv * Dh
    return batch / (linear + head + (adapters + cached + 8 * batch * V) / BYTES_PER_S)


def rollout(args):
    if not torch.cuda.is_available():
        sys.exit("bench.py rollout needs a GPU")
    info, shape, records = conditions(), args.model_shape, []
    print(info)
    print(f"{'model':>6} {'weights':>8} {'B':>4} {'tok/s':>8} {'ms/step':>8} {'of bound':>8} {'peak GB':>8}")
    prompt = torch.randint(MODELS[shape][5], (args.context - args.new // 2,)).tolist()
    for quant in args.quant.split(","):
        model = None                                       # the last one's memory first
        model = RandomWeights(shape) if quant == "hf" else random_model(shape, quant)
        if quant == "hf":
            import transformers
            build = transformers.AutoModelForCausalLM.from_config
            with torch.device("cuda"):
                model = build(model.config, dtype=torch.bfloat16).eval()
        for batch in map(int, args.batch.split(",")):
            record = {"shape": shape, "weights": quant, "batch": batch, "context": args.context}
            if args.whole:
                record |= whole_rollout(model, batch)
            else:
                torch.cuda.reset_peak_memory_stats()
                seconds, steps = (hf_decode if quant == "hf" else our_decode)(model, prompt, batch, args.new)
                rate = batch * steps / seconds
                record |= {"tok_s": rate, "ms_step": 1e3 * seconds / steps,
                           "of_bound": rate / rollout_bound(shape, quant, batch, args.context)}
            record["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            records.append(record)
            print(f"{shape:>6} {quant:>8} {batch:4} {record['tok_s']:8.0f} {record['ms_step']:8.2f} "
                  f"{record['of_bound']:8.2f} {record['peak_gb']:8.1f}", flush=True)
    if args.out:
        with open(args.out, "a") as f:
            f.writelines(json.dumps(info | r) + "\n" for r in records)
    return info | {"tok_s": {f"{shape} {r['weights']} B={r['batch']}": round(r["tok_s"]) for r in records}}


def whole_rollout(model, slots, prompts=32, samples=16, mean=600, limit=2048):
    """Prompts of 50 to 350 tokens. Random weights choose nearly uniformly among V tokens, so V / μ of them as
    stops give lengths that are geometric, cut off at the limit, with mean μ (1 − exp(−limit / μ))."""
    from rollout import Sampler
    V, mu = model.config.vocab_size, mean
    for _ in range(50):
        mu = mean / (1 - math.exp(-limit / mu))
    stops = torch.randperm(V)[:round(V / mu)].tolist()
    asked = [torch.randint(V, (50 + 300 * i // prompts,)).tolist() for i in range(prompts)]
    sampler = Sampler(model, slots=slots)
    sampler.generate(asked, samples, 16, 1.0, [], 0, 0)                # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    done = sampler.generate(asked, samples, limit, 1.0, stops, 0, 1)
    seconds, lengths = time.perf_counter() - began, done.lengths.double()
    return {"tok_s": lengths.sum().item() / seconds, "ms_step": 1e3 * seconds / sampler.stats["steps"],
            "of_bound": 0.0, "whole": True, "seconds": seconds, "mean_length": lengths.mean().item(),
            "longest": int(lengths.max()), "finished": done.finished.double().mean().item(),
            **sampler.stats}


def our_decode(model, prompt, batch, new):
    """Seconds and steps of decoding, without prefill, capture and compilation."""
    from rollout import Sampler
    sampler = Sampler(model, slots=batch)
    for _ in range(2):                                     # the first time the kernels are compiled
        sampler.generate([prompt], batch, new, 1.0, [], 0, 0)
    return sampler.stats["decode_s"], sampler.stats["steps"]


def hf_decode(model, prompt, batch, new, tokens=16):
    """The same of model.generate: the time of 2·tokens less that of `tokens`."""
    ids, seconds = torch.tensor([prompt] * batch, device="cuda"), []
    for count in (1, tokens, 2 * tokens):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=True, pad_token_id=0)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return seconds[2] - seconds[1], tokens


if __name__ == "__main__":
    main()
