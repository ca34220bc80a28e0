"""Per-token surrogates: log-probs, anchor and advantages -> loss of each token, and what the clip did.

`algorithms.loss` picks one, weighs and sums it. Inputs are finite: the loss masks before it calls. Nothing here
knows about masks or denominators. T: packed tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from algorithms.config import MAX_LOG_RATIO, LossConfig


class Surrogate(NamedTuple):
    """The surrogate of each token, before weight and denominator."""

    loss: Tensor
    """[T] float32, to be minimised; carries the gradient."""
    ratio: Tensor
    """[T] float32, detached pi_theta / anchor, log-ratio clamped to +-MAX_LOG_RATIO."""
    clipped_low: Tensor
    """[T] bool, no gradient because A < 0 and the ratio is already below 1 - clip_low."""
    clipped_high: Tensor
    """[T] bool, no gradient because A > 0 and the ratio is already above 1 + clip_high."""


class SurrogateFn(Protocol):
    """The signature of a surrogate."""

    def __call__(
        self, logprobs: Tensor, *, anchor_logprobs: Tensor, advantages: Tensor, config: LossConfig
    ) -> Surrogate:
        """logprobs [T] with gradient, anchor_logprobs [T], advantages [T] -> Surrogate."""
        ...


def ppo_clip(logprobs: Tensor, *, anchor_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 and a dual clip c, at most -c A.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476;
    dual clip: https://arxiv.org/abs/1912.09729.
    """
    ratio = (logprobs - anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if config.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -config.dual_clip * advantages), loss)
    fixed = ratio.detach()
    return Surrogate(
        loss=loss,
        ratio=fixed,
        clipped_low=(advantages < 0) & (fixed < low),
        clipped_high=(advantages > 0) & (fixed > high),
    )


def reinforce(logprobs: Tensor, *, anchor_logprobs: Tensor, advantages: Tensor, config: LossConfig) -> Surrogate:
    """-A log pi_theta: the gradient of the expected reward under the policy that sampled; nothing is clipped."""
    ratio = (logprobs.detach() - anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(loss=-advantages * logprobs, ratio=ratio, clipped_low=never, clipped_high=never)


SURROGATES: Final[dict[str, SurrogateFn]] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
}
