"""A sharded model with its optimizer: gradients are added up over micro-batches, then one update is taken or skipped.

Used by `trainer/policy/step.py` and `trainer/policy/worker.py`. Every method but `set_learning_rate` contains
collectives: all ranks call it together.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from rollout.config import DType
from trainer.config.training import Offload, OptimConfig
from trainer.policy.host_copy import HostCopy
from trainer.policy.optimizer import LEAST_SCALE, LossScale, build_optimizer, clip_gradients, learning_rate

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_BAD_STEPS = 3
"""Optimizer steps with a non-finite gradient norm in a row after which the run stops."""
NO_SCALE = torch.zeros(2, dtype=torch.float64)
"""State of a run that needs no loss scale."""

StateDict = dict[str, Any]
"""Nested names to tensors and numbers, as torch.distributed.checkpoint takes it."""


ModelT = TypeVar("ModelT", bound=nn.Module)


class Trainable(Generic[ModelT]):
    """Master weights, optimizer state and what an optimizer step does to them."""

    def __init__(
        self,
        model: ModelT,
        config: OptimConfig,
        *,
        name: str,
        dtype: DType = DType.float32,
        offload: Offload = Offload.none,
    ) -> None:
        """`model` is sharded already; `name` appears in messages; `dtype` is that of forward and backward.

        `offload` is what lies on the host; with `parameters` the model was sharded that way.
        """
        self._model = model
        self._config = config
        self._name = name
        self._optimizer = build_optimizer(model, config)
        # A checkpoint holds what is trained. Beside an adapter that is not every parameter of the model.
        is_whole = all(parameter.requires_grad for parameter in model.parameters())
        self._trained = StateDictOptions(ignore_frozen_params=True, strict=is_whole)
        self._bad_steps = 0
        self._rate_key = "optim.lr" if name == "policy" else f"{name}.lr"
        self._other_type = "" if dtype is DType.float32 else " or set policy.dtype=float32"
        self._device = torch.device(next(model.parameters()).device)
        self._offload = offload
        self._asleep = False
        self._weights_on_host, self._optimizer_on_host = HostCopy(), HostCopy()
        # float16 holds no gradient below 6e-8: without a scale most of them would be zero.
        self._scale = LossScale() if dtype is DType.float16 else None

    @property
    def model(self) -> ModelT:
        """The sharded model. Raises RuntimeError while it sleeps: its weights are empty then."""
        if self._asleep:
            raise RuntimeError(f"the {self._name} sleeps: its weights are on the host; use it inside resident()")
        return self._model

    @property
    def loss_scale(self) -> float | None:
        """Factor that multiplies the loss before its backward pass; None where the dtype needs no scale."""
        return None if self._scale is None else self._scale.value

    def set_learning_rate(self, *, step: int, num_steps: int) -> float:
        """Set the learning rate of rollout step `step` of `num_steps`, and return it."""
        rate = learning_rate(self._config, step=step, num_steps=num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def zero_grad(self) -> None:
        """Begin an optimizer step."""
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, a scalar that is this rank's part of a sum over ranks and micro-batches.

        Every call reduces gradients over ranks. Reduction with the last micro-batch alone would keep the whole
        unsharded gradient on every rank until then: 4 bytes per parameter, whatever the number of ranks.
        """
        if not isinstance(self.model, FSDPModule):
            raise TypeError("the model is not sharded yet")
        # FSDP averages gradients over ranks; the denominators of the loss are global, so the gradient must be the sum.
        (loss * dist.get_world_size() * (self.loss_scale or 1.0)).backward()

    def scale_and_clip(self, factor: float) -> float:
        """Multiply the gradients by `factor`, equal on every rank, and clip them; their global L2 norm before that."""
        factor /= self.loss_scale or 1.0
        if factor != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return clip_gradients(self.model, self._config.max_grad_norm)

    def overflowed(self, norm: float) -> bool:
        """True if the gradient `norm` is not finite and the loss scale can still shrink to correct the overflow."""
        return self._scale is not None and self._scale.value > LEAST_SCALE and not math.isfinite(norm)

    def update(self, norm: float) -> bool:
        """Take the optimizer step unless the gradient `norm` is not finite; True if it was taken.

        In float16 an overflow halves the loss scale. It counts as a bad step only once the scale is at its floor.
        Raises RuntimeError if MAX_CONSECUTIVE_BAD_STEPS steps in a row had a norm that is not finite.
        """
        if self._scale is not None and self.overflowed(norm):
            self._scale.after_overflow()
            text = "float16 overflow in the %s: optimizer step skipped on every rank, loss scale now %g"
            logger.info(text, self._name, self._scale.value)
            return False
        if not math.isfinite(norm):
            self._bad_steps += 1
            logger.warning("gradient norm of the %s is %s: optimizer step skipped on every rank", self._name, norm)
            if self._bad_steps >= MAX_CONSECUTIVE_BAD_STEPS:
                raise RuntimeError(
                    f"phase train: {self._bad_steps} optimizer steps of the {self._name} in a row had a non-finite "
                    f"gradient norm; lower {self._rate_key}{self._other_type}"
                )
            return False
        self._bad_steps = 0
        if self._scale is not None:
            self._scale.after_good_step()
        self._optimizer_on_host.give_back(device=self._device)
        self._optimizer.step()
        if self._offload is Offload.optimizer:
            self._move_optimizer_out()
        return True

    def state_dict(self) -> StateDict:
        """Trained weights, optimizer, counters and loss scale, sharded: what a checkpoint holds. Tensors are not
        copied. Before the first update it drops the gradients, which belong to no update."""
        self._make_states()
        model, optimizer = get_state_dict(self._model, self._optimizer, options=self._trained)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                model.pop(name, None)  # torch leaves the second name of a tied one
        model, optimizer = (tree_map_only(Tensor, self._readable, part) for part in (model, optimizer))
        scale = NO_SCALE.clone() if self._scale is None else self._scale.state()
        bad_steps = torch.tensor(self._bad_steps)
        return {"model": model, "optimizer": optimizer, "bad_steps": bad_steps, "loss_scale": scale}

    def load_state_dict(self, state: StateDict) -> None:
        """Take what `state_dict` returned, filled by torch.distributed.checkpoint."""
        model, optimizer, bad_steps, scale = (state[key] for key in ("model", "optimizer", "bad_steps", "loss_scale"))
        self._bad_steps = int(bad_steps)
        if self._scale is not None:
            self._scale.load(scale)
        self.wake()
        self._optimizer_on_host.give_back(device=self._device)
        set_state_dict(
            self.model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer, options=self._trained
        )
        if self._offload is Offload.optimizer:
            self._move_optimizer_out()

    def sleep(self) -> None:
        """Move weights and optimizer to the host and drop the gradients; safe to call twice.

        Where `offload` has put something on the host already it stays. `state_dict` works meanwhile.
        """
        if self._asleep or self._offload is Offload.parameters:
            return
        self.zero_grad()
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self._make_states()
        if not self._optimizer_on_host.holds:
            self._move_optimizer_out()
        self._weights_on_host.take(self._model.parameters(), device=self._device)
        self._asleep = True

    def wake(self) -> None:
        """Move back what `sleep` moved; safe to call twice."""
        if not self._asleep:
            return
        self._weights_on_host.give_back(device=self._device)
        if self._offload is Offload.none:
            self._optimizer_on_host.give_back(device=self._device)
        self._asleep = False

    def _make_states(self) -> None:
        """Make AdamW's states if there was no update yet: a checkpoint needs them, and they are made with the weights.

        A sleeping policy could not make them: its GPU is the engine's.
        """
        if self._optimizer.state:
            return
        self.zero_grad()  # beside gradients, as a skipped update leaves them, torch makes no states
        get_state_dict(self._model, self._optimizer, options=self._trained)
        for state in self._optimizer.state.values():
            state["step"].zero_()  # torch has counted an update that changed nothing

    def _move_optimizer_out(self) -> None:
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        self._optimizer_on_host.take([v for v in states if isinstance(v, Tensor)], device=self._device)

    def _readable(self, tensor: Tensor) -> Tensor:
        """`tensor`, or its copy on the host while that is where its bytes are."""
        return self._optimizer_on_host.on_host(self._weights_on_host.on_host(tensor))
