"""The weights that the gradients of a recorded step are taken at: `checkpoint=` of `parity replay`.

With a Hugging Face model, a checkpoint, or the one of the run that is nearest to the weights that the step started
with. One process, on the host, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from trainer.config.train import TrainConfig
from trainer.policy.forward import ScoringModel
from trainer.run.export import chosen_checkpoint, load_policy
from trainer.run.task import resolve_model
from trainer.rundir.checkpoint import Checkpoint, checkpoint_at, checkpoint_nearest
from trainer.rundir.weights_source import SourceKind, WeightsSource


class LoadedPolicy(NamedTuple):
    """A policy, and in words which one."""

    model: ScoringModel
    description: str


def load_weights(config: TrainConfig, source: WeightsSource | None, *, run_dir: Path, step: int) -> LoadedPolicy:
    """The policy that `source` names; None for the one of the run that is nearest to the start of `step`.

    Raises CheckpointError if it has no good checkpoint.
    """
    checkpoint: Checkpoint | None = None
    start: Path | None = None
    if source is None:
        checkpoint = checkpoint_nearest(run_dir, step - 1)
    elif source.kind is SourceKind.model:
        start = source.path
    elif source.kind is SourceKind.run:
        checkpoint = chosen_checkpoint(config, source.path, best=False)
    elif source.kind is SourceKind.checkpoint:
        checkpoint = checkpoint_at(source.path)
    if start is None:
        start = resolve_model(config, progress=lambda step, num_steps, loss: None)
    model = load_policy(config, start, checkpoint)
    if checkpoint is not None:
        return LoadedPolicy(model, f"the policy after step {checkpoint.state.step}, {checkpoint.path.name}")
    named = source is not None and source.kind is SourceKind.model
    return LoadedPolicy(model, str(start) if named else "the model that the run started from")
