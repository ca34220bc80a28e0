"""Named tensors <-> WeightBucket: the flat, digested form in which the policy's weights travel to the engines.

`rollout/shared_weights.py` plans and writes; `rollout/torch_engine.py` and the SGLang engine check and unpack. A bucket
holds its tensors one after the other, each on a 64-byte boundary, with zeros between them.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollout.engine import WeightSyncError
from rollout.types import BucketSpec, TensorSpec, WeightBucket

COPY_THREADS = 2
"""Tensors that are copied at the same time. Two fill the memory bus of most machines."""
MAX_WAITING = 8
"""Tensors that are held at a time, being copied or waiting for it: with fewer, the copies wait for each other."""
PIECE_BYTES = 1 << 19
"""Copied and digested at a time."""
ALIGNMENT = 64
"""Bytes; every tensor of a bucket starts at a multiple of this, so that it can be viewed as any dtype."""


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
"""The dtypes that a bucket can carry, by name."""


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-64 of the tensor's elements in row-major order, 16 hex digits; copies from an accelerator if needed."""
    return xxhash.xxh3_64_hexdigest(_raw_bytes(tensor).data)


class TensorShape(NamedTuple):
    """What is known of a tensor before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: bool = False
    """Whether it travels in its own dtype even if that is a floating-point type: the parts of quantised weights."""


def plan_buckets(shapes: Iterable[TensorShape], *, bucket_bytes: int, dtype: torch.dtype) -> list[BucketSpec]:
    """Places for the tensors in buckets of at most `bucket_bytes` bytes; digests are still empty.

    In their order, but of the tensors of one module all weights come before all biases, in one bucket if they fit: an
    engine that computes q, k and v, or gate and up, as one product finds them side by side. Floating-point tensors will
    be cast to `dtype`, others and those to be `kept` keep theirs. A tensor larger than `bucket_bytes` gets a bucket of
    its own. Raises ValueError for no tensors, a name given twice, or a dtype that cannot travel.
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
    """The tensors one after the other."""
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
    """Bytes that the buckets take together."""
    return buckets[-1].start + buckets[-1].num_bytes if buckets else 0


def write_tensors(named_tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[BucketSpec], data: np.ndarray) -> None:
    """Cast every tensor to its place in `data` [num_bytes_of(buckets)] uint8, and fill in the digests.

    The tensors may be gathered one by one, in any order: while one is gathered, the ones before it are copied; at most
    `MAX_WAITING` are held besides the next. Raises ValueError if one is not what was planned, or does not come.
    """
    places = {spec.name: (bucket.start, spec) for bucket in buckets for spec in bucket.tensors}
    slots = threading.Semaphore(MAX_WAITING)

    def write(tensor: Tensor, spec: TensorSpec, start: int) -> None:
        try:
            _write(tensor, spec, data[start : start + spec.num_bytes])
        finally:
            slots.release()

    with ThreadPoolExecutor(COPY_THREADS) as pool:
        copies = []
        for name, tensor in named_tensors:
            start, spec = places.pop(name, (0, None))
            if spec is None or tuple(tensor.shape) != spec.shape:
                raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} came, planned was {spec or 'no more'}")
            slots.acquire()
            copies.append(pool.submit(write, tensor.detach(), spec, start + spec.offset))
    if places:
        raise ValueError(f"{len(places)} planned tensors did not come, the first is {next(iter(places))}")
    for copy in copies:
        copy.result()


def unpack(bucket: WeightBucket) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield the tensors of a bucket as views of its buffer, which must outlive them. Never write to a view.

    Does not look at the bytes: call `check_bucket` before.
    """
    flat = _as_tensor(bucket.data)
    for spec in bucket.tensors:
        dtype = DTYPES[spec.dtype]
        if spec.num_bytes == 0:
            # An empty buffer has stride 0 and cannot be viewed as a wider type.
            yield spec, torch.empty(spec.shape, dtype=dtype)
        else:
            yield spec, flat[spec.offset : spec.offset + spec.num_bytes].view(dtype).view(spec.shape)


def check_bucket(bucket: WeightBucket) -> None:
    """Raise WeightSyncError naming the first tensor whose place, size or bytes contradict its TensorSpec."""
    where = f"weight bucket {bucket.index + 1}/{bucket.num_buckets} of policy version {bucket.policy_version}"
    for spec in bucket.tensors:
        if spec.dtype not in DTYPES:
            raise WeightSyncError(
                f"{where}: tensor {spec.name} has unknown dtype {spec.dtype!r}; known: {sorted(DTYPES)}"
            )
        expected = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
        if spec.num_bytes != expected:
            raise WeightSyncError(
                f"{where}: tensor {spec.name} of shape {spec.shape} and dtype {spec.dtype} needs {expected} bytes, "
                f"its spec says {spec.num_bytes}"
            )
        if spec.offset % ALIGNMENT or not 0 <= spec.offset <= bucket.data.nbytes - spec.num_bytes:
            raise WeightSyncError(
                f"{where}: tensor {spec.name} lies at bytes {spec.offset}..{spec.offset + spec.num_bytes}, "
                f"outside the {bucket.data.nbytes} bytes of the bucket or off the {ALIGNMENT}-byte grid"
            )
        digest = xxhash.xxh3_64_hexdigest(bucket.data[spec.offset : spec.offset + spec.num_bytes].data)
        if digest != spec.digest:
            raise WeightSyncError(
                f"{where}: tensor {spec.name} was changed on the way: the trainer computed digest {spec.digest}, "
                f"the bytes that arrived have {digest}"
            )


def check_buckets(buckets: Sequence[WeightBucket], *, held_version: int) -> int:
    """Check a whole sync before any weight is replaced; return its policy version.

    All buckets must be there once, carry one version that is not older than `held_version`, name no tensor
    twice, and pass `check_bucket`. Raises WeightSyncError otherwise.
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
        check_bucket(bucket)
    return version


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _raw_bytes(tensor: Tensor) -> np.ndarray:
    """[num_bytes] uint8 on the host; shares memory with a contiguous CPU tensor."""
    flat: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _write(tensor: Tensor, spec: TensorSpec, place: np.ndarray) -> None:
    """Cast `tensor` into `place` [spec.num_bytes] uint8 and set the digest of what is there then."""
    digest = xxhash.xxh3_64()
    if spec.num_bytes:
        dtype = DTYPES[spec.dtype]
        # A transfer from an accelerator is better not cut up.
        step = PIECE_BYTES if tensor.device.type == "cpu" else spec.num_bytes
        source = tensor.to(dtype) if tensor.device.type != "cpu" else tensor
        source = source.reshape(-1)
        target = torch.from_numpy(place).view(dtype)
        raw = _raw_bytes(source) if source.dtype == dtype and source.device.type == "cpu" else None
        for start in range(0, spec.num_bytes, step):
            piece = place[start : start + step]
            if raw is None:
                first, last = start // dtype.itemsize, (start + step) // dtype.itemsize
                target[first:last].copy_(source[first:last])
            else:
                piece[:] = raw[start : start + step]  # numpy's plain copy needs less of Python than torch's
            digest.update(piece.data)  # while it is still in the cache of the core that copied it
    spec.digest = digest.hexdigest()


def _as_tensor(data: np.ndarray) -> Tensor:
    """[num_bytes] uint8, sharing memory. Arrays that come through Ray are read-only."""
    if data.flags.writeable:
        return torch.from_numpy(data)
    try:
        # DLPack has a read-only flag that torch ignores without a warning; nothing here writes to the view.
        return from_dlpack(data)
    except BufferError:
        # numpy before 2.1 cannot say "read-only" through DLPack.
        return torch.from_numpy(data.copy())
