"""y = x @ W.T and dx = dy @ W for a weight that stays in NVFP4: stored in 4.5 bits, multiplied as
bf16.

    W[n, k] = E2M1[code[n, k]] · block_scale[n, k // 16] · global_scale[n]

With few rows in x, as in a decode step, a linear layer takes as long as its weights take to load. A
weight is .5625 bytes here and 2 in bf16, so a speedup of 3.56 is the bound. To approach it the
kernel must decode a weight in few instructions: an H200's threads execute about four in the time
that one weight takes to arrive.

1. The packed word: an int32 holds 8 codes, placed so that masks and rotations turn them into bf16.
A bf16 is s eeeeeeee mmmmmmm; a code is s ee m with exponent bias 1, and ee = 0 encodes 0 or ½. A
bf16 with s in bit 15, eem in bits 8..6 and zeros elsewhere is value · 2^-126 exactly; ½ is
subnormal. Each half word holds 4 codes, one from each quarter ("sub-tile") of 128 columns. Code 0
lies in these bits. A rotation right by 3 moves code 1 there, by 6 code 2; s1 and s2 are those of
the other half word. Code 3 (marked ') fills the bits left:

    bit    15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
           s0  e2  e2  m2  e1  e1  m1  e0  e0  m0  s2  m'  s'  s1  e'  e'

2. The decode: eight integer instructions (>> is a rotation; masks are hex) turn a word into four
pairs of bf16, one pair a sub-tile. Word j holds columns 2j, 2j + 1 of each sub-tile: a tensor core
takes k in pairs.

    t0 = w & 81C081C0   t1 = w >> 3 & 81C081C0   t2 = w >> 6 & 81C081C0    instructions: 1 + 2 + 2
    t3 = (w & 001B001B) · (2^12 + 2^7 + 2^2) & 81C081C0    three copies that never overlap      + 3

A block scale, (1 + m/8) · 2^e in e4m3, is stored as the byte (e + 9) << 3 | m: five exponent bits
cover its subnormals. In bits 11..4, ORed with hex 7000, it is the bf16 scale · 2^106. Then t ·
scale is value · scale · 2^-20, exact in bf16's 8 significant bits: it needs 6. The epilogue
multiplies by 2^20 · global_scale.

3. The kernel computes y.T = W @ x.T: a tensor core's tile has 16 rows or more, which weights always
fill, and only 8 columns for the few rows of x. A small W has too few tiles to fill a GPU, so
several CTAs share a tile and each sums a range of k (split-K). The last to finish adds their sums
in a fixed order: timing does not change the result. LoRA: a kernel computes xa = scale · x @ A.T,
and the epilogue adds xa @ B.T. With PDL (programmatic dependent launch, from Hopper on) a kernel
loads weights while its predecessor still runs. With many rows, and in backward, arithmetic is the
bound: W is decoded to bf16 for one cuBLAS call.

Left out: 4-bit activations (Hopper's tensor cores have no FP4), experts. Needs: torch; on a GPU
triton ≥ 3.6.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # the CPU path needs no triton
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

BLOCK = 16  # weights that share a scale
ROWS, COLS = 64, 128  # weights of a stored tile: 4 KB of words and 512 B of scales, each contiguous
FUSED_MAX = 256  # rows of x; above, decode W once for cuBLAS, not again in each tile of x
# a kernel argument: with it in a register, ptxas fuses AND and OR into one LOP3
EXPONENT = 0x70007000


class PackedNVFP4(NamedTuple):
    """Weights (N_i, K), joined along N, in the kernels' words; N and K are padded to whole tiles of
    zeros.
    """

    words: torch.Tensor  # (N/64, K/128, 64, 16) int32, 8 codes each
    scales: torch.Tensor  # (N/64, K/128, 64, 2) int32, 4 block scales each
    global_scales: torch.Tensor  # (N,) f32: the parts of a foreign checkpoint may differ in theirs
    sizes: tuple  # N_i
    shape: tuple  # (N, K)
    # int32, CTAs done per tile (first 2048: _shrink_kernel's); for one stream
    counters: torch.Tensor
    dense: torch.Tensor  # (N, K) fp32, what a CPU multiplies with; None on a GPU


def pack(*qs):
    """Tuples (packed (N_i, K/2) u8, block_scale (N_i, K/16) e4m3, global_scale f32 ()) → one
    PackedNVFP4. ValueError: K is no multiple of 16, or dtypes, shapes or devices do not fit
    together.
    """
    codes, block_scales, global_scales = zip(*qs, strict=True)
    K, device, sizes = 2 * codes[0].shape[1], codes[0].device, tuple(map(len, codes))
    for c, s, g in qs:
        found = c.dtype, s.dtype, {c.device, s.device, g.device}, (*c.shape, *s.shape), K % BLOCK
        if found != (
            torch.uint8,
            torch.float8_e4m3fn,
            {device},
            (len(c), K // 2, len(c), K // BLOCK),
            0,
        ):
            raise ValueError(
                f"codes and scales {found} do not make (N, {K}) on {device}, K a multiple of 16"
            )
    pad_k, pad_n = -K % COLS, -sum(sizes) % ROWS
    byte = F.pad(torch.cat(codes), (0, pad_k // 2, 0, pad_n))  # (N, K/2)
    scale = torch.cat([s.view(torch.uint8) for s in block_scales])  # (N, K/16)
    scale = F.pad(scale, (0, pad_k // BLOCK, 0, pad_n))
    assert not (scale > 0x7E).any(), "a block scale is negative or NaN"
    # Pack some rows at a time: the temporaries take 20 bytes a code, 10 GB for a layer of a 72B
    # model.
    pieces = zip(byte.split(64 * ROWS), scale.split(64 * ROWS), strict=True)
    words, scales = zip(*[_words(b.int(), s.int()) for b, s in pieces], strict=True)
    words, scales = torch.cat(words), torch.cat(scales)
    rows = torch.cat(
        [g.reshape(1).float().expand(n_i) for g, n_i in zip(global_scales, sizes, strict=True)]
    )
    counters = torch.zeros(2048 + 32 * len(words), dtype=torch.int32, device=device)
    dense = torch.cat([_dequantize(*q) for q in qs]) if device.type == "cpu" else None
    return PackedNVFP4(words, scales, rows, sizes, (sum(sizes), K), counters, dense)


def _dequantize(byte, scale, global_scale):
    """The format's definition: codes (N, K/2) u8, scales (N, K/16) e4m3 → (N, K) f32."""
    e2m1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    code = torch.stack((byte & 15, byte >> 4), -1).view(*scale.shape, BLOCK)
    return (e2m1[code.int()] * scale.float()[..., None] * global_scale).flatten(1)


def _words(byte, scale):
    """Whole tiles, as (64 n, K/2) two codes a byte and (64 n, K/16) e4m3 bytes, int32 → words,
    scales.
    """
    n, k = byte.shape[0] // ROWS, scale.shape[1] * BLOCK // COLS
    code = torch.stack((byte & 15, byte >> 4), -1).view(*scale.shape, BLOCK)
    code = code * (scale > 0)[..., None]  # a stored scale cannot be 0: zero the codes instead
    a, b, c, d = code.view(n, ROWS, k, 4, 16, 2).transpose(1, 2).unbind(3)  # (n, k, 64, 16, 2)
    fields = *((f & 8) << 12 | (f & 7) << 6 for f in (a, b, c)), d & 8 | d >> 1 & 3 | (d & 1) << 4
    a, b, c, d = (half[..., 0] | half[..., 1] << 16 for half in fields)  # (n, k, 64, 16)
    s = _to_ue5m3(scale).view(n, ROWS, k, 4, 2).transpose(1, 2)  # (n, k, 64, 4, 2)
    # Order the sub-tiles 0 2 1 3: one mask then extracts two sub-tiles' scales, one from each half
    # word.
    s = s[..., 0, :] | s[..., 2, :] << 8 | s[..., 1, :] << 16 | s[..., 3, :] << 24
    return a | _rotate(b, 3) | _rotate(c, 6) | d, _rotate(s, 4)


def _rotate(word, left):
    """Rotate an int32 to the left; torch's >> repeats the sign bit, so mask it off."""
    return word << left | word >> 32 - left & (1 << left) - 1


def _to_ue5m3(byte):
    """e4m3 → (e + 9) << 3 | m. A normal number stores e + 7. Scale 0 becomes 143, used by no other
    scale.
    """
    table = torch.tensor([143, 0, 8, 12, 16, 18, 20, 22], dtype=torch.int32, device=byte.device)
    return torch.where(byte < 8, table[byte.clamp(max=7)], byte + 16)


def unpack(packed):
    """The tuples that went into pack, bit for bit, except that blocks of scale 0 have lost their
    codes.
    """
    (N, K), (n, k), w = packed.shape, packed.words.shape[:2], packed.words
    a, b, c, d = (torch.stack((t, t >> 16), -1) for t in (w, _rotate(w, 29), _rotate(w, 26), w))
    fields = *(t >> 12 & 8 | t >> 6 & 7 for t in (a, b, c)), d & 8 | d << 1 & 6 | d >> 4 & 1
    code = torch.stack(fields, 3).transpose(1, 2).reshape(n * ROWS, k * COLS)[:N, :K]
    byte = (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)
    # (…, 64, 4, 2)
    ue5m3 = torch.stack([_rotate(packed.scales, left) for left in (28, 12, 20, 4)], 3) & 255
    ue5m3 = (
        ue5m3.transpose(1, 2).reshape(n * ROWS, k * COLS // BLOCK)[:N, : K // BLOCK].contiguous()
    )
    # ascending; scale 0's 143 is past its end
    table = _to_ue5m3(torch.arange(1, 127, device=w.device))
    scale = ((torch.searchsorted(table, ue5m3) + 1) % 127).to(torch.uint8).view(torch.float8_e4m3fn)
    parts = zip(*(t.split(packed.sizes) for t in (byte, scale, packed.global_scales)), strict=True)
    return [(b, s, g[0].clone()) for b, s, g in parts]


def linear(x, weight, bias=None, lora=None, learn=None, needed=True):
    """x (..., K) → x @ W.T + bias + scale · (x @ A.T) @ B.T, (..., N); all bf16 on a GPU, fp32 on a
    CPU.

    weight: a PackedNVFP4 or a Dense. lora = (A (R, K), B (N, R / S), splits, scale): the S parts of
    a fused projection, splits[s] columns of y each, use R / S rows of A each; call a Dense's
    `adapt` with B first. learn = (lora_A, lora_B): parameters to receive the gradients where A and
    B are rounded copies of them. Gradients flow to x, bias and these, never to W. needed=False:
    skip x @ W.T, because y goes unread.
    """
    N, K = weight.shape
    A, B, splits, scale = lora or (None, None, (), 1.0)
    stored = weight.wide if isinstance(weight, Dense) else weight.words
    fits = x.shape[-1] == K and (bias is None or bias.shape == (N,))
    assert fits, (
        f"x has K={x.shape[-1]}, bias {bias if bias is None else bias.shape}; the weight is {N, K}"
    )
    rows = x.reshape(-1, K).contiguous()
    rows = rows.clone() if rows.data_ptr() % 16 else rows  # TMA needs 16-byte alignment
    found = {(t.dtype, t.device, t.is_contiguous()) for t in (rows, bias, A, B) if t is not None}
    right = torch.bfloat16 if x.is_cuda else torch.float32, stored.device, True
    assert found == {right}, (
        f"x, bias, A, B are {found}, not all {right}: dtype, device, contiguous"
    )
    if lora:
        shapes = (*A.shape, *B.shape)
        assert shapes == (len(splits) * B.shape[1], K, N, B.shape[1]) and sum(splits) == N, (
            f"A {shapes[:2]}, B {shapes[2:]} and splits {splits} do not fit a weight {weight.shape}"
        )
        assert stored.dim() == 4 or stored.shape[1] == K + len(A), (
            "this Dense has no B: call its adapt"
        )
    y = _Linear.apply(rows, weight, bias, A, B, tuple(splits), scale, needed, *(learn or (A, B)))
    return y.view(*x.shape[:-1], N)


class _Linear(torch.autograd.Function):
    """Saves x, xa = scale · x @ A.T, A and B; on a GPU backward decodes W again from its packed
    bytes.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, splits, scale, needed, lora_A, lora_B):
        plain, xa = isinstance(weight, Dense), None
        if x.is_cuda and needed and len(x) <= FUSED_MAX and not (plain and A is None):
            gpu = torch.cuda.get_device_properties(x.device)
            plan = None if plain else _plan(len(x), *weight.shape, gpu)
            y, xa = _fused(x, weight, bias, A, B, splits, scale, plan, gpu.major)
        elif A is None:
            y = F.linear(x, dequantize(weight, x.dtype), bias)
        else:
            xa = x.new_empty(len(x), len(A)).addmm_(x, A.T, beta=0, alpha=scale)
            if needed and (x.is_cuda or plain):
                y = F.linear(torch.cat([x, xa], 1), _beside(weight, B, splits), bias)
            else:
                y = F.linear(xa, _block_diagonal(B, splits), bias)
                if needed:
                    y.addmm_(x, dequantize(weight, x.dtype).T)
        ctx.weight, ctx.splits, ctx.scale = weight, splits, scale
        ctx.save_for_backward(None if A is None else x, xa, A, B)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x, xa, A, B), dy, dx, dA, dB = ctx.saved_tensors, dy.contiguous(), None, None, None
        if A is not None:
            dxa = torch.empty_like(xa).addmm_(
                dy, _block_diagonal(B, ctx.splits), beta=0, alpha=ctx.scale
            )
            dx = dxa @ A
            if any(ctx.needs_input_grad[-2:]):
                dA, dB = dxa.T @ x, dy.T @ xa
                # of dB (N, R) keep the diagonal blocks: the rest is 0
                r = len(A) // len(ctx.splits)
                dB = torch.cat(
                    [b[:, i * r : (i + 1) * r] for i, b in enumerate(dB.split(ctx.splits))]
                )
        if ctx.needs_input_grad[0]:
            W = dequantize(ctx.weight, dy.dtype)
            dx = dy @ W if A is None else dx.addmm_(dy, W)
        return dx, None, dy.sum(0) if ctx.needs_input_grad[2] else None, *[None] * 5, dA, dB


def dequantize(packed, dtype=torch.bfloat16, out=None):
    """(N, K), rounded in bf16 only if global_scale is no power of two. out: on a GPU, where to
    write it.
    """
    if isinstance(packed, Dense):
        return packed.weight
    if packed.dense is not None:
        return packed.dense.to(dtype)
    (N, K), (n, k) = packed.shape, packed.words.shape[:2]
    out = torch.empty(N, K, dtype=dtype, device=packed.words.device) if out is None else out
    _dequantize_kernel[n * k,](
        packed.words,
        packed.scales,
        packed.global_scales,
        out,
        N,
        K,
        out.stride(0),
        k,
        EXPONENT,
        False,
    )
    return out


def _beside(weight, B, splits):
    """[W, B] (N, K + R). Its product with [x, xa] is rounded once, as in the fused kernel. Two
    cuBLAS calls would round x @ W.T first, by more than what an adapter adds early in training.
    """
    if isinstance(weight, Dense):
        return weight.wide
    N, K = weight.shape
    wide = B.new_empty(N, K + B.shape[1] * len(splits))
    dequantize(weight, out=wide[:, :K])
    wide[:, K:] = _block_diagonal(B, splits)
    return wide


def _block_diagonal(B, splits):
    """(N, R / S) → (N, R): the rows of each part in columns of their own."""
    return B if len(splits) == 1 else torch.block_diag(*B.split(splits))


class Launch(NamedTuple):
    """One launch of the main kernel, whose CTAs each compute n columns of y for m rows of x."""

    first: int  # tile of n rows of W to begin with
    tiles: int  # tiles of W to compute
    m: int  # rows of x in a tile
    n: int  # rows of W in a tile: 64, or 128 for two warpgroups
    split_k: int  # CTAs that share a tile, each with a range of k
    stages: int  # steps of 128 columns in shared memory: one is multiplied while the others load


CTAS = {8: 3, 16: 4, 32: 3, 64: 3, 128: 2}  # tile rows of x → CTAs an SM has room for beside LoRA's


def _plan(M, N, K, gpu):
    """→ [Launch]. gpu: torch's device properties."""
    sms, tiles, large = gpu.multi_processor_count, triton.cdiv(N, ROWS), N // (2 * ROWS)
    if gpu.major == 9 and M >= 192 and tiles == 2 * large:
        # Tiles of 128 × 256 load x half as often. A wave is one such tile on each SM. Full waves
        # run unsplit; all SMs share the rest, split along k into 1024 columns or more (4096 without
        # a full wave): shorter pieces cost more than they save. A wave takes 1.8 times as long as
        # one of 64 × 128, two to an SM.
        whole = large // sms * sms
        split = max(1, min(4, sms // max(1, large - whole), K // (1024 if whole else 4096)))
        waves = whole / sms + (large > whole) / split
        if 1.8 * waves <= triton.cdiv(tiles * triton.cdiv(M, 128), 2 * sms):
            parts = (
                Launch(0, whole, 256, 128, 1, 3),
                Launch(whole, large - whole, 256, 128, split, 3),
            )
            return [launch for launch in parts if launch.tiles]
    # If one tile holds all rows of x, each weight is decoded once. Without wgmma a tile holds 32 at
    # most.
    most = max(8, min(32, triton.next_power_of_2(M)))
    if gpu.major in (9, 10) and M >= 64:
        most = 64 if M < 128 else 128
    # But a small W has too few such tiles for all SMs: smaller tiles are faster, though each
    # decodes the same weights again. If k is long, split it instead: count every 14 steps of 128
    # columns as one tile.
    m = min(most, 16 if K < 3584 else 32)
    while m < most and tiles * max(1, K // 1792) * triton.cdiv(M, m) > sms:
        m *= 2
    # Split k, if it has eight steps or more, as far as all CTAs run at once and each has two steps
    # or more.
    split = CTAS[m] * sms // (tiles * triton.cdiv(M, m)) if K >= 8 * COLS else 1
    return [Launch(0, tiles, m, ROWS, max(1, min(split, 14, K // (2 * COLS))), 3 if m >= 64 else 4)]


def _fused(x, weight, bias, A, B, splits, scale, plan, major):
    """→ y (M, N), and xa = scale · x @ A.T (M, R) or None. major: the GPU's compute capability."""
    (M, K), N, plain = x.shape, weight.shape[0], isinstance(weight, Dense)
    # A dependent kernel's CTAs hold SM slots while they wait. With many rows a Dense's cuBLAS call
    # needs all.
    pdl = major >= 9 and (M <= 16 or not plain)
    flags = {"PDL": pdl, "launch_pdl": pdl, "F32": x.dtype == torch.float32}
    # kernels overlap: keep all sums alive, so that no two share memory
    xa, rank, sums = None, 0, []
    if A is not None:
        R, rank, m = len(A), len(A) // len(splits), 8 if M <= 8 else 16
        split = 1 if K < 8 * COLS else min(28, triton.cdiv(K, 256 if plain else 512))
        grid, xa = (triton.cdiv(M, m), triton.cdiv(R, 32), split), x.new_empty(M, R)
        sums.append(x.new_empty(*grid, m * 32 * (split > 1), dtype=torch.float32))
        _shrink_kernel[grid](
            x,
            A,
            xa,
            sums[0],
            weight.counters,
            M,
            R,
            K,
            scale,
            TILE_M=m,
            SPLIT_K=split,
            **flags,
            num_stages=5,
            num_warps=2,
        )
    if plain:
        return F.linear(torch.cat([x, xa], 1), weight.wide, bias), xa
    y = x.new_empty(M, N)
    for first, tiles, m, n, split, stages in plan:
        grid, tma = (triton.cdiv(M, m), tiles, split), m >= 64
        sums.append(x.new_empty(tiles * grid[0] * split * (split > 1), m * n, dtype=torch.float32))
        # TMA computes addresses in hardware; those of many rows of x would fill the registers.
        x_arg = TensorDescriptor(x, [M, K], [K, 1], [m, 64]) if tma else x
        _linear_kernel[grid](
            x_arg,
            *weight[:3],
            bias,
            xa,
            B,
            y,
            sums[-1],
            weight.counters,
            M,
            N,
            K,
            weight.words.shape[1],
            first,
            EXPONENT,
            TILE_M=m,
            TILE_N=n,
            SPLIT_K=split,
            RANK=rank,
            SPLITS=splits,
            TMA=tma,
            **flags,
            num_warps=n // 16,
            num_stages=stages,
        )
    return y, xa


@jit
def _halves(t, F32: constexpr):
    """A uint32 that holds two bf16 → (low, high); F32: as fp32, for Triton's interpreter."""
    if F32:
        return (t << 16).to(tl.float32, bitcast=True), (t & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:  # compiles to no instruction at all, while shifts and casts cost one and a half a weight
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [t],
            is_pure=True,
            pack=1,
            dtype=(tl.bfloat16, tl.bfloat16),
        )


@jit
def _decode(words, scales, exponent, HALF: constexpr, F32: constexpr):
    """words (N, 16), scales (N, 2) → (N, 64) weights · 2^-20 / global_scale; HALF: sub-tiles 0, 1
    or 2, 3.
    """
    N: constexpr = words.shape[0]
    w, s = words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)
    if HALF == 0:
        a, b = w & 0x81C081C0, (w >> 3 | w << 29) & 0x81C081C0
    else:
        # 2^12 + 2^7 + 2^2
        a, b = (w >> 6 | w << 26) & 0x81C081C0, (w & 0x001B001B) * 4228 & 0x81C081C0
        s = s >> 8 | s << 24
    scale_a, scale_b = _halves((s & 0x0FF00FF0) | exponent.to(tl.uint32), F32)
    a = tl.join(*_halves(a, F32)).reshape(N, 2, 16) * scale_a[:, :, None]
    b = tl.join(*_halves(b, F32)).reshape(N, 2, 16) * scale_b[:, :, None]
    return tl.join(a, b).reshape(N, 32, 2).permute(0, 2, 1).reshape(N, 64)  # renames registers only


@jit
def _load_x(x, first_m, col, M, K, TILE_M: constexpr, WIDTH: constexpr, TMA: constexpr):
    """(TILE_M, WIDTH) of x from row first_m and column col on, zeros past its ends. TMA: by a
    descriptor.
    """
    if TMA:
        return x.load([first_m, col])
    else:
        m, k = first_m + tl.arange(0, TILE_M)[:, None], tl.arange(0, WIDTH)[None, :]
        return tl.load(x + m * K + col + k, mask=(m < M) & (k < K - col), other=0.0)


@jit
def _multiply(acc, w, x_tile, WAIT: constexpr):
    acc = tl.dot(w, tl.trans(x_tile), acc, input_precision="ieee")
    if WAIT:
        # Triton leaves a wgmma in flight while the next decode overwrites registers that it still
        # reads: sums are wrong. An empty instruction that uses acc makes Triton wait for the wgmma.
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@jit(do_not_specialize=["M", "first_tile"])
def _linear_kernel(
    x,
    words,
    scales,
    global_scales,
    bias,
    xa,
    lora_B,
    y,
    sums,
    counters,
    M,
    N,
    K,
    tiles_k,
    first_tile,
    exponent,
    TILE_M: constexpr,
    TILE_N: constexpr,
    SPLIT_K: constexpr,
    RANK: constexpr,
    SPLITS: constexpr,
    TMA: constexpr,
    PDL: constexpr,
    F32: constexpr,
):
    """(TILE_N, TILE_M) of y.T, y[m, n] = Σ_k x[m, k] W[n, k]. Grid: (tiles of x, tiles of W,
    SPLIT_K). TMA: x is a tensor descriptor, not a pointer.
    """
    pid_m, pid_n, pid_k = tl.program_id(0), tl.program_id(1) + first_tile, tl.program_id(2)
    # steps of 128 columns
    begin, end = pid_k * tiles_k // SPLIT_K, (pid_k + 1) * tiles_k // SPLIT_K
    first_m, row = pid_m * TILE_M, tl.arange(0, TILE_N)
    # Shift back a last tile that would pass the end of x: it repeats rows of the tile before.
    if TMA:
        first_m = tl.maximum(tl.minimum(first_m, M - TILE_M), 0)
    offs_m, offs_n = first_m + tl.arange(0, TILE_M), pid_n * TILE_N + row
    in_m, in_n = (offs_m < M)[None, :], offs_n < N
    words += (pid_n * (TILE_N // 64) * tiles_k + begin) * 1024  # the first stored tile of this CTA
    scales += (pid_n * (TILE_N // 64) * tiles_k + begin) * 128
    if PDL:
        if RANK == 0:  # Wait for the writer of x; with LoRA, _shrink_kernel has already done so.
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # rows 64 and up lie in the next row of tiles
    stored = (row + row // 64 * (tiles_k - 1) * 64)[:, None]
    w_ptr = words + stored * 16 + tl.arange(0, 16)[None, :]
    s_ptr = scales + stored * 2 + tl.arange(0, 2)[None, :]
    acc = tl.zeros((TILE_N, TILE_M), tl.float32)
    # Loaded before the loop, the epilogue's operands arrive during it.
    scale = tl.load(global_scales + offs_n, mask=in_n, other=0.0)[:, None] * 1048576.0  # 2^20
    add = (
        0.0
        if bias is None
        else tl.load(bias + offs_n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    )
    if RANK > 0:
        r = tl.arange(0, max(16, triton.next_power_of_2(RANK)))
        B = tl.load(
            lora_B + offs_n[:, None] * RANK + r[None, :], in_n[:, None] & (r < RANK)[None, :], 0.0
        )
    # Promise at least one step: if acc might leave the loop as zeros, ptxas would serialise all
    # wgmmas.
    tl.assume(end - begin > 0)
    for k in range(end - begin):
        w, s = tl.load(w_ptr + k * 1024), tl.load(s_ptr + k * 128)
        if TILE_M == 8:
            x_tile = _load_x(x, first_m, (begin + k) * 128, M, K, TILE_M, 128, TMA)
            w_tile = tl.join(_decode(w, s, exponent, 0, F32), _decode(w, s, exponent, 1, F32))
            # mma.sync may take k in any order that w and x share. In this one a thread's 8 columns
            # of x are neighbours: one load from shared memory. (wgmma, from 16 rows on, reads
            # shared memory itself.)
            w_tile = w_tile.permute(0, 2, 1).reshape(TILE_N, 4, 4, 2, 2, 2)
            w_tile = w_tile.permute(0, 1, 4, 2, 3, 5).reshape(TILE_N, 128)
            x_tile = x_tile.reshape(8, 4, 4, 2, 2, 2).permute(0, 1, 4, 2, 3, 5).reshape(8, 128)
            acc = _multiply(acc, w_tile, x_tile, not F32)
        else:  # half a step at a time takes half the registers
            x0 = _load_x(x, first_m, (begin + k) * 128, M, K, TILE_M, 64, TMA)
            x1 = _load_x(x, first_m, (begin + k) * 128 + 64, M, K, TILE_M, 64, TMA)
            acc = _multiply(acc, _decode(w, s, exponent, 0, F32), x0, not F32)
            # With two warpgroups this product may stay in flight: the next decode writes other
            # registers.
            acc = _multiply(acc, _decode(w, s, exponent, 1, F32), x1, not F32 and TILE_N == 64)
    tile = tl.program_id(1) * tl.num_programs(0) + pid_m
    acc, done = _sum_splits(acc, sums, counters + 2048, tile, pid_k, TILE_N, TILE_M, SPLIT_K)
    if done:
        acc = acc * scale + add
        if RANK > 0:
            if PDL:
                tl.extra.cuda.gdc_wait()  # xa is ready
            first_n = 0
            for part in tl.static_range(len(SPLITS)):
                last_n = first_n + SPLITS[part]
                # few tiles have two parts
                if (first_n < (pid_n + 1) * TILE_N) & (last_n > pid_n * TILE_N):
                    xa_t = tl.load(
                        xa + offs_m[None, :] * (len(SPLITS) * RANK) + part * RANK + r[:, None],
                        mask=in_m & (r < RANK)[:, None],
                        other=0.0,
                    )
                    mine = ((offs_n >= first_n) & (offs_n < last_n))[:, None]
                    acc = tl.dot(tl.where(mine, B, 0.0), xa_t, acc, input_precision="ieee")
                first_n = last_n
        y_ptr = y + offs_m[None, :] * N + offs_n[:, None]
        tl.store(y_ptr, acc.to(y.dtype.element_ty), mask=in_m & in_n[:, None])


@jit
def _sum_splits(acc, sums, counters, tile, part, R: constexpr, C: constexpr, SPLIT_K: constexpr):
    """→ (the sum of acc (R, C) over the SPLIT_K CTAs of a tile, whether this CTA arrived last and
    has it).
    """
    if SPLIT_K == 1:
        return acc, True
    offs = tile * SPLIT_K * R * C + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(sums + part * R * C + offs, acc)
    tl.debug_barrier()  # every warp has stored before this CTA counts itself
    done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if done:
        tl.store(counters + tile, 0)  # for the next launch
        acc = tl.zeros((R, C), tl.float32)
        # .cg reads L2: L1 may hold an older launch's lines. Unrolled, the loads of a small tile
        # overlap.
        for i in tl.range(
            SPLIT_K, loop_unroll_factor=SPLIT_K if R * C <= 4096 else 1, num_stages=1
        ):
            acc += tl.load(sums + i * R * C + offs, cache_modifier=".cg")
    return acc, done


@jit(do_not_specialize=["M"])
def _shrink_kernel(
    x,
    lora_A,
    xa,
    sums,
    counters,
    M,
    R,
    K,
    scale,
    TILE_M: constexpr,
    SPLIT_K: constexpr,
    PDL: constexpr,
    F32: constexpr,
):
    """xa (M, R) = scale · x @ lora_A.T, as xa.T and with split-K, as above. Grid: (x tiles, R/32,
    splits).
    """
    offs_m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    offs_r, offs_k, steps = (
        tl.program_id(1) * 32 + tl.arange(0, 32),
        tl.arange(0, 64),
        tl.cdiv(K, 64),
    )
    first, last = tl.program_id(2) * steps // SPLIT_K, (tl.program_id(2) + 1) * steps // SPLIT_K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    a_ptr = lora_A + offs_r[:, None] * K + offs_k[None, :]
    x_ptr = x + offs_m[None, :] * K + offs_k[:, None]
    acc = tl.zeros((32, TILE_M), tl.float32)
    for i in range(first, last):
        in_k = offs_k < K - i * 64
        a = tl.load(a_ptr + i * 64, mask=(offs_r < R)[:, None] & in_k[None, :], other=0.0)
        xt = tl.load(x_ptr + i * 64, mask=(offs_m < M)[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, xt, acc, input_precision="ieee")
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    acc, done = _sum_splits(acc, sums, counters, tile, tl.program_id(2), 32, TILE_M, SPLIT_K)
    if done:
        tl.store(
            xa + offs_m[None, :] * R + offs_r[:, None],
            (acc * scale).to(xa.dtype.element_ty),
            mask=(offs_m < M)[None, :] & (offs_r < R)[:, None],
        )


@jit
def _dequantize_kernel(
    words, scales, global_scales, out, N, K, stride, tiles_k, exponent, F32: constexpr
):
    """A CTA decodes one stored tile (64, 128). stride: elements from one row of out to the next."""
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, 64)
    w = tl.load(words + tile * 1024 + row[:, None] * 16 + tl.arange(0, 16)[None, :])
    s = tl.load(scales + tile * 128 + row[:, None] * 2 + tl.arange(0, 2)[None, :])
    offs_n = tile // tiles_k * 64 + row
    scale = tl.load(global_scales + offs_n, mask=offs_n < N, other=0.0) * 1048576.0
    for half in tl.static_range(2):
        offs_k = tile % tiles_k * 128 + half * 64 + tl.arange(0, 64)
        out_tile = _decode(w, s, exponent, half, F32).to(tl.float32) * scale[:, None]
        tl.store(
            out + offs_n[:, None] * stride + offs_k[None, :],
            out_tile.to(out.dtype.element_ty),
            mask=(offs_n < N)[:, None] & (offs_k < K)[None, :],
        )


# --- a plain bf16 base, to compare with: the same `linear` without quantisation


class Dense:
    """A weight W (N, K) that is not quantised. wide: [W, B] (N, K + R) once there is an adapter, so
    that one cuBLAS call multiplies it with [x, xa]. counters: of _shrink_kernel, for one stream at
    a time.
    """

    def __init__(self, W):
        self.weight = self.wide = W
        self.shape, self.counters = (
            tuple(W.shape),
            torch.zeros(2048, dtype=torch.int32, device=W.device),
        )

    def adapt(self, B, splits):
        """B (N, R / S) has changed: rewrite its columns in place, so that captured graphs read
        them.
        """
        K, B = self.shape[1], _block_diagonal(B, splits).to(self.weight)
        if self.wide is self.weight:
            self.wide = torch.cat([self.weight, B], 1)
            self.weight = self.wide[:, :K]
        self.wide[:, K:] = B


if __name__ == "__main__":
    q = (
        torch.randint(256, (64, 64)).byte(),
        torch.rand(64, 8).to(torch.float8_e4m3fn),
        torch.tensor(0.125),
    )
    packed = pack(q)
    print(f"8 codes in a word: {packed.words[0, 0, 0, 0].item() & 0xFFFFFFFF:032b}")
    print("weights:", dequantize(packed)[0, :8].tolist())
    print((packed.words.nbytes + packed.scales.nbytes) / 2**13, "bytes a weight")
