"""What happens around a run: directories, last line, exit codes, errors. Only `train` itself is replaced."""

from __future__ import annotations

import csv
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from run_directory import write_run

import trainer.cli.job as job
from rollout.engine import EngineError
from trainer.cli.commands import run
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import GO_ON
from trainer.ending.termination import RunTerminated
from trainer.ending.time_limit import OutOfTime
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import StartError

Train = Callable[[TrainConfig], SimpleNamespace]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Train], None]:
    """Put a function in the place of trainer.run.loop.train, and work in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["parity"])
    # Whether the engine is installed is another test's question.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: SimpleNamespace(name=name))

    def replace_train(train: Train) -> None:
        module = ModuleType("trainer.run.loop")
        module.train = train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "trainer.run.loop", module)

    return replace_train


def finished(config: TrainConfig) -> SimpleNamespace:
    report = Path(config.run.dir) / "report.html"
    return SimpleNamespace(run_dir=Path(config.run.dir), report_path=report, was_complete=False)


def test_the_last_line_is_the_report(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[TrainConfig] = []

    def train(config: TrainConfig) -> SimpleNamespace:
        seen.append(config)
        assert not Path(config.run.dir).exists(), "the run makes its directory itself"
        return finished(config)

    use(train)
    assert run(["train", "arithmetic_grpo", "correction=mis", "run.dir=out", "run.num_steps=2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "out/report.html")
    assert (seen[0].run.dir, seen[0].run.recipe) == (str(tmp_path / "out"), "arithmetic_grpo")
    assert (seen[0].correction.mode, seen[0].run.num_steps) == ("mis", 2)
    assert Path.cwd() == tmp_path


def test_a_sweep_ends_with_a_table_and_a_page_and_one_failure_does_not_stop_the_others(
    use: Callable[[Train], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_NAME", raising=False)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    seen: list[TrainConfig] = []

    def train(config: TrainConfig) -> SimpleNamespace:
        seen.append(config)
        if len(seen) == 2:
            raise EngineError("engine 0: generate at version 3: no answer")
        write_run(Path(config.run.dir), num_steps=3, seed=len(seen))
        return finished(config)

    use(train)
    code = run(["train", "arithmetic_grpo", "-m", "correction=tis,mis", "run.seed=0,1", "hydra.sweep.dir=all"])
    assert code == 1
    assert [(run.correction.mode, run.run.seed) for run in seen] == [("tis", 0), ("tis", 1), ("mis", 0), ("mis", 1)]
    assert [run.run.dir for run in seen] == [str(tmp_path / "all" / str(index)) for index in range(4)]
    assert {run.tracking.group for run in seen} == {"arithmetic_grpo/all"}
    assert seen[2].tracking.name == "arithmetic_grpo/2 correction=mis run.seed=0"
    captured = capsys.readouterr()
    assert "run 1: correction=tis run.seed=1 -> " in captured.out
    assert "1 of 4 runs failed" in captured.err
    assert (tmp_path / "all/1/error.log").is_file()
    assert not (tmp_path / "all/0/error.log").exists()

    assert (tmp_path / "all").stat().st_mode & 0o077 == 0, "the page holds prompts and responses"
    *_, place, titles, first, second, _, fourth, page = captured.out.splitlines()
    assert (place, page) == (f"{tmp_path}/all: 4 runs", f"{tmp_path}/all/comparison.html")
    columns = ["run", "correction", "run.seed", "status", "exit code", "reward", "held-out", "K3", "seconds"]
    assert titles.split() == " ".join(columns).split()
    assert first.split()[:8] == ["0", "tis", "0", "completed,", "3", "of", "3", "steps"]
    assert second.split() == ["1", "tis", "1", "failed,", "no", "step", "1", "0"]
    rows = list(csv.DictReader((tmp_path / "all/sweep.csv").open(encoding="utf-8")))
    assert list(rows[0]) == columns and [row["exit code"] for row in rows] == ["0", "1", "0", "0"]
    logged = [row for row in read_rows(tmp_path / "all/3/metrics.jsonl") if row["step"]]
    assert float(rows[3]["reward"]) == logged[-1]["reward/mean"] != logged[0]["reward/mean"]
    assert float(rows[3]["K3"]) == sorted(row["mismatch/k3"] for row in logged)[1]
    assert rows[3]["held-out"] and f"{100 * float(rows[3]['held-out']):.1f} %" in fourth
    assert "3 runs compared" in (tmp_path / "all/comparison.html").read_text()


@pytest.mark.parametrize("lines_read", [0, 4])
def test_a_sweep_whose_reader_leaves_runs_to_its_end(
    lines_read: int,
    use: Callable[[Train], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `| head -1`: before the first run, or before the table, at which the pipe is closed."""
    read, write = os.pipe()
    stdout = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stdout)
    seen: list[TrainConfig] = []

    def leave_after(lines: int) -> None:
        if lines == lines_read:
            os.close(read)

    def train(config: TrainConfig) -> SimpleNamespace:
        seen.append(config)
        leave_after(2 * len(seen) - 1)
        write_run(Path(config.run.dir), num_steps=1, seed=len(seen))
        return finished(config)

    def all_loaded(*words: object) -> None:
        leave_after(4)
        compare(*words)  # type: ignore[arg-type]

    compare = job.compare
    monkeypatch.setattr(job, "compare", all_loaded)
    use(train)
    leave_after(0)
    assert run(["train", "arithmetic_grpo", "-m", "run.seed=0,1", "hydra.sweep.dir=all"]) == 0
    stdout.close()  # the flush at the exit of the interpreter, which would end with exit code 120
    assert [config.run.seed for config in seen] == [0, 1]
    assert capsys.readouterr().err.count("parity train: nobody reads the output any more; the work goes on") == 1
    assert (tmp_path / "all/sweep.csv").is_file() and (tmp_path / "all/comparison.html").is_file()


def test_reports_without_a_reader_leave_the_exit_code(tmp_path: Path) -> None:
    script = f"{Path(sys.executable).parent}/python -m trainer train nosuch 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["/bin/bash", "-c", script], cwd=tmp_path).returncode == 2


def test_a_run_that_is_refused_late_is_refused_in_the_name_of_its_command(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig) -> SimpleNamespace:
        raise StartError("data.train_path must give the prompts that the run had")

    use(train)
    assert run(["train", "arithmetic_grpo", "run.seed=3"]) == 2
    assert "parity train arithmetic_grpo: 1 problem, nothing was started" in capsys.readouterr().err


def test_a_request_to_end_ends_a_sweep(use: Callable[[Train], None], capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def train(config: TrainConfig) -> SimpleNamespace:
        seen.append(config.run.seed)
        raise RunTerminated(signal.SIGTERM, step=2)

    use(train)
    assert run(["train", "arithmetic_grpo", "-m", "run.seed=0,1", "hydra.sweep.dir=all"]) == 143
    assert seen == [0]
    captured = capsys.readouterr()
    assert "asked to end (SIGTERM), after step 2" in captured.err
    assert "1 of 2 runs were not begun; one by one:\n  parity train arithmetic_grpo run.seed=1\n" in captured.err
    assert captured.out.splitlines()[-1].split() == ["1", "1", "not", "begun"]


@pytest.mark.parametrize("reason", ["IsADirectoryError", "asked to end (SIGINT)"])
def test_a_sweep_without_a_page_names_the_command_that_writes_it(
    reason: str,
    use: Callable[[Train], None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(config: TrainConfig) -> SimpleNamespace:
        write_run(Path(config.run.dir), num_steps=2)
        if "SIGINT" not in reason:
            page.mkdir(exist_ok=True)
        return finished(config)

    def interrupted(runs: object) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    use(train)
    page = tmp_path / "all" / "comparison.html"
    if "SIGINT" in reason:
        monkeypatch.setattr("trainer.report.page.render_runs", interrupted)
    words = ["train", "arithmetic_grpo", "-m", "run.seed=0,1", "hydra.sweep.dir=all"]
    assert run(words) == (130 if "SIGINT" in reason else 0)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "was not written" in line]
    assert line.startswith(f"parity train: {page} was not written: {reason}")
    monkeypatch.undo()
    monkeypatch.chdir("/")
    if page.is_dir():
        page.rmdir()
    assert run(shlex.split(line.rpartition("; ")[2].removesuffix(" writes it"))[1:]) == 0
    assert "2 runs compared" in page.read_text()


def test_an_id_of_wandb_is_refused_for_several_runs(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(finished)
    monkeypatch.setenv("WANDB_RUN_ID", "x7")
    assert run(["train", "arithmetic_grpo", "run.dir=out"]) == 0
    words = ["rollout=torch", "study.modes=[tis]", "study.precisions=[float32]", "study.seeds=[0,1]"]
    for command in (["train", "arithmetic_grpo", "-m", "run.seed=0,1"], ["study", "arithmetic_grpo", *words]):
        assert run(command) == 2
        assert "$WANDB_RUN_ID must not be set for 2 runs" in capsys.readouterr().err


def test_a_run_out_of_time_ends_a_sweep_only_at_the_deadline_of_the_job(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def train(config: TrainConfig) -> SimpleNamespace:
        seen.append(config.run.seed)
        raise OutOfTime(step=2, reason="none is left")

    use(train)
    assert run(["train", "arithmetic_grpo", "-m", "run.seed=0,1", "hydra.sweep.dir=all"]) == GO_ON == 75
    assert seen == [0, 1]
    assert "out of time after step 2: none is left" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    assert run(["train", "arithmetic_grpo", "-m", "run.seed=2,3", "hydra.sweep.dir=more"]) == 75
    assert seen == [0, 1, 2]
    assert "1 of 2 runs were not begun" in capsys.readouterr().err


def test_an_error_of_ours_is_one_message_and_its_traceback_is_kept(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train(config: TrainConfig) -> SimpleNamespace:
        raise EngineError("engine 0: start: port 3 is in use, with key Bearer abcdefgh12345678")

    use(train)
    assert run(["train", "arithmetic_grpo", "run.dir=out"]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "parity train failed: engine 0: start: port 3 is in use, with key Bearer <redacted>",
        f"The full traceback is in {tmp_path}/out/error.log.",
    ]
    log = (tmp_path / "out/error.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "in train" in log
    assert "abcdefgh12345678" not in log


@pytest.mark.scenario(13)
def test_nothing_is_written_to_the_directory_of_another_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = write_run(tmp_path / "runs")
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    # The directory is taken between the check of the command line and the start of the run.
    monkeypatch.setattr("trainer.start.checks.start_problems", lambda resolution: [])
    words = ["train", "arithmetic_grpo", f"run.dir={other}", "tracking.wandb=disabled", "model.num_steps=1"]
    assert run(words) == 2
    assert "must be absent or empty" in capsys.readouterr().err
    after = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    assert after == before


def test_an_unexpected_error_says_its_type_and_place(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: TrainConfig) -> SimpleNamespace:
        raise KeyError("nosuch")

    use(train)
    assert run(["train", "arithmetic_grpo", "run.dir=out"]) == 1
    error = capsys.readouterr().err
    assert "parity train failed: KeyError: 'nosuch' (" in error
    assert "test_launch.py:" in error
    assert "Traceback" not in error


def test_a_run_that_was_complete_is_said_to_be(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train(config: TrainConfig) -> SimpleNamespace:
        result = finished(config)
        result.was_complete = True
        return result

    use(train)
    assert run(["train", "arithmetic_grpo", "run.dir=out", "run.num_steps=7"]) == 0
    assert f"{tmp_path}/out has taken all 7 steps: nothing was started" in capsys.readouterr().out


def test_ctrl_c_before_the_run_hears_signals_ends_with_130(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def train(config: TrainConfig) -> SimpleNamespace:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("nothing was interrupted")

    use(train)
    assert run(["train", "arithmetic_grpo", "run.dir=out"]) == 130
    assert "asked to end (SIGINT), before the first step" in capsys.readouterr().err


@pytest.mark.scenario(13)
def test_a_directory_in_use_is_refused_before_the_run(
    use: Callable[[Train], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use(finished)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").write_text("kept")
    assert run(["train", "arithmetic_grpo", "run.dir=out"]) == 2
    assert "run.dir must be absent or empty" in capsys.readouterr().err
    assert (tmp_path / "out/metrics.jsonl").read_text() == "kept"
