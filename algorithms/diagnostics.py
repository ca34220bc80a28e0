"""Mismatch and loss statistics: per-token tensors -> a few device tensors -> metrics.

The worker computes `MismatchStats` and `LossStats` per micro-batch, merges them, reduces `sums` with SUM and `maxes`
with MAX over ranks, and calls `metrics()` once per step: the only place where values reach the host.

Mismatch statistics compare pi_old (trainer) with mu = pi_rollout (engine) on the ORIGINAL response mask, before any
bound, in every mode. Invalid tokens leave the means and are counted. A metric without tokens is None, never 0.
`algorithms.mismatch_stats` adds up, `algorithms.mismatch_report` divides.

T: packed tokens, N: sequences, K: sums, M: maxima.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from algorithms.config import CorrectionConfig
from algorithms.correction import Correction, Pieces, applied_to, require_inputs
from algorithms.gap import gaps
from algorithms.kl import k3
from algorithms.masked import require_packed
from algorithms.mismatch_report import MismatchStats
from algorithms.mismatch_stats import MismatchSums, StepContext
from algorithms.stats import Stats, max_or_none, mean_or_none
from algorithms.surrogate import Surrogate

__all__ = [
    "LossStats",
    "MismatchStats",
    "Stats",
    "StepContext",
    "correct_and_measure",
    "loss_stats",
    "mismatch_metrics",
    "mismatch_stats",
]

LOSS_SUMS: Final = (
    "policy",
    "active",
    "ratio",
    "approx_kl",
    "clipped_low",
    "clipped_high",
    "invalid",
    "entropy",
    "entropy_tokens",
)
LOSS_MAXES: Final = ("ratio",)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossStats(Stats):
    """What the surrogate did."""

    def metrics(self, *, optimizer_steps: int = 1) -> dict[str, float | None]:
        """`loss/*` and `policy/entropy`. Reads the device; None where there is no token.

        loss/policy is a sum over micro-batches and ranks, divided by the `optimizer_steps` that were merged: it is
        the aggregated policy loss, without the entropy bonus. clip_frac_low / _high: kept tokens at the lower / upper
        bound of their surrogate (`algorithms.surrogate.Surrogate`); only under cispo do they still have a gradient.
        ratio_mean, ratio_max: the ratio that the bounds act on, over kept tokens: pi_theta / anchor of the token, or
        of its response under gspo, so that a response counts once per token. approx_kl: mean of k3 of the token's
        log pi_theta - log anchor, nats, in every surrogate. It estimates KL(anchor || pi_theta), without bias where
        the anchor is pi_rollout; anchored on pi_old it ignores the mismatch of the engines. invalid_tokens: kept
        tokens whose log pi_theta is not finite, left out. policy/entropy: nats, over all response tokens.
        """
        sums = dict(zip(LOSS_SUMS, self.sums.tolist(), strict=True))
        maxes = dict(zip(LOSS_MAXES, self.maxes.tolist(), strict=True))
        active = sums["active"]
        return {
            "loss/policy": sums["policy"] / optimizer_steps,
            "loss/clip_frac_low": mean_or_none(sums["clipped_low"], active),
            "loss/clip_frac_high": mean_or_none(sums["clipped_high"], active),
            "loss/ratio_mean": mean_or_none(sums["ratio"], active),
            "loss/ratio_max": max_or_none(maxes["ratio"], active),
            "loss/approx_kl": mean_or_none(sums["approx_kl"], active),
            "loss/invalid_tokens": sums["invalid"],
            "policy/entropy": mean_or_none(sums["entropy"], sums["entropy_tokens"]),
        }

    def scaled(self, *, policy: Tensor) -> Self:
        """The same statistics with the policy loss multiplied by `policy`, a scalar on the device.

        For a factor that is known only after the last micro-batch and is applied to the gradient there.
        """
        factors = torch.ones_like(self.sums)
        factors[LOSS_SUMS.index("policy")] = policy
        return replace(self, sums=self.sums * factors)


def mismatch_stats(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction | None,
    context: StepContext | None = None,
) -> MismatchStats:
    """Mismatch statistics of one micro-batch, on its device.

    Args:
        old_logprobs: [T] float32, log pi_old scored by the trainer: never the rollout's own log-probs.
        rollout_logprobs: [T] float32, log mu.
        response_mask: [T] bool, the original mask.
        cu_seqlens: [N+1] int32, first token of each sequence.
        correction: What was applied; None leaves the metrics of the applied weight and of rejection None.
        context: Advantages, rewards, entropy and weight lags, each for the metrics that need it.

    The metrics and their formulas stand at the top of `algorithms.mismatch_report`.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    require_packed(response_mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    sums = MismatchSums(response_mask, cu_seqlens, StepContext() if context is None else context)
    with torch.no_grad():
        for tokens, gap in gaps(
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            response_mask=response_mask,
            cu_seqlens=cu_seqlens,
        ):
            sums.add(tokens, gap, None if correction is None else applied_to(gap, correction, tokens))
        return _joined(sums, correction)


def correct_and_measure(
    config: CorrectionConfig,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    context: StepContext | None = None,
) -> tuple[Correction, MismatchStats]:
    """`correct` and `mismatch_stats` in one pass over the tokens; arguments and errors as there."""
    context = StepContext() if context is None else context
    spec = require_inputs(config, old_logprobs, rollout_logprobs, response_mask, context.advantages)
    sums, pieces = MismatchSums(response_mask, cu_seqlens, context), Pieces(spec, rollout_logprobs)
    with torch.no_grad():
        for tokens, gap in gaps(
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            response_mask=response_mask,
            cu_seqlens=cu_seqlens,
            advantages=context.advantages,
        ):
            sums.add(tokens, gap, pieces.add(tokens, gap))
        correction = pieces.joined()
        return correction, _joined(sums, correction)


def _joined(sums: MismatchSums, correction: Correction | None) -> MismatchStats:
    total, maxes = sums.joined(correction)
    return MismatchStats(sums=total, maxes=maxes, criteria=() if correction is None else correction.criteria)


def mismatch_metrics(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction | None = None,
    context: StepContext | None = None,
) -> dict[str, float | None]:
    """`mismatch_stats` of one batch as metrics; arguments as there. Reads the device."""
    return mismatch_stats(
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
        correction=correction,
        context=context,
    ).metrics()


def loss_stats(
    surrogate: Surrogate,
    *,
    log_ratio: Tensor,
    policy: Tensor,
    active: Tensor,
    invalid: Tensor,
    entropy: Tensor | None,
    response_mask: Tensor,
) -> LossStats:
    """Loss statistics of one micro-batch, on its device.

    Args:
        surrogate: Its ratio and clip indicators, [T].
        log_ratio: [T] float32, log pi_theta - log anchor of each token, nats.
        policy: Scalar, the micro-batch's part of the policy loss.
        active: [T] bool, tokens that entered the loss.
        invalid: [T] bool, kept tokens left out for a non-finite log pi_theta.
        entropy: [T] float32, nats, or None.
        response_mask: [T] bool.
    """
    with torch.no_grad():
        never = torch.zeros_like(active)
        columns = {
            "active": active,
            "ratio": torch.where(active, surrogate.ratio, 0.0),
            "approx_kl": torch.where(active, k3(log_ratio), 0.0),
            "clipped_low": surrogate.clipped_low & active,
            "clipped_high": surrogate.clipped_high & active,
            "invalid": invalid,
            "entropy": never if entropy is None else torch.where(response_mask, entropy, 0.0),
            "entropy_tokens": never if entropy is None else response_mask,
        }
        per_token = _sums(columns, LOSS_SUMS[1:])
        return LossStats(
            sums=torch.cat([policy.double().reshape(1), per_token]),
            maxes=_maxes(columns, LOSS_MAXES, mask=active),
        )


def _sums(columns: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Sum of each named [T] column -> [K] float64."""
    return torch.stack([columns[name].double() for name in names]).sum(dim=1)


def _maxes(columns: dict[str, Tensor], names: tuple[str, ...], *, mask: Tensor) -> Tensor:
    """Maximum of each named [T] column where mask [T] is True -> [M] float64; -inf for an empty mask."""
    stacked = torch.stack([torch.where(mask, columns[name].double(), -math.inf) for name in names])
    # One more column, because a maximum over T = 0 tokens is an error.
    return torch.cat([stacked, stacked.new_full((len(names), 1), -math.inf)], dim=1).amax(dim=1)
