"""What SGLang needs on a GPU beside its own code, read from the metadata of the installed packages.

Nothing is imported, neither torch nor SGLang, so that a run can be refused in a fraction of a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

CUDA_REMEDY = (
    'Use the image of the Dockerfile, or pip install -e ".[sglang]" in the checkout, in an environment of its own: '
    "make setup is for CPUs."
)
"""The way to an environment in which engines run on GPUs."""

KERNEL_MODULES = {"sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python"}
"""Module that SGLang imports on every NVIDIA GPU -> its package."""
SLEEP_MODULES = {"torch_memory_saver": "torch-memory-saver"}
"""Module that an engine imports if it gives its memory to the policy meanwhile -> its package."""

BUILDS_WITHOUT_CUDA = ("cpu", "rocm", "xpu")
"""How the label after the plus sign begins in the version of such a build of torch: 2.14.1+cpu, 2.14.1+rocm7.0."""
TORCH_PIN = re.compile(r"torch\s*==\s*(?P<version>[^\s;,]+)")
"""The requirement with which a release of SGLang names the one release of torch that its kernels were built for."""


def torch_without_cuda() -> str:
    """The reason for which the installed torch cannot use an NVIDIA GPU; "" if it can, or is not installed."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    label = version.partition("+")[2]
    return f"torch {version} is a build without CUDA" if label.startswith(BUILDS_WITHOUT_CUDA) else ""


def cuda_problem(*, sleeps: bool) -> str:
    """What keeps the installed SGLang from running on a GPU, every reason; "" if nothing does.

    `sleeps` is True for an engine that frees its memory between rollouts.
    """
    needed = KERNEL_MODULES | (SLEEP_MODULES if sleeps else {})
    missing = [f"{module} (package {needed[module]})" for module in needed if importlib.util.find_spec(module) is None]
    reasons = [f"SGLang finds no {' and no '.join(missing)}"] if missing else []
    reasons += [reason for reason in (torch_without_cuda(), _other_torch()) if reason]
    return "; ".join(reasons)


def _other_torch() -> str:
    """The reason why SGLang's kernels do not fit the installed torch: another release than the one it pins."""
    try:
        installed = importlib.metadata.version("torch")
        required = importlib.metadata.requires("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        return ""  # another check names a package that is not there
    pins = [pin["version"] for pin in map(TORCH_PIN.match, required) if pin]
    if not pins or installed.partition("+")[0] in pins:
        return ""
    sglang = importlib.metadata.version("sglang")
    return f"SGLang {sglang} is built for torch {pins[0]}, and {installed} is installed"
