"""A machine without free memory: what Ray ends is named in one paragraph, with what the plan said and what helps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from policy_cases import make_config, save_policy

from rollout.group.actor_calls import LostWorkerError, cause_of_death
from trainer.cluster.placement import Cluster
from trainer.cluster.ray_session import DEATH_OF_A_WORKER, ray_session


@pytest.fixture
def watchful_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray whose memory monitor takes one percent of the memory for too much."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "200")
    with ray_session(None):
        yield


@pytest.mark.slow
def test_a_rank_that_ray_ends_for_its_memory_is_named_in_one_paragraph(watchful_ray: None, tmp_path: Path) -> None:
    path = save_policy(tmp_path / "model")
    with Cluster(make_config(path), log_dir=tmp_path) as cluster, pytest.raises(LostWorkerError) as caught:
        cluster.spawn_policy(path).wait_ready()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 800
    assert text.startswith("phase policy start: policy ")
    for part in (
        "died: the memory of its machine was used up (",
        "GB), and Ray ended process ",
        ", which held 0.",
        "The memory plan said: ranks and engines need up to ",
        "; this machine has ",
        "Lower batch.max_tokens_per_microbatch, ",
    ):
        assert part in text


@pytest.mark.slow
def test_the_death_of_a_worker_is_not_printed_by_ray(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Ray prints its message while a killed worker had a call to answer, also at the end of a run."""
    path = save_policy(tmp_path / "model")
    with (
        caplog.at_level(logging.DEBUG),
        ray_session(None),
        Cluster(make_config(path), log_dir=tmp_path) as cluster,
    ):
        policy = cluster.spawn_policy(path)
        policy.wait_ready()
        policy.give_up(policy.processes[0], "the test kills it")
        with pytest.raises(LostWorkerError, match=r"died|the test kills it"):
            policy.ceilings()
        end = time.monotonic() + 30
        while DEATH_OF_A_WORKER not in caplog.text and time.monotonic() < end:
            time.sleep(0.1)
    # One for each worker that still had a lease: the killed rank, and sometimes the one that ends beside it.
    levels = {record.levelno for record in caplog.records if DEATH_OF_A_WORKER in record.getMessage()}
    assert levels == {logging.DEBUG}
    assert "raylet" not in "".join(capfd.readouterr())


def test_any_other_death_is_one_paragraph_too() -> None:
    message = "The actor died.\n\tpid: 7\nWorker exit type: SYSTEM_ERROR Worker exit detail: Worker exits\nwith code 2."
    assert cause_of_death(message) == "Worker exits with code 2."
    assert cause_of_death("The node\nis gone.") == "The node is gone."
