"""What `checkpoint=` of `parity eval` names: a run, one checkpoint of it, an exported or the base model. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from algorithms.config import Problem
from trainer.config.recording import CHECKPOINTS
from trainer.rundir.checkpoint import MANIFEST, Checkpoint

KEY = "checkpoint"
BASE = "none"
MODEL_FILE = "config.json"
"""What every Hugging Face directory holds."""


class SourceKind(Enum):
    """Where weights come from."""

    base = "base"
    """The model that the recipe starts from."""
    run = "run"
    """The newest good checkpoint of a run, or its best one."""
    checkpoint = "checkpoint"
    model = "model"
    """A Hugging Face directory, for example of `parity export`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSource:
    """The weights that are to be evaluated."""

    kind: SourceKind
    path: Path
    """The directory; the current one for a base model, where it means nothing."""
    best: bool = False
    """Of a run: the checkpoint that checkpoint.best_metric kept."""

    def describe(self, checkpoint: Checkpoint | None) -> str:
        """For people."""
        if checkpoint is not None:
            return f"{checkpoint.path}, the policy after step {checkpoint.state.step}"
        return "the base model" if self.kind is SourceKind.base else str(self.path)


def find_source(given: str, *, best: bool) -> WeightsSource | Problem:
    """What the word after `checkpoint=` names, by what is in the directory."""
    if given == BASE:
        return WeightsSource(kind=SourceKind.base, path=Path())
    path = Path(given).expanduser()
    marks = {
        SourceKind.checkpoint: (path / MANIFEST).is_file(),
        SourceKind.model: (path / MODEL_FILE).is_file(),
        SourceKind.run: (path / CHECKPOINTS).is_dir(),
    }
    kind = next((kind for kind, is_there in marks.items() if is_there), None)
    if kind is None:
        remedy = f"{BASE} is the base model. A run saves checkpoints with checkpoint.every=<steps>."
        rule = f"must be a run directory with {CHECKPOINTS}/, a checkpoint of one, or a Hugging Face model directory"
        return Problem(key=KEY, rule=rule, value=given, remedy=remedy)
    return WeightsSource(kind=kind, path=path, best=best)
