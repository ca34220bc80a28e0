"""A composition that Hydra refused -> every error in it, each with its file or override, key and nearest match.

Hydra stops at the first error. Here the same files and overrides are merged again, one key at a time, and what
cannot be merged is left out and reported; `compose.py` then checks the rules on what is left.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.config import Problem
from trainer.compose import keys
from trainer.compose.session import SCHEMA, empty_root
from trainer.config.paths import MAIN_CONFIG
from trainer.config.train import GROUPS

OVERRIDE_PREFIX = "override "
"""In a defaults list, `override /model: hf` replaces the choice that an earlier entry made."""


def diagnose(
    recipe: Path, overrides: Sequence[Override], *, loader: ConfigLoader, failure: Exception
) -> tuple[DictConfig | None, list[Problem]]:
    """Merge what can be merged and return it with a Problem for everything that cannot.

    `overrides` hold no sweep. `failure`, Hydra's own error, is reported if no other cause is found. The config is
    None if not even the defaults list of the recipe could be read.
    """
    problems = [found for override in overrides if (found := _hydra_problem(override, loader)) is not None]
    ours = [override for override in overrides if not override.is_hydra_override()]
    choices = _given_choices([o for o in ours if o.key_or_group in GROUPS], loader=loader, problems=problems)
    choices |= _repaired_choices(recipe, given=set(choices), loader=loader, problems=problems)
    try:
        defaults = loader.compute_defaults_list(recipe.stem, list(choices.values()), RunMode.RUN).defaults
    except Exception as error:  # No YAML, a missing file, a cycle: without defaults nothing below can be checked.
        return None, [*problems, as_problem(error, recipe)]
    found = order_problem(recipe, defaults)
    if found is not None:
        return None, [*problems, found]
    root = empty_root()
    for default in defaults:
        problems += _merge_default(default, root, loader=loader)
    for override in ours:
        if override.key_or_group not in GROUPS:
            problems += _apply_override(override, root)
    return root, problems or [as_problem(failure, recipe)]


def order_problem(recipe: Path, defaults: Sequence[ResultDefault]) -> Problem | None:
    """The Problem of a recipe that does not start from configs/train.yaml, or whose own keys would be overwritten."""
    order = [default.config_path for default in defaults]
    if SCHEMA in order and MAIN_CONFIG in order and order.index(recipe.stem) > order.index(MAIN_CONFIG):
        return None
    return Problem(
        key=f"{recipe}: defaults",
        rule=f"must begin with /{MAIN_CONFIG} and end with _self_",
        value=[path for path in order if path is not None and not path.startswith("hydra/")],
        remedy=f"For example defaults: [/{MAIN_CONFIG}, override /model: hf, override /data: file, _self_].",
    )


def as_problem(error: Exception, recipe: Path) -> Problem:
    """An error of Hydra, OmegaConf, YAML or the file system as one sentence about the recipe."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).splitlines()[0])
    # Where Hydra looked is of no use to a user who named a recipe.
    noise = ("provider=", "Config search path", "full_key", "object_type", "reference_type")
    shown = "; ".join(line for line in lines if not line.startswith(noise))
    return Problem(key="recipe", rule=f"cannot be composed ({shown})", value=str(recipe))


def _hydra_problem(override: Override, loader: ConfigLoader) -> Problem | None:
    """The Problem of an override of Hydra's own config, found by composing with nothing else."""
    if not override.is_hydra_override() or override.input_line is None:
        return None
    try:
        loader.load_configuration(MAIN_CONFIG, [override.input_line], RunMode.RUN)
    except HydraException as error:
        remedy = "parity train <recipe> --cfg hydra shows the keys of Hydra."
        reason = str(error).splitlines()[0]
        return Problem(
            key=override.key_or_group, rule=f"is refused by Hydra ({reason})", value=override.value(), remedy=remedy
        )
    return None


def _given_choices(chosen: list[Override], *, loader: ConfigLoader, problems: list[Problem]) -> dict[str, str]:
    """Group -> override that chooses on the command line. A misspelt option is reported and replaced with the nearest
    one, so that the keys below it can be checked; if nothing is near, the recipe's choice stays.
    """
    choices: dict[str, str] = {}
    for override in chosen:
        group, value = override.key_or_group, override.value()
        if override.package is not None or override.is_add() or override.is_force_add():
            rule = "is not how a group is chosen"
            problems.append(
                Problem(key=override.get_key_element(), rule=rule, value=value, remedy=f"Write {group}={value}.")
            )
        elif override.is_delete():
            choices[group] = f"~{group}"
        else:
            option = _checked_option(group, value, where="", loader=loader, problems=problems)
            choices |= {group: f"{group}={option}"} if option is not None else {}
    return choices


def _checked_option(
    group: str, value: object, *, where: str, loader: ConfigLoader, problems: list[Problem]
) -> str | None:
    """`value` if it is an option of `group`; otherwise a Problem is added and the nearest option returned, if any."""
    known = loader.get_group_options(group)
    if value in known:
        return str(value)
    # The set is small, so that less similarity is enough than among all keys.
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"Did you mean {group}={close[0]}?" if close else ""
    rule = f"must be one of {', '.join(known)}"
    problems.append(Problem(key=f"{where}{group}", rule=rule, value=value, remedy=hint))
    return close[0] if close else None


def _repaired_choices(
    recipe: Path, *, given: set[str], loader: ConfigLoader, problems: list[Problem]
) -> dict[str, str]:
    """Report misspelt options in the recipe's own defaults list; return group -> override that stands in for each."""
    try:
        content = OmegaConf.load(recipe)
    except Exception:  # Reported with its line by compute_defaults_list, which reads the file again.
        return {}
    entries = content.get("defaults") if isinstance(content, DictConfig) else None
    repaired: dict[str, str] = {}
    for entry in entries or []:
        for key, value in entry.items() if isinstance(entry, DictConfig) else ():
            group = str(key).removeprefix(OVERRIDE_PREFIX).strip().lstrip("/")
            if group not in GROUPS or group in given or value is None or value in loader.get_group_options(group):
                continue
            option = _checked_option(group, value, where=f"{recipe}: ", loader=loader, problems=problems)
            repaired[group] = f"{group}={option}" if option is not None else f"~{group}"
    return repaired


def _merge_default(default: ResultDefault, root: DictConfig, *, loader: ConfigLoader) -> list[Problem]:
    """Merge one entry of the defaults list into `root`; a Problem for each key of a YAML file that is refused."""
    path = default.config_path
    if path is None or path.startswith("hydra/") or path == SCHEMA:
        return []
    source = next(source for source in loader.get_sources() if source.is_config(path))
    config = source.load_config(path).config
    package = [part for part in (default.package or "").split(".") if part and part != "_global_"]
    if source.scheme() == "structured":
        OmegaConf.update(root, ".".join(package), config, merge=True)
        return []
    content = OmegaConf.to_container(config, resolve=False)
    if not isinstance(content, dict):
        return [Problem(key=f"{source.path}/{path}.yaml", rule="must hold keys and values", value=content)]
    leaves = [_apply(key, value, root, adding=True) for key, value in _leaves(content, package, root)]
    return [replace(found, key=f"{source.path}/{path}.yaml: {found.key}") for found in leaves if found is not None]


def _leaves(content: Mapping[Any, Any], above: list[str], root: DictConfig) -> Iterator[tuple[list[str], object]]:
    """Path and value of what a YAML file sets, as deep as the configs of `root` go."""
    for key, value in content.items():
        path = [*above, str(key)]
        if path[0] in ("hydra", "defaults"):
            continue
        if isinstance(value, Mapping) and keys.node_type(root, path) is not None:
            yield from _leaves(value, path, root)
        else:
            yield path, value


def _apply_override(override: Override, root: DictConfig) -> list[Problem]:
    """Set what a command-line override sets, or say why it cannot be set."""
    path, value = override.key_or_group.split("."), override.value()
    if override.package is not None:
        return [Problem(key=override.get_key_element(), rule="is not a key", value=value, remedy="Leave out the @.")]
    adding = override.is_add() or override.is_force_add()
    if isinstance(value, dict) and keys.node_type(root, path) is not None:
        # reward={correct:2,incorect:1}: each member is a key of its own.
        leaves = [_apply(key, leaf, root, adding=adding) for key, leaf in _leaves(value, path, root)]
        return [found for found in leaves if found is not None]
    found = keys.key_problem(path, value, root=root, adding=adding)
    if found is not None:
        return [found]
    present = OmegaConf.select(root, override.key_or_group, throw_on_missing=False)
    if override.is_add() and present is not None and not isinstance(value, dict | list):
        return [Problem(key=override.get_key_element(), rule="exists already", value=value, remedy="Leave out the +.")]
    if override.is_delete():
        if keys.node_type(root, path[:-1]) is None:
            return []  # an entry of an open mapping: its absence breaks no rule
        return [Problem(key=override.get_key_element(), rule="cannot be removed", value=present)]
    found = _apply(path, value, root, adding=adding)
    return [] if found is None else [found]


def _apply(path: list[str], value: object, root: DictConfig, *, adding: bool) -> Problem | None:
    """Set one key, or say why it cannot be set."""
    found = keys.key_problem(path, value, root=root, adding=adding)
    if found is not None:
        return found
    try:
        OmegaConf.update(root, ".".join(path), value, merge=True, force_add=adding)
    except OmegaConfBaseException as error:
        return keys.wrong_value(path, value, root=root, reason=str(error).splitlines()[0])
    return None
