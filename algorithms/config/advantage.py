"""Configuration of advantages: the outcome estimators, and generalised advantage estimation with its value loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from algorithms.config.checked import Checked, Problem


class Estimator(Enum):
    """How the rewards of a step become one advantage per sample. r: reward of the sample."""

    grpo = "grpo"
    """(r - mean) / (std + epsilon) over the group, std with n - 1."""
    dr_grpo = "dr_grpo"
    """r - mean of the group: no division by the spread."""
    rloo = "rloo"
    """r - mean of the other samples of the group."""
    reinforce = "reinforce"
    """r itself: no baseline, needs no groups."""
    reinforce_pp = "reinforce_pp"
    """(r - mean) / (std + epsilon) over the response tokens of the step (REINFORCE++); needs no groups."""
    reinforce_pp_baseline = "reinforce_pp_baseline"
    """r - mean of the group, then whitened over the response tokens of the step (REINFORCE++-baseline)."""


class BaselineScope(Enum):
    """Which samples form the baseline when the correction rejects whole responses."""

    all = "all"
    """Every sample: the baseline estimates the mean reward of the rollout policy."""
    kept = "kept"
    """The samples that were not rejected: the baseline estimates the mean reward of what the loss sees."""


@dataclass(kw_only=True, slots=True)
class AdvantageConfig(Checked):
    """From the rewards of a step to one advantage per sample."""

    estimator: Estimator = Estimator.grpo
    """Which formula. Vetted: grpo."""
    epsilon: float = 1e-6
    """Added to the standard deviation (grpo, reinforce_pp, reinforce_pp_baseline). Vetted: 1e-6."""
    baseline_scope: BaselineScope = BaselineScope.all
    """Which samples form the baseline when the correction rejects whole responses. Vetted: all."""

    def problems(self) -> Iterator[Problem]:
        if not self.epsilon > 0:
            yield Problem(key="epsilon", rule="must be > 0", value=self.epsilon, remedy="Vetted: 1e-6.")
        if self.baseline_scope is BaselineScope.kept and self.estimator is Estimator.reinforce:
            yield Problem(
                key="baseline_scope",
                rule="has no effect with estimator=reinforce, which has no baseline",
                value=self.baseline_scope,
                remedy="Use baseline_scope=all, or an estimator with a baseline, for example rloo.",
            )


@dataclass(kw_only=True, slots=True)
class GAEConfig(Checked):
    """One advantage per token from a critic (`algorithms.returns.gae`)."""

    gamma: float = 1.0
    """Discount per response token. Vetted: 1.0."""
    gae_lambda: float = 1.0
    """0 trusts the critic (one-step), 1 the observed rewards (Monte Carlo). Vetted: 1.0."""
    epsilon: float = 1e-6
    """Added to the standard deviation when the advantages of a step are whitened. Vetted: 1e-6."""

    def problems(self) -> Iterator[Problem]:
        for key, value in (("gamma", self.gamma), ("gae_lambda", self.gae_lambda)):
            if not 0 <= value <= 1:
                yield Problem(key=key, rule="must lie in [0, 1]", value=value, remedy="Vetted: 1.0.")
        if not self.epsilon > 0:
            yield Problem(key="epsilon", rule="must be > 0", value=self.epsilon, remedy="Vetted: 1e-6.")


@dataclass(kw_only=True, slots=True)
class ValueLossConfig(Checked):
    """The loss of the critic (`algorithms.value.value_loss`)."""

    clip: float | None = 0.5
    """How far a value may move from the one before the update, in units of reward; None for no bound. Vetted: 0.5."""

    def problems(self) -> Iterator[Problem]:
        if self.clip is not None and not self.clip > 0:
            yield Problem(
                key="clip", rule="must be > 0 or null", value=self.clip, remedy="Vetted: 0.5; null turns it off."
            )
