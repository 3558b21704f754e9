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
again, compares logits and renames it to DST, if they do not differ. All of this runs on the CPU, in
fp32, and holds one layer and one file of at most 1 GB at a time.

Needs: torch, tqdm, transformers; model.py, nvfp4.py, ops/attention.py, tools/weights.py,
tools/{adapter,ends,flags,metadata}.py.
"""

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import GenerationConfig

import model
import nvfp4
from ops.attention import Packed
from tools import weights
from tools.adapter import (
    CONFIG,
    TENSORS,
    check_settings,
    copy_tensors,
    read_adapter,
    save_file,
)
from tools.ends import exit_on_signals, one_sentence
from tools.flags import QUANT
from tools.metadata import read_object

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
NO_ADAPTER = {"r": 1, "lora_alpha": 1}
SHARD = 1e9  # most bytes of a file of weights
ROWS = 128  # of a matrix, which are decoded at a time
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
    format, a file cannot be read or written, or the deviation exceeds the TOLERANCE. OSError: the
    folder around `destination` cannot be made or written.
    """
    with new_folder(Path(destination)) as new:
        name, quant, adapter = resolve(source, format, adapter, quant)
        base = LayerByLayer(name, quant, adapter)
        if format == "bf16" and not quant and not base.source.packed:
            print(f"note: {name} is rounded to 4 bits first; --quant bf16 copies it")
        # On a full disk safetensors raises an error that names no file: readable() adds the name.
        with weights.readable(destination, "cannot be written"):
            copy_tokenizer(base.source, new)
            write_tensors(base.tensors(format), new)
            expected = base.logits()
            write_config(base.source, new, format)
            # From here on, quant and adapter are those of what is written.
            if format == "bf16":
                quant, adapter = "bf16", ""  # tensors() merges the adapter
            elif adapter:
                adapter = copy_adapter(adapter, new / "adapter", Path(destination).resolve())
        again = LayerByLayer(new, quant, adapter)
        for _ in again.layers():
            pass
        deviation = ((again.logits() - expected).norm() / expected.norm()).item()
        if not deviation <= TOLERANCE[format]:  # also if it is NaN
            raise ValueError(
                f"{destination} was not made: the logits of what was written are off by "
                f"{deviation:.1e} of their size, more than {TOLERANCE[format]:.1e}: export again"
            )
    return deviation


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Context manager: yield a folder to write into, which at the end is renamed to `place`. If
    `place` exists, perhaps as a mount point, "." or a symlink, what was written moves into it.
    After an error or Ctrl-C `place` is as it was.

    ValueError: `place` exists and is not an empty folder. OSError: the folder around it cannot be
    made or written.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ValueError(f"{place} exists and is not an empty folder: name a new one")
    place = place.resolve()  # where a symlink leads
    place.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk as `place`, so that a rename moves it. Python removes the temporary folder.
    around = place if place.exists() else place.parent
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=around) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        if around == place:
            # config.json last: without it nobody takes the folder for a model
            for file in sorted(new.iterdir(), key=lambda file: file.name == "config.json"):
                os.replace(file, place / file.name)
        else:
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
        with weights.readable(config_file):
            config = read_object(config_file)
        if weights.are_flags(config):
            base, base_quant = config.get("model"), config["quant"]
            if not isinstance(base, str) or base_quant not in QUANT:
                raise ValueError(
                    f"{config_file} has model={base!r:.99}, quant={base_quant!r:.99}, which no run "
                    "writes: restore that file, or name the base instead of "
                    f"{run}, with --adapter {run / 'adapter'}"
                )
            if not adapter and not (run / "adapter").is_dir():
                raise ValueError(
                    f"{run} has no adapter: train on with python train.py --resume {run}"
                )
            source = base
            adapter = adapter or run / "adapter"
            if Path(source).is_absolute() and not Path(source).exists():
                raise ValueError(
                    f"{source}, the base of {run}, has moved: name its new place instead of {run}, "
                    f"with --adapter {adapter}"
                )
            quant = quant or base_quant
    if format in LAYOUTS and quant == "bf16":
        raise ValueError("--quant bf16 has no 4 bits to write: take --format bf16 or --quant nvfp4")
    return source, quant, adapter


# --- a model, one layer at a time


class LayerByLayer(model.Builder):
    """A model on the CPU, of which one layer at a time is in memory. layers() runs one fixed text
    of 32 tokens through it; logits() are then the text's, by which two models are compared.

    made: {name: (tensor or NVFP4Tensor (N, K), A, (alpha/r) B)} of the present layer's projections.

    name: as weights.open takes it. adapter: a folder, or "". ValueError: one of them is refused.
    """

    def __init__(self, name: str | Path, quant: str, adapter: str | Path):
        settings, self.adapter, self.folder = NO_ADAPTER, {}, adapter
        # Open the base last: it may be a download, for which a missing adapter should not wait.
        if adapter:
            settings, self.adapter = read_adapter(adapter)
            check_settings(settings, Path(adapter) / CONFIG)
            self.targets = settings.get("target_modules")
        rank, alpha = settings["r"], settings["lora_alpha"]
        cpu = torch.device("cpu")
        super().__init__(weights.open(name), quant or "nvfp4", rank, alpha, cpu, seed=0)

    def linear(self, names: dict[str, int], K: int, biased: bool = False) -> Callable:
        """→ projections that run as one matrix, x (n, K) → (n, N). They stay as they are stored or
        quantised, in self.made.
        """
        parts, bias = self.source.parts(names, K, biased, self.quant, self.device)
        for (name, N), weight in zip(names.items(), parts, strict=True):
            self.made[name] = weight, *self.low_rank(name, N, K)

        def forward(x, compute_output=True):
            y = torch.cat([x @ w.T for name in names for w in self.rows(name)], 1)
            return y if bias is None else y + bias

        return forward

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """Yield W + (alpha/rank) B A of a projection in fp32, ROWS rows at a time."""
        weight, A, B = self.made[name]
        if torch.is_tensor(weight):
            parts = map(torch.Tensor.float, weight.split(ROWS))
        else:
            codes, scales, factor = weight
            pairs = zip(codes.split(ROWS), scales.split(ROWS), strict=True)
            some = (nvfp4.NVFP4Tensor(*pair, factor) for pair in pairs)
            parts = (nvfp4.dequantize(q, torch.float32) for q in some)
        for w, b in zip(parts, B.split(ROWS), strict=True):
            yield w + b @ A

    def low_rank(self, name: str, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
        """→ A (r, K) and (alpha/r) B (N, r) of a projection, 0 without an adapter."""
        A, B = torch.zeros(self.rank, K), torch.zeros(N, self.rank)
        if self.folder:
            at = f"base_model.model.{name}"
            own = {f"{at}.lora_A.weight": A, f"{at}.lora_B.weight": B}
            stored = {key: self.adapter.pop(key) for key in own.keys() & self.adapter}
            copy_tensors(stored, own, self.folder, self.targets)
        return A, self.alpha / self.rank * B

    def layers(self) -> Iterator[None]:
        """Build each layer, run the text through it, and yield, while self.made has its weights."""
        attend = Packed([(32, [])], self.device)
        ids = (attend.positions + 1) * 7919 % self.config.vocab_size  # a prime spreads them over V
        cos, sin = model.rotary(attend.positions, *model.rope_frequencies(self.config))
        attend = partial(attend, cos=cos, sin=sin)
        self.stream = self.embeddings()[ids].float(), None
        for i in tqdm(range(self.config.num_hidden_layers), leave=False, disable=None):
            self.made = {}
            self.stream = model.Block(self, i)(*self.stream, attend)
            yield
        copy_tensors(self.adapter, {}, self.folder)  # refuses those that are left

    def embeddings(self) -> torch.Tensor:
        """→ (V, D) in the stored dtype."""
        shape = self.config.vocab_size, self.config.hidden_size
        return self.source.tensor("model.embed_tokens.weight", shape)

    def logits(self) -> torch.Tensor:
        """→ (32, V) f32, after layers()."""
        _, hidden = self.norm("model.norm", self.config.hidden_size)(*self.stream)
        head = self.source.lm_head(self.embeddings(), self.device)
        self.source.finish()
        return torch.cat([hidden @ rows.float().T for rows in head.split(ROWS)], 1)

    def tensors(self, format: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor of the model in a format, with its name.

        The projections are those of layers(), because loading may have quantised them. All other
        tensors are the source's, in the dtype that source.read() returns (fp32 for a GGUF), or in
        bf16 for the format bf16.
        """
        for name in weights.tensor_names(self.config):
            if name in self.source.names and not name.endswith("_proj.weight"):
                tensor = self.source.read(name)
                yield name, tensor.bfloat16() if format == "bf16" else tensor
        for _ in self.layers():
            for name in [*self.made]:
                if format == "bf16":  # merged: the sum is rounded once
                    weight = torch.cat([rows.bfloat16() for rows in self.rows(name)])
                else:
                    weight, *_ = self.made[name]
                del self.made[name]
                yield from packed(name, weight, format)


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
            if re.match(TOKENIZER_FILES, file.name) and file.is_file():
                shutil.copyfile(file, folder / file.name)
    file = folder / "tokenizer_config.json"
    if file.is_file():
        # transformers 4 has no class TokenizersBackend, and takes no list as extra_special_tokens;
        # 4 and 5 both know the older names
        text = file.read_bytes().replace(b"TokenizersBackend", b"PreTrainedTokenizerFast")
        text = text.replace(b'"extra_special_tokens": [', b'"additional_special_tokens": [')
        file.write_bytes(text.replace(b'"auto_map"', b'"_auto_map"'))


def write_config(source: weights.Source, folder: Path, format: str) -> None:
    """Write config.json, and for modelopt hf_quant_config.json.

    source: the base. Its config is changed in place. A quantization_config of the base is removed,
    because it describes the base's layout, and so is an auto_map, which names code that does not
    travel. The 4-bit formats get a quantization_config of their own.
    """
    config = source.config
    config.dtype = torch.bfloat16
    for key in ("quantization_config", "auto_map"):
        config.__dict__.pop(key, None)
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


def copy_adapter(folder: str | Path, new: Path, base: Path) -> Path:
    """Copy an adapter's files into the folder `new`, which it returns. base: the model it names."""
    new.mkdir()
    shutil.copyfile(Path(folder) / TENSORS, new / TENSORS)
    settings = read_object(Path(folder) / CONFIG) | {"base_model_name_or_path": str(base)}
    (new / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    return new


def write_tensors(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write named tensors as model.safetensors or, if they are large, as several numbered files and
    their index. A file has at most SHARD bytes, unless one tensor has more.
    """
    shard, size, places = {}, 0, {}

    def write():
        file = folder / f"model-{len({*places.values()}) + 1:05}.safetensors"
        save_file(shard, file, {"format": "pt"})
        places.update(dict.fromkeys(shard, file.name))
        shard.clear()  # before the next one is filled

    for name, tensor in tensors:
        size += tensor.nbytes
        if shard and size > SHARD:
            write()
            size = tensor.nbytes
        shard[name] = tensor
    write()
    if len({*places.values()}) == 1:
        os.replace(folder / places[name], folder / "model.safetensors")
    else:
        text = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)


def packed(
    name: str, weight: torch.Tensor | nvfp4.NVFP4Tensor, format: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a projection with their names, by the format's layout.

    Codes are (N, K/2) uint8, block scales (N, K/16) float8_e4m3fn. The global scale is fp32.
    Readers of ModelOpt's layout multiply by it, as we do: shape (). Those of compressed-tensors'
    divide, so the stored number is its inverse: shape (1,). A projection that the base leaves in 16
    bits is written as it is.
    """
    if torch.is_tensor(weight):
        yield f"{name}.weight", weight
        return
    modelopt = format == "modelopt"
    codes, block_scale, scale = weight
    yield f"{name}.weight" if modelopt else f"{name}.weight_packed", codes
    yield f"{name}.weight_scale", block_scale
    if modelopt:
        yield f"{name}.weight_scale_2", scale
    else:
        yield f"{name}.weight_global_scale", 1 / scale.view(1)


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
    exit_on_signals()
    with one_sentence("export.py"):
        deviation = export(**vars(flags))
        print(
            f"done: {flags.destination}, whose logits are the model's "
            f"but for {deviation:.1e} of their size"
        )
