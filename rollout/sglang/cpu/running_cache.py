"""A padded float32 copy of the keys and values of all decoding sequences, kept between decode steps. Torch only.

While the same sequences decode, a step adds one token to each. Gathering all keys and values from the paged cache again
in every step and layer costs more than the attention itself for a small model. So sequences of similar length share a
`Bucket`; a step writes the new tokens into the bucket and attends. Sequences that end leave dead rows behind, until
half of a bucket is dead; new sequences get new buckets, until there are too many buckets.
`rollout/sglang/cpu/attention.py` uses the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_BYTES = 256 << 20
"""Maximum size of the copy, bytes. Larger batches are gathered in every step, as `batched_attention.attend` does."""
ROOM = 64
"""Free positions for new tokens in a new bucket; a full bucket doubles its capacity."""
FREE_NUMBERS = 1 << 18
"""Size of a bucket's keys, in numbers, below which padding is accepted: another bucket would cost more."""
MAX_PADDING = 1.25
"""Maximum ratio of padded to real length in a larger bucket."""
MAX_EXTRA_BUCKETS = 4
"""Maximum number of buckets added for new sequences; then all sequences are sorted into buckets again."""

GONE = -1

Pool = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer: [slots, key heads, size]."""
KEY_POSITIONS, VALUE_POSITIONS = 3, 2
"""Dimension of the positions in a bucket's keys and values. Keys are stored transposed: a matrix product with one query
reads that layout faster (torch's attention kernel, made for many queries, is slower with either layout)."""


class Bucket:
    """b sequences with room for `capacity` tokens each."""

    def __init__(self, requests: list[int], lens: torch.Tensor, slots: torch.Tensor) -> None:
        """`slots` [b, longest] of all tokens so far; after the end of a sequence its last slot is repeated."""
        self.requests = requests
        """Row of `req_to_token` of each sequence; GONE for a dead row."""
        self.lens = lens
        """[b] int64, tokens of each sequence in the current step."""
        self._slots: torch.Tensor | None = slots
        """Slots in the step that makes the bucket, in which each layer copies its part; None afterwards."""
        self._kept: dict[int, Pool] = {}
        """Layer -> float32 keys [b, key heads, size, capacity] and values [b, key heads, capacity, size]."""
        self._make_room(slots.shape[1] + ROOM)
        self.alive: torch.Tensor | None = None
        """[rows that still decode] int64; None if all rows do."""
        self.batch_rows = torch.empty(0, dtype=torch.int64)
        """[rows that still decode] int64: index of each row in the batch."""

    @property
    def num_positions(self) -> int:
        return len(self.requests) * self.capacity

    def _make_room(self, capacity: int) -> None:
        self.capacity = capacity
        self.longest = int(self.lens.max())
        positions = torch.arange(capacity)
        hidden = positions >= self.lens[:, None]
        self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self._kept = {
            layer: (_widen(k, KEY_POSITIONS, capacity), _widen(v, VALUE_POSITIONS, capacity))
            for layer, (k, v) in self._kept.items()
        }

    def advance(self) -> None:
        """Count one more token per sequence, dead rows included; called before the first layer of a step."""
        if self.longest == self.capacity:
            self._make_room(2 * self.capacity)
        self._slots = None
        self._mask.scatter_(1, self.lens[:, None], 0.0)
        self.lens += 1
        self.longest += 1

    def keep(self, rows: list[int]) -> None:
        """Mark all other rows as dead; dead rows are removed when they are more than half."""
        if len(rows) == len(self.requests):
            self.alive = None
        elif 2 * len(rows) < len(self.requests):
            self._select(torch.tensor(rows))
        else:
            left = set(rows)
            self.requests = [request if row in left else GONE for row, request in enumerate(self.requests)]
            self.alive = torch.tensor(rows)

    def _select(self, rows: torch.Tensor) -> None:
        self.requests = [self.requests[row] for row in rows.tolist()]
        self.lens, self._mask = self.lens[rows], self._mask[rows]
        self._kept = {layer: (k[rows], v[rows]) for layer, (k, v) in self._kept.items()}
        self.longest, self.alive = int(self.lens.max()), None

    def attend(self, layer: int, query: torch.Tensor, pool: Pool, new: Pool, *, scale: float) -> torch.Tensor:
        """Outputs [alive, query heads, value size] float32 of `query` [alive, query heads, size]; `new` likewise."""
        kept = self._kept.get(layer)
        if kept is None:
            # The slots include the slots of the new tokens.
            kept = self._kept[layer] = self._gather(pool)
        else:
            rows = torch.arange(len(self.requests)) if self.alive is None else self.alive
            last = self.lens[rows] - 1
            kept[0][rows, :, :, last] = new[0]
            kept[1][rows, :, last] = new[1]
        b, num_kv_heads, group = len(self.requests), pool[0].shape[1], query.shape[1] // pool[0].shape[1]
        q = query
        if self.alive is not None:
            q = query.new_zeros(b, *query.shape[1:]).index_copy_(0, self.alive, query)
        q = q.view(b * num_kv_heads, group, -1)
        keys, values = kept[0].flatten(0, 1)[:, :, : self.longest], kept[1].flatten(0, 1)[:, : self.longest]
        mask = self._mask[:, None, None, : self.longest].expand(b, num_kv_heads, group, -1).flatten(0, 1)
        scores = torch.baddbmm(mask, q, keys, alpha=scale)
        out = torch.bmm(scores.softmax(-1), values).view(b, num_kv_heads * group, -1)
        return out if self.alive is None else out.index_select(0, self.alive)

    def _gather(self, pool: Pool) -> Pool:
        if self._slots is None:
            raise RuntimeError("a layer that was left out of a decode step was asked for in a later one")
        keys, values = (numbers[self._slots].float() for numbers in pool)  # [b, longest, key heads, size]
        return (
            _widen(keys.permute(0, 2, 3, 1), KEY_POSITIONS, self.capacity),
            _widen(values.transpose(1, 2), VALUE_POSITIONS, self.capacity),
        )


class RunningCache:
    """The buckets of all decoding sequences of one worker."""

    def __init__(self, *, num_layers: int) -> None:
        self._num_layers = num_layers
        self.buckets: list[Bucket] = []
        self._requests = torch.empty(0, dtype=torch.int64)
        self._lens = torch.empty(0, dtype=torch.int64)
        self._num_sorted = 0
        """Number of buckets after the last complete sorting."""

    def forget(self, requests: Sequence[int]) -> None:
        """Mark rows of `req_to_token` that a prefill fills as dead: the sequences that decoded there have ended."""
        gone = set(requests)
        for bucket in self.buckets:
            if not gone.isdisjoint(bucket.requests):
                bucket.requests = [GONE if request in gone else request for request in bucket.requests]
                # Makes the next step look for the remaining rows.
                self._requests = self._requests[:0]

    def clear(self) -> None:
        """Release all memory."""
        self.buckets.clear()
        self._requests = self._lens = torch.empty(0, dtype=torch.int64)

    def begin(
        self, req_to_token: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, *, numbers_per_token: int
    ) -> bool:
        """Prepare a decode step, before its first layer; returns False, without a copy, if the copy would be too large.

        Args:
            req_to_token: [requests, positions] integer: slot of each token.
            requests: [B] row of each sequence.
            lens: [B] tokens of each sequence, including the token of this step.
            numbers_per_token: Size of the keys and values of one token in one layer, in numbers.
        """
        requests, lens = requests.to(torch.int64), lens.to(torch.int64)
        same = torch.equal(requests, self._requests)
        if same and torch.equal(lens, self._lens + 1):
            for bucket in self.buckets:
                bucket.advance()
        else:
            self._change(req_to_token, requests, lens, numbers_per_token)
        self._requests, self._lens = requests.clone(), lens.clone()
        bytes_per_position = numbers_per_token * self._num_layers * 4
        if sum(bucket.num_positions for bucket in self.buckets) * bytes_per_position > MAX_BYTES:
            self.clear()
            return False
        return True

    def attend(
        self, layer: int, query: torch.Tensor, pool: Pool, new_slots: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Outputs [B, query heads, value size] of one decode step; `new_slots` [B] hold the new keys and values."""
        output = query.new_empty(*query.shape[:2], pool[1].shape[2])
        queries = query.float()
        # Read back from the cache, so that the copy has the same rounding.
        new = tuple(numbers.index_select(0, new_slots).float() for numbers in pool)
        for bucket in self.buckets:
            rows = bucket.batch_rows
            own = (new[0].index_select(0, rows), new[1].index_select(0, rows))
            out = bucket.attend(layer, queries.index_select(0, rows), pool, own, scale=scale)
            output.index_copy_(0, rows, out.to(output.dtype))
        return output

    def _change(
        self, req_to_token: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, numbers_per_token: int
    ) -> None:
        """Keep the buckets of continuing sequences and make buckets for new ones, after sequences ended or came."""
        row_of = {request: row for row, request in enumerate(requests.tolist())}
        len_of = lens.tolist()
        kept = []
        for bucket in self.buckets:
            bucket.advance()
            now = bucket.lens.tolist()
            alive = [
                row
                for row, request in enumerate(bucket.requests)
                if request in row_of and len_of[row_of[request]] == now[row]
            ]
            if not alive:
                continue
            bucket.batch_rows = torch.tensor([row_of.pop(bucket.requests[row]) for row in alive])
            bucket.keep(alive)
            kept.append(bucket)
        self.buckets = kept
        if row_of and len(self.buckets) > self._num_sorted + MAX_EXTRA_BUCKETS:
            self.buckets = []
            row_of = {request: row for row, request in enumerate(requests.tolist())}
        sort_all = not self.buckets
        self._add(req_to_token, requests, lens, list(row_of.values()), numbers_per_token)
        if sort_all:
            self._num_sorted = len(self.buckets)

    def _add(
        self,
        req_to_token: torch.Tensor,
        requests: torch.Tensor,
        lens: torch.Tensor,
        rows: list[int],
        numbers_per_token: int,
    ) -> None:
        """Sort the sequences in the batch rows `rows` into new buckets."""
        len_of, request_of = lens.tolist(), requests.tolist()
        rows = sorted(rows, key=len_of.__getitem__)
        for part in _cut([len_of[row] for row in rows], numbers_per_token):
            members = torch.tensor(rows[part])
            longest = len_of[rows[part][-1]]
            positions = torch.minimum(torch.arange(longest), lens[members, None] - 1)
            slots = req_to_token[requests[members], :longest].gather(1, positions)
            bucket = Bucket([request_of[row] for row in rows[part]], lens[members], slots)
            bucket.batch_rows = members
            self.buckets.append(bucket)


def _cut(lens: list[int], numbers_per_token: int) -> list[slice]:
    """Cut ascending lengths into parts; each part is padded to its longest sequence."""
    parts, begin, real = [], 0, 0
    for index, length in enumerate(lens):
        padded = (index + 1 - begin) * length
        if padded * numbers_per_token > FREE_NUMBERS and padded > MAX_PADDING * (real + length):
            parts.append(slice(begin, index))
            begin, real = index, 0
        real += length
    if begin < len(lens):
        parts.append(slice(begin, len(lens)))
    return parts


def _widen(numbers: torch.Tensor, dim: int, capacity: int) -> torch.Tensor:
    """Contiguous copy with `capacity` entries along `dim`; the added entries are zeros."""
    wide = numbers.new_zeros(*numbers.shape[:dim], capacity, *numbers.shape[dim + 1 :])
    wide.narrow(dim, 0, numbers.shape[dim]).copy_(numbers)
    return wide
