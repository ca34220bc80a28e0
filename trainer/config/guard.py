"""Configuration of the guard: which numbers it watches, when they are bad, and how far it may go.

`guard=none` is the default; `guard=mismatch` chooses the guard of docs/guard.md. Imports no torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from algorithms.config import Checked, ConfigError, CorrectionConfig, Problem
from algorithms.config.combine import combination_problems
from trainer.config.rules import advantage_problems, reference_problems
from trainer.config.tighten import tightened

if TYPE_CHECKING:
    from trainer.config.train import TrainConfig


class Action(Enum):
    """What the guard does, from the mildest to the strongest; a later one includes the earlier ones."""

    warn = "warn"
    """Say so; the training goes on as configured."""
    tighten = "tighten"
    """Train with a stricter correction (`trainer/config/tighten.py`)."""
    freeze = "freeze"
    """Leave the policy as it is: sampled, scored and measured, not updated."""
    stop = "stop"
    """Save a checkpoint and end the run."""


ACTIONS = tuple(Action)


class WatchedWeights(Enum):
    """Over which tokens the weights are accumulated whose ESS and Pareto k-hat are watched."""

    token = "token"
    """rho of each token."""
    sequence = "sequence"
    """The product over a response."""


@dataclass(kw_only=True, slots=True)
class BandConfig(Checked):
    """When a number is bad, and when it is good again; between the two it stays what it was."""

    worse: ClassVar[int] = 1
    """1 if a larger number is worse, -1 if a smaller one is."""
    trip: float | None = None
    """Beyond this the number is bad; null: it is not watched."""
    clear: float = 0.0
    """On the other side of this it is good again."""

    def is_bad(self, value: float) -> bool:
        """Whether `value` is beyond `trip`."""
        return self.trip is not None and self.worse * (value - self.trip) > 0

    def is_good(self, value: float) -> bool:
        """Whether `value` is on the healthy side of `clear`."""
        return self.worse * (value - self.clear) < 0

    def problems(self) -> Iterator[Problem]:
        if self.trip is not None and self.worse * (self.trip - self.clear) < 0:
            side = "<=" if self.worse > 0 else ">="
            yield Problem(key="clear", rule=f"must be {side} trip ({self.trip:g})", value=self.clear)
        yield from self._range_problems()

    def _range_problems(self) -> Iterator[Problem]:
        for key in ("trip", "clear"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                yield Problem(key=key, rule="must be > 0", value=value)


@dataclass(kw_only=True, slots=True)
class K3BandConfig(BandConfig):
    """Bounds of mismatch/k3, nats per token. Healthy: 1e-5 to 1e-3 (dense models), 1e-3 to 1e-1 (mixtures)."""

    trip: float | None = 1e-2
    """Above this K3 is bad; null: K3 is not watched. Mixtures of experts: 1e-1 or more."""
    clear: float = 5e-3
    """Below this it is good again."""


@dataclass(kw_only=True, slots=True)
class ESSBandConfig(BandConfig):
    """Bounds of mismatch/ess/raw_*, the effective share of the samples before any bound."""

    worse: ClassVar[int] = -1
    trip: float | None = 0.5
    """Below this the ESS is bad; null: it is not watched. verl's documents warn at 0.3."""
    clear: float = 0.7
    """Above this it is good again."""

    def _range_problems(self) -> Iterator[Problem]:
        for key in ("trip", "clear"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                yield Problem(key=key, rule="must lie in (0, 1): it is a fraction of the samples", value=value)


@dataclass(kw_only=True, slots=True)
class KHatBandConfig(BandConfig):
    """Bounds of mismatch/khat/*, the shape of the tail of the weights (arXiv:1507.02646)."""

    trip: float | None = 0.7
    """Above this k-hat is bad: averages with such weights are not reliable; null: it is not watched."""
    clear: float = 0.5
    """Below this it is good again: the variance of the weights exists."""


@dataclass(kw_only=True, slots=True)
class RiseConfig(Checked):
    """The early warning: K3 rising against its own history, wherever it stands. It warns and does nothing else."""

    window_steps: int | None = 20
    """Steps of K3 that are the history; null: no early warning."""
    slack: float = 1.5
    """What a step may lie above the median of the history, in spreads, without adding to the alarm."""
    alarm: float = 6.0
    """Sum of what is above the slack at which K3 is said to rise; it has ended at half of this."""
    least: float = 1e-5
    """K3 below this counts as this, nats: such a mismatch is harmless, whatever it was before."""

    def problems(self) -> Iterator[Problem]:
        if self.window_steps is not None and self.window_steps < 10:
            yield Problem(
                key="window_steps", rule="must be >= 10 or null", value=self.window_steps, remedy="Measured with 20."
            )
        for key in ("slack", "alarm", "least"):
            if not getattr(self, key) > 0:
                yield Problem(key=key, rule="must be > 0", value=getattr(self, key))


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
    """K3, ESS and k-hat are watched; what stays bad is answered with one action after the other. See docs/guard.md."""

    kind: ClassVar[str] = "mismatch"
    highest: Action = Action.freeze
    """The strongest action that is taken; stop needs checkpoint.every."""
    k3: K3BandConfig = field(default_factory=K3BandConfig)
    ess: ESSBandConfig = field(default_factory=ESSBandConfig)
    khat: KHatBandConfig = field(default_factory=KHatBandConfig)
    rise: RiseConfig = field(default_factory=RiseConfig)
    weights: WatchedWeights = WatchedWeights.token
    """Whose ESS and k-hat are watched."""
    trip_steps: int = 3
    """Bad steps in a row after which a number counts as bad."""
    clear_steps: int = 5
    """Good steps in a row after which it counts as good, and steps after which the next action is taken back."""
    escalate_steps: int = 5
    """Steps that an action is given before the next one, while a number stays bad."""
    tightenings: int = 2
    """Times that the correction is tightened, one after the other, before the policy is frozen."""

    def problems(self) -> Iterator[Problem]:
        for part in ("k3", "ess", "khat", "rise"):
            yield from (problem.under(part) for problem in getattr(self, part).problems())
        for key in ("trip_steps", "clear_steps", "escalate_steps", "tightenings"):
            if getattr(self, key) < 1:
                yield Problem(key=key, rule="must be >= 1", value=getattr(self, key))
        watched = (self.k3.trip, self.ess.trip, self.khat.trip, self.rise.window_steps)
        if all(value is None for value in watched):
            yield Problem(
                key="k3.trip",
                rule="must be set: nothing is watched",
                value=None,
                remedy="Set it, or use guard=none.",
            )


def guard_problems(config: TrainConfig) -> Iterator[Problem]:
    """Rules between the guard, the checkpoints and the correction that it would tighten."""
    guard = config.guard
    if not isinstance(guard, MismatchGuardConfig):
        return
    if guard.highest is Action.stop and config.checkpoint.every == 0:
        yield Problem(
            key="guard.highest",
            rule="must not be stop without checkpoints: the run could not go on",
            value=guard.highest,
            remedy="Set checkpoint.every, or guard.highest=freeze.",
        )
    if ACTIONS.index(guard.highest) < ACTIONS.index(Action.tighten):
        return
    reason = next(_reasons_against(config), None)
    if reason is not None:
        yield Problem(
            key="guard.highest",
            rule=f"must be warn: correction={config.correction.mode} cannot be tightened as it is set ({reason})",
            value=guard.highest,
            remedy="Use guard.highest=warn, fewer guard.tightenings, or another correction.",
        )


def _reasons_against(config: TrainConfig) -> Iterator[Problem]:
    """What forbids a tightened correction; nothing if the correction of the config itself is forbidden."""
    if any(True for _ in _correction_problems(config)):
        return
    try:
        corrections = tightened_corrections(config)
    except ConfigError as error:
        yield from error.problems
        return
    for correction in corrections:
        changed = copy(config)  # not checked as a whole: what else is wrong with it is not the guard's to tell
        changed.correction = correction
        yield from _correction_problems(changed)


def _correction_problems(config: TrainConfig) -> Iterator[Problem]:
    yield from combination_problems(config.correction, config.loss)
    yield from advantage_problems(config)
    yield from reference_problems(config)


def tightened_corrections(config: TrainConfig) -> list[CorrectionConfig]:
    """The corrections that the guard would train with, from the mildest to the strictest; none without a guard.

    Raises ConfigError if one of them is not valid.
    """
    guard, found = config.guard, [config.correction]
    if not isinstance(guard, MismatchGuardConfig):
        return []
    for _ in range(guard.tightenings):
        found.append(tightened(found[-1]))
    return found[1:]
