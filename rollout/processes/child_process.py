"""Child processes for code that could hang or crash: rewards, rollout functions. Lines of JSON in, lines of JSON out.

`ChildProcess` is the parent's side, `become_child` the child's. Neither side unpickles anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO

import orjson

_PR_SET_PDEATHSIG = 1
START_TIMEOUT_S = 120.0
"""Seconds until a child must have loaded its function, which may import torch."""
READ_BYTES = 1 << 16


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with this interpreter.

    Without -P Python puts the working directory first on the import path, where a file `rollout.py` or `trainer.py` of
    the user hides the package of that name.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


class ChildProcess:
    """A process in a session of its own, which is sent lines and sends lines.

    A thread for each direction moves the lines, so that neither a full nor an empty pipe stops the caller.
    """

    def __init__(self, module: str, function: str, *, memory_bytes: int, hear: Callable[[bytes | None], None]) -> None:
        """Start `module` with the arguments `function` and `memory_bytes`. Raises OSError if no process can be made.

        `hear` receives every line of the process, in a thread of its own, and None when the output has ended.
        """
        self._process = subprocess.Popen(  # noqa: S603 (our own module; what the user named is one argument)
            python_module(module, function, str(memory_bytes)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the pipes of a child process are missing")
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # The threads hold the pipes, not this object: each closes its own when it ends.
        for target, arguments, name in (
            (_read, (self._process.stdout, hear), "reads"),
            (_write, (self._process.stdin, self._outbox), "writes"),
        ):
            threading.Thread(target=target, args=arguments, name=f"parity-child-{name}", daemon=True).start()

    def say(self, line: bytes) -> None:
        """Queue a line for the process; returns at once."""
        self._outbox.put(line)

    def kill(self) -> None:
        """End the process and all its descendants; safe to call twice."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._outbox.put(None)
        self._process.wait()

    def death(self) -> str:
        """Describe the end of a process whose output has ended."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its output"
        return f"ended with {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"


def _read(output: IO[bytes], hear: Callable[[bytes | None], None]) -> None:
    """Pass on every line of a process until its output ends."""
    received = b""
    with output:
        while chunk := output.read(READ_BYTES):
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                hear(line)
    hear(None)


def _write(to: IO[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Write every line of `outbox` to a process until the line is None or the process has ended."""
    with contextlib.suppress(BrokenPipeError), to:  # the reading side reports the end
        while (line := outbox.get()) is not None:
            left = memoryview(line + b"\n")
            while left:
                left = left[to.write(left) :]


def become_child(*, memory_bytes: int) -> Callable[[object], None]:
    """Set up the calling process as a child; returns a function that sends a message, a line of JSON, to the parent.

    The child dies with the thread that started it, also if that thread is killed; ignores Ctrl-C, which the parent
    handles; may use `memory_bytes` of address space; and prints to stderr, so that no print mixes with its answers.
    Needs Linux.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(message: object) -> None:
        answers.write(orjson.dumps(message) + b"\n")
        answers.flush()

    return say


def own_arguments(given: Sequence[str]) -> tuple[str, int]:
    """(function, memory in bytes) of a child's command line."""
    function, memory_bytes = given
    return function, int(memory_bytes)


def described(error: BaseException) -> str:
    """One line about an error, with its type first."""
    return f"{type(error).__name__}: {error}"
