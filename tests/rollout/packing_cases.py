"""Weight buckets in the memory of one process, for tests of what receives them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rollout.types import WeightBucket
from rollout.weights.packing import TensorShape, num_bytes_of, plan_buckets, write_tensors


def pack_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, bucket_bytes: int, dtype: torch.dtype
) -> list[WeightBucket]:
    """`plan_buckets` and `write_tensors` for tensors that are all there, into memory of this process."""
    named = list(named_tensors)
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    plan = plan_buckets(shapes, bucket_bytes=bucket_bytes, dtype=dtype)
    data = np.zeros(num_bytes_of(plan), dtype=np.uint8)
    write_tensors(named, plan, data)
    return [
        WeightBucket(
            policy_version=policy_version,
            index=index,
            num_buckets=len(plan),
            tensors=bucket.tensors,
            data=data[bucket.start : bucket.start + bucket.num_bytes],
        )
        for index, bucket in enumerate(plan)
    ]
