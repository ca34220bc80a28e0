"""Rewards of a step -> one advantage per sample, against the other samples of the same prompt or of the step.

The driver calls this once per rollout step with all samples; `algorithms.loss` takes the result per token. Advantages
that differ from token to token are in `algorithms.returns`.

Groups may have different sizes; a group of one has no baseline and gets 0. No value is read on the host.

`kept` is for a correction that rejects whole responses: mean, standard deviation and the other samples of a formula are
then computed from the kept samples alone. A rejected sample is measured against the kept ones, which has no effect on
the loss. Without a kept sample to measure against, or without any spread to divide by, the advantage is 0.

N: samples of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.config.advantage import CustomEstimator, Estimator
from algorithms.returns import moments


class StepRewards(NamedTuple):
    """The samples of a step as the formulas read them; float64, so that equal float32 rewards deviate by exactly 0."""

    rewards: Tensor
    """[N] float64."""
    deviation: Tensor
    """[N] float64, reward - mean reward of the kept samples of the group; 0 where there are none."""
    group: Tensor
    """[N] int64, dense number of each sample's group."""
    size: Tensor
    """[N] float64, kept samples in each sample's group."""
    kept: Tensor
    """[N] bool, the samples that form the baseline."""
    num_tokens: Tensor | None
    """[N] response tokens of each sample; read by the estimators that whiten over tokens."""
    epsilon: float
    """Added to a standard deviation, in units of reward."""


def sample_advantages(
    estimator: Estimator | CustomEstimator,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """One advantage per sample -> [N] float32.

    Args:
        estimator: The formula; `gae`, with one advantage per token, is in `algorithms.returns`.
        rewards: [N] float32.
        group_ids: [N] int64, any values in any order; equal for samples of the same prompt.
        epsilon: Added to a standard deviation, in units of reward.
        num_tokens: [N] response tokens of each sample; read by the estimators that whiten over tokens.
        kept: [N] bool, the samples that form the baseline; None for all.

    Raises ValueError for a wrong shape, and if num_tokens is None and the estimator whitens over tokens.
    """
    for name, tensor in (("group_ids", group_ids), ("num_tokens", num_tokens), ("kept", kept)):
        if tensor is not None and (rewards.dim() != 1 or rewards.shape != tensor.shape):
            raise ValueError(f"rewards and {name} must both be [N], got {list(rewards.shape)} and {list(tensor.shape)}")
    group, values = _dense(group_ids), rewards.double()
    kept = torch.ones_like(rewards, dtype=torch.bool) if kept is None else kept
    size = _group_sum(kept.double(), group)
    mean = _group_sum(torch.where(kept, values, 0.0), group) / size.clamp(min=1)
    deviation = torch.where(size > 0, values - mean, 0.0)
    step = StepRewards(values, deviation, group, size, kept, num_tokens, epsilon)
    if isinstance(estimator, CustomEstimator):
        return estimator.fitting(estimator.answer(step), rewards, finite=True).float()
    return ADVANTAGES[estimator](step).float()


def grpo(step: StepRewards) -> Tensor:
    """(r - mean) / (std + epsilon) with the n - 1 standard deviation of the group; 0 where all rewards are equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    squares = _group_sum(torch.where(step.kept, step.deviation.square(), 0.0), step.group)
    variance = squares / (step.size - 1).clamp(min=1)
    # A rejected sample may deviate from kept samples that are all equal; such a deviation must not be divided by
    # epsilon alone.
    return torch.where(variance > 0, step.deviation / (variance.sqrt() + step.epsilon), 0.0)


def dr_grpo(step: StepRewards) -> Tensor:
    """r - mean of the group. Source: https://arxiv.org/abs/2503.20783."""
    return step.deviation


def rloo(step: StepRewards) -> Tensor:
    """r - mean of the other samples of the group, = (r - mean) n / (n - 1). Source: https://arxiv.org/abs/2402.14740."""
    # The mean does not contain a rejected sample, so all kept samples are its others.
    others = step.size - step.kept.double()
    return step.deviation * step.size / others.clamp(min=1)


def reinforce(step: StepRewards) -> Tensor:
    """r: no baseline. Source: Williams (1992), https://doi.org/10.1007/BF00992696."""
    return step.rewards


def reinforce_pp(step: StepRewards) -> Tensor:
    """(r - mean) / (std + epsilon) over all response tokens of the step: a sample counts with its `num_tokens`.

    Groups are not used. The standard deviation is the biased one, for the reasons in `algorithms.returns.whiten`.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, for rewards on the last token and gamma = 1.
    """
    return _whiten(step.rewards, step)


def reinforce_pp_baseline(step: StepRewards) -> Tensor:
    """r - mean of the group, whitened over all response tokens of the step as in `reinforce_pp`.

    Whitening moves every sample: a group of equal rewards, or of one, gets -mean / (std + epsilon), not 0.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, the variant with a baseline.
    """
    return torch.where(step.size > 0, _whiten(step.deviation, step), 0.0)


ADVANTAGES: Final[dict[Estimator, Callable[[StepRewards], Tensor]]] = {
    Estimator.grpo: grpo,
    Estimator.dr_grpo: dr_grpo,
    Estimator.rloo: rloo,
    Estimator.reinforce: reinforce,
    Estimator.reinforce_pp: reinforce_pp,
    Estimator.reinforce_pp_baseline: reinforce_pp_baseline,
}
"""Estimator -> formula of one advantage per sample [N]."""


def _whiten(values: Tensor, step: StepRewards) -> Tensor:
    """Values [N] standardised over the response tokens of the kept samples -> [N] float64."""
    if step.num_tokens is None:
        raise ValueError(
            "num_tokens must hold the response tokens of each sample for an estimator that whitens over tokens, "
            "got None. Pass it, or use advantage.estimator=grpo or rloo."
        )
    return moments(values, torch.where(step.kept, step.num_tokens, 0)).standardise(values, epsilon=step.epsilon)


def _dense(group_ids: Tensor) -> Tensor:
    """Group ids -> numbers below N. Sorting, unlike unique(), has an output size that the host knows."""
    ordered, order = torch.sort(group_ids)
    starts = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(group_ids).scatter(0, order, starts.cumsum(0))


def _group_sum(values: Tensor, number: Tensor) -> Tensor:
    """Sum of values [N] over each sample's group -> [N]."""
    return torch.zeros_like(values).index_add(0, number, values)[number]
