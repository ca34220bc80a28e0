"""`correction=custom`: one key for every part of the spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from algorithms.config.checked import Problem
from algorithms.config.correction import CorrectionConfig, interval_problems
from algorithms.config.rejection import RejectConfig
from algorithms.config.spec import (
    Anchor,
    Bound,
    Compared,
    CorrectionSpec,
    Level,
    RejectedDenominator,
    SelfNormalize,
    WeightSpec,
)


@dataclass(kw_only=True, slots=True)
class CustomConfig(CorrectionConfig):
    """A correction with a key for every part of the spec; other modes and presets are special cases."""

    mode: ClassVar[str] = "custom"
    anchor: Anchor = Anchor.old
    """Denominator of the surrogate's ratio. Vetted: old."""
    compared: Compared = Compared.old
    """Log-probs of the trainer that are compared with the engine's log-probs. Vetted: old; current saves a forward."""
    level: Level | None = None
    """Tokens over which rho is accumulated; null means a weight of 1."""
    bound: Bound = Bound.none
    """Treatment of a weight outside its bounds."""
    low: float | None = None
    """Lower bound of rho, a ratio; required with bound=clip, optional with bound=truncate and bound=mask."""
    high: float | None = None
    """Upper bound of rho, a ratio; required with every bound except bound=none."""
    reject: RejectConfig = field(default_factory=RejectConfig)
    """Rejection criteria; a token is kept if all criteria keep it."""
    self_normalize: SelfNormalize = SelfNormalize.none
    """Division of the weights by their mean: none or mean_one."""
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep
    """Treatment of rejected tokens in the denominator of the loss: keep or drop."""

    def spec(self) -> CorrectionSpec:
        weight = None
        if self.level is not None:
            weight = WeightSpec(level=self.level, bound=self.bound, low=self.low, high=self.high)
        return CorrectionSpec(
            anchor=self.anchor,
            compared=self.compared,
            weight=weight,
            reject=self.reject,
            self_normalize=self.self_normalize,
            rejected_denominator=self.rejected_denominator,
        )

    def conflicts(self) -> Iterator[Problem]:
        yield from self._anchor_problems()
        yield from self._bound_problems()
        if self.level is None:
            for key, value, off in (
                ("bound", self.bound, Bound.none),
                ("self_normalize", self.self_normalize, SelfNormalize.none),
            ):
                if value is not off:
                    yield Problem(key=key, rule="has no effect without a weight", value=value, remedy="Set level.")

    def _bound_problems(self) -> Iterator[Problem]:
        bounded = self.level is not None and self.bound is not Bound.none
        needed = {"low": bounded and self.bound is Bound.clip, "high": bounded}
        for key in ("low", "high"):
            value = getattr(self, key)
            if value is not None and not bounded:
                cause = "without a weight (level)" if self.level is None else "with bound=none"
                yield Problem(key=key, rule=f"has no effect {cause}", value=value, remedy="Set it to null.")
            if value is None and needed[key]:
                yield Problem(key=key, rule=f"must be set with bound={self.bound.name}", value=None)
        if bounded and self.high is not None:
            yield from interval_problems(self.low, self.high)

    def _anchor_problems(self) -> Iterator[Problem]:
        if self.anchor is Anchor.rollout and self.level is not None:
            yield Problem(
                key="level",
                rule="must be null with anchor=rollout: the ratio pi_theta/mu holds rho, a weight counts it twice",
                value=self.level,
                remedy="Use anchor=old for a weight beside the ratio, or anchor=none for a weight alone.",
            )
        if self.anchor is Anchor.old and self.compared is Compared.current:
            yield Problem(
                key="compared",
                rule="must be old with anchor=old, which needs pi_old anyway",
                value=self.compared,
                remedy="Use anchor=rollout or anchor=none to do without pi_old.",
            )
