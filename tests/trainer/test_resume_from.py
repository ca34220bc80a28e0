"""What a run goes on from with run.resume_from: the checkpoint of another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from resume_cases import make, save, state_of

from trainer.config.training import Resume
from trainer.rundir.checkpoint import CheckpointError, begin_checkpoint, commit_checkpoint, leave_to_ranks
from trainer.rundir.resume import begins, changed_keys, checkpoint_to_resume, source_problems, whole_checkpoint
from trainer.rundir.run_dir import RunDirectoryError
from trainer.rundir.sealed_directory import FileRecord, SealError
from trainer.tracking.tracker import Tracker


def says_damaged(path: Path, records: Mapping[str, FileRecord]) -> None:
    raise SealError(f"{path}: a rank says so")


def test_a_run_begins_with_a_checkpoint_of_another_run_until_it_has_its_own(tmp_path: Path) -> None:
    other = make(tmp_path)
    commit_checkpoint(begin_checkpoint(tmp_path / "run", 4), state_of(other, 4, wandb_run_id="abcd1234"), keep=2)
    source, own = tmp_path / "run" / "checkpoints" / "step_000004", tmp_path / "own"
    config = make(tmp_path, resume_from=str(source), resume=Resume.auto)
    config = replace(config, run=replace(config.run, dir=str(own)), optim=replace(config.optim, lr=0.5))
    for resume in (Resume.never, Resume.auto):
        found = checkpoint_to_resume(replace(config, run=replace(config.run, resume=resume)), own)
        assert found is not None and (found.path, found.state.step) == (source, 4)
        assert found.state.wandb_run_id is None, "the W&B run is the other run's"
        assert whole_checkpoint(config, own, found, compare=leave_to_ranks) == found
        with pytest.raises(CheckpointError, match="a rank says so"):
            whole_checkpoint(config, own, found, compare=says_damaged)
    assert begins(config)
    save(config, 6)
    found = checkpoint_to_resume(config, own)
    assert found is not None and found.path == own / "checkpoints" / "step_000006"
    assert not begins(config)
    assert list(changed_keys(found.state.config, other)) == ["optim.lr"], "where a run began is no setting"


def test_a_run_with_a_source_takes_a_new_directory_only(tmp_path: Path) -> None:
    config = make(tmp_path, resume_from="of/another/run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    with (
        pytest.raises(RunDirectoryError, match="must be absent or empty"),
        Tracker(config, run_dir=tmp_path / "run", resumed=state_of(config, 2)),
    ):
        pass


def test_what_cannot_be_gone_on_from_is_named_with_its_key(tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 4)
    source = tmp_path / "run" / "checkpoints" / "step_000004"

    def problems(**run: object) -> str:
        return "; ".join(str(problem) for problem in source_problems(make(tmp_path, **run)))

    assert problems(resume_from=str(source), num_steps=5) == problems() == ""
    assert "run.num_steps must be > 4, the steps that run.resume_from=" in problems(
        resume_from=str(source), num_steps=4
    )
    assert "run.seed must be 0, as in " in problems(resume_from=str(source), seed=7)
    rule = "run.resume_from must be the directory of a checkpoint, <run.dir>/checkpoints/step_<N>"
    for_run = problems(resume_from=str(tmp_path / "run"))
    assert rule in for_run and f"Checkpoints in {source.parent}: {source.name}." in for_run
    gone = problems(resume_from=str(source.parent / "step_000002"))
    assert f"Checkpoints in {source.parent}: {source.name}. Or leave it out." in gone and "manifest" not in gone
    (source / "state.json").write_text("{}")
    assert "has 2 bytes" in problems(resume_from=str(source))
