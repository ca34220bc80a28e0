"""Configuration of the advantage estimators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from algorithms.config.checked import Checked, Problem


class Estimator(Enum):
    """How rewards of a group become advantages."""

    grpo = "grpo"
    """(r - mean) / (std + epsilon), std with n - 1."""
    dr_grpo = "dr_grpo"
    """r - mean: no division by the spread."""
    rloo = "rloo"
    """r - mean of the other samples of the group."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig(Checked):
    """From the rewards of a group to one advantage per sample."""

    estimator: Estimator = Estimator.grpo
    """Which formula. Vetted: grpo."""
    epsilon: float = 1e-6
    """Added to the group's standard deviation (grpo). Vetted: 1e-6."""

    def problems(self) -> Iterator[Problem]:
        if not self.epsilon > 0:
            yield Problem(key="epsilon", rule="must be > 0", value=self.epsilon, remedy="Vetted: 1e-6.")
