"""Lets a real SGLang server run on any x86 CPU: the entry point of an out-of-tree SGLang platform.

SGLang finds `activate` through the entry-point group `sglang.srt.platforms` and uses the platform only when the
environment says `SGLANG_PLATFORM=parity_cpu`, which `rollout/sglang/server.py` sets for a CPU server. The platform
itself is in `rollout/sglang/cpu/srt_platform.py`; this file imports neither SGLang nor torch at the top, because every
process that imports SGLang on a machine with Parity installed loads it.
"""

from __future__ import annotations

import os

from rollout.sglang.cpu.torchvision import make_torchvision_importable

PLATFORM_NAME = "parity_cpu"
"""Name of the entry point; also the value of SGLANG_PLATFORM that selects the platform."""

ATTENTION_BACKEND = "parity_batched"
"""Value of SGLang's `attention_backend` for `rollout/sglang/cpu/attention.py`, the default on a CPU."""

EXACT_ATTENTION_BACKEND = "parity_exact"
"""The same for `rollout/sglang/cpu/exact.py`, with rollout.exact=true."""

EXACT_VARIABLE = "PARITY_EXACT"
"""Environment variable with the value 1 in the processes of a server on a GPU with rollout.exact=true."""

PLATFORM_CLASS = "rollout.sglang.cpu.srt_platform.ParityCpuPlatform"


def activate() -> str | None:
    """Qualified name of the platform class, or None where the platform must not be used.

    None unless SGLANG_PLATFORM names this platform (other SGLang servers of the user stay unchanged), and None if torch
    sees a CUDA device. The function also makes the import of torchvision possible, which SGLang does next.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    import torch

    if torch.cuda.is_available():
        return None
    make_torchvision_importable()
    return PLATFORM_CLASS
