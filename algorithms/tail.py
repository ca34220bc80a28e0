"""The tail of a sample, on its device: a quantile, and the Pareto shape of the largest importance weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def quantile(values: Tensor, fraction: float) -> float | None:
    """The smallest of values [n] with at least `fraction` of all values at or below it; None without values."""
    # Rounding of the product must not ask for one more value.
    rank = math.ceil(fraction * values.numel() * (1 - 1e-12))
    return values.kthvalue(rank).values.item() if values.numel() else None


def pareto_k(log_weights: Tensor) -> float | None:
    """Shape k of the generalized Pareto law fitted to the largest of n weights; None where the weights have no tail.

    `log_weights` are [n] float64, clamped by the caller. Importance sampling averages are reliable for k < 0.5 and
    unreliable for k > 0.7. k measures the shape of the tail, whatever its size: where the weights hardly differ, k has
    no meaning. The tail holds the M = ceil(min(n / 5, 3 sqrt(n))) largest weights, less the weights that equal the next
    smaller weight; with fewer than 5 there is no fit.

    Sources: Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", arXiv:1507.02646, section 3;
    Zhang and Stephens, "A new and efficient estimation method for the generalized Pareto distribution", Technometrics
    51 (2009), equations 10 to 12. k is shrunk to 0.5 with the weight of 10 observations, as in PSIS.
    """
    num = log_weights.numel()
    size = math.ceil(min(num / 5, 3 * math.sqrt(num)))
    if size < 5:
        return None
    largest = log_weights.double().topk(size + 1).values
    # The threshold, to which the fit is relative, is the largest weight outside the tail; the scale does not change k.
    excess = torch.expm1(largest[:-1] - largest[-1]).flip(0)
    excess = excess[excess > 0]
    size = excess.numel()
    if size < 5:
        return None
    # k enters as theta = -k / sigma, averaged over its profile posterior on a grid.
    points = 30 + math.floor(math.sqrt(size))
    quarter = excess[math.floor(size / 4 + 0.5) - 1]
    grid = torch.arange(1, points + 1, dtype=torch.float64, device=excess.device)
    theta = 1 / excess[-1] + (1 - torch.sqrt(points / (grid - 0.5))) / (3 * quarter)
    shape = torch.log1p(-theta.unsqueeze(1) * excess).mean(1)
    posterior = torch.softmax(size * (torch.log(-theta / shape) - shape - 1), 0)
    k = torch.log1p(-torch.dot(posterior, theta) * excess).mean().item()
    return (size * k + 10 * 0.5) / (size + 10)
