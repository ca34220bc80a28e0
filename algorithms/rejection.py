"""Rejection criteria: what the two engines say about a token or a response -> whether it stays in the loss.

One function per key of `RejectConfig`, in `CRITERIA`. `algorithms.correction` applies those that are set; all must
keep a token. Delta = log pi_train - log mu, raw (never clamped before it is compared), 0 on invalid tokens.

A response with an invalid token has no sequence statistic and is rejected whole by every criterion over responses.
T: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO, RejectConfig
from algorithms.kl import bernoulli_kl, k2, k3
from algorithms.masked import divide_by_count, segment_expand, segment_min, segment_sum


@dataclass(frozen=True, kw_only=True, eq=False)
class Gap:
    """What the two engines say about the same tokens. What several criteria read is computed once."""

    delta: Tensor
    """[T] log pi_train - log mu, not clamped; 0 where not valid, and everywhere if pi_train is unknown."""
    valid: Tensor
    """[T] bool, response tokens whose log-probs are log-probabilities."""
    response_mask: Tensor
    """[T] bool."""
    cu_seqlens: Tensor
    """[N+1] int32."""
    trainer_logprobs: Tensor
    """[T] log pi_train, 0 where not valid."""
    rollout_logprobs: Tensor
    """[T] log mu, 0 where not valid."""
    advantages: Tensor | None
    """[T], or None where no criterion reads them."""

    @cached_property
    def k3(self) -> Tensor:
        """[T], 0 where not valid."""
        return k3(self.delta)

    @cached_property
    def num_valid(self) -> Tensor:
        """[N] float64, valid tokens of each sequence."""
        return segment_sum(self.valid.view(torch.uint8).double(), self.cu_seqlens)

    @cached_property
    def complete(self) -> Tensor:
        """[N] bool, sequences without an invalid token."""
        invalid = (self.response_mask & ~self.valid).view(torch.uint8)
        return segment_sum(invalid.double(), self.cu_seqlens) == 0


class Verdict(NamedTuple):
    """What one criterion decided."""

    criterion: str
    """Key of `RejectConfig`."""
    keep: Tensor
    """[T] bool, False on response tokens that it rejects; True off the mask."""


def verdicts(config: RejectConfig, gap: Gap) -> tuple[Verdict, ...]:
    """The verdict of every criterion in use, in the order of the config.

    Raises:
        ValueError: a criterion reads advantages and there are none.
    """
    return tuple(
        Verdict(criterion=name, keep=CRITERIA[name](gap, getattr(config, name)) | ~gap.response_mask)
        for name in config.active()
    )


def expand_responses(gap: Gap, kept: Tensor) -> Tensor:
    """kept [N] bool -> [T] bool, False for every token of a response with an invalid token."""
    return expand_sequences(gap, kept & gap.complete)


def expand_sequences(gap: Gap, values: Tensor) -> Tensor:
    """One value per sequence [N] -> the value of each token's sequence [T]; 0 on padding."""
    return segment_expand(values, gap.cu_seqlens, num_tokens=gap.delta.shape[0])


def _within(log_ratio: Tensor, bounds: Sequence[float]) -> Tensor:
    """low <= ratio <= high, both ends included, decided on logarithms."""
    low, high = bounds
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


# ---------------------------------------------------------------- token by token


def _token_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return _within(gap.delta, bounds)


def _token_k2(gap: Gap, bound: float) -> Tensor:
    return k2(gap.delta) <= bound


def _token_k3(gap: Gap, bound: float) -> Tensor:
    return gap.k3 <= bound


def _probability_gap(gap: Gap) -> Tensor:
    """pi_train - mu of each token, 0 where not valid (both log-probs are 0 there)."""
    return gap.trainer_logprobs.exp() - gap.rollout_logprobs.exp()


def _prob_diff(gap: Gap, bounds: Sequence[float]) -> Tensor:
    low, high = bounds
    difference = _probability_gap(gap)
    return (difference >= low) & (difference <= high)


def _outward(gap: Gap, *, criterion: str) -> Tensor:
    """[T] bool, tokens that the advantage pushes further away from mu. Source of the rule: DPPO."""
    if gap.advantages is None:
        raise ValueError(
            f"correction.reject.{criterion} reads the sign of the advantage, got advantages=None. "
            "Pass the advantages [T] to correct()."
        )
    return gap.advantages * gap.delta > 0


def _dppo_tv(gap: Gap, bound: float) -> Tensor:
    """Drop where |pi_train - mu|, the total variation of the token's Bernoulli law, exceeds the bound outwards."""
    return ~(_outward(gap, criterion="dppo_tv") & (_probability_gap(gap).abs() > bound))


def _dppo_kl(gap: Gap, bound: float) -> Tensor:
    """Drop where KL(Bernoulli(mu) || Bernoulli(pi_train)) exceeds the bound outwards."""
    divergence = bernoulli_kl(gap.rollout_logprobs, gap.trainer_logprobs)
    return ~(_outward(gap, criterion="dppo_kl") & (divergence > bound))


# ---------------------------------------------------------------- response by response


def _sequence_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return expand_responses(gap, _within(segment_sum(gap.delta, gap.cu_seqlens), bounds))


def _geometric_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return expand_responses(gap, _within(_mean(gap, gap.delta), bounds))


def _sum_k2(gap: Gap, bound: float) -> Tensor:
    return expand_responses(gap, segment_sum(k2(gap.delta), gap.cu_seqlens) <= bound)


def _sum_k3(gap: Gap, bound: float) -> Tensor:
    return expand_responses(gap, segment_sum(gap.k3, gap.cu_seqlens) <= bound)


def _mean_k2(gap: Gap, bound: float) -> Tensor:
    return expand_responses(gap, _mean(gap, k2(gap.delta)) <= bound)


def _mean_k3(gap: Gap, bound: float) -> Tensor:
    return expand_responses(gap, _mean(gap, gap.k3) <= bound)


def _max_k2(gap: Gap, bound: float) -> Tensor:
    return expand_responses(gap, _max(gap, k2(gap.delta)) <= bound)


def _max_k3(gap: Gap, bound: float) -> Tensor:
    return expand_responses(gap, _max(gap, gap.k3) <= bound)


def _veto(gap: Gap, bound: float) -> Tensor:
    """min rho >= bound. An invalid token is catastrophic too: a side gave it probability 0, or none at all."""
    return expand_responses(gap, segment_min(gap.delta, gap.cu_seqlens) >= math.log(bound))


def _mult_err(gap: Gap, bound: float) -> Tensor:
    """Mean of max(rho, 1 / rho). Clamped only inside exp, far above every bound that makes sense."""
    return expand_responses(gap, 1 + _mean(gap, torch.expm1(gap.delta.abs().clamp(max=MAX_LOG_RATIO))) <= bound)


def _opsm(gap: Gap, bound: float) -> Tensor:
    """Off-policy sequence masking: A < 0 and mean(log mu - log pi_train) > bound leaves. Source: arXiv:2512.02556."""
    if gap.advantages is None:
        raise ValueError(
            "correction.reject.opsm reads the sign of the advantage, got advantages=None. "
            "Pass the advantages [T] to correct()."
        )
    near = expand_responses(gap, -_mean(gap, gap.delta) <= bound)
    complete = expand_responses(gap, torch.ones_like(gap.cu_seqlens[1:], dtype=torch.bool))
    return near | (complete & (gap.advantages >= 0))


def _mean(gap: Gap, values: Tensor) -> Tensor:
    """Mean over the valid tokens of each sequence [N]; for values that are 0 on all others."""
    return divide_by_count(segment_sum(values, gap.cu_seqlens).double(), gap.num_valid)


def _max(gap: Gap, values: Tensor) -> Tensor:
    """Maximum over each sequence [N]; for values that are >= 0 on the mask and 0 off it."""
    return -segment_min(-values, gap.cu_seqlens)


CRITERIA: Final[dict[str, Callable[[Gap, float], Tensor] | Callable[[Gap, Sequence[float]], Tensor]]] = {
    "token_ratio": _token_ratio,
    "sequence_ratio": _sequence_ratio,
    "geometric_ratio": _geometric_ratio,
    "token_k2": _token_k2,
    "token_k3": _token_k3,
    "sum_k2": _sum_k2,
    "sum_k3": _sum_k3,
    "mean_k2": _mean_k2,
    "mean_k3": _mean_k3,
    "max_k2": _max_k2,
    "max_k3": _max_k3,
    "veto": _veto,
    "prob_diff": _prob_diff,
    "mult_err": _mult_err,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "opsm": _opsm,
}
"""Key of `RejectConfig` -> criterion: (gap, bound or [low, high]) -> [T] bool, True where it keeps the token."""
