"""A pool of processes that run user code: submit(key, item) -> poll() -> Ended(key, outcome).

One thread serves all workers. It gives them calls, watches the deadlines, and decides what a failure means:

- A call that raises, waits too long or loses its process is made again, after a pause, up to `max_tries` times.
- A call that computes too long, or ends its process in every try, is to blame itself: its outcome is `proven`.
- A worker that hangs or dies is replaced. The other calls that it had begin again, and no try of theirs counts.
- When items fail and no call succeeds, a server may be away that the function asks: `outage.py` decides it. Then one
  call is tried at a time until one succeeds; the others wait, at most `outage_wait_s`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson

from rollout.processes.child_process import (
    MAX_ERROR_CHARS,
    START_TIMEOUT_S,
    ChildStartError,
    Death,
    described,
    with_remedy,
)
from rollout.task_config import CallsConfig
from rollout.user_code.mark import NOBODY
from rollout.user_code.outage import MAX_PAUSE_S, Outage
from rollout.user_code.worker import Call, Kind, Said, Task, Worker

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds after the deadline of an async call within which its process must have ended the call."""
NO_MESSAGE = (ValueError, TypeError, AttributeError)
"""What reading a line raises that no worker of Parity sends."""
PROBE = -1
"""Key of a task of the pool's own, which only shows whether calls succeed."""
START_TRIES = 3
"""Number of workers, each lost before it had loaded its function, after which the waiting calls are given up."""
RETRY_S = 1.0
"""Seconds between two such workers."""
TICK_S = 0.05
"""Seconds between two looks at the deadlines."""
CLOSE_S = 30.0
"""Seconds for the thread to end all workers."""


class Failure(Enum):
    """Kind of a failed call; the value names the metric that counts such calls."""

    timeout = "timeouts"
    """There was no answer within the deadline."""
    crash = "crashes"
    """The process died: a segfault, an exit, too many processes or too much memory, or a signal of another program."""
    error = "errors"
    """The function raised, or returned what it may not return."""


class Outcome(NamedTuple):
    """The end of a call."""

    value: Any = None
    """What the call returned; None after a failure."""
    failure: Failure | None = None
    message: str = ""
    """Description of the failure; "" without a failure."""
    proven: bool = False
    """True if the item is the cause of the failure."""


class Ended(NamedTuple):
    """The call for the item with `key` is over."""

    key: int
    outcome: Outcome


class Repeated(NamedTuple):
    """The call for the item with `key` is made again."""

    key: int
    failure: Failure | None
    """The failure of the try before; None if the call has only lost its process."""
    message: str


class Asked(NamedTuple):
    """A call asks something, and waits for `CallPool.answer`."""

    key: int
    call: int
    """Number of this try of the call."""
    question: int
    value: Any


class Withdrawn(NamedTuple):
    """A call does not wait any longer for the answer to its last question."""

    key: int
    call: int


Event = Ended | Repeated | Asked | Withdrawn


class UserCodeError(RuntimeError):
    """The function cannot be used at all; the message names the function and the cause."""

    def __init__(self, function: str, cause: str) -> None:
        super().__init__(f"{function}: {cause}")
        self.cause = cause


class CallPool:
    """Calls of one function. Its methods are for one thread; the workers start with the first item."""

    def __init__(
        self, kind: Kind, function: str, config: CallsConfig, *, max_open: int | None = None, more: Sequence[str] = ()
    ) -> None:
        """`max_open` is the largest number of open calls of an async function, None for no limit; `more` are further
        arguments of the processes."""
        self._core = _Core(kind, function, config, max_open, more)
        self._thread: threading.Thread | None = None
        self._found: list[Event] = []
        """Events for the next `poll`."""
        self._taken_s = 0.0
        weakref.finalize(self, self._core.inbox.put, None)

    def submit(self, key: int, item: object) -> None:
        """Queue `item`, JSON values; `key` comes back with its outcome."""
        try:
            line = orjson.dumps(item)
        except TypeError as error:  # JSON cannot hold the item, such as a row nested hundreds deep
            message = f"the prompt's row cannot be sent to the function: {error}"
            self._core.done.put(Ended(key, Outcome(failure=Failure.error, message=message)))
            return
        self._core.inbox.put(Task(key=key, item=line))
        self._start()

    def answer(self, asked: Asked, value: object) -> None:
        """Answer a question; nothing happens if the call is over, or does not wait any longer."""
        self._core.inbox.put(_Answer(asked, orjson.dumps(value)))

    def cancel(self, key: int) -> None:
        """Give the item with `key` up: its outcome does not come."""
        self._core.inbox.put(_Cancel(key))

    def poll(self, timeout_s: float) -> list[Event]:
        """What has happened since the last call, in order; waits at most `timeout_s` seconds for the first event.

        Raises UserCodeError when the function cannot be used; the next call returns the events that were there.
        """
        self._start()
        if self._core.failure is not None and not self._found and self._core.done.empty():
            raise self._core.failure
        with suppress(queue.Empty):
            event = self._core.done.get(timeout=max(0.0, timeout_s) if not self._found else 0.0)
            while True:
                if isinstance(event, UserCodeError):
                    raise event
                self._found.append(event)
                event = self._core.done.get_nowait()
        found, self._found = self._found, []
        return found

    @property
    def files(self) -> dict[str, str]:
        """Path of each of the user's own files that workers have loaded -> its `code_digest`."""
        return dict(self._core.files)

    def take_outage_s(self) -> float:
        """Seconds for which every call failed, of the outages that have ended since the last call."""
        before, self._taken_s = self._taken_s, self._core.outage.past_s
        return self._taken_s - before

    def close(self) -> None:
        """Kill every worker, also in the middle of a call; safe to call twice."""
        self._core.closing.set()
        self._core.inbox.put(None)
        if self._thread is not None:
            self._thread.join(timeout=CLOSE_S)

    def _start(self) -> None:
        """Start the thread if it is missing; the next call asks again for a thread that the system does not give."""
        if self._thread is not None or self._core.closing.is_set():
            return
        thread = threading.Thread(target=self._core.serve, name="parity-user-code", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("the thread of the calls of user code was not started and is tried again: %s", error)
            return
        self._thread = thread


class _Answer(NamedTuple):
    asked: Asked
    value: bytes


class _Cancel(NamedTuple):
    key: int


@dataclass(eq=False)
class _Core:
    """The thread's side of a pool. It does not hold the pool, or an unclosed pool would never end."""

    kind: Kind
    function: str
    config: CallsConfig
    max_open: int | None
    more: Sequence[str]
    inbox: queue.SimpleQueue[Task | _Answer | _Cancel | Said | None] = field(default_factory=queue.SimpleQueue)
    """What the thread has to do; None ends it."""
    done: queue.SimpleQueue[Event | UserCodeError] = field(default_factory=queue.SimpleQueue)
    failure: UserCodeError | None = None
    """Fault of the pool that has ended its thread; nothing is called any more."""
    closing: threading.Event = field(default_factory=threading.Event)
    workers: list[Worker] = field(default_factory=list)
    waiting: deque[Task] = field(default_factory=deque)
    """Tasks for the next calls, in their order."""
    alone: deque[Task] = field(default_factory=deque)
    """Tasks that are tried before those, each in a call of its own."""
    paused: list[tuple[float, int, Task]] = field(default_factory=list)
    """Heap of (time from which the task waits again, number, task)."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    has_told: bool = False
    """True once a failed call was logged."""
    lost_loading: int = 0
    """Workers in a row that were lost before they had loaded the function."""
    was_loaded: bool = False
    """True once a worker has loaded the function; from then on a failure to load it is no fault of the function."""
    outage: Outage = field(init=False)
    start_at: float = 0.0
    """Time before which no worker is started."""
    files: dict[str, str] = field(default_factory=dict)
    """The user's own files that workers have loaded, each with its digest."""

    def __post_init__(self) -> None:
        self.outage = Outage(self.config, self._name, f"{self.kind.section}.outage_wait_s")

    # ---------------------------------------------------------------- the thread

    def serve(self) -> None:
        """Body of the thread."""
        try:
            while self._take():
                self._check_deadlines()
                if what := self.outage.end_in_vain():
                    self._give_up(Failure.error, what)
                self._give_out()
        except Exception as error:  # a fault of the pool must not look like a slow function
            logger.exception("%s: the pool of its processes failed", self._name)
            self.failure = UserCodeError(self._name, f"the pool of its processes failed: {described(error)}")
            self.done.put(self.failure)
        finally:
            for worker in self.workers:
                worker.kill()

    def _take(self) -> bool:
        """Handle what has come in; waits for it at most TICK_S if there is anything to do. False at the end."""
        is_busy = self._num_waiting or any(worker.calls or not worker.items for worker in self.workers)
        with suppress(queue.Empty):
            entry = self.inbox.get(timeout=TICK_S if is_busy else None)
            while not self.closing.is_set():
                match entry:
                    case None:
                        return False
                    case Task():
                        self.waiting.append(entry)
                    case _Answer(asked, value):
                        self._pass_on(asked, value)
                    case _Cancel(key):
                        self._cancel(key)
                    case Said(worker, line, at) if worker in self.workers:
                        self._heed(worker, line, at)
                entry = self.inbox.get_nowait()
        return not self.closing.is_set()

    @property
    def _name(self) -> str:
        return f"{self.kind.section}.function={self.function}"

    @property
    def _num_waiting(self) -> int:
        return len(self.waiting) + len(self.alone) + len(self.paused)

    # ---------------------------------------------------------------- calls

    def _give_out(self) -> None:
        """Start the workers that are missing, and give calls to those that have room."""
        if not self._num_waiting:
            return
        try:
            while len(self.workers) < self.config.num_workers and time.monotonic() >= self.start_at:
                self.workers.append(Worker(self.kind, (self.function, *self.more), self.inbox))
        except ChildStartError as error:
            self._give_up_start(str(error))
        unended = self._num_waiting + sum(len(worker.calls) for worker in self.workers)
        share = math.ceil(min(unended, self.max_open or unended) / self.config.num_workers)
        while self.workers:
            now = time.monotonic()
            worker = max(self.workers, key=lambda each: each.free(share))
            if worker.free(share) < 1 or self.outage.holds(is_busy=any(each.calls for each in self.workers)):
                return
            tasks = self._probe(now) if self.outage.is_on else self._next(worker.items, now)
            if not tasks:
                return
            self.outage.note_call()
            call = Call(number=next(self.numbers), tasks=tasks, since=now)
            worker.calls[call.number] = call
            items = b",".join(task.item for task in tasks)
            worker.say(b'{"call":%d,"timeout_s":%f,"items":[%b]}' % (call.number, self.config.timeout_s, items))

    def _next(self, count: int, now: float) -> list[Task]:
        """The tasks of the next call, at most `count`; none if all of them are paused."""
        while self.paused and self.paused[0][0] <= now:
            self.alone.append(heapq.heappop(self.paused)[2])
        if self.alone:
            return [self.alone.popleft()]
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]

    def _probe(self, now: float) -> list[Task]:
        """The task of a call that is tried in an outage."""
        if self.outage.known is not None and (self.outage.tries_known or not self.waiting):
            return [Task(key=PROBE, item=self.outage.known)]
        return [self.waiting.popleft()] if self.waiting else self._next(1, now)

    def _pass_on(self, asked: Asked, value: bytes) -> None:
        for worker in self.workers:
            if (call := worker.calls.get(asked.call)) is not None:
                call.since = time.monotonic()
                worker.say(b'{"answer":%d,"value":%b}' % (asked.question, value))

    def _cancel(self, key: int) -> None:
        for worker in self.workers:
            for call in [each for each in worker.calls.values() if [task.key for task in each.tasks] == [key]]:
                del worker.calls[call.number]
                worker.say(b'{"cancel":%d}' % call.number)
        for queued in (self.waiting, self.alone):
            for task in [each for each in queued if each.key == key]:
                queued.remove(task)
        self.paused = [each for each in self.paused if each[2].key != key]
        heapq.heapify(self.paused)

    # ---------------------------------------------------------------- what workers say

    def _heed(self, worker: Worker, line: bytes | None, at: float) -> None:
        """Act on a line of a worker that was read at the time `at`."""
        worker.heard = at
        if line is None:
            self._bury(worker, worker.death())
            return
        try:
            self._act(worker, orjson.loads(line), at)
        except NO_MESSAGE as error:  # user code has written the line
            what = f"the worker answered {line[:100]!r}: {error}"
            self._blame(worker, Failure.crash, what, by_itself=True)

    def _act(self, worker: Worker, message: Any, at: float) -> None:
        """Raises one of NO_MESSAGE for a message that no worker sends."""
        match message:
            case {"ready": int(items), "overlap": bool(overlaps), "files": dict(files)} if (
                items > 0 and not worker.items
            ):
                worker.items, worker.overlaps = items, overlaps
                self._compare(files)
                self.was_loaded, self.lost_loading = True, 0
            case {"failed": str(text)} if not worker.items:
                self._lose_loading(worker, with_remedy(text), is_final=not self.was_loaded)
            case {"call": int(number), **said}:
                if (call := worker.calls.get(number)) is not None:  # else nobody waits for it any more
                    self._step(worker, call, said, at)
            case _:
                raise ValueError("it is no message of a worker")

    def _step(self, worker: Worker, call: Call, said: dict[Any, Any], at: float) -> None:
        key = call.tasks[0].key
        match said:
            case {"begun": True}:
                call.since, call.has_begun = at, True
            case {"ask": value, "question": int(question)}:
                if self.kind.read_question is None:
                    raise ValueError("nobody is asked")
                asked = Asked(key, call.number, question, self.kind.read_question(value))
                call.since = math.inf
                self.done.put(asked)
            case {"withdrawn": True}:
                call.since = at
                self.done.put(Withdrawn(key, call.number))
            case {"replies": [*replies]} if len(replies) == len(call.tasks):
                values = [None if "error" in each else self.kind.read(each) for each in replies]
                self._end(worker, call, replies, values)
            case _:
                raise ValueError("it is no message about a call")

    def _end(self, worker: Worker, call: Call, replies: Sequence[Any], values: Sequence[Any]) -> None:
        del worker.calls[call.number]
        for task, reply, value in zip(call.tasks, replies, values, strict=True):
            if "error" not in reply:
                self._succeed(task)
                self._tell(Ended(task.key, Outcome(value)))
                continue
            failure = Failure.timeout if reply.get("late") else Failure.error
            message = with_remedy(str(reply["error"])[:MAX_ERROR_CHARS])
            if reply.get("final"):  # a further try would end alike
                self._tell(Ended(task.key, Outcome(None, failure, message)))
            else:
                self._fail(task, failure, message)

    def _tell(self, event: Event) -> None:
        if event.key != PROBE:
            self.done.put(event)

    # ---------------------------------------------------------------- failures

    def _fail(self, task: Task, failure: Failure, message: str, *, proven: bool = False) -> None:
        """One try for a task has failed."""
        task.tries += 1
        task.proven += proven
        if not self.has_told:
            logger.warning("%s: a call failed: %s. Metrics count such calls", self._name, message)
            self.has_told = True
        # Once only: after a try more, which a call that succeeded came before, the failure is its own.
        is_last = task.tries == self.config.max_tries
        if self.outage.note_failure(task.key, message, proven=proven, is_last=is_last):
            self._repeat(task, failure, message, pause_s=0.0)
        elif task.tries < self.config.max_tries:
            pause_s = min(self.config.retry_pause_s * 2.0 ** (task.tries - 1), MAX_PAUSE_S)
            self._repeat(task, failure, message, pause_s=pause_s)
        else:
            self._tell(Ended(task.key, Outcome(None, failure, message, task.proven == task.tries)))

    def _repeat(self, task: Task, failure: Failure | None, message: str, *, pause_s: float) -> None:
        self._tell(Repeated(task.key, failure, message))
        if task.key != PROBE:
            heapq.heappush(self.paused, (time.monotonic() + pause_s, next(self.numbers), task))

    def _succeed(self, task: Task) -> None:
        can_be_made_again = self.kind.read_question is None
        if self.outage.note_success(task.item if can_be_made_again else None):
            for held in [*self.alone, *(each for _, _, each in self.paused)]:
                held.tries = held.proven = 0  # the outage was the cause

    def _give_up(self, failure: Failure, message: str) -> None:
        """End every task that has no call."""
        tasks = [*self.alone, *(each for _, _, each in self.paused), *self.waiting]
        for queued in (self.alone, self.paused, self.waiting):
            queued.clear()
        for task in tasks:
            self._tell(Ended(task.key, Outcome(None, failure, message)))

    # ---------------------------------------------------------------- workers that are lost

    def _check_deadlines(self) -> None:
        now, limit = time.monotonic(), self.config.timeout_s
        for worker in list(self.workers):
            running = worker.running
            if not worker.items:
                if now - worker.since > START_TIMEOUT_S:
                    what = f"no answer within {START_TIMEOUT_S:g} s"
                    self._lose_loading(worker, what, is_final=not self.was_loaded)
            elif running.call != NOBODY and now - running.since > limit and not worker.is_starved(running, limit):
                text = f"no answer within {limit:g} s"
                self._blame(worker, Failure.timeout, text, by_itself=True)
            elif late := [each for each in worker.calls.values() if now - worker.active_since(each) > limit + GRACE_S]:
                # Code that does not let itself be cancelled, or that keeps the loop busy outside of every call.
                text = f"no answer within {limit:g} s, and its process did not end it"
                self._replace(worker, Failure.timeout, text, blamed=late)

    def _blame(self, worker: Worker, failure: Failure, what: str, *, by_itself: bool) -> None:
        """Replace a worker for what the call has done whose code runs, or ran when the process ended.

        If nobody knows that call, each call of the worker may be the cause. Nothing is proven either if another program
        may have ended the process, so not `by_itself`.
        """
        calls, running = list(worker.calls.values()), worker.running.call
        # One that makes one call at a time makes the first.
        known = [call for call in calls if call.number == running] if worker.overlaps else calls[:1]
        self._replace(worker, failure, what, blamed=known or calls, proven=by_itself and bool(known))

    def _bury(self, worker: Worker, death: Death) -> None:
        """Replace a worker that has died."""
        if not worker.items:
            self._lose_loading(worker, f"it {death.text}", is_final=False)
            return
        self._blame(worker, Failure.crash, f"the worker {death.text}", by_itself=not death.from_outside)

    def _compare(self, files: dict[str, str]) -> None:
        """Tell that a worker has loaded other files than the workers before it."""
        if changed := [path for path, digest in files.items() if self.files.get(path, digest) != digest]:
            logger.warning(
                "%s: the run goes on with what now stands in %s, and earlier calls ran what stood there before: what "
                "they returned may not be comparable", self._name, " and ".join(changed),
            )  # fmt: skip
        self.files |= files

    def _lose_loading(self, worker: Worker, what: str, *, is_final: bool) -> None:
        """Replace a worker that was lost before it had loaded its function; `is_final` if the function is at fault."""
        self._replace(worker, Failure.crash, what, blamed=())
        self.lost_loading += 1
        if is_final or self.lost_loading >= START_TRIES:
            self._give_up_start(what)
        else:
            logger.warning("%s: a worker did not start: %s; it is tried again", self._name, what)
            self.start_at = time.monotonic() + RETRY_S

    def _give_up_start(self, what: str) -> None:
        """Tell that no worker can be started, and end the tasks that wait; a later task tries it again."""
        self.lost_loading = 0
        self.done.put(UserCodeError(self._name, f"a worker did not start: {what}"))
        self._give_up(Failure.crash, f"a worker did not start: {what}")

    def _replace(
        self, worker: Worker, failure: Failure, what: str, *, blamed: Sequence[Call], proven: bool = False
    ) -> None:
        """End a worker: its `blamed` calls have failed, its other calls are made again."""
        self.workers.remove(worker)
        worker.kill()
        for call in worker.calls.values():
            if call in blamed and len(call.tasks) == 1:
                [task] = call.tasks
                if proven and failure is Failure.timeout:  # it computes for ever, so a further try would too
                    self._tell(Ended(task.key, Outcome(None, failure, what, True)))
                else:
                    self._fail(task, failure, what, proven=proven)
                continue
            if call in blamed:
                self._tell(Repeated(call.tasks[0].key, failure, what))
            elif call.has_begun:
                self._tell(Repeated(call.tasks[0].key, None, what))
            # One of the tasks of a blamed call is at fault: each is tried by itself.
            (self.alone if call in blamed else self.waiting).extendleft(reversed(call.tasks))
