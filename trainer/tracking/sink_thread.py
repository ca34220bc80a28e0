"""TensorBoard, or a tracker of a user, in a thread of its own: a server that is slow or away holds up no step.

Used only by tracker.py. metrics.jsonl is the source of truth: a failure here is a warning and a count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Full, Queue

from trainer.config.outputs import CustomSink

logger = logging.getLogger(__name__)
MOST_WAITING = 1024
"""Calls that may wait for a sink; later ones are lost, with a warning."""
CLOSE_TIMEOUT_S = 30.0
"""Seconds that the end of a run waits for what is still to be sent."""


class SinkThread:
    """Calls the methods of one sink, one after the other."""

    def __init__(self, sink: CustomSink, run_dir: Path, config: Mapping[str, object], *, last_step: int | None) -> None:
        self._sink = sink
        self._errors = 0
        self._calls: Queue[tuple[str, tuple[object, ...]] | None] = Queue(MOST_WAITING)
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name=f"sink {sink.name}", daemon=True)
        self._start = (run_dir, config, last_step)
        self._thread.start()

    def put(self, method: str, *arguments: object) -> None:
        """Queue a call of `method`; at once."""
        if not self._thread.is_alive():  # it could not start
            self._errors += 1
            return
        try:
            self._calls.put_nowait((method, arguments))
        except Full:
            self._errors += 1
            if not self._is_lost:
                logger.warning("%s is %d calls behind: what comes now is lost there", self._sink.source, MOST_WAITING)
            self._is_lost = True

    def close(self, status: str) -> int:
        """Make the calls that wait, and the last one; the number of calls that failed or were lost."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for call in (("close", (status,)), None):
            try:
                self._calls.put(call, timeout=max(0.0, deadline - time.monotonic()))
            except Full:
                break
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            left = self._calls.qsize()
            logger.warning("%s did not end within %.0f s; %d calls are lost", self._sink.source, CLOSE_TIMEOUT_S, left)
            return self._errors + max(1, left)
        return self._errors

    def _run(self) -> None:
        run_dir, config, last_step = self._start
        if not self._call("start", lambda: self._sink.start(run_dir, config, last_step=last_step)):
            return
        while (call := self._calls.get()) is not None:
            method, arguments = call
            self._call(method, lambda: getattr(self._sink, method)(*arguments))  # noqa: B023 - called at once

    def _call(self, method: str, action: Callable[[], object]) -> bool:
        """Make one call; a failure is a warning for the first of them."""
        try:
            action()
        except (Exception, SystemExit) as error:
            self._errors += 1
            if self._errors == 1:
                text = f"{type(error).__name__}: {error}"
                logger.warning("%s: %s() failed and the run goes on: %s", self._sink.source, method, text)
            return False
        return True
