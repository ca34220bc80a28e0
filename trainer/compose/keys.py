"""What the keys of a configuration are: which exist, what they accept, which one was meant. Gives Problems.

Reads the types of the config dataclasses, never their values. Used by `compose.py` and `diagnose.py`.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from algorithms.config import Checked, Problem
from trainer.compose.renamed import renamed_hint
from trainer.config.train import GROUPS, TrainConfig

WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def field_names(kind: type) -> list[str]:
    """Keys of a config class, in the order of its definition."""
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def accepted(hint: Any) -> str:
    """What a field annotated with `hint` accepts, in words: "a number", "one of token, sequence"."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(accepted(option) for option in get_args(hint))
    if get_origin(hint) is list:
        return f"a list, each entry {accepted(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a mapping of names to values"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    if isinstance(hint, type) and issubclass(hint, Checked):
        return "a mapping of its keys to values"
    return WORDS[hint]


def enum_names(hint: Any) -> list[str]:
    """Names that a field annotated with `hint` accepts; empty if it is not an enumeration."""
    options = get_args(hint) or (hint,)
    enums = [option for option in options if isinstance(option, type) and issubclass(option, Enum)]
    return [member.name for enum in enums for member in enum]


def node_type(root: DictConfig, path: Sequence[str]) -> type | None:
    """Config class of the node at `path`; None if it is not chosen yet, is a plain mapping, or is no mapping."""
    node: Any = root
    for part in path:
        if not isinstance(node, DictConfig) or part not in node or OmegaConf.is_missing(node, part):
            return None
        node = node._get_node(part)
    kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
    return kind if kind is not None and is_dataclass(kind) else None


def option_name(group: str, kind: type) -> str | None:
    """Option of `group` whose class is `kind`, for example "tis"."""
    return next((name for name, option in GROUPS[group].items() if option is kind), None)


def options_with(group: str, key: str) -> list[str]:
    """Options of `group` that have `key`, for example ["tis", "bypass"]."""
    return [name for name, option in GROUPS[group].items() if key in field_names(option)]


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The most similar of `known`, if any is similar."""
    close = difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def did_you_mean(path: Sequence[str], root: DictConfig) -> str:
    """A sentence with the key that was probably meant; empty if none is similar.

    A key of the same name elsewhere comes first: `lr` and `batch.lr` both mean `optim.lr`.
    """
    sections = field_names(TrainConfig)
    leaves = [f"{part}.{name}" for part in sections for name in field_names(node_type(root, [part]) or object)]
    # The first section that has a name wins: num_steps means run.num_steps.
    by_name = {leaf.rpartition(".")[2]: leaf for leaf in reversed(leaves)}
    holder, name = path[0], path[-1]
    section = nearest(holder, sections)
    if holder not in sections and section is not None and len(path) > 1:
        return did_you_mean([section, *path[1:]], root) or f"Did you mean {section}?"
    if holder in sections:
        siblings = field_names(node_type(root, path[:-1]) or object)
        beside = nearest(name, siblings)
        close = by_name.get(name) or (beside and ".".join([*path[:-1], beside])) or by_name.get(_nearest(name, by_name))
    else:
        close = by_name.get(name) or section or by_name.get(_nearest(name, by_name))
    return f"Did you mean {close}?" if close else ""


def _nearest(word: str, known: Iterable[str]) -> str:
    """As `nearest`, with "" for none."""
    return nearest(word, list(known)) or ""


def _sections() -> str:
    return f"Sections: {', '.join(field_names(TrainConfig))}."


def sections_once(problems: Sequence[Problem]) -> list[Problem]:
    """The same `problems`; of those that end with the list of sections only the last one keeps it."""
    sections, kept = _sections(), list(problems)
    listed = [index for index, problem in enumerate(kept) if problem.remedy.endswith(sections)]
    for index in listed[:-1]:
        kept[index] = replace(kept[index], remedy=kept[index].remedy.removesuffix(sections).rstrip())
    return kept


def unknown_key(path: Sequence[str], depth: int, value: object, *, root: DictConfig) -> Problem:
    """The Problem of `path`, whose part number `depth` is not a key of the config that holds it."""
    key, holder, name = ".".join(path), ".".join(path[:depth]), path[depth]
    renamed = renamed_hint(list(path))
    if not holder:
        hint = renamed or did_you_mean(path, root)
        return Problem(key=key, rule="is not a key", value=value, remedy=f"{hint} {_sections()}".strip())
    kind = node_type(root, path[:depth]) or object
    own = ", ".join(field_names(kind)) or "none"
    if holder in GROUPS:
        option = option_name(holder, kind)
        elsewhere = ", ".join(f"{holder}={other}" for other in options_with(holder, name))
        hint = f"It belongs to {elsewhere};" if elsewhere else renamed or _meant_in_group(path, root)
        rule = f"is not a key of {holder}={option}"
        return Problem(key=key, rule=rule, value=value, remedy=f"{hint} keys of {option}: {own}.".strip())
    hint = renamed or did_you_mean(path, root)
    return Problem(key=key, rule=f"is not a key of {holder}", value=value, remedy=f"{hint} Its keys: {own}.".strip())


def _meant_in_group(path: Sequence[str], root: DictConfig) -> str:
    """As `did_you_mean` for a key of a group, where the key of another option may be meant."""
    group, name = path[0], path[1]
    if nearest(name, field_names(node_type(root, [group]) or object)) is None:
        of_options = {key: option for option, kind in reversed(GROUPS[group].items()) for key in field_names(kind)}
        close = nearest(name, list(of_options))
        if close is not None:
            return f"Did you mean {group}.{close} of {group}={of_options[close]}?"
    return did_you_mean(path, root)


def key_problem(path: Sequence[str], value: object, *, root: DictConfig, adding: bool) -> Problem | None:
    """The Problem of a key that does not exist; None if `path` can be set.

    `adding`: whether the key may be new where a mapping is open (rollout.engine_args): "+key" or a YAML file.
    """
    node: Any = root
    for depth, part in enumerate(path):
        key = ".".join(path)
        holder = ".".join(path[:depth])
        if not isinstance(node, DictConfig):
            return Problem(key=key, rule=f"is not a key: {holder} is a single value", value=value)
        kind = OmegaConf.get_type(node)
        if is_dataclass(kind) and part not in field_names(kind):
            return unknown_key(path, depth, value, root=root)
        if not is_dataclass(kind) and part not in node:
            if adding:
                return None
            return Problem(key=key, rule=f"is not set in {holder}", value=value, remedy=f"Add it with +{key}=...")
        if OmegaConf.is_missing(node, part):
            return _unchosen(path, value) if depth + 1 < len(path) and part in GROUPS else None
        node = node._get_node(part)
    return None


def _unchosen(path: Sequence[str], value: object) -> Problem:
    """The Problem of a key below a group in which nothing is chosen."""
    group, name = path[0], path[1]
    options = options_with(group, name) or list(GROUPS[group])
    remedy = f"Use {' or '.join(f'{group}={option}' for option in options)}."
    return Problem(key=".".join(path), rule=f"needs a choice of {group}", value=value, remedy=remedy)


def wrong_value(path: Sequence[str], value: object, *, root: DictConfig, reason: str) -> Problem:
    """The Problem of a value that the existing key at `path` refuses; `reason` is used where the type says nothing."""
    key = ".".join(path)
    kind = node_type(root, path[:-1])
    if kind is None:
        return Problem(key=key, rule=f"refuses the value ({reason})", value=value)
    hint = get_type_hints(kind)[path[-1]]
    if key in GROUPS:
        options = " or ".join(f"{key}={name}" for name in GROUPS[key])
        return Problem(key=key, rule="must be chosen on the command line or in defaults", value=value, remedy=options)
    names = enum_names(hint)
    close = nearest(str(value), names) if names else None
    remedy = f"Did you mean {key}={close}?" if close else ""
    if isinstance(hint, type) and issubclass(hint, Checked):
        remedy = f"Its keys: {', '.join(f'{key}.{name}' for name in field_names(hint))}."
    return Problem(key=key, rule=f"must be {accepted(hint)}", value=value, remedy=remedy)
