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
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms import bits
from algorithms.bits import keep_where, mask_bits, outside
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
from algorithms.effects import Effects
from algorithms.gap import Gap, gaps
from algorithms.kl import bounded_exp
from algorithms.masked import require_packed, segment_mean, segment_sum
from algorithms.rejection import Verdict, decide
from algorithms.segments import Column

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
    criteria: tuple[str, ...] = ()
    """[V] rejection criteria in use, in the order of the config."""
    effects: Tensor | None = None
    """[4 + V, N] float64, by response: EFFECTS, then the response tokens that each criterion rejects. None if they
    were not counted."""


class Applied(NamedTuple):
    """What is applied to n tokens."""

    keep: Tensor
    """[n] bool."""
    kept: Tensor
    """[n] int32, the same as `algorithms.bits.mask_bits`."""
    weight: Tensor
    """[n], 0 on tokens that are not kept."""


EFFECTS: Final = ("raw_weight", "cut_weight", "clipped", "raised")
"""Sum over valid tokens of the weight before its bounds, up to e^+-20 each, 1 without a weight; sum over kept tokens of
what the upper bound took off; numbers of kept tokens cut to the upper bound, and raised to the lower bound."""


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
    spec = require_inputs(config, old_logprobs, rollout_logprobs, response_mask, advantages)
    with torch.no_grad():
        pieces = Pieces(spec, rollout_logprobs)
        for tokens, gap in gaps(
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            response_mask=response_mask,
            cu_seqlens=cu_seqlens,
            advantages=advantages,
        ):
            pieces.add(tokens, gap)
        return pieces.joined()


def require_inputs(
    config: CorrectionConfig,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    advantages: Tensor | None,
) -> CorrectionSpec:
    """What `config` says is done, if the inputs of `correct` allow it; raises as documented there."""
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
    return spec


class Pieces:
    """The correction of a batch, piece by piece. Each is copied to its place while it is in the cache."""

    def __init__(self, spec: CorrectionSpec, like: Tensor) -> None:
        """like [T]: a tensor of the whole batch."""
        self._spec = spec
        self._anchor, self._weight = torch.empty_like(like), torch.empty_like(like)
        self._keep = torch.empty_like(like, dtype=torch.bool)
        self._effects: list[Effects] = []

    def add(self, tokens: slice, gap: Gap) -> Applied:
        """Correct the sequences of `gap`, which lie at `tokens`."""
        anchor, applied, effects = _correct(self._spec, gap)
        self._anchor[tokens] = anchor
        # 1 off the mask.
        torch.add(applied.weight, (~gap.response_mask).view(torch.uint8), out=self._weight[tokens])
        self._keep[tokens] = applied.keep
        self._effects.append(effects)
        return applied

    def joined(self) -> Correction:
        """The whole correction."""
        criteria = tuple(self._spec.reject.active())
        effects = [effects.by_response((*EFFECTS, *criteria)) for effects in self._effects]
        return Correction(self._anchor, self._weight, self._keep, criteria, torch.cat(effects, dim=1))


def applied_to(gap: Gap, correction: Correction, tokens: slice) -> Applied:
    """What a correction that is known already applies to the tokens of `gap`, which lie at `tokens`."""
    keep = correction.keep[tokens] & gap.valid
    kept = mask_bits(keep)
    return Applied(keep=keep, kept=kept, weight=keep_where(kept, correction.weight[tokens]))


def valid_tokens(*, old_logprobs: Tensor | None, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Response tokens whose log-probs are log-probabilities: finite on both sides, log mu <= 1e-4 -> [T] bool."""
    difference = rollout_logprobs if old_logprobs is None else old_logprobs - rollout_logprobs
    return bits.valid_tokens(difference, rollout_logprobs, response_mask)


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


def _correct(spec: CorrectionSpec, gap: Gap) -> tuple[Tensor, Applied, Effects]:
    """Anchor [n], what is applied, and its effects on a few whole sequences."""
    verdict = decide(spec.reject, gap)
    bounded = _bounded(spec.weight, gap)
    keep = verdict.keep & bounded.keep
    kept = mask_bits(keep)
    weight = -kept.to(gap.delta.dtype) if bounded.weight is None else keep_where(kept, bounded.weight)
    applied = Applied(keep=keep, kept=kept, weight=weight)
    anchor = gap.trainer_logprobs if spec.anchor is Anchor.old else gap.rollout_logprobs
    return anchor, applied, _effects(gap, verdict, bounded, applied)


def _effects(gap: Gap, verdict: Verdict, bounded: _Bounded, applied: Applied) -> Effects:
    segments, ratio = gap.segments, None
    values: dict[str, Column] = {}
    flags = {name: segments.flag_column(rejected) for name, rejected in verdict.tokens.items()}
    if bounded.raw is None:
        flags["raw_weight"] = segments.flag_column(gap.valid)
    elif bounded.is_ratio:
        ratio = gap.ratio_total
    else:
        values["raw_weight"] = segments.column(keep_where(gap.valid_bits, bounded.raw).double())
    if bounded.cut is not None:
        taken_off = keep_where(applied.kept, bounded.cut)
        values["cut_weight"] = segments.column(taken_off.double())
        flags["clipped"] = segments.flag_column(taken_off.to(torch.bool))
    if bounded.raised is not None:
        flags["raised"] = segments.flag_column(bounded.raised & applied.keep)
    tokens = gap.num_tokens if verdict.responses else None
    return Effects(segments, values, flags, ratio, tokens, verdict.responses)


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
    return _whole_responses(gap, gap.total)


def _geometric_level(gap: Gap) -> _LogWeight:
    return _whole_responses(gap, gap.mean(gap.total))


def _whole_responses(gap: Gap, log_ratio: Tensor) -> _LogWeight:
    """One log-ratio per sequence [N] -> one per token, valid where no token of the response is invalid."""
    valid = gap.valid & gap.segments.expand(gap.complete)
    log_ratio = gap.segments.expand(log_ratio.to(gap.delta.dtype))
    return _LogWeight(log_ratio=keep_where(mask_bits(valid), log_ratio), valid=valid)


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
    return total - gap.segments.expand(before)


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
    raw: Tensor | None = None
    """[T] before its bounds."""
    is_ratio: bool = False
    """`raw` is the ratio of the token."""
    cut: Tensor | None = None
    """[T] what the upper bound took off."""
    raised: Tensor | None = None
    """[T] bool, raised to the lower bound."""


def _bounded(weight: WeightSpec | None, gap: Gap) -> _Bounded:
    """The weight of each token. A bound is written, not exponentiated back: a cut weight is exactly `high`."""
    if weight is None:
        return _Bounded(weight=None, keep=gap.valid)
    log_ratio, valid = LEVELS[weight.level](gap)
    is_ratio = weight.level is Level.token
    raw = gap.ratio if is_ratio else bounded_exp(log_ratio)
    free = _Bounded(weight=raw, keep=valid, raw=raw, is_ratio=is_ratio)
    if weight.bound is Bound.none:
        return free
    lowest = -math.inf if weight.low is None else math.log(weight.low)
    highest = math.inf if weight.high is None else math.log(weight.high)
    if weight.bound is Bound.mask:
        return free._replace(keep=valid & ~outside(log_ratio, lowest, highest))
    below_high = raw.clamp(max=weight.high)
    cut = free._replace(weight=below_high, cut=raw - below_high)
    if weight.bound is Bound.truncate:
        return cut if weight.low is None else cut._replace(keep=valid & ~outside(log_ratio, lowest, math.inf))
    return cut._replace(weight=below_high.clamp(min=weight.low), raised=outside(log_ratio, lowest, math.inf))
