"""Philox against its authors' vectors, samples against the softmax, kernels against plain torch."""
import pytest
import torch
import triton
import triton.language as tl
from conftest import compile_with_a_wait, on_all_cores, run_alone

import gumbel


def words(*values):
    return [torch.tensor(v) for v in values]


@pytest.mark.parametrize("counter, key, expected", [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_philox_gives_its_authors_vectors(counter, key, expected):
    """The known-answer vectors of Random123, its authors' library, for philox4x32 with 10 rounds."""
    result = gumbel.philox(key[0] | key[1] << 32, *words(*counter))
    assert tuple(int(w) for w in result) == expected


@triton.jit
def philox_kernel(out, seed, counter):
    i = tl.arange(0, 16)
    other = i * 0 + tl.load(counter), i * 0 + tl.load(counter + 1), i * 0 + tl.load(counter + 2)
    c0, c1, c2, c3 = tl.philox(seed, i, other[0], other[1], other[2])
    tl.store(out + i, c0)
    tl.store(out + 16 + i, c1)
    tl.store(out + 32 + i, c2)
    tl.store(out + 48 + i, c3)


def check_philox():
    for seed, counter in [(0, (0, 0, 0)), (7, (1, 2, 3)), (0x299F31D0A4093822, (0x85A308D3, 0xFFFFFFFF, 9))]:
        out = torch.zeros(4, 16, dtype=torch.int64)
        philox_kernel[(1,)](out, seed, torch.tensor(counter).to(torch.uint32))
        ours = gumbel.philox(seed, torch.arange(16), *words(*counter))
        assert torch.equal(torch.stack(ours), out & 0xFFFFFFFF), (seed, counter)


@pytest.mark.parametrize("axis, temperature", [("sequence", 0.7), ("sequence", 1.0), ("sequence", 2.0),
                                               ("position", 0.7), ("step", 1.0), ("seed", 2.0)])
def test_samples_follow_the_softmax(axis, temperature):
    """Chi-square over 7 tokens, rare ones too, while only one part of the counter or the key varies."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, -3.0, 1.5, -2.0]])
    n = 100_000 if axis in ("sequence", "position") else 3_000
    if axis in ("sequence", "position"):
        where = dict(position=torch.full((n,), 2), sequence=torch.full((n,), 9)) | {axis: torch.arange(n)}
        tokens, logprobs = gumbel.sample(logits.expand(n, 7), temperature, seed=5, step=1, **where)
    else:
        where = dict(seed=5, step=1, position=torch.tensor([2]), sequence=torch.tensor([9]))
        draws = [gumbel.sample(logits, temperature, **(where | {axis: i})) for i in range(n)]
        tokens, logprobs = (torch.cat(x) for x in zip(*draws, strict=True))
    log_p = (logits[0].double() / temperature).log_softmax(0)
    expected = n * log_p.exp()
    chi2 = ((torch.bincount(tokens, minlength=7) - expected) ** 2 / expected).sum()
    # 6 degrees of freedom: P(chi2 > 40) = e⁻²⁰ (1 + 20 + 200) = 5e-7
    assert chi2 < 40
    assert (logprobs - log_p[tokens]).abs().max() < 1e-6          # |logits / T| < 5: a few fp32 roundings


def test_no_random_word_decides_alone(monkeypatch):
    """Every random word gives finite noise: infinite noise would draw a token whatever its logit."""
    for word in (0, 1, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFE00, 0xFFFFFF00, 0xFFFFFFFF):
        monkeypatch.setattr(gumbel, "philox", lambda *_, word=word: (torch.full((1, 2), word),) * 4)
        assert gumbel.noise(7, 0, 0, *torch.zeros(2, 1).long()).isfinite().all(), hex(word)


def test_a_draw_is_its_own():
    """A row's noise depends on no other row and not on V, but on each part of the counter and on the key."""
    sequence, position = torch.tensor([3, 1 << 20, 0, 77]), torch.tensor([8, 0, 8, 5])
    noise = gumbel.noise(11, 1 << 40, 6, sequence, position)
    for b in range(4):
        alone = gumbel.noise(11, 1 << 40, 6, sequence[b:b + 1], position[b:b + 1])
        assert torch.equal(alone[0], noise[b])
    assert torch.equal(gumbel.noise(9, 1 << 40, 6, sequence, position), noise[:, :9])
    others = [gumbel.noise(11, *what) for what in (
        (1 << 41, 6, sequence, position), (1 << 40, 7, sequence, position),
        (1 << 40, 6, sequence + 1, position), (1 << 40, 6, sequence, position + 1))]
    assert len({x.item() for x in torch.cat([noise, *others]).flatten()}) == 5 * 4 * 11


def test_temperature_0_takes_the_largest_logit():
    """sample also returns that token's log-probability at temperature 1."""
    logits = torch.randn(5, 97) * 4
    token, logprob = gumbel.sample(logits, 0.0, 0, 0, torch.arange(5), torch.arange(5))
    assert torch.equal(token, logits.argmax(1))
    torch.testing.assert_close(logprob, logits.log_softmax(1).amax(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.95, 0.999])
def test_the_nucleus_is_that_of_transformers(temperature, top_p):
    """nucleus keeps the logits of the same tokens; in fp64, so that rounding decides about no token."""
    from transformers import TopPLogitsWarper
    logits = (torch.randn(50, 1000) * 3).double()
    cut = gumbel.nucleus(logits, temperature, top_p)
    theirs = TopPLogitsWarper(top_p)(None, logits / temperature) > -torch.inf
    assert torch.equal(cut, logits.masked_fill(~theirs, -torch.inf))
    assert 50 <= theirs.sum() < 50_000


def test_the_nucleus_by_hand():
    """Probabilities .5, .25, .125, .125: the token that reaches top_p is kept, less probable ones are not."""
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125]).log()[None]
    for top_p, kept in ((1e-9, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.99, [0, 1, 2, 3])):
        assert gumbel.nucleus(logits, 1.0, top_p).isfinite().nonzero()[:, 1].tolist() == kept
    assert gumbel.nucleus(logits, 0.0, 0.75).isfinite().sum() == 2            # 0 counts as temperature 1
    assert gumbel.nucleus(logits, 1.0, 0.8).isfinite().all()                  # the last two tie


def test_a_nucleus_has_a_largest_size(monkeypatch):
    """Of the most probable tokens; their probabilities are those among all tokens."""
    monkeypatch.setattr(gumbel, "NUCLEUS", 3)
    logits = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25]).log()[None]
    for top_p, kept in ((0.3, [1]), (0.5, [1, 4]), (0.7, [1, 2, 4]), (0.9, [1, 2, 4])):
        assert gumbel.nucleus(logits, 1.0, top_p).isfinite().nonzero()[:, 1].tolist() == kept


def test_a_row_of_nan_has_no_nucleus_and_disturbs_no_other():
    """A row of NaN (finished) stays NaN, no other row changes, and a drawn token is in the vocabulary."""
    logits = torch.randn(3, 500)
    alone, logits[1] = gumbel.nucleus(logits, 0.6, 0.9), torch.nan
    cut = gumbel.nucleus(logits, 0.6, 0.9)
    assert torch.equal(cut[::2], alone[::2]) and cut[1].isnan().all()
    token, _ = gumbel.sample(cut, 0.6, 5, 3, torch.arange(3), torch.arange(3))
    assert ((0 <= token) & (token < 500)).all()


def test_samples_of_the_nucleus_follow_its_renormalised_softmax():
    """Chi-square over the 4 of 7 tokens that reach .95 at temperature .8; the other 3 are never drawn."""
    logits, n = torch.tensor([[2.0, -1.0, 0.5, 0.0, -3.0, 1.5, -2.0]]), 100_000
    cut = gumbel.nucleus(logits, 0.8, 0.95)
    kept = cut[0].isfinite()
    assert kept.nonzero()[:, 0].tolist() == [0, 2, 3, 5]
    tokens, logprobs = gumbel.sample(cut.expand(n, 7), 0.8, 5, 1, torch.arange(n), torch.full((n,), 2))
    assert kept[tokens].all()
    log_p = (logits[0].double() / 0.8).masked_fill(~kept, -torch.inf).log_softmax(0)
    expected = n * log_p.exp()[kept]
    chi2 = ((torch.bincount(tokens, minlength=7)[kept] - expected) ** 2 / expected).sum()
    # 3 degrees of freedom: P(chi2 > 33) = 3e-7
    assert chi2 < 33
    assert (logprobs - log_p[tokens]).abs().max() < 1e-6


def test_append_ends_rows_at_stops_and_at_the_limit():
    """By hand, four rows: drew a stop token, finished before, below the limit, reaches the limit."""
    check_append(gumbel.append, "cpu")


def check_append(append, device):
    from rollout import Rollout
    fields = torch.zeros(6, 20).long(), torch.zeros(6, 20), torch.tensor([0, 3, 3, 4, 0, 2]), \
        torch.zeros(6).bool(), torch.ones(6).long()
    rollout = Rollout(*(field.to(device) for field in fields))
    token, rows = torch.tensor([77, 9, 8, 7], device=device), torch.tensor([5, 0, 2, 3], device=device)
    positions, last = torch.tensor([4, -1, 7, 8], device=device), torch.full((4,), 50, device=device)
    logprob = torch.tensor([-1.0, -2, -3, -4], device=device)
    with torch.no_grad():
        append(token, logprob, rows, positions, torch.tensor([77, 2], device=device), 5, last, rollout)
    assert positions.tolist() == [-1, -1, 8, -1] and last.tolist() == [77, 50, 8, 7]
    assert rollout.lengths.tolist() == [0, 3, 4, 5, 0, 3]
    assert rollout.finished.tolist() == [False] * 5 + [True]
    for field, values in ((rollout.tokens, [8, 7, 77]), (rollout.logprobs, [-3, -4, -1])):
        assert field.nonzero().tolist() == [[2, 8], [3, 9], [5, 5]] and field[field != 0].tolist() == values


# --- Triton kernels without a GPU

def interpreted():
    """Each kernel against its plain torch lines, on sizes that no tile divides, and tl.philox."""
    check_philox()
    torch.manual_seed(0)
    logits, sequence, position = torch.randn(4, 9001) * 3, torch.arange(4) + 9, torch.tensor([3, 0, 7, 2**20])
    for temperature in (0.7, 1.0, 0.0):
        for seed, step in ((0, 0), (2**40 + 7, -1), (-5, 1)):
            ours = gumbel._sample(logits, temperature, seed, step, sequence, position)
            plain = gumbel.sample(logits, temperature, seed, step, sequence, position)
            assert torch.equal(ours[0], plain[0])
            # fp32 sums of 9001 exponentials
            torch.testing.assert_close(ours[1], plain[1], atol=1e-5, rtol=0)
        far = [draw(logits - 200, temperature, 0, 0, sequence, position)
               for draw in (gumbel._sample, gumbel.sample)]
        assert torch.equal(far[0][0], far[1][0])                     # the padding of the last tile never wins
        torch.testing.assert_close(far[0][1], far[1][1], atol=5e-5, rtol=0)              # 200 · 2⁻²⁴ = 1e-5
    one = logits[:1].expand(4, -1)                                   # all rows share memory
    ours, plain = (draw(one, 0.7, 5, 1, sequence, position) for draw in (gumbel._sample, gumbel.sample))
    assert torch.equal(ours[0], plain[0])
    # whole tiles of −inf: one in the middle, all but the last, all but the first two
    for low, high in ((4096, 8192), (0, 8192), (4096, 9001)):
        cut = logits.clone()
        cut[:, low:high] = -torch.inf
        for temperature in (0.7, 0.0):
            ours = gumbel._sample(cut, temperature, 3, 1, sequence, position)
            plain = gumbel.sample(cut, temperature, 3, 1, sequence, position)
            assert torch.equal(ours[0], plain[0]) and plain[1].isfinite().all()
            torch.testing.assert_close(ours[1], plain[1], atol=1e-5, rtol=0)
    gumbel._fused = lambda x: True
    check_append(gumbel.append, "cpu")


def test_kernels_in_the_interpreter():
    run_alone(interpreted, interpret=True)


def compiled_for(cc):
    compile_with_a_wait(
        cc, [(gumbel._tile_kernel, dict(GREEDY=False, TILE=gumbel.VOCAB_TILE), 4, 128, 1),
             (gumbel._merge_kernel, dict(TILES=64), 1, 64, 1), (gumbel._append_kernel, {}, 1, 64, 1)],
        {"*i1": "finished", "*fp32": "logits found logprob logprobs", "fp32": "temperature",
         "*i64": "positions sequence position winner token rows stops last tokens lengths"}, ("V",))


def compiled():
    on_all_cores(compiled_for)


def test_kernels_compile_for_four_generations():
    run_alone(compiled, interpret=False)


# --- on a GPU

@pytest.mark.gpu
def test_gpu_samples_and_append():
    """The GPU's kernels draw the CPU's tokens bit for bit."""
    logits, number = torch.randn(64, 152064, device="cuda") * 3, torch.arange(64, device="cuda")
    with torch.no_grad():
        token, logprob = gumbel.sample(logits, 0.8, 5, 3, number, number * 7)
    on_cpu = gumbel.sample(logits.cpu(), 0.8, 5, 3, number.cpu(), number.cpu() * 7)
    assert torch.equal(token.cpu(), on_cpu[0])
    torch.testing.assert_close(logprob.cpu(), on_cpu[1], atol=1e-4, rtol=0)
    check_append(gumbel.append, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 2, 64, 256])
def test_gpu_nucleus(B):
    """For few rows PyTorch's topk sorts. In fp64 the nucleus is a CPU's. In fp32, without deterministic
    algorithms, nucleus allocates at most the 20 bytes a logit that rollout.py plans for."""
    torch.use_deterministic_algorithms(False)
    logits = torch.randn(B, 152064, device="cuda") * 3
    if B < 100:
        ours = gumbel.nucleus(logits.double(), 0.6, 0.95).cpu()
        assert torch.equal(ours, gumbel.nucleus(logits.double().cpu(), 0.6, 0.95))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - 4 * logits.numel()
    cut = gumbel.nucleus(logits, 0.6, 0.95)
    assert torch.cuda.max_memory_allocated() - others <= 20 * logits.numel() + 2**25
    with torch.no_grad():
        token, logprob = gumbel.sample(cut, 0.6, 5, 3, *torch.arange(2 * B, device="cuda").view(2, B))
    scaled = cut.double() / 0.6
    theirs = scaled.log_softmax(1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), theirs, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [1000, 49152, 152064])
def test_gpu_a_row_that_is_not_a_number_draws_a_token_all_the_same(V):
    """A finished row may be NaN, which compares with nothing; its token must still be in the vocabulary."""
    logits, number = torch.randn(3, V, device="cuda"), torch.arange(3, device="cuda")
    logits[1:] = float("nan")
    for temperature in (0, 1.0):
        token, _ = gumbel.sample(logits, temperature, 5, 3, number, number)
        assert ((0 <= token) & (token < V)).all()


@pytest.mark.gpu
def test_gpu_a_million_tokens_follow_the_softmax():
    """Chi-square over a vocabulary of 1000 whose rarest tokens are expected at least 5 times."""
    logits = (torch.randn(1000, device="cuda") * 1.5).clamp(-4, 4)
    counts = torch.zeros(1000, dtype=torch.long, device="cuda")
    with torch.no_grad():
        for step in range(20):
            number = torch.arange(50_000, device="cuda")
            rows = logits.expand(50_000, -1).contiguous()
            token, _ = gumbel.sample(rows, 1.0, 5, step, number, number % 300)
            counts += torch.bincount(token, minlength=1000)
    expected = counts.sum() * logits.double().softmax(0)
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # 999 degrees of freedom: mean 999, plus five standard deviations of √1998 = 44.7
    assert counts.sum() == 1_000_000 and expected.min() > 5 and chi2 < 999 + 5 * 44.7
