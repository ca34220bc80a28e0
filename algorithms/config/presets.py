"""Named values of the correction spec: the presets of other libraries, under their own names.

The first nineteen are verl's (rollout correction, `RolloutCorrectionConfig`), with its thresholds and, under
loss.aggregation=token_mean, its denominators: verl's decoupled mode drops rejected tokens, its bypass mode keeps them.
(For means over responses verl divides by all responses, rejected or not: rejected_denominator=keep.) For a K1 criterion
verl compares 1/rho with the bounds, Parity compares rho; verl's intervals are (nearly) reciprocal, so both keep the
same responses. `miles_default` is miles' example for mismatch correction.
"""

from __future__ import annotations

from typing import Final

from algorithms.config.correction import BypassConfig, CorrectionConfig, CustomConfig, RecomputeConfig, TISConfig
from algorithms.config.rejection import RejectConfig
from algorithms.config.spec import Anchor, Bound, Compared, Level, RejectedDenominator, SelfNormalize

_CAP = 2.0
_ICEPOP = (0.5, 5.0)
_GEOMETRIC = (0.999, 1.001)
_K3 = 0.01


def _decoupled(reject: RejectConfig, *, level: Level | None = None) -> CustomConfig:
    """verl's three-policy form with rejection: pi_old is the anchor, rejected tokens leave the denominator."""
    return CustomConfig(
        level=level,
        bound=Bound.none if level is None else Bound.truncate,
        high=None if level is None else _CAP,
        reject=reject,
        rejected_denominator=RejectedDenominator.drop,
    )


def _icepop(anchor: Anchor, compared: Compared) -> CustomConfig:
    low, high = _ICEPOP
    return CustomConfig(anchor=anchor, compared=compared, level=Level.token, bound=Bound.mask, low=low, high=high)


def _bypass_pg(reject: RejectConfig, *, level: Level | None) -> CustomConfig:
    """verl's policy gradient on the rollout policy's samples, without pi_old."""
    return CustomConfig(
        anchor=Anchor.none,
        compared=Compared.current,
        level=level,
        bound=Bound.none if level is None else Bound.truncate,
        high=None if level is None else _CAP,
        reject=reject,
    )


def _geometric() -> RejectConfig:
    return RejectConfig(geometric_ratio=list(_GEOMETRIC))


def _mean_k3() -> RejectConfig:
    return RejectConfig(mean_k3=_K3)


PRESETS: Final[dict[str, CorrectionConfig]] = {
    "decoupled_token_is": TISConfig(level=Level.token, cap=_CAP),
    "decoupled_seq_is": TISConfig(level=Level.sequence, cap=_CAP),
    "decoupled_token_icepop": _icepop(Anchor.old, Compared.old),
    "decoupled_seq_is_rs": _decoupled(RejectConfig(sequence_ratio=[0.5, 2.0]), level=Level.sequence),
    "decoupled_geo_rs": _decoupled(_geometric()),
    "decoupled_geo_rs_seq_tis": _decoupled(_geometric(), level=Level.sequence),
    "decoupled_geo_rs_token_tis": _decoupled(_geometric(), level=Level.token),
    "decoupled_k3_rs": _decoupled(_mean_k3()),
    "decoupled_k3_rs_seq_tis": _decoupled(_mean_k3(), level=Level.sequence),
    "decoupled_k3_rs_token_tis": _decoupled(_mean_k3(), level=Level.token),
    "bypass_ppo_clip": BypassConfig(),
    "bypass_ppo_clip_geo_rs": BypassConfig(reject=_geometric()),
    "bypass_ppo_clip_k3_rs": BypassConfig(reject=_mean_k3()),
    "bypass_pg_is": _bypass_pg(RejectConfig(), level=Level.sequence),
    "bypass_pg_token_icepop": _icepop(Anchor.none, Compared.current),
    "bypass_pg_geo_rs": _bypass_pg(_geometric(), level=None),
    "bypass_pg_geo_rs_seq_tis": _bypass_pg(_geometric(), level=Level.sequence),
    "bypass_pg_geo_rs_token_tis": _bypass_pg(_geometric(), level=Level.token),
    "disabled": RecomputeConfig(),
    "miles_default": CustomConfig(
        level=Level.token,
        bound=Bound.truncate,
        high=_CAP,
        reject=RejectConfig(token_ratio=[0.5, 2.0], veto=1e-4),
        self_normalize=SelfNormalize.mean_one,
    ),
}
"""Name of a preset -> correction; chosen with `correction=<name>` on the command line."""
