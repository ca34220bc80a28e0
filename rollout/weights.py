"""Named tensors <-> WeightBucket: the flat, digested form in which the policy's weights travel to the engines.

`trainer/worker.py` packs; `rollout/torch_engine.py` and the SGLang engine check and unpack. A bucket holds its
tensors one after the other, each on a 64-byte boundary, with zeros between them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollout.engine import WeightSyncError
from rollout.types import TensorSpec, WeightBucket

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


def pack_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, bucket_bytes: int, dtype: torch.dtype
) -> list[WeightBucket]:
    """Flatten tensors, in their order, into buckets of at most `bucket_bytes` bytes.

    Floating-point tensors are cast to `dtype`, others keep theirs. A tensor larger than `bucket_bytes` gets a
    bucket of its own. At most one bucket's worth of tensors is held besides the result, so `named_tensors` may
    gather them one by one. Raises ValueError for no tensors, a name given twice, or a dtype that cannot travel.
    """
    if not dtype.is_floating_point or dtype_name(dtype) not in DTYPES:
        raise ValueError(f"weights must be packed in a floating-point type of {sorted(DTYPES)}, got {dtype}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be >= 1, got {bucket_bytes}")
    buckets: list[WeightBucket] = []
    pending: list[tuple[TensorSpec, np.ndarray]] = []
    names: set[str] = set()
    end = 0
    for name, tensor in named_tensors:
        if name in names:
            raise ValueError(f"tensor {name} was given twice")
        if dtype_name(tensor.dtype) not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {tensor.dtype}; a bucket carries {sorted(DTYPES)}")
        names.add(name)
        travelling = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        raw = _raw_bytes(travelling)
        offset = _align(end)
        if pending and offset + raw.nbytes > bucket_bytes:
            buckets.append(_flatten(pending, policy_version=policy_version, index=len(buckets)))
            pending, offset = [], 0
        spec = TensorSpec(
            name=name,
            dtype=dtype_name(travelling.dtype),
            shape=tuple(travelling.shape),
            offset=offset,
            num_bytes=raw.nbytes,
            digest=xxhash.xxh3_64_hexdigest(raw.data),
        )
        pending.append((spec, raw))
        end = offset + raw.nbytes
    if not pending:
        raise ValueError("no tensors to pack")
    buckets.append(_flatten(pending, policy_version=policy_version, index=len(buckets)))
    for bucket in buckets:
        bucket.num_buckets = len(buckets)
    return buckets


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


def _flatten(pending: list[tuple[TensorSpec, np.ndarray]], *, policy_version: int, index: int) -> WeightBucket:
    """Copy the pending tensors into one buffer; num_buckets is filled in once it is known."""
    last = pending[-1][0]
    data = np.zeros(last.offset + last.num_bytes, dtype=np.uint8)
    for spec, raw in pending:
        data[spec.offset : spec.offset + spec.num_bytes] = raw
    return WeightBucket(
        policy_version=policy_version, index=index, num_buckets=0, tensors=[spec for spec, _ in pending], data=data
    )


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
