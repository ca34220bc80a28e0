"""Dispatcher: pending groups -> engines -> samples -> rewards, each response by itself as it ends.

`rollout/collect/collector.py` decides which groups are submitted and which are kept. Engines have the requests of a
whole round and more in their queues, and rewards are computed in their own processes: neither waits for the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from rollout.collect.collect_stats import CollectStats, Served
from rollout.collect.filters import invalid_reason
from rollout.collect.pending import PendingGroup, PendingResponse
from rollout.collect.requests import SeedSource, make_sample
from rollout.rewards import Scorer
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

POLL_S = 1.0
"""Seconds of waiting per poll, where only engines, or only rewards, are expected."""
TURN_S = 0.02
"""Seconds of waiting per poll of the engines, where engines and rewards are expected."""


class Sampler(Protocol):
    """An object that answers generate requests: the engine group, or one engine."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in the order of the requests."""
        ...

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Queue requests and return at once; returns a ticket for each, unique in the run."""
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """The responses that have ended since the last poll, each once; waits at most `timeout_s` for the first."""
        ...

    def abort(self, tickets: Sequence[int] | None) -> None:
        """Stop the unfinished requests among `tickets`; `poll` returns each with its tokens so far."""
        ...

    @property
    def unfinished(self) -> int:
        """Number of tickets that `poll` has not returned yet."""
        ...

    @property
    def abort_timeout_s(self) -> float:
        """Seconds within which `poll` returns every aborted request, engines that must be replaced for it included."""
        ...

    def sampling_s(self) -> float:
        """Seconds that the engines have sampled submitted requests since their start; mean over engines."""
        ...


class Dispatcher:
    """Passes responses between engines, scorer and pending groups."""

    def __init__(self, sampler: Sampler, scorer: Scorer) -> None:
        self._sampler = sampler
        self._scorer = scorer
        self._in_flight: dict[int, tuple[PendingGroup, PendingResponse]] = {}
        """Ticket -> response that an engine is sampling."""
        self._unscored: dict[int, tuple[PendingGroup, PendingResponse]] = {}
        """id() of the sample -> response that is being scored."""
        self._num_scored_groups = 0
        self._engine_version = 0

    def submit(
        self, groups: Iterable[PendingGroup], *, policy_version: int, seeds: SeedSource, stats: CollectStats
    ) -> None:
        """Submit every response that the engines do not have yet; the engines hold weights of `policy_version`.

        A resumed response gets a new seed: the random numbers of its old seed are used up.
        """
        self._engine_version = policy_version
        requested: list[tuple[PendingGroup, PendingResponse]] = []
        for group in groups:
            for response in group.responses:
                if response.generation is not None or response.in_flight:
                    continue
                request, resumed = response.request, response.request.resumed
                if resumed is not None:
                    seed = seeds.draw(request.prompt_id, request.sample_index)
                    response.request = replace(request, sampling=replace(request.sampling, seed=seed))
                    stats.samples_resumed += 1
                    stats.resumed_tokens += len(resumed.token_ids)
                response.in_flight, response.since = True, policy_version
                requested.append((group, response))
        if requested:
            tickets = self._sampler.submit([response.request for _, response in requested])
            self._in_flight.update(zip(tickets, requested, strict=True))

    def look(self, step: int, stats: CollectStats) -> None:
        """Receive finished responses and scored samples; waits at most POLL_S seconds for the first."""
        if self._in_flight:
            for completion in self._sampler.poll(TURN_S if self._unscored else POLL_S):
                if completion.ticket in self._in_flight:
                    self._receive(*self._in_flight.pop(completion.ticket), completion.generation, stats)
        if self._unscored:
            begin = time.monotonic()
            for sample in self._scorer.poll(0.0 if self._in_flight else POLL_S):
                if id(sample) in self._unscored:  # not one that nobody wants any more
                    self._set_done(*self._unscored.pop(id(sample)))
            stats.reward_s += time.monotonic() - begin
        if self._in_flight and not self._sampler.unfinished:
            raise RuntimeError(
                f"step {step}: {len(self._in_flight)} of the responses that were asked for never came back"
            )

    def score(self, group: PendingGroup, response: PendingResponse) -> None:
        """Submit a valid finished response to the scorer."""
        if response.generation is None:
            raise RuntimeError("a response is scored when it has ended")
        response.sample = make_sample(response.request, response.generation)
        self._unscored[id(response.sample)] = group, response
        self._scorer.submit(group.prompt, response.sample)

    def stop(self, groups: Sequence[PendingGroup], *, step: int, stats: CollectStats) -> None:
        """Abort the unfinished responses of `groups`, and wait until the engines return them: dropped, or resumable."""
        stopped = {id(group) for group in groups}
        tickets = [ticket for ticket, (group, _) in self._in_flight.items() if id(group) in stopped]
        self._unscored = {key: each for key, each in self._unscored.items() if not each[0].is_dropped}
        if not tickets:
            return
        for ticket in tickets:
            self._in_flight[ticket][1].is_stopping = True
        self._sampler.abort(tickets)
        timeout_s = self._sampler.abort_timeout_s
        deadline = time.monotonic() + timeout_s
        while any(ticket in self._in_flight for ticket in tickets):
            if time.monotonic() > deadline:
                left = sum(ticket in self._in_flight for ticket in tickets)
                raise RuntimeError(
                    f"step {step}: {left} of {len(tickets)} aborted responses did not come back within "
                    f"{timeout_s:.0f} s. Look at the engine's log."
                )
            self.look(step, stats)

    def _receive(
        self, group: PendingGroup, response: PendingResponse, generation: Generation, stats: CollectStats
    ) -> None:
        """Take in a response that has ended or was stopped."""
        request, stopping = response.request, response.is_stopping
        response.in_flight = response.is_stopping = False
        num_begun = 0 if request.resumed is None else len(request.resumed.token_ids)
        num_new = max(0, generation.num_sampled - num_begun)
        stats.generated_tokens += num_new
        stats.prompt_tokens += len(request.prompt_token_ids)
        stats.shared_prompt_tokens += generation.shared_prompt_tokens
        if not stats.served:
            stats.served.append(Served())
        stats.served[-1].add(request, num_new)
        is_cut = stopping and generation.finish_reason is FinishReason.abort
        stats.samples_aborted += is_cut
        stats.samples_generated += not is_cut
        if group.is_dropped:
            response.generation = generation
            stats.wasted_tokens += num_new  # the rest was counted when the group was dropped
            return
        # A stopped response counts as a truncated one, if its tokens so far are valid.
        judged = replace(generation, finish_reason=FinishReason.length) if is_cut else generation
        reason = invalid_reason(request, judged, policy_version=self._engine_version, oldest_version=response.since)
        if is_cut:
            if reason is None:
                response.request = replace(request, resumed=generation)
            else:
                stats.wasted_tokens += num_new
            return
        response.generation = generation
        stats.seen_versions.update(generation.token_versions[num_begun:])
        if reason is None:
            self.score(group, response)
        else:
            stats.samples_dropped[reason.name] += 1
            self._set_done(group, response)

    def _set_done(self, group: PendingGroup, response: PendingResponse) -> None:
        response.is_done = True
        if group.is_scored:
            group.rank = self._num_scored_groups
            self._num_scored_groups += 1
