"""Rounded inputs of projections, where the engine is quantised.

SGLang's int8 and block fp8 layers scale every token anew ("dynamic"), so there is no calibration and no stale scale
between syncs. Rounding likewise computes the same as those layers, to float rounding. int4 is a format of weights only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollout.config import Quantization
from rollout.weights.adapter import BASE_LAYER

FP8_GROUP = 128
"""Neighbouring features of a token that share one fp8 scale."""
SMALLEST = 1e-10
"""Largest magnitude of the input below which SGLang's kernels do not scale."""


def per_token_int8(states: Tensor) -> Tensor:
    """Round to multiples of max|x| / 127 of the token."""
    scale = states.float().abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(127)
    return (states / scale).round_().mul_(scale).to(states.dtype)


def per_group_fp8(states: Tensor) -> Tensor:
    """Round to e4m3 numbers times max|x| / 448 of the group of 128 features; the last group may be shorter."""
    rounded = [_fp8(group) for group in states.float().split(FP8_GROUP, dim=-1)]
    return torch.cat(rounded, dim=-1).to(states.dtype)


INPUT_ROUNDINGS = {Quantization.int8: per_token_int8, Quantization.fp8: per_group_fp8}
"""Format that rounds activations too -> how."""


def round_inputs(model: nn.Module, quantization: Quantization) -> None:
    """Round the inputs of the model's projections, the modules named *_proj, from now on, if the format rounds them.

    An adapter beside a projection gets the inputs as they are, as in SGLang.
    """
    rounding = INPUT_ROUNDINGS.get(quantization)
    if rounding is None:
        return

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    for name, module in model.named_modules():
        if name.removesuffix(BASE_LAYER).endswith("_proj") and not hasattr(module, "base_layer"):
            module.register_forward_pre_hook(before)


def _fp8(group: Tensor) -> Tensor:
    scale = group.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST).div_(448)
    # A step above 448 would round to NaN, because e4m3 has no infinity.
    return (group / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float().mul_(scale)
