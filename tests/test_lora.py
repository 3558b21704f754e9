"""LoRA against numbers worked out by hand, merged matrices, and PEFT in both directions."""
import json
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

import lora
import model as decoder

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.arange(24).view(2, 12) * 7 % 97


def load(folder, rank=4, alpha=8, seed=0):
    return decoder.load(str(folder), quant="bf16", rank=rank, alpha=alpha, seed=seed)


def logits(model):
    return model.logits(model(IDS, torch.arange(12).expand(2, 12)))


def randomise(model):
    """Give lora_B values large enough that the adapter changes the logits by about their own size."""
    for layer in lora.lora_layers(model).values():
        layer.lora_B.data.normal_(0, .2)
    lora.refresh(model)
    return model


def fused_layer(dtype=torch.float64, rank=3):
    base = nn.Linear(20, 28, bias=False, dtype=dtype).requires_grad_(False)
    layer = lora.LoRALinear(base, rank, alpha=6, splits=(16, 8, 4), dtype=dtype).to(dtype)
    layer.lora_B.data.normal_()
    return layer


def test_an_adapter_worked_out_by_hand():
    """W = I, rank 1, alpha 2: y = x + 2 · (A·x) B, with A·x = 1·3 + 2·4 = 11."""
    base = nn.Linear(2, 2, bias=False).requires_grad_(False)
    base.weight.copy_(torch.eye(2))
    layer = lora.LoRALinear(base, rank=1, alpha=2)
    layer.lora_A.data, layer.lora_B.data = torch.tensor([[1.0, 2.0]]), torch.tensor([[.5], [-1.0]])
    assert layer(torch.tensor([3.0, 4.0])).tolist() == [3 + 11, 4 - 22]


def test_a_fresh_adapter_is_the_identity_and_alone_is_trained(tmp_path):
    """lora_B = 0 gives the oracle's logits (fp32, 1e-4); the seed decides lora_A, uniform in ±1/√K."""
    oracle = tiny_checkpoint(tmp_path)
    model = load(tmp_path, rank=64, alpha=64)
    assert (logits(model) - oracle(IDS).logits).abs().max() < 1e-4
    with lora.disabled(model):
        base = logits(model)
    # the adapter adds exact zeros but may change the order of fp32 sums (fewer than 600 terms)
    assert (logits(model) - base).abs().max() < 2**-18 * base.abs().max()
    assert {n.rpartition(".")[2] for n, p in model.named_parameters()} == {"lora_A", "lora_B"}
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    layers, other = lora.lora_layers(model), lora.lora_layers(load(tmp_path, rank=64, seed=1))
    assert len(layers) == 4 * 3
    for name, layer in layers.items():
        bound = layer.base.in_features ** -.5
        # P(the largest of 4 096 or more uniform numbers is below .99 of the bound) = e⁻²⁰
        assert .99 * bound < min(layer.lora_A.max(), -layer.lora_A.min()) <= layer.lora_A.abs().max() <= bound
        assert not torch.equal(layer.lora_A, other[name].lora_A) and layer.lora_B.abs().max() == 0


def test_a_fused_adapter_equals_separate_ones_and_the_merged_matrix():
    """Forward and every gradient agree in float64 up to the order of sums of 20 terms (1e-12)."""
    layer, x = fused_layer(), torch.randn(5, 7, 20, dtype=torch.float64, requires_grad=True)
    W, A, B = layer.base.weight, layer.lora_A.detach().split(3), layer.lora_B.detach().split((16, 8, 4))
    parts = []
    for w, a, b in zip(W.split((16, 8, 4)), A, B, strict=True):
        part = lora.LoRALinear(nn.Linear(20, len(w), bias=False).requires_grad_(False), 3, 6).double()
        part.base.weight.data, part.lora_A.data, part.lora_B.data = w, a, b
        parts.append(part)
    y, apart = layer(x), torch.cat([part(x) for part in parts], -1)
    merged = W + torch.cat([6 / 3 * b @ a for a, b in zip(A, B, strict=True)])
    assert (y - apart).abs().max() < 1e-12 and (y - F.linear(x, merged)).abs().max() < 1e-12
    dy = torch.randn_like(y)
    dx, dA, dB = torch.autograd.grad(y, (x, layer.lora_A, layer.lora_B), dy)
    separate = torch.autograd.grad(apart, [x] + [p for part in parts for p in (part.lora_A, part.lora_B)], dy)
    for got, want in ((dx, separate[0]), (dA, torch.cat(separate[1::2])), (dB, torch.cat(separate[2::2]))):
        assert (got - want).abs().max() < 1e-12 * want.abs().max() * 35


class Told(nn.Linear):
    """A base that fuses LoRA, and remembers what it was given."""

    fuses_lora = True

    def adapt(self, B, splits):
        self.adapted = B.clone(), splits

    def forward(self, x, lora, learn, needed):
        A, B, splits, scale = self.lora = lora
        return F.linear(x, self.weight) + scale * (x @ A.T) @ torch.block_diag(*B.split(splits)).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_that_fuses_gets_copies_that_refresh_rewrites_in_place(dtype):
    """Only refresh() rounds the parameters into the copies: at the same addresses, and the base is told."""
    base = Told(20, 28, bias=False).to(dtype)
    layer, x = lora.LoRALinear(base, 3, 6, (16, 8, 4), dtype), torch.randn(5, 20).to(dtype)
    addresses = layer.copy_A.data_ptr(), layer.copy_B.data_ptr()
    layer.lora_A.data.normal_()
    layer.lora_B.data.normal_()
    assert torch.equal(layer(x), F.linear(x, base.weight))             # the copies still hold lora_B = 0
    layer.refresh()
    layer(x)
    A, B, splits, scale = base.lora
    assert torch.equal(A, layer.lora_A.to(dtype)) and splits == (16, 8, 4) and scale == 2
    assert torch.equal(B, layer.lora_B.to(dtype)) and torch.equal(B, base.adapted[0])
    assert base.adapted[1] == splits
    assert (A.data_ptr(), B.data_ptr()) == addresses and layer.lora_A.dtype == torch.float32


def test_the_reference_policy_is_the_frozen_base_whatever_was_learnt(tmp_path):
    """In `disabled` the model is the policy before step 1, before and after three optimizer steps.

    Logits follow the parameters only after refresh. An exception inside `disabled` enables the adapter again.
    """
    tiny_checkpoint(tmp_path)
    model = load(tmp_path)
    with lora.disabled(model):
        reference = logits(model).detach()
    assert (logits(model) - reference).abs().max() < 2**-18 * reference.abs().max()       # fp32 rounding
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        before = logits(model)
        before.square().mean().backward()
        optimizer.step()
        assert torch.equal(logits(model), before)                      # not refreshed yet
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
    """lm_head shares the embedding's storage and the checkpoint's numbers; only projections have adapters."""
    oracle = tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    model = decoder.load(str(tmp_path), quant="nvfp4", rank=4, alpha=4)
    assert model.lm_head.data_ptr() == model.embed_tokens.data_ptr()
    assert torch.equal(model.lm_head, oracle.lm_head.weight) and type(model.lm_head) is torch.Tensor
    adapted = {name.split(".")[-3] for name in lora.adapter_tensors(model)}
    assert adapted == set(PROJECTIONS) and len(lora.adapter_tensors(model)) == 2 * 7 * 3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_peft_reads_our_adapter_and_we_read_its(family, tmp_path):
    """Both ways, with B ≠ 0 everywhere, logits agree within 1e-4 with transformers' fp32 model under PEFT."""
    import peft
    base, ours, theirs = tmp_path / "base", tmp_path / "ours", tmp_path / "theirs"
    oracle = tiny_checkpoint(base, family)
    plain = oracle(IDS).logits
    model = randomise(load(base))
    lora.save_adapter(model, ours, base)
    assert sorted(f.name for f in ours.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    wrapped = peft.PeftModel.from_pretrained(oracle, ours)
    assert wrapped.peft_config["default"].lora_dropout == 0, "who trains on in PEFT goes on as we did"
    with torch.no_grad():
        assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
        assert (wrapped(IDS).logits - plain).abs().mean() > .1

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS, init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny_checkpoint(base, family), config).eval()
    wrapped.save_pretrained(theirs)
    lora.load_adapter(model, theirs)
    with torch.no_grad():
        assert (wrapped(IDS).logits - logits(model)).abs().max() < 1e-4
    lora.save_adapter(model, ours)
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name, found", [("smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("a/b", "a/b")])
def test_an_adapter_names_a_base_that_peft_finds(name, found, tiny, tmp_path):
    """"smollm2" is a name of ours alone."""
    lora.save_adapter(load(tiny), tmp_path, name)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == found


def edit_config(**changes):
    def edit(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return edit


def edit_tensors(change):
    def edit(folder):
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    return edit


LAST = "base_model.model.model.layers.2.self_attn.v_proj.lora_B.weight"


@pytest.mark.parametrize("damage, words", [
    (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    (lambda folder: (folder / "adapter_config.json").write_text("{"), "holds a damaged adapter: Expecting"),
    (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "holds a damaged adapter: 'list'"),
    (lambda folder: os.truncate(folder / "adapter_model.safetensors", 500), "holds a damaged adapter: .*"),
    (edit_config(peft_type="LOHA"), "peft_type='LOHA'"), (edit_config(r=8), "r=8; this model takes 4"),
    (edit_config(lora_alpha=16), "lora_alpha=16; this model takes 8"), (edit_config(use_dora=1), "use_dora"),
    (edit_config(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the base"),
    (edit_config(alora_invocation_tokens=[5]), r"alora_invocation_tokens=\[5\]"),
    (edit_config(rank_pattern={"q_proj": 2}), "rank_pattern={'q_proj': 2}"),
    (edit_tensors(lambda t: t.pop(LAST)), f"1 tensors .* {LAST}"),
    (edit_tensors(lambda t: t.update({LAST + "x": t[LAST].clone()})), f"1 tensors .* {LAST}x"),
    (edit_tensors(lambda t: t[LAST].view(-1)[3:4].fill_(torch.nan)), f"{LAST} has NaN or infinite values"),
    (edit_tensors(lambda t: t.update({LAST: torch.zeros(5, 4)})), rf"{LAST} is \(5, 4\), .*\(32, 4\)")])
def test_an_adapter_that_does_not_fit_is_refused_and_leaves_the_model_alone(damage, words, tiny, tmp_path):
    """One sentence names the file and what is wrong, and no parameter has changed by then."""
    lora.save_adapter(randomise(load(tiny)), tmp_path)
    damage(tmp_path)
    model = randomise(load(tiny))
    before = logits(model)
    with pytest.raises(ValueError, match=words) as error:
        lora.load_adapter(model, tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert torch.equal(logits(model), before)
