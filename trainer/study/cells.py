"""State of a study's cell by the files in its directory: none, some, a checkpoint, or all.

The state comes from the files of the run itself, so that a killed study knows as much as a completed one. Does not
import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import yaml

from algorithms.config import Problem
from trainer.rundir.provenance import config_document
from trainer.rundir.run_dir import completed_steps, has_checkpoint, is_run
from trainer.study.grid import Cell

STUDY_FILE = "study.json"
"""File that marks the directory of a study."""
LOGS = "logs"
"""Subdirectory of the study with the output of each run, a file per cell."""
CONFIG_FILE = "config.yaml"
_SHOWN = 3
"""Maximum of differences in a message."""


class Stage(Enum):
    """Progress of a cell."""

    new = "new"
    stopped = "stopped"
    """The run ended early and has a checkpoint to resume from."""
    broken = "broken"
    """The run began and has no checkpoint to resume from."""
    finished = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A cell and the state of its directory."""

    cell: Cell
    stage: Stage
    last_step: int
    """The last recorded step; 0 without one."""


def look(study_dir: Path, cell: Cell) -> Standing:
    """Read the progress of the cell."""
    directory = study_dir / cell.name
    last_step = num_recorded(directory)
    if not directory.is_dir() or not any(directory.iterdir()):
        stage = Stage.new
    elif completed_steps(directory) == cell.config.run.num_steps:
        stage = Stage.finished
    else:
        stage = Stage.stopped if has_checkpoint(directory) else Stage.broken
    return Standing(cell=cell, stage=stage, last_step=last_step)


def num_recorded(run_dir: Path) -> int:
    """Number of lines in metrics.jsonl: the steps that a run has recorded."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as lines:
        return sum(1 for _ in lines)


def make_way(study_dir: Path, cell: Cell) -> None:
    """Move aside the files of a run that failed before its first step; `run.resume=auto` handles all other files."""
    directory = study_dir / cell.name
    if not directory.is_dir() or not any(directory.iterdir()) or is_run(directory):
        return
    number = 1
    while (aside := directory.with_name(f"{directory.name}.before-{number}")).exists():
        number += 1
    directory.rename(aside)


def study_problems(study_dir: Path, cells: Sequence[Cell]) -> list[Problem]:
    """Problems of starting a study in this directory: other files, or cells of another config."""
    if not study_dir.exists() or (study_dir.is_dir() and not any(study_dir.iterdir())):
        return []
    if not (study_dir / STUDY_FILE).is_file():
        rule = f"must be absent, empty, or the directory of a study, with its {STUDY_FILE}"
        return [Problem(key="study.dir", rule=rule, value=str(study_dir), remedy="Leave it out, or name another.")]
    differing = {cell.name: changed for cell in cells if (changed := _changes(study_dir, cell))}
    if not differing:
        return []
    name, changes = next(iter(differing.items()))
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    shown = f"{', '.join(changes[:_SHOWN])}{more}"
    rule = f"holds {len(differing)} runs of another config, for example {name} ({shown})"
    remedy = "Give the overrides as they were, or name another directory; modes, precisions and seeds may be added."
    return [Problem(key="study.dir", rule=rule, value=str(study_dir), remedy=remedy)]


def newest_study(recipe_name: str) -> Path | None:
    """The newest study of a recipe in the default directory."""
    beside = studies_dir(recipe_name)
    found = [path.parent for path in beside.glob(f"*/{STUDY_FILE}")]
    return max(found, key=lambda path: path.name, default=None)


def studies_dir(recipe_name: str) -> Path:
    """Default directory of the studies of a recipe."""
    return Path("outputs") / "studies" / recipe_name


def _changes(study_dir: Path, cell: Cell) -> list[str]:
    """Keys of the cell whose value differs from its earlier run, as "key before -> now"; empty without such a run."""
    before = _flat(_mapping(study_dir / cell.name / CONFIG_FILE))
    if not before:
        return []
    now = _flat(yaml.safe_load(config_document(cell.config)))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key != "run.resume"]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(document: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(document, Mapping):
        return {prefix: document}
    flat: dict[str, object] = {}
    for key, value in document.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _mapping(path: Path) -> Mapping[str, object]:
    """Content of a JSON or YAML file; empty if it is missing or unreadable, as after a kill."""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
