"""The weights that ranks in processes of their own publish, for the tests of gathering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from policy_cases import move_adapter
from ranks import StartRank, on_ranks

import trainer.policy.model
from rollout.config import EngineConfig
from rollout.types import PackedWeights
from rollout.weights.shared_weights import copy_of
from trainer.config.train import TrainConfig
from trainer.policy.model import full_tensors
from trainer.policy.publisher import PolicyPublisher

Published = dict[str, tuple[PackedWeights, list[int]]]


def published_by_ranks(
    config: TrainConfig, model_path: Path, engines: Mapping[str, EngineConfig], *, bucket_bytes: int
) -> Published:
    """Weights for each of `engines` from `config.policy.num_workers` ranks, and what rank 0 sent per collective."""
    found: Published = on_ranks(_publish, config, model_path, config, model_path, engines, bucket_bytes)
    return found


def _publish(
    rank: int, start: StartRank, config: TrainConfig, path: Path, engines: Mapping[str, EngineConfig], bucket_bytes: int
) -> Published:
    trainer.policy.model.BUCKET_BYTES = bucket_bytes
    worker = start()
    move_adapter(worker)
    sent: list[int] = []
    gather = trainer.policy.model._all_gather

    def recorded(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
        sent.append(given.nbytes)
        return gather(output, given, **options)

    trainer.policy.model._all_gather = recorded
    found: Published = {}
    for name, engine in engines.items():
        own = replace(config, rollout=engine)
        worker._publisher = PolicyPublisher(worker._policy, own)
        sent.clear()
        shared = worker.publish_weights(1, publishes=rank == 0)
        if shared is None:
            assert rank > 0
            continue
        found[name] = copy_of(shared), list(sent)
        worker._publisher._weights.close()
    worker.save_checkpoint(path / f"saved by {config.policy.num_workers}", True)
    report = worker.saved_checkpoint(True)
    assert report is not None
    assert report.error is None
    # Without types every tensor comes as it lies.
    assert all(tensor.dtype == torch.float32 for _, tensor in full_tensors(worker._policy.model))
    return found
