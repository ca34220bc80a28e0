"""Checkpoints of a run: written atomically, verified before use; damaged checkpoints are reported and skipped.

    <run.dir>/checkpoints/step_000020/
        policy/         weights, optimizer and counters, sharded (torch.distributed.checkpoint), and the generators of
                        random numbers of every rank; loads on any number of ranks
        state.json      the rest: a RunState
        manifest.json   see `trainer/rundir/sealed_directory.py`

A run which is killed while it saves leaves the checkpoint before. `trainer/run/saving.py` and
`trainer/rundir/resume.py` use this file; the ranks write and read their part in `trainer/policy/checkpoint_shards.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.config import Problem
from trainer.config.outputs import CHECKPOINTS
from trainer.config.train import TrainConfig
from trainer.rundir.sealed_directory import (
    FileRecord,
    SealError,
    begin_step,
    compare_files,
    listed_files,
    publish_step,
    remove_sealed,
    sealed_steps,
    set_aside,
    verify_file,
    write_manifest,
)

if TYPE_CHECKING:  # a rank reads checkpoints without the packages that prompts need
    from rollout.collect.pending import CollectorState
    from rollout.data.dataset import StreamState

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the layout above."""
STATE = "state.json"
POLICY = "policy"

CompareFiles = Callable[[Path, Mapping[str, FileRecord]], None]
"""Compares the files of a checkpoint, by path relative to it, with their records; raises SealError if one differs."""


class CheckpointError(RuntimeError):
    """A run cannot be saved, or cannot be resumed from its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """State of a run after a step, as JSON values; the ranks save their state beside it.

    A new part of the system that must survive a restart adds a field here, and a line in `run_state` and `restore` of
    `trainer/run/loop.py`.
    """

    step: int
    """Number of completed rollout steps."""
    policy_version: int
    """Number of completed optimizer steps."""
    stream: StreamState
    """Position in the prompt stream."""
    collector: CollectorState | None = None
    """Prompts and tokens of steps that were not trained yet; None in checkpoints of earlier versions."""
    wandb_run_id: str | None = None
    """Id of the W&B run, which a resumed run continues; None without W&B."""
    evaluation: Mapping[str, float | None] = field(default_factory=dict)
    """Held-out metrics of these weights; empty if the weights were not evaluated."""
    guard: Mapping[str, Any] | None = None
    """State of the guard; None without a guard, and in checkpoints of earlier versions."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The config of the run by dotted key, secrets redacted."""
    model_mark: str | None = None
    """`model_mark` of the model that the run began with, with model=hf or an adapter; None in earlier versions."""
    user_files: Mapping[str, str] = field(default_factory=dict)
    """Path of each file of user code that the run has loaded, and of those that say how its model computes and where it
    stops -> its `code_digest`; empty in earlier versions."""
    eval_prompts: Mapping[str, str] = field(default_factory=dict)
    """Name of each evaluation set -> `prompts_digest` of it; empty in earlier versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all there, and whose state is as it was written."""

    path: Path
    state: RunState

    @property
    def policy_path(self) -> Path:
        return self.path / POLICY


def begin_checkpoint(run_dir: Path, step: int) -> Path:
    """Make an empty directory for the checkpoint of `step`. Ranks write to its `policy/`, then `commit_checkpoint`."""
    path = begin_step(run_dir / CHECKPOINTS, step)
    (path / POLICY).mkdir()
    return path


def commit_checkpoint(
    unfinished: Path,
    state: RunState,
    *,
    keep: int,
    best_metric: str | None = None,
    records: Mapping[str, FileRecord] | None = None,
) -> Checkpoint:
    """Complete the checkpoint in `unfinished` and remove checkpoints that are not kept.

    `publish_step` of sealed_directory.py gives it its final name.

    Args:
        unfinished: the directory that `begin_checkpoint` made, with the files of every rank.
        state: the state of the run after the step.
        keep: number of newest checkpoints to keep.
        best_metric: metric in `RunState.evaluation` whose highest value keeps one more checkpoint; None for no other.
        records: files that their writer already described and synced to the disk, by path relative to `unfinished`; all
            other files are read once more.

    Raises OSError if the disk rejects the data, or if a file of `records` is missing.
    """
    (unfinished / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    write_manifest(unfinished, layout=FORMAT, records=records)
    path = publish_step(unfinished, state.step, layout=FORMAT)
    finished = list(sealed_steps(path.parent).values())
    best = None if best_metric is None else _best(finished, best_metric)
    for old in finished[:-keep]:
        if old != best:
            remove_sealed(old)
    return Checkpoint(path=path, state=state)


def set_later_aside(run_dir: Path, step: int) -> list[Path]:
    """Set the checkpoints of later steps aside -> their new paths: the run goes on from `step`.

    They could not be used when the run was resumed, and their rows are forgotten. One that was unreadable only for a
    moment must neither be lost nor be taken up by the next resume, which would then lack the rows up to its step.
    """
    steps = sealed_steps(run_dir / CHECKPOINTS)
    return [set_aside(path, layout=FORMAT) for later, path in steps.items() if later > step]


def newest_checkpoint(
    run_dir: Path, *, compare: CompareFiles = compare_files, up_to: int | None = None
) -> Checkpoint | None:
    """The newest usable checkpoint, whose files match its manifest; None if the run has no checkpoint.

    Args:
        run_dir: the directory of the run.
        compare: reads the files that the ranks wrote; here this process reads them all, one after the other.
        up_to: the newest step that counts; None for any.

    Raises CheckpointError if there are checkpoints and none is usable.
    """
    problems = []
    try:
        found = sealed_steps(run_dir / CHECKPOINTS)
    except SealError as problem:
        raise CheckpointError(f"{problem}. Restore it, or start again in another run.dir.") from problem
    for path in [path for step, path in reversed(found.items()) if up_to is None or step <= up_to]:
        try:
            return _verified(path, compare)
        except SealError as problem:
            logger.warning("checkpoint %s cannot be used and is passed over: %s", path.name, problem)
            problems.append(str(problem))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {run_dir / CHECKPOINTS} can be used: {'; '.join(problems)}. "
            "Restore one, or start again in another run.dir."
        )
    return None


def leave_to_ranks(path: Path, records: Mapping[str, FileRecord]) -> None:
    """A CompareFiles for a driver that only chooses: the ranks compare the files before they load from them."""


def newest_state(run_dir: Path) -> tuple[Path, RunState] | None:
    """The newest checkpoint whose state is as it was written, and the state; None if there is no checkpoint.

    No other file is looked at: `newest_checkpoint` does so later, and names what is damaged. Raises SealError if the
    directory of the checkpoints cannot be read, or no checkpoint in it has such a state.
    """
    problems = []
    for path in reversed(sealed_steps(run_dir / CHECKPOINTS).values()):
        try:
            return path, state_at(path)
        except SealError as problem:
            problems.append(str(problem))
    if problems:
        raise SealError(f"no checkpoint can be used: {'; '.join(problems)}")
    return None


def known_versions(run_dir: Path) -> dict[int, Path | None]:
    """Version of the weights -> its checkpoint; None for those that the run began with."""
    versions: dict[int, Path | None] = {0: None}
    for path in sealed_steps(run_dir / CHECKPOINTS).values():
        try:
            versions[state_at(path).policy_version] = path
        except SealError:
            continue
    return versions


def state_at(path: Path) -> RunState:
    """The state of the checkpoint in the directory `path`, verified. Raises SealError; reads no weights."""
    verify_file(path, STATE, layout=FORMAT)
    return _read_state(path)


def checkpoint_at(path: Path, *, compare: CompareFiles = compare_files) -> Checkpoint:
    """The checkpoint in the directory `path`. Raises CheckpointError if it is damaged or not a checkpoint."""
    try:
        return _verified(path, compare)
    except SealError as problem:
        raise CheckpointError(f"the checkpoint cannot be used: {problem}. Take another one of the run.") from problem


def best_checkpoint(run_dir: Path, metric: str) -> Checkpoint | None:
    """The checkpoint whose weights have the highest `metric`, the later of equal ones; None if none has the metric.

    Raises CheckpointError if this checkpoint is damaged.
    """
    try:
        path = _best(list(sealed_steps(run_dir / CHECKPOINTS).values()), metric)
        return None if path is None else _verified(path)
    except SealError as problem:
        raise CheckpointError(f"the best checkpoint cannot be used: {problem}. Take the newest instead.") from problem


def best_metric(config: TrainConfig, run_dir: Path) -> str | None:
    """The metric by which a run kept its best checkpoint: of `config`, which may be another's, else as it recorded."""
    try:
        newest = newest_state(run_dir)
    except SealError:
        newest = None
    saved = {} if newest is None else newest[1].config
    recorded = saved.get("checkpoint.best_metric")
    return config.checkpoint.best_metric or (recorded if isinstance(recorded, str) else None)


def best_problem(config: TrainConfig, run_dir: Path) -> Problem | None:
    """The Problem of --best for a run that kept no best checkpoint; None if there is one. Reads no weights."""
    metric, remedy = best_metric(config, run_dir), "Leave --best out for the newest checkpoint."
    if metric is None:
        rule = "needs a run that was trained with checkpoint.best_metric, which keeps its best checkpoint"
        return Problem(key="--best", rule=rule, value=str(run_dir), remedy=remedy)
    try:
        found = _best(list(sealed_steps(run_dir / CHECKPOINTS).values()), metric)
    except SealError:  # whoever reads the checkpoint reports it
        return None
    rule = f"needs a checkpoint that was evaluated: none of the run has {metric}"
    return Problem(key="--best", rule=rule, value=str(run_dir), remedy=remedy) if found is None else None


def chosen_checkpoint(config: TrainConfig, run_dir: Path, *, best: bool) -> Checkpoint:
    """The newest good, or the `best` checkpoint of a run. Raises CheckpointError if there is none."""
    if best and (problem := best_problem(config, run_dir)) is not None:
        raise CheckpointError(str(problem))
    metric = best_metric(config, run_dir) if best else None
    checkpoint = newest_checkpoint(run_dir) if metric is None else best_checkpoint(run_dir, metric)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint. A run saves them with checkpoint.every=<steps>.")
    return checkpoint


def _verified(path: Path, compare: CompareFiles = compare_files) -> Checkpoint:
    """The checkpoint in `path`; raises SealError unless every file matches the manifest.

    The state is compared here, where it is read, and what the ranks wrote by `compare`.
    """
    records = listed_files(path, layout=FORMAT)
    compare_files(path, {name: record for name, record in records.items() if name == STATE})
    state = _read_state(path)
    compare(path, {name: record for name, record in records.items() if name != STATE})
    return Checkpoint(path=path, state=state)


def _read_state(path: Path) -> RunState:
    """The RunState in `path`; raises SealError for a file that is absent, damaged or of another form."""
    try:
        return RunState(**json.loads((path / STATE).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SealError(f"{path / STATE} cannot be read ({error})") from error


def _best(found: list[Path], metric: str) -> Path | None:
    """The newest checkpoint in `found` (newest last) with the highest `metric`; an unreadable one has no value."""
    best: tuple[float, Path] | None = None
    for path in found:
        try:
            value = _read_state(path).evaluation.get(metric)
        except SealError as error:
            logger.warning("checkpoint %s has no readable %s: %s", path.name, STATE, error)
            continue
        if value is not None and (best is None or value >= best[0]):
            best = (value, path)
    return None if best is None else best[1]
