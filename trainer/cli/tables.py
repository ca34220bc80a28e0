"""Rows and labelled lines -> text that a command prints, the same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

WIDTH = 220
"""Characters per line, enough for every table of Parity; otherwise rich folds a table to the terminal or to 80."""
LABEL_WIDTH = 11


def rows_text(rows: Sequence[Sequence[str]], *, num_words: int = 1) -> str:
    """The rows as text, titles first; the first `num_words` columns are words, all others numbers on the right."""
    titles, *body = rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, title in enumerate(titles):
        table.add_column(title, justify="left" if column < num_words else "right", no_wrap=column > 0)
    for row in body:
        table.add_row(*row)
    shown = StringIO()
    Console(file=shown, width=WIDTH).print(table)
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())


def labelled(lines: Iterable[tuple[str, str]]) -> str:
    """The (label, text) pairs as lines without a final line break; a label stands at its first line only."""
    shown, previous = [], ""
    for label, text in lines:
        shown.append(f"{'' if label == previous else label:<{LABEL_WIDTH}} {text}")
        previous = label
    return "\n".join(shown)
