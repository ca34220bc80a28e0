"""This machine -> findings, one per check, for `parity doctor`: what is present, what is missing, and the remedy.

The checks start and download nothing and use no network except loopback. Importing torch and measuring the speed limits
of the hardware take seconds; all other checks are fast.
"""

from __future__ import annotations

import glob
import platform
import shutil
import socket
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import NamedTuple

import psutil

from algorithms.config import ConfigError, Problem
from trainer.limits.machine import this_machine
from trainer.rundir.cache import default_cache_dir
from trainer.rundir.provenance import num_cores
from trainer.rundir.run_dir import unusable_problem
from trainer.text.plain import size
from trainer.tracking.wandb_run import wandb_key_source

MEMORY_FLOOR = 6 * 2**30
"""Bytes of memory of the arithmetic recipes: Ray, two FSDP ranks and one engine, each of which imports torch."""
SHM_FLOOR = 2**30
DISK_FLOOR = 5 * 2**30
DISTRIBUTION, PACKAGES = "parity-rl", ("algorithms", "rollout", "trainer")
REQUIRED = ("ray", "transformers", "hydra-core", "safetensors", "xxhash")
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, never written to

OK, NOTE, MISSING = "ok", "note", "MISSING"
"""Status of a finding: the part works; it works with a restriction; without it some run cannot work."""


class Finding(NamedTuple):
    """The outcome of one check."""

    status: str
    """OK, NOTE or MISSING."""
    name: str
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The outcome of all checks."""

    all: tuple[Finding, ...]
    engines: tuple[str, ...]
    """Options of `rollout=` that can run on this machine; empty if no run is possible."""


def examine() -> Findings:
    """Run all checks; no check raises."""
    torch_found, gpus = _torch()
    sglang, vllm = _sglang(torch_found, gpus=gpus), _vllm(torch_found)
    packages = [_package(name) for name in REQUIRED]
    python = Finding(OK, "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    required = [python, _import_names(), torch_found, *packages, _loopback(), _shared_memory()]
    engines: list[str] = []
    if all(finding.status != MISSING for finding in required):
        engines = [found.name for found in (sglang[0], vllm) if found.status == OK] + ["torch"]
    verdict = Finding(MISSING, "engines", "none can run", "Mend what is MISSING above.")
    if engines:
        verdict = Finding(OK, "engines", f"available: {', '.join(f'rollout={name}' for name in engines)}")
    gpu = Finding(OK, "GPUs", ", ".join(gpus)) if gpus else Finding(NOTE, "GPUs", "none: runs use the CPU")
    resources = (_cores(), _memory(), _disk(), _cache(), _ceilings(torch_found, gpus))
    return Findings(all=(*required, *sglang, vllm, gpu, *resources, _wandb(), verdict), engines=tuple(engines))


def render(findings: Findings) -> str:
    """One line per finding, as text that ends in a line break."""
    width = max(len(finding.name) for finding in findings.all)
    lines = []
    for status, name, found, remedy in findings.all:
        lines.append(f"{status:<8} {name:<{width}}  {found}{f' -> {remedy}' if remedy else ''}\n")
    return "".join(lines)


def _import_names() -> Finding:
    """Check that no other distribution has a package of one of the project's names, of which only one is imported."""
    owners = packages_distributions()
    others = {name: sorted(set(owners.get(name, ())) - {DISTRIBUTION}) for name in PACKAGES}
    if not any(others.values()):
        return Finding(OK, "import names", f"{', '.join(PACKAGES)}: of {DISTRIBUTION} alone")
    found = "; ".join(f"{name} is also of {', '.join(names)}" for name, names in others.items() if names)
    return Finding(MISSING, "import names", found, f"Install {DISTRIBUTION} in an environment without it.")


def _package(name: str) -> Finding:
    """Check that a distribution is installed, without importing its code."""
    try:
        return Finding(OK, name, version(name))
    except PackageNotFoundError:
        return Finding(MISSING, name, "not installed", f'pip install "{name}"')


def _torch() -> tuple[Finding, list[str]]:
    """(finding about torch and CUDA, names of the GPUs that torch sees)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "Install the build of torch for this machine."
        return Finding(MISSING, "torch", f"cannot be imported ({error})", remedy), []
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding(OK, "torch", f"{torch.__version__}, CUDA {torch.version.cuda}"), names
    if devices := len(glob.glob("/dev/nvidia[0-9]*")):
        found = f"{torch.__version__} does not see the {devices} GPUs of this machine"
        remedy = "Install the CUDA build of torch, and check the driver with nvidia-smi."
        return Finding(NOTE, "torch", found, remedy), []
    return Finding(OK, "torch", f"{torch.__version__}, no CUDA"), []


def _sglang(torch_found: Finding, *, gpus: list[str]) -> list[Finding]:
    """Check that rollout=sglang can run: the package, its release, its CPU platform on a machine without GPUs, and on
    one with GPUs what its engines lack there, each with its remedy.

    An environment for CPUs on a machine with GPUs is noted, for engines can run there, on the CPU.
    """
    if torch_found.status == MISSING:
        return [Finding(MISSING, "sglang", "cannot run without torch")]
    from rollout.engine import EngineError
    from rollout.sglang.cuda_host import engine_lacks
    from rollout.sglang.installation import check_installation

    has_gpus = bool(gpus) or this_machine().gpus > 0
    lacks = engine_lacks(sleeps=True) if has_gpus else []
    noted = [Finding(NOTE, "sglang", f"not on the GPUs of this machine: {lack.what}", lack.remedy) for lack in lacks]
    try:
        version = check_installation(device="cuda" if has_gpus and not lacks else "cpu", sleeps=True)
    except EngineError as error:
        return [Finding(MISSING, "sglang", str(error)), *noted]
    return [Finding(OK, "sglang", version), *noted]


def _vllm(torch_found: Finding) -> Finding:
    """Check the package of rollout=vllm and its release. Its absence is a note: nothing installs it unasked."""
    if torch_found.status == MISSING:
        return Finding(NOTE, "vllm", "cannot run without torch")
    from rollout.vllm.config import VLLMConfig
    from rollout.vllm.releases import ON_CPU, ON_GPU, installed_package

    if (package := installed_package()) is None:
        return Finding(NOTE, "vllm", "not installed, as most runs do without it", f"{VLLMConfig.package_remedy}.")
    name, number = package
    for release, where in ((ON_CPU, "on a CPU"), (ON_GPU, "on a GPU")):
        if release.is_of(package):
            return Finding(OK, "vllm", f"{number} ({name}), {where}")
    return Finding(NOTE, "vllm", f"{number} ({name}): rollout=vllm needs {ON_CPU} or {ON_GPU}", f"{ON_CPU.remedy}.")


def _cores() -> Finding:
    if (cores := num_cores()) > 1:
        return Finding(OK, "cores", f"{cores} logical")
    return Finding(NOTE, "cores", "1 logical", "Trainer and engine share one core: use policy.num_workers=1.")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    remedy = f"The smallest recipes want {size(MEMORY_FLOOR)} of memory."
    return _amount("memory", memory.available, memory.total, floor=MEMORY_FLOOR, remedy=remedy)


def _disk() -> Finding:
    usage = shutil.disk_usage(Path.cwd())
    remedy = f"The smallest recipes want {size(DISK_FLOOR)} of disk space in this directory."
    return _amount("disk", usage.free, usage.total, floor=DISK_FLOOR, remedy=remedy)


def _cache() -> Finding:
    """The directory that all runs share."""
    unusable: Problem | None
    try:
        directory = default_cache_dir()
        unusable = unusable_problem("$PARITY_CACHE", directory)
    except ConfigError as error:
        [unusable] = error.problems
    if unusable is not None:
        return Finding(NOTE, "cache", str(unusable), "Set PARITY_CACHE to a directory of yours.")
    return Finding(OK, "cache", f"{directory}: built models and measured limits; PARITY_CACHE names another directory")


def _shared_memory() -> Finding:
    """Check the shared memory, which holds Ray's object store, the transport of weight copies to other machines."""
    if not Path(SHARED_MEMORY).is_dir():
        return Finding(NOTE, SHARED_MEMORY, "absent: Ray will use files in the temporary directory")
    usage = shutil.disk_usage(SHARED_MEMORY)
    remedy = f"Give the container at least {size(SHM_FLOOR)}: docker run --shm-size=2g."
    return _amount(SHARED_MEMORY, usage.free, usage.total, floor=SHM_FLOOR, remedy=remedy)


def _amount(name: str, free: int, total: int, *, floor: int, remedy: str) -> Finding:
    """The finding about an amount in bytes; the remedy applies if less than `floor` is free."""
    found = f"{size(free)} free of {size(total)}"
    return Finding(NOTE, name, found, remedy) if free < floor else Finding(OK, name, found)


def _ceilings(torch_found: Finding, gpus: list[str]) -> Finding:
    """Speed of copies and matrix products on all cores, or on the first GPU; measured once, then cached."""
    if torch_found.status == MISSING:
        return Finding(NOTE, "limits", "unknown without torch")
    from trainer.limits.ceilings import find_ceilings

    try:
        return Finding(OK, "limits", str(find_ceilings("cuda" if gpus else "cpu", num_threads=num_cores())))
    except (RuntimeError, ConfigError) as error:
        return Finding(NOTE, "limits", f"could not be measured ({error})")


def _loopback() -> Finding:
    """Check that a port on 127.0.0.1 can be used, as engines, Ray and the process group need."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5)
            client.connect(server.getsockname())
    except OSError as error:
        remedy = "Allow connections to 127.0.0.1 in the sandbox or firewall."
        return Finding(MISSING, "loopback", f"no port can be used ({error})", remedy)
    return Finding(OK, "loopback", "a port on 127.0.0.1 can be bound and reached")


def _wandb() -> Finding:
    """Check for a W&B key. The finding names the key's place, never the key; the network is not contacted."""
    package = _package("wandb")
    if package.status == MISSING:
        return package._replace(status=NOTE)
    if source := wandb_key_source():
        return Finding(OK, "wandb", f"{package.found}, key in {source} (not tried)")
    remedy = "wandb login, or tracking.wandb=offline; metrics.jsonl is always written."
    return Finding(NOTE, "wandb", f"{package.found}, no key: runs stay offline", remedy)
