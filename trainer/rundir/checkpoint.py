"""Checkpoints of a run: written atomically, verified before use; damaged checkpoints are reported and skipped.

    <run.dir>/checkpoints/step_000020/
        policy/         weights, optimizer and counters, sharded (torch.distributed.checkpoint), and the generators of
                        random numbers of every rank; loads on any number of ranks
        state.json      the rest: a RunState
        manifest.json   format, and size and digest of every other file

A checkpoint is written to a directory whose name begins with a dot and renamed when every file is on the disk, so that
a run which is killed while it saves leaves the checkpoint before. `trainer/run/saving.py` and
`trainer/rundir/resume.py` use this file; the ranks write and read their part in `trainer/policy/shards.py`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rollout.collect.pending import CollectorState
from rollout.data.dataset import StreamState
from trainer.config.recording import CHECKPOINTS

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the layout above."""
MANIFEST = "manifest.json"
STATE = "state.json"
POLICY = "policy"
SET_ASIDE = ".aside"
"""Suffix of a checkpoint that was skipped and whose step is trained again."""
_CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A run cannot be saved, or cannot be resumed from its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and digest of a file in the manifest."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """State of a run after a step, as JSON values; the ranks save their state beside it.

    A new part of the system that must survive a restart adds a field here, and a line in `run_state` and `restore` of
    `trainer/run/loop.py`.
    """

    step: int
    """Number of completed rollout steps."""
    policy_version: int
    """Number of completed optimizer steps."""
    stream: StreamState
    """Position in the prompt stream."""
    collector: CollectorState | None = None
    """Prompts and tokens of steps that were not trained yet; None in checkpoints of earlier versions."""
    wandb_run_id: str | None = None
    """Id of the W&B run, which a resumed run continues; None without W&B."""
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    """Held-out metrics of these weights; empty if the weights were not evaluated."""
    guard: Mapping[str, Any] | None = None
    """State of the guard; None without a guard, and in checkpoints of earlier versions."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The config of the run by dotted key, secrets redacted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    state: RunState

    @property
    def policy_path(self) -> Path:
        return self.path / POLICY


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rule for the finished checkpoints that are kept."""

    keep: int
    """Number of newest checkpoints to keep."""
    best_metric: str | None = None
    """Metric in `RunState.evaluation` whose highest value keeps one more checkpoint; None keeps no other."""


def begin_checkpoint(run_dir: Path, step: int) -> Path:
    """Make an empty directory for the checkpoint of `step`. Ranks write to its `policy/`, then `commit_checkpoint`."""
    directory = run_dir / CHECKPOINTS
    for leftover in directory.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = directory / f".step_{step:06d}.unfinished"
    (path / POLICY).mkdir(parents=True)
    return path


def commit_checkpoint(
    unfinished: Path, state: RunState, *, retention: Retention, records: Mapping[str, FileRecord] | None = None
) -> Checkpoint:
    """Complete the checkpoint in `unfinished`, give it its final name and remove checkpoints that are not kept.

    Later checkpoints were unusable when the run was resumed. They must not count among the kept checkpoints, and stay
    set aside until a checkpoint of their step is on the disk.

    Args:
        records: files that their writer already described and synced to the disk, by path relative to `unfinished`; all
            other files are read once more.

    Raises:
        OSError: the disk rejects the data.
        CheckpointError: a file of `records` is missing.
    """
    known = dict(records or {})
    (unfinished / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    names = [str(path.relative_to(unfinished)) for path in _files(unfinished)]
    if absent := sorted(known.keys() - set(names)):
        raise CheckpointError(f"{unfinished} lacks {', '.join(absent)}, which a rank has written. Is it a shared disk?")
    for name in names:
        if name not in known:
            known[name] = describe_file(unfinished / name)
            to_disk(unfinished / name)
    manifest = {"format": FORMAT, "files": {name: asdict(record) for name, record in known.items()}}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in (unfinished / MANIFEST, unfinished / POLICY, unfinished):
        to_disk(path)
    path = unfinished.parent / f"step_{state.step:06d}"
    for passed_over in [other for other in _by_age(path.parent) if _step_of(other) >= state.step]:
        _set_aside(passed_over)
    unfinished.rename(path)
    to_disk(path.parent)
    for old in path.parent.glob(f"step_*{SET_ASIDE}"):
        if _step_of(old.with_suffix("")) <= state.step:
            _remove(old)
    for old in _superfluous(path.parent, retention):
        _remove(old)
    return Checkpoint(path=path, state=state)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest usable checkpoint, whose files match its manifest; None if the run has no checkpoint.

    Raises:
        CheckpointError: there are checkpoints and none is usable.
    """
    problems = []
    for path in _by_age(run_dir / CHECKPOINTS):
        found = _usable(path)
        if isinstance(found, Checkpoint):
            return found
        problems.append(found)
    if problems:
        raise CheckpointError(
            f"every checkpoint in {run_dir / CHECKPOINTS} is damaged: {'; '.join(problems)}. "
            "Restore one, or start again in another run.dir."
        )
    return None


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint in the directory `path`. Raises CheckpointError if it is damaged or not a checkpoint."""
    try:
        return _verified(path)
    except _Unusable as problem:
        raise CheckpointError(f"the checkpoint cannot be used: {problem}. Take another one of the run.") from problem


def best_checkpoint(run_dir: Path, metric: str) -> Checkpoint | None:
    """The checkpoint whose weights have the highest `metric`, the later of equal ones; None if none has the metric.

    Raises CheckpointError if this checkpoint is damaged.
    """
    path = _best(_by_age(run_dir / CHECKPOINTS), metric)
    if path is None:
        return None
    try:
        return _verified(path)
    except _Unusable as problem:
        text = f"the best checkpoint {path.name} is damaged: {problem}. Take the newest instead."
        raise CheckpointError(text) from problem


def describe_file(path: Path) -> FileRecord:
    """Size and digest of a file, read now."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return FileRecord(bytes=path.stat().st_size, xxh3_128=digest.hexdigest())


def to_disk(path: Path) -> None:
    """Sync a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Unusable(Exception):
    """A checkpoint is unusable; the message gives the reason with the name of the file."""


def _usable(path: Path) -> Checkpoint | str:
    """The checkpoint in `path`, or the reason why it is skipped."""
    try:
        return _verified(path)
    except _Unusable as problem:
        logger.warning("checkpoint %s is damaged and passed over: %s", path.name, problem)
        return str(problem)


def _verified(path: Path) -> Checkpoint:
    """The checkpoint in `path`; raises _Unusable unless every file matches the manifest."""
    try:
        recorded = _read_manifest(path / MANIFEST)
        present = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
        if missing := sorted(set(recorded) - present):
            raise _Unusable(f"{path} lacks {', '.join(missing)}")
        if others := sorted(present - set(recorded)):
            raise _Unusable(f"{path} holds files that the manifest does not know: {', '.join(others)}")
        for name, record in recorded.items():
            size = (path / name).stat().st_size
            if size != record.bytes:
                raise _Unusable(f"{path / name} has {size} bytes, the manifest says {record.bytes}")
            if describe_file(path / name) != record:
                raise _Unusable(f"{path / name} has changed since it was written")
        return Checkpoint(path=path, state=_read_state(path))
    except OSError as error:
        raise _Unusable(f"{error.filename or path} cannot be read ({error})") from error


def _read_manifest(path: Path) -> dict[str, FileRecord]:
    """Relative path -> record of every file of a checkpoint.

    The manifest has no digest of its own: a change of the manifest either breaks its form or contradicts a file. Raises
    _Unusable for a manifest of another form, and OSError.
    """
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"{path} cannot be read ({error})") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or not isinstance(files, dict) or set(manifest) != {"format", "files"}:
        raise _Unusable(f"{path} is no manifest")
    if manifest["format"] != FORMAT:
        raise _Unusable(
            f"{path} has format {manifest['format']}, this version of Parity reads format {FORMAT}; the version that "
            "wrote it (environment.json) can go on with it"
        )
    try:
        records = {name: FileRecord(**record) for name, record in files.items()}
    except TypeError as error:
        raise _Unusable(f"{path} has a record of another form ({error})") from error
    if STATE not in records:
        raise _Unusable(f"{path} has no record of {STATE}")
    return records


def _read_state(path: Path) -> RunState:
    """The RunState in `path`; raises _Unusable for a file of another form, and OSError."""
    try:
        return RunState(**json.loads((path / STATE).read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise _Unusable(f"{path / STATE} cannot be read ({error})") from error


def _superfluous(directory: Path, retention: Retention) -> list[Path]:
    """Finished checkpoints that are not kept."""
    found = _by_age(directory)
    best = None if retention.best_metric is None else _best(found, retention.best_metric)
    return [path for path in found[retention.keep :] if path != best]


def _best(found: list[Path], metric: str) -> Path | None:
    """The newest checkpoint in `found` (newest first) with the highest `metric`; an unreadable one has no value."""
    best: tuple[float, Path] | None = None
    for path in found:
        try:
            value = _read_state(path).evaluation.get(metric)
        except (OSError, _Unusable) as error:
            logger.warning("checkpoint %s has no readable %s: %s", path.name, STATE, error)
            continue
        if value is not None and (best is None or value > best[0]):
            best = (value, path)
    return None if best is None else best[1]


def _remove(path: Path) -> None:
    """Hide a checkpoint, then remove it: half a directory must not look like a damaged checkpoint."""
    hidden = path.with_name(f".{path.name}.removed")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("the old checkpoint %s cannot be removed: %s", path, error)


def _set_aside(path: Path) -> None:
    """Rename a checkpoint, so that it no longer counts; replaces one that was set aside before."""
    aside = path.with_name(path.name + SET_ASIDE)
    if aside.exists():
        _remove(aside)
    path.rename(aside)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _by_age(directory: Path) -> list[Path]:
    """Finished checkpoints, sorted from newest to oldest."""
    return sorted((path for path in directory.glob("step_*") if _step_of(path) >= 0), key=_step_of, reverse=True)


def _step_of(path: Path) -> int:
    """Step in the name of a checkpoint; -1 for another name."""
    number = path.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1
