"""The mark: memory that a child shares with its parent, and in which the child writes whose code it runs.

A message cannot tell it: code that hangs or crashes in the middle of a computation sends none, and in one event loop
the code of many calls takes turns.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple

NOBODY = -1
_SIZE = 32


class Running(NamedTuple):
    """The call whose code runs."""

    call: int
    """Number of the call; NOBODY if no code of a call runs."""
    since: float
    """Time (time.monotonic()) at which the code began to run without a break."""
    cpu: float
    """Seconds of CPU time that the process had used by then."""
    pid: int


class Mark:
    """The shared memory. The parent makes it, and gives the descriptor to the child."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Open the memory behind `descriptor`, which is the mark's from now on; None makes new memory. Needs Linux."""
        self.descriptor = os.memfd_create("parity-mark") if descriptor is None else descriptor
        if descriptor is None:
            os.truncate(self.descriptor, _SIZE)
        memory = mmap.mmap(self.descriptor, _SIZE)
        self._numbers, self._times = memoryview(memory)[:16].cast("q"), memoryview(memory)[16:].cast("d")
        self.clear()
        self._numbers[1] = os.getpid()

    def set(self, call: int) -> None:
        """Say that code of `call` runs from now on."""
        # The times come first: a new call with an old time would seem to hang.
        self._times[0], self._times[1] = time.monotonic(), time.process_time()
        self._numbers[0] = call

    def clear(self) -> None:
        """Say that no code of a call runs."""
        self._numbers[0] = NOBODY

    def read(self) -> Running:
        """What the child has written last."""
        call, since, cpu = self._numbers[0], *self._times
        return Running(call if call == self._numbers[0] else NOBODY, since, cpu, self._numbers[1])

    def close(self) -> None:
        """Give the descriptor back; what was written can still be read."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
