"""The run directory: locked by one process at a time; an earlier run in it is refused or moved aside."""

from __future__ import annotations

import csv
import fcntl
import io
import itertools
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from algorithms.config import NOT_SET, Problem
from rollout.user_code.custom_code import code_digest
from trainer.config.outputs import CHECKPOINTS, DUMPS
from trainer.config.training import Resume
from trainer.rundir.rows import read_rows
from trainer.rundir.sealed_directory import sealed_steps, to_disk

LOCK_FILE = ".lock"
ENVIRONMENT_FILE = "environment.json"
STATUS_FILE = "status.json"
CONFIG_FILE = "config.yaml"
USER_FILES = "user_files"
"""Key of environment.json: path of each file of the user's own -> its digest."""
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
HISTOGRAMS_FILE = "histograms.jsonl"
EVENTS_FILE = "events.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
REPORT_FILE = "report.html"
LOGS = "logs"
PROFILE = "profile"
ROW_FILES = (METRICS_FILE, SAMPLES_FILE, HISTOGRAMS_FILE, EVENTS_FILE, EVALUATIONS_FILE)
LISTED_RUNS = 5
UNFINISHED = ".unfinished"
"""Ending of a file that is not whole yet."""
_EARLIER_CONFIG = re.compile(r"config\.until_step_(?P<step>\d{6,9})(\.(?P<number>\d{1,4}))?\.yaml")
"""What `keep_config` names the files."""
_BEFORE_ENVIRONMENT = frozenset({CONFIG_FILE, LOCK_FILE, STATUS_FILE})
"""Files of a run that was killed before it wrote environment.json, besides unfinished ones."""


class RunStatus(StrEnum):
    """State of a run that has ended; equal to its name as a text."""

    completed = "completed"
    """The run took all its steps."""
    failed = "failed"
    interrupted = "interrupted"
    """A signal or the time limit ended the run."""
    stopped = "stopped"
    """The guard ended the run."""


class StartError(RuntimeError):
    """The run cannot begin with what it was given: nothing was started, and nothing was written."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))


class RunDirectoryError(StartError):
    """The directory belongs to another process or run, or cannot be used; the run must not write to it."""


def take_directory(run_dir: Path, *, resume: Resume, continues: bool) -> tuple[TextIO, Path | None]:
    """Make `run_dir` and lock it for this process -> (the lock, held until it is closed; new place of an earlier run).

    The directory must be empty, unless the run `continues` from a checkpoint in it, or `resume` allows setting an
    earlier run aside. Raises RunDirectoryError if the directory cannot be used, with the reason and the way out.
    """
    lock = lock_directory(run_dir, key="run.dir")
    found = sorted(path.name for path in run_dir.iterdir() if path.name != LOCK_FILE)
    if not found or continues:
        return lock, None
    try:
        _check_aside(run_dir, found, resume)
        aside = _set_aside(run_dir)
    except BaseException:
        release_directory(lock, run_dir)
        raise
    release_directory(lock, aside)
    return lock_directory(run_dir, key="run.dir"), aside


def is_run(directory: Path) -> bool:
    """True if a run of Parity wrote `directory`, by the first files that a run writes."""
    try:
        record = json.loads((directory / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
        return "parity-rl" in record["versions"]
    except FileNotFoundError:
        names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
        whole = {name for name in names if not name.endswith(UNFINISHED)}
        return LOCK_FILE in names and whole <= _BEFORE_ENVIRONMENT
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return False


def runs_inside(directory: Path) -> str:
    """A sentence with the newest runs right below `directory`, which is no run itself; or with where runs are.

    A checkpoint or a dump is answered with its run.
    """
    run_dir = directory.absolute().parent.parent
    if directory.parent.name in (CHECKPOINTS, DUMPS) and (run_dir / CONFIG_FILE).is_file():
        return f"Its run is {run_dir}."
    found = sorted(directory.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    names = [path.parent.name for path in found[:LISTED_RUNS]]
    more = f", and {len(found) - len(names)} more" if len(found) > len(names) else ""
    return f"Runs in it, the newest first: {', '.join(names)}{more}." if names else "See outputs/<recipe>/<time>."


def first_start(directory: Path) -> str | None:
    """When the first process of the run in `directory` began, as environment.json says; None if it does not say it."""
    began = _recorded(directory, "first_started_at") or _recorded(directory, "started_at")
    return None if began is None else str(began)


def last_start_place(directory: Path) -> Path | None:
    """Working directory of the last process of the run in `directory`: relative paths of its config begin there."""
    place = _recorded(directory, "working_directory")
    return None if place is None else Path(str(place))


def changed_files(directory: Path) -> dict[str, str]:
    """Each file of the user's own that the last process of the run in `directory` ran, and that is not as it was then
    -> "has changed" or "is gone"."""
    files = _recorded(directory, USER_FILES)
    now = {path: code_digest(path) for path in files} if isinstance(files, dict) else {}
    return {path: "has changed" if digest else "is gone" for path, digest in now.items() if digest != files[path]}


def with_changed_files(problems: list[Problem], directory: Path) -> list[Problem]:
    """The `problems` of the config of the run in `directory`, behind those of `changed_files` that they name."""
    text, rule, remedy = (
        " ".join(map(str, problems)),
        "{} since the last process of {} ran it",
        "Bring it back as it was.",
    )
    changed = {path: how for path, how in changed_files(directory).items() if Path(path).name in text}
    found = [
        Problem(key=path, rule=rule.format(how, directory), value=NOT_SET, remedy=remedy)
        for path, how in changed.items()
    ]
    # What lies beside a file that is gone was not meant.
    gone = [str(Path(str(problem.value).rpartition(":")[0]).absolute()) in changed for problem in problems]
    return found + [replace(each, remedy="") if is_gone else each for each, is_gone in zip(problems, gone, strict=True)]


def _recorded(directory: Path, key: str) -> Any:
    """A value of environment.json; None if the file does not have it."""
    try:
        return json.loads((directory / ENVIRONMENT_FILE).read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def earlier_configs(directory: Path) -> list[tuple[int, Path]]:
    """(last step with it, file) of every configuration that a resumed run has left behind, the oldest first.

    Of several with the same last step the first one made the steps; the others were replaced before they made any.
    """
    by_step: dict[int, Path] = {}
    for step, _, path in _kept_configs(directory):
        by_step.setdefault(step, path)
    return list(by_step.items())


def _kept_configs(directory: Path) -> list[tuple[int, int, Path]]:
    """(last step, number, path) of every file that `keep_config` named, in the order of the steps and the numbers."""
    found = [(match, path) for path in directory.glob("config.*") if (match := _EARLIER_CONFIG.fullmatch(path.name))]
    return sorted((int(match["step"]), int(match["number"] or 1), path) for match, path in found)


def has_checkpoint(directory: Path) -> bool:
    """True if a run directory has a checkpoint, good or damaged."""
    return any((directory / CHECKPOINTS).glob("step_*"))


def newest_saved_step(directory: Path) -> int | None:
    """The step of the newest checkpoint, good or damaged, in a run directory; None without one."""
    return max(sealed_steps(directory / CHECKPOINTS), default=None)


def run_status(directory: Path) -> tuple[RunStatus | None, int]:
    """(state of the run in `directory`, its last step); None while it goes on, after a kill, and without a run."""
    try:
        record = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
        return RunStatus(record["status"]), int(record["last_step"] or 0)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None, 0


def completed_steps(directory: Path) -> int | None:
    """Number of steps of a completed run in `directory`; None if the run did not complete, or there is no run."""
    status, last_step = run_status(directory)
    return last_step if status is RunStatus.completed else None


def steps_taken(directory: Path) -> int:
    """Number of steps of a run that can be resumed: the newest saved or logged step; 0 if no step was saved."""
    saved = newest_saved_step(directory)
    if saved is None:
        return 0
    return max(saved, logged_step(directory))


def logged_step(directory: Path) -> int:
    """The newest step in metrics.jsonl of a run directory; 0 without one."""
    metrics = directory / METRICS_FILE
    steps = [row.get("step") for row in read_rows(metrics)] if metrics.is_file() else []
    return max((step for step in steps if isinstance(step, int)), default=0)


def keep_config(directory: Path, text: str, *, until_step: int) -> Path | None:
    """Rename the config.yaml of a run that continues with another `text` -> its new path, None if nothing was renamed.

    `until_step` is the last step with the earlier configuration. Where later steps are given up, because their
    checkpoint is damaged, the files that name such a step come to name this one, the earliest of them first.
    """
    for step, _, path in _kept_configs(directory):
        if step > until_step:
            path.rename(_kept_name(directory, until_step))
    path = directory / CONFIG_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") == text:
        return None
    kept = _kept_name(directory, until_step)
    path.rename(kept)
    return kept


def _kept_name(directory: Path, step: int) -> Path:
    """The first free name for a configuration whose last step is `step`."""
    name = f"config.until_step_{step:06d}"
    suffixes = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    return next(place for suffix in suffixes if not (place := directory / f"{name}{suffix}.yaml").exists())


def needs_no_step(directory: Path, *, saved: int | None, num_steps: int) -> bool:
    """True if the run is complete: it took all steps, and the weights of the last step are `saved`, or none are."""
    taken = completed_steps(directory) or 0
    return (taken if saved is None else min(saved, taken)) >= num_steps


def how_to_go_on(command: str, *, saved: int | None) -> str:
    """The sentence for a run that has taken all its steps; `command` resumes it."""
    if saved is None:
        return "it saved no checkpoint to go on from; parity train with run.resume=clean begins it again"
    return f"{command} run.num_steps=<more> goes on with it"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a process killed, or power lost, during the write leaves the old or the new file."""
    # No two writers share the name, because the cache of all runs is written without a lock. Nobody can guess it, and
    # "x" follows no link, because a page may be written to a directory of all users.
    unfinished = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{UNFINISHED}")
    # Text of a file may hold half a surrogate pair, which UTF-8 cannot encode.
    file = unfinished.open("x", encoding="utf-8", errors="replace")
    try:
        with file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        to_disk(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a table with all digits, its titles first; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_whole(path, text.getvalue())


def make_private(directory: Path) -> None:
    """Make `directory`, which only its owner can enter: prompts, responses and weights come into it.

    A directory that exists keeps its mode, which is how a user lets others read a run. Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def unusable_problem(key: str, directory: Path) -> Problem | None:
    """The Problem of a directory, the value of `key`, that this process cannot make or write to; None if it can.

    It is tried, because permissions do not tell of a read-only disk; no trace is left.
    """
    there = directory
    try:
        there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".parity-") as trial:
            (Path(trial) / directory.absolute().relative_to(there.absolute())).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        rule = f"must be a directory that can be written to ({there}: {reason})"
        return Problem(key=key, rule=rule, value=str(directory), remedy=f"Use another {key}.")
    return None


def lock_directory(directory: Path, *, key: str) -> TextIO:
    """Make `directory`, the value of `key`, and lock it for this process; the lock is held until the file is closed.

    Raises RunDirectoryError if the directory cannot be used, or another process holds it.
    """
    while True:
        try:
            make_private(directory)
            lock = (directory / LOCK_FILE).open("a+", encoding="utf-8")
        except OSError as error:
            raise RunDirectoryError(f"{key} cannot be used: {error}. Use another {key}.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise RunDirectoryError(
                f"{key} {directory} is in use by process {holder}. Leave {key} out, or use another one."
            ) from error
        if _is_named(lock, directory / LOCK_FILE):
            break
        lock.close()  # its last holder has removed it in between; the next turn opens the one that took its place
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def lock_holder(directory: Path) -> int | None:
    """Process id of the run that holds `directory` now; None without one."""
    try:
        with (directory / LOCK_FILE).open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read())
    except (OSError, ValueError):  # no lock; or a run that took it just now and has not written its id
        return None
    return None


def _is_named(lock: TextIO, path: Path) -> bool:
    """True if `path` leads to the open file `lock`."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def release_directory(lock: TextIO, run_dir: Path) -> None:
    """Let another process take `run_dir`."""
    try:
        (run_dir / LOCK_FILE).unlink(missing_ok=True)
    finally:
        lock.close()


def _check_aside(run_dir: Path, found: list[str], resume: Resume) -> None:
    """Raise RunDirectoryError unless the content of `run_dir` may be moved aside."""
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
    """Rename a run directory to a name with the present time; its files are not touched."""
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
