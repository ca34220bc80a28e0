"""SIGTERM as a request: the running step is finished and saved, then the run ends. Used by `trainer/loop.py`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_CODE = 143
"""128 + SIGTERM: what a shell reports for a process that the signal ended."""


class RunTerminated(Exception):
    """The run ended early because it was asked to."""


@dataclass(slots=True)
class Termination:
    """Whether the run was asked to end."""

    requested: bool = False


@contextmanager
def termination_requests() -> Iterator[Termination]:
    """Record SIGTERM instead of dying of it; a second one ends the process as before.

    Signals reach the main thread only: a run in another thread cannot be asked.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return

    def ask(number: int, frame: FrameType | None) -> None:
        termination.requested = True
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield termination
    finally:
        signal.signal(signal.SIGTERM, before)
