"""An engine that is started in the place of a lost one waits until that one's processes have given its memory back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from rollout.config import DType
from rollout.engine import EngineError, EngineSetup
from rollout.group import worker as workers
from rollout.group.worker import LostEngine, RolloutWorker
from rollout.processes.process_marks import mark_processes, wait_for_end
from rollout.torch.config import TorchEngineConfig


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """A process of the lost engine, which ends by itself after two seconds and is then a zombie."""
    monkeypatch.setattr(workers, "allow_open_files", lambda: None)  # of the process of the tests
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(2)"])


def fresh_worker(directory: Path) -> RolloutWorker:
    path = directory / "model"
    write_tiny_model(path)
    setup = EngineSetup(
        config=TorchEngineConfig(dtype=DType.float32),
        index=3,
        seed=0,
        device="cpu",
        num_threads=1,
        log_dir=directory,
        model_path=path,
    )
    return RolloutWorker(setup)


def test_the_start_waits_for_the_end(lost: subprocess.Popen[bytes], tmp_path: Path) -> None:
    worker = fresh_worker(tmp_path)
    marks = mark_processes([lost.pid])
    assert wait_for_end(marks, timeout_s=0.0) == [lost.pid]
    info, _ = worker.start(LostEngine(processes=marks, cache_tokens=None))
    assert info.name.startswith("torch") and wait_for_end(marks, timeout_s=0.0) == []
    assert Path(f"/proc/{lost.pid}").exists(), "nobody has asked for its exit status, and it counts as ended"
    lost.wait(10)
    assert wait_for_end(marks, timeout_s=0.0) == []
    worker.stop()


def test_what_does_not_end_is_named(
    lost: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fresh_worker(tmp_path)
    monkeypatch.setattr(workers, "RELEASE_TIMEOUT_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(EngineError, match=rf"engine 3 start: processes \[{lost.pid}\] of the engine before"):
        worker.start(LostEngine(processes=mark_processes([lost.pid]), cache_tokens=None))
    assert time.monotonic() - begin < 30
    lost.kill()
    lost.wait(10)
