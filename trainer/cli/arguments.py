"""Words after `parity train` -> TrainArguments: the recipe, Hydra's flags, ours, and the overrides.

Hydra's own parser reads the words, so that every flag of Hydra means what Hydra says; flags may stand anywhere.
Used by `commands.py`; `launch.py` hands `hydra_words` to hydra.main.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser

from algorithms.config import Problem
from trainer.compose.keys import nearest
from trainer.compose.overrides import long_form
from trainer.compose.renamed import renamed_hint

DRY_RUN = "--dry-run"
INSPECTIONS = ("--cfg", "--info", "--hydra-help", "--help")
"""Flags that show something and run nothing."""
REFUSED_FLAGS = {
    "config_name": ("--config-name", "has no effect: the recipe is the config", "Name the recipe instead."),
    "config_path": ("--config-path", "has no effect: the recipe's directory is the path", "Use --config-dir."),
    "experimental_rerun": (
        "--experimental-rerun",
        "is refused: it unpickles a file, which can run code",
        "Start the recipe again with the same overrides.",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArguments:
    """What `parity train` was asked."""

    recipe: str
    """As given: a name or a path."""
    overrides: tuple[str, ...]
    own_dir: Path | None
    """--config-dir, if it exists."""
    dry_run: bool
    multirun: bool
    inspection: str | None
    """The flag of INSPECTIONS that was given."""
    hydra_flags: tuple[str, ...]
    """Flags for hydra.main, without --config-dir, which the search path holds already."""


def parse_train(words: Sequence[str]) -> tuple[TrainArguments, list[Problem]]:
    """Sort the words, at least one of which is no flag; every flag that cannot be used becomes a Problem."""
    problems: list[Problem] = []
    parser = get_args_parser()
    parser.add_argument(DRY_RUN, action="store_true")
    parser.exit_on_error = False
    remaining = list(words)
    try:
        parsed, unknown = parser.parse_known_intermixed_args(remaining)
        unknown = [word for word in unknown if word.startswith("-")]
        if unknown:
            # What stands behind an unknown flag was not sorted: sort again without it.
            remaining = [word for word in remaining if word not in unknown]
            parsed, _ = parser.parse_known_intermixed_args(remaining)
    except argparse.ArgumentError as error:
        # Which words belong to the flag is not known, so nothing can be said about overrides.
        problems.append(Problem(key="flags", rule=f"cannot be read ({error})", value=" ".join(words)))
        parsed, unknown = parser.parse_args([word for word in words if not word.startswith("-")][:1]), []
    problems += [_unknown_flag(flag, parser) for flag in unknown]
    problems += _refused(parsed)
    own_dir = None if parsed.config_dir is None else Path(parsed.config_dir)
    if own_dir is not None and not own_dir.is_dir():
        problems.append(Problem(key="--config-dir", rule="must be an existing directory", value=str(own_dir)))
        own_dir = None
    given = vars(parsed)
    inspections = [flag for flag in INSPECTIONS if given[flag[2:].replace("-", "_")]]
    problems += _contradictions(parsed, inspections)
    recipe, *overrides = parsed.overrides or [""]
    arguments = TrainArguments(
        recipe=recipe,
        overrides=long_form(overrides),
        own_dir=own_dir,
        dry_run=parsed.dry_run,
        multirun=parsed.multirun,
        inspection=inspections[0] if inspections else None,
        hydra_flags=_hydra_flags(parsed),
    )
    return arguments, problems


def _unknown_flag(flag: str, parser: argparse.ArgumentParser) -> Problem:
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    name = flag.partition("=")[0]
    close = nearest(name, known)
    hint = f"Did you mean {close}? " if close else ""
    renamed = renamed_hint([name.lstrip("-")])
    if renamed:
        hint = f"{renamed} "
    return Problem(key="flag", rule="is not known", value=flag, remedy=f"{hint}See parity train --help.")


def _refused(parsed: argparse.Namespace) -> list[Problem]:
    given = vars(parsed)
    return [
        Problem(key=flag, rule=rule, value=given[name], remedy=remedy)
        for name, (flag, rule, remedy) in REFUSED_FLAGS.items()
        if given[name] is not None
    ]


def _contradictions(parsed: argparse.Namespace, inspections: list[str]) -> list[Problem]:
    """Flags that exclude each other, and flags that have no effect without another."""
    modes = [*inspections]
    modes += ["--run"] if parsed.run else []
    modes += ["--multirun"] if parsed.multirun and not parsed.dry_run else []
    modes += [DRY_RUN] if parsed.dry_run else []
    problems = []
    if len(modes) > 1:
        problems.append(
            Problem(key="flags", rule="cannot be combined", value=" ".join(modes), remedy="Use one of them.")
        )
    for flag, present in (("--resolve", parsed.resolve), ("--package", parsed.package is not None)):
        if present and parsed.cfg is None:
            problems.append(Problem(key=flag, rule="has no effect without --cfg", value=flag, remedy="Add --cfg job."))
    return problems


def _hydra_flags(parsed: argparse.Namespace) -> tuple[str, ...]:
    """The flags that hydra.main gets, in their long form."""
    given = vars(parsed)
    switches = ("run", "multirun", "resolve", "help", "hydra_help")
    flags = [f"--{name.replace('_', '-')}" for name in switches if given[name]]
    for name in ("cfg", "package", "info"):
        if given[name] is not None:
            flags += [f"--{name}", given[name]]
    return tuple(flags)
