"""Stacks of processes that do not get on: a process prepares a file, and writes its stack there when it is asked to."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

ASK = signal.SIGUSR2
"""Signal at which a process writes its stack."""
STACKS_FILE = "stacks.txt"
"""Name of the file, in the directory of logs."""


def write_stack_when_asked(file: Path) -> None:
    """Append the stack of every thread of this process to `file` at each signal ASK.

    The file is opened now, and the handler is a C function that waits for nothing: it also works in a process that
    holds the interpreter lock for ever, or may open no file any more.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(ASK, file=file.open("a", encoding="utf-8"), all_threads=True)
