"""The ladder: causes are tried, cheapest first, until what is left is as small as arithmetic makes it.

The best cause of a round becomes part of the scoring, and the next round explains what is left: one thing is changed at
a time, and what each takes away adds up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.diagnose.case import Candidate, Case
from trainer.diagnose.rungs import LADDER, WHOLE
from trainer.diagnose.scoring import Scoring

MAX_CAUSES = 4
SOLVED = 0.02
"""Share of the misfit below which a cause needs no rival."""
SCREEN_TOKENS = 256
"""Response tokens on which a cause that needs another forward is tried first: those that differ most."""
NOISE = 3.0
"""Misfit, over that of the arithmetic, below which nothing is looked for."""
LEAST_OF_WHOLE = 0.03
"""Share of the misfit at the start that a further cause takes away at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Causes of a difference, in the order in which they were found."""

    case: Case
    """What was explained, without what no scoring expresses."""
    causes: tuple[Candidate, ...]
    """The scoring of each holds those before it."""
    base: Scoring

    @property
    def scoring(self) -> Scoring:
        """With all causes in it."""
        return self.causes[-1].scoring if self.causes else self.base


def explain(
    case: Case, base: Scoring, *, expected: Sequence[Candidate], noise: float, progress: Callable[[str], None]
) -> Explanation:
    """Climb the ladder.

    Args:
        case: log-probs of one side.
        base: the definition.
        expected: what this side says of itself: a part of the mismatch also where nothing is to be looked for.
        noise: misfit that this side's own arithmetic makes; infinite if nothing is to be looked for.
        progress: is told each rung.
    """
    causes: list[Candidate] = []
    whole = case.total(base)
    scoring = base
    for candidate in expected:
        if case.total(scoring) - case.total(candidate.scoring) > LEAST_OF_WHOLE * whole:
            causes.append(candidate)
            scoring = candidate.scoring
    while len(causes) < MAX_CAUSES + len(expected):
        current = case.total(scoring)
        if current <= NOISE * noise or current < LEAST_OF_WHOLE * whole:
            break
        best = _best(case, scoring, current, noise=noise, whole=whole, progress=progress)
        if best is None:
            break
        causes.append(best)
        case, scoring = best.case or case, best.scoring
    return Explanation(case=case, causes=tuple(causes), base=base)


def _best(
    case: Case, base: Scoring, current: float, *, noise: float, whole: float, progress: Callable[[str], None]
) -> Candidate | None:
    """The candidate that leaves least; None if none takes enough away."""
    best: tuple[float, Candidate] | None = None
    small = case.small(base, max_tokens=SCREEN_TOKENS)
    current_of_small = small.total(base)
    for rung in LADDER:
        progress(rung.__name__)
        for candidate in rung(case if rung in WHOLE else small, base):
            if candidate.case is None and candidate.scoring.body != base.body:
                of_small = current_of_small - small.total(candidate.scoring)
                if of_small < candidate.least_gain * current_of_small / 2:  # hopeless, and all tokens take long
                    continue
            left = (candidate.case or case).total(candidate.scoring)
            if current - left < max(candidate.least_gain * current, LEAST_OF_WHOLE * whole):
                continue
            if (best is None or left < best[0]) and case.is_sure(base, candidate):
                best = (left, candidate)
        if best is not None and best[0] <= max(NOISE * noise, SOLVED * current):
            break
    return None if best is None else best[1]
