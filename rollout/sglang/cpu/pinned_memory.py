"""Pinned memory where there is no accelerator: SGLang's LoRA asks for it, and torch on a CPU refuses to allocate it.

Pinning keeps the pages of host memory in place for copies to a device. Without a device there is nothing to copy to,
and ordinary memory serves the same. Called in the processes of an SGLang server only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
"""Functions of torch that take pin_memory=True."""


def ignore_pinned_memory() -> None:
    """Have torch allocate ordinary memory where this process asks for pinned memory; nothing with an accelerator."""
    if torch.accelerator.is_available():
        return
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _same  # type: ignore[method-assign, assignment]


def _unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return factory(*arguments, **options)

    return make


def _same(tensor: torch.Tensor, *_arguments: Any) -> torch.Tensor:
    return tensor
