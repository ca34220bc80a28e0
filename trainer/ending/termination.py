"""The end of a run by request: SIGTERM and Ctrl-C, and a deadline for the end itself.

`trainer/run/loop.py` uses this file. A signal means one of three things, by what the run is doing:

    before the first step          the run ends at once: nothing is lost
    while a step can be given up   the block of `Termination.interruptible` is left, the step before it is saved
    otherwise                      the running step is finished and saved

The next signal ends the run at once in every case. A run that ends at once, or has saved its last step, has a deadline.
After the deadline a thread writes the last words of the run, ends all processes below this one and leaves with the exit
code, whatever the main thread waits for. Signals reach this thread without the main thread, by a pipe that Python's
own handler in C writes to.

The exit codes are in trainer/ending/exit_codes.py.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from trainer.ending.exit_codes import STOPPED_BY_GUARD

logger = logging.getLogger(__name__)

REQUESTS = (signal.SIGTERM, signal.SIGINT)
LEAVE_S = 25.0
"""Deadline in seconds of an end that has nothing left to save; Kubernetes kills 30 s after SIGTERM."""
AT_ONCE_S = 7.5
"""Deadline in seconds of an end after a second signal, without the seconds that the thread itself takes."""
ECHO_S = 0.5
"""A signal this many seconds after another one belongs to the same request: `timeout` sends two, to the process and to
its group."""
_PROCESSES_S = 1.0
"""Seconds that processes have to end after SIGTERM, and again after SIGKILL."""
_STDERR = 2


class RunTerminated(Exception):
    """The run ended early because of a request."""

    def __init__(self, request: signal.Signals, *, step: int) -> None:
        """`step` is the last completed step; 0 means none."""
        super().__init__(f"asked to end ({request.name}), {f'after step {step}' if step else 'before the first step'}")
        self.step = step
        self.exit_code = 128 + request


class StoppedByGuard(RunTerminated):
    """The guard ended the run (guard.highest=stop)."""

    def __init__(self, *, step: int) -> None:
        """`step` is the last completed step; it was saved."""
        Exception.__init__(self, f"stopped by the guard after step {step} (events.jsonl says why)")
        self.step = step
        self.exit_code = STOPPED_BY_GUARD


class Termination:
    """Record of a request to end, and the deadline of the end. `termination_requests` makes one."""

    def __init__(self) -> None:
        self.request: signal.Signals | None = None
        """The last signal; None without a request."""
        self.at_once = False
        """True if the run ends without finishing or saving anything."""
        self.then = ""
        """Work before the end, for the user; empty means that the first signal ends the run at once."""
        self.step = 0
        """The last completed step."""
        self.last_words: Callable[[], object] = str
        """Called before a run that missed its deadline is ended."""
        self.way_on = ""
        """What the user can do after such an end; empty before there is a run."""
        self._interruptible = False
        self._is_ending = False
        """True when KeyboardInterrupt was raised for an end at once."""
        self._heard_at = -ECHO_S
        self._deadline: float | None = None
        self._exit_code = 1
        self._closed = False
        self._lock = threading.RLock()  # a handler may interrupt a handler
        self._inbox, self._outbox = socket.socketpair()
        for end in (self._inbox, self._outbox):  # here, because a run outside of the main thread does not listen
            end.setblocking(False)

    @contextmanager
    def interruptible(self, then: str) -> Iterator[None]:
        """Leave the block with KeyboardInterrupt at a request; `then` is the work before the end, for the user."""
        before, self.then = self.then, then
        try:
            self._interruptible = True
            if self.request is not None:
                raise KeyboardInterrupt
            yield
        finally:
            self.then, self._interruptible = before, False

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn whatever an end at once raises in the block into RunTerminated: libraries replace KeyboardInterrupt."""
        try:
            yield
        except RunTerminated:
            raise
        except BaseException as error:
            self.hear()
            if self.at_once and self.request is not None:
                raise RunTerminated(self.request, step=self.step) from error
            raise

    def leave(self, reason: RunTerminated) -> RunTerminated:
        """Begin the deadline of an end that has nothing left to save; returns `reason`, to be raised."""
        self._exit_code = reason.exit_code
        self._end_within(LEAVE_S)
        return reason

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the signals of the process while the block runs; in the main thread only."""
        before = {number: signal.signal(number, self._handle) for number in REQUESTS}
        pipe_before = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="parity-termination", daemon=True).start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(pipe_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._closed = True
            self._wake()

    def hear(self) -> None:
        """Take in the signals that have arrived; called by the main thread and by the thread that watches."""
        lines = []
        with self._lock, suppress(BlockingIOError):
            for number in self._inbox.recv(64):
                if number in REQUESTS and time.monotonic() - self._heard_at >= ECHO_S:
                    lines.append(self._note(signal.Signals(number)))
        for line in lines:
            _say(line)

    def _note(self, request: signal.Signals) -> str:
        """Record a request; returns the line for the user."""
        is_first, self.request = self.request is None, request
        self._heard_at = time.monotonic()
        if is_first and self.then:
            return f"{request.name}: {self.then}; the next signal ends the run at once"
        self.at_once, self._exit_code = True, 128 + request
        seconds = LEAVE_S if is_first else AT_ONCE_S
        self._end_within(seconds)
        return f"{request.name}: ends at once, in at most {seconds + 2 * _PROCESSES_S:.0f} s"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handler of the signals, in the main thread."""
        self.hear()
        interrupts = self.at_once and not self._is_ending
        self._is_ending = self.at_once  # a third signal must not disturb the end
        if interrupts or (self._interruptible and self.request is not None):
            self._interruptible = False
            raise KeyboardInterrupt

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            self._outbox.send(b"\0")

    def _watch(self) -> None:
        """Body of the thread that hears signals and ends a run that misses its deadline."""
        while True:
            left_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            select.select([self._inbox], [], [], left_s)
            if self._closed:
                return
            self.hear()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._end_now()

    def _end_now(self) -> None:
        """End this process and all processes below it; the main thread does not answer."""
        show_cursor = "\x1b[?25h" if os.isatty(_STDERR) else ""  # a progress bar hides it
        _say(f"{show_cursor}the run did not end in time: its processes are ended{self.way_on}")
        # The disk may not answer either.
        words = threading.Thread(target=self.last_words, daemon=True)
        words.start()
        end_descendants()
        words.join(_PROCESSES_S)
        os._exit(self._exit_code)


@contextmanager
def termination_requests() -> Iterator[Termination]:
    """Record SIGTERM and Ctrl-C as requests while the block runs. An end at once becomes RunTerminated.

    Signals reach the main thread only: a block in another thread receives no request.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return
    with termination.listening(), termination.named():
        yield termination


@contextmanager
def requests_held() -> Iterator[None]:
    """Let no signal interrupt the block: the handlers run after it, and are those from before it.

    For the start of a library that is not made to be interrupted. An exception between fork and exec of a child of Ray
    is lost, and leaves a lock of `logging` held for good. The deadline of an end at once runs meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():  # signals interrupt the main thread only
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in REQUESTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for last in came[-1:]:
            handler = before[signal.Signals(last)]
            if callable(handler):
                handler(last, None)  # sent again, it would be another request
            else:
                signal.raise_signal(last)


def end_descendants(besides: Collection[psutil.Process] = ()) -> None:
    """End all processes below this one but those of `besides`, in order with SIGTERM, then with SIGKILL.

    Takes about two seconds at most.
    """
    for end in (psutil.Process.terminate, psutil.Process.kill):
        below = [each for each in psutil.Process().children(recursive=True) if each not in besides]
        for process in below:
            with suppress(psutil.Error):
                end(process)
        psutil.wait_procs(below, timeout=_PROCESSES_S)


def _say(line: str) -> None:
    """Write a line to the terminal with os.write: the interrupted code may hold the lock of the console."""
    with suppress(OSError):  # a closed terminal
        os.write(_STDERR, f"\n{line}\n".encode())
