"""Rewarded groups -> TrainBatch: packed micro-batches for every rank.

`trainer/batch/prompt_groups.py` and `trainer/batch/planner.py` choose the sequences that share a micro-batch; no
sequence is ever split or truncated. Sequences with the same prompt share its computation (`decoder_inputs`). This file
counts the denominators (response tokens, sequences) over the whole optimizer step, so that no later split can
change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.routes import Routes
from rollout.supports import joined, no_supports
from rollout.types import Sample, SampleGroup
from trainer.batch.planner import DEFAULT_COST, SequenceCost
from trainer.batch.prompt_groups import PromptGroup, plan_groups
from trainer.batch.train_batch import (
    Branch,
    DecoderInputs,
    MicroBatch,
    PackingStats,
    RankMiniBatch,
    StepSamples,
    TokenSupports,
    TrainBatch,
)


def micro_batch(
    samples: Sequence[Sample], numbers: Sequence[int] | None = None, *, policy_version: int | None = None
) -> MicroBatch:
    """Concatenate samples. Without samples: one masked token, so that the rank still takes part in collectives.

    Neighbours with the same prompt share it: the decoder computes it once. `numbers` are the positions of the samples
    in the step; None counts them from 0. `policy_version` is the version of the weights at the start of the step; None
    leaves out the lags of single tokens.
    """
    lengths = [len(sample.token_ids) for sample in samples] or [1]
    token_ids = _joined([sample.token_ids for sample in samples], np.int64)
    mask = _joined([sample.response_mask for sample in samples], np.bool_)
    response_mask = torch.from_numpy(mask)
    return MicroBatch(
        token_ids=torch.from_numpy(token_ids),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths])).to(torch.int32),
        inputs=decoder_inputs(token_ids, mask, lengths, prompt_runs(samples) or [(0, 1)]),
        response_index=response_mask.nonzero().flatten(),
        response_mask=response_mask,
        rollout_logprobs=torch.from_numpy(_joined([sample.rollout_logprobs for sample in samples], np.float32)),
        sample_keys=[(sample.prompt_id, sample.sample_index) for sample in samples],
        sample_numbers=torch.tensor(list(range(len(samples)) if numbers is None else numbers) or [0]),
        token_lags=None if policy_version is None else _token_lags(samples, policy_version),
        supports=_supports(samples),
        routes=_routes(samples),
    )


def token_places(micro: MicroBatch, chosen: Sequence[int]) -> Tensor:
    """[P] int64, positions of the tokens of some sequences of `micro`, sequence after sequence, on its device."""
    bounds = micro.cu_seqlens.tolist()
    places = [place for i in chosen for place in range(bounds[i], bounds[i + 1])]
    return torch.tensor(places, dtype=torch.int64, device=micro.token_ids.device)


def chosen_sequences(micro: MicroBatch, chosen: Sequence[int]) -> MicroBatch:
    """A micro-batch of some sequences of `micro`, on its device, without lags and without what a worker sets.

    Every sequence has a prompt of its own. Without `chosen`: one masked token, as in `micro_batch`.
    """
    device = micro.token_ids.device
    if not chosen:
        return micro_batch([]).to(device)
    places = token_places(micro, chosen)
    lengths = micro.cu_seqlens.diff()[list(chosen)].tolist()
    token_ids, mask = micro.token_ids[places], micro.response_mask[places]
    inputs = decoder_inputs(token_ids.cpu().numpy(), mask.cpu().numpy(), lengths, [(length, 1) for length in lengths])
    return MicroBatch(
        token_ids=token_ids,
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
        inputs=inputs.to(device),
        response_index=mask.nonzero().flatten(),
        response_mask=mask,
        rollout_logprobs=micro.rollout_logprobs[places],
        sample_keys=[micro.sample_keys[i] for i in chosen],
        sample_numbers=micro.sample_numbers[list(chosen)],
        supports=None if micro.supports is None else micro.supports.taken(_response_numbers(micro)[places[mask]]),
        routes=None if micro.routes is None else tuple(micro.routes[i] for i in chosen),
    )


def _response_numbers(micro: MicroBatch) -> Tensor:
    """[T] int64, the number of each response token among the response tokens."""
    return micro.response_mask.cumsum(0) - 1


def _routes(samples: Sequence[Sample]) -> tuple[Routes, ...] | None:
    """Routes of each sample; None if the engine returned none of any."""
    if all(sample.routes is None for sample in samples):
        return None
    return tuple(Routes(()) if sample.routes is None else sample.routes for sample in samples)


def _supports(samples: Sequence[Sample]) -> TokenSupports | None:
    """Supports [R] of the response tokens; None if all of them were drawn from the whole vocabulary."""
    if all(sample.supports is None for sample in samples):
        return None
    parts = [no_supports(len(sample.token_ids)) if sample.supports is None else sample.supports for sample in samples]
    mask = np.concatenate([sample.response_mask for sample in samples])
    whole = joined(parts)
    return TokenSupports(torch.from_numpy(whole.sizes[mask]), torch.from_numpy(whole.token_ids))


def prompt_runs(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """(tokens of the prompt, number of samples) of each run of neighbours with the same prompt."""
    prompts = (sample.token_ids[: sample.num_prompt_tokens] for sample in samples)
    runs = [list(run) for _, run in groupby(prompts, key=lambda prompt: prompt.tobytes())]
    return [(len(run[0]), len(run)) for run in runs]


def decoder_inputs(
    token_ids: NDArray[np.int64],
    response_mask: NDArray[np.bool_],
    lengths: Sequence[int],
    runs: Sequence[tuple[int, int]],
) -> DecoderInputs:
    """The inputs of the decoder for packed sequences [T].

    Args:
        token_ids: [T] tokens of all sequences, end to end.
        response_mask: [T] True where the engine sampled the token.
        lengths: tokens of each sequence.
        runs: (tokens of the prompt, number of sequences) of each run of neighbours that share their prompt.
    """
    starts = np.cumsum([0, *lengths])
    firsts = np.cumsum([0, *(count for _, count in runs)])
    place = np.empty(starts[-1], np.int64)  # of every packed token among the inputs
    roots: list[int] = []
    shared: list[tuple[int, int, int]] = []  # start of the prompt among the inputs, its length, sequence
    end = 0
    for (prompt, count), first in zip(runs, firsts.tolist(), strict=False):
        root = lengths[first] if count == 1 else prompt
        for sequence in range(first, first + count):
            place[starts[sequence] : starts[sequence] + root] = np.arange(end, end + root)
        if count > 1:
            # Branches of equal length stand side by side, where attention takes them in one call.
            shared += [(end, prompt, i) for i in sorted(range(first, first + count), key=lambda i: -lengths[i])]
        roots.append(root)
        end += root
    branches = [Branch(start, prompt, lengths[sequence] - prompt) for start, prompt, sequence in shared]
    for branch, (_, prompt, sequence) in zip(branches, shared, strict=True):
        place[starts[sequence] + prompt : starts[sequence + 1]] = np.arange(end, end + branch.length)
        end += branch.length
    input_ids, positions = np.empty(end, np.int64), np.empty(end, np.int64)
    source = np.empty(end, np.int64)
    source[place[::-1]] = np.arange(starts[-1])[::-1]  # the first of those that share a place stays
    input_ids[place] = token_ids
    positions[place] = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    return DecoderInputs(
        token_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        source=torch.from_numpy(source),
        # Token t is predicted from position t - 1; a response never starts a sequence.
        before_response=torch.from_numpy(place[np.flatnonzero(response_mask) - 1]),
        roots=roots,
        branches=branches,
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
    mini_batches: Sequence[Sequence[SampleGroup]],
    *,
    num_ranks: int,
    max_tokens: int,
    policy_version: int,
    cost: SequenceCost = DEFAULT_COST,
) -> TrainBatch:
    """Pack the samples of each optimizer step for `num_ranks` ranks.

    `mini_batches[k]` are the groups of optimizer step k; `max_tokens` is the cap of one
    micro-batch, `policy_version` the version of the weights at the start of the step, `cost` the estimate that is
    balanced over ranks.
    """
    ranks: list[list[RankMiniBatch]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    first = 0
    for groups in mini_batches:
        mini_batch = [sample for group in groups for sample in group.samples]
        num_response_tokens = sum(sample.num_response_tokens for sample in mini_batch)
        planned = plan_groups(_prompt_groups(mini_batch), cap=max_tokens, num_ranks=num_ranks, cost=cost)
        for rank, bins in enumerate(planned):
            costs[rank] += sum(part.cost(cost) for parts in bins for part in parts)
            orders = [[i for part in parts for i in part.samples] for parts in bins]
            micros = [
                micro_batch([mini_batch[i] for i in order], [first + i for i in order], policy_version=policy_version)
                for order in orders
            ]
            ranks[rank].append(
                RankMiniBatch(
                    micro_batches=micros, num_response_tokens=num_response_tokens, num_sequences=len(mini_batch)
                )
            )
        first += len(mini_batch)
    micros = [micro for minis in ranks for mini in minis for micro in mini.micro_batches]
    num_tokens = sum(micro.inputs.num_tokens for micro in micros)
    return TrainBatch(
        ranks=ranks,
        samples=step_samples([group for groups in mini_batches for group in groups], policy_version=policy_version),
        stats=PackingStats(
            num_micro_batches=len(micros) // num_ranks,
            num_tokens=num_tokens,
            num_shared=sum(micro.num_tokens for micro in micros) - num_tokens,
            fill_frac=num_tokens / (len(micros) * max_tokens),
            imbalance=max(costs) * num_ranks / sum(costs) - 1,
        ),
    )


def _prompt_groups(samples: Sequence[Sample]) -> list[PromptGroup]:
    """The samples of a mini-batch by their prompt; samples of one prompt are neighbours."""
    groups: list[PromptGroup] = []
    first = 0
    for prompt, count in prompt_runs(samples):
        members = range(first, first + count)
        rests = tuple(len(samples[number].token_ids) - prompt for number in members)
        groups.append(PromptGroup(prompt=prompt, samples=tuple(members), rests=rests))
        first += count
    return groups


def step_samples(groups: Sequence[SampleGroup], *, policy_version: int) -> StepSamples:
    """Per-sample facts of the step for the ranks, group after group. Raises ValueError for a sample without a reward.

    A prompt that comes again in the step has another group: the number of a group is its place in the step.
    """
    samples = [sample for group in groups for sample in group.samples]
    sizes = torch.tensor([len(group.samples) for group in groups], dtype=torch.int64)
    return StepSamples(
        rewards=torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32),
        group_ids=torch.arange(len(groups)).repeat_interleave(sizes),
        num_tokens=torch.tensor([sample.num_response_tokens for sample in samples], dtype=torch.int64),
        lags=torch.tensor([policy_version - sample.policy_version for sample in samples], dtype=torch.int64),
    )


def split_mini_batches(groups: Sequence[SampleGroup], num_parts: int) -> list[Sequence[SampleGroup]]:
    """Deal whole groups, in order, to `num_parts` optimizer steps of (nearly) equal group count."""
    bounds = [len(groups) * part // num_parts for part in range(num_parts + 1)]
    return [groups[start:end] for start, end in pairwise(bounds) if start < end]
