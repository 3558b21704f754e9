"""python -m pytest tests/test_export.py -q"""
import json
import runpy
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from conftest import tiny_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_checkpoint import IDS, Q, bits, foreign, logits, projections
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import checkpoint
import export
import lora
import model
import nvfp4

FAMILIES = ["llama", "qwen2", "qwen3"]



@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """family, quant → (a run's folder as train.py leaves it, its model). The adapter changes the logits."""
    made, top = {}, tmp_path_factory.mktemp("runs")

    def run(family="llama", quant="nvfp4"):
        if (family, quant) not in made:
            base, folder = top / family, top / f"{family}-{quant}"
            if not base.exists():
                tiny_checkpoint(base, family)
                (base / "tokenizer.json").write_text("{}")
                (base / "chat_template.jinja").write_text("{{ messages }}")
            m = model.load(str(base), quant, rank=4, alpha=8)
            for layer in lora.lora_layers(m).values():
                layer.lora_B.data.normal_(0, .2)
            lora.refresh(m)
            lora.save_adapter(m, folder / "adapter", base)
            (folder / "config.json").write_text(json.dumps({"model": str(base), "quant": quant, "rank": 4}))
            made[family, quant] = folder, m
        return made[family, quant]

    return run


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """family, format → the folder with the export of a run on a 4-bit base."""
    made, top = {}, tmp_path_factory.mktemp("exported")

    def folder(family, format):
        if (family, format) not in made:
            made[family, format] = top / f"{family}-{format}"
            export.export(runs(family)[0], made[family, format], format)
        return made[family, format]

    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_decompresses_our_export_to_our_weights(runs, exported, family):
    """Its decompressor returns nvfp4.dequantize's bf16, bit for bit; other tensors are unchanged."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig
    folder, (_, m) = exported(family, "nvfp4"), runs(family)
    config = json.loads((folder / "config.json").read_text())
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
    stored, original = (load_file(f / "model.safetensors") for f in (folder, runs(family)[0].parent / family))
    for name, q in projections(m).items():
        ends = ("weight_packed", "weight_scale", "weight_global_scale")
        parts = {end: stored.pop(f"{name}.{end}") for end in ends}
        weight = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, nvfp4.dequantize(q)), name
        del original[f"{name}.weight"]
    assert stored.keys() == original.keys() and all(torch.equal(stored[n], original[n]) for n in stored)
    # vLLM requires one global scale for the projections that it fuses
    q, k, v = (projections(m)[f"model.layers.1.self_attn.{x}_proj"].global_scale for x in "qkv")
    assert q == k == v


def read_modelopt(folder):
    """An independent reader of ModelOpt's layout: name → bf16 weight, code by code."""
    said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert said == {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16,
                    "exclude_modules": ["lm_head"]}                     # without the null vLLM refuses it
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(".weight") and tensors[n].dtype == torch.uint8]:
        low, high = tensors[name] & 15, tensors[name] >> 4
        code = torch.stack([low, high], 2).flatten(1).long()
        value = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])[code & 7] * (1 - 2 * (code >> 3))
        scale = tensors[f"{name}_scale"].float().repeat_interleave(16, 1) * tensors[f"{name}_scale_2"]
        weights[name] = (value * scale).bfloat16()
    return weights


@pytest.mark.parametrize("family", FAMILIES)
def test_an_independent_reader_finds_our_weights_in_the_modelopt_export(runs, exported, family):
    """Every projection, bit for bit in bf16."""
    weights, own = read_modelopt(exported(family, "modelopt")), projections(runs(family)[1])
    assert weights.keys() == {f"{name}.weight" for name in own}
    assert all(torch.equal(weights[f"{name}.weight"], nvfp4.dequantize(q)) for name, q in own.items())


@pytest.mark.parametrize("format, quant", [("nvfp4", "nvfp4"), ("modelopt", "rtn")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_4_bit_export_loads_back_to_the_same_bits(runs, exported, family, format, quant):
    """Equal packed bytes and, with the adapter, equal logits: loading quantises nothing a second time."""
    again, m = model.load(str(exported(family, format)), quant, rank=4, alpha=8), runs(family)[1]
    lora.load_adapter(again, exported(family, format) / "adapter")
    ours, theirs = projections(m), projections(again)
    for name in ours:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(ours[name], theirs[name], strict=True)), name
    assert torch.equal(logits(again), logits(m))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_load_the_4_bit_export(runs, exported, family):
    """With the adapter, in fp32, the logits differ by the order of sums alone (1e-4). The template travels.

    Without dequantize=True all 21 projections stay packed and transformers computes in bf16, which also
    rounds activations, embedding, head and norms: the logits may move by 14 · 2⁻⁸ of their size.
    """
    import peft
    folder = exported(family, "nvfp4")
    packed = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(hasattr(m, "weight_packed") for m in packed.modules()) == 21 and packed.dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                  quantization_config=CompressedTensorsConfig(dequantize=True))
    with torch.no_grad():
        plain, ours = theirs(IDS).logits, logits(runs(family)[1])
        adapted = peft.PeftModel.from_pretrained(theirs, folder / "adapter")(IDS).logits
        assert (packed(IDS).logits - plain).norm() < 14 * 2**-8 * plain.norm()
    assert (adapted - ours).abs().max() < 1e-4 and (plain - ours).abs().mean() > .1
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert {"tokenizer.json", "generation_config.json"} <= {f.name for f in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_adapter_export(runs, tmp_path, family):
    """On the fp32 checkpoint that the adapter was trained on, with equal logits (1e-4)."""
    import peft
    run, m = runs(family, "bf16")
    export.export(run, tmp_path / "out", "adapter")
    base = AutoModelForCausalLM.from_pretrained(run.parent / family, dtype=torch.float32)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out")(IDS).logits
    assert (theirs - logits(m)).abs().max() < 1e-4
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_merged_export(runs, tmp_path, family, quant):
    """Each weight is W + (alpha/rank) B A in bf16, W dequantised from 4 bits if it was trained in them.

    bf16 moves a weight by at most 2⁻⁸ of itself, and so each product. The logits pass 14 matrices (embedding,
    three blocks of qkv, o, gate_up and down, and the head), which allows 14 · 2⁻⁸ = .055 of their size.
    """
    run, m = runs(family, quant)
    export.export(run, tmp_path / "out", "bf16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert all(t.dtype == torch.bfloat16 for t in stored.values())
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    if quant == "nvfp4":
        base = {n: nvfp4.dequantize(q, torch.float32) for n, q in projections(m).items()}
    else:
        original = load_file(run.parent / family / "model.safetensors")
        base = {n.removesuffix(".weight"): t for n, t in original.items() if n.endswith("_proj.weight")}
    assert len(base) == 21
    for name, w in base.items():
        A, B = (adapter[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
        exact = w.double() + 8 / 4 * B @ A
        assert ((stored[f"{name}.weight"].double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all(), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert theirs.config.dtype == torch.float32 and not hasattr(theirs.config, "quantization_config")
    with torch.no_grad():
        assert (theirs(IDS).logits - logits(m)).norm() < 14 * 2**-8 * logits(m).norm()


def test_two_exports_round_the_sum_to_4_bits(runs, tmp_path):
    """bf16, then that folder as nvfp4: the weights are Q(W + Δ), and no adapter is left. Rounding moves them
    by a share of Δ that the docstring calls a part."""
    run, m = runs()
    export.export(run, tmp_path / "sum", "bf16")
    export.export(tmp_path / "sum", tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out" / "adapter").exists()
    adapter, error, delta2 = load_file(run / "adapter" / "adapter_model.safetensors"), 0, 0
    merged = projections(model.load(str(tmp_path / "out"), rank=1, alpha=1))
    for name, q in projections(m).items():
        A, B = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        delta = 8 / 4 * B @ A
        error += (nvfp4.dequantize(merged[name], torch.float32) - nvfp4.dequantize(q, torch.float32)
                  - delta).square().sum()
        delta2 += delta.square().sum()
    # the sweep's error on Gaussian weights is .082 of their size, and Δ is a few tenths of W's
    assert .1 < (error / delta2).sqrt() < .6


def test_beside_4_bit_weights_the_adapter_names_their_folder(exported):
    """Other tools then load the weights that the adapter was trained on."""
    folder = exported("llama", "nvfp4")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)


def test_4_bit_checkpoints_convert_into_each_other(exported, tmp_path):
    """A model without a run changes its layout; after a round trip all tensors are equal."""
    there, back = tmp_path / "there", tmp_path / "back"
    export.export(exported("llama", "nvfp4"), there, "modelopt")
    export.export(there, back, "nvfp4")
    a, b = (load_file(f / "model.safetensors") for f in (exported("llama", "nvfp4"), back))
    assert a.keys() == b.keys() and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)
    assert read_modelopt(there).keys() == {n.replace("_packed", "") for n in a if n.endswith("_packed")}


@pytest.mark.parametrize("layout, other", [("compressed-tensors", "modelopt"), ("modelopt", "nvfp4")])
@pytest.mark.parametrize("fused", [False, True])
def test_a_foreign_4_bit_checkpoint_is_written_in_the_other_layout(tmp_path, layout, other, fused):
    """The codes are kept and the logits equal (1e-4): only the inverse of a global scale rounds, by 2⁻²⁴."""
    foreign(tmp_path / "in", layout, fused=fused)
    export.export(tmp_path / "in", tmp_path / "out", other)
    before, after = (model.load(str(tmp_path / name), rank=2) for name in ("in", "out"))
    assert (logits(after) - logits(before)).abs().max() < 1e-4
    pairs = zip(projections(before).values(), projections(after).values(), strict=True)
    assert all(torch.equal(a.packed, b.packed) for a, b in pairs)


def command(monkeypatch, capsys, *arguments):
    """`python export.py arguments` → exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(Path(export.__file__)), run_name="__main__")
        raise SystemExit(0)
    return stop.value.code, *capsys.readouterr()


def test_the_command_exports_a_run_or_says_why_not_in_one_line(runs, tmp_path, monkeypatch, capsys):
    """Exit code 0 and "done", or 2 and one sentence; a refusal leaves nothing behind."""
    run, _ = runs()
    code, out, _ = command(monkeypatch, capsys, run, tmp_path / "a" / "good", "--format", "nvfp4")
    assert code == 0 and out.startswith(f"done: {tmp_path / 'a' / 'good'}") and len(out.splitlines()) == 1
    assert [f.name for f in (tmp_path / "a").iterdir()] == ["good"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "full" / "adapter_config.json").write_text('[{"r": 8, "x": 1}]')
    base, plain, unsaved = run.parent / "llama", runs(quant="bf16")[0], tmp_path / "full" / "unsaved"
    unsaved.mkdir()
    shutil.copy(run / "config.json", unsaved)
    text = shutil.copytree(run / "adapter", tmp_path / "full" / "text") / "adapter_config.json"
    text.write_text(json.dumps(json.loads(text.read_text()) | {"lora_alpha": "16"}))
    for arguments, words in [
            ((run, tmp_path / "full", "--format", "bf16"), "full exists and is not an empty folder"),
            ((base, tmp_path / "out", "--format", "adapter"), "no adapter"),
            ((plain, tmp_path / "out", "--format", "nvfp4"), "no 4 bits to write: take --format bf16"),
            ((base, tmp_path / "out", "--format", "bf16", "--adapter", tmp_path), "adapter_config.json"),
            ((run, tmp_path / "out", "--format", "bf16", "--adapter", tmp_path / "no"), "no/adapter_conf"),
            ((base, tmp_path / "out", "--format", "bf16", "--adapter", tmp_path / "full"), "not a mapping"),
            ((base, tmp_path / "out", "--format", "bf16", "--adapter", text.parent), "lora_alpha='16'"),
            ((base, tmp_path / "out", "--format", "bf16", "--quant", "int3"), "quant='int3'"),
            ((unsaved, tmp_path / "out", "--format", "nvfp4"),
             f"{unsaved} has no adapter: train on with python train.py --resume {unsaved}"),
            ((tmp_path / "none", tmp_path / "out", "--format", "bf16"), "hub id"),
            ((run, tmp_path / "full" / "mine" / "out", "--format", "bf16"), "mine")]:
        code, out, err = command(monkeypatch, capsys, *arguments)
        assert code == 2 and not out and err.startswith("export.py: ") and words in err, err
        assert len(err.splitlines()) == 1 and sorted(f.name for f in tmp_path.iterdir()) == ["a", "full"]
    flags = "--format", "nvfp4", "--quant", "nvfp4"
    assert command(monkeypatch, capsys, plain, tmp_path / "out", *flags)[0] == 0


def test_an_export_that_is_interrupted_or_wrong_is_not_at_its_place(runs, tmp_path, monkeypatch):
    """An export that is interrupted, or fails on a full disk, leaves nothing; a wrong one is moved to another
    name, which the message has."""
    write, out = huggingface_hub.save_torch_state_dict, tmp_path / "out"

    def interrupted(tensors, folder):
        write(tensors, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export.export(runs()[0], out, "nvfp4")
    assert not any(tmp_path.iterdir())

    def full(tensors, folder):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    with pytest.raises(ValueError, match=f"^{out} cannot be written: No space left on device$"):
        export.export(runs()[0], out, "nvfp4")
    assert not any(tmp_path.iterdir())
    for format, name in (("nvfp4", f"{Q}_scale"), ("bf16", Q)):
        def damaged(tensors, folder, name=name):
            write(tensors | {name: (tensors[name].float() / 2).to(tensors[name].dtype)}, folder)

        monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", damaged)
        with pytest.raises(ValueError, match=r"out was not made: .* in .*out\.wrong, are off by") as error:
            export.export(runs()[0], out, format)
        assert "\n" not in str(error.value) and [f.name for f in tmp_path.iterdir()] == ["out.wrong"]


def test_a_gguf_models_tokenizer_and_ends_travel(smollm2, tmp_path):
    """The default model's exported folder gives the same prompt and the same stop tokens as its GGUF."""
    source, tokenizer = smollm2
    export._copy_tokenizer(source, tmp_path)
    source.config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    found = checkpoint.open(str(tmp_path))
    ours, theirs = (checkpoint.encode(t, "What is 7 * 8?") for t in (found.tokenizer(), tokenizer))
    assert ours == theirs and found.stop_ids() == source.stop_ids()
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] in found.stop_ids()
