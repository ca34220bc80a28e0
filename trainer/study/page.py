"""Results of a study -> study.html: the ranking, curves with the range of the seeds, and every run; opens offline.

Frame, charts and style come from the reports (trainer/report/frame.py); assets/study.html has the parts that only a
study needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.report.data import show
from trainer.report.frame import render_page
from trainer.report.present import paired
from trainer.report.spec import STEP, Chart, Section, Series, Table
from trainer.study.config import StudyConfig
from trainer.study.grid import Grid
from trainer.study.ranking import Ranking
from trainer.study.results import METRICS, CellResult, Curve, Metric, curve
from trainer.study.table import TITLES, study_notes, table_rows

ASSETS = Path(__file__).resolve().parent / "assets"
REPORT = "report.html"
SLOTS = (0, 1, 2, 3, 7, 4, 5, 6)
"""Colours of the page in the order of the modes: neighbours differ most."""
_TEXTS = {
    "heldout": "What is ranked. A quantised engine answers with its quantised weights.",
    "reward": "What the engine samples in training, so an engine of another precision has another reward.",
    "k3": "How far the policy that samples is from the one that learns.",
    "entropy": "An entropy that falls to zero means that the policy has stopped exploring.",
    "grad_norm": "Jumps come before most collapses.",
    "ess": "The share of the tokens that count, after weighting them by how likely they are for the trainer.",
}


def render_study(
    grid: Grid,
    study: StudyConfig,
    results: Sequence[CellResult],
    ranking: Ranking,
    *,
    command: str,
    study_dir: Path,
) -> str:
    """The page as HTML; a failed run is drawn up to its last step, and named."""
    sections, tables = _charts(grid, results)
    ended = sum(result.finished for result in results)
    failed = sum(bool(result.error) for result in results)
    context = {
        "title": f"{grid.recipe.stem}: {len(grid.modes)} corrections compared",
        "status": f"{ended} of {len(results)} runs finished" + (f", {failed} failed" if failed else ""),
        "status_kind": "failed" if failed else "completed" if ended == len(results) else "open",
        "facts": [
            f"precisions {', '.join(grid.precisions)}",
            f"seeds {', '.join(map(str, grid.seeds))}",
            f"{results[0].num_steps} steps each",
        ],
        "command": command,
        "titles": TITLES,
        "rows": table_rows(ranking),
        "slots": dict(zip(grid.modes, map(_slot, range(len(grid.modes))), strict=True)),
        "runs": {mode: index for index, mode in enumerate(grid.modes)},
        "notes": study_notes(study, results, ranking),
        "results": [_cell(result, study_dir) for result in results],
    }
    return render_page("study.html", sections=sections, tables=tables, context=context, templates=ASSETS)


def _slot(index: int) -> int:
    return SLOTS[index % len(SLOTS)]


def _charts(grid: Grid, results: Sequence[CellResult]) -> tuple[list[Section], dict[str, Table]]:
    """A section per metric with a chart per precision; a chart without numbers is left out."""
    sections: list[Section] = []
    tables: dict[str, Table] = {}
    for metric in METRICS:
        charts = []
        for precision in grid.precisions:
            curves = {
                mode: curve([r for r in results if (r.mode, r.precision) == (mode, precision)], metric)
                for mode in grid.modes
            }
            name = f"{metric.id}-{precision}"
            tables[name] = _table(curves)
            series = tuple(
                Series(key=mode, label=mode, slot=_slot(index), table=name, run=index, spread=True)
                for index, mode in enumerate(grid.modes)
                if curves[mode].steps
            )
            if series:
                charts.append(_chart(name, f"{precision} rollout", metric, series))
        if charts:
            unit = f" ({metric.unit})" if metric.unit else ""
            sections.append(
                Section(title=f"{metric.title}{unit}", text=_TEXTS[metric.id], charts=tuple(paired(charts)))
            )
    return sections, tables


def _chart(name: str, title: str, metric: Metric, series: tuple[Series, ...]) -> Chart:
    return Chart(
        id=name, title=title, series=series, form=metric.form, log=metric.log, from_zero=metric.from_zero
    )  # fmt: skip


def _table(curves: dict[str, Curve]) -> Table:
    """Mean, minimum and maximum over the seeds for every mode, at the steps that any mode has."""
    steps = sorted({step for each in curves.values() for step in each.steps})
    columns: dict[str, np.ndarray] = {STEP: np.array(steps, dtype=np.int32)}
    for mode, each in curves.items():
        places = np.searchsorted(columns[STEP], each.steps)
        for key, values in ((mode, each.mean), (f"{mode}:low", each.low), (f"{mode}:high", each.high)):
            columns[key] = np.full(len(steps), np.nan)
            columns[key][places] = values
    return Table(columns=columns)


def _cell(result: CellResult, study_dir: Path) -> dict[str, str]:
    """The row of one run; its name links to its report, which lies beside the page."""
    has_report = (study_dir / result.name / REPORT).is_file()

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else show(value, form)

    state = result.stage.name if not result.error else "failed"
    return {
        "name": result.name,
        "link": f"{result.name}/{REPORT}" if has_report else "",
        "state": "not started" if state == "new" else state,
        "steps": f"{result.last_step} of {result.num_steps}",
        "first": shown(result.first_score, "percent"),
        "last": shown(result.score, "percent"),
        "k3": shown(result.worst_k3, "exponent"),
        "seconds": f"{result.seconds:.0f}" if result.seconds else "-",
        "error": result.error,
    }
