"""Rewards of a step -> one advantage per sample, against the other samples of the same prompt.

The driver calls this once per rollout step with all samples; `algorithms.loss` takes the result per token.
Groups may have different sizes; a group of one has no baseline and gets 0. Nothing is read on the host.

N: samples of the step.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from algorithms.config import Estimator


class AdvantageFn(Protocol):
    """The signature of an advantage estimator."""

    def __call__(self, rewards: Tensor, group_ids: Tensor, *, epsilon: float) -> Tensor:
        """rewards [N], group_ids [N] int64 (any values, any order) -> advantages [N] float32."""
        ...


def grpo(rewards: Tensor, group_ids: Tensor, *, epsilon: float) -> Tensor:
    """(r - mean) / (std + epsilon) with the n - 1 standard deviation of the group; 0 where all rewards are equal.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 4.
    """
    groups = _group(rewards, group_ids)
    variance = _group_sum(groups.deviation.square(), groups.number) / (groups.size - 1).clamp(min=1)
    return (groups.deviation / (variance.sqrt() + epsilon)).float()


def dr_grpo(rewards: Tensor, group_ids: Tensor, *, epsilon: float) -> Tensor:
    """r - mean of the group; `epsilon` is not used. Source: https://arxiv.org/abs/2503.20783."""
    return _group(rewards, group_ids).deviation.float()


def rloo(rewards: Tensor, group_ids: Tensor, *, epsilon: float) -> Tensor:
    """r - mean of the other samples of the group, = (r - mean) n / (n - 1); `epsilon` is not used.

    Source: https://arxiv.org/abs/2402.14740.
    """
    groups = _group(rewards, group_ids)
    return (groups.deviation * groups.size / (groups.size - 1).clamp(min=1)).float()


ADVANTAGES: Final[dict[str, AdvantageFn]] = {
    Estimator.grpo.name: grpo,
    Estimator.dr_grpo.name: dr_grpo,
    Estimator.rloo.name: rloo,
}


class _Groups(NamedTuple):
    """The samples seen through their groups; float64, so that equal float32 rewards deviate by exactly 0."""

    number: Tensor
    """[N] int64, dense number of each sample's group."""
    size: Tensor
    """[N] float64, samples in each sample's group."""
    deviation: Tensor
    """[N] float64, reward - mean reward of the group."""


def _group(rewards: Tensor, group_ids: Tensor) -> _Groups:
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids must both be [N], got {list(rewards.shape)} and {list(group_ids.shape)}"
        )
    number = _dense(group_ids)
    values = rewards.double()
    size = _group_sum(torch.ones_like(values), number)
    return _Groups(number=number, size=size, deviation=values - _group_sum(values, number) / size)


def _dense(group_ids: Tensor) -> Tensor:
    """Group ids -> numbers below N. Sorting, unlike unique(), has an output size that the host knows."""
    ordered, order = torch.sort(group_ids)
    starts = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.empty_like(group_ids).scatter(0, order, starts.cumsum(0))


def _group_sum(values: Tensor, number: Tensor) -> Tensor:
    """Sum of values [N] over each sample's group -> [N]."""
    return torch.zeros_like(values).index_add(0, number, values)[number]
