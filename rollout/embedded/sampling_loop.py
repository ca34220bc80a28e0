"""The sampling thread of an engine in this process: requests in, completions out.

`rollout/embedded/engine.py` owns the model and pauses the thread while it replaces weights; a `Batch` of the engine
does the sampling. The thread lives while there are unfinished requests, and all shared state changes under one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic

import torch

from rollout.embedded.batch import Batch, Model
from rollout.engine import EngineError
from rollout.processes.busy_clock import BusyClock
from rollout.types import Completion, GenerateRequest

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds after which a waiting thread checks its state without being woken."""
GATHER_S = 0.02
"""Seconds that a poll waits for further completions."""


@dataclass(slots=True)
class _News:
    """Changes that the thread has not seen yet."""

    is_renewed: bool = False
    """True if new weights came that the batch was not read again with."""
    submitted: dict[int, GenerateRequest] = field(default_factory=dict)
    """Requests by ticket."""
    aborts: set[int] = field(default_factory=set)
    """Tickets."""


MakeBatch = Callable[[Model, int], Batch[Model]]
"""(model, policy version) -> a batch without requests."""


class SamplingLoop(Generic[Model]):
    """Samples submitted requests with a model. All methods may be called by any thread.

    After a failure nothing is sampled, and `submit` and `poll` raise the error, until `load` is called.
    """

    def __init__(self, *, name: str, make_batch: MakeBatch[Model], request_timeout_s: float) -> None:
        """`name` is for errors; `request_timeout_s` is rollout.generate_timeout_s."""
        self._name = name
        self._make_batch = make_batch
        self._request_timeout_s = request_timeout_s
        self._changed = threading.Condition()
        self._model: Model | None = None
        self._policy_version = 0
        self._news = _News()
        self._thread: threading.Thread | None = None
        self._is_stepping = False
        """True while the thread works on the batch, without the lock."""
        self._pauses = 0
        self._unfinished: set[int] = set()
        """Tickets without a completion."""
        self._clock = BusyClock()
        self._completions: list[Completion] = []
        self._oldest: tuple[float, GenerateRequest] | None = None
        self._failure: EngineError | None = None

    @property
    def sampling_s(self) -> float:
        """Seconds with unfinished requests."""
        with self._changed:
            return self._clock.seconds

    @property
    def num_unfinished(self) -> int:
        with self._changed:
            return len(self._unfinished)

    def load(self, model: Model, *, policy_version: int) -> None:
        """Sample with `model` from now on, and clear a failure. Call inside `paused` while the old one runs."""
        with self._changed:
            self._model, self._policy_version = model, policy_version
            self._news.is_renewed = True
            self._failure = None

    def unload(self) -> None:
        """Release the model. Raises EngineError while requests are unfinished."""
        with self._changed:
            if self._unfinished:
                raise EngineError(
                    f"{self._name}: {len(self._unfinished)} requests are unfinished; poll until they have ended, or "
                    "abort them"
                )
            self._model = None

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Queue requests, all at once: the requests of one call are admitted as if they had come at the same time."""
        with self._changed:
            if self._failure is not None:
                raise EngineError(str(self._failure)) from self._failure
            if self._model is None:
                raise EngineError(f"{self._where}: no weights are loaded")
            if known := self._unfinished.intersection(tickets):
                raise ValueError(f"{self._where}: tickets {sorted(known)[:5]} are in use")
            self._news.submitted.update(zip(tickets, requests, strict=True))
            self._unfinished.update(tickets)
            self._clock.set(is_busy=bool(self._unfinished))
            if self._thread is None and self._unfinished:
                # A daemon thread: an engine that was not stopped must not keep its process alive.
                self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions since the last poll; without any, wait up to `timeout_s` for the next, or raise a failure.

        After the first completion `poll` waits GATHER_S for others, within `timeout_s`: every reply takes time from
        sampling.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._completions:
                self._check_deadline()
                if self._failure is not None:
                    raise EngineError(str(self._failure)) from self._failure
                now = time.monotonic()
                if now >= deadline:
                    break
                # Woken for every completion and failure; the deadline of a request may come before the deadline of the
                # poll.
                due = deadline if self._oldest is None else self._oldest[0] + self._request_timeout_s
                self._changed.wait(max(0.001, min(deadline, due) - now))
            if self._completions:
                left = max(0.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: not self._unfinished, min(GATHER_S, left))
            completions, self._completions = self._completions, []
            return completions

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End unfinished requests; `poll` returns their tokens so far once the thread has seen the abort."""
        with self._changed:
            self._news.aborts |= self._unfinished if tickets is None else self._unfinished.intersection(tickets)
            self._changed.notify_all()

    @contextmanager
    def paused(self, timeout_s: float) -> Iterator[None]:
        """Pause sampling inside the block. Raises EngineError if the current token takes longer than `timeout_s`."""
        with self._changed:
            self._pauses += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._is_stepping, timeout_s):
                    raise EngineError(f"{self._name}: sampling did not pause within {timeout_s:.0f} s")
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def fail(self, cause: str) -> None:
        """Give up all unfinished requests: `submit` and `poll` raise EngineError(`cause`) from now on."""
        with self._changed:
            self._fail(EngineError(cause))

    def stop(self, timeout_s: float) -> None:
        """End the thread and drop unfinished requests; a thread that hangs is left behind with a warning."""
        with self._changed:
            thread = self._thread
            self._forget()
            self._completions, self._failure, self._model = [], None, None
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                logger.warning("%s: sampling did not end within %.0f s", self._name, timeout_s)

    def _check_deadline(self) -> None:
        """Fail if the oldest request takes too long. The caller's thread checks: the sampling thread may hang."""
        if self._oldest is None or time.monotonic() - self._oldest[0] < self._request_timeout_s:
            return
        request = self._oldest[1]
        self._fail(
            EngineError(
                f"{self._where}: rollout.generate_timeout_s={self._request_timeout_s} has passed since prompt "
                f"{request.prompt_id}/{request.sample_index} was taken up; {len(self._unfinished)} requests are "
                "unfinished. Raise it, or lower sampling.max_new_tokens or rollout.max_batch_size."
            )
        )

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        self._forget()
        self._changed.notify_all()

    def _forget(self) -> None:
        self._news = _News()
        self._unfinished.clear()
        self._clock.set(is_busy=False)
        self._oldest = None
        # A detached thread ends at its next check, and its further tokens are dropped.
        self._thread, self._is_stepping = None, False

    def _run(self) -> None:
        """Body of the thread: one token at a time, until no request is unfinished."""
        batch: Batch[Model] | None = None
        with torch.inference_mode():
            while (news := self._next_news()) is not None:
                try:
                    batch, completions = self._sample(batch, news)
                except Exception as error:
                    # The caller of `poll` must receive any error; the thread itself has no caller to raise to.
                    logger.debug("%s: sampling failed", self._name, exc_info=True)
                    self._end_with(error)
                    return
                self._hand_over(completions, batch.oldest)

    def _sample(self, batch: Batch[Model] | None, news: _News) -> tuple[Batch[Model], list[Completion]]:
        """Sample one token for every sequence that has a slot after the `news`."""
        assert self._model is not None
        if batch is None:
            batch = self._make_batch(self._model, self._policy_version)
        elif news.is_renewed:
            batch.renew(self._model, self._policy_version)
        batch.add(list(news.submitted), list(news.submitted.values()))
        aborted = batch.abort(news.aborts) if news.aborts else []
        return batch, aborted + batch.advance()

    def _end_with(self, error: Exception) -> None:
        with self._changed:
            if self._is_current:
                self._fail(EngineError(f"{self._where}: {type(error).__name__}: {error}"))

    def _next_news(self) -> _News | None:
        """Changes since the last token, once no pause is active; None if the thread must end."""
        with self._changed:
            while self._pauses and self._is_current:
                self._changed.wait(IDLE_S)
            if not self._is_current:
                return None
            if not self._unfinished or self._model is None:
                self._thread = None
                return None
            news, self._news = self._news, _News()
            if self._oldest is None:
                # From now on a poll checks the deadline of this request.
                first = next(iter(news.submitted.values()), None)
                self._oldest = None if first is None else (time.monotonic(), first)
                self._changed.notify_all()
            self._is_stepping = True
            return news

    def _hand_over(self, completions: list[Completion], oldest: tuple[float, GenerateRequest] | None) -> None:
        with self._changed:
            if not self._is_current:
                return
            self._unfinished.difference_update(completion.ticket for completion in completions)
            self._clock.set(is_busy=bool(self._unfinished))
            self._completions += completions
            self._is_stepping, self._oldest = False, oldest
            if completions or self._pauses:
                self._changed.notify_all()

    @property
    def _where(self) -> str:
        return f"{self._name}, at policy version {self._policy_version}, generate"

    @property
    def _is_current(self) -> bool:
        return self._thread is threading.current_thread()
