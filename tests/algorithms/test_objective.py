"""The printed objective, for every mode and aggregation."""

import pytest
from algorithm_cases import MODES

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
from algorithms.objective import objective

DAPO = LossConfig(clip_high=0.28)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RecomputeConfig(), "m * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A"),
        (PPOISConfig(), "m * PPOclip(pi_theta/mu, 0.2, 0.28) * A"),
        (VanillaISConfig(), "m * sg(pi_old/mu) * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A"),
        (TISConfig(), "m * sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A"),
        (
            TISConfig(level=Level.sequence, cap=5.5),
            "m * sg(min(prod_y(pi_old/mu), 5.5)) * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A",
        ),
        (
            MISConfig(),
            "m * 1[0.5 <= pi_old/mu <= 2] * 1[min_y(pi_old/mu) >= 0.0001] * sg(pi_old/mu)"
            " * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A",
        ),
        (
            MISConfig(level=Level.geometric, bound=MISBound.truncate, veto=0.0),
            "m * 1[geomean_y(pi_old/mu) >= 0.5] * sg(min(geomean_y(pi_old/mu), 2))"
            " * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A",
        ),
        (BypassConfig(), "m * PPOclip(pi_theta/mu, 0.2, 0.28) * A"),
        (BypassConfig(loss=BypassLoss.reinforce, cap=3), "m * sg(min(pi_theta/mu, 3)) * log pi_theta * A"),
    ],
)
def test_modes(config: CorrectionConfig, expected: str) -> None:
    assert objective(config, DAPO) == f"L = -sum {expected} / N_tokens"


@pytest.mark.parametrize(
    ("aggregation", "keep", "drop"),
    [
        (Aggregation.token_mean, " / N_tokens", " / N_tokens_kept"),
        (Aggregation.seq_mean_token_mean, " / (N_sequences * |y|)", " / (N_sequences_kept * |y_kept|)"),
        (Aggregation.seq_mean_token_sum, " / N_sequences", " / N_sequences_kept"),
        (Aggregation.fixed_length, " / (N_sequences * 512)", " / (N_sequences_kept * 512)"),
        (Aggregation.token_sum, "", ""),
    ],
)
def test_aggregations(aggregation: Aggregation, keep: str, drop: str) -> None:
    fixed = 512 if aggregation is Aggregation.fixed_length else None
    loss = LossConfig(aggregation=aggregation, fixed_length_tokens=fixed)
    assert objective(TISConfig(), loss).endswith(f"0.2) * A{keep}")
    assert objective(MISConfig(rejected_denominator=RejectedDenominator.drop), loss).endswith(f"0.2) * A{drop}")


def test_dual_clip_and_entropy_bonus_are_shown() -> None:
    line = objective(RecomputeConfig(), LossConfig(dual_clip=3.0, entropy_coef=0.01))
    assert line == (
        "L = -sum m * PPOclip(pi_theta/pi_old, 0.2, 0.2, dual 3) * A / N_tokens - 0.01 * sum m * H(pi_theta) / N_tokens"
    )
    line = objective(MISConfig(rejected_denominator=RejectedDenominator.drop), LossConfig(entropy_coef=0.5))
    assert line.endswith(" - 0.5 * sum m_kept * H(pi_theta) / N_tokens_kept")


def test_every_mode_is_one_line_and_different_modes_differ() -> None:
    lines = {name: objective(config, DAPO) for name, config in MODES.items()}
    assert all("\n" not in line for line in lines.values())
    # Bypass with a PPO clip optimises what ppo_is does; they differ in the forwards they run.
    assert len(set(lines.values())) == len(lines) - 1
    assert lines["bypass"] == lines["ppo_is"]


def test_a_mode_without_a_line_is_refused() -> None:
    with pytest.raises(TypeError, match="CorrectionConfig"):
        objective(CorrectionConfig(), DAPO)
