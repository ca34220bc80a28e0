"""Does the mismatch move before entropy, gradient norm and perplexity, or after them?

Two views: a point per step (K3 against each), and the correlation of their changes from step to step over lags.
Levels that both drift correlate whatever the lag, so changes of the logarithm are compared. Lines of chance: without
any relation, 95 % of whole charts stay inside, over all lags (Bonferroni). The correlation of n pairs, as artanh r, is
then normal with variance v / (n - 3); v = 1 + 2 sum of the products of both autocorrelations (Bartlett, "Some aspects
of the time-correlation problem", 1935), because changes of a noisy level are themselves correlated: v is 1.5 for noise.
On independent noise, autoregressions and random walks of 20 to 300 steps, 2.5 to 5 % of charts go beyond the lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

import numpy as np

from trainer.report.data import RunData, is_number
from trainer.report.present import paired, run_series
from trainer.report.spec import Axis, Chart, Kind, Section, Series, Table
from trainer.report.tables import ROWS

K3: Final = "mismatch/k3"
MAX_LAG: Final = 20
MIN_CHANGES: Final = 13
"""Fewer changes than this say nothing."""
LAGS_OF_CHANGES: Final = 4
"""Lags reach to one of so many parts of the changes: beyond, few pairs are left."""
MEMORY: Final = 3
"""Steps over which autocorrelations are counted."""
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """A metric that may move with K3."""

    id: str
    key: str
    name: str
    slot: int
    log: bool


FOLLOWERS: Final = (
    Follower(id="entropy", key="policy/entropy", name="entropy", slot=2, log=False),
    Follower(id="grad", key="optim/grad_norm", name="gradient norm", slot=4, log=True),
    Follower(id="ppl", key="mismatch/ppl/train", name="perplexity", slot=1, log=False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Correlation:
    """Correlation of the changes of K3 at step t with those of another metric at step t + lag."""

    lags: np.ndarray
    values: np.ndarray
    """NaN where there are too few pairs."""
    chance: float
    """Absolute value that chance alone exceeds, at any lag, in 1 of 20 charts."""

    @property
    def strongest(self) -> tuple[int, float] | None:
        """(lag, correlation) beyond chance, None if there is none."""
        if not np.isfinite(self.values).any():
            return None
        index = int(np.nanargmax(np.abs(self.values)))
        value = float(self.values[index])
        return (int(self.lags[index]), value) if abs(value) > self.chance else None


def lead_section(runs: Sequence[RunData]) -> tuple[Section | None, dict[str, Table]]:
    """The section and its tables; None where no run has K3 and one of the others."""
    followers = [one for one in FOLLOWERS if any(run.has(K3) and run.has(one.key) for run in runs)]
    if not followers:
        return None, {}
    charts = [_cloud(follower, runs) for follower in followers]
    found = {
        (index, follower.id): correlation
        for index, run in enumerate(runs)
        for follower in followers
        if (correlation := correlate(run, follower.key)) is not None
    }
    tables = {f"lag/{index}/{name}": _table(one) for (index, name), one in found.items()}
    charts += _lags_of_one(followers, found) if len(runs) == 1 else _lags_of_many(followers, found, runs)
    section = Section(
        title="What moves with the mismatch",
        text="K3 that rises before entropy falls or the gradient norm jumps is a cause to look into; K3 that follows "
        "them is a symptom.",
        charts=tuple(paired(charts)),
    )
    return section, tables


def correlate(run: RunData, key: str) -> Correlation | None:
    """Lagged correlation of the changes of log K3 with those of log `key`; None with too few steps."""
    steps = [row for row in run.rows if is_number(row, K3) and is_number(row, key) and row[K3] > 0 and row[key] > 0]
    if len(steps) < MIN_CHANGES + 1:
        return None
    ours, theirs = (np.diff(np.log([float(row[name]) for row in steps])) for name in (K3, key))
    most = min(MAX_LAG, len(ours) // LAGS_OF_CHANGES)
    lags = np.arange(-most, most + 1)
    values = np.array([_correlation(ours, theirs, int(lag)) for lag in lags])
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / len(lags))
    inflation = 1 + 2 * sum(_autocorrelation(ours, j) * _autocorrelation(theirs, j) for j in range(1, MEMORY + 1))
    # Of the largest lag, which has the fewest pairs.
    chance = math.tanh(z * math.sqrt(max(1.0, inflation) / (len(ours) - most - 3)))
    return Correlation(lags=lags, values=values, chance=chance)


def _autocorrelation(changes: np.ndarray, lag: int) -> float:
    centred = changes - changes.mean()
    power = float((centred * centred).sum())
    return 0.0 if power == 0 else float((centred[lag:] * centred[:-lag]).sum()) / power


def _correlation(ours: np.ndarray, theirs: np.ndarray, lag: int) -> float:
    """Pearson correlation of ours[t] and theirs[t + lag]; NaN where one of them never changes."""
    size = len(ours) - abs(lag)
    first = ours[max(0, -lag) :][:size]
    second = theirs[max(0, lag) :][:size]
    if first.std() == 0 or second.std() == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _table(correlation: Correlation) -> Table:
    labels = tuple(
        "in the same step" if lag == 0 else f"K3 {abs(lag)} steps {'earlier' if lag > 0 else 'later'}"
        for lag in correlation.lags
    )
    return Table(columns={"lag": correlation.lags.astype(float), "r": correlation.values}, labels=labels)


def _cloud(follower: Follower, runs: Sequence[RunData]) -> Chart:
    series = Series(key=K3, label="K3", slot=0)
    return Chart(
        id=f"cloud-{follower.id}", title=f"K3 against {follower.name}", kind=Kind.points, form="exponent", log=True,
        unit="a point per step, early ones faint",
        x=Axis(column=follower.key, label=follower.name, log=follower.log),
        note="A cloud without a slope: no relation. A path that climbs with time: both drift together.",
        series=(series,) if len(runs) == 1 else tuple(run_series(runs, series, table=ROWS)),
    )  # fmt: skip


_LAG_AXIS: Final = Axis(column="lag", label="lag in steps: on the right K3 moves first, on the left it follows")


def _lags_of_one(followers: Sequence[Follower], found: dict[tuple[int, str], Correlation]) -> list[Chart]:
    there = [follower for follower in followers if (0, follower.id) in found]
    if not there:
        return []
    said = [_sentence(follower.name, found[0, follower.id]) for follower in there]
    series = tuple(
        Series(key="r", label=follower.name, slot=follower.slot, table=f"lag/0/{follower.id}") for follower in there
    )
    chance = found[0, there[0].id].chance
    return [replace(_lag_chart("lag", "Lead and lag of K3", series, chance), note=" ".join(said))]


def _lags_of_many(
    followers: Sequence[Follower], found: dict[tuple[int, str], Correlation], runs: Sequence[RunData]
) -> list[Chart]:
    charts = []
    for follower in followers:
        mine = {index: found[index, follower.id] for index in range(len(runs)) if (index, follower.id) in found}
        base = Series(key="r", label="", slot=0)
        series = tuple(
            replace(one, table=f"lag/{one.run}/{follower.id}")
            for one in run_series(runs, base, table="lag")
            if one.run in mine
        )
        if series:
            chance = max(one.chance for one in mine.values())
            charts.append(_lag_chart(f"lag-{follower.id}", f"Lead and lag of K3 and {follower.name}", series, chance))
    return charts


def _lag_chart(name: str, title: str, series: tuple[Series, ...], chance: float) -> Chart:
    levels = ((chance, f"chance stays within ±{chance:.2f}"), (-chance, ""))
    return Chart(
        id=name, title=title, unit="correlation of changes", series=series, x=_LAG_AXIS, levels=levels,
        note="Beyond the dotted lines is more than chance.",
    )  # fmt: skip


def _sentence(name: str, correlation: Correlation) -> str:
    strongest = correlation.strongest
    if strongest is None:
        return f"{name.capitalize()}: nothing beyond chance."
    lag, value = strongest
    steps = f"{abs(lag)} step{'' if abs(lag) == 1 else 's'}"
    when = "in the same step as" if lag == 0 else f"{steps} {'before' if lag > 0 else 'after'}"
    return f"{name.capitalize()}: K3 moves {when} it (r = {value:+.2f})."
