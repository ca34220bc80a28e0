"""Runs inside the SGLang server: takes one bucket of weights out of shared memory into the model.

SGLang calls `load_bucket` for the requests of `rollout/sglang/weight_update.py`, because `rollout/sglang/engine.py`
names it as `custom_weight_loader`. The model's own `load_weights` does the fusing, as for a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rollout.sglang.shared_buffer import map_shared
from rollout.weights import DTYPES

LOADER = "rollout.sglang.loader.load_bucket"
"""What `load_format` of a request says, and what the server must have been started with."""


def load_bucket(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the bucket that the one tensor describes: [n] uint8, a JSON text with path, num_bytes and tensors.

    An error here ends the server, with the traceback in its log: a half-loaded model must not serve.
    """
    ((_, description),) = named_tensors
    request = json.loads(bytes(description.cpu().numpy()))
    flat = torch.frombuffer(map_shared(request["path"], num_bytes=request["num_bytes"]), dtype=torch.uint8)
    model.load_weights(_views(flat, request["tensors"]))


def _views(flat: torch.Tensor, tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in tensors:
        dtype = DTYPES[spec["dtype"]]
        num_bytes = math.prod(spec["shape"]) * dtype.itemsize
        raw = flat[spec["offset"] : spec["offset"] + num_bytes]
        yield spec["name"], raw.view(dtype).view(spec["shape"])
