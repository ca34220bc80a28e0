"""What a quantised engine does to the input of a projection: rounds it to 8 bits with scales taken from the input.

SGLang's int8 and block fp8 layers scale every token anew ("dynamic"), so nothing is calibrated and nothing grows stale
between syncs. `rollout/torch/engine.py` rounds alike, and so computes what those layers compute, to float rounding.
int4 is a format of weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollout.config import Quantization

GROUP = 128
"""Neighbouring features of a token that share a scale in fp8."""
SMALLEST = 1e-10
"""Largest magnitude below which SGLang's kernels do not scale."""

Rounding = Callable[[Tensor], Tensor]
"""[..., features] -> the same shape and dtype, on the grid."""


def input_rounding(quantization: Quantization) -> Rounding | None:
    """How the inputs of projections are rounded; None where they are not."""
    return {Quantization.int8: per_token_int8, Quantization.fp8: per_group_fp8}.get(quantization)


def per_token_int8(states: Tensor) -> Tensor:
    """Multiples of max|x| / 127 of the token."""
    scale = states.float().abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(127)
    return (states / scale).round_().mul_(scale).to(states.dtype)


def per_group_fp8(states: Tensor) -> Tensor:
    """e4m3 numbers times max|x| / 448 of the group of 128 features; the last group may be shorter."""
    rounded = [_fp8(group) for group in states.float().split(GROUP, dim=-1)]
    return torch.cat(rounded, dim=-1).to(states.dtype)


def round_inputs(model: nn.Module, rounding: Rounding) -> None:
    """Round the inputs of the model's own projections from now on; those are the modules named *_proj."""

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(before)


def _fp8(group: Tensor) -> Tensor:
    scale = group.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(448)
    # One rounding step above 448 would be NaN: e4m3 knows no infinity.
    return (group / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float().mul_(scale)
