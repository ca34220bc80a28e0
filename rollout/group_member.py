"""What the engine group knows of each of its engines; `rollout/engine_group.py` decides by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray
from ray.actor import ActorHandle

from rollout.engine import WeightReport
from rollout.processes import ProcessMark
from rollout.types import GenerateRequest


class Health(Enum):
    """What an engine can be used for."""

    starting = "starting"
    """Its process starts and loads the model; it holds no weights of the run."""
    stale = "stale"
    """It loads the weights that were published last: until they are verified it samples nothing."""
    serving = "serving"
    retired = "retired"
    """It was lost more often than rollout.max_restarts."""


@dataclass(kw_only=True, slots=True)
class Member:
    """One engine of the group."""

    index: int
    node: str
    """Ray node id."""
    quantized: bool
    """Which weights it takes."""
    worker: ActorHandle[Any]
    call: ray.ObjectRef[Any] | None
    """The answer that is waited for: to `start`, `load_weights` or `poll`, as `health` says."""
    due: float
    """time.monotonic() at which a missing answer to `call` means that the engine is lost."""
    health: Health = Health.starting
    held: dict[int, GenerateRequest] = field(default_factory=dict)
    """What it has not answered yet, by ticket."""
    aborting: set[int] = field(default_factory=set)
    """Those that it was told to end."""
    processes: tuple[ProcessMark, ...] = ()
    asked: int = -1
    """Policy version of the weights that it was last told to load."""
    report: WeightReport | None = None
    sampled_s: float = 0.0
    """Seconds in which it sampled, as it said last."""
    sampled_before_s: float = 0.0
    """Those of the engines that it replaces."""
    restarts: int = 0
    lost_by: str = ""
    """Why it was lost the last time."""

    @property
    def name(self) -> str:
        return f"engine {self.index}"
