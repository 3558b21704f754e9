"""One small decoder, the only forward of this project: Llama, Mistral, Qwen2 / Qwen2.5 and Qwen3.

    residual = embed(ids)                                                  (n,) → (n, D)
    in each layer:  residual += o(attention(rope(qkv(norm(residual)))))
                    residual += down(swiglu(gate_up(norm(residual))))
    hidden = norm(residual)                                                (n, D)
    logits = hidden @ lm_head.T                                            (n, V)

The norm that follows a sum also computes the sum, in one pass over memory. So a layer hands on two
tensors: the residual stream, and the branch that the next norm will add to it.

The n tokens of a forward pass lie in one flat row, without padding. Every operation but attention
computes a token alone, and an object of ops/attention.py says which tokens a token sees. The
trainer packs a prompt once, followed by the answers to it; flat_row() makes that row.

Sampler and trainer run this same code on the same tensors. Every projection is a frozen base in
NVFP4 (or in bf16, with quant="bf16", or if a 4-bit checkpoint leaves it so) with a LoRA beside it;
q, k, v are one matrix, and so are gate and up. Embeddings, lm_head, norms and biases are not
quantised. The norms' weights are fp32 buffers; aqn.py adds its noise to those of input_layernorm
and post_attention_layernorm.

A CPU computes in fp32, a GPU in bf16 with the residual stream and the logits in fp32.

load() takes an opened checkpoint: an object that reads weights, quantises them and places them on
the device (tools/weights.py has it). The decoder asks for one matrix after the other, so no second
copy of all weights exists.

transformers supplies the config and the formulas of scaled RoPE; its own models are the tests'
oracle. Left out: mixtures of experts, sliding windows, encoder parts, dropout.
Needs: torch, transformers, tqdm; fp4_gemm.py, lora.py, ops/{elementwise,attention,logprobs}.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import fp4_gemm
from lora import LoRALinear, LowRank
from ops import attention, elementwise, logprobs

MLP_TOKENS = 4096  # most that an MLP computes at a time in a prefill

# --- the modules with weights, and what makes them


class RMSNorm(nn.Module):
    """x = residual + branch; h = weight · x / √(mean(x²) + eps)."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("weight", weight)  # (D,) f32
        self.eps = eps
        self.dtype = dtype

    def forward(self, residual: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """→ x f32 and h in self.dtype, all (n, D). Without a branch, x is the residual stream."""
        return elementwise.add_norm(residual, branch, self.weight, self.eps, self.dtype)


class FrozenLinear(nn.Module):
    """y = x @ W.T + bias: x (…, K) → (…, N) in x's dtype. The base of a LoRALinear, which adds its
    adapter by the three other methods.
    """

    def __init__(self, weight: fp4_gemm.PackedNVFP4 | fp4_gemm.Dense, bias: Tensor | None):
        super().__init__()
        self.weight = weight
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return fp4_gemm.linear(x, self.weight, self.bias)

    def product(self, x: Tensor, low_rank: LowRank, compute_output: bool) -> tuple[Tensor, Tensor]:
        return fp4_gemm.product(x, self.weight, self.bias, low_rank, compute_output)

    def input_gradient(self, dy: Tensor, add_to: Tensor) -> Tensor:
        return fp4_gemm.input_gradient(dy, self.weight, add_to)

    def store_B(self, copy_B: Tensor, splits: tuple[int, ...]) -> None:
        """A Dense keeps a copy of B beside its weight."""
        if isinstance(self.weight, fp4_gemm.Dense):
            self.weight.store_B(copy_B, splits)


class Builder:
    """Makes the norms and projections of the modules below, which ask it for one after the other,
    from the tensors of a checkpoint. Arguments: as for load().

    One generator draws the adapters of all projections. So the order in which the modules ask for
    projections decides what a seed means.
    """

    def __init__(
        self, source, quant: str, rank: int, alpha: float, device: torch.device, seed: int
    ):
        self.source = source
        self.config = source.config
        self.family = family(source.config)
        self.quant = quant
        self.rank = rank
        self.alpha = alpha
        self.device = device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.generator = torch.Generator().manual_seed(seed)

    def norm(self, name: str, width: int) -> RMSNorm:
        """name: transformers', without its ".weight"."""
        weight = self.source.tensor(f"{name}.weight", (width,))
        return RMSNorm(weight.float().to(self.device), self.config.rms_norm_eps, self.dtype)

    def linear(self, names: dict[str, int], K: int, biased: bool = False) -> LoRALinear:
        """Projections with the same input run as one matrix, (N, K) of all their rows. names: {a
        projection's name: its rows}. biased: whether they have a bias.
        """
        weight, bias = self.source.projection(names, K, biased, self.quant, self.device, self.dtype)
        return LoRALinear(
            FrozenLinear(weight, bias),
            self.rank,
            self.alpha,
            tuple(names.values()),
            dtype=self.dtype,
            device=self.device,
            generator=self.generator,
        )


# --- the layers


class Attention(nn.Module):
    """q, k and v are one projection. RoPE and the attention itself are ops/attention.py's."""

    def __init__(self, build: Builder, layer_idx: int):
        super().__init__()
        name, config, family = f"model.layers.{layer_idx}.self_attn", build.config, build.family
        H, Hkv, Dh = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
        q, kv, D = H * Dh, Hkv * Dh, config.hidden_size
        qkv = {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        self.qkv_proj = build.linear(qkv, D, family.qkv_bias)
        self.o_proj = build.linear({f"{name}.o_proj": D}, q, family.o_bias)
        self.q_norm = self.k_norm = norms = None
        if family.head_norm:
            self.q_norm = build.norm(f"{name}.q_norm", Dh)
            self.k_norm = build.norm(f"{name}.k_norm", Dh)
            norms = self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps
        self.heads = attention.Heads(H, Hkv, norms)
        self.layer_idx = layer_idx

    def forward(self, h: Tensor, attend: Callable) -> Tensor:
        """h (n, D) → (n, D). attend: an attention.Packed or Paged, to which Decoder.forward has
        bound cos and sin.
        """
        heads = attend(self.qkv_proj(h), self.heads, layer=self.layer_idx)
        return self.o_proj(heads)


class MLP(nn.Module):
    def __init__(self, build: Builder, layer_idx: int):
        super().__init__()
        name = f"model.layers.{layer_idx}.mlp"
        D, F = build.config.hidden_size, build.config.intermediate_size
        self.gate_up_proj = build.linear({f"{name}.gate_proj": F, f"{name}.up_proj": F}, D)
        self.down_proj = build.linear({f"{name}.down_proj": D}, F)

    def forward(self, h: Tensor, compute_output: bool = True) -> Tensor:
        """h (n, D) → (n, D). In eval mode, the sampler's, at most MLP_TOKENS at a time: else gate
        and up of a long prompt would take twice the memory of all its other activations.
        """
        if self.training or len(h) <= MLP_TOKENS:
            return self.down_proj(elementwise.swiglu(self.gate_up_proj(h)), compute_output)
        return torch.cat([self(part) for part in h.split(MLP_TOKENS)])


class Block(nn.Module):
    """One layer. It returns the residual stream, and the branch that the next norm adds to it."""

    def __init__(self, build: Builder, layer_idx: int):
        super().__init__()
        name, D = f"model.layers.{layer_idx}", build.config.hidden_size
        self.self_attn = Attention(build, layer_idx)
        self.mlp = MLP(build, layer_idx)
        self.input_layernorm = build.norm(f"{name}.input_layernorm", D)
        self.post_attention_layernorm = build.norm(f"{name}.post_attention_layernorm", D)

    def forward(
        self,
        residual: Tensor,
        branch: Tensor | None,
        attend: Callable,
        compute_output: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """residual (n, D) f32 and branch (n, D), or None → both, after this block.

        compute_output=False: nothing reads the values of the new branch, only its gradient. They
        are then not computed (see `summed`).
        """
        residual, h = self.input_layernorm(residual, branch)
        branch = self.self_attn(h, attend)
        residual, h = self.post_attention_layernorm(residual, branch)
        branch = self.mlp(h, compute_output)
        return residual, branch

    def checkpointed(self, residual: Tensor, attend: Callable) -> Tensor:
        """residual (n, D) f32, with no branch to add → residual + branch of this block, (n, D) f32.

        Gradient checkpointing calls `summed` twice:

            in forward     gradients disabled: autograd keeps the block's input alone
            in backward    gradients enabled: autograd saves what the block's gradient needs
        """
        # This timeline is that of reentrant checkpointing, and `summed` relies on it. The other
        # kind enables gradients in both calls, and calls a hook for every tensor that autograd
        # saves: on a small model these hooks take longer than the kernels. Reentrant checkpointing
        # computes gradients only if an input requires one.
        return checkpoint(
            self.summed,
            residual.requires_grad_(),
            attend,
            use_reentrant=True,
            preserve_rng_state=False,
        )

    def summed(self, residual, attend):
        """The call in backward skips its last GEMM, that of down_proj, because nothing reads its
        result: backward needs the tensors that autograd saves on the way, among them that GEMM's
        input.
        """
        in_backward = torch.is_grad_enabled()
        residual, branch = self(residual, None, attend, compute_output=not in_backward)
        return residual + branch


# --- the decoder


class Decoder(nn.Module):
    """The model: token ids → hidden → logits, and log-probabilities of answers.

    config: transformers'. device, dtype: of the computation. embed_tokens, lm_head: (V, D), the
    same tensor if the config ties them.
    """

    def __init__(self, build: Builder):
        super().__init__()
        config, source = build.config, build.source
        self.config, self.device, self.dtype = config, build.device, build.dtype
        # Gradient checkpointing: the first `recomputed_layers` layers keep only their input, and
        # backward computes the rest again. tools/budget.py sets it, to fit memory.
        self.recomputed_layers = 0
        self.register_buffer("embed_tokens", source.embeddings(self.device, self.dtype))
        layers = range(config.num_hidden_layers)
        progress = tqdm(layers, "load", leave=False, unit="layer", disable=None)
        self.layers = nn.ModuleList(Block(build, i) for i in progress)
        self.norm = build.norm("model.norm", config.hidden_size)
        self.register_buffer("lm_head", source.lm_head(self.embed_tokens, self.device))
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq.float().to(self.device))

    def forward(
        self, ids: Tensor, positions: Tensor, attend: attention.Packed | attention.Paged
    ) -> Tensor:
        """Tokens ids (n,) int64, each at its position (n,) int64 in its text → hidden (n, D) in
        self.dtype, after the final norm. attend: which tokens each of them sees.
        """
        # The residual stream is fp32 on a GPU too, because bf16 would round each of its sums, and
        # not always to the same number in the sampler's and the trainer's batches.
        residual = elementwise.embed(ids, self.embed_tokens)  # (n, D) f32
        branch = None  # until the first layer that is not recomputed
        cos, sin = rotary(positions, self.inv_freq, self.rope_scale)
        attend = partial(attend, cos=cos, sin=sin)  # the same angles in every layer
        for i, layer in enumerate(self.layers):
            if i < self.recomputed_layers and torch.is_grad_enabled():
                residual = layer.checkpointed(residual, attend)
            else:
                residual, branch = layer(residual, branch, attend)
        _, hidden = self.norm(residual, branch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, D) → (n, V) f32."""
        return logprobs.logits(hidden, self.lm_head)

    def logprobs(
        self, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(B, T) tokens → (B, T) f32 log-probability of each answer token, and entropy of its
        distribution. Rows with the same prompt share it: the model reads it once.

        Row b is prompt_lengths[b] ≥ 1 prompt tokens, lengths[b] ≥ 1 answer tokens, then padding.
        Log-probability and entropy are 0 outside the answer. Temperature divides the logits, as in
        sampling (0 counts as 1). Only the log-probabilities have a gradient. No [B, T, V] tensor
        ever exists: see ops/logprobs.py.
        """
        flat = flat_row(tokens, prompt_lengths, lengths)
        ids = tokens.flatten()
        attend = attention.Packed(flat.groups, tokens.device)
        hidden = self(ids[flat.inputs], attend.positions, attend)
        # All answers to a prompt read its last state: Gather sums their gradients in fp32.
        states = attention.Gather.apply(hidden, flat.predictors)  # (a, D)
        targets = ids[flat.targets]  # (a,)
        of_targets = logprobs.TokenLogprobs.apply(states, targets, self.lm_head, temperature or 1.0)
        zeros = torch.zeros(ids.shape, device=ids.device)
        logprob, entropy = (
            zeros.index_copy(0, flat.targets, values).view(tokens.shape) for values in of_targets
        )
        return logprob, entropy


def load(
    source,
    quant: str = "nvfp4",
    rank: int = 32,
    alpha: float = 32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Decoder:
    """→ Decoder with quantised weights and a fresh adapter. `seed` seeds the draw of lora_A.

    source: an opened checkpoint, tools.weights.open(name). The model uses its config, tensor(),
    projection(), embeddings(), lm_head() and finish(). quant: "nvfp4" (scale sweep), "rtn" (the
    paper's rounding) or "bf16" (not quantised; fp32 on a CPU). rank, alpha: the adapter's r, and
    the numerator of its scale alpha / r. ValueError: an unknown quant, a rank below 1, an
    unsupported architecture or config, a tensor that is missing, damaged, misshapen or left over.
    """
    model = Decoder(Builder(source, quant, rank, alpha, torch.device(device), seed))
    source.finish()
    return model


# --- rows of tokens as one flat row


class FlatRow(NamedTuple):
    """Rows of padded tokens (B, T) as one flat row of n tokens, which contains each prompt once.

    The prompt P Q, for example, with two answers:

        tokens         P Q a b c .     flat row    P Q a b d    without an answer's last token,
                       P Q d e . .     inputs      0 1 2 3 8    which no token follows
        answer tokens  a b c d e
        targets        2 3 4 8 9
        predictors     1 2 3 1 4       c is predicted by b, which is token 3 of the flat row
    """

    inputs: Tensor  # (n,) int64: where each token of the flat row lies in tokens.flatten()
    groups: list[tuple[int, list[int]]]  # what attention.Packed takes
    targets: Tensor  # (a,) int64: where each answer token lies in tokens.flatten()
    predictors: Tensor  # (a,) int64: where the token before each lies in the flat row


def flat_row(tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor) -> FlatRow:
    """tokens (B, T): row b is prompt_lengths[b] tokens of a prompt, lengths[b] ≥ 1 of its answer,
    padding.
    """
    T = tokens.shape[1]
    lengths = lengths.tolist()
    inputs, groups, targets, predictors = [], [], [], []
    end = 0  # tokens in the flat row so far
    for prompt, rows in rows_by_prompt(tokens, prompt_lengths).items():
        P, first = len(prompt), rows[0] * T
        inputs += range(first, first + P)
        end += P
        last_of_prompt = end - 1
        for row in rows:
            start = row * T + P
            answer = range(start, start + lengths[row])
            inputs += answer[:-1]
            targets += answer
            predictors += [last_of_prompt, *range(end, end + lengths[row] - 1)]
            end += lengths[row] - 1
        groups.append((P, [lengths[row] - 1 for row in rows]))
    as_index = partial(torch.tensor, device=tokens.device)
    return FlatRow(as_index(inputs), groups, as_index(targets), as_index(predictors))


def rows_by_prompt(tokens: Tensor, prompt_lengths: Tensor) -> dict[tuple[int, ...], list[int]]:
    """→ {a prompt's token ids: numbers of its rows} of tokens (B, T)."""
    rows = {}
    lengths = prompt_lengths.tolist()
    for row, ids in enumerate(tokens.tolist()):
        prompt = tuple(ids[: lengths[row]])
        rows.setdefault(prompt, []).append(row)
    return rows


# --- which models


class Family(NamedTuple):
    """What tells the families apart: which parts a layer has."""

    qkv_bias: bool  # of q_proj, k_proj and v_proj
    o_bias: bool = False
    head_norm: bool = False  # an RMSNorm on each head's q and k


FAMILIES = {
    "LlamaForCausalLM": lambda config: Family(
        qkv_bias=config.attention_bias, o_bias=config.attention_bias
    ),
    "MistralForCausalLM": lambda config: Family(qkv_bias=False),
    "Qwen2ForCausalLM": lambda config: Family(qkv_bias=True),
    "Qwen3ForCausalLM": lambda config: Family(
        qkv_bias=config.attention_bias, o_bias=config.attention_bias, head_norm=True
    ),
}


def family(config: PreTrainedConfig) -> Family:
    """ValueError: the model computes what this decoder does not."""
    name, *_ = config.architectures or ["a model without a named architecture"]
    if name not in FAMILIES:
        raise ValueError(f"{name} is not supported: take a {', '.join(FAMILIES)}")
    rope = config.rope_parameters
    theta = rope.get("rope_theta")
    known = {"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"}
    unknown_rope = rope.get("rope_type", "default") not in known
    refused = {
        "hidden_act": config.hidden_act != "silu",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "sliding_window": config.model_type == "mistral" and config.sliding_window,
        "is_causal": not getattr(config, "is_causal", True),
        "per_layer_config": getattr(config, "is_heterogeneous", False),
        "rope_parameters": unknown_rope or rope.get("partial_rotary_factor", 1) != 1,
        "rope_theta": type(theta) not in (int, float),
    }
    for key, bad in refused.items():
        if bad:
            value = theta if key == "rope_theta" else getattr(config, key)
            raise ValueError(
                f"{name} with {key}={value!r} is not supported by this decoder: take another model"
            )
    return FAMILIES[name](config)


def head_dim(config: PreTrainedConfig) -> int:
    size = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if size is None else size


def rope_frequencies(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """→ (Dh/2,) radians per position, and the factor on cos and sin. transformers has the formulas
    of the scaled kinds; the plain one is written out, because transformers keeps it in models, slow
    to import. ValueError, TypeError: a number that is not positive and finite, or is none.
    """
    rope = config.rope_parameters
    for name, number in rope.items():
        counted = "type" not in name and name != "truncate"  # these two are a word and a bool
        if counted and number is not None and not 0 < number < torch.inf:
            raise ValueError(f"rope_parameters has {name}={number}, which must be above 0, finite")
    kind = rope.get("rope_type", "default")
    Dh, scale = head_dim(config), 1.0
    if Dh < 2 or Dh % 2:
        raise ValueError(f"its heads have {Dh} numbers, which RoPE cannot pair")
    frequencies = 1 / rope["rope_theta"] ** (torch.arange(0, Dh, 2) / Dh)
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    if not frequencies.isfinite().all():
        raise ValueError(f"rope_parameters {rope} give frequencies that are not finite")
    return frequencies, scale


def rotary(positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """positions (n,) → cosines and sines of RoPE's angles, both (n, Dh/2) f32. frequencies, scale:
    of rope_frequencies.
    """
    angle = positions[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    if scale != 1:
        cos, sin = cos * scale, sin * scale
    return cos, sin
