"""How large the update's micro-batches are, and how many layers it computes twice.

On a GPU tools/memory.py chooses, by formula, from the memory that the GPU has free. A CPU takes
1,024 tokens and recomputes nothing. On both, --micro-tokens and --gradient-checkpointing override
the choice.

If an update runs out of memory all the same, within_memory starts the whole backward again, so that
no gradient is half summed. It halves the micro-batch. If the micro-batch is a single row already,
it recomputes every layer but the last: tools/memory.choose says why.

Needs: torch, tqdm; rollout.py, tools/memory.py.
"""

import math
import os

import torch
from tqdm import tqdm

from rollout import PromptRows, free_memory, micro_batches
from tools import memory

CPU_TOKENS = 1024  # of a micro-batch on a CPU
# What part of the memory a plan may take. The rest is for the allocator's gaps and the plan's
# errors. If an update runs out of memory, later ones of this process plan with less.
share = 0.96


def grow_segments():
    """Let PyTorch's allocator enlarge the segments that it has, where it would take new ones: then
    long answers leave no gaps. Call it before anything lies on the GPU. The user's setting wins.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def limit_memory(gb):
    """Let PyTorch take at most gb · 1e9 bytes of the GPU. ValueError: the GPU has less."""
    _, total = torch.cuda.mem_get_info()
    if gb * 1e9 > total:
        raise ValueError(f"--memory-gb {gb:g}: the GPU has {total / 1e9:.1f}; give less")
    torch.cuda.set_per_process_memory_fraction(gb * 1e9 / total)


def size_of_update(config, model, groups):
    """→ the memory.Size for an update of `groups`, a list of PromptRows: the fastest that the flags
    allow and whose peak is within room(model). If none is, the smallest, whose peak exceeds it.
    """
    c = model.config
    budgets, recomputed = memory.BUDGETS, range(c.num_hidden_layers)
    if model.device.type == "cpu":
        budgets, recomputed = [CPU_TOKENS], [0]
    if config.micro_tokens is not None:
        budgets = [config.micro_tokens]
    if config.gradient_checkpointing is not None:
        recomputed = [config.gradient_checkpointing * c.num_hidden_layers]
    return memory.choose(c, config.quant, config.rank, room(model), groups, budgets, recomputed)


def room(model):
    """→ bytes that an update may take, the model's included."""
    if model.device.type == "cpu":
        return math.inf
    return share * (free_memory() + torch.cuda.memory_reserved())


def within_memory(config, model, rollout, rows, compute):
    """→ what compute(micro_batches) returns. micro_batches: a list of rollout.MicroBatch.

    rows: (n,) int64, row numbers of the Rollout; n may be 0. If memory runs out, compute is called
    again: with smaller micro-batches, or, if the largest is a single row, with every layer
    recomputed but the last. model.recomputed_layers is set. torch.OutOfMemoryError: a row does not
    fit alone, although every layer but the last is recomputed.
    """
    global share
    if len(rows) == 0:
        return compute([])
    groups = rollout.groups(rows)
    size = size_of_update(config, model, groups)
    micro_tokens = size.micro_tokens
    model.recomputed_layers = size.recomputed
    most = len(model.layers) - 1
    while True:
        batches = micro_batches(groups, micro_tokens)
        try:
            return compute(batches)
        except torch.OutOfMemoryError:
            largest = max(batches, key=lambda batch: batch.tokens)
            if len(largest.rows) > 1:
                micro_tokens = largest.tokens // 2
                what = f"micro-batches of {micro_tokens:,} tokens"
            elif model.recomputed_layers < most:
                model.recomputed_layers = most
                what = "every layer recomputed but the last"
            else:
                raise
            share *= 0.95
            tqdm.write(f"out of memory in the update: beginning it again with {what}")
        # The error is gone, and with it the tensors that its frames held.
        torch.cuda.empty_cache()


def announcement(config, model, sampler, prompt_length, ranks):
    """→ a line about what a step with the longest prompt and answers takes of the GPU."""
    new, answers = config.max_new_tokens, config.group_size
    prompts = config.prompts // ranks
    slots = min(sampler.slots, prompts * answers)
    pages, _ = sampler.room([prompt_length] * prompts, slots, prompt_length + new)
    groups = [PromptRows(prompt_length, dict.fromkeys(range(answers), new - 1))] * prompts
    size = size_of_update(config, model, groups)
    free = free_memory()
    total = free + torch.cuda.memory_reserved()
    verdict = "planned" if size.peak <= room(model) else "needed, and so much is not free"
    return (
        f"memory: {total / 1e9:.0f} GB, {free / 1e9:.0f} free: pages for "
        f"{pages * sampler.page_size / 1000:.0f} k tokens; updates of {size.tokens:,} tokens, "
        f"{size.recomputed} of {len(model.layers)} layers recomputed, "
        f"{size.peak / 1e9:.0f} GB {verdict}"
    )
