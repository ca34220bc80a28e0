"""SIGTERM and Ctrl-C as requests: the running step is finished and saved, then the run ends.

`trainer/run/loop.py` uses this file.

The exit codes are the shell's codes for a process ended by the signal: 143 for SIGTERM, 130 for Ctrl-C. A run ended by
the guard exits with 3.
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
    """The run ended early because of a request."""

    def __init__(self, request: signal.Signals, *, step: int) -> None:
        """`step` is the last completed step."""
        super().__init__(f"asked to end ({request.name}), after step {step}")
        self.exit_code = 128 + request


class StoppedByGuard(RunTerminated):
    """The guard ended the run (guard.highest=stop)."""

    def __init__(self, *, step: int) -> None:
        """`step` is the last completed step; it was saved."""
        Exception.__init__(self, f"stopped by the guard after step {step} (events.jsonl says why)")
        self.exit_code = STOPPED_BY_GUARD


@dataclass(slots=True)
class Termination:
    """Record of a request to end the run."""

    request: signal.Signals | None = None
    """The signal of the request; None without a request."""


def end_at_sigterm() -> None:
    """Answer SIGTERM with SystemExit, which lets every `with` clean up, and the exit code of a shell.

    Ray installs a handler that exits with 15. Outside the main thread no handler can be installed, by Ray neither.
    """

    def end(number: int, frame: FrameType | None) -> None:
        os.write(_STDERR, b"\nSIGTERM: ends at once\n")
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)


@contextmanager
def termination_requests(then: str) -> Iterator[Termination]:
    """Record SIGTERM and SIGINT instead of ending; a second signal of either kind has its original effect.

    `then` is printed for the user: the work before the end. Signals reach the main thread only: a run in another thread
    receives no request.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return

    def ask(number: int, frame: FrameType | None) -> None:
        termination.request = signal.Signals(number)
        restore()
        # os.write instead of the console, whose lock the interrupted code may hold.
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
