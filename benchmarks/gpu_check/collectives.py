"""Check 11: process groups of one rank, with what the trainer asks of them; a LOCAL_RANK from outside."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from gpu_check.host import NEEDS_CUDA, Host
from gpu_check.rows import Row, judged, not_run, noted

TIMEOUT = timedelta(seconds=60)
BACKENDS = {"gloo": False, "nccl": True, "cpu:gloo,cuda:nccl": True}
"""Backend -> whether it needs a GPU. The last one is that of a run."""
FOREIGN_RANK = "3"


def collectives(host: Host) -> Iterator[Row]:
    """Sums in float64, objects, and the mesh, for each backend."""
    for backend, needs_cuda in BACKENDS.items():
        if needs_cuda and not host.is_cuda:
            yield not_run("11", f"{backend}: sum in float64, objects, mesh", expected="they work", reason=NEEDS_CUDA)
            continue
        device = torch.device("cpu") if backend == "gloo" else host.device
        with _group(host, backend, device):
            yield _works(backend, device)
    yield from _foreign_rank(host)


@contextmanager
def _group(host: Host, backend: str, device: torch.device) -> Iterator[None]:
    dist.init_process_group(
        backend,
        init_method=f"file://{host.scratch / secrets.token_hex(8)}",
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        device_id=torch.device("cuda", 0) if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _works(backend: str, device: torch.device) -> Row:
    value = torch.full((3,), 1 / 3, dtype=torch.float64, device=device)
    dist.all_reduce(value)
    objects: list[object] = [None]
    dist.all_gather_object(objects, {"a": 1})
    mesh = init_device_mesh(device.type, (1,))
    ok = value.tolist() == [1 / 3] * 3 and objects == [{"a": 1}] and mesh.size() == 1
    return judged(
        "11",
        f"{backend}: sum in float64, objects, mesh",
        expected="they work",
        measured="they work" if ok else f"{value.tolist()}, {objects}",
        ok=ok,
        reason="wrong values",
    )


def _foreign_rank(host: Host) -> Iterator[Row]:
    """LOCAL_RANK of another program, as torchrun and Slurm set it, where one GPU is visible."""
    what, expected = f"a mesh with LOCAL_RANK={FOREIGN_RANK} in the environment", "it works"
    if not host.is_cuda:
        yield not_run("11", what, expected=expected, reason=NEEDS_CUDA)
        return
    os.environ["LOCAL_RANK"] = FOREIGN_RANK
    try:
        with _group(host, "nccl", host.device):
            init_device_mesh("cuda", (1,))
        yield noted("11", what, measured="it works")
    except (RuntimeError, ValueError) as error:
        yield noted("11", what, measured=str(error)[:200], reason="the variable must not reach a rank")
    finally:
        del os.environ["LOCAL_RANK"]
