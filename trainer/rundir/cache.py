"""The cache of Parity: generated models and measured ceilings, shared by all runs.

A cached model is a directory with a manifest of its files. The directory gets a temporary name until it is complete, so
that a killed process leaves no entry, and one of two concurrent copies is kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Callback while a cached model is made, with (done, total, detail): optimizer steps or stages, and a phrase."""
MANIFEST = "manifest.json"
"""File of a cached directory: name -> sha256 of every other file."""
ABANDONED_AFTER_S = 3600.0
"""Age in seconds above which a temporary directory belongs to a killed process: a model takes a minute or two."""


def default_cache_dir() -> Path:
    """Return $PARITY_CACHE, or ~/.cache/parity where it is not set."""
    configured = os.environ.get("PARITY_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "parity"


def cached_directory(entry: Path, files: Sequence[str], make: Callable[[Path], None]) -> Path:
    """Return `entry`; if it is missing or damaged, let `make(directory)` write `files`, and publish the directory.

    Raises:
        FileNotFoundError: `make` has not written one of `files`.
    """
    entry.parent.mkdir(parents=True, exist_ok=True)
    if entry.exists():
        damage = find_damage(entry, files)
        if damage is None:
            logger.info("cached in %s", entry)
            return entry
        logger.warning("%s is damaged (%s) and is made again", entry, damage)
    _remove_abandoned(entry)
    building = Path(tempfile.mkdtemp(prefix=f"{entry.name}.building-", dir=entry.parent))
    try:
        make(building)
        digests = {name: file_digest(building / name) for name in files}
        (building / MANIFEST).write_text(json.dumps(digests, indent=2))
        _publish(building, entry, files)
    finally:
        # The directory is already renamed after a publication; it still exists after an error, an interrupt or a lost
        # race.
        shutil.rmtree(building, ignore_errors=True)
    return entry


def find_damage(entry: Path, files: Sequence[str]) -> str | None:
    """Describe the damage of a cached directory of `files`: a missing or changed file; None if it is intact."""
    try:
        expected = json.loads((entry / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {error}"
    if not isinstance(expected, dict) or sorted(expected) != sorted(files):
        return f"{MANIFEST}: must list {', '.join(files)}"
    for name, digest in expected.items():
        try:
            found = file_digest(entry / name)
        except OSError as error:
            return f"{name}: {error}"
        if found != digest:
            return f"{name}: sha256 {found[:12]}, the manifest says {digest[:12]}"
    return None


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(building: Path, entry: Path, files: Sequence[str]) -> None:
    """Rename `building` to `entry`; keep an intact entry that another process put there first."""
    if entry.exists() and find_damage(entry, files) is not None:
        _remove_damaged(entry)
    try:
        os.rename(building, entry)
    except OSError:
        if find_damage(entry, files) is not None:
            raise
        logger.info("another process has just made %s", entry)


def _remove_damaged(entry: Path) -> None:
    """Rename `entry` in one step, so that no other process sees a part of it, and remove the renamed directory."""
    aside = Path(tempfile.mkdtemp(prefix=f"{entry.name}.damaged-", dir=entry.parent))
    try:
        os.rename(entry, aside)
    except FileNotFoundError:
        logger.info("another process has just moved the damaged %s away", entry)
    shutil.rmtree(aside)


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
