"""histograms.jsonl -> charts of the engines' difference: by probability, position, and both probabilities of a token.

The charts of one run compare its beginning and its end; the charts of several runs compare whole runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trainer.report.data import Row, RunData
from trainer.report.present import dash_of, paired, slot_of
from trainer.report.spec import Axis, Chart, Dash, Kind, Section, Series, Table

QUARTER: Final = 4
"""Minimum of steps for splitting a run into its first and last quarter."""
_MAX_TICKS: Final = 8
_PROBABILITY, _POSITION = "by_probability", "by_position"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A range of steps of a run, or all of them."""

    label: str
    rows: list[Row]
    slot: int
    dash: Dash
    run: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """One axis of bins, summed over the steps of a part. B: bins."""

    counts: np.ndarray
    """[B] tokens."""
    k3: np.ndarray
    """[B] sum of K3 over the tokens, nats."""


def histogram_section(runs: Sequence[RunData]) -> tuple[Section | None, dict[str, Table]]:
    """The section and its tables; None if no run has a readable histogram."""
    parts = _parts(runs)
    if not parts:
        return None, {}
    tables: dict[str, Table] = {}
    charts: list[Chart] = []
    for axis in (_PROBABILITY, _POSITION):
        charts.append(_profile(axis, parts, tables))
    if len(runs) == 1:
        for axis in (_PROBABILITY, _POSITION):
            charts.append(_shares(axis, parts[-1]))
    charts += _joint(parts, tables)
    text = "K3 averages over all tokens; here are the tokens it comes from."
    if len(runs) == 1 and len(parts) == 2:
        text += f" First and last quarter of the run ({len(parts[0].rows)} steps each)."
    section = Section(title="Where the mismatch sits", text=text, charts=tuple(paired(charts)))
    return section, tables


def _parts(runs: Sequence[RunData]) -> list[Part]:
    readable = [[row for row in run.histograms if _is_readable(row)] for run in runs]
    if len(runs) > 1:
        return [
            Part(label=run.name, rows=rows, slot=slot_of(index), dash=dash_of(index), run=index)
            for index, (run, rows) in enumerate(zip(runs, readable, strict=True))
            if rows
        ]
    [rows] = readable
    if len(rows) < QUARTER:
        return [Part(label="all steps", rows=rows, slot=0, dash=Dash.solid, run=None)] if rows else []
    quarter = len(rows) // QUARTER
    return [
        Part(label="first quarter", rows=rows[:quarter], slot=6, dash=Dash.solid, run=None),
        Part(label="last quarter", rows=rows[-quarter:], slot=0, dash=Dash.solid, run=None),
    ]


def _is_readable(row: Row) -> bool:
    """True if a line of histograms.jsonl has the form that the tracker writes."""
    try:
        for axis in (_PROBABILITY, _POSITION):
            counts, edges = row[axis]["counts"], row[axis]["edges"]
            if len(edges) != len(counts) + 1 or len(row[axis]["k3"]) != len(counts):
                return False
        _joint_array(row)
    except (KeyError, TypeError, ValueError, IndexError):
        return False
    return True


def _sums(part: Part, axis: str) -> Sums:
    counts = np.array([row[axis]["counts"] for row in part.rows], dtype=float)
    means = np.array([[value or 0.0 for value in row[axis]["k3"]] for row in part.rows], dtype=float)
    return Sums(counts=counts.sum(0), k3=(counts * means).sum(0))


def _profile(axis: str, parts: Sequence[Part], tables: dict[str, Table]) -> Chart:
    """Chart of the mean K3 of each bin; adds the tables of both charts of the axis."""
    sums = [_sums(part, axis) for part in parts]
    used = np.flatnonzero(sum(one.counts for one in sums))
    bins = np.arange(used[0], used[-1] + 1) if len(used) else np.arange(1)
    if axis == _PROBABILITY:
        bins = bins[::-1]  # bin 0 is the most probable: it stands on the right
    places = -bins if axis == _PROBABILITY else bins
    labels = tuple(_bin_label(axis, parts[0].rows[0][axis]["edges"], int(index)) for index in bins)
    for number, one in enumerate(sums):
        counts, k3 = one.counts[bins], one.k3[bins]
        columns = {
            "bin": places.astype(float),
            "k3": np.where((counts > 0) & (k3 > 0), k3 / np.maximum(counts, 1), np.nan),
            "tokens": counts / max(counts.sum(), 1.0),
            "share": k3 / k3.sum() if k3.sum() > 0 else np.zeros(len(k3)),
        }
        tables[f"{axis}/{number}"] = Table(columns=columns, labels=labels)
    name = "probability" if axis == _PROBABILITY else "position"
    note = (
        "Rare tokens, on the left, differ most in every engine pair. A rise on the right is a defect."
        if axis == _PROBABILITY
        else "K3 is larger where the model is unsure; where it is as sure everywhere, flat is healthy. A rise that "
        "goes on to the end of the response is an error that grows along it (a cache, positions)."
    )
    return Chart(
        id=axis, title=f"K3 by {name}", unit="nats per token", form="exponent", log=True, note=note,
        x=_axis(axis, places),
        series=tuple(
            Series(
                key="k3", label=part.label, slot=part.slot, dash=part.dash, table=f"{axis}/{number}", run=part.run
            )
            for number, part in enumerate(parts)
        ),
    )  # fmt: skip


def _shares(axis: str, part: Part) -> Chart:
    name = "probability" if axis == _PROBABILITY else "position"
    table = f"{axis}/{0 if part.label == 'all steps' else 1}"
    sums = _sums(part, axis)
    places = np.flatnonzero(sums.counts)
    places = -places if axis == _PROBABILITY else places
    return Chart(
        id=f"{axis}-share", title=f"What each {name} adds, {part.label}", kind=Kind.bars, form="percent",
        from_zero=True, x=_axis(axis, places),
        note="Share of the tokens beside share of the whole K3. Where K3 towers over the tokens, few tokens make it.",
        series=(
            Series(key="tokens", label="of the tokens", slot=6, table=table),
            Series(key="share", label="of K3", slot=1, table=table),
        ),
    )  # fmt: skip


def _axis(axis: str, places: np.ndarray) -> Axis:
    """Axis with ticks on the edges of the bins, which are powers of two."""
    low, high = int(places.min(initial=0)), int(places.max(initial=0)) + 1
    every = -(-(high - low) // _MAX_TICKS)
    if axis == _PROBABILITY:
        ticks = tuple((edge + 0.5, f"{2.0**edge:.2g}") for edge in range(high - 1, low - 2, -every))
        label = "probability of the token in the rollout engine"
    else:
        ticks = tuple((edge - 0.5, f"{2**edge:,}") for edge in range(low, high + 1, every))
        label = "position in the response, tokens"
    return Axis(column="bin", label=label, ticks=ticks, between=(low - 0.5, high - 0.5))


def _bin_label(axis: str, edges: Sequence[float | None], index: int) -> str:
    first, second = edges[index], edges[index + 1]
    if axis == _PROBABILITY:
        return f"probability {second or 0:.2g} to {first or 0:.2g}"
    last = "" if second is None else f" to {second - 1:,.0f}"
    return f"token {first:,.0f}{last}"


def _joint(parts: Sequence[Part], tables: dict[str, Table]) -> Iterator[Chart]:
    for number, part in enumerate(parts):
        total = np.sum([_joint_array(row) for row in part.rows], axis=0)
        train, rollout = np.nonzero(total)
        size = 1.0 / total.shape[0]
        columns = {
            "left": rollout * size,
            "right": (rollout + 1) * size,
            "bottom": train * size,
            "top": (train + 1) * size,
            "count": total[train, rollout],
        }
        tables[f"joint/{number}"] = Table(columns=columns)
        most = int(columns["count"].max(initial=0))
        yield Chart(
            id=f"joint-{number}", title=f"p_train against p_rollout, {part.label}", kind=Kind.cells,
            unit="up: in the trainer",
            x=Axis(column="left", label="probability in the rollout engine"),
            note=f"Tokens by both probabilities, from 1 to {most:,} per cell on a log scale. Equal engines stay on the "
            "diagonal; cells far from it are tokens that one engine believes in and the other does not.",
            series=(
                Series(key="count", label=part.label, slot=part.slot, table=f"joint/{number}", run=part.run),
            ),
        )  # fmt: skip


def _joint_array(row: Row) -> np.ndarray:
    """Tokens by [bin of p_train, bin of p_rollout]; ValueError, KeyError, TypeError or IndexError if unreadable."""
    size = len(row["joint_edges"]) - 1
    counts = np.zeros((size, size))
    for train, rollout, count in row["joint"]:
        if min(train, rollout) < 0:
            raise IndexError(f"bins {train} and {rollout}")
        counts[train, rollout] += count
    return counts


def unreadable(run: RunData) -> Iterator[str]:
    """Remarks about lines that have another form."""
    wrong = [row["step"] for row in run.histograms if not _is_readable(row)]
    if wrong:
        steps = ", ".join(str(step) for step in itertools.islice(wrong, 5))
        yield f"histograms.jsonl: {len(wrong)} lines have another shape and are left out (step {steps})"
