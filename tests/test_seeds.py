"""docs/seeds.md: every verdict follows from the numbers of docs/seeds.toml, and page and file say the same."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from test_docs import CODE
from test_style import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from claims import BEGIN, DATA, END, JUDGES, PAGE, VERDICTS, Claim, page_with, read, sides, tables

TEXT = DATA.read_text(encoding="utf-8")
NUMBER_OF_FILE = re.compile(r"(?<=[\[ ])\d+(?:\.\d+)?(?:e-\d+)?(?=[,\]\n ])", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with(page, "\n".join(tables(TEXT))), "python benchmarks/claims.py --write"


def numbers_of(page: str) -> set[float]:
    """Outside of the tables that are written from the file."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    own = CODE.sub("", before + rest.partition(END)[2])
    return {float(number.replace(",", "")) for number in NUMBER.findall(own)}


def test_the_page_of_a_run_has_the_numbers_of_its_claims() -> None:
    absent = {}
    for claim in read(TEXT)[1]:
        if claim.run is None or not claim.run.where:
            continue
        judges = [claim.judge, *([] if claim.premise is None else [claim.premise])]
        numbers = {n for judge in judges for side in sides(judge) for n in (*side.values, side.lowest, side.highest)}
        absent[claim.says] = numbers - numbers_of(claim.run.where.partition("#")[0])
    assert len(absent) > 30 and not any(absent.values()), absent


def test_every_number_has_a_run() -> None:
    """With command, date, revision and machine."""
    assert not [claim.says for claim in read(TEXT)[1] if sides(claim.judge) and claim.run is None]


def changed(number: str) -> str:
    """The file with another last digit of one number."""
    digits, e, exponent = number.partition("e")
    other = f"{digits[:-1]}{(int(digits[-1]) + 1) % 10}{e}{exponent}"
    return NUMBER_OF_FILE.sub(lambda found: other if found[0] == number else found[0], TEXT)


def test_a_changed_number_makes_the_page_stale() -> None:
    page = PAGE.read_text(encoding="utf-8")
    numbers = {number for number in NUMBER_OF_FILE.findall(TEXT) if "." in number}
    assert len(numbers) > 50
    for number in numbers:
        try:
            written = "\n".join(tables(changed(number)))
        except ValueError:  # a lowest value that is above the highest
            continue
        assert page != page_with(page, written), number


def verdict(kind: str, **table: Any) -> str:
    return JUDGES[kind](table).verdict()


def seeds(*values: float) -> dict[str, Any]:
    return {"values": list(values)}


LOW, TOUCHING_LOW, TOUCHING_HIGH, HIGH = (0.1, 0.39, 0.2), (0.1, 0.4, 0.2), (0.8, 0.6, 0.9), (0.8, 0.61, 0.9)


@pytest.mark.parametrize(
    ("expected", "low", "high"),
    [
        ("above", "contrary", "confirmed"),
        ("below", "confirmed", "contrary"),
        ("not below", "contrary", "confirmed"),
        ("equal", "contrary", "contrary"),
    ],
)
def test_an_order_is_seen_in_ranges_that_do_not_overlap(expected: str, low: str, high: str) -> None:
    same = "not told apart"
    for left, word in ((LOW, low), (TOUCHING_LOW, same), (TOUCHING_HIGH, same), (HIGH, high)):
        for right in ({"lowest": 0.4, "highest": 0.6, "seeds": 3}, seeds(0.6, 0.4, 0.5)):
            assert verdict("order", expected=expected, left=seeds(*left), right=right) == word


def test_overlap_is_a_bound_with_enough_seeds_and_only_of_a_claim_of_no_difference() -> None:
    left, right = (
        seeds(0.50, 0.47, 0.55, 0.42, 0.53, 0.49, 0.51, 0.48),
        seeds(0.46, 0.49, 0.47, 0.45, 0.5, 0.5, 0.48, 0.5),
    )
    # Differences 0.04, -0.02, 0.08, -0.03, 0.03, -0.01, 0.03, -0.02. Of 8 the second smallest is below the median with
    # probability 1 - 9/256, both the smallest and the largest enclose it with 1 - 2/256.
    judge = JUDGES["order"]({"expected": "not below", "left": left, "right": right})
    assert judge.verdict() == "bounded" and judge.result().endswith("the median is at most 0.020 lower")
    judge = JUDGES["order"]({"expected": "equal", "left": left, "right": right})
    assert judge.verdict() == "bounded" and judge.result().endswith("the median differs by at most 0.080")
    for expected in ("above", "below"):
        assert verdict("order", expected=expected, left=left, right=right) == "not told apart"

    def with_seeds(number: int, expected: str) -> str:
        first = ({"values": side["values"][:number]} for side in (left, right))
        return verdict("order", expected=expected, **dict(zip(("left", "right"), first, strict=True)))

    assert [with_seeds(n, "not below") for n in (3, 4, 5, 6)] == ["not told apart"] * 2 + ["bounded"] * 2
    assert [with_seeds(n, "equal") for n in (4, 5, 6)] == ["not told apart"] * 2 + ["bounded"]
    only_range = {"lowest": 0.42, "highest": 0.55, "seeds": 8}
    assert verdict("order", expected="not below", left=only_range, right=right) == "not told apart"


def test_an_event_is_counted() -> None:
    counts = {(1.0, 2.0, 3.0): "confirmed", (1.0, 2.0, 0.1): "in part", (0.3, 0.2, 0.5): "not seen"}
    for values, word in counts.items():
        assert verdict("event", expected="above", limit=0.5, seeds=seeds(*values)) == word
    assert verdict("event", expected="below", limit=[2, 3, 4], seeds=seeds(1.0, 2.0, 3.0)) == "confirmed"
    assert verdict("event", expected="below", limit=[1, 3, 4], seeds=seeds(1.0, 2.0, 3.0)) == "in part"
    for limit, word in ((0.1, "confirmed"), (0.9, "not seen")):
        assert (
            verdict("event", expected="above", limit=limit, seeds={"lowest": 0.2, "highest": 0.8, "seeds": 3}) == word
        )


def test_other_kinds() -> None:
    for values, word in (((1.0, 2.0, 3.0), "confirmed"), ((1.0, 2.0, 4.0), "in part"), ((4.0, 5.0, 0.9), "contrary")):
        assert verdict("range", lowest=1, highest=3, seeds=seeds(*values)) == word
    assert [verdict("example", seeds=seeds(value)) for value in (1e-12, 0.0)] == ["confirmed", "not seen"]
    assert verdict("not_run", why="no GPU") == "not run"
    assert verdict("proof", tests=["tests/test_seeds.py::test_other_kinds"]) == "confirmed"


def test_what_follows_from_something_is_tested_only_where_that_happened() -> None:
    claim = {"source": "C", "says": "a explodes after b rises", "not_run": {"why": "-"}}
    for values, word in ((HIGH, "not run"), (TOUCHING_HIGH, "not tested"), (LOW, "not tested")):
        premise = {"expected": "above", "left": seeds(*values), "right": seeds(0.4, 0.5, 0.6)}
        assert Claim.read(claim | {"premise": {"order": premise}}, {}).verdict() == word
    for values, word in ((HIGH, "not run"), (LOW, "not tested"), ((0.1, 0.7, 0.8), "not tested")):
        premise = {"expected": "above", "limit": 0.5, "seeds": seeds(*values)}
        assert Claim.read(claim | {"premise": {"event": premise}}, {}).verdict() == word


def test_values_that_are_not_of_seeds_confirm_nothing() -> None:
    def claimed(kind: str, **table: Any) -> Claim:
        return Claim.read({"source": "A", "says": "-", kind: table}, {})

    middle = seeds(0.6, 0.4, 0.5)
    for values, word in ((HIGH, "seen once"), (TOUCHING_HIGH, "not told apart"), (LOW, "not seen")):
        steps = seeds(*values) | {"of": "steps of one run"}
        claim = claimed("order", expected="above", left=steps, right=middle)
        assert claim.verdict() == word and "(3 steps of one run)" in claim.row()
        assert claimed("order", expected="below", left=middle, right=steps).verdict() == word
    runs = seeds(1.0, 2.0, 3.0) | {"of": "runs"}
    for limit, word in ((0.5, "seen once"), (1.5, "in part"), (3.5, "not seen")):
        assert claimed("event", expected="above", limit=limit, seeds=runs).verdict() == word
    assert claimed("range", lowest=0, highest=4, seeds=runs).verdict() == "seen once"
    many = seeds(*[0.5] * 8)
    assert verdict("order", expected="equal", left=many, right=many | {"of": "steps"}) == "not told apart"
    premise = {"event": {"expected": "above", "limit": 0.5, "seeds": runs}}
    claim = {"source": "C", "says": "-", "not_run": {"why": "-"}, "premise": premise}
    assert Claim.read(claim, {}).verdict() == "not tested"
    assert "(3 seeds)" in claimed("example", seeds={"lowest": 1.0, "highest": 2.0, "seeds": 3}).row()


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("order", {"expected": "above", "left": seeds(1.0, 2.0), "right": seeds(3.0, 4.0, 5.0)}),
        ("order", {"expected": "higher", "left": seeds(1.0, 2.0, 3.0), "right": seeds(3.0, 4.0, 5.0)}),
        ("range", {"lowest": 0, "highest": 3, "seeds": {"lowest": 2.0, "highest": 1.0, "seeds": 3}}),
        ("event", {"expected": "above", "limit": 1, "seeds": {"lowest": 2.0, "highest": 1.0, "seeds": 3}}),
        ("event", {"expected": "above", "limit": 1, "seeds": {"lowest": 2.0, "seeds": 3}}),
        ("event", {"expected": "above", "limit": 1, "seeds": seeds(2.0)}),
        ("event", {"expected": "above", "limit": [1, 2], "seeds": seeds(2.0, 2.0, 2.0)}),
        ("event", {"expected": "above", "limit": 0.5, "seeds": {"lowest": 0.2, "highest": 0.8, "seeds": 3}}),
        ("range", {"lowest": 0, "highest": 1, "seeds": {"lowest": 0.2, "highest": 0.8, "seeds": 3}}),
        ("proof", {"tests": ["tests/test_seeds.py::test_that_is_not_there"]}),
        ("proof", {"tests": ["tests/test_seeds.py::seeds"]}),
        ("proof", {"tests": ["tests/test_gone.py::test_other_kinds"]}),
        ("proof", {"tests": ["tests/conftest.py::test_other_kinds"]}),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_be_judged_is_refused_by_name(kind: str, table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a claim of ours"):
        Claim.read({"source": "A", "says": "a claim of ours", kind: table}, {})


def test_a_page_without_the_marks_is_refused() -> None:
    for page in ("# A page\n", f"{BEGIN}\n", f"{END}\n{BEGIN}\n"):
        with pytest.raises(ValueError, match=r"seeds\.md needs the lines"):
            page_with(page, "a table")
    assert set(VERDICTS) >= {claim.verdict() for claim in read(TEXT)[1]}
