"""The table of faults in docs/guarantees.md names, for each scenario, the files whose tests are marked with it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "guarantees.md"
NUM_SCENARIOS = 41
NOT_YET_RUN = {38, 39}
"""Scenarios that need a GPU."""


def marked() -> dict[int, set[str]]:
    """Number of a scenario -> files with a test that is marked with it."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.glob("*/test_*.py"):
        for number in re.findall(r"pytest\.mark\.scenario\((\d+)\)", path.read_text(encoding="utf-8")):
            found[int(number)].add(path.relative_to(TESTS).as_posix())
    return found


def test_the_table_names_the_tests_of_every_scenario() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    table = {int(number): cell for number, cell in rows}
    assert sorted(table) == list(range(1, NUM_SCENARIOS + 1))
    shown = {number: set(re.findall(r"`([^`]+)`", cell)) for number, cell in table.items() if number not in NOT_YET_RUN}
    assert shown == {number: marked()[number] for number in shown}
    assert all(shown.values())
    assert {number for number, cell in table.items() if cell.strip() == "not yet run on a GPU"} == NOT_YET_RUN
