"""The Engine protocol: what a rollout worker can ask of an engine, whatever samples the tokens behind it.

An engine is a generator with a queue: requests are submitted and sampled while the caller does something else, and
polled when they have ended. Weights may be replaced in between; every token carries the version that sampled it.
`rollout/sglang/engine.py` (a real SGLang server over HTTP) and `rollout/torch/engine.py` (embedded transformers)
implement it; `rollout/group/worker.py` hosts one of them in a Ray actor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rollout.types import Completion, FinishReason, GenerateRequest, Generation, WeightBucket

POLL_S = 5.0
"""Seconds of one poll where nothing else is to be done meanwhile."""


@dataclass(kw_only=True, slots=True)
class EngineInfo:
    """What an engine says about itself once it is ready."""

    name: str
    """"sglang 0.5.23" or "torch 2.13.0"."""
    address: str
    """URL of the server, or "embedded"."""
    pids: tuple[int, ...]
    """Processes that must be gone after stop()."""
    start_s: float
    """Seconds from start() to ready."""


@dataclass(kw_only=True, slots=True)
class WeightReport:
    """The receipt of a weight sync: what the engine holds after it."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    load_s: float
    """Seconds in which the engine took the weights over."""
    verify_s: float
    """Seconds in which digests were computed and compared."""
    in_place: bool = False
    """Whether the engine goes on using the memory of the buckets; until the next sync it must not change."""
    private_bytes: int | None = None
    """Memory of the engine's processes after the load; set by the worker that hosts the engine."""


class EngineError(RuntimeError):
    """An engine failed: the message names engine, phase, policy version, what happened and its last log lines."""


class WeightSyncError(EngineError):
    """The engine does not hold the weights that were sent: names the tensor, both digests and both versions."""


class BroadcastError(EngineError):
    """Weights did not reach another machine: a member of the group died or came too late. Copies can be sent."""


class Engine(Protocol):
    """One rollout engine. Every call has a deadline and raises EngineError when it passes.

    `submit`, `poll` and `abort` may be called by any thread, also while another verb runs; the rest by one at a time.
    """

    def start(self, model_path: Path) -> EngineInfo:
        """Load the model's architecture, tokenizer ids and initial weights; return when generate() may be called."""
        ...

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Queue requests and return at once; they are taken up in the order of submission.

        `tickets` name them, one each, and are used once only. Raises ValueError for a request that can never be served
        (none is queued then) and EngineError if the engine has failed.
        """
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """What has ended since the last poll, each once; waits at most `timeout_s` for the first.

        Raises EngineError if the engine has failed, or if a request took longer than rollout.generate_timeout_s,
        counted from the time it was taken up.
        """
        ...

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished requests among `tickets`, None for all; `poll` returns them with FinishReason.abort.

        Their generations hold the tokens so far, possibly none. Safe to call twice; unknown tickets are ignored.
        """
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Submit `requests`, wait for all; one response each, in their order. For a caller that is alone."""
        # Below zero, where no caller of `submit` has its own.
        tickets = [-1 - position for position in range(len(requests))]
        self.submit(tickets, requests)
        return wait_for(tickets, self.poll, others=[])

    def load_weights(self, buckets: Sequence[WeightBucket]) -> WeightReport:
        """Replace all weights, drop every cache derived from the old ones, verify digests, set the version.

        Allowed while requests are unfinished: sampling pauses, what they have so far is read again with the new
        weights, sampling goes on. Tokens that are there keep their log-probs and versions.
        Raises WeightSyncError naming the tensor if a digest, a name or the version disagrees.
        """
        ...

    def sleep(self) -> None:
        """Give the GPU's memory back; safe to call twice. Weights may be lost: load them again after `wake`."""
        ...

    def wake(self) -> None:
        """Take memory for the weights again; safe to call twice. The next `load_weights` takes that of the cache."""
        ...

    @property
    def sampling_s(self) -> float:
        """Seconds, since it was made, in which the engine had unfinished requests."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine holds, as the engine itself reports it."""
        ...

    def stop(self) -> None:
        """End every process and free every resource; safe to call twice."""
        ...


def wait_for(
    tickets: Sequence[int], poll: Callable[[float], list[Completion]], *, others: list[Completion]
) -> list[Generation]:
    """Poll until all `tickets` have ended; their generations, in this order. What else comes is added to `others`."""
    wanted = set(tickets)
    answers: dict[int, Generation] = {}
    while len(answers) < len(wanted):
        for completion in poll(POLL_S):
            if completion.ticket in wanted:
                answers[completion.ticket] = completion.generation
            else:
                others.append(completion)
    return [answers[ticket] for ticket in tickets]


def continuation(request: GenerateRequest) -> GenerateRequest:
    """`request` as an engine without resumed requests is asked it: what is there belongs to the prompt."""
    begun = request.resumed
    if begun is None:
        return request
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *begun.token_ids],
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(begun.token_ids)),
        resumed=None,
    )


def whole_response(request: GenerateRequest, rest: Generation) -> Generation:
    """The response to `request` of which `rest` was sampled last: what was resumed, then `rest`."""
    begun = request.resumed
    if begun is None:
        return rest
    complete = begun.logprobs is not None and rest.logprobs is not None
    return Generation(
        token_ids=begun.token_ids + rest.token_ids,
        logprobs=[*(begun.logprobs or ()), *(rest.logprobs or ())] if complete else None,
        token_versions=begun.token_versions + rest.token_versions,
        finish_reason=rest.finish_reason,
    )


def aborted(request: GenerateRequest) -> Generation:
    """The answer to a request that was aborted before an engine took it up."""
    nothing = Generation(token_ids=[], logprobs=[], token_versions=[], finish_reason=FinishReason.abort)
    return whole_response(request, nothing)
