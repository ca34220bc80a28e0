"""One pass over the tokens of a micro-batch: per-token inputs -> sums, maxima, a sketch, and sums per sequence.

The tokens go through in pieces that fit a cache, each once, with masks as bit patterns (`algorithms.bits`). Read by
`algorithms.mismatch_stats`; n: tokens of a piece, T: all, N: sequences.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.bits import keep_where, mask_bits, valid_tokens
from algorithms.chunks import sequence_chunks
from algorithms.kl import LOG2_E, k3
from algorithms.segments import BLOCK, Segments
from algorithms.sketch import GROUP_BINS, add_log_ratios

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


class Tokens(NamedTuple):
    """The per-token inputs, or a part of them."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    response_mask: Tensor
    keep: Tensor | None
    weight: Tensor | None
    advantages: Tensor | None
    entropy: Tensor | None

    def part(self, tokens: slice) -> Tokens:
        """Some of the tokens."""

        def given(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[tokens]

        return Tokens(
            old_logprobs=self.old_logprobs[tokens],
            rollout_logprobs=self.rollout_logprobs[tokens],
            response_mask=self.response_mask[tokens],
            keep=given(self.keep),
            weight=given(self.weight),
            advantages=given(self.advantages),
            entropy=given(self.entropy),
        )


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


class _Measured(NamedTuple):
    """n tokens, measured."""

    delta: Tensor
    """[n] as given, log pi_old - log mu, 0 where not valid."""
    delta64: Tensor
    """[n] float64, the same."""
    valid: Tensor
    """[n] int32, -1 where both log-probs are log-probabilities, else 0."""
    kept: Tensor | None
    """[n] int32, -1 on kept tokens."""
    weight: Tensor | None
    """[n] float64, applied weight, 0 on tokens that are not kept."""
    by_sequence: SequenceSums


def pass_over(
    tokens: Tokens, cu_seqlens: Tensor, table: Tensor, *, with_k3: bool
) -> tuple[Tensor, Tensor, SequenceSums]:
    """Every token once -> TOKEN_SUMS, MISMATCH_MAXES, and sums per sequence; fills `table`."""
    num_tokens = tokens.response_mask.shape[0]
    totals, maxes, rows = [], [], []
    for place, part_cu_seqlens in sequence_chunks(cu_seqlens, num_tokens=num_tokens):
        part = tokens.part(place)
        measured = _measure(part, part_cu_seqlens, with_k3=with_k3)
        add_log_ratios(table, measured.delta64, kind=None if measured.kept is None else measured.kept + 1)
        part_totals, part_maxes = _token_sums(part, measured)
        totals.append(part_totals)
        maxes.append(part_maxes)
        rows.append(torch.stack(measured.by_sequence))
    sequences = SequenceSums(*torch.cat(rows, dim=1).unbind())
    # Tokens that are not valid were counted with Delta = 0, among the rejected ones if there is such a class.
    table[0, 0 if tokens.keep is None else GROUP_BINS] -= num_tokens - sequences.valid.sum()
    return torch.stack(totals).sum(0), torch.stack(maxes).amax(0), sequences


def _measure(part: Tokens, cu_seqlens: Tensor, *, with_k3: bool) -> _Measured:
    """Some whole sequences of the pack."""
    segments = Segments(cu_seqlens, num_tokens=part.response_mask.shape[0])
    delta = part.old_logprobs - part.rollout_logprobs
    is_valid = valid_tokens(delta, part.rollout_logprobs, part.response_mask)
    valid = mask_bits(is_valid)
    delta = keep_where(valid, delta)
    delta64 = delta.double()
    num_valid = segments.count(is_valid)
    none = torch.zeros_like(num_valid)
    kept = weight = None
    num_kept = total_weight = none
    if part.keep is not None and part.weight is not None:
        keep = part.keep & is_valid
        kept = mask_bits(keep)
        weight = keep_where(kept, part.weight).double()
        num_kept, total_weight = segments.count(keep), segments.sum(weight)
    return _Measured(
        delta=delta,
        delta64=delta64,
        valid=valid,
        kept=kept,
        weight=weight,
        by_sequence=SequenceSums(
            delta=segments.sum(delta64),
            rollout=segments.sum(keep_where(valid, part.rollout_logprobs).double()),
            weight=total_weight,
            k3=segments.sum(k3(delta64)) if with_k3 else none,
            tokens=segments.count(part.response_mask.clone()),
            valid=num_valid,
            kept=num_kept,
        ),
    )


def _token_sums(part: Tokens, measured: _Measured) -> tuple[Tensor, Tensor]:
    """TOKEN_SUMS and MISMATCH_MAXES of a part, float64."""
    mu = keep_where(measured.valid, _probability(part.rollout_logprobs))
    difference = keep_where(measured.valid, _probability(part.old_logprobs)) - mu
    # -log mu is at most 128 octaves: what overflows is not valid. The difference of equal log-probs is exactly 0.
    mu, difference = mu.double(), difference.double()
    distance = difference.abs()
    zero = distance.new_zeros(())
    sums = [mu.sum(), difference.sum(), distance.sum()]
    sums += [torch.dot(mu, mu), torch.dot(difference, difference), torch.dot(mu, difference)]
    sums.append(zero if measured.weight is None else torch.dot(measured.weight, measured.weight))
    if part.advantages is None or measured.weight is None:
        sums += [zero] * 4
    else:
        advantage = keep_where(mask_bits(part.response_mask), part.advantages).double()
        size = advantage.abs()
        sums += [advantage.sum(), size.sum()]
        sums += [torch.dot(measured.weight, advantage), torch.dot(measured.weight, size)]
    sums.append(zero if part.entropy is None else keep_where(measured.valid, part.entropy).double().sum())
    return torch.stack(sums), torch.stack([_maximum(measured.delta), _maximum(-measured.delta), _maximum(distance)])


def _probability(logprobs: Tensor) -> Tensor:
    """exp of logprobs [n]. Filled up to whole vectors: what is left over a processor rounds in another way."""
    num_tokens = logprobs.shape[0]
    filled = torch.nn.functional.pad(logprobs, (0, -num_tokens % BLOCK))
    return torch.exp2(filled * LOG2_E)[:num_tokens]


def _maximum(values: Tensor) -> Tensor:
    """Maximum of values [n] -> scalar float64; -inf of none."""
    return values.amax().double() if values.shape[0] else values.new_full((), -math.inf, dtype=torch.float64)
