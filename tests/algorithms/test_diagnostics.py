"""Mismatch and loss statistics: the golden vector, merging, missing values, independence of the mode."""

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import MODES, Batch, corrected, packed, random_batch

from algorithms.config import LossConfig
from algorithms.correction import CorrectionConfig, MISBound, MISConfig, RecomputeConfig, TISConfig, VanillaISConfig
from algorithms.diagnostics import MismatchStats, loss_stats, mismatch_metrics, mismatch_stats
from algorithms.surrogate import SURROGATES

NAMES = {
    "mismatch/k1",
    "mismatch/k2",
    "mismatch/k3",
    "mismatch/k3_max",
    "mismatch/abs_logdiff_mean",
    "mismatch/abs_logdiff_max",
    "mismatch/prob_diff_mean",
    "mismatch/prob_diff_max",
    "mismatch/ess/raw_token",
    "mismatch/ess/applied_token",
    "mismatch/is/raw_mean",
    "mismatch/is/raw_max",
    "mismatch/is/applied_mean",
    "mismatch/is/clip_frac",
    "mismatch/kept_frac",
    "mismatch/invalid_tokens",
    "mismatch/num_tokens",
}
COUNTS = {"mismatch/invalid_tokens", "mismatch/num_tokens"}


def golden() -> Batch:
    """Two responses, Delta = (0.1, -0.3, 0.9) and (0, -2.5)."""
    delta = torch.tensor([0.1, -0.3, 0.9, 0.0, -2.5])
    rollout = torch.full_like(delta, -1.0)
    return Batch(
        logprobs=rollout + delta,
        old_logprobs=rollout + delta,
        rollout_logprobs=rollout,
        advantages=torch.ones_like(delta),
        entropy=torch.ones_like(delta),
        response_mask=torch.ones_like(delta, dtype=torch.bool),
        cu_seqlens=packed(3, 2),
    )


def stats_of(batch: Batch, config: CorrectionConfig | None) -> MismatchStats:
    return mismatch_stats(
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        response_mask=batch.response_mask,
        cu_seqlens=batch.cu_seqlens,
        correction=None if config is None else corrected(batch, config),
    )


def check(metrics: dict[str, float | None], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(value, abs=1e-5), name


def test_golden_metrics() -> None:
    metrics = stats_of(golden(), TISConfig()).metrics()
    assert set(metrics) == NAMES
    probabilities = [math.exp(-1 + delta) - math.exp(-1) for delta in (0.1, -0.3, 0.9, 0.0, -2.5)]
    expected = {
        "k1": 0.36,
        "k2": 0.716,
        "k3": 0.43753545,
        "k3_max": 1.58208500,
        "abs_logdiff_mean": 0.76,
        "abs_logdiff_max": 2.5,
        "prob_diff_mean": sum(map(abs, probabilities)) / 5,
        "prob_diff_max": probabilities[2],
        "ess/raw_token": 0.657718,
        "ess/applied_token": 0.716721,
        "is/raw_mean": 1.0775356,
        "is/raw_max": 2.45960,
        "is/applied_mean": 0.98561483,
        "is/clip_frac": 0.2,
        "kept_frac": 1.0,
        "invalid_tokens": 0,
        "num_tokens": 5,
    }
    check(metrics, expected)


def test_golden_metrics_of_masked_weights() -> None:
    check(
        stats_of(golden(), MISConfig()).metrics(),
        {"ess/applied_token": 0.584767, "is/applied_mean": 0.569198, "is/clip_frac": 0.0, "kept_frac": 0.6},
    )
    check(
        stats_of(golden(), MISConfig(bound=MISBound.truncate)).metrics(),
        {"is/applied_mean": 0.969198, "is/clip_frac": 0.2, "kept_frac": 0.8},
    )
    check(
        stats_of(golden(), VanillaISConfig()).metrics(),
        {"ess/applied_token": 0.657718, "is/applied_mean": 1.0775356, "is/clip_frac": 0.0, "kept_frac": 1.0},
    )


def test_what_is_measured_does_not_depend_on_the_mode() -> None:
    batch = random_batch(3, [5, 0, 9], noise=2.0)
    batch.rollout_logprobs[batch.response_mask.nonzero()[0]] = math.nan
    measured = NAMES - {f"mismatch/{name}" for name in ("ess/applied_token", "is/applied_mean", "is/clip_frac")}
    measured -= {"mismatch/kept_frac"}
    reference = stats_of(batch, None).metrics()
    for name, config in MODES.items():
        metrics = stats_of(batch, config).metrics()
        assert {key: metrics[key] for key in measured} == {key: reference[key] for key in measured}, name
    assert reference["mismatch/k3"] is not None and reference["mismatch/k3"] > 0
    assert reference["mismatch/invalid_tokens"] == 1
    rejected = stats_of(batch, MODES["mis-token-mask"]).metrics()["mismatch/kept_frac"]
    assert rejected is not None and rejected < 1


def test_without_a_correction_the_applied_metrics_are_absent() -> None:
    batch = golden()
    metrics = mismatch_metrics(
        old_logprobs=batch.old_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        response_mask=batch.response_mask,
        cu_seqlens=batch.cu_seqlens,
    )
    absent = {name for name, value in metrics.items() if value is None}
    assert absent == {f"mismatch/{n}" for n in ("ess/applied_token", "is/applied_mean", "is/clip_frac", "kept_frac")}


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_no_tokens_is_none_and_never_zero(num_tokens: int) -> None:
    batch = random_batch(0, [num_tokens], noise=1.0)
    batch.response_mask = torch.zeros(num_tokens, dtype=torch.bool)
    metrics = stats_of(batch, TISConfig()).metrics()
    assert {name: value for name, value in metrics.items() if value is not None} == dict.fromkeys(COUNTS, 0)


def test_only_invalid_tokens_is_none_with_their_count() -> None:
    batch = golden()
    batch.rollout_logprobs = torch.full((5,), -math.inf)
    metrics = stats_of(batch, TISConfig()).metrics()
    present = {name: value for name, value in metrics.items() if value is not None}
    assert present == {"mismatch/invalid_tokens": 5, "mismatch/num_tokens": 5, "mismatch/kept_frac": 0}


def test_invalid_tokens_leave_the_means() -> None:
    batch = golden()
    clean = stats_of(batch, TISConfig()).metrics()
    bad = replace(
        batch,
        old_logprobs=torch.cat([batch.old_logprobs, torch.tensor([math.nan, -1.0, -math.inf])]),
        rollout_logprobs=torch.cat([batch.rollout_logprobs, torch.tensor([-1.0, 0.5, -1.0])]),
        response_mask=torch.ones(8, dtype=torch.bool),
        cu_seqlens=packed(3, 2, 3),
    )
    metrics = stats_of(bad, TISConfig()).metrics()
    changed = {"mismatch/invalid_tokens", "mismatch/num_tokens", "mismatch/kept_frac"}
    assert {k: v for k, v in metrics.items() if k not in changed} == {
        k: v for k, v in clean.items() if k not in changed
    }
    check(metrics, {"invalid_tokens": 3, "num_tokens": 8, "kept_frac": 5 / 8})


def test_a_bad_token_cannot_overflow_the_means() -> None:
    batch = golden()
    batch.rollout_logprobs = torch.full((5,), -60.0)
    batch.old_logprobs = torch.full((5,), -0.5)
    metrics = stats_of(batch, VanillaISConfig()).metrics()
    check(metrics, {"abs_logdiff_mean": 59.5, "k1": -59.5, "ess/raw_token": 1.0})
    assert metrics["mismatch/k3"] == pytest.approx(math.exp(20) - 21, rel=1e-6)


def test_merging_is_the_same_as_one_batch() -> None:
    batch = random_batch(11, [4, 7, 1, 3], noise=1.5)
    whole = stats_of(batch, MISConfig()).metrics()
    parts = [stats_of(batch.select(chosen), MISConfig()) for chosen in ([0, 2], [1], [3])]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert merged.metrics() == pytest.approx(whole, rel=1e-12)
    assert merged.sums.dtype == torch.float64 and merged.maxes.dtype == torch.float64
    # What all_reduce does with SUM and MAX over three ranks.
    reduced = MismatchStats(
        sums=torch.stack([part.sums for part in parts]).sum(0),
        maxes=torch.stack([part.maxes for part in parts]).amax(0),
    )
    assert reduced.metrics() == pytest.approx(whole, rel=1e-12)


def test_k3_of_nearly_equal_engines_is_not_rounding_noise() -> None:
    rollout = torch.zeros(1000)
    delta = torch.full((1000,), 1e-6)
    metrics = mismatch_metrics(
        old_logprobs=rollout + delta,
        rollout_logprobs=rollout,
        response_mask=torch.ones(1000, dtype=torch.bool),
        cu_seqlens=packed(1000),
    )
    assert metrics["mismatch/k3"] == pytest.approx(0.5e-12, rel=1e-5)


def test_loss_statistics_by_hand() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    anchor = torch.full((5,), -2.0)
    ratios = torch.tensor([1.5, 0.5, 1.0, 1.2, 9.0])
    surrogate = SURROGATES["ppo_clip"](
        anchor + ratios.log(),
        anchor_logprobs=anchor,
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
        config=config,
    )
    active = torch.tensor([True, True, True, True, False])
    stats = loss_stats(
        surrogate,
        policy=torch.tensor(2.0),
        active=active,
        invalid=torch.tensor([False, False, False, False, True]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]),
        response_mask=torch.ones(5, dtype=torch.bool),
    )
    expected = {
        "loss/policy": 2.0,
        "loss/clip_frac_low": 0.25,
        "loss/clip_frac_high": 0.25,
        "loss/ratio_mean": 1.05,
        "loss/ratio_max": 1.5,
        "loss/invalid_tokens": 1.0,
        "policy/entropy": 4.0,
    }
    assert stats.metrics() == pytest.approx(expected)
    twice = stats.merge(stats)
    assert twice.metrics(optimizer_steps=2) == pytest.approx({**expected, "loss/invalid_tokens": 2.0})


def test_loss_statistics_without_tokens_or_entropy_are_none() -> None:
    surrogate = SURROGATES["ppo_clip"](
        torch.zeros(2), anchor_logprobs=torch.zeros(2), advantages=torch.zeros(2), config=LossConfig()
    )
    nothing = torch.zeros(2, dtype=torch.bool)
    stats = loss_stats(
        surrogate,
        policy=torch.tensor(0.0),
        active=nothing,
        invalid=nothing,
        entropy=None,
        response_mask=torch.ones(2, dtype=torch.bool),
    )
    present = {name: value for name, value in stats.metrics().items() if value is not None}
    assert present == {"loss/policy": 0.0, "loss/invalid_tokens": 0.0}


def test_pi_old_must_be_there() -> None:
    batch = golden()
    with pytest.raises(ValueError, match="old_logprobs must have the shape"):
        stats_of(replace(batch, old_logprobs=torch.zeros(4)), None)
    assert stats_of(batch, RecomputeConfig()).metrics()["mismatch/is/applied_mean"] == 1.0
