"""GPU memory of one SGLang server: what it is started with, what it gives back and takes again, by SGLang's tags.

Used by `rollout/sglang/engine.py`. SGLang ends its process when it is asked twice for the same, so what was given back
is written down here. On a CPU the routes work and nothing is given back. Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.config import SGLangConfig
from rollout.sglang.client import SGLangClient

WEIGHT_TAGS = ("weights",)
CACHE_TAGS = ("kv_cache", "cuda_graph")


class ServerMemory:
    """The memory of a server that nothing is running on."""

    def __init__(self, client: SGLangClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._released: list[str] = []

    @property
    def is_released(self) -> bool:
        """Whether anything was given back and not yet taken again."""
        return bool(self._released)

    def release(self) -> None:
        """Give everything back; the weights are lost. Raises ClientError."""
        tags = [*WEIGHT_TAGS, *CACHE_TAGS]
        self._client.call("/release_memory_occupation", body={"tags": tags}, timeout_s=self._timeout_s)
        self._released = tags

    def take(self, tags: Sequence[str]) -> None:
        """Take again what of `tags` was given back. Raises ClientError."""
        released = [tag for tag in tags if tag in self._released]
        if released:
            self._client.call("/resume_memory_occupation", body={"tags": released}, timeout_s=self._timeout_s)
            self._released = [tag for tag in self._released if tag not in released]


def memory_args(config: SGLangConfig, *, device: str, sleeps: bool) -> dict[str, Any]:
    """Server arguments on a part of a GPU: no more memory than that part, and an allocator that can give it back."""
    if device != "cuda" or config.gpus_per_engine >= 1:
        return {}
    return {"mem_fraction_static": config.gpus_per_engine, **({"enable_memory_saver": True} if sleeps else {})}
