"""The mismatch correction: the log-probs of both engines for the same tokens -> Correction(anchor, weight, keep).

`algorithms.config.correction` gives each mode its anchor, level, bound and criteria; this file applies them.
`algorithms.rejection` holds the criteria, `algorithms.loss` consumes the result, `algorithms.mismatch` measures it.

mu = pi_rollout, Delta = log pi_train - log mu, rho = exp(Delta); pi_train is pi_old, or pi_theta in bypass. Bounds are
always on rho and decided on its logarithm, which no clamp has moved. T: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.config import Anchor, Bound, CorrectionSpec, Level, WeightSpec
from algorithms.config.spec import CustomBound, CustomLevel
from algorithms.kl import bounded_exp
from algorithms.masked import segment_mean, segment_sum
from algorithms.rejection import rejected_tokens
from algorithms.tokens import Tokens


class Correction(NamedTuple):
    """The treatment of each token by the loss. Every field is detached and finite everywhere."""

    anchor: Tensor
    """[T] float32, log-probs of the denominator of the policy ratio; 0 off the mask and on invalid tokens."""
    weight: Tensor
    """[T] float32, importance weight; 0 on rejected response tokens, 1 off the mask."""
    keep: Tensor
    """[T] bool, True for response tokens that enter the loss; False off the mask."""
    raw_weight: Tensor | None = None
    """[T] float32, the weight before its bound and before rejection, for statistics; None: the same as `weight`."""
    rejected: Mapping[str, Tensor] = MappingProxyType({})
    """Rejection criterion -> the response tokens that it rejects, [T] bool, in the order of the config."""
    rollout: Tensor | None = None
    """[T] float32, log mu; 0 off the mask and on invalid tokens. Read by losses of a user alone."""


@torch.no_grad()
def correct(spec: CorrectionSpec, tokens: Tokens) -> Correction:
    """Anchor, weight and keep of every token: weight = bound(level(Delta)) on tokens that are kept, 0 on the others.

    A token is invalid, and rejected in every mode, if either log-prob is not finite or log mu is not a log-probability.
    At the sequence and geometric levels, where the response then has no weight, and under a criterion over responses,
    an invalid token rejects its whole response; at the segment level the token rejects its segment, at the prefix level
    itself and all later tokens of the response. Raises ValueError if trainer_logprobs or advantages are None, and the
    anchor, the weight or a criterion needs them.
    """
    if not isinstance(spec, CorrectionSpec):
        raise TypeError(f"correct takes a CorrectionSpec, got a {type(spec).__name__}. Pass config.spec().")
    if tokens.trainer_logprobs is None and (spec.anchor is Anchor.old or spec.measures_trainer):
        raise ValueError(
            f"the correction with anchor={spec.anchor.name} needs trainer_logprobs, got None. Pass log pi_old, or "
            "the detached log-probs of the training forward, which stand for it before the first update."
        )
    rejected = rejected_tokens(spec.reject, tokens)
    keep = tokens.valid
    for criterion in rejected.values():
        keep = keep & ~criterion
    weight = rho = torch.ones_like(tokens.delta)
    if spec.weight is not None:
        level, bound = spec.weight.level, spec.weight.bound
        if isinstance(level, CustomLevel):
            log_ratio, has_weight = map(level.fitting, level.answer(tokens), (tokens.delta, tokens.valid))
            log_ratio = level.fitting(torch.where(has_weight, log_ratio, 0.0), tokens.delta, finite=True)
        else:
            log_ratio, has_weight = LEVELS[level](tokens)
        rho = bounded_exp(torch.where(has_weight, log_ratio, 0.0))
        if isinstance(bound, CustomBound):
            weight, inside = map(bound.fitting, bound.answer(rho, log_ratio, tokens), (rho, tokens.valid))
            bound.fitting(weight, rho, finite=True)
        else:
            weight, inside = BOUNDS[bound](rho, log_ratio, spec.weight)
        keep = keep & has_weight & inside
    return Correction(
        anchor=tokens.train if spec.anchor is Anchor.old else tokens.rollout,
        weight=torch.where(tokens.response_mask, torch.where(keep, weight, 0.0), 1.0),
        keep=keep,
        raw_weight=rho,
        rejected=rejected,
        rollout=tokens.rollout,
    )


def weight_total(spec: CorrectionSpec, correction: Correction, *, cu_seqlens: Tensor) -> Tensor:
    """(sum of weights, number of weights) of a micro-batch -> [2] float64.

    The normaliser of an optimizer step is Z = sum / number over all micro-batches and ranks of the step. The weights
    are counted per response at whole-response levels, else per kept token.
    """
    weight, keep = correction.weight.double(), correction.keep
    if spec.weight is not None and spec.weight.level.one_per_response:
        # All kept tokens of a response have the same weight, which is therefore their mean.
        weight = segment_mean(weight, keep, cu_seqlens)
        keep = segment_sum(keep.double(), cu_seqlens) > 0
    return torch.stack([torch.where(keep, weight, 0.0).sum(), keep.sum().double()])


# Levels: tokens -> log of the weight [T], not clamped, and the tokens [T] bool that have one.


def _token_level(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Delta_t: w_t = pi_old(y_t) / mu(y_t)."""
    return tokens.delta, tokens.valid


def _sequence_level(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """sum_t Delta_t: w = pi_old(y) / mu(y), the importance weight of the whole response."""
    return _of_response(tokens, tokens.delta_total)


def _geometric_level(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """mean_t Delta_t: w = (pi_old(y) / mu(y))^(1/|y|). Source: GSPO, https://arxiv.org/abs/2507.18071, eq. 7."""
    return _of_response(tokens, tokens.delta_mean)


def _of_response(tokens: Tokens, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """One log-ratio per response [N]; a response with an invalid token has none."""
    return tokens.expand(log_ratio.to(tokens.delta.dtype)), tokens.valid & tokens.expand(tokens.complete)


def _segment_level(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """sum of Delta over the assistant turn of the token: a contiguous run of response tokens of one sequence."""
    mask, num_tokens = tokens.response_mask, tokens.response_mask.shape[0]
    starts = torch.zeros(num_tokens + 1, dtype=torch.bool, device=mask.device)
    starts[tokens.cu_seqlens.long()] = True
    follows = torch.cat([mask.new_zeros(1), mask[:-1]])
    # The number of each token's turn, from 1; 0 in front of the first. There are at most T turns.
    turn = (mask & (starts[:num_tokens] | ~follows)).long().cumsum(0)
    none = tokens.delta.new_zeros(num_tokens + 1, dtype=torch.float64)
    log_ratio = none.index_add(0, turn, tokens.delta.double())[turn]
    invalid = none.index_add(0, turn, (mask & ~tokens.valid).double())[turn]
    return log_ratio.to(tokens.delta.dtype), tokens.valid & (invalid == 0)


def _prefix_level(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """sum_{j<=t} Delta_j over the response up to and with the token, earlier turns included: per-decision weights.

    Source: Precup, Sutton, Singh, "Eligibility traces for off-policy policy evaluation" (2000).
    """
    invalid = _running_sum(tokens, tokens.response_mask & ~tokens.valid)
    return _running_sum(tokens, tokens.delta).to(tokens.delta.dtype), tokens.valid & (invalid == 0)


def _running_sum(tokens: Tokens, values: Tensor) -> Tensor:
    """Sum of values [T] from the first token of the sequence up to and with each token -> [T] float64."""
    total = values.double().cumsum(0)
    before = torch.cat([total.new_zeros(1), total])[tokens.cu_seqlens[:-1].long()]
    return total - tokens.expand(before)


LEVELS: Final[dict[Level, Callable[[Tokens], tuple[Tensor, Tensor]]]] = {
    Level.token: _token_level,
    Level.sequence: _sequence_level,
    Level.geometric: _geometric_level,
    Level.segment: _segment_level,
    Level.prefix: _prefix_level,
}


# Bounds: rho [T] and its logarithm -> the weight [T], and the tokens [T] bool that stay.


def _none(rho: Tensor, log_ratio: Tensor, bounds: WeightSpec) -> tuple[Tensor, Tensor]:
    """rho, up to e^20: vanilla importance sampling."""
    return rho, torch.ones_like(rho, dtype=torch.bool)


def _truncate(rho: Tensor, log_ratio: Tensor, bounds: WeightSpec) -> tuple[Tensor, Tensor]:
    """min(rho, high): truncated importance sampling (TIS). Where `low` is set, tokens with rho < low are rejected.

    Source: Ionides, "Truncated importance sampling" (2008); for the mismatch of engines: Yao et al., "Your efficient
    RL framework secretly brings you off-policy RL training" (2025), https://fengyao.notion.site/off-policy-rl.
    """
    return rho.clamp(max=bounds.high), _is_inside(log_ratio, bounds.low, None)


def _clip(rho: Tensor, log_ratio: Tensor, bounds: WeightSpec) -> tuple[Tensor, Tensor]:
    """min(max(rho, low), high): no token is rejected."""
    return rho.clamp(bounds.low, bounds.high), torch.ones_like(rho, dtype=torch.bool)


def _mask(rho: Tensor, log_ratio: Tensor, bounds: WeightSpec) -> tuple[Tensor, Tensor]:
    """rho 1[low <= rho <= high]: masked importance sampling (MIS), at token level IcePop.

    Source: Ling team, "Every step evolves", https://arxiv.org/abs/2510.18855; sequences: Liu et al., "When speed kills
    stability" (2025), https://richardli.xyz/rl-collapse.
    """
    return rho, _is_inside(log_ratio, bounds.low, bounds.high)


def _is_inside(log_ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """low <= exp(log_ratio) <= high, both ends included; None is no bound."""
    lowest = -math.inf if low is None else math.log(low)
    highest = math.inf if high is None else math.log(high)
    return (log_ratio >= lowest) & (log_ratio <= highest)


BOUNDS: Final[dict[Bound, Callable[[Tensor, Tensor, WeightSpec], tuple[Tensor, Tensor]]]] = {
    Bound.none: _none,
    Bound.truncate: _truncate,
    Bound.clip: _clip,
    Bound.mask: _mask,
}
