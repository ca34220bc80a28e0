"""Evidence and a model -> the parts of K3, each with its cause and its remedy.

Three kinds of log-probs are compared for the same tokens: those of the trainer, those of the engine, and those of the
definition, computed here from the weights. A side that differs from the definition by more than its arithmetic has a
cause, which the ladder looks for. `shares.py` then divides K3 among the causes of both sides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from algorithms.kl import k3
from rollout.config import DType, Quantization
from trainer.diagnose.case import Candidate, Case, misfit
from trainer.diagnose.evidence import Evidence, k3_between
from trainer.diagnose.ladder import FLOAT32_NOISE, NOISE, SOLVED, Explanation, explain, noise_of
from trainer.diagnose.logprob_scorer import LogprobScorer, OtherWeightsError
from trainer.diagnose.routing import RoutingPart, routing_part
from trainer.diagnose.rungs import arithmetic, fitted_temperature, quantized, rounded_weights
from trainer.diagnose.scoring import Scoring
from trainer.diagnose.shares import Effect, Share, shares
from trainer.text.plain import counted

logger = logging.getLogger(__name__)

LEAST_PART = 1e-4
"""Share of K3 below which a part is not named that nobody declared."""
ROUNDING = 1e-9
"""Share of K3 that the sum of the parts may miss by its own rounding."""
OTHER_WEIGHTS = 5.0
"""If engine and trainer agree with each other this many times better than with the loaded model, the loaded weights are
not those that they used."""
FAR = 0.3
"""A side whose misfit is above this share of another one is not explained beside it."""


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
class Part(Share):
    """A part of K3, with its cause."""

    side: str
    """engine or trainer."""
    name: str
    what: str
    remedy: str
    is_declared: bool
    """True for what the two sides say of themselves."""
    is_fault: bool
    """True for what nobody declared, and whose interval is above 0."""
    alike: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The answer."""

    evidence: Evidence
    k3: float
    """Of the tokens of the evidence."""
    parts: tuple[Part, ...]
    """The largest first."""
    unexplained: Share
    """What of K3 is left: rounding that no replay shows, or a cause that is not known."""
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
    is_apart = bool((evidence.engine - evidence.trainer)[evidence.mask].abs().max() > 0)
    found: dict[str, Explanation] = {}
    for side, case in cases.items():
        progress(f"{side}: K3 from the definition {k3_between(case.target, scorer.score([base])[0], case.mask):.2e}")

        def tell(rung: str, side: str = side) -> None:
            progress(f"{side}: {rung}")

        # What the engine did has the experts that it chose in it; how the trainer differs is a part.
        definition = base.with_body(replays=base.body.replays or (side == "engine" and routing is not None))
        said = _declared(side, definition, settings)
        found[side] = explain(case, definition, declared=said, is_apart=is_apart, progress=tell)
    _refuse_other_weights(scorer, found)
    notes.extend(_other_trainer_notes(evidence, found))
    if (of_age := age_note(evidence)) is not None:
        notes.append(of_age if scorer.num_weights > 1 else f"{of_age}. Name those weights: older=<directory>")
    return _divided(evidence, found, routing, notes)


def _declared(side: str, base: Scoring, settings: Settings) -> list[Candidate]:
    """What a side says of itself, beyond the definition."""
    dtype = settings.engine_dtype if side == "engine" else settings.trainer_dtype
    found: list[Candidate] = []
    if base.body.arithmetic is not dtype:
        found.append(rounded_weights(base, dtype))
    if side == "engine" and settings.quantization is not Quantization.none:
        found.append(quantized(base, settings.quantization))
    if base.body.arithmetic is not dtype:
        found.append(arithmetic(base, dtype, head=dtype))
    return [replace(each, is_declared=True) for each in found]


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
    if evidence.lags is None or not evidence.has_old:
        return None
    old = evidence.mask & (evidence.lags > 0)
    share = float(old.sum() / evidence.mask.sum())
    of_old = k3_between(evidence.engine, evidence.trainer, old) * share / max(evidence_k3(evidence), 1e-300)
    oldest = int(evidence.lags[old].max())
    return (
        f"{share:.0%} of the tokens were sampled with weights up to {counted(oldest, 'optimizer step')} old; "
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


def _refuse_other_weights(scorer: LogprobScorer, found: dict[str, Explanation]) -> None:
    """Raise OtherWeightsError where the trainer has older weights than the model, or both sides have others.

    The weights of a step are those of its trainer: what older ones of both sides change is no part of K3.
    """
    evidence, body = scorer.evidence, found["trainer"].scoring.body
    if body.weights and body.share == 1:
        name = scorer.names[body.weights]
        raise OtherWeightsError(
            f"the trainer's log-probs are those of the weights {name}, not of {scorer.names[0]}, which was made later: "
            f"the weights of a step are those that it begins with. Give model= the weights {name}, and older= those "
            "before them"
        )
    apart = float(misfit((evidence.engine - evidence.trainer)[evidence.mask]).mean())
    noises = [noise_of(each.case, each.scoring) for each in found.values()]
    left = min(each.left for each in found.values())
    if apart > 0 and left > OTHER_WEIGHTS * max(apart, *noises):
        raise OtherWeightsError(
            f"engine and trainer agree with each other (misfit {apart:.1e}), and neither with the model (at least "
            f"{left:.1e}): it does not have the weights that sampled these tokens, the prompts are not those that were "
            "read, or both sides do something that is not said. Give model= the weights of the step, and say "
            "trainer_dtype=, rollout_dtype= and temperature="
        )


def _other_trainer_notes(evidence: Evidence, found: dict[str, Explanation]) -> Iterator[str]:
    """Yield what it may mean that the trainer's log-probs are far from the model's, and that no cause explains it."""
    apart = float(misfit((evidence.engine - evidence.trainer)[evidence.mask]).mean())
    trainer, engine = found["trainer"], found["engine"]
    if trainer.left <= max(FAR * apart, NOISE * noise_of(trainer.case, trainer.scoring)):
        return
    what = "the engine's are: the trainer had other weights, newer ones where training is asynchronous"
    if engine.left > FAR * trainer.left:
        what = "it may not hold the weights that the trainer had at this step"
    yield (
        f"the trainer's log-probs are not those of the model (misfit {trainer.left:.1e}, and {apart:.1e} between "
        f"trainer and engine): {what}. Give model= the weights of the trainer, older= those before"
    )


def _divided(
    evidence: Evidence, found: dict[str, Explanation], routing: RoutingPart | None, notes: list[str]
) -> Diagnosis:
    """Divide K3 among the causes of both sides."""
    effects = [effect for side, each in found.items() for effect in _effects(side, each, evidence)]
    bases = {side: each.case.scorer.score([each.base])[0] for side, each in found.items()}
    if routing is not None and not routing.is_replayed:
        own = _own_experts(routing, found["trainer"].base)
        change = bases["trainer"] - bases["engine"]
        effects.append(Effect(side="trainer", cause=own, change=change, size=torch.zeros_like(change), is_known=True))
    deviations = {
        side: torch.where(each.case.mask, each.case.target - bases[side], math.nan) for side, each in found.items()
    }
    effects += _own_orders(found, bases, deviations)
    result = shares(deviations, effects, evidence.trainer - evidence.engine, evidence.mask, evidence.lengths)
    parts = [_part(effect, share, evidence) for effect, share in zip(effects, result.parts, strict=True)]
    for one, other, tokens in result.mixed:
        notes.append(
            f"{parts[one].name} ({parts[one].side}) and {parts[other].name} ({parts[other].side}) cannot be told apart "
            f"with {int(evidence.mask.sum()):,} tokens; about {tokens:,.0f} would do: tokens=, and more dumped steps"
        )
    whole = evidence_k3(evidence)
    kept = [each for each in parts if each.is_declared or abs(each.k3) > LEAST_PART * whole]
    rest = whole - sum(part.k3 for part in kept)
    rest = 0.0 if abs(rest) < ROUNDING * whole else rest
    return Diagnosis(
        evidence=evidence,
        k3=whole,
        parts=tuple(sorted(kept, key=lambda part: -part.k3)),
        unexplained=replace(result.unexplained, k3=rest, share=rest / whole if whole else math.nan),
        routing=routing,
        notes=tuple(notes),
    )


def _effects(side: str, found: Explanation, evidence: Evidence) -> Iterator[Effect]:
    """What each cause by itself changes, and adds to K3.

    Changes are those of causes that a replay gives exactly, on top of the definition, and then of those that round, in
    both orders of these. What a cause adds to K3 is taken in the opposite orders too.
    """
    target, other = (evidence.engine, evidence.trainer) if side == "engine" else (evidence.trainer, evidence.engine)
    sign, scorer, zero = (-1 if side == "engine" else 1), found.case.scorer, torch.zeros_like(target)
    steps, before = [], found.base
    for cause in found.causes:
        if cause.case is not None:
            moved = torch.where(found.case.mask, found.case.target, other)
            yield Effect(side=side, cause=cause, change=target - moved, size=zero, is_known=True)
        else:
            steps.append((cause, before))
            before = cause.scoring
    computed: dict[Scoring, Tensor] = {}
    changes, sizes = torch.zeros(2, len(steps), len(target), dtype=torch.float64)
    for order, is_forward in (orders := _orders([cause for cause, _ in steps])):
        scoring, plain, size = found.base, zero, zero
        [definition] = scorer.score([found.base])
        for place in order:
            cause, before = steps[place]
            scoring = scoring.changed_as(before, cause.scoring)
            if scoring not in computed:
                [scores] = scorer.score([scoring])
                computed[scoring] = torch.where(scores.isnan(), target, scores) - definition
            changed = computed[scoring]
            if is_forward:
                changes[place] += (changed - plain) / (len(orders) / 2)
            sizes[place] += ((grown := k3(sign * changed)) - size) / len(orders)
            plain, size = changed, grown
    for (cause, _), change, size in zip(steps, changes, sizes, strict=True):
        yield Effect(side=side, cause=cause, change=change, size=size)
    for cause in found.absent:
        yield Effect(side=side, cause=cause, change=zero, size=zero)


def _own_orders(
    found: dict[str, Explanation], bases: dict[str, Tensor], deviations: dict[str, Tensor]
) -> Iterator[Effect]:
    """For both sides, what another order of a 16-bit arithmetic adds to K3, if that is the arithmetic of both.

    `bases` are the log-probs of the definition, `deviations` those of each side less these, NaN where none counts.
    That is what the rounding itself makes, at most. A side of which nothing else is known differs from the definition
    by its order alone; where this is less, it is taken for both sides.
    """
    sizes = []
    for side, each in found.items():
        if each.base.body.arithmetic is DType.float32:
            return
        [exact] = each.case.scorer.score([each.base.exact])
        sizes.append(torch.where(each.case.mask, k3(bases[side] - exact), 0.0))
        if not each.causes:
            sizes.append(k3(deviations[side].nan_to_num(0.0)))
    least = min(sizes, key=lambda size: float(size.nansum()))
    for side, each in found.items():
        cause = _own_order(side, each.base)
        yield Effect(side=side, cause=cause, change=torch.zeros_like(least), size=least.nan_to_num(0.0))


def _orders(causes: Sequence[Candidate]) -> list[tuple[list[int], bool]]:
    """(order of the causes by number, False for the opposite of one): weights are rounded before the arithmetic is."""
    places = sorted(range(len(causes)), key=lambda place: causes[place].rounds)
    exact, rounding = ([place for place in places if causes[place].rounds is rounds] for rounds in (False, True))
    found = []
    for order in (exact + rounding, exact + rounding[::-1]):
        back = order[::-1]
        if any(cause.name == "arithmetic" for cause in causes):
            back.sort(key=lambda place: causes[place].name != "rounded weights")
        found += [(order, True), (back, False)]
    return found


def _part(effect: Effect, share: Share, evidence: Evidence) -> Part:
    cause = effect.cause
    is_old = effect.side == "engine" and cause.name == "stale weights" and evidence.has_old
    is_declared = cause.is_declared or is_old
    return Part(
        **asdict(share),
        side=effect.side,
        name=cause.name,
        what=cause.what,
        remedy=cause.remedy,
        is_declared=is_declared,
        is_fault=not is_declared and share.low > 0,
        alike=cause.alike,
    )


def _own_experts(routing: RoutingPart, scoring: Scoring) -> Candidate:
    return Candidate(
        name="routing",
        what=f"chooses other experts than the engine for {routing.tokens_rerouted:.1%} of the tokens",
        remedy="policy.routing=replay",
        scoring=scoring,
        is_declared=True,
    )


def _own_order(side: str, scoring: Scoring) -> Candidate:
    other = "trainer" if side == "engine" else "engine"
    return Candidate(
        name="arithmetic",
        what=f"computes in {scoring.body.arithmetic.name}, in another order than the {other}",
        remedy="rollout.exact=true on a CPU, or a wider type; corrections are for this",
        scoring=scoring,
        is_declared=True,
    )
