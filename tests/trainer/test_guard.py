"""trainer/run/guard: the state machine under random metrics, the early warning, and what a tightened correction
keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.config import BypassConfig, ConfigError, CorrectionConfig, TISConfig
from algorithms.config.combine import combination_problems
from algorithms.config.correction import BypassLoss
from algorithms.correction import correct
from algorithms.tokens import Tokens
from rollout.task_config import ArithmeticDataConfig
from trainer.config.components import ArithmeticModelConfig
from trainer.config.guard import (
    Action,
    ESSBandConfig,
    K3BandConfig,
    KHatBandConfig,
    MismatchGuardConfig,
    RiseConfig,
    WatchedWeights,
)
from trainer.config.recording import CheckpointConfig
from trainer.config.tighten import tightened
from trainer.config.train import GROUPS, PRESETS, TrainConfig
from trainer.run.guard import MismatchGuard, build_guard, described
from trainer.run.guard_machine import GuardState, Ladder, Row, after, readings
from trainer.run.guard_rise import RiseState, after_step
from trainer.rundir.events import Severity

GOOD = {"mismatch/k3": 1e-4, "mismatch/ess/raw_token": 0.999, "mismatch/khat/token": None}
BAD = GOOD | {"mismatch/k3": 0.5}
BETWEEN = GOOD | {"mismatch/k3": 0.007}
UNKNOWN: dict[str, float | None] = {"mismatch/k3": None, "mismatch/ess/raw_token": None}

EXAMPLES = settings(max_examples=60, deadline=None)

guards = st.builds(
    MismatchGuardConfig,
    highest=st.sampled_from(Action),
    trip_steps=st.integers(1, 4),
    clear_steps=st.integers(1, 4),
    escalate_steps=st.integers(1, 4),
    tightenings=st.integers(1, 3),
)
values = st.one_of(st.none(), st.floats(1e-6, 1e2))
rows = st.lists(
    st.fixed_dictionaries(
        {
            "mismatch/k3": values,
            "mismatch/ess/raw_token": st.one_of(st.none(), st.floats(0.01, 1.0)),
            "mismatch/khat/token": st.one_of(st.none(), st.floats(-1.0, 3.0)),
        }
    ),
    max_size=60,
)


def run(config: MismatchGuardConfig, seen: Sequence[Row], state: GuardState | None = None) -> list[GuardState]:
    """The states after each row."""
    states, state = [], state or GuardState()
    for row in seen:
        state = after(config, state, row).state
        states.append(state)
    return states


@EXAMPLES
@given(guards, rows)
def test_the_ladder_moves_one_rung_at_a_time_and_climbs_only_on_bad_numbers(
    config: MismatchGuardConfig, seen: list[Row]
) -> None:
    state, top = GuardState(), Ladder(config).top
    for row in seen:
        found = after(config, state, row)
        assert abs(found.state.rung - state.rung) <= 1 and 0 <= found.state.rung <= top
        if found.state.rung > state.rung or found.stop:
            assert found.state.bad
        if found.state.rung < state.rung:
            assert not found.state.bad
        if found.stop:
            assert config.highest is Action.stop and state.rung == top
        for name in set(found.state.bad) ^ set(state.bad):
            assert next(r for r in readings(config, row) if r.name == name).value is not None
        state = found.state


@EXAMPLES
@given(guards, rows, st.data())
def test_unknown_numbers_change_nothing(config: MismatchGuardConfig, seen: list[Row], data: Any) -> None:
    places = data.draw(st.lists(st.integers(0, len(seen)), max_size=10))
    more = list(seen)
    for place in sorted(places, reverse=True):
        more.insert(place, UNKNOWN)
    assert run(config, [*more, GOOD])[-1] == run(config, [*seen, GOOD])[-1]
    assert run(config, [*seen, {}])[-1] == (run(config, seen) or [GuardState(signals=run(config, [{}])[0].signals)])[-1]


@EXAMPLES
@given(guards, rows, st.data())
def test_a_guard_that_is_saved_and_goes_on_decides_as_if_it_had_not_been(
    config: MismatchGuardConfig, seen: list[Row], data: Any
) -> None:
    cut = data.draw(st.integers(0, len(seen)))
    saved = json.loads(json.dumps((run(config, seen[:cut]) or [GuardState()])[-1].to_json()))
    assert run(config, seen[cut:], GuardState.from_json(saved)) == run(config, seen)[cut:]


@EXAMPLES
@given(guards, rows)
def test_what_is_good_again_takes_every_action_back(config: MismatchGuardConfig, seen: list[Row]) -> None:
    needed = config.clear_steps * (Ladder(config).top + 1)
    state = (run(config, [*seen, *[GOOD] * needed]))[-1]
    assert (state.rung, state.bad) == (0, [])


@EXAMPLES
@given(guards)
def test_what_stays_bad_climbs_at_the_given_pace_and_stops_only_at_the_top(config: MismatchGuardConfig) -> None:
    top = Ladder(config).top
    until_top = config.trip_steps + (top - 1) * config.escalate_steps
    states = run(config, [BAD] * until_top)
    assert states[-1].rung == top
    assert all(state.rung < top for state in states[:-1])
    assert [state.rung for state in states].count(0) == config.trip_steps - 1
    state, stops = states[-1], []
    for _ in range(3 * config.escalate_steps):
        state, stop = after(config, state, BAD)
        stops.append(stop)
    expected = [(number + 1) % config.escalate_steps == 0 for number in range(len(stops))]
    assert stops == (expected if config.highest is Action.stop else [False] * len(stops))
    assert state.rung == top, "a run that goes on after a stop begins where it was"


@EXAMPLES
@given(guards, st.integers(1, 50))
def test_between_the_thresholds_nothing_begins_and_nothing_ends(config: MismatchGuardConfig, count: int) -> None:
    assert all(state.rung == 0 and not state.bad for state in run(config, [BETWEEN] * count))
    tripped = run(config, [BAD] * config.trip_steps)[-1]
    assert all(state.bad == ["k3"] for state in run(config, [BETWEEN] * count, tripped))


def test_a_row_of_bad_steps_that_is_broken_begins_anew() -> None:
    config = MismatchGuardConfig(trip_steps=3)
    assert all(not state.bad for state in run(config, [BAD, BAD, BETWEEN] * 10))
    assert run(config, [BAD, UNKNOWN, BAD, UNKNOWN, BAD])[-1].bad == ["k3"]
    cleared = run(config, [BAD] * 3 + ([GOOD] * 4 + [BETWEEN]) * 5)[-1]
    assert cleared.bad == ["k3"], "five good steps in a row are needed"


def test_each_number_has_its_direction_and_its_level() -> None:
    config = MismatchGuardConfig(trip_steps=1)
    assert run(config, [GOOD | {"mismatch/ess/raw_token": 0.4}])[-1].bad == ["ess"]
    assert run(config, [GOOD | {"mismatch/ess/raw_token": 0.6, "mismatch/khat/token": 0.8}])[-1].bad == ["khat"]
    assert run(config, [GOOD | {"mismatch/ess/raw_seq": 0.1, "mismatch/khat/seq": 3.0}])[-1].bad == []
    of_sequences = replace(config, weights=WatchedWeights.sequence)
    assert run(of_sequences, [{"mismatch/ess/raw_seq": 0.1, "mismatch/khat/seq": 3.0}])[-1].bad == ["ess", "khat"]
    # Where the weights have no tail that matters k-hat is not measured: that clears it.
    tripped = run(config, [GOOD | {"mismatch/ess/raw_token": 0.6, "mismatch/khat/token": 0.8}])
    assert run(config, [GOOD] * config.clear_steps, tripped[-1])[-1].bad == []


def test_a_number_that_is_no_longer_watched_cannot_hold_the_run() -> None:
    config = MismatchGuardConfig(trip_steps=1)
    tripped = run(config, [BAD] * 30)[-1]
    assert Ladder(config).is_frozen(tripped.rung)
    unwatched = replace(
        config, k3=K3BandConfig(trip=None), ess=ESSBandConfig(trip=None), khat=KHatBandConfig(trip=None)
    )
    assert run(unwatched, [BAD], tripped)[-1].rung == 0
    milder = replace(config, highest=Action.warn)
    assert run(milder, [BAD], tripped)[-1].rung == 1


# ---------------------------------------------------------------- the early warning

WATCH = RiseConfig()


def rises(seen: Sequence[float | None], config: RiseConfig = WATCH) -> list[bool]:
    found, state = [], RiseState()
    for k3 in seen:
        state = after_step(config, state, k3)
        found.append(state.rises)
    return found


noise = st.lists(st.floats(-0.5, 0.5), min_size=80, max_size=80)


@EXAMPLES
@given(noise, st.floats(1.0, 1e3))
def test_only_the_change_counts_not_the_place(seen: list[float], factor: float) -> None:
    series = [1e-3 * 4**value for value in seen]
    series[40:50] = [20 * k3 for k3 in series[40:50]]
    state, scaled = RiseState(), RiseState()
    for k3 in series:
        state, scaled = after_step(WATCH, state, k3), after_step(WATCH, scaled, factor * k3)
        assert scaled.total == pytest.approx(state.total, abs=1e-6)


@EXAMPLES
@given(noise)
def test_a_tenfold_k3_is_told_within_four_steps_and_its_end_too(seen: list[float]) -> None:
    series = [1e-3 * 1.5**value for value in seen]
    series[40:60] = [10 * k3 for k3 in series[40:60]]
    found = rises(series)
    assert not any(found[:42]) and found[43]
    assert all(found[43:60]), "the rise does not become its own history"
    assert not any(found[72:])


@EXAMPLES
@given(st.integers(20, 70))
def test_two_bad_samples_are_no_alarm(place: int) -> None:
    series = [1e-3] * 80
    series[place] = series[place + 1] = 10.0
    assert not any(rises(series))


def test_what_is_harmless_is_never_told_and_nothing_before_half_a_window() -> None:
    assert not any(rises([1e-13] * 40 + [1e-9] * 20 + [9e-6] * 20))
    assert not any(rises([1e-5] * 5 + [1.0] * 5))
    assert not any(rises([None] * 100))
    assert not any(rises([1e-3] * 40 + [1.0] * 40, replace(WATCH, window_steps=None)))
    assert any(rises([1e-3, None] * 20 + [1.0, None] * 4))


# ---------------------------------------------------------------- tightening

CORRECTIONS: dict[str, CorrectionConfig] = {
    **{name: kind() for name, kind in GROUPS["correction"].items()},  # type: ignore[dict-item]
    **PRESETS["correction"],  # type: ignore[dict-item]
}
CORRECTIONS["bypass_reinforce"] = BypassConfig(loss=BypassLoss.reinforce)


def kept_and_weights(correction: CorrectionConfig, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = correct(
        correction.spec(),
        Tokens(
            trainer_logprobs=(delta - 3.0).float(),
            rollout_logprobs=torch.full_like(delta, -3.0).float(),
            response_mask=torch.ones(len(delta), dtype=torch.bool),
            cu_seqlens=torch.arange(0, len(delta) + 1, 4, dtype=torch.int32),
            advantages=torch.ones(len(delta)),
        ),
    )
    return found.keep, found.weight


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_tightened_correction_keeps_less_with_every_loss_that_went_before(name: str) -> None:
    correction = CORRECTIONS[name]
    torch.manual_seed(0)
    delta = torch.cat([scale * torch.randn(80) for scale in (1e-4, 0.05, 0.3, 1.0, 4.0)])
    for _ in range(4):
        stricter = tightened(correction)
        for loss in GROUPS["loss"].values():
            if not list(combination_problems(correction, loss())):  # type: ignore[arg-type]
                assert not list(combination_problems(stricter, loss()))  # type: ignore[arg-type]
        (before, _), (kept, weights) = kept_and_weights(correction, delta), kept_and_weights(stricter, delta)
        assert not bool((kept & ~before).any())
        bound = stricter.spec().weight
        if bound is not None and bound.high is not None:
            assert float(weights[kept].max()) <= bound.high * (1 + 1e-5)
        assert described(stricter).startswith(f"correction={stricter.mode}")
        correction = stricter
    assert 0 < int(kept.sum()) < len(delta)


# ---------------------------------------------------------------- the guard of a run


def make_config(**changes: Any) -> TrainConfig:
    base = TrainConfig(model=ArithmeticModelConfig(), data=ArithmeticDataConfig())
    return replace(base, **changes)


def test_rungs_become_overrides_metrics_and_events() -> None:
    config = make_config(
        guard=MismatchGuardConfig(trip_steps=1, escalate_steps=1, tightenings=1, highest=Action.stop),
        checkpoint=CheckpointConfig(every=1),
    )
    guard = build_guard(config)
    levels, texts = [], []
    for step in range(1, 6):
        override = guard.override
        used = override.correction or config.correction
        metrics, events = guard.observe(step, BAD, used)
        levels.append((metrics["guard/level"], metrics["guard/tightenings"], override.learns, guard.stops))
        texts += [(event.severity, event.text) for event in events]
        weight = used.spec().weight
        assert weight is not None and (metrics["guard/bound_low"], metrics["guard/bound_high"]) == (
            weight.low,
            weight.high,
        )
        assert metrics["guard/next_level"] == (4 if guard.stops else min(step, 3))
    assert levels == [
        (0, 0, True, False), (1, 0, True, False), (2, 1, True, False), (3, 1, False, True), (3, 1, False, True),
    ]  # fmt: skip
    assert texts[0] == (Severity.warn, "guard: warn from step 2 on, because k3 is 0.5 (bad above 0.01)")
    assert "tighten: correction=mis correction.level=token" in texts[1][1] and "from step 3 on" in texts[1][1]
    assert "the policy is measured and not updated from step 4 on" in texts[2][1]
    assert texts[3][0] is Severity.error and "stop after step 4" in texts[3][1]
    assert guard.override.applied(config).correction == tightened(TISConfig())

    again = build_guard(config)
    saved = json.loads(json.dumps(guard.state_dict()))
    [line] = again.load_state_dict(saved)
    assert line == "guard: goes on where it was: freeze: the policy is measured and not updated"
    assert again.override == guard.override
    assert isinstance(guard, MismatchGuard) and isinstance(again, MismatchGuard)
    assert again.state == guard.state


def test_a_rise_warns_and_does_nothing_else() -> None:
    config = make_config(guard=MismatchGuardConfig())
    guard = build_guard(config)
    told = []
    for step in range(1, 41):
        k3 = 1e-5 if step <= 20 else 1e-3
        metrics, events = guard.observe(step, GOOD | {"mismatch/k3": k3}, config.correction)
        told += [event.text for event in events]
        assert guard.override.correction is None and guard.override.learns
    assert told == ["guard: K3 rises against its own history and is now 1.0e-03"]
    assert (metrics["guard/level"], metrics["guard/next_level"]) == (1, 1)


def test_without_a_guard_nothing_is_decided() -> None:
    guard = build_guard(make_config())
    assert guard.observe(1, BAD, TISConfig()) == ({}, [])
    assert guard.override.correction is None and guard.override.learns and not guard.stops
    assert guard.state_dict() is None
    assert (
        "this run has none"
        in guard.load_state_dict(MismatchGuard(make_config(guard=MismatchGuardConfig())).state_dict() or {})[0]
    )


def test_what_the_config_forbids() -> None:
    def problems(**changes: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            make_config(**changes)
        return [str(problem) for problem in caught.value.problems]

    [text] = problems(guard=MismatchGuardConfig(highest=Action.stop))
    assert text.startswith("guard.highest must not be stop without checkpoints")
    [text] = problems(guard=MismatchGuardConfig(), correction=TISConfig(cap=1.0))
    assert text.startswith("guard.highest must be warn: correction=tis cannot be tightened")
    make_config(guard=MismatchGuardConfig(highest=Action.warn), correction=TISConfig(cap=1.0))
    for broken in (
        {"k3": {"trip": 1e-3, "clear": 1e-2}},
        {"ess": {"trip": 0.5, "clear": 0.4}},
        {"ess": {"trip": 1.5}},
        {"rise": {"window_steps": 3}},
    ):
        [(part, keys)] = broken.items()
        kind = {"k3": K3BandConfig, "ess": ESSBandConfig, "rise": RiseConfig}[part]
        with pytest.raises(ConfigError):
            kind(**keys)
    with pytest.raises(ConfigError, match="nothing is watched"):
        MismatchGuardConfig(
            k3=K3BandConfig(trip=None),
            ess=ESSBandConfig(trip=None),
            khat=KHatBandConfig(trip=None),
            rise=RiseConfig(window_steps=None),
        )
