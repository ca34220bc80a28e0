"""Hydra's view of a recipe (--cfg, --info, --help), and Hydra's shell completion; neither starts a run.

Used by `train.py` and `completion.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import hydra
from omegaconf import DictConfig

from trainer.compose.hydra_session import VERSION_BASE, register
from trainer.compose.overrides import as_hydra_reads, recipe_override
from trainer.text.plain import to_stderr


def show(recipe: Path, flags: Sequence[str], overrides: Sequence[str], *, own_dir: Path | None) -> str:
    """Print what the `flags` of Hydra ask for, also of an incomplete or invalid config.

    Returns what Hydra says of a config that it cannot compose; "" if it showed one.
    """
    words = [*flags, *map(as_hydra_reads, overrides), recipe_override(recipe.stem)]
    said = StringIO()
    try:
        with redirect_stderr(said):
            hydra_main(recipe, words, own_dir=own_dir)
    except SystemExit as end:
        if end.code:
            return said.getvalue().strip() or f"Hydra cannot compose {recipe}"
    to_stderr(said.getvalue())
    return ""


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
