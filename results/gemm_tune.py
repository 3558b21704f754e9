"""Choose TILES and SPLIT_K of fp4_gemm.py on one GPU: python results/gemm_tune.py OUT.jsonl [BENCH.jsonl]

With --small instead: weights that leave SMs without work, in every TILE_M, split in clusters; no winners are
chosen.
With --large instead: large weights or many rows in larger tiles, and decoded before cuBLAS; the same.
Every candidate is first compared with the product in float64 (relative error < 2^-8); a wrong one is logged,
not timed. Kernels are compiled beforehand, in parallel, into Triton's cache. With BENCH.jsonl, bench.py gemm
follows, with the winners in place.

Whole tiles in front of split ones (_tile's `whole`) are in --large; an entry in SPLIT_K switches them off.

gemm_splits.jsonl is the log behind SPLIT_K and the CTAs in TILES: every split, with and without LoRA (for
0.5B's qkv and o: turns.jsonl); "behind_us" is the time behind an ordinary kernel that writes x, as in a
model, that kernel included.
gemm_tma.jsonl is the same for the rows from 32 on, whose x comes by TMA since (--rows 32,64,128,256,512, nine
shapes; a step's two loads still stood apart): behind _tile's exception and what SPLIT_K has there no longer.
gemm_small.jsonl, of --small, is the log behind _tile's narrow tiles and clusters.
gemm_stages.jsonl, of --small --rows 8 (cut out of a run of all rows), is that behind five stages.
gemm_large.jsonl, of --large --rows 96,128,192,256,384,512,1024 on ten weights of the 3B to the 32B, is the
log behind _large_tile, clusters of large tiles, and waves of tiles on many rows; tile null: decoded before.
gemm_whole.jsonl, of --large --rows 32,64,128, is that behind the three pieces of a tile that is not whole.
gemm_direct.jsonl, of --large --rows 8, is that behind loading straight into registers for up to 8 rows. (A
tile's fifth number, the rows of W, is missing in older logs: 128 where TILE_M is 256, else 64; its sixth, a
cluster, means none.)
gemm_rotated.jsonl, of --rows 8, --rows 16 and --small --rows 64 on some shapes each, is behind SPLIT_K's 32B
and 14B down at 8: the first of the kernel whose fields rotate into place.
gemm_tiles.jsonl is the log behind the stages. gemm_rows.jsonl compares, also between the powers of two, the
kernel of commit 344a185 with the one that took these numbers. gemm_tiles_wide.jsonl is that of a sweep over
tiles of 64 to 256 rows and 128 or 256 columns, 2 to 8 warps, with the next kernel released early or not:
(64, 128), 4 warps and early release were within 5 % of the best on average, so the kernel has only them.
"""
import argparse
import contextlib
import io
import multiprocessing
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bench  # noqa: E402, I001
import fp4_gemm  # noqa: E402
import memory  # noqa: E402

STAGES = {8: (4, 6), 16: (4, 5, 6), 32: (3, 4), 64: (3, 4), 128: (2, 3)}


def wide_candidates(M, N, K):
    """(TILE_M, SPLIT_K, stages, whole=0, TILE_N=64, cluster): up to 14 splits, two steps a CTA or more, up to
    14 CTAs an SM (from 32 rows on 4); clusters where _tile has them."""
    tile_m = min(128, M)
    tiles = -(-N // 64) * -(-M // tile_m)
    most = max(1, min(14, K // 256, (14 if M < 32 else 4) * 132 // tiles))
    clusters = tile_m <= 32 and K < 64 * fp4_gemm.COLS
    return [(tile_m, split, s, 0, 64, clusters and split in (2, 4, 8) and tiles * split <= 3 * 132)
            for split in range(1, most + 1) for s in STAGES[tile_m]]


# name → sizes, K: the small weights of every model, each once, though 14B's are also 32B's
SMALL = {value: f"{model.upper()} {name}" for model in memory.MODELS
         for name, value in memory.linears(memory.config(model)).items()
         if sum(value[0]) * value[1] < 40e6 and value[1] < 64 * fp4_gemm.COLS}
SMALL = {name: (*value, ()) for value, name in SMALL.items()}


def narrow_candidates(M, N, K):
    """(TILE_M, SPLIT_K, stages, whole=0, TILE_N=64, cluster) of a small weight: every tile from an eighth of
    the rows on, at most 3 CTAs an SM."""
    return [(tile_m, split, stages, 0, 64, split > 1) for tile_m in (8, 16, 32, 64, 128)
            if M // 8 <= tile_m <= M for split in (1, 2, 4, 8) if split <= -(-K // 128)
            and -(-N // 64) * -(-M // tile_m) * split <= 3 * 132
            for stages in (3, 4, 5, 6) if stages == fp4_gemm.TILES[tile_m][2] or stages == 4 and tile_m == 64
            or stages == 5 and tile_m == 8 or stages == 6 and tile_m <= 16 and K >= 16 * 128 * split]


def large_candidates(M, N, K):
    """The same for a large weight or many rows: its tiles whole, split, also in clusters, or whole before
    split ones; from 129 rows on also tiles of 256. Up to 8 rows: into registers (stages = 1) or in 3 or 4."""
    if M <= 8:
        return [(8, split, stages, 0, 64, False) for stages in (1, 3, 4) for split in range(1, 15)
                if split <= K // 256 and -(-N // 64) * split <= 10 * 132]
    found = []
    wide = min(128, 1 << (M - 1).bit_length())
    for tile_m, rows in ((wide, 64), (wide // 2, 64), (256, 128)):
        if rows == 128 and (M <= 128 or N % 128) or tile_m < wide and M % wide == 0:
            continue
        tiles_n, columns, stages = -(-N // rows), -(-M // tile_m), fp4_gemm.TILES[tile_m][2]
        tiles, at_once = tiles_n * columns, 132 * (2 if rows == 64 else 1)
        found += [(tile_m, split, stages, 0, rows, False) for split in (1, 2, 3, 4)
                  if split == 1 or tiles * split <= 4 * 132]
        found += [(tile_m, split, stages, 0, rows, True) for split in (2, 3, 4)
                  if tile_m >= 64 and tiles * split <= at_once]
        if columns <= 2 and tiles > 132 and tiles % 132:
            found += [(tile_m, split, stages, (tiles - tiles % 132) // columns, rows, False)
                      for split in (2, 3, 4)]
    return found


def compile_one(job):
    M, tile, even_k, even_tiles, sizes = job
    tiles = max(2, tile[1])                  # the smallest K that specialises the kernel like the real one
    while (tiles % 16 == 0) != even_tiles:
        tiles += 1
    K = tiles * 128 - (0 if even_k else 64)
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    packed = bench.random_packed(sizes or (128 + 128 * tile[3],), K)
    fp4_gemm._fused(x, packed, None, *adapter(sizes, K), 1., tile=tile)
    torch.cuda.synchronize()


def adapter(sizes, K):
    """An adapter of rank 32; none for sizes ()."""
    return bench.random_adapter(sizes, K) if sizes else (None, None, ())


def decoded_before(x, packed, lora_A, lora_B, splits):
    """What fp4_gemm.linear does where the fused kernel is slower → y, in a tuple."""
    return fp4_gemm._Linear.apply(x, packed, None, lora_A, lora_B, splits, 1., None, True, None, None),


def install(stages, splits):
    fp4_gemm.TILES.update({tile_m: (*fp4_gemm.TILES[tile_m][:2], s) for tile_m, s in stages.items()})
    fp4_gemm.SPLIT_K.update(splits)


def warm_up(name, winners):
    install(*winners)
    with contextlib.redirect_stdout(io.StringIO()):
        bench.main(["gemm", "--check", "--shapes", name])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("bench", nargs="?")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--rows", type=bench.numbers, default="8,16,32,64,128,256",
                        help="8, 16, 32, 64 or at least 128: STAGES knows no other tiles")
    parser.add_argument("--shapes", help="only these, separated by commas")
    args = parser.parse_args()
    shapes = SMALL if args.small else SMALL | bench.SHAPES if args.large else bench.SHAPES
    if wrong := set(args.shapes.split(",") if args.shapes else ()) - set(shapes):
        parser.error(f"--shapes {', '.join(wrong)}: not one of {', '.join(shapes)}")
    log = bench.Records(args.out, {})
    began, show = time.time(), args.small or args.large
    candidates = narrow_candidates if args.small else large_candidates if args.large else wide_candidates
    rows = [(name, M) for name, (_, _, Ms) in shapes.items() if name in (args.shapes or name).split(",")
            for M in args.rows if len(Ms) > 3 or show or M <= 16]
    jobs = {(M, tile, K % 128 == 0, -(-K // 128) % 16 == 0, lora) for name, M in rows
            for sizes, K, _ in [shapes[name]] for tile in candidates(M, sum(sizes), K)
            for lora in ((), sizes)}
    pool = multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count()))
    pool.map(compile_one, sorted(jobs), chunksize=4)
    print(f"{len(jobs)} kernels compiled in {time.time() - began:.0f} s", flush=True)

    times = {}, {}                           # without and with LoRA
    for name, M in rows:
        sizes, K, _ = shapes[name]
        N, packed = sum(sizes), bench.random_packed(sizes, K)
        fours = bench.copies(packed, packed.words.nbytes)
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
        plain, lora = adapter((), K), adapter(sizes, K)
        ref = [x.double() @ fp4_gemm.dequantize(packed).double().T]
        ref.append(ref[0] + x.double() @ lora[0].double().T @ torch.block_diag(
            *lora[1].double().split(sizes)).T)
        calls = {(tile, with_lora): [partial(fp4_gemm._fused, x, p, None, *adapted, 1., tile=tile)
                                     for p in fours]
                 for tile in candidates(M, N, K) for with_lora, adapted in enumerate((plain, lora))}
        if args.large:
            calls |= {((), with_lora): [partial(decoded_before, x, p, *adapted) for p in fours]
                      for with_lora, adapted in enumerate((plain, lora))}
        errors = {key: bench.rel_err(runs[0]()[0], ref[key[1]]) for key, runs in calls.items()}
        seconds = bench.graph_times({key: runs for key, runs in calls.items() if errors[key] < 2**-8}, 9)
        for (tile, with_lora), error in errors.items():
            us = 1e6 * seconds[tile, with_lora] if (tile, with_lora) in seconds else None
            record = {"shape": name, "N": N, "K": K, "M": M, "tile": tile or None, "lora": bool(with_lora)}
            log.append(record | {"us": us, "error": error})
            times[with_lora][(N, K, M, *tile)] = us or float("inf")
    if show:
        for (N, K, M), t in ((key, t) for key in sorted({k[:3] for k in times[1]}) for t in times):
            found = sorted((us, k[3:]) for k, us in t.items() if k[:3] == (N, K, M))
            rule = fp4_gemm._tile(M, N, K, 132, 9, rank=32 * (t is times[1]))
            print((N, K, M), "LoRA " if t is times[1] else "plain", "rule", rule,
                  *(f"{tile}:{us:.1f}" for us, tile in found[:6]))
        return

    stages = {}
    for tile_m in sorted({k[3] for k in times[0]}):      # the number of stages that loses least on average
        plain = {k: us for k, us in times[0].items() if k[3] == tile_m}
        shapes = {k[:3] for k in plain}
        loss = {s: mean(min(us for k, us in plain.items() if k[:3] == shape and k[5] == s)
                        / min(us for k, us in plain.items() if k[:3] == shape) for shape in shapes)
                for s in STAGES[tile_m]}
        stages[tile_m] = min(loss, key=loss.get)
        print("TILE_M", tile_m, {s: round(v, 3) for s, v in loss.items()})
    splits = {}
    for N, K, M in sorted({k[:3] for k in times[0]}):
        plain, lora = ({k[4]: us for k, us in t.items() if k[:3] == (N, K, M) and k[5] == stages[k[3]]}
                       for t in times)
        splits.setdefault((N, K), {})[M] = min(plain, key=plain.get), min(lora, key=lora.get)
        print((N, K, M), *(f"{s}:{us:.1f}/{lora[s]:.1f}" for s, us in sorted(plain.items())),
              "→", splits[N, K][M])
    print("stages:", stages, "\nSPLIT_K =", splits, flush=True)
    if args.bench:
        pool.map(partial(warm_up, winners=(stages, splits)), bench.SHAPES, chunksize=1)
        print(f"ready to measure after {time.time() - began:.0f} s", flush=True)
        install(stages, splits)
        bench.main(["gemm", "--out", args.bench])


if __name__ == "__main__":
    main()
