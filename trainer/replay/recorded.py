"""A dump -> the step as the ranks trained on it: micro-batches in their order, and the policy's scores.

T: packed tokens, R: response tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trainer.batch.packing import decoder_inputs
from trainer.batch.route_tensors import routes_of
from trainer.batch.train_batch import MicroBatch, RankMiniBatch, StepSamples, TokenScores, TokenSupports
from trainer.policy.recorder import OF_BATCH, OF_SCORES, SAMPLES
from trainer.rundir.dump import Dump, RankFile


@dataclass(kw_only=True, slots=True)
class RecordedMini:
    """One optimizer step of one rank."""

    mini: RankMiniBatch
    scores: list[TokenScores] = field(default_factory=list)
    """Scores of each micro-batch in training; the rounding of the head is not recorded."""
    again: int | None = None
    """Optimizer step of the first pass over the same mini-batch; None if this is the first pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A rollout step of all ranks."""

    ranks: list[list[RecordedMini]]
    """Optimizer steps by [num_ranks][optimizer steps]."""
    samples: StepSamples

    @property
    def num_optimizer_steps(self) -> int:
        return len(self.ranks[0])

    @property
    def has_old_logprobs(self) -> bool:
        """True if a separate forward scored pi_old of every token."""
        minis = [recorded.mini for rank in self.ranks for recorded in rank]
        return all(micro.old_logprobs is not None for mini in minis for micro in mini.micro_batches)


def read_step(dump: Dump) -> RecordedStep:
    """The recorded step, on the host."""
    ranks = [_read_rank(dump.path / rank.file, rank) for rank in dump.description.ranks]
    with safe_open(dump.path / dump.description.ranks[0].file, framework="pt") as file:
        samples = StepSamples(**{name: file.get_tensor(f"samples/{name}") for name in SAMPLES})
    return RecordedStep(ranks=ranks, samples=samples)


def _read_rank(path: Path, rank: RankFile) -> list[RecordedMini]:
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            place, _, name = key.rpartition("/")
            parts[place][name] = file.get_tensor(key)
    recorded: list[RecordedMini] = []
    for index, step in enumerate(rank.optimizer_steps):
        read = [parts[f"{index}/{position}"] for position in range(step.num_micro_batches)]
        mini = (
            RankMiniBatch(
                micro_batches=[_read_micro(tensors) for tensors in read],
                num_response_tokens=step.num_response_tokens,
                num_sequences=step.num_sequences,
            )
            if step.again is None
            else recorded[step.again].mini
        )
        scores = [_read_scores(tensors, micro) for tensors, micro in zip(read, mini.micro_batches, strict=True)]
        recorded.append(RecordedMini(mini=mini, scores=scores, again=step.again))
    return recorded


def _wide(values: Tensor, mask: Tensor, index: Tensor) -> Tensor:
    """The `values` [R] at the places `index` [R] of `mask` [T], 0 elsewhere -> [T]."""
    return torch.zeros(mask.shape, dtype=values.dtype).index_put((index,), values)


def _read_scores(tensors: Mapping[str, Tensor], micro: MicroBatch) -> TokenScores:
    logprobs, entropy = (_wide(tensors[name], micro.response_mask, micro.response_index) for name in OF_SCORES)
    return TokenScores(logprobs=logprobs, entropy=entropy, floor_delta=None)


def _read_micro(tensors: Mapping[str, Tensor]) -> MicroBatch:
    mask, cu_seqlens = tensors["response_mask"], tensors["cu_seqlens"]
    index = mask.nonzero().flatten()
    wide = {name: _wide(tensors[name], mask, index) for name in OF_BATCH if name in tensors}
    if "token_lags" in wide:
        wide["token_lags"] = wide["token_lags"].to(torch.int64)
    token_ids, lengths = tensors["token_ids"].to(torch.int64), cu_seqlens.diff().tolist()
    keys = tensors["sample_keys"].tolist()
    return MicroBatch(
        token_ids=token_ids,
        cu_seqlens=cu_seqlens,
        inputs=decoder_inputs(token_ids.numpy(), mask.numpy(), lengths, [(0, 1)] * len(lengths)),
        response_index=index,
        response_mask=mask,
        sample_keys=[(prompt_id, sample_index) for prompt_id, sample_index in keys],
        sample_numbers=tensors["sample_numbers"],
        supports=TokenSupports(tensors["support_sizes"], tensors["support_ids"]) if "support_ids" in tensors else None,
        routes=routes_of(tensors),
        **wide,
    )
