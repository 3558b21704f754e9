"""AQN: the schedules, which norms take noise, reproducible draws, exact restoration."""

import itertools
import math

import pytest
import torch
from conftest import logits_of, tiny_checkpoint

import aqn
import lora
import model as decoder
from tools import weights

# σ of each stage in the released code, for 10 stages from 1e-2 to 1e-4, to three digits
TABLE = [0, 1e-2, 5.62e-3, 3.16e-3, 1.78e-3, 1e-3, 5.62e-4, 3.16e-4, 1.78e-4, 1e-4]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory):
    """A tiny decoder of 3 layers; Qwen3 also has norms inside its attention, which take no
    noise.
    """
    folder = tmp_path_factory.mktemp(request.param)
    tiny_checkpoint(folder, request.param)
    return decoder.load(weights.open(folder), "bf16", rank=2, alpha=2)


def state(model):
    """→ {name: bytes} of every parameter, buffer and frozen weight."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, layer in lora.lora_layers(model).items():
        found[name] = layer.base.weight.weight_and_B
    return {name: t.detach().contiguous().view(torch.uint8).clone() for name, t in found.items()}


def moved(before, model):
    return {name for name, t in state(model).items() if not torch.equal(t, before[name])}


def logits(model):
    return logits_of(model, torch.arange(12).view(2, 6) + 3)


def draws(seed, step, sigma=1.0, n=64):
    """→ the noise on two norms of n weights that are 0."""
    model = torch.nn.ModuleDict({name: torch.nn.RMSNorm(n) for name in aqn.NORMS})
    for norm in model.values():
        norm.weight.data.zero_()
    with aqn.noisy_norms(model, sigma, seed, step):
        return [norm.weight.detach().clone() for norm in model.values()]


def test_sigma_follows_the_table():
    """25 steps in 10 stages: stage k begins at step ceil(2.5 k). rel: half a unit of the third
    digit.
    """
    begins = [0, 3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    for stage, want in enumerate(TABLE):
        got = [aqn.sigma(step, 25) for step in range(begins[stage], begins[stage + 1])]
        assert got == pytest.approx([want] * len(got), rel=3e-3)


QUARTERS = dict(exponential=10**-2.5, linear=7.525e-3, cosine=8.55018e-3, logarithmic=6.46201e-3)


@pytest.mark.parametrize("schedule", aqn.SCHEDULES)
def test_every_schedule_falls_from_start_to_end(schedule):
    """After a stage without noise. Six stages put u at 0, ¼, … 1."""
    for ends in ((1e-2, 1e-4), (0.5, 0.2)):
        silent, *noisy = (aqn.sigma(step, 6, *ends, 6, schedule) for step in range(6))
        assert silent == 0
        assert [noisy[0], noisy[-1]] == pytest.approx(ends, rel=2e-6)
        assert sorted(noisy, reverse=True) == noisy


@pytest.mark.parametrize("schedule", aqn.SCHEDULES)
def test_a_quarter_of_the_way_every_schedule_has_the_value_of_its_formula(schedule):
    """Worked out by hand, to six digits. A new schedule needs its own in QUARTERS."""
    at = aqn.sigma(2, 6, stages=6, schedule=schedule)
    assert at == pytest.approx(QUARTERS[schedule], rel=2e-6)


ZERO = r"\b0(\.0)?(?!\.?\d)"


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(schedule="quadratic"), "quadratic"),
        (dict(stages=2), r"\b2\b"),
        (dict(start=-0.25), "-0.25"),
        (dict(start=0.0), ZERO),
        (dict(end=-0.75), "-0.75"),
        (dict(end=0.0), ZERO),
        (dict(step=10), r"\b10\b"),
        (dict(step=12), r"\b12\b"),
        (dict(step=-1), "-1"),
    ],
)
def test_what_sigma_refuses_it_names(change, named):
    """The sentence has the value in it; how it is written besides is free."""
    with pytest.raises(ValueError, match=named):
        aqn.sigma(**dict(step=0, total_steps=10) | change)


def test_sigma_adaptive_is_the_current_one():
    """And `start` as long as nothing was. It has no stages, so it asks nothing of the step."""
    for step in (0, 7, 12):
        given = step, 10, 0.02
        assert aqn.sigma(*given, schedule="adaptive", current=0.005) == 0.005
        assert aqn.sigma(*given, schedule="adaptive") == 0.02


def test_noise_moves_two_norms_of_each_layer_and_leaves_every_bit_as_it_was(model):
    """Each step adds its draw to the clean weights, and restores them after an interrupt too.

    bf16 would round a noise of 1e-4 away on weights near 1. The std of 64 weights: ± 5/√128.
    """
    before, clean, sigma = state(model), logits(model), 1e-4
    norm = model.layers[2].input_layernorm
    weight = norm.weight.clone()
    for step in range(4):
        with pytest.raises(KeyboardInterrupt), aqn.noisy_norms(model, sigma, 3, step) as changed:
            assert changed == 6 and aqn.is_noisy(model)
            assert moved(before, model) == {
                f"layers.{i}.{name}.weight" for i in range(3) for name in aqn.NORMS
            }
            assert abs((norm.weight - weight).std() / sigma - 1) < 0.44
            # the logits change by about σ of their spread
            assert (logits(model) - clean).std() > sigma / 10 * clean.std()
            raise KeyboardInterrupt
        assert not aqn.is_noisy(model) and not moved(before, model)


def test_a_draw_is_a_function_of_seed_step_and_layer():
    """Equal (seed, step, layer) give the same draw, whatever torch's generator did; unequal ones
    another.
    """
    z, second = draws(seed=5, step=7)
    torch.randn(3)
    assert torch.equal(draws(seed=5, step=7)[0], z)
    # the correlation of 64 independent normals has a std of 1/8; .6 is 4.8 of these
    others = z, second, *draws(seed=6, step=7), *draws(seed=5, step=8), *draws(seed=7, step=5)
    for one, other in itertools.combinations(others, 2):
        assert torch.corrcoef(torch.stack((one, other)))[0, 1].abs() < 0.6


def test_the_noise_has_mean_zero_and_the_std_asked_for():
    """Within 5 standard errors of n draws, in units of σ: 1/√n (mean), 1/√(2n) (std), √(96/n)
    (kurtosis).
    """
    n, sigma = 200_000, 3e-3
    for noise in draws(seed=1, step=2, sigma=sigma, n=n):  # of both norms of a layer
        z = noise.double() / sigma
        assert z.mean().abs() < 5 / math.sqrt(n) and (z.std() - 1).abs() < 5 / math.sqrt(2 * n)
        assert (z**4).mean().sub(3).abs() < 5 * math.sqrt(96 / n)


def test_an_interrupt_while_noise_is_added_restores_every_norm(model, monkeypatch):
    """The fourth of six norms is interrupted."""
    before, randn, calls = state(model), torch.randn, itertools.count(1)

    def interrupted(*args, **more):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return randn(*args, **more)

    monkeypatch.setattr(torch, "randn", interrupted)
    with pytest.raises(KeyboardInterrupt), aqn.noisy_norms(model, 1e-2, 3, 1):
        pass
    assert not moved(before, model) and not aqn.is_noisy(model)


def test_an_adaptive_sigma_reaches_its_target_and_stays_near_it():
    """The distance grows as σ². From both sides σ comes within one factor of the σ at the target,
    and NaN makes it smaller.
    """
    at_target = 0.02**0.5
    for sigma in (1e-2, 3.0):
        for _ in range(40):
            sigma = aqn.next_sigma(sigma, sigma**2, 0.02)
        for _ in range(10):
            sigma = aqn.next_sigma(sigma, sigma**2, 0.02)
            assert 1 / aqn.FACTOR <= sigma / at_target <= aqn.FACTOR
    assert aqn.next_sigma(1.0, math.nan, 0.02) < 1


def test_noise_on_noise_is_refused_and_sigma_zero_changes_nothing(model):
    """The refusal leaves the noise alone, and the outer context still restores the weights."""
    before = state(model)
    with aqn.noisy_norms(model, 0.0, seed=0, step=0) as changed:
        assert changed == 0 and not aqn.is_noisy(model) and not moved(before, model)
    with aqn.noisy_norms(model, 1e-2, seed=0, step=1):
        noisy = state(model)
        for sigma in (1e-2, 0.0):
            with pytest.raises(RuntimeError, match="noisy already"):
                aqn.noisy_norms(model, sigma, 0, 1).__enter__()
        assert not moved(noisy, model)
    assert not moved(before, model)


def test_a_model_without_such_norms_is_an_error():
    """The released code found no norm and trained on without noise."""
    with pytest.raises(ValueError, match="input_layernorm"):
        aqn.noisy_norms(torch.nn.Linear(2, 2), 1e-2, 0, 0).__enter__()
