"""x W^T + b on a CPU with the faster of torch's two libraries: for the linear layers of engines and of the policy.

In float32 torch always asks MKL. On a processor that is not Intel's, MKL does not use AVX-512; oneDNN, which torch
brings along and asks in bfloat16, does, and takes half the time. oneDNN compiles per shape: the few rows of a decoding
step are filled up, in both types. Elsewhere and in other types nothing changes.
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
"""Of one row, MKL multiplies a vector, which is faster."""
ROWS_STEP = 16
"""oneDNN compiles code for every new number of rows, which takes longer than a product of a decoding step. The rows of
such a step are filled up to a multiple of this, so that the few numbers that are left fit its cache."""
MAX_FILLED_ROWS = 256
"""With more rows the product takes longer than the compilation."""


@cache
def prefers_onednn() -> bool:
    """Whether float32 products of this machine's CPU are faster with oneDNN: by what it is, never by the clock."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return (
        "AuthenticAMD" in facts
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        # An operator without public name, made for torch.compile: another torch may lack it.
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch.nn.functional.linear: states [.., I], weight [O, I], bias [O] -> [.., O]; differentiable once."""
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
        missing = -len(rows) % ROWS_STEP if len(rows) <= MAX_FILLED_ROWS else 0
        filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        out = (_product if is_fast else functional.linear)(filled, weight, bias)[: len(rows)]
    return out.view(*states.shape[:-1], out.shape[-1])


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
    """rows [N, I] times the transpose of weight [O, I] -> [N, O]; both contiguous, or transposed from that. For other
    strides, those of an expanded gradient among them, oneDNN has only reference code: thousands of times as slow."""
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
