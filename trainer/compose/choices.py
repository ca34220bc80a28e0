"""Choices that stand in a user's own file, in the keys of a config: `level=path/to/file.py:Name`.

A key that accepts them says so by its type, `Level | CustomLevel` or `list[CustomCriterion]`. Its value is the name of
the class, or {use: name, key: value} with keys of the class, which are checked like all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, reduce
from operator import or_
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.config import Checked, Custom
from algorithms.config.custom import USE, written
from algorithms.config.home import from_home
from rollout.user_code.custom_class import load_class

Kind = TypeVar("Kind", bound=Custom)


def plain_values(config: Any) -> dict[str, object]:
    """Keys and defaults of a config class, or of an instance, without types: enum members become their names."""
    values = {}
    for spec in fields(config):
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        value = written(default if isinstance(config, type) else getattr(config, spec.name))
        if isinstance(value, Enum):
            value = value.name
        values[spec.name] = plain_values(value) if is_dataclass(value) else value
    return values


def own_class(choice: str, base: type[Kind], *, key: str) -> type[Kind]:
    """The class that a `path.py:Name` names. Raises ValueError, with the rule that is broken, for one that cannot be a
    part of a config, and ConfigError for a home directory that this machine does not have."""
    kind = load_class(from_home(choice, key=key), base)
    kind.source = choice
    found: type = kind
    try:
        convertible(found)
    except OmegaConfBaseException as error:
        types = "bool, int, float, str, an Enum, lists and dicts of these"
        rule = f"must name a class whose fields have types of a config, {types}: {str(error).splitlines()[0]}"
        raise ValueError(rule) from error
    return kind


def custom_kind(hint: Any) -> type[Custom] | None:
    """The base of the user's classes that a field of this type accepts, by itself or in a list; None for none."""
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Custom)]
    return kinds[0] if kinds else None


def holds_list(hint: Any) -> bool:
    """True if the field holds a list."""
    return get_origin(hint) is list


def own_choice(value: object) -> tuple[str, dict[str, object]] | None:
    """(`path.py:Name`, keys) of a value that names a class of the user's own; None for any other value."""
    if isinstance(value, str) and ":" in value:
        return value, {}
    if isinstance(value, dict) and isinstance(value.get(USE), str):
        return value[USE], {key: inner for key, inner in value.items() if key != USE}
    return None


def without_choices(node: Any, kind: type, key: str, unneeded: tuple[str, ...]) -> None:
    """Put the default where the mapping `node` of a `kind`, at `key`, names a class of the user's own that is below one
    of the keys `unneeded`."""
    hints = get_type_hints(kind)
    present = (
        set(map(str, node)) if isinstance(node, DictConfig) and not (node._is_none() or node._is_missing()) else set()
    )
    for name in [spec.name for spec in fields(kind) if spec.name in present]:
        value, hint = node._get_node(name), hints[name]
        if isinstance(hint, type) and issubclass(hint, Checked):
            without_choices(value, hint, f"{key}{name}.", unneeded)
        elif custom_kind(hint) and value is not None and f"{key}{name}".startswith(unneeded):
            given = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value._value()
            if own_choice(given) or isinstance(given, list):
                node[name] = plain_values(kind)[name]


@cache
def convertible(kind: type[Any]) -> DictConfig:
    """The fields of `kind` that OmegaConf can convert, each without the user's classes: a value that is put in a field,
    and read again at once, has the type of the field. What a field holds otherwise is what was put there last."""
    made: DictConfig = OmegaConf.structured(make_dataclass(kind.__name__, list(_convertible(kind)), kw_only=True))
    return made


def _convertible(kind: type) -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(kind)
    for spec in fields(kind):
        hint = hints[spec.name]
        if custom_kind(hint):
            parts = [part for part in get_args(hint) if not custom_kind(part)]
            if holds_list(hint) or parts == [type(None)]:
                continue
            hint = reduce(or_, parts)
        yield spec.name, hint, spec
