"""A pool of killable workers that score: submit(key, item) -> poll() -> (key, Outcome).

Each worker is a process (`rollout/rewards/child.py`) with a thread of the pool that feeds the process and checks the
deadline. A worker that passes its deadline, dies or answers nonsense is killed and replaced: a hang, a segfault or an
endless allocation costs one response, never the pool. If a call with many responses fails, each is tried alone. A
response that was alone is blamed for what its worker does, unless another program may have ended the worker.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson

from rollout.processes.child_process import MAX_ERROR_CHARS, START_TIMEOUT_S, ChildProcess, ChildStartError, described
from rollout.rewards.custom import MAX_SCORE

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds after all deadlines; a pool that is silent for longer is broken."""
START_TRIES = 3
"""Number of workers, each lost before it had loaded its function, after which a thread gives up."""
RETRY_S = 1.0
"""Seconds between two such workers."""
ALONE_TRIES = 3
"""Number of calls for one response whose worker is lost each time without proof against the response."""
MAX_ALONE_FAILURES = 3
"""Responses of one failed call that may fail alone too; then the rest is given up, for the cause is none of them."""
CLOSE_S = 5.0
"""Seconds for a thread to notice that its worker was killed."""


class Failure(Enum):
    """Kind of failure to score a response; the value names the metric reward/<value> that counts such responses."""

    timeout = "timeouts"
    """The worker did not answer within the deadline and was killed."""
    crash = "crashes"
    """The worker died: a segfault, an exit, too many processes or too much memory, or a signal of another program."""
    error = "errors"
    """The function raised, or returned a value that is not a score."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Result of scoring one response."""

    failure: Failure | None = None
    message: str = ""
    """Description of the failure; "" without a failure."""
    proven: bool = False
    """True if the response is the cause of the failure: it was scored alone, in a worker that nobody else has ended."""
    correct: bool | None = None
    extracted: str | None = None
    """The answer that a built-in rule reads off the response; None if it reads none."""
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
    running: set[_Worker] = field(default_factory=set)
    was_loaded: bool = False
    """True once a worker has loaded the function; from then on a failure to load it is no fault of the function."""
    last_sign: float = field(default_factory=time.monotonic)
    """Time (time.monotonic()) at which a worker was last started, asked or heard."""

    def close(self, num_workers: int) -> None:
        self.closing.set()
        for _ in range(num_workers):
            self.tasks.put(None)
        for worker in list(self.running):
            worker.kill()

    def take(self, count: int) -> list[_Task]:
        """Up to `count` further tasks, without waiting for new tasks."""
        batch: list[_Task] = []
        with suppress(queue.Empty):
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
        """`timeout_s` is the deadline of one call of the function; `memory_bytes` bounds the address space of a worker,
        and the memory of a worker and its descendants together."""
        self._state = _PoolState(function=function, memory_bytes=memory_bytes, timeout_s=timeout_s)
        self._num_workers = num_workers
        self._threads: list[threading.Thread] = []
        self._unanswered = 0
        """Items that were submitted and whose outcome `poll` has not returned yet."""
        self._found: list[tuple[int, Outcome]] = []
        """Outcomes for the next `poll`."""
        weakref.finalize(self, self._state.close, num_workers)

    def submit(self, key: int, item: Mapping[str, Any]) -> None:
        """Queue `item`, a mapping with response, answer and prompt; `key` comes back with its outcome."""
        if not self._unanswered:
            self._state.last_sign = time.monotonic()
        self._unanswered += 1
        try:
            line = orjson.dumps(item)
        except TypeError as error:  # JSON cannot hold the item, such as a row nested hundreds deep
            message = f"the prompt's row cannot be sent to the function: {error}"
            self._state.done.put((key, Outcome(failure=Failure.error, message=message)))
            return
        self._state.tasks.put(_Task(key, line))
        self._start_threads()

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """Keys and outcomes finished since the last call; waits at most `timeout_s` seconds for the first.

        Raises RewardPoolError when the function cannot be loaded, or when nothing was heard of the workers for longer
        than a start or a call can take; the next call returns the outcomes that were there.
        """
        self._start_threads()
        with suppress(queue.Empty):
            entry = self._state.done.get(timeout=max(0.0, timeout_s) if not self._found else 0.0)
            while True:
                if isinstance(entry, RewardPoolError):
                    raise entry
                self._found.append(entry)
                entry = self._state.done.get_nowait()
        found, self._found = self._found, []
        self._unanswered -= len(found)
        patience_s = START_TIMEOUT_S + self._state.timeout_s + GRACE_S
        if self._unanswered and not found and time.monotonic() - self._state.last_sign > patience_s:
            raise RewardPoolError(
                f"reward.function={self._state.function}: the workers gave no sign of life for {patience_s:.0f} s"
            )
        return found

    def close(self) -> None:
        """Kill every worker, also in the middle of a call; safe to call twice."""
        self._state.close(len(self._threads))
        for thread in self._threads:
            thread.join(timeout=CLOSE_S)
        self._threads = []

    def _start_threads(self) -> None:
        """Start the threads that are missing; the next call asks again for a thread that the system does not give."""
        while self._unanswered and len(self._threads) < self._num_workers:
            name = f"parity-reward-{len(self._threads)}"
            thread = threading.Thread(target=_Place(self._state).serve, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("a thread of the reward pool was not started and is tried again: %s", error)
                return
            self._threads.append(thread)


class _Place:
    """The place of a thread for one worker, which is started when it is needed and replaced when it is lost."""

    def __init__(self, state: _PoolState) -> None:
        self._state = state
        self._worker: _Worker | None = None

    def serve(self) -> None:
        """Body of the thread: take tasks and let the worker answer them, until the pool is closed."""
        state = self._state
        try:
            while (task := state.tasks.get()) is not None and not state.closing.is_set():
                batch = [task]
                try:
                    batch += state.take(self._ready().at_once - 1)
                    for outcome in self._outcomes([each.item for each in batch]):
                        state.done.put((batch.pop(0).key, outcome))
                except Exception as error:  # the thread must survive any error: the pool has only a few threads
                    self._clear()
                    if isinstance(error, RewardPoolError):
                        state.done.put(error)
                    lost = Outcome(failure=Failure.crash, message=described(error))
                    for unanswered in batch:
                        state.done.put((unanswered.key, lost))
        finally:
            self._clear()

    def _ready(self) -> _Worker:
        """The worker. Raises RewardPoolError when it cannot be started."""
        if self._worker is None:
            self._worker = _started(self._state)
        return self._worker

    def _clear(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _outcomes(self, items: Sequence[bytes]) -> Iterator[Outcome]:
        """One outcome per item, in order, each as soon as it is known. Raises RewardPoolError."""
        if len(items) == 1:
            yield self._alone(items[0])
            return
        try:
            yield from self._score(items)
            return
        except _WorkerFailed as error:
            lost = Outcome(failure=error.failure, message=f"a call with {len(items)} responses: {error}")
        num_failed = 0
        for item in items:
            outcome = lost if num_failed >= MAX_ALONE_FAILURES else self._alone(item)
            num_failed += outcome.failure in (Failure.timeout, Failure.crash)
            yield outcome

    def _alone(self, item: bytes, *, tries: int = ALONE_TRIES) -> Outcome:
        """The outcome of an item that is asked for alone.

        A call that does not end is the item's fault. A crash is its fault if no item was asked for in the same worker
        before, and if the worker ended by itself. Without proof the item is tried again.
        """
        is_new = self._worker is None
        try:
            return self._score([item])[0]
        except _WorkerFailed as error:
            proven = error.failure is Failure.timeout or (is_new and not error.from_outside)
            if proven or tries == 1:
                return Outcome(failure=error.failure, message=str(error), proven=proven)
        return self._alone(item, tries=tries - 1)

    def _score(self, items: Sequence[bytes]) -> list[Outcome]:
        """One outcome per item of one call. Raises _WorkerFailed, and then the place is empty."""
        worker = self._ready()
        try:
            return worker.score(items)
        except _WorkerFailed:
            self._clear()
            raise


def _started(state: _PoolState, *, tries: int = START_TRIES) -> _Worker:
    """A new worker. Raises RewardPoolError when the function cannot be loaded.

    What a function does when it is loaded for the first time is its own fault; after that, or if its worker was lost, a
    failure can be one of the moment.
    """
    try:
        worker = _Worker(state)
    except (_WorkerFailed, ChildStartError) as error:
        text = f"reward.function={state.function}: a worker did not start: {error}"
        # `ChildProcess` has asked the system several times already.
        is_final = isinstance(error, ChildStartError) or (error.failure is not Failure.crash and not state.was_loaded)
        if is_final or tries == 1 or state.closing.wait(RETRY_S):
            raise RewardPoolError(text) from error
        logger.warning("%s; it is tried again", text)
        return _started(state, tries=tries - 1)
    state.was_loaded = True
    return worker


class _WorkerFailed(Exception):
    """A worker did not answer, died, or answered nonsense."""

    def __init__(self, failure: Failure, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.failure = failure
        self.from_outside = from_outside
        """True if another program may have ended the worker."""


class _Worker(ChildProcess):
    """A process with its function loaded, which answers one request at a time."""

    def __init__(self, state: _PoolState) -> None:
        """Start the process and wait until the function is loaded. Raises _WorkerFailed and ChildStartError."""
        self._state = state
        self._heard: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        state.last_sign = time.monotonic()
        heard = self._heard
        super().__init__(
            "rollout.rewards.child",
            state.function,
            memory_bytes=state.memory_bytes,
            hear=heard.put,
            unheard=heard.qsize,
        )
        state.running.add(self)
        try:
            if state.closing.is_set():  # then `close` may have passed this process over
                raise _WorkerFailed(Failure.crash, "the pool was closed")
            greeting = self._answer(START_TIMEOUT_S)
            if not isinstance(greeting, dict) or not ("failed" in greeting or "at_once" in greeting):
                raise _WorkerFailed(Failure.crash, f"the worker began with {greeting!r:.100}")
            if "failed" in greeting:
                raise _WorkerFailed(Failure.error, greeting["failed"])
            self.at_once = int(greeting["at_once"])
            """Number of responses per call."""
        except BaseException:
            self.kill()
            raise

    def score(self, items: Sequence[bytes]) -> list[Outcome]:
        """One outcome per item, in order. Raises _WorkerFailed; the worker is then of no more use."""
        if not self._heard.empty():  # a late line would be taken for the answer to this request
            raise _WorkerFailed(Failure.crash, f"the worker sent {self._line(0.0)[:100]!r} without being asked")
        self.say(b"[" + b",".join(items) + b"]")
        replies = self._answer(self._state.timeout_s)
        if not isinstance(replies, list) or len(replies) != len(items):
            raise _WorkerFailed(Failure.crash, "the worker answered something else than what it was asked")
        return [_outcome(reply) for reply in replies]

    def kill(self) -> None:
        """End the process and all its descendants."""
        super().kill()
        self._state.running.discard(self)

    def _answer(self, timeout_s: float) -> Any:
        """The next line of the process as JSON. Waits until the deadline, whatever the process does."""
        line = self._line(timeout_s)
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _WorkerFailed(Failure.crash, f"the worker answered {line[:100]!r}, which is no JSON") from error

    def _line(self, timeout_s: float) -> bytes:
        self._state.last_sign = time.monotonic()
        try:
            line = self._heard.get(timeout=timeout_s)
        except queue.Empty:
            raise _WorkerFailed(Failure.timeout, f"no answer within {timeout_s:g} s") from None
        self._state.last_sign = time.monotonic()
        if line is None:
            death = self.death()
            raise _WorkerFailed(Failure.crash, f"the worker {death.text}", from_outside=death.from_outside)
        return line


def _outcome(reply: object) -> Outcome:
    """The Outcome of a worker's reply to one item. Raises _WorkerFailed for a reply that no worker of Parity sends."""
    if not isinstance(reply, dict):
        raise _WorkerFailed(Failure.crash, f"the worker answered {reply!r:.100}")
    if "error" in reply:
        return Outcome(failure=Failure.error, message=str(reply["error"])[:MAX_ERROR_CHARS])
    correct, score, extracted = reply.get("correct"), reply.get("score"), reply.get("extracted")
    metrics = reply.get("metrics") or {}
    if not (
        isinstance(correct, bool | None)
        and isinstance(extracted, str | None)
        and (score is None or _is_score(score))
        and isinstance(metrics, dict)
        and all(_is_score(value) for value in metrics.values())
    ):
        raise _WorkerFailed(Failure.crash, f"the worker answered {reply!r:.100}")
    return Outcome(correct=correct, extracted=extracted, score=score, metrics=metrics)


def _is_score(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_SCORE
