"""Memory of a process: its private pages, its peak, and the return of freed memory to the system.

Private memory counts. Pages that other processes share, such as Ray's object store, fill up once and do not belong to
the process.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

STEPS_KEPT = 16
"""Steps after which freed memory is returned to the system."""
GROWTH_KEPT = 1.5
"""Growth factor of private memory since the first step after a return, above which memory is returned at once."""


def private_bytes(pids: Sequence[int] = ()) -> int:
    """Resident bytes of this process and of the running processes in `pids`, without shared pages."""
    private = _private(psutil.Process())
    for pid in pids:
        try:
            private += _private(psutil.Process(pid))
        except psutil.Error as error:
            logger.debug("process %d is not counted: %s", pid, error)
    return private


def _private(process: psutil.Process) -> int:
    """Resident minus shared bytes; all resident bytes where the system does not count shared bytes."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def reset_peak() -> None:
    """Begin a new peak of this process's resident memory. Linux only; elsewhere the peak is that of its lifetime."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        logger.debug("the peak of resident memory cannot be set back: %s", error)


def peak_bytes() -> int | None:
    """Highest resident memory of this process in bytes since `reset_peak`; None where the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else None


def give_back_free_memory() -> None:
    """Make the C library return freed memory to the system. glibc only; elsewhere nothing happens.

    Tensors of ever new sizes leave holes that the C library neither reuses nor returns by itself; they grow with every
    step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """Policy for freed memory: the C library keeps it for the next steps, and returns it every STEPS_KEPT steps.

    A returned page costs the next step a page fault and 4 KiB of zeros: more than a quarter of a training step's
    processor time on a CPU. But holes between tensors of ever new sizes add up.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._steps = 0
        """Steps since freed memory was returned."""
        self._first = 0
        """Private bytes after the first of these steps."""

    def end_step(self) -> bool:
        """Call after every step; returns True if freed memory was returned to the system."""
        self._steps += 1
        private = _private(self._process)
        if self._steps == 1:
            self._first = private
        if self._steps < STEPS_KEPT and private <= GROWTH_KEPT * self._first:
            return False
        give_back_free_memory()
        self._steps = 0
        return True
