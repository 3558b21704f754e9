"""LoRA against merged matrices, and PEFT in both directions."""

import json
import os
import re

import peft
import pytest
import torch
import torch.nn.functional as F
from conftest import logits_of, tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

import lora
import model as decoder
from tools import adapter

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
IDS = torch.arange(24).view(2, 12) * 7 % 97


def load(folder, rank=4, alpha=8, seed=0):
    return decoder.load(str(folder), quant="bf16", rank=rank, alpha=alpha, seed=seed)


def logits(model):
    return logits_of(model, IDS)


def randomise(model):
    """Give lora_B values large enough that the adapter changes the logits by about their size."""
    for layer in lora.lora_layers(model).values():
        layer.lora_B.data.normal_(0, 0.2)
    lora.refresh(model)
    return model


# --- one layer


def test_a_fused_adapter_equals_the_merged_matrix():
    """Forward and every gradient agree in float64 up to the order of sums of 20 terms (1e-12)."""
    splits = 16, 8, 4
    base = nn.Linear(20, 28, bias=False).double().requires_grad_(False)
    layer = lora.LoRALinear(base, 3, 6, splits, torch.float64).double()
    layer.lora_B.data.normal_()
    x, dy = torch.randn(5, 7, 20).double().requires_grad_(), torch.randn(5, 7, 28).double()
    leaves = x, layer.lora_A, layer.lora_B
    pairs = zip(layer.lora_A.split(3), layer.lora_B.split(splits), strict=True)
    merged = base.weight + torch.cat([6 / 3 * b @ a for a, b in pairs])
    ours, theirs = layer(x), F.linear(x, merged)
    assert (ours - theirs).abs().max() < 1e-12
    grads = (torch.autograd.grad(y, leaves, dy) for y in (ours, theirs))
    for got, want in zip(*grads, strict=True):
        assert (got - want).abs().max() < 1e-12 * want.abs().max() * 35
    with pytest.raises(ValueError, match="rank 0"):
        lora.LoRALinear(base, 0, 6)


class Told(nn.Linear):
    """A base that fuses LoRA, and remembers what it was given."""

    fuses_lora = True

    def adapt(self, B, splits):
        self.adapted = B.clone(), splits

    def forward(self, x, *given):
        self.given = given
        return x


def test_a_base_that_fuses_gets_copies_that_refresh_rewrites_in_place():
    """Only refresh() rounds the parameters into the copies, at the same addresses."""
    base, splits, dtype = Told(20, 28, bias=False), (16, 8, 4), torch.bfloat16
    layer = lora.LoRALinear(base, 3, 6, splits, dtype)
    addresses = layer.copy_A.data_ptr(), layer.copy_B.data_ptr()
    layer.lora_A.data.normal_()
    layer.lora_B.data.normal_()
    layer(torch.randn(5, 20))
    assert not base.given[0].B.any(), "the copies still hold lora_B = 0"
    layer.refresh()
    layer(torch.randn(5, 20), compute_output=False)
    (A, B, *rest), compute_output = base.given
    assert rest == [splits, 2, layer.lora_A, layer.lora_B] and compute_output is False
    assert (A.data_ptr(), B.data_ptr()) == addresses
    assert torch.equal(A, layer.lora_A.to(dtype)) and torch.equal(B, layer.lora_B.to(dtype))
    assert torch.equal(base.adapted[0], B) and base.adapted[1] == splits
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32


# --- a model


def test_a_fresh_adapter_is_the_identity_and_alone_is_trained(tmp_path):
    """lora_B = 0 gives the oracle's logits (fp32, 1e-4); the seed decides lora_A in ±1/√K."""
    oracle = tiny_checkpoint(tmp_path)
    model = load(tmp_path, rank=64, alpha=64)
    assert (logits(model) - oracle(IDS).logits).abs().max() < 1e-4
    assert {n.rpartition(".")[2] for n, p in model.named_parameters()} == {"lora_A", "lora_B"}
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    layers, other = lora.lora_layers(model), lora.lora_layers(load(tmp_path, rank=64, seed=1))
    again = lora.lora_layers(load(tmp_path, rank=64, alpha=64))  # the same seed, drawn later
    assert len(layers) == 4 * 3
    for name, layer in layers.items():
        A, bound = layer.lora_A, layer.base.in_features**-0.5
        # P(the largest of 4 096 or more uniform numbers is below .99 of the bound) = e⁻²⁰
        assert 0.99 * bound < min(A.max(), -A.min()) <= A.abs().max() <= bound
        assert not torch.equal(A, other[name].lora_A) and not layer.lora_B.any()
        assert torch.equal(A, again[name].lora_A)


def test_the_reference_policy_is_the_frozen_base_whatever_was_learnt(tiny):
    """In `disabled` the model is the policy before step 1, before and after an optimizer step.

    Logits follow the parameters only after refresh. An exception inside `disabled` enables the
    adapter again.
    """
    model = load(tiny)
    with lora.disabled(model):
        reference = logits(model).detach()
    before = logits(model)
    # the adapter adds exact zeros but may change the order of fp32 sums (fewer than 600 terms)
    assert (before - reference).abs().max() < 2**-18 * reference.abs().max()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before.square().mean().backward()
    optimizer.step()
    assert torch.equal(logits(model), before), "not refreshed yet"
    lora.refresh(model)
    trained = logits(model).detach()
    assert not torch.equal(trained, before)
    with torch.no_grad():
        assert torch.equal(logits(model), trained)
    with pytest.raises(KeyError), lora.disabled(model):
        assert torch.equal(logits(model), reference)
        raise KeyError
    assert torch.equal(logits(model), trained)


def test_tied_embeddings_are_neither_adapted_nor_quantised(tmp_path):
    """lm_head shares the embedding's storage; only projections have adapters."""
    oracle = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    model = decoder.load(str(tmp_path), quant="nvfp4", rank=1, alpha=4)
    assert model.lm_head.data_ptr() == model.embed_tokens.data_ptr()
    assert torch.equal(model.lm_head, oracle.lm_head.weight)
    tensors = lora.adapter_tensors(model)
    assert {name.split(".")[-3] for name in tensors} == PROJECTIONS and len(tensors) == 2 * 7 * 3


# --- adapter files

FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_our_adapter_and_we_read_its(family, tmp_path):
    """Both ways, with B ≠ 0 everywhere, logits agree within 1e-4 with transformers under PEFT."""
    base, ours, theirs = tmp_path / "base", tmp_path / "ours", tmp_path / "theirs"
    oracle = tiny_checkpoint(base, family)
    model = randomise(load(base))
    lora.save_adapter(model, ours, base)
    assert {*os.listdir(ours)} == {"adapter_config.json", "adapter_model.safetensors"}
    with torch.no_grad():
        plain = oracle(IDS).logits
        wrapped = peft.PeftModel.from_pretrained(oracle, ours)
        assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
        assert (wrapped(IDS).logits - plain).abs().mean() > 0.1
    assert wrapped.peft_config["default"].lora_dropout == 0, "PEFT would train on as we did"

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS, init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_checkpoint(base, family), config).eval()
    wrapped.save_pretrained(theirs)
    adapter.load_adapter(model, theirs)
    with torch.no_grad():
        assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
    lora.save_adapter(model, ours)
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "name, found", [("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("a/b", "a/b")]
)
def test_an_adapter_names_a_base_that_peft_finds(name, found, tiny, tmp_path):
    """ "smollm2" is a name of ours alone."""
    lora.save_adapter(load(tiny), tmp_path, name)
    assert peft.PeftConfig.from_pretrained(tmp_path).base_model_name_or_path == found


LAST = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
SETTINGS = {  # of adapter_config.json: values that do not fit
    "peft_type": "LOHA",
    "r": 8,
    "lora_alpha": 16,
    "use_dora": True,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "modules_to_save": ["lm_head"],
    "alora_invocation_tokens": [5],
    "init_lora_weights": "pissa",
}


@pytest.fixture(scope="module")
def model(tiny):
    return load(tiny)


@pytest.fixture
def refuses(model, tmp_path):
    """refuses(words): an adapter is in tmp_path, damaged meanwhile; the model stays as it was."""
    lora.save_adapter(randomise(model), tmp_path)
    before = logits(randomise(model))

    def check(words):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            adapter.load_adapter(model, tmp_path)
        assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
        assert torch.equal(logits(model), before)

    return check


@pytest.mark.parametrize("key, value", SETTINGS.items())
def test_an_adapter_of_other_settings_is_refused(key, value, refuses, tmp_path):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    refuses(f"adapter_config.json has {key}={value!r}")


@pytest.mark.parametrize(
    "file, text",
    [
        ("adapter_config.json", "{"),
        ("adapter_config.json", "[1]"),
        ("adapter_model.safetensors", "{"),
    ],
)
def test_a_file_of_an_adapter_that_is_damaged_or_missing_is_refused(file, text, refuses, tmp_path):
    (tmp_path / file).write_text(text)
    refuses("holds a damaged adapter")
    (tmp_path / file).unlink()
    refuses(f"no {file}")


def test_an_adapter_of_other_tensors_is_refused(refuses, tmp_path):
    """One is missing, one too many, one has another shape, one has a NaN."""
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    last = tensors.pop(LAST)
    damaged = last.clone()
    damaged[3, 2] = torch.nan
    for more, words in (
        ({}, f"{LAST} is missing"),
        ({LAST: last, f"{LAST}x": last.clone()}, f"{LAST}x is (32, 4)"),
        ({LAST: last[:5].clone()}, f"{LAST} is (5, 4), the model has (32, 4)"),
        ({LAST: damaged}, f"{LAST} has NaN"),
    ):
        save_file(tensors | more, file)
        refuses(words)
