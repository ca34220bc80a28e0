"""One run with a class of the user's own wherever the page docs/extend.md has one: two ranks, replay, resume."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from extend_page import write_files
from runs import column, metrics_of, replayed

from trainer.cli.commands import run
from trainer.rundir.checkpoint import newest_state
from trainer.rundir.rows import read_rows

pytestmark = pytest.mark.slow

WORDS = (
    *("arithmetic_dapo", "rollout=torch", "policy.num_workers=2", "model.num_steps=120", "tracking.wandb=disabled"),
    *("run.num_steps=2", "run.dir=mine", "dump.every=1", "checkpoint.every=1", "eval.max_prompts=16", "eval.every=0"),
    *("batch.prompts_per_step=8", "batch.group_size=4", "collect.min_prompts=2"),
    *("data=sums.py:Sums", "data.largest=49", "data.chat_template=false", "data.max_prompt_tokens=8"),
    *("collect.filter={use: middling.py:Middling, low: 0.2}", "guard=entropy.py:Entropy", "guard.least=50"),
    *("guard.steps=1", "correction=custom", "correction.level=ctpo.py:HalfPrefix"),
    "correction.bound=ctpo.py:GrowingCap",
    *("correction.reject.custom=[{use: sigma.py:TokenSigma, bound: 1}]", "loss=anchored.py:Anchored"),
    *("loss.aggregation=root_length.py:RootLength", "advantage.estimator=maxrl.py:MaxRL"),
    *("reference.coef=0.01", "reference.estimator=huber.py:Huber", "tracking.metrics=[hellinger.py:Hellinger]"),
    "tracking.sinks=[to_sqlite.py:Sqlite]",
)  # fmt: skip


def test_a_run_in_which_everything_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(["train", *WORDS]) == 0
    rows = metrics_of(Path("mine"))
    assert all(0 < value < 1e-3 for value in column(rows, "own/Hellinger"))
    assert all(0 < value < 1 for value in column(rows, "mismatch/rs/TokenSigma_frac")), "some tokens are outliers"
    assert all(value > 0 for value in column(rows, "optim/grad_norm"))
    assert sum(column(rows, "rollout/groups_dropped/filtered")) > 0
    assert column(rows, "guard/level")[0] == 1
    assert "entropy is" in " ".join(event["text"] for event in read_rows(Path("mine/events.jsonl")))
    with sqlite3.connect("runs.sqlite") as base:
        [(reward,)] = base.execute("select value from numbers where step = 2 and name = 'reward/mean'").fetchall()
    assert reward == rows[1]["reward/mean"]
    assert json.loads(Path("mine/status.json").read_text())["tracker_errors"] == 0

    record = replayed(Path("mine"), 2)
    [mode] = record["modes"]
    assert record["reproduction"]["different"] == {}
    for name in ("own/Hellinger", "mismatch/rs/TokenSigma_frac", "loss/policy"):
        assert mode["metrics"][name] == rows[1][name], name
    assert run(["replay", "mine", "step=2", "modes=gentle.py:GentleTIS"]) == 0
    assert set(record["reproduction"]["yours"]) >= {"hellinger.py:Hellinger", "anchored.py:Anchored"}

    state = newest_state(Path("mine"))
    assert state is not None
    assert {Path(path).name for path in state[1].user_files} >= {"anchored.py", "ctpo.py", "maxrl.py", "sums.py"}
    edited = Path("maxrl.py")
    edited.write_text(edited.read_text() + "# edited\n")
    capsys.readouterr()
    assert run(["resume", "mine", "run.num_steps=3"]) == 0
    assert f"changed since then: what stands in {edited.resolve()}" in "".join(capsys.readouterr())
