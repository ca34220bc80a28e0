"""The dynamic loss scale of float16: gradients too small for the type are multiplied up, and divided again.

Used by `trainer/policy/optimizer_state.py`. The numbers are those of `torch.amp.GradScaler`. That class decides by the
gradients that each rank holds; here the decision is the global gradient norm, which is the same number on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
"""Optimizer steps without overflow after which the scale grows."""
FLOOR = 1.0
"""A norm that is not finite without any scaling is not an overflow of the scale."""


class LossScale:
    """A power of two that the loss is multiplied by before the backward pass."""

    def __init__(self) -> None:
        self.value = INITIAL
        self._good_steps = 0

    @property
    def at_floor(self) -> bool:
        """True if the scale is at its floor, where a smaller scale cannot help."""
        return self.value <= FLOOR

    def after_overflow(self) -> None:
        """Shrink: some gradient left the range of float16."""
        self.value = max(FLOOR, self.value * BACKOFF)
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


NO_SCALE = torch.zeros(2, dtype=torch.float64)
"""State of a run that needs no scale."""
