"""What a worker must not take over from the shell in which Ray was started: variables of others, a low file limit.

Ray's processes hand the environment of `ray start`, or of the driver, down to every worker.
"""

from __future__ import annotations

import os
import resource

LAUNCHER_VARIABLES = (
    "LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables in which torchrun, and job scripts like it, tell their own processes who they are."""
LAUNCHER_PREFIX = "TORCHELASTIC_"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with options of torch's allocator on GPUs, by their new and their old name."""


def variables() -> dict[str, str]:
    """A copy of the environment. `dict(os.environ)` raises KeyError if another thread removes a variable meanwhile."""
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def is_of_launcher(name: str) -> bool:
    """True if a launcher of torch sets this environment variable."""
    return name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIX)


def forget_launcher() -> None:
    """Remove a launcher's variables from the environment of this process and of those that it starts.

    Ray shows a worker one GPU, number 0. With LOCAL_RANK=3 torch would take the GPU with the number 3.
    """
    for name in filter(is_of_launcher, list(os.environ)):
        del os.environ[name]


def forget_allocator() -> None:
    """Remove the options of torch's allocator from the environment of this process and of those that it starts.

    An engine that frees its memory between rollouts has an allocator of its own, and expandable segments break it.
    """
    for name in ALLOCATOR_VARIABLES:
        os.environ.pop(name, None)


def allow_open_files() -> None:
    """Raise the number of files that this process may have open to the most that its user may have.

    Every request to a server is a socket. The usual limit of 1,024 files would bound the requests that are under way.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
