"""The requests that an engine in this process is serving: responses so far, and a queue for slots."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.engine import aborted, whole_response
from rollout.routes import Routes, joined
from rollout.supports import supports_of
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

Model = TypeVar("Model")
"""What a batch samples with."""


@dataclass(kw_only=True, slots=True)
class Response:
    """A request that is being served, and its response so far. R: response tokens."""

    ticket: int
    request: GenerateRequest
    taken_up: float
    """Time of its admission, time.monotonic()."""
    tokens: list[int]
    """[R] response tokens so far, resumed tokens included."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probs of the tokens sampled here, the last ones of `tokens`."""
    versions: list[int] = field(default_factory=list)
    """Policy versions of the tokens sampled here."""
    supports: list[NDArray[np.int32]] = field(default_factory=list)
    """Supports of the tokens sampled here, if the request asks for them."""
    routes: list[Routes] = field(default_factory=list)
    """Routes of the tokens from `request.first_new_route` on, if they are asked for; the first may be shared."""
    shared_tokens: int = 0
    """Tokens of its prompt, if they were read for another sequence."""

    def known_routes(self) -> Routes:
        """Routes of the tokens from which those of the response so far were predicted."""
        return joined([*self.routes[:1], joined(self.routes[1:]).merged()]).first(
            self.length - 1 - self.request.first_new_route
        )

    @property
    def text(self) -> list[int]:
        """Prompt and response so far."""
        return self.request.prompt_token_ids + self.tokens

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response so far."""
        return len(self.request.prompt_token_ids) + len(self.tokens)

    def finish_reason(self) -> FinishReason | None:
        """Reason why the response is complete; None if it is not."""
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.stop
        return FinishReason.length if len(self.tokens) >= sampling.max_new_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        """The response so far as an answer to the request."""
        first = len(self.tokens) - len(self.versions)
        rest = Generation(
            token_ids=self.tokens[first:],
            logprobs=self.logprobs,
            token_versions=self.versions,
            finish_reason=reason,
            shared_prompt_tokens=self.shared_tokens,
            supports=supports_of(self.supports) if self.request.sampling.with_supports else None,
            routes=self.known_routes() if self.request.sampling.with_routes else None,
        )
        return Completion(self.ticket, whole_response(self.request, rest))


class Batch(ABC, Generic[Model]):
    """The responses that are sampled together, and the requests that wait for a slot.

    Only the thread of `rollout/embedded/sampling_loop.py` calls it, under `torch.inference_mode()`.
    """

    def __init__(self, model: Model, *, num_slots: int, policy_version: int) -> None:
        """At most `num_slots` responses are sampled together."""
        self._model = model
        self._num_slots = num_slots
        self._version = policy_version
        self._waiting: dict[int, GenerateRequest] = {}

    @property
    @abstractmethod
    def active(self) -> Collection[Response]:
        """Responses that have a slot."""

    @property
    def num_active(self) -> int:
        return len(self.active)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> tuple[float, GenerateRequest] | None:
        """(time.monotonic() of the admission, request) of what has been sampled for the longest time."""
        first = min(self.active, key=lambda response: response.taken_up, default=None)
        return None if first is None else (first.taken_up, first.request)

    def add(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Append requests to the queue for a slot."""
        self._waiting.update(zip(tickets, requests, strict=True))

    def abort(self, tickets: Collection[int] | None) -> list[Completion]:
        """End the unfinished requests among `tickets`, None for all; returns their tokens so far."""
        completions: list[Completion] = []
        for ticket in [ticket for ticket in self._waiting if tickets is None or ticket in tickets]:
            completions.append(Completion(ticket, aborted(self._waiting.pop(ticket))))
        ended = [each for each in self.active if tickets is None or each.ticket in tickets]
        completions += [each.completion(FinishReason.abort) for each in ended]
        self._release(ended)
        return completions

    def _next(self, count: int) -> Iterator[Response]:
        """Take the next `count` requests out of the queue."""
        now = time.monotonic()
        for ticket in list(islice(self._waiting, count)):
            request = self._waiting.pop(ticket)
            begun = [] if request.resumed is None else list(request.resumed.token_ids)
            yield Response(ticket=ticket, request=request, taken_up=now, tokens=begun)

    @abstractmethod
    def advance(self) -> list[Completion]:
        """Sample a token for every response that has a slot; returns the responses that ended with it."""

    @abstractmethod
    def renew(self, model: Model, policy_version: int) -> None:
        """Continue with other weights: every response is read again with them, and keeps its log-probs so far."""

    @abstractmethod
    def _release(self, ended: Sequence[Response]) -> None:
        """Free the slots of responses that have ended."""
