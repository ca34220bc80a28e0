"""A path that leads to nothing -> a sentence with what lies beside it and was probably meant, for messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from algorithms.config.similar import similar

PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Suffixes of compressed files, which Parity does not unpack."""


def similar_directory(given: str) -> str:
    """A sentence with the directory that `given` probably means; empty if no name beside it is similar."""
    path = Path(given)
    close = similar(path.name, _names_beside(path, Path.is_dir))
    return f"Did you mean {path.with_name(close)}?" if close else ""


def similar_file(given: str, suffixes: Collection[str]) -> str:
    """A sentence with the file of one of `suffixes` that `given` probably means; empty if no name beside it is similar.

    The name without the suffix decides, because with a common suffix `a.csv` would be similar to `b.csv`.
    """
    path = Path(given)
    if not path.name:
        return ""
    names = _names_beside(path, Path.is_file)
    packed = next((f"{path.name}{suffix}" for suffix in PACKED if f"{path.name}{suffix}" in names), None)
    if packed is not None:
        return f"There is {path.with_name(packed)}: unpack it."
    name = Path(path.stem if path.suffix.lower() in PACKED else path.name)
    known = [found for found in names if Path(found).suffix.lower() in suffixes]
    same_suffix = {Path(found).stem: found for found in known if Path(found).suffix.lower() == name.suffix.lower()}
    same_stem = [found for found in known if Path(found).stem.lower() == name.stem.lower()]
    close = same_suffix.get(similar(name.stem, same_suffix) or "")
    if name.name in names:
        close = name.name
    elif same_stem:
        close = similar(name.name, same_stem) or same_stem[0]
    return f"Did you mean {path.with_name(close)}?" if close else ""


def _names_beside(path: Path, is_wanted: Callable[[Path], bool]) -> list[str]:
    """Sorted names of the wanted entries of the directory of `path`; none if it cannot be read."""
    try:
        return sorted(found.name for found in path.parent.iterdir() if is_wanted(found))
    except (OSError, ValueError):  # no such directory, a NUL in the path
        return []
