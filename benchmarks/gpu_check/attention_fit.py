"""Fits the trainer's attention to torch 2.10 and 2.11, whose `varlen_attn` has fewer arguments than Parity's floor.

Parity asks for torch 2.12 or later. A bare GPU host may have an older one; the checks are worth running there too. So
grouped heads are passed on as they are if its kernel takes them (tried once), else repeated. A row of check 0 says so.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trainer.scoring import attention

NAME = "varlen_attn"


def missing_arguments() -> list[str]:
    """Arguments of `varlen_attn` that Parity gives and this torch does not know."""
    function = getattr(attention, NAME, None)
    if function is None:
        return []
    known = inspect.signature(function).parameters
    return [name for name in ("window_size", "enable_gqa") if name not in known]


@contextmanager
def fitting_attention() -> Iterator[None]:
    """While the block runs, the trainer's attention works with this torch."""
    missing = missing_arguments()
    if not missing:
        yield
        return
    real = getattr(attention, NAME)

    def fitted(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "enable_gqa" in missing and kwargs.pop("enable_gqa", False) and not takes_grouped_heads(real):
            times = q.shape[1] // k.shape[1]
            k, v = (states.repeat_interleave(times, dim=1) for states in (k, v))
        if "window_size" in missing:
            kwargs["is_causal"] = kwargs.pop("window_size", (-1, -1)) == (-1, 0)
        return real(q, k, v, *args, **kwargs)

    with patch.object(attention, NAME, fitted):
        yield


@functools.cache
def takes_grouped_heads(varlen: Any) -> bool:
    """True if the kernel gives the same for grouped heads as for repeated ones, forward and backward, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(64, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    results = []
    for keys, values in ((k, v), (k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))):
        try:
            out = varlen(q, keys, values, bounds, bounds, 64, 64)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
        except RuntimeError:
            return False
    return all(torch.allclose(one, other, atol=2e-2, rtol=2e-2) for one, other in zip(*results, strict=True))


def description() -> str:
    """How the trainer's attention is fitted to this torch."""
    missing = missing_arguments()
    return f"adapted: varlen_attn lacks {', '.join(missing)}" if missing else "as in a run"
