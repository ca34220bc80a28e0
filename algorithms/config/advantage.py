"""Configuration of the advantage estimators."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Self

from algorithms.config.custom import Custom
from algorithms.config.rules import Checked, Problem, as_yaml, ruled, within

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.advantage import StepRewards


class Baseline(Enum):
    """What an estimator takes off the reward of a sample."""

    none = "none"
    group = "group"
    """Rewards of the other samples of the same prompt: a group needs at least two samples."""
    step = "step"
    """Rewards of all samples of the step."""
    critic = "critic"
    """Values of the critic."""


class Estimator(Enum):
    """Estimator of advantages from the rewards of a step: one per sample, gae: one per token. r: reward of a sample.

    Every member names its baseline, from which the rules about groups and critic follow.
    """

    baseline: Baseline

    def __new__(cls, name: str, baseline: Baseline) -> Self:
        member = object.__new__(cls)
        member._value_, member.baseline = name, baseline
        return member

    grpo = "grpo", Baseline.group
    """(r - mean) / (std + 1e-6), mean and std over the group, std with divisor n - 1."""
    dr_grpo = "dr_grpo", Baseline.group
    """r - mean of the group: no division by the spread."""
    rloo = "rloo", Baseline.group
    """r - mean of the other samples of the group."""
    reinforce = "reinforce", Baseline.none
    """r."""
    reinforce_pp = "reinforce_pp", Baseline.step
    """(r - mean) / (std + 1e-6) over the response tokens of the step (REINFORCE++)."""
    reinforce_pp_baseline = "reinforce_pp_baseline", Baseline.group
    """r - mean of the group, then whitened over the response tokens of the step (REINFORCE++-baseline)."""
    gae = "gae", Baseline.critic
    """One advantage per token from the values of a critic, whitened over the response tokens of the step (PPO)."""


@dataclass(kw_only=True, slots=True)
class CustomEstimator(Custom):
    """An estimator of a user: one advantage per sample."""

    baseline: ClassVar[Baseline] = Baseline.none
    """What it takes off the rewards: the rules about groups follow from it. `critic` is not possible here."""

    @abstractmethod
    def __call__(self, step: StepRewards) -> Tensor:
        """The advantage of each sample of the step, [N]."""
        raise NotImplementedError


class BaselineScope(Enum):
    """Samples that form the baseline when the correction rejects whole responses."""

    all = "all"
    """All samples: the baseline estimates the mean reward of the rollout policy."""
    kept = "kept"
    """Samples that were not rejected: the baseline estimates the mean reward of the samples in the loss."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig(Checked):
    """Computation of advantages from the rewards of a step."""

    estimator: Estimator | CustomEstimator = Estimator.grpo
    """Formula of the advantages. Vetted: grpo."""
    baseline_scope: BaselineScope = BaselineScope.all
    """Samples that form the baseline when the correction rejects whole responses. Vetted: all."""
    gamma: float = ruled(1.0, within(0, 1), remedy="Vetted: 1.")
    """Discount factor per response token (gae). Vetted: 1 (verl, NeMo-RL), for a reward at the end of the response."""
    gae_lambda: float = ruled(1.0, within(0, 1), remedy="Vetted: 1.")
    """lambda of GAE: 1 relies on the rewards, 0 on the critic. Vetted: 1 (verl, NeMo-RL)."""

    def conflicts(self) -> Iterator[Problem]:
        if self.baseline_scope is BaselineScope.kept and self.estimator.baseline is Baseline.none:
            yield self.broken(
                "baseline_scope",
                f"has no effect with estimator={as_yaml(self.estimator)}, which has no baseline",
                "Use baseline_scope=all, or an estimator with a baseline, for example rloo.",
            )
        for key in ("gamma", "gae_lambda"):
            value = getattr(self, key)
            if value != 1 and self.estimator.baseline is not Baseline.critic:
                yield Problem(
                    key=key,
                    rule=f"has no effect with estimator={as_yaml(self.estimator)}: a sample has one advantage",
                    value=value,
                    remedy="Use estimator=gae, or remove it.",
                )
