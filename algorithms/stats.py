"""The base of all step statistics: sums and maxima that add up over micro-batches and over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stats:
    """Sums and maxima that add up over micro-batches and ranks: one all-reduce for each of the two tensors."""

    sums: Tensor
    """[K] float64, reduced over ranks with SUM."""
    maxes: Tensor
    """[M] float64, reduced over ranks with MAX; -inf where there was no token."""

    def merge(self, other: Self) -> Self:
        """The statistics of both, on the device."""
        return replace(self, sums=self.sums + other.sums, maxes=torch.maximum(self.maxes, other.maxes))


class Mergeable(Protocol):
    """Statistics that add up."""

    def merge(self, other: Self) -> Self:
        """The statistics of both."""
        ...


MergeableT = TypeVar("MergeableT", bound=Mergeable)


def merged(parts: Sequence[MergeableT]) -> MergeableT:
    """The statistics of all `parts`, merged in their order. Raises ValueError without a part."""
    if not parts:
        raise ValueError("statistics need at least one micro-batch, got none")
    return reduce(lambda one, other: one.merge(other), parts)


def mean_or_none(total: float, count: float) -> float | None:
    """total / count, or None where count is 0."""
    return total / count if count else None


def max_or_none(maximum: float, count: float) -> float | None:
    """The maximum, or None where no token was seen."""
    return maximum if count else None
