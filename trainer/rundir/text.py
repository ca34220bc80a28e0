"""Text for readers: counts, bytes and durations in a short form, and the way of every text to the terminal."""

from __future__ import annotations

import logging
import sys


def counted(count: int, noun: str, plural: str = "") -> str:
    """Count with its noun: 1 -> "1 rank", 2000 -> "2,000 ranks"; `plural` if the plural is not the noun with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def size(num_bytes: int) -> str:
    """Bytes in the unit that keeps the number short: "15.3 GiB"."""
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.3g} {units[0]}"


def duration(seconds: float) -> str:
    """Text of a duration in seconds for people: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def printable(text: str) -> str:
    """Text without control characters; line breaks and tabs stay.

    Text of a model, a data set or a file must not move the cursor, recolour or rename the terminal.
    """
    return "".join(char for char in text if char in "\n\t" or char.isprintable())


def to_stdout(text: str) -> None:
    """Write what a command answers, at once and without control characters."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def to_stderr(text: str) -> None:
    """Write what a command reports, at once and without control characters."""
    sys.stderr.write(printable(text))
    sys.stderr.flush()


class PrintableFormatter(logging.Formatter):
    """Log records without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
