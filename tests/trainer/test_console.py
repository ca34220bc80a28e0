"""trainer/tracking/console.py: the step line, plain output in a pipe, a real bar on a real (pseudo) terminal."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from trainer.tracking.console import Console, evaluation_lines, step_line

METRICS: dict[str, float | None] = {
    "reward/mean": 0.4123,
    "mismatch/k3": 3.14e-6,
    "mismatch/k3_floor": 2.4e-6,
    "rollout/num_samples": 128,
    "rollout/samples_decided": 640,
    # What schedule=bounded logs: this step sampled for later ones, and what it trains on was submitted before.
    "rollout/groups_kept": 16,
    "rollout/groups_generated": 0,
    "perf/step_floor_frac": 0.0037,
    "policy/entropy": 0.5161,
    "optim/grad_norm": 0.114,
    "time/step_s": 2.08,
    "time/rollout_s": 1.21,
    "time/train_s": 0.68,
    "time/sync_s": 0.1,
}
LINE = "step 12/40 | reward 0.41 | K3 3.1e-06 (floor 2.4e-06) | kept 128/640 samples | entropy 0.52 | grad 0.11 | 2.1 s"
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_step_line() -> None:
    assert step_line(12, 40, METRICS) == LINE
    assert len(step_line(1200, 2000, {**METRICS, "optim/grad_norm": 123.4, "time/step_s": 1000.0})) <= 120


def test_what_the_functions_of_a_user_return_stands_on_the_line() -> None:
    own = {"reward/std": 0.5, "episode/turns_mean": 2.25, "reward/judge": 7.123, "reward/form/tags": None, "own/A": 1.0}
    line = step_line(12, 40, {**METRICS, **own, "reward/more": 1.0, "reward/timeouts": 3.0})
    assert line == LINE.replace("| 2.1 s", "| turns 2.25 | judge 7.12 | form/tags - | A 1 | 2.1 s")


def test_the_seconds_of_an_evaluation_and_further_sets_are_shown() -> None:
    metrics = {
        **METRICS,
        "time/eval_s": 1.25,
        "eval/accuracy": 0.5,
        "eval/hard/accuracy": 0.25,
        "eval/hard/length": 9.0,
    }
    assert step_line(12, 40, metrics) == LINE
    assert evaluation_lines("after step 3", metrics) == [
        "held-out after step 3 | accuracy 0.500 greedy, - sampled | reward - | 1.2 s of the step",
        "hard after step 3 | accuracy 0.250 greedy, - sampled | reward -",
    ]


def test_an_evaluation_has_a_line_that_names_its_weights() -> None:
    evaluated = {**METRICS, "eval/accuracy": 0.875, "eval/accuracy_sampled": None, "eval/reward_mean": 0.9}
    stream = io.StringIO()
    with Console(40, stream=stream) as console:
        console.evaluation(0, evaluated)
        console.step(1, evaluated)
        console.step(2, METRICS)
    lines = [line.partition(" | ")[::2] for line in stream.getvalue().splitlines()]
    shown = "accuracy 0.875 greedy, - sampled | reward 0.900"
    assert [place for place, _ in lines] == [
        "held-out before step 1",
        "step 1/40",
        "held-out after step 1",
        "step 2/40",
    ]
    assert lines[0][1] == lines[2][1] == shown


def test_missing_and_null_values_are_dashes() -> None:
    assert step_line(1, 2, {"mismatch/k3": None}) == (
        "step 1/2 | reward - | K3 - (floor -) | kept -/- samples | entropy - | grad - | - s"
    )


def test_plain_lines_without_control_characters() -> None:
    stream = io.StringIO()
    with Console(40, stream=stream) as console:
        console.phase("starting engines")
        console.progress(1, 2, detail="loss 0.1")
        console.phase("first sync")
        console.step(12, METRICS)
        logging.getLogger("rollout.engine").warning("engine 1/4 answered \x1b[31mlate\x07")
        logging.getLogger("rollout.engine").info("not shown")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting engines ..."
    assert re.fullmatch(r"starting engines: done in \d+\.\d s", lines[1])
    assert lines[2] == "first sync ..."
    assert lines[4] == LINE
    assert lines[5] == "WARNING rollout.engine: engine 1/4 answered [31mlate"
    assert len(lines) == 6
    assert all(char == "\n" or char.isprintable() for char in stream.getvalue())


def test_plain_progress_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Console(40, stream=stream) as console:
        console.phase("building the base model")
        for done in range(1, 31):
            clock[0] += 1.0
            console.progress(done, 30, detail="loss 0.2")
    shown = [line for line in stream.getvalue().splitlines() if "/30" in line]
    assert shown == [f"building the base model ... {done}/30  loss 0.2" for done in (10, 20, 30)]


def test_an_interrupted_phase_says_so() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Console(40, stream=stream) as console:
        console.phase("starting engines")
        raise RuntimeError("no engine")
    assert "starting engines: stopped in" in stream.getvalue()


def test_a_reader_that_goes_away_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    stream = open(write, "w", encoding="utf-8")  # noqa: SIM115
    with Console(3, stream=stream) as console:
        console.phase("starting engines")
        os.close(read)
        with caplog.at_level(logging.WARNING):
            for step in (1, 2, 3):
                console.step(step, METRICS)
                logging.getLogger("engine").warning("late answer")
    with suppress(BrokenPipeError):  # what is buffered can no longer be written
        stream.close()
    assert [record.name for record in caplog.records].count("trainer.tracking.console") == 1


def test_root_handlers_are_given_back() -> None:
    root = logging.getLogger()
    mine = logging.StreamHandler(sys.stderr)
    root.addHandler(mine)
    before = list(root.handlers)
    try:
        with Console(1, stream=io.StringIO()):
            assert mine not in root.handlers
        assert sorted(map(id, root.handlers)) == sorted(map(id, before))
    finally:
        root.removeHandler(mine)


SCRIPT = """
import logging, sys, time
from trainer.tracking.console import Console
with Console(3) as console:
    console.phase("starting engines")
    console.progress(1, 2, detail="loss 0.1")
    time.sleep(0.3)
    for step in (1, 2):
        console.step(step, {"reward/mean": 0.5, "mismatch/k3": 1e-6})
        time.sleep(0.3)
    logging.getLogger("engine").warning("late answer")
    sys.stdout.write("from a library\\n")
"""


def run_on_terminal(environment: dict[str, str]) -> str:
    """The bytes that SCRIPT writes to a pseudo-terminal of 200 columns."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=slave, stdout=slave, stderr=slave, close_fds=True,
        env={**os.environ, "COLUMNS": "200", "LINES": "40", "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(slave)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    output = b""
    while select.select([master], [], [], 60)[0]:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        output += chunk
    watchdog.cancel()
    os.close(master)
    assert process.wait(timeout=60) == 0, output.decode()
    return output.decode()


def test_a_terminal_gets_a_bar_below_permanent_lines() -> None:
    raw = run_on_terminal({})
    text = ESCAPE.sub("", raw)
    assert "\x1b[" in raw and "━" in text, "no bar was drawn"
    assert re.search(r"step 2/3.*ETA 0:00:0\d.*reward 0\.50  K3 1\.0e-06", text), text
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    assert sum(line.startswith("step 1/3 | reward 0.50") for line in lines) == 1
    assert "WARNING engine: late answer" in lines
    assert "from a library" in lines
    assert any(re.fullmatch(r"starting engines: done in \d+\.\d s", line) for line in lines)


def test_a_dumb_terminal_gets_plain_lines() -> None:
    raw = run_on_terminal({"TERM": "dumb"})
    assert "\x1b" not in raw and "━" not in raw
    assert "step 2/3 | reward 0.50" in raw
