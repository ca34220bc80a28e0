"""The correction spec: everything that a mismatch correction decides, as one value.

    anchor of the ratio x importance weight (level, bound) x rejection criteria x self-normalisation x denominator

`algorithms.correction` carries it out, `algorithms.objective` prints it. Bounds are always on rho = pi_train / mu,
never on its inverse; mu = pi_rollout, Delta = log pi_train - log mu.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from algorithms.config.rejection import RejectConfig

MAX_LOG_RATIO = 20.0
"""Bound on |log-ratio| before exp: e^20 and its square are finite in float32."""
HARMLESS_ESS = 0.99
"""Effective share of the samples above which no average depends on the tail of the weights, whatever its shape."""


class Level(Enum):
    """Over which tokens a log-ratio is accumulated before it becomes a weight."""

    token = "token"
    """Delta_t: each token by itself. Low variance, biased over long responses."""
    sequence = "sequence"
    """Sum of Delta over the response. Unbiased, variance grows with length."""
    geometric = "geometric"
    """Mean of Delta over the response: the length-normalised product."""
    segment = "segment"
    """Sum of Delta over the assistant turn that holds the token; with one turn the same as sequence."""
    prefix = "prefix"
    """Sum of Delta up to the token: corrects which prefixes are seen, not what follows. Less biased than token."""


WHOLE_RESPONSE_LEVELS = (Level.sequence, Level.geometric)
"""Levels with one weight per response."""


class Bound(Enum):
    """What happens to a weight outside its bounds."""

    none = "none"
    """Nothing: the weight is rho, up to e^20."""
    truncate = "truncate"
    """min(rho, high); where low is set, tokens with a weight below it are rejected."""
    clip = "clip"
    """Raised to low and cut to high. Raises the weight of tokens that the trainer finds unlikely."""
    mask = "mask"
    """Tokens with a weight outside [low, high] are rejected (IcePop); low may be left out."""


class Anchor(Enum):
    """Denominator of the surrogate's ratio."""

    old = "old"
    """pi_old: the ratio measures drift since the start of the step."""
    rollout = "rollout"
    """mu: the ratio measures drift and mismatch together."""
    none = "none"
    """No ratio: the surrogate is -A log pi_theta."""


class Compared(Enum):
    """Which log-probs of the trainer are compared with those of the engine."""

    old = "old"
    """pi_old, with the weights at the start of the step; a forward of its own with several optimizer steps."""
    current = "current"
    """The running forward, detached; never an extra forward."""


class SelfNormalize(Enum):
    """Whether weights are divided by their mean over the optimizer step."""

    none = "none"
    mean_one = "mean_one"
    """w / mean of w over what enters the loss (responses at whole-response levels, else tokens), all ranks. Applied
    after the bound, so a weight can exceed it."""


class RejectedDenominator(Enum):
    """Whether rejected tokens stay in the denominator of the loss."""

    keep = "keep"
    """Divide by all response tokens: rejection shrinks the gradient (safe; default)."""
    drop = "drop"
    """Divide by the kept response tokens: constant scale, noisier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpec:
    """An importance weight: rho at a level, bounded. `low` and `high` are set where the bound reads them."""

    level: Level
    bound: Bound
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSpec:
    """What a correction does, in full."""

    anchor: Anchor
    compared: Compared
    weight: WeightSpec | None = None
    """None is a weight of 1."""
    reject: RejectConfig = field(default_factory=RejectConfig)
    self_normalize: SelfNormalize = SelfNormalize.none
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep

    @property
    def measures_trainer(self) -> bool:
        """Whether weight or rejection read the trainer's log-probs."""
        return self.weight is not None or bool(self.reject.active())

    @property
    def rejects(self) -> bool:
        """Whether anything but an invalid token can be rejected."""
        weight = self.weight
        by_weight = weight is not None and (
            weight.bound is Bound.mask or (weight.bound is Bound.truncate and weight.low)
        )
        return bool(by_weight) or bool(self.reject.active())
