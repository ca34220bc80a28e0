"""A run directory -> report.html, or several -> one page that compares them: one file that opens offline.

    data.py      files -> RunData
    headline.py  content around the charts: headline numbers, configuration and its differences
    phases.py    where the time goes: phases, shares of the hardware's limit, recorded steps
    sections.py  charts over steps
    present.py   the charts that a run has numbers for, or that compare several, and their numbers
    bins.py      difference of the engines (histograms.jsonl), what `parity diagnose` found
    samples.py   samples and their tokens, coloured by Delta
    spec.py      Section, Chart, Series, Table
    charts.py    sections and tables -> Bokeh figures
    frame.py     template, figures, scripts -> HTML with a policy; assets/ holds templates (Jinja2), style and script

Text of a model or a dataset reaches the page only escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.report import headline, phases
from trainer.report.bins import diagnosis_section, histogram_section, unreadable
from trainer.report.data import RunData, at, load_runs, plain
from trainer.report.frame import render_page
from trainer.report.present import MAX_POINTS, dash_of, present, run_tables, slot_of
from trainer.report.samples import (
    WORST_SAMPLES,
    coloured,
    heldout_tables,
    legend,
    parts,
    prompt_frame,
    sample_tables,
    told_apart,
    worst_samples,
)
from trainer.report.sections import MISMATCH, SECTIONS, own_numbers
from trainer.report.spec import MAX_PLAIN_POINTS, Section, Table
from trainer.rundir.run_dir import REPORT_FILE, write_whole

_LONG_TEXT = 240
"""Number of characters above which a prompt or response is folded."""
_EVENTS = 200
"""Maximum of events on the page."""
_WORST_OF_EACH = 3
"""Samples with coloured tokens per run, where several runs are compared."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path; an older report is replaced atomically.

    Raises FileNotFoundError if `run_dir` has no metrics.jsonl.
    """
    return write_comparison([run_dir], run_dir / REPORT_FILE)


def write_comparison(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write the page of one run or of several to `path`, and return it.

    Raises FileNotFoundError if a directory has no metrics.jsonl.
    """
    runs = load_runs(run_dirs)
    write_whole(path, render(runs[0]) if len(runs) == 1 else render_runs(runs))
    return path


def render(run: RunData) -> str:
    """The report of one run, as HTML."""
    drawn = min(len(run.steps), MAX_POINTS)
    assumptions = at(run.accounting, "assumptions")
    context = {
        "title": at(run.config, "run", "recipe") or run.name,
        "run": run,
        "status": headline.status_of(run),
        "facts": headline.facts(run),
        "changes": headline.changes(run),
        "tiles": headline.tiles(run),
        "events": [[row["step"], plain(row["kind"]), plain(row["text"])] for row in run.events[-_EVENTS:]],
        "speeds": list(phases.speeds(run)),
        "profiles": phases.profiles(run),
        "profile_kinds": phases.PROFILE_KINDS,
        "assumptions": assumptions if isinstance(assumptions, list) else [],
        "thinned": drawn if drawn < len(run.steps) else None,
        "heldout_tables": heldout_tables(run),
        "sample_tables": sample_tables(run),
        "frame": prompt_frame(run),
        "config_sections": headline.config_sections(run),
        "environment_facts": headline.environment_facts(run),
        "long_text": _LONG_TEXT,
    }
    return _render("run.html", [run], context)


def render_runs(runs: Sequence[RunData]) -> str:
    """A page that compares several runs, as HTML."""
    labels = dict.fromkeys(tile.label for run in runs for tile in headline.tiles(run))
    context = {
        "title": f"{len(runs)} runs compared",
        "runs": runs,
        "slots": [slot_of(index) for index in range(len(runs))],
        "dashes": [dash_of(index).value for index in range(len(runs))],
        "statuses": [headline.status_of(run) for run in runs],
        "labels": list(labels),
        "tiles": [{tile.label: tile for tile in headline.tiles(run)} for run in runs],
        "difference": headline.config_difference(runs),
    }
    return _render("runs.html", runs, context)


def _render(template: str, runs: Sequence[RunData], context: Mapping[str, object]) -> str:
    """A page with `context` and what the pages of one run and of several have in common."""
    sections, tables = contents(runs)
    names, count = ([""], WORST_SAMPLES) if len(runs) == 1 else ([run.name for run in runs], _WORST_OF_EACH)
    named = list(zip(names, runs, strict=True))
    common = {
        "coloured": coloured,
        "told_apart": told_apart,
        "parts_of": parts,
        "phases": phases.phases(runs),
        "smoothed": any(len(run.steps) > MAX_PLAIN_POINTS for run in runs),
        "worst": [
            (name, samples, prompt_frame(run)) for name, run in named if (samples := worst_samples(run, count=count))
        ],
        "legend": list(legend()),
        "remarks": [
            f"{name}: {remark}" if name else remark
            for name, run in named
            for remark in (*run.remarks, *unreadable(run))
        ],
    }
    return render_page(template, sections=sections, tables=tables, context={**context, **common})


def contents(runs: Sequence[RunData]) -> tuple[list[Section], dict[str, Table]]:
    """The charts of one run, or of several runs together, and their numbers."""
    alone = len(runs) == 1
    metrics = {metric for run in runs for row in run.rows for metric in row}
    sections = present([*SECTIONS, own_numbers(metrics)], runs)
    place = next((index for index, section in enumerate(sections, 1) if section.title == MISMATCH.title), 0)
    tables: dict[str, Table] = {}
    section, more = histogram_section(runs)
    if section is not None:  # behind the section of the mismatch
        sections.insert(place, section)
        tables |= more
    if alone:
        section, more = diagnosis_section(runs[0])
        if section is not None:
            sections.insert(place, section)
            tables |= more
    for index, run in enumerate(runs):
        tables |= run_tables(run, sections, suffix="" if alone else f"/{index}")
    return sections, tables
