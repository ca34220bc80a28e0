"""The parent's side of one process of rollout functions: say(message), and its messages in a common inbox."""

from __future__ import annotations

import queue
import threading
from typing import Any, NamedTuple

import orjson

from rollout.processes.child_process import ChildProcess


class Said(NamedTuple):
    """A message of a worker."""

    worker: EpisodeWorker
    message: dict[str, Any] | None
    """The message as JSON values; None if the worker's output has ended."""


Inbox = queue.SimpleQueue[Said]


class EpisodeWorker:
    """A process with a thread for each direction, so that neither a full nor an empty pipe stops the trainer."""

    def __init__(self, function: str, *, memory_bytes: int, inbox: Inbox) -> None:
        self._process = ChildProcess("rollout.episodes.child", function, memory_bytes=memory_bytes)
        self._inbox = inbox
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.ready = False
        """True once the worker has loaded its function."""
        self.running: int | None = None
        """Episode whose user code the worker reported last."""
        for target, name in ((self._read, "reads"), (self._write, "writes")):
            threading.Thread(target=target, name=f"parity-episodes-{name}", daemon=True).start()

    def say(self, message: dict[str, Any]) -> None:
        """Queue a message for the worker; returns at once."""
        self._outbox.put(orjson.dumps(message) + b"\n")

    def kill(self) -> None:
        """End the process and all its descendants."""
        self._outbox.put(None)
        self._process.kill()

    def death(self) -> str:
        """Describe the end of the process."""
        return self._process.death()

    def _read(self) -> None:
        try:
            for line in self._process.output:
                self._inbox.put(Said(self, orjson.loads(line)))
        except (OSError, ValueError):
            # The pipe was closed by `kill`, or the process wrote invalid data; the worker has ended either way.
            self._inbox.put(Said(self, None))
            return
        self._inbox.put(Said(self, None))

    def _write(self) -> None:
        while (line := self._outbox.get()) is not None:
            try:
                self._process.input.write(line)
            except (OSError, ValueError):
                return  # the reading side reports the death
