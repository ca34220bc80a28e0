"""The gradient of a mixture whose routes are replayed, of ranks in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from policy_cases import full_gradient
from ranks import StartRank, on_ranks

from rollout.types import Sample
from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig


def gradient_of_ranks(
    config: TrainConfig, model_path: Path, parts: Sequence[Sequence[Sample]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient [P] of the sum of all log-probs, one rank for each of `parts`, and the counts of routes [4]."""
    config.policy.num_workers = len(parts)
    gradient, counts = on_ranks(_gradient, config, model_path, parts)
    return gradient, counts


def _gradient(rank: int, start: StartRank, parts: Sequence[Sequence[Sample]]) -> tuple[torch.Tensor, torch.Tensor]:
    model = start()._policy.model
    scores = model(micro_batch(parts[rank]), temperature=1.0)
    scores.logprobs.sum().backward()
    counts = torch.zeros(4, dtype=torch.float64) if scores.route_counts is None else scores.route_counts
    dist.all_reduce(counts)
    return full_gradient(model) * len(parts), counts  # the sum of the ranks, not their mean
