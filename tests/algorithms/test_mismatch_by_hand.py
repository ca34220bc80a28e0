"""Mismatch statistics by hand: the golden vector, every metric, what was applied."""

import math
from collections.abc import Callable

import torch
from algorithm_cases import Batch, packed
from mismatch_cases import CORRECTED, GOLDEN_DELTA, IN_CONTEXT, PLAIN, check, golden, js, names, stats_of, stats_with

from algorithms.config import MISBound, MISConfig, TISConfig, VanillaISConfig
from algorithms.correction import Correction
from algorithms.mismatch import StepContext


def token_mean(function: Callable[[float], float]) -> float:
    return sum(function(delta) for delta in GOLDEN_DELTA) / 5


def test_golden_metrics() -> None:
    metrics = stats_of(golden(), TISConfig()).metrics()
    assert set(metrics) == names(PLAIN, CORRECTED, IN_CONTEXT)
    probabilities = [math.exp(-1 + delta) - math.exp(-1) for delta in GOLDEN_DELTA]
    expected = {
        "k1": 0.36,
        "k2": 0.716,
        "k3": 0.43753545,
        "k3_p99": 1.58208500,
        "k3_max": 1.58208500,
        "js": token_mean(js),
        "chi2_token": 0.765320,
        "chi2_seq": 1.030969,
        "tv": token_mean(lambda delta: abs(math.exp(delta) - 1) / 2),
        "abs_logdiff_mean": 0.76,
        "abs_logdiff_max": 2.5,
        "mult_err": (3 * 1.638211 + 2 * 6.591247) / 5,
        "prob_diff_mean": sum(map(abs, probabilities)) / 5,
        "prob_diff_max": probabilities[2],
        "pearson": None,
        "ppl/train": (math.exp(1 - 0.7 / 3) + math.exp(1 + 1.25)) / 2,
        "ppl/rollout": math.e,
        "ppl/log_diff": (-0.233333 + 1.25) / 2,
        "ppl/log_abs_diff": (0.233333 + 1.25) / 2,
        "ppl/ratio": 2.141116,
        "ess/raw_token": 0.657718,
        "ess/raw_seq": (2.0137527 + 0.0820850) ** 2 / (2 * (2.0137527**2 + 0.0820850**2)),
        "ess/applied_token": 0.716721,
        "khat/token": None,
        "khat/seq": None,
        "is/raw_mean": 1.0775356,
        "is/raw_max": 2.45960,
        "is/applied_mean": 0.98561483,
        "is/clip_frac_hi": 0.2,
        "is/clip_frac_lo": 0.0,
        "is/clip_mass": 0.4596031 / 5.387678,
        "rs/token_frac": 0.0,
        "rs/seq_frac": 0.0,
        "rs/kept_len": 2.5,
        "rs/rejected_len": None,
        "rs/kept_k3": 0.43753545,
        "rs/rejected_k3": None,
        "kept_frac": 1.0,
        "invalid_tokens": 0,
        "invalid_samples": 0,
        "k3_clamped_tokens": 0,
        "num_tokens": 5,
    }
    check(metrics, expected)
    by_response = [(1.1051709 + 0.7408182 + 2) / 3, (1 + 0.0820850) / 2]
    ess = sum(by_response) ** 2 / (2 * sum(weight**2 for weight in by_response))
    check(metrics, {"ess/applied_seq": ess, **dict.fromkeys(IN_CONTEXT)})


def test_golden_metrics_of_masked_weights() -> None:
    # [0.5, 2] keeps 1.105, 0.741 and 1; the second response loses a token, and so does the first.
    check(
        stats_of(golden(), MISConfig()).metrics(),
        {
            "ess/applied_token": 0.584767,
            "is/applied_mean": 0.569198,
            "is/clip_frac_hi": 0.0,
            "is/clip_mass": 0.0,
            "kept_frac": 0.6,
            "rs/token_frac": 0.4,
            "rs/seq_frac": 1.0,
            "rs/veto_frac": 0.0,
            "rs/veto_seq_frac": 0.0,
            "rs/kept_len": None,
            "rs/rejected_len": 2.5,
            "rs/kept_k3": (0.00517092 + 0.04081822 + 0) / 3,
            "rs/rejected_k3": (0.55960311 + 1.58208500) / 2,
        },
    )
    check(
        stats_of(golden(), MISConfig(bound=MISBound.truncate)).metrics(),
        {"is/applied_mean": 0.969198, "is/clip_frac_hi": 0.2, "kept_frac": 0.8},
    )
    check(
        stats_of(golden(), VanillaISConfig()).metrics(),
        {"ess/applied_token": 0.657718, "is/applied_mean": 1.0775356, "is/clip_frac_hi": 0.0, "kept_frac": 1.0},
    )


def by_hand() -> tuple[Batch, Correction, StepContext]:
    """Three responses of 2, 2 and 1 tokens behind a prompt token each; one token is cut, one raised, two rejected."""
    delta = torch.tensor([9.0, 1.0, -0.5, 9.0, -2.0, 0.25, 9.0, 0.5])
    mask = torch.tensor([False, True, True, False, True, True, False, True])
    rollout = torch.tensor([-9.0, -1.0, -2.0, -9.0, -0.5, -1.5, -9.0, -0.25])
    batch = Batch(
        logprobs=rollout + delta,
        old_logprobs=rollout + delta,
        rollout_logprobs=rollout,
        advantages=torch.tensor([math.nan, 2.0, -1.0, math.nan, -3.0, 4.0, math.nan, 0.0]),
        entropy=torch.tensor([math.nan, 0.5, 0.25, math.nan, 0.5, 1.0, math.nan, 0.25]),
        response_mask=mask,
        cu_seqlens=packed(3, 3, 2),
    )
    raw = torch.where(mask, delta.exp(), torch.ones(()))
    correction = Correction(
        anchor=batch.old_logprobs,
        weight=torch.tensor([1.0, 2.0, raw[2], 1.0, 0.0, 0.0, 1.0, 1.8]),
        keep=torch.tensor([False, True, True, False, False, False, False, True]),
        raw_weight=raw,
        rejected={
            "token_ratio": torch.tensor([False, False, False, False, True, False, False, False]),
            "mean_k3": torch.tensor([False, False, False, False, True, True, False, False]),
            "veto": torch.zeros(8, dtype=torch.bool),
        },
    )
    context = StepContext(
        rewards=torch.tensor([1.0, 0.0, 0.5]),
        lags=torch.tensor([0, 9, 0]),
    )
    return batch, correction, context


def test_what_was_applied_by_hand() -> None:
    batch, correction, context = by_hand()
    metrics = stats_with(batch, correction, context).metrics()
    raw = [math.exp(delta) for delta in (1.0, -0.5, -2.0, 0.25, 0.5)]
    weights = [2.0, raw[1], 0.0, 0.0, 1.8]
    k3s = [math.exp(delta) - 1 - delta for delta in (1.0, -0.5, -2.0, 0.25, 0.5)]
    means = [(2 + raw[1]) / 2, 0.0, 1.8]
    check(
        metrics,
        {
            "is/applied_mean": sum(weights) / 5,
            "ess/applied_token": sum(weights) ** 2 / (5 * sum(w * w for w in weights)),
            "ess/applied_seq": sum(means) ** 2 / (3 * sum(w * w for w in means)),
            "is/clip_frac_hi": 1 / 5,
            "is/clip_frac_lo": 1 / 5,
            "is/clip_mass": (raw[0] - 2) / sum(raw),
            "rs/token_frac": 2 / 5,
            "rs/seq_frac": 1 / 3,
            "rs/token_ratio_frac": 1 / 5,
            "rs/token_ratio_seq_frac": 1 / 3,
            "rs/mean_k3_frac": 2 / 5,
            "rs/mean_k3_seq_frac": 1 / 3,
            "rs/veto_frac": 0.0,
            "rs/veto_seq_frac": 0.0,
            "rs/kept_len": (2 + 1) / 2,
            "rs/rejected_len": 2.0,
            "rs/kept_reward": (1.0 + 0.5) / 2,
            "rs/rejected_reward": 0.0,
            "rs/kept_k3": (k3s[0] + k3s[1] + k3s[4]) / 3,
            "rs/rejected_k3": (k3s[2] + k3s[3]) / 2,
            "eff_lr": (2 * 2 + raw[1]) / (2 + 1 + 3 + 4),
            "eff_lr_pos": 2 * 2 / (2 + 4),
            "eff_lr_neg": raw[1] / (1 + 3),
            "by_lag/0/k3": (k3s[0] + k3s[1] + k3s[4]) / 3,
            "by_lag/7+/k3": (k3s[2] + k3s[3]) / 2,
            "kept_frac": 3 / 5,
            "num_tokens": 5,
        },
    )
    assert {name for name in metrics if "by_lag" in name} == names(["by_lag/0/k3", "by_lag/7+/k3"])


def test_pearson_of_two_engines() -> None:
    old, rollout = torch.tensor([0.9, 0.5, 0.1]).log(), torch.tensor([0.8, 0.6, 0.3]).log()
    expected = torch.corrcoef(torch.stack([old.exp(), rollout.exp()]))[0, 1].item()
    batch = golden().select([0])
    batch.old_logprobs, batch.rollout_logprobs = old, rollout
    check(stats_of(batch, None).metrics(), {"pearson": expected})
    batch.rollout_logprobs = old
    assert stats_of(batch, None).metrics()["mismatch/pearson"] == 1.0


def test_log_ratios_of_one_sign_have_their_own_extremes() -> None:
    # The prompt counts as Delta = 0 nowhere: not in the largest rho, not in the quantile.
    batch = golden().select([0])
    batch.response_mask = torch.tensor([False, True, True])
    batch.old_logprobs = torch.tensor([0.0, -2.0, -3.0])
    check(
        stats_of(batch, None).metrics(),
        {"is/raw_max": math.exp(-1), "abs_logdiff_max": 2.0, "k3_max": math.exp(-2) + 1, "abs_logdiff_mean": 1.5},
    )
