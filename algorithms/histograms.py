"""Streaming histograms for plots: the difference of the two engines by probability and by position.

20 x 20 bins of (probability, position) with three sums each, and 50 x 50 counts of (pi_old, mu). Statistics of
micro-batches and ranks add up; no value is read on the host before `arrays`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from algorithms.kl import k3
from algorithms.tokens import Tokens

PROBABILITY_BINS: Final = 20
"""Octaves of mu: bin b holds 2^-(b+1) < mu <= 2^-b, the last bin all smaller mu."""
POSITION_BINS: Final = 20
"""Octaves of the position, counted from 1: bin b holds 2^b <= position < 2^(b+1), the last bin all larger positions."""
JOINT_BINS: Final = 50
"""Number of bins of equal width of pi_old, and of mu."""
GRID: Final = PROBABILITY_BINS * POSITION_BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """One axis of bins for a plot, on the host."""

    edges: list[float]
    """Bin edges in the order of the bins: one edge more than there are bins."""
    counts: list[float]
    """Tokens of each bin."""
    abs_logdiff: list[float | None]
    """Mean |Delta| of each bin, nats; None in an empty bin."""
    k3: list[float | None]
    """Mean k3 of each bin, nats; None in an empty bin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramArrays:
    """All histograms as plain lists."""

    by_probability: Bins
    """Bins by mu; the edges fall from 1 to 0."""
    by_position: Bins
    """Bins by position; edges in response tokens, from 1; the last edge is infinite."""
    joint_edges: list[float]
    """Edges of the bins of pi_old and of mu."""
    joint: list[list[float]]
    """Tokens by [bin of pi_old][bin of mu]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchHistograms:
    """Mismatch histograms of a set of tokens, on the device of the tokens."""

    sums: Tensor
    """[3 GRID + JOINT_BINS^2] float64, reduced over ranks with SUM: tokens, |Delta| and k3 by (probability,
    position), then tokens by (pi_old, mu)."""

    def merge(self, other: MismatchHistograms) -> MismatchHistograms:
        """The sum of both histograms, on the device."""
        return MismatchHistograms(sums=self.sums + other.sums)

    def arrays(self) -> HistogramArrays:
        """Convert the histograms to lists for plotting. Reads the device, once."""
        host = self.sums.cpu()
        grid = host[: 3 * GRID].view(3, PROBABILITY_BINS, POSITION_BINS)
        return HistogramArrays(
            by_probability=_bins(grid.sum(2), edges=[*(2.0**-bin for bin in range(PROBABILITY_BINS)), 0.0]),
            by_position=_bins(grid.sum(1), edges=[*(2.0**bin for bin in range(POSITION_BINS)), math.inf]),
            joint_edges=[bin / JOINT_BINS for bin in range(JOINT_BINS + 1)],
            joint=host[3 * GRID :].view(JOINT_BINS, JOINT_BINS).tolist(),
        )


@torch.no_grad()
def mismatch_histograms(tokens: Tokens) -> MismatchHistograms:
    """Histograms of one micro-batch over its valid response tokens, on its device.

    trainer_logprobs are log pi_old. The position of a token counts the response tokens of its sequence, valid or not.
    """
    mask, valid, delta = tokens.response_mask, tokens.valid, tokens.delta.double()
    seen = mask.cumsum(0)
    before = torch.cat([seen.new_zeros(1), seen])[tokens.cu_seqlens[:-1].long()]
    position = seen - tokens.expand(before)
    octaves = 2 ** torch.arange(1, POSITION_BINS, device=mask.device)
    by_position = torch.bucketize(position, octaves, right=True)
    by_probability = (-tokens.rollout / math.log(2)).clamp(0, PROBABILITY_BINS - 1).long()
    values = torch.stack([torch.ones_like(delta), delta.abs(), k3(delta)])
    values = torch.where(valid, values, 0.0)
    grid = values.new_zeros(3, GRID).index_add(1, by_probability * POSITION_BINS + by_position, values)
    old_bin, rollout_bin = (
        (logprobs.exp() * JOINT_BINS).clamp(0, JOINT_BINS - 1).long() for logprobs in (tokens.train, tokens.rollout)
    )
    joint = values.new_zeros(JOINT_BINS**2).index_add(0, old_bin * JOINT_BINS + rollout_bin, values[0])
    return MismatchHistograms(sums=torch.cat([grid.view(-1), joint]))


def _bins(sums: Tensor, *, edges: list[float]) -> Bins:
    counts, abs_logdiff, k3_sums = sums.tolist()
    means = [
        [total / count if count else None for total, count in zip(totals, counts, strict=True)]
        for totals in (abs_logdiff, k3_sums)
    ]
    return Bins(edges=edges, counts=counts, abs_logdiff=means[0], k3=means[1])
