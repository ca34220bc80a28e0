"""The six correction modes: log-probs of both engines -> Correction(anchor, weight, keep).

One config dataclass per mode (`algorithms.config`), one `match` here. `algorithms.loss` consumes the result,
`algorithms.diagnostics` measures it. mu = pi_rollout, Delta = log pi_old - log mu, rho = exp(Delta):

    mode         anchor of the ratio   weight              rejected besides invalid tokens
    recompute    pi_old                1                   -
    ppo_is       mu                    1                   -
    vanilla_is   pi_old                rho                 -
    tis          pi_old                min(rho, cap)       -
    mis          pi_old                rho or min(rho, hi) outside the bounds; responses with a vetoed token
    bypass       mu                    1                   -

rho is accumulated over a token, a response (product) or a response's geometric mean: `config.level`. Bounds are
always on rho = pi_train / mu and decided in log space, on values that no clamp has moved.

T: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.config import (
    MAX_LOG_RATIO,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    Level,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectedDenominator,
    TISConfig,
    VanillaISConfig,
)
from algorithms.masked import require_packed, segment_expand, segment_mean, segment_min, segment_sum

__all__ = [
    "BypassConfig",
    "BypassLoss",
    "Correction",
    "CorrectionConfig",
    "Level",
    "MISBound",
    "MISConfig",
    "PPOISConfig",
    "RecomputeConfig",
    "RejectedDenominator",
    "TISConfig",
    "VanillaISConfig",
    "correct",
    "valid_tokens",
]

MAX_ROLLOUT_LOGPROB = 1e-4
"""A rollout log-prob above this is not a log-probability (rounding alone stays below)."""


class Correction(NamedTuple):
    """How the loss treats each token. Every field is detached and finite everywhere."""

    anchor_logprobs: Tensor
    """[T] float32, denominator of the policy ratio; 0 off the mask and on invalid tokens."""
    weight: Tensor
    """[T] float32, importance weight; 0 on rejected response tokens, 1 off the mask."""
    keep: Tensor
    """[T] bool, True for response tokens that enter the loss; False off the mask."""
    clipped: Tensor | None = None
    """[T] bool, True for kept tokens whose weight was cut to its upper bound; None where the mode has no such bound."""


def correct(
    config: CorrectionConfig,
    *,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
) -> Correction:
    """Anchor, weight and keep of every token under `config`.

    Args:
        config: The mode.
        old_logprobs: [T] float32, log pi_old; None only with ppo_is and bypass, which do not need it.
        rollout_logprobs: [T] float32, log mu as the engine returned it.
        response_mask: [T] bool, True where mu sampled the token. Not changed.
        cu_seqlens: [N+1] int32, first token of each sequence.

    A token is invalid, and rejected in every mode, if either log-prob is not finite or log mu is not a
    log-probability. At the sequence and geometric levels, where it leaves the response without a weight, and under
    a veto, an invalid token rejects its whole response.

    Under `bypass` with `loss=reinforce` the loss takes its weight from pi_theta. The weight given here is its value
    at pi_theta = pi_old, for the diagnostics; 1 if pi_old is None.

    Raises:
        ValueError: old_logprobs is None in a mode that needs it; a wrong shape or dtype.
        TypeError: a config of no known mode.
    """
    with torch.no_grad():
        gap = _measure(old_logprobs, rollout_logprobs, response_mask=response_mask, cu_seqlens=cu_seqlens)
        match config:
            case RecomputeConfig():
                return _correction(gap, anchor=_needed(old_logprobs, config), bounded=_unweighted(gap))
            case PPOISConfig():
                return _correction(gap, anchor=rollout_logprobs, bounded=_unweighted(gap))
            case VanillaISConfig(level=level):
                return _correction(gap, anchor=_needed(old_logprobs, config), bounded=_unbounded(_at(level, gap)))
            case TISConfig(level=level, cap=cap):
                return _correction(gap, anchor=_needed(old_logprobs, config), bounded=_truncated(_at(level, gap), cap))
            case MISConfig():
                return _correction(gap, anchor=_needed(old_logprobs, config), bounded=_masked(gap, config))
            case BypassConfig(loss=BypassLoss.reinforce, cap=cap) if old_logprobs is not None:
                return _correction(gap, anchor=rollout_logprobs, bounded=_truncated(_at(Level.token, gap), cap))
            case BypassConfig():
                return _correction(gap, anchor=rollout_logprobs, bounded=_unweighted(gap))
            case _:
                raise TypeError(f"no correction mode for a {type(config).__name__}")


def valid_tokens(*, old_logprobs: Tensor | None, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Response tokens whose log-probs are log-probabilities: finite on both sides, log mu <= 1e-4 -> [T] bool."""
    valid = response_mask & torch.isfinite(rollout_logprobs) & (rollout_logprobs <= MAX_ROLLOUT_LOGPROB)
    return valid if old_logprobs is None else valid & torch.isfinite(old_logprobs)


class _Gap(NamedTuple):
    """What the two engines say about the same tokens."""

    delta: Tensor
    """[T] log pi_old - log mu, not clamped; 0 where not valid, and everywhere if pi_old is unknown."""
    valid: Tensor
    """[T] bool."""
    response_mask: Tensor
    """[T] bool."""
    cu_seqlens: Tensor
    """[N+1] int32."""


class _LogWeight(NamedTuple):
    """A log-ratio accumulated over a level."""

    log_ratio: Tensor
    """[T] not clamped; 0 where not valid."""
    valid: Tensor
    """[T] bool, the tokens that have a weight at this level."""


class _Bounded(NamedTuple):
    """A weight after its bounds."""

    weight: Tensor
    """[T] finite."""
    keep: Tensor
    """[T] bool."""
    clipped: Tensor | None
    """[T] bool, cut to the upper bound."""


def _measure(
    old_logprobs: Tensor | None, rollout_logprobs: Tensor, *, response_mask: Tensor, cu_seqlens: Tensor
) -> _Gap:
    require_packed(response_mask, rollout_logprobs=rollout_logprobs)
    valid = valid_tokens(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, response_mask=response_mask)
    delta = torch.zeros_like(rollout_logprobs)
    if old_logprobs is not None:
        require_packed(response_mask, old_logprobs=old_logprobs)
        delta = torch.where(valid, old_logprobs - rollout_logprobs, 0.0)
    return _Gap(delta=delta, valid=valid, response_mask=response_mask, cu_seqlens=cu_seqlens)


def _needed(old_logprobs: Tensor | None, config: CorrectionConfig) -> Tensor:
    if old_logprobs is None:
        raise ValueError(
            f"correction={config.mode} needs old_logprobs (pi_old), got None. Pass the detached log-probs of the "
            "training forward before the first update, or use correction=bypass."
        )
    return old_logprobs


def _correction(gap: _Gap, *, anchor: Tensor, bounded: _Bounded) -> Correction:
    """The one place that fills what tokens outside the loss get."""
    keep = gap.valid & bounded.keep
    weight = torch.where(keep, bounded.weight, torch.where(gap.response_mask, 0.0, 1.0))
    return Correction(
        anchor_logprobs=torch.where(gap.valid, anchor, 0.0),
        weight=weight.to(anchor.dtype),
        keep=keep,
        clipped=None if bounded.clipped is None else bounded.clipped & keep,
    )


# ---------------------------------------------------------------- levels: Delta -> log-ratio of each token


def _token_level(gap: _Gap) -> _LogWeight:
    return _LogWeight(log_ratio=gap.delta, valid=gap.valid)


def _sequence_level(gap: _Gap) -> _LogWeight:
    return _whole_responses(gap, segment_sum(gap.delta, gap.cu_seqlens))


def _geometric_level(gap: _Gap) -> _LogWeight:
    return _whole_responses(gap, segment_mean(gap.delta, gap.valid, gap.cu_seqlens))


LEVELS: Final[dict[Level, Callable[[_Gap], _LogWeight]]] = {
    Level.token: _token_level,
    Level.sequence: _sequence_level,
    Level.geometric: _geometric_level,
}


def _at(level: Level, gap: _Gap) -> _LogWeight:
    return LEVELS[level](gap)


def _whole_responses(gap: _Gap, log_ratio: Tensor) -> _LogWeight:
    """One log-ratio per sequence [N] -> one per token, valid where no token of the response is invalid."""
    num_tokens = gap.delta.shape[0]
    invalid = segment_sum((gap.response_mask & ~gap.valid).float(), gap.cu_seqlens)
    complete = segment_expand(invalid == 0, gap.cu_seqlens, num_tokens=num_tokens)
    valid = gap.valid & complete
    expanded = segment_expand(log_ratio, gap.cu_seqlens, num_tokens=num_tokens)
    return _LogWeight(log_ratio=torch.where(valid, expanded, 0.0), valid=valid)


# ---------------------------------------------------------------- bounds: log-ratio -> weight, keep


def _unweighted(gap: _Gap) -> _Bounded:
    return _Bounded(weight=torch.ones_like(gap.delta), keep=gap.valid, clipped=None)


def _unbounded(at: _LogWeight) -> _Bounded:
    return _Bounded(weight=_exp(at.log_ratio), keep=at.valid, clipped=None)


def _truncated(at: _LogWeight, cap: float) -> _Bounded:
    """min(rho, cap). The cap is written, not exponentiated back, so that a cut weight is exactly `cap`."""
    clipped = at.log_ratio.clamp(max=MAX_LOG_RATIO) > math.log(cap)
    return _Bounded(weight=torch.where(clipped, cap, _exp(at.log_ratio)), keep=at.valid, clipped=clipped)


def _masked(gap: _Gap, config: MISConfig) -> _Bounded:
    """rho within [low, high], both ends included, and no vetoed response."""
    at = _at(config.level, gap)
    keep = at.valid & (at.log_ratio >= math.log(config.low)) & _not_vetoed(gap, config.veto)
    match config.bound:
        case MISBound.truncate:
            bounded = _truncated(at, config.high)
        case MISBound.mask:
            keep = keep & (at.log_ratio <= math.log(config.high))
            bounded = _unbounded(at)
    return bounded._replace(keep=keep)


def _not_vetoed(gap: _Gap, veto: float) -> Tensor:
    """Tokens [T] bool of responses without a catastrophic token: min Delta >= log veto, on the raw Delta.

    An invalid token counts as catastrophic: one side gave it probability 0, or it has no probability at all.
    """
    if veto == 0:
        return torch.ones_like(gap.valid)
    delta = torch.where(gap.valid, gap.delta, torch.where(gap.response_mask, -math.inf, math.inf))
    kept = segment_min(delta, gap.cu_seqlens) >= math.log(veto)
    return segment_expand(kept, gap.cu_seqlens, num_tokens=gap.delta.shape[0])


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
