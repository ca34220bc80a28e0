"""How long a run may take: run.max_hours, the deadline of a job, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainer.compose.compose import Resolution, resolve
from trainer.config.train import TrainConfig
from trainer.ending.time_limit import MARGIN_S, TimeLimit, time_limit
from trainer.start.checks import start_problems

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic_grpo.yaml"


def resolution(*words: str) -> Resolution:
    return resolve(RECIPE, ["rollout=torch", *words], own_dir=None, multirun=False)


def config(*words: str) -> TrainConfig:
    [run] = resolution(*words).runs
    assert run.config is not None
    return run.config


def test_a_run_leaves_when_a_step_its_save_and_the_end_do_not_fit() -> None:
    limit = TimeLimit(MARGIN_S + 1000, "run.max_hours")
    assert limit.after(1, step_s=499) is None, "the first save is expected to take as long as a step"
    ended = limit.after(2, step_s=501)
    assert ended is not None and (ended.exit_code, str(ended)) == (
        75, "out of time after step 2: 18 min are left until run.max_hours, a step and a save take up to 17 min",
    )  # fmt: skip
    with limit.saving():
        pass
    assert limit.after(3, step_s=1) is None, "the save took no time"
    assert limit.after(4, step_s=1001) is not None
    assert TimeLimit(None, "").after(1, step_s=1e9) is None


def test_the_earlier_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert time_limit(config("checkpoint.every=1")).line == ""
    assert "run.max_hours ends this run at " in time_limit(config("checkpoint.every=1", "run.max_hours=2")).line
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 3600))
    line = time_limit(config("checkpoint.every=1", "run.max_hours=2")).line
    assert line.startswith("time: SLURM_JOB_END_TIME ends this run at ") and "in 60 min" in line
    monkeypatch.setenv("PARITY_DEADLINE", str(time.time() + 3 * 3600))
    assert "run.max_hours" in time_limit(config("checkpoint.every=1", "run.max_hours=2")).line, "ours goes first"
    assert time_limit(config("checkpoint.every=0")).line == "", "nothing would be saved"


def test_a_clock_step_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_DEADLINE", str(time.time() + MARGIN_S + 100))
    limit = time_limit(config("checkpoint.every=1"))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert limit.after(1, step_s=10) is None
    assert limit.after(2, step_s=60) is not None


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    [problem] = resolution("checkpoint.every=0", "run.max_hours=2").problems
    assert "run.max_hours must be null with checkpoint.every=0" in str(problem)
    assert "must be > 0 hours" in str(resolution("checkpoint.every=1", "run.max_hours=0").problems[0])
    for value in ("soon", "nan", "1700000000"):
        monkeypatch.setenv("PARITY_DEADLINE", value)
        [problem] = start_problems(resolution())
        assert problem.key == "PARITY_DEADLINE" and "a Unix time in seconds that has not passed" in str(problem)
