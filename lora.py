"""LoRA: the weight matrix stays frozen, and a product of two thin matrices beside it is trained.

    y = x @ W.T + (alpha / rank) · (x @ lora_A.T) @ lora_B.T  W (N, K), lora_A (r, K), lora_B (N, r)

LoRA (arXiv 2106.09685, §4.1) as in QeRL (arXiv 2510.11696, §2): on all seven projections of a
block, never merged, because rounding W + B·A to 4 bits would lose B·A. lora_B starts at 0: the
first policy is the base's.

S projections with the same input run as one matrix, and so do their adapters:

    W   [ q ]  N    lora_A  [ A_q ]  S·r  lora_B  [ B_q ]  N     row block s of lora_B multiplies
        [ k ]               [ A_k ]               [ B_k ]        row block s of lora_A: this equals
        [ v ]   x K         [ A_v ]   x K         [ B_v ]   x r  three separate adapters

The parameters are fp32. refresh() rounds them in place into copies of the compute type (bf16 on a
GPU). A base that fuses LoRA into its GEMM reads the copies; for any other base forward() rounds the
parameters anew.

Adapter files are PEFT's, with fused projections split into their parts.
Left out: dropout, bias, DoRA, rsLoRA, several adapters at once. Needs: torch, safetensors.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PREFIX = "base_model.model.model."  # how every tensor name in PEFT's files begins


class LoRALinear(nn.Module):
    """A frozen base and its adapter: x (…, K) → (…, N) in the dtype of x.

    base: a module with in_features, out_features and forward(x). If base.fuses_lora is True, the
    base adds the adapter: base(x, (copy_A, copy_B, splits, scale), (lora_A, lora_B), needed)
    multiplies by the rounded copies and passes gradients to the fp32 parameters. refresh() writes
    the copies, then calls base.adapt(copy_B, splits). splits: the rows of each fused part, N in
    all. ValueError: rank < 1.
    """

    def __init__(
        self, base, rank, alpha, splits=None, dtype=torch.float32, device=None, generator=None
    ):
        super().__init__()
        if rank < 1:
            raise ValueError(f"LoRA rank {rank} must be at least 1")
        N, K = base.out_features, base.in_features
        self.base, self.rank, self.alpha, self.scale = base, rank, alpha, alpha / rank
        self.splits = tuple(splits or (N,))
        assert sum(self.splits) == N, (
            f"splits {self.splits} do not add up to the {N} rows of the base"
        )
        # U(−1/√K, 1/√K), as in torch's Linear and in PEFT; a draw on the CPU is the same for every
        # device
        lora_A = torch.empty(len(self.splits) * rank, K).uniform_(
            -(K**-0.5), K**-0.5, generator=generator
        )
        self.lora_A = nn.Parameter(lora_A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(N, rank, device=device))
        for name, parameter in (("copy_A", self.lora_A), ("copy_B", self.lora_B)):
            self.register_buffer(name, torch.empty_like(parameter, dtype=dtype), persistent=False)
        self.enabled = True
        self.refresh()

    def refresh(self):
        """Round the parameters into the copies, in place: a captured CUDA graph reads the same
        addresses.
        """
        with torch.no_grad():
            self.copy_A.copy_(self.lora_A)
            self.copy_B.copy_(self.lora_B)
            if getattr(self.base, "fuses_lora", False):
                self.base.adapt(self.copy_B, self.splits)

    def forward(self, x, needed=True):
        """x (…, K) → (…, N). needed=False: only backward will run, so a fusing base may skip
        computing y.
        """
        if not self.enabled:
            return self.base(x)
        if getattr(self.base, "fuses_lora", False):
            copies = (self.copy_A, self.copy_B, self.splits, self.scale)
            return self.base(x, copies, (self.lora_A, self.lora_B), needed)
        low = (x @ self.lora_A.to(x.dtype).T).split(self.rank, -1)  # S times (…, r)
        parts = zip(low, self.lora_B.to(x.dtype).split(self.splits), strict=True)
        return self.base(x) + self.scale * torch.cat([h @ B.T for h, B in parts], -1)


def lora_layers(model):
    """→ {name: LoRALinear}, in the model's order. ValueError: there is none, so nothing would
    learn.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    if not layers:
        raise ValueError("this model has no LoRALinear: nothing would learn")
    return layers


def refresh(model):
    """Round every layer's parameters into its copies: call it after an optimizer step or a load."""
    for layer in lora_layers(model).values():
        layer.refresh()


@contextmanager
def disabled(model):
    """In this context the model is its frozen base alone: the reference policy of a KL term."""
    layers = lora_layers(model).values()
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def adapter_tensors(model):
    """→ {PEFT's tensor name: fp32 view of the rows of lora_A or lora_B that belong to one
    projection}.
    """
    tensors = {}
    for name, layer in lora_layers(model).items():
        parent, _, own = name.rpartition(".")
        parts = FUSED.get(own, (own,)) if len(layer.splits) > 1 else (own,)
        A, B = layer.lora_A.data.split(layer.rank), layer.lora_B.data.split(layer.splits)
        for part, a, b in zip(parts, A, B, strict=True):
            tensors[f"{PREFIX}{parent}.{part}.lora_A.weight"] = a
            tensors[f"{PREFIX}{parent}.{part}.lora_B.weight"] = b
    return tensors


def save_adapter(model, folder, base_name=""):
    """Write PEFT's two files into folder, each whole or, if the save is interrupted, not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.contiguous().cpu() for k, v in adapter_tensors(model).items()}
    layer = next(iter(lora_layers(model).values()))
    # on the hub
    base_name = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}.get(base_name, base_name)
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base_name),
        r=layer.rank,
        lora_alpha=layer.alpha,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
        target_modules=sorted({k.split(".")[-3] for k in tensors}),
    )
    save_file(tensors, folder / "adapter_model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "adapter_config.json.tmp").write_text(json.dumps(config, indent=2) + "\n")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        with open(folder / f"{file}.tmp", "rb") as written:
            os.fsync(written.fileno())
        os.replace(folder / f"{file}.tmp", folder / file)


def load_adapter(model, folder):
    """Copy an adapter that save_adapter or PEFT wrote into the parameters, and refresh the copies.

    ValueError: the folder holds no adapter, a damaged one, another kind, rank or alpha, or other
    tensors.
    """
    folder = Path(folder)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} holds no {file}: name the folder of a PEFT LoRA adapter")
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{type(config).__name__!r} in the place of its settings")
        stored = load_file(folder / "adapter_model.safetensors")
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{folder} holds a damaged adapter: {error}") from error
    layer = next(iter(lora_layers(model).values()))
    wanted = {"peft_type": "LORA", "r": layer.rank, "lora_alpha": layer.alpha}
    refused = (
        "use_dora",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "alora_invocation_tokens",
    )
    for key, value in {**wanted, **dict.fromkeys(refused)}.items():
        if (config.get(key) or None) != value:
            raise ValueError(
                f"{folder / 'adapter_config.json'} has {key}={config.get(key)!r}; "
                f"this model takes {value or 'none'}"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start not in ("gaussian", "orthogonal", "eva", "mica"):
        raise ValueError(
            f"{folder / 'adapter_config.json'} has init_lora_weights={start!r}, which changes "
            "the base too: PEFT converts most of these as it saves them, see its "
            "path_initial_model_for_weight_conversion"
        )
    own = adapter_tensors(model)
    has = {name: tuple(t.shape) for name, t in stored.items()}
    takes = {name: tuple(t.shape) for name, t in own.items()}
    odd = sorted({name for name, _ in has.items() ^ takes.items()})
    if odd:
        raise ValueError(
            f"{folder}: {len(odd)} tensors do not fit the model's layers; {odd[0]} is "
            f"{has.get(odd[0], 'missing')}, the model has {takes.get(odd[0], 'no such tensor')}"
        )
    for name, tensor in stored.items():
        if not tensor.isfinite().all():
            raise ValueError(
                f"{folder}: {name} has NaN or infinite values: take an earlier adapter"
            )
    for name, tensor in stored.items():  # after all checks: a refused adapter changes nothing
        own[name].copy_(tensor)
    refresh(model)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(64, 96, bias=False).requires_grad_(False)
    layer = LoRALinear(base, rank=4, alpha=4, splits=(64, 16, 16), generator=generator)
    x = torch.randn(5, 64, generator=generator)
    print(f"lora_B = 0: differs from the base by {(layer(x) - base(x)).abs().max():.1e}")
    layer.lora_B.data.normal_(generator=generator)
    merged = base.weight + torch.cat(
        [
            layer.scale * b @ a
            for a, b in zip(layer.lora_A.split(4), layer.lora_B.split(layer.splits), strict=True)
        ]
    )
    print(
        f"lora_B ≠ 0: differs from the base by {(layer(x) - base(x)).abs().max():.2f}, "
        f"from x @ (W + scale·B·A).T by {(layer(x) - x @ merged.T).abs().max():.1e}"
    )
    learned = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    print(f"{learned} numbers learn beside {base.weight.numel()} frozen ones")
