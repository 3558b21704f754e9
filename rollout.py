"""The sampler: a group of answers to each prompt, with the log-probability of every token as it was drawn.

    prefill each prompt once ──► copy its KV to its group's G rows ──► loop: sample, append, one token forward
                                                                         └─ rows that end leave the batch

It runs the model that trains, on the same tensors, so there are no weights to hand over, AQN's noise is in
exactly the modules that sample, and the recorded log-probabilities are those of the policy that sampled.
Randomness is a function of (seed, step, number of the sequence, position): see decode.py.

No top-k and no top-p: what the sampler cuts off the trainer would not, and their ratio would be wrong.
Needs: torch, tqdm; decode.py, model.py.
"""

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import decode
from model import KVCache


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
        index = torch.as_tensor(list(index) if isinstance(index, range) else index, device=self.tokens.device)
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
        """(n,) row numbers → batches of at most `budget` tokens, padding included; like lengths together."""
        length = (self.prompt_lengths + self.lengths).tolist()
        batches = []
        for row in sorted(rows.tolist(), key=lambda b: (-length[b], b)):
            if batches and (len(batches[-1]) + 1) * length[batches[-1][0]] <= budget:
                batches[-1].append(row)
            else:
                batches.append([row])
        return [torch.tensor(b, device=rows.device) for b in batches]


class Sampler:
    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def generate(self, prompts, group_size, max_new_tokens, temperature, stop_ids, seed, step, first=0,
                 progress=""):
        """Sample group_size answers to each prompt (a list of token ids) → Rollout.

        stop_ids: tokens that end an answer. temperature 0 is greedy. first: the global number of the first
        sequence: ranks that share a step draw different bits. progress: a progress bar's label, "" for none.
        ValueError: an empty prompt, a prompt that leaves no room in the model's context.
        """
        context = self.model.config.max_position_embeddings
        for i, prompt in enumerate(prompts):
            if not prompt or len(prompt) + max_new_tokens > context:
                raise ValueError(f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones it "
                                 f"must fit into the model's context of {context}: "
                                 "shorten it or lower --max-new-tokens")
        device, P, B = self.model.device, len(prompts), len(prompts) * group_size
        widest = max(map(len, prompts))
        of_prompt = torch.arange(P, device=device).repeat_interleave(group_size)             # (B,)
        lengths_p = torch.tensor([len(p) for p in prompts], device=device)                   # (P,)
        ids = torch.tensor([p + [0] * (widest - len(p)) for p in prompts], device=device)    # (P, widest)
        rollout = Rollout(tokens=F.pad(ids, (0, max_new_tokens))[of_prompt],
                          logprobs=torch.zeros(B, widest + max_new_tokens, device=device),
                          lengths=torch.zeros(B, dtype=torch.long, device=device),
                          finished=torch.zeros(B, dtype=torch.bool, device=device),
                          prompt_lengths=lengths_p[of_prompt])
        stops = torch.tensor(sorted(stop_ids), device=device)

        began = time.perf_counter()
        bar = tqdm(total=B, desc=progress, unit="seq", leave=False, disable=None if progress else True)
        cache = KVCache(self.model, P, widest + max_new_tokens)
        cache.live = widest
        hidden = self.model(ids, torch.arange(widest, device=device).expand(P, -1), cache)   # (P, widest, D)
        # the right end of a prompt predicts the first token of all its answers
        logits = self.model.logits(hidden[torch.arange(P, device=device), lengths_p - 1])[of_prompt]
        cache.select(of_prompt)
        rows = torch.arange(B, device=device)                                                # still running
        for t in range(max_new_tokens):
            token, logprob = decode.sample(logits, temperature, seed, step, first + rows, t)
            at = rollout.prompt_lengths[rows] + t
            rollout.tokens[rows, at], rollout.logprobs[rows, at] = token, logprob
            rollout.lengths[rows] = t + 1
            ended = torch.isin(token, stops)
            rollout.finished[rows] = ended
            bar.update(int(ended.sum()))
            bar.set_postfix_str(f"{rollout.lengths.sum() / (time.perf_counter() - began):.0f} tok/s",
                                refresh=False)
            if ended.any():
                going = (~ended).nonzero()[:, 0]
                rows, token, at = rows[going], token[going], at[going]
                cache.select(going)
            if len(rows) == 0 or t + 1 == max_new_tokens:
                break
            cache.live = widest + t + 1
            logits = self.model.logits(self.model(token[:, None], at[:, None], cache)[:, 0])
        bar.close()
        return rollout.rows(range(B))
