"""The resolved objective as one line of mathematics: config -> text. Printed before torch is imported.

The line states the sum that `algorithms.loss` computes: mask and rejection, weight, surrogate, denominator. m: response
mask, mu: pi_rollout, sg: stop-gradient, 1[..]: 1 if true else 0, |y|: response tokens, Z: mean weight of the kept
tokens or responses. prod_y, geomean_y, sum_y, mean_y, max_y, min_y: over the response; prod_<=t: up to and with the
token; prod_turn: over its turn. K3 = rho - 1 - log(rho) of the rho in the same line: pi_old/mu,
or pi_theta/mu.
"""

from __future__ import annotations

from algorithms.config import (
    Aggregation,
    Anchor,
    Bound,
    Compared,
    CorrectionConfig,
    KLPlacement,
    Level,
    LossConfig,
    ReferenceKLConfig,
    RejectedDenominator,
    SelfNormalize,
    WeightSpec,
)
from algorithms.config.combine import resolved_loss
from algorithms.config.loss import (
    RATIO_CAP,
    TAU_NEGATIVE,
    TAU_POSITIVE,
    CISPOConfig,
    CustomAggregation,
    CustomLoss,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    PPOClipConfig,
    SAPOConfig,
)
from algorithms.config.spec import CorrectionSpec, CustomBound, CustomLevel


def objective(config: CorrectionConfig, loss: LossConfig) -> str:
    """The minimised objective in one line, for example
    `L = -sum m * sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.2) * A / N_tokens`.

    Raises TypeError for a config of no known mode or surrogate.
    """
    spec = config.spec()
    loss = resolved_loss(config, loss)
    rho = "pi_theta/mu" if spec.compared is Compared.current else "pi_old/mu"
    factors = ["m"]
    if spec.weight is not None:
        factors += _indicators(spec.weight, rho)
    factors += spec.reject.indicators(rho)
    if spec.weight is not None:
        factors.append(f"sg({_weight(spec.weight, rho)})")
    factors += [_surrogate(loss, anchor="pi_old" if spec.anchor is Anchor.old else "mu"), "A"]
    divisor = _divisor(spec, loss)
    line = f"L = -sum {' * '.join(factors)}{divisor}"
    if loss.entropy_coef:
        # Under `drop` the mask of the denominator is `keep`, and the bonus uses the same coefficients.
        mask = "m_kept" if _drops(spec) else "m"
        line += f" - {loss.entropy_coef:g} * sum {mask} * H(pi_theta){divisor}"
    return line


def reference_term(config: ReferenceKLConfig) -> str:
    """The term that the KL to the reference adds to the line; empty without a KL."""
    if not config.coef:
        return ""
    kl = f"{config.estimator.name}[KL(pi_theta || pi_ref)]"
    if config.placement is KLPlacement.reward:
        return f", with {config.coef:g} * sum_y {kl} taken off the reward"
    of = "tokens, weight and divisor of the first term" if config.weighted else "weight 1 and the divisor of its tokens"
    return f" + {config.coef:g} * {kl}, with {of}"


def _at(level: Level | CustomLevel, rho: str) -> str:
    if isinstance(level, CustomLevel):
        return level.text(rho=rho)
    return {
        Level.token: rho,
        Level.sequence: f"prod_y({rho})",
        Level.geometric: f"geomean_y({rho})",
        Level.segment: f"prod_turn({rho})",
        Level.prefix: f"prod_<=t({rho})",
    }[level]


def _indicators(weight: WeightSpec, rho: str) -> list[str]:
    """Indicator factors of the tokens that the bound of the weight keeps."""
    at = _at(weight.level, rho)
    if weight.bound is Bound.mask and weight.low is None:
        return [f"1[{at} <= {weight.high:g}]"]
    if weight.bound is Bound.mask:
        return [f"1[{weight.low:g} <= {at} <= {weight.high:g}]"]
    if weight.bound is Bound.truncate and weight.low is not None:
        return [f"1[{at} >= {weight.low:g}]"]
    return []


def _weight(weight: WeightSpec, rho: str) -> str:
    at = _at(weight.level, rho)
    if isinstance(weight.bound, CustomBound):
        return weight.bound.text(weight=at)
    match weight.bound:
        case Bound.none | Bound.mask:
            return at
        case Bound.truncate:
            return f"min({at}, {weight.high:g})"
        case Bound.clip:
            return f"clip({at}, {weight.low:g}, {weight.high:g})"


def _surrogate(loss: LossConfig, *, anchor: str) -> str:
    ratio = f"pi_theta/{anchor}"
    match loss:
        case CustomLoss():
            return loss.text(ratio=ratio, anchor=anchor)
        case PPOClipConfig():
            dual = "" if loss.dual_clip is None else f", dual {loss.dual_clip:g}"
            return f"PPOclip({ratio}, {loss.clip_low:g}, {loss.clip_high:g}{dual})"
        case GSPOConfig():
            return f"PPOclip(geomean_y({ratio}), {loss.clip_low:g}, {loss.clip_high:g})"
        case CISPOConfig():
            return f"sg(clip({ratio}, {loss.low:g}, {loss.high:g})) * log pi_theta"
        case DPPOTVConfig() | DPPOKLConfig():
            return f"{loss.surrogate}({ratio}, {loss.threshold:g}, cap {RATIO_CAP:g})"
        case SAPOConfig():
            return f"SAPO({ratio}, {TAU_POSITIVE:g}, {TAU_NEGATIVE:g})"
        case _ if loss.surrogate == "reinforce":
            return "log pi_theta"
    raise TypeError(f"no surrogate for a {type(loss).__name__}")


def _divisor(spec: CorrectionSpec, loss: LossConfig) -> str:
    kept = "_kept" if _drops(spec) else ""
    counts: dict[Aggregation | CustomAggregation, list[str]] = {
        Aggregation.token_mean: [f"N_tokens{kept}"],
        Aggregation.seq_mean_token_mean: [f"N_sequences{kept}", f"|y{kept}|"],
        Aggregation.seq_mean_token_sum: [f"N_sequences{kept}"],
        Aggregation.fixed_length: [f"N_sequences{kept}", f"{loss.fixed_length_tokens}"],
        Aggregation.token_sum: [],
    }
    aggregation = loss.aggregation
    own = [aggregation.text(kept=kept)] if isinstance(aggregation, CustomAggregation) else counts[aggregation]
    parts = [*(["Z"] if spec.self_normalize is SelfNormalize.mean_one else []), *own]
    if not parts:
        return ""
    divisor = " * ".join(parts)
    return f" / ({divisor})" if " " in divisor else f" / {divisor}"


def _drops(spec: CorrectionSpec) -> bool:
    return spec.rejected_denominator is RejectedDenominator.drop
