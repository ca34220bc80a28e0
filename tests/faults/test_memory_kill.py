"""A machine without free memory: what Ray ends is named in one paragraph, with what the plan said and what helps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from policy_cases import make_config, save_policy

from rollout.group.actor_calls import LostWorkerError, cause_of_death
from trainer.cluster.placement import Cluster
from trainer.cluster.session import ray_session


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


def test_any_other_death_is_one_paragraph_too() -> None:
    message = "The actor died.\n\tpid: 7\nWorker exit type: SYSTEM_ERROR Worker exit detail: Worker exits\nwith code 2."
    assert cause_of_death(message) == "Worker exits with code 2."
    assert cause_of_death("The node\nis gone.") == "The node is gone."
