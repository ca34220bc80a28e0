"""Packing: tensors of a micro-batch, global denominators, statistics."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.advantage import sample_advantages
from algorithms.config import Baseline, Estimator
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.batch.packing import micro_batch, pack, split_mini_batches, step_samples
from trainer.batch.planner import SequenceCost
from trainer.batch.train_batch import Branch, TrainBatch


def make_sample(
    *, prompt_id: int = 0, index: int = 0, prompt: int = 3, response: int = 4, reward: float | None = None
) -> Sample:
    """A sample whose reward is 0.25 x (index + 1) unless it is given."""
    total = prompt + response
    return Sample(
        prompt_id=prompt_id,
        sample_index=index,
        token_ids=[(prompt_id * 31 + index * 7 + t) % 50 for t in range(total)],
        response_mask=[False] * prompt + [True] * response,
        rollout_logprobs=[0.0] * prompt + [-0.5 - 0.01 * t for t in range(response)],
        token_versions=[0] * total,
        finish_reason=FinishReason.stop,
        reward=0.25 * (index + 1) if reward is None else reward,
    )


def pack_samples(mini_batches: Sequence[Sequence[Sample]], **options: Any) -> TrainBatch:
    """`pack`, where no prompt has two groups: neighbours with the same prompt_id are one."""
    return pack([grouped(samples) for samples in mini_batches], **options)


def grouped(samples: Sequence[Sample]) -> list[SampleGroup]:
    return [group_of(list(run)) for _, run in groupby(samples, key=lambda sample: sample.prompt_id)]


def group_of(samples: Sequence[Sample]) -> SampleGroup:
    prompt = Prompt(prompt_id=samples[0].prompt_id, token_ids=[1, 2, 3], text="", answer="")
    return SampleGroup(prompt=prompt, samples=list(samples))


def test_equal_samples_are_balanced_exactly() -> None:
    batch = pack_samples([[make_sample(index=i) for i in range(8)]], num_ranks=2, max_tokens=1000, policy_version=0)
    assert batch.stats.imbalance == 0.0
    assert batch.stats.num_tokens == 8 * 7


def test_statistics_by_hand() -> None:
    # One rank's bin holds 8 and 5 tokens, 13 + 0.1 * (64 + 25); the other two of 6, 12 + 0.1 * 2 * 36.
    samples = [make_sample(index=i, prompt=2, response=r) for i, r in enumerate((6, 3, 4, 4))]
    cost = SequenceCost(per_token=1.0, per_cell=0.1)
    batch = pack_samples([samples], num_ranks=2, max_tokens=13, policy_version=0, cost=cost)
    metrics = batch.stats.metrics()
    assert [[len(micro.sample_keys) for micro in minis[0].micro_batches] for minis in batch.ranks] == [[2], [2]]
    assert metrics["perf/microbatches"] == 1
    assert metrics["perf/train_tokens"] == 25
    assert metrics["perf/fill_frac"] == pytest.approx(25 / 26)
    assert metrics["perf/dp_imbalance"] == pytest.approx(21.9 / ((21.9 + 19.2) / 2) - 1)


def test_statistics_cover_every_optimizer_step() -> None:
    samples = [make_sample(index=i, prompt=2, response=r) for i, r in enumerate((6, 3))]
    batch = pack_samples([samples[:1], samples[1:]], num_ranks=1, max_tokens=13, policy_version=0)
    assert batch.stats.num_micro_batches == 2
    assert batch.stats.num_tokens == 13
    numbers = [micro.sample_numbers.tolist() for mini in batch.ranks[0] for micro in mini.micro_batches]
    assert numbers == [[0], [1]]


def test_packed_tensors_describe_their_tokens() -> None:
    samples = [make_sample(index=0, response=4), make_sample(index=1, prompt=2, response=1)]
    [minis] = pack_samples([samples], num_ranks=1, max_tokens=100, policy_version=0).ranks
    [micro] = minis[0].micro_batches
    assert micro.cu_seqlens.tolist() == [0, 7, 10]
    assert micro.inputs.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert micro.response_index.tolist() == [3, 4, 5, 6, 9]
    assert micro.advantages is None
    assert (micro.inputs.roots, micro.inputs.branches) == ([7, 3], [])
    assert (minis[0].num_response_tokens, minis[0].num_sequences) == (5, 2)


def same_prompt(
    count: int, *, prompt: int = 3, rests: Sequence[int] = (4, 2, 5, 2), prompt_id: int = 0
) -> list[Sample]:
    """Samples of one prompt."""
    samples = [
        make_sample(prompt_id=prompt_id, index=i, prompt=prompt, response=rests[i % len(rests)]) for i in range(count)
    ]
    for sample in samples:
        sample.token_ids[:prompt] = samples[0].token_ids[:prompt]
    return samples


def test_the_decoder_computes_a_shared_prompt_once() -> None:
    alone = make_sample(prompt_id=9, index=5, prompt=2, response=1)
    samples = [*same_prompt(3), alone]
    micro = micro_batch(samples)
    inputs = micro.inputs
    # The prompt, the sample that shares nothing, then the responses of 5, 4 and 2 tokens.
    assert (inputs.roots, inputs.branches) == ([3, 3], [Branch(0, 3, 5), Branch(0, 3, 4), Branch(0, 3, 2)])
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 3, 4]
    of_prompt, rests = samples[0].token_ids[:3].tolist(), [samples[i].token_ids[3:].tolist() for i in (2, 0, 1)]
    assert inputs.token_ids.tolist() == [*of_prompt, *alone.token_ids.tolist(), *rests[0], *rests[1], *rests[2]]
    # The first token of every response is predicted from the end of the prompt; 4, 2, 5 and 1 tokens were sampled.
    assert inputs.before_response.tolist() == [2, 11, 12, 13, 2, 15, 2, 6, 7, 8, 9, 4]
    assert micro.num_tokens == 7 + 5 + 8 + 3 and inputs.num_tokens == 17


def test_a_turn_of_the_environment_belongs_to_its_branch() -> None:
    samples = same_prompt(2, rests=(5, 5))
    for sample in samples:
        sample.response_mask[5:7] = False  # tool output in the middle of the response
    inputs = micro_batch(samples).inputs
    assert inputs.branches == [Branch(0, 3, 5), Branch(0, 3, 5)]
    assert inputs.before_response.tolist() == [2, 3, 6, 2, 8, 11]


def test_packing_counts_what_is_computed() -> None:
    batch = pack_samples([same_prompt(4)], num_ranks=1, max_tokens=100, policy_version=0)
    assert batch.stats.num_tokens == 3 + 4 + 2 + 5 + 2
    metrics = batch.stats.metrics()
    assert (metrics["perf/train_tokens"], metrics["perf/train_tokens_shared"]) == (16, 3 * 3)
    assert metrics["perf/fill_frac"] == pytest.approx(0.16)


def test_a_group_over_the_cap_is_cut_and_every_part_has_the_prompt() -> None:
    samples = same_prompt(4, rests=(6, 6, 6, 6))
    batch = pack_samples([samples], num_ranks=1, max_tokens=15, policy_version=0)
    micros = batch.ranks[0][0].micro_batches
    assert [(micro.inputs.roots, len(micro.inputs.branches)) for micro in micros] == [([3], 2), ([3], 2)]
    assert sorted(key for micro in micros for key in micro.sample_keys) == [(0, i) for i in range(4)]


def test_ranks_divide_a_group_when_whole_groups_would_leave_one_idle() -> None:
    groups = [sample for p in range(3) for sample in same_prompt(4, rests=(40, 40, 40, 40), prompt_id=p)]
    batch = pack_samples([groups], num_ranks=2, max_tokens=1000, policy_version=0)
    counts = [sum(len(micro.sample_keys) for micro in minis[0].micro_batches) for minis in batch.ranks]
    assert counts == [6, 6] and batch.stats.imbalance < 0.01
    # Two whole groups divide without a cut.
    batch = pack_samples([groups[:8]], num_ranks=2, max_tokens=1000, policy_version=0)
    assert batch.stats.num_shared == 2 * 3 * 3


def test_denominators_are_global_over_ranks_and_microbatches() -> None:
    samples = [make_sample(index=i, response=2 + i) for i in range(6)]
    batch = pack_samples([samples], num_ranks=3, max_tokens=12, policy_version=0)
    counts = {(mini.num_response_tokens, mini.num_sequences) for minis in batch.ranks for mini in minis}
    assert counts == {(sum(2 + i for i in range(6)), 6)}


def test_a_rank_without_samples_gets_a_masked_token() -> None:
    batch = pack_samples([[make_sample()]], num_ranks=2, max_tokens=100, policy_version=0)
    masks = [minis[0].micro_batches[0].response_mask.sum().item() for minis in batch.ranks]
    assert sorted(masks) == [0, 4]


def test_packing_needs_rewards() -> None:
    sample = make_sample()
    sample.reward = None
    with pytest.raises(ValueError, match=r"prompt 0: samples \[0\] have no reward"):
        pack_samples([[sample]], num_ranks=1, max_tokens=100, policy_version=0)


def make_group(prompt_id: int, rewards: list[float], *, first: int = 0) -> SampleGroup:
    """A group of samples with these rewards; `first` is the index of its first sample."""
    return group_of([make_sample(prompt_id=prompt_id, index=first + i, reward=r) for i, r in enumerate(rewards)])


def test_mini_batches_hold_whole_groups_in_order() -> None:
    groups = [make_group(prompt_id, [0.0, 1.0]) for prompt_id in range(5)]
    parts = split_mini_batches(groups, 2)
    assert [[group.prompt.prompt_id for group in part] for part in parts] == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # What is left of two groups of one prompt when the other samples were invalid: indices 0, 1 and then 2, 3.
        ([make_group(7, [1.0, 1.0]), make_group(7, [0.0, 0.0], first=2)], [0, 0, 1, 1]),
        ([make_group(7, [1.0], first=i) for i in range(3)], [0, 1, 2]),
        ([make_group(7, [1.0, 0.0]), make_group(7, [1.0, 0.0], first=3), make_group(7, [0.5])], [0, 0, 1, 1, 2]),
        # Partial rollouts end in any order: indices that fall are still one group.
        ([group_of([make_sample(index=i) for i in (3, 0, 2)]), make_group(1, [1.0])], [0, 0, 0, 1]),
    ],
    ids=["two partial groups", "three groups of one", "three in a row", "falling indices"],
)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_group_ids_are_those_of_the_given_groups(
    groups: list[SampleGroup], expected: list[int], num_parts: int
) -> None:
    assert step_samples(groups, policy_version=0).group_ids.tolist() == expected
    for num_ranks in (1, 2, 3):
        batch = pack(split_mini_batches(groups, num_parts), num_ranks=num_ranks, max_tokens=20, policy_version=0)
        assert batch.samples.group_ids.tolist() == expected
        # Wherever a sample is packed, its number leads to its own group.
        own = [(group.prompt.prompt_id, sample.sample_index) for group in groups for sample in group.samples]
        micros = [micro for minis in batch.ranks for mini in minis for micro in mini.micro_batches if micro.sample_keys]
        packed = {n: key for micro in micros for n, key in zip(micro.numbers(), micro.sample_keys, strict=True)}
        assert [packed[number] for number in range(len(own))] == own


def test_equal_rewards_have_no_advantage_beside_another_group_of_their_prompt() -> None:
    groups = [make_group(7, [1.0, 1.0]), make_group(7, [0.0, 0.0], first=2)]
    samples = step_samples(groups, policy_version=0)
    for estimator in (each for each in Estimator if each.baseline is Baseline.group):
        found = sample_advantages(
            estimator, samples.rewards, samples.group_ids, epsilon=1e-6, num_tokens=samples.num_tokens
        )
        assert found.tolist() == [0.0] * 4, estimator


def test_lags_of_tokens_travel_only_where_they_differ_within_a_response() -> None:
    plain = make_sample(index=0, prompt=2, response=2)
    mixed = make_sample(index=1, prompt=2, response=3)
    plain.token_versions = np.array([0, 0, 4, 4])
    mixed.token_versions = np.array([0, 0, 3, 5, 5])
    assert micro_batch([plain], policy_version=5).token_lags is None
    assert micro_batch([mixed]).token_lags is None
    lags = micro_batch([plain, mixed], policy_version=5).token_lags
    assert lags is not None and lags.tolist() == [0, 0, 1, 1, 0, 0, 2, 0, 0]
    batch = pack_samples([[plain, mixed]], num_ranks=1, max_tokens=100, policy_version=5)
    [micro] = batch.ranks[0][0].micro_batches
    assert micro.token_lags is not None and sorted(micro.token_lags.tolist()) == sorted(lags.tolist())
    assert batch.samples.lags.tolist() == [1, 2]


def test_a_micro_batch_arrives_as_it_was_sent_and_can_be_written_to() -> None:
    lagging = make_sample(index=1, response=2)
    lagging.token_versions = np.array([0, 0, 0, 1, 2])
    sent = micro_batch([make_sample(), lagging], [3, 4], policy_version=2)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(sent, 5, buffer_callback=buffers.append)
    assert len(buffers) >= 9, "the tensors are not in the text"
    # As Ray does it: arrays stay in shared memory, and writing to what one got must not change what another gets.
    held = [bytes(buffer) for buffer in buffers]
    overwritten = pickle.loads(text, buffers=held)
    overwritten.token_ids.zero_()
    overwritten.inputs.position_ids.zero_()
    got = pickle.loads(text, buffers=held)
    for each in fields(sent):
        mine, theirs = getattr(sent, each.name), getattr(got, each.name)
        if isinstance(mine, torch.Tensor):
            assert theirs.dtype == mine.dtype and torch.equal(theirs, mine), each.name
        elif each.name == "inputs":
            assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))
        else:
            assert theirs == mine, each.name
    assert sent.token_lags is not None and sent.token_lags.tolist()[-2:] == [1, 0]


def test_tensors_of_a_micro_batch_by_hand() -> None:
    two = micro_batch([make_sample(prompt=1, response=2), make_sample(index=2, prompt=2, response=1)], [5, 7])
    assert two.token_ids.tolist() == [0, 1, 2, 14, 15, 16] and two.inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert two.inputs.token_ids.tolist() == two.token_ids.tolist()
    assert two.inputs.before_response.tolist() == [0, 1, 4]
    assert two.cu_seqlens.tolist() == [0, 3, 6] and two.cu_seqlens.dtype == torch.int32
    assert two.response_index.tolist() == [1, 2, 5] and two.response_mask.dtype == torch.bool
    assert two.rollout_logprobs.tolist() == pytest.approx([0.0, -0.5, -0.51, 0.0, 0.0, -0.5])
    assert two.sample_numbers.tolist() == [5, 7] and two.token_lags is None
    nothing = micro_batch([])
    assert (nothing.token_ids.tolist(), nothing.response_mask.tolist()) == ([0], [False])
    assert nothing.cu_seqlens.tolist() == [0, 1]
