"""Plan of forwards: lengths of sequences -> bins of indices per rank. Does not import torch.

A bin is one micro-batch. Attention does not pad (`trainer/scoring/attention.py`), so a sequence of s tokens costs
per_token * s + per_cell * s^2 in any bin. What is planned here are sequences, or several with one prompt together
(`trainer/batch/prompt_groups.py`). The plan is made in three steps:

    1. number   best-fit-decreasing finds how many bins of at most `cap` tokens are needed; every rank runs equally
                many, or collectives would not match, so the number is rounded up to a multiple of the ranks
    2. fill     the longest sequence left goes into the cheapest bin that has room for it, so that bins cost alike
    3. deal     bins of similar cost run side by side on the ranks, and the totals of the ranks are even

As ranks run bin after bin in step, the most expensive bin of a round sets its pace: step 2 keeps rounds even, step 3
ranks. Equal inputs give equal plans; ties are broken by index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

Bin = list[int]
"""Indices of sequences, longest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCost:
    """Estimated cost of a sequence, in any unit."""

    per_token: float
    """Cost of one token in the matrix products."""
    per_cell: float
    """Cost of one (query, key) cell in attention."""

    @classmethod
    def of_model(cls, *, num_parameters: int, num_layers: int, attention_size: int) -> SequenceCost:
        """FLOPs of a forward; a backward pass multiplies both terms alike.

        A token meets every parameter once (2 FLOPs). A cell takes 2 * attention_size FLOPs in the scores and as many in
        the values, of which the causal mask saves half. `attention_size` = heads * head size. A tied embedding counts
        once, as the head; a separate embedding is looked up and must not be counted.
        Source: Kaplan et al., "Scaling Laws for Neural Language Models", Table 1, https://arxiv.org/abs/2001.08361
        """
        return cls(per_token=2.0 * num_parameters, per_cell=2.0 * num_layers * attention_size)

    def of(self, length: int, *, prefix: int = 0) -> float:
        """Cost of `length` tokens that attend to themselves and to `prefix` tokens before them.

        Both together cost as much as a sequence of prefix + length tokens, if the prefix itself is counted as well.
        """
        return self.per_token * length + self.per_cell * (length**2 + 2 * prefix * length)


DEFAULT_COST = SequenceCost.of_model(num_parameters=494_032_768, num_layers=24, attention_size=896)
"""Qwen2.5-0.5B: one token costs as much as 22,974 cells. Larger models weigh tokens more (7B: 70,000)."""


def plan(lengths: Sequence[int], costs: Sequence[float], *, cap: int, num_ranks: int) -> list[list[Bin]]:
    """[num_ranks][bins] indices into `lengths`: every index once, equally many bins per rank, most expensive bin first.

    If there are fewer sequences than bins, some bins are empty.

    Args:
        lengths: tokens of each sequence.
        costs: cost of each sequence, in any unit; they are evened out.
        cap: maximum of tokens of one bin.
        num_ranks: data-parallel ranks.

    Raises:
        ValueError: one sequence alone exceeds the cap; names its length.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    tight = best_fit_decreasing(lengths, cap)
    num_bins = -(-len(tight) // num_ranks) * num_ranks
    bins = _fill_evenly(lengths, costs, cap, num_bins) or _split(tight, costs, num_bins)
    return _deal(bins, costs, num_ranks)


def best_fit_decreasing(lengths: Sequence[int], cap: int) -> list[Bin]:
    """Bins of at most `cap` tokens: each sequence, longest first, goes into the bin with the least room left.

    Raises ValueError naming the length if one sequence exceeds the cap.
    """
    bins: list[Bin] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in _longest_first(lengths):
        length = lengths[index]
        if length > cap:
            raise ValueError(
                f"a sequence of {length} tokens exceeds batch.max_tokens_per_microbatch={cap}; "
                f"raise it to at least {length} or lower sampling.max_new_tokens"
            )
        slot = bisect_left(rooms, (length, -1))
        if slot == len(rooms):
            room, chosen = cap, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(slot)
        bins[chosen].append(index)
        insort(rooms, (room - length, chosen))
    return bins


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices by descending length; ties by index."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def _fill_evenly(lengths: Sequence[int], costs: Sequence[float], cap: int, num_bins: int) -> list[Bin] | None:
    """`num_bins` bins of at most `cap` tokens and similar cost; None if a sequence finds no room.

    Each sequence, longest first, goes into the cheapest bin that has room for it.
    """
    bins: list[Bin] = [[] for _ in range(num_bins)]
    spent, rooms = [0.0] * num_bins, [cap] * num_bins
    fitting: list[tuple[float, int]] = []  # heap of (cost so far, bin): there is room for this and any later sequence
    fuller = [(-cap, number) for number in range(num_bins)]  # heap of (-room, bin): all others
    for index in _longest_first(lengths):
        while fuller and -fuller[0][0] >= lengths[index]:
            _, number = heapq.heappop(fuller)
            heapq.heappush(fitting, (spent[number], number))
        if not fitting:
            return None
        _, chosen = heapq.heappop(fitting)
        bins[chosen].append(index)
        spent[chosen] += costs[index]
        rooms[chosen] -= lengths[index]
        heapq.heappush(fuller, (-rooms[chosen], chosen))
    return bins


def _split(bins: list[Bin], costs: Sequence[float], num_bins: int) -> list[Bin]:
    """As many as `num_bins` bins: every other sequence of the most expensive one goes into a bin of its own.

    Only for bins that `_fill_evenly` could not fill, so that there are more than `num_bins` sequences.
    """
    while len(bins) < num_bins:
        divided = max((b for b in bins if len(b) > 1), key=lambda b: sum(costs[i] for i in b))
        bins = [b for b in bins if b is not divided] + [divided[::2], divided[1::2]]
    return bins


def _deal(bins: Sequence[Bin], costs: Sequence[float], num_ranks: int) -> list[list[Bin]]:
    """Deal rounds of `num_ranks` bins of similar cost, one per rank, so that the totals of the ranks are even.

    The largest differencing method assigns the bins of a round to ranks: the two partial deals with the widest spread
    are joined, the most expensive share of one with the cheapest share of the other.
    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", UCB/CSD-82-113, 1982.
    """
    ordered = sorted(((sum(costs[i] for i in b), b) for b in bins), key=lambda each: (-each[0], each[1]))
    # A share is (cost so far, its bins by their place in `ordered`); the shares of a deal are sorted, most expensive
    # first.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for first in range(0, len(ordered), num_ranks):
        shares = [(ordered[place][0], [place]) for place in range(first, first + num_ranks)]
        heapq.heappush(heap, (shares[-1][0] - shares[0][0], first, shares))
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [[ordered[place][1] for place in sorted(places)] for _, places in heap[0][2]]
