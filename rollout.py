"""The sampler: a group of answers to each prompt, with the log-probability of every token as it was drawn.

    prompts wait ──► prefill: a prompt's tokens but the last, once for the rows of its group that run
                        ▲                     │
        free slots wait │                     ▼
                        └── rows that end ◄── step × 8: the last token of each row through the model, sample,
                                              write it to the Rollout, stop test: all in one CUDA graph

A step begins with a token that is not in the cache yet, at first the last of the prompt, and ends with the
next one, so prefill needs no sampling of its own. The host does not see single steps: it replays the graph 8
times, reads which rows are over, moves the others up and refills. What a row needs (its slot, position and
last token) is data on the GPU, so the graph depends on two numbers only, rounded up to powers of two: rows in
the batch and pieces of 256 positions in the longest. Each row of a group has a copy of the prompt's keys and
values, but all read that of the first which runs, in whole tiles, so that L2 has it for the others. There are
as many slots as the free memory holds. A graph is captured when it is needed; while a larger one is there,
only when it was wanted twice. Slots and graphs go when `generate` returns: the update can have the memory,
and no graph outlives the tensors it reads. On a CPU a step is called, not replayed, and nothing is rounded.

It runs the model that trains, on the same tensors, so there are no weights to hand over, AQN's noise is in
exactly the modules that sample, and the recorded log-probabilities are those of the policy that sampled.
Randomness is a function of (seed, step, number of the sequence, position): see gumbel.py.

Training knows no top-k and no top-p: what the sampler cut off the trainer would not, and their ratio would be
wrong. Evaluation, which has no ratio, may ask for top-p.
Needs: torch, tqdm; ops.py, gumbel.py, model.py.
"""

import time
from collections import deque
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import gumbel
import ops
from model import KVCache, head_dim

SLOTS = 256                        # sequences that run at once, at most
STEPS = 8                          # between two looks of the host at which rows are over
PREFILL_TOKENS = 8192              # prompt tokens that go through the model at a time, or one longer prompt


class Rollout(NamedTuple):
    """B = P·G rows, the row of prompt p and sample g is p·G + g; T is the longest prompt plus answer."""
    tokens: torch.Tensor           # (B, T) int64: prompt, answer, then zeros
    logprobs: torch.Tensor         # (B, T) f32 of each answer token as it was drawn, 0 elsewhere
    lengths: torch.Tensor          # (B,) int64 answer tokens, the sampled end token included
    finished: torch.Tensor         # (B,) bool: ended by itself, not cut off by max_new_tokens
    prompt_lengths: torch.Tensor   # (B,) int64

    def answers(self):
        """Each row's answer as a list of token ids, without the end token that finished it."""
        ends = (self.prompt_lengths + self.lengths - self.finished.long()).tolist()
        return [row[p:e] for row, p, e in
                zip(self.tokens.tolist(), self.prompt_lengths.tolist(), ends, strict=True)]

    def rows(self, index):
        """Some rows as a Rollout of their own, cut to the longest of them. index: a range or (n,) int64."""
        index = torch.as_tensor(index, device=self.tokens.device)
        picked = Rollout(*(field[index] for field in self))
        used = int((picked.prompt_lengths + picked.lengths).max())
        return picked._replace(tokens=picked.tokens[:, :used], logprobs=picked.logprobs[:, :used])

    @staticmethod
    def join(rollouts):
        """Rows of several rollouts under each other, padded on the right to the widest."""
        widest = max(r.tokens.shape[1] for r in rollouts)
        return Rollout(*(torch.cat([F.pad(f, (0, widest - f.shape[1])) if f.dim() == 2 else f
                                    for f in fields])
                         for fields in zip(*rollouts, strict=True)))

    def micro_batches(self, rows, budget):
        """(n,) row numbers → batches of like length: at most `budget` tokens, padded, or one longer row."""
        length = (self.prompt_lengths + self.lengths).tolist()
        batches = []
        for row in sorted(rows.tolist(), key=lambda b: (-length[b], b)):
            if batches and (len(batches[-1]) + 1) * length[batches[-1][0]] <= budget:
                batches[-1].append(row)
            else:
                batches.append([row])
        return [torch.tensor(b, device=rows.device) for b in batches]


class Sampler:
    """slots: sequences that run at once, at most; fewer where the GPU's memory is short.

    deterministic: on a GPU an answer depends on its prompt and number and generate's arguments alone, bit for
    bit: a step has `slots` rows, however many of them run, and prompts are prefilled one at a time.
    """

    def __init__(self, model, slots=SLOTS, deterministic=False):
        self.model, self.slots, self.deterministic = model, slots, deterministic
        # of the last generate: seconds, steps replayed, slots and their positions, prompt tokens at once
        self.stats = dict(slots=0, length=0, at_once=0)
        self.loaded = set()            # steps whose kernels are on the GPU: (rows, greedy, cut, stop tokens)

    @torch.no_grad()
    def generate(self, prompts, group_size, max_new_tokens, temperature, stop_ids, seed, step, first=0,
                 progress="", top_p=1.0):
        """Sample group_size answers to each prompt (a list of token ids) → Rollout.

        stop_ids: tokens that end an answer. temperature 0 is greedy. first: the global number of the first
        sequence: ranks that share a step draw different bits. progress: a progress bar's label, "" for none.
        top_p: for evaluation only, sample from the nucleus alone (see gumbel.nucleus); the log-probabilities
        are then those of the distribution that was cut and renormalised, which is not the trainer's.
        ValueError: an empty prompt, a prompt that leaves no room in the model's context.
        torch.OutOfMemoryError: not even one sequence fits; deterministic: the slots do not.
        """
        context = self.model.config.max_position_embeddings
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty: there is nothing to go on from")
            if len(prompt) + max_new_tokens > context:
                raise ValueError(f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones it "
                                 f"must fit into the model's context of {context}: "
                                 "shorten it or lower --max-new-tokens")
        device, B = self.model.device, len(prompts) * group_size
        longest = max(map(len, prompts))
        length = longest + max_new_tokens
        ids = torch.tensor([p + [0] * (length - len(p)) for p in prompts], device=device)      # (P, T)
        prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)                # (P,)
        rollout = Rollout(tokens=ids.repeat_interleave(group_size, 0),
                          logprobs=torch.zeros(B, length, device=device),
                          lengths=torch.zeros(B, dtype=torch.long, device=device),
                          finished=torch.zeros(B, dtype=torch.bool, device=device),
                          prompt_lengths=prompt_lengths.repeat_interleave(group_size))
        stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        waiting = deque((row, prompts[row // group_size]) for row in range(B))
        at_once = max(longest, min(PREFILL_TOKENS, len(prompts) * longest))
        slots = self.slots if self.deterministic else min(self.slots, self._room(length, at_once, top_p), B)
        self.stats = dict(prefill_s=0.0, capture_s=0.0, decode_s=0.0, steps=0, slots=slots, length=length,
                          at_once=at_once)
        with tqdm(total=B, desc=progress, unit="seq", leave=False, disable=None if progress else True) as bar:
            while waiting:
                running = []
                try:
                    draw = temperature, seed, step, first, top_p
                    batch = _Batch(self, slots, rollout, group_size, stops, max_new_tokens, draw)
                    batch.run(waiting, running, min(group_size, -(-slots // 4)), bar)
                except torch.OutOfMemoryError:
                    if slots == 1 or self.deterministic:
                        raise
                    slots = self.stats["slots"] = -(-slots // 2)
                    tqdm.write(f"out of memory while sampling: going on with {slots} sequences at a time")
                    # what ran starts again and draws the same: its random bits come from its number
                    for row, prompt, _ in reversed(running):
                        waiting.appendleft((row, prompt))
                        rollout.lengths[row] = 0
                        rollout.tokens[row, len(prompt):] = 0
                        rollout.logprobs[row] = 0
                batch = None
                torch.cuda.empty_cache()         # what the update keeps must not settle where slots were
        return rollout.rows(range(B))

    def _room(self, length, prefill, top_p):
        """How many slots of `length` positions the free memory holds beside a prefill of so many tokens."""
        model, c = self.model, self.model.config
        if model.device.type == "cpu":
            return self.slots
        # beside the slots: a layer's largest weight in bf16, the activations of a prefill, and half a GB in
        # which the allocator may leave gaps. A slot has its keys and values, and its logits twice; to
        # cut them takes 48 bytes a token of the vocabulary: as they came, sorted, their ids, and sort()'s 32
        beside = 4 * c.hidden_size * c.intermediate_size + prefill_bytes(c, prefill) + 5e8
        torch.cuda.empty_cache()             # what it still keeps after this is in pieces that hold no slots
        free, total = torch.cuda.mem_get_info()
        allowed = total * torch.cuda.get_per_process_memory_fraction()
        free = min(free, allowed - torch.cuda.memory_reserved())
        logits = (48 if top_p < 1 else 8) * c.vocab_size
        return max(1, int((free - beside) // (length * cached_bytes(c) + logits)))


def cached_bytes(config):
    """Of one token's keys and values, in bf16."""
    return 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)


def prefill_bytes(config, tokens):
    """Of the activations of so many prompt tokens, in bf16 and with a residual stream in fp32."""
    return tokens * (12 * config.hidden_size + 6 * config.intermediate_size)


class _Batch:
    """The rows that run: on the GPU what a step reads and writes, on the host which rows they are."""

    def __init__(self, sampler, slots, rollout, group, stops, limit, draw):
        self.sampler, self.model, self.stats = sampler, sampler.model, sampler.stats
        self.rollout, self.group, self.stops, self.limit, self.draw = rollout, group, stops, limit, draw
        self.cache = KVCache(self.model, slots, rollout.tokens.shape[1])
        # row i of the batch: its row in the rollout, its slot, the token that goes in next, its position, the
        # number that its random bits come from, how many positions its group shares, the slot to read them in
        # (an even number of columns: each row begins at a multiple of 16 bytes, so that one kernel fits all)
        self.state = torch.zeros(7, slots + slots % 2, dtype=torch.long, device=self.model.device)
        self.slots = slots
        self.cuda, self.graphs, self.pool = self.model.device.type == "cuda", {}, None
        self.requested = None                          # by the last chunk of steps: (rows, pieces)

    def run(self, waiting, running, enough, bar):
        """Until all are over. waiting: (row, prompt); those that run are in running, each with its slot.
        enough: so many free slots are worth a prefill."""
        slots = self.slots
        free = list(range(slots))
        positions = []                                              # of each running row
        while waiting or running:
            if waiting and len(free) >= min(enough, len(waiting)):
                new = [(*waiting.popleft(), free.pop()) for _ in range(min(len(free), len(waiting)))]
                running += new
                positions += [len(prompt) - 1 for _, prompt, _ in new]
                self.admit(new, running)
            size, steps = len(running), 1
            if self.cuda:                              # one graph for all up to the next power of two
                size = min(slots, 1 << (size - 1).bit_length())
                most = max(len(p) - at for (_, p, _), at in zip(running, positions, strict=True))
                steps = min(STEPS, self.limit - 1 + most)
            size = slots if self.sampler.deterministic else size
            self.state[3, len(running):] = -1          # the rest of them is over
            positions = self.advance(size, max(positions) + steps, steps, bar)[:len(running)]
            going = [i for i, at in enumerate(positions) if at >= 0]
            if len(going) < len(running):
                bar.update(len(running) - len(going))
                free += [slot for (*_, slot), at in zip(running, positions, strict=True) if at < 0]
                running[:], positions = ([x[i] for i in going] for x in (running, positions))
                self.state[:, :len(going)] = self.state[:, torch.tensor(going, dtype=torch.long)]
                self.lead(len(going))
            if not bar.disable:
                rate = int(self.rollout.lengths.sum()) / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(f"{len(running)} running, {rate:.0f} tok/s", refresh=False)

    def admit(self, new, running):
        """Make new (row, prompt, slot)s, the last of those that run, ready to: prefill their prompts, or copy
        that of a row of their group which runs already."""
        began, device = time.perf_counter(), self.state.device
        first, older = self.draw[3], len(running) - len(new)
        state = [(row, slot, prompt[-1], len(prompt) - 1, first + row, len(prompt) - 1)
                 for row, prompt, slot in new]
        self.state[:6, older:len(running)] = torch.tensor(state, device=device).T
        self.lead(len(running))
        cached = {row // self.group: slot for row, _, slot in running[:older]}
        slots_of = {}                                  # prompt → its rows' slots
        for row, prompt, slot in new:
            if row // self.group in cached:
                for x in (self.cache.k, self.cache.v):
                    x[:, slot, :, :len(prompt) - 1] = x[:, cached[row // self.group], :, :len(prompt) - 1]
            else:
                slots_of.setdefault(tuple(prompt[:-1]), []).append(slot)
        prompts = sorted((p for p in slots_of if p), key=len)
        while prompts:
            fit = 1 if self.sampler.deterministic else max(1, PREFILL_TOKENS // len(prompts[-1]))
            group, prompts = prompts[-fit:], prompts[:-fit]
            # two columns at least: one would be a decode step. What padding leaves in the cache is not read:
            # a row reads only positions that it has passed, and writes them in passing
            width = max(2, len(group[-1]))
            ids = torch.tensor([p + (0,) * (width - len(p)) for p in group], device=device)
            self.cache.slots = torch.tensor([s for p in group for s in slots_of[p]], device=device)
            self.cache.of = torch.tensor([i for i, p in enumerate(group) for _ in slots_of[p]], device=device)
            self.model(ids, torch.arange(width, device=device).expand_as(ids), self.cache)
        self.clock("prefill_s", began)

    def lead(self, size):
        """The first row of each group reads its prompt in its own slot, the others read it there too."""
        rows = self.state[0, :size]                          # ascending: they wait, and run, in their order
        self.state[6, :size] = self.state[1, torch.searchsorted(rows, rows // self.group * self.group)]

    def advance(self, size, longest, steps, bar):
        """Some steps of the first `size` rows, none of which comes beyond `longest` positions → positions."""
        most = -(-self.rollout.tokens.shape[1] // ops.SPLIT)
        key = self.choose(size, min(most, 1 << (longest // ops.SPLIT).bit_length()))
        began = time.perf_counter()
        if self.cuda and key not in self.graphs:
            kernels = key[0], self.draw[0] == 0, self.draw[-1] < 1, len(self.stops)
            if kernels not in self.sampler.loaded:
                # a step as it is called: it compiles and loads them, which cannot be done while capturing
                self.step(*key)
                self.sampler.loaded.add(kernels)
                called, steps = self.clock("capture_s", began), steps - 1
                if called - began > 1 and not bar.disable:
                    tqdm.write(f"kernels for {key[0]} rows compiled in {called - began:.1f} s")
                began = called
            self.graphs[key] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self.step(*key)
            self.pool = graph.pool()
            began = self.clock("capture_s", began)
        for _ in range(steps):
            self.graphs[key].replay() if self.cuda else self.step(*key)
        self.stats["steps"] += steps
        positions = self.state[3].tolist()
        self.clock("decode_s", began)
        return positions

    def choose(self, size, pieces):
        """The graph to replay: of this size, or, until this was wanted twice in a row, a larger one if one is
        there. Capturing takes as long as many steps of a small model, and short answers end within them."""
        before, self.requested = self.requested, (size, pieces)
        larger = [key for key in self.graphs if key[0] >= size and key[1] >= pieces]
        return min(larger) if larger and before != self.requested else self.requested

    def step(self, size, pieces):
        """One token more for each row that is not over."""
        rows, slots, last, positions, number, shared, leaders = self.state[:, :size]
        cache = self.cache
        cache.slots, cache.shared, cache.leaders, cache.pieces = slots, shared, leaders, pieces
        temperature, seed, step, _, top_p = self.draw
        logits = self.model.logits(self.model(last[:, None], positions[:, None], cache)[:, 0])
        if top_p < 1:
            logits = gumbel.nucleus(logits, temperature, top_p)
        token, logprob = gumbel.sample(logits, temperature, seed, step, number, self.rollout.lengths[rows])
        gumbel.append(token, logprob, rows, positions, self.stops, self.limit, last, self.rollout)

    def clock(self, name, began):
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.stats[name] += now - began
        return now
