"""A block's operations against transformers and a plain attention; kernels against plain torch."""

from itertools import pairwise, product
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import build, compile_with_a_wait, each_generation
from torch.utils._pytree import register_pytree_node, tree_map

from ops import attention, elementwise, int8
from ops.attention import PAGE, SPLIT, Heads, KVCache, Packed, Paged, SlotMapping


def same(ours, plain, atol):
    torch.testing.assert_close(ours, plain, atol=atol, rtol=0)


def random_layer(n, H, Hkv, Dh, head_norms, dtype=torch.float32):
    """→ qkv, heads, cos, sin of n tokens, each at an angle of its own."""
    norms = (*(torch.rand(2, Dh) + 0.5), 1e-3) if head_norms else None
    angle = torch.rand(n, Dh // 2) * 7
    qkv = torch.randn(n, (H + 2 * Hkv) * Dh, dtype=dtype)
    return qkv, Heads(H, Hkv, norms), angle.cos(), angle.sin()


@pytest.mark.parametrize("head_norms", [False, True])
def test_heads_equal_their_references(head_norms):
    """q and k by the formula of RMSNorm and by transformers' rotation."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    qkv, heads, cos, sin = random_layer(15, 4, 2, 6, head_norms)
    q, k, v = qkv.view(15, 8, 6).split((4, 2, 2), 1)
    if head_norms:
        q_weight, k_weight, eps = heads.norms
        q = q_weight * q / (q.square().mean(-1, keepdim=True) + eps).sqrt()
        k = k_weight * k / (k.square().mean(-1, keepdim=True) + eps).sqrt()
    rotated = apply_rotary_pos_emb(q, k, cos.repeat(1, 2), sin.repeat(1, 2))
    same(attention.rotated_heads(qkv, heads, cos, sin), (*rotated, v), 2e-6)


# --- attention against its definition


def attention_of(q, k, v, visible):
    """Queries (n, H, Dh), keys and values (m, Hkv, Dh), visible (n, m) bool; None: all →
    (n, H·Dh) f64.
    """
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


each_shape = pytest.mark.parametrize("H, Hkv, head_norms", [(6, 2, True), (5, 1, False)])
# prompts with answers, one of them empty; a prompt alone; a prompt of one token
GROUPS = [(5, [3, 1, 0]), (2, []), (1, [4]), (3, [2, 2])]


def visible_tokens(groups):
    """→ (n, n) bool: which packed token sees which, by definition."""
    texts = [
        (g, i)
        for g, (prompt, answers) in enumerate(groups)
        for i, length in enumerate([prompt, *answers])
        for _ in range(length)
    ]
    group, text = torch.tensor(texts).T
    return ((group[:, None] == group) & ((text[:, None] == text) | (text == 0))).tril()


@each_shape
def test_a_packed_token_sees_its_prompt_and_its_own_answer(H, Hkv, head_norms):
    """No other answer, no other prompt, nothing later. Positions count from the start of the
    prompt. Keys and values are stored in their slots, of the layer that is called, and nowhere
    else.
    """
    visible = visible_tokens(GROUPS)
    layer = random_layer(len(visible), H, Hkv, 8, head_norms)
    q, k, v = attention.rotated_heads(*layer)
    cache = KVCache(*torch.randn(2, 3, 5, Hkv, 4, 8), torch.zeros(0))
    expected = on_cpu(cache)
    token, page, offset = slots = torch.tensor([[1, 2, 8], [4, 4, 2], [0, 3, 2]])
    expected.k[1, page, :, offset] = k[token]
    expected.v[1, page, :, offset] = v[token]
    packed = Packed(GROUPS, torch.device("cpu"), cache, SlotMapping(*slots))
    out = packed(*layer, 1)
    assert torch.equal(packed.positions, visible.sum(1) - 1)
    # fp32 sums of 9 products of about 3
    same(out.double(), attention_of(q, k, v, visible), 2e-6)
    same(cache, expected, 0)


@pytest.mark.parametrize("groups", [GROUPS, [(4, []), (1, []), (6, [])]])
def test_a_gpu_is_told_the_same_of_packed_tokens(groups):
    """A text's queries are its last keys: flash attention is causal at the end. Prompts alone need
    no list of keys, because each token is read by one text.
    """
    visible, packed = visible_tokens(groups), Packed(groups, torch.device("cpu"))
    assert (packed.keys is None) == (groups is not GROUPS)
    keys = torch.arange(len(visible)) if packed.keys is None else packed.keys
    found = torch.zeros_like(visible).long()  # how often a token reads each
    texts = (pairwise(begins.tolist()) for begins in packed.cu_seqlens)
    for (first, last), (begin, end) in zip(*texts, strict=True):
        for t in range(first, last):
            found[t] = keys[begin : end - last + t + 1].bincount(minlength=len(found))
    assert torch.equal(found, visible.long())
    assert packed.max_seqlens == [begins.diff().max() for begins in packed.cu_seqlens]


def rebuilt_pages(parts, names):
    pages = int8.Pages.__new__(int8.Pages)
    vars(pages).update(zip(names, parts, strict=True))
    return pages


register_pytree_node(int8.Pages, lambda x: (list(vars(x).values()), list(vars(x))), rebuilt_pages)


def random_int8(shape):
    """→ random pages of two layers, of keys with a large bias and of values."""
    *_, Hkv, _, Dh = shape
    angle = torch.arange(600)[:, None] * torch.rand(Dh // 2) ** 8
    integers = torch.randint(1, 256, (2, *shape), dtype=torch.uint8)
    bias = 5 * torch.randn(Hkv, Dh)
    k, v = (
        [int8.Pages(x, b, angle.cos(), angle.sin()) for x in integers] for b in (bias, 0 * bias)
    )
    for keys, values in zip(k, v, strict=True):
        keys.scale.uniform_(0.5, 1.5)
        values.scale.uniform_(0.5, 1.5)
        values.integers = turned(values.integers)
    assert len(k[0].stretch.unique()) > 1
    return k, v


def decode_step(H, Hkv, Dh, positions, page_size, head_norms, dtype=torch.float32):
    """→ a random Paged, and the arguments of its call. Pages are shuffled, two belong to no row.
    dtype: torch.uint8 for pages of integers.
    """
    B, splits = len(positions), max(positions) // SPLIT + 1
    blocks = splits * SPLIT // page_size
    table = torch.randperm(B * blocks + 2)[2:].view(B, blocks)
    shape = B * blocks + 2, Hkv, page_size, Dh
    if dtype == torch.uint8:
        dtype = torch.bfloat16 if table.is_cuda else torch.float32
        k, v = random_int8(shape)
    else:
        k, v = torch.randn(2, 2, *shape, dtype=dtype)
    counters = torch.zeros(B * Hkv, dtype=torch.int32)
    paged = Paged(KVCache(k, v, counters), table, torch.tensor(positions), splits)
    return paged, (*random_layer(B, H, Hkv, Dh, head_norms, dtype), 1)


@each_shape
def test_a_decode_step_equals_its_definition(H, Hkv, head_norms):
    """k and v are written at the row's position, in its page, and nowhere for a row that has ended.
    Attention reads 0 … position.
    """
    positions = [9, 12, -1, 7, 8, 11, 0, 3]
    paged, layer = decode_step(H, Hkv, 8, positions, 4, head_norms)
    q, k, v = attention.rotated_heads(*layer[:4])
    cache, before = paged.cache, on_cpu(paged.cache)
    out = paged(*layer)
    for b, position in enumerate(positions):
        if position >= 0:
            t = torch.arange(position + 1)
            page, offset = paged.block_table[b, t // 4], t % 4
            read = cache.k[1, page, :, offset], cache.v[1, page, :, offset]
            same(out[b].double(), attention_of(q[b : b + 1], *read, None)[0], 2e-6)
            before.k[1, page[-1], :, position % 4] = k[b]
            before.v[1, page[-1], :, position % 4] = v[b]
    same(cache, before, 0)


def test_a_gradient_of_many_readers_is_summed_in_fp32():
    """64 answers read token 2. Integers of 7 bits are exact in bf16, and so are their sums in fp32,
    but bf16 rounds a sum of over 256.
    """
    x = torch.randn(4, 500, dtype=torch.bfloat16, requires_grad=True)
    index, d = torch.tensor([2] * 64 + [0]), torch.randint(-100, 101, (65, 500)).float()
    out = attention.Gather.apply(x, index)
    (found,) = torch.autograd.grad(out, x, d.bfloat16())
    exact = torch.zeros(4, 500).index_add_(0, index, d)
    assert torch.equal(out, x[index]) and torch.equal(found, exact.bfloat16())


# --- Triton kernels without a GPU

# positions at the edges of tiles and splits, the last one, and −1: a finished row
EDGES = [0, 127, 128, 255, 256, 511, 512, 599, -1]


def turned(t):
    """The same numbers, the last two dimensions transposed in memory."""
    return t.mT.contiguous().mT


def learning(n, D, inner, H, Dh, dtype=torch.float32):
    """→ (kernels, plain lines, inputs with a gradient, others without) of each function that
    learns, for n tokens. dtype: of all but the residual stream and the weights.
    """
    x, y = turned(torch.randn(2, n, D))
    part = torch.randn(n, H + 3, Dh, dtype=dtype)[:, 1 : H + 1]  # strided, like q in qkv
    cos, sin = torch.rand(2, n, Dh // 2)
    for branch in (y.to(dtype), None):
        others = torch.randn(D), 1e-5, dtype
        yield elementwise.AddNorm.apply, elementwise.add_norm, [x, branch], others
    for heads in (part, turned(part)):
        yield attention.Rope.apply, attention.rope, [heads], (cos, sin)
    gate_up = turned(torch.randn(n, 2 * inner, dtype=dtype))
    yield elementwise.SwiGLU.apply, elementwise.swiglu, [gate_up], ()


def with_gradients(function, inputs, others):
    """→ results, and the gradients of their sum in which each element has its own weight."""
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    out = function(*inputs, *others)
    out = [out] if torch.is_tensor(out) else out
    total = 0
    for o in out:
        weight = torch.arange(o.numel(), device=o.device).view(o.shape).mul(0.37).cos()
        total += (o * turned(weight)).sum()
    return [*out, *torch.autograd.grad(total, [t for t in inputs if t is not None])]


def on_cpu(values):
    """A copy whose tensors are on a CPU, fractions in fp32."""

    def moved(x):
        if not torch.is_tensor(x):
            return torch.float32 if isinstance(x, torch.dtype) else x
        return x.clone().cpu().float() if x.is_floating_point() else x.clone().cpu()

    return tree_map(moved, values)


def results_and_cache(kernel, paged, layer):
    """→ (ours, expected) of live rows' results, of keys and of values. The fast kernel finds NaN
    where no row may look. The definition gets heads of the layer's dtype: rounded to bf16 first, a
    number may become another integer.
    """
    right, seen = on_cpu(paged), seen_by_rows(paged)
    rotated = on_cpu(attention.rotated_heads(*layer[:-1]))
    paged = tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, paged)
    live = paged.positions >= 0
    if kernel is not plain_kernel:
        poison(paged.cache, ~seen)
    with patch.object(attention, "rotated_heads", lambda *_: rotated):
        plain = right(*on_cpu(layer))
    ours = kernel(*layer, paged)
    assert not paged.cache.counters.any()
    keys, values = (
        (contents(getattr(paged.cache, name), seen), contents(getattr(right.cache, name), seen))
        for name in ("k", "v")
    )
    return [(ours[live], plain[live.cpu()]), keys, values]


def poison(cache, unseen):
    """Make numbers NaN; of integers, their scales. unseen (pages, PAGE) bool."""
    for layer in (*cache.k, *cache.v):
        numbers = layer.scale if isinstance(layer, int8.Pages) else layer
        numbers.transpose(1, 2)[unseen.to(numbers.device)] = torch.nan


def contents(layers, seen):
    """→ (seen positions, Hkv, Dh): keys or values of layer 1, of integers without their center."""
    every_page = slice(None)
    return on_cpu(layers[1])[every_page].transpose(1, 2)[seen]


def seen_by_rows(paged):
    """→ (pages, PAGE) bool: which positions some row reads or writes."""
    seen = torch.zeros(paged.cache.k[0].shape[0], PAGE, dtype=torch.bool)
    for pages, position in zip(paged.block_table.cpu(), paged.positions.tolist(), strict=True):
        t = torch.arange(position + 1)
        seen[pages[t // PAGE], t % PAGE] = True
    return seen


def plain_kernel(qkv, heads, cos, sin, layer, paged):
    """Attention by the plain kernel, which finds the new tokens in the cache."""
    paged(qkv, heads, cos, sin, layer)
    q, _, _ = attention.rotated_heads(qkv, heads, cos, sin)
    cache, *where, _ = paged
    return attention.plain_attention(q, cache.k[layer], cache.v[layer], *where).flatten(1)


def dequantized(integers):
    """int8.dequantized for the interpreter, which has no PTX."""
    return integers.to(attention.tl.float32) / 128 - 1


def interpreted():
    """Each kernel against its plain torch lines, in fp32, on sizes that a tile does and does not
    divide.
    """
    for sizes in ((5, 64, 512, 4, 16), (17, 97, 1030, 7, 40)):
        for kernels, plain, *given in learning(*sizes):
            # sums of up to 97 terms: a few fp32 roundings
            same(with_gradients(kernels, *given), with_gradients(plain, *given), 4e-6)
    table, ids, out = torch.randn(5, 97), torch.tensor([4, 0, 2]), torch.ones(4, 97)
    elementwise._embed_kernel[3,](ids, table, out, **elementwise.whole_row_options(out))
    same(out, F.pad(table[ids], (0, 0, 0, 1), value=1), 0)  # and writes nothing after its rows
    int8.dequantized = dequantized
    kernels = [attention._paged_attention, plain_kernel]
    for H, Hkv, Dh, head_norms, positions, dtype in (
        (8, 4, 16, False, EDGES, torch.float32),
        (14, 2, 40, True, [5, 300, -1, 599], torch.float32),
        (2, 1, 128, False, [1023, 1024, 1300], torch.float32),  # 6 splits
        (4, 2, 16, False, [5, 300, 599], torch.float32),
        (8, 4, 16, False, EDGES, torch.uint8),
        (14, 2, 40, True, [5, 300, -1, 599], torch.uint8),
    ):
        paged, layer = decode_step(H, Hkv, Dh, positions, PAGE, head_norms, dtype)
        tolerance = 4e-6
        if H == 4:  # q near −12, unrotated, and k near 12: scores near −576, rounded in fp32
            qkv, heads, cos, _, _ = layer
            layer = qkv, heads, torch.ones_like(cos), torch.zeros_like(cos), 1
            qkv[:, :64] -= 12
            paged.cache.k.add_(12)
            qkv[:, 64:96] += 12
            tolerance = 1e-3
        for kernel in kernels[: 1 if Dh == 40 or dtype == torch.uint8 else 2]:
            for pair, atol in zip(
                results_and_cache(kernel, paged, layer), (tolerance, 4e-6, 0), strict=True
            ):
                same(*pair, atol)


def test_kernels_in_the_interpreter(interpret):
    interpret(interpreted)


@each_generation
def test_kernels_compile(cc, everything):
    """Compile for the widest heads. On each path the fast attention's PTX waits for its predecessor
    (PDL).
    """
    types = {
        "*bf16": "qkv k_cache v_cache gate_up y out d_out dy table",
        "*i32": "counters",
        "*i64": "block_table positions ids lengths",
        "fp32": "eps scale sign",
        "*fp32": "acc_splits ml_splits cos sin x weight q_weight k_weight total d_total dx",
    }
    bf16 = dict.fromkeys(("k_scale", "v_scale", "center", "stretch", "LOAD", "STORE"))
    options = dict(PAGE=PAGE, SPLIT=SPLIT, ROWS=8, PDL=cc >= 90) | bf16
    wide = options | dict(DH=128, REP=7, HALF=64)
    narrow = options | dict(DH=64, REP=3, HALF=32, q_weight=None, k_weight=None)
    # few rows: four warps and large tiles, where shared memory has room for them
    jobs = [(narrow, 64, 2), (wide, 128, 4), (narrow, 128, 4), (wide, 32, 2)]
    for shape, tile, warps in jobs if everything else jobs[:2]:
        if warps == 2 or cc in (90, 100):
            most = 168 if tile == 64 else 255  # 168: six CTAs on an SM
            shape["TILE"] = tile
            ptx, _ = build(attention._attention_kernel, cc, shape, types, (), warps, 3, most)
            # a kernel that does not wait lets the next overtake
            assert ptx.count("griddepcontrol.wait") == 2 * (cc >= 90)
    of_int8 = {"*u8": "k_cache v_cache", "*fp32": f"{types['*fp32']} {' '.join(bf16)}"}
    functions = dict(TILE=64, LOAD=int8.load_tile, STORE=int8.store_token)
    for shape, warps in product([wide, narrow], [2, 4]) if everything else [(wide, 2)]:
        constants = {n: x for n, x in shape.items() if n not in bf16} | functions
        # Triton 3.6 spills two registers on sm_120
        build(attention._attention_kernel, cc, constants, types | of_int8, (), warps, 3, 255, 8)
    plain = dict(H=28, REP=7, DH=128, PAGE=PAGE, SPLIT=SPLIT)
    build(attention._plain_kernel, cc, plain, types | {"*fp32": "q m_out l_out acc_out"}, ())
    row = dict(D=8192, TILE=8192)
    jobs = [
        (elementwise._embed_kernel, row, 8, 128),
        (elementwise._add_norm_kernel, row, 8, 128),
        (elementwise._add_norm_backward_kernel, row, 8, 255),
        (elementwise._swiglu_kernel, dict(TILE=512, d_out=None), 2, 64),
        (elementwise._swiglu_kernel, dict(TILE=1024), 4, 64),
        (attention._rope_kernel, dict(DH=128, ROWS=128, HALF=64), 8, 128),
    ]
    compile_with_a_wait(cc, jobs, types, ("F",))


# --- on a GPU


def error(ours, plain):
    return ((ours.float().cpu() - plain).norm(dim=-1) / plain.norm(dim=-1)).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, Hkv, Dh, head_norms",
    [(28, 4, 128, False), (9, 3, 64, True), (5, 1, 80, True)],
)
@pytest.mark.parametrize("positions", [EDGES * 6 + [1023, 1024, 1300, 2450], [1300, 2450, 0, -1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@torch.no_grad()
def test_gpu_attention(H, Hkv, Dh, head_norms, positions, dtype):
    """bf16 against the plain torch lines in fp32; 50 calls give the same bits;
    many rows, and few. The plain kernel, too.
    """
    with torch.device("cuda"):
        paged, layer = decode_step(H, Hkv, Dh, positions, PAGE, head_norms, dtype)

    def kernel(*layer):
        ours = torch.stack([attention._paged_attention(*layer) for _ in range(50)])
        live = ours[:, paged.positions >= 0]
        assert (live == live[0]).all()
        return ours[0]

    # the kernel rounds q, k (twice if normalised), p and the result to bf16, by up to 2⁻⁹ of the
    # value each
    integers = dtype == torch.uint8
    for made in [kernel] if Dh == 80 or integers else [kernel, plain_kernel]:
        result, *stored = results_and_cache(made, paged, layer)
        assert error(*result) < 2 ** (-6 if integers else -7)  # the last key's levels: see below
        # another level of an integer is 1 / 127 of the largest number
        assert max(error(*pair) for pair in stored) < 2 ** (-6 if integers else -7)


@pytest.mark.parametrize("size", [0, 354, 1e4, 1e15])
@pytest.mark.parametrize("positions", [1, 2, 40, 2048])
def test_a_key_bias_of_any_size_leaves_pages_that_can_be_read(size, positions):
    """What is stored is read back, at most half a level off, in units of its stretch."""
    inv_freq = 1e6 ** (-torch.arange(64) / 64)
    angle = torch.arange(positions)[:, None] * inv_freq
    bias = size * torch.randn(2, 128)
    pages = int8.Pages(
        torch.zeros(1, 2, 128, 128, dtype=torch.uint8), bias, angle.cos(), angle.sin()
    )
    assert pages.stretch.isfinite().all() and pages.stretch.min() >= 1
    x = torch.randn(1, 2, 128) + attention.rope(bias[None], angle[-1:].cos(), angle[-1:].sin())
    slots = torch.tensor([0]), slice(None), torch.tensor([5])
    pages[slots] = x
    off = pages[torch.tensor([0])][0, :, 5] / pages.stretch + pages.center - x[0] / pages.stretch
    assert (off.abs() <= 0.51 * pages.scale[0, :, 5] / 128 + 1e-6 * size).all()


def test_a_bias_before_a_norm_is_no_center():
    """Qwen3 normalizes keys after the bias, so they do not have it in common."""
    bias = 100 * torch.randn(3 * 2 * 16)
    angle = torch.rand(9, 8)
    for norms in None, (1, 1, 1e-6):
        attends = SimpleNamespace(
            qkv_proj=SimpleNamespace(base=SimpleNamespace(bias=bias)), heads=Heads(2, 2, norms)
        )
        k, v = torch.zeros(2, 1, 1, 2, 4, 16, dtype=torch.uint8)
        layers = [SimpleNamespace(self_attn=attends)]
        (keys,), (values,) = int8.pages_of_layers(layers, k, v, angle.cos(), angle.sin())
        assert bool(keys.center.any()) == (norms is None)
        assert not values.center.any() and (values.stretch == 1).all()


@pytest.mark.gpu
@torch.no_grad()
def test_gpu_stores_the_integers_that_its_definition_stores():
    """Of the same bf16 numbers: a prefill exactly. The decode kernel's sums may round otherwise, in
    few numbers, by a bf16 step, which is at most half a level of int8.
    """
    positions, n = [700, 300, 5], 600
    with torch.device("cuda"):
        paged, layer = decode_step(28, 4, 128, positions, PAGE, False, torch.uint8)
        qkv, heads, cos, sin = random_layer(n, 28, 4, 128, False, torch.bfloat16)
    cache, table = on_cpu(paged.cache), paged.block_table.cpu()
    t = torch.arange(n)
    slots = SlotMapping(t, table[0, t // PAGE], t % PAGE)
    on_gpu = SlotMapping(*(x.cuda() for x in slots))
    Packed([(n, [])], qkv.device, paged.cache, on_gpu)(qkv, heads, cos, sin, 1)
    _, *rotated = attention.rotated_heads(qkv, heads, cos, sin)
    for ours, plain, x in zip(paged.cache[:2], cache[:2], rotated, strict=True):
        plain[1][slots.page, :, slots.offset] = x.cpu()
        assert torch.equal(ours[1].integers.cpu(), plain[1].integers)
        assert torch.equal(ours[1].scale.cpu(), plain[1].scale)
    paged(*layer)
    _, *rotated = attention.rotated_heads(*layer[:-1])
    t = torch.tensor(positions)
    for ours, plain, x in zip(paged.cache[:2], cache[:2], rotated, strict=True):
        plain[1][table[[0, 1, 2], t // PAGE], :, t % PAGE] = x.cpu()
        levels = (ours[1].integers.cpu().int() - plain[1].integers).abs()
        assert levels.max() <= 1 and levels.sum() < 0.01 * x.numel()
        torch.testing.assert_close(ours[1].scale.cpu(), plain[1].scale, rtol=2**-8, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("H, Hkv, Dh, head_norms", [(28, 4, 128, False), (9, 3, 64, True)])
def test_gpu_packed_tokens_and_their_gradients(H, Hkv, Dh, head_norms):
    """bf16 against fp32 on a CPU: 64 similar answers to one prompt, whose gradients have centred
    weights, as advantages are, and cancel to a third in the prompt; then small texts.
    """
    P, A, G = 300, 20, 64
    groups = [(P, [A] * G), (1, [129, 0, 1]), (40, [])]  # 0: an answer of its end token alone
    n, end = P + A * G + 171, P + A * G
    with torch.device("cuda"):
        qkv, heads, cos, sin = random_layer(n, H, Hkv, Dh, head_norms, torch.bfloat16)
        weight, advantages = torch.randn(n, H * Dh), torch.randn(G)
    for x, own in ((qkv, 0.3), (cos, 0), (sin, 0), (weight, 0)):
        x[P:end] = x[P : P + A].repeat(G, 1) + own * x[P:end]
    weight[P:end] *= (advantages - advantages.mean()).repeat_interleave(A)[:, None]
    weight[:P] = 0
    layer, found = (qkv, heads, cos, sin, weight), []
    for qkv, *others, weight in (layer, on_cpu(layer)):
        out = Packed(groups, qkv.device)(qkv.requires_grad_(), *others, 0)
        (grad,) = torch.autograd.grad((out.float() * weight).sum(), qkv)
        found.append((out, *grad.tensor_split((P, end))))
    # q, k, p, their gradients and the results are rounded by up to 2⁻⁹ each, but an answer's
    # gradient in the prompt by three times as much of their sum, and by ten times if summed in bf16
    for ours, plain in zip(*found, strict=True):
        assert error(ours.flatten(), plain.flatten()) < 2**-6


@pytest.mark.gpu
def test_gpu_reads_embeddings_in_pinned_host_memory():
    """Bit for bit, in a CUDA graph that is replayed with other ids."""
    table = torch.randn(999, 896).bfloat16().pin_memory()
    ids = torch.randint(999, (3, 70), device="cuda")
    elementwise.embed(ids, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = elementwise.embed(ids, table)
    ids.random_(999)
    graph.replay()
    assert torch.equal(out.cpu(), table[ids.cpu()].float())


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(37, 3584, 18944, 28, 128), (70_000, 32, 32, 2, 16)])
def test_gpu_norm_swiglu_and_rope(sizes):
    """bf16 forward and backward against the plain torch lines in fp32 of the same numbers on a CPU.
    70 000 tokens work, although only the first axis of a CUDA grid may exceed 65 535.
    """
    with torch.device("cuda"):
        cases = [case for _, *case in learning(*sizes, torch.bfloat16)]
    for function, *given in cases:
        found = with_gradients(function, *given), with_gradients(function, *on_cpu(given))
        for ours, plain in zip(*found, strict=True):  # a few bf16 roundings of 2⁻⁹ each
            assert error(ours.flatten(), plain.flatten()) < 2**-7
