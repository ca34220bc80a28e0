"""Results of a study -> the table that ranks the modes, and the conclusions that so few seeds allow.

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

from trainer.study.config import StudyConfig
from trainer.study.results import CellResult, Spread, spread

TARGET_SHARE = 0.9
"""Default target, as a share of the way from the untouched policy to the best mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standings:
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
    places: tuple[int, int] | None
    """Best and worst rank within its precision that the ranges allow, from 1; None without a score."""
    like: tuple[str, ...]
    """Modes of the same precision that cannot be distinguished from this mode."""
    worst_k3: Spread | None
    entropy: Spread | None
    reward: Spread | None
    gradient: Spread | None
    ess: Spread | None
    collapsed: int
    skipped_updates: float
    reached: int
    """Number of runs that reached the target."""
    steps_to_target: Spread | None
    """Steps to the target of the runs that reached it."""
    step_seconds: Spread | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The table with its target and its counts of pairs."""

    rows: tuple[Standings, ...]
    """Rows by precision in the order of the study; within one by descending mean, modes without a score last."""
    target: float | None
    """Target held-out accuracy; None without an evaluation."""
    same: tuple[tuple[str, ...], ...]
    """Groups of a precision and two or more modes whose runs were the same, step by step, with every seed."""
    pairs: int
    """Number of pairs of modes of the same precision with a score; modes that were the same count as one."""
    parted: int
    """Number of pairs whose ranges do not overlap."""
    parted_by_chance: float
    """Average number of pairs without overlap if all modes were equal."""


def rank(results: Sequence[CellResult], study: StudyConfig) -> Ranking:
    """Compare modes within each precision."""
    precisions = list(dict.fromkeys(result.precision for result in results))
    target = study.target if study.target is not None else default_target(results)
    rows: list[Standings] = []
    same: list[tuple[str, ...]] = []
    pairs = parted = 0
    chance = 0.0
    for precision in precisions:
        by_mode: dict[str, list[CellResult]] = {}
        for result in results:
            if result.precision == precision:
                by_mode.setdefault(result.mode, []).append(result)
        scores = {mode: spread(result.score for result in found) for mode, found in by_mode.items()}
        known = {mode: score for mode, score in scores.items() if score is not None}
        groups = same_modes({mode: found for mode, found in by_mode.items() if mode in known})
        same += [(precision, *modes) for modes in groups if len(modes) > 1]
        for first, second in combinations([known[modes[0]] for modes in groups], 2):
            pairs += 1
            parted += apart(first, second)
            chance += chance_apart(first.count, second.count)
        order = sorted(by_mode, key=lambda mode: -known[mode].mean if mode in known else math.inf)
        rows += [_standings(mode, by_mode[mode], known, study=study, target=target) for mode in order]
    return Ranking(
        rows=tuple(rows), target=target, same=tuple(same), pairs=pairs, parted=parted, parted_by_chance=chance
    )


def same_modes(by_mode: dict[str, list[CellResult]]) -> list[tuple[str, ...]]:
    """Modes in groups whose finished runs had equal rewards and equal held-out accuracies at every step."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for mode, results in by_mode.items():
        course = [(r.seed, *r.rewards, *r.scores) for r in sorted(results, key=lambda r: r.seed) if r.finished]
        groups.setdefault(tuple(course), []).append(mode)
    return [tuple(modes) for modes in groups.values()]


def apart(first: Spread, second: Spread) -> bool:
    """True if the ranges do not overlap; False for a single seed, which has no range."""
    return min(first.count, second.count) > 1 and (first.low > second.high or second.low > first.high)


def chance_apart(first: int, second: int) -> float:
    """Probability that the ranges of two equal modes with so many seeds do not overlap; 0 if they never count so."""
    return 2 / math.comb(first + second, first) if min(first, second) > 1 else 0.0


def default_target(results: Sequence[CellResult]) -> float | None:
    """TARGET_SHARE of the way from the untouched policy to the mode and precision with the highest final accuracy."""
    start = spread(result.first_score for result in results)
    groups: dict[tuple[str, str], list[float | None]] = {}
    for result in results:
        groups.setdefault((result.mode, result.precision), []).append(result.score)
    ends = [found.mean for scores in groups.values() if (found := spread(scores)) is not None]
    if start is None or not ends or max(ends) <= start.mean:
        return None
    return start.mean + TARGET_SHARE * (max(ends) - start.mean)


def _standings(
    mode: str,
    results: Sequence[CellResult],
    known: dict[str, Spread],
    *,
    study: StudyConfig,
    target: float | None,
) -> Standings:
    """The row of one mode; `known` holds the scores of all modes of its precision."""
    ended = [result for result in results if result.finished]
    own = known.get(mode)
    others = {other: score for other, score in known.items() if other != mode}
    above = sum(own is not None and apart(own, score) and score.low > own.high for score in others.values())
    below = sum(own is not None and apart(own, score) and score.high < own.low for score in others.values())
    reached = [] if target is None else [result.steps_to(target) for result in ended]
    return Standings(
        mode=mode,
        precision=results[0].precision,
        planned=len(results),
        finished=len(ended),
        failed=sum(not result.finished and bool(result.error) for result in results),
        score=own,
        places=None if own is None else (1 + above, len(known) - below),
        like=() if own is None else tuple(other for other, score in others.items() if not apart(own, score)),
        worst_k3=spread(result.worst_k3 for result in ended),
        entropy=spread(result.last_entropy for result in ended),
        reward=spread(result.last_reward for result in ended),
        gradient=spread(result.largest_gradient for result in ended),
        ess=spread(result.least_ess for result in ended),
        collapsed=sum(result.collapsed(study.collapse_drop) for result in ended),
        skipped_updates=sum(result.skipped_updates for result in ended),
        reached=sum(step is not None for step in reached),
        steps_to_target=spread(reached),
        step_seconds=spread(result.step_seconds for result in ended),
    )
