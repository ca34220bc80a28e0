"""Reserve all resources of a run at once, and spawn the workers in their places.

`trainer/cluster/bundles.py` knows who is where, `trainer/cluster/ray_session.py` starts or joins Ray.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.config import LOOPBACK, Quantization, Routing
from rollout.group.engine_group import EngineGroup
from rollout.group.residency import SharedGpu
from rollout.group.worker import CONCURRENCY_GROUPS, EngineSetup, RolloutWorker
from rollout.processes.inherited import ALLOCATOR_VARIABLES
from rollout.types import AdapterSpec
from trainer.cluster.bundles import Place, PlacementError, bundle_places, required_bundles, worker_gpus, worker_places
from trainer.cluster.deadline import ray_answer
from trainer.cluster.model_places import model_places
from trainer.cluster.policy_group import PolicyGroup
from trainer.cluster.ray_session import ray_session
from trainer.config.train import TrainConfig
from trainer.limits.machine import CPUS_PER_WORKER
from trainer.limits.memory_plan import may_take_turns, memory_plan
from trainer.policy.worker import PolicySetup, PolicyWorker
from trainer.rundir.provenance import num_cores

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0
"""Deadline in seconds for Ray to grant all resources: resources that another run holds seldom become free sooner."""

ONEDNN_KERNELS = 32
"""Kernels that oneDNN keeps per process on a CPU. It compiles one per shape, shapes change at every step, and the 1,024
that it keeps otherwise take hundreds of MiB within a hundred steps."""
RANK_KERNELS = 32
"""Kernels that a rank keeps of the 1,024 that torch keeps in front of oneDNN: in that cache, a bfloat16 product of a
shape that never comes again costs 0.2 MiB. Engines keep all 1,024, for their batch sizes come again and again."""

SPINS = 2000
"""Looks that a waiting OpenMP thread (GNU's) takes before it sleeps: tens of microseconds, about what it takes to wake
one that sleeps. A decoding step is hundreds of operations that are not much longer."""
RANK_HEAP = f"glibc.malloc.mmap_threshold={2**40}:glibc.malloc.trim_threshold={2**40}:glibc.malloc.hugetlb=1"
"""Settings with which glibc keeps the memory of a rank on a CPU: all memory on the heap, so that tensors of tens of MiB
reuse the pages of earlier tensors instead of new pages from the kernel, and in pages of 2 MiB where the kernel has
such pages. `rollout/processes/process_memory.py` gives free memory back."""


def engines_only(config: TrainConfig) -> TrainConfig:
    """The config of a cluster without ranks, for evaluation; what placement reads differs from `config`.

    And no engine is quantised: weights come to lie on a grid in a sync, and there is none. An engine that shares its
    GPUs with ranks has them for itself: two halves of one GPU are not for two engines.
    """
    policy, rollout = copy.copy(config.policy), copy.copy(config.rollout)
    policy.num_workers, policy.gpus_per_worker = 0, 0.0
    rollout.quantization = Quantization.none
    rollout.gpus_per_engine = float(rollout.tp_size) if rollout.gpus_per_engine else 0.0
    alone = copy.copy(config)
    alone.policy, alone.rollout = policy, rollout
    return alone


def threads_of_each(nodes: Sequence[str]) -> int:
    """Compute threads of each rank, or of each engine, that are on `nodes`: on a machine they share its cores.

    Every machine is taken to have the cores of this one.
    """
    return max(1, num_cores() // max(Counter(nodes).values()))


def describe(resources: dict[str, float], names: list[str]) -> str:
    """ "CPU 2, GPU 0" for the given names."""
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in names)


def _give_back(group: PlacementGroup) -> None:
    """Give the resources of `group` back. Ray has a deadline of 60 s, and ends the group with this process at last."""
    try:
        remove_placement_group(group)
    except GetTimeoutError as error:
        logger.warning("the resources of the run are not given back before it ends: %s", error)


class Cluster:
    """The Ray cluster of one run, as a context manager: leaving it ends every worker and what they started."""

    def __init__(self, config: TrainConfig, *, log_dir: Path) -> None:
        self._config = config
        self._log_dir = log_dir
        self._ends = ExitStack()
        """Ends the parts of the run, last in, first out; each end is tried whatever happened to the others."""
        self._placement: PlacementGroup | None = None
        self._places: list[Place] = []
        """Place of every worker: the FSDP ranks first, then the engines."""
        self._policy: PolicyGroup | None = None
        self._engines: EngineGroup | None = None
        self._shared_gpu = SharedGpu()

    def __enter__(self) -> Cluster:
        with ExitStack() as ends:
            if not ray.is_initialized():
                ends.enter_context(ray_session(self._config.cluster.address))
            self._placement = self._reserve()
            ends.callback(_give_back, self._placement)
            found = bundle_places(self._placement, required_bundles(self._config))
            self._places = worker_places(self._config, found)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics of the step: seconds in which sides moved on and off shared GPUs, which are part of the
        phases too; engines started anew and requests given to another engine."""
        engines = {} if self._engines is None else self._engines.metrics()
        return self._shared_gpu.metrics() | engines

    def spawn_policy(self, model_path: Path, critic_path: Path | None = None) -> PolicyGroup:
        """Begin to start the FSDP ranks; `wait_ready` of the group returns when they hold the model.

        A critic starts from `critic_path`, or like the policy from `model_path`.
        """
        config = self._config.policy
        on_gpu = config.gpus_per_worker > 0
        init_method = self._rendezvous()
        models = self._model_places(model_path)
        critics = None if critic_path is None else self._model_places(critic_path)
        nodes = self._nodes()
        threads = threads_of_each(nodes[: config.num_workers])
        workers: list[Any] = []
        for rank in range(config.num_workers):
            setup = PolicySetup(
                config=self._config,
                model_path=models[nodes[rank]],
                critic_path=None if critics is None else critics[nodes[rank]],
                rank=rank,
                init_method=init_method,
                device="cuda" if on_gpu else "cpu",
                num_threads=threads,
                log_dir=self._log_dir.resolve(),
                host=self._host(),
                engine_threads=threads_of_each(nodes[config.num_workers :]),
            )
            actor = ray.remote(PolicyWorker).options(**self._options(rank, threads))
            workers.append(actor.remote(setup))
        self._policy = PolicyGroup(
            workers,
            nodes=nodes[: config.num_workers],
            memory_note=memory_plan(self._config, device_bytes=None, model_path=model_path).memory_note,
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=config.step_timeout_s,
            meets_at_port=init_method is None,
            shared_gpu=self._shared_gpu,
        )
        self._ends.callback(self._policy.stop)
        return self._policy

    def spawn_engines(
        self, model_path: Path, *, adapter: AdapterSpec | None = None, routes: Routing = Routing.live
    ) -> EngineGroup:
        """Begin to start the rollout engines; `wait_ready` of the group returns when all are ready.

        They hold the weights of the model, and an `adapter` beside them if there is one; they can return
        `routes` of tokens.

        On GPUs that they share with ranks this waits for the policy, because an engine takes a share of the memory that
        is free when it starts. Where they take turns, it puts the policy to sleep first.
        """
        if self._policy is not None and self._config.shares_gpus:
            self._policy.wait_ready()
        takes_turns = self._policy_sleeps_first(model_path)
        config = self._config.rollout
        models = self._model_places(model_path)
        places = self._places[self._config.policy.num_workers :]
        threads = threads_of_each([place.node for place in places])

        def spawn(index: int) -> ActorHandle[Any]:
            setup = EngineSetup(
                config=config,
                index=index,
                seed=self._config.run.seed,
                device="cuda" if config.gpus_per_engine > 0 else "cpu",
                num_threads=threads,
                log_dir=self._log_dir,
                model_path=models[places[index].node],
                gpus=places[index].gpus,
                sleeps=takes_turns,
                adapter=adapter,
                routes=routes,
                num_requests=self._config.requests_per_engine,
            )
            # The type stubs know neither the argument nor the threads of its verbs.
            actor: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RolloutWorker)  # type: ignore[call-overload]
            options = self._options(self._config.policy.num_workers + index, threads)
            worker: ActorHandle[Any] = actor.options(**options).remote(setup)
            return worker

        self._engines = EngineGroup(
            spawn, nodes=[place.node for place in places], config=config, shared_gpu=self._shared_gpu
        )
        self._ends.callback(self._engines.stop)
        if takes_turns:
            self._shared_gpu.enable(awake=self._engines)
        return self._engines

    def _policy_sleeps_first(self, model_path: Path) -> bool:
        """Decide whether the sides take turns; if so, the policy is asleep when this returns."""
        if self._policy is None or not may_take_turns(self._config):
            return False
        device_bytes = min((info.device_bytes or 0 for info in self._policy.wait_ready()), default=0)
        plan = memory_plan(self._config, device_bytes=device_bytes or None, model_path=model_path)
        logger.info("%s", plan.verdict)
        if plan.takes_turns:
            self._policy.sleep()
        return plan.takes_turns

    def _model_places(self, path: Path) -> Mapping[str, Path]:
        """Ray node id -> directory of a model that is in `path` on this machine, for every machine of the run."""
        timeout_s = max(self._config.policy.start_timeout_s, self._config.rollout.start_timeout_s)
        return model_places(path.resolve(), self._nodes(), timeout_s=timeout_s)

    def _rendezvous(self) -> str | None:
        """The file at which the ranks of one machine meet; None across machines: at a store that rank 0 opens.

        The store listens on every interface and knows no password; a file cannot be reached.
        """
        if self._config.cluster.address is not None:
            return None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        file = (self._log_dir / f".rendezvous-{secrets.token_hex(8)}").resolve()
        self._ends.callback(file.unlink, missing_ok=True)
        return f"file://{file}"

    def _host(self) -> str:
        """Return the address at which other machines of the cluster reach the machine of rank 0."""
        if self._config.cluster.address is None:
            return LOOPBACK[0]
        return self._places[0].address

    def _nodes(self) -> list[str]:
        """Ray node id of every worker: the FSDP ranks first, then the engines."""
        return [place.node for place in self._places]

    def _options(self, worker: int, threads: int) -> dict[str, object]:
        if self._placement is None:
            raise RuntimeError("workers are spawned inside `with Cluster(...)`")
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", str(SPINS)),
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(ONEDNN_KERNELS),
        }
        if worker < self._config.policy.num_workers:
            environment["LRU_CACHE_CAPACITY"] = str(RANK_KERNELS)
            if self._config.policy.gpus_per_worker == 0:
                environment["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", RANK_HEAP)
            elif not any(name in os.environ for name in ALLOCATOR_VARIABLES):
                # Micro-batches of many lengths would leave gaps of GiB. Not yet run on a GPU.
                environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        if self._config.cluster.address is None:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        return {
            "num_cpus": CPUS_PER_WORKER,
            "num_gpus": worker_gpus(self._config)[worker],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._placement, placement_group_bundle_index=self._places[worker].bundle
            ),
            # Ray sets OMP_NUM_THREADS to the reserved CPUs, which would be 1 for a fraction of a core. Waiting
            # threads must soon sleep: a spinning one takes a core from the worker that has something to do.
            "runtime_env": {"env_vars": environment | self._config.cluster.env},
        }

    def _reserve(self) -> PlacementGroup:
        """Reserve all workers together, or say within the deadline what is missing."""
        bundles = required_bundles(self._config)
        names = sorted({name for bundle in bundles for name in bundle})
        required = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
        present = ray_answer(ray.cluster_resources)
        remedy = (
            "Lower policy.num_workers or rollout.num_engines (on GPUs policy.gpus_per_worker, "
            "rollout.gpus_per_engine; both 0 for a run on the CPU), or end other runs on this cluster."
        )
        needs, has = f"the run requires {describe(required, names)}", describe(present, names)
        if any(present.get(name, 0.0) < amount for name, amount in required.items()):
            raise PlacementError(f"phase placement: {needs}; the cluster has {has}. {remedy}")
        group: PlacementGroup = placement_group(bundles, strategy="PACK")
        ready, _ = ray.wait([group.ready()], timeout=PLACEMENT_TIMEOUT_S)
        if not ready:
            free = describe(ray_answer(ray.available_resources), names)
            _give_back(group)
            raise PlacementError(
                f"phase placement: no placement within {PLACEMENT_TIMEOUT_S:.0f} s: {needs}; free are {free} of {has}. "
                f"{remedy}"
            )
        return group
