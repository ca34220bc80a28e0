"""Marks of processes that must end with their worker; a mark is never that of a later process with the same id."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Seconds between two looks at processes that are to end."""


class ProcessMark(NamedTuple):
    """One process of a machine, by id and start time, because the system may give the id to another process later."""

    pid: int
    started: int
    """Start of the process in clock ticks since the boot: a step of the wall clock does not change it."""


def mark_processes(pids: Iterable[int]) -> tuple[ProcessMark, ...]:
    """Marks of the processes in `pids` that still run."""
    return tuple(ProcessMark(pid, started) for pid in pids if (started := _started(pid)) is not None)


def kill_processes(marks: Sequence[ProcessMark]) -> None:
    """Kill the marked processes that still run; does not wait for their end."""
    signal_processes(marks, signal.SIGKILL)


def signal_processes(marks: Sequence[ProcessMark], number: signal.Signals) -> None:
    """Send a signal to the marked processes that still run."""
    for mark in marks:
        try:
            # The handle stays that of the process found now, also if its id goes to another process meanwhile.
            handle = os.pidfd_open(mark.pid)
        except ProcessLookupError:
            logger.debug("process %d has ended", mark.pid)
            continue
        try:
            if _started(mark.pid) == mark.started:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            logger.debug("process %d has ended", mark.pid)
        finally:
            os.close(handle)


def wait_for_end(marks: Sequence[ProcessMark], *, timeout_s: float) -> list[int]:
    """Wait until none of the marked processes runs, `timeout_s` seconds at most -> ids of those that still do.

    One whose parent has not asked for its exit status yet has ended: it holds no memory any more, nor a GPU's.
    """
    deadline = time.monotonic() + timeout_s
    while (left := [mark.pid for mark in marks if _runs(mark)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return left


def _runs(mark: ProcessMark) -> bool:
    try:
        return _started(mark.pid) == mark.started and psutil.Process(mark.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_suspended(mark: ProcessMark) -> bool:
    """True if the process was stopped, by SIGSTOP or by a debugger."""
    try:
        return psutil.Process(mark.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _started(pid: int) -> int | None:
    """Field 22 of /proc/<pid>/stat: the start of a process in clock ticks since the boot; None without the process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2, the name in parentheses, may hold spaces and parentheses itself.
    return int(stat.rpartition(b")")[2].split()[19])
