"""Rows of results: what was expected, what was measured, and the verdict; one line of JSON each, then one table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class Verdict(StrEnum):
    """What a row says about its expectation."""

    holds = "holds"
    fails = "fails"
    noted = "noted"
    """A number without a bound: something for a person to decide with."""
    not_run = "not run"


class NotRunError(RuntimeError):
    """A check cannot run here; the message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One result."""

    check: str
    """Number of the check, with its part if it has several: "4 7B, 8 ranks"."""
    what: str
    expected: str
    measured: str
    verdict: Verdict
    reason: str = ""
    """Why a row fails or was not run."""


def judged(check: str, what: str, *, expected: str, measured: str, ok: bool, reason: str = "") -> Row:
    """A row that holds or fails; `reason` is kept for a row that fails."""
    verdict = Verdict.holds if ok else Verdict.fails
    return Row(
        check=check, what=what, expected=expected, measured=measured, verdict=verdict, reason="" if ok else reason
    )


def noted(check: str, what: str, *, measured: str, expected: str = "", reason: str = "") -> Row:
    """A row with a number and no bound."""
    return Row(check=check, what=what, expected=expected, measured=measured, verdict=Verdict.noted, reason=reason)


def not_run(check: str, what: str, *, reason: str, expected: str = "") -> Row:
    """A row that could not be measured."""
    return Row(check=check, what=what, expected=expected, measured="", verdict=Verdict.not_run, reason=reason)


def append(path: Path, row: Row) -> None:
    """Add one line to the file of rows; it is on the disk when this returns, so that a killed check leaves its rows."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Row]:
    """All rows of the file, in the order in which they were written; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Row(**(fields | {"verdict": Verdict(fields["verdict"])})) for fields in map(json.loads, lines)]


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows."""
    lines = ["| check | what | expected | measured | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        verdict = f"{row.verdict.value}: {row.reason}" if row.reason else row.verdict.value
        lines.append("| " + " | ".join(map(_cell, (row.check, row.what, row.expected, row.measured, verdict))) + " |")
    return "\n".join(lines) + "\n"


def summary(rows: Iterable[Row]) -> str:
    """The number of rows of each verdict: "12 holds, 0 fails, 7 noted, 3 not run"."""
    verdicts = [row.verdict for row in rows]
    return ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)


def _cell(text: str) -> str:
    """Text that stays inside its cell of a table."""
    return " ".join(text.replace("|", "/").split())
