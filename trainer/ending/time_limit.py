"""The time that a run has: run.max_hours, and the deadline of the job that it runs in.

A run leaves after the last step that fits: `trainer/run/loop.py` asks after each step. The deadline of a job is a Unix
time and is read once; from then on only the monotonic clock counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from algorithms.config import Problem
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import GO_ON
from trainer.ending.termination import RunTerminated
from trainer.text.plain import duration

VARIABLES = ("PARITY_DEADLINE", "SLURM_JOB_END_TIME")
"""Environment variables with the Unix time in seconds at which the job is killed; the first that is set counts."""
MARGIN_S = 60.0
"""Seconds between the end of the last save and the deadline: workers, W&B and the report end in that time."""


class OutOfTime(RunTerminated):
    """The run saved and left, because another step would not end before its deadline."""

    def __init__(self, *, step: int, reason: str) -> None:
        """`step` is the last completed step; it was saved."""
        Exception.__init__(self, f"out of time after step {step}: {reason}")
        self.step = step
        self.exit_code = GO_ON


class TimeLimit:
    """Decides after each step whether another one fits; never ends a run before its first step."""

    def __init__(self, left_s: float | None, source: str) -> None:
        """`left_s` is the time until the deadline; None means no deadline. `source` names the key or the variable."""
        self._deadline = None if left_s is None else time.monotonic() + left_s
        self._source = source
        self._step_s = 0.0
        self._save_s: float | None = None

    @property
    def line(self) -> str:
        """Line for the user at the start; empty without a deadline."""
        if self._deadline is None:
            return ""
        left_s = self._deadline - time.monotonic()
        moment = f"{datetime.fromtimestamp(time.time() + left_s):%Y-%m-%d %H:%M}"
        return f"time: {self._source} ends this run at {moment}, in {duration(left_s)}; it saves and leaves before that"

    @property
    def pace(self) -> str:
        """End of a sentence about a step: how long steps take; empty before the first one."""
        return f" (a step takes up to {duration(self._step_s)})" if self._step_s else ""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the block, which saves."""
        began = time.monotonic()
        yield
        self._save_s = max(self._save_s or 0.0, time.monotonic() - began)

    def after(self, step: int, *, step_s: float) -> OutOfTime | None:
        """Decide after `step`, which took `step_s` seconds; None if another step fits, with its evaluation and save."""
        self._step_s = max(self._step_s, step_s)
        if self._deadline is None:
            return None
        save_s = self._step_s if self._save_s is None else self._save_s  # before the first save nobody knows
        left_s = self._deadline - time.monotonic()
        if self._step_s + save_s + MARGIN_S <= left_s:
            return None
        takes = f"a step and a save take up to {duration(self._step_s + save_s)}"
        return OutOfTime(step=step, reason=f"{duration(max(0.0, left_s))} are left until {self._source}, {takes}")


def time_limit(config: TrainConfig) -> TimeLimit:
    """The earlier of run.max_hours from now and the deadline of the job; none if the run saves nothing."""
    limits = []
    if config.run.max_hours is not None:
        limits.append((3600 * config.run.max_hours, "run.max_hours"))
    if (variable := job_variable()) is not None:
        limits.append((float(os.environ[variable]) - time.time(), variable))
    if not limits or not config.checkpoint.every:
        return TimeLimit(None, "")
    return TimeLimit(*min(limits))


def job_problems() -> list[Problem]:
    """The Problem of a deadline in the environment that is no time, or has passed."""
    variable = job_variable()
    if variable is None:
        return []
    value = os.environ[variable]
    try:
        left_s = float(value) - time.time()
    except ValueError:
        left_s = float("nan")
    if left_s > 0:
        return []
    rule = "must be a Unix time in seconds that has not passed, the end of the job"
    return [
        Problem(key=variable, rule=rule, value=value, remedy=f"For example {variable}=$(($(date +%s) + 4 * 3600)).")
    ]


def job_variable() -> str | None:
    """The variable of the environment that says when the job of this process ends; None without one."""
    return next((name for name in VARIABLES if os.environ.get(name)), None)
