"""A block's operations against transformers and a plain attention; kernels against plain torch."""

import pytest
import torch
from conftest import build, compile_with_a_wait, each_generation

from ops import attention, elementwise
from ops.attention import PAGE, SPLIT, Heads, KVCache, Packed, Paged, Places


def same(ours, plain, atol):
    torch.testing.assert_close(ours, plain, atol=atol, rtol=0)


def test_norm_rope_and_swiglu_equal_their_references():
    """transformers' RMSNorm and rotation, and the formula of SwiGLU, on odd sizes."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    x, norm = torch.randn(3, 5, 37).bfloat16(), LlamaRMSNorm(37, 1e-3)
    weight = norm.weight.data.normal_()
    ours = elementwise.rms_norm(x.float(), weight, 1e-3)
    same(ours, norm(x.float()), 2e-6)
    same(
        elementwise.rms_norm(x, weight, 1e-3), ours.bfloat16(), 0
    )  # bf16 is rounded once, at the end
    q, angle = torch.randn(15, 7, 6), torch.randn(15, 3)
    twice = angle.repeat(1, 2)
    theirs, _ = apply_rotary_pos_emb(q, q, twice.cos(), twice.sin())
    same(attention.rope(q, angle.cos(), angle.sin()), theirs, 1e-6)
    gate, up = torch.randn(2, 11)
    same(elementwise.swiglu(torch.cat([gate, up])), gate * gate.sigmoid() * up, 1e-6)


# --- attention against its definition


def attention_by_hand(q, k, v):
    """One query (H, Dh), keys and values (n, Hkv, Dh) → (H·Dh,) f64, with a key head for each query
    head.
    """
    H, Dh = q.shape
    k, v = (x.double().repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    weights = (torch.einsum("hd,nhd->hn", q.double(), k) / Dh**0.5).softmax(1)
    return torch.einsum("hn,nhd->hd", weights, v).flatten()


def random_layer(n, H, Hkv, Dh, head_norms, dtype=torch.float32):
    """→ qkv, heads, cos, sin of n tokens, each at an angle of its own."""
    norms = (*(torch.rand(2, Dh) + 0.5), 1e-5) if head_norms else None
    angle = torch.rand(n, Dh // 2) * 7
    qkv = torch.randn(n, (H + 2 * Hkv) * Dh, dtype=dtype)
    return qkv, Heads(H, Hkv, norms), angle.cos(), angle.sin()


def heads_by_hand(qkv, heads, cos, sin):
    """→ q, k, v (n, heads, Dh) of a layer, q and k normalised and rotated."""
    H, Hkv, norms = heads
    q, k, v = qkv.view(len(qkv), H + 2 * Hkv, -1).split((H, Hkv, Hkv), 1)
    if norms:
        q = elementwise.rms_norm(q, norms[0], norms[2])
        k = elementwise.rms_norm(k, norms[1], norms[2])
    return attention.rope(q, cos, sin), attention.rope(k, cos, sin), v


SHAPES = [(6, 6, False), (6, 2, True), (5, 1, False)]  # H, Hkv, head_norms
# prompts with answers, one of them empty; a prompt alone; a prompt of one token
GROUPS = [(5, [3, 1, 0]), (2, []), (1, [4]), (3, [2, 2])]


def seen_by(groups):
    """→ for each token of a flat row the tokens that it sees, by definition."""
    seen, end = [], 0
    for prompt, answers in groups:
        start = end
        end += prompt
        seen += [[*range(start, t + 1)] for t in range(start, end)]
        for answer in answers:
            read = [*range(start, start + prompt)]
            seen += [[*read, *range(end, t + 1)] for t in range(end, end + answer)]
            end += answer
    return seen


@pytest.mark.parametrize("H, Hkv, head_norms", SHAPES)
def test_a_token_of_a_flat_row_sees_its_prompt_and_its_own_answer(H, Hkv, head_norms):
    """No other answer, no other prompt, nothing later. Positions count from the start of the
    prompt.
    """
    seen = seen_by(GROUPS)
    layer = random_layer(len(seen), H, Hkv, 8, head_norms)
    q, k, v = heads_by_hand(*layer)
    packed = Packed(GROUPS, torch.device("cpu"))
    out = packed(*layer, 0)
    assert packed.positions.tolist() == [len(tokens) - 1 for tokens in seen]
    for t, tokens in enumerate(seen):  # fp32 sums of 9 products of about 3
        same(out[t].double(), attention_by_hand(q[t], k[tokens], v[tokens]), 2e-6)


@pytest.mark.parametrize("groups", [GROUPS, [(4, []), (1, []), (6, [])]])
def test_a_gpu_is_told_the_same_of_a_flat_row(groups):
    """A text's queries are its last keys: flash attention is causal at the end. Prompts alone need
    no list of keys, because each token is read by one text.
    """
    seen, packed = seen_by(groups), Packed(groups, torch.device("cpu"))
    assert (packed.keys is None) == (groups is not GROUPS)
    keys = [*range(len(seen))] if packed.keys is None else packed.keys.tolist()
    queries, begins = (x.tolist() for x in packed.begins)
    assert queries[-1] == len(seen) and begins[-1] == len(keys)
    found, lengths = [], []
    for text in range(len(queries) - 1):
        count = queries[text + 1] - queries[text]
        read = keys[begins[text] : begins[text + 1]]
        lengths.append((count, len(read)))
        found += [read[: len(read) - count + 1 + i] for i in range(count)]
    assert found == seen and packed.longest == tuple(map(max, zip(*lengths, strict=True)))


def test_a_prefill_stores_keys_and_values_at_their_places_and_nowhere_else():
    """Rotated, in the layer that is called."""
    layer = random_layer(9, 4, 2, 8, True)
    _, k, v = heads_by_hand(*layer)
    cache = KVCache(*torch.randn(2, 3, 5, 2, 4, 8), counters=None)
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    places = [[1, 4, 0], [2, 4, 3], [3, 0, 1], [8, 2, 2], [5, 0, 2]]  # token, page, offset
    for token, page, offset in places:
        expected_k[1, page, :, offset] = k[token]
        expected_v[1, page, :, offset] = v[token]
    packed = Packed([(4, []), (5, [])], torch.device("cpu"), cache, Places(*torch.tensor(places).T))
    packed(*layer, 1)
    same(cache.k, expected_k, 1e-6)
    same(cache.v, expected_v, 0)


def decode_step(H, Hkv, Dh, positions, page_size, head_norms, dtype=torch.float32):
    """→ a random Paged, and the arguments of its call. Pages are shuffled, two belong to no row.
    Rows 2i and 2i + 1 share each page that both have filled.
    """
    pieces = max(positions) // SPLIT + 1
    blocks = -(-pieces * SPLIT // page_size)
    table, taken = [], 0
    for b, position in enumerate(positions):
        whole = max(0, min(positions[b - 1 : b + 1])) // page_size if b % 2 else 0
        shared = table[-1][:whole] if whole else []
        own = position // page_size + 1 - whole
        pages = [*shared, *range(taken, taken + own)]
        table.append(pages + [0] * (blocks - len(pages)))
        taken += own
    k, v = torch.randn(2, 2, taken + 2, Hkv, page_size, Dh, dtype=dtype)
    counters = torch.zeros(len(positions) * Hkv, dtype=torch.int32)
    block_table = torch.randperm(taken + 2)[torch.tensor(table)]
    paged = Paged(KVCache(k, v, counters), block_table, torch.tensor(positions), pieces)
    return paged, (*random_layer(len(positions), H, Hkv, Dh, head_norms, dtype), 1)


@pytest.mark.parametrize("H, Hkv, head_norms", SHAPES)
def test_a_decode_step_equals_its_definition(H, Hkv, head_norms):
    """k and v are written at the row's position, in its page, and nowhere for a row that has ended.
    Attention reads 0 … position, in pages that rows may share.
    """
    positions = [9, 12, -1, 7, 8, 11, 0, 3]
    paged, layer = decode_step(H, Hkv, 8, positions, 4, head_norms)
    table = paged.block_table
    assert torch.equal(table[0, :2], table[1, :2]) and torch.equal(table[4, :2], table[5, :2])
    q, k, v = heads_by_hand(*layer[:4])
    expected_k, expected_v = paged.cache.k.clone(), paged.cache.v.clone()
    out = paged(*layer)
    live = [b for b, position in enumerate(positions) if position >= 0]
    for b in live:
        page, offset = table[b, positions[b] // 4], positions[b] % 4
        expected_k[1, page, :, offset] = k[b]
        expected_v[1, page, :, offset] = v[b]
    for b in live:
        read = torch.arange(positions[b] + 1)
        page, offset = table[b, read // 4], read % 4
        keys, values = (x[1, page, :, offset] for x in (expected_k, expected_v))
        same(out[b].double(), attention_by_hand(q[b], keys, values), 2e-6)
    same(paged.cache.k, expected_k, 1e-6)
    same(paged.cache.v, expected_v, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_that_cancel_are_summed_in_fp32(device):
    """64 answers read token 2; each sum is 30 times smaller than the gradients' norm. Integers of 7
    bits are exact in bf16, and so are their sums in fp32, but bf16 rounds a sum of over 256.
    """
    x = torch.randn(4, 500).bfloat16().to(device).requires_grad_()
    index = torch.tensor([2] * 64 + [0])
    d = torch.randint(-100, 101, (65, 500)).double()
    d[32:64] = torch.randint(-4, 5, (32, 500)) - d[:32]
    out = attention.Gather.apply(x, index.to(device))
    assert torch.equal(out, x[index])
    (found,) = torch.autograd.grad(out, x, d.bfloat16().to(device))
    exact = torch.zeros(4, 500).double().index_add_(0, index, d)
    assert exact[2].norm() < d[:64].norm() / 20
    assert torch.equal(found.cpu(), exact.bfloat16())


# --- Triton kernels without a GPU

# positions at the edges of tiles and pieces, the last one, and −1: a finished row
EDGES = [0, 127, 128, 255, 256, 511, 512, 599, -1]


def learning(D, F, H, Dh):
    """→ (kernels, plain lines, inputs with a gradient, others without) of each function that
    learns.
    """
    x, y, w = torch.randn(5, D), torch.randn(5, D), torch.randn(D)
    part = torch.randn(6, H + 3, Dh)[:, 1 : H + 1]  # strided, like q in qkv
    angle = torch.rand(6, Dh // 2) * 7
    yield elementwise.AddNorm.apply, elementwise.add_norm, [x, y], [w, 1e-5, torch.float32]
    yield elementwise.AddNorm.apply, elementwise.add_norm, [x, None], [w, 1e-5, torch.float32]
    yield attention.Rope.apply, attention.rope, [part], [angle.cos(), angle.sin()]
    for rows in (3, 17):
        yield elementwise.SwiGLU.apply, elementwise.swiglu, [torch.randn(rows, 2 * F)], []


def with_gradients(function, inputs, others, turned=False):
    """→ results, and the gradients of their sum in which each element has its own weight.
    turned: inputs and gradients have their last two dimensions transposed in memory."""

    def placed(t):
        return t.mT.contiguous().mT if turned else t

    inputs = [t if t is None else placed(t).detach().requires_grad_() for t in inputs]
    out = function(*inputs, *others)
    out = [out] if torch.is_tensor(out) else out
    total = 0
    for o in out:
        weight = torch.arange(o.numel()).view(o.shape).mul(0.37).cos()
        total += (o * placed(weight)).sum()
    return [*out, *torch.autograd.grad(total, [t for t in inputs if t is not None])]


def on_cpu(value):
    """A copy whose tensors are on a CPU, fractions in fp32."""
    if isinstance(value, tuple):
        parts = map(on_cpu, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not torch.is_tensor(value):
        return value
    return value.clone().cpu().float() if value.is_floating_point() else value.cpu()


def results_and_cache(kernel, paged, layer):
    """→ (ours, expected) of live rows' results, of keys and of values."""
    right = on_cpu(paged)
    plain = right(*on_cpu(layer))
    ours, live = kernel(*layer, paged), paged.positions >= 0
    assert not paged.cache.counters.any()
    (k, v, _), (plain_k, plain_v, _) = paged.cache, right.cache
    return (ours[live], plain[live.cpu()]), (k, plain_k), (v, plain_v)


def interpreted():
    """Each kernel against its plain torch lines, in fp32, on sizes that a tile does and does not
    divide.
    """
    for D, F, H, Dh in ((64, 512, 4, 16), (97, 1030, 7, 40)):
        for kernels, plain, *inputs in learning(D, F, H, Dh):
            for turned in (False, True):
                found = [with_gradients(f, *inputs, turned) for f in (kernels, plain)]
                same(*found, 4e-6)  # sums of up to 97 terms: a few fp32 roundings
        table, ids, out = (
            torch.randn(5, D),
            torch.tensor([[4, 0, 2], [1, 4, 3]]),
            torch.empty(2, 3, D),
        )
        elementwise._embed_kernel[6,](ids, table, out, **elementwise.whole_row_options(out))
        same(out, elementwise.embed(ids, table), 0)
    for H, Hkv, Dh, head_norms, positions in (
        (8, 4, 16, False, EDGES),
        (14, 2, 40, True, [5, 300, -1, 599]),
        (2, 1, 128, False, [1023, 1024, 1300]),  # 6 pieces
        (4, 2, 16, False, [5, 300, 599]),
    ):
        paged, layer = decode_step(H, Hkv, Dh, positions, PAGE, head_norms)
        qkv, _, cos, sin, _ = layer
        tolerance = 4e-6
        if H == 4:  # all scores near −16 · 12² / 4: fp32 rounds scores of 600
            cos.fill_(1)
            sin.zero_()
            qkv[:, :64] -= 12
            qkv[:, 64:96] += 12
            paged.cache.k.add_(12)
            tolerance = 1e-3
        results, keys, values = results_and_cache(attention._paged_attention, paged, layer)
        same(*results, tolerance)
        same(*keys, 4e-6)
        same(*values, 0)


def test_kernels_in_the_interpreter(interpret):
    interpret(interpreted)


@each_generation
def test_kernels_compile(cc, everything):
    """Compile for the widest heads. On each path the attention's PTX waits for its predecessor
    (PDL).
    """
    names_of = {
        "*bf16": "qkv k_cache v_cache gate_up y out d_out dy table",
        "*i32": "counters",
        "*i64": "block_table positions ids",
        "fp32": "eps scale sign",
        "*fp32": "sums maxima cos sin x weight q_weight k_weight total d_total dx",
    }
    wide = dict(DH=128, REP=7, HALF=64)
    narrow = dict(DH=64, REP=3, HALF=32, q_weight=None, k_weight=None)
    # few rows: four warps and large tiles, where shared memory has room for them
    jobs = [(narrow, 64, 2), (wide, 128, 4), (narrow, 128, 4), (wide, 32, 2)]
    for shape, tile, warps in jobs if everything else jobs[:2]:
        if warps == 2 or cc in (90, 100):
            constants = shape | dict(PAGE=PAGE, ROWS=8, PDL=cc >= 90, TILE=tile)
            ptx, _ = build(
                attention._attention_kernel,
                cc,
                constants,
                names_of,
                (),
                warps,
                registers=168 if tile == 64 else 255,
            )  # 168: six CTAs on an SM
            waits = ptx.count("griddepcontrol.wait")
            assert waits == 2 * (cc >= 90), "one that does not wait lets the next overtake"
    row = dict(D=8192, TILE=8192)
    jobs = [
        (elementwise._embed_kernel, row, 8, 128),
        (elementwise._add_norm_kernel, row, 8, 128),
        (elementwise._add_norm_backward_kernel, row, 8, 255),
        (elementwise._swiglu_kernel, dict(TILE=1024, d_out=None), 4, 64),
        (elementwise._swiglu_kernel, dict(TILE=512, d_out=None), 2, 64),
        (elementwise._swiglu_kernel, dict(TILE=1024), 4, 64),
        (attention._rope_kernel, dict(DH=128, ROWS=128, HALF=64), 8, 128),
    ]
    compile_with_a_wait(cc, jobs, names_of, ("F",))


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, Hkv, Dh, head_norms",
    [(28, 4, 128, False), (9, 3, 64, False), (16, 8, 128, True), (5, 1, 80, True)],
)
@pytest.mark.parametrize("positions", [EDGES * 6 + [1023, 1024, 1300, 2450], [1300, 2450, 0, -1]])
def test_gpu_attention(H, Hkv, Dh, head_norms, positions):
    """bf16 against the plain torch lines in fp32, with shared pages; 50 calls give the same bits;
    many rows, and few.
    """
    with torch.device("cuda"):
        paged, layer = decode_step(H, Hkv, Dh, positions, PAGE, head_norms, torch.bfloat16)

    @torch.no_grad()
    def kernel(*arguments):
        *layer, paged = arguments
        ours = torch.stack([paged(*layer) for _ in range(50)])
        live = ours[:, paged.positions >= 0]
        assert (live == live[0]).all()
        return ours[0]

    # the kernel rounds q, k (twice if normalised), p and the result to bf16, by up to 2⁻⁹ of the
    # value each
    for got, expected in results_and_cache(kernel, paged, layer):
        error = (got.float().cpu() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize(
    "H, Hkv, Dh, head_norms", [(28, 4, 128, False), (9, 3, 64, False), (16, 8, 128, True)]
)
def test_gpu_a_flat_row_and_its_gradients(H, Hkv, Dh, head_norms):
    """bf16 against fp32 on a CPU: 64 similar answers to one prompt, whose gradients have centred
    weights, as advantages are, and cancel to a third in the prompt; then small texts.
    """
    P, A, G = 300, 20, 64
    groups = [(P, [A] * G), (1, [129, 0, 1]), (40, [])]  # 0: an answer of its end token alone
    n, end = P + A * G + 171, P + A * G
    qkv, heads, cos, sin = random_layer(n, H, Hkv, Dh, head_norms)
    weight, advantages = torch.randn(n, H * Dh), torch.randn(G)
    first = P + torch.arange(A).repeat(G)  # the same token of the first answer
    qkv[P:end] = qkv[first] + 0.3 * qkv[P:end]
    for x in (cos, sin, weight):
        x[P:end] = x[first]
    weight[P:end] *= (advantages - advantages.mean()).repeat_interleave(A)[:, None]
    weight[:P] = 0
    found = []
    for device, dtype in (("cuda", None), ("cpu", torch.float32)):
        leaf = qkv.bfloat16().to(device, dtype).requires_grad_()
        norms = heads.norms and (*(w.to(device) for w in heads.norms[:2]), heads.norms[2])
        layer = leaf, heads._replace(norms=norms), cos.to(device), sin.to(device), 0
        out = Packed(groups, torch.device(device))(*layer)
        (grad,) = torch.autograd.grad((out.float() * weight.to(device)).sum(), leaf)
        found.append((out, grad[:P], grad[P:end], grad[end:]))
    # q, k, p, their gradients and the results are rounded by up to 2⁻⁹ each, but an answer's
    # gradient in the prompt by three times as much of their sum, and by ten times if summed in bf16
    for ours, plain in zip(*found, strict=True):
        assert (ours.float().cpu() - plain).norm() / plain.norm() < 2**-6


@pytest.mark.gpu
def test_gpu_an_update_may_have_more_rows_than_a_grid_is_high():
    """70 000 tokens work, although only the first axis of a CUDA grid may exceed 65 535."""
    x, weight = torch.randn(70_000, 32, device="cuda"), torch.ones(32, device="cuda")
    angle = torch.zeros(70_000, 8, device="cuda")
    heads = x.view(-1, 2, 16)
    same(attention.rope(heads, angle.cos(), angle.sin()), heads, 0)
    for out in (elementwise.swiglu(x), elementwise.add_norm(x, x, weight, 1e-5, x.dtype)[1]):
        assert out[-1].abs().sum() > 0


def embeddings_and_ids():
    """→ a bf16 table in pinned host memory, and (3, 70) ids on the GPU."""
    table = torch.randn(999, 896).bfloat16().pin_memory()
    return table, torch.randint(999, (3, 70), device="cuda")


@pytest.mark.gpu
def test_gpu_reads_embeddings_in_pinned_host_memory():
    """The same bits as from a table on the GPU."""
    table, ids = embeddings_and_ids()
    assert torch.equal(elementwise.embed(ids, table).cpu(), table[ids.cpu()].float())


@pytest.mark.gpu
def test_gpu_a_graph_reads_the_embeddings_of_other_ids():
    """A CUDA graph that is replayed with other ids reads their embeddings from the host."""
    table, ids = embeddings_and_ids()
    elementwise.embed(ids, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = elementwise.embed(ids, table)
    for _ in range(2):
        ids.random_(999)
        graph.replay()
        assert torch.equal(out.cpu(), table[ids.cpu()].float())


@pytest.mark.gpu
def test_gpu_norm_swiglu_and_rope():
    """bf16 forward and backward against the plain torch lines in fp32 of the same numbers on a
    CPU.
    """
    x, y, w = torch.randn(3, 37, 3584)
    gate_up, part = torch.randn(37, 2 * 18944), torch.randn(18, 36, 128)[:, :28]
    cos, sin = torch.rand(2, 18, 64)

    def add_norm(x, y, w):
        return elementwise.add_norm(x, y, w, 1e-5, torch.bfloat16 if x.is_cuda else torch.float32)

    for function, learn, others in (
        (add_norm, [x, y.bfloat16()], [w[0]]),
        (lambda x, w: add_norm(x, None, w)[1], [x], [w[0]]),
        (attention.rope, [part.bfloat16()], [cos, sin]),
        (elementwise.swiglu, [gate_up.bfloat16()], []),
        (elementwise.swiglu, [gate_up[:9].bfloat16()], []),
    ):
        found = []
        for device, dtype in (("cuda", None), ("cpu", torch.float32)):
            leaves = [t.to(device, dtype).detach().requires_grad_() for t in learn]
            out = function(*leaves, *(t.to(device) for t in others))
            out = [out] if torch.is_tensor(out) else list(out)
            weights = [
                torch.arange(o.numel(), device=device).view(o.shape).mul(0.37).cos() for o in out
            ]
            total = sum((o.float() * v).sum() for o, v in zip(out, weights, strict=True))
            found.append(out + list(torch.autograd.grad(total, leaves)))
        for ours, plain in zip(*found, strict=True):  # a few bf16 roundings of 2⁻⁹ each
            assert (ours.float().cpu() - plain).norm() / plain.norm() < 2**-7
