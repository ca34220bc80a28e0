"""The checkpoint from which a run resumes, and the config keys that must not change.

`trainer/run/loop.py` uses this file before any process is started. `trainer/cli/resume.py` finds the directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path

from algorithms.config import Estimator, Problem
from trainer.config.outputs import CHECKPOINTS
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig, LoraConfig, Resume
from trainer.rundir.checkpoint import (
    Checkpoint,
    CheckpointError,
    CompareFiles,
    RunState,
    checkpoint_at,
    leave_to_ranks,
    newest_checkpoint,
    newest_state,
    state_at,
)
from trainer.rundir.model_mark import model_mark
from trainer.rundir.provenance import config_record, group_choices
from trainer.rundir.run_dir import StartError, has_checkpoint, needs_no_step
from trainer.rundir.sealed_directory import SealError
from trainer.text.yaml_text import leaves

FIXED = ("model", "data", "run.seed")
"""Keys and sections that must not change: with another value the run would be another run."""
MOVABLE = ("model.path", "data.train_path", "data.eval_path")
"""Exceptions to FIXED that are only paths: the prompts are compared by digest, the weights of the model by its mark."""
OWN = ("run.dir", "run.recipe", "run.resume", "run.resume_from")
"""Keys that may always differ."""
ESTIMATOR = "advantage.estimator"
"""Key that determines whether there is a critic, whose weights a checkpoint must then contain."""
LORA = "policy.lora"
"""Section that determines which weights a checkpoint holds."""
_ABSENT = "(absent)"


def checkpoint_to_resume(config: TrainConfig, run_dir: Path) -> Checkpoint | None:
    """The checkpoint from which the run should go on, its own or that of run.resume_from; None if the run starts anew.

    Only the files that the ranks do not read are compared with their digests: the ranks compare theirs
    (`whole_checkpoint`). If the run has taken all its steps no rank will, so all are compared here.

    Raises StartError if all checkpoints are damaged, or the config belongs to another run, with its keys.
    """
    try:
        own = config.run.resume is Resume.auto
        checkpoint = newest_checkpoint(run_dir, compare=leave_to_ranks) if own else None
        if checkpoint is not None and takes_no_step(config, run_dir, checkpoint):
            checkpoint = newest_checkpoint(run_dir, up_to=checkpoint.state.step)
        if checkpoint is None:
            checkpoint = source_checkpoint(config, compare=leave_to_ranks)
    except CheckpointError as error:
        raise StartError(str(error)) from error
    if checkpoint is not None and (problems := list(other_run(checkpoint.path, checkpoint.state, config))):
        raise StartError(*problems)
    return checkpoint


def begins(config: TrainConfig) -> bool:
    """True unless the run goes on from a checkpoint in its own directory."""
    return config.run.resume is not Resume.auto or not has_checkpoint(Path(config.run.dir))


def saved_state(config: TrainConfig) -> RunState | None:
    """What the checkpoint says from which the run would go on; None without one, or if it cannot be read."""
    source = config.run.resume_from
    try:
        newest = newest_state(Path(config.run.dir)) if config.run.resume is Resume.auto else None
        if newest is not None:
            return newest[1]
        return None if source is None else state_at(Path(source))
    except (OSError, SealError):  # `source_problems` and `start_problems` report it
        return None


def source_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of going on from run.resume_from. Reads the state of the checkpoint, not the weights."""
    source = config.run.resume_from
    if source is None:
        return
    try:
        state = state_at(Path(source))
    except SealError as error:
        there = Path(source).is_dir()
        rule = f"must be the directory of a checkpoint, <run.dir>/checkpoints/step_<N>{f' ({error})' if there else ''}"
        of_run = Path(source) / CHECKPOINTS if there else Path(source).parent
        beside = ", ".join(sorted(path.name for path in of_run.glob("step_*")))
        remedy = f"Checkpoints in {of_run}: {beside}." if beside else "Name a checkpoint of the run."
        yield config.broken("run.resume_from", rule, f"{remedy} Or leave it out.")
        return
    if config.run.num_steps <= state.step:
        rule = f"must be > {state.step}, the steps that run.resume_from={source} has taken"
        yield config.broken("run.num_steps", rule, "It counts the steps of both runs.")
    yield from other_run(Path(source), state, config)


def source_checkpoint(config: TrainConfig, *, compare: CompareFiles) -> Checkpoint | None:
    """The checkpoint of run.resume_from, without its W&B run, which stays the other run's; None if the key is null.

    Raises CheckpointError if it is damaged.
    """
    if config.run.resume_from is None:
        return None
    source = checkpoint_at(Path(config.run.resume_from), compare=compare)
    return replace(source, state=replace(source.state, wandb_run_id=None))


def whole_checkpoint(config: TrainConfig, run_dir: Path, candidate: Checkpoint, *, compare: CompareFiles) -> Checkpoint:
    """The newest checkpoint up to the `candidate` of `checkpoint_to_resume` whose files agree for `compare`.

    Raises CheckpointError if there is none, or the one that is whole belongs to another run.
    """
    if candidate.path.parent.parent == run_dir:
        checkpoint = newest_checkpoint(run_dir, compare=compare, up_to=candidate.state.step)
    else:
        checkpoint = source_checkpoint(config, compare=compare)
    if checkpoint is None:
        raise CheckpointError(f"{candidate.path} is gone. Start the run again.")
    if problems := list(other_run(checkpoint.path, checkpoint.state, config)):
        raise CheckpointError("; ".join(map(str, problems)))
    return checkpoint


def other_model(state: RunState, config: TrainConfig, directory: Path) -> Iterator[Problem]:
    """Yield the problem of a model in `directory` that is not the one with which the run of `state` began.

    It would be the reference, or lie below the adapter. A directory may move; one that is not there is for others.
    """
    mark = model_mark(directory) if directory.is_dir() and state.model_mark else None
    if mark not in (None, state.model_mark):
        key = "model.path" if isinstance(config.model, HFModelConfig) else "model"
        rule, remedy = "must hold the weights that the run began with", "Or begin a new run in another run.dir."
        yield Problem(key=key, rule=rule, value=str(directory), remedy=remedy)


def lora_of(saved: Mapping[str, object]) -> LoraConfig:
    """The section policy.lora of a saved config; earlier versions of Parity had none and trained all weights."""
    keys = {spec.name: saved[f"{LORA}.{spec.name}"] for spec in fields(LoraConfig) if f"{LORA}.{spec.name}" in saved}
    return LoraConfig(**keys)  # type: ignore[arg-type]  # the types are those with which it was written


def takes_no_step(config: TrainConfig, run_dir: Path, checkpoint: Checkpoint | None) -> bool:
    """True if the run that goes on from `checkpoint` has taken and saved all its steps, so that nothing is started."""
    saved = None if checkpoint is None else checkpoint.state.step
    return config.run.resume is Resume.auto and needs_no_step(run_dir, saved=saved, num_steps=config.run.num_steps)


def other_run(path: Path, state: RunState, config: TrainConfig) -> Iterator[Problem]:
    """Yield the problems of `config` if the checkpoint `path`, with this `state`, belongs to another run."""
    saved = state.config
    changed, now = changed_keys(saved, config), flat_config(config)
    if isinstance(config.model, HFModelConfig):
        yield from other_model(state, config, Path(config.model.path))
    # A key that this version of Parity no longer has cannot be set as it was; the user is told of the change only.
    for key in [key for key in changed if _is_fixed(key) and key in now]:
        rule = f"must be {saved.get(key, _ABSENT)!r}, as in {path}: with another value it is another run"
        yield Problem(key=key, rule=rule, value=now[key], remedy="Or begin a new run in another run.dir.")
    # A checkpoint holds the adapter of its run, or all weights.
    before, after = lora_of(saved), config.policy.lora
    for spec in fields(LoraConfig) if before.rank or after.rank else ():
        was, value = getattr(before, spec.name), getattr(after, spec.name)
        if was != value:
            rule = f"must be {was!r}, as in {path}, which holds {'an adapter' if before.rank else 'all weights'}"
            remedy = "Or begin a new run from what `parity export` writes."
            yield Problem(key=f"{LORA}.{spec.name}", rule=rule, value=value, remedy=remedy)
    # A checkpoint has a critic exactly if its run had one.
    estimator = saved.get(ESTIMATOR, config.advantage.estimator.name)
    if (estimator == Estimator.gae.name) != config.has_critic:
        rule = f"must be {estimator}, as in {path}, which holds {'no' if config.has_critic else 'a'} critic"
        remedy = "Or begin a new run from what `parity export` writes."
        yield Problem(key=ESTIMATOR, rule=rule, value=config.advantage.estimator, remedy=remedy)


def changed_keys(saved: Mapping[str, object], config: TrainConfig) -> dict[str, str]:
    """Key -> "key saved -> now" for every key whose value differs from the checkpoint; null is as good as no key."""
    now = flat_config(config)
    changed = {}
    for key in [*saved, *(key for key in now if key not in saved)]:
        before, after = saved.get(key, _ABSENT), now.get(key, _ABSENT)
        says_nothing = all(value in (_ABSENT, None) for value in (before, after))
        if before != after and not says_nothing and key not in OWN:
            changed[key] = f"{key} {before} -> {after}"
    return changed


def flat_config(config: TrainConfig) -> dict[str, object]:
    """The config as JSON values by dotted key, secrets redacted; the key of a group holds its choice."""
    values = {".".join(path): value for path, value in leaves(config_record(config)) if value != {}}
    return {**group_choices(config), **values}


def _is_fixed(key: str) -> bool:
    return key not in MOVABLE and any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)
