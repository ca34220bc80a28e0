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
from typing import Final, NamedTuple

from torch import Tensor

from algorithms.bits import outside
from algorithms.config import RejectConfig
from algorithms.gap import Gap
from algorithms.kl import bernoulli_kl, bounded_exp, k2, k3_interval


class Verdict(NamedTuple):
    """What the criteria in use say."""

    keep: Tensor
    """[n] bool, the valid tokens that every criterion keeps."""
    tokens: dict[str, Tensor]
    """Criterion over tokens -> the response tokens that it rejects, [n] bool."""
    responses: dict[str, Tensor]
    """Criterion over responses -> those that it keeps, [N] bool."""


def decide(config: RejectConfig, gap: Gap) -> Verdict:
    """The verdict of the criteria in use.

    Raises:
        ValueError: a criterion reads advantages and there are none.
    """
    keep, keep_responses = gap.valid, None
    tokens: dict[str, Tensor] = {}
    responses: dict[str, Tensor] = {}
    for name in config.active():
        bound = getattr(config, name)
        if name in TOKEN_CRITERIA:
            tokens[name] = TOKEN_CRITERIA[name](gap, bound) & gap.response_mask
            keep = keep & ~tokens[name]
        else:
            keeps = RESPONSE_CRITERIA[name](gap, bound) & gap.complete
            keep_responses = keeps if keep_responses is None else keep_responses & keeps
            responses[name] = keeps
    if keep_responses is not None:
        keep = keep & gap.segments.expand(keep_responses)
    return Verdict(keep=keep, tokens=tokens, responses=responses)


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
    near = gap.segments.expand(-gap.mean(gap.total) <= bound)
    return ~near & punished | ~gap.segments.expand(gap.complete)


# ---------------------------------------------------------------- response by response: True where it keeps


def _sequence_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return _within(gap.total, bounds)


def _geometric_ratio(gap: Gap, bounds: Sequence[float]) -> Tensor:
    return _within(gap.mean(gap.total), bounds)


def _sum_k2(gap: Gap, bound: float) -> Tensor:
    return gap.segments.sum(k2(gap.delta.double())) <= bound


def _sum_k3(gap: Gap, bound: float) -> Tensor:
    return gap.k3_total <= bound


def _mean_k2(gap: Gap, bound: float) -> Tensor:
    return gap.mean(gap.segments.sum(k2(gap.delta.double()))) <= bound


def _mean_k3(gap: Gap, bound: float) -> Tensor:
    return gap.mean(gap.k3_total) <= bound


def _max_k2(gap: Gap, bound: float) -> Tensor:
    return _none_outside(gap, -math.sqrt(2 * bound), math.sqrt(2 * bound))


def _max_k3(gap: Gap, bound: float) -> Tensor:
    return _none_outside(gap, *k3_interval(bound))


def _veto(gap: Gap, bound: float) -> Tensor:
    """min rho >= bound. An invalid token is catastrophic too: a side gave it probability 0, or none at all."""
    return _none_outside(gap, math.log(bound), math.inf)


def _mult_err(gap: Gap, bound: float) -> Tensor:
    """Mean of max(rho, 1 / rho). Clamped only inside exp, far above every bound that makes sense."""
    excess = bounded_exp(gap.delta.double().abs()).sub_(1)
    return 1 + gap.mean(gap.segments.sum(excess)) <= bound


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
