"""Streaming histograms for plots: where in probability and position the two engines differ.

Constant memory, whatever the number of tokens: 20 x 20 bins of (probability, position) with three sums each, and
50 x 50 counts of (pi_old, mu). Statistics of micro-batches and ranks add up; nothing is read on the host before
`arrays`. T: packed tokens, N: sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from algorithms.chunks import chunk_tokens
from algorithms.correction import valid_tokens
from algorithms.kl import k3
from algorithms.masked import require_packed, segment_expand

PROBABILITY_BINS: Final = 20
"""Octaves of mu: bin b holds 2^-(b+1) < mu <= 2^-b, the last one all that is smaller."""
POSITION_BINS: Final = 20
"""Octaves of the position: bin b holds 2^b <= position < 2^(b+1), counted from 1; the last one all that is larger."""
JOINT_BINS: Final = 50
"""Bins of equal width of pi_old, and as many of mu."""
GRID: Final = PROBABILITY_BINS * POSITION_BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class Bins:
    """One axis of bins for a plot, on the host."""

    edges: list[float]
    """One more than bins, in the order of the bins."""
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
    """Edges fall from 1 to 0."""
    by_position: Bins
    """Edges in response tokens, from 1; the last is infinite."""
    joint_edges: list[float]
    """Edges of both probabilities."""
    joint: list[list[float]]
    """Tokens by [bin of pi_old][bin of mu]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchHistograms:
    """The histograms of some tokens, on their device."""

    sums: Tensor
    """[3 GRID + JOINT_BINS^2] float64, reduced over ranks with SUM: tokens, |Delta| and k3 by (probability,
    position), then tokens by (pi_old, mu)."""

    def merge(self, other: MismatchHistograms) -> MismatchHistograms:
        """The histograms of both, on the device."""
        return MismatchHistograms(sums=self.sums + other.sums)

    def arrays(self) -> HistogramArrays:
        """For plotting. Reads the device, once."""
        host = self.sums.cpu()
        grid = host[: 3 * GRID].view(3, PROBABILITY_BINS, POSITION_BINS)
        octaves = [2.0**-bin for bin in range(PROBABILITY_BINS)]
        positions = [2.0**bin for bin in range(POSITION_BINS)]
        return HistogramArrays(
            by_probability=_bins(grid.sum(2), edges=[*octaves, 0.0]),
            by_position=_bins(grid.sum(1), edges=[*positions, math.inf]),
            joint_edges=[bin / JOINT_BINS for bin in range(JOINT_BINS + 1)],
            joint=host[3 * GRID :].view(JOINT_BINS, JOINT_BINS).tolist(),
        )


def mismatch_histograms(
    *, old_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, cu_seqlens: Tensor
) -> MismatchHistograms:
    """Histograms of one micro-batch over its valid response tokens, on its device.

    Args:
        old_logprobs: [T] float32, log pi_old.
        rollout_logprobs: [T] float32, log mu.
        response_mask: [T] bool. The position of a token counts the response tokens of its sequence, invalid ones too.
        cu_seqlens: [N+1] int32, first token of each sequence.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    require_packed(response_mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    with torch.no_grad():
        num_tokens, device = response_mask.shape[0], response_mask.device
        # One slot more takes tokens that are not valid.
        grid = torch.zeros(3, GRID + 1, dtype=torch.float64, device=device)
        joint = torch.zeros(JOINT_BINS**2 + 1, dtype=torch.float64, device=device)
        seen = response_mask.cumsum(0, dtype=torch.int32)
        before = torch.cat([seen.new_zeros(1), seen])[cu_seqlens[:-1].long()]
        positions = seen - segment_expand(before, cu_seqlens, num_tokens=num_tokens)
        size = chunk_tokens(device)
        for start in range(0, num_tokens, size):
            part = slice(start, start + size)
            _add(grid, joint, old_logprobs[part], rollout_logprobs[part], response_mask[part], positions[part])
        return MismatchHistograms(sums=torch.cat([grid[:, :GRID].reshape(-1), joint[: JOINT_BINS**2]]))


def _add(grid: Tensor, joint: Tensor, old: Tensor, rollout: Tensor, response: Tensor, positions: Tensor) -> None:
    valid = valid_tokens(old_logprobs=old, rollout_logprobs=rollout, response_mask=response)
    old, rollout = torch.where(valid, old, 0.0), torch.where(valid, rollout, 0.0)
    delta = (old - rollout).double()
    by_probability = (-rollout * math.log2(math.e)).clamp_(0, PROBABILITY_BINS - 1).long()
    # The exponent of a float32 is the octave.
    octave = (positions.clamp(min=1).float().view(torch.int32) >> 23) - 127
    by_position = octave.clamp_(max=POSITION_BINS - 1).long()
    bins = (by_probability * POSITION_BINS + by_position).masked_fill_(~valid, GRID)
    values = torch.stack([torch.ones_like(delta), delta.abs(), k3(delta)])
    grid.scatter_add_(1, bins.expand_as(values), values)
    old_bin, rollout_bin = ((x.exp() * JOINT_BINS).clamp_(0, JOINT_BINS - 1).long() for x in (old, rollout))
    pair = (old_bin * JOINT_BINS + rollout_bin).masked_fill_(~valid, JOINT_BINS**2)
    joint.scatter_add_(0, pair, values[0])


def _bins(sums: Tensor, *, edges: list[float]) -> Bins:
    counts, abs_logdiff, k3_sums = sums.tolist()
    means = [
        [total / count if count else None for total, count in zip(totals, counts, strict=True)]
        for totals in (abs_logdiff, k3_sums)
    ]
    return Bins(edges=edges, counts=counts, abs_logdiff=means[0], k3=means[1])
