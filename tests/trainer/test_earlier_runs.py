"""A directory that holds an earlier run: refused, moved aside or found, and the command that goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from compose_cases import config_of as resolve_recipe
from resume_cases import make, rows, save

from trainer.cli.commands import run as parity
from trainer.config.training import Resume
from trainer.rundir.run_dir import (
    has_checkpoint,
    is_run,
    release_directory,
    take_directory,
)
from trainer.tracking.tracker import Tracker


def leave_run(directory: Path, *, steps: int = 1) -> None:
    """What a run without a checkpoint leaves, begun at the time that is its name."""
    config = make(directory.parent)
    with Tracker(config, run_dir=directory) as tracker:
        for step in range(1, steps + 1):
            tracker.log(step, {})
    path = directory / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started_at": directory.name}))


pytestmark = pytest.mark.usefixtures("no_cached_model")


@pytest.mark.scenario(13)
def test_an_earlier_run_is_refused_with_the_commands(tmp_path: Path) -> None:
    leave_run(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"must be absent or empty.*run\.resume=clean") as caught:
        take_directory(tmp_path / "run", resume=Resume.never, continues=False)
    assert "run.resume=auto" not in str(caught.value)
    save(make(tmp_path), 1)
    with pytest.raises(RuntimeError, match=r"Go on with it: run\.resume=auto\."):
        take_directory(tmp_path / "run", resume=Resume.never, continues=False)


@pytest.mark.parametrize("resume", [Resume.auto, Resume.clean])
def test_an_earlier_run_is_moved_aside_whole(tmp_path: Path, resume: Resume) -> None:
    for count in (1, 2, 3):
        leave_run(tmp_path / "run", steps=count)
        (tmp_path / "run" / "notes.txt").write_text("mine")
        lock, aside = take_directory(tmp_path / "run", resume=resume, continues=False)
        assert aside is not None and aside.name.startswith("run.before-20")
        assert rows(aside / "metrics.jsonl") == list(range(1, count + 1))
        assert (aside / "notes.txt").read_text() == "mine"
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
        assert not (aside / ".lock").exists()
        release_directory(lock, tmp_path / "run")
    assert len(list(tmp_path.glob("run.before-*"))) == 3


@pytest.mark.parametrize("resume", [Resume.auto, Resume.clean])
def test_files_that_no_run_wrote_are_left_alone(tmp_path: Path, resume: Resume) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    (tmp_path / "run" / "environment.json").write_text('{"versions": {}}')
    with pytest.raises(RuntimeError, match=r"no run of Parity wrote \(environment.json, thesis.tex\)"):
        take_directory(tmp_path / "run", resume=resume, continues=False)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["environment.json", "thesis.tex"]


def test_the_working_directory_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(RuntimeError, match="cannot be moved aside"):
        take_directory(tmp_path / "run", resume=Resume.clean, continues=False)


def test_a_run_that_was_killed_at_once_is_known(tmp_path: Path) -> None:
    assert not is_run(tmp_path) and not is_run(tmp_path / "absent")
    (tmp_path / "config.yaml").write_text("")
    assert not is_run(tmp_path)
    (tmp_path / ".lock").write_text("1")
    assert is_run(tmp_path) and not has_checkpoint(tmp_path)
    (tmp_path / "thesis.tex").write_text("mine")
    assert not is_run(tmp_path)


TORCH = ("rollout=torch", "--dry-run")


def test_resume_auto_finds_the_newest_run_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs" / "arithmetic_grpo"
    assert parity(["train", "arithmetic_grpo", "resume=auto", *TORCH]) == 0
    assert "outputs/arithmetic_grpo/20" in capsys.readouterr().out, "nothing to go on with: a new run"
    for name in ("2026-01-02_03-04-05", "2026-01-03_03-04-05", "2026-01-01_03-04-05"):
        leave_run(outputs / name)
    (outputs / "2027-not-a-run").mkdir()
    with Tracker(make(tmp_path), run_dir=outputs / "2026-01-04_03-04-05") as tracker:
        tracker.log_evaluation(0, {"eval/accuracy": 0.25})  # and it is killed before its first step
    assert parity(["train", "arithmetic_grpo", "resume=auto", *TORCH]) == 0
    assert f"{outputs}/2026-01-03_03-04-05: metrics.jsonl" in capsys.readouterr().out
    assert (
        parity(["train", "arithmetic_grpo", "run.resume=auto", f"run.dir={outputs}/2026-01-01_03-04-05", *TORCH]) == 0
    )
    assert f"{outputs}/2026-01-01_03-04-05: metrics.jsonl" in capsys.readouterr().out
    assert parity(["train", "arithmetic_grpo", *TORCH]) == 0
    assert "2026-01-03_03-04-05" not in capsys.readouterr().out


def test_resume_auto_passes_over_copies_of_older_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy, or a run that was renamed, may have a name that comes after all times."""
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs" / "arithmetic_grpo"
    for name in ("2026-01-03_03-04-05", "2026-01-02_03-04-05"):
        leave_run(outputs / name)
    shutil.copytree(outputs / "2026-01-02_03-04-05", outputs / "good_one")
    shutil.copytree(outputs / "2026-01-03_03-04-05", outputs / "2026-01-03_03-04-05.bak")
    assert parity(["train", "arithmetic_grpo", "resume=auto", *TORCH]) == 0
    assert f"{outputs}/2026-01-03_03-04-05: metrics.jsonl" in capsys.readouterr().out
    (outputs / "2026-01-03_03-04-05").rename(outputs / "a_new_name")
    shutil.rmtree(outputs / "2026-01-03_03-04-05.bak")
    assert parity(["train", "arithmetic_grpo", "resume=auto", *TORCH]) == 0
    assert f"{outputs}/a_new_name: metrics.jsonl" in capsys.readouterr().out


def test_a_dry_run_says_what_it_would_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def plan_of(*words: str, code: int = 0) -> str:
        command = ["train", "arithmetic_grpo", "run.num_steps=5", f"run.dir={tmp_path / 'run'}", *words, *TORCH]
        assert parity(command) == code
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resume ")]
        return found[0] if found else ""

    assert plan_of() == ""
    assert "no earlier run" in plan_of("resume=auto")
    leave_run(tmp_path / "run", steps=5)
    assert "has taken all 5 steps: nothing is started; it saved no checkpoint" in plan_of("resume=auto")
    assert "moved aside" in plan_of("resume=auto", "run.num_steps=6"), "nothing was saved"
    config = resolve_recipe("rollout=torch", f"run.dir={tmp_path / 'run'}")
    save(config, 4)
    assert "after step 4 of 5, if" in plan_of("resume=auto"), "the last step was not saved"
    save(config, 5)
    assert "moved aside" in plan_of("resume=clean")
    assert "has taken all 5 steps: nothing is started" in plan_of("resume=auto")
    assert "after step 5 of 6, if" in plan_of("resume=auto", "run.num_steps=6")
    assert "refused: " in plan_of("resume=auto", "run.num_steps=4", code=2)


def test_resume_auto_passes_over_runs_without_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistyped path that ended a later run at once must not hide the run that was meant."""
    monkeypatch.chdir(tmp_path)
    outputs = tmp_path / "outputs" / "arithmetic_grpo"
    leave_run(outputs / "2026-01-01_03-04-05")
    leave_run(outputs / "2026-01-02_03-04-05", steps=0)
    assert parity(["train", "arithmetic_grpo", "resume=auto", *TORCH]) == 0
    assert f"{outputs}/2026-01-01_03-04-05: metrics.jsonl" in capsys.readouterr().out


@pytest.mark.scenario(13)
def test_a_dirty_directory_shows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_run(tmp_path / "run")
    assert parity(["train", "arithmetic_grpo", "run.dir=run", *TORCH]) == 2
    assert "resume=auto goes on with the run in it, resume=clean moves it aside" in capsys.readouterr().err
    assert parity(["train", "arithmetic_grpo", "run.dir=run", "resume=clean", *TORCH]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    for word in ("resume=auto", "resume=clean"):
        assert parity(["train", "arithmetic_grpo", "run.dir=mine", word, *TORCH]) == 2
        assert "run.resume finds no run of Parity in run.dir" in capsys.readouterr().err
    assert parity(["train", "arithmetic_grpo", "resume=sometimes", *TORCH]) == 2
    assert "run.resume" in capsys.readouterr().err


def test_another_seed_ends_a_resume_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "arithmetic_grpo",
        "rollout=torch",
        f"run.dir={tmp_path}/run",
        "run.resume=auto",
        "run.num_steps=9",
    ]
    config = resolve_recipe(*words[2:])
    with Tracker(config, run_dir=tmp_path / "run") as tracker:
        tracker.log(1, {})
    save(config, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for more in (["--dry-run"], []):
        assert parity([*words, "run.seed=4", "advantage.estimator=gae", *more]) == 2
        err = capsys.readouterr().err
        assert "run.seed must be 0, as in " in err and "got 4. Or begin a new run in another run.dir." in err
        assert "advantage.estimator must be grpo, as in " in err and "which holds no critic" in err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.scenario(3)
@pytest.mark.scenario(5)
@pytest.mark.parametrize("damage", ["cut", "another value", "no manifest"])
def test_a_damaged_state_of_the_newest_checkpoint_does_not_stand_in_the_way_of_the_one_before(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rollout=torch", f"run.dir={tmp_path}/run", "run.resume=auto", "run.num_steps=9"]
    config = resolve_recipe(*words)
    with Tracker(config, run_dir=tmp_path / "run") as tracker:
        tracker.log(1, {})
    save(config, 1)
    save(config, 2)
    [newest] = (tmp_path / "run").glob("checkpoints/*2")
    state = newest / "state.json"
    text = state.read_text()
    assert '"run.seed": 0' in text
    if damage == "cut":
        state.write_text(text[: len(text) // 2])
    elif damage == "another value":
        state.write_text(text.replace('"run.seed": 0', '"run.seed": 1'))
    else:
        (newest / "manifest.json").unlink()
    command = ["train", "arithmetic_grpo", *words, "tracking.wandb=disabled", "--dry-run"]
    assert parity(command) == 0, capsys.readouterr().err
    assert "after step 2 of 9, if" in capsys.readouterr().out
    # The settings are still compared with those of the checkpoint before.
    assert parity([*command, "run.seed=4"]) == 2
    assert "run.seed must be 0, as in " in capsys.readouterr().err


def test_the_config_of_a_run_is_a_recipe_with_the_name_of_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve_recipe("rollout=torch", f"run.dir={tmp_path}/run", "run.resume=auto", "tracking.wandb=disabled")
    with Tracker(config, run_dir=tmp_path / "run"):
        pass
    (tmp_path / "evil").mkdir()
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "evil/config.yaml").write_text(text.replace("recipe: arithmetic_grpo", "recipe: ../../x"))
    for recipe, name in (("run", "arithmetic_grpo"), ("evil", "config")):
        assert parity(["train", f"{recipe}/config.yaml", "--dry-run"]) == 0
        shown = capsys.readouterr()
        assert f"recipe      {name}, seed 0" in shown.out and f"{tmp_path}/outputs/{name}/20" in shown.out
        assert "resume" not in shown.out
