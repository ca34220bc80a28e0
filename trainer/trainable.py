"""A sharded model with its optimizer: gradients are added up over micro-batches, then one update is taken or skipped.

Used by `trainer/worker.py`. Every method but `set_learning_rate` contains collectives: all ranks call it together.
"""

from __future__ import annotations

import logging
import math
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainer.components import OptimConfig
from trainer.model import gradient_sync
from trainer.optim import build_optimizer, clip_gradients, scale_gradients

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_BAD_STEPS = 3
"""Optimizer steps with a non-finite gradient norm in a row after which the run stops."""

StateDict = dict[str, object]
"""Nested names to tensors and numbers, as torch.distributed.checkpoint takes it."""


ModelT = TypeVar("ModelT", bound=nn.Module)


class Trainable(Generic[ModelT]):
    """Master weights, optimizer state and what an optimizer step does to them."""

    def __init__(self, model: ModelT, config: OptimConfig, *, name: str) -> None:
        """`model` is sharded already; `name` appears in messages."""
        self.model = model
        self._config = config
        self._name = name
        self._optimizer = build_optimizer(model, config)
        self._bad_steps = 0

    def set_learning_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    @property
    def loss_factor(self) -> float:
        """What `backward` multiplies a loss with: FSDP averages gradients over ranks, but the denominators are global,
        so the sum is wanted."""
        return float(dist.get_world_size())

    def zero_grad(self) -> None:
        """Begin an optimizer step."""
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, a scalar that is this rank's part of a sum over ranks and micro-batches.

        Gradients are reduced over ranks with the `last` micro-batch of an optimizer step only.
        """
        gradient_sync(self.model, last)
        (loss * self.loss_factor).backward()

    def gradient_norm(self, factor: float) -> float:
        """Multiply the gradients by `factor`, clip them; their global L2 norm before clipping."""
        scale_gradients(self.model, factor)
        return clip_gradients(self.model, self._config.max_grad_norm)

    def update(self, norm: float) -> bool:
        """Take the optimizer step unless the gradient `norm` is not finite; whether it was taken.

        Raises:
            RuntimeError: MAX_CONSECUTIVE_BAD_STEPS steps in a row had a norm that is not finite.
        """
        if not math.isfinite(norm):
            self._bad_steps += 1
            logger.warning("gradient norm of the %s is %s: optimizer step skipped on every rank", self._name, norm)
            if self._bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
                raise RuntimeError(
                    f"phase train: {self._bad_steps} optimizer steps of the {self._name} in a row had a non-finite "
                    "gradient norm; lower its learning rate or set policy.dtype=float32"
                )
            return False
        self._bad_steps = 0
        self._optimizer.step()
        return True

    def state_dict(self) -> StateDict:
        """Weights, optimizer and counters, sharded: what a checkpoint holds. Tensors are not copied."""
        model, optimizer = get_state_dict(self.model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "bad_steps": torch.tensor(self._bad_steps)}

    def load_state_dict(self, state: StateDict) -> None:
        """Take what `state_dict` returned, filled by torch.distributed.checkpoint."""
        model, optimizer, bad_steps = state["model"], state["optimizer"], state["bad_steps"]
        if not isinstance(model, dict) or not isinstance(optimizer, dict) or not isinstance(bad_steps, Tensor):
            raise TypeError("a state has a model, an optimizer and a count of bad steps")
        self._bad_steps = int(bad_steps)
        set_state_dict(self.model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
