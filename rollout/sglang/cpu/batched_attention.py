"""Attention of many sequences over a paged cache in a few large operators: (queries, cache) -> outputs. Torch only.

`rollout/sglang/cpu/attention.py` adapts these functions to SGLang's attention interface. SGLang's own `torch_native`
backend runs about ten operators per sequence and layer; here sequences of similar length share the operators.

Words: a slot is the place of one token in the cache; an item is a run of consecutive queries of one sequence (one query
while decoding); a block is a set of items that are padded to one shape and computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK_NUMBERS = 1 << 18
"""Bound on the float32 keys of a block, 1 MiB: keys and values then stay in a core's cache between the operators that
read them, and short sequences are not padded to the length of a long one."""
QUERIES_PER_ITEM = 256
"""Queries per item; longer prompts are cut into items: the mask stays small, and keys after an item are not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """b items, n queries each, L keys each; some keys are padding."""

    queries: torch.Tensor
    """[b * n] int64: index of each query among the queries of the batch; padding repeats the last query of its item."""
    real: torch.Tensor | None
    """[number of queries that are no padding] int64, index into `queries`; None if no query is padding."""
    slots: torch.Tensor
    """[b * L] integer: slot of each key in the cache; padding repeats the last key of its item."""
    mask: torch.Tensor | None
    """[b, 1, n, L] float32, 0 or -inf, added to the scores; None if every query sees every key."""
    num_items: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes b, n and L."""
        return self.num_items, len(self.queries) // self.num_items, len(self.slots) // self.num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class _Items:
    """All items of a batch; each field is [I] int64."""

    sequence: torch.Tensor
    """Index of the sequence in the batch."""
    query: torch.Tensor
    """Index of the first query among all queries of the batch."""
    position: torch.Tensor
    """Position of the first query in its sequence."""
    count: torch.Tensor
    """Number of queries, at least 1."""
    first_key: torch.Tensor
    """Position of the first key that the first query sees."""

    @property
    def num_keys(self) -> torch.Tensor:
        return self.position + self.count - self.first_key


def plan_blocks(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    *,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor | None = None,
    window: int | None = None,
    numbers_per_key: int,
) -> list[Block]:
    """Cut a batch into blocks; all layers of a forward use the same blocks.

    Args:
        req_to_token: [requests, positions] integer, contiguous: slot of each token of each request.
        requests: [B] row of `req_to_token` of each sequence.
        prefix_lens: [B] tokens before the first query.
        extend_lens: [B] queries per sequence, in the order of the queries of the batch; None for one query each
            (decoding).
        window: Number of keys before a query that the query sees besides itself; None for all keys.
        numbers_per_key: key heads x head size, for the size of the blocks.
    """
    items = _make_items(prefix_lens.to(torch.int64), extend_lens, window)
    # Items with the same number of queries are neighbours, and among them items of similar length.
    order = torch.argsort((items.count << 32) + items.num_keys)
    items = _Items(
        sequence=items.sequence[order],
        query=items.query[order],
        position=items.position[order],
        count=items.count[order],
        first_key=items.first_key[order],
    )
    rows = requests.to(torch.int64)[items.sequence] * req_to_token.stride(0)
    flat = req_to_token.view(-1)
    bounds = _cut(items.count.tolist(), items.num_keys.tolist(), numbers_per_key)
    return [_make_block(items, rows, flat, begin, end, window) for begin, end in bounds]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[Block], *, scale: float
) -> torch.Tensor:
    """Outputs of all queries of the blocks; scores, softmax and sums in float32.

    Args:
        query: [T, query heads, head size].
        keys: [slots, key heads, head size]; query heads are a multiple of key heads, neighbouring query heads share a
            key head.
        values: [slots, key heads, value size].
        scale: Factor of the scores.

    Returns:
        [T, query heads, value size] in the type of `query`.
    """
    num_heads, num_kv_heads, value_size = query.shape[1], keys.shape[1], values.shape[2]
    group = num_heads // num_kv_heads
    output = query.new_empty(query.shape[0], num_heads, value_size)
    flat_keys, flat_values = keys.flatten(1), values.flatten(1)
    for block in blocks:
        b, n, length = block.shape
        # Query heads that share a key head are laid out as further queries, so that no key is repeated.
        q = query.index_select(0, block.queries).float().view(b, n, num_kv_heads, group, -1)
        q = q.permute(0, 2, 3, 1, 4).reshape(b, num_kv_heads, group * n, -1)
        k = flat_keys.index_select(0, block.slots).float().view(b, length, num_kv_heads, -1).transpose(1, 2)
        v = flat_values.index_select(0, block.slots).float().view(b, length, num_kv_heads, -1).transpose(1, 2)
        mask = block.mask
        if mask is not None and n > 1 and group > 1:
            mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out = out.view(b, num_kv_heads, group, n, value_size).permute(0, 3, 1, 2, 4)
        out = out.reshape(b * n, num_heads, value_size).to(query.dtype)
        if block.real is None:
            output.index_copy_(0, block.queries, out)
        else:
            output.index_copy_(0, block.queries[block.real], out[block.real])
    return output


def _make_items(prefix_lens: torch.Tensor, extend_lens: torch.Tensor | None, window: int | None) -> _Items:
    sequence = query = torch.arange(len(prefix_lens))
    position, count = prefix_lens, torch.ones_like(prefix_lens)
    if extend_lens is not None:
        count = extend_lens.to(torch.int64)
        query = count.cumsum(0) - count
        pieces = (count + QUERIES_PER_ITEM - 1) // QUERIES_PER_ITEM
        sequence = sequence.repeat_interleave(pieces)
        nth = torch.arange(len(sequence)) - (pieces.cumsum(0) - pieces)[sequence]
        offset = nth * QUERIES_PER_ITEM
        count = (count[sequence] - offset).clamp(max=QUERIES_PER_ITEM)
        query, position = query[sequence] + offset, position[sequence] + offset
    first_key = torch.zeros_like(position) if window is None else (position - window).clamp(min=0)
    return _Items(sequence=sequence, query=query, position=position, count=count, first_key=first_key)


def _cut(counts: list[int], num_keys: list[int], numbers_per_key: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each block: as many items as fit the bound, at least one."""
    begin, count, longest = 0, 0, 0
    for index, (more, keys) in enumerate(zip(counts, num_keys, strict=True)):
        padded = max(longest, keys)
        size = (index + 1 - begin) * padded * max(numbers_per_key, more)
        if index > begin and (size > BLOCK_NUMBERS or (more > 1 and more > 2 * count)):
            yield begin, index
            begin, padded = index, keys
        if index == begin:
            count = more
        longest = padded
    if counts:
        yield begin, len(counts)


def _make_block(
    items: _Items, rows: torch.Tensor, flat: torch.Tensor, begin: int, end: int, window: int | None
) -> Block:
    part = slice(begin, end)
    count, first_key = items.count[part, None], items.first_key[part, None]
    last_key = items.position[part, None] + count - 1
    num_queries = int(count.max())
    length = int((last_key - first_key).max()) + 1
    key_positions = first_key + torch.arange(length)
    # Padding repeats a token of the same sequence, so that a non-finite number stays within its sequence.
    slots = flat.index_select(0, (rows[part, None] + key_positions.clamp(max=last_key)).view(-1))
    nth = torch.arange(num_queries)
    nth_kept = torch.minimum(nth, count - 1)
    real = None
    if int(count.min()) < num_queries:
        real = (nth < count).view(-1).nonzero().view(-1)
    return Block(
        queries=(items.query[part, None] + nth_kept).view(-1),
        real=real,
        slots=slots,
        mask=_make_mask(items.position[part, None] + nth_kept, key_positions, window),
        num_items=end - begin,
    )


def _make_mask(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """[b, n] and [b, L] positions -> [b, 1, n, L]: a query sees no later key and no key before its window."""
    seen = keys[:, None, None, :] <= queries[:, None, :, None]
    if window is not None:
        seen &= keys[:, None, None, :] >= queries[:, None, :, None] - window
    if bool(seen.all()):
        return None
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
