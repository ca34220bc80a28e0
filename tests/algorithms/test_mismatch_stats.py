"""Mismatch statistics: merging, missing values, rounding, independence of the mode. test_mismatch_by_hand.py has the
values by hand."""

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import MODES, Batch, by_response, packed, random_batch, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_cases import CORRECTED, IN_CONTEXT, PLAIN, check, golden, js, names, stats_of

from algorithms.config import MISConfig, RecomputeConfig, TISConfig, VanillaISConfig
from algorithms.kl import k3
from algorithms.mismatch import MismatchStats, StepContext, mismatch_stats
from algorithms.tail import pareto_k, quantile
from algorithms.tokens import Tokens

COUNTS = ["invalid_tokens", "invalid_samples", "k3_clamped_tokens", "num_tokens"]


def test_what_is_measured_does_not_depend_on_the_mode() -> None:
    batch = random_batch(3, [5, 0, 9], noise=2.0)
    batch.rollout_logprobs[batch.response_mask.nonzero()[0]] = math.nan
    reference = stats_of(batch, None).metrics()
    for name, config in MODES.items():
        metrics = stats_of(batch, config).metrics()
        assert {key: metrics[key] for key in names(PLAIN)} == {key: reference[key] for key in names(PLAIN)}, name
    assert reference["mismatch/k3"] is not None and reference["mismatch/k3"] > 0
    assert reference["mismatch/invalid_tokens"] == 1 and reference["mismatch/invalid_samples"] == 1
    rejected = stats_of(batch, MODES["mis-token-mask"]).metrics()["mismatch/kept_frac"]
    assert rejected is not None and rejected < 1


def test_without_a_correction_the_applied_metrics_are_absent() -> None:
    batch = golden()
    metrics = mismatch_stats(tokens_of(batch)).metrics()
    absent = {name for name, value in metrics.items() if value is None}
    assert absent == names(CORRECTED, IN_CONTEXT, ["pearson", "khat/token", "khat/seq"])


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_no_tokens_is_none_and_never_zero(num_tokens: int) -> None:
    batch = random_batch(0, [num_tokens], noise=1.0)
    batch.response_mask = torch.zeros(num_tokens, dtype=torch.bool)
    context = StepContext(rewards=torch.ones(1), lags=torch.zeros(1).long())
    for known in (None, context):
        metrics = stats_of(batch, TISConfig(), known).metrics()
        assert {name: value for name, value in metrics.items() if value is not None} == dict.fromkeys(names(COUNTS), 0)


def test_no_sequences_at_all() -> None:
    batch = random_batch(0, [], noise=1.0)
    assert stats_of(batch, TISConfig()).metrics()["mismatch/num_tokens"] == 0


def test_only_invalid_tokens_is_none_with_their_count() -> None:
    batch = golden()
    batch.rollout_logprobs = torch.full((5,), -math.inf)
    metrics = stats_of(batch, TISConfig()).metrics()
    present = {name.removeprefix("mismatch/"): value for name, value in metrics.items() if value is not None}
    assert present == {
        "invalid_tokens": 5,
        "invalid_samples": 2,
        "k3_clamped_tokens": 0,
        "num_tokens": 5,
        "kept_frac": 0,
        "rs/token_frac": 1,
        "rs/seq_frac": 1,
        "rs/rejected_len": 2.5,
    }


def test_invalid_tokens_leave_the_means() -> None:
    batch = golden()
    clean = stats_of(batch, TISConfig()).metrics()
    bad = replace(
        batch,
        old_logprobs=torch.cat([batch.old_logprobs, torch.tensor([math.nan, -1.0, -math.inf])]),
        rollout_logprobs=torch.cat([batch.rollout_logprobs, torch.tensor([-1.0, 0.5, -1.0])]),
        advantages=torch.ones(8),
        response_mask=torch.ones(8, dtype=torch.bool),
        cu_seqlens=packed(3, 2, 3),
    )
    metrics = stats_of(bad, TISConfig()).metrics()
    changed = names(COUNTS, ["kept_frac", "rs/token_frac", "rs/seq_frac", "rs/rejected_len"])
    check(metrics, {name.removeprefix("mismatch/"): clean[name] for name in clean.keys() - changed})
    check(metrics, {"invalid_tokens": 3, "invalid_samples": 1, "num_tokens": 8, "kept_frac": 5 / 8})


@pytest.mark.parametrize(
    ("old", "rollout", "valid"),
    [
        (-1.0, -math.inf, False),
        (-math.inf, -1.0, False),
        (math.nan, -1.0, False),
        (-1.0, math.nan, False),
        (math.inf, math.inf, False),
        (-1.0, 0.5, False),
        (-1.0, 1.1e-4, False),
        (-1.0, 1e-4, True),
        (0.0, -60.0, True),
        (-3.0e38, -1.0, True),
    ],
)
def test_which_tokens_are_valid(old: float, rollout: float, valid: bool) -> None:
    batch = golden()
    batch.old_logprobs[1], batch.rollout_logprobs[1] = old, rollout
    metrics = stats_of(batch, None).metrics()
    assert metrics["mismatch/invalid_tokens"] == (0 if valid else 1)
    assert all(value is None or math.isfinite(value) for value in metrics.values())


def test_a_bad_token_cannot_overflow_the_means() -> None:
    batch = golden()
    batch.rollout_logprobs = torch.full((5,), -60.0)
    batch.old_logprobs = torch.full((5,), -0.5)
    metrics = stats_of(batch, VanillaISConfig()).metrics()
    check(metrics, {"abs_logdiff_mean": 59.5, "k1": -59.5, "ess/raw_token": 1.0, "k3_clamped_tokens": 5})
    assert metrics["mismatch/k3"] == pytest.approx(math.exp(20) - 21, rel=1e-6)


CONFIGS = st.sampled_from(["tis-token", "mis-token-mask", "mis-sequence-truncate", "recompute", "vanilla_is-geometric"])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.sampled_from([0, 1, 5, 63, 64, 65, 200]), min_size=1, max_size=6),
    cut=st.integers(0, 6),
    name=CONFIGS,
    noise=st.sampled_from([1e-3, 0.3, 3.0]),
)
def test_merging_is_the_same_as_one_batch(seed: int, lengths: list[int], cut: int, name: str, noise: float) -> None:
    batch = random_batch(seed, lengths, noise=noise)
    if batch.response_mask.any():
        batch.rollout_logprobs[batch.response_mask.nonzero()[0]] = math.nan
    rewards, lags = torch.arange(len(lengths)).float(), torch.arange(len(lengths)) * 3

    def stats(sequences: list[int]) -> MismatchStats:
        part = batch.select(sequences)
        context = StepContext(rewards=rewards[sequences], lags=lags[sequences])
        return stats_of(part, MODES[name], context)

    order = list(range(len(lengths)))
    whole, parts = stats(order), [stats(order[:cut]), stats(order[cut:])]
    # What all_reduce does with SUM and MAX over ranks.
    reduced = replace(
        whole,
        sums=torch.stack([part.sums for part in parts]).sum(0),
        maxes=torch.stack([part.maxes for part in parts]).amax(0),
    )
    for merged in (parts[0].merge(parts[1]), reduced):
        torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-11, atol=1e-11)
        known = [(a, b) for a, b in zip(merged.metrics().values(), whole.metrics().values(), strict=True)]
        assert all((a is None) == (b is None) for a, b in known)
        assert [a for a, _ in known if a is not None] == pytest.approx(
            [b for _, b in known if b is not None], rel=1e-8, abs=1e-11
        )
    assert whole.sums.dtype == torch.float64 and whole.maxes.dtype == torch.float64


def test_sequences_of_every_length_are_told_apart() -> None:
    # Short and long ones, an empty one, and padding behind the last sequence.
    lengths = [3, 0, 61, 64, 1, 1, 200, 7, 128, 50]
    batch = random_batch(5, lengths, noise=0.5)
    batch.response_mask[-50:] = False
    padded = replace(batch, cu_seqlens=batch.cu_seqlens[:-1])
    means = []
    for start, stop in zip(padded.cu_seqlens[:-1].tolist(), padded.cu_seqlens[1:].tolist(), strict=True):
        delta = (batch.old_logprobs - batch.rollout_logprobs)[start:stop][batch.response_mask[start:stop]]
        means += [delta.double().mean().item()] if delta.numel() else []
    check(stats_of(padded, None).metrics(), {"ppl/log_abs_diff": sum(map(abs, means)) / len(means)})


VALUES = st.one_of(
    st.floats(-40, 0, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1e30, 5.0, -3e38, 1e-30])
)


@settings(max_examples=60)
@given(
    tokens=st.lists(st.tuples(VALUES, VALUES, st.booleans(), VALUES), max_size=12),
    name=CONFIGS,
    cut=st.integers(0, 12),
)
def test_no_metric_is_ever_nan(tokens: list[tuple[float, float, bool, float]], name: str, cut: int) -> None:
    columns = [list(column) for column in zip(*tokens, strict=True)] or [[], [], [], []]
    batch = replace(
        random_batch(0, [], noise=0.0),
        old_logprobs=torch.tensor(columns[0], dtype=torch.float32),
        rollout_logprobs=torch.tensor(columns[1], dtype=torch.float32),
        advantages=torch.tensor(columns[3], dtype=torch.float32),
        response_mask=torch.tensor(columns[2], dtype=torch.bool),
        cu_seqlens=packed(min(cut, len(tokens)), len(tokens) - min(cut, len(tokens))),
    )
    metrics = stats_of(batch, MODES[name]).metrics()
    assert all(value is None or math.isfinite(value) for value in metrics.values()), metrics
    for metric in ("k2", "k3", "k3_p99", "k3_max", "js", "tv", "mult_err"):
        value = metrics[f"mismatch/{metric}"]
        assert value is None or value >= 0
    assert (metrics["mismatch/k3"] is None) == (metrics["mismatch/num_tokens"] == metrics["mismatch/invalid_tokens"])


def test_nothing_is_read_from_the_device() -> None:
    # Meta tensors have no values: item(), branching on one and data-dependent shapes raise.
    with torch.device("meta"):
        old, rollout, advantages, entropy = (torch.empty(9) for _ in range(4))
        mask = torch.empty(9, dtype=torch.bool)
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        context = StepContext(rewards=torch.empty(3), lags=torch.empty(3, dtype=torch.int64))
    batch = Batch(
        logprobs=old,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        entropy=entropy,
        response_mask=mask,
        cu_seqlens=cu_seqlens,
    )
    stats = stats_of(batch, MISConfig(), context)
    merged = stats.merge(stats_of(batch, MISConfig()))
    assert merged.sums.is_meta and merged.maxes.is_meta
    # The sizes that are reduced over ranks depend on the config alone.
    assert merged.sums.shape == stats_of(golden(), MISConfig()).sums.shape


def test_k3_of_nearly_equal_engines_is_not_rounding_noise() -> None:
    rollout = torch.zeros(1000)
    delta = torch.full((1000,), 1e-6)
    metrics = mismatch_stats(
        Tokens(
            trainer_logprobs=rollout + delta,
            rollout_logprobs=rollout,
            response_mask=torch.ones(1000, dtype=torch.bool),
            cu_seqlens=packed(1000),
        )
    ).metrics()
    assert metrics["mismatch/k3"] == pytest.approx(0.5e-12, rel=1e-5)


def test_means_of_many_tokens_are_as_exact_as_stated() -> None:
    batch = random_batch(9, [50_000], noise=0.02)
    delta = (batch.old_logprobs - batch.rollout_logprobs)[batch.response_mask].double()
    metrics = stats_of(batch, None).metrics()
    exact = torch.expm1(delta) - delta
    assert metrics["mismatch/k3"] == pytest.approx(exact.mean().item(), rel=1.5e-5)
    assert metrics["mismatch/js"] == pytest.approx(sum(map(js, delta.tolist())) / len(delta), rel=2e-5)
    assert metrics["mismatch/k1"] == pytest.approx(-delta.mean().item(), rel=1e-12)
    assert metrics["mismatch/k3_p99"] == pytest.approx(exact.quantile(0.99).item(), rel=0.016)


def test_the_shape_of_the_tail_and_the_quantile_are_those_of_all_tokens_of_the_step() -> None:
    batch = random_batch(2, [1000, 0, 1500, 40, 700], noise=1.0)
    delta = (batch.old_logprobs - batch.rollout_logprobs)[batch.response_mask].double()
    whole, parts = stats_of(batch, None).metrics(), stats_of(batch.select([0, 1]), None)
    merged = parts.merge(stats_of(batch.select([2, 3, 4]), None)).metrics()
    for metrics in (whole, merged):
        assert metrics["mismatch/khat/token"] == pareto_k(delta)
        assert metrics["mismatch/k3_p99"] == quantile(k3(delta), 0.99)
    # Weights beyond the clamp do not stretch the tail.
    khats = []
    for largest in (20.0, 63.0):
        batch.old_logprobs[batch.response_mask.nonzero()[:3]] = largest - 70.0
        batch.rollout_logprobs[batch.response_mask.nonzero()[:3]] = -70.0
        khats.append(stats_of(batch, None).metrics()["mismatch/khat/token"])
    assert khats[0] == khats[1] is not None
    many = random_batch(3, [3] * 200, noise=1.0)
    sums = [values.double().sum() for values in (many.old_logprobs - many.rollout_logprobs).split(3)]
    with_tokens = by_response(many.response_mask, many.cu_seqlens)
    seen = torch.stack([total for total, count in zip(sums, with_tokens, strict=True) if count])
    assert stats_of(many, None).metrics()["mismatch/khat/seq"] == pytest.approx(pareto_k(seen), rel=1e-9)


def test_pi_old_must_be_there() -> None:
    batch = golden()
    with pytest.raises(ValueError, match="trainer_logprobs must have the shape"):
        stats_of(replace(batch, old_logprobs=torch.zeros(4)), None)
    assert stats_of(batch, RecomputeConfig()).metrics()["mismatch/is/applied_mean"] == 1.0


def test_what_does_not_fit_is_refused() -> None:
    for context, message in (
        (StepContext(rewards=torch.ones(3)), r"rewards must be \[N\] = \[2\], got \[3\]"),
        (StepContext(lags=torch.ones(3, dtype=torch.int64)), r"lags must be \[N\] = \[2\], got \[3\]"),
        (StepContext(token_lags=torch.ones(2, dtype=torch.int64)), r"token_lags must be \[T\] = \[.*, got \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            stats_of(golden(), TISConfig(), context)
    with pytest.raises(ValueError, match="advantages must have the shape of response_mask"):
        stats_of(replace(golden(), advantages=torch.ones(4)), None, StepContext())
    with pytest.raises(ValueError, match="criteria"):
        stats_of(golden(), MISConfig()).merge(stats_of(golden(), TISConfig()))
