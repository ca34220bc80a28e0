"""Evidence and a model -> the parts of K3, each with its cause and its remedy.

Three kinds of log-probs are compared for the same tokens: those of the trainer, those of the engine, and those of the
definition, computed here from the weights. A side that differs from the definition by more than its arithmetic has a
cause, which the ladder looks for. Then one thing at a time is changed, from the trainer's log-probs to the engine's:
the parts are differences of K3 against the engine, and add up to the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollout.config import DType, Quantization
from trainer.diagnose.case import Candidate, Case, misfit
from trainer.diagnose.evidence import Evidence, k3_between
from trainer.diagnose.ladder import NOISE, SOLVED, Explanation, explain
from trainer.diagnose.logprob_scorer import LogprobScorer, OtherWeightsError
from trainer.diagnose.routing import RoutingPart, routing_part
from trainer.diagnose.rungs import fitted_temperature, other_orders, precision
from trainer.diagnose.scoring import Scoring

logger = logging.getLogger(__name__)

FLOAT32_NOISE = 1e-9
"""Misfit of correct float32 arithmetic in any order, at most: 5e-5 nats."""
ORDER_TOKENS = 96
"""Response tokens that are read token by token."""
LEAST_PART = 1e-4
"""Share of K3 below which a part is not named."""
MUCH = 0.2
"""Share of K3 from which arithmetic in a type that nobody mentioned is looked for in what is left."""
OTHER_WEIGHTS = 20.0
"""If engine and trainer agree with each other this many times better than with the loaded model, the loaded weights are
not those that they used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What both sides say of themselves."""

    temperature: float | None = None
    """None if nobody wrote it down: that of the trainer's log-probs is then taken."""
    trainer_dtype: DType = DType.float32
    engine_dtype: DType = DType.float32
    quantization: Quantization = Quantization.none
    """Of the engine."""
    replays_routes: bool = False
    """True if the trainer used the experts that the engine chose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of K3."""

    side: str
    """engine or trainer."""
    name: str
    what: str
    remedy: str
    k3: float
    """Nats per token; negative if the cause hides a part of another one."""
    is_fault: bool
    """False for arithmetic in the types that the two sides are said to have."""
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The answer."""

    evidence: Evidence
    k3: float
    """Of the tokens of the evidence."""
    parts: tuple[Part, ...]
    """The largest first."""
    unexplained: float
    """What of K3 is left, nats per token."""
    routing: RoutingPart | None = None
    """None for a dense model, and where nobody knows what the engine chose."""
    notes: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Part, ...]:
        """Causes that are no arithmetic, the largest first."""
        return tuple(part for part in self.parts if part.is_fault)


def diagnose(scorer: LogprobScorer, settings: Settings, *, progress: Callable[[str], None] = logger.info) -> Diagnosis:
    """Explain the evidence of `scorer`. `progress` is told what is tried.

    Raises OtherWeightsError if both sides agree with each other and not with the weights.
    """
    evidence = scorer.evidence
    base = Scoring(temperature=1.0 if settings.temperature is None else settings.temperature)
    if settings.trainer_dtype is settings.engine_dtype:  # both round alike: no part of the mismatch
        base = base.computed_in(settings.trainer_dtype)
    notes: list[str] = []
    routing = None if scorer.mixture is None else _routing(scorer, base, settings, notes)
    if routing is not None:
        base = base.with_body(replays=routing.is_replayed)
    evidence = scorer.evidence  # with the routes that were estimated
    cases = {
        "trainer": Case(scorer=scorer, target=evidence.trainer, mask=evidence.mask),
        "engine": Case(scorer=scorer, target=evidence.engine, mask=evidence.mask),
    }
    if settings.temperature is None:
        base = _temperature_of(cases["trainer"], base, notes)
    dtypes = {"trainer": settings.trainer_dtype, "engine": settings.engine_dtype}
    noises = {side: _noise(case, base, dtypes[side]) for side, case in cases.items()}
    apart = float(misfit((evidence.engine - evidence.trainer)[evidence.mask]).mean())
    climbs = apart > NOISE * sum(noises.values())
    found: dict[str, Explanation] = {}
    for side, case in cases.items():
        progress(f"{side}: K3 from the definition {k3_between(case.target, scorer.score([base])[0], case.mask):.2e}")

        def tell(rung: str, side: str = side) -> None:
            progress(f"{side}: {rung}")

        rounds = [
            candidate
            for candidate in precision(case, base)
            if candidate.name == "rounded weights" and candidate.scoring.body.rounded is dtypes[side]
        ]
        noise = noises[side] if climbs else math.inf
        # What the engine did has the experts that it chose in it; how the trainer differs is a part.
        definition = base.with_body(replays=base.body.replays or (side == "engine" and routing is not None))
        found[side] = explain(case, definition, expected=rounds, noise=noise, progress=tell)
    if apart > 0:
        _refuse_other_weights(cases, found, apart, noises)
    if (of_age := age_note(evidence)) is not None:
        notes.append(of_age)
    return replace(_Walk(evidence, scorer, settings, found, noises, routing).diagnosis(notes), routing=routing)


def _routing(scorer: LogprobScorer, base: Scoring, settings: Settings, notes: list[str]) -> RoutingPart | None:
    """What the choice of experts makes of K3; None if nobody knows what the engine chose."""
    is_recorded = scorer.evidence.routes is not None
    if not is_recorded:
        engine = base.computed_in(settings.engine_dtype).with_body(quantization=settings.quantization)
        if engine.body == base.body:
            notes.append(
                "the engine's choice of experts was not written down, and both sides are said to do the same "
                "arithmetic: what the choice makes of K3 is not known (policy.routing=replay writes it down)"
            )
            return None
        scorer.take_routes(engine.body)
        notes.append(
            "the engine's choice of experts was not written down: it is estimated by reading the tokens again as the "
            "engine is said to compute. What is not explained may be this choice too: a step with "
            "policy.routing=replay and dump.every=1 would tell"
        )
    return routing_part(scorer, base, is_replayed=settings.replays_routes, is_recorded=is_recorded)


def age_note(evidence: Evidence) -> str | None:
    """What is known of the age of the weights, where the bundle has versions and some are old."""
    if evidence.lags is None or not bool((old := evidence.mask & (evidence.lags > 0)).any()):
        return None
    share = float(old.sum() / evidence.mask.sum())
    of_old = k3_between(evidence.engine, evidence.trainer, old) * share / max(evidence_k3(evidence), 1e-300)
    oldest = int(evidence.lags[old].max())
    return (
        f"{share:.0%} of the tokens were sampled with weights up to {oldest} optimizer steps old; "
        f"they have {of_old:.0%} of K3"
    )


def evidence_k3(evidence: Evidence) -> float:
    """K3 of the tokens of the evidence."""
    return k3_between(evidence.engine, evidence.trainer, evidence.mask)


def _temperature_of(case: Case, base: Scoring, notes: list[str]) -> Scoring:
    """The temperature of the trainer's log-probs, where nobody wrote it down."""
    before, found = case.total(base), fitted_temperature(case, base)
    if before <= FLOAT32_NOISE or found is None or case.total(found.scoring) > SOLVED * before:
        return base
    temperature = round(found.scoring.temperature, 3)
    notes.append(f"nobody wrote the temperature down; the trainer's log-probs have {temperature:g}")
    return replace(base, temperature=temperature)


def _noise(case: Case, base: Scoring, dtype: DType) -> float:
    """Misfit that arithmetic in `dtype` makes of the same weights."""
    if dtype is DType.float32:
        return FLOAT32_NOISE
    plain = base.with_body(rounded=dtype).computed_in(DType.float32)
    one, other = case.scorer.score([plain, plain.computed_in(dtype)])
    return float(misfit((one - other)[case.mask]).mean())


def _refuse_other_weights(
    cases: dict[str, Case], found: dict[str, Explanation], apart: float, noises: dict[str, float]
) -> None:
    """Raise OtherWeightsError where the two sides agree much better than either does with the model."""
    left = min(found[side].case.total(found[side].scoring) for side in cases)
    if left > OTHER_WEIGHTS * max(apart, *noises.values()):
        raise OtherWeightsError(
            f"engine and trainer agree with each other (misfit {apart:.1e}), and neither with the model (at least "
            f"{left:.1e}): it does not have the weights that sampled these tokens, the prompts are not those that were "
            "read, or both sides do something that is not said. Give model= the weights of the step, and say "
            "trainer_dtype=, rollout_dtype= and temperature="
        )


class _Walk:
    """The way from the trainer's log-probs to the engine's, one change at a time; every change takes a part of K3."""

    def __init__(
        self,
        evidence: Evidence,
        scorer: LogprobScorer,
        settings: Settings,
        found: dict[str, Explanation],
        noises: dict[str, float],
        routing: RoutingPart | None,
    ) -> None:
        self._routing = None if routing is None or routing.is_replayed else routing
        self._evidence, self._scorer, self._settings = evidence, scorer, settings
        self._trainer, self._engine, self._noises = found["trainer"], found["engine"], noises
        self._target, self._mask = evidence.engine, evidence.mask
        self._parts: list[Part] = []
        self._whole = self._now = evidence_k3(evidence)
        self._unexplained = 0.0

    def diagnosis(self, notes: list[str]) -> Diagnosis:
        """Walk, and say what was found."""
        if self._trainer.causes or self._engine.causes:
            self._from_trainer()
            if self._routing is not None:
                self._take("trainer", _own_experts(self._routing, self._engine.base), self._to(self._engine.base))
            self._to_engine()
        elif self._routing is not None:
            self._take("trainer", _own_experts(self._routing, self._engine.base), self._routing.k3_replayed)
        self._rest()
        if not self._engine.causes and not self._trainer.causes:
            notes.append(_order_note(self._engine.case, self._engine.base, self._settings.engine_dtype))
        kept = [part for part in self._parts if part.name == "routing" or abs(part.k3) > LEAST_PART * self._whole]
        self._unexplained += sum(part.k3 for part in self._parts) - sum(part.k3 for part in kept)
        return Diagnosis(
            evidence=self._evidence,
            k3=self._whole,
            parts=tuple(sorted(kept, key=lambda part: -part.k3)),
            unexplained=self._unexplained,
            notes=tuple(notes),
        )

    def _take(self, side: str, cause: Candidate, after: float) -> None:
        """A change leaves `after` of K3."""
        self._parts.append(_part(side, cause, self._now - after, self._settings, self._evidence))
        self._now = after

    def _to(self, scoring: Scoring) -> float:
        """K3 of the engine against `scoring`."""
        return k3_between(self._target, self._scorer.score([scoring])[0], self._mask)

    def _from_trainer(self) -> None:
        """Take the causes of the trainer away: from its own log-probs to the definition."""
        explained = self._trainer
        for cause in explained.causes:
            if cause.case is not None:
                self._mask = self._mask & cause.case.mask
                self._take("trainer", cause, k3_between(self._target, cause.case.target, self._mask))
        after = self._to(explained.scoring)
        if explained.case.total(explained.scoring) <= NOISE * self._noises["trainer"]:
            own = _own_arithmetic("trainer", self._settings.trainer_dtype, explained.scoring)
            self._take("trainer", own, after)
        else:
            self._unexplained += self._now - after
            self._now = after
        scorings = [explained.base, *(cause.scoring for cause in explained.causes)]
        for cause, before in zip(reversed(explained.causes), reversed(scorings[:-1]), strict=True):
            if cause.case is None:
                self._take("trainer", cause, self._to(before))

    def _to_engine(self) -> None:
        """Put the causes of the engine in: from the definition to what it did."""
        for cause in self._engine.causes:
            if cause.case is not None:
                self._target, self._mask = cause.case.target, self._mask & cause.case.mask
            self._take("engine", cause, self._to(cause.scoring))

    def _rest(self) -> None:
        """Name arithmetic in what is left; the remainder is not explained.

        Rounding in another order cannot be reproduced, but its size can: that of a type on the same tokens. It may be
        of the types that the two sides are said to have, or, where it is much, of another one: then that is a fault.
        """
        settings, rest = self._settings, self._now
        self._now = 0.0
        known = [("engine", settings.engine_dtype)]
        if not (self._trainer.causes or self._engine.causes):  # else the trainer's has its part already
            known.append(("trainer", settings.trainer_dtype))
        known.append(("engine", self._engine.scoring.body.arithmetic))  # which a cause may have changed
        for number, (side, dtype) in enumerate(known):
            if rest <= NOISE * self._size(dtype):
                cause = _own_arithmetic(side, dtype, self._engine.scoring)
                part = _part(side, cause, rest, settings, self._evidence)
                self._parts.append(replace(part, is_fault=number == len(known) - 1))
                return
        for dtype in (DType.bfloat16, DType.float16):
            size = self._size(dtype)
            if rest > MUCH * self._whole and size / NOISE < rest < size * NOISE:
                cause = _own_arithmetic("engine", dtype, self._engine.scoring)
                part = _part("engine", cause, rest, settings, self._evidence)
                self._parts.append(replace(part, is_fault=True))
                return
        self._unexplained += rest

    def _size(self, dtype: DType) -> float:
        """K3 that arithmetic in `dtype` makes with the causes of the engine in it."""
        if dtype is DType.float32:
            return FLOAT32_NOISE
        plain = self._engine.scoring.computed_in(DType.float32)
        one, other = self._scorer.score([plain, plain.computed_in(dtype)])
        return k3_between(one, other, self._mask)


def _part(side: str, cause: Candidate, k3: float, settings: Settings, evidence: Evidence) -> Part:
    return Part(
        side=side,
        name=cause.name,
        what=cause.what,
        remedy=cause.remedy,
        k3=k3,
        is_fault=not _is_expected(side, cause, settings, evidence),
        alike=cause.alike,
    )


def _is_expected(side: str, cause: Candidate, settings: Settings, evidence: Evidence) -> bool:
    """True for arithmetic in the types that this side is said to have, and for an age that is written down."""
    if cause.is_order or cause.name == "routing":
        return True
    body = cause.scoring.body
    dtype = settings.engine_dtype if side == "engine" else settings.trainer_dtype
    if cause.name == "quantization":
        is_said = body.quantization is settings.quantization and body.arithmetic in (DType.float32, dtype)
        return side == "engine" and is_said
    if cause.name == "stale weights":
        return side == "engine" and evidence.lags is not None and bool((evidence.lags > 0).any())
    if cause.name in ("rounded weights", "arithmetic"):
        return dtype is (body.rounded if cause.name == "rounded weights" else body.arithmetic)
    return cause.name == "head precision" and dtype is cause.scoring.head


def _own_experts(routing: RoutingPart, scoring: Scoring) -> Candidate:
    return Candidate(
        name="routing",
        what=f"chooses other experts than the engine for {routing.tokens_rerouted:.1%} of the tokens",
        remedy="policy.routing=replay",
        scoring=scoring,
    )


def _own_arithmetic(side: str, dtype: DType, scoring: Scoring) -> Candidate:
    other = "trainer" if side == "engine" else "engine"
    return Candidate(
        name="arithmetic",
        what=f"computes in {dtype.name}, in another order than the {other}",
        remedy="rollout.exact=true on a CPU, or a wider type; corrections are for this",
        scoring=scoring,
        is_order=True,
    )


def _order_note(case: Case, base: Scoring, dtype: DType) -> str:
    """How much log-probs change by the order of the arithmetic alone, in this process: each way by itself."""
    scoring = base.computed_in(dtype)
    small = case.small(scoring, max_tokens=ORDER_TOKENS)
    ways = other_orders(scoring)
    plain, *found = small.scorer.score([scoring, *ways.values()])
    sizes = (f"{name} {k3_between(one, plain, small.mask):.1e}" for name, one in zip(ways, found, strict=True))
    return f"K3 of the order of the arithmetic alone, in {dtype.name} on {len(plain)} tokens: {', '.join(sizes)}"
