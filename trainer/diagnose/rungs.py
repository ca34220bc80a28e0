"""The rungs of the ladder: each changes one kind of choice, and yields the changes that are worth comparing.

A rung that has a number to find (a temperature, a top-p) tries a few and yields the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from rollout.config import DType, Quantization
from trainer.diagnose.alignment import GAP, aligned
from trainer.diagnose.case import Candidate, Case, Number
from trainer.diagnose.scoring import Prompt, Scoring
from trainer.diagnose.tensors import wrong_tensors

TEMPERATURES = (0.25, 4.0)
"""Factors of the temperature between which one is looked for."""
TEMPERATURE_STEPS = 16
TOP_P = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995)
TOP_K = (1, 2, 3, 4, 5, 8, 10, 20, 30, 40, 50, 64, 100, 200)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2)
GAPS = (-4, -3, -2, -1, 1, 2, 3, 4, 8, 16, 32, 64, 128)
SHARES = (0.25, 0.5, 0.75, 1.0)
WHOLLY = 0.995
"""Share of the way from which weights are the older ones."""
SMALL_TOKENS = 128
"""Response tokens with which wrong tensors are looked for."""
MOST_SLIPS = 0.1
"""Slips over the number of responses' tokens, above which an alignment explains anything."""
LEAST_REPRODUCED = 0.1
"""Share of the misfit that a replay of rounding takes away at least: the square of its correlation."""

Rung = Callable[[Case, Scoring], Iterator[Candidate]]


def definition(case: Case, base: Scoring) -> Iterator[Candidate]:
    """What is called a log-prob: which token, at which temperature, of which distribution."""
    for shift in (1, -1):
        places = "before" if shift > 0 else "after"
        yield Candidate(
            name="shift",
            what=f"gives each token the log-prob of the token {places} it",
            remedy="the slice that cuts the log-probs out: off by one",
            scoring=replace(base, shift=base.shift + shift),
            least_gain=0.5,
        )

    if (hotter := fitted_temperature(case, base)) is not None:
        yield hotter
    yield from _truncation(case, base)


def fitted_temperature(case: Case, base: Scoring) -> Candidate | None:
    """The temperature that fits best; None where the fit runs to an end: the tokens are only less sure, or surer."""

    def at(logarithm: float) -> Scoring:
        return replace(base, temperature=base.temperature * math.exp(logarithm))

    low, high = (math.log(factor) for factor in TEMPERATURES)
    logarithm, _ = case.fitted(at, low, high, steps=TEMPERATURE_STEPS)
    if min(logarithm - low, high - logarithm) < 0.01 * (high - low):
        return None
    found = at(logarithm)
    number = Number(
        get=lambda scoring: math.log(scoring.temperature),
        put=lambda scoring, value: replace(scoring, temperature=math.exp(value)),
        what=lambda value: f"has log-probs at temperature {math.exp(value):.4g}, not {base.temperature:.4g}",
        shown=lambda value: f"{math.exp(value):.4g}",
    )
    return Candidate(
        name="temperature",
        what=number.what(math.log(found.temperature)),
        remedy="the temperature by which this side divides its logits (sampling.temperature), or whether it does",
        scoring=found,
        least_gain=0.5,
        number=number,
    )


def _truncation(case: Case, base: Scoring) -> Iterator[Candidate]:
    ways = [replace(base, top_p=value) for value in TOP_P if base.top_p == 1]
    ways += [replace(base, top_k=value) for value in TOP_K if not base.top_k]
    ways += [replace(base, min_p=value) for value in MIN_P if not base.min_p]
    if not ways:
        return
    best = ways[case.best(ways)[0]]
    if best.top_p != base.top_p:  # of which any number may be the right one
        near = [best.top_p + part / 200 for part in range(-8, 9)]
        fine = [replace(base, top_p=value) for value in near if 0 < value < 1]
        best = fine[case.best(fine)[0]]
    changes = (("top_p", best.top_p, base.top_p), ("top_k", best.top_k, base.top_k), ("min_p", best.min_p, base.min_p))
    [text] = [f"{name}={value:.4g}" for name, value, before in changes if value != before]
    yield Candidate(
        name="truncation",
        what=f"divides probabilities by the mass that {text} keeps",
        remedy=f"sampling.{text.partition('=')[0]}: switch it off, or give the trainer the same mask",
        scoring=best,
        least_gain=0.5,
    )


def tokens(case: Case, base: Scoring) -> Iterator[Candidate]:
    """Which token ids are read."""
    scored = case.scorer.score([base])[0]
    moved, slips = aligned(case.target, scored, case.scorer.evidence.lengths, case.mask)
    dropped = int((case.mask & moved.isnan()).sum())
    if 0 < slips <= max(1, MOST_SLIPS * len(moved)):
        there = replace(case, target=moved.nan_to_num(0.0), mask=case.mask & ~moved.isnan())
        # A token that fits nowhere has its price, so that leaving out the worst tokens explains nothing.
        left = there.total(base) + GAP * dropped / int(case.mask.sum())
        if left < case.total(base) / 2:
            yield Candidate(
                name="other tokens",
                what=f"has other token ids: the log-probs fit if they slip by a token at {slips} places",
                remedy="pass token ids between engine and trainer, not text that is encoded again",
                scoring=base,
                least_gain=0.5,
                case=there,
            )
    for prompt in Prompt:
        if prompt is not base.body.prompt and case.scorer.can_read(prompt):
            yield Candidate(
                name="other prompt",
                what=f"reads the prompt {prompt.value}",
                remedy="the chat template and special tokens of this side; compare its prompt ids",
                scoring=base.with_body(prompt=prompt),
            )


def positions(case: Case, base: Scoring) -> Iterator[Candidate]:
    """Which position each token has. A gap in front of everything changes nothing with rotary embeddings."""
    del case
    for gap in GAPS:
        yield Candidate(
            name="positions",
            what=f"gives the response positions {abs(gap)} too {'high' if gap > 0 else 'low'}",
            remedy="position_ids where prompt and response are put together, and padding between them",
            scoring=base.with_body(gap=base.body.gap + gap),
        )
    yield Candidate(
        name="positions",
        what="counts positions from 0 again with the response",
        remedy="position_ids where prompt and response are put together",
        scoring=base.with_body(restarts=not base.body.restarts),
    )


def precision(case: Case, base: Scoring) -> Iterator[Candidate]:
    """In which type the weights are held, the head is computed, and everything is computed."""
    del case
    for dtype in (DType.bfloat16, DType.float16):
        if base.body.rounded is DType.float32:
            yield rounded_weights(base, dtype)
        if base.head is DType.float32:
            yield Candidate(
                name="head precision",
                what=f"computes its logits in {dtype.name}",
                remedy="a float32 head (policy.fp32_head; SGLang: enable_fp32_lm_head)",
                scoring=replace(base, head=dtype),
            )
        if base.body.arithmetic is DType.float32:
            for head in dict.fromkeys((dtype, base.head)):
                yield arithmetic(base, dtype, head=head)


def rounded_weights(base: Scoring, dtype: DType) -> Candidate:
    """Weights held in 16 bits."""
    return Candidate(
        name="rounded weights",
        what=f"holds its weights rounded to {dtype.name}",
        remedy="rollout.dtype and policy.dtype: one side rounds its weights, the other does not",
        scoring=base.with_body(rounded=dtype),
    )


def arithmetic(base: Scoring, dtype: DType, *, head: DType) -> Candidate:
    """Everything computed in 16 bits, but perhaps the head."""
    return Candidate(
        name="arithmetic",
        what=f"computes in {dtype.name}" + (", with a float32 head" if head is DType.float32 else ""),
        remedy=f"rollout.dtype and policy.dtype: arithmetic in {dtype.name}; rollout.exact=true on a CPU",
        scoring=replace(base.computed_in(dtype), head=head),
        least_gain=LEAST_REPRODUCED,
    )


def quantization(case: Case, base: Scoring) -> Iterator[Candidate]:
    """In which format the projections are held."""
    del case
    if base.body.quantization is Quantization.none:
        yield from (quantized(base, kind) for kind in Quantization if kind is not Quantization.none)


def quantized(base: Scoring, kind: Quantization) -> Candidate:
    """Projections in a format."""
    return Candidate(
        name="quantization",
        what=f"holds its projections in {kind.value}",
        remedy="rollout.quantization: a correction, or an engine without it",
        scoring=base.with_body(quantization=kind),
        least_gain=LEAST_REPRODUCED,
    )


def version(case: Case, base: Scoring) -> Iterator[Candidate]:
    """How old the weights are, and those that read the prompt."""
    if base.body.weights:
        return
    for source, name in list(enumerate(case.scorer.names))[1:]:
        ways = [base.with_body(weights=source, share=share) for share in SHARES]
        best = ways[case.best(ways)[0]]
        if best.body.share < 1:
            around = best.body.share

            def at(share: float, source: int = source) -> Scoring:
                return base.with_body(weights=source, share=share)

            share, _ = case.fitted(at, around - 0.25, around + 0.25, steps=6)
            best = at(share)
        is_whole, number = best.body.share == 1, _share_of(name)
        yield Candidate(
            name="stale weights",
            what=number.what(best.body.share),
            remedy="the sync of weights: this side must get the last one (schedule=, schedule.max_staleness)",
            scoring=best,
            least_gain=0.2 if is_whole else 0.5,
            number=None if is_whole else number,
        )
        yield Candidate(
            name="stale prefix cache",
            what=f"reads responses behind prompts that the weights {name} had read",
            remedy="empty the engine's prefix cache at every sync of weights",
            scoring=base.with_body(prefix=source),
        )


def _share_of(name: str) -> Number:
    """How far the weights lie on the way to the weights `name`."""

    def what(value: float) -> str:
        return f"has weights {value:.0%} of the way to {name}" if value < WHOLLY else f"has the weights {name}"

    return Number(
        get=lambda scoring: scoring.body.share,
        put=lambda scoring, value: scoring.with_body(share=value),
        what=what,
        shown=lambda value: f"{value:.1%}",
    )


def weights(case: Case, base: Scoring) -> Iterator[Candidate]:
    """Single tensors that hold other numbers."""
    if base.body.edits or base.body.quantization is not Quantization.none:
        return
    # The gradient is that of float32 arithmetic.
    plain = base.with_body(prefix=None).computed_in(DType.float32)
    for found in wrong_tensors(case.small(base, max_tokens=SMALL_TOKENS, is_one_step=True), plain):
        yield replace(found, scoring=base.with_edits(*found.scoring.body.edits))


LADDER: tuple[Rung, ...] = (
    definition,
    tokens,
    positions,
    precision,
    quantization,
    version,
    weights,
)
"""Cheapest first."""
WHOLE: frozenset[Rung] = frozenset([definition, tokens])
"""Rungs that judge all tokens: they need no forward, or look at whole rows of log-probs."""
DEAR: frozenset[Rung] = frozenset([positions, weights])
"""Rungs that need many forwards, for faults that make much."""
