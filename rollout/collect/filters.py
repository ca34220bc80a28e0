"""Filters of the samples and groups that cannot be trained on. Pure predicates, each with a metric name.

`rollout/collect/collector.py` applies them: sample filters to responses of engines, group filters to scored groups. The
order of a table is the order of precedence: a sample or group is counted once, under the first filter that rejects it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rollout.types import FinishReason, GenerateRequest, Generation, SampleGroup, are_logprobs


class Versions(NamedTuple):
    """Policy versions that can have sampled a token, from the submission of its request until now."""

    oldest: int
    newest: int


class SampleFilter(NamedTuple):
    """A reason for which a response is invalid."""

    name: str
    """Suffix of the metric rollout/samples_dropped/<name>."""
    meaning: str
    """Text for the user when too many samples are dropped."""
    rejects: Callable[[GenerateRequest, Generation, Versions], bool]
    """Predicate: True if a response is invalid for this reason."""


class GroupFilter(NamedTuple):
    """A reason for which a scored group is not trained on."""

    name: str
    """Suffix of the metric rollout/groups_dropped/<name>."""
    rejects: Callable[[SampleGroup], bool]


def is_aborted(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if the engine aborted the request: the response is cut at an arbitrary place."""
    return generation.finish_reason is FinishReason.abort


def is_failed(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if the rollout function of the episode raised, hung or sampled no token."""
    return generation.finish_reason is FinishReason.failed


def is_wrong_version(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if a new token was sampled from weights that no engine can have held since the request was submitted.

    The schedule, not this filter, limits the age of tokens for training: see `TOO_OLD`.
    """
    new = generation.token_versions[_num_resumed(request) :]
    return any(not versions.oldest <= version <= versions.newest for version in set(new))


def is_empty(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if the response has no token at all, not even end-of-sequence."""
    return not generation.token_ids


def is_too_long(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if the response has more tokens than requested."""
    return len(generation.token_ids) > request.sampling.max_new_tokens


def has_no_logprobs(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if the engine returned no log-probs: pi_rollout is unknown, so the mismatch is too."""
    return generation.logprobs is None


def has_wrong_length(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if tokens cannot be matched with their log-probs or versions."""
    return any(
        values is not None and len(values) != len(generation.token_ids)
        for values in (generation.logprobs, generation.token_versions)
    )


def has_bad_logprob(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if a value is no log-probability: NaN, infinite or positive."""
    return not are_logprobs(np.array(generation.logprobs or (), dtype=np.float64)).all()


def has_lost_resumed(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """True if the response does not begin with the resumed tokens."""
    begun = request.resumed
    return begun is not None and generation.token_ids[: len(begun.token_ids)] != begun.token_ids


def _num_resumed(request: GenerateRequest) -> int:
    return 0 if request.resumed is None else len(request.resumed.token_ids)


SAMPLE_FILTERS = (
    SampleFilter("abort", "the engine gave the request up", is_aborted),
    SampleFilter("failed", "the rollout function failed", is_failed),
    SampleFilter("wrong_version", "sampled from other weights than the step expects", is_wrong_version),
    SampleFilter("empty", "no token was returned", is_empty),
    SampleFilter("too_long", "more tokens than sampling.max_new_tokens were returned", is_too_long),
    SampleFilter("no_logprobs", "the engine returned no log-probs", has_no_logprobs),
    SampleFilter("wrong_length", "as many log-probs and versions as tokens are needed", has_wrong_length),
    SampleFilter("bad_logprob", "a log-prob was NaN, infinite or positive", has_bad_logprob),
    SampleFilter("lost_resumed", "the response does not begin with the tokens that were resumed", has_lost_resumed),
)


def invalid_reason(
    request: GenerateRequest, generation: Generation, *, policy_version: int, oldest_version: int | None = None
) -> SampleFilter | None:
    """The first filter that rejects the generation, or None if no filter does.

    `policy_version` is the version of the engines' weights now, `oldest_version` the version at the submission of the
    request; None if both are the same.
    """
    versions = Versions(policy_version if oldest_version is None else oldest_version, policy_version)
    for candidate in SAMPLE_FILTERS:
        if candidate.rejects(request, generation, versions):
            return candidate
    return None


def too_small(min_group_size: int) -> GroupFilter:
    """Filter of groups with fewer than `min_group_size` valid samples; a group of one is no baseline."""
    return GroupFilter(TOO_SMALL, lambda group: len(group.samples) < min_group_size)


def is_zero_variance(group: SampleGroup) -> bool:
    """True if all samples are correct, or all are wrong: the group-relative advantage is zero.

    The filter reads `correct`, not the shaped reward: the noise of a length penalty would keep constant groups (DAPO,
    arXiv:2503.14476, section 3.2). Raises ValueError for a sample that has not been scored.
    """
    verdicts = {sample.correct for sample in group.samples}
    if None in verdicts:
        raise ValueError(f"prompt {group.prompt.prompt_id}: a sample has not been scored")
    return len(verdicts) == 1


TOO_SMALL = "too_small"
ZERO_VARIANCE = GroupFilter("zero_variance", is_zero_variance)
TOO_OLD = "too_old"
"""Suffix of rollout/groups_dropped/ for groups with a token of older weights than the schedule allows."""
SURPLUS = "surplus"
"""Suffix of rollout/groups_dropped/ for groups that the step does not need; their rewards are not read."""
GROUP_DROP_REASONS = (TOO_OLD, TOO_SMALL, ZERO_VARIANCE.name, SURPLUS)
