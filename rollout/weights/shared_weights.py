"""Weights in memory that other processes of the machine map: the trainer writes, the engines read in place.

`trainer/policy/worker.py` publishes with a `WeightPublisher`, `rollout/weights/weight_broadcast.py` fills regions on
other machines; `rollout/group/worker.py` opens with a `WeightReader`, and the SGLang server with `map_region`
(`rollout/sglang/loader.py`). What travels between them is a `SharedWeights`: where the bytes are, which version, and a
digest per tensor.

A region holds the whole model in the engine's dtype, not a ring of a few buckets. So an engine can check every byte
before it replaces the first, reads at its own pace without a hand-shake per bucket, and may go on using the bytes where
they are. The price is one copy of the weights in host memory, two while an engine uses the old one in place. Regions
are kept and written again: the first touch of fresh memory costs many times the copy.

A region is an anonymous memory file. It has no name in a file system, so /dev/shm may be small, and it is gone with the
last process that has it open, SIGKILL included. Its size is sealed: no reader can fall off its end. Who writes holds
an exclusive lock, who reads a shared one, for as long as the bytes are in use; the kernel drops the locks of a dead
process.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rollout.engine import WeightSyncError
from rollout.types import BucketSpec, RegionAddress, SharedWeights, WeightBucket
from rollout.weights.buckets import TensorShape, num_bytes_of, plan_buckets, write_tensors

HEADER = struct.Struct("<16s16sq")
"""Mark, region id, policy version."""
MARK = b"parity weights 1"
DATA_START = 4096
"""The weights begin on the second page."""
INCOMPLETE = -1
"""Version of a region that is being written, or was left half-written."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_REGIONS = 3
"""One that engines use, one to write; the third is for an engine that was left behind by a failed sync."""


class WeightRegion:
    """The writer's side of one region."""

    def __init__(self, num_bytes: int) -> None:
        """Room for `num_bytes` bytes of weights. Raises OSError if the system cannot give the memory."""
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
        """[num_bytes] uint8. Write to it inside `writing` only."""
        self._set_version(INCOMPLETE)

    @property
    def address(self) -> RegionAddress:
        """Where a process of the same user opens the region while this process lives."""
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return RegionAddress(path=path, region_id=self._id, num_bytes=self.data.nbytes)

    def try_lock(self) -> bool:
        """Take the region for writing; False if somebody reads it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def writing(self, policy_version: int) -> Iterator[np.ndarray]:
        """Yield `data` after a successful `try_lock`; the version is set if the block ends without an error."""
        self._set_version(INCOMPLETE)
        try:
            yield self.data
            self._set_version(policy_version)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give the memory back once no reader has it open. Views of `data` keep it until they are gone."""
        os.close(self._descriptor)

    def _set_version(self, version: int) -> None:
        HEADER.pack_into(self._map, 0, MARK, self._id.encode(), version)


class MappedRegion:
    """A reader's side of one region: what is written to `data` here reaches nobody else."""

    def __init__(self, address: RegionAddress) -> None:
        """Raises WeightSyncError if the region is gone or is not what the address says."""
        try:
            self._file = open(address.path, "rb")  # noqa: SIM115 - open for as long as the object lives
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
        mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_COPY)
        self.data = np.frombuffer(mapped, dtype=np.uint8, count=address.num_bytes, offset=DATA_START)
        """[num_bytes] uint8."""

    @property
    def writer(self) -> str:
        """Which process writes it."""
        return self._address.path.partition("/fd/")[0]

    def version(self) -> int:
        """Policy version of the bytes, INCOMPLETE while they are written; WeightSyncError for a foreign region."""
        mark, region_id, version = HEADER.unpack(os.pread(self._file.fileno(), HEADER.size, 0))
        if mark != MARK or region_id.decode() != self._address.region_id:
            raise WeightSyncError(
                f"{self._address.path} holds something else than shared weights {self._address.region_id}"
            )
        found: int = version
        return found

    def lock(self, policy_version: int) -> None:
        """Keep the trainer from writing. Raises WeightSyncError and takes no lock unless the version is there whole."""
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
        """Raise WeightSyncError unless the whole of that version is there."""
        version = self.version()
        if version != policy_version:
            held = "a half-written version" if version == INCOMPLETE else f"policy version {version}"
            raise WeightSyncError(f"the shared weights hold {held}, policy version {policy_version} was announced")

    def unlock(self) -> None:
        """Let the trainer write again; nothing may read `data` until the next `lock`."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give up the lock. The memory is given back when the last view of `data` is gone."""
        self.unlock()
        self._file.close()

    def _seals(self) -> int:
        try:
            return fcntl.fcntl(self._file, fcntl.F_GET_SEALS)
        except OSError:
            return 0  # an ordinary file


class RegionPool:
    """Regions of one size that are written again once nobody reads them."""

    def __init__(self) -> None:
        self._regions: list[WeightRegion] = []

    def locked_region(self, num_bytes: int, *, policy_version: int) -> WeightRegion:
        """A region that is locked for writing. Raises WeightSyncError if engines hold on to all of them."""
        for region in self._regions:
            if region.data.nbytes == num_bytes and region.try_lock():
                return region
        if len(self._regions) == MAX_REGIONS:
            raise WeightSyncError(
                f"policy version {policy_version} cannot be published: engines hold on to all {MAX_REGIONS} regions"
            )
        region = WeightRegion(num_bytes)
        self._regions.append(region)
        if not region.try_lock():
            raise WeightSyncError("a region that nobody knows is locked")
        return region

    def close(self) -> None:
        """Give all memory back that no engine uses."""
        for region in self._regions:
            region.close()
        self._regions = []


class WeightPublisher:
    """Writes one version of the weights after the other for the engines of this machine."""

    def __init__(self, shapes: Iterable[TensorShape], *, bucket_bytes: int, dtype: torch.dtype) -> None:
        """`shapes` in the order in which the tensors will come; see `plan_buckets` for the rest and the errors."""
        self._plan = plan_buckets(shapes, bucket_bytes=bucket_bytes, dtype=dtype)
        self._pool = RegionPool()
        self._published: WeightRegion | None = None

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> SharedWeights:
        """Cast every tensor straight into a region that nobody reads, with its digest; the announcement for engines.

        Raises ValueError if the tensors are not those of `shapes`, WeightSyncError if engines hold on to all regions.
        """
        # Of this version's own: its digests will stand in them.
        buckets = [replace(bucket, tensors=[replace(spec) for spec in bucket.tensors]) for bucket in self._plan]
        region = self._pool.locked_region(num_bytes_of(buckets), policy_version=policy_version)
        with region.writing(policy_version) as data:
            write_tensors(named_tensors, buckets, data)
        self._published = region
        return SharedWeights(address=region.address, policy_version=policy_version, buckets=buckets)

    def published(self) -> np.ndarray:
        """[num_bytes] uint8: the bytes of what was published last, until the next `publish`."""
        if self._published is None:
            raise WeightSyncError("no weights have been published yet")
        return self._published.data

    def close(self) -> None:
        """Give all memory back that no engine uses."""
        self._pool.close()
        self._published = None


class WeightReader:
    """Opens what a publisher of this machine announced; keeps the mappings, for mapping costs more than reading."""

    def __init__(self) -> None:
        self._regions: dict[str, MappedRegion] = {}
        self._in_use = ""

    @contextmanager
    def opened(self, shared: SharedWeights) -> Iterator[list[WeightBucket]]:
        """Yield the buckets where they lie; they hold still inside the block, and after it until `release` or the
        next block that ends without an error.

        Raises WeightSyncError if the region is gone, foreign, being written, or of another version than announced.
        """
        key = shared.address.region_id
        if key not in self._regions:
            self._regions[key] = MappedRegion(shared.address)
        region, previous = self._regions[key], self._in_use
        region.lock(shared.policy_version)
        try:
            yield buckets_of(shared, region.data)
        except BaseException:
            if key != previous:
                region.unlock()
            raise
        self._in_use = key
        if previous not in ("", key):
            self._regions[previous].unlock()
        # Regions of a process that does not write any more, as a receiver that was lost, would keep their memory.
        for other in [other for other, held in self._regions.items() if held.writer != region.writer]:
            self._regions.pop(other).close()

    def release(self) -> None:
        """The engine has its own copy of what was opened last: the trainer may write there."""
        if self._in_use:
            self._regions[self._in_use].unlock()
            self._in_use = ""

    def close(self) -> None:
        """Give up all locks and mappings."""
        for region in self._regions.values():
            region.close()
        self._regions, self._in_use = {}, ""


def copy_of(shared: SharedWeights) -> list[WeightBucket]:
    """Copy the announced weights into buckets that can be sent to another machine.

    Raises WeightSyncError if the region is gone, foreign, being written, or of another version than announced.
    """
    region = MappedRegion(shared.address)
    try:
        region.lock(shared.policy_version)
        return [
            replace(bucket, data=bucket.data.copy(), region=None, start=0) for bucket in buckets_of(shared, region.data)
        ]
    finally:
        region.close()


def buckets_of(shared: SharedWeights, data: np.ndarray) -> list[WeightBucket]:
    """The announced buckets as views of the region's `data`."""
    return [
        WeightBucket(
            policy_version=shared.policy_version,
            index=index,
            num_buckets=len(shared.buckets),
            tensors=spec.tensors,
            data=_slice(data, spec),
            region=shared.address,
            start=spec.start,
        )
        for index, spec in enumerate(shared.buckets)
    ]


def _slice(data: np.ndarray, spec: BucketSpec) -> np.ndarray:
    if not 0 <= spec.start <= spec.start + spec.num_bytes <= data.nbytes:
        raise WeightSyncError(
            f"a weight bucket was announced at bytes {spec.start}..{spec.start + spec.num_bytes} of {data.nbytes}"
        )
    return data[spec.start : spec.start + spec.num_bytes]
