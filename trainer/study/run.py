"""Runs the cells of a study, each as `parity train` in a separate process, and reports the progress.

A run that fails, or takes too long, costs only its own cell. SIGTERM and Ctrl-C are passed on as SIGTERM, upon which a
run finishes and saves its step; a run that does not end within a deadline is killed. Does not import torch.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from algorithms.config import Problem
from rollout.processes.child_process import python_module
from rollout.processes.inherited import variables
from trainer.compose.overrides import directory_override
from trainer.config.outputs import WANDB_RUN_GROUP
from trainer.ending.exit_codes import DONE, GO_ON, NOTHING_STARTED
from trainer.ending.termination import termination_requests
from trainer.ending.time_limit import job_variable
from trainer.limits.machine import Machine
from trainer.rundir.run_dir import logged_step
from trainer.study.grid import Cell, Study
from trainer.study.results import LOGS, CellRecord, Stage, make_way, stage_of
from trainer.text.plain import duration, to_stderr
from trainer.text.redact import redact_text

_POLL_S = 0.3
_KILL_S = 60.0
"""Seconds until a killed process must be gone, with all its memory."""
_LOG_TAIL_BYTES = 8192
_SHOWN_CHARACTERS = 400
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(kw_only=True, slots=True)
class _Running:
    cell: Cell
    process: subprocess.Popen[bytes]
    started: float
    slot: int
    timed_out: bool = False


def parallel_problems(study: Study, machine: Machine) -> list[Problem]:
    """Problems of running study.parallel runs at a time on this machine; does not look for another Ray cluster."""
    local = [cell for cell in study.cells if cell.config.cluster.address is None]
    if not local or study.config.parallel == 1:
        return []
    gpus = max(_gpus(cell) for cell in study.cells)
    most = machine.gpus // gpus if gpus else machine.cpus
    if study.config.parallel <= most:
        return []
    has, needs = (f"{machine.gpus} GPU", f"{gpus} GPU") if gpus else (f"{machine.cpus} CPU", "at least one CPU")
    rule = f"must be <= {max(1, most)}: this machine has {has}, and each run needs {needs}"
    return [Problem(key="study.parallel", rule=rule, value=study.config.parallel)]


def run_cells(
    study: Study,
    study_dir: Path,
    records: dict[str, CellRecord],
    *,
    ended: Callable[[], object],
) -> int:
    """Run every cell that is not finished, and write a line per start and end to stderr; `records` is updated.

    `ended` is called after each cell. Returns the exit code of a study that a signal, or the time that the runs had,
    ended early; DONE if every run was tried.
    """
    cells = _Cells(study, study_dir, records)
    with termination_requests() as termination:
        termination.then = "every running cell finishes its step and ends"
        try:
            while cells.running or (cells.waiting and termination.request is None):
                while cells.waiting and len(cells.running) < study.config.parallel and termination.request is None:
                    cells.start()
                time.sleep(_POLL_S)
                if termination.request is not None:
                    cells.ask_to_end()
                cells.end_overdue()
                if cells.collect():
                    ended()
        finally:
            cells.kill()
        if termination.request is not None:
            return 128 + termination.request
        return GO_ON if cells.out_of_time else DONE


def say(line: str) -> None:
    """Tell the user, on stderr."""
    to_stderr(f"{line}\n")


class _Cells:
    """The processes of a study."""

    def __init__(self, study: Study, study_dir: Path, records: dict[str, CellRecord]) -> None:
        self.waiting = deque(cell for cell in study.cells if stage_of(study_dir, cell) is not Stage.finished)
        self.running: list[_Running] = []
        self._study = study
        self._dir = study_dir
        self._records = records
        self._group = os.environ.get(WANDB_RUN_GROUP) or f"{study.recipe.stem}/{study_dir.absolute().name}"
        self._total = len(self.waiting)
        self._done = 0
        self._seconds: list[float] = []
        self._asked_at: float | None = None
        self.out_of_time = False
        """True if a run left because its time ran out."""

    def start(self) -> None:
        """Start the next cell."""
        cell = self.waiting.popleft()
        stage = stage_of(self._dir, cell)
        make_way(self._dir, cell)
        slot = min(set(range(self._study.config.parallel)) - {running.slot for running in self.running})
        log = self._dir / LOGS / f"{cell.name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(  # noqa: S603 - our own command line, no shell
                cell_command(self._study, cell, self._dir),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables() | _devices(cell, slot) | {WANDB_RUN_GROUP: self._group},
                start_new_session=True,  # Ctrl-C reaches the study, which decides what becomes of its runs
            )
        self.running.append(_Running(cell=cell, process=process, started=time.monotonic(), slot=slot))
        verb = "starts"
        if stage is Stage.stopped:
            verb = f"goes on after step {logged_step(self._dir / cell.name)}"
        elif stage is Stage.broken:
            verb = "begins again"
        say(f"[{self._total - len(self.waiting)}/{self._total}] {cell.name} {verb}")

    def collect(self) -> bool:
        """Record the processes that have ended; True if there was one."""
        ended = [running for running in self.running if running.process.poll() is not None]
        for running in ended:
            self.running.remove(running)
            self._note(running)
        return bool(ended)

    def ask_to_end(self) -> None:
        """Ask every run, once, to finish its step; after the deadline kill the remaining runs."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            for running in self.running:
                running.process.terminate()
        elif now - self._asked_at > self._study.config.stop_timeout_s:
            self.kill()

    def end_overdue(self) -> None:
        """Kill a run that has taken longer than study.cell_timeout_s."""
        limit = self._study.config.cell_timeout_s
        for running in self.running:
            if limit is not None and time.monotonic() - running.started > limit:
                running.timed_out = True
                _kill(running.process)

    def kill(self) -> None:
        """End every process now; a run that ended well is not touched."""
        for running in self.running:
            _kill(running.process)

    def _note(self, running: _Running) -> None:
        """Record and print the end of a process."""
        cell = running.cell
        seconds = time.monotonic() - running.started
        earlier = self._records.get(cell.name, CellRecord())
        finished = running.process.returncode == DONE and stage_of(self._dir, cell) is Stage.finished
        is_out_of_time = running.process.returncode == GO_ON
        error = "" if finished or is_out_of_time else self._reason(running)
        self._records[cell.name] = CellRecord(seconds=earlier.seconds + seconds, error=error)
        self._done += 1
        if finished:
            self._seconds.append(seconds)
            outcome = f"done in {duration(seconds)}"
        elif self._asked_at is not None:
            outcome = f"stopped after {duration(seconds)}"
        elif is_out_of_time:
            outcome = f"left after {duration(seconds)}: out of time"
            self.out_of_time = True
            if job_variable():  # another run would end with the job too
                self.waiting.clear()
        else:
            outcome = f"FAILED after {duration(seconds)}: {error}"
        say(f"[{self._done}/{self._total} ended] {cell.name} {outcome}{self._estimate()}")

    def _estimate(self) -> str:
        """The time until all runs have ended, as the end of a line; empty while no run has finished."""
        left = len(self.waiting) + len(self.running)
        if not left or not self._seconds or self._asked_at is not None:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        spent = sum(min(mean, time.monotonic() - running.started) for running in self.running)
        remaining = max(0.0, left * mean - spent) / self._study.config.parallel
        return f"; {left} left, about {duration(remaining)}"

    def _reason(self, running: _Running) -> str:
        """Reason why a run failed, in one line."""
        if running.timed_out:
            return f"it took longer than study.cell_timeout_s={self._study.config.cell_timeout_s:g}"
        if self._asked_at is not None:
            return ""
        code = running.process.returncode
        ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        message = last_words(self._dir / LOGS / f"{running.cell.name}.log")
        return f"{message} ({ending})" if message else ending


def cell_command(study: Study, cell: Cell, study_dir: Path) -> list[str]:
    """The command of one run: `parity train` with the directory of the cell."""
    own = [] if study.own_dir is None else ["--config-dir", str(study.own_dir)]
    place = directory_override(study_dir.absolute() / cell.name)
    return python_module("trainer", "train", str(study.recipe), *own, *cell.words, place, "run.resume=auto")


def last_words(log: Path) -> str:
    """The final error message in the output of a run; its last line without such a message."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    named = [index for index, line in enumerate(lines) if line.startswith("parity train")]
    message = lines[named[-1] if named else -1]
    if message.endswith(NOTHING_STARTED) and named[-1] + 1 < len(lines):
        message = lines[named[-1] + 1].removeprefix("- ")
    return redact_text(message).removeprefix("parity train failed: ")[:_SHOWN_CHARACTERS]


def _gpus(cell: Cell) -> int:
    """Number of whole GPUs of this machine that a run needs."""
    return math.ceil(cell.config.num_gpus)


def _devices(cell: Cell, slot: int) -> dict[str, str]:
    """Environment that gives the run of a slot its own GPUs: two Ray clusters would both take the first GPUs."""
    count = _gpus(cell)
    if not count or cell.config.cluster.address is not None:
        return {}
    visible = os.environ.get(_DEVICES)
    names = visible.split(",") if visible else [str(index) for index in range(count * (slot + 1))]
    return {_DEVICES: ",".join(names[count * slot : count * (slot + 1)])}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its process group; processes that Ray started for it end too."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(timeout=_KILL_S)
