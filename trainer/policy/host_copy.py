"""Tensors -> their bytes on the host, and back, while every reference to the tensors stays valid.

Used by `trainer/policy/trainable.py`. Only the storage behind a tensor is emptied and filled again: parameters,
their views inside FSDP and the optimizer's states are the same objects before and after. On a GPU the copies go through
pinned buffers, which are kept: to allocate one takes longer than to fill it. Not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the tensor itself otherwise; shares its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(like: DTensor, local: Tensor) -> DTensor:
    """`local` placed as `like`. `DTensor.from_local` would move it to the mesh's device; FSDP's offload does not."""
    return DTensor(local, like._spec, requires_grad=False)


def full_tensor(sharded: DTensor) -> Tensor:
    """The whole tensor on the device of its mesh, also where the shards lie on the host. A collective."""
    placed = sharded.to(sharded.device_mesh.device_type)
    if not isinstance(placed, DTensor):
        raise TypeError("moving a sharded tensor between devices gave a plain one")
    return placed.full_tensor()


def own_rows(whole: DTensor) -> tuple[int, int]:
    """First row of this rank, and the row after its last, of a tensor that is sharded by rows."""
    num_rows = whole.shape[0]
    rows_per_rank = math.ceil(num_rows / whole.device_mesh.size())
    start = min(whole.device_mesh.get_local_rank() * rows_per_rank, num_rows)
    return start, min(start + rows_per_rank, num_rows)


class HostCopy:
    """The bytes of some tensors on the host, while their own memory is given back."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        """Storage -> [bytes] uint8 on the host."""
        self._moved: dict[int, Tensor] = {}
        """Storage -> a view of it as bytes, which keeps it alive while it is empty."""

    @property
    def holds(self) -> bool:
        """True if tensors were moved out and are not back yet."""
        return bool(self._moved)

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor], *, device: torch.device) -> None:
        """Move those of `tensors` that lie on `device` to the host. Raises RuntimeError if it holds some already.

        Their memory is free afterwards; whoever reads them before `give_back` reads an empty storage.
        """
        if self._moved:
            raise RuntimeError("the tensors are on the host already")
        found = {}
        for tensor in tensors:
            local = local_part(tensor).detach()
            if local.device.type == device.type and local.untyped_storage().nbytes():
                # The whole storage as [bytes] uint8.
                found[_key(local)] = local.new_empty(0, dtype=torch.uint8).set_(local.untyped_storage())
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in found}
        for key, source in found.items():
            if key not in self._buffers or self._buffers[key].numel() != source.numel():
                self._buffers[key] = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
            self._buffers[key].copy_(source, non_blocking=True)
        _wait(device)
        for source in found.values():
            source.untyped_storage().resize_(0)
        self._moved = found

    @torch.no_grad()
    def give_back(self, *, device: torch.device) -> None:
        """Fill the storages again; does nothing if nothing is on the host."""
        for key, target in self._moved.items():
            target.untyped_storage().resize_(self._buffers[key].numel())
            target.copy_(self._buffers[key], non_blocking=True)
        _wait(device)
        self._moved = {}

    def on_host(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, or, while its bytes are here, the same tensor on the host: for a checkpoint."""
        local = local_part(tensor)
        if _key(local) not in self._moved:
            return tensor
        storage = self._buffers[_key(local)].untyped_storage()
        copy = torch.empty(0, dtype=local.dtype).set_(storage, local.storage_offset(), local.size(), local.stride())
        return with_local_part(tensor, copy) if isinstance(tensor, DTensor) else copy


def _key(tensor: Tensor) -> int:
    """The identity of the storage, which stays when its memory is given back."""
    return int(tensor.untyped_storage()._cdata)


def _wait(device: torch.device) -> None:
    """Until the copies have arrived."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
