"""RunData -> the charts of a report, drawn with Bokeh.

`SECTIONS` (`sections.py`) says what is shown; `draw` makes one Bokeh figure per chart. Charts share the step
axis and the crosshair. Colours are names of CSS variables (slot 0..7), so that they follow the light and dark theme
of the page; the legend, the values under the cursor and the toggles are made by the page
(trainer/report/assets/page.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    TickFormatter,
)
from bokeh.models.annotations import Span
from bokeh.plotting import figure

from trainer.report.data import Row, RunData, at, evaluation_rows, is_number, thin
from trainer.report.sections import SECTIONS, Chart, Section, Series

MAX_POINTS = 2000
"""Steps drawn at most; a longer run is thinned to the steps with the largest K3."""
MAX_PLAIN_POINTS = 240
"""Beyond this many points a curve is drawn thin, with a moving mean over it."""
_MAX_DOTTED_POINTS = 80
"""Up to this many points each one gets a dot."""
_HEIGHT = 220


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The sections that the run has numbers for, and a Bokeh figure for each chart id."""

    sections: list[Section]
    figures: dict[str, Any]
    num_steps_drawn: int


def draw(run: RunData) -> Drawing:
    """Draw every chart of `SECTIONS` for which the run has a value."""
    sections = [_present(section, run) for section in SECTIONS]
    sections = [section for section in sections if section.charts]
    charts = [chart for section in sections for chart in section.charts]
    tables: dict[str, Sequence[Row]] = {"rows": run.rows, "evaluations": evaluation_rows(run)}
    sources = {
        name: _source(name, rows, [chart for chart in charts if chart.source == name]) for name, rows in tables.items()
    }
    steps = [row["step"] for rows in tables.values() for row in rows]
    x_range = _step_range(steps)
    cursor = Span(dimension="height", line_dash="dotted", line_width=1, name="cursor")
    figures = {chart.id: _figure(chart, sources[chart.source], x_range, cursor) for chart in charts}
    document = Document()
    with document.models.freeze():  # else Bokeh walks all models again for every figure
        for made in figures.values():
            document.add_root(made)
    return Drawing(sections=sections, figures=figures, num_steps_drawn=len(sources["rows"].data["step"]))


def _present(section: Section, run: RunData) -> Section:
    charts = []
    for chart in section.charts:
        wanted = (*chart.series, *_further(chart, run))
        if chart.id == "reward" and run.values("reward/mean") == run.values("reward/accuracy"):
            wanted = wanted[:1]  # rewards of 0 and 1: one line, not two on top of each other
        series = tuple(s for s in wanted if run.has(s.key))
        nothing_dropped = chart.id == "groups" and len(series) < 2
        if series and not nothing_dropped:
            charts.append(replace(chart, series=series))
    assumptions = at(run.accounting, "assumptions") if any(chart.id == "limits" for chart in charts) else None
    text = " ".join([section.text, *(f"{line}." for line in assumptions or ())])
    return replace(section, text=text, charts=tuple(_paired(charts)))


def _paired(charts: Sequence[Chart]) -> list[Chart]:
    """Two charts stand side by side; one without a neighbour takes the whole width."""
    placed: list[Chart] = []
    alone = False
    for index, chart in enumerate(charts):
        alone = not chart.wide and not alone
        last_of_row = index + 1 == len(charts) or charts[index + 1].wide
        placed.append(replace(chart, wide=chart.wide or (alone and last_of_row)))
        alone = alone and not last_of_row
    return placed


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


def _source(name: str, rows: Sequence[Row], charts: Sequence[Chart]) -> ColumnDataSource:
    """The columns of all charts; a missing value is NaN, which leaves a gap (0 in a stack).

    float32 halves the file; the page shows three digits. Moving means are taken before the rows are thinned.
    """
    kept = thin(rows, MAX_POINTS)
    steps = np.array([rows[index]["step"] for index in kept], dtype=np.int32)
    columns: dict[str, np.ndarray] = {"step": steps, **_bar_edges(steps)}
    for chart in charts:
        bottom = np.zeros(len(kept))
        for series in chart.series:
            values = np.array([float(row[series.key]) if is_number(row, series.key) else np.nan for row in rows])
            columns[series.key] = values[kept].astype(np.float32)
            if chart.stacked:
                top = bottom + np.nan_to_num(values[kept]).clip(min=0)
                columns[f"{series.key}:bottom"] = bottom.astype(np.float32)
                columns[f"{series.key}:top"] = top.astype(np.float32)
                bottom = top
            elif len(rows) > MAX_PLAIN_POINTS:
                columns[f"{series.key}:mean"] = _moving_mean(values)[kept].astype(np.float32)
    return ColumnDataSource(columns, name=name)


def _bar_edges(steps: np.ndarray) -> dict[str, np.ndarray]:
    """Left and right edge of the bar of each step: apart while they can be told apart, touching in a long run."""
    if len(steps) <= MAX_PLAIN_POINTS:
        return {"step:left": steps - 0.43, "step:right": steps + 0.43}
    middles = (steps[1:] + steps[:-1]) / 2
    return {"step:left": np.append(steps[0] - 0.5, middles), "step:right": np.append(middles, steps[-1] + 0.5)}


def _moving_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over a fiftieth of the points, over what is present; NaN where nothing is."""
    width = max(3, len(values) // 50)
    present = np.isfinite(values)
    window = np.ones(width)
    total = np.convolve(np.where(present, values, 0.0), window, mode="same")
    count = np.convolve(present.astype(float), window, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1.0), np.nan)


def _step_range(steps: Sequence[int]) -> Range1d:
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    margin = max(0.6, 0.015 * (high - low))
    return Range1d(start=low - margin, end=high + margin, bounds=(low - margin, high + margin), min_interval=2.0)


def _figure(chart: Chart, source: ColumnDataSource, x_range: Range1d, cursor: Span) -> Any:
    # window_axis: after zooming into some steps, the other axis fits the values of these steps.
    y_range = DataRange1d(only_visible=True, range_padding=0.08)
    if chart.from_zero and not chart.log:
        y_range.start = 0
    made = figure(
        name=chart.id, x_range=x_range, y_range=y_range, y_axis_type="log" if chart.log else "linear",
        height=_HEIGHT, sizing_mode="stretch_width", tools="xbox_zoom", toolbar_location=None,
        window_axis="x", min_border_left=8, min_border_right=10, outline_line_color=None,
    )  # fmt: skip
    made.add_tools(CrosshairTool(overlay=cursor))
    made.xgrid.grid_line_color = None
    made.xaxis.formatter = NumeralTickFormatter(format="0,0")
    made.xaxis.ticker = AdaptiveTicker(base=10, mantissas=[1, 2, 5], min_interval=1)
    made.yaxis.formatter = _formatter(chart, source)
    for axis in (made.xaxis, made.yaxis):
        axis.axis_line_color = None
        axis.minor_tick_line_color = None
        axis.major_tick_line_color = None
        axis.major_label_text_font_size = "11px"
        axis.major_label_text_font = "system-ui, sans-serif"
    for index, series in enumerate(chart.series):
        name = f"{chart.id}/{index}"
        if chart.stacked:
            _layer(made, series, source, name=name)
        else:
            _line(made, series, source, name=name)
    return made


def _formatter(chart: Chart, source: ColumnDataSource) -> TickFormatter:
    if chart.form == "percent":
        return NumeralTickFormatter(format="0.[0000] %")
    if chart.form == "number":
        return NumeralTickFormatter(format="0,0.[000]")
    values = np.concatenate([source.data[series.key] for series in chart.series])
    values = values[np.isfinite(values) & (values > 0)]
    # On a short log axis the ticks are so close that one decimal would write the same number twice.
    short = chart.log and len(values) > 0 and values.max() < 2 * values.min()
    return PrintfTickFormatter(format="%.3e" if short else "%.1e")


def _line(made: Any, series: Series, source: ColumnDataSource, *, name: str) -> None:
    dash = "dashed" if series.dashed else "solid"
    if f"{series.key}:mean" in source.data:
        made.line("step", series.key, source=source, name=f"{name}/dots", line_width=1, line_alpha=0.3)
        made.line("step", f"{series.key}:mean", source=source, name=name, line_width=2, line_dash=dash)
        return
    made.line("step", series.key, source=source, name=name, line_width=2, line_join="round", line_dash=dash)
    if np.isfinite(source.data[series.key]).sum() <= _MAX_DOTTED_POINTS and not series.dashed:
        made.scatter("step", series.key, source=source, name=f"{name}/dots", size=5, line_color=None)


def _layer(made: Any, series: Series, source: ColumnDataSource, *, name: str) -> None:
    made.quad(
        left="step:left", right="step:right", bottom=f"{series.key}:bottom", top=f"{series.key}:top", source=source,
        name=name, line_color=None,
    )  # fmt: skip
