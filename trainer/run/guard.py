"""The guard of a run: what a step is trained with, and what its metrics make of the next.

Used by `trainer/run/loop.py`.

The rules are in `trainer/run/guard_machine.py`; here its rungs become corrections, events and metrics:

    guard/level         what was done in this step: 0 nothing, 1 warn, 2 tighten, 3 freeze
    guard/next_level    what is done in the next step; 4: the run was stopped after this one
    guard/tightenings   how often the correction of this step was tightened
    guard/bound_low     bounds of the weights in this step, as the ranks applied them; null: none
    guard/bound_high
    guard/bad           watched numbers that are bad after this step
    guard/rise          the early warning, as a fraction of its alarm: K3 is said to rise from above 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from algorithms.config import CorrectionConfig
from trainer.config.guard import ACTIONS, Action, MismatchGuardConfig, tightened_corrections
from trainer.config.override import AS_CONFIGURED, StepOverride
from trainer.config.train import TrainConfig
from trainer.run.guard_machine import GuardState, Ladder, Row, after, readings
from trainer.rundir.events import Event, Severity


class Guard:
    """No guard: every step is trained as configured. Base of `MismatchGuard`."""

    stops: bool = False
    """Whether the run shall be saved and ended after the step that was observed last."""

    @property
    def override(self) -> StepOverride:
        """What the next step is trained with."""
        return AS_CONFIGURED

    def observe(self, step: int, row: Row, correction: CorrectionConfig) -> tuple[dict[str, float | None], list[Event]]:
        """Judge `step` by its metrics; `correction` is what the ranks trained it with. Metrics and events."""
        return {}, []

    def state_dict(self) -> dict[str, Any] | None:
        """What a run that goes on needs, as JSON values; None without a guard."""
        return None

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Go on from what `state_dict` returned; lines for the user."""
        return ["guard: the checkpoint has one and this run has none; what it did is not done any more"]


class MismatchGuard(Guard):
    """guard=mismatch."""

    def __init__(self, config: TrainConfig) -> None:
        assert isinstance(config.guard, MismatchGuardConfig)
        self._config = config.guard
        self._ladder = Ladder(config.guard)
        self._corrections = [config.correction, *tightened_corrections(config)]
        self.state = GuardState()

    @property
    def override(self) -> StepOverride:
        rung = self.state.rung
        times = self._ladder.tightenings(rung)
        return StepOverride(
            correction=self._corrections[times] if times else None, learns=not self._ladder.is_frozen(rung)
        )

    def observe(self, step: int, row: Row, correction: CorrectionConfig) -> tuple[dict[str, float | None], list[Event]]:
        before = self.state
        self.state, self.stops = after(self._config, before, row)
        weight = correction.spec().weight
        metrics = {
            "guard/level": float(self._level(before)),
            "guard/next_level": float(1 + ACTIONS.index(Action.stop)) if self.stops else float(self._level(self.state)),
            "guard/tightenings": float(self._ladder.tightenings(before.rung)),
            "guard/bound_low": None if weight is None else weight.low,
            "guard/bound_high": None if weight is None else weight.high,
            "guard/bad": float(len(self.state.bad)),
            "guard/rise": self.state.rise.total / self._config.rise.alarm,
        }
        texts = [*self._rise_events(before, row), *self._rung_events(step, before, row)]
        return metrics, [
            Event(step=step, kind="guard", severity=severity, text=f"guard: {text}") for severity, text in texts
        ]

    def state_dict(self) -> dict[str, Any] | None:
        return self.state.to_json()

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        state = GuardState.from_json(saved)
        rung = min(state.rung, self._ladder.top)  # the config may have become milder
        self.state = replace(state, rung=rung)
        return [f"guard: goes on where it was: {self._described(rung)}"] if rung or self.state.bad else []

    def _level(self, state: GuardState) -> int:
        """0 for watching, then by the order of `Action`; a rise alone is a warning."""
        action = self._ladder.action(state.rung)
        return int(state.rise.rises) if action is None else 1 + ACTIONS.index(action)

    def _rung_events(self, step: int, before: GuardState, row: Row) -> list[tuple[Severity, str]]:
        rung = self.state.rung
        if self.stops:
            text = f"stop after step {step}, because {self._reasons(row)}: the run is saved and ended"
            return [(Severity.error, text)]
        if rung > before.rung:
            text = f"{self._described(rung)} from step {step + 1} on, because {self._reasons(row)}"
            return [(Severity.warn, text)]
        if rung < before.rung:
            return [(Severity.info, f"back to {self._described(rung)} from step {step + 1} on")]
        return []

    def _rise_events(self, before: GuardState, row: Row) -> list[tuple[Severity, str]]:
        rises = self.state.rise.rises
        if rises == before.rise.rises:
            return []
        if not rises:
            return [(Severity.info, "K3 no longer rises against its own history")]
        return [(Severity.warn, f"K3 rises against its own history and is now {row['mismatch/k3']:.1e}")]

    def _reasons(self, row: Row) -> str:
        bad = {name: signal.bad for name, signal in self.state.signals.items()}
        found = [
            f"{reading.name} is {'unknown' if reading.value is None else format(reading.value, '.2g')} "
            f"(bad {'above' if reading.band.worse > 0 else 'below'} {reading.band.trip:g})"
            for reading in readings(self._config, row)
            if bad.get(reading.name)
        ]
        return " and ".join(found)

    def _described(self, rung: int) -> str:
        """The action of a rung in words, with what it trains with."""
        action = self._ladder.action(rung)
        if action is None:
            return "watching"
        if action is Action.warn:
            return "warn"
        if action is Action.freeze:
            return "freeze: the policy is measured and not updated"
        return f"tighten: {described(self._corrections[self._ladder.tightenings(rung)])}"


def build_guard(config: TrainConfig) -> Guard:
    """The guard that `config.guard` chooses."""
    return MismatchGuard(config) if isinstance(config.guard, MismatchGuardConfig) else Guard()


def described(correction: CorrectionConfig) -> str:
    """A correction in one line, as words of the command line; keys that are null are left out."""
    return " ".join([f"correction={correction.mode}", *_words(correction, "correction")])


def _words(config: object, prefix: str) -> list[str]:
    found = []
    assert is_dataclass(config) and not isinstance(config, type)
    for spec in fields(config):
        value, key = getattr(config, spec.name), f"{prefix}.{spec.name}"
        if is_dataclass(value):
            found += _words(value, key)
        elif value is not None:
            found.append(f"{key}={_word(value)}")
    return found


def _word(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(_word(member) for member in value)}]"
    if isinstance(value, Enum):
        return value.name
    return format(value, ".4g") if isinstance(value, float) else str(value)
