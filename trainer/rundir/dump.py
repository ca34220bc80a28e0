"""The dump of a step: a sealed directory; the newest dumps are kept.

    <run.dir>/dumps/step_000010/
        rank_00000.safetensors    tensors that each rank trained on (`trainer/policy/recorder.py`)
        config.yaml               the config of the step, as a recipe
        dump.json                 a DumpDescription
        manifest.json             see `trainer/rundir/sealed_directory.py`

The files of the ranks are not synced to the disk, as for a checkpoint: a file torn by a power failure has another
digest than in the manifest. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config.outputs import DUMPS
from trainer.rundir.run_dir import StartError
from trainer.rundir.sealed_directory import (
    FileRecord,
    SealError,
    begin_step,
    inside,
    publish_step,
    remove_sealed,
    sealed_steps,
    step_path,
    verify,
    write_manifest,
)

FORMAT = 2
"""Version of the layout; other versions are refused."""
DESCRIPTION = "dump.json"
CONFIG = "config.yaml"


class DumpError(StartError):
    """A step cannot be dumped, or a dump cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """Counts of an optimizer step that its tensors do not contain. The first two are global: the denominators."""

    num_response_tokens: int
    num_sequences: int
    num_micro_batches: int
    """Number of micro-batches of the rank."""
    again: int | None = None
    """Optimizer step of the first pass over the same mini-batch, from 0; None if this is the first pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """File of one rank."""

    file: str
    optimizer_steps: tuple[OptimizerStep, ...]
    num_threads: int
    """Number of torch threads of the rank on a CPU: the order of long sums depends on them."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpDescription:
    """Facts about a recorded step that its tensors do not contain."""

    step: int
    policy_version: int
    """Version of the weights at the start of the step; version policy_version - k sampled a token with a lag of k."""
    correction: str
    """Correction mode of the step's training."""
    ranks: tuple[RankFile, ...]
    metrics: Mapping[str, float | None]
    """Metrics that the ranks reported for the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """A verified dump."""

    path: Path
    description: DumpDescription


def begin_dump(run_dir: Path, step: int) -> Path:
    """Make an empty directory for the dump of `step`; the ranks write to it, then `commit_dump`."""
    return begin_step(run_dir / DUMPS, step)


def commit_dump(
    unfinished: Path, description: DumpDescription, *, records: Mapping[str, FileRecord], config_text: str, keep: int
) -> Path:
    """Complete the dump in `unfinished`, give it its final name, and remove dumps that are not kept.

    A dump of the same step is replaced. Dumps of later steps belong to a run that was resumed from an earlier step, and
    are removed. `records` describe the files of the ranks, by name.

    Raises OSError if the disk rejects the data, or if a file of a rank is missing.
    """
    (unfinished / CONFIG).write_text(config_text, encoding="utf-8")
    (unfinished / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2) + "\n", encoding="utf-8")
    write_manifest(unfinished, layout=FORMAT, records=records)
    path = publish_step(unfinished, description.step, layout=FORMAT)
    steps = sealed_steps(path.parent)
    earlier = [old for step, old in steps.items() if step < description.step]
    later = [outdated for step, outdated in steps.items() if step > description.step]
    for old in [*later, *earlier[: max(0, len(earlier) + 1 - keep)]]:
        remove_sealed(old)
    return path


def dumped_steps(run_dir: Path) -> list[int]:
    """The steps of a run that have a dump, ascending."""
    return list(sealed_steps(run_dir / DUMPS))


def way_to_a_dump(run_dir: Path) -> str:
    """A sentence with the steps of a run that have a dump, or with the way to get dumps."""
    there = ", ".join(str(number) for number in dumped_steps(run_dir))
    if there:
        return f"Steps with a dump: {there}."
    return "It wrote none, and none can be made of it now: run again with dump.every=<steps>."


def open_dump(run_dir: Path, step: int) -> Dump:
    """The dump of `step`, verified.

    Raises DumpError if the step has no dump (listing the steps that have one), or if the dump has another format or is
    damaged.
    """
    path = step_path(run_dir / DUMPS, step)
    if not path.is_dir():
        raise DumpError(f"{run_dir} has no dump of step {step}. {way_to_a_dump(run_dir)}")
    try:
        verify(path, layout=FORMAT)
        stored = json.loads((path / DESCRIPTION).read_bytes())
        ranks: Sequence[dict[str, Any]] = stored.pop("ranks")
        description = DumpDescription(ranks=tuple(map(_rank_file, ranks)), **stored)
        for rank in description.ranks:
            inside(path, rank.file)
        return Dump(path=path, description=description)
    except (SealError, OSError, ValueError, TypeError, KeyError) as error:
        raise DumpError(f"the dump of step {step} cannot be used: {error}. Replay another step.") from error


def _rank_file(stored: dict[str, Any]) -> RankFile:
    steps = tuple(OptimizerStep(**step) for step in stored.pop("optimizer_steps"))
    return RankFile(optimizer_steps=steps, **stored)
