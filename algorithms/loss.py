"""The policy loss of one micro-batch: log-probs + advantages + correction -> scalar to call backward on, statistics.

    loss = sum over kept tokens of coefficient x weight x surrogate(logprobs, anchor, A)  -  entropy bonus

`algorithms.correction` gives anchor, weight and keep; `algorithms.surrogate` the surrogate; `algorithms.aggregate` the
coefficients, which hold the denominator of the whole optimizer step: losses of micro-batches and ranks are added up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from algorithms.config.loss import LossConfig
from algorithms.correction import Correction
from algorithms.kl import k3
from algorithms.masked import masked_max, masked_sum, require_packed
from algorithms.stats import Stats, max_or_none, mean_or_none
from algorithms.surrogate import SURROGATES, Surrogate, SurrogateTokens

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
    """Statistics of the surrogate: sums and maxima of one or more micro-batches."""

    def metrics(self, *, optimizer_steps: int = 1) -> dict[str, float | None]:
        """`loss/*` and `policy/entropy`. Reads the device; None where there is no token.

        loss/policy is a sum over micro-batches and ranks, divided by the `optimizer_steps` that were merged: the
        aggregated policy loss, without the entropy bonus. clip_frac_low / _high: kept tokens at the lower / upper bound
        of their surrogate (`algorithms.surrogate.Surrogate`); only under cispo do such tokens still have a gradient.
        ratio_mean, ratio_max: the ratio that the bounds act on, over kept tokens: pi_theta / anchor of the token, or of
        its response under gspo, so that a response counts once per token. approx_kl: mean of k3 of the token's log
        pi_theta - log anchor, nats, in every surrogate. approx_kl estimates KL(anchor || pi_theta), without bias where
        the anchor is pi_rollout; with the anchor pi_old the mismatch of the engines is ignored. invalid_tokens: kept
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


class LossOutput(NamedTuple):
    """The contribution of a micro-batch to the optimizer step."""

    loss: Tensor
    """Scalar float32, part of a sum over micro-batches and ranks, always with a graph: every rank runs backward."""
    stats: LossStats
    """Sums and maxima on the device; merge them over micro-batches, reduce them over ranks."""


def policy_loss(
    logprobs: Tensor,
    *,
    entropy: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction,
    coefficients: Tensor,
    loss_config: LossConfig,
) -> LossOutput:
    """Policy loss and entropy bonus of one micro-batch, as a sum: the coefficients already hold the denominator.

    Args:
        logprobs: [T] float32 with gradient, log pi_theta.
        entropy: [T] float32, nats, entropy of pi_theta; None where it was not computed.
        advantages: [T] float32, read on the mask only.
        response_mask: [T] bool, True where the rollout policy sampled the token.
        cu_seqlens: [N+1] int32, first token of each sequence; a sequence is never split over micro-batches.
        correction: From `algorithms.correction.correct`; its weight multiplies every surrogate.
        coefficients: [T] float32 from `algorithms.aggregate.token_coefficients`.
        loss_config: Its type chooses the surrogate.

    Where keep is False the gradient of the policy term is exactly 0. A kept token whose log pi_theta is not finite is
    treated as rejected and counted (`loss/invalid_tokens`). The entropy bonus covers the tokens that have a
    coefficient, whether kept or not.

    Raises:
        ValueError: entropy is None with an entropy bonus; a wrong shape or dtype.
        TypeError: a loss_config without a surrogate.
    """
    require_packed(response_mask, logprobs=logprobs, advantages=advantages, coefficients=coefficients)
    kept = response_mask & correction.keep
    active = kept & torch.isfinite(logprobs)
    # Masked before exp and before the product with A: 0 x inf would be NaN, in the loss and in the gradient.
    theta = torch.where(active, logprobs, 0.0)
    anchor = torch.where(active, correction.anchor, 0.0).detach()
    if loss_config.surrogate not in SURROGATES:
        raise TypeError(
            f"loss must be the config of a surrogate, got {type(loss_config).__name__}. "
            f"Choose one of {', '.join(SURROGATES)}."
        )
    surrogate = SURROGATES[loss_config.surrogate](
        SurrogateTokens(
            logprobs=theta,
            anchor_logprobs=anchor,
            advantages=torch.where(active, advantages, 0.0).detach(),
            response_mask=active,
            cu_seqlens=cu_seqlens,
        ),
        loss_config,
    )
    scale = torch.where(active, coefficients * correction.weight, 0.0).detach()
    policy = (scale * surrogate.loss).sum(dtype=torch.float64)
    loss = policy
    if loss_config.entropy_coef > 0:
        loss = policy - loss_config.entropy_coef * _entropy_sum(entropy, coefficients, response_mask=response_mask)
    stats = loss_stats(
        surrogate,
        log_ratio=theta.detach() - anchor,
        policy=policy,
        active=active,
        invalid=kept & ~active,
        entropy=entropy,
        response_mask=response_mask,
    )
    return LossOutput(loss=loss.to(logprobs.dtype), stats=stats)


def _entropy_sum(entropy: Tensor | None, coefficients: Tensor, *, response_mask: Tensor) -> Tensor:
    """Sum of entropy x coefficient over the response tokens, float64."""
    if entropy is None:
        raise ValueError(
            "loss.entropy_coef > 0 needs the entropy of every token, got entropy=None. "
            "Compute it in the training forward, or set loss.entropy_coef=0."
        )
    require_packed(response_mask, entropy=entropy)
    return masked_sum(entropy.double() * coefficients.detach(), response_mask)


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
        sums = torch.stack([columns[name].double() for name in LOSS_SUMS[1:]]).sum(dim=1)
        return LossStats(
            sums=torch.cat([policy.double().reshape(1), sums]),
            maxes=masked_max(columns["ratio"], active).reshape(1),
        )
