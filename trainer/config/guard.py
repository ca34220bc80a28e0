"""Configuration of the guard: the bounds of the watched metrics, and the strongest allowed action.

`guard=none` is the default; `guard=mismatch` chooses the guard of docs/guard.md. Imports no torch, no Ray.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from algorithms.config import Checked, Custom, Problem
from algorithms.config.rules import above, at_least, ruled, within
from algorithms.config.spec import HARMLESS_ESS

if TYPE_CHECKING:
    from trainer.config.train import TrainConfig

Row = Mapping[str, float | None]


class Action(Enum):
    """Action of the guard when a watched metric is bad; a later action includes the earlier actions."""

    warn = "warn"
    """Log a warning."""
    save = "save"
    """Save a checkpoint."""
    stop = "stop"
    """End the run with exit code 3."""


class Reading(NamedTuple):
    """One watched number of a step."""

    name: str
    value: float | None
    """None: not known in this step."""
    bound: float
    is_upper: bool
    """True if the number is bad above the bound, False if the number is bad below the bound."""

    @property
    def is_beyond(self) -> bool:
        return self.value is not None and (self.value > self.bound if self.is_upper else self.value < self.bound)


@dataclass(kw_only=True, slots=True)
class GuardConfig(Checked):
    """Reaction of a run to a number that gets bad. Choose with `guard=none` or `guard=mismatch`."""

    kind: ClassVar[str] = ""


@dataclass(kw_only=True, slots=True)
class NoGuardConfig(GuardConfig):
    """No guard: no metric is watched; the metrics are still logged."""

    kind: ClassVar[str] = "none"


@dataclass(kw_only=True, slots=True)
class WatchConfig(GuardConfig):
    """A guard that watches numbers: one that stays bad causes a warning, a checkpoint or a stop."""

    highest: Action = Action.warn
    """Strongest action of the guard; save and stop need checkpoint.every."""
    steps: int = ruled(3, at_least(1))
    """Number of consecutive bad steps after which the guard acts; a step is bad if it lies beyond a bound."""

    @abstractmethod
    def readings(self, row: Row) -> list[Reading]:
        """The watched numbers in the metrics of a step."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class CustomGuard(WatchConfig, Custom):
    """A guard of a user: its `readings` say which numbers are watched, with their bounds."""

    kind: ClassVar[str] = "custom"


@dataclass(kw_only=True, slots=True)
class MismatchGuardConfig(WatchConfig):
    """Guard on K3, ESS and k-hat; docs/guard.md."""

    kind: ClassVar[str] = "mismatch"
    max_k3: float | None = ruled(1e-2, above(0))
    """Upper bound of mismatch/k3, nats per token; null: K3 is not watched. Healthy: 1e-5 to 1e-3 (dense models), 1e-3
    to 1e-1 (mixtures of experts, which need a bound of 1e-1 or more)."""
    min_ess: float | None = ruled(0.3, within(0, 1, "()", because="it is a fraction of the tokens"))
    """Lower bound of mismatch/ess/raw_token, the effective fraction of the tokens before any bound; null: the ESS is
    not watched. verl's documents warn at 0.3."""
    max_khat: float | None = ruled(0.7, above(0))
    """Upper bound of mismatch/khat/token, the shape of the tail of the weights (arXiv:1507.02646), no unit; averages
    with a heavier tail are not reliable; null: k-hat is not watched."""

    def readings(self, row: Row) -> list[Reading]:
        ess, khat = row.get("mismatch/ess/raw_token"), row.get("mismatch/khat/token")
        if khat is None and ess is not None and ess > HARMLESS_ESS:
            khat = 0.0  # not measured because the weights have no tail that matters: known to be good
        numbers = (
            ("k3", row.get("mismatch/k3"), self.max_k3, True),
            ("ess", ess, self.min_ess, False),
            ("khat", khat, self.max_khat, True),
        )
        return [Reading(name, value, bound, is_upper) for name, value, bound, is_upper in numbers if bound is not None]

    def conflicts(self) -> Iterator[Problem]:
        if self.max_k3 is None and self.min_ess is None and self.max_khat is None:
            remedy = "Set it, or use guard=none."
            yield Problem(key="max_k3", rule="must be set: nothing is watched", value=None, remedy=remedy)


def guard_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield broken rules between the guard and the checkpoints."""
    guard = config.guard
    if isinstance(guard, WatchConfig) and guard.highest is not Action.warn and config.checkpoint.every == 0:
        yield config.broken(
            "guard.highest",
            "must be warn without checkpoints: nothing could be saved",
            "Set checkpoint.every, or guard.highest=warn.",
        )
