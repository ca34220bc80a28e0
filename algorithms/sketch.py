"""Log-ratios in bins of constant relative width: any mean of a function of Delta, quantiles and tails from one table.

A bin holds the number of its log-ratios and their sum. Its bounds come from the float32 pattern of the log-ratio:
the sign, the exponent and the first seven bits of the mantissa, so that a bin is 1/128 of its octave wide at every
scale from 2^-22 to 2^6 nats. Below, 128 bins of equal width reach down to 0; above, everything is in the last bin.
Tables of micro-batches and ranks add up. Nothing here reads a value on the host but `LogRatios`, which lives there.

A function f of Delta is averaged at the mean of each bin: exact where the log-ratios of a bin are equal, else off by
f''/2 times the variance in the bin. For k3 that is at most 1.5e-5 and on smooth data about 5e-6 of its value; the
mean of Delta itself is exact. A quantile is a bin's mean: within 0.8 % in Delta, 1.6 % in k3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO

GROUP_BINS: Final = 4096
"""Bins of one sign and kind: 29 of 32 octaves are used."""
LARGEST: Final = 64 * (1 - 2**-24)
"""Log-ratios are moved below 2^6 before their bin is taken."""
SCALE: Final = 2.0**-104
"""Moves 2^-22 to the smallest normal float32: what is smaller becomes subnormal, with bins of equal width."""
KEPT_KIND: Final = 0
"""A table keeps log-ratios of several kinds apart. This one: tokens that are kept, or all without a correction."""
REJECTED_KIND: Final = 1
"""Valid tokens that are not kept."""
SEQUENCE_KIND: Final = 2
"""Sums over sequences."""
UNREAD_KIND: Final = 3
"""What `flat_sketch` drops."""
NUM_KINDS: Final = 3
NEGATIVE_GROUP: Final = 8
"""Groups that lie before those of the negative log-ratios: bit 15, the sign, puts them there."""
NUM_GROUPS: Final = NEGATIVE_GROUP + 4
SKETCH_SIZE: Final = 2 * 2 * NUM_KINDS * GROUP_BINS
"""float64 numbers of a sketch as it is merged and reduced."""


def new_table(device: torch.device) -> Tensor:
    """An empty table to add to, [2, bins] float64: counts, sums."""
    return torch.zeros(2, NUM_GROUPS * GROUP_BINS, dtype=torch.float64, device=device)


def add_log_ratios(table: Tensor, log_ratios: Tensor, *, kind: Tensor | None = None) -> None:
    """Count log_ratios [n] float32 or float64, all finite, into `table`. kind [n] int32, 0 .. 3; None for kind 0."""
    scaled = log_ratios.to(torch.float32).clamp(-LARGEST, LARGEST).mul_(SCALE)
    bins = scaled.view(torch.int32).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    if kind is not None:
        bins = bins.add_(kind, alpha=GROUP_BINS)
    index, values = bins.to(torch.int64), log_ratios.double()
    table[0].scatter_add_(0, index, torch.ones_like(values))
    table[1].scatter_add_(0, index, values)


def flat_sketch(table: Tensor) -> Tensor:
    """The used part of a table -> [SKETCH_SIZE] float64, to be merged by addition."""
    groups = table.view(2, NUM_GROUPS, GROUP_BINS)
    positive, negative = groups[:, :NUM_KINDS], groups[:, NEGATIVE_GROUP : NEGATIVE_GROUP + NUM_KINDS]
    return torch.stack([positive, negative]).view(-1)


class LogRatios(NamedTuple):
    """A sketch on the host: the bins that hold something."""

    counts: Tensor
    """[B] float64."""
    log_ratios: Tensor
    """[B] float64, mean of the bin, not clamped."""

    @classmethod
    def from_flat(cls, flat: Tensor, *kinds: int) -> Self:
        """`flat_sketch` on the host -> the log-ratios of some kinds together."""
        # [sign, count or sum, kind, bin]
        numbers = flat.view(2, 2, NUM_KINDS, GROUP_BINS)[:, :, list(kinds)].sum(2)
        counts, totals = numbers[:, 0].reshape(-1), numbers[:, 1].reshape(-1)
        seen = counts > 0.5
        return cls(counts=counts[seen], log_ratios=totals[seen] / counts[seen])

    def num(self) -> float:
        """How many log-ratios."""
        return float(self.counts.sum())

    def total(self, function: Callable[[Tensor], Tensor] = torch.clone) -> float:
        """Sum over all log-ratios of an elementwise function of the log-ratio, which is not clamped here."""
        return float(torch.dot(self.counts, function(self.log_ratios)))

    def quantile(self, fraction: float, function: Callable[[Tensor], Tensor]) -> float | None:
        """The smallest value with at least `fraction` of all values at or below it; None without values."""
        if not self.counts.numel():
            return None
        values, order = function(self.log_ratios).sort()
        below = self.counts[order].cumsum(0)
        index = int(torch.searchsorted(below, fraction * float(below[-1]) * (1 - 1e-12)))
        return float(values[min(index, values.numel() - 1)])

    def pareto_k(self) -> float | None:
        """Shape k of the generalized Pareto law fitted to the largest weights exp(log_ratio); None below 5 of them.

        Importance sampling averages are reliable for k < 0.5 and unreliable for k > 0.7. k is the shape of the tail,
        whatever its size: where the weights hardly differ it says nothing. The tail holds the
        M = ceil(min(n / 5, 3 sqrt(n))) largest of n weights, less those that equal its lower end. Weights are capped
        at exp(MAX_LOG_RATIO). With one weight per bin this is PSIS; bins with many blur where the tail begins, which
        moves k by about a fifth of its standard error (1 + k) / sqrt(M).

        Sources: Vehtari, Simpson, Gelman, Yao, Gabry, "Pareto smoothed importance sampling", arXiv:1507.02646,
        section 3; Zhang and Stephens, "A new and efficient estimation method for the generalized Pareto
        distribution", Technometrics 51 (2009), equations 10 to 12.
        """
        num = self.num()
        wanted = math.ceil(min(num / 5, 3 * math.sqrt(num)))
        if wanted < 5:
            return None
        log_ratio, order = self.log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sort(descending=True)
        count = self.counts[order]
        above = count.cumsum(0)
        # The bin of the largest weight that is not in the tail is where the tail begins.
        first = int(torch.searchsorted(above, torch.tensor(float(wanted), dtype=above.dtype), right=True))
        if first == 0 or first >= above.numel():
            return None
        # Its largest weight: the one weight of the bin, or with many the middle between this bin and the next.
        threshold = log_ratio[first] + (log_ratio[first - 1] - log_ratio[first]) / 2 * (1 - 1 / count[first])
        # Relative to the threshold; its scale does not change k.
        excess, tail = torch.expm1(log_ratio[:first] - threshold).flip(0), count[:first].flip(0)
        return _generalized_pareto_k(excess[excess > 0], tail[excess > 0])


def _generalized_pareto_k(excess: Tensor, count: Tensor) -> float | None:
    """Zhang and Stephens' estimate of k, shrunk to 0.5 with the weight of 10 observations as in PSIS.

    excess [B] float64, increasing and > 0, each `count` [B] times.
    """
    num = float(count.sum())
    if num < 5:
        return None
    # k enters as theta = -k / sigma, averaged over its profile posterior on a grid.
    size = 30 + math.floor(math.sqrt(num))
    quarter = excess[int(torch.searchsorted(count.cumsum(0), math.floor(num / 4 + 0.5)))]
    steps = torch.arange(1, size + 1, dtype=torch.float64)
    theta = 1 / excess[-1] + (1 - torch.sqrt(size / (steps - 0.5))) / (3 * quarter)
    shape = torch.mv(torch.log1p(-theta.unsqueeze(1) * excess), count) / num
    log_likelihood = num * (torch.log(-theta / shape) - shape - 1)
    posterior = torch.softmax(log_likelihood, 0)
    best = torch.dot(posterior, theta)
    k = float(torch.dot(torch.log1p(-best * excess), count)) / num
    return (num * k + 10 * 0.5) / (num + 10)
