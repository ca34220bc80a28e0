"""Rows of metrics -> the tables of curves: thinned, with moving means and the edges of stacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from trainer.report.data import Row, RunData, evaluation_rows, is_number, thin
from trainer.report.sections import EVALUATIONS
from trainer.report.spec import MAX_PLAIN_POINTS, STEP, Chart, ChartKind, Section, Table

MAX_POINTS = 2000
"""Maximum of drawn steps; a longer run is thinned to the steps with the largest K3."""
ROWS = "rows"
"""Name of the table of every step."""


def run_tables(run: RunData, sections: Sequence[Section], *, suffix: str = "") -> dict[str, Table]:
    """The tables of one run that the charts of `sections` name; `suffix` is appended to their names."""
    charts = [chart for section in sections for chart in section.charts]
    rows_of: Mapping[str, Sequence[Row]] = {ROWS: run.rows, EVALUATIONS: evaluation_rows(run.rows)}
    return {
        f"{name}{suffix}": metric_table(rows, _keys(charts, f"{name}{suffix}"), stacks=_stacks(charts))
        for name, rows in rows_of.items()
    }


def _keys(charts: Sequence[Chart], name: str) -> list[str]:
    """Every column that a chart takes from the table, in a fixed order."""
    keys: dict[str, None] = {}
    for chart in charts:
        for series in chart.series:
            if series.table == name:
                keys[series.key] = None
    return list(keys)


def _stacks(charts: Sequence[Chart]) -> list[list[str]]:
    return [[series.key for series in chart.series] for chart in charts if chart.kind is ChartKind.stack]


def metric_table(rows: Sequence[Row], keys: Collection[str], *, stacks: Sequence[Sequence[str]] = ()) -> Table:
    """The columns `keys` of `rows`, a missing value as NaN.

    The table also has, for a long run, `<key>:mean`, the moving mean over all rows before thinning; and for each key of
    a stack `<key>:bottom` and `<key>:top`, where a missing value has no height.
    """
    kept = thin(rows, MAX_POINTS)
    columns: dict[str, np.ndarray] = {STEP: np.array([rows[index][STEP] for index in kept], dtype=np.int32)}
    stacked = {key for stack in stacks for key in stack}
    for key in keys:
        values = np.array([float(row[key]) if is_number(row, key) else np.nan for row in rows])
        columns[key] = values[kept]
        if len(rows) > MAX_PLAIN_POINTS and key not in stacked:
            columns[f"{key}:mean"] = _moving_mean(values)[kept]
    for stack in stacks:
        bottom = np.zeros(len(kept))
        for key in (key for key in stack if key in columns):
            top = bottom + np.nan_to_num(columns[key]).clip(min=0)
            columns[f"{key}:bottom"], columns[f"{key}:top"] = bottom, top
            bottom = top
    return Table(columns=columns, labels=tuple(f"step {step}" for step in columns[STEP]))


def _moving_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over a fiftieth of the points, ignoring NaN; NaN where all points are NaN."""
    width = max(3, len(values) // 50)
    present = np.isfinite(values)
    window = np.ones(width)
    total = np.convolve(np.where(present, values, 0.0), window, mode="same")
    count = np.convolve(present.astype(float), window, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1.0), np.nan)
