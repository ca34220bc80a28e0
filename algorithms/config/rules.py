"""Rules of config values, declared beside the field: `lr: float = ruled(1e-6, above(0))`.

The rule lies in the metadata of the dataclass field, so the field keeps its plain type and default. `Checked`, the base
of every config dataclass of the project, refuses a config with a broken rule, and `describe` reads default, rule and
meaning of every key for a reference. A rule between several fields is a method: `Checked.conflicts`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")


class NotSet(Enum):
    """The value of a Problem of an argument or a key that was not given."""

    NOT_SET = "not set"


NOT_SET = NotSet.NOT_SET
_DECLARED = "parity_rule"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on one value, as text and as a predicate."""

    text: str
    """The condition after the name of the key: "must be > 0"."""
    holds: Callable[[Any], bool]
    """Predicate, False for a value that breaks the rule. NaN compares as False and breaks every rule about order."""
    because: str = ""
    """Reason for the condition; empty if the text states the reason."""
    remedy: str = ""
    """The way out, for example "Vetted: 1e-6."; empty if the rule says enough."""

    def __str__(self) -> str:
        return f"{self.text}: {self.because}" if self.because else self.text


_PACKAGE = "algorithms.config"
"""The package that exports what its modules define."""


@dataclass(frozen=True, slots=True)
class Description:
    """One key of a configuration, as a reference shows it."""

    key: str
    """Dotted path below the described config."""
    default: object
    """Value of the key if neither recipe nor command line sets it."""
    rule: str
    """Text of the declared rule; empty without a declared rule."""
    meaning: str
    """Docstring of the field, units included."""


def ruled(default: T, rule: Rule, *, remedy: str = "", **metadata: str) -> T:
    """Declare a field of a config dataclass with its default, its rule and the way out of a broken rule.

    `metadata` holds further texts about the field, read by name from the field's metadata.
    """
    return field(default=default, metadata={_DECLARED: replace(rule, remedy=remedy), **metadata})


def above(bound: float, unit: str = "", *, because: str = "") -> Rule:
    """Require a value > `bound`."""
    return Rule(f"must be > {bound:g} {unit}".rstrip(), lambda value: value > bound, because)


def at_least(bound: float, unit: str = "") -> Rule:
    """Require a value >= `bound`."""
    return Rule(f"must be >= {bound:g} {unit}".rstrip(), lambda value: value >= bound)


def within(low: float, high: float, ends: str = "[]", *, because: str = "") -> Rule:
    """Require a value between `low` and `high`; a round bracket in `ends` excludes that end."""

    def holds(value: float) -> bool:
        above_low = low < value if ends[0] == "(" else low <= value
        return above_low and (value < high if ends[1] == ")" else value <= high)

    return Rule(f"must lie in {ends[0]}{low}, {high}{ends[1]}", holds, because)


def one_of(values: Collection[object], *, what: str = "one of") -> Rule:
    """Require one of `values`; `what` introduces their list."""
    return Rule(f"must be {what} {' or '.join(map(str, values))}", lambda value: value in values)


def given() -> Rule:
    """Require a text that is not empty."""
    return Rule("must be set", bool)


def declared_rules(kind: type) -> dict[str, Rule]:
    """Field of `kind` and of its bases -> the rule declared beside the field, in the order of the fields."""
    declared = {spec: spec.metadata[_DECLARED] for spec in _fields(kind) if _DECLARED in spec.metadata}
    # Annotations are strings (PEP 563); a type that accepts null contains "None".
    return {spec.name: _or_null(rule) if "None" in str(spec.type) else rule for spec, rule in declared.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule of a configuration: the key, the rule, the given value, and the way out."""

    key: str
    """Dotted path of the key, relative to the config that reports it."""
    rule: str
    """The rule in words, for example "must be > 0"."""
    value: object
    """The given value; NOT_SET if there is none, which the rule says then."""
    remedy: str = ""
    """Way out for the user: a value, an allowed set, or another key."""

    def under(self, prefix: str) -> Problem:
        """The same problem with the key as seen from the config that holds this config under `prefix`."""
        return replace(self, key=".".join(filter(None, (prefix, self.key))))

    def __str__(self) -> str:
        if self.value is NOT_SET:
            text = f"{self.key} {self.rule}."
        else:
            # null is how a user writes None, true is how a user writes True.
            is_plain = isinstance(self.value, Enum | bool | None)
            text = f"{self.key} {self.rule}, got {as_yaml(self.value) if is_plain else repr(self.value)}."
        return (f"{text} {self.remedy}" if self.remedy else text).lstrip()


class ConfigError(ValueError):
    """A configuration that breaks one or more rules; `problems` holds all of them."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


class Checked:
    """Base of config dataclasses. Construction refuses a config with broken rules; `problems` lists them.

    A rule about one field is declared beside the field (`ruled`), a rule between fields in `conflicts`.
    """

    def problems(self) -> Iterator[Problem]:
        """Yield every broken rule: of each field, of each nested config, then between fields.

        A conflict about a key whose own rule is broken, or that names such a key, is left out: the value has to change
        anyway.
        """
        reported = set()
        for problem in self._field_problems():
            reported.add(problem.key)
            yield problem
        for problem in self.conflicts():
            if not any(key == problem.key or key in problem.rule for key in reported):
                yield problem

    def conflicts(self) -> Iterator[Problem]:
        """Yield every broken rule between several fields; subclasses override."""
        yield from ()

    def broken(self, key: str, rule: str, remedy: str = "") -> Problem:
        """The Problem of `rule`, which the value of `key`, a dotted path below this config, breaks."""
        return Problem(key=key, rule=rule, value=attrgetter(key)(self), remedy=remedy)

    def _field_problems(self) -> Iterator[Problem]:
        assert is_dataclass(self)
        defaults = {spec.name: spec.default for spec in fields(self)}
        for name, rule in declared_rules(type(self)).items():
            if not rule.holds(getattr(self, name)):
                yield self.broken(name, str(rule), rule.remedy or default_text(defaults[name]))
        for name, kind in _choices(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, str) and not isinstance(value, Enum):
                package = _PACKAGE if kind.__module__.startswith(_PACKAGE) else kind.__module__
                remedy = f"from {package} import {kind.__name__} has them."
                yield self.broken(name, f"must be one of {', '.join(map(str, kind))}", remedy)
        for spec in fields(self):
            part = getattr(self, spec.name)
            parts = (
                {f"{spec.name}[{i}]": item for i, item in enumerate(part)}
                if isinstance(part, list)
                else {spec.name: part}
            )
            for name, item in parts.items():
                if isinstance(item, Checked):
                    yield from (problem.under(name) for problem in item.problems())

    def __post_init__(self) -> None:
        found = list(self.problems())
        if found:
            raise ConfigError(found)


@cache
def _choices(kind: type) -> dict[str, type[Enum]]:
    """Field of `kind` whose values are members of an enumeration -> the enumeration."""
    named = get_type_hints(kind)
    kinds = {name: [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)] for name, hint in named.items()}
    return {name: kind for name, found in kinds.items() for kind in found if issubclass(kind, Enum)}


def default_text(default: object) -> str:
    """A sentence with the default, if there is one: the way out of a wrong value where no other is known."""
    return "" if default in ("", MISSING) else f"The default is {as_yaml(default)}."


def as_yaml(value: object) -> str:
    """A value of a config as YAML writes it; a choice of the user's own by its `source`."""
    if isinstance(value, Enum):
        return value.name
    if source := getattr(value, "source", ""):
        return str(source)
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else "''" if value == "" else str(value)


def describe(config: object, *, prefix: str = "") -> Iterator[Description]:
    """Yield every key of a config class, or of an instance whose values count as the defaults, with nested configs."""
    kind = config if isinstance(config, type) else type(config)
    rules = {name: str(rule) for name, rule in declared_rules(kind).items()}
    meanings = _docstrings(kind)
    for spec in _fields(kind):
        key = f"{prefix}{spec.name}"
        if not isinstance(config, type):
            default = getattr(config, spec.name)
        else:
            default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        if is_dataclass(default):
            yield from describe(default, prefix=f"{key}.")
        else:
            yield Description(key, default, rules.get(spec.name, ""), meanings.get(spec.name, ""))


def _docstrings(kind: type) -> dict[str, str]:
    """Name of a field -> the string below it in the source of `kind` or of the base that declares it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        [node] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for statement, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and is_text:
                found[statement.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return found


def _fields(kind: type) -> tuple[Field[Any], ...]:
    return fields(kind) if is_dataclass(kind) else ()


def _or_null(rule: Rule) -> Rule:
    """The same rule of a field that accepts null."""
    null = "null" if rule.text.startswith("must be ") else "be null"
    return replace(rule, text=f"{rule.text} or {null}", holds=lambda value: value is None or rule.holds(value))
