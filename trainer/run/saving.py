"""Saver: checkpoints of a run, written while the step waits or in the background; Ending: when, and what ends the run.

`trainer/run/loop.py` uses both. The ranks write (`trainer/policy/checkpoint_shards.py`); here a save is begun, and
committed when every rank has answered. One save is under way at most: the next one waits for it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainer.cluster.policy_group import PolicyGroup
from trainer.config.outputs import CheckpointConfig
from trainer.config.train import TrainConfig
from trainer.ending.termination import RunTerminated, StoppedByGuard, Termination
from trainer.ending.time_limit import TimeLimit
from trainer.policy.checkpoint_shards import ShardReport
from trainer.run.guard import Guard
from trainer.rundir.checkpoint import POLICY, CheckpointError, RunState, begin_checkpoint, commit_checkpoint
from trainer.rundir.run_dir import newest_saved_step
from trainer.text.plain import command_line
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
    """Saves a run; `save_rest` must end it, which waits for what is under way.

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

    def keep(self, state: Callable[[], RunState] | None) -> None:
        """Remember the state after a step, for `save_rest`; None while the ranks train, and hold no whole step."""
        self._unsaved = state if self._config.every else None

    def save_rest(self, policy: PolicyGroup) -> None:
        """Save the last step, unless it is saved; every call of the ranks has the deadline policy.step_timeout_s.

        Raises CheckpointError if a rank has failed, and what the save raises.
        """
        self._settle(wait=True, last=self._unsaved is None)
        if not policy.is_whole:
            raise CheckpointError("a rank has failed, so the ranks hold no whole step. Earlier checkpoints are whole.")
        if self._unsaved is not None:
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
                f"{problem}. {_free(self._run_dir)} Free space, lower checkpoint.keep or choose another run.dir."
            )
        self._unsaved = self._unsaved or (lambda: state)  # the ranks still hold it, or a later one is kept
        logger.warning("%s. The run goes on; %d more may fail.", problem, MAX_CONSECUTIVE_FAILURES - self._failures - 1)
        self._tracker.console.line(f"{problem}; the next one is tried when it is due")


@dataclass(kw_only=True, slots=True)
class Ending:
    """The one place that decides how the steps of a run end, and that the last one is saved first.

    A failure before a step is trained saves the step before, one after it the step; a failure of a rank saves nothing.
    """

    config: TrainConfig
    policy: PolicyGroup
    saver: Saver
    guard: Guard
    termination: Termination
    limit: TimeLimit
    _state: Callable[[], RunState] | None = field(default=None, init=False)
    """State of the step that was trained last."""
    _failure: Exception | None = field(default=None, init=False)
    """What ends the run once its step has a row."""

    def rollout(self, step: int) -> AbstractContextManager[None]:
        """Have a request leave the block, the rollout of `step`, with KeyboardInterrupt; after it, end the step."""
        kept = "saved" if self.config.checkpoint.every else "not saved (checkpoint.every=0)"
        self.termination.then = f"step {step} is finished and {kept}{self.limit.pace}"
        before = f", step {step - 1} is {kept}" if step > 1 else ""
        return self.termination.interruptible(f"the rollout of step {step} is given up{before}")

    @contextmanager
    def training(self) -> Iterator[None]:
        """The block in which the ranks train, and hold no whole step."""
        self.saver.keep(None)
        yield

    def trained(self, state: Callable[[], RunState]) -> None:
        """Remember the `state` after the step that is trained: whatever ends the run from here on saves it first."""
        self._state = state
        self.saver.keep(state)

    @contextmanager
    def after_row(self) -> Iterator[None]:
        """Let a failure of the block, or a request in it, wait until its step is written down: `conclude` raises it."""
        try:
            yield
        except KeyboardInterrupt:
            if self.termination.at_once:
                raise
        except Exception as error:
            self._failure = error

    def conclude(self, step: int, *, step_s: float) -> None:
        """Save `step`, which took `step_s` seconds, if that is due, and raise what ends the run after it."""
        assert self._state is not None
        self.termination.step = step
        if self._failure is not None:
            raise self._failure
        # A signal may arrive at any time. The request is read once, so that the save and the end agree on it.
        request = self.termination.request
        end: RunTerminated | None = self.limit.after(step, step_s=step_s)
        if request is not None:
            end = RunTerminated(request, step=step)
        elif self.guard.stops:
            end = StoppedByGuard(step=step)
        every, is_last = self.config.checkpoint.every, step == self.config.run.num_steps
        if self.guard.saves or (every and (end is not None or is_last or step % every == 0)):
            with self.limit.saving():  # it counts only once it is whole and on the disk
                self.saver.save(self.policy, self._state(), last=end is not None or is_last)
        if end is not None and not is_last:
            raise end if isinstance(end, StoppedByGuard) else self.termination.leave(end)

    @contextmanager
    def last_step_saved(self) -> Iterator[None]:
        """Save the last step whatever ends the block; only an end at once saves nothing.

        An error of the block stays the one that is seen: notes on it say why nothing was saved, and how to go on.
        """
        termination = self.termination
        try:
            yield
        except RunTerminated:
            raise  # its step is saved
        except KeyboardInterrupt:  # in a rollout or a first evaluation, which have changed nothing that is saved
            if termination.request is None or termination.at_once:
                raise
            self.saver.save_rest(self.policy)
            raise termination.leave(RunTerminated(termination.request, step=termination.step)) from None
        except Exception as error:
            termination.hear()
            if termination.at_once:  # libraries replace KeyboardInterrupt
                raise
            first, termination.then = self._failure or error, "the run has failed; its last step is saved"
            try:
                self.saver.save_rest(self.policy)
            except Exception as lost:
                first.add_note(f"Nothing was saved on the way out: {lost}")
            saved, place = newest_saved_step(Path(self.config.run.dir)), command_line(self.config.run.dir)
            way_on = "No step is saved; begin again" if saved is None else f"Step {saved} is saved; go on"
            first.add_note(f"{way_on} with parity resume {place}")  # last, so that a whole word can be copied
            raise first  # noqa: B904 - what came after it is no cause
        self.saver.save_rest(self.policy)


def _free(path: Path) -> str:
    try:
        return f"{path} has {shutil.disk_usage(path).free / 2**30:.2f} GiB free."
    except OSError as error:
        return f"The free space of {path} is unknown ({error})."
