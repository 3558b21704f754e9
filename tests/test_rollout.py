"""The sampler against the trainer's log-probabilities; slots, pages, graphs and memory change no
token.
"""

import weakref
from collections import defaultdict, deque
from contextlib import nullcontext
from itertools import count, pairwise, product
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_checkpoint

import aqn
import lora
import model
import rollout
from ops import attention, int8, sampling
from rollout import Rollout, Sampler, SamplingParams
from tools import weights

# of eight different lengths, so that a length tells the prompt
PROMPTS = [
    [(7 * i + 3 * t) % 90 + 5 for t in range(n)] for i, n in enumerate((3, 11, 1, 6, 17, 8, 2, 5))
]
STOPS = [2, 11, 23, 37, 41, 59, 73]  # 7 of 97 tokens: answers of about a dozen tokens
PARAMS = SamplingParams(20, STOPS, seed=5)
DRAW = PROMPTS, 4, PARAMS, 2  # 32 answers of at most 20 tokens, in step 2


@pytest.fixture(scope="module")
def m(tmp_path_factory):
    """→ a tiny model of two layers whose lora_B is not zero."""
    folder = tmp_path_factory.mktemp("two_layers")
    tiny_checkpoint(folder, num_hidden_layers=2)
    return learned(model.load(weights.open(folder), quant="bf16", rank=4, alpha=8), 0.05)


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


def generate(m, prompts=PROMPTS, G=4, step=2, first_sequence=0, **params):
    return Sampler(m).generate(prompts, G, PARAMS._replace(**params), step, first_sequence)


@torch.no_grad()
def logits(m, r):
    """→ (answer tokens, V) the trainer's logits, each row alone."""
    parts = []
    for ids, p, n in zip(r.tokens, r.prompt_lengths.tolist(), r.lengths.tolist(), strict=True):
        attend = attention.Packed([(p + n, [])], ids.device)
        parts.append(m(ids[: p + n], attend.positions, attend)[p - 1 : -1])
    return m.logits(torch.cat(parts))


def difference(m, r, temperature=1.0):
    """→ (B, T) the trainer's log-probabilities less the recorded ones."""
    scored, _ = r.scored_by(m, temperature)
    return scored.detach() - r.logprobs


def gap(*arguments):
    return difference(*arguments).abs().max()


def check_same(s, r):
    """The same answers; log-probabilities may differ by the order of fp32 sums."""
    for name, field in s._asdict().items():
        atol = 1e-4 if name == "logprobs" else 0
        torch.testing.assert_close(field, getattr(r, name), atol=atol, rtol=0)


# --- log-probabilities


@pytest.mark.parametrize("quant, temperature", [("bf16", 1.0), ("rtn", 0.7)])
def test_recorded_logprobs_are_the_trainers(tiny, quant, temperature):
    """They agree at every token of 32 answers of different lengths, and are exactly 0 elsewhere.
    Both compute in fp32 and differ by 1e-5, the order of sums.
    """
    m = learned(model.load(weights.open(tiny), quant, rank=4, alpha=8), 0.05)
    r = generate(m, temperature=temperature)
    assert len(r.lengths.unique()) > 10 and 0 < r.finished.sum() < len(r.tokens) == 32
    assert gap(m, r, temperature) < 1e-4
    mask = r.answer_mask()
    assert (r.logprobs[mask] < 0).all() and not r.logprobs[~mask].any()
    mask |= torch.arange(r.tokens.shape[1]) < r.prompt_lengths[:, None]
    assert not r.tokens[~mask].any()


def test_noise_is_in_the_sampler_and_its_logprobs(m):
    """Under AQN they are the trainer's with the same noise; no noise or another draw gives
    others.
    """
    with aqn.noisy_norms(m, 0.05, 1, 7):
        r = generate(m)
        assert gap(m, r) < 1e-4
    d = difference(m, r)[r.answer_mask()]
    # k3, as in the metric kl_noise: rounding would give 1e-10, this noise gives 1e-2
    assert (d.exp() - 1 - d).mean() > 1e-3
    with aqn.noisy_norms(m, 0.05, 1, 8):
        assert gap(m, r) > 1e-2


def test_an_optimizer_step_reaches_the_sampler_through_refresh(tiny):
    """Sampler and trainer read the same copies, which change at refresh only."""
    m = learned(model.load(weights.open(tiny), quant="bf16", rank=4, alpha=8), 0.05)
    r = generate(m)
    r.scored_by(m, 1.0)[0].sum().backward()
    torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-4).step()
    assert torch.equal(generate(m).logprobs, r.logprobs) and gap(m, r) < 1e-4
    lora.refresh(m)
    assert gap(m, r) > 1e-2 and gap(m, generate(m)) < 1e-4


# --- what a sample depends on


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.0, 1.0), (0.7, 0.5)])
def test_each_token_is_drawn_from_the_trainers_logits(m, monkeypatch, temperature, top_p):
    """With top_p from their nucleus, and without it nothing is sorted. Row p·G + g is prompt p and
    its answer. A token is drawn by its place in the answer, not in the row, which depends on the
    length of the prompt.
    """
    nucleus = sampling.nucleus
    if top_p == 1:
        monkeypatch.setattr(sampling, "nucleus", None)
    r = generate(m, first_sequence=7, temperature=temperature, top_p=top_p)
    wanted, mask = logits(m, r), r.answer_mask()
    if top_p < 1:
        wanted = nucleus(wanted, temperature, top_p)
    row, place = mask.nonzero().T
    place -= r.prompt_lengths[row]
    token, logprob = sampling.sample(wanted, temperature, 5, 2, row + 7, place)
    assert torch.equal(r.tokens[mask], token) and r.tokens.dtype == torch.int64
    torch.testing.assert_close(r.logprobs[mask], logprob, atol=1e-4, rtol=0)
    for b, answer in enumerate(r.answers()):
        prompt, n = PROMPTS[b // 4], int(r.lengths[b]) - int(r.finished[b])
        assert r.prompt_lengths[b] == len(prompt) and len(answer) == n
        assert r.tokens[b, : len(prompt) + n].tolist() == prompt + answer


def test_every_stop_token_ends_an_answer(m):
    """As the first, a middle or the last token. A row that reaches the limit without one is not
    finished.
    """
    whole = generate(m, PROMPTS[:1], stop_ids=[])
    assert (whole.lengths == 20).all() and not whole.finished.any()
    row = whole.tokens[1, 3:].tolist()
    for at, new in ((0, 20), (7, 20), (19, 20), (19, 19)):
        assert row.index(row[at]) == at  # else choose another row
        s = generate(m, PROMPTS[:1], max_new_tokens=new, stop_ids=[row[at], 96])
        n = min(at + 1, new)
        assert s.lengths[1] == n and s.finished[1] == (at < new)
        assert s.tokens[1, 3 : 3 + n].tolist() == row[:n] and s.answers()[1] == row[:at]


def test_a_prompt_that_does_not_fit_is_refused_by_number(m):
    """A context of 128 tokens holds 108 + 20, not 109 + 20; an empty prompt has no token to
    read.
    """
    generate(m, [[5] * 108], G=1)
    for prompts, number in (([[5], [5] * 109], 1), ([[5], [6], []], 2)):
        with pytest.raises(ValueError, match=f"prompt {number} "):
            generate(m, prompts)


# --- slots, pages, graphs and memory


@pytest.fixture
def steps(monkeypatch):
    """Checks each decode step: the running rows share the full pages of their prompts, each other
    page has one user or is free, and its splits hold the longest row. Starting a row writes
    into no page of a running row. At the end all pages are free, and no older cache is in memory.
    Free pages hold 100 (finite, because masked values are multiplied by 0). → a list
    that grows by the tokens that each step draws.
    """
    drawn, batches = [], []  # batches: the schedulers, with weak references to the runners
    runner_type = rollout.ModelRunner
    step, fill = runner_type.decode_step, runner_type.fill_pages
    sample = rollout.continuous_batching

    def checked_sample(scheduler, runner, bar):
        # the Graph of a test keeps its runner
        assert runner.cuda or all(older() is None for _, older in batches)
        batches.append((scheduler, weakref.ref(runner)))
        sample(scheduler, runner, bar)
        assert sorted(scheduler.pool.free) == [*range(runner.cache.k[0].shape[0])]
        assert not any(scheduler.pool.users.values())

    def checked_step(runner, batch_size, splits):
        scheduler, _ = batches[-1]
        used, shared = [*scheduler.pool.free], {}
        for x in runner.page_tensors:
            x[used] = 100
        for s in scheduler.running:
            full = (s.prompt_length - 1) // scheduler.page_size
            assert shared.setdefault(s.group, s.pages[:full]) == s.pages[:full]
            used += s.pages[full:]
        assert sorted(sum(shared.values(), used)) == [*range(runner.cache.k[0].shape[0])]
        position, table = runner.slots.position, runner.slots.block_table
        columns = table.shape[1] * scheduler.page_size
        assert position.max() < splits * attention.SPLIT <= columns
        live = int((position[:batch_size] >= 0).sum())
        step(runner, batch_size, splits)
        drawn.append(live)

    def checked_fill(runner, started):
        scheduler, _ = batches[-1]
        pages = sum((s.pages for s in scheduler.running if s not in started), [])
        old = [x[pages] for x in runner.page_tensors]
        fill(runner, started)
        assert all(map(torch.equal, old, [x[pages] for x in runner.page_tensors]))

    monkeypatch.setattr(rollout, "continuous_batching", checked_sample)
    monkeypatch.setattr(runner_type, "decode_step", checked_step)
    monkeypatch.setattr(runner_type, "fill_pages", checked_fill)
    return drawn


@pytest.fixture
def prefills(m, monkeypatch):
    """→ a list that grows by the texts of each prefill, which are lists of tokens."""
    forward, found = m.forward, []

    def spy(ids, positions, attend):
        if isinstance(attend, attention.Packed):
            starts = (positions == 0).nonzero()[1:, 0].tolist()
            found.append([text.tolist() for text in ids.tensor_split(starts)])
        return forward(ids, positions, attend)

    monkeypatch.setattr(m, "forward", spy)
    return found


def limited(m, page_size, **limits):
    """→ a Sampler with pages of so many positions."""
    sampler = Sampler(m, **limits)
    sampler.page_size = page_size
    return sampler


@pytest.mark.parametrize("free", range(5))
def test_reserve_keeps_as_many_rows_as_there_are_pages_for(free):
    """Four rows own two pages each and need one to four. From the oldest on, as many run on as can
    have what they need. The others wait, and no page is lost or has two users.
    """
    for needs in product((1, 2, 3, 4), repeat=4):
        limits = rollout.Limits(slots=4, pages=8 + free, length=99, prefill=99)
        scheduler = rollout.Scheduler(deque(), rollout.STEPS, limits, dict(preempted=0))
        for row, need in enumerate(needs):
            at = (need - 1) * rollout.STEPS
            scheduler.running.append(rollout.Sequence(row, row, 1, at, 99, scheduler.pool.take(2)))
        scheduler.reserve()
        own = [max(2, need) for need in needs]
        fits = max(n for n in range(5) if sum(own[:n]) <= limits.pages)
        running = scheduler.running
        assert [s.row for s in running] == [*range(fits)], (needs, free)
        assert [s.row for s in scheduler.waiting] == [*range(fits, 4)]
        assert [len(s.pages) for s in running] == own[:fits]
        used = sum((s.pages for s in running), [])
        assert sorted(used + scheduler.pool.free) == [*range(limits.pages)]


@pytest.mark.parametrize(
    "slots", [2, 5, 13, 31, 300, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8, 17))]
)
def test_slots_change_nothing(m, r, steps, prefills, monkeypatch, slots):
    """With fewer slots than rows, rows wait for free slots, but every row draws the same tokens.
    Others start once an eighth of the rows has left, or as many as wait.
    """
    monkeypatch.setattr(m, "recomputed_layers", 3)  # must not bypass the cache
    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=count().__next__))
    sampler = Sampler(m, slots=slots)
    check_same(sampler.generate(*DRAW), r)
    slots = min(slots, 32)  # never more slots than rows
    waiting, running, batches, full = r.lengths.tolist(), [], [], 0
    while waiting or running:
        if full - len(running) >= min(len(waiting), -(-full // 8)):
            free = slots - len(running)
            running, waiting = running + waiting[:free], waiting[free:]
            full = len(running)
        batches.append(len(running))
        running = [n - 1 for n in running if n > 1]
    assert steps == batches
    # the clock counts its readings: two for each start of rows, two for each step
    assert sampler.stats.pop("prefill_s") >= len(prefills)
    stats = dict(slots=slots, pages=3 * slots, length=37, prefill=53, preempted=0)
    stats |= dict(steps=len(batches), decode_s=len(batches), capture_s=0)
    assert sampler.stats == stats


# 18 pages of 2, 8 of 5, 36 of 1 and 3 of 16 hold the longest row and no more
@pytest.mark.parametrize(
    "page_size, pages, slots",
    [
        (2, 18, 32),
        (2, 40, 13),
        (5, 8, 32),
        (1, 36, 32),
        (16, 3, 32),
        *(pytest.param(2, n, n, marks=pytest.mark.slow) for n in (19, 25, 60)),
    ],
)
def test_pages_change_nothing(m, r, steps, prefills, page_size, pages, slots):
    """With few pages rows are preempted many times, and go on later with the tokens that they have:
    nothing is drawn twice. Prompts are shorter than a page, a page, a page and a token, and longer.
    """
    sampler = limited(m, page_size, slots=slots, pages=pages)
    check_same(sampler.generate(*DRAW), r)
    assert sampler.stats["pages"] == pages and sum(steps) == r.lengths.sum()
    prompts = [prompt[:-1] for prompt in PROMPTS]
    going_on = [text for text in sum(prefills, []) if text not in prompts]
    assert 0 < len(going_on) <= sampler.stats["preempted"] and sampler.stats["preempted"] > 5


# --- keys and values of 8 bits


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """→ a tiny Qwen2 with large key biases in the pairs that RoPE turns fastest and slowest."""
    folder = tmp_path_factory.mktemp("biased")
    rope = dict(rope_type="default", rope_theta=1e6)
    tiny_checkpoint(folder, "qwen2", num_hidden_layers=2, rope_parameters=rope)
    m = learned(model.load(weights.open(folder), quant="bf16", rank=4, alpha=8), 0.05)
    for layer in m.layers:
        layer.self_attn.qkv_proj.base.bias.view(8, 16)[4:6, [0, 7]] += 30
    return m


class Rounded(attention.Packed):
    """A text whose tokens from `start` on read keys and values that are rounded to integers, as
    ops/int8.py's docstring says. Those before were prefilled.
    """

    def __init__(self, m, tokens, start):
        super().__init__([(tokens, [])], m.device)
        self.m, self.start = m, start

    def __call__(self, qkv, heads, cos, sin, layer):
        q, k, v = attention.rotated_heads(qkv, heads, cos, sin)
        exact = self.attend_to_group(q, k, v, *self.spans[0])
        angles = model.rotary(torch.arange(int8.POSITIONS), self.m.inv_freq, 1)
        bias = self.m.layers[layer].self_attn.qkv_proj.base.bias.view(8, 16)[4:6]
        center = attention.rope(bias.expand(int8.POSITIONS, -1, -1), *angles).mean(0)
        stretch = torch.ones(2, 16)
        stretch[:, [0, 8]] = 8.0  # of the pair that RoPE turns fastest: (1 + 30² / 4²) ** 0.5 = 7.6
        k = self.integers((k - center) / stretch) * stretch
        rounded = self.attend_to_group(q, k, self.integers(v), *self.spans[0])
        return torch.cat((exact[: self.start], rounded[self.start :]))

    def integers(self, x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() * step


@torch.no_grad()
def test_an_int8_answer_does_not_depend_on_what_else_is_sampled(biased):
    """Neither on the longest answer that is allowed, nor on a longer prompt beside it."""
    prompts, group_size, params, step = DRAW
    alone = Sampler(biased, kv="int8").generate(*DRAW)
    longer = params._replace(max_new_tokens=90)
    for asked, limited in ((prompts, longer), ([*prompts, [3] * 100], params)):
        r = Sampler(biased, kv="int8").generate(asked, group_size, limited, step)
        for row, (p, n) in enumerate(zip(alone.prompt_lengths, alone.lengths, strict=True)):
            assert torch.equal(r.tokens[row, : p + n], alone.tokens[row, : p + n])
    assert r.tokens.shape[1] > alone.tokens.shape[1]


def test_a_card_holds_nearly_twice_the_tokens_in_int8(m, monkeypatch):
    monkeypatch.setattr(rollout, "free_memory", lambda: 8e9)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(m, "device", torch.device("cuda"))
    bf16, int8_pages = (Sampler(m, kv=kv)._fitting(4, 64, 64, 1.0) for kv in ("bf16", "int8"))
    assert int8_pages / bf16 == pytest.approx(2 * 16 / (16 + 4), rel=1e-3)


def test_a_format_that_is_unknown_is_refused(m):
    with pytest.raises(ValueError, match="'fp8' must be one of bf16, int8"):
        Sampler(m, kv="fp8")


@torch.no_grad()
@pytest.mark.parametrize("limits", [None, (2, 32, 18), (5, 32, 8), (1, 7, 36)])
def test_int8_pages_change_nothing_but_the_rounding(biased, steps, monkeypatch, limits):
    """In pages of any size, preempted or not, answers are those of naive sampling with keys and
    values that decode steps read rounded. A number between two integers may go either way.
    """
    starts, fill = defaultdict(list), rollout.ModelRunner.fill_pages

    def noted_fill(runner, started):
        for sequence in started:
            starts[sequence.row].append(sequence.position)
        fill(runner, started)

    monkeypatch.setattr(rollout.ModelRunner, "fill_pages", noted_fill)
    sampler = Sampler(biased, kv="int8")
    if limits:
        page_size, slots, pages = limits
        sampler = limited(biased, page_size, slots=slots, pages=pages, kv="int8")
    r = sampler.generate(*DRAW)
    naive = []
    for row, (ids, p, n) in enumerate(zip(r.tokens, r.prompt_lengths, r.lengths, strict=True)):
        for start, end in pairwise([*starts[row], p + n - 1]):
            text = Rounded(biased, end, start)
            naive.append(biased(ids[:end], text.positions, text)[start:])
    row, place = r.answer_mask().nonzero().T
    place -= r.prompt_lengths[row]
    token, logprob = sampling.sample(biased.logits(torch.cat(naive)), 1.0, 5, 2, row, place)
    assert torch.equal(r.tokens[r.answer_mask()], token)
    torch.testing.assert_close(r.logprobs[r.answer_mask()], logprob, atol=1e-2, rtol=0)
    assert 0.01 < gap(biased, r) < 1  # from the trainer, which does not round
    assert sampler.stats["preempted"] > 5 or limits is None


def test_a_group_shares_its_prompt_after_its_first_rows_have_ended(m, steps, prefills):
    """12 answers, 3 at a time, to a prompt of three pages, and one of two pages and a half: each is
    read once, because always one of its rows runs.
    """
    for prompt in (PROMPTS[4][:13], PROMPTS[1]):
        s = limited(m, 4, slots=3).generate([prompt], 12, PARAMS, 2)
        assert prefills == [[prompt[:-1]]] and (s.lengths < 20).sum() > 6
        check_same(s, generate(m, [prompt], G=12))
        prefills.clear()


def test_groups_of_one_row(m, r, steps, prefills):
    """Four equal prompts with an answer each give a group's answers, though with few pages."""
    sampler = limited(m, 2, pages=26)
    s = sampler.generate([PROMPTS[4]] * 4, 1, PARAMS, 2, first_sequence=16)
    check_same(s, r.rows(range(16, 20)))
    assert sampler.stats["preempted"] > 0 and prefills[0] == [PROMPTS[4][:-1]] * 2


def test_a_row_that_exceeds_all_pages_is_refused_at_the_start(m, prefills):
    """By name of what it needs, what there is, and the remedy; nothing is computed."""
    with pytest.raises(ValueError, match="17 tokens.* 20 .* 36 .* 34.*--max-new-tokens"):
        limited(m, 2, pages=17).generate(*DRAW)
    assert not prefills


@pytest.mark.parametrize("pages, passes", [(None, 3), (18, 0)])
def test_prefill_in_parts_changes_nothing(m, r, prefills, monkeypatch, pages, passes):
    """Texts of more than PREFILL_TOKENS tokens are prefilled in several forward passes."""
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", 15)
    sampler = limited(m, 2, pages=pages)
    check_same(sampler.generate(*DRAW), r)
    assert max(len(sum(texts, [])) for texts in prefills) <= sampler.stats["prefill"]
    assert len(prefills) == passes or pages


def test_an_mlp_computes_a_long_prefill_in_parts(m, r, monkeypatch):
    """Only while sampling, as prefill_bytes plans it; the trainer's update needs all at once."""
    monkeypatch.setattr(model, "MLP_TOKENS", 7)
    rows = []  # of each call
    hook = m.layers[1].mlp.gate_up_proj.register_forward_pre_hook(
        lambda _, inputs: rows.append(len(inputs[0]))
    )
    with hook:
        check_same(generate(m, PROMPTS), r)
        assert max(rows) == 7
        assert gap(m, r) < 1e-4 and rows[-1] > 100


def test_no_prefill_is_larger_than_planned(m, prefills):
    """Memory is planned for stats["prefill"] tokens, also if rows are preempted and several of them
    go on together.
    """
    sampler = limited(m, 2, pages=60)
    sampler.generate([[5]], 16, PARAMS._replace(stop_ids=[]), 2)
    assert 15 <= max(len(sum(texts, [])) for texts in prefills) <= sampler.stats["prefill"]


class Graph:
    """Stands for a CUDA graph: replay() calls the step that was captured."""

    capturing = None

    def pool(self):
        Graph.capturing = None


def captured(step):
    """→ a step that is not made while a Graph captures it."""

    def decode_step(*size):
        if Graph.capturing:
            Graph.capturing.replay = lambda: step(*size)
        else:
            step(*size)

    return decode_step


def call_graphs(monkeypatch):
    """From now on the host does what it does for a GPU, with a Graph for each CUDA graph."""

    class Runner(rollout.ModelRunner):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.cuda, self.decode_step = True, captured(self.decode_step)

    def capture(graph, pool):
        Graph.capturing = graph
        return nullcontext()

    monkeypatch.setattr(rollout, "ModelRunner", Runner)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)


@pytest.mark.parametrize(
    "slots, pages", [(3, None), (13, 40), (32, None), pytest.param(1, 18, marks=pytest.mark.slow)]
)
def test_what_the_host_does_for_a_gpu(m, r, steps, monkeypatch, slots, pages):
    """Each graph is large enough, pages last for its 8 steps, and no token changes."""
    monkeypatch.setattr(attention, "SPLIT", 3)
    call_graphs(monkeypatch)
    sampler = limited(m, 2, slots=slots, pages=pages)
    check_same(sampler.generate(*DRAW), r)
    assert sum(steps) == r.lengths.sum() and (sampler.stats["preempted"] > 0) == (pages == 40)
    assert sampler.stats["steps"] == len(steps) and sampler.stats["capture_s"] > 0


def test_a_graph_is_rounded_up_and_replayed_until_a_smaller_one_is_wanted_twice(monkeypatch):
    """Of at most 200 slots and 9 splits, and at least 4 splits. Each run makes 3 steps, also if it
    makes one outside of a capture, to load kernels.
    """
    call_graphs(monkeypatch)
    made, loaded = [], {16}
    step, stats = captured(lambda *size: made.append(size)), dict(capture_s=0, decode_s=0)
    graphs = rollout.DecodeGraphs(200, 9, loaded)
    for wanted, chosen in (
        ((130, 1), (200, 4)),
        ((64, 4), (200, 4)),
        ((33, 3), (64, 4)),
        ((64, 5), (64, 8)),
        ((20, 9), (32, 9)),
        ((20, 5), (32, 9)),
        ((17, 8), (32, 8)),
        ((9, 1), (32, 8)),
    ):
        before = {*loaded}
        graphs.run(SimpleNamespace(decode_step=step, stats=stats), *wanted, 3)
        assert made == [chosen] * 3 and loaded == before | {chosen[0]}
        made.clear()


def test_a_model_without_its_adapters_loads_kernels_of_its_own(m, r, monkeypatch):
    """Before a graph of it is captured, and so does the same model with them, in one Sampler."""
    call_graphs(monkeypatch)
    events = []

    def noted(owner, name):
        real = getattr(owner, name)

        def call(*arguments, **more):
            events.append((name, m.layers[0].self_attn.qkv_proj.enabled))
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, call)

    noted(torch.cuda, "graph")
    noted(rollout.sampling, "append")  # the end of each decode step
    sampler = Sampler(m)
    with lora.disabled(m):
        sampler.generate(*DRAW)
    check_same(sampler.generate(*DRAW), r)
    for enabled in (False, True):
        assert [name for name, state in events if state == enabled][:2] == ["append", "graph"]


def run_out(monkeypatch, owner, name, fails):
    """From now on memory runs out in those calls of owner.name."""
    calls, real = count(1), getattr(owner, name)

    def short(*arguments):
        if next(calls) in fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(owner, name, short)


@pytest.mark.parametrize(
    "name, fails, graphs",
    [
        ("append", (6, 16), False),
        # before the host reads that rows have ended, by a stop token and then at the limit
        ("append", (7, 50), True),
        ("forward", (1, 13), False),
    ],
)
def test_out_of_memory_halves_the_pages_and_draws_nothing_twice(
    m, r, steps, monkeypatch, name, fails, graphs
):
    """Memory runs out twice, in a step or in the first prefill. Running rows go on with the tokens
    that they have; with graphs also with those of steps whose result the host has not read.
    """
    if graphs:
        call_graphs(monkeypatch)
    bars = []

    class Bar(rollout.tqdm):
        def __init__(self, **how):
            super().__init__(**how | dict(disable=False))
            bars.append(self)

    run_out(monkeypatch, rollout.sampling if name == "append" else m, name, fails)
    sampler = limited(m, 2, slots=13, pages=80)
    sampler.bar = Bar
    check_same(sampler.generate(*DRAW), r)
    assert sampler.stats["pages"] == 20 and sampler.stats["prefill"] == 53
    assert sum(steps) == r.lengths.sum() and bars[0].n == bars[0].total == 32
    monkeypatch.undo()
    check_same(sampler.generate(*DRAW), r)
    assert sampler.stats["pages"] == 20  # it has not forgotten
    assert sampler.room([100] * 32, 13, 100)[0] == 50  # but tries what one row needs


def test_out_of_memory_is_raised_if_half_of_the_pages_is_too_few(m, monkeypatch):
    """Half of 35 pages of 2 does not hold the longest row, half of 36 does."""
    run_out(monkeypatch, rollout.sampling, "append", range(9))
    for pages, left in ((35, 35), (37, 18)):
        sampler = limited(m, 2, pages=pages)
        with pytest.raises(torch.OutOfMemoryError):
            sampler.generate(*DRAW)
        assert sampler.stats["pages"] == left


def test_a_cpu_keeps_its_keys_and_values_within_a_bound(m, r, monkeypatch):
    """In fp32; the longest row fits in any case. The answers are the same."""
    page = 2 * 16 * rollout.cached_bytes(m.config)
    for limit, pages in ((10 * page, 10), (0, 3)):
        monkeypatch.setattr(rollout, "CPU_CACHE", limit)
        sampler = Sampler(m)
        check_same(sampler.generate(*DRAW), r)
        assert sampler.stats["pages"] == pages


def test_rows_and_join_lose_nothing(r):
    """join undoes rows, whose tokens are cut to the longest."""
    order = torch.randperm(32)
    parts = [r.rows(order[:10]), r.rows(order[10:11]), r.rows(order[11:])]
    assert parts[1].tokens.shape[1] == parts[1].prompt_lengths + parts[1].lengths
    back = Rollout.join(parts).rows(order.argsort())
    assert all(map(torch.equal, back, r))


# --- on a GPU


@pytest.fixture(scope="module")
def real(smollm2):
    """→ SmolLM2 in NVFP4 on a GPU with lora_B ≠ 0."""
    return learned(model.load(smollm2[0], device="cuda"), 0.02)


def gpu_prompts(n):
    """→ n prompts with lengths near pages of 128 and the attention's splits of 256, so that answers
    cross their edges.
    """
    return [
        [(7 * i + 3 * t) % 40_000 + 50 for t in range(length)]
        for i, length in enumerate((1, 2, 127, 128, 129, 254, 256, 257, 40, 300)[:n])
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_gpu_graph_equals_eager(real, monkeypatch, top_p):
    """A replayed graph gives the same bits as calling the step with as many rows; also with top_p,
    where the sampler has loaded the kernels without top_p.
    """
    params = SamplingParams(30, list(range(0, 49152, 20)), seed=3)
    draw = gpu_prompts(10), 4, params._replace(top_p=top_p), 1
    sampler = Sampler(real, 40)
    whole = sampler.generate(gpu_prompts(10), 4, params, 1)
    graph = sampler.generate(*draw)
    assert torch.equal(graph.tokens, whole.tokens) == (top_p == 1)
    call_graphs(monkeypatch)
    eager = Sampler(real, 40).generate(*draw)
    assert all(map(torch.equal, graph, eager))
    assert len(graph.lengths.unique()) > 5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "new, pages, kv, most",
    [(16, None, "bf16", 1e-3), (300, 290, "bf16", 1e-3), (300, 290, "int8", 1e-2)],
)
def test_gpu_recorded_logprobs_are_the_trainers_when_the_adapter_is_small(
    smollm2, new, pages, kv, most
):
    """256 rows, lora_B = ±5e-4 as after one step of AdamW: sampler and trainer differ by a KL that
    bf16 rounding explains, below 1e-3 nats a token, or that of int8. Also if rows need 768 pages
    and 290 exist, so that many are preempted.
    """
    source, tokenizer = smollm2
    m = learned(model.load(source, device="cuda"), 1.0)
    for layer in lora.lora_layers(m).values():
        layer.lora_B.data.sign_().mul_(5e-4)
    lora.refresh(m)
    prompts = [weights.encode(tokenizer, f"What is {i} + {3 * i}?") for i in range(16)]
    sampler = Sampler(m, pages=pages, kv=kv)
    stop_ids = [] if pages else source.stop_ids()
    r = sampler.generate(prompts, 16, SamplingParams(new, stop_ids), 1)
    assert (sampler.stats["preempted"] > 0) == (pages is not None)
    with torch.no_grad():
        d = difference(m, r)[r.answer_mask()]
    assert len(r.tokens) == 256 and (d.expm1() - d).mean() < most


@pytest.mark.gpu
def test_gpu_a_row_fills_the_longest_context(real):
    context = real.config.max_position_embeddings
    r = Sampler(real).generate([[9] * (context - 3)], 1, SamplingParams(3, []), 0)
    assert r.lengths.tolist() == [3] and r.tokens.shape[1] == context


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_and_waves_finish(real):
    """50 calls leave as much memory allocated as one; if keys and values of all rows exceed memory,
    rows are preempted.
    """
    draw, used = (gpu_prompts(9), 4, SamplingParams(12, []), 1), set()
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
        r = sampler.generate(gpu_prompts(8), 32, SamplingParams(500, []), 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sampler.stats["preempted"] > 0 and (r.lengths == 500).all()
