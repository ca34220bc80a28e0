"""What a run left behind -> the tokens of a step, the weights that sampled them, and older ones.

A model is written out of a checkpoint with float32 weights, as `parity export` writes it, into a directory that the
caller removes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.config import DType, Quantization
from rollout.weights.packed_weights import DTYPES
from trainer.config.train import TrainConfig
from trainer.diagnose.diagnosis import Settings
from trainer.models.export import write_model
from trainer.models.resolve import resolve_model
from trainer.replay.bundle import Bundle, BundleError
from trainer.replay.bundle_step import bundle_of
from trainer.replay.recorded import read_step
from trainer.rundir.checkpoint import CheckpointError, checkpoint_at
from trainer.rundir.dump import Dump
from trainer.rundir.run_dir import StartError

MOST_OLDER = 2
"""Older weights of a run that are looked at: those of the checkpoint before, and those that the run began with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A step of a run."""

    number: int
    bundle: Bundle
    models: list[Path]
    """The weights that sampled it first, then older ones, newest first."""


def settings_of(metadata: Mapping[str, str], given: Mapping[str, str]) -> Settings:
    """What both sides say of themselves: words of the command line, else the bundle, else float32.

    Raises BundleError for what cannot be meant.
    """
    known = {**metadata, **given}
    try:
        temperature = float(known["temperature"]) if "temperature" in known else None
        settings = Settings(
            temperature=temperature,
            trainer_dtype=DType(known.get("trainer_dtype", "float32")),
            engine_dtype=DType(known.get("rollout_dtype", "float32")),
            quantization=Quantization(known.get("quantization", "none")),
            replays_routes="routing" in known,
        )
    except ValueError as error:
        raise BundleError(
            f"the bundle says {error}; give the word trainer_dtype=, rollout_dtype= or quantization="
        ) from error
    if temperature is not None and not 0 < temperature < math.inf:
        raise BundleError(f"the temperature of the bundle must be a number > 0, got {temperature:g}; give temperature=")
    return settings


def steps_of_run(
    dumps: Sequence[tuple[Dump, TrainConfig]], versions: Mapping[int, Path | None], scratch: Path
) -> list[RunStep]:
    """Dumped steps with their weights, written to `scratch`: those that say the same of both sides as the last.

    Raises StartError if no checkpoint has the weights that sampled them, or a checkpoint is damaged.
    """
    known = [each for each in dumps if each[0].description.policy_version in versions]
    if not known:
        last, there = dumps[-1][0].description, ", ".join(str(version) for version in sorted(versions))
        raise StartError(
            f"step {last.step} was sampled by the weights after {last.policy_version} optimizer steps; there are those "
            f"after {there}. Leave step= out: other steps are judged then, or one more that the run takes from its "
            "newest checkpoint. Or set checkpoint.every=1 for a while, or name the weights: model=<directory>"
        )
    found = [_run_step(dump, config, versions, scratch) for dump, config in known]
    return [
        each for each in found if settings_of(each.bundle.metadata, {}) == settings_of(found[-1].bundle.metadata, {})
    ]


def _run_step(dump: Dump, config: TrainConfig, versions: Mapping[int, Path | None], scratch: Path) -> RunStep:
    wanted = dump.description.policy_version
    older = sorted((version for version in versions if version < wanted), reverse=True)
    chosen = [wanted, *dict.fromkeys([*older[:1], *older[-1:]])][: 1 + MOST_OLDER]
    try:
        models = [_model(config, versions[version], scratch / f"version_{version}") for version in chosen]
    except CheckpointError as error:
        raise StartError(str(error)) from error
    return RunStep(
        number=dump.description.step, bundle=bundle_of(read_step(dump), dump.description, config), models=models
    )


def _model(config: TrainConfig, checkpoint: Path | None, directory: Path) -> Path:
    """The weights of a checkpoint, or those that the run began with, as transformers loads them."""
    if directory.is_dir():  # of another step
        return directory
    if checkpoint is None:
        return resolve_model(config, progress=lambda done, total, detail: None)
    write_model(config, checkpoint_at(checkpoint), directory, dtype=DTYPES["float32"])
    return directory
