"""trainer/tracking/tracker.py with its W&B side: real files, the real W&B client (offline), real failures."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import wandb_file
from full_disk import full_disk
from wandb_server import WandbServer, serving

import trainer.tracking.wandb_sink as wandb_sink
from algorithms.config import MISConfig
from algorithms.histograms import HistogramArrays, mismatch_histograms
from algorithms.tokens import Tokens
from rollout.config import SamplingConfig, SGLangConfig
from rollout.data.dataset import StreamState
from rollout.task_config import ArithmeticDataConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.compose.compose import resolve
from trainer.compose.start import start_problems
from trainer.config.components import ArithmeticModelConfig, RunConfig
from trainer.config.recording import TrackingConfig, WandbMode
from trainer.config.train import TrainConfig
from trainer.rundir.checkpoint import RunState
from trainer.rundir.events import Event, Severity
from trainer.rundir.rows import forget_after, read_rows
from trainer.tracking.console import Console
from trainer.tracking.samples import SampleRow, sample_rows, select_rows
from trainer.tracking.tracker import Tracker
from trainer.tracking.wandb_panels import Panels
from trainer.tracking.wandb_sink import WandbSink, has_wandb_key

SECRET = "pl4nted-s3cret-value"


@pytest.fixture(autouse=True)
def no_wandb_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing in these tests may depend on, or use, a login of the machine."""
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr(wandb_sink, "_START_TIMEOUT_S", 3.0)


def make_config(mode: WandbMode = WandbMode.disabled, **changes: object) -> TrainConfig:
    base = TrainConfig(
        run=RunConfig(recipe="arithmetic_grpo", num_steps=4),
        model=ArithmeticModelConfig(),
        data=ArithmeticDataConfig(),
        sampling=SamplingConfig(max_new_tokens=16),
        tracking=TrackingConfig(wandb=mode, samples_per_step=3),
    )
    return replace(base, **changes)


def make_tracker(config: TrainConfig, run_dir: Path) -> tuple[Tracker, io.StringIO]:
    stream = io.StringIO()
    return Tracker(config, run_dir=run_dir, console=Console(config.run.num_steps, stream=stream)), stream


def row(prompt_id: int, sample_index: int, k3: float | None = None, response: str = "42") -> SampleRow:
    return SampleRow(
        prompt_id=prompt_id, sample_index=sample_index, prompt="40+2=", response=response, answer="42", reward=1.0,
        correct=True, advantage=0.5, num_response_tokens=3, finish_reason=FinishReason.stop, policy_version=7,
        rollout_logprob_mean=-0.25, k3=k3,
    )  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_files_of_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    tracker, stream = make_tracker(make_config(), run_dir)
    with tracker:
        tracker.log(1, {"reward/mean": 0.5, "policy/entropy": None}, [row(1, 0), row(1, 1), row(2, 0), row(3, 0)])
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
        "config.yaml", "environment.json", "events.jsonl", "histograms.jsonl", "metrics.jsonl", "samples.jsonl",
        "status.json",
    ]  # fmt: skip


def some_histograms() -> HistogramArrays:
    old, rollout = torch.log(torch.tensor([0.5, 0.9, 0.3])), torch.log(torch.tensor([0.4, 0.9, 0.3]))
    return mismatch_histograms(
        Tokens(
            trainer_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=torch.ones(3, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        )
    ).arrays()


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
            "policy_version": 7, "rollout_logprob_mean": -0.25, "k3": 1e-5,
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
        "import sys, time; from pathlib import Path; from trainer.config.components import Resume\n"
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


def test_sample_rows_and_selection() -> None:
    sample = Sample(
        prompt_id=4, sample_index=1, token_ids=[1, 2, 3, 4], response_mask=[False, True, True, False],
        rollout_logprobs=[0.0, -1.0, -0.5, 0.0], token_versions=[0, 4, 3, 0],
        finish_reason=FinishReason.length, text="no", reward=0.0, correct=False,
    )  # fmt: skip
    group = SampleGroup(prompt=Prompt(prompt_id=4, token_ids=[1], text="1+1=", answer="2"), samples=[sample])
    (made,) = sample_rows([group], advantages={(4, 1): -1.0}, k3={(4, 1): 2e-6})
    assert made.advantage == -1.0
    assert (made.rollout_logprob_mean, made.num_response_tokens, made.k3, made.answer) == (-0.75, 2, 2e-6, "2")
    assert sample_rows([group])[0].k3 is None and sample_rows([group])[0].advantage is None

    without = [row(prompt, index) for prompt in (1, 2, 3) for index in (0, 1)]
    assert [(r.prompt_id, r.sample_index) for r in select_rows(without, 4)] == [(1, 0), (2, 0), (3, 0), (1, 1)]
    with_k3 = [row(1, 0, 1e-6), row(1, 1, 9e-6), row(2, 0, 2e-6), row(2, 1, 5e-6)]
    assert [r.k3 for r in select_rows(with_k3, 3)] == [9e-6, 1e-6, 2e-6]
    assert select_rows(with_k3, 0) == []


def test_wandb_offline_has_every_row(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/no/such/socket")  # as a parent that uses wandb leaves it
    tracker, stream = make_tracker(make_config(WandbMode.auto), tmp_path / "run")
    with tracker:
        tracker.log(1, {"reward/mean": 0.25, "mismatch/k3": float("nan")})
        tracker.log(2, {"reward/mean": 0.5, "policy/entropy": None})
    assert wandb_file.history(tmp_path / "run") == [
        {"global_step": 1, "reward/mean": 0.25},
        {"global_step": 2, "reward/mean": 0.5},
    ]
    assert wandb_file.exit_code(tmp_path / "run") == 0
    started = next(r.run for r in wandb_file.records(tmp_path / "run") if r.WhichOneof("record_type") == "run")
    assert started.run_id == (tmp_path / "run" / "wandb_run_id").read_text().strip()
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["choices"]["correction"] == "tis" and config["correction"]["cap"] == 2.0
    assert "wandb" not in "".join(capfd.readouterr()), "the client says nothing of its own"
    offline = next((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert f"W&B: offline; upload later with: wandb sync {offline}" in stream.getvalue()


def test_wandb_has_axes_summaries_tables_histograms_and_alerts(tmp_path: Path) -> None:
    tracker, stream = make_tracker(make_config(WandbMode.offline), tmp_path / "run")
    with tracker:
        for step, reward in ((1, 0.25), (2, 0.75), (3, 0.5)):
            numbers = {
                "reward/mean": reward,
                "eval/accuracy": reward,
                "perf/mfu": reward,
                "mismatch/ess/raw_token": reward,
            }
            restarts = {"rollout/engine_restarts": 2.0 * (step == 2)}
            tracker.log(step, numbers | restarts, [row(1, step, k3=None), row(2, step, k3=1e-5)])
            tracker.log_histograms(step, some_histograms())
        events = [
            Event(step=3, kind="guard", severity=Severity.info, text="back to watching"),
            Event(step=3, kind="guard", severity=Severity.error, text="stop <é>"),
        ]
        tracker.log_events(events)
    assert tracker.errors == 0
    run_dir = tmp_path / "run"

    kept = wandb_file.summary(run_dir)
    assert (kept["reward/mean"], kept["eval/accuracy"]) == ({"max": 0.75, "last": 0.5},) * 2
    assert kept["perf/mfu"] == {"mean": 0.5, "last": 0.5}
    assert kept["mismatch/ess/raw_token"] == {"min": 0.25, "last": 0.5}
    axes = {
        record.metric.glob_name or record.metric.name: record.metric.step_metric
        for record in wandb_file.records(run_dir)
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes["*"] == axes["eval/accuracy"] == "global_step"

    rows = read_lines(run_dir / "samples.jsonl")
    assert wandb_file.table_rows(run_dir) == [list(sample.values()) for sample in rows] and len(rows) == 6
    increments = list(run_dir.glob("wandb/*run-*/files/media/table/*.json"))
    assert len(increments) == 3, "each holds what is new"
    places = [line for line in wandb_file.history(run_dir) if "samples/increment_num" in line]
    assert [(line["global_step"], line["samples/log_mode"]) for line in places] == [
        (step, "INCREMENTAL") for step in (1, 2, 3)
    ]

    drawn = [line for line in wandb_file.history(run_dir) if "mismatch/log2_probability/values" in line]
    assert [line["global_step"] for line in drawn] == [1, 2, 3]
    expected = some_histograms().by_probability
    mass = [count * (mean or 0) for count, mean in zip(expected.counts, expected.abs_logdiff, strict=True)]
    assert drawn[0]["mismatch/log2_probability/values"] == pytest.approx(mass[::-1])
    assert drawn[0]["mismatch/log2_probability/bins"] == list(range(-20, 1))

    assert wandb_file.alerts(run_dir) == [
        ("Parity: engine", "engines lost and started again: 2; the log says why", "WARN"),
        ("Parity: guard", "stop <é>", "ERROR"),
    ]
    told = [(line["step"], line["kind"], line["severity"]) for line in read_lines(run_dir / "events.jsonl")]
    assert told == [(2, "engine", "warn"), (3, "guard", "info"), (3, "guard", "error")]
    assert "stop <é>" in stream.getvalue() and "back to watching" in stream.getvalue()


def test_samples_stay_here_if_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(WandbMode.offline)
    config.tracking.wandb_samples = False
    sent: list[object] = []
    monkeypatch.setattr(WandbSink, "start", lambda self: None)
    monkeypatch.setattr(WandbSink, "put", lambda self, action, *content: sent.append((action, *content)))
    tracker, _ = make_tracker(config, tmp_path / "run")
    with tracker:
        tracker.log(1, {"reward/mean": 0.5}, [row(1, 0)])
    assert sent == [(Panels.log, 1, {"reward/mean": 0.5})]
    assert len(read_lines(tmp_path / "run" / "samples.jsonl")) == 1


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


def test_tensorboard_has_every_number_and_forgets_what_a_resumed_run_takes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra parity-rl[tensorboard] is not installed")
    config = make_config()
    config.tracking.tensorboard = True
    tracker, _ = make_tracker(config, tmp_path / "run")
    with tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": step / 4, "mismatch/k3": float("nan"), "policy/entropy": None})
    written = tensorboard_points(tmp_path / "run" / "tensorboard")
    assert written == [("reward/mean", 1, 0.25), ("reward/mean", 2, 0.5), ("reward/mean", 3, 0.75)]
    state = RunState(step=2, policy_version=2, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    resumed = Tracker(config, run_dir=tmp_path / "run", resumed=state, console=Console(4, stream=io.StringIO()))
    with resumed:
        resumed.log(3, {"reward/mean": 0.125})
    assert tensorboard_points(tmp_path / "run" / "tensorboard") == [
        ("reward/mean", 1, 0.25), ("reward/mean", 2, 0.5), ("reward/mean", 3, 0.125),
    ]  # fmt: skip
    assert (tracker.errors, resumed.errors) == (0, 0)


def test_tensorboard_is_refused_before_the_start_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "arithmetic_grpo.yaml"
    words = ["rollout=torch", "tracking.tensorboard=true"]
    resolution = resolve(recipe, words, own_dir=None, multirun=False)
    monkeypatch.setattr("trainer.compose.start.TENSORBOARD_PACKAGE", "no_such_package")
    [problem] = start_problems(resolution)
    assert problem.key == "tracking.tensorboard" and 'pip install ".[tensorboard]"' in str(problem)
    assert not start_problems(resolve(recipe, words[:1], own_dir=None, multirun=False))


@pytest.mark.parametrize("answer", ["silence", "no connection", "unauthorized"])
def test_a_server_that_does_not_let_the_run_in_means_offline(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(WandbServer(refuses=answer == "unauthorized")) as server:
        if answer == "silence":
            server.silent.set()
        if answer == "no connection":
            server.shutdown()
            server.server_close()
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        config = make_config(WandbMode.auto)
        monkeypatch.setattr(wandb_sink, "_START_TIMEOUT_S", 1.0)
        tracker, stream = make_tracker(config, tmp_path / "run")
        before = time.monotonic()
        with tracker:
            assert time.monotonic() - before < 1.0, "the run must not wait for W&B"
            tracker.log(1, {"reward/mean": 0.25})
        assert time.monotonic() - before < 30
    assert wandb_file.history(tmp_path / "run") == [{"global_step": 1, "reward/mean": 0.25}]
    assert "W&B: offline (online: " in stream.getvalue()
    assert "upload later with: wandb sync" in stream.getvalue()
    assert tracker.errors == 1


@pytest.mark.parametrize("falls_silent", [False, True])
def test_an_online_run_sends_its_rows_and_does_not_wait_for_a_server_that_falls_silent(
    falls_silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_sink, "_START_TIMEOUT_S", 20.0)
    monkeypatch.setattr(wandb_sink, "_FINISH_TIMEOUT_S", 4.0)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    lines: list[str] = []
    with serving(WandbServer()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        sink = wandb_sink_of(tmp_path, lines, WandbMode.online)
        sink.start()
        sink.put(Panels.log, 1, {"reward/mean": 0.5})
        wait_until(lambda: sink.mode is not WandbMode.disabled)
        assert lines == [f"W&B: online at {server.url}/someone/parity/runs/x1"]
        if falls_silent:
            server.silent.set()
        before = time.monotonic()
        sink.put(Panels.log, 2, {"reward/mean": 0.75})
        sink.finish(exit_code=0)
        assert time.monotonic() - before < 15
        assert not wandb_cores()
    if falls_silent:
        assert sink.errors == 2 and "upload what is on disk with: wandb sync" in lines[1]
    else:
        assert sink.errors == 0 and len(lines) == 1
        assert [row["reward/mean"] for row in server.rows] == [0.5, 0.75]
    assert [row["reward/mean"] for row in wandb_file.history(tmp_path)] == [0.5, 0.75]


@pytest.mark.scenario(32)
def test_a_run_that_was_deleted_on_the_server_goes_on_as_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_sink, "_START_TIMEOUT_S", 4.0)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    lines: list[str] = []
    wandb_sink.keep_run_id(tmp_path, "deadbeef")
    with serving(WandbServer(deleted=["deadbeef"])) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        sink = wandb_sink_of(tmp_path, lines, WandbMode.online)
        sink.start()
        sink.put(Panels.log, 8, {"reward/mean": 0.5})
        wait_until(lambda: sink.mode is not WandbMode.disabled)
        sink.finish(exit_code=0)
    assert sink.mode is WandbMode.online and [row["reward/mean"] for row in server.rows] == [0.5]
    assert "was deleted there" in lines[0] and "W&B: online (online: CommError" in lines[1]
    assert wandb_sink.saved_run_id(tmp_path) not in (None, "deadbeef"), "the next checkpoint holds the new id"


def test_online_without_a_key_means_offline(tmp_path: Path) -> None:
    tracker, stream = make_tracker(make_config(WandbMode.online), tmp_path / "run")
    with tracker:
        tracker.log(1, {"reward/mean": 0.25})
    assert "W&B: offline (online: no key was found" in stream.getvalue()
    assert len(wandb_file.history(tmp_path / "run")) == 1


def test_a_broken_wandb_package_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('no such package here')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    tracker, stream = make_tracker(make_config(WandbMode.offline), tmp_path / "run")
    with tracker:
        tracker.log(1, {"reward/mean": 0.25})
    assert "W&B: off (offline: ImportError: no such package here)" in stream.getvalue()
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 1


def wandb_sink_of(run_dir: Path, lines: list[str], mode: WandbMode = WandbMode.offline) -> WandbSink:
    run_dir.mkdir(exist_ok=True)
    return WandbSink(
        TrackingConfig(wandb=mode),
        run_dir=run_dir, name="run", record={}, report=lines.append,
    )  # fmt: skip


def wait_until(happened: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_disk_that_takes_no_wandb_files_costs_only_wandb(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("in the way")
    lines: list[str] = []
    sink = wandb_sink_of(tmp_path, lines)
    sink.start()
    sink.put(Panels.log, 1, {"reward/mean": 0.5})
    sink.finish(exit_code=0)
    assert len(lines) == 1 and lines[0].startswith("W&B: off (offline: ")
    assert sink.errors == 1 and not wandb_cores()


def wandb_cores(process: int | None = None) -> list[psutil.Process]:
    return [child for child in psutil.Process(process).children(recursive=True) if child.name() == "wandb-core"]


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_wedged_or_dead_wandb_cannot_hold_the_run(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_sink, "_FINISH_TIMEOUT_S", 2.0)
    sink = wandb_sink_of(tmp_path, [])
    sink.start()
    sink.put(Panels.log, 1, {"reward/mean": 0.5})
    wait_until(lambda: sink.mode is WandbMode.offline)
    [core] = wandb_cores()
    core.send_signal(sent)
    before = time.monotonic()
    for step in range(2, 20_000):  # more than the queue and the socket can take
        sink.put(Panels.log, step, {"reward/mean": 0.5})
    assert time.monotonic() - before < 5, "put must never wait"
    with caplog.at_level(logging.WARNING):
        sink.finish(exit_code=0)
    assert time.monotonic() - before < 20
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    assert sink.errors > 1
    assert len([record for record in caplog.records if record.name == wandb_sink.__name__]) == 1


CHILD = """
import os, signal, sys, time
from pathlib import Path
import psutil
from trainer.config.recording import TrackingConfig, WandbMode
from trainer.tracking.wandb_panels import Panels
from trainer.tracking.wandb_sink import WandbSink
hooks = sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
sink = WandbSink(TrackingConfig(wandb=WandbMode.offline), run_dir=Path(sys.argv[1]), name="run", record={},
                 report=lambda line: None)
sink.start()
while sink.mode is WandbMode.disabled:
    time.sleep(0.05)
def now():
    return sys.exit, sys.excepthook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
assert now() == hooks
sink.put(Panels.log, 1, {"reward/mean": 0.5})
sink.put(Panels.log_samples, 1, [{"prompt": "PL4NTED PROMPT", "response": "PL4NTED RESPONSE"}])
sys.path.insert(0, sys.argv[2])
import wandb_file
run_dir = Path(sys.argv[1])
while not (list(run_dir.glob("wandb/*run-*/files/media/table/*.json")) and wandb_file.history(run_dir)):
    time.sleep(0.05)
[core] = psutil.Process().children()
"""


def run_child(tmp_path: Path, ending: str) -> subprocess.CompletedProcess[str]:
    """A process that logs a row and a sample, and ends as `ending` says when both are on disk.

    Its temporary directory is tmp_path/tmp.
    """
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    return subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(ending), str(tmp_path / "run"), str(Path(__file__).parent)],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, start_new_session=True, timeout=120, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def holders_of_samples(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"PL4NTED" in path.read_bytes()]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_completed_and_a_failed_run_leave_nothing_in_the_temporary_directory(exit_code: int, tmp_path: Path) -> None:
    ended = run_child(tmp_path, f"sink.finish(exit_code={exit_code})")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert wandb_file.table_rows(tmp_path / "run") == [["PL4NTED PROMPT", "PL4NTED RESPONSE"]]


def test_a_killed_run_leaves_its_rows_and_no_sample_outside_and_no_process(tmp_path: Path) -> None:
    ended = run_child(tmp_path, "print(core.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    wait_until(lambda: not psutil.pid_exists(int(ended.stdout)), 20)
    assert wandb_file.history(tmp_path / "run")[0] == {"global_step": 1, "reward/mean": 0.5}
    assert wandb_file.exit_code(tmp_path / "run") is None, "W&B shows a run without heartbeats as crashed"
    assert holders_of_samples(tmp_path / "run") and not holders_of_samples(tmp_path / "tmp")


def test_a_signal_to_the_group_is_for_the_run_and_not_for_wandb(tmp_path: Path) -> None:
    ending = """
    heard = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
        os.killpg(0, number)
    time.sleep(0.5)
    assert len(heard) == 2 and core.is_running()
    sink.put(Panels.log, 2, {"reward/mean": 0.75})
    sink.finish(exit_code=1)
    assert now()[:2] == hooks[:2] and not core.is_running()
    """
    ended = run_child(tmp_path, ending)
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line for line in wandb_file.history(tmp_path / "run") if "reward/mean" in line]
    assert [line["global_step"] for line in rows] == [1, 2]
    assert wandb_file.exit_code(tmp_path / "run") == 1


@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
def test_a_second_signal_ends_the_wait_and_a_wedged_wandb_cannot_hold_the_exit(sent: str, tmp_path: Path) -> None:
    ending = f"""
    import threading
    core.send_signal(signal.{sent})
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        sink.finish(exit_code=1)
        time.sleep(5)
    except KeyboardInterrupt:
        pass
    assert not core.is_running()
    print(time.monotonic() - began, time.monotonic())
    """
    ended = run_child(tmp_path, ending)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    waited_s, left_at = (float(word) for word in ended.stdout.split())
    assert waited_s < 7 and time.monotonic() - left_at < 7, "the finish, and the exit of the process"
    assert not holders_of_samples(tmp_path / "tmp")


def test_keys_are_found_where_wandb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert has_wandb_key()
