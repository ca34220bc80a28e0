"""Measures the seconds of a step by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Attributes the wall-clock seconds of a step to named phases.

    Laps follow each other without a gap: what happens between two laps belongs to the later one, so writing
    the metrics of step k is accounted for in step k + 1.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the seconds inside the block to `name`; blocks of one name add up. Not to be nested."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    def reassign(self, seconds: float, *, source: str, target: str) -> None:
        """Count `seconds` that were measured inside the phase `source` as those of `target`."""
        self._phases[source] -= seconds
        self._phases[target] = self._phases.get(target, 0.0) + seconds

    def lap(self) -> dict[str, float | None]:
        """Metrics of the step that ends now; the next one starts at the same instant."""
        now = time.perf_counter()
        step_s = now - self._started
        unattributed_s = step_s - sum(self._phases.values())
        metrics: dict[str, float | None] = {f"time/{name}_s": seconds for name, seconds in self._phases.items()}
        metrics["time/unattributed_s"] = unattributed_s
        metrics["time/step_s"] = step_s
        metrics["perf/unattributed_frac"] = unattributed_s / step_s
        self._started, self._phases = now, {}
        return metrics
