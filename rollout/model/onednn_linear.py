"""x W^T + b in float32 on a CPU with the faster of torch's two libraries: for linear layers of engines and policy.

In float32 torch always asks MKL. On processors of other makers than Intel, MKL does not use AVX-512; oneDNN, which
torch includes and uses in bfloat16, does. On other machines and in other types nothing changes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


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


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like torch.nn.functional.linear: states [.., I], weight [O, I], bias [O] -> [.., O]; differentiable once."""
    if torch.compiler.is_compiling():  # torch.compile chooses the library itself
        return functional.linear(states, weight, bias)
    # MKL is faster for a single row.
    is_fast = states.dtype == weight.dtype == torch.float32 and states.numel() > states.shape[-1]
    if states.device.type != "cpu" or not is_fast or not prefers_onednn():
        return functional.linear(states, weight, bias)
    out: Tensor = _Linear.apply(states.reshape(-1, states.shape[-1]).contiguous(), weight, bias)
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
    """rows [N, I] times the transpose of weight [O, I] -> [N, O]. Both are contiguous, or transposed from contiguous.

    For other strides, such as an expanded gradient's, oneDNN has only reference code: thousands of times as slow.
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
        by_weight = _product(grad.T, rows.T) if needs_weight else None
        return by_rows, by_weight, grad.sum(0) if needs_bias else None
