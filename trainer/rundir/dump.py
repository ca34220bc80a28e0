"""The dump of a step: a directory written atomically, described by a manifest; the newest dumps are kept.

    <run.dir>/dumps/step_000010/
        rank_00000.safetensors    tensors that each rank trained on (`trainer/policy/recorder.py`)
        config.yaml               the config of the step, as a recipe
        manifest.json             a Manifest

The directory's name begins with a dot until the dump is complete. The files are not synced to the disk first, as for a
checkpoint: a file torn by a power failure has another digest than in the manifest. Does not import torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.config.recording import DUMPS
from trainer.rundir.checkpoint import FileRecord, describe_file
from trainer.rundir.run_dir import numbered_steps

FORMAT = 1
"""Version of the layout; other versions are refused."""
MANIFEST = "manifest.json"
CONFIG = "config.yaml"


class DumpError(RuntimeError):
    """A step cannot be dumped, or a dump cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """Counts of an optimizer step that its tensors do not contain. The first two are global: the denominators."""

    num_response_tokens: int
    num_sequences: int
    num_micro_batches: int
    """Number of micro-batches of the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFile:
    """File of one rank."""

    file: str
    record: FileRecord
    optimizer_steps: tuple[OptimizerStep, ...]
    num_threads: int
    """Number of torch threads of the rank on a CPU: the order of long sums depends on them."""
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a dump in its manifest.json."""

    step: int
    policy_version: int
    """Version of the weights at the start of the step; version policy_version - k sampled a token with a lag of k."""
    correction: str
    """Correction mode of the step's training."""
    ranks: tuple[RankFile, ...]
    metrics: Mapping[str, float | None]
    """Metrics that the ranks reported for the step."""
    versions: Mapping[str, str]
    """Versions of Parity and torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """A verified dump."""

    path: Path
    manifest: Manifest


def begin_dump(run_dir: Path, step: int) -> Path:
    """Make an empty directory for the dump of `step`; the ranks write to it, then `commit_dump`."""
    directory = run_dir / DUMPS
    for leftover in directory.glob(".step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = directory / f".step_{step:06d}.unfinished"
    path.mkdir(parents=True)
    return path


def commit_dump(unfinished: Path, manifest: Manifest, *, config_text: str, keep: int) -> Path:
    """Complete the dump in `unfinished`, give it its final name, and remove dumps that are not kept.

    A dump of the same step is replaced. Dumps of later steps belong to a run that was resumed from an earlier step, and
    are removed.

    Raises:
        OSError: the disk rejects the data.
        DumpError: a file of a rank is missing.
    """
    if absent := [rank.file for rank in manifest.ranks if not (unfinished / rank.file).is_file()]:
        raise DumpError(f"{unfinished} lacks {', '.join(absent)}, which a rank has written. Is it a shared disk?")
    (unfinished / CONFIG).write_text(config_text, encoding="utf-8")
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2)
    (unfinished / MANIFEST).write_text(text + "\n", encoding="utf-8")
    path = unfinished.parent / _name(manifest.step)
    for outdated in numbered_steps(unfinished.parent):
        if outdated >= manifest.step:
            _remove(unfinished.parent / _name(outdated))
    unfinished.rename(path)
    for old in numbered_steps(path.parent)[:-keep]:
        _remove(path.parent / _name(old))
    return path


def dumped_steps(run_dir: Path) -> list[int]:
    """The steps of a run that have a dump, ascending."""
    return numbered_steps(run_dir / DUMPS)


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
    path = run_dir / DUMPS / _name(step)
    if not path.is_dir():
        raise DumpError(f"{run_dir} has no dump of step {step}. {way_to_a_dump(run_dir)}")
    try:
        stored = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        written = stored.pop("format")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DumpError(f"{path / MANIFEST} cannot be read ({error}). Replay another step.") from error
    if written != FORMAT:
        wrote = stored.get("versions", {}).get("parity-rl", "unknown")
        raise DumpError(
            f"{path} has format {written}, this version of Parity reads format {FORMAT}. "
            f"Replay it with the version that wrote it: {wrote}."
        )
    manifest = _manifest(stored)
    for rank in manifest.ranks:
        try:
            found = describe_file(path / rank.file)
        except OSError as error:
            raise DumpError(f"{path / rank.file} cannot be read ({error}). Replay another step.") from error
        if found != rank.record:
            raise DumpError(f"{path / rank.file} has changed since it was written. Replay another step.")
    return Dump(path=path, manifest=manifest)


def _manifest(stored: Mapping[str, object]) -> Manifest:
    ranks: Sequence[Mapping[str, object]] = stored["ranks"]  # type: ignore[assignment]
    return Manifest(**(dict(stored) | {"ranks": tuple(_rank_file(rank) for rank in ranks)}))  # type: ignore[arg-type]


def _rank_file(stored: Mapping[str, object]) -> RankFile:
    steps: Sequence[Mapping[str, int]] = stored["optimizer_steps"]  # type: ignore[assignment]
    record: Mapping[str, object] = stored["record"]  # type: ignore[assignment]
    parts = {
        "record": FileRecord(**record),  # type: ignore[arg-type]
        "optimizer_steps": tuple(OptimizerStep(**step) for step in steps),
    }
    return RankFile(**(dict(stored) | parts))  # type: ignore[arg-type]


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _remove(path: Path) -> None:
    """Hide a dump, then remove it: half a directory must not look like a damaged dump. Raises OSError on failure."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
