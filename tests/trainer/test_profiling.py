"""Traces of a step: recorded in this process, read back as a table, left out of medians, shown in the report."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compose_cases import config_of, resolved
from run_directory import make_run

from rollout.processes.torch_trace import Recorder
from trainer.report.headline import tiles
from trainer.report.phases import profiles
from trainer.run.profiling import write_driver
from trainer.run.step_log import Span
from trainer.tracking.operations import DRIVER, IDLE, OTHER, load_operations, read_operations, write_operations


def op(name: str, begin: float, duration: float, *, thread: int = 1, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": begin, "dur": duration}


def written(directory: Path, name: str, events: list[dict[str, Any]], *, base: int = 10**9) -> Path:
    path = directory / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}).encode()))
    return path


def test_the_time_of_an_operator_is_its_own_and_idle_time_is_counted_once(tmp_path: Path) -> None:
    events = [
        op("aten::linear", 0, 4e6),
        op("aten::mm", 1e6, 2e6),
        op("aten::copy_", 5e6, 1e6),
        op("aten::mul", 5e6, 2e6, thread=2),
        op("aten::mul", 90e6, 1e6),  # after the step
        op("phase", 0, 9e6, category="user_annotation"),
    ]
    found = read_operations(written(tmp_path, "rank_0", events), begin_ns=10**9, end_ns=11 * 10**9)
    assert (found.process, found.seconds) == ("rank_0", 10.0)
    assert found.operations == [
        ("aten::linear", 2.0, 1), ("aten::mm", 2.0, 1), ("aten::mul", 2.0, 1), ("aten::copy_", 1.0, 1),
    ]  # fmt: skip
    assert found.shares == pytest.approx({"products": 0.4, "copies": 0.1, OTHER: 0.2, IDLE: 0.4})


def test_of_a_gpu_the_kernels_count(tmp_path: Path) -> None:
    events = [
        op("aten::mm", 0, 9e6),
        op("sm90_gemm", 1e6, 2e6, category="kernel"),
        op("x", 4e6, 1e6, category="kernel"),
    ]
    found = read_operations(written(tmp_path, "rank_0", events), begin_ns=10**9, end_ns=11 * 10**9)
    assert found.shares == pytest.approx({"products": 0.2, OTHER: 0.1, IDLE: 0.7})


def test_a_record_has_all_threads_and_its_table_is_read_back(tmp_path: Path) -> None:
    recorder, values = Recorder(), torch.ones(200, 200)
    recorder.stop()  # nothing is recorded
    recorder.start(tmp_path / "rank_0.json.gz")
    begin = time.time_ns()
    thread = threading.Thread(target=lambda: values @ values)
    thread.start()
    thread.join()
    values.mul(2.0)
    end = time.time_ns()
    recorder.stop()
    write_driver(tmp_path / DRIVER, [Span("train", begin, (end - begin) / 1e9)])
    write_operations(tmp_path, begin_ns=begin, end_ns=end)
    [found] = load_operations(tmp_path)
    names = {name for name, _, _ in found.operations}
    assert {"aten::mm", "aten::mul"} <= names
    assert found.seconds == pytest.approx((end - begin) / 1e9) and 0 < found.shares["products"] <= 1
    driver = json.loads(gzip.decompress((tmp_path / DRIVER).read_bytes()))
    [span] = driver["traceEvents"]
    assert driver["baseTimeNanoseconds"] + 1e3 * span["ts"] == pytest.approx(begin, abs=1e4)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"traceEvents": []}'])
def test_what_is_no_trace_and_no_table_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rank_0.json.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=r"rank_0.json.gz is no trace"):
        write_operations(tmp_path, begin_ns=0, end_ns=1)
    (tmp_path / "operations.json").write_bytes(content or b'[{"process": 1}]')
    if content != b"[]":
        with pytest.raises(ValueError, match=r"operations.json has no table"):
            load_operations(tmp_path)


def test_a_recorded_step_is_left_out_of_medians_and_shown_in_a_table(tmp_path: Path) -> None:
    written(tmp_path, "rank_0", [op("aten::mm", 0, 5e5)])
    write_operations(tmp_path, begin_ns=10**9, end_ns=2 * 10**9)
    rows = [{"step": step, "time/step_s": seconds} for step, seconds in enumerate([2.0, 2.0, 90.0], 1)]
    rows[2]["perf/profiled"] = 1.0
    run = make_run(rows, profiles={"3": load_operations(tmp_path)})
    assert [tile.value for tile in tiles(run) if tile.label == "Time per step"] == ["2 s"]
    [profile] = profiles(run)
    assert profile.shares == [["rank_0", "1.00", "0.0 %", "50.0 %", "0.0 %", "0.0 %", "50.0 %"]]
    assert profile.operations == [["rank_0", "aten::mm", "0.500", "1"]]


def test_only_steps_of_the_run_are_recorded() -> None:
    assert config_of("run.num_steps=4", "run.profile_steps=[2,4]").run.profile_steps == [2, 4]
    [problem] = resolved("run.num_steps=4", "run.profile_steps=[5]").problems
    assert "run.profile_steps must be steps of the run, 1 to run.num_steps=4" in str(problem)
