"""What SGLang's and Triton's compilers need of a GPU host: each thing taken away is named, with what brings it.

The C and C++ compilers and the linker are those of this machine. NVIDIA's is a script over them, with its headers and
libraries as far as the trial asks for them; where pip's CUDA packages are installed, they are tried too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from rollout.config import Quantization
from rollout.engine import EngineNeeds
from rollout.processes import gpu_host
from rollout.processes.gpu_host import rank_lacks
from rollout.sglang import cuda_host
from rollout.sglang.config import SGLangConfig
from rollout.sglang.cuda_host import cuda_environment, engine_lacks, find_toolkit
from rollout.sglang.installation import server_environment

TOOLS = ("gcc", "g++", "c++", "as", "ld")
NVCC = """#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in
    -L* | -lcu*) links="$links $1" ;;
    -x?*) echo "nvcc fatal: Unknown option '$1'" && exit 1 ;;
  esac
  shift
done
here={root}
{sed} 's/<<<[^>]*>>>//' | exec {gxx} -std=c++20 -shared -fPIC -o trial.so -D__global__= -D__CUDACC_VER_MAJOR__=13 \\
  -D__CUDACC_VER_MINOR__=0 -I$here/include -x c++ - $links
"""
HEADERS = {
    "cuda_runtime.h": "#define CUDART_VERSION 13000\nextern int cudaGetLastError();\n",
    "cuda/std/cstdint": "",
    "curand.h": "",
}

PIP_DIRECTORIES = cuda_host._pip_directories
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler on this machine")


class Host(NamedTuple):
    """A host that lacks nothing."""

    bin: Path
    """All of PATH."""
    cuda: Path
    """CUDA_HOME."""
    python: Path
    """Where Python's headers and scripts are."""


def library(path: Path, *, soname: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", f"-Wl,-soname,{soname}", "-o", str(path), "-x", "c++", "-"]
    subprocess.run(command, input="int cudaGetLastError() { return 0; }", text=True, check=True, timeout=60)


def nvidia_packages(root: Path, libraries: str) -> None:
    """Compiler, headers and libraries of CUDA 13 in `root`, as pip lays them out where `libraries` is lib."""
    for name, text in HEADERS.items():
        (root / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "include" / name).write_text(text)
    (root / "bin").mkdir()
    (root / "nvvm").mkdir()
    (root / "bin" / "nvcc").write_text(NVCC.format(root=root, sed=shutil.which("sed"), gxx=shutil.which("g++")))
    (root / "bin" / "nvcc").chmod(0o755)
    library(root / libraries / "libcudart.so.13", soname="libcudart.so.13")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host(bin=tmp_path / "bin", cuda=tmp_path / "toolkit", python=tmp_path / "python")
    nvidia_packages(found.cuda, "lib64")
    (found.cuda / "lib64" / "libcudart.so").symlink_to("libcudart.so.13")
    library(found.cuda / "lib64" / "stubs" / "libcuda.so", soname="libcuda.so.1")
    for directory in (found.bin, found.python):
        directory.mkdir()
    (found.python / "Python.h").touch()
    (found.python / "ninja").symlink_to(str(shutil.which("true")))
    for tool in TOOLS:
        (found.bin / tool).symlink_to(str(shutil.which(tool)))
    for name in ("CC", "CXX", "CUDA_PATH", "NVCC_CCBIN", "SGLANG_JIT_CACHE_DIR", "LD_LIBRARY_PATH", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(found.bin))
    monkeypatch.setenv("CUDA_HOME", str(found.cuda))
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_host, "USUAL_PLACE", tmp_path / "nowhere")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(found.python))
    monkeypatch.setattr(cuda_host, "_pip_directories", lambda part: [])
    # The environment of this machine is for CPUs.
    for module in (cuda_host, gpu_host):
        monkeypatch.setattr(module, "torch_lacks", list)
    monkeypatch.setattr(cuda_host, "package_lacks", lambda *, sleeps: [])
    return found


def test_a_whole_host_lacks_nothing(host: Host) -> None:
    assert find_toolkit()[0] == host.cuda, find_toolkit()[1]
    assert engine_lacks(sleeps=True) == rank_lacks() == []


def old_compiler(host: Host) -> None:
    """One that ends before C++20."""
    (host.bin / "c++").unlink()
    (host.bin / "c++").write_text(f'#!/bin/sh\nexec {host.bin}/g++ "$@" -std=c++17\n')
    (host.bin / "c++").chmod(0o755)


def runtime_of_12(host: Host) -> None:
    (host.cuda / "lib64" / "libcudart.so").unlink()
    (host.cuda / "lib64" / "libcudart.so").symlink_to("libcudart.so.12")


def headers_of_13_5(host: Host) -> None:
    (host.cuda / "include" / "cuda_runtime.h").write_text("#define CUDART_VERSION 13050\n")


@pytest.mark.parametrize(
    ("take", "named", "remedy"),
    [
        (lambda host: (host.bin / "gcc").unlink(), "gcc -xc does not compile", "build-essential"),
        (lambda host: (host.python / "Python.h").unlink(), "Python.h", f"python3.{sys.version_info.minor}-dev"),
        (lambda host: (host.bin / "c++").unlink(), "c++ -std=c++20 -xc++ does not compile", "build-essential"),
        (lambda host: (host.bin / "g++").unlink(), "g++ -std=c++20 -xc++ does not compile", "build-essential"),
        (old_compiler, "c++ -std=c++20 -xc++ does not compile and link: error: ", "g++ 11 or later"),
        (lambda host: (host.python / "ninja").unlink(), "no ninja", "pip install ninja"),
        (lambda host: (host.cuda / "bin" / "nvcc").unlink(), "no bin/nvcc", "cuda-toolkit[nvcc"),
        (lambda host: (host.cuda / "lib64" / "libcudart.so").unlink(), "libcudart.so.13", "cuda-toolkit[nvcc"),
        (runtime_of_12, "is not libcudart.so.13", "cuda-toolkit[nvcc"),
        (headers_of_13_5, "of different releases", "cuda-toolkit[nvcc"),
        (lambda host: (host.cuda / "include" / "curand.h").unlink(), "curand.h", "cuda-toolkit[nvcc"),
    ],
)
def test_what_is_taken_away_is_named_alone(host: Host, take: Callable[[Host], object], named: str, remedy: str) -> None:
    take(host)
    [lack] = engine_lacks(sleeps=False)
    assert named in lack.what and remedy in lack.remedy, lack
    of_rank = find_spec("triton") and (named == "Python.h" or "-xc " in named)
    assert rank_lacks() == ([lack] if of_rank else [])


def test_compilers_that_cannot_link_are_named(host: Host) -> None:
    (host.bin / "ld").unlink()
    lacks = engine_lacks(sleeps=False)
    assert len(lacks) == 3 and all("ld" in lack.what and "build-essential" in lack.remedy for lack in lacks), lacks


def test_everything_is_named_at_once(host: Host) -> None:
    for directory in host:
        shutil.rmtree(directory)
    named = " ".join(lack.what for lack in engine_lacks(sleeps=True))
    for word in ("gcc -xc", "Python.h", "'c++'", "'g++'", "ninja", "toolkit: there is no bin/nvcc"):
        assert word in named


def test_a_broken_toolkit_gives_way_to_the_next(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one that is named: a cluster's module for CUDA 12. nvcc on PATH may be a link into its toolkit."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-12"))
    (host.bin / "nvcc").symlink_to(host.cuda / "bin" / "nvcc")
    assert find_toolkit()[0] == host.cuda
    (host.bin / "nvcc").unlink()
    assert find_toolkit()[0] is None
    monkeypatch.setattr(cuda_host, "USUAL_PLACE", host.cuda)
    assert cuda_environment(sleeps=False)["CUDA_HOME"] == str(host.cuda)


@pytest.fixture
def pip_host(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host whose CUDA is that of pip: lib/libX.so.N, and no driver's library to link; the root of the packages."""
    root = tmp_path / "site" / "nvidia" / "cu13"
    nvidia_packages(root, "lib")
    shutil.rmtree(host.cuda)
    library(tmp_path / "driver" / "libcuda.so.1", soname="libcuda.so.1")
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path / "driver"))
    monkeypatch.setattr(cuda_host, "_pip_directories", PIP_DIRECTORIES)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return root


def test_pips_packages_become_a_toolkit_that_links(pip_host: Path, tmp_path: Path) -> None:
    home = find_toolkit()[0]
    assert home is not None and home.parent == tmp_path / "cache", find_toolkit()[1]
    assert (home / "lib64" / "libcudart.so").resolve() == pip_host / "lib" / "libcudart.so.13"
    assert engine_lacks(sleeps=True) == []
    assert not [path for path in home.parent.iterdir() if "." in path.name], "nothing is left of its making"
    assert find_toolkit()[0] == home
    environment = cuda_environment(sleeps=True)
    assert environment["CUDA_HOME"] == str(home) and environment["LD_LIBRARY_PATH"] == str(pip_host / "lib")
    library(pip_host / "lib" / "libcurand.so.10", soname="libcurand.so.10")
    later = find_toolkit()[0]
    assert later is not None and later != home and (later / "lib64" / "libcurand.so").exists()


def test_a_cache_that_cannot_be_written_to_is_named(pip_host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/proc/sglang")
    assert "/proc/sglang" in find_toolkit()[1]
    assert len(engine_lacks(sleeps=True)) == 1


@pytest.mark.skipif(not PIP_DIRECTORIES("bin/nvcc"), reason="pip's CUDA packages are not installed: make GPU=yes")
def test_the_installed_cuda_packages_compile_and_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path / "libcuda.so.1", soname="libcuda.so.1")
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(cuda_host, "USUAL_PLACE", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    home = find_toolkit()[0]
    assert home is not None and home.parent == tmp_path / "cache", find_toolkit()[1]


def test_the_environment_of_a_server(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = cuda_environment(sleeps=False)
    assert environment["PATH"] == f"{host.python}:{host.bin}"
    assert environment["SGLANG_JIT_CACHE_DIR"] == str(tmp_path / "cache" / "jit")
    assert "LD_LIBRARY_PATH" not in environment
    monkeypatch.setenv("LD_LIBRARY_PATH", "/own")
    monkeypatch.setenv("SGLANG_JIT_CACHE_DIR", "/own/jit")
    environment = cuda_environment(sleeps=True)
    assert environment["LD_LIBRARY_PATH"] == f"/own:{host.cuda / 'lib64'}"
    assert environment["SGLANG_JIT_CACHE_DIR"] == "/own/jit"


def test_the_loader_finds_what_torch_memory_saver_needs(host: Host, tmp_path: Path) -> None:
    """The library that is put before every process needs the CUDA runtime, and knows no directory for it."""
    saver = tmp_path / "saver.so"
    command = ["g++", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", str(saver), "-x", "c++", "-"]
    command += [f"-L{host.cuda}/lib64", "-lcudart"]
    subprocess.run(command, input="", text=True, check=True, timeout=60)
    environment = {"LD_PRELOAD": str(saver), "LD_TRACE_LOADED_OBJECTS": "1", **cuda_environment(sleeps=True)}
    program = [str(shutil.which("true", path="/bin:/usr/bin"))]
    loaded = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60).stdout
    assert f"libcudart.so.13 => {host.cuda}/lib64/libcudart.so.13" in loaded


def test_settings_of_a_server_that_the_environment_may_overrule(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE")
    compiled = "SGLANG_JIT_DEEPGEMM_PRECOMPILE"
    for name in (*names, compiled):
        monkeypatch.delenv(name, raising=False)

    def told(name: str, *, sleeps: bool = True, tp_size: int = 2, format: str = "none") -> str | None:
        config = SGLangConfig(gpus_per_engine=tp_size, engine_args={"tp_size": tp_size})
        needs, quantization = EngineNeeds(sleeps=sleeps), Quantization[format]
        variables = server_environment(config, device="cuda", num_threads=None, needs=needs, quantization=quantization)
        return variables.get(name)

    for name in names:
        assert told(name) == "false" and told(name, sleeps=False) is None and told(name, tp_size=1) is None
    assert told(compiled, format="fp8") == "false" and told(compiled) is None
    for name in (*names, compiled):
        monkeypatch.setenv(name, "true")
        assert told(name, format="fp8") is None
