"""One running episode: its sampled and observed tokens so far, and its next request.

`rollout/episodes/sampler.py` keeps the record, out of reach of the rollout function.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from rollout import routes
from rollout.routes import Routes
from rollout.supports import Supports, joined, no_supports
from rollout.types import FinishReason, GenerateRequest, Generation
from rollout.user_code.pool import Asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A request of a rollout function for a turn."""

    observed: list[int]
    """Tokens that the model is shown before the turn."""
    stop_token_ids: list[int]
    max_new_tokens: int
    goes_on: bool
    """True if the turn before goes on: a token of `stop_token_ids` did not end it after all."""


def read_wish(question: Any) -> Wish:
    """Raises ValueError or TypeError for what no rollout function can have asked."""
    wish = Wish(**question)
    if type(wish.max_new_tokens) is not int or wish.max_new_tokens < 1 or not are_tokens(wish.stop_token_ids):
        raise ValueError("it is no request for a turn")
    read_observed({"observed": wish.observed})
    return wish


def read_observed(reply: Any) -> list[int]:
    """The tokens that a rollout function has shown at its end. Raises ValueError for anything else."""
    observed = reply.get("observed")
    if not are_tokens(observed):
        raise ValueError("it holds no list of tokens")
    return list(observed)


def are_tokens(values: object) -> bool:
    """True for a list of token ids."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**31 for value in values)


@dataclass(kw_only=True, slots=True)
class RunningEpisode:
    """One episode: its transcript and its request to the engines."""

    ticket: int
    request: GenerateRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    supports: list[Supports] = field(default_factory=list)
    """Supports of the tokens of each turn, and of those that the model was shown, in their order."""
    routes: list[Routes] = field(default_factory=list)
    """Routes of the tokens that were read for each turn first, in their order."""
    num_turns: int = 0
    """Turns that the rollout function has got."""
    shared_prompt_tokens: int = 0
    """Tokens of the prompt that the engine did not compute for the first turn."""
    last: FinishReason = FinishReason.failed
    unseen: list[Generation] = field(default_factory=list)
    """Parts of the last turn, until the rollout function is known to have got it."""
    num_requests: int = 0
    """Requests to the engines so far."""
    asked: Asked | None = None
    """The last request of the rollout function."""
    engine_ticket: int | None = None
    """Ticket of the turn that the engines are sampling; None between turns."""

    @property
    def tokens_left(self) -> int:
        unseen = sum(len(each.token_ids) for each in self.unseen)
        return self.request.sampling.max_new_tokens - len(self.token_ids) - unseen

    @property
    def name(self) -> str:
        return f"prompt {self.request.prompt_id}/{self.request.sample_index}"

    def next_turn(self, wish: Wish) -> GenerateRequest:
        """The request to the engines for the turn that the rollout function asks for with `wish`."""
        request, sampling = self.request, self.request.sampling
        unseen = [token for part in self.unseen for token in part.token_ids]
        self.num_requests += 1
        return replace(
            request,
            prompt_token_ids=[*request.prompt_token_ids, *self.token_ids, *unseen],
            first_route=sum(map(len, self.routes)) + sum(len(part.routes or ()) for part in self.unseen),
            sampling=replace(
                sampling,
                max_new_tokens=min(wish.max_new_tokens, self.tokens_left),
                stop_token_ids=(*sampling.stop_token_ids, *wish.stop_token_ids),
                seed=turn_seed(sampling.seed, self.num_requests - 1),
            ),
        )

    def settle(self, observed: Sequence[int]) -> None:
        """The rollout function has got the last turn, and shows `observed` to the model."""
        self.num_turns += bool(self.unseen)
        for part in self.unseen:
            self.add(part)
        self.unseen = []
        self.observe(observed)

    def add(self, generation: Generation) -> None:
        """Append sampled tokens."""
        self.token_ids += generation.token_ids
        self.token_versions += generation.token_versions
        self.sampled += [True] * len(generation.token_ids)
        self.supports.append(generation.supports_or_empty)
        if generation.routes is not None:
            self.routes.append(generation.routes)
        known = self.logprobs is not None and generation.logprobs is not None
        self.logprobs = [*(self.logprobs or ()), *(generation.logprobs or ())] if known else None
        if self.last is FinishReason.failed:  # the first turn
            shared = generation.shared_prompt_tokens
            self.shared_prompt_tokens = min(shared, len(self.request.prompt_token_ids))
        self.last = generation.finish_reason

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model is shown: no log-prob, and the version of the previous token."""
        shown = token_ids[: self.tokens_left]
        self.token_ids += shown
        self.token_versions += [self.token_versions[-1] if self.token_versions else 0] * len(shown)
        self.sampled += [False] * len(shown)
        self.supports.append(no_supports(len(shown)))
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(shown)

    def generation(self, reason: FinishReason) -> Generation:
        """The transcript. Tokens observed before the first turn have the version of that turn."""
        first = self.sampled.index(True) if True in self.sampled else 0
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            token_versions=self.token_versions[first : first + 1] * first + self.token_versions[first:],
            finish_reason=reason,
            sampled=self.sampled,
            shared_prompt_tokens=self.shared_prompt_tokens,
            supports=joined(self.supports) if self.request.sampling.with_supports else None,
            routes=routes.joined(self.routes) if self.request.sampling.with_routes else None,
        )


def turn_seed(seed: int, number: int) -> int:
    """Sampling seed of a request of an episode, in [0, 2**31): `seed` for number 0, then hashes of it."""
    if number == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<2q", seed, number)) & 0x7FFFFFFF
