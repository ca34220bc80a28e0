"""Per-token divergence estimators: log-ratio -> k1, k2, k3. Every KL of this package uses these functions.

Delta = log pi_train - log mu of a token that was sampled from mu (the rollout engine). Under E_mu:

    k1 = -Delta                 -> KL(mu || pi_train); signed, high variance
    k2 = Delta^2 / 2            -> not a KL, but within O(Delta^3) of it
    k3 = exp(Delta) - 1 - Delta -> KL(mu || pi_train) exactly, and never negative

The mirrored form exp(-Delta) - 1 + Delta estimates chi^2(mu || pi_train) - KL(mu || pi_train): not a KL.
Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-MAX_LOG_RATIO, elementwise: the result and its square are finite in float32."""
    # Computed in float64, so that rounding the result is the only error.
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double().exp().to(log_ratio.dtype)


def k1(log_ratio: Tensor) -> Tensor:
    """-Delta, elementwise, nats. The mean estimates KL(mu || pi_train) and may be negative in a batch."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Delta^2 / 2, elementwise, nats squared. Not a KL; always >= 0."""
    return log_ratio * log_ratio / 2


def k3(log_ratio: Tensor) -> Tensor:
    """expm1(D) - D with D = Delta clamped to +-MAX_LOG_RATIO, elementwise, nats; >= 0, same dtype.

    The mean over tokens sampled from mu estimates KL(mu || pi_train). The difference of two nearly equal numbers loses
    their common digits, so the subtraction is done in float64: the relative error is 4e-16 / |Delta| and the rounding
    of the result, 1e-7 in float32 down to |Delta| = 4e-9, which is less than one step of any log-prob below -0.1. NaN
    stays NaN: mask before averaging. Differentiable, gradient exp(D) - 1.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).double()
    # Rounding may give a negative number where |Delta| is below 1e-15.
    return (torch.expm1(clamped) - clamped).to(log_ratio.dtype).clamp(min=0)


MIN_COMPLEMENT = 1e-6
"""1 - p counts as at least this in `bernoulli_kl`: a probability near 1 has lost its complement to rounding."""


def bernoulli_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)) of log p, log q <= 0, elementwise, nats; finite for finite log-probs.

    p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q)), each 1 - p counted as at least MIN_COMPLEMENT inside a log.
    """
    complement, other_complement = (
        (-torch.expm1(x)).clamp(min=MIN_COMPLEMENT).log() for x in (logprobs, other_logprobs)
    )
    probability = logprobs.exp()
    rest = -torch.expm1(logprobs)
    return probability * (logprobs - other_logprobs) + rest * (complement - other_complement)
