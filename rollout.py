"""The sampler: a group of answers to each prompt, and the log-probability of every token as it was
drawn.

    waiting prompts ──► prefill: a prompt's tokens but the last, once for the rows of its group
                        ▲                     │
             free slots │                     ▼
                        └── finished rows ◄── 8 steps, each one CUDA graph: last token of each row
                                              → model → sample → write it to the Rollout → stop test

A step reads each row's newest token, which is not in the cache yet (at first the prompt's last),
and draws the next one; so prefill draws nothing. The host replays the graph of a step 8 times, then
reads which rows have finished, moves the other rows up and refills the free slots. A row's slot,
position and last token are data on the GPU. So a graph depends on two numbers only, each rounded up
to a power of two: the rows of the batch, and the pieces of 256 positions in the longest row, at
least 4 to save captures. A row has a copy of its prompt's keys and values, but on a GPU it reads
whole tiles of them in its group's first row, through L2. generate makes as many slots as free
memory holds, and captures graphs as it needs them. It frees slots and graphs at the end: the update
needs the memory, and no graph may outlive what it reads. A CPU uses no graphs.

The sampler runs the model that trains, on the same tensors. So no weights are handed over, AQN's
noise is in exactly the modules that sample, and the recorded log-probabilities are those of the
policy that sampled. Random bits depend on (seed, step, sequence number, index in the answer) alone:
see ops/sampling.py.

Training takes no top-k and no top-p: the trainer's probabilities would include the tokens that the
sampler excludes, and their ratio would be wrong. Evaluation computes no ratio and may use top-p.
Needs: torch, tqdm; on a GPU also triton; ops/{attention,sampling}.py, model.py.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from model import KVCache, answer_mask, head_dim
from ops import attention, sampling
from ops.sampling import launch_options, wait_for_predecessor

try:
    import triton
    import triton.language as tl

    jit, constexpr = triton.jit, tl.constexpr
except ImportError:  # a CPU machine may lack Triton: its kernel is then never launched
    jit, constexpr = (lambda kernel=None, **options: kernel or jit), int

SLOTS = 256  # most sequences that run at once
STEPS = 8  # decode steps between the host's reads of which rows have finished
# most prompt tokens, with padding, in one forward pass; a longer prompt is prefilled alone
PREFILL_TOKENS = 8192
MIN_PIECES = 4  # pieces of 256 positions that a graph covers at least: fewer graphs to capture


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
        """→ (B, T) bool: where tokens are an answer's, its end token included."""
        return answer_mask(self.tokens, self.prompt_lengths, self.lengths)

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

    def micro_batches(self, rows, budget):
        """Row numbers (n,) → [(k,), …], longest first: each at most `budget` padded tokens, or one
        row.
        """
        length = (self.prompt_lengths + self.lengths).tolist()
        batches = []
        for row in sorted(rows.tolist(), key=lambda b: (-length[b], b)):
            if batches and (len(batches[-1]) + 1) * length[batches[-1][0]] <= budget:
                batches[-1].append(row)
            else:
                batches.append([row])
        return [torch.tensor(b, device=rows.device) for b in batches]


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
    """A running answer, as the host sees it."""

    row: int  # in the Rollout
    prompt: list  # of token ids
    slot: int  # in the KV cache
    position: int  # of its newest token; −1: the answer has ended


class Rows(NamedTuple):
    """The running answers, as the GPU sees them: entry i of each tensor belongs to row i of the
    batch. All are (slots,) int64.
    """

    row: torch.Tensor  # in the Rollout
    slot: torch.Tensor  # in the KV cache
    last_token: torch.Tensor  # which the model reads next
    position: torch.Tensor  # of that token; −1: the answer has ended
    number: torch.Tensor  # global number of the sequence, which fixes its random bits
    shared_length: torch.Tensor  # positions of the prompt, which its group shares
    shared_slot: torch.Tensor  # where the row reads those positions


class Sampler:
    """slots: most sequences that run at once; if a GPU's memory is short, fewer do."""

    def __init__(self, model, slots=SLOTS):
        self.model, self.slots = model, slots
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
        exceeds the model's context. torch.OutOfMemoryError: not even one sequence fits.
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
        longest = length - max_new_tokens
        prefill = max(longest, min(PREFILL_TOKENS, len(prompts) * longest))
        slots = min(self.slots, self._room(length, prefill, top_p), rows)
        # length: positions of a slot; prefill: most prompt tokens of a forward pass
        self.stats = dict(slots=slots, length=length, prefill=prefill, steps=0)
        self.stats |= dict.fromkeys(("prefill_s", "capture_s", "decode_s"), 0.0)
        waiting = deque((row, prompts[row // group_size]) for row in range(rows))
        with tqdm(
            total=rows, desc=progress, unit="seq", leave=False, disable=None if progress else True
        ) as bar:
            while waiting:
                running = []
                try:
                    _Batch(self, slots, rollout, draw).run(waiting, running, bar)
                except torch.OutOfMemoryError:
                    if slots == 1:
                        raise
                    slots = math.ceil(slots / 2)
                    self.stats["slots"] = slots
                    tqdm.write(
                        f"out of memory while sampling: going on with {slots} sequences at a time"
                    )
                    _restart(running, waiting, rollout)
                # The batch is gone. Return its memory to CUDA, or the update's tensors fragment it.
                torch.cuda.empty_cache()
        return rollout.rows(range(rows))

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

    def _room(self, length, prefill, top_p):
        """→ how many slots of `length` positions fit into free memory beside a prefill of so many
        tokens.
        """
        model, c = self.model, self.model.config
        if model.device.type == "cpu":
            return self.slots
        # Reserve memory for a layer's largest weight in bf16, a prefill's activations, and half a
        # GB for the allocator's gaps. A slot takes its keys and values, and its logits twice in
        # fp32. With top-p a logit takes up to 20 bytes.
        reserved = 4 * c.hidden_size * c.intermediate_size + prefill_bytes(c, prefill) + 5e8
        torch.cuda.empty_cache()  # what the allocator still holds is too fragmented to count
        free, total = torch.cuda.mem_get_info()
        allowed = total * torch.cuda.get_per_process_memory_fraction()
        free = min(free, allowed - torch.cuda.memory_reserved())
        logits = (20 if top_p < 1 else 8) * c.vocab_size
        return max(1, int((free - reserved) // (length * cached_bytes(c) + logits)))


def _restart(running, waiting, rollout):
    """Put running sequences back to the head of the queue and clear their answers. Their numbers
    fix their random bits, so they draw the same tokens again.
    """
    for sequence in reversed(running):
        row, prompt = sequence.row, sequence.prompt
        waiting.appendleft((row, prompt))
        rollout.lengths[row] = 0
        rollout.tokens[row, len(prompt) :] = 0
        rollout.logprobs[row] = 0


def cached_bytes(config):
    """→ bytes of one token's keys and values in all layers, in bf16."""
    return 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)


def prefill_bytes(config, tokens):
    """→ bytes of the activations of so many prompt tokens, in bf16 with a residual stream in
    fp32.
    """
    return tokens * (12 * config.hidden_size + 6 * config.intermediate_size)


def _power_of_two(n):
    """→ the smallest power of two that is at least n, for n ≥ 1."""
    return 1 << (n - 1).bit_length()


class _Batch:
    """Continuous batching: the KV cache of all slots, the rows that run in them, and the CUDA
    graphs of their decode steps.
    """

    def __init__(self, sampler, slots, rollout, draw):
        self.sampler, self.model, self.stats = sampler, sampler.model, sampler.stats
        self.slots, self.rollout, self.draw = slots, rollout, draw
        device = self.model.device
        self.cache = KVCache(self.model, slots, rollout.tokens.shape[1])
        # The memory of Rows, a line for each field. An even width aligns every line at 16 bytes, so
        # that Triton compiles a kernel once.
        self.table = torch.zeros(
            len(Rows._fields), slots + slots % 2, dtype=torch.long, device=device
        )
        self.rows = Rows(*self.table)
        self.cuda = device.type == "cuda"
        self.graphs, self.pool = {}, None  # (rows, pieces) → graph; the memory that graphs share
        self.requested = None  # (rows, pieces) at the last call of pick_graph

    def run(self, waiting, running, bar):
        """Sample until every row has finished. waiting: deque of (row, prompt). running: a list of
        Sequences, kept up to date.
        """
        free = list(range(self.slots))
        refill = math.ceil(self.slots / 8)  # free slots to wait for: a small prefill is slow
        while waiting or running:
            if waiting and len(free) >= min(refill, len(waiting)):
                new = []
                while waiting and free:
                    row, prompt = waiting.popleft()
                    new.append(Sequence(row, prompt, free.pop(), position=len(prompt) - 1))
                running += new
                self.admit(new, running)
            self.run_steps(running)
            ended = [sequence.slot for sequence in running if sequence.position < 0]
            if ended:
                bar.update(len(ended))
                free += ended
                self.remove_ended(running)

    def admit(self, new, running):
        """Prepare the Sequences `new`, which end the list `running`: prefill their prompts, or copy
        the keys and values of a row of their group that runs already.
        """
        began = time.perf_counter()
        older, group_size = len(running) - len(new), self.draw.group_size
        lines = []
        for sequence in new:
            lines.append(
                Rows(
                    row=sequence.row,
                    slot=sequence.slot,
                    last_token=sequence.prompt[-1],
                    position=sequence.position,
                    number=self.draw.first_sequence + sequence.row,
                    shared_length=sequence.position,
                    shared_slot=sequence.slot,  # share_prompts overwrites it
                )
            )
        self.table[:, older : len(running)] = torch.tensor(lines, device=self.table.device).T
        self.share_prompts(len(running))
        cached = {sequence.row // group_size: sequence.slot for sequence in running[:older]}
        slots_of = {}  # tokens to prefill → the slots that receive their keys and values
        for sequence in new:
            tokens, group = tuple(sequence.prompt[:-1]), sequence.row // group_size
            if group in cached:
                for x in (self.cache.k, self.cache.v):
                    x[:, sequence.slot, :, : len(tokens)] = x[:, cached[group], :, : len(tokens)]
            elif tokens:
                slots_of.setdefault(tokens, []).append(sequence.slot)
        self.prefill(slots_of)
        self.clock("prefill_s", began)

    def prefill(self, slots_of):
        """Compute keys and values of prompts and store them. slots_of: {tokens: slots}."""
        device = self.model.device
        prompts = sorted(slots_of, key=len)
        while prompts:  # the longest first
            fit = max(1, PREFILL_TOKENS // len(prompts[-1]))
            part, prompts = prompts[-fit:], prompts[:-fit]
            # A row overwrites each position of the padding before it reads that position.
            width = len(part[-1])
            ids = torch.tensor([tokens + (0,) * (width - len(tokens)) for tokens in part])
            slots, prompt_of_slot = [], []
            for i, tokens in enumerate(part):
                slots += slots_of[tokens]
                prompt_of_slot += [i] * len(slots_of[tokens])
            self.cache.slots = torch.tensor(slots, device=device)
            self.cache.prompt_of_slot = torch.tensor(prompt_of_slot, device=device)
            self.model.prefill(ids.to(device), self.cache)

    def share_prompts(self, size):
        """Let all rows of a group read their prompt in the slot of the group's first running row.
        The batch's rows are in ascending order, so searchsorted finds that row.
        """
        row = self.rows.row[:size]
        first_of_group = row // self.draw.group_size * self.draw.group_size
        leader = torch.searchsorted(row, first_of_group)
        self.rows.shared_slot[:size] = self.rows.slot[leader]

    def run_steps(self, running):
        """Draw up to 8 tokens for each running row, then copy each row's position from the GPU."""
        size, steps = len(running), 1
        if self.cuda:  # one graph for all sizes up to a power of two
            size = min(self.slots, _power_of_two(size))
            newest = min(s.position - len(s.prompt) + 1 for s in running)  # the fewest tokens
            steps = min(STEPS, self.draw.max_new_tokens - newest)
        self.rows.position[len(running) :] = -1  # the graph's other rows count as ended
        longest = max(sequence.position for sequence in running) + steps  # tokens of its slot
        most = math.ceil(self.rollout.tokens.shape[1] / attention.SPLIT)
        needed = (longest - 1) // attention.SPLIT + 1
        pieces = min(most, max(MIN_PIECES, _power_of_two(needed)))

        key = self.pick_graph(size, pieces)
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
        with torch.cuda.graph(graph, pool=self.pool):
            self.step(*key)
        self.pool = graph.pool()
        return made

    def pick_graph(self, size, pieces):
        """→ (rows, pieces) of the graph to replay: a captured one that is large enough, until this
        very size is requested twice in a row. A capture costs many steps, and short answers end
        sooner.
        """
        before, self.requested = self.requested, (size, pieces)
        larger = [key for key in self.graphs if key[0] >= size and key[1] >= pieces]
        if larger and before != self.requested:
            return min(larger)
        return self.requested

    def step(self, size, pieces):
        """Draw one more token for each running row: what a graph captures."""
        rows, draw, cache = Rows(*self.table[:, :size]), self.draw, self.cache
        cache.slots = rows.slot
        cache.shared = rows.shared_length
        cache.leaders = rows.shared_slot
        cache.pieces = pieces
        logits = self.model.logits(self.model.decode(rows.last_token, rows.position, cache))
        if draw.top_p < 1:
            logits = sampling.nucleus(logits, draw.temperature, draw.top_p)
        index = self.rollout.lengths[rows.row]  # of the new token in its answer
        token, logprob = sampling.sample(
            logits, draw.temperature, draw.seed, draw.step, rows.number, index
        )
        append(token, logprob, rows, draw, self.rollout)

    def remove_ended(self, running):
        """Move the rows that go on to the front of the batch, in their order."""
        kept = [i for i, sequence in enumerate(running) if sequence.position >= 0]
        running[:] = [running[i] for i in kept]
        self.table[:, : len(kept)] = self.table[:, torch.tensor(kept, dtype=torch.long)]
        self.share_prompts(len(kept))

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
