"""Rejection criteria: what the two engines say about a token or a response -> whether it stays in the loss.

One function per key of `RejectConfig`. `algorithms.correction` applies those that are set; all must keep a token.
Delta = log pi_train - log mu, raw (never clamped before it is compared), 0 on invalid tokens.

Token by token a criterion is an interval of Delta wherever it can be: no exponential is taken to decide, and "the
largest k3 of the response" means that no token lies outside. A response with an invalid token has no sequence
statistic and is rejected whole by every criterion over responses. n: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from algorithms.bits import outside
from algorithms.config import MAX_LOG_RATIO, RejectConfig
from algorithms.kl import LOG2_E, bernoulli_kl, bounded_exp, k2, k3_interval
from algorithms.masked import divide_by_count
from algorithms.segments import Segments


@dataclass(frozen=True, kw_only=True, eq=False)
class Gap:
    """What the two engines say about the same tokens. What several criteria read is computed once."""

    delta: Tensor
    """[n] log pi_train - log mu, not clamped; 0 where not valid, and everywhere if pi_train is unknown."""
    valid: Tensor
    """[n] bool, response tokens whose log-probs are log-probabilities."""
    valid_bits: Tensor
    """[n] int32, the same as `algorithms.bits.mask_bits`."""
    response_mask: Tensor
    """[n] bool, not a slice."""
    cu_seqlens: Tensor
    """[N+1] int32."""
    segments: Segments
    """The same sequences."""
    trainer_logprobs: Tensor
    """[n] log pi_train, 0 where not valid."""
    rollout_logprobs: Tensor
    """[n] log mu, 0 where not valid."""
    advantages: Tensor | None
    """[n], or None where no criterion reads them."""

    @cached_property
    def delta64(self) -> Tensor:
        """delta as float64."""
        return self.delta.double()

    @cached_property
    def clamped(self) -> Tensor:
        """delta clamped to +-MAX_LOG_RATIO, float64."""
        return self.delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()

    @cached_property
    def ratio(self) -> Tensor:
        """[n] float64, rho of the clamped Delta; 1 where not valid."""
        return torch.exp2(self.clamped * LOG2_E)

    @cached_property
    def k3(self) -> Tensor:
        """[n] float64, 0 where not valid; rounded to 2e-16, which is far below any bound."""
        return (self.ratio - self.clamped).sub_(1)

    @cached_property
    def total(self) -> Tensor:
        """[N] float64, sum of Delta over each response."""
        return self.segments.sum(self.delta64)

    @cached_property
    def num_tokens(self) -> Tensor:
        """[N] float64, response tokens of each sequence."""
        return self.segments.count(self.response_mask)

    @cached_property
    def num_valid(self) -> Tensor:
        """[N] float64, valid tokens of each sequence."""
        return self.segments.count(self.valid)

    @cached_property
    def complete(self) -> Tensor:
        """[N] bool, sequences without an invalid token."""
        return self.num_valid == self.num_tokens

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values [n] float64 over the valid tokens of each sequence [N]; values are 0 on all others."""
        return divide_by_count(self.segments.sum(values), self.num_valid)


def decide(config: RejectConfig, gap: Gap) -> tuple[Tensor, list[Tensor]]:
    """keep [n] bool, the valid tokens that every criterion in use keeps; and by criterion, in the order of the config,
    the response tokens of each sequence that it rejects [N] float64.

    Raises:
        ValueError: a criterion reads advantages and there are none.
    """
    keep, rejected = gap.valid, []
    keep_responses = None
    for name in config.active():
        bound = getattr(config, name)
        if name in TOKEN_CRITERIA:
            rejects = TOKEN_CRITERIA[name](gap, bound) & gap.response_mask
            keep = keep & ~rejects
            rejected.append(gap.segments.count(rejects))
        else:
            keeps = RESPONSE_CRITERIA[name](gap, bound) & gap.complete
            keep_responses = keeps if keep_responses is None else keep_responses & keeps
            rejected.append(gap.num_tokens * ~keeps)
    if keep_responses is not None:
        keep = keep & gap.segments.expand(keep_responses)
    return keep, rejected


def _within(log_ratio: Tensor, bounds: Sequence[float]) -> Tensor:
    """low <= ratio <= high, both ends included, decided on logarithms."""
    low, high = bounds
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def _none_outside(gap: Gap, low: float, high: float) -> Tensor:
    """[N] bool, sequences with no Delta outside [low, high]."""
    return gap.segments.count(outside(gap.delta, low, high)) == 0


# ---------------------------------------------------------------- token by token: True where it rejects


def _token_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    low, high = bounds
    return outside(gap.delta, math.log(low), math.log(high))


def _token_k2(gap: Gap, bound: float) -> Tensor:
    return outside(gap.delta, -math.sqrt(2 * bound), math.sqrt(2 * bound))


def _token_k3(gap: Gap, bound: float) -> Tensor:
    return outside(gap.delta, *k3_interval(bound))


def _probability_gap(gap: Gap) -> Tensor:
    """pi_train - mu of each token, 0 where not valid (both log-probs are 0 there)."""
    return gap.trainer_logprobs.exp() - gap.rollout_logprobs.exp()


def _prob_diff(gap: Gap, bounds: Sequence[float]) -> Tensor:
    low, high = bounds
    return outside(_probability_gap(gap), low, high)


def _advantages(gap: Gap, *, criterion: str) -> Tensor:
    if gap.advantages is None:
        raise ValueError(
            f"correction.reject.{criterion} reads the sign of the advantage, got advantages=None. "
            "Pass the advantages [T] to correct()."
        )
    return gap.advantages


def _dppo_tv(gap: Gap, bound: float) -> Tensor:
    """Drop where |pi_train - mu|, the total variation of the token's Bernoulli law, exceeds the bound outwards: where
    the advantage pushes the token further away from mu. Source of the rule: DPPO."""
    outwards = _advantages(gap, criterion="dppo_tv") * gap.delta > 0
    return outwards & (_probability_gap(gap).abs() > bound)


def _dppo_kl(gap: Gap, bound: float) -> Tensor:
    """Drop where KL(Bernoulli(mu) || Bernoulli(pi_train)) exceeds the bound outwards."""
    outwards = _advantages(gap, criterion="dppo_kl") * gap.delta > 0
    return outwards & (bernoulli_kl(gap.rollout_logprobs, gap.trainer_logprobs) > bound)


def _opsm(gap: Gap, bound: float) -> Tensor:
    """Off-policy sequence masking: A < 0 and mean(log mu - log pi_train) > bound leaves. Source: arXiv:2512.02556."""
    punished = ~(_advantages(gap, criterion="opsm") >= 0)
    near = gap.segments.expand(-gap.mean(gap.delta64) <= bound)
    return ~near & punished | ~gap.segments.expand(gap.complete)


# ---------------------------------------------------------------- response by response: True where it keeps


def _sequence_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return _within(gap.total, bounds)


def _geometric_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return _within(divide_by_count(gap.total, gap.num_valid), bounds)


def _sum_k2(gap: Gap, bound: float) -> Tensor:
    return gap.segments.sum(k2(gap.delta64)) <= bound


def _sum_k3(gap: Gap, bound: float) -> Tensor:
    return gap.segments.sum(gap.k3) <= bound


def _mean_k2(gap: Gap, bound: float) -> Tensor:
    return gap.mean(k2(gap.delta64)) <= bound


def _mean_k3(gap: Gap, bound: float) -> Tensor:
    return gap.mean(gap.k3) <= bound


def _max_k2(gap: Gap, bound: float) -> Tensor:
    return _none_outside(gap, -math.sqrt(2 * bound), math.sqrt(2 * bound))


def _max_k3(gap: Gap, bound: float) -> Tensor:
    return _none_outside(gap, *k3_interval(bound))


def _veto(gap: Gap, bound: float) -> Tensor:
    """min rho >= bound. An invalid token is catastrophic too: a side gave it probability 0, or none at all."""
    return _none_outside(gap, math.log(bound), math.inf)


def _mult_err(gap: Gap, bound: float) -> Tensor:
    """Mean of max(rho, 1 / rho). Clamped only inside exp, far above every bound that makes sense."""
    return 1 + gap.mean(bounded_exp(gap.delta64.abs()).sub_(1)) <= bound


TOKEN_CRITERIA: Final[dict[str, Callable[[Gap, float], Tensor] | Callable[[Gap, Sequence[float]], Tensor]]] = {
    "token_ratio": _token_ratio,
    "token_k2": _token_k2,
    "token_k3": _token_k3,
    "prob_diff": _prob_diff,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "opsm": _opsm,
}
"""Key of `RejectConfig` -> criterion: (gap, bound or [low, high]) -> [n] bool, True where it rejects the token; what it
says off the mask does not count."""
RESPONSE_CRITERIA: Final[dict[str, Callable[[Gap, float], Tensor] | Callable[[Gap, Sequence[float]], Tensor]]] = {
    "sequence_ratio": _sequence_ratio,
    "geometric_ratio": _geometric_ratio,
    "sum_k2": _sum_k2,
    "sum_k3": _sum_k3,
    "mean_k2": _mean_k2,
    "mean_k3": _mean_k3,
    "max_k2": _max_k2,
    "max_k3": _max_k3,
    "veto": _veto,
    "mult_err": _mult_err,
}
"""The other keys: (gap, bound or [low, high]) -> [N] bool, True where it keeps the response."""
