"""Named tensors <-> WeightBucket: the flat, digested form in which the policy's weights travel to the engines.

`rollout/weights/shared_weights.py` plans and writes; `rollout/torch/engine.py` and the SGLang engine check and unpack.
A bucket holds its tensors one after the other, each on a 64-byte boundary, with zeros between them.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollout.engine import WeightSyncError
from rollout.types import BucketSpec, TensorSpec, WeightBucket

MAX_THREADS = 8
"""Largest number of threads that copy or digest at the same time: a few threads saturate the memory bus."""
BATCH_BYTES = 8 << 20
"""Smallest number of bytes of a batch of tensors, the unit of work of a thread."""
MAX_WAITING = 8
"""Largest number of batches that other threads copy, or that wait for such a thread, at the same time."""
PIECE_BYTES = 1 << 19
"""Bytes that a thread copies and digests at a time."""
ALIGNMENT = 64
"""Alignment in bytes of every tensor in a bucket, so that the tensor can be viewed as any dtype."""

Planned = TypeVar("Planned", bound=tuple[TensorSpec, *tuple[Any, ...]])
"""A tensor's place in a bucket, with the values needed to fill or to check the place."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `TensorSpec.dtype` uses: torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
"""Name of a dtype -> dtype, for all dtypes that a bucket can carry."""


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-64 of the tensor's elements in row-major order, 16 hex digits; copies from an accelerator if needed."""
    return xxhash.xxh3_64_hexdigest(_raw_bytes(tensor).data)


class TensorShape(NamedTuple):
    """Name, dtype and shape of a tensor, known before the tensor is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: bool = False
    """True if the tensor travels in its own dtype even if floating-point: values and scales of quantised weights."""


def plan_buckets(shapes: Iterable[TensorShape], *, bucket_bytes: int, dtype: torch.dtype) -> list[BucketSpec]:
    """Plan the places of tensors in buckets of at most `bucket_bytes` bytes; digests are still empty.

    Tensors keep their order, except that within one module all weights come before all biases, in one bucket if they
    fit: an engine that computes q, k and v, or gate and up, as one product finds these tensors side by side.
    Floating-point tensors will be cast to `dtype`; other tensors, and tensors with `kept`, keep their dtype. A tensor
    larger than `bucket_bytes` gets its own bucket. Raises ValueError for no tensors, a name given twice, or a dtype
    that cannot travel.
    """
    if not dtype.is_floating_point or dtype_name(dtype) not in DTYPES:
        raise ValueError(f"weights must be packed in a floating-point type of {sorted(DTYPES)}, got {dtype}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
    buckets: list[BucketSpec] = []
    names: set[str] = set()
    for family in _families(shapes):
        for name, given, *_ in family:
            if name in names:
                raise ValueError(f"tensor {name} was given twice")
            if dtype_name(given) not in DTYPES:
                raise ValueError(f"tensor {name} has dtype {given}; a bucket carries {sorted(DTYPES)}")
            names.add(name)
        together = _place(family, dtype=dtype)
        parts = [together] if together.num_bytes <= bucket_bytes else [_place([one], dtype=dtype) for one in family]
        for part in parts:
            if not buckets or _align(buckets[-1].num_bytes) + part.num_bytes > bucket_bytes:
                buckets.append(BucketSpec(start=_align(num_bytes_of(buckets)), num_bytes=0, tensors=[]))
            bucket = buckets[-1]
            offset = _align(bucket.num_bytes)
            bucket.tensors += [replace(spec, offset=offset + spec.offset) for spec in part.tensors]
            bucket.num_bytes = offset + part.num_bytes
    if not buckets:
        raise ValueError("no tensors to pack")
    return buckets


def _families(shapes: Iterable[TensorShape]) -> list[list[TensorShape]]:
    """Consecutive tensors "<module>.<part>.<kind>" of one module, ordered by kind: q, k, v weights, then biases."""
    families = []
    for _, members in itertools.groupby(shapes, key=lambda shape: shape.name.rsplit(".", 2)[0]):
        kinds: dict[str, list[TensorShape]] = {}
        for shape in members:
            kinds.setdefault(shape.name.rpartition(".")[2], []).append(shape)
        families.append([shape for kind in kinds.values() for shape in kind])
    return families


def _place(shapes: Sequence[TensorShape], *, dtype: torch.dtype) -> BucketSpec:
    """Place the tensors one after the other in one bucket."""
    bucket = BucketSpec(start=0, num_bytes=0, tensors=[])
    for name, given, shape, kept in shapes:
        travelling = dtype if given.is_floating_point and not kept else given
        offset, num_bytes = _align(bucket.num_bytes), math.prod(shape) * travelling.itemsize
        bucket.tensors.append(
            TensorSpec(
                name=name, dtype=dtype_name(travelling), shape=shape, offset=offset, num_bytes=num_bytes, digest=""
            )
        )
        bucket.num_bytes = offset + num_bytes
    return bucket


def num_bytes_of(buckets: Sequence[BucketSpec]) -> int:
    """Total bytes of the buckets, gaps included."""
    return buckets[-1].start + buckets[-1].num_bytes if buckets else 0


def num_threads() -> int:
    """Number of threads that copy and digest in this process: one per usable core, at most `MAX_THREADS`."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def write_tensors(named_tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[BucketSpec], data: np.ndarray) -> None:
    """Cast every tensor to its place in `data` [num_bytes_of(buckets)] uint8, and fill in the digests.

    The tensors may be gathered one by one, in any order: while a tensor is gathered, other threads copy earlier tensors
    (`_share_out`). Raises ValueError if a tensor differs from the plan, or is missing.
    """
    places = {spec.name: (bucket.start, spec) for bucket in buckets for spec in bucket.tensors}

    def placed() -> Iterator[tuple[TensorSpec, Tensor, np.ndarray]]:
        for name, tensor in named_tensors:
            start, spec = places.pop(name, (0, None))
            if spec is None or tuple(tensor.shape) != spec.shape:
                raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} came, planned was {spec or 'no more'}")
            first = start + spec.offset
            yield spec, tensor.detach(), data[first : first + spec.num_bytes]

    def write(batch: Iterable[tuple[TensorSpec, Tensor, np.ndarray]]) -> None:
        for spec, tensor, place in batch:
            _write(tensor, spec, place)

    _share_out(placed(), write)
    if places:
        raise ValueError(f"{len(places)} planned tensors did not come, the first is {next(iter(places))}")


def unpack(bucket: WeightBucket) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield the tensors of a bucket as views of its buffer, which must outlive the views. Never write to a view.

    This function does not verify the bytes: call `check_buckets` before.
    """
    flat = _as_tensor(bucket.data)
    for spec in bucket.tensors:
        dtype = DTYPES[spec.dtype]
        if spec.num_bytes == 0:
            # An empty buffer has stride 0 and cannot be viewed as a wider type.
            yield spec, torch.empty(spec.shape, dtype=dtype)
        else:
            yield spec, flat[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)


def check_buckets(buckets: Sequence[WeightBucket], *, held_version: int) -> int:
    """Check a whole sync before any weight is replaced; return its policy version.

    Every bucket must be present once, all buckets must have one version that is not older than `held_version`, and no
    tensor may occur twice. Place, size and digest of every tensor must match its TensorSpec; `num_threads()` threads
    compute the digests. Raises WeightSyncError otherwise; the message names the tensor if a single tensor is wrong.
    """
    if not buckets:
        raise WeightSyncError(f"no weight buckets were sent; the engine stays at policy version {held_version}")
    versions = sorted({bucket.policy_version for bucket in buckets})
    if len(versions) > 1:
        raise WeightSyncError(f"weight buckets of different policy versions were mixed: {versions}")
    (version,) = versions
    if version < held_version:
        raise WeightSyncError(
            f"weights of policy version {version} were sent to an engine that already holds version {held_version}"
        )
    expected = list(range(max(bucket.num_buckets for bucket in buckets)))
    if sorted(bucket.index for bucket in buckets) != expected:
        raise WeightSyncError(
            f"policy version {version}: expected weight buckets {expected}, "
            f"got {sorted(bucket.index for bucket in buckets)}"
        )
    names = Counter(spec.name for bucket in buckets for spec in bucket.tensors)
    repeated = sorted(name for name, count in names.items() if count > 1)
    if repeated:
        raise WeightSyncError(f"policy version {version}: tensors sent more than once: {', '.join(repeated)}")
    for bucket in buckets:
        _check_places(bucket)
    _check_digests(buckets)
    return version


def _check_places(bucket: WeightBucket) -> None:
    for spec in bucket.tensors:
        if spec.dtype not in DTYPES:
            raise WeightSyncError(
                f"{_where(bucket)}: tensor {spec.name} has unknown dtype {spec.dtype!r}; known: {sorted(DTYPES)}"
            )
        expected = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
        if spec.num_bytes != expected:
            raise WeightSyncError(
                f"{_where(bucket)}: tensor {spec.name} of shape {spec.shape} and dtype {spec.dtype} needs {expected} "
                f"bytes, its spec says {spec.num_bytes}"
            )
        if spec.offset % ALIGNMENT or not 0 <= spec.offset <= bucket.data.nbytes - spec.num_bytes:
            raise WeightSyncError(
                f"{_where(bucket)}: tensor {spec.name} lies at bytes {spec.offset}..{spec.offset + spec.num_bytes}, "
                f"outside the {bucket.data.nbytes} bytes of the bucket or off the {ALIGNMENT}-byte grid"
            )


def _check_digests(buckets: Sequence[WeightBucket]) -> None:
    tensors = [(spec, bucket) for bucket in buckets for spec in bucket.tensors]
    # The largest tensors come first: no thread is left with a large tensor when the others are done.
    tensors.sort(key=lambda pair: pair[0].num_bytes, reverse=True)
    changed: list[str] = []

    def check(batch: Iterable[tuple[TensorSpec, WeightBucket]]) -> None:
        for spec, bucket in batch:
            digest = xxhash.xxh3_64()
            # Unlike xxh3_64_hexdigest, `update` releases the GIL in all versions of xxhash.
            digest.update(bucket.data[spec.offset : spec.offset + spec.num_bytes].data)
            if digest.hexdigest() != spec.digest:
                changed.append(
                    f"{_where(bucket)}: tensor {spec.name} was changed on the way: the trainer computed digest "
                    f"{spec.digest}, the bytes that arrived have {digest.hexdigest()}"
                )

    _share_out(tensors, check)
    if changed:
        raise WeightSyncError(min(changed))


def _where(bucket: WeightBucket) -> str:
    return f"weight bucket {bucket.index + 1}/{bucket.num_buckets} of policy version {bucket.policy_version}"


def _share_out(tensors: Iterable[Planned], work: Callable[[list[Planned]], None]) -> None:
    """Call `work` for all tensors, in batches, in this thread and `num_threads() - 1` others.

    This thread takes the tensors as they come. If `MAX_WAITING` batches are waiting or in work, this thread works on
    the batch itself: it never sleeps, because waking up takes a core from the others. Errors of `tensors` and `work`
    propagate.
    """
    waiting: SimpleQueue[list[Planned] | None] = SimpleQueue()
    slots = threading.Semaphore(MAX_WAITING)
    helpers = num_threads() - 1

    def work_off() -> None:
        for batch in iter(waiting.get, None):
            try:
                work(batch)
            finally:
                slots.release()
            del batch  # frees the memory, because the next batch may come much later

    with ThreadPoolExecutor(max(helpers, 1)) as pool:
        helping = [pool.submit(work_off) for _ in range(helpers)]
        try:
            for batch in _batches(tensors):
                if helpers and slots.acquire(blocking=False):
                    waiting.put(batch)
                else:
                    work(batch)
        finally:
            for _ in range(helpers + 1):
                waiting.put(None)
        work_off()
    for helper in helping:
        helper.result()


def _batches(tensors: Iterable[Planned]) -> Iterator[list[Planned]]:
    """Yield the tensors in batches, in order. A batch ends with the tensor that fills `BATCH_BYTES`."""
    batch: list[Planned] = []
    num_bytes = 0
    for tensor in tensors:
        batch.append(tensor)
        num_bytes += tensor[0].num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _raw_bytes(tensor: Tensor) -> np.ndarray:
    """Bytes of a tensor, [num_bytes] uint8 on the host; shares memory with a contiguous CPU tensor."""
    flat: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _write(tensor: Tensor, spec: TensorSpec, place: np.ndarray) -> None:
    """Cast `tensor` into `place` [spec.num_bytes] uint8 and set the digest of the written bytes in `spec`."""
    digest = xxhash.xxh3_64()
    if spec.num_bytes:
        for piece in _filled(place, tensor, DTYPES[spec.dtype]):
            digest.update(piece.data)  # while the piece is still in the cache of the core that copied it
    spec.digest = digest.hexdigest()


def _filled(place: np.ndarray, tensor: Tensor, dtype: torch.dtype) -> Iterator[np.ndarray]:
    """Fill `place` [num_bytes] uint8 with `tensor` as `dtype`; yield every piece after it is written."""
    on_host = tensor.device.type == "cpu"
    if on_host and tensor.dtype == dtype:
        raw = _raw_bytes(tensor)
        for start in range(0, place.nbytes, PIECE_BYTES):
            piece = place[start : start + PIECE_BYTES]
            piece[:] = raw[start : start + PIECE_BYTES]  # numpy's plain copy has less Python overhead than torch's
            yield piece
        return
    # An accelerator casts its own tensor, and one large transfer from the accelerator is faster than many pieces.
    source = (tensor if on_host else tensor.to(dtype)).reshape(-1)
    step = PIECE_BYTES if on_host else place.nbytes
    target = torch.from_numpy(place).view(dtype)
    for start in range(0, place.nbytes, step):
        first, last = start // dtype.itemsize, (start + step) // dtype.itemsize
        target[first:last].copy_(source[first:last])
        yield place[start : start + step]


def _as_tensor(data: np.ndarray) -> Tensor:
    """View of `data` as a tensor, [num_bytes] uint8, sharing memory. Arrays that come through Ray are read-only."""
    if data.flags.writeable:
        return torch.from_numpy(data)
    try:
        # DLPack has a read-only flag that torch ignores without a warning; nothing here writes to the view.
        return from_dlpack(data)
    except BufferError:
        # numpy before 2.1 cannot mark an array as read-only through DLPack.
        return torch.from_numpy(data.copy())
