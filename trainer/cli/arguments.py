"""Words after a command -> its arguments: those of a recipe, or key=value of a command that composes no config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms.config import ConfigError, Problem
from algorithms.config.home import from_home
from trainer.cli.parsers import BEST, DRY_RUN, ON, PARSERS
from trainer.compose.overrides import long_form
from trainer.compose.unknown_keys import nearest
from trainer.limits.gpus import Gpus, gpus_named

CFG = "--cfg"
SHOWING = ("--resolve", "--package")
"""Flags that say what --cfg shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeArguments:
    """Arguments of a command that takes a recipe, or a run in its place, and overrides."""

    recipe: str
    """The first word that is no flag, as given."""
    overrides: tuple[str, ...]
    own_dir: Path | None
    """Directory given by --config-dir, if the directory exists."""
    dry_run: bool
    elsewhere: Gpus | None
    """GPUs for which the plan is to be printed, and no run started."""
    multirun: bool
    best: bool
    shows_config: bool
    """True if the composed config is to be printed, and no run started."""
    resolves: bool
    """True if it is printed with interpolations filled in."""
    package: str | None
    """The key of the part that is printed; None for all of it."""


def parse_recipe(words: Sequence[str], *, command: str = "train") -> tuple[RecipeArguments, list[Problem]]:
    """Sort the words of `command`, at least one of which is no flag; every unusable flag becomes a Problem."""
    parsed, problems = PARSERS[command].read(words)
    own_dir = None
    try:
        own_dir = None if parsed.config_dir is None else Path(from_home(parsed.config_dir, key="--config-dir"))
    except ConfigError as error:
        problems += error.problems
    if own_dir is not None and not own_dir.is_dir():
        problems.append(Problem(key="--config-dir", rule="must be an existing directory", value=str(own_dir)))
        own_dir = None
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(parsed).items() if value}
    runs = [flag for flag in (DRY_RUN, ON, "--multirun") if flag in given][:1]
    if CFG in given and runs:
        problems.append(
            Problem(key="flags", rule="cannot be combined", value=f"{CFG} {runs[0]}", remedy="Use one of them.")
        )
    for flag in SHOWING:
        if flag in given and CFG not in given:
            rule = f"has no effect without {CFG}"
            problems.append(Problem(key=flag, rule=rule, value=flag, remedy=f"Add {CFG} job."))
    elsewhere = gpus_named(given[ON], flag=ON) if ON in given else None
    if isinstance(elsewhere, Problem):
        problems.append(elsewhere)
        elsewhere = None
    recipe, *overrides = parsed.words or [""]
    arguments = RecipeArguments(
        recipe=recipe,
        overrides=long_form(overrides),
        own_dir=own_dir,
        dry_run=DRY_RUN in given,
        elsewhere=elsewhere,
        multirun="--multirun" in given,
        best=BEST in given,
        shows_config=CFG in given,
        resolves="--resolve" in given,
        package=given.get("--package"),
    )
    return arguments, problems


def given_words(words: Sequence[str]) -> dict[str, str]:
    """Key -> value of the words of the form key=value. Raises ConfigError for a ~ of an unknown user."""
    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    return {key: from_home(value, key=key) for key, value in pairs}


def unknown_word(key: str, value: str, *, known: Sequence[str], command: str) -> Problem:
    """The problem of a key that `command` does not take; `known` are those that it takes."""
    close = nearest(key, known)
    hint = f"Did you mean {close}? " if close else ""
    keys = ", ".join(f"{name}=" for name in known)
    return Problem(key=key, rule=f"is not a word of {command}", value=value, remedy=f"{hint}It takes {keys}.")
