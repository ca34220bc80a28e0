"""The queue of the Engine protocol over a blocking sampler: `poll` samples everything that waits, then returns it.

Until an engine samples in the background; `rollout/engine.py` states the protocol.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rollout.engine import Engine, continuation, whole_response
from rollout.types import Completion, FinishReason, GenerateRequest, Generation


class QueuedEngine(Engine):
    """Requests wait until they are polled for; none is ever running between two calls."""

    def __init__(self) -> None:
        self._waiting: dict[int, GenerateRequest] = {}
        self._aborted: list[Completion] = []

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        self._check([continuation(request) for request in requests])
        self._waiting.update(zip(tickets, requests, strict=True))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Samples all waiting requests, whatever `timeout_s` is."""
        waiting, self._waiting = self._waiting, {}
        completions, self._aborted = self._aborted, []
        parts = self._sample([continuation(request) for request in waiting.values()])
        for (ticket, request), part in zip(waiting.items(), parts, strict=True):
            completions.append(Completion(ticket, whole_response(request, part)))
        return completions

    def abort(self, tickets: Sequence[int] | None) -> None:
        for ticket in list(self._waiting) if tickets is None else tickets:
            request = self._waiting.pop(ticket, None)
            if request is not None:
                nothing = Generation(token_ids=[], logprobs=[], token_versions=[], finish_reason=FinishReason.abort)
                self._aborted.append(Completion(ticket, whole_response(request, nothing)))

    @abstractmethod
    def _check(self, requests: Sequence[GenerateRequest]) -> None:
        """Raise ValueError for a request that can never be served, EngineError if the engine cannot sample."""

    @abstractmethod
    def _sample(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in their order; none for none."""
