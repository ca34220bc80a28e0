"""A pytest plugin: the session fails if its tests leave processes or shared-memory segments behind.

Only what this session started counts, however many other runs share the machine: a process is ours if it was seen
among our descendants, or carries this session's mark in its environment; a segment is ours if one of our processes
had it mapped, or if torch named it after one of them. tests/conftest.py loads it, tests/test_leftovers.py tests it.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

MARK = "PARITY_TEST_SESSION"
"""Environment variable that every process below the session inherits, daemons that change their parent included."""
GRACE_S = float(os.environ.get("PARITY_TEST_GRACE_S", "20"))
"""Seconds that processes have to end after the last test; waited for only while there are any."""
SHM = Path("/dev/shm")

_PYTHON_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python keeps for as long as the one that started them."""


class Watch:
    """What the tests of one session have started so far."""

    def __init__(self) -> None:
        self._token = uuid.uuid4().hex
        self._started: dict[int, float] = {os.getpid(): psutil.Process().create_time()}
        self._segments: set[str] = set()
        outer = os.environ.get(MARK)
        os.environ[MARK] = f"{outer}:{self._token}" if outer else self._token
        # SGLang and Ray rename their processes; by default that overwrites the environment as others read it.
        os.environ["SPT_NOENV"] = "1"

    def observe(self) -> None:
        """Remember the present descendants and the segments that they, or this process, have mapped."""
        for process in psutil.Process().children(recursive=True):
            try:
                self._started[process.pid] = process.create_time()
            except psutil.NoSuchProcess:
                continue
            self._segments |= mapped_segments(process.pid)
        self._segments |= mapped_segments(os.getpid())

    def processes(self) -> list[psutil.Process]:
        """Our processes that still run."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and self._is_ours(process)]

    def segments(self) -> list[Path]:
        """Our segments that still have a name, except those that this process uses."""
        by_pid = {path.name for path in SHM.glob("torch_*") if self._named_after_ours(path.name)}
        return sorted(SHM / name for name in (self._segments | by_pid) - mapped_segments(os.getpid()) if in_shm(name))

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            seen = self._started.get(process.pid) == process.create_time()
            if not seen and self._token not in process.environ().get(MARK, "").split(":"):
                return False
            return not any(helper in word for word in process.cmdline() for helper in _PYTHON_HELPERS)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False  # gone, or of another user

    def _named_after_ours(self, name: str) -> bool:
        match = re.match(r"torch_(\d+)_", name)
        return match is not None and int(match[1]) in self._started


def in_shm(name: str) -> bool:
    return (SHM / name).exists()


def mapped_segments(pid: int) -> set[str]:
    """Names of the files below /dev/shm that the process has mapped and that still exist there."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()  # gone, or not Linux
    return {name for name in re.findall(rf" {SHM}/(\S+)$", maps, re.MULTILINE) if in_shm(name)}


def describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"process {process.pid}"


@pytest.fixture(scope="session", autouse=True)
def leftovers() -> Iterator[Watch]:
    """Watch the session; at its end fail, name what is left, and end it."""
    watch = Watch()
    yield watch
    watch.observe()
    deadline = time.monotonic() + GRACE_S
    while (watch.processes() or watch.segments()) and time.monotonic() < deadline:
        time.sleep(0.2)
    processes, segments = watch.processes(), watch.segments()
    left = [describe(process) for process in processes] + [f"segment {path}" for path in segments]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for path in segments:
        path.unlink(missing_ok=True)
    if left:
        pytest.fail("\n".join(["the tests left behind (now ended):", *left]), pytrace=False)


@pytest.fixture(autouse=True)
def observe_leftovers(leftovers: Watch) -> Iterator[None]:
    """Look around after each test: what starts and is orphaned later is known by then."""
    yield
    leftovers.observe()
