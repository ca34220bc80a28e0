"""The content around the charts of a report: headline numbers, phases, differences of configs."""

from __future__ import annotations

import pytest
from run_directory import make_run

from trainer.report.data import evaluation_rows
from trainer.report.headline import changes, config_difference, facts, tiles
from trainer.report.phases import phases, speeds


def test_headline_numbers() -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.4, "eval/policy_version": 0},
        {"step": 1, "reward/mean": 0.25, "mismatch/k3": 2e-6, "mismatch/k3_floor": 1e-6, "time/step_s": 6.0,
         "time/rollout_s": 1.5, "time/reward_s": 4.0, "time/log_s": 0.1, "time/sync_s": 0.0, "sync/gb_per_s": 0.5},
        {"step": 2, "reward/mean": 0.5, "mismatch/k3": 4e-6, "mismatch/k3_floor": None, "time/step_s": 2.0,
         "time/rollout_s": 1.0, "time/train_s": 0.4},
        {"step": 3, "reward/mean": 0.75, "mismatch/k3": 9e-6, "time/step_s": 2.0, "time/rollout_s": 0.5,
         "eval/accuracy": 0.9, "eval/policy_version": 3},
    ]  # fmt: skip
    shown = {tile.label: (tile.before, tile.value, tile.detail) for tile in tiles(make_run(rows))}
    assert shown == {
        "Held-out, greedy": ("40.0 %", "90.0 %", "+50.0 points"),
        "Reward": ("0.25", "0.75", "+0.5, first to last step"),
        "Mismatch K3": ("", "4.00e-06", "median, rounding floor 1.00e-06"),
        "Time per step": ("", "2 s", "median, reward 40 %, rollout 30 %, train 4 %"),
    }
    assert [tile.value for tile in speeds(make_run(rows))] == ["0.5 GB/s"], "not a headline: an engineer looks for it"
    assert [row["step"] for row in evaluation_rows(rows)] == [0, 3]


@pytest.mark.parametrize(
    ("weights", "arithmetic", "cause"),
    [
        (9e-4, 3e-4, ", mostly from the rounding of the weights"),
        (1e-4, 3e-4, ", mostly from the arithmetic"),
        (0.0, 3e-4, ", mostly from the arithmetic"),
        (3e-4, 2e-4, ", from weights and arithmetic alike"),
        (None, None, ""),
    ],
)
def test_the_larger_part_of_the_mismatch_is_named(weights: float | None, arithmetic: float | None, cause: str) -> None:
    parts = {"mismatch/k3_weights": weights, "mismatch/k3_arithmetic": arithmetic}
    [tile] = [tile for tile in tiles(make_run([{"step": 1, "mismatch/k3": 1e-3, **parts}])) if "K3" in tile.label]
    assert tile.detail == f"median{cause}"


def test_tokens_of_older_weights_are_named_where_the_measured_parts_explain_little() -> None:
    measured = {"mismatch/k3_weights": 1e-6, "mismatch/k3_arithmetic": 2e-6}
    old = {"mismatch/k3": 4e-3, "mismatch/by_lag/4/k3": 8e-3}
    late = {"mismatch/k3_weights": None, "mismatch/k3_arithmetic": None}

    def cause(*rows: dict[str, float | None]) -> str:
        run = make_run([{"step": step, **row} for step, row in enumerate(rows, start=1)])
        [tile] = [tile for tile in tiles(run) if "K3" in tile.label]
        return tile.detail

    assert cause(old | measured, old | late, old | late) == "median, mostly from tokens of older weights"
    small = {"mismatch/k3": 4e-6, "mismatch/by_lag/4/k3": 4e-6}
    assert cause(small | measured) == "median, mostly from the arithmetic"
    assert cause(small | measured, small | late, small | late) == "median", "measured in one step of three"


def test_a_key_that_one_run_does_not_have_differs() -> None:
    first = make_run(
        [], config={"a": {"b": 1, "c": None, "same": 2}, "defaults": [{"correction": "tis"}], "run": {"dir": "x"}}
    )
    second = make_run([], config={"a": {"same": 2}, "defaults": [{"correction": "mis"}], "run": {"dir": "y"}})
    assert config_difference([first, second]) == [("correction", ["tis", "mis"]), ("a.b", ["1", ""])]


def test_an_option_without_keys_of_its_own_is_told() -> None:
    first = make_run([], config={"defaults": [{"/schedule": "sync"}], "schedule": {}})
    second = make_run([], config={"defaults": [{"/schedule": "one_step_off"}], "schedule": {"max_lag": 2}})
    found = config_difference([first, second])
    assert found[0] == ("schedule", ["sync", "one_step_off"])


def test_settings_that_a_resume_changed_are_told_with_their_steps() -> None:
    def settings(correction: str, lr: float, **more: object) -> dict[str, object]:
        return {
            "defaults": [{"correction": correction}],
            "correction": more,
            "optim": {"lr": lr, "beta2": 0.99},
            "run": {"num_steps": int(1 / lr)},
        }

    earlier = [(9, settings("mis", 0.001, low=0.5)), (20, settings("tis", 0.001, cap=2.0))]
    run = make_run([], config=settings("tis", 0.0005, cap=2.0), earlier=earlier)
    assert changes(run) == [
        ("correction", "mis until step 9, then tis"),
        ("optim.lr", "0.001 until step 20, then 0.0005"),
        ("run.num_steps", "1000 until step 20, then 2000"),
    ]
    assert "correction mis until step 9, then tis" in facts(run)
    other = make_run([], config=settings("tis", 0.0005, cap=2.0))
    assert changes(other) == [] and "correction tis, C = 2" in facts(other)
    different = dict(config_difference([run, other]))
    assert different["correction"] == ["mis until step 9, then tis", "tis"]
    assert different["correction.cap"] == ["- until step 9, then 2.0", "2.0"]
    assert "optim.beta2" not in different


def test_a_resumed_run_began_with_its_first_process() -> None:
    first, last = "2026-11-24T02:15:00+00:00", "2026-11-24T02:17:27+00:00"
    run = make_run([], environment={"first_started_at": first, "started_at": last})
    assert facts(run)[-2:] == ["started 2026-11-24 02:15 UTC", "resumed 2026-11-24 02:17 UTC"]
    assert facts(make_run([], environment={"started_at": last}))[-1] == "started 2026-11-24 02:17 UTC"


def test_phases_have_their_share_of_the_run() -> None:
    rows = [
        {"step": 1, "time/rollout_s": 3.0, "time/step_s": 4.0, "perf/rollout_floor_frac": 0.5, "time/eval_s": 1.0},
        {"step": 2, "time/rollout_s": 3.0, "time/step_s": 6.0, "perf/rollout_floor_frac": 0.25},
    ]
    table = {row.name: row.cells[0] for row in phases([make_run(rows)])}
    assert (table["rollout"].seconds, table["rollout"].share, table["rollout"].limit) == ("3 s", "60.0 %", "37.5 %")
    assert (table["eval"].share, table["eval"].limit, table["step"].seconds) == ("10.0 %", "", "5 s")
