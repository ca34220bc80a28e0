"""Two FSDP2 ranks in processes of their own: the gradients of critic and policy, for tests of what sharding changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from policy_cases import full_gradient
from ranks import StartRank, on_ranks
from test_packing import pack_samples

from rollout.types import Sample
from trainer.config.train import TrainConfig
from trainer.policy.worker import PolicyWorker


def two_ranks(config: TrainConfig, model_path: Path, batches: Sequence[Sequence[Sample]]) -> list[list[torch.Tensor]]:
    """Gradients of critic and policy after one step of a fresh start on each of `batches`, in small micro-batches.

    The output of the critic starts at 0.1 + 0.01 x sum of the hidden state.
    """
    found: list[list[torch.Tensor]] = on_ranks(_gradients, config, model_path, batches)
    return found


def _gradients(rank: int, start: StartRank, batches: Sequence[Sequence[Sample]]) -> list[list[torch.Tensor]]:
    found = []
    for samples in batches:
        worker = start()
        assert worker._critic is not None
        set_output(worker, weight=0.01, bias=0.1)
        longest = max(len(sample.token_ids) for sample in samples)
        batch = pack_samples([samples], num_ranks=2, max_tokens=max(20, longest), policy_version=0)
        report = worker.train(batch.ranks[rank], batch.samples, 1)
        assert math.isfinite(report.metrics["critic/loss"] or math.nan)
        found.append([full_gradient(worker._critic.trainable.model), full_gradient(worker._policy.model)])
    return found


def set_output(worker: PolicyWorker, *, weight: float, bias: float) -> None:
    """Make the critic say bias + weight x sum of the hidden state; each rank sets its shard."""
    assert worker._critic is not None
    with torch.no_grad():
        worker._critic.trainable.model.output.weight.fill_(weight)
        worker._critic.trainable.model.output.bias.fill_(bias)
