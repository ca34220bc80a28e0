"""Child processes for code that could hang or crash: rewards, rollout functions. Lines of JSON in, lines of JSON out.

`ChildProcess` is the parent's side, `become_child` the child's; between the two stands the keeper of
`rollout/processes/keeper.py`, which ends what the child has started. Neither side unpickles anything.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import orjson

from rollout.processes.inherited import variables
from rollout.processes.keeper import (
    END_S,
    MAX_PROCESSES,
    SIGNAL_STATUS,
    TOO_MANY_PROCESSES,
    TOO_MUCH_MEMORY,
    fork_below_keeper,
)
from rollout.processes.secret_names import is_secret_name

logger = logging.getLogger(__name__)
printed = logging.getLogger("rollout.printed")
"""What children print, in records of whole lines with the level INFO. `trainer/rundir/printed.py` writes the records to
a file; without a handler they are lost."""
printed.propagate = False
printed.setLevel(logging.INFO)

START_TIMEOUT_S = 120.0
"""Seconds until a child must have loaded its function, which may import torch."""
START_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between two tries to start a process or a thread: the system can be short of them for a moment."""
DEATH_S = 5.0
"""Seconds for a process to end after its output, which the keeper's end follows at once; else its code closed it."""
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 26
"""Longest line of a child, 64 MiB: the tokens of many long responses; a longer one would only fill the memory."""
MAX_UNHEARD = 100_000
"""Lines of children that wait to be handled, above which their threads stop reading."""
FILE_BYTES = 16 * 2**30
"""Longest file that a child may write: a shard of a reward model fits."""
OPEN_FILES = 4096
"""Files, pipes and sockets that a child may have open."""
MAX_ERROR_CHARS = 1000
ENVIRONMENT_NAMES = "PARITY_CHILD_ENV"
"""Environment variable with names, separated by commas, of secrets that children may see: the key of a judge."""

_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
"""Signals that other processes and the kernel send, such as SIGKILL when the machine has run out of memory."""


class ChildStartError(RuntimeError):
    """The system did not give a process, a pipe or a thread, also not when asked again."""


class Death(NamedTuple):
    """The end of a child."""

    text: str
    """The end in words, for a sentence that begins with the name of the process."""
    from_outside: bool
    """True if another program or the kernel may have ended the child, so that nothing is known about its work."""
    by: signal.Signals | None = None
    """The signal that ended the child, if it was one."""


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` with this interpreter.

    Without -P Python puts the working directory first on the import path, where a file `rollout.py` or `trainer.py` of
    the user hides the package of that name.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


class ChildProcess:
    """A process in a session of its own, which is sent lines and sends lines.

    A thread for each direction moves the lines, so that neither a full nor an empty pipe stops the caller. A third one
    logs what the process prints, for its prints and its messages have pipes of their own.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        descriptors: Collection[int] = (),
        hear: Callable[[bytes | None], None],
        unheard: Callable[[], int],
    ) -> None:
        """Start `module` with `arguments`; the process inherits the open files `descriptors`.

        `hear` receives every line of the process, in a thread of its own, and None when the output has ended. `unheard`
        is the number of lines that were received and not handled yet. Raises ChildStartError.
        """
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._killed = threading.Event()
        command = python_module(module, *arguments)
        for pause_s in (*START_PAUSES_S, None):
            try:
                self._process = self._start(command, descriptors, hear, unheard)
                return
            except (OSError, RuntimeError) as error:
                if pause_s is None:
                    raise ChildStartError(f"no process or thread could be started: {error}") from error
                logger.warning("%s was not started and is tried again in %g s: %s", module, pause_s, error)
            time.sleep(pause_s)

    def _start(
        self,
        command: Sequence[str],
        descriptors: Collection[int],
        hear: Callable[[bytes | None], None],
        unheard: Callable[[], int],
    ) -> subprocess.Popen[bytes]:
        """Raises OSError or RuntimeError, and then leaves nothing behind."""
        process = subprocess.Popen(  # noqa: S603 (our own module; what the user named is one argument)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=descriptors,
            env=child_environment(),
        )
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise RuntimeError("the pipes of a child process are missing")
        # The threads hold the pipes, not this object: each closes its own when it ends.
        self._prints = prints = threading.Thread(target=_log, args=(process.stderr,), name="parity-child-prints")
        writes = threading.Thread(target=_write, args=(process.stdin, self._outbox), name="parity-child-writes")
        reads = threading.Thread(
            target=_read, args=(process.stdout, hear, unheard, self._killed), name="parity-child-reads"
        )
        try:
            for thread in (prints, writes, reads):  # the one that reads comes last: it tells the caller of the end
                thread.daemon = True
                thread.start()
        except RuntimeError:
            process.kill()
            process.wait()  # it has run no code of the user yet, so it ends at once
            process.stdout.close()
            if prints.ident is None:
                process.stderr.close()
            if writes.ident is None:
                process.stdin.close()
            else:
                self._outbox.put(None)
            raise
        return process

    def say(self, line: bytes) -> None:
        """Queue a line for the process; returns at once."""
        self._outbox.put(line)

    def kill(self) -> None:
        """End the process and all its descendants; safe to call twice. Waits at most 2 END_S + DEATH_S seconds."""
        self._killed.set()
        self._outbox.put(None)
        for signum in (signal.SIGTERM, signal.SIGCONT):  # to the keeper, which may have been suspended
            self._process.send_signal(signum)
        try:
            self._process.wait(timeout=2 * END_S)
        except subprocess.TimeoutExpired:
            logger.warning("process %d did not end its descendants in %g s", self._process.pid, 2 * END_S)
            self._process.kill()
        self._prints.join(timeout=DEATH_S)  # nothing holds the output any more: this takes no time

    def death(self) -> Death:
        """Describe the end of a process whose output has ended."""
        try:
            code = self._process.wait(timeout=DEATH_S)
        except subprocess.TimeoutExpired:
            return Death(f"closed its output or sent a line of more than {MAX_LINE_BYTES >> 20} MiB", False)
        if code == TOO_MANY_PROCESSES:
            return Death(f"had more than {MAX_PROCESSES} processes below it", False)
        if code == TOO_MUCH_MEMORY:
            return Death("and its descendants held more memory than allowed", False)
        number = -code if code < 0 else code - SIGNAL_STATUS
        if number in list(signal.Signals):
            found = signal.Signals(number)
            return Death(f"ended with {found.name}", found in _FROM_OUTSIDE, found)
        return Death(f"ended with exit status {code}", False)


def child_environment() -> dict[str, str]:
    """The environment without secrets, which a careless function would print or send away with a traceback.

    It is no wall: code of the user reads the files of the user too.
    """
    allowed = {"PWD", "OLDPWD", *named_secrets()}
    return {name: value for name, value in variables().items() if name in allowed or not is_secret_name(name)}


def named_secrets() -> list[str]:
    """The names in ENVIRONMENT_NAMES."""
    return [name.strip() for name in os.environ.get(ENVIRONMENT_NAMES, "").split(",") if name.strip()]


def with_remedy(failure: str) -> str:
    """The text of a failure; if it names variables that `child_environment` leaves out, with the way to give them."""
    missing = ",".join(sorted(name for name in variables().keys() - child_environment().keys() if name in failure))
    remedy = f". A function is not given variables with names of secrets, unless {ENVIRONMENT_NAMES}={missing} is set"
    return failure + remedy * bool(missing)


def _read(
    output: IO[bytes], hear: Callable[[bytes | None], None], unheard: Callable[[], int], killed: threading.Event
) -> None:
    """Pass on every line of a process until its output ends, or a line is longer than MAX_LINE_BYTES."""
    received = bytearray()
    with output:
        while len(received) <= MAX_LINE_BYTES and (chunk := output.read(READ_BYTES)):
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                hear(bytes(received + line))
                received.clear()
            received += rest
            while unheard() > MAX_UNHEARD and not killed.wait(0.1):
                continue
    hear(None)


def _log(output: IO[bytes]) -> None:
    """Log what a process prints until all holders of this output have ended; whole lines together, so that nothing that
    must be read as one is divided, unless a line is longer than READ_BYTES."""
    rest = b""
    with output:
        while chunk := output.read(READ_BYTES):
            rest += chunk
            end = rest.rfind(b"\n") + 1 if len(rest) < READ_BYTES else len(rest)
            if end:
                printed.info("%s", rest[:end].decode(errors="replace"))
                rest = rest[end:]
    if rest:
        printed.info("%s", rest.decode(errors="replace"))


def _write(to: IO[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Write every line of `outbox` to a process until the line is None or the process has ended."""
    with suppress(BrokenPipeError), to:  # the reading side reports the end
        while (line := outbox.get()) is not None:
            left = memoryview(line + b"\n")
            while left:
                left = left[to.write(left) :]


_IS_CHILD = threading.Event()


def in_child() -> bool:
    """True in a process that has become a child: it loads code of a user."""
    return _IS_CHILD.is_set()


class Pipes(NamedTuple):
    """The child's side of its pipes to the parent."""

    requests: IO[bytes]
    """Lines of the parent."""
    say: Callable[[object], None]
    """Sends a message, a line of JSON."""


def become_child(*, memory_bytes: int) -> Pipes:
    """Go on as a child below a keeper; call this first, before there are threads.

    The child dies with the thread that started it, also if that thread is killed; ignores Ctrl-C, which the parent
    handles; is bounded in address space, files and, by its keeper, in processes and their memory; reads an empty
    standard input, and prints to stderr, line by line, so that neither it nor a program that it starts mixes with the
    messages.
    """
    _IS_CHILD.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork_below_keeper(memory_bytes=memory_bytes)
    for limit, bound in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        allowed = resource.getrlimit(limit)[1]
        bound = bound if allowed == resource.RLIM_INFINITY else min(bound, allowed)
        resource.setrlimit(limit, (bound, bound))
    with suppress(OSError):  # where the kernel runs out of memory, it takes a child before the trainer
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a worker may be killed at any time

    def say(message: object) -> None:
        answers.write(orjson.dumps(message) + b"\n")
        answers.flush()

    return Pipes(requests, say)


def described(error: BaseException) -> str:
    """A short text about an error, with its type first, without half surrogates, which no JSON can hold."""
    try:
        text = str(error)
    except Exception as failure:  # the __str__ of user code
        text = f"its own text cannot be made ({type(failure).__name__})"
    return f"{type(error).__name__}: {text}"[:MAX_ERROR_CHARS].encode(errors="replace").decode()
