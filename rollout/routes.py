"""The routes of tokens: the experts of a mixture that the engine chose when it read them. No torch.

What a token's route decides is the prediction of the next token. So the last token of a response has none: the engine
never read it.

N: consecutive tokens, L: layers of the model, K: experts of a layer for a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.unsignedinteger]
TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Bytes of the number of an expert -> type. One byte is enough for mixtures of at most 256."""


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts of N consecutive tokens, in the order in which the engine chose them.

    The parts stay as they came: those of a prompt are shared by the responses to it, and what lies in memory of another
    process stays there.
    """

    parts: tuple[Numbers, ...]
    """Each [n, L, K], numbers of experts; their n add up to N."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routes) and np.array_equal(self.whole(), other.whole())

    def whole(self) -> Numbers:
        """[N, L, K], in one piece."""
        return np.concatenate(self.parts) if self.parts else np.zeros((0, 0, 0), TYPES[1])

    def problem(self, num_experts: int) -> str:
        """Reason why these are no routes of a mixture with `num_experts` in a layer; else "".

        An engine that records no routes in one of its modes returns zeros, which name one expert K times.
        """
        for part in self.parts:
            ordered = np.sort(part, axis=-1)
            if part.size and ordered[..., -1].max() >= num_experts:
                return f"expert {ordered[..., -1].max()} of {num_experts}"
            if (ordered[..., 1:] == ordered[..., :-1]).any():
                return "one expert twice for a token"
        return ""


def joined(parts: Iterable[Routes | None]) -> Routes:
    """The routes of several runs of tokens, one after the other; None is a run of no tokens."""
    return Routes(tuple(array for each in parts if each is not None for array in each.parts))


def from_bytes(data: bytes, shape: tuple[int, ...]) -> Routes:
    """The routes of this `shape` [N, L, K] in little-endian bytes, of one, two or four for each expert.

    Raises ValueError if they are not so many.
    """
    count = math.prod(shape)
    if not count:
        return Routes(())
    if len(data) % count or (width := len(data) // count) not in TYPES:
        raise ValueError(f"{len(data)} bytes are no routes of shape {list(shape)}")
    return Routes((narrowed(np.frombuffer(data, TYPES[width]).reshape(shape)),))


def narrowed(experts: NDArray[np.integer]) -> Numbers:
    """The same numbers in the smallest type that holds them."""
    largest = int(experts.max(initial=0))
    kind: np.dtype[Any] = TYPES[1 if largest < 256 else 2 if largest < 65536 else 4]
    return experts.astype(kind, copy=False)
