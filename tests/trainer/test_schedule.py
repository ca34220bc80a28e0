"""Schedules: what may be combined, and what the engines are given in which phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from policy_cases import make_config

from algorithms.config import ConfigError
from rollout.collect.collector import Collector
from rollout.config import CollectConfig, CollectOrder, FixedCollectConfig, PauseMode
from rollout.sglang.config import SGLangConfig
from trainer.config.schedule import (
    BoundedScheduleConfig,
    OneStepOffScheduleConfig,
    ScheduleConfig,
    SyncScheduleConfig,
)
from trainer.config.train import TrainConfig
from trainer.config.training import Residency
from trainer.run.rollout_schedule import RolloutSchedule

PARTIAL = FixedCollectConfig(partial=True, over_sampling=1.5)


class Log(Collector):
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, int]] = []

    def start(self, step: int, policy_version: int, *, num_steps: int = 1) -> None:
        self.calls.append(("start", step, policy_version, num_steps))

    def finish(self, step: int, policy_version: int) -> None:
        self.calls.append(("finish", step, policy_version, 1))


def calls(config: ScheduleConfig, *, num_steps: int = 3) -> list[tuple[str, int, int, int]]:
    """(verb, step, version of the engines' weights, steps ahead) of a run whose version is the steps before."""
    log = Log()
    schedule = RolloutSchedule(config, log, num_steps=num_steps)
    for step in range(1, num_steps + 1):
        schedule.begin_next(step, step - 1)
        schedule.finish_next(step, step - 1)
    return log.calls


def test_sync_never_works_ahead() -> None:
    assert calls(SyncScheduleConfig()) == []


def test_one_step_off_ends_the_next_step_with_the_weights_that_began_it() -> None:
    assert calls(OneStepOffScheduleConfig()) == [
        ("start", 2, 0, 1),
        ("finish", 2, 0, 1),
        ("start", 3, 1, 1),
        ("finish", 3, 1, 1),
    ]


def test_bounded_fills_the_queue_up_to_its_bound_and_to_the_end_of_the_run() -> None:
    assert calls(BoundedScheduleConfig(max_staleness=2), num_steps=4) == [
        ("start", 2, 0, 2),
        ("start", 3, 1, 2),
        ("start", 4, 2, 1),
    ]


@pytest.mark.parametrize(
    ("schedule", "collect", "lag"),
    [
        (SyncScheduleConfig(), FixedCollectConfig(), 0),
        (SyncScheduleConfig(), replace(PARTIAL, max_partial_age=2), 2),
        (OneStepOffScheduleConfig(), FixedCollectConfig(), 1),
        (BoundedScheduleConfig(max_staleness=3), FixedCollectConfig(), 3),
    ],
)
def test_the_bound_of_staleness(tmp_path: Path, schedule: ScheduleConfig, collect: CollectConfig, lag: int) -> None:
    assert replace(make_config(tmp_path), schedule=schedule, collect=collect).max_staleness == lag


def shared(config: TrainConfig, residency: Residency) -> TrainConfig:
    """One GPU for a rank and an engine."""
    return replace(
        config,
        policy=replace(config.policy, num_workers=1, gpus_per_worker=0.5),
        rollout=replace(config.rollout, gpus_per_engine=0.5),
        cluster=replace(config.cluster, residency=residency),
    )


@pytest.mark.parametrize("schedule", [OneStepOffScheduleConfig(), BoundedScheduleConfig()])
def test_what_makes_no_sense_is_refused(tmp_path: Path, schedule: ScheduleConfig) -> None:
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match=rf"collect\.partial must be false with schedule={schedule.kind}"):
        replace(config, schedule=schedule, collect=PARTIAL)
    with pytest.raises(ConfigError, match=rf"cluster\.residency must be never with schedule={schedule.kind}"):
        replace(shared(config, Residency.auto), schedule=schedule)
    assert replace(shared(config, Residency.never), schedule=schedule).shares_gpus


def test_unfinished_responses_must_outlive_an_update_in_flight(tmp_path: Path) -> None:
    aborting = replace(make_config(tmp_path), rollout=SGLangConfig(pause_mode=PauseMode.abort))
    assert replace(aborting, schedule=OneStepOffScheduleConfig()).max_staleness == 1  # it has none
    with pytest.raises(ConfigError, match=r"rollout\.pause_mode must be retract or in_place with schedule=bounded"):
        replace(aborting, schedule=BoundedScheduleConfig())


def test_the_order_of_completion_needs_something_to_choose_from(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    completion = FixedCollectConfig(order=CollectOrder.completion)
    with pytest.raises(ConfigError, match=r"collect\.order has no effect with collect\.over_sampling=1"):
        replace(config, collect=completion)
    assert replace(config, collect=completion, schedule=BoundedScheduleConfig()).max_staleness == 1
    assert replace(config, collect=replace(completion, over_sampling=2.0)).max_staleness == 0


def test_staleness_is_at_least_a_step() -> None:
    with pytest.raises(ConfigError, match="max_staleness must be >= 1 rollout step"):
        BoundedScheduleConfig(max_staleness=0)
