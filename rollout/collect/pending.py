"""Groups between submission and admission: their responses, and their state in a checkpoint.

`rollout/collect/collector.py` owns the groups. A group is *ended* when every response has ended, and *scored* when
every valid response has a reward. `pack_groups` and `unpack_groups` turn the groups into JSON values for a checkpoint
and back.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NotRequired, TypedDict

import numpy as np

from rollout.routes import Routes, from_bytes, to_bytes
from rollout.supports import Supports
from rollout.types import FinishReason, GenerateRequest, Generation, Prompt, Sample, SampleGroup


@dataclass(kw_only=True, slots=True)
class PendingResponse:
    """One response of a group, from its request to its reward."""

    request: GenerateRequest
    """The request; `resumed` holds the tokens of an aborted part."""
    since: int = 0
    """Version of the engines' weights at the last submission: no new token can be older."""
    in_flight: bool = False
    """True while an engine has the request."""
    is_stopping: bool = False
    """True if the engine was told to abort the request."""
    generation: Generation | None = None
    """The whole response; None until it has ended."""
    sample: Sample | None = None
    """The response as a sample, if it is valid."""
    is_done: bool = False
    """True if no further event is expected: the response is invalid, or was scored (scoring may have failed)."""

    @property
    def tokens_so_far(self) -> Generation | None:
        """The known part of the response; None before the first token came back."""
        return self.request.resumed if self.generation is None else self.generation

    @property
    def num_tokens(self) -> int:
        """Number of known response tokens, without tokens that the model did not sample."""
        return 0 if self.tokens_so_far is None else self.tokens_so_far.num_sampled


@dataclass(kw_only=True, slots=True)
class PendingGroup:
    """The responses to one prompt."""

    prompt: Prompt
    responses: list[PendingResponse] = field(default_factory=list)
    """Responses in the order of their sample index."""
    is_dropped: bool = False
    """True if responses that still come back are discarded."""
    rank: int = 0
    """Rank among the scored groups, for admission in the order of completion."""

    @property
    def is_scored(self) -> bool:
        return all(response.is_done for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """Number of known response tokens."""
        return sum(response.num_tokens for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version of all known tokens; None without tokens."""
        so_far = [response.tokens_so_far for response in self.responses]
        return min(
            (min(each.token_versions) for each in so_far if each is not None and each.token_versions), default=None
        )

    def valid_samples(self) -> SampleGroup:
        """The valid samples that have a reward, in the order of their index."""
        found = [response.sample for response in self.responses]
        return SampleGroup(prompt=self.prompt, samples=[s for s in found if s is not None and s.reward is not None])


class ResponseState(TypedDict):
    """A response as JSON values."""

    seed: int
    tokens: str
    """[R] int32, little-endian bytes in base64, like `logprobs`."""
    logprobs: str | None
    """[R] float64, encoded like `tokens`; None if the engine returned none."""
    versions: list[list[int]]
    """[version, number of tokens] of every run of equal versions."""
    sampled: NotRequired[str | None]
    """[R] False where a rollout function wrote the token, bool encoded like `tokens`; None or absent: the model sampled
    all."""
    supports: NotRequired[list[str] | None]
    """Sizes [R] and token ids [K] of the supports, encoded like `tokens`; None or absent without truncation."""
    routes: NotRequired[tuple[list[int], bool, str] | None]
    """Shape [N, L, K] of the routes, whether they have weights, and their bytes in base64; None or absent without
    routes."""
    ended: str | None
    """The finish reason; None while the response is unfinished."""
    valid: bool
    """True if the response ended as a sample that can be trained on."""


class GroupState(TypedDict):
    """A group as JSON values."""

    prompt_id: int
    responses: list[ResponseState]


class CollectorState(TypedDict):
    """The state of a collector in a checkpoint, as JSON values."""

    started_step: int
    """The last step whose prompts have been submitted."""
    versions: list[list[int]]
    """[step, policy version at its start] of the last steps."""
    temperature: float
    """Sampling temperature of the tokens."""
    truncation: NotRequired[list[float]]
    """top_p, top_k and min_p of the tokens; absent in older checkpoints, whose tokens have no truncation."""
    groups: list[GroupState]
    """Unfinished groups in the order of submission."""
    counts: NotRequired[dict[str, Any]]
    """What `CollectStats.counts` says of a step that was sampled ahead, else empty; absent in older checkpoints."""


def pack_groups(groups: Iterable[PendingGroup]) -> list[GroupState]:
    """Pack every known prompt, seed and token for a checkpoint. Rewards are computed again after loading."""
    return [
        GroupState(prompt_id=group.prompt.prompt_id, responses=[_pack(response) for response in group.responses])
        for group in groups
    ]


def unpack_groups(
    states: Sequence[GroupState],
    *,
    prompt: Callable[[int], Prompt],
    request: Callable[[Prompt, int, int], GenerateRequest],
    keeps_tokens: bool,
    group_size: int,
) -> list[PendingGroup]:
    """The groups of a checkpoint; no engine has a request of theirs.

    `prompt(prompt_id)` finds a prompt; `request(prompt, sample index, seed)` makes a request. Unless `keeps_tokens`, or
    if a group does not have `group_size` responses, all responses of the group start again from the prompt. So does a
    response with more tokens than the request now allows.
    """
    groups = []
    for state in states:
        found = prompt(state["prompt_id"])
        group = PendingGroup(prompt=found)
        if len(state["responses"]) == group_size:
            for index, packed in enumerate(state["responses"]):
                anew = request(found, index, packed["seed"])
                group.responses.append(_unpack(packed, anew) if keeps_tokens else PendingResponse(request=anew))
        groups.append(group)
    return groups


def _pack(response: PendingResponse) -> ResponseState:
    so_far, ended = response.tokens_so_far, response.generation
    tokens = [] if so_far is None else so_far.token_ids
    logprobs = [] if so_far is None else so_far.logprobs
    versions = [] if so_far is None else so_far.token_versions
    sampled = None if so_far is None else so_far.sampled
    supports = None if so_far is None else so_far.supports
    return ResponseState(
        seed=response.request.sampling.seed,
        tokens=_text(np.asarray(tokens, dtype="<i4")),
        logprobs=None if logprobs is None else _text(np.asarray(logprobs, dtype="<f8")),
        versions=[[version, len(list(run))] for version, run in groupby(versions)],
        sampled=None if sampled is None else _text(np.asarray(sampled, dtype="?")),
        supports=None if supports is None else [_text(supports.sizes), _text(supports.token_ids)],
        routes=None if so_far is None or so_far.routes is None else _packed_routes(so_far.routes),
        ended=None if ended is None else ended.finish_reason.value,
        valid=response.sample is not None,
    )


def _unpack(state: ResponseState, request: GenerateRequest) -> PendingResponse:
    ended, logprobs = state["ended"], state["logprobs"]
    sampled, supports, routes = state.get("sampled"), state.get("supports"), state.get("routes")
    generation = Generation(
        token_ids=_numbers(state["tokens"], "<i4").tolist(),
        logprobs=None if logprobs is None else _numbers(logprobs, "<f8").tolist(),
        token_versions=[version for version, count in state["versions"] for _ in range(count)],
        finish_reason=FinishReason.abort if ended is None else FinishReason(ended),
        sampled=None if sampled is None else _numbers(sampled, "?").tolist(),
        supports=None if supports is None else Supports(*(_numbers(text, "<i4") for text in supports)),
        routes=None if routes is None else _unpacked_routes(*routes),
    )
    room = request.sampling.max_new_tokens - len(generation.token_ids)
    if ended is not None and room >= 0:
        return PendingResponse(request=request, generation=generation, is_done=not state["valid"])
    if ended is None and generation.token_ids and room > 0:
        request.resumed = generation
    return PendingResponse(request=request)


def _packed_routes(routes: Routes) -> tuple[list[int], bool, str]:
    routes = routes.merged()
    return list(routes.whole().shape), bool(routes.weights), base64.b64encode(to_bytes(routes)).decode("ascii")


def _unpacked_routes(shape: list[int], with_weights: bool, text: str) -> Routes:
    return from_bytes(base64.b64decode(text), tuple(shape), with_weights=with_weights)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _numbers(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
