"""The policy loss of one micro-batch: log-probs + advantages + correction -> scalar to call backward on, statistics.

    loss = sum over kept tokens of coefficient x weight x surrogate(logprobs, anchor, A)  -  entropy bonus

`algorithms.correction` gives anchor, weight and keep; `algorithms.surrogate` the surrogate; `algorithms.aggregate` the
coefficients, which hold the denominator of the whole optimizer step: losses of micro-batches and ranks are added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.config import Aggregation, BypassConfig, BypassLoss, CorrectionConfig, LossConfig
from algorithms.correction import Correction
from algorithms.diagnostics import LossStats, loss_stats
from algorithms.masked import masked_sum, require_packed
from algorithms.surrogate import SURROGATES, Surrogate

__all__ = ["Aggregation", "LossConfig", "LossOutput", "LossStats", "policy_loss"]


class LossOutput(NamedTuple):
    """What a micro-batch contributes to the optimizer step."""

    loss: Tensor
    """Scalar float32, part of a sum over micro-batches and ranks. It always has a graph: every rank runs backward."""
    stats: LossStats
    """Sums and maxima on the device; merge them over micro-batches, reduce them over ranks."""


def policy_loss(
    logprobs: Tensor,
    *,
    entropy: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor,
    correction: Correction,
    coefficients: Tensor,
    correction_config: CorrectionConfig,
    loss_config: LossConfig,
) -> LossOutput:
    """Policy loss and entropy bonus of one micro-batch, a sum: nothing is left to divide by.

    Args:
        logprobs: [T] float32 with gradient, log pi_theta.
        entropy: [T] float32, nats, entropy of pi_theta; None where it was not computed.
        advantages: [T] float32, read on the mask only.
        response_mask: [T] bool, True where the rollout policy sampled the token.
        correction: From `algorithms.correction.correct`.
        coefficients: [T] float32 from `algorithms.aggregate.token_coefficients`.
        correction_config: The mode: chooses surrogate and weight.
        loss_config: Clip bounds and entropy coefficient.

    Where keep is False the gradient of the policy term is exactly 0. A kept token whose log pi_theta is not finite
    is treated as rejected and counted (`loss/invalid_tokens`). The entropy bonus covers the tokens that have a
    coefficient, whether kept or not.

    Raises:
        ValueError: entropy is None with an entropy bonus; a wrong shape or dtype.
    """
    require_packed(response_mask, logprobs=logprobs, advantages=advantages, coefficients=coefficients)
    kept = response_mask & correction.keep
    active = kept & torch.isfinite(logprobs)
    surrogate, weight = _surrogate(
        # Masked before exp and before the product with A: 0 x inf would be NaN, in the loss and in the gradient.
        torch.where(active, logprobs, 0.0),
        advantages=torch.where(active, advantages, 0.0),
        correction=correction._replace(anchor_logprobs=torch.where(active, correction.anchor_logprobs, 0.0)),
        correction_config=correction_config,
        loss_config=loss_config,
    )
    scale = torch.where(active, coefficients * weight, 0.0).detach()
    policy = (scale * surrogate.loss).sum(dtype=torch.float64)
    loss = policy
    if loss_config.entropy_coef > 0:
        loss = policy - loss_config.entropy_coef * _entropy_sum(entropy, coefficients, response_mask=response_mask)
    stats = loss_stats(
        surrogate,
        policy=policy,
        active=active,
        invalid=kept & ~active,
        entropy=entropy,
        response_mask=response_mask,
    )
    return LossOutput(loss=loss.to(logprobs.dtype), stats=stats)


def _surrogate(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    correction: Correction,
    correction_config: CorrectionConfig,
    loss_config: LossConfig,
) -> tuple[Surrogate, Tensor]:
    """The surrogate of the mode and its detached weight [T]. All inputs are finite."""
    anchor = correction.anchor_logprobs
    match correction_config:
        case BypassConfig(loss=BypassLoss.reinforce, cap=cap):
            surrogate = SURROGATES["reinforce"](
                logprobs, anchor_logprobs=anchor, advantages=advantages, config=loss_config
            )
            # The weight follows pi_theta, so it also covers the drift since the rollout.
            return surrogate, surrogate.ratio.clamp(max=cap)
        case _:
            surrogate = SURROGATES["ppo_clip"](
                logprobs, anchor_logprobs=anchor, advantages=advantages, config=loss_config
            )
            return surrogate, correction.weight


def _entropy_sum(entropy: Tensor | None, coefficients: Tensor, *, response_mask: Tensor) -> Tensor:
    """Sum of entropy x coefficient over the response tokens, float64."""
    if entropy is None:
        raise ValueError(
            "loss.entropy_coef > 0 needs the entropy of every token, got entropy=None. "
            "Compute it in the training forward, or set loss.entropy_coef=0."
        )
    require_packed(response_mask, entropy=entropy)
    return masked_sum(entropy.double() * coefficients.detach(), response_mask)
