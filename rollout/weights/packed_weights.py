"""Named tensors <-> PackedWeights: the flat, digested form in which the policy's weights travel to the engines.

`rollout/weights/shared_weights.py` plans and writes; `rollout/torch/engine.py` and the SGLang engine check and unpack.
The tensors lie one after the other, each on a 64-byte boundary, with zeros between them.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from rollout.engine import WeightSyncError
from rollout.types import PackedWeights, TensorSpec

MAX_THREADS = 8
"""Largest number of threads that compute digests at the same time: a few threads saturate the memory bus."""
LISTED_NAMES = 5
ALIGNMENT = 64
"""Alignment in bytes of every tensor, so that the tensor can be viewed as any dtype."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name that `TensorSpec.dtype` uses: torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
"""Name of a dtype -> dtype, for all dtypes in which weights can travel."""


def listed(names: Iterable[str]) -> str:
    """Names of tensors for an error: the first `LISTED_NAMES` in order, and the number of the others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED_NAMES} more" if len(ordered) > LISTED_NAMES else ""
    return ", ".join(ordered[:LISTED_NAMES]) + more or "none"


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-64 of the tensor's elements in row-major order, 16 hex digits; copies from an accelerator if needed."""
    return _digest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def stored_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that the files of a model hold, by name: first its buffers that are no function of config.json, such as the
    biases of routers, which have a type of their own; then its parameters, tied ones once."""
    stored = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    yield from model.named_parameters()


class TensorShape(NamedTuple):
    """Name, dtype and shape of a tensor, known before the tensor is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kept: bool = False
    """True if the tensor travels in its own dtype even if floating-point: buffers, values and scales of quantised
    weights."""


def plan_packing(shapes: Iterable[TensorShape], *, dtype: torch.dtype) -> list[TensorSpec]:
    """Plan the places of tensors, in their order; digests are still empty.

    Floating-point tensors will be cast to `dtype`; other tensors, and tensors with `kept`, keep their dtype. Raises
    ValueError for no tensors, a name given twice, or a dtype that cannot travel.
    """
    if not dtype.is_floating_point or dtype_name(dtype) not in DTYPES:
        raise ValueError(f"weights must be packed in a floating-point type of {sorted(DTYPES)}, got {dtype}")
    specs: dict[str, TensorSpec] = {}
    end = 0
    for name, given, shape, kept in shapes:
        if name in specs:
            raise ValueError(f"tensor {name} was given twice")
        if dtype_name(given) not in DTYPES:
            raise ValueError(f"tensor {name} has dtype {given}; weights travel as {sorted(DTYPES)}")
        cast = dtype if given.is_floating_point and not kept else given
        offset, num_bytes = -(-end // ALIGNMENT) * ALIGNMENT, math.prod(shape) * cast.itemsize
        specs[name] = TensorSpec(
            name=name, dtype=dtype_name(cast), shape=shape, offset=offset, num_bytes=num_bytes, digest=""
        )
        end = offset + num_bytes
    if not specs:
        raise ValueError("no tensors to pack")
    return list(specs.values())


def num_bytes_of(tensors: Sequence[TensorSpec]) -> int:
    """Total bytes of planned tensors, gaps included."""
    return tensors[-1].offset + tensors[-1].num_bytes if tensors else 0


Watcher = Callable[[str, Tensor], None]
"""Is told the name of a tensor and the tensor, in the type in which it travels."""


def write_tensors(
    named_tensors: Iterable[tuple[str, Tensor]],
    specs: Sequence[TensorSpec],
    data: np.ndarray,
    *,
    watchers: Sequence[Watcher] = (),
) -> None:
    """Cast every tensor to its place in `data` [num_bytes_of(specs)] uint8, and fill in the digests.

    The tensors may be gathered one by one, in any order: other threads digest what is written meanwhile. `watchers` see
    a tensor of the host in its place in `data`, and one of an accelerator there, cast. Raises ValueError if a tensor
    differs from the plan, or is missing.
    """
    left = {spec.name: spec for spec in specs}
    digests = []
    with ThreadPoolExecutor(num_threads()) as pool:
        for name, tensor in named_tensors:
            spec = left.pop(name, None)
            if spec is None or tuple(tensor.shape) != spec.shape:
                raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} came, planned was {spec or 'no more'}")
            place = data[spec.offset : spec.offset + spec.num_bytes]
            written = _view(torch.from_numpy(place), spec)
            sent = tensor.detach()
            if sent.device.type != "cpu":
                sent = sent.to(written.dtype)  # there, so that no more bytes cross the bus than are wanted
            written.copy_(sent)
            for watch in watchers:
                watch(name, written if sent.device.type == "cpu" else sent)
            digests.append((spec, pool.submit(_digest, place)))
        if left:
            raise ValueError(f"{len(left)} planned tensors did not come, the first is {next(iter(left))}")
        for spec, digest in digests:
            spec.digest = digest.result()


def unpack(weights: PackedWeights) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Yield the tensors as views of the buffer, which must outlive the views. Never write to a view.

    This function does not verify the bytes: call `check_weights` before.
    """
    # Arrays that come through Ray are read-only; DLPack has a flag for that, which torch ignores without a warning.
    flat = from_dlpack(weights.data)
    for spec in weights.tensors:
        yield spec, _view(flat[spec.offset : spec.offset + spec.num_bytes], spec)


def split(weights: PackedWeights, *, max_bytes: int) -> Iterator[PackedWeights]:
    """Yield consecutive tensors as weights of at most `max_bytes` bytes; a larger tensor comes alone."""
    parts: list[list[TensorSpec]] = []
    for spec in weights.tensors:
        if not parts or spec.offset + spec.num_bytes - parts[-1][0].offset > max_bytes:
            parts.append([])
        parts[-1].append(spec)
    for part in parts:
        start, end = part[0].offset, num_bytes_of(part)
        tensors = [replace(spec, offset=spec.offset - start) for spec in part]
        yield PackedWeights(policy_version=weights.policy_version, tensors=tensors, data=weights.data[start:end])


def check_weights(weights: PackedWeights, *, held_version: int) -> None:
    """Check all weights of a sync before an engine replaces any.

    The version must not be older than `held_version`, and no tensor may occur twice. Place, size and digest of every
    tensor must match its TensorSpec. Raises WeightSyncError otherwise; the message names the tensor if a single tensor
    is wrong.
    """
    version = weights.policy_version
    where = f"weights of policy version {version}"
    if not weights.tensors:
        raise WeightSyncError(f"{where}: no tensors were sent; the engine stays at policy version {held_version}")
    if version < held_version:
        raise WeightSyncError(f"{where} were sent to an engine that already holds version {held_version}")
    names = Counter(spec.name for spec in weights.tensors)
    if repeated := sorted(name for name, count in names.items() if count > 1):
        raise WeightSyncError(f"{where}: tensors sent more than once: {', '.join(repeated)}")
    for spec in weights.tensors:
        if problem := _place_problem(spec, size=weights.data.nbytes):
            raise WeightSyncError(f"{where}: tensor {spec.name} {problem}")
    # The largest tensors come first: no thread is left with a large tensor when the others are done.
    tensors = sorted(weights.tensors, key=lambda spec: spec.num_bytes, reverse=True)
    with ThreadPoolExecutor(num_threads()) as pool:
        digests = pool.map(lambda spec: _digest(weights.data[spec.offset : spec.offset + spec.num_bytes]), tensors)
        for spec, digest in zip(tensors, digests, strict=True):
            if digest != spec.digest:
                raise WeightSyncError(
                    f"{where}: tensor {spec.name} was changed on the way: the trainer computed digest {spec.digest}, "
                    f"the bytes that arrived have {digest}"
                )


def content_mark(tensors: Iterable[TensorSpec]) -> str:
    """A digest of names, types, shapes and digests of tensors: equal for equal weights, wherever they lie."""
    content = repr([(each.name, each.dtype, each.shape, each.digest) for each in tensors])
    return xxhash.xxh3_64_hexdigest(content.encode())


def _place_problem(spec: TensorSpec, *, size: int) -> str:
    if spec.dtype not in DTYPES:
        return f"has unknown dtype {spec.dtype!r}; known: {sorted(DTYPES)}"
    expected = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
    if spec.num_bytes != expected:
        return f"of shape {spec.shape} and dtype {spec.dtype} needs {expected} bytes, its spec says {spec.num_bytes}"
    if spec.offset % ALIGNMENT or not 0 <= spec.offset <= size - spec.num_bytes:
        return (
            f"lies at bytes {spec.offset}..{spec.offset + spec.num_bytes}, outside the {size} bytes that were sent or "
            f"off the {ALIGNMENT}-byte grid"
        )
    return ""


def num_threads() -> int:
    """Number of threads that compute digests in this process: one per usable core, at most `MAX_THREADS`."""
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def _digest(data: np.ndarray) -> str:
    digest = xxhash.xxh3_64()
    # Unlike xxh3_64_hexdigest, `update` releases the GIL in all versions of xxhash.
    digest.update(data.data)
    return digest.hexdigest()


def _view(flat: Tensor, spec: TensorSpec) -> Tensor:
    if not spec.num_bytes:  # an empty buffer has stride 0 and cannot be viewed as a wider type
        return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
    return flat.view(DTYPES[spec.dtype]).view(spec.shape)
