"""A correction -> the next stricter one: fewer tokens kept, bounds nearer to 1. Never a wider bound, never more tokens.

    recompute, ppo_is    mis with its own defaults: rho in [0.5, 2], veto 1e-4
    vanilla_is           tis at the same level with its default cap
    tis                  mis at the same level: what lies beyond the cap is rejected instead of cut, on both sides
    mis                  both bounds nearer to 1
    bypass               also rejects tokens with pi_theta / mu outside [0.5, 2], and responses by a veto of 1e-4;
                         then, and under loss=reinforce for the cap, nearer to 1
    custom               the weight as under tis and mis; without one, the criteria as under bypass

"Nearer to 1" is the power 0.8, so that low and high stay reciprocal if they were. The result has the same anchor,
except that of ppo_is, whose correction inside the ratio cannot be bounded: it becomes pi_old.
"""

from __future__ import annotations

from dataclasses import replace

from algorithms.config import (
    BypassConfig,
    CorrectionConfig,
    CustomConfig,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.correction import BypassLoss
from algorithms.config.rejection import RejectConfig
from algorithms.config.spec import Bound

SHRINK = 0.8
"""Power of a bound that is pulled towards 1; C x 0.8 would leave the range of valid caps."""
TOKEN_RATIO = (0.5, 2.0)
"""Bounds of the token criterion that a correction without a weight gets first. Vetted: IcePop's neighbourhood."""
VETO = 1e-4


def tightened(correction: CorrectionConfig) -> CorrectionConfig:
    """The next stricter correction. Raises ConfigError if the bounds leave none, TypeError for an unknown mode."""
    match correction:
        case RecomputeConfig() | PPOISConfig():
            return MISConfig()
        case VanillaISConfig():
            return TISConfig(level=correction.level, self_normalize=correction.self_normalize)
        case TISConfig():
            high = _nearer(correction.cap)
            return MISConfig(level=correction.level, low=1 / high, high=high, self_normalize=correction.self_normalize)
        case MISConfig():
            return replace(correction, low=_nearer_or_none(correction.low), high=_nearer(correction.high))
        case BypassConfig():
            reject = _stricter(correction.reject)
            if correction.loss is BypassLoss.reinforce:
                return replace(correction, cap=_nearer(correction.cap), reject=reject)
            return replace(correction, reject=reject)
        case CustomConfig():
            return _tightened_custom(correction)
    raise TypeError(f"no stricter correction than a {type(correction).__name__} is known")


def _tightened_custom(correction: CustomConfig) -> CustomConfig:
    if correction.level is None:
        return replace(correction, reject=_stricter(correction.reject))
    if correction.bound is Bound.none or correction.high is None:
        return replace(correction, bound=Bound.truncate, high=TOKEN_RATIO[1])
    high = _nearer(correction.high)
    low = _nearer_or_none(correction.low)
    if correction.bound is Bound.truncate:
        return replace(correction, bound=Bound.mask, low=1 / high if low is None else low, high=high)
    return replace(correction, low=low, high=high)


def _stricter(reject: RejectConfig) -> RejectConfig:
    """With a criterion on the ratio of tokens and a veto, or with the one that is there pulled towards 1."""
    ratio = TOKEN_RATIO if reject.token_ratio is None else (_nearer(bound) for bound in reject.token_ratio)
    return replace(reject, token_ratio=list(ratio), veto=VETO if reject.veto is None else reject.veto)


def _nearer(bound: float) -> float:
    return bound**SHRINK


def _nearer_or_none(bound: float | None) -> float | None:
    return None if bound is None else _nearer(bound)
