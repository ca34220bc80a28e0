"""A mixture of experts in exact arithmetic: a token gets the same experts, and the same bits, in any company.

The rows that chose an expert go through it tile by tile. What the experts of a token say is added up in the order of
their numbers, in float32.

N: tokens, E: experts, K: experts of a token, H: width of the model, I: width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollout.exact.activations import silu
from rollout.exact.products import linear

FAMILIES = ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe")
"""How transformers' names of the modules begin whose arithmetic is known."""


def mixed(states: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[N, H]: the weighted sum of the experts of each token; differentiable once.

    Args:
        states: [N, H].
        chosen: [N, K] int64, the experts of each token, in any order.
        weights: [N, K] float; rounded to the type of `states`.
        gate_up: [E, 2I, H], the rows of the gate first.
        down: [E, H, I].
    """
    experts, order = chosen.sort(dim=-1)
    shares = weights.gather(-1, order).to(states.dtype).float()
    by_expert = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
    # Embeddings, because their backward adds up what comes back to a token in the same order in every run.
    rows = functional.embedding(by_expert // chosen.shape[1], states).split(counts)
    found = []
    for number, (own, wide, narrow) in enumerate(zip(rows, gate_up.unbind(), down.unbind(), strict=True)):
        if len(own) or number == 0:  # the first always: without any token the weights stay in the graph
            gate, up = linear(own, wide).chunk(2, dim=-1)
            found.append(linear(silu(gate.contiguous()) * up, narrow))
    parts = functional.embedding(by_expert.argsort(), torch.cat(found)).view(*chosen.shape, states.shape[-1]).float()
    total, *others = (parts * shares[:, :, None]).unbind(1)
    for part in others:
        total = total + part
    return total.to(states.dtype)


class Experts(nn.Module):
    """The experts of a layer, in the place of those of transformers, whose parameters it has."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return mixed(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


class Replaced(TorchFunctionMode):
    """Inside this context other functions are called in the place of some of torch's."""

    def __init__(self, others: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._others.get(func, func)(*args, **(kwargs or {}))


def replaced(
    forward: Callable[..., Any], others: Mapping[Callable[..., Any], Callable[..., Any]]
) -> Callable[..., Any]:
    """The `forward` of a module, with other functions in the place of some of torch's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with Replaced(others):
            return forward(*args, **kwargs)

    return run


def is_part(module: nn.Module, what: str) -> bool:
    """True for a part of a mixture whose arithmetic is known; `what` is Experts or TopKRouter."""
    return type(module).__name__ in [family + what for family in FAMILIES]
