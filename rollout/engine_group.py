"""EngineGroup: a typed handle over the rollout workers. Splits requests, fans out weights, keeps every deadline.

The only file of `rollout/` that talks to Ray actors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rollout.engine import POLL_S, EngineError, EngineInfo, WeightReport
from rollout.process_memory import MemoryUse
from rollout.residency import Turns
from rollout.types import Completion, GenerateRequest, Generation, SharedWeights

logger = logging.getLogger(__name__)

GRACE_S = 15.0
"""Seconds that a group waits longer than its worker, so that the worker's own, better error arrives first."""


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time; names phase, worker and cause."""


def gather(refs: Sequence[ray.ObjectRef[Any]], *, names: Sequence[str], phase: str, deadline_s: float) -> list[Any]:
    """Results of `refs` in order; raises at the first failure, without waiting for the others.

    Waiting for all would hide the cause: when one FSDP rank dies, the others hang in a collective.
    Raises EngineError as the worker raised it, WorkerError for everything else.
    """
    pending = {ref: position for position, ref in enumerate(refs)}
    results: list[Any] = [None] * len(refs)
    deadline = time.monotonic() + deadline_s
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            silent = ", ".join(names[position] for position in pending.values())
            raise WorkerError(f"phase {phase}: no answer from {silent} within {deadline_s:.0f} s")
        for ref in done:
            position = pending.pop(ref)
            try:
                results[position] = ray.get(ref)
            except RayTaskError as error:
                if isinstance(error.cause, EngineError):
                    raise error.cause from error
                raise WorkerError(
                    f"phase {phase}: {names[position]} raised {type(error.cause).__name__}: {error.cause}"
                ) from error
            except RayActorError as error:
                raise WorkerError(f"phase {phase}: {names[position]} died: {error}") from error
            except RayError as error:
                kind = type(error).__name__
                raise WorkerError(f"phase {phase}: {names[position]} could not answer: {kind}: {error}") from error
    return results


def stop_workers(workers: Sequence[ActorHandle[Any]], *, names: Sequence[str]) -> None:
    """Ask every worker to stop, log those that could not, and kill all of them; takes at most GRACE_S."""
    refs: list[ray.ObjectRef[Any]] = [worker.stop.remote() for worker in workers]
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=GRACE_S)
    for ref, name in zip(refs, names, strict=True):
        if ref not in done:
            logger.warning("%s did not stop within %.0f s and is killed", name, GRACE_S)
            continue
        try:
            ray.get(ref)
        except RayActorError:
            logger.debug("%s was gone before it was asked to stop", name)
        except RayError as error:
            logger.warning("%s stopped with an error: %s", name, error)
    for worker in workers:
        ray.kill(worker)


def load_of(request: GenerateRequest) -> int:
    """Tokens that are still to be sampled at most."""
    begun = 0 if request.resumed is None else len(request.resumed.token_ids)
    return request.sampling.max_new_tokens - begun


def split_by_load(
    requests: Sequence[GenerateRequest], num_parts: int, *, loads: Sequence[int] | None = None
) -> list[list[int]]:
    """Indices of `requests` for each of `num_parts` engines, which have `loads` tokens to sample already.

    The requests of one prompt stay together (they share a prefix); the heaviest group goes to the lightest
    engine, counting prompt tokens once and response tokens at their bound.
    """
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.prompt_id, []).append(index)

    def load(indices: list[int]) -> int:
        return len(requests[indices[0]].prompt_token_ids) + sum(load_of(requests[i]) for i in indices)

    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = list(loads or [0] * num_parts)
    for indices in sorted(groups.values(), key=lambda indices: (-load(indices), indices[0])):
        part = min(range(num_parts), key=lambda p: (loads[p], p))
        parts[part].extend(indices)
        loads[part] += load(indices)
    return [sorted(part) for part in parts]


def split_by_kind(requests: Sequence[GenerateRequest], loads: Sequence[int], *, num_quantized: int) -> list[list[int]]:
    """Like `split_by_load`, with each group divided between the first `num_quantized` engines and the others.

    Sample i of n is for a quantised engine if the count floor(i * num_quantized / engines) rises with it: every group
    is divided alike, in proportion to the engines, the first sample goes to a plain engine, and a resumed response
    goes to the kind that began it.
    """
    kinds: dict[bool, list[int]] = {True: [], False: []}
    for index, request in enumerate(requests):
        before, after = (at * num_quantized // len(loads) for at in (request.sample_index, request.sample_index + 1))
        kinds[after > before].append(index)
    parts: list[list[int]] = []
    for kind, taken in ((True, loads[:num_quantized]), (False, loads[num_quantized:])):
        split = split_by_load([requests[index] for index in kinds[kind]], len(taken), loads=taken) if taken else []
        parts += [[kinds[kind][position] for position in part] for part in split]
    return parts


class EngineGroup:
    """All rollout engines as one. Every method returns when all engines have answered, or raises."""

    def __init__(
        self,
        workers: Sequence[ActorHandle[Any]],
        *,
        nodes: Sequence[str],
        start_timeout_s: float,
        generate_timeout_s: float,
        sync_timeout_s: float,
        num_quantized: int = 0,
        turns: Turns | None = None,
    ) -> None:
        """`nodes` are the Ray node ids of the workers; `turns` is shared with whoever is on the same GPUs.

        The first `num_quantized` engines hold quantised weights.
        """
        self._workers = list(workers)
        self._nodes = list(nodes)
        self._num_quantized = num_quantized
        self._names = [f"engine {index}" for index in range(len(self._workers))]
        self._starting = [worker.start.remote() for worker in self._workers]
        self._start_timeout_s = start_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._sync_timeout_s = sync_timeout_s
        self._turns = turns or Turns()
        self._next_ticket = 0
        self._held: list[dict[int, GenerateRequest]] = [{} for _ in self._workers]
        """By engine: the requests that it has not answered yet, by ticket."""
        self._polls: dict[ray.ObjectRef[Any], int] = {}
        """Polls that have not been answered yet, and whose they are; one per engine at most."""
        self._early: list[Completion] = []
        """Answers that came while `generate` waited for others."""

    def __len__(self) -> int:
        return len(self._workers)

    def wait_ready(self) -> list[EngineInfo]:
        """Return when every engine is ready; they began to start when the group was made."""
        return self._gather(self._starting, phase="engine start", deadline_s=self._start_timeout_s)

    @property
    def unfinished(self) -> int:
        """Tickets that `poll` has not returned yet."""
        return sum(map(len, self._held)) + len(self._early)

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Queue requests, spread over the engines; a ticket for each, unique in the run.

        Where some engines are quantised and others not, every prompt goes to both kinds.
        """
        tickets = list(range(self._next_ticket, self._next_ticket + len(requests)))
        self._next_ticket += len(requests)
        loads = [sum(map(load_of, held.values())) for held in self._held]
        parts = split_by_kind(requests, loads, num_quantized=self._num_quantized)
        refs: list[ray.ObjectRef[Any]] = []
        names: list[str] = []
        for worker, name, held, part in zip(self._workers, self._names, self._held, parts, strict=True):
            if part:
                given = {tickets[index]: requests[index] for index in part}
                refs.append(worker.submit.remote(list(given), list(given.values())))
                names.append(name)
                held.update(given)
        gather(refs, names=names, phase="generate", deadline_s=self._generate_timeout_s + GRACE_S)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """What has ended on any engine since the last poll; waits at most `timeout_s` for the first."""
        early, self._early = self._early, []
        return early or self._poll_engines(timeout_s)

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished requests among `tickets`, None for all; `poll` returns what they have so far."""
        for worker, held in zip(self._workers, self._held, strict=True):
            if mine := [ticket for ticket in held if tickets is None or ticket in tickets]:
                worker.abort.remote(mine)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in the order of the requests, spread over the engines."""
        waited = dict.fromkeys(self.submit(requests))
        answers: dict[int, Generation] = {}
        deadline = time.monotonic() + self._generate_timeout_s + 2 * GRACE_S
        while len(answers) < len(waited):
            if time.monotonic() > deadline:
                silent = ", ".join(name for name, held in zip(self._names, self._held, strict=True) if held)
                raise WorkerError(f"phase generate: no answer from {silent} within {self._generate_timeout_s:.0f} s")
            for completion in self._poll_engines(POLL_S):
                if completion.ticket in waited:
                    answers[completion.ticket] = completion.generation
                else:
                    self._early.append(completion)
        return [answers[ticket] for ticket in waited]

    def _poll_engines(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        completions: list[Completion] = []
        while not completions:
            asked = set(self._polls.values())
            for index, held in enumerate(self._held):
                if held and index not in asked:
                    self._polls[self._workers[index].poll.remote(POLL_S)] = index
            # One that is ready wakes us; then all that are, so that no engine waits behind another.
            remaining_s = max(0.0, deadline - time.monotonic())
            if not self._polls or not ray.wait(list(self._polls), num_returns=1, timeout=remaining_s)[0]:
                break
            for ref in ray.wait(list(self._polls), num_returns=len(self._polls), timeout=0)[0]:
                index = self._polls.pop(ref)
                [answer] = gather([ref], names=[self._names[index]], phase="generate", deadline_s=GRACE_S)
                completions += answer
                for completion in answer:
                    completion.generation.quantized = index < self._num_quantized
                    del self._held[index][completion.ticket]
        return completions

    @property
    def kinds(self) -> list[bool]:
        """Which weights the engines take: quantised (True), plain (False), or both."""
        return [True] * (self._num_quantized > 0) + [False] * (self._num_quantized < len(self))

    def num_of(self, quantized: bool) -> int:
        """Engines of a kind."""
        return self._num_quantized if quantized else len(self) - self._num_quantized

    def num_on(self, node: str, *, quantized: bool) -> int:
        """Engines of a kind on a Ray node."""
        return sum(place == node and kind == quantized for place, kind in self._places())

    def load_weights(
        self, shared: Mapping[bool, SharedWeights], *, node: str, copies: Mapping[bool, ray.ObjectRef[Any]]
    ) -> list[WeightReport]:
        """Give every engine the weights of its kind (see `kinds`); each verifies what it then holds.

        Engines on `node` map `shared`; the others are sent `copies`, references to lists of WeightBucket.
        """
        refs = [
            worker.load_weights.remote(shared[kind] if place == node else copies[kind])
            for worker, (place, kind) in zip(self._workers, self._places(), strict=True)
        ]
        return self._gather(refs, phase="weight sync", deadline_s=self._sync_timeout_s)

    @property
    def takes_turns(self) -> bool:
        """Whether the engines leave their GPUs, and lose their weights, while somebody else is resident."""
        return self._turns.are_taken

    def _places(self) -> list[tuple[str, bool]]:
        """Node and kind of every engine."""
        return [(place, index < self._num_quantized) for index, place in enumerate(self._nodes)]

    def resident(self) -> AbstractContextManager[None]:
        """Have the engines on their GPUs for the block; after a sleep they need weights before they can sample."""
        return self._turns.resident(self)

    def sleep(self) -> None:
        """For `Turns` only: give the GPUs' memory back."""
        refs = [worker.sleep.remote() for worker in self._workers]
        self._gather(refs, phase="engine sleep", deadline_s=self._sync_timeout_s)

    def wake(self) -> None:
        """For `Turns` only: take memory for the weights; `load_weights` takes that of the caches."""
        refs = [worker.wake.remote() for worker in self._workers]
        self._gather(refs, phase="engine wake", deadline_s=self._sync_timeout_s)

    def policy_versions(self) -> list[int]:
        """Version of the weights that each engine says it holds."""
        refs = [worker.policy_version.remote() for worker in self._workers]
        return self._gather(refs, phase="weight version", deadline_s=self._sync_timeout_s)

    def memory(self) -> list[MemoryUse]:
        """What each engine holds, its server's processes included."""
        refs = [worker.memory.remote() for worker in self._workers]
        return self._gather(refs, phase="engine memory", deadline_s=self._sync_timeout_s)

    def stop(self) -> None:
        """Stop every engine; an engine that does not answer is killed with its worker."""
        stop_workers(self._workers, names=self._names)

    def _gather(self, refs: Sequence[ray.ObjectRef[Any]], *, phase: str, deadline_s: float) -> list[Any]:
        return gather(refs, names=self._names, phase=phase, deadline_s=deadline_s + GRACE_S)
