"""Where the YAML of the project lives: configs/ and recipes/, in a source tree and in an installed wheel.

In the repository both are top-level directories; a wheel carries them inside the `trainer` package, because
nothing else of a wheel has a place that can be found again. `trainer/compose/compose.py` and
`trainer/compose/catalog.py` use them.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
"""The `trainer` package."""
MAIN_CONFIG = "train"
"""Name of the primary config in `config_dir()`: what every recipe starts from."""


def config_dir() -> Path:
    """Directory of the Hydra configs that every recipe starts from; holds train.yaml."""
    return _find("configs", marker=f"{MAIN_CONFIG}.yaml")


def recipe_dir() -> Path:
    """Directory of the recipes that come with the project."""
    return _find("recipes", marker="*.yaml")


def _find(name: str, *, marker: str) -> Path:
    """The directory `name` that holds a file like `marker`: inside the package, else beside it.

    Raises FileNotFoundError if neither does, which means that the installation is broken.
    """
    # The package comes first: beside an installed package lies site-packages, where "configs" may be anybody's.
    candidates = (PACKAGE / name, PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir() and any(candidate.glob(marker)):
            return candidate
    places = " nor ".join(str(candidate) for candidate in candidates)
    raise FileNotFoundError(f"no {marker} in {places}: the installation of parity-rl is incomplete; install it again")
