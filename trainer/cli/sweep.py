"""The runs of a sweep: what tells them apart, their place in W&B, and at the end a table and a page that compare them.

Called by `job.py`.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.report import COMPARISON
from trainer.cli.tables import rows_text
from trainer.compose.compose import Resolution
from trainer.config.outputs import WANDB_NAME, WANDB_RUN_GROUP
from trainer.ending.exit_codes import DONE
from trainer.rundir.run_dir import METRICS_FILE, write_csv, write_whole
from trainer.text.plain import to_stdout_while_read
from trainer.text.redact import redact_argv
from trainer.tracking.wandb_run import MAX_NAME

if TYPE_CHECKING:
    from trainer.report.data import RunData

COMMAND = "parity train"
TABLE_FILE = "sweep.csv"
"""In the directory of the sweep: the table with all digits."""
_NUMBERS: tuple[tuple[str, str, Callable[[Sequence[float]], float], str], ...] = (
    ("reward", "reward/mean", lambda values: values[-1], "number"),
    ("held-out", "eval/accuracy", lambda values: values[-1], "percent"),
    ("K3", "mismatch/k3", statistics.median, "exponent"),
)
"""(title, metric, which number of its values over the steps, form in which it is printed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The end of one run."""

    exit_code: int
    seconds: float
    """From before the run to its end, its imports included."""


def differing_overrides(resolution: Resolution) -> list[dict[str, str]]:
    """Key -> value of the overrides in which the runs differ, for each run; secrets are redacted."""
    # Every run of a sweep has the same keys.
    runs = [dict(word.partition("=")[::2] for word in redact_argv(run.overrides)) for run in resolution.runs]
    keys = [key for key in runs[0] if len({words[key] for words in runs}) > 1]
    return [{key.lstrip("+"): words[key] for key in keys} for words in runs]


def place_in_wandb(resolution: Resolution) -> None:
    """Give the runs one W&B group, and names that say in what they differ, where no key or variable does."""
    for index, (run, words) in enumerate(zip(resolution.runs, differing_overrides(resolution), strict=True)):
        assert run.config is not None and run.output_dir is not None
        tracking, recipe = run.config.tracking, run.config.run.recipe
        if tracking.group is None and not os.environ.get(WANDB_RUN_GROUP):
            tracking.group = f"{recipe}/{resolution.run_dir(index).parent.name}"
        if tracking.name is None and not os.environ.get(WANDB_NAME):
            shown = " ".join(f"{key}={value}" for key, value in words.items())
            tracking.name = f"{recipe}/{index} {shown}".strip()[:MAX_NAME]


def begun_directories(resolution: Resolution) -> list[Path]:
    """The directories of the runs that a page can show."""
    directories = [resolution.run_dir(index) for index in range(len(resolution.runs))]
    return [directory for directory in directories if (directory / METRICS_FILE).is_file()]


def compare(resolution: Resolution, ended: Sequence[Ended]) -> None:
    """Print a table of the runs, write it and the page of all runs beside them, and print the path of the page.

    `ended` has the runs that were begun. Raises OSError and what a damaged file of a run leads to.
    """
    from trainer.report.data import load_runs, show
    from trainer.report.page import render_runs

    directories = [resolution.run_dir(index) for index in range(len(resolution.runs))]
    begun = begun_directories(resolution)
    loaded = dict(zip(begun, load_runs(begun), strict=True)) if begun else {}
    differing = differing_overrides(resolution)
    titles = ["run", *differing[0], "status", "exit code", *(title for title, *_ in _NUMBERS), "seconds"]
    table, printed = [titles], [titles]
    for index, (directory, words) in enumerate(zip(directories, differing, strict=True)):
        run, end = loaded.get(directory), ended[index] if index < len(ended) else None
        facts = [*words.values(), _status(run, end), "" if end is None else str(end.exit_code)]
        numbers = [_number(run, metric, chosen) for _, metric, chosen, _ in _NUMBERS]
        forms = [form for *_, form in _NUMBERS]
        shown = ["" if value is None else show(value, form) for value, form in zip(numbers, forms, strict=True)]
        raw = ["" if value is None else repr(value) for value in numbers]
        seconds = ["", ""] if end is None else [f"{end.seconds:.3f}", f"{end.seconds:.0f}"]
        table.append([str(directory), *facts, *raw, seconds[0]])
        printed.append([str(index), *facts, *shown, seconds[1]])
    table_text = rows_text(printed, num_words=len(differing[0]) + 2)
    to_stdout_while_read(f"{directories[0].parent}: {len(directories)} runs\n{table_text}", command=COMMAND)
    write_csv(directories[0].parent / TABLE_FILE, table)
    if begun:
        page = directories[0].parent / COMPARISON
        write_whole(page, render_runs(list(loaded.values())))
        to_stdout_while_read(f"{page}\n", command=COMMAND)


def _status(run: RunData | None, end: Ended | None) -> str:
    """How the run ended, and after how many steps."""
    from trainer.report.headline import status_of

    if end is None:
        return "not begun"
    if run is None:
        return "completed" if end.exit_code == DONE else "failed, no step"
    return status_of(run).text


def _number(run: RunData | None, metric: str, chosen: Callable[[Sequence[float]], float]) -> float | None:
    values = [] if run is None else run.values(metric)
    return chosen(values) if values else None
