"""Routing replay: the layers of a mixture use the experts that the engine chose for each token.

A router's scores stay the trainer's own, and so do the factors of the experts' outputs that are made from them, with
their gradients; only the choice is the engine's (Rollout Routing Replay, R3: https://arxiv.org/abs/2510.11370). With
`policy.routing=weights` the factors have the engine's numbers, too, and the gradient of the trainer's. A token
without a known route gets the trainer's choice. The routes are an argument of every layer: a layer that is computed
again in the backward pass, after forwards of other tokens, gets its own.

I: tokens that the decoder computes, L: layers with experts, K: experts of a layer for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.model.router_tap import RouterTap, routers
from rollout.routes import Routes, joined
from rollout.weights.experts import Mixture
from trainer.batch.train_batch import MicroBatch


class Replay:
    """The routes of one forward, and what they change.

    No dataclass, because FSDP gives the layers a copy of one, to cast what is in it.
    """

    def __init__(self, experts: Tensor, known: Tensor, weights: Tensor | None) -> None:
        """`experts` [I, L, K] are numbers of experts; `known` [I] bool is False for a token without a known route;
        `weights` [I, L, K] are the factors of the experts' outputs, None for those of the trainer."""
        self._experts, self._known, self._weights = experts, known, weights
        self._changed: list[Tensor] | None = []
        """[I] bool of each layer: True where the trainer's own choice is another set. None once the forward is over, so
        that a layer that is computed again counts nothing."""

    def used(self, layer: int, own: Tensor) -> Tensor:
        """The experts [I, K] that a layer uses, where the trainer's own choice is `own`."""
        experts = torch.where(self._known[:, None], self._experts[:, layer].to(own.dtype), own)
        if self._changed is not None:
            self._changed.append((experts.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1))
        return experts

    def weighed(self, layer: int, own: Tensor) -> Tensor:
        """The factors [I, K] of the experts of a layer: the engine's numbers, the gradient of the trainer's `own`."""
        if self._weights is None:
            return own
        given = self._weights[:, layer].to(own.dtype)
        return torch.where(self._known[:, None], own + (given - own).detach(), own)

    def counts(self) -> Tensor:
        """[4] float64: routes that the replay changes, of how many; tokens with such a route, of how many.

        The forward is over: what is computed again later counts nothing.
        """
        changed = torch.stack(self._changed or [torch.zeros_like(self._known)])  # [L, I]
        self._changed = None
        num_tokens = self._known.sum()
        sums = [changed.sum(), num_tokens * len(changed), changed.any(dim=0).sum(), num_tokens]
        return torch.stack(sums).double()


def replay_of(micro: MicroBatch, device: torch.device) -> Replay | None:
    """The routes of the decoder's inputs for `micro`; None if it has none."""
    if micro.routes is None:
        return None
    starts = micro.cu_seqlens.tolist()
    number_of = torch.full((starts[-1],), -1)
    known = 0
    for start, routes in zip(starts, micro.routes, strict=False):
        number_of[start : start + len(routes)] = torch.arange(known, known + len(routes))
        known += len(routes)
    return replay(micro.routes, number_of[micro.inputs.source.cpu()], device)


def replay(routes: Sequence[Routes], number: Tensor, device: torch.device) -> Replay | None:
    """`routes` for the tokens of one forward; None if there are none.

    `number` [I] counts the route of each token from the first one of `routes` on; it is -1 where no route is known.
    """
    whole = joined(routes)
    if not whole.parts:
        return None
    numbers = np.concatenate(whole.parts)
    experts = torch.from_numpy(numbers if numbers.dtype == np.uint8 else numbers.astype(np.int32))
    weights = torch.from_numpy(np.concatenate(whole.weights))[number].to(device) if whole.weights else None
    return Replay(experts[number].to(device), (number >= 0).to(device), weights)


def make_replayable(layers: Sequence[nn.Module], mixture: Mixture) -> None:
    """Have all layers of a decoder, in their order, take routes, in place; without routes they compute as before.

    Layers without experts have none.
    """
    number = 0
    for layer in layers:
        layer.forward = _Replayed(layer, number, mixture)
        number += bool(routers(layer))


class _Replayed:
    """The forward of a layer, which takes routes; `layer` is its number among those with experts."""

    def __init__(self, module: nn.Module, layer: int, mixture: Mixture) -> None:
        self._forward, self._layer, self._mixture = module.forward, layer, mixture
        self._running: Replay | None = None
        """That of the call that runs; in the backward pass a layer is called again with its own."""
        for router in routers(module):
            router.register_forward_hook(self._weigh)

    def __call__(self, *args: Any, replay: Replay | None = None, **kwargs: Any) -> Any:
        if replay is None:
            return self._forward(*args, **kwargs)
        self._running = replay
        try:
            with RouterTap(self._mixture, lambda own: replay.used(self._layer, own)):
                return self._forward(*args, **kwargs)
        finally:
            self._running = None

    def _weigh(self, _router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._running is None:
            return output
        logits, own, experts = output
        return logits, self._running.weighed(self._layer, own), experts
