"""Ceilings: measured for real, cached by what decides them, measured again when the cache is damaged."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from rollout.config import DType
from trainer.limits import ceilings
from trainer.limits.ceilings import Ceilings, cache_path, find_ceilings, measure

KNOWN = Ceilings(
    device="a processor, 2 threads",
    copy_bytes_per_s=2e10,
    float32_flops=1e11,
    bfloat16_flops=4e11,
    float16_flops=2e9,
)


def test_a_real_measurement_bounds_real_work_and_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    started = time.perf_counter()
    found = measure("cpu", num_threads=1)
    assert time.perf_counter() - started < 30
    assert torch.get_num_threads() == before
    assert "1 thread" in found.device
    # Any machine of this century: between 0.1 and 1000 GB/s, between 0.1 GFLOP/s and 100 TFLOP/s on a CPU.
    assert 1e8 < found.copy_bytes_per_s < 1e12
    assert all(1e8 < found.flops(dtype) < 1e14 for dtype in DType)
    # A product with a row of one is bound by memory: it cannot come near.
    left, right = torch.rand(1, 2048), torch.rand(2048, 2048)
    started = time.process_time()
    for _ in range(5):
        left @ right
    assert 5 * 2 * 2048**2 / (time.process_time() - started) < found.float32_flops


def test_the_second_call_reads_what_the_first_one_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(ceilings, "measure", lambda device, num_threads: measured.append(num_threads) or KNOWN)
    assert find_ceilings("cpu", num_threads=2, cache_dir=tmp_path) == KNOWN
    assert find_ceilings("cpu", num_threads=2, cache_dir=tmp_path) == KNOWN
    assert measured == [2]
    # Another thread count is another ceiling.
    find_ceilings("cpu", num_threads=1, cache_dir=tmp_path)
    assert measured == [2, 1]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", json.dumps(asdict(KNOWN) | {"float32_flops": 0.0}), '{"device": 1}']
)
def test_a_damaged_cache_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device, num_threads: KNOWN)
    path = cache_path("cpu", 2, cache_dir=tmp_path)
    path.write_text(text)
    assert find_ceilings("cpu", num_threads=2, cache_dir=tmp_path) == KNOWN
    assert "damaged" in caplog.text
    assert Ceilings(**json.loads(path.read_text())) == KNOWN


def test_the_key_changes_with_what_decides_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {cache_path("cpu", 1, cache_dir=tmp_path), cache_path("cpu", 2, cache_dir=tmp_path)}
    monkeypatch.setattr(torch, "__version__", "9.9")
    paths.add(cache_path("cpu", 1, cache_dir=tmp_path))
    monkeypatch.setattr(ceilings, "cpu_name", lambda: "another processor")
    paths.add(cache_path("cpu", 1, cache_dir=tmp_path))
    assert len(paths) == 4


def test_what_a_busy_machine_gave_is_used_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device, num_threads: replace(KNOWN, was_busy=True))
    found = find_ceilings("cpu", num_threads=2, cache_dir=tmp_path)
    assert "too low" in str(found)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ceilings, "measure", lambda device, num_threads: KNOWN)
    (tmp_path / "file").touch()
    assert find_ceilings("cpu", num_threads=2, cache_dir=tmp_path / "file" / "cache") == KNOWN
    assert "could not be kept" in caplog.text
