"""A Replay -> replay.html, a page without a script that opens offline, and replay.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from trainer.replay.results import COLUMNS, Replay, objective_of, record
from trainer.report.frame import render_page, write_page
from trainer.rundir.run_dir import write_whole

PAGE_FILE = "replay.html"
RESULT_FILE = "replay.json"
_HOW_TO_READ = """
loss: what is minimised, with its denominators. weight: mean importance weight of the tokens, 0 where rejected; max: the
largest of a kept token. ESS: share of the tokens (seq: of the responses) that count; raw: of pi_old / mu before any
bound, applied: of the weights in the loss. kept: share of the response tokens in the loss. clip mass: share of the
weight that bounds took off. lr A>0, lr A<0: what is left of the learning rate, sum |w A| / sum |A|. K3: the mismatch,
nats.
"""

_Part = tuple[str, Sequence[Sequence[str]], int, str]
"""Heading, rows with the titles first, number of columns that are words, note."""


def write_replay(replay: Replay, directory: Path) -> tuple[Path, Path]:
    """Write replay.json and replay.html, each atomically; returns their paths."""
    result = directory / RESULT_FILE
    write_whole(result, json.dumps(record(replay), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return result, write_page(render(replay), directory / PAGE_FILE)


def render(replay: Replay) -> str:
    """The page as HTML."""
    refused = [(mode.name, mode.refusal) for mode in replay.refused]
    objectives = [(mode.name, objective_of(mode.config)) for mode in replay.modes]
    parts: list[_Part] = [
        ("Modes", mode_rows(replay), 1, _HOW_TO_READ),
        ("Refused", [("mode", "reason"), *refused], 2, ""),
        ("What each mode minimises", [("mode", "objective"), *objectives], 2, ""),
    ]
    context = {
        "title": f"replay of step {replay.dump.description.step}",
        "facts": replay.facts(),
        "parts_of_page": [part for part in parts if len(part[1]) > 1],
    }
    return render_page("tables.html", sections=(), tables={}, context=context)


def mode_rows(replay: Replay) -> list[tuple[str, ...]]:
    """The table of modes as text, titles first."""
    rows: list[tuple[str, ...]] = [("mode", *COLUMNS)]
    for score in replay.scores:
        rows.append((score.name, *(shown(score.metrics.get(key)) for key in COLUMNS.values())))
    return rows


def shown(value: float | None) -> str:
    """A number in at most eight characters; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"
