"""Configuration of the KL to a reference policy: estimator, coefficient, and placement in loss or reward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from algorithms.config.custom import Custom
from algorithms.config.rules import Checked, Problem, as_yaml, at_least, ruled

if TYPE_CHECKING:
    from torch import Tensor


class KLEstimator(Enum):
    """Per-token estimator of KL(pi_theta || pi_ref) from samples of pi_theta. L = log pi_theta - log pi_ref."""

    k1 = "k1"
    """L: unbiased, signed. In the reward only: its gradient in the loss is 0 on average."""
    k2 = "k2"
    """L^2 / 2: a biased value, but in the loss the right gradient on policy."""
    k3 = "k3"
    """exp(-L) - 1 + L: unbiased and >= 0, but in the loss k3 has the gradient of KL(pi_ref || pi_theta)."""
    unbiased = "unbiased"
    """k3 x pi_theta / pi_old, ratio differentiated: right value and right gradient, also off policy."""

    @property
    def reads_anchor(self) -> bool:
        """True if it reads the log-probs of the policy that sampled."""
        return self is KLEstimator.unbiased


@dataclass(kw_only=True, slots=True)
class CustomKLEstimator(Custom):
    """An estimator of the KL of a user."""

    reads_anchor: ClassVar[bool] = False
    """As of `KLEstimator`; not possible in the reward."""

    @abstractmethod
    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, anchor_logprobs: Tensor | None) -> Tensor:
        """The estimate of each token [T], nats, of log pi_theta [T] with gradient, log pi_ref [T] and log-probs of the
        policy that sampled [T], which are None without `reads_anchor`; all are finite."""
        raise NotImplementedError


class KLPlacement(Enum):
    """Placement of the KL: in the loss or in the reward."""

    loss = "loss"
    """A differentiated term of the loss, which regularises every token by itself."""
    reward = "reward"
    """A detached cost, subtracted from the reward: an early token is charged for the KL of later tokens too."""


@dataclass(kw_only=True, slots=True)
class ReferenceKLConfig(Checked):
    """KL regularisation of pi_theta towards a reference policy: coefficient, estimator and placement."""

    coef: float = ruled(0.0, at_least(0), remedy="Vetted: 0 or 1e-3.")
    """Weight of the KL, reward (or loss) per nat; 0 turns the KL off. Vetted: 0 (DAPO), 1e-3 (GRPO)."""
    estimator: KLEstimator | CustomKLEstimator = KLEstimator.unbiased
    """Estimator of the KL. Vetted: unbiased or k3 in the loss, k1 in the reward."""
    placement: KLPlacement = KLPlacement.loss
    """Placement of the KL, in the loss or in the reward. Vetted: loss (GRPO), reward (RLOO, PPO)."""
    weighted: bool = True
    """Give the KL in the loss the tokens and the weights that the correction leaves to the policy loss. With false it
    takes every token of the denominator with weight 1, as in verl and TRL."""

    def conflicts(self) -> Iterator[Problem]:
        if not self.weighted and self.placement is KLPlacement.reward:
            yield self.broken("weighted", "has no effect with placement=reward", "Remove it, or use placement=loss.")
        if self.estimator is KLEstimator.k1 and self.placement is KLPlacement.loss:
            yield self.broken(
                "estimator",
                "must not be k1 with placement=loss: its gradient is 0 on average, so it only adds noise",
                "Use estimator=unbiased (or k2), or placement=reward.",
            )
        if self.estimator.reads_anchor and self.placement is KLPlacement.reward:
            yield self.broken(
                "estimator",
                f"must not be {as_yaml(self.estimator)} with placement=reward: a reward is detached, and its samples "
                "are weighted by the policy loss already",
                "Use estimator=k1, whose gradient in the reward is the right one, or placement=loss.",
            )
