"""Two rows of log-probs of one response that slipped against each other: engine and trainer have other token ids.

Where a response was decoded to text and encoded again, one token may have become two. From there on the engine's
log-probs stand beside other tokens. Needs no model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.diagnose.case import misfit

GAP = 0.75
"""Misfit that one token left out costs: less than a strange token, more than a usual difference."""
MAX_SLIP = 8
"""Tokens by which the rows may slip."""


def aligned(engine: Tensor, trainer: Tensor, lengths: Sequence[int], mask: Tensor) -> tuple[Tensor, int]:
    """The engine's log-probs [R], moved to the trainer's tokens, NaN where none fits; and the number of slips.

    Args:
        engine, trainer: [R] float64, nats.
        lengths: tokens of each response.
        mask: [R] bool, tokens that count: others stay where they are, and nothing slips onto them.
    """
    parts, slips = [], 0
    rows = zip(engine.split(list(lengths)), trainer.split(list(lengths)), mask.split(list(lengths)), strict=True)
    for one, other, counts in rows:
        places = counts.nonzero().flatten()
        pairs = _pairs(one[places], other[places])
        moved = one.clone()
        moved[places] = math.nan
        for i, j in pairs:
            moved[places[j]] = one[places[i]]
        offsets = [0, *(i - j for i, j in pairs)]
        slips += sum(before != after for before, after in itertools.pairwise(offsets))
        parts.append(moved)
    return torch.cat(parts), slips


def _pairs(engine: Tensor, trainer: Tensor) -> list[tuple[int, int]]:
    """Pairs of places (engine, trainer) that belong together, by dynamic programming over all slips up to MAX_SLIP.

    A token that is left out costs GAP, but for those at the end, which a slip pushes out.
    """
    count = len(engine)
    width = min(MAX_SLIP, count)
    slips = range(-width, width + 1)
    costs = {slip: _costs(engine, trainer, slip) for slip in slips}
    best = {(0, 0): 0.0}
    came: dict[tuple[int, int], tuple[int, int]] = {}

    def reach(here: tuple[int, int], there: tuple[int, int], cost: float) -> None:
        if abs(there[1] - there[0]) <= width and cost < best.get(there, math.inf):
            best[there], came[there] = cost, here

    for i in range(count + 1):
        for j in range(max(0, i - width), min(count, i + width) + 1):
            here = best.get((i, j), math.inf)
            if i < count and j < count:
                reach((i, j), (i + 1, j + 1), here + costs[j - i][i])
            if i < count:
                reach((i, j), (i + 1, j), here + GAP)
            if j < count:
                reach((i, j), (i, j + 1), here + GAP)
    ends = [(i, j) for i, j in best if count in (i, j)]
    place = min(ends, key=lambda each: best[each])
    pairs = []
    while place in came:
        before = came[place]
        if place[0] > before[0] and place[1] > before[1]:
            pairs.append(before)
        place = before
    return pairs[::-1]


def _costs(engine: Tensor, trainer: Tensor, slip: int) -> list[float]:
    """Misfit of engine[i] and trainer[i + slip] by i; infinite outside."""
    found = torch.full((len(engine),), math.inf, dtype=torch.float64)
    first, last = max(0, -slip), min(len(engine), len(trainer) - slip)
    found[first:last] = misfit(engine[first:last] - trainer[first + slip : last + slip]).nan_to_num(math.inf)
    costs: list[float] = found.tolist()
    return costs
