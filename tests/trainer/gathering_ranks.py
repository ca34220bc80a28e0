"""FSDP2 ranks in processes of their own that publish a model's weights, for the tests of gathering."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_cases import move_adapter

import trainer.policy.model
from rollout.config import EngineConfig
from rollout.types import PackedWeights
from rollout.weights.shared_weights import copy_of
from trainer.config.train import TrainConfig
from trainer.policy.model import full_tensors
from trainer.policy.publisher import PolicyPublisher
from trainer.policy.worker import PolicySetup, PolicyWorker

DEADLINE_S = 300.0


def published_by_ranks(
    config: TrainConfig, model_path: Path, engines: Mapping[str, EngineConfig], *, bucket_bytes: int
) -> dict[str, tuple[PackedWeights, list[int]]]:
    """Weights for each of `engines` from `config.policy.num_workers` ranks, and what rank 0 sent per collective."""
    (model_path / "meeting").unlink(missing_ok=True)  # of earlier ranks, whom these would wait for
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ranks = [
        context.Process(target=_rank, args=(rank, config, model_path, engines, bucket_bytes, theirs))
        for rank in range(config.policy.num_workers)
    ]
    for process in ranks:
        process.start()
    theirs.close()  # so that the end of all ranks is the end of the pipe
    try:
        found = ours.recv() if ours.poll(DEADLINE_S) else {}
    except EOFError:
        found = {}
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * len(ranks)
    return found


def _rank(
    rank: int, config: TrainConfig, path: Path, engines: Mapping[str, EngineConfig], bucket_bytes: int, answers: Any
) -> None:
    trainer.policy.model.BUCKET_BYTES = bucket_bytes
    worker = PolicyWorker(
        PolicySetup(
            config=config,
            model_path=path,
            log_dir=path,
            rank=rank,
            init_method=f"file://{path / 'meeting'}",
            device="cpu",
            num_threads=1,
        )
    )
    worker.setup()
    move_adapter(worker)
    sent: list[int] = []
    gather = trainer.policy.model._all_gather

    def recorded(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
        sent.append(given.nbytes)
        return gather(output, given, **options)

    trainer.policy.model._all_gather = recorded
    found = {}
    for name, engine in engines.items():
        own = replace(config, rollout=engine)
        worker._publisher = PolicyPublisher(worker._policy, own, host="127.0.0.1")
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
    if rank == 0:
        answers.send(found)
    dist.destroy_process_group()
