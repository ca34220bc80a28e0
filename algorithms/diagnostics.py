"""Mismatch and loss statistics: per-token tensors -> a few device scalars -> metrics.

The worker computes `MismatchStats` and `LossStats` per micro-batch, merges them, reduces `sums` with SUM and `maxes`
with MAX over ranks, and calls `metrics()` once per step: the only place where values reach the host.

Mismatch statistics compare pi_old (trainer) with mu = pi_rollout (engine) on the ORIGINAL response mask, before any
bound, in every mode. Invalid tokens leave the means and are counted. A metric without tokens is None, never 0.

T: packed tokens, K: sums, M: maxima.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO
from algorithms.correction import Correction, valid_tokens
from algorithms.kl import k1, k2, k3
from algorithms.masked import require_packed
from algorithms.surrogate import Surrogate

MISMATCH_SUMS: Final = (
    "tokens",
    "valid",
    "k1",
    "k2",
    "k3",
    "abs_logdiff",
    "prob_diff",
    "rho",
    "rho_squared",
    "corrected",
    "weight",
    "weight_squared",
    "clipped",
    "corrected_tokens",
    "kept",
)
MISMATCH_MAXES: Final = ("k3", "abs_logdiff", "prob_diff", "rho")
LOSS_SUMS: Final = ("policy", "active", "ratio", "clipped_low", "clipped_high", "invalid", "entropy", "entropy_tokens")
LOSS_MAXES: Final = ("ratio",)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stats:
    """Sums and maxima that add up over micro-batches and ranks."""

    sums: Tensor
    """[K] float64, reduced over ranks with SUM."""
    maxes: Tensor
    """[M] float64, reduced over ranks with MAX; -inf where there was no token."""

    def merge(self, other: Self) -> Self:
        """The statistics of both, on the device."""
        return replace(self, sums=self.sums + other.sums, maxes=torch.maximum(self.maxes, other.maxes))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MismatchStats(Stats):
    """How far pi_old and mu are apart, and what the correction did about it."""

    def metrics(self) -> dict[str, float | None]:
        """`mismatch/*`: means over valid response tokens. Reads the device; None where there is no such token.

        k1, k2, k3: estimates of KL(mu || pi_old), nats (`algorithms.kl`). abs_logdiff: |Delta|, nats. prob_diff:
        |pi_old - mu| of the sampled token. is/raw: rho = pi_old / mu of the token; is/applied: the weight after its
        bounds, 0 for rejected tokens. ess: (sum w)^2 / (n sum w^2), a fraction. is/clip_frac: tokens whose weight
        was cut. kept_frac: kept / all response tokens. num_tokens, invalid_tokens: counts.
        """
        sums = dict(zip(MISMATCH_SUMS, self.sums.tolist(), strict=True))
        maxes = dict(zip(MISMATCH_MAXES, self.maxes.tolist(), strict=True))
        valid, corrected = sums["valid"], sums["corrected"]
        return {
            "mismatch/k1": _mean(sums["k1"], valid),
            "mismatch/k2": _mean(sums["k2"], valid),
            "mismatch/k3": _mean(sums["k3"], valid),
            "mismatch/k3_max": _max(maxes["k3"], valid),
            "mismatch/abs_logdiff_mean": _mean(sums["abs_logdiff"], valid),
            "mismatch/abs_logdiff_max": _max(maxes["abs_logdiff"], valid),
            "mismatch/prob_diff_mean": _mean(sums["prob_diff"], valid),
            "mismatch/prob_diff_max": _max(maxes["prob_diff"], valid),
            "mismatch/ess/raw_token": _mean(sums["rho"] ** 2, valid * sums["rho_squared"]),
            "mismatch/ess/applied_token": _mean(sums["weight"] ** 2, corrected * sums["weight_squared"]),
            "mismatch/is/raw_mean": _mean(sums["rho"], valid),
            "mismatch/is/raw_max": _max(maxes["rho"], valid),
            "mismatch/is/applied_mean": _mean(sums["weight"], corrected),
            "mismatch/is/clip_frac": _mean(sums["clipped"], corrected),
            "mismatch/kept_frac": _mean(sums["kept"], sums["corrected_tokens"]),
            "mismatch/invalid_tokens": sums["tokens"] - valid,
            "mismatch/num_tokens": sums["tokens"],
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossStats(Stats):
    """What the surrogate did."""

    def metrics(self, *, optimizer_steps: int = 1) -> dict[str, float | None]:
        """`loss/*` and `policy/entropy`. Reads the device; None where there is no token.

        loss/policy is a sum over micro-batches and ranks, divided by the `optimizer_steps` that were merged: it is
        the aggregated policy loss, without the entropy bonus. clip_frac_low / _high: kept tokens without gradient
        because A < 0 and ratio < 1 - clip_low / A > 0 and ratio > 1 + clip_high. ratio_mean: pi_theta / anchor over
        kept tokens. invalid_tokens: kept tokens whose log pi_theta is not finite, left out. policy/entropy: nats,
        over all response tokens.
        """
        sums = dict(zip(LOSS_SUMS, self.sums.tolist(), strict=True))
        maxes = dict(zip(LOSS_MAXES, self.maxes.tolist(), strict=True))
        active = sums["active"]
        return {
            "loss/policy": sums["policy"] / optimizer_steps,
            "loss/clip_frac_low": _mean(sums["clipped_low"], active),
            "loss/clip_frac_high": _mean(sums["clipped_high"], active),
            "loss/ratio_mean": _mean(sums["ratio"], active),
            "loss/ratio_max": _max(maxes["ratio"], active),
            "loss/invalid_tokens": sums["invalid"],
            "policy/entropy": _mean(sums["entropy"], sums["entropy_tokens"]),
        }


def mismatch_stats(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction | None,
) -> MismatchStats:
    """Mismatch statistics of one micro-batch, on its device.

    Args:
        old_logprobs: [T] float32, log pi_old scored by the trainer: never the rollout's own log-probs.
        rollout_logprobs: [T] float32, log mu.
        response_mask: [T] bool, the original mask.
        cu_seqlens: [N+1] int32, first token of each sequence; no statistic here is per sequence yet.
        correction: What was applied; None leaves the metrics of the applied weight None.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    require_packed(response_mask, old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    with torch.no_grad():
        valid = valid_tokens(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, response_mask=response_mask)
        measured = _measured(old_logprobs, rollout_logprobs, valid=valid)
        columns = {
            "tokens": response_mask,
            "valid": valid,
            **measured,
            "rho_squared": measured["rho"].double().square(),
            **_applied(correction, response_mask=response_mask, valid=valid),
        }
        return MismatchStats(sums=_sums(columns, MISMATCH_SUMS), maxes=_maxes(measured, MISMATCH_MAXES, mask=valid))


def mismatch_metrics(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction | None = None,
) -> dict[str, float | None]:
    """`mismatch_stats` of one batch as metrics; arguments as there. Reads the device."""
    return mismatch_stats(
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
        correction=correction,
    ).metrics()


def loss_stats(
    surrogate: Surrogate,
    *,
    policy: Tensor,
    active: Tensor,
    invalid: Tensor,
    entropy: Tensor | None,
    response_mask: Tensor,
) -> LossStats:
    """Loss statistics of one micro-batch, on its device.

    Args:
        surrogate: Its ratio and clip indicators, [T].
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


def _measured(old_logprobs: Tensor, rollout_logprobs: Tensor, *, valid: Tensor) -> dict[str, Tensor]:
    """Per-token statistics of the two log-probs [T], 0 where not valid."""
    delta = torch.where(valid, old_logprobs - rollout_logprobs, 0.0)
    probability_gap = (old_logprobs.exp() - rollout_logprobs.exp()).abs()
    return {
        "k1": k1(delta),
        "k2": k2(delta),
        "k3": k3(delta),
        "abs_logdiff": delta.abs(),
        "prob_diff": torch.where(valid, probability_gap, 0.0),
        "rho": torch.where(valid, delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0.0),
    }


def _applied(correction: Correction | None, *, response_mask: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Per-token statistics of the applied weight [T]; all 0, the counts included, where there is no correction."""
    never = torch.zeros_like(valid)
    if correction is None:
        names = ("corrected", "weight", "weight_squared", "clipped", "corrected_tokens", "kept")
        return dict.fromkeys(names, never)
    kept = valid & correction.keep
    weight = torch.where(kept, correction.weight, 0.0)
    return {
        "corrected": valid,
        "weight": weight,
        "weight_squared": weight.double().square(),
        "clipped": never if correction.clipped is None else correction.clipped & kept,
        "corrected_tokens": response_mask,
        "kept": kept,
    }


def _sums(columns: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    """Sum of each named [T] column -> [K] float64."""
    return torch.stack([columns[name].double() for name in names]).sum(dim=1)


def _maxes(columns: dict[str, Tensor], names: tuple[str, ...], *, mask: Tensor) -> Tensor:
    """Maximum of each named [T] column where mask [T] is True -> [M] float64; -inf for an empty mask."""
    stacked = torch.stack([torch.where(mask, columns[name].double(), -math.inf) for name in names])
    # One more column, because a maximum over T = 0 tokens is an error.
    return torch.cat([stacked, stacked.new_full((len(names), 1), -math.inf)], dim=1).amax(dim=1)


def _mean(total: float, count: float) -> float | None:
    """total / count, None for nothing to divide by."""
    return total / count if count else None


def _max(maximum: float, count: float) -> float | None:
    """The maximum, None where no token was seen."""
    return maximum if count else None
