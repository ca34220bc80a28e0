"""The charts of `sections.py` -> the charts that a run has numbers for, or that compare several runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainer.report.data import RunData
from trainer.report.spec import NUM_SLOTS, Chart, ChartKind, Dash, Section, Series


def present(sections: Sequence[Section], run: RunData) -> list[Section]:
    """The sections that a run has numbers for."""
    shown = [replace(section, charts=tuple(_of_run(section.charts, run))) for section in sections]
    return [section for section in shown if section.charts]


def compared(sections: Sequence[Section], runs: Sequence[RunData]) -> list[Section]:
    """One chart per metric with one curve per run; charts of a single moment of one run are left out."""
    shown = [
        replace(section, charts=tuple(made for chart in section.charts for made in _of_runs(chart, runs)))
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


def _of_run(charts: Sequence[Chart], run: RunData) -> Iterator[Chart]:
    for chart in charts:
        series = tuple(one for one in (*_different(chart, [run]), *_further(chart, run)) if run.has(one.key))
        nothing_dropped = chart.id == "groups" and len(series) < 2
        if series and not nothing_dropped and (not chart.needs or run.has(chart.needs)):
            yield replace(chart, series=series)


def _different(chart: Chart, runs: Sequence[RunData]) -> Sequence[Series]:
    """The series of a chart without duplicates: with rewards of 0 and 1, mean reward and accuracy are the same."""
    same = chart.id == "reward" and all(run.values("reward/mean") == run.values("reward/accuracy") for run in runs)
    return chart.series[:1] if same else chart.series


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
