"""Results of a study -> the table that ranks the modes, and the sentences under it.

Two modes are distinguished only if the ranges of their seeds do not overlap. Chance can cause that too: of n and m
equal runs, all n end above all m, or all below, in 2 n! m! / (n + m)! of the cases, which is 1 in 10 for three seeds.
So the table gives no p-values; it gives ranges, the possible places of a mode, and the number of pairs that chance
alone would distinguish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from trainer.study.config import StudyConfig
from trainer.study.results import CellResult, Spread, spread

TITLES = (
    "precision", "place", "mode", "held-out, last", "95 %", "last / best", "collapsed", "worst K3", "entropy, last",
    "largest gradient", "least ESS", "s per step", "seeds",
)  # fmt: skip
DRAWS = 10_000
"""Draws of the bootstrap."""
MODE_COLUMN = TITLES.index("mode")
"""Columns up to this one are words, the others numbers."""


_COURSE = ("reward", "heldout", "entropy", "grad")
"""Curves that two runs of the same weights share to the last digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One mode at one precision; spreads are over the seeds that ended, None if no seed ended."""

    mode: str
    precision: str
    planned: int
    """Number of seeds of the study."""
    finished: int
    failed: int
    """Number of runs that began and did not end."""
    score: Spread | None
    """Held-out accuracy after the last step."""
    interval: tuple[float, float] | None
    """95 % interval of the mean score (`interval`); None where the answers to the prompts are not known."""
    kept_of_best: Spread | None
    """The score of a run over the best held-out accuracy that it ever had."""
    places: tuple[int, int] | None
    """Best and worst rank within its precision that the ranges allow, from 1; None without a score."""
    worst_k3: Spread | None
    entropy: Spread | None
    gradient: Spread | None
    ess: Spread | None
    collapsed: int
    step_seconds: Spread | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The table with its target and its counts of pairs."""

    rows: tuple[Standing, ...]
    """Rows by precision in the order of the study; within one by descending mean, modes without a score last."""
    same: tuple[tuple[str, ...], ...]
    """Groups of a precision and two or more modes whose runs were the same, step by step, with every seed."""
    pairs: int
    """Number of pairs of modes of the same precision with a score; modes that were the same count as one."""
    parted: int
    """Number of pairs whose ranges do not overlap."""
    parted_by_chance: float
    """Average number of pairs without overlap if all modes were equal."""


def rank(results: Sequence[CellResult]) -> Ranking:
    """Compare modes within each precision."""
    rows: list[Standing] = []
    same: list[tuple[str, ...]] = []
    pairs: list[tuple[Spread, Spread]] = []
    for precision in dict.fromkeys(result.precision for result in results):
        by_mode: dict[str, list[CellResult]] = {}
        for result in results:
            if result.precision == precision:
                by_mode.setdefault(result.mode, []).append(result)
        scores = {mode: spread(result.heldout_last for result in runs) for mode, runs in by_mode.items()}
        known = {mode: score for mode, score in scores.items() if score is not None}
        groups = same_modes({mode: by_mode[mode] for mode in known})
        same += [(precision, *modes) for modes in groups if len(modes) > 1]
        pairs += combinations([known[modes[0]] for modes in groups], 2)
        order = sorted(by_mode, key=lambda mode: -known[mode].mean if mode in known else math.inf)
        rows += [_standing(by_mode[mode], known) for mode in order]
    return Ranking(
        rows=tuple(rows),
        same=tuple(same),
        pairs=len(pairs),
        parted=sum(apart(first, second) for first, second in pairs),
        parted_by_chance=sum(chance_apart(first.count, second.count) for first, second in pairs),
    )


def same_modes(by_mode: dict[str, list[CellResult]]) -> list[tuple[str, ...]]:
    """Modes in groups whose finished runs were equal: rewards, held-out accuracies, entropies and gradient norms.

    A small reward shows no difference of the weights, the last two show any.
    """
    groups: dict[object, list[str]] = {}
    for mode, results in by_mode.items():
        finished = sorted((result for result in results if result.finished), key=lambda result: result.seed)
        course = [(result.seed, *(point for name in _COURSE for point in result.curves[name])) for result in finished]
        groups.setdefault(tuple(course), []).append(mode)
    return [tuple(modes) for modes in groups.values()]


def apart(first: Spread, second: Spread) -> bool:
    """True if the ranges do not overlap; False for a single seed, which has no range."""
    return min(first.count, second.count) > 1 and (first.low > second.high or second.low > first.high)


def chance_apart(first: int, second: int) -> float:
    """Probability that the ranges of two equal modes with so many seeds do not overlap; 0 if they never count so."""
    return 2 / math.comb(first + second, first) if min(first, second) > 1 else 0.0


def interval(right: Sequence[Sequence[int]]) -> tuple[float, float] | None:
    """The middle 95 % of the mean of `right` [seeds][prompts] over draws of seeds and prompts with replacement.

    The runs answer the same prompts, so a draw has the same prompts for all its seeds: Owen, "The pigeonhole
    bootstrap", 2007. It is too wide where answers are independent. None if there is no answer, or the runs have
    different numbers of them.
    """
    if not right or not right[0] or len(set(map(len, right))) > 1:
        return None
    known, chance = np.array(right, dtype=float), np.random.default_rng(0)
    seeds, prompts = (chance.multinomial(size, np.full(size, 1 / size), DRAWS) / size for size in known.shape)
    low, high = np.quantile(((seeds @ known) * prompts).sum(axis=1), [0.025, 0.975])
    return float(low), float(high)


def table_rows(ranking: Ranking) -> list[tuple[str, ...]]:
    """The cells of the table, a row per mode and precision, in the order of `TITLES`."""
    return [_row(row) for row in ranking.rows]


def study_notes(config: StudyConfig, results: Sequence[CellResult], ranking: Ranking) -> list[str]:
    """Explanations of the table, one or two sentences each; every failed run is named."""
    notes = [
        "Modes are ranked within a precision by the mean over seeds of the greedy held-out accuracy after the last "
        "step; behind a mean stand the least and the largest seed. A place is a range where modes are not told apart, "
        "because their ranges overlap."
    ]
    if any(row.interval for row in ranking.rows):
        notes.append(
            f"95 %: interval of the mean, by a bootstrap of {DRAWS:,} draws over seeds and held-out prompts together "
            "(percentiles). Of few seeds it is too narrow, of one it is that of the prompts; places do not use it."
        )
    for precision, *modes in ranking.same:
        notes.append(
            f"{precision}: {', '.join(modes[:-1])} and {modes[-1]} were the same run, step by step, with every seed: "
            "what sets them apart never came into play. They count as one."
        )
    if ranking.pairs and ranking.parted_by_chance:
        by_chance = f"{ranking.parted_by_chance:.1f}".removesuffix(".0")
        notes.append(
            f"{ranking.parted} of {ranking.pairs} pairs of modes are told apart. If all modes were equal, chance "
            f"alone would part up to {by_chance} of them with so few seeds."
        )
    elif ranking.pairs:
        notes.append("One seed tells nothing apart: there is no range to compare.")
    notes.append(
        f"Collapsed: the last held-out accuracy is more than {config.collapse_drop:g} below the best of the run. "
        "Entropy: mean of the last five steps. K3, gradient (norm before clipping) and ESS (raw weights): the worst "
        "step. Seconds per step: median."
    )
    notes.append("A quantised engine answers the held-out prompts as it samples: with its quantised weights.")
    for result in results:
        if result.error:
            after = f"after step {result.last_step} of {result.num_steps}" if result.last_step else ""
            where = after or "before its first step"
            notes.append(f"{result.name} FAILED {where}: {result.error}. It is not in the table.")
    open_runs = sum(not result.finished and not result.error for result in results)
    if open_runs:
        notes.append(f"{open_runs} of {len(results)} runs have not ended; the table has no numbers of them.")
    return notes


def _standing(results: Sequence[CellResult], known: dict[str, Spread]) -> Standing:
    """The row of one mode; `known` holds the scores of all modes of its precision."""
    mode = results[0].mode
    ended = [result for result in results if result.finished]
    own = known.get(mode)
    others = [] if own is None else [score for score in known.values() if apart(own, score)]
    above = sum(own is not None and score.low > own.high for score in others)
    return Standing(
        mode=mode,
        precision=results[0].precision,
        planned=len(results),
        finished=len(ended),
        failed=sum(not result.finished and bool(result.error) for result in results),
        score=own,
        interval=interval([result.heldout_right for result in ended]),
        kept_of_best=spread(result.kept_of_best for result in ended),
        places=None if own is None else (1 + above, len(known) - (len(others) - above)),
        worst_k3=spread(result.k3_max for result in ended),
        entropy=spread(result.entropy_last for result in ended),
        gradient=spread(result.grad_norm_max for result in ended),
        ess=spread(result.ess_min for result in ended),
        collapsed=sum(result.collapsed for result in ended),
        step_seconds=spread(result.step_s_median for result in ended),
    )


def _row(row: Standing) -> tuple[str, ...]:
    place = "-"
    if row.places is not None:
        first, last = row.places
        place = str(first) if first == last else f"{first}-{last}"
    failed = f", {row.failed} failed" if row.failed else ""
    return (
        row.precision,
        place,
        row.mode,
        _mean_and_range(row.score),
        "-" if row.interval is None else "{:.3f}-{:.3f}".format(*row.interval),
        _mean_and_range(row.kept_of_best),
        f"{row.collapsed} of {row.finished}" if row.finished else "-",
        "-" if row.worst_k3 is None else f"{row.worst_k3.high:.1e}",
        _mean_and_range(row.entropy),
        "-" if row.gradient is None else f"{row.gradient.high:.3g}",
        "-" if row.ess is None else f"{row.ess.low:.3f}",
        "-" if row.step_seconds is None else f"{row.step_seconds.mean:.2g}",
        f"{row.finished} of {row.planned}{failed}",
    )


def _mean_and_range(score: Spread | None) -> str:
    """Text such as "0.910 (0.880-0.930)"; the number itself for one seed; "-" for None."""
    if score is None:
        return "-"
    return f"{score.mean:.3f}" + (f" ({score.low:.3f}-{score.high:.3f})" if score.count > 1 else "")
