"""A pool of killable workers that score: submit(key, item) -> poll() -> (key, Outcome).

Each worker is a process (`rollout/rewards/child.py`) with a thread of the pool that feeds the process and checks the
deadline. A worker that passes its deadline, dies or answers nonsense is killed and replaced: a hang, a segfault or an
endless allocation costs one batch of responses, never the pool. No response is scored twice: a response that hung once
would hang again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson

from rollout.processes.child_process import START_TIMEOUT_S, ChildProcess, described

GRACE_S = 30.0
"""Seconds after all deadlines; a pool that is silent for longer is broken."""
START_TRIES = 3
"""Number of starts of a process before a thread gives up: a fork can fail for a moment."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds until a thread has seen that its process was killed."""
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
    metrics: dict[str, float] = field(default_factory=dict)


class RewardPoolError(RuntimeError):
    """The reward function cannot be used at all; the message names the function and the cause."""


class _Task(NamedTuple):
    key: int
    item: bytes
    """The response with its prompt and answer, as JSON."""


@dataclass(kw_only=True, slots=True)
class _PoolState:
    """State shared by threads and pool. The threads do not reference the pool, or an unclosed pool would never end."""

    function: str
    memory_bytes: int
    timeout_s: float
    tasks: queue.SimpleQueue[_Task | None] = field(default_factory=queue.SimpleQueue)
    """Tasks in order of submission; None ends the thread that takes it."""
    done: queue.SimpleQueue[tuple[int, Outcome] | RewardPoolError] = field(default_factory=queue.SimpleQueue)
    closing: threading.Event = field(default_factory=threading.Event)
    working: set[ChildProcess] = field(default_factory=set)
    """The processes that have started and not been killed."""

    def close(self, num_workers: int) -> None:
        self.closing.set()
        for _ in range(num_workers):
            self.tasks.put(None)
        for process in tuple(self.working):  # the thread of a killed process hears the end of its output
            process.kill()

    def take(self, count: int) -> list[_Task]:
        """Up to `count` further tasks, without waiting for new tasks."""
        batch: list[_Task] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < count:
                task = self.tasks.get_nowait()
                if task is None:  # for another thread, or for this one after the batch
                    self.tasks.put(None)
                    break
                batch.append(task)
        return batch


class RewardPool:
    """A pool of workers that start with the first item. Usable from one thread."""

    def __init__(self, function: str, *, num_workers: int, timeout_s: float, memory_bytes: int) -> None:
        """`timeout_s` is the deadline of one call of the function; `memory_bytes` bounds a worker's address space."""
        self._state = _PoolState(function=function, memory_bytes=memory_bytes, timeout_s=timeout_s)
        self._num_workers = num_workers
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._state.close, num_workers)

    def check(self) -> None:
        """Load the function once, in a process that ends at once. Raises RewardPoolError when it cannot be loaded."""
        try:
            _Worker(self._state).kill()
        except (_WorkerFailed, OSError) as error:
            raise _not_started(self._state.function, error) from error

    def submit(self, key: int, item: Mapping[str, Any]) -> None:
        """Queue `item`, a mapping with response, answer and prompt; `key` comes back with its outcome."""
        try:
            line = orjson.dumps(item)
        except TypeError as error:  # JSON cannot hold the item, such as a row nested hundreds deep
            message = f"the prompt's row cannot be sent to the function: {error}"
            self._state.done.put((key, Outcome(failure=Failure.error, message=message)))
            return
        if not self._threads:
            for number in range(self._num_workers):
                name = f"parity-reward-{number}"
                self._threads.append(threading.Thread(target=_serve, args=(self._state,), name=name, daemon=True))
                self._threads[-1].start()
        self._state.tasks.put(_Task(key, line))

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """Keys and outcomes finished since the last call; waits at most `timeout_s` seconds for the first.

        Raises RewardPoolError when the function cannot be loaded.
        """
        found: list[tuple[int, Outcome]] = []
        try:
            entry = self._state.done.get(timeout=max(0.0, timeout_s))
            while True:
                if isinstance(entry, RewardPoolError):
                    raise entry
                found.append(entry)
                entry = self._state.done.get_nowait()
        except queue.Empty:
            return found

    @property
    def patience_s(self) -> float:
        """Seconds after which a waiting response must have a verdict: a start, a call and the grace period."""
        return START_TIMEOUT_S + self._state.timeout_s + GRACE_S

    def close(self) -> None:
        """End every worker, in the middle of a call too; safe to call twice."""
        self._state.close(len(self._threads))
        for thread in self._threads:
            thread.join(timeout=CLOSE_TIMEOUT_S)
        self._threads = []


def _serve(state: _PoolState) -> None:
    """Body of a thread: take tasks and let a worker answer them, until the pool is closed; replace a lost worker."""
    worker: _Worker | None = None
    try:
        while (task := state.tasks.get()) is not None and not state.closing.is_set():
            batch = [task]
            try:
                worker = worker or _started(state)
                batch += state.take(worker.at_once - 1)
                outcomes = worker.score([each.item for each in batch])
            except Exception as error:  # the thread must survive any error: the pool has only a few threads
                if worker is not None:
                    worker.kill()
                    worker = None
                if isinstance(error, RewardPoolError):
                    state.done.put(error)
                lost = error if isinstance(error, _WorkerFailed) else _WorkerFailed(Failure.crash, described(error))
                outcomes = [Outcome(failure=lost.failure, message=str(lost))] * len(batch)
            for scored, outcome in zip(batch, outcomes, strict=True):
                state.done.put((scored.key, outcome))
    finally:
        if worker is not None:
            worker.kill()


def _started(state: _PoolState) -> _Worker:
    """A new worker. Raises RewardPoolError after START_TRIES starts without success."""
    failed_starts = 0
    while True:
        try:
            return _Worker(state)
        except (_WorkerFailed, OSError) as error:
            failed_starts += 1
            # A function that did not load within the whole timeout will not load in a second try.
            out_of_time = isinstance(error, _WorkerFailed) and error.failure is Failure.timeout
            if failed_starts == START_TRIES or out_of_time or state.closing.wait(RETRY_S):
                raise _not_started(state.function, error) from error


def _not_started(function: str, error: Exception) -> RewardPoolError:
    return RewardPoolError(f"reward.function={function}: a worker did not start: {error}")


class _WorkerFailed(Exception):
    """A worker did not answer, died, or answered nonsense."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


class _Worker:
    """A process with its function loaded, which answers one request at a time."""

    def __init__(self, state: _PoolState) -> None:
        """Start the process and wait until the function is loaded. Raises _WorkerFailed, and OSError of the start."""
        self._timeout_s = state.timeout_s
        self._working = state.working
        self._heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._process = ChildProcess(
            "rollout.rewards.child", state.function, memory_bytes=state.memory_bytes, hear=self._heard.put
        )
        self._working.add(self._process)
        try:
            if state.closing.is_set():  # `close` may have missed this process
                raise _WorkerFailed(Failure.crash, "the pool is closed")
            greeting = self._answer(START_TIMEOUT_S)
            if not isinstance(greeting, dict) or not ("failed" in greeting or "at_once" in greeting):
                raise _WorkerFailed(Failure.crash, f"the worker began with {greeting!r:.100}")
            if "failed" in greeting:
                raise _WorkerFailed(Failure.error, greeting["failed"])
        except BaseException:
            self.kill()
            raise
        self.at_once = int(greeting["at_once"])
        """Number of responses per call."""

    def score(self, items: Sequence[bytes]) -> list[Outcome]:
        """One outcome per item, in order. Raises _WorkerFailed; the worker is then of no more use."""
        self._process.say(b"[" + b",".join(items) + b"]")
        replies = self._answer(self._timeout_s)
        if not isinstance(replies, list) or len(replies) != len(items):
            raise _WorkerFailed(Failure.crash, "the worker answered something else than what it was asked")
        return [_outcome(reply) for reply in replies]

    def kill(self) -> None:
        """End the process and all its descendants."""
        self._working.discard(self._process)
        self._process.kill()

    def _answer(self, timeout_s: float) -> Any:
        """The next line of the process as JSON. Waits until the deadline, whatever the process does."""
        try:
            line = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            raise _WorkerFailed(Failure.timeout, f"no answer within {timeout_s:g} s") from None
        if line is None:
            raise _WorkerFailed(Failure.crash, f"the worker {self._process.death()}")
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _WorkerFailed(Failure.crash, f"the worker answered {line[:100]!r}, which is no JSON") from error


def _outcome(reply: object) -> Outcome:
    """The Outcome of a worker's reply to one item. Raises _WorkerFailed for a reply that no worker of Parity sends."""
    if not isinstance(reply, dict):
        raise _WorkerFailed(Failure.crash, f"the worker answered {reply!r:.100}")
    if "error" in reply:
        return Outcome(failure=Failure.error, message=str(reply["error"]))
    correct, score = reply.get("correct"), reply.get("score")
    metrics = reply.get("metrics") or {}
    if not (
        isinstance(correct, bool | None)
        and isinstance(score, int | float | None)
        and isinstance(metrics, dict)
        and all(isinstance(value, int | float) for value in metrics.values())
    ):
        raise _WorkerFailed(Failure.crash, f"the worker answered {reply!r:.100}")
    return Outcome(correct=correct, score=score, metrics=metrics)
