"""How alike the modes' gradients are, as vectors: cosine and correlation of every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 2**18
"""Entries of each vector that are converted to float64 at a time."""
Matrix = list[list[float | None]]


def cosines(vectors: Sequence[Tensor]) -> Matrix:
    """Cosine of every pair of vectors [R]; None with a vector of length 0."""
    return _scaled(_products(vectors))


def correlations(vectors: Sequence[Tensor]) -> Matrix:
    """Pearson correlation of every pair of vectors [R]; None with a constant one."""
    count = vectors[0].numel() if vectors else 0
    if not count:
        return [[None] * len(vectors) for _ in vectors]
    means = torch.stack([vector.double().mean() for vector in vectors])
    return _scaled(_products(vectors, means=means))


def cosines_of_products(products: Tensor) -> Matrix:
    """Cosine of every pair from their inner products [M, M]."""
    return _scaled(products)


def _products(vectors: Sequence[Tensor], means: Tensor | None = None) -> Tensor:
    """Inner products [M, M] float64 of the vectors, less their means."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    count = vectors[0].numel() if vectors else 0
    for start in range(0, count, _COLUMNS):
        part = torch.stack([vector[start : start + _COLUMNS].double() for vector in vectors])
        if means is not None:
            part = part - means[:, None]
        total += part @ part.T
    return total


def _scaled(products: Tensor) -> Matrix:
    squares = products.diagonal().tolist()
    rows = products.tolist()
    return [
        [_ratio(rows[i][j], squares[i], squares[j], same=i == j) for j in range(len(squares))]
        for i in range(len(squares))
    ]


def _ratio(product: float, first: float, second: float, *, same: bool) -> float | None:
    length = math.sqrt(max(first, 0.0)) * math.sqrt(max(second, 0.0))
    if not length:
        return None
    return 1.0 if same else max(-1.0, min(1.0, product / length))
