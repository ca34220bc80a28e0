"""The correction spec: all decisions of a mismatch correction, as one value.

    anchor of the ratio x importance weight (level, bound) x rejection criteria x self-normalisation x denominator

`algorithms.correction` computes the correction of a spec, `algorithms.objective` prints the spec. Bounds are always on
rho = pi_train / mu, never on the inverse; mu = pi_rollout, Delta = log pi_train - log mu.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from algorithms.config.custom import Custom
from algorithms.config.rejection import RejectConfig

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.tokens import Tokens

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

    @property
    def one_per_response(self) -> bool:
        """True if all tokens of a response have the same weight, which then counts once per response."""
        return self in (Level.sequence, Level.geometric)


@dataclass(kw_only=True, slots=True)
class CustomLevel(Custom):
    """A level of a user. Its formula may hold {rho}, the ratio of a token: "prod_y({rho})"."""

    one_per_response: ClassVar[bool] = False
    """As of `Level`."""

    @abstractmethod
    def __call__(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Log of the weight of each token [T], not clamped, and the tokens [T] bool that have one."""
        raise NotImplementedError


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


@dataclass(kw_only=True, slots=True)
class CustomBound(Custom):
    """A bound of a user, with keys of its own in place of low and high. Its formula may hold {weight}."""

    rejects: ClassVar[bool] = False
    """True if tokens can leave the loss by it."""

    @abstractmethod
    def __call__(self, rho: Tensor, log_ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The weight [T] of rho [T], which is clamped to e^-20 and e^20, and the tokens [T] bool that stay.

        log_ratio [T]: the logarithm of rho, not clamped.
        """
        raise NotImplementedError


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

    level: Level | CustomLevel
    bound: Bound | CustomBound
    low: float | None = None
    high: float | None = None

    @property
    def rejects(self) -> bool:
        """True if the bound can reject tokens."""
        if isinstance(self.bound, CustomBound):
            return self.bound.rejects
        return self.bound is Bound.mask or (self.bound is Bound.truncate and bool(self.low))


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
        return (self.weight is not None and self.weight.rejects) or bool(self.reject.active())
