"""One running episode: its sampled and observed tokens so far, its next request, and the process that runs it.

`rollout/episodes/sampler.py` keeps the record, out of reach of the rollout function.
"""

from __future__ import annotations

import queue
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import orjson
import xxhash

from rollout.episodes.child import SEPARATOR
from rollout.episodes.config import EPISODE_MEMORY_BYTES
from rollout.processes.child_process import ChildProcess, ChildStartError
from rollout.supports import Supports, joined, no_supports
from rollout.types import FinishReason, GenerateRequest, Generation

LOAD_S = 60.0
"""Deadline in seconds for a file with a rollout function to be imported before a run."""


class Said(NamedTuple):
    """A message of a worker."""

    worker: EpisodeWorker
    message: dict[str, Any] | None
    """The message as JSON values; None if the worker has ended, or sent what no worker of Parity sends."""


Inbox = queue.SimpleQueue[Said]


class EpisodeWorker(ChildProcess):
    """A process that runs rollout functions; its messages go to a common inbox."""

    def __init__(self, function: str, *, memory_bytes: int, inbox: Inbox) -> None:
        self._inbox = inbox
        self.ready = False
        """True once the worker has loaded its function."""
        self.running: int | None = None
        """Episode whose user code the worker reported last."""
        super().__init__(
            "rollout.episodes.child", function, memory_bytes=memory_bytes, hear=self._hear, unheard=inbox.qsize
        )

    def tell(self, message: dict[str, Any]) -> None:
        """Queue a message for the worker; returns at once."""
        self.say(orjson.dumps(message))

    def _hear(self, line: bytes | None) -> None:
        self._inbox.put(Said(self, None if line is None else read_message(line)))


def try_rollout_function(function: str) -> str:
    """Load `function` in a process of its own, as a run does; the reason why it cannot be used, "" if it can."""
    inbox: Inbox = queue.SimpleQueue()
    try:
        worker = EpisodeWorker(f"{function}{SEPARATOR}", memory_bytes=EPISODE_MEMORY_BYTES, inbox=inbox)
    except ChildStartError as error:
        return str(error)
    try:
        message = inbox.get(timeout=LOAD_S).message
    except queue.Empty:
        return f"it was not loaded within {LOAD_S:g} s"
    finally:
        worker.kill()
    if message is None:
        return f"its process {worker.death().text}"
    return str(message.get("failed", ""))


def read_message(line: bytes) -> dict[str, Any] | None:
    """A worker's line as JSON values in the form that `rollout/episodes/child.py` states; None for any other line."""
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(message, dict):
        return None
    match message:
        case {"ready": True} | {"failed": str()} | {"running": int()}:
            return message
        case {"generate": int(), "observed": observed, "stop_token_ids": stops, "max_new_tokens": int() as limit}:
            return message if limit > 0 and _are_tokens(observed) and _are_tokens(stops) else None
        case {"end": int(), "observed": observed, "error": None | str()}:
            return message if _are_tokens(observed) else None
    return None


def _are_tokens(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**31 for value in values)


@dataclass(kw_only=True, slots=True)
class RunningEpisode:
    """One episode: its transcript, its worker and its request to the engines."""

    ticket: int
    request: GenerateRequest
    worker: EpisodeWorker
    attempt: int
    """Number of this start of the episode, from 1."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    supports: list[Supports] = field(default_factory=list)
    """Supports of the tokens of each turn, and of those that the model was shown, in their order."""
    num_turns: int = 0
    shared_prompt_tokens: int = 0
    """Tokens of the prompt that the engine did not compute for the first turn."""
    last: FinishReason = FinishReason.failed
    engine_ticket: int | None = None
    """Ticket of the turn that the engines are sampling; None between turns."""
    since: float
    """Time (time.monotonic()) at which the rollout function received its last turn."""

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.token_ids)

    @property
    def name(self) -> str:
        return f"prompt {self.request.prompt_id}/{self.request.sample_index}"

    def next_turn(self, wish: Mapping[str, Any]) -> GenerateRequest:
        """The request to the engines for the turn that the rollout function asks for with `wish`."""
        request, sampling = self.request, self.request.sampling
        return replace(
            request,
            prompt_token_ids=[*request.prompt_token_ids, *self.token_ids],
            sampling=replace(
                sampling,
                max_new_tokens=min(wish["max_new_tokens"], self.tokens_left),
                stop_token_ids=(*sampling.stop_token_ids, *wish["stop_token_ids"]),
                seed=turn_seed(sampling.seed, self.num_turns),
            ),
        )

    def add(self, generation: Generation) -> None:
        """Append a sampled turn."""
        self.token_ids += generation.token_ids
        self.token_versions += generation.token_versions
        self.sampled += [True] * len(generation.token_ids)
        self.supports.append(generation.supports_or_empty)
        known = self.logprobs is not None and generation.logprobs is not None
        self.logprobs = [*(self.logprobs or ()), *(generation.logprobs or ())] if known else None
        if self.num_turns == 0:
            shared = generation.shared_prompt_tokens
            self.shared_prompt_tokens = min(shared, len(self.request.prompt_token_ids))
        self.num_turns += 1
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
        )


def turn_seed(seed: int, turn: int) -> int:
    """Sampling seed of a turn, in [0, 2**31): the seed of the request for the first turn, then hashes of it."""
    if turn == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<2q", seed, turn)) & 0x7FFFFFFF
