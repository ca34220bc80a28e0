"""Configuration of the embedded engine, `rollout=torch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms.config.rules import at_least, ruled
from rollout.config import EngineConfig

if TYPE_CHECKING:
    from rollout.engine import Engine, EngineSetup


@dataclass(kw_only=True, slots=True)
class TorchEngineConfig(EngineConfig):
    """The embedded engine: transformers in the worker's process, no server. Deterministic; the reference in tests."""

    kind: ClassVar[str] = "torch"
    max_batch_size: int = ruled(256, at_least(1))
    """Largest number of sequences decoded together; a waiting sequence takes the slot of a finished one."""

    @property
    def max_running(self) -> int | None:
        return self.max_batch_size

    @property
    def returns_routes(self) -> bool:
        return True

    def build(self, setup: EngineSetup) -> Engine:
        from rollout.torch.engine import TorchEngine

        return TorchEngine(
            self, index=setup.index, device=setup.device, num_threads=setup.num_threads, adapter=setup.adapter
        )
