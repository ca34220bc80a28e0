"""Saver: checkpoints of a run, written while the step waits or in the background. Used by `trainer/run/loop.py`.

The ranks write (`trainer/policy/shards.py`); here a save is begun, and committed when every rank has answered. One save
is under way at most: the next one waits for it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.cluster.policy_group import PolicyGroup
from trainer.config.outputs import CheckpointConfig
from trainer.policy.shards import ShardReport
from trainer.rundir.checkpoint import POLICY, CheckpointError, RunState, begin_checkpoint, commit_checkpoint
from trainer.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
"""Saves in a row that may fail for want of a disk before the run ends."""


@dataclass(kw_only=True, slots=True)
class _Save:
    """A save that is under way."""

    policy: PolicyGroup
    state: RunState
    path: Path
    exposed_s: float = 0.0


class Saver:
    """Saves a run; a context manager that, at the end, waits for what is under way.

    A save that the disk does not take is removed, reported and tried again when the next one is due; the third in a
    row, or the last of the run, raises CheckpointError. Finished checkpoints stay as they are.
    """

    def __init__(self, config: CheckpointConfig, *, run_dir: Path, tracker: Tracker) -> None:
        """Rows of `tracker` are brought to the disk before a checkpoint that is newer than they are."""
        self._config = config
        self._run_dir = run_dir
        self._tracker = tracker
        self._save: _Save | None = None
        self._metrics: dict[str, float | None] = {}
        self._failures = 0
        self._unsaved: Callable[[], RunState] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._settle(wait=True, last=True)
        elif isinstance(error, Exception):
            try:  # the run has failed, and its own error must stay the one that is seen
                self._settle(wait=True, last=True)
            except Exception as lost:
                logger.warning("the save that was under way when the run failed is lost: %s", lost)

    def save(self, policy: PolicyGroup, state: RunState, *, last: bool) -> None:
        """Save `state` and what the ranks hold; the `last` save of a run is complete on return, or an error."""
        self._settle(wait=True, last=False)
        self._unsaved = None
        started = time.perf_counter()
        try:
            self._tracker.flush()
            path = begin_checkpoint(self._run_dir, state.step)
        except OSError as error:
            self._failed(str(error), state, last=last)
            return
        self._save = _Save(policy=policy, state=state, path=path)
        asynchronous = self._config.asynchronous and not last
        policy.save_checkpoint((path / POLICY).resolve(), asynchronous=asynchronous)
        self._save.exposed_s = time.perf_counter() - started
        if not asynchronous:
            self._settle(wait=True, last=last)

    def keep(self, state: Callable[[], RunState]) -> None:
        """Remember the state after a step at which no save is due, for `save_rest`."""
        self._unsaved = state

    def save_rest(self, policy: PolicyGroup) -> None:
        """Save the last step, unless it is saved; the ranks must hold what they held after the step."""
        if self._unsaved is None:
            self._settle(wait=True, last=True)
        else:
            self.save(policy, self._unsaved(), last=True)

    def commit_finished(self) -> dict[str, float | None]:
        """Commit the save that is under way if every rank has finished it; metrics of what was saved since last time.

        Raises CheckpointError if too many saves have failed.
        """
        self._settle(wait=False, last=False)
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _settle(self, *, wait: bool, last: bool) -> None:
        """Commit the save that is under way, if there is one; unless `wait`, only if it is written."""
        save, started = self._save, time.perf_counter()
        reports = None if save is None else save.policy.saved_checkpoint(wait=wait)
        if save is None or reports is None:
            return
        self._save = None
        try:
            self._commit(save, reports)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(save.path, ignore_errors=True)
            self._failed(str(error), save.state, last=last)
            return
        self._failures = 0
        exposed_s = save.exposed_s + time.perf_counter() - started
        mib = sum(record.bytes for report in reports for record in report.files.values()) / 2**20
        write_s = max(report.write_s for report in reports)
        self._metrics = {
            "perf/checkpoint_exposed_s": exposed_s,
            "perf/checkpoint_write_s": write_s,
            "perf/checkpoint_mib": mib,
        }
        self._tracker.console.line(
            f"saved step {save.state.step}: {mib:,.1f} MiB written in {write_s:.1f} s, the run waited {exposed_s:.1f} s"
        )

    def _commit(self, save: _Save, reports: list[ShardReport]) -> None:
        errors = [report.error for report in reports if report.error is not None]
        if errors:
            # Every rank reports the error of the one that had it.
            raise CheckpointError(errors[0])
        records = {f"{POLICY}/{name}": record for report in reports for name, record in report.files.items()}
        keep, best_metric = self._config.keep, self._config.best_metric
        commit_checkpoint(save.path, save.state, keep=keep, best_metric=best_metric, records=records)

    def _failed(self, reason: str, state: RunState, *, last: bool) -> None:
        self._failures += 1
        self._metrics = {"perf/checkpoint_failures": float(self._failures)}
        problem = f"the checkpoint of step {state.step} was not written: {reason}"
        if last or self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise CheckpointError(
                f"{problem}. {_free(self._run_dir)} Free space, lower checkpoint.keep or choose another run.dir; "
                "earlier checkpoints are whole, go on from them with run.resume=auto."
            )
        logger.warning("%s. The run goes on; %d more may fail.", problem, MAX_CONSECUTIVE_FAILURES - self._failures - 1)
        self._tracker.console.line(f"{problem}; the next one is tried when it is due")


def _free(path: Path) -> str:
    try:
        return f"{path} has {shutil.disk_usage(path).free / 2**30:.2f} GiB free."
    except OSError as error:
        return f"The free space of {path} is unknown ({error})."
