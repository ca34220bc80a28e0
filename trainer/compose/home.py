"""Composed values -> the same values with home directories for `~`, wherever they come from.

A value may come from a recipe, a word of the command line, Python, or an interpolation such as ${oc.env:DATA}. The tree
is changed before it is read, so that other keys that refer to a path, and the directory of a sweep, agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from algorithms.config import Checked, ConfigError, Problem
from algorithms.config.home import NAMES_PATHS, from_home, path_fields
from trainer.compose.overrides import SWEEP_DIR
from trainer.rundir.provenance import escaped


def expand_homes(root: DictConfig, kinds: Mapping[str, type]) -> list[Problem]:
    """Expand the paths of the sections `kinds` of `root`, and of Hydra's directory of a sweep, in place.

    Returns the problems of users that this machine does not have, of variables of a shell, and of numbers.
    """
    problems: list[Problem] = []
    for name, kind in kinds.items():
        if name in root.keys():  # noqa: SIM118 - a key whose value is missing (???) counts as present
            _expand_section(root._get_node(name), kind, name, problems)
    section, _, name = SWEEP_DIR.rpartition(".")
    sweep = OmegaConf.select(root, section)
    if isinstance(sweep, DictConfig):
        with read_write(sweep):
            _expand(sweep, name, SWEEP_DIR, problems)
    return problems


def _expand_section(node: object, kind: type, key: str, problems: list[Problem]) -> None:
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
        return  # `read_section` reports it
    for name, hint in get_type_hints(kind).items():
        if name not in node.keys():  # noqa: SIM118 - as above
            continue
        if name in path_fields(kind):
            must = path_fields(kind)[name] == NAMES_PATHS
            _expand(node, name, f"{key}.{name}", problems if must else [])
        elif isinstance(hint, type) and issubclass(hint, Checked):
            _expand_section(node._get_node(name), hint, f"{key}.{name}", problems)


def _expand(node: Any, name: str | int, key: str, problems: list[Problem]) -> None:
    """Expand one value of a mapping or a list, or all values that it holds."""
    try:
        value = node[name]
    except OmegaConfBaseException:  # `read_section` reports it
        return
    if isinstance(value, DictConfig | ListConfig):
        for each in range(len(value)) if isinstance(value, ListConfig) else list(map(str, value)):
            _expand(value, each, f"{key}.{each}", problems)
    elif isinstance(value, bool | int | float):
        remedy = "Without quotes it is no text: write it in quotes."
        problems.append(Problem(key=key, rule="must be text", value=value, remedy=remedy))
    elif isinstance(value, str) and value.startswith(("~", "$")):
        try:
            node[name] = escaped(from_home(value, key=key))
        except ConfigError as error:
            problems += error.problems
