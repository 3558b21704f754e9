"""tools/calibrate.py: what it writes is GPTQ on the inputs that the quantised layers before return.

python -m pytest tests/test_calibrate.py
"""

import shutil

import pytest
import torch
from conftest import logits_of
from safetensors.torch import load_file, save_file
from test_export import DENSE, stored_weights
from transformers import AutoModelForCausalLM

import model
import nvfp4
from tools import calibrate, weights
from tools.adapter import FUSED


def command(source, place, *more):
    calibrate.main([str(source), str(place), "--device", "cpu", *more])


@pytest.fixture(scope="module")
def calibrated(tiny_chat, tmp_path_factory):
    """→ the folder that the command makes of tiny_chat, and the texts that it calibrated on."""
    seen = []

    def spy(decoder, source, texts):
        seen.extend(texts)
        return quantise(decoder, source, texts)

    quantise = calibrate.quantise
    place = tmp_path_factory.mktemp("calibrated") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "quantise", spy)
        command(tiny_chat, place, "--prompts", "40", "--max-new-tokens", "8")
    return place, seen


def test_answers_are_sampled_from_the_pages_that_a_flag_asks_for(tiny_chat, tmp_path, monkeypatch):
    used = []

    class Noted(calibrate.Sampler):
        def generate(self, *arguments, **more):
            used.append(self.kv)
            raise ValueError("enough")

    monkeypatch.setattr(calibrate, "Sampler", Noted)
    with pytest.raises(ValueError, match="enough"):
        command(tiny_chat, tmp_path / "new", "--kv", "int8")
    assert used == ["int8"]


def inputs_of(linear, oracle, texts):
    """→ (K, tokens): the inputs of a transformers' Linear in a forward pass of each text."""
    found = []
    handle = linear.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    with torch.no_grad():
        for text in texts:
            oracle(torch.tensor([text]))
    handle.remove()
    return torch.cat(found).T


def test_each_matrix_is_gptq_on_the_inputs_from_the_quantised_layers_before(tiny_chat, calibrated):
    """The inputs are those of transformers' model, whose layers become the calibrated ones, one
    after the other. Projections that run as one are quantised as one. Sums in another order may
    round single weights otherwise, and then those that correct them.
    """
    place, texts = calibrated
    oracle = AutoModelForCausalLM.from_pretrained(tiny_chat, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **DENSE)
    assert len(texts) == 40
    groups = [*FUSED.values(), ("o_proj",), ("down_proj",)]
    for block, new in zip(oracle.model.layers, theirs.model.layers, strict=True):
        modules, found = dict(block.named_modules()), dict(new.named_modules())
        for group in groups:
            names = [name for name in modules if name.endswith(group)]
            X = inputs_of(modules[names[0]], oracle, texts)
            W = torch.cat([modules[name].weight.data for name in names])
            q = nvfp4.quantize(W, "gptq", hessian=X @ X.T)
            ours = torch.cat([found[name].weight for name in names])
            assert (nvfp4.dequantize(q, torch.float32) == ours).float().mean() > 0.98, names
        for name, module in modules.items():
            if name.endswith("_proj"):
                module.weight.data = found[name].weight.data


def test_all_readers_load_the_folder(tiny_chat, calibrated):
    """Ours, which train.py uses, and transformers with compressed-tensors have the same logits. The
    other tensors are copied.
    """
    place, _ = calibrated
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **DENSE)
    source = weights.open(place)
    ids = torch.arange(24).view(2, 12) * 7 % source.config.vocab_size
    with torch.no_grad():
        difference = logits_of(model.load(source), ids) - theirs(ids).logits
    assert source.packed and difference.abs().max() < 1e-4
    assert source.tokenizer().encode("12") == weights.open(tiny_chat).tokenizer().encode("12")
    original, stored = stored_weights(tiny_chat), stored_weights(place)
    for name in original:
        if not name.endswith("_proj.weight"):
            assert torch.equal(original[name], stored[name]), name


def test_the_folder_is_named_and_cut_answers_are_counted(tiny_chat, tmp_path, capsys):
    command(tiny_chat, tmp_path / "new", "--prompts", "40", "--max-new-tokens", "2")
    said = capsys.readouterr().out
    assert "--max-new-tokens cut " in said and f"train with --model {tmp_path / 'new'}" in said


def test_rtn_is_refused_for_what_is_in_nvfp4_already(calibrated):
    with pytest.raises(ValueError, match="--quant rtn"):
        model.load(weights.open(calibrated[0]), "rtn")


def test_what_cannot_be_calibrated_is_one_sentence_and_leaves_nothing(
    tiny_chat, calibrated, tmp_path
):
    """Each names the value, or the remedy; no part of a folder remains."""
    full, place = tmp_path / "full", tmp_path / "place"
    shutil.copytree(tiny_chat, full)
    before = sorted(tmp_path.iterdir())
    for source, target, flags, words in (
        (tiny_chat, full, (), "not an empty folder"),
        (calibrated[0], place, (), "is in NVFP4"),
        (tiny_chat, place, ("--prompts", "1"), "96 weights.*--prompts [0-9]"),
        (tiny_chat, place, ("--prompts", "0"), "--prompts 0"),
        (tiny_chat, place, ("--data", "x"), "--data"),
        (tiny_chat, place, ("--prmpts", "9"), "--prompts"),
        (tiny_chat, place, ("--adapter", "x"), "--adapter has no use"),
        (tiny_chat, place, ("--resume=x",), "--resume=x has no use"),
    ):
        with pytest.raises(ValueError, match=words):
            command(source, target, *flags)
    with pytest.raises(ValueError, match="usage"):
        calibrate.main([str(tiny_chat)])
    assert sorted(tmp_path.iterdir()) == before and not place.exists()


def test_nan_and_dead_columns(tiny_chat, tmp_path, capsys):
    """An input that is always 0 is named, and its weights are the sweep's. Inputs that overflow are
    refused by the name of the matrix.
    """
    shutil.copytree(tiny_chat, tmp_path / "in")
    file = tmp_path / "in/model.safetensors"
    tensors = load_file(file)
    norm = tensors["model.layers.1.input_layernorm.weight"]
    norm[16:48] = 0  # two whole blocks of q, k and v
    save_file(tensors, file, {"format": "pt"})
    source = weights.open(tmp_path / "in")
    texts = [[i % 32 for i in range(n, 3 * n)] for n in range(20, 40)]
    found = calibrate.quantise(model.load(source), source, texts)
    assert "layers.1.self_attn.qkv_proj: 32 inputs" in capsys.readouterr().out
    ours = found["model.layers.1.self_attn.q_proj.weight_packed"]
    w = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    sweep = nvfp4.quantize(w[0], global_scale=nvfp4.shared_global_scale(*w)).packed
    assert torch.equal(ours[:, 8:24], sweep[:, 8:24]) and not torch.equal(ours, sweep)

    norm[:] = 1e30
    save_file(tensors, file, {"format": "pt"})
    source = weights.open(tmp_path / "in")
    with pytest.raises(ValueError, match="layers.1.self_attn.qkv_proj .*NaN"):
        calibrate.quantise(model.load(source), source, texts)
