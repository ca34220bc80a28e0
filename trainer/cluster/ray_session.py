"""Ray of a run: join a cluster, or start one of this process alone, and leave nothing of it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]  # compiled
from ray.exceptions import RpcError
from ray.job_config import JobConfig

from algorithms.config.home import from_home
from rollout.processes.scratch import Scratch
from trainer.cluster.bundles import PlacementError
from trainer.cluster.deadline import RayAnswerError, end_ray, ray_answer
from trainer.ending.termination import end_descendants, requests_held

logger = logging.getLogger(__name__)

RAY_PREFIX = "parity-ray-"
"""Prefix of the directory of a run that holds Ray's temporary files."""
RAY_PARENT_BYTES = 20
"""Longest path of the directory above. A path of a socket has 107 bytes, <parent>/parity-ray-XXXXXXXX/r/
session_<time>_<process>/sockets/plasma_store has 86 after the parent."""
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
PRESTARTED = "--num_prestart_python_workers="
"""Argument of the raylet: workers that it starts before one is asked for."""

DEATH_OF_A_WORKER = "A worker died or was killed while executing a task"
"""Begin of Ray's message about any worker that was killed, also by the run itself at its end."""

REACH_TIMEOUT_S = 10.0
"""Deadline in seconds for the connection to a running Ray cluster."""


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
    if chosen := os.environ.get("RAY_TMPDIR"):
        os.environ["RAY_TMPDIR"] = from_home(chosen, key="$RAY_TMPDIR")  # Ray would make a directory named ~
    with ExitStack() as ends:
        ends.enter_context(_replaced(ray_worker, "print_to_stdstream", _log_messages))
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
            with _processes_of_our_own(), _token_of_its_own(), _nothing_beside_the_node():
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


def _log_messages(message: dict[str, Any], ignore_prefix: bool) -> None:
    """Log what the nodes of Ray tell the driver; Ray would print it on stdout, in the middle of a table or after it.

    The death of a worker is no warning here: the groups of ranks and engines name every worker that they lose.
    """
    for line in message["lines"]:
        expected = line.startswith(DEATH_OF_A_WORKER)
        logger.log(logging.DEBUG if expected else logging.WARNING, "Ray: %s", line)


def _ray_parent() -> Path:
    """The directory for Ray's temporary files: RAY_TMPDIR, made as Ray makes it, or one with a path short enough."""
    if chosen := os.environ.get("RAY_TMPDIR"):
        Path(chosen).mkdir(parents=True, exist_ok=True)
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


def _processes_of_our_own() -> AbstractContextManager[None]:
    """Ray's processes that are started within hear nothing that is sent to the driver's process group, and no worker is
    started before it is asked for.

    A job scheduler and `timeout` send SIGTERM to the whole group: Ray would end before the running step does. It has no
    option for that, and blocks only SIGINT. Whatever the driver dies of, the kernel kills them with it.

    Ray would also start one Python for each core of the machine. None of them could serve a run, because each worker of
    a run has environment variables of its own.
    """
    popen = services.ConsolePopen

    def start(command: list[str], *args: Any, **options: Any) -> object:
        none = [PRESTARTED + "0" if word.startswith(PRESTARTED) else word for word in command]
        return popen(none, *args, **options, start_new_session=True)

    return _replaced(services, "ConsolePopen", start)


@contextmanager
def _nothing_beside_the_node() -> Iterator[None]:
    """Ray that is started within has neither an autoscaler nor a process that reads the logs of workers aloud.

    One machine does not grow, and the logs are not printed (log_to_driver). Each would be one more Python, which delays
    the start and the end of a run; Ray has no option against them.
    """
    with _replaced(Node, "start_monitor", lambda node: None), _replaced(Node, "start_log_monitor", lambda node: None):
        yield


@contextmanager
def _replaced(owner: ModuleType | type, name: str, value: object) -> Iterator[None]:
    """`value` in place of a function of Ray while the block runs, where Ray has no option."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
