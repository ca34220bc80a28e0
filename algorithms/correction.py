"""The mismatch correction: log-probs of both engines -> Correction(anchor, weight, keep).

`config.spec()` says what is done (`algorithms.config.spec`); this file does it. `algorithms.rejection` holds the
criteria, `algorithms.loss` consumes the result, `algorithms.diagnostics` measures it. The six short names, with
mu = pi_rollout, Delta = log pi_old - log mu, rho = exp(Delta):

    mode         anchor of the ratio   weight              rejected besides invalid tokens
    recompute    pi_old                1                   -
    ppo_is       mu                    1                   -
    vanilla_is   pi_old                rho                 -
    tis          pi_old                min(rho, cap)       -
    mis          pi_old                rho or min(rho, hi) outside the bounds; what a criterion rejects
    bypass       mu                    1                   what a criterion on pi_theta / mu rejects

Bounds are always on rho = pi_train / mu and decided in log space, on values that no clamp has moved.

T: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.bits import bits_mask, keep_where, mask_bits, valid_bits
from algorithms.chunks import sequence_chunks
from algorithms.config import (
    WHOLE_RESPONSE_LEVELS,
    Anchor,
    Bound,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    CorrectionSpec,
    CustomConfig,
    Level,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectConfig,
    RejectedDenominator,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
    WeightSpec,
)
from algorithms.kl import bounded_exp
from algorithms.masked import require_packed, segment_mean, segment_sum
from algorithms.rejection import Gap, Verdict, expand_responses, expand_sequences, verdicts

__all__ = [
    "BypassConfig",
    "BypassLoss",
    "Correction",
    "CorrectionConfig",
    "CustomConfig",
    "Level",
    "MISBound",
    "MISConfig",
    "PPOISConfig",
    "RecomputeConfig",
    "RejectConfig",
    "RejectedDenominator",
    "SelfNormalize",
    "TISConfig",
    "VanillaISConfig",
    "Verdict",
    "correct",
    "valid_tokens",
    "weight_total",
]


class Correction(NamedTuple):
    """How the loss treats each token. Every field is detached and finite everywhere."""

    anchor_logprobs: Tensor
    """[T] float32, denominator of the policy ratio; 0 off the mask and on invalid tokens."""
    weight: Tensor
    """[T] float32, importance weight; 0 on rejected response tokens, 1 off the mask."""
    keep: Tensor
    """[T] bool, True for response tokens that enter the loss; False off the mask."""
    clipped: Tensor | None = None
    """[T] bool, True for kept tokens whose weight was cut to its upper bound; None where there is no such bound."""
    raised: Tensor | None = None
    """[T] bool, True for kept tokens whose weight was raised to its lower bound; None where there is no such bound."""
    raw_weight: Tensor | None = None
    """[T] float32, the weight before its bounds, up to e^+-20; 1 where there is none. None for a weight of 1."""
    verdicts: tuple[Verdict, ...] = ()
    """What each rejection criterion decided, in the order of the config."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Correction:
        """The same change to every tensor."""

        def given(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return Correction(
            anchor_logprobs=change(self.anchor_logprobs),
            weight=change(self.weight),
            keep=change(self.keep),
            clipped=given(self.clipped),
            raised=given(self.raised),
            raw_weight=given(self.raw_weight),
            verdicts=tuple(verdict._replace(keep=change(verdict.keep)) for verdict in self.verdicts),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is there, in a fixed order."""
        given = (self.anchor_logprobs, self.weight, self.keep, self.clipped, self.raised, self.raw_weight)
        yield from (tensor for tensor in given if tensor is not None)
        yield from (verdict.keep for verdict in self.verdicts)


def correct(
    config: CorrectionConfig,
    *,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor | None = None,
) -> Correction:
    """Anchor, weight and keep of every token under `config`.

    Args:
        config: The mode.
        old_logprobs: [T] float32, the trainer's log-probs that are compared with mu: log pi_old, or the detached
            log pi_theta of the running forward where `config.spec().compared` says so (bypass). None where nothing
            reads them: ppo_is, and bypass without a weight or a criterion.
        rollout_logprobs: [T] float32, log mu as the engine returned it.
        response_mask: [T] bool, True where mu sampled the token. Not changed.
        cu_seqlens: [N+1] int32, first token of each sequence.
        advantages: [T] float32; only for criteria that read their sign.

    A token is invalid, and rejected in every mode, if either log-prob is not finite or log mu is not a
    log-probability. At the sequence and geometric levels, where it leaves the response without a weight, and under
    a criterion over responses, an invalid token rejects its whole response; at the segment level its segment, at
    the prefix level itself and what follows.

    Raises:
        ValueError: old_logprobs or advantages are None and something reads them; a wrong shape or dtype.
        TypeError: a config of no known mode.
    """
    spec = config.spec()
    if old_logprobs is None and (spec.anchor is Anchor.old or spec.measures_trainer):
        raise ValueError(
            f"correction={config.mode} needs old_logprobs, got None. Pass the detached log-probs of the training "
            "forward (before the first update, where they stand for pi_old)."
        )
    given = {"old_logprobs": old_logprobs, "advantages": advantages}
    require_packed(
        response_mask,
        rollout_logprobs=rollout_logprobs,
        **{name: tensor for name, tensor in given.items() if tensor is not None},
    )
    with torch.no_grad():
        chunks = sequence_chunks(cu_seqlens, num_tokens=response_mask.shape[0])
        corrections = (
            _correct(
                spec,
                old_logprobs=None if old_logprobs is None else old_logprobs[tokens],
                rollout_logprobs=rollout_logprobs[tokens],
                response_mask=response_mask[tokens],
                cu_seqlens=part_cu_seqlens,
                advantages=None if advantages is None else advantages[tokens],
            )
            for tokens, part_cu_seqlens in chunks
        )
        return _joined([tokens for tokens, _ in chunks], corrections, num_tokens=response_mask.shape[0])


def valid_tokens(*, old_logprobs: Tensor | None, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Response tokens whose log-probs are log-probabilities: finite on both sides, log mu <= 1e-4 -> [T] bool."""
    return bits_mask(_valid_bits(old_logprobs, rollout_logprobs, response_mask))


def _valid_bits(old_logprobs: Tensor | None, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """`valid_tokens` as bits; a difference is finite exactly if both sides are."""
    difference = rollout_logprobs if old_logprobs is None else old_logprobs - rollout_logprobs
    return valid_bits(difference, rollout_logprobs).bitwise_and_(mask_bits(response_mask))


def weight_total(config: CorrectionConfig, correction: Correction, *, cu_seqlens: Tensor) -> Tensor:
    """(sum of weights, their number) of a micro-batch -> [2] float64; the normaliser of an optimizer step is
    Z = sum / number over all its micro-batches and ranks.

    At a level with one weight per response each response with a kept token counts once, else each kept token.
    """
    weight = correction.weight.double()
    spec = config.spec()
    if spec.weight is not None and spec.weight.level in WHOLE_RESPONSE_LEVELS:
        # All kept tokens of a response have the same weight, so their mean is it.
        per_response = segment_mean(weight, correction.keep, cu_seqlens)
        counted = segment_sum(correction.keep.double(), cu_seqlens) > 0
        return torch.stack([per_response.sum(), counted.sum().double()])
    return torch.stack([torch.where(correction.keep, weight, 0.0).sum(), correction.keep.sum().double()])


def _joined(places: list[slice], parts: Iterator[Correction], *, num_tokens: int) -> Correction:
    """The corrections of consecutive sequences as one, each copied to its place while it is in the cache."""
    first = next(parts)
    if len(places) == 1:
        return first
    whole = first.each(lambda tensor: tensor.new_empty(num_tokens))
    targets = list(whole.tensors())
    for place, part in zip(places, chain([first], parts), strict=True):
        for target, tensor in zip(targets, part.tensors(), strict=True):
            target[place] = tensor
    return whole


def _correct(
    spec: CorrectionSpec,
    *,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor | None,
) -> Correction:
    """`correct` of a few whole sequences, small enough for a processor's cache."""
    bits = _valid_bits(old_logprobs, rollout_logprobs, response_mask)
    rollout = keep_where(bits, rollout_logprobs)
    trainer = rollout if old_logprobs is None else keep_where(bits, old_logprobs)
    gap = Gap(
        delta=trainer - rollout,
        valid=bits_mask(bits),
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
        trainer_logprobs=trainer,
        rollout_logprobs=rollout,
        advantages=advantages,
    )
    bounded = _bounded(spec.weight, gap)
    decided = verdicts(spec.reject, gap)
    keep = bounded.keep
    for verdict in decided:
        keep = keep & verdict.keep
    kept = mask_bits(keep)
    # 1 off the mask, and where a token is kept without a weight.
    off_mask = (~response_mask).view(torch.uint8).to(rollout.dtype)
    weight = off_mask + (-kept if bounded.weight is None else keep_where(kept, bounded.weight))
    return Correction(
        anchor_logprobs=trainer if spec.anchor is Anchor.old else rollout,
        weight=weight,
        keep=keep,
        clipped=None if bounded.clipped is None else bounded.clipped & keep,
        raised=None if bounded.raised is None else bounded.raised & keep,
        raw_weight=bounded.raw_weight,
        verdicts=decided,
    )


# ---------------------------------------------------------------- levels: Delta -> log-ratio of each token


class _LogWeight(NamedTuple):
    """A log-ratio accumulated over a level."""

    log_ratio: Tensor
    """[T] not clamped; 0 where not valid."""
    valid: Tensor
    """[T] bool, the tokens that have a weight at this level."""


def _token_level(gap: Gap) -> _LogWeight:
    return _LogWeight(log_ratio=gap.delta, valid=gap.valid)


def _sequence_level(gap: Gap) -> _LogWeight:
    return _whole_responses(gap, segment_sum(gap.delta, gap.cu_seqlens))


def _geometric_level(gap: Gap) -> _LogWeight:
    return _whole_responses(gap, segment_mean(gap.delta, gap.valid, gap.cu_seqlens))


def _whole_responses(gap: Gap, log_ratio: Tensor) -> _LogWeight:
    """One log-ratio per sequence [N] -> one per token, valid where no token of the response is invalid."""
    complete = expand_responses(gap, torch.ones_like(log_ratio, dtype=torch.bool))
    valid = gap.valid & complete
    return _LogWeight(log_ratio=torch.where(valid, expand_sequences(gap, log_ratio), 0.0), valid=valid)


def _prefix_level(gap: Gap) -> _LogWeight:
    """Sum of Delta over the response up to and with the token, other turns included (per-decision weights).

    Source: Precup, Sutton, Singh, "Eligibility traces for off-policy policy evaluation" (2000).
    """
    invalid = gap.response_mask & ~gap.valid
    valid = gap.valid & (_running_sum(gap, invalid.double()) == 0)
    log_ratio = _running_sum(gap, gap.delta.double()).to(gap.delta.dtype)
    return _LogWeight(log_ratio=torch.where(valid, log_ratio, 0.0), valid=valid)


def _running_sum(gap: Gap, values: Tensor) -> Tensor:
    """Inclusive sum of values [T] float64 from the first token of each sequence."""
    total = values.cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[gap.cu_seqlens[:-1].long()]
    return total - expand_sequences(gap, before)


def _segment_level(gap: Gap) -> _LogWeight:
    """Sum of Delta over the contiguous run of response tokens (assistant turn) that holds the token."""
    num_tokens = gap.delta.shape[0]
    starts = torch.zeros(num_tokens + 1, dtype=torch.bool, device=gap.delta.device)
    starts[gap.cu_seqlens.long()] = True
    continues = torch.cat([gap.response_mask.new_zeros(1), gap.response_mask[:-1]])
    # A run begins at a response token that begins its sequence or follows a token off the mask.
    run = (gap.response_mask & (starts[:num_tokens] | ~continues)).long().cumsum(0)
    # There are at most T runs; run 0 is what lies before the first.
    zeros = gap.delta.new_zeros(num_tokens + 1, dtype=torch.float64)
    totals = zeros.index_add(0, run, gap.delta.double())[run].to(gap.delta.dtype)
    invalid = zeros.index_add(0, run, (gap.response_mask & ~gap.valid).double())[run]
    valid = gap.valid & (invalid == 0)
    return _LogWeight(log_ratio=torch.where(valid, totals, 0.0), valid=valid)


LEVELS: Final[dict[Level, Callable[[Gap], _LogWeight]]] = {
    Level.token: _token_level,
    Level.sequence: _sequence_level,
    Level.geometric: _geometric_level,
    Level.segment: _segment_level,
    Level.prefix: _prefix_level,
}


# ---------------------------------------------------------------- bounds: log-ratio -> weight, keep


class _Bounded(NamedTuple):
    """A weight after its bounds."""

    weight: Tensor | None
    """[T] finite; None for a weight of 1."""
    keep: Tensor
    """[T] bool."""
    clipped: Tensor | None = None
    """[T] bool, cut to the upper bound."""
    raised: Tensor | None = None
    """[T] bool, raised to the lower bound."""
    raw_weight: Tensor | None = None
    """[T] before the bounds."""


def _bounded(weight: WeightSpec | None, gap: Gap) -> _Bounded:
    """The weight of each token. A bound is written, not exponentiated back: a cut weight is exactly `high`."""
    if weight is None:
        return _Bounded(weight=None, keep=gap.valid)
    log_ratio, valid = LEVELS[weight.level](gap)
    raw = bounded_exp(log_ratio)
    low, high = weight.low, weight.high
    never = torch.zeros_like(valid)
    below = never if low is None else log_ratio < math.log(low)
    above = never if high is None else log_ratio > math.log(high)
    bounded = _Bounded(weight=raw, keep=valid, raw_weight=raw)
    match weight.bound:
        case Bound.none:
            return bounded
        case Bound.truncate:
            return bounded._replace(weight=_fill(raw, above, high), keep=valid & ~below, clipped=above)
        case Bound.clip:
            return bounded._replace(weight=_fill(_fill(raw, above, high), below, low), clipped=above, raised=below)
        case Bound.mask:
            return bounded._replace(keep=valid & ~(above | below))


def _fill(weight: Tensor, where: Tensor, bound: float | None) -> Tensor:
    """weight with `bound` written where it binds."""
    return weight if bound is None else weight.masked_fill(where, bound)
