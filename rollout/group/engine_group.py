"""EngineGroup: a typed handle over the rollout workers. Spreads requests, sends weights, replaces failed engines.

No other file of `rollout/` calls the rollout workers; see `rollout/group/worker.py` for their methods.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rollout.config import EngineConfig
from rollout.engine import (
    ABORT_TIMEOUT_S,
    POLL_S,
    EngineError,
    EngineInfo,
    WeightReport,
    WeightSyncError,
    aborted,
    given_up,
    wait_for,
)
from rollout.group.actor_calls import (
    GRACE_S,
    LostWorkerError,
    WorkerError,
    WorkerProcess,
    copy_weights,
    gather,
    kill_worker,
    stop_workers,
)
from rollout.group.balance import load_of, split_by_load
from rollout.group.group_member import Health, Member, Published
from rollout.group.residency import SharedGpu
from rollout.group.worker import RELEASE_TIMEOUT_S, LostEngine
from rollout.types import Completion, FinishReason, GenerateRequest, Generation, WeightLayout

logger = logging.getLogger(__name__)

SUSPECT_LOSSES = 2
"""Number of engines that were lost with a request, from which on the request is a suspect: it may be the cause. An
engine holds one suspect at a time, so that the next loss tells who is guilty, and costs no other request its sample."""


class EngineGroup:
    """All rollout engines as one, with restarts of lost engines.

    An engine is lost when its process dies, when it raises, or when it holds requests and does not answer in time.
    The group kills and restarts a lost engine, sends the weights published last, and uses the engine once it has
    verified these weights; the requests of the lost engine go to other engines. A request that three engines were lost
    with is given up: its generation is failed. All of this runs in the caller's own thread, inside the methods.
    """

    def __init__(
        self,
        spawn: Callable[[int], ActorHandle[Any]],
        *,
        nodes: Sequence[str],
        config: EngineConfig,
        shared_gpu: SharedGpu | None = None,
    ) -> None:
        """`spawn` makes the worker of an engine; `nodes` are the Ray node ids of the engines.

        `shared_gpu` is given with the policy if the policy uses the same GPUs.
        """
        self._spawn = spawn
        self._config = config
        self._shared_gpu = shared_gpu or SharedGpu()
        self._members = [self._fresh(index, node) for index, node in enumerate(nodes)]
        self._weights: Published | None = None
        self._base: ray.ObjectRef[Any] | None = None
        """Copy of the frozen weights beside an adapter, once an engine needed one: they stay the same."""
        self._next_ticket = 0
        self._backlog: dict[int, GenerateRequest] = {}
        """Ticket -> request that no engine holds."""
        self._early: list[Completion] = []
        """Completions that the next `poll` returns at once."""
        self._losses: Counter[int] = Counter()
        """Ticket of an unfinished request -> number of engines that were lost with it."""
        self._num_restarts = self._num_redispatched = self._num_given_up = 0
        self._generating_s = 0.0
        """Seconds in which the engines sampled inside `generate`."""

    def __len__(self) -> int:
        return len(self._members)

    def wait_ready(self) -> list[EngineInfo]:
        """Wait until every engine is ready; the engines began to start when the group was created.

        An engine that fails its first start ends the run: a second start would fail in the same way.
        """
        calls = [member.pending_call for member in self._members if member.pending_call is not None]
        names = [member.name for member in self._members]
        started = gather(calls, names=names, phase="engine start", deadline_s=self._config.start_timeout_s + GRACE_S)
        for member, (info, processes) in zip(self._members, started, strict=True):
            member.processes, member.cache_tokens, member.layout = processes, info.cache_tokens, info.layout
            member.pending_call, member.health = None, Health.serving
        return [info for info, _ in started]

    @property
    def unfinished(self) -> int:
        """Number of tickets that `poll` has not returned yet."""
        return sum(len(member.in_flight) for member in self._members) + len(self._backlog) + len(self._early)

    @property
    def num_answers(self) -> int:
        """Number of requests that were answered up to now."""
        return self._next_ticket - self.unfinished

    @property
    def processes(self) -> list[WorkerProcess]:
        """The process of every engine that has started."""
        ready = [member for member in self._members if member.processes]
        return [WorkerProcess(member.name, member.node, member.processes[0]) for member in ready]

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Queue requests, spread over the engines -> one ticket per request, unique in the run.

        Raises WorkerError for a request that can never be served; then no request of the call is sampled.
        """
        tickets = list(range(self._next_ticket, self._next_ticket + len(requests)))
        self._next_ticket += len(requests)
        self._backlog.update(zip(tickets, (request.for_engine() for request in requests), strict=True))
        try:
            self._dispatch()
        except WorkerError:
            self.abort(tickets)
            # Nobody waits for these tickets any more: later answers to them are ignored.
            gone = set(tickets)
            for member in self._members:
                member.forget(gone)
            self._early = [completion for completion in self._early if completion.ticket not in gone]
            raise
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions of all engines since the last poll; waits at most `timeout_s` for the first completion.

        Raises EngineError when no engine is left.
        """
        deadline = time.monotonic() + timeout_s
        while not self._early:
            self._take_back()
            self._dispatch()
            for member in self._serving():
                if member.in_flight and member.pending_call is None:
                    member.pending_call = member.worker.poll.remote(POLL_S)
                    member.polled_at = time.monotonic()
                    member.deadline = member.polled_at + POLL_S + self._config.answer_timeout_s
            self._early += self._wait(deadline - time.monotonic())
            idle = not self._backlog and not any(member.in_flight for member in self._members)
            if idle or time.monotonic() >= deadline:
                break
        completions, self._early = self._early, []
        for completion in completions:
            self._losses.pop(completion.ticket, None)
        return completions

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished requests among `tickets` (None: all requests); `poll` returns their tokens so far."""
        chosen = None if tickets is None else set(tickets)
        for ticket in [ticket for ticket in self._backlog if chosen is None or ticket in chosen]:
            self._early.append(Completion(ticket, aborted(self._backlog.pop(ticket))))
        for member in self._members:
            if mine := [ticket for ticket in member.in_flight if chosen is None or ticket in chosen]:
                member.aborting.update(mine)
                member.abort_due = time.monotonic() + ABORT_TIMEOUT_S + self._config.answer_timeout_s
                member.worker.abort.remote(mine)

    @property
    def abort_timeout_s(self) -> float:
        """Seconds within which `poll` returns every aborted request, engines that must be replaced for it included.

        An engine has ABORT_TIMEOUT_S for the abort, and answer_timeout_s for each of three calls that may be missed one
        after the other: the step during which the abort came, the next poll, and a submit to another engine.
        """
        return ABORT_TIMEOUT_S + 3 * (self._config.answer_timeout_s + GRACE_S)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in the order of the requests, spread over the engines."""
        before_s = self.sampling_s()
        others: list[Completion] = []
        try:
            generations = wait_for(self.submit(requests), self.poll, others=others)
        finally:
            self._early += others
        self._generating_s += self.sampling_s() - before_s
        return generations

    def sampling_s(self) -> float:
        """Seconds since the start in which an engine had unfinished requests, mean over engines; time inside `generate`
        is excluded, because its caller waits anyway."""
        calls = {member.index: member.worker.sampling_s.remote() for member in self._serving()}
        for index, seconds in self._gather(calls, phase="sampling time").items():
            self._members[index].sampled_s = seconds
        sampled_s = sum(member.sampled_before_s + member.sampled_s for member in self._members)
        return sampled_s / len(self._members) - self._generating_s

    @property
    def num_mapped(self) -> int:
        """Number of serving engines that read their weights in memory of their machine."""
        return sum(member.is_mapped for member in self._serving())

    @property
    def nodes(self) -> frozenset[str]:
        """Ray node ids of the engines."""
        return frozenset(member.node for member in self._members)

    def layouts(self) -> tuple[WeightLayout, ...]:
        """The different layouts in which engines hold the weights and digest them."""
        return tuple(dict.fromkeys(member.layout for member in self._members if member.layout is not None))

    def load_weights(self, published: Published) -> dict[int, WeightReport]:
        """Load these weights into every engine, which verifies them -> index of each serving engine -> report.

        A starting engine loads the weights later. Raises WeightSyncError if an engine cannot hold the sent weights.
        """
        self._weights = published
        # An engine that still loads an earlier version continues with this version: otherwise the engine would keep
        # memory in use that the trainer needs for a later version.
        stale = {member.index for member in self._members if member.health is Health.stale}
        self._wait_while(lambda member: member.health is Health.stale)
        calls = {member.index: self._load_call(member) for member in self._serving() if member.index not in stale}
        for index, report in self._gather(calls, phase="weight sync").items():
            self._members[index].report = report
        if not self._serving():
            self._wait_while(lambda member: not self._serving() and member.health is not Health.retired)
        return {member.index: member.report for member in self._serving() if member.report is not None}

    @property
    def takes_turns(self) -> bool:
        """True if the engines leave their GPUs, and lose their weights, while the policy is resident."""
        return self._shared_gpu.is_enabled

    def resident(self) -> AbstractContextManager[None]:
        """Keep the engines on their GPUs for the block; after a sleep they need weights before they can sample."""
        return self._shared_gpu.resident(self)

    def sleep(self) -> None:
        """Free the GPUs' memory; for `SharedGpu` only."""
        self._wait_while(lambda member: member.health in (Health.starting, Health.stale))
        self._all([member.worker.sleep.remote() for member in self._serving()], phase="engine sleep")

    def wake(self) -> None:
        """Allocate memory for the weights, for `SharedGpu` only; `load_weights` allocates the KV caches."""
        self._all([member.worker.wake.remote() for member in self._serving()], phase="engine wake")
        for member in self._members:
            if member.health is Health.starting and member.pending_call is None:
                self._start(member)

    def start_profile(self, directory: Path) -> None:
        """Record what every serving engine computes until `stop_profile`, which writes traces to `directory`."""
        calls = {member.index: member.worker.start_profile.remote(directory) for member in self._serving()}
        self._gather(calls, phase="profile")

    def stop_profile(self) -> None:
        """Write the traces of the engines."""
        calls = {member.index: member.worker.stop_profile.remote() for member in self._serving()}
        self._gather(calls, phase="profile")

    def memory(self) -> dict[int, int]:
        """Index of each serving engine -> private bytes after the last sync, the server's processes included."""
        reports = {member.index: member.report for member in self._serving() if member.report is not None}
        return {index: report.private_bytes for index, report in reports.items() if report.private_bytes is not None}

    def metrics(self) -> dict[str, float | None]:
        """Numbers of restarted engines, of requests moved to another engine, and given up, since the last call."""
        counts: dict[str, float | None] = {
            "rollout/engine_restarts": float(self._num_restarts),
            "rollout/redispatched": float(self._num_redispatched),
            "rollout/given_up": float(self._num_given_up),
        }
        self._num_restarts = self._num_redispatched = self._num_given_up = 0
        return counts

    def stop(self) -> None:
        """Stop every engine; a silent engine is killed with its worker."""
        alive = [member for member in self._members if member.health is not Health.retired]
        stop_workers([member.worker for member in alive], names=[member.name for member in alive])

    def _serving(self) -> list[Member]:
        return [member for member in self._members if member.health is Health.serving]

    def _fresh(self, index: int, node: str, lost: LostEngine | None = None) -> Member:
        """A new engine, which starts at once, or with `wake` if the policy has the GPU that they share."""
        member = Member(index=index, node=node, worker=self._spawn(index), replaces=lost)
        if self._shared_gpu.admits(self):
            self._start(member)
        return member

    def _start(self, member: Member) -> None:
        member.deadline = time.monotonic() + self._config.start_timeout_s + GRACE_S
        if member.replaces is not None:
            member.deadline += RELEASE_TIMEOUT_S
        call: ray.ObjectRef[Any] = member.worker.start.remote(member.replaces)
        member.pending_call = call

    def _load_call(self, member: Member) -> ray.ObjectRef[Any]:
        if self._weights is None:
            raise RuntimeError("weights are loaded after they have been published")
        member.requested_version = self._weights.shared.policy_version
        shared = self._weights.on_machine(member.node)
        member.is_mapped = shared is not None
        if shared is None and self._base is None and (base := self._weights.shared.base) is not None:
            self._base = copy_weights(base, node=self._weights.node)
        copies = (self._weights.copies, self._base) if shared is None else (shared,)
        call: ray.ObjectRef[Any] = member.worker.load_weights.remote(*copies)
        return call

    def _dispatch(self) -> None:
        """Send the backlog to the serving engines, in the order of submission."""
        while parts := self._take_parts(self._serving()):
            calls: dict[int, ray.ObjectRef[Any]] = {}
            for index, part in parts.items():
                member = self._members[index]
                member.in_flight.update(part)
                member.has_queue = True
                calls[index] = member.worker.submit.remote(list(part), list(part.values()))
            # The requests of an engine that is lost meanwhile return to the backlog.
            self._gather(calls, phase="generate", deadline_s=self._config.answer_timeout_s)

    def _take_back(self) -> None:
        """Where an engine has less than half as many requests as another: take back what the other has not begun.

        `_dispatch` spreads it anew. Seeds are the requests' own, so it does not matter which engine serves one. All
        requests are sent at once nevertheless: nobody dispatches while the policy is trained.
        """
        serving = self._serving()
        fewest = min((len(member.in_flight) for member in serving), default=0)
        queued = [member for member in serving if member.has_queue]
        fullest = max(queued, key=lambda member: len(member.in_flight), default=None)
        if self._backlog or fullest is None or len(fullest.in_flight) <= max(1, 2 * fewest):
            return
        call: ray.ObjectRef[Any] = fullest.worker.give_back.remote((len(fullest.in_flight) - fewest) // 2)
        limit_s = self._config.answer_timeout_s
        tickets = self._gather({fullest.index: call}, phase="generate", deadline_s=limit_s).get(fullest.index, [])
        fullest.has_queue = bool(tickets)
        self._backlog |= {ticket: fullest.in_flight[ticket] for ticket in tickets if ticket in fullest.in_flight}
        fullest.forget(set(tickets))

    def _take_parts(self, serving: Sequence[Member]) -> dict[int, dict[int, GenerateRequest]]:
        """Take from the backlog what the engines can hold: index of the engine -> ticket -> request.

        A suspect remains in the backlog until an engine holds no other suspect.
        """
        if not serving:
            return {}
        suspects = [ticket for ticket in sorted(self._backlog) if self._losses[ticket] >= SUSPECT_LOSSES]
        tickets = sorted(self._backlog.keys() - suspects)
        loads = [sum(map(load_of, member.in_flight.values())) for member in serving]
        split = split_by_load([self._backlog[ticket] for ticket in tickets], loads)
        parts = {}
        for member, indices in zip(serving, split, strict=True):
            mine = [tickets[index] for index in indices]
            if suspects and all(self._losses[ticket] < SUSPECT_LOSSES for ticket in member.in_flight):
                mine.append(suspects.pop(0))
            if mine:
                parts[member.index] = {ticket: self._backlog.pop(ticket) for ticket in mine}
        return parts

    def _wait(self, timeout_s: float) -> list[Completion]:
        """Take all ready answers, or wait for the first answer; treat engines with overdue answers as lost."""
        waited = [(member, member.pending_call) for member in self._members if member.pending_call is not None]
        if not waited:
            return []
        until_due_s = min(member.deadline for member, _ in waited) - time.monotonic()
        calls = [call for _, call in waited]
        ray.wait(calls, num_returns=1, timeout=max(0.0, min(timeout_s, until_due_s)))
        # Take all ready answers, so that no engine waits behind another.
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        completions: list[Completion] = []
        for member, call in waited:
            if call in ready:
                completions += self._take_answer(member, call)
            elif time.monotonic() >= member.deadline:
                doing = "poll" if member.health is Health.serving else member.health.value
                self._lose(member, f"phase {doing}: no answer from {member.name} in time")
        return completions

    def _take_answer(self, member: Member, call: ray.ObjectRef[Any]) -> list[Completion]:
        """Take the answer to the `call` of an engine; a starting engine moves to its next state of `Health`."""
        member.pending_call = None
        phase = "generate" if member.health is Health.serving else f"restart, {member.health.value}"
        try:
            [answer] = gather([call], names=[member.name], phase=phase, deadline_s=GRACE_S)
        except (EngineError, WorkerError) as error:
            if isinstance(error, WeightSyncError) and self._is_behind(member):
                self._load(member)
            else:
                self._lose(member, str(error))
            return []
        if member.health is Health.serving:
            for ticket, generation in answer:
                if generation.finish_reason is FinishReason.failed and ticket in member.in_flight:
                    self._note_given_up(member.in_flight[ticket], f"{member.name} refused it, and its log says why")
            taken = member.take(answer)
            if member.aborting and member.polled_at > member.abort_due:
                self._lose(member, f"phase abort: {member.name} did not end {len(member.aborting)} requests in time")
            return taken
        if member.health is Health.starting:
            info, member.processes = answer
            member.cache_tokens, member.layout = info.cache_tokens, info.layout
            self._load(member)
        elif self._is_behind(member):
            self._load(member)
        elif answer.policy_version != member.requested_version:
            cause = f"it was sent policy version {member.requested_version} and reports {answer.policy_version}"
            self._lose(member, f"phase {phase}: {member.name}: {cause}")
        else:
            member.report, member.health = answer, Health.serving
            logger.warning("%s serves again, after restart %d", member.name, member.restarts)
        return []

    def _is_behind(self, member: Member) -> bool:
        """True if newer weights were published since the engine was told to load."""
        return self._weights is not None and self._weights.shared.policy_version != member.requested_version

    def _load(self, member: Member) -> None:
        """Let a new engine load the weights published last; without published weights the engine serves at once."""
        member.health = Health.serving if self._weights is None else Health.stale
        if self._weights is not None:
            member.pending_call = self._load_call(member)
            member.deadline = time.monotonic() + self._config.sync_timeout_s + GRACE_S

    def _wait_while(self, is_waited_for: Callable[[Member], bool]) -> None:
        """Block until no engine matches `is_waited_for`; every state of an engine has its own deadline."""
        while any(map(is_waited_for, self._members)):
            self._early += self._wait(POLL_S)

    def _gather(
        self, calls: Mapping[int, ray.ObjectRef[Any]], *, phase: str, deadline_s: float | None = None
    ) -> dict[int, Any]:
        """Index of the engine -> answer. An engine that dies, fails, or misses the deadline is lost and has no answer.

        The deadline is rollout.sync_timeout_s unless `deadline_s` is given. Raises WeightSyncError if an engine cannot
        hold the sent weights, because the weights of all engines may then be wrong.
        """
        limit_s = (self._config.sync_timeout_s if deadline_s is None else deadline_s) + GRACE_S
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s)
        answers = {}
        for index, call in calls.items():
            member = self._members[index]
            try:
                [answers[index]] = gather([call], names=[member.name], phase=phase, deadline_s=0.0)
            except (EngineError, LostWorkerError) as error:
                if isinstance(error, WeightSyncError):
                    raise
                self._lose(member, str(error))
        return answers

    def _all(self, calls: Sequence[ray.ObjectRef[Any]], *, phase: str) -> None:
        """Wait for all serving engines; raises the first error of an engine."""
        names = [member.name for member in self._serving()]
        gather(calls, names=names, phase=phase, deadline_s=self._config.sync_timeout_s + GRACE_S)

    def _note_given_up(self, request: GenerateRequest, cause: str) -> None:
        self._num_given_up += 1
        logger.warning("the request for prompt %d/%d is given up: %s", request.prompt_id, request.sample_index, cause)

    def _lose(self, member: Member, cause: str) -> None:
        """Kill an engine and start a new engine in its place; the requests that it held return to the backlog.

        At most one of the requests is given up: the suspect.
        """
        logger.warning("%s is lost, with %d requests unfinished: %s", member.name, len(member.in_flight), cause)
        for ticket, request in member.in_flight.items():
            self._losses[ticket] += 1
            if ticket in member.aborting:
                self._early.append(Completion(ticket, aborted(request)))
            elif self._losses[ticket] > SUSPECT_LOSSES:
                self._note_given_up(request, f"{self._losses[ticket]} engines were lost with it")
                self._early.append(Completion(ticket, given_up(request)))
            else:
                self._backlog[ticket] = request
                self._num_redispatched += 1
        kill_worker(member.worker, node=member.node, processes=member.processes)
        if member.restarts < self._config.max_restarts:
            self._num_restarts += 1
            lost = LostEngine(processes=member.processes, cache_tokens=member.cache_tokens)
            fresh = self._fresh(member.index, member.node, lost)
            fresh.restarts, fresh.lost_by, fresh.layout = member.restarts + 1, cause, member.layout
            fresh.sampled_before_s = member.sampled_before_s + member.sampled_s
            self._members[member.index] = fresh
            return
        member.in_flight, member.pending_call = {}, None
        member.health, member.lost_by = Health.retired, cause
        if all(each.health is Health.retired for each in self._members):
            causes = "\n".join(f"{each.name}: {each.lost_by}" for each in self._members)
            raise EngineError(
                f"0 of {len(self._members)} engines are left, each restarted "
                f"rollout.max_restarts={self._config.max_restarts} times:\n{causes}"
            )
