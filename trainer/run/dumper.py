"""Writes down the steps of a run that are due; the ranks write what they trained on. Used by `trainer/run/loop.py`."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from trainer.config.train import TrainConfig
from trainer.policy.train_report import TrainReport
from trainer.rundir.dump import DumpDescription, DumpError, begin_dump, commit_dump
from trainer.rundir.provenance import config_document

logger = logging.getLogger(__name__)

Metrics = dict[str, float | None]


class StepDumper:
    """Dumps of a run. A disk that does not take one costs that dump and a warning, never the run."""

    def __init__(self, config: TrainConfig, run_dir: Path, *, say: Callable[[str], None]) -> None:
        """`say` shows a line to the user."""
        self._config = config
        self._run_dir = run_dir
        self._say = say
        self._failures = 0

    def begin(self, step: int) -> Path | None:
        """Make the directory to which the ranks write `step`; None if it is not due or the disk does not take it."""
        if not self._config.dump.is_due(step):
            return None
        try:
            return begin_dump(self._run_dir, step).resolve()
        except OSError as error:
            self._fail(step, error)
            return None

    def commit(self, path: Path | None, report: TrainReport, *, step: int, policy_version: int) -> Metrics:
        """Make the dump of `step` in the directory that `begin` made count, if it is due; what it cost, as metrics.

        `policy_version` is that of the weights that the step started with.
        """
        if not self._config.dump.is_due(step):
            return {}
        if path is not None:
            try:
                return self._committed(path, report, step=step, policy_version=policy_version)
            except (OSError, DumpError) as error:
                shutil.rmtree(path, ignore_errors=True)
                self._fail(step, error)
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
