"""A full disk: a file system in memory that holds a few pages takes what a real run directory writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = """
import sys
from pathlib import Path
from trainer.cli.job import run_job
from rollout.task_config import ArithmeticDataConfig
from trainer.config.training import ArithmeticModelConfig
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.config.train import TrainConfig
import trainer.run.loop as loop
from trainer.tracking.tracker import Tracker

run_dir = Path(sys.argv[1]) / "run"
config = TrainConfig(
    model=ArithmeticModelConfig(), data=ArithmeticDataConfig(), tracking=TrackingConfig(wandb=WandbMode.disabled)
)
config.run.dir = str(run_dir)

def steps(config, run_dir, checkpoint, *others):
    with Tracker(config, run_dir=run_dir) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        with (run_dir / "filler").open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError as error:
                print(error)
        for step in range(2, 2 if len(sys.argv) > 2 else 1000):
            tracker.log(step, {"reward/mean": 0.5})

loop.run_steps = steps
sys.exit(run_job(config, run_dir))
"""
"""The steps of a run are only its rows; everything around them, and what they write to, is real."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB; skips where nothing can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def ended(disk: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(disk), *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.scenario(11)
def test_a_run_that_cannot_write_its_metrics_fails_and_its_status_says_so(small_disk: Path) -> None:
    done = ended(small_disk)
    assert "No space left on device" in done.stdout
    assert done.returncode == 1 and "parity train failed: OSError: [Errno 28]" in done.stderr
    status = json.loads((small_disk / "run" / "status.json").read_text("utf-8"))
    assert status["status"] == "failed" and status["last_step"] >= 1
    assert not list((small_disk / "run").glob(".*unfinished"))


@pytest.mark.slow
@pytest.mark.scenario(11)
def test_a_completed_run_without_room_for_its_report_is_completed(small_disk: Path) -> None:
    done = ended(small_disk, "complete")
    assert done.returncode == 0, done.stderr
    assert "the run has no report: " in done.stderr and "parity report" in done.stderr
    assert json.loads((small_disk / "run" / "status.json").read_text("utf-8"))["status"] == "completed"
