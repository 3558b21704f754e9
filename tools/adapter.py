"""Adapter files: PEFT's two, with fused projections split into their parts, and a model card.

    save_adapter(model, "runs/x/adapter")    adapter_config.json, adapter_model.safetensors, and
                                             README.md
    load_adapter(model, "runs/x/adapter")    ours, or one that PEFT wrote

PEFT's LoRA has many options. An adapter may scale by a factor of each layer (alpha_pattern), act on
some tokens only (aLoRA), need more tensors (DoRA, modules_to_save), or belong to a base whose
weights were changed when it was created (PiSSA, OLoRA, …). load_adapter refuses these by name,
because they would load without an error but compute something else. It also refuses settings that
it does not know. An rsLoRA loads with its α times √r. In an adapter of some projections the others
get lora_A = lora_B = 0: they have no gradient then, so that they stay as they are, as in PEFT.

Needs: torch, safetensors; lora.py; tools/metadata.py.
"""

import hashlib
import json
import os
import re
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import lora
from tools.metadata import read_object

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's two files
CARD = "README.md"  # which the hub shows, and PEFT does not read
PREFIX = "base_model.model.model."  # how every tensor name in PEFT's files begins
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# a name of ours, and the one on the hub, which PEFT needs
ON_THE_HUB = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
# Settings of any value: they say where an adapter is from, how it was initialized and trained, or
# which projections it has, which its tensors say, too. A setting that neither this file names nor
# check_settings reads must be absent or empty: it may be one of a later PEFT.
HARMLESS = set(
    "auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config "
    "exclude_modules inference_mode loftq_config lora_dropout megatron_core peft_version "
    "qalora_group_size revision runtime_config target_modules".split()
)
# Settings that must have this value; bias and task_type may be empty.
PLAIN = dict(bias="none", peft_type="LORA", task_type="CAUSAL_LM")
# values of PEFT's init_lora_weights that initialize lora_A and lora_B without changing the base
HARMLESS_STARTS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """→ {PEFT's tensor name: fp32 view of the rows of lora_A or lora_B of one projection}.

    A write to a view changes the parameter. Shapes are (r, K) and (rows of the projection, r).
    """
    tensors = {}
    for name, layer in lora.lora_layers(model).items():
        parent, _, module = name.rpartition(".")
        projections = FUSED[module] if len(layer.splits) > 1 else (module,)
        A = layer.lora_A.data.split(layer.rank)
        B = layer.lora_B.data.split(layer.splits)
        for projection, a, b in zip(projections, A, B, strict=True):
            tensors[f"{PREFIX}{parent}.{projection}.lora_A.weight"] = a
            tensors[f"{PREFIX}{parent}.{projection}.lora_B.weight"] = b
    return tensors


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    base_name: str | Path = "",
    card: str = "A LoRA adapter\n",
):
    """Write PEFT's two files and a model card into folder, each whole or, if the save is
    interrupted, not at all.

    base_name: the base model, a name on the hub or a path, for PEFT to find it; or a key of
    ON_THE_HUB, of which save_adapter writes the name on the hub.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.contiguous().cpu() for k, v in adapter_tensors(model).items()}
    layer = _first_layer(model)
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(ON_THE_HUB.get(base_name, base_name)),
        r=layer.rank,
        lora_alpha=int(layer.alpha) if layer.alpha == int(layer.alpha) else layer.alpha,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
        target_modules=sorted({k.split(".")[-3] for k in tensors}),
    )
    save_file(tensors, folder / f"{TENSORS}.tmp", {"format": "pt"})
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(config, indent=2) + "\n")
    (folder / f"{CARD}.tmp").write_text(card)
    for file in (TENSORS, CONFIG, CARD):
        temporary = folder / f"{file}.tmp"
        # The bytes must be on the disk before the name is: after a power failure a renamed file may
        # be empty otherwise.
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, folder / file)


def save_file(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str]):
    """safetensors' save_file, but with the permissions of other files, by the umask: safetensors
    from 0.8 on lets nobody but the owner read, not even the server of another user.
    """
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)


def read_settings(folder: str | Path) -> dict:
    """→ the settings of PEFT's adapter_config.json, those of an rsLoRA as plain LoRA's.

    ValueError: that file or the tensors' file is missing, the settings are damaged, or one of them
    has a value that it cannot have.
    """
    folder = Path(folder)
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            remedy = "name the folder of a PEFT LoRA adapter"
            if (folder / "adapter_model.bin").is_file():
                remedy = "save adapter_model.bin, which may hold code, as safetensors"
            raise ValueError(f"{folder} holds no {file}: {remedy}")
    try:
        settings = read_object(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} cannot be read, fetch it again: {error}") from error
    r, alpha, rslora = (settings.get(key) for key in ("r", "lora_alpha", "use_rslora"))
    possible = dict(
        r=r is None or type(r) is int and 1 <= r < 1e9,
        lora_alpha=alpha is None or type(alpha) in (int, float) and 0 < alpha < 1e9,  # no NaN
        use_rslora=rslora in (None, False) or rslora is True and bool(r and alpha),
        target_modules=isinstance(settings.get("target_modules"), (str, list, type(None))),
    )
    for key, fits in possible.items():
        if not fits:
            found = f"{key}={settings.get(key)!r:.99}"
            raise ValueError(f"{folder / CONFIG} has {found}: save the adapter again")
    if rslora:  # it scales by α/√r, which is α√r/r
        settings |= dict(use_rslora=False, lora_alpha=alpha * r**0.5)
    return settings


def read_adapter(folder: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """→ PEFT's two files: the settings, and {tensor name: tensor}.

    ValueError: a file is missing or damaged.
    """
    settings = read_settings(folder)
    file = Path(folder) / TENSORS
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete: fetch it again") from error
    if not tensors:
        raise ValueError(f"{file} holds no tensor: fetch it again")
    return settings, tensors


def fingerprint(folder: str) -> dict[str, str]:
    """→ {"adapter": SHA-256 of its tensors' file}, empty if there is none, as for the folder ""."""
    file = Path(folder, TENSORS)
    if not folder or not file.is_file():
        return {}
    return {"adapter": hashlib.sha256(file.read_bytes()).hexdigest()}


def check_adapter(folder: str | Path, rank: int, alpha: float) -> None:
    """What can be refused before a model loads. ValueError: the folder holds no plain LoRA of this
    rank and alpha.
    """
    check_settings(read_settings(folder), Path(folder) / CONFIG, r=rank, lora_alpha=alpha)


def load_adapter(model: nn.Module, folder: str | Path):
    """Copy an adapter that save_adapter or PEFT wrote into the parameters, and refresh the copies.

    ValueError: the folder holds no adapter, a damaged one, another kind, rank or alpha, other
    tensors, or a NaN or infinite value. A refused adapter changes nothing.
    """
    config, stored = read_adapter(folder)
    layer = _first_layer(model)
    check_settings(config, Path(folder) / CONFIG, r=layer.rank, lora_alpha=layer.alpha)
    copy_tensors(stored, adapter_tensors(model), folder, config.get("target_modules"))
    lora.refresh(model)


def other_base(folder: str | Path, name: str) -> str:
    """→ the base model that an adapter names, if it is another than `name`; else "". Only the last
    part of each name counts, because a folder and an id of the hub may hold the same model.
    """
    config = read_settings(folder)
    base = str(config.get("base_model_name_or_path") or name)
    return "" if _own_name(base) == _own_name(name) else base


def _own_name(model):
    """→ the last part of a model's name in lower case: qwen2.5-7b of Qwen/Qwen2.5-7B, of
    …/models--Qwen--Qwen2.5-7B/snapshots/… (the hub's cache) and of …/qwen2.5-7b-q4_k_m.gguf.
    """
    name = ON_THE_HUB.get(model, model).lower()
    name = re.sub(r"/snapshots/.*|/+$|[-.](i?q|b?f)[0-9]\w*\.gguf$", "", name)
    return re.split("/|--", name)[-1]


def _first_layer(model):
    """All layers have one rank and one alpha."""
    return next(iter(lora.lora_layers(model).values()))


def check_settings(config, file, r=None, lora_alpha=None):
    """ValueError: the adapter is no plain LoRA, or of another rank or alpha than those given.
    config: the settings in `file`, as read_settings returns them.
    """
    for key, takes in PLAIN.items():
        value = config.get(key)
        if value != takes and (value or key == "peft_type"):
            raise ValueError(f"{file} has {key}={value!r:.99}; this model takes {takes}")
    read = {"r", "lora_alpha", "init_lora_weights", *PLAIN}
    for key in sorted(config.keys() - HARMLESS - read):
        if config[key]:
            raise ValueError(f"{file} has {key}={config[key]!r:.99}; this model takes none")
    # True (PEFT's default), False and None leave the base as it is. A name is another way to
    # initialize, and only those in HARMLESS_STARTS are known to leave the base as it is.
    start = config.get("init_lora_weights")
    if start not in HARMLESS_STARTS:
        raise ValueError(
            f"{file} has init_lora_weights={start!r}, which changes "
            "the base too: PEFT converts most of these as it saves them, see its "
            "path_initial_model_for_weight_conversion"
        )
    for key, takes in dict(r=r, lora_alpha=lora_alpha).items():
        value = config.get(key)
        if value is None or takes not in (None, value):
            takes = "a number" if takes is None else takes
            raise ValueError(f"{file} has {key}={value!r}, this model takes {takes}")


def copy_tensors(stored, own, folder, targets=None):
    """Copy the tensors of an adapter's file into those of a model, by name; 0 into those of a
    projection that has none and is no target. targets: names of projections, None: all of them.

    ValueError: they are not finite, or have other names or shapes; then nothing is copied.
    """
    for name, tensor in stored.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{folder}: {name} is {tensor.dtype}, no floating point: take another adapter"
            )
        if not tensor.float().isfinite().all():  # float(): fp8 has no isfinite
            raise ValueError(
                f"{folder}: {name} has NaN or infinite values: take an earlier adapter"
            )
    has = {name: tuple(t.shape) for name, t in stored.items()}
    takes = {
        name: tuple(t.shape)
        for name, t in own.items()
        # without targets any name is in itself
        if name in stored or name.split(".")[-3] in (targets or name)
    }
    odd = sorted({name for name, _ in has.items() ^ takes.items()})
    if odd:
        name, *_ = odd
        raise ValueError(
            f"{folder}: {len(odd)} tensors do not fit the model's layers; {name} is "
            f"{has.get(name, 'missing')}, the model has {takes.get(name, 'no such tensor')}"
        )
    for name, tensor in own.items():
        tensor.copy_(stored.get(name, torch.zeros(())))
