"""What the engine group knows of each of its engines; `rollout/group/engine_group.py` decides by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import ray
from ray.actor import ActorHandle

from rollout.engine import WeightReport
from rollout.group.actor_calls import copy_weights
from rollout.processes.process_marks import ProcessMark
from rollout.types import Completion, GenerateRequest, SharedWeights


class Health(Enum):
    """What an engine can be used for."""

    starting = "starting"
    """Its process starts and loads the model; it holds no weights of the run."""
    stale = "stale"
    """It loads the weights that were published last: until they are verified it samples nothing."""
    serving = "serving"
    retired = "retired"
    """It was lost more often than rollout.max_restarts."""


class Way(Enum):
    """How weights reach an engine."""

    mapped = "shared memory"
    """It is on the machine of rank 0."""
    broadcast = "broadcast"
    """One worker of its machine was sent them for all engines there."""
    copied = "Ray objects"
    """It joined later than the broadcast, or there was none."""


@dataclass(kw_only=True, slots=True)
class Member:
    """One engine of the group."""

    index: int
    node: str
    """Ray node id."""
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
    way: Way = Way.mapped
    """How those came."""
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

    def take(self, answer: Sequence[Completion]) -> list[Completion]:
        """What of an answer to `poll` is still waited for: another engine may have been faster."""
        taken = [completion for completion in answer if completion.ticket in self.held]
        self.forget({completion.ticket for completion in taken})
        return taken

    def forget(self, tickets: set[int]) -> None:
        """Nobody waits for these here any more."""
        self.held = {ticket: request for ticket, request in self.held.items() if ticket not in tickets}
        self.aborting -= tickets


@dataclass(frozen=True, kw_only=True)
class Published:
    """The weights that were published last."""

    shared: SharedWeights
    node: str
    """Ray node where they lie in memory."""
    received: Mapping[str, SharedWeights]
    """Where a broadcast has put them on other nodes, by node."""

    @cached_property
    def copies(self) -> ray.ObjectRef[Any]:
        """Copies, a list of WeightBucket in the object store: made when the first engine needs them."""
        return copy_weights(self.shared, node=self.node)

    def for_engine(self, member: Member) -> tuple[Way, SharedWeights | ray.ObjectRef[Any]]:
        """How the weights reach an engine, and what its worker is sent: where they lie on its machine, or copies."""
        if member.node == self.node:
            return Way.mapped, self.shared
        there = self.received.get(member.node)
        # The worker that received them may be the one that was lost, and its memory with it.
        if there is None or member.health is not Health.serving:
            return Way.copied, self.copies
        return Way.broadcast, there
