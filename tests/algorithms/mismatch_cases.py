"""Shared by the tests of the mismatch statistics: names of metrics, the golden vector, the statistics of a batch."""

import math
from collections.abc import Mapping

import pytest
import torch
from algorithm_cases import Batch, corrected, packed, tokens_of

from algorithms.config import CorrectionConfig
from algorithms.correction import Correction
from algorithms.mismatch import MismatchStats, StepContext, mismatch_stats

PLAIN = [
    *("k1", "k2", "k3", "k3_p99", "k3_max", "js", "chi2_token", "chi2_seq", "tv", "mult_err", "pearson"),
    *("abs_logdiff_mean", "abs_logdiff_max", "prob_diff_mean", "prob_diff_max"),
    *("ppl/train", "ppl/rollout", "ppl/log_diff", "ppl/log_abs_diff", "ppl/ratio"),
    *("ess/raw_token", "ess/raw_seq", "khat/token", "khat/seq", "is/raw_mean", "is/raw_max"),
    *("invalid_tokens", "invalid_samples", "k3_clamped_tokens", "num_tokens"),
]
"""What is known without a correction."""
CORRECTED = [
    *("ess/applied_token", "ess/applied_seq", "is/applied_mean", "is/clip_frac_hi", "is/clip_frac_lo", "is/clip_mass"),
    *("rs/token_frac", "rs/seq_frac", "rs/kept_len", "rs/rejected_len", "rs/kept_k3", "rs/rejected_k3", "kept_frac"),
]
IN_CONTEXT = ["rs/kept_reward", "rs/rejected_reward", "eff_lr", "eff_lr_pos", "eff_lr_neg"]

GOLDEN_DELTA = (0.1, -0.3, 0.9, 0.0, -2.5)


def names(*groups: list[str]) -> set[str]:
    return {f"mismatch/{name}" for group in groups for name in group}


def golden() -> Batch:
    """Two responses, Delta = (0.1, -0.3, 0.9) and (0, -2.5), mu = 1 / e everywhere."""
    delta = torch.tensor(GOLDEN_DELTA)
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


def stats_of(batch: Batch, config: CorrectionConfig | None, context: StepContext | None = None) -> MismatchStats:
    return stats_with(batch, None if config is None else corrected(batch, config), context)


def stats_with(batch: Batch, correction: Correction | None, context: StepContext | None = None) -> MismatchStats:
    """With a context the advantages are known too."""
    return mismatch_stats(tokens_of(batch, None if context is None else batch.advantages), correction, context)


def check(metrics: dict[str, float | None], expected: Mapping[str, float | None]) -> None:
    for name, value in expected.items():
        actual = metrics[f"mismatch/{name}"]
        assert actual == (None if value is None else pytest.approx(value, abs=1e-5)), name


def js(delta: float) -> float:
    """The textbook form, per token."""
    rho = math.exp(delta)
    return (math.log(2) - math.log(1 + rho) + rho * (math.log(2) + delta - math.log(1 + rho))) / 2
