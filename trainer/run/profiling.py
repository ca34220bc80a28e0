"""Traces of chosen steps: what the driver waits for, and what ranks and engines compute.

    <run.dir>/profile/step_<N>/   driver.json.gz, rank_<N>.json.gz, engine_<N>*.json.gz, operations.json

Each trace opens in https://ui.perfetto.dev. A step that is recorded takes longer; its row has perf/profiled.
"""

from __future__ import annotations

import gzip
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from rollout.group.engine_group import EngineGroup
from trainer.cluster.policy_group import PolicyGroup
from trainer.config.training import RunConfig
from trainer.run.step_log import Span, StepLog
from trainer.rundir.run_dir import PROFILE, make_private
from trainer.tracking.operations import DRIVER, write_operations

logger = logging.getLogger(__name__)


class Profiler:
    """Records the steps of run.profile_steps."""

    def __init__(self, config: RunConfig, policy: PolicyGroup, engines: EngineGroup) -> None:
        self._config, self._policy, self._engines = config, policy, engines
        self._directory: Path | None = None
        """Directory of the step that is recorded; None if none is."""
        self._begin_ns = 0

    def recorded(self, steps: range, log: StepLog) -> Iterator[int]:
        """The `steps`; those of run.profile_steps are recorded. Starting and writing a record is no time of a step."""
        for step in steps:
            if step in self._config.profile_steps:
                self._begin(step)
                log.begin_anew()
            yield step
            if self._directory is not None:
                self._end(log.spans)
                log.begin_anew()
            log.spans.clear()

    def metrics(self) -> dict[str, float | None]:
        """perf/profiled of a step that is recorded; empty for another."""
        return {} if self._directory is None else {"perf/profiled": 1.0}

    def _begin(self, step: int) -> None:
        self._directory = Path(self._config.dir) / PROFILE / f"step_{step:06d}"
        make_private(self._directory)
        self._policy.start_profile(self._directory)
        self._engines.start_profile(self._directory)
        self._begin_ns = time.time_ns()

    def _end(self, spans: list[Span]) -> None:
        """Write the traces, with the phases of the driver; a disk or a trace that fails is a warning."""
        directory, self._directory, end_ns = self._directory, None, time.time_ns()
        assert directory is not None
        self._policy.stop_profile()
        self._engines.stop_profile()
        try:
            write_driver(directory / DRIVER, spans)
            write_operations(directory, begin_ns=self._begin_ns, end_ns=end_ns)
        except (OSError, ValueError) as error:
            logger.warning("the profile in %s is not complete: %s", directory, error)


def write_driver(path: Path, spans: list[Span]) -> None:
    """Write the phases of the driver in the format of torch's traces."""
    now = time.time_ns()
    base = now - now % 10**9
    events = [
        {
            "ph": "X", "cat": "user_annotation", "name": span.name, "pid": "driver", "tid": "phases",
            "ts": (span.begin_ns - base) / 1e3, "dur": span.seconds * 1e6,
        }
        for span in spans
    ]  # fmt: skip
    path.write_bytes(gzip.compress(orjson.dumps({"baseTimeNanoseconds": base, "traceEvents": events})))
