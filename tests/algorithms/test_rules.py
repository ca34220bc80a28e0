"""Rules that are declared beside a field: what they accept, what they say, and what a reference can read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from algorithms.config import Checked, ConfigError, Problem, TISConfig
from algorithms.config.rules import Rule, above, at_least, describe, given, one_of, ruled, within


@dataclass(kw_only=True, slots=True)
class Inner(Checked):
    """Nested."""

    share: float = ruled(0.5, within(0, 1, "[)"), remedy="Vetted: 0.5.")
    """Share of the whole."""


@dataclass(kw_only=True, slots=True)
class Outer(Checked):
    """The outer config."""

    rate: float = ruled(1.0, above(0, "seconds"))
    """Seconds between
    two calls."""
    bound: float | None = ruled(None, above(1, because="a ratio of 1 is on-policy"))
    inner: Inner = field(default_factory=Inner)
    free: str = "text"
    """Anything."""

    def conflicts(self) -> Iterator[Problem]:
        if self.bound is not None and self.bound < self.rate:
            yield Problem(key="bound", rule="must be >= rate", value=self.bound)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (above(0), [1e-9, 5], [0, -1, math.nan]),
        (at_least(2), [2, 3.5], [1, math.nan]),
        (within(0, 1), [0, 1], [-0.1, 1.1, math.nan]),
        (within(0, 1, "()"), [0.5], [0, 1, math.nan]),
        (within(0, 1, "(]"), [1], [0]),
        (within(0, 1, "[)"), [0], [1]),
        (one_of(("a", "b")), ["a"], ["c", ""]),
        (given(), ["x"], [""]),
    ],
)
def test_what_a_rule_accepts(rule: Rule, good: list[object], bad: list[object]) -> None:
    assert all(rule.holds(value) for value in good)
    assert not any(rule.holds(value) for value in bad)


def test_every_broken_rule_is_reported_once_and_in_order() -> None:
    inner = object.__new__(Inner)
    inner.share = 1.0
    with pytest.raises(ConfigError) as caught:
        Outer(rate=-1.0, bound=0.5, inner=inner)
    assert [str(problem) for problem in caught.value.problems] == [
        "rate must be > 0 seconds, got -1.0. The default is 1.0.",
        "bound must be > 1 or null: a ratio of 1 is on-policy, got 0.5. The default is null.",
        "inner.share must lie in [0, 1), got 1.0. Vetted: 0.5.",
    ]


def test_a_conflict_is_reported_when_the_fields_themselves_are_right() -> None:
    with pytest.raises(ConfigError, match="bound must be >= rate, got 2"):
        Outer(rate=3.0, bound=2.0)


def test_the_declarations_describe_every_key() -> None:
    rows = [(row.key, row.default, row.rule, row.meaning) for row in describe(Outer)]
    assert rows == [
        ("rate", 1.0, "must be > 0 seconds", "Seconds between two calls."),
        ("bound", None, "must be > 1 or null: a ratio of 1 is on-policy", ""),
        ("inner.share", 0.5, "must lie in [0, 1)", "Share of the whole."),
        ("free", "text", "", "Anything."),
    ]
    inherited = {row.key: row for row in describe(TISConfig(cap=3.0))}
    assert inherited["cap"].default == 3.0
    assert inherited["cap"].rule.startswith("must be >= 1")
    assert "bias" in inherited["cap"].meaning
