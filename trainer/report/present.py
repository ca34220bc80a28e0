"""The charts of `sections.py` -> the charts that a run has numbers for, or that compare several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainer.report.data import RunData
from trainer.report.spec import NUM_SLOTS, Chart, Dash, Kind, Section, Series


def present(sections: Sequence[Section], run: RunData) -> list[Section]:
    """The sections that a run has numbers for."""
    found = [_of_run(section, run) for section in sections]
    return [section for section in found if section.charts]


def compared(sections: Sequence[Section], runs: Sequence[RunData]) -> list[Section]:
    """One chart per metric with one curve per run; charts of a single moment of one run are left out."""
    found = []
    for section in sections:
        charts = [made for chart in section.charts for made in _of_runs(chart, runs)]
        if charts:
            found.append(replace(section, charts=tuple(paired(charts))))
    return found


def run_series(runs: Sequence[RunData], series: Series, *, table: str) -> Iterator[Series]:
    """`series` once for each run, with the run's colour, from the table `<table>/<number of the run>`."""
    for index, run in enumerate(runs):
        yield replace(
            series, label=run.name, slot=slot_of(index), dash=dash_of(index), table=f"{table}/{index}", run=index
        )  # fmt: skip


def slot_of(index: int) -> int:
    """Colour of run number `index`."""
    return index % NUM_SLOTS


def dash_of(index: int) -> Dash:
    """Dash pattern of run number `index`: repeated colours get another pattern."""
    return tuple(Dash)[index // NUM_SLOTS % len(Dash)]


def paired(charts: Sequence[Chart]) -> list[Chart]:
    """Place charts in rows of two; a chart without a neighbour takes the whole width."""
    placed: list[Chart] = []
    alone = False
    for index, chart in enumerate(charts):
        alone = not chart.wide and not alone
        last_of_row = index + 1 == len(charts) or charts[index + 1].wide
        placed.append(replace(chart, wide=chart.wide or (alone and last_of_row)))
        alone = alone and not last_of_row
    return placed


def _of_run(section: Section, run: RunData) -> Section:
    charts = []
    for chart in section.charts:
        wanted = (*_different(chart, [run]), *_further(chart, run))
        series = tuple(one for one in wanted if run.has(one.key))
        nothing_dropped = chart.id == "groups" and len(series) < 2
        says_something = not chart.needs or run.has(chart.needs)
        if series and says_something and not nothing_dropped:
            charts.append(replace(chart, series=series))
    return replace(section, charts=tuple(paired(charts)))


def _different(chart: Chart, runs: Sequence[RunData]) -> Sequence[Series]:
    """The series of a chart without duplicates: with rewards of 0 and 1, mean reward and accuracy are the same."""
    same = chart.id == "reward" and all(run.values("reward/mean") == run.values("reward/accuracy") for run in runs)
    return chart.series[:1] if same else chart.series


def _further(chart: Chart, run: RunData) -> list[Series]:
    """One line or layer per metric that begins with `chart.each` and is not always 0."""
    if not chart.each:
        return []
    keys = sorted({key for row in run.rows for key in row if key.startswith(chart.each) and row[key]})
    slots = (1, 3, 7, 4, 5, 6, 0, 2)
    return [
        Series(
            key=key,
            label=chart.each_label + key.removeprefix(chart.each).replace("_", " "),
            slot=slots[i % len(slots)],
        )
        for i, key in enumerate(keys)
    ]


def _of_runs(chart: Chart, runs: Sequence[RunData]) -> Iterator[Chart]:
    """A chart for every metric of `chart` that a run has; layers become curves."""
    if chart.needs and not any(run.has(chart.needs) for run in runs):
        return
    found = [series for series in _different(chart, runs) if any(run.has(series.key) for run in runs)]
    for number, series in enumerate(found):
        having = [one for one in run_series(runs, series, table=series.table) if runs[one.run or 0].has(series.key)]
        named = len(chart.series) == 1 or series.label in chart.title
        yield replace(
            chart,
            id=chart.id if number == 0 else f"{chart.id}-{number}",
            title=chart.title if named else f"{chart.title}: {series.label}",
            series=tuple(having),
            kind=Kind.curves if chart.kind is Kind.stack else chart.kind,
            wide=False,
            each="",
        )
