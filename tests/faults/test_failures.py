"""Real runs that fail between two saves: the last step is saved, the error of the run is the one that is seen, and
`parity resume` goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from asked_run import WORDS, Asked
from runs import metrics_of

import trainer
from rollout.data.arithmetic import arithmetic_problems
from trainer.cli.commands import run as run_command

ENDED_S = 300.0
REWARD = """
import os, pathlib, time
DOWN, HANG = pathlib.Path({down!r}), pathlib.Path({hang!r})
def reward(prompt, response):
    while HANG.exists():
        HANG.with_suffix(".seen").touch()
        time.sleep(0.1)
    if DOWN.exists() and prompt in DOWN.read_text().split():
        raise OSError("the judge is down")
    return sum(map(ord, response)) % 7 / 7
"""
PROMPTS = arithmetic_problems()
OF_TRAINING = "\n".join(problem.prompt for problem in PROMPTS.train)
OF_EVALUATION = "\n".join(problem.prompt for problem in PROMPTS.heldout)
LEARNT = ("reward/mean", "mismatch/k3", "optim/grad_norm", "policy/entropy", "rollout/response_tokens_mean")


class Judged(Asked):
    """A run whose judge hangs while the file `flag` exists, and fails on the prompts in the file `down`."""

    def __init__(self, directory: Path, *words: str) -> None:
        directory.mkdir(exist_ok=True)
        self.down, self.own = directory / "down", directory / "judge.py"
        self.own.write_text(REWARD.format(down=str(self.down), hang=str(directory / "hang")))
        mine = (f"reward.function={self.own}:reward", "reward.outage_wait_s=5", "tracking.wandb=disabled")
        super().__init__(directory, *mine, *words)

    def fails_after(self, last: int) -> str:
        """The run fails by itself with exit code 1, and its step `last` is saved; what it said."""
        self.ended_in(ENDED_S)
        assert self.process.returncode == 1 and self.status() == "failed", self.said
        assert self.checkpoints() == [f"step_{last:06d}"], self.said
        assert self.said.splitlines()[-1] == f"Step {last} is saved; go on with parity resume {self.run_dir}"
        return self.said

    def resume(self, *words: str) -> list[dict[str, Any]]:
        """Go on with the run, without fault, in this process; all its rows."""
        self.down.unlink(missing_ok=True)
        self.flag.unlink(missing_ok=True)
        assert run_command(["resume", str(self.run_dir), *words]) == 0
        return metrics_of(self.run_dir)


@pytest.fixture
def judged(tmp_path: Path, local_ray: None) -> Any:
    runs: list[Judged] = []

    def begin(name: str, *words: str) -> Judged:
        runs.append(Judged(tmp_path / name, *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


Begin = Callable[..., Judged]


def learnt(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[key] for key in LEARNT] for row in rows]


@pytest.mark.slow
@pytest.mark.scenario(40)
@pytest.mark.parametrize("schedule", ["sync", "one_step_off"])
def test_an_outage_of_the_judge_loses_no_step(
    schedule: str, judged: Begin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found in a rollout, or beside the training, whose step is then written down first."""
    run = judged("run", f"schedule={schedule}")
    run.wait_until(lambda: run.steps() >= 3)
    run.down.write_text(OF_TRAINING)
    run.ended_in(ENDED_S)
    last = run.steps()
    said = run.fails_after(last)
    assert "the judge is down" in said and "the judge is down" in (run.run_dir / "error.log").read_text()
    assert (run.run_dir / "report.html").exists()
    rows = run.resume(f"run.num_steps={last + 2}")
    assert [row["step"] for row in rows] == list(range(1, last + 3))
    assert run.status() == "completed"
    if schedule == "sync":  # in the other the engines may have sampled ahead with other weights
        assert "changed since then: what stands in" not in capsys.readouterr().err
        quiet = (str(run.run_dir / "config.yaml"), f"run.dir={tmp_path / 'quiet'}", f"run.num_steps={last + 2}")
        assert run_command(["train", *quiet]) == 0
        assert learnt(rows) == learnt(metrics_of(tmp_path / "quiet"))
        assert any(row["optim/grad_norm"] for row in rows[last:])


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_an_evaluation_that_fails_loses_neither_step_nor_row(judged: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    run = judged("run", "run.num_steps=4", "eval.every=3")
    run.wait_for("held-out before step 1")
    run.down.write_text(OF_EVALUATION)
    run.fails_after(3)
    assert [row["step"] for row in metrics_of(run.run_dir)] == [1, 2, 3]
    assert "eval/accuracy" not in metrics_of(run.run_dir)[-1]
    run.own.write_text(run.own.read_text() + "# edited between the two\n")
    rows = run.resume()
    assert f"changed since then: what stands in {run.own}\n" in capsys.readouterr().err
    # The resumed run makes up for the evaluation in a row of its own, before its next step.
    assert [(row["step"], "eval/accuracy" in row) for row in rows[2:]] == [(3, False), (3, True), (4, True)]


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_a_last_evaluation_that_fails_leaves_the_last_step_and_resume_makes_up_for_it(tmp_path: Path) -> None:
    """Through the Python API, whose error has the way on too."""
    down, own = tmp_path / "down", tmp_path / "judge.py"
    own.write_text(REWARD.format(down=str(down), hang=str(tmp_path / "hang")))
    words = ["rollout=torch", "model.num_steps=120", "policy.num_workers=1", "tracking.wandb=disabled"]
    words += ["batch.prompts_per_step=4", "batch.group_size=4", "eval.max_prompts=4", f"reward.function={own}:reward"]
    words += ["reward.outage_wait_s=5"]
    words += [f"run.dir={tmp_path / 'run'}", "run.num_steps=2", "checkpoint.every=10"]
    run = trainer.train("arithmetic_grpo", words)
    for row in run_rows(run):
        assert row["step"] in (0, 1, 2)
        down.write_text(OF_EVALUATION)
    with pytest.raises(trainer.RunError, match=r"the judge is down(.|\n)*Step 2 is saved; go on with parity resume"):
        run.wait()
    assert list(run.checkpoints) == [2]
    down.unlink()
    assert trainer.resume(run.dir).wait() == "completed"
    assert [row["step"] for row in run.metrics() if "eval/accuracy" in row] == [0, 2]


def run_rows(run: trainer.RunHandle) -> Any:
    """The rows of a run up to its failure."""
    try:
        yield from run
    except trainer.RunError:
        return


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_a_run_that_loses_all_its_engines_saves_its_last_step(judged: Begin) -> None:
    run = judged("run", "rollout.max_restarts=0", "rollout.num_engines=1")
    run.rollout_that_hangs()
    last = run.steps()
    for process in run.processes("ray::RolloutWorker"):
        process.kill()
    run.flag.unlink()
    assert "0 of 1 engines are left" in run.fails_after(run.steps())
    assert run.steps() - last <= 1, "the step whose rewards were waited for may still be trained"


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_a_row_that_the_disk_does_not_take_loses_no_step(judged: Begin) -> None:
    run = judged("run")
    run.wait_until(lambda: run.steps() >= 5)
    run.rollout_that_hangs()
    last, rows = run.steps(), run.run_dir / "metrics.jsonl"
    # The driver may write no byte beyond the rows that are there, as on a full disk; the ranks still can.
    limit = rows.stat().st_size
    psutil.Process(run.process.pid).rlimit(resource.RLIMIT_FSIZE, (limit, limit))
    run.flag.unlink()
    said = run.fails_after(last + 1)
    assert "OSError: [Errno 27] File too large" in said
    resumed = run.resume(f"run.num_steps={last + 2}")
    assert [row["step"] for row in resumed if row["step"] != last + 1] == [*range(1, last + 1), last + 2]


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_a_dead_rank_leaves_the_checkpoint_before_and_says_that_nothing_was_saved(judged: Begin) -> None:
    run = judged("run", "checkpoint.every=2", "checkpoint.keep=1")
    run.wait_until(lambda: run.steps() >= 2)
    run.rollout_that_hangs()
    saved = run.steps() // 2 * 2
    for process in run.processes("ray::PolicyWorker"):
        process.kill()
    run.flag.unlink()
    said = run.fails_after(saved)
    assert "policy 0 died" in said and "Nothing was saved on the way out: a rank has failed" in said


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_a_start_that_dies_leaves_a_completed_run_as_it_was(tmp_path: Path, local_ray: None) -> None:
    run_dir = tmp_path / "run"
    assert run_command([*WORDS, "tracking.wandb=disabled", f"run.dir={run_dir}", "run.num_steps=1"]) == 0
    files = [run_dir / name for name in ("status.json", "metrics.jsonl", "config.yaml", "environment.json")]
    before = [path.read_bytes() for path in files]
    for moment in ("starting Ray", "every rank compares"):
        died = subprocess.Popen(
            [sys.executable, "-m", "trainer", "resume", str(run_dir), "run.num_steps=3"],
            stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert died.stderr is not None
        assert any(moment in line for line in died.stderr)
        below = psutil.Process(died.pid).children(recursive=True)
        died.send_signal(signal.SIGKILL)
        died.communicate()
        for process in below:
            if process.is_running():
                process.kill()
        assert [path.read_bytes() for path in files] == before
    assert json.loads(before[0])["status"] == "completed"
    assert run_command(["resume", str(run_dir), "run.num_steps=2"]) == 0
    assert [row["step"] for row in metrics_of(run_dir)] == [1, 2]


@pytest.mark.slow
@pytest.mark.scenario(40)
def test_a_failure_before_the_first_step_says_that_no_step_is_saved(judged: Begin) -> None:
    run = judged("run")
    run.wait_for("starting Ray")  # the judge answers when it is looked at
    run.down.write_text(OF_EVALUATION)
    run.ended_in(ENDED_S)
    assert run.process.returncode == 1 and run.status() == "failed" and run.checkpoints() == []
    assert run.said.splitlines()[-1] == f"No step is saved; begin again with parity resume {run.run_dir}"
