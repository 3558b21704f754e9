"""The sampler against the trainer's log-probabilities; slots, graphs and memory change no token."""
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import TopPLogitsWarper

import aqn
import checkpoint
import gumbel
import lora
import model
import ops
import rollout
from rollout import Rollout, Sampler

PROMPTS = [[(7 * i + 3 * t) % 90 + 5 for t in range(n)] for i, n in enumerate((3, 11, 1, 6, 17, 8, 2, 5))]
STOPS = [2, 11, 23, 37, 41, 59, 73]                      # 7 of 97 tokens: answers of about a dozen tokens


@pytest.fixture(scope="module")
def m(tiny):
    """→ a tiny model whose lora_B is not zero."""
    return learned(model.load(str(tiny), quant="bf16", rank=4, alpha=8), 0.05)


def learned(m, size):
    generator = torch.Generator().manual_seed(3)
    for layer in lora.lora_layers(m).values():
        layer.lora_B.data.copy_(torch.empty(layer.lora_B.shape).normal_(0, size, generator=generator))
    lora.refresh(m)
    return m


def generate(m, prompts=PROMPTS, G=8, new=20, temperature=1.0, stops=STOPS, seed=5, step=2, **more):
    return Sampler(m).generate(prompts, G, new, temperature, stops, seed, step, **more)


def rescored(m, r, temperature=1.0):
    """→ (B, T) log-probabilities with gradients on, as the trainer computes them."""
    return m.logprobs(r.tokens, r.prompt_lengths, r.lengths, temperature)[0]


def gap(m, r, temperature=1.0):
    """→ the largest difference at any token between the recorded log-probability and the trainer's."""
    return (r.logprobs - rescored(m, r, temperature).detach()).abs().max().item()


# both compute in fp32 and differ by 1e-5, the order of sums; temperature on one side only would give 1
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_recorded_logprobs_are_the_trainers(m, temperature):
    """They agree at every token of 64 answers of different lengths, and are exactly 0 elsewhere."""
    r = generate(m, temperature=temperature)
    assert len(r.tokens) == 64 and len(set(r.lengths.tolist())) > 10 and 0 < r.finished.sum() < 64
    assert gap(m, r, temperature) < 1e-4
    mask = model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)
    assert (r.logprobs[mask] < 0).all() and (r.logprobs[~mask] == 0).all()
    ends, t = (r.prompt_lengths + r.lengths)[:, None], torch.arange(r.tokens.shape[1])
    assert len(t) == ends.max() and not r.tokens[t >= ends].any()


def test_recorded_logprobs_are_the_trainers_on_smollm2_in_nvfp4(smollm2):
    """The same bound holds for the default model with quantised weights (by rtn, which loads fast)."""
    source, tokenizer = smollm2
    real = learned(model.load(source, quant="rtn", rank=4), 0.02)
    prompts = [checkpoint.encode(tokenizer, text) for text in ("What is 7 * 8?", "Say hello in French.")]
    r = generate(real, prompts, G=4, new=10, temperature=0.7, stops=source.stop_ids())
    assert gap(real, r, 0.7) < 1e-4


def test_noise_is_in_the_sampler_and_its_logprobs(m):
    """Under AQN they are the trainer's with the same noise, and differ without noise or with another draw."""
    with aqn.noisy_norms(m, 0.05, 1, 7):
        r = generate(m)
        assert gap(m, r) < 1e-4
    d = (rescored(m, r).detach() - r.logprobs)[model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)]
    # k3, as in the metric kl_noise: rounding would give 1e-10, this noise gives 1e-2
    assert (d.exp() - 1 - d).mean() > 1e-3
    with aqn.noisy_norms(m, 0.05, 1, 8):
        assert gap(m, r) > 1e-2


def test_an_optimizer_step_reaches_the_sampler_through_refresh(tiny):
    """Sampler and trainer both read the copies: they agree at any time and change at refresh only."""
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


def test_a_sample_depends_on_its_number_alone(m):
    """Not on the batch, its order, the group size or max_new_tokens; but on the seed and the step."""
    r = generate(m)
    rows = r.answers()
    assert generate(m, PROMPTS[5:6], first=40).answers() == rows[40:48]
    assert generate(m, PROMPTS[2:4], G=4, first=16).answers()[:4] == rows[16:20]
    assert generate(m, [PROMPTS[5], PROMPTS[4]], G=8, first=32).answers()[:8] != rows[32:40]
    assert generate(m, new=7).tokens[8:16, 11:18].tolist() == torch.where(
        (torch.arange(7) < r.lengths[8:16, None]), r.tokens[8:16, 11:18], 0).tolist()
    again = [generate(m, **change).answers() for change in ({}, {"seed": 6}, {"step": 3}, {"first": 64})]
    assert again[0] == rows and all(a != rows for a in again[1:]) and len({tuple(a) for a in rows}) > 60


def test_each_prompt_is_prefilled_once_and_finished_rows_leave(m, monkeypatch):
    """The model reads a prompt's tokens but the last once for its group, then one token per step of each
    running row, and nothing else."""
    calls, forward, rows = [], m.forward, generate(m).answers()
    monkeypatch.setattr(m, "forward", lambda ids, *rest: calls.append(ids.clone()) or forward(ids, *rest))
    monkeypatch.setattr(m, "gradient_checkpointing", True)          # must not bypass the cache
    r = generate(m)
    assert r.answers() == rows and len(r.lengths.unique()) > 10
    prompts = sorted((p[:-1] for p in PROMPTS if len(p) > 1), key=len)
    assert calls[0].tolist() == [p + [0] * (16 - len(p)) for p in prompts]
    going = [int((r.lengths > t).sum()) for t in range(int(r.lengths.max()))]
    assert [c.shape for c in calls[1:]] == [(n, 1) for n in going]
    assert calls[1][:, 0].tolist() == [p[-1] for p in PROMPTS for _ in range(8)]


def test_a_token_is_drawn_by_its_place_in_the_answer(m, monkeypatch):
    """Not by its position in the row, which depends on the length of the prompt."""
    places, sample = [], gumbel.sample
    monkeypatch.setattr(gumbel, "sample", lambda *all: places.append(set(all[-1].tolist())) or sample(*all))
    assert generate(m).lengths.max() == len(places) > 10
    assert places == [{t} for t in range(len(places))]


@pytest.mark.parametrize("slots", [1, 5, 13, 35, 63, 300])
def test_slots_change_nothing(m, slots):
    """With fewer slots than rows, rows wait for free slots, but every row draws the same tokens."""
    r, sampler, began = generate(m), Sampler(m, slots=slots), time.perf_counter()
    s = sampler.generate(PROMPTS, 8, 20, 1.0, STOPS, 5, 2)
    took = time.perf_counter() - began
    parts = [sampler.stats[name] for name in ("prefill_s", "decode_s")]
    assert min(parts) > 0 and sum(parts) < took                        # at any speed: the timers are disjoint
    assert torch.equal(s.tokens, r.tokens) and torch.equal(s.finished, r.finished)
    torch.testing.assert_close(s.logprobs, r.logprobs, atol=1e-4, rtol=0)
    slots = min(slots, 64)                                             # never more slots than rows
    assert sampler.stats["slots"] == slots
    assert sampler.stats["length"] == r.prompt_lengths.max() + 20 and sampler.stats["prefill"] == 8 * 17
    # rows start when an eighth of the slots, or enough for all waiting rows, is free
    waiting, running, steps = r.lengths.tolist(), [], 0
    while waiting or running:
        if (free := slots - len(running)) >= min(-(-slots // 8), len(waiting)):
            running, waiting = running + waiting[:free], waiting[free:]
        running, steps = [n - 1 for n in running if n > 1], steps + 1
    assert sampler.stats["steps"] == steps


@pytest.mark.parametrize("slots", [5, 13, 64])
def test_rows_read_their_prompt_in_the_slot_of_the_first_of_their_group(m, monkeypatch, slots):
    """The leader is the group's first running row, and what it has cached is what the others have cached."""
    seen, attention = [], ops.cached_attention

    def spy(qkv, norms, cos, sin, cache, layer, positions):
        for slot, leader, n in zip(cache.slots, cache.leaders, cache.shared, strict=True):
            for x in (cache.k[layer], cache.v[layer]):
                assert torch.equal(x[slot, :, :n], x[leader, :, :n])
        seen.append([x.tolist() for x in (cache.slots, cache.leaders, cache.shared)])
        return attention(qkv, norms, cos, sin, cache, layer, positions)

    monkeypatch.setattr(ops, "cached_attention", spy)
    states, step = [], rollout._Batch.step
    monkeypatch.setattr(rollout._Batch, "step",
                        lambda batch, *key: states.append(batch.state.clone()) or step(batch, *key))
    Sampler(m, slots=slots).generate(PROMPTS, 8, 20, 1.0, STOPS, 5, 2)
    layers = m.config.num_hidden_layers
    assert len(seen) == layers * len(states) and any(own != leaders for own, leaders, _ in seen)
    for state, (own, leaders, shared) in zip(states, seen[::layers], strict=True):
        rows, first = state[0, :len(own)].tolist(), {}
        for row, slot, leader, n in zip(rows, own, leaders, shared, strict=True):
            assert leader == first.setdefault(row // 8, slot) and n == len(PROMPTS[row // 8]) - 1


def test_a_prompt_is_prefilled_again_only_if_none_of_its_group_runs(m, monkeypatch):
    """Otherwise keys and values are copied from a running row; test_slots_change_nothing checks them."""
    prefills, copied, forward, admit = [], 0, m.forward, rollout._Batch.admit

    def spy(batch, new, running):
        nonlocal copied
        groups, before = {row // 8 for row, *_ in running[:-len(new)]}, len(prefills)
        admit(batch, new, running)
        wanted = {tuple(p[:-1]) for row, p, _ in new if row // 8 not in groups and len(p) > 1}
        found = [tuple(row) for ids in prefills[before:] for row in ids.tolist()]
        assert len(found) == len(wanted) and all(any(f[:len(w)] == w for f in found) for w in wanted)
        copied += len({row // 8 for row, *_ in new} & groups)

    monkeypatch.setattr(rollout._Batch, "admit", spy)
    monkeypatch.setattr(m, "forward", lambda ids, *rest: (
        prefills.append(ids) if ids.shape[1] > 1 else None) or forward(ids, *rest))
    Sampler(m, slots=13).generate(PROMPTS, 8, 20, 1.0, STOPS, 5, 2)
    assert copied > 5


def test_prefill_in_pieces_changes_nothing(m, monkeypatch):
    """Prompts of more than PREFILL_TOKENS tokens are prefilled in several forward passes."""
    r = generate(m)
    monkeypatch.setattr(rollout, "PREFILL_TOKENS", 20)
    shapes, forward = [], m.forward
    monkeypatch.setattr(m, "forward", lambda ids, *rest: shapes.append(ids.shape) or forward(ids, *rest))
    s = generate(m)
    assert [tuple(shape) for shape in shapes if shape[1] > 1] == [(1, 16), (2, 10), (4, 5)]
    assert torch.equal(s.tokens, r.tokens)
    torch.testing.assert_close(s.logprobs, r.logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("slots", [1, 5, 13, 64])
def test_what_the_host_does_for_a_gpu(m, monkeypatch, slots):
    """With fake CUDA graphs that call the step: each graph is large enough, and no token changes."""
    r, begin, step, capturing = generate(m), rollout._Batch.__init__, rollout._Batch.step, []

    class Graph:
        def pool(self):
            capturing.clear()

        def replay(self):
            self.step()

    def start(batch, *all):
        begin(batch, *all)
        batch.cuda = True

    def called(batch, size, pieces):
        if capturing:
            capturing[0].step = lambda: called(batch, size, pieces)
            return
        assert (pieces - 1) * ops.SPLIT < batch.cache.k.shape[3] and size <= batch.slots
        assert pieces * ops.SPLIT > batch.state[3].max() and (batch.state[3, size:] < 0).all()
        if (batch.state[3, :size] >= 0).any():
            step(batch, size, pieces)

    monkeypatch.setattr(ops, "SPLIT", 8)
    monkeypatch.setattr(rollout._Batch, "__init__", start)
    monkeypatch.setattr(rollout._Batch, "step", called)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: capturing.append(graph) or nullcontext())
    s = Sampler(m, slots=slots).generate(PROMPTS, 8, 20, 1.0, STOPS, 5, 2)
    assert torch.equal(s.tokens, r.tokens) and torch.equal(s.lengths, r.lengths)
    torch.testing.assert_close(s.logprobs, r.logprobs, atol=1e-4, rtol=0)
    batch = SimpleNamespace(graphs={(64, 4): None}, requested=None)
    assert rollout._Batch.choose(batch, 64, 2) == (64, 4) and rollout._Batch.choose(batch, 64, 2) == (64, 2)


def test_out_of_memory_halves_the_slots_and_loses_nothing(m, monkeypatch, capsys):
    """Memory runs out twice while sampling: running rows restart and draw the same tokens, finished rows are
    kept. With one slot the error is raised."""
    r, step, calls = generate(m), rollout._Batch.step, []

    def short(batch, size, pieces):
        calls.append(size)
        if len(calls) in (6, 11):       # poison the running rows: the restart must clear them
            rows = batch.state[0, :size][batch.state[3, :size] >= 0]
            batch.rollout.tokens[rows, 17:] = 99
            batch.rollout.logprobs[rows] = 99.
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(batch, size, pieces)

    monkeypatch.setattr(rollout._Batch, "step", short)
    sampler = Sampler(m, slots=40)
    s = sampler.generate(PROMPTS, 8, 20, 1.0, STOPS, 5, 2)
    assert torch.equal(s.tokens, r.tokens) and torch.equal(s.lengths, r.lengths)
    torch.testing.assert_close(s.logprobs, r.logprobs, atol=1e-4, rtol=0)
    assert sampler.stats["slots"] == 10 and max(calls) == 40 and max(calls[11:]) == 10
    said = capsys.readouterr()
    assert "going on with 20 sequences" in said.out + said.err and "with 10 sequences" in said.out + said.err
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        Sampler(m, slots=1).generate(PROMPTS, 8, 20, 1.0, STOPS, 5, 2)


def test_rows_are_prompt_major_and_hold_the_sampled_ids(m, monkeypatch):
    """Row p·G + g is prompt p and then the tokens that gumbel.sample returned, in order."""
    drawn, sample = {}, gumbel.sample

    def spy(logits, temperature, seed, step, sequence, position):
        token, logprob = sample(logits, temperature, seed, step, sequence, position)
        for s, *pair in zip(sequence.tolist(), token.tolist(), logprob.tolist(), strict=True):
            drawn.setdefault(s, []).append(pair)
        return token, logprob

    monkeypatch.setattr(gumbel, "sample", spy)
    r = generate(m, G=3)
    assert r.tokens.dtype == torch.int64 and r.logprobs.dtype == torch.float32
    for b in range(24):
        p, n = len(PROMPTS[b // 3]), int(r.lengths[b])
        assert r.prompt_lengths[b] == p and r.tokens[b, :p].tolist() == PROMPTS[b // 3]
        token, logprob = (list(x) for x in zip(*drawn[b], strict=True))
        assert r.tokens[b, p:p + n].tolist() == token and r.logprobs[b, p:p + n].tolist() == logprob
        assert r.answers()[b] == r.tokens[b, p:p + n - int(r.finished[b])].tolist()


def test_top_p_draws_from_the_nucleus_of_the_trainers_logits(m):
    """Every token of 64 answers is in the nucleus, with its log-probability in the renormalised nucleus."""
    r, whole = generate(m, temperature=0.7, top_p=0.5), generate(m, temperature=0.7)
    assert r.lengths.sum() > 200
    mask = model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)
    with torch.no_grad():
        hidden = m(r.tokens, torch.arange(r.tokens.shape[1]).expand_as(r.tokens))
        logits = m.logits(hidden[:, :-1][mask[:, 1:]])                                  # (answer tokens, V)
    cut = TopPLogitsWarper(0.5)(None, logits / 0.7).log_softmax(-1)
    expected = cut.gather(1, r.tokens[mask][:, None])[:, 0]
    assert expected.isfinite().all() and expected.mean() > -2
    torch.testing.assert_close(r.logprobs[mask], expected, atol=1e-4, rtol=0)
    assert whole.answers() != r.answers() and gap(m, r, 0.7) > 0.1 and gap(m, whole, 0.7) < 1e-4


def test_without_top_p_nothing_is_sorted_and_nothing_changes(m, monkeypatch):
    """top_p = 1, the default, never calls gumbel.nucleus."""
    monkeypatch.setattr(gumbel, "nucleus", None)
    assert all(map(torch.equal, generate(m), generate(m, top_p=1.0)))
    with pytest.raises(TypeError, match="not callable"):
        generate(m, top_p=0.99)


def test_every_stop_token_ends_an_answer(m):
    """As the first, a middle or the last token. A row that reaches the limit without one is not finished."""
    r = generate(m, stops=[])
    assert (r.lengths == 20).all() and not r.finished.any()
    row = r.tokens[9, 11:31].tolist()
    for at in (0, 7, 19):
        assert row.index(row[at]) == at, "the row repeats itself: choose another"
        s = generate(m, stops=[row[at], 96])
        assert s.lengths[9] == at + 1 and s.finished[9] and s.tokens[9, 11 + at] == row[at]
        assert s.answers()[9] == row[:at]
    cut = generate(m, stops=[row[19]], new=19)
    assert cut.lengths[9] == 19 and not cut.finished[9] and cut.answers()[9] == row[:19]
    ends = generate(m)
    last = ends.tokens.gather(1, (ends.prompt_lengths + ends.lengths - 1)[:, None])[:, 0]
    assert torch.equal(ends.finished, torch.isin(last, torch.tensor(STOPS)))
    assert len(last[ends.finished].unique()) > 3


def test_temperature_0_is_greedy(m):
    """It draws the argmax of the trainer's logits for any seed, step and number."""
    r = generate(m, G=2, temperature=0.0)
    assert torch.equal(r.tokens[::2], r.tokens[1::2]) and gap(m, r, 0.0) < 1e-4
    assert torch.equal(r.tokens, generate(m, G=2, temperature=0.0, seed=77, step=5, first=9).tokens)
    ids = r.tokens[8:9, :17 + int(r.lengths[8])]
    with torch.no_grad():
        best = m.logits(m(ids, torch.arange(ids.shape[1])[None])[0]).argmax(-1)
    assert best[16:-1].tolist() == ids[0, 17:].tolist()


def test_a_prompt_that_does_not_fit_is_refused_by_number(m):
    """A context of 128 tokens holds 108 + 20, not 109 + 20; an empty prompt has no token to read."""
    generate(m, [[5] * 108], G=1)
    for prompts, words in (([[5], [5] * 109], "prompt 1 has 109 tokens.* 20 .*context of 128"),
                           ([[5], [6], []], "prompt 2 is empty")):
        with pytest.raises(ValueError, match=words):
            generate(m, prompts)


def test_rows_join_and_micro_batches_lose_nothing(m):
    """join undoes rows; micro-batches hold each row once, stay in the budget and are sorted by length."""
    r = generate(m)
    order = torch.randperm(64)
    parts = [r.rows(order[:20]), r.rows(order[20:21]), r.rows(order[21:])]
    assert parts[1].tokens.shape[1] == parts[1].prompt_lengths + parts[1].lengths
    back = Rollout.join(parts).rows(order.argsort())
    assert all(torch.equal(a, b) for a, b in zip(back, r, strict=True))
    assert all(torch.equal(a, b[3:9]) for a, b in zip(r.rows(range(3, 9))[2:], r[2:], strict=True))
    length, rows = r.prompt_lengths + r.lengths, order[:50]
    for budget in (1, 40, 200, 10**6):
        batches = r.micro_batches(rows, budget)
        assert sorted(torch.cat(batches).tolist()) == sorted(rows.tolist())
        assert all(len(b) == 1 or len(b) * length[b].max() <= budget for b in batches)
        assert (length[torch.cat(batches)].diff() <= 0).all()
        assert len(batches) == {1: 50, 10**6: 1}.get(budget, len(batches))
    assert len(r.micro_batches(torch.arange(64), 3 * int(length.max()))[0]) == 3


# --- on a GPU

@pytest.fixture(scope="module")
def real(smollm2):
    """→ SmolLM2 in NVFP4 on a GPU with lora_B ≠ 0, and its tokenizer."""
    source, tokenizer = smollm2
    return learned(model.load(source, device="cuda"), 0.02), tokenizer


def gpu_prompts(n):
    """→ n prompts with lengths near the attention's pieces of 256, so that answers cross their edges."""
    return [[(7 * i + 3 * t) % 40_000 + 50 for t in range(length)]
            for i, length in enumerate((1, 2, 250, 254, 255, 256, 257, 40, 130, 300)[:n])]


def test_a_smaller_graph_is_captured_when_it_is_wanted_twice():
    """Until then a larger graph is replayed, but never one with too few rows or pieces."""
    batch = SimpleNamespace(graphs={}, requested=None)

    def chosen(*key):
        found = rollout._Batch.choose(batch, *key)
        batch.graphs[found] = None
        return found

    assert [chosen(256, 1), chosen(256, 1), chosen(64, 1), chosen(32, 1), chosen(32, 1)] == [
        (256, 1), (256, 1), (256, 1), (256, 1), (32, 1)]
    assert [chosen(32, 2), chosen(16, 1), chosen(16, 2), chosen(16, 2)] == [
        (32, 2), (32, 1), (32, 2), (16, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_gpu_graph_equals_eager(real, monkeypatch, top_p):
    """A replayed graph gives the same bits as calling the step with as many rows; also with top_p, where the
    sampler has loaded the kernels without top_p."""
    m, _ = real
    draw = gpu_prompts(10), 4, 30, 1.0, list(range(0, 49152, 60)), 3, 1
    sampler = Sampler(m, 40)
    whole = sampler.generate(*draw)
    graph = sampler.generate(*draw, top_p=top_p)
    assert torch.equal(graph.tokens, whole.tokens) == (top_p == 1)

    def advance(self, size, pieces, steps):
        key = self.choose(size, pieces)
        self.graphs[key] = None
        for _ in range(steps):
            self.step(*key)
        return self.state[3].tolist()

    monkeypatch.setattr(rollout._Batch, "advance", advance)
    eager = Sampler(m, 40).generate(*draw, top_p=top_p)
    assert all(torch.equal(a, b) for a, b in zip(graph, eager, strict=True))
    assert len(graph.lengths.unique()) > 5


@pytest.mark.gpu
def test_gpu_recorded_logprobs_are_the_trainers_when_the_adapter_is_small(smollm2):
    """256 rows, lora_B = ±5e-4 as after one step of AdamW: sampler and trainer differ by a KL that bf16
    rounding explains, below 1e-3 nats a token."""
    source, tokenizer = smollm2
    m = learned(model.load(source, device="cuda"), 1.)
    for layer in lora.lora_layers(m).values():
        layer.lora_B.data.sign_().mul_(5e-4)
    lora.refresh(m)
    prompts = [checkpoint.encode(tokenizer, f"What is {i} + {3 * i}?") for i in range(16)]
    r = Sampler(m).generate(prompts, 16, 16, 1.0, source.stop_ids(), 0, 1)
    with torch.no_grad():
        d = (rescored(m, r) - r.logprobs)[model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)]
    assert len(r.tokens) == 256 and (d.expm1() - d).mean() < 1e-3


@pytest.mark.gpu
def test_gpu_stops_limits_and_the_longest_context(real):
    """Stops at the first and the last token, the exact limit, and a row that fills the model's context."""
    m, _ = real
    sampler = Sampler(m)
    r = sampler.generate(gpu_prompts(4), 2, 19, 1.0, [], 3, 1)
    assert (r.lengths == 19).all() and not r.finished.any()
    first, last = r.answers()[5][0], r.answers()[5][-1]
    for stop, length in ((first, 1), (last, r.answers()[5].index(last) + 1)):
        s = sampler.generate(gpu_prompts(4), 2, 19, 1.0, [stop], 3, 1)
        assert s.lengths[5] == length and s.finished[5] and s.answers()[5] == r.answers()[5][:length - 1]
    context = m.config.max_position_embeddings
    full = sampler.generate([[9] * (context - 3)], 1, 3, 1.0, [], 0, 0)
    assert full.lengths.tolist() == [3] and full.tokens.shape[1] == context


@pytest.mark.gpu
def test_gpu_sees_the_adapter_and_the_noise(real):
    """refresh() and AQN write in place: the next generate samples from them, and undoing them restores it."""
    m, _ = real

    def logprobs():
        return Sampler(m).generate(gpu_prompts(8), 2, 12, 1.0, [], 3, 1).logprobs

    before, layer = logprobs(), m.layers[5].mlp.down_proj
    kept = layer.lora_B.detach().clone()
    layer.lora_B.data.mul_(-3)
    assert torch.equal(logprobs(), before)                                           # not refreshed yet
    lora.refresh(m)
    assert not torch.equal(logprobs(), before)
    layer.lora_B.data.copy_(kept)
    lora.refresh(m)
    with aqn.noisy_norms(m, 0.05, 1, 7):
        assert not torch.equal(logprobs(), before)
    assert torch.equal(logprobs(), before)


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_and_waves_finish(real):
    """50 calls leave as much memory allocated as one; a request larger than memory is sampled in waves."""
    m, _ = real
    draw, used = (gpu_prompts(9), 4, 12, 1.0, [], 3, 1), set()
    for call in range(51):
        Sampler(m).generate(*draw)
        torch.cuda.empty_cache()
        used.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved())) if call else None
    assert len(used) == 1
    total, now = torch.cuda.mem_get_info()[1], torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((now + 2**30) / total)
    try:
        sampler = Sampler(m)
        r = sampler.generate(gpu_prompts(8), 32, 1000, 1.0, [], 3, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sampler.stats["slots"] < 256 and (r.lengths == 1000).all()
