"""Where the seconds of loading a model go, and folders of random weights to load.

    python -m bench.loading --model FILE.gguf --quant nvfp4 bf16 --out FILE.jsonl
    python -m bench.loading --write FOLDER --model-shape 7b --tokenizer QWEN

A record for each --quant. The seconds of each phase exclude those of the phases within it, and the
GPU has finished before the next phase begins:

    open        config and list of tensors; of a GGUF also its vocabulary
    tokenizer   and the tokens that end an answer
    start       the GPU's first allocation, with the first --quant
    read        tensors from the file, dequantised, onto the device
    check       that they are finite, and of the config's shape
    scale, quantise, pack                     projections in NVFP4
    join        projections that are not quantised
    embeddings, adapter, rest                 rest: norms, and what no other phase has
    load_s      all of model.load

`sum` is of all weights' bits times their places, to compare two commits: equal weights have equal
sums.
--write makes bf16 safetensors and a config.json that transformers can load, with the files of the
folder --tokenizer. Tensors of one shape have the same values.

Needs: transformers, safetensors; common.py; model.py, nvfp4.py, fp4_gemm.py, lora.py;
tools/{memory,weights}.py.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import fp4_gemm
import lora
import nvfp4
from bench import common
from model import load
from tools import memory, weights

PHASES = {
    "read": [(weights.GGUF, "read"), (weights.Safetensors, "read")],
    "check": [(weights.Source, "tensor")],
    "scale": [(nvfp4, "shared_global_scale")],
    "quantise": [(nvfp4, "quantize")],
    "pack": [(weights, "pack")],
    "join": [(weights, "_dense")],
    "embeddings": [(weights.Source, "embeddings"), (weights.Source, "lm_head")],
    "adapter": [(lora.LoRALinear, "__init__")],
}


class Phases:
    """seconds: of each phase so far, without the phases within it."""

    def __init__(self):
        self.seconds = Counter()
        self.within = [0.0]  # seconds of the phases within each phase that is running
        for phase, functions in PHASES.items():
            for owner, name in functions:
                setattr(owner, name, self.timed(phase, getattr(owner, name)))

    def timed(self, phase, function):
        def call(*args, **kwargs):
            began = common.clock()
            self.within.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds = common.clock() - began
                self.seconds[phase] += seconds - self.within.pop()
                self.within[-1] += seconds

        return call


def main(arguments=None):
    parser = common.flags(__doc__, model_shape="7b")
    parser.add_argument("--model", help="as train.py takes it")
    parser.add_argument("--quant", nargs="+", choices=weights.QUANT, default=["nvfp4"])
    parser.add_argument("--write", help="make this folder")
    parser.add_argument("--tokenizer", help="for --write: a folder with a tokenizer's files")
    args = parser.parse_args(arguments)
    if bool(args.model) == bool(args.write) or bool(args.write) != bool(args.tokenizer):
        parser.error("give --model, or --write with --tokenizer")
    if args.write:
        write(Path(args.write), args.model_shape, Path(args.tokenizer))
        return
    info = common.conditions() | {"model": Path(args.model).name}
    records = common.Records(args.out, info)
    phases = Phases()
    for quant in args.quant:
        records.append({"weights": quant} | measured(phases, args.model, quant))


def measured(phases, name, quant):
    """Load a model → the seconds of each phase, and the sum of its bits."""
    phases.seconds.clear()
    source = phases.timed("open", weights.open)(name)
    phases.timed("tokenizer", source.tokenizer)()
    phases.timed("tokenizer", source.stop_ids)()
    phases.timed("start", torch.zeros)(1, device=common.DEVICE)
    before = phases.seconds.total()
    began = common.clock()
    model = load(source, quant, device=common.DEVICE)
    load_s = common.clock() - began
    rest = load_s + before - phases.seconds.total()
    return {**phases.seconds, "rest": rest, "load_s": load_s, "sum": sum_of(model)}


def sum_of(model):
    parts = [model.embed_tokens.to(common.DEVICE), model.lm_head, model.norm.weight]
    for layer in lora.lora_layers(model).values():
        weight = layer.base.weight
        dense = isinstance(weight, fp4_gemm.Dense)
        parts += [weight.weight] if dense else [weight.words, weight.scales, weight.global_scales]
    total = 0
    for part in parts:
        for words in part.flatten().view(torch.int32).split(1 << 24):
            places = torch.arange(1, len(words) + 1, device=words.device)
            total += int((words * places).sum())
    return total


def write(folder, shape, tokenizer):
    """A file for each layer; the first also has what is outside of the layers."""
    config = memory.config(shape)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config.save_pretrained(folder)
    files, values = {}, {}
    for name in tensors:
        layer, *_ = [int(part) for part in name.split(".") if part.isdigit()] or [0]
        files.setdefault(f"model-{layer:05}.safetensors", []).append(name)
    for file, names in files.items():
        for name in names:
            size = tensors[name].shape
            if size not in values:
                drawn = torch.randn(size, dtype=torch.bfloat16, device=common.DEVICE)
                values[size] = drawn.mul_(0.02).cpu()
        # safetensors refuses tensors that share memory; a norm's weight is near 1
        drawn = {name: values[tensors[name].shape] + ("norm" in name) for name in names}
        save_file(drawn, folder / file, {"format": "pt"})
    index = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {}, "weight_map": index}  # transformers reads both
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main()
