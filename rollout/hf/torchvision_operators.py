"""Lets a CUDA build of torchvision be imported under a CPU build of torch.

Imports no torch at the top: every process that imports SGLang on a machine with Parity loads this file.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_MISSING_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators whose shape functions torchvision registers in Python although only its compiled part declares them."""


def declare_torchvision_operators() -> bool:
    """Make a CUDA build of torchvision importable under a CPU build of torch; returns True if operators were declared.

    SGLang imports torchvision at start. The compiled part of a CUDA wheel cannot be loaded without CUDA, and the Python
    part then stops at undeclared operators. Declaring their schemas is enough: a text model never calls them. Does
    nothing with a CUDA build of torch, with a CPU build of torchvision, or without torchvision.
    """
    import torch

    if torch.version.cuda is not None or not _torchvision_is_cuda_build():
        return False
    declared = False
    for name, schema in _MISSING_OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema)
            declared = True
    return declared


def _torchvision_is_cuda_build() -> bool:
    """True if the installed torchvision is a CUDA build, read from its version file without importing it."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return False
    return re.search(r"^__version__ = '[^']*\+cu[0-9]+'", version_file.read_text("utf-8"), re.MULTILINE) is not None
