"""How large the update's micro-batches are, and how many layers it computes twice.

    budget = Budget(model, "nvfp4", rank=32)
    for attempt in budget.attempts(groups):         # one, unless memory runs out
        with attempt as micro_batches:
            …                                       # forward and backward of each micro-batch

On a GPU tools/memory.py chooses, by formula, from the memory that the GPU has free. A CPU takes
1,024 tokens and recomputes nothing. On both, --micro-tokens overrides the choice.

If an update runs out of memory all the same, attempts() starts the whole backward again, so that no
gradient is half summed. It halves the micro-batch. If the micro-batch is a single row already, it
recomputes every layer but the last: tools/memory.choose says why.

Needs: torch, tqdm; model.py, rollout.py, tools/memory.py.
"""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import suppress

import torch
from tqdm import tqdm

from model import Decoder
from rollout import Sampler, cached_bytes, free_memory
from tools import memory
from tools.memory import MicroBatch, PromptRows, micro_batches

M_MMAP_THRESHOLD = -3  # of malloc.h: larger pieces are mapped one by one
CPU_TOKENS = 1024  # of a micro-batch on a CPU


def grow_segments() -> None:
    """Let PyTorch's allocator enlarge the segments that it has, where it would take new ones: then
    long answers leave no gaps. Call it before anything lies on the GPU. The user's setting wins.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def return_freed_memory() -> None:
    """On a CPU, let glibc return the memory of freed tensors at once. Else it learns from the first
    ones to keep up to 32 MB of each, and the next micro-batch leaves gaps in what it kept. It makes
    a step slower, so training does without.
    """
    with suppress(AttributeError):  # of another libc
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def limit_memory(gb: float) -> None:
    """Let PyTorch take at most gb · 1e9 bytes of the GPU. ValueError: the GPU has less."""
    _, total = torch.cuda.mem_get_info()
    if gb * 1e9 > total:
        raise ValueError(f"--memory-gb {gb:g}: the GPU has {total / 1e9:.1f}; give less")
    torch.cuda.set_per_process_memory_fraction(gb * 1e9 / total)


class Attempt:
    """A context manager around one try of an update; yields its micro-batches. It suppresses
    torch.OutOfMemoryError if a finer cut is left to try.
    """

    def __init__(self, micro_batches: list[MicroBatch], is_last: bool):
        self.micro_batches = micro_batches
        self.is_last = is_last
        self.out_of_memory = False

    def __enter__(self) -> list[MicroBatch]:
        return self.micro_batches

    def __exit__(self, kind, error, traceback) -> bool:
        self.out_of_memory = kind is not None and issubclass(kind, torch.OutOfMemoryError)
        return self.out_of_memory and not self.is_last


class Budget:
    """The memory that the updates of a model may take.

    micro_tokens: of --micro-tokens. recomputed: how many layers to compute twice. None of both: as
    memory allows. share: what part of the memory a plan may take. The rest is for the allocator's
    gaps and the plan's errors. If an update runs out of memory, later ones plan with less.
    """

    def __init__(
        self,
        model: Decoder,
        quant: str,
        rank: int,
        micro_tokens: int | None = None,
        recomputed: int | None = None,
    ):
        self.model = model
        self.quant = quant
        self.rank = rank
        self.micro_tokens = micro_tokens
        self.recomputed = recomputed
        self.share = 0.96

    def size(self, groups: list[PromptRows]) -> memory.Size:
        """→ the fastest size of an update of these groups whose peak is within room(). If none is,
        the smallest, whose peak exceeds it.
        """
        c = self.model.config
        budgets, recomputed = memory.BUDGETS, range(c.num_hidden_layers)
        if self.model.device.type == "cpu":
            budgets, recomputed = [CPU_TOKENS], [0]
        if self.micro_tokens is not None:
            budgets = [self.micro_tokens]
        if self.recomputed is not None:
            recomputed = [self.recomputed]
        room = self.room()
        return memory.choose(c, self.quant, self.rank, room, groups, budgets, recomputed)

    def room(self) -> float:
        """→ bytes that an update may take, the model's included."""
        if self.model.device.type == "cpu":
            return math.inf
        return self.share * (free_memory() + torch.cuda.memory_reserved())

    def attempts(self, groups: list[PromptRows]) -> Iterator[Attempt]:
        """Yield an Attempt at an update of these groups, and after one that ran out of memory
        another: with smaller micro-batches, or, if the largest is a single row, with every layer
        recomputed but the last. model.recomputed_layers is set.

        torch.OutOfMemoryError, from the Attempt: a row does not fit alone, although every layer but
        the last is recomputed.
        """
        if not groups:
            yield Attempt([], is_last=True)
            return
        size = self.size(groups)
        micro_tokens = size.micro_tokens
        self.model.recomputed_layers = size.recomputed
        most = len(self.model.layers) - 1
        while True:
            batches = micro_batches(groups, micro_tokens)
            largest = max(batches, key=lambda batch: batch.tokens)
            is_single_row = len(largest.rows) == 1
            attempt = Attempt(batches, is_single_row and self.model.recomputed_layers >= most)
            yield attempt
            if not attempt.out_of_memory:
                return
            if is_single_row:
                self.model.recomputed_layers = most
                what = "every layer recomputed but the last"
            else:
                micro_tokens = largest.tokens // 2
                what = f"micro-batches of {micro_tokens:,} tokens"
            self.share *= 0.95
            tqdm.write(f"out of memory in the update: beginning it again with {what}")
            # The error is gone, and with it the tensors that its frames held.
            torch.cuda.empty_cache()

    def announcement(self, sampler: Sampler, prompts: list[int], answers: int, new: int) -> str:
        """→ a line about what a step of the longest prompts and answers takes of the GPU.

        prompts: tokens of each prompt of this rank. answers: to each. new: tokens of an answer.
        """
        longest = max(prompts)
        slots = min(sampler.slots, len(prompts) * answers)
        pages, _ = sampler.room(prompts, slots, longest + new)
        cached = pages * sampler.page_size  # tokens
        # The answers to a prompt share its pages.
        needed = math.ceil(slots / answers) * longest + slots * new
        hint = ""
        if cached < needed and sampler.kv == "bf16":
            c = self.model.config
            in_int8 = min(needed, cached * cached_bytes(c) / cached_bytes(c, "int8"))
            hint = f" of {needed / 1000:.0f} k (--kv int8: {in_int8 / 1000:.0f} k)"
        groups = [PromptRows(length, dict.fromkeys(range(answers), new - 1)) for length in prompts]
        size = self.size(groups)
        free = free_memory()
        total = free + torch.cuda.memory_reserved()
        verdict = "planned" if size.peak <= self.room() else "needed, and so much is not free"
        return (
            f"memory: {total / 1e9:.0f} GB, {free / 1e9:.0f} free: pages for "
            f"{cached / 1000:.0f} k tokens{hint}; updates of {size.tokens:,} tokens, "
            f"{size.recomputed} of {len(self.model.layers)} layers recomputed, "
            f"{size.peak / 1e9:.0f} GB {verdict}"
        )
