"""Runs that are asked to end at every moment, once and twice: exit code, status.json, time, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest
from asked_run import Asked

from trainer.cli.commands import run as run_command
from trainer.ending.exit_codes import GO_ON
from trainer.ending.time_limit import MARGIN_S


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
def test_a_run_leaves_before_its_time_is_over_and_resume_goes_on(
    asked: Callable[..., Asked],
    local_ray: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    budget_s = MARGIN_S + 20  # of these 20 s the start takes most; at least one step is taken
    run = asked(f"run.max_hours={budget_s / 3600}")
    began = time.monotonic()
    assert run.process.wait(150) == GO_ON == 75, run.said
    last = run.steps()
    assert last >= 1 and (last == 1 or time.monotonic() - began < budget_s)
    assert run.status() == "interrupted" and run.checkpoints() == [f"step_{last:06d}"]
    assert "time: run.max_hours ends this run at " in run.said
    assert f"out of time after step {last}: " in run.said and f"go on with parity resume {run.run_dir}" in run.said
    monkeypatch.setenv("PARITY_DEADLINE", str(int(time.time()) + 3600))
    longer = (f"run.num_steps={last + 1}", "run.max_hours=null", "tracking.wandb=disabled")
    assert run_command(["resume", str(run.run_dir), *longer]) == 0
    assert "time: PARITY_DEADLINE ends this run at " in capsys.readouterr().err
    assert run.steps() == last + 1 and run.status() == "completed"
