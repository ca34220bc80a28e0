"""A run under the guard, with real engines and ranks: it trips, tightens, freezes, stops, and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import QUICK, column, compose, metrics_of

from trainer.compose.compose import resolve
from trainer.replay.results import replay_step
from trainer.run.loop import train
from trainer.rundir.checkpoint import newest_checkpoint
from trainer.rundir.dump import open_dump
from trainer.rundir.termination import STOPPED_BY_GUARD, StoppedByGuard

pytestmark = pytest.mark.slow

# Entropy gives a gradient where the hurried base model earns no reward: a policy that is not frozen must move.
WORDS = (
    *QUICK, "batch.prompts_per_step=4", "batch.group_size=4", "policy.num_workers=1", "rollout=torch",
    "eval.max_prompts=4", "loss.entropy_coef=0.01", "checkpoint.every=100", "run.num_steps=20", "guard=mismatch",
    "guard.highest=stop", "guard.trip_steps=1", "guard.escalate_steps=1", "guard.clear_steps=1", "guard.tightenings=1",
    "dump.every=3",
)  # fmt: skip
ANY_MISMATCH_IS_BAD = ("guard.k3.trip=1e-12", "guard.k3.clear=1e-13")
NO_MISMATCH_IS_BAD = ("guard.k3.trip=10", "guard.k3.clear=5", "run.num_steps=8")


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text("utf-8").splitlines()]


def test_a_run_is_tightened_frozen_stopped_and_goes_on_where_it_was(tmp_path: Path, local_ray: None) -> None:
    run_dir = tmp_path / "run"
    words = (*WORDS, f"run.dir={run_dir}")
    with pytest.raises(StoppedByGuard, match="stopped by the guard after step 4") as stopped:
        train(compose("arithmetic_grpo", *words, *ANY_MISMATCH_IS_BAD))
    assert stopped.value.exit_code == STOPPED_BY_GUARD == 3
    rows = metrics_of(run_dir)
    assert column(rows, "guard/level") == [0, 1, 2, 3]
    assert column(rows, "guard/next_level") == [1, 2, 3, 4]
    assert column(rows, "guard/tightenings") == [0, 0, 1, 1]
    # What the ranks trained with: tis, then mis, with the veto that tis does not have.
    assert column(rows, "guard/bound_low") == [None, None, *[pytest.approx(2**-0.8)] * 2]
    assert column(rows, "guard/bound_high") == [2, 2, *[pytest.approx(2**0.8)] * 2]
    assert ["mismatch/rs/veto_frac" in row for row in rows] == [False, False, True, True]
    assert column(rows, "rollout/policy_version") == [0, 1, 2, 3]
    assert [row["optim/grad_norm"] is not None for row in rows] == [True, True, True, False]
    assert all(row["mismatch/k3"] > 0 for row in rows), "a frozen policy is still measured"
    texts = [event["text"] for event in events_of(run_dir)]
    assert [text.split()[1].rstrip(":") for text in texts] == ["warn", "tighten", "freeze", "stop"]
    assert json.loads((run_dir / "status.json").read_text("utf-8"))["status"] == "stopped"
    assert (run_dir / "report.html").exists()
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None and (checkpoint.state.step, checkpoint.state.policy_version) == (4, 3)
    assert checkpoint.state.guard is not None and checkpoint.state.guard["stops"] == 1

    # What is written down of the tightened step says so, and replays to what was logged.
    dump = open_dump(run_dir, 3)
    resolution = resolve(dump.path / "config.yaml", (), own_dir=None, multirun=False)
    config = resolution.runs[0].config
    assert config is not None and dump.manifest.correction == config.correction.mode == "mis"
    assert not replay_step(dump, config, ["tis"], run_dir=run_dir).reproduction.different

    # It goes on frozen; what was bad is good by other bounds, so each step takes an action back.
    train(compose("arithmetic_grpo", *words, *NO_MISMATCH_IS_BAD, "run.resume=auto"))
    rows = metrics_of(run_dir)
    assert column(rows, "step") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert column(rows, "guard/level")[4:] == [3, 2, 1, 0]
    assert column(rows, "guard/tightenings")[4:] == [1, 1, 0, 0]
    assert column(rows, "rollout/policy_version")[4:] == [3, 3, 4, 5]
    assert [row["optim/grad_norm"] is not None for row in rows[4:]] == [False, True, True, True]
    assert [event["step"] for event in events_of(run_dir)] == [1, 2, 3, 4, 5, 6, 7]
