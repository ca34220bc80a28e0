"""Packed weights in the memory of one process, for tests of what receives them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rollout.types import PackedWeights
from rollout.weights.experts import ROUTER_BIAS
from rollout.weights.packed_weights import TensorShape, num_bytes_of, plan_packing, write_tensors


def pack(named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, dtype: torch.dtype) -> PackedWeights:
    """`plan_packing` and `write_tensors` for tensors that are all there, into memory of this process."""
    named = list(named_tensors)
    shapes = [
        TensorShape(name, tensor.dtype, tuple(tensor.shape), kept=name.endswith(ROUTER_BIAS)) for name, tensor in named
    ]
    plan = plan_packing(shapes, dtype=dtype)
    data = np.zeros(num_bytes_of(plan), dtype=np.uint8)
    write_tensors(named, plan, data)
    return PackedWeights(policy_version=policy_version, tensors=plan, data=data)
