"""Rewarded groups -> TrainBatch: packed micro-batches for every rank.

`trainer/batch/planner.py` chooses the sequences that share a micro-batch; no sequence is ever split or truncated. This
file counts the denominators (response tokens, sequences) over the whole optimizer step, so that no later split can
change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.types import Sample, SampleGroup
from trainer.batch.planner import DEFAULT_COST, SequenceCost, plan
from trainer.batch.train_batch import MicroBatch, PackingStats, RankMiniBatch, StepSamples, TrainBatch


def micro_batch(
    samples: Sequence[Sample], numbers: Sequence[int] | None = None, *, policy_version: int | None = None
) -> MicroBatch:
    """Concatenate samples. Without samples: one masked token, so that the rank still takes part in collectives.

    `numbers` are the positions of the samples in the step; None counts them from 0. `policy_version` is the version of
    the weights at the start of the step; None leaves out the lags of single tokens.
    """
    lengths = [len(sample.token_ids) for sample in samples] or [1]
    ends = np.cumsum([0, *lengths])
    mask = _joined([sample.response_mask for sample in samples], np.bool_)
    response_mask = torch.from_numpy(mask)
    return MicroBatch(
        token_ids=torch.from_numpy(_joined([sample.token_ids for sample in samples], np.int64)),
        position_ids=torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)),
        cu_seqlens=torch.from_numpy(ends).to(torch.int32),
        max_seqlen=max(lengths),
        response_index=response_mask.nonzero().flatten(),
        response_mask=response_mask,
        rollout_logprobs=torch.from_numpy(_joined([sample.rollout_logprobs for sample in samples], np.float32)),
        sample_keys=[(sample.prompt_id, sample.sample_index) for sample in samples],
        sample_numbers=torch.tensor(list(range(len(samples)) if numbers is None else numbers) or [0]),
        token_lags=None if policy_version is None else _token_lags(samples, policy_version),
    )


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The concatenation of all parts; a single zero without parts."""
    return np.concatenate(parts, dtype=dtype, casting="same_kind") if parts else np.zeros(1, dtype)


def _token_lags(samples: Sequence[Sample], policy_version: int) -> Tensor | None:
    """Lag of each token, [T] int64, 0 off the mask; None if no response has tokens of several versions."""
    if all(np.ptp(sample.response_versions) == 0 for sample in samples):
        return None
    lags = [np.where(sample.response_mask, policy_version - sample.token_versions, 0) for sample in samples]
    return torch.from_numpy(np.concatenate(lags))


def pack(
    mini_batches: Sequence[Sequence[Sample]],
    *,
    num_ranks: int,
    max_tokens: int,
    policy_version: int,
    cost: SequenceCost = DEFAULT_COST,
) -> TrainBatch:
    """Pack the samples of each optimizer step for `num_ranks` ranks.

    `mini_batches[k]` are the samples of optimizer step k, group after group; `max_tokens` is the cap of one
    micro-batch, `policy_version` the version of the weights at the start of the step, `cost` the estimate that is
    balanced over ranks.
    """
    ranks: list[list[RankMiniBatch]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    first = 0
    for mini_batch in mini_batches:
        lengths = [len(sample.token_ids) for sample in mini_batch]
        num_response_tokens = sum(sample.num_response_tokens for sample in mini_batch)
        for rank, bins in enumerate(plan(lengths, cap=max_tokens, num_ranks=num_ranks, cost=cost)):
            costs[rank] += sum(cost.of(lengths[i]) for indices in bins for i in indices)
            micros = [
                micro_batch(
                    [mini_batch[i] for i in indices], [first + i for i in indices], policy_version=policy_version
                )
                for indices in bins
            ]
            ranks[rank].append(
                RankMiniBatch(
                    micro_batches=micros, num_response_tokens=num_response_tokens, num_sequences=len(mini_batch)
                )
            )
        first += len(mini_batch)
    micros = [micro for minis in ranks for mini in minis for micro in mini.micro_batches]
    num_tokens = sum(micro.num_tokens for micro in micros)
    return TrainBatch(
        ranks=ranks,
        samples=step_samples([sample for part in mini_batches for sample in part], policy_version=policy_version),
        stats=PackingStats(
            num_micro_batches=len(micros) // num_ranks,
            num_tokens=num_tokens,
            fill_frac=num_tokens / (len(micros) * max_tokens),
            imbalance=max(costs) * num_ranks / sum(costs) - 1,
        ),
    )


def step_samples(samples: Sequence[Sample], *, policy_version: int) -> StepSamples:
    """Per-sample facts of the step for the ranks; `samples` are ordered group after group.

    Raises:
        ValueError: a sample without a reward.
    """
    rewards: list[float] = []
    group_ids: list[int] = []
    for index, sample in enumerate(samples):
        if sample.reward is None:
            raise ValueError(f"sample {sample.prompt_id}/{sample.sample_index} has no reward")
        rewards.append(sample.reward)
        before = samples[index - 1] if index else sample
        # A prompt may come again in the same step when an epoch ends; its sample indices then start again.
        same = (sample.prompt_id, True) == (before.prompt_id, sample.sample_index > before.sample_index)
        group_ids.append(group_ids[-1] if index and same else len(group_ids))
    return StepSamples(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        num_tokens=torch.tensor([sample.num_response_tokens for sample in samples], dtype=torch.int64),
        lags=torch.tensor([policy_version - sample.policy_version for sample in samples], dtype=torch.int64),
    )


def split_mini_batches(groups: Sequence[SampleGroup], num_parts: int) -> list[list[Sample]]:
    """Deal whole groups, in order, to `num_parts` optimizer steps of (nearly) equal group count."""
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    parts = [groups[start:end] for start, end in pairwise(bounds)]
    return [[sample for group in part for sample in group.samples] for part in parts if part]
