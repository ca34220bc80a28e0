"""The guard against leftovers, run for real: an inner pytest session whose tests leave something behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parent

CLEAN = """
    import subprocess, sys, time

    def test_clean():
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        time.sleep(1)
"""
# The shell of the daemon leaves at once: the sleeper belongs to init before anybody can see it below the session.
LEAKY = """
    import subprocess
    from multiprocessing import resource_tracker, shared_memory

    kept = []

    def test_child():
        subprocess.Popen(["sleep", "1234.5"])

    def test_daemon():
        subprocess.run(["sh", "-c", "setsid sleep 1234.6 >/dev/null 2>&1 &"], check=True)

    def test_segment():
        kept.append(shared_memory.SharedMemory(create=True, size=64, name="psm_parity_guard"))
        resource_tracker.unregister(kept[0]._name, "shared_memory")

    def test_closes_the_segment():
        kept[0].close()
"""


def run_session(directory: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run `body` as the only test file of a session with the guard."""
    (directory / "test_inner.py").write_text(textwrap.dedent(body), encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "leftovers",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:hypothesispytest",
            str(directory),
        ],
        env=os.environ | {"PYTHONPATH": str(TESTS), "PARITY_TEST_GRACE_S": "2"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
    )


def running(*words: str) -> bool:
    deadline = time.monotonic() + 5
    while found := any(list(words) == process.info["cmdline"] for process in psutil.process_iter(["cmdline"])):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return found


def test_all_that_is_left_is_named_and_ended(tmp_path: Path) -> None:
    result = run_session(tmp_path, LEAKY)
    assert result.returncode == 1, result.stdout
    assert "4 passed, 1 error" in result.stdout
    for left in (": sleep 1234.5", ": sleep 1234.6", "segment /dev/shm/psm_parity_guard"):
        assert left in result.stdout
    assert not running("sleep", "1234.5")
    assert not running("sleep", "1234.6")
    assert not Path("/dev/shm/psm_parity_guard").exists()


def test_processes_of_others_do_not_count(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "1234.7"], env={"PATH": os.environ["PATH"]})
    try:
        result = run_session(tmp_path, CLEAN)
        assert stranger.poll() is None, "the guard ended a process that is not its own"
    finally:
        stranger.kill()
        stranger.wait()
    assert result.returncode == 0, result.stdout
