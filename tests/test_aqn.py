"""AQN: the schedules, which norms take noise, reproducible draws, exact restoration."""
import itertools
import math

import pytest
import torch
from conftest import tiny_checkpoint

import aqn
import lora
import model as decoder

# σ of each stage in the released code, for 10 stages from 1e-2 to 1e-4, to three digits
TABLE = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]


@pytest.fixture(params=["llama", "qwen3"])
def model(request, tmp_path):
    """A tiny decoder of 3 layers; Qwen3 also has norms inside its attention, which take no noise."""
    tiny_checkpoint(tmp_path, request.param)
    return decoder.load(str(tmp_path), quant="bf16", rank=2, alpha=2)


def state(model):
    """→ {name: bytes} of every parameter, buffer and frozen weight."""
    frozen = [(name, layer.base.W.wide) for name, layer in lora.lora_layers(model).items()]
    return {n: t.detach().contiguous().view(torch.uint8).clone() for n, t in
            [*model.named_parameters(), *model.named_buffers(), *frozen]}


def moved(before, model):
    return {name for name, t in state(model).items() if not torch.equal(t, before[name])}


def logits(model):
    ids = torch.arange(12).view(2, 6) + 3
    return model.logits(model(ids, torch.arange(6).expand(2, 6)))


def vector(n=64):
    """→ a model of one norm with n zero weights: inside noisy_norms its weight is the noise."""
    block = torch.nn.Module()
    block.input_layernorm = torch.nn.Module()
    block.input_layernorm.register_buffer("weight", torch.zeros(n))
    return block


def draw(seed, step, sigma=1.0, n=64):
    block = vector(n)
    with aqn.noisy_norms(block, sigma, seed, step):
        return block.input_layernorm.weight.clone()


def test_sigma_follows_the_table_and_hits_both_ends():
    """Ten stages of equal length: 0, then 1e-2 down to 1e-4. rel: half a unit of the table's third digit."""
    for steps in (10, 50):
        got = [aqn.sigma(step, steps) for step in range(steps)]
        assert got == pytest.approx([s for s in TABLE for _ in range(steps // 10)], rel=3e-3)
    assert aqn.sigma(1, 10) == 1e-2 and aqn.sigma(9, 10) == pytest.approx(1e-4, rel=1e-12)


def test_stages_begin_at_the_first_step_past_their_tenth():
    """25 steps in 10 stages: stage k begins at step ceil(2.5 k), and the last stage reaches `end`."""
    sigmas = [aqn.sigma(step, 25) for step in range(25)]
    assert [s for s in range(1, 25) if sigmas[s] != sigmas[s - 1]] == [3, 5, 8, 10, 13, 15, 18, 20, 23]
    assert sigmas[2] == 0 and sigmas[24] == pytest.approx(1e-4, rel=1e-12)


@pytest.mark.parametrize("schedule, quarter", [("exponential", 10**-2.5), ("linear", 7.525e-3),
                                               ("cosine", 8.55018e-3), ("logarithmic", 6.46201e-3)])
def test_every_schedule_runs_from_start_to_end(schedule, quarter):
    """Six stages put u at 0, ¼, … 1; the value at ¼ is worked out by hand, to six digits."""
    at = [aqn.sigma(step, 6, stages=6, schedule=schedule) for step in range(6)]
    assert at[0] == 0 and [at[1], at[2], at[5]] == pytest.approx([1e-2, quarter, 1e-4], rel=2e-6)
    assert sorted(at[1:], reverse=True) == at[1:]


@pytest.mark.parametrize("change, words", [(dict(schedule="step"), "'step'"), (dict(stages=2), "stages=2"),
                                           (dict(end=0.0), "end=0.0"), (dict(start=-1.0), "start=-1.0"),
                                           (dict(step=10), "step 10"), (dict(step=-1), "step -1")])
def test_what_sigma_refuses_it_names(change, words):
    with pytest.raises(ValueError, match=words):
        aqn.sigma(**dict(step=0, total_steps=10) | change)


def test_exactly_two_norms_of_each_layer_are_shaken_and_the_logits_feel_it(model):
    """Noise changes two norms a layer and nothing else; the logits change; on exit every bit is restored."""
    before, clean = state(model), logits(model)
    with aqn.noisy_norms(model, 1e-2, seed=0, step=1) as changed:
        assert changed == 6 and aqn.is_noisy(model)
        assert moved(before, model) == {f"layers.{i}.{norm}.weight" for i in range(3) for norm in aqn.NORMS}
        # noise of 1e-2 on weights near 1 changes logits by about 1e-2 of their spread
        assert (logits(model) - clean).std() > 1e-3 * clean.std()
    assert not aqn.is_noisy(model) and not moved(before, model) and torch.equal(logits(model), clean)


def test_a_hundred_steps_and_an_exception_leave_every_bit_as_it_was(model):
    """Noise never accumulates: each step adds its draw to the clean weights, even after an interrupt."""
    before, seen = state(model), set()
    for step in range(100):
        try:
            with aqn.noisy_norms(model, aqn.sigma(99, 100, end=1e-2), seed=3, step=step):
                seen.add(model.layers[0].input_layernorm.weight[0].item())
                # 300 normals stay below 6 σ (2e-9 each); noise accumulated over 100 steps would not
                difference = model.layers[1].post_attention_layernorm.weight[:3] - \
                    before["layers.1.post_attention_layernorm.weight"].view(torch.float32)[:3]
                assert difference.abs().max() < 6e-2
                if step % 10 == 3:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert not moved(before, model) and not aqn.is_noisy(model)
    assert len(seen) == 100


def test_a_draw_is_a_function_of_seed_step_and_layer():
    """Equal (seed, step, layer) give the same draw, whatever torch's generator did; unequal ones another."""
    z = draw(seed=5, step=7)
    torch.randn(3)
    assert torch.equal(draw(seed=5, step=7), z)
    two = torch.nn.ModuleList([vector(), vector()])
    with aqn.noisy_norms(two, 1.0, seed=5, step=7):
        first, second = (block.input_layernorm.weight.clone() for block in two)
    assert torch.equal(first, z)
    # the correlation of 64 independent normals has a std of 1/8; .6 is 4.8 of these
    others = second, draw(seed=6, step=7), draw(seed=5, step=8), draw(seed=7, step=5), z
    for one, other in itertools.combinations(others, 2):
        assert torch.corrcoef(torch.stack((one, other)))[0, 1].abs() < .6


def test_the_noise_has_mean_zero_and_the_std_asked_for():
    """Within 5 standard errors of n draws, in units of σ: 1/√n (mean), 1/√(2n) (std), √(96/n) (kurtosis)."""
    n, sigma = 200_000, 3e-3
    z = draw(seed=1, step=2, sigma=sigma, n=n).double() / sigma
    assert z.mean().abs() < 5 / math.sqrt(n) and (z.std() - 1).abs() < 5 / math.sqrt(2 * n)
    assert (z**4).mean().sub(3).abs() < 5 * math.sqrt(96 / n)


def test_small_noise_survives_because_the_decoders_norms_are_fp32(model):
    """σ = 1e-4 changes weights near 1 by σ, where bf16 would round them by 1e-3. 64 weights: ± 5/√128."""
    norm = model.layers[2].input_layernorm
    clean = norm.weight.clone()
    with aqn.noisy_norms(model, 1e-4, seed=0, step=0):
        assert norm.weight.dtype == torch.float32 and abs((norm.weight - clean).std() / 1e-4 - 1) < .44


def test_noise_on_noise_is_refused_and_sigma_zero_changes_nothing(model):
    """The inner context raises and leaves the outer one's noise alone; the outer one still restores w."""
    before = state(model)
    with aqn.noisy_norms(model, 0.0, seed=0, step=0) as changed:
        assert changed == 0 and not aqn.is_noisy(model) and not moved(before, model)
    with aqn.noisy_norms(model, 1e-2, seed=0, step=1):
        noisy = state(model)
        for sigma in (1e-2, 0.0):
            with pytest.raises(RuntimeError, match="noisy already"):
                aqn.noisy_norms(model, sigma, seed=0, step=1).__enter__()
        assert not moved(noisy, model) and aqn.is_noisy(model)
    assert not moved(before, model)


def test_a_model_without_such_norms_is_an_error():
    """The released code found no norm and trained on without noise."""
    with pytest.raises(ValueError, match="input_layernorm"):
        aqn.noisy_norms(torch.nn.Linear(2, 2), 1e-2, seed=0, step=0).__enter__()
