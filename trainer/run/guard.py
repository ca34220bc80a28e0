"""The guard of a run: watches numbers of every step, warns, saves and stops. Used by `trainer/run/loop.py`.

A number is bad after guard.steps steps in a row beyond its bound, and good again after one step within the bound. An
unknown number (null) neither counts nor interrupts a row. When a number becomes bad the guard acts once:

    guard/level   action after this step: 0 nothing, 1 warn, 2 save, 3 stop
    guard/bad     number of watched numbers that are bad after this step

The training itself is never changed. No clock, no randomness: two runs with the same metrics are judged alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.config.guard import Action, Reading, Row, WatchConfig
from trainer.config.train import TrainConfig
from trainer.rundir.events import Event, Severity
from trainer.text.plain import counted

ACTIONS = tuple(Action)
SAID = {Action.warn: "", Action.save: ": a checkpoint is saved", Action.stop: ": the run is saved and ended"}


class Guard:
    """No guard. Base of `NumberGuard`."""

    saves: bool = False
    """A checkpoint shall be saved after the step that was observed last."""
    stops: bool = False
    """The run shall be saved and ended after that step."""

    def observe(self, step: int, row: Row) -> tuple[dict[str, float | None], list[Event]]:
        """Judge `step` by its metrics; returns metrics and events."""
        return {}, []

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that a resumed run needs, as JSON values; None without a guard."""
        return None

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Go on from what `state_dict` returned; lines for the user."""
        return ["guard: the checkpoint has one and this run has none"]


class NumberGuard(Guard):
    """guard=mismatch, and guards of a user."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._bad_steps: dict[str, int] = {}
        """Bad steps in a row, by the name of the number."""

    def observe(self, step: int, row: Row) -> tuple[dict[str, float | None], list[Event]]:
        found = self._config.readings(MappingProxyType(row))
        before = {reading.name for reading in found if self._is_bad(reading)}
        for reading in found:
            if reading.value is not None:
                self._bad_steps[reading.name] = self._bad_steps.get(reading.name, 0) + 1 if reading.is_beyond else 0
        bad = [reading for reading in found if self._is_bad(reading)]
        new = [reading for reading in bad if reading.name not in before]
        over = before - {reading.name for reading in bad}
        level = 1 + ACTIONS.index(self._config.highest) if new else int(bool(bad))
        self.saves, self.stops = level > ACTIONS.index(Action.save), level > ACTIONS.index(Action.stop)
        if self.stops:
            self._bad_steps = {}  # a run that goes on is stopped again after as many bad steps
        events = [
            Event(step=step, kind="guard", severity=Severity.info, text=f"guard: {name} is good again")
            for name in sorted(over)
        ]
        if new:
            text = f"guard: {' and '.join(map(self._told, new))}{SAID[self._config.highest]}"
            severity = Severity.error if self.stops else Severity.warn
            events.append(Event(step=step, kind="guard", severity=severity, text=text))
        return {"guard/level": float(level), "guard/bad": float(len(bad))}, events

    def _is_bad(self, reading: Reading) -> bool:
        return self._bad_steps.get(reading.name, 0) >= self._config.steps

    def _told(self, reading: Reading) -> str:
        """One number with its rule, for a message."""
        value = "unknown" if reading.value is None else format(reading.value, ".2g")
        rule = f"{'above' if reading.is_upper else 'below'} {reading.bound:g} for {counted(self._config.steps, 'step')}"
        return f"{reading.name} is {value} (bad {rule} in a row)"

    def state_dict(self) -> dict[str, Any] | None:
        return {"bad_steps": dict(self._bad_steps)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        if "bad_steps" not in saved:
            return ["guard: the checkpoint is of an earlier version; the guard begins afresh"]
        self._bad_steps = dict(saved["bad_steps"])
        return []


def build_guard(config: TrainConfig) -> Guard:
    """The guard that `config.guard` chooses."""
    return NumberGuard(config.guard) if isinstance(config.guard, WatchConfig) else Guard()
