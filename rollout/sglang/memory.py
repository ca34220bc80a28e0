"""GPU memory of one SGLang server: start arguments, and release and return of memory by SGLang's tags.

`rollout/sglang/engine.py` uses this class. SGLang ends its process when the same memory is released or taken twice, so
the class records the released tags. On a CPU the routes work and no memory is released. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.config import SGLangConfig
from rollout.sglang.client import SGLangClient

WEIGHT_TAGS = ("weights",)
CACHE_TAGS = ("kv_cache", "cuda_graph")


class ServerMemory:
    """Releases and takes the memory of a server without running requests."""

    def __init__(self, client: SGLangClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._released: list[str] = []

    @property
    def is_released(self) -> bool:
        """True if some memory is released."""
        return bool(self._released)

    def release(self) -> None:
        """Release all memory; the weights are lost. Raises ClientError."""
        tags = [*WEIGHT_TAGS, *CACHE_TAGS]
        self._client.call("/release_memory_occupation", body={"tags": tags}, timeout_s=self._timeout_s)
        self._released = tags

    def take(self, tags: Sequence[str]) -> None:
        """Take the released memory among `tags` again. Raises ClientError."""
        released = [tag for tag in tags if tag in self._released]
        if released:
            self._client.call("/resume_memory_occupation", body={"tags": released}, timeout_s=self._timeout_s)
            self._released = [tag for tag in self._released if tag not in released]


def memory_args(config: SGLangConfig, *, device: str, sleeps: bool) -> dict[str, Any]:
    """Server arguments on a part of a GPU: a limit of memory, and an allocator that can release memory."""
    if device != "cuda" or config.gpus_per_engine >= 1:
        return {}
    return {"mem_fraction_static": config.gpus_per_engine, **({"enable_memory_saver": True} if sleeps else {})}
