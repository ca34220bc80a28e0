"""The early warning: a one-sided CUSUM of log K3 against its own running median. Pure functions of the steps so far.

    z = (log K3 - median of the window) / spread of the window, within +-MAX_Z
    sum = max(0, sum + z - slack); K3 rises from sum > alarm until sum <= alarm / 2

The window holds the last steps in which K3 did not rise, so that a rise does not become its own history. The spread
is 1.4826 x the median absolute deviation, at least LEAST_SPREAD. The logarithm, because K3 is positive and spreads by
factors; the median, because a single sample with one unlucky token moves K3 of a step tenfold; the bound on z, so that
no two such steps are an alarm. CUSUM: Page, "Continuous Inspection Schemes", Biometrika 41 (1954).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from trainer.config.guard import RiseConfig

LEAST_SPREAD = 0.25
"""Of log K3: changes by less than a quarter are noise even where K3 has stood still."""
MAX_Z = 4.0
MAD_TO_SIGMA = 1.4826
"""Of a normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RiseState:
    """What the early warning remembers, as JSON values."""

    window: tuple[float, ...] = ()
    """log K3 of the last steps that did not rise."""
    total: float = 0.0
    """The CUSUM."""
    rises: bool = False


def after_step(config: RiseConfig, state: RiseState, k3: float | None) -> RiseState:
    """The state after a step with this K3; an unknown K3, or half a window, changes nothing but the window."""
    if k3 is None or config.window_steps is None:
        return state
    value = math.log(max(k3, config.least))
    state = _judged(config, state, value)
    if state.rises:
        return state
    return replace(state, window=(*state.window, value)[-config.window_steps :])


def _judged(config: RiseConfig, state: RiseState, value: float) -> RiseState:
    assert config.window_steps is not None
    if len(state.window) < config.window_steps // 2:
        return state
    middle = median(state.window)
    spread = max(LEAST_SPREAD, MAD_TO_SIGMA * median(abs(other - middle) for other in state.window))
    z = max(-MAX_Z, min(MAX_Z, (value - middle) / spread))
    # Bounded above, so that the end of a long rise is seen as soon as that of a short one.
    total = min(2 * config.alarm, max(0.0, state.total + z - config.slack))
    rises = total > (config.alarm / 2 if state.rises else config.alarm)
    return replace(state, total=total, rises=rises)
