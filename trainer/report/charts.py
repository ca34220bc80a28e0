"""Sections and tables (`spec.py`) -> Bokeh figures.

Charts over steps share their axis and the crosshair. Colours are names of CSS variables (slot 0..7): figures use the
light theme of assets/page.css, and the page sets the colours of the dark theme. The page (assets/page.js) makes the
legend, the values under the cursor and the toggles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import (
    AdaptiveTicker,
    ColumnDataSource,
    CrosshairTool,
    DataRange1d,
    FixedTicker,
    LogColorMapper,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    TickFormatter,
)
from bokeh.models.annotations import Slope, Span
from bokeh.plotting import figure
from bokeh.transform import dodge, transform

from trainer.report.spec import MAX_PLAIN_POINTS, STEP, Chart, ChartKind, Dash, Section, Series, Table

_MAX_DOTTED_POINTS = 80
"""Maximum of points of a curve for which each point gets a dot."""
_LEAST_SHARE = 0.05
"""Least span of an axis of percent, 5 points: what is smaller looks like a flat line."""
_LEAST_PART = 0.05
"""Least span of an axis of numbers, over the largest of them."""
_LEAST_RATIO = 10.0
"""Least ratio of the ends of a logarithmic axis."""
_EDGE = 0.04
"""Room above 100 % on an axis of the least span, over the span."""
_HEIGHT = 220
_CELLS_HEIGHT = 340
_STYLE = (Path(__file__).resolve().parent / "assets" / "page.css").read_text(encoding="utf-8")


def _colour(name: str) -> str:
    """The CSS variable `--name` in the light theme: charts in the page's own colours are drawn only once."""
    match = re.search(rf"--{name}: (#[0-9a-f]{{6}});", _STYLE)
    if match is None:
        raise KeyError(f"assets/page.css sets no --{name}")
    return match[1]


def draw(sections: Sequence[Section], tables: Mapping[str, Table]) -> dict[str, Any]:
    """Chart id -> Bokeh figure, for every chart.

    Raises:
        KeyError: a series names a missing table or column.
    """
    charts = [chart for section in sections for chart in section.charts]
    sources = {name: _source(name, table) for name, table in tables.items()}
    over_steps = {series.table for chart in charts if chart.x is None for series in chart.series}
    steps_range = _step_range(np.concatenate([np.zeros(0), *(tables[name].columns[STEP] for name in over_steps)]))
    cursor = Span(dimension="height", line_dash="dotted", line_width=1, line_color=_colour("soft"), name="cursor")
    figures = {chart.id: _figure(chart, sources, steps_range, cursor) for chart in charts}
    document = Document()
    with document.models.freeze():  # else Bokeh walks all models again for every figure
        for made in figures.values():
            document.add_root(made)
    return figures


def _source(name: str, table: Table) -> ColumnDataSource:
    """Data of a table for Bokeh; float32 halves the file, and the page shows three digits."""
    columns: dict[str, Any] = {
        key: values.astype(np.int32 if key == STEP else np.float32) for key, values in table.columns.items()
    }
    if STEP in columns:
        columns["step:left"], columns["step:right"] = _bar_edges(columns[STEP])
    if table.labels:
        columns["label"] = list(table.labels)
    return ColumnDataSource(columns, name=f"table:{name}")


def _bar_edges(steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Left and right edge of the bar of each step: with gaps while bars are wide enough, without gaps in a long run."""
    if len(steps) <= MAX_PLAIN_POINTS:
        return steps - 0.43, steps + 0.43
    middles = (steps[1:] + steps[:-1]) / 2
    return np.append(steps[0] - 0.5, middles), np.append(middles, steps[-1] + 0.5)


def _step_range(steps: np.ndarray) -> Range1d:
    low, high = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
    margin = max(0.6, 0.015 * (high - low))
    return Range1d(start=low - margin, end=high + margin, bounds=(low - margin, high + margin), min_interval=2.0)


def _figure(chart: Chart, sources: Mapping[str, ColumnDataSource], steps: Range1d, cursor: Span) -> Any:
    cells = chart.kind is ChartKind.cells
    # window_axis: after zooming into some steps, the other axis fits the values of these steps.
    y_range = _fixed_range(0.0, 1.0) if cells else _value_range(chart, _values(chart, sources))
    x_range: Range1d | DataRange1d = steps
    if cells:
        x_range = _fixed_range(0.0, 1.0)
    elif chart.x is not None and chart.x.between is not None:
        x_range = _fixed_range(*chart.x.between)
    elif chart.x is not None:
        x_range = DataRange1d(only_visible=True, range_padding=0.03)
    made: Any = figure(
        name=chart.id, x_range=x_range, y_range=y_range, y_axis_type="log" if chart.log else "linear",
        height=_CELLS_HEIGHT if cells else _HEIGHT, sizing_mode="stretch_width", tools="xbox_zoom",
        toolbar_location=None, window_axis="x" if chart.x is None else "none", min_border_left=8, min_border_right=10,
        outline_line_color=None,
    )  # fmt: skip
    _style_axes(made, chart, sources)
    if chart.x is None:
        made.add_tools(CrosshairTool(overlay=cursor))
    for index, series in enumerate(chart.series):
        _draw_series(made, chart, series, sources[series.table], name=f"{chart.id}/{index}")
    made.title.update(text=f"{chart.title}{f', {chart.unit}' if chart.unit else ''}", visible=False)
    return made


def _value_range(chart: Chart, values: np.ndarray) -> DataRange1d:
    """The vertical axis of a chart with these finite values [n]."""
    made = DataRange1d(only_visible=True, range_padding=0.08)
    low, high = _axis_ends(chart, values)
    if low is not None:
        made.start = low
    if high is not None:
        made.end = high
    return made


def _axis_ends(chart: Chart, values: np.ndarray) -> tuple[float | None, float | None]:
    """The ends of the vertical axis that do not follow the values [n]: both where they hardly differ."""
    if chart.log:
        values = values[values > 0]
        if not len(values) or values.max() >= _LEAST_RATIO * values.min():
            return None, None
        middle, half = math.sqrt(values.min() * values.max()), math.sqrt(_LEAST_RATIO)
        return middle / half, middle * half
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    least = chart.least_span
    if least is None:
        least = _LEAST_SHARE if chart.form == "percent" else _LEAST_PART * max(abs(low), abs(high))
    if chart.from_zero:
        return 0.0, least if low >= 0 and high < least else None
    if high - low >= least:
        return None, None
    start = (low + high - least) / 2
    if chart.form == "percent" and high <= 1:  # no room above 100 %
        start = min(start, 1 + _EDGE * least - least)
    return start, start + least


def _values(chart: Chart, sources: Mapping[str, ColumnDataSource]) -> np.ndarray:
    """The finite values of all series of a chart, with the ends of their bands."""
    columns = [
        sources[series.table].data[f"{series.key}{end}"]
        for series in chart.series
        for end in ("", *([":low", ":high"] if series.spread else []))
    ]
    values = np.concatenate(columns)
    return values[np.isfinite(values)]


def _fixed_range(low: float, high: float) -> Range1d:
    return Range1d(start=low, end=high, bounds=(low, high))


def _style_axes(made: Any, chart: Chart, sources: Mapping[str, ColumnDataSource]) -> None:
    made.xgrid.grid_line_color = None
    if chart.kind is ChartKind.cells:
        made.ygrid.grid_line_color = None
    made.yaxis.formatter = _formatter(chart, sources)
    if chart.x is None:
        made.xaxis.formatter = NumeralTickFormatter(format="0,0")
        made.xaxis.ticker = AdaptiveTicker(base=10, mantissas=[1, 2, 5], min_interval=1)
    elif chart.x.ticks:
        made.xaxis.ticker = FixedTicker(ticks=[place for place, _ in chart.x.ticks])
        made.xaxis.major_label_overrides = dict(chart.x.ticks)
    else:
        made.xaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
    for axis in (made.xaxis, made.yaxis):
        axis.axis_line_color = None
        axis.minor_tick_line_color = None
        axis.major_tick_line_color = None
        axis.major_label_text_font_size = "11px"
        axis.major_label_text_font = "system-ui, sans-serif"


def _formatter(chart: Chart, sources: Mapping[str, ColumnDataSource]) -> TickFormatter:
    if chart.form == "percent":
        return NumeralTickFormatter(format="0.[0000] %")
    if chart.form == "exponent":
        return PrintfTickFormatter(format="%.1e")
    values = _values(chart, sources)
    low, high = _axis_ends(chart, values)
    span = float(np.ptp(values)) if len(values) else 0.0
    if low is not None and high is not None:
        span = high - low
    # As many decimals as distinguish two neighbouring ticks.
    decimals = max(3, math.ceil(1 - math.log10(span))) if span > 0 else 3
    return NumeralTickFormatter(format=f"0,0.[{'0' * min(decimals, 8)}]")


def _draw_series(made: Any, chart: Chart, series: Series, source: ColumnDataSource, *, name: str) -> None:
    if series.key not in source.data:
        raise KeyError(f"{chart.id}: the table {source.name} has no column {series.key}")
    colour = _colour(f"s{series.slot}")
    match chart.kind:
        case ChartKind.curves:
            _curve(made, STEP if chart.x is None else chart.x.column, series, source, name=name)
        case ChartKind.stack:
            made.quad(
                left="step:left", right="step:right", bottom=f"{series.key}:bottom", top=f"{series.key}:top",
                source=source, name=name, line_color=None, fill_color=colour,
            )  # fmt: skip
        case ChartKind.bars:
            assert chart.x is not None, "bars stand on an axis of their own"
            width = 0.8 / len(chart.series)
            offset = (chart.series.index(series) - (len(chart.series) - 1) / 2) * width
            made.vbar(
                x=dodge(chart.x.column, offset), width=0.92 * width, top=series.key, source=source, name=name,
                line_color=None, fill_color=colour,
            )  # fmt: skip
        case ChartKind.cells:
            _cells(made, series, source, name=name)


def _curve(made: Any, x: str, series: Series, source: ColumnDataSource, *, name: str) -> None:
    """A line; the thin line of the values under it if the table has their moving mean; a band if it has a range."""
    key, colour = series.key, _colour(f"s{series.slot}")
    style: dict[str, Any] = {"source": source, "line_color": colour}
    if series.spread:
        band = {"source": source, "name": f"{name}/spread", "fill_color": colour, "fill_alpha": 0.16}
        made.varea(x, f"{key}:low", f"{key}:high", **band)
    is_smoothed = f"{key}:mean" in source.data
    if is_smoothed:
        made.line(x, key, name=f"{name}/dots", line_width=1, line_alpha=0.3, **style)
    shown = f"{key}:mean" if is_smoothed else key
    made.line(x, shown, name=name, line_width=2, line_join="round", line_dash=series.dash.value, **style)
    few = np.isfinite(source.data[key]).sum() <= _MAX_DOTTED_POINTS
    if few and series.dash is Dash.solid and not series.spread and not is_smoothed:
        made.scatter(x, key, source=source, name=f"{name}/dots", size=5, line_color=None, fill_color=colour)


def _cells(made: Any, series: Series, source: ColumnDataSource, *, name: str) -> None:
    """Squares with `left`, `right`, `bottom`, `top`, and the diagonal on which both engines agree."""
    palette = [_colour(f"ramp{index}") for index in range(8)]
    highest = max(2.0, float(np.max(source.data[series.key], initial=2.0)))
    colours = LogColorMapper(palette=palette, low=1.0, high=highest, name=f"{name}/colours")
    made.quad(
        left="left", right="right", bottom="bottom", top="top", source=source, name=name, line_color=None,
        fill_color=transform(series.key, colours),
    )  # fmt: skip
    made.add_layout(
        Slope(gradient=1, y_intercept=0, line_dash="dotted", line_color=_colour("soft"), name=f"{name}/diagonal")
    )
