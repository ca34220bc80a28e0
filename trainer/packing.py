"""Rewarded groups -> advantages -> TrainBatch: packed micro-batches under a hard token cap, balanced over ranks.

Sequences are packed by best-fit-decreasing, never split and never truncated. Denominators (response tokens,
sequences) are counted here, over the whole optimizer step, so that no later split can change them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

import torch

from algorithms.advantage import ADVANTAGES
from algorithms.config import AdvantageConfig
from rollout.types import Sample, SampleGroup
from trainer.batch import MicroBatch, MiniBatch, PackingStats, StepSamples, TrainBatch


def best_fit_decreasing(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Bins of indices into `lengths`, the sum of each bin at most `cap`.

    Each item, longest first, goes where the least room is left over. Ties are broken by index, so equal inputs
    give equal bins. Raises ValueError naming the length if one item exceeds the cap.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > cap:
            raise ValueError(
                f"a sequence of {length} tokens exceeds batch.max_tokens_per_microbatch={cap}; "
                f"raise it to at least {length} or lower sampling.max_new_tokens"
            )
        slot = bisect_left(rooms, (length, -1))
        if slot == len(rooms):
            bins.append([index])
            insort(rooms, (cap - length, len(bins) - 1))
        else:
            room, chosen = rooms.pop(slot)
            bins[chosen].append(index)
            insort(rooms, (room - length, chosen))
    return bins


def balance(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Deal bins to ranks: equally many each, the fullest bin to the emptiest rank.

    The fullest bins are split until their number divides by `num_ranks`; where only single sequences are left,
    empty bins fill up (every rank must run the same number of forwards, or collectives would not match).
    """

    def tokens(indices: list[int]) -> int:
        return sum(lengths[i] for i in indices)

    bins = [list(indices) for indices in bins]
    while len(bins) % num_ranks:
        bins.sort(key=lambda indices: (len(indices) > 1, tokens(indices)))
        largest = bins[-1]
        if len(largest) < 2:
            bins.append([])
            continue
        bins[-1:] = split_in_two(largest, lengths)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for indices in sorted(bins, key=lambda indices: (-tokens(indices), indices)):
        open_ranks = [rank for rank in range(num_ranks) if len(ranks[rank]) < len(bins) // num_ranks]
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        ranks[rank].append(indices)
        loads[rank] += tokens(indices)
    return ranks


def split_in_two(indices: list[int], lengths: Sequence[int]) -> list[list[int]]:
    """Two parts of about equal token count, both non-empty."""
    parts: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        side = 0 if loads[0] <= loads[1] else 1
        parts[side].append(index)
        loads[side] += lengths[index]
    return [parts[0], parts[1]]


def micro_batch(samples: Sequence[Sample], numbers: Sequence[int] | None = None) -> MicroBatch:
    """Lay samples end to end. No samples: one masked token, so that the rank still takes part in collectives.

    `numbers` are the positions of the samples in the step; None counts them from 0.
    """
    token_ids = [token for sample in samples for token in sample.token_ids] or [0]
    lengths = [len(sample.token_ids) for sample in samples] or [1]
    response_mask = torch.tensor([m for sample in samples for m in sample.response_mask] or [False])
    advantages = [advantage_of(sample) if masked else 0.0 for sample in samples for masked in sample.response_mask]
    return MicroBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
        response_index=response_mask.nonzero().flatten(),
        response_mask=response_mask,
        rollout_logprobs=torch.tensor(
            [logprob for sample in samples for logprob in sample.rollout_logprobs] or [0.0], dtype=torch.float32
        ),
        advantages=torch.tensor(advantages or [0.0], dtype=torch.float32),
        sample_keys=[(sample.prompt_id, sample.sample_index) for sample in samples],
        sample_numbers=torch.tensor(list(range(len(samples)) if numbers is None else numbers) or [0]),
    )


def advantage_of(sample: Sample) -> float:
    """The sample's advantage; raises if `assign_advantages` has not run."""
    if sample.advantage is None:
        raise ValueError(f"sample {sample.prompt_id}/{sample.sample_index} has no advantage")
    return sample.advantage


def pack(
    mini_batches: Sequence[Sequence[Sample]], *, num_ranks: int, max_tokens: int, policy_version: int
) -> TrainBatch:
    """Pack the samples of each optimizer step for `num_ranks` ranks.

    `mini_batches[k]` are the samples of optimizer step k, group after group; `max_tokens` is the cap of one
    micro-batch, `policy_version` that of the weights that the step starts with.
    """
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    first = 0
    for samples in mini_batches:
        lengths = [len(sample.token_ids) for sample in samples]
        dealt = balance(best_fit_decreasing(lengths, max_tokens), lengths, num_ranks)
        num_response_tokens = sum(sample.num_response_tokens for sample in samples)
        for rank, bins in enumerate(dealt):
            micro_batches = [
                micro_batch([samples[i] for i in indices], [first + i for i in indices]) for indices in bins
            ]
            ranks[rank].append(
                MiniBatch(
                    micro_batches=micro_batches,
                    num_response_tokens=num_response_tokens,
                    num_sequences=len(samples),
                )
            )
        first += len(samples)
    return TrainBatch(
        ranks=ranks,
        samples=step_samples([sample for samples in mini_batches for sample in samples], policy_version=policy_version),
        stats=_packing_stats(ranks, max_tokens=max_tokens),
    )


def _packing_stats(ranks: Sequence[Sequence[MiniBatch]], *, max_tokens: int) -> PackingStats:
    loads = [sum(micro.num_tokens for mini in minis for micro in mini.micro_batches) for minis in ranks]
    num_micro_batches = sum(len(mini.micro_batches) for mini in ranks[0])
    return PackingStats(
        num_micro_batches=num_micro_batches,
        num_tokens=sum(loads),
        fill_frac=sum(loads) / (num_micro_batches * len(ranks) * max_tokens),
        imbalance=max(loads) * len(ranks) / sum(loads) - 1,
    )


def step_samples(samples: Sequence[Sample], *, policy_version: int) -> StepSamples:
    """What the ranks know of every sample of the step; `samples` stand group after group.

    Raises:
        ValueError: a sample without a reward.
    """
    group_ids: list[int] = []
    for index, sample in enumerate(samples):
        before = samples[index - 1] if index else sample
        # A prompt may come back in the same step when an epoch ends; its sample indices then start again.
        same = (sample.prompt_id, True) == (before.prompt_id, sample.sample_index > before.sample_index)
        group_ids.append(group_ids[-1] if index and same else len(group_ids))
    return StepSamples(
        rewards=torch.tensor([_reward_of(sample) for sample in samples], dtype=torch.float32),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        num_tokens=torch.tensor([sample.num_response_tokens for sample in samples], dtype=torch.int64),
        lags=torch.tensor([policy_version - sample.policy_version for sample in samples], dtype=torch.int64),
    )


def _reward_of(sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(f"sample {sample.prompt_id}/{sample.sample_index} has no reward")
    return sample.reward


def assign_advantages(groups: Sequence[SampleGroup], config: AdvantageConfig) -> None:
    """Set the advantage of every sample from the rewards of the step, all samples forming the baseline."""
    rewards = torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32)
    group_ids = torch.tensor([index for index, group in enumerate(groups) for _ in group.samples])
    samples = [sample for group in groups for sample in group.samples]
    num_tokens = torch.tensor([sample.num_response_tokens for sample in samples])
    advantages = ADVANTAGES[config.estimator.name](rewards, group_ids, epsilon=config.epsilon, num_tokens=num_tokens)
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        sample.advantage = advantage


def split_mini_batches(groups: Sequence[SampleGroup], num_parts: int) -> list[list[Sample]]:
    """Deal whole groups, in order, to `num_parts` optimizer steps of (nearly) equal group count."""
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    parts = [groups[start:end] for start, end in pairwise(bounds)]
    return [[sample for group in part for sample in group.samples] for part in parts if part]
