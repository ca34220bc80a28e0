"""Writes a step down once it is trained: its dump, its row with the seconds of each phase, samples, events.

`trainer/run/loop.py` uses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rollout.collect.collector import Collected
from rollout.group.engine_group import EngineGroup
from trainer.batch.planner import SequenceCost
from trainer.batch.train_batch import TrainBatch
from trainer.policy.train_report import TrainReport
from trainer.run.accounting import StepAccounting
from trainer.run.dumper import StepDumper
from trainer.run.guard import Guard
from trainer.run.notices import Notices
from trainer.run.saving import Saver
from trainer.tracking.samples import TokenLog, sample_rows
from trainer.tracking.tracker import Tracker

Metrics = dict[str, float | None]


class StepLog:
    """The record of the steps of a run."""

    def __init__(
        self,
        accounting: StepAccounting,
        notices: Notices,
        *,
        tracker: Tracker,
        guard: Guard,
        dumper: StepDumper,
        saver: Saver,
        engines: EngineGroup,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """The seconds of the first step begin. `guard` judges every row, `dumper` writes the batch of a step that is
        due, `saver` says what it has saved."""
        self._tracker, self._guard, self._dumper, self._saver = tracker, guard, dumper, saver
        self._engines, self._tokenizer = engines, tokenizer
        self._accounting, self._notices = accounting, notices
        tracker.log_assumptions(accounting.assumptions())
        for line in accounting.slow_types():
            tracker.console.line(line)
        self._timer = StepTimer()

    @property
    def spans(self) -> list[Span]:
        """The phases since the end of the last step."""
        return self._timer.spans

    def begin_anew(self) -> float:
        """Let the seconds of the next step begin now -> those since the last step, which belong to no step."""
        passed_s = self._timer.lap()["time/step_s"] or 0.0
        self._timer = StepTimer()
        return passed_s

    @property
    def sequence_cost(self) -> SequenceCost:
        """FLOPs of a sequence in the model, for the planner."""
        return self._accounting.sequence_cost

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See `StepTimer.phase`."""
        return self._timer.phase(name)

    def write(
        self, step: int, collected: Collected, batch: TrainBatch, report: TrainReport, more: Metrics, *, reward_s: float
    ) -> float:
        """Write `step` down, with `more` metrics -> its seconds.

        `reward_s` are seconds of the rollout in which nothing but rewards was waited for.
        """
        timer = self._timer
        timer.reassign(reward_s, source="rollout", target="reward")
        timer.reassign(report.dump_s, source="train", target="dump")
        with timer.phase("dump"):
            dumped = self._dumper.commit(report)
        with timer.phase("checkpoint"):
            saved = self._saver.commit_finished()
        metrics = collected.stats.metrics() | batch.stats.metrics() | report.metrics | more | saved | dumped
        metrics |= timer.lap()
        with timer.phase("log"):
            metrics |= self._accounting.metrics(metrics, collected=collected, batch=batch, report=report)
            metrics |= self._accounting.memory(report, self._engines)
            judged, events = self._guard.observe(step, metrics)
            tokens = TokenLog(deltas=report.token_deltas, tokenizer=self._tokenizer)
            rows = sample_rows(
                collected.groups,
                count=self._tracker.samples_per_step,
                k3=report.sample_k3,
                advantages=report.sample_advantages,
                tokens=tokens,
            )
            self._tracker.log(step, metrics | judged, rows)
            self._tracker.log_histograms(step, report.histograms)
            self._tracker.log_events([*events, *self._notices.observe(step, metrics)])
        return metrics["time/step_s"] or 0.0


class Span(NamedTuple):
    """A phase of a step."""

    name: str
    begin_ns: int
    """Time of day in nanoseconds."""
    seconds: float


class StepTimer:
    """Attributes the wall-clock seconds of a step to named phases.

    Laps follow each other without a gap: what happens between two laps belongs to the later one, so writing
    the metrics of step k is accounted for in step k + 1.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}
        self.spans: list[Span] = []
        """Each block of the step."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the seconds inside the block to `name`; blocks of one name add up. Not to be nested."""
        began_ns, started = time.time_ns(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._phases[name] = self._phases.get(name, 0.0) + seconds
            self.spans.append(Span(name, began_ns, seconds))

    def reassign(self, seconds: float, *, source: str, target: str) -> None:
        """Count `seconds` that were measured inside the phase `source` as those of `target`."""
        self._phases[source] -= seconds
        self._phases[target] = self._phases.get(target, 0.0) + seconds

    def lap(self) -> Metrics:
        """Metrics of the step that ends now; the next one starts at the same instant."""
        now = time.perf_counter()
        step_s = now - self._started
        unattributed_s = step_s - sum(self._phases.values())
        metrics: Metrics = {f"time/{name}_s": seconds for name, seconds in self._phases.items()}
        metrics["time/unattributed_s"] = unattributed_s
        metrics["time/step_s"] = step_s
        metrics["perf/unattributed_frac"] = unattributed_s / step_s
        self._started, self._phases = now, {}
        return metrics
