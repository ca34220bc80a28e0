"""Shared by the end-to-end tests: compose a recipe as the command line does, run it, read what it wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.cli.commands import run
from trainer.compose.compose import resolve
from trainer.config.train import TrainConfig
from trainer.rundir.rows import read_rows

RECIPES = Path(__file__).parents[2] / "recipes"

QUICK = ("model.num_steps=120", "tracking.wandb=disabled", "eval.max_prompts=32")
"""A hurried base model: these tests check the machinery, `make demo` checks that it learns."""


def compose(recipe: str, *words: str) -> TrainConfig:
    """The config of one run of `parity train <recipe> <words>`."""
    resolution = resolve(RECIPES / f"{recipe}.yaml", words, own_dir=None, multirun=False)
    assert not resolution.problems, [str(problem) for problem in resolution.problems]
    [run] = resolution.runs
    assert run.config is not None
    return run.config


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the steps in metrics.jsonl, without that of the evaluation before training."""
    return [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]


def first_evaluation(run_dir: Path) -> dict[str, Any]:
    """The row of the evaluation before training."""
    [row] = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"] == 0]
    return row


def replayed(run_dir: Path, step: int) -> dict[str, Any]:
    """What `parity replay` writes of a step that was dumped, under the run's own correction."""
    assert run(["replay", str(run_dir), f"step={step}", "modes=run"]) == 0
    record: dict[str, Any] = json.loads((run_dir / "replay" / f"step_{step:06d}" / "replay.json").read_text("utf-8"))
    return record


def column(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """One metric over the steps; KeyError if a step lacks it."""
    return [row[key] for row in rows]
