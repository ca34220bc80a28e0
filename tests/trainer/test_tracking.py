"""trainer/tracking/tracker.py: the files of a run, TensorBoard, real failures. test_wandb.py has the W&B side."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from full_disk import full_disk
from tracking_cases import (  # noqa: F401 - no_wandb_login is a fixture of every test here
    make_config,
    make_tracker,
    no_wandb_login,
    read_lines,
    row,
    some_histograms,
)

from algorithms.config import MISConfig
from rollout.data.dataset import StreamState
from rollout.sglang.config import SGLangConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.compose.compose import resolve
from trainer.config.outputs import WandbMode
from trainer.config.training import Resume
from trainer.report.data import load_run
from trainer.rundir.checkpoint import RunState
from trainer.rundir.rows import forget_after, read_rows
from trainer.start.checks import start_problems
from trainer.tracking.console import Console
from trainer.tracking.samples import Segment, TokenLog, sample_rows
from trainer.tracking.tracker import Tracker

SECRET = "pl4nted-s3cret-value"


def test_files_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    tracker, stream = make_tracker(make_config(), run_dir)
    with tracker:
        tracker.log(1, {"reward/mean": 0.5, "policy/entropy": None}, [row(1, 0), row(1, 1), row(2, 0)])
        # Written at once, not when the run ends.
        assert read_lines(run_dir / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "policy/entropy": None}]
        assert len(read_lines(run_dir / "samples.jsonl")) == 3
        tracker.log(2, {"mismatch/k3": float("nan"), "optim/grad_norm": float("inf"), "reward/mean": 1})
    assert read_lines(run_dir / "metrics.jsonl")[1] == {
        "step": 2, "mismatch/k3": None, "optim/grad_norm": None, "reward/mean": 1,
        "nonfinite": ["mismatch/k3", "optim/grad_norm"],
    }  # fmt: skip
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["status"], status["last_step"], status["num_steps"], status["tracker_errors"]) == (
        "completed",
        2,
        4,
        0,
    )
    environment = json.loads((run_dir / "environment.json").read_text())
    assert environment["versions"]["torch"] and environment["python"].startswith("3.")
    assert "step 1/4 | reward 0.50" in stream.getvalue()
    assert sorted(path.name for path in run_dir.iterdir()) == [
        "config.yaml", "environment.json", "evaluations.jsonl", "events.jsonl", "histograms.jsonl", "metrics.jsonl",
        "samples.jsonl", "status.json",
    ]  # fmt: skip


def test_an_outage_that_a_step_has_waited_for_is_an_event(tmp_path: Path) -> None:
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    with tracker:
        for step, outage_s in ((1, 0.0), (2, 41.7)):
            tracker.log(step, {"reward/outage_s": outage_s, "episode/outage_s": 0.0})
    [event] = read_lines(tmp_path / "run" / "events.jsonl")
    assert (event["step"], event["kind"], event["severity"]) == (2, "reward", "warn")
    assert "42 s" in event["text"]


def test_histograms_are_one_line_per_step(tmp_path: Path) -> None:
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    with tracker:
        tracker.log_histograms(3, some_histograms())
    [line] = read_lines(tmp_path / "run" / "histograms.jsonl")
    assert line["step"] == 3
    assert sum(count for _, _, count in line["joint"]) == 3
    assert sum(line["by_probability"]["counts"]) == 3
    assert line["by_position"]["edges"][-1] is None
    assert max(value for value in line["by_probability"]["abs_logdiff"] if value is not None) > 0.1
    assert tracker.errors == 0


def test_a_sample_is_written_whole(tmp_path: Path) -> None:
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    with tracker:
        tracker.log(1, {}, [row(5, 2, k3=1e-5, response="<b>\u2028\ud800é")])
    assert read_lines_by_newline(tmp_path / "run" / "samples.jsonl") == [
        {
            "step": 1, "prompt_id": 5, "sample_index": 2, "prompt": "40+2=", "response": "<b>\u2028?é", "answer": "42",
            "reward": 1.0, "correct": True, "advantage": 0.5, "num_response_tokens": 3, "finish_reason": "stop",
            "policy_version": 7, "rollout_logprob_mean": -0.25, "k3": 1e-5, "reward_parts": {}, "by_k3": False,
        }
    ]  # fmt: skip


def read_lines_by_newline(path: Path) -> list[dict[str, object]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_the_saved_config_composes_to_the_same_run(tmp_path: Path) -> None:
    config = make_config(
        correction=MISConfig(high=3.0),
        rollout=SGLangConfig(engine_args={"mem_fraction_static": 0.5, "note": "${not.an.interpolation}", "n": [1, 2]}),
    )
    config.run.dir = str(tmp_path / "run")
    tracker, _ = make_tracker(config, tmp_path / "run")
    with tracker:
        pass
    resolution = resolve(tmp_path / "run" / "config.yaml", [], own_dir=None, multirun=False)
    assert not resolution.problems, [str(problem) for problem in resolution.problems]
    composed = resolution.runs[0].config
    assert composed is not None
    assert replace(composed, run=config.run) == config
    assert (composed.run.num_steps, composed.run.seed) == (config.run.num_steps, config.run.seed)
    assert composed.run.dir != config.run.dir


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_args = {"hf_token": SECRET, "nested": {"headers": [{"authorization": SECRET}]}, "max_total_tokens": 99}
    monkeypatch.setattr(sys, "argv", ["parity", f"+rollout.engine_args.hf_token={SECRET}", "--api-key", SECRET])
    tracker, stream = make_tracker(
        make_config(WandbMode.offline, rollout=SGLangConfig(engine_args=engine_args)), tmp_path / "run"
    )
    with tracker:
        tracker.log(1, {"reward/mean": 0.5})
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    holders = [str(path) for path in written if SECRET.encode() in path.read_bytes()]
    assert not holders
    assert SECRET not in stream.getvalue()
    assert "max_total_tokens: 99" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("found", ["metrics.jsonl", "notes.txt"])
def test_a_directory_in_use_is_refused(tmp_path: Path, found: str) -> None:
    (tmp_path / found).write_text("")
    tracker, _ = make_tracker(make_config(), tmp_path)
    with pytest.raises(RuntimeError, match=rf"run\.dir must be absent or empty, .* holds {found}"):
        tracker.__enter__()
    assert [path.name for path in tmp_path.iterdir()] == [found], "a refused run leaves nothing behind"


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from trainer.config.training import Resume\n"
        "from trainer.rundir.run_dir import take_directory\n"
        f"lock, _ = take_directory(Path({str(tmp_path / 'run')!r}), resume=Resume.never, continues=False)\n"
        "sys.stdout.write('locked'); sys.stdout.flush()\n"
        "time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.read(6) == b"locked"
        tracker, _ = make_tracker(make_config(), tmp_path / "run")
        with pytest.raises(RuntimeError, match=f"is in use by process {other.pid}"):
            tracker.__enter__()
    finally:
        other.kill()
        other.wait(10)
        assert other.stdout is not None
        other.stdout.close()
    with make_tracker(make_config(), tmp_path / "run")[0]:
        pass  # the lock of a killed run is gone


def fill_disk(tracker: Tracker, name: str) -> None:
    """No more can be written to this file."""
    tracker._files[name].close()
    tracker._files[name] = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115


def test_a_full_disk_stops_the_run_only_for_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker, stream = make_tracker(make_config(), tmp_path / "run")
    with pytest.raises(OSError, match="No space left"), tracker:
        fill_disk(tracker, "samples.jsonl")
        tracker.log(1, {"reward/mean": 0.5}, [row(1, 0)])
        tracker.log(2, {"reward/mean": 0.5}, [row(1, 0)])
        assert tracker.errors == 2
        assert stream.getvalue().count("samples.jsonl failed and the run goes on") == 1
        fill_disk(tracker, "metrics.jsonl")
        tracker.log(3, {"reward/mean": 0.5})
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"


def test_a_row_that_a_full_disk_cut_costs_no_later_row(tmp_path: Path) -> None:
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    path = tmp_path / "run" / "samples.jsonl"
    with tracker:
        tracker.log(1, {}, [row(1, 0)])
        with full_disk(path.stat().st_size + 20):  # a part of the next row is written
            tracker._best_effort("samples.jsonl", lambda: tracker._log_samples(2, [row(1, 0)]))
        half = path.read_bytes()
        assert not half.endswith(b"\n")
        for step in (3, 4):
            tracker.log(step, {}, [row(1, 0)])
    assert path.read_bytes().startswith(half)
    assert [line["step"] for line in read_rows(path)] == [1, 2, 3, 4]
    forget_after(path, 3)
    assert [line["step"] for line in read_rows(path)] == [1, 2, 3]


def test_rows_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    with pytest.raises(RuntimeError, match="open tracker"):
        tracker.log(1, {})
    with tracker:
        tracker.log(3, {})
        with pytest.raises(ValueError, match="step 3 came after step 3"):
            tracker.log(3, {})
        with pytest.raises(ValueError, match="'step' is taken"):
            tracker.log(4, {"step": 4.0})
        with pytest.raises(TypeError, match="'reward/mean' must be a number"):
            tracker.log(4, {"reward/mean": "high"})  # type: ignore[dict-item]
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [3]


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_run_says_so(ended: BaseException, tmp_path: Path) -> None:
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    with pytest.raises(type(ended)), tracker:
        raise ended
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "interrupted"


class Letters:
    """A tokenizer whose tokens are letters; 0 is a special token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join("_abcdefgh"[token] for token in token_ids if token or not skip_special_tokens)


def some_group(prompt_id: int, **parts: float) -> SampleGroup:
    """A prompt of one token, and a response in which a tool wrote "b" first and "ef" between two turns."""
    sample = Sample(
        prompt_id=prompt_id, sample_index=1, token_ids=[1, 2, 3, 4, 5, 6, 7, 0],
        response_mask=[False, False, True, True, False, False, True, True],
        rollout_logprobs=[0.0, 0.0, -1.0, -0.5, 0.0, 0.0, -0.5, -1.0], token_versions=[0, 0, 4, 3, 0, 0, 4, 4],
        finish_reason=FinishReason.length, text="no", reward=0.0, correct=False, reward_parts=parts,
    )  # fmt: skip
    return SampleGroup(prompt=Prompt(prompt_id=prompt_id, token_ids=[1], text="1+1=", answer="2"), samples=[sample])


LOG = TokenLog(deltas={}, tokenizer=Letters())  # type: ignore[arg-type]


def test_a_sample_has_its_numbers_and_tells_what_the_model_did_not_sample(tmp_path: Path) -> None:
    made = sample_rows([some_group(4, chars=2.0)], count=3, advantages={0: -1.0}, k3={0: 2e-6}, tokens=LOG)
    shown = [Segment(sampled=False, text="b"), Segment(sampled=True, text="cd"), Segment(sampled=False, text="ef")]
    assert made[0].segments == [*shown, Segment(sampled=True, text="g")]
    tracker, _ = make_tracker(make_config(), tmp_path / "run")
    with tracker:
        tracker.log(1, {}, [*made, row(1, 0)])
    first, plain = read_lines(tmp_path / "run" / "samples.jsonl")
    assert (first["reward_parts"], first["segments"][2]) == ({"chars": 2.0}, {"sampled": False, "text": "ef"})
    assert (first["rollout_logprob_mean"], first["num_response_tokens"], first["answer"]) == (-0.75, 4, "2")
    assert "segments" not in plain and "tokens" not in plain


def test_half_of_the_samples_of_a_step_have_the_largest_k3_and_chance_picks_the_rest() -> None:
    groups = [some_group(number) for number in range(40)]
    k3 = {number: 1e-6 * number for number in range(40)}
    made = sample_rows(groups, count=8, advantages={}, k3=k3, tokens=LOG)
    assert [row.prompt_id for row in made if row.by_k3] == [39, 38, 37, 36]
    others = [row.prompt_id for row in made if not row.by_k3]
    assert len(others) == 4 and others != [0, 1, 2, 3] and others != [35, 34, 33, 32]
    assert sample_rows(groups, count=8, advantages={}, k3=k3, tokens=LOG) == made
    assert sample_rows(groups, count=0, advantages={}, k3=k3, tokens=LOG) == []
    twice = sample_rows(groups[:1] * 2, count=3, advantages={0: -1.0, 1: 1.0}, k3={0: 2e-6, 1: 4e-6}, tokens=LOG)
    assert [(row.advantage, row.k3) for row in twice] == [(1.0, 4e-6), (-1.0, 2e-6)], "a prompt twice in a step"


def tensorboard_points(directory: Path) -> list[tuple[str, int, float]]:
    """(name, step, value) of every number, read as TensorBoard reads them: checksums, and what a restart takes back."""
    from tensorboardX.proto.event_pb2 import Event as BoardEvent
    from tensorboardX.proto.event_pb2 import SessionLog
    from tensorboardX.record_writer import masked_crc32c

    points: list[tuple[str, int, float]] = []
    for path in sorted(directory.glob("events.out.tfevents.*"), key=lambda found: found.stat().st_mtime):
        data, position = path.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            content = data[position + 12 : position + 12 + length]
            assert struct.unpack_from("<I", data, position + 12 + length) == (masked_crc32c(content),)
            position += 16 + length
            event = BoardEvent.FromString(content)
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point[1] < event.step]
            scalars = [value for value in event.summary.value if value.HasField("simple_value")]
            points += [(value.tag, event.step, value.simple_value) for value in scalars]
    return points


def test_an_evaluation_before_training_has_a_row_of_its_own(tmp_path: Path) -> None:
    tracker, stream = make_tracker(make_config(), tmp_path / "run")
    with tracker:
        tracker.log_responses(0, [{"set": "heldout", "prompt_id": 3}])
        tracker.log_evaluation(0, {"eval/accuracy": 0.25, "eval/maj@2": None})
        tracker.log(1, {"reward/mean": 0.5, "eval/accuracy": 0.75})
        tracker.log_evaluation(1, {})  # given up
    assert read_lines(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 0, "eval/accuracy": 0.25, "eval/maj@2": None},
        {"step": 1, "reward/mean": 0.5, "eval/accuracy": 0.75},
    ]
    responses = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert responses == [{"step": 0, "set": "heldout", "prompt_id": 3}]
    lines = [line.partition(" | ")[0] for line in stream.getvalue().splitlines()]
    assert lines[-3:] == ["held-out before step 1", "step 1/4", "held-out after step 1"]


def test_an_evaluation_that_a_resumed_run_makes_up_for_belongs_to_its_step(tmp_path: Path) -> None:
    config = make_config()
    config.run.resume = Resume.auto
    tracker, _ = make_tracker(config, tmp_path / "run")
    with tracker:
        tracker.log_evaluation(0, {"eval/accuracy": 0.25})
        tracker.log(1, {"reward/mean": 0.5})
    state = RunState(step=1, policy_version=1, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    for _ in range(2):  # the first one is killed before its next checkpoint
        console = Console(4, stream=(stream := io.StringIO()))
        with Tracker(config, run_dir=tmp_path / "run", resumed=state, console=console) as resumed:
            resumed.take_up(state)
            resumed.log_evaluation(1, {"eval/accuracy": 0.75})
            resumed.log(2, {"reward/mean": 1.0})
        assert "held-out before step 2 | accuracy 0.750 greedy" in stream.getvalue()
    assert load_run(tmp_path / "run").rows == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "eval/accuracy": 0.75},
        {"step": 2, "reward/mean": 1.0},
    ]


def test_tensorboard_has_every_number_and_forgets_what_a_resumed_run_takes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra parity-rl[tensorboard] is not installed")
    config = make_config()
    config.tracking.tensorboard, config.run.resume = True, Resume.auto
    tracker, _ = make_tracker(config, tmp_path / "run")
    with tracker:
        tracker.log_evaluation(0, {"eval/accuracy": 0.125})
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 4, "mismatch/k3": float("nan"), "policy/entropy": None})
    (first, *written) = tensorboard_points(tmp_path / "run" / "tensorboard")
    assert first == ("eval/accuracy", 0, 0.125)
    assert written == [("reward/mean", 1, 0.25), ("reward/mean", 2, 0.5), ("reward/mean", 3, 0.75)]
    state = RunState(step=2, policy_version=2, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    resumed = Tracker(config, run_dir=tmp_path / "run", resumed=state, console=Console(4, stream=io.StringIO()))
    with resumed:
        resumed.take_up(state)
        resumed.log(3, {"reward/mean": 0.125})
    assert tensorboard_points(tmp_path / "run" / "tensorboard") == [
        ("eval/accuracy", 0, 0.125), ("reward/mean", 1, 0.25), ("reward/mean", 2, 0.5), ("reward/mean", 3, 0.125),
    ]  # fmt: skip
    assert (tracker.errors, resumed.errors) == (0, 0)


def test_tensorboard_is_refused_before_the_start_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "arithmetic_grpo.yaml"
    words = ["rollout=torch", "tracking.tensorboard=true"]
    resolution = resolve(recipe, words, own_dir=None, multirun=False)
    monkeypatch.setattr("trainer.start.checks.TENSORBOARD_PACKAGE", "no_such_package")
    [problem] = start_problems(resolution)
    assert problem.key == "tracking.tensorboard" and 'pip install -e ".[tensorboard]"' in str(problem)
    assert not start_problems(resolve(recipe, words[:1], own_dir=None, multirun=False))
