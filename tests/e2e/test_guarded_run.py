"""A run under the guard, with real engines and ranks: it warns, saves, stops, and goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import QUICK, column, compose, metrics_of

from trainer.ending.exit_codes import STOPPED_BY_GUARD
from trainer.ending.termination import StoppedByGuard
from trainer.run.loop import train
from trainer.rundir.checkpoint import newest_checkpoint

pytestmark = pytest.mark.slow

WORDS = (
    *QUICK, "batch.prompts_per_step=4", "batch.group_size=4", "policy.num_workers=1", "rollout=torch",
    "eval.max_prompts=4", "checkpoint.every=100", "guard=mismatch", "guard.steps=2",
)  # fmt: skip
ANY_MISMATCH_IS_BAD = "guard.max_k3=1e-12"


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text("utf-8").splitlines()]


def test_a_run_is_stopped_then_saved_and_goes_on_where_it_was(tmp_path: Path, local_ray: None) -> None:
    run_dir = tmp_path / "run"
    words = (*WORDS, f"run.dir={run_dir}", "run.num_steps=4", "guard.highest=stop", "run.resume=auto")
    with pytest.raises(StoppedByGuard, match="stopped by the guard after step 2") as stopped:
        train(compose("arithmetic_grpo", *words, ANY_MISMATCH_IS_BAD))
    assert stopped.value.exit_code == STOPPED_BY_GUARD == 3
    assert column(metrics_of(run_dir), "guard/level") == [0, 3]
    [event] = events_of(run_dir)
    assert (event["step"], event["severity"]) == (2, "error") and "the run is saved and ended" in event["text"]
    assert json.loads((run_dir / "status.json").read_text("utf-8"))["status"] == "stopped"
    assert (run_dir / "report.html").exists()
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None and checkpoint.state.step == 2

    # What has not been repaired is noticed again; this time the run is saved and trains as configured.
    saved = (*words, "run.num_steps=5", "guard.highest=save", ANY_MISMATCH_IS_BAD, "checkpoint.keep=9")
    train(compose("arithmetic_grpo", *saved))
    rows = metrics_of(run_dir)
    assert column(rows, "step") == [1, 2, 3, 4, 5]
    assert column(rows, "guard/level") == [0, 3, 0, 2, 1]
    assert [each["severity"] for each in events_of(run_dir) if each["kind"] == "guard"] == ["error", "warn"]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir()) == [
        "step_000002", "step_000004", "step_000005",
    ]  # fmt: skip
