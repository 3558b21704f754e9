"""The sampler: it draws a group of answers to each prompt, and records the log-probability of every
token as it was drawn.

Naive sampling is a few lines:

    for each prompt, group_size times:
        tokens = prompt
        until a stop token, or max_new_tokens tokens:
            logits = model(tokens)[-1]            computes every token again to get one more
            token, logprob = sample(logits)
            tokens += [token]

The sampler returns the same answers, but for the rounding of sums, and faster. It changes five
things:

    KV cache              A decode step computes an answer's newest token only. Keys and values of
                          the tokens before it are kept, in pages of 128 positions (16 on
                          a CPU).
    continuous batching   A decode step advances many answers at once, each in a slot of its own.
                          When some have ended, others take their slots.
    shared prompts        An answer shares the prompt's pages with an answer of its group that runs
                          already, or starts with it. So a prompt is mostly computed once.
    preemption            An answer gets a page when it needs one. If none is free, the youngest
                          answer returns its pages and waits. So there may be fewer pages than all
                          answers would need at their longest.
    CUDA graphs           The GPU replays a decode step, up to 8 times before the host reads which
                          answers have ended. A CPU uses no graphs.

Each answer is a row of the Rollout. continuous_batching() moves rows between two queues:

    waiting ───── admit: give the row pages, ─────► running ───── finish: free its pages ─────► end
       ▲          prefill its prompt                   │
       └─────────── preempt: no page is free ──────────┘

The Scheduler decides, on the host, which rows run and which pages they use. The ModelRunner does
the computing, on the device: prefill and decode steps. A decode step reads each row's newest token,
which is not in the cache yet, caches its keys and values, and draws the next token. So prefill
leaves out the newest token and draws nothing. This is how two rows share a prompt of 300 tokens:

    | page A  | page B  | C  …  | page E …           block table of row 0: A B C E
                        | D  …                                      row 1: A B D

Prefill fills positions 0 to 298. A and B are full, so the rows share them. D starts as a copy of C.
Then each row writes the prompt's last token and its own answer. A preempted row keeps its answer so
far in the Rollout. When it is admitted again, its prompt and its answer are prefilled.

The sampler runs the model that trains, on the same tensors. So no weights are handed over, AQN's
noise is in exactly the modules that sample, and the recorded log-probabilities are those of the
policy that sampled. Random bits depend on (seed, step, sequence number, index in the answer) alone:
see ops/sampling.py. All pages and graphs are freed when generate returns, because the update needs
the memory.

Training takes no top-k and no top-p: the trainer's probabilities would include the tokens that the
sampler excludes, and their ratio would be wrong. Evaluation computes no ratio and may use top-p.
Needs: torch, transformers, numpy, tqdm; ops/{attention,int8,sampling}.py, model.py.
"""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedConfig

from model import MLP_TOKENS, Decoder, family, head_dim, rotary
from ops import attention, int8, sampling

SLOTS = 256  # most rows that run at once
KV = "bf16", "int8"  # formats of keys and values in pages
STEPS = 8  # most decode steps before the host reads which rows have ended
PREFILL_TOKENS = 8192  # most in one forward pass, unless one row may need more
MIN_SPLITS = 4  # splits that a graph has room for even if its rows are shorter: fewer captures
CPU_CACHE = 10**9  # bytes of keys and values on a CPU
CPU_PAGE = 16  # positions of a page on a CPU, where attention gathers copies of a row's pages


class Rollout(NamedTuple):
    """B = P·G rows: sample g of prompt p is row p·G + g. T: the tokens of the longest row, or
    more while the rows grow.
    """

    tokens: torch.Tensor  # (B, T) int64: prompt, answer, then zeros
    logprobs: torch.Tensor  # (B, T) f32: of each answer token when it was drawn; else 0
    lengths: torch.Tensor  # (B,) int64: answer tokens, including the sampled end token
    finished: torch.Tensor  # (B,) bool: ended by a stop token, not by max_new_tokens
    prompt_lengths: torch.Tensor  # (B,) int64

    def answers(self) -> list[list[int]]:
        """→ each row's answer as token ids, without its end token."""
        ends = self.prompt_lengths + self.lengths - self.finished.long()
        rows = zip(self.tokens.tolist(), self.prompt_lengths.tolist(), ends.tolist(), strict=True)
        return [tokens[start:end] for tokens, start, end in rows]

    def answer_mask(self) -> torch.Tensor:
        """→ (B, T) bool: True at an answer's tokens, its end token included. The mask compares
        positions with lengths, not token ids: padding may have the end token's id.
        """
        t = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        start = self.prompt_lengths[:, None]
        return (t >= start) & (t < start + self.lengths[:, None])

    def scored_by(self, model: Decoder, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """→ (B, T) f32 each: the model's log-probability of each answer token, with a gradient, and
        the entropy of its distribution; 0 outside answers.
        """
        return model.logprobs(self.tokens, self.prompt_lengths, self.lengths, temperature)

    def rows(self, index: range | list[int] | torch.Tensor) -> "Rollout":
        """→ the rows with these numbers, cut to the longest of them."""
        index = torch.as_tensor(index, device=self.tokens.device)
        picked = Rollout(*(field[index] for field in self))
        used = int((picked.prompt_lengths + picked.lengths).max())
        return picked._replace(tokens=picked.tokens[:, :used], logprobs=picked.logprobs[:, :used])

    @staticmethod
    def join(rollouts: list["Rollout"]) -> "Rollout":
        """→ the rows of several rollouts in their order, padded on the right to the widest."""
        tokens, logprobs, *others = zip(*rollouts, strict=True)
        tokens, logprobs = (
            pad_sequence([row for part in parts for row in part], batch_first=True)
            for parts in (tokens, logprobs)
        )
        return Rollout(tokens, logprobs, *map(torch.cat, others))


class SamplingParams(NamedTuple):
    """How tokens are drawn and when answers end, the same for all rows of a call."""

    max_new_tokens: int
    stop_ids: list[int]  # tokens that end an answer
    temperature: float = 1.0  # 0: take the most probable token
    top_p: float = 1.0  # below 1, for evaluation only: draw from the renormalised nucleus
    seed: int = 0


class Limits(NamedTuple):
    """What one call of generate may use."""

    slots: int  # rows that run at once
    pages: int  # of the KV cache
    length: int  # tokens of the longest row
    prefill: int  # tokens of one forward pass


class Sampler:
    """slots: most rows that run at once. pages: most pages of keys and values; None: as many as are
    needed, or as a GPU's free memory holds. kv: their format, "bf16" (on a CPU fp32) or "int8".

    bar: tqdm, or a subclass that shows the progress in another way. watch: a function that is
    called with the Rollout whenever its answers have grown.
    """

    def __init__(
        self,
        model: Decoder,
        slots: int = SLOTS,
        pages: int | None = None,
        bar=tqdm,
        kv: str = "bf16",
    ):
        if kv not in KV:
            raise ValueError(f"kv {kv!r} must be one of {', '.join(KV)}")
        self.model, self.slots, self.pages, self.bar, self.kv = model, slots, pages, bar, kv
        self.page_limit = math.inf  # once memory has run out: half of the pages that did not fit
        self.page_size = CPU_PAGE if model.device.type == "cpu" else attention.PAGE
        self.watch = None
        self.limits = None  # Limits of the last call of generate
        self.stats = {}  # its limits and what it measured
        self.loaded = {}  # kind of decode step → batch sizes whose kernels are loaded

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        group_size: int,
        params: SamplingParams,
        step: int,
        first_sequence: int = 0,
        progress: str = "",
    ) -> Rollout:
        """Sample group_size answers to each prompt (a list of token ids).

        step: of training, or −1; with params.seed it selects the random bits. first_sequence: the
        number of the first answer; give each rank its own, or ranks draw the same bits. progress: a
        bar's label, "" for none. ValueError: an empty prompt, or one that with max_new_tokens
        exceeds the model's context or all pages. torch.OutOfMemoryError: memory ran out while
        sampling, and half of the pages do not hold the longest row.
        """
        _check(prompts, params.max_new_tokens, self.model.config.max_position_embeddings)
        rollout = _without_answers(prompts, group_size, params.max_new_tokens, self.model.device)
        rows, length = rollout.tokens.shape
        self._allot(list(map(len, prompts)), rows, length, params)
        self.model.eval()  # MLP.forward takes a long prefill in parts; nothing else reads the mode
        with self.bar(
            total=rows, desc=progress, unit="seq", leave=False, disable=None if progress else True
        ) as bar:
            # One pass, unless memory runs out: then the unfinished rows go on in half of the pages.
            while waiting := _unfinished(rollout, group_size, params.max_new_tokens):
                bar.n = rows - len(waiting)
                try:
                    # Keep no name for the runner, or its cache and graphs would not be freed.
                    continuous_batching(
                        Scheduler(waiting, self.page_size, self.limits, self.stats),
                        ModelRunner(self, rollout, params, step, first_sequence),
                        bar,
                    )
                except torch.OutOfMemoryError:
                    if self.limits.pages // 2 < self._pages_of(length):
                        raise
                    self._halve_pages()
                # Return the memory to CUDA, or the update's tensors fragment it.
                torch.cuda.empty_cache()
        self.model.train()
        return rollout.rows(range(rows))  # all of them, cut to the longest

    # --- memory. On a first reading go on with continuous_batching.

    def _allot(self, prompt_lengths, rows, length, params):
        """Set the limits of this call, and begin its statistics with zeros."""
        slots = min(self.slots, rows)
        pages, prefill = self.room(prompt_lengths, slots, length, params.top_p)
        needed = self._pages_of(length)
        if pages < needed:
            raise ValueError(
                f"a prompt of {max(prompt_lengths)} tokens with {params.max_new_tokens} new ones "
                f"needs {needed * self.page_size} tokens of keys and values; there is room for "
                f"{pages * self.page_size}: shorten the prompt or lower --max-new-tokens"
            )
        self.limits = Limits(slots, pages, length, prefill)
        measured = dict.fromkeys(("steps", "preempted", "prefill_s", "capture_s", "decode_s"), 0)
        self.stats = self.limits._asdict() | measured

    def _halve_pages(self):
        _, pages, length, prefill = self.limits
        self.page_limit = pages // 2  # for later calls, too
        # Rows that ran are prefilled with their answers so far.
        self.limits = self.limits._replace(pages=self.page_limit, prefill=max(prefill, length))
        self.stats |= self.limits._asdict()
        tqdm.write(
            "out of memory while sampling: going on with half of the memory for keys and "
            f"values, {self.limits.pages * self.page_size} tokens"
        )

    def _pages_of(self, length):
        """→ pages of a row of so many tokens. The last token is never cached."""
        return math.ceil((length - 1) / self.page_size)

    def room(
        self, prompt_lengths: list[int], slots: int, length: int, top_p: float = 1.0
    ) -> tuple[int, int]:
        """→ the pages to allocate, and the most tokens of one prefill. length: of the longest
        prompt plus answer.
        """
        needed = slots * self._pages_of(length)
        prefill = max(max(prompt_lengths), min(PREFILL_TOKENS, sum(prompt_lengths)))
        most = min(self.pages or needed, max(self.page_limit, self._pages_of(length)))
        pages = min(needed, most, self._fitting(slots, length, prefill, top_p))
        if pages < needed:  # so a row may be preempted, and prefilled again with its answer
            prefill = max(prefill, length)
            pages = min(pages, self._fitting(slots, length, prefill, top_p))
        return pages, prefill

    def _fitting(self, slots, length, prefill, top_p):
        """→ how many pages fit into a GPU's free memory beside all else that generate needs. A CPU
        has CPU_CACHE bytes of them, and at least those of one row.
        """
        c = self.model.config
        if self.model.device.type == "cpu":
            wider = 1 if self.kv == "int8" else 2  # than bf16: a CPU computes in fp32
            page = self.page_size * wider * cached_bytes(c, self.kv)
            return max(self._pages_of(length), CPU_CACHE // page)
        # A prefill decodes one packed weight at a time to bf16; the largest is gate and up's.
        decoded = 4 * c.hidden_size * c.intermediate_size
        # A decoding row has its logits in fp32, and as much again as a reserve. With top-p a logit
        # takes up to 20 bytes.
        decoding = scratch_bytes(c, length) + (20 if top_p < 1 else 8) * c.vocab_size
        gaps = 5e8  # what the allocator cannot use
        reserved = decoded + prefill_bytes(c, prefill) + slots * decoding + gaps
        torch.cuda.empty_cache()  # what the allocator still holds is too fragmented to count
        left = free_memory() - reserved
        return max(0, int(left // (self.page_size * cached_bytes(c, self.kv))))


def _check(prompts, max_new_tokens, context):
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty: there is nothing to go on from")
        if len(prompt) + max_new_tokens > context:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones it "
                f"must fit into the model's context of {context}: "
                "shorten it or lower --max-new-tokens"
            )


def _without_answers(prompts, group_size, max_new_tokens, device):
    """→ Rollout of B rows that hold their prompts, and have room for answers."""
    tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    tokens = F.pad(tokens, (0, max_new_tokens)).to(device).repeat_interleave(group_size, 0)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    prompt_lengths = lengths.repeat_interleave(group_size)
    return Rollout(
        tokens=tokens,
        logprobs=torch.zeros_like(tokens, dtype=torch.float32),
        lengths=torch.zeros_like(prompt_lengths),
        finished=torch.zeros_like(prompt_lengths, dtype=torch.bool),
        prompt_lengths=prompt_lengths,
    )


# --- the loop


def continuous_batching(scheduler: "Scheduler", runner: "ModelRunner", bar: tqdm):
    """Sample until every row has ended."""
    while scheduler.waiting or scheduler.running:
        if scheduler.should_admit():
            while started := scheduler.admit():
                runner.fill_pages(started)
        scheduler.reserve()
        runner.decode(scheduler.running)
        if runner.watch:
            runner.watch(runner.rollout)
        bar.update(scheduler.finish())


@dataclass
class Sequence:
    """A row that waits or runs, as the host sees it."""

    row: int  # its number in the Rollout
    group: int  # rows of a group have the same prompt
    prompt_length: int
    position: int  # where its newest token is, which is not cached yet; −1: the answer has ended
    last_position: int  # where its last token will be if the answer reaches max_new_tokens
    # The rest is set when the row starts.
    pages: list[int] = field(default_factory=list)  # its block table: the pages of its positions
    shared: int = 0  # so many of its first pages belong to another row of the group too
    copy_from: int | None = None  # a sibling's page in which the prompt ends; None: prefill


def _unfinished(rollout, group_size, max_new_tokens):
    """→ a deque of Sequences: the rows whose answers have not ended, in the Rollout's order."""
    fields = rollout.prompt_lengths.tolist(), rollout.lengths.tolist(), rollout.finished.tolist()
    return deque(
        Sequence(
            row=row,
            group=row // group_size,
            prompt_length=prompt,
            position=prompt + length - 1,
            last_position=prompt + max_new_tokens - 1,
        )
        for row, (prompt, length, finished) in enumerate(zip(*fields, strict=True))
        if not finished and length < max_new_tokens
    )


# --- on the host: which rows run, and which pages they use


class Scheduler:
    """The queues of waiting and of running rows.

    Both are in the Rollout's order, the oldest row first, and all running rows are older than all
    waiting rows.
    """

    def __init__(self, waiting: deque[Sequence], page_size: int, limits: Limits, stats: dict):
        """stats: its count "preempted" is kept up to date."""
        self.waiting = waiting
        self.running = []
        self.admitted = 0  # how many rows ran after the last call of admit
        self.page_size, self.limits, self.stats = page_size, limits, stats
        self.pool = PagePool(limits.pages)

    def should_admit(self) -> bool:
        """Admit rows when an eighth of the running rows has left, ended or preempted, or as many as
        wait: each admission is a prefill, and a small prefill is slow.
        """
        left = self.admitted - len(self.running)
        return left >= min(len(self.waiting), math.ceil(self.admitted / 8))

    def admit(self) -> list[Sequence]:
        """Start waiting rows while there are slots, pages, and room in one prefill.

        → the rows that started. Call this again, after they are prefilled, until none starts.
        """
        started, tokens = [], 0
        while self.waiting and len(self.running) < self.limits.slots:
            sequence = self.waiting[0]
            shared, copy_from = self.prompt_pages(sequence)
            missing = self.pages_ahead(sequence) - len(shared)
            if copy_from is None:
                tokens += sequence.position
            if tokens > self.limits.prefill or missing + self.watermark() > len(self.pool.free):
                break
            self.pool.share(shared)
            sequence.pages = shared + self.pool.take(missing)
            sequence.shared, sequence.copy_from = len(shared), copy_from
            started.append(sequence)
            self.running.append(self.waiting.popleft())
        self.admitted = len(self.running)
        return started

    def prompt_pages(self, sequence: Sequence) -> tuple[list[int], int | None]:
        """→ pages with the row's prompt that a sibling has, a running row of its group: full ones,
        to share, and the partial one after them, to copy.

        The sibling may have started in this very admission, because fill_pages prefills before it
        copies. Its partial page may hold some of its own answer already: those positions of the
        copy are written before they are read. A preempted row with answer tokens must be prefilled,
        so it copies none.
        """
        sibling = next((s for s in self.running if s.group == sequence.group), None)
        if sibling is None:
            return [], None
        full = (sequence.prompt_length - 1) // self.page_size
        shared, copy_from = sibling.pages[:full], sibling.pages[full]
        if sequence.position >= sequence.prompt_length:
            copy_from = None
        return shared, copy_from

    def watermark(self) -> int:
        """→ pages to keep free when a row starts: one for each running row that may need more.
        Without them rows would soon be preempted.
        """
        return sum(s.last_position > len(s.pages) * self.page_size for s in self.running)

    def pages_ahead(self, sequence: Sequence) -> int:
        """→ how many pages a row needs for its next decode steps."""
        positions = min(sequence.position + STEPS, sequence.last_position)
        return math.ceil(positions / self.page_size)

    def reserve(self):
        """Give each running row the pages of its next decode steps, the oldest row first. If too
        few are free, preempt the youngest row. The oldest always runs: the pool can hold any row.
        """
        i = 0
        while i < len(self.running):
            sequence = self.running[i]
            missing = self.pages_ahead(sequence) - len(sequence.pages)
            if missing > len(self.pool.free):
                self.preempt()
            else:
                sequence.pages += self.pool.take(missing)
                i += 1

    def preempt(self):
        """Move the youngest running row to the head of the waiting rows."""
        youngest = self.running.pop()
        self.pool.release(youngest.pages)
        self.waiting.appendleft(youngest)
        self.stats["preempted"] += 1

    def finish(self) -> int:
        """Free the pages of the rows that have ended → how many have."""
        ended = [s for s in self.running if s.position < 0]
        for sequence in ended:
            self.pool.release(sequence.pages)
        self.running = [s for s in self.running if s.position >= 0]
        return len(ended)


class PagePool:
    """Which pages of the KV cache are free, and how many rows use each of the others."""

    def __init__(self, pages: int):
        self.free = list(range(pages))
        self.users = Counter()

    def take(self, count: int) -> list[int]:
        """→ `count` free pages, which have one user now."""
        pages = [self.free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: list[int]):
        """Add a user to each page."""
        self.users.update(pages)

    def release(self, pages: list[int]):
        """Take a user from each page. A page without users is free."""
        self.users.subtract(pages)
        self.free += [page for page in pages if self.users[page] == 0]


# --- on the device: prefill and decode steps


class Slots(NamedTuple):
    """The running rows as a decode step sees them. Entry i of each tensor belongs to slot i; the
    running rows fill the first slots. CUDA graphs read and write these very tensors, so they are
    changed in place.
    """

    rollout_row: torch.Tensor  # (slots,) int64, as are all
    last_token: torch.Tensor  # (slots,): the newest token, which the model reads next
    position: torch.Tensor  # (slots,): of that token; −1: the row has ended, or the slot is free
    sequence_number: torch.Tensor  # (slots,): unique over all ranks; selects the random bits
    block_table: torch.Tensor  # (slots, blocks): the row's pages

    def first(self, count: int) -> "Slots":
        return Slots(*(x[:count] for x in self))


class ModelRunner:
    """The KV cache, the slots, and the forward passes that fill them."""

    def __init__(
        self,
        sampler: Sampler,
        rollout: Rollout,
        params: SamplingParams,
        step: int,
        first_sequence: int,
    ):
        self.model, self.stats, self.page_size = sampler.model, sampler.stats, sampler.page_size
        self.watch = sampler.watch
        self.rollout, self.params = rollout, params
        self.step, self.first_sequence = step, first_sequence
        self.cuda = self.model.device.type == "cuda"
        slots, pages, *_ = sampler.limits
        splits = math.ceil(rollout.tokens.shape[1] / attention.SPLIT)  # of the longest row
        enabled = self.model.layers[0].self_attn.qkv_proj.enabled  # the same in all layers
        # The kind of decode step: which kernels it needs, but for the batch size.
        kind = enabled, params.temperature == 0, params.top_p < 1, len(params.stop_ids)
        self.graphs = DecodeGraphs(slots, splits, sampler.loaded.setdefault(kind, set()))
        c = self.model.config
        key_heads = c.num_key_value_heads
        shape = c.num_hidden_layers, pages, key_heads, self.page_size, head_dim(c)
        blocks = math.ceil(splits * attention.SPLIT / self.page_size)
        with self.model.device:
            self.stops = torch.tensor(sorted(params.stop_ids), dtype=torch.long)
            counters = torch.zeros(slots * key_heads, dtype=torch.int32)
            # zeros, not empty: on a CPU a masked position has weight 0, and 0 · NaN would be NaN
            dtype = torch.uint8 if sampler.kv == "int8" else self.model.dtype
            k = torch.zeros(shape, dtype=dtype)
            v = torch.zeros(shape, dtype=dtype)
            self.page_tensors = [*k, *v]  # whose first dimension is pages
            if sampler.kv == "int8":
                positions = torch.arange(int8.POSITIONS)
                angles = rotary(positions, self.model.inv_freq, self.model.rope_scale)
                k, v = int8.pages_of_layers(self.model.layers, k, v, *angles)
                self.page_tensors += [pages.scale for pages in [*k, *v]]
            self.cache = attention.KVCache(k, v, counters)
            zeros = torch.zeros(slots, dtype=torch.long)
            self.slots = Slots(
                rollout_row=zeros.clone(),
                last_token=zeros.clone(),
                position=zeros.clone(),
                sequence_number=zeros.clone(),
                block_table=torch.zeros(slots, blocks, dtype=torch.long),
            )

    def fill_pages(self, started: list[Sequence]):
        """Fill the pages of rows that start, up to their newest tokens."""
        began = _seconds()
        prefills, copies = [], []
        for sequence in started:
            if sequence.copy_from is not None:
                copies.append((sequence.copy_from, sequence.pages[sequence.shared]))
            elif sequence.position > 0:  # else the prompt's only token is the newest
                prefills.append(sequence)
        if prefills:
            self.prefill(prefills)
        if copies:
            source, copy = torch.tensor(copies, device=self.model.device).T
            for x in self.page_tensors:
                x[copy] = x[source]
        self.stats["prefill_s"] += _seconds() - began

    def prefill(self, sequences: list[Sequence]):
        """Compute keys and values of every token of some rows, except the newest, in one forward
        pass over one flat row, and store those that are not in shared pages.
        """
        texts, mapping = [], []
        end = 0  # tokens in the flat row so far
        for sequence in sequences:
            texts.append(self.rollout.tokens[sequence.row, : sequence.position])
            position = torch.arange(sequence.shared * self.page_size, sequence.position)
            page = torch.tensor(sequence.pages)[position // self.page_size]
            mapping.append(torch.stack([end + position, page, position % self.page_size]))
            end += sequence.position
        slots = attention.SlotMapping(*torch.cat(mapping, 1).to(self.model.device))
        groups = [(sequence.position, []) for sequence in sequences]  # each text has no answers
        attend = attention.Packed(groups, self.model.device, self.cache, slots)
        self.model(torch.cat(texts), attend.positions, attend)

    def decode(self, running: list[Sequence]):
        """Draw up to 8 tokens (on a CPU one) for each running row, and read the new positions."""
        self.write_slots(running)
        steps = min(STEPS if self.cuda else 1, max(s.last_position - s.position for s in running))
        longest = max(s.position for s in running) + steps
        splits = math.ceil(longest / attention.SPLIT)
        began = _seconds()
        if self.cuda:
            self.graphs.run(self, len(running), splits, steps)
        else:
            self.decode_step(len(running), splits)
        positions = self.slots.position[: len(running)].tolist()
        for sequence, position in zip(running, positions, strict=True):
            sequence.position = position
        self.stats["steps"] += steps
        self.stats["decode_s"] += _seconds() - began

    def write_slots(self, running: list[Sequence]):
        """Write the running rows into the first slots, in their order. The others are free."""
        self.slots.position.fill_(-1)
        slots = self.slots.first(len(running))
        places = torch.tensor([(s.row, s.position) for s in running], device=self.model.device)
        slots.rollout_row.copy_(places[:, 0])
        slots.position.copy_(places[:, 1])
        slots.sequence_number.copy_(slots.rollout_row + self.first_sequence)
        slots.last_token.copy_(self.rollout.tokens[slots.rollout_row, slots.position])
        blocks = max(len(s.pages) for s in running)
        table = [s.pages + [0] * (blocks - len(s.pages)) for s in running]
        # by way of NumPy: torch.tensor reads nested lists slowly
        slots.block_table[:, :blocks] = torch.from_numpy(np.array(table))

    def decode_step(self, batch_size: int, splits: int):
        """Draw one more token for each row in the first slots: what a CUDA graph captures."""
        slots, params = self.slots.first(batch_size), self.params
        attend = attention.Paged(self.cache, slots.block_table, slots.position, splits)
        logits = self.model.logits(self.model(slots.last_token, slots.position, attend))
        if params.top_p < 1:
            logits = sampling.nucleus(logits, params.temperature, params.top_p)
        token, logprob = sampling.sample(
            logits,
            params.temperature,
            params.seed,
            self.step,
            sequence=slots.sequence_number,
            index=self.rollout.lengths[slots.rollout_row],
        )
        sampling.append(token, logprob, slots, self.stops, params.max_new_tokens, self.rollout)


def _seconds():
    """→ the time, when all work on the GPU is done."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class DecodeGraphs:
    """The CUDA graphs of a decode step, which are captured when they are needed.

    A row's position, its last token and its block table are data on the GPU. So a graph depends on
    its size only, two numbers: how many slots it computes (the batch size), and into how many
    splits of 256 positions attention divides the longest row. Both are rounded up to a power of
    two, and splits to at least 4, so that fewer graphs are captured. Neither exceeds its maximum:
    all slots, and the splits of the longest possible row.
    """

    def __init__(self, slots: int, splits: int, loaded: set[int]):
        """slots, splits: the two maxima. loaded: batch sizes whose kernels are loaded."""
        self.slots, self.splits, self.loaded = slots, splits, loaded
        self.graphs = {}  # (batch size, splits) → graph
        self.memory = None  # the graphs' memory, which they share
        self.requested = None  # the size that the last call requested

    def run(self, runner: ModelRunner, batch_size: int, splits: int, steps: int):
        """Replay `steps` decode steps by a graph of at least this batch size and these splits."""
        # The runner is an argument: a reference to it would be a cycle, and keep its memory alive.
        batch_size = min(self.slots, _power_of_two(batch_size))
        splits = min(self.splits, max(MIN_SPLITS, _power_of_two(splits)))
        size = self._captured_or_requested((batch_size, splits))
        batch_size, splits = size
        if size not in self.graphs:
            began = _seconds()
            if batch_size not in self.loaded:
                # Make the first step outside of capture: CUDA cannot load kernels while capturing.
                # The number of splits only sets the size of a launch, so it needs no new kernels.
                runner.decode_step(batch_size, splits)
                self.loaded.add(batch_size)
                steps -= 1
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size], pool=self.memory):
                runner.decode_step(batch_size, splits)
            self.memory = self.graphs[size].pool()
            seconds = _seconds() - began
            runner.stats["capture_s"] += seconds
            runner.stats["decode_s"] -= seconds  # decode() adds them
        for _ in range(steps):
            self.graphs[size].replay()

    def _captured_or_requested(self, size):
        """→ the size of the graph to replay.

        Prefer a captured graph that is large enough, even if it computes more than is asked: a
        capture takes as long as many steps, and the rows may end before a new graph has saved that.
        If there is none, or if the last call requested the same size, return the requested one.
        """
        same, self.requested = size == self.requested, size
        batch_size, splits = size
        larger = [(b, s) for b, s in self.graphs if b >= batch_size and s >= splits]
        return size if same or not larger else min(larger)


# --- memory


def free_memory() -> float:
    """→ how many bytes PyTorch's allocator may still take from the GPU: --memory-gb limits it."""
    free, total = torch.cuda.mem_get_info()
    allowed = total * torch.cuda.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.memory_reserved())


def cached_bytes(config: PreTrainedConfig, kv: str = "bf16") -> int:
    """→ bytes of one token's keys and values in all layers. In int8 each has a scale, in fp32."""
    Dh = head_dim(config)
    of_head = Dh + 4 if kv == "int8" else 2 * Dh
    return 2 * config.num_hidden_layers * config.num_key_value_heads * of_head


def scratch_bytes(config: PreTrainedConfig, length: int) -> int:
    """→ bytes of a decode step's partial sums of attention, for a row of `length` tokens."""
    splits = _power_of_two(math.ceil(length / attention.SPLIT))
    return 4 * splits * config.num_attention_heads * (head_dim(config) + 2)


def prefill_bytes(config: PreTrainedConfig, tokens: int) -> int:
    """→ bytes of the activations of so many prompt tokens, at the attention or the MLP of a layer.

    A token has the residual stream of D numbers in fp32, and at most four tensors of D numbers in
    bf16 (12·D bytes). Attention has three more: qkv, q and k after RoPE, and its output. If q and k
    are normalized, it also has them in fp32. The MLP has gate, up and their product (6·I bytes), of
    at most MLP_TOKENS tokens.
    """
    of_heads = (config.num_attention_heads + config.num_key_value_heads) * head_dim(config)
    at_attention = tokens * (12 if family(config).head_norm else 6) * of_heads
    at_mlp = min(tokens, MLP_TOKENS) * 6 * config.intermediate_size
    return tokens * 12 * config.hidden_size + max(at_attention, at_mlp)


def _power_of_two(n):
    """→ the smallest power of two that is at least n, for n ≥ 1."""
    return 1 << (n - 1).bit_length()
