"""The choice of experts in a mixture, seen or replaced where transformers makes it.

Every family takes the largest K of E scores with one `torch.topk`, and makes the weights of the experts from these
scores in its own way. So that call alone is watched: no formula of a family stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout.weights.experts import ROUTERS, Mixture

TOP_K = (torch.topk, torch.Tensor.topk)


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules of a mixture that choose experts, layer by layer. Each returns logits, the factors of the experts'
    outputs [N, K], and the experts [N, K]."""
    return [module for name, module in model.named_modules() if f".{name}".endswith(ROUTERS)]


class RouterTap(TorchFunctionMode):
    """Inside this context `heed` is called with the experts that each router chooses, [N, K] int64, layer by layer.

    It returns those that are used: the same, or others, whose scores are then taken instead.
    """

    def __init__(self, mixture: Mixture, heed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._mixture = mixture
        self._heed = heed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        # Of groups of experts, [N, G, E / G], a router takes the best with other calls first.
        if scores.dim() != 2 or (scores.shape[-1], found.indices.shape[-1]) != self._mixture[:2]:
            return found
        chosen = self._heed(found.indices)
        if chosen is found.indices:
            return found
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
