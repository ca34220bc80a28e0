"""Files of the runs of a study -> the compared results: numbers per cell, and a curve per metric, mode and precision.

    CellResult  one run: its rows, and numbers over all its steps
    Curve       one metric over the steps: mean, least and largest value of the seeds
ranking.py ranks and page.py draws the results. Does not import torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.report.data import Row, RunData, evaluation_rows, is_number, load_run
from trainer.study.cells import Stage, Standing
from trainer.study.run import CellRecord

SCORE = "eval/accuracy"
"""Metric by which modes are ranked: greedy accuracy on the held-out set after the last step."""
_LAST_STEPS = 5
"""Number of last steps in a mean over the last steps of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A curve of the page."""

    key: str
    """Name in metrics.jsonl."""
    id: str
    """Column of study.csv."""
    title: str
    unit: str = ""
    form: str = "number"
    """number, percent or exponent."""
    log: bool = False
    from_zero: bool = False
    evaluated: bool = False
    """True for a metric of the held-out set: measured at some steps only, and before the first step."""


METRICS = (
    Metric(key=SCORE, id="heldout", title="Held-out accuracy, greedy", form="percent", evaluated=True),
    Metric(key="reward/mean", id="reward", title="Reward of the training samples", from_zero=True),
    Metric(key="mismatch/k3", id="k3", title="Mismatch K3", unit="nats per token", form="exponent", log=True),
    Metric(key="policy/entropy", id="entropy", title="Policy entropy", unit="nats per token", from_zero=True),
    Metric(key="optim/grad_norm", id="grad_norm", title="Gradient norm", unit="before clipping", from_zero=True),
    Metric(
        key="mismatch/ess/raw_token",
        id="ess",
        title="Effective sample size",
        unit="raw weights, share of tokens",
        form="percent",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """A cell of the study; numbers are None where the run has none."""

    name: str
    mode: str
    precision: str
    seed: int
    stage: Stage
    last_step: int
    num_steps: int
    seconds: float
    error: str
    rows: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    """The rows with a held-out accuracy; step 0 belongs to the untouched policy."""

    @property
    def finished(self) -> bool:
        return self.stage is Stage.finished

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return _values(self.rows, "reward/mean")

    @property
    def scores(self) -> list[float]:
        """Held-out accuracies; the first belongs to the untouched policy."""
        return _values(self.evaluations, SCORE)

    @property
    def first_score(self) -> float | None:
        return self.scores[0] if self.scores else None

    @property
    def best_score(self) -> float | None:
        return max(self.scores, default=None)

    @property
    def score(self) -> float | None:
        """Held-out accuracy after the last step; None unless the run ended."""
        return self.scores[-1] if self.scores and self.finished else None

    @property
    def worst_k3(self) -> float | None:
        return max(_values(self.rows, "mismatch/k3"), default=None)

    @property
    def median_k3(self) -> float | None:
        return _median(_values(self.rows, "mismatch/k3"))

    @property
    def largest_gradient(self) -> float | None:
        return max(_values(self.rows, "optim/grad_norm"), default=None)

    @property
    def least_ess(self) -> float | None:
        return min(_values(self.rows, "mismatch/ess/raw_token"), default=None)

    @property
    def last_entropy(self) -> float | None:
        """Mean entropy of the last steps."""
        return _mean(_values(self.rows, "policy/entropy")[-_LAST_STEPS:])

    @property
    def last_reward(self) -> float | None:
        """Mean reward of the last steps."""
        return _mean(self.rewards[-_LAST_STEPS:])

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step."""
        return _median(_values(self.rows, "time/step_s"))

    @property
    def skipped_updates(self) -> float:
        """Number of optimizer steps whose gradient was not finite."""
        return sum(_values(self.rows, "optim/skipped_steps"))

    def collapsed(self, drop: float) -> bool:
        """True if the last held-out accuracy is more than `drop` below the best."""
        return self.score is not None and self.best_score is not None and self.score < self.best_score - drop

    def steps_to(self, target: float) -> int | None:
        """The first evaluated step with a held-out accuracy of `target`; None if no step has it."""
        reached = (row["step"] for row in self.evaluations if is_number(row, SCORE) and row[SCORE] >= target)
        return next(reached, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One metric of one mode and precision over the steps."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    """Minimum over the seeds."""
    high: list[float]
    counts: list[int]
    """Number of seeds that have the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and range of a number over the seeds."""

    mean: float
    low: float
    high: float
    count: int


def read_result(study_dir: Path, standing: Standing, record: CellRecord) -> CellResult:
    """Read a cell's files; a cell without recorded steps has no rows."""
    cell = standing.cell
    run: RunData | None = None
    if (study_dir / cell.name / "metrics.jsonl").is_file():
        run = load_run(study_dir / cell.name)
    return CellResult(
        name=cell.name,
        mode=cell.mode,
        precision=cell.precision,
        seed=cell.seed,
        stage=standing.stage,
        last_step=standing.last_step,
        num_steps=cell.config.run.num_steps,
        seconds=record.seconds,
        error=record.error,
        rows=() if run is None else run.rows,
        evaluations=() if run is None else evaluation_rows(run),
    )


def curve(results: Iterable[CellResult], metric: Metric) -> Curve:
    """The metric over the steps, over all given runs; a failed run counts up to its last step."""
    by_step: dict[int, list[float]] = {}
    for result in results:
        for row in result.evaluations if metric.evaluated else result.rows:
            if is_number(row, metric.key):
                by_step.setdefault(row["step"], []).append(float(row[metric.key]))
    steps = sorted(by_step)
    return Curve(
        steps=steps,
        mean=[statistics.fmean(by_step[step]) for step in steps],
        low=[min(by_step[step]) for step in steps],
        high=[max(by_step[step]) for step in steps],
        counts=[len(by_step[step]) for step in steps],
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and range of the values that are not None; None without a value."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    return Spread(mean=statistics.fmean(found), low=min(found), high=max(found), count=len(found))


def _values(rows: Iterable[Row], key: str) -> list[float]:
    return [float(row[key]) for row in rows if is_number(row, key)]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
