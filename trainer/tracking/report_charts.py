"""RunData -> the charts of a report: a table of specifications, drawn with Bokeh.

`SECTIONS` says what is shown; `draw` makes one Bokeh figure per chart. Charts share the step axis and the crosshair.
Colours are names of CSS variables (slot 0..7), so that they follow the light and dark theme of the page; the legend,
the values under the cursor and the toggles are made by the page (trainer/tracking/report_assets/page.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

from trainer.tracking.report_data import Row, RunData, evaluation_rows, is_number, thin

MAX_POINTS = 2000
"""Steps drawn at most; a longer run is thinned to the steps with the largest K3."""
MAX_PLAIN_POINTS = 240
"""Beyond this many points a curve is drawn thin, with a moving mean over it."""
_MAX_DOTTED_POINTS = 80
"""Up to this many points each one gets a dot."""
_HEIGHT = 220


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line, or one layer of a stack."""

    key: str
    """Metric."""
    label: str
    slot: int
    """Colour 0..7 of the page."""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart: what it shows and how."""

    id: str
    title: str
    series: tuple[Series, ...]
    unit: str = ""
    form: str = "number"
    """Of axis and values: number, percent or exponent."""
    log: bool = False
    from_zero: bool = False
    """Whether the axis starts at 0."""
    stacked: bool = False
    source: str = "rows"
    """"rows" (every step) or "evaluations"."""
    wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    text: str
    charts: tuple[Chart, ...] = field(default_factory=tuple)


_DROPPED = "rollout/groups_dropped/"
_PHASES = ("rollout", "reward", "pack", "train", "sync", "log", "unattributed", "eval")
"""Layers of the time chart from the bottom up. Evaluation is on top: hiding it leaves no gap."""

SECTIONS: tuple[Section, ...] = (
    Section(
        title="Learning",
        text="Does the policy get better, on the prompts it trains on and on problems it never sees?",
        charts=(
            Chart(
                id="heldout", title="Held-out accuracy", form="percent", source="evaluations", from_zero=True,
                series=(
                    Series(key="eval/accuracy", label="greedy", slot=0),
                    Series(key="eval/accuracy_sampled", label="sampled", slot=1),
                ),
            ),
            Chart(
                id="reward", title="Reward of the training samples",
                series=(
                    Series(key="reward/mean", label="mean reward", slot=0),
                    Series(key="reward/accuracy", label="share correct", slot=2),
                ),
            ),
        ),
    ),
    Section(
        title="Rollout-training mismatch",
        text="How far the trainer's probabilities are from those of the engine that sampled the tokens. K3 estimates "
        "KL(rollout\u00a0\u2016\u00a0trainer) per response token; the floor is what the rounding of the output head "
        "alone gives.",
        charts=(
            Chart(
                id="k3", title="Mismatch K3", unit="nats per token", form="exponent", log=True,
                series=(
                    Series(key="mismatch/k3", label="K3", slot=0),
                    Series(key="mismatch/k3_floor", label="floor", slot=6, dashed=True),
                ),
            ),
            Chart(
                id="worst", title="Worst token", form="exponent", log=True,
                series=(
                    Series(key="mismatch/k3_max", label="largest K3", slot=1),
                    Series(key="mismatch/prob_diff_max", label="largest probability difference", slot=3),
                ),
            ),
            Chart(
                id="delta", title="Log-ratio per token", form="exponent", log=True, unit="nats",
                series=(Series(key="mismatch/abs_logdiff_mean", label="mean |log-ratio|", slot=4),),
            ),
            Chart(
                id="ess", title="Effective sample size", form="percent",
                series=(
                    Series(key="mismatch/ess/raw_token", label="raw weights", slot=0),
                    Series(key="mismatch/ess/applied_token", label="applied weights", slot=2),
                    Series(key="mismatch/kept_frac", label="tokens kept", slot=1),
                ),
            ),
            Chart(
                id="weights", title="Tokens whose weight was cut", form="percent", from_zero=True,
                series=(Series(key="mismatch/is/clip_frac_hi", label="cut", slot=3),),
            ),
        ),
    ),
    Section(
        title="Optimisation",
        text="Entropy that falls to zero means the policy has stopped exploring; jumps of the gradient norm come "
        "before most collapses.",
        charts=(
            Chart(
                id="entropy", title="Policy entropy", unit="nats per token", from_zero=True,
                series=(Series(key="policy/entropy", label="entropy", slot=2),),
            ),
            Chart(
                id="grad", title="Gradient norm", from_zero=True,
                series=(Series(key="optim/grad_norm", label="before clipping", slot=4),),
            ),
            Chart(
                id="clip", title="Tokens at the PPO clip", form="percent", from_zero=True,
                series=(
                    Series(key="loss/clip_frac_high", label="above", slot=1),
                    Series(key="loss/clip_frac_low", label="below", slot=0),
                ),
            ),
            Chart(id="loss", title="Policy loss", series=(Series(key="loss/policy", label="loss", slot=5),)),
            Chart(
                id="lr", title="Learning rate", form="exponent", from_zero=True,
                series=(Series(key="optim/lr", label="learning rate", slot=6),),
            ),
        ),
    ),
    Section(
        title="Where the time goes",
        text="Wall-clock seconds of each step by phase. What no phase accounts for is shown as unattributed.",
        charts=(
            Chart(
                id="time", title="Seconds per step", unit="s", stacked=True, from_zero=True, wide=True,
                series=tuple(
                    Series(key=f"time/{name}_s", label=name, slot=slot)
                    for name, slot in zip(_PHASES, (0, 3, 7, 1, 2, 5, 6, 4), strict=True)
                ),
            ),
            Chart(
                id="speed", title="Rollout speed", unit="tokens/s", from_zero=True,
                series=(Series(key="rollout/tokens_per_s", label="tokens per second", slot=0),),
            ),
            Chart(
                id="sync", title="Weight sync", unit="GB/s", from_zero=True,
                series=(Series(key="sync/gb_per_s", label="GB/s", slot=2),),
            ),
        ),
    ),
    Section(
        title="Rollouts",
        text="What was sampled, and what of it was kept for training.",
        charts=(
            Chart(
                id="length", title="Response length", unit="tokens", from_zero=True,
                series=(Series(key="rollout/response_tokens_mean", label="mean", slot=0),),
            ),
            Chart(
                id="truncated", title="Truncated responses", form="percent", from_zero=True,
                series=(Series(key="rollout/truncated_frac", label="truncated", slot=3),),
            ),
            Chart(
                id="groups", title="Groups sampled", stacked=True, from_zero=True, wide=True,
                series=(Series(key="rollout/groups_kept", label="kept", slot=2),),
            ),
        ),
    ),
)  # fmt: skip
"""Everything that a report can show; what the run has no numbers for is left out."""


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
        wanted = (*chart.series, *_dropped(run)) if chart.id == "groups" else chart.series
        if chart.id == "reward" and run.values("reward/mean") == run.values("reward/accuracy"):
            wanted = wanted[:1]  # rewards of 0 and 1: one line, not two on top of each other
        series = tuple(s for s in wanted if run.has(s.key))
        nothing_dropped = chart.id == "groups" and len(series) < 2
        if series and not nothing_dropped:
            charts.append(replace(chart, series=series))
    return replace(section, charts=tuple(_paired(charts)))


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


def _dropped(run: RunData) -> list[Series]:
    """One layer per reason for which any group was dropped."""
    reasons = sorted({key for row in run.rows for key in row if key.startswith(_DROPPED) and row[key]})
    slots = (1, 3, 7, 4, 5, 6)
    return [
        Series(key=key, label=f"dropped: {key.removeprefix(_DROPPED).replace('_', ' ')}", slot=slots[i % len(slots)])
        for i, key in enumerate(reasons)
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
