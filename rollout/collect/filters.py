"""The samples and groups that cannot be trained on, each with a reason that names its metric.

`rollout/collect/dispatch.py` asks for the reason of a response, `rollout/collect/collector.py` for that of a scored
group. A sample or group is counted once, under the first reason that applies.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from rollout.types import FinishReason, GenerateRequest, Generation, SampleGroup, are_logprobs


class InvalidReason(Enum):
    """A reason for which a response is invalid, in the order of precedence.

    The name is the suffix of the metric rollout/samples_dropped/<name>, the value a text for the user.
    """

    abort = "the engine gave the request up"
    failed = "the rollout function failed, or no engine could serve the request"
    wrong_version = "sampled from other weights than the step expects"
    empty = "no token was sampled"
    too_long = "more tokens than sampling.max_new_tokens were returned"
    no_logprobs = "the engine returned no log-probs"
    wrong_length = "as many log-probs and versions as tokens are needed"
    bad_logprob = "a log-prob was NaN, infinite or positive"
    lost_resumed = "the response does not begin with the tokens that were resumed"
    bad_routes = "the engine did not return the experts that it chose for every token it read"
    bad_support = "the engine did not return what truncation kept, or a token is not part of it"


def invalid_reason(
    request: GenerateRequest, generation: Generation, *, policy_version: int, oldest_version: int | None = None
) -> InvalidReason | None:
    """The first reason for which the generation is invalid, or None if it is valid.

    `policy_version` is the version of the engines' weights now, `oldest_version` the version at the submission of the
    request; None if both are the same. New tokens may have any version in between: the schedule, not this function,
    limits the age of tokens for training (see `DropReason.too_old`).
    """
    tokens, logprobs, versions = generation.token_ids, generation.logprobs, generation.token_versions
    resumed = [] if request.resumed is None else request.resumed.token_ids
    oldest = policy_version if oldest_version is None else oldest_version
    found: InvalidReason | None = None
    if generation.finish_reason is FinishReason.abort:
        found = InvalidReason.abort
    elif generation.finish_reason is FinishReason.failed:
        found = InvalidReason.failed
    elif any(not oldest <= version <= policy_version for version in set(versions[len(resumed) :])):
        found = InvalidReason.wrong_version
    elif not generation.num_sampled:
        found = InvalidReason.empty
    elif len(tokens) > request.sampling.max_new_tokens:
        found = InvalidReason.too_long
    elif logprobs is None:
        found = InvalidReason.no_logprobs
    elif not len(tokens) == len(logprobs) == len(versions):
        found = InvalidReason.wrong_length
    elif not are_logprobs(np.array(logprobs, dtype=np.float64)).all():
        found = InvalidReason.bad_logprob
    elif tokens[: len(resumed)] != resumed:
        found = InvalidReason.lost_resumed
    elif request.sampling.with_supports and not _has_supports(generation):
        found = InvalidReason.bad_support
    elif request.sampling.with_routes and not _has_routes(request, generation):
        found = InvalidReason.bad_routes
    return found


def _has_routes(request: GenerateRequest, generation: Generation) -> bool:
    """True if every token of prompt and response but the last sampled one, and those shown after it, has a route."""
    known = request.first_route + (0 if generation.routes is None else len(generation.routes))
    return known >= len(request.prompt_token_ids) + _last_sampled(generation)


def _last_sampled(generation: Generation) -> int:
    """Index of the last token of the response that the model sampled."""
    last = len(generation.token_ids) - 1
    return last if generation.sampled is None else last - generation.sampled[::-1].index(True)


def _has_supports(generation: Generation) -> bool:
    """True if every sampled token, and no other one, has a support and is in it."""
    if generation.supports is None:
        return False
    count = len(generation.token_ids)
    sampled = np.ones(count, np.bool_) if generation.sampled is None else np.array(generation.sampled)
    return not generation.supports.problem(generation.token_ids, sampled)


class DropReason(Enum):
    """A reason for which a group is not trained on; the suffix of the metric rollout/groups_dropped/<name>."""

    too_old = "too_old"
    """The group has a token of older weights than the schedule allows."""
    too_small = "too_small"
    """The group has fewer valid samples than an advantage needs; a group of one is no baseline."""
    zero_variance = "zero_variance"
    """All samples are correct, or all are wrong."""
    filtered = "filtered"
    """collect.filter does not keep the group."""
    surplus = "surplus"
    """The step does not need the group; its rewards are not read."""


def is_zero_variance(group: SampleGroup) -> bool:
    """True if all samples are correct, or all are wrong: the group-relative advantage is zero.

    The filter reads `correct`, not the shaped reward: the noise of a length penalty would keep constant groups (DAPO,
    arXiv:2503.14476, section 3.2). Raises ValueError for a sample that has not been scored.
    """
    verdicts = {sample.correct for sample in group.samples}
    if None in verdicts:
        raise ValueError(f"prompt {group.prompt.prompt_id}: a sample has not been scored")
    return len(verdicts) == 1
