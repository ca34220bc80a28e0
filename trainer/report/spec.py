"""The nouns of a page of charts: Section -> Chart -> Series, and the Table of numbers that a series names.

Nothing here knows Bokeh or HTML. `charts.py` draws; a page of any number of runs is a list of sections and a mapping
of tables, see `page.py` for one run and for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

NUM_SLOTS = 8
"""Colours of the page, --s0 to --s7."""
MAX_PLAIN_POINTS = 240
"""Beyond this many points a curve is drawn thin, with a moving mean over it."""
STEP = "step"
"""Column of the axis that the curves over steps share."""


class Kind(Enum):
    """How the series of a chart are drawn."""

    curves = "curves"
    stack = "stack"
    """Layers of one bar per step."""
    bars = "bars"
    """Bars beside each other."""
    cells = "cells"
    """A square per row, in a stronger colour the larger its value."""


class Dash(Enum):
    """How a line is drawn."""

    solid = "solid"
    dashed = "dashed"
    dotted = "dotted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line or layer."""

    key: str
    """Column of the table."""
    label: str
    slot: int
    """Colour 0..7 of the page."""
    dash: Dash = Dash.solid
    table: str = "rows"
    """Name of its table."""
    run: int | None = None
    """Series of one run, or of one group of runs, are hidden together."""
    spread: bool = False
    """Whether the table has `<key>:low` and `<key>:high`, drawn as a band."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """The horizontal axis of a chart that is not over steps."""

    column: str
    """Column of the tables."""
    label: str
    ticks: tuple[tuple[float, str], ...] = ()
    """Where ticks stand and what they say; empty: numbers."""
    between: tuple[float, float] | None = None
    """First and last value shown; None: those of the tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart: what it shows, how, and how to read it."""

    id: str
    title: str
    series: tuple[Series, ...]
    kind: Kind = Kind.curves
    x: Axis | None = None
    """None: the steps, an axis that all such charts share."""
    unit: str = ""
    form: str = "number"
    """Of axis and values: number, percent or exponent."""
    log: bool = False
    from_zero: bool = False
    """Whether the axis starts at 0."""
    wide: bool = False
    note: str = ""
    """How to read it, and what is bad."""
    each: str = ""
    """Beginning of further metrics to show, one line or layer for each that the run has."""
    each_label: str = ""
    """Stands before the rest of their names."""
    needs: str = ""
    """Metric without which the chart says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Charts under one heading."""

    title: str
    text: str
    charts: tuple[Chart, ...] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The numbers behind some series: columns of one length, ascending in the column of the horizontal axis."""

    columns: Mapping[str, np.ndarray]
    """A missing value is NaN, which leaves a gap."""
    labels: tuple[str, ...] = ()
    """What each row stands for, in words; empty: the number on the axis."""
