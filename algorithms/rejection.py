"""Rejection criteria: the log-probs of both engines -> the tokens that stay in the loss.

A criterion is one function here, its row in CRITERIA, and a key of `algorithms.config.rejection.RejectConfig` with the
same name. `algorithms.correction` applies the criteria that are set; a token stays if all of them keep it. Delta = log
pi_train - log mu is compared before any clamp, and 0 on invalid tokens. A criterion over responses rejects a response
with an invalid token whole: the response has no statistic.

T: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from algorithms.config import RejectConfig
from algorithms.kl import bernoulli_kl, bounded_exp, k3
from algorithms.masked import segment_max, segment_min
from algorithms.tokens import Tokens


def rejected_tokens(config: RejectConfig, tokens: Tokens) -> dict[str, Tensor]:
    """Each criterion in use -> the response tokens that it rejects, [T] bool.

    Raises ValueError if a criterion needs advantages, and tokens.advantages is None.
    """
    mask = tokens.response_mask
    own = {criterion.name: criterion.fitting(criterion.answer(tokens), mask) for criterion in config.custom}
    kept = {name: CRITERIA[name](tokens, getattr(config, name)) for name in config.active() if name not in own} | own
    return {name: mask & ~keeps for name, keeps in kept.items()}


# Criteria per token -> [T] bool, True where the token is kept.


def _token_ratio(tokens: Tokens, bounds: Sequence[float]) -> Tensor:
    """low <= rho <= high."""
    return _within(tokens.delta, bounds)


def _token_k3(tokens: Tokens, bound: float) -> Tensor:
    """rho - 1 - Delta <= bound."""
    return k3(tokens.delta) <= bound


def _prob_diff(tokens: Tokens, bounds: Sequence[float]) -> Tensor:
    """low <= pi_train - mu <= high."""
    low, high = bounds
    difference = _probability_gap(tokens)
    return (difference >= low) & (difference <= high)


def _dppo_tv(tokens: Tokens, bound: float) -> Tensor:
    """|pi_train - mu| <= bound, or the advantage pushes the token back towards mu.

    |pi_train - mu| is the total variation of the token's Bernoulli law. Source: DPPO, as in `algorithms.loss`.
    """
    pushes_outwards = _advantages(tokens, criterion="dppo_tv") * tokens.delta > 0
    return ~pushes_outwards | (_probability_gap(tokens).abs() <= bound)


def _dppo_kl(tokens: Tokens, bound: float) -> Tensor:
    """KL(Bernoulli(mu) || Bernoulli(pi_train)) <= bound, or the advantage pushes the token back towards mu."""
    pushes_outwards = _advantages(tokens, criterion="dppo_kl") * tokens.delta > 0
    return ~pushes_outwards | (bernoulli_kl(tokens.rollout, tokens.train) <= bound)


def _opsm(tokens: Tokens, bound: float) -> Tensor:
    """A >= 0, or mean(log mu - log pi_train) over the response <= bound: off-policy sequence masking.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """
    is_near = tokens.expand(-tokens.delta_mean <= bound)
    return ((_advantages(tokens, criterion="opsm") >= 0) | is_near) & tokens.expand(tokens.complete)


# Criteria per response -> [T] bool, True where the token is kept.


def _sequence_ratio(tokens: Tokens, bounds: Sequence[float]) -> Tensor:
    """low <= prod_t rho_t <= high."""
    return _of_response(tokens, _within(tokens.delta_total, bounds))


def _geometric_ratio(tokens: Tokens, bounds: Sequence[float]) -> Tensor:
    """low <= (prod_t rho_t)^(1/|y|) <= high."""
    return _of_response(tokens, _within(tokens.delta_mean, bounds))


def _mean_k3(tokens: Tokens, bound: float) -> Tensor:
    """mean_t k3 <= bound. Source of mean and maximum: trust region masking, https://arxiv.org/abs/2512.23075."""
    return _of_response(tokens, tokens.mean(k3(tokens.delta.double())) <= bound)


def _max_k3(tokens: Tokens, bound: float) -> Tensor:
    """max_t k3 <= bound."""
    return _of_response(tokens, segment_max(k3(tokens.delta), tokens.cu_seqlens) <= bound)


def _veto(tokens: Tokens, bound: float) -> Tensor:
    """min_t rho_t >= bound. An invalid token also rejects its response: its probability is 0 or unknown."""
    return _of_response(tokens, segment_min(tokens.delta, tokens.cu_seqlens) >= math.log(bound))


def _mult_err(tokens: Tokens, bound: float) -> Tensor:
    """mean_t max(rho_t, 1 / rho_t) <= bound."""
    # Mean of the excess over 1, which is 0 on tokens that are not valid.
    return _of_response(tokens, 1 + tokens.mean(bounded_exp(tokens.delta.double().abs()) - 1) <= bound)


def _within(log_ratio: Tensor, bounds: Sequence[float]) -> Tensor:
    """low <= ratio <= high, both ends included, decided on logarithms."""
    low, high = bounds
    return (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def _of_response(tokens: Tokens, keeps: Tensor) -> Tensor:
    """The decision for each response [N] -> for its tokens [T]; a response with an invalid token is not kept."""
    return tokens.expand(keeps & tokens.complete)


def _probability_gap(tokens: Tokens) -> Tensor:
    """pi_train - mu of each token, 0 where not valid."""
    return tokens.train.exp() - tokens.rollout.exp()


def _advantages(tokens: Tokens, *, criterion: str) -> Tensor:
    if tokens.advantages is None:
        raise ValueError(
            f"correction.reject.{criterion} reads the sign of the advantage, got advantages=None. "
            "Pass the advantages [T] in Tokens."
        )
    return tokens.advantages


CRITERIA: Final[dict[str, Callable[[Tokens, Any], Tensor]]] = {
    "token_ratio": _token_ratio,
    "sequence_ratio": _sequence_ratio,
    "geometric_ratio": _geometric_ratio,
    "token_k3": _token_k3,
    "mean_k3": _mean_k3,
    "max_k3": _max_k3,
    "veto": _veto,
    "prob_diff": _prob_diff,
    "mult_err": _mult_err,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "opsm": _opsm,
}
"""Key of `RejectConfig` -> criterion: (tokens, bound or [low, high]) -> [T] bool, True where the token is kept."""
