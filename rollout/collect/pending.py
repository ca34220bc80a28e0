"""Groups between submission and admission: what the engines still owe, and how it survives the end of the process.

Owned by `rollout/collect/collector.py`. A group is *ended* when every response has ended, and *scored* when the reward
of every valid one is there. `pack_groups` and `unpack_groups` turn the groups into JSON values for a checkpoint and
back.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypedDict

import numpy as np

from rollout.types import FinishReason, GenerateRequest, Generation, Prompt, Sample, SampleGroup


@dataclass(kw_only=True, slots=True)
class PendingResponse:
    """One response of a group, from its request to its reward."""

    request: GenerateRequest
    """With the tokens of an aborted part as `resumed`."""
    since: int = 0
    """Version of the engines' weights when it was submitted last: no new token can be older."""
    is_asked: bool = False
    """Whether an engine has it."""
    is_stopping: bool = False
    """Whether the engine was told to abort it."""
    generation: Generation | None = None
    """The whole response, once it has ended by itself."""
    sample: Sample | None = None
    """The same as a sample, if it is valid."""
    is_done: bool = False
    """Whether nothing is expected any more: it is invalid, or was scored (which may have failed)."""

    @property
    def tokens_so_far(self) -> Generation | None:
        """What is known of the response; None before its first token came back."""
        return self.request.resumed if self.generation is None else self.generation

    @property
    def num_tokens(self) -> int:
        """Response tokens that are known, those that the model did not sample left out."""
        return 0 if self.tokens_so_far is None else self.tokens_so_far.num_sampled


@dataclass(kw_only=True, slots=True)
class PendingGroup:
    """The responses to one prompt."""

    prompt: Prompt
    responses: list[PendingResponse] = field(default_factory=list)
    """In the order of their sample index."""
    is_dropped: bool = False
    """Whether what still comes back is thrown away."""
    rank: int = 0
    """Among the groups that were scored, for admission in the order of completion."""

    @property
    def is_scored(self) -> bool:
        return all(response.is_done for response in self.responses)

    @property
    def num_tokens(self) -> int:
        """Response tokens that are known."""
        return sum(response.num_tokens for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """Of all tokens that are known; None without one."""
        known = [response.tokens_so_far for response in self.responses]
        return min(
            (min(each.token_versions) for each in known if each is not None and each.token_versions), default=None
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
    """[R] float64; None if the engine returned none."""
    versions: list[list[int]]
    """[version, number of tokens] of every run of equal versions."""
    ended: str | None
    """The finish reason; None while the response is unfinished."""
    valid: bool
    """Whether it ended as a sample that can be trained on."""


class GroupState(TypedDict):
    """A group as JSON values."""

    prompt_id: int
    responses: list[ResponseState]


class CollectorState(TypedDict):
    """What a checkpoint keeps of a collector, as JSON values."""

    started_step: int
    """The last step whose prompts have been submitted."""
    versions: list[list[int]]
    """[step, policy version at its start] of the last steps."""
    temperature: float
    """At which the tokens were sampled."""
    groups: list[GroupState]
    """Under way, in the order of submission."""


def pack_groups(groups: Iterable[PendingGroup]) -> list[GroupState]:
    """What a checkpoint keeps: every prompt, seed and token that is known. Rewards are computed again."""
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
    """The groups of a checkpoint; nothing of them is at an engine.

    `prompt(prompt_id)` finds a prompt; `request(prompt, sample index, seed)` makes a request. Unless `keeps_tokens`,
    or if the group has not `group_size` responses, all its responses begin again.
    """
    groups = []
    for state in states:
        found = prompt(state["prompt_id"])
        group = PendingGroup(prompt=found)
        if len(state["responses"]) == group_size:
            for index, packed in enumerate(state["responses"]):
                asked = request(found, index, packed["seed"])
                group.responses.append(_unpack(packed, asked) if keeps_tokens else PendingResponse(request=asked))
        groups.append(group)
    return groups


def _pack(response: PendingResponse) -> ResponseState:
    known, ended = response.tokens_so_far, response.generation
    tokens = [] if known is None else known.token_ids
    logprobs = [] if known is None else known.logprobs
    versions = [] if known is None else known.token_versions
    return ResponseState(
        seed=response.request.sampling.seed,
        tokens=_text(np.asarray(tokens, dtype="<i4")),
        logprobs=None if logprobs is None else _text(np.asarray(logprobs, dtype="<f8")),
        versions=[[version, len(list(run))] for version, run in groupby(versions)],
        ended=None if ended is None else ended.finish_reason.value,
        valid=response.sample is not None,
    )


def _unpack(state: ResponseState, request: GenerateRequest) -> PendingResponse:
    ended, logprobs = state["ended"], state["logprobs"]
    generation = Generation(
        token_ids=_numbers(state["tokens"], "<i4").tolist(),
        logprobs=None if logprobs is None else _numbers(logprobs, "<f8").tolist(),
        token_versions=[version for version, count in state["versions"] for _ in range(count)],
        finish_reason=FinishReason.abort if ended is None else FinishReason(ended),
    )
    if ended is not None:
        return PendingResponse(request=request, generation=generation, is_done=not state["valid"])
    if generation.token_ids and len(generation.token_ids) < request.sampling.max_new_tokens:
        request.resumed = generation
    return PendingResponse(request=request)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _numbers(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
