"""Whole runs in which the engines sample beside training, and runs that carry unfinished responses over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import QUICK, column, compose, metrics_of

from trainer.config.train import TrainConfig
from trainer.run.loop import train

pytestmark = pytest.mark.slow

SMALL = ("batch.prompts_per_step=8", "batch.group_size=4")


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize(
    "words",
    [
        ("schedule=bounded", "schedule.max_staleness=2", "eval.every=2", "policy.num_workers=2"),
        ("collect.partial=true", "collect.over_sampling=1.5", "policy.num_workers=1"),
    ],
    ids=["bounded", "partial"],
)
def test_a_run_with_old_tokens_trains_and_accounts_for_them(
    words: tuple[str, ...], engine: str, tmp_path: Path, local_ray: None
) -> None:
    words = (*QUICK, *SMALL, f"rollout={engine}", *words, "run.num_steps=5", f"run.dir={tmp_path / 'run'}")
    config = compose("arithmetic_grpo", *words)
    check_accounts(config, metrics_of(train(config).run_dir))


def check_accounts(config: TrainConfig, rows: list[dict[str, Any]]) -> None:
    """Five steps, all of whose tokens are accounted for."""
    updates = config.batch.optimizer_steps_per_rollout
    assert column(rows, "step") == [1, 2, 3, 4, 5]
    assert column(rows, "rollout/groups_kept") == [8] * 5
    assert column(rows, "rollout/policy_version") == [0, updates, 2 * updates, 3 * updates, 4 * updates]
    assert all(0 <= lag <= config.max_staleness * updates for lag in column(rows, "rollout/lag_max"))
    assert sum(column(rows, "rollout/wasted_tokens")) == 0
    assert all(0 <= share <= 1 for share in column(rows, "perf/overlap_frac"))
    if config.schedule.steps_ahead:
        assert max(column(rows, "perf/overlap_frac")) > 0
        assert column(rows, "rollout/groups_left_over")[-1] == 0
    assert sum(column(rows, "time/unattributed_s")) < 0.02 * sum(column(rows, "time/step_s"))


TURNS = """
async def rollout(episode):
    "One turn for an odd sum, and another one for an even sum."
    await episode.generate(max_new_tokens=2)
    if int(episode.answer) % 2 == 0:
        episode.observe("=")
        await episode.generate(max_new_tokens=2)
"""


def test_one_step_off_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path, local_ray: None) -> None:
    """The checkpoint holds the step that was sampled and not trained: it is not sampled again, and nothing is lost."""
    words = (*QUICK, *SMALL, "schedule=one_step_off", "checkpoint.every=2", "run.num_steps=5", "policy.num_workers=1")
    # The third step is trained on three times, in orders that a resumed run must draw again.
    words += ("rollout=torch", "batch.mini_batch_prompts=4", "batch.passes=3")
    (tmp_path / "turns.py").write_text(TURNS)
    words += (f"episode.function={tmp_path}/turns.py:rollout", "tracking.samples_per_step=32")
    config = compose("arithmetic_grpo", *words, f"run.dir={tmp_path / 'whole'}")
    whole = train(config).run_dir
    rows = metrics_of(whole)
    check_turns(whole, rows)
    assert column(rows, "rollout/lag_mean") == [0, 6, 6, 6, 6]
    parted = tmp_path / "parted"
    shutil.copytree(whole, parted)
    shutil.rmtree(parted / "checkpoints" / "step_000005")
    train(compose("arithmetic_grpo", *words, "run.resume=auto", f"run.dir={parted}"))
    mine, theirs = metrics_of(parted), metrics_of(whole)
    keys = ("reward/mean", "mismatch/k3", "optim/grad_norm", "rollout/response_tokens", "rollout/lag_mean")
    keys += ("rollout/groups_generated", "rollout/generated_tokens", "reward/generated_accuracy")
    keys += ("episode/turns_mean", "episode/shown_tokens_mean", "episode/failed")
    for key in keys:
        assert column(mine, key) == column(theirs, key), key
    assert mine[-1]["eval/accuracy_sampled"] == theirs[-1]["eval/accuracy_sampled"]


def check_turns(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """The row of each step counts its own episodes, also if they ended while the step before was trained on."""
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        mine = [each for each in samples if each["step"] == row["step"]]
        turns = [sum(part["sampled"] for part in each.get("segments") or [{"sampled": True}]) for each in mine]
        assert row["episode/turns_mean"] == pytest.approx(sum(turns) / len(turns)) and 1 < row["episode/turns_mean"] < 2
