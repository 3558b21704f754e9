"""Log-probabilities and their gradient against autograd over whole logits; the kernel without a
GPU.
"""

import weakref

import pytest
import torch
from conftest import build, each_generation

from ops import logprobs
from ops.logprobs import TokenLogprobs


def example(n, D, V, dtype, device="cpu"):
    """hidden, targets, W; one token is certain, and the first and last of the vocabulary are
    targets.
    """
    hidden, W = torch.randn(n, D, device=device), torch.randn(V, D, device=device)
    targets = torch.randint(V, (n,), device=device)
    targets[0], targets[1] = 0, V - 1
    hidden[2] = 9 * W[targets[2]]
    return hidden.to(dtype).requires_grad_(), targets, W.to(dtype)


def results_and_gradients(hidden, targets, W, temperature):
    """→ logprob, entropy and the gradient of a weighted sum of the first, by TokenLogprobs and by
    definition, in fp64.
    """
    wide = hidden.detach().double().requires_grad_()
    log_p = (wide @ W.double().T / temperature).log_softmax(-1)
    exact = log_p[range(len(targets)), targets], -(log_p.exp() * log_p).sum(-1)
    weight = torch.randn(len(targets), device=hidden.device)
    found = TokenLogprobs.apply(hidden, targets, W, temperature)
    assert not found[1].requires_grad
    for (logprob, entropy), inputs in ((found, hidden), (exact, wide)):
        (grad,) = torch.autograd.grad((logprob * weight).sum(), inputs)
        yield [logprob.double(), entropy.double()], grad.double()


@pytest.mark.parametrize("temperature, at_once", [(0.6, 1), (1.0, 1 << 26), (2.0, 3 * 97)])
def test_results_and_gradient_equal_autograd_over_whole_logits(monkeypatch, temperature, at_once):
    """In chunks of one token, of all, and of three; in fp64, so that only the formula counts."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", at_once)
    given = example(7, 16, 97, torch.float64)
    (found, grad), (exact, exact_grad) = results_and_gradients(*given, temperature)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)  # the results are fp32
    # sums of 97 terms below 10, each rounded by 2⁻⁵³ of its size
    torch.testing.assert_close(grad, exact_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("learns, tensors", [(True, 8), (False, 4)])
def test_a_chunk_is_freed_before_the_next(monkeypatch, learns, tensors):
    """As tools/memory.py plans: one chunk's logits and derivative exist at a time, and those of a
    reference, for which no gradient is needed, are logits alone. 7 tokens are four chunks.
    """
    made, logits, write_logprobs = [], logprobs.logits, logprobs.write_logprobs

    def next_logits(*inputs):
        assert not any(ref() is not None for ref in made), "the chunk before still exists"
        return logits(*inputs)

    def watched(z, *others):
        made.extend(weakref.ref(t) for t in (z, others[-1]) if t is not None)
        write_logprobs(z, *others)

    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 2 * 97)
    monkeypatch.setattr(logprobs, "logits", next_logits)
    monkeypatch.setattr(logprobs, "write_logprobs", watched)
    hidden, targets, W = example(7, 16, 97, torch.float32)
    TokenLogprobs.apply(hidden.requires_grad_(learns), targets, W, 1.0)
    assert len(made) == tensors


def by_kernel(z, targets, temperature, *results):
    logprobs._logprobs_kernel[len(z),](z, targets, 1 / temperature, *results, z.shape[1], TILE=64)


def interpreted():
    """The kernel against the plain lines, in fp32: vocabularies of less than, exactly and over a
    tile.
    """
    for V, temperature in ((50, 1.0), (64, 50.0), (201, 0.6)):
        z, targets = 5 * torch.randn(4, V), torch.tensor([0, V - 1, 5, 6])
        z[2, 5], z[3] = 80, -100  # certain; all alike, and e^(−100 / .6) is 0 in fp32
        found = []
        for softmax in (logprobs.write_logprobs, by_kernel):
            results = [*torch.empty(4, 4), torch.empty(4, V)]
            softmax(z.clone(), targets, temperature, *results[:2], None)
            softmax(z.clone(), targets, temperature, *results[2:])
            found.append(results)
        torch.testing.assert_close(*found, rtol=0, atol=3e-5)  # sums of 201 terms, logits of 167


def test_kernel_in_the_interpreter(interpret):
    interpret(interpreted)


@each_generation
def test_kernel_compiles(cc, everything):
    """With d_logits and, slowly, without: no spills, and registers for two CTAs on an SM."""
    types = {
        "*fp32": "logits logprob entropy",
        "*i64": "targets",
        "*bf16": "d_logits",
        "fp32": "scale",
    }
    for constants in [{}, {"d_logits": None}][: 1 + everything]:
        constants["TILE"] = 4096
        build(logprobs._logprobs_kernel, cc, constants, types, ("V",), 8, registers=128)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 151936])
def test_gpu_equals_float64(V):
    """A temperature that is no power of two: x · scale − its own maximum, as one FMA, is the
    rounding error. bf16 inputs, fp32 results: log-probabilities and entropies to fp32's sums of V
    terms, the gradient to bf16's rounding of each of two products' inputs and results.
    """
    given = example(300, 64, V, torch.bfloat16, "cuda")
    (found, grad), (exact, exact_grad) = results_and_gradients(*given, 0.7)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)
    assert (grad - exact_grad).norm() / exact_grad.norm() < 2**-7
