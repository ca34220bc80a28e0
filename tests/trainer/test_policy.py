"""Real FSDP2 ranks and real engines under Ray: gradients do not depend on the layout, weights arrive bitwise.

Everything here runs on one Ray cluster; models are tiny and random.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from policy_cases import (
    by_aggregation,
    flip_byte,
    held_versions,
    make_config,
    make_samples,
    published,
    save_policy,
    save_untied,
)
from safetensors.torch import load_file
from test_packing import pack_samples

from algorithms.config import (
    Aggregation,
)
from rollout.collect.requests import make_sample as make_rollout
from rollout.collect.requests import sampling_params
from rollout.config import DType, EngineConfig, Quantization, SamplingConfig
from rollout.engine import WeightSyncError
from rollout.group.engine_group import EngineGroup
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import GenerateRequest, Sample
from rollout.weights.packed_weights import tensor_digest, unpack
from rollout.weights.shared_weights import copy_of
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import MicroBatch
from trainer.cluster import placement
from trainer.cluster.bundles import PlacementError
from trainer.cluster.placement import Cluster
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.ray_session import ray_session
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.config.training import ClusterConfig, OptimConfig, Residency
from trainer.limits.machine import CPUS_PER_WORKER
from trainer.rundir.sealed_directory import FileRecord, SealError


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with ray_session(None):
        yield


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def weights_of(policy: PolicyGroup) -> torch.Tensor:
    shared = policy.publish_weights(policy_version=1).shared
    return torch.cat([tensor.flatten().clone() for _, tensor in unpack(copy_of(shared))])


def update(config: TrainConfig, model_path: Path, *, max_tokens: int, reverse: bool = False) -> torch.Tensor:
    """Change of all weights [P] after one rollout step; with `reverse` each mini-batch has its samples reversed."""
    samples, size = make_samples(), 16 // config.batch.mini_batches
    minis = [samples[first : first + size][:: -1 if reverse else 1] for first in range(0, 16, size)]
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        policy.wait_ready()
        before = weights_of(policy)
        policy.train(pack_samples(minis, num_ranks=len(policy), max_tokens=max_tokens, policy_version=0), step=1)
        return weights_of(policy) - before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "mini_batch_prompts", "passes"),
    [(Aggregation.token_mean, None, 1), (Aggregation.seq_mean_token_mean, 1, 2)],
)
def test_the_update_does_not_depend_on_ranks_packing_or_order(
    model_path: Path, aggregation: Aggregation, mini_batch_prompts: int | None, passes: int
) -> None:
    def config(num_workers: int) -> TrainConfig:
        made = make_config(
            model_path,
            num_workers=num_workers,
            loss=by_aggregation(aggregation),
            mini_batch_prompts=mini_batch_prompts,
        )
        made.batch.passes = passes  # all ranks draw the same order of the mini-batches
        return made

    one = update(config(1), model_path, max_tokens=1000)
    two = update(config(2), model_path, max_tokens=20, reverse=True)
    # Adam's first step is lr * g / (|g| + eps): entries with a gradient near zero may flip, so compare in norm.
    assert one.abs().max() > 1e-3
    assert (one - two).norm() <= 2e-3 * one.norm()


@pytest.mark.scenario(7)
@pytest.mark.slow
@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks(
    model_path: Path, tmp_path: Path, saving: int, loading: int
) -> None:
    records: dict[str, FileRecord] = {}

    def ranks(count: int, *, saved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights after the first step, made or loaded, and after one more."""
        with Cluster(make_config(model_path, num_workers=count), log_dir=model_path) as cluster:
            policy = cluster.spawn_policy(model_path)
            policy.wait_ready()
            batch = pack_samples([make_samples()], num_ranks=count, max_tokens=1000, policy_version=0)
            if saved:
                policy.compare_files(tmp_path, records)
                damaged = tmp_path / f"__{saving - 1}_0.distcp"
                whole = damaged.read_bytes()
                damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
                with pytest.raises(SealError, match=rf"{damaged.name} has changed since it was written"):
                    policy.compare_files(tmp_path, records)
                damaged.write_bytes(whole)
                # Other ranks than those that saved cannot have their random numbers.
                assert policy.load_checkpoint(tmp_path, step=1) is (count == saving)
            else:
                policy.train(batch, step=1)
                policy.save_checkpoint(tmp_path, asynchronous=True)
                reports = policy.saved_checkpoint(wait=True)
                assert reports is not None and all(report.error is None for report in reports)
                records.update({name: record for report in reports for name, record in report.files.items()})
                assert records.keys() == {path.name for path in tmp_path.iterdir() if path != model_path}
            first = weights_of(policy)
            policy.train(batch, step=2)
            return first, weights_of(policy)

    before, expected = ranks(saving, saved=False)
    restored, found = ranks(loading, saved=True)
    assert torch.equal(restored, before)
    # The moments of Adam come back too: without them the second step would be a first one.
    assert (found - expected).norm() <= 1e-3 * (expected - before).norm()


def processes_below() -> list[psutil.Process]:
    """All processes that this one started, and those that they started."""
    return psutil.Process().children(recursive=True)


def listeners(processes: list[psutil.Process]) -> dict[str, list[str]]:
    """Local address on which one of `processes` accepts TCP connections -> its command."""
    found = {}
    for process in processes:
        try:
            command, connections = process.cmdline(), process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:  # a Ray helper that ended between the two calls
            continue
        found |= {c.laddr.ip.removeprefix("::ffff:"): command for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def check_bits_of_the_files(policy: PolicyGroup, path: Path) -> None:
    """The weights that the ranks send are those of the files, bit by bit."""
    shared = policy.publish_weights(policy_version=0).shared
    packed = copy_of(shared)
    sent = {spec.name: tensor.clone() for spec, tensor in unpack(packed)}
    stored = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name].float()) for name in stored)


@pytest.mark.slow
def test_engines_hold_the_policy_bitwise_a_flipped_byte_is_named_and_all_listen_on_loopback_only(
    tmp_path: Path,
) -> None:
    path = save_untied(tmp_path)
    earlier = processes_below()  # of other tests
    with Cluster(make_config(path, num_engines=2), log_dir=path) as cluster:
        policy = cluster.spawn_policy(path)
        engines = cluster.spawn_engines(path)
        policy.wait_ready()
        engines.wait_ready()
        found = listeners([process for process in processes_below() if process not in earlier])
        assert found.keys() == {"127.0.0.1"}, found
        check_bits_of_the_files(policy, path)
        samples = make_samples()
        for sample in samples:
            sample.token_ids = sample.token_ids % 50
        policy.train(pack_samples([samples], num_ranks=2, max_tokens=100, policy_version=0), step=1)
        report = sync_weights(policy, engines, policy_version=1)
        assert (report.num_engines, report.num_mapped) == (2, 2)
        assert "to 2 engine(s) through shared memory (2) in" in str(report)
        assert held_versions(engines) == [1, 1]
        shared = policy.publish_weights(policy_version=2).shared
        spec = shared.tensors[3]
        flip_byte(shared, spec)
        with pytest.raises(WeightSyncError, match=spec.name.replace(".", r"\.")):
            engines.load_weights(published(shared, policy.node))
        assert held_versions(engines) == [1, 1]
        shared = policy.publish_weights(policy_version=3).shared
        shared.tensors[3].name = "missing_tensor"
        with pytest.raises(WeightSyncError, match=r"missing_tensor"):
            engines.load_weights(published(shared, policy.node))
        shared.policy_version = 2
        with pytest.raises(WeightSyncError, match=r"hold policy version 3, policy version 2 was announced"):
            engines.load_weights(published(shared, policy.node))
        assert sync_weights(policy, engines, policy_version=4).policy_version == 4
    assert not list(path.glob(".rendezvous-*"))


@pytest.mark.slow
def test_quantised_engines_hold_the_weights_of_their_grid_and_no_others(model_path: Path) -> None:
    config = make_config(model_path)
    config.rollout = TorchEngineConfig(
        dtype=DType.float32,
        num_engines=2,
        quantization=Quantization.int4,
    )
    config.sampling = SamplingConfig(max_new_tokens=12)
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        engines = cluster.spawn_engines(model_path)
        policy.wait_ready()
        engines.wait_ready()
        report = sync_weights(policy, engines, policy_version=1)
        assert (report.num_engines, report.num_mapped) == (2, 2)
        assert "digests equal; the engines hold int4: 14 tensors with relative errors of " in str(report)
        assert 0.05 < (report.metrics()["sync/quantization_error_max"] or 0.0) < 0.2
        samples = rollouts(engines, config.sampling)
        micro = micro_batch(samples)
        [logprobs] = policy.logprobs([micro])
        assert worst(micro, logprobs) > TOLERANCE
        # A digest of the plain weights, which the run starts with, is not accepted for the quantised ones.
        shared = policy.publish_weights(policy_version=2).shared
        name = "model.layers.0.mlp.up_proj.weight"
        [spec] = [spec for spec in shared.tensors if spec.name == name]
        plain = tensor_digest(load_file(model_path / "model.safetensors")[name])
        assert spec.digest != plain
        spec.digest = plain
        with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.up_proj\.weight"):
            engines.load_weights(published(shared, policy.node))


ENGINES = [TorchEngineConfig(dtype=DType.float32), SGLangConfig(dtype=DType.float32)]
TOLERANCE = 1e-4
"""Nats per token by which engine and trainer may differ in float32 on the same weights."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [ENGINES[0], pytest.param(ENGINES[1], marks=pytest.mark.sglang)], ids=["torch", "sglang"]
)
def test_engine_and_trainer_agree_and_the_check_sees_every_cause_of_disagreement(
    model_path: Path, engine: EngineConfig
) -> None:
    config = make_config(model_path)
    config.rollout = engine
    config.sampling = SamplingConfig(temperature=0.7, max_new_tokens=12)
    config.optim = OptimConfig(lr=1e-2)
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        engines = cluster.spawn_engines(model_path)
        policy.wait_ready()
        engines.wait_ready()
        sync_weights(policy, engines, policy_version=0)
        samples = rollouts(engines, config.sampling)
        batch = pack_samples([samples], num_ranks=2, max_tokens=1000, policy_version=0)
        micro, hotter = micro_batch(samples), micro_batch(rollouts(engines, SamplingConfig(max_new_tokens=12)))
        [trainer, trainer_of_hotter] = policy.logprobs([micro, hotter])
        assert worst(micro, trainer) < TOLERANCE
        assert worst(hotter, trainer_of_hotter) > TOLERANCE  # the engine's temperature is not the trainer's
        assert worst(micro, trainer.roll(1)) > TOLERANCE  # the shift
        policy.train(batch, step=1)
        [updated] = policy.logprobs([micro])
        assert worst(micro, updated) > TOLERANCE  # other weights
        # Scoring gathered the weights; what is sent afterwards must still be the sharded masters.
        assert sync_weights(policy, engines, policy_version=1).policy_version == 1
        # What SGLang must report is made by rank 0, for all engines at once.
        layouts = engines.layouts()
        assert len(layouts) == (engine.kind == "sglang")
        shared = policy.publish_weights(policy_version=2, layouts=layouts).shared
        assert set(shared.engine_digests) == set(layouts)
        assert all(len(digests[0]) == len(layout.parameters) for layout, digests in shared.engine_digests.items())


def rollouts(engines: EngineGroup, sampling: SamplingConfig) -> list[Sample]:
    """Two responses to each of three prompts, ready to be packed."""
    requests = [
        GenerateRequest(
            prompt_id=index // 2,
            sample_index=index % 2,
            prompt_token_ids=[3 + index // 2, 9, 11],
            sampling=sampling_params(sampling, seed=index, stop_token_ids=()),
        )
        for index in range(6)
    ]
    samples = [make_rollout(r, g) for r, g in zip(requests, engines.generate(requests), strict=True)]
    for sample in samples:
        sample.reward = 1.0
    return samples


def worst(micro: MicroBatch, logprobs: torch.Tensor) -> float:
    """Largest difference from the engine's log-probs over the response tokens, nats."""
    return (logprobs - micro.rollout_logprobs)[micro.response_mask].abs().max().item()


@pytest.mark.slow
def test_policy_and_engines_that_take_turns_train_to_the_same_bits(model_path: Path) -> None:
    def result(residency: Residency) -> tuple[list[list[int]], torch.Tensor, dict[str, float | None]]:
        config = make_config(model_path)
        config.cluster = ClusterConfig(residency=residency)
        with Cluster(config, log_dir=model_path) as cluster:
            policy = cluster.spawn_policy(model_path)
            engines = cluster.spawn_engines(model_path)
            policy.wait_ready()
            engines.wait_ready()
            sync_weights(policy, engines, policy_version=0)
            for step in (1, 2):
                with engines.resident():
                    samples = rollouts(engines, SamplingConfig(max_new_tokens=8))
                if residency is Residency.always:
                    with pytest.raises(RuntimeError, match="the policy sleeps"):
                        policy.train(pack_samples([samples], num_ranks=2, max_tokens=100, policy_version=0), step=step)
                with policy.resident():
                    policy.train(pack_samples([samples], num_ranks=2, max_tokens=100, policy_version=0), step=step)
                sync_weights(policy, engines, policy_version=step)
            with policy.resident():
                weights = weights_of(policy)
            return [sample.token_ids.tolist() for sample in samples], weights, cluster.metrics()

    tokens, weights, moving = result(Residency.always)
    expected_tokens, expected_weights, none = result(Residency.auto)
    assert tokens == expected_tokens
    assert torch.equal(weights, expected_weights)
    assert (moving["perf/gpu_swap_s"] or 0) > 0 and "perf/gpu_swap_s" not in none
    assert none["rollout/engine_restarts"] == none["rollout/redispatched"] == 0


@pytest.mark.slow
@pytest.mark.scenario(33)
def test_placement_that_cannot_be_met_says_what_is_required(model_path: Path) -> None:
    config = make_config(model_path)
    config.rollout.num_engines = 10_000
    with (
        pytest.raises(PlacementError, match=r"requires CPU 2500\.5; the cluster has CPU"),
        Cluster(config, log_dir=model_path),
    ):
        pass


@pytest.mark.slow
@pytest.mark.scenario(33)
def test_placement_held_by_another_run_ends_at_the_deadline(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(model_path)
    cores = ray.cluster_resources()["CPU"]
    config.rollout.num_engines = int(cores / CPUS_PER_WORKER) - config.policy.num_workers
    second = make_config(model_path)
    monkeypatch.setattr(placement, "PLACEMENT_TIMEOUT_S", 3.0)
    with (
        Cluster(config, log_dir=model_path),
        pytest.raises(PlacementError, match=r"no placement within 3 s: the run requires CPU 0\.75; free are CPU 0"),
        Cluster(second, log_dir=model_path),
    ):
        pass


@pytest.mark.slow
def test_a_dead_rank_ends_the_step_with_its_name(model_path: Path) -> None:
    config = make_config(model_path)
    # As in a joined cluster, the ranks meet at a port: one that rank 0 has opened when the others hear of it.
    config.cluster = ClusterConfig(address="auto")
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        infos = policy.wait_ready()
        subprocess.run(["kill", "-9", str(infos[1].process.pid)], check=True)
        with pytest.raises(RuntimeError, match=r"phase train: policy [01]"):
            policy.train(pack_samples([make_samples()], num_ranks=2, max_tokens=100, policy_version=0), step=1)
