"""The cache of Parity: generated models and measured ceilings, shared by all runs.

A cached model is a sealed directory (`trainer/rundir/sealed_directory.py`). It gets a temporary name until it is
complete, so that a killed process leaves no entry, and one of two concurrent copies is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from algorithms.config.home import from_home
from trainer.rundir.sealed_directory import SealError, verify, write_manifest

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Callback while a cached model is made, with (done, total, detail): optimizer steps or stages, and a phrase."""
FORMAT = 1
"""Version of the layout of a cached directory."""
ABANDONED_AFTER_S = 3600.0
"""Age in seconds above which a temporary directory belongs to a killed process: a model takes a minute or two."""


def default_cache_dir() -> Path:
    """Return $PARITY_CACHE, or ~/.cache/parity where it is not set. Raises ConfigError for a ~ of an unknown user."""
    configured = os.environ.get("PARITY_CACHE")
    return Path(from_home(configured, key="$PARITY_CACHE")) if configured else Path.home() / ".cache" / "parity"


def cached_directory(entry: Path, files: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return `entry`; if it is missing or damaged, let `make(directory)` write `files`, and publish the directory.

    Raises FileNotFoundError if `make` has not written one of `files`.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    if entry.exists():
        damage = find_damage(entry)
        if damage is None:
            logger.info("cached in %s", entry)
            return entry
        logger.warning("%s is damaged (%s) and is made again", entry, damage)
    _remove_abandoned(entry)
    building = Path(tempfile.mkdtemp(prefix=f"{entry.name}.building-", dir=entry.parent))
    try:
        make(building)
        for name in files:
            (building / name).stat()  # raises FileNotFoundError
        write_manifest(building, layout=FORMAT)
        _publish(building, entry)
    finally:
        # The directory is already renamed after a publication; it still exists after an error, an interrupt or a lost
        # race.
        shutil.rmtree(building, ignore_errors=True)
    return entry


def find_damage(entry: Path) -> str | None:
    """Describe the damage of a cached directory: a missing or changed file; None if it is intact."""
    try:
        verify(entry, layout=FORMAT)
    except SealError as problem:
        return str(problem)
    return None


def _publish(building: Path, entry: Path) -> None:
    """Rename `building` to `entry`; keep an intact entry that another process put there first."""
    if entry.exists() and find_damage(entry) is not None:
        # Renamed in one step, so that no other process sees a part of it.
        aside = Path(tempfile.mkdtemp(prefix=f"{entry.name}.damaged-", dir=entry.parent))
        with contextlib.suppress(FileNotFoundError):  # another process has just moved it away
            os.rename(entry, aside)
        shutil.rmtree(aside)
    try:
        os.rename(building, entry)
    except OSError:
        if find_damage(entry) is not None:
            raise
        logger.info("another process has just made %s", entry)


def _remove_abandoned(entry: Path) -> None:
    """Remove the temporary directories of killed processes for `entry`."""
    for left in [*entry.parent.glob(f"{entry.name}.building-*"), *entry.parent.glob(f"{entry.name}.damaged-*")]:
        try:
            age = time.time() - left.stat().st_mtime
        except FileNotFoundError:  # another process was faster
            continue
        if age > ABANDONED_AFTER_S:
            logger.info("removing %s, left behind %.0f s ago", left, age)
            shutil.rmtree(left, ignore_errors=True)
