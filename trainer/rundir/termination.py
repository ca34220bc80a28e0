"""SIGTERM and Ctrl-C as requests: the running step is finished and saved, then the run ends.

Used by `trainer/run/loop.py`.

The exit codes are what a shell reports for a process that the signal ended: 143 for SIGTERM, 130 for Ctrl-C; that of
the guard is 3.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

REQUESTS = (signal.SIGTERM, signal.SIGINT)
STOPPED_BY_GUARD = 3
"""Exit code of a run that the guard ended."""
_STDERR = 2


class RunTerminated(Exception):
    """The run ended early because it was asked to."""

    def __init__(self, request: signal.Signals, *, step: int) -> None:
        """`step` is the last one that was completed."""
        super().__init__(f"asked to end ({request.name}), after step {step}")
        self.exit_code = 128 + request


class StoppedByGuard(RunTerminated):
    """The guard ended the run (guard.highest=stop)."""

    def __init__(self, *, step: int) -> None:
        """`step` is the last one that was completed; it was saved."""
        Exception.__init__(self, f"stopped by the guard after step {step} (events.jsonl says why)")
        self.exit_code = STOPPED_BY_GUARD


@dataclass(slots=True)
class Termination:
    """Whether the run was asked to end."""

    request: signal.Signals | None = None
    """The signal that asked."""


def end_at_sigterm() -> None:
    """Answer SIGTERM with SystemExit, which lets every `with` clean up, and the exit code of a shell.

    Ray puts a handler there that exits with 15. Outside the main thread nothing can be set, by Ray neither.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(_STDERR, b"\nSIGTERM: ends at once\n")
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


@contextmanager
def termination_requests(then: str) -> Iterator[Termination]:
    """Record SIGTERM and SIGINT instead of dying of them; a second one of either does what it did before.

    `then` is told to who asks: what happens before the end.
    Signals reach the main thread only: a run in another thread cannot be asked.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return

    def ask(number: int, frame: FrameType | None) -> None:
        termination.request = signal.Signals(number)
        restore()
        # Not through the console, whose lock the interrupted code may hold.
        text = f"\n{termination.request.name}: {then}; the next signal ends at once\n"
        os.write(_STDERR, text.encode())

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.getsignal(number) for number in REQUESTS}
    for number in REQUESTS:
        signal.signal(number, ask)
    try:
        yield termination
    finally:
        restore()
