"""The ladder: causes are tried, cheapest first, until what is left is as small as rounding makes it.

What a side says of itself is there from the beginning. The best cause of a round becomes part of the scoring, and the
next round looks at what is left. How much each has is found out behind it, by `shares.py`, for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer.diagnose.case import LEAST_COMMON, Candidate, Case, Number, misfit
from trainer.diagnose.rungs import DEAR, LADDER, WHOLE, Rung
from trainer.diagnose.scoring import Scoring

MAX_CAUSES = 4
SOLVED = 0.02
"""Share of the misfit below which a cause needs no rival."""
SCREEN_TOKENS = 256
"""Response tokens on which a cause that needs another forward is tried first: those that differ most."""
FLOAT32_NOISE = 1e-9
"""Misfit of correct float32 arithmetic in any order, at most: 5e-5 nats."""
NOISE = 3.0
"""Misfit, over that of the rounding of a side, below which no dear rung is climbed."""
CHOSEN = 0.5
"""Least gain of candidates with a number that was fitted, or out of many."""
REPRODUCED = 0.1
"""Misfit, over that of the rounding of a side, below which nothing is looked for: a replay gives nearly the same."""
LEAST_OF_WHOLE = 0.03
"""Share of the misfit at the start that a further cause takes away at least, unless it leaves nearly nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Causes of a difference, in the order in which they were found."""

    case: Case
    """What was explained, without what no scoring expresses."""
    causes: tuple[Candidate, ...]
    """The scoring of each holds those before it."""
    absent: tuple[Candidate, ...]
    """What this side says of itself, and does not do."""
    base: Scoring
    left: float
    """Misfit that is not explained."""

    @property
    def scoring(self) -> Scoring:
        """With all causes in it."""
        return self.causes[-1].scoring if self.causes else self.base


def noise_of(case: Case, scoring: Scoring) -> float:
    """Misfit that the rounding in `scoring` makes: only its amount is the same in another order."""
    rounded, exact = case.scorer.score([scoring, scoring.exact])
    found = misfit((rounded - exact)[case.mask]).nanmean()
    return max(FLOAT32_NOISE / NOISE, float(found))


def explain(
    case: Case, base: Scoring, *, declared: Sequence[Candidate], is_apart: bool, progress: Callable[[str], None]
) -> Explanation:
    """Climb the ladder.

    Args:
        case: log-probs of one side.
        base: the definition.
        declared: what this side says of itself, each on top of `base`.
        is_apart: False if the two sides do not differ: nothing is looked for.
        progress: is told each rung.
    """
    whole = case.total(base)
    causes, absent, behind = _declared(case, base, base, declared)
    scoring = causes[-1].scoring if causes else base
    while is_apart and len(causes) + len(absent) < MAX_CAUSES + len(declared):
        current, noise = behind.total(scoring), noise_of(behind, scoring)
        if current <= max(NOISE * FLOAT32_NOISE, REPRODUCED * noise):
            break
        dear_from = max(NOISE * noise, LEAST_OF_WHOLE * whole)
        rungs = [rung for rung in LADDER if rung not in DEAR or current > dear_from]
        best = _best(rungs, behind, scoring, whole=whole, progress=progress)
        if best is None:
            break
        causes.append(best)
        if best.case is not None:
            case = replace(case, target=best.case.target + case.target - behind.target, mask=best.case.mask)
        behind = _behind(behind, scoring, best)
        hidden, absent, behind = _declared(behind, base, best.scoring, absent)  # what a larger cause may have hidden
        causes = _needed(behind, base, [*causes, *hidden], least=LEAST_OF_WHOLE * whole)
        scoring = causes[-1].scoring
        behind = behind.along(scoring, _numbers(causes))
    causes = _with_intervals(behind, causes)
    return Explanation(case=case, causes=tuple(causes), absent=tuple(absent), base=base, left=behind.total(scoring))


def _declared(
    case: Case, base: Scoring, scoring: Scoring, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Candidate], Case]:
    """(the candidates, each on top of `scoring`, without those that are surely absent, these, the case behind)."""
    causes, absent = [], []
    for candidate in candidates:
        there = replace(candidate, scoring=scoring.changed_as(base, candidate.scoring))
        if there.rounds and _is_absent(*case.multiple(scoring, there.scoring)):
            absent.append(candidate)
            continue
        causes.append(there)
        scoring, case = there.scoring, _behind(case, scoring, there)
    return causes, absent, case


def _numbers(causes: Sequence[Candidate]) -> list[Number]:
    return [cause.number for cause in causes if cause.number is not None]


def _refitted(case: Case, causes: Sequence[Candidate]) -> tuple[list[Candidate], float]:
    """(the causes with their numbers fitted together, the misfit that they leave)."""
    scoring, _ = case.refitted(causes[-1].scoring, _numbers(causes))
    found = []
    for place, cause in enumerate(causes):
        of_cause = cause.scoring
        for number in _numbers(causes[: place + 1]):
            of_cause = number.put(of_cause, number.get(scoring))
        what = cause.what if cause.number is None else cause.number.what(cause.number.get(scoring))
        found.append(replace(cause, scoring=of_cause, what=what))
    return found, replace(case, slopes=None).total(scoring)


def _needed(case: Case, base: Scoring, causes: Sequence[Candidate], *, least: float) -> list[Candidate]:
    """The causes, fitted together, without those that the last one made superfluous."""
    found, left = _refitted(case, causes)
    for place in reversed(range(len(found) - 1)):
        cause = found[place]
        if cause.is_declared or cause.rounds or cause.case is not None:
            continue
        before = found[place - 1].scoring if place else base
        others = [
            replace(each, scoring=each.scoring.changed_as(cause.scoring, before)) if number > place else each
            for number, each in enumerate(found)
            if number != place
        ]
        others, without = _refitted(case, others)
        if without - left < least:
            found, left = others, without
    return found


def _with_intervals(case: Case, causes: list[Candidate]) -> list[Candidate]:
    """The causes, each with the 95 % interval of its number, where it is wider than what is shown."""
    if not (numbers := _numbers(causes)):
        return causes
    _, errors = case.refitted(causes[-1].scoring, numbers)
    texts = {}
    for number, error in zip(numbers, errors.tolist(), strict=True):
        value = number.get(causes[-1].scoring)
        low, high = number.shown(value - 2 * error), number.shown(value + 2 * error)
        texts[number] = "" if low == high else f" ({low} to {high})"
    return [each if each.number is None else replace(each, what=each.what + texts[each.number]) for each in causes]


def _is_absent(multiple: float, error: float) -> bool:
    """True if a rounding is surely not there."""
    return multiple + 2 * error < LEAST_COMMON


def _behind(case: Case, before: Scoring, cause: Candidate) -> Case:
    """The case for what comes behind a cause."""
    if cause.case is not None:
        return cause.case
    return case.with_replay(before, cause.scoring) if cause.rounds else case


def _best(
    rungs: Sequence[Rung], case: Case, base: Scoring, *, whole: float, progress: Callable[[str], None]
) -> Candidate | None:
    """The candidate that leaves least; None if none takes enough away."""
    best: tuple[float, Candidate] | None = None
    unsure: list[tuple[float, Candidate]] = []
    current = case.total(base)
    small = case.small(base, max_tokens=SCREEN_TOKENS)
    current_of_small = small.total(base)
    for rung in rungs:
        progress(rung.__name__)
        for candidate in rung(case if rung in WHOLE else small, base):
            if candidate.case is None and candidate.scoring.body != base.body:
                of_small = current_of_small - _behind(small, base, candidate).total(candidate.scoring)
                if of_small < candidate.least_gain * current_of_small / 2:  # hopeless, and all tokens take long
                    continue
            behind = _behind(case, base, candidate)
            left = behind.total(candidate.scoring)
            is_enough = current - left >= max(candidate.least_gain * current, LEAST_OF_WHOLE * whole)
            if not is_enough and left > SOLVED * current:  # a number that was fitted before hid it
                continue
            if not case.is_sure(base, candidate, behind):
                unsure.append((left, candidate))
            elif best is None or left < best[0]:
                best = (left, candidate)
        if best is not None and best[0] <= SOLVED * current:
            break
    # A number that was fitted, or a tensor that was chosen, changes the log-probs by what is missing anyway.
    given = [(left, each) for left, each in unsure if each.case is None and each.least_gain < CHOSEN]
    for _, candidate in sorted(given, key=lambda each: each[0]) if best is None else ():
        if case.is_sure_beside(base, candidate, [other for _, other in given if other is not candidate]):
            return candidate
    return None if best is None else best[1]
