"""Cores, GPUs and memory of this machine for a plan, found without torch."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

import psutil

from trainer.rundir.provenance import num_cores

CPUS_PER_WORKER = 0.25
"""Ray CPUs reserved for each rank and each engine: less than a core, because ranks and engines work in turns and share
the cores, so that four engines and their ranks find a place on two cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores, GPUs and memory of this machine."""

    cpus: int
    """Logical cores that this process may use."""
    gpus: int
    """NVIDIA devices that this process may use."""
    memory: int
    """Bytes of memory in total."""


def this_machine() -> Machine:
    """Examine the machine without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    if visible is not None:
        devices = min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    return Machine(cpus=num_cores(), gpus=devices, memory=psutil.virtual_memory().total)
