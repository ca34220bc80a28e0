"""The keeper of a child process: a process between the trainer and the child, which runs no code of the user.

    trainer -> keeper -> child -> processes that the child starts, also in sessions of their own

A process below the keeper that loses its parent becomes a child of the keeper, so none can hide. The keeper ends all of
them when the child has ended, whatever ended it; when the trainer asks for it with SIGTERM; when the trainer has died;
and when there are too many of them, or they hold too much memory. The limits of the kernel cannot do this: RLIMIT_NPROC
counts all processes of a user and spares root, and the limits of memory hold for each process by itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from rollout.processes.process_memory import private_bytes

MAX_PROCESSES = 256
"""Processes below a keeper: far more than a reward or a tool needs, far fewer than a machine can bear."""
WATCH_S = 0.1
"""Seconds between two counts of the processes below a keeper; a count takes about 0.1 ms."""
END_S = 5.0
"""Seconds after which a keeper leaves, even if a killed process is stuck in a call of the kernel."""
SIGNAL_STATUS = 128
"""Exit status of a keeper whose child was ended by signal n: this + n, as shells have it."""
TOO_MANY_PROCESSES = 240
"""Exit status of a keeper that ended more than MAX_PROCESSES processes."""
TOO_MUCH_MEMORY = 241
"""Exit status of a keeper that ended processes with too much memory."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HEARD = {signal.SIGCHLD, signal.SIGTERM}


def fork_below_keeper(*, memory_bytes: int) -> None:
    """Return in a new process, in a session of its own; the calling process becomes its keeper and never returns.

    The caller must have no threads. Its standard input and output belong to the new process alone. `memory_bytes`
    bounds the memory of all processes below the keeper together. Needs Linux.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()  # a child that ends its own process group must not end the keeper
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        die_with_parent(signal.SIGKILL)
        if os.getppid() != keeper:  # the keeper has died before this process could ask for a signal
            os._exit(1)
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os._exit(_keep(child, memory_bytes))


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first. Needs /proc/<pid>/task/<tid>/children, which Linux has since 3.5."""
    found, parents = [], [pid]
    while parents:
        children = [child for parent in parents for child in _children(parent)]
        found += children
        parents = children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # the process, or one of its threads, has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def _keep(child: int, memory_bytes: int) -> int:
    """Wait for the end of the child, or for a reason to end it; end everything below; returns the exit status."""
    status = None
    while status is None:
        heard = signal.sigtimedwait(_HEARD, WATCH_S)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            status = SIGNAL_STATUS + signal.SIGTERM
        else:
            status = _reap(child)
        if status is None:
            status = _broken_limit(descendants(os.getpid()), memory_bytes)
    _end_descendants()
    return status


def _reap(child: int) -> int | None:
    """Take in the processes that have ended; returns the exit status of the child if it is one of them."""
    status = None
    with suppress(ChildProcessError):  # there is no process left to wait for
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                status = code if code >= 0 else SIGNAL_STATUS - code
    return status


def _broken_limit(pids: Sequence[int], memory_bytes: int) -> int | None:
    if len(pids) > MAX_PROCESSES:
        return TOO_MANY_PROCESSES
    if private_bytes(pids) <= memory_bytes:
        return None
    # The cheap count is too high: in the exact one, of a page that n forked processes share, each has 1/n.
    held = 0
    for pid in pids:
        with suppress(psutil.Error):
            held += psutil.Process(pid).memory_full_info().pss
    return TOO_MUCH_MEMORY if held > memory_bytes else None


def _end_descendants() -> None:
    """Kill everything below this process. What loses its parent meanwhile, or is forked, is found in the next round."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, WATCH_S)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
