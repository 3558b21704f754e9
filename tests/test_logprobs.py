"""python -m pytest tests/test_logprobs.py -q"""
import weakref

import pytest
import torch
from conftest import build, on_all_cores, run_alone

import logprobs
from logprobs import TokenLogprobs


def example(n=7, D=16, V=97, dtype=torch.float32, device="cpu"):
    """hidden, targets, W; one token is certain, and the first and last of the vocabulary are targets."""
    torch.manual_seed(0)
    hidden, W = torch.randn(n, D, device=device), torch.randn(V, D, device=device)
    targets = torch.randint(V, (n,), device=device)
    targets[0], targets[1] = 0, V - 1
    hidden[2] = 9 * W[targets[2]]
    return hidden.to(dtype).requires_grad_(), targets, W.to(dtype)


@pytest.mark.parametrize("temperature", [.6, 1., 2.])
@pytest.mark.parametrize("at_once", [1, 3 * 97, 1 << 26])
def test_results_and_gradient_equal_autograd_over_whole_logits(monkeypatch, temperature, at_once):
    """In chunks of one token, of three, and of all; in fp64, so that only the formula counts."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", at_once)
    hidden, targets, W = example(dtype=torch.float64)
    log_p = (hidden @ W.T / temperature).log_softmax(-1)
    exact, entropy = log_p[range(7), targets], -(log_p.exp() * log_p).sum(-1)
    found, spread = TokenLogprobs.apply(hidden, targets, W, temperature)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)         # the results are fp32
    torch.testing.assert_close(spread.double(), entropy, rtol=1e-6, atol=1e-6)
    assert not spread.requires_grad
    weight = torch.randn(7)
    ours, = torch.autograd.grad((found * weight).sum(), hidden)
    theirs, = torch.autograd.grad((exact * weight).sum(), hidden)
    # the gradient is fp64 on both sides: sums of 97 terms below 10, each rounded by 2⁻⁵³ of its size
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_chunks_logits_exist_at_a_time(monkeypatch):
    """As memory.py plans: a chunk's logits and their derivative are freed before the next chunk begins."""
    made, alive, product = [], [], logprobs.logits

    def logits(*inputs):
        alive.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(z := product(*inputs)))
        return z
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 2 * 97)
    monkeypatch.setattr(logprobs, "logits", logits)
    monkeypatch.setattr(torch, "empty_like", lambda *x, make=torch.empty_like, **dtype: made.append(
        weakref.ref(new := make(*x, **dtype))) or new)
    TokenLogprobs.apply(*example(), 1.)
    assert alive == [1] * 4                         # the slope; 7 tokens are four chunks


def test_without_a_gradient_the_derivative_is_not_computed(monkeypatch):
    """A reference's log-probabilities need one product with the head, not two."""
    calls, softmax = [], logprobs.softmax
    monkeypatch.setattr(logprobs, "softmax", lambda *all: calls.append(all[-1]) or softmax(*all))
    hidden, targets, W = example()
    with torch.no_grad():
        TokenLogprobs.apply(hidden.detach(), targets, W, 1.)
    TokenLogprobs.apply(hidden, targets, W, 1.)
    assert [dz is None for dz in calls] == [True, False]


def by_kernel(z, targets, temperature, *results):
    logprobs._softmax_kernel[len(z),](z, targets, 1 / temperature, *results, z.shape[1], TILE=4096)


def interpreted():
    """The kernel against the plain lines, in fp32: vocabularies of less than, exactly and over a tile."""
    for V in (97, 4096, 5001):
        torch.manual_seed(0)
        z, targets = 5 * torch.randn(4, V), torch.tensor([0, V - 1, 5, 6])
        z[2, 5], z[3] = 80, -3e4                                  # certain; far from 0, all alike
        for temperature in (.6, 1., 50.):
            found = [[torch.full((4,), 7.), torch.full((4,), 7.), torch.full((4, V), 7.)] for _ in range(2)]
            for results, softmax in zip(found, (logprobs.softmax, by_kernel), strict=True):
                softmax(z.clone(), targets, temperature, *results)
                kept = [r.clone() for r in results[:2]]
                softmax(z.clone(), targets, temperature, *results[:2], None)
                assert all(map(torch.equal, kept, results))       # dz None changes nothing else
            # a sum of 5 001 terms and a difference of numbers up to 3e4 / .6, in fp32
            for plain, ours in zip(*found, strict=True):
                torch.testing.assert_close(ours[:3], plain[:3], rtol=0, atol=3e-5)
                torch.testing.assert_close(ours[3], plain[3], rtol=0, atol=5e4 * 2**-23)


def test_kernel_in_the_interpreter():
    run_alone(interpreted, interpret=True)


def compiled_for(cc):
    """With and without dz: no spills, few registers, so that two CTAs fit on an SM."""
    names_of = {"*fp32": "z logprob entropy", "*i64": "targets", "*bf16": "dz", "fp32": "scale"}
    for absent in ({}, {"dz": None}):
        build(logprobs._softmax_kernel, cc, {"TILE": 4096} | absent, names_of, ("V",), 8, registers=128)


def compiled():
    on_all_cores(compiled_for)


def test_kernel_compiles_for_four_generations():
    run_alone(compiled, interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 151936])
def test_gpu_equals_float64(V):
    """A temperature that is no power of two: x · scale − its own maximum, as one FMA, is the rounding error.
    bf16 inputs, fp32 results: log-probabilities and entropies to fp32's sums of V terms, the gradient to
    bf16's rounding of each of two products' inputs and results."""
    hidden, targets, W = example(300, 64, V, torch.bfloat16, "cuda")
    exact = hidden.detach().double().requires_grad_()
    log_p = (exact @ W.double().T / .7).log_softmax(-1)
    expected, entropy = log_p[range(300), targets], -(log_p.exp() * log_p).sum(-1)
    found, spread = TokenLogprobs.apply(hidden, targets, W, .7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(spread.double(), entropy, rtol=1e-5, atol=1e-4)
    weight = torch.randn(300, device="cuda")
    ours, = torch.autograd.grad((found * weight).sum(), hidden)
    theirs, = torch.autograd.grad((expected * weight).sum(), exact)
    assert (ours.double() - theirs).norm() / theirs.norm() < 2**-7
