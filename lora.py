"""LoRA: the weight matrix stays frozen, and a product of two thin matrices beside it is trained.

    y = x @ W.T + (alpha / rank) · (x @ lora_A.T) @ lora_B.T  W (N, K), lora_A (r, K), lora_B (N, r)

LoRA (arXiv 2106.09685, §4.1) as in QeRL (arXiv 2510.11696, §2): on all seven projections of a
block. Training never merges B·A into W, because rounding the sum to 4 bits would lose B·A. Only
tools/export.py merges, into weights that it writes in bf16. lora_B starts at 0: the first policy is
the base's.

S projections with the same input run as one matrix, and so do their adapters:

    W   [ q ]  N    lora_A  [ A_q ]  S·r  lora_B  [ B_q ]  N     row block s of lora_B multiplies
        [ k ]               [ A_k ]               [ B_k ]        row block s of lora_A: this equals
        [ v ]   x K         [ A_v ]   x K         [ B_v ]   x r  three separate adapters

S is 3 for q, k, v, 2 for gate and up, and 1 for a projection that runs alone. The row blocks of
lora_B have as many rows as the projections (the `splits`), those of lora_A have r rows each.

The parameters are fp32, because a step of the optimizer is often smaller than a bf16's last bit.
refresh() rounds them into copies of the compute dtype: bf16 on a GPU, fp32 on a CPU. A base that
fuses LoRA into its GEMM multiplies by the copies. With any other base, forward() itself rounds the
parameters to the dtype of x.

Adapter files are PEFT's, with fused projections split into their parts. load_adapter trusts that
the adapter is a plain LoRA. tools/adapter.py first refuses PEFT's other kinds.
Left out: dropout, bias, DoRA, rsLoRA, several adapters at once. Needs: torch, safetensors.
"""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PREFIX = "base_model.model.model."  # how every tensor name in PEFT's files begins
# a name of ours, and the one on the hub, which PEFT needs
ON_THE_HUB = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's two files


class Adapter(NamedTuple):
    """What a base that fuses LoRA needs to add an adapter to its output."""

    A: torch.Tensor  # (S·r, K), lora_A rounded to the compute dtype
    B: torch.Tensor  # (N, r), lora_B rounded to the compute dtype
    splits: tuple  # S integers, N in all: the rows of W and B of each projection
    scale: float  # alpha / r
    lora_A: torch.Tensor = None  # the fp32 parameters, which receive the gradients of A and B; if
    lora_B: torch.Tensor = None  # both are None, A and B themselves receive them


class LoRALinear(nn.Module):
    """A frozen base and its adapter: x (…, K) → (…, N) in the dtype of x.

    base: a module with in_features (K), out_features (N) and forward(x). A base whose attribute
    fuses_lora is True adds the adapter itself. LoRALinear calls such a base in two more ways:
        base(x, adapter, compute_output)    in forward(): an Adapter and forward's own argument
        base.adapt(copy_B, splits)          in refresh(), after it has rewritten the copies
    While `enabled` is False, forward() calls base(x) of every base.

    rank, alpha: r and the numerator of scale = alpha / r. splits: the rows of each fused part, N in
    all; None: one part. dtype: of the copies. device: of the parameters and the copies. generator:
    of the random lora_A, on the CPU.

    ValueError: rank < 1. AssertionError: the splits do not add up to N.
    """

    def __init__(
        self, base, rank, alpha, splits=None, dtype=torch.float32, device=None, generator=None
    ):
        super().__init__()
        if rank < 1:
            raise ValueError(f"LoRA rank {rank} must be at least 1")
        N, K = base.out_features, base.in_features
        self.base = base
        self.rank = rank
        self.alpha = alpha
        self.scale = alpha / rank
        self.splits = tuple(splits or (N,))
        assert sum(self.splits) == N, (
            f"splits {self.splits} do not add up to the {N} rows of the base"
        )
        # U(−1/√K, 1/√K), as in torch's Linear and in PEFT. Draw on the CPU, because then the same
        # seed gives the same lora_A on every device.
        bound = K**-0.5
        lora_A = torch.empty(len(self.splits) * rank, K)
        lora_A.uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(lora_A.to(device))
        self.lora_B = nn.Parameter(torch.zeros(N, rank, device=device))
        # Buffers, so that .to(device) moves them. Not persistent, because refresh() computes their
        # values from the parameters.
        for name, parameter in (("copy_A", self.lora_A), ("copy_B", self.lora_B)):
            self.register_buffer(name, torch.empty_like(parameter, dtype=dtype), persistent=False)
        self.enabled = True
        self.refresh()

    def refresh(self):
        """Round the parameters into the copies, in place.

        A captured CUDA graph reads the addresses that it was captured with. New copies at other
        addresses would leave it with the old adapter.
        """
        with torch.no_grad():
            self.copy_A.copy_(self.lora_A)
            self.copy_B.copy_(self.lora_B)
            if self._base_fuses():
                self.base.adapt(self.copy_B, self.splits)

    def forward(self, x, compute_output=True):
        """x (…, K) → (…, N).

        compute_output=False: nothing reads the result, only its gradient is needed (a forward that
        gradient checkpointing repeats). A base that fuses LoRA may then skip x @ W.T.
        """
        if not self.enabled:
            return self.base(x)
        if self._base_fuses():
            adapter = Adapter(
                self.copy_A, self.copy_B, self.splits, self.scale, self.lora_A, self.lora_B
            )
            return self.base(x, adapter, compute_output)
        xa = (x @ self.lora_A.to(x.dtype).T).split(self.rank, -1)  # S times (…, r)
        parts = zip(xa, self.lora_B.to(x.dtype).split(self.splits), strict=True)
        return self.base(x) + self.scale * torch.cat([h @ B.T for h, B in parts], -1)

    def _base_fuses(self):
        return getattr(self.base, "fuses_lora", False)


def lora_layers(model):
    """→ {name: LoRALinear}, in the model's order.

    ValueError: there is none, so nothing would learn.
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


# --- adapter files


def adapter_tensors(model):
    """→ {PEFT's tensor name: fp32 view of the rows of lora_A or lora_B of one projection}.

    A write to a view changes the parameter. Shapes are (r, K) and (rows of the projection, r).
    """
    tensors = {}
    for name, layer in lora_layers(model).items():
        parent, _, module = name.rpartition(".")
        projections = FUSED[module] if len(layer.splits) > 1 else (module,)
        A = layer.lora_A.data.split(layer.rank)
        B = layer.lora_B.data.split(layer.splits)
        for projection, a, b in zip(projections, A, B, strict=True):
            tensors[f"{PREFIX}{parent}.{projection}.lora_A.weight"] = a
            tensors[f"{PREFIX}{parent}.{projection}.lora_B.weight"] = b
    return tensors


def save_adapter(model, folder, base_name=""):
    """Write PEFT's two files into folder, each whole or, if the save is interrupted, not at all.

    base_name: the base model, a name on the hub or a path, for PEFT to find it; or a key of
    ON_THE_HUB, of which save_adapter writes the name on the hub.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.contiguous().cpu() for k, v in adapter_tensors(model).items()}
    layer = next(iter(lora_layers(model).values()))
    base_name = ON_THE_HUB.get(base_name, base_name)
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
    save_file(tensors, folder / f"{TENSORS}.tmp", metadata={"format": "pt"})
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(config, indent=2) + "\n")
    for file in (TENSORS, CONFIG):
        temporary = folder / f"{file}.tmp"
        # The bytes must be on the disk before the name is: after a power failure a renamed file may
        # be empty otherwise.
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, folder / file)


def read_adapter(folder):
    """→ PEFT's two files: the settings (a dict) and {tensor name: tensor}.

    ValueError: a file is missing or damaged.
    """
    folder = Path(folder)
    for file in (CONFIG, TENSORS):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} holds no {file}: name the folder of a PEFT LoRA adapter")
    try:
        config = json.loads((folder / CONFIG).read_text())
        if not isinstance(config, dict):
            raise ValueError(f"{type(config).__name__!r} in the place of its settings")
        return config, load_file(folder / TENSORS)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{folder} holds a damaged adapter: {error}") from error


def load_adapter(model, folder):
    """Copy a plain LoRA adapter from PEFT's files into the parameters, and refresh the copies.

    ValueError: a file is missing or damaged, or rank, alpha, tensor names or shapes differ from the
    model's. A refused adapter changes nothing.
    """
    config, stored = read_adapter(folder)
    layer = next(iter(lora_layers(model).values()))
    for key, value in {"r": layer.rank, "lora_alpha": layer.alpha}.items():
        if config.get(key) != value:
            raise ValueError(
                f"{folder}/{CONFIG} has {key}={config.get(key)!r}, this model takes {value}"
            )
    own = adapter_tensors(model)
    has = {name: tuple(t.shape) for name, t in stored.items()}
    takes = {name: tuple(t.shape) for name, t in own.items()}
    odd = sorted({name for name, _ in has.items() ^ takes.items()})
    if odd:
        raise ValueError(
            f"{folder}: {len(odd)} tensors do not fit the model's layers; {odd[0]} is "
            f"{has.get(odd[0], 'missing')}, "
            f"the model has {takes.get(odd[0], 'no such tensor')}"
        )
    for name, tensor in stored.items():
        own[name].copy_(tensor)
    refresh(model)


if __name__ == "__main__":
    torch.manual_seed(0)
    base = nn.Linear(64, 96, bias=False).requires_grad_(False)
    layer = LoRALinear(base, rank=4, alpha=4)
    x = torch.randn(5, 64)
    print(f"lora_B = 0: differs from the base by {(layer(x) - base(x)).abs().max():.1e}")
    layer.lora_B.data.normal_()
    merged = base.weight + layer.scale * layer.lora_B @ layer.lora_A
    print(f"lora_B ≠ 0: differs from the base by {(layer(x) - base(x)).abs().max():.2f},")
    print(f"            from x @ (W + scale·B·A).T by {(layer(x) - x @ merged.T).abs().max():.1e}")
