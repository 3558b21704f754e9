"""One small decoder, the only forward of this project: Llama, Qwen2 / Qwen2.5 and Qwen3.

    ids → embed → [   x + o(attention(rope(qkv(norm(x)))))
                    → x + down(swiglu(gate_up(norm(x))))   ] × layers → norm → hidden

The tokens of a forward pass lie in one flat row (n,), without padding: every operation but
attention computes a token alone, and an object of ops/attention.py says which tokens a token sees.
The trainer packs a prompt once, followed by the answers to it; flat_row() makes that row.

Sampler and trainer run this same code on the same tensors. Every projection is a frozen base in
NVFP4 (or in bf16, with quant="bf16", or if a 4-bit checkpoint leaves it so) with a LoRA beside it;
q, k, v are one matrix, and so are gate and up. Embeddings, lm_head, norms and biases are not
quantised. The norms' weights are fp32 buffers; aqn.py adds its noise to those of input_layernorm
and post_attention_layernorm.

load() reads and quantises one matrix after the other, so no second copy of all weights exists. A
CPU computes in fp32, a GPU in bf16 with the residual stream and the logits in fp32.

transformers supplies the config and the formulas of scaled RoPE; its own models are the tests'
oracle. Left out: mixtures of experts, sliding windows, encoder parts, dropout.
Needs: torch, transformers, tqdm; nvfp4.py, fp4_gemm.py, lora.py,
ops/{elementwise,attention,logprobs}.py, tools/weights.py.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import fp4_gemm
import nvfp4
from lora import LoRALinear
from ops import attention, elementwise, logprobs
from tools import weights

# what tells the families apart: (bias on q, k, v; bias on o; a norm on each head's q and k)
FAMILIES = {
    "LlamaForCausalLM": lambda c: (c.attention_bias, c.attention_bias, False),
    "Qwen2ForCausalLM": lambda c: (True, False, False),
    "Qwen3ForCausalLM": lambda c: (c.attention_bias, c.attention_bias, True),
}
QUANT = {"nvfp4": "sweep", "rtn": "rtn", "bf16": None}


def load(name_or_source, quant="nvfp4", rank=32, alpha=32, device="cpu", seed=0):
    """→ Decoder with quantised weights and a fresh adapter. `seed` seeds the draw of lora_A.

    name_or_source: what weights.open takes, or returns. quant: "nvfp4" (scale sweep), "rtn" (the
    paper's rounding) or "bf16" (not quantised; fp32 on a CPU). rank, alpha: the adapter's r, and
    the numerator of its scale alpha / r. ValueError: an unknown quant, a rank below 1, a checkpoint
    that weights.open refuses, an unsupported architecture or config, a tensor that is missing,
    damaged, misshapen or left over.
    """
    if quant not in QUANT:
        raise ValueError(f"quant={quant!r} must be one of {', '.join(QUANT)}")
    source = name_or_source if hasattr(name_or_source, "tensor") else weights.open(name_or_source)
    model = Decoder(
        source, QUANT[quant], rank, alpha, torch.device(device), torch.Generator().manual_seed(seed)
    )
    source.finish()
    return model


class RMSNorm(nn.Module):
    def __init__(self, weight, eps, device, dtype):
        super().__init__()
        self.register_buffer("weight", weight.float().to(device))
        self.eps, self.dtype = eps, dtype

    def forward(self, x, y):
        """→ (x + y, the norm of this sum); y may be None."""
        return elementwise.add_norm(x, y, self.weight, self.eps, self.dtype)


class FrozenLinear(nn.Module):
    """y = x @ W.T + bias: x (…, K) → (…, N) in x's dtype. If forward gets an adapter, its product
    is added.

    weights: tensors (N_i, K) or NVFP4Tensors, joined along N. biases: tensors (N_i,), or none.
    method: "sweep", "rtn" or None. left: whether a 4-bit checkpoint stores at least one of the
    weights in 16 bits. dtype: of the bias and of a Dense W.

    W is packed NVFP4, and a weight that is already an NVFP4Tensor keeps its codes. If method is
    None, W is a Dense matrix, and NVFP4Tensors are dequantised. If left, W is Dense whatever the
    method, because weights that run as one matrix must be of one kind.
    """

    fuses_lora = True

    def __init__(self, weights, biases, method, left, dtype, device):
        super().__init__()
        self.register_buffer("bias", torch.cat(biases).to(device, dtype) if biases else None)
        parts = [
            tuple(t.to(device) for t in w) if isinstance(w, tuple) else w.to(device)
            for w in weights
        ]
        if method is None or left:
            parts = [w if torch.is_tensor(w) else nvfp4.dequantize(w, torch.float32) for w in parts]
            self.W = fp4_gemm.Dense(torch.cat(parts).to(dtype))
            if left and device.type == "cpu":
                # tools/export.py, which loads on a CPU, writes the codes and not these numbers.
                self.W.parts = weights
        else:
            if torch.is_tensor(parts[0]):
                # vLLM and TensorRT-LLM require one global scale for all weights of one GEMM
                shared = nvfp4.shared_global_scale(*parts)
                parts = [nvfp4.quantize(w, method, shared) for w in parts]
            self.W = fp4_gemm.pack(*parts)
        self.out_features, self.in_features = self.W.shape

    def adapt(self, B, splits):
        """LoRALinear calls this after each change of the adapter's B, of which a Dense keeps a
        copy.
        """
        if isinstance(self.W, fp4_gemm.Dense):
            self.W.adapt(B, splits)

    def forward(self, x, adapter=None, compute_output=True):
        return fp4_gemm.linear(x, self.W, self.bias, adapter, compute_output)


class Where(NamedTuple):
    """Where the tokens of a forward pass are, for the attention of one layer."""

    attend: object  # an attention.Packed or attention.Paged
    cos: torch.Tensor  # (n, Dh/2) f32, of the angles of the tokens' positions
    sin: torch.Tensor
    layer: int


class Attention(nn.Module):
    def __init__(self, linear, norm, config, qkv_bias, o_bias, head_norm):
        super().__init__()
        H, Hkv, Dh = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
        self.heads = H, Hkv
        q, kv, D = H * Dh, Hkv * Dh, config.hidden_size
        self.qkv_proj = linear(dict(q_proj=q, k_proj=kv, v_proj=kv), D, qkv_bias)
        self.o_proj = linear(dict(o_proj=D), q, o_bias)
        self.q_norm, self.k_norm = (
            norm(n, Dh) if head_norm else None for n in ("q_norm", "k_norm")
        )

    def forward(self, h, where):
        """h (n, D) → (n, D)."""
        norms = self.q_norm and (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        heads = attention.Heads(*self.heads, norms)
        qkv = self.qkv_proj(h)
        return self.o_proj(where.attend(qkv, heads, where.cos, where.sin, where.layer))


class MLP(nn.Module):
    def __init__(self, linear, config):
        super().__init__()
        D, F_ = config.hidden_size, config.intermediate_size
        self.gate_up_proj = linear(dict(gate_proj=F_, up_proj=F_), D, False)
        self.down_proj = linear(dict(down_proj=D), F_, False)

    def forward(self, x, compute_output=True):
        return self.down_proj(elementwise.swiglu(self.gate_up_proj(x)), compute_output)


class Block(nn.Module):
    def __init__(self, attention, mlp, input_norm, post_attention_norm):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = input_norm, post_attention_norm

    def forward(self, x, y, where, compute_output=True):
        """x (n, D) and the branch y that the next norm adds to it → both after this block."""
        x, h = self.input_layernorm(x, y)
        x, h = self.post_attention_layernorm(x, self.self_attn(h, where))
        return x, self.mlp(h, compute_output)

    def summed(self, x, where):
        """x → x + y, both (n, D) f32, for gradient checkpointing, which then keeps x alone.

        A call with gradients enabled is the recomputation in backward. Backward reads only the
        tensors that autograd saves inside this call, so the call skips the last GEMM.
        """
        x, y = self(x, None, where, compute_output=not torch.is_grad_enabled())
        return x + y


class Decoder(nn.Module):
    """layers, norm, embed_tokens (V, D), lm_head (V, D; the same tensor when tied); config, dtype,
    device.
    """

    def __init__(self, source, method, rank, alpha, device, generator):
        super().__init__()
        config, traits = source.config, family(source.config)
        self.config, self.device = config, device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        # Gradient checkpointing: the first `recomputed_layers` layers keep only their input, and
        # backward computes the rest again.
        self.recomputed_layers = 0
        D, V = config.hidden_size, config.vocab_size

        def norm(at, name, width):
            weight = source.tensor(f"{at}{name}.weight", (width,))
            return RMSNorm(weight, config.rms_norm_eps, device, self.dtype)

        def linear(at, rows, K, bias):
            weights = [source.tensor(f"{at}{name}.weight", (n, K)) for name, n in rows.items()]
            biases = [source.tensor(f"{at}{name}.bias", (n,)) for name, n in rows.items() if bias]
            left = source.packed and any(map(torch.is_tensor, weights))
            if method and not left and K % nvfp4.BLOCK:
                raise ValueError(
                    f"{source.path}: {at}{', '.join(rows)} have rows of {K} weights, "
                    "and 4 bits need a multiple of 16: take --quant bf16"
                )
            base = FrozenLinear(weights, biases, method, left, self.dtype, device)
            return LoRALinear(base, rank, alpha, rows.values(), self.dtype, device, generator)

        embed = source.tensor("model.embed_tokens.weight", (V, D)).to(self.dtype)
        # untied embeddings stay in pinned host memory, because a GPU reads few of their rows
        in_host = device.type == "cuda" and not config.tie_word_embeddings
        self.register_buffer(
            "embed_tokens", embed.cpu().pin_memory() if in_host else embed.to(device)
        )
        self.layers = nn.ModuleList()
        for i in tqdm(
            range(config.num_hidden_layers), "load", leave=False, unit="layer", disable=None
        ):
            at = f"model.layers.{i}."
            attention = Attention(
                partial(linear, f"{at}self_attn."),
                partial(norm, f"{at}self_attn."),
                config,
                *traits,
            )
            mlp = MLP(partial(linear, f"{at}mlp."), config)
            norms = norm(at, "input_layernorm", D), norm(at, "post_attention_layernorm", D)
            self.layers.append(Block(attention, mlp, *norms))
        self.norm = norm("model.", "norm", D)
        tied, head = config.tie_word_embeddings, self.embed_tokens
        # some exports store the tied matrix twice
        if not tied or "lm_head.weight" in source.unread:
            head = source.tensor("lm_head.weight", (V, D)).to(device, self.dtype)
            if tied and not torch.equal(head, self.embed_tokens):
                raise ValueError(
                    f"{source.path}: lm_head.weight is not the embeddings, to which its config "
                    "ties it: set tie_word_embeddings there to false"
                )
        self.register_buffer("lm_head", self.embed_tokens if tied else head)
        inv_freq, self.rope_scale = rope_frequencies(config)
        self.register_buffer("inv_freq", inv_freq.float().to(device))

    def forward(self, ids, positions, attend):
        """Tokens ids (n,) int64, each at its position (n,) int64 in its text → hidden (n, D) in
        self.dtype, after the final norm. attend: which tokens each of them sees, an
        attention.Packed or attention.Paged.
        """
        # The residual stream is fp32 on a GPU too, because bf16 would round each of its sums, and
        # not always to the same number in the sampler's and the trainer's batches.
        x = elementwise.embed(ids, self.embed_tokens)  # (n, D)
        y = None  # a sublayer's output; the next norm adds it to x
        angle = positions[:, None] * self.inv_freq  # (n, Dh/2) f32
        cos, sin = angle.cos(), angle.sin()
        if self.rope_scale != 1:
            cos, sin = cos * self.rope_scale, sin * self.rope_scale
        for i, layer in enumerate(self.layers):
            where = Where(attend, cos, sin, i)
            if i < self.recomputed_layers and torch.is_grad_enabled():
                # Use reentrant checkpointing, for two reasons. Non-reentrant checkpointing calls a
                # hook for every tensor that autograd saves, and on a small model these hooks take
                # longer than the kernels. It also runs the first forward with gradients enabled:
                # `summed` would take that call for the recomputation and skip the last GEMM.
                # Reentrant checkpointing computes gradients only if an input requires one.
                x = recompute(
                    layer.summed,
                    x.requires_grad_(),
                    where,
                    use_reentrant=True,
                    preserve_rng_state=False,
                )
            else:
                x, y = layer(x, y, where)
        return self.norm(x, y)[1]

    def logits(self, hidden):
        """(n, D) → (n, V) f32."""
        return logprobs.logits(hidden, self.lm_head)

    def logprobs(self, tokens, prompt_lengths, lengths, temperature):
        """(B, T) tokens → (B, T) f32 log-probability of each answer token, and entropy of its
        distribution. Rows with the same prompt share it: the model reads it once.

        Row b is prompt_lengths[b] ≥ 1 prompt tokens, lengths[b] ≥ 1 answer tokens, then padding;
        outside the answer both are 0. Temperature divides the logits, as in sampling (0 counts as
        1). Only the log-probabilities have a gradient. No [B, T, V] tensor ever exists: see
        ops/logprobs.py.
        """
        flat = flat_row(tokens, prompt_lengths, lengths)
        ids = tokens.flatten()
        attend = attention.Packed(flat.groups, tokens.device)
        hidden = self(ids[flat.source], attend.positions, attend)
        # (a, D), a: all answer tokens. Gather: all answers read their prompt's last state, and it
        # sums the gradients in fp32.
        states = attention.Gather.apply(hidden, flat.before)
        targets = ids[flat.answers]
        found = logprobs.TokenLogprobs.apply(states, targets, self.lm_head, temperature or 1.0)
        zeros = torch.zeros(ids.shape, device=ids.device)
        return tuple(zeros.index_copy(0, flat.answers, x).view(tokens.shape) for x in found)


class FlatRow(NamedTuple):
    """Rows of padded tokens (B, T) as one flat row of n tokens, which contains each prompt once.

    An answer's last token is left out, because no token follows it.
    """

    source: torch.Tensor  # (n,) int64: where each flat token lies in tokens.flatten()
    groups: list  # what attention.Packed takes
    before: torch.Tensor  # (a,) int64: the flat token in front of each answer token
    answers: torch.Tensor  # (a,) int64: where each answer token lies in tokens.flatten()


def flat_row(tokens, prompt_lengths, lengths):
    """→ FlatRow of tokens (B, T). Row b is prompt_lengths[b] tokens of a prompt, lengths[b] ≥ 1 of
    its answer, padding.
    """
    T, device = tokens.shape[1], tokens.device
    lengths = lengths.tolist()
    source, groups, before, answers = [], [], [], []
    end = 0  # of the flat row so far
    for prompt, rows in rows_by_prompt(tokens, prompt_lengths).items():
        start = rows[0] * T
        source.append(torch.arange(start, start + len(prompt)))
        end += len(prompt)
        last_of_prompt = torch.tensor([end - 1])
        for row in rows:
            start, read = row * T + len(prompt), lengths[row] - 1
            source.append(torch.arange(start, start + read))
            before += [last_of_prompt, torch.arange(end, end + read)]
            answers.append(torch.arange(start, start + read + 1))
            end += read
        groups.append((len(prompt), [lengths[row] - 1 for row in rows]))
    source, before, answers = (torch.cat(part).to(device) for part in (source, before, answers))
    return FlatRow(source, groups, before, answers)


def rows_by_prompt(tokens, prompt_lengths):
    """→ {a prompt, a tuple of token ids: numbers of its rows} of tokens (B, T)."""
    rows = {}
    for row, (ids, length) in enumerate(zip(tokens.tolist(), prompt_lengths.tolist(), strict=True)):
        rows.setdefault(tuple(ids[:length]), []).append(row)
    return rows


def family(config):
    """→ (qkv bias, o bias, head norm). ValueError: the model computes what this decoder does
    not.
    """
    name = (config.architectures or ["a model without a named architecture"])[0]
    if name not in FAMILIES:
        raise ValueError(f"{name} is not supported: this decoder is {', '.join(FAMILIES)}")
    rope_type = config.rope_parameters.get("rope_type", "default")
    refused = {
        "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "rope_parameters": rope_type
        not in {"default", *ROPE_INIT_FUNCTIONS} - {"dynamic", "longrope"}
        or config.rope_parameters.get("partial_rotary_factor", 1) != 1,
    }
    for key, bad in refused.items():
        if bad:
            raise ValueError(
                f"{name} with {key}={getattr(config, key)!r} is not supported by this decoder"
            )
    return FAMILIES[name](config)


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_frequencies(config):
    """→ (Dh/2,) radians per position, and the factor on cos and sin. transformers has the formulas
    of the scaled kinds; the plain one is written out, because transformers keeps it in models, slow
    to import.
    """
    kind = config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    Dh = head_dim(config)
    return 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, Dh, 2) / Dh), 1.0
