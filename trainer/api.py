"""The Python API: a recipe and overrides in, a handle on the run out. docs/python.md is its guide.

A run is the command `parity train` in a process and a session of its own, started like from a terminal. So it keeps
every promise of the command line, and this process starts no Ray and loads no torch. What a handle shows, it reads from
the files of the run directory. The run goes on if this process ends; `open_run` finds it again.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from algorithms.config import ConfigError, Problem
from algorithms.config.home import from_home
from rollout.processes.child_process import in_child, python_module
from trainer.cli.arguments import RecipeArguments, parse_recipe
from trainer.cli.parsers import BEST
from trainer.cli.resume import recorded_recipe, resolve_start, resume_words
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.compose.overrides import directory_override, override_words
from trainer.config.outputs import CHECKPOINTS
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import DONE, GO_ON, INTERRUPTED, STOPPED_BY_GUARD
from trainer.rundir.rows import POLL_S, follow_rows, read_rows
from trainer.rundir.run_dir import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    RunStatus,
    is_run,
    lock_holder,
    make_private,
    run_status,
    runs_inside,
)
from trainer.rundir.sealed_directory import sealed_steps

Overrides = str | Sequence[str] | Mapping[str, object]
"""Words of the command line (["correction=mis", "optim.lr=1e-5"], or one text with spaces), or key -> value."""

_ENDS = {
    DONE: RunStatus.completed,
    STOPPED_BY_GUARD: RunStatus.stopped,
    GO_ON: RunStatus.interrupted,
    INTERRUPTED: RunStatus.interrupted,
    128 + signal.SIGTERM: RunStatus.interrupted,
    -signal.SIGTERM: RunStatus.interrupted,  # before the process hears signals
}
"""Exit code of `parity train` -> how the run ended; every other code is a failure."""

_LAST_LINES = 20


class RunError(RuntimeError):
    """A command of Parity failed; the text is what it wrote about it."""


class RunHandle:
    """A run, going on or ended: what it has written so far. `train`, `resume` and `open_run` return one.

    Iterating yields the rows of metrics.jsonl, each when it is written: step 0 has the evaluation before training only,
    then comes a row per step. It ends with the run, and raises RunError after the last row if the run failed.
    """

    def __init__(self, run_dir: Path, command: Sequence[str] = ()) -> None:
        """The run in `run_dir`; `command` starts it, else it is there already."""
        self.dir = run_dir
        """Absolute path of the run directory."""
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, and ends with the handle
        self._process: subprocess.Popen[bytes] | None = None
        self._earlier = self._begun_at()
        if command:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line, no shell
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the interrupt of a cell of a notebook does not reach the run
            )

    def __repr__(self) -> str:
        state = "goes on" if self.is_running else getattr(self.status, "value", "ended without a status")
        return f"<run {self.dir}: {state}>"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A run that goes on with an earlier one first takes back the rows behind its checkpoint.
        while self._process is not None and self._begun_at() == self._earlier and self.is_running:
            time.sleep(POLL_S)
        yield from follow_rows(self.dir / METRICS_FILE, goes_on=lambda: self.is_running)
        self.wait()

    @property
    def is_running(self) -> bool:
        """True until the process of the run has ended, wherever it was started on this machine."""
        return lock_holder(self.dir) is not None if self._process is None else self._process.poll() is None

    @property
    def status(self) -> RunStatus | None:
        """How the run ended; None while it goes on, and if it was killed."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            return _ENDS.get(code, RunStatus.failed)
        return None if self.is_running else run_status(self.dir)[0]

    @property
    def output(self) -> str:
        """What the command has printed so far; empty if the run was not started by this handle."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")  # the process shares the position

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> directory of each checkpoint, oldest first."""
        return sealed_steps(self.dir / CHECKPOINTS)

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far: the evaluation before training (step 0), then one per step."""
        return self._rows(METRICS_FILE)

    def samples(self) -> list[dict[str, Any]]:
        """The rows of samples.jsonl so far: some sampled responses of each step."""
        return self._rows(SAMPLES_FILE)

    def report(self) -> Path:
        """Write report.html of what there is so far; its path. Raises FileNotFoundError before the first step."""
        from trainer.report.page import write_report

        return write_report(self.dir)

    def export(self, directory: str | Path, *, best: bool = False) -> Path:
        """`parity export`: write a checkpoint as a Hugging Face model to a new `directory`; its path.

        The newest checkpoint, or with `best` the one with the highest checkpoint.best_metric. Without a deadline: it
        reads and writes as long as the disk takes. Raises RunError.
        """
        directory = from_home(str(directory), key="directory")
        words = [str(self.dir), directory, *([BEST] if best else [])]
        done = subprocess.run(  # noqa: S603 - our own command line, no shell
            python_module("trainer", "export", *words), stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode != DONE:
            raise RunError(done.stderr.strip())
        return Path(directory)

    def stop(self) -> None:
        """Ask the run to end, as SIGTERM does, and return: it finishes and saves its step, if checkpoint.every is set.

        `wait` waits for the end. A second call, at least half a second later, ends the run within 10 s.
        """
        if self._process is not None:
            self._process.terminate()
        elif (holder := lock_holder(self.dir)) is not None:
            os.kill(holder, signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end of the run; how it ended: completed, interrupted, or stopped by the guard.

        Without `timeout_s` there is no deadline: a run takes as long as its steps, each with deadlines of its own.

        Raises:
            RunError: the run failed, with the text that the command printed, or it was killed.
            TimeoutError: the run still goes on after `timeout_s` seconds; it is left alone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_running:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the run in {self.dir} goes on after {timeout_s:g} s. Wait again, or stop it.")
            time.sleep(POLL_S)
        status = self.status
        if self._process is not None:
            with suppress(OSError):  # it is not empty, or another run has it
                self.dir.rmdir()  # made for a run that began nothing
        if status is None or status is RunStatus.failed:
            raise RunError(self._reason())
        return status

    def _reason(self) -> str:
        """Why the run failed: what its command printed about it."""
        if self._process is None:
            return f"the run in {self.dir} failed or was killed; error.log in it, if there is one, has the traceback"
        lines = self.output.splitlines()
        named = [index for index, line in enumerate(lines) if line.startswith("parity train")]
        if named:
            return "\n".join(lines[named[-1] :])
        return "\n".join([f"parity train ended with exit status {self._process.returncode}", *lines[-_LAST_LINES:]])

    def _begun_at(self) -> int | None:
        """Mark of the last start in the directory: a run writes environment.json anew when its files of rows stand."""
        path = self.dir / ENVIRONMENT_FILE
        return path.stat().st_ino if path.is_file() else None

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.dir / name
        return read_rows(path) if path.is_file() else []


def load_config(recipe: str | Path, overrides: Overrides = ()) -> TrainConfig:
    """The config that `train(recipe, overrides)` would run; raises ConfigError with all problems of its keys.

    Whether model, data, reward and machine can be used is looked at by `train`, before it starts anything.
    """
    path, arguments, problems, _ = _read(recipe, overrides)
    resolution = resolve(path, arguments.overrides, own_dir=arguments.own_dir, multirun=arguments.multirun)
    config = resolution.runs[0].config
    if config is None or problems or resolution.problems:
        raise ConfigError([*problems, *resolution.problems])
    return config


def train(recipe: str | Path, overrides: Overrides = ()) -> RunHandle:
    """Start `parity train <recipe> <overrides>`; returns while it runs.

    Args:
        recipe: name of a recipe, path of a recipe file, or directory of a run, whose config.yaml is the recipe.
        overrides: words of the command line, or key -> value; `--config-dir` may be among the words.

    Raises:
        ConfigError: the command would be refused; `problems` has every problem, the text a line for each. What the
            command finds wrong after its start, in the data for example, is the RunError of the handle.
    """
    path, arguments, problems, command = _read(recipe, overrides)
    return _start(path, arguments, problems, command)


def resume(run_dir: str | Path, overrides: Overrides = ()) -> RunHandle:
    """Start `parity resume <run_dir> <overrides>`: go on with a run. Arguments and errors are those of `train`."""
    words, directory = _words(overrides), Path(from_home(str(run_dir), key="run_dir")).absolute()
    arguments, problems = _parsed([str(directory), *words], command="resume")
    with recorded_recipe(directory, arguments.overrides) as path:
        if isinstance(path, Problem):
            raise ConfigError([path, *problems])
        own, refused = resume_words(directory, arguments.overrides)
        arguments = replace(arguments, overrides=tuple(own))
        command = ["resume", str(directory), *words]
        return _start(path, arguments, [*refused, *problems], command, shown_as=directory / CONFIG_FILE)


def open_run(run_dir: str | Path) -> RunHandle:
    """The handle of a run that is there already, going on or ended; raises FileNotFoundError where there is none."""
    directory = Path(from_home(str(run_dir), key="run_dir")).absolute()
    if not is_run(directory):
        rule = "run_dir must be the directory of a run of Parity"
        raise FileNotFoundError(f"{rule}, got {str(run_dir)!r}. {runs_inside(directory)}")
    return RunHandle(directory)


def _start(
    recipe: Path, arguments: RecipeArguments, problems: list[Problem], words: list[str], *, shown_as: Path | None = None
) -> RunHandle:
    """Check the command `words` as the command line does, then start it in its directory."""
    if in_child():  # the script has a reward or a rollout function, and a process imports it for that function
        raise RunError(
            "a run cannot be started while a function is loaded from its file: put the lines that start it under "
            "`if __name__ == '__main__':`, or the function into a file of its own"
        )
    resolution, found = resolve_start(recipe, arguments, shown_as=shown_as)
    if problems or found:
        raise ConfigError([*problems, *found])
    directory = resolution.run_dir(0)
    if resolution.runs[0].named_after_time:
        # Two runs may start in the same second: the directory, which only its owner can enter, gets a name of its own.
        make_private(directory.parent)
        directory = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
    if words[0] == "train":
        words = [*words, directory_override(directory)]
    return RunHandle(directory, python_module("trainer", *words))


def _read(recipe: str | Path, overrides: Overrides) -> tuple[Path, RecipeArguments, list[Problem], list[str]]:
    """(file of the recipe, its arguments, problems of the flags, words of the command); raises ConfigError."""
    if not isinstance(recipe, str | Path):
        rule = "must be the name of a recipe, the path of one, or the directory of a run"
        raise ConfigError([Problem(key="recipe", rule=rule, value=recipe)])
    recipe = from_home(str(recipe), key="recipe")
    recorded = Path(recipe) / CONFIG_FILE
    words = [str(recorded) if recorded.is_file() else recipe, *_words(overrides)]
    arguments, problems = _parsed(words)
    path = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(path, Problem):
        raise ConfigError([path, *problems])
    return path, arguments, problems, ["train", *words]


def _words(overrides: Overrides) -> list[str]:
    if isinstance(overrides, Mapping):
        return override_words(overrides)
    words = shlex.split(overrides) if isinstance(overrides, str) else overrides
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        rule, remedy = "must be words, or a mapping of keys to values", 'For example {"optim.lr": 1e-5}.'
        raise ConfigError([Problem(key="overrides", rule=rule, value=overrides, remedy=remedy)])
    return list(words)


def _parsed(words: Sequence[str], *, command: str = "train") -> tuple[RecipeArguments, list[Problem]]:
    """The arguments of one run, and the problems of flags: unknown ones, and those that start no run or several."""
    arguments, problems = parse_recipe(words, command=command)
    if arguments.dry_run or arguments.elsewhere or arguments.multirun or arguments.shows_config:
        rule, remedy = "must be those of one run", "load_config shows a config; call train once for each run."
        problems.append(Problem(key="flags", rule=rule, value=" ".join(words), remedy=remedy))
    return arguments, problems
