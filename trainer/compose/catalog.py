"""Recipe files -> cards for `parity recipes`, and a name on the command line -> the file of the recipe.

A recipe is a Hydra primary config whose leading comment states its purpose, one `# Field: text` per line with the
fields of `RecipeCard`; a line with more indentation continues the field above. `trainer/cli/commands.py` uses the
cards; `compose.py` composes a recipe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from yaml import YAMLError

from algorithms.config import ConfigError, Problem
from algorithms.config.home import from_home
from trainer.compose.unknown_keys import nearest
from trainer.config.paths import MAIN_CONFIG, recipe_dir
from trainer.rundir.run_dir import CONFIG_FILE
from trainer.text.plain import command_line
from trainer.text.yaml_text import load_yaml

SUFFIX = ".yaml"
CONTINUED = "#   "
UNSTATED = "not stated"
_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCard:
    """The fields of a recipe's header."""

    name: str
    """Name of the recipe as the argument of `parity train`."""
    question: str
    """Question that the run answers."""
    hardware: str
    """Hardware that the run needs."""
    expected: str
    """Expected result and duration of the run."""
    source: str
    """Origin of the recipe's values and differences from this origin; Parity's own values if not stated."""
    verified: str
    """Statement whether and on which machine the recipe was run: "no, ..." or "yes, ..."."""


def read_card(path: Path) -> RecipeCard:
    """Read the header of the recipe at `path`; a missing field reads "not stated"."""
    stated = {field: UNSTATED for field in ("question", "hardware", "expected", "source", "verified")}
    last = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        field, colon, rest = line.removeprefix("#").partition(":")
        if colon and field.strip().lower() in stated:
            last = field.strip().lower()
            stated[last] = rest.strip()
        elif last and line.startswith(CONTINUED):
            stated[last] = f"{stated[last]} {line.removeprefix('#').strip()}"
        else:
            last = ""
    return RecipeCard(name=path.stem, **stated)


def recipe_files(directory: Path) -> dict[str, Path]:
    """Name -> file of every recipe in `directory`, sorted by name."""
    return {path.stem: path for path in sorted(directory.glob(f"*{SUFFIX}"))}


def find_recipe(given: str, *, own_dir: Path | None) -> Path | Problem:
    """The file that `given` names: a path to a YAML file, a recipe of `own_dir`, or a recipe of the project.

    Returns a Problem with the nearest name if no file has the name.
    """
    if given.endswith((SUFFIX, ".yml")) or "/" in given:
        try:
            path = Path(from_home(given, key="recipe"))
        except ConfigError as error:
            return error.problems[0]
        if path.suffix != SUFFIX:
            remedy = f"Rename the file to {path.with_suffix(SUFFIX)}." if path.is_file() else ""
            if (path / CONFIG_FILE).is_file():
                goes_on = command_line("parity", "resume", given)
                remedy = f"It is a run: {goes_on} goes on with it, {path / CONFIG_FILE} is its recipe."
            rule = f"must be the name of a recipe or end in {SUFFIX}"
            return Problem(key="recipe", rule=rule, value=given, remedy=remedy)
        if not path.is_file():
            close = nearest(path.name, [beside.name for beside in path.parent.glob(f"*{SUFFIX}")])
            hint = f"Did you mean {path.with_name(close)}? " if close else ""
            return Problem(key="recipe", rule="must be an existing file", value=given, remedy=hint + _names(own_dir))
    else:
        found = _known(own_dir)
        if given not in found:
            close = nearest(given, found)
            alike = [close] if close else [name for name in found if given.lower() in name]
            hint = f"Did you mean {' or '.join(alike)}? " if alike else ""
            if (file := Path(f"{given}{SUFFIX}")).is_file():
                hint = f"Write {file} for the file in this directory. "
            return Problem(key="recipe", rule="is not known", value=given, remedy=hint + _names(own_dir))
        path = found[given]
    if path.stem == MAIN_CONFIG:
        return Problem(
            key="recipe",
            rule=f"must not be called {MAIN_CONFIG}{SUFFIX}: that is what recipes start from",
            value=given,
            remedy="Rename the file.",
        )
    return path.resolve()


def recipe_name(path: Path) -> str:
    """Name of the recipe in the file `path`: of the file, or for the config.yaml of a run the one that the run had."""
    try:
        record = load_yaml(path.read_text(encoding="utf-8")) if path.name == CONFIG_FILE else None
    except (OSError, ValueError, YAMLError):  # the composition reports it
        record = None
    run = record.get("run") if isinstance(record, dict) else None
    name = str(run.get("recipe", "")) if isinstance(run, dict) else ""
    return name if _NAME.fullmatch(name) else path.stem


def _known(own_dir: Path | None) -> dict[str, Path]:
    """Name -> file of all recipes; the user's own recipes hide recipes of the project with the same name."""
    return recipe_files(recipe_dir()) | ({} if own_dir is None else recipe_files(own_dir))


def _names(own_dir: Path | None) -> str:
    return f"Recipes: {', '.join(sorted(_known(own_dir)))}; or a path to a {SUFFIX} file."
