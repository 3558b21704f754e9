"""The sampler, by continuous batching: a group of answers to each prompt, and the log-probability
of every token as it was drawn.

    waiting rows ──► admit: give a row pages ──► prefill: compute a prompt's keys and values,
         ▲           while slots and pages last           once for the running rows of its group
         │ put back: no page is free                               │
         │                                                         ▼
    running rows ◄── retire: ended rows ◄── decode 8 steps, each one CUDA graph: newest token of
                     free their pages       each row → model → sample → Rollout → stop test

Keys and values lie in pages of 128 positions, on a CPU of 16. A row gets a page when it needs one,
so the sampler can run with fewer pages than the longest possible answers of all rows need:

    prompt of 300 tokens    answers of two rows      pages of row 0: A B C E
    | page A  | page B  | C  …  | page E …           pages of row 1: A B D
                        | D  …                       (A, B shared; D starts as a copy of C's
                                                      positions 256 to 298; then each row writes
                                                      the prompt's last token and its answer)

A group shares the pages that the prompt's prefill fills. Each row after the first copies the next,
partial page. If no page is free, the sampler puts the youngest row back into the queue and releases
its pages. The row's answer so far stays in the Rollout. Later the sampler prefills the row again
and continues its answer.

A step reads each row's newest token, which is not in the cache yet (at first the prompt's last),
and draws the next one; so prefill draws nothing. The host replays the graph of a step up to 8
times, then reads which rows have ended and moves the rows that still run to the front of the batch.
A row's position, last token and block table are data on the GPU. So a graph depends on two numbers
only: the rows of the batch, and the pieces of 256 positions in the longest row. The sampler rounds
both up to a power of two, and the pieces to at least 4, so that it captures fewer graphs. Neither
number exceeds its maximum: the slots, and the pieces of the longest possible row.
generate frees pages and graphs at its end: the update needs the memory, and no graph may outlive
what it reads. A CPU uses no graphs.

The sampler runs the model that trains, on the same tensors. So no weights are handed over, AQN's
noise is in exactly the modules that sample, and the recorded log-probabilities are those of the
policy that sampled. Random bits depend on (seed, step, sequence number, index in the answer) alone:
see ops/sampling.py.

Training takes no top-k and no top-p: the trainer's probabilities would include the tokens that the
sampler excludes, and their ratio would be wrong. Evaluation computes no ratio and may use top-p.
Needs: torch, numpy, tqdm; on a GPU also triton; ops/{attention,sampling}.py, model.py.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from model import head_dim, rows_by_prompt
from ops import attention, sampling
from ops.sampling import launch_options, wait_for_predecessor

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # a CPU machine may lack Triton: its kernel is then never launched
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

SLOTS = 256  # most sequences that run at once
STEPS = 8  # most decode steps between the host's reads of which rows have finished
PREFILL_TOKENS = 8192  # most in one forward pass, unless one row may need more
MIN_PIECES = 4  # of 256 positions: a graph covers so many, if a row can have them: fewer captures
CPU_PAGE = 16  # positions of a page on a CPU, where attention copies the pages of a row together


class Rollout(NamedTuple):
    """B = P·G rows: sample g of prompt p is row p·G + g. T: the tokens of the longest prompt plus
    answer.
    """

    tokens: torch.Tensor  # (B, T) int64: prompt, answer, then zeros
    logprobs: torch.Tensor  # (B, T) f32: of each answer token when it was drawn; else 0
    lengths: torch.Tensor  # (B,) int64: answer tokens, including the sampled end token
    finished: torch.Tensor  # (B,) bool: ended by a stop token, not by max_new_tokens
    prompt_lengths: torch.Tensor  # (B,) int64

    def answers(self):
        """→ each row's answer as a list of token ids, without its end token."""
        ends = (self.prompt_lengths + self.lengths - self.finished.long()).tolist()
        return [
            row[p:e]
            for row, p, e in zip(
                self.tokens.tolist(), self.prompt_lengths.tolist(), ends, strict=True
            )
        ]

    def answer_mask(self):
        """→ (B, T) bool: True at an answer's tokens, its end token included. The mask compares
        positions with lengths, not token ids: padding may have the end token's id.
        """
        t = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        start = self.prompt_lengths[:, None]
        return (t >= start) & (t < start + self.lengths[:, None])

    def scored_by(self, model, temperature):
        """→ (B, T) f32 each: the model's log-probability of each answer token, with a gradient, and
        the entropy of its distribution; 0 outside answers.
        """
        return model.logprobs(self.tokens, self.prompt_lengths, self.lengths, temperature)

    def rows(self, index):
        """→ Rollout of the rows in index, a range or (n,) int64, cut to the longest of them."""
        index = torch.as_tensor(index, device=self.tokens.device)
        picked = Rollout(*(field[index] for field in self))
        used = int((picked.prompt_lengths + picked.lengths).max())
        return picked._replace(tokens=picked.tokens[:, :used], logprobs=picked.logprobs[:, :used])

    @staticmethod
    def join(rollouts):
        """→ Rollout of the rows of several rollouts in their order, padded on the right to the
        widest.
        """
        widest = max(r.tokens.shape[1] for r in rollouts)
        return Rollout(
            *(
                torch.cat(
                    [F.pad(f, (0, widest - f.shape[1])) if f.dim() == 2 else f for f in fields]
                )
                for fields in zip(*rollouts, strict=True)
            )
        )

    def groups(self, rows):
        """Row numbers (n,) → [PromptRows, …]. It reads tokens from the GPU, so call it once."""
        answer_tokens = (self.lengths - 1).tolist()  # nothing is predicted from the last one
        by_prompt = rows_by_prompt(self.tokens[rows], self.prompt_lengths[rows])
        rows = rows.tolist()
        return [
            PromptRows(len(prompt), {rows[i]: answer_tokens[rows[i]] for i in members})
            for prompt, members in by_prompt.items()
        ]


class PromptRows(NamedTuple):
    """Rows with the same prompt."""

    prompt: int  # tokens of the prompt
    answers: dict  # {row number: tokens of its answer that the trainer computes}

    @property
    def tokens(self):
        """→ flat tokens of the prompt and all its answers."""
        return self.prompt + sum(self.answers.values())


@dataclass
class MicroBatch:
    """Rows that the trainer computes at once, each prompt once."""

    rows: list = field(default_factory=list)  # their numbers
    tokens: int = 0  # of prompts and answers: flat tokens
    shared_keys: int = 0  # that answers read of prompts: a prompt's length for each answer


def micro_batches(groups, budget):
    """[PromptRows, …] → [MicroBatch, …]: each has at most `budget` flat tokens, or one row. A group
    that fits into one micro-batch is not cut, so that its prompt is computed once.
    """
    batches = []
    for group in groups:
        if not batches or batches[-1].tokens + group.tokens > budget:
            batches.append(MicroBatch())
        batches[-1].tokens += group.prompt
        for row, tokens in group.answers.items():
            if batches[-1].rows and batches[-1].tokens + tokens > budget:
                batches.append(MicroBatch(tokens=group.prompt))
            batches[-1].rows.append(row)
            batches[-1].tokens += tokens
            batches[-1].shared_keys += group.prompt
    return batches


class Draw(NamedTuple):
    """How one call of generate draws tokens and ends answers, the same for all its rows."""

    temperature: float
    top_p: float
    seed: int
    step: int
    first_sequence: int  # the global number of the first answer
    group_size: int  # adjacent rows of the Rollout that share a prompt
    stops: torch.Tensor  # (n,) int64: tokens that end an answer
    max_new_tokens: int


@dataclass
class Sequence:
    """An answer that waits or runs, as the host sees it."""

    row: int  # in the Rollout
    prompt: list  # of token ids
    position: int  # of its newest token; −1: the answer has ended
    pages: list = field(default_factory=list)  # of its positions, in their order; none: it waits


class Rows(NamedTuple):
    """The running answers, as the GPU sees them: entry i of each tensor belongs to row i of the
    batch. All are (n,) int64: of all slots, whose number is rounded up to an even one, or of the
    rows of one decode step.
    """

    row: torch.Tensor  # in the Rollout
    last_token: torch.Tensor  # which the model reads next
    position: torch.Tensor  # of that token; −1: the answer has ended
    number: torch.Tensor  # global number of the sequence, which fixes its random bits


class PagePool:
    """Which pages of the KV cache are free, and how many rows use each of the others."""

    def __init__(self, pages):
        self.free = list(range(pages))
        self.users = [0] * pages

    def take(self, count):
        """→ a list of `count` free pages, which have one user now."""
        pages = [self.free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages):
        """Add a user to each page."""
        for page in pages:
            self.users[page] += 1

    def release(self, pages):
        """Take a user from each page. A page without users is free."""
        for page in pages:
            self.users[page] -= 1
            if self.users[page] == 0:
                self.free.append(page)


class Sampler:
    """slots: most sequences that run at once. pages: most pages of keys and values; None: as many
    as are needed, or as a GPU's free memory holds.
    """

    def __init__(self, model, slots=SLOTS, pages=None):
        self.model, self.slots, self.pages = model, slots, pages
        self.page_size = CPU_PAGE if model.device.type == "cpu" else attention.PAGE
        self.stats = {}  # measurements of the last call of generate
        self.loaded = set()  # steps whose kernels are loaded: (rows, greedy?, top-p?, stop tokens)

    @torch.no_grad()
    def generate(
        self,
        prompts,
        group_size,
        max_new_tokens,
        temperature,
        stop_ids,
        seed,
        step,
        first_sequence=0,
        progress="",
        top_p=1.0,
    ):
        """Sample group_size answers to each prompt (a list of token ids) → Rollout.

        stop_ids: tokens that end an answer. temperature 0 is greedy. first_sequence: the global
        number of the first answer; give each rank its own, or ranks draw the same bits. progress: a
        bar's label, "" for none. top_p < 1, for evaluation only: sample from the renormalised
        nucleus (see sampling.nucleus). ValueError: an empty prompt, or one that with max_new_tokens
        exceeds the model's context or all pages. torch.OutOfMemoryError: memory ran out while
        sampling, and half of the pages do not hold the longest row.
        """
        self._check(prompts, max_new_tokens)
        rollout = self._prompts_alone(prompts, group_size, max_new_tokens)
        draw = Draw(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            step=step,
            first_sequence=first_sequence,
            group_size=group_size,
            stops=torch.tensor(sorted(stop_ids), dtype=torch.long, device=self.model.device),
            max_new_tokens=max_new_tokens,
        )
        rows, length = rollout.tokens.shape
        slots = min(self.slots, rows)
        row_pages = math.ceil((length - 1) / self.page_size)  # the last token is not cached
        pages, prefill = self.room(list(map(len, prompts)), slots, length, top_p)
        if pages < row_pages:
            raise ValueError(
                f"a prompt of {length - max_new_tokens} tokens with {max_new_tokens} new ones "
                f"needs {row_pages * self.page_size} tokens of keys and values; there is room for "
                f"{pages * self.page_size}: shorten the prompt or lower --max-new-tokens"
            )
        # length: of the longest row; prefill: most tokens of a forward pass
        self.stats = dict(slots=slots, pages=pages, length=length, prefill=prefill)
        self.stats |= dict.fromkeys(("steps", "put_back", "prefill_s", "capture_s", "decode_s"), 0)
        waiting = deque(
            Sequence(row, prompt, position=len(prompt) - 1)
            for row, prompt in enumerate(p for p in prompts for _ in range(group_size))
        )
        with tqdm(
            total=rows, desc=progress, unit="seq", leave=False, disable=None if progress else True
        ) as bar:
            self._sample(waiting, rollout, draw, row_pages, bar)
        return rollout.rows(range(rows))

    def _sample(self, waiting, rollout, draw, row_pages, bar):
        """Sample the waiting rows. If memory runs out, go on with half of the pages, as long as
        they hold the longest row, which needs row_pages.
        """
        while waiting:
            running = []
            try:
                _Batch(self, rollout, draw).run(waiting, running, bar)
            except torch.OutOfMemoryError:
                if self.stats["pages"] // 2 < row_pages:
                    raise
                self.stats["pages"] //= 2
                # a row that was put back is prefilled with its answer so far
                self.stats["prefill"] = max(self.stats["prefill"], self.stats["length"])
                bar.update(_put_back_all(running, waiting, rollout, draw))
                tqdm.write(
                    "out of memory while sampling: going on with half of the memory for keys and "
                    f"values, {self.stats['pages'] * self.page_size} tokens"
                )
            # The batch is gone. Return its memory to CUDA, or the update's tensors fragment it.
            torch.cuda.empty_cache()

    def _check(self, prompts, max_new_tokens):
        context = self.model.config.max_position_embeddings
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: there is nothing to go on from")
            if len(prompt) + max_new_tokens > context:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones it "
                    f"must fit into the model's context of {context}: "
                    "shorten it or lower --max-new-tokens"
                )

    def _prompts_alone(self, prompts, group_size, max_new_tokens):
        """→ Rollout of B rows that hold their prompts and no answer tokens yet."""
        device = self.model.device
        length = max(map(len, prompts)) + max_new_tokens
        padded = [prompt + [0] * (length - len(prompt)) for prompt in prompts]
        tokens = torch.tensor(padded, device=device).repeat_interleave(group_size, 0)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        B = len(tokens)
        return Rollout(
            tokens=tokens,
            logprobs=torch.zeros(B, length, device=device),
            lengths=torch.zeros(B, dtype=torch.long, device=device),
            finished=torch.zeros(B, dtype=torch.bool, device=device),
            prompt_lengths=prompt_lengths.repeat_interleave(group_size),
        )

    def room(self, prompt_lengths, slots, length, top_p=1.0):
        """→ the pages to allocate, and the most tokens of one prefill. length: of the longest
        prompt and answer.
        """
        needed = slots * math.ceil((length - 1) / self.page_size)
        prefill = max(max(prompt_lengths), min(PREFILL_TOKENS, sum(prompt_lengths)))
        fitting = self._fitting_pages(slots, length, prefill, top_p)
        pages = min(needed, self.pages or needed, fitting)
        if pages < needed:  # so a row may be put back and prefilled again, with its answer
            prefill = max(prefill, length)
            pages = min(pages, self._fitting_pages(slots, length, prefill, top_p))
        return pages, prefill

    def _fitting_pages(self, slots, length, prefill, top_p):
        """→ how many pages fit into a GPU's free memory beside all else that generate needs. A CPU
        has no limit.
        """
        c = self.model.config
        if self.model.device.type == "cpu":
            return math.inf
        # Reserve memory for a prefill and half a GB for the allocator's gaps. A prefill decodes one
        # packed weight at a time to bf16; the largest is that of gate and up, 2·I × D numbers. A
        # decoding row takes its scratch memory of attention, and its logits twice in fp32. With
        # top-p a logit takes up to 20 bytes.
        reserved = 4 * c.hidden_size * c.intermediate_size + prefill_bytes(c, prefill) + 5e8
        logits = (20 if top_p < 1 else 8) * c.vocab_size
        reserved += slots * (logits + scratch_bytes(c, length))
        torch.cuda.empty_cache()  # what the allocator still holds is too fragmented to count
        left = free_memory() - reserved
        return max(0, int(left // (self.page_size * cached_bytes(c))))


def free_memory():
    """→ how many bytes PyTorch's allocator may still take from the GPU: --memory-gb limits it."""
    free, total = torch.cuda.mem_get_info()
    allowed = total * torch.cuda.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.memory_reserved())


def _put_back_all(running, waiting, rollout, draw):
    """After an error put the running rows back, at the head of the queue → how many had ended.

    The steps before the error may have drawn tokens that the host has not read. So the lengths are
    read from the Rollout.
    """
    lengths, finished = rollout.lengths.tolist(), rollout.finished.tolist()
    ended = 0
    for sequence in reversed(running):
        length = lengths[sequence.row]
        if finished[sequence.row] or length == draw.max_new_tokens:
            ended += 1
            continue
        sequence.position = len(sequence.prompt) - 1 + length
        sequence.pages = []
        waiting.appendleft(sequence)
    return ended


def cached_bytes(config):
    """→ bytes of one token's keys and values in all layers, in bf16."""
    return 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)


def scratch_bytes(config, length):
    """→ bytes of a decode step's partial sums of attention, for a row of `length` tokens."""
    pieces = _power_of_two(math.ceil(length / attention.SPLIT))
    return 4 * pieces * config.num_attention_heads * (head_dim(config) + 2)


def prefill_bytes(config, tokens):
    """→ bytes of the activations of so many prompt tokens, at the MLP of a layer.

    A token has the residual stream of D numbers in fp32 and at most four tensors of D numbers in
    bf16 (12·D bytes). It also has gate, up and their product, of I numbers each in bf16 (6·I
    bytes).
    """
    return tokens * (12 * config.hidden_size + 6 * config.intermediate_size)


def _power_of_two(n):
    """→ the smallest power of two that is at least n, for n ≥ 1."""
    return 1 << (n - 1).bit_length()


class _Batch:
    """Continuous batching: the KV cache, the rows that run, and the CUDA graphs of their decode
    steps.
    """

    def __init__(self, sampler, rollout, draw):
        self.sampler, self.model, self.stats = sampler, sampler.model, sampler.stats
        self.rollout, self.draw = rollout, draw
        slots, pages = self.stats["slots"], self.stats["pages"]
        self.slots = slots
        self.page_size = sampler.page_size
        c, device = self.model.config, self.model.device
        self.cuda = device.type == "cuda"
        shape = (c.num_hidden_layers, pages, c.num_key_value_heads, self.page_size, head_dim(c))
        # zeros, not empty: on a CPU a masked position has weight 0, and 0 · NaN would be NaN
        self.cache = attention.KVCache(
            k=torch.zeros(shape, dtype=self.model.dtype, device=device),
            v=torch.zeros(shape, dtype=self.model.dtype, device=device),
            # of the pieces that the attention kernel has finished, for each row and KV head
            counters=torch.zeros(slots * shape[2], dtype=torch.int32, device=device),
        )
        self.pool = PagePool(pages)
        # The memory of Rows, a line for each field. An even width aligns every line at 16 bytes, so
        # that Triton compiles a kernel once.
        self.table = torch.zeros(
            len(Rows._fields), slots + slots % 2, dtype=torch.long, device=device
        )
        self.rows = Rows(*self.table)
        self.most_pieces = math.ceil(rollout.tokens.shape[1] / attention.SPLIT)
        blocks = math.ceil(self.most_pieces * attention.SPLIT / self.page_size)
        self.block_table = torch.zeros(slots, blocks, dtype=torch.long, device=device)
        self.full = 0  # rows that ran after the last admission
        self.graphs, self.graph_memory = {}, None  # (rows, pieces) → graph; memory that they share
        self.requested = None  # (rows, pieces) at the last call of pick_graph

    def run(self, waiting, running, bar):
        """Sample until every row has ended. waiting: deque of Sequences. running: a list of them,
        the oldest first, kept up to date.
        """
        while waiting or running:
            # A small prefill is slow. So wait until an eighth of the rows, or as many rows as wait,
            # have left the batch.
            if len(running) + min(len(waiting), math.ceil(self.full / 8)) <= self.full:
                self.admit(waiting, running)
            self.reserve(waiting, running)
            self.decode(running)
            bar.update(self.retire(running))

    # --- admit: pages and prefill

    def admit(self, waiting, running):
        """Start waiting rows while slots and pages last. A row shares the prompt's pages with a
        running row of its group. Prefill a row if none runs, or if it has answer tokens already.
        """
        began = time.perf_counter()
        older, group_size = len(running), self.draw.group_size
        with_prompt = {sequence.row // group_size: sequence for sequence in running}
        growing = sum(self.will_grow(sequence) for sequence in running)
        prefills, sources, copies = [], [], []
        while waiting and len(running) < self.slots:
            sequence = waiting[0]
            sibling = with_prompt.setdefault(sequence.row // group_size, sequence)
            whole = (len(sequence.prompt) - 1) // self.page_size
            shared = [] if sibling is sequence else sibling.pages[:whole]
            missing = self.pages_ahead(sequence) - len(shared)
            # Keep a free page for each running row that may need more, or rows would soon be put
            # back.
            if running and missing + growing > len(self.pool.free):
                break
            waiting.popleft()
            self.pool.share(shared)
            sequence.pages = shared + self.pool.take(missing)
            running.append(sequence)
            growing += self.will_grow(sequence)
            if sibling is sequence or sequence.position >= len(sequence.prompt):
                prefills.append((sequence, len(shared) * self.page_size))
            else:  # the page of the prompt's last token, which each row writes to a page of its own
                sources.append(sibling.pages[whole])
                copies.append(sequence.pages[whole])
        self.full = len(running)
        if len(running) == older:
            return
        self.write_rows(running, older)
        self.prefill(prefills)
        if copies:
            source, copy = torch.tensor([sources, copies], device=self.table.device)
            for x in (*self.cache.k, *self.cache.v):  # (pages, Hkv, PAGE, Dh): of each layer
                x[copy] = x[source]
        self.clock("prefill_s", began)

    def pages_ahead(self, sequence, steps=STEPS):
        """→ how many pages a row needs for so many steps more."""
        most = len(sequence.prompt) + self.draw.max_new_tokens - 1
        return math.ceil(min(sequence.position + steps, most) / self.page_size)

    def will_grow(self, sequence):
        """→ bool: the longest possible answer needs more pages than the row has."""
        return self.pages_ahead(sequence, self.draw.max_new_tokens) > len(sequence.pages)

    def write_rows(self, running, start):
        """Write the running rows from number `start` on into the GPU's Rows."""
        places = [(sequence.row, sequence.position) for sequence in running[start:]]
        row, position = torch.tensor(places, device=self.table.device).T
        new = Rows(
            row=row,
            last_token=self.rollout.tokens[row, position],
            position=position,
            number=self.draw.first_sequence + row,
        )
        self.table[:, start : len(running)] = torch.stack(new)

    def prefill(self, sequences):
        """Compute keys and values of all tokens of each row but its newest token.

        sequences: pairs (Sequence, start). From position `start` on, keys and values are written
        into the row's pages. Earlier positions lie in pages that the row shares with its group.
        """
        part, tokens = [], 0
        for sequence, start in sequences:
            if part and tokens + sequence.position > self.stats["prefill"]:
                self.prefill_part(part)
                part, tokens = [], 0
            if sequence.position > 0:
                part.append((sequence, start))
                tokens += sequence.position
        if part:
            self.prefill_part(part)

    def prefill_part(self, part):
        """One forward pass of prefill, over the texts of some sequences in one flat row."""
        texts, token, page, offset = [], [], [], []
        end = 0  # of the flat row so far
        for sequence, start in part:
            texts.append(self.rollout.tokens[sequence.row, : sequence.position])
            position = torch.arange(start, sequence.position)
            token.append(end + position)
            page.append(torch.tensor(sequence.pages)[position // self.page_size])
            offset.append(position % self.page_size)
            end += sequence.position
        device = self.model.device
        places = attention.Places(*(torch.cat(x).to(device) for x in (token, page, offset)))
        groups = [(sequence.position, []) for sequence, _ in part]  # each text has no answers
        attend = attention.Packed(groups, device, self.cache, places)
        self.model(torch.cat(texts), attend.positions, attend)

    # --- decode

    def reserve(self, waiting, running):
        """Give each running row the pages of its next steps, the oldest row first. If too few are
        free, put the youngest row back. The oldest never waits: all pages hold any one row.
        """
        i = 0
        while i < len(running):
            missing = self.pages_ahead(running[i]) - len(running[i].pages)
            if missing > len(self.pool.free):
                youngest = running.pop()
                self.pool.release(youngest.pages)
                youngest.pages = []
                waiting.appendleft(youngest)
                self.stats["put_back"] += 1
                continue
            running[i].pages += self.pool.take(missing)
            i += 1
        blocks = max(len(sequence.pages) for sequence in running)
        table = [s.pages + [0] * (blocks - len(s.pages)) for s in running]
        # by way of NumPy: torch.tensor reads nested lists slowly
        self.block_table[: len(running), :blocks] = torch.from_numpy(np.array(table))

    def decode(self, running):
        """Draw up to 8 tokens for each running row, then copy each row's position from the GPU."""
        size, steps = len(running), 1
        if self.cuda:  # one graph for all sizes up to a power of two
            size = min(self.slots, _power_of_two(size))
            newest = min(s.position - len(s.prompt) + 1 for s in running)  # the fewest tokens
            steps = min(STEPS, self.draw.max_new_tokens - newest)
        self.rows.position[len(running) :] = -1  # the graph's other rows count as ended
        longest = max(sequence.position for sequence in running) + steps
        pieces = _power_of_two(math.ceil(longest / attention.SPLIT))
        key = self.pick_graph(size, min(self.most_pieces, max(MIN_PIECES, pieces)))
        began = time.perf_counter()
        if self.cuda and key not in self.graphs:
            steps -= self.capture(key)
            began = self.clock("capture_s", began)
        for _ in range(steps):
            if self.cuda:
                self.graphs[key].replay()
            else:
                self.step(*key)
        self.stats["steps"] += steps
        for sequence, position in zip(running, self.rows.position.tolist(), strict=False):
            sequence.position = position
        self.clock("decode_s", began)

    def capture(self, key):
        """Capture the graph of a step → how many steps were made on the way, 0 or 1."""
        # The number of pieces only sets the size of a launch, so another one loads no new kernel.
        rows, _ = key
        kernels = rows, self.draw.temperature == 0, self.draw.top_p < 1, len(self.draw.stops)
        made = 0
        if kernels not in self.sampler.loaded:
            # Call the step once, outside capture: CUDA cannot load its kernels while capturing.
            self.step(*key)
            self.sampler.loaded.add(kernels)
            made = 1
        graph = torch.cuda.CUDAGraph()
        self.graphs[key] = graph
        with torch.cuda.graph(graph, pool=self.graph_memory):
            self.step(*key)
        self.graph_memory = graph.pool()
        return made

    def pick_graph(self, size, pieces):
        """→ (rows, pieces) of the graph to replay: a captured one that is large enough. If there is
        none, or if this very size is requested twice in a row, it is the requested one. A capture
        costs many steps, and short answers end sooner.
        """
        before, self.requested = self.requested, (size, pieces)
        larger = [key for key in self.graphs if key[0] >= size and key[1] >= pieces]
        if larger and before != self.requested:
            return min(larger)
        return self.requested

    def step(self, size, pieces):
        """Draw one more token for each running row: what a graph captures."""
        rows, draw = Rows(*self.table[:, :size]), self.draw
        attend = attention.Paged(self.cache, self.block_table[:size], rows.position, pieces)
        logits = self.model.logits(self.model(rows.last_token, rows.position, attend))
        if draw.top_p < 1:
            logits = sampling.nucleus(logits, draw.temperature, draw.top_p)
        index = self.rollout.lengths[rows.row]  # of the new token in its answer
        token, logprob = sampling.sample(
            logits, draw.temperature, draw.seed, draw.step, rows.number, index
        )
        append(token, logprob, rows, draw, self.rollout)

    # --- retire

    def retire(self, running):
        """Free the pages of ended rows, and move the rows that go on to the front of the batch, in
        their order → how many have ended.
        """
        kept = []
        for i, sequence in enumerate(running):
            if sequence.position >= 0:
                kept.append(i)
            else:
                self.pool.release(sequence.pages)
        ended = len(running) - len(kept)
        if ended:
            self.table[:, : len(kept)] = self.table[:, torch.tensor(kept, dtype=torch.long)]
            running[:] = [running[i] for i in kept]
        return ended

    def clock(self, name, began):
        """Add the seconds since `began` to a statistic → the time now."""
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.stats[name] += now - began
        return now


def append(token, logprob, rows, draw, rollout):
    """Write each running row's new token to the Rollout; end the row at a stop token or at
    draw.max_new_tokens tokens.

    token (B,) int64, logprob (B,) f32: from sampling.sample. rows: Rows of B entries. Changed in
    place: rollout; rows.last_token, which takes the token; rows.position, which grows by 1, or
    becomes −1 when its row ends, and is then skipped.
    """
    if sampling.uses_kernels(logprob):
        _append_kernel[len(token),](
            # what was drawn, for which rows
            token,
            logprob,
            rows.row,
            rows.position,
            # when an answer ends
            draw.stops,
            len(draw.stops),
            draw.max_new_tokens,
            # receives the token, which the model reads next
            rows.last_token,
            # the Rollout
            rollout.tokens,
            rollout.logprobs,
            rollout.lengths,
            rollout.finished,
            rollout.tokens.shape[1],
            **launch_options(token),
            num_warps=1,
        )
        return
    running = (rows.position >= 0).nonzero()[:, 0]
    token, row, position = token[running], rows.row[running], rows.position[running] + 1
    rollout.tokens[row, position] = token
    rollout.logprobs[row, position] = logprob[running]
    rollout.lengths[row] += 1
    rollout.finished[row] = torch.isin(token, draw.stops)
    ended = rollout.finished[row] | (rollout.lengths[row] >= draw.max_new_tokens)
    rows.position[running] = torch.where(ended, -1, position)
    rows.last_token[running] = token


@jit(do_not_specialize=["limit", "width"])
def _append_kernel(
    token,
    logprob,
    rows,
    positions,
    stops,
    n_stops,
    limit,
    last,
    tokens,
    logprobs,
    lengths,
    finished,
    width,
    PDL: constexpr,
):
    wait_for_predecessor(PDL)
    b = tl.program_id(0)
    at = tl.load(positions + b) + 1
    if at > 0:
        row, new = tl.load(rows + b), tl.load(token + b)
        length = tl.load(lengths + row) + 1
        stop = 0
        for i in range(n_stops):
            stop |= (tl.load(stops + i) == new).to(tl.int32)
        tl.store(tokens + row * width + at, new)
        tl.store(logprobs + row * width + at, tl.load(logprob + b))
        tl.store(lengths + row, length)
        tl.store(finished + row, stop != 0)
        tl.store(positions + b, tl.where((stop != 0) | (length >= limit), -1, at))
        tl.store(last + b, new)
