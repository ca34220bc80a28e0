"""The optimizer, the learning rate of a step, the clip of the gradients and the loss scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.training import LRSchedule, OptimConfig

BETA1 = 0.9
"""Decay of the first moment in AdamW; the peers and papers of the recipes use no other."""
EPSILON = 1e-8
"""Added to the root of the second moment: torch's default, which the peers keep."""
INITIAL_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""The loss scale: how it starts, what multiplies it after as many good steps, and after an overflow."""
LEAST_SCALE = 1.0
"""A norm that is not finite without any scaling is not an overflow of the scale."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only (not on norms and biases).

    The kernel that takes the whole update at once needs a quarter of the time of torch's default on a host. On a GPU it
    makes no copies of the size of a shard (not yet run on a GPU).
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
        fused=True,
    )


def learning_rate(config: OptimConfig, *, step: int, num_steps: int) -> float:
    """Learning rate of rollout step `step` (1-based): linear warm-up, then the schedule down to `num_steps`."""
    if step <= config.warmup_rollout_steps:
        return config.lr * step / config.warmup_rollout_steps
    span = max(1, num_steps - config.warmup_rollout_steps)
    progress = (step - config.warmup_rollout_steps - 1) / span
    match config.schedule:
        case LRSchedule.constant:
            return config.lr
        case LRSchedule.linear:
            return config.lr * (1 - progress)
        case LRSchedule.cosine:
            return config.lr * 0.5 * (1 + math.cos(math.pi * progress))


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global L2 norm of at most `max_norm`; return the norm before scaling.

    The norm is the same number on every rank, so a non-finite one makes all ranks skip together.
    """
    norm: Tensor = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class LossScale:
    """The dynamic loss scale of float16, a power of two: gradients too small for the type are multiplied up.

    The numbers are those of `torch.amp.GradScaler`. That class decides by the gradients that each rank holds; here the
    decision is the global gradient norm, which is the same number on every rank.
    """

    def __init__(self) -> None:
        self.value = INITIAL_SCALE
        self._good_steps = 0

    def after_overflow(self) -> None:
        """Shrink: some gradient left the range of float16."""
        self.value = max(LEAST_SCALE, self.value * BACKOFF)
        self._good_steps = 0

    def after_good_step(self) -> None:
        """Count an optimizer step with finite gradients; grow after GROWTH_INTERVAL of them in a row."""
        self._good_steps += 1
        if self._good_steps >= GROWTH_INTERVAL:
            self.value *= GROWTH
            self._good_steps = 0

    def state(self) -> Tensor:
        """[2] float64: the scale and the good steps in a row."""
        return torch.tensor([self.value, float(self._good_steps)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Take what `state` returned; a scale of 0 was saved by a run without one and changes nothing."""
        value, good_steps = state.tolist()
        if value > 0:
            self.value, self._good_steps = value, int(good_steps)
