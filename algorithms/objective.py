"""The resolved objective as one line of mathematics: config -> text. Printed before torch is imported.

It says what `algorithms.loss` computes: mask and rejection, weight, surrogate, denominator. m: response mask, mu:
pi_rollout, sg: stop-gradient, 1[..]: 1 if true else 0, prod_y and geomean_y: over the response, |y|: its tokens.
"""

from __future__ import annotations

from algorithms.config import (
    Aggregation,
    BypassConfig,
    BypassLoss,
    CorrectionConfig,
    Level,
    LossConfig,
    MISBound,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectedDenominator,
    TISConfig,
    VanillaISConfig,
)


def objective(config: CorrectionConfig, loss: LossConfig) -> str:
    """What is minimised, one line, for example
    `L = -sum m * sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A / N_tokens`.

    Raises:
        TypeError: a config of no known mode.
    """
    factors = ["m", *_weight_factors(config), _surrogate(config, loss), "A"]
    divisor = _divisor(config, loss)
    line = f"L = -sum {' * '.join(factors)}{divisor}"
    if loss.entropy_coef:
        # Under `drop` the denominator's mask is the kept one, and the bonus uses the same coefficients.
        mask = "m_kept" if _drops(config) else "m"
        line += f" - {loss.entropy_coef:g} * sum {mask} * H(pi_theta){divisor}"
    return line


def _weight_factors(config: CorrectionConfig) -> list[str]:
    """Indicators of what is kept, then the weight; empty for a weight of 1."""
    match config:
        case VanillaISConfig(level=level):
            return [f"sg({_rho(level)})"]
        case TISConfig(level=level, cap=cap):
            return [f"sg(min({_rho(level)}, {cap:g}))"]
        case MISConfig():
            return _mis_factors(config)
        case BypassConfig(loss=BypassLoss.reinforce, cap=cap):
            return [f"sg(min(pi_theta/mu, {cap:g}))"]
        case RecomputeConfig() | PPOISConfig() | BypassConfig():
            return []
        case _:
            raise TypeError(f"no correction mode for a {type(config).__name__}")


def _mis_factors(config: MISConfig) -> list[str]:
    rho = _rho(config.level)
    match config.bound:
        case MISBound.mask:
            factors = [f"1[{config.low:g} <= {rho} <= {config.high:g}]", f"sg({rho})"]
        case MISBound.truncate:
            factors = [f"1[{rho} >= {config.low:g}]", f"sg(min({rho}, {config.high:g}))"]
    if config.veto:
        factors.insert(1, f"1[min_y(pi_old/mu) >= {config.veto:g}]")
    return factors


def _rho(level: Level) -> str:
    match level:
        case Level.token:
            return "pi_old/mu"
        case Level.sequence:
            return "prod_y(pi_old/mu)"
        case Level.geometric:
            return "geomean_y(pi_old/mu)"


def _surrogate(config: CorrectionConfig, loss: LossConfig) -> str:
    if isinstance(config, BypassConfig) and config.loss is BypassLoss.reinforce:
        return "log pi_theta"
    anchor = "mu" if isinstance(config, PPOISConfig | BypassConfig) else "pi_old"
    dual = "" if loss.dual_clip is None else f", dual {loss.dual_clip:g}"
    return f"PPOclip(pi_theta/{anchor}, {loss.clip_low:g}, {loss.clip_high:g}{dual})"


def _divisor(config: CorrectionConfig, loss: LossConfig) -> str:
    kept = "_kept" if _drops(config) else ""
    match loss.aggregation:
        case Aggregation.token_mean:
            return f" / N_tokens{kept}"
        case Aggregation.seq_mean_token_mean:
            return f" / (N_sequences{kept} * |y{kept}|)"
        case Aggregation.seq_mean_token_sum:
            return f" / N_sequences{kept}"
        case Aggregation.fixed_length:
            return f" / (N_sequences{kept} * {loss.fixed_length_tokens})"
        case Aggregation.token_sum:
            return ""


def _drops(config: CorrectionConfig) -> bool:
    return isinstance(config, MISConfig) and config.rejected_denominator is RejectedDenominator.drop
