"""trainer/run/guard: when a number is bad, what is done about it, and that a saved guard goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.config import ConfigError
from rollout.task_config import ArithmeticDataConfig
from trainer.config.guard import Action, MismatchGuardConfig
from trainer.config.outputs import CheckpointConfig
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig
from trainer.run.guard import NumberGuard, Row, build_guard
from trainer.rundir.events import Severity

GOOD = {"mismatch/k3": 1e-4, "mismatch/ess/raw_token": 0.999, "mismatch/khat/token": None}
BAD = GOOD | {"mismatch/k3": 0.5}
UNKNOWN: dict[str, float | None] = {"mismatch/k3": None, "mismatch/ess/raw_token": None}

EXAMPLES = settings(max_examples=60)

guards = st.builds(
    MismatchGuardConfig,
    highest=st.sampled_from(Action),
    steps=st.integers(1, 4),
)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "mismatch/k3": st.one_of(st.none(), st.floats(1e-6, 1e2)),
            "mismatch/ess/raw_token": st.one_of(st.none(), st.floats(0.01, 1.0)),
            "mismatch/khat/token": st.one_of(st.none(), st.floats(-1.0, 3.0)),
        }
    ),
    max_size=40,
)


def judged(guard: NumberGuard, seen: Sequence[Row], first: int = 1) -> list[tuple[float | None, float | None, str]]:
    """(level, bad numbers, severities of the events) after each row."""
    found = []
    for step, row in enumerate(seen, start=first):
        metrics, events = guard.observe(step, row)
        assert guard.saves == (metrics["guard/level"] in (2, 3)) and guard.stops == (metrics["guard/level"] == 3)
        found.append((metrics["guard/level"], metrics["guard/bad"], " ".join(event.severity.name for event in events)))
    return found


def levels(config: MismatchGuardConfig, seen: Sequence[Row]) -> list[float | None]:
    return [level for level, _, _ in judged(NumberGuard(config), seen)]


@EXAMPLES
@given(guards, rows)
def test_the_guard_acts_once_when_a_number_has_been_bad_in_as_many_steps_in_a_row(
    config: MismatchGuardConfig, seen: list[Row]
) -> None:
    strongest = 1.0 + tuple(Action).index(config.highest)
    only_k3 = [{"mismatch/k3": row["mismatch/k3"]} for row in seen]
    in_a_row = 0
    for (level, bad, severities), row in zip(judged(NumberGuard(config), only_k3), only_k3, strict=True):
        k3 = row["mismatch/k3"]
        was_bad = in_a_row >= config.steps
        if k3 is not None:
            in_a_row = in_a_row + 1 if k3 > 1e-2 else 0
        is_bad = in_a_row >= config.steps
        acts = is_bad and not was_bad
        assert (level, bad) == (strongest if acts else float(is_bad), float(is_bad))
        assert severities == (
            "info" if was_bad and not is_bad else "" if not acts else "error" if level == 3 else "warn"
        )
        if level == 3:
            in_a_row = 0  # a run that goes on is stopped again after as many steps


@EXAMPLES
@given(guards, rows, st.data())
def test_unknown_numbers_change_nothing(config: MismatchGuardConfig, seen: list[Row], data: Any) -> None:
    places = data.draw(st.lists(st.integers(0, len(seen)), max_size=10))
    more = list(seen)
    for place in sorted(places, reverse=True):
        more.insert(place, UNKNOWN)
    assert judged(NumberGuard(config), [*more, GOOD])[-1] == judged(NumberGuard(config), [*seen, GOOD])[-1]


@EXAMPLES
@given(guards, rows, st.data())
def test_a_guard_that_is_saved_and_goes_on_decides_as_if_it_had_not_been(
    config: MismatchGuardConfig, seen: list[Row], data: Any
) -> None:
    cut = data.draw(st.integers(0, len(seen)))
    whole, first, second = NumberGuard(config), NumberGuard(config), NumberGuard(config)
    expected = judged(whole, seen)
    judged(first, seen[:cut])
    assert second.load_state_dict(json.loads(json.dumps(first.state_dict()))) == []
    assert judged(second, seen[cut:]) == expected[cut:]
    assert second.state_dict() == whole.state_dict()


def test_a_row_of_bad_steps_that_is_broken_begins_anew() -> None:
    config = MismatchGuardConfig()
    assert levels(config, [BAD, BAD, GOOD] * 5) == [0] * 15
    assert levels(config, [BAD, UNKNOWN, BAD, UNKNOWN, BAD, BAD, GOOD]) == [0, 0, 0, 0, 1, 1, 0]


def test_each_number_has_its_direction_and_its_own_row() -> None:
    config = MismatchGuardConfig(steps=2)
    low_ess = GOOD | {"mismatch/ess/raw_token": 0.2}
    heavy = GOOD | {"mismatch/ess/raw_token": 0.6, "mismatch/khat/token": 0.8}
    assert [bad for _, bad, _ in judged(NumberGuard(config), [low_ess, low_ess, heavy, heavy])] == [0, 1, 0, 1]
    both = low_ess | BAD | {"mismatch/ess/raw_token": 0.2}
    assert [bad for _, bad, _ in judged(NumberGuard(config), [low_ess, both, both])] == [0, 1, 2]
    # Where the weights have no tail that matters k-hat is not measured: that ends the row.
    assert [bad for _, bad, _ in judged(NumberGuard(config), [heavy, GOOD, heavy])] == [0, 0, 0]


def test_a_number_that_is_no_longer_watched_is_forgotten() -> None:
    before = NumberGuard(MismatchGuardConfig())
    judged(before, [BAD] * 5)
    after = NumberGuard(MismatchGuardConfig(max_k3=None))
    after.load_state_dict(before.state_dict() or {})
    assert judged(after, [BAD]) == [(0, 0, "")]


def make_config(**changes: Any) -> TrainConfig:
    return TrainConfig(model=ArithmeticModelConfig(), data=ArithmeticDataConfig(), **changes)


def test_what_is_told() -> None:
    config = MismatchGuardConfig(highest=Action.stop, steps=2)
    guard = build_guard(make_config(guard=config, checkpoint=CheckpointConfig(every=10)))
    assert guard.observe(1, BAD)[1] == []
    [event] = guard.observe(2, BAD)[1]
    assert (event.step, event.kind, event.severity) == (2, "guard", Severity.error)
    assert event.text == "guard: k3 is 0.5 (bad above 0.01 for 2 steps in a row): the run is saved and ended"
    mild = NumberGuard(MismatchGuardConfig(steps=1))
    [event] = mild.observe(1, GOOD | {"mismatch/ess/raw_token": 0.1})[1]
    assert (event.severity, event.text) == (Severity.warn, "guard: ess is 0.1 (bad below 0.3 for 1 step in a row)")
    [event] = mild.observe(2, GOOD)[1]
    assert (event.severity, event.text) == (Severity.info, "guard: ess is good again")


def test_a_checkpoint_of_an_earlier_version_begins_with_a_fresh_guard() -> None:
    guard = NumberGuard(MismatchGuardConfig())
    [line] = guard.load_state_dict({"rung": 3, "pressed": 0, "calm": 0, "signals": {"k3": {"bad": True, "row": 0}}})
    assert "earlier version" in line and guard.state_dict() == {"bad_steps": {}}


def test_without_a_guard_nothing_is_decided() -> None:
    guard = build_guard(make_config())
    assert guard.observe(1, BAD) == ({}, [])
    assert not guard.saves and not guard.stops and guard.state_dict() is None
    assert "this run has none" in guard.load_state_dict({"bad_steps": {}})[0]


def test_what_the_config_forbids() -> None:
    for highest in (Action.save, Action.stop):
        with pytest.raises(ConfigError, match=r"guard\.highest must be warn without checkpoints"):
            make_config(guard=MismatchGuardConfig(highest=highest))
        make_config(guard=MismatchGuardConfig(highest=highest), checkpoint=CheckpointConfig(every=10))
    make_config(guard=MismatchGuardConfig())
    with pytest.raises(ConfigError, match="max_k3 must be > 0"):
        MismatchGuardConfig(max_k3=0.0)
    with pytest.raises(ConfigError, match=r"min_ess must lie in \(0, 1\) or be null: it is a fraction"):
        MismatchGuardConfig(min_ess=1.5)
    with pytest.raises(ConfigError, match="steps must be >= 1"):
        MismatchGuardConfig(steps=0)
    with pytest.raises(ConfigError, match="nothing is watched"):
        MismatchGuardConfig(max_k3=None, min_ess=None, max_khat=None)
