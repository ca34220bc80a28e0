"""Console output of a running study: a line per start and end, and on a terminal a bar per running cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def duration(seconds: float) -> str:
    """Text of a duration in seconds for people: "40 s", "12 min", "3 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class StudyConsole:
    """Prints lines, and bars if there is a terminal; a context manager."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        live = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if live:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("step {task.completed}/{task.total}"),
                TimeElapsedColumn(),
                console=Console(file=self._stream, highlight=False, markup=False, soft_wrap=True),
                transient=True,
                refresh_per_second=2,
            )

    def __enter__(self) -> StudyConsole:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Write a permanent line."""
        if self._bars is not None:
            self._bars.console.print(text)
        else:
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def running(self, steps: Mapping[str, tuple[int, int]]) -> None:
        """Show the progress of each running cell: name -> (steps done, steps of the run)."""
        if self._bars is None:
            return
        for name in [name for name in self._tasks if name not in steps]:
            self._bars.remove_task(self._tasks.pop(name))
        for name, (done, total) in steps.items():
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=total)
            self._bars.update(self._tasks[name], completed=done)
