"""The memory plan: sizes by hand, the verdict on a shared GPU, rules of the keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path

import psutil
import pytest
import torch
from compose_cases import config_of
from described_models import write_config
from policy_cases import lone_worker, make_config, save_policy

from algorithms.config import ConfigError
from rollout.config import DType, Routing
from rollout.engine import EngineNeeds
from rollout.sglang.config import ENGINE_BYTES, GRAPH_BYTES, SGLangConfig
from rollout.sglang.installation import server_args, server_environment, shared_gpu_args
from rollout.task_config import ArithmeticDataConfig
from rollout.torch.config import TorchEngineConfig
from rollout.vllm.config import VLLMConfig
from trainer.batch.packing import micro_batch
from trainer.config.conflicts import sharing_problems
from trainer.config.outputs import CheckpointConfig
from trainer.config.train import TrainConfig
from trainer.config.training import (
    ArithmeticModelConfig,
    ClusterConfig,
    HFModelConfig,
    Offload,
    PolicyConfig,
    Residency,
)
from trainer.limits import machine
from trainer.limits.estimate import activation_bytes, largest_micro_batch, model_shape, rank_memory
from trainer.limits.machine import usable_memory
from trainer.limits.memory_plan import (
    CONTEXT_BYTES,
    GPU_PROCESS_BYTES,
    PROCESS_BYTES,
    USABLE,
    may_take_turns,
    memory_plan,
)
from trainer.policy.dry_run import group_samples
from trainer.text.plain import size


def shared(*, residency: Residency = Residency.auto, **policy: object) -> TrainConfig:
    """A rank and an engine on each of two GPUs."""
    return TrainConfig(
        model=ArithmeticModelConfig(hidden_size=128),
        data=ArithmeticDataConfig(),
        rollout=SGLangConfig(num_engines=2, gpus_per_engine=0.4),
        policy=replace(PolicyConfig(num_workers=2, gpus_per_worker=0.6), **policy),
        cluster=ClusterConfig(residency=residency),
    )


def test_what_fits_together_does_not_sleep_and_the_plan_says_so() -> None:
    rank = rank_memory(shared(), model_shape(shared())).on_device
    enough = int((rank + CONTEXT_BYTES + ENGINE_BYTES) / (USABLE - 0.4)) + 100
    plan = memory_plan(shared(), device_bytes=enough)
    assert (plan.fits_together, plan.takes_turns) == (True, False)
    assert plan.verdict.startswith("both fit, nothing sleeps: rank and engine need ")
    small = memory_plan(shared(), device_bytes=int(rank / (USABLE - 0.4)) - 100)
    assert (small.fits_together, small.takes_turns) == (False, True)
    assert small.verdict.startswith("one side sleeps while the other works: rank and engine need ")
    assert list(small.lines())[-1] == small.verdict
    assert memory_plan(shared(), device_bytes=enough - 200).takes_turns
    larger = shared()
    assert isinstance(larger.rollout, SGLangConfig)
    larger.rollout.engine_args = {"mem_fraction_static": 0.8}
    assert memory_plan(larger, device_bytes=enough).takes_turns


def test_a_rank_that_does_not_fit_beside_a_sleeping_engine_is_told() -> None:
    rank = rank_memory(shared(), model_shape(shared())).on_device
    least = int((rank + 2 * CONTEXT_BYTES) / USABLE)
    for device_bytes, told in ((least - 100, True), (least + 100, False)):
        verdict = memory_plan(shared(residency=Residency.always), device_bytes=device_bytes).verdict
        assert ("the rank alone" in verdict and "WHICH MAY NOT FIT: lower batch.max_tokens" in verdict) is told


def test_an_unknown_size_sleeps_to_be_safe() -> None:
    plan = memory_plan(shared(), device_bytes=None)
    assert plan.takes_turns and "the memory of the GPU is not known here" in plan.verdict
    unknown = replace(shared(), model=HFModelConfig(path="some/model"))
    assert memory_plan(unknown, device_bytes=2**40).takes_turns


def test_the_key_decides_where_it_is_set() -> None:
    always = memory_plan(shared(residency=Residency.always), device_bytes=2**40)
    never = memory_plan(shared(residency=Residency.never), device_bytes=2**10)
    assert (always.takes_turns, never.takes_turns) == (True, False)
    assert never.verdict.startswith("nothing sleeps: cluster.residency=never; rank and engine together ")
    apart = replace(shared(), policy=PolicyConfig(gpus_per_worker=1.0), rollout=SGLangConfig(gpus_per_engine=1.0))
    assert not may_take_turns(apart)
    rank = rank_memory(apart, model_shape(apart)).on_device
    for device_bytes in (2**10, int((rank + CONTEXT_BYTES) / USABLE) - 100):
        [_, told] = memory_plan(apart, device_bytes=device_bytes).verdicts
        assert "the rank alone" in told and "WHICH MAY NOT FIT" in told and "activation_checkpoint_every=1" in told
        saving = replace(apart, policy=replace(apart.policy, activation_checkpoint_every=1))
        [*_, told] = memory_plan(saving, device_bytes=device_bytes // 2).verdicts
        assert "WHICH MAY NOT FIT" in told and "policy.offload=parameters" in told and "checkpoint" not in told
    fits = memory_plan(apart, device_bytes=int((rank + CONTEXT_BYTES) / USABLE) + 100)
    assert fits.verdict == "nothing sleeps: no GPU is shared" and len(fits.verdicts) == 1


def test_rules_of_sharing() -> None:
    assert not list(sharing_problems(shared()))
    with pytest.raises(ConfigError, match=r"policy\.gpus_per_worker.*add up to 1"):
        replace(shared(), rollout=SGLangConfig(num_engines=2, gpus_per_engine=0.5))
    with pytest.raises(ConfigError, match=r"cluster\.residency.*no rank shares a GPU"):
        replace(shared(residency=Residency.always), policy=PolicyConfig(gpus_per_worker=1.0))


def test_a_part_of_a_gpu_is_for_a_rank_and_an_engine_that_share_one() -> None:
    def refused(rank: float, engine: float) -> list[str]:
        config = shared()
        config.policy.gpus_per_worker, config.rollout.gpus_per_engine = rank, engine
        return [str(problem) for problem in sharing_problems(config)]

    for whole in (0, 1):
        [lone_engine] = refused(whole, 0.5)
        assert lone_engine.startswith(
            f"rollout.gpus_per_engine must be 1, whole GPUs, with policy.gpus_per_worker={whole}"
        )
        assert "two engines could get the same GPU" in lone_engine and "Set rollout.gpus_per_engine=1," in lone_engine
        [lone_rank] = refused(0.5, whole)
        assert lone_rank.startswith(
            f"policy.gpus_per_worker must be a whole number with rollout.gpus_per_engine={whole}"
        )
        assert "two ranks could get the same GPU" in lone_rank
    assert refused(0, 0) == refused(1, 1) == refused(0, 2) == refused(0.5, 0.5) == []


def spanning(
    *, ranks: int = 8, engines: int = 2, rank: float = 0.5, engine: float = 2.0, tp_size: int = 4
) -> TrainConfig:
    """Ranks and engines of several GPUs; no rule is checked."""
    config = shared()
    config.policy.num_workers, config.policy.gpus_per_worker = ranks, rank
    config.rollout.num_engines, config.rollout.gpus_per_engine = engines, engine
    assert isinstance(config.rollout, SGLangConfig)
    config.rollout.engine_args = {"tp_size": tp_size}
    return config


def test_an_engine_on_several_gpus_shares_each_of_them_with_one_rank() -> None:
    def refused(**numbers: float) -> list[str]:
        config = spanning(**numbers)  # type: ignore[arg-type]
        return [str(problem) for problem in [*sharing_problems(config), *config.rollout.conflicts()]]

    assert refused() == refused(rank=0.6, engine=1.6) == refused(rank=1, engine=4, engines=3) == []
    assert spanning().shares_gpus and not spanning(rank=1, engine=4).shares_gpus
    [sum_of_parts] = refused(engine=1)
    assert "policy.gpus_per_worker must add up to 1 with rollout.gpus_per_engine (1 / 4 GPUs)" in sum_of_parts
    assert "Set rollout.gpus_per_engine=2." in sum_of_parts
    [count] = refused(engines=1)
    assert count.startswith("policy.num_workers must be the number of the engines' GPUs (1 x 4)")
    assert "Set rollout.num_engines=2, or policy.num_workers=4." in count
    [uneven] = refused(ranks=6)
    assert "Set policy.num_workers=8." in uneven
    [whole_ranks] = refused(rank=1)
    assert whole_ranks.startswith("rollout.gpus_per_engine must be 4, whole GPUs, with policy.gpus_per_worker=1")
    assert "or share with policy.gpus_per_worker=0.5 rollout.gpus_per_engine=2." in whole_ranks
    [whole_engines] = refused(engine=4)
    assert whole_engines.startswith("policy.gpus_per_worker must be a whole number with rollout.gpus_per_engine=4")
    [too_few] = refused(engine=5, rank=1)
    assert too_few.startswith("engine_args.tp_size must be rollout.gpus_per_engine (5)")


def test_the_plan_counts_the_part_of_one_gpu() -> None:
    for rank, engine in ((0.5, 2.0), (0.6, 1.6)):
        plan = memory_plan(spanning(rank=rank, engine=engine), device_bytes=2**40)
        assert plan.engine_bytes == int((1 - rank) * 2**40) + ENGINE_BYTES


def test_float32_on_a_gpu_keeps_keys_and_values_of_every_head() -> None:
    own_heads = model_shape(shared())
    shape = replace(own_heads, kv_size=own_heads.kv_size // 2)  # two heads share keys and values
    kept = {}
    for gpus in (0.0, 0.6):
        config = shared(dtype=DType.float32)
        config.policy.gpus_per_worker = gpus
        kept[gpus], _ = activation_bytes(config, shape)
    tokens = sum(group.num_tokens for group in largest_micro_batch(shared()))
    copied = sum(
        group.prompt + rest for group in largest_micro_batch(shared()) if len(group.rests) > 1 for rest in group.rests
    )
    more = (2 * shape.attention_size - shape.kv_size) * 4
    assert more > 0 and kept[0.6] - kept[0.0] == shape.num_layers * (tokens + copied) * more


def test_offload_moves_what_it_says_to_the_host() -> None:
    def memory(offload: Offload) -> tuple[int, int]:
        config = shared(offload=offload)
        rank = rank_memory(config, model_shape(config))
        states = rank.weights + rank.gradients + rank.optimizer
        assert rank.working == rank.gathered + rank.activations + rank.backward
        return rank.on_device - rank.working, rank.on_host - (states if offload is Offload.parameters else 0)

    n = model_shape(shared()).num_parameters // 2
    (none, _), (optimizer, host), (parameters, rest) = (memory(offload) for offload in Offload)
    assert none == pytest.approx(16 * n, abs=20)
    assert (optimizer, host) == (pytest.approx(8 * n, abs=20), pytest.approx(8 * n, abs=20))
    assert (parameters, rest) == (0, 0)


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes of storages that autograd keeps, each once, without those of parameters."""
    sizes: list[int] = []
    seen: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_weight = any(isinstance(t, torch.nn.Parameter) for t in (tensor, tensor._base))
        if storage.data_ptr() not in seen and not is_weight:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
        kept.append(tensor)  # or its memory would serve another tensor
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_the_estimate_of_activations_is_near_what_autograd_keeps(tmp_path: Path, dtype: DType, every: int) -> None:
    path = save_policy(tmp_path)
    config = make_config(path, num_workers=1)
    config = replace(config, policy=replace(config.policy, dtype=dtype, activation_checkpoint_every=every))
    config.sampling.max_new_tokens = 100
    with lone_worker(config, path) as worker:
        micro = micro_batch(group_samples(largest_micro_batch(config)))
        with saved_bytes() as sizes:
            worker._training.score(micro)
    measured = sum(sizes)
    planned, _ = activation_bytes(config, model_shape(config))
    low, high = (0.6, 1.5) if every else (0.95, 1.05)  # with checkpointing little is left to compare
    assert low < planned / measured < high, (planned, measured)


def test_a_server_on_a_shared_gpu_is_started_to_give_memory_back(tmp_path: Path) -> None:
    def arguments(*, device: str = "cuda", sleeps: bool = True, part: float = 0.4, **args: object) -> dict[str, object]:
        config = SGLangConfig(gpus_per_engine=part, engine_args=dict(args))
        found = server_args(config, tmp_path, device=device, random_seed=0, needs=EngineNeeds(sleeps=sleeps))
        return {name: found[name] for name in names if name in found}

    names = ("enable_memory_saver", "mem_fraction_static", "cuda_graph_backend_prefill", "max_total_tokens")
    alone = {"mem_fraction_static": 0.8, "enable_memory_saver": True, "cuda_graph_backend_prefill": "disabled"}
    assert arguments() == alone
    assert arguments(sleeps=False) == {"mem_fraction_static": 0.4}
    assert shared_gpu_args(SGLangConfig(gpus_per_engine=0.4), EngineNeeds(sleeps=True, cache_tokens=7)) == alone
    again = {"mem_fraction_static": 0.95, "max_total_tokens": 7}
    assert shared_gpu_args(SGLangConfig(gpus_per_engine=0.4), EngineNeeds(cache_tokens=7)) == again
    assert arguments(mem_fraction_static=0.7)["mem_fraction_static"] == 0.7
    assert arguments(part=1.0, sleeps=False) == {}
    assert arguments(part=1.0, sleeps=True) == alone
    assert arguments(part=2.0, sleeps=False, tp_size=4) == {"mem_fraction_static": 0.5}
    assert arguments(part=2.0, sleeps=True, tp_size=4) == alone
    assert arguments(part=2.0, sleeps=False, tp_size=2) == {}
    assert arguments(device="cpu", part=0.0) == {"max_total_tokens": 65536}
    variable = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    for device, sleeps in (("cuda", True), ("cuda", False), ("cpu", True)):
        environment = server_environment(
            SGLangConfig(), device=device, num_threads=None, needs=EngineNeeds(sleeps=sleeps)
        )
        assert (environment.get(variable) == "true") == (device == "cuda" and sleeps)
    for part, value in ((1.0, "false"), (2.0, None)):
        config = SGLangConfig(gpus_per_engine=part, engine_args={"tp_size": 2})
        environment = server_environment(config, device="cuda", num_threads=None, needs=EngineNeeds())
        assert environment.get("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK") == value


@pytest.mark.sglang
def test_sglang_knows_the_arguments_of_a_shared_gpu() -> None:
    from sglang.srt.server_args import ServerArgs

    for sleeps, tokens in ((True, None), (False, 7)):
        arguments = shared_gpu_args(SGLangConfig(gpus_per_engine=0.4), EngineNeeds(sleeps=sleeps, cache_tokens=tokens))
        assert arguments.keys() <= signature(ServerArgs).parameters.keys()


def test_a_rank_that_sleeps_needs_memory_of_the_host() -> None:
    def per_rank(residency: Residency, **policy: object) -> int:
        plan = memory_plan(shared(residency=residency, **policy), device_bytes=2**40)
        assert plan.ranks_host_bytes is not None
        return plan.ranks_host_bytes // 2 - GPU_PROCESS_BYTES

    n = model_shape(shared()).num_parameters // 2
    assert per_rank(Residency.never) == 0
    assert per_rank(Residency.always) == pytest.approx(12 * n, abs=20)  # weights and two moments
    assert per_rank(Residency.always, offload=Offload.optimizer) == pytest.approx(12 * n, abs=20)
    assert per_rank(Residency.always, offload=Offload.parameters) == pytest.approx(16 * n, abs=20)


def test_the_host_holds_published_weights_processes_graphs_and_a_save_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def host_bytes(config: TrainConfig, **more: object) -> int:
        found = memory_plan(replace(config, **more), device_bytes=2**40).host_bytes
        assert found is not None
        return found

    n = model_shape(shared()).num_parameters
    awake = host_bytes(shared(residency=Residency.never))
    assert awake == 2 * GPU_PROCESS_BYTES + 2 * (GPU_PROCESS_BYTES + PROCESS_BYTES) + 2 * n
    turns = shared(residency=Residency.always)
    assert host_bytes(turns) - awake == pytest.approx(2 * GRAPH_BYTES + 12 * n, abs=50)
    for every, copies in ((0, 0), (5, 12)):
        saving = CheckpointConfig(every=every, asynchronous=True)
        assert host_bytes(turns, checkpoint=saving) - host_bytes(turns) == pytest.approx(copies * n, abs=50)
    spread = spanning()
    assert host_bytes(spread) - 8 * GPU_PROCESS_BYTES - 2 * n == 2 * (4 * GPU_PROCESS_BYTES + PROCESS_BYTES)
    monkeypatch.setattr("trainer.limits.memory_plan.usable_memory", lambda: awake)
    told = memory_plan(turns, device_bytes=2**40).host_verdict
    assert ": MAY NOT FIT; lower " in told and "cluster.residency=never" in told and "max_tokens" not in told
    joined = replace(turns, cluster=ClusterConfig(address="auto"))
    assert f", and {size(2 * n)} more on each but the first" in memory_plan(joined, device_bytes=2**40).host_verdict


MIXTURE = "Qwen/Qwen3-30B-A3B-Base"
MIXTURE_PARAMETERS = 30_532_122_624


def of_mixture(directory: Path, *, tp_size: int = 4, routing: Routing = Routing.replay) -> TrainConfig:
    """Qwen3-30B-A3B on 8 GPUs: a rank on each, and engines over `tp_size` of them."""
    config = spanning(engines=8 // tp_size, engine=tp_size / 2, tp_size=tp_size)
    config.model = HFModelConfig(path=str(write_config(MIXTURE, directory)))
    config.policy.routing = routing
    return config


def test_routes_are_counted_for_the_whole_cache_in_every_process_of_an_engine(tmp_path: Path) -> None:
    device = 80 * 2**30
    plan = memory_plan(of_mixture(tmp_path), device_bytes=device)
    assert plan.takes_turns and plan.engine is not None and plan.engine.weights == 2 * MIXTURE_PARAMETERS
    # 4 heads of keys and values, one on each GPU: 48 layers x 2 x 128 numbers of 2 bytes.
    tokens = (int(0.8 * device) - 2 * MIXTURE_PARAMETERS // 4) // (48 * 2 * 128 * 2)
    assert plan.cache_tokens == tokens
    # 48 layers x 8 experts x 4 bytes, in each of 4 processes.
    assert plan.engine.route_bytes == 4 * 1536 and plan.routes_bytes == tokens * 4 * 1536
    live = memory_plan(of_mixture(tmp_path, routing=Routing.live), device_bytes=device)
    assert plan.host_bytes is not None and live.host_bytes is not None
    assert plan.host_bytes - live.host_bytes == 2 * plan.routes_bytes
    told = [line for line in plan.lines() if "routes" in line]
    assert len(told) == 1 and "6,144 bytes" in told[0] and size(plan.routes_bytes) in told[0]
    assert not [line for line in live.lines() if "routes" in line]
    assert memory_plan(of_mixture(tmp_path, routing=Routing.weights), device_bytes=device).routes_bytes == (
        2 * plan.routes_bytes
    )
    # Of GPUs that are not known: the samples of a step at the cap. More GPUs than heads: every GPU has one head.
    unknown = memory_plan(of_mixture(tmp_path), device_bytes=None)
    assert unknown.engine is not None and unknown.routes_bytes == unknown.engine.tokens * 4 * 1536
    wide = memory_plan(of_mixture(tmp_path, tp_size=8), device_bytes=device).engine
    assert wide is not None and wide.token_bytes == plan.engine.token_bytes
    config = of_mixture(tmp_path)
    config.rollout = TorchEngineConfig(num_engines=8, gpus_per_engine=4.0)
    assert memory_plan(config, device_bytes=device).routes_bytes == 0


def test_an_engine_with_gpus_of_its_own_leaves_some_of_their_memory_free(tmp_path: Path) -> None:
    config = of_mixture(tmp_path)
    config.policy.gpus_per_worker, config.rollout.gpus_per_engine = 1, 4
    for gib, left in ((80, 10.0), (24, 7.2)):
        plan = memory_plan(config, device_bytes=gib * 2**30)
        room = (gib - left) * 2**30 - MIXTURE_PARAMETERS // 2
        assert plan.cache_tokens == pytest.approx(room / 24576, abs=2)
    assert memory_plan(config, device_bytes=16 * 2**30).cache_tokens == 0


KEEPS_ROUTES = """
from rollout.sglang.cpu.torchvision import make_torchvision_importable
make_torchvision_importable()
import torch
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.state_capturer.base import BaseTopkCapturer
common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, *, dtype, **_: torch.empty(dims, dtype=dtype)
kept = BaseTopkCapturer(num_tokens=1000, max_batch_size=10, num_layers=48, topk_size=8, device="cpu", name="routes")
print(kept.host_cache.get_buffer_size_bytes())
"""


@pytest.mark.sglang
def test_sglang_keeps_routes_in_as_many_bytes(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-W", "ignore", "-c", KEEPS_ROUTES], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    engine = memory_plan(of_mixture(tmp_path), device_bytes=None).engine
    assert engine is not None and 4 * int(child.stdout.split()[-1]) == 1000 * engine.route_bytes


def test_a_cache_with_a_size_of_its_own_counts_whole_and_as_no_more() -> None:
    """vLLM takes it at its start, whatever the samples need."""
    rollout = VLLMConfig(num_engines=2, gpus_per_engine=0.4, cache_tokens=640)
    plan = memory_plan(replace(shared(), rollout=rollout), device_bytes=80 * 2**30)
    assert plan.engine is not None and plan.engine.tokens == plan.cache_tokens == 640
    assert plan.engine_bytes == plan.engine.weights + plan.engine.kv_cache + rollout.work_bytes
    assert "of 640 tokens" in "\n".join(plan.lines())
    on_cpu = memory_plan(config_of("rollout=vllm"), device_bytes=None).engine
    assert on_cpu is not None and on_cpu.tokens == 65536


def test_vllm_takes_a_share_of_its_gpu_unless_its_cache_has_a_size() -> None:
    plan = memory_plan(
        replace(shared(), rollout=VLLMConfig(num_engines=2, gpus_per_engine=0.4)), device_bytes=80 * 2**30
    )
    assert plan.engine is not None and plan.engine_bytes == int(0.4 * 80 * 2**30) + 2**30
    room = int(0.4 * 80 * 2**30) - 4 * 2**30 - plan.engine.weights
    assert plan.cache_tokens == room // plan.engine.token_bytes


def test_a_torch_engine_needs_weights_and_cache() -> None:
    config = replace(shared(), rollout=TorchEngineConfig(num_engines=2, gpus_per_engine=0.4))
    plan = memory_plan(config, device_bytes=2**40)
    assert plan.engine is not None and plan.engine_bytes == plan.engine.weights + plan.engine.kv_cache


def on_cpu(model_path: Path) -> TrainConfig:
    return make_config(save_policy(model_path), num_workers=2)


def test_the_plan_compares_the_sum_with_the_memory_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = memory_plan(on_cpu(tmp_path), device_bytes=None)
    assert plan.rank is not None and plan.engine is not None
    alone = 2 * plan.rank.on_device + 2 * plan.engine.weights + plan.engine.kv_cache  # the engine's, and published ones
    assert plan.host_bytes == alone + 3 * PROCESS_BYTES
    assert plan.host_verdict in list(plan.lines())
    monkeypatch.setattr("trainer.limits.memory_plan.usable_memory", lambda: plan.host_bytes)
    assert plan.host_verdict.endswith(": it fits")
    monkeypatch.setattr("trainer.limits.memory_plan.usable_memory", lambda: alone)
    assert ": MAY NOT FIT; lower batch.max_tokens_per_microbatch, " in plan.host_verdict


@pytest.mark.parametrize(
    ("line", "file"), [("4:memory:/a/b", "memory/a/memory.limit_in_bytes"), ("0::/a/b", "a/b/memory.max")]
)
def test_the_memory_of_a_container_is_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str
) -> None:
    (tmp_path / "own").write_text(f"7:cpu:/other\n{line}\n")
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    assert usable_memory() == psutil.virtual_memory().total
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("max\n")
    assert usable_memory() == psutil.virtual_memory().total
    (tmp_path / file).write_text(f"{2**20}\n")
    assert usable_memory() == 2**20
