"""A step of the wall clock: what must end still ends, and deadlines are kept."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout.processes.process_marks import kill_processes, mark_processes

STEP_S = 3600.0


def step_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the boot time, as a step of the wall clock does in /proc/stat."""
    before = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: before + STEP_S)
    assert psutil.boot_time() == before + STEP_S


@pytest.fixture
def wedged() -> Iterator[subprocess.Popen[bytes]]:
    """A process that SIGSTOP keeps from hearing a request to end; its name makes /proc/<pid>/stat hard to read."""
    script = "import ctypes, signal; ctypes.CDLL(None).prctl(15, b') R 1 (('); signal.raise_signal(signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.scenario(36)
def test_a_wedged_process_is_killed_after_a_step_of_the_clock(
    wedged: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = mark_processes([wedged.pid])
    step_clock(monkeypatch)
    assert mark_processes([wedged.pid]) == marks
    kill_processes(marks)
    assert wedged.wait(timeout=10) == -signal.SIGKILL
    # A process that has ended is no error.
    kill_processes(marks)
    assert mark_processes([wedged.pid]) == ()


def test_a_later_process_with_the_same_id_is_not_killed(wedged: subprocess.Popen[bytes]) -> None:
    [mark] = mark_processes([wedged.pid])
    kill_processes([mark._replace(started=mark.started - 1)])
    with pytest.raises(subprocess.TimeoutExpired):
        wedged.wait(timeout=0.2)


def test_no_deadline_follows_the_wall_clock() -> None:
    """Two times of others are times of the wall clock: that of a file, and the end of a job, read once at the start."""
    root = Path(__file__).parents[2]
    sources = [path for room in ("algorithms", "rollout", "trainer") for path in (root / room).rglob("*.py")]
    users = [str(path.relative_to(root)) for path in sources if "time.time(" in path.read_text(encoding="utf-8")]
    assert sorted(users) == ["trainer/ending/time_limit.py", "trainer/rundir/cache.py"]
