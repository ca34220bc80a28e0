"""SGLang's processes on a CPU are forks of its server: they do not import everything again."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from sglang_cases import Served


def test_a_start_method_that_is_set_later_changes_nothing() -> None:
    # A lambda reaches a forked process only; a spawned one cannot unpickle it.
    script = (
        "import multiprocessing; from rollout.sglang.cpu.forking import fork_processes; fork_processes();"
        "multiprocessing.set_start_method('spawn', force=True);"
        "process = multiprocessing.Process(target=lambda: None); process.start(); process.join();"
        "raise SystemExit(process.exitcode)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.sglang
def test_no_process_of_a_server_was_spawned(served: Served) -> None:
    # Beside spawned processes multiprocessing keeps one that tracks their resources.
    words = [psutil.Process(pid).cmdline() for pid in served.info.pids]
    assert not any("resource_tracker" in word for command in words for word in command), words
