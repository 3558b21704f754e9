"""The sampler against the trainer's log-probabilities; slots, graphs and memory change no token."""

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_checkpoint
from transformers import TopPLogitsWarper

import aqn
import lora
import model
import rollout
from ops import attention, sampling
from rollout import Rollout, Sampler
from tools import weights

# of eight different lengths, so that a length tells the prompt
PROMPTS = [
    [(7 * i + 3 * t) % 90 + 5 for t in range(n)] for i, n in enumerate((3, 11, 1, 6, 17, 8, 2, 5))
]
STOPS = [2, 11, 23, 37, 41, 59, 73]  # 7 of 97 tokens: answers of about a dozen tokens
DRAW = PROMPTS, 4, 20, 1.0, STOPS, 5, 2  # 32 answers of at most 20 tokens


@pytest.fixture(scope="module")
def m(tmp_path_factory):
    """→ a tiny model of two layers whose lora_B is not zero."""
    folder = tmp_path_factory.mktemp("two_layers")
    tiny_checkpoint(folder, num_hidden_layers=2)
    return learned(model.load(str(folder), quant="bf16", rank=4, alpha=8), 0.05)


@pytest.fixture(scope="module")
def r(m):
    """→ what DRAW gives with a slot for each row, which no other way of sampling may change."""
    return Sampler(m).generate(*DRAW)


def learned(m, size):
    generator = torch.Generator().manual_seed(3)
    for layer in lora.lora_layers(m).values():
        values = torch.empty(layer.lora_B.shape).normal_(0, size, generator=generator)
        layer.lora_B.data.copy_(values)
    lora.refresh(m)
    return m


def generate(m, prompts=PROMPTS, G=4, new=20, temperature=1.0, stops=STOPS, seed=5, step=2, **more):
    return Sampler(m).generate(prompts, G, new, temperature, stops, seed, step, **more)


def answered(r):
    return model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)


def rescored(m, r, temperature=1.0):
    """→ (B, T) log-probabilities with gradients on, as the trainer computes them."""
    return m.logprobs(r.tokens, r.prompt_lengths, r.lengths, temperature)[0]


@torch.no_grad()
def logits(m, r):
    """→ (answer tokens, V) the trainer's logits."""
    hidden = m(r.tokens, torch.arange(r.tokens.shape[1]).expand_as(r.tokens))
    return m.logits(hidden[:, :-1][answered(r)[:, 1:]])


def gap(m, r, temperature=1.0):
    """→ the largest difference at any token between the recorded log-probability and the
    trainer's.
    """
    return (r.logprobs - rescored(m, r, temperature).detach()).abs().max().item()


def check_same(s, r):
    """The same answers; log-probabilities may differ by the order of fp32 sums."""
    assert torch.equal(s.tokens, r.tokens) and torch.equal(s.lengths, r.lengths)
    assert torch.equal(s.finished, r.finished)
    torch.testing.assert_close(s.logprobs, r.logprobs, atol=1e-4, rtol=0)


# --- log-probabilities


# both compute in fp32 and differ by 1e-5, the order of sums; temperature on one side only would
# give 1
@pytest.mark.parametrize("quant, temperature", [("bf16", 1.0), ("rtn", 0.7)])
def test_recorded_logprobs_are_the_trainers(tiny, quant, temperature):
    """They agree at every token of 32 answers of different lengths, and are exactly 0 elsewhere."""
    m = learned(model.load(str(tiny), quant, rank=4, alpha=8), 0.05)
    r = generate(m, temperature=temperature)
    assert len(r.lengths.unique()) > 10 and 0 < r.finished.sum() < len(r.tokens) == 32
    assert gap(m, r, temperature) < 1e-4
    mask = answered(r)
    assert (r.logprobs[mask] < 0).all() and (r.logprobs[~mask] == 0).all()
    ends, t = (r.prompt_lengths + r.lengths)[:, None], torch.arange(r.tokens.shape[1])
    assert not r.tokens[t >= ends].any()


def test_noise_is_in_the_sampler_and_its_logprobs(m):
    """Under AQN they are the trainer's with the same noise; no noise or another draw gives
    others.
    """
    with aqn.noisy_norms(m, 0.05, 1, 7):
        r = generate(m)
        assert gap(m, r) < 1e-4
    d = (rescored(m, r).detach() - r.logprobs)[answered(r)]
    # k3, as in the metric kl_noise: rounding would give 1e-10, this noise gives 1e-2
    assert (d.exp() - 1 - d).mean() > 1e-3
    with aqn.noisy_norms(m, 0.05, 1, 8):
        assert gap(m, r) > 1e-2


def test_an_optimizer_step_reaches_the_sampler_through_refresh(tiny):
    """Sampler and trainer both read the copies: they agree at any time and change at refresh
    only.
    """
    m = learned(model.load(str(tiny), quant="bf16", rank=4, alpha=8), 0.05)
    r = generate(m)
    rescored(m, r).sum().backward()
    torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-4).step()
    stale = generate(m)
    assert torch.equal(stale.logprobs, r.logprobs) and gap(m, stale) < 1e-4
    lora.refresh(m)
    assert gap(m, stale) > 1e-2
    fresh = generate(m)
    assert gap(m, fresh) < 1e-4 and not torch.equal(fresh.logprobs, stale.logprobs)


def test_top_p_draws_from_the_nucleus_of_the_trainers_logits(m, monkeypatch):
    """Every token is in the nucleus, with its log-probability in the renormalised nucleus. Without
    top_p nothing is sorted and the policy is the trainer's.
    """
    r = generate(m, temperature=0.7, top_p=0.5)
    assert r.lengths.sum() > 200 and gap(m, r, 0.7) > 0.1
    mask = answered(r)
    cut = TopPLogitsWarper(0.5)(None, logits(m, r) / 0.7).log_softmax(-1)
    expected = cut.gather(1, r.tokens[mask][:, None])[:, 0]
    assert expected.isfinite().all() and expected.mean() > -2
    torch.testing.assert_close(r.logprobs[mask], expected, atol=1e-4, rtol=0)
    monkeypatch.setattr(sampling, "nucleus", None)
    assert gap(m, generate(m, temperature=0.7, top_p=1.0), 0.7) < 1e-4


def test_temperature_0_is_greedy(m):
    """It draws the argmax of the trainer's logits; the log-probability is that at temperature 1."""
    r = generate(m, temperature=0.0)
    assert torch.equal(logits(m, r).argmax(-1), r.tokens[answered(r)]) and gap(m, r, 0.0) < 1e-4


# --- what a sample depends on


def test_a_sample_depends_on_its_number_alone(m, r):
    """Not on the batch, the group size or max_new_tokens; but on the seed and the step."""
    rows = r.answers()
    part = generate(m, PROMPTS[5:6], first_sequence=20)
    assert part.answers() == rows[20:24] and part.tokens.shape[1] == 8 + part.lengths.max() < 28
    assert generate(m, PROMPTS[2:4], G=2, first_sequence=8).answers()[:2] == rows[8:10]
    assert generate(m, new=7).answers() == [row[:7] for row in rows]
    for change in ({"seed": 6}, {"step": 3}, {"first_sequence": 64}):
        assert generate(m, **change).answers() != rows


def test_rows_are_prompt_major_and_hold_the_sampled_ids(m, monkeypatch):
    """Row p·G + g is prompt p and then the tokens that sampling.sample returned, in order. A token
    is drawn by its place in the answer, not in the row, which depends on the length of the prompt.
    """
    drawn, sample = {}, sampling.sample

    def spy(logits, temperature, seed, step, sequence, position):
        token, logprob = sample(logits, temperature, seed, step, sequence, position)
        columns = (x.tolist() for x in (sequence, position, token, logprob))
        for number, *one in zip(*columns, strict=True):
            drawn.setdefault(number, []).append(one)
        return token, logprob

    monkeypatch.setattr(sampling, "sample", spy)
    r = generate(m, G=2)
    assert r.tokens.dtype == torch.int64 and r.logprobs.dtype == torch.float32
    answers = r.answers()
    for b in range(16):
        p, n = len(PROMPTS[b // 2]), int(r.lengths[b])
        places, token, logprob = (list(x) for x in zip(*drawn[b], strict=True))
        assert places == list(range(n))
        assert r.prompt_lengths[b] == p and r.tokens[b, : p + n].tolist() == PROMPTS[b // 2] + token
        assert r.logprobs[b, p : p + n].tolist() == logprob
        assert answers[b] == token[: n - int(r.finished[b])]


def test_every_stop_token_ends_an_answer(m):
    """As the first, a middle or the last token. A row that reaches the limit without one is not
    finished.
    """
    whole = generate(m, PROMPTS[:1], stops=[])
    assert (whole.lengths == 20).all() and not whole.finished.any()
    row = whole.tokens[1, 3:].tolist()
    for at, new in ((0, 20), (7, 20), (19, 20), (19, 19)):
        assert row.index(row[at]) == at  # else choose another row
        s = generate(m, PROMPTS[:1], new=new, stops=[row[at], 96])
        n = min(at + 1, new)
        assert s.lengths[1] == n and s.finished[1] == (at < new)
        assert s.tokens[1, 3 : 3 + n].tolist() == row[:n] and s.answers()[1] == row[:at]


def test_a_prompt_that_does_not_fit_is_refused_by_number(m):
    """A context of 128 tokens holds 108 + 20, not 109 + 20; an empty prompt has no token to
    read.
    """
    generate(m, [[5] * 108], G=1)
    for prompts, words in (
        ([[5], [5] * 109], "prompt 1 .*109.*20.*128.*--max-new-tokens"),
        ([[5], [6], []], "prompt 2 is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            generate(m, prompts)


# --- slots, graphs and memory


@pytest.fixture
def gpu_attention(monkeypatch):
    """The attention reads as on a GPU: a row reads its prompt in its leader's slot, and a finished
    row gives NaN. It checks that pieces hold every row, that the leader is the first row of a group
    in the batch, and that a row which has begun goes on in each step.
    """
    plain, before = attention.cached_attention, {}

    def read(qkv, norms, cos, sin, cache, layer, positions):
        Hkv, length, Dh = cache.k.shape[2:]
        assert positions.max() < cache.pieces * attention.SPLIT < length + attention.SPLIT
        assert len(positions) <= len(cache.k[0])
        if layer == 0:
            first, now = {}, {}
            state = (x.tolist() for x in (cache.slots, cache.leaders, cache.shared, positions))
            for slot, leader, n, at in zip(*state, strict=True):
                first.setdefault(n, slot)
                if at >= 0:
                    assert leader == first[n] and n + 1 in map(len, PROMPTS)
                    assert at == n or at - 1 == before[slot]
                    now[slot] = at
            before.clear()
            before.update(now)
        going = positions >= 0
        slots = cache.slots[going]
        out = qkv.new_full((len(qkv), qkv.shape[1] - 2 * Hkv * Dh), torch.nan)
        if len(slots):
            prompt = torch.arange(length)[:, None] < cache.shared[going, None, None, None]
            for x in (cache.k[layer], cache.v[layer]):
                x[slots] = torch.where(prompt, x[cache.leaders[going]], x[slots])
            rows = SimpleNamespace(k=cache.k, v=cache.v, slots=slots)
            where = rows, layer, positions[going]
            out[going] = plain(qkv[going], norms, cos[going], sin[going], *where)
        return out

    monkeypatch.setattr(attention, "cached_attention", read)


@pytest.fixture
def reads(m, monkeypatch):
    """→ a list that grows by the tokens of each forward pass."""
    calls = []

    def spy(real):
        def read(ids, *rest):
            calls.append(ids.clone())
            return real(ids, *rest)

        return read

    for name in ("prefill", "decode"):
        monkeypatch.setattr(m, name, spy(getattr(m, name)))
    return calls


@pytest.mark.parametrize(
    "slots", [2, 5, 13, 31, 300, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8, 17))]
)
def test_slots_change_nothing(m, r, gpu_attention, reads, monkeypatch, slots):
    """With fewer slots than rows, rows wait for free slots, but every row draws the same tokens. A
    prompt is read once for its group, and again only if none of its group runs; finished rows
    leave.
    """
    monkeypatch.setattr(m, "gradient_checkpointing", True)  # must not bypass the cache
    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=count().__next__))
    sampler = Sampler(m, slots=slots)
    check_same(sampler.generate(*DRAW), r)
    slots = min(slots, 32)  # never more slots than rows
    waiting, running, starts, prompts, batches = list(enumerate(r.lengths.tolist())), [], 0, [], []
    while waiting or running:
        # rows start when an eighth of the slots, or enough for all waiting rows, is free
        free = slots - len(running)
        if waiting and free >= min(-(-slots // 8), len(waiting)):
            groups = {row // 4 for row, _ in waiting[:free]} - {row // 4 for row, _ in running}
            prompts += [PROMPTS[i][:-1] for i in groups if len(PROMPTS[i]) > 1]
            running, waiting, starts = running + waiting[:free], waiting[free:], starts + 1
        batches.append(len(running))
        running = [(row, n - 1) for row, n in running if n > 1]
    assert [len(ids) for ids in reads if ids.dim() == 1] == batches
    prefilled = [row for ids in reads if ids.dim() == 2 for row in ids.tolist()]
    assert sorted([t for t in row if t] for row in prefilled) == sorted(prompts)
    # the clock counts its readings: two for each start of rows, two for each step
    steps = len(batches)
    assert sampler.stats == dict(
        slots=slots,
        length=37,
        prefill=136,
        steps=steps,
        prefill_s=starts,
        decode_s=steps,
        capture_s=0,
    )


def test_prefill_in_pieces_changes_nothing(m, r, reads, monkeypatch):
    """Prompts of more than PREFILL_TOKENS tokens are prefilled in several forward passes, and a
    prompt of more in its own.
    """
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", 15)
    sampler = Sampler(m)
    check_same(sampler.generate(*DRAW), r)
    shapes = [tuple(ids.shape) for ids in reads if ids.dim() == 2]
    assert shapes == [(1, 16), (1, 10), (2, 7), (3, 4)] and sampler.stats["prefill"] == 17


def call_graphs(monkeypatch):
    """From now on the host does what it does for a GPU, and a CUDA graph calls the step that it
    captured.
    """
    captured = []

    class Graph:
        def pool(self):
            captured.clear()

    class Batch(rollout._Batch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.cuda = True

        def step(self, *key):
            if captured:
                captured[0].replay = lambda: self.step(*key)
            else:
                super().step(*key)

    monkeypatch.setattr(rollout, "_Batch", Batch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, pool: captured.append(graph) or nullcontext()
    )


@pytest.mark.parametrize("slots", [3, 13, 32, pytest.param(1, marks=pytest.mark.slow)])
def test_what_the_host_does_for_a_gpu(m, r, gpu_attention, monkeypatch, slots):
    """Each graph is large enough (see gpu_attention), and no token changes."""
    monkeypatch.setattr(attention, "SPLIT", 3)
    call_graphs(monkeypatch)
    check_same(Sampler(m, slots=slots).generate(*DRAW), r)


def test_a_smaller_graph_is_captured_when_it_is_wanted_twice():
    """Until then a larger graph is replayed, but never one with too few rows or pieces."""
    batch = SimpleNamespace(graphs={}, requested=None)
    for wanted, chosen in (
        ((256, 1), (256, 1)),
        ((64, 1), (256, 1)),
        ((32, 1), (256, 1)),
        ((32, 1), (32, 1)),
        ((32, 2), (32, 2)),
        ((16, 1), (32, 1)),
        ((16, 2), (32, 2)),
        ((16, 2), (16, 2)),
        ((16, 1), (16, 2)),
    ):
        assert rollout._Batch.pick_graph(batch, *wanted) == chosen
        batch.graphs[chosen] = None


def test_out_of_memory_halves_the_slots_and_loses_nothing(m, r, gpu_attention, monkeypatch):
    """Memory runs out twice while sampling: running rows restart and draw the same tokens, finished
    rows are kept. With one slot the error is raised.
    """
    append, batches = rollout.append, []

    def short(*arguments):
        _, _, rows, _, rolled = arguments
        batches.append(len(rows.row))
        if len(batches) in (6, 11):  # spoil the running rows: the restart must clear them
            going = rows.row[rows.position >= 0]
            rolled.tokens[going, 17:] = 99
            rolled.logprobs[going] = 99.0
            raise torch.OutOfMemoryError("CUDA out of memory")
        append(*arguments)

    monkeypatch.setattr(rollout, "append", short)
    sampler = Sampler(m, slots=13)
    check_same(sampler.generate(*DRAW), r)
    assert [max(batches[:6]), max(batches[6:11]), max(batches[11:])] == [13, 7, 4]
    assert sampler.stats["slots"] == 4
    batches.clear()
    with pytest.raises(torch.OutOfMemoryError):
        Sampler(m, slots=1).generate(*DRAW)


def test_rows_join_and_micro_batches_lose_nothing(r):
    """join undoes rows; micro-batches hold each row once, stay in the budget and are sorted by
    length.
    """
    order = torch.randperm(32)
    parts = [r.rows(order[:10]), r.rows(order[10:11]), r.rows(order[11:])]
    assert parts[1].tokens.shape[1] == parts[1].prompt_lengths + parts[1].lengths
    back = Rollout.join(parts).rows(order.argsort())
    assert all(map(torch.equal, back, r))
    assert r.rows(range(3, 9)).answers() == r.answers()[3:9]
    length, rows = r.prompt_lengths + r.lengths, order[:25]
    for budget in (1, 40, 200):
        batches = r.micro_batches(rows, budget)
        assert sorted(torch.cat(batches).tolist()) == sorted(rows.tolist())
        assert all(len(b) == 1 or len(b) * length[b].max() <= budget for b in batches)
        assert (length[torch.cat(batches)].diff() <= 0).all()
    assert len(r.micro_batches(torch.arange(32), 3 * int(length.max()))[0]) == 3


# --- on a GPU


@pytest.fixture(scope="module")
def real(smollm2):
    """→ SmolLM2 in NVFP4 on a GPU with lora_B ≠ 0."""
    return learned(model.load(smollm2[0], device="cuda"), 0.02)


def gpu_prompts(n):
    """→ n prompts with lengths near the attention's pieces of 256, so that answers cross their
    edges.
    """
    return [
        [(7 * i + 3 * t) % 40_000 + 50 for t in range(length)]
        for i, length in enumerate((1, 2, 250, 254, 255, 256, 257, 40, 130, 300)[:n])
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_gpu_graph_equals_eager(real, monkeypatch, top_p):
    """A replayed graph gives the same bits as calling the step with as many rows; also with top_p,
    where the sampler has loaded the kernels without top_p.
    """
    draw = gpu_prompts(10), 4, 30, 1.0, list(range(0, 49152, 60)), 3, 1
    sampler = Sampler(real, 40)
    whole = sampler.generate(*draw)
    graph = sampler.generate(*draw, top_p=top_p)
    assert torch.equal(graph.tokens, whole.tokens) == (top_p == 1)
    call_graphs(monkeypatch)
    eager = Sampler(real, 40).generate(*draw, top_p=top_p)
    assert all(map(torch.equal, graph, eager))
    assert len(graph.lengths.unique()) > 5


@pytest.mark.gpu
def test_gpu_recorded_logprobs_are_the_trainers_when_the_adapter_is_small(smollm2):
    """256 rows, lora_B = ±5e-4 as after one step of AdamW: sampler and trainer differ by a KL that
    bf16 rounding explains, below 1e-3 nats a token.
    """
    source, tokenizer = smollm2
    m = learned(model.load(source, device="cuda"), 1.0)
    for layer in lora.lora_layers(m).values():
        layer.lora_B.data.sign_().mul_(5e-4)
    lora.refresh(m)
    prompts = [weights.encode(tokenizer, f"What is {i} + {3 * i}?") for i in range(16)]
    r = Sampler(m).generate(prompts, 16, 16, 1.0, source.stop_ids(), 0, 1)
    with torch.no_grad():
        d = (rescored(m, r) - r.logprobs)[answered(r)]
    assert len(r.tokens) == 256 and (d.expm1() - d).mean() < 1e-3


@pytest.mark.gpu
def test_gpu_limits_and_the_longest_context(real):
    """The exact limit, and a row that fills the model's context."""
    r = Sampler(real).generate(gpu_prompts(4), 2, 19, 1.0, [], 3, 1)
    assert (r.lengths == 19).all() and not r.finished.any()
    context = real.config.max_position_embeddings
    full = Sampler(real).generate([[9] * (context - 3)], 1, 3, 1.0, [], 0, 0)
    assert full.lengths.tolist() == [3] and full.tokens.shape[1] == context


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_and_waves_finish(real):
    """50 calls leave as much memory allocated as one; a request larger than memory is sampled in
    waves.
    """
    draw, used = (gpu_prompts(9), 4, 12, 1.0, [], 3, 1), set()
    for call in range(51):
        Sampler(real).generate(*draw)
        torch.cuda.empty_cache()
        if call:
            used.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(used) == 1
    total, now = torch.cuda.mem_get_info()[1], torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((now + 2**30) / total)
    try:
        sampler = Sampler(real)
        r = sampler.generate(gpu_prompts(8), 32, 1000, 1.0, [], 3, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sampler.stats["slots"] < 256 and (r.lengths == 1000).all()
