"""Checkpoints of a run: written whole or not at all, verified before they are used, damaged ones named and passed over.

    <run.dir>/checkpoints/step_000020/
        policy/         weights and optimizer, sharded (torch.distributed.checkpoint); loads on any number of ranks
        state.json      step, policy version, place in the prompt stream
        manifest.json   size and digest of every other file

A checkpoint is written to a directory whose name begins with a dot and renamed when every file is on the disk, so
that a run which is killed while it saves leaves the checkpoint before. Used by `trainer/loop.py`; the ranks write
and read their part in `trainer/worker.py`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from rollout.data import StreamState
from trainer.components import CHECKPOINTS

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
POLICY = "policy"
_CHUNK_BYTES = 2**22


class CheckpointError(RuntimeError):
    """A run cannot go on from what is in its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run stands after a step; the weights and the optimizer are beside it."""

    step: int
    """Completed rollout steps."""
    policy_version: int
    """Completed optimizer steps."""
    stream: StreamState
    """Place in the prompt stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    state: RunState

    @property
    def policy_path(self) -> Path:
        return self.path / POLICY


def begin_checkpoint(run_dir: Path, step: int) -> Path:
    """An empty directory for the checkpoint of `step`; the ranks write to its `policy/`, then `commit_checkpoint`."""
    path = run_dir / CHECKPOINTS / f".step_{step:06d}.unfinished"
    shutil.rmtree(path, ignore_errors=True)
    (path / POLICY).mkdir(parents=True)
    return path


def commit_checkpoint(unfinished: Path, state: RunState, *, keep: int) -> Checkpoint:
    """Complete the checkpoint in `unfinished`, give it its name and remove all but the newest `keep`.

    Later ones are damaged: the run was resumed from an earlier one. They must not stand for a good one among `keep`.
    """
    (unfinished / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    files = {str(path.relative_to(unfinished)): _describe(path) for path in _files(unfinished)}
    (unfinished / MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    for path in [*_files(unfinished), unfinished / POLICY, unfinished]:
        _to_disk(path)
    path = unfinished.parent / f"step_{state.step:06d}"
    for damaged in [other for other in _by_age(path.parent) if other.name >= path.name]:
        shutil.rmtree(damaged)
    unfinished.rename(path)
    _to_disk(path.parent)
    for old in _by_age(path.parent)[keep:]:
        shutil.rmtree(old)
    return Checkpoint(path=path, state=state)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are what its manifest says; None if the run has none.

    Raises:
        CheckpointError: there are checkpoints and all of them are damaged.
    """
    found = _by_age(run_dir / CHECKPOINTS)
    problems = []
    for path in found:
        problem = _damage(path)
        if problem is None:
            values = json.loads((path / STATE).read_text(encoding="utf-8"))
            return Checkpoint(path=path, state=RunState(**values))
        problems.append(problem)
        logger.warning("checkpoint %s is damaged and passed over: %s", path.name, problem)
    if found:
        raise CheckpointError(
            f"every checkpoint in {run_dir / CHECKPOINTS} is damaged: {'; '.join(problems)}. "
            "Restore one, or start again in another run.dir."
        )
    return None


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, with the name of the file; None if nothing is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{path / MANIFEST} cannot be read ({error})"
    present = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
    if present != set(manifest):
        return f"{path} lacks {', '.join(sorted(set(manifest) - present)) or 'nothing'} of its files or has others"
    for name, recorded in manifest.items():
        if _describe(path / name) != recorded:
            return f"{path / name} has changed since it was written"
    return None


def _describe(path: Path) -> dict[str, object]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _by_age(directory: Path) -> list[Path]:
    """Finished checkpoints, newest first."""
    return sorted(directory.glob("step_*"), key=lambda path: path.name, reverse=True)


def _to_disk(path: Path) -> None:
    """Ask the operating system to write a file or directory to the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
