"""Checked runs -> their jobs, one after the other; and what Hydra shows of a recipe (--cfg, --info, --help).

Every run uses the config that was checked before the first run started. Called by `commands.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from trainer.cli.job import run_job
from trainer.compose.compose import Resolution
from trainer.compose.outcome import DONE
from trainer.compose.overrides import as_hydra_reads, recipe_override
from trainer.compose.session import VERSION_BASE, register


def launch(resolution: Resolution) -> int:
    """Run all jobs of a resolution without problems; return the worst exit code."""
    outcomes = []
    for index, run in enumerate(resolution.runs):
        assert run.config is not None
        run_dir = resolution.run_dir(index)
        run.config.run.dir = str(run_dir)
        if len(resolution.runs) > 1:
            sys.stdout.write(f"run {index}: {' '.join(run.overrides)} -> {run_dir}\n")
            sys.stdout.flush()
        outcomes.append(run_job(run.config, run_dir))
    failed = sum(outcome != DONE for outcome in outcomes)
    if len(outcomes) > 1 and failed:
        sys.stderr.write(f"parity train: {failed} of {len(outcomes)} runs failed\n")
    return max(outcomes)


def show(recipe: Path, flags: Sequence[str], overrides: Sequence[str], *, own_dir: Path | None) -> int:
    """Print what the `flags` of Hydra ask for, also of an incomplete or invalid config."""
    words = [*flags, *map(as_hydra_reads, overrides), recipe_override(recipe.stem)]
    hydra_main(recipe, words, own_dir=own_dir)
    return DONE


def hydra_main(recipe: Path, words: Sequence[str], *, own_dir: Path | None) -> None:
    """Call hydra.main for the recipe in the file `recipe`, as if `words`, which start no job, were the command line."""

    def job(composed: DictConfig) -> None:
        raise RuntimeError(f"Hydra started a job of {composed.run.recipe} where it should only show something")

    register(own_dir)
    decorated: Callable[[], object] = hydra.main(
        version_base=VERSION_BASE, config_path=str(recipe.parent), config_name=recipe.stem
    )(job)
    command_line = sys.argv
    sys.argv = [command_line[0], *words]
    try:
        decorated()
    finally:
        sys.argv = command_line
