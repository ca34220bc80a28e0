"""The Engine protocol: what a rollout worker can ask of an engine, whatever samples the tokens behind it.

`rollout/sglang/engine.py` (a real SGLang server over HTTP) and `rollout/torch_engine.py` (embedded transformers)
implement it; `rollout/worker.py` hosts one of them in a Ray actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout.types import GenerateRequest, Generation, WeightBucket


@dataclass(kw_only=True, slots=True)
class EngineInfo:
    """What an engine says about itself once it is ready."""

    name: str
    """"sglang 0.5.23" or "torch 2.13.0"."""
    address: str
    """URL of the server, or "embedded"."""
    pids: tuple[int, ...]
    """Processes that must be gone after stop()."""
    start_s: float
    """Seconds from start() to ready."""


@dataclass(kw_only=True, slots=True)
class WeightReport:
    """The receipt of a weight sync: what the engine holds after it."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    load_s: float
    """Seconds in which the engine took the weights over."""
    verify_s: float
    """Seconds in which digests were computed and compared."""
    in_place: bool = False
    """Whether the engine goes on using the memory of the buckets; until the next sync it must not change."""


class EngineError(RuntimeError):
    """An engine failed: the message names engine, phase, policy version, what happened and its last log lines."""


class WeightSyncError(EngineError):
    """The engine does not hold the weights that were sent: names the tensor, both digests and both versions."""


class Engine(Protocol):
    """One rollout engine. Every call has a deadline and raises EngineError when it passes."""

    def start(self, model_path: Path) -> EngineInfo:
        """Load the model's architecture, tokenizer ids and initial weights; return when generate() may be called."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Sample one response per request, in the order of the requests."""
        ...

    def load_weights(self, buckets: Sequence[WeightBucket]) -> WeightReport:
        """Replace all weights, drop every cache derived from the old ones, verify digests, set the version.

        Raises WeightSyncError naming the tensor if a digest, a name or the version disagrees.
        """
        ...

    def sleep(self) -> None:
        """Give the GPU's memory back; safe to call twice. Weights may be lost: load them again after `wake`."""
        ...

    def wake(self) -> None:
        """Take memory for the weights again; safe to call twice. The next `load_weights` takes that of the cache."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine holds, as the engine itself reports it."""
        ...

    def stop(self) -> None:
        """End every process and free every resource; safe to call twice."""
        ...
