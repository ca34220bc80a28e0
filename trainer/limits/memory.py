"""Memory of every actor and the driver -> metrics, and an alarm for one that grows step by step.

A leak of the host's memory ends a run after hours, when Ray kills a worker. Here it is told after some tens of steps,
with the actor's name, the slope and the steps that are left. No torch, no Ray.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rollout.processes.process_memory import STEPS_KEPT, MemoryUse

logger = logging.getLogger(__name__)

MIB, GIB = 2**20, 2**30
WARM_UP_STEPS = 10
"""First steps that are not looked at: caches and allocators fill up."""
WINDOW_STEPS = 60
"""Steps over which the slope is taken, of the low points: a rank keeps freed memory for STEPS_KEPT steps, and until it
gives that back it follows the largest batch. What it cannot give back is its smallest memory in as many steps."""
CONFIDENCE_Z = 3.0
"""Standard deviations of Kendall's score by which the slope must differ from 0."""
LEAST_SLOPE = 0.05 * MIB
"""Bytes per step below which growth is not worth a warning: 5 GiB after 100,000 steps."""
FLATTENED = 0.5
"""Growth in the later half of the window over that in the earlier half, below which it is dying down."""
AGAIN = 2.0
"""A leak that was told is told again once the actor's memory has grown by this factor."""


class Slope(NamedTuple):
    """Growth per step: the median of all pairs, and the lower end of its confidence interval."""

    median: float
    low: float


def theil_sen(values: Sequence[float]) -> Slope:
    """Slope per step of `values`, one per step: outliers, and up to 29 % of wrong values, do not move it.

    The interval: Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau", JASA 63 (1968).
    """
    n = len(values)
    first, second = np.triu_indices(n, k=1)
    series = np.asarray(values, dtype=np.float64)
    slopes = np.sort((series[second] - series[first]) / (second - first))
    spread = CONFIDENCE_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    rank = math.floor((len(slopes) - spread) / 2)
    return Slope(median=float(np.median(slopes)), low=float(slopes[rank]) if rank >= 0 else -math.inf)


def low_points(values: Sequence[float]) -> list[float]:
    """The smallest of every STEPS_KEPT neighbours of `values`, one per step: STEPS_KEPT - 1 fewer, or none."""
    return [min(values[start : start + STEPS_KEPT]) for start in range(len(values) - STEPS_KEPT + 1)]


class SlopeAlarm:
    """Tells once that one actor's memory grows; again only after it stood still, or grew `AGAIN` times as large."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen = 0
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS + STEPS_KEPT - 1)
        self._told_at: float | None = None
        self.slope: float | None = None
        """Bytes per step over the window; None until it is full."""

    def add(self, use: MemoryUse) -> str | None:
        """One step; returns a warning where one is due."""
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return None
        self._recent.append(float(use.private))
        values = low_points(list(self._recent))
        if len(values) < WINDOW_STEPS:
            return None
        whole = theil_sen(values)
        self.slope = whole.median
        # A step up, or a curve that flattens out, has a slope too; a leak has it in the later half as well as before.
        half = WINDOW_STEPS // 2
        halves = (theil_sen(values[:half]), theil_sen(values[half:]))
        steady = halves[1].median >= FLATTENED * halves[0].median
        if not (steady and all(slope.low > 0 and slope.median >= LEAST_SLOPE for slope in (whole, *halves))):
            if whole.low <= 0 or whole.median < LEAST_SLOPE / 2:
                self._told_at = None
            return None
        if self._told_at is not None and use.private < AGAIN * self._told_at:
            return None
        self._told_at = float(use.private)
        return self._warning(whole, use)

    def _warning(self, slope: Slope, use: MemoryUse) -> str:
        return (
            f"the memory of {self._name} grows by {slope.median / MIB:.2f} MiB per step (at least "
            f"{slope.low / MIB:.2f}) over the last {WINDOW_STEPS} steps and is now {use.private / GIB:.2f} GiB; "
            f"{use.available / GIB:.1f} GiB are free on its machine, full in about "
            f"{use.available / slope.median:,.0f} steps. Save with checkpoint.every and go on with run.resume=auto."
        )


class MemoryWatch:
    """The alarms of all actors: memory of a step -> metrics, and warnings in the log."""

    def __init__(self) -> None:
        self._alarms: dict[str, SlopeAlarm] = {}

    def metrics(self, uses: Mapping[str, MemoryUse]) -> dict[str, float | None]:
        """`uses` by actor ("policy 0", "engine 1", "driver"); GiB by actor, largest slope in MiB per step, warnings."""
        slopes, alarms = [], 0
        for name, use in uses.items():
            alarm = self._alarms.setdefault(name, SlopeAlarm(name))
            warning = alarm.add(use)
            if warning is not None:
                logger.warning("%s", warning)
                alarms += 1
            if alarm.slope is not None:
                slopes.append(alarm.slope)
        found: dict[str, float | None] = {
            f"perf/memory_gib/{name.replace(' ', '_')}": use.private / GIB for name, use in uses.items()
        }
        found["perf/memory_slope_mib"] = max(slopes) / MIB if slopes else None
        found["perf/memory_alarms"] = float(alarms)
        return found
