"""Weights out: a run, or a model as it is, as a folder that other people's tools load.

    python -m tools.export RUN DST --format bf16              W + (alpha/rank) B A, W as trained on
                                            nvfp4 | modelopt  W in 4 bits, the LoRA in DST/adapter

The LoRA alone needs no export: RUN/adapter has PEFT's files. nvfp4 is compressed-tensors' layout of
the 4 bits, modelopt is ModelOpt's (see tools/weights.py). To round the sum to 4 bits, export bf16,
then that folder as nvfp4: part of what the adapter learned is lost.

The folder appears at DST only after it was loaded again and its logits compared; a wrong one is
DST.wrong. Needs: torch, transformers, safetensors, huggingface_hub; model.py, lora.py, fp4_gemm.py,
tools/weights.py, tools/adapter.py.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import huggingface_hub
import torch
from transformers import GenerationConfig

import fp4_gemm
import lora
import model
from tools import weights
from tools.adapter import load_adapter
from tools.weights import CT, MODELOPT

LAYOUTS = {"nvfp4": CT, "modelopt": MODELOPT}  # of 4-bit weights, by --format
# the ends of the names of a projection's codes, block scales and global scale
ENDS = {CT: ("_packed", "_scale", "_global_scale"), MODELOPT: ("", "_scale", "_scale_2")}
TOKENIZER_FILES = "(tokenizer|vocab|merges|special_t|added_t|chat_template|generation_c)"
# How far the logits of what was written may be off. bf16 rounds each weight; NVFP4 is exact, but a
# foreign global scale is inverted, which rounds.
LIMITS = {"bf16": 2**-5, "nvfp4": 1e-5, "modelopt": 1e-5}


@torch.no_grad()
def export(source, destination, format, adapter="", quant=""):
    """Write the folder `destination`, read it again → how far its logits are off, as a share of
    their size.

    source: a run's folder, or what weights.open takes. format: "bf16", "nvfp4" or "modelopt".
    adapter, quant: override the run's own. ValueError: destination is not empty,
    nothing to write, or the folder read back gives other logits.
    """
    place = Path(destination)
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder: name a new one")
    name, quant, adapter = resolve(source, format, adapter, quant)
    base = weights.open(name)
    decoder = load(base, quant, adapter)
    want = probe(decoder)
    place.parent.mkdir(parents=True, exist_ok=True)
    # Write into a scratch folder beside the place, so that an accident leaves nothing at the place.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        with weights.readable(place, "cannot be written"):  # on a full disk safetensors names none
            copy_tokenizer(base, new)
            if format == "bf16":
                merge(decoder)
            elif adapter:
                lora.save_adapter(decoder, new / "adapter", place)  # its base: these 4-bit weights
            write_weights(decoder, base, new, LAYOUTS.get(format))
        del decoder  # one model in memory at a time
        if format == "bf16":
            again = load(str(new), "bf16", "")
        else:
            again = load(str(new), quant, adapter and new / "adapter")
        off = ((probe(again) - want).norm() / want.norm()).item()
        right = off <= LIMITS[format]  # False if it is NaN
        wrong = place.with_name(f"{place.name}.wrong")
        if not right:
            shutil.rmtree(wrong, ignore_errors=True)  # of an earlier try
        os.replace(new, place if right else wrong)
    if not right:
        raise ValueError(
            f"{place} was not made: the logits of what was written, now in {wrong}, are off by "
            f"{off:.1e} of their size, more than {LIMITS[format]:.1e}"
        )
    return off


def resolve(source, format, adapter, quant):
    """→ what is exported: the name of a base as weights.open takes it, its quant, the folder of an
    adapter on it ("" for none). A run's folder as source gives what is not given. ValueError: there
    is nothing to write in this format.
    """
    run = Path(source)
    if (run / "config.json").is_file():
        flags = read_json(run / "config.json")
        if "quant" in flags:  # a run's, not a model's
            if not adapter and not (run / "adapter").is_dir():
                raise ValueError(
                    f"{run} has no adapter: train on with python train.py --resume {run}"
                )
            source = flags["model"]
            adapter = adapter or run / "adapter"
            quant = quant or flags["quant"]
    if format in LAYOUTS and quant == "bf16":
        raise ValueError(
            "a run of --quant bf16 has no 4 bits to write: take --format bf16, or --quant nvfp4"
        )
    return source, quant or "nvfp4", adapter


def load(base, quant, adapter):
    """→ the Decoder of a base, as model.load takes it, with an adapter's folder if there is one."""
    settings = read_json(Path(adapter) / "adapter_config.json") if adapter else {}
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    # load_adapter refuses what is no int, and no number
    rank = rank if type(rank) is int else 1
    alpha = alpha if type(alpha) in (int, float) else 1
    decoder = model.load(base, quant, rank, alpha)
    if adapter:
        load_adapter(decoder, adapter)
    return decoder


def probe(decoder):
    """→ the decoder's logits (1, 32, V) f32 after each of 32 fixed tokens."""
    ids = torch.arange(1, 33)[None] * 7919 % decoder.config.vocab_size
    return decoder.logits(decoder(ids, torch.arange(32)[None]))


def read_json(path):
    """→ the object in a JSON file. ValueError: there is none."""
    with weights.readable(path):
        return {**json.loads(path.read_text())}


def merge(decoder):
    """W + (alpha/rank) B A becomes W, in bf16."""
    for layer in lora.lora_layers(decoder).values():
        A, B = layer.lora_A.data.split(layer.rank), layer.lora_B.data.split(layer.splits)
        added = torch.cat([layer.scale * b @ a for a, b in zip(A, B, strict=True)])
        W = fp4_gemm.dequantize(layer.base.W, torch.float32) + added
        layer.base.W = fp4_gemm.Dense(W.bfloat16())


def copy_tokenizer(source, folder):
    """Put the tokenizer with its chat template and the generation config into `folder`."""
    if isinstance(source, weights.GGUF):
        source.tokenizer().save_pretrained(folder)
        GenerationConfig.from_model_config(source.config).save_pretrained(folder)
        return
    for file in source.folder.iterdir():
        if re.match(TOKENIZER_FILES, file.name):
            shutil.copyfile(file, folder / file.name)


def write_weights(decoder, source, folder, layout):
    """config.json and the weights, in `layout` or, if it is None, in bf16. Drops each layer's base
    once it is converted.
    """
    config, tensors = source.config, {}
    config.dtype = torch.bfloat16
    config.__dict__.pop("quantization_config", None)
    if layout:
        config.quantization_config = quantization(layout, folder)
    config.save_pretrained(folder)
    for name in weights.tensor_names(config):
        if name in source.names and not name.endswith("_proj.weight"):
            tensor = source.read(name)
            tensors[name] = tensor if layout else tensor.bfloat16()
    for name, layer in lora.lora_layers(decoder).items():
        parent, _, own = name.rpartition(".")
        W, layer.base = layer.base.W, None
        parts = fp4_gemm.unpack(W) if layout else zip(W.weight.split(layer.splits))
        for projection, part in zip(lora.FUSED.get(own, (own,)), parts, strict=True):
            if layout == CT:
                codes, block_scale, global_scale = part
                part = codes, block_scale, 1 / global_scale.view(1)  # the format's divides
            for end, tensor in zip(ENDS.get(layout, [""]), part, strict=True):
                tensors[f"model.{parent}.{projection}.weight{end}"] = tensor.clone()
    huggingface_hub.save_torch_state_dict(tensors, folder)


def quantization(layout, folder):
    """→ the quantization_config of a layout. ModelOpt's goes into a file of its own, too, by which
    readers know whose layout it is.
    """
    method, kind = layout
    if layout == CT:
        algorithm = dict(format=kind, quantization_status="compressed")
    else:
        algorithm = dict(quant_algo=kind)
        more = dict(kv_cache_quant_algo=None, group_size=16, exclude_modules=["lm_head"])
        producer = dict(name="modelopt", version="0.44.0")
        text = json.dumps(dict(producer=producer, quantization=algorithm | more))
        (folder / "hf_quant_config.json").write_text(text)
    of_weights = dict(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic=False
    )
    return dict(
        quant_method=method,
        ignore=["lm_head"],
        **algorithm,
        config_groups={"group_0": dict(targets=["Linear"], weights=of_weights)},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of a run, or a model as train.py's --model takes it")
    parser.add_argument("destination", help="folder to make")
    parser.add_argument("--format", required=True, choices=LIMITS)
    parser.add_argument(
        "--adapter", default="", help="folder of a PEFT adapter (default: the run's)"
    )
    parser.add_argument(
        "--quant", default="", help="of the base, as in train.py (default: the run's, nvfp4)"
    )
    flags = parser.parse_args()
    try:
        off = export(**vars(flags))
    except (ValueError, OSError) as error:
        print(f"export.py: {error}", file=sys.stderr)
        sys.exit(2)
    print(
        f"done: {flags.destination}, whose logits are the model's but for {off:.1e} of their size"
    )
