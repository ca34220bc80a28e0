"""Messages about keys: the existing keys, the accepted values, the key that was probably meant.

`kinds` maps each section of a configuration to its config class; the class of a group is the class of the chosen
option. `read.py` uses these functions, which read types only, never values.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from algorithms.config import Checked, Custom, Problem
from algorithms.config.rules import default_text
from algorithms.config.similar import similar
from rollout.user_code.custom_code import similar_custom
from trainer.compose.peers import SYNONYMS, peer_hint
from trainer.config.train import GROUPS, PRESETS, TrainConfig, option_name

Kinds = Mapping[str, type]
_LIST = re.compile(r"(Its keys|[Kk]eys of \S+|Sections): .*\.$")
WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null", Any: "any value"}


def field_names(kind: type) -> list[str]:
    """Keys of a config class, in the order of its definition."""
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that `word` probably means: the same but for upper case, a synonym, or similar; or None."""
    names = {name.lower(): name for name in known}
    lower = word.lower()
    for meant in (lower, *SYNONYMS.get(lower.replace("-", "_"), ())):
        if meant in names:
            return names[meant]
    return similar(word, names.values())


def accepted(hint: Any) -> str:
    """Describe the values that a field annotated with `hint` accepts: "a number", "one of token, sequence"."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(accepted(option) for option in get_args(hint))
    if get_origin(hint) is list:
        return f"a list, each entry {accepted(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return "a mapping of names to values"
    if issubclass(hint, Enum):
        return f"one of {', '.join(member.name for member in hint)}"
    if issubclass(hint, Custom):
        return f"a {hint.__name__} of yours as path/to/file.py:Name"
    return "a mapping of its keys to values" if issubclass(hint, Checked) else WORDS[hint]


def wrong_value(key: str, value: object, hint: Any, *, default: object = "") -> Problem:
    """The Problem of a value that a field annotated with `hint` does not accept."""
    options = [option for option in get_args(hint) or (hint,) if isinstance(option, type)]
    names = [member.name for option in options if issubclass(option, Enum) for member in option]
    close = nearest(str(value), names)
    remedy = f"Did you mean {key}={close}?" if close else default_text(default)
    if isinstance(hint, type) and issubclass(hint, Custom):
        remedy = similar_custom(str(value), ast.ClassDef)
    elif isinstance(hint, type) and issubclass(hint, Checked):
        meant = _key_for(value, hint) if isinstance(value, str) else None
        remedy = f"Did you mean {key}.{meant}={value}? " if meant else ""
        remedy += f"Its keys: {', '.join(f'{key}.{name}' for name in field_names(hint))}."
    elif get_origin(hint) is list and isinstance(value, str | int | float) and "[" not in str(value):
        remedy = f"Write {key}=[{value}]."
    elif hint is str and isinstance(value, list):
        several = f"where the key takes a regular expression {key}='.*({'|'.join(map(str, value))})'"
        if key.endswith("_path"):
            several = f"a pattern of files {key}='DIR/*.jsonl'"
        remedy = f"Write one text, or {several}. {remedy}".rstrip()
    return Problem(key=key, rule=f"must be {accepted(hint)}", value=value, remedy=remedy)


def _key_for(value: str, section: type) -> str | None:
    """The key of a section that a value was probably given for: one with this option, or else its function."""
    kinds = get_type_hints(section)
    options = {
        n: [o for o in (k, *get_args(k)) if isinstance(o, type) and issubclass(o, Enum)] for n, k in kinds.items()
    }
    having = [n for n, found in options.items() for option in found if value in option.__members__]
    return next(iter([*having, *(["function"] if "function" in kinds else [])]), None)


def unknown_section(path: Sequence[str], value: object, kinds: Kinds) -> Problem:
    """The Problem of a key whose first part is not a section."""
    hint = _nested(path, value, kinds) or peer_hint(list(path), value) or did_you_mean(path, [], kinds)
    remedy = hint or f"Sections: {', '.join(field_names(TrainConfig))}."
    return Problem(key=".".join(path), rule="is not a key", value=value, remedy=remedy)


def unknown_key(path: Sequence[str], depth: int, value: object, holder: type, kinds: Kinds) -> Problem:
    """The Problem of a key whose part number `depth` is not a field of `holder`, the class of the earlier parts."""
    own = field_names(holder)
    section = ".".join(path[:depth])
    elsewhere = [name for name, kind in GROUPS.get(section, {}).items() if path[depth] in field_names(kind)]
    hint, of = _nested(path, value, kinds), getattr(holder, "source", "") or section
    peer = "" if hint or elsewhere else peer_hint(list(path), value)
    similar_key = did_you_mean(path, own, kinds, depth)
    if similar_key and not peer.startswith("Here it is"):
        peer = ""  # one letter is wrong: a sentence about another trainer's key would lead away
    hint = hint or peer or similar_key
    described = "" if peer else f"Its keys: {', '.join(own)}."
    if section in GROUPS and not peer:
        option = option_name(section, holder)
        if depth == len(path) - 1 and isinstance(value, str) and (meant := nearest(value, _options(section))):
            hint = f"Write {section}={meant}; in a recipe's defaults, override /{section}: {meant}."
        if elsewhere:
            hint = f"It belongs to {', '.join(f'{section}={name}' for name in elsewhere)};"
        begin = "keys" if elsewhere else "Keys"  # in the middle of a sentence, or at its start
        described, of = f"{begin} of {option}: {', '.join(own) or 'none'}.", f"{section}={option}"
    return Problem(key=".".join(path), rule=f"is not a key of {of}", value=value, remedy=f"{hint} {described}".strip())


def lists_once(problems: Iterable[Problem]) -> list[Problem]:
    """The same problems; the keys of a section, and the sections, are listed in the first that has the list."""
    listed: set[str] = set()
    found = []
    for problem in problems:
        if (keys := _LIST.search(problem.remedy)) and keys[0] in listed:
            problem = replace(problem, remedy=problem.remedy[: keys.start()].rstrip(" ;"))
        listed |= {keys[0]} if keys else set()
        found.append(problem)
    return found


def _options(group: str) -> list[str]:
    """Every option of a group, also the presets."""
    return [*GROUPS[group], *PRESETS.get(group, {})]


def _nested(path: Sequence[str], value: object, kinds: Kinds) -> str:
    """What a name with dots, which only a file can hold, should have been; empty if no name of `path` has one."""
    if not any("." in name for name in path):
        return ""
    section, *inner = names = ".".join(path).split(".")
    if section in kinds and len(inner) == 1 and inner[0] in field_names(kinds[section]):
        return f"A dot in a file makes no section. Write {section}: {{{inner[0]}: {value}}}."
    meant = peer_hint(names, value) or did_you_mean(names, field_names(kinds.get(section, type(None))), kinds)
    return f"A dot in a file makes no section. {meant}".strip()


def did_you_mean(path: Sequence[str], siblings: Sequence[str], kinds: Kinds, depth: int = 1) -> str:
    """A sentence with the key that was probably meant; empty if no key is similar.

    A key of the same name comes first, in the addressed config and then in another section: `critic.optim.lr` means
    `critic.lr`, `lr` and `batch.lr` mean `optim.lr`. `siblings` are the keys of the addressed config, which the first
    `depth` parts name.
    """
    section, name = path[0], path[-1]
    if section not in kinds and len(path) > 1 and (meant := nearest(section, kinds)) is not None:
        return did_you_mean([meant, *path[1:]], field_names(kinds[meant]), kinds) or f"Did you mean {meant}?"
    # The first section with the name wins, the optional critic comes last: num_steps is run.num_steps, lr is optim.lr.
    by_name: dict[str, str] = {}
    for holder in sorted(kinds, key=lambda holder: holder == "critic"):
        for key in field_names(kinds[holder]):
            by_name.setdefault(key, f"{holder}.{key}")
    close = ".".join([*path[:depth], name]) if name in siblings else by_name.get(name)
    if close is None and section in kinds:
        beside = nearest(name, siblings)
        close = ".".join([*path[:depth], beside]) if beside else _in_other_option(section, name)
    elif close is None:
        close = nearest(section, kinds)
    if close is None and (similar := nearest(name, by_name)) is not None:
        close = by_name[similar]
    return f"Did you mean {close}?" if close else ""


def _in_other_option(group: str, name: str) -> str | None:
    """The most similar key among all options of `group`, with its option."""
    keys = {key: option for option, kind in reversed([*GROUPS.get(group, {}).items()]) for key in field_names(kind)}
    close = nearest(name, keys)
    return f"{group}.{close} of {group}={keys[close]}" if close else None
