"""One process of a pool, and the calls that it has."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from rollout.processes.child_process import ChildProcess
from rollout.user_code.mark import Mark, Running

MEMORY_BYTES = 16 * 2**30
"""Address space of a process, and memory of a process and its descendants together: room for a reward model."""
STARVED = 20.0
"""Times the deadline that code may take on a machine on which others compute too."""
QUEUED = 2
"""Calls that a process which makes one at a time has: the one that runs, and the next."""


class Kind(NamedTuple):
    """A kind of user code."""

    section: str
    """The config section with the key `function` and the keys of the policy, for messages."""
    module: str
    """The module that the process runs."""
    read: Callable[[Any], Any]
    """Reply of a worker -> value of the outcome. Raises ValueError for a reply that no worker of Parity sends."""
    read_question: Callable[[Any], Any] | None = None
    """The same for a question; None if calls ask nothing."""


@dataclass(eq=False, kw_only=True, slots=True)
class Task:
    """An item that was submitted, until its outcome is known."""

    key: int
    item: bytes
    tries: int = 0
    """Failed tries."""
    proven: int = 0
    """Those among them in which the code of the item was seen to end its process."""


@dataclass(eq=False, kw_only=True, slots=True)
class Call:
    """One call of the function, for one item or several."""

    number: int
    tasks: list[Task]
    since: float
    """Time from which its deadline counts; infinite while it waits for an answer."""
    has_begun: bool = False
    """True once its process has said that it has begun; a process that makes one call at a time does not say it."""


class Said(NamedTuple):
    """A line of a worker; None if its output has ended."""

    worker: Worker
    line: bytes | None
    at: float


class Worker(ChildProcess):
    """A process with its function."""

    def __init__(self, kind: Kind, arguments: Sequence[str], inbox: queue.SimpleQueue[Any]) -> None:
        """Raises ChildStartError."""
        self.calls: dict[int, Call] = {}
        """The calls that the process has, in the order in which it got them."""
        self.items = 0
        """Most items of a call; 0 until the function is loaded."""
        self.overlaps = False
        """True if the process makes several calls at a time."""
        self.since = self.heard = time.monotonic()
        """Times of its start and of its last line."""
        self._mark = Mark()
        try:
            super().__init__(
                kind.module,
                str(MEMORY_BYTES),
                str(self._mark.descriptor),
                *arguments,
                descriptors=[self._mark.descriptor],
                hear=lambda line: inbox.put(Said(self, line, time.monotonic())),
                unheard=inbox.qsize,
            )
        finally:
            self._mark.close()

    @property
    def running(self) -> Running:
        """The call whose code runs, or ran when the process ended."""
        return self._mark.read()

    @staticmethod
    def is_starved(running: Running, limit_s: float) -> bool:
        """True if the code of `running` computes, and has not had `limit_s` seconds of a CPU, nor STARVED times as long
        to get them: other programs keep the machine busy, and that is no fault of the code."""
        if time.monotonic() - running.since > STARVED * limit_s:
            return False
        with suppress(psutil.Error):
            process = psutil.Process(running.pid)
            used = process.cpu_times()
            return process.status() == psutil.STATUS_RUNNING and used.user + used.system - running.cpu < limit_s
        return False

    def active_since(self, call: Call) -> float:
        """Time from which on something must be heard of a call."""
        return call.since if call.has_begun else max(call.since, self.heard)

    def free(self, max_open: int) -> int:
        """Number of calls that the process can get."""
        return (max_open if self.overlaps else QUEUED) - len(self.calls) if self.items else 0
