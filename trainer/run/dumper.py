"""Writes down the steps of a run that are due; the ranks write what they trained on. Used by `trainer/run/loop.py`."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer.config.train import TrainConfig
from trainer.policy.train_report import TrainReport
from trainer.rundir.dump import DumpDescription, DumpError, begin_dump, commit_dump
from trainer.rundir.provenance import config_document

logger = logging.getLogger(__name__)

Metrics = dict[str, float | None]


class _Begun(NamedTuple):
    """The step that is due."""

    step: int
    policy_version: int
    path: Path | None
    """None if the disk did not take it."""


class StepDumper:
    """Dumps of a run. A disk that does not take one costs that dump and a warning, never the run."""

    def __init__(self, config: TrainConfig, run_dir: Path, *, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user."""
        self._config = config
        self._run_dir = run_dir
        self._say = say
        self._failures = 0
        self._begun: _Begun | None = None

    def begin(self, step: int, policy_version: int) -> Path | None:
        """Make the directory to which the ranks write `step`; None if it is not due or the disk does not take it.

        `policy_version` is that of the weights that the step starts with.
        """
        self._begun = None
        if not self._config.dump.is_due(step):
            return None
        path = None
        try:
            path = begin_dump(self._run_dir, step).resolve()
        except OSError as error:
            self._fail(step, error)
        self._begun = _Begun(step, policy_version, path)
        return path

    def commit(self, report: TrainReport) -> Metrics:
        """Make the dump of the step that `begin` was called for count, if it is due; what it cost, as metrics."""
        begun = self._begun
        if begun is None:
            return {}
        if begun.path is not None:
            try:
                return self._committed(begun.path, report, step=begun.step, policy_version=begun.policy_version)
            except (OSError, DumpError) as error:
                shutil.rmtree(begun.path, ignore_errors=True)
                self._fail(begun.step, error)
        return {"perf/dump_failures": float(self._failures)}

    def _fail(self, step: int, error: Exception) -> None:
        self._failures += 1
        problem = f"the dump of step {step} was not written: {error}"
        logger.warning("%s. The run goes on without it; free space, or lower dump.keep.", problem)
        self._say(problem)

    def _committed(self, path: Path, report: TrainReport, *, step: int, policy_version: int) -> Metrics:
        started, config = time.perf_counter(), self._config
        if errors := [each.error for each in report.dumps if each.error is not None]:
            raise DumpError(errors[0])
        files = tuple(each.rank_file for each in report.dumps if each.rank_file is not None)
        records = {each.rank_file.file: each.record for each in report.dumps if each.rank_file and each.record}
        description = DumpDescription(
            step=step,
            policy_version=policy_version,
            correction=config.correction.mode,
            ranks=files,
            metrics={key: value for key, value in report.metrics.items() if value is None or math.isfinite(value)},
        )
        text = config_document(config)
        commit_dump(path, description, records=records, config_text=text, keep=config.dump.keep)
        return {
            "perf/dump_mib": sum(record.bytes for record in records.values()) / 2**20,
            "perf/dump_write_s": report.dump_s + time.perf_counter() - started,
        }
