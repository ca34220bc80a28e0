"""Cores, GPUs and memory of this machine for a plan, found without torch."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainer.rundir.provenance import num_cores

CPUS_PER_WORKER = 0.25
"""Ray CPUs reserved for each FSDP rank and each tensor-parallel rank of an engine: less than a core, because ranks and
engines work in turns and share the cores, so that four engines and their ranks find a place on two cores."""


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
"""Lines "<number>:<controllers>:<path>" that name the control groups of this process; see cgroups(7)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores, GPUs and memory of this machine."""

    cpus: int
    """Logical cores that this process may use."""
    gpus: int
    """NVIDIA devices that this process may use."""
    memory: int
    """Bytes of memory that the processes of this machine, or of this container, may use."""


def this_machine() -> Machine:
    """Examine the machine without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    if visible is not None:
        devices = min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    return Machine(cpus=num_cores(), gpus=devices, memory=usable_memory())


def usable_memory() -> int:
    """Bytes of memory in total, or the lowest limit of the control groups in which this process runs."""
    return min([psutil.virtual_memory().total, *_memory_limits()])


def _memory_limits() -> list[int]:
    """Limits in bytes of the control groups of this process and of all groups above them, version 1 and version 2."""
    limits = []
    lines = OWN_CGROUPS.read_text(encoding="utf-8").splitlines() if OWN_CGROUPS.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            root, name = CGROUPS / controllers, "memory.limit_in_bytes" if controllers else "memory.max"
            own = root / path.lstrip("/")
            # A container sees its own group as the root: there the path leads nowhere.
            files = [group / name for group in (own, *own.parents) if group.is_relative_to(root)]
            texts = [file.read_text(encoding="ascii").strip() for file in files if file.is_file()]
            limits += [int(text) for text in texts if text.isdecimal()]  # "max": no limit
    return limits
