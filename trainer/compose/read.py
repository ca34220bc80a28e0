"""Plain tree of keys and values -> config dataclasses, with a Problem for every invalid key or value.

    read_section   fills one config class from a mapping; also used for sections that belong to one command
    build_config   the whole TrainConfig, and the rules of its values

A key without a usable value takes its default during the checks, so that one problem does not hide the others. This
module does not depend on Hydra.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from algorithms.config import NOT_SET, Checked, ConfigError, Custom, Problem
from algorithms.config.home import path_fields
from algorithms.config.rules import default_text
from rollout.processes.secret_names import is_secret_name
from rollout.rewards import RULES
from rollout.user_code.custom_class import finish
from rollout.user_code.custom_code import function_problem, similar_custom
from trainer.compose import unknown_keys
from trainer.compose.choices import convertible, custom_kind, holds_list, own_choice, own_class, plain_values
from trainer.compose.home import expand_homes
from trainer.config.train import GROUPS, TrainConfig
from trainer.rundir.provenance import escaped
from trainer.text.yaml_text import leaves

HYDRA_KEY = "hydra"
Config = TypeVar("Config", bound=Checked)


def build_config(root: DictConfig, chosen: unknown_keys.Kinds) -> tuple[TrainConfig, list[Problem], list[Problem]]:
    """Turn the composed `root` into dataclasses and collect every problem: a run may start only if there is none.

    `chosen`: group -> class of its chosen option. The first list holds the problems of unreadable keys and values, the
    second list the broken rules about keys that are not in the first list.
    """
    found: list[Problem] = []
    bases: dict[str, type[Checked]] = get_type_hints(TrainConfig)
    kinds = {name: chosen.get(name, kind) for name, kind in bases.items()}
    config: TrainConfig = object.__new__(TrainConfig)
    for name, kind in kinds.items():
        if name in GROUPS and name not in chosen:
            setattr(config, name, kind())  # TrainConfig reports a group without a choice
        elif name not in root.keys():  # noqa: SIM118 - a key whose value is missing (???) counts as present
            found.append(
                Problem(key=f"~{name}", rule="cannot be removed", value=NOT_SET, remedy="Leave this word out.")
            )
            setattr(config, name, kind())
        else:
            setattr(config, name, read_section(kind, root._get_node(name), [name], kinds, found))
    for name in map(str, root):
        if name not in kinds and name != HYDRA_KEY:
            for path, value in leaves(_plain(root, name), [name]):
                found.append(unknown_keys.unknown_section(path, value, kinds))
    for name in GROUPS:
        section = getattr(config, name)
        if not found and isinstance(section, Custom) and (rule := finish(section)):
            found.append(Problem(key=name, rule=rule, value=section.source))
    named = {problem.key for problem in found}
    broken = [problem for problem in (*_broken(config), *_function_problems(config)) if problem.key not in named]
    return config, found, broken


def read_section(
    kind: type[Config], node: object, path: list[str], kinds: unknown_keys.Kinds, found: list[Problem]
) -> Config:
    """Make an instance of `kind` from the mapping `node` at `path`, without checking its rules."""
    made = object.__new__(kind)
    values, is_mapping = OmegaConf.create({}), isinstance(node, DictConfig) and not node._is_none()
    if is_mapping:
        assert isinstance(node, DictConfig)
        values = node
    elif path[-1] in GROUPS:
        group, options = path[-1], list(GROUPS[path[-1]])
        rule = "must be chosen on the command line or in defaults"
        remedy = f"{' or '.join(f'{group}={name}' for name in options)}; in a recipe's defaults, override /{group}: "
        remedy += f"{_shown(node) if _shown(node) in options else options[0]}."
        found.append(Problem(key=group, rule=rule, value=_shown(node), remedy=remedy))
    else:
        found.append(unknown_keys.wrong_value(".".join(path), _shown(node), kind))
    of: type = kind
    target = convertible(of)
    hints, names = get_type_hints(kind), unknown_keys.field_names(kind)
    for name in map(str, values):
        if name not in names:
            for leaf, value in leaves(_plain(values, name), [*path, name]):
                found.append(unknown_keys.unknown_key(leaf, len(path), value, kind, kinds))
    for spec in fields(kind):  # type: ignore[arg-type]
        hint, inner = hints[spec.name], [*path, spec.name]
        value = spec.default_factory() if spec.default_factory is not MISSING else spec.default
        if is_mapping and spec.name not in values.keys():  # noqa: SIM118 - as above
            found.append(Problem(key=f"~{'.'.join(inner)}", rule="cannot be removed", value=value))
        elif isinstance(hint, type) and issubclass(hint, Checked) and is_mapping:
            value = read_section(hint, values._get_node(spec.name), inner, kinds, found)
        elif is_mapping:
            value = _value(spec, values, target, inner, hint, default=value, found=found)
        setattr(made, spec.name, value)
    return made


def read_own_keys(kind: type[Config], words: Sequence[str], *, section: str) -> tuple[Config, list[Problem]]:
    """Read the words `section.key=value` of a command with its own section -> (instance of `kind`, problems).

    If a problem exists, the config has its defaults.
    """
    given = OmegaConf.from_dotlist([_as_written(word, kind) for word in words])
    root = OmegaConf.create({section: OmegaConf.merge(plain_values(kind), given.get(section, {}))})
    found = expand_homes(root, {section: kind})
    made = read_section(kind, root._get_node(section), [section], {section: kind}, found)
    named = {problem.key for problem in found}
    found += [broken for rule in made.problems() if (broken := rule.under(section)).key not in named]
    return (kind() if found else made), found


def _as_written(word: str, kind: type) -> str:
    """The word with quotes around a path, of which YAML would make a number, null, or a part before a #."""
    key, _, value = word.partition("=")
    is_path = key.rpartition(".")[2] in path_fields(kind) and value not in ("", "null") and value[0] not in "'\""
    return f"{key}={json.dumps(value, ensure_ascii=False)}" if is_path else word


def _value(
    spec: Field[Any],
    values: DictConfig,
    target: DictConfig,
    path: list[str],
    hint: Any,
    *,
    default: object,
    found: list[Problem],
) -> object:
    """The value of one field with interpolations resolved, converted to the type of the field."""
    key = ".".join(path)
    try:
        value = _container(values[spec.name])
    except MissingMandatoryValue:
        found.append(Problem(key=key, rule="is not set", value=NOT_SET, remedy=default_text(default)))
        return default
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        name = reason.removeprefix("Interpolation key '").removesuffix("' not found")
        is_public = name in os.environ and not is_secret_name(name)
        remedy = f"${{oc.env:{name}}} reads the variable of the environment." if is_public else ""
        rule = f"cannot be resolved ({reason})"
        found.append(Problem(key=key, rule=rule, value=_plain(values, spec.name), remedy=remedy))
        return default
    if base := custom_kind(hint):
        if isinstance(value, list) and holds_list(hint):
            items = [_own(item, base, [*path[:-1], f"{path[-1]}[{index}]"], found) for index, item in enumerate(value)]
            return [item for item in items if item is not None]
        if own_choice(value) and not holds_list(hint):
            made = _own(value, base, path, found)
            return default if made is None else made
        if spec.name not in target.keys():  # noqa: SIM118 - as above
            if value is not None or holds_list(hint):
                found.append(unknown_keys.wrong_value(key, value, hint, default=default))
            return default
    try:
        target[spec.name] = escaped(value)  # a resolved text that holds "${" is no interpolation any more
        value = _container(target[spec.name])
    except OmegaConfBaseException:
        if isinstance(value, dict) and value:
            rule = f"is not a key: {key} is a single value"
            found += [Problem(key=".".join(leaf), rule=rule, value=v) for leaf, v in leaves(value, path)]
        else:
            found.append(unknown_keys.wrong_value(key, value, hint, default=default))
        return default
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        found.append(Problem(key=key, rule="must be a finite number", value=value, remedy=default_text(default)))
        return default
    return value


def _own(value: object, base: type[Custom], path: list[str], found: list[Problem]) -> Custom | None:
    """The choice of the user's own that `value` names, with its keys; None, and a Problem, if it names no class."""
    key, choice = ".".join(path), own_choice(value)
    if choice is None:
        found.append(unknown_keys.wrong_value(key, value, base))
        return None
    try:
        kind = own_class(choice[0], base, key=key)
    except ConfigError as error:
        found += error.problems
        return None
    except ValueError as error:
        remedy = similar_custom(choice[0])
        found.append(Problem(key=key, rule=str(error), value=choice[0], remedy=remedy))
        return None
    node = OmegaConf.merge(plain_values(kind), escaped(choice[1]))
    before, holder = len(found), OmegaConf.create({key: node})  # which holds a copy
    found += expand_homes(holder, {key: kind})
    made = read_section(kind, holder[key], path, {}, found)
    if len(found) == before and (rule := finish(made)):
        found.append(Problem(key=key, rule=rule, value=choice[0]))
    return made


def _broken(config: TrainConfig) -> Iterator[Problem]:
    """Yield every broken rule; a class of the user's own that fails ends them."""
    try:
        yield from config.problems()
    except ConfigError as error:
        yield from error.problems


def _function_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield the problem of a reward function that is neither a built-in rule nor a function in a file."""
    rule = function_problem(config.reward.function, RULES)
    if rule is not None:
        function = config.reward.function
        close = unknown_keys.nearest(function, RULES)
        meant = f"Did you mean reward.function={close}?" if close else similar_custom(function)
        yield config.broken("reward.function", rule, meant)


def _container(value: object) -> object:
    """`value` with OmegaConf containers converted to plain lists and dicts."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def _plain(node: DictConfig, name: str) -> object:
    """The value of `name` as written, interpolations unresolved."""
    return _shown(node._get_node(name))


def _shown(node: Any) -> object:
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node._value()
