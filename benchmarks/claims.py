"""The verdict on every claim of docs/seeds.toml, computed from its numbers, and the tables of them in docs/seeds.md.

    python benchmarks/claims.py [--write]

Prints Markdown. With --write the tables go into docs/seeds.md, between two marks; `tests/test_seeds.py` fails while
page and file differ. A claim has one of these tables, which says how it is judged:

    order     left, right: what the seeds of two sides measured; expected: how left lies to right, one of above, below,
              not below, equal
    event     seeds: what each seed did; expected: above or below; limit: a number, or one number per seed
    range     seeds; lowest, highest: the claimed range
    example   seeds: differences of two computations on the same tokens that the claim calls different
    proof     tests: functions of tests/ that enumerate, count, compare bits, or compare with another implementation to
              a tolerance, which the row gives, as file::function
    not_run   why

A claim may also have a premise, an order or an event: where that is not confirmed the claim was not tested. A side has
a value per seed (`values`), or `lowest` and `highest` of so many `seeds` where no more was kept. Where the values are
not of seeds but of steps or settings, `of` names them, and they confirm nothing.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date
from functools import cache
from math import comb
from pathlib import Path
from typing import Any, ClassVar, Protocol

ROOT = Path(__file__).resolve().parents[1]
DATA, PAGE = ROOT / "docs" / "seeds.toml", ROOT / "docs" / "seeds.md"
BEGIN, END = (
    "<!-- written by python benchmarks/claims.py --write from seeds.toml -->",
    "<!-- end of what is written -->",
)
LEAST_SEEDS = 3
CONFIDENCE = 0.95
SEEDS = "seeds"

VERDICTS = {
    "confirmed": "every seed shows the claim: the two ranges do not overlap, or each value is beyond the limit or in "
    "the claimed range. Or a test proves the claim. Or two computations on the same tokens are claimed to differ, and "
    "one difference is there",
    "seen once": "as confirmed, but the values are not of seeds: they are of steps of one run, or of runs with one "
    "setting each",
    "bounded": "the claim says that two sides are equal, or that one is no worse. The ranges overlap, which confirms "
    f"nothing; there are enough seeds to bound the median difference with {CONFIDENCE:.0%} confidence",
    "in part": "some seeds show the claim, others do not",
    "not told apart": "the two ranges overlap or touch",
    "not seen": "it was run, and no seed shows what is claimed to happen",
    "contrary": "every seed shows the opposite: the two ranges lie the other way round, or do not overlap although the "
    "claim calls them equal, or each value is outside of the claimed range",
    "not tested": "the claim is about what follows after something, and that did not happen with every seed",
    "not run": "nothing was run that can show it",
}
"""Verdict -> its rule, as the page gives it."""


class Number(float):
    """A number that is shown as the file writes it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What the seeds of one side measured."""

    lowest: float
    highest: float
    seeds: int
    values: tuple[float, ...] = ()
    """One value per seed; empty where only the range was kept."""
    name: str = ""
    of: str = SEEDS
    """What the values are of, and what `seeds` counts."""

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Side:
        if "values" in table:
            values = tuple(table["values"])
            return cls(**{**table, "values": values}, lowest=min(values), highest=max(values), seeds=len(values))
        made = cls(**table)
        if not made.lowest <= made.highest:
            raise ValueError(f"lowest must not exceed highest, got {made}")
        return made

    def __str__(self) -> str:
        span = " to ".join(dict.fromkeys((str(self.lowest), str(self.highest))))
        number = f" ({self.seeds} {self.of})" if not self.values or self.of != SEEDS else ""
        return f"{self.name} {', '.join(map(str, self.values)) or span}{number}".strip()


class Judge(Protocol):
    """How numbers judge a claim: a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def verdict(self) -> str:
        """One of VERDICTS."""

    def result(self) -> str:
        """The numbers, as the page shows them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Two sides, and how the claim says that they lie."""

    left: Side
    right: Side
    expected: str

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Order:
        made = cls(left=Side.read(table["left"]), right=Side.read(table["right"]), expected=table["expected"])
        if made.expected not in ("above", "below", "not below", "equal"):
            raise ValueError(f"order.expected must be above, below, not below or equal, got {made.expected!r}")
        if min(made.left.seeds, made.right.seeds) < LEAST_SEEDS:
            raise ValueError(f"an order needs {LEAST_SEEDS} seeds or more on each side, got {made.result()!r}")
        return made

    def verdict(self) -> str:
        is_above, is_below = self.left.lowest > self.right.highest, self.left.highest < self.right.lowest
        if not is_above and not is_below:
            return "not told apart" if self.bound() is None else "bounded"
        if self.expected == "equal":
            return "contrary"
        return "confirmed" if is_below == (self.expected == "below") else "contrary"

    def bound(self) -> tuple[float, float] | None:
        """(least, largest) median of left - right that the seeds allow, paired by seed; None if they bound nothing.

        The interval of the sign test, which assumes no distribution: with n differences the median is below the r-th
        smallest of them (r from 0) with probability sum over i <= r of C(n, i) / 2^n. Of `not below` only the least
        matters, so that the whole of 1 - CONFIDENCE is its; `equal` needs both. Five and six seeds are the least.
        """
        pairs = len(self.left.values)
        if self.expected not in ("not below", "equal") or pairs != len(self.right.values):
            return None
        if not self.left.of == self.right.of == SEEDS:
            return None
        allowed = (1 - CONFIDENCE) / (2 if self.expected == "equal" else 1)
        below = [sum(comb(pairs, i) for i in range(r + 1)) / 2**pairs for r in range(pairs)]
        place = sum(probability <= allowed for probability in below) - 1
        differences = sorted(a - b for a, b in zip(self.left.values, self.right.values, strict=True))
        return (differences[place], differences[-1 - place]) if place >= 0 else None

    def result(self) -> str:
        text = f"{self.left}; {self.right}"
        bound = self.bound()
        if bound is None:
            return text
        least, largest = bound
        if self.expected == "equal":
            return f"{text}; the median differs by at most {max(-least, largest):.3f}"
        return f"{text}; the median is at most {max(-least, 0.0):.3f} lower"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that each seed does or does not do: its value is beyond the limit."""

    seeds: Side
    limits: tuple[float, ...]
    expected: str

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Event:
        seeds, limit, expected = Side.read(table["seeds"]), table["limit"], table["expected"]
        limits = tuple(limit) if isinstance(limit, list) else (limit,) * seeds.seeds
        if expected not in ("above", "below"):
            raise ValueError(f"event.expected must be above or below, got {expected!r}")
        if len(limits) != seeds.seeds or seeds.seeds < LEAST_SEEDS:
            raise ValueError(f"an event needs a limit per seed and {LEAST_SEEDS} seeds or more, got {seeds}")
        made = cls(seeds=seeds, limits=limits, expected=expected)
        if not seeds.values and made._beyond(seeds.lowest, limits[0]) != made._beyond(seeds.highest, limits[0]):
            raise ValueError(f"the limit {limits[0]} lies in the range of {seeds}: give the value of each seed")
        return made

    def _beyond(self, value: float, limit: float) -> bool:
        return value > limit if self.expected == "above" else value < limit

    def count(self) -> int:
        """Number of seeds that show the event."""
        if not self.seeds.values:
            return self.seeds.seeds * self._beyond(self.seeds.lowest, self.limits[0])
        return sum(map(self._beyond, self.seeds.values, self.limits))

    def verdict(self) -> str:
        return {0: "not seen", self.seeds.seeds: "confirmed"}.get(self.count(), "in part")

    def result(self) -> str:
        limits = ", ".join(map(str, dict.fromkeys(self.limits)))
        return f"{self.seeds}; {self.expected} {limits} in {self.count()} of {self.seeds.seeds}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Values that are claimed to lie in a range."""

    seeds: Side
    lowest: float
    highest: float

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Range:
        made = cls(seeds=Side.read(table["seeds"]), lowest=table["lowest"], highest=table["highest"])
        if len(made.seeds.values) < LEAST_SEEDS:
            raise ValueError(f"a range needs the values of {LEAST_SEEDS} seeds or more, got {made.seeds}")
        return made

    def verdict(self) -> str:
        inside = sum(self.lowest <= value <= self.highest for value in self.seeds.values)
        return {0: "contrary", self.seeds.seeds: "confirmed"}.get(inside, "in part")

    def result(self) -> str:
        return f"{self.seeds}; claimed {self.lowest} to {self.highest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Differences of two computations; one that is not 0 shows that they differ."""

    seeds: Side

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Example:
        return cls(seeds=Side.read(table["seeds"]))

    def verdict(self) -> str:
        return "confirmed" if any(self.seeds.values) else "not seen"

    def result(self) -> str:
        return str(self.seeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Tests that enumerate every case, count, compare every bit, or compare with another implementation."""

    tests: tuple[str, ...]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Proof:
        if absent := [name for name in table["tests"] if not _is_test(name)]:
            raise ValueError(f"a proof names tests that exist; there is no {', '.join(absent)}")
        return cls(tests=tuple(table["tests"]))

    def verdict(self) -> str:
        return "confirmed"

    def result(self) -> str:
        return "proved by " + ", ".join(f"`{name.partition('::')[2]}`" for name in self.tests)


def _is_test(name: str) -> bool:
    """True if `name` is file::function of a test that pytest collects."""
    file, _, function = name.partition("::")
    return re.fullmatch(r"tests/(\w+/)*test_\w+\.py", file) is not None and function in _tests_of(ROOT / file)


@cache
def _tests_of(path: Path) -> frozenset[str]:
    if not path.is_file():
        return frozenset()
    functions = (node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in functions if name.startswith("test_"))


@dataclass(frozen=True, kw_only=True, slots=True)
class NotRun:
    """Why nothing was run."""

    why: str

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> NotRun:
        return cls(why=table["why"])

    def verdict(self) -> str:
        return "not run"

    def result(self) -> str:
        return self.why


JUDGES: Mapping[str, Callable[[Mapping[str, Any]], Judge]] = {
    "order": Order.read,
    "event": Event.read,
    "range": Range.read,
    "example": Example.read,
    "proof": Proof.read,
    "not_run": NotRun.read,
}


def _judge(table: Mapping[str, Any]) -> Judge:
    [kind] = JUDGES.keys() & table.keys()
    return JUDGES[kind](table[kind])


def sides(judge: Judge) -> list[Side]:
    """Every side that a judge compares."""
    return [value for field in fields(judge) if isinstance(value := getattr(judge, field.name), Side)]


def _verdict(judge: Judge) -> str:
    """The verdict of `judge`; where its values are not of seeds, nothing is confirmed and nothing is contrary."""
    word = judge.verdict()
    if all(side.of == SEEDS for side in sides(judge)):
        return word
    return {"confirmed": "seen once", "contrary": "not seen"}.get(word, word)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What was run, and where its numbers stand in full."""

    name: str
    command: str
    date: date
    revision: str
    machine: str
    where: str = ""
    """Page of docs/ and heading that have the numbers; empty where only the file has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One row of the page."""

    source: str
    says: str
    judge: Judge
    run: Run | None
    measured: str = ""
    premise: Judge | None = None
    note: str = ""

    @classmethod
    def read(cls, table: Mapping[str, Any], runs: Mapping[str, Run]) -> Claim:
        """Raises ValueError, with the claim, for a table that cannot be judged."""
        try:
            return cls(
                judge=_judge(table),
                run=runs[table["run"]] if "run" in table else None,
                premise=_judge(table["premise"]) if "premise" in table else None,
                **{key: value for key, value in table.items() if key not in (*JUDGES, "run", "premise")},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"seeds.toml: {table.get('says')!r}: {type(error).__name__}: {error}") from error

    def verdict(self) -> str:
        if self.premise is not None and _verdict(self.premise) != "confirmed":
            return "not tested"
        return _verdict(self.judge)

    def row(self) -> str:
        run = "" if self.run is None else f" ({_link(self.run)})"
        result = self.judge.result() if self.premise is None else f"{self.premise.result()}; {self.judge.result()}"
        cells = (self.source, self.says, f"{self.measured}{run}".strip(), result, self.verdict(), self.note)
        return " | ".join(["", *(cell.replace("|", r"\|") for cell in cells), ""]).strip()


def _link(run: Run) -> str:
    return f"[{run.name}]({run.where.removeprefix('seeds.md')})" if run.where else run.name


def read(text: str) -> tuple[list[Run], list[Claim]]:
    """Runs and claims of the file. Raises ValueError for a claim that cannot be judged."""
    data = tomllib.loads(text, parse_float=Number)
    runs = {name: Run(name=name, **table) for name, table in data["run"].items()}
    return list(runs.values()), [Claim.read(table, runs) for table in data["claim"]]


def tables(text: str) -> Iterator[str]:
    """The lines of the page between the marks."""
    runs, claims = read(text)
    counts = Counter(claim.verdict() for claim in claims)
    yield "| verdict | claims | means |"
    yield "|---|--:|---|"
    yield from (f"| {word} | {counts[word]} | {rule} |" for word, rule in VERDICTS.items())
    yield ""
    yield "| | claim | what was measured, in which run | result | verdict | |"
    yield "|---|---|---|---|---|---|"
    yield from (claim.row() for claim in claims)
    yield ""
    yield "| run | command | date, revision | machine |"
    yield "|---|---|---|---|"
    for run in runs:
        yield f"| {_link(run)} | `{run.command}` | {run.date}, {run.revision} | {run.machine} |"


def page_with(page: str, lines: str) -> str:
    """`page` with `lines` between the marks. Raises ValueError without the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN} and {END}")
    return f"{before}{begin}\n{lines}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="the verdict on every claim of docs/seeds.toml")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/seeds.md")
    written = "\n".join(tables(DATA.read_text("utf-8")))
    if parser.parse_args().write:
        PAGE.write_text(page_with(PAGE.read_text("utf-8"), written), encoding="utf-8")
    else:
        sys.stdout.write(f"{written}\n")


if __name__ == "__main__":
    main()
