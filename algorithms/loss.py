"""The policy loss of one micro-batch: log-probs + advantages + correction -> scalar to call backward on, statistics.

    loss = sum over kept tokens of coefficient x weight x surrogate(logprobs, anchor, A)  -  entropy bonus

`algorithms.correction` gives anchor, weight and keep; `algorithms.surrogate` the surrogate; `algorithms.aggregate` the
coefficients, which hold the denominator of the whole optimizer step: losses of micro-batches and ranks are added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.config.loss import (
    Aggregation,
    CISPOConfig,
    DPPOConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from algorithms.correction import Correction
from algorithms.diagnostics import LossStats, loss_stats
from algorithms.masked import masked_sum, require_packed
from algorithms.surrogate import SURROGATES, SurrogateFn

__all__ = [
    "Aggregation",
    "CISPOConfig",
    "DPPOConfig",
    "DPPOKLConfig",
    "DPPOTVConfig",
    "GSPOConfig",
    "LossConfig",
    "LossOutput",
    "LossStats",
    "PPOClipConfig",
    "ReinforceConfig",
    "SAPOConfig",
    "policy_loss",
]


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
    cu_seqlens: Tensor,
    correction: Correction,
    coefficients: Tensor,
    loss_config: LossConfig,
) -> LossOutput:
    """Policy loss and entropy bonus of one micro-batch, a sum: nothing is left to divide by.

    Args:
        logprobs: [T] float32 with gradient, log pi_theta.
        entropy: [T] float32, nats, entropy of pi_theta; None where it was not computed.
        advantages: [T] float32, read on the mask only.
        response_mask: [T] bool, True where the rollout policy sampled the token.
        cu_seqlens: [N+1] int32, first token of each sequence; a sequence is never split over micro-batches.
        correction: From `algorithms.correction.correct`; its weight multiplies every surrogate.
        coefficients: [T] float32 from `algorithms.aggregate.token_coefficients`.
        loss_config: Its type chooses the surrogate.

    Where keep is False the gradient of the policy term is exactly 0. A kept token whose log pi_theta is not finite
    is treated as rejected and counted (`loss/invalid_tokens`). The entropy bonus covers the tokens that have a
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
    anchor = torch.where(active, correction.anchor_logprobs, 0.0).detach()
    surrogate = _surrogate_of(loss_config)(
        theta,
        anchor_logprobs=anchor,
        advantages=torch.where(active, advantages, 0.0).detach(),
        response_mask=active,
        cu_seqlens=cu_seqlens,
        config=loss_config,
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


def _surrogate_of(loss_config: LossConfig) -> SurrogateFn:
    """The surrogate that the type of the config names."""
    surrogate = SURROGATES.get(loss_config.surrogate)
    if surrogate is None:
        raise TypeError(
            f"loss must be the config of a surrogate, got {type(loss_config).__name__}. "
            f"Choose one of {', '.join(SURROGATES)}."
        )
    return surrogate


def _entropy_sum(entropy: Tensor | None, coefficients: Tensor, *, response_mask: Tensor) -> Tensor:
    """Sum of entropy x coefficient over the response tokens, float64."""
    if entropy is None:
        raise ValueError(
            "loss.entropy_coef > 0 needs the entropy of every token, got entropy=None. "
            "Compute it in the training forward, or set loss.entropy_coef=0."
        )
    require_packed(response_mask, entropy=entropy)
    return masked_sum(entropy.double() * coefficients.detach(), response_mask)
