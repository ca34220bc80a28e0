"""RMSNorm whose backward pass is one kernel of torch instead of a dozen passes over float32 tensors, on a CPU.

    y = w n,  n = x r,  r = 1 / sqrt(mean(x^2) + eps)             dx = r (w dy - n mean(w dy n)),  dw = sum(dy n)

torch has this kernel for LayerNorm, which also subtracts the mean: with 0 for the mean of x it computes dx - r mean(w
dy). Values stay those of transformers, to the bit; dx is rounded once more than there in 16 bits.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TRIED_ROWS = 8
"""Random rows on which a norm is compared with that of this file."""


def use_fused_norms(model: nn.Module) -> None:
    """Give every RMSNorm of `model` this backward pass, in place; names, parameters and values stay.

    A norm that computes anything else, as by 1 + w, is left alone: it is tried, whatever its name. Weights may be meta.
    """
    for module in model.modules():
        if is_plain_norm(module):
            kind: Any = type(module)
            module.__class__ = _fused(kind)


def is_plain_norm(module: nn.Module) -> bool:
    """True if `module` computes y, in float32 with n rounded to the type of x, as most models of transformers do."""
    parameters, epsilon = dict(module.named_parameters()), getattr(module, "variance_epsilon", None)
    if list(parameters) != ["weight"] or parameters["weight"].ndim != 1 or epsilon is None:
        return False
    if len(inspect.signature(module.forward).parameters) != 1:  # with a gate
        return False
    drawn = torch.randn(TRIED_ROWS + 1, len(parameters["weight"]), generator=torch.Generator().manual_seed(0))
    weight, states = drawn[0].bfloat16(), drawn[1:].bfloat16()
    with torch.no_grad():
        found = torch.func.functional_call(module, {"weight": weight}, (states,))
        return torch.equal(found, _RMSNorm.apply(states, weight, epsilon))


@cache
def _fused(kind: type[nn.Module]) -> type[nn.Module]:
    """The class `kind` with this backward pass. One class for all norms of a kind: torch.compile then has one graph."""

    def forward(self: Any, states: Tensor) -> Tensor:
        if states.device.type != "cpu" or states.dtype != self.weight.dtype or torch.compiler.is_compiling():
            usual: Tensor = kind.forward(self, states)
            return usual
        found: Tensor = _RMSNorm.apply(states, self.weight, self.variance_epsilon)
        return found

    return type(kind.__name__, (kind,), {"forward": forward})


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = states.to(torch.float32)
        rate = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        normed = (wide * rate).to(states.dtype)
        ctx.save_for_backward(states, normed if ctx.needs_input_grad[1] else None, weight, rate)
        return weight * normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, normed, weight, rate = ctx.saved_tensors
        of_states, of_weight, _ = ctx.needs_input_grad
        by_states = None
        if of_states:
            size = states.shape[-1:]
            mask = [True, False, False]
            by_states, _, _ = torch.ops.aten.native_layer_norm_backward(
                grad.contiguous(), states, size, torch.zeros_like(rate), rate, weight.float(), None, mask
            )
            by_states += rate * (grad @ (weight / size[0])).unsqueeze(-1)
        return by_states, (grad * normed).flatten(0, -2).sum(0) if of_weight else None, None
