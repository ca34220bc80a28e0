"""A pool of killable workers that score: submit(key, item) -> poll() -> (key, Outcome).

Each worker is a process (`rollout/rewards/child.py`) with a thread of the pool that feeds the process and checks the
deadline. A worker that passes its deadline, dies or answers nonsense is killed and replaced: a hang, a segfault or an
endless allocation costs one batch of responses, never the pool. No response is scored twice: a response that hung once
would hang again.
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

from rollout.processes.child_process import START_TIMEOUT_S, ChildProcess, described

GRACE_S = 30.0
"""Seconds after all deadlines; a pool that is silent for longer is broken."""
READ_BYTES = 1 << 16
START_TRIES = 3
"""Number of starts of a process before a thread gives up: a fork can fail for a moment."""
RETRY_S = 1.0
"""Seconds between two starts."""


class Failure(Enum):
    """Reason why a response has no score; the value names the metric reward/<value> that counts such responses."""

    timeout = "timeouts"
    """The worker did not answer within the deadline and was killed."""
    crash = "crashes"
    """The worker died: a segfault, an exit, or more memory than allowed."""
    error = "errors"
    """The function raised, or returned a value that is not a score."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of scoring one response."""

    failure: Failure | None = None
    message: str = ""
    """Description of the failure; "" without a failure."""
    correct: bool | None = None
    score: float | None = None
    """The reward of a custom function."""
    extracted: str | None = None
    """The answer that a built-in rule found."""
    metrics: dict[str, float] = field(default_factory=dict)


class RewardPoolError(RuntimeError):
    """The reward function cannot be used at all; the message names the function and the cause."""


class _Task(NamedTuple):
    key: int
    item: Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class _Work:
    """State shared by threads and pool. The threads do not reference the pool, or an unclosed pool would never end."""

    function: str
    memory_bytes: int
    timeout_s: float
    tasks: queue.SimpleQueue[_Task | None] = field(default_factory=queue.SimpleQueue)
    """Tasks in order of submission; None ends the thread that takes it."""
    done: queue.SimpleQueue[tuple[int, Outcome] | RewardPoolError] = field(default_factory=queue.SimpleQueue)
    closing: threading.Event = field(default_factory=threading.Event)
    sha256: str | None = None

    def close(self, num_workers: int) -> None:
        self.closing.set()
        for _ in range(num_workers):
            self.tasks.put(None)

    def take(self, count: int) -> list[_Task]:
        """Up to `count` further tasks, without waiting for new tasks."""
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
    """A pool of workers that start with the first item. Usable from one thread."""

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
        except (_ChildFailed, OSError) as error:
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
        """Keys and outcomes finished since the last call; waits at most `timeout_s` seconds for the first.

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
    def patience_s(self) -> float:
        """Seconds after which a waiting response must have a verdict: a start, a call and the grace period."""
        return START_TIMEOUT_S + self._work.timeout_s + GRACE_S

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the file of a custom function, once a worker has loaded the file."""
        return self._work.sha256

    def close(self) -> None:
        """End every worker; safe to call twice. Waits for the running call of each worker, at most its deadline."""
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
    """Body of a worker's thread: take tasks and let a process answer them, until the pool is closed."""
    worker = _Worker(work)
    try:
        while (task := work.tasks.get()) is not None and not work.closing.is_set():
            batch = [task]
            try:
                batch += work.take(worker.ready().at_once - 1)
                outcomes = worker.score([each.item for each in batch])
            except Exception as error:
                # The thread must survive any error: the pool has only a few threads.
                worker.discard()
                outcomes = [Outcome(failure=Failure.crash, message=described(error))] * len(batch)
                if isinstance(error, RewardPoolError):
                    work.done.put(error)
            for asked, outcome in zip(batch, outcomes, strict=True):
                work.done.put((asked.key, outcome))
    finally:
        worker.discard()


class _Worker:
    """A process that is started on demand, and replaced after a failure."""

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._child: _Child | None = None

    def ready(self) -> _Child:
        """The process, with its function loaded. Raises RewardPoolError after START_TRIES starts without success."""
        failed_starts = 0
        while self._child is None:
            try:
                self._child = _Child(self._work.function, memory_bytes=self._work.memory_bytes)
                self._work.sha256 = self._child.hello().get("sha256")
            except (_ChildFailed, OSError) as error:
                self.discard()
                failed_starts += 1
                # A function that did not load within the whole timeout will not load in a second try.
                out_of_time = isinstance(error, _ChildFailed) and error.failure is Failure.timeout
                if failed_starts == START_TRIES or out_of_time or self._work.closing.wait(RETRY_S):
                    raise _not_started(self._work.function, error) from error
        return self._child

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Outcome]:
        """One outcome per item; if the process fails, the failure is the outcome of all items."""
        child = self.ready()
        lines = [_line(item) for item in items]
        asked = [line for line in lines if isinstance(line, bytes)]
        try:
            answered = [_outcome(reply) for reply in child.ask(asked, self._work.timeout_s)] if asked else []
        except _ChildFailed as error:
            self.discard()
            answered = [Outcome(failure=error.failure, message=str(error))] * len(asked)
        in_order = iter(answered)
        return [next(in_order) if isinstance(line, bytes) else line for line in lines]

    def discard(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _line(item: Mapping[str, Any]) -> bytes | Outcome:
    """An item as a line of JSON; a failed Outcome if JSON cannot hold the item, such as a row nested hundreds deep."""
    try:
        return orjson.dumps(item)
    except TypeError as error:
        return Outcome(failure=Failure.error, message=f"the prompt's row cannot be sent to the function: {error}")


def _outcome(reply: object) -> Outcome:
    """The Outcome of a worker's reply to one item. Raises _ChildFailed for a reply that no worker of Parity sends."""
    if not isinstance(reply, dict):
        raise _ChildFailed(Failure.crash, f"the worker answered {reply!r:.100}")
    if "error" in reply:
        return Outcome(failure=Failure.error, message=str(reply["error"]))
    correct, score, extracted = reply.get("correct"), reply.get("score"), reply.get("extracted")
    metrics = reply.get("metrics") or {}
    if not (
        isinstance(correct, bool | None)
        and isinstance(score, int | float | None)
        and isinstance(extracted, str | None)
        and isinstance(metrics, dict)
        and all(isinstance(value, int | float) for value in metrics.values())
    ):
        raise _ChildFailed(Failure.crash, f"the worker answered {reply!r:.100}")
    return Outcome(correct=correct, score=score, extracted=extracted, metrics=metrics)


def _not_started(function: str, error: Exception) -> RewardPoolError:
    return RewardPoolError(f"reward.function={function}: a worker did not start: {error}")


def _reply(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _ChildFailed(Failure.crash, f"the worker answered {line[:100]!r}, which is no JSON") from error


class _ChildFailed(Exception):
    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class _Child:
    """One process, which answers one request at a time."""

    def __init__(self, function: str, *, memory_bytes: int) -> None:
        self._process = ChildProcess("rollout.rewards.child", function, memory_bytes=memory_bytes)
        os.set_blocking(self._process.input.fileno(), False)
        os.set_blocking(self._process.output.fileno(), False)
        self._received = b""
        self.at_once = 1

    def hello(self) -> dict[str, Any]:
        """The greeting that the process sends after loading the function."""
        said = self._exchange(b"", timeout_s=START_TIMEOUT_S)
        if not isinstance(said, dict) or not ("failed" in said or "at_once" in said):
            raise _ChildFailed(Failure.crash, f"the worker began with {said!r:.100}")
        if "failed" in said:
            raise _ChildFailed(Failure.error, said["failed"])
        self.at_once = int(said["at_once"])
        return dict(said)

    def ask(self, items: Sequence[bytes], timeout_s: float) -> list[Any]:
        """One reply per item; items and replies are JSON."""
        replies = self._exchange(b"[" + b",".join(items) + b"]\n", timeout_s=timeout_s)
        if not isinstance(replies, list) or len(replies) != len(items):
            raise _ChildFailed(Failure.crash, "the worker answered something else than what it was asked")
        return replies

    def kill(self) -> None:
        """End the process and all its descendants."""
        self._process.kill()

    def _exchange(self, message: bytes, *, timeout_s: float) -> Any:
        """Send `message`, return the next line as JSON. The call ends at the deadline, whatever the process does."""
        deadline = time.monotonic() + timeout_s
        to, of = self._process.input.fileno(), self._process.output.fileno()
        left = memoryview(message)
        while True:
            line, separator, rest = self._received.partition(b"\n")
            if separator:
                self._received = rest
                return _reply(line)
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
