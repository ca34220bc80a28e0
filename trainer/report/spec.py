"""The nouns of a page of charts: Section -> Chart -> Series, and the Table of numbers that a series names.

This file does not know Bokeh or HTML. `charts.py` draws; a page of any number of runs is a list of sections and a
mapping of tables, see `page.py` for one run and for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum

import numpy as np

NUM_SLOTS = 8
"""Number of colours of the page, --s0 to --s7."""
MAX_PLAIN_POINTS = 240
"""Number of points above which a curve is drawn thin, under its moving mean."""
STEP = "step"
"""Column of the common axis of curves over steps."""


class ChartKind(Enum):
    """Drawing style of the series of a chart."""

    curves = "curves"
    stack = "stack"
    """One bar per step, with a layer per series."""
    bars = "bars"
    """Bars side by side."""
    cells = "cells"
    """A square per row; a larger value has a stronger colour."""


class Dash(Enum):
    """Dash pattern of a line."""

    solid = "solid"
    dashed = "dashed"
    dotted = "dotted"


@dataclass(frozen=True, slots=True)
class Series:
    """One line or layer."""

    key: str
    """Column of the table."""
    label: str
    slot: int
    """Colour number 0..7 of the page."""
    _: KW_ONLY
    dash: Dash = Dash.solid
    table: str = "rows"
    """Name of the table."""
    run: int | None = None
    """Number of the run or group of runs; series of the same number are hidden together."""
    spread: bool = False
    """True if the table has `<key>:low` and `<key>:high`, drawn as a band."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The horizontal axis of a chart that is not over steps."""

    column: str
    """Column of the tables."""
    label: str
    ticks: tuple[tuple[float, str], ...] = ()
    """(position, label) of each tick; empty for numbers."""
    between: tuple[float, float] | None = None
    """First and last value shown; None for the range of the tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart: its series, its drawing style, and a note for the reader."""

    id: str
    title: str
    series: tuple[Series, ...]
    kind: ChartKind = ChartKind.curves
    x: Axis | None = None
    """The horizontal axis; None for the steps, an axis that all such charts share."""
    unit: str = ""
    form: str = "number"
    """Number format of axis and values: number, percent or exponent."""
    log: bool = False
    from_zero: bool = False
    """True if the axis starts at 0."""
    least_span: float | None = None
    """Least length of the axis, so that it does not magnify what is no difference; None for that of `form`."""
    wide: bool = False
    note: str = ""
    """Explanation of the chart, with the signs of a problem."""
    leaves_out_zero: bool = False
    """True if a series that is always 0 is left out, and the chart with the last of them."""
    each: str = ""
    """Prefix of further metrics; each metric of the run with this prefix is a line or layer."""
    each_label: str = ""
    """Text before the rest of such a metric's name."""
    needs: str = ""
    """Metric without which the chart has no meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    text: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The numbers behind some series: columns of equal length, ascending in the column of the horizontal axis."""

    columns: Mapping[str, np.ndarray]
    """Column -> values; a missing value is NaN, which leaves a gap."""
    labels: tuple[str, ...] = ()
    """Label of each row; empty for the number on the axis."""
