"""Gaps of a micro-batch, piece by piece -> sums over tokens, maxima, a sketch, and sums per sequence.

Read by `algorithms.mismatch_stats`. Masks are bit patterns (`algorithms.bits`). n: tokens of a piece, T: all,
N: sequences.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from algorithms.bits import keep_where, mask_bits
from algorithms.correction import Applied
from algorithms.gap import Gap
from algorithms.kl import LOG2_E
from algorithms.segments import BLOCK, Column, Segments
from algorithms.sketch import GROUP_BINS, KEPT_KIND, REJECTED_KIND, add_log_ratios

TOKEN_SUMS: Final = (
    "rollout_prob",
    "prob_diff",
    "abs_prob_diff",
    "rollout_prob_squared",
    "prob_diff_squared",
    "prob_product",
    "weight_squared",
    "advantage",
    "abs_advantage",
    "weighted_advantage",
    "weighted_abs_advantage",
    "entropy",
)
"""Sums over valid response tokens; those of the advantage over all response tokens. prob_product is
mu (pi_old - mu)."""
MISMATCH_MAXES: Final = ("delta", "minus_delta", "prob_diff")
"""Over valid tokens, and 0 where some token is not one: off the mask Delta counts as 0."""


class Extras(NamedTuple):
    """What may be known about tokens besides their gap; None where it is not."""

    advantages: Tensor | None
    """[T]."""
    entropy: Tensor | None
    """[T] nats."""

    def part(self, tokens: slice) -> Extras:
        """Of some of the tokens."""
        return Extras(*(None if tensor is None else tensor[tokens] for tensor in self))


class SequenceSums(NamedTuple):
    """What is summed over the tokens of each sequence, [N] float64 each."""

    delta: Tensor
    """log pi_old - log mu of valid tokens."""
    rollout: Tensor
    """log mu of valid tokens."""
    weight: Tensor
    """Applied weight of kept tokens."""
    k3: Tensor
    """0 where nobody asked for it."""
    tokens: Tensor
    """Number of response tokens."""
    valid: Tensor
    """Number of those whose log-probs are log-probabilities."""
    kept: Tensor
    """Number of those that the correction keeps."""


class _Piece(NamedTuple):
    """What `SequenceSums` need of some sequences."""

    segments: Segments
    values: list[Column]
    """rollout, and weight where there is one."""
    flags: list[Column]
    """kept where there is a correction."""
    delta: Tensor
    k3: Tensor
    tokens: Tensor
    valid: Tensor

    def sums(self) -> Tensor:
        """`SequenceSums` as rows."""
        # Without a correction there is neither weight nor kept.
        none = self.segments.zeros()
        rollout, weight, kept = (*self.segments.totals(self.values, self.flags), none, none)[:3]
        columns = SequenceSums(self.delta, rollout, weight, self.k3, self.tokens, self.valid, kept)
        return torch.stack(columns)


class TokenTotals:
    """Sums over the tokens of a batch, piece by piece."""

    def __init__(self, table: Tensor, *, with_k3: bool) -> None:
        """table: the sketch to fill (`algorithms.sketch.new_table`); with_k3: whether k3 by sequence is wanted."""
        self._table = table
        self._with_k3 = with_k3
        self._totals: list[list[Tensor]] = []
        self._maxes: list[list[Tensor]] = []
        self._pieces: list[_Piece] = []
        self._num_tokens = 0
        self._uncounted_kind = KEPT_KIND

    def add(self, gap: Gap, extras: Extras, applied: Applied | None) -> None:
        """Count the sequences of `gap`; extras of their tokens, and what the correction applied to them."""
        segments = gap.segments
        values, flags, weight, kind = [segments.column(gap.rollout_logprobs.double())], [], None, None
        if applied is not None:
            kind, weight = applied.kept + 1, applied.weight.double()
            values.append(segments.column(weight))
            flags.append(segments.flag_column(applied.keep))
        k3 = gap.k3_total if self._with_k3 else segments.zeros()
        self._pieces.append(_Piece(segments, values, flags, gap.total, k3, gap.num_tokens, gap.num_valid))
        self._num_tokens += gap.delta.shape[0]
        self._uncounted_kind = KEPT_KIND if kind is None else REJECTED_KIND
        add_log_ratios(self._table, gap.delta, kind=kind)
        totals, maxes = _token_sums(gap, extras, weight)
        self._totals.append(totals)
        self._maxes.append(maxes)

    def joined(self) -> tuple[Tensor, Tensor, SequenceSums]:
        """TOKEN_SUMS, MISMATCH_MAXES, and sums per sequence."""
        sequences = SequenceSums(*torch.cat([piece.sums() for piece in self._pieces], dim=1).unbind())
        # Tokens that are not valid were counted with Delta = 0, among the rejected ones if there is such a class.
        self._table[0, self._uncounted_kind * GROUP_BINS] -= self._num_tokens - sequences.valid.sum()
        totals = torch.stack([torch.stack(totals) for totals in self._totals]).sum(0)
        maxes = torch.stack([torch.stack([maximum.double() for maximum in maxes]) for maxes in self._maxes]).amax(0)
        return totals, maxes, sequences


def _token_sums(gap: Gap, extras: Extras, weight: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """TOKEN_SUMS, float64, and MISMATCH_MAXES of a part; weight [n] float64."""
    mu = _probability(gap.rollout_logprobs)
    # The difference of equal log-probs is exactly 0; where a token is not valid both are.
    difference = _probability(gap.trainer_logprobs).sub_(mu).double()
    mu = keep_where(gap.valid_bits, mu).double()
    zero = difference.new_zeros(())
    first = [mu.sum(), difference.sum()]
    squares = [torch.dot(mu, mu), torch.dot(difference, difference), torch.dot(mu, difference)]
    distance = difference.abs_()
    sums = [*first, distance.sum(), *squares, zero if weight is None else torch.dot(weight, weight)]
    if extras.advantages is None or weight is None:
        sums += [zero] * 4
    else:
        advantage = keep_where(mask_bits(gap.response_mask), extras.advantages).double()
        size = advantage.abs()
        sums += [advantage.sum(), size.sum(), torch.dot(weight, advantage), torch.dot(weight, size)]
    sums.append(zero if extras.entropy is None else keep_where(gap.valid_bits, extras.entropy).double().sum())
    maxes = [gap.delta.amax(), -gap.delta.amin(), distance.amax()] if distance.shape[0] else [zero - math.inf] * 3
    return sums, maxes


def _probability(logprobs: Tensor) -> Tensor:
    """exp of logprobs [n]. Filled up to whole vectors: what is left over a processor rounds in another way."""
    num_tokens = logprobs.shape[0]
    return pad(logprobs, (0, -num_tokens % BLOCK)).mul_(LOG2_E).exp2_()[:num_tokens]
