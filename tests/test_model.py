"""The decoder against transformers, and its log-probabilities and gradients against their
definitions.
"""

import copy
import sys

import pytest
import torch
from conftest import ROPE, logits_of, tiny_checkpoint
from test_weights import foreign
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import lora
import model
import nvfp4
from ops import logprobs
from rollout import Sampler, SamplingParams
from tools import weights

END = 2  # the tiny models' end token, and their padding


def load(folder, quant="bf16", device="cpu", learned=True):
    """A Decoder; `learned` moves lora_B away from 0, so that the adapter changes the result."""
    m = model.load(weights.open(folder), quant, rank=4, alpha=8, device=device)
    if learned:
        for layer in lora.lora_layers(m).values():
            layer.lora_B.data.copy_(torch.randn(layer.lora_B.shape) * 0.05)
        lora.refresh(m)
    return m


@torch.no_grad()
def check_against(oracle, m, ids, new):
    """Logits and `new` greedy tokens; returns these. fp32 sums differ by their order: transformers
    in fp32 is off by up to 1.8e-6 of transformers in fp64. A wrong RoPE pair is off by 0.1.
    """
    ours = logits_of(m, ids)
    exact = torch.nn.Module.double(copy.deepcopy(oracle))(ids).logits
    assert (ours - exact).norm() < 4e-6 * exact.norm()
    oracle.generation_config.eos_token_id = None
    mask = torch.ones_like(ids)
    theirs = oracle.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    params = SamplingParams(new, stop_ids=[], temperature=0.0)
    ours = Sampler(m).generate(ids.tolist(), 1, params, step=0).tokens
    assert ours.tolist() == theirs.tolist()
    return theirs[:, ids.shape[1] :]


def answers(m):
    """Rows 0, 3 and 6 share a prompt, and so do 2 and 5. Row 1's has one token, row 4's is the
    start of row 0's. A prompt or an answer may have an end token, or be one; the padding is random.
    """
    prompts, lengths = torch.tensor([5, 1, 9, 5, 4, 9, 5]), torch.tensor([11, 1, 6, 1, 4, 10, 8])
    tokens = torch.randint(3, m.config.vocab_size, (7, 19))
    tokens[0, 2] = tokens[2, 4] = tokens[1, 1] = tokens[3, 5] = tokens[2, 14] = END
    for row, first in ((3, 0), (6, 0), (4, 0), (5, 2)):
        tokens[row, : prompts[row]] = tokens[first, : prompts[row]]
    return tokens, prompts, lengths


def alone(m, tokens, prompts, lengths, temperature):
    """(logprobs, entropy) by definition: one row at a time, without padding, whole logits in
    float64.
    """
    result = torch.zeros(2, *tokens.shape, dtype=torch.float64)
    for b, (p, n) in enumerate(zip(prompts.tolist(), lengths.tolist(), strict=True)):
        ids = tokens[b, : p + n]
        logits = logits_of(m, ids[None])[0, p - 1 : -1]
        log_p = (logits.double() / temperature).log_softmax(-1)
        result[0, b, p : p + n] = log_p[range(n), ids[p:]]
        result[1, b, p : p + n] = -(log_p.exp() * log_p).sum(-1)
    return result


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_sees_which_layer_is_loaded(tiny, monkeypatch, capsys, terminal):
    """On stderr, erased afterwards; a file or a pipe gets nothing."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load(tiny)
    err = capsys.readouterr().err
    assert ("0/3" in err and err.endswith(" \r")) if terminal else not err


@pytest.mark.parametrize(
    "family, rope, changes",
    [
        ("llama", "llama3", {}),
        ("llama", "default", {"attention_bias": True}),
        ("qwen2", "yarn", {}),
        ("qwen2", "linear", {"tie_word_embeddings": True}),
        ("qwen3", "yarn", {"head_dim": 24, "attention_bias": True}),
    ],
)
def test_logits_and_greedy_tokens_equal_transformers(tmp_path, family, rope, changes):
    """Every family and every RoPE scaling; the prompt is longer than the scaled kinds' original
    context.
    """
    parameters = {"rope_type": rope, "rope_theta": 10000.0} | ROPE[rope]
    oracle = tiny_checkpoint(tmp_path, family, rope_parameters=parameters, **changes)
    check_against(oracle, load(tmp_path, learned=False), torch.randint(97, (2, 61)), new=12)


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2):
    """The default model, also after its end token. A wrong order of GGUF's q and k rows fails
    here.
    """
    source, tokenizer = smollm2
    oracle = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    )
    ids = torch.tensor([weights.encode(tokenizer, "Name a colour, in a word!")])
    drawn = check_against(oracle, model.load(source, quant="bf16", rank=2), ids, new=16)
    assert torch.isin(drawn[:, :-1], torch.tensor(source.stop_ids())).any()


@pytest.mark.parametrize("quant", ["nvfp4", "rtn"])
def test_a_quantised_model_is_the_model_with_rounded_weights(tmp_path, quant):
    """Only the seven projections are rounded; q, k, v share a global scale, and so do gate and
    up.
    """
    oracle = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    for layer in oracle.model.layers:
        layer.mlp.up_proj.weight.data *= 4  # the largest is in a later part
    oracle.save_pretrained(tmp_path)
    for layer in oracle.model.layers:
        a, f = layer.self_attn, layer.mlp
        fused = [a.q_proj, a.k_proj, a.v_proj], [f.gate_proj, f.up_proj], [a.o_proj], [f.down_proj]
        for group in fused:
            shared = nvfp4.shared_global_scale(*(linear.weight for linear in group))
            for linear in group:
                q = nvfp4.quantize(linear.weight, weights.QUANT[quant], shared)
                linear.weight.data = nvfp4.dequantize(q, torch.float32)
    m = load(tmp_path, quant, learned=False)
    assert m.lm_head.data_ptr() == m.embed_tokens.data_ptr()
    check_against(oracle, m, torch.randint(97, (2, 33)), new=4)


def test_logprobs_and_entropy_are_those_of_each_row_alone(tiny, monkeypatch):
    """log_softmax(logits / T) at the answer's tokens and end token, 0 elsewhere, in chunks of any
    size. Other padding changes no bit. A prompt is read once for all of its rows, without padding
    and without an answer's last token, also where a group is cut.
    """
    m, read = load(tiny), []
    rows = tokens, prompts, lengths = answers(m)
    position = torch.arange(19)
    padding = position >= (prompts + lengths)[:, None]
    junk = torch.where(padding, torch.randint(97, (7, 19)), tokens)
    with torch.no_grad():
        ref = alone(m, *rows, 0.7)
        m.register_forward_pre_hook(lambda m, inputs: read.append(len(inputs[0])))
        # A row alone sums a logit's 64 products in another order, which depends on the CPU. Each of
        # both sums is off by about √64 · 2⁻²⁴ · Σ|h·w| / T, and Σ|h·w| / T < 18: together 1.7e-5
        for part in ([1], [6, 5, 0], [3]):
            found = torch.stack(m.logprobs(*(x[part] for x in rows), 0.7))
            assert (found - ref[:, part]).abs().max() < 1.7e-5
        monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 5 * 97)
        whole = torch.stack(m.logprobs(*rows, 0.7))
        assert (whole - ref).abs().max() < 1.7e-5 and torch.equal(whole == 0, ref == 0)
        assert torch.equal(torch.stack(m.logprobs(junk, prompts, lengths, 0.7)), whole)
    assert read == [1, 5 + 9 + 26, 5, 19 + 34, 19 + 34]


@pytest.mark.parametrize(
    "quant, recomputed", [("bf16", 0), ("bf16", 1), ("rtn", 2), ("bf16", 3), ("rtn", 3)]
)
def test_gradients_equal_the_plain_computation(tiny, monkeypatch, quant, recomputed):
    """The chunked backward equals autograd over whole logits, whether no layer, some or all of the
    three are recomputed: the first ones, of which autograd keeps the input alone.
    """
    m = load(tiny, quant)
    rows, parameters, computed, saved = answers(m), [*m.parameters()], [], []
    assert len(parameters) == 2 * 4 * 3
    plain, _ = alone(m, *rows, 0.7)
    weight = torch.randn(plain.shape)
    ref = torch.autograd.grad((plain * weight).sum(), parameters)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 5 * 97)
    for i, layer in enumerate(m.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: computed.append(i))
    m.recomputed_layers = recomputed
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result, _ = m.logprobs(*rows, 0.7)
    assert (len(saved) < 40) == (recomputed == 3)
    (result * weight).sum().backward()
    assert computed == [0, 1, 2, *reversed(range(recomputed))]
    for p, b in zip(parameters, ref, strict=True):
        assert (p.grad - b).norm() / b.norm() < 1e-5  # fp32 sums of 41 terms


def test_logits_of_all_tokens_never_exist(tmp_path, monkeypatch):
    """No tensor of forward or backward is larger than the head; [n, V] would be four times as
    large.
    """
    tiny_checkpoint(tmp_path, vocab_size=1024, num_hidden_layers=1)
    m = load(tmp_path)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 16 * 1024)
    largest = [0]

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in tree_leaves(out) if torch.is_tensor(t))
            return out

    with Record():
        tokens, ones = torch.randint(1024, (4, 65)), torch.ones(4, dtype=torch.long)
        m.logprobs(tokens, ones, 64 * ones, 1.0)[0].sum().backward()
    assert max(largest) <= m.lm_head.numel() == 4 * 64 * 1024 / 4


def gradients(folder, quant, device, copies, checkpointing):
    """→ one vector, the gradients of all adapters; the batch is `answers` repeated `copies`
    times.
    """
    torch.manual_seed(0)
    m = load(folder, quant, device)
    m.recomputed_layers = checkpointing * len(m.layers)
    where = [t.repeat(copies, *[1] * (t.dim() - 1)).to(device) for t in answers(m)]
    weight = torch.randn(where[0].shape).to(device)
    (m.logprobs(*where, 0.7)[0] * weight).sum().backward()
    return torch.cat([p.grad.flatten().cpu() for p in m.parameters()])


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["rtn", "bf16", "left"])
@pytest.mark.parametrize("copies", [1, 20])
def test_gpu_gradients_are_those_of_a_cpu(tiny, tmp_path, quant, copies):
    """bf16 against fp32, through the kernel (53 tokens) and through cuBLAS (699 tokens, up to 60
    answers to a prompt), recomputed or not. The limit is twice the rounding error that bf16 has in
    this model on a CPU. A term that is missing or counted twice would change the gradient by more
    than a tenth. "left": a checkpoint in NVFP4 with projections in 16 bits in each layer.
    """
    if quant == "left":
        foreign(tmp_path, "modelopt", "llama", "[ko]_proj|1.mlp", ["*.[ko]_proj", "*.1.mlp"])
        tiny, quant = tmp_path, "nvfp4"
    exact = gradients(tiny, quant, "cpu", copies, False)
    for checkpointing in (False, True):
        ours = gradients(tiny, quant, "cuda", copies, checkpointing)
        assert (ours - exact).norm() < 2**-3 * exact.norm()
