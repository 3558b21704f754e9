"""The sampler against the trainer's log-probabilities; slots, pages, graphs and memory change no
token.
"""

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
from rollout import Rollout, Sampler, micro_batches
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
    return r.answer_mask()


def rescored(m, r, temperature=1.0):
    """→ (B, T) log-probabilities with gradients on, as the trainer computes them."""
    return m.logprobs(r.tokens, r.prompt_lengths, r.lengths, temperature)[0]


@torch.no_grad()
def logits(m, r):
    """→ (answer tokens, V) the trainer's logits, each row alone."""
    parts = []
    for ids, p, n in zip(r.tokens, r.prompt_lengths.tolist(), r.lengths.tolist(), strict=True):
        attend = attention.Packed([(p + n, [])], ids.device)
        parts.append(m(ids[: p + n], attend.positions, attend)[p - 1 : -1])
    return m.logits(torch.cat(parts))


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


# --- slots, pages, graphs and memory


@pytest.fixture
def steps(monkeypatch):
    """Checks each decode step: every running row goes on from its newest token, in pages of its
    own behind the whole pages of its prompt, which its group shares; a graph's pieces hold it; and
    all pages are free at the end. An admission waits until an eighth of the rows has ended or was
    put back, and writes into no page of a running row. What no row may read is 100 (finite, because
    masked values are multiplied by 0), and an ended row's attention is NaN. → a list that grows by
    the tokens that each step draws.
    """
    drawn, ran = [], {}  # ran: the batch → its rows after the last admission
    attend, batch_type = attention.Paged.__call__, rollout._Batch
    step, run, admit = batch_type.step, batch_type.run, batch_type.admit

    def checked_step(batch, size, pieces):
        free, page_size, r = batch.pool.free, batch.page_size, batch.rollout
        for x in (batch.cache.k, batch.cache.v):
            x[:, free] = 100.0
        rows, group_size = batch.rows, batch.draw.group_size
        shared, used = {}, []  # group → pages of its prompt; pages of one row
        live = (rows.position[:size] >= 0).nonzero()[:, 0].tolist()
        for i in live:
            row, at = int(rows.row[i]), int(rows.position[i])
            assert at == r.prompt_lengths[row] - 1 + r.lengths[row]
            assert rows.last_token[i] == r.tokens[row, at]
            pages = batch.block_table[i, : at // page_size + 1].tolist()
            whole = int(r.prompt_lengths[row] - 1) // page_size
            assert shared.setdefault(row // group_size, pages[:whole]) == pages[:whole]
            used += pages[whole:]
        used = sum(shared.values(), used)
        assert len({*used, *free}) == len(used) + len(free)
        assert not used or max(used) < batch.cache.k.shape[1]
        step(batch, size, pieces)
        drawn.append(len(live))

    def checked_admit(batch, waiting, running):
        before = ran.get(batch, 0)
        assert before - len(running) >= min(len(waiting), -(-before // 8))
        pages = sum((sequence.pages for sequence in running), [])
        old = [x[:, pages] for x in batch.cache[:2]]
        admit(batch, waiting, running)
        assert all(map(torch.equal, old, [x[:, pages] for x in batch.cache[:2]]))
        ran[batch] = len(running)

    def checked_run(batch, *arguments):
        run(batch, *arguments)
        assert sorted(batch.pool.free) == [*range(batch.cache.k.shape[1])]
        assert not any(batch.pool.users)

    def checked_attend(paged, qkv, heads, cos, sin, layer):
        _, _, _, page_size, Dh = paged.cache.k.shape
        covered = paged.pieces * attention.SPLIT
        assert paged.positions.max() < covered <= paged.block_table.shape[1] * page_size
        assert len(paged.positions) * heads.key <= len(paged.cache.counters)
        live = paged.positions >= 0
        out = qkv.new_full((len(qkv), heads.query * Dh), torch.nan)
        if live.any():
            table, positions = paged.block_table[live], paged.positions[live]
            part = paged._replace(block_table=table, positions=positions)
            out[live] = attend(part, qkv[live], heads, cos[live], sin[live], layer)
        return out

    monkeypatch.setattr(batch_type, "step", checked_step)
    monkeypatch.setattr(batch_type, "run", checked_run)
    monkeypatch.setattr(batch_type, "admit", checked_admit)
    monkeypatch.setattr(attention.Paged, "__call__", checked_attend)
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


@pytest.mark.parametrize(
    "slots", [2, 5, 13, 31, 300, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8, 17))]
)
def test_slots_change_nothing(m, r, steps, prefills, monkeypatch, slots):
    """With fewer slots than rows, rows wait for free slots, but every row draws the same tokens. A
    prompt is read once for its group, and again only if none of its group runs; ended rows leave.
    """
    monkeypatch.setattr(m, "recomputed_layers", 3)  # must not bypass the cache
    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=count().__next__))
    sampler = Sampler(m, slots=slots)
    check_same(sampler.generate(*DRAW), r)
    slots = min(slots, 32)  # never more slots than rows
    waiting, running, full = list(enumerate(r.lengths.tolist())), [], 0
    starts, prompts, batches = 0, [], []
    while waiting or running:
        # rows start when an eighth of those that ran, or enough for all waiting rows, has ended
        if waiting and full - len(running) >= min(-(-full // 8), len(waiting)):
            free = slots - len(running)
            groups = {row // 4 for row, _ in waiting[:free]} - {row // 4 for row, _ in running}
            prompts += [PROMPTS[i][:-1] for i in groups if len(PROMPTS[i]) > 1]
            running, waiting, starts = running + waiting[:free], waiting[free:], starts + 1
            full = len(running)
        batches.append(len(running))
        running = [(row, n - 1) for row, n in running if n > 1]
    assert steps == batches and sorted(sum(prefills, [])) == sorted(prompts)
    # the clock counts its readings: two for each start of rows, two for each step
    stats = dict(slots=slots, pages=3 * slots, length=37, prefill=53, put_back=0)
    stats |= dict(steps=len(batches), decode_s=len(batches), capture_s=0)
    assert sampler.stats.pop("prefill_s") >= starts
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
    """With few pages rows are put back many times, and go on later with the tokens that they have:
    nothing is drawn twice. Prompts are shorter than a page, a page, a page and a token, and longer.
    """
    sampler = limited(m, page_size, slots=slots, pages=pages)
    check_same(sampler.generate(*DRAW), r)
    assert sampler.stats["pages"] == pages and sum(steps) == r.lengths.sum()
    texts = sum(prefills, [])
    going_on = [text for text in texts if text not in [prompt[:-1] for prompt in PROMPTS]]
    assert 0 < len(going_on) <= sampler.stats["put_back"] and sampler.stats["put_back"] > 5
    rows = r.tokens.tolist()
    assert all(any(row[: len(text)] == text for row in rows) for text in going_on)


def test_a_group_shares_its_prompt_after_its_first_rows_have_ended(m, r, steps, prefills):
    """12 answers, 3 at a time, to a prompt of three pages, and one of two pages and a half: each is
    read once, because always one of its rows runs.
    """
    for prompt, page_size in ((PROMPTS[4][:13], 4), (PROMPTS[1], 4)):
        sampler = limited(m, page_size, slots=3)
        s = sampler.generate([prompt], 12, 20, 1.0, STOPS, 5, 2)
        check_same(s, generate(m, [prompt], G=12))
        assert (s.lengths < 20).sum() > 6
        first, whole = prefills[:-1], prefills[-1:]
        assert first == whole == [[prompt[:-1]]]
        prefills.clear()


def test_groups_of_one_row(m, r, steps, prefills):
    """Four equal prompts with an answer each give a group's answers, with ample and few pages."""
    for pages, put_back in ((None, False), (26, True)):
        sampler = limited(m, 2, pages=pages)
        s = sampler.generate([PROMPTS[4]] * 4, 1, 20, 1.0, STOPS, 5, 2, first_sequence=16)
        check_same(s, r.rows(range(16, 20)))
        assert (sampler.stats["put_back"] > 0) == put_back
    assert prefills[0] == [PROMPTS[4][:-1]] * 4


def test_a_row_that_exceeds_all_pages_is_refused_at_the_start(m, prefills):
    """By name of what it needs, what there is, and the remedy; nothing is computed."""
    with pytest.raises(ValueError, match="17 tokens.* 20 .* 36 .* 34.*--max-new-tokens") as error:
        limited(m, 2, pages=17).generate(*DRAW)
    assert "\n" not in str(error.value) and not prefills


@pytest.mark.parametrize("pages", [None, 18])
def test_prefill_in_pieces_changes_nothing(m, r, prefills, monkeypatch, pages):
    """Texts of more than PREFILL_TOKENS tokens are prefilled in several forward passes, and a
    longer text in its own.
    """
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", 15)
    sampler = limited(m, 2, pages=pages)
    check_same(sampler.generate(*DRAW), r)
    most = sampler.stats["prefill"]
    assert all(len(texts) == 1 or len(sum(texts, [])) <= most for texts in prefills)
    if pages is None:
        read = sorted(len(text) for texts in prefills for text in texts)
        assert read == [1, 2, 4, 5, 7, 10, 16] and len(prefills) == 3


@pytest.mark.parametrize("pages, at_once", [(None, 0), (60, 15)])
def test_no_prefill_is_larger_than_planned(m, prefills, pages, at_once):
    """Memory is planned for stats["prefill"] tokens, also if rows are put back and several of them
    go on together.
    """
    sampler = limited(m, 2, pages=pages)
    sampler.generate([[5]], 16, 20, 1.0, [], 5, 2)
    most = max((len(sum(texts, [])) for texts in prefills), default=0)
    assert at_once <= most <= sampler.stats["prefill"]


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


@pytest.mark.parametrize(
    "slots, pages", [(3, None), (13, 40), (32, None), pytest.param(1, 18, marks=pytest.mark.slow)]
)
def test_what_the_host_does_for_a_gpu(m, r, steps, monkeypatch, slots, pages):
    """Each graph is large enough, pages last for its 8 steps, and no token changes."""
    monkeypatch.setattr(attention, "SPLIT", 3)
    call_graphs(monkeypatch)
    sampler = limited(m, 2, slots=slots, pages=pages)
    check_same(sampler.generate(*DRAW), r)
    assert sum(steps) == r.lengths.sum() and (sampler.stats["put_back"] > 0) == (pages == 40)


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
    calls, ended = count(1), [0]
    owner = rollout if name == "append" else m
    real = getattr(owner, name)

    def short(*arguments):
        if next(calls) in fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    def update(bar, n):
        ended[0] += n

    monkeypatch.setattr(owner, name, short)
    monkeypatch.setattr(rollout.tqdm, "update", update)
    sampler = limited(m, 2, slots=13, pages=80)
    check_same(sampler.generate(*DRAW), r)
    assert sampler.stats["pages"] == 20
    assert sum(steps) == r.lengths.sum() and ended == [32]


def test_out_of_memory_is_raised_if_half_of_the_pages_is_too_few(m, monkeypatch):
    """Half of 35 pages of 2 does not hold the longest row, half of 36 does."""

    def short(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rollout, "append", short)
    for pages, left in ((35, 35), (37, 18)):
        sampler = limited(m, 2, pages=pages)
        with pytest.raises(torch.OutOfMemoryError):
            sampler.generate(*DRAW)
        assert sampler.stats["pages"] == left


def test_rows_and_join_lose_nothing(r):
    """join undoes rows, whose tokens are cut to the longest."""
    order = torch.randperm(32)
    parts = [r.rows(order[:10]), r.rows(order[10:11]), r.rows(order[11:])]
    assert parts[1].tokens.shape[1] == parts[1].prompt_lengths + parts[1].lengths
    back = Rollout.join(parts).rows(order.argsort())
    assert all(map(torch.equal, back, r))
    assert r.rows(range(3, 9)).answers() == r.answers()[3:9]


def flat_tokens(r, rows):
    """→ tokens that the trainer computes of these rows if one micro-batch has them all."""
    (batch,) = micro_batches(r.groups(rows), 10**6)
    return batch.tokens


def test_flat_tokens_count_a_prompt_once_and_no_last_token(r):
    """Also if a prompt's rows are apart, and for a part of a group."""
    assert flat_tokens(r, torch.randperm(32)) == 53 + (r.lengths - 1).sum()
    part = [7, 0, 5]
    assert flat_tokens(r, torch.tensor(part)) == 11 + 3 + (r.lengths[part] - 1).sum()


def test_micro_batches_hold_each_row_once_and_cut_no_group_that_fits(r):
    """Each stays within the budget of flat tokens, or is one row. All rows that fit are one."""
    rows = torch.randperm(32)[:25]
    groups = [rows[rows // 4 == p] for p in range(8)]
    sizes = [flat_tokens(r, group) for group in groups]
    for budget in (1, 25, *sizes, 120, sum(sizes)):
        batches = [batch.rows for batch in micro_batches(r.groups(rows), budget)]
        assert sorted(sum(batches, [])) == sorted(rows.tolist())
        assert all(len(b) == 1 or flat_tokens(r, torch.tensor(b)) <= budget for b in batches)
        for group, size in zip(groups, sizes, strict=True):
            if size <= budget:
                assert sum(bool({*group.tolist()} & {*batch}) for batch in batches) == 1
    assert len(batches) == 1 and not micro_batches([], 9)


# --- on a GPU


@pytest.fixture(scope="module")
def real(smollm2):
    """→ SmolLM2 in NVFP4 on a GPU with lora_B ≠ 0."""
    return learned(model.load(smollm2[0], device="cuda"), 0.02)


def gpu_prompts(n):
    """→ n prompts with lengths near pages of 128 and the attention's pieces of 256, so that answers
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
    draw = gpu_prompts(10), 4, 30, 1.0, list(range(0, 49152, 20)), 3, 1
    sampler = Sampler(real, 40)
    whole = sampler.generate(*draw)
    graph = sampler.generate(*draw, top_p=top_p)
    assert torch.equal(graph.tokens, whole.tokens) == (top_p == 1)
    call_graphs(monkeypatch)
    eager = Sampler(real, 40).generate(*draw, top_p=top_p)
    assert all(map(torch.equal, graph, eager))
    assert len(graph.lengths.unique()) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("new, pages", [(16, None), (300, 290)])
def test_gpu_recorded_logprobs_are_the_trainers_when_the_adapter_is_small(smollm2, new, pages):
    """256 rows, lora_B = ±5e-4 as after one step of AdamW: sampler and trainer differ by a KL that
    bf16 rounding explains, below 1e-3 nats a token. Also if rows need 768 pages and 290 exist, so
    that many are put back.
    """
    source, tokenizer = smollm2
    m = learned(model.load(source, device="cuda"), 1.0)
    for layer in lora.lora_layers(m).values():
        layer.lora_B.data.sign_().mul_(5e-4)
    lora.refresh(m)
    prompts = [weights.encode(tokenizer, f"What is {i} + {3 * i}?") for i in range(16)]
    sampler = Sampler(m, pages=pages)
    r = sampler.generate(prompts, 16, new, 1.0, [] if pages else source.stop_ids(), 0, 1)
    assert (sampler.stats["put_back"] > 0) == (pages is not None)
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
    """50 calls leave as much memory allocated as one; if keys and values of all rows exceed memory,
    rows are put back.
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
        r = sampler.generate(gpu_prompts(8), 32, 500, 1.0, [], 3, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sampler.stats["put_back"] > 0 and (r.lengths == 500).all()
