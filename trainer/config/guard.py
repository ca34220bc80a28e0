"""Configuration of the guard: which numbers it watches, when they are bad, and how far it may go.

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
    """What the guard does when a number has become bad; a later action includes the earlier ones."""

    warn = "warn"
    """Say so."""
    save = "save"
    """Save a checkpoint."""
    stop = "stop"
    """End the run with exit code 3."""


@dataclass(kw_only=True, slots=True)
class ThresholdConfig(Checked):
    """When a number is bad."""

    worse: ClassVar[int] = 1
    """1 if a larger number is worse, -1 if a smaller number is."""
    trip: float | None = ruled(None, above(0))
    """A step beyond this is bad; null: the number is not watched."""
    steps: int = ruled(3, at_least(1))
    """Bad steps in a row after which the number is bad."""

    def is_bad(self, value: float) -> bool:
        """Return True if `value` lies beyond `trip`."""
        return self.trip is not None and self.worse * (value - self.trip) > 0


@dataclass(kw_only=True, slots=True)
class K3ThresholdConfig(ThresholdConfig):
    """Threshold of mismatch/k3, nats per token. Healthy: 1e-5 to 1e-3 (dense models), 1e-3 to 1e-1 (mixtures)."""

    trip: float | None = ruled(1e-2, above(0))
    """A step above this is bad; null: K3 is not watched. Mixtures of experts: 1e-1 or more."""


@dataclass(kw_only=True, slots=True)
class ESSThresholdConfig(ThresholdConfig):
    """Threshold of mismatch/ess/raw_token, the effective share of the tokens before any bound."""

    worse: ClassVar[int] = -1
    trip: float | None = ruled(0.3, within(0, 1, "()", because="it is a fraction of the tokens"))
    """A step below this is bad; null: the ESS is not watched. verl's documents warn at 0.3."""


@dataclass(kw_only=True, slots=True)
class KHatThresholdConfig(ThresholdConfig):
    """Threshold of mismatch/khat/token, the shape of the tail of the weights (arXiv:1507.02646)."""

    trip: float | None = ruled(0.7, above(0))
    """A step above this is bad: averages with such weights are not reliable; null: k-hat is not watched."""


@dataclass(kw_only=True, slots=True)
class GuardConfig(Checked):
    """What a run does about a growing mismatch. Choose with `guard=none` or `guard=mismatch`."""

    kind: ClassVar[str] = ""


@dataclass(kw_only=True, slots=True)
class NoGuardConfig(GuardConfig):
    """Nothing is watched; the metrics are logged all the same."""

    kind: ClassVar[str] = "none"


@dataclass(kw_only=True, slots=True)
class MismatchGuardConfig(GuardConfig):
    """K3, ESS and k-hat are watched; a number that stays bad is told, saved at, or ends the run. See docs/guard.md."""

    kind: ClassVar[str] = "mismatch"
    highest: Action = Action.warn
    """The strongest action that is taken; save and stop need checkpoint.every."""
    k3: K3ThresholdConfig = field(default_factory=K3ThresholdConfig)
    ess: ESSThresholdConfig = field(default_factory=ESSThresholdConfig)
    khat: KHatThresholdConfig = field(default_factory=KHatThresholdConfig)

    def conflicts(self) -> Iterator[Problem]:
        if all(threshold.trip is None for threshold in (self.k3, self.ess, self.khat)):
            remedy = "Set it, or use guard=none."
            yield Problem(key="k3.trip", rule="must be set: nothing is watched", value=None, remedy=remedy)


def guard_problems(config: TrainConfig) -> Iterator[Problem]:
    """Rules between the guard and the checkpoints."""
    guard = config.guard
    if isinstance(guard, MismatchGuardConfig) and guard.highest is not Action.warn and config.checkpoint.every == 0:
        yield Problem(
            key="guard.highest",
            rule="must be warn without checkpoints: nothing could be saved",
            value=guard.highest,
            remedy="Set checkpoint.every, or guard.highest=warn.",
        )
