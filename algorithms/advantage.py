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

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from algorithms.config.advantage import Estimator
from algorithms.returns import moments


class AdvantageFn(Protocol):
    """The signature of an advantage estimator."""

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        *,
        epsilon: float,
        num_tokens: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> Tensor:
        """One advantage per sample -> [N] float32.

        Args:
            rewards: [N] float32.
            group_ids: [N] int64, any values in any order; equal for samples of the same prompt.
            epsilon: Added to a standard deviation, in units of reward.
            num_tokens: [N] response tokens of each sample; read by the estimators that whiten over tokens.
            kept: [N] bool, the samples that form the baseline; None for all.

        Raises:
            ValueError: a wrong shape; num_tokens is None and the estimator whitens over tokens.
        """
        ...


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """(r - mean) / (std + epsilon) with the n - 1 standard deviation of the group; 0 where all rewards are equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    groups = _group(rewards, group_ids, kept)
    squares = _group_sum(torch.where(groups.kept, groups.deviation.square(), 0.0), groups.number)
    variance = squares / (groups.size - 1).clamp(min=1)
    # A rejected sample may deviate from kept samples that are all equal; such a deviation must not be divided by
    # epsilon alone.
    return torch.where(variance > 0, groups.deviation / (variance.sqrt() + epsilon), 0.0).float()


def dr_grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """r - mean of the group; `epsilon` is not used. Source: https://arxiv.org/abs/2503.20783."""
    return _group(rewards, group_ids, kept).deviation.float()


def rloo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """r - mean of the other samples of the group, = (r - mean) n / (n - 1); `epsilon` is not used.

    Source: https://arxiv.org/abs/2402.14740.
    """
    groups = _group(rewards, group_ids, kept)
    # The mean does not contain a rejected sample, so all kept samples are its others.
    others = groups.size - groups.kept.double()
    return (groups.deviation * groups.size / others.clamp(min=1)).float()


def reinforce(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """r: no baseline, so neither `group_ids`, `epsilon` nor `kept` is used.

    Source: Williams (1992), https://doi.org/10.1007/BF00992696.
    """
    _require_samples(rewards, group_ids=group_ids)
    return rewards.float()


def reinforce_pp(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """(r - mean) / (std + epsilon) over all response tokens of the step: a sample counts with its `num_tokens`.

    Groups are not used. The standard deviation is the biased one, for the reasons in `algorithms.returns.whiten`.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, for rewards on the last token and gamma = 1.
    """
    _require_samples(rewards, group_ids=group_ids)
    return _whiten(rewards, epsilon=epsilon, num_tokens=num_tokens, kept=kept)


def reinforce_pp_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    epsilon: float,
    num_tokens: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """r - mean of the group, whitened over all response tokens of the step as in `reinforce_pp`.

    Whitening moves every sample: a group of equal rewards, or of one, gets -mean / (std + epsilon), not 0.
    Source: REINFORCE++, https://arxiv.org/abs/2501.03262, the variant with a baseline.
    """
    groups = _group(rewards, group_ids, kept)
    whitened = _whiten(groups.deviation, epsilon=epsilon, num_tokens=num_tokens, kept=kept)
    return torch.where(groups.size > 0, whitened, 0.0)


ADVANTAGES: Final[dict[str, AdvantageFn]] = {
    Estimator.grpo.name: grpo,
    Estimator.dr_grpo.name: dr_grpo,
    Estimator.rloo.name: rloo,
    Estimator.reinforce.name: reinforce,
    Estimator.reinforce_pp.name: reinforce_pp,
    Estimator.reinforce_pp_baseline.name: reinforce_pp_baseline,
}


class _Groups(NamedTuple):
    """Values per sample and of its group; float64, so that equal float32 rewards deviate by exactly 0."""

    number: Tensor
    """[N] int64, dense number of each sample's group."""
    kept: Tensor
    """[N] bool, the samples that form the baseline."""
    size: Tensor
    """[N] float64, kept samples in each sample's group."""
    deviation: Tensor
    """[N] float64, reward - mean reward of the kept samples of the group; 0 where there are none."""


def _group(rewards: Tensor, group_ids: Tensor, kept: Tensor | None) -> _Groups:
    _require_samples(rewards, group_ids=group_ids, kept=kept)
    number = _dense(group_ids)
    values = rewards.double()
    kept = torch.ones_like(rewards, dtype=torch.bool) if kept is None else kept
    size = _group_sum(kept.double(), number)
    mean = _group_sum(torch.where(kept, values, 0.0), number) / size.clamp(min=1)
    return _Groups(number=number, kept=kept, size=size, deviation=torch.where(size > 0, values - mean, 0.0))


def _whiten(values: Tensor, *, epsilon: float, num_tokens: Tensor | None, kept: Tensor | None) -> Tensor:
    """Values [N] standardised over the response tokens of the kept samples -> [N] float32."""
    if num_tokens is None:
        raise ValueError(
            "num_tokens must hold the response tokens of each sample for an estimator that whitens over tokens, "
            "got None. Pass it, or use advantage.estimator=grpo or rloo."
        )
    _require_samples(values, num_tokens=num_tokens, kept=kept)
    weights = num_tokens if kept is None else torch.where(kept, num_tokens, 0)
    return moments(values, weights).standardise(values, epsilon=epsilon).float()


def _require_samples(rewards: Tensor, **per_sample: Tensor | None) -> None:
    for name, tensor in per_sample.items():
        if tensor is not None and (rewards.dim() != 1 or rewards.shape != tensor.shape):
            raise ValueError(f"rewards and {name} must both be [N], got {list(rewards.shape)} and {list(tensor.shape)}")


def _dense(group_ids: Tensor) -> Tensor:
    """Group ids -> numbers below N. Sorting, unlike unique(), has an output size that the host knows."""
    ordered, order = torch.sort(group_ids)
    starts = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(group_ids).scatter(0, order, starts.cumsum(0))


def _group_sum(values: Tensor, number: Tensor) -> Tensor:
    """Sum of values [N] over each sample's group -> [N]."""
    return torch.zeros_like(values).index_add(0, number, values)[number]
