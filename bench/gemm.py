"""The NVFP4 matrix product of fp4_gemm.py against bf16: python -m bench.gemm --out FILE.jsonl

The products of each model's layer are checked against float64, without and with LoRA of rank 32,
then timed in turns with cuBLAS in bf16. A record has the three times and the bound
    max(0.5625 · N · K bytes / 4.3 TB/s, 2 · M · N · K / 790 TFLOP/s)   (rates of an H200)
A time is the median of 25 replays of a CUDA graph that walks over enough copies of the weight to
spill L2.

Needs: a GPU; common.py; fp4_gemm.py, lora.py, nvfp4.py, tools/memory.py.
"""

import copy
import math
import sys
from functools import partial

import torch

import fp4_gemm
import nvfp4
from bench import common
from lora import LowRank
from tools import memory

L2_BYTES = 60e6
# with how many rows M of x each model's products are timed; 48, 96 and 192 are no powers of two
MANY = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 2048, 8192)
FEW = (1, 8, 16)
TIMED = {"7b": MANY, "32b": MANY, "135m": MANY[:11], "0.5b": MANY[:11]}
TIMED |= dict.fromkeys(("1.5b", "3b", "14b", "72b"), FEW)


def main(arguments=None):
    parser = common.flags(__doc__)
    parser.add_argument("--models", nargs="+", choices=TIMED, default=TIMED)
    parser.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    args = parser.parse_args(arguments)
    if common.DEVICE == "cpu":
        parser.error("the kernel needs a GPU, and there is none")
    records = common.Records(args.out, common.conditions())
    for model in args.models:
        for name, (parts, K) in memory.linears(memory.config(model)).items():
            measure(f"{model.upper()} {name}", parts, K, TIMED[model], args.check, records)


def measure(name, parts, K, rows, only_check, records):
    """Check a product with each number of rows, time it and append a record."""
    N = sum(parts)
    fours = [nvfp4.quantize(random_matrix(n, K), "rtn") for n in parts]
    W = torch.cat([nvfp4.dequantize(q, torch.bfloat16) for q in fours])
    exact = W.double()
    packed = fp4_gemm.pack(*fours)
    A, B = random_matrix(len(parts) * common.RANK, K), random_matrix(N, common.RANK)
    adapter = LowRank(A, B, parts, 1.0)
    packs = copies(packed, packed.words.nbytes)
    dense = copies(W, W.nbytes)
    for M in rows:
        x = random_matrix(M, K)
        check(f"{name}, M={M}", x, packed, exact, adapter)
        if only_check:
            continue
        calls = {
            "bf16": [partial(torch.nn.functional.linear, x, w) for w in dense],
            "ours": [partial(fp4_gemm.product, x, p) for p in packs],
            "lora": [partial(fp4_gemm.product, x, p, low_rank=adapter) for p in packs],
        }
        with torch.no_grad():
            seconds = common.graph_times(calls)
        speedup = seconds["bf16"] / seconds["ours"]
        load = 0.5625 * N * K / common.BYTES_PER_S
        seconds["bound"] = max(load, 2 * M * N * K / common.FLOP_PER_S)
        us = {f"{kind}_us": 1e6 * s for kind, s in seconds.items()}
        records.append({"shape": name, "N": N, "K": K, "M": M, "speedup": speedup} | us)


def random_matrix(rows, columns):
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    return x * columns**-0.5


def copies(weight, nbytes):
    """The weight and copies of it for a graph to walk over: at least 4, and twice the L2 cache."""
    count = max(4, math.ceil(2 * L2_BYTES / nbytes))
    return [weight] + [copy.deepcopy(weight) for _ in range(count - 1)]


def check(what, x, packed, exact, adapter):
    """Exit unless y, without and with LoRA, is within 2⁻⁸ of float64, in the norm of all of y."""
    plain = x.double() @ exact.T
    B = torch.block_diag(*adapter.B.double().split(adapter.splits))
    adapted = plain + x.double() @ adapter.A.double().T @ B.T
    for kind, low_rank, exact_y in ("plain", None, plain), ("with LoRA", adapter, adapted):
        y, _ = fp4_gemm.product(x, packed, low_rank=low_rank)
        error = (y.double() - exact_y).norm() / exact_y.norm()
        if not error < 2**-8:
            sys.exit(f"{what}, {kind}: wrong by {error:.1e}; wrong results are not timed")


if __name__ == "__main__":
    main()
