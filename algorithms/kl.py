"""Per-token divergence estimators: log-ratio -> k1, k2, k3. Read by diagnostics, and by anything that needs a KL.

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

SERIES_BELOW = 0.25
"""Below this |Delta|, expm1(Delta) - Delta is replaced by its power series: the difference of two nearly equal
numbers has a relative error of about epsilon / |Delta|, all digits at 1e-7 in float32."""
SERIES_TERMS = 10
"""Terms of that series; the first one left out is below 1e-16 of the value, enough for float64 too."""


def k1(log_ratio: Tensor) -> Tensor:
    """-Delta, elementwise, nats. The mean estimates KL(mu || pi_train) and may be negative in a batch."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Delta^2 / 2, elementwise, nats squared. Not a KL; always >= 0."""
    return log_ratio * log_ratio / 2


def k3(log_ratio: Tensor) -> Tensor:
    """expm1(D) - D with D = Delta clamped to +-MAX_LOG_RATIO, elementwise, nats; >= 0.

    The mean over tokens sampled from mu estimates KL(mu || pi_train). Accurate to 1e-5 relative in float32 down to
    the underflow of Delta^2. NaN stays NaN: mask before averaging. Differentiable, gradient exp(D) - 1.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    small = clamped.abs() < SERIES_BELOW
    # Both branches are evaluated, so each sees 0 where the other is taken: no stray inf or NaN in the gradient.
    return torch.where(small, _series(torch.where(small, clamped, 0.0)), _direct(torch.where(small, 0.0, clamped)))


def _direct(x: Tensor) -> Tensor:
    return torch.expm1(x) - x


def _series(x: Tensor) -> Tensor:
    """x^2/2 (1 + x/3 (1 + x/4 (1 + ...))), the Taylor series of expm1(x) - x in Horner form."""
    tail = torch.ones_like(x)
    for divisor in range(SERIES_TERMS + 2, 2, -1):
        tail = 1 + x / divisor * tail
    return x * x / 2 * tail
