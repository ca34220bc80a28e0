"""FSDP2 ranks in processes of their own."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config.train import TrainConfig
from trainer.policy.worker import PolicySetup, PolicyWorker

DEADLINE_S = 300.0
StartRank = Callable[[], PolicyWorker]


def on_ranks(work: Callable[..., Any], config: TrainConfig, model_path: Path, *arguments: Any) -> Any:
    """What `work(rank, start, *arguments)` returns on rank 0 of `config.policy.num_workers` ranks.

    `start` makes the worker of this rank, and ends the process group of the one before.
    """
    for old in model_path.glob("meeting_*"):  # of earlier ranks, whom these would wait for
        old.unlink()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ranks = [
        context.Process(target=_rank, args=(rank, work, config, model_path, arguments, theirs))
        for rank in range(config.policy.num_workers)
    ]
    for process in ranks:
        process.start()
    theirs.close()  # so that the end of all ranks is the end of the pipe
    try:
        found = ours.recv_bytes() if ours.poll(DEADLINE_S) else b""
    except EOFError:
        found = b""
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * len(ranks)
    return pickle.loads(found)


def _rank(
    rank: int, work: Callable[..., Any], config: TrainConfig, path: Path, arguments: tuple[Any, ...], answers: Any
) -> None:
    starts = 0

    def start() -> PolicyWorker:
        nonlocal starts
        starts += 1
        if dist.is_initialized():
            dist.destroy_process_group()
        setup = PolicySetup(
            config=config,
            model_path=path,
            log_dir=path,
            rank=rank,
            init_method=f"file://{path / f'meeting_{starts}'}",
            device="cpu",
            num_threads=1,
        )
        worker = PolicyWorker(setup)
        worker.setup()
        return worker

    found = work(rank, start, *arguments)
    if rank == 0:
        # Tensors as bytes: by themselves they would be read after this process has ended.
        answers.send_bytes(pickle.dumps(found))
    dist.destroy_process_group()
