"""Log-probabilities and their gradient against autograd over whole logits; the kernel without a
GPU.
"""

import weakref

import pytest
import torch
from conftest import build, each_generation

from ops import logprobs
from ops.logprobs import TokenLogprobs


def example(n=7, D=16, V=97, dtype=torch.float32, device="cpu"):
    """hidden, targets, W; one token is certain, and the first and last of the vocabulary are
    targets.
    """
    hidden, W = torch.randn(n, D, device=device), torch.randn(V, D, device=device)
    targets = torch.randint(V, (n,), device=device)
    targets[0], targets[1] = 0, V - 1
    hidden[2] = 9 * W[targets[2]]
    return hidden.to(dtype).requires_grad_(), targets, W.to(dtype)


def by_autograd(hidden, targets, W, temperature):
    """→ what TokenLogprobs returns, by the definition."""
    log_p = (hidden @ W.T / temperature).log_softmax(-1)
    return log_p[range(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)


def compare(found, exact, inputs, of_exact, **tolerance):
    """Log-probabilities and entropies within tolerance → the gradients of a weighted sum of the
    first.
    """
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)
    weight = torch.randn(len(found[0]), device=inputs.device)
    (ours,) = torch.autograd.grad((found[0] * weight).sum(), inputs)
    (theirs,) = torch.autograd.grad((exact[0] * weight).sum(), of_exact)
    return ours, theirs


@pytest.mark.parametrize("temperature, at_once", [(0.6, 1), (1.0, 1 << 26), (2.0, 3 * 97)])
def test_results_and_gradient_equal_autograd_over_whole_logits(monkeypatch, temperature, at_once):
    """In chunks of one token, of all, and of three; in fp64, so that only the formula counts."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", at_once)
    hidden, targets, W = example(dtype=torch.float64)
    found = TokenLogprobs.apply(hidden, targets, W, temperature)
    assert not found[1].requires_grad
    exact = by_autograd(hidden, targets, W, temperature)
    # the results are fp32
    ours, theirs = compare(found, exact, hidden, hidden, rtol=1e-6, atol=1e-6)
    # the gradient is fp64 on both sides: sums of 97 terms below 10, each rounded by 2⁻⁵³ of its
    # size
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_chunk_is_freed_before_the_next(monkeypatch):
    """As tools/memory.py plans: one chunk's logits and derivative exist at a time, and those of a
    reference, for which no gradient is needed, are logits alone.
    """
    made, logits, softmax = [], logprobs.logits, logprobs.softmax

    def next_logits(*inputs):
        assert all(ref() is None for ref in made), "the chunk before still exists"
        return logits(*inputs)

    def watched_softmax(z, *others):
        made.extend(weakref.ref(t) for t in (z, others[-1]) if t is not None)
        softmax(z, *others)

    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 2 * 97)
    monkeypatch.setattr(logprobs, "logits", next_logits)
    monkeypatch.setattr(logprobs, "softmax", watched_softmax)
    hidden, targets, W = example()
    TokenLogprobs.apply(hidden, targets, W, 1.0)
    assert len(made) == 4 * 2  # 7 tokens are four chunks
    made.clear()
    TokenLogprobs.apply(hidden.detach(), targets, W, 1.0)
    assert len(made) == 4


def by_kernel(z, targets, temperature, *results):
    logprobs._softmax_kernel[len(z),](z, targets, 1 / temperature, *results, z.shape[1], TILE=64)


def interpreted():
    """The kernel against the plain lines, in fp32: vocabularies of less than, exactly and over a
    tile.
    """
    for V, temperature in ((50, 1.0), (64, 50.0), (201, 0.6), (201, 1.0)):
        z, targets = 5 * torch.randn(4, V), torch.tensor([0, V - 1, 5, 6])
        z[2, 5], z[3] = 80, -3e4  # certain; far from 0, all alike
        found = []
        for softmax in (logprobs.softmax, by_kernel):
            results = [*torch.empty(4, 4), torch.empty(4, V)]
            softmax(z.clone(), targets, temperature, *results[:2], None)
            softmax(z.clone(), targets, temperature, *results[2:])
            found.append(results)
        # a sum of 201 terms and a difference of numbers up to 3e4 / .6, in fp32
        for plain, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours[:3], plain[:3], rtol=0, atol=3e-5)
            torch.testing.assert_close(ours[3], plain[3], rtol=0, atol=5e4 * 2**-23)


def test_kernel_in_the_interpreter(interpret):
    interpret(interpreted)


@each_generation
def test_kernel_compiles(cc, everything):
    """With dz and, slowly, without: no spills, few registers, so that two CTAs fit on an SM."""
    names_of = {"*fp32": "z logprob entropy", "*i64": "targets", "*bf16": "dz", "fp32": "scale"}
    for absent in [{}, {"dz": None}][: 1 + everything]:
        build(
            logprobs._softmax_kernel,
            cc,
            {"TILE": 4096} | absent,
            names_of,
            ("V",),
            8,
            registers=128,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 151936])
def test_gpu_equals_float64(V):
    """A temperature that is no power of two: x · scale − its own maximum, as one FMA, is the
    rounding error. bf16 inputs, fp32 results: log-probabilities and entropies to fp32's sums of V
    terms, the gradient to bf16's rounding of each of two products' inputs and results.
    """
    hidden, targets, W = example(300, 64, V, torch.bfloat16, "cuda")
    wide = hidden.detach().double().requires_grad_()
    exact = by_autograd(wide, targets, W.double(), 0.7)
    found = TokenLogprobs.apply(hidden, targets, W, 0.7)
    ours, theirs = compare(found, exact, hidden, wide, rtol=1e-5, atol=1e-4)
    assert (ours.double() - theirs).norm() / theirs.norm() < 2**-7
