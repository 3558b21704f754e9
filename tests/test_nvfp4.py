"""NVFP4 against blocks worked out by hand, all 127 block scales, compressed-tensors' bytes, and
GPTQ in its naive form.
"""

import math

import pytest
import torch

import nvfp4

# every block scale that is not negative, ascending: 0 … 448
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def brute_force(w, global_scale):
    """→ (blocks, 127) squared error of each block under each scale, with weights at the nearest
    code.
    """
    values = E4M3[:, None, None] * torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # (127, 1, 8)
    blocks = (w.double() / global_scale).abs().view(-1, 1, nvfp4.BLOCK, 1)  # (n, 1, 16, 1)
    return (blocks - values).abs().amin(-1).square().sum(-1) * global_scale**2


def test_a_block_worked_out_by_hand():
    """The largest weight, 6, gives scale 1. Ties round to the even code. The low nibble is the even
    k. A second pass changes nothing.
    """
    w = torch.tensor(
        [[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, 0.5, 3, -3, 1.5, 2.2]]
    )
    q = nvfp4.quantize(w, "rtn", global_scale=1.0)
    assert q.block_scale.item() == 1 and q.global_scale.shape == ()
    assert q.packed.tolist() == [[0x07, 0x22, 0x44, 0x66, 0x8F, 0x1A, 0xD5, 0x43]]
    rounded = [6, 0, 1, 1, 2, 2, 4, 4, -6, 0, -1, 0.5, 3, -3, 1.5, 2]
    assert nvfp4.dequantize(q).tolist() == [rounded]
    again = nvfp4.quantize(nvfp4.dequantize(q), global_scale=1.0)
    assert nvfp4.dequantize(again).tolist() == [rounded]


def test_a_weight_one_ulp_from_a_tie_rounds_to_its_own_side():
    """On every tie between two codes: the next number above takes the upper code, below it the
    lower.
    """
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    above, below = ties.nextafter(ties + 1), ties.nextafter(ties - 1)
    w = torch.cat([torch.tensor([6.0]), above, -below, torch.zeros(1)])
    q = nvfp4.quantize(w[None], "rtn", 1.0)
    codes = torch.stack([q.packed & 15, q.packed >> 4], -1)
    assert codes.flatten().tolist() == [7, *range(1, 8), *range(8, 15), 0]


def test_each_number_rounds_to_the_nearest_of_all_fifteen():
    """From −9 to 9 in steps of 1/16, so with every tie, and beyond ±6. Of two that are as near, the
    one with the even code: argmin takes the first.
    """
    x = torch.arange(-144, 145) / 16
    values = torch.tensor(nvfp4.E2M1[0::2] + nvfp4.E2M1[1::2])  # even codes first
    nearest = values[(x.abs()[:, None] - values).abs().argmin(1)] * x.sign()
    assert torch.equal(nvfp4._nearest_e2m1(x), nearest)


def test_zero_blocks_and_subnormal_scales():
    """Zeros stay zeros. Subnormal scales are multiples of 2⁻⁹: rtn loses a small block, sweep keeps
    it.
    """
    least = 2.0**-9
    w = torch.tensor([6 * 448.0, 0.0, 18 * least, 2.7 * least]).repeat_interleave(16)[None]
    rtn, sweep = nvfp4.quantize(w, "rtn"), nvfp4.quantize(w)
    # amax / 6 of the last block is .45 · 2⁻⁹: rtn takes 0
    assert rtn.block_scale.float().tolist() == [[448, 0, 3 * least, 0]]
    assert rtn.packed[0, ::8].tolist() == [0x77, 0, 0x77, 0]
    # 2.7 · 2⁻⁹ lies between the products code · scale of .5 · 5 and 3 · 1, in units of 2⁻⁹: 2.5 is
    # nearer
    assert nvfp4.dequantize(sweep, torch.float32)[0, -1] == 2.5 * least
    assert nvfp4.quantize(torch.zeros(3, 32)).packed.max() == 0


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("method", ["rtn", "sweep"])
def test_dequantize_is_exact_in_bf16(method, size):
    """global_scale is a power of two, so bf16 and fp32 hold the same weights, however small or
    large.
    """
    w = torch.randn(32, 96) * size
    q = nvfp4.quantize(w, method)
    exact = nvfp4.dequantize(q, torch.float32)
    assert torch.equal(nvfp4.dequantize(q).float(), exact)
    assert (exact - w).abs().sum() / w.abs().sum() < 0.1  # of Gaussian weights


@pytest.mark.parametrize("given_scale", [None, 1.0])
def test_what_cannot_be_quantised_is_refused_by_name(given_scale):
    """Wrong K, a vector, infinity, an unknown method: each ValueError names the value."""
    w = torch.randn(4, 32)
    infinite = w.clone()
    infinite[0, :2] = math.inf
    H = torch.eye(32)
    for bad, method, hessian, words in (
        (w[:, :24], "sweep", None, r"\(4, 24\).*16"),
        (w[0], "rtn", None, r"\(32,\)"),
        (infinite, "rtn", None, "2 weights"),
        (w, "awq", None, "awq"),
        (w, "gptq", None, r"\(32, 32\)"),
        (w, "gptq", H[:16, :16], r"\(32, 32\)"),
        (w, "gptq", -H, "damping=1 "),
        (w, "gptq", H * math.nan, "NaN"),
        (w, "gptq", 0 * H, "damping=1 "),
    ):
        with pytest.raises(ValueError, match=words):
            nvfp4.quantize(bad, method, given_scale, hessian)


def test_a_parameter_is_quantised_into_tensors_without_a_gradient():
    """A transposed view too."""
    w = torch.nn.Parameter(torch.randn(48, 32))
    ours, turned = nvfp4.quantize(w), nvfp4.quantize(w.T.contiguous().T)
    assert not any(part.requires_grad for part in ours)
    assert torch.equal(nvfp4.dequantize(ours), nvfp4.dequantize(turned))


def test_sweep_finds_what_trying_all_127_scales_finds():
    """Sweep's ten scales reach the least error of all 127, on random blocks and on one that needs
    scale 4.

    Larger scales than the window's gain nothing: from amax / 3.5 on no code exceeds 3, and half the
    scale represents the same numbers. In the made block amax / 6 = 2.36 rounds to 2.25; 4 is seven
    codes above.
    """
    w = torch.cat((torch.randn(16, 256), torch.randn(16, 256) ** 3))
    q = nvfp4.quantize(w)
    best = brute_force(w, q.global_scale).amin(1)
    error = (nvfp4.dequantize(q, torch.float64) - w.double()).square().view(-1, nvfp4.BLOCK).sum(1)
    assert ((error - best).abs() <= 1e-5 * best).all()  # fp32 sums of 16
    lone = torch.tensor([[14.16] + [12.0] * 15])
    assert nvfp4.quantize(lone, global_scale=1.0).block_scale.item() == 4


def test_a_shared_global_scale_fits_all_and_changes_nothing_else():
    """The largest of three weights decides the scale. Quantised apart or joined, they are the
    same.
    """
    parts = [torch.randn(16, 64) * size for size in (1, 30, 0.03)]
    shared, joined = nvfp4.shared_global_scale(*parts), nvfp4.quantize(torch.cat(parts))
    assert joined.global_scale == shared
    for largest, scale in ((-60.0, 2.0**-5), (2.9, 2.0**-9), (1e-45, 2.0**-126), (0.0, 1.0)):
        assert nvfp4.shared_global_scale(torch.tensor(0.0), torch.tensor(largest)) == scale
    apart = [nvfp4.dequantize(nvfp4.quantize(w, global_scale=shared)) for w in parts]
    assert torch.equal(torch.cat(apart), nvfp4.dequantize(joined))
    for bad in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="1 weights"):
            nvfp4.shared_global_scale(*parts, torch.tensor(bad))


# --- GPTQ


def inputs_of(K, tokens=1024):
    """→ X (K, tokens), inputs that depend on each other: z · A, with one fixed A whose singular
    values are 1 to 1/300.
    """
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.linalg.qr(torch.randn(K, K, generator=generator))[0] for _ in range(2))
    A = left * torch.logspace(0, -2.5, K) @ right
    return (torch.randn(tokens, K, generator=generator) @ A).T


def naive_gptq(w, H, damping):
    """GPTQ as the paper derives it, in fp64: round a column, then correct all columns after it by
    the inverse of what is left of H.

    w (N, K), weights / global_scale → (N, K) each: the weights as they were rounded, in units of
    their scale, and what they became
    """
    w, H = w.double(), H.double()
    H = H + damping * H.diagonal().mean() * torch.eye(len(H))
    magnitude = torch.tensor(nvfp4.E2M1).double()
    targets, rounded = [], []
    for k in range(w.shape[1]):
        if k % nvfp4.BLOCK == 0:
            scale = E4M3[brute_force(w[:, k : k + nvfp4.BLOCK], 1.0).argmin(1)]
        targets.append(w[:, k] / scale)
        nearest = (targets[-1].abs()[:, None] - magnitude).abs().argmin(1)
        rounded.append(magnitude[nearest] * targets[-1].sign() * scale)
        inverse = torch.linalg.inv(H[k:, k:])
        w[:, k:] -= ((w[:, k] - rounded[-1]) / inverse[0, 0])[:, None] * inverse[0]
    return torch.stack(targets, 1), torch.stack(rounded, 1)


def test_gptq_is_the_naive_algorithm():
    """The same weights in every row, up to the first that fp32 may round otherwise: the naive
    number is there a tie, but for 1e-4. What follows in such a row is another row.
    """
    N, K = 64, nvfp4.GROUP + 3 * nvfp4.BLOCK  # more than the columns that are corrected at once
    w, X = torch.randn(N, K), inputs_of(K)
    q = nvfp4.quantize(w, "gptq", hessian=X @ X.T, damping=0.02)
    targets, expected = naive_gptq(w / q.global_scale, X @ X.T, damping=0.02)
    differs = nvfp4.dequantize(q, torch.float64) != expected * q.global_scale
    values = torch.tensor(nvfp4.E2M1).double()
    ties = (values[1:] + values[:-1]) / 2
    for row in differs.any(1).nonzero()[:, 0]:
        first = targets[row, differs[row].int().argmax()]
        assert (first.abs() - ties).abs().min() < 1e-4
    assert differs.any(1).sum() <= N / 8  # else this test compares little


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gptq_keeps_the_outputs_where_sweep_keeps_the_weights(dtype):
    """On inputs that depend on each other, its error of the output is at most .6 of sweep's. Parts
    of a fused matrix, quantised apart with one global scale, are the rows of the joined matrix.
    """
    w, X = torch.randn(96, 256).to(dtype), inputs_of(256)
    gptq = nvfp4.quantize(w, "gptq", hessian=X @ X.T)
    errors = [
        ((nvfp4.dequantize(q, torch.float32) - w) @ X).square().sum()
        for q in (gptq, nvfp4.quantize(w))
    ]
    assert errors[0] <= 0.6 * errors[1]
    parts = [nvfp4.quantize(p, "gptq", gptq.global_scale, X @ X.T) for p in w.split((64, 32))]
    apart = torch.cat([nvfp4.dequantize(part) for part in parts])
    assert (apart == nvfp4.dequantize(gptq)).float().mean() > 0.99  # sums in another order


@pytest.mark.gpu
def test_the_graph_rounds_as_its_kernels_do(monkeypatch):
    """Also the last columns, which are fewer than a graph rounds at once."""
    X = torch.randn(272, 600, device="cuda")
    w = torch.randn(96, 272, device="cuda")
    replayed = nvfp4.quantize(w, "gptq", hessian=X @ X.T)
    monkeypatch.setattr(nvfp4, "_as_graph", lambda function: function)
    launched = nvfp4.quantize(w, "gptq", hessian=X @ X.T)
    for one, other in zip(replayed, launched, strict=True):
        assert torch.equal(one.float(), other.float())


def test_gptq_without_correlations_is_sweep():
    """With H = I, and for the weights of inputs that are always 0, beside others."""
    w, X = torch.randn(32, 192), inputs_of(192)
    sweep = nvfp4.quantize(w)
    for ours, theirs in zip(nvfp4.quantize(w, "gptq", hessian=torch.eye(192)), sweep, strict=True):
        assert torch.equal(ours.float(), theirs.float())
    dead = slice(64, 112)  # whole blocks, so that their scales are their own
    X[dead] = 0
    ours = nvfp4.dequantize(nvfp4.quantize(w, "gptq", hessian=X @ X.T))
    assert torch.equal(ours[:, dead], nvfp4.dequantize(sweep)[:, dead])
    assert not torch.equal(ours, nvfp4.dequantize(sweep))


def test_compressed_tensors_computes_and_packs_the_same_bytes():
    """compressed-tensors computes our rtn scales and packs our bytes. It stores 1 / global_scale.
    No block here is all zero: it replaces scale 0 by 0.125.
    """
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    w = torch.randn(48, 160) * torch.logspace(-2, 1, 48)[:, None]  # block scales from 2⁻³ to 448
    q = nvfp4.quantize(w, "rtn")
    inverse = 1 / q.global_scale.view(1)
    written = NVFP4PackedCompressor.compress(
        {"weight": w, "weight_scale": q.block_scale.float(), "weight_global_scale": inverse}, scheme
    )
    assert torch.equal(written["weight_packed"], q.packed)
    blocks = w.view(48, -1, nvfp4.BLOCK)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, inverse)
    assert torch.equal(scale.float(), q.block_scale.float())
