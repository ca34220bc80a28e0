"""How a rank takes the GPU that Ray shows it, as far as a machine without a GPU can tell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from policy_cases import make_config

from rollout.processes.gpu_host import Lack
from trainer.policy import worker
from trainer.policy.worker import PolicySetup, PolicyWorker


class JoinedError(Exception):
    """The rank has come to the process group."""


def cuda_rank(tmp_path: Path) -> PolicyWorker:
    setup = PolicySetup(
        config=make_config(tmp_path, num_workers=1),
        model_path=tmp_path,
        rank=0,
        init_method=f"file://{tmp_path / 'meet'}",
        device="cuda",
        num_threads=1,
        log_dir=tmp_path,
    )
    return PolicyWorker(setup)


def test_a_rank_takes_gpu_0_whatever_a_launcher_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def join(backend: str, **arguments: Any) -> None:
        calls.append((backend, arguments["device_id"], "LOCAL_RANK" in os.environ))
        raise JoinedError

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(worker, "rank_lacks", list)  # torch is for CPUs here
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(JoinedError):
        cuda_rank(tmp_path).setup()
    assert calls == [0, ("cpu:gloo,cuda:nccl", torch.device("cuda", 0), False)]


def test_a_machine_that_cannot_compile_kernels_is_named_before_the_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine of a cluster the driver cannot look."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(worker, "rank_lacks", lambda: [Lack("there is no C compiler", "Install one.")])
    with pytest.raises(RuntimeError, match=r"no C compiler\. Install one\."):
        cuda_rank(tmp_path).setup()
    assert not (tmp_path / "meet").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_that_sees_no_gpu_is_named_before_the_ranks_meet(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"torch \S+ sees no GPU here, and policy\.gpus_per_worker asks for one"):
        cuda_rank(tmp_path).setup()
    assert not (tmp_path / "meet").exists()
