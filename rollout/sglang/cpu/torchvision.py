"""Makes torchvision importable for SGLang; no other process of Parity imports torchvision.

requirements/install.sh puts torchvision into a directory of its own. In the common directory transformers would import
it with every model class, in every process of the user too, and its wheel is a CUDA build, which a CPU build of torch
cannot load. This module imports no torch at the top, because every process that imports SGLang on a machine with Parity
loads it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

DIRECTORY = Path(sys.prefix, "share", "parity")
"""Directory of torchvision in an environment that requirements/install.sh made."""
_MISSING_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators whose shape functions torchvision registers in Python although only its compiled part declares them."""


def make_torchvision_importable() -> bool:
    """Make torchvision importable in this process; returns True if operators were declared.

    SGLang imports torchvision at start. A CPU build of torch cannot load the compiled part of a CUDA wheel, and the
    Python part then stops at undeclared operators. Declaring their schemas is enough: a text model never calls them. A
    CUDA build of torch, which PyPI has for Linux, loads the wheel on a machine without a GPU too.
    """
    import torch

    if importlib.util.find_spec("torchvision") is None and DIRECTORY.is_dir():
        sys.path.append(str(DIRECTORY))
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
