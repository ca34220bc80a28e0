"""Paths of the project's YAML: configs/ and recipes/, in a source tree and in an installed wheel.

In the repository both are top-level directories. A wheel carries both inside the `trainer` package, because only the
package has a place that can be found after installation. `trainer/compose/compose.py` and `trainer/compose/catalog.py`
use these paths.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""Directory of the `trainer` package."""
MAIN_CONFIG = "train"
"""Name of the primary config in `config_dir()`, from which every recipe starts."""


def config_dir() -> Path:
    """Directory of the Hydra configs from which every recipe starts; holds train.yaml."""
    return _find("configs", marker=f"{MAIN_CONFIG}.yaml")


def recipe_dir() -> Path:
    """Directory of the recipes that come with the project."""
    return _find("recipes", marker="*.yaml")


def _find(name: str, *, marker: str) -> Path:
    """The directory `name` with a file that matches `marker`: inside the package, else beside the package.

    Raises FileNotFoundError if neither directory has such a file, which means that the installation is broken.
    """
    # The package comes first: beside an installed package lies site-packages, whose "configs" may belong to others.
    candidates = (PACKAGE / name, PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir() and any(candidate.glob(marker)):
            return candidate
    places = " nor ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(f"no {marker} in {places}: the installation of parity-rl is incomplete; install it again")
