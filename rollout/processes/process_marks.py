"""Marks of processes that must end with their worker; a mark is never that of a later process with the same id."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)


class ProcessMark(NamedTuple):
    """One process of a machine, by id and start time, because the system may give the id to another process later."""

    pid: int
    created: float
    """Start of the process, seconds since the epoch."""


def mark_processes(pids: Iterable[int]) -> tuple[ProcessMark, ...]:
    """Marks of the processes in `pids` that still run."""
    marks = []
    for pid in pids:
        try:
            marks.append(ProcessMark(pid, psutil.Process(pid).create_time()))
        except psutil.NoSuchProcess:
            logger.debug("process %d has ended", pid)
    return tuple(marks)


def kill_processes(marks: Sequence[ProcessMark]) -> None:
    """Kill the marked processes that still run; does not wait for their end."""
    for mark in marks:
        try:
            process = psutil.Process(mark.pid)
            if process.create_time() == mark.created:
                process.kill()
        except psutil.NoSuchProcess:
            logger.debug("process %d has ended", mark.pid)
