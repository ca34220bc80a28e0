"""W&B: the real client, offline and against a server of its own; real failures, signals and processes."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import wandb_file
from resume_cases import state_of
from tracking_cases import (  # noqa: F401 - no_wandb_login is a fixture of every test here
    make_config,
    make_tracker,
    no_wandb_login,
    read_lines,
    row,
    some_histograms,
)
from wandb_server import WandbServer, serving

import trainer.tracking.wandb_sink as wandb_sink
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.config.training import Resume
from trainer.rundir.events import Event, Severity
from trainer.tracking.console import Console
from trainer.tracking.tracker import Tracker
from trainer.tracking.wandb_panels import Panels
from trainer.tracking.wandb_run import keep_run_id, saved_run_id, wandb_key_source
from trainer.tracking.wandb_sink import WandbSink


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
    started = wandb_file.started(tmp_path / "run")
    assert started.run_id == tracker.wandb_run_id
    assert (started.project, started.display_name) == ("parity", "arithmetic_grpo/run")
    assert (started.entity, started.run_group, list(started.tags), started.notes) == ("", "", [], "")
    assert started.host == ""
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["choices"]["correction"] == "tis" and config["correction"]["cap"] == 2.0
    assert "wandb" not in "".join(capfd.readouterr()), "the client says nothing of its own"
    offline = next((tmp_path / "run" / "wandb").glob("offline-run-*"))
    said = [line for line in stream.getvalue().splitlines() if line.startswith("W&B: ")]
    assert said == [f"W&B: offline, in {offline}", f"W&B: upload this run with: wandb sync {offline}"]


def test_a_key_wins_over_a_variable_and_a_resumed_run_keeps_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, files = tmp_path / "run", tmp_path / "files"
    variables = {
        "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_NAME": "by variable", "WANDB_RUN_GROUP": "night",
        "WANDB_TAGS": "a, b", "WANDB_NOTES": "by variable", "WANDB_RUN_ID": "x7", "WANDB_DIR": str(files),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = make_config(WandbMode.offline)
    config.tracking.name = "by key"
    config.tracking.notes = "for Ada, with hf_abcdefghijklmnopqrstuvwxyz"
    with make_tracker(config, run_dir)[0] as tracker:
        tracker.log(1, {"reward/mean": 0.25})
    first = wandb_file.started(files)
    assert (first.project, first.entity, first.display_name, first.run_id) == ("theirs", "team", "by key", "x7")
    assert (first.run_group, list(first.tags), first.notes) == ("night", ["a", "b"], "for Ada, with <redacted>")
    assert not (run_dir / "wandb").exists()

    for name in variables:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_RUN_GROUP", "day")
    monkeypatch.setenv("WANDB_RUN_ID", "y8")
    earlier = [run_dir / "wandb" / f"offline-run-20260101_00000{number}-x7" for number in (1, 2)]
    for directory in (*earlier, run_dir / "wandb" / "offline-run-20260101_000000-other"):
        directory.mkdir(parents=True)
    config = make_config(WandbMode.offline)
    config.tracking.tags = ["c"]
    config.run.resume = Resume.auto
    console_text = io.StringIO()
    state, console = state_of(config, 1), Console(4, stream=console_text)
    with Tracker(config, run_dir=run_dir, resumed=state, console=console) as tracker:
        tracker.take_up(state)
    assert f"wandb sync {earlier[0]} {earlier[1]} {run_dir}/wandb/offline-run-" in console_text.getvalue()
    for directory in earlier:
        directory.rmdir()
    (run_dir / "wandb" / "offline-run-20260101_000000-other").rmdir()
    again = wandb_file.started(run_dir)
    assert (again.project, again.entity, again.display_name, again.run_id) == ("theirs", "team", "by key", "x7")
    assert (again.run_group, list(again.tags), again.notes) == ("night", ["c"], "for Ada, with <redacted>")


def test_wandb_has_axes_summaries_tables_histograms_and_alerts(tmp_path: Path) -> None:
    tracker, stream = make_tracker(make_config(WandbMode.offline), tmp_path / "run")
    with tracker:
        tracker.log_evaluation(0, {"eval/accuracy": 0.125})
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

    accuracies = [line for line in wandb_file.history(run_dir) if "eval/accuracy" in line]
    assert [(line["global_step"], line["eval/accuracy"]) for line in accuracies] == [
        (0, 0.125), (1, 0.25), (2, 0.75), (3, 0.5),
    ]  # fmt: skip

    rows = [sample | {"reward_parts": "{}"} for sample in read_lines(run_dir / "samples.jsonl")]
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
        monkeypatch.setattr(wandb_sink, "_START_TIMEOUT_S", 3.0)
        tracker, stream = make_tracker(config, tmp_path / "run")
        before = time.monotonic()
        with tracker:
            assert time.monotonic() - before < 3.0, "the run must not wait for W&B"
            tracker.log(1, {"reward/mean": 0.25})
        assert time.monotonic() - before < 30
    assert wandb_file.history(tmp_path / "run") == [{"global_step": 1, "reward/mean": 0.25}]
    assert "W&B: offline (online: " in stream.getvalue()
    assert "W&B: upload this run with: wandb sync" in stream.getvalue()
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
        assert time.monotonic() - before < 60
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
    keep_run_id(tmp_path, "deadbeef")
    with serving(WandbServer(deleted=["deadbeef"])) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        sink = wandb_sink_of(tmp_path, lines, WandbMode.online)
        sink.start()
        sink.put(Panels.log, 8, {"reward/mean": 0.5})
        wait_until(lambda: sink.mode is not WandbMode.disabled)
        sink.finish(exit_code=0)
    assert sink.mode is WandbMode.online and [row["reward/mean"] for row in server.rows] == [0.5]
    assert "was deleted there" in lines[0] and "W&B: online (online: CommError" in lines[1]
    assert saved_run_id(tmp_path) not in (None, "deadbeef"), "the next checkpoint holds the new id"


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
    assert time.monotonic() - before < 30, "put must never wait"
    with caplog.at_level(logging.WARNING):
        sink.finish(exit_code=0)
    assert time.monotonic() - before < 60
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    assert sink.errors > 1
    assert len([record for record in caplog.records if record.name == wandb_sink.__name__]) == 1


CHILD = """
import os, signal, sys, time
from pathlib import Path
import psutil
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.tracking.wandb_panels import Panels
from trainer.tracking.wandb_sink import WandbSink
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job that a shell has put into the background ignores it
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
    assert waited_s < 15 and time.monotonic() - left_at < 15, "the finish, and the exit of the process"
    assert not holders_of_samples(tmp_path / "tmp")


def test_keys_are_found_where_wandb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wandb_key_source()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_key_source()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not wandb_key_source()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert wandb_key_source()
