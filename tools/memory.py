"""Where the bytes go, by formula, without loading a weight.

    python -m tools.memory --model 32b --memory-gb 40

    peak = weights + adapter and optimizer + the larger of rollout and update

    weights    0.5625 byte a quantised weight (4 bits, and 8 bits for each 16), 2 for lm_head;
               embeddings that are not tied to it lie in host memory
    adapter    12 bytes a parameter (itself and AdamW's two moments, fp32) and 2 for its bf16 copy.
               With bf16 weights another copy of lora_B, as a block-diagonal matrix with its zeros
    rollout    keys and values of every slot, logits twice, one weight in bf16, a prefill's
               activations
    update     the gradient, and what autograd saves of a micro-batch: with gradient checkpointing
               the residual stream between layers (fp32), without it every activation. On top the
               larger of: logits in chunks; one layer's backward: its activations, gradients, one
               weight in bf16

A line of the table: a card; the GB needed to sample and train one answer at a time; the most
answers sampled at a time; the most --micro-tokens; the longest prompt plus answer, 8 at a time; the
parts of that first peak. 0: nothing fits. The update has --gradient-checkpointing. A card's GB and
`needs` are 2³⁰ bytes, a part's 10⁹. The formulas are a GPU's: a CPU computes in fp32 and keeps each
weight twice, packed and decoded.

Needs: transformers; tools/weights.py for configs; model, rollout, fp4_gemm, logprobs for sizes and
families.
"""

import argparse
import bisect
import math
import sys
from typing import NamedTuple

import transformers

from fp4_gemm import COLS, ROWS
from model import QUANT, family, head_dim
from ops.logprobs import LOGITS_AT_ONCE
from rollout import PREFILL_TOKENS, SLOTS, cached_bytes, prefill_bytes
from tools import weights

CARDS = 12, 16, 24, 40, 48, 80
BESIDE = 1.5e9  # bytes for CUDA's context, a display, and the gaps that the allocator leaves

# hidden, layers, query heads, key heads, width of the MLP, vocabulary, lm_head tied to the
# embeddings
MODELS = {
    "135m": (576, 30, 9, 3, 1536, 49152, True),  # SmolLM2; the others are Qwen2.5
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "3b": (2048, 36, 16, 2, 11008, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
    "14b": (5120, 48, 40, 8, 13824, 152064, False),
    "32b": (5120, 64, 40, 8, 27648, 152064, False),
    "72b": (8192, 80, 64, 8, 29568, 152064, False),
}


def config(shape):
    """transformers' config of a name in MODELS."""
    D, layers, H, Hkv, F, V, tied = MODELS[shape]
    name, context = ("Llama", 8192) if shape == "135m" else ("Qwen2", 32768)
    return getattr(transformers, f"{name}Config")(
        hidden_size=D,
        num_hidden_layers=layers,
        num_attention_heads=H,
        num_key_value_heads=Hkv,
        intermediate_size=F,
        vocab_size=V,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        architectures=[f"{name}ForCausalLM"],
    )


class Plan(NamedTuple):
    """Bytes. rollout and update never run at the same time, so the peak counts the larger one."""

    weights: float
    adapter: float
    rollout: float
    update: float

    @property
    def peak(self):
        return self.weights + self.adapter + max(self.rollout, self.update)


class Linear(NamedTuple):
    """A GEMM of a layer: a weight (N, K) that joins parts with the same input, as q, k and v."""

    parts: tuple  # N of each part
    K: int

    @property
    def N(self):
        return sum(self.parts)

    @property
    def stored(self):
        """Weights with the padding to whole tiles, in which NVFP4 is stored."""
        return math.ceil(self.N / ROWS) * ROWS * math.ceil(self.K / COLS) * COLS


def linears(c):
    """→ {name: Linear}. c: a transformers config."""
    D, F, Dh = c.hidden_size, c.intermediate_size, head_dim(c)
    q, kv = c.num_attention_heads * Dh, c.num_key_value_heads * Dh
    return {
        "qkv": Linear((q, kv, kv), D),
        "o": Linear((D,), q),
        "gate_up": Linear((F, F), D),
        "down": Linear((D,), F),
    }


def plan(
    c,
    quant="nvfp4",
    rank=32,
    slots=64,
    length=1152,
    micro_tokens=4096,
    checkpointing=True,
    prefill=PREFILL_TOKENS,
):
    """→ Plan. c: a transformers config; slots: answers sampled at once; length: tokens of prompt
    and answer; prefill: prompt tokens in one forward pass.
    """
    D, F, V, layers = c.hidden_size, c.intermediate_size, c.vocab_size, c.num_hidden_layers
    gemms = linears(c).values()
    numbers = sum(gemm.N * gemm.K for gemm in gemms)  # of a layer's weights
    largest = max(gemm.N * gemm.K for gemm in gemms)
    layer = 2 * numbers if quant == "bf16" else 0.5625 * sum(gemm.stored for gemm in gemms)
    weights = layers * layer + 2 * V * D

    # lora_A has rank rows for each part, lora_B rank columns
    learned = layers * rank * sum(len(gemm.parts) * gemm.K + gemm.N for gemm in gemms)
    adapter = 14 * learned
    if quant == "bf16":
        adapter += 2 * layers * rank * sum(len(gemm.parts) * gemm.N for gemm in gemms)
    decoded = 0 if quant == "bf16" else 2 * largest  # a weight in bf16, for cuBLAS

    keys_and_values = slots * length * cached_bytes(c)
    rollout = keys_and_values + slots * 8 * V + decoded + prefill_bytes(c, prefill)

    # What autograd saves per token and layer, in bytes: two residual sums (fp32) and their norms,
    # qkv before and after RoPE, attention's output, gate, up, SwiGLU's output, x @ A.T. Qwen3's
    # head norms save fp32 q and k.
    qkv, q = linears(c)["qkv"].N, linears(c)["o"].K
    saved = 14 * D + 4 * qkv + 6 * F + 14 * rank
    *_, head_norm = family(c)
    if head_norm:
        saved += 2 * (q + qkv)
    # The most that one layer's backward adds: gate's and up's gradients (4 F); or, once gate, up
    # and their product (6 F) are freed, these gradients beside the decoded weight.
    added = max(micro_tokens * (8 * D + 4 * F), micro_tokens * (8 * D - 2 * F) + decoded)
    if checkpointing:  # all layers keep their input; one layer at a time is recomputed
        kept, recomputed = 4 * D * layers, saved
    else:
        kept, recomputed = saved * layers, 0
    on_top = max(6 * LOGITS_AT_ONCE, micro_tokens * recomputed + added)
    update = 4 * learned + micro_tokens * (kept + 12 * D) + on_top
    return Plan(weights, adapter, rollout, update)


def plan_of(config, c, slots, length, prefill=PREFILL_TOKENS, longest=0):
    """The plan of a run. config: a flags.Config; longest: tokens of the longest row, if it is
    known.
    """
    return plan(
        c,
        config.quant,
        config.rank,
        slots,
        length,
        max(config.micro_tokens, longest or length),
        config.gradient_checkpointing,
        prefill,
    )


class Row(NamedTuple):
    """A line of the table: what fits on a card."""

    card: float  # 2³⁰ bytes
    needs: float  # 2³⁰ bytes, to sample and train one answer at a time
    answers: int  # most sampled at a time
    micro_tokens: int  # most
    longest: int  # tokens of prompt and answer, 8 at a time
    plan: Plan  # of one answer at a time


def row_of(c, quant, rank, prompt, new, gb):
    """→ Row. c: a transformers config; prompt, new: tokens; gb: of the card."""
    room, length = gb * 2**30 - BESIDE, prompt + new

    def peak(slots, micro_tokens, length=length):
        prefill = max(prompt, min(PREFILL_TOKENS, slots * prompt))
        return plan(c, quant, rank, slots, length, micro_tokens, prefill=prefill).peak

    def most(limit, peak_of):
        """→ the largest number up to limit whose peak fits; 0 if none does."""
        return bisect.bisect(range(1, limit + 1), room, key=peak_of)

    return Row(
        card=gb,
        needs=(peak(1, length) + BESIDE) / 2**30,
        answers=most(SLOTS, lambda n: peak(n, length)),
        micro_tokens=most(128, lambda n: peak(1, n * length)) * length,
        longest=most(c.max_position_embeddings, lambda n: peak(8, n, n)),
        plan=plan(c, quant, rank, 1, length, length, prefill=prompt),
    )


def main(arguments):
    """Print the table. ValueError: an unsupported model, or a number that makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs="+", default=MODELS, help="as for train.py; default: each of MODELS"
    )
    parser.add_argument("--quant", default="nvfp4", choices=QUANT)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument(
        "--memory-gb", type=float, nargs="+", default=CARDS, help="of cards as they are sold"
    )
    args = parser.parse_args(arguments)
    rank, prompt, new, cards = args.rank, args.prompt_length, args.max_new_tokens, args.memory_gb
    print(
        "  card  needs  answers  --micro-tokens  longest  weights  adapter  rollout  update  model"
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
            line = row_of(c, args.quant, rank, prompt, new, gb)
            parts = line.plan
            print(
                f"{line.card:6g}{line.needs:7.1f}{line.answers:9}{line.micro_tokens:16}"
                f"{line.longest:9}{parts.weights / 1e9:9.2f}{parts.adapter / 1e9:9.2f}"
                f"{parts.rollout / 1e9:9.2f}{parts.update / 1e9:8.2f}  {name}"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"memory.py: {error}", file=sys.stderr)
        sys.exit(2)
