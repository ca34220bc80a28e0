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

from trainer.batch.train_batch import MicroBatch, RankMiniBatch, StepSamples, TokenScores
from trainer.policy.recorder import OF_BATCH, OF_SCORES, SAMPLES
from trainer.rundir.dump import Dump, RankFile


@dataclass(kw_only=True, slots=True)
class RecordedMini:
    """One optimizer step of one rank."""

    mini: RankMiniBatch
    scores: list[TokenScores] = field(default_factory=list)
    """Scores of each micro-batch in training; the rounding of the head is not recorded."""


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
    recorded = []
    for index, step in enumerate(rank.optimizer_steps):
        read = [_read_micro(parts[f"{index}/{position}"]) for position in range(step.num_micro_batches)]
        mini = RankMiniBatch(
            micro_batches=[micro for micro, _ in read],
            num_response_tokens=step.num_response_tokens,
            num_sequences=step.num_sequences,
        )
        recorded.append(RecordedMini(mini=mini, scores=[scores for _, scores in read]))
    return recorded


def _read_micro(tensors: Mapping[str, Tensor]) -> tuple[MicroBatch, TokenScores]:
    mask, cu_seqlens = tensors["response_mask"], tensors["cu_seqlens"]
    index = mask.nonzero().flatten()
    wide: dict[str, Tensor] = {}
    for name in (*OF_BATCH, *OF_SCORES):
        if name in tensors:
            values = tensors[name].to(torch.int64) if name == "token_lags" else tensors[name]
            wide[name] = torch.zeros(mask.shape, dtype=values.dtype).index_put((index,), values)
    scores = TokenScores(logprobs=wide.pop("logprobs"), entropy=wide.pop("entropy"), floor_delta=None)
    lengths = cu_seqlens.diff().tolist()
    keys = tensors["sample_keys"].tolist()
    micro = MicroBatch(
        token_ids=tensors["token_ids"].to(torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max(lengths),
        response_index=index,
        response_mask=mask,
        sample_keys=[(prompt_id, sample_index) for prompt_id, sample_index in keys],
        sample_numbers=tensors["sample_numbers"],
        **wide,
    )
    return micro, scores
