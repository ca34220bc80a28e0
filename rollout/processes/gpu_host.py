"""What ranks and engines need of a GPU host beside their own packages: torch with CUDA, and a C compiler for Triton.

`trainer/start/checks.py` and every rank ask `rank_lacks`; `rollout/sglang/cuda_host.py` asks the same for its server.
Packages are found by their metadata; torch is not imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rollout.processes.inherited import variables

CUDA_REMEDY = "Run make setup in the checkout on this host, or use the image of the Dockerfile."
COMPILER_REMEDY = "apt-get install build-essential, or dnf install gcc-c++ (g++ 11 or later)."
BUILDS_WITHOUT_CUDA = ("cpu", "rocm", "xpu")
"""How the label after the plus sign begins in the version of such a build of torch: 2.14.1+cpu, 2.14.1+rocm7.0."""
COMPILER_TIMEOUT_S = 120.0
"""Seconds for a compiler to take a few lines; on a busy disk nvcc needs many for its first."""
ERROR = re.compile(r"(\bfatal\b|\berror\b|cannot find).*")
"""The part of a line of a compiler or linker that says what is wrong."""
C_TRIAL = "#include <stdlib.h>\n"


class Lack(NamedTuple):
    """One thing that a rank or an engine on a GPU needs and this host lacks, and the command that brings it."""

    what: str
    remedy: str


def listed(lacks: Iterable[Lack]) -> str:
    """The lacks as one text."""
    return " ".join(f"{lack.what}. {lack.remedy}" for lack in lacks)


def torch_lacks() -> list[Lack]:
    """The build of the installed torch, if it cannot use an NVIDIA GPU."""
    version = installed_version("torch")
    without_cuda = version.partition("+")[2].startswith(BUILDS_WITHOUT_CUDA)
    return [Lack(f"torch {version} is a build without CUDA", CUDA_REMEDY)] if without_cuda else []


def rank_lacks() -> list[Lack]:
    """What a rank on a GPU lacks: torch with CUDA, and a C compiler for Triton, if that is installed."""
    return [*torch_lacks(), *(triton_lacks() if importlib.util.find_spec("triton") else ())]


def triton_lacks() -> list[Lack]:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"
    lacks = compiler_lacks(compiler, "-xc", program=C_TRIAL)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}"
        remedy = f"apt-get install {package}-dev, or dnf install {package}-devel."
        lacks.append(Lack(f"there is no {header}, which Triton's kernels include", remedy))
    return lacks


def compiler_lacks(compiler: str, *flags: str, program: str) -> list[Lack]:
    error = compiler_error([compiler, *flags], program)
    return [Lack(f"{compiler} {' '.join(flags)} does not compile and link: {error}", COMPILER_REMEDY)] if error else []


def compiler_error(command: Sequence[str], program: str, libraries: Sequence[str] = ()) -> str:
    """Error with which a compiler refuses to make a library of `program`, such as Python loads; "" if there is none."""
    with tempfile.TemporaryDirectory() as directory:
        whole = [*command, "-fPIC", "-shared", "-o", f"{directory}/trial.so", "-", *libraries]
        language, timeout = {**variables(), "LC_ALL": "C"}, COMPILER_TIMEOUT_S
        try:
            done = subprocess.run(  # noqa: S603 (a compiler of this host)
                whole, input=program, env=language, cwd=directory, capture_output=True, text=True, timeout=timeout
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    found = ERROR.search(done.stderr + done.stdout)
    return "" if done.returncode == 0 else found[0].strip() if found else f"exit code {done.returncode}"


def installed_version(name: str) -> str:
    """The installed version; "" without the package, which another check names."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
