"""What a worker drops and raises of the environment in which Ray was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.processes.inherited import forget_allocator, forget_launcher

WORKER = """
import os, resource
from pathlib import Path
from rollout.torch.config import TorchEngineConfig
from rollout.engine import EngineSetup
from rollout.group.worker import RolloutWorker
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
here = Path.cwd()
RolloutWorker(EngineSetup(config=TorchEngineConfig(), index=0, seed=0, device="cpu", num_threads=1, log_dir=here,
                          model_path=here))
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most), "LOCAL_RANK" in os.environ)
"""


def test_a_launcher_is_forgotten_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"LOCAL_RANK": "3", "RANK": "11", "WORLD_SIZE": "16", "MASTER_ADDR": "host", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    others = {name: value for name, value in os.environ.items() if name not in launched}
    forget_launcher()
    assert dict(os.environ) == others
    forget_launcher()
    assert dict(os.environ) == others


def test_an_engine_that_sleeps_has_no_options_of_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    forget_allocator()
    assert not [name for name in os.environ if "ALLOC_CONF" in name]
    forget_allocator()


def test_an_engine_may_open_as_many_files_as_its_user_and_has_no_launcher(tmp_path: Path) -> None:
    """In a process of its own: a process cannot be given back its limit of files by a test of another file."""
    environment = os.environ | {"LOCAL_RANK": "3"}
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]
