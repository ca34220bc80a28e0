"""The record that correction and statistics read: the log-probs of both engines for one packed micro-batch.

T: packed tokens, N: sequences. mu = pi_rollout, Delta = log pi_train - log mu, rho = exp(Delta).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from algorithms.masked import divide_by_count, require_packed, require_segments, segment_expand, segment_sum

MAX_ROLLOUT_LOGPROB: Final = 1e-4
"""A rollout log-prob above this is not a log-probability (rounding alone stays below)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """The tokens of N whole sequences, laid end to end. Each derived tensor is computed once.

    Raises ValueError for a wrong shape or dtype, and on a CPU for sequences that do not fit the tokens.
    """

    trainer_logprobs: Tensor | None
    """[T] float32, nats, log pi_train without gradient: the trainer's log-probs that are compared with mu. The values
    are log pi_old, or log pi_theta of the running forward where `CorrectionSpec.compared` is `current` (bypass). None
    where no function reads them: ppo_is, and bypass without a weight or a criterion."""
    rollout_logprobs: Tensor
    """[T] float32, nats, log mu as the engine returned it."""
    response_mask: Tensor
    """[T] bool, True where mu sampled the token."""
    cu_seqlens: Tensor
    """[N+1] int32, first token of each sequence; tokens behind the last entry are padding."""
    advantages: Tensor | None = None
    """[T] float32; needed by criteria and statistics that depend on the advantage."""

    def __post_init__(self) -> None:
        for name in ("trainer_logprobs", "rollout_logprobs", "advantages"):
            if getattr(self, name) is not None:
                require_packed(self.response_mask, **{name: getattr(self, name)})
        require_segments(self.response_mask, self.cu_seqlens)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the record, those that are derived included."""
        names = [name for name, value in vars(type(self)).items() if isinstance(value, cached_property)]
        found = [getattr(self, name) for name in (*names, *self.__dataclass_fields__)]
        return [each for each in found if each is not None]

    @cached_property
    def valid(self) -> Tensor:
        """[T] bool, response tokens with finite log-probs on both sides and log mu <= MAX_ROLLOUT_LOGPROB."""
        train = self.rollout_logprobs if self.trainer_logprobs is None else self.trainer_logprobs
        finite = torch.isfinite(train - self.rollout_logprobs)
        return self.response_mask & finite & (self.rollout_logprobs <= MAX_ROLLOUT_LOGPROB)

    @cached_property
    def train(self) -> Tensor:
        """[T] log pi_train of valid tokens, 0 elsewhere; log mu where the trainer's log-probs are not given."""
        return self.rollout if self.trainer_logprobs is None else torch.where(self.valid, self.trainer_logprobs, 0.0)

    @cached_property
    def rollout(self) -> Tensor:
        """[T] log mu of valid tokens, 0 elsewhere."""
        return torch.where(self.valid, self.rollout_logprobs, 0.0)

    @cached_property
    def delta(self) -> Tensor:
        """[T] log pi_train - log mu of valid tokens, never clamped, 0 elsewhere."""
        return self.train - self.rollout

    @cached_property
    def num_tokens(self) -> Tensor:
        """[N] float64, response tokens of each sequence."""
        return self.total(self.response_mask)

    @cached_property
    def num_valid(self) -> Tensor:
        """[N] float64, valid tokens of each sequence."""
        return self.total(self.valid)

    @cached_property
    def complete(self) -> Tensor:
        """[N] bool, sequences without an invalid token."""
        return self.num_valid == self.num_tokens

    @cached_property
    def delta_total(self) -> Tensor:
        """[N] float64, sum of Delta: the log of the product of rho over the response."""
        return self.total(self.delta)

    @cached_property
    def delta_mean(self) -> Tensor:
        """[N] float64, mean of Delta: the log of the geometric mean of rho over the response."""
        return divide_by_count(self.delta_total, self.num_valid)

    def total(self, values: Tensor) -> Tensor:
        """Sum of values [T] over each sequence -> [N] float64."""
        return segment_sum(values.double(), self.cu_seqlens)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of values [T], 0 where a token is not valid, over the valid tokens of each sequence -> [N] float64."""
        return divide_by_count(self.total(values), self.num_valid)

    def expand(self, values: Tensor) -> Tensor:
        """One value per sequence [N] -> the value of each token's sequence [T]; 0 on padding."""
        return segment_expand(values, self.cu_seqlens, num_tokens=self.response_mask.shape[0])
