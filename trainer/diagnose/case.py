"""One side's log-probs against what a scoring says: how far apart they are, and whether a change brings them closer.

K3 grows with the exponential of a difference, so that one token can outweigh thousands. Causes are therefore compared
by a misfit that equals K3 for small differences and grows linearly for large ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.diagnose.logprob_scorer import LogprobScorer
from trainer.diagnose.scoring import Scoring

LINEAR_FROM = 1.0
"""Nats from which the misfit is linear."""
SURE = 4.0
"""Standard errors that the mean change of a token has to be away from none."""
ALIKE = 0.9
"""Correlation of the changes of two causes from which they are one."""
NEARLY_NOTHING = 0.1
"""Share of the misfit that may be left of a cause that is sure by its size."""
COMMON = 0.35
"""Multiple from which a cause that rounds is there as computed. The multiple is below 1 where a replay has other noise:
on SmolLM2-135M a format has a correlation of 0.5 to 0.8 with itself, and less than 0.25 with other causes."""
LEAST_COMMON = 0.15
"""Multiple up to which it is not there."""
SMALLEST = 1e-9
"""Squares of changes that are float32 noise, nats^2."""
GOLDEN = (math.sqrt(5) - 1) / 2
NUDGE = 0.02
"""By so much a fitted number is moved to see how the log-probs move with it."""
MOST_REFITS = 8
SETTLED = 1e-4
"""Share of the misfit by which a refit has to lower it to be followed by another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A number of a cause that is fitted, on a scale on which a step of NUDGE is small."""

    get: Callable[[Scoring], float]
    put: Callable[[Scoring, float], Scoring]
    what: Callable[[float], str]
    """Number -> `Candidate.what`."""
    shown: Callable[[float], str]
    """Number -> its text for an interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A possible cause."""

    name: str
    """The cause in one or two words: the same for all seeds and models."""
    what: str
    """The cause as a sentence without a subject: what this side does."""
    remedy: str
    """What to change."""
    scoring: Scoring
    """With the cause in it."""
    least_gain: float = 0.2
    """Share of the misfit that it has to take away. A fitted number takes some away from anything."""
    alike: tuple[str, ...] = ()
    """Other causes that give the same log-probs."""
    is_declared: bool = False
    """True for what this side says of itself: always a part, and no fault."""
    number: Number | None = None
    """What was fitted. It is fitted again beside every further cause."""
    case: Case | None = None
    """The case with the cause taken out of its numbers, for what no scoring expresses."""

    @property
    def rounds(self) -> bool:
        """True if another order of the same arithmetic gives other values."""
        return self.name in ("arithmetic", "head precision", "quantization")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """Log-probs that are to be explained."""

    scorer: LogprobScorer
    target: Tensor
    """[R] float64, nats: those of the engine, or of the trainer."""
    mask: Tensor
    """[R] bool: tokens that count."""
    slopes: Tensor | None = None
    """[K, R] nats: how the log-probs move with the numbers that were fitted so far. Any change is judged with these
    numbers fitted again, to first order: a number that was fitted without the change has taken a part of it."""

    def misfits(self, scorings: Sequence[Scoring]) -> Tensor:
        """[C, R] float64: misfit of every token; NaN where it does not count."""
        left = torch.where(self.mask, self.target - self.scorer.score(scorings), math.nan)
        if self.slopes is not None:
            left = torch.stack([each - _regressed(each, self.slopes)[0] @ self.slopes for each in left])
        return misfit(left)

    def along(self, scoring: Scoring, numbers: Sequence[Number]) -> Case:
        """The case with the slopes of `numbers` at `scoring`."""
        if not numbers:
            return replace(self, slopes=None)
        moved = [number.put(scoring, number.get(scoring) + NUDGE) for number in numbers]
        plain, *changed = self.scorer.score([scoring, *moved])
        return replace(self, slopes=((torch.stack(changed) - plain) / NUDGE).nan_to_num(0.0))

    def refitted(self, scoring: Scoring, numbers: Sequence[Number]) -> tuple[Scoring, Tensor]:
        """(the scoring with all `numbers` fitted together, their standard errors), by steps of Gauss and Newton."""
        plain = replace(self, slopes=None)
        total, errors = plain.total(scoring), torch.zeros(0)
        for _ in range(MOST_REFITS if numbers else 0):
            slopes = self.along(scoring, numbers).slopes
            assert slopes is not None
            left = torch.where(self.mask, self.target - self.scorer.score([scoring])[0], math.nan)
            steps, errors = _regressed(left, slopes)
            new = scoring
            for number, step in zip(numbers, steps.tolist(), strict=True):
                new = number.put(new, number.get(new) + step)
            if (of_new := plain.total(new)) >= (1 - SETTLED) * total:
                break
            scoring, total = new, of_new
        return scoring, errors

    def total(self, scoring: Scoring) -> float:
        """Mean misfit over the tokens."""
        return self.totals([scoring])[0]

    def totals(self, scorings: Sequence[Scoring]) -> list[float]:
        """Mean misfit over the tokens, of every scoring; infinite if one that should have a log-prob has none."""
        misfits = self.misfits(scorings)
        means = misfits.nanmean(-1).nan_to_num(math.inf)
        for number, scoring in enumerate(scorings):
            if not scoring.shift and bool(misfits[number][self.mask].isnan().any()):  # 16 bits overflowed
                means[number] = math.inf
        totals: list[float] = means.tolist()
        return totals

    def best(self, scorings: Sequence[Scoring]) -> tuple[int, float]:
        """(number of the scoring that fits best, its mean misfit)."""
        totals = self.totals(scorings)
        number = min(range(len(totals)), key=totals.__getitem__)
        return number, totals[number]

    def fitted(self, make: Callable[[float], Scoring], low: float, high: float, *, steps: int) -> tuple[float, float]:
        """(value from `low` to `high` that fits best, its mean misfit), by golden section: one minimum is assumed."""
        inner = [high - GOLDEN * (high - low), low + GOLDEN * (high - low)]
        totals = self.totals([make(value) for value in inner])
        for _ in range(steps):
            left = totals[0] <= totals[1]
            low, high = (low, inner[1]) if left else (inner[0], high)
            new = high - GOLDEN * (high - low) if left else low + GOLDEN * (high - low)
            inner = [new, inner[0]] if left else [inner[1], new]
            of_new = self.total(make(new))
            totals = [of_new, totals[0]] if left else [totals[1], of_new]
        number = 0 if totals[0] <= totals[1] else 1
        return inner[number], totals[number]

    def is_sure(self, before: Scoring, candidate: Candidate, behind: Case) -> bool:
        """True if the candidate brings the tokens closer by more than chance would have it.

        Nearly the whole misfit does not go by chance. Less is judged by the signs of the changes, token by token: a few
        tokens hold most of a misfit, so that its mean is never sure.
        """
        old = self.misfits([before])[0].sqrt()
        new = behind.misfits([candidate.scoring])[0].sqrt()
        both = ~(old.isnan() | new.isnan())
        old, new = old[both], new[both]
        if len(old) < 2:
            return False
        if float(new.square().sum()) < NEARLY_NOTHING * float(old.square().sum()):
            return True
        gain = (old - new) / (old + new).clamp_min(1e-12)
        gain = gain[old + new > (old + new).mean() / 10]
        return float(gain.mean()) > SURE * float(gain.std()) / math.sqrt(len(gain))

    def is_sure_beside(self, before: Scoring, candidate: Candidate, others: Sequence[Candidate]) -> bool:
        """True if the candidate changes the log-probs by what is missing, whatever the others explain.

        Two causes of one size hide each other: each by itself leaves the other, and makes as many tokens worse as
        better. Others that change nearly the same are left out: they are the same cause by another name.
        """
        scorings = [candidate.scoring, *(each.scoring for each in others)]
        plain, *changed = self.scorer.score([before, *scorings])
        changes = torch.stack(changed)[:, self.mask] - plain[self.mask]
        alike = torch.corrcoef(changes)[0].abs() > ALIKE if others else torch.ones(1)
        kept = [scoring for scoring, is_alike in zip(scorings[1:], alike[1:], strict=False) if not is_alike]
        multiples, errors = self._multiples(before, [candidate.scoring, *kept])
        return float(multiples[0]) > SURE * float(errors[0])

    def with_replay(self, before: Scoring, after: Scoring) -> Case:
        """The case for what comes behind a change that rounds: its target has what a replay does not reproduce in it.

        Rounding in another order gives other values. The multiple of the change that fits is below 1 then, and the
        misfit that `after` leaves is that of this multiple.
        """
        multiple, _ = self.multiple(before, after)
        plain, changed = self.scorer.score([before, after])
        return replace(self, target=self.target + (1 - min(max(multiple, 0), 1)) * (changed - plain).nan_to_num(0.0))

    def multiple(self, before: Scoring, after: Scoring) -> tuple[float, float]:
        """(multiple of a change that fits, its standard error)."""
        multiples, errors = self._multiples(before, [after])
        return float(multiples[0]), float(errors[0])

    def _multiples(self, before: Scoring, scorings: Sequence[Scoring]) -> tuple[Tensor, Tensor]:
        """The multiples [C] of changes that fit together, and their standard errors."""
        plain, *changed = self.scorer.score([before, *scorings])
        left, changes = self.target - plain, torch.stack(changed) - plain
        mask = self.mask & ~(left + changes.sum(0)).isnan()
        left, changes = left[mask], changes[:, mask]
        weights = evenly(changes, torch.ones_like(left, dtype=torch.bool))
        beside = changes if self.slopes is None else torch.cat([changes, self.slopes[:, mask]])
        multiples, errors = regressed(left, beside, weights)
        return multiples[: len(scorings)], errors[: len(scorings)]

    def small(self, base: Scoring, *, max_tokens: int, is_one_step: bool = False) -> Case:
        """The responses that differ most from `base`, about `max_tokens` tokens: for causes that are tried often."""
        lengths, steps = self.scorer.evidence.lengths, self.scorer.evidence.steps
        sums = [float(each.nansum()) for each in self.misfits([base])[0].split(lengths)]
        order = sorted(range(len(lengths)), key=sums.__getitem__, reverse=True)
        order = [number for number in order if not is_one_step or steps[number] == steps[order[0]]]
        ends = itertools.accumulate(lengths[number] for number in order)
        chosen = sorted(order[: max(1, sum(end <= max_tokens for end in ends))])
        targets, masks = self.target.split(lengths), self.mask.split(lengths)
        slopes = None if self.slopes is None else self.slopes.split(lengths, 1)
        return Case(
            scorer=self.scorer.of_responses(chosen, most=max_tokens),
            target=torch.cat([targets[number][:max_tokens] for number in chosen]),
            mask=torch.cat([masks[number][:max_tokens] for number in chosen]),
            slopes=None if slopes is None else torch.cat([slopes[number][:, :max_tokens] for number in chosen], 1),
        )


def misfit(deltas: Tensor) -> Tensor:
    """d^2 / 2 up to LINEAR_FROM and linear from there on (Huber's loss), elementwise, nats."""
    size = deltas.abs()
    return torch.where(size <= LINEAR_FROM, deltas.square() / 2, LINEAR_FROM * (size - LINEAR_FROM / 2))


def _regressed(left: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """The steps [K] that leave least misfit of `left` [R], to first order; NaN does not count."""
    there = ~left.isnan()
    return regressed(left[there], slopes[:, there], 1 / left[there].abs().clamp_min(LINEAR_FROM))


def regressed(left: Tensor, changes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Multiples [C] of `changes` [C, R] that fit together, and their standard errors (White, Econometrica 48, 1980)."""
    weighted = changes * weights
    inverse = torch.linalg.pinv(weighted @ changes.T, hermitian=True)
    multiples = inverse @ (weighted @ left)
    return multiples, (inverse @ (weighted * (left - multiples @ changes))).square().sum(-1).sqrt()


def evenly(changes: Tensor, mask: Tensor) -> Tensor:
    """[R] weights of the tokens, so that none of them decides: 1 / (changes^2 [C, R] + that of a usual token)."""
    squares = changes.square().sum(0)
    usual = squares[mask].median() if bool(mask.any()) else 0.0
    return torch.where(mask, 1 / (squares + usual + SMALLEST), 0.0)
