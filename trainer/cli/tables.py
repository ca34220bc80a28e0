"""Rich table -> text that a command prints, the same on a terminal and in a file."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.table import Table

WIDTH = 220
"""Characters per line, enough for every table of Parity; otherwise rich folds a table to the terminal or to 80."""


def table_text(table: Table) -> str:
    """The lines of the table without trailing blanks, each ending in a line break."""
    shown = StringIO()
    Console(file=shown, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in shown.getvalue().splitlines()) + "\n"
