"""SiLU and the logistic function with the same bits at every place of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def silu(states: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of the type of `states`; differentiable once.

    In float32 torch's own function has other bits for the last numbers of a tensor than for the first ones.
    """
    out: Tensor = _SiLU.apply(states)
    return out


def sigmoid(states: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of the type of `states`, for the same reason; below -80, where it is 0, exp(-x) has no end."""
    return torch.reciprocal(states.float().clamp(min=-80).neg().exp() + 1).to(states.dtype)


class SiLU(nn.Module):
    """The activation of an MLP."""

    def forward(self, states: Tensor) -> Tensor:
        return silu(states)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        ctx.save_for_backward(states)
        wide = states.float()
        return torch.div(wide, wide.neg().exp_().add_(1)).to(states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (states,) = ctx.saved_tensors
        out: Tensor = torch.ops.aten.silu_backward(grad, states)
        return out
