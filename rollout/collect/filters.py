"""Filters: which samples and groups of a round cannot be trained on, and why. Pure predicates, one metric name each.

`rollout/collect/collector.py` applies them: sample filters to what an engine returned, group filters to scored groups.
The order of a table is the order of precedence: a sample or group is counted once, under the first that rejects it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rollout.types import FinishReason, GenerateRequest, Generation, SampleGroup, are_logprobs


class Versions(NamedTuple):
    """Policy versions that can have sampled a token, from the submission of its request to now."""

    oldest: int
    newest: int


class SampleFilter(NamedTuple):
    """One reason for which a response is invalid."""

    name: str
    """Suffix of the metric rollout/samples_dropped/<name>."""
    meaning: str
    """What the user is told when too many are dropped."""
    rejects: Callable[[GenerateRequest, Generation, Versions], bool]
    """Whether a response is invalid for this reason."""


class GroupFilter(NamedTuple):
    """One reason for which a scored group is not trained on."""

    name: str
    """Suffix of the metric rollout/groups_dropped/<name>."""
    rejects: Callable[[SampleGroup], bool]


def is_aborted(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """The engine gave the request up: the response is cut at an arbitrary place."""
    return generation.finish_reason is FinishReason.abort


def is_failed(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """The rollout function of an episode raised, hung or sampled nothing."""
    return generation.finish_reason is FinishReason.failed


def is_wrong_version(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """A new token was sampled from weights that no engine can have held since the request was submitted.

    How old a token may be for training is another question, which the schedule answers: see `TOO_OLD`.
    """
    new = generation.token_versions[_num_resumed(request) :]
    return any(not versions.oldest <= version <= versions.newest for version in set(new))


def is_empty(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """No token at all, not even end-of-sequence."""
    return not generation.token_ids


def is_too_long(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """More tokens than were asked for."""
    return len(generation.token_ids) > request.sampling.max_new_tokens


def has_no_logprobs(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """pi_rollout is unknown, so the mismatch is too."""
    return generation.logprobs is None


def has_wrong_length(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """Tokens cannot be matched with their log-probs or versions."""
    return any(
        values is not None and len(values) != len(generation.token_ids)
        for values in (generation.logprobs, generation.token_versions)
    )


def has_bad_logprob(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """A value that is no log-probability: NaN, infinite or positive."""
    return not are_logprobs(np.array(generation.logprobs or (), dtype=np.float64)).all()


def has_lost_resumed(request: GenerateRequest, generation: Generation, versions: Versions) -> bool:
    """The engine did not go on from the tokens that it was given."""
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
    """The first filter that rejects the generation, or None if it can be trained on.

    `policy_version` is that of the engines' weights now, `oldest_version` when the request was submitted; None if they
    have not changed since.
    """
    versions = Versions(policy_version if oldest_version is None else oldest_version, policy_version)
    for candidate in SAMPLE_FILTERS:
        if candidate.rejects(request, generation, versions):
            return candidate
    return None


def too_small(min_group_size: int) -> GroupFilter:
    """Invalid samples left fewer than `min_group_size`: where the group is the baseline, one has none."""
    return GroupFilter(TOO_SMALL, lambda group: len(group.samples) < min_group_size)


def is_zero_variance(group: SampleGroup) -> bool:
    """All samples are correct, or all are wrong: the group-relative advantage is zero.

    Looks at `correct`, not at the shaped reward, or the noise of a length penalty would keep constant groups
    (DAPO, arXiv:2503.14476, section 3.2). Raises ValueError for a sample that has not been scored.
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
"""Suffix of rollout/groups_dropped/ for groups beyond those that a step needs; nobody looked at their rewards."""
GROUP_DROP_REASONS = (TOO_OLD, TOO_SMALL, ZERO_VARIANCE.name, SURPLUS)
