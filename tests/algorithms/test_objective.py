"""The printed objective, for every mode and aggregation."""

import pytest
from algorithm_cases import EVERY_CRITERION, MODES

from algorithms.config import (
    Aggregation,
    BypassConfig,
    BypassLoss,
    CISPOConfig,
    CorrectionConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    Level,
    LossConfig,
    MISBound,
    MISConfig,
    PPOClipConfig,
    PPOISConfig,
    RecomputeConfig,
    ReinforceConfig,
    RejectConfig,
    RejectedDenominator,
    SAPOConfig,
    TISConfig,
    VanillaISConfig,
)
from algorithms.objective import objective

DAPO = PPOClipConfig(clip_high=0.28)


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
            MISConfig(level=Level.geometric, bound=MISBound.truncate, reject=RejectConfig()),
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
    loss = PPOClipConfig(aggregation=aggregation, fixed_length_tokens=fixed)
    assert objective(TISConfig(), loss).endswith(f"0.2) * A{keep}")
    assert objective(MISConfig(rejected_denominator=RejectedDenominator.drop), loss).endswith(f"0.2) * A{drop}")


def test_dual_clip_and_entropy_bonus_are_shown() -> None:
    line = objective(RecomputeConfig(), PPOClipConfig(dual_clip=3.0, entropy_coef=0.01))
    assert line == (
        "L = -sum m * PPOclip(pi_theta/pi_old, 0.2, 0.2, dual 3) * A / N_tokens - 0.01 * sum m * H(pi_theta) / N_tokens"
    )
    line = objective(MISConfig(rejected_denominator=RejectedDenominator.drop), PPOClipConfig(entropy_coef=0.5))
    assert line.endswith(" - 0.5 * sum m_kept * H(pi_theta) / N_tokens_kept")


def test_every_mode_is_one_line_and_different_modes_differ() -> None:
    lines = {name: objective(config, DAPO) for name, config in MODES.items()}
    assert all("\n" not in line for line in lines.values())
    by_line: dict[str, set[str]] = {}
    for name, line in lines.items():
        by_line.setdefault(line, set()).add(name)
    # Presets that are modes under another name; and bypass with a clip, which optimises what ppo_is does and differs in
    # the forwards it runs.
    assert {frozenset(names) for names in by_line.values() if len(names) > 1} == {
        frozenset({"recompute", "disabled"}),
        frozenset({"ppo_is", "bypass", "bypass_ppo_clip"}),
        frozenset({"tis-token", "decoupled_token_is"}),
        frozenset({"tis-sequence", "decoupled_seq_is"}),
    }


def test_every_criterion_and_the_normaliser_are_shown() -> None:
    line = objective(MODES["custom-every-criterion"], DAPO)
    assert line.count("1[") == len(EVERY_CRITERION.active())
    assert "1[0.5 <= geomean_y(pi_old/mu) <= 2]" in line
    assert "1[A >= 0 or mean_y(-log(pi_old/mu)) <= 0.5]" in line
    assert "1[sign(A)(pi_old - mu) <= 0.3]" in line
    assert objective(MODES["miles_default"], DAPO) == (
        "L = -sum m * 1[0.5 <= pi_old/mu <= 2] * 1[min_y(pi_old/mu) >= 0.0001] * sg(min(pi_old/mu, 2))"
        " * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A / (Z * N_tokens)"
    )
    assert objective(MODES["bypass_pg_geo_rs_seq_tis"], DAPO) == (
        "L = -sum m * 1[0.999 <= geomean_y(pi_theta/mu) <= 1.001] * sg(min(prod_y(pi_theta/mu), 2))"
        " * log pi_theta * A / N_tokens"
    )
    assert "sg(clip(pi_old/mu, 0.5, 2))" in objective(MODES["custom-clip"], DAPO)
    assert "sg(prod_<=t(pi_old/mu))" in objective(VanillaISConfig(level=Level.prefix), DAPO)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (GSPOConfig(), "PPOclip(geomean_y(pi_theta/pi_old), 0.0003, 0.0004)"),
        (CISPOConfig(), "sg(clip(pi_theta/pi_old, 0, 5)) * log pi_theta"),
        (ReinforceConfig(), "log pi_theta"),
        (DPPOTVConfig(), "dppo_tv(pi_theta/pi_old, 0.2, cap 20)"),
        (DPPOKLConfig(), "dppo_kl(pi_theta/pi_old, 0.05, cap 20)"),
        (SAPOConfig(), "SAPO(pi_theta/pi_old, 1, 1.05)"),
    ],
)
def test_surrogates(loss: LossConfig, expected: str) -> None:
    assert f"m * {expected} * A / " in objective(RecomputeConfig(), loss)


def test_a_mode_or_loss_without_a_line_is_refused() -> None:
    with pytest.raises(TypeError, match="CorrectionConfig"):
        objective(CorrectionConfig(), DAPO)
    with pytest.raises(TypeError, match="no surrogate for a LossConfig"):
        objective(RecomputeConfig(), LossConfig())
