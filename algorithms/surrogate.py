"""Per-token surrogates: log-probs, anchor and advantages -> loss of each token, and the tokens that the clip bounds.

`algorithms.loss` picks a surrogate by `LossConfig.surrogate`, multiplies it by the weight and sums. Inputs are finite:
the loss masks before it calls, and gives the tokens off the mask log-prob 0, anchor 0 and advantage 0. Weights and
denominators are not used here. With r = pi_theta / anchor = 1 everywhere, every surrogate has the gradient -A grad log
pi_theta.

T: packed tokens, N: sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from algorithms.config.loss import (
    RATIO_CAP,
    TAU_NEGATIVE,
    TAU_POSITIVE,
    CISPOConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    PPOClipConfig,
    ReinforceConfig,
    SAPOConfig,
)
from algorithms.kl import bernoulli_kl, bounded_exp
from algorithms.masked import segment_expand, segment_mean

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
    """What every surrogate reads of N packed sequences. Off the mask log-prob, anchor and advantage are 0."""

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
