"""The sizes of an update: what the planner chooses, and the next try if memory runs out.

python -m pytest tests/test_budget.py
"""

import math
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from command import ROOT
from test_train import ANSWERS, assert_same, gradient, rollout, trainer

from rollout import Rollout
from tools import budget, memory, ranks
from tools.budget import Budget
from tools.diagnostics import sampler_gap
from tools.memory import PromptRows, micro_batches


def qwen(device):
    """Stands for a Decoder of the 7B."""
    device = torch.device(device)
    return SimpleNamespace(config=memory.config("7b"), layers=range(28), device=device)


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(gb, …) → a Budget on a GPU that has so many 1e9 bytes free, beside the 8 that PyTorch
    has reserved. More: as for Budget.
    """
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8e9)

    def start(gb, *flags):
        monkeypatch.setattr(budget, "free_memory", lambda: gb * 1e9)
        return Budget(qwen("cuda"), "nvfp4", 32, *flags)

    return start


def test_a_choice_is_within_the_cap_and_a_larger_cap_is_never_slower(on_gpu):
    """Random shapes, each at rising caps: groups of 1 to 16 answers, short or long. If nothing
    fits, the choice is the smallest.
    """
    draw = random.Random(0)
    for _ in range(400):
        lengths = range(draw.choice([30, 400, 4000, 30_000]))
        groups = [
            PromptRows(draw.randint(1, 2000), dict(enumerate(draw.choices(lengths, k=rows))))
            for rows in draw.choices(range(1, 17), k=draw.randint(1, 40))
        ]
        fastest = math.inf
        for gb in -8, *sorted(draw.uniform(0, 150) for _ in range(5)):
            planner = on_gpu(gb)
            size = planner.size(groups)
            tokens = [batch.tokens for batch in micro_batches(groups, size.micro_tokens)]
            assert size.tokens == max(tokens)
            if size.peak > planner.room():
                assert size[:2] == (memory.BUDGETS[-1], 27)
                continue
            again = memory.RECOMPUTED * size.recomputed / 28
            time = sum(tokens) * (1 + again) + memory.DECODED_TOKENS * len(tokens)
            assert time <= fastest * 1.001
            fastest = time


def test_what_does_not_fit_is_first_cut_smaller_and_then_recomputed(on_gpu):
    """Nothing is recomputed while thousands of tokens fit. In less memory some layers are, and in
    12 GB nearly all.
    """
    groups = [PromptRows(128, dict.fromkeys(range(8), 1023))] * 8
    most, many, few, least = (on_gpu(gb).size(groups) for gb in (138, 55, 13, 3.5))
    assert most.recomputed == many.recomputed == 0 < few.recomputed < 20 < least.recomputed
    assert most.tokens > many.tokens >= 4096


def test_one_long_answer_does_not_cut_the_others(on_gpu):
    """It alone sets the largest micro-batch, whatever the budget."""
    answers = dict.fromkeys(range(16), 300)
    groups = [PromptRows(256, answers)] * 7 + [PromptRows(256, answers | {0: 8192})]
    for gb in (35, 55):
        assert on_gpu(gb).size(groups).micro_tokens >= 8192


# --- out of memory


def test_a_long_row_that_does_not_fit_is_recomputed_at_once(capsys):
    """The short rows beside it are not halved in vain. A line tells of it, and the next update
    takes less memory. If that is not enough, it is an error.
    """
    groups = [PromptRows(10, {0: 900}), PromptRows(10, dict.fromkeys(range(1, 9), 50))]
    planner, tries = Budget(qwen("cpu"), "nvfp4", 32), []
    for attempt in planner.attempts(groups):
        with attempt as batches:
            tries.append((batches, planner.model.recomputed_layers))
            if len(tries) == 1:
                raise torch.OutOfMemoryError
    assert tries == [(batches, 0), (batches, 27)] and planner.share < 0.96
    assert capsys.readouterr().out.count("out of memory") == 1
    with pytest.raises(torch.OutOfMemoryError):
        for attempt in planner.attempts(groups):
            with attempt:
                raise torch.OutOfMemoryError


@pytest.mark.parametrize("fits, whole", [(5, 0), (1, 1)])
def test_an_update_that_runs_out_of_memory_begins_again(tiny_chat, fits, whole):
    """Memory is for `fits` rows with `whole` layers recomputed. The failed tries have written
    gradients, which must not stay: the result is that of an update that fits at once.
    """
    learner = trainer(tiny_chat, correction="tis")
    model, whole_gradient = learner.model, learner.run_micro_batches
    experience = learner.experience(rollout(model, sigma=0.5), ANSWERS)
    learner.backward(experience)
    expected = gradient(model)

    def checked(experience, batches, normalizer):
        result = whole_gradient(experience, batches, normalizer)
        if max(len(batch.rows) for batch in batches) > fits or model.recomputed_layers < whole:
            raise torch.OutOfMemoryError
        return result

    learner.run_micro_batches = checked
    learner.backward(experience)
    assert_same(gradient(model), expected)
    assert model.recomputed_layers == whole


def test_a_mismatch_that_runs_out_of_memory_is_measured_in_smaller_batches(
    tiny_chat, monkeypatch, capsys
):
    learner = trainer(tiny_chat)
    sampled = rollout(learner.model, sigma=0.5)
    want, real = sampler_gap(learner, sampled), Rollout.scored_by

    def scored_by(some, *arguments):
        if len(some.lengths) > 3:
            raise torch.OutOfMemoryError
        return real(some, *arguments)

    monkeypatch.setattr(Rollout, "scored_by", scored_by)
    # a log-probability near 10 is rounded by 1e-6 in fp32: the relative error of its exponential
    assert sampler_gap(learner, sampled) == pytest.approx(want, rel=1e-5)
    assert "out of memory" in capsys.readouterr().out


# --- what the flags and the GPU allow


def test_flags_override_the_choice(on_gpu):
    """On a GPU with room for everything."""
    groups = [PromptRows(100, dict.fromkeys(range(8), 900))] * 8
    for device, most in ("cpu", budget.CPU_TOKENS), ("cuda", memory.BUDGETS[0]):
        for flags, want in ((), (most, 0)), ((60,), (60, 0)), ((None, 28), (most, 28)):
            planner = on_gpu(500, *flags)
            planner.model = qwen(device)
            assert planner.size(groups)[:2] == want


def test_a_plan_takes_its_share_of_what_is_free_and_of_what_is_reserved(on_gpu):
    """The line about it has its numbers, and says if even the smallest update does not fit."""
    sampler = SimpleNamespace(slots=256, page_size=128, room=lambda *_: (750, 8192), kv="bf16")
    planner = on_gpu(71)
    line = planner.announcement(sampler, [128] * 4, answers=8, new=1024)
    for number in "96 k", "8,312 tokens", "0 of 28":
        assert number in line
    assert line.endswith("planned")
    assert not planner.announcement(sampler, [128], answers=8, new=10**6).endswith("planned")
    planner.share = 0.5
    assert planner.room() == pytest.approx(39.5e9)


@pytest.mark.parametrize(
    "prompts, answers, new, kv, told",
    [
        ([128] * 4, 8, 1024, "bf16", "96 k tokens;"),  # all fit
        # 2 · 128 / (128 + 4) times as many tokens, but no more than are needed
        ([128] * 32, 8, 1024, "bf16", "96 k tokens of 266 k (--kv int8: 186 k);"),
        ([128] * 16, 8, 1024, "bf16", "96 k tokens of 133 k (--kv int8: 133 k);"),
        ([128] * 32, 8, 1024, "int8", "96 k tokens;"),
        ([10_000] * 4, 16, 800, "bf16", "96 k tokens;"),  # 4 prompts, shared by 64 answers
    ],
)
def test_what_int8_would_hold_is_told_where_not_all_answers_fit(
    on_gpu, prompts, answers, new, kv, told
):
    sampler = SimpleNamespace(slots=256, page_size=128, room=lambda *_: (750, 8192), kv=kv)
    assert told in on_gpu(71).announcement(sampler, prompts, answers, new)


def test_a_cap_above_the_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20e9, 25e9))
    shares = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with pytest.raises(ValueError, match="--memory-gb 40.* 25.0"):
        budget.limit_memory(40)
    budget.limit_memory(10)
    assert shares == [0.4]


def test_the_users_own_allocator_setting_wins(monkeypatch):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    budget.grow_segments()
    assert os.environ[name] == "max_split_size_mb:64"
    monkeypatch.delenv(name)
    budget.grow_segments()
    assert os.environ[name] == "expandable_segments:True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_cpu_returns_the_memory_of_freed_tensors():
    """200 MB of them, between which others stay."""
    code = (
        "import torch; from tools import budget; budget.return_freed_memory(); "
        "pages = lambda: int(open('/proc/self/statm').read().split()[1]); "
        "torch.ones(2**21); start = pages(); "  # from its end on glibc may keep 8 MB and less
        "some = [torch.ones(size) for _ in range(100) for size in (2**19, 9)]; "
        "del some[::2]; print((pages() - start) * 4096)"
    )
    assert int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) < 20e6


@pytest.mark.gpu
def test_gpu_the_allocator_grows_its_segments(monkeypatch):
    """In a process of its own: the setting is read once, at the first tensor on the GPU."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)  # a train.py before has set it
    code = (
        "import torch; from tools import budget; budget.grow_segments(); "
        "torch.ones(1, device='cuda'); "
        "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT).strip() == b"True"


def test_the_gpu_is_started_in_a_thread_that_raises_nothing(monkeypatch):
    """The main thread's first allocation meets the same error, and makes it a sentence."""
    first = Mock(side_effect=RuntimeError("no driver"))
    monkeypatch.setattr(torch, "zeros", first)
    monkeypatch.setattr(ranks, "Thread", lambda target, args: Mock(start=lambda: target(*args)))
    assert [ranks.join_ranks(device) for device in ("cuda", "cpu")] == ["cuda", "cpu"]
    first.assert_called_once_with(1, device="cuda")
