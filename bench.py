"""Measure: python bench.py gemm [--out results/gemm_bench.jsonl]. The last line of stdout is one JSON value.

gemm: y = x @ W.T of fp4_gemm.py against bf16 (cuBLAS), and its distance from the bound
    max(0.5625 · N · K bytes / 4.3 TB/s, 2 · M · N · K / 790 TFLOP/s)        (both rates measured on an H200)
A time is the median of 25 replays of a CUDA graph that walks over enough copies of the weight to spill L2.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gemm_args = commands.add_parser("gemm", help="the NVFP4 matrix product against bf16")
    gemm_args.add_argument("--out", help="append one JSON record per row to this file")
    gemm_args.add_argument("--shapes", help="only these, separated by commas", default="")
    gemm_args.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    gemm_args.set_defaults(run=gemm)
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
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
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


if __name__ == "__main__":
    main()
