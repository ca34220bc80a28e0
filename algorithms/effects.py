"""What a correction does to some responses: columns per token now, sums by response when all pieces are done.

Small steps between the tokens of two pieces find their code driven out of the cache. So `algorithms.correction` leaves
the sums to the end. N: sequences of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.segments import Column, Segments


class Effects(NamedTuple):
    """`algorithms.correction.EFFECTS` of a piece, and the response tokens that each criterion rejects."""

    segments: Segments
    values: dict[str, Column]
    flags: dict[str, Column]
    ratio: Tensor | None
    """[N] float64, the raw weight where it is the ratio."""
    tokens: Tensor | None
    """[N] float64, response tokens; None if no criterion is over responses."""
    responses: dict[str, Tensor]
    """Criterion over responses -> those that it keeps, [N] bool."""

    def by_response(self, names: Sequence[str]) -> Tensor:
        """Sums by response, one row per name, 0 where there is no such effect -> [len(names), N] float64."""
        rows: dict[str, Tensor] = {}
        if self.ratio is not None:
            rows["raw_weight"] = self.ratio
        if self.tokens is not None:
            rows |= {name: self.tokens * ~keeps for name, keeps in self.responses.items()}
        if self.values or self.flags:
            totals = self.segments.totals(list(self.values.values()), list(self.flags.values()))
            rows |= zip([*self.values, *self.flags], totals, strict=True)
        none = self.segments.zeros()
        return torch.stack([rows.get(name, none) for name in names])
