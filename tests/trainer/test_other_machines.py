"""Weights for engines on other machines: real ranks and engines, one machine taken for three."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from policy_cases import flip_byte, held_versions, make_config, make_samples, save_policy
from test_packing import pack_samples

import rollout.group.engine_group
import trainer.cluster.model_places
from rollout.config import DType, Quantization
from rollout.engine import WeightSyncError
from rollout.group.actor_calls import kill_worker
from rollout.group.engine_group import EngineGroup
from rollout.group.group_member import Health, Published
from rollout.torch.config import TorchEngineConfig
from rollout.weights.shared_weights import copy_of
from trainer.cluster.model_places import ModelPlaceError, model_places
from trainer.cluster.placement import Cluster
from trainer.cluster.policy_group import PolicyGroup, _same_weights
from trainer.cluster.ray_session import ray_session
from trainer.cluster.weight_sync import sync_weights
from trainer.config.training import LoraConfig
from trainer.limits.adapter_shape import sent_adapter

pytestmark = pytest.mark.slow

NODES = ["b", "here", "b", "c"]
"""Of the engines."""


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with ray_session(None):
        yield


@pytest.fixture(scope="module", params=["all weights", "adapter"])
def sides(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PolicyGroup, EngineGroup]]:
    """Two ranks and four engines on machines NODES; which versions the engines hold depends on the tests before.

    The engines get all weights, or frozen weights once and then an adapter.
    """
    path = save_policy(tmp_path_factory.mktemp("model"))
    config = make_config(path, num_workers=2)
    config.rollout = TorchEngineConfig(
        dtype=DType.float32,
        num_engines=4,
        quantization=Quantization.int4,
        sync_timeout_s=60.0,
    )
    if request.param == "adapter":
        config.policy.lora = LoraConfig(rank=4, alpha=8)
    with Cluster(config, log_dir=path) as cluster, pytest.MonkeyPatch.context() as patch:
        policy = cluster.spawn_policy(path)
        engines = cluster.spawn_engines(path, adapter=sent_adapter(config, path))
        policy.wait_ready()
        engines.wait_ready()
        for member, node in zip(engines._members, NODES, strict=True):
            member.node = policy.node if node == "here" else node

        def kill_here(worker: Any, *, node: str, processes: Any) -> None:
            kill_worker(worker, node=policy.node, processes=processes)

        patch.setattr(rollout.group.engine_group, "kill_worker", kill_here)
        yield policy, engines


def test_every_machine_says_whether_it_has_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(trainer.cluster.model_places, "is_here", lambda node: False)  # as if it were another machine
    assert model_places(tmp_path, [node, node], timeout_s=60.0) == {node: tmp_path}
    with pytest.raises(ModelPlaceError, match=r"the machine \S+ of the cluster cannot read the model: FileNot"):
        model_places(tmp_path / "absent", [node], timeout_s=60.0)


def test_weights_go_to_other_machines_as_objects(sides: tuple[PolicyGroup, EngineGroup]) -> None:
    policy, engines = sides
    old = max(held_versions(engines))
    for version in (old + 1, old + 2):
        policy.train(pack_samples([make_samples()], num_ranks=2, max_tokens=100, policy_version=0), step=version)
        report = sync_weights(policy, engines, policy_version=version)
        assert "through shared memory (1) and Ray objects (3) in" in str(report)
        assert held_versions(engines) == [version] * 4


def test_a_byte_that_changes_on_the_way_is_named(sides: tuple[PolicyGroup, EngineGroup]) -> None:
    policy, engines = sides
    held = held_versions(engines)
    shared = policy.publish_weights(policy_version=max(held) + 1).shared
    spec, copies = shared.tensors[3], copy_of(replace(shared, base=None))
    copies.data[spec.offset] ^= 1
    weights = Published(shared=shared, node=policy.node)
    vars(weights)["copies"] = ray.put(copies)
    with pytest.raises(WeightSyncError, match=spec.name.replace(".", r"\.")):
        engines.load_weights(weights)
    assert held_versions(engines)[::2] == held[::2]  # those of "b"


def test_a_rank_publishes_for_the_engines_of_its_machine(
    sides: tuple[PolicyGroup, EngineGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, engines = sides
    monkeypatch.setattr(policy, "_nodes", [policy.node, "b"])
    version = max(held_versions(engines)) + 1
    report = sync_weights(policy, engines, policy_version=version)
    assert "through shared memory (3) and Ray objects (1) in" in str(report)
    assert held_versions(engines) == [version] * 4
    weights = policy.publish_weights(policy_version=version + 1, nodes=engines.nodes)
    assert weights.by_ranks.keys() == {"b"} and weights.by_ranks["b"].address != weights.shared.address
    flip_byte(weights.by_ranks["b"], weights.shared.tensors[3])
    with pytest.raises(WeightSyncError, match=weights.shared.tensors[3].name.replace(".", r"\.")):
        engines.load_weights(weights)
    assert held_versions(engines)[::2] == [version] * 2  # those of "b"
    # A rank without engines on its machine writes nothing.
    assert not policy.publish_weights(policy_version=version + 2, nodes=["here", "c"]).by_ranks


def test_ranks_that_gathered_different_bytes_are_named(sides: tuple[PolicyGroup, EngineGroup]) -> None:
    policy, engines = sides
    shared = policy.publish_weights(policy_version=max(held_versions(engines)) + 1).shared
    tensors = [replace(spec, digest="0" * 16) if index == 2 else spec for index, spec in enumerate(shared.tensors)]
    with pytest.raises(WeightSyncError, match=f"rank 1 has other bytes of {shared.tensors[2].name}"):
        _same_weights(shared, replace(shared, tensors=tensors), 1)


@pytest.mark.scenario(18)
def test_an_engine_that_dies_in_a_sync_is_replaced_and_gets_the_weights(
    sides: tuple[PolicyGroup, EngineGroup], caplog: pytest.LogCaptureFixture
) -> None:
    policy, engines = sides
    version = max(held_versions(engines)) + 1
    pid = engines._members[0].processes[0].pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    report = sync_weights(policy, engines, policy_version=version)
    assert report.seconds > 0.9  # it was under way
    assert "through shared memory (1) and Ray objects (2) in" in str(report)
    assert "engine 0 is lost" in caplog.text
    assert held_versions(engines) == [version] * 3
    engines._wait_while(lambda member: member.health is not Health.serving)
    assert held_versions(engines) == [version] * 4
    report = sync_weights(policy, engines, policy_version=version + 1)
    assert report.gb_per_s == pytest.approx(4 * report.num_bytes / report.seconds / 1e9)
    assert held_versions(engines) == [version + 1] * 4
    assert engines.metrics()["rollout/engine_restarts"] == 1.0
