"""A pool of killable workers that score: submit(key, item) -> poll() -> (key, Outcome).

Each worker is a process (`rollout/rewards/child.py`) with a thread here that feeds it and watches the clock. A worker
that passes its deadline, dies or answers nonsense is killed and replaced: a hang, a segfault or an allocation without
end costs one response, never the pool. Nothing is tried twice: what hung once would hang again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson

from rollout.child_process import START_TIMEOUT_S, ChildProcess

READ_BYTES = 1 << 16


class Failure(Enum):
    """Why a response has no score; the value names the metric reward/<value> that counts it."""

    timeout = "timeouts"
    """No answer within the deadline; the worker was killed."""
    crash = "crashes"
    """The worker died: a segfault, an exit, more memory than it may have."""
    error = "errors"
    """The function raised, or returned what is no score."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What became of one response."""

    failure: Failure | None = None
    message: str = ""
    """What went wrong."""
    correct: bool | None = None
    score: float | None = None
    """The reward of a custom function."""
    extracted: str | None = None
    """The answer that a built-in rule found."""
    metrics: dict[str, float] = field(default_factory=dict)


class RewardPoolError(RuntimeError):
    """The reward function cannot be used at all; names it and what happened."""


class _Task(NamedTuple):
    key: int
    item: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class _Work:
    """What the threads share with the pool. They do not hold the pool itself, or one that nobody closes never ended."""

    function: str
    memory_bytes: int
    timeout_s: float
    tasks: queue.SimpleQueue[_Task | None] = field(default_factory=queue.SimpleQueue)
    """None ends the thread that takes it."""
    done: queue.SimpleQueue[tuple[int, Outcome] | RewardPoolError] = field(default_factory=queue.SimpleQueue)
    closing: threading.Event = field(default_factory=threading.Event)
    sha256: str | None = None

    def close(self, num_workers: int) -> None:
        self.closing.set()
        for _ in range(num_workers):
            self.tasks.put(None)

    def take(self, count: int) -> list[_Task]:
        """Up to `count` further tasks, without waiting."""
        taken: list[_Task] = []
        while len(taken) < count:
            try:
                task = self.tasks.get_nowait()
            except queue.Empty:
                break
            if task is None:
                self.tasks.put(None)
                break
            taken.append(task)
        return taken


class RewardPool:
    """Workers that start with the first item. Usable from one thread."""

    def __init__(self, function: str, *, num_workers: int, timeout_s: float, memory_bytes: int) -> None:
        """`timeout_s` is the deadline of one call of the function; `memory_bytes` bounds a worker's address space."""
        self._work = _Work(function=function, memory_bytes=memory_bytes, timeout_s=timeout_s)
        self._num_workers = num_workers
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._work.close, num_workers)

    def check(self) -> None:
        """Load the function once, in a process that ends at once. Raises RewardPoolError when it cannot be loaded."""
        child = None
        try:
            child = _Child(self._work.function, memory_bytes=self._work.memory_bytes)
            child.hello()
        except _ChildFailed as error:
            raise _not_started(self._work.function, error) from error
        finally:
            if child is not None:
                child.kill()

    def submit(self, key: int, item: Mapping[str, Any]) -> None:
        """Queue `item`, a mapping with response, answer and prompt; `key` comes back with its outcome."""
        if not self._threads:
            self._start()
        self._work.tasks.put(_Task(key, item))

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """What is done since the last call; waits at most `timeout_s` seconds for the first.

        Raises RewardPoolError when the function cannot be loaded.
        """
        found: list[tuple[int, Outcome]] = []
        wait = timeout_s > 0
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._work.done.get(block=wait, timeout=timeout_s if wait else None)
                if isinstance(entry, RewardPoolError):
                    raise entry
                found.append(entry)
                wait = False
        return found

    @property
    def sha256(self) -> str | None:
        """Of the file of a custom function, once a worker has loaded it."""
        return self._work.sha256

    def close(self) -> None:
        """End every worker; safe to call twice. Waits for the call that a worker is in, at most its deadline."""
        self._work.close(len(self._threads))
        for thread in self._threads:
            thread.join(timeout=self._work.timeout_s + START_TIMEOUT_S)
        self._threads = []

    def _start(self) -> None:
        for number in range(self._num_workers):
            name = f"parity-reward-{number}"
            thread = threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)


def _serve(work: _Work) -> None:
    """One worker's thread: take tasks, have the process answer them, replace the process when it fails."""
    child: _Child | None = None
    try:
        while (task := work.tasks.get()) is not None and not work.closing.is_set():
            if child is None:
                child = _Child(work.function, memory_bytes=work.memory_bytes)
                work.sha256 = child.hello().get("sha256")
            batch = [task, *work.take(child.at_once - 1)]
            try:
                outcomes = [_outcome(reply) for reply in child.ask([each.item for each in batch], work.timeout_s)]
            except _ChildFailed as error:
                child.kill()
                child = None
                outcomes = [Outcome(failure=error.failure, message=str(error))] * len(batch)
            for asked, outcome in zip(batch, outcomes, strict=True):
                work.done.put((asked.key, outcome))
    except _ChildFailed as error:
        work.done.put(_not_started(work.function, error))
    finally:
        if child is not None:
            child.kill()


def _outcome(reply: Mapping[str, Any]) -> Outcome:
    if "error" in reply:
        return Outcome(failure=Failure.error, message=str(reply["error"]))
    return Outcome(
        correct=reply.get("correct"),
        score=reply.get("score"),
        extracted=reply.get("extracted"),
        metrics=reply.get("metrics") or {},
    )


def _not_started(function: str, error: _ChildFailed) -> RewardPoolError:
    return RewardPoolError(f"reward.function={function}: a worker did not start: {error}")


class _ChildFailed(Exception):
    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class _Child:
    """One process, asked one thing at a time."""

    def __init__(self, function: str, *, memory_bytes: int) -> None:
        self._process = ChildProcess("rollout.rewards.child", function, memory_bytes=memory_bytes)
        os.set_blocking(self._process.input.fileno(), False)
        os.set_blocking(self._process.output.fileno(), False)
        self._received = b""
        self.at_once = 1

    def hello(self) -> dict[str, Any]:
        """What the process says once it has loaded the function."""
        said = self._exchange(b"", timeout_s=START_TIMEOUT_S)
        if "failed" in said:
            self.kill()
            raise _ChildFailed(Failure.error, said["failed"])
        self.at_once = int(said["at_once"])
        return dict(said)

    def ask(self, items: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Any]:
        """One reply per item."""
        replies = self._exchange(orjson.dumps(items) + b"\n", timeout_s=timeout_s)
        if not isinstance(replies, list) or len(replies) != len(items):
            raise _ChildFailed(Failure.crash, "the worker answered something else than what it was asked")
        return replies

    def kill(self) -> None:
        """End the process and whatever it started."""
        self._process.kill()

    def _exchange(self, message: bytes, *, timeout_s: float) -> Any:
        """Send `message`, return the next line as JSON. Neither side can make this wait beyond the deadline."""
        deadline = time.monotonic() + timeout_s
        to, of = self._process.input.fileno(), self._process.output.fileno()
        left = memoryview(message)
        while True:
            line, separator, rest = self._received.partition(b"\n")
            if separator:
                self._received = rest
                return orjson.loads(line)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise _ChildFailed(Failure.timeout, f"no answer within {timeout_s:g} s")
            poll = select.poll()
            poll.register(of, select.POLLIN)
            if left:
                poll.register(to, select.POLLOUT)
            ready = {descriptor for descriptor, _ in poll.poll(remaining * 1000)}
            try:
                if to in ready:
                    left = left[os.write(to, left[:READ_BYTES]) :]
                if of in ready:
                    chunk = os.read(of, READ_BYTES)
                    if not chunk:
                        raise _ChildFailed(Failure.crash, f"the worker {self._process.death()}")
                    self._received += chunk
            except BrokenPipeError as error:
                raise _ChildFailed(Failure.crash, f"the worker {self._process.death()}") from error
