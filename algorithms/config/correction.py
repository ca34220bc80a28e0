"""Configuration of the mismatch correction: one dataclass per mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from algorithms.config.checked import Checked, Problem

MAX_LOG_RATIO = 20.0
"""Bound on |log-ratio| before exp: e^20 and its square are finite in float32."""


class Level(Enum):
    """Over which tokens a log-ratio is accumulated before it becomes a weight."""

    token = "token"
    """Delta_t: each token by itself. Low variance, biased over long responses."""
    sequence = "sequence"
    """Sum of Delta over the response. Unbiased, variance grows with length."""
    geometric = "geometric"
    """Mean of Delta over the response: the length-normalised product."""


class MISBound(Enum):
    """What happens to a weight outside [low, high] under `correction=mis`."""

    mask = "mask"
    """The weight's tokens are rejected (IcePop)."""
    truncate = "truncate"
    """The weight is cut to `high`; tokens below `low` are rejected."""


class BypassLoss(Enum):
    """The objective of `correction=bypass`."""

    ppo_clip = "ppo_clip"
    """PPO-clip on pi_theta / pi_rollout."""
    reinforce = "reinforce"
    """REINFORCE weighted with the detached, truncated pi_theta / pi_rollout; no clip."""


class RejectedDenominator(Enum):
    """Whether rejected tokens stay in the denominator of the loss."""

    keep = "keep"
    """Divide by all response tokens: rejection shrinks the gradient (safe; default)."""
    drop = "drop"
    """Divide by the kept response tokens: constant scale, needs a forward before the first update."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Checked):
    """How the gap between the rollout engine and the trainer is corrected. Choose with `correction=<mode>`."""

    mode: ClassVar[str] = ""
    needs_old_logprobs: ClassVar[bool] = True
    """Whether pi_old must be known when a rollout is used for more than one optimizer step."""

    @property
    def needs_prepass(self) -> bool:
        """Whether pi_old must be known before the first update even with one optimizer step per rollout."""
        return False


@dataclass(kw_only=True, slots=True)
class RecomputeConfig(CorrectionConfig):
    """PPO ratio against pi_old, no weight: the mismatch is ignored by the loss (and still measured)."""

    mode: ClassVar[str] = "recompute"


@dataclass(kw_only=True, slots=True)
class PPOISConfig(CorrectionConfig):
    """PPO ratio against pi_rollout: the correction sits inside the clip. pi_old is kept for the metrics."""

    mode: ClassVar[str] = "ppo_is"


@dataclass(kw_only=True, slots=True)
class VanillaISConfig(CorrectionConfig):
    """PPO ratio against pi_old, weighted with the unbounded rho = pi_old / pi_rollout."""

    mode: ClassVar[str] = "vanilla_is"
    level: Level = Level.token
    """Tokens over which rho is accumulated. Vetted: token."""


@dataclass(kw_only=True, slots=True)
class TISConfig(CorrectionConfig):
    """Truncated importance sampling: PPO ratio against pi_old, weighted with min(rho, cap)."""

    mode: ClassVar[str] = "tis"
    level: Level = Level.token
    """Tokens over which rho is accumulated. Vetted: token."""
    cap: float = 2.0
    """Upper bound C of the weight, a ratio; larger means less bias and more variance. Vetted: 2.0 (token)."""

    def problems(self) -> Iterator[Problem]:
        if not self.cap > 0:
            yield Problem(
                key="cap",
                rule="must be > 0",
                value=self.cap,
                remedy="Use correction=vanilla_is for a weight without a cap.",
            )


@dataclass(kw_only=True, slots=True)
class MISConfig(CorrectionConfig):
    """Masked importance sampling: rho bounded to [low, high], with a veto on catastrophic tokens."""

    mode: ClassVar[str] = "mis"
    level: Level = Level.token
    """Tokens over which rho is accumulated. Vetted: token (IcePop) and sequence."""
    bound: MISBound = MISBound.mask
    """What happens outside [low, high]. Vetted: mask."""
    low: float = 0.5
    """Lower bound of rho, a ratio. Vetted: 0.5."""
    high: float = 2.0
    """Upper bound of rho, a ratio. Vetted: 2.0."""
    veto: float = 1e-4
    """A response with any token whose rho is below this is rejected whole; 0 turns the veto off. Vetted: 1e-4."""
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep
    """Whether rejected tokens stay in the denominator of the loss. Vetted: keep."""

    @property
    def needs_prepass(self) -> bool:
        return self.rejected_denominator is RejectedDenominator.drop

    def problems(self) -> Iterator[Problem]:
        if not 0 < self.low < self.high:
            yield Problem(
                key="low",
                rule=f"must satisfy 0 < low < high (high is {self.high})",
                value=self.low,
                remedy="Bounds are on rho = pi_train / pi_rollout, for example low=0.5 high=2.0.",
            )
        elif not self.low <= 1 <= self.high:
            yield Problem(
                key="low",
                rule=f"and high={self.high} must enclose 1, or on-policy tokens are rejected",
                value=self.low,
                remedy="For example low=0.5 high=2.0.",
            )
        if self.veto != 0 and not 2.1e-9 < self.veto < 1:
            yield Problem(
                key="veto",
                rule="must be 0 (off) or lie in (2.1e-9, 1): log-ratios are clamped to +-20",
                value=self.veto,
                remedy="Vetted: 1e-4.",
            )


@dataclass(kw_only=True, slots=True)
class BypassConfig(CorrectionConfig):
    """No pi_old at all: the loss is anchored on pi_rollout and no extra forward is ever run."""

    mode: ClassVar[str] = "bypass"
    needs_old_logprobs: ClassVar[bool] = False
    loss: BypassLoss = BypassLoss.ppo_clip
    """PPO-clip on pi_theta/pi_rollout, or REINFORCE with a detached truncated weight. Vetted: ppo_clip."""
    cap: float = 2.0
    """Upper bound of the detached weight of `loss=reinforce`, a ratio. Vetted: 2.0."""

    def problems(self) -> Iterator[Problem]:
        if not self.cap > 0:
            yield Problem(key="cap", rule="must be > 0", value=self.cap, remedy="Vetted: 2.0.")
