"""This machine -> findings, one per check, for `parity doctor`: what is present, what is missing, and the remedy.

The checks start and download nothing and use no network except loopback. Importing torch and measuring the speed limits
of the hardware take seconds; all other checks are fast.
"""

from __future__ import annotations

import glob
import importlib.util
import netrc
import os
import platform
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil

from rollout.config import SGLANG_REMEDY
from trainer.limits.machine import num_cores
from trainer.rundir.text import size

SGLANG_FLOOR = (0, 5, 23)
"""Oldest allowed release of SGLang; earlier releases have known remote-code-execution holes in weight-update routes."""
PYTHON_FLOOR = (3, 11)
MEMORY_FLOOR = 6 * 2**30
"""Bytes of memory of the arithmetic recipes: Ray, two FSDP ranks and one engine, each of which imports torch."""
SHM_FLOOR = 2**30
DISK_FLOOR = 5 * 2**30
REQUIRED = ("ray", "transformers", "hydra-core", "safetensors", "xxhash")
PLATFORM_GROUP, PLATFORM_NAME = "sglang.srt.platforms", "parity_cpu"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, never written to
WANDB_HOST = "api.wandb.ai"


class Status(Enum):
    """Meaning of a finding for a run."""

    ok = "ok"
    note = "note"
    """The part works, with a restriction."""
    missing = "MISSING"
    """The part is missing or unusable, and some run cannot work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The outcome of all checks."""

    all: tuple[Finding, ...]
    engines: tuple[str, ...]
    """Options of `rollout=` that can run on this machine."""

    @property
    def can_run(self) -> bool:
        """True if a run is possible with at least one engine."""
        return bool(self.engines)


def examine() -> Findings:
    """Run all checks; no check raises."""
    torch_found, gpus = _torch()
    sglang = _sglang(gpus=gpus)
    required = [_python(), torch_found, *(_package(name) for name in REQUIRED), _loopback(), _shared_memory()]
    resources = [_cores(), _memory(), _disk(), _ceilings(torch_found, gpus)]
    can_run_torch = all(finding.status is not Status.missing for finding in required)
    engines = []
    if can_run_torch:
        engines.append("torch")
        if sglang.status is not Status.missing:
            engines.insert(0, "sglang")
    verdict = Finding(
        name="engines",
        status=Status.ok if engines else Status.missing,
        found=f"available: {', '.join(f'rollout={name}' for name in engines)}" if engines else "none can run",
        remedy="" if engines else "Mend what is MISSING above.",
    )
    gpu = Finding(
        name="GPUs", status=Status.ok if gpus else Status.note, found=", ".join(gpus) or "none: runs use the CPU"
    )
    return Findings(all=(*required, sglang, gpu, *resources, _wandb(), verdict), engines=tuple(engines))


def render(findings: Findings) -> str:
    """One line per finding, as text that ends in a line break."""
    width = max(len(finding.name) for finding in findings.all)
    lines = []
    for finding in findings.all:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.status.value:<8} {finding.name:<{width}}  {finding.found}{remedy}")
    return "\n".join(lines) + "\n"


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.5.23.post1" -> (0, 5, 23)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _python() -> Finding:
    good = sys.version_info[:2] >= PYTHON_FLOOR
    floor = ".".join(str(part) for part in PYTHON_FLOOR)
    return Finding(
        name="python",
        status=Status.ok if good else Status.missing,
        found=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        remedy="" if good else f"Use Python {floor} or later.",
    )


def _package(name: str) -> Finding:
    """Check that a distribution is installed, without importing its code."""
    try:
        return Finding(name=name, status=Status.ok, found=version(name))
    except PackageNotFoundError:
        return Finding(name=name, status=Status.missing, found="not installed", remedy=f'pip install "{name}"')


def _torch() -> tuple[Finding, list[str]]:
    """(finding about torch and CUDA, names of the GPUs that torch sees)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "Install the build of torch for this machine."
        return Finding(name="torch", status=Status.missing, found=f"cannot be imported ({error})", remedy=remedy), []
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding(name="torch", status=Status.ok, found=f"{torch.__version__}, CUDA {torch.version.cuda}"), names
    if devices:
        remedy = "Install the CUDA build of torch, and check the driver with nvidia-smi."
        found = f"{torch.__version__} does not see the {devices} GPUs of this machine"
        return Finding(name="torch", status=Status.note, found=found, remedy=remedy), []
    return Finding(name="torch", status=Status.ok, found=f"{torch.__version__}, no CUDA"), []


def _sglang(*, gpus: list[str]) -> Finding:
    """Check that rollout=sglang can run: the package, its release, and the CPU platform on a machine without GPUs."""
    floor = ".".join(str(part) for part in SGLANG_FLOOR)
    if importlib.util.find_spec("sglang") is None:
        return Finding(name="sglang", status=Status.missing, found="not installed", remedy=SGLANG_REMEDY)
    installed = version("sglang")
    if release(installed) < SGLANG_FLOOR:
        remedy = f'pip install "sglang>={floor}": older releases let a request run code'
        return Finding(name="sglang", status=Status.missing, found=f"{installed} is below {floor}", remedy=remedy)
    registered = PLATFORM_NAME in entry_points(group=PLATFORM_GROUP).names
    if gpus:
        return Finding(name="sglang", status=Status.ok, found=installed)
    if not registered:
        remedy = "Install parity-rl again (pip install -e . in a source tree): its entry points are not registered."
        found = f"{installed}, but its CPU platform {PLATFORM_NAME} is not registered and there is no GPU"
        return Finding(name="sglang", status=Status.missing, found=found, remedy=remedy)
    return Finding(name="sglang", status=Status.ok, found=f"{installed}, CPU platform {PLATFORM_NAME} registered")


def _cores() -> Finding:
    cores = num_cores()
    few = cores < 2
    return Finding(
        name="cores",
        status=Status.note if few else Status.ok,
        found=f"{cores} logical",
        remedy="Trainer and engine share one core: use policy.num_workers=1." if few else "",
    )


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    return _amount("memory", free=memory.available, total=memory.total, floor=MEMORY_FLOOR, of="memory")


def _disk() -> Finding:
    usage = shutil.disk_usage(Path.cwd())
    return _amount("disk", free=usage.free, total=usage.total, floor=DISK_FLOOR, of="disk space in this directory")


def _ceilings(torch_found: Finding, gpus: list[str]) -> Finding:
    """Speed of copies and matrix products on all cores, or on the first GPU; measured once, then cached."""
    if torch_found.status is Status.missing:
        return Finding(name="limits", status=Status.note, found="unknown without torch")
    from trainer.limits.ceilings import find_ceilings

    try:
        ceilings = find_ceilings("cuda" if gpus else "cpu", num_threads=num_cores())
    except RuntimeError as error:
        return Finding(name="limits", status=Status.note, found=f"could not be measured ({error})")
    return Finding(name="limits", status=Status.ok, found=str(ceilings))


def _amount(name: str, *, free: int, total: int, floor: int, of: str) -> Finding:
    short = free < floor
    return Finding(
        name=name,
        status=Status.note if short else Status.ok,
        found=f"{size(free)} free of {size(total)}",
        remedy=f"The smallest recipes want {size(floor)} of {of}." if short else "",
    )


def _shared_memory() -> Finding:
    """Check the shared memory, which holds Ray's object store, the transport of weight copies to other machines."""
    path = Path(SHARED_MEMORY)
    if not path.is_dir():
        return Finding(
            name=SHARED_MEMORY, status=Status.note, found="absent: Ray will use files in the temporary directory"
        )
    usage = shutil.disk_usage(path)
    short = usage.free < SHM_FLOOR
    return Finding(
        name=SHARED_MEMORY,
        status=Status.note if short else Status.ok,
        found=f"{size(usage.free)} free of {size(usage.total)}",
        remedy=f"Give the container at least {size(SHM_FLOOR)}: docker run --shm-size=2g." if short else "",
    )


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
        return Finding(name="loopback", status=Status.missing, found=f"no port can be used ({error})", remedy=remedy)
    return Finding(name="loopback", status=Status.ok, found="a port on 127.0.0.1 can be bound and reached")


def _wandb() -> Finding:
    """Check for a W&B key. The finding names the key's place, never the key; the network is not contacted."""
    try:
        installed = version("wandb")
    except PackageNotFoundError:
        return Finding(name="wandb", status=Status.note, found="not installed", remedy='pip install "wandb"')
    source = _wandb_key_source()
    if source is None:
        remedy = "wandb login, or tracking.wandb=offline; metrics.jsonl is always written."
        return Finding(name="wandb", status=Status.note, found=f"{installed}, no key: runs stay offline", remedy=remedy)
    return Finding(name="wandb", status=Status.ok, found=f"{installed}, key in {source} (not tried)")


def _wandb_key_source() -> str | None:
    if os.environ.get("WANDB_API_KEY"):
        return "$WANDB_API_KEY"
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        login = netrc.netrc(path).authenticators(WANDB_HOST)
    except (OSError, netrc.NetrcParseError):
        return None
    return str(path) if login is not None and login[2] else None
