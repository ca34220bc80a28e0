"""Real SGLang servers of other kinds, each started by its test and gone after it: killed, untied in bfloat16, on two
ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packing_cases import pack
from sglang_cases import (
    FAULT_TIMEOUT_S,
    PROMPTS,
    Served,
    alive,
    judged,
    largest_gap,
    make_requests,
    publisher_of,
    scratch_of,
    start_served,
    under_way,
)
from tiny_model import write_tiny_model

from rollout.config import DType
from rollout.engine import EngineError, WeightSyncError
from rollout.processes.scratch import Scratch
from rollout.sglang.loader import LOADER
from rollout.sglang.weight_update import describe_weights
from rollout.weights.shared_weights import WeightReader
from trainer.run.probe import ProbeError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One whose log-probs are right at temperature 1 only."""
    # Without effect at temperature 1; at others the server then reports log-probs that are not those of its samples.
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    try:
        running = start_served(tmp_path_factory.mktemp("qwen3"), model_type="qwen3", tied=False, dtype=DType.bfloat16)
    finally:
        del os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"]
    yield running
    running.engine.stop()


def assert_nothing_is_left(running: Served, scratch: Scratch) -> None:
    assert alive(running.info.pids) == []
    assert not scratch.path.exists() and not any(segment.exists() for segment in scratch.segments)


@pytest.mark.scenario(14)
def test_killing_the_scheduler_during_generate_is_reported_at_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start_served(tmp_path, model_type="qwen2", tied=True, dtype=DType.float32)
    try:
        scratch, scheduler = scratch_of(running), running.scheduler
        assert scratch.segments and all(segment.exists() for segment in scratch.segments)
        under_way(running.engine, monkeypatch)
        killed_at = time.monotonic()
        scheduler.kill()
        with pytest.raises(EngineError) as caught:
            while True:
                running.engine.poll(1.0)
        assert time.monotonic() - killed_at < FAULT_TIMEOUT_S
        text = str(caught.value)
        assert text.startswith("engine 0 (sglang, policy version 0) generate: POST /generate: ")
        assert f"A part of the server ended: process {scheduler.pid}" in text
        assert f"last 20 lines of {running.log}:\n" in text
        assert 10 <= len(text.splitlines()) <= 22
        assert alive(running.info.pids) == []
        with pytest.raises(EngineError, match="policy_version: GET /model_info: ConnectionRefused"):
            _ = running.engine.policy_version
    finally:
        running.engine.stop()
        running.engine.stop()
    assert_nothing_is_left(running, scratch)


def test_untied_qwen3_in_bfloat16_is_synced_from_either_type(untied: Served, tmp_path: Path) -> None:
    new = write_tiny_model(tmp_path / "new", seed=3, model_type="qwen3", tied=False)
    for dtype in (torch.float32, torch.bfloat16):
        report = untied.engine.load_weights(untied.packed(new, dtype=dtype))
        untied.version += 1
        untied.model = new
        assert report.num_tensors == len(list(new.named_parameters()))
        assert untied.engine.policy_version == untied.version
    requests = make_requests(PROMPTS, num_samples=8)
    generations = untied.engine.generate(requests)
    gap = largest_gap(requests, generations, new, temperature=1.0)
    # bfloat16 against float32: rounding is visible, a wrong weight would be far larger.
    assert 1e-4 < gap < 0.3
    without_head = {name: parameter for name, parameter in new.named_parameters() if name != "lm_head.weight"}
    packed = pack(without_head.items(), policy_version=9, dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"missing tensors: lm_head\.weight$"):
        untied.engine.load_weights(packed)


def test_the_probe_refuses_a_server_that_reports_log_probs_before_the_temperature(untied: Served) -> None:
    assert judged(untied, temperature=1.0, lowest=DType.bfloat16).abs().max() < 0.3
    with pytest.raises(ProbeError, match=r"log-probs at temperature 1, not 0\.7: .*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        judged(untied, temperature=0.7, lowest=DType.bfloat16)
    with pytest.raises(ProbeError, match="rounding to 16 bits where both should compute in float32"):
        judged(untied, temperature=1.0, lowest=DType.float32)


def test_every_rank_of_a_tensor_parallel_engine_takes_its_share_proves_it_and_ends(tmp_path: Path) -> None:
    running = start_served(tmp_path, model_type="qwen2", tied=True, dtype=DType.float32, tp_size=2)
    try:
        new = write_tiny_model(tmp_path / "new", seed=1)
        named = list(new.named_parameters())
        publisher, reader = publisher_of(named), WeightReader()
        with reader.opened(publisher.publish(named, policy_version=1)) as packed:
            report = running.engine.load_weights(packed)
        assert report.num_tensors == len(named) and running.engine.policy_version == 1
        requests = make_requests(PROMPTS)
        assert largest_gap(requests, running.engine.generate(requests), new, temperature=1.0) < 1e-4
        running.version = 1
        # Both ranks give their memory up and take it again, then the new weights.
        running.engine.sleep()
        with pytest.raises(EngineError, match="given up while the engine slept"):
            running.engine.generate(requests)
        running.engine.wake()
        running.load(new)
        assert largest_gap(requests, running.engine.generate(requests), new, temperature=1.0) < 1e-4
        # A byte in the second half of the columns belongs to rank 1 alone.
        name = "model.layers.0.mlp.down_proj.weight"
        changed = dict(named)[name].detach().clone()
        changed[0, -1] += 1
        running.client.call("/begin_weight_update", body={}, timeout_s=30)
        other = publisher_of([(name, changed)])
        with WeightReader().opened(other.publish([(name, changed)], policy_version=9)) as packed:
            body = {"serialized_named_tensors": [describe_weights(packed)] * 2, "load_format": LOADER}
            running.client.call("/update_weights_from_tensor", body=body, timeout_s=30)
        running.client.call("/end_weight_update", body={}, timeout_s=30)
        with pytest.raises(WeightSyncError, match=rf"disagree for {name} of rank 1, made of {name}: [^;]*$"):
            running.verify()
        running.load(new)
        running.verify()
        scratch, begin = scratch_of(running), time.monotonic()
    finally:
        running.engine.stop()
    assert time.monotonic() - begin < FAULT_TIMEOUT_S
    assert_nothing_is_left(running, scratch)
    running.engine.stop()
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        running.engine.generate(make_requests(PROMPTS))
