"""The Engine protocol: the calls of a rollout worker to its engine, the same for every kind of engine.

An engine is a generator with a queue: the caller submits requests, the engine samples responses in the background, and
the caller polls for finished responses. Weights may be replaced meanwhile; every token carries the policy version that
sampled it.
`rollout/sglang/engine.py` (a real SGLang server over HTTP), `rollout/torch/engine.py` (embedded transformers) and
`rollout/vllm/engine.py` (embedded vLLM) implement the protocol; `rollout/group/worker.py` hosts one engine in a Ray
actor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rollout.config import EngineConfig, Routing
from rollout.routes import joined as join_routes
from rollout.supports import joined
from rollout.types import (
    AdapterSpec,
    Completion,
    FinishReason,
    GenerateRequest,
    Generation,
    PackedWeights,
    WeightLayout,
)

POLL_S = 5.0
"""Seconds of one poll of a caller that has no other work."""
ABORT_TIMEOUT_S = 20.0
"""Seconds after which an engine gives an aborted request up that has not ended, without its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNeeds:
    """What a run needs of an engine that it starts, besides the user's settings."""

    sleeps: bool = False
    """True if the engine must be able to free its GPU's memory."""
    cache_tokens: int | None = None
    """Tokens that the engine must be able to hold, because the one before it could; None leaves it to the engine."""
    adapter: AdapterSpec | None = None
    """The adapter that the engine gets beside the weights; None if it gets all weights."""
    routes: Routing = Routing.live
    """What the engine must be able to return of routes."""
    num_requests: int = 0
    """Most requests that the engine has at a time, if all engines get as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup(EngineNeeds):
    """Settings with which a worker starts its engine."""

    config: EngineConfig
    index: int
    """Index of the engine, 0 .. num_engines - 1."""
    seed: int
    """Run seed; engines derive distinct seeds from the run seed and `index`."""
    device: str
    """Device of the engine: "cpu" or "cuda"."""
    num_threads: int
    """Number of compute threads of the engine on a CPU."""
    log_dir: Path
    """Directory of the server's log file and of the file of stacks."""
    model_path: Path
    gpus: tuple[str, ...] = ()
    """GPUs of the engine, as CUDA names them on this machine; Ray shows the worker only the first of those that are
    shared with ranks. Empty on a CPU."""


@dataclass(kw_only=True, slots=True)
class EngineInfo:
    """Description of a ready engine."""

    name: str
    """Name and version of the engine: "sglang 0.5.23" or "torch 2.13.0"."""
    address: str
    """URL of the server, or "embedded"."""
    pids: tuple[int, ...]
    """Process ids that must be gone after stop()."""
    start_s: float
    """Seconds from start() to ready."""
    cache_tokens: int | None = None
    """Tokens whose keys and values the engine can hold; None if it does not say."""
    layout: WeightLayout | None = None
    """How the engine holds the weights; None if it verifies them without digests of its own."""


@dataclass(kw_only=True, slots=True)
class WeightReport:
    """The receipt of a weight sync: the weights that the engine holds afterwards, and the time spent."""

    policy_version: int
    num_tensors: int
    num_bytes: int
    load_s: float
    """Seconds in which the engine loaded the weights."""
    verify_s: float
    """Seconds in which digests were computed and compared."""
    in_place: bool = False
    """True if the engine continues to use the memory of the sent weights, which must not change until the next sync."""
    private_bytes: int | None = None
    """Private bytes of the engine's processes after the load; set by the worker that hosts the engine."""


class EngineError(RuntimeError):
    """An engine failed: the message names engine, phase, policy version, the failure and the last log lines."""


class WeightSyncError(EngineError):
    """The engine does not hold the sent weights: the message names the tensor, both digests and both versions."""


class LayoutError(ValueError):
    """The tensors that are sent cannot make up what the engine holds."""


class Engine(Protocol):
    """One rollout engine. Every call has a deadline and raises EngineError when the deadline passes.

    Any thread may call `submit`, `poll` and `abort`, also while another method runs; only one thread at a time may call
    the other methods.
    """

    def start(self, model_path: Path) -> EngineInfo:
        """Load the model's architecture, tokenizer ids and initial weights; return when generate() may be called."""
        ...

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        """Queue requests and return at once; the engine serves requests in the order of submission.

        `tickets` holds one unique number per request, never used twice. Raises ValueError for a request that can never
        be served (no request is queued then) and EngineError if the engine has failed.
        """
        ...

    def poll(self, timeout_s: float) -> list[Completion]:
        """Completions since the last poll, each returned once; waits at most `timeout_s` for the first completion.

        Raises EngineError if the engine has failed, or if a request took longer than rollout.generate_timeout_s,
        counted from the moment the engine began to process the request.
        """
        ...

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished requests among `tickets` (None: all requests).

        `poll` returns the aborted requests with FinishReason.abort and the tokens so far, possibly none. Safe to call
        twice; unknown tickets are ignored.
        """
        ...

    def give_back(self, count: int) -> list[int]:
        """Give up to `count` requests back that the engine has not begun, the last ones -> their tickets.

        `poll` does not return them. By default an engine keeps its requests: where the batch decides how a sample
        rounds, a run is the same again only if every engine gets the same requests.
        """
        return []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Submit `requests` and wait -> one response per request, in order. Only for an engine with a single caller."""
        # Negative tickets, because callers of `submit` use tickets >= 0.
        tickets = [-1 - position for position in range(len(requests))]
        self.submit(tickets, requests)
        return wait_for(tickets, self.poll, others=[])

    def load_weights(self, weights: PackedWeights) -> WeightReport:
        """Replace all weights, drop every cache derived from the old weights, verify digests, set the version.

        Allowed while requests are unfinished: sampling pauses, the engine computes the tokens so far again with the new
        weights, and sampling continues. Tokens sampled before keep their log-probs and versions.
        Raises WeightSyncError naming the tensor if a digest, a name or the version disagrees.
        """
        ...

    def sleep(self) -> None:
        """Free the GPU's memory; safe to call twice. Weights may be lost: load them again after `wake`."""
        ...

    def wake(self) -> None:
        """Allocate memory for the weights; safe to call twice. The next `load_weights` allocates the KV cache."""
        ...

    def start_profile(self, directory: Path) -> None:
        """Record what the engine computes until `stop_profile`, which writes traces <name>.json.gz to `directory`."""
        ...

    def stop_profile(self) -> None:
        """Write the traces; nothing happens if nothing is recorded, as in an engine that was started meanwhile."""
        ...

    @property
    def sampling_s(self) -> float:
        """Seconds with unfinished requests since the engine was created."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the engine's weights, as the engine itself reports it."""
        ...

    def stop(self) -> None:
        """End every process and free every resource; safe to call twice."""
        ...


def wait_for(
    tickets: Sequence[int], poll: Callable[[float], list[Completion]], *, others: list[Completion]
) -> list[Generation]:
    """Poll until all `tickets` have ended -> their generations in order; appends other completions to `others`."""
    wanted = set(tickets)
    answers: dict[int, Generation] = {}
    while len(answers) < len(wanted):
        for completion in poll(POLL_S):
            if completion.ticket in wanted:
                answers[completion.ticket] = completion.generation
            else:
                others.append(completion)
    return [answers[ticket] for ticket in tickets]


def request_problem(request: GenerateRequest, *, vocab_size: int, context_length: int) -> str:
    """Reason why an engine can never serve the request; "" if there is none."""
    sampling = request.sampling
    begun = [] if request.resumed is None else request.resumed.token_ids
    given = request.prompt_token_ids + begun
    if sampling.temperature < 0 or sampling.max_new_tokens < 1:
        return (
            f"temperature must be >= 0 and max_new_tokens >= 1, got {sampling.temperature} and "
            f"{sampling.max_new_tokens}"
        )
    if not request.prompt_token_ids:
        return "the prompt has no tokens"
    if not 0 <= min(given) <= max(given) < vocab_size:
        return f"the prompt has token ids outside 0..{vocab_size - 1}"
    if len(begun) >= sampling.max_new_tokens:
        return f"{len(begun)} resumed tokens leave none of max_new_tokens={sampling.max_new_tokens}"
    if len(request.prompt_token_ids) + sampling.max_new_tokens > context_length:
        return (
            f"{len(request.prompt_token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} exceed the "
            f"engine's context of {context_length} tokens"
        )
    return ""


def continuation(request: GenerateRequest) -> GenerateRequest:
    """`request` for an engine that cannot resume: the resumed tokens become the end of the prompt."""
    begun = request.resumed
    if begun is None:
        return request
    return replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *begun.token_ids],
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(begun.token_ids)),
        resumed=None,
        first_route=request.first_new_route,
    )


def whole_response(request: GenerateRequest, rest: Generation) -> Generation:
    """The whole response to `request`: the resumed tokens, then `rest`, the tokens sampled last."""
    begun = request.resumed
    if begun is None:
        return rest
    complete = begun.logprobs is not None and rest.logprobs is not None
    return Generation(
        token_ids=begun.token_ids + rest.token_ids,
        logprobs=[*(begun.logprobs or ()), *(rest.logprobs or ())] if complete else None,
        token_versions=begun.token_versions + rest.token_versions,
        finish_reason=rest.finish_reason,
        shared_prompt_tokens=min(rest.shared_prompt_tokens, len(request.prompt_token_ids)),
        supports=joined([begun.supports_or_empty, rest.supports_or_empty]) if request.sampling.with_supports else None,
        routes=join_routes([begun.routes, rest.routes]) if request.sampling.with_routes else None,
    )


def aborted(request: GenerateRequest) -> Generation:
    """The answer to a request that was aborted before an engine began to process it."""
    return _nothing_new(request, FinishReason.abort)


def given_up(request: GenerateRequest) -> Generation:
    """The answer to a request that no engine can serve: the collector drops its sample."""
    return _nothing_new(request, FinishReason.failed)


def _nothing_new(request: GenerateRequest, reason: FinishReason) -> Generation:
    nothing = Generation(token_ids=[], logprobs=[], token_versions=[], finish_reason=reason)
    return whole_response(request, nothing)
