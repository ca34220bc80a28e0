"""Real FSDP2 ranks and real engines under Ray: gradients do not depend on the layout, weights arrive bitwise.

Everything here runs on one Ray cluster; models are tiny and random.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
import torch
from test_packing import make_sample

from algorithms.config import (
    Aggregation,
    BypassConfig,
    CorrectionConfig,
    LossConfig,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectedDenominator,
    TISConfig,
    VanillaISConfig,
)
from rollout.collect import make_sample as make_rollout
from rollout.collect import sampling_params
from rollout.config import ArithmeticDataConfig, DType, EngineConfig, SamplingConfig, SGLangConfig, TorchEngineConfig
from rollout.engine import WeightSyncError
from rollout.engine_group import EngineGroup
from rollout.hf import Qwen2Config, Qwen2ForCausalLM
from rollout.types import GenerateRequest, Sample
from rollout.weights import unpack
from trainer.batch import MicroBatch
from trainer.cluster import Cluster, PlacementError, start_ray
from trainer.config import (
    BatchConfig,
    ClusterConfig,
    HFModelConfig,
    OptimConfig,
    PolicyConfig,
    TrainConfig,
)
from trainer.packing import micro_batch, pack
from trainer.policy_group import PolicyGroup
from trainer.weight_sync import sync_weights
from trainer.worker import PolicySetup, PolicyWorker


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def make_config(
    model_path: Path,
    *,
    num_workers: int = 2,
    num_engines: int = 1,
    correction: CorrectionConfig | None = None,
    mini_batch_prompts: int | None = None,
    aggregation: Aggregation = Aggregation.token_mean,
) -> TrainConfig:
    return TrainConfig(
        model=HFModelConfig(path=str(model_path)),
        data=ArithmeticDataConfig(),
        rollout=TorchEngineConfig(dtype=DType.float32, num_engines=num_engines, cpus_per_engine=0.25),
        batch=BatchConfig(prompts_per_step=4, group_size=4, mini_batch_prompts=mini_batch_prompts),
        correction=correction or TISConfig(),
        loss=LossConfig(aggregation=aggregation),
        optim=OptimConfig(lr=1e-2),
        policy=PolicyConfig(num_workers=num_workers, cpus_per_worker=0.25),
    )


def make_samples() -> list[Sample]:
    return [make_sample(prompt_id=p, index=i, response=2 + (3 * p + i) % 5) for p in range(4) for i in range(4)]


def weights_of(policy: PolicyGroup) -> torch.Tensor:
    buckets = ray.get(policy.weight_buckets(policy_version=1))
    return torch.cat([tensor.flatten().clone() for bucket in buckets for _, tensor in unpack(bucket)])


def update(config: TrainConfig, model_path: Path, *, max_tokens: int, reverse: bool = False) -> torch.Tensor:
    """Change of all weights [P] after one rollout step of one optimizer step."""
    samples = make_samples()[:: -1 if reverse else 1]
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        policy.wait_ready()
        before = weights_of(policy)
        policy.train(pack([samples], num_ranks=len(policy), max_tokens=max_tokens), step=1)
        return weights_of(policy) - before


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", [Aggregation.token_mean, Aggregation.seq_mean_token_mean])
def test_the_update_does_not_depend_on_ranks_packing_or_order(model_path: Path, aggregation: Aggregation) -> None:
    one = update(make_config(model_path, num_workers=1, aggregation=aggregation), model_path, max_tokens=1000)
    two = update(
        make_config(model_path, num_workers=2, aggregation=aggregation), model_path, max_tokens=20, reverse=True
    )
    # Adam's first step is lr * g / (|g| + eps): entries with a gradient near zero may flip, so compare in norm.
    assert one.abs().max() > 1e-3
    assert (one - two).norm() <= 2e-3 * one.norm()


MODES: list[CorrectionConfig] = [
    RecomputeConfig(),
    PPOISConfig(),
    VanillaISConfig(),
    TISConfig(),
    MISConfig(),
    MISConfig(rejected_denominator=RejectedDenominator.drop),
    BypassConfig(),
]


@contextmanager
def lone_worker(config: TrainConfig, model_path: Path) -> Iterator[PolicyWorker]:
    """One FSDP2 rank in this process: the same worker without an actor around it."""
    worker = PolicyWorker(
        PolicySetup(
            config=config,
            model_path=model_path,
            rank=0,
            init_method=f"file://{model_path / secrets.token_hex(8)}",
            device="cpu",
            num_threads=2,
        )
    )
    worker.setup()
    yield worker
    worker.stop()


def count_forwards(worker: PolicyWorker) -> list[int]:
    """Tokens of every forward of the policy from now on, as a list that grows."""
    tokens: list[int] = []
    worker._model.register_forward_pre_hook(lambda module, args: tokens.append(args[0].num_tokens))
    return tokens


@pytest.mark.parametrize("mini_batch_prompts", [None, 2])
def test_every_mode_measures_the_same_mismatch_and_pays_the_planned_forwards(
    model_path: Path, mini_batch_prompts: int | None
) -> None:
    measured = {}
    samples = make_samples()
    minis = [samples] if mini_batch_prompts is None else [samples[:8], samples[8:]]
    for mode in MODES:
        config = make_config(model_path, num_workers=1, correction=mode, mini_batch_prompts=mini_batch_prompts)
        batch = pack(minis, num_ranks=1, max_tokens=30)
        with lone_worker(config, model_path) as worker:
            tokens = count_forwards(worker)
            report = worker.train(batch.ranks[0], 1)
        # A forward counts 1 and a backward 2, so the training forward is one of three.
        assert sum(tokens) == batch.stats.num_tokens * (config.forwards_per_token - 2)
        k3, floor = report.metrics["mismatch/k3"], report.metrics["mismatch/k3_floor"]
        assert k3 is not None and k3 > 0 and floor is not None and floor > 0
        if not isinstance(mode, MISConfig):  # MIS may reject a whole mini-batch of these off-policy samples
            assert report.num_optimizer_steps == config.batch.optimizer_steps_per_rollout
        if not (isinstance(mode, BypassConfig) and len(minis) > 1):  # it sees only the first mini-batch untouched
            measured[repr(mode)] = k3
    assert max(measured.values()) == pytest.approx(min(measured.values()), rel=1e-6)


@pytest.mark.slow
def test_engines_hold_the_policy_bitwise_and_a_flipped_byte_is_named(model_path: Path) -> None:
    config = make_config(model_path, num_engines=2)
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        engines = cluster.spawn_engines(model_path)
        policy.wait_ready()
        engines.wait_ready()
        policy.train(pack([make_samples()], num_ranks=2, max_tokens=100), step=1)
        report = sync_weights(policy, engines, policy_version=1)
        assert report.num_engines == 2
        assert engines.policy_versions() == [1, 1]
        buckets = ray.get(policy.weight_buckets(policy_version=2))
        spec = buckets[0].tensors[3]
        data = np.array(buckets[0].data)
        data[spec.offset + 1] ^= 4
        tampered = [replace(buckets[0], data=data), *buckets[1:]]
        with pytest.raises(WeightSyncError, match=spec.name.replace(".", r"\.")):
            engines.load_weights(ray.put(tampered))
        with pytest.raises(WeightSyncError, match=r"missing_tensor"):
            engines.load_weights(
                ray.put(
                    [
                        replace(b, tensors=[replace(t, name=t.name + ".missing_tensor") for t in b.tensors])
                        for b in buckets
                    ]
                )
            )


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
    config.rollout = replace(engine, cpus_per_engine=0.25)
    config.sampling = SamplingConfig(temperature=0.7, max_new_tokens=12)
    config.optim = OptimConfig(lr=1e-2)
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        engines = cluster.spawn_engines(model_path)
        policy.wait_ready()
        engines.wait_ready()
        sync_weights(policy, engines, policy_version=0)
        samples = rollouts(engines, config.sampling)
        batch = pack([samples], num_ranks=2, max_tokens=1000)
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


def rollouts(engines: EngineGroup, sampling: SamplingConfig) -> list[Sample]:
    """Six responses of the engines, ready to be packed."""
    requests = [
        GenerateRequest(
            prompt_id=index,
            sample_index=0,
            prompt_token_ids=[3 + index, 9, 11],
            sampling=sampling_params(sampling, seed=index, stop_token_ids=()),
        )
        for index in range(6)
    ]
    samples = [make_rollout(r, g) for r, g in zip(requests, engines.generate(requests), strict=True)]
    for sample in samples:
        sample.advantage = 1.0
    return samples


def worst(micro: MicroBatch, logprobs: torch.Tensor) -> float:
    """Largest difference from the engine's log-probs over the response tokens, nats."""
    return (logprobs - micro.rollout_logprobs)[micro.response_mask].abs().max().item()


@pytest.mark.slow
def test_placement_that_cannot_be_met_says_what_is_required(model_path: Path) -> None:
    config = make_config(model_path)
    config.policy.cpus_per_worker = 1000.0
    with (
        pytest.raises(PlacementError, match=r"requires CPU 2000\.25; the cluster has CPU"),
        Cluster(config, log_dir=model_path),
    ):
        pass


@pytest.mark.slow
def test_placement_held_by_another_run_ends_at_the_deadline(model_path: Path) -> None:
    config = make_config(model_path)
    cores = ray.cluster_resources()["CPU"]
    config.policy.cpus_per_worker = (cores - 0.25) / 2
    second = make_config(model_path)
    second.cluster = ClusterConfig(placement_timeout_s=3.0)
    with (
        Cluster(config, log_dir=model_path),
        pytest.raises(PlacementError, match=r"no placement within 3 s: the run requires CPU 0\.75; free are CPU 0"),
        Cluster(second, log_dir=model_path),
    ):
        pass


@pytest.mark.slow
def test_a_dead_rank_ends_the_step_with_its_name(model_path: Path) -> None:
    config = make_config(model_path)
    config.cluster = ClusterConfig(address="auto")  # as in a joined cluster, the ranks meet at a port
    with Cluster(config, log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        infos = policy.wait_ready()
        subprocess.run(["kill", "-9", str(infos[1].pid)], check=True)
        with pytest.raises(RuntimeError, match=r"phase train: policy [01]"):
            policy.train(pack([make_samples()], num_ranks=2, max_tokens=100), step=1)


def listening_addresses() -> set[str]:
    """Local addresses on which this process and all below it accept TCP connections."""
    found = set()
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:  # a Ray helper that ended between the two calls
            continue
        found |= {c.laddr.ip.removeprefix("::ffff:") for c in connections if c.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.slow
def test_a_run_listens_on_loopback_only(model_path: Path) -> None:
    with Cluster(make_config(model_path), log_dir=model_path) as cluster:
        policy = cluster.spawn_policy(model_path)
        engines = cluster.spawn_engines(model_path)
        policy.wait_ready()
        engines.wait_ready()
        assert listening_addresses() == {"127.0.0.1"}
    assert not list(model_path.glob(".rendezvous-*"))
