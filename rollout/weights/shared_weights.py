"""Weights in shared memory: the trainer writes, the engines on the same machine map the memory and read in place.

`trainer/policy/worker.py` publishes with a `WeightPublisher`, which copies by `write_tensors` of
`rollout/weights/packed_weights.py`; `rollout/group/worker.py` opens with a `WeightReader`, and the SGLang server with
`map_region` (`rollout/sglang/loader.py`). The message between these processes is a `SharedWeights`: address of the
bytes, policy version, and one digest per tensor.

A region holds the whole model in the engine's dtype, not a ring of a few parts. So an engine can check every byte
before it replaces the first weight, reads at its own pace without a hand-shake per part, and may continue to use the
bytes in place. The cost is one copy of the weights in host memory, two while an engine uses the old copy in place.
Regions are kept and rewritten: the first touch of fresh memory takes many times as long as the copy.

A region is an anonymous memory file. The file has no name in a file system, so /dev/shm may be small, and the memory is
freed with the last process that has the file open, SIGKILL included. The size is sealed: no reader can read past the
end. A writer holds an exclusive lock and a reader a shared lock for as long as the bytes are in use; the kernel drops
the locks of a dead process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from rollout.engine import WeightSyncError
from rollout.types import PackedWeights, RegionAddress, SharedWeights
from rollout.weights.packed_weights import DTYPES, TensorShape, Watcher, num_bytes_of, plan_packing, write_tensors
from rollout.weights.registered import Registration, uses_cuda

HEADER = struct.Struct("<16s16sq")
"""Layout of a region's header: mark, region id, policy version."""
MARK = b"parity weights 1"
DATA_START = 4096
"""Offset in bytes of the weights in a region: the second page."""
INCOMPLETE = -1
"""Version in the header of a region that is being written, or was left half-written."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_REGIONS = 3
"""Largest number of regions: one that engines use, one to write, one for an engine that missed a failed sync."""


class WeightRegion:
    """The writer's side of one region."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate `num_bytes` bytes for weights. Raises OSError if the system cannot allocate the memory."""
        self._id = secrets.token_hex(8)
        self._descriptor = os.memfd_create("parity-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, DATA_START + num_bytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._descriptor, DATA_START + num_bytes)
        except OSError:
            os.close(self._descriptor)
            raise
        self.data = np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=DATA_START)
        """[num_bytes] uint8. Write to `data` inside `writing` only."""
        self._registration: Registration | None = None
        self._set_version(INCOMPLETE)

    @property
    def address(self) -> RegionAddress:
        """Address at which a process of the same user can open the region while this process lives."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return RegionAddress(path=path, region_id=self._id, num_bytes=self.data.nbytes)

    def try_lock(self) -> bool:
        """Lock the region for writing -> True; False if a reader holds a lock."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def writing(self, policy_version: int) -> Iterator[np.ndarray]:
        """Yield `data` after a successful `try_lock`; set the version if the block ends without an error; unlock."""
        self._set_version(INCOMPLETE)
        try:
            yield self.data
            self._set_version(policy_version)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def register(self) -> None:
        """Page-lock the memory for the GPU of this process, until `close`; once is enough. `data` has been written."""
        self._registration = self._registration or Registration(self.data)

    def close(self) -> None:
        """Close the region; the memory is freed when no reader has it open and no view of `data` exists."""
        if self._registration is not None:
            self._registration.close()
        os.close(self._descriptor)

    def _set_version(self, version: int) -> None:
        HEADER.pack_into(self._map, 0, MARK, self._id.encode(), version)


class MappedRegion:
    """A reader's side of one region: a private mapping, whose changes no other process sees, unless `registered`."""

    def __init__(self, address: RegionAddress, *, registered: bool = False) -> None:
        """Map the region. Raises WeightSyncError if the region is gone or does not match the address.

        `registered`: page-lock the memory for the GPU of this process. Then it is the trainer's own: never write to it.
        """
        try:
            self._file = open(address.path, "r+b" if registered else "rb")  # noqa: SIM115 - open as long as the object
        except OSError as error:
            raise WeightSyncError(f"the trainer's shared weights at {address.path} are gone: {error}") from error
        self._address = address
        size = os.fstat(self._file.fileno()).st_size
        if size != DATA_START + address.num_bytes or self._seals() & SEALS != SEALS:
            self._file.close()
            raise WeightSyncError(
                f"{address.path} is not the trainer's shared weights: {size} bytes, expected "
                f"{DATA_START + address.num_bytes} of sealed size"
            )
        self.version()
        access = mmap.ACCESS_WRITE if registered else mmap.ACCESS_COPY
        mapped = mmap.mmap(self._file.fileno(), size, access=access)
        self.data = np.frombuffer(mapped, dtype=np.uint8, count=address.num_bytes, offset=DATA_START)
        """[num_bytes] uint8, the bytes of the weights."""
        if registered:
            # Also where nobody calls `close`; what a process has locked when it ends, CUDA unlocks.
            finalize(self, Registration(self.data).close).atexit = False

    @property
    def writer(self) -> str:
        """Path under /proc of the process that writes the region."""
        return self._address.path.partition("/fd/")[0]

    def version(self) -> int:
        """Policy version of the bytes, INCOMPLETE during a write. Raises WeightSyncError for a foreign region."""
        mark, region_id, version = HEADER.unpack(os.pread(self._file.fileno(), HEADER.size, 0))
        if mark != MARK or region_id.decode() != self._address.region_id:
            raise WeightSyncError(
                f"{self._address.path} holds something else than shared weights {self._address.region_id}"
            )
        found: int = version
        return found

    def lock(self, policy_version: int) -> None:
        """Keep the trainer from writing. Raises WeightSyncError, without a lock, unless the version is complete."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WeightSyncError(
                f"the trainer is writing to the shared weights that were announced as policy version {policy_version}"
            ) from error
        try:
            self.expect(policy_version)
        except WeightSyncError:
            self.unlock()
            raise

    def expect(self, policy_version: int) -> None:
        """Raise WeightSyncError unless the region holds the complete weights of `policy_version`."""
        version = self.version()
        if version != policy_version:
            held = "a half-written version" if version == INCOMPLETE else f"policy version {version}"
            raise WeightSyncError(f"the shared weights hold {held}, policy version {policy_version} was announced")

    def unlock(self) -> None:
        """Let the trainer write again; `data` must not be read until the next `lock`."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock and close the file. The memory is freed when the last view of `data` is gone."""
        self.unlock()
        self._file.close()

    def _seals(self) -> int:
        try:
            return fcntl.fcntl(self._file, fcntl.F_GET_SEALS)
        except OSError:
            return 0  # an ordinary file


class RegionPool:
    """Regions of one size, each rewritten when no reader holds it."""

    def __init__(self) -> None:
        self._regions: list[WeightRegion] = []

    def locked_region(self, num_bytes: int, *, policy_version: int) -> WeightRegion:
        """A region that is locked for writing. Raises WeightSyncError if engines hold all regions."""
        for region in self._regions:
            if region.data.nbytes == num_bytes and region.try_lock():
                return region
        if len(self._regions) == MAX_REGIONS:
            raise WeightSyncError(
                f"policy version {policy_version} cannot be published: engines hold on to all {MAX_REGIONS} regions"
            )
        region = WeightRegion(num_bytes)
        self._regions.append(region)
        region.try_lock()
        return region

    def close(self) -> None:
        """Free all memory that no engine uses."""
        for region in self._regions:
            region.close()
        self._regions = []


class WeightPublisher:
    """Writes each version of the weights to shared memory for the engines of this machine."""

    def __init__(self, shapes: Iterable[TensorShape], *, dtype: torch.dtype) -> None:
        """See `plan_packing` for arguments and errors."""
        self._plan = plan_packing(shapes, dtype=dtype)
        self.input_dtypes = {spec.name: DTYPES[spec.dtype] for spec in self._plan}
        """Name -> dtype in which `publish` needs a tensor: a wider type changes no byte of what is published."""
        self._pool = RegionPool()
        self._published: WeightRegion | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tensors that are published, in order."""
        return [spec.name for spec in self._plan]

    def publish(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        watchers: Sequence[Watcher] = (),
    ) -> SharedWeights:
        """Cast every tensor directly into a free region and compute its digest -> the announcement for engines.

        `watchers` see every tensor as it is published: see `write_tensors`. Raises ValueError if the tensors do not
        match `shapes`, WeightSyncError if engines hold all regions.
        """
        # Every version needs its own specs, because the specs hold the version's digests.
        specs = [replace(spec) for spec in self._plan]
        region = self._pool.locked_region(num_bytes_of(specs), policy_version=policy_version)
        with region.writing(policy_version) as data:
            write_tensors(named_tensors, specs, data, watchers=watchers)
        if uses_cuda():
            region.register()  # the first version was slow anyway: its memory was touched for the first time
        self._published = region
        return SharedWeights(address=region.address, policy_version=policy_version, tensors=specs)

    def published(self) -> np.ndarray:
        """[num_bytes] uint8: the bytes of the weights published last, valid until the next `publish`."""
        if self._published is None:
            raise WeightSyncError("no weights have been published yet")
        return self._published.data

    def close(self) -> None:
        """Free all memory that no engine uses."""
        self._pool.close()
        self._published = None


class WeightReader:
    """Opens weights announced on this machine; keeps the mappings, because mapping takes longer than reading."""

    def __init__(self) -> None:
        self._regions: dict[str, MappedRegion] = {}
        self._in_use = ""

    @contextmanager
    def opened(self, shared: SharedWeights) -> Iterator[PackedWeights]:
        """Yield the weights in place. The bytes do not change inside the block, nor afterwards until `release` or the
        next block that ends without an error.

        Raises WeightSyncError if the region is gone, foreign, being written, or of another version than announced.
        """
        key = shared.address.region_id
        if key not in self._regions:
            self._regions[key] = MappedRegion(shared.address)
        region, previous = self._regions[key], self._in_use
        region.lock(shared.policy_version)
        try:
            yield _in_place(shared, region)
        except BaseException:
            if key != previous:
                region.unlock()
            raise
        self._in_use = key
        if previous not in ("", key):
            self._regions[previous].unlock()
        # Regions of a process that does not write any more, for example a lost receiver, would keep their memory.
        for other in [other for other, held in self._regions.items() if held.writer != region.writer]:
            self._regions.pop(other).close()

    def release(self) -> None:
        """Unlock the region opened last, so that the trainer may write; the engine has its own copy of the weights."""
        if self._in_use:
            self._regions[self._in_use].unlock()
            self._in_use = ""

    def close(self) -> None:
        """Release all locks and mappings."""
        for region in self._regions.values():
            region.close()
        self._regions, self._in_use = {}, ""


def copy_of(shared: SharedWeights) -> PackedWeights:
    """Copy the announced weights into memory that can be sent to another machine.

    Raises WeightSyncError if the region is gone, foreign, being written, or of another version than announced.
    """
    region = MappedRegion(shared.address)
    try:
        region.lock(shared.policy_version)
        base = None if shared.base is None else copy_of(shared.base)
        return replace(_in_place(shared, region), data=region.data.copy(), region=None, base=base)
    finally:
        region.close()


def _in_place(shared: SharedWeights, region: MappedRegion) -> PackedWeights:
    return PackedWeights(
        policy_version=shared.policy_version,
        tensors=shared.tensors,
        data=region.data,
        region=shared.address,
        engine_digests=shared.engine_digests,
    )
