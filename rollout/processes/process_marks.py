"""Processes that must be gone when their worker is: marked so that no other one is taken for them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)


class ProcessMark(NamedTuple):
    """One process of a machine; its id alone may come to be another's."""

    pid: int
    created: float
    """Seconds since the epoch."""


def mark_processes(pids: Iterable[int]) -> tuple[ProcessMark, ...]:
    """Marks of those among `pids` that run."""
    marks = []
    for pid in pids:
        try:
            marks.append(ProcessMark(pid, psutil.Process(pid).create_time()))
        except psutil.NoSuchProcess:
            logger.debug("process %d has ended", pid)
    return tuple(marks)


def kill_processes(marks: Sequence[ProcessMark]) -> None:
    """Kill those that still run; does not wait for their end."""
    for mark in marks:
        try:
            process = psutil.Process(mark.pid)
            if process.create_time() == mark.created:
                process.kill()
        except psutil.NoSuchProcess:
            logger.debug("process %d has ended", mark.pid)
