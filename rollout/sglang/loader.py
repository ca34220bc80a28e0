"""Weight loader inside the SGLang server: copies weights from shared memory into the model.

SGLang calls `load_shared` for the requests of `rollout/sglang/weight_update.py`, because `rollout/sglang/engine.py`
sets `custom_weight_loader` to its name. With tensor parallelism every rank calls `load_shared` and maps the same
memory. The model's own `load_weights` does the fusing and takes the rank's share, as for a checkpoint.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rollout.sglang.adapter_server import load_adapter
from rollout.sglang.fusing import COLUMN_SPLIT
from rollout.sglang.quantized import open_layers
from rollout.types import RegionAddress
from rollout.weights.experts import MIXTRAL, is_experts, names_in_files
from rollout.weights.packed_weights import DTYPES
from rollout.weights.registered import uses_cuda
from rollout.weights.shared_weights import MappedRegion

LOADER = "rollout.sglang.loader.load_shared"
"""Value of a request's `load_format`, and of the server's `custom_weight_loader`."""


def load_shared(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load tensors of one region; `named_tensors` holds a single tensor [n] uint8, a JSON text with region, version,
    tensors, a flag for values and scales of quantised weights, and peft's description if they are an adapter.

    The engine that sent the request holds the region's lock. An error in this function ends the server, with the
    traceback in its log: a half-loaded model must not serve.
    """
    ((_, description),) = named_tensors
    request = json.loads(bytes(description.cpu().numpy()))
    region = _mapped(RegionAddress(**request["region"]), registered=uses_cuda())
    region.expect(request["policy_version"])
    if request["quantized"]:
        open_layers(model)
    # A rank of a tensor parallel engine takes some columns of a matrix. From the host, torch would gather them in
    # pageable memory first, so the whole matrix goes to the GPU. Not yet run on a GPU.
    columns_on = torch.device("cuda") if uses_cuda() and not request["adapter"] else None
    tensors = _views(torch.from_numpy(region.data), request["tensors"], columns_on=columns_on)
    if request["adapter"]:
        load_adapter(model, dict(tensors), request["adapter"])
    else:
        model.load_weights(_expert_by_expert(model, tensors))


def _expert_by_expert(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with a view for every matrix of an expert: SGLang knows these names, and skips others silently."""
    in_block = any(MIXTRAL in name for name, _ in model.named_parameters())
    for name, tensor in tensors:
        if not is_experts(name):
            yield name.replace(".mlp.", MIXTRAL) if in_block else name, tensor
            continue
        block = MIXTRAL.strip(".") if in_block else "mlp"
        for expert, parts in zip(tensor, names_in_files(name, len(tensor), block=block), strict=True):
            yield from zip(parts, expert.chunk(len(parts)), strict=True)


@functools.lru_cache(maxsize=2)
def _mapped(address: RegionAddress, *, registered: bool) -> MappedRegion:
    """The mapped region at `address`, cached: mapping costs more than reading, and trainer and engine reuse regions."""
    return MappedRegion(address, registered=registered)


def _views(
    flat: torch.Tensor, tensors: list[dict[str, Any]], *, columns_on: torch.device | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the bytes `flat`: a view, or a copy on `columns_on` where ranks take columns."""
    for spec in tensors:
        dtype = DTYPES[spec["dtype"]]
        num_bytes = math.prod(spec["shape"]) * dtype.itemsize
        raw = flat[spec["offset"] : spec["offset"] + num_bytes].view(dtype).view(spec["shape"])
        is_split = any(part in COLUMN_SPLIT for part in spec["name"].split("."))
        yield spec["name"], raw.to(columns_on) if columns_on and is_split else raw
