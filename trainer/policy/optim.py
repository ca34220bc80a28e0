"""AdamW, its schedule in rollout steps, and the global gradient norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.components import OptimConfig, Schedule

BETA1 = 0.9
"""Decay of the first moment in AdamW; the peers and papers of the recipes use no other."""
EPSILON = 1e-8
"""Added to the root of the second moment: torch's default, which the peers keep."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only (not on norms and biases).

    Where the weights lie on the host, torch's kernel that takes the whole update at once: a quarter of the time there.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(BETA1, config.beta2),
        eps=EPSILON,
        fused=True if all(parameter.device.type == "cpu" for parameter in parameters) else None,
    )


def learning_rate(config: OptimConfig, *, step: int, num_steps: int) -> float:
    """Learning rate of rollout step `step` (1-based): linear warm-up, then the schedule down to `num_steps`."""
    if step <= config.warmup_rollout_steps:
        return config.lr * step / config.warmup_rollout_steps
    span = max(1, num_steps - config.warmup_rollout_steps)
    progress = (step - config.warmup_rollout_steps - 1) / span
    match config.schedule:
        case Schedule.constant:
            return config.lr
        case Schedule.linear:
            return config.lr * (1 - progress)
        case Schedule.cosine:
            return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply every gradient by `factor`, the same number on every rank."""
    if factor != 1.0:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`; return the norm before scaling.

    The norm is the same number on every rank, so a non-finite one makes all ranks skip together.
    """
    norm: Tensor = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
