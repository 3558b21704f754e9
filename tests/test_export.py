"""tools/export.py: others' tools read what it writes, and a failure leaves nothing at its place."""

import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import peft
import pytest
import torch
from conftest import ROPE, tiny_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from test_weights import IDS, LISTED, bits, foreign, from_compressed_tensors, logits
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompressedTensorsConfig,
    GenerationConfig,
)

import fp4_gemm
import lora
import model
import nvfp4
from tools import export, weights

# Qwen 2 has biases; the foreign checkpoints below are of Qwen 3, which has a norm on q and k
FAMILIES = ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))]
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def projections(m):
    """{name: NVFP4Tensor} of each projection in 4 bits, from the model's packed bytes."""
    found = {}
    for name, layer in lora.lora_layers(m).items():
        parent, _, module = name.rpartition(".")
        names = lora.FUSED.get(module, (module,))
        if not isinstance(layer.base.W, fp4_gemm.Dense):
            for part, q in zip(names, layer.base.W.parts, strict=True):
                found[f"model.{parent}.{part}"] = nvfp4.NVFP4Tensor(*q)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """runs(family, quant) → a run's folder as train.py leaves it, and its model; each is made once.

    The adapter changes the logits. The base's folder is beside the run's, named for the family.
    """
    top = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(family="qwen2", quant="nvfp4"):
        base, folder = top / family, top / f"{family}-{quant}"
        tiny_checkpoint(base, family)
        for name in ("tokenizer.json", "chat_template.jinja"):
            (base / name).write_text("{}")
        m = model.load(str(base), quant, rank=4, alpha=8)
        for layer in lora.lora_layers(m).values():
            layer.lora_B.data.normal_(0, 0.2)
        lora.refresh(m)
        lora.save_adapter(m, folder / "adapter", base)
        (folder / "config.json").write_text(json.dumps({"model": str(base), "quant": quant}))
        return folder, m

    return run


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    """exported(family, format) → the folder with the export of a run on a 4-bit base, made once."""
    top = tmp_path_factory.mktemp("exported")

    @functools.cache
    def folder(family, format):
        export.export(runs(family)[0], top / f"{family}-{format}", format)
        return top / f"{family}-{format}"

    return folder


def stored_weights(folder):
    return load_file(folder / "model.safetensors")


# --- in 4 bits


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_decompresses_our_export_to_our_weights(runs, exported, family):
    """Its decompressor returns nvfp4.dequantize's bf16, bit for bit; other tensors are the same."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, (run, m) = exported(family, "nvfp4"), runs(family)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    stored, original = stored_weights(folder), stored_weights(run.parent / family)
    for name, q in projections(m).items():
        ends = ("weight_packed", "weight_scale", "weight_global_scale")
        parts = {end: stored.pop(f"{name}.{end}") for end in ends}
        weight = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(weight, nvfp4.dequantize(q)), name
        del original[f"{name}.weight"]
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in stored)


def read_modelopt(folder):
    """An independent reader of ModelOpt's layout: projection → bf16 weight, code by code."""
    said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert said == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }  # without the null vLLM refuses it
    tensors, found = stored_weights(folder), {}
    for name, packed in tensors.items():
        if packed.dtype != torch.uint8:
            continue
        code = torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()
        value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7] * (1 - 2 * (code >> 3))
        scale = tensors[f"{name}_scale"].float().repeat_interleave(16, 1)
        weight = (value * scale * tensors[f"{name}_scale_2"]).bfloat16()
        found[name.removesuffix(".weight")] = weight
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_independent_reader_finds_our_weights_in_the_modelopt_export(runs, exported, family):
    """Every projection, bit for bit in bf16."""
    found, own = read_modelopt(exported(family, "modelopt")), projections(runs(family)[1])
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], nvfp4.dequantize(q)) for name, q in own.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_load_the_4_bit_export(runs, exported, family):
    """With the adapter, in fp32, the logits differ by the order of sums alone (1e-4).

    The tokenizer travels. The adapter names the 4-bit weights, on which it was trained. Without
    dequantize=True all 21 projections stay packed and transformers computes in bf16, which also
    rounds activations, embedding, head and norms: the logits may move by 14 · 2⁻⁸ of their size.
    """
    folder = exported(family, "nvfp4")
    packed = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(hasattr(m, "weight_packed") for m in packed.modules()) == 21
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    adapter = peft.PeftConfig.from_pretrained(folder / "adapter")
    assert adapter.base_model_name_or_path == str(folder)
    with torch.no_grad():
        plain, ours = theirs(IDS).logits, logits(runs(family)[1])
        adapted = peft.PeftModel.from_pretrained(theirs, folder / "adapter")(IDS).logits
        assert (packed(IDS).logits - plain).norm() < 14 * 2**-8 * plain.norm()
    assert (adapted - ours).abs().max() < 1e-4 and (plain - ours).abs().mean() > 0.1
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / file).is_file()


@pytest.mark.parametrize("format", ["nvfp4", "modelopt"])
@pytest.mark.parametrize("layout, left, ignore", LISTED)
def test_what_a_4_bit_checkpoint_leaves_in_16_bits_stays_so(tmp_path, layout, left, ignore, format):
    """The projection is copied bit for bit and listed in the config, also if others run with it as
    one matrix. Their codes and block scales are copied too.
    """
    oracle = foreign(tmp_path / "in", layout, "llama", left, ignore)
    assert export.export(tmp_path / "in", tmp_path / "out", format) < 1e-6
    stored, found = stored_weights(tmp_path / "in"), stored_weights(tmp_path / "out")
    names = [name for name, _ in oracle.named_modules() if name.endswith("_proj")]
    plain = [name for name in names if re.search(left, name)]
    listed = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(listed) == sorted(["lm_head", *plain]) and plain
    if format == "modelopt":
        said = json.loads((tmp_path / "out/hf_quant_config.json").read_text())["quantization"]
        assert said["exclude_modules"] == listed
    for name in plain:
        assert torch.equal(found[f"{name}.weight"], stored[f"{name}.weight"])
    for name in set(names) - set(plain):
        for kind in (torch.uint8, torch.float8_e4m3fn):  # codes, block scales
            ours, theirs = (
                [bits(t) for key, t in tensors.items() if name in key and t.dtype is kind]
                for tensors in (found, stored)
            )
            assert any(torch.equal(*ours, other) for other in theirs)  # one is a zero point


@pytest.mark.parametrize("layout, left, ignore", LISTED[2:5])
def test_transformers_loads_an_export_with_layers_in_16_bits(tmp_path, layout, left, ignore):
    """compressed-tensors' layout, through its library, which rounds weights in 4 bits to bf16. In
    the merged export every weight is rounded to bf16.
    """
    oracle = foreign(tmp_path / "in", layout, "qwen3", left, ignore)
    dense = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    for format, more in (("nvfp4", dense), ("bf16", {})):
        export.export(tmp_path / "in", tmp_path / format, format)
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / format, dtype=torch.float32, **more
        )
        with torch.no_grad():
            right = oracle(IDS).logits
            assert (theirs(IDS).logits - right).norm() < 14 * 2**-8 * right.norm()


def test_4_bit_checkpoints_convert_into_each_other(exported, tmp_path):
    """A model without a run changes its layout; after a round trip all tensors are equal."""
    export.export(exported("qwen2", "nvfp4"), tmp_path / "there", "modelopt")
    export.export(tmp_path / "there", tmp_path / "back", "nvfp4")
    a, b = stored_weights(exported("qwen2", "nvfp4")), stored_weights(tmp_path / "back")
    assert a.keys() == b.keys() and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


@pytest.mark.parametrize(
    "layout, other", [("compressed-tensors", "modelopt"), ("modelopt", "nvfp4")]
)
def test_a_foreign_4_bit_checkpoint_is_written_in_the_other_layout(tmp_path, layout, other):
    """The codes are kept, and the logits (1e-4): only a global scale's inverse rounds, by 2⁻²⁴."""
    foreign(tmp_path / "in", layout, "qwen3")
    export.export(tmp_path / "in", tmp_path / "out", other)
    before, after = (model.load(str(tmp_path / name), rank=2) for name in ("in", "out"))
    assert (logits(after) - logits(before)).abs().max() < 1e-4
    pairs = zip(projections(before).values(), projections(after).values(), strict=True)
    assert all(torch.equal(a.packed, b.packed) for a, b in pairs)


# --- in 16 bits


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_adapter_of_a_run(runs, family):
    """On the fp32 checkpoint that the adapter was trained on, with equal logits (1e-4)."""
    run, m = runs(family, "bf16")
    base = AutoModelForCausalLM.from_pretrained(run.parent / family, dtype=torch.float32)
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, run / "adapter")(IDS).logits
    assert (theirs - logits(m)).abs().max() < 1e-4


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_merged_export(runs, tmp_path, family, quant):
    """Each weight is W + (alpha/rank) B A in bf16, W dequantised if it was trained in 4 bits.

    bf16 moves a weight by at most 2⁻⁸ of itself, and so each product. The logits pass 14 matrices
    (embedding, three blocks of qkv, o, gate_up and down, and the head), which allows
    14 · 2⁻⁸ = .055 of their size. This folder exports to 4 bits in turn, without an adapter.
    """
    run, m = runs(family, quant)
    export.export(run, tmp_path / "out", "bf16")
    stored, base = stored_weights(tmp_path / "out"), stored_weights(run.parent / family)
    assert stored.keys() == base.keys() and all(t.dtype == torch.bfloat16 for t in stored.values())
    if quant == "nvfp4":
        for name, q in projections(m).items():
            base[f"{name}.weight"] = nvfp4.dequantize(q, torch.float32)
    adapter = load_file(run / "adapter/adapter_model.safetensors")
    for at in [name.removesuffix("A.weight") for name in adapter if name.endswith("A.weight")]:
        name = at.removeprefix("base_model.model.").replace("lora_", "weight")
        exact = base[name].double() + 8 / 4 * adapter[f"{at}B.weight"] @ adapter[f"{at}A.weight"]
        off = (stored[name].double() - exact).abs()
        assert (off <= 2**-8 * exact.abs() + 1e-6).all(), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(IDS).logits - logits(m)).norm() < 14 * 2**-8 * logits(m).norm()
    if quant == "bf16":
        export.export(tmp_path / "out", tmp_path / "four", "nvfp4")
        rounded = stored_weights(tmp_path / "four")[f"{O_PROJ}_packed"]
        assert torch.equal(rounded, nvfp4.quantize(stored[O_PROJ]).packed)
        assert not (tmp_path / "four/adapter").exists()


# --- other people's readers


def scaled(folder, family, kind):
    """Write a tiny checkpoint with a RoPE of its own → transformers' model."""
    rope = {"rope_type": kind, "rope_theta": 5e5} | ROPE[kind]
    return tiny_checkpoint(folder, family, rope_parameters=rope)


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_ropes_numbers_stand_where_transformers_4_and_5_look(tmp_path, family, kind):
    scaled(tmp_path / "in", family, kind)
    for format in export.TOLERANCE:
        export.export(tmp_path / "in", tmp_path / format, format)
        config = json.loads((tmp_path / format / "config.json").read_text())
        assert config["rope_theta"] == 5e5
        if kind == "default":
            assert not config.get("rope_scaling")
        else:
            assert config["rope_scaling"] == {"rope_type": kind} | ROPE[kind]
        again = AutoConfig.from_pretrained(tmp_path / format).rope_parameters
        assert again == {"rope_type": kind, "rope_theta": 5e5} | ROPE[kind]


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """older(code, *arguments) runs code under transformers 4.57.6 → what it prints."""
    folder = tmp_path_factory.mktemp("transformers4")
    wanted = "transformers==4.57.6", "huggingface_hub<1", "tokenizers>=0.22,<0.23"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*pip, *wanted], check=True)

    def run(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        env = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        assert "rope" not in done.stderr and "newly initialized" not in done.stderr, done.stderr
        return done.stdout

    return run


LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, __version__
assert __version__ == "4.57.6"
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.arange(24).view(2, 12) * 7 % 97
    with torch.no_grad():
        torch.save(model(ids).logits, folder + "/logits.pt")
"""


@pytest.mark.slow
def test_transformers_4_has_the_logits_of_5(older, tmp_path):
    """To the last bit, in bf16: merged, and in compressed-tensors' layout, through its library. One
    of three has projections in 16 bits.
    """
    folders = []
    for family in ("llama", "qwen2", "qwen3"):
        for kind in ROPE:
            source = tmp_path / f"{family}-{kind}"
            scaled(source, family, kind)
            for format in ("bf16", "nvfp4"):
                folders.append(tmp_path / f"{family}-{kind}-{format}")
                export.export(source, folders[-1], format)
        folders.append(tmp_path / f"{family}-left")
        from_compressed_tensors(tmp_path / f"{family}-in", family, ["lm_head", "re:.*[kv]_proj"])
        export.export(tmp_path / f"{family}-in", folders[-1], "nvfp4")
    older(LOGITS, *folders)
    for folder in folders:
        ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(ours(IDS).logits, torch.load(folder / "logits.pt")), folder


TOKENS = """
import sys
from transformers import AutoTokenizer, GenerationConfig
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": sys.argv[2]}]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
ends = GenerationConfig.from_pretrained(sys.argv[1]).eos_token_id
print(tokenizer(text + sys.argv[2])["input_ids"], tokenizer.all_special_tokens, ends)
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", ["What is  7 * 8?", "é\\n\\t<|im_end|>12 345", "<s>1+1</s> 2"])
def test_transformers_4_reads_a_prompt_as_5_does(older, smollm2, tiny_chat, tmp_path, text):
    """From the export of a GGUF, and of a folder that transformers 5 wrote."""
    for name, source in (("gguf", smollm2[0]), ("folder", special(tiny_chat, tmp_path / "in"))):
        folder = tmp_path / name
        folder.mkdir()
        export.copy_tokenizer(source, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        ours = tokenizer(prompt + text)["input_ids"], tokenizer.all_special_tokens, ends
        assert older(TOKENS, folder, text).strip() == " ".join(map(str, ours))


def special(chat, folder):
    """A copy of the folder `chat` whose tokenizer has more control tokens → weights.Source."""
    shutil.copytree(chat, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<20>", "<21>"]})
    tokenizer.save_pretrained(folder)
    return weights.open(str(folder))


def test_a_tokenizer_is_named_as_transformers_4_knows_it(smollm2, tiny_chat, tmp_path):
    """From a GGUF, and from a folder that transformers 5 wrote, where it reads the same ids."""
    for name, source in (("gguf", smollm2[0]), ("folder", special(tiny_chat, tmp_path / "in"))):
        folder = tmp_path / name
        folder.mkdir()
        export.copy_tokenizer(source, folder)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert type(config.get("extra_special_tokens", {})) is dict
        ours, theirs = AutoTokenizer.from_pretrained(folder), source.tokenizer()
        assert ours.all_special_tokens == theirs.all_special_tokens
        assert ours("1 <20>2<|im_end|>")["input_ids"] == theirs("1 <20>2<|im_end|>")["input_ids"]


# --- refusals and accidents


@pytest.fixture
def command(monkeypatch, capsys):
    """command("RUN DST --format bf16") → exit code, stdout, stderr of tools.export."""

    def run(arguments):
        monkeypatch.setattr(sys, "argv", ["export.py", *arguments.split()])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(export.__file__, run_name="__main__")
            raise SystemExit(0)
        return stop.value.code, *capsys.readouterr()

    return run


REFUSED = [  # arguments, what the refusal names
    ("run full --format bf16", "full exists and is not an empty folder"),
    ("plain out --format nvfp4", "take --format bf16"),
    ("base out --format bf16 --adapter full", "full/adapter_config.json"),
    ("base out --format bf16 --adapter absent", "absent/adapter_config.json"),
    ("base out --format bf16 --adapter text", "lora_alpha='16'"),
    ("base out --format bf16 --quant int3", "quant='int3'"),
    ("unsaved out --format nvfp4", "unsaved has no adapter: .* python train.py --resume"),
    ("absent out --format bf16", "hub id"),
    ("run full/mine/out --format bf16", "full/mine"),
]


def test_the_command_exports_a_run_or_says_why_not(runs, tmp_path, monkeypatch, command):
    """Exit code 0 and "done", or 2 and one sentence; a refusal leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    run, _ = runs()
    Path("run").symlink_to(run)
    Path("base").symlink_to(run.parent / "qwen2")
    Path("plain").symlink_to(runs(quant="bf16")[0])
    code, out, _ = command("run a/good --format nvfp4")
    assert code == 0 and re.fullmatch("done: a/good.*\n", out)
    for name in ("full", "unsaved"):
        Path(name).mkdir()
    Path("full/mine").write_text("")
    Path("full/adapter_config.json").write_text('[{"r": 8, "x": 1}]')
    shutil.copy(run / "config.json", "unsaved")
    config = Path(shutil.copytree(run / "adapter", "text"), "adapter_config.json")
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": "16"'))
    before = sorted(os.listdir())
    for arguments, words in REFUSED:
        code, out, err = command(arguments)
        assert code == 2 and not out and re.fullmatch(f"export.py: .*{words}.*\n", err), err
        assert sorted(os.listdir()) == before
    assert command("plain out --format nvfp4 --quant nvfp4")[0] == 0
    for arguments, rounded in (
        ("base copy --format bf16", True),
        ("base same --format bf16 --quant bf16", False),
        ("run merged --format bf16", False),
        ("a/good again --format bf16", False),  # has 4 bits already
    ):
        code, out, err = command(arguments)
        assert code == 0 and ("rounded to 4 bits first; --quant bf16" in out) == rounded, err
    same, base = (stored_weights(Path(name))[O_PROJ] for name in ("same", "base"))
    assert torch.equal(same, base.bfloat16())


def test_an_export_that_is_interrupted_or_wrong_is_not_there(exported, tmp_path, monkeypatch):
    """An export that is interrupted, or fails on a full disk, leaves nothing.

    A wrong one is moved to another name, which the message has.
    """

    def interrupted(tensors, folder):
        save_file(tensors, folder / "model.safetensors")
        raise KeyboardInterrupt

    def full(tensors, folder):
        raise SafetensorError("No space left on device")

    def damaged(tensors, folder):
        name = f"{O_PROJ}_scale" if f"{O_PROJ}_scale" in tensors else O_PROJ
        half = (tensors[name].float() / 2).to(tensors[name].dtype)
        save_file(tensors | {name: half}, folder / "model.safetensors")

    for write, format, error, says in (
        (interrupted, "nvfp4", KeyboardInterrupt, None),
        (full, "nvfp4", ValueError, "out cannot be written: No space left on device$"),
        (damaged, "nvfp4", ValueError, r"out was not made: .* in .*out\.wrong, .*$"),
        (damaged, "bf16", ValueError, r"out was not made: .* in .*out\.wrong, .*$"),
    ):
        monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", write)
        with pytest.raises(error, match=says):
            export.export(exported("qwen2", "nvfp4"), tmp_path / "out", format)
        assert os.listdir(tmp_path) == (["out.wrong"] if write is damaged else [])


def test_a_gguf_models_tokenizer_and_ends_travel(smollm2, tmp_path):
    """The default model's exported folder gives the same prompt and stop tokens as its GGUF."""
    source, tokenizer = smollm2
    export.copy_tokenizer(source, tmp_path)
    source.config.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    found = weights.open(str(tmp_path))
    ours, theirs = (weights.encode(t, "What is 7 * 8?") for t in (found.tokenizer(), tokenizer))
    assert ours == theirs and found.stop_ids() == source.stop_ids()
    assert (tmp_path / "generation_config.json").is_file()
