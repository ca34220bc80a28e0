"""Causal attention whose rows have the same bits in prefill, in decoding and in training.

Keys are taken in blocks of KEY_BLOCK, counted from the first token of the sequence, and added up block by block in
that order. Queries are taken QUERY_ROWS at a time. So every product has one of two shapes, and what a row gets does not
depend on how many queries and keys there are beside it. Blocks that a row does not see add zeros, which change no bit.
Everything is float32 inside, whatever the type outside.

M: sequences, H: heads, K: key/value heads, L: queries of a sequence, C: columns (keys with room), D: size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

QUERY_ROWS = 8
"""Rows of a product of queries and keys; the last ones are filled up with zeros."""
KEY_BLOCK = 32
"""Keys of a product; columns come in multiples of it."""
HEAD_MULTIPLE = 16
"""Heads of other sizes are filled up with zeros: with odd sizes the bits depend on the number of threads."""
SCORE_ELEMENTS = 1 << 23
"""Scores that exist at a time: 32 MiB."""


def num_columns(length: int) -> int:
    """Columns with room for `length` keys."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK


def attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scaling: float | None) -> Tensor:
    """[M, L, H, D] of the type of `query`: a query at position p attends to the columns 0 to p.

    Args:
        query: [M, H, L, D].
        keys: [M, K, C, D], C a multiple of KEY_BLOCK; columns behind the positions hold any finite numbers.
        values: like `keys`.
        positions: [M, L] int64.
        scaling: factor of the scores; None for the root of 1 / D.
    """
    _, num_heads, length, size = query.shape
    group = num_heads // keys.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    # Rows of one key/value head: the heads that share it, position by position.
    rows = query.float().mul(scale).unflatten(1, (-1, group)).transpose(2, 3).flatten(2, 3)
    missing, odd = -rows.shape[2] % QUERY_ROWS, -size % HEAD_MULTIPLE
    rows = pad(rows, (0, odd, 0, missing)).unflatten(2, (-1, QUERY_ROWS))
    seen = pad(positions.repeat_interleave(group, dim=1), (0, missing)).unflatten(1, (-1, QUERY_ROWS))
    wide_keys, wide_values = (pad(states.float(), (0, odd)) if odd else states.float() for states in (keys, values))
    out = _attend(rows, wide_keys, wide_values, seen).flatten(2, 3)[:, :, : length * group, :size]
    out = out.unflatten(2, (length, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out.to(query.dtype)


def _attend(rows: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """rows [M, K, T, QUERY_ROWS, D], keys and values [M, K, C, D], seen [M, T, QUERY_ROWS] -> like `rows`."""
    count, num_kv, num_tiles = rows.shape[:3]
    out = torch.empty_like(rows)
    if num_tiles <= count * num_kv:
        flat_keys, flat_values = (states.flatten(0, 1) for states in (keys, values))
        step = max(1, SCORE_ELEMENTS // (QUERY_ROWS * keys.shape[2]) // num_kv)
        for tile in range(num_tiles):
            for first in range(0, count, step):
                part = slice(first, min(first + step, count))
                flat = slice(part.start * num_kv, part.stop * num_kv)
                last = seen[part, tile].repeat_interleave(num_kv, dim=0)
                found = _product_of_tiles(rows[part, :, tile].flatten(0, 1), flat_keys[flat], flat_values[flat], last)
                out[part, :, tile] = found.unflatten(0, (-1, num_kv))
        return out
    # Few long sequences: the tiles of a head together, all with the same keys. Later tiles see more of them.
    step = max(1, SCORE_ELEMENTS // (QUERY_ROWS * keys.shape[2]))
    for sequence in range(count):
        for head in range(num_kv):
            for first in range(0, num_tiles, step):
                tiles = slice(first, first + step)
                own = rows[sequence, head, tiles]
                own_keys, own_values = (states[sequence, head].expand(len(own), -1, -1) for states in (keys, values))
                out[sequence, head, tiles] = _product_of_tiles(own, own_keys, own_values, seen[sequence, tiles])
    return out


def _product_of_tiles(rows: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """rows [G, QUERY_ROWS, D], keys and values [G, C, D], seen [G, QUERY_ROWS] -> [G, QUERY_ROWS, D]."""
    num_blocks = int(seen.max()) // KEY_BLOCK + 1
    blocks = [slice(block * KEY_BLOCK, (block + 1) * KEY_BLOCK) for block in range(num_blocks)]
    scores = rows.new_empty((num_blocks, len(rows), QUERY_ROWS, KEY_BLOCK))
    for block, score in zip(blocks, scores, strict=True):
        torch.bmm(rows, keys[:, block].transpose(1, 2), out=score)
    columns = torch.arange(num_blocks * KEY_BLOCK, device=rows.device).view(num_blocks, 1, 1, KEY_BLOCK)
    scores.masked_fill_(columns > seen[:, :, None], -torch.inf)
    weights = scores.sub_(scores.amax(dim=(0, 3), keepdim=True)).exp_()
    totals = weights.sum(-1)
    out, total = torch.bmm(weights[0], values[:, blocks[0]]), totals[0]
    for block, weight, more in zip(blocks[1:], weights[1:], totals[1:], strict=True):
        if out.is_cuda:  # `rollout/exact/gpu.py` has no product that adds; not yet run on a GPU
            out = out + torch.bmm(weight, values[:, block])
        else:
            out.baddbmm_(weight, values[:, block])
        total = total + more
    return out.div_(total[:, :, None])
