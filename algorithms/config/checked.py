"""The base of every config dataclass of the project: a class declares rules, and creation with a broken rule raises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from operator import attrgetter

from algorithms.config.rules import declared_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule of a configuration: the key, the rule, the given value, and the way out."""

    key: str
    """Dotted path of the key, relative to the config that reports it."""
    rule: str
    """The rule in words, for example "must be > 0"."""
    value: object
    """The given value."""
    remedy: str = ""
    """Way out for the user: a value, an allowed set, or another key."""

    def under(self, prefix: str) -> Problem:
        """The same problem with the key as seen from the config that holds this config under `prefix`."""
        return replace(self, key=f"{prefix}.{self.key}" if prefix else self.key)

    def __str__(self) -> str:
        shown = self.value.name if isinstance(self.value, Enum) else repr(self.value)
        text = f"{self.key} {self.rule}, got {shown}."
        return f"{text} {self.remedy}" if self.remedy else text


class ConfigError(ValueError):
    """A configuration that breaks one or more rules; `problems` holds all of them."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


class Checked:
    """Base of config dataclasses. Construction refuses a config with broken rules; `problems` lists them.

    A rule about one field is declared beside the field (`algorithms.config.rules`), a rule between fields in
    `conflicts`.
    """

    def problems(self) -> Iterator[Problem]:
        """Yield every broken rule: of each field, of each nested config, then between fields.

        A conflict about a key whose own rule is broken is left out: the value has to change anyway.
        """
        reported = set()
        for problem in self._field_problems():
            reported.add(problem.key)
            yield problem
        yield from (problem for problem in self.conflicts() if problem.key not in reported)

    def conflicts(self) -> Iterator[Problem]:
        """Yield every broken rule between several fields; subclasses override."""
        yield from ()

    def broken(self, key: str, rule: str, remedy: str = "") -> Problem:
        """The Problem of `rule`, which the value of `key`, a dotted path below this config, breaks."""
        return Problem(key=key, rule=rule, value=attrgetter(key)(self), remedy=remedy)

    def _field_problems(self) -> Iterator[Problem]:
        for declared in declared_rules(type(self)):
            if not declared.rule.holds(getattr(self, declared.name)):
                yield self.broken(declared.name, str(declared.rule), declared.remedy)
        assert is_dataclass(self)
        for spec in fields(self):
            part = getattr(self, spec.name)
            if isinstance(part, Checked):
                yield from (problem.under(spec.name) for problem in part.problems())

    def __post_init__(self) -> None:
        found = list(self.problems())
        if found:
            raise ConfigError(found)
