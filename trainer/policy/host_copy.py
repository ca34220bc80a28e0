"""Tensors -> their bytes on the host, and back, while every reference to the tensors stays valid.

Used by `trainer/policy/trainable.py`. Only the storage behind a tensor is emptied and filled again: parameters,
their views inside FSDP and the optimizer's states are the same objects before and after. All bytes are in one buffer,
which is kept, because to allocate it takes longer than to fill it, and which is pinned for a GPU. Torch's own pinned
memory would be rounded up to a power of two. Not yet run on a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

ALIGNMENT = 64
"""Bytes to which the start of each tensor in the buffer is aligned: a multiple of the size of every dtype."""
ROOM_TIMEOUT_S = 30.0
"""Seconds to wait for memory of a GPU that its other user is about to free."""


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
        self._buffer = torch.empty(0, dtype=torch.uint8)
        """[bytes] uint8 on the host."""
        self._is_pinned = False
        self._offsets: dict[int, int] = {}
        """Storage -> offset of its bytes in the buffer."""
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
        self._offsets, num_bytes = {}, 0
        for key, source in found.items():
            self._offsets[key] = num_bytes
            num_bytes += math.ceil(source.numel() / ALIGNMENT) * ALIGNMENT
        self._hold(num_bytes, is_pinned=device.type == "cuda")
        for key, source in found.items():
            self._part(key, source).copy_(source, non_blocking=True)
        _wait(device)
        for source in found.values():
            source.untyped_storage().resize_(0)
        self._moved = found

    @torch.no_grad()
    def give_back(self, *, device: torch.device) -> None:
        """Fill the storages again; does nothing if nothing is on the host."""
        if self._moved and device.type == "cuda":
            _wait_for_room(self._buffer.numel(), device)
        for key, target in self._moved.items():
            target.untyped_storage().resize_(target.numel())
            target.copy_(self._part(key, target), non_blocking=True)
        _wait(device)
        self._moved = {}

    def on_host(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, or, while its bytes are here, the same tensor on the host: for a checkpoint."""
        local = local_part(tensor)
        if _key(local) not in self._moved:
            return tensor
        start = self._offsets[_key(local)] // local.itemsize + local.storage_offset()
        storage = self._buffer.untyped_storage()
        copy = torch.empty(0, dtype=local.dtype).set_(storage, start, local.size(), local.stride())
        return with_local_part(tensor, copy) if isinstance(tensor, DTensor) else copy

    def _part(self, key: int, like: Tensor) -> Tensor:
        """The bytes of a storage in the buffer, as many as in `like`."""
        return self._buffer[self._offsets[key] : self._offsets[key] + like.numel()]

    def _hold(self, num_bytes: int, *, is_pinned: bool) -> None:
        """Resize the buffer to `num_bytes` bytes. Resizing discards its content."""
        if self._buffer.numel() == num_bytes:
            return
        if self._is_pinned:
            _checked("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
            self._is_pinned = False
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if is_pinned and num_bytes:
            address = self._buffer.data_ptr()
            _checked("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
            self._is_pinned = True


def _key(tensor: Tensor) -> int:
    """The identity of the storage, which stays when its memory is given back."""
    return int(tensor.untyped_storage()._cdata)


def _checked(call: str, status: object) -> None:
    if code := int(status):  # type: ignore[call-overload]
        raise RuntimeError(
            f"{call} failed with CUDA status {code}: the host cannot pin the memory for what the GPU gives up. Free "
            "memory of the host, raise its limit of locked memory (ulimit -l), or set cluster.residency=never"
        )


def _wait_for_room(num_bytes: int, device: torch.device) -> None:
    """Wait until the GPU has `num_bytes` free bytes.

    After ROOM_TIMEOUT_S the function returns anyway: torch's out-of-memory error says more than ours could. An engine
    on several GPUs answers when its first process has freed its memory, while the others are still freeing theirs.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _wait_until(lambda: torch.cuda.mem_get_info(device)[0] + unused >= num_bytes)


def others_bytes(device: torch.device) -> int:
    """Bytes of the GPU that are not this process's tensors: its context, and what other processes hold; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def wait_for_others(device: torch.device, *, at_most: int) -> int:
    """`others_bytes` once they are `at_most` so many, or when ROOM_TIMEOUT_S have passed; see `_wait_for_room`."""
    _wait_until(lambda: others_bytes(device) <= at_most)
    return others_bytes(device)


def _wait_until(has_room: Callable[[], bool]) -> None:
    """Until `has_room`, or ROOM_TIMEOUT_S have passed."""
    deadline = time.monotonic() + ROOM_TIMEOUT_S
    while not has_room() and time.monotonic() < deadline:
        time.sleep(0.02)


def _wait(device: torch.device) -> None:
    """Until the copies have arrived."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
