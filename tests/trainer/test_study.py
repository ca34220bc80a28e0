"""The grid of a study, what it refuses, how its runs are started, skipped, resumed and ended, and what it concludes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import trainer.study.run as study_run
from trainer.cli.commands import run
from trainer.ending.exit_codes import GO_ON
from trainer.limits.machine import Machine
from trainer.rundir.provenance import config_document
from trainer.rundir.run_dir import lock_directory, logged_step
from trainer.study.config import DEFAULT_MODES, StudyConfig
from trainer.study.grid import Cell, Study, compose_study
from trainer.study.results import CellRecord, Stage, make_way, stage_of, study_problems
from trainer.study.run import cell_command, last_words, parallel_problems, run_cells
from trainer.text.plain import duration
from trainer.tracking.tracker import Tracker

RECIPES = Path(__file__).parents[2] / "recipes"
WORDS = ("rollout=torch", "run.num_steps=3", "tracking.wandb=disabled")


def grid_of(*words: str, recipe: str = "arithmetic_grpo", **axes: object) -> Study:
    grid, problems = compose_study(
        RECIPES / f"{recipe}.yaml",
        [*WORDS, *words],
        StudyConfig(**axes),  # type: ignore[arg-type]
        own_dir=None,
    )
    assert not problems, [str(problem) for problem in problems]
    return grid


@pytest.fixture(scope="module")
def small() -> Study:
    """Four cells."""
    return grid_of(modes=["tis", "mis"], precisions=["int8"], seeds=[0, 4])


def test_the_grid_is_every_mode_precision_and_seed_and_a_seed_is_complete_before_the_next(small: Study) -> None:
    assert [cell.name for cell in small.cells] == [
        "tis-int8-seed0",
        "mis-int8-seed0",
        "tis-int8-seed4",
        "mis-int8-seed4",
    ]
    for cell in small.cells:
        config = cell.config
        assert (config.run.seed, config.correction.mode) == (cell.seed, cell.mode)
        assert (config.rollout.dtype.name, config.rollout.quantization.name) == ("bfloat16", "int8")
        assert config.run.num_steps == 3, "overrides go to every run"


def test_by_default_the_precisions_are_that_of_the_engine_and_int8_and_presets_are_modes() -> None:
    words = ("rollout.dtype=float32", "rollout.num_engines=2")
    grid = grid_of(*words, modes=["bypass_pg_is"], seeds=[0])
    assert grid.config.precisions == ["float32", "int8"]
    plain, quantised = (cell.config.rollout for cell in grid.cells)
    assert plain.quantization.name == "none"
    # A grid leaves the engines their type.
    assert (quantised.quantization.name, quantised.dtype.name) == ("int8", "float32")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["study", *words]) == 2
    return capsys.readouterr().err


def test_all_problems_of_all_runs_come_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(
        capsys,
        "arithmetic_grpo",
        *WORDS,
        "study.modes=[tis,mis,nosuch]",
        "study.precisions=[bfloat16,int8]",
        "study.seeds=[0]",
        "correction.cap=3",
        "run.seed=1",
        "run.dir=x",
        "optim.lr=1,2",
        "batch.group_size=0",
        "-m",
    )
    for said in (
        "flag is not known, got '-m'. It is a flag of parity train.",
        "run.seed is set by the study, got '1'. Name the seeds with study.seeds=[...]",
        "run.dir is set by the study",
        "optim.lr cannot be swept in a study",
        "[correction=mis] correction.cap is not a key of correction=mis",
        "study.modes must be one of bypass, ",
        "got 'nosuch'",
        "batch.group_size must be >= 1, got 0",
    ):
        assert said in error, said
    assert error.count("batch.group_size must be >= 1") == 1, "one line for all runs"
    assert "correction=tis] correction.cap" not in error
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_keys_of_the_study_are_checked_with_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(
        capsys,
        "arithmetic_grpo",
        *WORDS,
        "study.mode=[tis]",
        "seeds=[0]",
        "study.precisions=[int3]",
        "study.seeds=[1,1]",
        "study.parallel=0",
        "optim.lr=fast",
    )
    for said in (
        "study.mode is not a key of study, got ['tis']. Did you mean study.modes?",
        "seeds is a key of the study, got '[0]'. Write study.seeds=[0]",
        "optim.lr must be a number",
    ):
        assert said in error, said
    error = refused(
        capsys, "arithmetic_grpo", *WORDS, "study.precisions=[int3]", "study.seeds=[1,1]", "study.parallel=0"
    )
    for said in ("study.precisions must be of float32", "study.seeds must name everything once", "study.parallel must"):
        assert said in error, said


def test_a_wrong_value_of_an_axis_is_named_under_the_key_of_the_study(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("study.precisions=[bfloat16,int8]", "study.modes=[tiss,mis]")
    error = refused(capsys, "arithmetic_grpo", *WORDS, *words, "study.seeds=[-1,0]")
    first, second = error.splitlines()[1:]
    assert first.startswith("  - study.modes must be one of ") and first.endswith(", got 'tiss'. Did you mean tis?")
    assert second == "  - study.seeds must lie in [0, 2**31), got -1."
    both = refused(capsys, "arithmetic_grpo", *WORDS, "study.precisions=[int9]", "study.modes=[tis,msi]")
    assert "2 problems" in both and ", got 'int9'" in both and both.endswith(", got 'msi'. Did you mean mis?\n")
    error = refused(capsys, "arithmetic_grpo", *WORDS, "study.precisions=[int8]", "study.modes=[zzzz]")
    assert "1 problem" in error and "  - study.modes must be one of " in error


def test_runs_at_a_time_must_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(cpus=2, gpus=0, memory=2**34)
    axes = {"modes": ["tis"], "precisions": ["bfloat16"], "seeds": [0]}
    assert parallel_problems(grid_of(**axes, parallel=2), machine) == []
    [problem] = parallel_problems(grid_of(**axes, parallel=3), machine)
    assert "study.parallel must be <= 2: this machine has 2 CPU" in str(problem)
    words = ("rollout.gpus_per_engine=1", "policy.gpus_per_worker=1", "policy.num_workers=1")
    machine = Machine(cpus=64, gpus=4, memory=2**40)
    monkeypatch.setattr("trainer.start.task_check.this_machine", lambda: machine)
    assert parallel_problems(grid_of(*words, **axes, parallel=2), machine) == []
    [problem] = parallel_problems(grid_of(*words, **axes, parallel=3), machine)
    assert "must be <= 2: this machine has 4 GPU, and each run needs 2 GPU" in str(problem)


def test_runs_beside_each_other_see_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("rollout.gpus_per_engine=1", "policy.gpus_per_worker=1", "policy.num_workers=1")
    monkeypatch.setattr("trainer.start.task_check.this_machine", lambda: Machine(cpus=64, gpus=4, memory=2**40))
    [cell] = grid_of(*words, modes=["tis"], precisions=["bfloat16"], seeds=[0]).cells
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [study_run._devices(cell, slot) for slot in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert study_run._devices(cell, 1) == {"CUDA_VISIBLE_DEVICES": "6,7"}


def test_a_cell_is_the_command_of_an_ordinary_run(small: Study, tmp_path: Path) -> None:
    cell = small.cells[0]
    words = cell_command(small, cell, tmp_path)[1:]
    assert words[:4] == ["-P", "-m", "trainer", "train"]
    assert words[4] == str(RECIPES / "arithmetic_grpo.yaml")
    assert {"correction=tis", "run.seed=0", "rollout.quantization=int8", "run.resume=auto", *WORDS} <= set(words)
    assert f"run.dir='{tmp_path}/tis-int8-seed0'" in words


FAKE = """
import json, os, pathlib, signal, sys, time
directory, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
directory.mkdir(parents=True, exist_ok=True)
record = {"versions": {"parity-rl": "0"}, "group": os.environ["WANDB_RUN_GROUP"]}
(directory / "environment.json").write_text(json.dumps(record))
def end(status, last):
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": s + 1}) + "\\n" for s in range(last)))
    (directory / "status.json").write_text(json.dumps({"status": status, "last_step": last}))
def leave(code):
    (directory / "checkpoints" / "step_000002").mkdir(parents=True, exist_ok=True)
    end("interrupted", 2)
    sys.exit(code)
if behaviour == "works":
    end("completed", 3)
elif behaviour == "fails":
    print("parity train failed: engine 0: no answer")
    print("The full traceback is in error.log.")
    sys.exit(1)
elif behaviour == "hangs":
    (directory / "hanging").touch()
    time.sleep(60)
elif behaviour == "leaves":
    leave(75)
elif behaviour == "listens":
    signal.signal(signal.SIGTERM, lambda *_: leave(143))
    (directory / "listening").touch()
    time.sleep(60)
"""
"""A process that leaves what a run leaves."""


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Decide what the processes of the cells do, by name; the supervision of them is real."""

    def decide(behaviours: dict[str, str]) -> None:
        def command(study: Study, cell: Cell, study_dir: Path) -> list[str]:
            return [sys.executable, "-c", FAKE, str(study_dir / cell.name), behaviours.get(cell.name, "works")]

        monkeypatch.setattr(study_run, "cell_command", command)

    return decide


def run_all(
    grid: Study, directory: Path, records: dict[str, CellRecord], *, parallel: int = 2, **settings: object
) -> int:
    directory.mkdir(exist_ok=True)
    config = replace(grid.config, parallel=parallel, **settings)  # type: ignore[arg-type]
    return run_cells(replace(grid, config=config), directory, records, ended=lambda: None)


def stages(grid: Study, directory: Path) -> list[str]:
    return [stage_of(directory, cell).name for cell in grid.cells]


def test_a_failure_or_a_hang_costs_its_cell_and_the_next_call_repeats_only_these(
    small: Study,
    tmp_path: Path,
    behave: Callable[[dict[str, str]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [cell.name for cell in small.cells]
    directory, records = tmp_path / "study", {}
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    behave({names[1]: "fails", names[2]: "hangs"})
    assert run_all(small, directory, records, cell_timeout_s=8.0) == 0
    assert stages(small, directory) == ["finished", "broken", "broken", "finished"]
    assert records[names[1]].error == "engine 0: no answer (exit code 1)"
    assert records[names[2]].error == "it took longer than study.cell_timeout_s=8"
    assert records[names[0]].error == "" and 0 < records[names[0]].seconds < 8 < records[names[2]].seconds
    groups = {json.loads((directory / name / "environment.json").read_text())["group"] for name in names}
    assert groups == {"arithmetic_grpo/study"}, "the runs of a study are one group in W&B"
    said = capsys.readouterr().err
    assert f"{names[1]} FAILED after" in said and f"{names[0]} done in" in said
    assert "left, about" in said
    before = {name: (directory / name / "status.json").stat().st_mtime_ns for name in (names[0], names[3])}
    behave({})
    assert run_all(small, directory, records) == 0
    assert stages(small, directory) == ["finished"] * 4
    assert records[names[1]].error == "" and records[names[2]].error == ""
    assert before == {name: (directory / name / "status.json").stat().st_mtime_ns for name in before}
    said = capsys.readouterr().err
    assert f"[1/2] {names[1]} begins again" in said and names[0] not in said


def ask_to_end(request: signal.Signals, files: list[Path]) -> None:
    """Send `request` to this process when the files of the cells are there."""
    deadline = time.monotonic() + 20
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(os.getpid(), request)


def test_ctrl_c_lets_the_running_cells_save_and_starts_no_more(
    small: Study, tmp_path: Path, behave: Callable[[dict[str, str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [cell.name for cell in small.cells]
    directory, records = tmp_path / "study", {}
    behave({names[0]: "listens", names[1]: "listens"})
    listening = [directory / name / "listening" for name in names[:2]]
    thread = threading.Thread(target=ask_to_end, args=(signal.SIGINT, listening))
    thread.start()
    assert run_all(small, directory, records) == 130
    thread.join()
    assert stages(small, directory) == ["stopped", "stopped", "new", "new"]
    assert records[names[0]].error == "", "being asked to end is no failure"
    behave({})
    capsys.readouterr()
    assert run_all(small, directory, records, parallel=1) == 0
    assert f"[1/4] {names[0]} goes on after step 2" in capsys.readouterr().err
    assert stages(small, directory) == ["finished"] * 4


def test_a_run_that_does_not_end_when_asked_is_killed(
    small: Study, tmp_path: Path, behave: Callable[[dict[str, str]], None]
) -> None:
    name = small.cells[0].name
    behave({name: "hangs"})
    thread = threading.Thread(target=ask_to_end, args=(signal.SIGTERM, [tmp_path / "study" / name / "hanging"]))
    thread.start()
    begun = time.monotonic()
    assert run_all(small, tmp_path / "study", {}, parallel=1, stop_timeout_s=0.5) == 143
    assert time.monotonic() - begun < 40
    thread.join()


def test_a_run_out_of_time_is_no_failure_and_at_the_end_of_the_job_no_other_begins(
    small: Study,
    tmp_path: Path,
    behave: Callable[[dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [cell.name for cell in small.cells]
    directory, records = tmp_path / "study", {}
    behave({names[0]: "leaves"})
    monkeypatch.setenv("PARITY_DEADLINE", str(time.time() + 3600))
    assert run_all(small, directory, records, parallel=1) == GO_ON
    assert stages(small, directory) == ["stopped", "new", "new", "new"] and records[names[0]].error == ""
    assert f"{names[0]} left after" in capsys.readouterr().err
    monkeypatch.delenv("PARITY_DEADLINE")
    assert run_all(small, directory, records, parallel=1) == GO_ON
    assert stages(small, directory) == ["stopped", "finished", "finished", "finished"], "run.max_hours is of one run"
    behave({})
    assert run_all(small, directory, records) == 0


def test_a_page_that_cannot_be_written_costs_no_run(
    tmp_path: Path,
    behave: Callable[[dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    behave({})
    (tmp_path / "both" / "study.html").mkdir(parents=True)  # nothing can be written in its place
    (tmp_path / "both" / "study.json").write_text(json.dumps({"cells": [], "other_cells": []}))
    words = ["study.modes=[tis]", "study.precisions=[int8]", "study.seeds=[0]", "study.dir=both"]
    assert run(["study", "arithmetic_grpo", *WORDS, *words]) == 1
    said = capsys.readouterr()
    assert "tis-int8-seed0 done in" in said.err and "both/study.html could not be written (IsADirectory" in said.err
    assert " tis " in said.out, "the table is printed all the same"
    (tmp_path / "both" / "study.html").rmdir()
    assert run(["study", "arithmetic_grpo", *WORDS, *words]) == 0
    assert (tmp_path / "both" / "study.html").is_file()


def test_what_a_cell_left_is_read_from_its_files(small: Study, tmp_path: Path) -> None:
    cell = small.cells[0]
    directory = tmp_path / cell.name
    assert stage_of(tmp_path, cell) is Stage.new
    directory.mkdir()
    assert stage_of(tmp_path, cell) is Stage.new
    (directory / "error.log").write_text("x")
    assert stage_of(tmp_path, cell) is Stage.broken
    make_way(tmp_path, cell)
    assert (tmp_path / f"{cell.name}.before-1" / "error.log").is_file() and not directory.exists()
    directory.mkdir()
    (directory / "environment.json").write_text(json.dumps({"versions": {"parity-rl": "0"}}))
    make_way(tmp_path, cell)
    assert directory.exists(), "the run itself moves an earlier run aside"
    (directory / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    (directory / "checkpoints" / "step_000001").mkdir(parents=True)
    assert (stage_of(tmp_path, cell), logged_step(directory)) == (Stage.stopped, 2)
    (directory / "status.json").write_text(json.dumps({"status": "completed", "last_step": 2}))
    assert stage_of(tmp_path, cell) is Stage.stopped, "completed, but with fewer steps"
    (directory / "status.json").write_text(json.dumps({"status": "completed", "last_step": 3}))
    assert stage_of(tmp_path, cell) is Stage.finished


def test_a_directory_with_runs_of_another_config_is_refused(small: Study, tmp_path: Path) -> None:
    assert study_problems(tmp_path, small.cells) == []
    (tmp_path / "notes.txt").write_text("mine")
    [problem] = study_problems(tmp_path, small.cells)
    assert "must be absent, empty, or the directory of a study" in str(problem)
    (tmp_path / "study.json").write_text("{}")
    for cell in small.cells[:2]:
        (tmp_path / cell.name).mkdir()
        (tmp_path / cell.name / "config.yaml").write_text(config_document(cell.config))
    assert study_problems(tmp_path, small.cells) == []
    other = grid_of("optim.lr=1e-3", modes=["tis", "mis"], precisions=["int8"], seeds=[0])
    [problem] = study_problems(tmp_path, other.cells)
    assert "holds 2 runs of another config, for example tis-int8-seed0 (optim.lr 0.0001 -> 0.001)" in str(problem)
    other = grid_of("schedule=one_step_off", modes=["tis"], precisions=["int8"], seeds=[0])
    [problem] = study_problems(tmp_path, other.cells)
    assert "(schedule sync -> one_step_off" in str(problem), "an option without keys of its own is told"


def test_runs_of_other_code_are_not_mixed(small: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, study_dir = tmp_path / "mine.py", tmp_path / "study"
    mine.write_text("def score(response): return 1.0\n")
    [cell] = grid_of("reward.function=mine.py:score", modes=["tis"], precisions=["int8"], seeds=[0]).cells
    with Tracker(cell.config, run_dir=study_dir / cell.name) as tracker:
        tracker.log(1, {})
    (study_dir / "study.json").write_text("{}")
    assert study_problems(study_dir, [cell]) == []
    mine.write_text("def score(response): return 0.0\n")
    [problem] = study_problems(study_dir, [cell])
    assert "holds runs of other code" in str(problem) and f"{mine} has changed since" in str(problem)


def test_one_study_at_a_time_in_a_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["study.modes=[tis]", "study.precisions=[int8]", "study.seeds=[0]", "study.dir=both"]
    with lock_directory(Path("both"), key="study.dir"):
        (tmp_path / "both" / "study.json").write_text("{}")
        said = refused(capsys, "arithmetic_grpo", *WORDS, *words)
    assert f"1 problem, nothing was started\n  - study.dir both is in use by process {os.getpid()}" in said


def test_the_reason_of_a_failure_is_the_message_of_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_words(log) == ""
    log.write_text("step 1\nparity train arithmetic_grpo: 1 problem, nothing was started\n  - run.dir must be absent\n")
    assert last_words(log) == "run.dir must be absent"
    log.write_text("step 1\nparity train failed: engine 0: gone\nThe full traceback is in x.\n")
    assert last_words(log) == "engine 0: gone"
    log.write_text("step 1\nFatal Python error: Segmentation fault\n")
    assert last_words(log) == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize(("seconds", "text"), [(7.2, "7 s"), (600, "10 min"), (3 * 3600 + 61, "3 h 01 min")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_dry_run_shows_the_grid_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["study", "arithmetic_grpo", *WORDS, "study.modes=[tis,mis]", "study.seeds=[0]", "--dry-run"]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert "4 runs = 2 modes x 2 precisions x 1 seed, 1 at a time, in outputs/studies/arithmetic_grpo/" in shown
    for text in ("tis-bfloat16-seed0: new", "mis-int8-seed0: new", "3 each, 12 together", "objective   L = -sum m"):
        assert text in shown, text
    assert not list(tmp_path.iterdir())
    assert tuple(StudyConfig().modes) == DEFAULT_MODES
