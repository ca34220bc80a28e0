"""What SGLang needs of a GPU host and its packages, and the environment in which a server finds it.

`parity doctor`, the start of a run and engines ask `engine_lacks`. Packages are found by their metadata; neither torch
nor SGLang is imported. SGLang, FlashInfer and Triton compile kernels at run time: compilers and
toolkit are tried, as they use them (SGLang 0.5.23: kernels/jit/utils/compile; FlashInfer 0.7.2: jit/cpp_ext.py;
Triton 3.8: runtime/build.py). Not yet run on a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
import tempfile
from pathlib import Path

from rollout.processes.gpu_host import (
    CUDA_REMEDY,
    Lack,
    compiler_error,
    compiler_lacks,
    installed_version,
    torch_lacks,
    triton_lacks,
)

LIBC_REMEDY = "Use Ubuntu 22.04, Debian 12, RHEL 9 or later, or the image of the Dockerfile."
TOOLKIT_REMEDY = 'pip install "cuda-toolkit[nvcc,cccl,cudart,curand]==13.0.*", or set CUDA_HOME to a whole toolkit.'

KERNEL_MODULES = {"sgl_kernel": "sglang-kernel", "flashinfer": "flashinfer-python"}
"""Module that SGLang imports on every NVIDIA GPU -> its package."""
SLEEP_MODULES = {"torch_memory_saver": "torch-memory-saver"}
"""Module that an engine imports if it gives its memory to the policy meanwhile -> its package."""
TORCH_PIN = re.compile(r"torch\s*==\s*(?P<version>[^\s;,]+)")
"""The requirement with which a release of SGLang names the one release of torch that its kernels were built for."""
GLIBC_FLOOR = (2, 34)
"""The oldest C library for which there are wheels of SGLang's kernels: manylinux_2_34."""
CUDART = "libcudart.so.13"
"""The CUDA runtime for which they are built."""
USUAL_PLACE = Path("/usr/local/cuda")

CXX_TRIAL = "#include <source_location>\nint line() { return std::source_location::current().line(); }\n"
CUDA_TRIAL = f"""{CXX_TRIAL}
#include <cuda_runtime.h>
#include <cuda/std/cstdint>
#include <curand.h>
#if CUDART_VERSION / 10 != __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__
#error nvcc and the headers of CUDA are of different releases, which FlashInfer refuses
#endif
__global__ void set(int *value) {{ *value = 1; }}
int launch(int *value) {{ set<<<1, 1>>>(value); return cudaGetLastError(); }}
"""


def engine_lacks(*, sleeps: bool) -> list[Lack]:
    """What SGLang on a GPU lacks; `sleeps` is True for an engine that frees its memory between rollouts."""
    of_nvcc = [] if os.environ.get("NVCC_CCBIN") else ["g++"]
    compilers = dict.fromkeys([os.environ.get("CXX") or "c++", *of_nvcc])
    cxx = [lack for each in compilers for lack in compiler_lacks(each, "-std=c++20", "-xc++", program=CXX_TRIAL)]
    lacks = [*torch_lacks(), *package_lacks(sleeps=sleeps), *triton_lacks(), *cxx]
    if shutil.which("ninja", path=_server_path()) is None:
        lacks.append(Lack("there is no ninja on PATH, which builds SGLang's kernels", "pip install ninja."))
    home, reason = find_toolkit(tries=not cxx)
    if home is None:
        lacks.append(Lack(f"no CUDA toolkit 13 compiles and links: {reason}", TOOLKIT_REMEDY))
    return lacks


def package_lacks(*, sleeps: bool) -> list[Lack]:
    """What SGLang finds of its kernels, of the C library that these need, and of the torch that they were built for."""
    needed = KERNEL_MODULES | (SLEEP_MODULES if sleeps else {})
    missing = [f"{module} (package {needed[module]})" for module in needed if importlib.util.find_spec(module) is None]
    lacks = [Lack(f"SGLang finds no {' and no '.join(missing)}", CUDA_REMEDY)] if missing else []
    libc, number = platform.libc_ver()
    if missing and (libc != "glibc" or tuple(map(int, number.split("."))) < GLIBC_FLOOR):
        found = f"{libc or 'another C library'} {number}".strip()
        what = f"the wheels of SGLang's kernels need glibc {'.'.join(map(str, GLIBC_FLOOR))}, and this host has {found}"
        lacks.append(Lack(what, LIBC_REMEDY))
    installed, sglang = installed_version("torch"), installed_version("sglang")
    required = importlib.metadata.requires("sglang") or [] if sglang else []
    pins = [pin["version"] for pin in map(TORCH_PIN.match, required) if pin]
    if installed and pins and installed.partition("+")[0] not in pins:
        what = f"SGLang {sglang} is built for torch {pins[0]}, and {installed} is installed"
        lacks.append(Lack(what, CUDA_REMEDY))
    return lacks


def cuda_environment(*, sleeps: bool) -> dict[str, str]:
    """Variables with which a server finds compilers, toolkit and runtime, and keeps its kernels for the next start."""
    environment = {"PATH": _server_path()}
    # SGLang's other caches lie in SGLANG_CACHE_DIR, but this one does not follow it.
    environment["SGLANG_JIT_CACHE_DIR"] = os.environ.get("SGLANG_JIT_CACHE_DIR") or str(_cache_dir() / "jit")
    home, _ = find_toolkit()
    places = [root / "lib" for root in _pip_directories(f"lib/{CUDART}")]
    if home is not None:
        environment["CUDA_HOME"] = str(home)
        places.append(home / "lib64")
    if sleeps and places:
        # torch_memory_saver is loaded before torch and does not know where torch's packages have the CUDA runtime.
        own = os.environ.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = f"{own}:{places[0]}" if own else str(places[0])
    return environment


def find_toolkit(*, tries: bool = True) -> tuple[Path | None, str]:
    """The first of CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda and pip's packages that compiles and links; None with
    the reasons if none does. Without `tries`, for a host without a compiler, nvcc and the CUDA runtime are enough.
    """
    reasons = []
    nvcc = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parents[1]]
    homes = dict.fromkeys(Path(home) for home in (*named, USUAL_PLACE) if home)
    try:
        homes |= dict.fromkeys(_linkable(root) for root in _pip_directories("bin/nvcc"))
    except OSError as error:
        reasons.append(f"pip's packages: {error}")
    for home in homes:
        if not (home / "bin" / "nvcc").is_file():
            reason = "there is no bin/nvcc"
        elif not (home / "lib64" / "libcudart.so").resolve().name.startswith(CUDART):
            reason = f"lib64/libcudart.so is not {CUDART}"
        elif not tries or not (reason := _toolkit_error(home, os.environ.get("PATH"))):
            return home, ""
        reasons.append(f"{home}: {reason}")
    return None, "; ".join(reasons)


@functools.cache
def _toolkit_error(home: Path, path: str | None) -> str:
    """Error of nvcc, or of the linker that it calls; of each toolkit and PATH once, for it takes a second or more."""
    libraries = [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    return compiler_error(
        [f"{home}/bin/nvcc", "-std=c++20", "-arch=sm_90", "-x", "cu", "-Xcompiler"], CUDA_TRIAL, libraries
    )


def _linkable(root: Path) -> Path:
    """A directory of links to pip's CUDA packages in `root`, as linkers expect it. Raises OSError.

    The packages have lib/libX.so.N; linkers look for lib64/libX.so, and for lib64/stubs/libcuda.so of the driver.
    """
    links = {name: root / name for name in ("bin", "include", "nvvm")}
    for library in sorted((root / "lib").iterdir()):
        names = [library.name, re.sub(r"\.so\..*", ".so", library.name)]
        links |= dict.fromkeys([f"lib64/{name}" for name in names], library)
    home = _cache_dir() / f"cuda-{hashlib.sha256(repr(links).encode()).hexdigest()[:12]}"
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f"{home.name}.") as scratch:
        made = Path(scratch, "cuda")
        (made / "lib64" / "stubs").mkdir(parents=True)
        (made / "lib64" / "stubs" / "libcuda.so").write_text("INPUT(-l:libcuda.so.1)\n", encoding="ascii")
        for name, target in links.items():
            (made / name).symlink_to(target)
        try:
            made.rename(home)
        except OSError:
            if not home.is_dir():  # else another process was as fast
                raise
    return home


def _pip_directories(part: str) -> list[Path]:
    """Where pip's CUDA 13 packages lie, if they hold the file `part`."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place, "cu13") for place in (spec.submodule_search_locations or () if spec else ())]
    return [root for root in roots if (root / part).is_file()]


def _server_path() -> str:
    """PATH of a server: where pip put ninja, which is on the PATH of an activated environment alone, and the rest."""
    return os.pathsep.join(filter(None, [sysconfig.get_path("scripts"), os.environ.get("PATH")]))


def _cache_dir() -> Path:
    return Path(os.environ.get("SGLANG_CACHE_DIR") or Path.home() / ".cache" / "sglang").expanduser()
