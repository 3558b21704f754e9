"""tools/export.py: others' tools read what it writes, and a failure leaves nothing at its place."""

import errno
import functools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import peft
import pytest
import torch
from conftest import ROPE, tiny_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_weights import IDS, LISTED, edit_json, foreign, logits
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompressedTensorsConfig,
    GenerationConfig,
    LlamaConfig,
)

import fp4_gemm
import lora
import model
import nvfp4
from tools import adapter, export, weights

# Qwen 2 has biases
FAMILIES = ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3"))]
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
DENSE = {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def damage(monkeypatch, what):
    """From now on what(tensors) is written in the place of an export's tensors."""
    real = export.write_tensors
    monkeypatch.setattr(export, "write_tensors", lambda tensors, f: real(what(tensors), f))


PARTS = {}  # the words of a packed weight → what was packed


def remembering_pack(*qs):
    packed = fp4_gemm.pack(*qs)
    PARTS[packed.words] = qs
    return packed


def projections(m):
    """{name: NVFP4Tensor} of each projection in 4 bits of a model that `runs` made."""
    found = {}
    for name, layer in lora.lora_layers(m).items():
        parent, _, module = name.rpartition(".")
        names = adapter.FUSED.get(module, (module,))
        if not isinstance(layer.base.weight, fp4_gemm.Dense):
            for part, q in zip(names, PARTS[layer.base.weight.words], strict=True):
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
        (base / "tokenizer.json").write_text("{}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "pack", remembering_pack)
            m = model.load(weights.open(base), quant, rank=4, alpha=8)
        for layer in lora.lora_layers(m).values():
            layer.lora_B.data.normal_(0, 0.2)
        lora.refresh(m)
        adapter.save_adapter(m, folder / "adapter", base)
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


def said(folder, file="config.json", key="quantization_config"):
    return json.loads((folder / file).read_text())[key]


# --- in 4 bits


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_tensors_decompresses_our_export_to_our_weights(runs, exported, family):
    """Its decompressor returns nvfp4.dequantize's bf16, bit for bit; other tensors are the same."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, (run, m) = exported(family, "nvfp4"), runs(family)
    groups = QuantizationConfig.model_validate(said(folder)).config_groups
    stored, original = stored_weights(folder), stored_weights(run.parent / family)
    for name, q in projections(m).items():
        ends = ("weight_packed", "weight_scale", "weight_global_scale")
        parts = {end: stored.pop(f"{name}.{end}") for end in ends}
        found = NVFP4PackedCompressor.decompress(parts, groups["group_0"])
        assert torch.equal(found["weight"], nvfp4.dequantize(q)), name
        del original[f"{name}.weight"]
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_independent_reader_finds_our_weights_in_the_modelopt_export(runs, exported, family):
    """Every projection, bit for bit in bf16, decoded code by code."""
    folder = exported(family, "modelopt")
    assert said(folder, "hf_quant_config.json", "quantization") == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }  # without the null vLLM refuses it
    tensors = stored_weights(folder)
    for name, q in projections(runs(family)[1]).items():
        packed, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        code = torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()
        value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[code & 7] * (1 - 2 * (code >> 3))
        value *= scale.float().repeat_interleave(16, 1) * tensors[f"{name}.weight_scale_2"]
        assert torch.equal(value.bfloat16(), nvfp4.dequantize(q)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_load_the_4_bit_export(runs, exported, family):
    """With the adapter, in fp32, the logits differ by the order of sums alone (1e-4).

    The adapter names the 4-bit weights, on which it was trained. Without dequantize=True all 21
    projections stay packed and transformers computes in bf16, which also rounds activations,
    embedding, head and norms: the logits may move by 14 · 2⁻⁸ of their size, 2⁻⁸ for each of the
    matrices that they pass (embedding, three blocks of qkv, o, gate_up and down, and the head).
    """
    folder = exported(family, "nvfp4")
    packed = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(hasattr(m, "weight_packed") for m in packed.modules()) == 21
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **DENSE)
    adapter = peft.PeftConfig.from_pretrained(folder / "adapter")
    assert adapter.base_model_name_or_path == str(folder)
    with torch.no_grad():
        plain = theirs(IDS).logits
        adapted = peft.PeftModel.from_pretrained(theirs, folder / "adapter")(IDS).logits
        assert (packed(IDS).logits - plain).norm() < 14 * 2**-8 * plain.norm()
    assert (adapted - logits(runs(family)[1])).abs().max() < 1e-4


def parts(tensors, name):
    """→ the bits of a projection's codes and block scales, or of its weight in 16 bits."""
    weight = tensors.get(f"{name}.weight_packed", tensors.get(f"{name}.weight"))
    found = weight, tensors.get(f"{name}.weight_scale", weight)
    return [t.view(torch.uint8) for t in found]


@pytest.mark.parametrize("format", ["nvfp4", "modelopt"])
@pytest.mark.parametrize("layout, left, ignore", LISTED)
def test_what_a_4_bit_checkpoint_leaves_in_16_bits_stays_so(tmp_path, layout, left, ignore, format):
    """The projection is copied bit for bit and listed in the config, also if others run with it as
    one matrix. Their codes and block scales are copied too. transformers loads compressed-tensors'
    layout through its library, and computes in bf16.
    """
    oracle = foreign(tmp_path / "in", layout, "llama", left, ignore)
    assert export.export(tmp_path / "in", tmp_path / "out", format) < 1e-6
    stored, found = stored_weights(tmp_path / "in"), stored_weights(tmp_path / "out")
    names = [name for name, _ in oracle.named_modules() if name.endswith("_proj")]
    listed = said(tmp_path / "out")["ignore"]
    assert {*listed} == {"lm_head", *(name for name in names if re.search(left, name))}
    if format == "modelopt":
        own = said(tmp_path / "out", "hf_quant_config.json", "quantization")
        assert own["exclude_modules"] == listed
    for name in names:
        assert all(map(torch.equal, parts(found, name), parts(stored, name))), name
    if format == "nvfp4":
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **DENSE)
        with torch.no_grad():
            right = oracle(IDS).logits
            assert (theirs(IDS).logits - right).norm() < 14 * 2**-8 * right.norm()


# --- in 16 bits


@pytest.mark.parametrize("quant", ["nvfp4", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_export_has_the_weights_that_transformers_knows(runs, tmp_path, family, quant):
    """Each weight is W + (alpha/rank) B A in bf16, W dequantised if it was trained in 4 bits.
    bf16 moves a weight by at most 2⁻⁸ of itself.
    """
    run, m = runs(family, quant)
    export.export(run, tmp_path / "out", "bf16")
    stored, base = stored_weights(tmp_path / "out"), stored_weights(run.parent / family)
    assert stored.keys() == base.keys() and all(t.dtype == torch.bfloat16 for t in stored.values())
    for name, q in projections(m).items():
        base[f"{name}.weight"] = nvfp4.dequantize(q, torch.float32)
    adapter = load_file(run / "adapter/adapter_model.safetensors")
    for name, exact in base.items():
        at = f"base_model.model.{name}".replace("weight", "lora_%s.weight")
        if "_proj.weight" in name:
            exact = exact.double() + 8 / 4 * adapter[at % "B"] @ adapter[at % "A"]
        off = (stored[name] - exact).abs()
        assert (off <= 2**-8 * exact.abs() + 1e-6).all(), name


# --- other people's readers


def scaled(folder, family, kind):
    """Write a tiny checkpoint with a RoPE of its own → transformers' model."""
    rope = {"rope_type": kind, "rope_theta": 5e5} | ROPE[kind]
    return tiny_checkpoint(folder, family, rope_parameters=rope)


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_ropes_numbers_stand_where_transformers_4_and_5_look(tmp_path, family, kind):
    scaled(tmp_path / "in", family, kind)
    rope = {"rope_type": kind} | ROPE[kind]
    for format in export.TOLERANCE:
        export.export(tmp_path / "in", tmp_path / format, format)
        config = json.loads((tmp_path / format / "config.json").read_text())
        assert config["rope_theta"] == 5e5
        assert config.get("rope_scaling") == (None if kind == "default" else rope)
        again = AutoConfig.from_pretrained(tmp_path / format).rope_parameters
        assert again == rope | {"rope_theta": 5e5}


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
    """To the last bit, in bf16: merged, and in compressed-tensors' layout, through its library."""
    folders = []
    for family in ("llama", "qwen2", "qwen3"):
        for kind in ROPE:
            source = tmp_path / f"{family}-{kind}"
            scaled(source, family, kind)
            for format in ("bf16", "nvfp4"):
                folders.append(tmp_path / f"{family}-{kind}-{format}")
                export.export(source, folders[-1], format)
    older(LOGITS, *folders)
    for folder in folders:
        ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(ours(IDS).logits, torch.load(folder / "logits.pt")), folder


@pytest.fixture(params=["gguf", "folder"])
def copied(request, smollm2, tiny_chat, tmp_path):
    """→ a source, and a folder with its tokenizer: a GGUF's, or a folder's that transformers 5
    wrote and that has more control tokens.
    """
    out = tmp_path / "out"
    out.mkdir()
    if request.param == "gguf":
        source = smollm2[0]
    else:
        shutil.copytree(tiny_chat, tmp_path / "in")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "in")
        tokenizer.add_special_tokens({"additional_special_tokens": ["<20>", "<21>"]})
        tokenizer.save_pretrained(tmp_path / "in")
        source = weights.open(tmp_path / "in")
    export.copy_tokenizer(source, out)
    return source, out


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
def test_transformers_4_reads_a_prompt_as_5_does(older, copied, text):
    _, folder = copied
    here = subprocess.run(
        [sys.executable, "-c", TOKENS, folder, text], capture_output=True, text=True
    )
    assert here.stdout and older(TOKENS, folder, text) == here.stdout


def test_a_tokenizer_travels_under_names_that_transformers_4_knows(copied):
    """With its template and its end tokens."""
    source, folder = copied
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert type(config.get("extra_special_tokens", {})) is dict
    ours, theirs = AutoTokenizer.from_pretrained(folder), source.tokenizer()
    assert ours("1 <20>2<|im_end|>")["input_ids"] == theirs("1 <20>2<|im_end|>")["input_ids"]
    assert weights.encode(ours, "What is 7 * 8?") == weights.encode(theirs, "What is 7 * 8?")
    assert ours.all_special_tokens == theirs.all_special_tokens
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    assert ends == source.config.eos_token_id


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
    ("run full --format bf16", "full"),
    ("plain out --format nvfp4", "--format bf16"),
    ("base out --format bf16 --adapter absent", "absent holds no adapter_config.json"),
    (
        "base out --format bf16 --adapter full",
        "full/adapter_config.json cannot be read, fetch it again",
    ),
    ("base out --format bf16 --adapter text", "lora_alpha='16'"),
    ("base out --format bf16 --quant int3", "quant='int3'"),
    ("odd1 out --format bf16", "odd1/config.json has model=None, quant='nvfp4'"),
    ("odd2 out --format bf16", r"odd2/config.json has model='base', quant=\[\]"),
    ("odd3 out --format bf16", "odd3/config.json cannot be read.*a key occurs twice"),
    ("unsaved out --format nvfp4", "train.py --resume"),
    ("moved out --format nvfp4", "gone, the base of moved, has moved.* --adapter moved/adapter"),
    ("base out --format bf16 --adapter bin", "save adapter_model.bin"),
    ("run full/mine/out --format bf16", "full/mine"),
]


def test_the_command_exports_a_run_or_says_why_not(runs, tmp_path, monkeypatch, command):
    """Exit code 0, or 2 and one sentence; a refusal leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    run, _ = runs()
    Path("run").symlink_to(run)
    Path("base").symlink_to(run.parent / "qwen2")
    Path("plain").symlink_to(runs(quant="bf16")[0])
    for name in ("full", "unsaved", "bin"):
        Path(name).mkdir()
    shutil.copytree("run", "moved")
    Path("moved/config.json").write_text('{"model": "/gone", "quant": "nvfp4"}')
    odd = '{"quant": "nvfp4"}', '{"model": "base", "quant": []}', '{"quant": 1, "quant": 2}'
    for number, config in enumerate(odd, 1):
        shutil.copytree("run", f"odd{number}")
        Path(f"odd{number}/config.json").write_text(config)
    Path("bin/adapter_model.bin").touch()
    shutil.copy("moved/adapter/adapter_config.json", "bin")
    Path("full/mine").write_text("")
    Path("full/adapter_config.json").write_text('[{"r": 8, "x": 1}]')
    Path("full/adapter_model.safetensors").touch()
    shutil.copy(run / "config.json", "unsaved")
    config = Path(shutil.copytree(run / "adapter", "text"), "adapter_config.json")
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": "16"'))
    for arguments, rounded in (
        ("run a/good --format nvfp4", False),
        ("plain four --format nvfp4 --quant nvfp4", False),
        ("base copy --format bf16", True),
        ("base same --format bf16 --quant bf16", False),
        ("a/good again --format bf16", False),  # has 4 bits already
    ):
        code, out, err = command(arguments)
        assert code == 0 and ("--quant bf16" in out) == rounded, err
    before = sorted(os.listdir())
    for arguments, words in REFUSED:
        code, out, err = command(arguments)
        assert code == 2 and not out and re.fullmatch(f"export.py: .*{words}.*\n", err), err
        assert sorted(os.listdir()) == before


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_that_a_signal_ends_leaves_nothing(
    runs, tmp_path, monkeypatch, command, number, code
):
    """A temporary folder beside DST may be as large as the model."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    copy = export.copy_tensors

    def struck(*given):
        os.kill(os.getpid(), number)
        return copy(*given)

    monkeypatch.setattr("tools.adapter.copy_tensors", struck)
    monkeypatch.chdir(tmp_path)
    try:
        stopped, out, err = command(f"{runs()[0]} dst --format nvfp4")
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert (stopped, out, err) == (code, "", "") and not os.listdir()


def test_an_export_that_is_interrupted_or_wrong_is_not_there(exported, tmp_path, monkeypatch):
    """An export that is interrupted, fails on a full disk, or is wrong, leaves nothing."""

    def interrupted(tensors):
        yield next(tensors)
        raise KeyboardInterrupt

    def damaged(tensors):
        for name, tensor in tensors:
            if name in (O_PROJ, f"{O_PROJ}_scale"):
                tensor = (tensor.float() / 2).to(tensor.dtype)
            yield name, tensor

    def full(tensors):
        raise SafetensorError("No space left on device")

    source = exported("qwen2", "nvfp4")  # before its export can be damaged
    for what, format, error, says in (
        (interrupted, "nvfp4", KeyboardInterrupt, None),
        (full, "nvfp4", ValueError, "out cannot be written: No space left on device$"),
        (damaged, "nvfp4", ValueError, "out was not made: the logits"),
        (damaged, "bf16", ValueError, "out was not made: the logits"),
    ):
        with monkeypatch.context() as patch, pytest.raises(error, match=says):
            damage(patch, what)
            export.export(source, tmp_path / "out", format)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("place", ["empty", ".", "link", "dangling", "mount"])
def test_an_export_onto_a_folder_that_exists_ends_whole(exported, tmp_path, monkeypatch, place):
    """An empty one, the current one, one behind a symlink, a symlink to one that does not exist
    yet, and a mount point, which nothing can be renamed to. An interrupted one leaves it empty.
    """
    folder = tmp_path / "empty"
    if place != "dangling":
        folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder if place == "." else tmp_path)
    if place == "mount":
        rename = os.replace

        def replace(old, new):
            if Path(new).resolve() == folder or ".." in os.path.relpath(new, folder):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            rename(old, new)

        monkeypatch.setattr(os, "replace", replace)
    name = {"mount": "empty", "dangling": "link"}.get(place, place)
    source = exported("qwen2", "nvfp4")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, "write_config", Mock(side_effect=KeyboardInterrupt))
        export.export(source, name, "nvfp4")
    assert folder.exists() == (place != "dangling") and not list(tmp_path.glob("empty/*"))
    export.export(source, name, "nvfp4", adapter=source / "adapter")
    assert stored_weights(folder).keys() == stored_weights(source).keys()
    base = said(folder / "adapter", adapter.CONFIG, "base_model_name_or_path")
    assert base == str(folder)  # no relative one, which PEFT would look for elsewhere


def test_what_an_export_does_not_copy_is_not_named(tmp_path):
    """Code of the base's folder, and a folder named as a tokenizer's files are. Others may read
    what was written.
    """
    tiny_checkpoint(tmp_path / "in")
    edit_json(tmp_path / "in/config.json", auto_map={"AutoModel": "modeling_x.Model"})
    text = '{"auto_map": {"AutoTokenizer": ["tokenization_x.Tokenizer", null]}}'
    (tmp_path / "in/tokenizer_config.json").write_text(text)
    (tmp_path / "in/tokenizer").mkdir()
    before = os.umask(0o022)
    try:
        export.export(tmp_path / "in", tmp_path / "out", "bf16")
    finally:
        os.umask(before)
    for file in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / file).read_text())
    for path in [tmp_path / "out", *(tmp_path / "out").iterdir()]:
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


# --- memory


def test_weights_are_written_in_files_of_a_limited_size(runs, tmp_path, monkeypatch):
    """transformers reads them by their index, and finds what one file would hold."""
    monkeypatch.setattr(export, "SHARD", 50_000)
    export.export(runs()[0], tmp_path / "many", "bf16")
    sizes = {path: path.stat().st_size for path in (tmp_path / "many").glob("*.safetensors")}
    assert len(sizes) > 3 and max(sizes.values()) < 54_000  # with a header
    monkeypatch.undo()
    export.export(runs()[0], tmp_path / "one", "bf16")
    many, one = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("many", "one")
    )
    assert many.keys() == one.keys() and all(torch.equal(many[k], one[k]) for k in one)


PEAK = """
import sys, threading, time
from tools import export
export.SHARD = 1e8
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
peak = start = resident()
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
export.export(sys.argv[1], sys.argv[2], "bf16", quant="bf16")
print(peak - start)
"""


def test_an_export_holds_a_layer_and_a_file_at_a_time(tmp_path):
    """Of a model of 252 MB in bf16: 1.5 times a layer of 42 MB, a file of 100 MB, and 64 MB that
    Python and torch take in their first calls.
    """
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=5504,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=512,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    model = empty.to_empty(device="cpu").bfloat16()
    for p in model.parameters():
        p.data.fill_(0.01)
    model.save_pretrained(tmp_path / "in")
    command = [sys.executable, "-c", PEAK, tmp_path / "in", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.5 * 42.2e6 + 1e8 + 64e6
