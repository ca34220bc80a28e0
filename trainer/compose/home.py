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


def expand_homes(root: DictConfig, kinds: Mapping[str, type]) -> tuple[dict[str, object], list[Problem]]:
    """Expand the paths of the sections `kinds` of `root`, and of Hydra's directory of a sweep, in place.

    Returns (key -> value of each key that has changed, problems of users that this machine does not have).
    """
    changed: dict[str, object] = {}
    problems: list[Problem] = []
    for name, kind in kinds.items():
        if name in root.keys():  # noqa: SIM118 - a key whose value is missing (???) counts as present
            _expand_section(root._get_node(name), kind, name, changed, problems)
    section, _, name = SWEEP_DIR.rpartition(".")
    sweep = OmegaConf.select(root, section)
    if isinstance(sweep, DictConfig):
        with read_write(sweep):
            _expand_key(sweep, name, SWEEP_DIR, changed, problems)
    return changed, problems


def _expand_section(node: object, kind: type, key: str, changed: dict[str, object], problems: list[Problem]) -> None:
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
        return  # `read_section` reports it
    for name, hint in get_type_hints(kind).items():
        if name not in node.keys():  # noqa: SIM118 - as above
            continue
        if name in path_fields(kind):
            must = path_fields(kind)[name] == NAMES_PATHS
            _expand_key(node, name, f"{key}.{name}", changed, problems if must else [])
        elif isinstance(hint, type) and issubclass(hint, Checked):
            _expand_section(node._get_node(name), hint, f"{key}.{name}", changed, problems)


def _expand_key(node: DictConfig, name: str, key: str, changed: dict[str, object], problems: list[Problem]) -> None:
    if _expand(node, name, key, problems):
        changed[key] = OmegaConf.to_container(node, resolve=False)[name]  # type: ignore[index, call-overload]


def _expand(node: Any, name: str | int, key: str, problems: list[Problem]) -> bool:
    """Expand one value of a mapping or a list, or all values that it holds; True if one has changed."""
    try:
        value = node[name]
    except OmegaConfBaseException:  # `read_section` reports it
        return False
    if isinstance(value, DictConfig | ListConfig):
        inner = range(len(value)) if isinstance(value, ListConfig) else list(map(str, value))
        return any([_expand(value, each, f"{key}.{each}", problems) for each in inner])
    if not isinstance(value, str) or not value.startswith("~"):
        return False
    try:
        node[name] = escaped(from_home(value, key=key))
    except ConfigError as error:
        problems += error.problems
        return False
    return True
