"""The directory of a study: the state of each cell by its files, and the record of each run's seconds and error.

The state comes from the files of the run itself, so that a killed study knows as much as a completed one. Does not
import torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from algorithms.config import Problem
from trainer.report.data import flat_config, group_members
from trainer.rundir.provenance import config_document
from trainer.rundir.run_dir import CONFIG_FILE, completed_steps, has_checkpoint, is_run
from trainer.rundir.yaml_text import load_yaml
from trainer.study.grid import Cell

logger = logging.getLogger(__name__)

STUDY_FILE = "study.json"
"""File that marks the directory of a study."""
LOGS = "logs"
"""Subdirectory of the study with the output of each run, a file per cell."""
_SHOWN = 3
"""Maximum of differences in a message."""


class Stage(StrEnum):
    """Progress of a cell."""

    new = "new"
    stopped = "stopped"
    """The run ended early and has a checkpoint to resume from."""
    broken = "broken"
    """The run began and has no checkpoint to resume from."""
    finished = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRecord:
    """The study's record of a cell besides the files of its run."""

    seconds: float = 0.0
    """Seconds from start to end of the process, all attempts together."""
    error: str = ""
    """Reason why the last attempt failed; empty if it succeeded."""


def stage_of(study_dir: Path, cell: Cell) -> Stage:
    """The progress of a cell, from the files in its directory."""
    directory = study_dir / cell.name
    if _is_empty(directory):
        return Stage.new
    if completed_steps(directory) == cell.num_steps:
        return Stage.finished
    return Stage.stopped if has_checkpoint(directory) else Stage.broken


def make_way(study_dir: Path, cell: Cell) -> None:
    """Move aside the files of a run that failed before its first step; `run.resume=auto` handles all other files."""
    directory = study_dir / cell.name
    if _is_empty(directory) or is_run(directory):
        return
    number = 1
    while (aside := directory.with_name(f"{directory.name}.before-{number}")).exists():
        number += 1
    directory.rename(aside)


def study_problems(study_dir: Path, cells: Sequence[Cell]) -> list[Problem]:
    """Problems of starting a study in this directory: other files, or cells of another config."""
    if not study_dir.exists() or (study_dir.is_dir() and _is_empty(study_dir)):
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


def studies_dir(recipe_name: str) -> Path:
    """Default directory of the studies of a recipe."""
    return Path("outputs") / "studies" / recipe_name


def newest_study(recipe_name: str) -> Path | None:
    """The newest study of a recipe in the default directory."""
    studies = [path.parent for path in studies_dir(recipe_name).glob(f"*/{STUDY_FILE}")]
    return max(studies, key=lambda path: path.name, default=None)


def read_records(study_dir: Path) -> dict[str, CellRecord]:
    """Records that an earlier call of the study wrote about its runs; empty without such a call, or if damaged."""
    path = study_dir / STUDY_FILE
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        cells = [*document["cells"], *document["other_cells"]]
        return {cell["name"]: CellRecord(seconds=cell["seconds"], error=cell["error"]) for cell in cells}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        # The runs are known by their own files; only their seconds and errors are lost.
        logger.warning("%s cannot be read and is written anew: %s", path, error)
        return {}


def _is_empty(directory: Path) -> bool:
    """True for a directory that holds nothing, or does not exist."""
    return not directory.is_dir() or not any(directory.iterdir())


def _changes(study_dir: Path, cell: Cell) -> list[str]:
    """Keys of the cell whose value differs from its earlier run, as "key before -> now"; empty without such a run."""
    path = study_dir / cell.name / CONFIG_FILE
    if not path.is_file():
        return []
    try:
        texts = (path.read_text(encoding="utf-8"), config_document(cell.config))
        before, now = (group_members(document) | flat_config(document) for document in map(load_yaml, texts))
    except (OSError, ValueError, AttributeError) as error:  # the last one: it is no mapping
        return [f"{CONFIG_FILE} cannot be read: {error}"]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in before | now if before.get(key) != now.get(key)]
