"""The spec behind modes and presets, what is refused, and the levels that only longer responses tell apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_cases import corrected, packed, random_batch
from torch import Tensor

from algorithms.config import (
    PRESETS,
    Aggregation,
    Anchor,
    Bound,
    BypassConfig,
    BypassLoss,
    Compared,
    ConfigError,
    CorrectionConfig,
    CustomConfig,
    GSPOConfig,
    Level,
    LossConfig,
    MISBound,
    MISConfig,
    PPOClipConfig,
    ReinforceConfig,
    RejectConfig,
    RejectedDenominator,
    SAPOConfig,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.combine import combination_notes, combination_problems, resolved_loss
from algorithms.correction import Correction, correct, weight_total
from algorithms.mismatch import mismatch_stats
from algorithms.tokens import Tokens

ROLLOUT = -3.0


def on_turns(config: CorrectionConfig, delta: list[float], mask: list[bool], *lengths: int) -> Correction:
    """The correction of responses with these Delta, some tokens off the mask."""
    gaps = torch.tensor(delta)
    rollout = torch.full_like(gaps, ROLLOUT)
    return correct(
        config.spec(),
        Tokens(
            trainer_logprobs=rollout + gaps,
            rollout_logprobs=rollout,
            response_mask=torch.tensor(mask),
            cu_seqlens=packed(*lengths),
        ),
    )


def weights(correction: Correction) -> list[float]:
    return [round(value, 4) for value in correction.weight.tolist()]


def e(value: float) -> float:
    return round(math.exp(value), 4)


# ---------------------------------------------------------------- levels


def test_prefix_weights_of_the_golden_vector() -> None:
    correction = on_turns(VanillaISConfig(level=Level.prefix), [0.1, -0.3, 0.9, 0.0, -2.5], [True] * 5, 3, 2)
    torch.testing.assert_close(
        correction.weight, torch.tensor([1.10517, 0.818731, 2.013753, 1.0, 0.0820850]), atol=1e-5, rtol=1e-5
    )


def test_prefix_sums_over_turns_and_segment_does_not() -> None:
    # One prompt token, a turn of two, an observation of one, a turn of two; then a response of one token.
    delta = [9.0, 0.1, 0.2, 9.0, -0.4, 0.3, 0.7]
    mask = [False, True, True, False, True, True, True]
    prefix = on_turns(VanillaISConfig(level=Level.prefix), delta, mask, 6, 1)
    assert weights(prefix) == [1, e(0.1), e(0.3), 1, e(-0.1), e(0.2), e(0.7)]
    segment = on_turns(VanillaISConfig(level=Level.segment), delta, mask, 6, 1)
    assert weights(segment) == [1, e(0.3), e(0.3), 1, e(-0.1), e(-0.1), e(0.7)]
    sequence = on_turns(VanillaISConfig(level=Level.sequence), delta, mask, 6, 1)
    assert weights(sequence) == [1, e(0.2), e(0.2), 1, e(0.2), e(0.2), e(0.7)]
    geometric = on_turns(VanillaISConfig(level=Level.geometric), delta, mask, 6, 1)
    assert weights(geometric) == [1, e(0.05), e(0.05), 1, e(0.05), e(0.05), e(0.7)]


def test_responses_that_touch_are_different_segments() -> None:
    correction = on_turns(VanillaISConfig(level=Level.segment), [0.1, 0.2, 0.3], [True] * 3, 2, 1)
    assert weights(correction) == [e(0.3), e(0.3), e(0.3)]
    correction = on_turns(VanillaISConfig(level=Level.segment), [0.1, 0.2, 0.4], [True] * 3, 1, 2)
    assert weights(correction) == [e(0.1), e(0.6), e(0.6)]


def test_an_invalid_token_costs_its_segment_or_what_follows_it() -> None:
    delta = [0.1, 0.1, 0.0, 0.2, math.nan, 0.1]
    mask = [True, True, False, True, True, True]
    segment = on_turns(VanillaISConfig(level=Level.segment), delta, mask, 6)
    assert segment.keep.tolist() == [True, True, False, False, False, False]
    prefix = on_turns(VanillaISConfig(level=Level.prefix), delta, mask, 6)
    assert prefix.keep.tolist() == [True, True, False, True, False, False]
    assert weights(prefix) == [e(0.1), e(0.2), 1, e(0.4), 0, 0]


def test_clip_raises_and_cuts_and_says_so() -> None:
    config = CustomConfig(level=Level.token, bound=Bound.clip, low=0.5, high=2.0)
    correction = on_turns(config, [0.1, -2.0, 3.0], [True] * 3, 3)
    assert weights(correction) == [e(0.1), 0.5, 2.0]
    assert correction.keep.all()
    raw = [math.exp(0.1), math.exp(-2.0), math.exp(3.0)]
    assert correction.raw_weight is not None and correction.raw_weight.tolist() == pytest.approx(raw, rel=1e-6)
    cut = torch.tensor([0.1, -2.0, 3.0])
    tokens = Tokens(
        trainer_logprobs=ROLLOUT + cut,
        rollout_logprobs=torch.full((3,), ROLLOUT),
        response_mask=torch.ones(3, dtype=torch.bool),
        cu_seqlens=packed(3),
    )
    effects = mismatch_stats(tokens, correction).named_sums()
    expected = {"raw_weight": sum(raw), "is/clip_mass": raw[2] - 2, "is/clip_frac_hi": 1, "is/clip_frac_lo": 1}
    assert {name: effects[name] for name in expected} == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- self-normalisation


def test_the_normaliser_counts_tokens_or_responses() -> None:
    delta, mask = [0.1, -0.3, 0.9, 0.0, -2.5], [True] * 5
    tis = TISConfig()
    total = weight_total(tis.spec(), on_turns(tis, delta, mask, 3, 2), cu_seqlens=packed(3, 2))
    assert (total[0] / total[1]).item() == pytest.approx(0.98561483, abs=1e-6)
    # The weight at the cap becomes 2 / 0.98561 = 2.029, above it.
    assert 2 / (total[0] / total[1]).item() == pytest.approx(2.02919, abs=1e-4)
    sequence = TISConfig(level=Level.sequence)
    total = weight_total(sequence.spec(), on_turns(sequence, delta, mask, 3, 2), cu_seqlens=packed(3, 2))
    assert total.tolist() == pytest.approx([2.082085, 2.0], abs=1e-5)


def test_the_normaliser_leaves_out_what_is_rejected() -> None:
    mis = MISConfig(reject=RejectConfig())
    total = weight_total(
        mis.spec(), on_turns(mis, [0.1, -0.3, 0.9, 0.0, -2.5], [True] * 5, 3, 2), cu_seqlens=packed(3, 2)
    )
    assert total.tolist() == pytest.approx([1.10517 + 0.74082 + 1.0, 3.0], abs=1e-4)
    geometric = MISConfig(level=Level.geometric)
    total = weight_total(
        geometric.spec(), on_turns(geometric, [0.1, -0.3, 0.9, 0.0, -2.5], [True] * 5, 3, 2), cu_seqlens=packed(3, 2)
    )
    assert total.tolist() == pytest.approx([1.26280, 1.0], abs=1e-4)


@pytest.mark.parametrize("config", [TISConfig(), TISConfig(level=Level.geometric)])
def test_normalisers_of_micro_batches_add_up(config: TISConfig) -> None:
    batch = random_batch(0, [5, 0, 7, 1, 9], noise=0.4)
    whole = weight_total(config.spec(), corrected(batch, config), cu_seqlens=batch.cu_seqlens)
    parts = []
    for sequences in ([0, 1, 2], [3], [4]):
        part = batch.select(sequences)
        parts.append(weight_total(config.spec(), corrected(part, config), cu_seqlens=part.cu_seqlens))
    torch.testing.assert_close(sum(parts[1:], parts[0]), whole, rtol=1e-12, atol=0)


# ---------------------------------------------------------------- presets


def test_verl_has_nineteen_presets_and_miles_one() -> None:
    assert len(PRESETS) == 20
    assert len([name for name in PRESETS if name.startswith("decoupled_")]) == 10
    assert len([name for name in PRESETS if name.startswith("bypass_")]) == 8


VERL: dict[str, tuple[str, Level | None, str | None, str]] = {
    "decoupled_token_is": ("old", Level.token, None, "ppo"),
    "decoupled_seq_is": ("old", Level.sequence, None, "ppo"),
    "decoupled_token_icepop": ("old", Level.token, None, "ppo"),
    "decoupled_seq_is_rs": ("old", Level.sequence, "sequence_ratio", "ppo"),
    "decoupled_geo_rs": ("old", None, "geometric_ratio", "ppo"),
    "decoupled_geo_rs_seq_tis": ("old", Level.sequence, "geometric_ratio", "ppo"),
    "decoupled_geo_rs_token_tis": ("old", Level.token, "geometric_ratio", "ppo"),
    "decoupled_k3_rs": ("old", None, "mean_k3", "ppo"),
    "decoupled_k3_rs_seq_tis": ("old", Level.sequence, "mean_k3", "ppo"),
    "decoupled_k3_rs_token_tis": ("old", Level.token, "mean_k3", "ppo"),
    "bypass_ppo_clip": ("mu", None, None, "ppo"),
    "bypass_ppo_clip_geo_rs": ("mu", None, "geometric_ratio", "ppo"),
    "bypass_ppo_clip_k3_rs": ("mu", None, "mean_k3", "ppo"),
    "bypass_pg_is": ("mu", Level.sequence, None, "reinforce"),
    "bypass_pg_token_icepop": ("mu", Level.token, None, "reinforce"),
    "bypass_pg_geo_rs": ("mu", None, "geometric_ratio", "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("mu", Level.sequence, "geometric_ratio", "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("mu", Level.token, "geometric_ratio", "reinforce"),
    "disabled": ("old", None, None, "ppo"),
}
"""Preset -> anchor, level of the weight, criterion, loss: the table of verl's RolloutCorrectionConfig."""


@pytest.mark.parametrize("name", VERL)
def test_a_preset_of_verl_means_what_its_table_says(name: str) -> None:
    anchor, level, criterion, loss = VERL[name]
    spec = PRESETS[name].spec()
    assert (spec.compared is Compared.old) == (anchor == "old")
    assert (None if spec.weight is None else spec.weight.level) is level
    assert spec.reject.active() == ([] if criterion is None else [criterion])
    assert resolved_loss(PRESETS[name], PPOClipConfig()).surrogate == ("ppo_clip" if loss == "ppo" else "reinforce")
    drops = anchor == "old" and criterion is not None
    assert (spec.rejected_denominator is RejectedDenominator.drop) == drops


def test_thresholds_of_the_presets() -> None:
    icepop = PRESETS["decoupled_token_icepop"].spec().weight
    assert icepop is not None and (icepop.bound, icepop.low, icepop.high) == (Bound.mask, 0.5, 5.0)
    seq = PRESETS["decoupled_seq_is_rs"].spec()
    assert seq.weight is not None and (seq.weight.high, seq.reject.sequence_ratio) == (2.0, [0.5, 2.0])
    assert PRESETS["decoupled_geo_rs"].spec().reject.geometric_ratio == [0.999, 1.001]
    assert PRESETS["bypass_ppo_clip_k3_rs"].spec().reject.mean_k3 == 0.01
    miles = PRESETS["miles_default"].spec()
    assert miles.self_normalize is SelfNormalize.mean_one
    assert (miles.reject.token_ratio, miles.reject.veto) == ([0.5, 2.0], 1e-4)


# ---------------------------------------------------------------- rules

REFUSED: list[tuple[type[CorrectionConfig], dict[str, Any], str]] = [
    (CustomConfig, {"anchor": Anchor.rollout, "level": Level.token}, "a weight counts it twice"),
    (CustomConfig, {"compared": Compared.current}, "compared must be old with anchor=old"),
    (CustomConfig, {"bound": Bound.truncate}, "bound has no effect without a weight"),
    (CustomConfig, {"high": 2.0}, r"high has no effect without a weight \(level\)"),
    (CustomConfig, {"level": Level.token, "low": 0.5}, "low has no effect with bound=none"),
    (CustomConfig, {"level": Level.token, "bound": Bound.clip, "high": 2.0}, "low must be set with bound=clip"),
    (CustomConfig, {"level": Level.token, "bound": Bound.truncate}, "high must be set with bound=truncate"),
    (CustomConfig, {"level": Level.token, "bound": Bound.clip, "low": 3.0, "high": 2.0}, "0 < low < high"),
    (CustomConfig, {"level": Level.token, "bound": Bound.truncate, "high": 0.5}, "high must be >= 1"),
    (CustomConfig, {"self_normalize": SelfNormalize.mean_one}, "self_normalize has no effect without a weight"),
    (BypassConfig, {"level": Level.sequence}, "level has no effect with correction.loss=ppo_clip"),
    (BypassConfig, {"cap": 0.5}, "cap must be >= 1"),
    (TISConfig, {"cap": -1.0}, "correction=vanilla_is"),
    (MISConfig, {"low": 1.5}, "must enclose 1"),
    (MISConfig, {"low": None, "high": 0.5}, "high must be >= 1"),
    (BypassConfig, {"cap": 5.0}, "cap has no effect with correction.loss=ppo_clip"),
    (TISConfig, {"level": "sequence"}, "level must be one of Level.token, Level.sequence, .*, got 'sequence'"),
    (CustomConfig, {"level": "sentence"}, "level must be one of Level.token"),
]


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_combinations_that_mean_nothing_are_refused(
    kind: type[CorrectionConfig], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**values)


COMBINED: list[tuple[CorrectionConfig, LossConfig, list[str]]] = [
    (BypassConfig(loss=BypassLoss.reinforce), SAPOConfig(), ["loss"]),
    (BypassConfig(loss=BypassLoss.reinforce), ReinforceConfig(), []),
    (BypassConfig(), ReinforceConfig(), ["loss"]),
    (TISConfig(), ReinforceConfig(), []),
    (TISConfig(self_normalize=SelfNormalize.mean_one), PPOClipConfig(entropy_coef=0.1), ["loss.entropy_coef"]),
    (TISConfig(self_normalize=SelfNormalize.mean_one), PPOClipConfig(), []),
]


@pytest.mark.parametrize(("correction", "loss", "expected"), COMBINED, ids=lambda value: str(value)[:40])
def test_rules_between_correction_and_loss(correction: CorrectionConfig, loss: LossConfig, expected: list[str]) -> None:
    assert [problem.key for problem in combination_problems(correction, loss)] == expected


def test_a_correction_without_a_ratio_makes_the_loss_reinforce() -> None:
    loss = resolved_loss(BypassConfig(loss=BypassLoss.reinforce), PPOClipConfig(entropy_coef=0.25))
    assert isinstance(loss, ReinforceConfig) and loss.entropy_coef == 0.25
    clipped = PPOClipConfig(clip_high=0.28)
    assert resolved_loss(TISConfig(), clipped) is clipped


def test_bounds_of_the_wrong_level_are_noted() -> None:
    assert "practically never binds" in next(iter(MISConfig(level=Level.geometric).notes()))
    assert "binds on nearly every response" in next(iter(TISConfig(level=Level.sequence, cap=1.01).notes()))
    assert not list(MISConfig().notes())
    notes = list(combination_notes(TISConfig(level=Level.sequence), GSPOConfig()))
    assert "correction.level=geometric matches it" in notes[0]


def test_what_changes_nothing_is_noted() -> None:
    drop = CustomConfig(rejected_denominator=RejectedDenominator.drop)
    assert "changes nothing" in next(iter(drop.notes()))
    summed = PPOClipConfig(aggregation=Aggregation.token_sum)
    mis = MISConfig(rejected_denominator=RejectedDenominator.drop)
    assert "divides by nothing" in next(iter(combination_notes(mis, summed)))
    reinforce = BypassConfig(loss=BypassLoss.reinforce)
    assert "there is no ratio" in next(iter(combination_notes(reinforce, PPOClipConfig(clip_high=0.28))))
    assert "rejects at random" in next(iter(RejectConfig(opsm=1e-4).notes()))


def test_a_mask_may_do_without_a_lower_bound() -> None:
    # TRL's sequence_mask: only responses above the bound are rejected.
    config = MISConfig(level=Level.sequence, low=None, high=3.0, reject=RejectConfig())
    correction = on_turns(config, [0.1, -9.0, 0.6, 0.6], [True] * 4, 2, 2)
    assert correction.keep.tolist() == [True, True, False, False]


def test_mis_with_truncation_is_a_value_of_custom() -> None:
    batch = random_batch(3, [6, 9, 2], noise=1.0)
    mis = corrected(batch, MISConfig(bound=MISBound.truncate))
    custom = corrected(
        batch,
        CustomConfig(level=Level.token, bound=Bound.truncate, low=0.5, high=2.0, reject=RejectConfig(veto=1e-4)),
    )
    pairs: list[tuple[Tensor, Tensor]] = [(mis.weight, custom.weight), (mis.keep, custom.keep)]
    assert all(torch.equal(one, other) for one, other in pairs)
