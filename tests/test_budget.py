"""The sizes of an update: what the planner chooses, and the second try if memory runs out.

python -m pytest tests/test_budget.py
"""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_train import ADVANTAGES, actor, config, rollout

import train
from rollout import PromptRows, micro_batches
from tools import budget, memory

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def planned_share(monkeypatch):
    """A test that runs out of memory lowers it for those that follow."""
    monkeypatch.setattr(budget, "share", 0.96)


@pytest.fixture(scope="module")
def noisy(tiny_chat):
    return rollout(actor(tiny_chat), sigma=0.5)


def random_groups(draw):
    """Groups of 1 to 16 answers, short or long."""
    longest = draw.choice([30, 400, 4000, 30_000])
    return [
        PromptRows(
            draw.randint(1, 2000),
            {row: draw.randint(0, longest) for row in range(draw.randint(1, 16))},
        )
        for _ in range(draw.randint(1, 40))
    ]


@pytest.mark.parametrize("seed", range(10))
def test_a_choice_is_within_the_cap_and_a_larger_cap_is_never_slower(seed):
    """A hundred random shapes, each at rising caps. If nothing fits, the choice is the smallest."""
    draw = random.Random(seed)
    for _ in range(100):
        c = memory.config(draw.choice([*memory.MODELS]))
        quant, rank = draw.choice(["nvfp4", "rtn", "bf16"]), draw.choice([1, 16, 32, 256])
        groups, layers = random_groups(draw), range(c.num_hidden_layers)
        smallest = memory.choose(c, quant, rank, 0, groups, memory.BUDGETS, layers)
        assert smallest.recomputed == len(layers) - 1 and smallest.micro_tokens == 256
        time = None
        for room in sorted(draw.uniform(0, 160e9) for _ in range(5)):
            size = memory.choose(c, quant, rank, room, groups, memory.BUDGETS, layers)
            assert size.peak <= room or size == smallest._replace(peak=size.peak)
            assert 0 <= size.recomputed < len(layers) and size.micro_tokens in memory.BUDGETS
            batches = micro_batches(groups, size.micro_tokens)
            assert size.tokens == max(batch.tokens for batch in batches)
            if size.peak <= room:
                again = 0.32 * size.recomputed / c.num_hidden_layers
                seconds = sum(b.tokens for b in batches) * (1 + again) + 430 * len(batches)
                assert time is None or seconds <= time * 1.001
                time = seconds


def test_what_does_not_fit_is_first_cut_smaller_and_then_recomputed():
    """The 7B: nothing is recomputed while thousands of tokens fit. In less memory some layers are,
    and in 12 GB nearly all."""
    c, groups = memory.config("7b"), [PromptRows(128, dict.fromkeys(range(8), 1023))] * 8
    layers = range(28)
    sizes = [
        memory.choose(c, "nvfp4", 32, gb * 1e9, groups, memory.BUDGETS, layers)
        for gb in (140, 60, 30, 20, 11)
    ]
    assert sizes[0].recomputed == sizes[1].recomputed == 0
    assert sizes[0].tokens > sizes[1].tokens >= 4096
    assert 0 < sizes[3].recomputed < 20 < sizes[4].recomputed


def test_one_long_answer_does_not_cut_the_others():
    """It alone sets the largest micro-batch, whatever the budget."""
    c, answers = memory.config("7b"), dict.fromkeys(range(16), 300)
    groups = [PromptRows(256, answers | ({0: 8192} if p == 0 else {})) for p in range(8)]
    for gb in (41, 42, 60):
        size = memory.choose(c, "nvfp4", 32, gb * 1e9, groups, memory.BUDGETS, range(28))
        assert size.micro_tokens >= 8192


def test_a_long_row_that_does_not_fit_is_recomputed_at_once():
    """The short rows beside it are not halved in vain, and the next update takes less memory."""
    model = SimpleNamespace(config=memory.config("7b"), layers=[None] * 28)
    model.device = SimpleNamespace(type="cpu")
    groups = [PromptRows(10, {0: 900}), PromptRows(10, dict.fromkeys(range(1, 9), 50))]
    rollout = SimpleNamespace(groups=lambda rows: groups)
    calls = []

    def compute(batches):
        calls.append((batches, model.recomputed_layers))
        if not model.recomputed_layers:
            raise torch.OutOfMemoryError("CUDA out of memory")

    budget.within_memory(config(), model, rollout, range(9), compute)
    assert [layers for _, layers in calls] == [0, 27] and calls[0][0] == calls[1][0]
    assert budget.share < 0.96


def limited(monkeypatch, fits, whole):
    """train.gradient with memory for `fits` rows with `whole` layers recomputed → what it was
    called with: (rows of the largest micro-batch, recomputed layers)."""
    gradient, calls = train.gradient, []

    def checked(config, model, rollout, micro_batches, *rest):
        calls.append((max(len(micro.rows) for micro in micro_batches), model.recomputed_layers))
        result = gradient(config, model, rollout, micro_batches, *rest)
        if calls[-1][0] > fits or calls[-1][1] < whole:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(train, "gradient", checked)
    return calls


@pytest.mark.parametrize("fits, whole", [(16, 0), (5, 0), (1, 0), (1, 1)])
def test_an_update_that_runs_out_of_memory_begins_again(
    tiny_chat, noisy, monkeypatch, capsys, fits, whole
):
    """The failed tries have written gradients, which must not stay. The result is that of an update
    that fits at once, and each try is told in a line."""
    model, flags = actor(tiny_chat), config(correction="tis")
    want, _ = train.backward(flags, model, noisy, ADVANTAGES)
    expected = [p.grad.clone() for p in model.parameters()]
    calls = limited(monkeypatch, fits, whole)
    got, _ = train.backward(flags, model, noisy, ADVANTAGES)
    assert got.pop("flat_tokens") >= want.pop("flat_tokens")  # a cut group reads its prompt again
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    for p, before in zip(model.parameters(), expected, strict=True):
        assert (p.grad - before).norm() <= 1e-4 * before.norm()
    assert calls[-1][0] <= fits and calls[-1][1] == whole
    said = capsys.readouterr().out + capsys.readouterr().err
    assert said.count("out of memory in the update: beginning it again with") == len(calls) - 1
    assert len(calls) > 1 or fits == 16


def test_a_row_that_does_not_fit_alone_is_an_error(tiny_chat, noisy, monkeypatch):
    limited(monkeypatch, 0, 0)
    with pytest.raises(torch.OutOfMemoryError):
        train.backward(config(), actor(tiny_chat), noisy, ADVANTAGES)


@pytest.mark.parametrize(
    "flags, cuda, want",
    [
        ({}, False, (1024, 0)),
        ({"micro_tokens": 60}, False, (60, 0)),
        ({"gradient_checkpointing": True}, False, (1024, 28)),
        ({}, True, (32_768, 0)),
        ({"micro_tokens": 4096}, True, (4096, 0)),
        ({"gradient_checkpointing": True}, True, (32_768, 28)),
        ({"gradient_checkpointing": True, "micro_tokens": 100}, True, (100, 28)),
    ],
)
def test_flags_override_the_choice(monkeypatch, flags, cuda, want):
    """On a GPU with room for everything."""
    monkeypatch.setattr(budget, "free_memory", lambda: 500e9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    device = SimpleNamespace(type="cuda" if cuda else "cpu")
    model = SimpleNamespace(config=memory.config("7b"), device=device)
    groups = [PromptRows(100, dict.fromkeys(range(8), 900))] * 8
    size = budget.size_of_update(config(**flags), model, groups)
    assert (size.micro_tokens, size.recomputed) == want


def test_a_line_says_what_was_chosen(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda: 71e9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8e9)
    model = SimpleNamespace(config=memory.config("7b"), device=SimpleNamespace(type="cuda"))
    model.layers = [None] * 28
    sampler = SimpleNamespace(slots=256, page_size=128, room=lambda *_: (750, 8192))
    flags = config(prompts=8, group_size=8, max_new_tokens=1024)
    line = budget.announcement(flags, model, sampler, 128, ranks=2)
    assert line.startswith("memory: 79 GB, 71 free: pages for 96 k tokens; updates of 8,312 tokens")
    assert "0 of 28 layers recomputed" in line and line.endswith("GB planned")


def test_a_plan_takes_its_share_of_what_is_free_and_of_what_is_reserved(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda: 71e9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8e9)
    model = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    for share in (0.96, 0.5):
        monkeypatch.setattr(budget, "share", share)
        assert budget.room(model) == pytest.approx(share * 79e9)


def test_a_cap_above_the_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20e9, 25e9))
    set_to = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_to.append)
    with pytest.raises(ValueError, match="--memory-gb 40: the GPU has 25.0; give less"):
        budget.limit_memory(40)
    budget.limit_memory(10)
    assert set_to == [0.4]


def test_the_users_own_allocator_setting_wins(monkeypatch):
    name = "PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.setenv(name, "")  # so that monkeypatch restores what was there, or nothing
    monkeypatch.delenv(name)
    budget.grow_segments()
    assert os.environ[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    budget.grow_segments()
    assert os.environ[name] == "max_split_size_mb:64"


@pytest.mark.gpu
def test_gpu_the_allocator_grows_its_segments(monkeypatch):
    """In a process of its own: the setting is read once, at the first tensor on the GPU."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)  # a train.py before has set it
    code = (
        "import torch; from tools import budget; budget.grow_segments(); "
        "torch.ones(1, device='cuda'); "
        "print(torch.cuda.memory._snapshot()['allocator_settings']['expandable_segments'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "True", done.stderr
