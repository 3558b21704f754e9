"""Measure. `python bench.py gemm [--out results/gemm_bench.jsonl]`; the last line of stdout is one JSON document.

gemm: y = x @ W.T of fp4_gemm.py against bf16 (cuBLAS), and its distance from the bound
    max(0.5625 · N · K bytes / 4.3 TB/s, 2 · M · N · K / 790 TFLOP/s)        (both rates measured on an H200)
A time is the median of 25 replays of a CUDA graph that walks over as many copies of the weight as spill the L2 cache.
"""
import argparse
import json
import os
import math
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    """A weight of random codes, and scales around 1: every value of the format, global scale a power of two."""
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
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            ref = x.double() @ exact.T
            xa = (x.double() @ lora_A.double().T).split(rank, 1)
            with_lora = ref + torch.cat([a @ B.double().T for a, B in zip(xa, lora_B.split(sizes), strict=True)], 1)
            dy = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
            errors = {"forward": rel_err(fp4_gemm.linear(x, packed), ref),
                      "lora": rel_err(fp4_gemm.linear(x, packed, lora=lora), with_lora),
                      "dx": rel_err(dx(dy, packed), dy.double() @ exact)}
            del ref, with_lora
            # bf16's rounding of the result is below 2^-9 an element
            if max(errors.values()) >= 2**-8:
                sys.exit(f"{name}, M={M}: wrong results are not timed: {errors}")
            if args.check:
                continue
            with torch.no_grad():
                least = 16 if M < 2048 else 4
                times = {"bf16": graph_time([partial(torch.nn.functional.linear, x, w) for w in dense], at_least=least),
                         "ours": graph_time([partial(fp4_gemm.linear, x, p) for p in fours], at_least=least),
                         "lora": graph_time([partial(fp4_gemm.linear, x, p, lora=lora) for p in fours], at_least=least)}
                if M >= 2048:
                    times["dx bf16"] = graph_time([partial(torch.matmul, dy, w) for w in dense], at_least=least)
                    times["dx"] = graph_time([partial(dx, dy, p) for p in fours], at_least=least)
            bound = max(.5625 * N * K / BYTES_PER_S, 2 * M * N * K / FLOP_PER_S)
            record = {"shape": name, "N": N, "K": K, "M": M, "bound_us": bound * 1e6, "speedup": times["bf16"] / times["ours"],
                      **{f"{k} us".replace(" ", "_"): v * 1e6 for k, v in times.items()}, "errors": errors}
            records.append(record)
            line = (f"{name:>14} {M:>5} {times['bf16'] * 1e6:9.1f} {times['ours'] * 1e6:9.1f} {times['lora'] * 1e6:9.1f} "
                    f"{bound * 1e6:9.1f} {record['speedup']:8.2f} {bound / times['ours']:8.2f} "
                    f"{times['lora'] / times['ours']:9.2f}")
            if "dx" in times:
                line += f"   dx {times['dx'] * 1e6:.1f} µs, {times['dx bf16'] / times['dx']:.2f} of bf16"
            print(line, flush=True)
        del fours, dense, exact, W
    if args.out:
        with open(args.out, "a") as f:
            f.writelines(json.dumps(info | r) + "\n" for r in records)
    return info | {"speedup": {f"{r['shape']} M={r['M']}": round(r["speedup"], 2) for r in records}}


def dx(dy, packed):
    """The gradient of x as fp4_gemm's backward makes it."""
    import fp4_gemm
    return dy @ fp4_gemm.dequantize(packed)


if __name__ == "__main__":
    main()
