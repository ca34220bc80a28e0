"""Per-token surrogates: log-probs, anchor and advantages -> loss of each token, and the tokens that the clip bounds.

`algorithms.loss` picks a surrogate by `LossConfig.surrogate`, multiplies it by the weight and sums. Inputs are finite:
the loss masks before it calls, and gives the tokens off the mask log-prob 0, anchor 0 and advantage 0. Weights and
denominators are not used here. With r = pi_theta / anchor = 1 everywhere, every surrogate has the gradient -A grad log
pi_theta.

T: packed tokens, N: sequences.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from algorithms.config.loss import (
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


class SurrogateFn(Protocol):
    """The signature of a surrogate."""

    def __call__(
        self,
        logprobs: Tensor,
        *,
        anchor_logprobs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        cu_seqlens: Tensor,
        config: Any,
    ) -> Surrogate:
        """The surrogate of every token.

        Args:
            logprobs: [T] float32 with gradient, log pi_theta.
            anchor_logprobs: [T] float32, log-prob under the denominator of the ratio.
            advantages: [T] float32.
            response_mask: [T] bool, the tokens that enter the loss. Off the mask every other input is 0.
            cu_seqlens: [N+1] int32, first token of each sequence.
            config: The config whose `surrogate` names this function.
        """
        ...


def ppo_clip(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: PPOClipConfig,
) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 and a dual clip c, at most -c A.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476;
    dual clip: https://arxiv.org/abs/1912.09729.
    """
    ratio = _ratio(logprobs, anchor_logprobs)
    surrogate = _clip(ratio, advantages, low=1 - config.clip_low, high=1 + config.clip_high)
    if config.dual_clip is None:
        return surrogate
    # For A < 0 the unbounded loss is -max(r, low) A, so the bound is active exactly where r > c > 1.
    bounded = torch.minimum(surrogate.loss, -config.dual_clip * advantages)
    return surrogate._replace(
        loss=torch.where(advantages < 0, bounded, surrogate.loss),
        clipped_high=surrogate.clipped_high | ((advantages < 0) & (surrogate.ratio > config.dual_clip)),
    )


def gspo(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: GSPOConfig,
) -> Surrogate:
    """PPO-clip on s = exp(mean over the response's tokens of log r), one value per response.

    Token t carries sg(s) pi_theta / sg(pi_theta): the value of s, the gradient s grad log pi_theta(t). Averaged over
    the response this is the gradient of s itself. The mean is over the tokens that enter the loss; the others count
    in neither its sum nor its length.

    Source: https://arxiv.org/abs/2507.18071, eq. 5 and 7, token form eq. 13 and 14.
    """
    means = segment_mean((logprobs - anchor_logprobs).detach(), response_mask, cu_seqlens)
    log_ratio = segment_expand(means, cu_seqlens, num_tokens=logprobs.shape[0])
    # Exactly 0 in value; the gradient is that of log pi_theta.
    straight_through = logprobs - logprobs.detach()
    ratio = (straight_through + log_ratio).clamp(-MAX_SEQUENCE_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO).exp()
    return _clip(ratio, advantages, low=1 - config.clip_low, high=1 + config.clip_high)


def cispo(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: CISPOConfig,
) -> Surrogate:
    """-sg(clip(r, low, high)) A log pi_theta: bounds change the size of a token's gradient and never remove it.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5.
    """
    ratio = _ratio(logprobs.detach(), anchor_logprobs)
    return Surrogate(
        loss=-ratio.clamp(config.low, config.high) * advantages * logprobs,
        ratio=ratio,
        clipped_low=ratio < config.low,
        clipped_high=ratio > config.high,
    )


def reinforce(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: ReinforceConfig,
) -> Surrogate:
    """-A log pi_theta: the gradient of the expected reward under the policy that sampled, without a clip."""
    ratio = _ratio(logprobs.detach(), anchor_logprobs)
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return Surrogate(loss=-advantages * logprobs, ratio=ratio, clipped_low=never, clipped_high=never)


def dppo_tv(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: DPPOTVConfig,
) -> Surrogate:
    """-r A with r <= ratio_cap, 0 where the token's probability is too far off and A would push it further.

    A > 0: dropped if p_theta - p_anchor > threshold. A < 0: dropped if p_anchor - p_theta > threshold. The drop is
    decided on detached values. A capped ratio keeps its gradient, ratio_cap A grad log pi_theta.

    Source: https://arxiv.org/abs/2602.04879, eq. 11 to 13; cap: section 5.4.
    """
    moved = logprobs.detach().exp() - anchor_logprobs.exp()
    return _trust_region(
        _capped_ratio(logprobs, anchor_logprobs, cap=config.ratio_cap),
        advantages,
        ratio=_ratio(logprobs.detach(), anchor_logprobs),
        below=moved < -config.threshold,
        above=moved > config.threshold,
    )


def dppo_kl(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: DPPOKLConfig,
) -> Surrogate:
    """`dppo_tv` with KL(Bernoulli(p_anchor) || Bernoulli(p_theta)) > threshold in place of the difference.

    KL = p log(p/q) + (1 - p) log((1 - p) / (1 - q)), nats, p = p_anchor and q = p_theta.

    Source: https://arxiv.org/abs/2602.04879, eq. 11, 12 and 14.
    """
    far = bernoulli_kl(anchor_logprobs, logprobs.detach()) > config.threshold
    return _trust_region(
        _capped_ratio(logprobs, anchor_logprobs, cap=config.ratio_cap),
        advantages,
        ratio=_ratio(logprobs.detach(), anchor_logprobs),
        below=far & (logprobs < anchor_logprobs),
        above=far & (logprobs > anchor_logprobs),
    )


def sapo(
    logprobs: Tensor,
    *,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    config: SAPOConfig,
) -> Surrogate:
    """-f(r) A, f(r) = (4 / tau) sigmoid(tau (r - 1)); tau is temperature_positive where A > 0, else the negative one.

    f'(1) = 4 sigmoid'(0) = 1, so the gradient on-policy is that of -r A. The values differ: f(1) = 2 / tau. No ratio is
    clipped; the gate closes smoothly.

    Source: https://arxiv.org/abs/2511.20347.
    """
    ratio = _ratio(logprobs, anchor_logprobs)
    positive = torch.full_like(advantages, config.temperature_positive)
    temperature = torch.where(advantages > 0, positive, config.temperature_negative)
    gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(loss=-gate * advantages, ratio=ratio.detach(), clipped_low=never, clipped_high=never)


SURROGATES: Final[dict[str, SurrogateFn]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
}


def _ratio(logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """pi_theta / anchor of each token [T]."""
    return bounded_exp(logprobs - anchor_logprobs)


def _clip(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Surrogate:
    """-min(r A, clip(r, low, high) A) for a ratio r [T] with gradient."""
    fixed = ratio.detach()
    return Surrogate(
        loss=-torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        ratio=fixed,
        clipped_low=(advantages < 0) & (fixed < low),
        clipped_high=(advantages > 0) & (fixed > high),
    )


def _capped_ratio(logprobs: Tensor, anchor_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(r, cap) in value; in gradient min(r, cap) grad log pi_theta.

    A plain minimum has no gradient above the cap. There A < 0 is the usual case: the token that must come down most.
    """
    capped = _ratio(logprobs.detach(), anchor_logprobs).clamp(max=cap)
    return capped * (logprobs - logprobs.detach()).exp()


def _trust_region(capped: Tensor, advantages: Tensor, *, ratio: Tensor, below: Tensor, above: Tensor) -> Surrogate:
    """-min(r, cap) A, and 0 with no gradient where A < 0 `below` the region or A > 0 `above` the region."""
    clipped_low = (advantages < 0) & below
    clipped_high = (advantages > 0) & above
    loss = torch.where(clipped_low | clipped_high, 0.0, -capped * advantages)
    return Surrogate(loss=loss, ratio=ratio, clipped_low=clipped_low, clipped_high=clipped_high)
