"""Configuration of the guard: the watched metrics, their thresholds, and the strongest allowed action.

`guard=none` is the default; `guard=mismatch` chooses the guard of docs/guard.md. Imports no torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from algorithms.config import Checked, Problem
from algorithms.config.rules import above, at_least, ruled, within

if TYPE_CHECKING:
    from trainer.config.train import TrainConfig


class Action(Enum):
    """Action of the guard when a watched metric is bad; a later action includes the earlier actions."""

    warn = "warn"
    """Log a warning."""
    save = "save"
    """Save a checkpoint."""
    stop = "stop"
    """End the run with exit code 3."""


@dataclass(kw_only=True, slots=True)
class ThresholdConfig(Checked):
    """Threshold of one watched metric: the bound, and the number of steps beyond it."""

    worse: ClassVar[int] = 1
    """1 if larger values are worse, -1 if smaller values are worse."""
    trip: float | None = ruled(None, above(0))
    """Bound on the metric; a step with a worse value is bad; null: the metric is not watched."""
    steps: int = ruled(3, at_least(1))
    """Number of consecutive bad steps after which the guard acts."""

    def is_bad(self, value: float) -> bool:
        """Return True if `value` lies beyond `trip`."""
        return self.trip is not None and self.worse * (value - self.trip) > 0


@dataclass(kw_only=True, slots=True)
class K3ThresholdConfig(ThresholdConfig):
    """Threshold of mismatch/k3, nats per token. Healthy: 1e-5 to 1e-3 (dense models), 1e-3 to 1e-1 (mixtures)."""

    trip: float | None = ruled(1e-2, above(0))
    """Upper bound of K3, nats per token; a step above the bound is bad; null: K3 is not watched. Mixtures of experts:
    1e-1 or more."""


@dataclass(kw_only=True, slots=True)
class ESSThresholdConfig(ThresholdConfig):
    """Threshold of mismatch/ess/raw_token, the effective share of the tokens before any bound."""

    worse: ClassVar[int] = -1
    trip: float | None = ruled(0.3, within(0, 1, "()", because="it is a fraction of the tokens"))
    """Lower bound of the ESS, a fraction of the tokens; a step below the bound is bad; null: the ESS is not watched.
    verl's documents warn at 0.3."""


@dataclass(kw_only=True, slots=True)
class KHatThresholdConfig(ThresholdConfig):
    """Threshold of mismatch/khat/token, the shape of the tail of the weights (arXiv:1507.02646)."""

    trip: float | None = ruled(0.7, above(0))
    """Upper bound of k-hat, no unit; a step above the bound is bad, because averages with such weights are not
    reliable; null: k-hat is not watched."""


@dataclass(kw_only=True, slots=True)
class GuardConfig(Checked):
    """Reaction of a run to a growing mismatch. Choose with `guard=none` or `guard=mismatch`."""

    kind: ClassVar[str] = ""


@dataclass(kw_only=True, slots=True)
class NoGuardConfig(GuardConfig):
    """No guard: no metric is watched; the metrics are still logged."""

    kind: ClassVar[str] = "none"


@dataclass(kw_only=True, slots=True)
class MismatchGuardConfig(GuardConfig):
    """Guard on K3, ESS and k-hat: a metric that stays bad causes a warning, a checkpoint or a stop; docs/guard.md."""

    kind: ClassVar[str] = "mismatch"
    highest: Action = Action.warn
    """Strongest action of the guard; save and stop need checkpoint.every."""
    k3: K3ThresholdConfig = field(default_factory=K3ThresholdConfig)
    ess: ESSThresholdConfig = field(default_factory=ESSThresholdConfig)
    khat: KHatThresholdConfig = field(default_factory=KHatThresholdConfig)

    def conflicts(self) -> Iterator[Problem]:
        if all(threshold.trip is None for threshold in (self.k3, self.ess, self.khat)):
            remedy = "Set it, or use guard=none."
            yield Problem(key="k3.trip", rule="must be set: nothing is watched", value=None, remedy=remedy)


def guard_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between the guard and the checkpoints."""
    guard = config.guard
    if isinstance(guard, MismatchGuardConfig) and guard.highest is not Action.warn and config.checkpoint.every == 0:
        yield Problem(
            key="guard.highest",
            rule="must be warn without checkpoints: nothing could be saved",
            value=guard.highest,
            remedy="Set checkpoint.every, or guard.highest=warn.",
        )
