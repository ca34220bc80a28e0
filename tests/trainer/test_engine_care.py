"""Real engines in processes that are killed, stopped or lie: nothing is lost or comes twice, the end is clear."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from care_workers import POISON, REFUSED, DishonestWorker, HungWorker, MortalWorker, QueueWorker, SlowWorker
from policy_cases import held_versions, save_policy
from policy_cases import published as published_on
from transformers import AutoModelForCausalLM

from rollout.config import DType
from rollout.engine import EngineError, EngineSetup, WeightReport, WeightSyncError
from rollout.group.actor_calls import WorkerError
from rollout.group.engine_group import EngineGroup
from rollout.group.group_member import Health
from rollout.group.residency import SharedGpu
from rollout.group.worker import CONCURRENCY_GROUPS, RolloutWorker
from rollout.torch.config import TorchEngineConfig
from rollout.types import FinishReason, GenerateRequest, Generation, SamplingParams, SharedWeights
from rollout.weights.packed_weights import TensorShape
from rollout.weights.shared_weights import WeightPublisher
from trainer.cluster.ray_session import ray_session

pytestmark = pytest.mark.slow

LONG = 100
"""Tokens of a response: the model's context is 128."""


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with ray_session(None):
        yield


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


class Published:
    """The tiny policy's weights in shared memory, as rank 0 holds them."""

    def __init__(self, model_path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        named = list(self._model.named_parameters())
        shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        self._publisher = WeightPublisher(shapes, dtype=torch.float32)

    def version(self, number: int) -> SharedWeights:
        return self._publisher.publish(self._model.named_parameters(), policy_version=number)


def build_group(worker: type[RolloutWorker], model_path: Path, log_dir: Path, **keys: Any) -> EngineGroup:
    """Two engines that are ready and hold version 0."""
    keys = {"answer_timeout_s": 3.0, "max_restarts": 1, **keys}
    config = TorchEngineConfig(dtype=DType.float32, num_engines=2, **keys)
    # The actors can import what lies beside this file.
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(worker)  # type: ignore[call-overload]

    def spawn(index: int) -> Any:
        setup = EngineSetup(
            config=config, index=index, seed=0, device="cpu", num_threads=1, log_dir=log_dir, model_path=model_path
        )
        return actor.options(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": paths}}).remote(setup)

    group = EngineGroup(spawn, nodes=[ray.get_runtime_context().get_node_id()] * 2, config=config)
    assert len(group.wait_ready()) == 2
    return group


@pytest.fixture(scope="module")
def published(model_path: Path) -> Published:
    return Published(model_path)


@pytest.fixture(scope="module")
def group(model_path: Path, published: Published) -> Iterator[EngineGroup]:
    """Slow engines that all serve and hold one version; which it is depends on the tests before."""
    group = build_group(SlowWorker, model_path, model_path)
    load(group, published.version(0))
    yield group
    group.stop()


def load(group: EngineGroup, shared: SharedWeights) -> dict[int, WeightReport]:
    return group.load_weights(published_on(shared, ray.get_runtime_context().get_node_id()))


def requests_of(count: int = 8, *, tokens: int = LONG) -> list[GenerateRequest]:
    """Two samples for each prompt."""
    return [
        GenerateRequest(
            prompt_id=index // 2,
            sample_index=index % 2,
            prompt_token_ids=[3, 5 + index // 2],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens, seed=index),
        )
        for index in range(count)
    ]


def collect(group: EngineGroup, tickets: Sequence[int], *, timeout_s: float = 120.0) -> dict[int, Generation]:
    """Everything that comes until nothing is unfinished; each ticket must come once."""
    found: dict[int, Generation] = {}
    deadline = time.monotonic() + timeout_s
    while group.unfinished:
        assert time.monotonic() < deadline
        for ticket, generation in group.poll(1.0):
            assert ticket not in found
            found[ticket] = generation
    assert sorted(found) == sorted(tickets)
    return found


def pid_of(group: EngineGroup, index: int) -> int:
    return group._members[index].processes[0].pid


def same_tokens(found: dict[int, Generation], expected: list[Generation]) -> bool:
    return [found[ticket].token_ids for ticket in sorted(found)] == [each.token_ids for each in expected]


def sample_a_little(group: EngineGroup) -> None:
    """Afterwards both engines have sampled a few tokens of what was submitted before."""
    assert [len(each.token_ids) for each in group.generate(requests_of(4, tokens=5))] == [5] * 4


def test_requests_are_spread_polled_and_aborted(group: EngineGroup, published: Published) -> None:
    requests, old = requests_of(), held_versions(group)[0]
    expected = group.generate(requests)
    assert [each.token_versions for each in expected] == [[old] * LONG] * 8
    tickets = group.submit(requests)
    assert group.unfinished == 8
    # Groups stay together, and both engines have the same to do.
    held = [sorted(ticket - tickets[0] for ticket in member.in_flight) for member in group._members]
    assert held == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # Others who wait for their own answers meanwhile take none of ours.
    sample_a_little(group)
    group.abort(tickets[:3])
    # Weights come while they are sampled, by another thread of the workers than polls and requests.
    load(group, published.version(old + 1))
    found = collect(group, tickets)
    assert [found[ticket].finish_reason is FinishReason.abort for ticket in tickets] == [True] * 3 + [False] * 5
    assert all(len(found[ticket].token_ids) < LONG for ticket in tickets[:3])
    assert [set(found[ticket].token_versions) for ticket in tickets[3:]] == [{old, old + 1}] * 5
    assert [found[ticket].token_ids for ticket in tickets[3:]] == [each.token_ids for each in expected[3:]]


def test_what_is_refused_costs_no_engine(group: EngineGroup, published: Published) -> None:
    with pytest.raises(WorkerError, match=r"prompt 0/0: 2 prompt tokens and max_new_tokens=127 exceed"):
        group.submit([*requests_of(4), *requests_of(1, tokens=127)])
    assert group.unfinished == 0
    new = held_versions(group)[0] + 1
    shared = published.version(new)
    spec = shared.tensors[2]
    digest, spec.digest = spec.digest, "0" * 16
    with pytest.raises(WeightSyncError, match=f"tensor {spec.name} was changed on the way"):
        load(group, shared)
    spec.digest = digest
    assert [report.policy_version for report in load(group, shared).values()] == [new, new]
    assert group.metrics() == {"rollout/engine_restarts": 0.0, "rollout/redispatched": 0.0, "rollout/given_up": 0.0}


def serve_all(group: EngineGroup, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(member.health is not Health.serving for member in group._members):
        assert time.monotonic() < deadline
        group._wait(1.0)


@pytest.fixture
def mortal_group(model_path: Path, published: Published, tmp_path: Path) -> Iterator[EngineGroup]:
    """Slow engines of one test."""
    group = build_group(SlowWorker, model_path, tmp_path)
    load(group, published.version(0))
    yield group
    group.stop()


@pytest.fixture
def mortal(model_path: Path, published: Published, tmp_path: Path) -> Iterator[EngineGroup]:
    """Engines that a request can kill."""
    group = build_group(MortalWorker, model_path, tmp_path)
    load(group, published.version(0))
    yield group
    group.stop()


@pytest.mark.scenario(14)
@pytest.mark.scenario(15)
@pytest.mark.scenario(17)
@pytest.mark.scenario(36)
def test_engines_that_are_killed_or_stopped_lose_nothing_and_come_back(
    mortal_group: EngineGroup, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, requests = mortal_group, requests_of()
    expected = group.generate(requests)
    tickets = group.submit(requests)
    sample_a_little(group)
    os.kill(pid_of(group, 1), signal.SIGKILL)
    assert same_tokens(collect(group, tickets), expected)
    assert group.metrics() == {"rollout/engine_restarts": 1.0, "rollout/redispatched": 4.0, "rollout/given_up": 0.0}
    # It takes part again with the weights that are current then, not those that it died with.
    load(group, published.version(3))
    serve_all(group)
    assert held_versions(group) == [3, 3]
    tickets = group.submit(requests)
    wedged = psutil.Process(pid_of(group, 0))
    wedged.suspend()
    # The wall clock is set forward by an hour: the engine is found and ended all the same.
    booted = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted + 3600)
    group.abort(tickets[:1])
    found = collect(group, tickets)
    # What was to be ended is not sampled again.
    cut = found.pop(tickets[0])
    assert (cut.token_ids, cut.finish_reason) == ([], FinishReason.abort)
    assert same_tokens(found, expected[1:])
    assert {version for each in found.values() for version in each.token_versions} == {3}
    assert group.metrics() == {"rollout/engine_restarts": 1.0, "rollout/redispatched": 3.0, "rollout/given_up": 0.0}
    with pytest.raises(psutil.NoSuchProcess):
        wedged.wait(timeout=10)
        psutil.Process(wedged.pid)
    serve_all(group)
    # Both have used up their restart. When they are gone, aborted requests still come back, others end the run.
    tickets = group.submit(requests)
    begin = time.monotonic()
    for index in (0, 1):
        os.kill(pid_of(group, index), signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        while True:
            group.poll(1.0)
    assert time.monotonic() - begin < 30
    text = str(caught.value)
    assert text.startswith("0 of 2 engines are left, each restarted rollout.max_restarts=1 times:\nengine 0: phase ")
    assert "engine 1 died" in text
    group.abort(None)
    assert sorted(completion.ticket for completion in group.poll(0.0)) == tickets


@pytest.mark.scenario(15)
@pytest.mark.scenario(16)
def test_an_engine_that_never_gets_on_or_holds_other_weights_is_not_used(
    model_path: Path, published: Published, tmp_path: Path
) -> None:
    group = build_group(DishonestWorker, model_path, tmp_path, generate_timeout_s=3.0)
    try:
        load(group, published.version(4))
        found = collect(group, group.submit(requests_of(4, tokens=20)))
        assert [len(each.token_ids) for each in found.values()] == [20] * 4
        assert group.metrics() == {"rollout/engine_restarts": 1.0, "rollout/redispatched": 2.0, "rollout/given_up": 0.0}
        deadline = time.monotonic() + 60
        while group._members[0].health is not Health.retired:
            assert time.monotonic() < deadline
            assert group._members[0].health is not Health.serving
            group._wait(1.0)
        assert group._members[0].lost_by.endswith("it was sent policy version 4 and reports 11")
        collect(group, group.submit(requests_of(4, tokens=20)))
    finally:
        group.stop()


def test_a_fast_engine_serves_what_waits_in_the_queue_of_a_slow_one(
    model_path: Path, published: Published, tmp_path: Path
) -> None:
    """Which engine serves a request changes no token, each is answered once, and the order is that of completion."""
    group = build_group(QueueWorker, model_path, tmp_path, answer_timeout_s=60.0)
    try:
        load(group, published.version(6))
        requests = requests_of(16, tokens=40)
        tickets = group.submit(requests)
        assert [len(member.in_flight) for member in group._members] == [8, 8]
        of_slow = set(group._members[0].in_flight)
        found = collect(group, tickets)
        served = [ray.get(member.worker.served.remote()) for member in group._members]
        assert sorted(served[0] + served[1]) == tickets
        assert of_slow & set(served[1]) and len(served[1]) > len(served[0])
        assert same_tokens(found, group.generate(requests))
        assert group.metrics() == {"rollout/engine_restarts": 0.0, "rollout/redispatched": 0.0, "rollout/given_up": 0.0}
    finally:
        group.stop()


@pytest.mark.scenario(15)
def test_an_engine_that_never_ends_an_aborted_request_is_replaced(
    model_path: Path, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread hangs: it answers every poll, and rollout.generate_timeout_s is long."""
    monkeypatch.setattr("rollout.group.engine_group.ABORT_TIMEOUT_S", 1.0)
    group = build_group(HungWorker, model_path, tmp_path, answer_timeout_s=2.0, max_restarts=0)
    try:
        load(group, published.version(5))
        tickets = group.submit(requests_of(4, tokens=20))
        hung = sorted(group._members[0].in_flight)
        begin = time.monotonic()
        group.abort(hung[:1])
        found: dict[int, Generation] = {}
        while len(found) < 3:
            assert time.monotonic() - begin < group.abort_timeout_s
            found |= dict(group.poll(1.0))
        assert found[hung[0]].finish_reason is FinishReason.abort
        while group.unfinished:
            found |= dict(group.poll(1.0))
        assert [len(found[ticket].token_ids) for ticket in tickets if ticket != hung[0]] == [20] * 3
        assert "phase abort: engine 0 did not end 1 requests in time" in group._members[0].lost_by
    finally:
        group.stop()


@pytest.mark.scenario(14)
def test_a_request_that_kills_every_engine_is_given_up_and_costs_no_other_request(
    mortal: EngineGroup,
) -> None:
    requests = requests_of(8, tokens=20)
    expected = mortal.generate(requests)
    for index, token in ((5, POISON), (6, REFUSED)):
        requests[index].prompt_token_ids.append(token)
    tickets = mortal.submit(requests)
    found = collect(mortal, tickets)
    assert [ticket - tickets[0] for ticket in tickets if found[ticket].finish_reason is FinishReason.failed] == [5, 6]
    for index, (ticket, whole) in enumerate(zip(tickets, expected, strict=True)):
        assert found[ticket].token_ids == ([] if index in (5, 6) else whole.token_ids)
    counts = mortal.metrics()
    # The third engine that was lost was one that had been started again: it is retired.
    assert (counts["rollout/engine_restarts"], counts["rollout/given_up"]) == (2.0, 2.0)
    assert mortal.generate(requests_of(4, tokens=20)) == expected[:4]


def test_an_engine_lost_while_the_policy_has_the_gpu_starts_when_the_policy_has_left(
    model_path: Path, published: Published, tmp_path: Path
) -> None:
    class Policy:
        """The other user of the GPU; it leaves before any engine has begun to start."""

        def sleep(self) -> None:
            assert group._members[0].pending_call is None

        def wake(self) -> None:
            assert not shared_gpu.admits(group)

    group, shared_gpu = build_group(RolloutWorker, model_path, tmp_path), SharedGpu()
    try:
        load(group, published.version(0))
        group._shared_gpu = shared_gpu
        shared_gpu.enable(awake=group)
        with shared_gpu.resident(Policy()):
            os.kill(pid_of(group, 0), signal.SIGKILL)
            group.sampling_s()
            fresh = group._members[0]
            assert (fresh.restarts, fresh.health, fresh.pending_call) == (1, Health.starting, None)
        with group.resident():
            assert fresh.pending_call is not None
            load(group, published.version(1))
            group._wait_while(lambda member: member.health is not Health.serving)
            assert held_versions(group) == [1, 1]
            sample_a_little(group)
    finally:
        group.stop()
