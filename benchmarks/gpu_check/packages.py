"""The packages for GPUs on a machine without one: run what needs no device, print a table.

    make test-gpu-packages [ENGINE=vllm] [ARGS="--steps kernels,plans"]

The Makefile has put them into .venv-gpu, or .venv-vllm-gpu, whose Python runs this. A step that fails costs the others
nothing; the exit status is then 1. Table and logs are in outputs/gpu_packages/.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
OUT = ROOT / "outputs" / "gpu_packages"
PYTEST = ("-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider")
LIMIT_S = 2 * 3600.0
"""A step that takes longer is ended, and fails."""
ENGINE = "sglang" if find_spec("sglang") else "vllm"
SHOWN = (
    "torch", "triton", "sglang", "sglang-kernel", "vllm", "flashinfer-python", "transformers", "ray",
    "nvidia-nccl-cu13",
)  # fmt: skip
"""Packages whose releases stand above the table, where they are installed."""

DRIVER = """
import ctypes, os, subprocess, sys, tempfile
directory = tempfile.TemporaryDirectory()
driver = f"{directory.name}/libcuda.so.1"
command = ["gcc", "-shared", "-fPIC", "-x", "c", "-Wl,-soname,libcuda.so.1", "-o", driver, "-"]
subprocess.run(command, input=b"int cuPointerGetAttribute(void) { return 100; }", check=True)
"""
"""Makes a library in the place of the driver's, for linkers."""
PARITY_IMPORTS = """
import importlib, pkgutil, torch
from importlib.util import find_spec
from torch.nn.attention.varlen import varlen_attn
assert torch.version.cuda, f"torch {torch.__version__} is a build without CUDA"
other = "rollout.vllm" if find_spec("sglang") else "rollout.sglang"
names = [m.name for p in ("algorithms", "rollout", "trainer") for m in pkgutil.walk_packages([p], f"{p}.")]
names = [name for name in names if not name.startswith(f"{other}.")]
for name in names:
    importlib.import_module(name)
"""
VLLM_IMPORTS = f"""{PARITY_IMPORTS}
import vllm.v1.engine.llm_engine
print(f"{{len(names)}} modules of Parity, and vLLM's engine")
"""
SGLANG_IMPORTS = f"""{DRIVER}
{PARITY_IMPORTS}
import deep_gemm, flash_attn, flashinfer, sglang.launch_server, torch_memory_saver, torchvision
# sgl_kernel wants a driver. Its libraries for sm_90 must link with this torch.
ctypes.CDLL(driver, mode=ctypes.RTLD_GLOBAL)
for library in ("sm90/common_ops", "flash_ops"):
    ctypes.CDLL(f"{{find_spec('sgl_kernel').submodule_search_locations[0]}}/{{library}}.abi3.so")
print(f"{{len(names)}} modules of Parity, and what SGLang loads on a GPU")
"""
HOST = f"""{DRIVER}
from rollout.sglang.cuda_host import cuda_environment, engine_lacks
os.environ |= {{"LIBRARY_PATH": directory.name, "SGLANG_CACHE_DIR": directory.name}}
assert not (lacks := engine_lacks(sleeps=True)), lacks
code = '''
import torch
from sglang.kernels.jit.utils import override_jit_cuda_arch
from sglang.kernels.ops.activation.activation import activation_module
with override_jit_cuda_arch(9, 0, "a"):
    activation_module(torch.bfloat16)
'''
subprocess.run([sys.executable, "-c", code], env=os.environ | cuda_environment(sleeps=True), check=True)
print("the host lacks nothing; SGLang's activation kernel is compiled for sm_90a in the environment of a server")
"""

OF_SGLANG: dict[str, tuple[str, ...]] = {
    "imports": ("-W", "ignore", "-c", SGLANG_IMPORTS),
    "host": ("-c", HOST),
    "arguments": (*PYTEST, "tests/trainer/test_gpu_server_args.py"),
    "kernels": (*PYTEST, "tests/trainer/test_head_kernels.py", "tests/rollout/test_sglang_fusing.py"),
}
OF_VLLM: dict[str, tuple[str, ...]] = {
    "imports": ("-W", "ignore", "-c", VLLM_IMPORTS),
    "engine": (*PYTEST, "tests/rollout/test_vllm_gpu.py"),
    "kernels": (*PYTEST, "tests/trainer/test_head_kernels.py"),
}
STEPS: dict[str, tuple[str, ...]] = {
    "requirements": ("-m", "pip", "check"),
    **(OF_SGLANG if ENGINE == "sglang" else OF_VLLM),
    "plans": (*PYTEST, "tests/trainer/test_fake_ranks.py"),
    "kit": (*PYTEST, "tests/benchmarks/test_gpu_check.py"),
    # Readers with transformers 4 have packages of their own, which do not fit beside these.
    "tests": (*PYTEST, "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu and not sglang and not vllm",
              "-k", "not transformers_4 and not export_readers and not test_vllm_gpu",
              "tests/algorithms", "tests/rollout", "tests/trainer"),
}  # fmt: skip
"""Step -> what Python of the environment runs."""


def run(step: str) -> tuple[bool, str, float]:
    """(it holds, the last line that it printed, seconds) of a step."""
    log, errors = OUT / f"{step}.log", OUT / f"{step}.err"
    started = time.monotonic()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}
    with log.open("w", encoding="utf-8") as out, errors.open("w", encoding="utf-8") as err:
        try:
            status = subprocess.run(  # noqa: S603 - the commands above
                [PYTHON, *STEPS[step]], cwd=ROOT, env=environment, stdout=out, stderr=err, timeout=LIMIT_S, check=False
            ).returncode
            ending = f"exit status {status}"
        except subprocess.TimeoutExpired:
            status, ending = 1, f"no end within {LIMIT_S:.0f} s"
    # A step that holds says so on stdout; pip's warnings, for one, are on stderr.
    texts = [path.read_text("utf-8", "replace").strip() for path in ([log] if status == 0 else [log, errors])]
    last = next((text.splitlines()[-1].strip("= ").replace("|", "/") for text in texts if text), "")
    # Of all tests some want a GPU or other data; elsewhere a skip would hide that a package is missing.
    holds = status == 0 and (step == "tests" or "skipped" not in last)
    verdict = "holds" if holds else f"**fails** with {ending}, see {log.relative_to(ROOT)}"
    return holds, f"{verdict}: {last}".removesuffix(": "), time.monotonic() - started


def heading() -> str:
    """Date, machine and releases above the table."""
    releases = ", ".join(f"{name} {number}" for name in SHOWN if (number := _installed(name)))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{time.strftime('%Y-%m-%d')}, {machine}, {releases}.\n\n| step | result | seconds |\n|---|---|---|\n"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> int:
    """Run the steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(STEPS), help="some of them, separated by commas; all without")
    chosen = parser.parse_args().steps.split(",")
    if unknown := set(chosen) - set(STEPS):
        parser.error(f"--steps: there is no step {', '.join(unknown)}; there are {', '.join(STEPS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    rows, failed = "", 0
    for step in chosen:
        sys.stdout.write(f"[gpu-packages] {step}\n")
        sys.stdout.flush()
        holds, result, seconds = run(step)
        failed += not holds
        rows += f"| {step} | {result} | {seconds:.0f} |\n"
    (OUT / "table.md").write_text(heading() + rows, encoding="utf-8")
    sys.stdout.write(f"{heading()}{rows}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
