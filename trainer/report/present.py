"""Charts of `sections.py` and rows of metrics -> the charts that a run has numbers for, or that compare several runs,
and the tables of their curves: thinned, with moving means and the edges of stacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainer.report.data import Row, RunData, evaluation_rows, is_number, thin
from trainer.report.sections import EVALUATIONS
from trainer.report.spec import MAX_PLAIN_POINTS, NUM_SLOTS, STEP, Chart, ChartKind, Dash, Section, Series, Table

MAX_POINTS = 2000
"""Maximum of drawn steps; a longer run is thinned to the steps with the largest K3."""
ROWS = "rows"
"""Name of the table of every step."""


def present(sections: Sequence[Section], runs: Sequence[RunData]) -> list[Section]:
    """The sections that the runs have numbers for; of several runs, one chart per metric with one curve per run."""
    made_of = _of_run if len(runs) == 1 else _of_runs
    shown = [
        replace(section, charts=tuple(made for chart in section.charts for made in made_of(chart, runs)))
        for section in sections
    ]
    return [section for section in shown if section.charts]


def titled(chart: Chart, series: Series) -> str:
    """The title of `chart` if it shows `series` only."""
    named = len(chart.series) == 1 or series.label in chart.title
    return chart.title if named else f"{chart.title}: {series.label}"


def slot_of(index: int) -> int:
    """Colour of run number `index`."""
    return index % NUM_SLOTS


def dash_of(index: int) -> Dash:
    """Dash pattern of run number `index`: repeated colours get another pattern."""
    return tuple(Dash)[index // NUM_SLOTS % len(Dash)]


def _of_run(chart: Chart, runs: Sequence[RunData]) -> Iterator[Chart]:
    [run] = runs
    series = tuple(one for one in (*_different(chart, runs), *_further(chart, run)) if run.has(one.key))
    nothing_dropped = chart.id == "groups" and len(series) < 2
    if series and not nothing_dropped and (not chart.needs or run.has(chart.needs)):
        yield replace(chart, series=series)


def _different(chart: Chart, runs: Sequence[RunData]) -> Sequence[Series]:
    """The series of a chart that show something: with rewards of 0 and 1, mean reward and accuracy are the same."""
    pairs = {
        "reward": ("reward/mean", "reward/accuracy"),
        "heldout_reward": ("eval/reward_mean", "eval/accuracy_sampled"),
    }
    same = chart.id in pairs and all(run.values(pairs[chart.id][0]) == run.values(pairs[chart.id][1]) for run in runs)
    shown = [one for one in chart.series if not (same and one.key != "reward/mean")]
    return [one for one in shown if not chart.leaves_out_zero or any(any(run.values(one.key)) for run in runs)]


def _further(chart: Chart, run: RunData) -> list[Series]:
    """One line or layer per metric that begins with `chart.each` and is not always 0."""
    if not chart.each:
        return []
    keys = sorted({key for row in run.rows for key in row if key.startswith(chart.each) and row[key]})
    slots = itertools.cycle((1, 3, 7, 4, 5, 6, 0, 2))
    return [
        Series(key, chart.each_label + key.removeprefix(chart.each).replace("_", " "), slot)
        for key, slot in zip(keys, slots, strict=False)
    ]


def _of_runs(chart: Chart, runs: Sequence[RunData]) -> Iterator[Chart]:
    """A chart for every metric of `chart` that a run has; layers become curves."""
    if chart.needs and not any(run.has(chart.needs) for run in runs):
        return
    measured = [series for series in _different(chart, runs) if any(run.has(series.key) for run in runs)]
    for number, metric in enumerate(measured):
        yield replace(
            chart,
            id=chart.id if number == 0 else f"{chart.id}-{number}",
            title=titled(chart, metric),
            note=chart.note if number == 0 else "",
            series=tuple(
                replace(
                    metric,
                    label=run.name,
                    slot=slot_of(index),
                    dash=dash_of(index),
                    table=f"{metric.table}/{index}",
                    run=index,
                )
                for index, run in enumerate(runs)
                if run.has(metric.key)
            ),
            kind=ChartKind.curves if chart.kind is ChartKind.stack else chart.kind,
            wide=False,
            each="",
        )


def run_tables(run: RunData, sections: Sequence[Section], *, suffix: str = "") -> dict[str, Table]:
    """The tables of one run that the charts of `sections` name; `suffix` is appended to their names."""
    charts = [chart for section in sections for chart in section.charts]
    stacks = [[series.key for series in chart.series] for chart in charts if chart.kind is ChartKind.stack]
    rows_of: Mapping[str, Sequence[Row]] = {ROWS: run.steps, EVALUATIONS: evaluation_rows(run.rows)}
    tables = {}
    for name, rows in rows_of.items():
        table = f"{name}{suffix}"
        keys = dict.fromkeys(series.key for chart in charts for series in chart.series if series.table == table)
        tables[table] = metric_table(rows, keys, stacks=stacks)
    return tables


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
