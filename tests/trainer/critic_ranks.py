"""Two FSDP2 ranks in processes of their own: the gradients of critic and policy, for tests of what sharding changes."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from policy_cases import full_gradient
from test_packing import pack_samples

from rollout.types import Sample
from trainer.config.train import TrainConfig
from trainer.policy.worker import PolicySetup, PolicyWorker

DEADLINE_S = 300.0


def two_ranks(
    config: TrainConfig, model_path: Path, batches: Sequence[Sequence[Sample]], directory: Path
) -> list[list[torch.Tensor]]:
    """Gradients of critic and policy after one step of a fresh start on each of `batches`, in small micro-batches.

    The output of the critic starts at 0.1 + 0.01 x sum of the hidden state.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, config, model_path, batches, directory)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(directory / f"{number}.pt", weights_only=True) for number in range(len(batches))]


def _rank(
    rank: int, config: TrainConfig, model_path: Path, batches: Sequence[Sequence[Sample]], directory: Path
) -> None:
    for number, samples in enumerate(batches):
        worker = PolicyWorker(
            PolicySetup(
                config=config,
                model_path=model_path,
                log_dir=model_path,
                rank=rank,
                init_method=f"file://{directory / f'meeting_{number}'}",
                device="cpu",
                num_threads=1,
            )
        )
        worker.setup()
        assert worker._critic is not None
        set_output(worker, weight=0.01, bias=0.1)
        longest = max(len(sample.token_ids) for sample in samples)
        batch = pack_samples([samples], num_ranks=2, max_tokens=max(20, longest), policy_version=0)
        report = worker.train(batch.ranks[rank], batch.samples, 1)
        assert math.isfinite(report.metrics["critic/loss"] or math.nan)
        gradients = [full_gradient(worker._critic.trainable.model), full_gradient(worker._policy.model)]
        if rank == 0:
            torch.save(gradients, directory / f"{number}.pt")
        dist.destroy_process_group()


def set_output(worker: PolicyWorker, *, weight: float, bias: float) -> None:
    """Make the critic say bias + weight x sum of the hidden state; each rank sets its shard."""
    assert worker._critic is not None
    with torch.no_grad():
        worker._critic.trainable.model.output.weight.fill_(weight)
        worker._critic.trainable.model.output.bias.fill_(bias)
