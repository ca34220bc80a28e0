"""What a run may go on from: the config it may have, the rows that it keeps, `parity resume`."""

from __future__ import annotations

import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from resume_cases import RECIPES, make, rows, save, state_of

from algorithms.config import AdvantageConfig, Estimator, MISConfig
from rollout.data.dataset import PromptStream
from rollout.task_config import FileDataConfig
from rollout.types import FinishReason, Prompt
from trainer.cli.commands import run as parity
from trainer.cli.resume import resume_words
from trainer.compose.compose import resolve
from trainer.config.training import HFModelConfig, Resume
from trainer.ending.termination import termination_requests
from trainer.report.page import write_report
from trainer.run.loop import train
from trainer.run.task import Task, prompt_stream
from trainer.rundir.checkpoint import CheckpointError, begin_checkpoint, commit_checkpoint
from trainer.rundir.events import Event, Severity
from trainer.rundir.resume import (
    changed_keys,
    checkpoint_to_resume,
    flat_config,
    takes_no_step,
    whole_checkpoint,
)
from trainer.rundir.rows import read_rows
from trainer.rundir.run_dir import (
    StartError,
    completed_steps,
    earlier_configs,
    needs_no_step,
    newest_saved_step,
)
from trainer.rundir.sealed_directory import compare_files
from trainer.tracking.console import Console
from trainer.tracking.samples import SampleRow
from trainer.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("no_cached_model")


def sample_row(response: str) -> SampleRow:
    return SampleRow(
        prompt_id=0,
        sample_index=0,
        prompt="?",
        response=response,
        answer="1",
        reward=0.0,
        correct=False,
        advantage=0.0,
        num_response_tokens=1,
        finish_reason=FinishReason.stop,
        policy_version=0,
        rollout_logprob_mean=-0.5,
        k3=None,
        tokens=None,
    )


def test_a_run_goes_on_only_when_it_is_asked_to(tmp_path: Path) -> None:
    config = make(tmp_path)
    save(config, 4)
    assert checkpoint_to_resume(config, tmp_path / "run") is None
    found = checkpoint_to_resume(make(tmp_path, resume=Resume.auto), tmp_path / "run")
    assert found is not None and found.state.step == 4
    assert checkpoint_to_resume(make(tmp_path, resume=Resume.auto), tmp_path / "other") is None


@pytest.mark.scenario(8)
def test_a_checkpoint_of_another_run_is_refused_with_the_keys(tmp_path: Path) -> None:
    config = make(tmp_path, resume=Resume.auto)
    save(config, 4)
    other = replace(config, run=replace(config.run, seed=7), model=replace(config.model, revision="1a2b"))  # type: ignore[call-arg]
    with pytest.raises(StartError) as caught:
        checkpoint_to_resume(other, tmp_path / "run")
    assert "run.seed must be 0, as in " in str(caught.value) and "step_000004: with another" in str(caught.value)
    assert "model.revision must be None, as in " in str(caught.value) and "got '1a2b'" in str(caught.value)


def test_a_key_that_is_no_more_does_not_make_another_run(tmp_path: Path) -> None:
    config = make(tmp_path, resume=Resume.auto)
    state = state_of(config, 4)
    state = replace(state, config=state.config | {"data.seed": 0})
    commit_checkpoint(begin_checkpoint(tmp_path / "run", 4), state, keep=2)
    found = checkpoint_to_resume(config, tmp_path / "run")
    assert found is not None
    assert changed_keys(found.state.config, config) == {"data.seed": "data.seed 0 -> (absent)"}


@pytest.mark.parametrize(("before", "after"), [(Estimator.gae, Estimator.grpo), (Estimator.rloo, Estimator.gae)])
def test_a_checkpoint_with_and_one_without_a_critic_are_not_exchanged(
    tmp_path: Path, before: Estimator, after: Estimator
) -> None:
    config = make(tmp_path, resume=Resume.auto)
    saved = replace(config, advantage=AdvantageConfig(estimator=before))
    save(saved, 4)
    assert checkpoint_to_resume(saved, tmp_path / "run") is not None
    with pytest.raises(
        StartError, match=rf"advantage\.estimator must be {before.name}, as in .* critic, got {after.name}"
    ):
        checkpoint_to_resume(replace(config, advantage=AdvantageConfig(estimator=after)), tmp_path / "run")


@pytest.mark.scenario(8)
def test_other_prompts_behind_the_same_key_are_named_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "?", "answer": "1"}\n')
    config = replace(make(tmp_path), data=FileDataConfig(train_path=str(path), eval_path=str(path)))
    before = [Prompt(prompt_id=n, token_ids=[n], text=str(n), answer=str(n)) for n in range(3)]
    state = replace(state_of(config, 2), stream=PromptStream(before, seed=0).state_dict())
    task = cast(Task, SimpleNamespace(dataset=SimpleNamespace(train=before), model_path=tmp_path, eval_prompts={}))
    prompt_stream(config, task, state)
    task.dataset.train.pop()
    with pytest.raises(StartError, match=r"^data\.train_path must give the prompts that the run had .*rows\.jsonl'"):
        prompt_stream(config, task, state)


@pytest.mark.scenario(8)
def test_what_may_change_is_listed(tmp_path: Path) -> None:
    config = make(tmp_path, resume=Resume.auto)
    save(config, 4)
    moved = HFModelConfig(path=str(tmp_path / "elsewhere"))
    batch, run = replace(config.batch, passes=2), replace(config.run, num_steps=99)
    other = replace(config, model=moved, batch=batch, optim=replace(config.optim, lr=0.5), run=run)
    found = checkpoint_to_resume(other, tmp_path / "run")
    assert found is not None
    assert sorted(changed_keys(found.state.config, other)) == [
        "batch.passes",
        "model.path",
        "optim.lr",
        "run.num_steps",
    ]
    assert changed_keys(found.state.config, other)["optim.lr"] == "optim.lr 0.01 -> 0.5"
    assert not changed_keys(found.state.config, config)


def test_a_resumed_run_has_every_row_once_and_its_wandb_run(tmp_path: Path) -> None:
    config = make(tmp_path, resume=Resume.auto)
    with Tracker(config, run_dir=tmp_path / "run") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step})
        tracker.flush()
    with Tracker(config, run_dir=tmp_path / "run", resumed=state_of(config, 2, wandb_run_id="abcd1234")) as tracker:
        tracker.take_up(state_of(config, 2, wandb_run_id="abcd1234"))
        assert tracker.wandb_run_id == "abcd1234"
        with pytest.raises(ValueError, match="step must grow"):
            tracker.log(2, {})
        tracker.log(3, {"reward/mean": 30})
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert status["status"] is status["last_step"] is None, "a kill would leave it so"
        tracker.log(4, {"reward/mean": 40})
    assert rows(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[2])["reward/mean"] == 30
    with Tracker(config, run_dir=tmp_path / "run", resumed=state_of(config, 4)) as tracker:
        tracker.take_up(state_of(config, 4))  # nothing was left to do
    assert json.loads((tmp_path / "run" / "status.json").read_text())["last_step"] == 4


@pytest.mark.scenario(5)
def test_rows_agree_with_the_checkpoints_after_one_was_unreadable_for_a_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {"reward/mean": step})
            if step in (2, 4):
                save(config, step)
    shard = run_dir / "checkpoints" / "step_000004" / "state.json"
    content = shard.read_bytes()
    shard.unlink()  # a disk that answers again later
    found = checkpoint_to_resume(config, run_dir)
    assert found is not None and found.state.step == 2
    with Tracker(config, run_dir=run_dir, resumed=found.state) as tracker:
        tracker.take_up(found.state)
        tracker.log(3, {"reward/mean": 30})  # and the process is killed
    aside = run_dir / "checkpoints" / "step_000004.aside"
    assert f"renamed to {aside.name}" in capsys.readouterr().err
    (aside / "state.json").write_bytes(content)
    found = checkpoint_to_resume(config, run_dir)
    assert found is not None and found.state.step == 2
    with Tracker(config, run_dir=run_dir, resumed=found.state) as tracker:
        tracker.take_up(found.state)
        for step in (3, 4, 5):
            tracker.log(step, {})
    assert rows(run_dir / "metrics.jsonl") == [1, 2, 3, 4, 5]


@pytest.mark.scenario(4)
def test_what_the_ranks_find_damaged_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto), tmp_path / "run"
    files = [save(config, step) for step in (2, 4)]
    candidate = checkpoint_to_resume(config, run_dir)
    assert candidate is not None
    assert whole_checkpoint(config, run_dir, candidate, compare=compare_files) == candidate
    files[1].write_bytes(b"wEights")
    candidate = checkpoint_to_resume(config, run_dir)
    assert candidate is not None and candidate.state.step == 4, "the driver leaves the content to the ranks"
    assert not caplog.text
    found = whole_checkpoint(config, run_dir, candidate, compare=compare_files)
    assert found.state.step == 2 and "step_000004 cannot be used" in caplog.text
    assert "__0_0.distcp has changed since it was written" in caplog.text
    other = replace(config, run=replace(config.run, seed=7))
    with pytest.raises(CheckpointError, match=r"run\.seed must be 0, as in .*step_000002"):
        whole_checkpoint(other, run_dir, candidate, compare=compare_files)
    files[0].write_bytes(b"weighTs")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*step_000004.*step_000002"):
        whole_checkpoint(config, run_dir, candidate, compare=compare_files)


@pytest.mark.scenario(4)
def test_damage_is_found_where_no_rank_would_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto, num_steps=3), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {})
        shards = [save(config, step) for step in (2, 3)]
    found = checkpoint_to_resume(config, run_dir)
    assert takes_no_step(config, run_dir, found) and found is not None and found.state.step == 3
    shards[1].write_bytes(b"wEights")
    found = checkpoint_to_resume(config, run_dir)
    assert found is not None and found.state.step == 2 and "step_000003 cannot be used" in caplog.text
    assert not takes_no_step(config, run_dir, found), "step 3 is taken again"


def test_a_run_keeps_its_files_as_they_are_until_it_is_known_from_where_it_goes_on(tmp_path: Path) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in (1, 2, 3, 4):
            tracker.log(step, {})
    changed = replace(config, optim=replace(config.optim, lr=0.5))
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file() and path.name != "status.json"}
    with Tracker(changed, run_dir=run_dir, resumed=state_of(config, 3)) as tracker:
        with pytest.raises(RuntimeError, match=r"after take_up\(\)"):
            tracker.log(4, {})
        held = {path: path.read_bytes() for path in before}
        assert held.keys() == before.keys() and all(
            held[path] == before[path] for path in before if path.name != ".lock"
        )
        tracker.take_up(state_of(config, 2))
        tracker.log(3, {})
    assert rows(run_dir / "metrics.jsonl") == [1, 2, 3]
    assert [step for step, _ in earlier_configs(run_dir)] == [2]


def test_a_run_that_took_all_its_steps_is_left_as_it_is(tmp_path: Path) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto, num_steps=3), tmp_path / "run"
    assert completed_steps(run_dir) is None and newest_saved_step(run_dir) is None
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step})
        save(config, 3)
        assert completed_steps(run_dir) is None
    assert completed_steps(run_dir) == newest_saved_step(run_dir) == 3
    before = {path: path.read_bytes() for path in run_dir.rglob("*.json*")}
    result = train(config)  # its model does not exist: starting anything would fail
    assert result.was_complete and result.report_path.is_file()
    assert {path: path.read_bytes() for path in run_dir.rglob("*.json*")} == before
    assert needs_no_step(run_dir, saved=3, num_steps=2) and not needs_no_step(run_dir, saved=3, num_steps=4)
    assert not needs_no_step(run_dir, saved=2, num_steps=3), "its last checkpoint is damaged: step 3 is taken again"
    with pytest.raises(StartError, match="no such directory is in"):
        train(replace(config, run=replace(config.run, num_steps=4)))
    assert completed_steps(run_dir) == 3, "nothing was written"


def test_a_request_while_the_page_is_written_ends_no_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto, num_steps=1), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        tracker.log(1, {"reward/mean": 1})
        save(config, 1)

    def interrupted(directory: Path) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return write_report(directory)

    monkeypatch.setattr("trainer.run.loop.write_report", interrupted)
    with termination_requests() as outer:
        assert train(config).report_path.is_file()
    assert outer.request is None


def test_a_completed_run_that_saved_nothing_is_left_as_it_is(tmp_path: Path) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto, num_steps=2), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in (1, 2):
            tracker.log(step, {"reward/mean": step})
    assert completed_steps(run_dir) == 2 and newest_saved_step(run_dir) is None
    assert train(config).was_complete
    assert rows(run_dir / "metrics.jsonl") == [1, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]


def test_a_report_that_cannot_be_written_does_not_fail_a_completed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto, num_steps=1), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        tracker.log(1, {})
        save(config, 1)
    (run_dir / "report.html").mkdir()
    result = train(config)
    assert result.was_complete and result.report_path is None
    assert "the run has no report: [Errno 21] Is a directory" in caplog.text


def recorded_run(run_dir: Path, *words: str, steps: int) -> None:
    """A run of arithmetic_grpo with these overrides that took and saved `steps` steps."""
    resolution = resolve(
        RECIPES / "arithmetic_grpo.yaml",
        ("rollout=torch", "tracking.wandb=disabled", f"run.dir={run_dir}", *words),
        own_dir=None,
        multirun=False,
    )
    [config] = [run.config for run in resolution.runs]
    assert config is not None, resolution.problems
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in range(1, steps + 1):
            tracker.log(step, {})
        save(config, steps)


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_resume_takes_the_settings_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "it's mine" / "run"
    recorded_run(
        Path(str(run_dir).replace("'", "")),
        "run.num_steps=300",
        "sampling.max_new_tokens=17",
        "correction=mis",
        steps=10,
    )
    Path(str(run_dir.parent).replace("'", "")).rename(run_dir.parent)
    before = files_of(run_dir)
    assert parity(["resume", str(run_dir), "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "arithmetic_grpo, seed 0" in plan
    assert f"goes on in {run_dir} after step 10 of 300, if its newest checkpoint is good" in plan
    assert "+ 17 tokens" in plan and "min(pi_old/mu" not in plan

    assert parity(["resume", str(run_dir), "--dry-run", "correction=tis", "run.num_steps=400"]) == 0
    plan = capsys.readouterr().out
    assert "after step 10 of 400" in plan and "min(pi_old/mu, 2)" in plan and "+ 17 tokens" in plan
    assert files_of(run_dir) == before


def test_resume_refuses_fewer_steps_than_were_taken_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    recorded_run(run_dir, "run.num_steps=300", "checkpoint.every=50", steps=10)
    before = files_of(run_dir)
    again = ["train", "arithmetic_grpo", "rollout=torch", "resume=auto", f"run.dir={run_dir}"]
    for words in (["resume", str(run_dir)], again):
        assert parity([*words, "run.num_steps=6"]) == 2
        refused = capsys.readouterr().err
        assert f"run.num_steps must be >= the 10 steps that the run in {run_dir} has taken, got 6" in refused
    assert files_of(run_dir) == before


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "run.dir is missing"),
        (["absent"], "must be the directory of a run of Parity"),
        (["run", "run.dir=other"], "run.dir is set by parity resume"),
        (["run", "resume=clean"], "resume is set by parity resume"),
        (["run", "optim.lrr=1"], "optim.lrr is not a key"),
        (["run", "run.seed=0,1", "-m"], "flag is not known, got '-m'. It is a flag of parity train."),
    ],
)
def test_resume_refuses_what_makes_no_sense(
    words: list[str], rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run(tmp_path / "run", steps=1)
    before = files_of(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert parity(["resume", *words]) == 2
    refused = capsys.readouterr().err
    assert rule in refused and "parity-resume-" not in refused, "no temporary file is named"
    assert files_of(tmp_path / "run") == before


def test_a_path_of_another_working_directory_is_told_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    (first / "judge.py").write_text("def score(response):\n    return 1.0\n")
    monkeypatch.chdir(first)
    recorded_run(tmp_path / "run", "reward.function=judge.py:score", "run.num_steps=300", steps=1)
    monkeypatch.chdir(other)
    words = ["resume", str(tmp_path / "run"), "--dry-run"]
    assert parity(words) == 2
    told = capsys.readouterr().err
    assert str(other / "judge.py") in told and f"in {first}, which has judge.py" in told
    assert parity([*words, "reward.function=nowhere.py:score"]) == 2
    assert str(first) not in capsys.readouterr().err, "there it is missing too"
    assert parity([*words, f"reward.function={first}/judge.py:score"]) == 0
    monkeypatch.chdir(first)
    assert parity(words) == 0


def test_resume_asks_again_for_what_was_redacted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    recorded_run(run_dir, steps=1)
    document = (run_dir / "config.yaml").read_text()
    project = next(line for line in document.splitlines() if line.startswith("  project:"))
    (run_dir / "config.yaml").write_text(document.replace(project, "  project: <redacted>"))
    assert parity(["resume", str(run_dir), "--dry-run"]) == 2
    assert "tracking.project was redacted in" in capsys.readouterr().err
    assert parity(["resume", str(run_dir), "--dry-run", "tracking.project=mine"]) == 0


def test_a_resumed_run_keeps_every_row_whatever_a_response_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = make(tmp_path, resume=Resume.auto), tmp_path / "run"
    with Tracker(config, run_dir=run_dir) as tracker:
        for step in range(1, 11):
            tracker.log(step, {}, [sample_row("a\u2028b" if step == 3 else "plain")])
        tracker.log_events([Event(step=4, kind="guard", severity=Severity.info, text="x\u0085y")])
        tracker.log_events([Event(step=5, kind="guard", severity=Severity.info, text="z")])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("\x00damaged\n" + '{"step": 11}\n')
    with Tracker(config, run_dir=run_dir, resumed=state_of(config, 8)) as tracker:
        tracker.take_up(state_of(config, 8))
    assert [row["step"] for row in read_rows(run_dir / "samples.jsonl")] == list(range(1, 9))
    assert [row["step"] for row in read_rows(run_dir / "events.jsonl")] == [4, 5]
    assert rows(run_dir / "metrics.jsonl") == list(range(1, 9))
    assert "1 damaged line of metrics.jsonl moved to metrics.jsonl.damaged" in capsys.readouterr().err


def test_null_is_no_change_from_a_key_that_was_not_there(tmp_path: Path) -> None:
    config = make(tmp_path)
    saved = {key: value for key, value in flat_config(config).items() if not key.startswith("correction.")}
    other = replace(config, correction=MISConfig())
    changed = changed_keys(saved, other)
    assert (
        changed["correction"] == "correction tis -> mis"
        and changed["correction.high"] == "correction.high (absent) -> 2.0"
    )
    assert not [line for line in changed.values() if "None" in line]


def test_a_run_that_ended_without_a_checkpoint_is_not_moved_aside_for_more_steps(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"status": "completed", "last_step": 6}')
    assert resume_words(tmp_path, [])[1] == []
    [problem] = resume_words(tmp_path, ["run.num_steps=8"])[1]
    assert "must hold a checkpoint to go on from" in str(problem)
    assert "run.resume=clean" in str(problem)
    (tmp_path / "status.json").write_text('{"status": "failed", "last_step": 6}')
    assert resume_words(tmp_path, ["run.num_steps=8"])[1] == []


def test_a_run_whose_checkpoints_all_lack_their_manifest_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_run(tmp_path / "run", "run.num_steps=300", steps=10)
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    assert parity(["resume", str(tmp_path / "run"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "run.dir must hold a run that can be read (no checkpoint can be used: " in error
    assert "step_000010 lacks manifest.json)" in error and "run.resume=clean" in error and "Errno" not in error


def test_a_config_that_is_no_yaml_is_said_to_be_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_run(tmp_path / "run", steps=1)
    (tmp_path / "run" / "config.yaml").write_text("run: [1\n")
    assert parity(["resume", str(tmp_path / "run")]) == 2
    refused = capsys.readouterr().err
    assert "config.yaml, which cannot be read (" in refused and "Mend the file" in refused


def test_rows_that_are_missing_are_told(tmp_path: Path) -> None:
    config = make(tmp_path, resume=Resume.auto)
    with Tracker(config, run_dir=tmp_path / "run") as tracker:
        tracker.log(1, {"reward/mean": 1})
    for is_there in (True, False):
        console = Console(4, stream=(text := io.StringIO()))
        state = state_of(config, 1)
        with Tracker(config, run_dir=tmp_path / "run", resumed=state, console=console) as tracker:
            tracker.take_up(state)
        assert ("metrics.jsonl is missing: it begins anew after step 1" in text.getvalue()) is not is_there
        (tmp_path / "run" / "metrics.jsonl").unlink()
