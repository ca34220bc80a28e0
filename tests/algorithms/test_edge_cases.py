"""The edge cases that a mismatch correction has to decide, one test and one decision each.

Not here, because no tensor of `algorithms` shows them: a log-prob that the engine did not return or returned too few
of (the rollout refuses or drops the sample), a step that was skipped or resumed (the trainer), sums over a sequence
that is split over ranks (nothing splits one). Infinities and NaN in every combination are in test_loss.py, criteria
on numbers worked by hand in test_rejection.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from algorithm_cases import MODES, Batch, backward, by_response, corrected, counts, packed, random_batch, tokens_of
from torch import Tensor

from algorithms.advantage import sample_advantages
from algorithms.config import (
    Aggregation,
    CorrectionConfig,
    CustomConfig,
    Estimator,
    Level,
    MISConfig,
    PPOClipConfig,
    RecomputeConfig,
    RejectConfig,
    RejectedDenominator,
    TISConfig,
    VanillaISConfig,
)
from algorithms.correction import weight_total
from algorithms.masked import segment_sum
from algorithms.mismatch import StepContext, mismatch_stats
from algorithms.tokens import Tokens

VETO = CustomConfig(reject=RejectConfig(veto=1e-4))


def batch_of(delta: list[float], *lengths: int, mask: list[bool] | None = None) -> Batch:
    """Responses with these Delta and log mu = -3, A = 1 and pi_theta = pi_old."""
    gaps = torch.tensor(delta)
    rollout = torch.full_like(gaps, -3.0)
    return Batch(
        logprobs=rollout + gaps,
        old_logprobs=rollout + gaps,
        rollout_logprobs=rollout,
        advantages=torch.ones_like(gaps),
        entropy=torch.ones_like(gaps),
        response_mask=torch.ones_like(gaps, dtype=torch.bool) if mask is None else torch.tensor(mask),
        cu_seqlens=packed(*lengths),
    )


def metrics_of(
    batch: Batch, config: CorrectionConfig | None = None, context: StepContext | None = None
) -> dict[str, float | None]:
    """`mismatch/*` without the prefix."""
    found = mismatch_stats(
        tokens_of(batch),
        None if config is None else corrected(batch, config),
        context=context,
    ).metrics()
    return {name.removeprefix("mismatch/"): value for name, value in found.items()}


def assert_same_metrics(one: Batch, other: Batch, config: CorrectionConfig) -> None:
    found, expected = metrics_of(one, config), metrics_of(other, config)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        assert value is None or found[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def gradient_of(batch: Batch, config: CorrectionConfig, aggregation: Aggregation = Aggregation.token_mean) -> Tensor:
    output, gradient = backward(batch, config, PPOClipConfig(aggregation=aggregation), totals=counts(batch, config))
    assert torch.isfinite(output.loss) and torch.isfinite(gradient).all()
    return gradient


# ---------------------------------------------------------------- log-probs that are none


@pytest.mark.scenario(26)
@pytest.mark.parametrize("side", ["rollout_logprobs", "old_logprobs"])
def test_minus_infinity_is_rejected_vetoed_and_counted(side: str) -> None:
    # log mu = -inf: the engine had filtered the token. log pi = -inf: rho = 0. Neither has a K3, clamped or not.
    batch = batch_of([0.1, 0.2, 0.3, 0.4], 2, 2)
    setattr(batch, side, getattr(batch, side).clone())
    getattr(batch, side)[0] = -math.inf
    for name, config in MODES.items():
        correction = corrected(batch, config)
        assert correction.weight[0] == 0 and not correction.keep[0], name
        assert gradient_of(batch, config)[0] == 0, name
    assert corrected(batch, RecomputeConfig()).keep.tolist() == [False, True, True, True]
    vetoed = corrected(batch, VETO)
    assert vetoed.keep.tolist() == [False, False, True, True]
    assert by_response(vetoed.rejected["veto"], batch.cu_seqlens) == [2, 0]
    metrics, others = metrics_of(batch, VETO), metrics_of(batch_of([0.2, 0.3, 0.4], 1, 2))
    assert (metrics["invalid_tokens"], metrics["invalid_samples"], metrics["num_tokens"]) == (1, 1, 4)
    assert (metrics["rs/veto_frac"], metrics["rs/veto_seq_frac"]) == (0.5, 0.5)
    for name in ("k1", "k3", "js", "tv", "abs_logdiff_max", "ess/raw_token"):
        assert metrics[name] == pytest.approx(others[name], rel=1e-6), name


def test_a_token_that_the_trainer_all_but_excludes_has_weight_0_and_the_k3_of_the_clamp() -> None:
    batch = batch_of([-57.0, 0.0, 0.0], 2, 1)  # log pi = -60
    assert corrected(batch, VanillaISConfig()).weight.tolist() == pytest.approx([math.exp(-20), 1, 1], rel=1e-6)
    assert corrected(batch, VETO).keep.tolist() == [False, False, True]
    metrics = metrics_of(batch)
    assert metrics["k3"] == pytest.approx((math.exp(-20) + 19) / 3, rel=1e-4)
    assert metrics["k1"] == pytest.approx(57 / 3, rel=1e-4)  # K1 and the largest |Delta| are not clamped
    assert metrics["abs_logdiff_max"] == 57 and metrics["k3_clamped_tokens"] == 1


def test_a_token_that_the_engine_all_but_excluded_has_a_finite_weight() -> None:
    batch = batch_of([0.0, 0.0], 2)
    batch.rollout_logprobs = torch.tensor([-60.0, -1.0])
    batch.old_logprobs = batch.logprobs = torch.tensor([-1.0, -1.0])
    assert corrected(batch, VanillaISConfig()).weight.tolist() == pytest.approx([math.exp(20), 1], rel=1e-6)
    assert corrected(batch, TISConfig()).weight.tolist() == [2, 1]
    assert corrected(batch, MISConfig()).keep.tolist() == [False, True]
    assert corrected(batch, VETO).keep.tolist() == [True, True]  # rho is large, not small
    for config in MODES.values():
        gradient_of(batch, config)
    metrics = metrics_of(batch)
    assert metrics["k3"] == pytest.approx((math.exp(20) - 21) / 2, rel=1e-4)
    assert metrics["k1"] == pytest.approx(-59 / 2, rel=1e-4)


# ---------------------------------------------------------------- responses without tokens


@pytest.mark.parametrize("name", MODES)
def test_a_response_without_tokens_counts_nowhere(name: str) -> None:
    # The second response was truncated to nothing, the last has tokens of a tool only.
    config = MODES[name]
    plain = batch_of([0.1, -0.2, 0.3, 0.05, 0.4], 3, 2)
    with_empty = batch_of([0.1, -0.2, 0.3, 0.05, 0.4, 9.0, 9.0], 3, 0, 2, 2, mask=[True] * 5 + [False] * 2)
    assert counts(with_empty, config) == counts(plain, config)
    for batch in (plain, with_empty):
        batch.advantages = torch.where(batch.response_mask, batch.advantages, math.nan)
    for aggregation in (Aggregation.token_mean, Aggregation.seq_mean_token_mean, Aggregation.seq_mean_token_sum):
        gradient = gradient_of(with_empty, config, aggregation)
        assert torch.equal(gradient[:5], gradient_of(plain, config, aggregation))
        assert gradient[5:].tolist() == [0, 0]
    totals = [
        weight_total(config.spec(), corrected(batch, config), cu_seqlens=batch.cu_seqlens)
        for batch in (plain, with_empty)
    ]
    torch.testing.assert_close(totals[1], totals[0], rtol=1e-12, atol=0)
    assert_same_metrics(with_empty, plain, config)


@pytest.mark.parametrize("name", MODES)
def test_one_token_and_no_token(name: str) -> None:
    config = MODES[name]
    assert gradient_of(batch_of([0.0], 1), config).tolist() == pytest.approx([-1.0])
    assert gradient_of(batch_of([]), config).tolist() == []
    assert gradient_of(batch_of([], 0, 0), config).tolist() == []
    empty = metrics_of(batch_of([], 0, 0), config)
    assert empty["num_tokens"] == 0 and empty["k3"] is None and empty["ess/raw_token"] is None


# ---------------------------------------------------------------- groups and steps without a signal


def test_a_fully_rejected_group_keeps_its_advantages_and_adds_nothing() -> None:
    # Group 0 is rejected whole. Its advantages come from all samples by default, from none with scope kept.
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    batch = batch_of([2.0, 2.0, 0.0, 0.0], 1, 1, 1, 1)
    config = MISConfig()
    kept = segment_sum(corrected(batch, config).keep.float(), batch.cu_seqlens) > 0
    assert kept.tolist() == [False, False, True, True]
    for name in ("grpo", "dr_grpo", "rloo"):
        everybody = sample_advantages(Estimator[name], rewards, groups, epsilon=1e-6)
        assert everybody[0] > 0 > everybody[1] and torch.equal(everybody[:2], everybody[2:])
        assert sample_advantages(Estimator[name], rewards, groups, epsilon=1e-6, kept=kept).tolist()[:2] == [0, 0]
        gradient = gradient_of(replace(batch, advantages=everybody), config)
        assert gradient[:2].tolist() == [0, 0] and (gradient[2:] != 0).all()


def test_a_group_with_equal_rewards_adds_nothing_to_the_loss_and_all_to_the_metrics() -> None:
    batch = batch_of([0.3, -0.2, 0.1], 2, 1)
    batch.advantages = sample_advantages(Estimator.grpo, torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), epsilon=1e-6)[
        [0, 0, 1]
    ]
    assert batch.advantages.tolist() == [0, 0, 0]
    for name, config in MODES.items():
        output, gradient = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
        assert output.loss.item() == 0 and not gradient.any(), name
        metrics = metrics_of(batch, config)
        assert metrics["num_tokens"] == 3 and metrics["k3"] is not None and metrics["k3"] > 0.01


@pytest.mark.scenario(26)
@pytest.mark.parametrize("denominator", RejectedDenominator)
def test_with_every_token_rejected_the_step_is_nothing_and_the_metrics_say_so(denominator: RejectedDenominator) -> None:
    batch = batch_of([2.0, -2.0, 3.0], 2, 1)
    config = MISConfig(rejected_denominator=denominator)
    output, gradient = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
    assert output.loss.item() == 0 and gradient.tolist() == [0, 0, 0]
    assert weight_total(config.spec(), corrected(batch, config), cu_seqlens=batch.cu_seqlens).tolist() == [0, 0]
    metrics = metrics_of(batch, config)
    assert (metrics["kept_frac"], metrics["rs/token_frac"], metrics["rs/seq_frac"]) == (0, 1, 1)
    assert metrics["k3"] == metrics_of(batch)["k3"] and metrics["k3"] is not None
    assert metrics["rs/kept_k3"] is None and metrics["rs/rejected_k3"] == pytest.approx(metrics["k3"], rel=1e-4)
    assert metrics["is/applied_mean"] == 0


def test_an_overlong_response_that_the_loss_leaves_out_is_still_measured() -> None:
    # What leaves the loss without being rejected has coefficient or advantage 0; the original mask is measured.
    batch = batch_of([0.3, -0.2, 1.5], 2, 1)
    filtered = replace(batch, advantages=torch.tensor([1.0, 1.0, 0.0]))
    assert gradient_of(filtered, TISConfig())[2] == 0
    assert torch.equal(gradient_of(filtered, TISConfig())[:2], gradient_of(batch, TISConfig())[:2])
    assert metrics_of(filtered, TISConfig()) == metrics_of(batch, TISConfig())
    assert metrics_of(batch)["k3_max"] == pytest.approx(math.exp(1.5) - 2.5, rel=1e-4)


# ---------------------------------------------------------------- several turns

TURNS = [0.1, -0.3, 8.0, 0.2, 0.4]
TURNS_MASK = [True, True, False, True, True]


def test_tokens_of_the_environment_are_neither_weighed_nor_measured() -> None:
    turns = batch_of(TURNS, 5, mask=TURNS_MASK)
    joined = batch_of([0.1, -0.3, 0.2, 0.4], 4)
    for level in (Level.token, Level.sequence, Level.geometric, Level.prefix):
        config = VanillaISConfig(level=level)
        weight = corrected(turns, config).weight
        torch.testing.assert_close(weight[turns.response_mask], corrected(joined, config).weight)
        assert weight[2] == 1
    assert_same_metrics(turns, joined, TISConfig())


def test_a_segment_is_a_turn_and_a_veto_is_the_whole_trajectory() -> None:
    turns = batch_of(TURNS, 5, mask=TURNS_MASK)
    weight = corrected(turns, VanillaISConfig(level=Level.segment)).weight
    torch.testing.assert_close(weight, torch.tensor([-0.2, -0.2, 0.0, 0.6, 0.6]).exp())
    # A catastrophic token of the second turn takes the first with it; one of the environment takes nothing.
    late = batch_of([0.1, -0.3, 0.0, 0.2, -10.0, 0.1], 5, 1, mask=[*TURNS_MASK, True])
    assert corrected(late, VETO).keep.tolist() == [False, False, False, False, False, True]
    outside = batch_of([0.1, -0.3, -10.0, 0.2, 0.4], 5, mask=TURNS_MASK)
    assert corrected(outside, VETO).keep.tolist() == TURNS_MASK
    # The bound of a segment weight rejects that turn alone.
    bounded = MISConfig(level=Level.segment, low=0.9, high=2.0, reject=RejectConfig())
    assert corrected(turns, bounded).keep.tolist() == [False, False, False, True, True]


def test_the_end_of_sequence_token_is_trained_and_what_was_trimmed_behind_it_is_not() -> None:
    # The last token of the response is the end of sequence; two trimmed tokens of a stop string follow off the mask.
    batch = batch_of([0.1, 0.2, 0.3, 5.0, -5.0], 5, mask=[True, True, True, False, False])
    for name, config in MODES.items():
        correction = corrected(batch, config)
        assert not correction.keep[3:].any(), name
        gradient = gradient_of(batch, config)
        assert gradient[3:].tolist() == [0, 0], name
    assert gradient_of(batch, TISConfig())[2] < 0
    assert metrics_of(batch)["num_tokens"] == 3
    assert metrics_of(batch)["abs_logdiff_max"] == pytest.approx(0.3, abs=1e-6)


# ---------------------------------------------------------------- padding and weight versions


def test_padding_behind_the_last_response_belongs_to_none() -> None:
    plain = batch_of([0.1, -0.2, 0.3], 2, 1)
    padded = batch_of([0.1, -0.2, 0.3, 7.0, -7.0], 2, 1, mask=[True, True, True, False, False])
    for name, config in MODES.items():
        one, other = corrected(padded, config), corrected(plain, config)
        assert torch.equal(one.keep[:3], other.keep) and torch.equal(one.weight[:3], other.weight), name
        assert gradient_of(padded, config)[3:].tolist() == [0, 0], name
    assert_same_metrics(padded, plain, TISConfig())


def test_responses_of_older_weights_are_measured_by_their_lag() -> None:
    # Three updates behind: adapters that reached the engine late, or weights that it averages.
    batch = batch_of([0.1, 0.1, 1.0, -1.0, 0.5], 2, 2, 1)
    metrics = metrics_of(batch, context=StepContext(lags=torch.tensor([0, 3, 25])))
    fresh, late = batch.select([0]), batch.select([1])
    assert metrics["by_lag/0/k3"] == pytest.approx(metrics_of(fresh)["k3"], rel=1e-4)
    assert metrics["by_lag/3/k3"] == pytest.approx(metrics_of(late)["k3"], rel=1e-4)
    assert metrics["by_lag/7+/k3"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-4)
    assert not {"by_lag/1/k3", "by_lag/2/k3"} & metrics.keys()


def test_tokens_of_older_weights_are_measured_by_their_own_lag() -> None:
    """A response that went on after an update: its first tokens are older than its last."""
    batch = batch_of([0.1, 0.2, 1.0, -1.0, 0.5], 2, 2, 1)
    lags = torch.zeros(len(batch.response_mask), dtype=torch.int64)
    response = batch.response_mask.nonzero().flatten()
    lags[response] = torch.tensor([1, 0, 1, 1, 9])
    metrics = metrics_of(batch, context=StepContext(lags=torch.tensor([1, 1, 9]), token_lags=lags))
    k3s = [math.exp(delta) - 1 - delta for delta in (0.1, 0.2, 1.0, -1.0, 0.5)]
    assert metrics["by_lag/0/k3"] == pytest.approx(k3s[1], rel=1e-4)
    assert metrics["by_lag/1/k3"] == pytest.approx((k3s[0] + k3s[2] + k3s[3]) / 3, rel=1e-4)
    assert metrics["by_lag/7+/k3"] == pytest.approx(k3s[4], rel=1e-4)


def test_lengths_do_not_change_what_a_token_is() -> None:
    # The same tokens as one response or as five: token statistics agree, whatever the levels make of them.
    one = random_batch(4, [5], noise=0.5)
    five = replace(one, cu_seqlens=packed(1, 1, 1, 1, 1))
    metrics, apart = metrics_of(one), metrics_of(five)
    for name in ("k1", "k2", "k3", "js", "tv", "chi2_token", "ess/raw_token", "num_tokens"):
        assert metrics[name] == pytest.approx(apart[name], rel=1e-12), name


def tokens_at(cu_seqlens: Tensor, mask: Tensor) -> Tokens:
    zeros = torch.zeros(mask.shape)
    return Tokens(trainer_logprobs=zeros, rollout_logprobs=zeros, response_mask=mask, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("cu_seqlens", "said"),
    [
        ([0, 5, 12], "must begin with 0, never fall and end at most at T=10, got [0, 5, 12]"),
        ([5, 10], "must begin with 0, never fall and end at most at T=10, got [5, 10]"),
        ([0, 7, 5, 10], "must begin with 0, never fall and end at most at T=10, got [0, 7, 5, 10]"),
        ([0, 5], "behind cu_seqlens[-1]=5 are padding, but response_mask marks 5 of them as response tokens"),
        ([[0, 10]], "must be an [N+1] tensor of integers, got [1, 2] torch.int64"),
        ([0.0, 10.0], "must be an [N+1] tensor of integers, got [2] torch.float32"),
        ([], "must be an [N+1] tensor of integers, got [0] torch.float32"),
    ],
)
def test_sequences_that_do_not_fit_the_tokens_are_refused(cu_seqlens: list[float], said: str) -> None:
    """segment_reduce would write out of bounds, or leave the last tokens out."""
    mask = torch.ones(10, dtype=torch.bool)
    with pytest.raises(ValueError, match=re.escape(said)):
        tokens_at(torch.tensor(cu_seqlens), mask)
    mask[8:] = False
    tokens_at(torch.tensor([0, 5, 8]), mask)
