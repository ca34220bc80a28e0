"""A machine that is not as the run needs it: what is left of another Ray, no Ray, no GPU. One sentence ends the run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from policy_cases import make_config, save_policy

from trainer.cluster import deadline
from trainer.cluster.bundles import PlacementError
from trainer.cluster.placement import Cluster
from trainer.cluster.ray_session import ray_session
from trainer.config.training import ClusterConfig


@pytest.fixture
def silent_address() -> Iterator[str]:
    """A port that accepts every connection and never answers, at every address under which Ray may look for it."""
    with socket.create_server(("", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def address_without_ray() -> str:
    """A loopback address at which nothing listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as ended:
        return f"127.0.0.1:{ended.getsockname()[1]}"


@pytest.mark.scenario(33)
@pytest.mark.parametrize("key", ["auto", "named"])
def test_a_cluster_that_has_ended_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    stale = address_without_ray()
    monkeypatch.setenv("RAY_ADDRESS", stale)
    config = make_config(tmp_path)
    config.cluster = ClusterConfig(address="auto" if key == "auto" else stale)
    begin = time.monotonic()
    with (
        pytest.raises(PlacementError, match=r"no Ray cluster can be reached at cluster\.address=.*refused.*remove"),
        Cluster(config, log_dir=tmp_path),
    ):
        pass
    assert time.monotonic() - begin < 60
    assert not ray.is_initialized()


@pytest.mark.scenario(33)
def test_a_cluster_that_accepts_and_never_answers_is_named_within_a_deadline(
    silent_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "RAY_ANSWER_S", 2.0)
    config = make_config(tmp_path)
    config.cluster = ClusterConfig(address=silent_address)
    begin = time.monotonic()
    with (
        pytest.raises(PlacementError, match=r"no Ray cluster can be reached at cluster\.address=.*within 2 s"),
        Cluster(config, log_dir=tmp_path),
    ):
        pass
    assert time.monotonic() - begin < 60
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.scenario(33)
def test_what_another_ray_left_is_not_followed_and_a_missing_gpu_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address_without_ray())
    config = make_config(save_policy(tmp_path / "model"))
    config.rollout.gpus_per_engine = 1.0
    with (
        ray_session(None),
        pytest.raises(PlacementError, match=r"requires CPU .*, GPU 1; the cluster has CPU .*, GPU 0\. "),
        Cluster(config, log_dir=tmp_path),
    ):
        pass


HANGS = """
import logging, sys
from pathlib import Path
import psutil
import trainer.__main__
from policy_cases import make_config
from trainer.cluster import deadline
from trainer.cluster.placement import Cluster

def run(words):
    config, directory = make_config(Path(words[0])), Path(words[0])
    with Cluster(config, log_dir=directory):
        started = psutil.Process().children(recursive=True)
        [control] = [each for each in started if each.name() == "gcs_server"]
        control.suspend()
        print("suspended", flush=True)
        try:
            Cluster(config, log_dir=directory).__enter__()
        except deadline.RayAnswerError as error:
            print(error, flush=True)
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive, alive
    assert deadline.is_call_unanswered()  # at the interpreter's exit it would crash in some runs
    return 1

logging.basicConfig()
deadline.RAY_ANSWER_S = 3.0
trainer.__main__.run = run
sys.exit(trainer.__main__.main())
"""


@pytest.mark.slow
@pytest.mark.scenario(33)
def test_a_ray_that_hangs_is_named_and_killed_at_the_end_within_a_deadline(tmp_path: Path) -> None:
    environment = {"RAY_gcs_server_request_timeout_seconds": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment,
    ) as run:  # fmt: skip
        assert run.stdout is not None and run.stdout.readline() == "suspended\n"
        begin = time.monotonic()
        said, warned = run.communicate(timeout=300)
    assert run.returncode == 1 and "Traceback" not in warned, warned
    assert time.monotonic() - begin < 30
    assert "did not answer cluster_resources within 3 s: its control process (gcs_server) hangs" in said
    assert "the resources of the run are not given back" in warned
    assert "Ray did not answer shutdown within 3 s" in warned and "are killed" in warned
