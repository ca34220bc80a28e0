"""The directory of a study: locked by one process at a time, with a record of each run's seconds and error."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from algorithms.config import Problem
from trainer.study.cells import STUDY_FILE
from trainer.study.run import CellRecord

_LOCK = ".lock"


@contextmanager
def taken(study_dir: Path) -> Iterator[Problem | None]:
    """Make the directory and keep other studies out of it; yields a Problem if the directory cannot be used."""
    try:
        study_dir.mkdir(parents=True, exist_ok=True)
        lock = (study_dir / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        yield Problem(key="study.dir", rule=f"cannot be used ({error})", value=str(study_dir))
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            rule = f"is in use by process {lock.read().strip() or 'unknown'}"
            yield Problem(key="study.dir", rule=rule, value=str(study_dir), remedy="Wait for it, or name another.")
            return
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield None


def read_records(study_dir: Path) -> dict[str, CellRecord]:
    """Records that an earlier call of the study wrote about its runs; empty without such a call."""
    path = study_dir / STUDY_FILE
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    cells = [*document["cells"], *document["other_cells"]]
    return {cell["name"]: CellRecord(seconds=cell["seconds"], error=cell["error"]) for cell in cells}
