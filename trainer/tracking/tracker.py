"""One row of metrics per step -> metrics.jsonl, W&B, samples.jsonl and the console, in this order.

metrics.jsonl is the source of truth: an error while writing it stops the run. Everything after it is a convenience:
an error there is one warning and a count. The directory of a run:

    config.yaml        the resolved config, as a recipe (trainer/rundir/provenance.py)
    environment.json   versions, revision, machine, command line
    metrics.jsonl      one JSON object per step, and one for step 0: the evaluation before training
    accounting.json    what the fractions of the hardware's limits stand on
    samples.jsonl      some samples per step, a few of them with the Delta of each token
    histograms.jsonl   where in probability and position the engines differ, one object per step
    evaluations.jsonl  every response to the held-out prompts, one object per prompt and evaluation
    events.jsonl       what happened beside the numbers (trainer/rundir/events.py)
    wandb_run.json     and wandb/: the W&B side (wandb_run.py, wandb_sink.py)
    tensorboard/       the same numbers for TensorBoard, if tracking.tensorboard (tensorboard_sink.py)
    logs/              of the engines; printed.log: what your functions print (trainer/rundir/printed.py)
    status.json        how the run ended, and after which step; both are null until then, and stay null if the run is
                       killed: the last row of metrics.jsonl says how far it came
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, TextIO

from algorithms.histograms import HistogramArrays
from trainer.config.train import TrainConfig
from trainer.config.training import Resume
from trainer.ending.termination import RunTerminated, StoppedByGuard
from trainer.rundir.checkpoint import RunState, set_later_aside
from trainer.rundir.events import Event, Severity, events_of_row
from trainer.rundir.provenance import config_document, config_record, environment_record, group_choices, user_files
from trainer.rundir.rows import DAMAGED_SUFFIX, forget_after
from trainer.rundir.run_dir import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    EVALUATIONS_FILE,
    EVENTS_FILE,
    HISTOGRAMS_FILE,
    METRICS_FILE,
    ROW_FILES,
    SAMPLES_FILE,
    STATUS_FILE,
    USER_FILES,
    RunStatus,
    first_start,
    keep_config,
    release_directory,
    take_directory,
    write_whole,
)
from trainer.text.plain import counted
from trainer.tracking.console import Console
from trainer.tracking.samples import SampleRow
from trainer.tracking.sink_thread import SinkThread
from trainer.tracking.tensorboard_sink import TensorBoardSink
from trainer.tracking.wandb_panels import Panels
from trainer.tracking.wandb_run import default_name, keep_run_id, saved_run_id
from trainer.tracking.wandb_sink import WandbSink

logger = logging.getLogger(__name__)
P = ParamSpec("P")

_STATUS_BYTES = 512
"""Size of status.json from the start on: at the end a full disk has no room for another byte."""


class Tracker:
    """Everything that a run writes down; a context manager that owns the run directory and the console.

    Entering refuses a directory that another run holds, and one that is not empty unless run.resume allows it
    (RuntimeError). A run that goes on takes its directory back and leaves the files as they are until `take_up` says
    from where. Leaving records how the run ended: completed, interrupted (by a signal), stopped (by the guard) or
    failed.
    """

    def __init__(
        self, config: TrainConfig, *, run_dir: Path, resumed: RunState | None = None, console: Console | None = None
    ) -> None:
        """`resumed` is the state from which the run should go on: its last, unless its checkpoint is damaged."""
        self.console = console if console is not None else Console(config.run.num_steps)
        self.errors = 0
        """Failed writes to anything but metrics.jsonl."""
        self.samples_per_step = config.tracking.samples_per_step
        """Samples of a step that belong to samples.jsonl."""
        self._config = config
        self._run_dir = run_dir
        self._resumed = resumed
        self._lock: TextIO | None = None
        self._files: dict[str, TextIO] = {}
        """The open files of ROW_FILES."""
        self._wandb: WandbSink | None = None
        self._sinks: list[SinkThread] = []
        """TensorBoard, and those of the user."""
        self._last_step = None if resumed is None else resumed.step
        self._warned: set[str] = set()
        self._has_begun = False
        """False before `take_up`: a start that ends then leaves the files of the run as they were, its status too."""

    def __enter__(self) -> Tracker:
        resume = self._config.run.resume
        # Without resume=auto the checkpoint is that of run.resume_from, and this directory is new.
        continues = self._resumed is not None and resume is Resume.auto
        self._lock, aside = take_directory(self._run_dir, resume=resume, continues=continues)
        try:
            self._open(aside)
        except BaseException as error:
            self.close(_status_after(error))
            raise
        return self

    def _open(self, aside: Path | None) -> None:
        """Begin the console, and the files of a new run; `aside` is the new place of an earlier run."""
        self.console.__enter__()
        self.console.line(f"run directory: {self._run_dir}")
        if self._resumed is None:
            moved = f"begins at step 0; the earlier run in this directory was moved to {aside}"
            self._begin([] if aside is None else [moved])

    def take_up(self, resumed: RunState) -> None:
        """Bring the files of the run to where they were after the step of `resumed`, and go on writing them.

        Rows of later steps are forgotten, later checkpoints are set aside, and the run keeps its W&B run.
        """
        self._last_step = resumed.step
        notes = [
            f"a checkpoint that cannot be used was renamed to {path.name}"
            for path in set_later_aside(self._run_dir, resumed.step)
        ]
        if first_start(self._run_dir) is not None and not (self._run_dir / METRICS_FILE).exists():
            notes.append(f"{METRICS_FILE} is missing: it begins anew after step {resumed.step}")
        for name in ROW_FILES:
            damaged = forget_after(self._run_dir / name, resumed.step)
            if damaged:
                notes.append(f"{counted(damaged, 'damaged line')} of {name} moved to {name}{DAMAGED_SUFFIX}")
        if resumed.wandb_run_id is not None:
            keep_run_id(self._run_dir, resumed.wandb_run_id)
        kept = keep_config(self._run_dir, config_document(self._config), until_step=resumed.step)
        if kept is not None:
            notes.append(f"the configuration changes; the earlier {CONFIG_FILE} is kept as {kept.name}")
        self._begin(notes)

    def _begin(self, notes: Sequence[str]) -> None:
        """Write what the run is, open its files of rows and the trackers, and say `notes`."""
        self._has_begun = True
        self._write_status(None)
        environment = environment_record(sys.argv)
        if (first := first_start(self._run_dir)) is not None:
            environment = {"first_started_at": first} | environment
        environment[USER_FILES] = user_files(self._config)
        write_whole(self._run_dir / CONFIG_FILE, config_document(self._config))
        write_whole(self._run_dir / ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")
        for name in ROW_FILES:
            # A response may hold a lone surrogate, which UTF-8 cannot encode.
            self._files[name] = (self._run_dir / name).open("a", encoding="utf-8", errors="replace")
        for note in notes:
            self.console.line(note)
        record = config_record(self._config) | {"choices": group_choices(self._config), "environment": environment}
        self._wandb = WandbSink(
            self._config.tracking,
            run_dir=self._run_dir.resolve(),
            name=default_name(self._config.run.recipe, self._run_dir),
            record=record,
            report=self.console.line,
        )
        self._best_effort("W&B", self._wandb.start)
        own = [TensorBoardSink()] if self._config.tracking.tensorboard else []
        for sink in (*own, *self._config.tracking.sinks):
            self._sinks.append(SinkThread(sink, self._run_dir.resolve(), record, last_step=self._last_step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(_status_after(error))

    @property
    def wandb_run_id(self) -> str | None:
        """The id under which W&B keeps the run; None without W&B."""
        return saved_run_id(self._run_dir)

    def log(self, step: int, metrics: Mapping[str, float | None], samples: Sequence[SampleRow] = ()) -> None:
        """Write down one step.

        Args:
            step: larger than the step before.
            metrics: null means absent; a value that is not finite becomes null and is named in `nonfinite`.
            samples: the rows of samples.jsonl.

        Raises OSError if metrics.jsonl cannot be written, ValueError or TypeError for a row that makes no sense.
        """
        if not self._files:
            use = "use it inside `with Tracker(...)`, and after take_up() if the run goes on"
            raise RuntimeError(f"Tracker.log needs an open tracker: {use}")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step must grow: step {step} came after step {self._last_step}")
        numbers = self._log_row(step, metrics)
        self._last_step = step
        self._best_effort(SAMPLES_FILE, lambda: self._log_samples(step, samples))
        self._best_effort("console", lambda: self.console.step(step, metrics))
        self.log_events(list(events_of_row(step, numbers)), shown=False)

    def log_evaluation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write down an evaluation after `step` (0: before training) that is not part of the row of a step.

        Nothing is written without metrics: then a request to end gave the evaluation up. Raises what `log` raises.
        """
        if metrics:
            self._log_row(step, metrics)
            self._best_effort("console", lambda: self.console.evaluation(step, metrics))

    def log_responses(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Keep what an evaluation after `step` got as answers, a JSON object per prompt; a failure is a warning."""

        def write() -> None:
            for row in rows:
                self._append(EVALUATIONS_FILE, {"step": step, **row})

        self._best_effort(EVALUATIONS_FILE, write)

    def log_assumptions(self, lines: Sequence[str]) -> None:
        """Keep what the fractions of the hardware's limits stand on, for the report."""
        text = json.dumps({"assumptions": list(lines)}, indent=2) + "\n"
        self._best_effort("accounting.json", lambda: write_whole(self._run_dir / "accounting.json", text))

    def log_histograms(self, step: int, histograms: HistogramArrays) -> None:
        """Write down where the engines differ at `step`; a failure is a warning.

        joint holds [bin of pi_old, bin of mu, tokens] of the bins that hold something.
        """
        axes = {"by_probability": asdict(histograms.by_probability), "by_position": asdict(histograms.by_position)}
        # The last edge of an axis may be infinite, which JSON has no word for.
        for axis in axes.values():
            axis["edges"] = [None if _is_nonfinite(edge) else edge for edge in axis["edges"]]
        joint = [
            [train, rollout, count]
            for train, counts in enumerate(histograms.joint)
            for rollout, count in enumerate(counts)
            if count
        ]
        row = {"step": step, **axes, "joint_edges": histograms.joint_edges, "joint": joint}
        self._best_effort(HISTOGRAMS_FILE, lambda: self._append(HISTOGRAMS_FILE, row))
        self._send(Panels.log_histograms, step, histograms)

    def log_events(self, events: Sequence[Event], *, shown: bool = True) -> None:
        """Write down events, show them on the console unless it has them already, and send them to W&B as alerts.

        What is merely information is no alert. A failure is a warning.
        """
        for event in events:
            self._best_effort(EVENTS_FILE, functools.partial(self._append, EVENTS_FILE, event.record()))
            if event.severity is not Severity.info:
                self._send(Panels.alert, event)
            for sink in self._sinks:
                sink.put("log_event", event.step, event.kind, event.text)
            if shown:
                style = {Severity.info: "", Severity.warn: "yellow", Severity.error: "bold red"}[event.severity]
                self.console.line(event.text, style=style)

    def flush(self) -> None:
        """Bring every row so far to the disk: a checkpoint must not be newer than the rows before it.

        Raises OSError if metrics.jsonl cannot be written; the failure of another file is a warning.
        """
        for name, file in self._files.items():
            if name == METRICS_FILE:
                os.fsync(file.fileno())
            else:
                self._best_effort(name, functools.partial(os.fsync, file.fileno()))

    def close(self, status: RunStatus) -> None:
        """End W&B, the files and the console, and record `status`. Safe to call twice; bounded in time."""
        if self._lock is None:
            return
        wandb = self._wandb
        try:
            if wandb is not None:
                self._best_effort("W&B", lambda: wandb.finish(exit_code=0 if status == RunStatus.completed else 1))
                self.errors += wandb.errors
        finally:  # also when a second signal ends the wait for W&B
            for sink in self._sinks:
                self.errors += sink.close(status.value)
            if self._has_begun:
                self._best_effort(STATUS_FILE, lambda: self._write_status(status))
            self._best_effort("console", lambda: self.console.close(failed=status != RunStatus.completed))
            self._release()

    def record_interrupted(self) -> None:
        """Write status.json for a run that is ended before it can close; does nothing if it has closed."""
        if self._lock is not None and self._has_begun:
            self._write_status(RunStatus.interrupted)

    def _log_row(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Write a row to metrics.jsonl and send it on; returns its finite numbers."""
        row = _metric_row(step, metrics)
        self._append(METRICS_FILE, row)
        numbers = {key: value for key in metrics if (value := row[key]) is not None}
        self._send(Panels.log, step, numbers)
        for sink in self._sinks:
            sink.put("log", step, numbers)
        return numbers

    def _log_samples(self, step: int, samples: Sequence[SampleRow]) -> None:
        written = []
        for sample in samples:
            row = {"step": step, **asdict(sample), "finish_reason": sample.finish_reason.name}
            finite = {key: None if _is_nonfinite(value) else value for key, value in row.items()}
            some = {key: value for key in ("segments", "tokens") if (value := finite.pop(key)) is not None}
            self._append(SAMPLES_FILE, finite | some)
            # W&B has the columns of the first row, and one type for each.
            written.append({**finite, "reward_parts": json.dumps(finite["reward_parts"])})
        if written and self._config.tracking.wandb_samples:
            self._send(Panels.log_samples, step, written)

    def _append(self, name: str, row: Mapping[str, object]) -> None:
        """Write a row to a file of rows, at once."""
        if name not in self._files:
            raise RuntimeError(f"{name} needs an open tracker: use it inside `with Tracker(...)`")
        self._files[name].write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._files[name].flush()

    def _send(self, action: Callable[Concatenate[Panels, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a call of Panels for W&B."""
        if self._wandb is not None:
            self._wandb.put(action, *args, **kwargs)

    def _write_status(self, status: RunStatus | None) -> None:
        """Write status.json; None for a run that goes on."""
        record = {
            "status": None if status is None else status.value,
            "last_step": None if status is None else self._last_step,
            "num_steps": self._config.run.num_steps,
            "ended_at": None if status is None else datetime.now(UTC).isoformat(timespec="seconds"),
            "tracker_errors": self.errors,
        }
        path, text = self._run_dir / STATUS_FILE, json.dumps(record, indent=2).ljust(_STATUS_BYTES - 1) + "\n"
        try:
            write_whole(path, text)
        except OSError:
            if status is None:
                raise
            with path.open("r+", encoding="utf-8") as file:  # a full disk still takes the bytes that the file has
                file.write(text)

    def _best_effort(self, what: str, action: Callable[[], object]) -> None:
        """Run `action`; its failure is a warning, once per `what`, and a count, never the end of the run."""
        try:
            action()
        except Exception as error:
            self.errors += 1
            if what not in self._warned:
                self._warned.add(what)
                logger.warning("%s failed and the run goes on: %s: %s", what, type(error).__name__, error)

    def _release(self) -> None:
        files, self._files = self._files, {}
        for name, file in files.items():
            self._best_effort(name, file.close)
        if self._lock is not None:
            lock, self._lock = self._lock, None
            self._best_effort("lock", lambda: release_directory(lock, self._run_dir))


def _status_after(error: BaseException | None) -> RunStatus:
    """The status of a run that `error` ended; None for no error."""
    match error:
        case None:
            return RunStatus.completed
        case StoppedByGuard():
            return RunStatus.stopped
        case KeyboardInterrupt() | SystemExit() | RunTerminated():
            return RunStatus.interrupted
        case _:
            return RunStatus.failed


def _metric_row(step: int, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    row: dict[str, float | None] = {"step": step}
    nonfinite = []
    for key, value in metrics.items():
        if key in ("step", "nonfinite"):
            raise ValueError(f"the metric name {key!r} is taken")
        row[key] = _number(key, value)
        if _is_nonfinite(row[key]):
            row[key] = None
            nonfinite.append(key)
    return {**row, "nonfinite": nonfinite} if nonfinite else row  # type: ignore[dict-item]


def _number(key: str, value: float | None) -> float | None:
    """A plain int or float; numpy and torch scalars are converted."""
    if value is None or type(value) in (int, float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the metric {key!r} must be a number or None, got {value!r}") from error


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
