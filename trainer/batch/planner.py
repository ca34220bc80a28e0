"""Plan of forwards: lengths of sequences -> bins of indices per rank. Does not import torch.

A bin is one micro-batch. On a GPU `trainer/policy/attention.py` pads the n sequences of a bin to the longest one, L, so
that a bin costs per_token * tokens + per_cell * n * L^2: a short sequence next to a long one costs as much as a second
long one. On a CPU there is no padding, and a sequence of s tokens costs per_token * s + per_cell * s^2 in any bin: the
plan only chooses the number of bins and evens out their cost.

Three rules hold always: no bin holds more tokens than the cap; attention never pads a bin to more than MAX_PADDING
times the cap; every rank gets equally many bins. Besides these rules, few bins and little padding conflict, because a
bin is filled up with sequences that are shorter than its longest. Best-fit-decreasing sets the number of bins;
FREE_BINS more bins, and the bins that fill the last round of the ranks, may be used to save padding. Further bins are
added only if each saves as much as a full bin costs, so that a step takes no longer even if every forward took the same
time, however few tokens it has. Several plans are made and the cheapest is taken. As ranks run bin after bin in step,
the most expensive bin sets the pace.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

MAX_PADDING = 4
"""Maximum of a bin's padded tokens (sequences x longest) over the cap: bounds the memory of attention."""
FREE_BINS = 0.02
"""Share of bins above best-fit-decreasing that may be added without saving their own cost."""
GAPS = (0.03, 30.0)
"""Search range of the highest waste of cells per token, per token of cap; see `_fill`."""
MANY_ROUNDS = 16
"""Bins per rank from which the pace needs no search: every round then finds bins of equal cost."""
MAX_TRIES = 6
"""Number of halvings of a range, in log scale."""
MAX_WORK = 16_384
"""Maximum of sequences x tries of a search: with thousands of sequences fewer tries, in tens of milliseconds."""
SLACK = 1.02
"""Factor above the lowest possible bin cost, so that the search for the gap has a choice left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BinCost:
    """Estimated cost of a bin, in any unit: per_token * tokens + per_cell * cells."""

    per_token: float
    """Cost of one token in the matrix products."""
    per_cell: float
    """Cost of one (query, key) cell in attention."""
    pads: bool = True
    """True if attention pads the sequences of a bin to the longest one, as on a GPU; False on a CPU."""

    @classmethod
    def of_model(cls, *, num_parameters: int, num_layers: int, attention_size: int, pads: bool) -> BinCost:
        """FLOPs of a forward; a backward pass multiplies both terms alike.

        A token meets every parameter once (2 FLOPs). A cell takes 2 * attention_size FLOPs in the scores and as many in
        the values, of which the causal mask saves half. `attention_size` = heads * head size. A tied embedding counts
        once, as the head; a separate embedding is looked up and must not be counted.
        Source: Kaplan et al., "Scaling Laws for Neural Language Models", Table 1, https://arxiv.org/abs/2001.08361
        """
        return cls(per_token=2.0 * num_parameters, per_cell=2.0 * num_layers * attention_size, pads=pads)

    def cells(self, indices: Sequence[int], lengths: Sequence[int]) -> int:
        """(query, key) cells that attention computes for one bin: sequences x longest^2, or the sum of length^2."""
        if self.pads:
            return len(indices) * max((lengths[i] for i in indices), default=0) ** 2
        return sum(lengths[i] ** 2 for i in indices)

    def of(self, indices: Sequence[int], lengths: Sequence[int]) -> float:
        """Cost of the bin with these sequences; 0 for an empty bin."""
        return self.per_token * sum(lengths[i] for i in indices) + self.per_cell * self.cells(indices, lengths)

    def longest_within(self, budget: float) -> float:
        """Tokens of the longest sequence whose cost by itself is at most `budget`; negative if no sequence is."""
        if budget < 0:
            return -1.0
        return 2 * budget / (self.per_token + math.sqrt(self.per_token**2 + 4 * self.per_cell * budget))


DEFAULT_COST = BinCost.of_model(num_parameters=494_032_768, num_layers=24, attention_size=896, pads=True)
"""Qwen2.5-0.5B: one token costs as much as 22,974 cells. Larger models weigh tokens more (7B: 70,000)."""


class Bin(NamedTuple):
    """A bin under construction."""

    cost: float
    indices: list[int]
    """Indices with the longest sequence first; ties by index."""


def attention_pad_frac(bins: Sequence[Sequence[int]], lengths: Sequence[int], cost: BinCost) -> float:
    """Share of the cells of all bins that are padding: 1 - sum of length^2 / cells; 0 without cells."""
    cells = sum(cost.cells(indices, lengths) for indices in bins)
    return 1 - sum(lengths[i] ** 2 for indices in bins for i in indices) / cells if cells else 0.0


def padding_efficiency(bins: Sequence[Sequence[int]], lengths: Sequence[int], cost: BinCost) -> float:
    """Cost of all sequences by themselves / cost of the bins; 1 where attention does not pad."""
    indices = [i for bin_ in bins for i in bin_]
    matrices = cost.per_token * sum(lengths[i] for i in indices)
    alone = matrices + cost.per_cell * sum(lengths[i] ** 2 for i in indices)
    return alone / (matrices + cost.per_cell * sum(cost.cells(bin_, lengths) for bin_ in bins))


def plan(lengths: Sequence[int], *, cap: int, num_ranks: int, cost: BinCost = DEFAULT_COST) -> list[list[list[int]]]:
    """[num_ranks][bins] indices into `lengths`: every index once, equally many bins per rank, most expensive bin first.

    If there are fewer sequences than bins, some bins are empty. Equal inputs give equal plans.

    Args:
        lengths: tokens of each sequence.
        cap: maximum of tokens of one bin.
        num_ranks: data-parallel ranks.
        cost: estimate that is minimised and balanced.

    Raises:
        ValueError: one sequence alone exceeds the cap; names its length.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    tight = [Bin(cost.of(indices, lengths), indices) for indices in best_fit_decreasing(lengths, cap, pads=cost.pads)]
    needed = -(-len(tight) // num_ranks) * num_ranks
    free = max(needed, int(len(tight) * (1 + FREE_BINS)) // num_ranks * num_ranks)
    plans = [tight, *_search(lengths, tight, num_bins=free, cap=cap, num_ranks=num_ranks, cost=cost)]
    filled = [_fill_round(bins, lengths, num_ranks=num_ranks, cost=cost) for bins in plans]
    price = cost.per_token * cap

    def expense(bins: Sequence[Bin]) -> tuple[float, float]:
        """Sort key of a plan: its pace plus the price of additional bins, then its total cost."""
        return _pace(bins, num_ranks) + price * max(0, len(bins) - free), sum(b.cost for b in bins)

    return _deal(min(filled, key=expense), num_ranks)


def best_fit_decreasing(lengths: Sequence[int], cap: int, *, pads: bool) -> list[list[int]]:
    """Bins of indices into `lengths`. The sum of a bin is at most `cap`, its padded size, if `pads`, MAX_PADDING * cap.

    Each item, longest first, goes into the bin with the least room left. Ties are broken by index, so equal inputs give
    equal bins. Raises ValueError naming the length if one item exceeds the cap.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
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
        if len(bins[chosen]) < _most_sequences(lengths[bins[chosen][0]], cap, pads=pads):
            insort(rooms, (room - length, chosen))
    return bins


def _most_sequences(longest: int, cap: int, *, pads: bool) -> int:
    """Maximum of sequences in a bin with this longest sequence, so that padding stays within its bound."""
    return MAX_PADDING * cap // max(longest, 1) if pads else cap


# -------------------------------------------------------------------- candidates


class _Items(NamedTuple):
    """Sequences by ascending length; equal lengths by descending index, so that the first index is taken first."""

    lengths: list[int]
    order: list[int]
    cap: int
    cost: BinCost


def _search(
    lengths: Sequence[int], tight: Sequence[Bin], *, num_bins: int, cap: int, num_ranks: int, cost: BinCost
) -> list[list[Bin]]:
    """Candidate plans of at most `num_bins` bins: with little padding, with an even cost of bins, and with both; and
    one with as many bins as pay for themselves.

    With one rank, or with many bins per rank, there is no pace to keep and only padding counts. Without padding only an
    even cost counts: the other plans could not be cheaper.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    items = _Items([lengths[i] for i in order], order, cap, cost)
    is_paced = num_ranks > 1 and num_bins < MANY_ROUNDS * num_ranks
    tries = max(3, min(MAX_TRIES, MAX_WORK // (2 if is_paced else 1) // len(lengths)))
    mean, dearest = sum(b.cost for b in tight) / num_bins, max(b.cost for b in tight)
    even_out = partial(
        _tighten, lambda limit: _fill(items, num_bins, max_cost=limit), high=max(mean, dearest), tries=tries
    )
    if not cost.pads:
        return even_out(low=mean)[1] if is_paced else []
    low, high = (bound * cap for bound in GAPS)
    _, plans = _tighten(lambda gap: _fill(items, num_bins, gap=gap), low=low, high=high, tries=tries)
    if is_paced:
        tightest, even = even_out(low=mean / 2)
        _, both = _tighten(
            lambda gap: _fill(items, num_bins, gap=gap, max_cost=SLACK * tightest), low=low, high=high, tries=tries
        )
        plans += even + both
    # The price of room is a full bin over its tokens: at this gap one more bin saves its own cost.
    priced = _fill(items, len(lengths), gap=cost.per_token / cost.per_cell)
    return plans if priced is None else [*plans, priced]


def _tighten(
    attempt: Callable[[float], list[Bin] | None], *, low: float, high: float, tries: int
) -> tuple[float, list[list[Bin]]]:
    """Search the lowest value between `low` and `high` whose attempt succeeds: (value, all successes)."""
    found: list[list[Bin]] = []
    for _ in range(tries):
        middle = math.sqrt(low * high)
        bins = attempt(middle)
        if bins is None:
            low = middle
        else:
            high = middle
            found.append(bins)
    return high, found


def _fill(items: _Items, num_bins: int, *, gap: float = math.inf, max_cost: float = math.inf) -> list[Bin] | None:
    """Fill bin after bin from the longest sequence down; None if `num_bins` bins do not hold all sequences.

    A bin takes the longest sequence that fits, again and again. A sequence of s tokens next to a longest one of L
    wastes L^2 - s^2 cells and uses s tokens of room: it is added while the waste per token is at most `gap`. Then the
    bin is closed, even if shorter sequences would fit. `max_cost` bounds the cost of a bin of several sequences.
    """
    lengths, order, cap, cost = items.lengths[:], items.order[:], items.cap, items.cost
    per_token, per_cell, pads = cost.per_token, cost.per_cell, cost.pads
    is_bounded = max_cost < math.inf
    bins: list[Bin] = []
    while lengths:
        if len(bins) == num_bins:
            return None
        longest = lengths.pop()
        indices = [order.pop()]
        tokens, square = longest, longest * longest
        cells = square
        # The smallest s with (L^2 - s^2) / s <= gap.
        shortest = 0.0 if gap == math.inf else (math.sqrt(gap * gap + 4 * square) - gap) / 2
        for count in range(2, _most_sequences(longest, cap, pads=pads) + 1):
            room: float = cap - tokens
            if is_bounded:
                # Cost of another sequence: if padded, it takes as many cells as the longest one.
                if pads:
                    bound = (max_cost - per_cell * count * square) / per_token - tokens
                else:
                    bound = cost.longest_within(max_cost - per_token * tokens - per_cell * cells)
                if bound < room:
                    room = bound
            slot = bisect_right(lengths, room) - 1
            if slot < 0 or lengths[slot] < shortest:
                break
            length = lengths.pop(slot)
            tokens += length
            cells += square if pads else length * length
            indices.append(order.pop(slot))
        bins.append(Bin(per_token * tokens + per_cell * cells, indices))
    return bins


# -------------------------------------------------------------------- ranks


def _fill_round(bins: Sequence[Bin], lengths: Sequence[int], *, num_ranks: int, cost: BinCost) -> list[Bin]:
    """Extend `bins` so that their number is a multiple of `num_ranks`.

    The most expensive bins are split; empty bins fill up once only single sequences are left. Every rank must run the
    same number of forwards, or collectives would not match.
    """
    num_bins = -(-len(bins) // num_ranks) * num_ranks
    if len(bins) == num_bins:
        return list(bins)
    heap = [(-b.cost if len(b.indices) > 1 else 0.0, b.indices, b) for b in bins]
    heapq.heapify(heap)
    while len(heap) < num_bins and heap[0][0] < 0:
        whole = heapq.heappop(heap)[2]
        for part in _halves(whole, lengths, cost):
            heapq.heappush(heap, (-part.cost if len(part.indices) > 1 else 0.0, part.indices, part))
    return [b for _, _, b in heap] + [Bin(0.0, [])] * (num_bins - len(heap))


def _halves(whole: Bin, lengths: Sequence[int], cost: BinCost) -> tuple[Bin, Bin]:
    """The longer and the shorter sequences of a bin, cut so that the more expensive part is cheapest."""
    indices = whole.indices
    total, tokens = sum(lengths[i] for i in indices), 0
    squares, square = sum(lengths[i] ** 2 for i in indices), 0
    cuts: list[tuple[float, int, float, float]] = []
    for cut in range(1, len(indices)):
        tokens += lengths[indices[cut - 1]]
        square += lengths[indices[cut - 1]] ** 2
        cells = (square, squares - square)
        if cost.pads:
            cells = (cut * lengths[indices[0]] ** 2, (len(indices) - cut) * lengths[indices[cut]] ** 2)
        first = cost.per_token * tokens + cost.per_cell * cells[0]
        rest = cost.per_token * (total - tokens) + cost.per_cell * cells[1]
        cuts.append((max(first, rest), cut, first, rest))
    _, cut, first, rest = min(cuts)
    return Bin(first, indices[:cut]), Bin(rest, indices[cut:])


def _pace(bins: Sequence[Bin], num_ranks: int) -> float:
    """Cost over all ranks if they wait for each other after each bin; for one rank, the sum over its bins.

    FSDP gathers the weights for every forward, so the ranks run bin after bin in step.
    """
    return num_ranks * sum(sorted((b.cost for b in bins), reverse=True)[::num_ranks])


def _deal(bins: Sequence[Bin], num_ranks: int) -> list[list[list[int]]]:
    """Deal rounds of `num_ranks` bins of similar cost, one per rank, so that the totals of the ranks are even.

    The largest differencing method assigns the bins of a round to ranks: the two partial deals with the widest spread
    are joined, the most expensive share of one with the cheapest share of the other.
    Source: Karmarkar and Karp, "The Differencing Method of Set Partitioning", UCB/CSD-82-113, 1982.
    """
    ordered = sorted(bins, key=lambda b: (-b.cost, b.indices))
    # A share is (cost so far, its bins by their place in `ordered`); the shares of a deal are sorted, most expensive
    # first.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for first in range(0, len(ordered), num_ranks):
        shares = [(ordered[place].cost, [place]) for place in range(first, first + num_ranks)]
        heapq.heappush(heap, (shares[-1][0] - shares[0][0], first, shares))
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [[ordered[place].indices for place in sorted(places)] for _, places in heap[0][2]]
