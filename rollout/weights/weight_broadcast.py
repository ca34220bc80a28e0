"""Weights across machines: rank 0 of the policy broadcasts its region's bytes to one engine worker per other machine.

`trainer/policy/worker.py` has a `WeightSender`, `rollout/group/worker.py` a `WeightReceiver`. The received bytes lie in
a region of the receiving machine (`rollout/weights/shared_weights.py`). The engines of that machine map the region and
check the bytes against the trainer's digests, as engines on the trainer's machine do. So the weights cross the network
once per machine, for every kind of engine and every tensor parallelism.

Sender and receivers form a process group of their own, which lasts as long as its members; after the loss of a member,
the remaining members form a new group. The group uses gloo, also on machines with GPUs: the bytes lie in host memory on
both sides, and if a member of an NCCL group dies, the group's watchdog ends the other processes, including the
trainer's. Members meet at a store on rank 0's machine. Like the store of ranks on several machines, the store listens
on every interface and has no password.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from rollout.engine import BroadcastError
from rollout.types import BroadcastAddress, SharedWeights
from rollout.weights.shared_weights import RegionPool

PIECE_BYTES = 64 << 20
"""Largest number of bytes of one broadcast call."""


class Receiver(NamedTuple):
    """An engine whose worker receives the weights for its machine."""

    engine: int
    """Index of the engine."""
    restarts: int
    """Number of restarts of the engine: a restarted engine is a new process and so a new receiver."""


class WeightSender:
    """The root of the broadcasts to one set of receivers, on rank 0. The first `send` forms the group."""

    def __init__(self, host: str, *, num_receivers: int, timeout_s: float) -> None:
        """`host` is the address of this machine for other machines; the system chooses a free port."""
        self._store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.address = BroadcastAddress(
            host=host, port=self._store.port, num_receivers=num_receivers, timeout_s=timeout_s
        )
        self._group: _Group | None = None

    def send(self, data: np.ndarray) -> None:
        """Broadcast `data` [num_bytes] uint8; every receiver must call `receive`. Raises BroadcastError."""
        deadline = time.monotonic() + self.address.timeout_s
        self._group = self._group or _Group(self._store, self.address, rank=0, host=self.address.host)
        self._group.broadcast(data, deadline=deadline)


class WeightReceiver:
    """A group member that receives weights for all engines of its machine."""

    def __init__(self) -> None:
        self._pool, self._base_pool = RegionPool(), RegionPool()
        self._group: _Group | None = None
        self._address: BroadcastAddress | None = None
        self._base: SharedWeights | None = None
        """The frozen weights of an adapter in the memory of this machine, once they have come through the group."""

    def receive(self, announced: SharedWeights, address: BroadcastAddress, *, rank: int, host: str) -> SharedWeights:
        """Receive the weights that rank 0 announced -> the weights in local memory, with the digests of rank 0.

        `rank` is 1 .. num_receivers, `host` the address of this machine for other machines. The frozen weights of an
        adapter come before the first adapter. This method does not verify the bytes; an engine does. Raises
        BroadcastError, and WeightSyncError if engines hold all regions.
        """
        if self._address != address:
            self._group, self._address, self._base = None, address, None
        if announced.base is not None and self._base is None:
            self._base = self._received(announced.base, address, self._base_pool, rank=rank, host=host)
        return replace(self._received(announced, address, self._pool, rank=rank, host=host), base=self._base)

    def _received(
        self, announced: SharedWeights, address: BroadcastAddress, pool: RegionPool, *, rank: int, host: str
    ) -> SharedWeights:
        deadline = time.monotonic() + address.timeout_s
        version = announced.policy_version
        region = pool.locked_region(announced.address.num_bytes, policy_version=version)
        with region.writing(version) as data:
            self._group = self._group or _Group(_join_store(address), address, rank=rank, host=host)
            self._group.broadcast(data, deadline=deadline)
        return replace(announced, address=region.address)

    def close(self) -> None:
        """Leave the group and free all memory that no engine uses."""
        self._group = None
        self._pool.close()
        self._base_pool.close()


def _join_store(address: BroadcastAddress) -> dist.Store:
    try:
        return dist.TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=address.timeout_s))
    except (RuntimeError, ValueError) as error:
        raise BroadcastError(
            f"rank 0 of the policy cannot be reached at {address.host}:{address.port} for its weights: {error}"
        ) from error


class _Group:
    """A process group of rank 0 and the receivers, separate from the process groups of the policy's ranks."""

    def __init__(self, store: dist.Store, address: BroadcastAddress, *, rank: int, host: str) -> None:
        self._timeout_s = address.timeout_s
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # The default, the address to which the machine's name resolves, may be loopback.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=address.timeout_s)
        try:
            # Any: torch's annotations lack the collectives.
            self._group: Any = dist.ProcessGroupGloo(store, rank, address.num_receivers + 1, options)
        except RuntimeError as error:
            raise BroadcastError(
                f"the group that carries weights to {address.num_receivers} other machine(s) was not formed within "
                f"rollout.sync_timeout_s={address.timeout_s:g}: {error}"
            ) from error

    def broadcast(self, data: np.ndarray, *, deadline: float) -> None:
        """Copy rank 0's `data` [num_bytes] uint8 into `data` of every receiver; `deadline` as of time.monotonic()."""
        for piece in torch.from_numpy(data).split(PIECE_BYTES):
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            options = dist.BroadcastOptions()
            options.rootRank, options.timeout = 0, left
            try:
                self._group.broadcast([piece], options).wait(left)
            except RuntimeError as error:
                raise BroadcastError(
                    f"the broadcast of weights between machines failed or took longer than "
                    f"rollout.sync_timeout_s={self._timeout_s:g}: {error}"
                ) from error
