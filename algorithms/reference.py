"""KL to a frozen reference policy: log-probs -> a term of the loss, or a cost per token in the reward.

Every function estimates KL(pi_theta || pi_ref) from tokens that pi_theta sampled. L = log pi_theta - log pi_ref. The
mean of the value and the mean of the gradient are different questions (theta, ref: the two policies):

    estimator  value per token          mean value           gradient in the loss    gradient in the reward
    k1         L                        KL(theta || ref)     0 (refused)             grad KL(theta || ref)
    k2         L^2 / 2                  within O(L^3) of it  grad KL(theta || ref)   of no KL
    k3         exp(-L) - 1 + L          KL(theta || ref)     grad KL(ref || theta)   the difference (*)
    unbiased   k3 x pi_theta / pi_old   KL(theta || ref)     grad KL(theta || ref)   (refused)

(*) grad KL(theta || ref) - grad KL(ref || theta): both cancel to first order near pi_ref, where the penalty hardly
acts.

For `unbiased` the table holds under samples of pi_old; for k1, k2 and k3 only while pi_theta is still the policy that
sampled. In the loss the KL is taken for each token given its sampled prefix.
In the reward with returns summed over the response (gamma = 1) the KL is that of whole responses: an early token also
answers for the KL of all later tokens.

`algorithms.kl` states its estimators for tokens of mu and Delta = log pi_train - log mu, the log-ratio AGAINST the
sampler. Here the sampler is pi_theta, so the argument is Delta = log pi_ref - log pi_theta = -L.

Sources: Schulman, http://joschu.net/blog/kl-approx.html; unbiased: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556,
eq. 7. T: packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from algorithms.config.reference import CustomKLEstimator, KLEstimator, KLPlacement, ReferenceKLConfig
from algorithms.kl import bounded_exp, k1, k2, k3
from algorithms.masked import require_packed
from algorithms.stats import Stats, mean_or_none

REFERENCE_SUMS: Final = ("tokens", "invalid", "k1", "k3")


def reference_kl(
    logprobs: Tensor,
    *,
    ref_logprobs: Tensor,
    anchor_logprobs: Tensor | None,
    estimator: KLEstimator | CustomKLEstimator,
) -> Tensor:
    """The estimate of each token -> [T] float32, nats, with the gradient of its formula. Inputs must be finite.

    Args:
        logprobs: [T] float32, log pi_theta.
        ref_logprobs: [T] float32, log pi_ref.
        anchor_logprobs: [T] float32, log-probs of the policy that sampled; needed by `unbiased` only.
        estimator: The formula of the estimate.

    Log-ratios are clamped to +-MAX_LOG_RATIO before exp; a clamped log-ratio has no gradient. Raises ValueError if
    anchor_logprobs is None with `unbiased`.
    """
    if isinstance(estimator, CustomKLEstimator):
        anchor = anchor_logprobs if estimator.reads_anchor else None
        return estimator.fitting(estimator.answer(logprobs, ref_logprobs.detach(), anchor), logprobs)
    log_ratio = ref_logprobs.detach() - logprobs
    match estimator:
        case KLEstimator.k1:
            return k1(log_ratio)
        case KLEstimator.k2:
            return k2(log_ratio)
        case KLEstimator.k3:
            return k3(log_ratio)
        case KLEstimator.unbiased:
            return bounded_exp(logprobs - _needed(anchor_logprobs).detach()) * k3(log_ratio)


def reference_kl_loss(
    logprobs: Tensor,
    *,
    ref_logprobs: Tensor,
    anchor_logprobs: Tensor | None,
    response_mask: Tensor,
    coefficients: Tensor,
    config: ReferenceKLConfig,
) -> Tensor:
    """coef x sum of coefficient x estimate over the response tokens -> scalar float32, to be added to the policy loss.

    Args:
        logprobs: [T] float32 with gradient, log pi_theta.
        ref_logprobs: [T] float32, log pi_ref.
        anchor_logprobs: [T] float32, log-probs of the policy whose expectation the coefficients take: log mu of the
            rollout policy, or log pi_old where the coefficients hold the weight pi_old / mu, or where the mismatch is
            to be ignored. Read by `estimator=unbiased` only; may be None for the other estimators.
        response_mask: [T] bool.
        coefficients: [T] float32 from `algorithms.aggregate.token_coefficients`.
        config: Coefficient and estimator.

    The term is a sum over micro-batches and ranks like the policy loss, and always has a graph. Response tokens with a
    non-finite log-prob are left out; `reference_kl_stats` counts them. Raises ValueError for placement=reward, for
    `unbiased` without anchor_logprobs, and for a wrong shape or dtype.
    """
    if config.placement is not KLPlacement.loss:
        raise ValueError(
            f"reference_kl.placement must be loss for a term of the loss, got {config.placement.name}. "
            "The KL would be counted twice: use reference_kl_penalty."
        )
    require_packed(response_mask, logprobs=logprobs, ref_logprobs=ref_logprobs, coefficients=coefficients)
    active = response_mask & torch.isfinite(logprobs) & torch.isfinite(ref_logprobs)
    if config.estimator.reads_anchor:
        anchor_logprobs = _needed(anchor_logprobs)
        require_packed(response_mask, anchor_logprobs=anchor_logprobs)
        active = active & torch.isfinite(anchor_logprobs)
        anchor_logprobs = torch.where(active, anchor_logprobs, 0.0)
    estimate = reference_kl(
        # Masked before exp and before the product: 0 x inf would be NaN, in the loss and in the gradient.
        torch.where(active, logprobs, 0.0),
        ref_logprobs=torch.where(active, ref_logprobs, 0.0),
        anchor_logprobs=anchor_logprobs,
        estimator=config.estimator,
    )
    scale = torch.where(active, coefficients, 0.0).detach()
    return (config.coef * (scale.double() * estimate).sum()).to(logprobs.dtype)


def reference_kl_penalty(
    logprobs: Tensor, *, ref_logprobs: Tensor, response_mask: Tensor, config: ReferenceKLConfig
) -> Tensor:
    """coef x estimate of each token, detached -> [T] float32, in units of reward, 0 off the mask.

    Args:
        logprobs: [T] float32, log-probs of the policy that the reward belongs to: pi_old.
        ref_logprobs: [T] float32, log pi_ref.
        response_mask: [T] bool.
        config: Coefficient and estimator.

    The penalty is subtracted from the reward: per token by `algorithms.returns.token_rewards`; for one advantage per
    sample as rewards - `algorithms.masked.segment_sum(penalty, cu_seqlens)`, before the baseline. A response token with
    a non-finite log-prob costs 0; `reference_kl_stats` counts such tokens. Raises ValueError for placement=loss, and
    for a wrong shape or dtype.
    """
    if config.placement is not KLPlacement.reward:
        raise ValueError(
            f"reference_kl.placement must be reward for a cost in the reward, got {config.placement.name}. "
            "The KL would be counted twice: use reference_kl_loss."
        )
    require_packed(response_mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    with torch.no_grad():
        active = response_mask & torch.isfinite(logprobs) & torch.isfinite(ref_logprobs)
        estimate = reference_kl(
            torch.where(active, logprobs, 0.0),
            ref_logprobs=torch.where(active, ref_logprobs, 0.0),
            anchor_logprobs=None,
            estimator=config.estimator,
        )
        return config.coef * estimate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReferenceKLStats(Stats):
    """Sums of the distance from the policy to the reference, whatever the coefficient of the KL."""

    def metrics(self) -> dict[str, float | None]:
        """`reference/*`. Reads the device; None where there is no valid response token.

        k1, k3: means over tokens of two estimates of KL(pi || pi_ref), nats; k1 may be negative in a batch.
        invalid_tokens: response tokens with a log-prob that is not finite.
        """
        sums = dict(zip(REFERENCE_SUMS, self.sums.tolist(), strict=True))
        tokens = sums["tokens"]
        return {
            "reference/k1": mean_or_none(sums["k1"], tokens),
            "reference/k3": mean_or_none(sums["k3"], tokens),
            "reference/invalid_tokens": sums["invalid"],
        }


def reference_kl_stats(logprobs: Tensor, *, ref_logprobs: Tensor, response_mask: Tensor) -> ReferenceKLStats:
    """Statistics of one micro-batch, on its device; sums [K] to be reduced with SUM, no maxima.

    Args:
        logprobs: [T] float32, log-probs of the policy that sampled (or of pi_theta close to it).
        ref_logprobs: [T] float32, log pi_ref.
        response_mask: [T] bool.

    Raises ValueError for a wrong shape or dtype.
    """
    require_packed(response_mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    with torch.no_grad():
        active = response_mask & torch.isfinite(logprobs) & torch.isfinite(ref_logprobs)
        log_ratio = torch.where(active, ref_logprobs - logprobs, 0.0)
        columns = (active, response_mask & ~active, k1(log_ratio), k3(log_ratio))
        sums = torch.stack([column.double() for column in columns]).sum(dim=1)
        return ReferenceKLStats(sums=sums, maxes=sums.new_zeros(0))


def _needed(anchor_logprobs: Tensor | None) -> Tensor:
    if anchor_logprobs is None:
        raise ValueError(
            "reference_kl.estimator=unbiased needs anchor_logprobs (the policy that sampled), got None. "
            "Pass them, or use reference_kl.estimator=k2."
        )
    return anchor_logprobs
