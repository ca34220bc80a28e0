"""Histograms of the mismatch: every bin by hand, merging, and what is not valid."""

import math

import pytest
import torch
from algorithm_cases import Batch, random_batch, tokens_of

from algorithms.histograms import JOINT_BINS, MismatchHistograms, mismatch_histograms
from algorithms.tokens import Tokens


def of(batch: Batch) -> MismatchHistograms:
    return mismatch_histograms(tokens_of(batch))


def by_hand() -> Batch:
    """Two responses behind one prompt token each; probabilities of mu 0.91, 0.31, 0.31 and 0.91."""
    batch = random_batch(0, [4, 2], noise=0.0)
    batch.response_mask = torch.tensor([False, True, True, True, False, True])
    mu = torch.tensor([0.5, 0.91, 0.31, 0.31, 0.5, 0.91])
    old = torch.tensor([0.5, 0.91, 0.155, 0.62, 0.5, 0.455])
    batch.rollout_logprobs, batch.old_logprobs = mu.log(), old.log()
    return batch


def k3(ratio: float) -> float:
    return ratio - 1 - math.log(ratio)


def test_every_bin_by_hand() -> None:
    arrays = of(by_hand()).arrays()
    probability, position = arrays.by_probability, arrays.by_position
    assert probability.edges[:3] == [1.0, 0.5, 0.25] and probability.edges[-1] == 0.0
    assert probability.counts == [2.0, 2.0] + [0.0] * 18
    assert probability.abs_logdiff[:3] == [pytest.approx(math.log(2) / 2), pytest.approx(math.log(2)), None]
    assert probability.k3[:3] == [pytest.approx(k3(0.5) / 2), pytest.approx((k3(0.5) + k3(2)) / 2), None]
    # Positions 1, 2, 3 and 1: bins [1, 2), [2, 4).
    assert position.edges[:3] == [1.0, 2.0, 4.0] and position.edges[-1] == math.inf
    assert position.counts == [2.0, 2.0] + [0.0] * 18
    assert position.k3[:2] == [pytest.approx(k3(0.5) / 2), pytest.approx((k3(0.5) + k3(2)) / 2)]
    assert len(arrays.joint_edges) == JOINT_BINS + 1 and arrays.joint_edges[-1] == 1.0
    cells = {(i, j): n for i, row in enumerate(arrays.joint) for j, n in enumerate(row) if n}
    # Bins of 0.02, [pi_old][mu].
    assert cells == {(45, 45): 1, (7, 15): 1, (31, 15): 1, (22, 45): 1}


def test_the_ends_of_the_axes() -> None:
    batch = random_batch(0, [3], noise=0.0)
    batch.response_mask = torch.ones(3, dtype=torch.bool)
    batch.rollout_logprobs = torch.tensor([0.0, -200.0, 5e-5])
    batch.old_logprobs = torch.tensor([0.0, -200.0, 0.0])
    arrays = of(batch).arrays()
    assert arrays.by_probability.counts[0] == 2 and arrays.by_probability.counts[-1] == 1
    assert arrays.joint[-1][-1] == 2 and arrays.joint[0][0] == 1
    long = random_batch(0, [2**20 + 8], noise=0.0)
    long.response_mask.fill_(True)
    counts = of(long).arrays().by_position.counts
    assert counts[:-1] == [2.0**bin for bin in range(19)] and counts[-1] == 2**19 + 9


def test_invalid_tokens_and_prompts_are_left_out() -> None:
    batch = by_hand()
    batch.rollout_logprobs[1], batch.old_logprobs[2], batch.rollout_logprobs[0] = math.nan, -math.inf, math.nan
    arrays = of(batch).arrays()
    assert sum(arrays.by_probability.counts) == 2
    # The tokens that are left keep their positions 3 and 1.
    assert arrays.by_position.counts[:2] == [1.0, 1.0]
    assert all(value is None or math.isfinite(value) for value in arrays.by_position.k3)


def test_parts_add_up() -> None:
    batch = random_batch(1, [40, 0, 7, 120], noise=0.5)
    whole = of(batch)
    assert whole.sums[:400].sum() == batch.response_mask.sum()
    merged = of(batch.select([0, 1])).merge(of(batch.select([2, 3])))
    torch.testing.assert_close(merged.sums, whole.sums, rtol=1e-12, atol=1e-12)


def test_nothing_at_all() -> None:
    for lengths in ([], [0], [0, 0]):
        arrays = of(random_batch(0, lengths, noise=0.0)).arrays()
        assert sum(arrays.by_position.counts) == 0 and set(arrays.by_position.k3) == {None}


def test_nothing_is_read_from_the_device() -> None:
    with torch.device("meta"):
        values = torch.empty(9)
        found = mismatch_histograms(
            Tokens(
                trainer_logprobs=values,
                rollout_logprobs=values,
                response_mask=torch.empty(9, dtype=torch.bool),
                cu_seqlens=torch.empty(4, dtype=torch.int32),
            )
        )
    assert found.merge(found).sums.is_meta
    assert found.sums.shape == of(by_hand()).sums.shape == of(random_batch(0, [100], noise=0.1)).sums.shape
