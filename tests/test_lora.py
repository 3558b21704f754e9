"""LoRA against merged matrices, and PEFT in both directions."""

import json
import math
import os
import re

import peft
import pytest
import torch
from conftest import logits_of, tiny_checkpoint
from safetensors.torch import load_file, save_file

import lora
import model as decoder
from tools import adapter, export, weights

PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
IDS = torch.arange(24).view(2, 12) * 7 % 97


def load(folder, rank=4, alpha=8, seed=0):
    return decoder.load(weights.open(str(folder)), "bf16", rank, alpha, seed=seed)


def logits(model):
    return logits_of(model, IDS)


def randomise(model):
    """Give lora_B values large enough that the adapter changes the logits by about their size."""
    for layer in lora.lora_layers(model).values():
        layer.lora_B.data.normal_(0, 0.2)
    lora.refresh(model)
    return model


# --- one layer


class Told(lora.FrozenMatrix):
    """A base that remembers what it was given."""

    def product(self, *given):
        self.given = given
        return super().product(*given)

    def store_B(self, B, splits):
        self.stored = B.clone(), splits


def told_layer(dtype):
    """x and a layer of three projections; its random parameters are not in the copies yet."""
    layer = lora.LoRALinear(Told(torch.randn(28, 20, dtype=dtype)), 3, 6, (16, 8, 4), dtype)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return torch.randn(5, 7, 20, dtype=dtype), layer


def test_a_fused_adapter_equals_the_merged_matrix():
    """Forward and every gradient agree in float64 up to the order of sums of 20 terms (1e-12).
    Backward saves nothing as large as the weight.
    """
    x, layer = told_layer(torch.float64)
    layer.double().refresh()
    leaves, saved = (x.requires_grad_(), layer.lora_A, layer.lora_B), set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add(t.shape) or t, lambda t: t):
        y = layer(x)
    assert saved == {(35, 20), (35, 9), (9, 20), (28, 3)}  # x, xa, A, B
    pairs = zip(layer.lora_A.split(3), layer.lora_B.split((16, 8, 4)), strict=True)
    right = x @ (layer.base.weight + torch.cat([6 / 3 * b @ a for a, b in pairs])).T
    dy = torch.randn_like(y)
    dx, dA, dB = torch.autograd.grad(y, leaves, dy)
    wanted = right, *torch.autograd.grad(right, leaves, dy)
    for got, want in zip((y, dx, dA, dB), wanted, strict=True):
        assert (got - want).abs().max() < 1e-12 * want.abs().max() * 35
    layer(x.detach()).backward(dy)  # as in a first layer
    assert torch.equal(layer.lora_A.grad, dA)


def test_only_refresh_rounds_the_parameters_into_the_copies():
    """In place, and it tells the base. Both directions multiply by the copies."""
    x, layer = told_layer(torch.bfloat16)
    address = layer.copy_B.data_ptr()
    assert torch.equal(layer(x), layer.base(x)), "the copies still hold lora_B = 0"
    layer.refresh()
    layer(x, compute_output=False).sum().backward()
    _, (A, B, *rest), compute_output = layer.base.given
    assert (rest, compute_output) == ([(16, 8, 4), 2], False)
    assert torch.equal(A, layer.lora_A.bfloat16()) and torch.equal(B, layer.lora_B.bfloat16())
    copy, splits = layer.base.stored
    assert torch.equal(copy, B) and splits == (16, 8, 4) and B.data_ptr() == address
    assert layer.lora_A.grad.dtype == layer.lora_B.grad.dtype == torch.float32
    for rank, splits in ((0, None), (3, (16, 8))):
        with pytest.raises((ValueError, AssertionError)):
            lora.LoRALinear(layer.base, rank, 6, splits)


# --- a model


def test_a_fresh_adapter_is_the_identity_and_alone_is_trained(tmp_path):
    """lora_B = 0 gives the oracle's logits (fp32, 1e-4); the seed decides lora_A in ±1/√K."""
    oracle = tiny_checkpoint(tmp_path)
    model = load(tmp_path, rank=64, alpha=64)
    assert (logits(model) - oracle(IDS).logits).abs().max() < 1e-4
    names, parameters = zip(*model.named_parameters(), strict=True)
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B"}
    assert all(p.requires_grad and p.dtype == torch.float32 for p in parameters)
    again, other = (lora.lora_layers(load(tmp_path, rank=64, seed=seed)) for seed in (0, 1))
    assert len(again) == 4 * 3
    for name, layer in lora.lora_layers(model).items():
        A, bound = layer.lora_A, layer.base.in_features**-0.5
        # P(the largest of 4 096 or more uniform numbers is below .99 of the bound) = e⁻²⁰
        assert 0.99 * bound < min(A.max(), -A.min()) <= A.abs().max() <= bound
        assert torch.equal(A, again[name].lora_A) and not torch.equal(A, other[name].lora_A)
        assert not layer.lora_B.any()


def test_the_reference_policy_is_the_frozen_base_whatever_was_learnt(tiny):
    """In `disabled` the model is the policy before step 1, before and after an optimizer step.

    Logits follow the parameters only after refresh. An exception inside `disabled` enables the
    adapter again.
    """
    model = load(tiny)
    with lora.disabled(model):
        reference = logits(model)
    before = logits(model)
    # the adapter adds exact zeros but may change the order of fp32 sums (fewer than 600 terms)
    assert (before - reference).abs().max() < 2**-18 * reference.abs().max()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before.square().mean().backward()
    optimizer.step()
    assert torch.equal(logits(model), before), "not refreshed yet"
    lora.refresh(model)
    trained = logits(model)
    assert not torch.equal(trained, before)
    with pytest.raises(KeyError), lora.disabled(model):
        assert torch.equal(logits(model), reference)
        raise KeyError
    assert torch.equal(logits(model), trained)


def test_tied_embeddings_are_neither_adapted_nor_quantised(tmp_path):
    """lm_head shares the embedding's storage."""
    oracle = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    model = decoder.load(weights.open(str(tmp_path)), "nvfp4", rank=1, alpha=4)
    assert model.lm_head.data_ptr() == model.embed_tokens.data_ptr()
    assert torch.equal(model.lm_head, oracle.lm_head.weight)


# --- adapter files

FAMILIES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_peft_reads_our_adapter_and_we_read_its(family, tmp_path):
    """Both ways, with B ≠ 0 everywhere, logits agree within 1e-4 with transformers under PEFT."""
    base, ours, theirs = tmp_path / "base", tmp_path / "ours", tmp_path / "theirs"
    oracle = tiny_checkpoint(base, family)
    model = randomise(load(base))
    adapter.save_adapter(model, ours, base)
    files = {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert {*os.listdir(ours)} == files
    plain = oracle(IDS).logits
    wrapped = peft.PeftModel.from_pretrained(oracle, ours)
    assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
    assert (wrapped(IDS).logits - plain).abs().mean() > 0.1
    assert wrapped.peft_config["default"].lora_dropout == 0, "PEFT would train on as we did"
    assert wrapped.peft_config["default"].base_model_name_or_path == str(base)

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS, init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_checkpoint(base, family), config).eval()
    wrapped.save_pretrained(theirs)
    adapter.load_adapter(model, theirs)
    assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
    adapter.save_adapter(model, ours, "smollm2")  # a name of ours alone
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in (ours / adapter.CONFIG).read_text()
    a, b = (load_file(folder / adapter.TENSORS) for folder in (ours, theirs))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@torch.no_grad()
def test_an_adapter_of_some_projections_and_an_rslora_are_what_peft_computes(tmp_path):
    """Of an adapter before it nothing is left. An rsLoRA's α is multiplied by √r, here √4."""
    base, theirs = tmp_path / "base", tmp_path / "theirs"
    some = dict(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    config = peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, **some)
    wrapped = peft.get_peft_model(tiny_checkpoint(base), config).eval()
    wrapped.save_pretrained(theirs)
    model = randomise(load(base, alpha=16))
    adapter.load_adapter(model, theirs)
    assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
    merged = export.LayerByLayer(base, "bf16", theirs)
    for _ in merged.layers():
        pass
    ids = (torch.arange(32) + 1) * 7919 % 97
    assert (wrapped(ids[None]).logits[0] - merged.logits()).abs().max() < 1e-4


LAST = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"
# settings of adapter_config.json that do not fit: of PEFT, of a later one, and of no sense
SETTINGS = [
    *dict(peft_type="LOHA", task_type="SEQ_CLS", bias="all", init_lora_weights="pissa").items(),
    *dict(use_dora=True, use_qalora=True, lora_bias=True, fan_in_fan_out=True).items(),
    *dict(rank_pattern={"q": 4}, alpha_pattern={"q": 4}, modules_to_save=["lm_head"]).items(),
    *dict(alora_invocation_tokens=[1], layers_to_transform=[0], arrow_config={"k": 2}).items(),
    *dict(target_parameters=["w"], layer_replication=[[0, 2]], a_later_setting=5).items(),
    *dict(target_modules=5, use_rslora="false").items(),
    *(("r", value) for value in (8, 32.0, 8.5, -5, 0, True, "32", None, 10**400)),
    *(("lora_alpha", value) for value in (16, 0, -1.0, True, "32", None, 10**400, math.nan)),
    *(("init_lora_weights", value) for value in (5, [], "unheard of")),
]


@pytest.fixture
def refuses(tiny, tmp_path):
    """refuses(words): an adapter is in tmp_path, damaged meanwhile; the model stays as it was."""
    model = randomise(load(tiny))
    adapter.save_adapter(model, tmp_path)
    before = logits(randomise(model))

    def check(words):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            adapter.load_adapter(model, tmp_path)
        assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
        assert torch.equal(logits(model), before)

    return check


def test_an_adapter_of_other_settings_is_refused(refuses, tmp_path):
    file = tmp_path / adapter.CONFIG
    fitting = json.loads(file.read_text())
    for key, value in SETTINGS:
        file.write_text(json.dumps(fitting | {key: value}))
        refuses(f"{key}={value!r}"[:90])
    text = json.dumps(fitting)
    file.write_text(text.replace('"r":', '"r": 5, "r":'))
    refuses("a key occurs twice")
    file.write_text("[" * 10**5)
    refuses("nest too deep")


def test_what_peft_writes_by_default_fits(tiny, tmp_path):
    """Each of its settings, one that is empty and one that tells only where an adapter is from."""
    model = randomise(load(tiny))
    adapter.save_adapter(model, tmp_path)
    file = tmp_path / adapter.CONFIG
    written = json.loads(file.read_text())
    peft.LoraConfig(task_type="CAUSAL_LM", revision="main").save_pretrained(tmp_path)
    given = json.loads(file.read_text()) | written | dict(a_later_setting=None, another={})
    assert len(given) > len(written) + 20
    file.write_text(json.dumps(given))
    adapter.load_adapter(model, tmp_path)


def test_a_file_of_an_adapter_that_is_damaged_or_missing_is_refused(refuses, tmp_path):
    for name, text, said in (
        (adapter.CONFIG, "[1]", "cannot be read, fetch it again"),
        (adapter.CONFIG, "{", "cannot be read, fetch it again"),
        (adapter.TENSORS, "{", "is damaged or incomplete: fetch it again"),
    ):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text(text)
        refuses(f"{tmp_path / name} {said}")
        (tmp_path / name).unlink()
        refuses(f"no {name}")
        (tmp_path / name).write_bytes(whole)


DTYPES = "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"
DTYPES += " uint8 int8 int16 int32 int64 bool complex64"


@pytest.mark.parametrize("name", DTYPES.split())
def test_an_adapter_of_any_floating_point_dtype_loads_and_no_other_does(tiny, tmp_path, name):
    """What safetensors can store, as PEFT does. Integers and complex numbers are named."""
    dtype = getattr(torch, name)
    model = load(tiny)
    adapter.save_adapter(model, tmp_path)
    file = tmp_path / adapter.TENSORS
    tensors = load_file(file)
    last = torch.arange(-64, 64).view(tensors[LAST].shape) / 64
    save_file(tensors | {LAST: last.to(dtype)}, file)
    if dtype.is_floating_point:
        adapter.load_adapter(model, tmp_path)
        assert torch.equal(adapter.adapter_tensors(model)[LAST], last.to(dtype).float())
    else:
        with pytest.raises(ValueError, match=f"{tmp_path}.*{re.escape(LAST)} is {dtype}"):
            adapter.load_adapter(model, tmp_path)


def test_an_adapter_of_other_tensors_is_refused(refuses, tmp_path):
    """One is missing, one too many, one has another shape, one has a NaN."""
    file = tmp_path / adapter.TENSORS
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
