"""Samplers in this process: a real engine behind the protocol of the engine group, and what tests put around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, islice

from rollout.engine import Engine
from rollout.supports import Supports
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

TICKETS = count()
"""Unique over all samplers of a process: an engine may still have what another one asked."""


def cut(request: GenerateRequest, generation: Generation, num_new: int) -> Generation:
    """The answer as it was when `num_new` tokens had been sampled."""
    begun = 0 if request.resumed is None else len(request.resumed.token_ids)
    end = begun + num_new
    assert generation.logprobs is not None
    return Generation(
        token_ids=generation.token_ids[:end],
        logprobs=generation.logprobs[:end],
        token_versions=generation.token_versions[:end],
        finish_reason=FinishReason.abort,
        supports=None if generation.supports is None else first(generation.supports, end),
    )


def first(supports: Supports, count: int) -> Supports:
    """The supports of the first `count` tokens."""
    sizes = supports.sizes[:count]
    return Supports(sizes, supports.token_ids[: sizes.sum()])


class LocalSampler:
    """One engine, without an actor around it."""

    abort_timeout_s = 60.0

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.asked: dict[int, GenerateRequest] = {}
        self._open: set[int] = set()
        self._sampling_s = 0.0

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return self.engine.generate(requests)

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        tickets = list(islice(TICKETS, len(requests)))
        self.asked.update(zip(tickets, requests, strict=True))
        self._open.update(tickets)
        self.engine.submit(tickets, requests)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        begin = time.monotonic()
        found = [each for each in self.engine.poll(timeout_s) if each.ticket in self._open]
        self._open -= {completion.ticket for completion in found}
        self._sampling_s += time.monotonic() - begin
        return found

    def abort(self, tickets: Sequence[int] | None) -> None:
        self.engine.abort(tickets)

    @property
    def unfinished(self) -> int:
        return len(self._open)

    def sampling_s(self) -> float:
        return self._sampling_s


class Recorder(LocalSampler):
    """Remembers what was asked, submission by submission, and what was answered."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rounds: list[list[int]] = []
        """Tickets of every submission."""
        self.answers: dict[int, Generation] = {}

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        tickets = super().submit(requests)
        self.rounds.append(tickets)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        found = super().poll(timeout_s)
        self.answers.update(found)
        return found

    @property
    def requests(self) -> list[GenerateRequest]:
        return [self.asked[ticket] for tickets in self.rounds for ticket in tickets]


class Faulty(LocalSampler):
    """The answers of a real engine, damaged: `damage(position in what was asked, generation)`."""

    def __init__(self, engine: Engine, damage: Callable[[int, Generation], Generation]) -> None:
        super().__init__(engine)
        self._damage = damage

    def poll(self, timeout_s: float) -> list[Completion]:
        first = next(iter(self.asked), 0)
        return [Completion(ticket, self._damage(ticket - first, each)) for ticket, each in super().poll(timeout_s)]


class Shuffled(LocalSampler):
    """Gives the answers of a real engine back one by one, in an order of the test's choice, abortable until then."""

    def __init__(self, engine: Engine, order: Callable[[list[int]], int], *, tokens_at_abort: int = 2) -> None:
        """`order(open tickets)` says which one ends next; what is aborted has `tokens_at_abort` new tokens at most."""
        super().__init__(engine)
        self._order = order
        self._tokens_at_abort = tokens_at_abort
        self.version = 0
        """Of new tokens, whatever the engine says: a sync without weights."""
        self.waits_for: Callable[[], object] | None = None
        """Nothing ends while this is true: so that every reward is there before the next response."""
        self._ready: dict[int, Generation] = {}
        self._aborted: list[Completion] = []

    def poll(self, timeout_s: float) -> list[Completion]:
        if self.waits_for is not None and self.waits_for():
            time.sleep(0.001)
            return []
        while len(self._ready) + len(self._aborted) < self.unfinished:
            for ticket, generation in self.engine.poll(timeout_s):
                if ticket not in self._open:
                    continue  # of a sampler that was given up
                begun = self.asked[ticket].resumed
                old = [] if begun is None else begun.token_versions
                new = len(generation.token_ids) - len(old)
                self._ready[ticket] = replace(generation, token_versions=old + [self.version] * new)
        found, self._aborted = self._aborted, []
        if self._ready and not found:
            ticket = self._order(sorted(self._ready))
            found = [Completion(ticket, self._ready.pop(ticket))]
        self._open -= {completion.ticket for completion in found}
        return found

    def abort(self, tickets: Sequence[int] | None) -> None:
        for ticket in list(self._ready) if tickets is None else tickets:
            if ticket in self._ready:
                part = cut(self.asked[ticket], self._ready.pop(ticket), self._tokens_at_abort)
                self._aborted.append(Completion(ticket, part))
