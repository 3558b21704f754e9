"""AdamW for the adapter, and the schedules of its learning rate and of the noise.

Needs: torch; aqn.py.
"""

import math

import torch

import aqn


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
    """→ the learning rate of a step, counted from 0: --lr · a share.

    Each of the first --warmup steps has the share (step + 1) / (--warmup + 1), which stays below 1.
    Then --schedule begins, with u = (step − --warmup) / (--steps − --warmup), which is 0 in the
    first of these steps and stays below 1: constant 1; linear 1 − u; cosine (1 + cos πu) / 2.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    u = (step - config.warmup) / (config.steps - config.warmup)
    share = 1.0
    if config.schedule == "linear":
        share = 1 - u
    elif config.schedule == "cosine":
        share = (1 + math.cos(math.pi * u)) / 2
    return config.lr * share


def noise_level(config, step, adapted):
    """→ σ of AQN's noise in this step, 0 without AQN. adapted: the σ that the step before suggests
    for adaptive noise, 0 if none does.
    """
    if not config.aqn:
        return 0.0
    if config.sigma_schedule == "adaptive":
        return adapted or config.sigma_start
    start, end = config.sigma_start, config.sigma_end
    return aqn.sigma(step, config.steps, start, end, config.sigma_stages, config.sigma_schedule)
