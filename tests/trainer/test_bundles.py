"""Which machine and GPUs each rank and engine has: with made-up bundles in any order, and on 8 simulated machines."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import ray
from compose_cases import config_of
from ray.cluster_utils import Cluster as Machines

from rollout.engine import EngineSetup
from rollout.group.worker import RolloutWorker
from trainer.cluster import placement
from trainer.cluster.bundles import Place, PlacementError, required_bundles, worker_gpus, worker_places
from trainer.cluster.placement import Cluster
from trainer.config.train import TrainConfig
from trainer.limits.machine import CPUS_PER_WORKER

GPUS = 8
"""GPUs of a machine."""
LAYOUTS = {
    "one GPU shared": ("arithmetic_grpo", (1, 0.5), (1, 0.5, 1)),
    "a node of 8 shared": ("dapo_qwen2.5_7b", (8, 0.5), (8, 0.5, 1)),
    "a node of 8 divided": ("arithmetic_grpo", (4, 1), (4, 1, 1)),
    "64 GPUs hybrid, tp_size=4": ("dapo_qwen2.5_32b", (64, 0.5), (16, 2, 4)),
    "64 GPUs hybrid, tp_size=2": ("arithmetic_grpo", (64, 0.6), (32, 0.8, 2)),
    "64 GPUs divided": ("arithmetic_grpo", (32, 1), (16, 2, 2)),
}
"""Name -> recipe, (ranks, GPUs of each), (engines, GPUs of each, tp_size)."""


def layout(name: str) -> TrainConfig:
    recipe, (ranks, rank_gpus), (engines, engine_gpus, tp_size) = LAYOUTS[name]
    words = ["data.train_path=some/data@train", "data.eval_path=some/data@test"]
    if recipe == "arithmetic_grpo":
        words = [
            f"policy.num_workers={ranks}", f"policy.gpus_per_worker={rank_gpus}", f"rollout.num_engines={engines}",
            f"rollout.gpus_per_engine={engine_gpus}", f"+rollout.engine_args.tp_size={tp_size}",
        ]  # fmt: skip
    config = config_of(*words, "cluster.address=auto", name=recipe)
    policy, rollout = config.policy, config.rollout
    assert (policy.num_workers, policy.gpus_per_worker) == (ranks, rank_gpus)
    assert (rollout.num_engines, rollout.gpus_per_engine, rollout.tp_size) == (engines, engine_gpus, tp_size)
    return config


def any_order(config: TrainConfig, *, seed: int) -> list[Place]:
    """The bundles of `config` on machines that Ray fills in any order; an engine's own bundle is on one machine."""
    free = [(node, gpu) for node, gpu in product(range(8), range(GPUS))]
    widths = [int(bundle["GPU"]) for bundle in required_bundles(config)]
    taken: list[list[tuple[int, int]]] = []
    for width in sorted(widths, reverse=True):
        taken.append([free.pop(0) for _ in range(width)])
    Random(seed).shuffle(taken)
    spots = [taken.pop(next(n for n, spot in enumerate(taken) if len(spot) == width)) for width in widths]
    # Node ids are in another order than addresses, and 10.0.0.10 comes after 10.0.0.9.
    return [
        Place(
            bundle=number,
            node=f"node {9 - spot[0][0]}",
            address=f"10.0.0.{spot[0][0] + 5}",
            gpus=tuple(str(gpu + 4) for _, gpu in spot),
        )
        for number, spot in enumerate(spots)
    ]


def check_places(config: TrainConfig, bundles: list[Place], workers: list[Place], *, nodes: dict[str, int]) -> None:
    """Ranks in the order of machines and GPUs, engines on their ranks' GPUs or apart, no bundle over-full."""
    num_ranks, tp_size = config.policy.num_workers, config.rollout.tp_size
    ranks, engines = workers[:num_ranks], workers[num_ranks:]
    spots = [(nodes[rank.node], int(rank.gpus[0])) for rank in ranks]
    assert all(len(rank.gpus) == 1 for rank in ranks) and all(a < b for a, b in pairwise(spots))
    of_engines = [[(nodes[engine.node], int(gpu)) for gpu in engine.gpus] for engine in engines]
    assert all(len(mine) == tp_size and len({node for node, _ in mine}) == 1 for mine in of_engines)
    flat = [spot for mine in of_engines for spot in mine]
    assert all(a < b for a, b in pairwise(flat))
    if config.shares_gpus:
        assert flat == spots
        assert all(engine.gpus[0] in bundles[engine.bundle].gpus for engine in engines)
    else:
        assert not set(flat) & set(spots)
    reserved: Counter[int] = Counter()
    for worker, gpus in zip(workers, worker_gpus(config), strict=True):
        reserved[worker.bundle] += round(gpus * 10_000)  # Ray counts ten-thousandths
        assert bundles[worker.bundle].node == worker.node
    resources = required_bundles(config)
    assert all(gpus <= 10_000 * resources[bundle]["GPU"] for bundle, gpus in reserved.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_and_engines_are_where_they_belong_whatever_ray_did(name: str) -> None:
    config = layout(name)
    for seed in range(3):
        bundles = any_order(config, seed=seed)
        nodes = {place.node: int(place.address.rpartition(".")[2]) for place in bundles}
        check_places(config, bundles, worker_places(config, bundles), nodes=nodes)


def test_a_shared_gpu_is_one_bundle_and_an_engine_of_its_own_another() -> None:
    shared, apart = layout("64 GPUs hybrid, tp_size=4"), layout("64 GPUs divided")
    assert required_bundles(shared) == [{"CPU": 2 * CPUS_PER_WORKER, "GPU": 1.0}] * 64
    assert worker_gpus(shared) == [0.5] * 64 + [0.5] * 16
    rank, engine = {"CPU": CPUS_PER_WORKER, "GPU": 1.0}, {"CPU": 2 * CPUS_PER_WORKER, "GPU": 2.0}
    assert required_bundles(apart) == [rank] * 32 + [engine] * 16
    assert worker_gpus(apart) == [1.0] * 32 + [2.0] * 16
    on_cpu = config_of("policy.num_workers=2", "rollout.num_engines=1")
    assert required_bundles(on_cpu) == [{"CPU": CPUS_PER_WORKER}] * 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_workers_share_the_cores_of_their_own_machine_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = layout(name)
    monkeypatch.setattr(placement, "num_cores", lambda: 64)
    places = worker_places(config, any_order(config, seed=0))
    nodes, num_ranks = [place.node for place in places], config.policy.num_workers
    assert placement.threads_of_each(nodes[:num_ranks]) == 64 // min(num_ranks, GPUS)
    num_engines = min(config.rollout.num_engines, GPUS // config.rollout.tp_size)
    assert placement.threads_of_each(nodes[num_ranks:]) == 64 // num_engines


def test_an_engine_on_two_machines_is_refused_with_the_gpus_and_the_way_out() -> None:
    config = layout("64 GPUs hybrid, tp_size=4")
    bundles = any_order(config, seed=0)
    # The first machine has six of the run's GPUs, and a ninth machine two.
    moved = [number for number, place in enumerate(bundles) if place.address == "10.0.0.5" and place.gpus[0] > "9"]
    moved += [number for number, place in enumerate(bundles) if place.address == "10.0.0.5" and place.gpus[0] < "6"]
    for number in moved[:2]:
        bundles[number] = replace(bundles[number], node="node 0", address="10.0.0.99")
    with pytest.raises(
        PlacementError, match=r"engine 1 would be on several machines: GPU \d+ of 10\.0\.0\.5.*tp_size=4"
    ):
        worker_places(config, bundles)


@pytest.fixture(scope="module")
def eight_machines() -> Iterator[None]:
    """Eight Ray nodes of this machine, which say that each has 8 GPUs."""
    resources: dict[str, Any] = {"num_cpus": 5, "num_gpus": GPUS}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # a node may have no more GPUs than it names
        machines = Machines()
        try:
            machines.add_node(include_dashboard=False, **resources)
            for _ in range(7):
                machines.add_node(wait=False, **resources)
            machines.wait_for_nodes(timeout=300)
            ray.init(address=machines.address, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            machines.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_eight_simulated_machines_hold_every_layout(name: str, eight_machines: None, tmp_path: Path) -> None:
    config = layout(name)
    with Cluster(config, log_dir=tmp_path) as cluster:
        workers = cluster._places
        bundles = sorted({place.bundle: place for place in workers}.values(), key=lambda place: place.bundle)
        by_address = sorted({place.node for place in workers})  # all have the same address
        in_use = {place.bundle: place for place in workers[: config.policy.num_workers]} | {
            place.bundle: place for place in ([] if config.shares_gpus else workers[config.policy.num_workers :])
        }
        assert len(bundles) == len(in_use) == len(required_bundles(config))
        check_places(
            config,
            [in_use[number] for number in range(len(in_use))],
            workers,
            nodes={node: index for index, node in enumerate(by_address)},
        )
        used = -(-sum(int(bundle["GPU"]) for bundle in required_bundles(config)) // GPUS)
        assert len(by_address) == used


@pytest.mark.slow
def test_the_actors_of_a_machine_see_the_gpus_of_their_places(eight_machines: None, tmp_path: Path) -> None:
    class Rank:
        def seen(self) -> tuple[str, str]:
            return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]

    class Engine(RolloutWorker):
        seen = Rank.seen

    config, rank = layout("64 GPUs hybrid, tp_size=4"), ray.remote(Rank)
    engine: Any = ray.remote(concurrency_groups={"requests": 1, "answers": 1})(Engine)  # type: ignore[call-overload]
    with Cluster(config, log_dir=tmp_path) as cluster:
        node = cluster._places[0].node
        actors: dict[int, Any] = {}
        seen: dict[int, tuple[str, str]] = {}
        for worker, place in enumerate(cluster._places):
            if place.node != node:
                continue
            options: Any = cluster._options(worker, 1)
            index = worker - config.policy.num_workers
            if index < 0:
                actors[worker] = rank.options(**options).remote()
            else:
                setup = EngineSetup(
                    config=config.rollout, index=index, seed=0, device="cuda", num_threads=1, log_dir=tmp_path,
                    model_path=tmp_path, gpus=place.gpus, sleeps=True,
                )  # fmt: skip
                actors[worker] = engine.options(**options).remote(setup)
            # They stay, so that ranks and engines hold their parts of the same GPUs.
            seen[worker] = ray.get(actors[worker].seen.remote(), timeout=300)
        assert seen == {worker: (node, ",".join(cluster._places[worker].gpus)) for worker in actors}
        assert sorted(len(gpus.split(",")) for _, gpus in seen.values()) == [1] * 8 + [4] * 2
        for actor in actors.values():
            ray.kill(actor)
