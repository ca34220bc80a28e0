"""The policy loss of one micro-batch: log-probs + advantages + correction -> scalar to call backward on, statistics.

    loss = sum over kept tokens of coefficient x weight x surrogate(logprobs, anchor, A)  -  entropy bonus

`algorithms.correction` gives anchor, weight and keep; `algorithms.aggregate` the coefficients, which hold the
denominator of the whole optimizer step: losses of micro-batches and ranks are added up. The type of the loss config
chooses the surrogate, a row of `SURROGATES`. Surrogates get finite inputs: the tokens off the mask have log-prob 0,
anchor 0 and advantage 0. With r = pi_theta / anchor = 1 everywhere, every surrogate has the gradient -A grad log
pi_theta.

T: packed tokens, N: sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from algorithms.config.loss import (
    RATIO_CAP,
    TAU_NEGATIVE,
    TAU_POSITIVE,
    CISPOConfig,
    CustomLoss,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from algorithms.correction import Correction
from algorithms.kl import bernoulli_kl, bounded_exp, k3
from algorithms.masked import masked_max, masked_sum, require_packed, segment_expand, segment_mean
from algorithms.stats import Stats, max_or_none, mean_or_none

MAX_SEQUENCE_LOG_RATIO: Final = 10.0
"""Bound on |mean log-ratio| of a response before exp."""


class Surrogate(NamedTuple):
    """The surrogate of each token, before weight and denominator. Everything but `loss` is detached."""

    loss: Tensor
    """[T] float32, to be minimised; carries the gradient."""
    ratio: Tensor
    """[T] float32, the ratio that the bounds act on, before any bound: pi_theta / anchor of the token, or of its
    response (gspo). Its logarithm is clamped: to +-MAX_LOG_RATIO, gspo to +-MAX_SEQUENCE_LOG_RATIO."""
    clipped_low: Tensor
    """[T] bool, the lower bound is active. cispo: the ratio was raised to `low`, and the token still has a gradient.
    All others: no gradient, because A < 0 and pi_theta is already too far below the anchor."""
    clipped_high: Tensor
    """[T] bool, the upper bound is active. cispo: the ratio was cut to `high`, and the token still has a gradient.
    All others: no gradient, because A > 0 and pi_theta is already too far above the anchor, or because of the dual
    clip."""


class SurrogateTokens(NamedTuple):
    """The input of a surrogate: N packed sequences. Off the mask log-prob, anchor and advantage are 0."""

    logprobs: Tensor
    """[T] float32 with gradient, log pi_theta."""
    anchor_logprobs: Tensor
    """[T] float32, log-prob under the denominator of the ratio."""
    advantages: Tensor
    """[T] float32."""
    response_mask: Tensor
    """[T] bool, the tokens that enter the loss."""
    cu_seqlens: Tensor
    """[N+1] int32, first token of each sequence."""
    rollout_logprobs: Tensor | None = None
    """[T] float32, log mu; 0 off the mask. Read by losses of a user alone."""

    def ratio(self) -> Tensor:
        """r = pi_theta / anchor of each token [T], with gradient."""
        return bounded_exp(self.logprobs - self.anchor_logprobs)

    def fixed_ratio(self) -> Tensor:
        """r without gradient [T]."""
        return bounded_exp(self.logprobs.detach() - self.anchor_logprobs)


def ppo_clip(tokens: SurrogateTokens, config: PPOClipConfig) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 and a dual clip c, at most -c A.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476;
    dual clip: https://arxiv.org/abs/1912.09729.
    """
    surrogate = _clip(tokens.ratio(), tokens.advantages, low=1 - config.clip_low, high=1 + config.clip_high)
    if config.dual_clip is None:
        return surrogate
    # For A < 0 the unbounded loss is -max(r, low) A, so the bound is active exactly where r > c > 1.
    bounded, negative = torch.minimum(surrogate.loss, -config.dual_clip * tokens.advantages), tokens.advantages < 0
    return surrogate._replace(
        loss=torch.where(negative, bounded, surrogate.loss),
        clipped_high=surrogate.clipped_high | (negative & (surrogate.ratio > config.dual_clip)),
    )


def gspo(tokens: SurrogateTokens, config: GSPOConfig) -> Surrogate:
    """PPO-clip on s = exp(mean over the response's tokens of log r), one value per response.

    Token t carries sg(s) pi_theta / sg(pi_theta): the value of s, the gradient s grad log pi_theta(t). Averaged over
    the response this is the gradient of s itself. The mean is over the tokens that enter the loss; the others count
    in neither its sum nor its length.

    Source: https://arxiv.org/abs/2507.18071, eq. 5 and 7, token form eq. 13 and 14.
    """
    logprobs, fixed = tokens.logprobs, tokens.logprobs.detach()
    means = segment_mean(fixed - tokens.anchor_logprobs, tokens.response_mask, tokens.cu_seqlens)
    log_ratio = segment_expand(means, tokens.cu_seqlens, num_tokens=logprobs.shape[0])
    # Exactly 0 in value; the gradient is that of log pi_theta.
    straight_through = logprobs - fixed
    ratio = (straight_through + log_ratio).clamp(-MAX_SEQUENCE_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO).exp()
    return _clip(ratio, tokens.advantages, low=1 - config.clip_low, high=1 + config.clip_high)


def cispo(tokens: SurrogateTokens, config: CISPOConfig) -> Surrogate:
    """-sg(clip(r, low, high)) A log pi_theta: bounds change the size of a token's gradient and never remove it.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5.
    """
    ratio = tokens.fixed_ratio()
    return Surrogate(
        loss=-ratio.clamp(config.low, config.high) * tokens.advantages * tokens.logprobs,
        ratio=ratio,
        clipped_low=ratio < config.low,
        clipped_high=ratio > config.high,
    )


def reinforce(tokens: SurrogateTokens, config: ReinforceConfig) -> Surrogate:
    """-A log pi_theta: the gradient of the expected reward under the policy that sampled, without a clip."""
    ratio = tokens.fixed_ratio()
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(loss=-tokens.advantages * tokens.logprobs, ratio=ratio, clipped_low=never, clipped_high=never)


def dppo_tv(tokens: SurrogateTokens, config: DPPOTVConfig) -> Surrogate:
    """-r A with r <= RATIO_CAP, 0 where the token's probability is too far off and A would push it further.

    A > 0: dropped if p_theta - p_anchor > threshold. A < 0: dropped if p_anchor - p_theta > threshold. The drop is
    decided on detached values. A capped ratio keeps its gradient, RATIO_CAP A grad log pi_theta.

    Source: https://arxiv.org/abs/2602.04879, eq. 11 to 13; cap: section 5.4.
    """
    moved = tokens.logprobs.detach().exp() - tokens.anchor_logprobs.exp()
    below, above = moved < -config.threshold, moved > config.threshold
    return _trust_region(tokens, below=below, above=above)


def dppo_kl(tokens: SurrogateTokens, config: DPPOKLConfig) -> Surrogate:
    """`dppo_tv` with KL(Bernoulli(p_anchor) || Bernoulli(p_theta)) > threshold in place of the difference.

    KL = p log(p/q) + (1 - p) log((1 - p) / (1 - q)), nats, p = p_anchor and q = p_theta.

    Source: https://arxiv.org/abs/2602.04879, eq. 11, 12 and 14.
    """
    logprobs, anchor = tokens.logprobs.detach(), tokens.anchor_logprobs
    far = bernoulli_kl(anchor, logprobs) > config.threshold
    return _trust_region(tokens, below=far & (logprobs < anchor), above=far & (logprobs > anchor))


def sapo(tokens: SurrogateTokens, config: SAPOConfig) -> Surrogate:
    """-f(r) A, f(r) = (4 / tau) sigmoid(tau (r - 1)); tau is TAU_POSITIVE where A > 0, else TAU_NEGATIVE.

    f'(1) = 4 sigmoid'(0) = 1, so the gradient on-policy is that of -r A. The values differ: f(1) = 2 / tau. No ratio is
    clipped; the gate closes smoothly.

    Source: https://arxiv.org/abs/2511.20347.
    """
    ratio, advantages = tokens.ratio(), tokens.advantages
    temperature = torch.full_like(advantages, TAU_NEGATIVE).masked_fill(advantages > 0, TAU_POSITIVE)
    gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(loss=-gate * advantages, ratio=ratio.detach(), clipped_low=never, clipped_high=never)


SURROGATES: Final[dict[str, Callable[[SurrogateTokens, Any], Surrogate]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
}
"""Name of a surrogate -> function of the tokens and of the config that names it."""


def _clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """-min(r A, clip(r, low, high) A) for a ratio r [T] with gradient."""
    fixed = ratio.detach()
    return Surrogate(
        loss=-torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        ratio=fixed,
        clipped_low=(advantages < 0) & (fixed < low),
        clipped_high=(advantages > 0) & (fixed > high),
    )


def _trust_region(tokens: SurrogateTokens, *, below: Tensor, above: Tensor) -> Surrogate:
    """-min(r, RATIO_CAP) A, and 0 with no gradient where A < 0 `below` the region or A > 0 `above` the region.

    The gradient of min(r, RATIO_CAP) is min(r, RATIO_CAP) grad log pi_theta. A plain minimum has no gradient above the
    cap. There A < 0 is the usual case: the token that must come down most.
    """
    ratio, advantages = tokens.fixed_ratio(), tokens.advantages
    capped = ratio.clamp(max=RATIO_CAP) * (tokens.logprobs - tokens.logprobs.detach()).exp()
    clipped_low = (advantages < 0) & below
    clipped_high = (advantages > 0) & above
    loss = torch.where(clipped_low | clipped_high, 0.0, -capped * advantages)
    return Surrogate(loss=loss, ratio=ratio, clipped_low=clipped_low, clipped_high=clipped_high)


LOSS_SUMS: Final = (
    "policy", "active", "ratio", "approx_kl", "clipped_low", "clipped_high", "invalid", "entropy", "entropy_tokens",
)  # fmt: skip
LOSS_MAXES: Final = ("ratio",)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossStats(Stats):
    """Statistics of the surrogate: sums and maxima of one or more micro-batches."""

    def metrics(self, *, optimizer_steps: int = 1) -> dict[str, float | None]:
        """`loss/*` and `policy/entropy`. Reads the device; None where there is no token.

        loss/policy is a sum over micro-batches and ranks, divided by the `optimizer_steps` that were merged: the
        aggregated policy loss, without the entropy bonus. clip_frac_low / _high: kept tokens at the lower / upper bound
        of their surrogate (`Surrogate`); only under cispo do such tokens still have a gradient.
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

    Raises ValueError if entropy is None with an entropy bonus, and for a wrong shape or dtype; TypeError for a
    loss_config without a surrogate.
    """
    require_packed(response_mask, logprobs=logprobs, advantages=advantages, coefficients=coefficients)
    kept = response_mask & correction.keep
    active = kept & torch.isfinite(logprobs)
    # Masked before exp and before the product with A: 0 x inf would be NaN, in the loss and in the gradient.
    theta = torch.where(active, logprobs, 0.0)
    anchor = torch.where(active, correction.anchor, 0.0).detach()
    tokens = SurrogateTokens(
        logprobs=theta,
        anchor_logprobs=anchor,
        advantages=torch.where(active, advantages, 0.0).detach(),
        response_mask=active,
        cu_seqlens=cu_seqlens,
    )
    if isinstance(loss_config, CustomLoss):
        mu = None if correction.rollout is None else torch.where(active, correction.rollout, 0.0)
        tokens = tokens._replace(rollout_logprobs=mu)
        surrogate = loss_config.answer(tokens)
        if not isinstance(surrogate, Surrogate):
            raise ValueError(f"{loss_config.source} must return a Surrogate, got {type(surrogate).__name__}")
        loss_config.fitting(surrogate.loss, theta, finite=True)
        loss_config.fitting(surrogate.ratio, theta.detach())
        for bounded in (surrogate.clipped_low, surrogate.clipped_high):
            loss_config.fitting(bounded, active)
    elif loss_config.surrogate in SURROGATES:
        surrogate = SURROGATES[loss_config.surrogate](tokens, loss_config)
    else:
        raise TypeError(
            f"loss must be the config of a surrogate, got {type(loss_config).__name__}. "
            f"Choose one of {', '.join(SURROGATES)}."
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
            sums=torch.cat([policy.double().reshape(1), sums]), maxes=masked_max(columns["ratio"], active).reshape(1)
        )
