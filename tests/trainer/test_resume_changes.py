"""What a resumed run keeps of the configurations before it, and by what it tells another model."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from policy_cases import make_config, save_policy
from resume_cases import make, state_of

from trainer.config.training import HFModelConfig, Resume
from trainer.report.data import load_run
from trainer.report.headline import changes
from trainer.rundir.model_mark import model_mark
from trainer.rundir.resume import other_run
from trainer.rundir.run_dir import earlier_configs, first_start, keep_config
from trainer.tracking.tracker import Tracker


def test_a_changed_configuration_is_kept_under_another_name(tmp_path: Path) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto), tmp_path / "run"
    with Tracker(config, run_dir=run_dir):
        pass
    first = (run_dir / "config.yaml").read_text()
    with Tracker(config, run_dir=run_dir, resumed=state_of(config, 2)) as tracker:
        tracker.take_up(state_of(config, 2))
    assert [path.name for path in run_dir.glob("config*")] == ["config.yaml"], "nothing has changed"
    for count, lr in enumerate((0.5, 0.25), start=1):
        changed = replace(config, optim=replace(config.optim, lr=lr))
        with Tracker(changed, run_dir=run_dir, resumed=state_of(config, 2)) as tracker:
            tracker.take_up(state_of(config, 2))
        assert f"lr: {lr}" in (run_dir / "config.yaml").read_text()
        assert len(list(run_dir.glob("config.until_step_000002*.yaml"))) == count
    assert (run_dir / "config.until_step_000002.yaml").read_text() == first
    assert "lr: 0.5" in (run_dir / "config.until_step_000002.2.yaml").read_text()
    assert earlier_configs(run_dir) == [(2, run_dir / "config.until_step_000002.yaml")], "0.5 made no step"

    run = load_run(run_dir)
    assert changes(run) == [("optim.lr", f"{config.optim.lr:g} until step 2, then 0.25")]
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["first_started_at"] <= environment["started_at"]
    assert first_start(run_dir) == environment["first_started_at"]


def test_configs_of_steps_that_are_given_up_name_the_step_that_is_left(tmp_path: Path) -> None:
    """Four configurations; the third takes steps 17 to 20, then the checkpoints of 16 and 20 are damaged."""
    for text, until_step in (("a", 4), ("b", 16), ("c", 12)):
        (tmp_path / "config.yaml").write_text(text)
        keep_config(tmp_path, "next", until_step=until_step)
    named = {path.name: path.read_text() for path in tmp_path.glob("config.until*")}
    assert named == {
        "config.until_step_000004.yaml": "a",
        "config.until_step_000012.yaml": "b",
        "config.until_step_000012.2.yaml": "c",
    }
    assert [(step, path.read_text()) for step, path in earlier_configs(tmp_path)] == [(4, "a"), (12, "b")]


def test_a_model_with_other_weights_is_another_run(tmp_path: Path) -> None:
    """Of the same shape; the same model may lie in another directory, and earlier checkpoints say nothing."""
    first = save_policy(tmp_path / "first")
    shutil.copytree(first, tmp_path / "moved")
    other = shutil.copytree(first, tmp_path / "other") / "model.safetensors"
    with other.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    config, mark = make_config(first), model_mark(first)
    assert mark == model_mark(tmp_path / "moved") and mark != model_mark(other.parent)
    assert model_mark(tmp_path) is None

    def problems(directory: Path, saved: str | None) -> list[str]:
        state = replace(state_of(config, 2), model_mark=saved)
        now = replace(config, model=HFModelConfig(path=str(directory)))
        return [str(problem) for problem in other_run(tmp_path / "step_2", state, now)]

    assert not problems(first, mark) and not problems(tmp_path / "moved", mark) and not problems(other.parent, None)
    [said] = problems(other.parent, mark)
    assert said.startswith(f"model.path must hold the weights that the run began with, got '{other.parent}'.")
