"""Refuse an adapter of PEFT's that lora.py would load without an error, but wrongly.

    load_adapter(model, "runs/x/adapter")    settings → finite values → lora.load_adapter

PEFT's LoRA has many options. An adapter may scale by another factor (rsLoRA, alpha_pattern), act on
some tokens only (aLoRA), need more tensors (DoRA, modules_to_save), or belong to a base whose
weights were changed when it was created (PiSSA, OLoRA, …). The sentence of each refusal names the
setting.
Needs: torch; lora.py.
"""

import re
from pathlib import Path

import lora

# settings that must be absent or empty
REFUSED = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "alora_invocation_tokens",
)
# values of PEFT's init_lora_weights that initialize lora_A and lora_B without changing the base
HARMLESS_STARTS = ("gaussian", "orthogonal", "eva", "mica")


def load_adapter(model, folder):
    """Copy an adapter that save_adapter or PEFT wrote into the parameters, and refresh the copies.

    ValueError: the folder holds no adapter, a damaged one, another kind, rank or alpha, other
    tensors, or a NaN or infinite value. A refused adapter changes nothing.
    """
    config, tensors = lora.read_adapter(folder)
    _check_settings(config, Path(folder) / lora.CONFIG)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{folder}: {name} has NaN or infinite values: take an earlier adapter"
            )
    lora.load_adapter(model, folder)


def other_base(folder, name):
    """→ the base model that an adapter names, if it is another than `name`; else "". Only the last
    part of each name counts, because a folder and an id of the hub may hold the same model.
    """
    config, _ = lora.read_adapter(folder)
    base = str(config.get("base_model_name_or_path") or name)
    return "" if _own_name(base) == _own_name(name) else base


def _own_name(model):
    """→ the last part of a model's name in lower case: qwen2.5-7b of Qwen/Qwen2.5-7B, of
    …/models--Qwen--Qwen2.5-7B/snapshots/… (the hub's cache) and of …/qwen2.5-7b-q4_k_m.gguf.
    """
    name = lora.ON_THE_HUB.get(model, model).lower()
    name = re.sub(r"/snapshots/.*|/+$|[-.](i?q|b?f)[0-9]\w*\.gguf$", "", name)
    return re.split("/|--", name)[-1]


def _check_settings(config, file):
    """ValueError: the adapter is no plain LoRA. config: the settings in `file`."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{file} has peft_type={kind!r}; this model takes LORA")
    for key in REFUSED:
        value = config.get(key)
        if value:
            raise ValueError(f"{file} has {key}={value!r}; this model takes none")
    # True (PEFT's default), False and None leave the base as it is. A name is another way to
    # initialize, and only those in HARMLESS_STARTS are known to leave the base as it is.
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start not in HARMLESS_STARTS:
        raise ValueError(
            f"{file} has init_lora_weights={start!r}, which changes "
            "the base too: PEFT converts most of these as it saves them, see its "
            "path_initial_model_for_weight_conversion"
        )
