"""`parity report <run or sweep> [...] [-o FILE]`: the page of one run, or a comparison of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from trainer.cli.parsers import PARSERS
from trainer.ending.exit_codes import DONE, FAILED, report
from trainer.rundir.run_dir import REPORT_FILE, runs_inside, unusable_problem
from trainer.text.plain import command_line, to_stderr, to_stdout

COMMAND = "parity report"
METRICS = "metrics.jsonl"
PAGE_BEGINS = b"<!doctype html>"
COMPARISON = "comparison.html"
"""Default file for the page of several runs, in the current directory or in that of their sweep; the page of one run
is its own report.html."""


def run_report(words: Sequence[str]) -> int:
    """Write the page and print its path; return the exit code."""
    run_dirs, out, problems = _parse(words)
    problems += [problem for directory in run_dirs for problem in _directory_problems(directory)]
    if out is None and not problems:
        out = run_dirs[0] / REPORT_FILE if len(run_dirs) == 1 else Path(COMPARISON)
    problems += [] if out is None else _out_problems(out)
    if problems or out is None:
        return report(problems, command=COMMAND)
    from trainer.report.page import write_comparison

    try:
        path = write_comparison(run_dirs, out)
    except Exception as error:  # the files may be a stranger's: whatever is in them, the command ends with a sentence
        to_stderr(f"{COMMAND}: the page cannot be written: {type(error).__name__}: {error}\n")
        return FAILED
    to_stdout(f"{path}\n")
    return DONE


def _parse(words: Sequence[str]) -> tuple[list[Path], Path | None, list[Problem]]:
    """Parse the words -> (run directories without repeats, file of --out, problems of the words)."""
    parsed, problems = PARSERS["report"].read(words)
    # A file in the run directory, for example metrics.jsonl or report.html, names the run as well.
    given = (Path(from_home(run, key="run")) for run in parsed.words)
    places = [path.parent if (path.parent / METRICS).is_file() and path.is_file() else path for path in given]
    run_dirs = {path.resolve(): path for place in places for path in _runs_of_sweep(place) or [place]}
    if not run_dirs and not problems:
        remedy = "A run directory is what parity train printed, outputs/<recipe>/<time>."
        problems.append(Problem(key="run", rule="is missing", value=NOT_SET, remedy=remedy))
    out = None if parsed.out is None else Path(from_home(parsed.out, key="--out"))
    if out is None and len(places) == 1 < len(run_dirs):
        out = places[0] / COMPARISON
    return list(run_dirs.values()), out, problems


def _runs_of_sweep(directory: Path) -> list[Path]:
    """The runs of a sweep that have begun, in its order; empty if `directory` is no sweep's: its runs have numbers."""
    runs = [path.parent for path in directory.glob(f"*/{METRICS}") if path.parent.name.isdecimal()]
    return sorted(runs, key=lambda run: int(run.name))


def _out_problems(out: Path) -> list[Problem]:
    """Problems of the file of the page."""
    if not out.parent.is_dir():
        return [Problem(key="--out", rule="must lie in an existing directory", value=str(out))]
    if out.is_dir():
        return [Problem(key="--out", rule="must be a file", value=str(out), remedy="Name the .html file.")]
    if out.is_file() and not out.read_bytes().lstrip().startswith(PAGE_BEGINS):
        rule = "must be a new file or an older page: this file holds something else"
        return [Problem(key="--out", rule=rule, value=str(out), remedy="Name another .html file.")]
    unusable = unusable_problem("--out", out.parent)
    return [] if unusable is None else [unusable]


def _directory_problems(directory: Path) -> list[Problem]:
    if (directory / METRICS).is_file():
        return []
    rule = f"must be the directory of a run that has a step, with its {METRICS}"
    of_file = (
        f"Of a bundle {command_line('parity', 'replay', directory)} writes the page." if directory.is_file() else ""
    )
    return [Problem(key="run", rule=rule, value=str(directory), remedy=of_file or runs_inside(directory))]
