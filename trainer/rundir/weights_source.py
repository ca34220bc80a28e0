"""The source of weights that `checkpoint=` of `parity eval` names: a run, one of its checkpoints, an exported model or
the base model. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from algorithms.config import Problem
from algorithms.config.home import from_home
from trainer.config.outputs import CHECKPOINTS
from trainer.config.train import TrainConfig
from trainer.rundir.checkpoint import Checkpoint, CheckpointError, checkpoint_at, chosen_checkpoint
from trainer.rundir.resume import changed_keys
from trainer.rundir.sealed_directory import MANIFEST

KEY = "checkpoint"
BASE = "none"
MODEL_FILE = "config.json"
"""File in every Hugging Face directory."""
ADAPTER_CONFIG = "adapter_config.json"
"""File in every directory of an adapter."""


class SourceKind(Enum):
    """Kind of source of weights."""

    base = "base"
    """The initial model of the recipe."""
    run = "run"
    """The newest good checkpoint of a run, or its best one."""
    checkpoint = "checkpoint"
    model = "model"
    """A Hugging Face directory, for example written by `parity export`."""
    adapter = "adapter"
    """The directory of a LoRA adapter for the model of the recipe, as peft and `parity export --adapter` write it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """The source of the weights to be evaluated."""

    kind: SourceKind
    path: Path
    """Directory of the source; without meaning for a base model, for which it is the current directory."""
    best: bool = False
    """True for the checkpoint of a run that checkpoint.best_metric kept."""

    def describe(self, checkpoint: Checkpoint | None) -> str:
        """Description of the source for people."""
        if checkpoint is not None:
            return f"{checkpoint.path}, the policy after step {checkpoint.state.step}"
        return "the base model" if self.kind is SourceKind.base else str(self.path)


def find_source(given: str, *, best: bool) -> WeightsSource | Problem:
    """The source that the value of `checkpoint=` names, recognised by the files in the directory.

    Raises ConfigError for a ~ of an unknown user.
    """
    if given == BASE:
        return WeightsSource(kind=SourceKind.base, path=Path())
    path = Path(from_home(given, key=KEY))
    marks = {
        SourceKind.checkpoint: (path / MANIFEST).is_file(),
        SourceKind.model: (path / MODEL_FILE).is_file(),
        SourceKind.adapter: (path / ADAPTER_CONFIG).is_file(),
        SourceKind.run: (path / CHECKPOINTS).is_dir(),
    }
    kind = next((kind for kind, is_there in marks.items() if is_there), None)
    if kind is None:
        remedy = f"{BASE} is the base model. A run saves checkpoints with checkpoint.every=<steps>."
        rule = f"must be a run directory with {CHECKPOINTS}/, a checkpoint of one, a Hugging Face model, or an adapter"
        return Problem(key=KEY, rule=rule, value=given, remedy=remedy)
    return WeightsSource(kind=kind, path=path, best=best)


def checkpoint_of(config: TrainConfig, source: WeightsSource) -> Checkpoint | None:
    """The checkpoint that `source` names, with every file verified; None for a base model and an exported one.

    Raises CheckpointError if there is no good one, or `config` describes another model than the one it is of.
    """
    match source.kind:
        case SourceKind.base | SourceKind.model | SourceKind.adapter:
            return None
        case SourceKind.run:
            checkpoint = chosen_checkpoint(config, source.path, best=source.best)
        case SourceKind.checkpoint:
            checkpoint = checkpoint_at(source.path)
    changed = changed_keys(checkpoint.state.config, config)
    other = [line for key, line in changed.items() if key.startswith("model") and key != "model.path"]
    if checkpoint.state.config and other:
        raise CheckpointError(
            f"{checkpoint.path} is of another model: {'; '.join(other)}. Set them as they were, or name the "
            "config.yaml of that run as the recipe."
        )
    return checkpoint
