"""The correction spec: all decisions of a mismatch correction, as one value.

    anchor of the ratio x importance weight (level, bound) x rejection criteria x self-normalisation x denominator

`algorithms.correction` computes the correction of a spec, `algorithms.objective` prints the spec. Bounds are always on
rho = pi_train / mu, never on the inverse; mu = pi_rollout, Delta = log pi_train - log mu.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from algorithms.config.rejection import RejectConfig

MAX_LOG_RATIO = 20.0
"""Bound on |log-ratio| before exp: e^20 and its square are finite in float32."""
HARMLESS_ESS = 0.99
"""Effective fraction of samples above which averages do not depend on the weights' tail, whatever the tail's shape."""


class Level(Enum):
    """Tokens over which a log-ratio is accumulated before it becomes a weight."""

    token = "token"
    """Delta_t: each token by itself. Low variance, biased over long responses."""
    sequence = "sequence"
    """Sum of Delta over the response. Unbiased, variance grows with length."""
    geometric = "geometric"
    """Mean of Delta over the response: the length-normalised product."""
    segment = "segment"
    """Sum of Delta over the assistant turn of the token; equal to sequence if the response has one turn."""
    prefix = "prefix"
    """Sum of Delta up to the token: corrects the distribution of prefixes, not of later tokens; less bias than
    token."""


WHOLE_RESPONSE_LEVELS = (Level.sequence, Level.geometric)
"""Levels with one weight per response."""


class Bound(Enum):
    """Treatment of a weight outside its bounds."""

    none = "none"
    """No bound: the weight is rho, up to e^20."""
    truncate = "truncate"
    """The weight is min(rho, high); if low is set, tokens with a weight below low are rejected."""
    clip = "clip"
    """The weight is raised to low and cut to high. Raises the weight of tokens that the trainer finds unlikely."""
    mask = "mask"
    """Tokens with a weight outside [low, high] are rejected (IcePop); low is optional."""


class Anchor(Enum):
    """Denominator of the surrogate's ratio."""

    old = "old"
    """pi_old: the ratio measures drift since the start of the step."""
    rollout = "rollout"
    """mu: the ratio measures drift and mismatch together."""
    none = "none"
    """No ratio: the surrogate is -A log pi_theta."""


class Compared(Enum):
    """Log-probs of the trainer that are compared with the engine's log-probs."""

    old = "old"
    """Log-probs of pi_old, the weights at the start of the step; a separate forward with several optimizer steps."""
    current = "current"
    """Detached log-probs of the running forward; never an extra forward."""


class SelfNormalize(Enum):
    """Division of the weights by their mean over the optimizer step."""

    none = "none"
    mean_one = "mean_one"
    """w / mean of w over the responses (whole-response levels) or tokens (other levels) that enter the loss, on all
    ranks. Applied after the bound, so a weight can exceed the bound."""


class RejectedDenominator(Enum):
    """Treatment of rejected tokens in the denominator of the loss."""

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
    """The full specification of a correction."""

    anchor: Anchor
    compared: Compared
    weight: WeightSpec | None = None
    """Importance weight; None means a weight of 1."""
    reject: RejectConfig = field(default_factory=RejectConfig)
    self_normalize: SelfNormalize = SelfNormalize.none
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep

    @property
    def measures_trainer(self) -> bool:
        """True if weight or rejection reads the trainer's log-probs."""
        return self.weight is not None or bool(self.reject.active())

    @property
    def rejects(self) -> bool:
        """True if the correction can reject valid tokens."""
        weight = self.weight
        by_weight = weight is not None and (
            weight.bound is Bound.mask or (weight.bound is Bound.truncate and weight.low)
        )
        return bool(by_weight) or bool(self.reject.active())
