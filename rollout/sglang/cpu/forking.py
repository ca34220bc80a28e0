"""Lets SGLang's server fork its processes on a CPU.

SGLang spawns its scheduler and its detokenizer, because CUDA cannot be used in a process that was forked after the
first use. A spawned process imports torch, transformers and SGLang again, which takes a core 13 s and 150 MiB. Without
CUDA there is nothing that a fork could break: at that point the server has only imported modules and has one thread.
"""

from __future__ import annotations

import multiprocessing


def fork_processes() -> None:
    """Make every process that SGLang starts from this one a fork of it."""
    multiprocessing.set_start_method("fork", force=True)
    # SGLang sets the method itself, by force, right before it starts its processes.
    multiprocessing.set_start_method = _keep  # type: ignore[assignment]


def _keep(method: str | None, force: bool = False) -> None:
    """Stands for `multiprocessing.set_start_method` and changes nothing."""
