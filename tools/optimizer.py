"""AdamW for the adapter, and the schedule of its learning rate. Needs: torch."""

import math

import torch


def adamw(config, model):
    """→ AdamW over LoRA's fp32 parameters, the only ones of the model. On a GPU one kernel updates
    all of them (fused).
    """
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(0.9, 0.99),
        weight_decay=config.weight_decay,
        fused=model.device.type == "cuda",
    )


def learning_rate(config, step):
    """→ the learning rate of a step, counted from 0: --lr · warm-up · --schedule.

    warm-up: rises linearly over the first --warmup steps. schedule, with u = step / --steps:
    constant 1; linear 1 − u; cosine (1 + cos πu) / 2.
    """
    u = step / config.steps
    warm = min(1.0, (step + 1) / (config.warmup + 1))
    if config.schedule == "linear":
        share = 1 - u
    elif config.schedule == "cosine":
        share = (1 + math.cos(math.pi * u)) / 2
    else:
        share = 1.0
    return config.lr * warm * share
