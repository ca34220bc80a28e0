"""Events of a run, one line of events.jsonl each, and the events that follow from a row of metrics.

trainer/tracking/tracker.py writes the events, shows them on the console and sends them to W&B as alerts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """Severity of an event; the values are W&B's alert levels."""

    info = "INFO"
    warn = "WARN"
    error = "ERROR"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event of a run."""

    step: int
    kind: str
    """Source of the event, for example "guard"."""
    severity: Severity
    text: str

    def record(self) -> dict[str, object]:
        """The event as JSON values."""
        return {"step": self.step, "kind": self.kind, "severity": self.severity.name, "text": self.text}


_TOLD_BY_ROWS = (
    ("rollout/engine_restarts", "engine", "engines lost and started again: {:.0f}; the log says why"),
    ("rollout/given_up", "engine", "requests that no engine could serve: {:.0f}; the log says why"),
    ("reward/outage_s", "reward", "every call of the reward function failed for {:.0f} s, and the run waited"),
    ("episode/outage_s", "episode", "every call of the rollout function failed for {:.0f} s, and the run waited"),
    ("perf/checkpoint_failures", "checkpoint", "checkpoints in a row that were not written: {:.0f}; the log says why"),
)
"""(metric, kind, text): a value above 0 is an event."""


def events_of_row(step: int, row: Mapping[str, float | None]) -> Iterator[Event]:
    """The events that follow from the metrics of a step."""
    for metric, kind, text in _TOLD_BY_ROWS:
        value = row.get(metric)
        if value is not None and value > 0:
            yield Event(step=step, kind=kind, severity=Severity.warn, text=text.format(value))
