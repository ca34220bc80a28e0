"""FSDP2 ranks in processes of their own: the gradient of a mixture whose routes are replayed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from policy_cases import full_gradient

from rollout.types import Sample
from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig
from trainer.policy.worker import PolicySetup, PolicyWorker

DEADLINE_S = 300.0


def gradient_of_ranks(
    config: TrainConfig, model_path: Path, parts: Sequence[Sequence[Sample]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient [P] of the sum of all log-probs, one rank for each of `parts`, and the counts of routes [4]."""
    (model_path / "meeting").unlink(missing_ok=True)  # of earlier ranks, whom these would wait for
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    config.policy.num_workers = len(parts)
    ranks = [
        context.Process(target=_rank, args=(rank, config, model_path, part, theirs)) for rank, part in enumerate(parts)
    ]
    for process in ranks:
        process.start()
    theirs.close()  # so that the end of all ranks is the end of the pipe
    found = ours.recv() if ours.poll(DEADLINE_S) else None
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert found is not None and [process.exitcode for process in ranks] == [0] * len(ranks)
    gradient, counts = found
    return torch.from_numpy(gradient), torch.from_numpy(counts)


def _rank(rank: int, config: TrainConfig, path: Path, samples: Sequence[Sample], answers: Any) -> None:
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
    model = worker._policy.model
    scores = model(micro_batch(samples), temperature=1.0)
    scores.logprobs.sum().backward()
    gradient = full_gradient(model) * config.policy.num_workers  # the ranks' mean
    counts = torch.zeros(4, dtype=torch.float64) if scores.route_counts is None else scores.route_counts
    dist.all_reduce(counts)
    if rank == 0:
        answers.send((gradient.numpy(), counts.numpy()))  # a tensor would be read after this process has ended
    dist.destroy_process_group()
