"""The checkpoint from which a run resumes, and the config keys that must not change.

`trainer/run/loop.py` uses this file before any process is started. `trainer/cli/resume.py` finds the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from algorithms.config import Estimator
from trainer.config.train import TrainConfig
from trainer.config.training import Resume
from trainer.rundir.checkpoint import Checkpoint, CheckpointError, newest_checkpoint
from trainer.rundir.provenance import config_record, group_choices

FIXED = ("model", "data", "run.seed")
"""Keys and sections that must not change: with another value the run would be another run."""
MOVABLE = ("model.path", "data.train_path", "data.eval_path")
"""Exceptions to FIXED that are only paths: the prompts are compared by digest, the weights by name and shape."""
OWN = ("run.dir", "run.recipe", "run.resume")
"""Keys that may always differ."""
ESTIMATOR = "advantage.estimator"
"""Key that determines whether there is a critic, whose weights a checkpoint must then contain."""
_ABSENT = "(absent)"


def checkpoint_to_resume(config: TrainConfig, run_dir: Path) -> Checkpoint | None:
    """The checkpoint from which the run resumes; None if the run starts anew.

    Raises CheckpointError if all checkpoints are damaged, or the config belongs to another run, with its keys.
    """
    if config.run.resume is not Resume.auto:
        return None
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        return None
    changed, now = changed_keys(checkpoint.state.config, config), flat_config(config)
    # A key that this version of Parity no longer has cannot be set as it was; the user is told of the change only.
    if other := [line for key, line in changed.items() if _is_fixed(key) and key in now]:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another run: {'; '.join(other)}. "
            "Set them as they were, or begin a new run in another run.dir."
        )
    _require_critic(checkpoint, config)
    return checkpoint


def _require_critic(checkpoint: Checkpoint, config: TrainConfig) -> None:
    """Check that the checkpoint has a critic exactly if the run has one."""
    record = checkpoint.state.config
    saved = record.get(ESTIMATOR, config.advantage.estimator.name)
    had_critic = saved == Estimator.gae.name
    if had_critic != config.has_critic:
        raise CheckpointError(
            f"{checkpoint.path} holds {'a' if had_critic else 'no'} critic: {ESTIMATOR} was {saved} and is "
            f"{config.advantage.estimator.name}. Set it as it was, or begin a new run from what `parity export` writes."
        )


def changed_keys(saved: Mapping[str, object], config: TrainConfig) -> dict[str, str]:
    """Key -> "key saved -> now" for every key whose value differs from the checkpoint."""
    now = flat_config(config)
    changed = {}
    for key in [*saved, *(key for key in now if key not in saved)]:
        before, after = saved.get(key, _ABSENT), now.get(key, _ABSENT)
        if before != after and key not in OWN:
            changed[key] = f"{key} {before} -> {after}"
    return changed


def flat_config(config: TrainConfig) -> dict[str, object]:
    """The config as JSON values by dotted key, secrets redacted; the key of a group holds its choice."""
    flat: dict[str, object] = dict(group_choices(config))

    def walk(key: str, value: object) -> None:
        if isinstance(value, Mapping):
            for name, member in value.items():
                walk(f"{key}.{name}", member)
        else:
            flat[key] = value

    for section, values in config_record(config).items():
        walk(section, values)
    return flat


def _is_fixed(key: str) -> bool:
    return key not in MOVABLE and any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)
