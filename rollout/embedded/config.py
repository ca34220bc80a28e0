"""Keys of the engines in the process of their worker."""

from __future__ import annotations

from dataclasses import dataclass

from algorithms.config.rules import at_least, ruled
from rollout.config import EngineConfig


@dataclass(kw_only=True, slots=True)
class EmbeddedConfig(EngineConfig):
    """An engine without a server, which decodes a bounded batch and returns the routes of a mixture of experts."""

    max_batch_size: int = ruled(256, at_least(1))
    """Largest number of sequences decoded together; a waiting sequence takes the slot of a finished one."""

    @property
    def max_running(self) -> int | None:
        return self.max_batch_size

    @property
    def returns_routes(self) -> bool:
        return True
