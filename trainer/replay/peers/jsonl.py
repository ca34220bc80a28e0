"""JSON Lines, row by row: a file of a million tokens is never in memory as a whole.

Some trainers write NaN and Infinity, which are no JSON; Python's own reader takes them, and they read as numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainer.replay.peers.rows import Problems, floats, integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a file."""

    place: str
    """Such as "line 3"."""
    values: dict[str, object]

    def floats(self, name: str, problems: Problems) -> Tensor | None:
        """[L] float32 of a key, or None; that it is there but no list of numbers is noted."""
        return self._tensor(name, problems, floats(self.values.get(name)))

    def integers(self, name: str, problems: Problems) -> Tensor | None:
        """[L] int32 of a key, or None; that it is there but no list of whole numbers is noted."""
        return self._tensor(name, problems, integers(self.values.get(name)))

    def _tensor(self, name: str, problems: Problems, found: Tensor | None) -> Tensor | None:
        if found is None and self.values.get(name) is not None:
            problems.add(f"{name} is no list of numbers", place=self.place)
        return found

    def lack(self, wanted: dict[str, str], problems: Problems) -> bool:
        """Whether one of the keys of `wanted` is missing; each is noted, with its text: what it means."""
        missing = [name for name in wanted if self.values.get(name) is None]
        for name in missing:
            problems.add(f"no {name}: {wanted[name]}", place=self.place)
        return bool(missing)


def rows(path: Path, problems: Problems) -> Iterator[Row]:
    """Yield the rows that are JSON objects; every other line that is not empty is noted."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number:,}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.add(f"is no JSON ({error})", place=place)
                continue
            if isinstance(values, dict):
                yield Row(place=place, values=values)
            else:
                problems.add("is no JSON object", place=place)


def first_keys(path: Path) -> set[str]:
    """The keys of the first row that is a JSON object; empty if there is none."""
    unused = Problems(path, kind="JSON Lines")
    return next((set(row.values) for row in rows(path, unused)), set())
