"""The base of every config dataclass of the project: a class states its rules, building one that breaks them raises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One broken rule of a configuration: which key, which rule, what was given, and the way out."""

    key: str
    """Dotted path of the key, relative to the config that reports it."""
    rule: str
    """The rule in words, for example "must be > 0"."""
    value: object
    """What was given."""
    remedy: str = ""
    """What to write instead: a value, an allowed set, or another key."""

    def under(self, prefix: str) -> Problem:
        """The same problem, seen from the config that holds this one under `prefix`."""
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
    """Base of config dataclasses: `problems()` yields the broken rules, construction refuses them."""

    def problems(self) -> Iterator[Problem]:
        """Yield every rule that the values of this config break; subclasses override."""
        yield from ()

    def __post_init__(self) -> None:
        found = list(self.problems())
        if found:
            raise ConfigError(found)
