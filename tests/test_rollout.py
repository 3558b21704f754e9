"""python -m pytest tests/test_rollout.py -q"""
import inspect

import pytest
import torch

import aqn
import checkpoint
import decode
import lora
import model
from rollout import Rollout, Sampler

PROMPTS = [[(7 * i + 3 * t) % 90 + 5 for t in range(n)] for i, n in enumerate((3, 11, 1, 6, 17, 8, 2, 5))]
STOPS = [2, 11, 23, 37, 41, 59, 73]                      # 7 of 97 tokens: an answer has about a dozen


@pytest.fixture(scope="module")
def m(tiny):
    """A model whose adapter is not zero."""
    return learned(model.load(str(tiny), quant="bf16", rank=4, alpha=8), 0.05)


def learned(m, size):
    generator = torch.Generator().manual_seed(3)
    for layer in lora.lora_layers(m).values():
        layer.lora_B.data.normal_(0, size, generator=generator)
    lora.refresh(m)
    return m


def generate(m, prompts=PROMPTS, G=8, new=20, temperature=1.0, stops=STOPS, seed=5, step=2, **more):
    return Sampler(m).generate(prompts, G, new, temperature, stops, seed, step, **more)


def rescored(m, r, temperature=1.0):
    """With gradients on, as the trainer computes them: from the parameters, not from the sampler's copies."""
    return m.logprobs(r.tokens, r.prompt_lengths, r.lengths, temperature)[0]


def gap(m, r, temperature=1.0):
    """The largest difference at any token between what was recorded and what the trainer computes."""
    return (r.logprobs - rescored(m, r, temperature).detach()).abs().max().item()


# fp32 on both sides, sums in another order: 1e-5. 1e-4 is the issue's; temperature on one side only gives 1.
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_recorded_logprobs_are_the_trainers(m, temperature):
    """Every token of 64 answers of different lengths, and exactly 0 outside them."""
    r = generate(m, temperature=temperature)
    assert len(r.tokens) == 64 and len(set(r.lengths.tolist())) > 10 and 0 < r.finished.sum() < 64
    assert gap(m, r, temperature) < 1e-4
    mask = model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)
    assert (r.logprobs[mask] < 0).all() and (r.logprobs[~mask] == 0).all()
    ends, t = (r.prompt_lengths + r.lengths)[:, None], torch.arange(r.tokens.shape[1])
    assert len(t) == ends.max() and not r.tokens[t >= ends].any()


def test_recorded_logprobs_are_the_trainers_on_smollm2_in_nvfp4():
    """The default model with quantised weights and an adapter; 24 layers deeper, the same bound."""
    source = checkpoint.open("smollm2")
    real, tokenizer = learned(model.load(source, rank=4), 0.02), source.tokenizer()
    prompts = [checkpoint.encode(tokenizer, text) for text in ("What is 7 * 8?", "Say hello in French.")]
    r = generate(real, prompts, G=4, new=10, temperature=0.7, stops=source.stop_ids())
    assert gap(real, r, 0.7) < 1e-4


def test_noise_is_in_the_sampler_and_its_logprobs(m):
    """Under AQN recorded = trainer's with the same noise; without it, and with another draw, they differ."""
    with aqn.noisy_norms(m, 0.05, 1, 7):
        r = generate(m)
        assert gap(m, r) < 1e-4
    d = (rescored(m, r).detach() - r.logprobs)[model.answer_mask(r.tokens, r.prompt_lengths, r.lengths)]
    # k3, as kl_noise: rounding of 1e-5 gives 1e-10, this noise 1e-2
    assert (d.exp() - 1 - d).mean() > 1e-3
    with aqn.noisy_norms(m, 0.05, 1, 8):
        assert gap(m, r) > 1e-2


def test_an_optimizer_step_reaches_the_sampler_through_refresh(tiny):
    """Sampler = trainer before the step, and after step and refresh, but not between: it reads the copies."""
    m = learned(model.load(str(tiny), quant="bf16", rank=4, alpha=8), 0.05)
    r = generate(m)
    rescored(m, r).sum().backward()
    torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-4).step()
    stale = generate(m)
    assert torch.equal(stale.logprobs, r.logprobs) and gap(m, stale) > 1e-2
    lora.refresh(m)
    fresh = generate(m)
    assert gap(m, fresh) < 1e-4 and not torch.equal(fresh.logprobs, stale.logprobs)


def test_a_sample_depends_on_its_number_alone(m):
    """Not on batch, neighbours, their order, group size, max_new_tokens; and on seed and step."""
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
    """The model sees each prompt once for its group, then one token of each row that goes on, and no more."""
    calls, forward, rows = [], m.forward, generate(m).answers()
    monkeypatch.setattr(m, "forward", lambda ids, *rest: calls.append(ids) or forward(ids, *rest))
    monkeypatch.setattr(m, "gradient_checkpointing", True)          # must not disable the cache
    r = generate(m)
    assert r.answers() == rows and len(r.lengths.unique()) > 10
    assert calls[0].tolist() == [p + [0] * (17 - len(p)) for p in PROMPTS]
    going = [int((r.lengths > t).sum()) for t in range(1, int(r.lengths.max()))]
    assert [c.shape for c in calls[1:]] == [(n, 1) for n in going]
    assert sum(len(c) for c in calls[1:]) == int((r.lengths - 1).sum())


def test_rows_are_prompt_major_and_hold_the_sampled_ids(m, monkeypatch):
    """Row p·G + g begins with prompt p; what follows is what decode.sample returned, in order."""
    drawn, sample = {}, decode.sample

    def spy(logits, temperature, seed, step, sequence, position):
        token, logprob = sample(logits, temperature, seed, step, sequence, position)
        for s, *pair in zip(sequence.tolist(), token.tolist(), logprob.tolist(), strict=True):
            drawn.setdefault(s, []).append(pair)
        return token, logprob

    monkeypatch.setattr(decode, "sample", spy)
    r = generate(m, G=3)
    assert r.tokens.dtype == torch.int64 and r.logprobs.dtype == torch.float32
    for b in range(24):
        p, n = len(PROMPTS[b // 3]), int(r.lengths[b])
        assert r.prompt_lengths[b] == p and r.tokens[b, :p].tolist() == PROMPTS[b // 3]
        token, logprob = (list(x) for x in zip(*drawn[b], strict=True))
        assert r.tokens[b, p:p + n].tolist() == token and r.logprobs[b, p:p + n].tolist() == logprob
        assert r.answers()[b] == r.tokens[b, p:p + n - int(r.finished[b])].tolist()
    assert {"top_k", "top_p", "min_p"}.isdisjoint(inspect.signature(Sampler.generate).parameters)


def test_every_stop_token_ends_an_answer(m):
    """At the first token, in the middle, on the very last; at the limit without one it is not finished."""
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
    """The argmax of the trainer's logits, whatever seed, step and number; log-probs at temperature 1."""
    r = generate(m, G=2, temperature=0.0)
    assert torch.equal(r.tokens[::2], r.tokens[1::2]) and gap(m, r, 0.0) < 1e-4
    assert torch.equal(r.tokens, generate(m, G=2, temperature=0.0, seed=77, step=5, first=9).tokens)
    ids = r.tokens[8:9, :17 + int(r.lengths[8])]
    with torch.no_grad():
        best = m.logits(m(ids, torch.arange(ids.shape[1])[None])[0]).argmax(-1)
    assert best[16:-1].tolist() == ids[0, 17:].tolist()


def test_a_prompt_that_does_not_fit_is_refused_by_number(m):
    """The context holds 128: 108 + 20 fit, 109 + 20 do not; an empty prompt has nothing to continue."""
    generate(m, [[5] * 108], G=1)
    for prompts, number, count in (([[5], [5] * 109], 1, 109), ([[5], [6], []], 2, 0)):
        with pytest.raises(ValueError, match=rf"prompt {number} has {count} tokens.* 20 .*context of 128"):
            generate(m, prompts)


def test_rows_join_and_micro_batches_lose_nothing(m):
    """join(rows(·)) is the identity; micro-batches hold each row once, keep the budget, sort by length."""
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
