"""Runs that are asked to end at every moment, once and twice: exit code, status.json, time, and what is left behind.

Each run is the real command in a process of its own, with the torch engine and W&B offline.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trainer.rundir.termination import GO_ON
from trainer.rundir.time_limit import MARGIN_S

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
def reward(response, answer):
    while pathlib.Path({flag!r}).exists():
        time.sleep(0.1)
    return float(answer in response)
"""


class Asked:
    """A run in a process of its own, whose reward function hangs while the file `flag` exists."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.run_dir, self.flag = directory / "run", directory / "hang"
        self.tmp = Path(tempfile.mkdtemp())  # the paths of Ray's sockets must be short
        (directory / "slow_reward.py").write_text(SLOW_REWARD.format(flag=str(self.flag)))
        self._mark = uuid.uuid4().hex
        self._said = directory / "stderr.txt"
        reward = f"reward.function={directory}/slow_reward.py:reward"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *WORDS, reward, f"run.dir={self.run_dir}", *words],
            stdout=subprocess.DEVNULL, stderr=self._said.open("wb"), start_new_session=True,
            env=os.environ | {MARK: self._mark, "TMPDIR": str(self.tmp)},
        )  # fmt: skip

    @property
    def said(self) -> str:
        """What the run has written to stderr so far."""
        return self._said.read_text("utf-8", errors="replace")

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.said)

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def rollout_that_hangs(self) -> None:
        """Return while the rollout of a step after the first waits for its rewards, for as long as `flag` exists."""
        self.wait_until(lambda: self.steps() >= 1)
        self.flag.touch()
        before = -1
        while before != self.steps():
            before = self.steps()
            time.sleep(2.0)

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
            process.kill()
        self.process.wait(10)
        shutil.rmtree(self.tmp)


@pytest.fixture
def asked(tmp_path: Path, base_model_cache: Path) -> Callable[..., Asked]:
    runs: list[Asked] = []

    def begin(*words: str) -> Asked:
        runs.append(Asked(tmp_path, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def check_no_text_outside(run: Asked) -> None:
    """No prompt and no response lies in the temporary directory."""
    rows = (run.run_dir / "samples.jsonl").read_text("utf-8").splitlines()
    texts = {json.loads(row)["prompt"].encode() for row in rows}
    for path in run.tmp.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [text for text in texts if text in content], path


@pytest.mark.slow
@pytest.mark.scenario(34)
@pytest.mark.parametrize(
    ("moment", "sent"),
    [
        ("run directory:", signal.SIGTERM),
        ("starting Ray", signal.SIGINT),
        ("starting Ray", signal.SIGTERM),
        ("a rank starts", signal.SIGTERM),
        ("log-probs proven", signal.SIGINT),
    ],
)
def test_a_signal_during_the_start_ends_the_run_within_half_a_minute(
    moment: str, sent: signal.Signals, asked: Callable[..., Asked]
) -> None:
    first_evaluation = moment == "log-probs proven"
    run = asked(*(["eval.max_prompts=200", "eval.samples=200"] if first_evaluation else []))
    if moment == "a rank starts":
        run.wait_until(lambda: run.processes("ray::PolicyWorker"))
    else:
        run.wait_for(moment)
    if moment == "starting Ray" and sent is signal.SIGTERM:
        run.wait_until(lambda: run.processes("raylet"))
    os.killpg(run.process.pid, sent)
    run.ended_in(30)
    assert run.process.returncode == 128 + sent, run.said
    assert run.status() == "interrupted"
    assert run.steps() == 0 and "nothing was saved" in run.said


@pytest.mark.slow
@pytest.mark.scenario(9)
def test_a_signal_in_a_rollout_gives_the_rollout_up_and_saves_the_step_before(asked: Callable[..., Asked]) -> None:
    run = asked()
    run.rollout_that_hangs()
    last = run.steps()
    run.process.terminate()
    run.ended_in(30)
    assert run.process.returncode == 143, run.said
    assert run.status() == "interrupted"
    assert run.steps() == last and run.checkpoints() == [f"step_{last:06d}"]
    assert f"after step {last}; go on with parity resume {run.run_dir}" in run.said
    assert (run.run_dir / "report.html").exists()
    check_no_text_outside(run)


@pytest.mark.slow
@pytest.mark.scenario(34)
def test_a_second_signal_ends_within_ten_seconds_whatever_runs(asked: Callable[..., Asked]) -> None:
    """The reward function hangs, and the rank, the engine and W&B are suspended: nobody answers any more."""
    run = asked()
    run.rollout_that_hangs()
    for name in ("ray::PolicyWorker", "ray::RolloutWorker", "wandb-core"):
        [process] = run.processes(name)
        process.suspend()
    run.process.terminate()
    run.wait_for("the next signal ends")
    time.sleep(1.0)
    run.process.terminate()
    run.ended_in(10)
    assert run.process.returncode == 143, run.said
    assert run.status() == "interrupted"
    check_no_text_outside(run)


@pytest.mark.slow
@pytest.mark.scenario(10)
def test_a_run_leaves_before_its_time_is_over_and_resume_goes_on(asked: Callable[..., Asked]) -> None:
    budget_s = MARGIN_S + 20  # of these 20 s the start takes most; at least one step is taken
    run = asked(f"run.max_hours={budget_s / 3600}")
    began = time.monotonic()
    assert run.process.wait(150) == GO_ON == 75, run.said
    last = run.steps()
    assert last >= 1 and (last == 1 or time.monotonic() - began < budget_s)
    assert run.status() == "interrupted" and run.checkpoints() == [f"step_{last:06d}"]
    assert "time: run.max_hours ends this run at " in run.said
    assert f"out of time after step {last}: " in run.said and f"go on with parity resume {run.run_dir}" in run.said
    words = ["resume", str(run.run_dir), f"run.num_steps={last + 1}", "run.max_hours=null"]
    environment = os.environ | {"PARITY_DEADLINE": str(int(time.time()) + 3600)}
    done = subprocess.run([sys.executable, "-m", "trainer", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "time: PARITY_DEADLINE ends this run at " in done.stderr
    assert run.steps() == last + 1 and run.status() == "completed"
