"""Shows a run to the user while the run goes on: start-up phases, one line per step, and a progress bar on a terminal.

Metrics of one step -> one line. Used by tracker.py (steps) and trainer/run/loop.py (phases). On a terminal a
progress bar stays below the lines; elsewhere (a file, a pipe, TERM=dumb) there are plain lines and no control
characters. Log records of level WARNING and above are written above the bar in the same way.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType, TracebackType
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rollout.rewards.custom import is_returned
from trainer.text.plain import printable

logger = logging.getLogger(__name__)

MISSING = "-"
OWN_NUMBERS = 3
"""Most numbers of a user's functions on the line of a step."""
_EMPTY: Mapping[str, Any] = MappingProxyType({"count": "", "values": ""})
"""The fields of a bar that has nothing to say yet; rich forgets those that a reset leaves out."""
_BASE_MODEL = "building the base model (kept for the next runs)"
_SPEED_PERIOD_S = 24 * 3600.0
"""Seconds of past steps from which the time left is estimated."""
_PLAIN_PROGRESS_S = 10.0
"""At most one progress line per this many seconds where there is no bar."""


def step_line(step: int, num_steps: int, metrics: Mapping[str, float | None]) -> str:
    """One step in one line; a value that is absent or null is shown as "-".

    Before the seconds stand the turns of an episode, and the first `OWN_NUMBERS` of what the user's functions return.
    """

    def show(key: str, form: str) -> str:
        return _shown(metrics, key, form)

    parts = [
        f"step {step}/{num_steps}",
        f"reward {show('reward/mean', '.2f')}",
        f"K3 {show('mismatch/k3', '.1e')} (floor {show('mismatch/k3_floor', '.1e')})",
        f"kept {show('rollout/num_samples', '.0f')}/{show('rollout/samples_decided', '.0f')} samples",
        f"entropy {show('policy/entropy', '.2f')}",
        f"grad {show('optim/grad_norm', '.2f')}",
        *([f"turns {show('episode/turns_mean', '.2f')}"] if "episode/turns_mean" in metrics else []),
        *(f"{key.partition('/')[2]} {show(key, '.3g')}" for key in islice(filter(is_returned, metrics), OWN_NUMBERS)),
        f"{show('time/step_s', '.1f')} s",
    ]
    return " | ".join(parts)


def evaluation_lines(when: str, metrics: Mapping[str, float | None]) -> list[str]:
    """A line for the held-out prompts, with the seconds of the whole evaluation, and one for each set of eval.sets.

    `when`: "after step 3".
    """
    seconds = metrics.get("time/eval_s")
    first = f"held-out {when} | {_accuracies(metrics, 'eval')}" + (f" | {seconds:.1f} s of the step" if seconds else "")
    others = [key.split("/")[1] for key in metrics if re.fullmatch(r"eval/[^/]+/accuracy", key)]
    return [first, *(f"{name} {when} | {_accuracies(metrics, f'eval/{name}')}" for name in others)]


def _accuracies(metrics: Mapping[str, float | None], prefix: str) -> str:
    shown = [_shown(metrics, f"{prefix}/{name}", ".3f") for name in ("accuracy", "accuracy_sampled", "reward_mean")]
    return "accuracy {} greedy, {} sampled | reward {}".format(*shown)


def _shown(metrics: Mapping[str, float | None], key: str, form: str) -> str:
    value = metrics.get(key)
    return MISSING if value is None else format(value, form)


class Console:
    """The live console of one run; a context manager. Safe to call from any thread.

    Args:
        num_steps: rollout steps of the run, for the bar and the step lines.
        stream: where to write; stderr when not given. A bar is drawn only if it is a terminal.
    """

    def __init__(self, num_steps: int, *, stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._rich = RichConsole(
            file=self._stream, force_terminal=self._live, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._bar: Progress | None = None
        self._logs: _LogLines | None = None
        self._lock = threading.RLock()
        self._phase: str | None = None
        self._phase_started = 0.0
        self._phase_reported = 0.0
        self._broken = False

    def __enter__(self) -> Console:
        if self._live:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[values]}", style="dim"),
                console=self._rich,
                transient=True,
                refresh_per_second=4,
                speed_estimate_period=_SPEED_PERIOD_S,
            )
            self._bar.add_task("starting", total=None, **_EMPTY)
            self._bar.start()
        self._logs = _LogLines(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def close(self, *, failed: bool = False) -> None:
        """Finish the open phase, take the bar away and give logging back. Safe to call twice."""
        with self._writing():
            self._end_phase(outcome="stopped" if failed else "done")
        if self._logs is not None:
            self._logs.remove()
            self._logs = None
        with self._writing():
            bar, self._bar = self._bar, None
            if bar is not None:
                bar.stop()

    def line(self, text: str, *, style: str = "") -> None:
        """Write one permanent line, above the bar if there is one. Control characters are taken out."""
        clean = printable(text)
        with self._writing():
            if self._broken:
                return
            if self._live:
                self._rich.print(Text(clean, style=style))
            else:
                self._stream.write(clean + "\n")
                self._stream.flush()

    def phase(self, text: str) -> None:
        """Say what the run does from now on ("starting engines"); ends the phase before and writes its seconds."""
        with self._writing():
            self._end_phase(outcome="done")
            self._phase = printable(text)
            self._phase_started = self._phase_reported = time.monotonic()
            if self._bar is not None:
                self._bar.reset(self._bar.task_ids[0], description=self._phase, total=None, **_EMPTY)
            else:
                self.line(f"{self._phase} ...")

    def progress(self, done: int, total: int, *, detail: str = "") -> None:
        """Progress within the open phase, for example optimizer steps of the base model."""
        with self._writing():
            if self._bar is not None:
                self._bar.update(
                    self._bar.task_ids[0], completed=done, total=total, count=f"{done}/{total}", values=detail
                )
            elif time.monotonic() - self._phase_reported >= _PLAIN_PROGRESS_S:
                self._phase_reported = time.monotonic()
                self.line(f"{self._phase} ... {done}/{total}{'  ' if detail else ''}{detail}")

    def base_model_progress(self, done: int, total: int, detail: str) -> None:
        """Progress of making the model that a run starts from: supervised steps, or stages of a conversion."""
        with self._writing():
            if self._phase != _BASE_MODEL:
                self.phase(_BASE_MODEL)
            self.progress(done, total, detail=detail)

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write the line of a finished step, and one of its evaluation if it has one; move the bar."""
        with self._writing():
            self.training()
            if self._bar is not None:
                task = self._bar.task_ids[0]
                reward, k3 = _shown(metrics, "reward/mean", ".2f"), _shown(metrics, "mismatch/k3", ".1e")
                count, values = f"step {step}/{self._num_steps}", f"reward {reward}  K3 {k3}"
                self._bar.update(task, completed=step, count=count, values=values)
            self.line(step_line(step, self._num_steps, metrics))
            if metrics.get("eval/accuracy") is not None:
                self._evaluated(f"after step {step}", metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write the line of the evaluation between `step` and the next one."""
        with self._writing():
            self.training()
            self._evaluated(f"before step {step + 1}", metrics)

    def _evaluated(self, when: str, metrics: Mapping[str, float | None]) -> None:
        for text in evaluation_lines(when, metrics):
            self.line(text)

    def training(self) -> None:
        """End the phase that is open, and let the bar count steps."""
        with self._writing():
            self._end_phase(outcome="done")
            if self._bar is not None and self._bar.tasks[0].description != "training":
                self._bar.reset(self._bar.task_ids[0], description="training", total=self._num_steps, **_EMPTY)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One writer at a time; output that has gone away (a closed pipe) ends the output, not the run."""
        with self._lock:
            try:
                yield
            except (OSError, ValueError) as error:  # ValueError: the file is closed
                if not self._broken:
                    self._broken = True
                    logger.warning("the console cannot be written any more and stays silent: %s", error)

    def _end_phase(self, *, outcome: str) -> None:
        if self._phase is not None:
            text, seconds = self._phase, time.monotonic() - self._phase_started
            self._phase = None
            self.line(f"{text}: {outcome} in {seconds:.1f} s", style="dim")


class _LogLines(logging.Handler):
    """Records of level WARNING and above -> lines above the bar, while the console is open.

    Handlers of the root logger that write to stdout or stderr are set aside for that time: on a terminal they would
    tear the bar, elsewhere every warning would appear twice. Handlers that write to files stay.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(level=logging.WARNING)
        self._console = console
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        self._set_aside = [handler for handler in root.handlers if _writes_to_terminal_streams(handler)]
        for handler in self._set_aside:
            root.removeHandler(handler)
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = "bold red" if record.levelno >= logging.ERROR else "yellow"
            self._console.line(self.format(record), style=style)
        except Exception:  # a handler must not raise into the code that logs
            self.handleError(record)

    def remove(self) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        for handler in self._set_aside:
            root.addHandler(handler)


def _writes_to_terminal_streams(handler: logging.Handler) -> bool:
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and any(handler.stream is stream for stream in standard)
