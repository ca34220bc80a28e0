"""Packing: hard cap, no loss of tokens, equal counts per rank, global denominators, advantages by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.config import AdvantageConfig, Estimator
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.packing import assign_advantages, pack, split_mini_batches
from trainer.planner import best_fit_decreasing


def make_sample(
    *, prompt_id: int = 0, index: int = 0, prompt: int = 3, response: int = 4, reward: float = 0.0
) -> Sample:
    total = prompt + response
    return Sample(
        prompt_id=prompt_id,
        sample_index=index,
        token_ids=[(prompt_id * 31 + index * 7 + t) % 50 for t in range(total)],
        response_mask=[False] * prompt + [True] * response,
        rollout_logprobs=[0.0] * prompt + [-0.5 - 0.01 * t for t in range(response)],
        policy_version=0,
        finish_reason=FinishReason.stop,
        reward=reward,
        advantage=0.25 * (index + 1),
    )


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_no_bin_exceeds_the_cap_and_no_item_is_lost(lengths: list[int], cap: int) -> None:
    bins = best_fit_decreasing(lengths, cap)
    assert sorted(index for indices in bins for index in indices) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in indices) <= cap for indices in bins)


def test_best_fit_is_close_to_the_lower_bound() -> None:
    rng = random.Random(0)
    lengths = [min(16384, max(16, int(rng.lognormvariate(7, 1)))) for _ in range(1024)]
    bound = -(-sum(lengths) // 16384)
    assert len(best_fit_decreasing(lengths, 16384)) <= bound + 2


def test_a_sequence_over_the_cap_names_its_length_and_the_setting() -> None:
    with pytest.raises(ValueError, match=r"120 tokens exceeds batch\.max_tokens_per_microbatch=100"):
        best_fit_decreasing([50, 120], 100)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 5))
def test_every_rank_gets_equally_many_bins(lengths: list[int], num_ranks: int) -> None:
    ranks = balance(best_fit_decreasing(lengths, 100), lengths, num_ranks)
    assert len({len(bins) for bins in ranks}) == 1
    assert sorted(i for bins in ranks for indices in bins for i in indices) == list(range(len(lengths)))


def test_equal_samples_are_balanced_exactly() -> None:
    batch = pack([[make_sample(index=i) for i in range(8)]], num_ranks=2, max_tokens=1000, policy_version=0)
    assert batch.stats.imbalance == 0.0
    assert batch.stats.num_tokens == 8 * 7


def test_packed_tensors_describe_their_tokens() -> None:
    samples = [make_sample(index=0, response=4), make_sample(index=1, prompt=2, response=1)]
    [minis] = pack([samples], num_ranks=1, max_tokens=100, policy_version=0).ranks
    [micro] = minis[0].micro_batches
    assert micro.cu_seqlens.tolist() == [0, 7, 10]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert micro.response_index.tolist() == [3, 4, 5, 6, 9]
    assert micro.advantages.tolist() == [0, 0, 0, 0.25, 0.25, 0.25, 0.25, 0, 0, 0.5]
    assert micro.max_seqlen == 7
    assert (minis[0].num_response_tokens, minis[0].num_sequences) == (5, 2)


def test_denominators_are_global_over_ranks_and_microbatches() -> None:
    samples = [make_sample(index=i, response=2 + i) for i in range(6)]
    batch = pack([samples], num_ranks=3, max_tokens=12, policy_version=0)
    counts = {(mini.num_response_tokens, mini.num_sequences) for minis in batch.ranks for mini in minis}
    assert counts == {(sum(2 + i for i in range(6)), 6)}


def test_a_rank_without_samples_gets_a_masked_token() -> None:
    batch = pack([[make_sample()]], num_ranks=2, max_tokens=100, policy_version=0)
    masks = [minis[0].micro_batches[0].response_mask.sum().item() for minis in batch.ranks]
    assert sorted(masks) == [0, 4]


def test_packing_needs_advantages() -> None:
    sample = make_sample()
    sample.advantage = None
    with pytest.raises(ValueError, match="sample 0/0 has no advantage"):
        pack([[sample]], num_ranks=1, max_tokens=100, policy_version=0)


def make_group(prompt_id: int, rewards: list[float]) -> SampleGroup:
    prompt = Prompt(prompt_id=prompt_id, token_ids=[1, 2, 3], text="", answer="")
    samples = [make_sample(prompt_id=prompt_id, index=i, reward=r) for i, r in enumerate(rewards)]
    return SampleGroup(prompt=prompt, samples=samples)


def test_advantages_are_relative_to_their_own_group() -> None:
    groups = [make_group(0, [1.0, 0.0]), make_group(1, [5.0, 5.0, 5.0])]
    assign_advantages(groups, AdvantageConfig(estimator=Estimator.dr_grpo))
    assert [sample.advantage for sample in groups[0].samples] == [0.5, -0.5]
    assert [sample.advantage for sample in groups[1].samples] == [0.0, 0.0, 0.0]


def test_mini_batches_hold_whole_groups_in_order() -> None:
    groups = [make_group(prompt_id, [0.0, 1.0]) for prompt_id in range(5)]
    parts = split_mini_batches(groups, 2)
    assert [[sample.prompt_id for sample in part] for part in parts] == [[0, 0, 1, 1], [2, 2, 3, 3, 4, 4]]
