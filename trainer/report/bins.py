"""The charts that are not over steps: where the engines differ, and what `parity diagnose` found.

histograms.jsonl -> the difference by probability, by position, and by both probabilities of a token. The charts of one
run compare its beginning and its end; the charts of several runs compare whole runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.report.data import LARGEST, Row, RunData, is_number
from trainer.report.present import dash_of, slot_of
from trainer.report.spec import Axis, Chart, ChartKind, Dash, Section, Series, Table

_QUARTER = 4
"""Minimum of steps for splitting a run into its first and last quarter."""
_MAX_TICKS = 8
_MAX_BINS = 100
"""Bins of an axis of a line that is read; the tracker writes some tens."""
_PROBABILITY, _POSITION = "by_probability", "by_position"
PARTS_TABLE = "parts_of_k3"
"""Name of the chart of the parts of K3, and of its table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Some or all steps of a run, drawn as one curve."""

    label: str
    rows: list[Row]
    slot: int
    dash: Dash = Dash.solid
    run: int | None = None


def histogram_section(runs: Sequence[RunData]) -> tuple[Section | None, dict[str, Table]]:
    """The section and its tables; None if no run has a readable histogram."""
    ranges = _step_ranges(runs)
    if not ranges:
        return None, {}
    tables: dict[str, Table] = {}
    charts = [_profile(axis, ranges, tables) for axis in (_PROBABILITY, _POSITION)]
    if len(runs) == 1:
        charts += [_shares(axis, len(ranges) - 1, ranges, tables) for axis in (_PROBABILITY, _POSITION)]
    charts += _joint(ranges, tables)
    text = "K3 averages over all tokens; here are the tokens it comes from."
    if len(runs) == 1 and len(ranges) == 2:
        text += f" First and last quarter of the run ({len(ranges[0].rows)} steps each)."
    return Section(title="Where the mismatch sits", text=text, charts=tuple(charts)), tables


def unreadable(run: RunData) -> Iterator[str]:
    """Remarks about lines that have another form."""
    good = {row["step"] for row in _readable([run])[0]}
    wrong = [str(row["step"]) for row in run.histograms if row["step"] not in good]
    if wrong:
        steps = ", ".join(wrong[:5])
        yield f"histograms.jsonl: {len(wrong)} lines have another shape and are left out (step {steps})"


def _step_ranges(runs: Sequence[RunData]) -> list[StepRange]:
    readable = _readable(runs)
    if len(runs) > 1:
        return [
            StepRange(label=run.name, rows=rows, slot=slot_of(index), dash=dash_of(index), run=index)
            for index, (run, rows) in enumerate(zip(runs, readable, strict=True))
            if rows
        ]
    [rows] = readable
    quarter = len(rows) // _QUARTER
    if quarter:
        return [
            StepRange(label="first quarter", rows=rows[:quarter], slot=6),
            StepRange(label="last quarter", rows=rows[-quarter:], slot=0),
        ]
    return [StepRange(label="all steps", rows=rows, slot=0)] if rows else []


def _readable(runs: Sequence[RunData]) -> list[list[Row]]:
    """The lines of histograms.jsonl of each run that have the form that the tracker writes, all of the same bins."""
    bins = [[_bins(row) for row in run.histograms] for run in runs]
    first = next((found for of_run in bins for found in of_run if found is not None), None)
    return [
        [row for row, found in zip(run.histograms, of_run, strict=True) if found is not None and found == first]
        for run, of_run in zip(runs, bins, strict=True)
    ]


def _bins(row: Row) -> tuple[int, ...] | None:
    """Number of bins of both probabilities, and of each axis; None for a line of another form."""
    try:
        sizes = [len(_joint_array(row))]
        for axis in (_PROBABILITY, _POSITION):
            edges, counts, k3 = (row[axis][name] for name in ("edges", "counts", "k3"))
            numbers = np.array([[edge or 0.0 for edge in edges[:-1]], counts, [value or 0.0 for value in k3]], float)
            if len(edges) != len(counts) + 1 or len(edges) > _MAX_BINS or not (abs(numbers) <= LARGEST).all():
                return None
            np.array(edges[:-1] if axis == _POSITION else [], float)
            float(edges[-1] or 0.0)
            sizes.append(len(counts))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None
    return tuple(sizes)


def _sums(steps: StepRange, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """[bins] tokens and [bins] sum of K3 over the tokens, nats, of all steps together."""
    counts = np.array([row[axis]["counts"] for row in steps.rows], dtype=float)
    means = np.array([[value or 0.0 for value in row[axis]["k3"]] for row in steps.rows], dtype=float)
    return counts.sum(0), (counts * means).sum(0)


def _profile(axis: str, ranges: Sequence[StepRange], tables: dict[str, Table]) -> Chart:
    """Chart of the mean K3 of each bin; adds the tables of both charts of the axis."""
    sums = [_sums(steps, axis) for steps in ranges]
    used = np.flatnonzero(sum(counts for counts, _ in sums))
    bins = np.arange(used[0], used[-1] + 1) if len(used) else np.arange(1)
    if axis == _PROBABILITY:
        bins = bins[::-1]  # bin 0 is the most probable: it stands on the right
    places = -bins if axis == _PROBABILITY else bins
    labels = tuple(_bin_label(axis, ranges[0].rows[0][axis]["edges"], int(index)) for index in bins)
    for number, (all_counts, all_k3) in enumerate(sums):
        counts, k3 = all_counts[bins], all_k3[bins]
        columns = {
            "bin": places.astype(float),
            "k3": np.where((counts > 0) & (k3 > 0), k3 / np.maximum(counts, 1), np.nan),
            "tokens": counts / max(counts.sum(), 1.0),
            "share": k3 / k3.sum() if k3.sum() > 0 else np.zeros(len(k3)),
        }
        tables[f"{axis}/{number}"] = Table(columns=columns, labels=labels)
    note = (
        "Rare tokens, on the left, differ most in every engine pair. With the same weights on both sides, a rise "
        "on the right is a defect."
        if axis == _PROBABILITY
        else "K3 is larger where the model is unsure; where it is as sure everywhere, flat is healthy. A rise that "
        "goes on to the end of the response is an error that grows along it (a cache, positions)."
    )
    return Chart(
        id=axis, title=f"K3 by {_name(axis)}", unit="nats per token", form="exponent", log=True, note=note,
        x=_axis(axis, places),
        series=tuple(
            Series("k3", steps.label, steps.slot, dash=steps.dash, table=f"{axis}/{number}", run=steps.run)
            for number, steps in enumerate(ranges)
        ),
    )  # fmt: skip


def _shares(axis: str, number: int, ranges: Sequence[StepRange], tables: dict[str, Table]) -> Chart:
    """Chart of the share of the tokens beside the share of K3 in each bin, of the steps `ranges[number]`."""
    table = f"{axis}/{number}"
    columns = tables[table].columns
    return Chart(
        id=f"{axis}-share", title=f"What each {_name(axis)} adds, {ranges[number].label}", kind=ChartKind.bars,
        form="percent", from_zero=True, x=_axis(axis, columns["bin"][columns["tokens"] > 0]),
        note="Share of the tokens beside share of the whole K3. Where K3 towers over the tokens, few tokens make it.",
        series=(Series("tokens", "of the tokens", 6, table=table), Series("share", "of K3", 1, table=table)),
    )  # fmt: skip


def _name(axis: str) -> str:
    return "probability" if axis == _PROBABILITY else "position"


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


def _joint(ranges: Sequence[StepRange], tables: dict[str, Table]) -> Iterator[Chart]:
    for number, steps in enumerate(ranges):
        total = np.sum([_joint_array(row) for row in steps.rows], axis=0)
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
            id=f"joint-{number}", title=f"p_train against p_rollout, {steps.label}", kind=ChartKind.cells,
            unit="up: in the trainer",
            x=Axis(column="left", label="probability in the rollout engine"),
            note=f"Tokens by both probabilities, from 1 to {most:,} per cell on a log scale. Equal engines stay on the "
            "diagonal; cells far from it are tokens that one engine believes in and the other does not.",
            series=(Series("count", steps.label, steps.slot, table=f"joint/{number}", run=steps.run),),
        )  # fmt: skip


def _joint_array(row: Row) -> np.ndarray:
    """Tokens by [bin of p_train, bin of p_rollout]; ValueError, KeyError, TypeError or IndexError if unreadable."""
    size = len(row["joint_edges"]) - 1
    if not 0 < size <= _MAX_BINS:
        raise ValueError(f"{size} bins")
    counts = np.zeros((size, size))
    for train, rollout, count in row["joint"]:
        if min(train, rollout) < 0:
            raise IndexError(f"bins {train} and {rollout}")
        counts[train, rollout] += count
    if not (abs(counts) <= LARGEST).all():
        raise ValueError("a count that is no number")
    return counts


def parts_section(answer: str, bars: Sequence[tuple[str, float]]) -> tuple[Section, Table]:
    """The section of an answer and its (cause, part of K3 in nats per token), and the table that its chart names."""
    places = np.arange(len(bars), dtype=np.float64)
    labels = tuple(label for label, _ in bars)
    chart = Chart(
        id=PARTS_TABLE,
        title="Parts of K3",
        series=(Series("k3", "K3", 0, table=PARTS_TABLE),),
        kind=ChartKind.bars,
        x=Axis(
            column="place",
            label="cause",
            ticks=tuple(zip(places.tolist(), labels, strict=True)),
            between=(-0.6, len(bars) - 0.4),
        ),
        unit="nats per token",
        form="exponent",
        from_zero=all(value >= 0 for _, value in bars),
        wide=True,
    )
    table = Table(columns={"place": places, "k3": np.array([value for _, value in bars])}, labels=labels)
    return Section(title="Where K3 comes from", text=answer, charts=(chart,)), table


def diagnosis_section(run: RunData) -> tuple[Section | None, dict[str, Table]]:
    """The section of a run that was diagnosed, and its table by name; None for one that was not."""
    found, parts = run.diagnosis, run.diagnosis.get("parts")
    answer = found.get("answer")
    if not isinstance(answer, str) or not isinstance(parts, list):
        return None, {}
    bars = [(f"{part.get('name')} ({part.get('side')})", part["k3"]) for part in parts if is_number(part, "k3")]
    if is_number(found, "unexplained"):
        bars.append(("not explained", found["unexplained"]))
    section, table = parts_section(answer, bars)
    return section, {PARTS_TABLE: table}
