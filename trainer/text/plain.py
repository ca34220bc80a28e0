"""Text for readers: counts, bytes and durations in a short form, and the way of every text to the terminal."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TextIO


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


def command_line(*words: str | Path) -> str:
    """A command to paste into a shell. `path_override` of trainer/compose/overrides.py writes a key with its path."""
    return shlex.join(map(str, words))


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
    """Write what a command reports, at once and without control characters; a reader that has gone changes nothing."""
    try:
        sys.stderr.write(printable(text))
        sys.stderr.flush()
    except BrokenPipeError:
        to_nowhere(sys.stderr)


def to_stdout_while_read(text: str, *, command: str) -> None:
    """`to_stdout` for a command that has more to do than to write: a reader that has gone ends the output alone."""
    try:
        to_stdout(text)
    except BrokenPipeError:
        to_nowhere(sys.stdout)
        to_stderr(f"{command}: nobody reads the output any more; the work goes on, and its files are written\n")


def to_nowhere(stream: TextIO) -> None:
    """Drop what `stream` holds and gets from now on: its reader has closed the pipe.

    The interpreter flushes it at its exit, and would end with exit code 120.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class PrintableFormatter(logging.Formatter):
    """Log records without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
