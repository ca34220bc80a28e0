"""What the two engines say about the same tokens, measured once: the correction and its statistics both read it.

Long batches go through in pieces of a few whole sequences (`gaps`) that stay in a processor's cache. n: packed tokens
of a piece, N: its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.bits import keep_where, mask_bits, valid_tokens
from algorithms.chunks import sequence_chunks
from algorithms.config import MAX_LOG_RATIO
from algorithms.kl import LOG2_E
from algorithms.masked import divide_by_count
from algorithms.segments import Segments


class _Sums(NamedTuple):
    """By sequence, [N] float64 each."""

    delta: Tensor
    clamped: Tensor
    """Delta within +-MAX_LOG_RATIO."""
    ratio: Tensor
    """rho of all tokens, 1 for those that are not valid."""
    tokens: Tensor
    valid: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Gap:
    """The tokens of some whole sequences. What several readers want is computed once, when the first one asks."""

    delta: Tensor
    """[n] log pi_train - log mu, not clamped; 0 where not valid, and everywhere if pi_train is unknown."""
    valid: Tensor
    """[n] bool, response tokens whose log-probs are log-probabilities."""
    valid_bits: Tensor
    """[n] int32, the same as `algorithms.bits.mask_bits`."""
    response_mask: Tensor
    """[n] bool, not a slice."""
    cu_seqlens: Tensor
    """[N+1] int32."""
    segments: Segments
    """The same sequences."""
    trainer_logprobs: Tensor
    """[n] log pi_train, 0 where not valid."""
    rollout_logprobs: Tensor
    """[n] log mu, 0 where not valid."""
    advantages: Tensor | None
    """[n], or None where no criterion reads them."""

    @cached_property
    def _measured(self) -> tuple[_Sums, Tensor]:
        """Sums by sequence, and rho [n]. Each step is written over the one before: float64 tokens take much of the
        cache."""
        segments = self.segments
        flags = [segments.flag_column(self.response_mask), segments.flag_column(self.valid)]
        exact = self.delta.to(torch.float64, copy=True)
        columns = [segments.column(exact)]
        columns.append(segments.column(exact.clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)))
        columns.append(segments.column(exact.mul_(LOG2_E).exp2_()))
        return _Sums(*segments.totals(columns, flags).unbind()), exact.to(self.delta.dtype)

    @property
    def ratio(self) -> Tensor:
        """[n] rho of the clamped Delta; 1 where not valid."""
        return self._measured[1]

    @property
    def total(self) -> Tensor:
        """[N] float64, sum of Delta over each response."""
        return self._measured[0].delta

    @cached_property
    def ratio_total(self) -> Tensor:
        """[N] float64, sum of rho over the valid tokens of each sequence."""
        # Every other token has counted as 1.
        return self._measured[0].ratio - (self.cu_seqlens.diff() - self.num_valid)

    @cached_property
    def k3_total(self) -> Tensor:
        """[N] float64, sum of k3 over the valid tokens: of rho, less the sum of 1 + Delta. Rounding leaves 1e-15 per
        token, which is far below any bound."""
        return (self.ratio_total - self._measured[0].clamped - self.num_valid).clamp_(min=0)

    @property
    def num_tokens(self) -> Tensor:
        """[N] float64, response tokens of each sequence."""
        return self._measured[0].tokens

    @property
    def num_valid(self) -> Tensor:
        """[N] float64, valid tokens of each sequence."""
        return self._measured[0].valid

    @cached_property
    def complete(self) -> Tensor:
        """[N] bool, sequences without an invalid token."""
        return self.num_valid == self.num_tokens

    def mean(self, totals: Tensor) -> Tensor:
        """totals [N], summed over the valid tokens of each sequence, by token [N]."""
        return divide_by_count(totals, self.num_valid)


def measure(
    *,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    segments: Segments,
    advantages: Tensor | None = None,
) -> Gap:
    """The gap of some sequences; arguments as in `algorithms.correction.correct`, response_mask not a slice."""
    delta = torch.zeros_like(rollout_logprobs) if old_logprobs is None else old_logprobs - rollout_logprobs
    valid = valid_tokens(delta, rollout_logprobs, response_mask)
    is_valid = mask_bits(valid)
    rollout = keep_where(is_valid, rollout_logprobs)
    return Gap(
        delta=keep_where(is_valid, delta),
        valid=valid,
        valid_bits=is_valid,
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
        segments=segments,
        trainer_logprobs=rollout if old_logprobs is None else keep_where(is_valid, old_logprobs),
        rollout_logprobs=rollout,
        advantages=advantages,
    )


def gaps(
    *,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor | None = None,
) -> Iterator[tuple[slice, Gap]]:
    """Consecutive pieces of a batch: (their tokens, their gap)."""
    chunks = sequence_chunks(cu_seqlens, num_tokens=response_mask.shape[0])
    # All at once: between the tokens of two pieces the code of its many small steps would leave the cache.
    segments = [Segments(part, num_tokens=tokens.stop - tokens.start) for tokens, part in chunks]
    for (tokens, part_cu_seqlens), part_segments in zip(chunks, segments, strict=True):
        yield (
            tokens,
            measure(
                old_logprobs=None if old_logprobs is None else old_logprobs[tokens],
                rollout_logprobs=rollout_logprobs[tokens],
                response_mask=response_mask[tokens].clone(),
                cu_seqlens=part_cu_seqlens,
                segments=part_segments,
                advantages=None if advantages is None else advantages[tokens],
            ),
        )
