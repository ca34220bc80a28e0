"""Sealed directories: whole or absent, and verified before use. Checkpoints, dumps and cached models are sealed.

    manifest.json   format, and size and digest of every other file

A directory is built under a hidden or temporary name and gets its own name when every file is described, so a process
that is killed leaves no half of one. The ranks describe the files that they write; all other files are described and
brought to the disk by `write_manifest`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SET_ASIDE = ".aside"
"""Suffix of a sealed directory whose step is made again; removed when a new one of its step is on the disk."""
OTHER_FORMAT = ".other_format"
"""Suffix of a sealed directory that another version of Parity can read; it stays when its step is made again."""


class SealError(RuntimeError):
    """A sealed directory is damaged; the message gives the reason with the name of the file."""


class FormatError(SealError):
    """A sealed directory has the format of another version of Parity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and digest of a file in the manifest."""

    bytes: int
    xxh3_128: str


def describe_file(path: Path) -> FileRecord:
    """Size and digest of a file, read now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return FileRecord(bytes=path.stat().st_size, xxh3_128=digest.hexdigest())


def to_disk(path: Path) -> None:
    """Sync a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inside(directory: Path, name: str) -> Path:
    """The file `name` of `directory`. Raises ValueError for a name that leads out of it."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{directory} names the file {name!r}, which is not in it")
    return directory / name


def write_manifest(directory: Path, *, layout: int, records: Mapping[str, FileRecord] | None = None) -> None:
    """Describe every file of `directory`, and bring to the disk what is not there yet.

    Args:
        directory: the complete directory, still under its temporary name.
        layout: version of the files in the directory, which the reader compares with its own.
        records: files that their writer already described, by path relative to `directory`; they are neither read nor
            synced again.

    Raises OSError if the disk rejects the data, or if a file of `records` is missing.
    """
    described = dict(records or {})
    names = [str(path.relative_to(directory)) for path in _files(directory)]
    if absent := sorted(described.keys() - set(names)):
        raise FileNotFoundError(f"{directory} lacks {', '.join(absent)}, which a rank wrote: is it a shared disk?")
    for name in names:
        if name not in described:
            described[name] = describe_file(directory / name)
            to_disk(directory / name)
    manifest = {"format": layout, "files": {name: asdict(record) for name, record in described.items()}}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in (directory / MANIFEST, *(path for path in directory.rglob("*") if path.is_dir()), directory):
        to_disk(path)


def verify(directory: Path, *, layout: int) -> None:
    """Compare every file of a sealed directory with its manifest. Raises SealError unless all agree."""
    compare_files(directory, listed_files(directory, layout=layout))


def listed_files(directory: Path, *, layout: int) -> dict[str, FileRecord]:
    """Relative path -> record of every file of a sealed directory, which are all there and have the recorded sizes.

    No content is read: that is left to `compare_files`. Raises SealError.
    """
    try:
        recorded = _read_manifest(directory / MANIFEST, layout=layout)
        present = {str(file.relative_to(directory)) for file in _files(directory)} - {MANIFEST}
        if missing := sorted(set(recorded) - present):
            raise SealError(f"{directory} lacks {', '.join(missing)}")
        if others := sorted(present - set(recorded)):
            raise SealError(f"{directory} holds files that the manifest does not know: {', '.join(others)}")
        for name, record in recorded.items():
            _check_size(directory / name, record)
    except OSError as error:
        raise _unreadable(directory, error) from error
    return recorded


def compare_files(directory: Path, records: Mapping[str, FileRecord]) -> None:
    """Compare the files `records` of a sealed directory, by digest. Raises SealError for the first that differs."""
    try:
        for name, record in records.items():
            _compare(directory / name, record)
    except OSError as error:
        raise _unreadable(directory, error) from error


def verify_file(directory: Path, name: str, *, layout: int) -> None:
    """Compare one file of a sealed directory with the manifest, without a look at the others. Raises SealError."""
    try:
        recorded = _read_manifest(directory / MANIFEST, layout=layout)
    except OSError as error:
        raise _unreadable(directory, error) from error
    if name not in recorded:
        raise SealError(f"{directory / MANIFEST} does not know {name}")
    compare_files(directory, {name: recorded[name]})


def _unreadable(directory: Path, error: OSError) -> SealError:
    """The error of a file of `directory` that is missing or cannot be read."""
    name = str(error.filename or directory)
    if isinstance(error, FileNotFoundError):
        return SealError(f"{directory} lacks {Path(name).name}")
    return SealError(f"{name} cannot be read ({error.strerror or error})")


def _compare(path: Path, record: FileRecord) -> None:
    """Raises SealError unless the file agrees with its record, and OSError."""
    _check_size(path, record)
    if describe_file(path) != record:
        raise SealError(f"{path} has changed since it was written")


def _check_size(path: Path, record: FileRecord) -> None:
    """Raises SealError unless the file has the recorded size, and OSError."""
    size = path.stat().st_size
    if size != record.bytes:
        raise SealError(f"{path} has {size} bytes, the manifest says {record.bytes}")


def begin_step(parent: Path, step: int) -> Path:
    """Make an empty directory in `parent` for `step`, under a hidden name; remove what killed processes left there."""
    for leftover in parent.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = parent / f".step_{step:06d}.unfinished"
    path.mkdir(parents=True)
    return path


def publish_step(unfinished: Path, step: int, *, layout: int) -> Path:
    """Give a directory with a manifest its final name -> its new path; it replaces what was sealed for `step` before.

    What was set aside is removed when the new directory is on the disk, up to `step`.
    """
    parent = unfinished.parent
    if (earlier := step_path(parent, step)).exists():
        set_aside(earlier, layout=layout)
    path = unfinished.rename(earlier)
    to_disk(parent)
    for aside in parent.glob(f"step_*{SET_ASIDE}"):
        number = aside.stem.removeprefix("step_")
        if number.isdecimal() and int(number) <= step:
            remove_sealed(aside)
    return path


def set_aside(path: Path, *, layout: int) -> Path:
    """Rename a sealed directory, so that it no longer counts -> its new path; replaces one that was set aside before.

    Its suffix says if this version of Parity could read it, were it whole.
    """
    suffix = SET_ASIDE
    try:
        _read_manifest(path / MANIFEST, layout=layout)
    except FormatError:
        suffix = OTHER_FORMAT
    except (SealError, OSError) as problem:
        logger.debug("%s is set aside: %s", path, problem)
    aside = path.with_name(path.name + suffix)
    if aside.exists():
        remove_sealed(aside)
    path.rename(aside)
    to_disk(path.parent)
    return aside


def step_path(parent: Path, step: int) -> Path:
    """The directory in `parent` that is sealed for `step`."""
    return parent / f"step_{step:06d}"


def sealed_steps(parent: Path) -> dict[int, Path]:
    """Step -> sealed directory in `parent`, ascending, by their names alone.

    Raises SealError if `parent` exists and cannot be read: it must not pass for an empty one.
    """
    try:
        # glob() would pass over a directory that may not be read.
        named = [path for path in parent.iterdir() if path.name.startswith("step_")] if parent.exists() else []
    except OSError as error:
        raise SealError(f"{parent} cannot be read ({error})") from error
    numbers = {path: path.name.removeprefix("step_") for path in named}
    return dict(sorted((int(number), path) for path, number in numbers.items() if number.isdecimal()))


def remove_sealed(path: Path) -> None:
    """Hide a sealed directory, then remove it: half of one must not look damaged. A failure is a warning."""
    hidden = path.with_name(f".{path.name}.removed")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("the old %s cannot be removed: %s", path.relative_to(path.parents[1]), error)


def _read_manifest(path: Path, *, layout: int) -> dict[str, FileRecord]:
    """Relative path -> record of every file of a sealed directory.

    The manifest has no digest of its own: a change of the manifest either breaks its form or contradicts a file. Raises
    SealError for a manifest of another form, and OSError.
    """
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SealError(f"{path} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise SealError(f"{path} is no manifest")
    # The format comes before the form: another format may have another form.
    if manifest["format"] != layout:
        raise FormatError(
            f"{path} has format {manifest['format']!r:.20}, this version of Parity reads format {layout}; the version "
            "that wrote it (environment.json of the run) can go on with it"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or set(manifest) != {"format", "files"}:
        raise SealError(f"{path} is no manifest")
    try:
        return {name: FileRecord(**record) for name, record in files.items()}
    except TypeError as error:
        raise SealError(f"{path} has a record of another form ({error})") from error


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
