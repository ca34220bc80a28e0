"""Ray: start or join a cluster, reserve all resources at once, spawn the workers in their places.

`trainer/cluster/bundles.py` knows who is where.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]  # compiled
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RpcError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.config import LOOPBACK, Quantization
from rollout.group.engine_group import EngineGroup
from rollout.group.residency import SharedGpu
from rollout.group.worker import CONCURRENCY_GROUPS, EngineSetup, RolloutWorker
from rollout.processes.inherited import ALLOCATOR_VARIABLES
from rollout.processes.scratch import Scratch
from trainer.cluster.bundles import Place, PlacementError, bundle_places, required_bundles, worker_gpus, worker_places
from trainer.cluster.deadline import RayAnswerError, end_ray, ray_answer
from trainer.cluster.model_places import model_places
from trainer.cluster.policy_group import PolicyGroup
from trainer.config.train import TrainConfig
from trainer.limits.machine import CPUS_PER_WORKER
from trainer.limits.memory_plan import may_take_turns, memory_plan
from trainer.policy.worker import PolicySetup, PolicyWorker
from trainer.rundir.provenance import num_cores
from trainer.rundir.termination import end_descendants, requests_held

logger = logging.getLogger(__name__)

RAY_PREFIX = "parity-ray-"
"""Prefix of the directory of a run that holds Ray's temporary files."""
RAY_PARENT_BYTES = 20
"""Longest path of the directory above. A path of a socket has 107 bytes, <parent>/parity-ray-XXXXXXXX/r/
session_<time>_<process>/sockets/plasma_store has 86 after the parent."""
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"

PLACEMENT_TIMEOUT_S = 60.0
"""Deadline in seconds for Ray to grant all resources: resources that another run holds seldom become free sooner."""

REACH_TIMEOUT_S = 10.0
"""Deadline in seconds for the connection to a running Ray cluster."""

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


def engine_threads(config: TrainConfig) -> int:
    """Compute threads of one engine on a CPU."""
    return max(1, num_cores() // config.rollout.num_engines)


def describe(resources: dict[str, float], names: list[str]) -> str:
    """ "CPU 2, GPU 0" for the given names."""
    return ", ".join(f"{name} {resources.get(name, 0.0):g}" for name in names)


class OwnPathJob(JobConfig):
    """A job whose workers do not put the driver's working directory first on their path.

    There a file `rollout.py` or `trainer.py` of the user would hide the package of that name. Ray adds the directory
    and has no option against it; the workers find the packages as the driver did, installed or by PYTHONPATH.
    """

    @property
    def _py_driver_sys_path(self) -> list[str]:
        return []

    @_py_driver_sys_path.setter
    def _py_driver_sys_path(self, paths: list[str]) -> None:
        pass


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Ray while the context is open: the cluster at `address`, or one of this process on loopback, without dashboard.

    A cluster at an address has the token of its owner. Ray of this process has a token and files of its own, which no
    other user of the machine can read.
    """
    with ExitStack() as ends:
        if address is not None:
            _check_reachable(address)
            ends.callback(end_ray)
            _start_ray(address=address)
        else:
            # Ray resolves "localhost" to the routable address unless clusters are off; workers read the same variable.
            # Both must be set, because Ray read the variable when it was imported.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            ray_constants.ENABLE_RAY_CLUSTER = False
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            scratch = Scratch(RAY_PREFIX, parent=_ray_parent())
            ends.callback(_forget_token)
            ends.callback(scratch.remove)
            ends.callback(end_ray)
            # Ray opens its directory to every user of the machine, so it gets one below ours, which is closed.
            files = str(scratch.path / "r")
            with _sessions_of_their_own(), _token_of_its_own():
                # Without "local" Ray would follow the environment variable RAY_ADDRESS to another cluster.
                _start_ray(address="local", include_dashboard=False, _temp_dir=files)
        yield


def _check_reachable(address: str) -> None:
    """Raise PlacementError if nothing listens, or answers, where Ray looks for `address`: Ray tries for 14 minutes."""
    try:
        # "auto" is RAY_ADDRESS, or the address that the last Ray of this machine left in a file.
        found = services.canonicalize_bootstrap_address(address.removeprefix("ray://"))
        if found is not None:
            host, _, port = found.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_TIMEOUT_S).close()
            if not address.startswith("ray://"):  # Ray's own client, which has a deadline of its own
                ray_answer(GcsClient, found)
    except (OSError, ValueError, RayAnswerError, RpcError) as error:
        raise PlacementError(
            f"phase placement: no Ray cluster can be reached at cluster.address={address}: {error}. Start one there, "
            "name another address, or remove cluster.address to use this machine alone"
        ) from error


def _start_ray(**options: Any) -> None:
    """Start or join Ray; keeps the handlers of signals, and leaves no process if it fails.

    Ray counts its own attempts. A deadline would need another thread, and Ray's processes end with the thread that
    starts them.
    """
    others = psutil.Process().children(recursive=True)
    # Ray's own handler of SIGTERM would leave its start with SystemExit, and stay.
    with requests_held(), _replaced(ray_utils, "set_sigterm_handler", lambda handler: None):
        try:
            ray.init(job_config=OwnPathJob(), log_to_driver=False, logging_level=logging.ERROR, **options)
        except BaseException:  # Ray forgets what it had started when its start failed
            end_descendants(besides=others)
            raise


def _give_back(group: PlacementGroup) -> None:
    """Give the resources of `group` back. Ray has a deadline of 60 s, and ends the group with this process at last."""
    try:
        remove_placement_group(group)
    except GetTimeoutError as error:
        logger.warning("the resources of the run are not given back before it ends: %s", error)


def _ray_parent() -> Path:
    """The directory for Ray's temporary files: RAY_TMPDIR as Ray reads it, or one with a path short enough."""
    if chosen := os.environ.get("RAY_TMPDIR"):
        return Path(chosen)
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= RAY_PARENT_BYTES else "/tmp")  # noqa: S108 - below it: mkdtemp


@contextmanager
def _token_of_its_own() -> Iterator[None]:
    """Ray that is started within asks for a new token, which its processes inherit and no file holds.

    Otherwise Ray shares ~/.ray/auth_token among all runs, and makes it readable for every user of the machine. Children
    that this process starts later, such as those of rewards, do not get the token.
    """
    names = (AUTH_MODE_ENV_VAR, TOKEN_VARIABLE)
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)  # without a mode Ray turns its token on
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _forget_token() -> None:
    """Take back what this process holds of a token that its environment no longer has.

    Ray keeps the token and the mode beyond the end of a cluster: this process would refuse every call from the nodes of
    the next cluster that it joins, and Ray would take its actors for no longer wanted.
    """
    Config.initialize("")  # reads the mode from the environment again
    AuthenticationTokenLoader.instance().reset_cache()


def _sessions_of_their_own() -> AbstractContextManager[None]:
    """Ray's processes that are started within do not hear what is sent to the driver's process group.

    A job scheduler and `timeout` send SIGTERM to the whole group: Ray would end before the running step does. It has no
    option for that, and blocks only SIGINT. Whatever the driver dies of, the kernel kills them with it.
    """
    return _replaced(services, "ConsolePopen", partial(services.ConsolePopen, start_new_session=True))


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """`value` in place of a function of Ray while the block runs, where Ray has no option."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


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
        threads = max(1, num_cores() // config.num_workers)
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
                engine_threads=engine_threads(self._config),
            )
            actor = ray.remote(PolicyWorker).options(**self._options(rank, threads))
            workers.append(actor.remote(setup))
        self._policy = PolicyGroup(
            workers,
            nodes=nodes[: config.num_workers],
            memory_note=memory_plan(self._config, device_bytes=None).memory_note,
            start_timeout_s=config.start_timeout_s,
            step_timeout_s=config.step_timeout_s,
            meets_at_port=init_method is None,
            shared_gpu=self._shared_gpu,
        )
        self._ends.callback(self._policy.stop)
        return self._policy

    def spawn_engines(self, model_path: Path) -> EngineGroup:
        """Begin to start the rollout engines; `wait_ready` of the group returns when all are ready.

        On GPUs that they share with ranks this waits for the policy, because an engine takes a share of the memory that
        is free when it starts. Where they take turns, it puts the policy to sleep first.
        """
        if self._policy is not None and self._config.shares_gpus:
            self._policy.wait_ready()
        takes_turns = self._policy_sleeps_first()
        config = self._config.rollout
        threads = engine_threads(self._config)
        models = self._model_places(model_path)
        places = self._places[self._config.policy.num_workers :]

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

    def _policy_sleeps_first(self) -> bool:
        """Decide whether the sides take turns; if so, the policy is asleep when this returns."""
        if self._policy is None or not may_take_turns(self._config):
            return False
        device_bytes = min((info.device_bytes or 0 for info in self._policy.wait_ready()), default=0)
        plan = memory_plan(self._config, device_bytes=device_bytes or None)
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
