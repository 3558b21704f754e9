"""Weights out: a run, or a model as it is, as a folder that other people's tools load.

    python -m tools.export RUN DST --format FORMAT

    FORMAT     weights in DST                               the trained adapter
    bf16       W + (alpha/rank) B A, rounded to bf16        is merged into the weights
    nvfp4      W in 4 bits, in compressed-tensors' layout   is in DST/adapter, in PEFT's files
    modelopt   W in 4 bits, in ModelOpt's layout            is in DST/adapter, in PEFT's files

W are the frozen weights that the adapter was trained on. If they are in NVFP4, the 4-bit formats
write the same codes and scales, and bf16 adds the adapter to the dequantised weights. Embeddings,
lm_head, norms and biases are never in 4 bits, nor is a projection that the base, a checkpoint in
NVFP4, leaves in 16 bits: it is copied, and named in the config. tools/weights.py describes the two
layouts. DST also gets the tokenizer and the generation config. transformers 4 and 5 read RoPE's
numbers from different places, so write_config() writes both. copy_tokenizer() writes the older
names, because transformers 4 cannot read what transformers 5 writes. The adapter alone needs no
export, because RUN/adapter has PEFT's files.

No format merges the adapter into 4 bits, because rounding W + (alpha/rank) B A to 4 bits loses part
of what the adapter learned. To do it all the same, export bf16, then that folder as nvfp4.

An export is checked before it appears. export() writes a temporary folder beside DST, loads it
again, compares logits and renames it to DST, or to DST.wrong if the logits differ. All of this runs
on the CPU, in fp32.

Needs: torch, transformers, safetensors, huggingface_hub; model.py, lora.py, fp4_gemm.py,
ops/attention.py, tools/weights.py, tools/adapter.py.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import torch
from transformers import GenerationConfig

import fp4_gemm
import lora
import model
from ops.attention import Packed
from tools import weights
from tools.adapter import CONFIG, FUSED, load_adapter, save_adapter

# The formats, and how far the logits of what was written may deviate, as a share of their norm.
# bf16 rounds each weight, by at most 2⁻⁸ of itself. The 4-bit formats keep every bit, with one
# exception: the inverse of a foreign checkpoint's global scale is rounded to fp32.
TOLERANCE = {"bf16": 2**-5, "nvfp4": 1e-5, "modelopt": 1e-5}
# What config.json calls the layouts of 4-bit weights. A16 means that activations stay in 16 bits,
# which is how this project runs every checkpoint.
LAYOUTS = {
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
}
# how the names of a tokenizer's files begin, and that of generation_config.json
TOKENIZER_FILES = "(tokenizer|vocab|merges|special_t|added_t|chat_template|generation_c)"


@torch.no_grad()
def export(
    source: str | Path,
    destination: str | Path,
    format: str,
    adapter: str | Path = "",
    quant: str = "",
) -> float:
    """Write the folder `destination`, load it again → how far its logits deviate.

    source: a run's folder, or a model as weights.open takes it. format: a key of TOLERANCE.
    adapter: the folder of PEFT's files; "": the run's, or none. quant: a key of weights.QUANT, by
    which weights that are not in 4 bits yet are loaded; "": the run's, or "nvfp4".

    The deviation is |new − old| / |old|, over the logits of `probe`. After an error `destination`
    is as it was before the call.

    ValueError: `destination` exists and is not an empty folder, there is nothing to write in this
    format, a file cannot be read or written, or the deviation exceeds the TOLERANCE; in the last
    case what was written stays in the folder `destination`.wrong. OSError: the folder around
    `destination` cannot be made or written.
    """
    place = Path(destination)
    with new_folder(place) as new:
        name, quant, adapter = resolve(source, format, adapter, quant)
        decoder, base = load(name, quant, adapter)
        if format == "bf16" and not quant and not base.packed:
            print(f"note: {name} is rounded to 4 bits first; --quant bf16 copies it")
        expected = probe(decoder)
        # On a full disk safetensors raises an error that names no file: readable() adds the name.
        with weights.readable(place, "cannot be written"):
            copy_tokenizer(base, new)
            # From here on, quant and adapter are those of what is written.
            if format == "bf16":
                quant, adapter = "bf16", ""  # write_tensors merges the adapter
            elif adapter:
                adapter = new / "adapter"
                save_adapter(decoder, adapter, place)  # names `place` as its base
            write_config(base, new, format)
            write_tensors(decoder, base, new, format)
        del decoder  # hold one model in memory at a time
        again, _ = load(new, quant, adapter)
        deviation = ((probe(again) - expected).norm() / expected.norm()).item()
        if not deviation <= TOLERANCE[format]:  # also if it is NaN
            wrong = f"{place}.wrong"
            shutil.rmtree(wrong, ignore_errors=True)  # an earlier export may have left one
            os.replace(new, wrong)
            raise ValueError(
                f"{place} was not made: the logits of what was written, now in {wrong}, "
                f"are off by {deviation:.1e} of their size, more than {TOLERANCE[format]:.1e}"
            )
    return deviation


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Context manager: yield a folder to write into, which is renamed to `place` at the end. After
    an error or Ctrl-C `place` is as it was.

    ValueError: `place` exists and is not an empty folder. OSError: the folder around it cannot be
    made or written.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder: name a new one")
    place.parent.mkdir(parents=True, exist_ok=True)
    # beside `place`, so on the same disk: a rename moves it. Python removes the temporary folder.
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        os.replace(new, place)


# --- what is exported


def resolve(
    source: str | Path, format: str, adapter: str | Path, quant: str
) -> tuple[str | Path, str, str | Path]:
    """The arguments of `export` → name of the base model, its quant, folder of its adapter or "".

    If source is a run's folder, the base is the run's, and so are quant and adapter if they are "".
    Else they stay so. ValueError: the run has no adapter yet, its config.json cannot be read, or a
    4-bit format is asked of weights that are not quantised.
    """
    run = Path(source)
    config_file = run / "config.json"
    if config_file.is_file():
        config = read_json(config_file)
        if "quant" in config:  # flags of train.py; a model's config has no such key
            if not adapter and not (run / "adapter").is_dir():
                raise ValueError(
                    f"{run} has no adapter: train on with python train.py --resume {run}"
                )
            source = config["model"]
            adapter = adapter or run / "adapter"
            quant = quant or config["quant"]
    if format in LAYOUTS and quant == "bf16":
        raise ValueError("--quant bf16 has no 4 bits to write: take --format bf16 or --quant nvfp4")
    return source, quant, adapter


def load(name: str | Path, quant: str, adapter: str | Path) -> tuple[model.Decoder, weights.Source]:
    """Load a base model on the CPU, and an adapter unless it is "".

    name: as weights.open takes it. ValueError: the base or the adapter is refused.
    """
    # The decoder must be built with the adapter's rank and alpha. A value of a wrong type becomes
    # 1, and load_adapter then refuses the adapter with a sentence that names the value.
    settings = read_json(Path(adapter) / CONFIG) if adapter else {}
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    rank = rank if type(rank) is int else 1
    alpha = alpha if type(alpha) in (int, float) else 1
    # Open the base only now: it may be a download, for which a missing adapter should not wait.
    source = weights.open(name)
    decoder = model.load(source, quant or "nvfp4", rank, alpha)
    if adapter:
        load_adapter(decoder, adapter)
    return decoder, source


def read_json(path: Path) -> dict:
    """→ the object in a JSON file. ValueError: there is none."""
    with weights.readable(path):
        return {**json.loads(path.read_text())}


def probe(decoder: model.Decoder) -> torch.Tensor:
    """→ logits (32, V) f32 of one fixed text of 32 tokens, by which two models are compared."""
    attend = Packed([(32, [])], torch.device("cpu"))
    ids = (attend.positions + 1) * 7919 % decoder.config.vocab_size  # a prime spreads them over V
    return decoder.logits(decoder(ids, attend.positions, attend))


# --- what is written


def copy_tokenizer(source: weights.Source, folder: Path) -> None:
    """Put the tokenizer, its chat template and the generation config into `folder`. A GGUF has all
    of them inside, and transformers converts them.
    """
    if isinstance(source, weights.GGUF):
        source.tokenizer().save_pretrained(folder)
        GenerationConfig.from_model_config(source.config).save_pretrained(folder)
    else:
        for file in source.path.iterdir():
            if re.match(TOKENIZER_FILES, file.name):
                shutil.copyfile(file, folder / file.name)
    file = folder / "tokenizer_config.json"
    if file.is_file():
        # transformers 4 has no class TokenizersBackend, and takes no list as extra_special_tokens;
        # 4 and 5 both know the older names
        text = file.read_bytes().replace(b"TokenizersBackend", b"PreTrainedTokenizerFast")
        file.write_bytes(
            text.replace(b'"extra_special_tokens": [', b'"additional_special_tokens": [')
        )


def write_config(source: weights.Source, folder: Path, format: str) -> None:
    """Write config.json, and for modelopt hf_quant_config.json.

    source: the base. Its config is changed in place. A quantization_config of the base is removed,
    because it describes the base's layout. The 4-bit formats get one of their own.
    """
    config = source.config
    config.dtype = torch.bfloat16
    config.__dict__.pop("quantization_config", None)
    ignored = ["lm_head"]
    for name in source.names:
        if source.packed and name.endswith("_proj.weight"):
            ignored.append(name.removesuffix(".weight"))
    if format in LAYOUTS:
        config.quantization_config = quantization_config(format, ignored)
    # transformers 4 reads these two, and without them takes a base of 10 000 and no scaling
    scaling = {**config.rope_parameters}
    config.rope_theta = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        config.__dict__["rope_scaling"] = scaling  # transformers 5 has a property of this name
    config.save_pretrained(folder)
    if format == "modelopt":
        # Readers of ModelOpt's checkpoints look for this file. vLLM requires the null in it.
        described = {
            "producer": {"name": "modelopt", "version": "0.44.0"},
            "quantization": {
                "quant_algo": config.quantization_config["quant_algo"],
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ignored,
            },
        }
        (folder / "hf_quant_config.json").write_text(json.dumps(described))


def quantization_config(format: str, ignored: list[str]) -> dict:
    """→ config.json's quantization_config: all Linears are NVFP4 but those that `ignored` names.

    Only weights are quantised: there is no entry for activations, which stay in 16 bits.
    """
    of_weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",  # a scale a tensor, and one a group of 16 along K
        "group_size": 16,
        "dynamic": False,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": of_weights}}
    return LAYOUTS[format] | {"ignore": ignored, "config_groups": groups}


def write_tensors(
    decoder: model.Decoder, source: weights.Source, folder: Path, format: str
) -> None:
    """Write model.safetensors, or several numbered files and their index if it is large.

    The projections are the decoder's, because loading may have quantised them and merging changes
    them. All other tensors are the source's, in the dtype that source.read() returns (fp32 for a
    GGUF), or in bf16 for the format bf16. Each layer's weight is freed as soon as it is copied, so
    that no second copy of all weights exists. The decoder is unusable afterwards.
    """
    tensors = {}
    for name in weights.tensor_names(source.config):
        if name in source.names and not name.endswith("_proj.weight"):
            tensor = source.read(name)
            tensors[name] = tensor.bfloat16() if format == "bf16" else tensor
    for name, layer in lora.lora_layers(decoder).items():
        parent, _, module = name.rpartition(".")
        projections = FUSED.get(module, (module,))  # qkv_proj → q_proj, k_proj, v_proj
        names = [f"model.{parent}.{projection}" for projection in projections]
        parts = merged(layer) if format == "bf16" else packed(layer, format, source, names)
        for projection, part in zip(names, parts, strict=True):
            for end, tensor in part.items():
                # clone: the parts of a fused weight may share one storage, which safetensors
                # refuses to write
                tensors[f"{projection}.{end}"] = tensor.clone()
        layer.base = None  # free the weight
    huggingface_hub.save_torch_state_dict(tensors, folder)


def merged(layer: lora.LoRALinear) -> Iterator[dict[str, torch.Tensor]]:
    """Yield {"weight": W + (alpha/rank) B A} of each projection of a layer, (N_i, K) bf16.

    The sum is computed in fp32 and rounded once.
    """
    W = fp4_gemm.dequantize(layer.base.weight, torch.float32).split(layer.splits)  # (N_i, K) each
    A = layer.lora_A.split(layer.rank)  # (r, K) each
    B = layer.lora_B.split(layer.splits)  # (N_i, r) each
    for w, a, b in zip(W, A, B, strict=True):
        yield {"weight": (w + layer.scale * b @ a).bfloat16()}


def packed(
    layer: lora.LoRALinear, format: str, source: weights.Source, names: list[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield {end of a tensor's name: tensor} of each projection of a layer, by the format's layout.

    names: of these projections, as source.tensor() takes them, without their ".weight".

    Codes are (N_i, K/2) uint8, block scales (N_i, K/16) float8_e4m3fn. The global scale is fp32.
    Readers of ModelOpt's layout multiply by it, as we do: shape (). Those of compressed-tensors'
    divide, so the stored number is its inverse: shape (1,). A projection that the base leaves in 16
    bits is copied.
    """
    if source.packed:
        # Read again what is stored: the decoder dequantises codes beside a projection in 16 bits.
        K = layer.base.in_features
        parts = [
            source.tensor(f"{name}.weight", (N, K))
            for name, N in zip(names, layer.splits, strict=True)
        ]
    else:
        parts = layer.base.weight.parts
    for part in parts:
        if torch.is_tensor(part):
            yield {"weight": part}
            continue
        codes, block_scale, global_scale = part
        if format == "modelopt":
            yield {"weight": codes, "weight_scale": block_scale, "weight_scale_2": global_scale}
        else:
            yield {
                "weight_packed": codes,
                "weight_scale": block_scale,
                "weight_global_scale": 1 / global_scale.view(1),
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="export.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="folder of a run, or a model as train.py's --model takes it")
    parser.add_argument("destination", help="folder to make")
    parser.add_argument("--format", required=True, choices=TOLERANCE)
    parser.add_argument(
        "--adapter", default="", help="folder of a PEFT adapter (default: the run's)"
    )
    parser.add_argument(
        "--quant", default="", help="of the base, as in train.py (default: the run's, nvfp4)"
    )
    flags = parser.parse_args()
    try:
        deviation = export(**vars(flags))
    except (ValueError, OSError) as error:
        parser.exit(2, f"export.py: {error}\n")
    print(
        f"done: {flags.destination}, whose logits are the model's "
        f"but for {deviation:.1e} of their size"
    )
