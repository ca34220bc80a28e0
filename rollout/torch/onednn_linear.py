"""x W^T + b on a CPU with the faster of torch's two libraries: for the linear layers of engines and of the policy.

In float32 torch always asks MKL. On processors of other makers than Intel, MKL does not use AVX-512; oneDNN, which
torch includes and uses in bfloat16, does, and takes half the time. oneDNN compiles code per shape: the few rows of a
decoding step are filled up, in both types. On other machines and in other types nothing changes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

MIN_ROWS = 2
"""Minimum of rows for oneDNN: for one row, MKL multiplies a vector, which is faster."""
FEW_ROWS = (4, 8)
ROWS_STEP = 16
"""oneDNN compiles code for every new number of rows, which takes longer than a product of a decoding step. The rows of
such a step are filled up to one of FEW_ROWS or to a multiple of ROWS_STEP: the remaining numbers of rows fit oneDNN's
cache."""
MAX_FILLED_ROWS = 256
"""Maximum of rows that are filled up; with more rows the product takes longer than the compilation."""
PACKED_ROWS = 32
"""Number of rows for which weights are packed; oneDNN packs the same way for other numbers."""


@cache
def prefers_onednn() -> bool:
    """True if this machine's CPU computes float32 products faster with oneDNN, by its type, never by a measurement."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return (
        "AuthenticAMD" in facts
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        # A private operator, made for torch.compile, which another release of torch may lack.
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@cache
def packs(dtype: torch.dtype) -> bool:
    """True if this machine's CPU multiplies `dtype` with oneDNN, and this torch can pack weights for oneDNN."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and prefers_onednn()


def filled_rows(count: int) -> int:
    """Number of rows to which `count` rows of a decoding step are filled up."""
    if count > MAX_FILLED_ROWS:
        return count
    return next((few for few in FEW_ROWS if count <= few), count + -count % ROWS_STEP)


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like torch.nn.functional.linear: states [.., I], weight [O, I], bias [O] -> [.., O]; differentiable once."""
    is_fast = states.dtype == weight.dtype == torch.float32 and prefers_onednn()
    needs_grad = states.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    is_trained = torch.is_grad_enabled() and needs_grad
    is_filled = weight.dtype == torch.bfloat16 and not is_trained
    if states.device.type != "cpu" or not (is_fast or is_filled):
        return functional.linear(states, weight, bias)
    rows = states.reshape(-1, states.shape[-1]).contiguous()
    if len(rows) < MIN_ROWS:
        return functional.linear(states, weight, bias)
    if is_trained:
        out: Tensor = _Linear.apply(rows, weight, bias)
    else:
        missing = filled_rows(len(rows)) - len(rows)
        filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        out = (_product if is_fast else functional.linear)(filled, weight, bias)[: len(rows)]
    return out.view(*states.shape[:-1], out.shape[-1])


class Projection:
    """rows [N, I] -> rows W^T + b [N, O] of a constant weight [O, I], without a gradient.

    On a CPU the weight is packed: stored a second time, in the order in which oneDNN reads it. A decoding step, whose
    few rows wait for weights more than they compute, takes two thirds of the time. `filled_rows` gives the best number
    of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, may_pack: bool) -> None:
        self._weight = weight
        self._bias = bias
        self._packed: Tensor | None = None
        if may_pack and weight.device.type == "cpu" and packs(weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is None:
            return linear(rows, self._weight, self._bias)
        return _product(rows, self._packed, self._bias)


class Linear(nn.Linear):
    """nn.Linear that multiplies with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fast_products(model: nn.Module) -> None:
    """Have every nn.Linear of `model` multiply with `linear`, in place; names and parameters stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [N, I] times the transpose of weight [O, I] -> [N, O]. Both are contiguous, or transposed from contiguous,
    or the weight is packed. For other strides, such as an expanded gradient's, oneDNN has only reference code:
    thousands of times as slow.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        by_rows = _product(grad, weight.T) if needs_rows else None
        by_weight = None
        if needs_weight and weight.shape[0] > weight.shape[1]:
            # oneDNN is up to 1.5 times as fast with the smaller side in front.
            by_weight = _product(rows.T, grad.T).T.contiguous()
        elif needs_weight:
            by_weight = _product(grad.T, rows.T)
        return by_rows, by_weight, grad.sum(0) if needs_bias else None
