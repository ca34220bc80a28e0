"""Configuration of the embedded engine, `rollout=torch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rollout.embedded.config import EmbeddedConfig

if TYPE_CHECKING:
    from rollout.engine import Engine, EngineSetup


@dataclass(kw_only=True, slots=True)
class TorchEngineConfig(EmbeddedConfig):
    """The embedded engine: transformers in the worker's process, no server. Deterministic; the reference in tests."""

    kind: ClassVar[str] = "torch"

    def build(self, setup: EngineSetup) -> Engine:
        from rollout.torch.engine import TorchEngine

        return TorchEngine(
            self, index=setup.index, device=setup.device, num_threads=setup.num_threads, adapter=setup.adapter
        )
