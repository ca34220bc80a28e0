"""Shared by the tests of resuming: the config of a run, its state, its checkpoints and rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from policy_cases import make_config

from rollout.data.dataset import StreamState
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.config.train import TrainConfig
from trainer.rundir.checkpoint import POLICY, RunState, begin_checkpoint, commit_checkpoint
from trainer.rundir.resume import flat_config

RECIPES = Path(__file__).parents[2] / "recipes"
OFF = TrackingConfig(wandb=WandbMode.disabled)


def make(tmp_path: Path, **run: object) -> TrainConfig:
    """A config whose model need not exist."""
    config = make_config(tmp_path / "model")
    return replace(config, tracking=OFF, run=replace(config.run, dir=str(tmp_path / "run"), **run))  # type: ignore[arg-type]


def state_of(config: TrainConfig, step: int, *, wandb_run_id: str | None = None) -> RunState:
    return RunState(
        step=step,
        policy_version=step,
        stream=StreamState(seed=0, epoch=0, position=0, digest=""),
        wandb_run_id=wandb_run_id,
        config=json.loads(json.dumps(flat_config(config))),
    )


def save(config: TrainConfig, step: int) -> Path:
    """A checkpoint with one file of a rank -> this file."""
    unfinished = begin_checkpoint(Path(config.run.dir), step)
    (unfinished / POLICY / "__0_0.distcp").write_bytes(b"weights")
    return commit_checkpoint(unfinished, state_of(config, step), keep=2).policy_path / "__0_0.distcp"


def rows(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]
