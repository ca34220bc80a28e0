"""Files of the runs of a study -> a CellResult per run: its curves, and numbers over all its steps.

ranking.py ranks and page.py shows the results. Does not import torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.report.data import Row, evaluation_rows, is_number, rows_by_step
from trainer.report.sections import SECTIONS
from trainer.report.spec import Chart
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import METRICS_FILE
from trainer.study.grid import Cell, Study
from trainer.study.study_dir import CellRecord, Stage, stage_of

_LAST_STEPS = 5
"""Number of last steps in a mean over the last steps of a run."""


CHARTS: Mapping[str, Chart] = {
    chart.id: chart
    for section in SECTIONS
    for chart in section.charts
    if chart.id in ("heldout", "reward", "k3", "worst", "entropy", "grad", "ess")
}
"""The charts of a report that a study has too, each for its first metric, by the ids that study.json uses."""

Points = Sequence[tuple[int, float]]
"""(step, value) of one metric, by ascending step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """A cell of the study, as study.json has it; numbers are None where the run has none."""

    name: str
    mode: str
    precision: str
    seed: int
    stage: Stage
    last_step: int
    num_steps: int
    seconds: float
    error: str
    heldout_first: float | None
    """Held-out accuracy of the untouched policy."""
    heldout_last: float | None
    """Held-out accuracy after the last step, by which modes are ranked; None unless the run ended."""
    kept_of_best: float | None
    """heldout_last over the largest held-out accuracy of the run, in [0, 1]; None unless the run ended."""
    collapsed: bool
    """True if heldout_last is more than study.collapse_drop below the best of the run."""
    k3_max: float | None
    entropy_last: float | None
    """Mean of the last five steps."""
    grad_norm_max: float | None
    ess_min: float | None
    step_s_median: float | None
    curves: Mapping[str, Points]
    """Points by the ids of CHARTS; step 0 of heldout belongs to the untouched policy."""

    @property
    def finished(self) -> bool:
        return self.stage is Stage.finished


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and range of a number over the seeds."""

    mean: float
    low: float
    high: float
    count: int


def read_results(study: Study, study_dir: Path, records: Mapping[str, CellRecord]) -> list[CellResult]:
    """Read the files of every cell, in the order of the study; a cell without recorded steps has empty curves."""
    results = []
    for cell in study.cells:
        path = study_dir / cell.name / METRICS_FILE
        rows = rows_by_step(read_rows(path)) if path.is_file() else []
        stage, record = stage_of(study_dir, cell), records.get(cell.name, CellRecord())
        results.append(cell_result(cell, rows, stage, record, collapse_drop=study.config.collapse_drop))
    return results


def cell_result(
    cell: Cell, rows: Sequence[Row], stage: Stage, record: CellRecord, *, collapse_drop: float
) -> CellResult:
    """The result of a cell from the rows of its metrics."""
    evaluated, seconds_of_steps = evaluation_rows(rows), _values(_points(rows, "time/step_s"))
    curves = {
        name: _points(evaluated if name == "heldout" else rows, chart.series[0].key) for name, chart in CHARTS.items()
    }
    heldout, entropy = _values(curves["heldout"]), _values(curves["entropy"])
    last = heldout[-1] if heldout and stage is Stage.finished else None
    best = max(heldout, default=0.0)
    return CellResult(
        name=cell.name,
        mode=cell.mode,
        precision=cell.precision,
        seed=cell.seed,
        stage=stage,
        last_step=max((step for points in curves.values() for step, _ in points), default=0),
        num_steps=cell.num_steps,
        seconds=record.seconds,
        error=record.error,
        heldout_first=heldout[0] if heldout else None,
        heldout_last=last,
        kept_of_best=None if last is None else last / best if best else 1.0,
        collapsed=last is not None and last < best - collapse_drop,
        k3_max=max(_values(curves["k3"]), default=None),
        entropy_last=statistics.fmean(entropy[-_LAST_STEPS:]) if entropy else None,
        grad_norm_max=max(_values(curves["grad"]), default=None),
        ess_min=min(_values(curves["ess"]), default=None),
        step_s_median=statistics.median(seconds_of_steps) if seconds_of_steps else None,
        curves=curves,
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and range of the values that are not None; None without a value."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return None
    return Spread(mean=statistics.fmean(numbers), low=min(numbers), high=max(numbers), count=len(numbers))


def _points(rows: Iterable[Row], key: str) -> Points:
    return [(row["step"], float(row[key])) for row in rows if is_number(row, key)]


def _values(points: Points) -> list[float]:
    return [value for _, value in points]
