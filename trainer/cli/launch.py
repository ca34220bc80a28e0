"""A checked command -> hydra.main -> one job, or one per combination of a sweep.

Hydra shows configs (--cfg), expands sweeps and names the directories; every run uses the config that was checked before
the first run started. Called by `commands.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from trainer.cli.arguments import TrainArguments
from trainer.cli.job import run_job
from trainer.compose.compose import Run
from trainer.compose.outcome import DONE
from trainer.compose.overrides import as_hydra_reads, recipe_override
from trainer.compose.session import VERSION_BASE, register


def launch(recipe: Path, arguments: TrainArguments, runs: Sequence[Run]) -> int:
    """Let Hydra start the checked `runs`, or show the information that flags request; return the worst exit code."""
    outcomes: list[int] = []

    def job(composed: DictConfig) -> None:
        run, run_dir = runs[len(outcomes)], Path(HydraConfig.get().runtime.output_dir)
        assert run.config is not None
        # Hydra decides the directory: run.dir, one directory per job of a sweep, or hydra.run.dir.
        run.config.run.dir = str(run_dir)
        if len(runs) > 1:
            words = [word for word in run.overrides if not word.startswith("hydra.")]
            sys.stdout.write(f"run {len(outcomes)}: {' '.join(words)} -> {run_dir}\n")
            sys.stdout.flush()
        outcomes.append(run_job(run.config, run_dir))

    words = [*arguments.hydra_flags, *map(as_hydra_reads, arguments.overrides), recipe_override(recipe.stem)]
    hydra_main(recipe, words, own_dir=arguments.own_dir, job=job)
    failed = sum(outcome != DONE for outcome in outcomes)
    if len(outcomes) > 1 and failed:
        sys.stderr.write(f"parity train: {failed} of {len(outcomes)} runs failed\n")
    return max(outcomes, default=DONE)


def hydra_main(recipe: Path, words: Sequence[str], *, own_dir: Path | None, job: Callable[[DictConfig], None]) -> None:
    """Call hydra.main for the recipe in the file `recipe`, as if `words` were the command line."""
    register(own_dir)
    decorated = hydra.main(version_base=VERSION_BASE, config_path=str(recipe.parent), config_name=recipe.stem)(job)
    command_line = sys.argv
    sys.argv = [command_line[0], *words]
    try:
        decorated()
    finally:
        sys.argv = command_line
