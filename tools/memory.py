"""Where the bytes go, by formula, without loading a weight.

    python -m tools.memory --model 32b --memory-gb 40

    peak    = weights + adapter + max(rollout, update)

    weights = projections               NVFP4: 0.5625 byte a weight, which are 4 bits, and 8 bits
                                        of scale for each 16 weights. bf16, also where a 4-bit
                                        checkpoint's config says so: 2 bytes
            + 2 V D                     lm_head, bf16
    adapter = 14 · trained              fp32 parameters (4 bytes), AdamW's two moments in fp32 (8),
                                        and a bf16 copy of the parameters (2)
            + block_diagonal            with bf16 weights only: lora_B once more, with its zeros
    rollout = kv_cache                  the pages of keys and values: bf16; or int8, with an fp32
                                        scale for each token and head
            + logits                    of every row, fp32
            + scratch                   partial sums of a decode step's attention, of every row
            + decoded                   with NVFP4 only: the largest weight in bf16, for cuBLAS
            + prefill_bytes             the activations of a prefill
            + WORKSPACE                 of cuBLAS
    update  = 4 · trained               the gradient, fp32
            + inputs, saved             what waits for backward: of a recomputed layer its input, of
                                        another all that it saves
            + around                    what the end of the model saves
            + max(logit_chunk,          the logits of a chunk of tokens, and
                  layer_backward)       the backward of one layer: never at the same time. If every
                                        layer is recomputed, add all that this one saves

`plan` and `update_bytes` compute these terms under these names. D is the width of the model, F that
of its MLP, V the vocabulary. micro_tokens counts a prompt once for its group. A row is one of the
answers that are sampled at once. The sampler frees its memory before the update starts, so the peak
has only the larger of the two.

The terms of rollout and update are approximate: tests/test_memory.py compares the peak with
measured ones. Left out as small: norms, biases, the scale of each row, the kernels' counters.
Embeddings that are not tied to lm_head lie in host memory. The formulas are a GPU's. A CPU computes
in fp32, and keeps an NVFP4 weight in three forms: codes, the kernels' words, and decoded.

A line of the table is a model on a card:

    card, needs     2³⁰ bytes: of the card, and to sample and train one answer at a time
    answers         most answers sampled at a time; 0: the card cannot hold one
    longest         tokens of the longest prompt plus answer, 8 sampled and 1 trained at a time,
                    beside a prefill of prompts of --prompt-length; 0: not one token fits
    at-once         tokens of the largest micro-batch of an update of 16 × 8 answers, about as
                    train.py chooses; 0: the card cannot hold one answer
    recomputed      layers that this update recomputes; 0 also if the card cannot hold one answer
    weights …       10⁹ bytes: the parts of the peak for one answer at a time

Needs: transformers; tools/weights.py for configs; model.py, rollout.py, fp4_gemm.py,
ops/{attention,logprobs}.py for sizes and families.
"""

import argparse
import bisect
import math
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import transformers
from transformers import PretrainedConfig

from fp4_gemm import COLS, ROWS
from model import family, head_dim, rows_by_prompt
from ops.attention import PAGE
from ops.logprobs import LOGITS_AT_ONCE
from rollout import (
    KV,
    PREFILL_TOKENS,
    SLOTS,
    Rollout,
    cached_bytes,
    prefill_bytes,
    scratch_bytes,
)
from tools import weights
from tools.ends import one_sentence

CARDS = 12, 16, 24, 40, 48, 80, 141  # GB as cards are sold: 2³⁰ bytes
WORKSPACE = 2 * 2**25  # bytes of cuBLAS on Hopper: 32 MiB, outside and inside of CUDA graphs
# tokens of a micro-batch that the planner chooses from
BUDGETS = 32768, 24576, 16384, 12288, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 512, 256
DECODED_TOKENS = 430  # each micro-batch decodes all weights, in the time of so many tokens
RECOMPUTED = 0.32  # of an update's time: what recomputing every layer adds
BESIDE = 1.5e9  # bytes for CUDA's context, a display, and the gaps that the allocator leaves

MODELS = {  # weights.SIZES of released models, and whether embeddings and lm_head are tied
    "135m": (576, 30, 9, 3, 1536, 49152, True),  # SmolLM2; the others are Qwen2.5
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "3b": (2048, 36, 16, 2, 11008, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
    "14b": (5120, 48, 40, 8, 13824, 152064, False),
    "32b": (5120, 64, 40, 8, 27648, 152064, False),
    "72b": (8192, 80, 64, 8, 29568, 152064, False),
}


def config(shape: str) -> PretrainedConfig:
    """→ transformers' config of a name in MODELS."""
    name, context = ("Llama", 8192) if shape == "135m" else ("Qwen2", 32768)
    return getattr(transformers, f"{name}Config")(
        **dict(zip((*weights.SIZES, "tie_word_embeddings"), MODELS[shape], strict=True)),
        max_position_embeddings=context,
        architectures=[f"{name}ForCausalLM"],
    )


class Plan(NamedTuple):
    """Bytes on a GPU. Rollout and update take turns, so the peak counts the larger one."""

    weights: float
    adapter: float
    rollout: float
    update: float

    @property
    def peak(self) -> float:
        return self.weights + self.adapter + max(self.rollout, self.update)


class Linear(NamedTuple):
    """A GEMM of a layer: a weight (N, K) that joins parts with the same input, as q, k and v."""

    parts: tuple[int, ...]  # N of each part
    K: int

    @property
    def N(self) -> int:
        return sum(self.parts)

    @property
    def stored(self) -> int:
        """→ N · K with the padding to whole tiles, in which fp4_gemm stores NVFP4."""
        return math.ceil(self.N / ROWS) * ROWS * math.ceil(self.K / COLS) * COLS


def linears(c: PretrainedConfig) -> dict[str, Linear]:
    """→ the four GEMMs of a layer, by name."""
    D, F, Dh = c.hidden_size, c.intermediate_size, head_dim(c)
    q, kv = c.num_attention_heads * Dh, c.num_key_value_heads * Dh
    return {
        "qkv": Linear((q, kv, kv), D),
        "o": Linear((D,), q),
        "gate_up": Linear((F, F), D),
        "down": Linear((D,), F),
    }


def plan(
    c: PretrainedConfig,
    quant: str = "nvfp4",
    rank: int = 32,
    slots: int = 64,
    length: int = 1152,
    micro_tokens: int = 4096,
    recomputed: int | None = None,
    prefill: int = PREFILL_TOKENS,
    pages: int | None = None,
    shared_keys: int = 0,
    kv: str = "bf16",
) -> Plan:
    """The formulas above. ValueError: this decoder does not support the model.

    quant: a key of weights.QUANT. slots: answers sampled at once. length:
    tokens of a prompt plus its answer. micro_tokens: tokens of a micro-batch of the update, each
    prompt once. recomputed: how many layers, the first ones, keep their input alone, so that
    backward computes the rest again; None: all. prefill: tokens in one forward pass. pages: of keys
    and values; None: as many as the answers need. shared_keys: how many keys answers read of
    prompts in a micro-batch, G·P for each prompt of P tokens. kv: as for Sampler.
    """
    family(c)  # refuse another model before it lacks a size
    D, V, layers = c.hidden_size, c.vocab_size, c.num_hidden_layers
    gemms = linears(c).values()
    # whether projections are in NVFP4: those of layer 0 in the order of gemms and their parts, then
    # those of layer 1, and so on; empty unless the config describes a 4-bit checkpoint
    in_4_bits = [*getattr(c, "quantization_config", {}).values()]
    weights, block_diagonal, decoded, first = 2 * V * D, 0, 0, 0
    for gemm in gemms:
        last = first + len(gemm.parts)
        dense = sum(not all(in_4_bits[i + first : i + last]) for i in range(0, len(in_4_bits), 7))
        if quant == "bf16":
            dense = layers
        weights += dense * 2 * gemm.N * gemm.K + (layers - dense) * 0.5625 * gemm.stored
        # Dense weights take one cuBLAS GEMM over the ranks of all parts. So lora_B is written out
        # (N, S·r), with the zeros between the parts; the kernel for packed weights skips these.
        block_diagonal += dense * 2 * rank * len(gemm.parts) * gemm.N
        if dense < layers:
            decoded = max(decoded, 2 * gemm.N * gemm.K)
        first = last

    # A GEMM of S parts has lora_A (S·r, K) and lora_B (N, r).
    trained = layers * rank * sum(len(gemm.parts) * gemm.K + gemm.N for gemm in gemms)
    adapter = 14 * trained + block_diagonal

    if pages is None:
        pages = slots * math.ceil((length - 1) / PAGE)  # the last token is not cached
    kv_cache = pages * PAGE * cached_bytes(c, kv)
    logits = slots * 4 * V
    scratch = slots * scratch_bytes(c, length)
    rollout = kv_cache + logits + scratch + decoded + prefill_bytes(c, prefill) + WORKSPACE
    if recomputed is None:
        recomputed = layers
    update = 4 * trained + update_bytes(c, rank, micro_tokens, recomputed, shared_keys, decoded)
    return Plan(weights, adapter, rollout, update)


def update_bytes(
    c: PretrainedConfig,
    rank: int,
    micro_tokens: int,
    recomputed: int,
    shared_keys: int,
    decoded: float,
) -> float:
    """→ bytes of an update beside the gradient: activations, and the logits or a layer's backward.

    decoded: bytes of the largest weight in bf16, or 0. All else as for plan.
    """
    D, F, layers = c.hidden_size, c.intermediate_size, c.num_hidden_layers
    _, kv, _ = linears(c)["qkv"].parts
    # of a layer, from forward until backward; each text has its keys and values together, bf16
    saved = micro_tokens * saved_bytes(c, rank) + (micro_tokens + shared_keys) * 4 * kv
    inputs = recomputed * micro_tokens * 4 * D  # the residual stream, fp32
    # What follows the layers: the last residual sum (fp32, 4 D), its norm, the states before answer
    # tokens and the derivatives of the log-probabilities in them (bf16, 2 D each). 2 D more are for
    # the rest, such as log-probabilities and masks.
    around = micro_tokens * 12 * D
    logit_chunk = 6 * LOGITS_AT_ONCE  # logits in fp32, their derivative in bf16
    at_logits = inputs + (layers - recomputed) * saved + around + logit_chunk
    # The MLP's backward makes the gradients of gate and up (4 F). It still holds them when it
    # decodes the weight of gate_up, but then gate, up and SwiGLU's output (6 F) are free.
    mlp_backward = max(micro_tokens * 4 * F, decoded - micro_tokens * 2 * F)
    # Gradients of the keys and values that each text reads, bf16, and their sums, fp32. Where
    # several heads share a key, these are smaller than the MLP's.
    attention_backward = (micro_tokens + shared_keys) * 8 * kv
    # 8 D: gradients of the residual stream, fp32, the arriving one and the one passed on
    layer_backward = micro_tokens * 8 * D + max(mlp_backward, attention_backward)
    # Backward begins with the last layer. When it reaches those that are recomputed, the others
    # have freed what they saved, and one of these at a time saves everything.
    all_saved = max((layers - recomputed) * saved, saved if recomputed else 0)
    at_a_layer = inputs + all_saved + around + layer_backward
    return max(at_logits, at_a_layer)


def saved_bytes(c: PretrainedConfig, rank: int) -> int:
    """→ how many bytes autograd saves per token in one layer when a GPU runs the layer, without the
    keys and values of attention.
    """
    D, F = c.hidden_size, c.intermediate_size
    q, kv, _ = linears(c)["qkv"].parts
    head_norm = family(c).head_norm
    return (
        8 * D  # the residual stream after each of its two sums, fp32
        + 4 * D  # the norms of both, bf16: what qkv and gate_up multiply
        + 2 * (q + kv)  # q and k after RoPE, bf16, in one tensor
        + 2 * q  # attention's output, bf16: what o multiplies
        + 6 * F  # gate, up and SwiGLU's output, bf16
        + 14 * rank  # x @ lora_A.T of the seven projections, bf16
        + (4 * (q + kv) if head_norm else 0)  # Qwen3's norm of each head: q and k, fp32
    )


class PromptRows(NamedTuple):
    """Rows of a Rollout that have the same prompt."""

    prompt: int  # tokens of the prompt
    answers: dict[int, int]  # row number → tokens of its answer that the trainer computes

    @property
    def tokens(self) -> int:
        """→ flat tokens of the prompt and all its answers."""
        return self.prompt + sum(self.answers.values())


def prompt_groups(rollout: Rollout, rows: torch.Tensor) -> list[PromptRows]:
    """→ the rows with these numbers, (n,) int64, by prompt. The tokens are copied to the host."""
    answer_tokens = (rollout.lengths - 1).tolist()  # nothing is predicted from the last one
    by_prompt = rows_by_prompt(rollout.tokens[rows], rollout.prompt_lengths[rows])
    rows = rows.tolist()
    return [
        PromptRows(len(prompt), {rows[i]: answer_tokens[rows[i]] for i in members})
        for prompt, members in by_prompt.items()
    ]


@dataclass
class MicroBatch:
    """Rows that the trainer computes at once, each prompt once."""

    rows: list[int] = field(default_factory=list)  # their numbers
    tokens: int = 0  # of prompts and answers: flat tokens
    shared_keys: int = 0  # that answers read of prompts: a prompt's length for each answer


def micro_batches(groups: list[PromptRows], budget: int) -> list[MicroBatch]:
    """Cut the rows into micro-batches of at most `budget` flat tokens, or of one row. A group that
    fits into one micro-batch is not cut, so that its prompt is computed once.
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


class Size(NamedTuple):
    """How an update is cut up."""

    micro_tokens: int  # most tokens of a micro-batch, but of one that is a single row
    recomputed: int  # layers, the first ones, whose activations backward computes again
    tokens: int  # of the largest micro-batch
    time: float  # of the update, in the time that it computes one token
    peak: float  # bytes, weights included


def choose(
    c: PretrainedConfig,
    quant: str,
    rank: int,
    room: float,
    groups: list[PromptRows],
    budgets: list[int],
    recomputed: range | list[int],
) -> Size:
    """→ of the Sizes whose peak is within `room` bytes the fastest. If there is none, the one with
    the smallest micro-batches and the most layers recomputed.

    Two measured facts decide. Each micro-batch decodes all packed weights anew, which takes as long
    as computing DECODED_TOKENS more; choose() adds it for bf16 weights too, which nothing decodes.
    Recomputing every layer adds RECOMPUTED to the time. Backward recomputes the first layers,
    because it has then freed the memory of the last ones. Callers exclude the last layer by
    `recomputed`: backward reads its activations first, and its input would be kept beside them.

    groups: of all rows. budgets: micro_tokens to choose from, falling. recomputed: numbers of
    layers to choose from, rising.
    """
    sizes = []
    for budget in budgets:
        batches = micro_batches(groups, budget)
        tokens = max(batch.tokens for batch in batches)
        shared_keys = max(batch.shared_keys for batch in batches)
        asked = dict(micro_tokens=tokens, shared_keys=shared_keys)

        def peak(layers, asked=asked):
            return plan(c, quant, rank, recomputed=layers, **asked)._replace(rollout=0).peak

        # The fewest that fit: the more layers are recomputed, the lower is the peak.
        fewest = bisect.bisect_left(recomputed, True, key=lambda layers: peak(layers) <= room)
        layers = recomputed[min(fewest, len(recomputed) - 1)]
        computed = sum(batch.tokens for batch in batches)  # more if groups are cut
        time = computed * (1 + RECOMPUTED * layers / c.num_hidden_layers)
        time += DECODED_TOKENS * len(batches)
        sizes.append(Size(budget, layers, tokens, time, peak(layers)))
    fitting = [size for size in sizes if size.peak <= room]
    return min(fitting, key=lambda size: size.time) if fitting else sizes[-1]


class Line(NamedTuple):
    """A line of the table: what fits on a card.

    answers is 0 if the card cannot hold one answer. longest is 0 if it cannot hold a text of one
    token; below the prompt's length it means that only shorter prompts fit.
    """

    needs: float  # 2³⁰ bytes, to sample and train one answer at a time
    answers: int  # most sampled at a time
    size: Size  # of an update of 16 × 8 answers of the length that the table is for
    longest: int  # tokens of the longest prompt plus answer, 8 sampled and 1 trained at a time
    plan: Plan  # of one answer at a time


def line_of(
    c: PretrainedConfig,
    quant: str,
    rank: int,
    prompt: int,
    new: int,
    gb: float,
    kv: str = "bf16",
) -> Line:
    """What fits on a card of `gb` · 2³⁰ bytes.

    prompt, new: tokens of a prompt, and at most of an answer. kv: as for Sampler. ValueError:
    this decoder does not support the model.
    """
    room, length = gb * 2**30 - BESIDE, prompt + new
    layers = range(c.num_hidden_layers)

    def planned(slots, length):
        """→ Plan of `slots` answers at a time in the rollout, and of one in the update, with every
        layer recomputed but the last.
        """
        prefill = max(prompt, min(PREFILL_TOKENS, slots * prompt))
        return plan(
            c,
            quant,
            rank,
            slots,
            length,
            micro_tokens=length,
            recomputed=layers[-1],
            prefill=prefill,
            shared_keys=min(prompt, length),
            kv=kv,
        )

    def most(limit, plan_of_number):
        """→ the largest number up to limit whose plan fits the card; 0 if none does."""
        # A peak grows with the number, so the peaks are sorted, as bisect requires.
        return bisect.bisect(range(1, limit + 1), room, key=lambda n: plan_of_number(n).peak)

    one = planned(1, length)
    groups = [PromptRows(prompt, dict.fromkeys(range(8), new - 1))] * 16
    return Line(
        needs=(one.peak + BESIDE) / 2**30,
        answers=most(SLOTS, lambda n: planned(n, length)),
        size=choose(c, quant, rank, room, groups, BUDGETS, layers),
        longest=most(c.max_position_embeddings, lambda n: planned(8, n)),
        plan=one,
    )


def main(arguments: list[str]):
    """Print the table. ValueError: an unsupported model, or a number that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs="+", default=MODELS, help="as for train.py; default: each of MODELS"
    )
    parser.add_argument("--quant", default="nvfp4", choices=weights.QUANT)
    parser.add_argument("--kv", default="bf16", choices=KV)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument(
        "--memory-gb", type=float, nargs="+", default=CARDS, help="of cards as they are sold"
    )
    args = parser.parse_args(arguments)
    rank, prompt, new, cards = args.rank, args.prompt_length, args.max_new_tokens, args.memory_gb
    print(
        "  card  needs  answers  longest  at-once  recomputed  weights  adapter  rollout  update"
        "  model"
    )
    for name in args.model:
        c = config(name) if name in MODELS else weights.config_of(name)
        family(c)  # refuse an unsupported model before its flags
        context = c.max_position_embeddings
        if not all(n >= 1 for n in (rank, prompt, new, *cards)) or prompt + new > context:
            raise ValueError(
                f"--rank {rank}, --prompt-length {prompt}, --max-new-tokens {new}, --memory-gb "
                f"{min(cards)}: give 1 or more, within the context of {context} tokens"
            )
        for gb in cards:
            line = line_of(c, args.quant, rank, prompt, new, gb, args.kv)
            tokens = recomputed = 0
            if line.answers:
                tokens, recomputed = line.size.tokens, line.size.recomputed
            print(
                f"{gb:6g}{line.needs:7.1f}{line.answers:9}{line.longest:9}"
                f"{tokens:9}{recomputed:12}"
                f"{line.plan.weights / 1e9:9.2f}{line.plan.adapter / 1e9:9.2f}"
                f"{line.plan.rollout / 1e9:9.2f}{line.plan.update / 1e9:8.2f}  {name}"
            )


if __name__ == "__main__":
    with one_sentence("memory.py"):
        main(sys.argv[1:])
