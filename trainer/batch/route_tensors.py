"""Routes of sequences as tensors, for dumps and bundles, and back.

    route_lengths  [N] int32           tokens with a route in each sequence: its first ones
    routes         [Q, L, K] integers  experts of these tokens, sequence after sequence; Q = sum of route_lengths
    route_weights  [Q, L, K] float16   factors of the experts' outputs, if the engine returned them

L: layers with experts, K: experts of a layer for a token. Does not import transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollout.routes import Routes, joined

ROUTE_TENSORS = ("route_lengths", "routes", "route_weights")


def route_tensors(routes: Sequence[Routes]) -> dict[str, Tensor]:
    """Copies of the routes of N sequences by name; nothing if no token has a route."""
    whole = joined(routes).merged()
    if not len(whole):
        return {}
    weights = {"route_weights": torch.tensor(whole.weights[0])} if whole.weights else {}
    lengths = torch.tensor([len(each) for each in routes], dtype=torch.int32)
    return {"route_lengths": lengths, "routes": torch.tensor(whole.whole()), **weights}


def routes_of(tensors: Mapping[str, Tensor]) -> tuple[Routes, ...] | None:
    """The routes of N sequences, as `route_tensors` wrote them; None if there are none."""
    if "routes" not in tensors:
        return None
    parts = [tensors[name].split(tensors["route_lengths"].tolist()) for name in ROUTE_TENSORS[1:] if name in tensors]
    return tuple(
        Routes(*((part.numpy(),) for part in of_sequence)) if len(of_sequence[0]) else Routes(())
        for of_sequence in zip(*parts, strict=True)
    )
