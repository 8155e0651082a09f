"""The optimizer and its learning rate: AdamW on two groups of parameters, a warmup, then a cosine."""

from __future__ import annotations

import math

import torch
from torch import nn

from chatmill.train.config import TrainConfig


def warmup_steps(config: TrainConfig, steps: int) -> int:
    """Steps in which the rate rises: `warmup_pct` of the phase's steps, rounded up."""
    return math.ceil(config.warmup_pct * steps - 1e-9)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of a phase of `steps`: a straight rise, then half a cosine down.

    The last step of the warmup has the full rate; the last step of the phase has `min_lr_ratio` of it.
    """
    rising = warmup_steps(config, steps)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    progress = (step - rising + 1) / max(steps - rising, 1)
    low = config.min_lr_ratio
    return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors do not. The rate is set anew at each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_gpu = bool(trained) and all(p.is_cuda for p in trained)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=on_gpu,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The same rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
