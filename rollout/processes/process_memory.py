"""What a process holds in memory: its own pages and its peak; and how the memory that it freed is given back.

Private memory is what counts: pages that other processes share, such as Ray's object store, fill up once
and are not the process's own.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

STEPS_KEPT = 16
"""Steps after which freed memory is given back."""
GROWTH_KEPT = 1.5
"""Growth of a process since its last step after giving back, from which on it gives back at once."""


def private_bytes(pids: Sequence[int] = ()) -> int:
    """Resident bytes of this process and those of `pids` that still run, without what other processes share."""
    private = _private(psutil.Process())
    for pid in pids:
        try:
            private += _private(psutil.Process(pid))
        except psutil.Error as error:
            logger.debug("process %d is not counted: %s", pid, error)
    return private


def _private(process: psutil.Process) -> int:
    """Resident minus shared bytes; all resident ones where the system does not tell them apart."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def reset_peak() -> None:
    """Begin a new peak of this process's resident memory; Linux only, elsewhere the peak is that of its life."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        logger.debug("the peak of resident memory cannot be set back: %s", error)


def peak_bytes() -> int | None:
    """Highest resident memory of this process since `reset_peak`; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else None


def give_back_free_memory() -> None:
    """Have the C library return what it keeps of freed memory; glibc only, elsewhere nothing happens.

    Tensors of ever new sizes leave holes that it can neither use nor returns by itself, more with every step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedMemory:
    """What the C library keeps of freed memory stays for the next step, and is given back now and then.

    To the next step a page that was given back is a page fault and 4 KiB of zeros: more than a quarter of a
    training step's processor time on a CPU. But holes between tensors of ever new sizes add up.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._steps = 0
        """Since it was given back."""
        self._first = 0
        """Private bytes after the first of them."""

    def end_step(self) -> bool:
        """Call after every step; whether freed memory was given back."""
        self._steps += 1
        private = _private(self._process)
        if self._steps == 1:
            self._first = private
        if self._steps < STEPS_KEPT and private <= GROWTH_KEPT * self._first:
            return False
        give_back_free_memory()
        self._steps = 0
        return True
