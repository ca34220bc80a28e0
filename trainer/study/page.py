"""Results of a study -> study.html and study.json.

study.html has the ranking, curves with the range of the seeds, and every run; it opens offline. Frame, charts and style
come from the reports (trainer/report/frame.py). The files are written after every run, each replaced atomically, so
that a killed study leaves its results so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
from markupsafe import Markup

from trainer.report.data import show
from trainer.report.frame import render_page
from trainer.report.present import titled
from trainer.report.spec import STEP, Section, Series, Table
from trainer.rundir.run_dir import REPORT_FILE, write_csv, write_whole
from trainer.study.grid import Study
from trainer.study.ranking import MODE_COLUMN, TITLES, Ranking, rank, study_notes, table_rows
from trainer.study.results import CHARTS, STUDY_FILE, CellRecord, CellResult, Stage, read_results, spread

PAGE_FILE, TABLE_FILE, CURVES_FILE = "study.html", "study.csv", "curves.csv"
ASSETS = Path(__file__).resolve().parent / "assets"
SLOTS = (0, 1, 2, 3, 7, 4, 5, 6)
"""Colours of the page in the order of the modes: neighbours differ most."""
_FORMAT = 2


def write_study(study: Study, study_dir: Path, records: Mapping[str, CellRecord], *, command: str) -> str:
    """Update both files. Returns why that failed, "" if it did not: a failure must not end the runs."""
    try:
        results = read_results(study, study_dir, records)
        ranking = rank(results)
        document = {
            "format": _FORMAT,
            "command": command,
            "recipe": study.recipe.stem,
            "overrides": list(study.words),
            "study": asdict(study.config),
            "cells": [asdict(result) for result in results],
            "ranking": asdict(ranking),
        }
        write_whole(study_dir / STUDY_FILE, json.dumps(document, allow_nan=False) + "\n")
        page = render_study(study, results, ranking, command=command, study_dir=study_dir)
        write_whole(study_dir / PAGE_FILE, page)
        _write_tables(study_dir, results)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _write_tables(study_dir: Path, results: Sequence[CellResult]) -> None:
    """A row per run, and a row per point of a curve, with all digits."""
    columns = [field.name for field in fields(CellResult) if field.name not in ("curves", "heldout_right")]
    write_csv(study_dir / TABLE_FILE, [columns, *([getattr(one, name) for name in columns] for one in results)])
    points = (
        (one.mode, one.precision, one.seed, CHARTS[name].series[0].key, step, value)
        for one in results
        for name, curve in one.curves.items()
        for step, value in curve
    )
    write_csv(study_dir / CURVES_FILE, [("mode", "precision", "seed", "metric", "step", "value"), *points])


def render_study(
    study: Study, results: Sequence[CellResult], ranking: Ranking, *, command: str, study_dir: Path
) -> str:
    """The page as HTML; a failed run is drawn up to its last step, and named."""
    sections, tables = _charts(results)
    ended = sum(result.finished for result in results)
    failed = sum(bool(result.error) for result in results)
    modes, precisions, seeds = _axes(results)
    context = {
        "title": f"{study.recipe.stem}: {len(modes)} corrections compared",
        "status": f"{ended} of {len(results)} runs finished" + (f", {failed} failed" if failed else ""),
        "status_kind": "failed" if failed else "completed" if ended == len(results) else "open",
        "facts": [
            f"precisions {', '.join(precisions)}",
            f"seeds {', '.join(map(str, seeds))}",
            f"{results[0].num_steps} steps each",
        ],
        "command": command,
        "titles": TITLES,
        "mode_column": MODE_COLUMN,
        "rows": table_rows(ranking),
        "slots": {mode: _slot(index) for index, mode in enumerate(modes)},
        "runs": {mode: index for index, mode in enumerate(modes)},
        "notes": study_notes(study.config, results, ranking),
        "results": [_run_row(result, study_dir) for result in results],
    }
    return render_page("study.html", sections=sections, tables=tables, context=context, templates=ASSETS)


def _axes(results: Sequence[CellResult]) -> tuple[list[str], list[str], list[int]]:
    """Modes, precisions and seeds of the runs."""
    return (
        list(dict.fromkeys(one.mode for one in results)),
        list(dict.fromkeys(one.precision for one in results)),
        sorted({one.seed for one in results}),
    )


def _slot(index: int) -> int:
    return SLOTS[index % len(SLOTS)]


def _charts(results: Sequence[CellResult]) -> tuple[list[Section], dict[str, Table]]:
    """A section per metric with a chart per precision; a chart without numbers is left out."""
    modes, precisions, _ = _axes(results)
    sections: list[Section] = []
    tables: dict[str, Table] = {}
    for name, metric in CHARTS.items():
        charts = []
        for precision in precisions:
            chart_id = f"{name}-{precision}"
            tables[chart_id] = curves_table([one for one in results if one.precision == precision], name)
            series = tuple(
                Series(mode, mode, _slot(index), table=chart_id, run=index, spread=True)
                for index, mode in enumerate(modes)
                if np.isfinite(tables[chart_id].columns.get(mode, np.nan)).any()
            )
            if series:
                charts.append(replace(metric, id=chart_id, title=f"{precision} rollout", note="", series=series))
        if charts:
            sections.append(Section(title=titled(metric, metric.series[0]), text=metric.note, charts=tuple(charts)))
    return sections, tables


def curves_table(results: Sequence[CellResult], metric: str) -> Table:
    """Mean, minimum and maximum over the seeds of each mode, at the steps that any mode has; NaN where it has none.

    A failed run counts up to its last step.
    """
    values: dict[tuple[str, int], list[float]] = {}
    for result in results:
        for step, value in result.curves[metric]:
            values.setdefault((result.mode, step), []).append(value)
    steps = sorted({step for _, step in values})
    columns: dict[str, np.ndarray] = {STEP: np.array(steps, dtype=np.int32)}
    for mode in dict.fromkeys(result.mode for result in results):
        spreads = [spread(values.get((mode, step), ())) for step in steps]
        columns[mode] = np.array([np.nan if one is None else one.mean for one in spreads])
        columns[f"{mode}:low"] = np.array([np.nan if one is None else one.low for one in spreads])
        columns[f"{mode}:high"] = np.array([np.nan if one is None else one.high for one in spreads])
    return Table(columns=columns)


def _run_row(result: CellResult, study_dir: Path) -> tuple[str, ...]:
    """The row of one run; its name links to its report, which lies beside the page."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else show(value, form)

    name = result.name
    if (study_dir / name / REPORT_FILE).is_file():
        name = Markup('<a href="{0}/{1}">{0}</a>').format(name, REPORT_FILE)
    state = "not started" if result.stage is Stage.new else result.stage.value
    return (
        name,
        "failed" if result.error else state,
        f"{result.last_step} of {result.num_steps}",
        shown(result.heldout_first, "percent"),
        shown(result.heldout_last, "percent"),
        shown(result.k3_max, "exponent"),
        f"{result.seconds:.0f}" if result.seconds else "-",
        result.error,
    )
