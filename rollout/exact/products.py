"""x W^T + b in tiles of a fixed number of rows: the bits of a row depend neither on the other rows nor on its place.

A library chooses another order of additions for another number of rows: one row alone, as in decoding, and the same
row in a batch, as in training, differ in the last bits. Where every product has the same shape, the order is the same.
Only the forward is computed in this way; gradients are those of the fast products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

TILE_ROWS = 32
"""Rows of every product; the last tile is filled up with zeros. With 32 rows a tile costs little more than its part of
the whole product."""


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """rows [N, I], weight [O, I], bias [O] -> [N, O], also written to `out`; tile by tile on a CPU; no gradient."""
    if rows.is_cuda:  # the kernels of `rollout/exact/gpu.py` need no tiles; not yet run on a GPU
        whole = torch.mm(rows, weight.T) if bias is None else torch.addmm(bias, rows, weight.T)
        return whole if out is None else out.copy_(whole)
    found = rows.new_empty((len(rows), len(weight))) if out is None else out
    if not len(rows):  # as of an expert that no token chose
        return found
    for tile, place in zip(rows.split(TILE_ROWS), found.split(TILE_ROWS), strict=True):
        missing = TILE_ROWS - len(tile)
        full = functional.pad(tile, (0, 0, 0, missing)) if missing else tile.contiguous()
        place.copy_(_tile(full, weight, bias)[: len(tile)])
    return found


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like torch.nn.functional.linear: states [.., I], weight [O, I], bias [O] -> [.., O]; differentiable once."""
    out: Tensor = _Linear.apply(states.reshape(-1, states.shape[-1]), weight, bias)
    return out.view(*states.shape[:-1], out.shape[-1])


class Linear(nn.Linear):
    """nn.Linear that multiplies tile by tile."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _tile(tile: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[TILE_ROWS, I] -> [TILE_ROWS, O].

    float32 goes to oneDNN: MKL, which torch asks otherwise, gives other bits with another number of threads.
    """
    if tile.dtype == torch.float32:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(tile, weight, bias, "none", [], "")
        return out
    return functional.linear(tile, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        by_rows = grad @ weight if needs_rows else None
        by_weight = grad.T @ rows if needs_weight else None
        return by_rows, by_weight, grad.sum(0) if needs_bias else None
