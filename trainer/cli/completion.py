"""Shell completion: beginning of a command line -> possible next words.

`eval "$(parity -sc install=bash)"` makes the shell call `parity -sc query=bash` with the line in $COMP_LINE. This
module completes commands and recipes; Hydra completes the words after a recipe, from the composed config. The imports
that take long are in the branches that need them: the shell waits for the answer at every TAB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.cli.parsers import COMPLETION, PARSERS
from trainer.compose.catalog import find_recipe, recipe_files
from trainer.compose.keys import field_names
from trainer.compose.outcome import DONE, refuse
from trainer.config.paths import MAIN_CONFIG, config_dir, recipe_dir
from trainer.rundir.weights_source import KEY
from trainer.text.plain import to_stdout

LINE = "COMP_LINE"
"""Environment variable in which the shell passes the line up to the cursor."""
COMPOSING = ("train", "study", "eval")
"""Commands that take a recipe and overrides."""
OWN_WORDS = ("study.", f"{KEY}=")
"""Prefixes of words that a command reads itself and does not pass to Hydra."""


def complete(words: Sequence[str]) -> int:
    """Answer `parity -sc install=SHELL | uninstall=SHELL | query=SHELL`."""
    arguments = [word for word in words if word not in COMPLETION]
    if len(arguments) == 1 and arguments[0].startswith(("install=", "uninstall=")):
        _ask_hydra(config_dir() / f"{MAIN_CONFIG}.yaml", arguments)
        return DONE
    if len(arguments) != 1 or not arguments[0].startswith("query=") or LINE not in os.environ:
        remedy = 'eval "$(parity -sc install=bash)"; also zsh and fish.'
        return refuse("parity", "-sc", "must be followed by install=SHELL", " ".join(arguments), remedy)
    _query(arguments[0], os.environ[LINE])
    return DONE


def _query(query: str, line: str) -> None:
    """Write the words that may stand at the end of `line`, separated by spaces."""
    typed = line.split()[1:] + ([""] if not line or line[-1].isspace() else [])
    last = typed[-1] if typed else ""
    if len(typed) <= 1:
        _offer(list(PARSERS), last)
    elif last.startswith("-") and typed[0] in PARSERS:
        _offer(PARSERS[typed[0]].flags, last)
    elif typed[0] == "replay" and len(typed) > 2:
        from trainer.cli.replay import replay_completions

        _offer(replay_completions(typed), last)
    elif typed[0] not in COMPOSING:
        return
    elif len(typed) == 2:
        files = [path.name for path in Path().glob("*.yaml")] if last else []
        _offer([*recipe_files(recipe_dir()), *files], last)
    else:
        own = [word for word in _own_words(typed[0]) if last and word.startswith(last)]
        if own:
            _offer(own, last)
        recipe = find_recipe(typed[1], own_dir=None)
        if isinstance(recipe, Path) and not last.startswith(OWN_WORDS):
            # Hydra cannot parse Parity's own flags and words that are not keys of the config.
            rest = [word for word in typed[2:] if not word.startswith(("--", *OWN_WORDS))]
            os.environ[LINE] = " ".join(["parity", *rest])
            _ask_hydra(recipe, [query])


def _ask_hydra(recipe: Path, words: Sequence[str]) -> None:
    """Let Hydra complete for the recipe in the file `recipe`, as if `-sc` and `words` were the command line."""
    import hydra

    from trainer.compose.hydra_session import VERSION_BASE, register

    def job(composed: object) -> None:
        raise RuntimeError("Hydra started a job where it should only complete a word")

    register(None)
    decorated: Callable[[], object] = hydra.main(
        version_base=VERSION_BASE, config_path=str(recipe.parent), config_name=recipe.stem
    )(job)
    command_line, sys.argv = sys.argv, [sys.argv[0], "-sc", *words]
    try:
        decorated()
    finally:
        sys.argv = command_line


def _own_words(command: str) -> list[str]:
    """The words that a command reads itself."""
    if command == "study":
        from trainer.study.config import StudyConfig

        return [f"study.{key}=" for key in field_names(StudyConfig)]
    return [f"{KEY}="] if command == "eval" else []


def _offer(candidates: Sequence[str], start: str) -> None:
    to_stdout(" ".join(word for word in candidates if word.startswith(start)) + "\n")
