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

import time
from collections import deque
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
STEPS = 8  # steps between the host's reads of which rows have finished
PREFILL_TOKENS = 8192  # most prompt tokens in one forward pass; a longer prompt has its own


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


class Sampler:
    """slots: most sequences that run at once; if a GPU's memory is short, fewer do."""

    def __init__(self, model, slots=SLOTS):
        self.model, self.slots = model, slots
        # of the last generate; length: positions of a slot, prefill: prompt tokens of a forward
        # pass
        self.stats = dict(slots=0, length=0, prefill=0)
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
        first=0,
        progress="",
        top_p=1.0,
    ):
        """Sample group_size answers to each prompt (a list of token ids) → Rollout.

        stop_ids: tokens that end an answer. temperature 0 is greedy. first: the global number of
        the first sequence; give each rank its own, or ranks draw the same bits. progress: a bar's
        label, "" for none. top_p < 1, for evaluation only: sample from the renormalised nucleus
        (see sampling.nucleus). ValueError: an empty prompt, or one that with max_new_tokens exceeds
        the model's context. torch.OutOfMemoryError: not even one sequence fits.
        """
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
        device, B = self.model.device, len(prompts) * group_size
        longest = max(map(len, prompts))
        length = longest + max_new_tokens
        ids = torch.tensor([p + [0] * (length - len(p)) for p in prompts], device=device)  # (P, T)
        prompt_lengths = torch.tensor([len(p) for p in prompts], device=device)  # (P,)
        rollout = Rollout(
            tokens=ids.repeat_interleave(group_size, 0),
            logprobs=torch.zeros(B, length, device=device),
            lengths=torch.zeros(B, dtype=torch.long, device=device),
            finished=torch.zeros(B, dtype=torch.bool, device=device),
            prompt_lengths=prompt_lengths.repeat_interleave(group_size),
        )
        stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
        waiting = deque((row, prompts[row // group_size]) for row in range(B))
        prefill = max(longest, min(PREFILL_TOKENS, len(prompts) * longest))
        slots = min(self.slots, self._room(length, prefill, top_p), B)
        self.stats = dict(
            prefill_s=0.0,
            capture_s=0.0,
            decode_s=0.0,
            steps=0,
            slots=slots,
            length=length,
            prefill=prefill,
        )
        with tqdm(
            total=B, desc=progress, unit="seq", leave=False, disable=None if progress else True
        ) as bar:
            while waiting:
                running = []
                try:
                    draw = temperature, seed, step, first, top_p
                    batch = _Batch(self, slots, rollout, group_size, stops, max_new_tokens, draw)
                    batch.run(waiting, running, bar)
                except torch.OutOfMemoryError:
                    if slots == 1:
                        raise
                    slots = self.stats["slots"] = -(-slots // 2)
                    tqdm.write(
                        f"out of memory while sampling: going on with {slots} sequences at a time"
                    )
                    # restart the running rows: their numbers fix their random bits, so they draw
                    # the same
                    for row, prompt, _ in reversed(running):
                        waiting.appendleft((row, prompt))
                        rollout.lengths[row] = 0
                        rollout.tokens[row, len(prompt) :] = 0
                        rollout.logprobs[row] = 0
                batch = None
                # return KV memory to CUDA, or the update's tensors fragment it
                torch.cuda.empty_cache()
        return rollout.rows(range(B))

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
        beside = 4 * c.hidden_size * c.intermediate_size + prefill_bytes(c, prefill) + 5e8
        torch.cuda.empty_cache()  # what the allocator still holds is too fragmented to count
        free, total = torch.cuda.mem_get_info()
        allowed = total * torch.cuda.get_per_process_memory_fraction()
        free = min(free, allowed - torch.cuda.memory_reserved())
        logits = (20 if top_p < 1 else 8) * c.vocab_size
        return max(1, int((free - beside) // (length * cached_bytes(c) + logits)))


def cached_bytes(config):
    """→ bytes of one token's keys and values in all layers, in bf16."""
    return 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)


def prefill_bytes(config, tokens):
    """→ bytes of the activations of so many prompt tokens, in bf16 with a residual stream in
    fp32.
    """
    return tokens * (12 * config.hidden_size + 6 * config.intermediate_size)


class _Batch:
    """The KV cache of all slots, the state of the rows that run in them, and the graphs of their
    steps.
    """

    def __init__(self, sampler, slots, rollout, group, stops, limit, draw):
        self.sampler, self.model, self.stats = sampler, sampler.model, sampler.stats
        self.rollout, self.group, self.stops, self.limit, self.draw = (
            rollout,
            group,
            stops,
            limit,
            draw,
        )
        self.cache = KVCache(self.model, slots, rollout.tokens.shape[1])
        # column i is row i of the batch: its row in the rollout, its slot, the token the model
        # reads next, its position (−1: finished), its sequence number, the length of its group's
        # shared prompt, the slot to read that in. An even width aligns all 7 at 16 bytes, so that
        # Triton compiles a kernel once
        self.state = torch.zeros(7, slots + slots % 2, dtype=torch.long, device=self.model.device)
        self.slots = slots
        self.cuda, self.graphs, self.pool = self.model.device.type == "cuda", {}, None
        self.requested = None  # (rows, pieces) at the last call of choose()

    def run(self, waiting, running, bar):
        """Sample until every row has finished. waiting: deque of (row, prompt). running: a list,
        kept up to date, of the (row, prompt, slot)s that run.
        """
        free = list(range(self.slots))
        enough = -(-self.slots // 8)  # free slots to wait for: a prefill of few prompts is slow
        most = -(-self.rollout.tokens.shape[1] // attention.SPLIT)  # pieces of a whole slot
        positions = []  # of each running row
        while waiting or running:
            if waiting and len(free) >= min(enough, len(waiting)):
                new = [
                    (*waiting.popleft(), free.pop()) for _ in range(min(len(free), len(waiting)))
                ]
                running += new
                positions += [len(prompt) - 1 for _, prompt, _ in new]
                self.admit(new, running)
            size, steps = len(running), 1
            if self.cuda:  # one graph for all sizes up to a power of two
                size = min(self.slots, 1 << (size - 1).bit_length())
                fewest = min(
                    at - len(p) + 1 for (_, p, _), at in zip(running, positions, strict=True)
                )
                steps = min(STEPS, self.limit - fewest)  # fewest: tokens of the newest row
            self.state[3, len(running) :] = -1  # the graph's other rows are marked finished
            longest = max(positions) + steps - 1
            pieces = min(most, max(4, 1 << (longest // attention.SPLIT).bit_length()))
            positions = self.advance(size, pieces, steps)[: len(running)]
            going = [i for i, at in enumerate(positions) if at >= 0]
            if len(going) < len(running):
                bar.update(len(running) - len(going))
                free += [slot for (*_, slot), at in zip(running, positions, strict=True) if at < 0]
                running[:], positions = ([x[i] for i in going] for x in (running, positions))
                self.state[:, : len(going)] = self.state[:, torch.tensor(going, dtype=torch.long)]
                self.lead(len(going))
            if not bar.disable:
                rate = int(self.rollout.lengths.sum()) / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(f"{len(running)} running, {rate:.0f} tok/s", refresh=False)

    def admit(self, new, running):
        """Prepare `new`, the (row, prompt, slot)s at the end of `running`: prefill their prompts,
        or copy the keys and values of a row of their group that runs already.
        """
        began, device = time.perf_counter(), self.state.device
        first, older = self.draw[3], len(running) - len(new)
        state = [
            (row, slot, prompt[-1], len(prompt) - 1, first + row, len(prompt) - 1)
            for row, prompt, slot in new
        ]
        self.state[:6, older : len(running)] = torch.tensor(state, device=device).T
        self.lead(len(running))
        cached = {row // self.group: slot for row, _, slot in running[:older]}
        slots_of = {}  # prompt to prefill → the slots that receive it
        for row, prompt, slot in new:
            if row // self.group in cached:
                for x in (self.cache.k, self.cache.v):
                    x[:, slot, :, : len(prompt) - 1] = x[
                        :, cached[row // self.group], :, : len(prompt) - 1
                    ]
            else:
                slots_of.setdefault(tuple(prompt[:-1]), []).append(slot)
        prompts = sorted((p for p in slots_of if p), key=len)
        while prompts:
            fit = max(1, PREFILL_TOKENS // len(prompts[-1]))
            group, prompts = prompts[-fit:], prompts[:-fit]
            # at least two columns: the model takes one column for a decode step. The cached padding
            # is never read: a row overwrites each position before it reads that position
            width = max(2, len(group[-1]))
            ids = torch.tensor([p + (0,) * (width - len(p)) for p in group], device=device)
            self.cache.slots = torch.tensor([s for p in group for s in slots_of[p]], device=device)
            self.cache.of = torch.tensor(
                [i for i, p in enumerate(group) for _ in slots_of[p]], device=device
            )
            self.model(ids, torch.arange(width, device=device).expand_as(ids), self.cache)
        self.clock("prefill_s", began)

    def lead(self, size):
        """Let all rows of a group read their prompt in the slot of the group's first running
        row.
        """
        rows = self.state[0, :size]  # ascending: rows start in ascending order
        self.state[6, :size] = self.state[
            1, torch.searchsorted(rows, rows // self.group * self.group)
        ]

    def advance(self, size, pieces, steps):
        """Run decode steps of the first `size` rows, within `pieces` of their slots → each row's
        position.
        """
        key = self.choose(size, pieces)
        began = time.perf_counter()
        if self.cuda and key not in self.graphs:
            kernels = key[0], self.draw[0] == 0, self.draw[-1] < 1, len(self.stops)
            if kernels not in self.sampler.loaded:
                # call the step once, outside capture: CUDA cannot load its kernels while capturing
                self.step(*key)
                self.sampler.loaded.add(kernels)
                steps -= 1
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
        """→ (rows, pieces) of the graph to replay: this size, or a larger one that is captured
        already, until this size is requested twice in a row: a capture costs many steps, and short
        answers end sooner.
        """
        before, self.requested = self.requested, (size, pieces)
        larger = [key for key in self.graphs if key[0] >= size and key[1] >= pieces]
        return min(larger) if larger and before != self.requested else self.requested

    def step(self, size, pieces):
        """Draw one more token for each running row: what a graph captures."""
        rows, slots, last, positions, number, shared, leaders = self.state[:, :size]
        cache = self.cache
        cache.slots, cache.shared, cache.leaders, cache.pieces = slots, shared, leaders, pieces
        temperature, seed, step, _, top_p = self.draw
        logits = self.model.logits(self.model(last[:, None], positions[:, None], cache)[:, 0])
        if top_p < 1:
            logits = sampling.nucleus(logits, temperature, top_p)
        token, logprob = sampling.sample(
            logits, temperature, seed, step, number, self.rollout.lengths[rows]
        )
        append(token, logprob, rows, positions, self.stops, self.limit, last, self.rollout)

    def clock(self, name, began):
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.stats[name] += now - began
        return now


def append(token, logprob, rows, positions, stops, limit, last, rollout):
    """Write each running row's new token to the rollout; end the row at a stop token or at `limit`
    tokens. token, logprob (B,): from sample. rows (B,) int64: each row's index in the rollout.
    stops (n,) int64. Changed in place: rollout, a Rollout; last (B,) int64, which takes the token;
    positions (B,) int64 of the tokens that the model just read: each grows by 1, or becomes −1 when
    its row ends, and is then skipped.
    """
    if sampling.uses_kernels(logprob):
        _append_kernel[len(token),](
            token,
            logprob,
            rows,
            positions,
            stops,
            len(stops),
            limit,
            last,
            *rollout[:4],
            rollout.tokens.shape[1],
            **launch_options(token),
            num_warps=1,
        )
        return
    going = (positions >= 0).nonzero()[:, 0]
    token, row, at = token[going], rows[going], positions[going] + 1
    rollout.tokens[row, at] = token
    rollout.logprobs[row, at] = logprob[going]
    rollout.lengths[row] += 1
    rollout.finished[row] = torch.isin(token, stops)
    over = rollout.finished[row] | (rollout.lengths[row] >= limit)
    positions[going] = torch.where(over, -1, at)
    last[going] = token


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
