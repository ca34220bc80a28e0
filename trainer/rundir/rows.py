"""Files of rows (metrics.jsonl, samples.jsonl, ...): one JSON object per line, read line by line.

A line ends with "\\n" only: a response may contain U+2028, U+2029 or U+0085, at which `str.splitlines` splits too. A
line without a JSON object is damaged. A damaged line costs its own row and never the rows after it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.rundir.sealed_directory import to_disk

POLL_S = 0.2
"""Seconds between two looks at a file that somebody else writes."""
DAMAGED_SUFFIX = ".damaged"
"""Suffix of the file that keeps the damaged lines of a file of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a file of rows."""

    number: int
    """Line number from 1."""
    text: bytes
    """The line as it is in the file, with its "\\n" if it has one."""
    row: dict[str, Any] | None
    """The JSON object in the line; None if the line is damaged."""

    @property
    def is_finished(self) -> bool:
        """False for the last line of a process that was killed while it wrote the line."""
        return self.text.endswith(b"\n")


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, in order; raises OSError if the file cannot be read."""
    with path.open("rb") as file:  # a binary file is split at "\n" only
        for number, text in enumerate(file, start=1):
            yield Line(number=number, text=text, row=_object(text))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file without its damaged lines; raises OSError if the file cannot be read."""
    return [line.row for line in read_lines(path) if line.row is not None]


def follow_rows(path: Path, *, goes_on: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The rows of a file that is still written to, each when its line is whole; ends when `goes_on` is False.

    Waits for the file to appear. There is no deadline: the writer decides when a row comes.
    """
    more = True
    while not path.is_file():
        if not more:
            return
        more = goes_on()  # asked before the look that follows: a file that the writer left is found
        time.sleep(POLL_S if more else 0.0)
    with path.open("rb") as file:
        rest = b""
        while True:
            more = goes_on()
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from (row for row in map(_object, lines) if row is not None)
            if not more:
                return
            time.sleep(POLL_S)


def forget_after(path: Path, step: int) -> int:
    """Remove the rows of later steps from a file of rows, and a last line that was never finished.

    Damaged lines, and rows without a step, move to a file beside it (`DAMAGED_SUFFIX`); returns their number.
    """
    if not path.is_file():
        return 0
    damaged: list[bytes] = []
    unfinished = path.with_name(f".{path.stem}.unfinished")
    with unfinished.open("wb") as kept:
        for line in read_lines(path):
            found = None if line.row is None else line.row.get("step")
            if not isinstance(found, int | float):
                damaged += [line.text] if line.is_finished else []
            elif found <= step:
                kept.write(line.text if line.is_finished else line.text + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    if damaged:
        with path.with_name(path.name + DAMAGED_SUFFIX).open("ab") as aside:
            aside.writelines(damaged)
            aside.flush()
            os.fsync(aside.fileno())
    unfinished.replace(path)
    to_disk(path.parent)
    return len(damaged)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
