"""Traces of one server on the machine: a private temporary directory and named shared memory.

`rollout/sglang/server.py` makes a `Scratch` per server, `trainer/cluster/ray_session.py` one for Ray; both remove it.
A process killed with SIGKILL removes nothing, so the next server of the kind to start removes the traces of killed
owners.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil

PREFIX = "parity-engine-"
LOCK = "owner.lock"
SEGMENTS = "segments.txt"
SHARED_MEMORY = Path("/dev") / "shm"
OWN_SEGMENTS = ("sglang_", "sgl_", "sem.mp-", "psm_", "torch_")
"""Prefixes of the names that SGLang's processes give to shared memory."""


class Scratch:
    """The directory and the segments of one server; this process holds the lock in the directory while it lives."""

    def __init__(self, prefix: str = PREFIX, *, parent: Path | None = None) -> None:
        """Sweep, then make a directory in `parent`, None for that of temporary files, which only this user can read.

        Its name begins with `prefix`, one for each kind of server. Raises OSError.
        """
        place = parent or Path(tempfile.gettempdir())
        sweep(prefix, parent=place)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        self.segments: set[Path] = set()
        # The directory is locked before it gets its name: a sweeper never sees an unlocked directory of a living owner.
        unlocked = self.path / f"{LOCK}.new"
        self._lock = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / LOCK)

    def note_segments(self, processes: Iterable[psutil.Process]) -> None:
        """Record, also for a sweeper, the shared memory that the processes map now."""
        found = {segment for process in processes for segment in mapped_segments(process.pid)}
        if found <= self.segments or not self.path.is_dir():
            return
        self.segments |= found
        names = "".join(f"{segment.name}\n" for segment in sorted(self.segments))
        (self.path / SEGMENTS).write_text(names, encoding="utf-8")

    def remove(self) -> None:
        """Remove directory and segments; safe to call twice. The server's processes must be gone."""
        if self._lock < 0:
            return
        _remove(self.path, self.segments)
        os.close(self._lock)
        self._lock = -1


def sweep(prefix: str, *, parent: Path) -> None:
    """Remove the traces of servers of this user whose owner was killed; traces of living owners are locked."""
    for directory in parent.glob(f"{prefix}*"):
        try:
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / LOCK, os.O_RDWR)
        except OSError:
            continue  # just made, or just removed by somebody else
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(directory, _noted_segments(directory / SEGMENTS))
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(lock)


def mapped_segments(pid: int) -> set[Path]:
    """Named shared memory of SGLang's kind that the process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()  # the process is gone
    paths = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines()}
    return {path for path in paths if path.parent == SHARED_MEMORY and path.name.startswith(OWN_SEGMENTS)}


def _noted_segments(file: Path) -> set[Path]:
    try:
        names = file.read_text(encoding="utf-8").split()
    except OSError:
        return set()  # the server was killed before it had any
    return {SHARED_MEMORY / name for name in names if name.startswith(OWN_SEGMENTS) and "/" not in name}


def _remove(directory: Path, segments: Iterable[Path]) -> None:
    for segment in segments:
        segment.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
