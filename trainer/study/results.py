"""The directory of a study: the state of each cell by its files, and its result: curves, and numbers over all steps.

The state comes from the files of the run itself, so that a killed study knows as much as a completed one; study.json
adds the seconds and the error of each run. ranking.py ranks and page.py shows the results. Does not import torch.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from algorithms.config import Problem
from trainer.config.outputs import HELDOUT
from trainer.report.data import Row, evaluation_rows, is_number, rows_by_step, settings
from trainer.report.sections import SECTIONS
from trainer.report.spec import Chart
from trainer.rundir.provenance import config_document
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    changed_files,
    completed_steps,
    has_checkpoint,
    is_run,
)
from trainer.study.grid import Cell, Study
from trainer.text.yaml_text import load_yaml

logger = logging.getLogger(__name__)

STUDY_FILE = "study.json"
"""File that marks the directory of a study."""
LOGS = "logs"
"""Subdirectory of the study with the output of each run, a file per cell."""
_SHOWN = 3
"""Maximum of differences in a message."""
_LAST_STEPS = 5
"""Number of last steps in a mean over the last steps of a run."""
CHARTS: Mapping[str, Chart] = {
    chart.id: chart
    for section in SECTIONS
    for chart in section.charts
    if chart.id in ("heldout", "reward", "k3", "worst", "entropy", "grad", "ess")
}
"""The charts of a report that a study has too, each for its first metric, by the ids that study.json uses."""

Points = Sequence[tuple[int, float]]
"""(step, value) of one metric, by ascending step."""


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
    runs = [(study_dir / cell.name, changed_files(study_dir / cell.name)) for cell in cells]
    if files := {path: f"{path} {how} since {run} ran it" for run, found in runs for path, how in found.items()}:
        rule = f"holds runs of other code: {'; '.join(files.values())}"
        remedy = "Bring back what was there, or name another directory."
        return [Problem(key="study.dir", rule=rule, value=str(study_dir), remedy=remedy)]
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
    cells = _document(study_dir)["cells"]
    return {cell["name"]: CellRecord(seconds=cell["seconds"], error=cell["error"]) for cell in cells}


def _document(study_dir: Path) -> dict[str, Any]:
    """study.json; without cells where there is none, or it is damaged."""
    path = study_dir / STUDY_FILE
    empty: dict[str, Any] = {"cells": [], "recipe": "", "overrides": []}
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else empty
        for cell in document["cells"]:
            cell |= {"stage": Stage(cell["stage"]), "curves": {k: [*map(tuple, v)] for k, v in cell["curves"].items()}}
            CellResult(**cell)
        return empty | document
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # The runs are known by their own files; only their seconds and errors are lost.
        logger.warning("%s cannot be read and is written anew: %s", path, error)
        return empty


@dataclass(frozen=True, kw_only=True, slots=True)
class CellResult:
    """A cell of the study, as study.json has it; numbers are None where the run has none."""

    name: str
    mode: str
    precision: str
    seed: int
    stage: Stage
    last_step: int
    num_steps: int
    seconds: float
    error: str
    heldout_first: float | None
    """Held-out accuracy of the untouched policy."""
    heldout_last: float | None
    """Held-out accuracy after the last step, by which modes are ranked; None unless the run ended."""
    kept_of_best: float | None
    """heldout_last over the largest held-out accuracy of the run, in [0, 1]; None unless the run ended."""
    collapsed: bool
    """True if heldout_last is more than study.collapse_drop below the best of the run."""
    k3_max: float | None
    entropy_last: float | None
    """Mean of the last five steps."""
    grad_norm_max: float | None
    ess_min: float | None
    step_s_median: float | None
    heldout_right: Sequence[int] = ()
    """1 or 0 for each held-out prompt, in their order: whether its greedy response after the last step was correct;
    empty unless the run ended."""
    curves: Mapping[str, Points]
    """Points by the ids of CHARTS; step 0 of heldout belongs to the untouched policy."""

    @property
    def finished(self) -> bool:
        return self.stage is Stage.finished


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Mean and range of a number over the seeds."""

    mean: float
    low: float
    high: float
    count: int


def read_results(study: Study, study_dir: Path, records: Mapping[str, CellRecord]) -> list[CellResult]:
    """Read the files of every cell, in the order of the study; a cell without recorded steps has empty curves.

    Behind them stand the finished cells of an earlier call with the same recipe and overrides that had other modes,
    precisions or seeds.
    """
    results = []
    for cell in study.cells:
        path = study_dir / cell.name / METRICS_FILE
        rows = rows_by_step(read_rows(path)) if path.is_file() else []
        stage, record = stage_of(study_dir, cell), records.get(cell.name, CellRecord())
        result = cell_result(cell, rows, stage, record, collapse_drop=study.config.collapse_drop)
        right = _last_answers(study_dir / cell.name, cell.num_steps) if result.finished else []
        results.append(replace(result, heldout_right=right))
    before, own = _document(study_dir), {cell.name for cell in study.cells}
    if (before["recipe"], sorted(before["overrides"])) == (study.recipe.stem, sorted(study.words)):
        others = [CellResult(**cell) for cell in before["cells"] if cell["name"] not in own]
        results += [result for result in others if result.finished]
    return results


def _last_answers(run_dir: Path, step: int) -> list[int]:
    """See `CellResult.heldout_right`; empty if the file cannot be read."""
    begin = f'{{"step": {step}, "set": "{HELDOUT}",'.encode()  # other lines, which may be long, are not parsed
    try:
        with (run_dir / EVALUATIONS_FILE).open("rb") as file:
            rows = {row["prompt_id"]: row for row in map(json.loads, (line for line in file if line.startswith(begin)))}
        return [int(row["greedy"]["correct"] is True) for row in rows.values()]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def cell_result(
    cell: Cell, rows: Sequence[Row], stage: Stage, record: CellRecord, *, collapse_drop: float
) -> CellResult:
    """The result of a cell from the rows of its metrics."""
    evaluated, seconds_of_steps = evaluation_rows(rows), _values(_points(rows, "time/step_s"))
    curves = {
        name: _points(evaluated if name == "heldout" else rows, chart.series[0].key) for name, chart in CHARTS.items()
    }
    heldout, entropy = _values(curves["heldout"]), _values(curves["entropy"])
    last = heldout[-1] if heldout and stage is Stage.finished else None
    best = max(heldout, default=0.0)
    return CellResult(
        name=cell.name,
        mode=cell.mode,
        precision=cell.precision,
        seed=cell.seed,
        stage=stage,
        last_step=max((step for points in curves.values() for step, _ in points), default=0),
        num_steps=cell.num_steps,
        seconds=record.seconds,
        error=record.error,
        heldout_first=heldout[0] if heldout else None,
        heldout_last=last,
        kept_of_best=None if last is None else last / best if best else 1.0,
        collapsed=last is not None and last < best - collapse_drop,
        k3_max=max(_values(curves["k3"]), default=None),
        entropy_last=statistics.fmean(entropy[-_LAST_STEPS:]) if entropy else None,
        grad_norm_max=max(_values(curves["grad"]), default=None),
        ess_min=min(_values(curves["ess"]), default=None),
        step_s_median=statistics.median(seconds_of_steps) if seconds_of_steps else None,
        curves=curves,
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and range of the values that are not None; None without a value."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return None
    return Spread(mean=statistics.fmean(numbers), low=min(numbers), high=max(numbers), count=len(numbers))


def _points(rows: Iterable[Row], key: str) -> Points:
    return [(row["step"], float(row[key])) for row in rows if is_number(row, key)]


def _values(points: Points) -> list[float]:
    return [value for _, value in points]


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
        before, now = map(settings, map(load_yaml, texts))
    except (OSError, ValueError, AttributeError) as error:  # the last one: it is no mapping
        return [f"{CONFIG_FILE} cannot be read: {error}"]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in before | now if before.get(key) != now.get(key)]
