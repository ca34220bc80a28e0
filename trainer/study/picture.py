"""Results of a study -> study.svg: the curves of the page as one picture for a document, without scripts.

A column per precision, a row per metric; a colour per mode: the line is the mean of the seeds, the band their range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from trainer.study.grid import Grid
from trainer.study.results import METRICS, CellResult, Curve, Metric, curve

SLOTS = (0, 1, 2, 3, 7, 4, 5, 6)
"""Colours of the page in the order in which modes take them: neighbours differ most."""
COLOURS = ("#0068b8", "#d2600a", "#0a8f6a", "#b5508f", "#6a5acd", "#2a9fd6", "#7a8594", "#b08900")
"""Those colours in a light theme (trainer/report/assets/page.css)."""
SHOWN = ("heldout", "k3", "entropy", "grad_norm")
"""Metrics of the picture; the page has them all."""
_WIDTH, _HEIGHT = 400, 150
_LEFT, _TOP, _BOTTOM, _RIGHT = 52, 26, 20, 12
_HEAD = 54
_MOST_POINTS = 100
_INK, _SOFT, _LINE = "#1b2027", "#5d6875", "#e3e7ec"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Numbers -> places of one panel."""

    low: float
    high: float
    log: bool
    last_step: int

    def x(self, step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(1, self.last_step)

    def y(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, low))
        share = (at - low) / (high - low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        step = next(step * factor for factor in (1, 2, 2.5, 5, 10) if (self.high - self.low) / (step * factor) <= 4)
        return [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def draw_picture(grid: Grid, results: Sequence[CellResult]) -> str:
    """The picture as SVG; a panel without numbers stays empty."""
    metrics = [metric for metric in METRICS if metric.id in SHOWN]
    width, height = _WIDTH * len(grid.precisions), _HEAD + _HEIGHT * len(metrics)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(grid),
    ]
    for row, metric in enumerate(metrics):
        curves = {
            (mode, precision): curve(
                [result for result in results if (result.mode, result.precision) == (mode, precision)], metric
            )
            for mode in grid.modes
            for precision in grid.precisions
        }
        scale = _scale(metric, list(curves.values()))
        for column, precision in enumerate(grid.precisions):
            parts.append(f'<g transform="translate({_WIDTH * column} {_HEAD + _HEIGHT * row})">')
            parts += _frame(metric, scale)
            for index, mode in enumerate(grid.modes):
                parts += _draw(curves[mode, precision], scale, colour_of(index))
            parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def colour_of(index: int) -> str:
    """Colour of mode number `index`."""
    return COLOURS[SLOTS[index % len(SLOTS)]]


def _legend(grid: Grid) -> list[str]:
    parts = []
    at = _LEFT
    for index, mode in enumerate(grid.modes):
        parts.append(f'<rect x="{at}" y="13" width="16" height="4" fill="{colour_of(index)}"/>')
        parts.append(f'<text x="{at + 21}" y="19" fill="{_INK}" font-size="12">{escape(mode)}</text>')
        at += 36 + 7 * len(mode)
    for column, precision in enumerate(grid.precisions):
        title = f"{escape(precision)} rollout"
        parts.append(
            f'<text x="{_WIDTH * column + _LEFT}" y="44" fill="{_INK}" font-size="13" font-weight="bold">{title}</text>'
        )
    return parts


def _scale(metric: Metric, curves: Sequence[Curve]) -> _Scale:
    """One scale for all precisions, so that they can be compared."""
    lows = [value for each in curves for value in each.low if not metric.log or value > 0]
    highs = [value for each in curves for value in each.high if not metric.log or value > 0]
    low, high = (min(lows), max(highs)) if lows and highs else (0.1, 1.0)
    if metric.from_zero:
        low = min(low, 0.0)
    if high <= low:
        low, high = (low / 2, high * 2) if metric.log else (low - 0.5, high + 0.5)
    last = max((each.steps[-1] for each in curves if each.steps), default=1)
    return _Scale(low=low, high=high, log=metric.log, last_step=last)


def _frame(metric: Metric, scale: _Scale) -> list[str]:
    unit = f", {metric.unit}" if metric.unit else ""
    parts = [f'<text x="{_LEFT}" y="17" fill="{_SOFT}">{escape(metric.title)}{escape(unit)}</text>']
    for value in scale.ticks():
        y, text = scale.y(value), _number(metric, value)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_LINE}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" fill="{_SOFT}" text-anchor="end">{text}</text>')
    for step in (0, scale.last_step // 2, scale.last_step):
        place = f'x="{scale.x(step):.1f}" y="{_HEIGHT - 6}"'
        parts.append(f'<text {place} fill="{_SOFT}" text-anchor="middle">{step}</text>')
    return parts


def _number(metric: Metric, value: float) -> str:
    if metric.form == "percent":
        return f"{100 * value:.0f} %"
    return f"{value:.0e}".replace("e-0", "e-") if metric.form == "exponent" else f"{value:g}"


def _draw(one: Curve, scale: _Scale, colour: str) -> list[str]:
    kept = range(0, len(one.steps), math.ceil(len(one.steps) / _MOST_POINTS) or 1)
    steps = [scale.x(one.steps[at]) for at in kept]
    if not steps:
        return []

    def points(values: Sequence[float]) -> list[str]:
        return [f"{x:.1f},{scale.y(values[at]):.1f}" for x, at in zip(steps, kept, strict=True)]

    band = " ".join([*points(one.low), *reversed(points(one.high))])
    line = " ".join(points(one.mean))
    return [
        f'<polygon points="{band}" fill="{colour}" fill-opacity="0.13"/>',
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>',
    ]
