"""Philox against its authors' vectors, samples against the softmax, kernels against plain torch."""

from types import SimpleNamespace

import pytest
import torch
from conftest import compile_with_a_wait, each_generation

from ops import sampling


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ([0xFFFFFFFF] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_vectors(counter, key, expected):
    """The known-answer vectors of Random123, its authors' library, for philox4x32 with 10
    rounds.
    """
    assert torch.stack(sampling.philox(key, *torch.tensor(counter))).tolist() == expected


@pytest.mark.parametrize("axis", ["sequence", "index", "step", "seed"])
def test_samples_follow_the_softmax(axis):
    """Chi-square over 6 tokens, rare ones too, while only one part of the counter or the key
    varies. A token outside the nucleus, whose logit is −inf, is never drawn.
    """
    logits, n = torch.tensor([2.0, -1.0, 0.5, 0.0, -3.0, 1.5, -torch.inf]), 100_000
    where = dict(seed=5, step=1, index=torch.full((n,), 2), sequence=torch.full((n,), 9))
    # the plain lines also take a column of seeds or of steps, one for each row
    where[axis] = torch.arange(n) if axis in ("index", "sequence") else torch.arange(n)[:, None]
    tokens, logprobs = sampling.sample(logits.expand(n, 7), 0.7, **where)
    log_p = (logits.double() / 0.7).log_softmax(0)
    expected = n * log_p.exp()
    *found, outside = (torch.bincount(tokens, minlength=7) - expected) ** 2 / expected
    # 5 degrees of freedom: P(chi2 > 36) = 9e-7
    assert sum(found) < 36 and outside.isnan()  # 0 / 0
    assert (logprobs - log_p[tokens]).abs().max() < 1e-6  # |logits / T| < 5: a few fp32 roundings


def test_no_random_word_decides_alone(monkeypatch):
    """Every random word gives finite noise: infinite noise would draw a token whatever its
    logit.
    """
    words = torch.tensor([[0, 1, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFE00, 0xFFFFFF00, 0xFFFFFFFF]])
    monkeypatch.setattr(sampling, "philox", lambda *_: (words,) * 4)
    assert sampling.noise(32, 0, 0, *torch.zeros(2, 1).long()).isfinite().all()


def test_a_draw_is_its_own():
    """A row's noise depends on no other row and not on V, but on each part of the counter and on
    the key, whose second half is its upper 32 bits.
    """
    rows = dict(sequence=torch.tensor([3, 1 << 20, 0, 77]), index=torch.tensor([8, 0, 8, 5]))
    given = dict(seed=1 << 40, step=6) | rows
    noise = sampling.noise(11, **given)
    for b in range(4):
        alone = {name: value[b : b + 1] for name, value in rows.items()}
        assert torch.equal(sampling.noise(9, **given | alone)[0], noise[b, :9])
    others = [sampling.noise(11, **given | {name: given[name] + 1}) for name in given]
    others.append(sampling.noise(11, **given | {"seed": 1 << 41}))
    assert len(torch.stack([noise, *others]).unique()) == 6 * 4 * 11


@pytest.mark.parametrize("temperature, top_p", [(0.6, 0.01), (1.0, 0.3), (2.0, 0.95), (0.6, 0.999)])
def test_the_nucleus_is_that_of_transformers(temperature, top_p):
    """nucleus keeps the logits of the same tokens; in fp64, so that rounding decides about no
    token.
    """
    # not above: the process that interprets kernels imports this file too
    from transformers import TopPLogitsWarper

    logits = (torch.randn(50, 1000) * 3).double()
    theirs = TopPLogitsWarper(top_p)(None, logits / temperature) > -torch.inf
    expected = logits.masked_fill(~theirs, -torch.inf)
    assert torch.equal(sampling.nucleus(logits, temperature, top_p), expected)


def test_the_nucleus_by_hand(monkeypatch):
    """The token that reaches top_p is kept, less probable ones are not. At most NUCLEUS of the most
    probable are kept, and all that tie with the last. Temperature 0 counts as 1.
    """
    monkeypatch.setattr(sampling, "NUCLEUS", 3)
    tied, other = [0.125, 0.5, 0.25, 0.125], [0.1, 0.3, 0.2, 0.15, 0.25]
    for p, top_p, kept in (
        (tied, 1e-9, [1]),
        (tied, 0.5, [1]),
        (tied, 0.51, [1, 2]),
        (tied, 0.8, [0, 1, 2, 3]),
        (other, 0.7, [1, 2, 4]),
        (other, 0.9, [1, 2, 4]),
    ):
        cut = sampling.nucleus(torch.tensor([p]).log(), 0.0, top_p)
        assert cut.isfinite().nonzero()[:, 1].tolist() == kept, (p, top_p)


def test_a_row_of_nan_has_no_nucleus_and_disturbs_no_other():
    """A row of NaN (finished) stays NaN, no other row changes, and a drawn token is in the
    vocabulary.
    """
    logits = torch.randn(3, 500)
    alone, logits[1] = sampling.nucleus(logits, 0.6, 0.9), torch.nan
    cut = sampling.nucleus(logits, 0.6, 0.9)
    assert torch.equal(cut[::2], alone[::2]) and cut[1].isnan().all()
    token, _ = sampling.sample(cut, 0.6, 5, 3, torch.arange(3), torch.arange(3))
    assert ((0 <= token) & (token < 500)).all()


def test_append_ends_rows_at_stops_and_at_the_limit():
    """By hand, four rows: drew a stop token, finished before, below the limit, reaches the
    limit.
    """
    check_append(sampling.append, "cpu")


def check_append(append, device):
    from rollout import Rollout

    fields = (
        torch.zeros(6, 20).long(),
        torch.zeros(6, 20),
        torch.tensor([0, 3, 3, 4, 0, 2]),
        torch.zeros(6).bool(),
        torch.ones(6).long(),
    )
    rollout = Rollout(*(field.to(device) for field in fields))
    token = torch.tensor([77, 9, 8, 7], device=device)
    logprob = torch.tensor([-1.0, -2, -3, -4], device=device)
    slots = SimpleNamespace(
        rollout_row=torch.tensor([5, 0, 2, 3], device=device),
        position=torch.tensor([4, -1, 7, 8], device=device),
        last_token=torch.full((4,), 50, device=device),
    )
    stops = torch.tensor([77, 2], device=device)
    with torch.no_grad():
        append(token, logprob, slots, stops, 5, rollout)
    assert slots.position.tolist() == [-1, -1, 8, -1]
    assert slots.last_token.tolist() == [77, 50, 8, 7]
    assert rollout.lengths.tolist() == [0, 3, 4, 5, 0, 3]
    assert rollout.finished.tolist() == [False] * 5 + [True]
    for field, values in ((rollout.tokens, [8, 7, 77]), (rollout.logprobs, [-3, -4, -1])):
        assert field.nonzero().tolist() == [[2, 8], [3, 9], [5, 5]]
        assert field[field != 0].tolist() == values


# --- Triton kernels without a GPU


def same_draws(logits, temperature, seed, step, atol=1e-5):
    """The kernels draw what the plain lines draw."""
    given = logits, temperature, seed, step, torch.arange(2) + 9, torch.tensor([3, 2**20])
    token, logprob = sampling._sample(*given)
    plain_token, plain_logprob = sampling.sample(*given)
    assert torch.equal(token, plain_token) and plain_logprob.isfinite().all()
    torch.testing.assert_close(logprob, plain_logprob, atol=atol, rtol=0)


def interpreted():
    """Each kernel against its plain torch lines, on sizes that no tile divides."""
    logits = torch.randn(2, 5001) * 3  # three tiles; fp32 sums of 5001 exponentials
    for temperature, seed, step in ((0.7, 2**40 + 7, -1), (1.0, -5, 1), (0.0, 0, 0)):
        same_draws(logits, temperature, seed, step)
        # the padding of the last tile never wins; 200 · 2⁻²⁴ = 1e-5
        same_draws(logits - 200, temperature, 0, 0, 5e-5)
    same_draws(logits[:1].expand(2, -1), 0.7, 5, 1)  # all rows share memory
    # whole tiles of −inf: the one in the middle, all but the last, all but the first
    for low, high, temperature in ((2048, 4096, 0.0), (0, 4096, 0.7), (2048, 5001, 0.7)):
        cut = logits.clone()
        cut[:, low:high] = -torch.inf
        same_draws(cut, temperature, 3, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "uses_kernels", lambda x: True)
        check_append(sampling.append, "cpu")


def test_kernels_in_the_interpreter(interpret):
    interpret(interpreted)


@each_generation
def test_kernels_compile(cc, everything):
    compile_with_a_wait(
        cc,
        [
            (sampling._tile_kernel, dict(GREEDY=False, TILE=sampling.VOCAB_TILE), 4, 128),
            (sampling._merge_kernel, dict(TILES=64), 1, 64),
            (sampling._append_kernel, {}, 1, 64),
        ],
        {
            "*i1": "finished",
            "*fp32": "logits max_z sum_exp win_noisy win_z logprob logprobs",
            "fp32": "temperature",
            "*i64": "positions sequence index win_id token rows stops last tokens lengths",
        },
        ("V",),
    )


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 152064])
@torch.no_grad()
def test_gpu_samples_and_append(V):
    """The GPU's kernels draw the CPU's tokens bit for bit. A finished row may be NaN, which
    compares with nothing; its token must still be in the vocabulary.
    """
    logits, number = torch.randn(64, V) * 3, torch.arange(64)
    logits[63] = torch.nan
    for temperature in (0, 0.8):
        plain, plain_logprob = sampling.sample(logits, temperature, 5, 3, number, number * 7)
        on_gpu = number.cuda()
        token, logprob = sampling.sample(logits.cuda(), temperature, 5, 3, on_gpu, on_gpu * 7)
        assert torch.equal(token.cpu()[:63], plain[:63]) and 0 <= token[63] < V
        torch.testing.assert_close(logprob.cpu()[:63], plain_logprob[:63], atol=1e-4, rtol=0)
    check_append(sampling.append, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("B", [2, 64, 256])
def test_gpu_nucleus(B):
    """For few rows PyTorch's topk sorts. In fp64 the nucleus is a CPU's. In fp32, without
    deterministic algorithms, nucleus allocates at most the 20 bytes a logit that rollout.py plans
    for.
    """
    torch.use_deterministic_algorithms(False)
    logits = torch.randn(B, 152064, device="cuda") * 3
    if B < 100:
        ours = sampling.nucleus(logits.double(), 0.6, 0.95).cpu()
        assert torch.equal(ours, sampling.nucleus(logits.double().cpu(), 0.6, 0.95))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - 4 * logits.numel()
    sampling.nucleus(logits, 0.6, 0.95)
    assert torch.cuda.max_memory_allocated() - others <= 20 * logits.numel() + 2**25
