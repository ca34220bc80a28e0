"""Results of a study -> its files: study.html, study.md, study.csv and study.json.

The files are written after every run, each replaced atomically, so that a killed study leaves its results so far.
page.py makes the page, table.py the table.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from trainer.report.data import is_number
from trainer.rundir.run_dir import write_whole
from trainer.study.cells import STUDY_FILE, look
from trainer.study.config import StudyConfig
from trainer.study.grid import Grid
from trainer.study.page import render_study
from trainer.study.ranking import Ranking, rank
from trainer.study.results import METRICS, CellResult, read_result
from trainer.study.run import CellRecord
from trainer.study.table import render_table, study_notes

PAGE_FILE = "study.html"
_FORMAT = 1


class StudyWriter:
    """Writes the files of a study, as often as needed; files of finished runs are read once."""

    def __init__(self, grid: Grid, study: StudyConfig, study_dir: Path, *, command: str) -> None:
        self._grid = grid
        self._study = study
        self._dir = study_dir
        self._command = command
        self._known: dict[str, CellResult] = {}
        self.error = ""
        """Reason why the last write failed; empty if it succeeded."""

    @property
    def page(self) -> Path:
        """Path of the page that compares the runs."""
        return self._dir / PAGE_FILE

    def try_write(self, records: Mapping[str, CellRecord]) -> None:
        """Call `write` and keep an error in `error`: a failure must not end the runs."""
        self.error = ""
        try:
            self.write(records)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def write(self, records: Mapping[str, CellRecord]) -> None:
        """Update every file from the results of the runs."""
        results = self._results(records)
        ranking = rank(results, self._study)
        known = {result.name for result in results}
        others = [{"name": name, **asdict(record)} for name, record in records.items() if name not in known]
        document = study_document(self._grid, self._study, results, ranking, command=self._command)
        document["other_cells"] = others
        write_whole(self._dir / STUDY_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
        write_whole(self._dir / "study.csv", curves_csv(results))
        write_whole(self._dir / "study.md", self._markdown(results, ranking))
        page = render_study(self._grid, self._study, results, ranking, command=self._command, study_dir=self._dir)
        write_whole(self.page, page)

    def table(self, records: Mapping[str, CellRecord]) -> str:
        """The ranking as a text table."""
        results = self._results(records)
        ranking = rank(results, self._study)
        return "\n".join([*render_table(ranking), "", *study_notes(self._study, results, ranking)])

    def _results(self, records: Mapping[str, CellRecord]) -> list[CellResult]:
        for cell in self._grid.cells:
            if cell.name not in self._known or not self._known[cell.name].finished:
                record = records.get(cell.name, CellRecord())
                self._known[cell.name] = read_result(self._dir, look(self._dir, cell), record)
        return [self._known[cell.name] for cell in self._grid.cells]

    def _markdown(self, results: Sequence[CellResult], ranking: Ranking) -> str:
        lines = [
            f"# {self._grid.recipe.stem}: {len(self._grid.modes)} modes, {len(self._grid.precisions)} precisions, "
            f"{len(self._grid.seeds)} seeds",
            "",
            "```bash",
            self._command,
            "```",
            "",
            *render_table(ranking),
            "",
            *(f"- {note}" for note in study_notes(self._study, results, ranking)),
        ]
        return "\n".join(lines) + "\n"


def study_document(
    grid: Grid, study: StudyConfig, results: Sequence[CellResult], ranking: Ranking, *, command: str
) -> dict[str, object]:
    """Content of study.json: the runs, the numbers of every cell, and the ranking."""
    return {
        "format": _FORMAT,
        "command": command,
        "recipe": grid.recipe.stem,
        "overrides": list(grid.words),
        "study": asdict(study) | {"precisions": list(grid.precisions)},
        "cells": [_cell(result, study) for result in results],
        "ranking": asdict(ranking),
    }


def _cell(result: CellResult, study: StudyConfig) -> dict[str, object]:
    return {
        "name": result.name,
        "mode": result.mode,
        "precision": result.precision,
        "seed": result.seed,
        "stage": result.stage.name,
        "last_step": result.last_step,
        "num_steps": result.num_steps,
        "seconds": result.seconds,
        "error": result.error,
        "heldout_first": result.first_score,
        "heldout_best": result.best_score,
        "heldout_last": result.score,
        "collapsed": result.collapsed(study.collapse_drop),
        "k3_median": result.median_k3,
        "k3_max": result.worst_k3,
        "entropy_last": result.last_entropy,
        "reward_last": result.last_reward,
        "grad_norm_max": result.largest_gradient,
        "ess_min": result.least_ess,
        "skipped_updates": result.skipped_updates,
        "step_s_median": result.step_seconds,
    }


def curves_csv(results: Sequence[CellResult]) -> str:
    """Content of study.csv: a line per run and step, a column per metric, empty where a run has no value."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["mode", "precision", "seed", "step", *(metric.id for metric in METRICS)])
    for result in results:
        by_step: dict[int, dict[str, object]] = {}
        for metric in METRICS:
            for row in result.evaluations if metric.evaluated else result.rows:
                if is_number(row, metric.key):
                    by_step.setdefault(row["step"], {})[metric.id] = row[metric.key]
        for step in sorted(by_step):
            values = by_step[step]
            shown = [values.get(metric.id, "") for metric in METRICS]
            writer.writerow([result.mode, result.precision, result.seed, step, *shown])
    return out.getvalue()
