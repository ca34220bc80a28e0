"""Sums over the sequences of a pack at the speed of a plain sum, and the way back. No gradient, no value on the host.

Tokens are added in blocks of BLOCK first. A block inside a sequence counts as one number; the blocks that hold a
border of two sequences are taken token by token. `algorithms.masked` has sums with a gradient.

n: tokens of the pack, N: sequences, B: whole blocks, E: tokens that are taken one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

BLOCK: Final = 64
"""Tokens of a block: long enough that blocks are cheap, short enough that few tokens share one with a border."""


class Column(NamedTuple):
    """One number per token, added up as far as it goes without the sequences."""

    blocks: Tensor
    """[B] float64, sums of whole blocks; of flags int64, see `Segments.flag_column`."""
    edges: Tensor
    """[E] float64 or bool, the tokens that are taken one by one; [N+1] float64, their sums, if all are."""


class Segments:
    """The sequences of a pack of n tokens; tokens from `cu_seqlens[-1]` on are padding that belongs to none."""

    def __init__(self, cu_seqlens: Tensor, *, num_tokens: int) -> None:
        """cu_seqlens [N+1] int32, first token of each sequence; num_tokens n."""
        self.num_tokens = num_tokens
        self.num_sequences = cu_seqlens.numel() - 1
        bounds, device = cu_seqlens.long(), cu_seqlens.device
        # With short sequences most blocks would hold a border: there are none, and every token counts by itself.
        self._num_blocks = 0 if self.num_sequences * BLOCK >= num_tokens else num_tokens // BLOCK
        if not self._num_blocks:
            # What `column` leaves to be added are sums by sequence already.
            self._slots = torch.arange(self.num_sequences + 1, device=device)
            self._edge_owner = torch.searchsorted(bounds[1:], torch.arange(num_tokens, device=device), right=True)
            return
        # The last tokens may fill no block: their end counts as a border.
        at = torch.cat([bounds, bounds.new_full((1,), num_tokens)]) // BLOCK
        edges = at.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=device)
        # Two borders in one block: its tokens count once.
        repeated = torch.cat([torch.zeros_like(at[:1], dtype=torch.bool), at[1:] == at[:-1]])
        outside = (repeated.unsqueeze(1) | (edges >= num_tokens)).view(-1)
        self._edges = edges.view(-1).clamp_(max=num_tokens - 1)
        starts = torch.arange(0, (self._num_blocks + 1) * BLOCK, BLOCK, device=device)
        # The sequence of each block and of each token at a border; N for what belongs to none.
        owners = torch.searchsorted(bounds[1:], torch.cat([starts, self._edges]), right=True)
        self._block_owner, self._edge_owner = owners[: self._num_blocks], owners[self._num_blocks + 1 :]
        blocks = owners[: self._num_blocks + 1].index_fill(0, at, self.num_sequences)[:-1]
        self._slots = torch.cat([blocks, self._edge_owner.masked_fill(outside, self.num_sequences)])

    def sum(self, values: Tensor) -> Tensor:
        """values [n] float64 -> [N] float64; finite everywhere, padding included."""
        return self.totals([self.column(values)])[0]

    def count(self, flags: Tensor) -> Tensor:
        """flags [n] bool, not a slice -> number of True [N] float64."""
        return self.totals(flags=[self.flag_column(flags)])[0]

    def zeros(self) -> Tensor:
        """[N] float64."""
        return torch.zeros(self.num_sequences, dtype=torch.float64, device=self._slots.device)

    def column(self, values: Tensor) -> Column:
        """values [n] float64 -> what `totals` needs of them, so that they may be written over."""
        whole = values[: self._num_blocks * BLOCK].view(-1, BLOCK)
        return Column(blocks=whole.sum(1), edges=self._at_edges(values))

    def flag_column(self, flags: Tensor) -> Column:
        """`column` of flags [n] bool, not a slice."""
        # Eight flags at a time as the bytes of an integer.
        eights = flags[: self._num_blocks * BLOCK].view(torch.int64).view(-1, BLOCK // 8)
        return Column(blocks=eights.sum(1), edges=self._at_edges(flags))

    def _at_edges(self, tokens: Tensor) -> Tensor:
        """Where all tokens are taken one by one they are added at once: only sums are kept."""
        if self._num_blocks:
            return tokens.index_select(0, self._edges)
        sums = tokens.new_zeros(self.num_sequences + 1, dtype=torch.float64)
        return sums.scatter_add_(0, self._edge_owner, tokens.double())

    def totals(self, values: Sequence[Column] = (), flags: Sequence[Column] = ()) -> Tensor:
        """`sum` of j columns, then `count` of k, at least one in all -> [j + k, N] float64; few calls."""
        blocks, edges = [], []
        if values:
            blocks.append(torch.stack([column.blocks for column in values]))
            edges.append(torch.stack([column.edges for column in values]))
        if flags:
            # A product collects the sum of eight bytes, at most 64, in the top one.
            eights = torch.stack([column.blocks for column in flags]).mul_(0x0101010101010101)
            blocks.append(eights.bitwise_right_shift_(56).double())
            edges.append(torch.stack([column.edges for column in flags]).double())
        added = torch.cat([torch.cat(blocks), torch.cat(edges)], dim=1)
        # One slot more than sequences takes what belongs to none.
        sums = added.new_zeros(added.shape[0], self.num_sequences + 1)
        return sums.scatter_add_(1, self._slots.expand_as(added), added)[:, : self.num_sequences]

    def expand(self, values: Tensor) -> Tensor:
        """One value per sequence [N] -> the value of each token's sequence [n]; 0 on padding."""
        padded = torch.cat([values, values.new_zeros(1)])
        if not self._num_blocks:
            return padded.index_select(0, self._edge_owner)
        tokens = values.new_empty(self.num_tokens)
        whole = tokens[: self._num_blocks * BLOCK].view(-1, BLOCK)
        whole.copy_(padded.index_select(0, self._block_owner).unsqueeze(1).expand_as(whole))
        return tokens.index_copy_(0, self._edges, padded.index_select(0, self._edge_owner))
