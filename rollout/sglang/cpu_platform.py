"""Lets a real SGLang server run on any x86 CPU: the entry point of an out-of-tree SGLang platform.

SGLang finds `activate` through the entry-point group `sglang.srt.platforms` and uses the platform only when the
environment says `SGLANG_PLATFORM=parity_cpu`, which `rollout/sglang/server.py` sets for a CPU server. The platform
itself is in `rollout/sglang/cpu_srt.py`; this file imports neither SGLang nor torch at the top, because every process
that imports SGLang on a machine with Parity installed loads it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

PLATFORM_NAME = "parity_cpu"
"""Name of the entry point, and the value of SGLANG_PLATFORM that selects it."""

ATTENTION_BACKEND = "parity_batched"
"""Value of SGLang's `attention_backend` for `rollout/sglang/cpu_attention.py`, the default on a CPU."""

PLATFORM_CLASS = "rollout.sglang.cpu_srt.ParityCpuPlatform"

_MISSING_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators whose shape functions torchvision registers in Python although only its compiled part declares them."""


def activate() -> str | None:
    """Qualified name of the platform class, or None where it must not be used.

    None unless SGLANG_PLATFORM names this platform (a user's own SGLang is left alone), and None where torch sees a
    CUDA device. Before SGLang goes on to import torchvision, this makes that import possible.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    import torch

    if torch.cuda.is_available():
        return None
    declare_torchvision_operators()
    return PLATFORM_CLASS


def declare_torchvision_operators() -> bool:
    """Make a CUDA build of torchvision importable under a CPU build of torch; True if something was declared.

    SGLang imports torchvision at start. The compiled part of a CUDA wheel cannot be loaded without CUDA, and the
    Python part then stops at operators that nobody declared. Declaring their schemas is enough: a text model never
    calls them. Does nothing with a CUDA build of torch, with a CPU build of torchvision, or without torchvision.
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
    """Whether the installed torchvision is a CUDA build, read from its version file without importing it."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return False
    return re.search(r"^__version__ = '[^']*\+cu[0-9]+'", version_file.read_text("utf-8"), re.MULTILINE) is not None
