"""State of each engine of an engine group, read and changed by `rollout/group/engine_group.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


class Transport(Enum):
    """Transport by which weights reach an engine."""

    mapped = "shared memory"
    """A rank on the engine's machine published the weights in shared memory, which the engine maps."""
    broadcast = "broadcast"
    """One worker of the engine's machine received the weights for all engines of the machine."""
    copied = "Ray objects"
    """The engine receives copies, because it joined after the broadcast or there was no broadcast."""


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
    transport: Transport = Transport.mapped
    """Transport of the weights that the engine was last told to load."""
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
    received: Mapping[str, SharedWeights] = field(default_factory=dict)
    """Ray node id -> weights that a broadcast stored in the memory of that node."""

    @cached_property
    def copies(self) -> ray.ObjectRef[Any]:
        """The weights in the object store, as PackedWeights; copied when an engine first needs a copy."""
        return copy_weights(self.shared, node=self.node)

    def for_engine(self, member: Member) -> tuple[Transport, SharedWeights | ray.ObjectRef[Any]]:
        """(transport, argument for the worker) for an engine: weights in the memory of its machine, or copies."""
        if member.node == self.node:
            return Transport.mapped, self.shared
        if member.node in self.by_ranks:
            return Transport.mapped, self.by_ranks[member.node]
        there = self.received.get(member.node)
        # The lost worker of this engine may be the receiver, and the received weights are lost with its memory.
        if there is None or member.health is not Health.serving:
            return Transport.copied, self.copies
        return Transport.broadcast, there
