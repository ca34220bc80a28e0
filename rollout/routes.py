"""The routes of tokens: the experts of a mixture that the engine chose when it read them. No torch.

What a token's route decides is the prediction of the next token. So the last token of a response has none: the engine
never read it.

N: consecutive tokens, L: layers of the model that have experts, K: experts of a layer for a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.unsignedinteger]
TYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Bytes of the number of an expert -> type. One byte is enough for mixtures of at most 256."""
Weights = NDArray[np.float16]
WEIGHT_TYPE = np.dtype("<f2")


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts of N consecutive tokens, in the order in which the engine chose them.

    The parts stay as they came: those of a prompt are shared by the responses to it, and what lies in memory of another
    process stays there.
    """

    parts: tuple[Numbers, ...]
    """Each [n, L, K], numbers of experts; their n add up to N."""
    weights: tuple[Weights, ...] = ()
    """Each [n, L, K], the factors of the outputs of these experts, part by part; empty if the engine returned none."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Routes) or bool(self.weights) is not bool(other.weights):
            return False
        return len(self) == len(other) and to_bytes(self) == to_bytes(other)

    def whole(self) -> Numbers:
        """[N, L, K], in one piece: a copy unless it is in one already."""
        if not self.parts:
            return np.zeros((0, 0, 0), TYPES[1])
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def merged(self) -> Routes:
        """The same in one part, for parts of a token each."""
        if len(self.parts) < 2:
            return self
        return Routes((self.whole(),), (np.concatenate(self.weights),) if self.weights else ())

    def first(self, count: int) -> Routes:
        """Those of the first `count` tokens; whole parts stay the same objects."""
        ends = list(accumulate(len(part) for part in self.parts))
        kept = [max(0, len(part) - max(0, end - count)) for part, end in zip(self.parts, ends, strict=True)]

        def cut(parts: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
            cuts = (part if len(part) == size else part[:size] for part, size in zip(parts, kept, strict=True))
            return tuple(part for part in cuts if len(part))

        return Routes(cut(self.parts), cut(self.weights) if self.weights else ())

    def of_layers(self, first: int) -> Routes:
        """Those of the layers from number `first` on."""
        return Routes(tuple(part[:, first:] for part in self.parts), tuple(part[:, first:] for part in self.weights))

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
        if not all(np.isfinite(part).all() for part in self.weights):
            return "a factor of an expert that is not finite"
        return ""


def joined(parts: Iterable[Routes | None]) -> Routes:
    """The routes of several runs of tokens, one after the other; None is a run of no tokens. Without weights unless all
    runs have them."""
    given = [each for each in parts if each is not None]
    experts = tuple(array for each in given for array in each.parts)
    weights = tuple(array for each in given for array in each.weights)
    return Routes(experts, weights if len(weights) == len(experts) else ())


def from_bytes(data: bytes, shape: tuple[int, ...], *, with_weights: bool = False) -> Routes:
    """The routes of this `shape` [N, L, K] in little-endian bytes, of one, two or four for each expert, and then of
    their factors in float16.

    Raises ValueError if they are not so many.
    """
    count = math.prod(shape)
    if not count:
        return Routes(())
    end = len(data) - with_weights * count * WEIGHT_TYPE.itemsize
    if end < 0 or end % count or (width := end // count) not in TYPES:
        raise ValueError(f"{len(data)} bytes are no routes of shape {list(shape)}")
    experts = narrowed(np.frombuffer(data[:end], TYPES[width]).reshape(shape))
    return Routes((experts,), (np.frombuffer(data[end:], WEIGHT_TYPE).reshape(shape),) if with_weights else ())


def to_bytes(routes: Routes) -> bytes:
    """What `from_bytes` reads."""
    weights = np.concatenate(routes.weights).tobytes() if routes.weights else b""
    return routes.whole().tobytes() + weights


def narrowed(experts: NDArray[np.integer]) -> Numbers:
    """The same numbers in the smallest type that holds them."""
    largest = int(experts.max(initial=0))
    kind: np.dtype[Any] = TYPES[1 if largest < 256 else 2 if largest < 65536 else 4]
    return experts.astype(kind, copy=False)
