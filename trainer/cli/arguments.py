"""Words after `parity train` -> TrainArguments: the recipe, the flags and the overrides. Flags may stand anywhere.

Used by `train.py`; `show.py` passes `hydra_flags` to hydra.main.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms.config import ConfigError, Problem
from algorithms.config.home import from_home
from algorithms.config.rules import describe
from trainer.compose.keys import nearest
from trainer.compose.overrides import long_form
from trainer.compose.renamed import renamed_hint
from trainer.config.train import TrainConfig

DRY_RUN = "--dry-run"
SWITCHES = (DRY_RUN, "--multirun", "--resolve", "--help")
INSPECTIONS = ("--cfg", "--info", "--help")
"""Flags that show information and start no run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArguments:
    """Arguments of `parity train`."""

    recipe: str
    """Name or path of the recipe, as given."""
    overrides: tuple[str, ...]
    own_dir: Path | None
    """Directory given by --config-dir, if the directory exists."""
    dry_run: bool
    multirun: bool
    inspection: str | None
    """Given flag of INSPECTIONS; None without such a flag."""
    hydra_flags: tuple[str, ...]
    """Flags for hydra.main, without --config-dir, which is already in the search path."""


def parse_train(
    words: Sequence[str], *, command: str = "parity train", flags: Sequence[str] = ()
) -> tuple[TrainArguments, list[Problem]]:
    """Sort the words, at least one of which is not a flag; every unusable flag becomes a Problem.

    Another `command` than `parity train` names the `flags` that it can use.
    """
    problems: list[Problem] = []
    parser = _parser()
    try:
        parsed, unknown = parser.parse_known_intermixed_args(words)
        unknown = [word for word in unknown if word.startswith("-")]
        if unknown:
            # Words behind an unknown flag were not sorted: sort again without the flag.
            parsed, _ = parser.parse_known_intermixed_args([word for word in words if word not in unknown])
    except argparse.ArgumentError as error:
        # The words that belong to the flag are unknown, so overrides cannot be checked.
        problems.append(Problem(key="flags", rule=f"cannot be read ({error})", value=" ".join(words)))
        parsed, unknown = parser.parse_args([word for word in words if not word.startswith("-")][:1]), []
    problems += [_unknown_flag(flag, parser, command=command, flags=flags) for flag in unknown]
    own_dir = None
    try:
        own_dir = None if parsed.config_dir is None else Path(from_home(parsed.config_dir, key="--config-dir"))
    except ConfigError as error:
        problems += error.problems
    if own_dir is not None and not own_dir.is_dir():
        problems.append(Problem(key="--config-dir", rule="must be an existing directory", value=str(own_dir)))
        own_dir = None
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(parsed).items() if value}
    inspections = [flag for flag in INSPECTIONS if flag in given]
    runs = [DRY_RUN] if parsed.dry_run else ["--multirun"] if parsed.multirun else []
    if len(inspections + runs) > 1:
        shown = " ".join(inspections + runs)
        problems.append(Problem(key="flags", rule="cannot be combined", value=shown, remedy="Use one of them."))
    for flag in ("--resolve", "--package"):
        if flag in given and parsed.cfg is None:
            rule = "has no effect without --cfg"
            problems.append(Problem(key=flag, rule=rule, value=flag, remedy="Add --cfg job."))
    recipe, *overrides = parsed.words or [""]
    hydra_flags = [flag for flag in SWITCHES[1:] if flag in given]
    for flag in ("--cfg", "--package", "--info"):
        hydra_flags += [flag, given[flag]] if flag in given else []
    arguments = TrainArguments(
        recipe=recipe,
        overrides=long_form(overrides),
        own_dir=own_dir,
        dry_run=parsed.dry_run,
        multirun=parsed.multirun,
        inspection=inspections[0] if inspections else None,
        hydra_flags=tuple(hydra_flags),
    )
    return arguments, problems


def _parser() -> argparse.ArgumentParser:
    """Parser of the flags of `parity train`, which mean the same as Hydra's flags of the same name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("words", nargs="*")
    short = {"--multirun": ["-m"], "--help": ["-h"]}
    for flag in SWITCHES:
        parser.add_argument(flag, *short.get(flag, []), action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=topics)
    return parser


def _unknown_flag(flag: str, parser: argparse.ArgumentParser, *, command: str, flags: Sequence[str]) -> Problem:
    every = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    known = flags or every
    name = flag.partition("=")[0]
    close = nearest(name, known)
    hint = renamed_hint([name.lstrip("-")]) or (f"Did you mean {close}?" if close else "")
    if not hint:
        value = flag.partition("=")[2] or "<value>"
        hint = f"Keys have no dashes: {_key_of(name.lstrip('-'))}={value}."
    return Problem(key="flag", rule="is not known", value=flag, remedy=f"{hint} See {command} --help.".strip())


def _key_of(name: str) -> str:
    """The key of the config that a flag without its dashes means: "num-steps" is run.num_steps; else `name` itself."""
    keys = [each.key for each in describe(TrainConfig)]
    found = [key for key in keys if key.rpartition(".")[2] == name.replace("-", "_")]
    return found[0] if len(found) == 1 and name not in keys else name
