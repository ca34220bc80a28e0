"""A padded float32 copy of the keys and values of all decoding sequences, kept between decode steps. Torch only.

While the same sequences decode, a step adds one token to each. Gathering all keys and values from the paged cache again
in every step and layer costs more than the attention itself for a small model. So sequences of similar length share a
`Bucket`; a step writes the new tokens into it and attends. Sequences that end leave dead rows behind, until half of a
bucket is dead; new ones get buckets of their own, until there are too many. `rollout/sglang/cpu/attention.py` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_BYTES = 256 << 20
"""Of the copy. Sequences that need more are gathered in every step, as `batched_attention.attend` does."""
ROOM = 64
"""Positions kept free for new tokens when a bucket is made; a full one gets twice its capacity."""
FREE_NUMBERS = 1 << 18
"""Padding is not avoided in a bucket whose keys are fewer numbers than this: another bucket would cost more."""
MAX_PADDING = 1.25
"""Padded over real length, in a larger bucket."""
MAX_EXTRA_BUCKETS = 4
"""So many buckets of sequences that came later; then all are sorted into buckets anew."""

GONE = -1

Pool = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer: [slots, key heads, size]."""
KEY_POSITIONS, VALUE_POSITIONS = 3, 2
"""Dimension of the positions in a bucket's keys and values. Keys lie transposed: a matrix product with one query reads
them faster so (torch's attention kernel, made for many queries, is slower with either layout)."""


class Bucket:
    """b sequences with room for `capacity` tokens each."""

    def __init__(self, requests: list[int], lens: torch.Tensor, slots: torch.Tensor) -> None:
        """`slots` [b, longest] of all tokens so far; beyond a sequence's end they repeat its last one."""
        self.requests = requests
        """Row of `req_to_token` of each sequence; GONE for a dead row."""
        self.lens = lens
        """[b] int64, tokens of each sequence in the running step."""
        self._slots: torch.Tensor | None = slots
        """Only in the step in which the bucket is made: each layer fills its part then."""
        self._kept: dict[int, Pool] = {}
        """By layer, float32: keys [b, key heads, size, capacity] and values [b, key heads, capacity, size]."""
        self._make_room(slots.shape[1] + ROOM)
        self.alive: torch.Tensor | None = None
        """[rows that still decode] int64; None where all do."""
        self.batch_rows = torch.empty(0, dtype=torch.int64)
        """[rows that still decode] int64: index of each in the batch."""

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
        """One more token per sequence, dead ones included; to be called before the first layer of a step."""
        if self.longest == self.capacity:
            self._make_room(2 * self.capacity)
        self._slots = None
        self._mask.scatter_(1, self.lens[:, None], 0.0)
        self.lens += 1
        self.longest += 1

    def keep(self, rows: list[int]) -> None:
        """All other rows are dead from now on; they are dropped when they are more than half."""
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
            # The slots include those of the new tokens.
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
        """Buckets when all were sorted last."""

    def forget(self, requests: Sequence[int]) -> None:
        """These rows of `req_to_token` are filled by a prefill: whatever decoded there before has ended."""
        gone = set(requests)
        for bucket in self.buckets:
            if not gone.isdisjoint(bucket.requests):
                bucket.requests = [GONE if request in gone else request for request in bucket.requests]
                # The next step has to look which rows are left.
                self._requests = self._requests[:0]

    def clear(self) -> None:
        """Give all memory back."""
        self.buckets.clear()
        self._requests = self._lens = torch.empty(0, dtype=torch.int64)

    def begin(
        self, req_to_token: torch.Tensor, requests: torch.Tensor, lens: torch.Tensor, *, numbers_per_token: int
    ) -> bool:
        """Before the first layer of a decode step; False where the copy would be too large, and then there is none.

        Args:
            req_to_token: [requests, positions] integer: slot of each token.
            requests: [B] row of each sequence.
            lens: [B] tokens of each sequence, the one of this step included.
            numbers_per_token: keys and values of one token in one layer.
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
        """Outputs [B, query heads, value size] of one decode step; `new_slots` [B] hold its keys and values already."""
        output = query.new_empty(*query.shape[:2], pool[1].shape[2])
        queries = query.float()
        # Read back, so that the copy is what the cache holds, rounding included.
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
        """Sequences have ended or come: keep the buckets of those that go on, make buckets for the others."""
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
        """Sort the sequences in these rows of the batch into new buckets."""
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
    """Ascending lengths -> parts that are padded to their longest."""
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
    """Contiguous, with `capacity` entries along `dim`; zeros at the end."""
    wide = numbers.new_zeros(*numbers.shape[:dim], capacity, *numbers.shape[dim + 1 :])
    wide.narrow(dim, 0, numbers.shape[dim]).copy_(numbers)
    return wide
