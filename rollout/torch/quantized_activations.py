"""Rounding of a projection's input in a quantised engine: 8 bits, with scales taken from the input.

SGLang's int8 and block fp8 layers scale every token anew ("dynamic"), so there is no calibration and no stale scale
between syncs. `rollout/torch/engine.py` rounds likewise, and so computes the same as those layers, to float rounding.
int4 is a format of weights only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollout.config import Quantization

GROUP = 128
"""Neighbouring features of a token that share one fp8 scale."""
SMALLEST = 1e-10
"""Largest magnitude of the input below which SGLang's kernels do not scale."""

Rounding = Callable[[Tensor], Tensor]
"""Function of states [..., features] -> the rounded states, same shape and dtype."""


def input_rounding(quantization: Quantization) -> Rounding | None:
    """The rounding of the inputs of projections; None if the format does not round inputs."""
    return {Quantization.int8: per_token_int8, Quantization.fp8: per_group_fp8}.get(quantization)


def per_token_int8(states: Tensor) -> Tensor:
    """Round to multiples of max|x| / 127 of the token."""
    scale = states.float().abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(127)
    return (states / scale).round_().mul_(scale).to(states.dtype)


def per_group_fp8(states: Tensor) -> Tensor:
    """Round to e4m3 numbers times max|x| / 448 of the group of 128 features; the last group may be shorter."""
    rounded = [_fp8(group) for group in states.float().split(GROUP, dim=-1)]
    return torch.cat(rounded, dim=-1).to(states.dtype)


def round_inputs(model: nn.Module, rounding: Rounding) -> None:
    """Round the inputs of the model's own projections, the modules named *_proj, from now on."""

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(before)


def _fp8(group: Tensor) -> Tensor:
    scale = group.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(448)
    # A step above 448 would round to NaN, because e4m3 has no infinity.
    return (group / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float().mul_(scale)
