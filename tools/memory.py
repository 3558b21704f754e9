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


def linears(c):
    """name → (N of each part), K: the GEMMs of a layer; parts share their input. c: a transformers
    config.
    """
    D, F, Dh = c.hidden_size, c.intermediate_size, head_dim(c)
    q, kv = c.num_attention_heads * Dh, c.num_key_value_heads * Dh
    return {"qkv": ((q, kv, kv), D), "o": ((D,), q), "gate_up": ((F, F), D), "down": ((D,), F)}


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
    D, F, V, L = c.hidden_size, c.intermediate_size, c.vocab_size, c.num_hidden_layers
    products = [(len(parts), sum(parts), K) for parts, K in linears(c).values()]
    qkv, q, (*_, head_norm) = sum(linears(c)["qkv"][0]), linears(c)["o"][1], family(c)
    padded = sum(-(-N // ROWS) * ROWS * (-(-K // COLS) * COLS) for _, N, K in products)
    layer = 2 * sum(N * K for _, N, K in products) if quant == "bf16" else 0.5625 * padded
    weights = L * layer + 2 * V * D
    learned = L * rank * sum(S * K + N for S, N, K in products)
    adapter = 14 * learned + 2 * L * rank * sum(S * N for S, N, _ in products) * (quant == "bf16")
    scratch = 0 if quant == "bf16" else 2 * max(N * K for _, N, K in products)
    # bytes that autograd saves per token and layer: two residual sums (fp32) and their norms, qkv
    # before and after RoPE, attention's output, gate, up, SwiGLU's output, x @ A.T; Qwen3's head
    # norms save fp32 q and k
    kept = 14 * D + 4 * qkv + 6 * F + 14 * rank + 2 * (q + qkv) * head_norm
    # the most that backward adds: gate's and up's gradients (4 F); or, once gate, up and their
    # product (6 F) are freed, these gradients beside the decoded weight
    widest = max(micro_tokens * (8 * D + 4 * F), micro_tokens * (8 * D - 2 * F) + scratch)
    inside, stays = (kept, 4 * D * L) if checkpointing else (0, kept * L)
    update = (
        4 * learned
        + micro_tokens * (stays + 12 * D)
        + max(6 * LOGITS_AT_ONCE, micro_tokens * inside + widest)
    )
    rollout = slots * (length * cached_bytes(c) + 8 * V) + scratch + prefill_bytes(c, prefill)
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


def row(c, quant, rank, prompt, new, gb):
    """→ the numbers of a line of the table. c: a transformers config; prompt, new: tokens."""
    room, length, context = gb * 2**30 - BESIDE, prompt + new, c.max_position_embeddings

    def planned(slots, micro_tokens, length=length):
        prefill = max(prompt, min(PREFILL_TOKENS, slots * prompt))
        return plan(c, quant, rank, slots, length, micro_tokens, prefill=prefill)

    one = planned(1, length)
    return (
        gb,
        (one.peak + BESIDE) / 2**30,
        bisect.bisect(range(1, SLOTS + 1), room, key=lambda n: planned(n, length).peak),
        bisect.bisect(range(1, 129), room, key=lambda n: planned(1, n * length).peak) * length,
        bisect.bisect(range(1, context + 1), room, key=lambda n: planned(8, n, n).peak),
        *(part / 1e9 for part in one),
    )


def main(arguments):
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
            print(
                "{:6g}{:7.1f}{:9}{:16}{:9}{:9.2f}{:9.2f}{:9.2f}{:8.2f}  {}".format(
                    *row(c, args.quant, rank, prompt, new, gb), name
                )
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"memory.py: {error}", file=sys.stderr)
        sys.exit(2)
