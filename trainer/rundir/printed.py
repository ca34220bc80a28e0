"""logs/printed.log in a run directory: what reward functions, rollout functions and chat templates print.

The text has no secrets and no control characters. The file is bounded: what comes after MAX_BYTES is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.processes.child_process import printed
from trainer.text.plain import printable, size
from trainer.text.redact import redact_text

logger = logging.getLogger(__name__)

PRINTED_FILE = "printed.log"
MAX_BYTES = 16 * 2**20


@contextmanager
def printed_log(directory: Path) -> Iterator[None]:
    """Append what children print to `directory`/printed.log while the block runs; no prints, no file."""
    handler = _PrintedLog(directory / PRINTED_FILE)
    printed.addHandler(handler)
    try:
        yield
    finally:
        printed.removeHandler(handler)


class _PrintedLog(logging.Handler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._bytes_left = MAX_BYTES - (path.stat().st_size if path.exists() else 0)

    def emit(self, record: logging.LogRecord) -> None:
        if self._bytes_left <= 0:
            return
        text = printable(redact_text(record.getMessage())).encode()
        if len(text) >= self._bytes_left:
            text = text[: self._bytes_left] + f"\n... the rest is left out: the limit is {size(MAX_BYTES)}\n".encode()
        self._bytes_left -= len(text)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(text)
        except OSError as error:
            self._bytes_left = 0
            logger.warning("%s cannot be written; what functions print is left out: %s", self._path, error)
