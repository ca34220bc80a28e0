"""The supports of tokens: what truncated sampling kept beside each token (`algorithms/truncation.py`). No torch.

T: tokens, K: kept tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """The supports of T consecutive tokens, end to end."""

    sizes: NDArray[np.int32]
    """[T] number of kept tokens; 0 where nothing was sampled, or from the whole vocabulary."""
    token_ids: NDArray[np.int32]
    """[K] ids of the kept tokens, K = sum of sizes."""

    def __post_init__(self) -> None:
        """Raise ValueError unless the sizes are those of the token ids."""
        if (self.sizes < 0).any() or int(self.sizes.sum(dtype=np.int64)) != len(self.token_ids):
            raise ValueError(f"supports: sizes must be >= 0 and add up to the {len(self.token_ids)} kept tokens")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Supports):
            return NotImplemented
        return np.array_equal(self.sizes, other.sizes) and np.array_equal(self.token_ids, other.token_ids)

    def __len__(self) -> int:
        return len(self.sizes)

    def contain(self, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
        """[T] True where the token [T] is in its own support."""
        owner = np.repeat(np.arange(len(self.sizes)), self.sizes)
        found = self.token_ids == np.asarray(token_ids, dtype=np.int64)[owner]
        inside: NDArray[np.bool_] = np.bincount(owner[found], minlength=len(self.sizes)) > 0
        return inside

    def problem(self, token_ids: Sequence[int] | NDArray[np.int64], sampled: NDArray[np.bool_]) -> str:
        """Reason why these are not the supports of the tokens [T], `sampled` [T] of which were drawn; else ""."""
        if len(self) != len(token_ids):
            return f"{len(self)} supports of {len(token_ids)} tokens"
        if (self.sizes[~sampled] > 0).any():
            return "a token that was not sampled has a support"
        return "" if self.contain(token_ids)[sampled].all() else "a token is not in its own support"


def no_supports(num_tokens: int) -> Supports:
    """The supports of tokens that were not sampled, or from the whole vocabulary."""
    return Supports(np.zeros(num_tokens, np.int32), np.zeros(0, np.int32))


def supports_of(rows: Sequence[Sequence[int] | NDArray[np.int32]]) -> Supports:
    """The supports of T tokens from the ids of the kept tokens of each."""
    sizes = np.array([len(row) for row in rows], dtype=np.int32)
    parts = [np.asarray(row, dtype=np.int32) for row in rows]
    return Supports(sizes, np.concatenate(parts) if parts else np.zeros(0, np.int32))


def joined(parts: Sequence[Supports]) -> Supports:
    """The supports of several runs of tokens, one after the other."""
    parts = parts or [no_supports(0)]
    return Supports(np.concatenate([part.sizes for part in parts]), np.concatenate([part.token_ids for part in parts]))
