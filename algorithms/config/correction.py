"""Configuration of the mismatch correction: the modes, short names for values of `CorrectionSpec`.

Every mode is a dataclass with the keys that have a meaning in the mode; `spec()` returns its spec. `CustomConfig` has
all keys; most presets of other libraries are instances of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import ClassVar, Final

from algorithms.config.custom import Custom
from algorithms.config.rejection import RejectConfig
from algorithms.config.rules import NOT_SET, Checked, ConfigError, Problem, Rule, as_yaml, ruled
from algorithms.config.spec import (
    Anchor,
    Bound,
    Compared,
    CorrectionSpec,
    CustomBound,
    CustomLevel,
    Level,
    RejectedDenominator,
    SelfNormalize,
    WeightSpec,
)

_CAP = Rule("must be >= 1, or on-policy tokens are cut", lambda cap: cap >= 1)
"""Rule of an upper bound of rho."""


class MISBound(Enum):
    """Treatment of a weight outside [low, high] under `correction=mis`."""

    mask = "mask"
    """Reject the tokens of the weight (IcePop)."""
    truncate = "truncate"
    """Cut the weight to `high`; reject tokens with a weight below `low`."""


class BypassLoss(Enum):
    """The objective of `correction=bypass`."""

    ppo_clip = "ppo_clip"
    """The ratio of the surrogate is pi_theta / mu."""
    reinforce = "reinforce"
    """-A log pi_theta, weighted with the detached, bounded pi_theta / mu; no clip."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig(Checked):
    """Correction of the mismatch between rollout engine and trainer. Choose with `correction=<mode>`."""

    mode: ClassVar[str] = ""

    def spec(self) -> CorrectionSpec:
        """The full specification of the correction; modes override this method."""
        raise TypeError(f"no correction mode for a {type(self).__name__}")

    @property
    def needs_old_logprobs(self) -> bool:
        """True if pi_old must be known when a rollout is used for more than one optimizer step."""
        return self.spec().compared is Compared.old

    def notes(self) -> Iterator[str]:
        """Yield one sentence for every setting that is allowed and probably not intended; printed with the plan."""
        spec = self.spec()
        if spec.weight is not None:
            yield from _level_notes(spec.weight)
        yield from spec.reject.notes()
        if spec.rejected_denominator is RejectedDenominator.drop and not spec.rejects:
            yield "rejected_denominator=drop changes nothing: only invalid tokens are rejected"


@dataclass(kw_only=True, slots=True)
class RecomputeConfig(CorrectionConfig):
    """PPO ratio against pi_old, no weight: the loss ignores the mismatch, which is still measured."""

    mode: ClassVar[str] = "recompute"

    def spec(self) -> CorrectionSpec:
        return CorrectionSpec(anchor=Anchor.old, compared=Compared.old)


@dataclass(kw_only=True, slots=True)
class PPOISConfig(CorrectionConfig):
    """PPO ratio against pi_rollout: the clip bounds drift and mismatch together. pi_old serves the metrics only."""

    mode: ClassVar[str] = "ppo_is"

    def spec(self) -> CorrectionSpec:
        return CorrectionSpec(anchor=Anchor.rollout, compared=Compared.old)


@dataclass(kw_only=True, slots=True)
class VanillaISConfig(CorrectionConfig):
    """PPO ratio against pi_old, weighted with the unbounded rho = pi_old / pi_rollout."""

    mode: ClassVar[str] = "vanilla_is"
    level: Level | CustomLevel = Level.token
    """Tokens over which rho is accumulated. Vetted: token."""
    self_normalize: SelfNormalize = SelfNormalize.none
    """Division of the weights by their mean: none or mean_one. Vetted: none."""

    def spec(self) -> CorrectionSpec:
        return CorrectionSpec(
            anchor=Anchor.old,
            compared=Compared.old,
            weight=WeightSpec(level=self.level, bound=Bound.none),
            self_normalize=self.self_normalize,
        )


@dataclass(kw_only=True, slots=True)
class TISConfig(CorrectionConfig):
    """Truncated importance sampling: PPO ratio against pi_old, weighted with min(rho, cap)."""

    mode: ClassVar[str] = "tis"
    level: Level | CustomLevel = Level.token
    """Tokens over which rho is accumulated. Vetted: token."""
    cap: float = ruled(2.0, _CAP, remedy="Use correction=vanilla_is for a weight without a cap.")
    """Upper bound C of the weight, a ratio; larger means less bias and more variance. Vetted: 2.0 (token)."""
    self_normalize: SelfNormalize = SelfNormalize.none
    """Division of the weights by their mean: none or mean_one. Vetted: none; mean_one is advised at sequence and
    geometric level."""

    def spec(self) -> CorrectionSpec:
        return CorrectionSpec(
            anchor=Anchor.old,
            compared=Compared.old,
            weight=WeightSpec(level=self.level, bound=Bound.truncate, high=self.cap),
            self_normalize=self.self_normalize,
        )


@dataclass(kw_only=True, slots=True)
class MISConfig(CorrectionConfig):
    """Masked importance sampling: rho bounded to [low, high], with a veto on catastrophic tokens."""

    mode: ClassVar[str] = "mis"
    level: Level | CustomLevel = Level.token
    """Tokens over which rho is accumulated. Vetted: token (IcePop) and sequence."""
    bound: MISBound = MISBound.mask
    """Treatment of a weight outside [low, high]. Vetted: mask."""
    low: float | None = 0.5
    """Lower bound of rho, a ratio; null means no lower bound. Vetted: 0.5."""
    high: float = 2.0
    """Upper bound of rho, a ratio. Vetted: 2.0."""
    reject: RejectConfig = field(default_factory=lambda: RejectConfig(veto=1e-4))
    """Further rejection criteria; a token is kept if all criteria keep it. Vetted: veto=1e-4 alone."""
    self_normalize: SelfNormalize = SelfNormalize.none
    """Division of the weights by their mean: none or mean_one. Vetted: none."""
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep
    """Treatment of rejected tokens in the denominator of the loss: keep or drop. Vetted: keep."""

    def spec(self) -> CorrectionSpec:
        bound = Bound.mask if self.bound is MISBound.mask else Bound.truncate
        return CorrectionSpec(
            anchor=Anchor.old,
            compared=Compared.old,
            weight=WeightSpec(level=self.level, bound=bound, low=self.low, high=self.high),
            reject=self.reject,
            self_normalize=self.self_normalize,
            rejected_denominator=self.rejected_denominator,
        )

    def conflicts(self) -> Iterator[Problem]:
        yield from _interval_problems(self.low, self.high)


@dataclass(kw_only=True, slots=True)
class BypassConfig(CorrectionConfig):
    """No pi_old: the loss is anchored on pi_rollout and needs no extra forward."""

    mode: ClassVar[str] = "bypass"
    loss: BypassLoss = BypassLoss.ppo_clip
    """Objective: ppo_clip for a surrogate with the ratio pi_theta/pi_rollout, reinforce for REINFORCE with a detached
    truncated weight. Vetted: ppo_clip."""
    level: Level | CustomLevel = Level.token
    """Tokens over which the weight of `loss=reinforce` is accumulated. Vetted: token."""
    cap: float = ruled(2.0, _CAP, remedy="Vetted: 2.0.")
    """Upper bound of the detached weight of `loss=reinforce`, a ratio. Vetted: 2.0."""
    reject: RejectConfig = field(default_factory=RejectConfig)
    """Rejection criteria on pi_theta / pi_rollout; a token is kept if all criteria keep it. Vetted: none."""
    rejected_denominator: RejectedDenominator = RejectedDenominator.keep
    """Treatment of rejected tokens in the denominator of the loss: keep or drop. Vetted: keep."""

    def spec(self) -> CorrectionSpec:
        reinforce = self.loss is BypassLoss.reinforce
        return CorrectionSpec(
            anchor=Anchor.none if reinforce else Anchor.rollout,
            compared=Compared.current,
            weight=WeightSpec(level=self.level, bound=Bound.truncate, high=self.cap) if reinforce else None,
            reject=self.reject,
            rejected_denominator=self.rejected_denominator,
        )

    def conflicts(self) -> Iterator[Problem]:
        if self.loss is BypassLoss.reinforce:
            return
        for key in ("level", "cap"):
            if getattr(self, key) != self.__dataclass_fields__[key].default:
                yield self.broken(
                    key,
                    "has no effect with correction.loss=ppo_clip, which has no weight",
                    "Remove it, or use correction.loss=reinforce.",
                )


@dataclass(kw_only=True, slots=True)
class CustomConfig(CorrectionConfig):
    """A correction with a key for every part of the spec; other modes and presets are special cases."""

    mode: ClassVar[str] = "custom"
    anchor: Anchor = Anchor.old
    """Denominator of the surrogate's ratio. Vetted: old."""
    compared: Compared = Compared.old
    """Log-probs of the trainer that are compared with the engine's log-probs. Vetted: old; current saves a forward."""
    level: Level | CustomLevel | None = None
    """Tokens over which rho is accumulated; null means a weight of 1."""
    bound: Bound | CustomBound = Bound.none
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
        bounded = self.level is not None and isinstance(self.bound, Bound) and self.bound is not Bound.none
        needed = {"low": bounded and self.bound is Bound.clip, "high": bounded}
        for key in ("low", "high"):
            value = getattr(self, key)
            if value is not None and not bounded:
                cause = "without a weight (level)" if self.level is None else f"with bound={as_yaml(self.bound)}"
                yield Problem(key=key, rule=f"has no effect {cause}", value=value, remedy="Set it to null.")
            if value is None and needed[key]:
                yield Problem(key=key, rule=f"must be set with bound={as_yaml(self.bound)}", value=NOT_SET)
        if bounded and self.high is not None:
            yield from _interval_problems(self.low, self.high)

    def _anchor_problems(self) -> Iterator[Problem]:
        if self.anchor is Anchor.rollout and self.level is not None:
            yield self.broken(
                "level",
                "must be null with anchor=rollout: the ratio pi_theta/mu holds rho, a weight counts it twice",
                "Use anchor=old for a weight beside the ratio, or anchor=none for a weight alone.",
            )
        if self.anchor is Anchor.old and self.compared is Compared.current:
            yield self.broken(
                "compared",
                "must be old with anchor=old, which needs pi_old anyway",
                "Use anchor=rollout or anchor=none to do without pi_old.",
            )


@dataclass(kw_only=True, slots=True)
class CustomCorrection(CorrectionConfig, Custom):
    """A mode of a user, with keys of its own: `spec` says what it is made of."""

    mode: ClassVar[str] = "custom"

    @abstractmethod
    def spec(self) -> CorrectionSpec:
        """The full specification of the correction."""
        raise NotImplementedError

    def problems(self) -> Iterator[Problem]:
        yield from CorrectionConfig.problems(self)
        spec = self.spec()
        parts = {part.name: getattr(spec, part.name) for part in fields(spec) if part.name != "weight"}
        parts |= {part.name: getattr(spec.weight, part.name) for part in fields(spec.weight)} if spec.weight else {}
        try:
            CustomConfig(**parts)
        except ConfigError as error:
            for found in error.problems:
                rule = f"must have a spec() that keeps the rules of correction=custom: {str(found).rstrip('.')}"
                yield Problem(key="", rule=rule, value=self.source)


def _interval_problems(low: float | None, high: float) -> Iterator[Problem]:
    """Yield the broken rule of a pair of bounds, reported under `low`; if `low` is None, the broken rule of `high`."""
    if low is None:
        if not _CAP.holds(high):
            yield Problem(key="high", rule=_CAP.text, value=high, remedy="For example high=2.0.")
        return
    if not 0 < low < high:
        yield Problem(
            key="low",
            rule=f"must satisfy 0 < low < high (high is {high})",
            value=low,
            remedy="Bounds are on rho = pi_train / pi_rollout, for example low=0.5 high=2.0.",
        )
    elif not low <= 1 <= high:
        yield Problem(
            key="low",
            rule=f"and high={high} must enclose 1, or on-policy tokens are rejected",
            value=low,
            remedy="For example low=0.5 high=2.0.",
        )


def _level_notes(weight: WeightSpec) -> Iterator[str]:
    """Yield a sentence for every bound that was probably intended for another level."""
    low, high = weight.low or 0.0, weight.high or 0.0
    if weight.level is Level.geometric and weight.bound is not Bound.none and (high > 1.1 or 0 < low < 0.9):
        loose = high if high > 1.1 else low
        yield f"a bound of {loose:g} on a geometric mean practically never binds: peers stay within 0.99 and 1.01"
    if weight.level is Level.sequence and weight.bound is not Bound.none and high < 1.1:
        yield f"a cap of {high:g} on the product over a response binds on nearly every response: peers use 2 to 10"


CORRECTIONS: Final[dict[str, type[CorrectionConfig]]] = {
    kind.mode: kind
    for kind in (RecomputeConfig, PPOISConfig, VanillaISConfig, TISConfig, MISConfig, BypassConfig, CustomConfig)
}
"""Mode -> config class, the options of `correction=`."""
