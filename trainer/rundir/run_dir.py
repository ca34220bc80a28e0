"""The run directory: taken by one process at a time; an earlier run in it is refused or moved aside."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TextIO

from trainer.config.components import Resume
from trainer.config.recording import CHECKPOINTS
from trainer.rundir.rows import read_rows

LOCK_FILE = ".lock"
ENVIRONMENT_FILE = "environment.json"
STATUS_FILE = "status.json"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
ROW_FILES = (METRICS_FILE, "samples.jsonl", "histograms.jsonl", "events.jsonl")
_MADE_BY_OTHERS = frozenset({".hydra", LOCK_FILE})
"""What a new run may find in its directory: Hydra's record of the command line, and our own lock."""
_BEFORE_ENVIRONMENT = frozenset({CONFIG_FILE, ".config.unfinished", ".environment.unfinished", *_MADE_BY_OTHERS})
"""What a run has written when it is killed before its environment.json."""


class Status(Enum):
    """How a run ended."""

    completed = "completed"
    """It took all its steps."""
    failed = "failed"
    interrupted = "interrupted"
    """By a signal."""
    stopped = "stopped"
    """By the guard."""


class RunDirectoryError(RuntimeError):
    """The directory belongs to somebody else or cannot be used: nothing may be written to it."""


def take_directory(run_dir: Path, *, resume: Resume, continues: bool) -> tuple[TextIO, Path | None]:
    """Make `run_dir` and lock it for this process.

    It must be empty, unless the run `continues` from a checkpoint in it, or `resume` allows to set an earlier run
    aside.

    Returns:
        The lock, which ends with this file, and where the earlier run was moved to; None if there was none.

    Raises:
        RunDirectoryError: the directory cannot be used; says why and what to do.
    """
    lock = _lock(run_dir)
    found = sorted(path.name for path in run_dir.iterdir() if path.name not in _MADE_BY_OTHERS)
    if not found or continues:
        return lock, None
    try:
        _check_aside(run_dir, found, resume)
        aside = _set_aside(run_dir)
    except BaseException:
        _unlock(lock, run_dir)
        raise
    _unlock(lock, aside)
    return _lock(run_dir), aside


def is_run(directory: Path) -> bool:
    """Whether a run of Parity wrote `directory`, by the marks that it leaves first."""
    try:
        record = json.loads((directory / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
        return "parity-rl" in record["versions"]
    except FileNotFoundError:
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        return LOCK_FILE in names and names <= _BEFORE_ENVIRONMENT
    except (OSError, ValueError, TypeError, KeyError):
        return False


def has_checkpoint(directory: Path) -> bool:
    """Whether a checkpoint, good or damaged, is in a run directory."""
    return any((directory / CHECKPOINTS).glob("step_*"))


def newest_saved_step(directory: Path) -> int | None:
    """The step of the newest checkpoint, good or damaged, in a run directory; None without one."""
    return max(numbered_steps(directory / CHECKPOINTS), default=None)


def numbered_steps(directory: Path) -> list[int]:
    """Steps of the finished checkpoints or dumps in `directory`, in order, by their names alone."""
    names = (path.name.removeprefix("step_") for path in directory.glob("step_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def completed_steps(directory: Path) -> int | None:
    """How many steps the run in `directory` took, if it has ended as it should; None if not, or if there is none."""
    try:
        status = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
        return int(status["last_step"]) if status["status"] == Status.completed.value else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def steps_taken(directory: Path) -> int:
    """How many steps a run took that can go on: the newest that it saved or logged; 0 if it saved none."""
    saved = newest_saved_step(directory)
    if saved is None:
        return 0
    metrics = directory / METRICS_FILE
    steps = [row.get("step") for row in read_rows(metrics)] if metrics.is_file() else []
    return max([saved, *(step for step in steps if isinstance(step, int))])


def keep_config(directory: Path, text: str, *, until_step: int) -> Path | None:
    """Rename the config.yaml of a run that goes on with another `text`; its new name, None if there is nothing to keep.

    Args:
        until_step: the last step that was taken with the earlier configuration.
    """
    path = directory / CONFIG_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") == text:
        return None
    name = f"config.until_step_{until_step:06d}"
    suffixes = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    kept = next(place for suffix in suffixes if not (place := directory / f"{name}{suffix}.yaml").exists())
    path.rename(kept)
    return kept


def needs_no_step(directory: Path, *, saved: int, num_steps: int) -> bool:
    """Whether nothing is left to do for the run: it took all steps, and the weights of the last one are `saved`."""
    return min(saved, completed_steps(directory) or 0) >= num_steps


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a process that is killed meanwhile leaves the old one or the new one."""
    unfinished = path.with_name(f".{path.stem}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def release_directory(lock: TextIO, run_dir: Path) -> None:
    """Let another process take `run_dir`."""
    _unlock(lock, run_dir)


def _lock(run_dir: Path) -> TextIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"run.dir cannot be used: {error}. Use another run.dir.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise RunDirectoryError(
            f"run.dir {run_dir} is in use by process {holder}. Leave run.dir out, or use another one."
        ) from error
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def _unlock(lock: TextIO, run_dir: Path) -> None:
    try:
        (run_dir / LOCK_FILE).unlink(missing_ok=True)
    finally:
        lock.close()


def _check_aside(run_dir: Path, found: list[str], resume: Resume) -> None:
    """Raise RunDirectoryError unless what is in `run_dir` may be moved out of the way."""
    if resume is Resume.never:
        go_on = (
            "Go on with it: run.resume=auto. " if has_checkpoint(run_dir) else ""
        ) + "Begin again and keep it beside: run.resume=clean. "
        raise RunDirectoryError(
            f"run.dir must be absent or empty, {run_dir} holds {', '.join(found[:5])}"
            f"{' and more' if len(found) > 5 else ''}. {go_on if is_run(run_dir) else ''}"
            "Or leave run.dir out, or use another one."
        )
    if not is_run(run_dir):
        raise RunDirectoryError(
            f"run.resume={resume.name} finds files in run.dir {run_dir} that no run of Parity wrote "
            f"({', '.join(found[:5])}), and leaves them alone. Use another run.dir."
        )
    if run_dir.is_symlink() or Path.cwd().is_relative_to(run_dir.resolve()):
        raise RunDirectoryError(
            f"run.dir {run_dir} holds a run and cannot be moved aside, because it is a link or the working directory. "
            "Move it yourself, or use another run.dir."
        )


def _set_aside(run_dir: Path) -> Path:
    """Rename a run directory to one with the present time in its name; nothing in it is touched."""
    moment = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    candidates = [run_dir.with_name(f"{run_dir.name}.before-{moment}{suffix}") for suffix in ("", ".2", ".3")]
    aside = next((path for path in candidates if not path.exists()), candidates[-1])
    try:
        run_dir.rename(aside)
    except OSError as error:
        raise RunDirectoryError(
            f"run.dir {run_dir} cannot be moved to {aside}: {error}. Use another run.dir."
        ) from error
    return aside
