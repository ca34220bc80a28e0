"""State of each engine of an engine group, read and changed by `rollout/group/engine_group.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import ray
from ray.actor import ActorHandle

from rollout.engine import WeightReport
from rollout.group.actor_calls import copy_weights
from rollout.group.worker import LostEngine
from rollout.processes.process_marks import ProcessMark
from rollout.types import Completion, GenerateRequest, SharedWeights, WeightLayout


class Health(Enum):
    """State of an engine in the group."""

    starting = "starting"
    """The engine's process starts and loads the model, or waits to until the policy has left the GPU that they share;
    the engine holds no weights of the run."""
    stale = "stale"
    """The engine loads the weights published last, and samples nothing before these weights are verified."""
    serving = "serving"
    retired = "retired"
    """The engine was lost more often than rollout.max_restarts and is not restarted."""


@dataclass(kw_only=True, slots=True)
class Member:
    """One engine of the group."""

    index: int
    node: str
    """Ray node id of the worker."""
    worker: ActorHandle[Any]
    replaces: LostEngine | None = None
    """The lost engine in whose place it is; None for the first."""
    pending_call: ray.ObjectRef[Any] | None = None
    """Pending call: `start`, `load_weights` or `poll`, depending on `health`; None without a pending call."""
    deadline: float = math.inf
    """time.monotonic() at which a missing answer to `pending_call` means that the engine is lost."""
    health: Health = Health.starting
    in_flight: dict[int, GenerateRequest] = field(default_factory=dict)
    """Ticket -> request that the engine has not answered yet."""
    has_queue: bool = False
    """False if the engine has begun all of `in_flight`, as far as is known."""
    aborting: set[int] = field(default_factory=set)
    """Tickets of the requests in flight that the engine was told to abort."""
    abort_due: float = 0.0
    """time.monotonic() at which a poll begins that must return all of `aborting`, or the engine is lost."""
    polled_at: float = 0.0
    """time.monotonic() of the last poll."""
    processes: tuple[ProcessMark, ...] = ()
    requested_version: int = -1
    """Policy version of the weights that the engine was last told to load; -1 before the first."""
    cache_tokens: int | None = None
    """EngineInfo.cache_tokens of the engine; None before it is ready."""
    layout: WeightLayout | None = None
    """EngineInfo.layout of the engine, or of the one that it replaces."""
    is_mapped: bool = True
    """True if the weights that the engine was last told to load lie in memory of its machine, where a rank wrote them;
    False for copies."""
    report: WeightReport | None = None
    sampled_s: float = 0.0
    """Seconds in which the engine sampled, as last reported by the engine."""
    sampled_before_s: float = 0.0
    """Sampling seconds of the engines that this engine replaced."""
    restarts: int = 0
    lost_by: str = ""
    """Cause of the last loss of the engine; "" if it was never lost."""

    @property
    def name(self) -> str:
        return f"engine {self.index}"

    def take(self, answer: Sequence[Completion]) -> list[Completion]:
        """Completions of a `poll` answer that are still awaited here; another engine may have answered the others."""
        taken = [completion for completion in answer if completion.ticket in self.in_flight]
        self.forget({completion.ticket for completion in taken})
        return taken

    def forget(self, tickets: set[int]) -> None:
        """Remove requests that nobody waits for any more."""
        self.in_flight = {ticket: request for ticket, request in self.in_flight.items() if ticket not in tickets}
        self.aborting -= tickets


@dataclass(frozen=True, kw_only=True)
class Published:
    """The weights published last."""

    shared: SharedWeights
    node: str
    """Ray node id of rank 0, whose machine's memory holds the weights."""
    by_ranks: Mapping[str, SharedWeights] = field(default_factory=dict)
    """Ray node id -> weights that another rank of the policy wrote into the memory of its machine."""

    @cached_property
    def copies(self) -> ray.ObjectRef[Any]:
        """The weights in the object store, as PackedWeights; copied when an engine first needs a copy. The base of an
        adapter is not among them."""
        return copy_weights(replace(self.shared, base=None), node=self.node)

    def on_machine(self, node: str) -> SharedWeights | None:
        """The weights in the memory of a Ray node; None for a node without a rank, whose engines need copies."""
        return self.shared if node == self.node else self.by_ranks.get(node)
