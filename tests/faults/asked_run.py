"""A real run in a process of its own, for tests that do something to it: signals, suspended processes, hanging rewards.

Each run is the real command with the torch engine and W&B offline.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from trainer.rundir.run_dir import logged_step

MARK = "PARITY_TEST_RUN"
"""Environment variable by which every process below a run is found, also one that changes its parent."""
WORDS = (
    "train", "arithmetic_grpo", "rollout=torch", "model.num_steps=120", "policy.num_workers=1",
    "tracking.wandb=offline",
    "batch.prompts_per_step=4", "batch.group_size=4", "eval.max_prompts=4", "run.num_steps=1000",
    "checkpoint.every=1000", "reward.timeout_s=600",
)  # fmt: skip
SLOW_REWARD = """
import pathlib, time
FLAG = pathlib.Path({flag!r})
def reward(response, answer):
    while FLAG.exists():
        FLAG.with_suffix(".seen").touch()
        time.sleep(0.1)
    return float(answer in response)
"""


class Asked:
    """A run in a process of its own, whose reward function hangs while the file `flag` exists."""

    def __init__(self, directory: Path, *words: str, start: Sequence[str] = ("-m", "trainer")) -> None:
        """Python is started with `start` and the words of the command."""
        self.run_dir, self.flag = directory / "run", directory / "hang"
        self.tmp = Path(tempfile.mkdtemp())  # the paths of Ray's sockets must be short
        (directory / "slow_reward.py").write_text(SLOW_REWARD.format(flag=str(self.flag)))
        self._mark = uuid.uuid4().hex
        self._said = directory / "stderr.txt"
        reward = f"reward.function={directory}/slow_reward.py:reward"
        self.process = subprocess.Popen(
            [sys.executable, *start, *WORDS, reward, f"run.dir={self.run_dir}", *words],
            stdout=subprocess.DEVNULL, stderr=self._said.open("wb"), start_new_session=True,
            env=os.environ | {MARK: self._mark, "TMPDIR": str(self.tmp)},
        )  # fmt: skip

    @property
    def said(self) -> str:
        """What the run has written to stderr so far."""
        return self._said.read_text("utf-8", errors="replace")

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.said)

    def steps(self) -> int:
        return logged_step(self.run_dir)

    def rollout_that_hangs(self) -> None:
        """Return while the rollout of a step after the first waits for its rewards, for as long as `flag` exists."""
        self.wait_until(lambda: self.steps() >= 1)
        self.flag.touch()
        self.wait_until(self.flag.with_suffix(".seen").exists)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The processes of the run whose name or command line contains `name`, without zombies."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != self._mark:
                    continue
                if name in " ".join([process.name(), *process.cmdline()]):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def ended_in(self, within_s: float) -> float:
        """Seconds until the process has ended and nothing is left of it; fails after `within_s`."""
        began = time.monotonic()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still there after {within_s} s; it said:\n{self.said}")
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 3
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.processes()
        return seconds

    def status(self) -> str:
        return str(json.loads((self.run_dir / "status.json").read_text("utf-8"))["status"])

    def checkpoints(self) -> list[str]:
        return [path.name for path in (self.run_dir / "checkpoints").glob("*")]

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(10)
        shutil.rmtree(self.tmp)
