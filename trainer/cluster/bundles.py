"""The bundles of a run, which Ray reserves together, and the place of every rank and engine in them.

A shared GPU is a bundle of its own, for its rank and its part of an engine; an engine on several GPUs takes its part of
each. Ranks and engines are numbered by machine and GPU, whatever the order in which Ray has filled the machines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.cluster.deadline import ray_answer
from trainer.config.train import TrainConfig
from trainer.limits.machine import CPUS_PER_WORKER

PROBE_TIMEOUT_S = 300.0
"""Deadline in seconds for a process on every machine to say which GPUs it has: it has to import Ray first."""


class PlacementError(RuntimeError):
    """The resources of the run cannot be had: says what is required and what is available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A bundle on its machine; for a worker, the bundle that its Ray actor is in."""

    bundle: int
    """Number of the bundle in the placement group."""
    node: str
    """Ray node id of the machine."""
    address: str
    """Address of the machine."""
    gpus: tuple[str, ...] = ()
    """GPUs of the bundle, or all GPUs of the worker, as CUDA names them on the machine; empty on a CPU."""


def required_bundles(config: TrainConfig) -> list[dict[str, float]]:
    """Return the resources of the bundles that Ray has to reserve together; a bundle is on one machine.

    One bundle per shared GPU; otherwise one per rank, then one per engine.
    """
    policy, rollout = config.policy, config.rollout
    if config.shares_gpus:
        return [{"CPU": 2 * CPUS_PER_WORKER, "GPU": 1.0}] * policy.num_workers
    ranks = [_bundle(CPUS_PER_WORKER, policy.gpus_per_worker)] * policy.num_workers
    return ranks + [_bundle(CPUS_PER_WORKER * rollout.tp_size, rollout.gpus_per_engine)] * rollout.num_engines


def worker_gpus(config: TrainConfig) -> list[float]:
    """GPUs that Ray reserves for the actor of every worker: the FSDP ranks first, then the engines.

    An engine on several shared GPUs reserves its part of the first; nobody else is given the parts of the others.
    """
    policy, rollout = config.policy, config.rollout
    of_engine = rollout.gpu_share if config.shares_gpus else rollout.gpus_per_engine
    return [policy.gpus_per_worker] * policy.num_workers + [of_engine] * rollout.num_engines


def worker_places(config: TrainConfig, bundles: Sequence[Place]) -> list[Place]:
    """The place of every worker, the FSDP ranks first, then the engines; `bundles` are those of `required_bundles`.

    Raises PlacementError if the GPUs of an engine are not on one machine.
    """
    num_ranks, tp_size = config.policy.num_workers, config.rollout.tp_size
    if not config.shares_gpus:
        return sorted(bundles[:num_ranks], key=_by_machine) + sorted(bundles[num_ranks:], key=_by_machine)
    ranks = sorted(bundles, key=_by_machine)
    groups = [ranks[first : first + tp_size] for first in range(0, num_ranks, tp_size)]
    return ranks + [_spanning(index, group) for index, group in enumerate(groups)]


def bundle_places(group: PlacementGroup, bundles: Sequence[Mapping[str, float]]) -> list[Place]:
    """Machine and GPUs of every bundle of a placement group that is ready. Raises PlacementError."""
    nodes: dict[int, str] = ray_answer(placement_group_table, group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray_answer(ray.nodes)}
    gpus: dict[int, tuple[str, ...]] = {}
    numbers_of: dict[str, list[int]] = {}
    for number, bundle in enumerate(bundles):
        if bundle.get("GPU"):
            numbers_of.setdefault(nodes[number], []).append(number)
    # One bundle of every machine at a time, so that one process there answers for all.
    for numbers in zip_longest(*numbers_of.values()):
        gpus |= _gpus_of(group, {number: bundles[number]["GPU"] for number in numbers if number is not None})
    return [
        Place(bundle=number, node=nodes[number], address=addresses[nodes[number]], gpus=gpus.get(number, ()))
        for number in range(len(bundles))
    ]


def _gpus_of(group: PlacementGroup, bundles: Mapping[int, float]) -> dict[int, tuple[str, ...]]:
    """The GPUs of some bundles, as a process inside is told, for Ray's tables do not say; `bundles` has their number.

    The keys are numbers of bundles.
    """
    calls = {}
    for number, gpus in bundles.items():
        inside = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        # max_calls=0: Ray would end the process after a call with GPUs.
        probe = ray.remote(num_cpus=0, num_gpus=gpus, max_calls=0, scheduling_strategy=inside)(_own_gpus)
        calls[number] = probe.remote()
    try:
        return dict(zip(calls, ray.get(list(calls.values()), timeout=PROBE_TIMEOUT_S), strict=True))
    except GetTimeoutError as error:
        raise PlacementError(
            f"phase placement: no process said within {PROBE_TIMEOUT_S:.0f} s which GPUs it has. Look at the machines "
            "of the cluster: can they start Python processes?"
        ) from error
    except RayError as error:
        raise PlacementError(
            f"phase placement: a process could not say which GPUs it has: {str(error).splitlines()[0]}"
        ) from error


def _own_gpus() -> tuple[str, ...]:
    return tuple(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def _spanning(index: int, group: Sequence[Place]) -> Place:
    """The place of engine `index` on the GPUs of `group`."""
    first = group[0]
    if len({place.node for place in group}) > 1:
        where = ", ".join(f"GPU {' '.join(place.gpus)} of {place.address}" for place in group)
        raise PlacementError(
            f"phase placement: engine {index} would be on several machines: {where}. Every machine must have a "
            f"multiple of rollout.engine_args.tp_size={len(group)} free GPUs: choose another tp_size, or end other "
            "runs there"
        )
    gpus = tuple(gpu for place in group for gpu in place.gpus)
    return Place(bundle=first.bundle, node=first.node, address=first.address, gpus=gpus)


def _by_machine(place: Place) -> tuple[object, ...]:
    """Sort key: address, node, GPU, with numbers inside compared as numbers."""
    return (_natural(place.address), place.node, [_natural(gpu) for gpu in place.gpus], place.bundle)


def _natural(text: str) -> list[str | int]:
    # Text and numbers take turns, so that two lists compare like with like.
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]
