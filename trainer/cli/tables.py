"""A rich table as the text that a command prints, the same on a terminal and in a file."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

WIDTH = 220
"""Wide enough for every table of ours; rich would otherwise fold it to the terminal, or to 80 columns in a file."""


def table_text(table: Table) -> str:
    """Its lines without blanks at their ends, the last one closed."""
    shown = StringIO()
    Console(file=shown, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()) + "\n"
