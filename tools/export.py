"""Weights out: a run, or a model as it is, as a folder that other people's tools load.

    python -m tools.export RUN DST --format adapter           the LoRA in PEFT's files
                                            bf16              W + (alpha/rank) B A, W as trained on
                                            nvfp4 | modelopt  W in 4 bits, the LoRA in DST/adapter

nvfp4 is compressed-tensors' layout of the 4 bits, modelopt is ModelOpt's (see tools/weights.py). To
round the sum to 4 bits, export bf16, then that folder as nvfp4: part of what the adapter learned is
lost.
The folder appears at DST only after it was loaded again and its logits compared; a wrong one is
DST.wrong. Needs: torch, transformers, safetensors, huggingface_hub, model.py, tools/weights.py,
tools/adapter.py, lora.py, fp4_gemm.py.
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

# the ends of the names of a projection's codes, block scales and global scale
ENDS = {CT: ("_packed", "_scale", "_global_scale"), MODELOPT: ("", "_scale", "_scale_2")}


@torch.no_grad()
def export(source, destination, format, adapter="", quant=""):
    """Write the folder `destination`, read it again → how far its logits are off, as a share of
    their size.

    source: a run's folder, or what weights.open takes. adapter, quant: override the run's own.
    ValueError: destination is not empty, nothing to write, or the folder read back gives other
    logits.
    """
    place, run, layout = (
        Path(destination),
        Path(source),
        {"nvfp4": CT, "modelopt": MODELOPT}.get(format),
    )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder: name a new one")
    if (run / "config.json").is_file() and "quant" in (flags := _json(run / "config.json")):
        if not adapter and not (run / "adapter").is_dir():
            raise ValueError(f"{run} has no adapter: train on with python train.py --resume {run}")
        source, adapter, quant = flags["model"], adapter or run / "adapter", quant or flags["quant"]
    if not adapter and format == "adapter":
        raise ValueError(
            f"{source} has no adapter: name a run's folder, or an adapter's with --adapter"
        )
    if layout and quant == "bf16":
        raise ValueError(
            "a run of --quant bf16 has no 4 bits to write: take --format bf16, or --quant nvfp4"
        )
    shape = _json(Path(adapter) / "adapter_config.json") if adapter else {}
    rank = r if type(r := shape.get("r")) is int else 1  # load_adapter refuses what is no int
    # as it does for no number
    alpha = a if type(a := shape.get("lora_alpha")) in (int, float) else 1
    base_name = place if layout else source
    source, quant = weights.open(source), quant or "nvfp4"
    ours = model.load(source, quant, rank, alpha)
    if adapter:
        load_adapter(ours, adapter)
    ids, positions = (
        torch.arange(1, 33)[None] * 7919 % source.config.vocab_size,
        torch.arange(32)[None],
    )
    want = ours.logits(ours(ids, positions))
    if format == "bf16":
        _merge(ours)
    place.parent.mkdir(parents=True, exist_ok=True)
    # Write into a scratch folder beside the place, so that an accident leaves nothing at the place.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as scratch:
        new, wrong = Path(scratch) / "new", place.with_name(f"{place.name}.wrong")
        beside = adapter and {"adapter": new, "bf16": None}.get(format, new / "adapter")
        new.mkdir()
        # on a full disk safetensors names no file
        with weights.readable(place, "cannot be written"):
            _copy_tokenizer(source, new)
            if beside:
                lora.save_adapter(ours, beside, base_name)
            if format != "adapter":
                _write(ours, source, new, layout)
        del ours  # one model in memory at a time
        again = model.load(
            source if format == "adapter" else str(new),
            "bf16" if format == "bf16" else quant,
            rank,
            alpha,
        )
        if beside:
            load_adapter(again, beside)
        off = ((again.logits(again(ids, positions)) - want).norm() / want.norm()).item()
        # bf16 rounds each weight; NVFP4 is exact, but a foreign global scale is inverted, which
        # rounds
        limit = 2**-5 if format == "bf16" else 1e-5
        if not off <= limit:
            shutil.rmtree(wrong, ignore_errors=True)  # of an earlier try
        os.replace(new, place if off <= limit else wrong)
    if not off <= limit:
        raise ValueError(
            f"{place} was not made: the logits of what was written, now in {wrong}, are off by "
            f"{off:.1e} of their size, more than {limit:.1e}"
        )
    return off


def _json(path):
    with weights.readable(path):
        return {**json.loads(path.read_text())}


def _merge(decoder):
    """W + (alpha/rank) B A becomes W, in bf16."""
    for layer in lora.lora_layers(decoder).values():
        parts = zip(
            layer.lora_A.data.split(layer.rank), layer.lora_B.data.split(layer.splits), strict=True
        )
        added = torch.cat([layer.scale * b @ a for a, b in parts])
        layer.base.W = fp4_gemm.Dense(
            (fp4_gemm.dequantize(layer.base.W, torch.float32) + added).bfloat16()
        )


def _copy_tokenizer(source, folder):
    """Put the tokenizer with its chat template and the generation config into `folder`."""
    if isinstance(source, weights.GGUF):
        source.tokenizer().save_pretrained(folder)
        GenerationConfig.from_model_config(source.config).save_pretrained(folder)
        return
    for file in source.folder.iterdir():
        if re.match(
            "(tokenizer|vocab|merges|special_t|added_t|chat_template|generation_c)", file.name
        ):
            shutil.copyfile(file, folder / file.name)


def _write(decoder, source, folder, layout):
    """config.json and the weights, in `layout` or in bf16. Drops each layer's base once it is
    converted.
    """
    config, tensors = source.config, {}
    config.dtype = torch.bfloat16
    config.__dict__.pop("quantization_config", None)
    if layout:
        kind = layout[1]
        algo = (
            dict(format=kind, quantization_status="compressed")
            if layout == CT
            else dict(quant_algo=kind)
        )
        format_of_weights = dict(
            num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic=False
        )
        config.quantization_config = dict(
            quant_method=layout[0],
            ignore=["lm_head"],
            **algo,
            config_groups={"group_0": dict(targets=["Linear"], weights=format_of_weights)},
        )
    if layout == MODELOPT:
        (folder / "hf_quant_config.json").write_text(
            json.dumps(
                dict(
                    producer=dict(
                        name="modelopt", version="0.44.0"
                    ),  # readers check whose layout it is
                    quantization=dict(
                        algo, kv_cache_quant_algo=None, group_size=16, exclude_modules=["lm_head"]
                    ),
                )
            )
        )
    config.save_pretrained(folder)
    for name in weights.tensor_names(config):
        if name in source.names and not name.endswith("_proj.weight"):
            tensors[name] = source.read(name) if layout else source.read(name).bfloat16()
    for name, layer in lora.lora_layers(decoder).items():
        parent, _, own = name.rpartition(".")
        W, layer.base = layer.base.W, None
        parts = fp4_gemm.unpack(W) if layout else zip(W.weight.split(layer.splits))
        for proj, part in zip(lora.FUSED.get(own, (own,)), parts, strict=True):
            if layout == CT:  # the format stores the inverse
                part = *part[:2], 1 / part[2].view(1)
            for end, tensor in zip(ENDS.get(layout, [""]), part, strict=True):
                tensors[f"model.{parent}.{proj}.weight{end}"] = tensor.clone()
    huggingface_hub.save_torch_state_dict(tensors, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of a run, or a model as train.py's --model takes it")
    parser.add_argument("destination", help="folder to make")
    parser.add_argument("--format", required=True, choices=("adapter", "bf16", "nvfp4", "modelopt"))
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
